"""Pictures that look like an earlier one: neighbours among perceptual hashes, in bounded memory, and what is said of them.

The search is exact up to one rule that keeps a film of one scene, or one picture saved 50,000 times, from taking quadratic time: a picture
within `COVER` bits of an earlier one of its split and label stands behind that one, and later pictures are not compared with it. So
whatever is within ``RADIUS - COVER`` bits of an earlier picture is found, as is that this one is in another split or has another label, and
what is reported is within `RADIUS` of the picture that is named.

Candidates come from multi-index hashing: of two hashes that differ in at most `RADIUS` bits, one of the `_BANDS` parts differs in at
most one bit. Where hashes are so alike that this sorts out little, all are compared, by matrix product.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from packer.perceptual import HASH_BYTES
from packer.sample import Finding, Listing

# On nine of ten copies (half size, JPEG quality 50, WebP 60, brighter by a tenth) or more, on other pictures of the same set hardly ever.
RADIUS = 15
COVER = 4
NUM_BITS = HASH_BYTES * 8
_BANDS = (RADIUS + 1) // 2
_BLOCK = 2048
# Of pairs looked at in one step: about 40 MB.
_CHUNK = 1 << 20
# A product of two rows of signs costs about this share of looking at a candidate pair.
_DENSE_SHARE = 8
_ONES = np.array([i.bit_count() for i in range(1 << 16)], np.uint8)

Ints = NDArray[np.int64]
_NONE = np.iinfo(np.int64).max
_ENOUGH = NUM_BITS - 2 * RADIUS


@dataclass(frozen=True, slots=True)
class Nearest:
    """For each picture the nearest earlier one that is within `RADIUS` bits of it, among those that stand behind no other: of any kind, in
    another split, of another label.

    int64 [N] each; a value is ``distance << 40 | position``, the largest int64 where there is none. The same bytes count for nothing.
    """

    any: Ints
    other_split: Ints
    other_label: Ints


def near_duplicate_findings(
    listing: Listing, split_of: Sequence[str | None], digests: NDArray[np.uint8], hashes: NDArray[np.uint8]
) -> Iterator[Finding]:
    """One or two warnings for each picture that looks like an earlier one.

    `split_of` and `digests` as in `remarks.duplicate_findings`; `hashes` uint8 [N, HASH_BYTES], zeros: none. Pictures of the same bytes
    are left to that function. Labels are compared in classification only: boxes of a resized copy differ in any case.
    """
    usable = hashes.any(1) & digests[:, 1].any(1) & np.array([split is not None for split in split_of], bool)
    _, contents = np.unique(digests[:, 0].copy().view(f"V{digests.shape[2]}").ravel(), return_inverse=True)
    splits = _numbers(split_of)
    keys = np.flatnonzero(usable)
    keys = keys[_firsts(contents[keys], splits[keys])]  # of those only: the first of some bytes may be one that is left out
    labels = _numbers([item.label if listing.task == "classification" else None for item in listing.items])
    found = nearest_earlier(hashes[keys], contents[keys], splits[keys], labels[keys])
    for i, key in enumerate(keys.tolist()):
        item = listing.items[key]

        def like(value: int) -> tuple[int, str]:
            other = int(keys[value & ((1 << 40) - 1)])
            return other, f"looks like {listing.items[other].path} (a perceptual hash differs in {value >> 40} of {NUM_BITS} bits)"

        across, label, near = int(found.other_split[i]), int(found.other_label[i]), int(found.any[i])
        if across != _NONE:
            other, text = like(across)
            text += f", which is in {split_of[other]}; this one is in {split_of[key]}: probably a leak between splits"
            yield Finding("warning", "near-duplicate-across-splits", item.path, text, sample=item.path)
        if label != _NONE:
            other, text = like(label)
            text += f", which has label {listing.items[other].label!r}; this one has {item.label!r}"
            yield Finding("warning", "near-duplicate-other-label", item.path, text, sample=item.path)
        if near != _NONE and across == label == _NONE:
            yield Finding("warning", "near-duplicate", item.path, like(near)[1], sample=item.path)


def _numbers(names: Sequence[str | None]) -> Ints:
    """A number for each name, equal for equal names."""
    known: dict[str | None, int] = {}
    return np.array([known.setdefault(name, len(known)) for name in names], np.int64)


def _firsts(contents: NDArray[np.int64], splits: Ints) -> NDArray[np.bool_]:
    """Which pictures are the first of their bytes in their split."""
    _, first = np.unique(np.stack([contents.ravel(), splits], 1), axis=0, return_index=True)
    chosen = np.zeros(len(splits), bool)
    chosen[first] = True
    return chosen


def nearest_earlier(hashes: NDArray[np.uint8], contents: Ints, splits: Ints, labels: Ints) -> Nearest:
    """Compare each picture with the earlier ones that stand behind no other.

    `hashes` uint8 [N, HASH_BYTES]; `contents`, `splits`, `labels` int64 [N]: equal numbers for equal bytes, splits, labels.
    """
    search = _Search(hashes, contents, splits, labels)
    for start in range(0, len(hashes), _BLOCK):
        search.block(start, min(start + _BLOCK, len(hashes)))
    return Nearest(search.any, search.other_split, search.other_label)


class _Search:
    """`kept`: positions, ascending, of the pictures that stand behind no other; `_words` uint16 [N, 9], `_keys` int64 [N, _BANDS]."""

    def __init__(self, hashes: NDArray[np.uint8], contents: Ints, splits: Ints, labels: Ints) -> None:
        self._contents, self._splits, self._labels = contents, splits, labels
        self._hashes = hashes
        self._words = np.ascontiguousarray(hashes).view(np.uint16)
        self._keys = _band_keys(hashes)
        self._kept: Ints = np.zeros(0, np.int64)
        self._covered = np.zeros(len(hashes), bool)
        self.any, self.other_split, self.other_label = (np.full(len(hashes), _NONE) for _ in range(3))

    def block(self, start: int, stop: int) -> None:
        for a, b, distance in self._older_pairs(np.arange(start, stop)):
            self._note(a, b, distance)
        agreement = _agreement(self._hashes[start:stop], self._hashes[start:stop])
        kept = []
        for i in range(stop - start):
            if self._covered[start + i]:
                continue
            kept.append(start + i)
            later = i + 1 + np.flatnonzero(agreement[i, i + 1 :] >= _ENOUGH)
            if len(later):
                self._note(start + later, np.full(len(later), start + i), _distance(agreement[i, later]))
        self._kept = np.concatenate([self._kept, np.array(kept, np.int64)])

    def _note(self, a: Ints, b: Ints, distance: Ints) -> None:
        """`b`, kept, lies before `a` and at most `RADIUS` away."""
        same_split, same_label = self._splits[a] == self._splits[b], self._labels[a] == self._labels[b]
        self._covered[a[same_split & same_label & (distance <= COVER)]] = True
        other = self._contents[a] != self._contents[b]
        value = distance << 40 | b
        for best, chosen in (
            (self.any, other),
            (self.other_split, other & ~same_split),
            (self.other_label, other & ~same_label),
        ):
            np.minimum.at(best, a[chosen], value[chosen])

    def _older_pairs(self, block: Ints) -> Iterator[tuple[Ints, Ints, Ints]]:
        """(position in the block, kept position, distance) of pairs within `RADIUS`, in pieces; a pair may come more than once."""
        ranges = list(self._candidates(block)) if len(self._kept) else []
        num_candidates = sum(int(count.sum()) for _, _, _, count in ranges)
        if num_candidates * _DENSE_SHARE > len(block) * len(self._kept):
            step = max(_CHUNK // len(block), 1)
            for start in range(0, len(self._kept), step):
                kept = self._kept[start : start + step]
                agreement = _agreement(self._hashes[block], self._hashes[kept])
                i, j = np.nonzero(agreement >= _ENOUGH)
                yield block[i], kept[j], _distance(agreement[i, j])
            return
        for order, a, first, count in ranges:
            for i, j in _expand(first, count):
                left, right = a[i], self._kept[order[j]]
                distance = _ONES[self._words[left] ^ self._words[right]].sum(1, dtype=np.int64)
                near = distance <= RADIUS
                yield left[near], right[near], distance[near]

    def _candidates(self, block: Ints) -> Iterator[tuple[Ints, Ints, Ints, Ints]]:
        """Per band: the kept in order of their key, and for each picture and key that it looks for the range there (first, count)."""
        for band in range(_BANDS):
            keys = self._keys[self._kept, band]
            order = np.argsort(keys, kind="stable")
            keys = keys[order]
            flips = np.concatenate([[0], 1 << np.arange(len(range(band, NUM_BITS, _BANDS)))])
            wanted = (self._keys[block, band][:, None] ^ flips).ravel()
            first = np.searchsorted(keys, wanted, "left")
            count = np.searchsorted(keys, wanted, "right") - first
            hit = np.flatnonzero(count)
            yield order, block[hit // len(flips)], first[hit], count[hit]


def _band_keys(hashes: NDArray[np.uint8]) -> Ints:
    """int64 [N, _BANDS]: every `_BANDS`-th bit, so that each band has of all frequencies."""
    bits = np.unpackbits(hashes, axis=1)
    keys = np.zeros((len(hashes), _BANDS), np.int64)
    for band in range(_BANDS):
        for place, bit in enumerate(range(band, NUM_BITS, _BANDS)):
            keys[:, band] |= bits[:, bit].astype(np.int64) << place
    return keys


def _agreement(a: NDArray[np.uint8], b: NDArray[np.uint8]) -> NDArray[np.float32]:
    """float32 [len(a), len(b)]: equal bits less unequal ones, exactly: whole numbers this small are held exactly."""
    left, right = (np.unpackbits(x, axis=1).astype(np.float32) * 2 - 1 for x in (a, b))
    return left @ right.T


def _distance(agreement: NDArray[np.float32]) -> Ints:
    """How many bits differ."""
    return ((NUM_BITS - agreement) / 2).astype(np.int64)


def _expand(first: Ints, count: Ints) -> Iterator[tuple[Ints, Ints]]:
    """Of ranges [first, first + count): (number of the range, each of its positions), in pieces of about `_CHUNK`."""
    ends = np.cumsum(count)
    start = 0
    while start < len(count):
        before = ends[start] - count[start]
        stop = max(int(np.searchsorted(ends, before + _CHUNK, "right")), start + 1)
        number = np.repeat(np.arange(start, stop), count[start:stop])
        yield number, first[number] + np.arange(len(number)) - (ends[number] - count[number] - before)
        start = stop
