"""``pack info``: every number that it prints, counted independently."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from build_data import read_json, run_build, sign_manifest
from conftest import picture, save
from loaders.format import FormatError, read_manifest
from packer.info import describe, human_bytes, table


def rows(root: Path) -> dict[str, list[str]]:
    """First word(s) of a line -> its other columns."""
    found = {}
    for line in describe(root):
        words = [w for w in line.split("  ") if w.strip()]
        if words:
            found[words[0].strip()] = [w.strip() for w in words[1:]]
    return found


def test_detection(make_voc: Callable[..., Path], tmp_path: Path) -> None:
    assert run_build(make_voc(20), tmp_path / "out", output={"shard_samples": 5}, transform={"resize": "32", "mode": "long"}).ok
    lines = list(describe(tmp_path / "out"))
    size = sum(p.stat().st_size for p in (tmp_path / "out").rglob("*.tar"))
    assert lines[0] == f"{tmp_path}/out: 20 samples, detection, layout tar, {human_bytes(size)}"
    assert f"source: voc, fingerprint {read_manifest(tmp_path / 'out').source.fingerprint[:16]}" in lines
    assert 'transform: {"' in "\n".join(lines)
    assert "findings: 0 error, 0 skip, 0 warning" in lines
    found = rows(tmp_path / "out")
    train = sum(p.stat().st_size for p in (tmp_path / "out" / "train").glob("*.tar"))
    assert found["train"] == ["12", "3", human_bytes(train)]
    assert found["val"][:2] == found["test"][:2] == ["4", "1"]
    # make_voc: picture i is in split i % 5, has i % 5 boxes, box j of class (i + j) % 4
    expected = np.zeros((4, 3), int)
    for i in range(20):
        for j in range(i % 5):
            expected[(i + j) % 4, {3: 1, 4: 2}.get(i % 5, 0)] += 1
    names = ["crack", "incomplete_fusion", "porosity", "slag"]
    order = [line.split()[0] for line in lines if line.split() and line.split()[0] in ("train", "val", "test")]
    assert order == ["train", "val", "test"]
    for k, name in enumerate(names):
        row = next(line.split() for line in lines if f" {name} " in line)
        assert row == [str(k), name, *(str(n) for n in expected[k])]
    sizes = [((64, 48), (80, 60), (49, 64))[i % 3] for i in range(20)]
    widths = [int(w * 32 / max(w, h) + 0.5) for w, h in sizes]
    heights = [int(h * 32 / max(w, h) + 0.5) for w, h in sizes]
    assert found["image width"] == [f"{v:g}" for v in (min(widths), np.median(widths), max(widths))]
    assert found["image height"] == [f"{v:g}" for v in (min(heights), np.median(heights), max(heights))]
    assert found["boxes per image"] == ["0", "2", "4"]


def test_a_long_class_name_is_cut(tmp_path: Path) -> None:
    save(tmp_path / "src" / ("n" * 150) / "a.jpg", picture(20, 16, 0))
    assert run_build(tmp_path / "src", tmp_path / "out").ok
    (line,) = [line for line in describe(tmp_path / "out") if "nnn" in line]
    assert line.split() == ["0", "n" * 57 + "...", "1"]


@pytest.mark.parametrize("layout", ["tar", "memmap"])
def test_classification_and_unlabelled(layout: str, make_folder: Callable[..., Path], tmp_path: Path) -> None:
    src = make_folder(7)
    assert run_build(src, tmp_path / "out", output={"format": layout}).ok
    lines = list(describe(tmp_path / "out"))
    assert [line.split() for line in lines if line.split() and line.split()[0] in ("0", "1", "2")] == [
        ["0", "crack", "3"],
        ["1", "porosity", "2"],
        ["2", "slag", "2"],
    ]
    assert ("image bytes" in rows(tmp_path / "out")) == (layout == "tar")
    assert rows(tmp_path / "out")["image width"] == ["40", "40", "40"]
    assert run_build(src / "slag", tmp_path / "flat", output={"format": layout}).ok
    lines = list(describe(tmp_path / "flat"))
    assert "2 samples, unlabelled" in lines[0]
    assert "transform: none" in lines
    assert not any(line.startswith(("id", " 0")) for line in lines)


def test_refuses_what_is_no_data_set(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="no such folder"):
        list(describe(tmp_path / "nothing"))


def test_hostile_numbers(make_folder: Callable[..., Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run_build(make_folder(5), out).ok
    raw: dict[str, Any] = read_json(out)
    path = out / "index/train/samples.npy"
    samples = np.load(path, allow_pickle=False)
    samples["label"] = [-1, -5, 2**31 - 1, 1, 1]
    np.save(path, samples)
    assert ["1", "porosity", "2"] in [line.split() for line in describe(out)]
    sign_manifest(out, {**raw, "splits": {}, "files": {}})
    assert "0 samples" in next(iter(describe(out)))
    assert len(list(describe(out))) > 5


def test_class_names_that_would_garble_the_terminal(tmp_path: Path) -> None:
    save(tmp_path / "src" / "a\x1b[2J\nb" / "x.png", picture(8, 8))
    assert run_build(tmp_path / "src", tmp_path / "out").ok
    assert "a\\x1b[2J\\nb" in "\n".join(describe(tmp_path / "out"))
    assert "\x1b" not in "\n".join(describe(tmp_path / "out"))


def test_a_manifest_that_would_garble_the_terminal(make_folder: Callable[..., Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run_build(make_folder(5), out).ok
    raw = read_json(out)
    raw["source"]["kind"] = "fol\x1b[2Jder"
    sign_manifest(out, {**raw, "created_by": {"a\nb": "\x9b1"}})
    lines = list(describe(out))
    assert "source: fol\\x1b[2Jder" in "\n".join(lines)
    assert "made by: a\\nb \\x9b1" in lines
    assert all(line.isprintable() for line in lines)


def test_table_aligns() -> None:
    rows = [["id", "name", "n"], ["0", "ab", "1,000"], ["10", "c", "2"]]
    assert list(table(rows)) == ["id  name      n", " 0  ab    1,000", "10  c         2"]


@pytest.mark.parametrize(
    ("n", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (1234567, "1.2 MB"), (999_960, "1.0 MB"), (5 * 10**9, "5.0 GB"), (10**15, "1000.0 TB")],
)
def test_human_bytes(n: int, text: str) -> None:
    assert human_bytes(n) == text


def test_bytes_are_those_of_the_shards(make_folder: Callable[..., Path], tmp_path: Path) -> None:
    assert run_build(make_folder(5), tmp_path / "out", output={"format": "memmap"}).ok
    size = sum(os.path.getsize(p) for p in (tmp_path / "out" / "train").rglob("*.npy"))
    assert human_bytes(size) in next(iter(describe(tmp_path / "out")))
