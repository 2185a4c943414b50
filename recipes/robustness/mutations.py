"""Damage packed data sets in a thousand ways: `pack verify` must name the right file each time, and never accuse a healthy set.

    python recipes/robustness/mutations.py                       # 1,000 mutations, 100 healthy sets: a few minutes
    python recipes/robustness/mutations.py --num 20000 --seed 3

Six sets (both layouts, all tasks, JPEGs with and without a restart grid) are damaged one mutation at a time; see `KINDS` for what is
done. A mutation is found when a problem names the file that was damaged, and no error accuses a file that has nothing to do with it.
Of an edited manifest with a fresh checksum of its own, all that contradicts the data must be found: counts, sizes, checksums, paths,
classes, the task, what is covered. Most runs call the library in this process; every fiftieth is the `pack verify` command.

``README.md`` is free to be edited by design, so that is healthy. Healthy sets vary in layout, task, splits (empty ones too), number of
samples (down to one), classes, boxes (none at all), encodings, dtypes, normalising, shard sizes, names in other scripts.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from damages import (
    copied_over,
    deleted,
    duplicated,
    edited_manifest,
    extra,
    flipped,
    folder_deleted,
    longer,
    renamed,
    shard_duplicated,
    swapped,
    truncated,
    zeroed,
)
from forgeries import forged_manifest
from healthy import healthy
from packed_sets import SETS, Damage, Mutant, pack, problems_by_command, problems_of, sources
from raw_sets import tree

CLI_EVERY = 50
# Kind of damage -> how many parts of the whole.
KINDS: dict[Callable[[Mutant], Damage], int] = {
    flipped: 30,
    truncated: 12,
    longer: 8,
    zeroed: 5,
    deleted: 8,
    folder_deleted: 2,
    duplicated: 4,
    shard_duplicated: 3,
    swapped: 7,
    copied_over: 5,
    extra: 8,
    renamed: 4,
    edited_manifest: 10,
    forged_manifest: 16,
}


def missed(damage: Damage, problems: list[dict[str, Any]]) -> str | None:
    """What is wrong with the verdict, if anything."""
    said = {p["path"] for p in problems}
    for names in damage.named:
        if not said & set(names):
            return f"no problem names {' or '.join(names)}"
    if damage.says.startswith("forged"):
        return None
    # A damaged index is also at odds with the shards of its split, and a shard with its index; nothing else may be accused.
    splits = {name.split("/")[1 if name.startswith("index/") else 0] for names in damage.named for name in names}
    near = tuple(f"{where}{split}" for split in splits for where in ("index/", "")) + tuple(n for names in damage.named for n in names)
    stray = [p["path"] for p in problems if p["level"] == "error" and not p["path"].startswith(near)]
    return f"accuses {stray}" if stray else None


def mutate(folder: Path, num: int, seed: int, cli_every: int = CLI_EVERY) -> tuple[list[str], Counter[str]]:
    """Make the sets below `folder` and damage them `num` times. (What was not found, how often each kind was done)."""
    sources(folder / "src")
    mutants = []
    for name, (source, tables) in SETS.items():
        pack(folder / "src" / source, folder / name, tables)
        mutants.append(Mutant(folder / name, tree(folder / name), random.Random(f"{seed}/{name}")))
    rng, failures, kinds = random.Random(seed), [], Counter[str]()
    for n in range(num):
        m = rng.choice(mutants)
        [kind] = rng.choices(list(KINDS), list(KINDS.values()))
        damage = kind(m)
        kinds[kind.__name__] += 1
        problems = problems_by_command(m.root) if n % cli_every == cli_every - 1 else problems_of(m.root)
        wrong = missed(damage, problems)
        m.put_back()
        if wrong:
            found = [(p["level"], p["code"], p["path"]) for p in problems]
            failures.append(f"mutation {n} of seed {seed}, {m.root.name}: {damage.says}: {wrong}; found: {found}")
    for m in mutants:
        if problems_of(m.root):
            failures.append(f"{m.root.name} was not put back")
    return failures, kinds


def main() -> int:
    parser = argparse.ArgumentParser(description="Damage packed data sets, and look whether pack verify names the damage")
    parser.add_argument("--num", type=int, default=1000, help="mutations")
    parser.add_argument("--healthy", type=int, default=100, help="healthy sets")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mutations-") as temporary:
        failures, kinds = mutate(Path(temporary), args.num, args.seed)
        alarms = healthy(Path(temporary), args.healthy, args.seed)
    print("mutations:", ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in sorted(kinds.items())))
    for line in [*failures, *alarms]:
        print(line)
    print(f"{args.num - len(failures):,} of {args.num:,} found, {len(alarms):,} false alarms on {args.healthy:,} healthy sets")
    return 1 if failures or alarms else 0


if __name__ == "__main__":
    sys.exit(main())
