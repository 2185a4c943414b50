"""`DevicePrefetcher`: order, lifetime of source memory, errors, ends; on the CPU, with a fake stream, and with CUDA where it is."""

from __future__ import annotations

import gc
import threading
import time
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from loaders.batches import BatchLoader
from loaders.memmap import MemmapDataset
from loaders.prefetch import DevicePrefetcher, map_tensors
from packed_data import write_packed

Pair = namedtuple("Pair", "first second")


def threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("loaders-")]


class FakeStream:
    """Copies that end late, in their order, in a thread of their own, from memory that is read only then: what a device does."""

    def __init__(self) -> None:
        self.copies: list[FakeCopy] = []
        self.wake = threading.Condition()
        self.ended = False
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def __call__(self, batch: Any) -> FakeCopy:
        copy = FakeCopy(batch)
        with self.wake:
            self.copies.append(copy)
            self.wake.notify()
        return copy

    def run(self) -> None:
        while True:
            with self.wake:
                self.wake.wait_for(lambda: self.ended or self.copies)
                if self.ended:
                    return
                copy = self.copies.pop(0)
            time.sleep(0.002)
            copy.finish()

    def end(self) -> None:
        with self.wake:
            self.ended = True
            self.wake.notify()
        self.thread.join()


class FakeCopy:
    def __init__(self, batch: Any) -> None:
        # Like a device, it holds addresses, not references: nothing here keeps the source alive.
        self.source = [value.numpy().__array_interface__["data"][0] for value in batch.values()]
        self.moved = {name: torch.zeros_like(value) for name, value in batch.items()}
        self.done = threading.Event()

    def finish(self) -> None:
        import ctypes

        for address, value in zip(self.source, self.moved.values(), strict=True):
            ctypes.memmove(value.numpy().__array_interface__["data"][0], address, value.nbytes)
        self.done.set()

    def wait(self) -> Any:
        assert self.done.wait(10)
        return self.moved

    def is_done(self) -> bool:
        return self.done.is_set()


