from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batch_data import MemoryDataset, producer_threads
from loaders.batches import BatchLoader, default_workers
from loaders.dataset import PackedDataset, SampleError
from loaders.format import Layout
from loaders.memmap import MemmapDataset
from loaders.sampling import Order, Remainder
from loaders.shards import ShardDataset
from packed_data import Packed, write_packed


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    assert producer_threads() == []


def rows(batches: Any) -> list[list[int]]:
    return [batch["index"].tolist() for batch in batches]


def valid_rows(batches: Any) -> list[int]:
    return [i for batch in batches for i in batch["index"][batch.get("valid", slice(None))].tolist()]


# Order


def test_the_order_is_that_of_sampling() -> None:
    order = Order(100, 5, 0)[:]
    assert rows(BatchLoader(MemoryDataset(100), batch_size=16, seed=5)) == [sorted(order[b : b + 16].tolist()) for b in range(0, 96, 16)]


@pytest.mark.parametrize("transform", [None, lambda sample, rng: {**sample, "draw": rng.random()}])
def test_workers_change_nothing(transform: object) -> None:
    ds = MemoryDataset(90, "detection", transform=transform)
    ds.delay_s = lambda i: 0.0002 * (i % 5)
    runs = [list(BatchLoader(ds, batch_size=8, seed=3, workers=workers)) for workers in (0, 1, 2, 4)]
    for run in runs[1:]:
        assert len(run) == len(runs[0]) == 11
        for batch, expected in zip(run, runs[0], strict=True):
            assert batch.keys() == expected.keys()
            for name, value in batch.items():
                torch.testing.assert_close(value, expected[name], rtol=0, atol=0)


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 60), st.integers(1, 9), st.integers(1, 3), st.sampled_from(["drop", "pad"]), st.booleans())
def test_ranks_share_an_epoch(n: int, batch_size: int, world_size: int, remainder: Remainder, shuffle: bool) -> None:
    if remainder == "drop":
        n = max(n, batch_size * world_size)
    ranks = [
        BatchLoader(MemoryDataset(n), batch_size, shuffle, workers=1, remainder=remainder, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    batches = [list(rank) for rank in ranks]
    assert len({len(b) for b in batches} | {len(rank) for rank in ranks}) == 1
    assert all(len(batch["index"]) == batch_size for b in batches for batch in b)
    assert all(("valid" in batch) == (remainder == "pad") for b in batches for batch in b)
    got = [i for b in batches for i in valid_rows(b)]
    assert len(set(got)) == len(got) == (n if remainder == "pad" else n - n % (batch_size * world_size))


def test_ranks_come_from_torch_distributed(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1)
    try:
        loader = BatchLoader(MemoryDataset(10), 2)
        assert (loader.rank, loader.world_size) == (0, 1)
    finally:
        torch.distributed.destroy_process_group()


def test_default_workers_are_the_cores_divided_by_the_local_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(12)), raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert default_workers() == 12
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "5")
    assert BatchLoader(MemoryDataset(10), 2).workers == default_workers() == 2
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "50")
    assert default_workers() == 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "two")
    with pytest.raises(ValueError, match="LOCAL_WORLD_SIZE is 'two'"):
        default_workers()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"batch_size": 11}, "no batch in an epoch: 10 samples, batch_size 11 x world_size 1 = 11 a step"),
        ({"batch_size": 4, "world_size": 3, "rank": 0}, "batch_size 4 x world_size 3 = 12 a step, remainder 'drop': take a smaller"),
        ({"batch_size": 0}, "batch_size 0"),
        ({"batch_size": 1, "rank": 1, "world_size": 1}, "rank is 1 of world_size 1"),
        ({"batch_size": 1, "rank": -1, "world_size": 2}, "rank is -1"),
        ({"batch_size": 1, "workers": -1}, "workers is -1"),
        ({"batch_size": 1, "remainder": "keep"}, "remainder is 'keep'"),
        pytest.param(
            {"batch_size": 1, "pin_memory": True},
            "pin_memory=True needs CUDA",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA here"),
        ),
    ],
)
def test_arguments_out_of_range_are_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        BatchLoader(MemoryDataset(10), **arguments)


def test_an_empty_data_set_is_refused() -> None:
    with pytest.raises(ValueError, match=r"0 samples.*the data set is empty"):
        BatchLoader(MemoryDataset(0), 4, remainder="pad")


