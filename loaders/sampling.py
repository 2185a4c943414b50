"""Order: which sample comes when, for whom. Pure arithmetic on integers; imports numpy only.

    permutation(n, seed, *labels)     a shuffle that is the same on every platform and NumPy release
    Order(n, seed, epoch)[a:b]        samples a..b of an epoch, without computing the rest of it
    num_batches, rows_of_batches      how an epoch is cut into batches and split over ranks
    State                             where in which epoch training stands
    shuffle_quality                   how well an order mixes

An epoch's order is a *block shuffle*: blocks of 64 consecutive stored samples are permuted, then the samples of at least 128 blocks at a
time (a window) are mixed. Reads stay close to sequential, and on data shuffled once at pack time the mixing is close to a global shuffle.
A set of fewer than 256 blocks is one window: a full shuffle.

Global batch b of an epoch is ``order[b*G:(b+1)*G]`` with G = batch size x world size; rank r takes the r-th part of it, sorted by stored
position. The number of workers has no part in any of this. Drawing by weights is `loaders.weighted`.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

ORDER_VERSION = 1
STORED_ORDER = 0
"""`State.order_version` of a loader that does not shuffle. `ORDER_VERSION` is raised when a seed gives another shuffle than before."""

WEIGHTS_MARK = " weights "
"""What follows it in `State.fingerprint` names the weights that samples are drawn by."""

Remainder = Literal["drop", "pad"]

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_BLOCKS = 0  # domain labels under (seed, epoch): the permutation of the blocks, then 1 + window number


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def hash_key(seed: int, *labels: int) -> int:
    """Fold integers (each taken modulo 2**64) into one 64-bit key; their order matters."""
    key = 0
    for value in (seed, *labels):
        key = _mix((key + int(value) + _GAMMA) & _MASK)
    return key


def hashes(n: int, key: int, start: int = 0) -> NDArray[np.uint64]:
    """Outputs start..start+n-1 of SplitMix64 started at `key`: uint64 [n], all different (it is a bijection of its counter)."""
    steps = np.arange(start + 1, start + n + 1, dtype=np.uint64)
    steps *= np.uint64(_GAMMA)  # array arithmetic wraps modulo 2**64 and gives no overflow warning
    steps += np.uint64(key & _MASK)
    z = (steps ^ (steps >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def permutation(n: int, seed: int, *labels: int) -> NDArray[np.int64]:
    """A shuffle of 0..n-1, int64 [n]: the argsort of n 64-bit hashes keyed by (seed, *labels).

    Integer arithmetic only, and no two hashes are equal, so the result is the same on every platform, byte order, NumPy release and sort
    algorithm (NumPy's own random streams are guaranteed for one build only). Different labels give independent shuffles.

    Raises:
        ValueError: n is negative.
    """
    if n < 0:
        raise ValueError(f"permutation of {n} elements: n must be 0 or more")
    return np.argsort(hashes(n, hash_key(seed, *labels))).astype(np.int64, copy=False)


class SampleOrder(Protocol):
    """Which sample comes at which place of an epoch: `Order`, or `loaders.weighted.WeightedOrder`."""

    epoch: int

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice) -> NDArray[np.int64]: ...

    def load_epochs(self, places: NDArray[np.int64]) -> list[int]:
        """What keys the randomness of the samples at these places (int64 [B]), beside seed and index."""
        ...


class Order:
    """The order of one epoch over samples 0..num_samples-1, by slices; a permutation of them.

    A slice costs the windows that it touches (about 10,000 samples each); the last few are kept. Thread-safe.

    Args:
        num_samples: size of the data set.
        seed: any integer, taken modulo 2**64.
        epoch: 0-based.
        shuffle: False gives the stored order.
        block: consecutive stored samples that stay in one window.
        window: blocks mixed at a time; the last window holds up to twice as many, so that none holds fewer.
    """

    def __init__(self, num_samples: int, seed: int, epoch: int, shuffle: bool = True, block: int = 64, window: int = 128) -> None:
        if num_samples < 0 or epoch < 0 or block < 1 or window < 1:
            raise ValueError(
                f"num_samples {num_samples} and epoch {epoch} must be 0 or more, block {block} and window {window} must be 1 or more"
            )
        self.num_samples, self.seed, self.epoch, self.shuffle = num_samples, seed, epoch, shuffle
        self._block, self._window = block, window
        self._kept: dict[int, NDArray[np.int64]] = {}
        self._lock = threading.Lock()
        if not shuffle:
            return
        num_blocks = -(-num_samples // block)
        self._num_windows = max(1, num_blocks // window)
        self._blocks = permutation(num_blocks, seed, epoch, _BLOCKS)
        # The stored last block may be short; every window after the one that holds it starts that much earlier.
        self._missing = num_blocks * block - num_samples
        short_place = int(np.flatnonzero(self._blocks == num_blocks - 1)[0]) if num_blocks else 0
        self._short_window = min(short_place // window, self._num_windows - 1)

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, part: slice) -> NDArray[np.int64]:
        """Stored positions of the samples at places ``part`` of the epoch: int64 [stop - start]. Steps other than 1 are refused."""
        start, stop, step = part.indices(self.num_samples)
        if step != 1:
            raise ValueError(f"an order is read by slices of step 1, found step {step}")
        if stop <= start:
            return np.zeros(0, np.int64)
        if not self.shuffle:
            return np.arange(start, stop, dtype=np.int64)
        pieces: list[NDArray[np.int64]] = []
        number = self._window_at(start)
        while start < stop:
            first, mixed = self._window_start(number), self._mixed(number)
            pieces.append(mixed[start - first : stop - first])
            start = first + len(mixed)
            number += 1
        return np.concatenate(pieces)

    def load_epochs(self, places: NDArray[np.int64]) -> list[int]:
        """The epoch, for each place: a sample comes once in it."""
        return [self.epoch] * len(places)

    def _window_start(self, number: int) -> int:
        start = number * self._window * self._block
        return start - self._missing if number > self._short_window else start

    def _window_at(self, place: int) -> int:
        number = min(place // (self._window * self._block), self._num_windows - 1)
        # Starts lie up to a block before the even grid, never after it.
        return number + (number + 1 < self._num_windows and self._window_start(number + 1) <= place)

    def _mixed(self, number: int) -> NDArray[np.int64]:
        # Under the lock, so that threads that enter a window together do not all compute it.
        with self._lock:
            mixed = self._kept.get(number)
            if mixed is None:
                last = None if number == self._num_windows - 1 else (number + 1) * self._window
                blocks = self._blocks[number * self._window : last]
                samples = (blocks[:, None] * self._block + np.arange(self._block, dtype=np.int64)).ravel()
                samples = samples[samples < self.num_samples]
                mixed = samples[permutation(len(samples), self.seed, self.epoch, 1 + number)]
                if len(self._kept) >= 4:
                    del self._kept[next(iter(self._kept))]
                self._kept[number] = mixed
            return mixed


def num_batches(num_samples: int, batch_size: int, world_size: int, remainder: Remainder, samples_seen: int = 0) -> int:
    """Batches that each rank still gets in an epoch of which `samples_seen` samples (over all ranks) are done.

    Raises:
        ValueError: a number is out of range, or `remainder` is neither "drop" nor "pad".
    """
    if batch_size < 1 or world_size < 1:
        raise ValueError(f"batch_size {batch_size} and world_size {world_size} must be 1 or more")
    if not 0 <= samples_seen <= num_samples:
        raise ValueError(f"samples_seen is {samples_seen}, expected 0 to num_samples = {num_samples}")
    if remainder not in ("drop", "pad"):
        raise ValueError(f"remainder is {remainder!r}, expected 'drop' or 'pad'")
    left, size = num_samples - samples_seen, batch_size * world_size
    return left // size if remainder == "drop" else -(-left // size)


def rows_of_batches(
    order: SampleOrder, numbers: range, batch_size: int, rank: int, world_size: int, remainder: Remainder, samples_seen: int = 0
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    """The samples of one rank's batches, R of them.

    Args:
        order: the epoch's order.
        numbers: 0-based batch numbers, counted from `samples_seen` on, of step 1; not empty.
        batch_size: samples a rank gets per batch, B.
        rank: 0-based.
        world_size: number of ranks.
        remainder: "pad" fills the last global batch by repeating the order's last sample.
        samples_seen: samples of the epoch, over all ranks, that are done.

    Returns:
        Stored positions, int64 [R, B], ascending in each batch; their places in the order, int64 [R, B]; and bool [R, B]: False for rows
        that only pad.

    Raises:
        IndexError: there is no such batch or rank.
    """
    total = num_batches(len(order), batch_size, world_size, remainder, samples_seen)
    if not 0 <= numbers.start < numbers.stop <= total or not 0 <= rank < world_size:
        raise IndexError(f"batches {numbers.start} to {numbers.stop - 1} of {total}, rank {rank} of {world_size}: out of range")
    starts = samples_seen + (np.arange(numbers.start, numbers.stop) * world_size + rank) * batch_size
    if world_size == 1:
        parts = [order[int(starts[0]) : int(starts[-1]) + batch_size]]
    else:
        parts = [order[start : start + batch_size] for start in starts.tolist()]
    surplus = len(starts) * batch_size - sum(map(len, parts))
    if surplus:
        parts.append(np.repeat(order[len(order) - 1 :], surplus))
    # Position and row in one number: a plain sort is several times as fast as argsort, and a real row stays before its own copies.
    keys = np.concatenate(parts).reshape(len(starts), batch_size) * batch_size + np.arange(batch_size)
    keys.sort(axis=1)
    positions = keys // batch_size
    places = starts[:, None] + keys - positions * batch_size
    return positions, np.minimum(places, len(order) - 1), places < len(order)


@dataclass(frozen=True, slots=True)
class State:
    """Where training stands: `samples_seen` samples of `epoch`, over all ranks, were received. Batch size, ranks and workers are no part.

    `fingerprint` and `num_samples` name the data set (and weights, where there are any), `seed` and `order_version` its order. Plain ints
    and one string, so that it goes through JSON and `torch.save`.
    """

    order_version: int
    fingerprint: str
    num_samples: int
    seed: int
    epoch: int
    samples_seen: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> State:
        """Check and take what `to_dict` gave.

        Raises:
            ValueError: a key is missing or unknown, or a value has another type or range; all problems are listed.
        """
        names = [f.name for f in fields(cls)]
        problems = [f"{name!r} is missing" for name in names if name not in raw]
        problems += [f"{name!r} is unknown" for name in raw if name not in names]
        for name in names:
            value = raw.get(name)
            if name == "fingerprint":
                if name in raw and not isinstance(value, str):
                    problems.append(f"{name!r} is {value!r}, expected a string")
            elif name in raw and (not isinstance(value, int) or isinstance(value, bool) or (value < 0 and name != "seed")):
                problems.append(f"{name!r} is {value!r}, expected an integer{'' if name == 'seed' else ' of 0 or more'}")
        if not problems and raw["samples_seen"] > raw["num_samples"]:
            problems.append(f"'samples_seen' is {raw['samples_seen']}, expected at most 'num_samples' = {raw['num_samples']}")
        if problems:
            raise ValueError("not a loader state: " + "; ".join(problems))
        return cls(**raw)

    def check_same_data(self, expected: State) -> None:
        """Refuse a state that another data set or order gave; epoch, samples_seen and seed may differ.

        Raises:
            ValueError: naming each difference.
        """
        problems = []
        if (self.fingerprint, self.num_samples) != (expected.fingerprint, expected.num_samples):
            same = self.fingerprint != expected.fingerprint and (
                self.fingerprint.partition(WEIGHTS_MARK)[0] == expected.fingerprint.partition(WEIGHTS_MARK)[0]
            )
            problems.append(
                f"it was saved with {'other weights of this' if same else 'another'} data set: {self.num_samples} samples, "
                f"fingerprint {self.fingerprint!r}; "
                f"this one has {expected.num_samples}, {expected.fingerprint!r}"
            )
        if self.order_version != expected.order_version:
            problems.append(
                f"its order_version is {self.order_version}, this loader's {expected.order_version} ({STORED_ORDER}: shuffle=False, "
                f"{ORDER_VERSION}: this release's shuffle)"
            )
        if problems:
            raise ValueError(f"the state cannot be resumed: {'; '.join(problems)}; start the epoch anew with set_epoch({self.epoch})")


@dataclass(frozen=True, slots=True)
class ShuffleQuality:
    """`co_batch`: how often two samples of one batch meet again in the next epoch, 1 = as by chance. `label_chi2`: chi-square per degree
    of freedom of the labels over the batches, 1 = well mixed; None without labels, or where fewer than two batches or labels exist."""

    co_batch: float
    label_chi2: float | None


def shuffle_quality(
    first: NDArray[np.int64], second: NDArray[np.int64], batch_size: int, labels: NDArray[np.int64] | None = None
) -> ShuffleQuality:
    """Compare the orders of two consecutive epochs, int64 [N] each; `labels` int64 [N] by stored position. Uses indices only.

    Raises:
        ValueError: the orders differ in length, or a batch holds fewer than 2 samples or more than N.
    """
    n = len(first)
    if len(second) != n or not 2 <= batch_size <= n:
        raise ValueError(f"orders of {n} and {len(second)} samples with batch_size {batch_size}: expected equal lengths, 2 to N a batch")
    full = n // batch_size
    batch_in = np.full((2, n), full, np.int64)
    for row, order in zip(batch_in, (first, second), strict=True):
        row[order[: full * batch_size]] = np.arange(full * batch_size) // batch_size
    in_both = (batch_in < full).all(axis=0)
    _, together = np.unique(batch_in[0, in_both] * full + batch_in[1, in_both], return_counts=True)
    pairs = full * batch_size * (batch_size - 1) / 2
    by_chance = pairs * (full * batch_size * (batch_size - 1)) / (n * (n - 1))
    co_batch = float((together * (together - 1) / 2).sum() / by_chance)
    return ShuffleQuality(co_batch, None if labels is None else _label_chi2(labels[first[: full * batch_size]].reshape(full, batch_size)))


def _label_chi2(labels: NDArray[np.int64]) -> float | None:
    names, ids = np.unique(labels, return_inverse=True)
    groups = min(len(names), 32)  # few enough that a batch expects several of each
    if groups < 2 or len(labels) < 2:
        return None
    group = ids.reshape(labels.shape) * groups // len(names)
    counts = np.stack([(group == g).sum(axis=1) for g in range(groups)], axis=1)
    expected = counts.mean(axis=0)
    return float(((counts - expected) ** 2 / expected).sum() / ((len(labels) - 1) * (groups - 1)))
