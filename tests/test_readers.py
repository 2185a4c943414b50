"""Packed JPEGs with a restart grid are ordinary JPEGs: other people's readers see the pictures that ours does."""

from __future__ import annotations

import io
import shutil
import subprocess
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import simplejpeg  # type: ignore[import-untyped]  # it ships a stub, but no py.typed
import webdataset
from numpy.typing import NDArray
from PIL import Image

from build_data import run_build
from image_data import picture, save
from loaders.codecs import encode_image
from loaders.jpeg import restart_offsets
from loaders.shards import ShardDataset

PIXELS = picture(203, 384)
GRIDS = {
    "420": encode_image(PIXELS, "jpg"),
    "444, quality 95": encode_image(PIXELS, "jpg", quality=95, subsampling="444"),
    "whole rows": encode_image(PIXELS[:, : 11 * 16], "jpg"),
    "one cell": encode_image(PIXELS[:7, :5], "jpg"),
    "gray": save(PIXELS[..., 0], "JPEG", restart_marker_blocks=8),
}


def with_djpeg(data: bytes) -> NDArray[np.uint8]:
    ran = subprocess.run(["djpeg", "-bmp", "-strict"], input=data, capture_output=True, timeout=60, check=True)
    assert not ran.stderr  # where it finds something odd
    return np.asarray(Image.open(io.BytesIO(ran.stdout)).convert("RGB"))


READERS: dict[str, Any] = {
    "cv2": lambda data: cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR_RGB),
    "Pillow": lambda data: np.asarray(Image.open(io.BytesIO(data)).convert("RGB")),
    "simplejpeg": lambda data: simplejpeg.decode_jpeg(data, "RGB", strict=True),
    "djpeg": pytest.param(with_djpeg, marks=pytest.mark.skipif(shutil.which("djpeg") is None, reason="the program is not installed")),
}


@pytest.mark.parametrize("read", list(READERS.values()), ids=list(READERS))
@pytest.mark.parametrize("kind", GRIDS)
def test_a_reader_sees_the_picture(kind: str, read: Any) -> None:
    data = GRIDS[kind]
    assert len(restart_offsets(data)) > 1
    image = read(data)
    height, width = image.shape[:2]
    expected = PIXELS if kind != "gray" else np.dstack([PIXELS[..., 0]] * 3)
    assert (height, width) == {"whole rows": (203, 176), "one cell": (7, 5)}.get(kind, (203, 384))
    assert np.abs(image.astype(int) - expected[:height, :width]).mean() < 3
    # All are built on libjpeg-turbo; another version may round another way.
    assert np.abs(image.astype(int) - simplejpeg.decode_jpeg(data, "RGB")).max() <= 2


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")  # it leaves its file open
def test_webdataset_decodes_a_packed_tar(tmp_path: Path) -> None:
    for n in range(3):
        path = tmp_path / "src" / "abc"[n] / f"{n}.png"
        path.parent.mkdir(parents=True)
        path.write_bytes(save(picture(90 + n, 130, n), "PNG"))
    assert run_build(tmp_path / "src", tmp_path / "out", output={"image": "jpg"}).ok
    ours = ShardDataset(tmp_path / "out")
    (shard,) = (tmp_path / "out" / "train").glob("*.tar")
    theirs = list(webdataset.WebDataset(str(shard), shardshuffle=False).decode("rgb8"))
    assert len(theirs) == len(ours) == 3
    for i, sample in enumerate(theirs):
        assert ours.reads_regions(i)
        assert np.abs(sample["jpg"].astype(int) - ours.load(i)["image"]).max() <= 2
