"""What a process uses while it runs: processor, memory, storage, and a CUDA device."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
import torch

from loaders.batches import default_workers

LOOK_EVERY_S = 1.0
"""How often memory and device are looked at; they cost more than a clock."""


class Usage:
    """Since it was made. `rss_bytes` is the most memory seen by `look`, to be called every `LOOK_EVERY_S`."""

    def __init__(self, device: int | None) -> None:
        self._device = _Device.open(device)
        self._began = time.perf_counter()
        self._cpu_s = _cpu_s()
        self._read = _read_bytes()
        self._gpu: list[tuple[float, int]] = []
        self.rss_bytes = 0

    def look(self) -> None:
        """Note what is used now."""
        self.rss_bytes = max(self.rss_bytes, _rss_bytes())
        if self._device is not None:
            try:
                self._gpu.append(self._device.read())
            except Exception:  # drivers of shared devices (MIG, vGPU) refuse some questions; training goes on
                self._device = None

    def total(self) -> dict[str, Any]:
        """The values of a `loaders.monitor.Summary` that are of this kind."""
        self.look()
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
    threads = os.listdir("/proc/self/task") if os.path.isdir("/proc/self/task") else []
    for thread in threads:  # a child is listed under the thread that started it
        for child in (_text(f"/proc/self/task/{thread}/children") or "").split():
            if stat := _text(f"/proc/{child}/stat"):  # else it has just ended
                fields = stat.rpartition(")")[2].split()
                total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


def _rss_bytes() -> int:
    pages = _text("/proc/self/statm")
    return int(pages.split()[1]) * os.sysconf("SC_PAGE_SIZE") if pages else 0


def _read_bytes() -> int | None:
    lines = (_text("/proc/self/io") or "").splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith("read_bytes:")), None)


def _text(path: str) -> str | None:
    """What is in the file; None where there is no such file. Not by `Path`, which takes as long as the reading."""
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return None


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
