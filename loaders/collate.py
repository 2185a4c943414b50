"""From a list of samples to a batch: three ways to put together boxes whose number differs.

Each collate is a picklable object with two forms: ``collate(samples)`` for torch's DataLoader, and ``collate.ragged(boxes, labels,
difficult, box_offsets)`` for loaders that have stacked everything else already.

In a batch `image` is [B, 3, H, W], channels_last in memory (a view of one [B, H, W, 3] block, made by one copy); `key`, `index` and
`label` are int64 [B] (`key` a list where keys are text). Other fields, from a transform: tensors of equal shape and dtype, and numbers,
are stacked; anything else becomes a list.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import default_collate, get_worker_info

SampleDict = dict[str, Any]
Array = NDArray[Any] | torch.Tensor

RAGGED = ("boxes", "labels", "difficult")
_RAGGED_DTYPES = {"boxes": torch.float32, "labels": torch.int64, "difficult": torch.uint8}


class Collate(ABC):
    """A way to batch boxes. Subclasses say how in `_boxes`."""

    def __call__(self, samples: Sequence[SampleDict]) -> dict[str, Any]:
        """Batch `samples`, as ``ds[i]`` gives them.

        Raises:
            ValueError: no samples, fields that some samples lack, images of unequal size, or labels that do not fit the boxes; the
                message names keys and sizes.
        """
        _check_fields(samples)
        names = list(samples[0])
        batch: dict[str, Any] = {}
        for name in names:
            values = [sample[name] for sample in samples]
            if name == "image":
                batch[name] = _stack_images(values, samples)
            elif name not in RAGGED or "boxes" not in names:
                batch[name] = _stack(values)
            elif name == "boxes":
                batch.update(self._boxes(*_concatenate(samples)))
        return batch

    def ragged(self, boxes: Array, labels: Array, difficult: Array, box_offsets: Array) -> dict[str, Any]:
        """Batch boxes that are one array already.

        `boxes` float32 [T, 4], `labels` int64 [T], `difficult` uint8 [T]; sample i has rows ``box_offsets[i]:box_offsets[i+1]``
        (int64 [B+1]). Numpy arrays are not copied where tensors can share their memory.
        """
        counts = torch.as_tensor(np.diff(np.asarray(box_offsets)))
        return self._boxes(torch.as_tensor(boxes), torch.as_tensor(labels), torch.as_tensor(difficult), counts)

    @abstractmethod
    def _boxes(self, boxes: torch.Tensor, labels: torch.Tensor, difficult: torch.Tensor, counts: torch.Tensor) -> dict[str, Any]:
        """`boxes` [T, 4], `labels` [T], `difficult` [T] of the whole batch and `counts` int64 [B] of boxes per sample to batch fields."""


class CollateList(Collate):
    """`boxes`, `labels` and `difficult` are lists of B tensors [N, 4], [N], [N], as torchvision's detectors take them."""

    def _boxes(self, boxes: torch.Tensor, labels: torch.Tensor, difficult: torch.Tensor, counts: torch.Tensor) -> dict[str, Any]:
        # Views of one tensor per field: a DataLoader worker sends it through one file descriptor, not one per sample.
        sizes = counts.tolist()
        return {name: list(torch.split(t, sizes)) for name, t in zip(RAGGED, (boxes, labels, difficult), strict=True)}


class CollatePadded(Collate):
    """`boxes` [B, M, 4] filled with 0, `labels` [B, M] with -1, `difficult` [B, M] with 0; `mask` bool [B, M] is True where a box is.

    M is the largest number of boxes in the batch, 0 when it has none.
    """

    def _boxes(self, boxes: torch.Tensor, labels: torch.Tensor, difficult: torch.Tensor, counts: torch.Tensor) -> dict[str, Any]:
        size = (len(counts), int(counts.max()) if len(counts) else 0)
        mask = torch.arange(size[1]) < counts[:, None]
        batch: dict[str, Any] = {}
        for name, values, fill in zip(RAGGED, (boxes, labels, difficult), (0, -1, 0), strict=True):
            padded = torch.full((*size, *values.shape[1:]), fill, dtype=values.dtype)
            padded[mask] = values
            batch[name] = padded
        return {**batch, "mask": mask}


