"""The recipes run, and make what they say."""

from __future__ import annotations

import csv
import importlib
import json
import os
import re
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import cv2
import numpy as np
import pytest

RECIPES = Path(__file__).parent.parent / "recipes"


@pytest.fixture
def welding(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(RECIPES))
    return importlib.import_module("make_welding_v2")


def test_the_drawing_in_the_readme_is_what_its_recipe_draws(tmp_path: Path) -> None:
    assert run("draw_grid.py", tmp_path / "grid.svg").returncode == 0
    assert (tmp_path / "grid.svg").read_text() == (RECIPES.parent / "docs" / "restart-grid.svg").read_text()


def run(script: str, *args: object) -> subprocess.CompletedProcess[str]:
    # One thread: torch's pool spins when the cores are busy with other tests.
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, RECIPES / script, *map(str, args)], capture_output=True, text=True, timeout=120, env=env)


def tree(root: Path) -> dict[str, bytes]:
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


def boxes_of(xml: Path) -> list[tuple[str, int, int, int, int]]:
    found = []
    for item in ElementTree.parse(xml).getroot().iter("object"):
        x1, y1, x2, y2 = (int(item.findtext(f"bndbox/{corner}") or "missing") for corner in ("xmin", "ymin", "xmax", "ymax"))
        found.append((item.findtext("name") or "", x1, y1, x2, y2))
    return found


def test_welding_set_does_not_depend_on_workers(tmp_path: Path) -> None:
    for workers in (1, 2):
        done = run("make_welding_v2.py", tmp_path / str(workers), "--num", 10, "--size", "320x240", "--workers", workers)
        assert done.returncode == 0, done.stderr
    one, two = tree(tmp_path / "1"), tree(tmp_path / "2")
    assert one == two
    assert sum(name.endswith(".jpg") for name in one) == 10


def test_welding_files_fit_together(welding: ModuleType, tmp_path: Path) -> None:
    welding.make(tmp_path / "raw", welding.Options(num=20, size=(320, 240), seed=7))
    stems = [f"weld_{i:06d}" for i in range(1, 21)]
    rows = list(csv.DictReader((tmp_path / "raw/train_val_test_split.csv").read_text("utf-8").splitlines()))
    assert [row["image_id"] for row in rows] == stems
    assert Counter(row["split"] for row in rows) == {"train": 14, "val": 3, "test": 3}
    for stem in stems:
        picture = cv2.imread(str(tmp_path / f"raw/images/{stem}.jpg"))
        assert picture is not None
        assert picture.shape == (240, 320, 3)
        root = ElementTree.parse(tmp_path / f"raw/annotations/{stem}.xml").getroot()
        assert root.findtext("filename") == f"{stem}.jpg"
        assert (root.findtext("size/width"), root.findtext("size/height"), root.findtext("size/depth")) == ("320", "240", "3")
        for name, x1, y1, x2, y2 in boxes_of(tmp_path / f"raw/annotations/{stem}.xml"):
            assert name in welding.CLASSES
            assert 0 <= x1 < x2 <= 320
            assert 0 <= y1 < y2 <= 240


def test_boxes_enclose_the_drawn_pixels_tightly(welding: ModuleType) -> None:
    options = welding.Options(size=(400, 300), seed=1)
    seen = Counter[str]()
    for index in range(1, 41):
        picture, clean, defects = welding.draw_radiograph(index, options)
        drawn = picture != clean
        for defect in defects:
            x1, y1, x2, y2 = defect.box
            inside = drawn[y1:y2, x1:x2]
            assert inside[0].any()
            assert inside[-1].any()
            assert inside[:, 0].any()
            assert inside[:, -1].any()
            assert (picture[y1:y2, x1:x2] <= clean[y1:y2, x1:x2]).all()
            seen[defect.name] += 1
            drawn[y1:y2, x1:x2] = False
        assert not drawn.any()
    assert set(seen) == set(welding.CLASSES)


def test_welding_box_statistics(welding: ModuleType) -> None:
    options = welding.Options(size=(640, 480), seed=5)
    counts = []
    for index in range(1, 2001):
        rng = np.random.default_rng([options.seed, index])
        counts.append(len(welding.place_defects(rng, options, 240.0, 80.0)))
    assert 5.0 <= np.mean(counts) <= 5.4
    assert 0.03 <= np.mean(np.array(counts) == 0) <= 0.07


def test_welding_seed_and_index_decide_the_picture(welding: ModuleType) -> None:
    options = welding.Options(size=(320, 240))
    first = welding.draw_radiograph(3, options)[0]
    assert np.array_equal(first, welding.draw_radiograph(3, options)[0])
    assert not np.array_equal(first, welding.draw_radiograph(4, options)[0])
    assert not np.array_equal(first, welding.draw_radiograph(3, welding.Options(size=(320, 240), seed=1))[0])


