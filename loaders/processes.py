"""Producers in processes of their own, for work that holds Python's lock: many small decodes, transforms in Python.

A thread of `loaders.engine` asks one process for a batch, and waits. The process writes it into a slot of `loaders.slots` that both have
mapped, so no pixel is copied; what else is in the batch comes by pickle. Order, resume, errors and memory are the engine's, as with
threads.

Messages are pickled tuples, first their kind; a request is answered before the next one:

    parent                          process
    ("make", changes of the spec, rows)
                                    ("slot", fields, rows)      any number of times
    number of a slot or None, numbers of all there are
                                    ("memory", number)          where it has not mapped that slot yet
    its file descriptor
                                    ("made", batches) or ("failed", exception, traceback), then
                                    ... slots that the process goes on using, warnings
"""

from __future__ import annotations

import errno
import io
import mmap
import multiprocessing
import os
import pickle
import signal
import threading
import traceback
import warnings
import weakref
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import reduction
from multiprocessing.connection import Connection
from multiprocessing.pool import ExceptionWithTraceback  # type: ignore[attr-defined]  # the stub leaves it out
from typing import Any

import torch

from loaders import faults
from loaders.assemble import Batch, BatchMaker, Rows, pinned
from loaders.faults import Replacements
from loaders.handles import ForkAware
from loaders.handover import pickled, unpickled
from loaders.quiet import be_one_of_many
from loaders.slots import Fields, Slot, Slots

_END_S = 5.0


@dataclass(frozen=True, slots=True)
class Spec:
    """The arguments of a `BatchMaker` but its slots, each pickled. `shared`: the counters in them, which all processes see."""

    parts: tuple[bytes, ...]
    shared: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, maker: BatchMaker) -> Spec:
        """Raises TypeError, naming what cannot be pickled."""
        shared: list[torch.Tensor] = []
        parts = {"ds, or its transform,": maker.ds, "collate": maker.collate, "batch_transform": maker.batch_transform}
        pickled = []
        for name, part in parts.items():
            file = io.BytesIO()
            try:
                _SpecPickler(file, shared).dump(part)
            except Exception as e:  # whatever a part's own methods raise
                raise TypeError(
                    f"processes=True sends copies to other processes, and {name} cannot be pickled: {e}. Define functions and classes at "
                    "the top of a module (no lambda, nothing inside a function), or take processes=False"
                ) from e
            pickled.append(file.getvalue())
        return cls(tuple(pickled), tuple(shared))

    def changes(self, known: Spec | None) -> list[bytes | None]:
        """The parts that are new to who knows another one."""
        return [None if known and part == known.parts[i] else part for i, part in enumerate(self.parts)]


class _SpecPickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, shared: list[torch.Tensor]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._shared = shared

    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, Replacements):
            return None
        self._shared.append(obj.counts)
        return len(self._shared) - 1


class _SpecUnpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, shared: tuple[torch.Tensor, ...]) -> None:
        super().__init__(file)
        self._shared = shared

    def persistent_load(self, pid: int) -> Replacements:
        return Replacements(self._shared[pid])


# The parent's side


@dataclass(frozen=True, slots=True)
class RemoteMaker:
    """A `BatchMaker` whose work the processes do. `pin`: copies what they made to page-locked memory."""

    processes: Processes
    spec: Spec
    pin: bool

    def __call__(self, rows: Rows) -> list[Batch]:
        batches = self.processes.make(self.spec, rows)
        return [{name: pinned(value) for name, value in batch.items()} for batch in batches] if self.pin else batches


