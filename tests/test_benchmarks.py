"""The benchmarks run, compare what is comparable, and report what they measured. Nothing here is timed."""

from __future__ import annotations

import importlib
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

RECIPES = Path(__file__).parent.parent / "recipes"
BENCHMARKS = RECIPES / "benchmarks"

# A contestant without torch: batches of four rows, the last one of value `value`.
STUB = """
import numpy as np
from protocol import serve

def build(samples=8, value=7, side=2, fail=False, late=False):
    if fail:
        raise ValueError("this peer cannot start")
    def epoch():
        for start in range(0, samples, 4):
            if late:
                raise OSError("this peer breaks later")
            yield np.full((4, side, side, 3), value, np.uint8), np.arange(start, start + 4), [np.ones((2, 4))]
    return epoch

serve({"build": build})
"""


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.fixture
def contest() -> ModuleType:
    return importlib.import_module("contest")


@pytest.fixture
def stub(contest: ModuleType, tmp_path: Path) -> Any:
    """Makes a contestant of the script above."""
    script = tmp_path / "stub.py"
    script.write_text(STUB)

    def make(
        name: str, role: str = "peer", exact: bool = False, whole: bool = True, target: float | None = None, **arguments: object
    ) -> Any:
        environment = {"PYTHONPATH": str(BENCHMARKS)}
        return contest.Contestant(
            name, str(script), "build", arguments, role=role, environment=environment, exact=exact, whole=whole, target=target
        )

    return make


def measure(contest: ModuleType, tmp_path: Path, contestants: list[Any], rounds: int = 1) -> list[Any]:
    return contest.measure(contestants, {"main": Path(sys.executable)}, tmp_path, rounds, 0.01)


def run(script: str, *args: object) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}  # torch's pool spins when the cores are busy with other tests
    return subprocess.run([sys.executable, BENCHMARKS / script, *map(str, args)], capture_output=True, text=True, timeout=500, env=env)


def test_a_contest_gives_rounds_memory_and_failures(contest: ModuleType, stub: Any, tmp_path: Path) -> None:
    contestants = [stub("ours", "ours"), stub("same", exact=True, target=0.5), stub("broken", fail=True), stub("late", late=True)]
    ours, same, broken, late = measure(contest, tmp_path, contestants, rounds=2)
    assert ours.checked == {"samples": 8, "pixels": 8 * 12 * 7, "labels": 28, "extra": 16.0, "shape": [2, 2, 3], "dtype": "uint8"}
    assert len(ours.rates) == len(same.rates) == 2
    assert min(*ours.rates, *same.rates, *ours.per_cpu_s) > 0
    assert "this peer cannot start" in broken.failure
    assert "this peer breaks later" in late.failure
    rows = importlib.import_module("report").rows_of([ours, same, broken, late])
    assert [row["name"] for row in rows] == ["ours", "same", "broken", "late"]
    assert rows[1]["ratio_low"] <= rows[1]["ratio"] <= rows[1]["ratio_high"]
    assert rows[1]["reached"] == (rows[1]["ratio"] >= 0.5)
    assert rows[2]["failure"] == broken.failure


@pytest.mark.parametrize(
    ("peer", "said"),
    [
        ({"samples": 4}, "samples of an epoch add up to 4, ours to 8"),
        ({"value": 8, "exact": True}, "pixels of an epoch add up to 768, ours to 672"),
        ({"side": 3, "whole": False}, r"gives uint8 \[3, 3, 3\], ours uint8 \[2, 2, 3\]"),
    ],
)
def test_a_peer_that_gives_something_else_ends_the_contest(
    contest: ModuleType, stub: Any, tmp_path: Path, peer: dict[str, Any], said: str
) -> None:
    with pytest.raises(RuntimeError, match=f"^other:? {said}"):
        measure(contest, tmp_path, [stub("ours", "ours"), stub("other", **peer)])


def test_other_pixels_are_no_fault_where_augmentation_is_random(contest: ModuleType, stub: Any, tmp_path: Path) -> None:
    results = measure(contest, tmp_path, [stub("ours", "ours"), stub("other", value=9)])
    assert not results[1].failure
    assert results[1].rates


def test_ours_must_not_fail(contest: ModuleType, stub: Any, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"ours: ended with 1: .*this peer cannot start"):
        measure(contest, tmp_path, [stub("ours", "ours", fail=True)])


def test_a_contestant_that_never_answers_is_ended(contest: ModuleType, stub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contest, "ANSWER_S", 0.01)
    with pytest.raises(RuntimeError, match=r"ours: no answer in 0.01 s"):
        measure(contest, tmp_path, [stub("ours", "ours")])