class CollateIndexed(Collate):
    """`boxes` float32 [T, 5]: the sample's place in the batch, then xyxy, as ``torchvision.ops.roi_align`` takes it; `labels` [T],
    `difficult` [T]."""

    def _boxes(self, boxes: torch.Tensor, labels: torch.Tensor, difficult: torch.Tensor, counts: torch.Tensor) -> dict[str, Any]:
        place = torch.repeat_interleave(torch.arange(len(counts)), counts).to(boxes.dtype)
        return {"boxes": torch.cat((place[:, None], boxes), dim=1), "labels": labels, "difficult": difficult}


collate_list = CollateList()
collate_padded = CollatePadded()
collate_indexed = CollateIndexed()


def _name(sample: SampleDict, place: int) -> str:
    return f"key {sample['key']}" if "key" in sample else f"number {place} of the batch"


def _check_fields(samples: Sequence[SampleDict]) -> None:
    if not samples:
        raise ValueError("a batch needs at least one sample, got none")
    fields = samples[0].keys()
    for place, sample in enumerate(samples):
        if sample.keys() != fields:
            first, other = _name(samples[0], 0), _name(sample, place)
            raise ValueError(
                f"samples of one batch have different fields: only {first} has {sorted(fields - sample.keys())}, only {other} has "
                f"{sorted(sample.keys() - fields)}. A transform must return the same fields for every sample"
            )
    if "boxes" in fields and not fields >= set(RAGGED):
        raise ValueError(f"samples with boxes need labels and difficult, too; they have {sorted(fields)}")


def _concatenate(samples: Sequence[SampleDict]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Boxes [T, 4], labels [T], difficult [T] and counts int64 [B] of the whole batch."""
    lengths = [[len(sample[name]) for sample in samples] for name in RAGGED]
    for place, (boxes, labels, difficult) in enumerate(zip(*lengths, strict=True)):
        if not boxes == labels == difficult:
            raise ValueError(
                f"sample {_name(samples[place], place)} has {boxes} boxes, {labels} labels and {difficult} difficult flags: a transform "
                "that drops boxes must drop the others along"
            )
    boxes, labels, difficult = (
        torch.cat([torch.as_tensor(sample[name]).to(dtype) for sample in samples]) for name, dtype in _RAGGED_DTYPES.items()
    )
    return boxes.reshape(-1, 4), labels, difficult, torch.tensor(lengths[0], dtype=torch.int64)


def _stack_images(images: list[torch.Tensor], samples: Sequence[SampleDict]) -> torch.Tensor:
    first = images[0]
    for place, image in enumerate(images):
        if image.shape != first.shape or image.dtype != first.dtype:
            raise ValueError(
                f"images of one batch differ: {_name(samples[0], 0)} is {first.dtype} {tuple(first.shape)}, {_name(samples[place], place)} "
                f"is {image.dtype} {tuple(image.shape)}. Pack them to one size with `pack build --resize WxH`, give a transform that "
                "resizes them, or keep them in a list by a collate of your own"
            )
    if first.ndim != 3:
        return torch.stack(images)
    rows = [image.permute(1, 2, 0) for image in images]
    if get_worker_info() is not None:
        stacked: torch.Tensor = default_collate(rows)  # it writes into the shared memory that the batch is sent in: no second copy
    else:
        # numpy asks for huge pages, torch does not: the same copy into a fresh torch tensor takes several times as long.
        blank = np.empty((len(rows), *rows[0].shape), torch.empty(0, dtype=first.dtype).numpy().dtype)
        stacked = torch.stack(rows, out=torch.from_numpy(blank))
    return stacked.permute(0, 3, 1, 2)


def _stack(values: list[Any]) -> Any:
    first = values[0]
    if all(isinstance(v, torch.Tensor) and v.shape == first.shape and v.dtype == first.dtype for v in values):
        return torch.stack(values)
    for kinds, dtype in (
        ((bool, np.bool_), torch.bool),
        ((int, np.integer), torch.int64),
        ((float, np.floating), torch.float64),
    ):
        if all(isinstance(v, kinds) for v in values):
            return torch.tensor(values, dtype=dtype)
    return values
