"""Rows of several files as one array: each file is mapped where the array's rows would lie."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import resource
import sys
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from loaders.handles import ForkAware, OpenFile, is_shortage, max_open_shards, may_have_maps

_MOST_ADDRESSES = 1 << 42
"""A process has 2**47 at least."""
_MAP_FIXED = 0x10  # of Linux and macOS; Python's module does not name these two
_MAP_NORESERVE = 0x4000 if sys.platform == "linux" else 0x40


class RowKind(NamedTuple):
    """What one row of a file is: `values` of `dtype`; the first comes after `start` bytes."""

    values: int
    dtype: np.dtype[Any]
    start: int

    @property
    def num_bytes(self) -> int:
        return self.values * self.dtype.itemsize


class Rows(NamedTuple):
    """`array` [V, values] has a file's rows, from `first` on. `watched`: what `MapWatch` can tell by whether the file is as it was."""

    array: NDArray[Any]
    first: int
    watched: OpenFile | NDArray[Any]


class MappedRows(ForkAware):
    """Maps files of rows for reading and, private to the process, for writing. Thread-safe.

    Where all files hold the same kind of rows, they are joined: part of one array, so that one call gathers from all of them. A call for
    each takes half as much again, where batches are small. Between the files that array has rows of nothing.

    Joined files stay mapped, with what was written into them, as long as this object or any view of one of them. They are not joined where
    they are many, where the process is allowed few addresses, and any more once it lacked memory or maps.

    Args:
        num_bytes: of each file, int64 [files].
        counts: rows of each file, int64 [files].
    """

    def __init__(self, num_bytes: NDArray[np.int64], counts: NDArray[np.int64]) -> None:
        self._num_bytes, self._counts = num_bytes, counts
        self._joined: _Joined | None = None
        self._may_join = len(counts) <= max_open_shards()
        super().__init__()

    def let_go(self) -> None:
        with self.lock:
            self._joined, self._may_join = None, False

    @property
    def joined(self) -> NDArray[Any] | None:
        """The array of all files, where there is one by now."""
        return None if self._joined is None else self._joined.rows

    def map(self, number: int, file: OpenFile, kind: RowKind) -> Rows:
        """Rows of file `number`.

        Raises:
            OSError: it cannot be mapped.
        """
        with self.lock:
            if self._joined is None and self._may_join:
                self._joined = self._join(kind)
                self._may_join = self._joined is not None
            joined = self._joined
            try:
                if joined is not None and joined.kind == kind and joined.add(number, file):
                    return Rows(joined.rows, int(joined.firsts[number]), file)
            except OSError as e:
                if not is_shortage(e):
                    raise
                self.let_go()
        memory = mmap.mmap(file.fd, file.size, access=mmap.ACCESS_COPY)  # which has a file descriptor of its own
        array = np.ndarray((self._counts[number], kind.values), kind.dtype, memory, kind.start)
        return Rows(array, 0, array)

    def _join(self, kind: RowKind) -> _Joined | None:
        if not kind.num_bytes or (self._num_bytes != kind.start + self._counts * kind.num_bytes).any():
            return None
        step = math.lcm(kind.num_bytes, mmap.PAGESIZE)  # from where a file can be mapped, and a row begins
        places = np.cumsum([0, *(-(-self._num_bytes // step) * step)], dtype=np.int64)
        total = int(places[-1])
        if total > _MOST_ADDRESSES or sys.platform not in ("linux", "darwin"):
            return None
        if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:  # `ulimit -v`: others need addresses, too
            return None
        try:
            addresses = mmap.mmap(-1, total, mmap.MAP_PRIVATE | _MAP_NORESERVE)
        except OSError:
            return None
        if not may_have_maps(2 * len(self._counts), addresses):  # each file's, and what is between it and the next
            return None
        array = np.ndarray(((total - kind.start) // kind.num_bytes, kind.values), kind.dtype, addresses, kind.start)
        return _Joined(kind, array, places[:-1] // kind.num_bytes)


@dataclass(frozen=True, slots=True)
class _Joined:
    """`rows` [V, values]; ``firsts[i]``: where file i begins in it."""

    kind: RowKind
    rows: NDArray[Any]
    firsts: NDArray[np.int64]
    _added: dict[int, tuple[int, int, int]] = field(default_factory=dict)

    def add(self, number: int, file: OpenFile) -> bool:
        """Map file `number`. False where another file is mapped in its place: what is held of that must not change."""
        status = os.fstat(file.fd)
        identity = status.st_dev, status.st_ino, status.st_mtime_ns
        if number not in self._added:
            _map_at(self.rows.ctypes.data - self.kind.start + int(self.firsts[number]) * self.kind.num_bytes, file)
            self._added[number] = identity
        return self._added[number] == identity


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_ssize_t)


def _map_at(address: int, file: OpenFile) -> None:
    """In the place of what is mapped there, to which it is bound from now on."""
    flags = mmap.MAP_PRIVATE | _MAP_FIXED | _MAP_NORESERVE
    found = _libc.mmap(address, file.size, mmap.PROT_READ | mmap.PROT_WRITE, flags, file.fd, 0)
    if found != address:
        error = ctypes.get_errno()
        # What was there may be gone: nobody else must get these addresses.
        _libc.mmap(address, file.size, mmap.PROT_READ, flags | mmap.MAP_ANONYMOUS, -1, 0)
        raise OSError(error, os.strerror(error))
