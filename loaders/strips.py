"""Many small JPEGs of one size, decoded by one call.

To decode a picture of 32x32 takes 10 us, and the call gives the GIL away twice: threads that do little else wait for each other longer
than they decode. No decoder within reach takes several pictures a call; but a TIFF holds a picture as strips, each of which may be a JPEG
of its own (compression 7: TIFF Technical Note 2, draft of 17 March 1995). So N pictures of H x W are the N strips of a picture of N*H x W:
libtiff, inside OpenCV, lets libjpeg decode one after the other, and the pixels are those of N calls. Strips may lie anywhere in the file.

What is different from N calls, and is kept away from here: tables that a JPEG does not define are those of the JPEG before it, and nothing
is said of corrupt data. So headers are looked at, and only bytes may come that are known to be those that were found sound when packed.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import cache

import cv2
import numpy as np
from numpy.typing import NDArray

from loaders.codecs import READ_FLAGS, decode_image, encode_image
from loaders.jpeg import DRI, EOI, SOF0, SOS

MAX_PIXELS = 48 * 48
"""Of a larger picture libtiff's own work, a third of the time at 32x32 and more than half at 64x64, is more than what one call saves."""
LEAST_TOGETHER = 8
"""Fewer pictures than this are faster by a call each."""
_JFIF = b"\xff\xd8\xff\xe0\x00\x10JFIF\x00"
"""Three components of a JPEG that begins so are YCbCr to libjpeg, as they are to a TIFF that says so."""
_JFIF_END = 20
_SEGMENT = struct.Struct(">BBH").unpack_from
_DHT, _DQT, _COM = 0xC4, 0xDB, 0xFE
_LUMA_FACTORS = frozenset((0x11, 0x21, 0x22, 0x12, 0x41, 0x14))
_CHROMA_FACTORS = 0x11
_HEADER = struct.Struct("<2sHI")
_TAG = struct.Struct("<HHII")
_NUM_TAGS = 11
_SHORT, _LONG = 3, 4
_FIXED = _HEADER.size + 2 + _NUM_TAGS * _TAG.size + 4 + 8


def head_bytes(count: int) -> int:
    """Room that `decode_strips` needs before `count` pictures."""
    return _FIXED + 8 * count


def decode_strips(data: memoryview, pictures: Sequence[tuple[int, int, int]], out: NDArray[np.uint8]) -> set[int]:
    """Decode JPEGs into rows of `out`, uint8 [B, H, W, 3] RGB.

    Args:
        data: writable; `head_bytes` of any content, then the pictures, with anything between them.
        pictures: (row, first byte, bytes) of each.

    Returns:
        The rows that were filled: of those pictures that are baseline JFIF in colour, of the size of a row, that define their own tables,
        and have the subsampling of the first of these. None, where these are fewer than `LEAST_TOGETHER`, or libtiff refuses one. The
        content of rows of other `pictures` is undefined.
    """
    height, width = out.shape[1:3]
    alike: list[tuple[int, int, int]] = []
    factors, head = 0, b""
    for picture in pictures:
        _, start, size = picture
        part = data[start : start + size]
        if not head or part[: len(head)] != head:  # pictures by one program often have one and the same header
            found, end = _look(part, height, width)
            if not found or found != (factors or found):
                continue
            factors, head = found, bytes(part[:end])
        if part[-2:] == bytes((0xFF, EOI)):
            alike.append(picture)
    return _decode(data, alike, factors, out) if len(alike) >= LEAST_TOGETHER else set()


def _look(data: memoryview, height: int, width: int) -> tuple[int, int]:
    """The sampling factors of luma (4 bits each, horizontal first) and the bytes before the first entropy-coded one; (0, 0) where a JPEG
    does not fit. Knows only what encoders write: anything else does not fit."""
    if data[: len(_JFIF)] != _JFIF:
        return 0, 0
    pos, frame, tables = _JFIF_END, b"", set[int]()
    while pos + 4 <= len(data):
        ff, marker, length = _SEGMENT(data, pos)
        end = pos + 2 + length
        if ff != 0xFF or length < 2 or end > len(data):
            break
        body = bytes(data[pos + 4 : end])
        if marker == SOS:
            return _factors(frame, body, tables, height, width), end
        if marker in (_DQT, _DHT):
            if not _find_tables(marker, body, tables):
                break
        elif marker == SOF0 and not frame:
            frame = body
        elif marker not in (DRI, _COM) and not 0xE0 <= marker <= 0xEF:
            break
        pos = end
    return 0, 0


