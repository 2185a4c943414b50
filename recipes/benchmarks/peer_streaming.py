"""Loaders of chunked files with DataLoader workers: mosaicml-streaming (MDS) and litdata. Both hold the JPEG bytes; cv2 decodes.

python peer_streaming.py write_mds JSON     makes the files
python peer_streaming.py write_litdata JSON
"""

from __future__ import annotations

import importlib
import json
import random
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch

from augment_plain import decode, random_resized_crop
from protocol import Batch, Epoch, serve

RNG = random.Random()


def _files(source: str) -> list[tuple[str, int]]:
    folders = sorted(Path(source, "train").iterdir())
    files = [(str(path), label) for label, folder in enumerate(folders) for path in sorted(folder.iterdir())]
    random.Random(0).shuffle(files)
    return files


def write_mds(source: str, out: str) -> None:
    streaming: Any = importlib.import_module("streaming")
    shutil.rmtree(out, ignore_errors=True)
    with streaming.MDSWriter(out=out, columns={"image": "bytes", "label": "int"}, size_limit=1 << 24) as writer:
        for path, label in _files(source):
            writer.write({"image": Path(path).read_bytes(), "label": label})


def _read(item: tuple[str, int]) -> dict[str, Any]:
    return {"image": Path(item[0]).read_bytes(), "label": item[1]}


def write_litdata(source: str, out: str) -> None:
    litdata: Any = importlib.import_module("litdata")
    shutil.rmtree(out, ignore_errors=True)
    litdata.optimize(fn=_read, inputs=_files(source), output_dir=out, num_workers=1, chunk_bytes="16MB")


def _sample(sample: dict[str, Any], crop: int) -> tuple[torch.Tensor, int]:
    image = random_resized_crop(decode(bytes(sample["image"])), crop, RNG)
    return torch.from_numpy(image), int(sample["label"])


def _quiet(worker: int) -> None:
    cv2.setNumThreads(0)
    RNG.seed(torch.initial_seed() + worker)


def _epochs(loader: Any) -> Epoch:
    def epoch() -> Iterator[Batch]:
        for images, labels in loader:
            yield images, np.asarray(labels), None

    return epoch


def mds(path: str, batch: int, workers: int, crop: int) -> Epoch:
    streaming: Any = importlib.import_module("streaming")

    class Crops(streaming.StreamingDataset):  # type: ignore[misc]  # streaming is not there when types are checked
        def __getitem__(self, at: int) -> tuple[torch.Tensor, int]:
            return _sample(super().__getitem__(at), crop)

    ds = Crops(local=path, shuffle=True, batch_size=batch)
    more: dict[str, Any] = {"num_workers": workers, "persistent_workers": True, "prefetch_factor": 4, "worker_init_fn": _quiet}
    return _epochs(torch.utils.data.DataLoader(ds, batch_size=batch, **more))


def litdata(path: str, batch: int, workers: int, crop: int) -> Epoch:
    lit: Any = importlib.import_module("litdata")

    class Crops(lit.StreamingDataset):  # type: ignore[misc]  # litdata is not there when types are checked
        def __getitem__(self, at: Any) -> tuple[torch.Tensor, int]:
            return _sample(super().__getitem__(at), crop)

    ds = Crops(path, shuffle=True)
    more: dict[str, Any] = {"num_workers": workers, "persistent_workers": True, "prefetch_factor": 4, "worker_init_fn": _quiet}
    return _epochs(lit.StreamingDataLoader(ds, batch_size=batch, **more))


if __name__ == "__main__":
    if sys.argv[1] in ("write_mds", "write_litdata"):
        {"write_mds": write_mds, "write_litdata": write_litdata}[sys.argv[1]](**json.loads(sys.argv[2]))
    else:
        serve({"mds": mds, "litdata": litdata})
