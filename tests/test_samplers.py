"""The samplers for torch's DataLoader, and that order and pixels are one, whoever asks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from batch_data import MemoryDataset
from loaders.augment import Compose, Flip, RandomResizedCrop
from loaders.batches import BatchLoader
from loaders.collate import collate_list
from loaders.format import Layout
from loaders.memmap import MemmapDataset
from loaders.samplers import PackedBatchSampler, PackedSampler
from loaders.sampling import Order, Remainder
from loaders.shards import ShardDataset
from packed_data import write_packed


def rows(loader: Any) -> list[list[int]]:
    return [batch["index"].tolist() for batch in loader]


# One order, the same pixels

EPOCHS, GLOBAL = 2, 8


def digests(batches_of_ranks: list[list[dict[str, Any]]]) -> list[str]:
    """One hash per global batch: which samples, and every pixel and box of them, whoever got them."""
    result = []
    for step in zip(*batches_of_ranks, strict=True):
        samples = []
        for batch in step:
            for row, index in enumerate(batch["index"].tolist()):
                parts = (batch["image"][row].contiguous(), batch["boxes"][row], batch["labels"][row])
                samples.append((index, hashlib.sha256(b"".join(p.numpy().tobytes() for p in parts)).digest()))
        result.append(hashlib.sha256(repr(sorted(samples)).encode()).hexdigest())
    return result


def by_threads(open_ds: Any, workers: int, world_size: int) -> list[str]:
    ranks = []
    for rank in range(world_size):
        options: dict[str, Any] = {"seed": 5, "workers": workers, "rank": rank, "world_size": world_size}
        with BatchLoader(open_ds(), GLOBAL // world_size, **options) as loader:
            ranks.append([batch for _ in range(EPOCHS) for batch in loader])
    return digests(ranks)


def by_dataloader(open_ds: Any, workers: int, world_size: int, kind: str) -> list[str]:
    ranks = []
    for rank in range(world_size):
        ds, size = open_ds(), GLOBAL // world_size
        options: dict[str, Any] = {"seed": 5, "rank": rank, "world_size": world_size}
        if kind == "batches":
            sampler: Any = {"batch_sampler": PackedBatchSampler(ds, size, **options)}
        else:
            sampler = {"sampler": PackedSampler(ds, size, **options), "batch_size": size}
        loader = DataLoader(ds, num_workers=workers, collate_fn=collate_list, persistent_workers=workers > 0, **sampler)
        ranks.append([batch for _ in range(EPOCHS) for batch in loader])
    return digests(ranks)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tar", "memmap"])
def test_order_and_augmented_pixels_are_the_same_for_all(tmp_path: Path, layout: Layout) -> None:
    packed = write_packed(tmp_path / "out", layout, counts=(13, 1, 16), sizes=((24, 40),), grid=(True,))

    def open_ds() -> Any:
        transform = Compose(RandomResizedCrop(12), Flip())
        return (ShardDataset if layout == "tar" else MemmapDataset)(packed.root, transform=transform, seed=11)

    expected = by_threads(open_ds, 1, 1)
    assert len(set(expected)) == len(expected) == EPOCHS * (30 // GLOBAL)
    for workers in (0, 1, 2, 4):
        for world_size in (1, 2, 4):
            assert by_threads(open_ds, workers, world_size) == expected, (workers, world_size)
    for workers, world_size, kind in (
        (0, 1, "batches"),
        (0, 4, "batches"),
        (2, 1, "batches"),
        (2, 2, "batches"),
        (0, 2, "indices"),
        (2, 1, "indices"),
    ):
        assert by_dataloader(open_ds, workers, world_size, kind) == expected, (workers, world_size, kind)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 80), st.integers(1, 9), st.integers(1, 4), st.sampled_from(["drop", "pad"]), st.booleans(), st.booleans())
def test_batches_are_those_of_the_batch_loader(
    n: int, batch_size: int, world_size: int, remainder: Remainder, shuffle: bool, weighted: bool
) -> None:
    if remainder == "drop":
        n = max(n, batch_size * world_size)
    ds = MemoryDataset(n)
    weights = np.arange(1, n + 1) if weighted and shuffle else None
    for rank in range(world_size):
        options: dict[str, Any] = {"remainder": remainder, "rank": rank, "world_size": world_size, "weights": weights}
        loader = BatchLoader(ds, batch_size, shuffle, 3, workers=0, **options)
        batches, indices = PackedBatchSampler(ds, batch_size, shuffle, 3, **options), PackedSampler(ds, batch_size, shuffle, 3, **options)
        for _ in range(2):
            made = list(loader)
            expected = [batch["index"].tolist() for batch in made]
            assert len(batches) == len(expected)
            assert list(batches) == expected
            assert len(indices) == batch_size * len(expected)
            assert list(indices) == list(chain(*expected))
            assert loader.state_dict() == batches.state_dict() == indices.state_dict()
            for number, batch in enumerate(made):
                valid = batch["valid"].tolist() if remainder == "pad" else [True] * batch_size
                assert batches.valid(number).tolist() == indices.valid(number).tolist() == valid


# States


@pytest.mark.parametrize("kind", [PackedBatchSampler, PackedSampler])
def test_the_state_counts_batches_that_were_taken(kind: Any) -> None:
    sampler = kind(MemoryDataset(40), 8, seed=9)
    seen = []
    for number, _ in enumerate(sampler, 1):
        state = sampler.state_dict()
        if kind is PackedBatchSampler or number % 8 == 0:
            seen.append((state["epoch"], state["samples_seen"]))
        elif number < 8:
            assert state["samples_seen"] == 0
    assert seen == [(0, 8), (0, 16), (0, 24), (0, 32), (1, 0)]
    assert json.loads(json.dumps(sampler.state_dict())) == sampler.state_dict()


@settings(deadline=None, max_examples=200)
@given(st.integers(8, 200), st.sampled_from(["drop", "pad"]), st.booleans(), st.data())
def test_resume_at_any_step_under_another_split(n: int, remainder: Remainder, weighted: bool, data: st.DataObject) -> None:
    """No draw is missed and none comes twice, over all ranks, for any batch sizes and world sizes before and after."""
    sizes = st.tuples(st.integers(1, 9), st.integers(1, 4))
    (before, world), (after, later) = data.draw(sizes), data.draw(sizes)
    ds, weights, epoch, seed = (
        MemoryDataset(n),
        np.arange(1, n + 1) if weighted else None,
        data.draw(st.integers(0, 3)),
        data.draw(st.integers(0, 9)),
    )
    first = [PackedBatchSampler(ds, before, True, seed, "pad", rank, world, weights) for rank in range(world)]
    for sampler in first:
        sampler.set_epoch(epoch)
    stop = data.draw(st.integers(0, len(first[0]) - 1))
    got: list[int] = []
    states = []
    for sampler in first:
        for number, batch in zip(range(stop), sampler, strict=False):
            got += np.array(batch)[sampler.valid(number)].tolist()
        if stop:
            assert sampler.state_dict(received=stop) == sampler.state_dict()
        states.append(sampler.state_dict())
    assert all(state == states[0] for state in states)
    whole = list(chain(*PackedBatchSampler(ds, 1, True, seed, weights=weights, rank=0, world_size=1))) if epoch == 0 else None
    for rank in range(later):
        if remainder == "drop" and n < after * later:
            return  # no such loader
        sampler = PackedBatchSampler(ds, after, True, 77, remainder, rank, later, weights)
        sampler.load_state_dict(states[0])
        sampler.set_epoch(epoch)
        assert len(sampler) == (n - stop * before * world) // (after * later) + (
            remainder == "pad" and (n - stop * before * world) % (after * later) > 0
        )
        for number, batch in enumerate(sampler):
            got += np.array(batch)[sampler.valid(number)].tolist()
        assert sampler.state_dict() == {**states[0], "epoch": epoch + 1, "samples_seen": 0}
    left = (n - stop * before * world) % (after * later) if remainder == "drop" else 0
    assert len(got) == n - left
    if weights is None:
        assert len(set(got)) == len(got)
        if left == 0:
            assert sorted(got) == sorted(Order(n, seed, epoch)[:].tolist())
    elif whole is not None and left == 0:
        assert sorted(got) == sorted(whole)


def test_states_of_sampler_and_batch_loader_resume_each_other() -> None:
    ds = MemoryDataset(40)
    sampler, loader = PackedBatchSampler(ds, 8), BatchLoader(ds, 8)
    whole = rows(BatchLoader(ds, 8))
    taken = iter(sampler)
    next(taken)
    loader.load_state_dict(sampler.state_dict())
    assert rows(loader) == whole[1:]
    sampler.load_state_dict({**loader.state_dict(), "epoch": 0, "samples_seen": 24})
    assert list(sampler) == whole[3:]
    with pytest.raises(ValueError, match="another data set"):
        sampler.load_state_dict(BatchLoader(MemoryDataset(41), 8).state_dict())
    with pytest.raises(ValueError, match="other weights"):
        PackedBatchSampler(ds, 8, weights=np.arange(40)).load_state_dict(sampler.state_dict())


class Stateful:
    """What torchdata's StatefulDataLoader does with a sampler, with `ahead` batches asked for before they are received."""

    def __init__(self, sampler: PackedBatchSampler, ahead: int, state: Any = None) -> None:
        self.batches: Iterator[list[int]] = iter(sampler)
        self.snapshot = sampler.state_dict()
        if state is not None:
            sampler.load_state_dict(state)
            self.batches, self.snapshot = iter(sampler), state
        self.sampler, self.ahead = sampler, ahead

    def __iter__(self) -> Iterator[list[int]]:
        waiting: list[tuple[list[int], Any]] = []
        for batch in self.batches:
            waiting.append((batch, self.sampler.state_dict()))
            if len(waiting) > self.ahead:
                given, self.snapshot = waiting.pop(0)
                yield given
        for given, self.snapshot in waiting:
            yield given


