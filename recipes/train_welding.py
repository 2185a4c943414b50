"""Train a detector on weld pictures twice: from files and XML, as it is usually begun, and from packed data with all parts together.

    python recipes/train_welding.py --out welding --num 1000                                       # CPU, a few minutes
    python recipes/train_welding.py --out welding --num 1000 --device cuda --side 640 --width 32

before  a plain Dataset: ElementTree reads the XML, PIL decodes the JPEG and letterboxes it; torch's DataLoader with 2 worker processes
after   `pack build --format memmap --resize 320 --mode letterbox`, once; then BatchLoader (2 threads), DevicePrefetcher, Monitor

Both train the detector of `recipes/train_detection.py` from the same start, narrow and at 320 pixels by default: on a CPU a larger
one would hide any loading. Epochs go by turns, and the first is not counted. `--data RAW` takes a set that is there; otherwise `--num`
pictures are made by `recipes/make_welding_v2.py`.

Result of the first command with `--epochs 5`, 696 pictures of 1600x1200 an epoch, one run on a virtual machine with 2 cores (AMD EPYC),
with nothing beside it; Python 3.11.7, torch 2.13.0+cpu, pillow 13.0.0. Medians of four epochs: ::

              epoch s   data s   data share   samples/s    loss
    before       9.26   4.1273        44.6%          75   1.454
    after        3.07   0.0123         0.4%         227   1.455

Epoch time, before / after: 2.93 (2.79 to 3.05 over the epochs); data time: 302 (197 to 356). Packing took 7 s, once: about what the first
epoch saved. Worker processes take the cores from the step as well, hence the factor is larger than the share says. At 640 pixels, one epoch
each: 20.9 s before, 15.6 s after. Not measured on a GPU.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from given import whole_from
from loaders.batches import BatchLoader
from loaders.collate import collate_indexed
from loaders.device import DevicePrefetcher
from loaders.format import FormatError
from loaders.memmap import MemmapDataset
from loaders.monitor import Monitor, Summary
from loaders.prefetch import check_device, map_tensors
from loaders.workers import dataloader_kwargs
from make_welding_v2 import CLASSES, Options, make
from packer.build import build
from packer.console import Terminal
from packer.recipe import load_recipe
from packer.sample import PackError
from train_detection import Detector, detection_loss

RECIPE = Path(__file__).with_name("welding_v2.toml")
FILL = 114


class WeldFiles(Dataset[dict[str, Any]]):
    """The train split as files: `image` uint8 [3, side, side], `boxes` float32 [N, 4] xyxy pixels of it, `labels` int64 [N]."""

    def __init__(self, root: Path, side: int) -> None:
        with (root / "train_val_test_split.csv").open(encoding="utf-8", newline="") as f:
            self.names = [row["image_id"] for row in csv.DictReader(f) if row["split"] == "train"]
        self.root, self.side = root, side

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, i: int) -> dict[str, Any]:
        objects = ElementTree.parse(self.root / f"annotations/{self.names[i]}.xml").getroot().findall("object")
        corners = ("xmin", "ymin", "xmax", "ymax")
        boxes = [[float(o.findtext(f"bndbox/{corner}", "nan")) for corner in corners] for o in objects]
        labels = [CLASSES.index(o.findtext("name", "")) for o in objects]
        with Image.open(self.root / f"images/{self.names[i]}.jpg") as picture:
            scale = self.side / max(picture.size)
            width, height = round(picture.width * scale), round(picture.height * scale)
            small = picture.convert("RGB").resize((width, height), Image.Resampling.BILINEAR)
        left, top = (self.side - width) // 2, (self.side - height) // 2
        canvas = Image.new("RGB", (self.side, self.side), (FILL, FILL, FILL))
        canvas.paste(small, (left, top))
        moved = torch.tensor(boxes).reshape(-1, 4) * scale + torch.tensor([left, top, left, top])
        return {
            "image": torch.from_numpy(np.array(canvas)).permute(2, 0, 1),
            "boxes": moved,
            "labels": torch.tensor(labels, dtype=torch.int64),
        }


def collate_files(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """As `collate_indexed`: `boxes` float32 [T, 5] begin with the picture's number in the batch."""
    numbers = torch.cat([torch.full((len(s["boxes"]), 1), float(i)) for i, s in enumerate(samples)])
    return {
        "image": torch.stack([s["image"] for s in samples]),
        "boxes": torch.cat([numbers, torch.cat([s["boxes"] for s in samples])], dim=1),
        "labels": torch.cat([s["labels"] for s in samples]),
    }


