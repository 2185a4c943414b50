"""Make a synthetic `welding_v2`: weld radiographs with drawn defects, in Pascal VOC form with a split CSV.

    python recipes/make_welding_v2.py demo-data/raw --num 48
    python recipes/make_welding_v2.py /data/welding_v2 --num 12843 --size 3200x2400 --quality 94

The second command makes a set of the size of the real one: 12,843 pictures of 2.1 MB each, 27 GB. ::

    OUT/images/weld_000001.jpg           gray-looking RGB JPEG
    OUT/annotations/weld_000001.xml      VOC XML; integer boxes, 0-based and half-open (origin = 0)
    OUT/train_val_test_split.csv         image_id,split: 70 % train, 15 % val, 15 % test

Classes: crack (thin jagged line), porosity (small discs), slag (elongated blob), incomplete_fusion (straight line along the seam).
A picture has 5.2 boxes on average, one in twenty has none. Boxes enclose the drawn pixels tightly and never overlap.
Picture i depends on (seed, i, size, quality) alone, so any number of workers makes the same bytes.
"""

from __future__ import annotations

import argparse
import csv
import functools
import json
import multiprocessing
import os
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

import cv2
import numpy as np
from numpy.typing import NDArray

CLASSES = ("crack", "porosity", "slag", "incomplete_fusion")
BOXES_PER_IMAGE = 5.2
SHARE_WITHOUT_DEFECTS = 0.05
MIN_SIDE = 160
TILE_SIDE = 1024
# Defects are darker by at most this; the clean picture stays above, so each drawn pixel differs from it.
MAX_DEPTH = 60
MARKER = ".make_welding_v2.json"

Gray = NDArray[np.uint8]
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Options:
    """What the pictures depend on. `size` is (width, height) in pixels."""

    num: int = 64
    size: tuple[int, int] = (640, 480)
    seed: int = 0
    quality: int = 90


@dataclass(frozen=True)
class Defect:
    """`mask` [h, w], True where drawn, touching all four sides of its box; `x`, `y`: its top left pixel in the picture, 0-based."""

    name: str
    mask: Mask
    x: int
    y: int
    depth: int

    @property
    def box(self) -> tuple[int, int, int, int]:
        """xyxy in pixels, 0-based, half-open."""
        height, width = self.mask.shape
        return self.x, self.y, self.x + width, self.y + height


@functools.lru_cache(maxsize=1)
def grain_tiles(seed: int) -> NDArray[np.int8]:
    """Film grain, int8 [4, 1024, 1024], made once a process: fresh noise for each picture would take most of the time."""
    rng = np.random.default_rng([seed, 0])
    tiles = [cv2.GaussianBlur(rng.normal(0, 13, (TILE_SIDE, TILE_SIDE)).astype(np.float32), (0, 0), 0.7) for _ in range(4)]
    return np.clip(np.stack(tiles), -100, 100).astype(np.int8)


def draw_clean(rng: np.random.Generator, options: Options) -> tuple[Gray, float, float]:
    """A picture without defects, uint8 [H, W], with the seam's centre line and half width in rows."""
    width, height = options.size
    x, y = np.linspace(-1, 1, width, dtype=np.float32), np.linspace(-1, 1, height, dtype=np.float32)
    centre, half = rng.uniform(-0.3, 0.3), rng.uniform(0.25, 0.4)
    row = 115 + rng.uniform(-20, 20) * y + 55 * np.exp(-(((y - centre) / half) ** 4))
    column = rng.uniform(-15, 15) * x + 4 * np.sin(rng.uniform(80, 160) * x)
    tile = grain_tiles(options.seed)[rng.integers(4)][:: rng.choice([-1, 1]), :: rng.choice([-1, 1])]
    rows = (np.arange(height) + rng.integers(TILE_SIDE)) % TILE_SIDE
    columns = (np.arange(width) + rng.integers(TILE_SIDE)) % TILE_SIDE
    picture = np.add.outer(row, column).astype(np.float32) + tile[rows][:, columns]
    return np.clip(picture, MAX_DEPTH + 5, 250).astype(np.uint8), (centre + 1) / 2 * height, half / 2 * height


def crack(rng: np.random.Generator, scale: float) -> Mask:
    """A thin jagged line, mostly along one direction."""
    length, steps = rng.uniform(30, 110) * scale, int(rng.integers(5, 12))
    angle = rng.uniform(0, np.pi)
    along = np.linspace(0, length, steps)
    across = rng.normal(0, 0.06 * length, steps)
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    return _draw(turn @ np.stack([along, across]), lambda canvas, points: _lines(canvas, points, max(1, round(1.5 * scale))))


def porosity(rng: np.random.Generator, scale: float) -> Mask:
    """One to six small discs close together."""
    discs = int(rng.integers(1, 7))
    centres = rng.normal(0, 9 * scale, (2, discs)) if discs > 1 else np.zeros((2, 1))
    radii = np.maximum(1, np.round(rng.uniform(2, 5, discs) * scale)).astype(int)

    def draw(canvas: Gray, points: NDArray[np.int32]) -> None:
        for (px, py), radius in zip(points.tolist(), radii.tolist(), strict=True):
            cv2.circle(canvas, (px, py), radius, 1, -1)

    return _draw(centres, draw, margin=int(radii.max()) + 2)


