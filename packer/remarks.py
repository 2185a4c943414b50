"""What only the whole data set can tell: copies across splits, a wrong declared origin, dark 16-bit pictures, mixed formats."""

from __future__ import annotations

import filecmp
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from packer.job import Remarks, Spec, sizes_differ
from packer.sample import Finding, Item, Listing, Source
from packer.sources.tree import File, change_of

DARK_16BIT = 4096


def changed_tables(root: Path, listing: Listing) -> Iterator[Finding]:
    """Tables and split files that are no longer as they were listed: what was packed is what they said before."""
    for path, (num_bytes, mtime_ns) in listing.tables.items():
        try:
            change = change_of(File(path, num_bytes, mtime_ns), os.stat(root / path))
        except OSError as e:
            change = f"changed while packing: it cannot be looked at now: {e.strerror}; run the command again"
        if change is not None:
            yield Finding("error", "source-changed", path, change)


def duplicate_findings(
    listing: Listing, split_of: Sequence[str | None], digests: NDArray[np.uint8], same_bytes: Callable[[Item, Item], bool]
) -> Iterator[Finding]:
    """Pictures with equal bytes in two splits (a leak), or with two labels or sets of boxes.

    `split_of[i]` is None for an item that is in no split. `digests` uint8 [N, 2, 16], of picture and annotation; zeros: unknown.
    `same_bytes` has the last word on pictures of equal digests.
    """
    for keys in _copies(listing, digests[:, 0], same_bytes):
        first, *others = keys
        a = listing.items[first]
        known = [key for key in keys if digests[key, 1].any()]
        for key in others:
            b = listing.items[key]
            if split_of[key] != split_of[first]:
                text = (
                    f"has the same bytes as {a.path}, which is in {split_of[first]}; this one is in {split_of[key]}: a leak between splits"
                )
                yield Finding("warning", "split-leak", b.path, text, sample=b.path)
            if listing.task != "unlabelled" and key in known and (digests[key, 1] != digests[known[0], 1]).any():
                c = listing.items[known[0]]
                differ = f"label {c.label!r}, this one has {b.label!r}" if listing.task == "classification" else "other boxes"
                yield Finding("warning", "duplicate-image", b.path, f"has the same bytes as {c.path}, which has {differ}", sample=b.path)


def same_files(root: Path) -> Callable[[Item, Item], bool]:
    """Compares two pictures below `root` byte by byte; one that cannot be read now is the same as no other."""

    def same(a: Item, b: Item) -> bool:
        try:
            return filecmp.cmp(root / a.path, root / b.path, shallow=False)
        except OSError:
            return False

    return same


def _copies(listing: Listing, digests: NDArray[np.uint8], same_bytes: Callable[[Item, Item], bool]) -> Iterator[list[int]]:
    """Positions, ascending, of pictures that are the same file twice or more."""
    for keys in _equal_rows(digests):
        sets: list[list[int]] = []
        for key in keys:
            mine = next((s for s in sets if same_bytes(listing.items[s[0]], listing.items[key])), None)
            if mine is None:
                sets.append([key])
            else:
                mine.append(key)
        yield from (s for s in sets if len(s) > 1)


def _equal_rows(rows: NDArray[np.uint8]) -> Iterator[list[int]]:
    """Row numbers, ascending, of each set of two or more equal rows of uint8 [N, 16]; rows of zeros (unknown) are passed over."""
    words = np.ascontiguousarray(rows).view(np.uint64).reshape(-1, 2)
    order = np.lexsort((np.arange(len(words)), words[:, 1], words[:, 0]))
    same = (words[order[1:]] == words[order[:-1]]).all(1) & words[order[1:]].any(1)
    starts = np.flatnonzero(np.diff(np.concatenate([[False], same]).astype(np.int8)) == 1)
    ends = np.flatnonzero(np.diff(np.concatenate([same, [False]]).astype(np.int8)) == -1)
    groups = [order[s : e + 2].tolist() for s, e in zip(starts, ends, strict=True)]
    yield from sorted(groups)


def remark_findings(
    listing: Listing, kind: str, source: Source, spec: Spec, remarks: Remarks, *, classes_given: bool = False
) -> Iterator[Finding]:
    """Warnings about the data set as a whole. `classes_given`: the classes were not taken from the data."""
    if kind == "voc" and source.options.get("origin", 0) == 0 and remarks.lowest == 1 and remarks.num_at_edge:
        yield Finding(
            "warning",
            "origin-mismatch",
            ".",
            f"origin = 0 is declared or taken, yet no box of {len(listing.items):,} pictures starts at 0, the lowest number is 1, and "
            f"{remarks.num_at_edge:,} boxes end at the picture's width or height: 1 to W is the VOC devkit's convention, origin = 1",
        )
    if len(remarks.sizes) > 1:
        yield sizes_differ(remarks.sizes)
    if remarks.num_16bit and remarks.max_16bit < DARK_16BIT and spec.pixel_range is None:
        yield Finding(
            "warning",
            "dark-16bit",
            ".",
            f"the highest value in {remarks.num_16bit:,} 16-bit pictures is {remarks.max_16bit}: divided by 257 they come out near black; "
            f"a detector of fewer bits? say [source] pixel_range = [0, {max(2 ** int(remarks.max_16bit).bit_length() - 1, 1)}]",
        )
    empty = [name for name in spec.classes if name not in remarks.classes] if classes_given else []
    if empty:
        named = ", ".join(map(repr, empty[:20])) + (", ..." if len(empty) > 20 else "")
        how_many = f"{len(empty):,} of the {len(spec.classes):,} classes"
        text = f"no picture of {how_many} of [source] classes was packed: {named}; they keep their ids"
        yield Finding("warning", "empty-class", ".", text)
    if spec.layout == "tar" and len(remarks.parts) > 1:
        parts = ", ".join(f"{n:,} {part}" for part, n in sorted(remarks.parts.items()))
        text = f"images are stored in more than one format ({parts}); some readers want one: --image jpg, png or webp"
        yield Finding("warning", "mixed-image-parts", ".", text)
