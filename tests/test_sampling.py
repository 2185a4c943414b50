from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from loaders.sampling import (
    ORDER_VERSION,
    STORED_ORDER,
    Order,
    Remainder,
    State,
    hash_key,
    hashes,
    num_batches,
    permutation,
    rows_of_batches,
    shuffle_quality,
)

# Hashes and permutations. The vectors are the promise: they must never change while ORDER_VERSION stays.


def test_hashes_are_splitmix64() -> None:
    # Published outputs of the reference implementation, seeds 1234567 and 0.
    reference = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    assert hashes(5, 1234567).tolist() == reference
    assert hashes(1, 0)[0] == hash_key(0) == 0xE220A8397B1DCDAF


def test_hash_key_vectors() -> None:
    assert ORDER_VERSION == 1
    assert hash_key(-1, 5) == hash_key(2**64 - 1, 5) == 3846658174030194800
    assert len({hash_key(0), hash_key(0, 0), hash_key(0, 1), hash_key(1, 0), hash_key(1), hash_key(0, 0, 0)}) == 6


def test_permutation_vectors() -> None:
    assert permutation(10, 0).tolist() == [5, 7, 8, 2, 9, 0, 3, 1, 6, 4]
    assert permutation(10, 7, 1, 2).tolist() == [5, 7, 3, 1, 8, 6, 2, 0, 9, 4]


def test_order_vector() -> None:
    assert ORDER_VERSION == 1
    assert Order(12, seed=3, epoch=1, block=2, window=3)[:].tolist() == [11, 9, 8, 3, 10, 2, 6, 0, 1, 4, 5, 7]
    assert Order(100_000, seed=3, epoch=1)[70_000:70_006].tolist() == [51244, 14220, 99391, 56370, 38080, 90634]


@settings(deadline=None)
@given(st.integers(0, 3000), st.integers(-(2**70), 2**70), st.lists(st.integers(0, 2**64), max_size=3))
def test_permutation_is_one(n: int, seed: int, labels: list[int]) -> None:
    result = permutation(n, seed, *labels)
    assert result.dtype == np.int64
    assert (np.sort(result) == np.arange(n)).all()


def test_permutation_refuses_a_negative_size() -> None:
    with pytest.raises(ValueError, match="-1 elements"):
        permutation(-1, 0)


def test_every_place_is_equally_likely() -> None:
    places = np.stack([permutation(8, seed) for seed in range(4000)])
    counts = np.stack([np.bincount(places[:, p], minlength=8) for p in range(8)])
    assert ((counts - 500.0) ** 2 / 500).sum() / 49 < 1.6  # chi-square per degree of freedom


# The block shuffle


ORDERS = st.builds(
    Order,
    st.integers(0, 2000),
    seed=st.integers(0, 50),
    epoch=st.integers(0, 3),
    shuffle=st.sampled_from([True, True, True, False]),
    block=st.integers(1, 20),
    window=st.integers(1, 9),
)


@settings(deadline=None)
@given(ORDERS, st.data())
@example(Order(1, 0, 0), None)
@example(Order(64 * 128 * 3 + 1, 5, 2), None)
def test_slices_are_parts_of_one_permutation(order: Order, data: st.DataObject | None) -> None:
    whole = order[:]
    assert whole.dtype == np.int64
    assert (np.sort(whole) == np.arange(len(order))).all()
    if data is not None:
        start, stop = data.draw(st.integers(-5, len(order) + 5)), data.draw(st.integers(-5, len(order) + 5))
        assert (order[start:stop] == whole[start:stop]).all()


@settings(deadline=None)
@given(st.integers(1, 3000), st.integers(0, 9), st.integers(1, 20), st.integers(1, 9))
def test_blocks_stay_in_one_window(n: int, seed: int, block: int, window: int) -> None:
    order = Order(n, seed, 0, block=block, window=window)[:]
    place = np.empty(n, np.int64)
    place[order] = np.arange(n)
    most = 2 * window * block  # the last window takes the rest
    for start in range(0, n, block):
        places = place[start : start + block]
        assert places.max() - places.min() < most