class Reusing:
    """A loader that refills memory as soon as nobody refers to it, as `BatchLoader` does."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.buffers: list[np.ndarray[Any, Any]] = []

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        import sys

        for number in range(self.count):
            free = [b for b in range(len(self.buffers)) if sys.getrefcount(self.buffers[b]) == 2]
            if not free:
                self.buffers.append(np.zeros((64, 1024), np.int64))
                free = [len(self.buffers) - 1]
            self.buffers[free[0]][:] = number
            yield {"x": torch.from_numpy(self.buffers[free[0]])}


def test_source_memory_is_not_refilled_before_its_copy_is_done() -> None:
    loader = Reusing(100)
    prefetcher = DevicePrefetcher(loader, "cpu", depth=3)
    stream = prefetcher._start_copy = FakeStream()
    try:
        for number, batch in enumerate(prefetcher):
            assert batch["x"].unique().tolist() == [number]
    finally:
        stream.end()
    assert number == 99
    assert 1 < len(loader.buffers) <= 12  # memory is used again, not made anew for each batch


def test_a_copy_that_is_kept_stays_as_it_was() -> None:
    prefetcher = DevicePrefetcher(Reusing(40), "cpu", depth=2)
    stream = prefetcher._start_copy = FakeStream()
    try:
        kept = list(prefetcher)
    finally:
        stream.end()
    assert [batch["x"].unique().tolist() for batch in kept] == [[n] for n in range(40)]


@pytest.mark.parametrize("depth", [1, 2, 7])
def test_order_and_values_are_the_iterables(depth: int) -> None:
    batches = [{"x": torch.full((3,), n), "name": f"batch {n}"} for n in range(20)]
    prefetcher = DevicePrefetcher(batches, "cpu", depth=depth)
    for _ in range(2):
        assert [(b["x"][0].item(), b["name"]) for b in prefetcher] == [(n, f"batch {n}") for n in range(20)]
    assert len(prefetcher) == 20
    assert not threads()


def test_it_reads_ahead_by_depth_and_no_more() -> None:
    taken = []

    def batches() -> Iterator[int]:
        for n in range(10):
            taken.append(n)
            yield n

    iterator = iter(DevicePrefetcher(batches(), "cpu", depth=2))
    assert next(iterator) == 0
    deadline = time.monotonic() + 10
    while len(taken) < 3 and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(0.02)
    assert taken == [0, 1, 2]
    iterator.close()  # type: ignore[attr-defined]


def test_nested_batches() -> None:
    batch = {"a": [torch.ones(2), (torch.zeros(1), 5)], "b": Pair(torch.ones(1), "text"), "none": None}
    moved = map_tensors(batch, lambda t: t + 1)
    assert moved["a"][0].tolist() == [2, 2]
    assert moved["a"][1][0].tolist() == [1]
    assert moved["a"][1][1] == 5
    assert isinstance(moved["b"], Pair)
    assert moved["b"].first.tolist() == [2]
    assert moved["b"].second == "text"
    assert moved["none"] is None
    assert batch["a"][0].tolist() == [1, 1]  # type: ignore[index]


def test_an_error_comes_at_its_batch() -> None:
    def batches() -> Iterator[int]:
        yield from range(3)
        raise OSError("the disk is gone")

    iterator = iter(DevicePrefetcher(batches(), "cpu"))
    assert [next(iterator) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(OSError, match="the disk is gone"):
        next(iterator)
    assert not threads()


@pytest.fixture
def dataset(tmp_path: Path) -> MemmapDataset:
    write_packed(tmp_path / "set", "memmap", counts=(13, 20, 7))
    return MemmapDataset(tmp_path / "set")


def test_over_a_batch_loader(dataset: MemmapDataset) -> None:
    with BatchLoader(dataset, 8, seed=3) as plain:
        expected = [[b["index"].tolist() for b in plain] for _ in range(3)]
    with BatchLoader(dataset, 8, seed=3) as batches:
        prefetcher = DevicePrefetcher(batches, "cpu")
        assert [[b["index"].tolist() for b in prefetcher] for _ in range(3)] == expected
    assert not threads()


@pytest.mark.parametrize("steps", range(6))
def test_state_counts_what_the_consumer_got(dataset: MemmapDataset, steps: int) -> None:
    with BatchLoader(dataset, 8, seed=3) as plain:
        expected = [b["index"].tolist() for _ in range(2) for b in plain]
    with BatchLoader(dataset, 8, seed=3) as batches:
        prefetcher = DevicePrefetcher(batches, "cpu", depth=4)
        iterator = iter(prefetcher)
        for _ in range(steps):
            next(iterator, None)
        state = prefetcher.state_dict()
        iterator.close()  # type: ignore[attr-defined]
    with BatchLoader(dataset, 8, seed=3) as batches:
        prefetcher = DevicePrefetcher(batches, "cpu", depth=4)
        prefetcher.load_state_dict(state)
        rest = [b["index"].tolist() for _ in range(2) for b in prefetcher]
    assert rest[: 10 - steps] == expected[steps:]


def test_leaving_the_loop_ends_the_threads_and_keeps_the_epoch(dataset: MemmapDataset) -> None:
    with BatchLoader(dataset, 8, seed=3) as batches:
        prefetcher = DevicePrefetcher(batches, "cpu", depth=6)
        first = [b["index"].tolist() for b in prefetcher]
        prefetcher.set_epoch(0)
        for _ in prefetcher:
            break
        gc.collect()
        assert not threads()
        assert [b["index"].tolist() for b in prefetcher] == first  # epoch 0 again, though the thread had read to its end


def test_an_iterable_that_is_slow_to_end_is_left_to_end_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loaders.engine.JOIN_S", 0.01)
    go_on = threading.Event()
    epochs: list[int] = []

    class Slow:
        def __iter__(self) -> Iterator[int]:
            yield 0
            go_on.wait(30)
            yield 1

        def state_dict(self) -> dict[str, int]:
            return {"epoch": 3}

        def set_epoch(self, epoch: int) -> None:
            epochs.append(epoch)

    for _ in DevicePrefetcher(Slow(), "cpu"):
        break
    gc.collect()
    assert epochs == [3]
    go_on.set()
    deadline = time.monotonic() + 10
    while threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not threads()


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="depth is 0"):
        DevicePrefetcher([], "cpu", depth=0)
    for device in ("gpu", "cuda:99", "meta"):
        with pytest.raises(ValueError, match=f"device is '{device}'"):
            DevicePrefetcher([], device)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_copies_are_whole_and_in_order(dataset: MemmapDataset) -> None:
    with BatchLoader(dataset, 8, seed=3) as batches:
        expected = [b["image"].clone() for b in batches]
        batches.set_epoch(0)
        for _ in range(50):
            batches.set_epoch(0)
            for got, image in zip(DevicePrefetcher(batches, "cuda"), expected, strict=True):
                torch.cuda._sleep(100_000)
                assert torch.equal(got["image"].cpu(), image)
