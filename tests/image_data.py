"""Picture files made by hand, for what the usual encoders cannot write."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any, Literal

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import Image


def picture(height: int = 40, width: int = 60, seed: int = 0) -> NDArray[np.uint8]:
    """A smooth random colour picture, uint8 [H, W, 3]: it survives JPEG well and no two corners are alike."""
    small = np.random.default_rng(seed).integers(0, 256, (5, 6, 3), dtype=np.uint8)
    return np.asarray(cv2.resize(small, (width, height), interpolation=cv2.INTER_LINEAR))


def save(image: Any, kind: str, **options: Any) -> bytes:
    """Encode an array or a Pillow image with Pillow."""
    buffer = io.BytesIO()
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(buffer, kind, **options)
    return buffer.getvalue()


def png_chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png_of(values: NDArray[Any], *, color: int, bits: int, before: bytes = b"", after: bytes = b"", idat: bytes | None = None) -> bytes:
    """A PNG of values [H, W(, C)] of 8 or 16 bits, with raw chunks `before` and `after` its pixels."""
    height, width = values.shape[:2]
    rows = values.astype(">u2" if bits == 16 else "u1").reshape(height, -1)
    packed = zlib.compress(b"".join(b"\0" + row.tobytes() for row in rows)) if idat is None else idat
    header = struct.pack(">IIBBBBB", width, height, bits, color, 0, 0, 0)
    chunks = png_chunk(b"IHDR", header) + before + png_chunk(b"IDAT", packed) + after + png_chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunks


def exif(orientation: int, order: str = "<", kind: int = 3) -> bytes:
    """A TIFF structure that holds an orientation tag (kind 3 SHORT, 4 LONG) after another tag."""
    value = struct.pack(order + ("HH" if kind == 3 else "I"), *((orientation, 0) if kind == 3 else (orientation,)))
    tags = struct.pack(order + "HHII", 0x010E, 2, 4, 0) + struct.pack(order + "HHI", 0x0112, kind, 1) + value
    return (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(order + "IH", 8, 2) + tags + struct.pack(order + "I", 0)


def with_exif(jpeg: bytes, block: bytes) -> bytes:
    """The JPEG with an APP1 segment right after SOI."""
    return jpeg[:2] + b"\xff\xe1" + struct.pack(">H", len(block) + 8) + b"Exif\0\0" + block + jpeg[2:]


def webp_with_exif(webp: bytes, block: bytes, width: int, height: int) -> bytes:
    """A simple WebP file made an extended one with an EXIF chunk."""
    extended = struct.pack("<4sIBxxx", b"VP8X", 10, 8) + (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    body = b"WEBP" + extended + webp[12:] + struct.pack("<4sI", b"EXIF", len(block)) + block + b"\0" * (len(block) & 1)
    return b"RIFF" + struct.pack("<I", len(body)) + body


def tiff_of(
    values: NDArray[Any],
    *,
    order: Literal["<", ">"] = "<",
    photometric: int | None = None,
    sample_format: int = 1,
    tags: dict[int, int] | None = None,
) -> bytes:
    """An uncompressed TIFF of values [H, W] or [H, W, C] (C planes when `tags` says 284: 2), any integer or float dtype."""
    tags = tags or {}
    height, width = values.shape[:2]
    count = values.shape[2] if values.ndim == 3 else 1
    bits = values.dtype.itemsize * 8
    planes = np.moveaxis(values, 2, 0) if tags.get(284) == 2 else values[None]
    pixels = np.ascontiguousarray(planes).astype(values.dtype.newbyteorder(order)).tobytes()
    many = len(planes)
    extra_at = 8 + len(pixels)  # arrays that do not fit in an entry: bits per sample, strip offsets, strip sizes
    arrays = struct.pack(order + f"{count}H", *[bits] * count)
    strips_at = extra_at + len(arrays)
    size = len(pixels) // many
    if many > 1:
        arrays += struct.pack(order + f"{2 * many}I", *(8 + i * size for i in range(many)), *[size] * many)
    entries: dict[int, tuple[int, int, int]] = {
        256: (4, 1, width),
        257: (4, 1, height),
        258: (3, count, bits if count == 1 else extra_at),
        259: (3, 1, 1),
        262: (3, 1, photometric if photometric is not None else (2 if count >= 3 else 1)),
        273: (4, many, 8 if many == 1 else strips_at),
        277: (3, 1, count),
        278: (4, 1, height),
        279: (4, many, size if many == 1 else strips_at + 4 * many),
        284: (3, 1, 1),
    }
    if sample_format != 1 and count == 1:
        entries[339] = (3, 1, sample_format)
    if count == 4 and entries[262][2] == 2:
        entries[338] = (3, 1, 2)
    entries |= {tag: (3, 1, value) for tag, value in tags.items()}
    directory = struct.pack(order + "H", len(entries))
    for tag in sorted(entries):
        kind, number, value = entries[tag]
        short = kind == 3 and number == 1
        directory += struct.pack(order + "HHI", tag, kind, number) + struct.pack(
            order + ("HH" if short else "I"), *((value, 0) if short else (value,))
        )
    start = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(order + "I", extra_at + len(arrays))
    return start + pixels + arrays + directory + struct.pack(order + "I", 0)
