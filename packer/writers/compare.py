"""Compares the index of a shard with one derived from the shard's own bytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loaders.format import Index


def shard_rows(index: Index, start: int, count: int) -> Index:
    """Rows start to start + count of a split's index, as `IndexBuilder.build` would have made them for the shard (`shard` 0)."""
    samples = np.array(index.samples[start : start + count])
    samples["shard"] = 0
    out = Index(samples)
    if index.box_offsets is not None and index.boxes is not None and index.labels is not None and index.difficult is not None:
        a, b = _span(index.box_offsets, start, count, len(index.boxes))
        out.boxes, out.labels, out.difficult = index.boxes[a:b], index.labels[a:b], index.difficult[a:b]
        out.box_offsets = index.box_offsets[start : start + count + 1] - index.box_offsets[start]
    if index.restart_offsets is not None and index.restarts is not None:
        a, b = _span(index.restart_offsets, start, count, len(index.restarts))
        out.restarts, out.restart_offsets = (
            index.restarts[a:b],
            index.restart_offsets[start : start + count + 1] - index.restart_offsets[start],
        )
    return out


def _span(offsets: NDArray[np.int64], start: int, count: int, limit: int) -> tuple[int, int]:
    return max(0, min(int(offsets[start]), limit)), max(0, min(int(offsets[start + count]), limit))


def index_differences(index: Index, derived: Index, limit: int = 20) -> Iterator[tuple[int | None, str]]:
    """(key, what differs) of up to `limit` samples; key None where a whole array differs in length."""
    if len(index.samples) != len(derived.samples):
        yield None, f"{len(index.samples)} samples in the index, {len(derived.samples)} in the shard"
        return
    named = 0
    for field in derived.samples.dtype.names or ():
        for i in np.flatnonzero(index.samples[field] != derived.samples[field])[: limit - named]:
            named += 1
            key = int(derived.samples["key"][i])
            yield key, f"{field} is {index.samples[field][i]} in the index, {derived.samples[field][i]} in the shard"
    keys = derived.samples["key"]
    for offsets, names in (("box_offsets", ("boxes", "labels", "difficult")), ("restart_offsets", ("restarts",))):
        counts: NDArray[Any] | None = getattr(derived, offsets)
        stored: NDArray[Any] | None = getattr(index, offsets)
        counts = np.zeros(len(keys) + 1, "<i8") if counts is None else counts
        stored = np.zeros(len(keys) + 1, "<i8") if stored is None else stored
        if not np.array_equal(stored, counts):
            i = min(int(np.flatnonzero(stored != counts)[0]), len(keys)) - 1
            yield int(keys[max(i, 0)]), f"{offsets} differ"
            continue
        for name in names:
            a, b = getattr(index, name), getattr(derived, name)
            if a is None or b is None:
                continue
            bad = np.flatnonzero((a != b).any(axis=tuple(range(1, a.ndim)))) if len(a) == len(b) else np.array([0])
            for row in bad[: limit - named]:
                named += 1
                i = int(np.searchsorted(counts, row, side="right")) - 1
                yield int(keys[min(i, len(keys) - 1)]), f"{name} differ"
