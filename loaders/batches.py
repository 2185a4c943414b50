"""`BatchLoader`: packed data to batches, by threads, in a fixed order that can be resumed.

What comes when is `loaders.sampling`, what one batch is made of `loaders.assemble`, its memory `loaders.slots`, the threads
`loaders.engine`. This module ties them together and keeps the position.
"""

from __future__ import annotations

import operator
import os
import weakref
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

import torch

from loaders.assemble import Batch, BatchMaker, BatchSource
from loaders.collate import Collate, collate_list
from loaders.engine import Ordered
from loaders.sampling import ORDER_VERSION, STORED_ORDER, Order, Remainder, State, num_batches
from loaders.slots import Slots


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
        workers: threads; None: the cores that this process may use, divided by the local ranks; 0: none, all is done when asked for.
        remainder: "drop" leaves out the samples that fill no batch on every rank; "pad" repeats the last one until they do, and `valid`
            is False for repeats: each sample is valid exactly once over all ranks.
        collate: for boxes: one of `loaders.collate` (default `collate_list`); or ``collate(samples) -> dict`` for anything else, called
            with a list of samples as ``ds[i]`` gives them.
        pin_memory: page-locked memory, for ``.to(device, non_blocking=True)``; None: when CUDA is available.
        rank: 0-based; None: of `torch.distributed`, else 0.
        world_size: None: of `torch.distributed`, else 1.
        batch_transform: ``batch_transform(batch) -> batch``, called in the threads.

    Raises:
        ValueError: an argument is out of range; an epoch has no batch; or the images differ in size and nothing makes them equal.
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
        batch_transform: Callable[[Batch], Batch] | None = None,
    ) -> None:
        self.ds = ds
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = operator.index(seed)
        self.remainder: Remainder = remainder
        self.rank, self.world_size = _rank_and_world(rank, world_size)
        self.workers = default_workers() if workers is None else workers
        self.collate = collate_list if collate is None else collate
        self.batch_transform = batch_transform
        if self.workers < 0:
            raise ValueError(f"workers is {workers}, expected 0 or more, or None")
        self._check_batches()
        self._check_images()
        if pin_memory and not torch.cuda.is_available():
            raise ValueError("pin_memory=True needs CUDA, which is not available here; pin_memory=None pins where it is")
        pinned = torch.cuda.is_available() if pin_memory is None else pin_memory
        self._slots = Slots(keep=2 * self._ahead + 2, pinned=pinned)
        self._epoch = 0
        self._start = 0  # samples of the epoch that the running iterator, or the next one, leaves out
        self._loaded = False  # `_start` comes from a state that no iterator has begun with yet
        self._seen = 0
        self._closed = False
        self._running: weakref.ref[_Iterator] | None = None

    @property
    def _ahead(self) -> int:
        return self.workers + 2

    def _check_batches(self) -> None:
        count = len(self.ds)
        if num_batches(count, self.batch_size, self.world_size, self.remainder) == 0:
            way_out = "take a smaller batch_size, or remainder='pad'" if count else "the data set is empty"
            raise ValueError(
                f"no batch in an epoch: {count} samples, batch_size {self.batch_size} x world_size {self.world_size} = "
                f"{self.batch_size * self.world_size} a step, remainder {self.remainder!r}: {way_out}"
            )

    def _check_images(self) -> None:
        if self.ds.transform is None and isinstance(self.collate, Collate) and "image" not in self.ds.batch_fields():
            raise ValueError(
                "the images differ in size and cannot be stacked to batches: pack with `pack build --resize W,H` (the memmap layout needs "
                "that anyway), open the data set with a transform that gives one size, or pass a collate(samples) of your own"
            )

    def __len__(self) -> int:
        """Batches of the current epoch; after `load_state_dict` those that remain of it."""
        return num_batches(len(self.ds), self.batch_size, self.world_size, self.remainder, self._start)

    def __iter__(self) -> _Iterator:
        if self._closed:
            raise RuntimeError("the BatchLoader is closed")
        self._end_running()
        if not self._loaded:
            self._start = self._seen = 0
        self._loaded = False
        maker = BatchMaker(
            self.ds,
            self._slots,
            Order(len(self.ds), self.seed, self._epoch, self.shuffle),
            self.batch_size,
            self.rank,
            self.world_size,
            self.remainder,
            self._start,
            self.collate,
            self.batch_transform,
        )
        iterator = _Iterator(self, Ordered(maker, len(self), self.workers, self._ahead))
        self._running = weakref.ref(iterator)
        return iterator

    def _received(self) -> None:
        """Count a batch that the consumer is about to get."""
        self._seen = min(self._seen + self.batch_size * self.world_size, len(self.ds))
        if num_batches(len(self.ds), self.batch_size, self.world_size, self.remainder, self._seen) == 0:
            self._next_epoch()

    def _next_epoch(self) -> None:
        self._epoch, self._start, self._seen = self._epoch + 1, 0, 0

    def _end_running(self) -> None:
        iterator = self._running() if self._running is not None else None
        self._running = None
        if iterator is not None:
            iterator.close()

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch (0-based). The current epoch keeps its position: safe to call after `load_state_dict`."""
        if epoch < 0:
            raise ValueError(f"epoch is {epoch}, expected 0 or more")
        if epoch != self._epoch:
            self._end_running()
            self._epoch, self._start, self._seen, self._loaded = operator.index(epoch), 0, 0, False

    def _state(self) -> State:
        version = ORDER_VERSION if self.shuffle else STORED_ORDER
        return State(version, self.ds.fingerprint, len(self.ds), self.seed, self._epoch, self._seen)

    def state_dict(self) -> dict[str, Any]:
        """The position after the batches that were received (not those made ahead). Equal on all ranks; plain ints and a string."""
        return self._state().to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was called; batch size, ranks and workers may differ. The state's seed replaces this loader's.

        Raises:
            ValueError: it is no state, or of another data set or order; nothing was changed.
        """
        loaded = State.from_dict(state)
        loaded.check_same_data(self._state())
        self._end_running()
        self.seed, self._epoch = loaded.seed, loaded.epoch
        self._start = self._seen = loaded.samples_seen
        self._loaded = True

    def close(self) -> None:
        """End the threads and free the memory kept for reuse. Batches that are held stay valid."""
        self._closed = True
        self._end_running()
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
            self._finish()  # a resumed epoch may have no batch left
            self._loader._next_epoch()
            raise StopIteration
        batch = next(self._batches)
        self._loader._received()
        if len(self._batches) == 0:
            self._finish()
        return batch

    def _finish(self) -> None:
        self._finished = True
        self._loader._running = None

    def close(self) -> None:
        """End the threads."""
        self._batches.close()


def default_workers() -> int:
    """The cores that this process may use, divided by the ranks on this machine (``LOCAL_WORLD_SIZE``, as torchrun sets it); at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    if not ranks.isdecimal() or int(ranks) < 1:
        raise ValueError(f"the environment variable LOCAL_WORLD_SIZE is {ranks!r}, expected a number of 1 or more; or give workers")
    return max(1, cores // int(ranks))


def _rank_and_world(rank: int | None, world_size: int | None) -> tuple[int, int]:
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if (rank is None) != (world_size is None) and not distributed:
        raise ValueError(f"rank is {rank} and world_size {world_size}: give both or neither, else every process takes the same samples")
    if rank is None:
        rank = torch.distributed.get_rank() if distributed else 0
    if world_size is None:
        world_size = torch.distributed.get_world_size() if distributed else 1
    if world_size < 1 or not 0 <= rank < world_size:
        raise ValueError(f"rank is {rank} of world_size {world_size}, expected 0 to world_size - 1")
    return rank, world_size