def slag(rng: np.random.Generator, scale: float) -> Mask:
    """An irregular blob, longer along the seam."""
    corners = int(rng.integers(9, 16))
    angle = np.linspace(0, 2 * np.pi, corners, endpoint=False)
    radius = rng.uniform(0.6, 1.0, corners)
    points = np.stack([np.cos(angle) * rng.uniform(12, 36) * scale, np.sin(angle) * rng.uniform(4, 10) * scale]) * radius
    return _draw(points, lambda canvas, corners: cv2.fillPoly(canvas, [corners], 1))


def incomplete_fusion(rng: np.random.Generator, scale: float) -> Mask:
    """A straight line along the seam, tilted a little."""
    length = rng.uniform(50, 160) * scale
    points = np.array([[0.0, length], [0.0, rng.normal(0, 0.01) * length]])
    return _draw(points, lambda canvas, ends: _lines(canvas, ends, max(2, round(2.5 * scale))))


DRAW: dict[str, Callable[[np.random.Generator, float], Mask]] = {
    "crack": crack,
    "porosity": porosity,
    "slag": slag,
    "incomplete_fusion": incomplete_fusion,
}


def _lines(canvas: Gray, points: NDArray[np.int32], thickness: int) -> None:
    cv2.polylines(canvas, [points], False, 1, thickness)


def _draw(points: NDArray[np.float64], draw: Callable[[Gray, NDArray[np.int32]], object], margin: int = 16) -> Mask:
    """Draw points [2, N] on a canvas that holds them and cut the drawn pixels out tightly."""
    corners = np.round(points - points.min(axis=1, keepdims=True)).astype(np.int32) + margin
    width, height = (corners.max(axis=1) + margin + 1).tolist()
    canvas = np.zeros((height, width), np.uint8)
    draw(canvas, np.ascontiguousarray(corners.T))
    x, y, w, h = cv2.boundingRect(canvas)
    return canvas[y : y + h, x : x + w].astype(bool)


def place_defects(rng: np.random.Generator, options: Options, centre: float, half: float) -> list[Defect]:
    """Choose defects and their places on the seam; one that finds no free place in 50 tries is left out."""
    if rng.random() < SHARE_WITHOUT_DEFECTS:
        return []
    count = 1 + int(rng.poisson(BOXES_PER_IMAGE / (1 - SHARE_WITHOUT_DEFECTS) - 1))
    placed: list[Defect] = []
    for _ in range(count):
        name = CLASSES[rng.choice(len(CLASSES), p=[0.25, 0.4, 0.2, 0.15])]
        defect = next((d for d in (_propose(rng, name, options, centre, half) for _ in range(50)) if d and _is_free(d, placed)), None)
        if defect:
            placed.append(defect)
    return placed


def _propose(rng: np.random.Generator, name: str, options: Options, centre: float, half: float) -> Defect | None:
    width, height = options.size
    mask = DRAW[name](rng, min(width, height) / 480)
    h, w = mask.shape
    if w >= width or h >= height:
        return None
    if name == "incomplete_fusion":
        y = round(centre + rng.choice([-0.6, 0.6]) * half + rng.normal(0, 0.05) * half - h / 2)
        # Some run in from the left edge: a whole set without any 0 looks 1-based.
        x = 0 if rng.random() < 0.3 else int(rng.integers(0, width - w))
    else:
        y = round(rng.uniform(centre - half, centre + half) - h / 2)
        x = int(rng.integers(0, width - w))
    return Defect(name, mask, x, min(max(y, 0), height - h), int(rng.integers(25, MAX_DEPTH + 1)))


def _is_free(new: Defect, placed: list[Defect], gap: int = 2) -> bool:
    x1, y1, x2, y2 = new.box
    return all(x1 - gap >= d.box[2] or x2 + gap <= d.box[0] or y1 - gap >= d.box[3] or y2 + gap <= d.box[1] for d in placed)


def draw_radiograph(index: int, options: Options) -> tuple[Gray, Gray, list[Defect]]:
    """Picture number `index` (from 1): with defects and without, uint8 [H, W] both, and the defects."""
    rng = np.random.default_rng([options.seed, index])
    clean, centre, half = draw_clean(rng, options)
    defects = place_defects(rng, options, centre, half)
    picture = clean.copy()
    for defect in defects:
        x1, y1, x2, y2 = defect.box
        picture[y1:y2, x1:x2] -= defect.mask * np.uint8(defect.depth)
    return picture, clean, defects


def stem(index: int) -> str:
    return f"weld_{index:06d}"


