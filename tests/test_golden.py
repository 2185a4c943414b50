"""Golden data sets: packed once, kept for good. They must load, verify, and hold these very numbers, whatever the code becomes.

``make_golden.py`` made them. The expected values are written here by hand from its source pictures and annotations.
"""

from __future__ import annotations

import io
import json
import shutil
import tarfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from build_data import Recorder, differences, pixels, run_build, tree
from loaders.format import Index, open_index, read_manifest
from loaders.memmap import MemmapDataset
from loaders.shards import ShardDataset
from make_golden import gradient, make_sources
from packer.engines.local import LocalEngine
from packer.verify import verify

GOLDEN = Path(__file__).parent / "golden"
NAMES = ["v1-memmap-classification", "v1-memmap-detection", "v1-tar-classification", "v1-tar-detection", "v1-tar-restarts"]
# The stored order of each split, by key.
ORDER = {
    "detection": {"train": [0, 2, 1], "val": [4, 3]},
    "classification": {"train": [0, 2, 5, 4, 3, 1]},
}
# key -> rows x1, y1, x2, y2, label, difficult
BOXES: dict[int, list[tuple[float, ...]]] = {
    0: [(1, 2, 5, 6, 0, 0)],
    1: [],
    2: [(0.5, 1.25, 12, 8, 1, 0), (3, 3, 4, 7, 0, 0)],
    3: [(2, 0, 9, 8, 1, 0)],
    4: [(0, 0, 12, 8, 0, 0), (1, 1, 2, 2, 0, 0), (5, 5, 11, 8, 1, 1)],
}
# The listing is sorted by path, "Riß" before "gut".
SOURCES = ["Riß/teil_1.png", "Riß/teil_3.png", "Riß/teil_5.png", "gut/teil_0.png", "gut/teil_2.png", "gut/teil_4.png"]


def opened(name: str, split: str) -> Index:
    return open_index(GOLDEN / name, read_manifest(GOLDEN / name), split)


def test_all_are_there_and_small() -> None:
    assert sorted(p.name for p in GOLDEN.iterdir()) == NAMES
    assert sum(p.stat().st_size for p in GOLDEN.rglob("*") if p.is_file()) < 200_000


@pytest.mark.parametrize("name", NAMES)
def test_verifies_sound(name: str) -> None:
    assert verify(GOLDEN / name, LocalEngine(1), quick=False, progress=Recorder().progress) == []


@pytest.mark.parametrize("name", NAMES)
def test_manifest(name: str) -> None:
    _, layout, task = name.split("-")
    manifest = read_manifest(GOLDEN / name)
    assert manifest.format_version == 1
    assert manifest.layout == layout
    if task == "detection":
        assert (manifest.task, manifest.classes, manifest.source.kind) == ("detection", ["crack", "slag"], "voc")
    elif task == "classification":
        assert (manifest.task, manifest.classes, manifest.source.kind) == ("classification", ["Riß", "gut"], "folder")
    assert manifest.findings.model_dump() == {"error": 0, "skip": 0, "warning": 0}


