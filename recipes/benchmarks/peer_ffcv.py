"""FFCV: writes its own file from class folders, and loads it with its compiled pipeline. Its batches are overwritten by later ones.

python peer_ffcv.py write JSON    makes the file
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cv2

from protocol import Batch, Epoch, serve


class Files:
    """Class folders of pictures, as (RGB image, label)."""

    def __init__(self, root: str) -> None:
        folders = sorted(Path(root, "train").iterdir())
        self.paths = [(path, label) for label, folder in enumerate(folders) for path in sorted(folder.iterdir())]

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, i: int) -> tuple[Any, int]:
        path, label = self.paths[i]
        image: Any = cv2.imread(str(path), cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION)
        return cv2.cvtColor(image, cv2.COLOR_BGR2RGB), label


def write(source: str, out: str, mode: str, max_resolution: int | None, quality: int, workers: int) -> None:
    fields: Any = importlib.import_module("ffcv.fields")
    writer: Any = importlib.import_module("ffcv.writer")
    image = fields.RGBImageField(write_mode=mode, max_resolution=max_resolution, jpeg_quality=quality)
    target = writer.DatasetWriter(out, {"image": image, "label": fields.IntField()}, num_workers=workers)
    target.from_indexed_dataset(Files(source), shuffle_indices=True)


def loader(path: str, batch: int, workers: int, crop: int = 0) -> Epoch:
    decoders: Any = importlib.import_module("ffcv.fields.decoders")
    loaders: Any = importlib.import_module("ffcv.loader")
    transforms: Any = importlib.import_module("ffcv.transforms")
    if crop:
        image = [decoders.RandomResizedCropRGBImageDecoder((crop, crop)), transforms.RandomHorizontalFlip(), transforms.ToTensor()]
    else:
        image = [decoders.SimpleRGBImageDecoder(), transforms.ToTensor()]
    label = [decoders.IntDecoder(), transforms.ToTensor(), transforms.Squeeze()]
    batches = loaders.Loader(
        path,
        batch_size=batch,
        num_workers=workers,
        os_cache=True,
        order=loaders.OrderOption.RANDOM,
        batches_ahead=3,
        drop_last=True,
        pipelines={"image": image, "label": label},
    )

    def epoch() -> Iterator[Batch]:
        for images, labels in batches:
            yield images, labels, None

    return epoch


if __name__ == "__main__":
    if sys.argv[1] == "write":
        write(**json.loads(sys.argv[2]))
    else:
        serve({"loader": loader})
