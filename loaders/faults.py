"""Damaged samples: the error that names them, and what takes their place under ``on_error="replace"``."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import get_worker_info

from loaders.handles import ForkAware

OnError = Literal["raise", "replace"]
T = TypeVar("T")

# After 16 neighbours the tries double their distance, so that a whole missing shard costs few of them.
REPLACEMENT_OFFSETS = (*range(1, 17), *(1 << k for k in range(5, 40)))
_MAX_COUNTERS = 64
process_number: int | None = None
"""Of a process of `loaders.processes`, from 0; None in any other."""


class SampleError(RuntimeError):
    """A stored sample cannot be read: missing or short file, wrong checksum, undecodable image.

    The message names shard, key, source and the way out. It has one argument, so that it crosses process borders unchanged.
    """

    def __init__(self, message: str) -> None:
        # A name in a tar or on a disk need not be UTF-8, and an error that cannot be printed hides what it says.
        super().__init__(message.encode("utf-8", "backslashreplace").decode())


def share(values: torch.Tensor) -> torch.Tensor:
    """`values` in memory that worker processes share, however they are started."""
    if not values.is_shared():  # type: ignore[no-untyped-call]  # torch gives these two no types
        values.share_memory_()  # type: ignore[no-untyped-call]
    return values


class Replacements(ForkAware):
    """Finds a sample that takes the place of a damaged one, and counts in shared memory: what DataLoader workers replace counts too.

    Each worker has a counter of its own (64 at most; more than that share), since there is no lock between processes.
    """

    def __init__(self, counts: torch.Tensor | None = None) -> None:
        super().__init__()
        self._share(torch.zeros(_MAX_COUNTERS, dtype=torch.int64) if counts is None else counts)
        self._told = self.total

    def _share(self, counts: torch.Tensor) -> None:
        self._counts = share(counts)
        self._array: NDArray[np.int64] = self._counts.numpy()

    def __reduce__(self) -> tuple[type[Replacements], tuple[torch.Tensor]]:
        return Replacements, (self.counts,)

    @property
    def counts(self) -> torch.Tensor:
        """What all processes share."""
        return self._counts

    @property
    def total(self) -> int:
        """Samples that were replaced so far, over all processes."""
        return int(self._array.sum())

    def find(self, index: int, num_samples: int, read: Callable[[int], T], error: SampleError) -> tuple[int, T]:
        """``(other, read(other))`` for the next good sample after `index`. Depends on the data alone: the same in every process.

        Raises:
            SampleError: none of those that are tried (16 neighbours, then ever farther ones) can be read.
        """
        for offset in REPLACEMENT_OFFSETS:
            if offset >= num_samples:
                break
            other = (index + offset) % num_samples
            try:
                result = read(other)
            except SampleError:
                continue
            self.count(f"sample {index} was replaced by sample {other}", error)
            return other, result
        raise SampleError(f"{error}. No other sample that was tried in its place can be read either")

    def count(self, what: str, error: SampleError) -> None:
        """Count one; the first is told as a warning."""
        info = get_worker_info()
        process = process_number if info is None else info.id
        with self.lock:
            first = self.total == 0
            self._told += int(first)
            self._array[0 if process is None else 1 + process % (_MAX_COUNTERS - 1)] += 1
        if first:
            warnings.warn(f"{what}; further ones are counted in num_replaced only: {error}", stacklevel=2)

    def report(self, when: str) -> None:
        """Warn of what was replaced since the last report and not told by a warning of its own."""
        total = self.total
        new, self._told = total - self._told, total
        if new > 0:
            warnings.warn(f"{when}: {new} damaged sample(s) were replaced by others. `pack verify` lists what is damaged", stacklevel=2)
