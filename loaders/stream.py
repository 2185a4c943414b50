"""`ShardStream`: samples in sequence, with a buffered shuffle. Import it from `loaders.shards`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import IterableDataset, get_worker_info

from loaders.dataset import share_epoch, to_tensors
from loaders.foreign import ForeignTars, expand_sources, is_foreign
from loaders.regions import SampleDict, Transform
from loaders.sampling import hash_key, hashes, permutation
from loaders.tarset import ShardDataset

T = TypeVar("T")

MAX_BUFFER_BYTES = 1 << 28
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

    Packed data: samples are as in `ShardDataset`. The epoch's sequence of samples is cut into equal runs, one for each (rank, DataLoader
    worker): every sample comes exactly once over all of them, and no two differ by more than one sample (a rank's total likewise), for
    any number of shards. With equal steps per rank in mind, stop all ranks after ``num_samples // batch_size`` batches, or use
    `BatchLoader`, which does so.

    Foreign tars: `key` str, `image` from the one JPEG, PNG or WebP part, `label` int from ``cls``, ``json`` parsed, other parts as bytes
    under their names, `index` int: shard number * 2**32 + place in the shard, 0-based. Whole shards go to (rank, worker) in turn, so that
    the numbers of samples differ as the shards do.

    The order depends on (seed, epoch, rank, number of workers) only. Call `set_epoch` before each epoch, or all are alike.

    Raises:
        FormatError: no packed data set of the tar layout, or no such split.
        ValueError: a refused or unusable source; while iterating: fewer foreign shards than ranks x workers.
        SampleError: while iterating: a damaged sample, or a tar that is cut short.
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
    ) -> None:
        if shuffle < 0:
            raise ValueError(f"shuffle is {shuffle}, expected the number of samples in the buffer, or 0 for stored order")
        if (rank is None) != (world_size is None):
            raise ValueError(f"rank is {rank} and world_size is {world_size}: give both or neither")
        if rank is not None and world_size is not None and not 0 <= rank < world_size:
            raise ValueError(f"rank is {rank}, expected 0 to {world_size - 1} (world_size is {world_size})")
        self.shuffle = shuffle
        self.seed = seed
        self.rank, self.world_size = rank, world_size
        self._epoch = share_epoch(torch.zeros(1, dtype=torch.int64))
        self._reader: _Reader
        if is_foreign(source):
            self._reader = ForeignTars(expand_sources(source), seed, transform)
        else:
            assert isinstance(source, str | Path)
            self._reader = _PackedReader(ShardDataset(source, split, transform, seed))

    def __getstate__(self) -> dict[str, Any]:
        # A spawned worker has no process group: what this process knows goes along.
        rank, world_size = self._place()
        return {**self.__dict__, "rank": rank, "world_size": world_size}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._epoch = share_epoch(self._epoch)

    @property
    def epoch(self) -> int:
        """The epoch that keys order and transform."""
        return int(self._epoch[0])

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the iterations that start from now on, also in DataLoader workers that are running."""
        self._epoch[0] = epoch

    @property
    def num_samples(self) -> int | None:
        """Samples that this rank gets in an epoch, over all its workers; None for foreign tars, where only reading them can tell."""
        total = self._reader.num_samples
        return None if total is None else len(_share(total, *self._place()))

    def __iter__(self) -> Iterator[SampleDict]:
        rank, world_size = self._place()
        info = get_worker_info()
        worker, num_workers = (0, 1) if info is None else (info.id, info.num_workers)
        consumer, consumers, epoch = rank * num_workers + worker, world_size * num_workers, self.epoch
        order = permutation(self._reader.num_shards, self.seed, epoch, _SHARDS) if self.shuffle else np.arange(self._reader.num_shards)
        encoded = self._reader.encoded(order, consumer, consumers)
        for index, sample in _shuffled(encoded, self.shuffle, hash_key(self.seed, epoch, _BUFFER, consumer)):
            yield to_tensors(self._reader.decode(index, sample, epoch))

    def _place(self) -> tuple[int, int]:
        if self.rank is not None and self.world_size is not None:
            return self.rank, self.world_size
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return torch.distributed.get_rank(), torch.distributed.get_world_size()
        return 0, 1


class _Reader(Protocol):
    """What kinds of shards have in common. Encoded samples are bytes, or dicts of bytes by part."""

    @property
    def num_samples(self) -> int | None: ...

    @property
    def num_shards(self) -> int: ...

    def encoded(self, order: NDArray[np.int64], consumer: int, consumers: int) -> Iterator[tuple[int, Any]]: ...

    def decode(self, index: int, data: Any, epoch: int) -> SampleDict: ...


class _PackedReader:
    """Our own shards, through the index."""

    def __init__(self, dataset: ShardDataset) -> None:
        self._dataset = dataset
        self.num_samples = len(dataset)
        self.num_shards = dataset.num_shards

    def encoded(self, order: NDArray[np.int64], consumer: int, consumers: int) -> Iterator[tuple[int, bytes]]:
        """(index, image bytes) of one consumer's run of the sequence that visits the shards in `order`."""
        mine = _share(self.num_samples, consumer, consumers)
        done = 0
        for shard in order.tolist():
            stored = self._dataset.shard_range(shard)
            here = stored[max(mine.start - done, 0) : max(mine.stop - done, 0)]
            done += len(stored)
            for index in here:
                yield index, self._dataset.encoded(index)

    def decode(self, index: int, data: bytes, epoch: int) -> SampleDict:
        return self._dataset.load_encoded(index, data, epoch)


def _share(count: int, number: int, parts: int) -> range:
    """The `number`-th of `parts` consecutive runs of ``range(count)``; their lengths differ by at most one."""
    return range(count * number // parts, count * (number + 1) // parts)


def _shuffled(items: Iterable[tuple[int, Any]], size: int, key: int) -> Iterator[tuple[int, Any]]:
    """Pass (index, encoded sample) pairs through a buffer of `size`, giving a random one for each that comes in."""
    if size < 2:
        yield from items
        return
    buffer: list[tuple[int, Any]] = []
    held, draws = 0, _draws(key)
    for item in items:
        buffer.append(item)
        held += _num_bytes(item[1])
        while len(buffer) > size or (held > MAX_BUFFER_BYTES and len(buffer) > 1):
            chosen = _take(buffer, next(draws))
            held -= _num_bytes(chosen[1])
            yield chosen
    while buffer:
        yield _take(buffer, next(draws))


def _num_bytes(encoded: bytes | dict[str, Any]) -> int:
    return len(encoded) if isinstance(encoded, bytes) else sum(len(part) for part in encoded.values())


def _take(buffer: list[T], draw: int) -> T:
    place = draw % len(buffer)
    buffer[place], buffer[-1] = buffer[-1], buffer[place]
    return buffer.pop()


def _draws(key: int) -> Iterator[int]:
    """Endless 64-bit numbers, the same on every platform."""
    chunk = 0
    while True:
        yield from hashes(1024, hash_key(key, chunk)).tolist()
        chunk += 1
