"""Shared by all tests: small raw data sets made on the spot."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import pytest

# A shell's background job has it ignored, and so would have the processes that tests start and then interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def picture(width: int = 64, height: int = 48, seed: int = 0) -> np.ndarray:
    """A smooth colour picture, uint8 [height, width, 3] RGB, that JPEG keeps well."""
    rng = np.random.default_rng(seed)
    small = rng.integers(0, 256, (4, 4, 3), np.uint8)
    return cv2.resize(small, (width, height), interpolation=cv2.INTER_CUBIC)


def save(path: Path, image: np.ndarray) -> None:
    """Write RGB pixels in the format of the path's suffix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    ok, data = cv2.imencode(path.suffix, image[:, :, ::-1])
    assert ok
    path.write_bytes(data.tobytes())


VOC = """<annotation><filename>{name}.jpg</filename>
<size><width>{w}</width><height>{h}</height><depth>3</depth></size>{objects}</annotation>
"""
OBJECT = (
    "<object><name>{name}</name><difficult>{difficult}</difficult><bndbox>"
    "<xmin>{box[0]}</xmin><ymin>{box[1]}</ymin><xmax>{box[2]}</xmax><ymax>{box[3]}</ymax></bndbox></object>"
)


def voc_xml(name: str, size: tuple[int, int], objects: list[tuple[str, tuple[float, ...]]]) -> str:
    """A VOC annotation; every third object is difficult."""
    parts = [OBJECT.format(name=label, box=box, difficult=int(i % 3 == 2)) for i, (label, box) in enumerate(objects)]
    return VOC.format(name=name, w=size[0], h=size[1], objects="".join(parts))


CLASSES = ["crack", "incomplete_fusion", "porosity", "slag"]


@pytest.fixture
def make_voc(tmp_path: Path) -> Callable[..., Path]:
    """Makes a clean VOC set of n pictures (sizes differ, 0 to 4 boxes each, splits 3:1:1) and returns its root."""

    def make(n: int = 20, name: str = "src", sizes: tuple[tuple[int, int], ...] = ((64, 48), (80, 60), (49, 64))) -> Path:
        root = tmp_path / name
        (root / "annotations").mkdir(parents=True)
        rows = ["image_id,split"]
        for i in range(n):
            w, h = sizes[i % len(sizes)]
            stem = f"weld_{i:04d}"
            save(root / "images" / f"{stem}.jpg", picture(w, h, i))
            objects = [(CLASSES[(i + j) % 4], (2 + 3 * j, 3 + 2 * j, 20 + 4 * j, 15 + 5 * j)) for j in range(i % 5)]
            (root / "annotations" / f"{stem}.xml").write_text(voc_xml(stem, (w, h), objects))
            rows.append(f"{stem},{('train', 'train', 'train', 'val', 'test')[i % 5]}")
        (root / "train_val_test_split.csv").write_text("\n".join(rows) + "\n")
        return root

    return make


@pytest.fixture
def make_folder(tmp_path: Path) -> Callable[..., Path]:
    """Makes a clean class-folder set of n pictures in three classes, without splits, and returns its root."""

    def make(n: int = 12, name: str = "src", size: tuple[int, int] = (40, 32)) -> Path:
        root = tmp_path / name
        for i in range(n):
            save(root / ("crack", "porosity", "slag")[i % 3] / f"p{i:03d}.jpg", picture(*size, seed=i))
        return root

    return make
