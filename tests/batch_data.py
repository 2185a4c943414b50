"""A data set in memory for tests of batching: each pixel, label and box tells which sample it belongs to."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loaders.dataset import SampleError
from loaders.format import Task

Boxes = tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.uint8], NDArray[np.int64]]


class MemoryDataset:
    """`size` (height, width); sample i has pixels ``i % 251``, label ``i % 7``, key ``1000 + i`` and, for detection, ``i % 3`` boxes.

    `calls`: the indices that `gather` was asked for."""

    def __init__(self, num_samples: int, task: Task = "classification", size: tuple[int, int] = (4, 5), transform: Any = None) -> None:
        self.task: Task = task
        self.transform = transform
        self.fingerprint = f"memory {num_samples}"
        self.num_samples, self.size = num_samples, size
        self.delay_s: Callable[[int], float] = lambda _: 0.0
        self.bad: set[int] = set()
        self.threads: set[threading.Thread] = set()
        self.at_once = 1
        self.calls: list[list[int]] = []

    def __len__(self) -> int:
        return self.num_samples

    def _look(self, i: int) -> None:
        self.threads.add(threading.current_thread())
        time.sleep(self.delay_s(i))
        if i in self.bad:
            raise SampleError(f"train/shard-000000.tar: sample {1000 + i:09d} (source images/{i}.jpg): damaged for the test")

    def size_of(self, i: int) -> tuple[int, int]:
        del i
        return self.size

    def boxes_of(self, i: int) -> dict[str, NDArray[Any]]:
        count = i % 3
        return {
            "boxes": np.full((count, 4), i, np.float32),
            "labels": np.full(count, i % 7, np.int64),
            "difficult": np.full(count, i % 2, np.uint8),
        }

    def load(self, i: int, epoch: int | None = None) -> dict[str, Any]:
        self._look(i)
        sample: dict[str, Any] = {"image": np.full((*self.size_of(i), 3), i % 251, np.uint8)}
        sample.update({"label": i % 7} if self.task == "classification" else self.boxes_of(i) if self.task == "detection" else {})
        sample.update(key=1000 + i, index=i)
        if self.transform is not None:
            sample = self.transform(sample, np.random.default_rng([epoch or 0, i]))
        return sample

    def batch_fields(self) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
        int64 = np.dtype(np.int64)
        label = {"label": ((), int64)} if self.task == "classification" else {}
        return {"image": ((*self.size, 3), np.dtype(np.uint8)), **label, "key": ((), int64), "index": ((), int64)}

    def gather(self, indices: NDArray[np.int64], out: dict[str, NDArray[Any]]) -> NDArray[np.int64]:
        self.calls.append(indices.tolist())
        for i in indices.tolist():
            self._look(i)
        count = len(indices)
        out["image"][:count] = (indices % 251).astype(np.uint8)[:, None, None, None]
        if "label" in out:
            out["label"][:count] = indices % 7
        out["key"][:count] = 1000 + indices
        out["index"][:count] = indices
        return indices

    def batches_at_once(self, batch_size: int) -> int:
        del batch_size
        return self.at_once

    def gather_ragged(self, indices: NDArray[np.int64]) -> Boxes:
        parts = [self.boxes_of(i) for i in indices.tolist()]
        boxes, labels, difficult = (np.concatenate([p[name] for p in parts]) for name in ("boxes", "labels", "difficult"))
        return boxes, labels, difficult, np.cumsum([0, *(len(p["labels"]) for p in parts)])


class MixedSizes(MemoryDataset):
    """Images differ in size: sample i is ``4 + i % 3`` high."""

    def size_of(self, i: int) -> tuple[int, int]:
        return 4 + i % 3, 5

    def batch_fields(self) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
        fields = super().batch_fields()
        del fields["image"]
        return fields


def producer_threads() -> list[str]:
    """Names of our threads that live."""
    return [t.name for t in threading.enumerate() if t.name.startswith("loaders-")]
