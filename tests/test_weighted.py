"""Drawing by weights: vectors, frequencies, slices, ranks, states."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batch_data import MemoryDataset
from loaders.batches import BatchLoader
from loaders.memmap import MemmapDataset
from loaders.sampling import num_batches, rows_of_batches
from loaders.shards import ShardDataset
from loaders.weighted import WEIGHTED_VERSION, WeightedOrder, WeightTable, _scaled, balanced_weights
from packed_data import write_packed

# The vectors are the promise: they must never change while WEIGHTED_VERSION stays.


def test_draw_vectors() -> None:
    assert WEIGHTED_VERSION == 1
    table = WeightTable([1, 0, 2.5, 1e-9, 3], 5)
    assert table.sums.tolist() == [144115188075855872, 144115188075855872, 504403158265495552, 504403158409610740, 936748722637178356]
    assert table.digest[:16] == DIGEST
    assert WeightedOrder(table, seed=3, epoch=1)[:].tolist() == FIRST
    assert WeightedOrder(WeightTable(np.arange(1, 100_001), 100_000), seed=-1, epoch=2)[70_000:70_006].tolist() == LATER


DIGEST = "f51431a341e4fee1"
FIRST = [4, 2, 4, 2, 4]
LATER = [99798, 42622, 64115, 51195, 83281, 80436]


@settings(deadline=None)
@given(st.lists(st.integers(0, 2**64 - 1), max_size=20), st.integers(1, 2**62))
def test_scaling_is_exact(numbers: list[int], total: int) -> None:
    assert _scaled(np.array(numbers, np.uint64), total).tolist() == [n * total >> 64 for n in numbers]


@settings(deadline=None)
@given(st.lists(st.floats(0, 1e300), min_size=1, max_size=50), st.integers(-(2**65), 2**65), st.integers(0, 5), st.data())
def test_slices_are_parts_of_one_sequence(weights: list[float], seed: int, epoch: int, data: st.DataObject) -> None:
    weights[data.draw(st.integers(0, len(weights) - 1))] = 1e300
    n = len(weights)
    order = WeightedOrder(WeightTable(weights, n), seed, epoch)
    whole = order[:]
    assert whole.dtype == np.int64
    assert len(whole) == len(order) == n
    assert all(weights[i] > 0 for i in whole)
    start, stop = data.draw(st.integers(-3, n + 3)), data.draw(st.integers(-3, n + 3))
    assert order[start:stop].tolist() == whole[start:stop].tolist()


def test_samples_come_as_often_as_their_weights_say() -> None:
    weights = np.array([1, 2, 0, 4, 8, 0.5, 100] * 10, float)
    table = WeightTable(weights, 70)
    drawn = np.concatenate([WeightedOrder(table, 5, epoch)[:] for epoch in range(1000)])
    counts = np.bincount(drawn, minlength=70)
    expected = 70_000 * weights / weights.sum()
    assert not counts[weights == 0].any()
    some = weights > 0
    assert 0.6 < ((counts - expected)[some] ** 2 / expected[some]).sum() / (some.sum() - 1) < 1.5  # chi-square per degree of freedom
    pairs = np.bincount(drawn[:-1] % 7 * 7 + drawn[1:] % 7, minlength=49)  # a draw does not depend on the one before it
    chance = np.outer(weights[:7], weights[:7]).ravel() / weights[:7].sum() ** 2 * 69_999
    often = chance > 5
    assert 0.4 < ((pairs - chance)[often] ** 2 / chance[often]).sum() / often.sum() < 1.8


def test_epochs_and_seeds_differ() -> None:
    table = WeightTable(np.ones(50), 50)
    assert len({tuple(WeightedOrder(table, seed, epoch)[:]) for seed in (0, 1) for epoch in (0, 1)}) == 4


def test_the_tiniest_weight_can_be_drawn_and_the_scale_does_not_matter() -> None:
    sums = WeightTable([5e-324, 1e308, 0], 3).sums
    assert sums[0] == 1
    assert sums[2] == sums[1]
    assert WeightTable([1, 2, 3], 3).digest == WeightTable([0.25, 0.5, 0.75], 3).digest != WeightTable([1, 2, 4], 3).digest


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ([1, 2], r"shape \(2,\), expected numbers of shape \(3,\)"),
        ([[1], [2], [3]], r"shape \(3, 1\)"),
        (["a", "b", "c"], "dtype <U1"),
        ([1, -0.5, 2], r"weights\[1\] is -0.5, expected a finite number of 0 or more"),
        ([1, 2, float("nan")], r"weights\[2\] is nan"),
        ([float("inf"), 2, 1], r"weights\[0\] is inf"),
        ([0, 0, 0], "all 3 weights are 0"),
    ],
)
def test_what_is_no_weight_is_refused(weights: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        BatchLoader(MemoryDataset(3), 1, weights=weights)


def test_refused_arguments() -> None:
    with pytest.raises(ValueError, match="shuffle=False excludes"):
        BatchLoader(MemoryDataset(3), 1, shuffle=False, weights=[1, 1, 1])
    with pytest.raises(ValueError, match="weights is 'even', expected 'balanced'"):
        BatchLoader(MemoryDataset(3), 1, weights="even")
    with pytest.raises(ValueError, match="the data set has no labels"):
        BatchLoader(MemoryDataset(3), 1, weights="balanced")
    order = WeightedOrder(WeightTable([1.0], 1), 0, 0)
    with pytest.raises(ValueError, match="step 2"):
        order[::2]
    with pytest.raises(ValueError, match="epoch is -1"):
        WeightedOrder(WeightTable([1.0], 1), 0, -1)


# Balanced


class Labelled(SimpleNamespace):
    def __len__(self) -> int:
        return int(self.count)


def test_balanced_classification() -> None:
    ds = Labelled(labels=np.array([0, 0, 0, 4, 4, 2]), box_offsets=None, count=6)
    assert balanced_weights(ds).tolist() == [1 / 3, 1 / 3, 1 / 3, 1 / 2, 1 / 2, 1]


def test_balanced_detection_is_the_repeat_factor_of_lvis() -> None:
    # Pictures show the classes {0}, {0, 1}, {}, {0} (twice), {0, 2}: class 0 in 4 of 5, 1 and 2 in 1 of 5.
    ds = Labelled(labels=np.array([0, 1, 0, 0, 0, 2, 0]), box_offsets=np.array([0, 1, 3, 3, 5, 7]), count=5)
    common, rare = np.sqrt(5 / 4), np.sqrt(5)
    assert balanced_weights(ds).tolist() == [common, rare, 1, common, rare]


def test_balanced_without_any_box() -> None:
    ds = Labelled(labels=np.zeros(0, np.int64), box_offsets=np.zeros(4, np.int64), count=3)
    assert balanced_weights(ds).tolist() == [1, 1, 1]
    with pytest.raises(ValueError, match="the data set is empty"):
        balanced_weights(Labelled(labels=np.zeros(0, np.int64), box_offsets=None, count=0))


def test_balanced_on_packed_data_reads_no_image(tmp_path: Path) -> None:
    packed = write_packed(tmp_path / "c", "tar", "classification", counts=(20, 21))
    ds = ShardDataset(packed.root).select([i for i in range(41) if i % 3 != 1 or i < 5])  # labels 0, 1, 2: 14, 2, 13
    for number in range(2):
        packed.shard(number).unlink()
    labels = ds.labels
    assert labels is not None
    assert np.bincount(labels).tolist() == [14, 2, 13]
    table = WeightTable(balanced_weights(ds), len(ds))
    drawn = labels[np.concatenate([WeightedOrder(table, 0, epoch)[:] for epoch in range(300)])]
    share = np.bincount(drawn) / len(drawn)
    np.testing.assert_allclose(share, 1 / 3, atol=0.02)
    detection = MemmapDataset(write_packed(tmp_path / "d", "memmap").root)
    weights = balanced_weights(detection)
    assert weights.shape == (10,)
    assert (weights[1::4] == 1).all()  # pictures without boxes
    assert len(list(BatchLoader(detection, 2, weights="balanced"))) == 5


# In the loader


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 300), st.integers(1, 20), st.integers(1, 5), st.integers(1, 20), st.integers(1, 5), st.data())
def test_ranks_take_the_draws_once_and_resume_exactly(n: int, before: int, ranks: int, after: int, later: int, data: st.DataObject) -> None:
    order = WeightedOrder(WeightTable(np.arange(1, n + 1), n), data.draw(st.integers(0, 99)), 1)
    stop = data.draw(st.integers(0, num_batches(n, before, ranks, "pad")))
    places: list[int] = []
    rows: list[int] = []
    parts = [(before, ranks, 0, stop)]
    seen = min(stop * before * ranks, n)
    parts.append((after, later, seen, num_batches(n, after, later, "pad", seen)))
    for size, world, start, count in parts:
        for number in range(count):
            for rank in range(world):
                (indices,), (at,), (valid,) = rows_of_batches(order, range(number, number + 1), size, rank, world, "pad", start)
                assert (np.diff(indices) >= 0).all()
                places += at[valid].tolist()
                rows += indices[valid].tolist()
    assert sorted(places) == list(range(n))
    assert [row for _, row in sorted(zip(places, rows, strict=True))] == order[:].tolist()


def rows(loader: Any) -> list[list[int]]:
    return [batch["index"].tolist() for batch in loader]


def test_the_loader_draws_and_resumes_under_another_split() -> None:
    ds, weights = MemoryDataset(60), np.arange(60)
    expected = WeightedOrder(WeightTable(weights, 60), 7, 0)[:].tolist()
    loader = BatchLoader(ds, 8, seed=7, weights=weights)
    assert rows(loader) == [sorted(expected[b : b + 8]) for b in range(0, 56, 8)]
    loader.set_epoch(0)
    got = [i for _, batch in zip(range(3), loader, strict=False) for i in batch["index"].tolist()]
    state = loader.state_dict()
    for rank in range(2):
        other = BatchLoader(ds, 5, weights=weights, rank=rank, world_size=2, remainder="pad")
        other.load_state_dict(state)
        got += [int(i) for batch in other for i in batch["index"][batch["valid"]]]
    assert sorted(got) == sorted(expected)


def test_a_state_of_other_weights_is_refused() -> None:
    ds = MemoryDataset(20)
    state = BatchLoader(ds, 4, weights=np.arange(20)).state_dict()
    BatchLoader(ds, 4, weights=2.0 * np.arange(20)).load_state_dict(state)  # the same draws
    for weights in (None, np.ones(20)):
        other = BatchLoader(ds, 4, weights=weights)
        with pytest.raises(ValueError, match="other weights of this data set: 20 samples"):
            other.load_state_dict(state)
        assert other.state_dict()["epoch"] == 0
    with pytest.raises(ValueError, match="another data set"):
        BatchLoader(MemoryDataset(21), 4, weights=np.ones(21)).load_state_dict(state)


def noise(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {**sample, "image": rng.integers(0, 256, sample["image"].shape, np.uint8), "noise": int(rng.integers(1 << 40))}


@pytest.mark.parametrize("whole", [False, True])
def test_a_sample_drawn_again_is_augmented_anew(whole: bool) -> None:
    def collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
        return {name: [s[name] for s in samples] for name in samples[0]}

    ds = MemoryDataset(10, transform=noise)
    options: dict[str, Any] = {"weights": [1.0] + [0.0] * 9, "remainder": "pad", "collate": collate if whole else None}
    runs = [list(BatchLoader(ds, 4, workers=workers, **options)) for workers in (0, 2)]
    noises = [[int(v) for v in chain(*(batch["noise"] for batch in run))] for run in runs]
    assert noises[0] == noises[1]
    assert len(set(noises[0])) == 10
    assert noises[0][-2:] == [noises[0][9]] * 2  # what only pads repeats its sample as it is
    last = runs[0][-1]
    assert last["valid"].tolist() == [True, True, False, False]
    assert (np.stack(list(last["image"]))[1] == np.stack(list(last["image"]))[2]).all()
