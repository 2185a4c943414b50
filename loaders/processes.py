"""Producers in processes of their own, for work that holds Python's lock: many small decodes, transforms in Python.

A thread of `loaders.engine` asks one process for a batch, and waits. The process writes it into a slot of `loaders.slots` that both have
mapped, so no pixel is copied; what else is in the batch comes by pickle. Order, resume, errors and memory are the engine's, as with
threads.

Messages are pickled tuples, first their kind; a request is answered before the next one:

    parent                          process
    ("make", changes of the spec, rows)
                                    ("slot", fields, rows)      any number of times
    number of a slot, numbers of all there are
                                    ("memory", number)          where it has not mapped that slot yet
    its file descriptor
                                    ("made", batches, warnings) or ("failed", exception, traceback, warnings)
"""

from __future__ import annotations

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
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import reduction
from multiprocessing.connection import Connection
from multiprocessing.pool import ExceptionWithTraceback  # type: ignore[attr-defined]  # the stub leaves it out
from typing import Any, NamedTuple

import cv2
import numpy as np
import torch

from loaders import faults
from loaders.assemble import Batch, BatchMaker, Rows, pinned
from loaders.faults import Replacements
from loaders.handles import ForkAware
from loaders.slots import Fields, Slot, Slots

_IN_PLACE = 1 << 16
"""Bytes from which on a tensor outside a slot is copied into one, instead of through the pipe."""
_END_S = 5.0
_BYTE = np.dtype(np.uint8)


class _Reference(NamedTuple):
    """A tensor in a slot: bytes `start` to `stop` of its array `name`."""

    slot: int
    name: str
    start: int
    stop: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]


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
    """`count` processes, started together when the first is needed; they end by `close`, with this object, or with this process.

    Args:
        slots: shared ones.
    """

    def __init__(self, count: int, slots: Slots) -> None:
        self._count, self._slots = count, slots
        self._idle: list[_Process] = []
        self._all: weakref.WeakSet[_Process] = weakref.WeakSet()
        self._freed = threading.Condition(threading.Lock())
        super().__init__()

    def after_fork(self) -> None:
        super().after_fork()
        self._idle, self._all, self._freed = [], weakref.WeakSet(), threading.Condition(threading.Lock())

    def make(self, spec: Spec, rows: Rows) -> list[Batch]:
        """Batches made by any of the processes. Their exceptions are raised here.

        Raises:
            RuntimeError: the process died, or cannot be started.
        """
        process = self._take(spec)
        try:
            return process.make(spec, rows, self._slots)
        finally:
            with self._freed:
                if process.is_usable:
                    self._idle.append(process)
                else:
                    self._all.discard(process)
                self._freed.notify()

    def _take(self, spec: Spec) -> _Process:
        with self._freed:
            while True:
                for process in [p for p in self._idle if not p.serves(spec)]:
                    self._idle.remove(process)
                    self._all.discard(process)
                    process.end()
                while len(self._all) < self._count:
                    process = _Process(len(self._all), spec)
                    self._all.add(process)
                    self._idle.append(process)
                if self._idle:
                    return self._idle.pop()
                self._freed.wait()  # of an iterator before this one, whose thread has not ended yet

    def close(self) -> None:
        """End the processes, also those that are at work."""
        with self._freed:
            ended, self._idle = list(self._all), []
            self._all.clear()
        for process in ended:
            process.end()


class _Process:
    """One process, and the thread that asks it: one at a time."""

    def __init__(self, number: int, spec: Spec) -> None:
        context = multiprocessing.get_context("spawn")  # a fork would copy locks that other threads hold
        self._shared = spec.shared
        self._spec: Spec | None = None
        self._answered = False
        self.is_usable = True
        self._conn, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, number, spec.shared), name=f"loaders-producer-{number}", daemon=True)
        try:
            self._process.start()
        except (AssertionError, OSError) as e:
            self._conn.close()
            raise RuntimeError(f"no process can be started for processes=True: {e}. Take processes=False") from None
        finally:
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
            self._spec = spec
            while True:
                kind, *rest = pickle.loads(self._conn.recv_bytes())
                self._answered = True
                if kind == "slot":
                    slot = slots.take(*rest)
                    taken[slot.number] = slot
                    self._send((slot.number, slots.numbers()))
                elif kind == "memory":
                    assert slot.memory is not None
                    reduction.send_handle(self._conn, slot.memory.fd, self._process.pid)
                else:
                    self.is_usable = True
                    return _answer(kind, rest, taken)
        except (EOFError, ConnectionError):
            raise RuntimeError(self._death()) from None
        finally:
            for slot in taken.values():
                slots.give_back(slot)

    def _send(self, message: object) -> None:
        self._conn.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))

    def _death(self) -> str:
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
        self.is_usable = False
        self._finalizer()


def _end(process: multiprocessing.process.BaseProcess, pid: int) -> None:
    if os.getpid() != pid:
        return
    process.terminate()
    process.join(_END_S)
    if process.is_alive():
        process.kill()
        process.join(_END_S)


