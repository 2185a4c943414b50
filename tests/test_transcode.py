"""A restart grid for JPEGs that keep their pixels: what jpegtran gives us, and what happens where it gives something else."""

from __future__ import annotations

import os
import shutil
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from build_data import Recorder, read_json, run_build, tree
from image_data import exif, picture, save, with_exif
from loaders.codecs import decode_image, encode_image
from loaders.jpeg import parse_header, restart_offsets
from loaders.shards import ShardDataset
from packer.sample import PackError, UsageError
from packer.transcode import TranscodeError, add_restart_grid, program_version

NEEDS_JPEGTRAN = pytest.mark.skipif(shutil.which("jpegtran") is None, reason="the program jpegtran is not installed")
PIXELS = picture(203, 383)
SAMPLING_411 = (cv2.IMWRITE_JPEG_SAMPLING_FACTOR, cv2.IMWRITE_JPEG_SAMPLING_FACTOR_411)
SOURCES = {
    "420": save(PIXELS, "JPEG", quality=92),
    "422": save(PIXELS, "JPEG", quality=92, subsampling="4:2:2"),
    "444": save(PIXELS, "JPEG", quality=97, subsampling="4:4:4"),
    "411": cv2.imencode(".jpg", PIXELS, SAMPLING_411)[1].tobytes(),
    "gray": save(PIXELS[..., 0], "JPEG"),
    "progressive": save(PIXELS, "JPEG", progressive=True),
    "other interval": save(PIXELS, "JPEG", restart_marker_blocks=13),
    "metadata": with_exif(save(PIXELS, "JPEG", comment=b"weld 7", icc_profile=b"profile" * 40), exif(1)),
    "one pixel": save(PIXELS[:1, :1], "JPEG"),
}


@NEEDS_JPEGTRAN
@pytest.mark.parametrize("kind", SOURCES)
def test_the_same_pixels_with_a_grid(kind: str) -> None:
    made = add_restart_grid(SOURCES[kind])
    assert len(restart_offsets(made)) == np.prod(parse_header(made).grid) + 1 > 1
    np.testing.assert_array_equal(decode_image(made, "jpg"), decode_image(SOURCES[kind], "jpg"))
    assert add_restart_grid(SOURCES[kind]) == made
    if kind != "one pixel":
        assert parse_header(made).grid[1] > 1  # crops skip columns too


@NEEDS_JPEGTRAN
def test_metadata_is_kept() -> None:
    made = add_restart_grid(SOURCES["metadata"])
    for segment in (b"weld 7", b"profile" * 40, exif(1)):
        assert segment in made


def test_a_grid_that_is_there_is_left_alone() -> None:
    data = encode_image(PIXELS, "jpg")
    assert add_restart_grid(data) is data


def mixed(root: Path) -> Path:
    """Classes of a JPEG without a grid, a PNG, a progressive JPEG, and a JPEG that must be turned."""
    files = {"a/plain.jpg": SOURCES["420"], "a/lossless.png": save(PIXELS, "PNG"), "b/slow.jpg": SOURCES["progressive"]}
    files["b/turned.jpg"] = with_exif(SOURCES["420"], exif(6))
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return root


@NEEDS_JPEGTRAN
def test_a_build_keeps_pixels_and_says_by_what(tmp_path: Path) -> None:
    src = mixed(tmp_path / "src")
    for name, workers in (("one", 1), ("two", 2)):
        assert run_build(src, tmp_path / name, output={"restart_grid": "lossless"}, run={"workers": workers}).ok
    assert tree(tmp_path / "one") == tree(tmp_path / "two")
    manifest = read_json(tmp_path / "one")
    assert manifest["created_by"]["jpegtran"] == program_version()
    assert manifest["output"]["restart_grid"] == "lossless"
    ds = ShardDataset(tmp_path / "one", split="train")
    assert {ds.meta(i)["source"]: ds.reads_regions(i) for i in range(4)} == {
        "a/plain.jpg": True,
        "a/lossless.png": False,
        "b/slow.jpg": True,
        "b/turned.jpg": True,
    }
    for i in range(4):
        source = src / ds.meta(i)["source"]
        if source.name != "turned.jpg":  # made anew
            expected = decode_image(source.read_bytes(), "png" if source.suffix == ".png" else "jpg")
            np.testing.assert_array_equal(ds.load(i)["image"], expected)


