"""The training recipes run, small and on the CPU, and show what they claim; the environments fit the project."""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from packed_data import write_packed

pytestmark = pytest.mark.long

ROOT = Path(__file__).parent.parent
RECIPES = ROOT / "recipes"
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def run(script: str, *args: object, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, RECIPES / script, *map(str, args)], capture_output=True, text=True, timeout=120, env=ENV, **options
    )


def table(text: str) -> dict[str, list[str]]:
    """First cell -> the others, of a table's rows."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    return {row[0]: row[1:] for row in rows[2:]}


@pytest.mark.slow
def test_all_places_of_cifar10_train_on_the_same_batches(tmp_path: Path) -> None:
    done = run(
        "train_cifar10.py",
        "--synthetic",
        90,
        "--out",
        tmp_path,
        "--epochs",
        2,
        "--batch-size",
        32,
        "--width",
        4,
        "--num",
        70,
        "--workers",
        1,
    )
    assert done.returncode == 0, done.stderr
    rows = table(done.stdout)
    assert list(rows) == ["original", "pre-transformed", "memmap", "resident", "resident, bf16"]
    assert "64 pictures an epoch" in done.stdout  # two batches of 32 of the 70
    exact = [row[4:] for name, row in rows.items() if name != "resident, bf16"]
    assert exact == [exact[0]] * 4  # losses and accuracies
    assert len(re.findall(r"data time of the original is [\d.]+ times \([\d.]+ to [\d.]+ over the epochs\)", done.stdout)) == 4


@pytest.mark.slow
def test_welding_trains_before_and_after(tmp_path: Path) -> None:
    size = ["--num", 24, "--size", 200, 160, "--side", 96, "--batch-size", 4, "--epochs", 2, "--width", 4, "--workers", 1]
    done = run("train_welding.py", "--out", tmp_path, *size)
    assert done.returncode == 0, done.stderr
    rows = table(done.stdout)
    assert list(rows) == ["before", "after"]
    assert all(0 < float(row[4]) < 1000 for row in rows.values())
    assert "epoch time, before / after:" in done.stdout
    assert "data time, before / after:" in done.stdout


def test_files_and_packed_pictures_have_the_same_boxes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(RECIPES))
    made, recipe = importlib.import_module("make_welding_v2"), importlib.import_module("train_welding")
    made.make(tmp_path / "raw", made.Options(num=4, size=(200, 160), seed=1))
    files = recipe.WeldFiles(tmp_path / "raw", 100)
    samples = [files[i] for i in range(len(files))]
    batch = recipe.collate_files(samples)
    assert batch["image"].shape == (len(files), 3, 100, 100)
    assert batch["image"].dtype == torch.uint8
    assert (batch["image"][:, :, :10] == 114).all()  # 200x160 becomes 100x80, ten rows of fill above and below
    assert not (batch["image"][:, :, 10] == 114).all()
    xml = (tmp_path / f"raw/annotations/{files.names[0]}.xml").read_text()
    corners = [[int(v) for v in box] for box in re.findall(r"<xmin>(\d+)</xmin><ymin>(\d+)</ymin><xmax>(\d+)</xmax><ymax>(\d+)<", xml)]
    assert samples[0]["boxes"].tolist() == [[x1 / 2, y1 / 2 + 10, x2 / 2, y2 / 2 + 10] for x1, y1, x2, y2 in corners]
    assert batch["boxes"][:, 0].tolist() == list(chain(*([i] * len(s["labels"]) for i, s in enumerate(samples))))


@pytest.mark.slow
def test_gpu_check_runs_small_on_the_cpu(tmp_path: Path) -> None:
    done = run("gpu_check.py", "--device", "cpu", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    for name in ("copies", "overlap", "gather", "airbench", "corruption"):
        assert re.search(f"^{name}: ", done.stdout, re.MULTILINE)
    assert re.search(r"^corruption: \d+ batches, [\d,]{3,} rows compared, 0 wrong$", done.stdout, re.MULTILINE)
    assert "these figures say nothing about a GPU" in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what it says where there is no CUDA")
def test_gpu_check_without_a_gpu_does_not_look_like_a_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(RECIPES))
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--out", str(tmp_path / "out")])
    assert importlib.import_module("gpu_check").main() == 2
    assert "no CUDA device here, so nothing was checked" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_gpu_check_finds_one_changed_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(RECIPES))
    check = importlib.import_module("gpu_check")
    write_packed(tmp_path / "packed", "memmap", counts=(12,))
    ds, sizes = check.MemmapDataset(tmp_path / "packed"), check.SMALL
    device, small = torch.device("cpu"), check.Sizes(12, 0, 0, 0, batches=5, batch_size=4, epochs=1)
    assert sizes.batches * sizes.batch_size >= 300
    rows, wrong = check.check_corruption(device, ds, small)
    assert rows >= 20
    assert wrong == 0

    def spoiling(loader: Any, _: torch.device) -> Any:
        class Spoiled:
            def __iter__(self) -> Any:
                for number, batch in enumerate(loader):
                    if number == 0:
                        batch["image"][2, 1, 3, 3] ^= 1
                    yield batch

        return Spoiled()

    monkeypatch.setattr(check, "DevicePrefetcher", spoiling)
    rows, wrong = check.check_corruption(device, ds, small)
    assert wrong == len(range(0, rows, len(ds)))  # one in each epoch


def test_airbench_style_gives_each_picture_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(RECIPES))
    check = importlib.import_module("gpu_check")
    values = torch.arange(0, 240, 20, dtype=torch.uint8)
    images = values.view(-1, 1, 1, 1).expand(-1, 3, 8, 8).contiguous()
    batches = list(check.AirbenchStyle(images, torch.arange(12), batch_size=5))
    assert [len(image) for image, _ in batches] == [5, 5]
    expected = check.Normalize(check.MEAN, check.STD, torch.float16)({"image": images})["image"]
    seen = []
    for image, label in batches:
        assert torch.equal(image, expected[label])  # flat pictures: any crop and flip is the picture
        seen += label.tolist()
    assert len(set(seen)) == 10


class Ranks:
    """Processes of `recipes/train_ddp.py`, one a rank, in a process group of their own."""

    def __init__(self, folder: Path, data: Path, name: str, world_size: int, *args: object, checkpoint: str = "run.pt") -> None:
        meeting = f"file://{folder / f'meeting-{name}'}"
        self.seen = folder / f"seen-{name}"
        given = ["--data", data, "--checkpoint", folder / checkpoint, "--seen", self.seen, "--init-method", meeting, "--batch-size", 2]
        command = [sys.executable, str(RECIPES / "train_ddp.py"), *map(str, [*given, "--device", "cpu", "--every", 5, *args])]
        world = {**ENV, "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
        self.runs = [
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**world, "RANK": str(rank)})
            for rank in range(world_size)
        ]

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        for one in self.runs:
            if one.returncode is None:
                one.kill()
                one.communicate()

    def output(self) -> str:
        """Of rank 0, when all have ended well."""
        texts = [one.communicate(timeout=120)[0] for one in self.runs]
        for one, text in zip(self.runs, texts, strict=True):
            assert one.returncode == 0, text
        return texts[0]

    def lines(self, rank: int) -> list[dict[str, Any]]:
        path = self.seen / f"rank-{rank}.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def steps(self, rank: int) -> dict[int, list[int]]:
        return {line["step"]: line["index"] for line in self.lines(rank) if "step" in line}

    def evaluated(self) -> Counter[int]:
        return Counter(chain(*(line["evaluated"] for rank in range(len(self.runs)) for line in self.lines(rank) if "evaluated" in line)))


@pytest.mark.slow
def test_killed_training_goes_on_with_the_same_samples(tmp_path: Path) -> None:
    data = write_packed(tmp_path / "packed", "memmap", "classification", counts=(61,)).root
    with Ranks(tmp_path, data, "killed", 2, "--epochs", 100_000) as killed:
        deadline = time.monotonic() + 90
        while len(killed.steps(0)) < 12 or len(killed.steps(1)) < 12:
            assert time.monotonic() < deadline
            assert all(one.poll() is None for one in killed.runs), killed.output()
            time.sleep(0.01)
    assert {one.returncode for one in killed.runs} == {-signal.SIGKILL}

    last = max(*killed.steps(0), *killed.steps(1)) + 20  # past an epoch's end, which is every 15 steps
    until = ["--epochs", 100_000, "--max-steps", last]
    with (
        Ranks(tmp_path, data, "resumed", 2, *until) as resumed,
        Ranks(tmp_path, data, "whole", 2, *until, checkpoint="whole.pt") as whole,
    ):
        said, expected = resumed.output(), whole.output()
    first = min(resumed.steps(0))
    assert first > 5
    assert (first - 1) % 5 == 0  # at a checkpoint
    for rank in range(2):
        before, after, uninterrupted = killed.steps(rank), resumed.steps(rank), whole.steps(rank)
        assert list(uninterrupted) == list(range(1, last + 1))
        assert list(after) == list(range(first, last + 1))
        assert {step: before[step] for step in range(1, first)} | after == uninterrupted
        assert all(before[step] == uninterrupted[step] for step in before)
    assert f"steps {first - 1} to {last}, 2 ranks, parameters " in said
    assert said.partition(", 2 ranks")[2] == expected.partition(", 2 ranks")[2]  # the same parameters, and the same accuracy

    before = (tmp_path / "run.pt").read_bytes()
    with Ranks(tmp_path, data, "one", 1, "--epochs", 0) as one, Ranks(tmp_path, data, "three", 3, "--epochs", 0) as three:
        texts = [expected, one.output(), three.output()]
    assert (tmp_path / "run.pt").read_bytes() == before  # nothing but evaluated
    for ranks in (whole, one, three):
        assert ranks.evaluated() == dict.fromkeys(range(61), 1)
    assert re.search(r"^train: \d+ of 61 right", texts[0], re.MULTILINE)
    assert len({text.splitlines()[-1] for text in texts}) == 1


def test_train_ddp_says_how_it_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(str(RECIPES))
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(sys, "argv", ["train_ddp", "--data", str(tmp_path), "--checkpoint", str(tmp_path / "run.pt")])
    assert importlib.import_module("train_ddp").main() == 2
    assert "RANK and WORLD_SIZE not set: start it with torchrun" in capsys.readouterr().err


@pytest.mark.parametrize("script", ["train_cifar10", "train_ddp", "train_welding"])
def test_training_recipes_say_what_is_no_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], script: str
) -> None:
    monkeypatch.syspath_prepend(str(RECIPES))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    checkpoint = ["--checkpoint", str(tmp_path / "run.pt")] if script == "train_ddp" else ["--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", [script, "--data", str(tmp_path / "absent"), *checkpoint])
    assert importlib.import_module(script).main() == 1
    said = capsys.readouterr().err
    assert f"{script}: " in said
    assert str(tmp_path / "absent") in said


def dependencies() -> set[str]:
    return set(tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["dependencies"])


def test_conda_environment_installs_what_the_project_needs() -> None:
    environment = yaml.safe_load((RECIPES / "env/environment.yml").read_text("utf-8"))
    assert set(environment) == {"name", "channels", "dependencies"}
    *conda, pip = environment["dependencies"]
    assert "pip" in conda
    assert set(pip["pip"]) == dependencies()
    python = next(item for item in conda if item.startswith("python"))
    lowest = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["requires-python"]
    assert python == f"python{lowest},<3.13"


def test_dockerfile_copies_what_exists_and_does_not_run_as_root() -> None:
    lines = (RECIPES / "env/Dockerfile").read_text("utf-8").splitlines()
    steps = [line for line in lines if line and not line.startswith("#")]
    copied = list(chain(*(step.split()[1:-1] for step in steps if step.startswith("COPY "))))
    assert {"packer", "loaders", "recipes", "pyproject.toml", "constraints.txt"} <= set(copied)
    assert [name for name in copied if not (ROOT / name).exists()] == []
    users = [step.split()[1] for step in steps if step.startswith("USER ")]
    assert users
    assert users[-1] != "root"
    assert any(f"useradd --create-home --uid 1000 {users[-1]}" in step for step in steps)
    assert any("--constraint constraints.txt" in step for step in steps)
    # The headless OpenCV alone: the other needs libGL, which the image has not.
    assert any(name.startswith("opencv-python-headless") for name in dependencies())
    assert "libgl" not in "\n".join(steps).lower()
    assert "--shm-size" in "\n".join(lines)


def test_synthetic_pictures_differ_by_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(RECIPES))
    recipe = importlib.import_module("train_cifar10")
    recipe.make_pictures(tmp_path, 30)
    pictures = recipe.Pictures(tmp_path / "train", range(30))
    means: dict[int, list[Any]] = {}
    for i in range(len(pictures)):
        means.setdefault(pictures[i]["label"], []).append(pictures[i]["image"].float().mean((1, 2)).numpy())
    assert sorted(means) == list(range(10))
    inside = np.mean([np.std(np.stack(group), axis=0) for group in means.values()])
    between = np.std([np.mean(group, axis=0) for group in means.values()], axis=0).mean()
    assert between > 2 * inside
