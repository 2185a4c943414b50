from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import cv2
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import loaders.engine
from batch_data import producer_threads
from loaders.engine import Ordered


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    assert producer_threads() == []


def square(number: int) -> int:
    return number * number


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 60), st.integers(0, 5), st.integers(1, 7), st.integers(0, 1000))
def test_items_come_in_order_and_not_too_far_ahead(total: int, workers: int, ahead: int, seed: int) -> None:
    begun = 0
    given_out = 0
    lock = threading.Lock()

    def make(number: int) -> int:
        nonlocal begun
        with lock:
            begun += 1
            assert begun <= given_out + 1 + ahead  # the item being handed over is not counted by us yet
        time.sleep(0.001 * ((number * 7 + seed) % 3))
        return number * number

    with Ordered(make, total, workers, ahead) as items:
        for number, item in enumerate(items):
            given_out = number + 1
            assert item == number * number
            assert len(items) == total - number - 1
    assert begun == given_out == total


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 40), st.integers(0, 3), st.integers(1, 4), st.integers(1, 9), st.none() | st.integers(0, 39), st.booleans())
def test_runs_of_items(total: int, workers: int, ahead: int, run: int, failing: int | None, together: bool) -> None:
    """The items up to the one that fails, in order, however many are made at a time."""
    runs: list[range] = []

    def make(number: int) -> int:
        if number == failing:
            raise ValueError(f"item {number}")
        return number * number

    def make_run(numbers: range) -> list[int]:
        runs.append(numbers)
        return [make(number) for number in numbers]

    items = Ordered(make, total, workers, ahead, run, make_run if together else None)
    whole = total if failing is None else min(failing, total)
    for number in range(whole):
        assert len(items) == total - number
        assert next(items) == number * number
    with pytest.raises(StopIteration if whole == total else ValueError):
        next(items)
    with pytest.raises(StopIteration if whole == total else RuntimeError):
        next(items)
    assert all(numbers.start % run == 0 and len(numbers) <= run for numbers in runs)
    if together and whole == total:
        assert sum(map(len, runs)) == total - (total if run == 1 else total % run == 1)
    assert producer_threads() == []


@pytest.mark.parametrize("workers", [0, 2])
def test_no_error_of_a_run_is_lost(workers: int) -> None:
    def make_run(_: range) -> list[int]:
        raise SystemExit(3)

    items = Ordered(square, 10, workers, 2, 4, make_run)
    with pytest.raises(SystemExit, match="3"):
        next(items)
    with pytest.raises(RuntimeError, match="ended by an error"):
        next(items)


def test_closed_within_a_run() -> None:
    items = Ordered(square, 10, 1, 2, 4)
    assert [next(items), next(items), len(items)] == [0, 1, 8]
    items.close()
    with pytest.raises(RuntimeError, match="closed"):
        next(items)


def test_exactly_so_many_items_are_made_ahead() -> None:
    made: list[int] = []
    with Ordered(made.append, 100, 4, 3) as items:
        for given_out in range(1, 4):
            next(items)
            deadline = time.monotonic() + 30
            while len(made) < given_out + 3 and time.monotonic() < deadline:
                time.sleep(0.001)
            time.sleep(0.03)  # time to make one too many
            assert sorted(made) == list(range(given_out + 3))


def test_an_error_comes_in_its_place_and_ends_the_threads() -> None:
    def make(number: int) -> int:
        time.sleep(0.02 if number == 3 else 0)  # later items are ready first
        if number >= 3:
            raise KeyError(number)
        return number

    items = Ordered(make, 10, 4, 6)
    assert [next(items) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(KeyError, match="3"):
        next(items)
    assert producer_threads() == []
    with pytest.raises(RuntimeError, match="ended by an error"):
        next(items)


@pytest.mark.parametrize("workers", [0, 2])
def test_stop_iteration_in_the_work_does_not_end_the_loop_silently(workers: int) -> None:
    def make(number: int) -> int:
        return next(iter([number] * (number < 2)))

    with pytest.raises(RuntimeError, match="StopIteration was raised"):
        list(Ordered(make, 5, workers, 2))


def test_threads_end_when_exhausted_closed_or_abandoned() -> None:
    items = Ordered(square, 100, 3, 4)
    next(items)
    assert len(producer_threads()) == 3
    items.close()
    assert producer_threads() == []
    items.close()
    with pytest.raises(RuntimeError, match="was closed"):
        next(items)

    for item in Ordered(square, 100, 3, 4):
        if item == 4:
            break
    assert producer_threads() == []

    items = Ordered(square, 5, 3, 4)
    for _ in range(5):
        next(items)
    assert producer_threads() == []  # with the last item, not with StopIteration

    cycle: list[object] = [Ordered(square, 100, 3, 4)]
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert producer_threads() == []


def test_the_work_is_freed_with_the_iterator() -> None:
    class Work:
        def __call__(self, number: int) -> int:
            return number

    alive: list[int] = []

    class Tracked(Work):
        def __del__(self) -> None:
            alive.remove(1)

    alive.append(1)
    gc.collect()
    gc.disable()  # without the help of the garbage collector
    try:
        for item in Ordered(Tracked(), 100, 2, 4):
            if item == 3:
                break
    finally:
        gc.enable()
    assert alive == []


def test_interrupt_while_waiting_ends_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    items = Ordered(square, 100, 2, 2)
    next(items)

    def interrupted() -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(items._shared, "consume", interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(items)
    assert producer_threads() == []


def test_a_dead_thread_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaders.engine, "WATCH_S", 0.05)

    monkeypatch.setattr(threading, "excepthook", lambda _: None)

    def dies(*_: object) -> None:
        raise SystemExit

    monkeypatch.setattr(loaders.engine._Shared, "put", dies)
    items = Ordered(square, 10, 1, 2)
    with pytest.raises(RuntimeError, match="loaders-producer-0 died while it made item 0"):
        next(items)


def test_all_threads_dead_before_they_begin_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaders.engine, "WATCH_S", 0.05)

    monkeypatch.setattr(threading, "excepthook", lambda _: None)

    def dies(*_: object) -> None:
        raise SystemExit

    monkeypatch.setattr(loaders.engine._Shared, "claim", dies)
    with pytest.raises(RuntimeError, match="no producer thread is alive to make item 0"):
        next(Ordered(square, 10, 2, 2))


