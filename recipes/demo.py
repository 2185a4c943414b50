"""Load a few detection batches from packed data and print what came: the last part of `make demo`.

python recipes/demo.py demo-data/tar demo-data/memmap
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np
import torch

from loaders.batches import BatchLoader
from loaders.collate import collate_indexed
from loaders.format import FormatError, read_manifest
from loaders.memmap import MemmapDataset
from loaders.shards import ShardDataset

BATCH_SIZE = 8


def open_packed(root: Path, split: str) -> ShardDataset | MemmapDataset:
    """The data set of one split, by the layout that its manifest names."""
    kind = ShardDataset if read_manifest(root).layout == "tar" else MemmapDataset
    return kind(root, split=split)


def show(root: Path, num_batches: int) -> None:
    """Print splits and classes of a packed data set, then a few batches of its train split.

    Raises:
        ValueError: a box lies outside its picture.
    """
    manifest = read_manifest(root)
    splits = ", ".join(f"{name} {split.num_samples}" for name, split in sorted(manifest.splits.items()))
    dataset = open_packed(root, "train")
    counts = np.bincount(np.asarray(dataset.labels), minlength=len(dataset.classes))
    print(f"{root}: layout {manifest.layout}; {splits}")
    print("  train boxes: " + ", ".join(f"{name} {count}" for name, count in zip(dataset.classes, counts.tolist(), strict=True)))
    start = time.perf_counter()
    with BatchLoader(dataset, batch_size=BATCH_SIZE, shuffle=True, seed=0, collate=collate_indexed) as batches:
        for number, batch in zip(range(num_batches), batches, strict=False):
            images, boxes, labels = batch["image"], batch["boxes"], batch["labels"]
            height, width = images.shape[2:]
            limit = torch.tensor([width, height, width, height])
            if bool((boxes[:, 1:] < 0).any() or (boxes[:, 1:] > limit).any()):
                raise ValueError(f"{root}: batch {number} has a box outside its {width}x{height} picture")
            print(
                f"  batch {number} of {len(batches)}: image {str(images.dtype).removeprefix('torch.')} {list(images.shape)}, "
                f"mean {images.float().mean():.1f}; {len(labels)} boxes, first {boxes[0, 1:].round(decimals=1).tolist()} "
                f"is {dataset.classes[int(labels[0])]}"
            )
    print(f"  {time.perf_counter() - start:.2f} s with the loader's start")


def main() -> int:
    parser = argparse.ArgumentParser(description="Load a few detection batches and print what came.")
    parser.add_argument("data", type=Path, nargs="+", help="packed data sets")
    parser.add_argument("--batches", type=int, default=3, help="batches to load from each (default %(default)s)")
    args = parser.parse_args()
    try:
        for root in args.data:
            show(root, args.batches)
    except (FormatError, ValueError) as e:
        print(f"demo: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
