"""The tar layout: one WebDataset shard, written and read back.

A shard's bytes are a pure function of its samples: headers hold nothing but a name and a size, so that reading back can ask of every
header and every padding byte to be exactly what it must be.
"""

from __future__ import annotations

import hashlib
import os
import re
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from loaders.codecs import decode_meta, encode_meta, float32_list
from loaders.format import IMAGE_PARTS, FormatError, Layout, Task
from loaders.jpeg import restart_offsets
from packer.sample import PackError, Sample, WrittenShard
from packer.writers.csr import IndexBuilder

BLOCK = tarfile.BLOCKSIZE
END = b"\0" * (2 * BLOCK)
MAX_PART_BYTES = (1 << 32) - 1
FLUSH_BYTES = 8 << 20
WRITE_BYTES = 1 << 16
MAX_PIECES = 512  # of the 1,024 that the system takes at a time


def member_name(key: int, part: str) -> str:
    """Name of a sample's part in the shard."""
    return f"{key:09d}.{part}"


def _blank_header() -> bytes:
    info = tarfile.TarInfo()
    info.mode = 0o644
    info.mtime = info.uid = info.gid = 0
    return info.tobuf(tarfile.USTAR_FORMAT, "ascii", "strict")


_BLANK = _blank_header()
_BLANK_SUM = sum(_BLANK) - sum(_BLANK[124:136]) - sum(_BLANK[148:156]) + 8 * ord(" ")


def member_header(name: str, num_bytes: int) -> bytes:
    """The 512-byte USTAR header of a member, a function of its name and size alone: what `tarfile` writes, at a fifth of its time."""
    name_field, size_field = name.encode("ascii"), b"%011o\0" % num_bytes
    if len(name_field) > 100 or len(size_field) > 12:
        raise ValueError(f"member {name!r} of {num_bytes} bytes does not fit into a USTAR header")
    checksum = b"%06o\0 " % (_BLANK_SUM + sum(name_field) + sum(size_field))
    return name_field.ljust(100, b"\0") + _BLANK[100:124] + size_field + _BLANK[136:148] + checksum + _BLANK[156:]


def padding(num_bytes: int) -> int:
    """Zero bytes that fill a member's data up to a whole block."""
    return -num_bytes % BLOCK


def sample_meta(sample: Sample, task: Task) -> dict[str, Any]:
    """The sample's JSON object: always the same keys for a task."""
    meta: dict[str, Any] = {
        "source": sample.source,
        "width": sample.width,
        "height": sample.height,
        "original_width": sample.original_width,
        "original_height": sample.original_height,
        "affine": [float(v) for v in sample.affine],
    }
    if task == "classification":
        meta["label"] = sample.label
    if task == "detection":
        meta["boxes"] = float32_list(sample.boxes)
        for name in ("labels", "difficult", "truncated", "occluded"):
            meta[name] = getattr(sample, name).tolist()
    if sample.extra is not None:
        meta["extra"] = sample.extra
    return meta


