"""Keeps the thread pools of OpenCV and torch from getting in the way of our own threads."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import cv2
import torch

from loaders.handles import ForkAware


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """The caller's thread without torch's intra-op threads: a batch is small work, for which they cost more than they do, and in a forked
    child they hang (GNU OpenMP)."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _QuietOpenCV(ForkAware):
    """Keeps OpenCV's own thread pool off while any `Ordered` is open; its size is one number for the whole process."""

    def __init__(self) -> None:
        super().__init__()
        self._open = 0
        self._before = 0

    def after_fork(self) -> None:
        super().after_fork()
        if self._open:  # those iterators end with the parent, and not here
            self._open = 0
            cv2.setNumThreads(self._before)

    def enter(self) -> None:
        with self.lock:
            if self._open == 0:
                self._before = cv2.getNumThreads()
                cv2.setNumThreads(0)
            self._open += 1

    def leave(self) -> None:
        with self.lock:
            self._open -= 1
            if self._open == 0:
                cv2.setNumThreads(self._before)


quiet_opencv = _QuietOpenCV()
