"""How well a packed split is mixed while training: for ``pack info --shuffle``. Index arithmetic alone; no picture is read."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from loaders.format import Index, open_index, read_manifest
from loaders.sampling import Order, ShuffleQuality, permutation, shuffle_quality
from packer.findings import printable
from packer.info import table

WEBDATASET_BUFFER = 1000
_WEBDATASET_INITIAL = 100  # its default: samples in the buffer before the first one is given
_CLUMPED = 1.1


def describe_shuffle(root: Path, batch_size: int, seed: int = 0) -> Iterator[str]:
    """Lines for ``pack info --shuffle``: the numbers of `loaders.sampling.shuffle_quality` for the largest split.

    Args:
        root: a packed data set.
        batch_size: samples per step, over all ranks; 2 or more.
        seed: of the orders; epochs 0 and 1 are compared.

    Raises:
        FormatError: manifest or index cannot be read.
    """
    manifest = read_manifest(root)
    if not manifest.splits:
        return
    split, entry = max(manifest.splits.items(), key=lambda item: item[1].num_samples)
    name = printable(split)
    if entry.num_samples < 2 * batch_size:
        yield f"shuffle of {name}: {entry.num_samples:,} samples are fewer than two batches of {batch_size:,}: give a smaller --batch-size"
        return
    labels = picture_labels(open_index(root, manifest, split))
    found = qualities([shard.num_samples for shard in entry.shards], labels, batch_size, seed)
    rows = [[f"shuffle of {name}, batches of {batch_size:,}", "label chi2/dof", "co-batch ratio"]]
    for kind, quality in found.items():
        rows.append([kind, "-" if quality.label_chi2 is None else f"{quality.label_chi2:.2f}", f"{quality.co_batch:.2f}"])
    yield from table(rows)
    yield "1 is as by chance. A chi2/dof above it: batches differ in their classes. A co-batch ratio above it: samples of one batch meet"
    yield "again in the next epoch, that many times as often."
    ours = found["BatchLoader"].label_chi2
    if ours is not None and ours > _CLUMPED:
        yield "Samples of a class lie together in the shards, and the set is too large to be mixed as a whole: pack with --shuffle."


def qualities(shards: list[int], labels: NDArray[np.int64] | None, batch_size: int, seed: int) -> dict[str, ShuffleQuality]:
    """Quality of each order, by name. `shards`: samples in each; `labels`: int64 [N] by stored position."""
    count = sum(shards)
    stored = np.arange(count)
    pairs = {
        "BatchLoader": [Order(count, seed, epoch)[:] for epoch in (0, 1)],
        f"webdataset .shuffle({WEBDATASET_BUFFER})": [webdataset_order(shards, seed, epoch) for epoch in (0, 1)],
        "stored order": [stored, stored],
    }
    return {kind: shuffle_quality(first, second, batch_size, labels) for kind, (first, second) in pairs.items()}


def webdataset_order(shards: list[int], seed: int, epoch: int) -> NDArray[np.int64]:
    """The order in which ``WebDataset(urls, shardshuffle=True).shuffle(1000)`` gives stored positions, simulated: int64 [N]."""
    starts = np.cumsum([0, *shards])
    visited = permutation(len(shards), seed, epoch).tolist()
    stored = (position for shard in visited for position in range(int(starts[shard]), int(starts[shard + 1])))
    return np.fromiter(webdataset_shuffle(stored, WEBDATASET_BUFFER, random.Random(f"{seed} {epoch}")), np.int64, int(starts[-1]))


def webdataset_shuffle(items: Iterable[int], size: int, rng: random.Random) -> Iterator[int]:
    """`webdataset.filters.shuffle` step by step: the buffer grows by two for each item given, up to `size`."""
    source, buffer = iter(items), list[int]()
    for item in source:
        buffer.append(item)
        if len(buffer) < size:
            more = next(source, None)
            if more is not None:
                buffer.append(more)
        if len(buffer) >= min(_WEBDATASET_INITIAL, size):
            yield _pick(buffer, rng)
    while buffer:
        yield _pick(buffer, rng)


def _pick(buffer: list[int], rng: random.Random) -> int:
    place = rng.randint(0, len(buffer) - 1)
    buffer[place], buffer[-1] = buffer[-1], buffer[place]
    return buffer.pop()


def picture_labels(index: Index) -> NDArray[np.int64] | None:
    """One class per sample, int64 [N]: its label; in detection the class of its first box, -1 without boxes; None where nothing has one."""
    if index.labels is None or index.box_offsets is None:
        labels = np.asarray(index.samples["label"], np.int64)
        return labels if (labels >= 0).any() else None
    starts, boxes = np.asarray(index.box_offsets[:-1]), np.asarray(index.labels)
    empty = np.asarray(index.box_offsets[1:]) == starts
    if not len(boxes):
        return None
    return np.where(empty, -1, boxes[np.minimum(starts, len(boxes) - 1)])
