"""A corrected command must never be served with what the wrong one has left in ``.partial/``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from build_data import differences, run_build, tree
from conftest import picture, save, voc_xml
from packer.findings import Findings
from packer.sample import Finding, PackError, UsageError


@pytest.fixture
def devkit(make_voc: Callable[..., Path]) -> Path:
    """A VOC set with a one-pixel box, as the devkit writes it, and with a picture that cannot be read."""
    src = make_voc(10)
    (src / "annotations" / "weld_0001.xml").write_text(voc_xml("weld_0001", (80, 60), [("crack", (5, 5, 5, 20))]))
    (src / "images" / "weld_0002.jpg").write_bytes(b"no picture")
    return src


def run(src: Path, out: Path, **tables: Any) -> bool:
    try:
        return run_build(src, out, **tables).ok
    except PackError:
        return False


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ({}, {"source": {"origin": 1}}),
        ({"source": {"origin": 1}}, {"source": {"origin": 0}}),
        ({"source": {"origin": 1}}, {"source": {"origin": 1, "boxes": "clip"}}),
        ({"source": {"origin": 1}}, {"source": {"origin": 1, "exif": "ignore"}}),
        ({"source": {"origin": 1}}, {"source": {"origin": 1}, "transform": {"resize": 32}}),
        ({"source": {"origin": 1}}, {"source": {"origin": 1}, "output": {"image": "jpg", "quality": 50}}),
        ({"source": {"origin": 1}}, {"source": {"origin": 1}, "output": {"image": "jpg", "restart_grid": False}}),
        ({"source": {"origin": 1}}, {"source": {"origin": 1}, "output": {"seed": 3}}),
        (
            {"source": {"origin": 1}},
            {"source": {"origin": 1, "classes": ["slag", "porosity", "incomplete_fusion", "crack"]}},
        ),
    ],
)
def test_voc(devkit: Path, tmp_path: Path, wrong: dict[str, Any], right: dict[str, Any]) -> None:
    assert not run(devkit, tmp_path / "out", **wrong)
    right = {**right, "run": {"on_error": "skip"}}
    assert run(devkit, tmp_path / "out", **right)
    assert run(devkit, tmp_path / "fresh", **right)
    assert differences(tree(tmp_path / "out"), tree(tmp_path / "fresh")) == []


def test_csv_units(tmp_path: Path) -> None:
    src = tmp_path / "src"
    save(src / "a.jpg", picture(64, 48))
    (src / "boxes.csv").write_text("filename,class,xmin,ymin,xmax,ymax\na.jpg,crack,0.25,0.25,0.5,0.75\n")
    assert not run(src, tmp_path / "out", source={"coords": "pixel"})
    right = {"source": {"coords": "normalized"}}
    assert run(src, tmp_path / "out", **right)
    assert run(src, tmp_path / "fresh", **right)
    assert differences(tree(tmp_path / "out"), tree(tmp_path / "fresh")) == []


def test_kept_columns_are_never_dropped_without_a_word(tmp_path: Path) -> None:
    src = tmp_path / "src"
    save(src / "a.jpg", picture(64, 48))
    (src / "labels.csv").write_text("filename,label,patient\na.jpg,crack,p7\n")
    with pytest.raises(UsageError, match="extra"):
        run_build(src, tmp_path / "out", source={"extra": ["patient"]}, output={"format": "memmap"})
    assert run(src, tmp_path / "out", source={"extra": ["patient"]})


def test_findings_of_finished_jobs_are_told_before_the_last_one() -> None:
    told: list[str] = []
    findings = Findings(told.append)
    finding = Finding("skip", "bad-xml", "a.xml", "is broken", sample="a.jpg")
    findings.tell(finding)
    assert len(told) == 1
    assert len(findings) == 0
    findings.add(finding)
    assert len(told) == 1
    assert list(findings) == [finding]


def test_groups_and_splits_that_come_out_empty_are_told(make_folder: Callable[..., Path], tmp_path: Path) -> None:
    src = make_folder(12)
    half = {"train": 0.5, "val": 0.5}
    with pytest.raises(UsageError, match="matches no path"):
        run_build(src, tmp_path / "a", split={**half, "group": "seam"})
    outcome = run_build(src, tmp_path / "b", split={**half, "group": "p"})
    assert outcome.findings is not None
    assert [f.code for f in outcome.findings] == ["empty-split"]
