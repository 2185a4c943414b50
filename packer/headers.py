"""What the bytes of a picture file say before any pixel is decoded: format, chunks, frames, where the EXIF orientation stands.

Pure reading of untrusted bytes, without a decoder. Offsets are 0-based, from the start of the file.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from packer.content import is_raw

ImageFormat = Literal["jpeg", "png", "webp", "bmp", "tiff", "gif"]
ByteOrder = Literal["<", ">"]

_ORIENTATION_TAG = 0x0112
_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_TIFF_STARTS = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")


class HeaderError(ValueError):
    """The file's structure is broken. `truncated`: it ends too early."""

    def __init__(self, message: str, *, truncated: bool = False) -> None:
        super().__init__(message)
        self.truncated = truncated


def sniff(data: bytes) -> ImageFormat | None:
    """The format by the first bytes, never by the name; None for any that is not supported."""
    if data[:2] == b"\xff\xd8":
        return "jpeg"
    if data[:8] == _PNG_SIGNATURE:
        return "png"
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "webp"
    if data[:6] in (b"GIF87a", b"GIF89a"):
        return "gif"
    if data[:4] in _TIFF_STARTS:
        return None if is_raw(data) else "tiff"
    if data[:2] == b"BM" and len(data) >= 26:
        return "bmp"
    return None


@dataclass(frozen=True, slots=True)
class Orientation:
    """An orientation tag: its `value` as written, and where (`offset`, `num_bytes`, `order`) it stands."""

    value: int
    offset: int
    num_bytes: int
    order: ByteOrder

    def reset(self, data: bytes) -> bytes:
        """The same file with the value 1 in place."""
        return (
            data[: self.offset] + struct.pack(self.order + ("H" if self.num_bytes == 2 else "I"), 1) + data[self.offset + self.num_bytes :]
        )


def tiff_orientation(data: bytes, start: int, end: int) -> Orientation | None:
    """The orientation tag in the first directory of the TIFF structure at data[start:end] (a TIFF file or an EXIF block)."""
    if data[start : start + 6] == b"Exif\0\0":  # some writers keep the JPEG prefix in PNG and WebP
        start += 6
    if data[start : start + 4] not in _TIFF_STARTS or end > len(data):
        return None
    order: ByteOrder = "<" if data[start : start + 1] == b"I" else ">"
    big = b"+" in data[start + 2 : start + 4]
    try:
        (offset,) = struct.unpack_from(order + ("Q" if big else "I"), data, start + (8 if big else 4))
        (count,) = struct.unpack_from(order + ("Q" if big else "H"), data, start + offset)
        entry, entry_size = start + offset + (8 if big else 2), 20 if big else 12
        for pos in range(entry, min(entry + count * entry_size, end - entry_size + 1), entry_size):
            tag, kind = struct.unpack_from(order + "HH", data, pos)
            if tag == _ORIENTATION_TAG and kind in (3, 4):
                at, num_bytes = pos + entry_size - (8 if big else 4), 2 if kind == 3 else 4
                (value,) = struct.unpack_from(order + ("H" if kind == 3 else "I"), data, at)
                return Orientation(value, at, num_bytes, order)
    except (struct.error, OverflowError):
        return None  # a broken EXIF block says nothing; the pixels are still good
    return None


