"""Check the device side on a machine with a GPU, in under 4 minutes: rates, overlap, and that no byte is corrupted on the way.

    python recipes/gpu_check.py --out gpu-check                  # needs CUDA; without it, exit status 2: nothing was checked
    python recipes/gpu_check.py --out gpu-check --device cpu     # the same code, small: what the tests run

1. copies      host to device, from pageable and from page-locked memory.
2. overlap     steps of computing that take about as long as their batch's copy, with plain `.to(device)` and with `DevicePrefetcher`, timed
               by CUDA events. Overlap is the share of the copy that was hidden: 100 % means that only computing is left.
3. gather      batches out of `DeviceDataset`, without and with flip, shift and normalisation to float16.
4. corruption  10,000 batches through `BatchLoader` and `DevicePrefetcher`, each row's checksum computed on the device while more batches
               are copied, compared with the checksum of the same sample on the host. One wrong row makes the exit status 1.
5. airbench    a loader in the manner of airbench's (whole set on the device as float16, padded once, random crops and flips by masks over
               all images each epoch, slices of `randperm`) beside `DeviceDataset`, by turns.

Result: not run on a GPU yet. No GPU was lent while this was written; there are no figures.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from loaders.batch_transforms import Flip, Normalize, Shift
from loaders.batch_transforms import Sequence as Transforms
from loaders.batches import BatchLoader
from loaders.device import DeviceDataset, DevicePrefetcher
from loaders.format import FormatError
from loaders.memmap import MemmapDataset
from loaders.prefetch import check_device
from packer.build import build
from packer.console import Terminal
from packer.recipe import load_recipe
from packer.sample import PackError

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
PAD = 4
ROUNDS = 5


@dataclass(frozen=True)
class Sizes:
    """How much is done. `pictures` of 32x32 are packed as they are, and resized to `side`."""

    pictures: int
    side: int
    copy_bytes: int
    steps: int
    batches: int
    batch_size: int
    epochs: int


LARGE = Sizes(pictures=4000, side=224, copy_bytes=1 << 28, steps=100, batches=10_000, batch_size=128, epochs=20)
SMALL = Sizes(pictures=60, side=48, copy_bytes=1 << 20, steps=5, batches=40, batch_size=8, epochs=1)


class Timer:
    """Seconds of what runs on the device: events on its current stream, or a clock on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __call__(self, work: Callable[[], object]) -> float:
        if self.device.type == "cpu":
            began = time.perf_counter()
            work()
            return time.perf_counter() - began
        torch.cuda.synchronize(self.device)
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch gives it no types
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # as above
        start.record()
        work()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000

    def shortest(self, work: Callable[[], object]) -> float:
        """Of three times."""
        return min(self(work) for _ in range(3))

    def rates(self, amount: float, work: Callable[[], object]) -> str:
        """`amount` per second: median and range of the rounds, after one that does not count."""
        self(work)
        rates = [amount / self(work) for _ in range(ROUNDS)]
        return spread(rates)


def spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):,.3f} ({min(values):,.3f} to {max(values):,.3f})"


def drain(batches: Iterable[Any], epochs: int = 1) -> None:
    """Take all batches and do nothing with them."""
    for _ in range(epochs):
        for _ in batches:
            pass


def prepare(out: Path, sizes: Sizes) -> tuple[MemmapDataset, MemmapDataset]:
    """Noise pictures, packed at 32x32 and at `sizes.side`; kept for the next run. Raises PackError."""
    rng = np.random.default_rng(0)
    raw = out / f"raw-{sizes.pictures}"
    for i in range(sizes.pictures):
        path = raw / f"class{i % 10}" / f"{i:05d}.png"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(path)
    sets = []
    for side in (32, sizes.side):
        packed = out / f"memmap-{sizes.pictures}-{side}"
        recipe = load_recipe(None, {"output": {"format": "memmap"}, "transform": {"resize": f"{side}x{side}", "mode": "stretch"}})
        outcome = build(raw, packed, recipe, Terminal(quiet=True))
        if not outcome.ok:
            raise PackError(f"{raw}: {outcome.message}")
        sets.append(MemmapDataset(packed, "train"))
    return sets[0], sets[1]


