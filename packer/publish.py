"""From finished jobs to a complete data set: shards to their places, index, data card, findings, and the manifest last."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loaders.format import (
    FINDINGS_NAME,
    FORMAT_VERSION,
    INDEX_ARRAYS,
    INDEX_DIR,
    MANIFEST_NAME,
    README_NAME,
    FieldEntry,
    FileEntry,
    FindingCounts,
    Index,
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
from packer.card import data_card
from packer.findings import Findings
from packer.outdir import begin_publication
from packer.records import shard_file, sync_path, write_file
from packer.sample import WrittenShard
from packer.writers.csr import concatenate


@dataclass(frozen=True, slots=True)
class FinishedShard:
    """A shard that waits at `path` for its place."""

    split: str
    path: Path
    written: WrittenShard


@dataclass(frozen=True, slots=True)
class Heading:
    """What the manifest says besides the shards."""

    layout: Layout
    task: Task
    classes: list[str]
    source: SourceEntry
    transform: dict[str, Any] | None
    output: dict[str, Any]
    created_by: dict[str, str]


def publish(out: Path, partial: Path, shards: Sequence[FinishedShard], heading: Heading, findings: Findings) -> Manifest:
    """Move every shard to its place below `out` and write all other files, the manifest last. Returns the manifest.

    An interruption leaves no manifest, and `outdir.open_partial` puts the shards back.

    Raises:
        PackError: something lies in the place of one of the files.
    """
    places: list[tuple[FinishedShard, str]] = []
    numbers: dict[str, int] = {}
    for shard in shards:
        n = numbers.get(shard.split, 0)
        numbers[shard.split] = n + 1
        places.append((shard, shard_path(shard.split, n, heading.layout)))
    indexed = [index_path(split, name) for split in numbers for name in INDEX_ARRAYS]
    move_shards(out, partial, places, [*indexed, FINDINGS_NAME, README_NAME])
    files: dict[str, FileEntry] = {}
    splits: dict[str, SplitEntry] = {}
    for split in numbers:
        mine = [(s, p) for s, p in places if s.split == split]
        index = concatenate([s.written.index for s, _ in mine], heading.task)
        splits[split] = SplitEntry(num_samples=len(index.samples), shards=[_entry(s.written, p) for s, p in mine])
        for shard, place in mine:
            for name, (num_bytes, sha) in shard.written.files.items():
                if name.startswith("."):
                    files[place + name] = FileEntry(num_bytes=num_bytes, sha256=sha)
        for name, data in index_files(split, index):
            files[name] = _write(out / name, data)
        sync_path(out / INDEX_DIR)
    files[FINDINGS_NAME] = _write(out / FINDINGS_NAME, findings.jsonl().encode("utf-8", "backslashreplace"))
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        layout=heading.layout,
        task=heading.task,
        classes=heading.classes,
        fields=_fields(heading, [shard.written.index for shard in shards]),
        splits=splits,
        source=heading.source,
        transform=heading.transform,
        output=heading.output,
        findings=FindingCounts(**findings.counts()),
        files=files,
        created_by=heading.created_by,
    )
    write_file(out / README_NAME, data_card(manifest).encode())
    sync_path(out)
    write_file(out / MANIFEST_NAME, manifest_text(manifest).encode())
    return manifest


def move_shards(out: Path, partial: Path, places: Iterable[tuple[FinishedShard, str]], files: Iterable[str] = ()) -> None:
    """Move each shard's files, which are on disk, from ``.partial/`` to their path below `out`.

    First it is written down which goes where, and which other `files` may follow.
    """
    moves: dict[str, str] = {}
    for shard, place in places:
        names = [n for n in shard.written.files if not n or n.startswith(".")] or [""]
        moves |= {shard_file(shard.path, n).name: place + n for n in names}
    begin_publication(out, partial, moves, files)
    for name, place in moves.items():
        (out / place).parent.mkdir(exist_ok=True)
        os.replace(partial / name, out / place)
    for folder in {(out / place).parent for place in moves.values()}:
        sync_path(folder)


def _entry(written: WrittenShard, place: str) -> ShardEntry:
    n = len(written.index.samples)
    if "" in written.files:
        num_bytes, sha = written.files[""]
        return ShardEntry(path=place, num_samples=n, num_bytes=num_bytes, sha256=sha)
    files = {name: FileEntry(num_bytes=b, sha256=sha) for name, (b, sha) in written.files.items()}
    return ShardEntry(path=place, num_samples=n, num_bytes=sum(f.num_bytes for f in files.values()), files=files)


def index_files(split: str, index: Index) -> Iterable[tuple[str, bytes]]:
    """(path below OUT, bytes) of every index file of a split."""
    for name in INDEX_ARRAYS:
        array: NDArray[Any] | None = getattr(index, name)
        if array is not None:
            buffer = io.BytesIO()
            np.lib.format.write_array(buffer, array, version=(1, 0), allow_pickle=False)
            yield index_path(split, name), buffer.getvalue()


def _write(path: Path, data: bytes) -> FileEntry:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, data)
    return FileEntry(num_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())


def _fields(heading: Heading, indexes: Sequence[Index]) -> dict[str, FieldEntry]:
    """What a sample holds, for readers without this tool."""
    tar = heading.layout == "tar"

    def entry(dtype: str, shape: list[int | str], place: str, meaning: str) -> FieldEntry:
        return FieldEntry(dtype=dtype, shape=shape, part=place if tar else None, file=None if tar else place, meaning=meaning)

    sizes = {(int(h), int(w)) for i in indexes for h, w in np.unique(i.samples[["height", "width"]]).tolist()}
    h, w = sizes.pop() if len(sizes) == 1 else ("H", "W")
    image = "jpg|png|webp" if tar else "image.npy"
    meta = "json" if tar else ""
    fields = {
        "image": entry(str(heading.output.get("dtype", "uint8")), [h, w, 3], image, "RGB pixels, upright"),
        "source": entry("string", [], meta or "source.npy", "path of the picture below the source root"),
        "affine": entry("float64", [4], meta or "affine.npy", "sx, sy, tx, ty: stored = original * s + t"),
    }
    if tar:
        fields["original_width"] = entry("int", [], "json", "width of the source picture, pixels")
        fields["original_height"] = entry("int", [], "json", "height of the source picture, pixels")
    else:
        fields["original_size"] = entry("int32", [2], "original_size.npy", "height, width of the source picture, pixels")
        fields["key"] = entry("int64", [], "key.npy", "position in the sorted listing of the source")
    if heading.source.options.get("extra"):
        fields["extra"] = entry("string", [], "json", "columns of the source that were kept: name -> text")
    if heading.task == "classification":
        fields["label"] = entry("int64", [], "cls" if tar else "label.npy", "class id, position in classes")
    if heading.task == "detection":
        fields["boxes"] = entry("float32", ["N", 4], meta or "boxes.npy", "x1, y1, x2, y2: pixels of the stored image, 0-based, half-open")
        fields["labels"] = entry("int64", ["N"], meta or "labels.npy", "class id per box")
        for name in ("difficult", "truncated", "occluded") if tar else ("difficult",):
            fields[name] = entry("uint8", ["N"], meta or f"{name}.npy", "0 or 1 per box")
        if not tar:
            fields["box_offsets"] = entry("int64", ["N+1"], "box_offsets.npy", "boxes of sample i are rows offsets[i] to offsets[i+1]")
    return fields
