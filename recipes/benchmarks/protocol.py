"""The contestant's side: a process that loads batches when it is told to. Runs in any virtual environment, so: no imports of the project.

A contestant script ends with ``serve(BUILDERS)`` and is started as ``python SCRIPT NAME JSON``, with the builder's name and its arguments.
It then talks in lines: after its imports, once the loader is built (any line starts that), and in answer to each line it reads:

    run SECONDS     whole epochs until that much time has passed (at least one): {"samples", "seconds"}
    check           one epoch, every byte looked at: {"samples", "pixels", "labels", "extra", "shape", "dtype"}

An epoch is an iterator of batches ``(images, labels, extra)``: `images` uint8 [B, ...] tensor or array, `labels` [B] or None, `extra` a
list of arrays (boxes) or None. Every batch is touched in the same way: one value of each row is added up.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TextIO

import numpy as np

Batch = tuple[Any, Any, Any]
Epoch = Callable[[], Iterator[Batch]]
Builder = Callable[..., Epoch]


def touch(batch: Batch) -> int:
    """Look at one value of each row; the number of rows."""
    images = batch[0]
    int(images[(slice(None), *([0] * (images.ndim - 1)))].sum())
    return len(images)


def run(epoch: Epoch, seconds: float) -> dict[str, Any]:
    samples, start = 0, time.perf_counter()
    while True:
        for batch in epoch():
            samples += touch(batch)
        spent = time.perf_counter() - start
        if spent >= seconds:
            return {"samples": samples, "seconds": spent}


def check(epoch: Epoch) -> dict[str, Any]:
    """Sums that do not depend on the order: of all pixels, of all labels, of all numbers in `extra`."""
    samples = pixels = labels = 0
    extra, shape, dtype = 0.0, (), ""
    for images, some_labels, some_extra in epoch():
        array = np.asarray(images)
        samples += len(array)
        pixels += int(array.sum(dtype=np.uint64))
        labels += 0 if some_labels is None else int(np.asarray(some_labels).astype(np.int64).sum())
        extra += sum(float(np.asarray(item, np.float64).sum()) for item in some_extra or ())
        shape, dtype = array.shape[1:], str(array.dtype)
    return {"samples": samples, "pixels": pixels, "labels": labels, "extra": round(extra, 1), "shape": list(shape), "dtype": dtype}


def serve(builders: Mapping[str, Builder]) -> None:
    """Build what the command line names, then answer lines until standard input ends. Prints of libraries go to stderr."""
    name, arguments = sys.argv[1], json.loads(sys.argv[2])
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    _say(out, {"imported": True})
    sys.stdin.readline()  # the other side has looked at our memory
    epoch = builders[name](**arguments)
    _say(out, {"ready": True})
    for line in sys.stdin:
        words = line.split()
        _say(out, check(epoch) if words[0] == "check" else run(epoch, float(words[1])))


def _say(out: TextIO, answer: dict[str, Any]) -> None:
    out.write(json.dumps(answer) + "\n")
    out.flush()