def test_windows_hold_at_least_128_blocks() -> None:
    n = 64 * (128 * 3 + 40)  # 3 windows: 128, 128 and 168 blocks
    order = Order(n, 0, 0)[:]
    for start, stop in ((0, 8192), (8192, 16384), (16384, n)):
        blocks = np.unique(order[start:stop] // 64)
        assert len(blocks) * 64 == stop - start
    # In the merged last window, samples of its first 128 blocks' share come from all 168.
    assert len(np.unique(order[16384 : 16384 + 8192] // 64)) == 168


def test_a_small_set_is_shuffled_as_a_whole() -> None:
    order = Order(255 * 64, 0, 0)[:]
    assert len(np.unique(order[:4000] // 64)) > 250


def test_epochs_and_seeds_differ() -> None:
    whole = [Order(3000, seed, epoch)[:].tolist() for seed in (0, 1) for epoch in (0, 1)]
    assert len({tuple(w) for w in whole}) == 4


def test_a_slice_computes_only_the_windows_it_touches(monkeypatch: pytest.MonkeyPatch) -> None:
    order = Order(1_000_000, 0, 0)
    sizes: list[int] = []

    def counted(n: int, seed: int, *labels: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        sizes.append(n)
        return permutation(n, seed, *labels)

    monkeypatch.setattr("loaders.sampling.permutation", counted)
    for start in range(500_000, 500_640, 64):
        order[start : start + 64]
    assert sizes == [8192]


def test_threads_read_one_order() -> None:
    whole = Order(60_000, 4, 0)[:]
    order = Order(60_000, 4, 0)
    with ThreadPoolExecutor(4) as pool:
        parts = list(pool.map(lambda start: order[start : start + 100], range(0, 60_000, 100)))
    assert (np.concatenate(parts) == whole).all()


@pytest.mark.parametrize("arguments", [(-1, 0, 0), (1, 0, -1), (1, 0, 0, True, 0), (1, 0, 0, True, 64, 0)])
def test_order_refuses_numbers_out_of_range(arguments: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="must be"):
        Order(*arguments)


def test_order_refuses_steps() -> None:
    with pytest.raises(ValueError, match="step -1"):
        Order(5, 0, 0)[::-1]


# Batches and ranks

SPLITS = st.tuples(st.integers(1, 300), st.integers(1, 20), st.integers(1, 5), st.integers(0, 5))


@settings(deadline=None)
@given(SPLITS, st.sampled_from(["drop", "pad"]), st.booleans(), st.data())
def test_ranks_are_disjoint_and_complete(
    numbers: tuple[int, int, int, int], remainder: Remainder, shuffle: bool, data: st.DataObject
) -> None:
    n, batch_size, world_size, seed = numbers
    seen = data.draw(st.integers(0, n))
    order = Order(n, seed, 0, shuffle, block=8, window=4)
    total = num_batches(n, batch_size, world_size, remainder, seen)
    got: list[int] = []
    arguments = batch_size, world_size - 1, world_size, remainder, seen
    several = rows_of_batches(order, range(total), *arguments) if total else ()
    for number in range(total):
        step: list[int] = []
        for rank in range(world_size):
            (indices,), _, (valid,) = rows_of_batches(order, range(number, number + 1), batch_size, rank, world_size, remainder, seen)
            assert len(indices) == len(valid) == batch_size
            assert (np.diff(indices) >= 0).all()
            assert (indices[~valid] == order[:][-1]).all()
            step += indices[valid].tolist()
        # A step of all ranks is the next part of the order, whatever its split.
        assert sorted(step) == sorted(order[:][seen + len(got) : seen + len(got) + batch_size * world_size].tolist())
        got += step
        for each, (one,) in zip(several, rows_of_batches(order, range(number, number + 1), *arguments), strict=True):
            assert np.array_equal(each[number], one)
    left = n - seen
    assert len(set(got)) == len(got)
    assert len(got) == (left if remainder == "pad" else left - left % (batch_size * world_size))


def test_padding_repeats_the_last_sample() -> None:
    order = Order(5, 0, 0, shuffle=False)
    (first,), _, (valid,) = rows_of_batches(order, range(1), 4, 1, 2, "pad")
    assert first.tolist() == [4, 4, 4, 4]
    assert valid.tolist() == [True, False, False, False]
    (surplus,), _, (none_valid,) = rows_of_batches(order, range(1), 4, 2, 3, "pad")
    assert surplus.tolist() == [4, 4, 4, 4]
    assert not none_valid.any()


@pytest.mark.parametrize(("number", "rank"), [(2, 0), (-1, 0), (0, 2), (0, -1)])
def test_there_is_no_batch_outside_the_epoch(number: int, rank: int) -> None:
    with pytest.raises(IndexError, match="out of range"):
        rows_of_batches(Order(8, 0, 0), range(number, number + 1), 2, rank, 2, "drop")
    with pytest.raises(IndexError, match="out of range"):
        rows_of_batches(Order(8, 0, 0), range(1, 3), 2, 0, 2, "drop")


def test_num_batches() -> None:
    assert [num_batches(10, 2, 2, "drop"), num_batches(10, 2, 2, "pad"), num_batches(10, 2, 2, "drop", 3)] == [2, 3, 1]
    assert [num_batches(3, 4, 1, "drop"), num_batches(3, 4, 1, "pad"), num_batches(3, 4, 1, "pad", 3), num_batches(0, 1, 1, "pad")] == [
        0,
        1,
        0,
        0,
    ]
    for arguments, words in [
        ((3, 0, 1, "drop"), "batch_size 0"),
        ((3, 1, 0, "drop"), "world_size 0"),
        ((3, 1, 1, "keep"), "'keep', expected 'drop' or 'pad'"),
        ((3, 1, 1, "pad", 4), "samples_seen is 4"),
    ]:
        with pytest.raises(ValueError, match=words):
            num_batches(*arguments)  # type: ignore[arg-type]  # a wrong remainder is one of the cases


# State

STATE = State(ORDER_VERSION, "abc", 100, -5, 2, 64)


def test_state_goes_through_json() -> None:
    raw = json.loads(json.dumps(STATE.to_dict()))
    assert raw == {"order_version": 1, "fingerprint": "abc", "num_samples": 100, "seed": -5, "epoch": 2, "samples_seen": 64}
    assert State.from_dict(raw) == STATE


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"epoch": None}, "'epoch' is None, expected an integer of 0 or more"),
        ({"epoch": -1}, "'epoch' is -1"),
        ({"seed": 1.0}, "'seed' is 1.0, expected an integer"),
        ({"samples_seen": True}, "'samples_seen' is True"),
        ({"samples_seen": 101}, "expected at most 'num_samples' = 100"),
        ({"fingerprint": 3}, "'fingerprint' is 3, expected a string"),
        ({"model": 1}, "'model' is unknown"),
    ],
)
def test_state_refuses(change: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match="not a loader state") as e:
        State.from_dict({**STATE.to_dict(), **change})
    assert words in str(e.value)


def test_state_lists_all_problems() -> None:
    with pytest.raises(ValueError, match=r"'order_version' is missing; .*'seed' is missing; .*'x' is unknown"):
        State.from_dict({"x": 1, "epoch": 0})


def test_state_of_other_data_is_refused() -> None:
    STATE.check_same_data(State(ORDER_VERSION, "abc", 100, 7, 0, 0))
    with pytest.raises(ValueError, match="another data set: 100 samples, fingerprint 'abc'; this one has 99, 'abc'"):
        STATE.check_same_data(State(ORDER_VERSION, "abc", 99, -5, 0, 0))
    with pytest.raises(ValueError, match="this one has 100, 'abd'"):
        STATE.check_same_data(State(ORDER_VERSION, "abd", 100, -5, 0, 0))
    with pytest.raises(ValueError, match="order_version is 1, this loader's 0"):
        STATE.check_same_data(State(STORED_ORDER, "abc", 100, -5, 0, 0))


# Quality


def test_quality_tells_good_from_bad() -> None:
    n, batch_size = 32_768, 128
    by_class = np.arange(n) * 64 // n
    packed = by_class[permutation(n, 99)]  # labels by stored position after a shuffle at pack time
    block = [Order(n, 0, epoch)[:] for epoch in (0, 1)]
    whole = shuffle_quality(permutation(n, 1), permutation(n, 2), batch_size, by_class)
    assert whole.co_batch == pytest.approx(1, abs=0.05)
    assert whole.label_chi2 == pytest.approx(1, abs=0.05)
    ours = shuffle_quality(block[0], block[1], batch_size, packed)
    assert 1 < ours.co_batch < 1.3
    assert ours.label_chi2 == pytest.approx(1, abs=0.05)
    unpacked = shuffle_quality(block[0], block[1], batch_size, by_class)
    assert unpacked.label_chi2 is not None
    assert unpacked.label_chi2 > 1.2
    stored = shuffle_quality(np.arange(n), np.arange(n), batch_size, packed)
    assert stored.co_batch == pytest.approx((n - 1) / (batch_size - 1))  # every pair meets again


def test_quality_without_labels_or_with_one() -> None:
    order = permutation(100, 0)
    assert shuffle_quality(order, order, 10).label_chi2 is None
    assert shuffle_quality(order, order, 10, np.zeros(100, np.int64)).label_chi2 is None


def test_quality_refuses() -> None:
    for second, batch_size in ((9, 2), (10, 1), (10, 11)):
        with pytest.raises(ValueError, match="orders of 10 and"):
            shuffle_quality(np.arange(10), np.arange(second), batch_size)
