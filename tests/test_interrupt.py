"""Builds that are killed or interrupted: the same command again ends with the bytes of an uninterrupted run, and nothing is left."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from build_data import Recorder, Tree, differences, pack_command, run_build, tree
from conftest import picture, save
from recipes.robustness.processes import Session

TIMEOUT_S = 60
TABLES = {"output": {"shard_samples": 2, "image": "png"}, "transform": {"resize": "700x500"}}
OPTIONS = ["--shard-samples", "2", "--image", "png", "--resize", "700x500"]
Large = tuple[Path, Tree]


@pytest.mark.parametrize(("scenario", "step"), [("Fresh", 17), ("Overwrite", 19), ("RestoreAll", 23)])
def test_killed_at_some_moments(scenario: str, step: int, make_voc: Callable[..., Path]) -> None:
    kill_at_every(scenario, step, make_voc)


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["Fresh", "FreshMemmap", "OtherPlan", "Overwrite", "Restore", "RestoreAll"])
def test_killed_at_many_moments(scenario: str, make_voc: Callable[..., Path]) -> None:
    kill_at_every(scenario, 8, make_voc)


def kill_at_every(scenario: str, step: int, make_voc: Callable[..., Path]) -> None:
    folder = make_voc(10).parent
    program = Path(__file__).parent / "kill_moments.py"
    done = subprocess.run([sys.executable, str(program), scenario, str(folder), str(step)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["failures"] == []
    assert result["moments"] > 60
    assert result["foreign"] >= 3


class Running(Session):
    """A command (``pack`` and its arguments) in a session of its own, with an empty folder as TMPDIR."""

    def __init__(self, tmp_path: Path, command: list[str]) -> None:
        self.temp = tmp_path / "temp"
        self.temp.mkdir()
        tests = Path(__file__).parent
        env = {**os.environ, "PYTHONPATH": f"{tests.parent}:{tests}", "TMPDIR": str(self.temp)}
        super().__init__(
            subprocess.Popen(command, start_new_session=True, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=env)
        )

    def deaf(self, pid: int) -> bool:
        """Whether a process blocks SIGINT and SIGTERM."""
        [line] = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigBlk:")]
        mask = int(line.split()[1], 16)
        return all(mask >> (number - 1) & 1 for number in (signal.SIGINT, signal.SIGTERM))

    def until(self, condition: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + TIMEOUT_S
        while not condition():
            assert time.monotonic() < end, f"waited in vain until {what}"
            time.sleep(0.005)

    def finish(self) -> str:
        """Its stderr, when all processes of the session have ended."""
        _, text = self.process.communicate(timeout=TIMEOUT_S)
        self.until(lambda: not self.group(), "no process is left")
        assert "Traceback" not in text, text
        return text


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    started: list[Running] = []

    def start(*args: object) -> Running:
        started.append(Running(tmp_path, pack_command(*args) if args[0] != "-c" else [sys.executable, *map(str, args)]))
        return started[-1]

    yield start
    for one in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(one.process.pid, signal.SIGKILL)
        one.process.wait()


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Large:
    """Enough work to be interrupted in its middle: the source, and the packed tree."""
    root = tmp_path_factory.mktemp("large")
    for i in range(30):
        save(root / "src" / ("a", "b")[i % 2] / f"p{i:02d}.png", picture(256, 200, i))
    assert run_build(root / "src", root / "out", **TABLES).ok
    return root / "src", tree(root / "out")


def records(out: Path) -> int:
    return sum(not path.name.startswith("tmp-") for path in (out / ".partial").glob("*.record"))


def test_kill_in_the_middle(large: Large, running: Callable[..., Running], tmp_path: Path) -> None:
    src, expected = large
    out = tmp_path / "out"
    build = running("build", src, out, *OPTIONS, "--workers", 2)
    build.until(lambda: records(out) >= 2, "two shards are done")
    # A signal of the terminal goes to all of the group: only the main process listens, so the others must not die of it noisily.
    server = build.group()[build.workers()[0]]
    assert [build.deaf(pid) for pid in (build.process.pid, server, *build.workers())] == [False, True, True, True]
    build.process.kill()
    build.finish()  # the workers and the fork server end by themselves
    assert list(build.temp.iterdir()) == []
    assert not (out / "manifest.json").exists()
    kept = records(out)
    console = Recorder()
    assert run_build(src, out, console, **TABLES).ok
    assert f"{kept} of 15 shards were already there from an earlier run" in console.said
    assert differences(tree(out), expected) == []


ENDLESS = """
from packer.engines.local import LocalEngine
from test_engine_local import describe, ignore, sleep_long
list(LocalEngine(2).map(sleep_long, 1000.0, [1, 1], describe=describe, on_progress=ignore))
"""


def test_workers_die_with_a_killed_build(running: Callable[..., Running]) -> None:
    """At once, in the middle of their work: an orphan would write beside the next build."""
    engine = running("-c", ENDLESS)
    engine.until(lambda: len(engine.workers()) == 2, "both workers are there")
    engine.process.kill()
    engine.finish()


@pytest.mark.slow
def test_killed_worker(large: Large, running: Callable[..., Running], tmp_path: Path) -> None:
    src, expected = large
    out = tmp_path / "out"
    build = running("build", src, out, *OPTIONS, "--workers", 2)
    build.until(lambda: records(out) >= 1 and len(build.workers()) == 2, "workers work")
    os.kill(build.workers()[1], signal.SIGKILL)
    text = build.finish()
    assert build.process.returncode == 1
    assert "a worker process died (signal 9) while working on " in text
    at = r"(\.png|the end of the train shard of .*\.png to .*\.png)"
    assert re.search(at + ": probably killed for lack of memory; use fewer --workers; finished shards are kept", text)
    assert run_build(src, out, **TABLES).ok
    assert differences(tree(out), expected) == []


@pytest.mark.parametrize(
    ("number", "workers"),
    [
        (signal.SIGINT, "2"),
        pytest.param(signal.SIGTERM, "2", marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, "1", marks=pytest.mark.slow),
    ],
)
def test_interrupted(
    number: signal.Signals,
    workers: str,
    large: Large,
    running: Callable[..., Running],
    tmp_path: Path,
) -> None:
    src, expected = large
    out = tmp_path / "out"
    build = running("build", src, out, *OPTIONS, "--workers", workers)
    build.until(lambda: records(out) >= 1, "a shard is done")
    os.killpg(build.process.pid, number)  # as a terminal does it: to all processes at once
    text = build.finish()
    assert build.process.returncode == 1
    assert text.rstrip().endswith("error: interrupted; what is finished is kept: the same command again goes on from there")
    assert [p.name for p in out.iterdir()] == [".partial"]
    assert list(build.temp.iterdir()) == []
    assert run_build(src, out, **TABLES).ok
    assert differences(tree(out), expected) == []


def test_interrupted_before_anything_is_imported(tmp_path: Path) -> None:
    """Ctrl-C while the command line is being imported ends the process and prints nothing."""
    (tmp_path / "click.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")  # the first import there
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path(__file__).parent.parent)])}
    command = [sys.executable, "-m", "packer.start", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env, stdin=subprocess.DEVNULL)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_the_command_begins_where_ctrl_c_is_quiet() -> None:
    command = [sys.executable, "-m", "packer.start", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=Path(__file__).parent.parent, stdin=subprocess.DEVNULL)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


def test_interrupted_while_workers_start(large: Large, running: Callable[..., Running], tmp_path: Path) -> None:
    src, _ = large
    out = tmp_path / "out"
    build = running("build", src, out, *OPTIONS, "--workers", 2)
    build.until(lambda: len(build.group()) > 1, "the first other process is there")
    os.killpg(build.process.pid, signal.SIGINT)
    text = build.finish()
    assert build.process.returncode == 1
    assert "error: interrupted" in text
    assert list(build.temp.iterdir()) == []