def test_welding_keeps_its_own_set_and_remakes_it_for_other_options(welding: ModuleType, tmp_path: Path) -> None:
    out = tmp_path / "raw"
    boxes = welding.make(out, welding.Options(num=4, size=(200, 160)))
    before = {p: p.stat().st_mtime_ns for p in out.rglob("*.jpg")}
    assert welding.make(out, welding.Options(num=4, size=(200, 160))) == boxes
    assert {p: p.stat().st_mtime_ns for p in out.rglob("*.jpg")} == before
    welding.make(out, welding.Options(num=2, size=(200, 160)))
    assert len(list(out.rglob("*.jpg"))) == len(list(out.rglob("*.xml"))) == 2


def test_welding_remakes_an_unfinished_set(welding: ModuleType, tmp_path: Path) -> None:
    options = welding.Options(num=3, size=(200, 160))
    welding.make(tmp_path / "whole", options)
    out = tmp_path / "cut"
    (out / "images").mkdir(parents=True)
    (out / welding.MARKER).write_text('{"options": {"num": 3, "size": [200, 160], "seed": 0, "quality": 90}}')
    (out / "images/weld_000001.jpg").write_bytes(b"half")
    welding.make(out, options)
    assert tree(out) == tree(tmp_path / "whole")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--num", "0"], "--num is 0"),
        (["--size", "100x480"], "--size is 100x480"),
        (["--quality", "0"], "--quality is 0"),
    ],
)
def test_welding_refuses_options_out_of_range(tmp_path: Path, args: list[str], said: str) -> None:
    done = run("make_welding_v2.py", tmp_path / "raw", *args)
    assert done.returncode == 1
    assert said in done.stderr
    assert not (tmp_path / "raw").exists()


def test_welding_refuses_a_folder_of_others(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("keep")
    done = run("make_welding_v2.py", tmp_path, "--num", 2)
    assert done.returncode == 1
    assert f"{tmp_path}: exists and was not made by this recipe" in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.toml")), ids=lambda p: p.name)
def test_recipe_files_are_accepted(path: Path) -> None:
    from packer.recipe import load_recipe

    recipe = load_recipe(path, {})
    raw = tomllib.loads(path.read_text("utf-8"))
    assert recipe.source.kind == raw["source"]["kind"]
    assert recipe.output.format == raw["output"]["format"]


def test_welding_recipe_has_the_classes_in_order(welding: ModuleType) -> None:
    raw = tomllib.loads((RECIPES / "welding_v2.toml").read_text("utf-8"))
    assert tuple(raw["source"]["classes"]) == welding.CLASSES == ("crack", "porosity", "slag", "incomplete_fusion")


def pack(*args: object) -> subprocess.CompletedProcess[str]:
    script = Path(sys.executable).with_name("pack")
    return subprocess.run([script, *map(str, args)], capture_output=True, text=True, timeout=120)


def test_welding_set_draws_no_finding(welding: ModuleType, tmp_path: Path) -> None:
    welding.make(tmp_path / "raw", welding.Options(num=30, size=(320, 240)))
    done = pack("check", "--json", "--recipe", RECIPES / "welding_v2.toml", tmp_path / "raw")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["findings"] == []
    assert (said["num_samples"], said["num_skipped"]) == (30, 0)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tar", "memmap"])
def test_demo_and_training_run_on_packed_data(welding: ModuleType, tmp_path: Path, layout: str) -> None:
    welding.make(tmp_path / "raw", welding.Options(num=24, size=(320, 240)))
    flags = ["--recipe", RECIPES / "welding_v2.toml", "--format", layout, "--resize", "160", "--mode", "letterbox"]
    built = pack("build", *flags, tmp_path / "raw", tmp_path / "out")
    assert built.returncode == 0, built.stderr
    shown = run("demo.py", tmp_path / "out", "--batches", 2)
    assert shown.returncode == 0, shown.stderr
    assert f"layout {layout}; test 4, train 16, val 4" in shown.stdout
    assert "batch 1 of 2: image uint8 [8, 3, 160, 160]" in shown.stdout
    trained = run("train_detection.py", "--data", tmp_path / "out", "--epochs", 3, "--batch-size", 4, "--max-steps", 10)
    assert trained.returncode == 0, trained.stderr
    epochs = re.findall(r"loss (\d+\.\d+), (\d) steps", trained.stdout)
    assert [int(steps) for _, steps in epochs] == [4, 4, 2]
    assert float(epochs[1][0]) < float(epochs[0][0])


@pytest.mark.parametrize("script", ["demo", "train_detection"])
def test_reading_recipes_say_what_is_no_packed_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], script: str
) -> None:
    monkeypatch.syspath_prepend(str(RECIPES))
    args = [str(tmp_path)] if script == "demo" else ["--data", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [script, *args])
    assert importlib.import_module(script).main() == 1
    assert f"{script}: {tmp_path / 'manifest.json'}: not found" in capsys.readouterr().err
