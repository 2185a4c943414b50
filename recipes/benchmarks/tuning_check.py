"""Whether `pack bench` recommends a setting as good as the best one that an exhaustive grid finds.

    python recipes/benchmarks/tuning_check.py OUT                  # a packed data set; a few minutes
    python recipes/benchmarks/tuning_check.py OUT --size 224 --seconds 20

The grid holds `BatchLoader` with every number of threads up to twice the cores, and torch's DataLoader with as many processes; it is run
before and after the recommendations, for longer than they take. Each recommendation is looked up there: its rate divided by the best one.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

from loaders.batches import default_workers
from loaders.format import FormatError
from loaders.tuning import KINDS, Setting, race
from packer.bench import bench, open_split
from packer.sample import PackError

WANTED = 0.9


def measured(root: Path, split: str, batch_size: int, size: int | None, seconds: float) -> dict[Setting, list[float]]:
    """Samples per second of every setting of the grid, one number a round."""
    ds, _, _ = open_split(root, split, size)
    settings = [Setting(kind, n, batch_size) for kind in KINDS for n in range(kind == "processes", 2 * default_workers() + 1)]
    speeds, left_out = race(ds, settings, seconds, lambda _: None)
    for setting, why in left_out:
        print(f"left out: {setting}: {why}")
    return {speed.setting: list(speed.rounds) for speed in speeds}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path, help="a packed data set")
    parser.add_argument("--split", default="train")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--size", type=int, help="as of `pack bench`")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each `pack bench`; the grid takes twice that, twice")
    parser.add_argument("--repeat", type=int, default=3, help="recommendations")
    args = parser.parse_args()
    try:
        rates = measured(args.out, args.split, args.batch_size, args.size, 2 * args.seconds)
        found = [
            bench(args.out, args.split, args.batch_size, args.seconds, args.size, lambda _: None).tuning.best for _ in range(args.repeat)
        ]
        for setting, rounds in measured(args.out, args.split, args.batch_size, args.size, 2 * args.seconds).items():
            rates[setting] += rounds
    except (FormatError, PackError, ValueError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    medians = {setting: statistics.median(rounds) for setting, rounds in rates.items()}
    for setting, median in sorted(medians.items(), key=lambda item: -item[1]):
        print(f"{median:12,.0f} samples/s ({min(rates[setting]):,.0f} to {max(rates[setting]):,.0f})  {setting}")
    best = max(medians.values())
    shares = [medians[setting] / best for setting in found]
    for setting, share in zip(found, shares, strict=True):
        print(f"recommended: {setting}: {share:.2f} of the best")
    good = sum(share >= WANTED for share in shares)
    print(f"pack bench: {good} of {len(shares)} within {1 - WANTED:.0%} of the best of {len(medians)} settings")
    return 0 if min(shares) >= WANTED else 1


if __name__ == "__main__":
    sys.exit(main())
