"""Train a small anchor-free detector on packed welding data: a real loop, not a good model. CPU is enough.

    python recipes/train_detection.py --data demo-data/memmap
    python recipes/train_detection.py --data demo-data/tar --epochs 5 --batch-size 8

The packed pictures need one size, so pack with `--resize 640 --mode letterbox`. The head is CenterNet's in its simplest form: a heat
map per class with a peak at each box centre, and at the peak the centre's offset and the box size.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from demo import open_packed
from loaders.batches import BatchLoader
from loaders.collate import collate_indexed
from loaders.faults import SampleError
from loaders.format import FormatError

STRIDE = 8


class Detector(nn.Module):
    """uint8 [B, 3, H, W] -> heat logits [B, C, H/8, W/8] and box values [B, 4, H/8, W/8] (dx, dy, log w, log h; unit: cells)."""

    def __init__(self, num_classes: int, width: int = 32) -> None:
        super().__init__()
        channels = [3, width // 2, width, width, width]
        layers: list[nn.Module] = []
        for i, stride in enumerate([2, 2, 2, 1]):
            layers += [nn.Conv2d(channels[i], channels[i + 1], 3, stride, 1, bias=False), nn.BatchNorm2d(channels[i + 1]), nn.ReLU()]
        self.body = nn.Sequential(*layers)
        self.heat = nn.Conv2d(width, num_classes, 1)
        self.box = nn.Conv2d(width, 4, 1)
        # Peaks are rare: start from a low score, or the first steps only learn that.
        nn.init.constant_(self.heat.get_parameter("bias"), -3.0)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        features = self.body((images.float() - 128) / 64)
        return self.heat(features), self.box(features)


def targets(boxes: Tensor, labels: Tensor, shape: torch.Size) -> tuple[Tensor, Tensor, Tensor]:
    """What the head should say.

    Args:
        boxes: float32 [T, 5], picture number in the batch and xyxy pixels, as `collate_indexed` makes them.
        labels: int64 [T].
        shape: of the heat map, [B, C, h, w].

    Returns:
        heat float32 [B, C, h, w] with a Gaussian at each box centre; `where` int64 [T, 3] (picture, row, column) of the centres' cells;
        values float32 [T, 4] (dx, dy, log w, log h).
    """
    device = boxes.device
    heat = torch.zeros(shape, device=device)
    picture = boxes[:, 0].long()
    corners = boxes[:, 1:] / STRIDE
    centre, size = (corners[:, :2] + corners[:, 2:]) / 2, corners[:, 2:] - corners[:, :2]
    limit = torch.tensor([shape[3] - 1, shape[2] - 1], device=device)
    cell = torch.minimum(centre.floor().long(), limit)
    y, x = torch.arange(shape[2], device=device), torch.arange(shape[3], device=device)
    for i, (column, row) in enumerate(cell.tolist()):
        spread = 2 * (size[i] / 6).clamp(min=0.5) ** 2
        peak = torch.exp(-((y - row) ** 2) / spread[1])[:, None] * torch.exp(-((x - column) ** 2) / spread[0])
        target = heat[picture[i], labels[i]]
        torch.maximum(target, peak, out=target)
    where = torch.stack([picture, cell[:, 1], cell[:, 0]], dim=1)
    return heat, where, torch.cat([centre - cell, size.clamp(min=1 / STRIDE).log()], dim=1)


def detection_loss(heat: Tensor, box: Tensor, boxes: Tensor, labels: Tensor) -> Tensor:
    """Focal loss on the heat map and L1 on the box values at the centres, per box. A batch without boxes is fine."""
    wanted, where, values = targets(boxes, labels, heat.shape)
    score = heat.sigmoid()
    positive = wanted == 1
    near = (1 - score) ** 2 * F.logsigmoid(heat)
    far = (1 - wanted) ** 4 * score**2 * F.logsigmoid(-heat)
    focal = -torch.where(positive, near, far).sum()
    told = box[where[:, 0], :, where[:, 1], where[:, 2]]
    return (focal + 0.5 * F.l1_loss(told, values, reduction="sum")) / max(1, len(labels))


def train(data: Path, epochs: int, batch_size: int, max_steps: int | None = None) -> list[float]:
    """Train on the train split and print each epoch's mean loss and rate; returns the loss of every step.

    Raises:
        ValueError: the data has no boxes, or makes no batches.
        SampleError: a sample is damaged.
    """
    torch.manual_seed(0)
    dataset = open_packed(data, "train")
    if dataset.task != "detection":
        raise ValueError(f"{data}: the task is {dataset.task}, and this trains on boxes: pack a source with boxes (VOC, or a CSV of them)")
    model = Detector(len(dataset.classes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses: list[float] = []
    with BatchLoader(dataset, batch_size=batch_size, shuffle=True, seed=0, collate=collate_indexed) as batches:
        print(f"{data}: {len(dataset)} samples, {len(batches)} batches of {batch_size}, classes {', '.join(dataset.classes)}")
        for epoch in range(epochs):
            first, start = len(losses), time.perf_counter()
            for batch in batches:
                heat, box = model(batch["image"])
                loss = detection_loss(heat, box, batch["boxes"], batch["labels"])
                optimizer.zero_grad()
                torch.autograd.backward(loss)
                optimizer.step()
                losses.append(loss.item())
                if max_steps and len(losses) >= max_steps:
                    break
            steps, spent = len(losses) - first, time.perf_counter() - start
            rate = steps * batch_size / spent
            print(f"epoch {epoch}: loss {sum(losses[first:]) / steps:.3f}, {steps} steps, {rate:.0f} samples/s")
            if max_steps and len(losses) >= max_steps:
                break
    return losses


def main() -> int:
    parser = argparse.ArgumentParser(description="Train a small detector on packed data.")
    parser.add_argument("--data", type=Path, required=True, help="packed data set (pictures of one size)")
    parser.add_argument("--epochs", type=int, default=6, help="passes over the train split (default %(default)s)")
    parser.add_argument("--batch-size", type=int, default=4, help="samples a step (default %(default)s)")
    parser.add_argument("--max-steps", type=int, default=None, help="stop after this many steps")
    args = parser.parse_args()
    try:
        losses = train(args.data, args.epochs, args.batch_size, args.max_steps)
    except (FormatError, SampleError, ValueError) as e:
        print(f"train_detection: {e}", file=sys.stderr)
        return 1
    print(f"loss of the first step {losses[0]:.3f}, of the last {losses[-1]:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
