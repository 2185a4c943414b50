"""Open shards, kept per process and bounded in number; files that change under their reader; locks that survive fork()."""

from __future__ import annotations

import errno
import mmap
import os
import resource
import stat
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")

_MAX_VIEWS = 1024  # IOV_MAX of Linux and macOS
_CAN_ADVISE = hasattr(os, "posix_fadvise")  # not on macOS


_LARGE_MAP = 16 << 20
_AREA = 1 << 20
_MOST_EXTRA_MAPS = 1 << 14
"""Linux lets a process have 65,530 maps, threads and tensors included, unless it is told otherwise."""
_TRIES = 4  # other threads may take what was let go
_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


def max_open_shards() -> int:
    """How many shards one data set keeps open: a quarter of the files that this process may have open, 16 to 512."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 512 if soft == resource.RLIM_INFINITY else max(16, min(512, soft // 4))


def is_shortage(error: OSError) -> bool:
    """Whether the process lacks files or memory, so that the error says nothing about the data."""
    return error.errno in _SHORTAGES


def shortage(error: OSError, path: Path) -> OSError:
    """The same error, with the way out. It has one argument, so that it crosses process borders unchanged."""
    what = "give the process more memory, addresses (`ulimit -v`) or maps (`sysctl vm.max_map_count`)"
    if error.errno != errno.ENOMEM:
        what = "raise the limit of open files (`ulimit -n`)"
    return OSError(
        f"{path}: cannot be opened: {error.strerror}. The data may be sound: {what}, or open fewer data sets, with fewer workers, at a time"
    )


class ForkAware:
    """Has a `lock` that is new in a forked child: another thread of the parent may have held it, which no child has to let go."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        with _registry:
            _fork_aware.add(self)

    def before_fork(self) -> None:
        """Called in the parent, before it forks."""

    def after_fork(self) -> None:
        """Called in a forked child, before it does anything else."""
        self.lock = threading.RLock()

    def let_go(self) -> None:
        """Called where the process lacks files or memory: free what can be made again."""


_fork_aware: weakref.WeakSet[ForkAware] = weakref.WeakSet()
_registry = threading.RLock()  # a set that another thread adds to cannot be walked through


def _before_fork() -> None:
    with _registry:
        known = list(_fork_aware)
    for each in known:
        each.before_fork()


def _after_fork() -> None:
    global _registry
    _registry = threading.RLock()
    for each in list(_fork_aware):
        each.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_child=_after_fork)


