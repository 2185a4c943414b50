"""Settings are measured in turns, the cheapest of the fast ones is recommended, its code runs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from loaders.batches import default_workers
from loaders.machine import Data, Machine, measure_data, measure_machine, rule_of_thumb
from loaders.memmap import MemmapDataset
from loaders.tuning import KINDS, Setting, Speed, grid, race, recommend, tune
from packed_data import write_packed
from packer.cli import main


def speed(kind: Any, workers: int, *rounds: float) -> Speed:
    return Speed(Setting(kind, workers, 8), rounds)


@pytest.mark.parametrize("cores", [1, 2, 3, 6, 16])
def test_grid(cores: int) -> None:
    settings = grid(32, cores)
    assert len(set(settings)) == len(settings)
    assert {s.batch_size for s in settings} == {32}
    for kind in KINDS:
        counts = [s.workers for s in settings if s.kind == kind]
        assert counts == sorted(counts)
        assert set(counts) == {cores} - {1} if kind == "processes" else {0, 1, cores} <= set(counts)
    assert Setting("threads", cores + 1, 32) in settings


def test_the_fastest_is_recommended() -> None:
    best, reason = recommend([speed("threads", 1, 10, 11, 12), speed("processes", 2, 30, 31, 5), speed("threads", 2, 20, 20, 90)])
    assert best == Setting("processes", 2, 8)
    assert reason == "30 samples/s, the fastest"


def test_of_those_alike_the_cheapest_that_loads_ahead_is_recommended() -> None:
    speeds = [
        speed("dataloader", 1, 96),
        speed("threads", 3, 100),
        speed("processes", 1, 96),
        speed("threads", 1, 96),
        speed("threads", 0, 99),
        speed("dataloader", 0, 99),
    ]
    best, reason = recommend(speeds)
    assert best == Setting("threads", 1, 8)
    assert reason == "96 samples/s, within 5% of the fastest (BatchLoader, 3 threads, batch 8: 100)"
    assert recommend(speeds[:3])[0] == Setting("processes", 1, 8)
    assert recommend(speeds[:2])[0] == Setting("dataloader", 1, 8)


def test_no_worker_is_recommended_where_it_is_clearly_faster() -> None:
    best, reason = recommend([speed("threads", 0, 100), speed("threads", 1, 90)])
    assert best == Setting("threads", 0, 8)
    assert "workers=1 loads meanwhile" in reason


def test_rule_of_thumb() -> None:
    machine = Machine(cores=8, cold=100e6, warm=1e9, copy=1e9, to_device=None)
    assert rule_of_thumb(machine, Data(100, 2e6, 0.01)) == 8
    assert rule_of_thumb(machine, Data(100, 25e6, 0.01)) == 4
    assert rule_of_thumb(machine, Data(100, 900e6, 0.01)) == 1


def test_every_setting_is_run_and_its_code_works(tmp_path: Path) -> None:
    write_packed(tmp_path, "memmap", "classification", counts=(20,))
    ds = MemmapDataset(tmp_path)
    said: list[str] = []
    result = tune(ds, batch_size=4, seconds=0.3, progress=said.append)
    assert [s.setting for s in result.speeds] == grid(4, default_workers())
    assert all(rate > 0 for s in result.speeds for rate in s.rounds)
    assert result.left_out == ()
    assert result.best in [s.setting for s in result.speeds]
    assert [s.setting.batch_size for s in result.other_batches] == [2, 4, 8, 16]
    assert any("1 threads" in line for line in said)
    for setting in (Setting("threads", 1, 4), Setting("processes", 1, 4), Setting("dataloader", 1, 4)):
        names: dict[str, Any] = {"ds": ds, "device": "cpu"}
        exec(setting.code, names)
        assert sum(len(batch["image"]) for batch in names["batches"]) == 20
    for seconds in (0, math.nan):
        with pytest.raises(ValueError, match=f"seconds is {seconds}"):
            tune(ds, 4, seconds=seconds)


@pytest.mark.parametrize("layout", ["tar", "memmap"])
def test_rates_of_machine_and_data(tmp_path: Path, layout: Any) -> None:
    write_packed(tmp_path, layout, "detection")
    machine = measure_machine(tmp_path, "train", 0.02)
    assert min(machine.cold, machine.warm, machine.copy) > 0
    assert machine.cores == default_workers()
    if layout == "memmap":
        data = measure_data(MemmapDataset(tmp_path), 0.02)
        files = [f for f in (tmp_path / "train").rglob("*") if f.is_file()]
        assert data.sample_bytes == pytest.approx(sum(f.stat().st_size for f in files) / 10)
        assert data.load_s > 0


class TestRace:
    """With loaders that count, and a clock that only they move."""

    @pytest.fixture(autouse=True)
    def _loaders(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.running: list[Setting] = []
        self.order: list[Setting] = []

        def open_loader(setting: Setting, ds: Any) -> Any:
            del ds
            if setting.workers == 9:
                raise ValueError("/dev/shm is too small")
            if setting.workers == 8:
                return self.fail()
            assert not self.running  # what runs is ended before the next one starts
            self.order.append(setting)
            return self.load(setting)

        monkeypatch.setattr(Setting, "open", open_loader)
        monkeypatch.setattr("loaders.tuning.time.perf_counter", lambda: self.now)

    def load(self, setting: Setting) -> Any:
        self.running.append(setting)
        try:
            for _ in range(10_000):
                self.now += 1 / (1 + setting.workers)
                yield setting
        finally:
            self.running.remove(setting)

    def test_rates_are_right_and_nobody_is_always_first(self) -> None:
        settings = [Setting("threads", n, 8) for n in range(3)]
        speeds, left_out = race(None, settings, 300.0, lambda _: None)
        assert [round(s.median, 6) for s in speeds] == [8, 16, 24]
        assert {len(s.rounds) for s in speeds} == {5}
        assert left_out == []
        assert self.order[:6] == [*settings, *settings[1:], settings[0]]

    def test_a_setting_that_cannot_run_is_left_out_with_the_reason(self) -> None:
        settings = [Setting("processes", 9, 8), Setting("threads", 1, 8)]
        speeds, left_out = race(None, settings, 100.0, lambda _: None)
        assert [s.setting for s in speeds] == settings[1:]
        assert left_out == [(settings[0], "/dev/shm is too small")]
        with pytest.raises(ValueError, match="too small"):
            race(None, settings[:1], 100.0, lambda _: None)

    def fail(self) -> Any:
        raise RuntimeError("the process ended before it began")
        yield

    def test_processes_that_cannot_start_are_left_out_but_no_other_error_is(self) -> None:
        settings = [Setting("processes", 8, 8), Setting("threads", 1, 8)]
        speeds, left_out = race(None, settings, 100.0, lambda _: None)
        assert [s.setting for s in speeds] == settings[1:]
        assert left_out == [(settings[0], "the process ended before it began")]
        with pytest.raises(RuntimeError, match="before it began"):
            race(None, [Setting("threads", 8, 8)], 100.0, lambda _: None)

    def test_slow_batches_mean_fewer_rounds_not_more_time(self) -> None:
        speeds, _ = race(None, [Setting("threads", 0, 8)], 4.0, lambda _: None)
        assert len(speeds[0].rounds) == 2  # of three seconds each


class TestCommand:
    def run(self, *arguments: object) -> Any:
        return CliRunner().invoke(main, ["bench", *map(str, arguments)])

    @pytest.mark.slow
    def test_text_json_and_plot(self, tmp_path: Path) -> None:
        write_packed(tmp_path / "set", "tar", "classification", sizes=((40, 50), (60, 40)))
        done = self.run(tmp_path / "set", "--seconds", 1, "--batch-size", 2, "--size", 16, "--quiet", "--plot", tmp_path / "b.png")
        assert done.exit_code == 0, done.output
        for text in (
            "Compose(RandomResizedCrop(16), Flip()) (--size 16)",
            "storage: ",
            "rule of thumb",
            "recommended: ",
            "from loaders.shards import",
        ):
            assert text in done.output
        assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")
        done = self.run(tmp_path / "set", "--seconds", 1, "--batch-size", 2, "--json")
        result = json.loads(done.stdout)
        assert result["recommended"]["batch_size"] == 2
        assert result["transform"] == "Compose(RandomResizedCrop(224), Flip())"
        names: dict[str, Any] = {}
        exec(result["recommended"]["code"], names)
        assert next(iter(names["batches"]))["image"].shape == (2, 3, 224, 224)

    def test_a_damaged_picture_is_named(self, tmp_path: Path) -> None:
        packed = write_packed(tmp_path / "set", "tar", "classification")
        shard = packed.shard(0)
        data = bytearray(shard.read_bytes())
        at = data.index(b"\xff\xd8\xff")
        data[at : at + 200] = bytes(200)
        shard.write_bytes(data)
        done = self.run(tmp_path / "set", "--seconds", 1, "--batch-size", 2, "--quiet")
        assert done.exit_code == 1
        assert done.output.startswith("error: ")
        assert "shard-000000.tar: sample 000000003" in done.output

    def test_wrong_usage(self, tmp_path: Path) -> None:
        write_packed(tmp_path / "set", "memmap")
        done = self.run(tmp_path / "set", "--batch-size", 64)
        assert done.exit_code == 2
        assert "--batch-size is 64, expected 1 to 10" in done.output
        done = self.run(tmp_path / "set", "--split", "trian")
        assert done.exit_code == 1
        assert "trian" in done.output
        assert "train" in done.output
        done = self.run(tmp_path / "nothing")
        assert done.exit_code == 1
        assert "Traceback" not in done.output
