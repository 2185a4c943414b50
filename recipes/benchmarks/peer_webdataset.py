"""webdataset over the same tars: decoded with cv2 (the faster handler), shuffled, batched in the workers."""

from __future__ import annotations

import importlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from augment_plain import decode, random_resized_crop
from protocol import Batch, Epoch, serve

SHUFFLE = 1000


class _Sample:
    """Parts of a sample to (image, label)."""

    def __init__(self, crop: int) -> None:
        self.crop = crop
        self.rng = random.Random()

    def __call__(self, sample: dict[str, Any]) -> tuple[Any, int]:
        cv2.setNumThreads(0)
        image = decode(sample["jpg"])
        return (random_resized_crop(image, self.crop, self.rng) if self.crop else image), int(sample["cls"])


def _collate(samples: list[tuple[Any, int]]) -> tuple[Any, Any]:
    return np.stack([image for image, _ in samples]), np.array([label for _, label in samples])


def loader(root: str, batch: int, workers: int, crop: int = 0) -> Epoch:
    wds = importlib.import_module("webdataset")
    shards = sorted(map(str, Path(root, "train").glob("*.tar")))
    pipeline = wds.WebDataset(shards, shardshuffle=len(shards), empty_check=False).shuffle(SHUFFLE).map(_Sample(crop))
    pipeline = pipeline.batched(batch, collation_fn=_collate, partial=True)
    more = {"persistent_workers": True, "prefetch_factor": 4} if workers else {}
    batches = wds.WebLoader(pipeline, batch_size=None, num_workers=workers, **more)

    def epoch() -> Iterator[Batch]:
        for images, labels in batches:
            yield images, labels, None

    return epoch


if __name__ == "__main__":
    serve({"loader": loader})