@pytest.mark.parametrize("ahead", [0, 4, 50])
def test_a_loader_that_keeps_states_by_batch_resumes_exactly(ahead: int) -> None:
    ds = MemoryDataset(83)
    first, second = list(PackedBatchSampler(ds, 8)), PackedBatchSampler(ds, 8)
    second.set_epoch(1)
    for stop in range(10):
        loader = Stateful(PackedBatchSampler(ds, 8), ahead)
        got = [batch for _, batch in zip(range(stop), loader, strict=False)]
        resumed = Stateful(PackedBatchSampler(ds, 8), ahead, loader.snapshot)
        assert got + list(resumed) == first
        assert list(Stateful(resumed.sampler, ahead)) == list(second)
        second.set_epoch(1)


def test_the_state_of_what_a_dataloader_gave() -> None:
    ds = MemoryDataset(40)
    ds.__getitem__ = None  # type: ignore[attr-defined]  # never read: only indices matter here
    sampler = PackedBatchSampler(ds, 8, seed=1)
    loader = DataLoader(range(40), batch_sampler=sampler, num_workers=2)  # type: ignore[arg-type]  # a range is a map-style data set
    got = [batch.tolist() for _, batch in zip(range(2), loader, strict=False)]
    assert sampler.state_dict()["samples_seen"] != 16  # asked for ahead
    state = sampler.state_dict(received=2)
    assert (state["epoch"], state["samples_seen"]) == (0, 16)
    other = PackedBatchSampler(ds, 8)
    other.load_state_dict(state)
    assert got + list(other) == list(PackedBatchSampler(ds, 8, seed=1))
    assert other.state_dict(received=3)["epoch"] == 1
    with pytest.raises(ValueError, match="received is 4, expected 0 to 3"):
        other.state_dict(received=4)