def test_without_workers_everything_is_made_by_the_caller_when_asked() -> None:
    made: list[tuple[int, threading.Thread]] = []
    items = Ordered(lambda number: made.append((number, threading.current_thread())), 3, 0, 2)
    assert made == []
    next(items)
    assert made == [(0, threading.current_thread())]
    assert len(list(items)) == 2


# Settings of the process


def threads_of_a_new_thread() -> int:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize("number", [3, 2, 1])
def test_producers_compute_with_one_thread_and_nobody_else_notices(number: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        with Ordered(lambda _: torch.get_num_threads(), 20, 3, 4) as items:
            assert next(items) == 1
            assert torch.get_num_threads() == number
            assert threads_of_a_new_thread() == number
            with Ordered(lambda _: torch.get_num_threads(), 20, 3, 4) as more:
                assert set(more) == {1}
            assert set(items) == {1}
        assert torch.get_num_threads() == number
        assert threads_of_a_new_thread() == number
    finally:
        torch.set_num_threads(before)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_runs_made_in_line_may_take_torchs_threads_but_not_in_a_forked_child() -> None:
    def seen(run: int) -> set[int]:
        return set(Ordered(lambda _: torch.get_num_threads(), 4, 0, 2, run))

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert (seen(1), seen(2)) == ({1}, {3})
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                status = int((seen(1), seen(2)) != ({1}, {1}))
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_a_consumer_with_its_own_number_of_threads_keeps_it_and_the_default_stays() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    seen: list[int] = []

    def consume() -> None:
        torch.get_num_threads()
        changed = threading.Thread(target=lambda: torch.set_num_threads(4))  # the default from now on
        changed.start()
        changed.join()
        assert set(Ordered(lambda _: torch.get_num_threads(), 5, 2, 2)) == {1}
        seen.append(torch.get_num_threads())

    thread = threading.Thread(target=consume)
    try:
        thread.start()
        thread.join()
        assert seen == [3]
        assert threads_of_a_new_thread() == 4
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_opencv_threads_are_off_while_any_is_open() -> None:
    before = cv2.getNumThreads()
    cv2.setNumThreads(2)
    try:
        first, second = Ordered(square, 9, 1, 2), Ordered(square, 9, 0, 2)
        assert cv2.getNumThreads() == 1
        first.close()
        assert cv2.getNumThreads() == 1
        second.close()
        assert cv2.getNumThreads() == 2
    finally:
        cv2.setNumThreads(before)


# Other processes


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # Python 3.12 warns of exactly what is tested here
def test_a_forked_child_raises_instead_of_waiting() -> None:
    items = Ordered(square, 100, 2, 2)
    next(items)
    child = os.fork()
    if child == 0:  # leaves by _exit: it is a copy of the test runner
        status = 1
        try:
            next(items)
        except RuntimeError as e:
            items.close()
            status = 0 if "does not survive fork" in str(e) else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert next(items) == 1
    items.close()


@pytest.mark.parametrize(
    ("ending", "status"),
    [
        ("sys.exit(5)", 5),
        ("threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start(); list(items)", 130),
        ("raise ValueError", 1),
    ],
)
def test_the_process_ends_with_an_iterator_open(ending: str, status: int) -> None:
    code = f"""
        import os, signal, sys, threading, time
        from loaders.engine import Ordered

        items = Ordered(lambda n: time.sleep(0.05), 10000, 3, 5)
        try:
            next(items)
            {ending}
        except KeyboardInterrupt:
            sys.exit(130)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], timeout=60, cwd=Path(__file__).parent.parent, capture_output=True, text=True
    )
    assert done.returncode == status, done.stderr
    assert "Fatal" not in done.stderr


def test_an_interrupt_while_a_thread_starts_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = []

    class Interrupted(loaders.engine._Producer[int]):
        def start(self) -> None:
            def interrupt(_: float | None = None) -> bool:
                raise KeyboardInterrupt

            begun.append(self)
            self._started.wait = interrupt  # where `start` waits for the thread
            super().start()

        def _bootstrap(self) -> None:
            time.sleep(0.05)
            super()._bootstrap()

    monkeypatch.setattr("loaders.engine._Producer", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        Ordered(lambda n: n, 10, 2, 2)
    assert len(begun) == 1
    assert not begun[0].is_alive()