class TarWriter:
    """Writes one tar shard at `path` and its ``.idx`` beside it. See `packer.sample.Writer`."""

    layout: Layout = "tar"

    def __init__(self, path: Path, task: Task) -> None:
        self._path, self._task = path, task
        self._file = path.open("wb", buffering=0)
        self._sha = hashlib.sha256()
        self._offset = self._flushed = 0
        self._waiting: list[bytes] = []
        self._starts: list[int] = []
        self._index = IndexBuilder(task)

    def write(self, sample: Sample) -> None:
        if sample.encoded is None or sample.suffix is None:
            raise PackError(f"{sample.source}: the tar layout needs an encoded image")
        meta = encode_meta(sample_meta(sample, self._task))
        parts = {sample.suffix: sample.encoded, "json": meta}
        if self._task == "classification":
            parts["cls"] = str(sample.label).encode("ascii")
        self._starts.append(self._offset)
        at = {part: self._part(member_name(sample.key, part), data) for part, data in sorted(parts.items())}
        restarts = restart_offsets(sample.encoded) if sample.suffix == "jpg" else None
        image = (at[sample.suffix], sample.encoded)
        crc = sample.encoded_crc32
        row = index_row(sample.key, image, (at["json"], meta), sample.width, sample.height, sample.label, image_crc32=crc)
        self._index.add(row, sample.boxes, sample.labels, sample.difficult, restarts)

    def _part(self, name: str, data: bytes) -> int:
        if len(data) > MAX_PART_BYTES:
            raise PackError(f"{name}: {len(data)} bytes, a part has at most {MAX_PART_BYTES}")
        for piece in (member_header(name, len(data)), data, bytes(padding(len(data)))):
            self._waiting.append(piece)
            self._sha.update(piece)
        offset = self._offset + BLOCK
        self._offset = offset + len(data) + padding(len(data))
        if len(self._waiting) >= MAX_PIECES or len(data) >= WRITE_BYTES:
            self._write()
        return offset

    def _write(self) -> None:
        """Write what is waiting, many pieces at a time and without copying them together first."""
        fd, pieces = self._file.fileno(), self._waiting
        total = sum(map(len, pieces))
        written = os.writev(fd, pieces)
        while written < total:  # only near 2 GiB, or when the disk is full, which the next call says
            written += os.write(fd, memoryview(b"".join(pieces))[written:])
        pieces.clear()
        if self._offset - self._flushed >= FLUSH_BYTES and hasattr(os, "posix_fadvise"):
            # To fresh pages this advice means that the disk begins to write them, so that no fsync has to wait for it.
            os.posix_fadvise(fd, self._flushed, self._offset - self._flushed, os.POSIX_FADV_DONTNEED)
            self._flushed = self._offset

    def close(self) -> WrittenShard:
        self._waiting.append(END)
        self._sha.update(END)
        self._write()
        self._file.close()
        idx = np.array([*self._starts, self._offset], "<u8").tobytes()
        idx_path = self._path.with_name(self._path.name + ".idx")
        idx_path.write_bytes(idx)
        files = {"": (self._offset + len(END), self._sha.hexdigest()), ".idx": (len(idx), hashlib.sha256(idx).hexdigest())}
        return WrittenShard(files, self._index.build())

    def abort(self) -> None:
        self._file.close()
        self._path.unlink(missing_ok=True)
        self._path.with_name(self._path.name + ".idx").unlink(missing_ok=True)


def index_row(
    key: int,
    image: tuple[int, bytes],
    meta: tuple[int, bytes],
    width: int,
    height: int,
    label: int,
    num_boxes: int = 0,
    image_crc32: int | None = None,
) -> dict[str, int]:
    """A `SAMPLE_DTYPE` row as a dict, `shard` 0. `image` and `meta` are (offset of the data, data)."""
    return {
        "key": key,
        "image_offset": image[0],
        "image_size": len(image[1]),
        "json_offset": meta[0],
        "json_size": len(meta[1]),
        "image_crc32": zlib.crc32(image[1]) if image_crc32 is None else image_crc32,
        "json_crc32": zlib.crc32(meta[1]),
        "width": width,
        "height": height,
        "label": label,
        "num_boxes": num_boxes,
    }


class Readable(Protocol):
    """What `read_samples` reads from."""

    def read(self, n: int, /) -> bytes: ...


@dataclass(slots=True)
class TarSample:
    """One sample of a shard as its bytes say: `parts` maps a part's name to (offset of the data, data)."""

    key: int
    start: int
    parts: dict[str, tuple[int, bytes]] = field(default_factory=dict)


