"""The far ends of what a data set can be: very many classes or one, no sample, all refused, odd names, limits; the summary of a failure."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from build_data import Recorder, pack, run_build
from conftest import picture, save
from loaders.shards import ShardDataset
from packer.content import is_raw
from packer.probing import ImageError, probe


def sound(out: Path) -> bool:
    return pack("verify", out).returncode == 0


def packed(src: Path, out: Path, **tables: Any) -> Recorder:
    console = Recorder()
    outcome = run_build(src, out, console, **tables)
    assert outcome.ok, outcome.message
    assert sound(out)
    return console


@pytest.mark.slow
def test_ten_thousand_classes(tmp_path: Path) -> None:
    for n in range(10_000):
        folder = tmp_path / "src" / f"class {n:05d}"
        folder.mkdir(parents=True)
        cv2.imwrite(str(folder / "a.png"), np.full((2, 2, 3), (n % 251, n // 251, 7), np.uint8))
    outcome = run_build(tmp_path / "src", tmp_path / "out")
    assert outcome.ok
    ds = ShardDataset(tmp_path / "out")
    assert ds.classes[:2] == ["class 00000", "class 00001"]
    assert ds.labels is not None
    assert sorted(ds.labels.tolist()) == list(range(10_000))


def test_one_class_and_one_sample(tmp_path: Path) -> None:
    save(tmp_path / "src" / "crack" / "a.jpg", picture())
    packed(tmp_path / "src", tmp_path / "out")
    ds = ShardDataset(tmp_path / "out")
    assert (len(ds), ds.classes, ds[0]["label"]) == (1, ["crack"], 0)


def test_a_share_of_nothing_is_an_empty_split(tmp_path: Path) -> None:
    for n in range(4):
        save(tmp_path / "src" / "crack" / f"{n}.jpg", picture(seed=n))
    packed(tmp_path / "src", tmp_path / "out", split={"train": 1.0, "val": 0.0})
    assert len(ShardDataset(tmp_path / "out")) == 4


def test_every_sample_refused(tmp_path: Path) -> None:
    for n in range(3):
        path = tmp_path / "src" / "crack" / f"{n}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"not a picture")
    for on_error in ("fail", "skip"):
        outcome = run_build(tmp_path / "src", tmp_path / "out", run={"on_error": on_error})
        assert not outcome.ok
        assert not (tmp_path / "out" / "manifest.json").exists()


@pytest.mark.parametrize(("key", "value"), [("max_pixels", 64 * 48 - 1), ("max_file_bytes", 1000)])
def test_limits_name_picture_and_number(tmp_path: Path, key: str, value: int) -> None:
    save(tmp_path / "src" / "crack" / "a.jpg", picture())
    console = Recorder()
    outcome = run_build(tmp_path / "src", tmp_path / "out", console, source={key: value})
    assert not outcome.ok
    assert any("crack/a.jpg" in line and f"{value:,}" in line.replace(str(value), f"{value:,}") for line in console.findings), (
        console.findings
    )


@pytest.mark.parametrize(
    "name",
    [
        b"n" * 251 + b".jpg",
        b"tab\there.jpg",
        b"line\nbreak.jpg",
        b"\x1b[31mred.jpg",
        b"-rf.jpg",
        b"100%s %(x)s {y}.jpg",
        b"\"quoted' name.jpg",
        b" .jpg",
        "עברית.jpg".encode(),
    ],
)
def test_odd_names_are_packed_and_said_safely(tmp_path: Path, name: bytes) -> None:
    folder = tmp_path / "src" / "crack"
    save(folder / "plain.jpg", picture(seed=1))
    save(tmp_path / "x.jpg", picture(seed=2))
    os.rename(os.fsencode(tmp_path / "x.jpg"), os.fsencode(folder) + b"/" + name)
    (folder / "broken.jpg").write_bytes(b"")
    done = pack("build", "--on-error", "skip", tmp_path / "src", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert "\x1b[31m" not in done.stderr + done.stdout
    assert sound(tmp_path / "out")
    ds = ShardDataset(tmp_path / "out")
    sources = {ds.meta(i)["source"] for i in range(len(ds))}
    assert len(sources) == 2, done.stderr
    assert "crack/plain.jpg" in sources


def test_a_class_may_end_in_a_year(tmp_path: Path) -> None:
    names = ["Audi A4 Sedan 2014", "class 02017", "voc", "2014"]
    for n, name in enumerate(names):
        save(tmp_path / "src" / name / "a.jpg", picture(seed=n))
    packed(tmp_path / "src", tmp_path / "out")
    assert ShardDataset(tmp_path / "out").classes == sorted(names)


def test_a_name_that_is_no_utf8_is_named(tmp_path: Path) -> None:
    save(tmp_path / "src" / "crack" / "a.jpg", picture())
    os.rename(tmp_path / "src" / "crack" / "a.jpg", os.fsencode(tmp_path / "src" / "crack") + b"/caf\xe9.jpg")
    console = Recorder()
    assert not run_build(tmp_path / "src", tmp_path / "out", console).ok
    assert any("caf\\xe9.jpg: the name is not UTF-8" in line for line in console.findings), console.findings


def tiff(order: str, entries: list[tuple[int, int]]) -> bytes:
    """A header and a first page with LONG entries, in either byte order."""
    mark = b"II*\0" if order == "<" else b"MM\0*"
    page = b"".join(struct.pack(f"{order}HHII", tag, 4, 1, value) for tag, value in entries)
    return mark + struct.pack(f"{order}IH", 8, len(entries)) + page + bytes(4)


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("reduced", [True, False])
def test_a_tiff_that_begins_with_a_reduced_copy_is_a_raw_file(order: str, reduced: bool) -> None:
    """As most cameras' files begin: Pillow would take the thumbnail for the picture."""
    strip = bytes(8 * 8)
    entries = [(254, int(reduced)), (256, 8), (257, 8), (258, 8), (259, 1), (262, 1), (273, 0), (277, 1), (278, 8), (279, 64)]
    entries[6] = (273, len(tiff(order, entries)))
    data = tiff(order, entries) + strip
    if reduced:
        with pytest.raises(ImageError, match="reduced copy"):
            probe(data, max_pixels=1000)
    else:
        assert probe(data, max_pixels=1000).width == 8
    assert is_raw(b"II*\0\x10\0\0\0CR\x02\0")


def test_the_summary_of_a_build_that_fails_counts_by_code(tmp_path: Path) -> None:
    for n in range(5):
        save(tmp_path / "src" / "crack" / f"{n}.jpg", picture(seed=n))
    for n in range(3):
        path = tmp_path / "src" / "crack" / f"{n}.jpg"
        path.write_bytes(path.read_bytes()[:-200] if n else b"text")
    done = pack("build", tmp_path / "src", tmp_path / "out")
    assert done.returncode == 1
    assert "3 findings: 2 truncated-image (skip), 1 unsupported-image (skip)" in done.stderr, done.stderr
    again = pack("check", tmp_path / "src")
    assert "3 findings: 2 truncated-image (skip), 1 unsupported-image (skip)" in again.stderr