def test_the_manifest_says_a_subsampling_that_was_chosen(tmp_path: Path) -> None:
    src = mixed(tmp_path / "src")
    for name, options in (("default", {}), ("chosen", {"subsampling": "444", "image": "jpg"})):
        assert run_build(src, tmp_path / name, output=options).ok
    assert "subsampling" not in read_json(tmp_path / "default")["output"]
    assert read_json(tmp_path / "chosen")["output"]["subsampling"] == "444"


# Other programs of that name


def script(body: str) -> str:
    version = "if '-version' in sys.argv:\n    print('libjpeg-turbo version 9 (fake)')\n    sys.exit()"
    return f"#!{sys.executable}\nimport os, sys, signal\n{version}\n{body}"


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    def install(text: str) -> None:
        path = tmp_path / "bin" / "jpegtran"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", str(path.parent))

    return install


WRITE = "sys.stdin.buffer.read(); sys.stdout.buffer.write({!r})"
OTHER = encode_image(255 - PIXELS, "jpg")
WRONG = {
    "without a usable grid": WRITE.format(SOURCES["420"]),
    "with other pixels": WRITE.format(OTHER),
    "cannot be decoded": WRITE.format(OTHER[:700] + bytes(40) + OTHER[740:]),
    "ended with status 3: no idea": "sys.stderr.write('no\\n idea'); sys.exit(3)",
    "ended with status -6": "os.abort()",
}


@pytest.mark.parametrize("said", WRONG)
def test_anything_else_is_refused(fake: Callable[[str], None], said: str) -> None:
    fake(script(WRONG[said]))
    with pytest.raises(TranscodeError, match=said):
        add_restart_grid(SOURCES["420"])


def test_a_lack_of_memory_is_no_fault_of_the_picture(fake: Callable[[str], None]) -> None:
    for body in ("sys.stderr.write('Insufficient memory (case 4)'); sys.exit(1)", "os.kill(os.getpid(), signal.SIGKILL)"):
        fake(script(body))
        with pytest.raises(MemoryError):
            add_restart_grid(SOURCES["420"])


def test_a_program_that_does_not_end(fake: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("packer.transcode._TIMEOUT_S", 0.2)
    fake(script("import time; time.sleep(60)"))
    with pytest.raises(PackError, match="has not ended within"):
        add_restart_grid(SOURCES["420"])


def test_a_program_that_goes_away_ends_the_build_as_a_fault_of_the_machine(fake: Callable[[str], None], tmp_path: Path) -> None:
    fake(script(f"os.remove({os.fspath(tmp_path / 'bin' / 'jpegtran')!r})\nsys.exit(1)"))
    with pytest.raises(PackError, match=r"jpegtran: No such file or directory: the program went away while packing") as e:
        run_build(mixed(tmp_path / "src"), tmp_path / "out", output={"restart_grid": "lossless"})
    assert not isinstance(e.value, UsageError)


def test_what_cannot_have_a_grid_is_stored_as_it_is_and_said(fake: Callable[[str], None], tmp_path: Path) -> None:
    fake(script("sys.exit(1)"))
    src, console = mixed(tmp_path / "src"), Recorder()
    assert run_build(src, tmp_path / "out", console, output={"restart_grid": "lossless"}).ok
    assert sum("it is stored as it is: jpegtran ended with status 1: without a reason" in said for said in console.findings) == 2
    assert read_json(tmp_path / "out")["created_by"]["jpegtran"] == "libjpeg-turbo version 9 (fake)"
    ds = ShardDataset(tmp_path / "out", split="train")
    for i in range(4):
        source = src / ds.meta(i)["source"]
        assert (ds.encoded(i) == source.read_bytes()) == (source.name != "turned.jpg")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "jpegtran, which is not on the PATH. Install the package libjpeg-turbo-progs"),
        ("#!/bin/sh\necho mozjpeg version 4.1.1 >&2\n", "says 'mozjpeg version 4.1.1'. Install the package libjpeg-turbo-progs"),
        ("no program at all", "Exec format error"),
    ],
)
def test_no_such_program_is_said_before_any_work(
    fake: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: Any, said: str
) -> None:
    monkeypatch.setenv("PATH", os.fspath(tmp_path / "nothing"))
    if text is not None:
        fake(text)
    console = Recorder()
    with pytest.raises(UsageError) as e:
        run_build(mixed(tmp_path / "src"), tmp_path / "out", console, output={"restart_grid": "lossless"})
    assert said in str(e.value)
    assert not list((tmp_path / "out").glob("*"))
