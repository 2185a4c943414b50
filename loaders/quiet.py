"""Keeps the thread pools of OpenCV and torch from getting in the way of our own threads."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import cv2
import torch

from loaders.handles import ForkAware


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """The caller's thread without torch's intra-op threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Forked(ForkAware):
    """Whether this process was forked: there torch's intra-op threads may hang (GNU OpenMP)."""

    def __init__(self) -> None:
        super().__init__()
        self.here = False

    def after_fork(self) -> None:
        super().after_fork()
        self.here = True


_forked = _Forked()


def intra_op(is_large: bool) -> contextlib.AbstractContextManager[None]:
    """For work in the caller's thread: torch's intra-op threads where it is large, 16 MB or so; for less they cost more than they do."""
    return contextlib.nullcontext() if is_large and not _forked.here else one_thread()


def be_one_of_many() -> None:
    """For a process that is one of many beside the training: one thread for OpenCV and torch each, and no CUDA."""
    cv2.setNumThreads(0)
    torch.set_num_threads(1)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a device taken by accident costs some 500 MB for each


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