class ProcessCache(ForkAware, Generic[T]):
    """The most recently used values, made when first asked for. A forked child starts with an empty one.

    An evicted value lives on while a reader holds it: a file closes itself when the last reference goes.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._items: OrderedDict[Hashable, T] = OrderedDict()
        super().__init__()  # last: from now on other threads may empty it

    def after_fork(self) -> None:
        super().after_fork()
        self._items = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """The value kept under `key`, or ``make()``, which is then kept. Where `make` lacks files or memory, all caches are emptied."""
        with self.lock:
            if key in self._items:
                self._items.move_to_end(key)
                return self._items[key]
        made = _made(make)  # not under the lock: opening a file on a network drive may take long
        with self.lock:
            value = self._items.setdefault(key, made)
            while len(self._items) > self._limit:
                self._items.popitem(last=False)
        return value

    def clear(self) -> None:
        with self.lock:
            self._items.clear()

    let_go = clear

    def __len__(self) -> int:
        with self.lock:
            return len(self._items)


def _made(make: Callable[[], T]) -> T:
    for _ in range(_TRIES - 1):
        try:
            return make()
        except OSError as e:
            if not is_shortage(e):
                raise
        with _registry:
            known = list(_fork_aware)
        for each in known:
            each.let_go()
    return make()


class _ExtraMaps(ForkAware):
    """Counts maps beyond one for each file, over all data sets of the process."""

    def __init__(self) -> None:
        self.count = 0
        super().__init__()

    def change(self, by: int) -> bool:
        with self.lock:
            if self.count + by > _MOST_EXTRA_MAPS:
                return False
            self.count += by
            return True


_extra_maps = _ExtraMaps()


def may_have_maps(count: int, owner: object) -> bool:
    """Whether `owner` may have so many maps more than it must, which then go when it goes."""
    if not _extra_maps.change(count):
        return False
    weakref.finalize(owner, _extra_maps.change, -count).atexit = False
    return True


class OpenFile:
    """A regular file open for `os.preadv`; closed with its last reference. `size`: its bytes when it was opened.

    Raises:
        OSError: it cannot be opened, or is no regular file.
    """

    __slots__ = ("fd", "size")

    def __init__(self, path: Path) -> None:
        self.fd = -1
        self.fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe would wait for its writer for ever
        status = os.fstat(self.fd)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "is no regular file", str(path))
        self.size = status.st_size

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)

    def size_now(self) -> int:
        """Its bytes at this moment."""
        return os.fstat(self.fd).st_size

    def read_scattered(self, views: list[memoryview], offset: int, size: int) -> int:
        """Fill several views of `size` bytes in all, one after the other, with the bytes from `offset` on.

        Returns the number of bytes read, less than `size` only at the end of the file.
        """
        done = os.preadv(self.fd, views[:_MAX_VIEWS], offset)
        count, left = done, views
        while count > 0 and done < size:
            whole = 0
            while count >= len(left[whole]):
                count -= len(left[whole])
                whole += 1
            left = [left[whole][count:], *left[whole + 1 :]]
            count = os.preadv(self.fd, left[:_MAX_VIEWS], offset + done)
            done += count
        return done

    def will_need(self, offset: int, size: int) -> None:
        """Let the operating system begin to read these bytes, where it can be told."""
        if _CAN_ADVISE:
            os.posix_fadvise(self.fd, offset, size, os.POSIX_FADV_WILLNEED)


class MapWatch:
    """Notices when a mapped file gets shorter or longer: the operating system ends a process that touches pages which are gone (SIGBUS).

    Args:
        maps: path and mapped array of each file, or the open file that was mapped; arrays that are no maps are left out.
    """

    __slots__ = ("_files",)

    def __init__(self, maps: Sequence[tuple[Path, NDArray[Any] | OpenFile]]) -> None:
        self._files: list[tuple[Path, Callable[[], int], int]] = []
        for path, mapped in maps:
            file = mapped if isinstance(mapped, OpenFile) else _map_below(mapped)
            if isinstance(file, OpenFile):
                self._files.append((path, file.size_now, file.size))
            elif file is not None:
                self._files.append((path, file.size, file.size()))

    def changed(self) -> str | None:
        """What is said about the first file whose size is another than when it was mapped; None where all are as they were."""
        for path, size_now, size in self._files:
            now = size_now()
            if now != size:
                return f"{path}: has {now} bytes, and had {size} when it was opened: it was changed while in use"
        return None


def give_back(array: NDArray[Any]) -> None:
    """Take the pages of an array that is mapped for reading out of this process; they come back, from the page cache, when used."""
    below = _map_below(array)
    if below is not None and hasattr(mmap, "MADV_DONTNEED"):
        below.madvise(mmap.MADV_DONTNEED)


def map_sparsely(array: NDArray[Any]) -> None:
    """For a large mapped array of which little is read: count as this process's memory little more than that, where it may have the maps.

    Linux keeps freshly written files in pieces of up to 2 MB, and maps all of one where a byte of it is touched: 64 rows of an index of 60
    MB would map most of it. It maps nothing beyond an area of equal advice, and this advice ("not in core dumps") changes nothing else.
    """
    below = _map_below(array)
    if below is None or len(below) < _LARGE_MAP or not hasattr(mmap, "MADV_DONTDUMP"):
        return
    if not may_have_maps(len(below) // _AREA, below):
        return
    with suppress(OSError):
        for start in range(0, len(below), 2 * _AREA):
            below.madvise(mmap.MADV_DONTDUMP, start, min(_AREA, len(below) - start))


def _map_below(array: NDArray[Any]) -> mmap.mmap | None:
    below: object = array
    while isinstance(below, np.ndarray):
        below = below.base
    return below if isinstance(below, mmap.mmap) else None
