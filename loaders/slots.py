"""Memory that batches are assembled in, used again when nobody holds a tensor of it any more.

Fresh memory costs a page fault every 4 KiB: filling a new 38 MB batch takes several times as long as filling one whose pages are there.
"""

from __future__ import annotations

import errno
import math
import mmap
import os
import resource
import sys
import tempfile
import weakref
from collections import deque
from collections.abc import Mapping
from itertools import count as counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from loaders.handles import ForkAware
from loaders.scratch import COUNTS_ARE_EXACT as _COUNTS_ARE_EXACT

Fields = Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]
"""Name -> shape and dtype of one sample's value."""


_ALIGN = 64
_numbers = counter()
SPARE_FILES = 64
"""File descriptors that shared memory leaves to others."""


class SharedMemory:
    """Anonymous memory that other processes can map, too: by its descriptor `fd`, for as long as anybody holds it. It has no name, so
    nothing is left of it, whoever dies.

    It takes two file descriptors: `fd`, and one that `map` keeps while any view of it is alive, also when this object is gone.

    Raises:
        OSError: there is not that much; `errno.EMFILE` where fewer than `SPARE_FILES` descriptors would be left.
    """

    def __init__(self, num_bytes: int) -> None:
        self.fd = -1
        try:
            if hasattr(os, "memfd_create"):
                self.fd = os.memfd_create("shardpack-batch")
            else:  # macOS
                with tempfile.TemporaryFile() as file:
                    self.fd = os.dup(file.fileno())
            if hasattr(os, "posix_fallocate"):  # now, not by SIGBUS when a page is first written
                os.posix_fallocate(self.fd, 0, num_bytes)
            else:
                os.ftruncate(self.fd, num_bytes)
            self.map = mmap.mmap(self.fd, num_bytes)
            _check_spare_files(self.fd)
        except OSError as e:
            raise OSError(
                e.errno or errno.ENOMEM,
                f"no shared memory of {num_bytes:,} bytes for a batch: {e.strerror}. Take a smaller batch_size or fewer workers, or "
                "processes=False",
            ) from None

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


def _check_spare_files(fd: int) -> None:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(fd)  # of those that are free
    os.close(lowest)
    if limit != resource.RLIM_INFINITY and lowest > limit - SPARE_FILES:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


class Slot:
    """Arrays [rows, *shape] of one batch, `arrays`, to be filled by who took it.

    `mapped`: memory to take, of a slot with the same fields and rows in another process. `number`: unique in this process.
    """

    def __init__(self, fields: Fields, rows: int, pinned: bool = False, shared: bool = False, mapped: mmap.mmap | None = None) -> None:
        self.fields, self.rows, self.number = dict(fields), rows, next(_numbers)
        self.arrays: dict[str, NDArray[Any]] = {}
        self.pinned: dict[str, torch.Tensor] = {}
        *offsets, end = self._offsets()
        self.memory = SharedMemory(max(end, 1)) if shared else None
        memory = mapped if self.memory is None else self.memory.map
        for (name, (shape, dtype)), offset in zip(fields.items(), offsets, strict=True):
            if pinned:
                kind = torch.from_numpy(np.empty(0, dtype)).dtype
                self.pinned[name] = torch.empty((rows, *shape), dtype=kind, pin_memory=True)
            elif memory is not None:
                self.arrays[name] = np.ndarray((rows, *shape), dtype, buffer=memory, offset=offset)
            else:
                # NumPy asks for huge pages, torch does not: 6 against 20 to 39 ms for 39 MB.
                self.arrays[name] = np.empty((rows, *shape), dtype)
        self._idle = self._counts()
        self.arrays.update((name, tensor.numpy()) for name, tensor in self.pinned.items())

    def _offsets(self) -> list[int]:
        """Where each array begins in memory that is one piece, and the end."""
        offsets = [0]
        for shape, dtype in self.fields.values():
            end = offsets[-1] + self.rows * math.prod(shape) * dtype.itemsize
            offsets.append(-(-end // _ALIGN) * _ALIGN)
        return offsets

    def bytes(self, name: str) -> NDArray[np.uint8]:
        """An array's bytes, uint8 [n]: a view."""
        return self.arrays[name].reshape(-1).view(np.uint8)

    def _counts(self) -> list[int]:
        return [sys.getrefcount(array) for array in self.arrays.values()]

    def is_idle(self) -> bool:
        """Whether no tensor or view of the arrays is alive: each holds a reference to the array that owns the memory."""
        return _COUNTS_ARE_EXACT and self._counts() == self._idle


class Slots(ForkAware):
    """Lends slots; thread-safe. Never waits: when all are held, another is made.

    Args:
        keep: slots remembered for reuse. Of those that are held longer than that many batches, only their tensors keep the memory.
        pinned: take page-locked memory from torch's allocator, anew for each batch. That allocator waits for running copies to a device
            before it lends memory again, which reference counts cannot tell.
        shared: take memory that other processes can map.
    """

    def __init__(self, keep: int, pinned: bool, shared: bool = False) -> None:
        self.pinned, self.shared = pinned, shared
        self._ring: deque[Slot] = deque(maxlen=keep)
        self._all: weakref.WeakSet[Slot] = weakref.WeakSet()
        super().__init__()  # last: from now on a fork in another thread renews it

    def before_fork(self) -> None:
        if self.shared:  # the child has the same memory, no copy: what it may hold is not used again here
            with self.lock:
                self._ring = deque((slot for slot in self._ring if slot.is_idle()), self._ring.maxlen)

    def after_fork(self) -> None:
        super().after_fork()
        self._ring = deque(maxlen=self._ring.maxlen)
        self._all = weakref.WeakSet()

    def take(self, fields: Fields, rows: int) -> Slot:
        """A slot for the caller alone, with arbitrary content, until `lend`. One that never comes back costs nothing but its memory."""
        with self.lock:
            for place in reversed(range(len(self._ring))):  # what was used last is still in the processor's caches, if anything is
                slot = self._ring[place]
                if slot.rows == rows and slot.fields == fields and slot.is_idle():
                    del self._ring[place]
                    return slot
        slot = Slot(fields, rows, self.pinned, self.shared)
        with self.lock:
            self._all.add(slot)
        return slot

    def numbers(self) -> list[int]:
        """Of the slots that are taken, or may be taken again."""
        with self.lock:
            return [slot.number for slot in self._all]

    def lend(self, slot: Slot, count: int = 1) -> list[dict[str, torch.Tensor]]:
        """Tensors over a filled slot's arrays, cut into `count` batches of equal size. When the last of them (and of their views) is gone,
        the slot may be taken again."""
        size = slot.rows // count
        if self.pinned:
            return [{name: tensor[i * size : (i + 1) * size] for name, tensor in slot.pinned.items()} for i in range(count)]
        # Cut before they are tensors: each has a storage and a version of its own.
        cuts = [map(torch.from_numpy, array.reshape(count, size, *array.shape[1:])) for array in slot.arrays.values()]
        batches = [dict(zip(slot.arrays, each, strict=True)) for each in zip(*cuts, strict=True)]
        self.give_back(slot)
        return batches

    def give_back(self, slot: Slot) -> None:
        """It may be taken again as soon as no view of its arrays is alive."""
        with self.lock:
            self._ring.append(slot)

    def clear(self) -> None:
        """Forget all slots; tensors that are held keep their memory."""
        with self.lock:
            self._ring.clear()
