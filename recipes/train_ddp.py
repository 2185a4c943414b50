"""Train on several processes, be killed, go on where it was, and evaluate exactly.

    torchrun --standalone --nproc-per-node 2 recipes/train_ddp.py --data cifar10-packed/memmap --checkpoint run.pt --epochs 3
    torchrun --standalone --nproc-per-node 3 recipes/train_ddp.py --data cifar10-packed/memmap --checkpoint run.pt --epochs 0

The second command only evaluates, by another number of processes. The backend is nccl with CUDA, else gloo.

What makes a resumed run see what an uninterrupted one would have seen: a `BatchLoader`'s order is a function of (seed, epoch, rank); its
state, equal on all ranks, goes into the checkpoint with model and optimizer; `DevicePrefetcher` gives the state of the batch that was used
last, not of those made ahead; the augmentation is a function of (seed, epoch, index). A checkpoint is written beside the old one, then
renamed, so that a kill leaves one of the two. Every rank has the same number of batches, so none waits for another at the end of an epoch.

The test set is padded to whole batches, and `valid` leaves the padding out: each sample is counted once over all ranks.

Result of both commands (the second by 3 and by 1 process), 10,000 and 2,000 of CIFAR-10's pictures, gloo, on a virtual machine with 2
cores (AMD EPYC); Python 3.11.7, torch 2.13.0+cpu: steps 0 to 234, 674 of 2000 right, 33.7 %, by 2, 3 and 1 processes alike. Killed and
resumed, the samples of each step and the last parameters are those of an uninterrupted run, bit for bit: `tests/test_training_recipes.py`
does that with 2 processes. Not run with nccl.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from demo import open_packed
from loaders.batch_transforms import Flip, Normalize, Shift
from loaders.batch_transforms import Sequence as Transforms
from loaders.batches import BatchLoader
from loaders.device import DevicePrefetcher
from loaders.faults import SampleError
from loaders.format import FormatError, read_manifest

MEAN, STD = (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)


def network(num_classes: int, width: int = 16) -> nn.Module:
    """Images float [B, 3, H, W] -> logits [B, num_classes]. No batch normalisation: it would tie the ranks' samples together."""
    layers: list[nn.Module] = []
    for before, after in ((3, width), (width, 2 * width)):
        layers += [nn.Conv2d(before, after, 3, 2, 1), nn.GroupNorm(4, after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, num_classes))


class Log:
    """JSON lines of what this rank saw, one file a rank; without a folder, nothing."""

    def __init__(self, folder: Path | None) -> None:
        self._file = None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = (folder / f"rank-{dist.get_rank()}.jsonl").open("a", encoding="utf-8")

    def write(self, **line: Any) -> None:
        if self._file is not None:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()