@settings(deadline=None)
@given(height=st.integers(1, 600), width=st.integers(1, 600), seed=st.integers(0, 1000))
def test_crop_regions_are_inside_the_picture(height: int, width: int, seed: int) -> None:
    y, x, h, w = importlib.import_module("augment_plain").crop_region(height, width, random.Random(seed))
    assert 0 <= y < y + h <= height
    assert 0 <= x < x + w <= width


RESULT: dict[str, Any] = {
    "date": "2026-11-29",
    "machine": {"cores": 2, "cpu": "Some CPU", "memory_gb": 25.0, "system": "Linux, Python 3.11"},
    "versions": {"torch": "2.13.0"},
    "rounds": 5,
    "seconds": 3.0,
    "missing": {"ffcv": "not installed"},
    "workloads": {
        "a": {
            "title": "a contest",
            "rows": [
                {"name": "BatchLoader", "role": "ours", "note": "", "rates": [100.0, 200.0, 12345.0], "per_cpu_s": 1.234, "peak_mb": 5.0},
                {
                    "name": "peer",
                    "role": "peer",
                    "note": "",
                    "rates": [50.0],
                    "per_cpu_s": None,
                    "peak_mb": 1.0,
                    "ratio": 2.0,
                    "ratio_low": 1.5,
                    "ratio_high": 2.5,
                    "target": 77.0,
                    "reached": False,
                },
                {"name": "gone", "role": "peer", "failure": "it broke"},
            ],
        },
        "b": {"title": "facts", "facts": [{"name": "open", "value": 0.1234, "unit": "s", "limit": 55.0}]},
    },
}


def test_the_readme_takes_the_table_between_its_marks(tmp_path: Path) -> None:
    report = importlib.import_module("report")
    readme = tmp_path / "README.md"
    readme.write_text("before\n<!-- speed -->\nold\n<!-- /speed -->\nafter\n")
    for _ in range(2):
        report.update_readme(readme, report.markdown(RESULT))
    text = readme.read_text()
    assert text.startswith("before\n<!-- speed -->\nMeasured on 2026-11-29 on 2 cores of Some CPU")
    assert text.endswith("<!-- /speed -->\nafter\n")
    assert "| `BatchLoader` | 200 |  | 1.23 | 5 |" in text
    assert "| peer | 50 | 2.00 (1.50 to 2.50) |  | 1 |" in text
    assert "| open | 0.123 s |" in text
    assert "ffcv: not installed; gone: it broke" in text
    assert "old" not in text
    assert not re.search(r"\b(77|55)\b", text)  # targets stay out of it


@pytest.mark.parametrize("text", ["no marks", "<!-- /speed --><!-- speed -->", "<!-- speed --><!-- speed --><!-- /speed -->"])
def test_a_readme_without_marks_is_left_alone(tmp_path: Path, text: str) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(text)
    with pytest.raises(ValueError, match="once each"):
        importlib.import_module("report").update_readme(readme, "new")
    assert readme.read_text() == text


def test_the_readme_of_the_project_has_the_marks() -> None:
    text = (RECIPES.parent / "README.md").read_text("utf-8")
    assert text.count("<!-- speed -->") == text.count("<!-- /speed -->") == 1


@pytest.mark.slow
def test_run_lists_refuses_and_measures(tmp_path: Path) -> None:
    wrong = run("run.py", "memmap999")
    assert wrong.returncode == 2
    assert "no workload memmap999; there are memmap224" in wrong.stderr
    done = run("run.py", "photos-256", "open", "--short", "--no-peers", "--workers", 1, "--bench-dir", tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(r"│ BatchLoader, processes=True +│ +[\d,.]+ ", done.stdout)
    assert re.search(r"│ memmap: pickled data set +│ [\d.]+ kB", done.stdout)
    found = json.loads((tmp_path / "results.json").read_text())
    names = [row["name"] for row in found["workloads"]["photos-256"]["rows"]]
    assert names == ["BatchLoader, processes=True", "BatchLoader, threads", "cv2 decode and crop, 1 threads", "webdataset, cv2, 1 workers"]
    assert all(row["rates"] for row in found["workloads"]["photos-256"]["rows"])
    assert set(found["missing"].values()) == {"left out by --no-peers"}
    assert (tmp_path / "results.md").read_text().count("\n| ") > 8


@pytest.mark.slow
def test_pack_rate_prints_both_workloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(RECIPES))
    welding = importlib.import_module("make_welding_v2")
    welding.make(tmp_path / "raw", welding.Options(num=80, size=(320, 240)))
    done = run("pack_rate.py", "--data", tmp_path / "raw", "--workers", 1, "--rounds", 1)
    assert done.returncode == 0, done.stderr
    for name in ("keep", "resize"):
        assert re.search(rf"round 0, {name}: build \d", done.stdout)
        assert re.search(rf"│ {name} +│", done.stdout)
    assert len(list((tmp_path / "raw/images").iterdir())) == 80