def read_samples(f: Readable, num_bytes: int) -> Iterator[TarSample]:
    """Read a shard from its first byte to its last, one sample at a time; `num_bytes` is the file's size.

    Raises:
        FormatError: a byte that a shard of ours cannot have, with its offset. Everything before it was yielded, but for the sample
            that the fault is in.
    """
    offset, current = 0, TarSample(-1, 0)
    while True:
        head = f.read(BLOCK)
        if head == END[:BLOCK]:
            break
        key, part, size = _parse_header(head, offset, num_bytes)
        name = member_name(key, part)
        if key != current.key:
            if current.key >= 0:
                yield current
            current = TarSample(key, offset)
        if current.parts and part <= max(current.parts):
            raise FormatError(f"byte {offset}: member {name} is out of order")
        if offset + BLOCK + size + padding(size) > num_bytes:
            raise FormatError(f"byte {offset}: member {name} of {size} bytes is cut short")
        data = f.read(size)
        pad = f.read(padding(size))
        if len(data) != size or len(pad) != padding(size):
            raise FormatError(f"byte {offset}: member {name} of {size} bytes is cut short")
        if pad.strip(b"\0"):
            raise FormatError(f"byte {offset + BLOCK + size}: padding after {name} is not zero")
        current.parts[part] = (offset + BLOCK, data)
        offset += BLOCK + size + len(pad)
    if current.key >= 0:
        yield current
    rest = head + f.read(4 * BLOCK)
    if rest != END:
        raise FormatError(f"byte {offset}: expected two zero blocks and the end of the file, found {len(rest)} bytes or more")


def _parse_header(head: bytes, offset: int, num_bytes: int) -> tuple[int, str, int]:
    """(key, part, size) of a member."""
    if len(head) < BLOCK:
        raise FormatError(f"byte {offset}: the file ends without its two zero blocks ({num_bytes} bytes)")
    match = re.fullmatch(rb"(\d{9,18})\.([a-z]+)", head[:100].rstrip(b"\0"))
    digits = re.fullmatch(rb"[0-7]{11}", head[124:135])
    if not match or not digits:
        raise FormatError(f"byte {offset}: no member header as this tool writes it")
    key, part, size = int(match[1]), match[2].decode(), int(digits[0], 8)
    if head != member_header(member_name(key, part), size):
        raise FormatError(f"byte {offset}: the header of {match[0].decode()} is not as this tool writes it")
    return key, part, size


def derive_row(sample: TarSample, task: Task) -> tuple[dict[str, int], dict[str, Any], str, bytes]:
    """Index row, JSON object, image part's name and image bytes of a sample, checked for shape.

    Raises:
        FormatError: a part is missing or too many, or the JSON does not hold what the task asks for.
    """
    images = [p for p in sample.parts if p in IMAGE_PARTS]
    expected = {"json", *images, *(["cls"] if task == "classification" else [])}
    if len(images) != 1 or set(sample.parts) != expected:
        raise FormatError(f"parts are {sorted(sample.parts)}, expected one image, json" + (" and cls" if task == "classification" else ""))
    part = images[0]
    image = sample.parts[part]
    try:
        meta = decode_meta(sample.parts["json"][1])
        label = int(meta["label"]) if task == "classification" else -1
        if task == "classification" and sample.parts["cls"][1] != str(label).encode():
            raise FormatError(f"cls says {sample.parts['cls'][1]!r}, json says {label}")
        num_boxes = len(meta["boxes"]) if task == "detection" else 0
        row = index_row(sample.key, image, sample.parts["json"], int(meta["width"]), int(meta["height"]), label, num_boxes)
        if task == "detection":
            wrong = [k for k in ("labels", "difficult", "truncated", "occluded") if len(meta[k]) != num_boxes]
            if wrong:
                raise FormatError(f"json has {num_boxes} boxes and {len(meta[wrong[0]])} {wrong[0]}")
            np.asarray(meta["boxes"], np.float32).reshape(num_boxes, 4)
        str(meta["source"])
    except FormatError:
        raise
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as e:
        raise FormatError(f"json part is not as the format says: {type(e).__name__}: {e}") from None
    return row, meta, part, image[1]