class Processes(ForkAware):
    """`count` processes, started together when the first is needed, and in the place of one that died. They end by `close`, with this
    object, or with this process.

    Args:
        slots: shared ones.
    """

    def __init__(self, count: int, slots: Slots) -> None:
        self._count, self._slots = count, slots
        self._closed = False
        self._idle: list[_Process] = []
        self._all: weakref.WeakSet[_Process] = weakref.WeakSet()
        self._freed = threading.Condition(threading.Lock())
        super().__init__()

    def after_fork(self) -> None:
        super().after_fork()
        for process in list(self._all):
            process.disown()
        self._idle, self._all, self._freed = [], weakref.WeakSet(), threading.Condition(threading.Lock())

    def make(self, spec: Spec, rows: Rows) -> list[Batch]:
        """Batches made by any of the processes. Their exceptions are raised here.

        Raises:
            RuntimeError: the process died, or cannot be started; or `close` was called.
        """
        process = self._take(spec)
        try:
            return process.make(spec, rows, self._slots)
        finally:
            with self._freed:
                if process.is_usable and not self._closed:
                    self._idle.append(process)
                else:
                    self._all.discard(process)
                self._freed.notify()

    def _take(self, spec: Spec) -> _Process:
        with self._freed:
            while not self._closed:
                for process in [p for p in self._idle if not p.serves(spec)]:
                    self._idle.remove(process)
                    self._all.discard(process)
                    process.end()
                while len(self._all) < self._count:
                    process = _Process(min(set(range(self._count)) - {p.number for p in self._all}), spec)
                    self._all.add(process)
                    self._idle.append(process)
                if self._idle:
                    return self._idle.pop()
                self._freed.wait()  # of an iterator before this one, whose thread has not ended yet
        raise RuntimeError(_CLOSED)

    def close(self) -> None:
        """End the processes, also those that are at work. There will be no others."""
        with self._freed:
            self._closed = True
            ended, self._idle = list(self._all), []
            self._all.clear()
            self._freed.notify_all()
        for process in ended:
            process.end()


class _Process:
    """One process, and the thread that asks it: one at a time."""

    def __init__(self, number: int, spec: Spec) -> None:
        context = multiprocessing.get_context("spawn")  # a fork would copy locks that other threads hold
        self.number, self._shared = number, spec.shared
        self._spec: Spec | None = None
        self._answered = False
        self._ended = False
        self.is_usable = True
        self._conn, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, number, spec.shared), name=f"loaders-producer-{number}", daemon=True)
        # Ctrl-C reaches all processes of a terminal, and while they import `_serve` cannot ignore it yet; this they inherit.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            self._process.start()
        except (AssertionError, OSError) as e:
            self._conn.close()
            raise RuntimeError(f"no process can be started for processes=True: {e}. Take processes=False") from None
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()
        self._finalizer = weakref.finalize(self, _end, self._process, os.getpid())

    def serves(self, spec: Spec) -> bool:
        """Whether it is alive, and has these counters."""
        return self._process.is_alive() and [id(t) for t in spec.shared] == [id(t) for t in self._shared]

    def make(self, spec: Spec, rows: Rows, slots: Slots) -> list[Batch]:
        taken: dict[int, Slot] = {}
        self.is_usable = False  # until all is said
        try:
            self._send(("make", spec.changes(self._spec), rows))
            self._spec = None  # until it made something of it
            while True:
                kind, *rest = pickle.loads(self._conn.recv_bytes())
                self._answered = True
                if kind == "slot":
                    slot = _taken(slots, *rest)
                    if slot is not None:
                        taken[slot.number] = slot
                    self._send((slot and slot.number, slots.numbers()))
                elif kind == "memory":
                    memory = taken[rest[0]].memory
                    assert memory is not None
                    reduction.send_handle(self._conn, memory.fd, self._process.pid)
                else:
                    break
            *content, in_use, warned = rest
            self.is_usable = True
            batches = unpickled(content[0], taken) if kind == "made" else []
            taken = {number: slot for number, slot in taken.items() if number not in in_use}
            for text, category in warned:
                warnings.warn(text, category, stacklevel=2)
            if kind == "failed":
                raise _error(*content)
            self._spec = spec
            return batches
        except (EOFError, ConnectionError):
            raise RuntimeError(self._death()) from None
        finally:
            if not self.is_usable:
                self.end()  # it may be in the middle of writing
            for slot in taken.values():
                slots.give_back(slot)

    def _send(self, message: object) -> None:
        self._conn.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))

    def _death(self) -> str:
        if self._ended:
            return _CLOSED
        self._process.join(_END_S)
        code = self._process.exitcode
        how = f"by {signal.Signals(-code).name}" if code is not None and code < 0 else f"with exit code {code}"
        text = f"the process {self._process.pid} that was to make this batch ended {how}"
        if not self._answered:
            return text + (
                ' before it began. A script that uses processes=True must start its work under `if __name__ == "__main__":`, since each '
                "process imports it; what the process said is above"
            )
        return text + (": the system ends processes when memory runs out" if code == -signal.SIGKILL else "")

    def end(self) -> None:
        self._ended, self.is_usable = True, False
        self._finalizer()

    def disown(self) -> None:
        """In a forked child: the parent's end of the pipe is closed when the parent ends, and not later."""
        self.is_usable = False
        self._conn.close()


