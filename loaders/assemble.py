"""Makes batches: which samples, read into a slot, collated. Runs in several producer threads at a time; holds no state that changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from loaders.collate import Collate
from loaders.dataset import PackedDataset, to_tensors
from loaders.epochs import EpochPart
from loaders.format import Task
from loaders.slots import Slot, Slots

Batch = dict[str, Any]


class BatchSource(Protocol):
    """A data set as `BatchLoader` sees it: `ShardDataset`, `MemmapDataset`, or your own.

    `load`, `gather` and `gather_ragged` are called by several threads at a time. They raise `loaders.dataset.SampleError` for a sample
    that cannot be read; whatever they raise reaches the consumer at that batch.

    Where it has ``batches_at_once(batch_size)``, `gather` is called for so many batches at a time: the indices ascend within each only.
    """

    @property
    def task(self) -> Task: ...

    @property
    def transform(self) -> Callable[..., Any] | None:
        """With a transform each sample is loaded by `load`; without one whole batches by `gather`."""
        ...

    @property
    def fingerprint(self) -> str:
        """Equal strings mean the same samples in the same order; resuming relies on it."""
        ...

    def __len__(self) -> int: ...

    def load(self, i: int, epoch: int | None = None) -> dict[str, Any]:
        """One transformed sample: numpy `image` [H, W, C]; `boxes`, `labels`, `difficult` for detection; ints; anything else. Where the
        data set has ``load_many(keys)`` as well, an iterator over `load` of each (i, epoch), that is called."""
        ...

    def batch_fields(self) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
        """Per-sample shape and dtype of what `gather` fills; without `image` where images differ in size."""
        ...

    def gather(self, indices: NDArray[np.int64], out: dict[str, NDArray[Any]]) -> NDArray[np.int64]:
        """Fill ``out[name][:B]`` in place, long work without the GIL; the indices that are really there, int64 [B]."""
        ...

    def gather_ragged(
        self, indices: NDArray[np.int64]
    ) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.uint8], NDArray[np.int64]]:
        """`boxes` [T, 4], `labels` [T], `difficult` [T], `offsets` [B+1]: sample j has rows ``offsets[j]:offsets[j+1]``."""
        ...


BATCH_SOURCE = ("task", "transform", "fingerprint", "__len__", "load", "batch_fields", "gather", "gather_ragged")
"""The names of `BatchSource`."""


def gathers(ds: BatchSource, collate: object) -> bool:
    """Whether batches come by the data set's `gather`, and not sample by sample."""
    return isinstance(collate, Collate) and ds.transform is None


class Rows(NamedTuple):
    """What `count` batches of equal size are made of. `indices`: int64 [count, B]. `epochs`: [count][B], for `BatchSource.load` of each;
    None where batches are gathered. `valid`: bool [count, B]; None where it is no part of the batches."""

    indices: NDArray[np.int64]
    epochs: list[list[int]] | None
    valid: NDArray[np.bool_] | None


@dataclass(frozen=True, slots=True)
class PartMaker:
    """``maker(number)`` is one rank's batch of an epoch, from `part` alone: any thread, any time, the same batch.

    `make`: a `BatchMaker`, or what asks another process for its work.
    """

    part: EpochPart
    make: Callable[[Rows], list[Batch]]
    gathers: bool

    def __call__(self, number: int) -> Batch:
        [batch] = self.together(range(number, number + 1))
        return batch

    def together(self, numbers: range) -> list[Batch]:
        """Consecutive batches, gathered in one go, in one slot."""
        indices, places, valid = self.part.batches(numbers)
        # Rows that only pad have the place of the sample that they repeat.
        epochs = None if self.gathers else [self.part.order.load_epochs(row) for row in places]
        try:
            return self.make(Rows(indices, epochs, valid if self.part.remainder == "pad" else None))
        except Exception as e:
            e.add_note(f"in batch {numbers.start} (from 0) of epoch {self.part.order.epoch}, rank {self.part.rank}")
            raise