@pytest.mark.parametrize("layout", ["tar", "memmap"])
@pytest.mark.parametrize("split", ["train", "val"])
def test_detection_index(layout: str, split: str) -> None:
    index = opened(f"v1-{layout}-detection", split)
    keys = ORDER["detection"][split]
    assert index.samples["key"].tolist() == keys
    assert index.samples["shard"].tolist() == [i // 2 for i in range(len(keys))]
    assert index.samples["label"].tolist() == [-1] * len(keys)
    assert set(index.samples["width"].tolist()) == {12}
    assert set(index.samples["height"].tolist()) == {8}
    assert index.samples["num_boxes"].tolist() == [len(BOXES[k]) for k in keys]
    rows = [row for k in keys for row in BOXES[k]]
    assert index.boxes is not None
    assert index.labels is not None
    assert index.difficult is not None
    assert index.box_offsets is not None
    assert index.boxes.tolist() == [list(r[:4]) for r in rows]
    assert index.labels.tolist() == [r[4] for r in rows]
    assert index.difficult.tolist() == [r[5] for r in rows]
    assert index.box_offsets.tolist() == [0, *np.cumsum([len(BOXES[k]) for k in keys])]


def members(name: str) -> dict[str, dict[str, bytes]]:
    """Key -> part -> bytes, over all shards, by tarfile."""
    found: dict[str, dict[str, bytes]] = {}
    for path in sorted((GOLDEN / name).rglob("*.tar")):
        with tarfile.open(path) as tar:
            for member in tar:
                key, _, part = member.name.partition(".")
                stream = tar.extractfile(member)
                assert stream is not None
                found.setdefault(key, {})[part] = stream.read()
    return found


def test_detection_tar() -> None:
    found = members("v1-tar-detection")
    assert sorted(found) == [f"{k:09d}" for k in range(5)]
    for k in range(5):
        parts = found[f"{k:09d}"]
        assert sorted(parts) == ["json", "png"]
        assert np.array_equal(pixels(parts["png"]), gradient(12, 8, 20 * k))
        assert json.loads(parts["json"]) == {
            "source": f"images/weld_{k}.png",
            "width": 12,
            "height": 8,
            "original_width": 12,
            "original_height": 8,
            "affine": [1.0, 1.0, 0.0, 0.0],
            "boxes": [list(map(float, r[:4])) for r in BOXES[k]],
            "labels": [r[4] for r in BOXES[k]],
            "difficult": [r[5] for r in BOXES[k]],
            "truncated": [0] * len(BOXES[k]),
            "occluded": [0] * len(BOXES[k]),
        }


def test_tar_offsets_and_checksums() -> None:
    for split in ("train", "val"):
        index = opened("v1-tar-detection", split)
        for row in index.samples:
            data = (GOLDEN / "v1-tar-detection" / split / f"shard-{row['shard']:06d}.tar").read_bytes()
            for part in ("image", "json"):
                start = int(row[f"{part}_offset"])
                assert zlib.crc32(data[start : start + int(row[f"{part}_size"])]) == row[f"{part}_crc32"]
    idx = np.fromfile(GOLDEN / "v1-tar-detection" / "train" / "shard-000000.tar.idx", "<u8")
    assert idx.tolist() == [0, 2048, 4096]
    assert (GOLDEN / "v1-tar-detection" / "train" / "shard-000000.tar").stat().st_size == 4096 + 1024


def test_classification_tar() -> None:
    found = members("v1-tar-classification")
    for k, source in enumerate(SOURCES):
        parts = found[f"{k:09d}"]
        meta = json.loads(parts["json"])
        assert (meta["source"], meta["label"], parts["cls"]) == (source, int(k > 2), str(int(k > 2)).encode())
        assert np.array_equal(pixels(parts["png"]), gradient(6, 5, 30 * int(source[-5])))
    index = opened("v1-tar-classification", "train")
    assert index.samples["key"].tolist() == ORDER["classification"]["train"]
    assert index.samples["label"].tolist() == [0, 0, 1, 1, 1, 0]


def load(name: str, shard: str, file: str) -> np.ndarray:
    array: np.ndarray = np.load(GOLDEN / name / "train" / shard / file, mmap_mode="r", allow_pickle=False)
    return array


def test_detection_memmap() -> None:
    def get(file: str) -> np.ndarray:
        return load("v1-memmap-detection", "shard-000000", file)

    assert get("image.npy").dtype == np.uint8
    assert np.array_equal(get("image.npy"), [gradient(12, 8, 0), gradient(12, 8, 40)])
    assert get("key.npy").tolist() == [0, 2]
    assert get("source.npy").tolist() == [b"images/weld_0.png", b"images/weld_2.png"]
    assert get("affine.npy").tolist() == [[1, 1, 0, 0]] * 2
    assert get("original_size.npy").tolist() == [[8, 12]] * 2
    assert get("boxes.npy").tolist() == [list(r[:4]) for r in BOXES[0] + BOXES[2]]
    assert get("labels.npy").tolist() == [0, 1, 0]
    assert get("difficult.npy").tolist() == [0, 0, 0]
    assert get("box_offsets.npy").tolist() == [0, 1, 3]


def test_classification_memmap() -> None:
    image = np.concatenate([load("v1-memmap-classification", f"shard-00000{i}", "image.npy") for i in (0, 1)])
    assert image.dtype == np.float16
    for k, stored in zip(ORDER["classification"]["train"], image, strict=True):
        assert np.array_equal(stored, (gradient(6, 5, 30 * int(SOURCES[k][-5])) / 255).astype(np.float16))
    assert load("v1-memmap-classification", "shard-000000", "label.npy").tolist() == [0, 0, 1, 1]
    assert load("v1-memmap-classification", "shard-000001", "source.npy").tolist() == [SOURCES[k].encode() for k in (3, 1)]


def test_restart_grid() -> None:
    index = opened("v1-tar-restarts", "train")
    assert index.restarts is not None
    assert index.restart_offsets is not None
    assert index.restarts.tolist() == [325, 438, 519]
    assert index.restart_offsets.tolist() == [0, 3]
    [parts] = members("v1-tar-restarts").values()
    image = parts["jpg"]
    assert image[436:438] == b"\xff\xd0"  # the marker before the second row
    assert image[519:521] == b"\xff\xd9"  # EOI
    assert np.abs(pixels(image).astype(int) - gradient(40, 24, 0)).mean() < 12


@pytest.mark.parametrize("name", NAMES)
def test_loaders_read_them(name: str) -> None:
    opener: Any = ShardDataset if "-tar-" in name else MemmapDataset
    task = name.split("-")[2]
    ds = opener(GOLDEN / name, split="train")
    keys = ORDER.get(task, {"train": [0]})["train"]
    assert [int(ds[i]["key"]) for i in range(len(ds))] == keys
    if task == "detection":
        assert [ds[i]["boxes"].tolist() for i in range(len(ds))] == [[list(map(float, r[:4])) for r in BOXES[k]] for k in keys]


def test_present_code_makes_the_same_tar_index(tmp_path: Path) -> None:
    """Encoders may change with their versions; what does not come from one may not."""
    make_sources(tmp_path)
    assert run_build(tmp_path / "voc", tmp_path / "out", output={"shard_samples": 2, "format": "memmap"}).ok
    ours, golden = tree(tmp_path / "out"), tree(GOLDEN / "v1-memmap-detection")
    assert set(differences(ours, golden)) <= {"manifest.json", "README.md"}
    a, b = (json.load(io.BytesIO(t["manifest.json"] or b"")) for t in (ours, golden))
    for name in ("created_by", "self_sha256", "source"):  # the fingerprint is over PNG files that were encoded just now
        del a[name], b[name]
    assert a == b


def test_program_never_overwrites(tmp_path: Path) -> None:
    from make_golden import main

    shutil.copytree(GOLDEN, tmp_path / "golden")
    with pytest.raises(SystemExit, match="exists, and is never made again"):
        main(tmp_path / "golden")
