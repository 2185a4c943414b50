"""Memory for reading and decoding pictures, kept per thread. Fresh memory for 36 MB costs half as much as the decode that fills it."""

from __future__ import annotations

import math
import sys
import sysconfig
import threading

import numpy as np
from numpy.typing import NDArray

# Without the GIL reference counts are split over threads, and `sys.getrefcount` is no proof that nobody else holds an array.
COUNTS_ARE_EXACT = not sysconfig.get_config_var("Py_GIL_DISABLED")
_MIN_BYTES = 1 << 20
_MAX_BYTES = 1 << 27
"""Larger memory is not kept."""


class Scratch:
    """Lends each thread one array for each use again and again. Nobody has to give it back: as long as any view of it lives, another one is
    made."""

    def __init__(self) -> None:
        self._local = threading.local()

    def blank(self, shape: tuple[int, ...], use: str = "pixels") -> NDArray[np.uint8]:
        """A C-contiguous uint8 array of `shape` with arbitrary content, the caller's alone while a view of it lives."""
        num_bytes = math.prod(shape)
        if num_bytes > _MAX_BYTES or not COUNTS_ARE_EXACT:
            return np.empty(shape, np.uint8)
        kept: list[NDArray[np.uint8]] = self._local.__dict__.setdefault(use, [])
        # A view refers to the array that owns the memory. Two references are this list's and the one that the call makes.
        if not kept or kept[0].size < num_bytes or sys.getrefcount(kept[0]) > 2:
            size = max(_MIN_BYTES, num_bytes + num_bytes // 8)
            kept[:] = [np.empty(min(size, _MAX_BYTES), np.uint8)]
        return kept[0][:num_bytes].reshape(shape)
