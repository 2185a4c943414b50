"""Worker processes: the contract of engines, and what becomes of processes that die, hang or are no longer wanted."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from engine_contract import EngineContract, describe, ignore, process_of, square
from packer.engines import ENGINES, Tick, open_engine
from packer.engines.local import LocalEngine, explain
from packer.sample import PackError


def die(context: int, task: int, tick: Tick) -> int:
    tick(task + 10)
    if task == 2:
        os.kill(os.getpid(), context)
    return task


def leave(context: int, task: int, tick: Tick) -> int:
    tick(0)
    if task == 2:
        os._exit(context)
    return task


def sleep_long(context: float, task: int, tick: Tick) -> int:
    tick(0)
    if task:
        time.sleep(context)
    return task


def mask(context: Any, task: int, tick: Tick) -> set[int]:  # noqa: ARG001  (an engine's function)
    return set(signal.pthread_sigmask(signal.SIG_BLOCK, []))


class TestContract(EngineContract):
    make = LocalEngine


def test_table_opens_it() -> None:
    assert isinstance(open_engine("local", 2), LocalEngine)
    assert set(ENGINES) == {"local"}


def test_one_worker_or_one_task_stays_in_this_process() -> None:
    for engine, tasks in ((LocalEngine(1), [1, 2, 3]), (LocalEngine(4), [1])):
        found = dict(engine.map(process_of, None, tasks, describe=describe, on_progress=ignore))
        assert {pid for _, pid in found.values()} == {os.getpid()}


def test_no_more_workers_than_tasks() -> None:
    found = dict(LocalEngine(8).map(process_of, None, [1, 2], describe=describe, on_progress=ignore))
    assert os.getpid() not in {pid for _, pid in found.values()}
    assert len(found) == 2


def test_killed_worker_is_named_with_its_work() -> None:
    message = (
        r"^a worker process died \(signal 9\) while working on task 2 at 12: probably killed for lack of memory; use fewer --workers; "
        r"finished shards are kept, run the same command again$"
    )
    with pytest.raises(PackError, match=message):
        list(LocalEngine(2).map(die, signal.SIGKILL, list(range(6)), describe=describe, on_progress=ignore))


def test_worker_that_crashes_or_leaves() -> None:
    with pytest.raises(PackError, match=r"^a worker process died \(signal 11\) while working on task 2 at 12; finished"):
        list(LocalEngine(2).map(die, signal.SIGSEGV, list(range(6)), describe=describe, on_progress=ignore))
    with pytest.raises(PackError, match=r"^a worker process died \(exit status 5\) while working on task 2 at 0; finished"):
        list(LocalEngine(2).map(leave, 5, list(range(6)), describe=describe, on_progress=ignore))


def test_busy_workers_are_not_waited_for_when_the_caller_leaves() -> None:
    results = LocalEngine(2).map(sleep_long, 1000.0, [0, 1, 2], describe=describe, on_progress=ignore)
    assert next(iter(results)) == (0, 0)
    results.close()  # type: ignore[attr-defined]  # a generator
    assert multiprocessing.active_children() == []


def test_workers_get_no_signal_of_the_terminal() -> None:
    found = dict(LocalEngine(2).map(mask, None, [0, 1], describe=describe, on_progress=ignore))
    assert all({signal.SIGINT, signal.SIGTERM} <= blocked for blocked in found.values())
    assert not {signal.SIGINT, signal.SIGTERM} & signal.pthread_sigmask(signal.SIG_BLOCK, [])


@pytest.mark.parametrize("inherited", [True, False])
def test_workers_of_a_killed_build_leave_a_folder_alone_that_others_made(tmp_path: Path, inherited: bool) -> None:
    """A program asks for multiprocessing's folder and forks a process that builds; that one is killed, and the program goes on."""
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent("""
        import multiprocessing, os, sys, time
        from multiprocessing.util import get_temp_dir
        from pathlib import Path
        from packer.engines.local import LocalEngine

        def stay(context, task, tick):
            Path(context, str(os.getpid())).touch()
            time.sleep(60)

        def build(place):
            list(LocalEngine(2).map(stay, place, [0, 1], describe=lambda task, at: "", on_progress=lambda count: None))

        def running(pid):
            try:
                return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
            except OSError:
                return False

        def wait(done):
            end = time.monotonic() + 60
            while not done():
                assert time.monotonic() < end
                time.sleep(0.02)

        if __name__ == "__main__":
            place, inherited = sys.argv[1], sys.argv[2] == "True"
            if inherited:
                get_temp_dir()
            child = multiprocessing.get_context("fork").Process(target=build, args=(place,))
            child.start()
            wait(lambda: len(os.listdir(place)) == 2)
            child.kill()
            child.join()
            wait(lambda: not any(map(running, os.listdir(place))))
            print(os.listdir(os.environ["TMPDIR"]) == [os.path.basename(get_temp_dir())] if inherited else os.listdir(os.environ["TMPDIR"]))
        """)
    )
    for name in ("place", "temporary"):
        (tmp_path / name).mkdir()
    ran = subprocess.run(
        [sys.executable, program, tmp_path / "place", str(inherited)],
        env={**os.environ, "TMPDIR": str(tmp_path / "temporary")},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    # Its own folder, which nobody else could remove any more, is gone.
    assert (ran.stdout, ran.stderr, ran.returncode) == ("True\n" if inherited else "[]\n", "", 0)


def test_many_small_tasks() -> None:
    found = dict(LocalEngine(2).map(square, 1, [[i] for i in range(500)], describe=describe, on_progress=ignore))
    assert [found[i] for i in range(500)] == [(1, [i * i]) for i in range(500)]


def test_explain_keeps_the_text_of_a_pack_error() -> None:
    assert explain(PackError("a: b"), "x") == "a: b"
