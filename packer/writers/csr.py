"""Collects the index of a shard while its samples go by."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from loaders.format import SAMPLE_DTYPE, Index, Task

_FIELDS = tuple(name for name in SAMPLE_DTYPE.names or () if name != "shard")


class IndexBuilder:
    """Append samples, then `build`. `shard` is 0 in every row: a shard gets its number when the data set is published."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._rows: list[tuple[int, ...]] = []
        self._boxes: list[NDArray[np.float32]] = []
        self._labels: list[NDArray[np.int64]] = []
        self._difficult: list[NDArray[np.uint8]] = []
        self._restarts: list[NDArray[np.uint32]] = []

    def __len__(self) -> int:
        return len(self._rows)

    def add(
        self,
        row: dict[str, int],
        boxes: NDArray[np.float32],
        labels: NDArray[np.int64],
        difficult: NDArray[np.uint8],
        restarts: NDArray[np.uint32] | None = None,
    ) -> None:
        """`boxes` [N, 4], `labels` [N], `difficult` [N]; `restarts` as `loaders.jpeg.restart_offsets`, None where there is no JPEG."""
        row["num_boxes"] = len(boxes)
        self._rows.append((0, *(row[name] for name in _FIELDS)))
        if self._task == "detection":
            self._boxes.append(np.asarray(boxes, "<f4").reshape(-1, 4))
            self._labels.append(np.asarray(labels, "<i8"))
            self._difficult.append(np.asarray(difficult, "u1"))
        self._restarts.append(np.zeros(0, "<u4") if restarts is None else np.asarray(restarts, "<u4"))

    def build(self) -> Index:
        index = Index(np.array(self._rows, SAMPLE_DTYPE))
        if self._task == "detection":
            index.boxes = _join(self._boxes, np.zeros((0, 4), "<f4"))
            index.labels = _join(self._labels, np.zeros(0, "<i8"))
            index.difficult = _join(self._difficult, np.zeros(0, "u1"))
            index.box_offsets = _offsets(self._boxes)
        if any(len(r) for r in self._restarts):
            index.restarts = _join(self._restarts, np.zeros(0, "<u4"))
            index.restart_offsets = _offsets(self._restarts)
        return index


def concatenate(parts: list[Index], task: Task) -> Index:
    """One index over shards in order; `shard` becomes each part's position."""
    samples = _join([p.samples for p in parts], np.zeros(0, SAMPLE_DTYPE)).copy()
    samples["shard"] = np.repeat(np.arange(len(parts), dtype="<u4"), [len(p.samples) for p in parts])
    index = Index(samples)
    if task == "detection":
        index.boxes = _join([p.boxes for p in parts], np.zeros((0, 4), "<f4"))
        index.labels = _join([p.labels for p in parts], np.zeros(0, "<i8"))
        index.difficult = _join([p.difficult for p in parts], np.zeros(0, "u1"))
        index.box_offsets = _chain([p.box_offsets for p in parts])
    if any(p.restart_offsets is not None for p in parts):
        none = [np.zeros(len(p.samples) + 1, "<i8") for p in parts]
        index.restarts = _join([p.restarts for p in parts if p.restarts is not None], np.zeros(0, "<u4"))
        index.restart_offsets = _chain([n if p.restart_offsets is None else p.restart_offsets for p, n in zip(parts, none, strict=True)])
    return index


def _join(arrays: list[Any], empty: NDArray[Any]) -> NDArray[Any]:
    return np.concatenate([empty, *arrays]) if arrays else empty


def _offsets(arrays: list[Any]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum([len(a) for a in arrays], dtype="<i8")]).astype("<i8")


def _chain(offsets: list[Any]) -> NDArray[np.int64]:
    """Join CSR offsets [n_i + 1] into one [sum(n_i) + 1]."""
    out, base = [np.zeros(1, "<i8")], 0
    for part in offsets:
        out.append(part[1:] + base)
        base += int(part[-1])
    return np.concatenate(out).astype("<i8")