@dataclass(frozen=True, slots=True)
class BatchMaker:
    """Reads and collates batches.

    `collate` is one of `loaders.collate`: it never sees the images, which are read into their slot. Any other callable gets a list of whole
    samples, as ``ds[i]`` gives them, and there is no slot.
    """

    ds: BatchSource
    slots: Slots
    collate: Collate | Callable[[list[Batch]], Batch]
    batch_transform: Callable[[Batch], Batch] | None

    def __call__(self, rows: Rows) -> list[Batch]:
        count = len(rows.indices)
        if rows.epochs is None:
            batches = self._gathered(rows.indices.ravel(), count)
        else:
            batches = [self._loaded_batch(list(zip(*each, strict=True))) for each in zip(rows.indices.tolist(), rows.epochs, strict=True)]
        valid = [None] * count if rows.valid is None else rows.valid
        return [self._finished(*each) for each in zip(batches, valid, strict=True)]

    def _loaded_batch(self, keys: list[tuple[int, int]]) -> Batch:
        if isinstance(self.collate, Collate):
            return self._transformed(keys, self.collate)
        return self.collate([to_tensors(sample) for sample in self._loaded(keys)])

    def _finished(self, batch: Batch, valid: NDArray[np.bool_] | None) -> Batch:
        if valid is not None:
            batch["valid"] = torch.from_numpy(valid)
        if self.batch_transform is not None:
            batch = self.batch_transform(batch)
            if not isinstance(batch, dict):
                raise TypeError(f"batch_transform returned {type(batch).__name__}, expected the batch, a dict")
        return {name: pinned(value) for name, value in batch.items()} if self.slots.pinned else batch

    def _gathered(self, indices: NDArray[np.int64], count: int) -> list[Batch]:
        """`count` batches of equal size that follow each other in `indices`."""
        slot = self.slots.take(self.ds.batch_fields(), len(indices))
        used = self.ds.gather(indices, slot.arrays)
        batches = self._lent(slot, count)
        if self.ds.task == "detection":
            assert isinstance(self.collate, Collate)
            size = len(indices) // count
            for i, batch in enumerate(batches):
                batch.update(self.collate.ragged(*self.ds.gather_ragged(used[i * size : (i + 1) * size])))
        return batches

    def _transformed(self, keys: list[tuple[int, int]], collate: Collate) -> Batch:
        slot: Slot | None = None
        others: list[dict[str, Any]] = []
        rows = [row for row, key in enumerate(keys) if not row or key != keys[row - 1]]
        given: NDArray[Any] | None = None

        def out(number: int) -> NDArray[Any] | None:
            nonlocal given
            given = None if slot is None else slot.arrays["image"][rows[number]]
            return given

        loaded = self._loaded([keys[row] for row in rows], out)
        for row, key in enumerate(keys):
            if slot is not None and key == keys[row - 1]:  # padding repeats a sample
                slot.arrays["image"][row] = slot.arrays["image"][row - 1]
                others.append(others[-1])
                continue
            sample = next(loaded)
            image = _image(sample)
            slot = slot or self.slots.take({"image": (image.shape, image.dtype)}, len(keys))
            if (image.shape, image.dtype) != slot.fields["image"]:
                shape, dtype = slot.fields["image"]
                raise ValueError(
                    f"{_name(sample)}: image has shape {image.shape} and dtype {image.dtype} after the transform, the first of its batch "
                    f"{shape} and {dtype}: let the transform give one size, or pass a collate(samples) of your own"
                )
            if image is not given:
                slot.arrays["image"][row] = image
            others.append(to_tensors({name: value for name, value in sample.items() if name != "image"}))
        assert slot is not None  # a batch has at least one sample
        [batch] = self._lent(slot)
        return {**batch, **collate(others)}

    def _loaded(self, keys: list[tuple[int, int]], out: Callable[[int], NDArray[Any] | None] | None = None) -> Iterator[dict[str, Any]]:
        if isinstance(self.ds, PackedDataset):
            return self.ds.load_many(keys, out)
        many = getattr(self.ds, "load_many", None)
        return (self.ds.load(*key) for key in keys) if many is None else many(keys)

    def _lent(self, slot: Slot, count: int = 1) -> list[Batch]:
        batches: list[Batch] = [dict(batch) for batch in self.slots.lend(slot, count)]
        for batch in batches:
            batch["image"] = batch["image"].permute(0, 3, 1, 2)
        return batches


def _image(sample: dict[str, Any]) -> NDArray[Any]:
    image = sample.get("image")
    if not isinstance(image, np.ndarray) or image.ndim != 3:
        found = f"an array of shape {image.shape}" if isinstance(image, np.ndarray) else type(image).__name__
        raise ValueError(f"{_name(sample)}: image is {found} after the transform, expected a numpy array [H, W, C]")
    return image


def _name(sample: dict[str, Any]) -> str:
    return f"sample {sample.get('index')} (key {sample.get('key')})"


def pinned(value: Any) -> Any:
    """A value of a batch in page-locked memory."""
    if isinstance(value, torch.Tensor):
        return value if value.is_pinned() or value.device.type != "cpu" else value.pin_memory()
    return [pinned(v) for v in value] if isinstance(value, list) else value
