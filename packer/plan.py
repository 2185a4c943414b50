"""From a source listing to shard jobs: which sample goes into which split, in which order, into which shard.

A pure function of the listing, the recipe and, for images that are encoded anew, the mean size of a few of them.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from loaders.format import Layout
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


def default_shard_bytes(total_bytes: float, layout: Layout) -> int:
    """Target size of a shard where none is asked for: 256 MB, but a small set is cut into about 32, so that several workers and
    ranks have something to share, as long as a shard stays large enough to be read well (8 MB of encoded images, 64 MB of pixels).
    """
    least = 8_000_000 if layout == "tar" else 64_000_000
    return int(min(max(total_bytes / 32, least), 256_000_000))


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

    The stratum of a group is the rarest class in it (of all its samples), so that rare classes are shared out first. Each split gets
    its share of each stratum within less than one sample, and what rounding leaves goes where the whole lacks most. Within a stratum,
    groups come in an order drawn from `seed`; one too large for what any split still lacks goes where the whole lacks most.
    """
    strata = _strata(items, classes_of, group)
    whole = sum(shares.values())
    shares = {name: share / whole for name, share in shares.items()}
    result: list[str | None] = [None] * len(items)
    total = dict.fromkeys(shares, 0)
    done = 0
    for rank, stratum in enumerate(strata):
        size = sum(map(len, stratum))
        done += size
        lacking = {name: round(share * done, 9) - total[name] for name, share in shares.items()}
        need = _shared_out(size, shares, lacking)
        for j in permutation(len(stratum), seed, len(SPLITS) + rank).tolist():
            members = stratum[j]
            fitting = [name for name in shares if need[name] >= len(members)]
            lacks = need if fitting else lacking
            choice = max(fitting or shares, key=lambda name: (lacks[name], shares[name]))
            for counts in (need, lacking):
                counts[choice] -= len(members)
            total[choice] += len(members)
            for i in members:
                result[i] = choice
    return result


def _strata(items: Sequence[Item], classes_of: Sequence[frozenset[str]], group: Callable[[str], str] | None) -> list[list[list[int]]]:
    """Stratum -> group -> positions of items; the stratum of the rarest class first, that of no class last."""
    alive = [i for i, item in enumerate(items) if not item.refused]
    how_often = Counter(name for i in alive for name in classes_of[i])
    groups: dict[str, list[int]] = {}
    for i in alive:
        groups.setdefault(group(items[i].path) if group else items[i].path, []).append(i)
    strata: dict[tuple[float, str], list[list[int]]] = {}
    for members in groups.values():
        present = {name for i in members for name in classes_of[i]}
        strata.setdefault(min(((how_often[c], c) for c in present), default=(math.inf, "")), []).append(members)
    return [strata[key] for key in sorted(strata)]


def _shared_out(size: int, shares: dict[str, float], lacking: dict[str, float]) -> dict[str, float]:
    """Whole numbers that add up to `size`, each the split's share rounded down or up: up where `lacking` is largest."""
    exact = {name: round(share * size, 9) for name, share in shares.items()}
    parts: dict[str, float] = {name: math.floor(value) for name, value in exact.items()}
    up = sorted(shares, key=lambda name: (exact[name] > parts[name], lacking[name] - parts[name], shares[name]), reverse=True)
    for name in up[: size - int(sum(parts.values()))]:
        parts[name] += 1
    return parts


def source_splits(listing: Listing) -> list[str | None]:
    """The splits a source gives, or "train" for everything where it gives none."""
    if not listing.has_splits:
        return [None if item.refused else "train" for item in listing.items]
    strange = {item.split for item in listing.items if not item.refused and item.split is not None} - set(SPLITS)
    if strange:
        raise PackError(f"splits {sorted(map(str, strange))} are not among {', '.join(SPLITS)}")
    # An item without a split is one that an error finding is about: it is looked at like the others.
    return [None if item.refused else item.split or "train" for item in listing.items]