class Training:
    """One row of the table."""

    def __init__(self, name: str, batches: Iterable[Any], device: str, width: int) -> None:
        self.name, self.device = name, check_device(device)
        self.monitor = Monitor(batches, warn_share=None, synchronize=self.device.type == "cuda")
        torch.manual_seed(0)
        self.model = Detector(len(CLASSES), width).to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self.summaries: list[Summary] = []
        self.loss = float("nan")

    def epoch(self) -> None:
        """Train for one epoch; `loss` is its mean, `summaries` has its times."""
        losses = []
        for batch in self.monitor:
            batch = map_tensors(batch, lambda t: t.to(self.device, non_blocking=True))
            heat, box = self.model(batch["image"])
            loss = detection_loss(heat, box, batch["boxes"], batch["labels"])
            self.optimizer.zero_grad()
            torch.autograd.backward(loss)
            self.optimizer.step()
            losses.append(loss.detach())
        self.loss = float(torch.stack(losses).mean())
        if self.monitor.summary is not None:
            self.summaries.append(self.monitor.summary)

    def measured(self) -> list[Summary]:
        """The epochs that count."""
        return self.summaries[1:] or self.summaries


def pack(source: Path, out: Path, side: int) -> float:
    """Pack at training size, once; seconds that it took. Raises PackError."""
    began = time.perf_counter()
    recipe = load_recipe(RECIPE, {"output": {"format": "memmap", "image": None}, "transform": {"resize": side, "mode": "letterbox"}})
    outcome = build(source, out, recipe, Terminal(quiet=True))
    if not outcome.ok:
        raise PackError(f"{source}: {outcome.message}")
    return time.perf_counter() - began


def compare(source: Path, out: Path, options: argparse.Namespace) -> None:
    """Pack, train both rows by turns, print the table."""
    print(f"packed in {pack(source, out, options.side):.1f} s (0 again, when it was there)")
    files, size, workers = WeldFiles(source, options.side), options.batch_size, options.workers
    settings = dataloader_kwargs(files, size, options.device, workers=workers, collate_fn=collate_files)
    packed = BatchLoader(MemmapDataset(out, "train"), size, workers=workers, collate=collate_indexed)
    before = Training("before", DataLoader(files, shuffle=True, drop_last=True, **settings), options.device, options.width)
    after = Training("after", DevicePrefetcher(packed, options.device), options.device, options.width)
    for epoch in range(options.epochs):
        for training in (before, after):
            training.epoch()
            print(f"epoch {epoch}, {training.name}: {training.summaries[-1].seconds:.2f} s", flush=True)
    print(f"\n{before.summaries[0].num_samples:,} pictures an epoch, batch {size}, {options.device}, torch {torch.__version__}\n")
    print("| | epoch s | data s | data share | samples/s | loss |\n|---|---|---|---|---|---|")
    for training in (before, after):
        print(line(training))
    for name, what in (("seconds", "epoch time"), ("data_s", "data time")):
        ratios = [getattr(a, name) / getattr(b, name) for a, b in zip(before.measured(), after.measured(), strict=True)]
        print(f"{what}, before / after: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f} over the epochs)")


def line(training: Training) -> str:
    """A row: medians over the epochs that count."""
    epochs = training.measured()
    seconds, data, rate = (statistics.median(getattr(e, name) for e in epochs) for name in ("seconds", "data_s", "samples_per_s"))
    return f"| {training.name} | {seconds:.2f} | {data:.4f} | {data / seconds:.1%} | {rate:,.0f} | {training.loss:.3f} |"


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a detector from files, then from packed data, and compare the waiting.")
    parser.add_argument("--data", type=Path, help="a welding_v2 tree; default: pictures are made")
    parser.add_argument("--out", type=Path, default=Path("welding"), help="folder for what is made and packed (default %(default)s)")
    parser.add_argument("--num", type=whole_from(1), default=1000, help="pictures to make (default %(default)s)")
    parser.add_argument("--size", type=int, nargs=2, default=(1600, 1200), metavar=("W", "H"), help="of a picture made (default 1600 1200)")
    parser.add_argument("--side", type=whole_from(32), default=320, help="training size, in pixels (default %(default)s)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default %(default)s)")
    parser.add_argument("--epochs", type=whole_from(1), default=4, help="for each row (default %(default)s)")
    parser.add_argument("--batch-size", type=whole_from(1), default=8, help="samples a step (default %(default)s)")
    parser.add_argument("--width", type=int, default=8, help="channels of the detector (default %(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="processes before, threads after (default %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="of torch, which computes on the CPU (default %(default)s)")
    return parser.parse_args(arguments)


def main() -> int:
    options = parse()
    source = options.data or options.out / "raw"
    torch.set_num_threads(options.threads)
    try:
        if not options.data:
            make(source, Options(options.num, tuple(options.size)), options.workers)
        compare(source, options.out / f"memmap-{options.side}", options)
    except (FormatError, PackError, ValueError, OSError) as e:
        print(f"train_welding: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
