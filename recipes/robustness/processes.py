"""A `pack` command in a session of its own, watched and killed from outside. Every wait has a bound."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

BOUND_S = 120.0
POLL_S = 0.002


class Hang(RuntimeError):
    """Something did not happen within `BOUND_S`."""


class Session:
    """A process that leads a session of its own (``start_new_session=True``), and the processes that it starts."""

    def __init__(self, process: subprocess.Popen[Any]) -> None:
        self.process = process

    def group(self) -> dict[int, int]:
        """Process id -> parent's, of all living processes of the session."""
        found = {}
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                with contextlib.suppress(OSError):
                    state, parent, group = (folder / "stat").read_text().rpartition(")")[2].split()[:3]
                    if int(group) == self.process.pid and state != "Z":
                        found[int(folder.name)] = int(parent)
        return found

    def workers(self) -> list[int]:
        """Process ids of the workers: children of the fork server, which is a child of the command."""
        group = self.group()
        return sorted(pid for pid, parent in group.items() if group.get(parent) == self.process.pid)


class Command(Session):
    """``pack ARGS``, started at once. `temp` becomes its TMPDIR, and holds what it says."""

    def __init__(self, temp: Path, *args: object, cwd: Path | None = None) -> None:
        self.args = [str(a) for a in args]
        self.temp = temp / "tmp"
        self.temp.mkdir(parents=True, exist_ok=True)
        self._said = temp / "said.txt"
        self.started = time.monotonic()
        with self._said.open("wb") as said:
            process = subprocess.Popen(
                [sys.executable, "-m", "packer.cli", *self.args],
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                cwd=cwd,
                env={**os.environ, "TMPDIR": str(self.temp)},
            )
        super().__init__(process)

    @property
    def said(self) -> str:
        return self._said.read_text("utf-8", "backslashreplace")

    def ended(self) -> bool:
        return self.process.poll() is not None

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for a condition.

        Raises:
            Hang: it did not come within `BOUND_S`. All processes of the session were killed.
        """
        end = time.monotonic() + BOUND_S
        while not condition():
            if time.monotonic() > end:
                self.kill_all()
                raise Hang(f"waited in vain until {what}: pack {' '.join(self.args)}\n{self.said}")
            time.sleep(POLL_S)

    def finish(self) -> int:
        """The exit status, when every process of the session has ended."""
        self.until(self.ended, "the command ends")
        self.until(lambda: not self.group(), "no process is left")
        return int(self.process.returncode)

    def kill_all(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
