"""`DeviceDataset`: a whole packed data set in a device's memory. After the upload no byte moves and nothing is waited for.

batches = DeviceDataset(MemmapDataset("out/"), "cuda", batch_size=512)
for epoch in range(100):
    for batch in batches: ...
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from loaders.assemble import Batch, BatchSource
from loaders.batch_transforms import begin_epoch
from loaders.batches import BatchLoader
from loaders.collate import Collate, collate_list
from loaders.epochs import EpochPart, Epochs, rank_and_world
from loaders.prefetch import DevicePrefetcher, check_device, map_tensors
from loaders.sampling import Remainder
from loaders.slots import Slots
from loaders.weighted import Weights

UPLOAD_BYTES = 64_000_000
"""Copied at a time; page-locked for CUDA."""
ROWS_AHEAD = 1 << 16
"""Sample numbers that are sent to the device at a time: a transfer for each batch would cost more than the gather."""


class Fit(NamedTuple):
    """Whether a data set may live on a device; true or false as a condition, and in words by `str`."""

    ok: bool
    needed_bytes: int
    free_bytes: int
    fraction: float

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        verdict = "fits" if self.ok else "does not fit"
        needed, free = (f"{value / 1e6:,.1f} MB" for value in (self.needed_bytes, self.free_bytes))
        return f"{needed} of data {verdict} into {self.fraction:.0%} of the {free} that are free"


class DeviceDataset:
    """Iterable over the batches of one epoch after the other, like `BatchLoader`: the same order, the same rows, the same state.

    Images (uint8, or the memmap's dtype), labels, keys and numbers are on the device; a batch is one gather there. Boxes stay in host
    memory and are moved with each batch. Batches are memory of their own. What is to be random or normalised is for the `batch_transform`,
    which works on the device too: see `loaders.batch_transforms`, also for half precision. Tar data sets are decoded once, while uploading.

    Args:
        ds: `MemmapDataset`, `ShardDataset` or another `BatchSource`, with images of one size and without a transform.
        device: "cuda", "cuda:1", "cpu" or a `torch.device`.
        batch_size, shuffle, seed, remainder, rank, world_size, weights: as for `BatchLoader`. Every rank holds the whole data set.
        collate: for boxes, one of `loaders.collate`.
        batch_transform: ``batch_transform(batch) -> batch``.
        fraction: of the device's free memory that the data may take; the model needs the rest.

    Raises:
        ValueError: it does not fit, the images differ in size, the data set has a transform, or what `BatchLoader` refuses.
    """

    def __init__(
        self,
        ds: BatchSource,
        device: str | torch.device = "cuda",
        batch_size: int = 64,
        shuffle: bool = True,
        seed: int = 0,
        remainder: Remainder = "drop",
        rank: int | None = None,
        world_size: int | None = None,
        weights: Weights | None = None,
        collate: Collate | None = None,
        batch_transform: Callable[[Batch], Batch] | None = None,
        fraction: float = 0.6,
    ) -> None:
        self.ds = ds
        self.device = check_device(device)
        self.collate = collate_list if collate is None else collate
        self.batch_transform = batch_transform
        self._epochs = Epochs(ds, batch_size, shuffle, seed, remainder, *rank_and_world(rank, world_size), weights)
        fit = self.fits(ds, self.device, fraction)
        if not fit:
            raise ValueError(f"{fit} on {self.device}: take BatchLoader and DevicePrefetcher, or pack smaller images")
        self._fields = self._upload()
        # Which sample is really in a row, where a damaged one was replaced.
        self._used: NDArray[np.int64] | None = self._fields["index"].cpu().numpy() if "index" in self._fields else None
        self._slots = Slots(keep=4, pinned=False)
        self._iteration = 0

    @staticmethod
    def fits(ds: BatchSource, device: str | torch.device = "cuda", fraction: float = 0.6) -> Fit:
        """Whether the data set takes at most `fraction` of the memory that is free on the device now.

        Raises:
            ValueError: fraction is not above 0 and at most 1, the images differ in size, or the data set has a transform.
        """
        if not 0 < fraction <= 1:
            raise ValueError(f"fraction is {fraction}, expected above 0 and at most 1")
        fields = ds.batch_fields()
        if "image" not in fields:
            raise ValueError("the images differ in size: pack them to one size first (`pack build --resize`)")
        if ds.transform is not None:
            raise ValueError(
                "the data set has a transform, which would be applied once and frozen: open it without one, and give a batch_transform"
            )
        needed = len(ds) * sum(math.prod(shape) * dtype.itemsize for shape, dtype in fields.values())
        free = _free_bytes(check_device(device))
        return Fit(needed <= fraction * free, needed, free, fraction)

    def _upload(self) -> dict[str, torch.Tensor]:
        """Every fixed field of every sample, [N, ...], by stored position."""
        fields = self.ds.batch_fields()
        resident = {
            name: torch.empty((len(self.ds), *shape), dtype=torch.from_numpy(np.empty(0, dtype)).dtype, device=self.device)
            for name, (shape, dtype) in fields.items()
        }
        shape, dtype = fields["image"]
        rows = max(1, min(len(self.ds), UPLOAD_BYTES // (math.prod(shape) * dtype.itemsize)))
        pinned = self.device.type == "cuda"
        start = 0
        with BatchLoader(
            self.ds, rows, shuffle=False, remainder="pad", pin_memory=pinned, rank=0, world_size=1, collate=self.collate
        ) as batches:
            for batch in DevicePrefetcher(batches, self.device, depth=1):
                count = min(rows, len(self.ds) - start)  # rows that only pad come last
                for name, whole in resident.items():
                    value = batch[name].permute(0, 2, 3, 1) if name == "image" else batch[name]
                    whole[start : start + count].copy_(value[:count])
                start += count
        return resident

    def __len__(self) -> int:
        """Batches of the current epoch; after `load_state_dict` those that remain of it."""
        return len(self._epochs)

    def __iter__(self) -> Iterator[Batch]:
        self._iteration += 1
        begin_epoch(self.batch_transform, self._epochs.epoch)
        part = self._epochs.begin()
        return self._batches(part, len(self._epochs), self._iteration)

    def _batches(self, part: EpochPart, count: int, iteration: int) -> Iterator[Batch]:
        if count == 0:  # a resumed epoch may have no batch left
            self._epochs.next_epoch()
        at_a_time = max(1, ROWS_AHEAD // part.batch_size)
        for first in range(0, count, at_a_time):
            numbers = range(first, min(first + at_a_time, count))
            used, _, real = part.batches(numbers)
            indices, valid = (self._moved(torch.from_numpy(rows)) for rows in (used, real))
            for j in range(len(numbers)):
                if iteration != self._iteration:
                    raise RuntimeError(
                        "this iterator was ended: the DeviceDataset was moved to another epoch or state, or iterated anew (one at a time)"
                    )
                batch = self._batch(used[j], indices[j])
                if part.remainder == "pad":
                    batch["valid"] = valid[j]
                if self.batch_transform is not None:
                    batch = self.batch_transform(batch)
                self._epochs.received()
                yield batch

    def _batch(self, on_host: Any, indices: torch.Tensor) -> Batch:
        batch = self._gathered(indices)
        batch["image"] = batch["image"].permute(0, 3, 1, 2)
        if self.ds.task == "detection":
            boxes = self.collate.ragged(*self.ds.gather_ragged(on_host if self._used is None else self._used[on_host]))
            batch.update(map_tensors(boxes, self._moved))
        return batch

    def _gathered(self, indices: torch.Tensor) -> Batch:
        if self.device.type != "cpu":
            return {name: whole.index_select(0, indices) for name, whole in self._fields.items()}
        slot = self._slots.take(self.ds.batch_fields(), len(indices))  # fresh memory would cost more than the gather
        for name, whole in self._fields.items():
            torch.index_select(whole, 0, indices, out=torch.from_numpy(slot.arrays[name]))
        [batch] = self._slots.lend(slot)
        return dict(batch)

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self.device, non_blocking=True)

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch (0-based). The current epoch keeps its position: safe to call after `load_state_dict`."""
        if self._epochs.set_epoch(epoch):
            self._iteration += 1

    def state_dict(self) -> dict[str, Any]:
        """The position after the batches that were received; a `BatchLoader` over the same data set goes on with it, and the reverse."""
        return self._epochs.state().to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was called.

        Raises:
            ValueError: it is no state, or of another data set, order or weights; nothing was changed.
        """
        self._epochs.load(state)
        self._iteration += 1


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):  # another system than Linux
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
