"""`BatchLoader`'s order for torch's own DataLoader: `PackedBatchSampler` and `PackedSampler`.

    batches = PackedBatchSampler(ds, batch_size=64, seed=0)
    loader = DataLoader(ds, batch_sampler=batches, num_workers=2, collate_fn=collate_list)
    for epoch in range(10):
        batches.set_epoch(epoch)
        for batch in loader: ...

Batches, ranks, remainder, weights and states are those of `loaders.batches.BatchLoader`: a state of one resumes the other.

A DataLoader with workers asks for batches ahead of its consumer, so a sampler cannot know what was received. Two ways to an exact state:
torchdata's `StatefulDataLoader`, which keeps the sampler's state of each batch until the batch is received (``loader.state_dict()``; then
the number of workers must stay, its rule); or ``sampler.state_dict(received=n)`` with the number of batches that the running loop got,
with which everything may change.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Sampler

from loaders.arguments import whole
from loaders.epochs import EpochPart, Epochs, Source, rank_and_world
from loaders.sampling import Remainder
from loaders.weighted import Weights


class _Stateful:
    """Epochs and states of both samplers. `ds`: its `set_epoch`, where it has one, is called with the epoch that an iteration begins, so
    that its transform draws what it would in `BatchLoader`, also in workers that are running."""

    def __init__(
        self,
        ds: Source,
        batch_size: int = 64,
        shuffle: bool = True,
        seed: int = 0,
        remainder: Remainder = "drop",
        rank: int | None = None,
        world_size: int | None = None,
        weights: Weights | None = None,
    ) -> None:
        self.batch_size = batch_size
        self.rank, self.world_size = rank_and_world(rank, world_size)
        self._ds = ds
        self._epochs = Epochs(ds, batch_size, shuffle, seed, remainder, self.rank, self.world_size, weights)
        self._part: EpochPart | None = None
        self._began = self._epochs.state()
        self._running: weakref.ref[_Batches] | None = None

    def _batches(self) -> _Batches:
        """Begin an iteration; an older one ends."""
        self._part = self._epochs.begin()
        self._began = self._epochs.state()
        set_epoch = getattr(self._ds, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(self._part.order.epoch)
        batches = _Batches(self, self._part, len(self._epochs))
        self._running = weakref.ref(batches)
        return batches

    def valid(self, number: int) -> NDArray[np.bool_]:
        """Which rows of batch `number` (0-based, of the iteration that was begun last) are real: bool [B], False for those that only pad
        under ``remainder="pad"``. The counterpart of `BatchLoader`'s ``batch["valid"]``.

        Raises:
            IndexError: there is no such batch.
            RuntimeError: no iteration was begun.
        """
        if self._part is None:
            raise RuntimeError("no iteration was begun yet: `valid` speaks of the batches of a running one")
        return self._part.batch(number)[2]

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch (0-based). The current epoch keeps its position: safe to call after `load_state_dict`."""
        if self._epochs.set_epoch(epoch):
            self._move()

    def state_dict(self, received: int | None = None) -> dict[str, Any]:
        """The position after the batches that were taken from the sampler; plain ints and a string.

        Args:
            received: the position after that many batches of the iteration that was begun last, instead; where `load_state_dict` or
                `set_epoch` has moved the sampler since, of the one to come. A DataLoader with workers takes batches ahead, so give the
                number that its consumer got.

        Raises:
            TypeError: `received` is no whole number.
            ValueError: that iteration has not so many batches.
        """
        if received is None:
            return self._epochs.state().to_dict()
        return self._epochs.state_after(self._began, whole("received", received)).to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict`, of a sampler or of a `BatchLoader`, was called; batch size, ranks and workers may differ.

        Raises:
            ValueError: it is no state, or of another data set, order or weights; nothing was changed.
        """
        self._epochs.load(state)
        self._move()

    def _move(self) -> None:
        """A running iterator ends; the position is where the next one begins."""
        self._running = None
        self._began = self._epochs.state()


class _Batches:
    """One iteration. A class, not a generator: the epoch must be taken when the iteration is begun, not when its first batch is."""

    def __init__(self, sampler: _Stateful, part: EpochPart, total: int) -> None:
        self._sampler, self._part = sampler, part
        self._next, self._total = 0, total

    def __iter__(self) -> _Batches:
        return self

    def __next__(self) -> list[int]:
        indices = self.take()
        self.count()
        return indices

    def take(self) -> list[int]:
        """The next batch, not counted yet; StopIteration after the last."""
        if self._next == self._total:
            if self._total == 0 and self._is_running():  # a resumed epoch may have no batch left
                self._sampler._running = None
                self._sampler._epochs.next_epoch()
            raise StopIteration
        self._check_running()
        indices: list[int] = self._part.batch(self._next)[0].tolist()
        self._next += 1
        return indices

    def count(self) -> None:
        """Count the batch that was taken last, unless the sampler was moved since: it would count there."""
        self._check_running()
        self._sampler._epochs.received()

    def _check_running(self) -> None:
        if not self._is_running():
            raise RuntimeError(
                "this iterator was ended: its sampler was moved to another epoch or state, or iterated anew (one iterator at a time; make "
                "a second sampler for a second DataLoader)"
            )

    def _is_running(self) -> bool:
        return self._sampler._running is not None and self._sampler._running() is self


class PackedBatchSampler(_Stateful, Sampler[list[int]]):
    """Batches of indices, for DataLoader's ``batch_sampler=``: each a list of `batch_size` ints, ascending.

    Arguments and errors are those of `BatchLoader`. `ds` is the data set that the DataLoader reads; it needs ``len``, `fingerprint` and,
    for ``weights="balanced"``, `labels` and `box_offsets`. Every rank gets the same number of batches. One iterator at a time.

    With `weights`, a sample that is drawn again in an epoch has the same augmentation each time, since a DataLoader passes on no more than
    its index; `BatchLoader` draws anew.
    """

    def __len__(self) -> int:
        """Batches of the current epoch; after `load_state_dict` those that remain of it."""
        return len(self._epochs)

    def __iter__(self) -> Iterator[list[int]]:
        return self._batches()


class PackedSampler(_Stateful, Sampler[int]):
    """The indices of `PackedBatchSampler`, one by one: for DataLoader's ``sampler=``, with the same `batch_size` given to both. Where a
    batch ends decides which rank gets what. A state counts whole batches."""

    def __len__(self) -> int:
        """Indices of the current epoch; after `load_state_dict` those that remain of it."""
        return len(self._epochs) * self.batch_size

    def __iter__(self) -> Iterator[int]:
        return _Indices(self._batches())


class _Indices:
    """The indices of an iteration's batches; a batch counts with its last one."""

    def __init__(self, batches: _Batches) -> None:
        self._batches = batches
        self._rest: list[int] = []

    def __iter__(self) -> _Indices:
        return self

    def __next__(self) -> int:
        if not self._rest:
            self._rest = self._batches.take()[::-1]
        index = self._rest.pop()
        if not self._rest:
            self._batches.count()
        return index
