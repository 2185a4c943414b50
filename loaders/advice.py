"""From the numbers of an epoch to the most likely cause of waiting, and the setting to change."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

from loaders.batches import BatchLoader, default_workers

BUSY = 0.85
"""Of all cores: above it, more threads cannot help."""


class Advice(NamedTuple):
    """`cause` and `cure` are sentences without a full stop."""

    cause: str
    cure: str


class Numbers(Protocol):
    """What is used of a `loaders.monitor.Summary`."""

    @property
    def num_steps(self) -> int: ...
    @property
    def seconds(self) -> float: ...
    @property
    def data_s(self) -> float: ...
    @property
    def first_s(self) -> float: ...
    @property
    def cpu_share(self) -> float: ...
    @property
    def read_bytes(self) -> int | None: ...


def advise(numbers: Numbers, loader: Iterable[Any]) -> Advice:
    """The first that fits: a slow start, too few workers, a full processor, slow storage, or a lock held in Python."""
    loader = innermost(loader)
    cores = default_workers()
    workers = num_workers(loader)
    threads = isinstance(loader, BatchLoader)
    if numbers.num_steps > 1 and numbers.first_s > numbers.data_s / 2:
        if not threads and workers and not getattr(loader, "persistent_workers", True):
            return Advice("the worker processes start anew each epoch", "DataLoader(persistent_workers=True), or BatchLoader")
        return Advice("the first batch of the epoch takes most of the waiting", "longer epochs, or smaller batches")
    if workers == 0:
        return Advice("batches are made between the steps, not ahead of them", f"{'workers' if threads else 'num_workers'}={cores}")
    if numbers.cpu_share > BUSY:
        return Advice(
            f"decoding and transforms keep all {cores} cores busy",
            "pack at the size that training needs (`pack build --resize`), the memmap layout, or fewer pixels in the transform",
        )
    if workers is not None and workers < cores:
        return Advice(f"{workers} of {cores} cores make batches", f"{'workers' if threads else 'num_workers'}={cores}")
    if numbers.read_bytes is not None and numbers.read_bytes > 20e6 * numbers.seconds:
        rate = numbers.read_bytes / numbers.seconds / 1e6
        return Advice(
            f"the pictures come from storage, at {rate:,.0f} MB/s, and not from memory",
            "a faster disk, smaller pictures (`pack build --resize`, `--image jpg`), or more threads, so that more reads are under way",
        )
    threads = isinstance(loader, BatchLoader) and not loader.processes
    return Advice(
        "the threads wait for each other: a transform or collate in pure Python holds the interpreter's lock"
        if threads
        else "the workers wait for something other than the processor: storage, or passing batches between processes",
        "BatchLoader(processes=True), or OpenCV or NumPy calls in the transform; `pack bench` compares them"
        if threads
        else "BatchLoader with threads, which pass no batches between processes; `pack bench` compares them",
    )


def innermost(loader: Iterable[Any]) -> Iterable[Any]:
    """The loader under wrappers that keep theirs in `batches`, such as `DevicePrefetcher`."""
    while not isinstance(loader, BatchLoader) and hasattr(loader, "batches"):
        loader = loader.batches
    return loader


def num_workers(loader: object) -> int | None:
    """Threads or processes of a `BatchLoader` or a torch DataLoader; None: it has none that we know."""
    if isinstance(loader, BatchLoader):
        return loader.workers
    count = getattr(loader, "num_workers", None)
    return count if isinstance(count, int) else None
