"""What a machine and a packed data set can do at most: rates of storage, copying, one decoding core and the way to the device."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
import torch

from loaders.batches import default_workers
from loaders.dataset import PackedDataset
from loaders.format import read_manifest

BLOCK = 8 << 20
MOST_BYTES = 1 << 30
_GOLDEN = 0.6180339887498949


@dataclass(frozen=True, slots=True)
class Machine:
    """Rates in bytes per second. `cold` is read from the device, as far as the system lets go of its cache, `warm` from memory; both one
    thread. `copy` is one thread's `np.copyto`. None: there is no CUDA device."""

    cores: int
    cold: float
    warm: float
    copy: float
    to_device: float | None


@dataclass(frozen=True, slots=True)
class Data:
    """`sample_bytes`: mean on disk; `load_s`: processor seconds to read, decode and transform one sample, on one core."""

    num_samples: int
    sample_bytes: float
    load_s: float


def rule_of_thumb(machine: Machine, data: Data) -> int:
    """min(cores, storage rate / mean sample size): the number of workers that is often advised."""
    return max(1, min(machine.cores, int(machine.cold / data.sample_bytes)))


def measure_machine(root: Path, split: str, seconds: float) -> Machine:
    """Measure, `seconds` for each rate at most.

    Raises:
        FormatError: the data set cannot be read.
    """
    files = _files(root, split)
    for path in files:
        _drop_from_cache(path)
    cold, num_bytes = _read_rate(files, seconds, MOST_BYTES)
    warm, _ = _read_rate(files, seconds, num_bytes)  # what is in memory now
    return Machine(default_workers(), cold, warm, _copy_rate(seconds), _device_rate(seconds) if torch.cuda.is_available() else None)


def measure_data(ds: PackedDataset, seconds: float) -> Data:
    """Load samples in an even spread for `seconds`, at least one."""
    entry = read_manifest(ds.root).splits[ds.split]
    total = sum(shard.num_bytes for shard in entry.shards)
    before = cv2.getNumThreads()
    cv2.setNumThreads(0)
    try:
        ds.load(0)  # opens files and loads libraries
        end = time.perf_counter() + seconds
        began, count = time.thread_time(), 0
        while count == 0 or time.perf_counter() < end:
            ds.load(int(count * _GOLDEN % 1 * len(ds)))  # everywhere in the set, however far it comes
            count += 1
        load_s = (time.thread_time() - began) / count
    finally:
        cv2.setNumThreads(before)
    return Data(entry.num_samples, total / max(1, entry.num_samples), load_s)


def _files(root: Path, split: str) -> list[Path]:
    paths = [root / shard.path for shard in read_manifest(root).splits[split].shards]
    return [path for shard in paths for path in (sorted(shard.iterdir()) if shard.is_dir() else [shard])]


def _drop_from_cache(path: Path) -> None:
    """Pages that a process has mapped, or that are not written back yet, stay."""
    if hasattr(os, "posix_fadvise"):
        with path.open("rb") as f:
            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _read_rate(files: list[Path], seconds: float, most: int) -> tuple[float, int]:
    """Bytes per second, and bytes."""
    buffer = memoryview(bytearray(BLOCK))
    began, done = time.perf_counter(), 0
    end = began + seconds
    for path in files:
        with path.open("rb", buffering=0) as f:
            while done < most and time.perf_counter() < end and (count := f.readinto(buffer)):
                done += count
    return done / (time.perf_counter() - began), done


def _copy_rate(seconds: float) -> float:
    source, target = np.ones(64_000_000, np.uint8), np.zeros(64_000_000, np.uint8)
    np.copyto(target, source)  # touches every page
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 3 or (time.perf_counter() < end and len(times) < 50):
        began = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - began)
    return source.nbytes / float(np.median(times))


def _device_rate(seconds: float) -> float:
    source = torch.empty(64_000_000, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(source, device="cuda")
    target.copy_(source)
    torch.cuda.synchronize()
    began, count = time.perf_counter(), 0
    while count < 3 or time.perf_counter() - began < seconds:
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        count += 1
    return count * source.nbytes / (time.perf_counter() - began)
