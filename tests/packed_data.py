"""A small writer of packed data for tests: both layouts, all tasks, made from the specification with tarfile and numpy only.

It shares no code with the packing side, so a reader that is tested against it is tested against `loaders.format`'s text.
"""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

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
    Task,
    index_path,
    manifest_text,
    shard_path,
)
from loaders.jpeg import restart_offsets

CLASSES = ["crack", "porosity", "slag"]


@dataclass
class Packed:
    """What was written: the expectation of a test. Lists are by stored position within the split; images uint8 [H, W, 3] RGB."""

    root: Path
    task: Task
    layout: Layout
    images: list[NDArray[Any]] = field(default_factory=list)
    keys: list[int] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)  # classification
    boxes: list[NDArray[np.float32]] = field(default_factory=list)
    box_labels: list[NDArray[np.int64]] = field(default_factory=list)
    difficult: list[NDArray[np.uint8]] = field(default_factory=list)
    affine: tuple[float, float, float, float] = (0.5, 0.5, 1.0, 2.0)

    def shard(self, number: int, split: str = "train") -> Path:
        return self.root / shard_path(split, number, self.layout)


def image(rng: np.random.Generator, height: int, width: int) -> NDArray[np.uint8]:
    """A smooth random picture, uint8 [H, W, 3]."""
    return cv2.resize(rng.integers(0, 256, (3, 3, 3), dtype=np.uint8), (width, height), interpolation=cv2.INTER_LINEAR)


