"""Ceilings: loops that do the unavoidable calls and nothing else, with as many threads as the package gets."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import simplejpeg  # type: ignore[import-untyped]  # it has neither stubs nor py.typed
import torch
from numpy.typing import NDArray

from augment_plain import decode, letterbox, random_resized_crop
from loaders.shards import ShardDataset
from protocol import Batch, Epoch, serve


def _memmaps(root: str, name: str) -> list[NDArray[Any]]:
    return [np.load(folder / f"{name}.npy", mmap_mode="c") for folder in sorted(Path(root, "train").glob("shard-*"))]


def copyto(root: str, batch: int) -> Epoch:
    """One thread copies a batch's bytes from the warm map into warm memory, in stored order."""
    images = _memmaps(root, "image")
    out = np.empty((batch, *images[0].shape[1:]), np.uint8)

    def epoch() -> Iterator[Batch]:
        for shard in images:
            for start in range(0, len(shard) - batch + 1, batch):
                np.copyto(out, shard[start : start + batch])
                yield out, None, None

    return epoch


def index_select(root: str, batch: int) -> Epoch:
    """`torch.index_select` over one image and one label tensor, shuffled."""
    images, labels = (torch.from_numpy(np.concatenate(_memmaps(root, name))) for name in ("image", "label"))

    def epoch() -> Iterator[Batch]:
        order = torch.randperm(len(images))
        for start in range(0, len(images) - batch + 1, batch):
            chosen = order[start : start + batch]
            yield images.index_select(0, chosen), labels.index_select(0, chosen), None

    return epoch


def _threads(num: int, batch: int, shape: tuple[int, ...], threads: int, fill: Callable[[int, NDArray[Any], random.Random], None]) -> Epoch:
    """Whole batches by `threads` threads into fresh memory; `fill(sample, out, rng)` makes a row."""
    local = threading.local()

    def one(samples: NDArray[np.int64]) -> NDArray[np.uint8]:
        rng: random.Random = local.__dict__.setdefault("rng", random.Random(0))
        out = np.empty((len(samples), *shape), np.uint8)
        for row, sample in enumerate(samples.tolist()):
            fill(sample, out[row], rng)
        return out

    def epoch() -> Iterator[Batch]:
        cv2.setNumThreads(0)
        order = np.random.default_rng().permutation(num)
        parts = [order[start : start + batch] for start in range(0, num - batch + 1, batch)]
        with ThreadPoolExecutor(threads) as pool:
            waiting = [pool.submit(one, part) for part in parts[: 2 * threads]]
            for part in [*parts[2 * threads :], *[None] * min(len(parts), 2 * threads)]:
                done = waiting.pop(0).result()
                if part is not None:
                    waiting.append(pool.submit(one, part))
                yield done, None, None

    return epoch


def _encoded(root: str) -> list[bytes]:
    ds = ShardDataset(root)
    return [ds.encoded(i) for i in range(len(ds))]


def decode_only(root: str, batch: int, threads: int, side: int) -> Epoch:
    """simplejpeg into the batch, from bytes in memory."""
    data = _encoded(root)

    def fill(sample: int, out: NDArray[Any], _: random.Random) -> None:
        simplejpeg.decode_jpeg(data[sample], "RGB", buffer=out)

    return _threads(len(data), batch, (side, side, 3), threads, fill)


def decode_and_crop(root: str, batch: int, threads: int) -> Epoch:
    """cv2: decode the whole picture, RandomResizedCrop to 224, flip; from bytes in memory."""
    data = _encoded(root)

    def fill(sample: int, out: NDArray[Any], rng: random.Random) -> None:
        random_resized_crop(decode(data[sample]), 224, rng, out)

    return _threads(len(data), batch, (224, 224, 3), threads, fill)


def decode_and_letterbox(root: str, batch: int, threads: int, side: int) -> Epoch:
    """cv2: decode the whole picture, shrink it (INTER_LINEAR); from bytes in memory."""
    data = _encoded(root)

    def fill(sample: int, out: NDArray[Any], _: random.Random) -> None:
        np.copyto(out, letterbox(decode(data[sample]), side)[0])

    return _threads(len(data), batch, (side, side, 3), threads, fill)


if __name__ == "__main__":
    serve(
        {
            "copyto": copyto,
            "index_select": index_select,
            "decode_only": decode_only,
            "decode_and_crop": decode_and_crop,
            "decode_and_letterbox": decode_and_letterbox,
        }
    )