def _answer(kind: str, rest: list[Any], slots: dict[int, Slot]) -> list[Batch]:
    *content, warned = rest
    for message, category in warned:
        warnings.warn(message, category, stacklevel=2)
    if kind == "made":
        batches: list[Batch] = _BatchUnpickler(io.BytesIO(content[0]), slots).load()
        return batches
    pickled, text = content
    try:
        error = pickle.loads(pickled)
    except Exception:  # many exceptions cannot be made from their `args`
        error = RuntimeError(f"in a process of the loader:\n{text}")
    assert isinstance(error, BaseException)
    raise error


class _BatchUnpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, slots: dict[int, Slot]) -> None:
        super().__init__(file)
        self._slots = slots

    def persistent_load(self, pid: _Reference) -> torch.Tensor:
        # A view of the slot's array, which counts as its user; cut before it is a tensor, so that its storage is no more than the batch.
        cut = self._slots[pid.slot].bytes(pid.name)[pid.start : pid.stop]
        return torch.from_numpy(cut).view(pid.dtype).as_strided(pid.size, pid.stride)


# The process's side


def _serve(conn: Connection, number: int, shared: tuple[torch.Tensor, ...]) -> None:
    """Make what is asked for until the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal: the parent decides
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a device taken by accident costs some 500 MB
    cv2.setNumThreads(0)
    torch.set_num_threads(1)
    faults.process_number = number
    warned: list[tuple[str, type[Warning]]] = []
    warnings.showwarning = lambda message, category, *_: warned.append((str(message), category))
    slots = _BorrowedSlots(conn)
    parts: list[Any] = [None] * 3
    with suppress(EOFError, ConnectionError):
        while True:
            _, changes, rows = pickle.loads(conn.recv_bytes())
            answer: tuple[Any, ...]
            try:
                for i, pickled in enumerate(changes):
                    if pickled is not None:
                        parts[i] = _SpecUnpickler(io.BytesIO(pickled), shared).load()
                ds, collate, batch_transform = parts
                answer = "made", slots.pickled(BatchMaker(ds, slots, collate, batch_transform)(rows))
            except (EOFError, ConnectionError):
                raise
            except BaseException as e:  # whatever it is, it belongs to the consumer
                answer = "failed", _pickled_error(e), traceback.format_exc()
            finally:
                slots.forget()
            conn.send_bytes(pickle.dumps((*answer, warned), pickle.HIGHEST_PROTOCOL))
            warned.clear()


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
        self._conn.send_bytes(pickle.dumps(("slot", dict(fields), rows), pickle.HIGHEST_PROTOCOL))
        number, known = pickle.loads(self._conn.recv_bytes())
        # Kept mapped as long as the parent has it: to map it again costs a page fault every 4 KiB. No longer, since that holds the memory.
        self._mapped = {n: mapped for n, mapped in self._mapped.items() if n in known}
        if number not in self._mapped:
            self._conn.send_bytes(pickle.dumps(("memory",)))
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
        file = io.BytesIO()
        _BatchPickler(file, self._reference).dump(batches)
        return file.getvalue()

    def forget(self) -> None:
        """The slots that were taken are the parent's again."""
        self._taken.clear()

    def _reference(self, tensor: torch.Tensor) -> _Reference | None:
        if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.requires_grad or not tensor.numel():
            return None
        for slot in self._taken:
            if (found := _place(tensor, slot)) is not None:
                return found
        if tensor.nbytes < _IN_PLACE:
            return None
        # In the order of its strides it is contiguous, if it has no gaps: channels_last stays so.
        order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
        if not tensor.permute(order).is_contiguous():
            tensor, order = tensor.contiguous(), list(range(tensor.ndim))
        slot = self.take({"bytes": ((), _BYTE)}, _rounded(tensor.nbytes))
        torch.from_numpy(slot.arrays["bytes"][: tensor.nbytes]).copy_(tensor.permute(order).reshape(-1).view(torch.uint8))
        return _Reference(slot.number, "bytes", 0, tensor.nbytes, tensor.dtype, tuple(tensor.shape), tensor.stride())


def _rounded(num_bytes: int) -> int:
    """Up to an eighth more, so that tensors whose size changes a little find a slot that was used before."""
    step = 1 << max(num_bytes.bit_length() - 4, 0)
    return -(-num_bytes // step) * step


def _place(tensor: torch.Tensor, slot: Slot) -> _Reference | None:
    """The reference to a tensor that lies in the slot, else None."""
    size, stride = tuple(tensor.shape), tuple(tensor.stride())
    num_bytes = (sum((n - 1) * step for n, step in zip(size, stride, strict=True)) + 1) * tensor.itemsize
    for name, array in slot.arrays.items():
        start = tensor.data_ptr() - array.__array_interface__["data"][0]
        if 0 <= start <= start + num_bytes <= array.nbytes:
            return _Reference(slot.number, name, start, start + num_bytes, tensor.dtype, size, stride)
    return None


class _BatchPickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, reference: Callable[[torch.Tensor], _Reference | None]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._reference = reference

    def persistent_id(self, obj: Any) -> _Reference | None:
        return self._reference(obj) if type(obj) is torch.Tensor else None

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is torch.Tensor and obj.device.type == "cpu" and obj.layout == torch.strided and not obj.requires_grad:
            with suppress(TypeError):  # bfloat16 and its like
                return torch.from_numpy, (obj.numpy(),)  # a tenth of the time that torch's own way takes
        return NotImplemented