# Epochs and position


def test_epochs_follow_each_other() -> None:
    loader = BatchLoader(MemoryDataset(40), 8)
    first, second = rows(loader), rows(loader)
    assert first != second
    assert sorted(chain(*first)) == sorted(chain(*second)) == list(range(40))
    loader.set_epoch(0)
    assert rows(loader) == first
    assert rows(loader) == second


def test_leaving_an_epoch_early_starts_it_again() -> None:
    loader = BatchLoader(MemoryDataset(40), 8)
    whole = rows(BatchLoader(MemoryDataset(40), 8))
    for _ in loader:
        break
    assert loader.state_dict()["samples_seen"] == 8
    assert rows(loader) == whole
    assert loader.state_dict()["epoch"] == 1


def test_len_is_what_the_loop_gives() -> None:
    loader = BatchLoader(MemoryDataset(41), 8)
    assert len(loader) == 5
    iterator = iter(loader)
    for left in (4, 3, 2, 1, 0):
        next(iterator)
        assert len(iterator) == left
        assert len(loader) == 5
    assert list(iterator) == []
    assert len(BatchLoader(MemoryDataset(41), 8, remainder="pad")) == 6


def test_the_state_counts_what_was_received() -> None:
    ds = MemoryDataset(40)
    loader = BatchLoader(ds, 8, workers=4, seed=9)
    assert loader.state_dict() == {
        "order_version": 1,
        "fingerprint": "memory 40",
        "num_samples": 40,
        "seed": 9,
        "epoch": 0,
        "samples_seen": 0,
    }
    seen = []
    for _ in loader:
        state = loader.state_dict()
        seen.append((state["epoch"], state["samples_seen"]))
    assert seen == [(0, 8), (0, 16), (0, 24), (0, 32), (1, 0)]
    padded = BatchLoader(ds, 32, remainder="pad")
    next(iter(padded))
    assert padded.state_dict()["samples_seen"] == 32