class Run:
    """Model, optimizer, batches and the number of steps done: what a checkpoint holds."""

    def __init__(self, data: Path, checkpoint: Path, batch_size: int, device: torch.device) -> None:
        torch.manual_seed(0)
        ds = open_packed(data, "train")
        if ds.task != "classification":
            raise ValueError(f"{data}: the task is {ds.task}, and this trains on labels: pack class folders, or a CSV of labels")
        self.checkpoint, self.device, self.step = checkpoint, device, 0
        self.model = network(len(ds.classes)).to(device)
        self.parallel = DistributedDataParallel(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        augment = Transforms(Flip(), Shift(2), Normalize(MEAN, STD))
        self.batches = BatchLoader(ds, batch_size, shuffle=True, seed=0, batch_transform=augment)
        self.prefetcher = DevicePrefetcher(self.batches, device)

    def save(self) -> None:
        """By rank 0; whole or not at all."""
        if dist.get_rank() != 0:
            return
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "loader": self.prefetcher.state_dict(),
            "step": self.step,
        }
        beside = self.checkpoint.with_name(self.checkpoint.name + ".new")
        with beside.open("wb") as f:
            torch.save(state, f)
            f.flush()
            os.fsync(f.fileno())
        beside.replace(self.checkpoint)

    def load(self) -> None:
        """Go on from the checkpoint, where there is one."""
        if not self.checkpoint.exists():
            return
        state = torch.load(self.checkpoint, map_location=self.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.prefetcher.load_state_dict(state["loader"])
        self.step = state["step"]

    @property
    def epoch(self) -> int:
        """The current one, 0-based."""
        return int(self.prefetcher.state_dict()["epoch"])

    def train(self, epochs: int, every: int, max_steps: int | None, log: Log) -> None:
        """Until `epochs` are done, or `max_steps`; a checkpoint after each `every` steps and at the end."""
        began = self.step
        while self.epoch < epochs and not self._enough(max_steps):
            for batch in self.prefetcher:
                loss = F.cross_entropy(self.parallel(batch["image"]), batch["label"])
                self.optimizer.zero_grad()
                torch.autograd.backward(loss)
                self.optimizer.step()
                self.step += 1
                log.write(step=self.step, index=batch["index"].tolist())
                if self.step % every == 0:
                    self.save()
                if self._enough(max_steps):
                    break
        if self.step > began:
            self.save()

    def _enough(self, max_steps: int | None) -> bool:
        return max_steps is not None and self.step >= max_steps

    def digest(self) -> str:
        """Of all parameters: equal digests, equal models."""
        values = b"".join(p.detach().cpu().numpy().tobytes() for p in self.model.parameters())
        return hashlib.sha256(values).hexdigest()[:16]


@torch.inference_mode()
def evaluate(run: Run, data: Path, split: str, batch_size: int, log: Log) -> tuple[int, int]:
    """Right answers and samples of a split, over all ranks; each sample once."""
    counts = torch.zeros(2, dtype=torch.int64, device=run.device)
    normalize = Normalize(MEAN, STD)
    with BatchLoader(open_packed(data, split), batch_size, shuffle=False, remainder="pad", batch_transform=normalize) as batches:
        for batch in DevicePrefetcher(batches, run.device):
            found, valid = run.model(batch["image"]).argmax(1), batch["valid"]
            counts += torch.stack([((found == batch["label"]) & valid).sum(), valid.sum()])
            log.write(evaluated=batch["index"][valid].tolist())
    dist.all_reduce(counts)
    right, total = counts.tolist()
    return right, total


def work(options: argparse.Namespace) -> None:
    """What each rank does."""
    device = torch.device("cpu")
    if options.device == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    splits = sorted(read_manifest(options.data).splits)
    held_out = next((name for name in ("test", "val") if name in splits), "train")
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=options.init_method,
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    try:
        log = Log(options.seen)
        run = Run(options.data, options.checkpoint, options.batch_size, device)
        run.load()
        began = run.step
        run.train(options.epochs, options.every, options.max_steps, log)
        right, total = evaluate(run, options.data, held_out, options.batch_size, log)
        if dist.get_rank() == 0:
            print(f"steps {began} to {run.step}, {dist.get_world_size()} ranks, parameters {run.digest()}")
            print(f"{held_out}: {right} of {total} right, {right / total:.1%}")
    finally:
        dist.destroy_process_group()


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Distributed training that can be killed. Start it with torchrun.")
    parser.add_argument("--data", type=Path, required=True, help="packed classification data set, pictures of one size")
    parser.add_argument("--checkpoint", type=Path, required=True, help="file that is written, and gone on from where it exists")
    parser.add_argument("--epochs", type=int, default=3, help="in all; 0: only evaluate (default %(default)s)")
    parser.add_argument("--max-steps", type=int, default=None, help="stop after this many steps in all")
    parser.add_argument("--every", type=int, default=50, help="steps between checkpoints (default %(default)s)")
    parser.add_argument("--batch-size", type=int, default=64, help="samples a step and rank (default %(default)s)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seen", type=Path, default=None, help="folder for JSON lines of the indices that each rank saw")
    parser.add_argument("--init-method", default="env://", help="where the ranks meet; torchrun sets it up (default %(default)s)")
    return parser.parse_args(arguments)


def main() -> int:
    options = parse()
    lacking = [name for name in ("RANK", "WORLD_SIZE") if name not in os.environ]
    if lacking:
        print(f"train_ddp: {' and '.join(lacking)} not set: start it with torchrun, see `torchrun --help`", file=sys.stderr)
        return 2
    try:
        work(options)
    except (FormatError, SampleError, ValueError) as e:
        print(f"train_ddp: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
