"""`Monitor` measures what happens, passes everything through, and names the likeliest cause of waiting."""

from __future__ import annotations

import json
import pickle
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from loaders.advice import advise
from loaders.batches import BatchLoader, default_workers
from loaders.memmap import MemmapDataset
from loaders.monitor import Monitor, Summary, num_samples
from loaders.prefetch import DevicePrefetcher
from packed_data import write_packed


class Slow:
    """Batches of 4 samples that take a while."""

    def __init__(self, count: int, wait_s: float) -> None:
        self.count, self.wait_s = count, wait_s

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for n in range(self.count):
            time.sleep(self.wait_s)
            yield {"image": torch.full((4, 3), n), "label": torch.zeros(4)}


def quiet(batches: Any, **options: Any) -> Monitor:
    return Monitor(batches, warn_share=None, **options)


def finished(monitor: Monitor) -> Summary:
    assert monitor.summary is not None
    return monitor.summary


def test_waiting_and_working_are_told_apart() -> None:
    monitor = quiet(Slow(10, 0.004))
    seen = []
    for batch in monitor:
        seen.append(int(batch["image"][0, 0]))
        time.sleep(0.012)
    summary = finished(monitor)
    assert seen == list(range(10))
    assert (summary.num_steps, summary.num_samples) == (10, 40)
    assert summary.data_s >= 0.04
    assert summary.step_s >= 0.12
    assert summary.seconds == pytest.approx(summary.data_s + summary.step_s)
    assert summary.data_share == pytest.approx(summary.data_s / summary.seconds)
    assert summary.samples_per_s == pytest.approx(40 / summary.seconds)
    assert 0.004 <= summary.data_percentiles_s[0] <= summary.data_percentiles_s[1] <= summary.data_percentiles_s[2]
    assert summary.step_percentiles_s[0] >= 0.012
    assert summary.first_s >= 0.004
    assert summary.rss_bytes > 10_000_000
    assert summary.cpu_share >= 0


def test_starting_the_loader_counts_as_waiting() -> None:
    class Starting:
        def __iter__(self) -> Iterator[torch.Tensor]:
            time.sleep(0.02)  # as a DataLoader starts its workers
            return iter([torch.zeros(1)] * 2)

    monitor = quiet(Starting())
    for _ in monitor:
        pass
    assert finished(monitor).first_s >= 0.02


def test_processor_time_of_this_process_counts() -> None:
    monitor = quiet([torch.zeros(1)] * 3)
    for _ in monitor:
        end = time.thread_time() + 0.1
        while time.thread_time() < end:
            pass
    summary = finished(monitor)
    assert summary.cpu_share * default_workers() * summary.seconds >= 0.2


def test_text_and_json_lines_say_the_same(tmp_path: Path) -> None:
    log = tmp_path / "run.jsonl"
    monitor = quiet(Slow(10, 0), log=log, log_every=4)
    for _ in range(2):
        for _ in monitor:
            pass
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [(line["kind"], line["epoch"], line["step"]) for line in lines] == [
        *[("steps", 0, 4), ("steps", 0, 8), ("epoch", 0, 10)],
        *[("steps", 1, 12), ("steps", 1, 16), ("steps", 1, 20), ("epoch", 1, 20)],
    ]
    summary = finished(monitor)
    assert lines[-1]["samples_per_s"] == pytest.approx(summary.samples_per_s)
    assert str(summary).startswith("epoch 1: 10 steps, 40 samples in ")
    assert "waiting for data" in str(summary)


def test_scalars_go_to_a_writer() -> None:
    written: list[tuple[str, int]] = []

    class Writer:
        def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
            assert scalar_value >= 0
            written.append((tag, global_step))

    for _ in quiet(Slow(6, 0), writer=Writer(), log_every=3):
        pass
    assert ("loader/data_share", 3) in written
    assert ("loader/samples_per_s", 6) in written


def test_an_epoch_left_early_is_summed_up() -> None:
    monitor = quiet(Slow(10, 0))
    for n, _ in enumerate(monitor):
        if n == 4:
            break
    assert finished(monitor).num_steps == 4  # the step that was left has no end


def test_an_empty_loader_has_no_summary() -> None:
    monitor = Monitor([])
    assert list(monitor) == []
    assert monitor.summary is None
    assert monitor.advice is None


