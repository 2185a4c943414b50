"""Worker processes on this machine.

Our own small pool, for three things that the standard ones do not give: a worker that dies (no memory) is noticed at once and named
with what it was on, progress within a task, and Ctrl-C that leaves no process behind.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import multiprocessing
import os
import shutil
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection, resource_tracker
from multiprocessing.process import BaseProcess
from multiprocessing.util import get_temp_dir
from typing import Any

from packer.engines import TaskFunction
from packer.sample import PackError

POLL_S = 0.1
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class LocalEngine:
    """Runs tasks in `workers` processes; with one worker, or one task, in this process. See `packer.engines.Engine`."""

    def __init__(self, workers: int) -> None:
        self._workers = workers

    def map(
        self,
        function: TaskFunction,
        context: Any,
        tasks: Sequence[Any],
        *,
        describe: Callable[[Any, int], str],
        on_progress: Callable[[int], None],
    ) -> Iterator[tuple[int, Any]]:
        count = min(self._workers, len(tasks))
        if count <= 1:
            yield from _map_here(function, context, tasks, describe, on_progress)
            return
        workers: list[_Worker] = []
        try:
            with _uninterrupted():
                for _ in range(count):
                    workers.append(_Worker(function, context))
            yield from _drive(workers, tasks, describe, on_progress)
        finally:
            for worker in workers:
                worker.stop()
            for worker in workers:
                worker.join()


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C and SIGTERM wait. Processes started meanwhile never get either: what to do about it is decided here, not by each of them."""
    resource_tracker.ensure_running()  # it would be started by the first process, and unblock both
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _map_here(
    function: TaskFunction, context: Any, tasks: Sequence[Any], describe: Callable[[Any, int], str], on_progress: Callable[[int], None]
) -> Iterator[tuple[int, Any]]:
    for number, task in enumerate(tasks):
        at = [0]

        def tick(position: int, at: list[int] = at) -> None:
            on_progress(position - at[0])
            at[0] = position

        try:
            result = function(context, task, tick)
        except Exception as e:
            raise PackError(explain(e, describe(task, at[0]))) from e
        yield number, result


class _Worker:
    """One process. `position` in shared memory is what it works on, read here for progress and for the message when it dies."""

    def __init__(self, function: TaskFunction, context: Any) -> None:
        # Not fork: a forked child of a process with threads (a progress bar, OpenCV) may hang. A fork server imports once.
        mp = multiprocessing.get_context("forkserver")
        mp.set_forkserver_preload(["packer.work"])
        folder = _own_folder()  # first: on some systems shared memory makes it, too
        self.pipe, theirs = mp.Pipe()
        self._position = mp.RawValue("q", 0)
        args = (theirs, self._position, folder, function, context)
        self.process: BaseProcess = mp.Process(target=_serve, args=args, daemon=True)
        self.process.start()
        theirs.close()
        self.number = -1
        self._seen = 0

    def give(self, number: int, task: Any) -> None:
        self.number, self._seen, self._position.value = number, 0, 0
        with contextlib.suppress(OSError):  # it has died: `_drive` sees that, and says so
            self.pipe.send(task)

    def progress(self) -> int:
        """Positions passed since the last call."""
        now = self._position.value
        passed, self._seen = now - self._seen, now
        return int(passed)

    @property
    def position(self) -> int:
        return int(self._position.value)

    def stop(self) -> None:
        self.pipe.close()
        if self.number >= 0 or self.process.exitcode is not None:
            self.process.kill()

    def join(self) -> None:
        self.process.join(5)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.process.close()


def _drive(
    workers: list[_Worker], tasks: Sequence[Any], describe: Callable[[Any, int], str], on_progress: Callable[[int], None]
) -> Iterator[tuple[int, Any]]:
    waiting = iter(enumerate(tasks))
    busy: set[int] = set()

    def give_next(w: int) -> None:
        following = next(waiting, None)
        workers[w].number = -1
        busy.discard(w)
        if following is not None:
            workers[w].give(*following)
            busy.add(w)

    for w in range(len(workers)):
        give_next(w)
    while busy:
        ready = connection.wait([x for w in busy for x in (workers[w].pipe, workers[w].process.sentinel)], POLL_S)
        for w in sorted(busy):
            worker = workers[w]
            on_progress(worker.progress())
            if worker.pipe not in ready and worker.process.sentinel not in ready:
                continue
            number = worker.number
            try:
                ok, result = worker.pipe.recv()
            except (EOFError, OSError):
                worker.process.join(5)
                code = worker.process.exitcode
                raise PackError(_death(code, describe(tasks[number], worker.position))) from None
            if not ok:
                raise PackError(result.replace(_PLACE, describe(tasks[number], worker.position)))
            on_progress(worker.progress())
            give_next(w)
            yield number, result


_PLACE = "\0place\0"


_made: dict[int, str] = {}


def _own_folder() -> str | None:
    """multiprocessing's folder for the fork server's socket, where it was made here, for this process; else None: it is not ours to remove.

    A process that multiprocessing has started inherits the folder of the one that started it, which may live on.
    """
    if getattr(multiprocessing.current_process(), "_config", {"tempdir": ""}).get("tempdir") is None:  # no public name tells
        _made[os.getpid()] = get_temp_dir()
    return _made.get(os.getpid())


def _serve(pipe: connection.Connection, position: Any, temporary: str | None, function: TaskFunction, context: Any) -> None:
    """A worker's life. It ends when the other side closes the pipe. `temporary`: a folder to remove where the build is killed."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # where somebody else had started the fork server
    threading.Thread(target=_end_with_parent, args=(temporary,), daemon=True).start()
    gc.freeze()  # modules and context live as long as the worker: not to be looked at again by every collection

    def tick(value: int) -> None:
        position.value = value

    while True:
        try:
            task = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            answer = (True, function(context, task, tick))
        except Exception as e:
            answer = (False, explain(e, _PLACE))
        try:
            pipe.send(answer)
        except OSError:
            return


def _end_with_parent(temporary: str | None) -> None:
    """When the build is killed: an orphan must not write beside the next one. (Its parent by process id is the fork server.)

    What the build would have removed at its end is left to the workers then.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
        os._exit(1)


def explain(error: Exception, place: str) -> str:
    """A message for the user from whatever a task raised."""
    if isinstance(error, PackError):
        return str(error)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"disk full while working on {place}: {error.strerror}; make room and run the same command again, finished shards are kept"
    if isinstance(error, OSError):
        return f"{error.filename or place}: {error.strerror or error} (while working on {place})"
    if isinstance(error, MemoryError):
        return f"out of memory while working on {place}; use fewer --workers or a smaller --shard-size"
    text = f"internal error while working on {place}: {type(error).__name__}: {error}"
    if os.environ.get("PACK_DEBUG"):
        return f"{text}\n{''.join(traceback.format_exception(error))}"
    return f"{text}; set PACK_DEBUG=1 for details and report it"


def _death(code: int | None, place: str) -> str:
    cause = f"signal {-code}" if code is not None and code < 0 else f"exit status {code}"
    hint = ": probably killed for lack of memory; use fewer --workers" if code == -signal.SIGKILL else ""
    return f"a worker process died ({cause}) while working on {place}{hint}; finished shards are kept, run the same command again"