# Epochs and iterators


def test_epochs() -> None:
    sampler = PackedBatchSampler(MemoryDataset(40), 8)
    first, second = list(sampler), list(sampler)
    assert first != second
    sampler.set_epoch(0)
    assert list(sampler) == first
    sampler.set_epoch(1)  # where it is
    assert list(sampler) == second
    with pytest.raises(ValueError, match="epoch is -1"):
        sampler.set_epoch(-1)


def test_the_data_set_follows_the_epoch(tmp_path: Path) -> None:
    ds = MemmapDataset(write_packed(tmp_path / "out", "memmap").root)
    sampler = PackedBatchSampler(ds, 5)
    for epoch in range(3):
        for _ in sampler:
            assert ds.epoch == epoch
    sampler.set_epoch(7)
    assert ds.epoch == 2
    iter(sampler)
    assert ds.epoch == 7


def test_a_newer_iterator_ends_the_older() -> None:
    sampler = PackedBatchSampler(MemoryDataset(40), 8)
    older = iter(sampler)
    first = next(older)
    newer = iter(sampler)
    with pytest.raises(RuntimeError, match="one iterator at a time"):
        next(older)
    assert next(newer) == first
    sampler.set_epoch(3)
    with pytest.raises(RuntimeError, match="this iterator was ended"):
        next(newer)