def test_the_rest_is_the_loaders(tmp_path: Path) -> None:
    write_packed(tmp_path, "memmap")
    with quiet(DevicePrefetcher(BatchLoader(MemmapDataset(tmp_path), 4), "cpu")).batches.batches as batches:
        monitor = quiet(DevicePrefetcher(batches, "cpu"))
        assert len(monitor) == 2
        assert len(list(monitor)) == 2
        assert monitor.state_dict() == batches.state_dict()
        assert monitor.state_dict()["epoch"] == 1
        monitor.set_epoch(5)
        assert batches.state_dict()["epoch"] == 5
    assert pickle.loads(pickle.dumps(quiet([1, 2]))).batches == [1, 2]
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = monitor.no_such_name


def test_it_warns_above_the_share_and_not_below() -> None:
    with pytest.warns(RuntimeWarning, match=r"waited for data \d+% of epoch 0 .* Most likely: .* Try: "):
        for _ in Monitor(Slow(5, 0.005)):
            pass
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in Monitor([torch.zeros(1)] * 5):
            time.sleep(0.02)
        for _ in Monitor(Slow(5, 0.005), warn_share=1.0):
            pass


NUMBERS = Summary(
    epoch=0,
    num_steps=100,
    num_samples=6400,
    seconds=10.0,
    data_s=5.0,
    step_s=5.0,
    data_share=0.5,
    samples_per_s=640,
    first_s=0.1,
    data_percentiles_s=(0.05, 0.06, 0.07),
    step_percentiles_s=(0.05, 0.06, 0.07),
    cpu_share=0.4,
    rss_bytes=1,
    read_bytes=0,
    gpu_share=None,
    gpu_bytes=None,
)


def test_advice(tmp_path: Path) -> None:
    write_packed(tmp_path, "memmap")
    ds = MemmapDataset(tmp_path)
    cores = default_workers()
    plain = TensorDataset(torch.zeros(4))
    full, none = BatchLoader(ds, 4, workers=cores), BatchLoader(ds, 4, workers=0)
    slow_start = replace(NUMBERS, first_s=4.0)
    assert "persistent_workers=True" in advise(slow_start, DataLoader(plain, num_workers=1)).cure
    assert "first batch" in advise(slow_start, full).cause
    assert advise(NUMBERS, none).cure == f"workers={cores}"
    assert advise(NUMBERS, DevicePrefetcher(Monitor(none), "cpu")).cure == f"workers={cores}"
    assert advise(NUMBERS, DataLoader(plain)).cure == f"num_workers={cores}"
    assert "cores busy" in advise(replace(NUMBERS, cpu_share=0.95), full).cause
    assert "100 MB/s" in advise(replace(NUMBERS, read_bytes=10**9), full).cause
    assert "pure Python" in advise(NUMBERS, full).cause
    assert "processes" in advise(NUMBERS, DataLoader(plain, num_workers=cores, persistent_workers=True)).cause
    if cores > 1:
        assert advise(NUMBERS, BatchLoader(ds, 4, workers=1)).cure == f"workers={cores}"


def test_num_samples() -> None:
    assert num_samples({"name": "x", "image": torch.zeros(7, 3)}) == 7
    assert num_samples([[torch.zeros(5)], torch.zeros(9)]) == 5
    assert num_samples("text") == 0


def test_the_epoch_is_the_loaders(tmp_path: Path) -> None:
    write_packed(tmp_path, "memmap")
    with quiet(BatchLoader(MemmapDataset(tmp_path), 4)) as monitor:
        monitor.set_epoch(7)
        assert len(list(monitor)) == 2
        assert finished(monitor).epoch == 7
    with pytest.raises(RuntimeError, match="closed"):
        iter(monitor.batches)


def test_a_driver_that_refuses_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refuses:
        def read(self) -> tuple[float, int]:
            raise RuntimeError("Not Supported")

    monkeypatch.setattr("loaders.usage._Device.open", lambda _: Refuses())
    monitor = quiet([torch.zeros(1)] * 3)
    assert len(list(monitor)) == 3
    assert finished(monitor).gpu_share is None


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="log_every is 0"):
        Monitor([], log_every=0)