def tiff_pages(data: bytes) -> int:
    """Number of directories in a TIFF file's chain; a loop or a broken link ends it."""
    order = "<" if data[:1] == b"I" else ">"
    big = b"+" in data[2:4]
    seen: set[int] = set()
    try:
        (offset,) = struct.unpack_from(order + ("Q" if big else "I"), data, 8 if big else 4)
        while offset and offset not in seen and offset < len(data):
            seen.add(offset)
            (count,) = struct.unpack_from(order + ("Q" if big else "H"), data, offset)
            (offset,) = struct.unpack_from(order + ("Q" if big else "I"), data, offset + (8 + 20 * count if big else 2 + 12 * count))
    except (struct.error, OverflowError):
        pass  # what is wrong with a page behind the first is nothing to us
    return max(1, len(seen))


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk of a PNG or WebP file: `start` and `num_bytes` of its data."""

    name: bytes
    start: int
    num_bytes: int


def png_chunks(data: bytes, *, check_crc: bool = False) -> Iterator[Chunk]:
    """The chunks up to and including IEND. What follows it is not looked at.

    Raises:
        HeaderError: the file ends before IEND, or (with `check_crc`) a checksum is wrong.
    """
    pos, size = 8, len(data)
    while True:
        if pos + 12 > size:
            raise HeaderError(f"ends at byte {size}, before its IEND chunk", truncated=True)
        num_bytes, name = struct.unpack_from(">I4s", data, pos)
        end = pos + 8 + num_bytes
        if not name.isalpha():
            raise HeaderError(f"has no chunk name at byte {pos + 4}: found {name.hex(' ').upper()}")
        if end + 4 > size:
            raise HeaderError(
                f"ends at byte {size}, inside the {name.decode()} chunk at byte {pos} that has {num_bytes} bytes", truncated=True
            )
        if check_crc and zlib.crc32(memoryview(data)[pos + 4 : end]) != int.from_bytes(data[end : end + 4], "big"):
            raise HeaderError(f"has a wrong checksum in the {name.decode()} chunk at byte {pos}: the file was damaged")
        yield Chunk(name, pos + 8, num_bytes)
        if name == b"IEND":
            return
        pos = end + 4


def png_still(data: bytes) -> bytes:
    """The same PNG with nothing but its pixels: no animation, transparency, colour profile or text. All checksums are checked.

    Raises:
        HeaderError: as `png_chunks`, or there is no pixel data.
    """
    keep = (b"IHDR", b"PLTE", b"IDAT", b"IEND")
    chunks = list(png_chunks(data, check_crc=True))
    if not any(c.name == b"IDAT" for c in chunks):
        raise HeaderError("has no IDAT chunk, so no pixels")
    if all(c.name in keep for c in chunks):
        return data
    return _PNG_SIGNATURE + b"".join(data[c.start - 8 : c.start + c.num_bytes + 4] for c in chunks if c.name in keep)


def webp_chunks(data: bytes) -> Iterator[Chunk]:
    """The chunks of a WebP file.

    Raises:
        HeaderError: the file is shorter than it says.
    """
    (riff_size,) = struct.unpack_from("<I", data, 4)
    if riff_size + 8 > len(data):
        raise HeaderError(f"ends at byte {len(data)} of {riff_size + 8}", truncated=True)
    pos = 12
    while pos + 8 <= riff_size + 8:
        name, num_bytes = struct.unpack_from("<4sI", data, pos)
        if pos + 8 + num_bytes > len(data):
            raise HeaderError(f"ends at byte {len(data)}, inside a chunk at byte {pos} that has {num_bytes} bytes", truncated=True)
        yield Chunk(name, pos + 8, num_bytes)
        pos += 8 + num_bytes + (num_bytes & 1)


def gif_frames(data: bytes) -> int:
    """Number of frames of a GIF file.

    Raises:
        HeaderError: the file ends inside a block, or holds no frame.
    """
    pos = 13 + _color_table(data, 10)
    frames = 0
    try:
        while pos < len(data) and data[pos] != 0x3B:
            if data[pos] == 0x2C:
                if not frames:
                    _check_first_frame(data, pos)
                frames += 1
                pos += 10 + _color_table(data, pos + 9) + 1
            elif data[pos] == 0x21:
                pos += 2
            else:
                break  # rubbish behind the last block, which every reader passes over
            while data[pos]:
                pos += data[pos] + 1
            pos += 1
    except IndexError:
        raise HeaderError(f"ends at byte {len(data)}, inside frame {max(frames, 1)}", truncated=True) from None
    if pos > len(data) or not frames:
        raise HeaderError(f"ends at byte {len(data)} without a complete frame", truncated=True)
    return frames


def _check_first_frame(data: bytes, pos: int) -> None:
    """Pillow makes the picture as large as its first frame, whatever the header says: 1.7 MB would become 17 GB."""
    screen_width, screen_height = (int.from_bytes(data[p : p + 2], "little") for p in (6, 8))
    x, y, width, height = (int.from_bytes(data[p : p + 2], "little") for p in range(pos + 1, pos + 9, 2))
    if x + width > screen_width or y + height > screen_height:
        raise HeaderError(f"has a first frame of {width}x{height} pixels at ({x}, {y}), outside of its {screen_width}x{screen_height}")


def _color_table(data: bytes, flags_at: int) -> int:
    return 3 << ((data[flags_at] & 7) + 1) if data[flags_at] & 0x80 else 0