def check_copies(timer: Timer, sizes: Sizes) -> Iterator[str]:
    """1: host to device."""
    there = torch.empty(sizes.copy_bytes, dtype=torch.uint8, device=timer.device)
    pageable = torch.ones(sizes.copy_bytes, dtype=torch.uint8)
    sources = {"pageable": pageable}
    if timer.device.type == "cuda":
        sources["page-locked"] = pageable.pin_memory()
    for name, source in sources.items():
        rate = timer.rates(sizes.copy_bytes / 1e9, functools.partial(there.copy_, source, non_blocking=True))
        yield f"copy from {name} memory, GB/s: {rate}"


def check_overlap(timer: Timer, ds: MemmapDataset, sizes: Sizes) -> Iterator[str]:
    """2: copies behind computing. The batches are made beforehand: this is about copies."""
    device = timer.device
    with BatchLoader(ds, min(sizes.batch_size, len(ds)), shuffle=False) as loader:
        made = [batch["image"] for batch in loader][:4]
    batches = [made[i % len(made)] for i in range(sizes.steps)]
    work = torch.randn(256, 256, device=device) if device.type == "cpu" else torch.randn(4096, 4096, device=device, dtype=torch.float16)

    def compute(count: int) -> None:
        for _ in range(count):
            work @ work

    def train(images: Iterable[Tensor], repeats: int) -> None:
        for _ in images:
            compute(repeats)

    def moved() -> Iterator[Tensor]:
        return (image.to(device, non_blocking=True) for image in batches)

    copy_s = timer.shortest(lambda: drain(moved())) / sizes.steps
    repeats = max(1, round(copy_s / (timer.shortest(lambda: compute(20)) / 20)))
    compute_s = timer.shortest(lambda: compute(repeats * sizes.steps)) / sizes.steps
    plain, ahead = [], []
    for _ in range(ROUNDS):
        plain.append(1000 * timer(lambda: train(moved(), repeats)) / sizes.steps)
        ahead.append(1000 * timer(lambda: train(DevicePrefetcher(batches, device), repeats)) / sizes.steps)
    yield f"a step: copy {1000 * copy_s:.3f} ms, computing {1000 * compute_s:.3f} ms"
    yield f"plain, ms: {spread(plain)}; DevicePrefetcher, ms: {spread(ahead)}"
    if device.type == "cuda":  # on the CPU nothing is copied
        yield f"overlap: {(statistics.median(plain) - statistics.median(ahead)) / (1000 * copy_s):.0%} of the copy was hidden"


def check_gather(timer: Timer, sets: Sequence[MemmapDataset], sizes: Sizes) -> Iterator[str]:
    """3: batches out of the device's memory."""
    for ds in sets:
        for name, transform in (("gather", None), ("gather, flip, shift, float16", augment())):
            began = time.perf_counter()
            resident = DeviceDataset(ds, timer.device, sizes.batch_size, batch_transform=transform)
            upload_s = time.perf_counter() - began
            amount = sizes.batch_size * len(resident)
            side = ds[0]["image"].shape[1]
            rate = timer.rates(amount / 1000, functools.partial(drain, resident))
            yield f"{side}x{side} {name}, 1,000 images/s: {rate}; upload {upload_s:.2f} s"


def augment() -> Transforms:
    """What an airbench loader does, by the batch."""
    return Transforms(Flip(), Shift(PAD), Normalize(MEAN, STD, torch.float16))


def check_corruption(device: torch.device, ds: MemmapDataset, sizes: Sizes) -> tuple[int, int]:
    """4: rows compared and rows that were wrong."""
    generator = torch.Generator().manual_seed(0)
    pixels = ds[0]["image"].numel()
    # Odd factors, products summed modulo 2**64: any one changed byte changes the sum, and so do swapped ones, nearly always.
    factors = torch.randint(-(2**40), 2**40, (pixels,), generator=generator) * 2 + 1
    wanted = torch.stack([(ds[i]["image"].reshape(-1).long() * factors).sum() for i in range(len(ds))]).to(device)
    factors = factors.to(device)
    wrong, rows = torch.zeros((), dtype=torch.int64, device=device), 0
    held: list[tuple[Tensor, Tensor]] = []
    with BatchLoader(ds, sizes.batch_size, shuffle=True, seed=0) as loader:
        prefetcher = DevicePrefetcher(loader, device)
        while rows < sizes.batches * sizes.batch_size:
            for batch in prefetcher:
                # A batch is looked at when three more have come, so that memory that is lent again too early is caught.
                held.append((batch["image"], batch["index"]))
                if len(held) > 3:
                    image, index = held.pop(0)
                    sums = (image.reshape(len(image), -1).long() * factors).sum(1)
                    wrong += (sums != wanted[index]).sum()
                    rows += len(image)
    return rows, int(wrong)


