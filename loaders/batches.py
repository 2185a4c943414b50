"""`BatchLoader`: packed data to batches, by threads or processes, in a fixed order that can be resumed.

What comes when is `loaders.epochs`, what one batch is made of `loaders.assemble`, its memory `loaders.slots`, the threads
`loaders.engine`, processes beside them `loaders.processes`. This module ties them together.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, cast

import torch
from torch.utils.data import IterableDataset, Subset

from loaders.arguments import function, whole
from loaders.assemble import BATCH_SOURCE, Batch, BatchMaker, BatchSource, PartMaker, gathers
from loaders.batch_transforms import begin_epoch
from loaders.collate import Collate, collate_list
from loaders.engine import Ordered
from loaders.epochs import Epochs, rank_and_world
from loaders.processes import Processes, RemoteMaker, Spec
from loaders.sampling import Remainder
from loaders.slots import Slots
from loaders.weighted import Weights


class BatchLoader:
    """Iterable over the batches of one epoch after the other.

        for epoch in range(10):
            for batch in batches: ...

    A batch is a dict: `image` [B, 3, H, W] of the stored dtype (uint8), channels_last in memory; `label` int64 [B] (classification) or
    `boxes`, `labels`, `difficult` as the collate gives them (detection); `key` and `index` int64 [B]; `valid` bool [B] under
    ``remainder="pad"``. Every batch has B rows and stays valid as long as it is held. Rows are sorted by index.

    Each epoch starts where the last one ended: an iterator begins at sample 0 of the current epoch, or where a loaded state says, and the
    epoch advances with the last batch. One iterator at a time: a new one, `close`, `load_state_dict` or `set_epoch` to another epoch make
    an older one raise `RuntimeError`. Leaving the loop early ends the threads too.

    Args:
        ds: `ShardDataset`, `MemmapDataset` or another `BatchSource`. Its `transform` runs in the threads.
        batch_size: samples per batch and rank, B.
        shuffle: False takes the samples as stored.
        seed: of the order.
        workers: threads; 0: none, a batch is made when it is asked for; None: the cores that this process may use, divided by the local
            ranks. Batches of small images are made several at a time (of a memmap up to 16, and 16 MiB; of tars up to 2048 samples), which
            are freed together. With no thread torch's own ones gather them: of tiny pictures as fast, but not while a step computes.
        processes: each worker makes its batches in a process of its own, which starts with the first epoch (a second or two) and lives
            until `close`. The batches are the same. Faster where Python's lock holds threads up: transforms in Python, and many small
            decodes (pictures of 256 pixels); `pack bench` compares. What the batches are made of must be picklable, and the script's work
            stand under ``if __name__ == "__main__":``.
        remainder: "drop" leaves out the samples that fill no batch on every rank; "pad" repeats the last one until they do, and `valid`
            is False for repeats: each sample is valid exactly once over all ranks.
        collate: for boxes: one of `loaders.collate` (default `collate_list`); or ``collate(samples) -> dict`` for anything else, called
            with a list of samples as ``ds[i]`` gives them.
        pin_memory: page-locked memory, for ``.to(device, non_blocking=True)``; None: when CUDA is available.
        rank: 0-based; None: of `torch.distributed`, else 0.
        world_size: None: of `torch.distributed`, else 1.
        weights: draws samples with replacement, ``len(ds)`` draws an epoch: one number of 0 or more per sample, [len(ds)], a sample being
            drawn in proportion to it; or "balanced", by the classes, see `loaders.weighted.balanced_weights`. A sample that is drawn
            again is augmented anew. None: each sample comes once.
        batch_transform: ``batch_transform(batch) -> batch``, called in the threads; its `set_epoch`, where it has one, before each epoch.
            Processes call copies of it, made when an epoch begins.

    An error comes at its batch and ends the iterator; the loader stays usable: its state is that before the batch, a new iterator begins
    the epoch again.

    Raises:
        TypeError: an argument is of another kind, or cannot be pickled for ``processes=True``.
        ValueError: an argument is out of range; an epoch has no batch; weights are no weights, or given with ``shuffle=False``; or the
            images differ in size and nothing makes them equal.
    """

    def __init__(
        self,
        ds: BatchSource,
        batch_size: int = 64,
        shuffle: bool = True,
        seed: int = 0,
        workers: int | None = None,
        remainder: Remainder = "drop",
        collate: Collate | Callable[[list[Batch]], Batch] | None = None,
        pin_memory: bool | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        weights: Weights | None = None,
        batch_transform: Callable[[Batch], Batch] | None = None,
        processes: bool = False,
    ) -> None:
        self.ds = _checked_source(ds)
        function("collate", collate, "collate(samples) -> dict")
        function("batch_transform", batch_transform, "batch_transform(batch) -> batch")
        self.batch_size = whole("batch_size", batch_size)
        self.rank, self.world_size = rank_and_world(rank, world_size)
        self._epochs = Epochs(ds, batch_size, shuffle, seed, remainder, self.rank, self.world_size, weights)
        self.collate = collate_list if collate is None else collate
        self.workers = default_workers() if workers is None else whole("workers", workers)
        self.batch_transform = batch_transform
        if self.workers < 0:
            raise ValueError(f"workers is {workers}, expected 0 or more, or None")
        self._check_images()
        if pin_memory and not torch.cuda.is_available():
            raise ValueError("pin_memory=True needs CUDA, which is not available here; pin_memory=None pins where it is")
        if not isinstance(processes, bool):
            raise TypeError(f"processes is {processes!r}, expected True or False: how many, `workers` says")
        if processes and not self.workers:
            raise ValueError("processes=True has no process with workers=0: give 1 or more, or None")
        self._pinned = torch.cuda.is_available() if pin_memory is None else pin_memory
        # Page-locked memory cannot be shared: what processes made is copied there. A batch of theirs may take a second slot, for what a
        # batch_transform or a collate makes.
        keep = (2 * self._ahead + 2) * (2 if processes else 1)
        self._slots = Slots(keep, pinned=self._pinned and not processes, shared=processes)
        self._processes = Processes(self.workers, self._slots) if processes else None
        self._make()  # what cannot be sent to processes is said now
        self._closed = False
        self._running: weakref.ref[_Iterator] | None = None

    @property
    def processes(self) -> bool:
        """Whether the workers are processes."""
        return self._processes is not None

    def _run(self) -> int:
        """Batches that are made at a time: one, where there is more to do than to gather them; never so many that a thread has no part in
        the epoch, or only one."""
        at_once = getattr(self.ds, "batches_at_once", None)
        if at_once is None or self.batch_transform is not None or not gathers(self.ds, self.collate):
            return 1
        fair = -(-len(self) // (2 * max(self.workers, 1)))
        return min(whole("batches_at_once", at_once(self.batch_size), 1), max(fair, 1))

    @property
    def _ahead(self) -> int:
        return self.workers + 2

    def _check_images(self) -> None:
        if gathers(self.ds, self.collate) and "image" not in self.ds.batch_fields():
            raise ValueError(
                "the images differ in size and cannot be stacked to batches: pack with `pack build --resize WxH` (the memmap layout needs "
                "that anyway), open the data set with a transform that gives one size, or pass a collate(samples) of your own"
            )

    @property
    def seed(self) -> int:
        """Of the order; `load_state_dict` replaces it."""
        return self._epochs.seed

    def __len__(self) -> int:
        """Batches of the current epoch; after `load_state_dict` those that remain of it."""
        return len(self._epochs)

    def __iter__(self) -> _Iterator:
        if self._closed:
            raise RuntimeError("the BatchLoader is closed")
        self._end_running()
        begin_epoch(self.batch_transform, self._epochs.epoch)
        maker = PartMaker(self._epochs.begin(), self._make(), gathers(self.ds, self.collate))
        iterator = _Iterator(self, Ordered(maker, len(self), self.workers, self._ahead, self._run(), maker.together))
        self._running = weakref.ref(iterator)
        return iterator

    def _make(self) -> BatchMaker | RemoteMaker:
        local = BatchMaker(self.ds, self._slots, self.collate, self.batch_transform)
        return local if self._processes is None else RemoteMaker(self._processes, Spec.of(local), self._pinned)

    def _end_running(self) -> None:
        iterator = self._running() if self._running is not None else None
        self._running = None
        if iterator is not None:
            iterator.close()

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch (0-based). The current epoch keeps its position: safe to call after `load_state_dict`."""
        if self._epochs.set_epoch(epoch):
            self._end_running()

    def state_dict(self) -> dict[str, Any]:
        """The position after the batches that were received (not those made ahead). Equal on all ranks; plain ints and a string."""
        return self._epochs.state().to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was called; batch size, ranks and workers may differ. The state's seed replaces this loader's.

        Raises:
            ValueError: it is no state, or of another data set, order or weights; nothing was changed.
        """
        self._epochs.load(state)
        self._end_running()

    def close(self) -> None:
        """End the threads and processes, and free the memory kept for reuse. Batches that are held stay valid."""
        self._closed = True
        self._end_running()
        if self._processes is not None:
            self._processes.close()
        self._slots.clear()

    def __enter__(self) -> BatchLoader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class _Iterator:
    """One epoch, or what remains of it."""

    def __init__(self, loader: BatchLoader, batches: Ordered[Batch]) -> None:
        self._loader = loader
        self._batches = batches
        self._finished = False

    def __iter__(self) -> _Iterator:
        return self

    def __len__(self) -> int:
        """Batches that are left."""
        return len(self._batches)

    def __next__(self) -> Batch:
        if self._finished:
            raise StopIteration
        if self._loader._running is None or self._loader._running() is not self:
            raise RuntimeError(
                "this iterator was ended: the BatchLoader was closed, moved to another epoch or state, or iterated anew (one iterator at a "
                "time; make a second BatchLoader for a second one)"
            )
        if len(self._batches) == 0:
            self._loader._epochs.next_epoch()  # a resumed epoch may have no batch left
            self._finish()
            raise StopIteration
        batch = next(self._batches)
        self._loader._epochs.received()
        if len(self._batches) == 0:
            self._finish()
        return batch

    def _finish(self) -> None:
        self._finished = True
        self._loader._running = None
        report = getattr(self._loader.ds, "report_replaced", None)
        if report is not None:
            report()

    def close(self) -> None:
        """End the threads."""
        self._batches.close()


def _checked_source(ds: Any) -> BatchSource:
    lacking = [name for name in BATCH_SOURCE if not hasattr(ds, name)]
    if not lacking:
        return cast("BatchSource", ds)
    kind = type(ds).__name__
    if isinstance(ds, IterableDataset):
        raise TypeError(f"ds is a {kind}, which gives samples in sequence: use torch's DataLoader, or ShardDataset or MemmapDataset here")
    if isinstance(ds, Subset):
        raise TypeError("ds is a torch Subset, which reads sample by sample: use ds.select(indices) of the packed data set instead")
    raise TypeError(f"ds is a {kind}, expected ShardDataset, MemmapDataset or another BatchSource (it has no {', '.join(lacking)})")


def default_workers() -> int:
    """The cores that this process may use, divided by the ranks on this machine (``LOCAL_WORLD_SIZE``, as torchrun sets it); at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    if not ranks.isdecimal() or int(ranks) < 1:
        raise ValueError(f"the environment variable LOCAL_WORLD_SIZE is {ranks!r}, expected a number of 1 or more; or give workers")
    return max(1, cores // int(ranks))
