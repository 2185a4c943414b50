"""Verify one tar shard: every byte by its checksum, every sample by the index, every image by decoding."""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from loaders.codecs import DecodeError, decode_meta
from loaders.format import IMAGE_PARTS, FormatError, Index, ShardEntry, open_index
from loaders.jpeg import restart_offsets
from packer.engines import Tick
from packer.images import ImageError, check, probe
from packer.problems import REBUILD, Problem, ShardTask, VerifyContext, file_problems
from packer.writers.compare import index_differences, shard_rows
from packer.writers.csr import IndexBuilder
from packer.writers.tar import BLOCK, END, TarSample, derive_row, member_header, read_samples

NO_LIMIT = 1 << 62


class _Hashed:
    """A file that hashes what is read from it."""

    def __init__(self, f: IO[bytes]) -> None:
        self._f, self.sha = f, hashlib.sha256()

    def read(self, n: int) -> bytes:
        data = self._f.read(n)
        self.sha.update(data)
        return data


def verify_tar(context: VerifyContext, task: ShardTask, shard: ShardEntry, tick: Tick) -> Iterator[Problem]:
    """All problems of the shard."""
    missing = list(file_problems(context.root, shard.path, shard.num_bytes, None))
    yield from missing
    if any(p.code != "wrong-size" for p in missing):
        return
    index = _index(context, task)
    try:
        with (context.root / shard.path).open("rb", buffering=1 << 20) as f:
            if context.quick:
                yield from _quick(f, shard, index)
            else:
                yield from _full(context, f, os.fstat(f.fileno()).st_size, shard, index, tick)
    except OSError as e:
        yield Problem("error", "unreadable", shard.path, f"cannot be read: {e.strerror}")


def _index(context: VerifyContext, task: ShardTask) -> Index | None:
    """The shard's rows of the index; None when the index cannot be opened, which is a problem of its own."""
    try:
        return shard_rows(open_index(context.root, context.manifest, task.split), task.start, len(task.items))
    except FormatError:
        return None


def _full(context: VerifyContext, f: IO[bytes], size: int, shard: ShardEntry, index: Index | None, tick: Tick) -> Iterator[Problem]:
    hashed = _Hashed(f)
    builder = IndexBuilder(context.manifest.task)
    starts: list[int] = []
    broken: str | None = None
    named: set[int] = set()
    sources: dict[int, str] = {}
    reader = read_samples(hashed, size)
    while True:
        try:
            sample = next(reader, None)
        except FormatError as e:
            broken = str(e)
            break
        if sample is None:
            break
        tick(len(starts))
        starts.append(sample.start)
        for problem in _sample(context, shard, sample, builder, sources):
            named.add(sample.key)
            yield problem
    while hashed.read(1 << 20):
        pass
    changed = hashed.sha.hexdigest() != shard.sha256
    if changed and index is not None:
        for problem in _by_crc(f.fileno(), shard, index):
            if problem.sample not in named:
                yield problem
    if broken is not None:
        yield _place(context.root, shard, broken, index)
    if changed:  # then the index differs too, which would be no news
        found = hashed.sha.hexdigest()
        yield Problem("error", "checksum", shard.path, f"content was changed: sha256 is {found}, the manifest says {shard.sha256}{REBUILD}")
    if broken is None and len(starts) != shard.num_samples:
        text = f"{len(starts):,} samples, the manifest says {shard.num_samples:,}"
        yield Problem("error", "wrong-count", shard.path, text + REBUILD)
    elif broken is None and not changed and not named:
        yield from _against_index(context, shard, builder.build(), starts, index, sources)


def _sample(
    context: VerifyContext, shard: ShardEntry, sample: TarSample, builder: IndexBuilder, sources: dict[int, str]
) -> Iterator[Problem]:
    """Parse and decode one sample; add it to the derived index and to `sources`, by key."""
    source: str | None = None
    try:
        row, meta, part, image = derive_row(sample, context.manifest.task)
        source = sources[sample.key] = str(meta["source"])
        info = probe(image, max_pixels=NO_LIMIT)
        if info.suffix != part or info.orientation != 1 or (info.width, info.height) != (row["width"], row["height"]):
            found = f"{info.suffix} of {info.width}x{info.height}, orientation {info.orientation}"
            raise FormatError(f"the image is {found}; expected {part} of {row['width']}x{row['height']}, orientation 1")
        check(image, info)
    except (FormatError, ImageError, DecodeError) as e:
        yield Problem("error", "bad-sample", shard.path, f"{e}{REBUILD}", sample.key, source)
        return
    detection = context.manifest.task == "detection"
    boxes = np.asarray(meta["boxes"] if detection else [], np.float32).reshape(-1, 4)
    labels = np.asarray(meta["labels"] if detection else [], np.int64)
    difficult = np.asarray(meta["difficult"] if detection else [], np.uint8)
    builder.add(row, boxes, labels, difficult, restart_offsets(image) if part == "jpg" else None)


