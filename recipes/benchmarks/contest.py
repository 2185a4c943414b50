"""The measuring side: contestants in processes of their own, one of them running at a time, in rounds, so that a slow minute hits all."""

from __future__ import annotations

import contextlib
import json
import os
import select
import statistics
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

HERE = Path(__file__).parent
Role = Literal["ours", "peer", "ceiling"]
SAMPLE_S = 0.05
ANSWER_S = 900.0
"""Longest wait for one answer: FFCV compiles at first, and a checked epoch looks at every byte."""
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Contestant:
    """One way to load a workload's batches.

    `script` and `builder`: see `protocol.serve`. `venv`: "main" is the interpreter that runs this. `target`: our rate divided by this one's
    should be at least that. `picture_bytes`: size of a picture where the share of it that is read matters, which should be `read_target` at
    most. `exact`: its pixels are ours, so the sums must be equal; `whole`: it gives each sample once an epoch.
    """

    name: str
    script: str
    builder: str
    arguments: Mapping[str, Any]
    role: Role = "peer"
    venv: str = "main"
    environment: Mapping[str, str] = field(default_factory=dict)
    target: float | None = None
    picture_bytes: float | None = None
    read_target: float | None = None
    exact: bool = False
    whole: bool = True
    note: str = ""


@dataclass
class Result:
    """What was measured of one contestant: images per second and images per processor second, a round each; memory above its imports."""

    contestant: Contestant
    rates: list[float] = field(default_factory=list)
    per_cpu_s: list[float] = field(default_factory=list)
    peak_mb: float = 0.0
    read_bytes: float = 0.0  # asked of the system, a sample
    checked: dict[str, Any] = field(default_factory=dict)
    failure: str = ""