def encode(pixels: NDArray[np.uint8], part: str, grid: bool = False) -> bytes:
    """`grid`: a JPEG has restart markers: after every MCU where it is over 64 pixels wide, else after every row of MCUs."""
    interval = (1 if pixels.shape[1] > 64 else -(-pixels.shape[1] // 16)) if grid else 0
    params = [cv2.IMWRITE_JPEG_RST_INTERVAL, interval] if part == "jpg" else []
    ok, data = cv2.imencode(f".{part}", pixels[..., ::-1], params)
    assert ok
    return data.tobytes()


def decode(data: bytes) -> NDArray[np.uint8]:
    """Uint8 [H, W, 3] RGB, by OpenCV alone."""
    decoded = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)
    return np.ascontiguousarray(decoded[..., ::-1])


def write_packed(
    root: Path,
    layout: Layout = "tar",
    task: Task = "detection",
    counts: tuple[int, ...] = (4, 3, 3),
    *,
    split: str = "train",
    sizes: tuple[tuple[int, int], ...] = ((12, 16),),
    parts: tuple[str, ...] = ("jpg",),
    dtype: Any = np.uint8,
    num_boxes: tuple[int, ...] = (2, 0, 1, 3),
    grid: tuple[bool, ...] = (False,),
    seed: int = 0,
) -> Packed:
    """Write one split with `counts[s]` samples in shard s.

    Sample n has size ``sizes[n % len(sizes)]`` (height, width), part ``parts[n % len(parts)]`` and ``num_boxes[n % len(num_boxes)]`` boxes;
    its key is ``7 * n + 3``, its label ``n % 3``. Tar images read back as `Packed.images` has them (decoded again after encoding). Where
    ``grid[n % len(grid)]``, a JPEG has a restart grid; the index then lists the cells.
    """
    rng = np.random.default_rng(seed)
    packed = Packed(root, task, layout)
    samples = []
    for n in range(sum(counts)):
        height, width = sizes[n % len(sizes)]
        pixels, part = image(rng, height, width), parts[n % len(parts)]
        data = encode(pixels, part, grid[n % len(grid)]) if layout == "tar" else b""
        packed.images.append(decode(data) if layout == "tar" else pixels.astype(dtype))
        packed.keys.append(7 * n + 3)
        packed.sources.append(f"images/bild_{n}_ä.{part}")
        packed.labels.append(n % 3)
        m = num_boxes[n % len(num_boxes)]
        corners = np.sort(rng.uniform(0, 10, (m, 2, 2)), axis=1).astype(np.float32)
        packed.boxes.append(corners.reshape(m, 4))
        packed.box_labels.append(rng.integers(0, 3, m))
        packed.difficult.append(rng.integers(0, 2, m, dtype=np.uint8))
        samples.append((part, data))
    rows = np.zeros(len(samples), SAMPLE_DTYPE)
    rows["key"] = packed.keys
    rows["label"] = packed.labels if task == "classification" else -1
    rows["num_boxes"] = [len(b) for b in packed.boxes] if task == "detection" else 0
    rows["height"] = [p.shape[0] for p in packed.images]
    rows["width"] = [p.shape[1] for p in packed.images]
    shards, start = [], 0
    for number, count in enumerate(counts):
        chosen = range(start, start + count)
        rows["shard"][start : start + count] = number
        write = _write_tar if layout == "tar" else _write_memmap
        shards.append(write(packed, split, number, chosen, samples, rows))
        start += count
    files = _write_index(packed, split, rows, [restart_offsets(data) for _, data in samples] if any(grid) else [])
    _write_manifest(packed, {split: SplitEntry(num_samples=len(samples), shards=shards)}, files)
    return packed


def _meta(packed: Packed, n: int) -> dict[str, Any]:
    height, width = packed.images[n].shape[:2]
    meta: dict[str, Any] = {
        "source": packed.sources[n],
        "width": width,
        "height": height,
        "original_width": 2 * width,
        "original_height": 2 * height + 1,
        "affine": list(packed.affine),
    }
    if packed.task == "classification":
        meta["label"] = packed.labels[n]
    if packed.task == "detection":
        meta["boxes"] = packed.boxes[n].astype(float).tolist()
        meta["labels"] = packed.box_labels[n].tolist()
        meta["difficult"] = packed.difficult[n].tolist()
        meta["truncated"] = meta["occluded"] = [0] * len(packed.boxes[n])
    return meta


def _write_tar(
    packed: Packed, split: str, number: int, chosen: range, samples: list[tuple[str, bytes]], rows: NDArray[np.void]
) -> ShardEntry:
    path = shard_path(split, number, "tar")
    target = packed.root / path
    target.parent.mkdir(parents=True, exist_ok=True)
    starts = []
    with tarfile.open(target, "w", format=tarfile.USTAR_FORMAT) as tar:
        for n in chosen:
            part, data = samples[n]
            contents = {part: data, "json": json.dumps(_meta(packed, n)).encode()}
            if packed.task == "classification":
                contents["cls"] = str(packed.labels[n]).encode()
            starts.append(tar.offset)
            for name in sorted(contents):
                kind = "image" if name == part else name
                if kind in ("image", "json"):
                    rows[f"{kind}_offset"][n] = tar.offset + 512
                    rows[f"{kind}_size"][n] = len(contents[name])
                    rows[f"{kind}_crc32"][n] = zlib.crc32(contents[name])
                info = tarfile.TarInfo(f"{packed.keys[n]:09d}.{name}")
                info.size = len(contents[name])
                tar.addfile(info, io.BytesIO(contents[name]))
        end = tar.offset
    with target.open("r+b") as f:  # tarfile pads to 10240 bytes; the format says two zero blocks
        f.truncate(end + 1024)
    np.array([*starts, end], "<u8").tofile(f"{target}.idx")
    entry = _entry(target)
    return ShardEntry(path=path, num_samples=len(chosen), num_bytes=entry.num_bytes, sha256=entry.sha256)


def _write_memmap(
    packed: Packed, split: str, number: int, chosen: range, samples: list[tuple[str, bytes]], rows: NDArray[np.void]
) -> ShardEntry:
    del samples, rows  # the layout has no encoded bytes, and offsets stay 0
    path = shard_path(split, number, "memmap")
    folder = packed.root / path
    folder.mkdir(parents=True, exist_ok=True)
    metas = [_meta(packed, n) for n in chosen]
    arrays: dict[str, NDArray[Any]] = {
        "image": np.stack([packed.images[n] for n in chosen]),
        "key": np.array([packed.keys[n] for n in chosen], np.int64),
        "source": np.array([packed.sources[n].encode() for n in chosen]),
        "affine": np.array([m["affine"] for m in metas], np.float64),
        "original_size": np.array([(m["original_height"], m["original_width"]) for m in metas], np.int32),
    }
    if packed.task == "classification":
        arrays["label"] = np.array([packed.labels[n] for n in chosen], np.int64)
    if packed.task == "detection":
        arrays.update(_csr(packed, chosen))
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    files = {f"{name}.npy": _entry(folder / f"{name}.npy") for name in arrays}
    return ShardEntry(path=path, num_samples=len(chosen), num_bytes=sum(f.num_bytes for f in files.values()), files=files)


def _csr(packed: Packed, chosen: range) -> dict[str, NDArray[Any]]:
    counts = [len(packed.boxes[n]) for n in chosen]
    return {
        "boxes": np.concatenate([packed.boxes[n] for n in chosen]).astype("<f4"),
        "labels": np.concatenate([packed.box_labels[n] for n in chosen]).astype("<i8"),
        "difficult": np.concatenate([packed.difficult[n] for n in chosen]).astype("u1"),
        "box_offsets": np.array([0, *np.cumsum(counts)], "<i8"),
    }


def _write_index(packed: Packed, split: str, rows: NDArray[np.void], cells: list[NDArray[np.uint32]]) -> dict[str, FileEntry]:
    arrays: dict[str, NDArray[Any]] = {"samples": rows}
    if cells:
        arrays["restarts"] = np.concatenate(cells).astype("<u4")
        arrays["restart_offsets"] = np.array([0, *np.cumsum([len(c) for c in cells])], "<i8")
    if packed.task == "detection":
        arrays.update(_csr(packed, range(len(rows))))
    files = {}
    for name, array in arrays.items():
        target = packed.root / index_path(split, name)
        target.parent.mkdir(parents=True, exist_ok=True)
        np.save(target, array)
        files[index_path(split, name)] = _entry(target)
    return files


def _write_manifest(packed: Packed, splits: dict[str, SplitEntry], files: dict[str, FileEntry]) -> None:
    findings = packed.root / "findings.jsonl"
    findings.write_bytes(b"")
    place = {"part": "jpg"} if packed.layout == "tar" else {"file": "image.npy"}
    manifest = Manifest(
        format_version=1,
        layout=packed.layout,
        task=packed.task,
        classes=[] if packed.task == "unlabelled" else CLASSES,
        fields={"image": FieldEntry(dtype=str(packed.images[0].dtype), shape=["height", "width", 3], meaning="the picture", **place)},
        splits=splits,
        source=SourceEntry(kind="test", options={}, fingerprint="0" * 64),
        transform=None,
        output={},
        findings=FindingCounts(),
        files={**files, "findings.jsonl": _entry(findings)},
        created_by={"tests": "1"},
    )
    (packed.root / "manifest.json").write_text(manifest_text(manifest), "utf-8")


def _entry(path: Path) -> FileEntry:
    data = path.read_bytes()
    return FileEntry(num_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
