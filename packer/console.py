"""Speaks to the user: plain lines and findings on stderr, and a progress bar where there is a terminal."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

LINE_EVERY_S = 5.0


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text(f"{speed:,.0f} img/s" if speed else "", style="progress.data.speed")


class Terminal:
    """A `packer.build.Console`. Under `quiet` only findings and errors are said."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._rich = RichConsole(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)

    def say(self, text: str) -> None:
        if not self._quiet:
            self._print(text)

    def finding(self, text: str) -> None:
        self._print(text)

    def _print(self, text: str) -> None:
        # A name may hold what the terminal's encoding cannot say.
        encoding = self._rich.encoding or "utf-8"
        self._rich.print(text.encode(encoding, "backslashreplace").decode(encoding))

    @contextlib.contextmanager
    def progress(self, title: str, total: int) -> Iterator[Callable[[int], None]]:
        if self._quiet:
            yield lambda _: None
        elif self._rich.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), _Rate(), TimeRemainingColumn())
            with Progress(*columns, console=self._rich, transient=True) as bar:
                task = bar.add_task(title, total=total)
                yield lambda n: bar.advance(task, n)
        else:
            yield _Lines(title, total).advance

    @contextlib.contextmanager
    def status(self) -> Iterator[Callable[[str], None]]:
        """Says what is being done: one line that changes on a terminal, else a line every few seconds."""
        if self._quiet:
            yield lambda _: None
        elif self._rich.is_terminal:
            with self._rich.status("") as line:
                yield line.update
        else:
            last = -LINE_EVERY_S

            def say(text: str) -> None:
                nonlocal last
                if time.monotonic() - last >= LINE_EVERY_S:
                    last = time.monotonic()
                    self._print(text)

            yield say


class _Lines:
    """Progress where there is no terminal: a line every few seconds, none for short work."""

    def __init__(self, title: str, total: int) -> None:
        self._title, self._total, self._done = title, total, 0
        self._start = self._last = time.monotonic()

    def advance(self, n: int) -> None:
        self._done += n
        now = time.monotonic()
        if now - self._last < LINE_EVERY_S:
            return
        self._last = now
        rate = self._done / (now - self._start)
        left = f", about {(self._total - self._done) / rate:,.0f} s left" if rate > 0 else ""
        sys.stderr.write(f"{self._title}: {self._done:,} of {self._total:,}, {rate:,.0f} img/s{left}\n")
