"""Two workloads that are no contest: opening a data set of a million samples, and memory over twenty epochs."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from contest import HERE
from data import Data
from loaders.format import (
    SAMPLE_DTYPE,
    FieldEntry,
    FileEntry,
    FindingCounts,
    Layout,
    Manifest,
    ShardEntry,
    SourceEntry,
    SplitEntry,
    index_path,
    manifest_text,
    shard_path,
)

SHARDS = 500
Facts = list[dict[str, Any]]


def write_large(root: Path, layout: Layout, num: int) -> None:
    """A classification set of `num` samples in 500 shards, written from the specification; its shards are links to one of pictures 8x8."""
    per_shard, remainder = divmod(num, SHARDS)
    if remainder:
        raise ValueError(f"{num} samples do not fill {SHARDS} shards evenly")
    rows = np.zeros(num, SAMPLE_DTYPE)
    rows["key"] = np.arange(num)
    rows["shard"] = np.repeat(np.arange(SHARDS), per_shard)
    rows["width"] = rows["height"] = 8
    rows["label"] = rows["key"] % 10
    make = _tar if layout == "tar" else _memmap
    entries = make(root, rows, per_shard)
    path = root / index_path("train", "samples")
    path.parent.mkdir(parents=True)
    np.save(path, rows)
    (root / "findings.jsonl").write_bytes(b"")
    place = {"part": "jpg"} if layout == "tar" else {"file": "image.npy"}
    manifest = Manifest(
        format_version=1,
        layout=layout,
        task="classification",
        classes=[f"class {i}" for i in range(10)],
        fields={"image": FieldEntry(dtype="uint8", shape=["height", "width", 3], meaning="the picture", **place)},
        splits={"train": SplitEntry(num_samples=num, shards=entries)},
        source=SourceEntry(kind="benchmark", options={}, fingerprint="0" * 64),
        transform=None,
        output={},
        findings=FindingCounts(),
        files={index_path("train", "samples"): _entry(path), "findings.jsonl": _entry(root / "findings.jsonl")},
        created_by={"benchmark": "1"},
    )
    (root / "manifest.json").write_text(manifest_text(manifest), "utf-8")


def _tar(root: Path, rows: np.ndarray[Any, Any], per_shard: int) -> list[ShardEntry]:
    """The bytes of one picture in each place: no tar headers are written, the loaders read none."""
    jpeg = cv2.imencode(".jpg", np.full((8, 8, 3), 100, np.uint8))[1].tobytes()
    step = 512 + -(-len(jpeg) // 512) * 512
    rows["image_offset"] = 512 + step * (rows["key"] % per_shard)
    rows["image_size"] = len(jpeg)
    first = root / shard_path("train", 0, "tar")
    first.parent.mkdir(parents=True)
    first.write_bytes((bytes(512) + jpeg.ljust(step - 512, b"\0")) * per_shard + bytes(1024))
    entry = _entry(first)
    shards = [
        ShardEntry(path=shard_path("train", s, "tar"), num_samples=per_shard, num_bytes=entry.num_bytes, sha256=entry.sha256)
        for s in range(SHARDS)
    ]
    for shard in shards[1:]:
        (root / shard.path).symlink_to(first.name)
    return shards


def _memmap(root: Path, rows: np.ndarray[Any, Any], per_shard: int) -> list[ShardEntry]:
    first = root / shard_path("train", 0, "memmap")
    first.mkdir(parents=True)
    arrays = {
        "image": np.full((per_shard, 8, 8, 3), 100, np.uint8),
        "key": rows["key"][:per_shard],
        "label": rows["label"][:per_shard].astype(np.int64),
        "source": np.array([b"none"] * per_shard),
        "affine": np.tile([1.0, 1.0, 0.0, 0.0], (per_shard, 1)),
        "original_size": np.full((per_shard, 2), 8, np.int32),
    }
    for name, array in arrays.items():
        np.save(first / f"{name}.npy", array)
    files = {f"{name}.npy": _entry(first / f"{name}.npy") for name in arrays}
    total = sum(f.num_bytes for f in files.values())
    shards = [ShardEntry(path=shard_path("train", s, "memmap"), num_samples=per_shard, num_bytes=total, files=files) for s in range(SHARDS)]
    for shard in shards[1:]:
        (root / shard.path).symlink_to(first.name)
    return shards


def _entry(path: Path) -> FileEntry:
    data = path.read_bytes()
    return FileEntry(num_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())


def _probe(verb: str, root: Path, layout: str, *more: object) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, HERE / "large_sets_probe.py", verb, root, layout, *map(str, more)], capture_output=True, text=True, cwd=HERE
    )
    if done.returncode:
        raise RuntimeError(f"large_sets_probe {verb} exited with {done.returncode}: {done.stderr[-2000:]}")
    answer: dict[str, float] = json.loads(done.stdout)
    return answer


def open_large(data: Data, rounds: int) -> Facts:
    """Each round in a process of its own: open, first batch; the median of time, the largest of memory."""
    num = data.count(1_000_000, SHARDS)
    facts: Facts = []
    layouts: tuple[Layout, ...] = ("tar", "memmap")
    for layout in layouts:
        root = data.cached(f"large-{num}-{layout}", lambda target, layout=layout: write_large(target, layout, num))  # type: ignore[misc]  # the default binds the loop's value
        found = [_probe("open", root, layout) for _ in range(rounds)]
        times = sorted(f["seconds"] for f in found)
        facts += [
            {"name": f"{layout}: open and first batch", "value": times[len(times) // 2], "unit": "s", "limit": 0.3},
            {
                "name": f"{layout}: memory above the imports, with pages of files",
                "value": max(f["mb"] for f in found),
                "unit": "MB",
                "limit": 60,
            },
            {"name": f"{layout}: the same without pages of files", "value": max(f["own_mb"] for f in found), "unit": "MB", "limit": None},
            {"name": f"{layout}: pickled data set", "value": max(f["pickled_kb"] for f in found), "unit": "kB", "limit": 10},
        ]
    return facts


def flat_memory(data: Data, rounds: int) -> Facts:
    """Memory after the 20th epoch against that after the third."""
    del rounds  # one long run is the measurement
    raw = data.cifar(data.count(50176, 512))
    facts: Facts = []
    for layout in ("tar", "memmap"):
        root = data.pack(raw, "folder", *(["--format", "memmap"] if layout == "memmap" else []))
        found = _probe("epochs", root, layout, 20, data.workers)
        growth = 100 * (found["last_mb"] / found["third_mb"] - 1)
        facts.append(
            {"name": f"{layout}: growth from the 3rd to the 20th epoch, without pages of files", "value": growth, "unit": "%", "limit": 2}
        )
    return facts
