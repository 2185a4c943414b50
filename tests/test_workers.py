"""Settings for torch's DataLoader: they work, and each classic failure of worker processes is named before it happens."""

from __future__ import annotations

import os
import random
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from loaders.collate import collate_padded
from loaders.memmap import MemmapDataset
from loaders.shards import ShardDataset
from loaders.workers import batch_cost, check_open_files, check_shared_memory, dataloader_kwargs, worker_init
from packed_data import write_packed


def show(message: object) -> None:
    """Shown by ``pytest -rP``: what a user reads."""
    sys.stdout.write(f"{message}\n")


class Settings(Dataset[dict[str, Any]]):
    """Each sample says in what surroundings it was made."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {
            "opencv": cv2.getNumThreads(),
            "torch": torch.get_num_threads(),
            "cuda": os.environ["CUDA_VISIBLE_DEVICES"],
            "draws": (random.random(), float(np.random.random()), float(torch.rand(()))),
            "worker": torch.utils.data.get_worker_info().id,  # type: ignore[union-attr]
        }


def test_workers_have_one_thread_no_cuda_and_seeds_of_their_own() -> None:
    def epoch() -> list[dict[str, Any]]:
        torch.manual_seed(5)
        loader = DataLoader(Settings(), batch_size=2, num_workers=2, worker_init_fn=worker_init, collate_fn=list, timeout=60)
        return [sample for batch in loader for sample in batch]

    samples = epoch()
    assert all(s["opencv"] <= 1 and s["torch"] == 1 and s["cuda"] == "" for s in samples)
    first_draws = {s["worker"]: s["draws"] for s in reversed(samples)}
    assert len({draw for draws in first_draws.values() for draw in draws}) == 6
    assert [s["draws"] for s in epoch()] == [s["draws"] for s in samples]


@pytest.mark.parametrize("layout", ["tar", "memmap"])
@pytest.mark.parametrize("task", ["classification", "detection"])
@pytest.mark.parametrize("workers", [0, 2])
def test_they_load_a_packed_set(tmp_path: Path, layout: Any, task: Any, workers: int) -> None:
    write_packed(tmp_path, layout, task)
    ds = ShardDataset(tmp_path) if layout == "tar" else MemmapDataset(tmp_path)
    loader = DataLoader(ds, **dataloader_kwargs(ds, batch_size=4, workers=workers))
    for _ in range(2):
        assert sorted(i for batch in loader for i in batch["index"].tolist()) == list(range(10))
    assert loader.persistent_workers == (workers > 0)
    assert loader.pin_memory is False
    if task == "detection":
        assert isinstance(next(iter(loader))["boxes"], list)


def test_batch_cost_is_that_of_a_real_batch(tmp_path: Path) -> None:
    write_packed(tmp_path, "memmap", "detection", num_boxes=(2,))
    ds = MemmapDataset(tmp_path)
    batch = collate_padded([ds[i] for i in range(8)])
    assert batch_cost(ds, 8, collate_padded) == (sum(t.nbytes for t in batch.values()), len(batch))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch_size 0"),
        ({"workers": -1}, "workers -1"),
        ({"prefetch_factor": 0}, "prefetch_factor 0"),
        ({"workers": 1, "context": "threads"}, "context is 'threads'"),
        ({"device": "tpu"}, "device is 'tpu'"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataloader_kwargs(Settings(), **arguments)


def test_an_empty_data_set_is_said() -> None:
    with pytest.raises(ValueError, match="empty"):
        dataloader_kwargs([])


def test_forking_after_cuda_is_refused_and_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    ds = [{"x": torch.zeros(3)}] * 4
    assert dataloader_kwargs(ds, workers=1)["multiprocessing_context"] == "fork"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert dataloader_kwargs(ds, workers=1)["multiprocessing_context"] == "forkserver"
    with pytest.raises(ValueError, match=r"Cannot re-initialize CUDA.*context='forkserver'") as e:
        dataloader_kwargs(ds, workers=1, context="fork")
    show(e.value)


BATCHES_OF_4_MB = """
import sys
import torch
from torch.utils.data import DataLoader
from loaders.workers import dataloader_kwargs

ds = [torch.zeros(1_000_000, dtype=torch.uint8)] * 16
kwargs = {"batch_size": 4, "num_workers": 1} if sys.argv[1] == "unchecked" else dataloader_kwargs(ds, batch_size=4, workers=1)
print(sum(len(batch) for batch in DataLoader(ds, **kwargs)))
"""


@pytest.mark.slow
def test_shared_memory_too_small(tmp_path: Path) -> None:
    """In a mount namespace of its own, /dev/shm has 3 MB. Unchecked, the worker dies by a bus error; checked, the cure is named."""
    script = tmp_path / "load.py"
    script.write_text(BATCHES_OF_4_MB)
    mount = "mount -t tmpfs -o size=3m none /dev/shm && exec "

    def run(how: str) -> subprocess.CompletedProcess[str]:
        command = ["unshare", "--mount", "sh", "-c", f'{mount} "$0" "$@"', sys.executable, str(script), how]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    probe = subprocess.run(["unshare", "--mount", "sh", "-c", mount + "true"], capture_output=True, check=False)
    if probe.returncode != 0:
        pytest.skip("mounting a small /dev/shm needs more rights than this process has; the arithmetic is tested below")
    unchecked = run("unchecked")
    assert unchecked.returncode != 0
    assert "Bus error" in unchecked.stderr or "shared memory" in unchecked.stderr or "No space left" in unchecked.stderr
    checked = run("checked")
    message = checked.stderr.strip().splitlines()[-1]
    show(message)
    assert message.startswith(
        "ValueError: /dev/shm has 3.1 MB free, but 1 workers with prefetch_factor 2 and batches of 4.0 MB need 16.0 MB"
    )
    assert "--shm-size=1g" in message


def test_shared_memory_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loaders.workers.shutil.disk_usage", lambda _: type("Usage", (), {"free": 64_000_000}))
    check_shared_memory(batch_bytes=10_000_000, workers=2, prefetch_factor=2)  # 6 batches fit
    with pytest.raises(ValueError, match=r"/dev/shm has 64\.0 MB free, but 3 workers .* need 80\.0 MB"):
        check_shared_memory(batch_bytes=10_000_000, workers=3, prefetch_factor=2)


def test_too_few_open_files() -> None:
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, most))
    try:
        check_open_files(batch_tensors=60, workers=2, prefetch_factor=2)
        with pytest.raises(ValueError, match=r"512 files, but 2 workers .* of 192 tensors need about 1280.*ulimit -n 1280") as e:
            check_open_files(batch_tensors=192, workers=2, prefetch_factor=2)
        show(e.value)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))


def separate(samples: list[Any]) -> list[torch.Tensor]:
    return [sample.clone() for sample in samples]


def test_tensors_are_counted_by_their_memory() -> None:
    ds = [torch.zeros(10)] * 8
    assert batch_cost(ds, 8, separate) == (8 * 40, 8)
    assert batch_cost(ds, 8, lambda samples: list(torch.stack(samples))) == (8 * 40, 1)