def _by_crc(fd: int, shard: ShardEntry, index: Index) -> Iterator[Problem]:
    """Samples whose bytes are not those of the index: what a changed checksum of the shard comes down to."""
    for row in index.samples:
        bad = [
            part
            for part in ("image", "json")
            if zlib.crc32(_pread(fd, int(row[f"{part}_offset"]), int(row[f"{part}_size"]))) != int(row[f"{part}_crc32"])
        ]
        if bad:
            meta = _pread(fd, int(row["json_offset"]), int(row["json_size"]))
            yield Problem(
                "error", "damaged-sample", shard.path, f"{' and '.join(bad)} bytes were changed{REBUILD}", int(row["key"]), _source(meta)
            )


def _pread(fd: int, offset: int, size: int) -> bytes:
    """What is there, at most: an index may claim 4 GB anywhere."""
    there = os.fstat(fd).st_size - offset
    return os.pread(fd, min(size, there), offset) if offset >= 0 and there > 0 else b""


def _source(meta: bytes) -> str | None:
    try:
        return str(decode_meta(meta)["source"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _place(root: Path, shard: ShardEntry, broken: str, index: Index | None) -> Problem:
    """A structural fault ("byte N: ..."), with the sample that the byte belongs to."""
    key: int | None = None
    source: str | None = None
    offset = int(broken.split(":")[0].removeprefix("byte "))
    if index is not None:
        # A sample ends with the padding of its image or its json, whichever comes last (cls comes first).
        ends = np.max([index.samples[f"{part}_offset"] + index.samples[f"{part}_size"] for part in ("image", "json")], axis=0)
        i = int(np.searchsorted(-(-ends // BLOCK) * BLOCK, offset, side="right"))
        if i < len(ends):
            row = index.samples[i]
            key = int(row["key"])
            with (root / shard.path).open("rb") as f:
                source = _source(_pread(f.fileno(), int(row["json_offset"]), int(row["json_size"])))
    return Problem("error", "bad-structure", shard.path, broken + REBUILD, key, source)


def _against_index(
    context: VerifyContext, shard: ShardEntry, derived: Index, starts: list[int], index: Index | None, sources: dict[int, str]
) -> Iterator[Problem]:
    if index is not None:
        for key, text in index_differences(index, derived):
            message = f"the index does not agree with the shard: {text}{REBUILD}"
            yield Problem("error", "index-differs", shard.path, message, key, None if key is None else sources.get(key))
    idx: NDArray[Any] = np.array([*starts, shard.num_bytes - len(END)], "<u8")
    try:
        if (context.root / (shard.path + ".idx")).read_bytes() != idx.tobytes():
            yield Problem("error", "index-differs", shard.path + ".idx", "offsets do not agree with the shard" + REBUILD)
    except OSError:
        return  # listed in the manifest's files: reported there


def _quick(f: IO[bytes], shard: ShardEntry, index: Index | None) -> Iterator[Problem]:
    """Headers where the index says that they are, and the end."""
    fd = f.fileno()
    for row in [] if index is None else index.samples:
        key = int(row["key"])
        for part, names in (("image", IMAGE_PARTS), ("json", ("json",))):
            head = _pread(fd, int(row[f"{part}_offset"]) - BLOCK, BLOCK)
            if head not in {member_header(f"{key:09d}.{name}", int(row[f"{part}_size"])) for name in names}:
                yield Problem("error", "bad-structure", shard.path, f"no header of the {part} part where the index says{REBUILD}", key)
    if _pread(fd, shard.num_bytes - len(END), len(END) + 1) != END:
        yield Problem("error", "bad-structure", shard.path, "does not end with two zero blocks" + REBUILD)
