"""Which sample goes into which split, order and shard: arithmetic that must come out the same for ever."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from packer.plan import (
    SAMPLE_OVERHEAD_BYTES,
    SPLITS,
    Sizing,
    assign_splits,
    default_shard_bytes,
    group_of,
    make_jobs,
    samples_per_shard,
    source_splits,
    surveyed,
)
from packer.sample import Item, Listing, PackError

# From the first release on.
ORDER_OF_SEED_0 = [0, 7, 8, 11, 2, 5, 9, 4, 10, 6, 3, 1]
ORDER_OF_SEED_1 = [9, 8, 7, 11, 4, 10, 2, 0, 3, 6, 5, 1]
QUICK = settings(deadline=None, max_examples=60)


def item(n: int, *, split: str | None = None, num_bytes: int = 1000, refused: bool = False) -> Item:
    return Item(f"images/{n:05d}.jpg", split, num_bytes, 1, refused=refused)


def listing(items: list[Item], *, has_splits: bool = False) -> Listing:
    return Listing(items, "classification", ["crack"], has_splits)


def keys_of(jobs: list[Any]) -> list[int]:
    return [key for job in jobs for key in job.keys]


# Shards ---------------------------------------------------------------------------------------------------------------------------------

sizes = st.lists(st.integers(1, 50_000), max_size=60)


@QUICK
@given(sizes, st.integers(1, 200_000), st.booleans(), st.integers(0, 2**63 - 1), st.sets(st.integers(0, 59)))
def test_every_key_once_and_no_shard_too_large(num_bytes: list[int], target: int, shuffle: bool, seed: int, refused: set[int]) -> None:
    items = [item(i, num_bytes=n, refused=i in refused) for i, n in enumerate(num_bytes)]
    splits = [None if it.refused else SPLITS[i % 3] for i, it in enumerate(items)]
    jobs = make_jobs(listing(items), splits, sizing=Sizing(target), shuffle=shuffle, seed=seed)
    assert sorted(keys_of(jobs)) == [i for i, it in enumerate(items) if not it.refused]
    assert [job.number for job in jobs] == list(range(len(jobs)))
    assert [job.split for job in jobs] == sorted((job.split for job in jobs), key=SPLITS.index)
    for job in jobs:
        assert {splits[key] for key in job.keys} == {job.split}
        assert job.items == tuple(items[key] for key in job.keys)
        assert sum(it.num_bytes + SAMPLE_OVERHEAD_BYTES for it in job.items) <= target or len(job.items) == 1
    for a, b in itertools.pairwise(jobs):  # none was closed before it was full
        if a.split == b.split:
            assert sum(it.num_bytes + SAMPLE_OVERHEAD_BYTES for it in (*a.items, b.items[0])) > target
    if not shuffle:
        for split in SPLITS:
            mine = [key for job in jobs if job.split == split for key in job.keys]
            assert mine == sorted(mine)


@QUICK
@given(st.integers(0, 100), st.integers(1, 30))
def test_a_fixed_number_of_samples(n: int, per_shard: int) -> None:
    jobs = make_jobs(listing([item(i) for i in range(n)]), ["train"] * n, sizing=Sizing(1, per_shard), shuffle=False, seed=0)
    assert [len(job.keys) for job in jobs[:-1]] == [per_shard] * (len(jobs) - 1)
    assert keys_of(jobs) == list(range(n))


def test_a_shard_that_is_exactly_full() -> None:
    sizing = Sizing(2 * (1000 + SAMPLE_OVERHEAD_BYTES))
    jobs = make_jobs(listing([item(i) for i in range(5)]), ["train"] * 5, sizing=sizing, shuffle=False, seed=0)
    assert [job.keys for job in jobs] == [(0, 1), (2, 3), (4,)]


def test_keys_are_positions_in_the_listing_refused_ones_counted() -> None:
    items = [item(i, refused=i in (0, 2)) for i in range(5)]
    (job,) = make_jobs(listing(items), [None, "train", None, "train", "train"], sizing=Sizing(10**9), shuffle=False, seed=0)
    assert job.keys == (1, 3, 4)
    assert [it.path for it in job.items] == ["images/00001.jpg", "images/00003.jpg", "images/00004.jpg"]


def test_a_refused_item_is_never_packed_even_where_a_split_is_given() -> None:
    items = [item(0, refused=True), item(1)]
    assert keys_of(make_jobs(listing(items), ["train", "train"], sizing=Sizing(10**9), shuffle=False, seed=0)) == [1]


def test_the_shuffle_of_a_seed_never_changes() -> None:
    """Literal values: another order here means that every packed data set gets other bytes."""
    n = 12

    def order(seed: int) -> list[int]:
        return keys_of(make_jobs(listing([item(i) for i in range(n)]), ["train"] * n, sizing=Sizing(10**9), shuffle=True, seed=seed))

    assert order(0) == ORDER_OF_SEED_0
    assert order(1) == ORDER_OF_SEED_1


def test_splits_are_shuffled_apart() -> None:
    n = 40
    jobs = make_jobs(listing([item(i) for i in range(2 * n)]), ["train"] * n + ["val"] * n, sizing=Sizing(10**9), shuffle=True, seed=0)
    train, val = (np.array(job.keys) for job in jobs)
    assert set(train) == set(range(n))
    assert (train != val - n).any()


# Samples per shard ----------------------------------------------------------------------------------------------------------------------


def is_round(n: int) -> bool:
    return str(n).rstrip("0") in ("1", "2", "5")


@QUICK
@given(st.integers(1, 10**12), st.floats(0, 1e9))
def test_samples_per_shard_is_1_2_or_5_times_a_power_of_ten(target: int, mean: float) -> None:
    n = samples_per_shard(target, mean)
    assert is_round(n)
    ideal = max(target / max(mean, 1), 1)
    assert ideal / 1.6 <= n <= ideal * 1.6


@QUICK
@given(st.integers(1, 10**12), st.floats(1, 1e9), st.floats(1, 1e9))
def test_samples_per_shard_falls_with_the_mean(target: int, a: float, b: float) -> None:
    assert samples_per_shard(target, max(a, b)) <= samples_per_shard(target, min(a, b))


@QUICK
@given(st.integers(0, 7), st.sampled_from([1, 2, 5]), st.floats(-0.2, 0.2), st.floats(0.95, 1.05))
def test_a_small_change_of_the_mean_leaves_it_as_it_is(exponent: int, digit: int, off: float, noise: float) -> None:
    """The edges lie at factors of sqrt(2) or sqrt(2.5) from a round number."""
    number = digit * 10**exponent
    mean = 1e9 / (number * (1 + off))
    assert samples_per_shard(10**9, mean) == samples_per_shard(10**9, mean * noise) == number


@pytest.mark.parametrize(
    ("total", "layout", "expected"), [(0, "tar", 8e6), (1e9, "tar", 31.25e6), (1e12, "tar", 256e6), (0, "memmap", 64e6)]
)
def test_default_size_of_a_shard(total: float, layout: Any, expected: float) -> None:
    assert default_shard_bytes(total, layout) == expected


@QUICK
@given(st.integers(0, 200), st.sets(st.integers(0, 199)))
def test_survey_takes_up_to_32_that_are_not_refused_evenly_spaced(n: int, refused: set[int]) -> None:
    items = [item(i, refused=i in refused) for i in range(n)]
    alive = [i for i, it in enumerate(items) if not it.refused]
    chosen = surveyed(items)
    assert len(chosen) == len(set(chosen)) == min(32, len(alive))
    assert chosen == sorted(chosen)
    assert set(chosen) <= set(alive)
    if len(alive) >= 32:
        places = [alive.index(i) for i in chosen]
        assert max(np.diff([*places, len(alive)])) - min(np.diff(places)) <= 1


# Splits ---------------------------------------------------------------------------------------------------------------------------------

SHARES = {"train": 0.8, "val": 0.1, "test": 0.1}
shares = (
    st.lists(st.integers(0, 20), min_size=3, max_size=3)
    .filter(any)
    .map(lambda w: {name: v / sum(w) for name, v in zip(SPLITS, w, strict=True) if v})
)
class_sets = st.lists(st.frozensets(st.sampled_from("abcd"), max_size=3), max_size=80)


def rarest(classes: list[frozenset[str]], refused: set[int]) -> list[str]:
    count = Counter(c for i, present in enumerate(classes) if i not in refused for c in present)
    return [min(present, key=lambda c: (count[c], c), default="") for present in classes]


@QUICK
@given(class_sets, shares, st.integers(0, 2**62), st.sets(st.integers(0, 79), max_size=10))
def test_each_stratum_is_shared_out_within_one_sample(
    classes: list[frozenset[str]], shares: dict[str, float], seed: int, refused: set[int]
) -> None:
    items = [item(i, refused=i in refused) for i in range(len(classes))]
    result = assign_splits(items, classes, shares, seed, None)
    assert result == assign_splits(items, classes, shares, seed, None)
    assert [split is None for split in result] == [it.refused for it in items]
    assert set(result) - {None} <= set(shares)
    stratum = rarest(classes, refused)
    for name in set(stratum):
        mine = [result[i] for i in range(len(items)) if stratum[i] == name and not items[i].refused]
        for split, share in shares.items():
            assert abs(mine.count(split) - share * len(mine)) < 1 + 1e-6


@QUICK
@given(st.lists(st.integers(1, 7), min_size=1, max_size=60), shares, st.integers(0, 1000))
def test_the_whole_gets_its_shares_though_every_class_is_small(counts: list[int], shares: dict[str, float], seed: int) -> None:
    """With three pictures a class, rounding each class on its own would leave val and test empty."""
    classes = [frozenset([f"c{c:02d}"]) for c, n in enumerate(counts) for _ in range(n)]
    result = assign_splits([item(i) for i in range(len(classes))], classes, shares, seed, None)
    for split, share in shares.items():
        assert abs(result.count(split) - share * len(classes)) <= 2


@QUICK
@given(st.lists(st.tuples(st.integers(0, 12), st.frozensets(st.sampled_from("abc"), max_size=2)), max_size=80), shares, st.integers(0, 99))
def test_groups_never_straddle(rows: list[tuple[int, frozenset[str]]], shares: dict[str, float], seed: int) -> None:
    items = [Item(f"seam{g}/{i}.jpg", None, 1, 1) for i, (g, _) in enumerate(rows)]
    result = assign_splits(items, [c for _, c in rows], shares, seed, group_of(r"seam(\d+)"))
    assert None not in result
    assert all(len({result[i] for i, (h, _) in enumerate(rows) if h == g}) == 1 for g in {g for g, _ in rows})


def test_many_equal_groups_meet_the_shares() -> None:
    items = [Item(f"seam{i // 5:03d}/{i}.jpg", None, 1, 1) for i in range(500)]
    result = assign_splits(items, [frozenset("a")] * 500, SHARES, 3, group_of("seam[0-9]+"))
    assert Counter(result) == {"train": 400, "val": 50, "test": 50}


def test_one_group_a_class_still_fills_every_split() -> None:
    items = [Item(f"seam{i // 10:03d}/{i}.jpg", None, 1, 1) for i in range(500)]
    result = assign_splits(items, [frozenset([f"c{i // 10:03d}"]) for i in range(500)], SHARES, 0, group_of("seam[0-9]+"))
    assert Counter(result) == {"train": 400, "val": 50, "test": 50}


def test_a_group_has_the_rarest_class_of_all_its_samples() -> None:
    """Two of ten seams show the rare class, in one picture each; they must not end in one split."""
    items = [Item(f"seam{i // 10}/{i}.jpg", None, 1, 1) for i in range(100)]
    classes = [frozenset(["slag"] if i in (5, 57) else ["crack"]) for i in range(100)]
    result = assign_splits(items, classes, {"train": 0.5, "val": 0.5}, 0, group_of(r"seam\d"))
    assert {result[5], result[57]} == {"train", "val"}
    assert Counter(result) == {"train": 50, "val": 50}


def test_another_seed_draws_other_samples() -> None:
    items, classes = [item(i) for i in range(100)], [frozenset("a")] * 100
    a, b = (assign_splits(items, classes, SHARES, seed, None) for seed in (0, 1))
    assert a != b
    assert Counter(a) == Counter(b) == {"train": 80, "val": 10, "test": 10}


def test_shares_that_floats_cannot_say_exactly_lose_no_sample() -> None:
    items, classes = [item(i) for i in range(1000)], [frozenset("a")] * 1000
    for a in range(1, 100):
        result = assign_splits(items, classes, {"train": a / 100, "val": 1 - a / 100}, 0, None)
        assert Counter(result) == {"train": 10 * a, "val": 1000 - 10 * a}
    assert 0.29 * 100 < 29
    assert assign_splits(items[:100], classes[:100], {"train": 0.29, "val": 0.355, "test": 0.355}, 0, None).count("train") == 29


@pytest.mark.parametrize(
    ("pattern", "path", "expected"),
    [(r"seam(\d+)", "a/seam12/x.jpg", "12"), (r"seam\d+", "a/seam12/x.jpg", "seam12"), ("(?:a(x)|b)", "b.jpg", "b.jpg")],
)
def test_group_of(pattern: str, path: str, expected: str) -> None:
    assert group_of(pattern)(path) == expected


def test_a_path_without_a_match_is_a_group_of_its_own() -> None:
    assert group_of(r"seam(\d+)")("other/x.jpg") == "other/x.jpg"


def test_splits_of_the_source() -> None:
    items = [item(0, split="val"), item(1, refused=True), item(2, split="train")]
    assert source_splits(listing(items, has_splits=True)) == ["val", None, "train"]
    assert source_splits(listing(items)) == ["train", None, "train"]


def test_an_unknown_split_of_the_source_is_refused() -> None:
    with pytest.raises(PackError, match=r"trian.*train, val, test"):
        source_splits(listing([item(0, split="trian")], has_splits=True))


@QUICK
@given(st.integers(2, 40), st.data())
def test_a_split_keeps_its_members_when_the_sizing_changes(n: int, data: st.DataObject) -> None:
    seed = data.draw(st.integers(0, 1000))
    a, b = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 40))
    assume(a != b)
    both = [
        keys_of(make_jobs(listing([item(i) for i in range(n)]), ["train"] * n, sizing=Sizing(1, k), shuffle=True, seed=seed))
        for k in (a, b)
    ]
    assert both[0] == both[1]
