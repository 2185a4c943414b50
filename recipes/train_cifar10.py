"""Train on CIFAR-10 with the pictures in five different places, and see how long training waits for them.

    python recipes/train_cifar10.py --data cifar10 --out cifar10-packed                 # CPU: a small network
    python recipes/train_cifar10.py --data cifar10 --out cifar10-packed --device cuda --epochs 10
    python recipes/train_cifar10.py --synthetic 2000 --out cifar10-packed               # no data at hand

`--data` holds class folders of 32x32 pictures below `train` and `test`. The rows of the table:

original         class folders; a plain Dataset that opens each picture with PIL, in torch's DataLoader with worker processes
pre-transformed  the pictures at training size in tar shards, JPEGs as they were: no small files, no resize, still a decode; BatchLoader
memmap           decoded while packing: a batch is one gather from the page cache; BatchLoader
resident         the whole set in the device's memory, DeviceDataset
resident, bf16   the same, and the network in mixed precision (autocast)

All rows train on the same batches in the same order with the same flips and shifts, which are made on the device as a part of the step.
So the float32 rows have equal losses, and data time is loading alone. Epochs go by turns over the rows, and the first is not counted: it
starts the workers and fills caches. Data time is how long the loop waited, see `loaders.monitor`.

Result of the first command with `--epochs 11`, 12,000 of CIFAR-10's pictures as JPEGs (10,000 to train on, 2,000 to test), one run on
a virtual machine with 2 cores (AMD EPYC), with nothing beside it; Python 3.11.7, torch 2.13.0+cpu. Medians of ten epochs: ::

    configuration     epoch s   data s   data share   samples/s     loss   accuracy   data time of the original, in times of this
    original             1.10   0.2368        21.5%       8,831   1.5706      42.9%
    pre-transformed      0.62   0.0267         4.3%      15,722   1.5706      42.9%    9.4 ( 5.6 to 12.5 over the epochs)
    memmap               0.56   0.0080         1.4%      17,517   1.5706      42.9%   24.6 (14.8 to 34.5)
    resident             0.54   0.0096         1.8%      18,029   1.5706      42.9%   25.0 (17.7 to 28.7)
    resident, bf16       0.54   0.0094         1.7%      17,910   1.5469      43.2%   24.9 (18.2 to 28.5)

Worker processes take the cores from the step: that is why the original's epoch is longer by more than its data time. On a CPU the resident
row gathers between the steps, the memmap row in threads behind them. Not measured on a GPU.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from given import whole_from
from loaders.batch_transforms import Flip, Normalize, Shift, begin_epoch
from loaders.batch_transforms import Sequence as Transforms
from loaders.batches import BatchLoader
from loaders.device import DeviceDataset, DevicePrefetcher
from loaders.format import FormatError
from loaders.memmap import MemmapDataset
from loaders.monitor import Monitor, Summary
from loaders.prefetch import check_device, map_tensors
from loaders.samplers import PackedSampler
from loaders.shards import ShardDataset
from loaders.workers import dataloader_kwargs
from packer.build import build
from packer.console import Terminal
from packer.recipe import load_recipe
from packer.sample import PackError

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
ORIGINAL = "original"


class Pictures(Dataset[dict[str, Any]]):
    """Class folders, a picture at a time: `image` uint8 [3, H, W], `label`, `index`. Sorted, as `pack build --no-shuffle` has them."""

    fingerprint = "class folders"

    def __init__(self, root: Path, chosen: Sequence[int]) -> None:
        names = sorted(folder.name for folder in root.iterdir() if folder.is_dir())
        files = [(path, label) for label, name in enumerate(names) for path in sorted((root / name).iterdir())]
        self.files = [files[i] for i in chosen]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, i: int) -> dict[str, Any]:
        path, label = self.files[i]
        with Image.open(path) as picture:
            pixels = np.array(picture.convert("RGB"))
        return {"image": torch.from_numpy(pixels).permute(2, 0, 1), "label": label, "index": i}


def network(num_classes: int, width: int) -> nn.Module:
    """Images float [B, 3, 32, 32] -> logits [B, num_classes]."""
    channels = [3, width, 2 * width, 4 * width]
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(channels):
        layers += [nn.Conv2d(before, after, 3, 2, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels[-1], num_classes))


class Training:
    """One row of the table: a network of its own, and where its batches come from."""

    def __init__(self, name: str, batches: Iterable[Any], options: argparse.Namespace) -> None:
        self.name, self.device, self.half = name, check_device(options.device), name.endswith("bf16")
        self.monitor = Monitor(batches, warn_share=None, synchronize=self.device.type == "cuda")
        self.augment = Transforms(Flip(), Shift(4), Normalize(MEAN, STD))
        torch.manual_seed(0)
        self.model = network(len(CLASSES), options.width).to(self.device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4, nesterov=True)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 0.1, total_steps=options.epochs * len(self.monitor))
        self.summaries: list[Summary] = []
        self.loss = float("nan")

    def epoch(self) -> None:
        """Train for one epoch; `loss` is its mean, `summaries` has its times."""
        self.model.train()
        begin_epoch(self.augment, len(self.summaries))
        losses = []
        for batch in self.monitor:
            batch = self.augment(map_tensors(batch, lambda t: t.to(self.device, non_blocking=True)))
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.half):
                loss = F.cross_entropy(self.model(batch["image"]), batch["label"])
            self.optimizer.zero_grad()
            torch.autograd.backward(loss)
            self.optimizer.step()
            self.schedule.step()
            losses.append(loss.detach())
        self.loss = float(torch.stack(losses).mean())
        if self.monitor.summary is not None:
            self.summaries.append(self.monitor.summary)

    @torch.inference_mode()
    def accuracy(self, test: BatchLoader) -> float:
        """Share of the test pictures that the network names right."""
        self.model.eval()
        normalize, right, total = Normalize(MEAN, STD), 0, 0
        for batch in DevicePrefetcher(test, self.device):
            found = self.model(normalize(batch)["image"]).argmax(1)
            right += int(((found == batch["label"]) & batch["valid"]).sum())
            total += int(batch["valid"].sum())
        return right / total

    def measured(self) -> list[Summary]:
        """The epochs that count."""
        return self.summaries[1:] or self.summaries


def make_pictures(root: Path, num: int) -> None:
    """Synthetic class folders: blotches in a class's colour; `num` training pictures and a fifth as many for the test."""
    rng = np.random.default_rng(0)
    colours = rng.integers(60, 196, (len(CLASSES), 3))
    for split, count in (("train", num), ("test", max(len(CLASSES), num // 5))):
        for i in range(count):
            folder = root / split / CLASSES[i % len(CLASSES)]
            folder.mkdir(parents=True, exist_ok=True)
            blotches = rng.integers(-60, 60, (4, 4, 3)) + colours[i % len(CLASSES)]
            Image.fromarray(blotches.astype(np.uint8)).resize((32, 32), Image.Resampling.BILINEAR).save(folder / f"{i:05d}.jpg", quality=95)


def pack(source: Path, out: Path) -> None:
    """Both layouts below `out`; those that are there already are kept. Raises PackError."""
    for layout, image in (("tar", "keep"), ("memmap", None)):
        recipe = load_recipe(None, {"source": {"kind": "folder"}, "output": {"format": layout, "image": image, "shuffle": False}})
        outcome = build(source, out / layout, recipe, Terminal(quiet=True))
        if not outcome.ok:
            raise PackError(f"{source}: {outcome.message}")


def rows(source: Path, out: Path, options: argparse.Namespace) -> Iterator[Training]:
    """The five configurations, on the same batches."""
    tar, memmap = ShardDataset(out / "tar", "train"), MemmapDataset(out / "memmap", "train")
    num = min(options.num or len(memmap), len(memmap))
    chosen = np.sort(np.random.default_rng(0).permutation(len(memmap))[:num])
    plain = Pictures(source / "train", chosen.tolist())
    settings = dataloader_kwargs(plain, options.batch_size, options.device, workers=options.workers)
    yield Training(ORIGINAL, DataLoader(plain, sampler=PackedSampler(plain, options.batch_size), **settings), options)
    for name, packed in (("pre-transformed", tar), ("memmap", memmap)):
        batches = BatchLoader(packed.select(chosen), options.batch_size, workers=options.workers)
        yield Training(name, DevicePrefetcher(batches, options.device), options)
    for name in ("resident", "resident, bf16"):
        yield Training(name, DeviceDataset(memmap.select(chosen), options.device, options.batch_size), options)


def compare(source: Path, out: Path, options: argparse.Namespace) -> None:
    """Pack, train all rows by turns, print the table."""
    pack(source, out)
    trainings = list(rows(source, out, options))
    for epoch in range(options.epochs):
        for training in trainings:
            training.epoch()
        print(f"epoch {epoch}: " + ", ".join(f"{t.name} {t.summaries[-1].seconds:.2f} s" for t in trainings), flush=True)
    num = trainings[0].summaries[0].num_samples
    print(
        f"\n{num:,} pictures an epoch, batch {options.batch_size}, {options.device}, {options.workers} workers, torch {torch.__version__}\n"
    )
    print("| configuration | epoch s | data s | data share | samples/s | loss | accuracy |\n|---|---|---|---|---|---|---|")
    with BatchLoader(MemmapDataset(out / "memmap", "test"), 500, shuffle=False, remainder="pad") as test:
        for training in trainings:
            print(line(training, training.accuracy(test)))
    for training in trainings[1:]:
        ratios = [a.data_s / b.data_s for a, b in zip(trainings[0].measured(), training.measured(), strict=True)]
        times = f"{statistics.median(ratios):.1f} times ({min(ratios):.1f} to {max(ratios):.1f} over the epochs)"
        print(f"data time of the original is {times} that of {training.name}")


def line(training: Training, accuracy: float) -> str:
    """A row: medians over the epochs that count."""
    epochs = training.measured()
    seconds, data, rate = (statistics.median(getattr(e, name) for e in epochs) for name in ("seconds", "data_s", "samples_per_s"))
    return f"| {training.name} | {seconds:.2f} | {data:.4f} | {data / seconds:.1%} | {rate:,.0f} | {training.loss:.4f} | {accuracy:.1%} |"


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train on CIFAR-10 from five places, and compare how long training waits for data.")
    given = parser.add_mutually_exclusive_group(required=True)
    given.add_argument("--data", type=Path, help="folder with train/CLASS/* and test/CLASS/*, pictures of 32x32")
    given.add_argument("--synthetic", type=whole_from(1), metavar="N", help="make N training pictures below --out instead")
    parser.add_argument("--out", type=Path, default=Path("cifar10-packed"), help="folder for the packed sets (default %(default)s)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default %(default)s)")
    parser.add_argument("--epochs", type=whole_from(1), default=6, help="passes over the data, for each row (default %(default)s)")
    parser.add_argument("--num", type=whole_from(1), default=None, help="training pictures (default: 10,000 on the CPU, all on CUDA)")
    parser.add_argument("--batch-size", type=whole_from(1), help="samples a step (default: 512, or all where there are fewer)")
    parser.add_argument("--width", type=int, default=None, help="channels of the first layer (default: 8 on the CPU, 128 on CUDA)")
    parser.add_argument("--workers", type=int, default=2, help="processes of the DataLoader, threads of BatchLoader (default %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="of torch, which computes on the CPU (default %(default)s)")
    options = parser.parse_args(arguments)
    on_cpu = options.device == "cpu"
    options.width = options.width or (8 if on_cpu else 128)
    options.num = options.num or (10_000 if on_cpu else None)
    options.batch_size = options.batch_size or min(512, options.synthetic or 512, options.num or 512)
    return options


def main() -> int:
    options = parse()
    source = options.data or options.out / "raw"
    torch.set_num_threads(options.threads)
    try:
        if options.synthetic:
            make_pictures(source, options.synthetic)
        compare(source, options.out, options)
    except (FormatError, PackError, ValueError, OSError) as e:
        print(f"train_cifar10: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
