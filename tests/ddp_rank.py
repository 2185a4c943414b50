"""One rank of test_ddp.py: python ddp_rank.py FOLDER RANK. Reads in real process groups of 4, 3, 2 and 1 ranks, and notes what it got.

An all_reduce follows every batch: a rank that has one more than the others waits for them until the group's time-out, and fails.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from loaders.batches import BatchLoader
from loaders.collate import collate_list
from loaders.memmap import MemmapDataset
from loaders.samplers import PackedBatchSampler
from loaders.shards import ShardDataset, ShardStream

SETS = ("uneven", "one", "few")
BATCH = 3
STOP = 1  # batches before the interruption


def main(folder: Path, rank: int) -> None:
    got: dict[str, Any] = {}
    for world_size in (4, 3, 2, 1):
        if rank < world_size:
            meeting = f"file://{folder / f'meeting-{world_size}'}"
            dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
            got[str(world_size)] = all_sets(folder)
            if world_size == 4:
                got["interrupted"] = interrupted(folder)
            if world_size == 3:
                got["resumed"] = resumed(folder)
            dist.destroy_process_group()
    (folder / f"rank-{rank}.json").write_text(json.dumps(got))


def all_sets(folder: Path) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name in SETS:
        data = MemmapDataset(folder / name) if name == "one" else ShardDataset(folder / name)
        sampler = PackedBatchSampler(data, BATCH, remainder="pad")
        runs = {
            "pad": BatchLoader(data, BATCH, workers=1, remainder="pad"),
            "weights": BatchLoader(data, BATCH, workers=1, remainder="pad", weights="balanced"),
            "sampler": DataLoader(data, batch_sampler=sampler, collate_fn=collate_list),
        }
        if len(data) >= BATCH * dist.get_world_size():
            runs["drop"] = BatchLoader(data, BATCH, workers=1)
        if name != "one":
            runs["stream pad"] = stream(folder / name, "pad")
            if len(data) >= dist.get_world_size():
                runs["stream drop"] = stream(folder / name, "drop")
        result[name] = {kind: in_step(batches, sampler if kind == "sampler" else None) for kind, batches in runs.items()}
    return result


def stream(root: Path, remainder: Any) -> DataLoader[Any]:
    return DataLoader(ShardStream(root, shuffle=4, remainder=remainder), batch_size=BATCH, collate_fn=collate_list)


def in_step(batches: Iterable[dict[str, Any]], sampler: PackedBatchSampler | None = None) -> list[list[int]]:
    """Indices of the valid rows, by batch; every batch is met by one of each other rank."""
    result = []
    for number, batch in enumerate(batches):
        valid = batch.get("valid")
        if sampler is not None:
            valid = sampler.valid(number)
        index = torch.as_tensor(batch["index"])
        result.append((index if valid is None else index[torch.as_tensor(valid)]).tolist())
        meet(number)
    meet(-1 - len(result))  # the end: a rank that is here alone finds another number
    return result


def meet(number: int) -> None:
    total = torch.tensor([number])
    dist.all_reduce(total)
    if int(total) != number * dist.get_world_size():
        raise AssertionError(f"rank {dist.get_rank()} is at {number}, the ranks together at {int(total)}")


def interrupted(folder: Path) -> dict[str, Any]:
    loader = BatchLoader(ShardDataset(folder / "uneven"), 2, workers=2, seed=5)
    got = []
    for number, batch in zip(range(STOP), loader, strict=False):
        got += batch["index"].tolist()
        meet(number)
    state = loader.state_dict()
    if dist.get_rank() == 0:
        (folder / "state.json").write_text(json.dumps(state))
    dist.barrier()
    return {"got": got, "state": state}


def resumed(folder: Path) -> list[list[int]]:
    loader = BatchLoader(ShardDataset(folder / "uneven"), 3, workers=1, remainder="pad")
    loader.load_state_dict(json.loads((folder / "state.json").read_text()))
    return in_step(loader)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
