"""Every source into every layout and back: read with tarfile and NumPy alone, each split, label, box, flag and pixel is the input's."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from build_data import Recorder, pixels, run_build
from conftest import CLASSES, picture, save, voc_xml
from packer.engines.local import LocalEngine
from packer.verify import verify

WIDTH, HEIGHT, NUM = 26, 18, 15
SPLITS = ("train", "train", "train", "val", "test")


@dataclass
class Truth:
    """What a source holds, by the picture's path below the root. Boxes: rows x1, y1, x2, y2; labels are class names."""

    task: str
    image: dict[str, NDArray[np.uint8]] = field(default_factory=dict)
    split: dict[str, str] = field(default_factory=dict)
    label: dict[str, str] = field(default_factory=dict)
    boxes: dict[str, list[tuple[float, ...]]] = field(default_factory=dict)
    names: dict[str, list[str]] = field(default_factory=dict)
    difficult: dict[str, list[int]] = field(default_factory=dict)

    def put(self, root: Path, path: str, i: int, split: str = "train") -> None:
        self.image[path] = picture(WIDTH, HEIGHT, i)
        save(root / path, self.image[path])
        self.split[path] = split


def some_boxes(i: int) -> list[tuple[str, tuple[float, ...]]]:
    """0 to 4 boxes with fractions, edges at the picture's border and touching zero."""
    all_of_them = [(0, 0, WIDTH, HEIGHT), (1.5, 2.25, 9.75, 12), (0.1, 0.2, 0.3, 17.9), (20, 10, WIDTH, HEIGHT)]
    return [(CLASSES[(i + j) % 4], all_of_them[j]) for j in range(i % 5)]


def voc(root: Path) -> Truth:
    truth = Truth("detection")
    rows = ["image_id,split"]
    (root / "annotations").mkdir(parents=True)
    for i in range(NUM):
        stem = f"weld_{i:03d}"
        path = f"images/{stem}.png"
        truth.put(root, path, i, SPLITS[i % 5])
        objects = some_boxes(i)
        (root / "annotations" / f"{stem}.xml").write_text(voc_xml(stem, (WIDTH, HEIGHT), objects))
        rows.append(f"{stem},{SPLITS[i % 5]}")
        truth.boxes[path], truth.names[path] = [b for _, b in objects], [n for n, _ in objects]
        truth.difficult[path] = [int(j % 3 == 2) for j in range(len(objects))]
    (root / "train_val_test_split.csv").write_text("\n".join(rows) + "\n")
    return truth


def folder(root: Path) -> Truth:
    truth = Truth("classification")
    for i in range(NUM):
        name = CLASSES[i % 3]
        path = f"{name}/deep/p{i}.png"
        truth.put(root, path, i)
        truth.label[path] = name
    return truth


def folder_splits(root: Path) -> Truth:
    truth = Truth("classification")
    for i in range(NUM):
        name, split = ("Riß", "crack", "+")[i % 3], SPLITS[i % 5]
        path = f"{ {'train': 'train', 'val': 'validation', 'test': 'testing'}[split] }/{name}/p{i}.png"
        truth.put(root, path, i, split)
        truth.label[path] = name
    return truth


def csv_labels(root: Path) -> Truth:
    truth = Truth("classification")
    rows = ["filename,label,split"]
    for i in range(NUM):
        path = f"pictures/p{i}.png"
        truth.put(root, path, i, SPLITS[i % 5])
        truth.label[path] = CLASSES[i % 4]
        rows.append(f"{path},{CLASSES[i % 4]},{SPLITS[i % 5]}")
    (root / "labels.csv").write_text("\n".join(rows) + "\n")
    return truth


def csv_boxes(root: Path) -> Truth:
    truth = Truth("detection")
    rows = ["filename,width,height,class,xmin,ymin,xmax,ymax"]
    for i in range(NUM):
        path = f"pictures/p{i}.png"
        objects = some_boxes(i) or [("slag", (3, 4, 5, 6))]
        truth.put(root, path, i)
        rows += [f"{path},{WIDTH},{HEIGHT},{name},{','.join(map(str, box))}" for name, box in objects]
        truth.boxes[path], truth.names[path] = [b for _, b in objects], [n for n, _ in objects]
        truth.difficult[path] = [0] * len(objects)
    (root / "boxes.csv").write_text("\n".join(rows) + "\n")
    return truth


def flat(root: Path) -> Truth:
    truth = Truth("unlabelled")
    for i in range(NUM):
        truth.put(root, f"p{i}.png", i)
    return truth


SOURCES: dict[str, tuple[str, Callable[[Path], Truth]]] = {
    "voc": ("voc", voc),
    "folder": ("folder", folder),
    "folder-splits": ("folder", folder_splits),
    "csv-labels": ("csv", csv_labels),
    "csv-boxes": ("csv", csv_boxes),
    "flat": ("folder", flat),
}


@dataclass
class Stored:
    """One sample as it was read back."""

    split: str
    key: int
    image: NDArray[Any]
    width: int
    height: int
    label: int | None
    boxes: list[list[float]]
    labels: list[int]
    difficult: list[int]
    affine: list[float]
    original: tuple[int, int]