def voc_xml(index: int, options: Options, defects: list[Defect]) -> str:
    """The VOC XML of a picture, with 0-based half-open integer boxes."""
    width, height = options.size
    lines = [
        "<annotation>",
        "  <folder>images</folder>",
        f"  <filename>{stem(index)}.jpg</filename>",
        f"  <size><width>{width}</width><height>{height}</height><depth>3</depth></size>",
        "  <segmented>0</segmented>",
    ]
    for defect in defects:
        x1, y1, x2, y2 = defect.box
        lines += [
            "  <object>",
            f"    <name>{escape(defect.name)}</name>",
            "    <pose>Unspecified</pose>",
            f"    <truncated>{int(x1 == 0)}</truncated>",
            "    <difficult>0</difficult>",
            f"    <bndbox><xmin>{x1}</xmin><ymin>{y1}</ymin><xmax>{x2}</xmax><ymax>{y2}</ymax></bndbox>",
            "  </object>",
        ]
    return "\n".join([*lines, "</annotation>", ""])


def write_one(index: int, out: Path, options: Options) -> int:
    """Write picture and XML number `index`; returns its number of boxes."""
    picture, _, defects = draw_radiograph(index, options)
    done, encoded = cv2.imencode(".jpg", cv2.merge([picture] * 3), [cv2.IMWRITE_JPEG_QUALITY, options.quality])
    if not done:
        raise OSError(f"OpenCV did not encode {stem(index)}.jpg")
    (out / "images" / f"{stem(index)}.jpg").write_bytes(encoded.tobytes())
    (out / "annotations" / f"{stem(index)}.xml").write_text(voc_xml(index, options, defects), "utf-8")
    return len(defects)


def split_names(options: Options) -> list[str]:
    """A split for each picture, in order: 70 % train, 15 % val, 15 % test, shuffled by the seed; val and test are never empty from 3 on."""
    part = max(round(0.15 * options.num), int(options.num >= 3))
    names = ["val"] * part + ["test"] * part + ["train"] * (options.num - 2 * part)
    return [names[i] for i in np.random.default_rng([options.seed, 0, 1]).permutation(options.num)]


def make(out: Path, options: Options, workers: int = 1) -> int:
    """Make the set in `out`; returns its number of boxes. A set that is there already, with the same options, is kept.

    Raises:
        ValueError: `out` holds something that this recipe did not make, or an option is out of range.
    """
    _check(options)
    said = {"num": options.num, "size": list(options.size), "seed": options.seed, "quality": options.quality}
    marker = out / MARKER
    if marker.exists():
        before = json.loads(marker.read_text("utf-8"))
        if before.get("options") == said and before.get("boxes") is not None:
            return int(before["boxes"])
        for path in [*out.glob("images/weld_*.jpg"), *out.glob("annotations/weld_*.xml")]:
            path.unlink()
    elif out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out}: exists and was not made by this recipe; name a new or an empty folder")
    for folder in ("images", "annotations"):
        (out / folder).mkdir(parents=True, exist_ok=True)
    marker.write_text(json.dumps({"options": said}), "utf-8")
    with (out / "train_val_test_split.csv").open("w", encoding="utf-8", newline="") as f:
        rows = ((stem(i), split) for i, split in enumerate(split_names(options), 1))
        csv.writer(f, lineterminator="\n").writerows([("image_id", "split"), *rows])
    boxes = _write_all(out, options, workers)
    marker.write_text(json.dumps({"options": said, "boxes": boxes}), "utf-8")
    return boxes


def _write_all(out: Path, options: Options, workers: int) -> int:
    write = functools.partial(write_one, out=out, options=options)
    indices = range(1, options.num + 1)
    if workers <= 1:
        return sum(map(write, indices))
    # spawn, as forking a process that runs threads (OpenCV's, torch's) can hang the child.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, initializer=cv2.setNumThreads, initargs=(1,)) as pool:
        return sum(pool.map(write, indices, chunksize=8))


def _check(options: Options) -> None:
    if options.num < 1:
        raise ValueError(f"--num is {options.num}, expected at least 1")
    if min(options.size) < MIN_SIDE:
        raise ValueError(f"--size is {options.size[0]}x{options.size[1]}, expected at least {MIN_SIDE} pixels each way")
    if not 1 <= options.quality <= 100:
        raise ValueError(f"--quality is {options.quality}, expected 1 to 100")


def _size(text: str) -> tuple[int, int]:
    width, _, height = text.partition("x")
    return int(width), int(height)


def main() -> int:
    parser = argparse.ArgumentParser(description="Make a synthetic welding_v2 data set (VOC XML, split CSV).")
    parser.add_argument("out", type=Path, help="folder to make")
    parser.add_argument("--num", type=int, default=64, help="number of pictures (default %(default)s)")
    parser.add_argument("--size", type=_size, default=(640, 480), metavar="WxH", help="picture size in pixels (default 640x480)")
    parser.add_argument("--seed", type=int, default=0, help="another seed makes other pictures (default %(default)s)")
    parser.add_argument("--quality", type=int, default=90, help="JPEG quality, 1 to 100 (default %(default)s)")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="processes (default: one a core)")
    args = parser.parse_args()
    try:
        boxes = make(args.out, Options(args.num, args.size, args.seed, args.quality), args.workers)
    except (ValueError, OSError) as e:
        print(f"make_welding_v2: {e}", file=sys.stderr)
        return 1
    print(f"{args.out}: {args.num} pictures, {boxes} boxes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