@pytest.mark.parametrize("loaded", [False, True])
def test_a_batch_begun_before_the_sampler_was_moved_does_not_count(loaded: bool) -> None:
    sampler = PackedSampler(MemoryDataset(40), 4)
    elsewhere = {**sampler.state_dict(), "epoch": 5, "samples_seen": 8}
    indices = iter(sampler)
    next(indices)
    if loaded:
        sampler.load_state_dict(elsewhere)
    else:
        sampler.set_epoch(5)
    with pytest.raises(RuntimeError, match="this iterator was ended"):
        list(indices)
    assert sampler.state_dict() == {**elsewhere, "samples_seen": 8 if loaded else 0}


def test_what_was_received_counts_from_where_the_sampler_was_moved() -> None:
    sampler = PackedBatchSampler(MemoryDataset(40), 8)
    state = sampler.state_dict()
    list(sampler)
    sampler.load_state_dict({**state, "epoch": 3, "samples_seen": 16})
    assert sampler.state_dict(received=0) == {**state, "epoch": 3, "samples_seen": 16}
    assert sampler.state_dict(received=3) == {**state, "epoch": 4}
    with pytest.raises(ValueError, match="received is 4, expected 0 to 3"):
        sampler.state_dict(received=4)
    sampler.set_epoch(9)
    assert sampler.state_dict(received=np.int64(1)) == {**state, "epoch": 9, "samples_seen": 8}
    for wrong in (1.0, True):
        with pytest.raises(TypeError, match=f"received is {wrong}, expected a whole number"):
            sampler.state_dict(received=wrong)


def test_an_epoch_of_which_nothing_remains_is_passed_over() -> None:
    sampler = PackedBatchSampler(MemoryDataset(10), 8)
    sampler.load_state_dict({**sampler.state_dict(), "samples_seen": 4})
    assert len(sampler) == 0
    assert list(sampler) == []
    assert sampler.state_dict()["epoch"] == 1
    assert len(list(sampler)) == 1


def test_arguments_are_checked(tmp_path: Path) -> None:
    ds = MemoryDataset(10)
    with pytest.raises(ValueError, match="no batch in an epoch: 10 samples, batch_size 11"):
        PackedBatchSampler(ds, 11)
    with pytest.raises(ValueError, match="give both or neither"):
        PackedSampler(ds, 2, rank=1)
    with pytest.raises(RuntimeError, match="no iteration was begun"):
        PackedSampler(ds, 2).valid(0)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    try:
        assert PackedBatchSampler(ds, 2).world_size == 1
    finally:
        torch.distributed.destroy_process_group()
