"""One process of `large_sets`: prints one JSON object.

python large_sets_probe.py open ROOT LAYOUT
python large_sets_probe.py epochs ROOT LAYOUT NUM THREADS
"""

from __future__ import annotations

import json
import sys
import time
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

from loaders.batches import BatchLoader
from loaders.memmap import MemmapDataset
from loaders.shards import ShardDataset


def memory_mb(files: bool) -> float:
    """MB (10^6 bytes) that the process has in memory, with or without pages of files."""
    text = Path("/proc/self/smaps_rollup").read_text("ascii")
    kinds = ("Rss:",) if files else ("Pss_Anon:", "Pss_Shmem:")
    return sum(int(line.split()[1]) for line in text.splitlines() if line.startswith(kinds)) * 1024 / 1e6


def pickled_bytes(ds: ShardDataset | MemmapDataset) -> int:
    """The size of the data set as a spawned DataLoader worker would get it."""
    return len(ForkingPickler.dumps(ds))


def open_set(root: str, layout: str) -> dict[str, float]:
    before, before_own, start = memory_mb(True), memory_mb(False), time.perf_counter()
    ds = ShardDataset(root) if layout == "tar" else MemmapDataset(root)
    with BatchLoader(ds, batch_size=256) as batches:
        batch = next(iter(batches))
        seconds = time.perf_counter() - start
        above, own = memory_mb(True) - before, memory_mb(False) - before_own
    assert batch["image"].shape == (256, 3, 8, 8)
    return {"seconds": seconds, "mb": above, "own_mb": own, "pickled_kb": pickled_bytes(ds) / 1000}


def epochs(root: str, layout: str, num: int, threads: int) -> dict[str, float]:
    ds = ShardDataset(root) if layout == "tar" else MemmapDataset(root)
    after: list[float] = []
    with BatchLoader(ds, batch_size=512, workers=threads) as batches:
        for _ in range(num):
            for _batch in batches:
                pass
            after.append(memory_mb(False))
    return {"third_mb": after[2], "last_mb": after[-1]}


def main() -> None:
    verb, root, layout, *more = sys.argv[1:]
    print(json.dumps(open_set(root, layout) if verb == "open" else epochs(root, layout, *map(int, more))))


if __name__ == "__main__":
    main()
