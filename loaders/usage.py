"""What a process uses while it runs: processor, memory, storage, and a CUDA device."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from loaders.batches import default_workers

LOOK_EVERY_S = 1.0
"""How often memory and device are looked at; they cost more than a clock."""


class Usage:
    """Since it was made. `rss_bytes`: the most memory seen; `next_look`: when `look` should be called again, by `time.perf_counter`."""

    def __init__(self, device: int | None) -> None:
        self._device = _Device.open(device)
        self._began = time.perf_counter()
        self._cpu_s = _cpu_s()
        self._read = _read_bytes()
        self._gpu: list[tuple[float, int]] = []
        self.rss_bytes = 0
        self.next_look = 0.0

    def look(self, now: float) -> None:
        """Note what is used now."""
        self.next_look = now + LOOK_EVERY_S
        self.rss_bytes = max(self.rss_bytes, _rss_bytes())
        if self._device is not None:
            try:
                self._gpu.append(self._device.read())
            except Exception:  # drivers of shared devices (MIG, vGPU) refuse some questions; training goes on
                self._device = None

    def total(self) -> dict[str, Any]:
        """The values of a `loaders.monitor.Summary` that are of this kind."""
        self.look(time.perf_counter())
        seconds = max(time.perf_counter() - self._began, 1e-9)
        read = _read_bytes()
        return {
            "cpu_share": (_cpu_s() - self._cpu_s) / seconds / default_workers(),
            "rss_bytes": self.rss_bytes,
            "read_bytes": None if read is None or self._read is None else read - self._read,
            "gpu_share": float(np.mean([share for share, _ in self._gpu])) if self._gpu else None,
            "gpu_bytes": int(np.mean([used for _, used in self._gpu])) if self._gpu else None,
        }


def _cpu_s() -> float:
    """Processor seconds of this process and its children, running ones included (Linux; elsewhere ended ones only)."""
    total = sum(os.times()[:4])
    for path in Path("/proc/self/task").glob("*/children"):  # a child is listed under the thread that started it
        try:
            for child in path.read_text().split():
                fields = Path("/proc", child, "stat").read_text().rpartition(")")[2].split()
                total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        except OSError:
            pass  # it has just ended
    return total


def _rss_bytes() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _read_bytes() -> int | None:
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("read_bytes:")), None)


class _Device:
    """A CUDA device through pynvml, where both are there."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle

    @classmethod
    def open(cls, index: int | None) -> _Device | None:
        if not torch.cuda.is_available():
            return None
        try:
            import pynvml  # type: ignore[import-not-found]  # optional, and without types

            pynvml.nvmlInit()
            uuid = torch.cuda.get_device_properties(torch.cuda.current_device() if index is None else index).uuid
            return cls(pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode()))
        except Exception:  # no pynvml, or a driver that tells nothing: the rest is measured all the same
            return None

    def read(self) -> tuple[float, int]:
        """Share of the last moments in which a kernel ran, 0 to 1, and bytes in use."""
        return (
            self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu / 100,
            int(self._nvml.nvmlDeviceGetMemoryInfo(self._handle).used),
        )
