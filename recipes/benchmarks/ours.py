"""Contestants of the package itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from loaders.augment import Letterbox, RandomCrop, RandomResizedCrop
from loaders.batches import BatchLoader
from loaders.collate import collate_indexed
from loaders.memmap import MemmapDataset
from loaders.shards import ShardDataset
from protocol import Batch, Epoch, serve

TRANSFORMS: dict[str, Callable[[], Any]] = {
    "crop224": lambda: RandomResizedCrop(224),
    "crop640": lambda: RandomCrop(640),
    "letterbox640": lambda: Letterbox(640),
}


def batch_loader(
    root: str, layout: str, batch: int, workers: int, transform: str = "", boxes: bool = False, processes: bool = False
) -> Epoch:
    kind = ShardDataset if layout == "tar" else MemmapDataset
    ds = kind(root, transform=TRANSFORMS[transform]() if transform else None)
    loader = BatchLoader(ds, batch_size=batch, workers=workers, collate=collate_indexed if boxes else None, processes=processes)

    def epoch() -> Iterator[Batch]:
        for b in loader:
            extra: Any = [b["boxes"][:, 1:], b["labels"]] if boxes else None
            yield b["image"], b.get("label"), extra

    return epoch


if __name__ == "__main__":
    serve({"batch_loader": batch_loader})