def _find_tables(marker: int, body: bytes, tables: set[int]) -> bool:
    """Whether a segment holds whole tables and nothing else; they are added: the marker's number * 256 + their own."""
    pos = 0
    while pos < len(body):
        tables.add(marker << 8 | body[pos])
        # 64 divisors of 8 bits, or 16 counts of codes, and as many codes.
        pos += 65 if marker == _DQT else 17 + sum(body[pos + 1 : pos + 17])
    return pos == len(body)


def _factors(frame: bytes, scan: bytes, tables: set[int], height: int, width: int) -> int:
    """The sampling factors of luma; 0 where frame and scan do not fit, or need a table that is not there."""
    if len(frame) != 15 or frame[:6] != struct.pack(">BHHB", 8, height, width, 3):
        return 0
    ids, factors, quantisers = frame[6::3], frame[7::3], frame[8::3]
    if len(scan) != 10 or scan[0] != 3 or scan[1:7:2] != ids or scan[7:] != b"\x00\x3f\x00":
        return 0
    needed = {_DQT << 8 | number for number in quantisers}
    for number in scan[2:7:2]:  # a DC and an AC table
        needed |= {_DHT << 8 | number >> 4, _DHT << 8 | 0x10 | number & 15}
    allowed = factors[0] in _LUMA_FACTORS and factors[1] == factors[2] == _CHROMA_FACTORS
    return factors[0] if allowed and needed <= tables else 0


def _decode(data: memoryview, pictures: Sequence[tuple[int, int, int]], factors: int, out: NDArray[np.uint8]) -> set[int]:
    count, (height, width) = len(pictures), out.shape[1:3]
    rows, starts, sizes = zip(*pictures, strict=True)
    tags = (
        (256, _LONG, 1, width),
        (257, _LONG, 1, count * height),
        (258, _SHORT, 3, _FIXED - 8),  # bits per sample
        (259, _SHORT, 1, 7),  # compression
        (262, _SHORT, 1, 6),  # YCbCr
        (273, _LONG, count, _FIXED),  # the first byte of each strip
        (277, _SHORT, 1, 3),  # samples per pixel
        (278, _LONG, 1, height),  # rows of a strip
        (279, _LONG, count, _FIXED + 4 * count),  # bytes of each strip
        (284, _SHORT, 1, 1),  # the samples of a pixel follow each other
        (530, _SHORT, 2, factors >> 4 | (factors & 15) << 16),  # subsampling
    )
    head = [_HEADER.pack(b"II", 42, _HEADER.size), struct.pack("<H", _NUM_TAGS), *(_TAG.pack(*tag) for tag in tags)]
    data[: head_bytes(count)] = b"".join((*head, struct.pack(f"<I4H{2 * count}I", 0, 8, 8, 8, 0, *starts, *sizes)))
    try:
        image = cv2.imdecode(np.frombuffer(data, np.uint8), READ_FLAGS)
    except cv2.error:
        return set()
    if image is None or image.shape != (count * height, width, 3):
        return set()
    images = image.reshape(count, height, width, 3)
    if rows == tuple(range(rows[0], rows[0] + count)):
        out[rows[0] : rows[0] + count] = images  # a third of the time
    else:
        out[list(rows)] = images
    return set(rows)


@cache
def decodes_strips() -> bool:
    """Whether this OpenCV does what `decode_strips` needs: tried once, with a few small pictures."""
    count = LEAST_TOGETHER
    pixels = (np.arange(count * 16 * 24 * 3) ** 2 % 251).astype(np.uint8).reshape(count, 16, 24, 3)
    encoded = [encode_image(picture, "jpg") for picture in pixels]
    data, pictures = bytearray(head_bytes(count)), []
    for row, part in enumerate(encoded):
        pictures.append((row, len(data), len(part)))
        data += part
    out = np.zeros_like(pixels)
    done = decode_strips(memoryview(data), pictures, out)
    return len(done) == count and np.array_equal(out, [decode_image(part, "jpg") for part in encoded])