def read_tar(out: Path, manifest: dict[str, Any]) -> dict[str, Stored]:
    found = {}
    for split, entry in manifest["splits"].items():
        for shard in entry["shards"]:
            parts: dict[str, dict[str, bytes]] = {}
            with tarfile.open(out / shard["path"]) as tar:
                for member in tar:
                    key, _, part = member.name.partition(".")
                    stream = tar.extractfile(member)
                    assert stream is not None
                    parts.setdefault(key, {})[part] = stream.read()
            for key, sample in parts.items():
                meta = json.loads(sample["json"])
                label = int(sample["cls"]) if "cls" in sample else None
                assert meta.get("label") == label
                original = (meta["original_width"], meta["original_height"])
                boxes = meta.get("boxes", []), meta.get("labels", []), meta.get("difficult", [])
                assert meta["source"] not in found
                found[meta["source"]] = Stored(
                    split, int(key), pixels(sample["png"]), meta["width"], meta["height"], label, *boxes, meta["affine"], original
                )
    return found


def read_memmap(out: Path, manifest: dict[str, Any]) -> dict[str, Stored]:
    found = {}
    for split, entry in manifest["splits"].items():
        for shard in entry["shards"]:
            a = {name: np.load(out / shard["path"] / name, mmap_mode="r", allow_pickle=False) for name in shard["files"]}
            for i, source in enumerate(a["source.npy"].tolist()):
                start, end = a["box_offsets.npy"][i : i + 2] if "box_offsets.npy" in a else (0, 0)
                boxes = [a[f"{n}.npy"][start:end].tolist() if end else [] for n in ("boxes", "labels", "difficult")]
                height, width = a["image.npy"].shape[1:3]
                h, w = a["original_size.npy"][i].tolist()
                label = int(a["label.npy"][i]) if "label.npy" in a else None
                key, affine = int(a["key.npy"][i]), a["affine.npy"][i].tolist()
                assert source.decode() not in found
                found[source.decode()] = Stored(split, key, a["image.npy"][i], width, height, label, *boxes, affine, (w, h))
    return found


@pytest.mark.parametrize("layout", ["tar", "memmap"])
@pytest.mark.parametrize("name", list(SOURCES))
def test_round_trip(name: str, layout: str, tmp_path: Path) -> None:
    kind, make = SOURCES[name]
    truth = make(tmp_path / "src")
    console = Recorder()
    outcome = run_build(tmp_path / "src", tmp_path / "out", console, output={"format": layout, "shard_samples": 4})
    assert outcome.ok, outcome.message
    assert console.findings == []
    assert verify(tmp_path / "out", LocalEngine(1), quick=False, progress=console.progress) == []
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text("utf-8"))
    assert (manifest["source"]["kind"], manifest["task"], manifest["layout"]) == (kind, truth.task, layout)
    names = set(truth.label.values()) | {n for ns in truth.names.values() for n in ns}
    assert manifest["classes"] == sorted(names)
    found = (read_tar if layout == "tar" else read_memmap)(tmp_path / "out", manifest)
    assert found.keys() == truth.image.keys()
    for key, path in enumerate(sorted(found)):
        sample = found[path]
        assert (sample.key, sample.split) == (key, truth.split[path])
        assert np.array_equal(sample.image, truth.image[path])
        assert (sample.width, sample.height) == sample.original == (WIDTH, HEIGHT)
        assert sample.affine == [1, 1, 0, 0]
        assert (None if sample.label is None else manifest["classes"][sample.label]) == truth.label.get(path)
        assert np.array_equal(np.float32(sample.boxes).reshape(-1, 4), np.float32(truth.boxes.get(path, [])).reshape(-1, 4))
        assert [manifest["classes"][i] for i in sample.labels] == truth.names.get(path, [])
        assert sample.difficult == truth.difficult.get(path, [])
    counts = {s: list(truth.split.values()).count(s) for s in manifest["splits"]}
    assert {s: e["num_samples"] for s, e in manifest["splits"].items()} == counts
    assert sum(counts.values()) == NUM


@pytest.mark.parametrize("layout", ["tar", "memmap"])
def test_resized_boxes_map_back(layout: str, tmp_path: Path) -> None:
    truth = voc(tmp_path / "src")
    tables: dict[str, Any] = {"output": {"format": layout, "image": "png" if layout == "tar" else "keep"}, "transform": {"resize": "64x64"}}
    assert run_build(tmp_path / "src", tmp_path / "out", **tables).ok
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text("utf-8"))
    found = (read_tar if layout == "tar" else read_memmap)(tmp_path / "out", manifest)
    for path, sample in found.items():
        assert sample.image.shape == (64, 64, 3)
        assert sample.original == (WIDTH, HEIGHT)
        sx, sy, tx, ty = sample.affine
        stored = np.array(sample.boxes).reshape(-1, 4)
        back = (stored - [tx, ty, tx, ty]) / [sx, sy, sx, sy]
        assert np.allclose(back, np.array(truth.boxes[path]).reshape(-1, 4), atol=1e-3)
        assert stored.min(initial=0) >= 0
        assert stored.max(initial=0) <= 64
        assert (sample.image[0] == 114).all()  # a letterbox: bars above and below
