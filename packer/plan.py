"""From a source listing to shard jobs: which sample goes into which split, in which order, into which shard.

A pure function of the listing, the recipe and, for images that are encoded anew, the mean size of a few of them.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from loaders.sampling import permutation
from packer.job import Job
from packer.sample import Item, Listing, PackError

SPLITS = ("train", "val", "test")
NUM_SURVEYED = 32
SAMPLE_OVERHEAD_BYTES = 2560
"""Headers, padding and JSON of a tar sample, about."""


@dataclass(frozen=True, slots=True)
class Sizing:
    """How many samples make a shard: `num_samples` when that is fixed, else as many as fit into `num_bytes` by their source size."""

    num_bytes: int
    num_samples: int | None = None


def samples_per_shard(shard_bytes: int, mean_bytes: float) -> int:
    """1, 2 or 5 times a power of ten, nearest (as a ratio) to what fits: small changes of the mean leave it as it is."""
    ideal = max(shard_bytes / max(mean_bytes, 1.0), 1.0)
    exponent = math.floor(math.log10(ideal))
    choices = [m * 10**e for e in (exponent, exponent + 1) for m in (1, 2, 5)]
    nearest: int = min(choices, key=lambda c: abs(math.log(c / ideal)))
    return nearest


def surveyed(items: Sequence[Item]) -> list[int]:
    """Positions of up to 32 evenly spaced items that are not refused."""
    alive = [i for i, item in enumerate(items) if not item.refused]
    step = max(len(alive) / NUM_SURVEYED, 1.0)
    return [alive[int(i * step)] for i in range(min(NUM_SURVEYED, len(alive)))]


def make_jobs(listing: Listing, splits: Sequence[str | None], *, sizing: Sizing, shuffle: bool, seed: int) -> list[Job]:
    """Cut every split into jobs. `splits[i]` is the split of item i, None for a refused one. Splits come as train, val, test."""
    jobs: list[Job] = []
    for rank, split in enumerate(SPLITS):
        members = [i for i, s in enumerate(splits) if s == split and not listing.items[i].refused]
        if shuffle:
            members = [members[j] for j in permutation(len(members), seed, rank).tolist()]
        for keys in _cut(members, listing.items, sizing):
            jobs.append(Job(len(jobs), split, tuple(keys), tuple(listing.items[k] for k in keys)))
    return jobs


def _cut(members: list[int], items: Sequence[Item], sizing: Sizing) -> Iterable[list[int]]:
    if sizing.num_samples is not None:
        yield from (members[i : i + sizing.num_samples] for i in range(0, len(members), sizing.num_samples))
        return
    shard: list[int] = []
    filled = 0
    for key in members:
        size = items[key].num_bytes + SAMPLE_OVERHEAD_BYTES
        if shard and filled + size > sizing.num_bytes:
            yield shard
            shard, filled = [], 0
        shard.append(key)
        filled += size
    if shard:
        yield shard


def group_of(pattern: str) -> Callable[[str], str]:
    """The group of a path: the pattern's first group, or the whole match. A path without a match is a group of its own."""
    compiled = re.compile(pattern)

    def group(path: str) -> str:
        match = compiled.search(path)
        if match is None:
            return path
        return (match[1] if compiled.groups else match[0]) or path

    return group


def assign_splits(
    items: Sequence[Item], classes_of: Sequence[frozenset[str]], shares: dict[str, float], seed: int, group: Callable[[str], str] | None
) -> list[str | None]:
    """Give every item that is not refused a split, stratified by class, groups kept whole; None for the refused ones.

    The stratum of a group is the rarest class in it (of all its samples), so that rare classes are shared out first. Within a stratum
    groups come in an order drawn from `seed`; each goes where its stratum, and then the whole, lacks most.
    """
    alive = [i for i, item in enumerate(items) if not item.refused]
    how_often = Counter(name for i in alive for name in classes_of[i])
    groups: dict[str, list[int]] = {}
    for i in alive:
        groups.setdefault(group(items[i].path) if group else items[i].path, []).append(i)
    strata: dict[str, list[list[int]]] = {}
    for members in groups.values():
        present = {name for i in members for name in classes_of[i]}
        strata.setdefault(min(present, key=lambda c: (how_often[c], c), default=""), []).append(members)
    result: list[str | None] = [None] * len(items)
    names = list(shares)
    total = dict.fromkeys(names, 0)
    done = 0
    for rank, name in enumerate(sorted(strata, key=lambda s: (how_often[s] if s else len(items) + 1, s))):
        stratum = strata[name]
        got = dict.fromkeys(names, 0)
        seen = 0
        for j in permutation(len(stratum), seed, len(SPLITS) + rank).tolist():
            members = stratum[j]
            seen, done = seen + len(members), done + len(members)
            # Compared exactly in units of one sample: what the split should have by now, less what it has.
            choice = max(names, key=lambda s: (round(shares[s] * seen - got[s], 9), round(shares[s] * done - total[s], 9), shares[s]))
            got[choice] += len(members)
            total[choice] += len(members)
            for i in members:
                result[i] = choice
    return result


def source_splits(listing: Listing) -> list[str | None]:
    """The splits a source gives, or "train" for everything where it gives none."""
    if not listing.has_splits:
        return [None if item.refused else "train" for item in listing.items]
    strange = {item.split for item in listing.items if not item.refused} - set(SPLITS)
    if strange:
        raise PackError(f"splits {sorted(map(str, strange))} are not among {', '.join(SPLITS)}")
    return [None if item.refused else item.split for item in listing.items]
