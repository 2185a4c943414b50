"""`ShardStream`: samples in sequence, with a buffered shuffle. Import it from `loaders.shards`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import IterableDataset, get_worker_info

from loaders.arguments import function, one_of, whole
from loaders.buffer import Item, buffered
from loaders.dataset import to_tensors
from loaders.epochs import rank_and_world
from loaders.faults import OnError, share
from loaders.foreign import ForeignTars, LastGood, expand_sources, is_foreign
from loaders.regions import SampleDict, Transform
from loaders.sampling import Remainder, hash_key, permutation
from loaders.tarset import ShardDataset

STREAM_VERSION = 1
"""Raised when a seed gives another order than before."""
_BACK = 64  # samples that are held at a time on the way back to a good one
_SHARDS, _BUFFER = 1, 2  # labels that keep the random streams of one epoch apart


class ShardStream(IterableDataset[SampleDict]):
    """Samples of tar shards in sequence, for sources too large or too far away for random access.

    Args:
        source: the folder of a packed data set (tar layout), or WebDataset tars of any origin: a path or URL with ``{000..099}`` or
            (local paths) ``*``, or a list of such. URLs are opened by fsspec; `.tar.gz`, `.tgz` and the like (gzip, bzip2, xz)
            are decompressed. ``pipe:`` URLs, shell commands and pickled parts are refused.
        split: which split of a packed data set; foreign tars have none, and it is ignored.
        shuffle: samples in the shuffle buffer, which holds encoded bytes (at most 256 MiB, then fewer samples); the order of shards is
            shuffled, too. 0: stored order.
        seed: of shuffle and transform.
        transform: as in `ShardDataset`.
        rank, world_size: which part of the data this process takes. None: from torch.distributed where it is initialised, else all.
        on_error: "raise", or "replace": another sample comes in the place of a damaged one, so that every rank gets as many as without.
            Packed data: the same one as in `ShardDataset`. Foreign tars: the good one that came before it in this iteration; a tar that is
            cut short is an error all the same, since nobody knows what it held. Counted in `num_replaced`.
        check_crc: as in `ShardDataset`; packed data only.
        remainder: packed data only. Every rank gets the same number of samples, shared evenly over its DataLoader workers: so the same
            number of batches, for any number of shards. "drop" leaves out the last ``num_samples % world_size`` of the epoch's sequence;
            "pad" repeats its last sample instead, and each sample has `valid`, which is False for repeats.

    Packed data: samples are as in `ShardDataset`. The epoch's sequence of samples is cut into equal runs, one for each (rank, DataLoader
    worker): no sample comes twice, and under "pad" every one is valid exactly once.

    Foreign tars: `key` str, `image` from the one JPEG, PNG or WebP part, `label` int from ``cls``, ``json`` parsed, other parts as bytes
    under their names, `index` int: shard number * 2**32 + place in the shard, 0-based. Whole shards go to (rank, worker) in turn, so that
    the numbers of samples differ as the shards do.

    The order depends on (seed, epoch, rank, number of workers) only. Call `set_epoch` before each epoch, or all are alike.

    Quality: a buffer mixes its neighbourhood only. On data shuffled while packing, labels are spread as by chance. But two samples of one
    batch meet again in the next epoch's batch more often than by chance: 5 times as often with ``shuffle=1000``, 1.3 times with 4000
    (32,768 samples in 32 shards, batches of 128), and the more often the larger the set is; with `BatchLoader` 1.02 times. Shards that lie
    sorted by class are mixed with few others: pack with the default ``--shuffle``.

    `state_dict` and `load_state_dict` resume an iteration exactly; a state belongs to one (rank, worker) and to their numbers. Packed data:
    what was seen is passed over by the index, and only what the buffer held is read again. Foreign tars: they are read again up to there.
    With DataLoader workers, which have copies of the stream, use torchdata's `StatefulDataLoader`: it asks each of them for its state.
    To go on under another number of ranks, use `BatchLoader`.

    Raises:
        FormatError: no packed data set of the tar layout, or no such split.
        ValueError: a refused or unusable source; `remainder` "pad" for foreign tars; while iterating: fewer foreign shards than ranks x
            workers, or fewer samples than ranks under "drop".
        TypeError: an argument is of another kind.
        SampleError: while iterating: a damaged sample, or a tar that is cut short. It ends the iteration; the next one starts anew.
    """

    def __init__(
        self,
        source: str | Path | Sequence[str | Path],
        split: str = "train",
        shuffle: int = 1000,
        seed: int = 0,
        transform: Transform | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        on_error: OnError = "raise",
        check_crc: bool = False,
        remainder: Remainder = "drop",
    ) -> None:
        shuffle = whole("shuffle", shuffle, 0, "the number of samples in the buffer, or 0 for stored order")
        function("transform", transform, "transform(sample, rng) -> sample")
        one_of("on_error", on_error, ("raise", "replace"))
        one_of("remainder", remainder, ("drop", "pad"))
        if rank is not None or world_size is not None:  # else asked for when it iterates: torch.distributed may be initialised by then
            rank, world_size = rank_and_world(rank, world_size)
        self.shuffle = shuffle
        self.seed = whole("seed", seed)
        self.rank, self.world_size = rank, world_size
        self._epoch = share(torch.zeros(1, dtype=torch.int64))
        self.remainder: Remainder = remainder
        self._position = _Position(0, 0)
        self._loaded: _Position | None = None
        self._loaded_by: _Place | None = None
        self._reader: _Reader
        if is_foreign(source):
            if remainder == "pad":
                raise ValueError(f"remainder='pad': only reading tars of other origin can tell how many samples they hold: {source!r:.200}")
            if check_crc:
                raise ValueError(f"check_crc: tars of other origin have no checksums, found {source!r:.200}: only packed data sets have")
            self._reader = ForeignTars(expand_sources(source), self.seed, transform, on_error)
        else:
            assert isinstance(source, str | Path)
            self._reader = _PackedReader(ShardDataset(source, split, transform, self.seed, on_error, check_crc))

    def __getstate__(self) -> dict[str, Any]:
        # A spawned worker has no process group: what this process knows goes along.
        rank, world_size = self._place()
        return {**self.__dict__, "rank": rank, "world_size": world_size}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._epoch = share(self._epoch)

    @property
    def epoch(self) -> int:
        """The epoch that keys order and transform."""
        return int(self._epoch[0])

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the iterations that start from now on, also in DataLoader workers that are running. A loaded state of that
        epoch keeps its position."""
        self._epoch[0] = whole("epoch", epoch, 0)
        if self._loaded is not None and self._loaded.epoch != self.epoch:
            self._loaded = None

    @property
    def num_replaced(self) -> int:
        """Damaged samples that ``on_error="replace"`` replaced so far, DataLoader workers included."""
        return self._reader.num_replaced

    @property
    def num_samples(self) -> int | None:
        """Samples that this rank gets in an epoch, over all its workers; None for foreign tars, where only reading them can tell."""
        total = self._reader.num_samples
        return None if total is None else _Place(*self._place(), 0, 1, self.remainder).rank_samples(total)

    def __iter__(self) -> Iterator[SampleDict]:
        place, loaded = self._whose(), self._loaded
        if loaded is not None and self._loaded_by != place:
            raise ValueError(
                f"the state was loaded for {self._loaded_by}, and {place} iterates: with DataLoader workers use torchdata's "
                "StatefulDataLoader, which loads a state in each of them"
            )
        self._loaded = None  # a loaded position serves once
        self._position = loaded or _Position(self.epoch, 0)
        return self._samples(self._position, place)

    def _samples(self, position: _Position, place: _Place) -> Iterator[SampleDict]:
        epoch = position.epoch
        order = permutation(self._reader.num_shards, self.seed, epoch, _SHARDS) if self.shuffle else np.arange(self._reader.num_shards)
        key = hash_key(self.seed, epoch, _BUFFER, place.consumer)

        def items_from(skip: int) -> Iterator[Item]:
            return buffered(self._reader.items(order, place), self.shuffle, key, skip)

        last = LastGood(_backwards(items_from, position.seen))
        for item in items_from(position.seen):
            sample = to_tensors(self._reader.decode(item.index, item.data, epoch, last))
            if self.remainder == "pad":
                sample["valid"] = item.valid
            position.seen += 1
            yield sample

    def _whose(self) -> _Place:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        return _Place(*self._place(), worker, workers, self.remainder)

    def _identity(self) -> dict[str, Any]:
        """What a state must have in common with the stream that it is loaded to."""
        place = self._whose()
        return {
            "stream_version": STREAM_VERSION,
            "fingerprint": self._reader.fingerprint,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "remainder": self.remainder,
            "rank": place.rank,
            "world_size": place.world_size,
            "worker": place.worker,
            "workers": place.workers,
        }

    def state_dict(self) -> dict[str, Any]:
        """The position of the iteration that was begun last, after the samples that it gave; plain ints and strings."""
        position = self._loaded or self._position
        return {**self._identity(), "epoch": position.epoch, "samples_seen": position.seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration go on where `state_dict` was called, in the state's epoch.

        Raises:
            ValueError: it is no state of a stream over this source with these options, rank and workers; nothing was changed.
        """
        expected = self._identity()
        problems = [
            f"{name!r} is {state.get(name)!r}, here it is {value!r}" for name, value in expected.items() if state.get(name) != value
        ]
        problems += [f"{name!r} is unknown" for name in state if name not in (*expected, "epoch", "samples_seen")]
        position = _Position(state.get("epoch", -1), state.get("samples_seen", -1))
        for name, value in (("epoch", position.epoch), ("samples_seen", position.seen)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                problems.append(f"{name!r} is {state.get(name)!r}, expected an integer of 0 or more")
        if problems:
            raise ValueError(f"the state cannot be resumed by this ShardStream: {'; '.join(problems)}")
        self._loaded, self._loaded_by = position, self._whose()
        if get_worker_info() is None:  # a worker must not move the epoch of the others
            self._epoch[0] = position.epoch

    def _place(self) -> tuple[int, int]:
        return rank_and_world(self.rank, self.world_size)


def _backwards(items_from: Callable[[int], Iterator[Item]], stop: int) -> Iterator[Any]:
    """What the items before `stop` hold, the last first. Read only when asked for, in parts, so that few are held at a time."""
    while stop:
        start = max(stop - _BACK, 0)
        part = [item.data for item in islice(items_from(start), stop - start)]
        yield from reversed(part)
        stop = start


@dataclass(slots=True)
class _Position:
    epoch: int
    seen: int


@dataclass(frozen=True, slots=True)
class _Place:
    """Which part of the data an iteration takes."""

    rank: int
    world_size: int
    worker: int
    workers: int
    remainder: Remainder

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.world_size}, worker {self.worker} of {self.workers}"

    @property
    def consumer(self) -> int:
        return self.rank * self.workers + self.worker

    @property
    def consumers(self) -> int:
        return self.world_size * self.workers

    def rank_samples(self, total: int) -> int:
        """How many of `total` samples each rank gets. Raises ValueError where that would be none."""
        if self.remainder == "pad" and total:
            return -(-total // self.world_size)
        if total < self.world_size:
            raise ValueError(f"{total} samples are fewer than {self.world_size} ranks: take fewer ranks, or remainder='pad'")
        return total // self.world_size

    def run(self, total: int) -> range:
        """This worker's places in the epoch's sequence; those from `total` on pad."""
        mine = self.rank_samples(total)
        first = self.rank * mine
        return range(first + mine * self.worker // self.workers, first + mine * (self.worker + 1) // self.workers)


class _Reader(Protocol):
    """What kinds of shards have in common. Encoded samples are bytes, or dicts of bytes by part."""

    @property
    def num_samples(self) -> int | None: ...

    @property
    def num_shards(self) -> int: ...

    @property
    def fingerprint(self) -> str: ...

    @property
    def num_replaced(self) -> int: ...

    def items(self, order: NDArray[np.int64], place: _Place) -> Iterator[Item]: ...

    def decode(self, index: int, data: Any, epoch: int, last: LastGood) -> SampleDict: ...


class _PackedReader:
    """Our own shards, through the index."""

    def __init__(self, dataset: ShardDataset) -> None:
        self._dataset = dataset
        self.num_samples = len(dataset)
        self.num_shards = dataset.num_shards

    @property
    def num_replaced(self) -> int:
        return self._dataset.num_replaced

    @property
    def fingerprint(self) -> str:
        return self._dataset.fingerprint

    def items(self, order: NDArray[np.int64], place: _Place) -> Iterator[Item]:
        """One consumer's run of the sequence that visits the shards in `order`."""
        mine = place.run(self.num_samples)
        done, last = 0, None
        for shard in order.tolist():
            stored = self._dataset.shard_range(shard)
            here = stored[max(mine.start - done, 0) : max(mine.stop - done, 0)]
            done += len(stored)
            for index, num_bytes in zip(here, self._dataset.encoded_sizes(here), strict=True):
                yield Item(index, num_bytes, partial(self._dataset.encoded, index))
            last = stored[-1] if stored else last
        if last is not None:
            for _ in range(max(mine.start, self.num_samples), mine.stop):
                yield Item(last, self._dataset.encoded_sizes(range(last, last + 1))[0], partial(self._dataset.encoded, last), valid=False)

    def decode(self, index: int, data: bytes, epoch: int, last: LastGood) -> SampleDict:  # noqa: ARG002  (foreign tars need it)
        return self._dataset.load_encoded(index, data, epoch)