@settings(deadline=None, max_examples=40)
@given(st.data(), st.integers(20, 80), st.sampled_from(["drop", "pad"]), st.booleans())
def test_resume_gives_exactly_the_rest(data: st.DataObject, n: int, remainder: Remainder, shuffle: bool) -> None:
    before, after = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9))
    world_size, ranks, seed = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 3)), data.draw(st.integers(-3, 3))
    epoch, stop = data.draw(st.integers(0, 2)), data.draw(st.integers(0, n // (before * world_size) - 1))
    received: list[int] = []
    states = []
    for rank in range(world_size):
        options: dict[str, Any] = {"remainder": remainder, "rank": rank, "world_size": world_size}
        with BatchLoader(MemoryDataset(n), before, shuffle, seed, workers=2, **options) as first:
            first.set_epoch(epoch)
            received += [i for _, batch in zip(range(stop), first, strict=False) for i in batch["index"].tolist()]
            states.append(first.state_dict())
    state = states[0]
    assert states == [state] * world_size

    got = list(received)
    expected = Order(n, seed, epoch, shuffle)[:].tolist()
    if remainder == "drop" and n < after * ranks:
        return  # no such loader
    for rank in range(ranks):
        second = BatchLoader(MemoryDataset(n), after, shuffle, workers=1, remainder=remainder, rank=rank, world_size=ranks)
        second.load_state_dict(state)
        second.set_epoch(epoch)  # the usual loop over epochs calls it; the position stays
        assert second.state_dict() == state
        remaining = len(second)
        batches = list(second)
        assert len(batches) == remaining
        got += valid_rows(batches)
        assert second.state_dict() == {**state, "epoch": epoch + 1, "samples_seen": 0}
        assert len(second) == len(BatchLoader(MemoryDataset(n), after, remainder=remainder, rank=rank, world_size=ranks))
    left = len(expected) - len(received)
    if remainder == "drop":
        expected = expected[: len(expected) - left % (after * ranks)]
    assert len(got) == len(expected)
    assert sorted(got) == sorted(expected)


def test_an_epoch_of_which_nothing_remains_is_passed_over() -> None:
    loader = BatchLoader(MemoryDataset(10), 4)
    next(iter(loader))
    state = loader.state_dict()
    larger = BatchLoader(MemoryDataset(10), 8)
    larger.load_state_dict(state)
    assert len(larger) == 0
    assert list(larger) == []
    assert larger.state_dict()["epoch"] == 1
    assert len(list(larger)) == 1


def test_a_loaded_position_serves_one_iterator() -> None:
    loader = BatchLoader(MemoryDataset(40), 8)
    whole = rows(BatchLoader(MemoryDataset(40), 8))
    loader.load_state_dict({**loader.state_dict(), "samples_seen": 24})
    for batch in loader:
        assert batch["index"].tolist() == whole[3]
        break
    assert rows(loader) == whole


def test_a_state_of_other_data_or_order_is_refused_and_changes_nothing() -> None:
    state = BatchLoader(MemoryDataset(40), 8, seed=5).state_dict()
    other = BatchLoader(MemoryDataset(39), 8)
    with pytest.raises(ValueError, match="another data set: 40 samples"):
        other.load_state_dict(state)
    with pytest.raises(ValueError, match="order_version"):
        BatchLoader(MemoryDataset(40), 8, shuffle=False).load_state_dict(state)
    with pytest.raises(ValueError, match="'seed' is missing"):
        other.load_state_dict({"epoch": 1})
    assert other.state_dict() == BatchLoader(MemoryDataset(39), 8).state_dict()


def test_set_epoch_refuses_negative_numbers() -> None:
    with pytest.raises(ValueError, match="epoch is -1"):
        BatchLoader(MemoryDataset(40), 8).set_epoch(-1)


# Iterators and threads


def test_a_newer_iterator_ends_the_older() -> None:
    loader = BatchLoader(MemoryDataset(40), 8)
    older = iter(loader)
    next(older)
    newer = iter(loader)
    first = next(newer)["index"].tolist()
    with pytest.raises(RuntimeError, match="one iterator at a time"):
        next(older)
    assert [first, *rows(newer)] == rows(BatchLoader(MemoryDataset(40), 8))
    assert loader.state_dict()["epoch"] == 1
    with pytest.raises(StopIteration):
        next(newer)


@pytest.mark.parametrize(
    "action",
    [lambda loader: loader.close(), lambda loader: loader.set_epoch(2), lambda loader: loader.load_state_dict(loader.state_dict())],
)
def test_moving_or_closing_ends_the_iterator(action: Any) -> None:
    loader = BatchLoader(MemoryDataset(40), 8)
    iterator = iter(loader)
    next(iterator)
    action(loader)
    assert producer_threads() == []
    with pytest.raises(RuntimeError, match="this iterator was ended"):
        next(iterator)


def test_set_epoch_to_the_current_one_leaves_a_running_iterator_alone() -> None:
    loader = BatchLoader(MemoryDataset(40), 8)
    iterator = iter(loader)
    first = next(iterator)
    loader.set_epoch(0)
    assert [first["index"].tolist(), *rows(iterator)] == rows(BatchLoader(MemoryDataset(40), 8))


def test_no_thread_is_left() -> None:
    loader = BatchLoader(MemoryDataset(400), 8, workers=3)
    for _ in loader:
        assert len(producer_threads()) == 3
        break
    assert producer_threads() == []

    with loader:
        held = iter(loader)
        next(held)
    assert producer_threads() == []
    with pytest.raises(RuntimeError, match="is closed"):
        iter(loader)

    loader = BatchLoader(MemoryDataset(400), 8, workers=3)
    iterator = iter(loader)
    next(iterator)
    del loader, iterator
    gc.collect()
    assert producer_threads() == []

    def interrupted() -> None:
        for _ in BatchLoader(MemoryDataset(400), 8, workers=3):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    gc.collect()
    assert producer_threads() == []


def test_the_data_set_is_read_by_the_threads_only() -> None:
    ds = MemoryDataset(40)
    list(BatchLoader(ds, 8, workers=2))
    assert {thread.name.rpartition("-")[0] for thread in ds.threads} == {"loaders-producer"}


def test_an_error_comes_at_its_batch_and_the_rest_can_be_resumed() -> None:
    ds = MemoryDataset(40)
    ds.bad = {17}
    loader = BatchLoader(ds, 8, shuffle=False, workers=4)
    got: list[list[int]] = []
    with pytest.raises(SampleError, match=r"shard-000000\.tar: sample 000001017 \(source images/17\.jpg\)"):
        got.extend(batch["index"].tolist() for batch in loader)
    assert got == [list(range(8)), list(range(8, 16))]
    assert producer_threads() == []
    state = loader.state_dict()
    assert state["samples_seen"] == 16
    ds.bad = set()
    loader.load_state_dict(state)
    assert rows(loader) == [list(range(s, s + 8)) for s in (16, 24, 32)]


# Memory


def test_all_batches_of_an_epoch_can_be_held() -> None:
    for task in ("classification", "detection"):
        batches = list(BatchLoader(MemoryDataset(400, task), 8, workers=3))
        for batch in batches:
            assert (batch["image"] == (batch["index"] % 251)[:, None, None, None]).all()
            assert (batch["key"] == 1000 + batch["index"]).all()
        assert len({batch["image"].data_ptr() for batch in batches}) == len(batches) == 50


def test_memory_is_used_again_when_batches_are_dropped() -> None:
    loader = BatchLoader(MemoryDataset(800), 8, workers=2)
    places = {batch["image"].data_ptr() for _ in range(3) for batch in loader}
    assert len(places) <= 10  # of 300


def test_a_part_of_a_batch_keeps_its_content() -> None:
    loader = BatchLoader(MemoryDataset(400), 8, workers=2)
    held = [(int(batch["index"][3]), batch["image"][3]) for batch in loader]
    for index, image in held:
        assert (image == index % 251).all()


HELD = ("batch", "image", "row", "view of a view", "numpy view", "storage", "box tensor", "labels", "key", "value", "two parts")


def as_float(sample: dict[str, Any], _: object) -> dict[str, Any]:
    return {**sample, "image": sample["image"].astype(np.float32) / 2}


def held_parts(batch: dict[str, Any]) -> dict[str, Any]:
    """Ways to hold on to a batch, from all of it to one value."""
    return {
        "batch": batch,
        "image": batch["image"],
        "row": batch["image"][3],
        "view of a view": batch["image"].permute(0, 2, 3, 1)[1:, ..., 0].reshape(-1)[2:],
        "numpy view": batch["image"].numpy()[0],
        "storage": batch["image"].untyped_storage(),
        "box tensor": batch["boxes"][-1],
        "labels": batch["labels"][1:],
        "key": batch["key"],
        "value": batch["index"][0],
        "two parts": [batch["image"][2], batch["difficult"][0]],
    }


def content(held: Any) -> list[bytes]:
    """Every value of what is held, as it is now."""
    if isinstance(held, dict | list):
        return [data for value in (held.values() if isinstance(held, dict) else held) for data in content(value)]
    array = np.array(held.tolist(), np.uint8) if isinstance(held, torch.UntypedStorage) else np.asarray(held)
    return [array.tobytes()]


@pytest.mark.slow
@settings(deadline=None, max_examples=15)
@given(
    st.sampled_from(["plain", "transform", "float", "runs"]),
    st.integers(0, 4),
    st.lists(st.tuples(st.sampled_from([None, *HELD]), st.integers(0, 12)), min_size=15, max_size=40),
)
def test_what_is_held_of_a_batch_never_changes(kind: str, workers: int, pattern: list[tuple[str | None, int]]) -> None:
    """Each batch is dropped, or a part of it is held for some batches, while the loader goes on and uses memory again."""
    change = {"transform": lambda sample, _: sample, "float": as_float}.get(kind)
    ds = MemoryDataset(160, "detection", transform=change)
    ds.at_once = 3 if kind == "runs" else 1
    loader = BatchLoader(ds, 8, workers=workers)
    holding: list[tuple[int, Any, Any]] = []  # until when, what, its content when it came
    batches = (batch for _ in range(2) for batch in loader)
    for number, (part, span) in enumerate(pattern):
        batch = next(batches)
        if part is not None:
            held = held_parts(batch)[part]
            holding.append((number + span, held, content(held)))
        del batch
        for until, held, before in holding:
            assert until > number or content(held) == before
        holding = [entry for entry in holding if entry[0] > number]
    batches.close()
    loader.close()
    for _, held, before in holding:
        assert content(held) == before


def test_closing_leaves_held_batches_valid() -> None:
    loader = BatchLoader(MemoryDataset(40), 8)
    batch = next(iter(loader))
    loader.close()
    assert (batch["image"] == batch["index"][:, None, None, None]).all()


# On packed data


def opened(packed: Packed, **options: Any) -> PackedDataset:
    return (ShardDataset if packed.layout == "tar" else MemmapDataset)(packed.root, **options)


def check(packed: Packed, batch: dict[str, Any]) -> None:
    for row, index in enumerate(batch["index"].tolist()):
        np.testing.assert_array_equal(batch["image"][row].permute(1, 2, 0).numpy(), packed.images[index])
        assert int(batch["key"][row]) == packed.keys[index]
        if packed.task == "classification":
            assert int(batch["label"][row]) == packed.labels[index]
        if packed.task == "detection":
            np.testing.assert_array_equal(batch["boxes"][row].numpy(), packed.boxes[index])
            np.testing.assert_array_equal(batch["labels"][row].numpy(), packed.box_labels[index])
            np.testing.assert_array_equal(batch["difficult"][row].numpy(), packed.difficult[index])


@pytest.mark.parametrize("layout", ["tar", "memmap"])
@pytest.mark.parametrize("task", ["classification", "detection", "unlabelled"])
@pytest.mark.parametrize("transform", [False, True])
def test_packed_data_arrives_as_it_is(tmp_path: Path, layout: Layout, task: Any, transform: bool) -> None:
    packed = write_packed(tmp_path / "out", layout, task, counts=(5, 1, 7))
    ds = opened(packed, transform=(lambda sample, _: sample) if transform else None)
    loader = BatchLoader(ds, 4, workers=2, remainder="pad")
    for _ in range(2):
        batches = list(loader)
        assert len(batches) == 4
        for batch in batches:
            check(packed, batch)
        assert sorted(valid_rows(batches)) == list(range(13))


def test_a_float_memmap_keeps_its_dtype(tmp_path: Path) -> None:
    packed = write_packed(tmp_path / "out", "memmap", dtype=np.float16)
    batch = next(iter(BatchLoader(MemmapDataset(packed.root), 4)))
    assert batch["image"].dtype == torch.float16
    check(packed, batch)


def test_a_selection_is_its_own_data_set(tmp_path: Path) -> None:
    packed = write_packed(tmp_path / "out", "memmap")
    ds = MemmapDataset(packed.root)
    fold = ds.select([7, 2, 5, 3])
    loader = BatchLoader(fold, 2)
    keys = [key for batch in loader for key in batch["key"].tolist()]
    assert sorted(keys) == sorted(packed.keys[i] for i in (7, 2, 5, 3))
    with pytest.raises(ValueError, match="another data set"):
        loader.load_state_dict(BatchLoader(ds, 2).state_dict())


def test_tar_images_of_different_size(tmp_path: Path) -> None:
    packed = write_packed(tmp_path / "out", "tar", sizes=((12, 16), (10, 16)))
    with pytest.raises(ValueError, match="differ in size"):
        BatchLoader(ShardDataset(packed.root), 4)
    ds = ShardDataset(packed.root, transform=lambda sample, _: {**sample, "image": sample["image"][:10]})
    for batch in BatchLoader(ds, 5):
        assert batch["image"].shape == (5, 3, 10, 16)


def test_a_damaged_sample_is_named(tmp_path: Path) -> None:
    packed = write_packed(tmp_path / "out", "tar", counts=(4, 4), parts=("png",))
    shard = packed.shard(1)
    data = shard.read_bytes()
    shard.write_bytes(data.replace(b"IDAT", b"XXXX"))
    with pytest.raises(SampleError, match=r"shard-000001\.tar: sample 000000031 \(source images/bild_4_ä\.png\)"):
        list(BatchLoader(ShardDataset(packed.root), 4, shuffle=False))


def test_replacement_keeps_boxes_with_their_image(tmp_path: Path) -> None:
    packed = write_packed(tmp_path / "out", "tar", counts=(4, 4), parts=("png",))
    shard = packed.shard(0)
    data = shard.read_bytes()
    place = data.index(b"IDAT")
    shard.write_bytes(data[:place] + b"XXXX" + data[place + 4 :])
    with pytest.warns(UserWarning, match="sample 0 was replaced by sample 1"):
        batches = list(BatchLoader(ShardDataset(packed.root, on_error="replace"), 4, shuffle=False))
    assert rows(batches) == [[1, 1, 2, 3], [4, 5, 6, 7]]
    for batch in batches:
        check(packed, batch)


@pytest.mark.parametrize("given", [{"rank": 1}, {"world_size": 2}])
def test_rank_and_world_size_are_given_together(given: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="give both or neither"):
        BatchLoader(MemoryDataset(8), 2, **given)


# Runs of small batches


def same_batch(batch: dict[str, Any], other: dict[str, Any]) -> None:
    assert batch.keys() == other.keys()
    for name, value in batch.items():
        parts, others = (v if isinstance(v, list) else [v] for v in (value, other[name]))
        assert all(torch.equal(part, o) and part.stride() == o.stride() for part, o in zip(parts, others, strict=True))


@pytest.mark.parametrize("remainder", ["drop", "pad"])
@pytest.mark.parametrize("rank", [0, 1])
def test_runs_change_nothing(rank: int, remainder: Remainder) -> None:
    ds = MemoryDataset(103, "detection")
    loaders = [BatchLoader(ds, 4, workers=2, rank=rank, world_size=2, remainder=remainder) for _ in range(2)]
    expected = [list(loaders[0]) for _ in range(2)]
    ds.at_once, ds.calls = 3, []
    found = [list(loaders[1]) for _ in range(2)]
    for batch, other in zip(chain(*expected), chain(*found), strict=True):
        same_batch(batch, other)
    assert max(map(len, ds.calls)) == 3 * 4
    assert len(ds.calls) == 2 * -(-len(expected[0]) // 3)
    # Resumed in the middle of a run
    received = islice(iter(loaders[1]), 7)
    assert len(list(received)) == 7
    resumed = BatchLoader(ds, 4, workers=0, rank=rank, world_size=2, remainder=remainder)
    resumed.load_state_dict(loaders[1].state_dict())
    loaders[0].set_epoch(2)
    for batch, other in zip(islice(iter(loaders[0]), 7, None), resumed, strict=True):
        same_batch(batch, other)


def test_batches_of_a_run_share_no_storage_nor_version() -> None:
    ds = MemoryDataset(40)
    ds.at_once = 4
    first, second = islice(iter(BatchLoader(ds, 4, workers=0)), 2)
    assert len(ds.calls) == 1
    assert first["image"].untyped_storage().nbytes() == first["image"].numel()
    version = second["image"]._version
    first["image"].add_(1)
    assert second["image"]._version == version


def test_batches_that_are_changed_are_made_one_by_one() -> None:
    """A run of them could need any amount of memory and time."""
    ds = MemoryDataset(400)
    ds.at_once = 4
    changed: list[int] = []
    loader = BatchLoader(ds, 4, workers=2, batch_transform=lambda batch: changed.append(1) or batch)
    with loader:
        batches = iter(loader)
        next(batches)
        assert len(changed) <= 1 + 2 + 2 + 2  # given, in the making, ahead
    assert {len(call) for call in ds.calls} == {4}


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_in_a_run_comes_at_its_batch(workers: int) -> None:
    ds = MemoryDataset(40)
    ds.at_once, ds.bad = 4, {22}
    batches = iter(BatchLoader(ds, 4, shuffle=False, workers=workers))
    assert rows(islice(batches, 5)) == [[4 * i, 4 * i + 1, 4 * i + 2, 4 * i + 3] for i in range(5)]
    with pytest.raises(SampleError, match="images/22") as caught:
        next(batches)
    assert caught.value.__notes__ == ["in batch 5 (from 0) of epoch 0, rank 0"]


def test_small_memmap_pictures_from_few_shards_are_gathered_several_batches_at_a_time(tmp_path: Path) -> None:
    few = MemmapDataset(write_packed(tmp_path / "few", "memmap", counts=(20, 20)).root)  # 576 bytes each
    assert [few.batches_at_once(n) for n in (1, 15, 16, 40)] == [1, 1, 16, 16]
    assert [few.batches_at_once(n) for n in (4096, 20_000, 40_000)] == [7, 1, 1]
    many = MemmapDataset(write_packed(tmp_path / "many", "memmap", counts=(1,) * 20).root)
    assert [many.batches_at_once(n) for n in (20, 159, 160)] == [1, 1, 16]