_CLOSED = "the BatchLoader was closed while this batch was made"


def _taken(slots: Slots, fields: Fields, rows: int) -> Slot | None:
    """A slot; None where that would leave few file descriptors: batches that are held keep theirs. Then the pipe must do."""
    try:
        return slots.take(fields, rows)
    except OSError as e:
        if e.errno in (errno.EMFILE, errno.ENFILE):
            return None
        raise


def _end(process: multiprocessing.process.BaseProcess, pid: int) -> None:
    if os.getpid() != pid:
        return
    process.terminate()
    process.join(_END_S)
    if process.is_alive():
        process.kill()
        process.join(_END_S)


def _error(pickled: bytes, text: str) -> BaseException:
    try:
        error = pickle.loads(pickled)
    except Exception:  # many exceptions cannot be made from their `args`
        error = RuntimeError(f"in a process of the loader:\n{text}")
    assert isinstance(error, BaseException)
    return error


# The process's side


def _serve(conn: Connection, number: int, shared: tuple[torch.Tensor, ...]) -> None:
    """Make what is asked for until the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # what a transform starts should not inherit that
    be_one_of_many()
    faults.process_number = number
    warned: list[tuple[str, type[Warning]]] = []
    warnings.showwarning = lambda message, category, *_: warned.append(_builtin(message, category))
    slots = _BorrowedSlots(conn)
    parts: list[Any] = [None] * 3
    with suppress(EOFError, ConnectionError):
        while True:
            _, changes, rows = pickle.loads(conn.recv_bytes())
            answer: tuple[Any, ...]
            try:
                for i, part in enumerate(changes):
                    if part is not None:
                        parts[i] = _SpecUnpickler(io.BytesIO(part), shared).load()
                ds, collate, batch_transform = parts
                answer = "made", slots.pickled(BatchMaker(ds, slots, collate, batch_transform)(rows))
            except (EOFError, ConnectionError):
                raise
            except BaseException as e:  # whatever it is, it belongs to the consumer
                answer = "failed", _pickled_error(e), traceback.format_exc()
            conn.send_bytes(pickle.dumps((*answer, slots.give_all_back(), warned), pickle.HIGHEST_PROTOCOL))
            warned.clear()


def _builtin(message: Warning | str, category: type[Warning]) -> tuple[str, type[Warning]]:
    """A warning of a category that every process knows."""
    known = next(kind for kind in category.__mro__ if kind.__module__ == "builtins")
    return (str(message) if known is category else f"{category.__name__}: {message}"), known


def _pickled_error(error: BaseException) -> bytes:
    try:
        return pickle.dumps(ExceptionWithTraceback(error, error.__traceback__))
    except Exception:  # it holds what cannot be pickled: its text is sent as well
        return b""


class _BorrowedSlots(Slots):
    """Slots of the parent."""

    def __init__(self, conn: Connection) -> None:
        super().__init__(keep=0, pinned=False)
        self._conn = conn
        self._mapped: dict[int, mmap.mmap] = {}
        self._taken: list[Slot] = []

    def take(self, fields: Fields, rows: int) -> Slot:
        return self._borrowed(fields, rows) or Slot(fields, rows)

    def _borrowed(self, fields: Fields, rows: int) -> Slot | None:
        self._conn.send_bytes(pickle.dumps(("slot", dict(fields), rows), pickle.HIGHEST_PROTOCOL))
        number, known = pickle.loads(self._conn.recv_bytes())
        # Kept mapped as long as the parent has it: to map it again costs a page fault every 4 KiB. No longer, since that holds the memory.
        self._mapped = {n: mapped for n, mapped in self._mapped.items() if n in known}
        if number is None:
            return None
        if number not in self._mapped:
            self._conn.send_bytes(pickle.dumps(("memory", number)))
            fd = reduction.recv_handle(self._conn)
            try:
                self._mapped[number] = mmap.mmap(fd, 0)
            finally:
                os.close(fd)
        slot = Slot(fields, rows, mapped=self._mapped[number])
        slot.number = number
        self._taken.append(slot)
        return slot

    def pickled(self, batches: list[Batch]) -> bytes:
        """The batches, with references to what is in slots."""
        return pickled(batches, self._taken, self._borrowed)

    def give_all_back(self) -> list[int]:
        """Numbers of those that are still used here, say by a transform that remembers a batch: they must not be lent again."""
        in_use = [slot.number for slot in self._taken if not slot.is_idle()]
        self._taken.clear()
        return in_use
