"""Samples drawn by weights, with replacement. Pure arithmetic like `loaders.sampling`; imports numpy only.

    WeightTable(weights)                       the weights, checked, as exact integers
    WeightedOrder(table, seed, epoch)[a:b]     draws a..b of an epoch; a draw depends on (seed, epoch, place) alone
    balanced_weights(ds)                       weights that even out the classes, from the index

An epoch has as many draws as the data set has samples: a sample comes as often as chance has it, some never. The draw at a place is one
64-bit hash, scaled to the sum of the weights and looked up in their running sum. So order does not depend on threads, ranks or batch
size, and any slice of an epoch costs the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sized
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from loaders.sampling import hash_key, hashes

Weights = Literal["balanced"] | ArrayLike
"""What loaders take: "balanced", or one number of 0 or more per sample, [num_samples]."""

WEIGHTED_VERSION = 1
"""Raised when the same weights and seed give other draws than before."""

_DRAWS = -1  # domain label under (seed, epoch), beside those of the block shuffle
_SUM_BITS = 62
_PLACE_SHIFT = 40


class WeightTable:
    """Weights of all samples as a running sum of integers: `sums` uint64 [N], 8 bytes a sample.

    The largest weight becomes about 2**(62 - log2 N); each weight is cut to an integer, and a weight above 0 counts at least 1. The
    steps are exact, so that the table is the same on every platform. `digest`: hex SHA-256 of it.

    Raises:
        ValueError: not one number per sample, or one that is negative, infinite or NaN (its place is named), or all are 0.
    """

    def __init__(self, weights: ArrayLike, num_samples: int) -> None:
        raw = np.asarray(weights)
        if raw.shape != (num_samples,) or raw.dtype.kind not in "buif":
            raise ValueError(f"weights have dtype {raw.dtype} and shape {raw.shape}, expected numbers of shape ({num_samples},)")
        values = raw.astype(np.float64)
        wrong = np.flatnonzero(~(np.isfinite(values) & (values >= 0)))
        if len(wrong):
            raise ValueError(f"weights[{wrong[0]}] is {raw[wrong[0]]}, expected a finite number of 0 or more")
        if not values.any():
            raise ValueError(f"all {num_samples} weights are 0: nothing can be drawn")
        # Powers of two scale exactly: every weight becomes at most 2**bits, the sum at most 2**62.
        bits = _SUM_BITS - num_samples.bit_length()
        whole = np.floor(np.ldexp(values, bits - int(np.frexp(values.max())[1]))).astype(np.uint64)
        whole[(values > 0) & (whole == 0)] = 1
        self.sums: NDArray[np.uint64] = np.cumsum(whole, dtype=np.uint64)
        self.digest = hashlib.sha256(self.sums.astype("<u8").tobytes()).hexdigest()

    def __len__(self) -> int:
        return len(self.sums)


class WeightedOrder:
    """One epoch's draws from 0..num_samples-1, by slices; num_samples of them, with replacement. Thread-safe.

    Args:
        table: the weights.
        seed: any integer, taken modulo 2**64.
        epoch: 0-based.
    """

    def __init__(self, table: WeightTable, seed: int, epoch: int) -> None:
        if epoch < 0:
            raise ValueError(f"epoch is {epoch}, expected 0 or more")
        self.epoch = epoch
        self._sums = table.sums
        self._key = hash_key(seed, epoch, _DRAWS)

    def __len__(self) -> int:
        return len(self._sums)

    def __getitem__(self, part: slice) -> NDArray[np.int64]:
        """Stored positions drawn at places ``part`` of the epoch: int64 [stop - start]. Steps other than 1 are refused."""
        start, stop, step = part.indices(len(self))
        if step != 1:
            raise ValueError(f"an order is read by slices of step 1, found step {step}")
        drawn = _scaled(hashes(max(stop - start, 0), self._key, start), int(self._sums[-1]))
        return self._sums.searchsorted(drawn, side="right").astype(np.int64, copy=False)

    def load_epochs(self, places: NDArray[np.int64]) -> list[int]:
        """``epoch + (place + 1) * 2**40``: a sample that is drawn again is augmented anew."""
        return [self.epoch + ((place + 1) << _PLACE_SHIFT) for place in places.tolist()]


def _scaled(numbers: NDArray[np.uint64], total: int) -> NDArray[np.uint64]:
    """``numbers * total >> 64`` in parts of 32 bits: uniform below `total`, each number's share off by less than 2**-64."""
    low, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    a, b = numbers >> shift, numbers & low
    c, d = np.uint64(total >> 32), np.uint64(total & 0xFFFFFFFF)
    middle = a * d + (b * d >> shift)  # cannot overflow: each product is at most (2**32 - 1)**2
    scaled: NDArray[np.uint64] = a * c + (middle >> shift) + (((middle & low) + b * c) >> shift)
    return scaled


def balanced_weights(ds: Sized) -> NDArray[np.float64]:
    """Weights by class, float64 [N], from ``ds.labels`` and ``ds.box_offsets`` alone (see `PackedDataset`): no image is read.

    Classification: ``1 / n_c``, n_c the number of samples of the sample's class: every class that occurs is drawn equally often (inverse
    class frequency, as torch's `WeightedRandomSampler` is commonly given it).

    Detection: the repeat factor of LVIS (Gupta, Dollar, Girshick: LVIS, CVPR 2019, section on repeat factor sampling) with threshold
    t = 1: ``max(sqrt(1 / f_c))`` over the classes c that the picture shows, f_c the share of pictures that show c; 1 for a picture
    without boxes. Pictures show several classes, so that their counts cannot be made equal; the square root keeps a single rare class
    from crowding out the rest.

    Raises:
        ValueError: there are no labels, or the data set is empty.
    """
    labels: NDArray[np.int64] | None = getattr(ds, "labels", None)
    offsets: NDArray[np.int64] | None = getattr(ds, "box_offsets", None)
    count = len(ds)
    if labels is None or not count:
        reason = "the data set has no labels" if count else "the data set is empty"
        raise ValueError(f"weights='balanced': {reason}; give an array of weights, or weights=None")
    names, ids = np.unique(labels, return_inverse=True)
    if offsets is None:
        return np.asarray(1.0 / np.bincount(ids)[ids])
    picture = np.repeat(np.arange(count), np.diff(offsets))
    shown = np.unique(picture * max(len(names), 1) + ids)  # each (picture, class) once
    pictures, classes = np.divmod(shown, max(len(names), 1))
    factor = np.sqrt(count / np.bincount(classes, minlength=len(names)))
    weights = np.ones(count)
    np.maximum.at(weights, pictures, factor[classes])
    return weights


def weight_table(weights: Weights, ds: Sized) -> WeightTable:
    """The table of what a loader was given. Raises ValueError."""
    if isinstance(weights, str):
        if weights != "balanced":
            raise ValueError(f"weights is {weights!r}, expected 'balanced', an array of one number per sample, or None")
        return WeightTable(balanced_weights(ds), len(ds))
    return WeightTable(weights, len(ds))