class AirbenchStyle:
    """The whole set on the device as float16, normalised and padded once; iterating gives an epoch of images and labels.

    Args:
        images: uint8 [N, 3, H, W], on the device.
        labels: int64 [N], there too.
    """

    def __init__(self, images: Tensor, labels: Tensor, batch_size: int) -> None:
        self.size, self.batch_size, self.labels = images.shape[2], batch_size, labels
        normal = Normalize(MEAN, STD, torch.float16)({"image": images})["image"]
        self.padded = F.pad(normal, (PAD,) * 4, "reflect").contiguous(memory_format=torch.channels_last)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        count, device = len(self.padded), self.padded.device
        images = torch.empty((count, 3, self.size, self.size), dtype=self.padded.dtype, device=device, memory_format=torch.channels_last)
        places = torch.randint(0, 2 * PAD + 1, (count, 2), device=device)
        for y in range(2 * PAD + 1):
            for x in range(2 * PAD + 1):
                chosen = (places[:, 0] == y) & (places[:, 1] == x)
                images[chosen] = self.padded[chosen, :, y : y + self.size, x : x + self.size]
        flipped = torch.rand(count, device=device) < 0.5
        images[flipped] = images[flipped].flip(-1)
        order = torch.randperm(count, device=device)
        for first in range(0, count - self.batch_size + 1, self.batch_size):
            rows = order[first : first + self.batch_size]
            yield images[rows], self.labels[rows]


def check_airbench(timer: Timer, ds: MemmapDataset, sizes: Sizes) -> Iterator[str]:
    """5: by turns."""
    ours = DeviceDataset(ds, timer.device, sizes.batch_size, batch_transform=augment())
    whole = next(iter(DeviceDataset(ds, timer.device, len(ds), shuffle=False)))
    theirs = AirbenchStyle(whole["image"], whole["label"], sizes.batch_size)
    amount = sizes.epochs * len(ours) * sizes.batch_size / 1000
    loaders: dict[str, Iterable[Any]] = {"airbench style": theirs, "DeviceDataset": ours}
    rates: dict[str, list[float]] = {name: [] for name in loaders}
    for number in range(ROUNDS + 1):
        for name, loader in loaders.items():
            rate = amount / timer(functools.partial(drain, loader, sizes.epochs))
            if number:  # the first round does not count
                rates[name].append(rate)
    ratios = [b / a for a, b in zip(*rates.values(), strict=True)]
    yield "; ".join(f"{name}, 1,000 images/s: {spread(values)}" for name, values in rates.items())
    yield f"DeviceDataset / airbench style: {spread(ratios)}"


def check_all(out: Path, device: torch.device, sizes: Sizes) -> int:
    """Run everything; the number of corrupted rows."""
    timer = Timer(device)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU, small sizes: these figures say nothing about a GPU"
    print(f"torch {torch.__version__}, {where}; medians and ranges of {ROUNDS} rounds", flush=True)
    small, large = prepare(out, sizes)
    sections = {
        "copies": check_copies(timer, sizes),
        "overlap": check_overlap(timer, large, sizes),
        "gather": check_gather(timer, (small, large), sizes),
        "airbench": check_airbench(timer, small, sizes),
    }
    for name, lines in sections.items():
        for line in lines:
            print(f"{name}: {line}", flush=True)
    rows, wrong = check_corruption(device, small, sizes)
    print(f"corruption: {rows // sizes.batch_size:,} batches, {rows:,} rows compared, {wrong:,} wrong")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description="Check the device side: rates, overlap, corruption.")
    parser.add_argument("--out", type=Path, default=Path("gpu-check"), help="folder for packed noise (default %(default)s)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: the same code, small (default %(default)s)")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("gpu_check: no CUDA device here, so nothing was checked; --device cpu runs the same code, small", file=sys.stderr)
        return 2
    try:
        wrong = check_all(options.out, check_device(options.device), LARGE if options.device == "cuda" else SMALL)
    except (FormatError, PackError, ValueError, OSError) as e:
        print(f"gpu_check: {e}", file=sys.stderr)
        return 1
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
