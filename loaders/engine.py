"""Threads that make numbered items ahead of their consumer, handed over in order. Knows nothing of data sets or batches.

    with Ordered(make, total, workers, ahead) as items:
        for item in items: ...

Items that take little time each are made, and handed over, several at a time: a *run* of them.

The threads share an inner object with the work and the queue, never the `Ordered` itself. So an `Ordered` that nobody holds any more is
finalised while they run, and that stops them.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Generic, NoReturn, TypeVar

import torch

from loaders.handles import ForkAware
from loaders.quiet import intra_op, quiet_opencv

T = TypeVar("T")

WATCH_S = 1.0
"""A waiting consumer looks this often whether the thread that it waits for still lives."""
_AGAIN_S = 0.05
JOIN_S = 5.0
"""Longest wait for the threads to end their current items when an `Ordered` is closed; after it they end by themselves."""


class _Failure:
    __slots__ = ("error",)

    def __init__(self, error: BaseException) -> None:
        self.error = error


@dataclass(frozen=True, slots=True)
class _Work(Generic[T]):
    """``work(number)`` makes a run of items: those of ``make``, up to the first that fails."""

    make: Callable[[int], T]
    make_run: Callable[[range], list[T]] | None
    total: int
    run: int

    def __call__(self, number: int) -> list[T | _Failure]:
        items = range(number * self.run, min((number + 1) * self.run, self.total))
        if self.make_run is not None and len(items) > 1:
            try:
                return list(self.make_run(items))
            except Exception:
                pass  # which of them it was, and those before it, come out below
            except BaseException as e:
                return [_Failure(e)]
        made: list[T | _Failure] = []
        for item in items:
            try:
                made.append(self.make(item))
            except BaseException as e:  # whatever it is, it belongs to the consumer
                made.append(_Failure(e))
                break
        return made


class _Shared(Generic[T]):
    """What producers and consumer share; the numbers are those of runs. Every attribute but `stopped` is changed under `lock` only."""

    def __init__(self, work: _Work[T], total: int, ahead: int) -> None:
        self.work, self.total, self.ahead = work, total, ahead
        # Reentrant: the garbage collector may finalise an `Ordered` inside any of our own critical sections.
        self.lock = threading.RLock()
        self.ready = threading.Condition(self.lock)  # the run that the consumer waits for is there
        self.space = threading.Condition(self.lock)  # a run may be begun
        self.made: dict[int, list[T | _Failure]] = {}
        self.threads: list[_Producer[T]] = []
        self.makers: dict[int, threading.Thread] = {}  # who makes which run
        self.next = 0
        self.consumed = 0
        self.stopped = False

    def _limit(self) -> int:
        """Runs that may be begun by now. The number ahead grows from one a thread: for who takes the first item only, little is made for
        nothing."""
        return self.consumed + min(self.ahead, len(self.threads) + self.consumed)

    def claim(self) -> int | None:
        """The next run to make, once it may be begun; None when there is no more to do."""
        with self.lock:
            while not self.stopped and self.next < self.total and self.next >= self._limit():
                # Ends by `consume` or `stop`; the finaliser of an abandoned consumer calls `stop`. The bound is for an interrupt that
                # came in the middle of a notification.
                self.space.wait(WATCH_S)
            if self.stopped or self.next >= self.total:
                return None
            # In this order: wherever this thread dies, the run has a maker by which `_watch` can tell, or is still to be claimed.
            number = self.next
            self.makers[number] = threading.current_thread()
            self.next += 1
            return number

    def put(self, number: int, items: list[T | _Failure]) -> None:
        with self.lock:
            if not self.stopped:
                self.made[number] = items
                if number == self.consumed:
                    self.ready.notify()
            self.makers.pop(number, None)  # last: a run that is not there has a maker

    def consume(self) -> list[T | _Failure]:
        with self.lock:
            number = self.consumed
            while number not in self.made:
                if self.stopped:
                    raise RuntimeError("closed while an item was waited for")
                if not self.ready.wait(WATCH_S) and number not in self.made:
                    self._watch(number)
            items = self.made.pop(number)
            self.consumed += 1
            if self.next < self.total and self.next < self._limit():
                self.space.notify(2)  # at first two more may be begun at a time
            return items

    def _watch(self, number: int) -> None:
        maker = self.makers.get(number)
        if maker is not None and not maker.is_alive():
            raise RuntimeError(f"the thread {maker.name} died while it made item {number * self.work.run}")
        if not any(thread.is_alive() for thread in self.threads):
            raise RuntimeError(f"no producer thread is alive to make item {number * self.work.run}")

    def stop(self) -> None:
        self.stopped = True  # before the lock: it holds even where an interrupt ends the rest
        with self.lock:
            self.made.clear()
            self.makers.clear()
            self.threads = []  # breaks the cycle with the threads: the data set is freed without waiting for the garbage collector
            self.space.notify_all()
            self.ready.notify_all()


class _Producer(threading.Thread, Generic[T]):
    def __init__(self, shared: _Shared[T], number: int) -> None:
        # Daemon: an `Ordered` still referenced at exit must not keep the process; its finaliser runs before the interpreter ends.
        super().__init__(name=f"loaders-producer-{number}", daemon=True)
        self.shared = shared
        self.launched = False
        self.prepared = threading.Event()
        self.default_threads = 0

    def run(self) -> None:
        shared = self.shared
        self.default_threads = torch.get_num_threads()  # makes this thread take the default now, not later and undo the next line
        torch.set_num_threads(1)
        self.prepared.set()
        while (number := shared.claim()) is not None:
            shared.put(number, shared.work(number))


class Ordered(Generic[T]):
    """Iterator over ``make(0), make(1), ..., make(total - 1)``, made by `workers` threads, given in order.

    An exception of `make` is raised in its place, and ends the iteration. The threads end when it is exhausted, closed, garbage,
    interrupted, or at exit. One consumer thread at a time.

    Args:
        make: called with the number, in any thread, for several numbers at a time.
        total: how many items there are.
        workers: threads; 0 makes each run when its first item is asked for, in the caller's thread.
        ahead: how many runs may be made before they are asked for.
        run: items in a run; the last one may be shorter.
        make_run: makes several consecutive items at once, with the same results as `make`, which is asked where this fails.
    """

    def __init__(
        self,
        make: Callable[[int], T],
        total: int,
        workers: int,
        ahead: int,
        run: int = 1,
        make_run: Callable[[range], list[T]] | None = None,
    ) -> None:
        runs = -(-total // run)
        shared = self._shared = _Shared(_Work(make, make_run, total, run), runs, ahead)
        self._pid = os.getpid()
        self._inline = workers == 0
        self._left = total
        self._at_hand: deque[T | _Failure] = deque()
        shared.threads = [_Producer(shared, i) for i in range(min(workers, runs))]
        quiet_opencv.enter()
        self._finalizer = weakref.finalize(self, _end_unasked, shared, self._pid)
        if shared.threads:
            try:
                _start(shared.threads)
            except BaseException:
                self.close()
                raise

    def __iter__(self) -> Ordered[T]:
        return self

    def __len__(self) -> int:
        """Items that were not given yet."""
        return self._left

    def __next__(self) -> T:
        if self._pid != os.getpid():
            raise RuntimeError("an iterator with threads does not survive fork(): make a new one in the child process")
        if not self._left:
            self.close()
            raise StopIteration
        if not self._at_hand:
            self._at_hand.extend(self._next_run())
        item = self._at_hand.popleft()
        if isinstance(item, _Failure):
            self.close()
            _raise(item.error)
        self._left -= 1
        if not self._left:
            self.close()
        return item

    def _next_run(self) -> list[T | _Failure]:
        shared = self._shared
        if not self._finalizer.alive:
            raise RuntimeError("the iterator was closed, or ended by an error")
        if self._inline:
            with intra_op(is_large=shared.work.run > 1):
                items = shared.work(shared.consumed)
            shared.consumed += 1
            return items
        try:
            return shared.consume()
        except BaseException:  # Ctrl-C while waiting, or a dead thread
            self.close()
            raise

    def __enter__(self) -> Ordered[T]:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the threads and wait for them, at most `JOIN_S`. Safe to call again, and in a forked child."""
        self._at_hand.clear()
        if self._finalizer.detach() is not None:
            _end(self._shared, self._pid)


