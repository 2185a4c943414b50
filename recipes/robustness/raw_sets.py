"""Small raw data sets for the robustness harnesses, made on the spot: Pascal VOC, class folders, and pictures alone."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

CLASSES = ("crack", "porosity", "slag")
OBJECT = "<object><name>{name}</name><bndbox><xmin>{x}</xmin><ymin>{y}</ymin><xmax>{right}</xmax><ymax>{bottom}</ymax></bndbox></object>"


def picture(size: tuple[int, int], seed: int) -> NDArray[np.uint8]:
    """A smooth colour picture with some noise, uint8 [height, width, 3]; `size` is (width, height) in pixels."""
    rng = np.random.default_rng(seed)
    smooth = cv2.resize(rng.integers(0, 200, (4, 4, 3), np.uint8), size, interpolation=cv2.INTER_CUBIC)
    return np.asarray(smooth + rng.integers(0, 32, smooth.shape, np.uint8), np.uint8)


def save(path: Path, size: tuple[int, int], seed: int) -> None:
    """Write a picture of (width, height) pixels in the format of the path's suffix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    ok, data = cv2.imencode(path.suffix, picture(size, seed))
    assert ok
    path.write_bytes(data.tobytes())


def voc(root: Path, num: int, size: tuple[int, int] = (96, 72), suffixes: Sequence[str] = (".jpg", ".png"), max_boxes: int = 3) -> None:
    """A VOC set: `num` pictures of about (width, height) pixels with 0 to `max_boxes` boxes each, splits 3:1:1."""
    (root / "annotations").mkdir(parents=True)
    rows = ["image_id,split"]
    for i in range(num):
        width, height = size[0] + i % 3 * 8, size[1] + i % 2 * 8
        save(root / "images" / f"w{i:04d}{suffixes[i % len(suffixes)]}", (width, height), i)
        spots = [(CLASSES[(i + j) % 3], 4 + 5 * j, 3 + 4 * j) for j in range(i % (max_boxes + 1))]
        objects = "".join(OBJECT.format(name=name, x=x, y=y, right=x + 20, bottom=y + 15) for name, x, y in spots)
        shape = f"<size><width>{width}</width><height>{height}</height><depth>3</depth></size>"
        (root / "annotations" / f"w{i:04d}.xml").write_text(f"<annotation>{shape}{objects}</annotation>")
        rows.append(f"w{i:04d},{('train', 'train', 'train', 'val', 'test')[i % 5]}")
    (root / "train_val_test_split.csv").write_text("\n".join(rows) + "\n")


def folders(
    root: Path,
    num: int,
    classes: Sequence[str] = CLASSES,
    splits: Sequence[str] = ("",),
    suffixes: Sequence[str] = (".jpg", ".png", ".webp"),
    size: tuple[int, int] = (48, 40),
    stem: str = "p",
) -> None:
    """Class folders, in split folders where `splits` names some: `num` pictures, dealt out in turn."""
    for i in range(num):
        folder = root / splits[i % len(splits)] / classes[i // len(splits) % len(classes)]
        save(folder / f"{stem}{i:04d}{suffixes[i % len(suffixes)]}", (size[0] + i % 3, size[1] + i % 2), i)


def tree(root: Path) -> dict[str, bytes | None]:
    """Everything below a folder: path -> bytes, None for a folder."""
    return {p.relative_to(root).as_posix(): p.read_bytes() if p.is_file() else None for p in sorted(root.rglob("*"))}


def differences(a: dict[str, bytes | None], b: dict[str, bytes | None]) -> list[str]:
    """Names of what is in one of the two only, or differs."""
    return sorted(name for name in a.keys() | b.keys() if a.get(name, b"?") != b.get(name, b"?"))


def digest(root: Path) -> str:
    """Hex SHA-256 over the names and bytes of everything below a folder."""
    h = hashlib.sha256()
    for name, data in tree(root).items():
        h.update(f"{name}\0{'' if data is None else hashlib.sha256(data).hexdigest()}\n".encode("utf-8", "surrogateescape"))
    return h.hexdigest()
