"""What every engine promises. A test module of an engine subclasses `EngineContract` and says how to make one."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Any

import pytest

from packer.engines import Engine, Tick
from packer.sample import PackError


class Unreadable(Exception):
    """An exception that a pickled copy of would fail to load (its constructor wants two arguments)."""

    def __init__(self, a: str, b: str) -> None:
        super().__init__(a + b)


def square(context: int, task: list[int], tick: Tick) -> tuple[int, list[int]]:
    for i in range(len(task)):
        tick(i)
    tick(len(task))
    return context, [x * x for x in task]


def process_of(context: Any, task: int, tick: Tick) -> tuple[int, int]:  # noqa: ARG001  (an engine's function)
    return task, os.getpid()


def large(context: bytes, task: bytes, tick: Tick) -> bytes:
    tick(len(task))
    return context + task


def fail(context: str, task: int, tick: Tick) -> int:
    tick(2)
    if task != 3:
        return task
    if context == "pack error":
        raise PackError("as it is")
    if context == "disk":
        raise OSError(errno.ENOSPC, "No space left on device")
    if context == "file":
        raise PermissionError(errno.EACCES, "Permission denied", "/data/x.jpg")
    if context == "memory":
        raise MemoryError
    if context == "unreadable":
        raise Unreadable("o", "dd")
    raise ZeroDivisionError("odd")


def describe(task: Any, position: int) -> str:
    return f"task {task!r} at {position}"


def ignore(_: int) -> None:
    pass


class EngineContract:
    """`make(workers)` gives the engine."""

    make: Callable[[int], Engine]

    @pytest.fixture(params=[1, 2])
    def engine(self, request: pytest.FixtureRequest) -> Engine:
        return self.make(request.param)

    def test_every_task_once_with_its_number(self, engine: Engine) -> None:
        tasks = [[i, i + 1] for i in range(11)]
        found = list(engine.map(square, 7, tasks, describe=describe, on_progress=ignore))
        assert sorted(found) == [(i, (7, [i * i, (i + 1) ** 2])) for i in range(11)]

    def test_no_tasks(self, engine: Engine) -> None:
        assert list(engine.map(square, 7, [], describe=describe, on_progress=ignore)) == []

    def test_progress_adds_up(self, engine: Engine) -> None:
        passed: list[int] = []
        tasks = [list(range(n)) for n in (3, 0, 5, 40, 1)]
        list(engine.map(square, 0, tasks, describe=describe, on_progress=passed.append))
        assert sum(passed) == 49
        assert min(passed) >= 0

    def test_used_again(self, engine: Engine) -> None:
        for _ in range(2):
            assert len(list(engine.map(square, 0, [[1], [2]], describe=describe, on_progress=ignore))) == 2

    def test_large_tasks_and_results(self, engine: Engine) -> None:
        tasks = [bytes([i]) * 3_000_000 for i in range(5)]
        found = dict(engine.map(large, b"x" * 2_000_000, tasks, describe=describe, on_progress=ignore))
        assert all(found[i] == b"x" * 2_000_000 + task for i, task in enumerate(tasks))

    @pytest.mark.parametrize(
        ("kind", "message"),
        [
            ("pack error", r"^as it is$"),
            ("disk", r"^disk full while working on task 3 at 2: .*make room and run the same command again, finished shards are kept$"),
            ("file", r"^/data/x\.jpg: Permission denied \(while working on task 3 at 2\)$"),
            ("memory", r"^out of memory while working on task 3 at 2; use fewer --workers"),
            ("unreadable", r"^internal error while working on task 3 at 2: Unreadable: odd; set PACK_DEBUG=1"),
            ("other", r"^internal error while working on task 3 at 2: ZeroDivisionError: odd; set PACK_DEBUG=1"),
        ],
    )
    def test_exceptions(self, kind: str, message: str, engine: Engine) -> None:
        with pytest.raises(PackError, match=message):
            list(engine.map(fail, kind, list(range(6)), describe=describe, on_progress=ignore))

    def test_results_before_a_failure_are_given(self) -> None:
        results = iter(self.make(1).map(fail, "other", list(range(6)), describe=describe, on_progress=ignore))
        assert [next(results) for _ in range(3)] == [(0, 0), (1, 1), (2, 2)]
        with pytest.raises(PackError):
            next(results)

    def test_left_in_the_middle(self, engine: Engine) -> None:
        results = engine.map(square, 0, [[i] for i in range(50)], describe=describe, on_progress=ignore)
        next(iter(results))
        results.close()  # type: ignore[attr-defined]  # a generator
        assert len(list(engine.map(square, 0, [[1]], describe=describe, on_progress=ignore))) == 1