def _raise(error: BaseException) -> NoReturn:
    if isinstance(error, StopIteration):  # would end the consumer's for loop as if all were done
        raise RuntimeError("StopIteration was raised while an item was made") from error
    raise error


def _start(threads: list[_Producer[T]]) -> None:
    """Start the producers with one intra-op thread each, and leave torch's default for every other thread as it was.

    `torch.set_num_threads` sets the calling thread's own number, and the default that later threads take. So each producer sets its own,
    and when all have, a thread made for it sets the default back; the caller's own number is never touched.
    """
    with _starting.lock:
        torch.get_num_threads()  # the caller takes its number before the default changes
        try:
            for thread in threads:
                thread.launched = True
                try:
                    thread.start()
                except RuntimeError as e:  # Python's message names neither cause nor cure
                    thread.launched = False
                    raise RuntimeError(
                        f"{thread.name}: the system starts no more threads ({e}): give fewer workers, or raise the limit (`ulimit -u`)"
                    ) from None
                if thread is threads[0]:
                    _prepared(thread)  # before the others start: it saw the default that nobody changed
            for thread in threads[1:]:
                _prepared(thread)
        finally:
            if threads[0].default_threads:
                restorer = threading.Thread(target=torch.set_num_threads, args=(threads[0].default_threads,), daemon=True)
                try:
                    restorer.start()
                    restorer.join()
                except RuntimeError:  # no more threads: then the caller takes the default too, mostly the number that it had
                    torch.set_num_threads(threads[0].default_threads)


def _prepared(thread: _Producer[T]) -> None:
    while not thread.prepared.wait(WATCH_S):
        if not thread.is_alive() and not thread.prepared.is_set():
            raise RuntimeError(f"the thread {thread.name} died while it started")


_starting = ForkAware()


def _end(shared: _Shared[T], pid: int) -> None:
    if os.getpid() != pid:
        return  # a forked child has no such threads, and the lock may have been held when it was made
    threads = shared.threads
    try:
        shared.stop()
        if threading.current_thread() not in threads:  # the garbage collector may run this in a producer
            deadline = time.monotonic() + JOIN_S
            for thread in threads:
                # An interrupt may have come while `start` waited for the thread, which then runs, or is about to.
                if thread.launched and thread.prepared.wait(max(0.0, deadline - time.monotonic())):
                    thread.join(max(0.0, deadline - time.monotonic()))
    finally:
        quiet_opencv.leave()


def _end_unasked(shared: _Shared[T], pid: int) -> None:
    """`_end` from the garbage collector or at exit, where Python swallows exceptions: Ctrl-C is raised again when that is over."""
    try:
        _end(shared, pid)
    except KeyboardInterrupt:
        again = threading.Timer(_AGAIN_S, _thread.interrupt_main)
        again.daemon = True
        with contextlib.suppress(RuntimeError):  # at exit there are no more threads, nor anything to interrupt
            again.start()
