"""`pack bench`: the fastest loader settings for a packed data set on this machine, measured and explained."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loaders.augment import Compose, Flip, Letterbox, RandomResizedCrop
from loaders.dataset import PackedDataset
from loaders.format import FormatError, read_manifest
from loaders.machine import Data, Machine, measure_data, measure_machine, rule_of_thumb
from loaders.memmap import MemmapDataset
from loaders.regions import Transform
from loaders.shards import ShardDataset
from loaders.tuning import Setting, Speed, Tuning, tune
from packer.info import human_bytes, table
from packer.sample import PackError, UsageError

SHARE_FOR_RATES = 0.15
"""Of the time: for the rates of machine and data."""


@dataclass(frozen=True, slots=True)
class Report:
    """What was measured of the split `split` of the data set at `root`; `transform` as code, "" for none, and why in `because`."""

    root: Path
    split: str
    layout: str
    transform: str
    because: str
    machine: Machine
    data: Data
    tuning: Tuning

    def lines(self) -> Iterator[str]:
        """The report as text."""
        machine, data, tuning = self.machine, self.data, self.tuning
        yield f"{self.root}, split {self.split}: {data.num_samples:,} samples, {human_bytes(int(data.sample_bytes))} each, {self.layout}"
        yield f"transform: {self.transform or 'none'}{self.because}"
        yield f"storage: {_rate(machine.cold)} cold, {_rate(machine.warm)} warm (one thread); copy {_rate(machine.copy)}"
        if machine.to_device is not None:
            yield f"to the device: {_rate(machine.to_device)}"
        yield f"one core loads {1 / data.load_s:,.0f} samples/s; {machine.cores} cores"
        yield ""
        yield from table(
            [
                ["samples/s", f"in {len(tuning.speeds[0].rounds)} rounds", "", "setting"],
                *(_row(speed, tuning) for speed in _ranked(tuning.speeds)),
            ]
        )
        for setting, why in tuning.left_out:
            yield f"left out: {setting}: {why}"
        yield ""
        yield "other batch sizes: " + ", ".join(f"{s.setting.batch_size}: {s.median:,.0f}/s" for s in tuning.other_batches)
        yield (
            f"rule of thumb, min(cores, storage rate / sample size) = min({machine.cores}, {machine.cold / data.sample_bytes:,.0f}) = "
            f"{rule_of_thumb(machine, data)} workers; measured: {tuning.best.workers}"
        )
        yield f"recommended: {tuning.best} ({tuning.reason})"
        yield ""
        yield from self.code.splitlines()

    @property
    def code(self) -> str:
        """The recommendation, ready to paste."""
        kind, best = _class(self.layout).__name__, self.tuning.best
        names = sorted(set(re.findall(r"[A-Z]\w+", self.transform)))
        imports = [*best.imports, f"from loaders.{'memmap' if self.layout == 'memmap' else 'shards'} import {kind}"]
        imports += [f"from loaders.augment import {', '.join(names)}"] if names else []
        transform = f", transform={self.transform}" if self.transform else ""
        return "\n".join([*imports, "", f"ds = {kind}({str(self.root)!r}, split={self.split!r}{transform})", best.statement])

    def as_dict(self) -> dict[str, Any]:
        """The same for machines; rates in bytes and samples per second."""
        machine, data = self.machine, self.data
        return {
            "split": self.split,
            "transform": self.transform or None,
            "machine": {
                "cores": machine.cores,
                "cold": machine.cold,
                "warm": machine.warm,
                "copy": machine.copy,
                "to_device": machine.to_device,
            },
            "data": {"num_samples": data.num_samples, "sample_bytes": data.sample_bytes, "load_s": data.load_s},
            "left_out": [{**_setting(setting), "reason": why} for setting, why in self.tuning.left_out],
            "settings": [{**_setting(s.setting), "samples_per_s": s.rounds} for s in self.tuning.speeds],
            "recommended": {**_setting(self.tuning.best), "reason": self.tuning.reason, "code": self.code},
        }


def bench(root: Path, split: str, batch_size: int, seconds: float, size: int | None, progress: Callable[[str], None]) -> Report:
    """Measure for about `seconds`.

    Args:
        root: of the packed data set.
        split: its name.
        batch_size: samples.
        seconds: in all.
        size: pictures are cropped (classification) or letterboxed (detection) to this size while loading; None: where they differ in size.
        progress: called with a line about what runs.

    Raises:
        FormatError: the data set cannot be read.
        PackError: a sample cannot be loaded, or no loader can run here.
        UsageError: the split has fewer samples than a batch, or an argument is out of range.
    """
    ds, code, because = open_split(root, split, size)
    if not 1 <= batch_size <= len(ds):
        raise UsageError(f"--batch-size is {batch_size}, expected 1 to {len(ds):,}, the samples of the split {split!r}")
    progress("rates of the machine and the data")
    each = seconds * SHARE_FOR_RATES / 4
    try:
        machine = measure_machine(root, split, each)
        data = measure_data(ds, each)
        tuning = tune(ds, batch_size, seconds * (1 - SHARE_FOR_RATES), progress)
    except FormatError:
        raise
    except ValueError as e:  # a damaged sample, or settings that cannot be here
        raise PackError(str(e)) from None
    return Report(root, split, ds.layout, code, because, machine, data, tuning)


def plot(report: Report, path: Path) -> None:
    """A bar for each setting, with its spread, to a PNG or any other format that matplotlib knows by its suffix.

    Raises:
        UsageError: matplotlib is not installed, or cannot write such a file.
    """
    try:
        from matplotlib.figure import Figure  # an extra
    except ImportError:
        raise UsageError("--plot needs matplotlib: pip install 'shardpack[plot]'") from None
    speeds = list(reversed(_ranked(report.tuning.speeds)))
    names = [str(s.setting).rpartition(",")[0] for s in speeds]
    medians = [s.median for s in speeds]
    spread = [[s.median - min(s.rounds) for s in speeds], [max(s.rounds) - s.median for s in speeds]]
    figure = Figure(figsize=(7, 1.2 + 0.4 * len(speeds)), layout="constrained")
    axes = figure.add_subplot()
    colors = [
        "tab:green" if s.setting == report.tuning.best else "tab:blue" if s.setting.kind != "dataloader" else "tab:gray" for s in speeds
    ]
    axes.barh(names, medians, xerr=spread, color=colors, capsize=3)
    axes.set_xlabel("samples/s (median of rounds, with their range)")
    axes.set_title(f"{report.root.name}, split {report.split}, batch {report.tuning.best.batch_size}; green: recommended", fontsize=10)
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as e:
        raise UsageError(f"--plot {path}: cannot be written: {e}") from None


def _class(layout: str) -> type[MemmapDataset] | type[ShardDataset]:
    return MemmapDataset if layout == "memmap" else ShardDataset


def open_split(root: Path, split: str, size: int | None) -> tuple[PackedDataset, str, str]:
    """The data set as it is measured, its transform as code, and why it has that; see `bench` for `size`."""
    kind = _class(read_manifest(root).layout)
    transform, code, because = _transform(kind(root, split), size)
    return kind(root, split, transform=transform), code, because


def _transform(ds: PackedDataset, size: int | None) -> tuple[Transform | None, str, str]:
    if size is None and ds.image_size() is not None:
        return None, "", ""
    because = f" (--size {size})" if size is not None else " (the pictures differ in size; --size takes another)"
    if ds.task == "detection":
        side = size or 640
        return Letterbox(side), f"Letterbox({side})", because
    side = size or 224
    return Compose(RandomResizedCrop(side), Flip()), f"Compose(RandomResizedCrop({side}), Flip())", because


def _ranked(speeds: tuple[Speed, ...]) -> list[Speed]:
    return sorted(speeds, key=lambda s: -s.median)


def _row(speed: Speed, tuning: Tuning) -> list[str]:
    mark = "<-" if speed.setting == tuning.best else ""
    return [f"{speed.median:,.0f}", f"{min(speed.rounds):,.0f} to {max(speed.rounds):,.0f}", mark, str(speed.setting)]


def _setting(setting: Setting) -> dict[str, Any]:
    return {"loader": setting.kind, "workers": setting.workers, "batch_size": setting.batch_size}


def _rate(bytes_per_s: float) -> str:
    return f"{human_bytes(int(bytes_per_s))}/s"
