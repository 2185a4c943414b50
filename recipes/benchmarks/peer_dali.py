"""NVIDIA DALI on the CPU: its webdataset reader, decoder with random crop, resize and flip, over the same tars."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from protocol import Batch, Epoch, serve

SHUFFLE = 1000


def loader(root: str, num: int, batch: int, threads: int, crop: int) -> Epoch:
    dali: Any = importlib.import_module("nvidia.dali")
    fn: Any = importlib.import_module("nvidia.dali.fn")
    types: Any = importlib.import_module("nvidia.dali.types")
    paths = sorted(map(str, Path(root, "train").glob("*.tar")))

    @dali.pipeline_def  # type: ignore[untyped-decorator]  # DALI is not there when types are checked
    def pipeline() -> Any:
        encoded, label = fn.readers.webdataset(
            paths=paths, ext=["jpg", "cls"], random_shuffle=True, initial_fill=SHUFFLE, missing_component_behavior="error"
        )
        images = fn.decoders.image_random_crop(
            encoded,
            device="cpu",
            output_type=types.RGB,
            jpeg_fancy_upsampling=True,
            random_area=[0.08, 1.0],
            random_aspect_ratio=[3 / 4, 4 / 3],
        )
        images = fn.resize(images, size=[crop, crop], interp_type=types.INTERP_LINEAR, antialias=False)
        return fn.flip(images, horizontal=fn.random.coin_flip()), label

    pipe = pipeline(batch_size=batch, num_threads=threads, device_id=None, prefetch_queue_depth=2, exec_dynamic=True)
    pipe.build()

    def epoch() -> Iterator[Batch]:
        for _ in range(num // batch):
            images, labels = pipe.run()
            numbers = np.array([int(bytes(np.asarray(labels[i])).decode()) for i in range(batch)])
            yield images.as_array(), numbers, None

    return epoch


if __name__ == "__main__":
    serve({"loader": loader})
