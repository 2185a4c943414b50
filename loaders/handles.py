"""Open shards, kept per process and bounded in number."""

from __future__ import annotations

import os
import resource
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Generic, TypeVar

T = TypeVar("T")

_MAX_VIEWS = 1024  # IOV_MAX of Linux and macOS
_CAN_ADVISE = hasattr(os, "posix_fadvise")  # not on macOS


def max_open_shards() -> int:
    """How many shards one data set keeps open: a quarter of the files that this process may have open, 16 to 512."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 512 if soft == resource.RLIM_INFINITY else max(16, min(512, soft // 4))


class ProcessCache(Generic[T]):
    """The most recently used values, made when first asked for. A forked child starts with an empty one.

    An evicted value lives on while a reader holds it: a file closes itself when the last reference goes.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._pid = os.getpid()
        self._items: OrderedDict[Hashable, T] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def lock(self) -> threading.Lock:
        """This process's lock. Another thread may have held the parent's at the time of a fork: a child must never wait for that one."""
        if self._pid != os.getpid():
            self._lock, self._items, self._pid = threading.Lock(), OrderedDict(), os.getpid()
        return self._lock

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """The value kept under `key`, or ``make()``, which is then kept."""
        with self.lock:
            if key in self._items:
                self._items.move_to_end(key)
                return self._items[key]
        made = make()  # not under the lock: opening a file on a network drive may take long
        with self.lock:
            value = self._items.setdefault(key, made)
            while len(self._items) > self._limit:
                self._items.popitem(last=False)
        return value

    def __len__(self) -> int:
        with self.lock:
            return len(self._items)


class OpenFile:
    """A file open for `os.preadv`; closed with its last reference.

    Raises:
        OSError: it cannot be opened.
    """

    __slots__ = ("fd",)

    def __init__(self, path: Path) -> None:
        self.fd = -1
        self.fd = os.open(path, os.O_RDONLY)

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)

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