class Process:
    """A running contestant. Memory and processor time are those of its whole process tree."""

    def __init__(self, contestant: Contestant, python: Path, log: Path) -> None:
        self.contestant = contestant
        self._log = log
        command: list[str | Path] = [python, HERE / contestant.script, contestant.builder, json.dumps(dict(contestant.arguments))]
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, **contestant.environment},
                cwd=HERE,
            )
        self._answer()
        self._imports_mb = self.memory_mb()
        self.ask("build")

    def ask(self, line: str) -> dict[str, Any]:
        """Send a line and wait for the answer.

        Raises:
            RuntimeError: the process ended instead, with the end of what it wrote to stderr; or it does not answer.
        """
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the answer, which will not come, says why
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], ANSWER_S)[0]:
            self._process.kill()
            self.close()
            raise RuntimeError(f"{self.contestant.name}: no answer in {ANSWER_S:g} s; see {self._log}")
        line = self._process.stdout.readline()  # answers are single lines: none is left in the buffer
        if not line:
            self.close()
            said = [text for text in self._log.read_text("utf-8", "replace").splitlines() if text.strip()]
            raise RuntimeError(
                f"{self.contestant.name}: ended with {self._process.returncode}: {' / '.join(said[-3:])[-500:]}; see {self._log}"
            )
        answer: dict[str, Any] = json.loads(line)
        return answer

    def pids(self) -> list[int]:
        """The process and everything below it."""
        children: dict[int, list[int]] = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            fields = _stat(stat)
            if fields:
                children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
        found = [self._process.pid]
        for pid in found:
            found.extend(children.get(pid, []))
        return found

    def cpu_s(self) -> float:
        """Processor seconds so far, ended and reaped children included."""
        rows = [_stat(Path(f"/proc/{pid}/stat")) for pid in self.pids()]
        return sum(sum(map(int, row[11:15])) for row in rows if row) * TICK_S

    def bytes_read(self) -> int:
        """Bytes that it asked the system to read so far, also from the page cache; pages of a memory map are not among them."""
        total = 0
        for pid in self.pids():
            try:
                text = Path(f"/proc/{pid}/io").read_text("ascii")
            except OSError:
                continue  # it ended meanwhile
            total += int(text.split()[1])
        return total

    def memory_mb(self) -> float:
        """MB (10^6 bytes) of anonymous and shared memory; pages that several processes share count once, pages of files do not."""
        total = 0
        for pid in self.pids():
            try:
                text = Path(f"/proc/{pid}/smaps_rollup").read_text("ascii")
            except OSError:
                continue  # it ended meanwhile
            total += sum(int(line.split()[1]) for line in text.splitlines() if line.startswith(("Pss_Anon:", "Pss_Shmem:")))
        return total * 1024 / 1e6

    def peak_mb(self, line: str) -> tuple[dict[str, Any], float]:
        """The answer to `line`, with the largest memory while it was waited for, above what the imports alone take."""
        peak, done = 0.0, threading.Event()

        def watch() -> None:
            nonlocal peak
            while not done.wait(SAMPLE_S):
                peak = max(peak, self.memory_mb())

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            answer = self.ask(line)
        finally:
            done.set()
            watcher.join()
        return answer, max(0.0, max(peak, self.memory_mb()) - self._imports_mb)

    def close(self) -> None:
        """End it, with what it has started. Safe to call again."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


def _stat(path: Path) -> list[str]:
    """Fields of a /proc stat line from the state on; empty when the process is gone."""
    try:
        return path.read_text("utf-8", "replace").rpartition(")")[2].split()
    except OSError:
        return []


def measure(contestants: Sequence[Contestant], pythons: Mapping[str, Path], logs: Path, rounds: int, seconds: float) -> list[Result]:
    """Start all contestants, warm each up by a checked epoch, then `rounds` rounds of `seconds` each, in turn.

    One that cannot be started or fails is reported in its `Result.failure`; ours must not.

    Raises:
        RuntimeError: ours failed, or what a contestant delivers is not what it should be.
    """
    results = [Result(c) for c in contestants]
    running: list[tuple[Result, Process]] = []
    try:
        for number, result in enumerate(results):
            try:
                process = Process(
                    result.contestant, pythons[result.contestant.venv], logs / f"{number:02d}-{result.contestant.builder}.log"
                )
                running.append((result, process))
                result.checked = process.ask("check")
                process.ask("run 0")  # what is compiled or filled at first
            except RuntimeError as e:
                _failed(result, e)
        for result, process in running:
            if result.failure:
                process.close()
        running = [(result, process) for result, process in running if not result.failure]
        compare([result for result, _ in running])
        for number in range(rounds):
            for result, process in running if number % 2 == 0 else running[::-1]:
                _round(result, process, seconds)
        for result, process in running:
            _, result.peak_mb = process.peak_mb("run 0.5")
    finally:
        for _, process in running:
            process.close()
    return results


def _failed(result: Result, error: RuntimeError) -> None:
    if result.contestant.role == "ours":
        raise error
    result.failure = str(error)


def _round(result: Result, process: Process, seconds: float) -> None:
    cpu, read = process.cpu_s(), process.bytes_read()
    answer = process.ask(f"run {seconds}")
    cpu, read = process.cpu_s() - cpu, process.bytes_read() - read
    result.rates.append(answer["samples"] / answer["seconds"])
    result.per_cpu_s.append(answer["samples"] / max(cpu, TICK_S))
    result.read_bytes = read / answer["samples"]


def compare(results: Sequence[Result]) -> None:
    """Every contestant must give all samples, in pictures of one size; where pixels must agree, they do.

    Raises:
        RuntimeError: one does not.
    """
    ours = next((r for r in results if r.contestant.role == "ours"), None)
    for result in results:
        if ours is None or result is ours:
            continue
        name, got, want = result.contestant.name, result.checked, ours.checked
        if sorted(got["shape"]) != sorted(want["shape"]) or got["dtype"] != want["dtype"]:
            raise RuntimeError(f"{name} gives {got['dtype']} {got['shape']}, ours {want['dtype']} {want['shape']}")
        names = ["samples", "labels"] if result.contestant.whole else []
        if result.contestant.exact:
            names += ["pixels", "extra"]
        for what in names:
            if got[what] != want[what]:
                raise RuntimeError(f"{name}: {what} of an epoch add up to {got[what]}, ours to {want[what]}")


def ratios(ours: Result, other: Result) -> tuple[float, float, float]:
    """Our rate divided by the other's, round by round: median, lowest, highest."""
    values = [a / b for a, b in zip(ours.rates, other.rates, strict=True)]
    return statistics.median(values), min(values), max(values)


def load_average() -> float:
    return os.getloadavg()[0]


def wait_until_quiet(limit: float, seconds: float) -> float:
    """Wait up to `seconds` for a load average of at most `limit`; the load average then."""
    deadline = time.monotonic() + seconds
    while load_average() > limit and time.monotonic() < deadline:
        time.sleep(2)
    return load_average()
