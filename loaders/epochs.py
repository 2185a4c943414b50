"""Where in which epoch a loader stands, and what comes next: for `BatchLoader` and the samplers. Holds no data and no thread."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from loaders.arguments import whole
from loaders.sampling import ORDER_VERSION, STORED_ORDER, WEIGHTS_MARK, Order, Remainder, SampleOrder, State, num_batches, rows_of_batches
from loaders.weighted import WEIGHTED_VERSION, WeightedOrder, Weights, weight_table


class Source(Sized, Protocol):
    """What an order is made for."""

    @property
    def fingerprint(self) -> str:
        """Equal strings mean the same samples in the same order; resuming relies on it."""
        ...


@dataclass(frozen=True, slots=True)
class EpochPart:
    """The batches of one rank in an epoch, from `samples_seen` on. Never changes: any thread may ask for any batch."""

    order: SampleOrder
    batch_size: int
    rank: int
    world_size: int
    remainder: Remainder
    samples_seen: int

    def batches(self, numbers: range) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
        """Indices, places in the order, validity of consecutive batches, as `loaders.sampling.rows_of_batches` gives them."""
        return rows_of_batches(self.order, numbers, self.batch_size, self.rank, self.world_size, self.remainder, self.samples_seen)

    def batch(self, number: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
        """The same of one batch, [B] each."""
        indices, places, valid = self.batches(range(number, number + 1))
        return indices[0], places[0], valid[0]


class Epochs:
    """One epoch after the other, each cut into batches.

    An epoch begins at sample 0, or where a loaded state says; `received` counts batches, and the epoch advances with its last one.
    Arguments are those of `BatchLoader`.

    Raises:
        ValueError: an argument is out of range; an epoch has no batch; weights are no weights, or given with ``shuffle=False``.
    """

    def __init__(
        self,
        ds: Source,
        batch_size: int,
        shuffle: bool,
        seed: int,
        remainder: Remainder,
        rank: int,
        world_size: int,
        weights: Weights | None,
    ) -> None:
        self.batch_size, self.shuffle, self.seed = whole("batch_size", batch_size), bool(shuffle), whole("seed", seed)
        self.remainder: Remainder = remainder
        self.rank, self.world_size = rank, world_size
        self.num_samples = len(ds)
        self._ds = ds
        self._check_batches()
        if weights is not None and not shuffle:
            raise ValueError("weights draw samples at random, which shuffle=False excludes: leave out one of them")
        self._table = None if weights is None else weight_table(weights, ds)
        self.epoch = 0
        self._start = 0  # samples of the epoch that the running iterator, or the next one, leaves out
        self._loaded = False  # `_start` comes from a state that no iterator has begun with yet
        self._seen = 0

    def _check_batches(self) -> None:
        count = self.num_samples
        if num_batches(count, self.batch_size, self.world_size, self.remainder) == 0:
            way_out = "take a smaller batch_size, or remainder='pad'" if count else "the data set is empty"
            raise ValueError(
                f"no batch in an epoch: {count} samples, batch_size {self.batch_size} x world_size {self.world_size} = "
                f"{self.batch_size * self.world_size} a step, remainder {self.remainder!r}: {way_out}"
            )

    def _batches_after(self, seen: int) -> int:
        return num_batches(self.num_samples, self.batch_size, self.world_size, self.remainder, seen)

    def __len__(self) -> int:
        """Batches of the part that is running, or comes next."""
        return self._batches_after(self._start)

    def begin(self) -> EpochPart:
        """Start an iteration: the current epoch from its start, or from a loaded position, which serves once."""
        if not self._loaded:
            self._start = self._seen = 0
        self._loaded = False
        order: SampleOrder
        if self._table is None:
            order = Order(self.num_samples, self.seed, self.epoch, self.shuffle)
        else:
            order = WeightedOrder(self._table, self.seed, self.epoch)
        return EpochPart(order, self.batch_size, self.rank, self.world_size, self.remainder, self._start)

    def received(self) -> None:
        """Count a batch that the consumer is about to get."""
        self._seen = min(self._seen + self.batch_size * self.world_size, self.num_samples)
        if self._batches_after(self._seen) == 0:
            self.next_epoch()

    def state_after(self, began: State, batches: int) -> State:
        """The position `batches` batches after `began`, in its epoch or at the start of the next. Raises ValueError."""
        total = self._batches_after(began.samples_seen)
        if not 0 <= batches <= total:
            raise ValueError(f"received is {batches}, expected 0 to {total}, the batches of the iteration that was begun last")
        if batches == total:
            return replace(began, epoch=began.epoch + 1, samples_seen=0)
        return replace(began, samples_seen=began.samples_seen + batches * self.batch_size * self.world_size)

    def next_epoch(self) -> None:
        """Go to the start of the next epoch."""
        self.epoch, self._start, self._seen = self.epoch + 1, 0, 0

    def set_epoch(self, epoch: int) -> bool:
        """Go to the start of an epoch (0-based) and return True; the current one keeps its position: False."""
        epoch = whole("epoch", epoch, 0)
        if epoch == self.epoch:
            return False
        self.epoch, self._start, self._seen, self._loaded = epoch, 0, 0, False
        return True

    def state(self) -> State:
        """The position after the batches that were received."""
        version = ORDER_VERSION if self.shuffle else STORED_ORDER
        fingerprint = self._ds.fingerprint
        if self._table is not None:
            fingerprint += f"{WEIGHTS_MARK}{WEIGHTED_VERSION}:{self._table.digest}"
        return State(version, fingerprint, self.num_samples, self.seed, self.epoch, self._seen)

    def load(self, state: Mapping[str, Any]) -> None:
        """Go to the position of a state; its seed replaces this one.

        Raises:
            ValueError: it is no state, or of another data set, order or weights; nothing was changed.
        """
        loaded = State.from_dict(state)
        loaded.check_same_data(self.state())
        self.seed, self.epoch = loaded.seed, loaded.epoch
        self._start = self._seen = loaded.samples_seen
        self._loaded = True


def rank_and_world(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Which part of the data this process takes; None: as torch.distributed says where it is initialised, else all.

    Raises:
        TypeError: one is no whole number.
        ValueError: one of the two lacks, or rank is not in 0 to world_size - 1.
    """
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if (rank is None) != (world_size is None) and not distributed:
        raise ValueError(f"rank is {rank} and world_size {world_size}: give both or neither, else every process takes the same samples")
    if rank is None:
        rank = torch.distributed.get_rank() if distributed else 0
    if world_size is None:
        world_size = torch.distributed.get_world_size() if distributed else 1
    rank, world_size = whole("rank", rank), whole("world_size", world_size)
    if world_size < 1 or not 0 <= rank < world_size:
        raise ValueError(f"rank is {rank} of world_size {world_size}, expected 0 to world_size - 1")
    return rank, world_size
