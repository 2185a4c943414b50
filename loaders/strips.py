"""Many small JPEGs of one size, decoded by one call.

To decode a picture of 32x32 takes 10 us, and the call gives the GIL away twice: threads that do little else wait for each other longer
than they decode. No decoder within reach takes several pictures a call; but a TIFF holds a picture as strips, each of which may be a JPEG
of its own (compression 7: TIFF Technical Note 2, draft of 17 March 1995). So N pictures of H x W are the N strips of a picture of N*H x W:
libtiff, inside OpenCV, lets libjpeg decode one after the other, each from its own header on, and the pixels are those of N calls. Strips
may lie anywhere in the file.

libtiff says nothing of corrupt data: only bytes that are known to be those that were packed may come here.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import cache

import cv2
import numpy as np
from numpy.typing import NDArray

from loaders.codecs import READ_FLAGS, decode_image, encode_image
from loaders.jpeg import SOF0, JpegError, parse_header

MAX_PIXELS = 48 * 48
"""Of a larger picture libtiff's own work, a third of the time at 32x32 and more than half at 64x64, is more than what one call saves."""
LEAST_TOGETHER = 8
"""Fewer pictures than this are faster by a call each."""
_JFIF = b"\xff\xd8\xff\xe0\x00\x10JFIF\x00"
"""Three components of a JPEG that begins so are YCbCr to libjpeg, as they are to a TIFF that says so."""
_FRAME_BYTES = 19
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
        The rows that were filled: of those pictures that are baseline JFIF in colour, of the size of a row, and have the subsampling of the
        first of these; none where one of them cannot be decoded. The content of other rows is undefined.
    """
    height, width = out.shape[1:3]
    for number, (_, start, size) in enumerate(pictures):
        frame, offset, sampling = _frame(data[start : start + size], height, width)
        if frame:
            alike = [p for p in pictures[number:] if _is_alike(data, p, frame, offset)]
            return _decode(data, alike, sampling, out)
    return set()


def _frame(data: memoryview, height: int, width: int) -> tuple[bytes, int, int]:
    """The frame header, where it begins, and the value of the subsampling's tag; an empty header where the picture does not fit."""
    try:
        header = parse_header(data)
    except JpegError:
        return b"", 0, 0
    found = (header.sof, header.precision, len(header.components), header.height, header.width)
    if data[: len(_JFIF)] != _JFIF or found != (SOF0, 8, 3, height, width):
        return b"", 0, 0
    luma = header.components[0]
    frame = bytes(data[header.sof_offset : header.sof_offset + _FRAME_BYTES])
    return frame, header.sof_offset, luma.horizontal | luma.vertical << 16


def _is_alike(data: memoryview, picture: tuple[int, int, int], frame: bytes, offset: int) -> bool:
    _, start, size = picture
    place = start + offset
    return size > offset + _FRAME_BYTES and data[start : start + len(_JFIF)] == _JFIF and data[place : place + _FRAME_BYTES] == frame


def _decode(data: memoryview, pictures: Sequence[tuple[int, int, int]], sampling: int, out: NDArray[np.uint8]) -> set[int]:
    count, (height, width) = len(pictures), out.shape[1:3]
    rows, starts, sizes = zip(*pictures, strict=True)
    # A single value stands in the tag itself.
    places = (_FIXED, _FIXED + 4 * count) if count > 1 else (starts[0], sizes[0])
    tags = (
        (256, _LONG, 1, width),
        (257, _LONG, 1, count * height),
        (258, _SHORT, 3, _FIXED - 8),  # bits per sample
        (259, _SHORT, 1, 7),  # compression
        (262, _SHORT, 1, 6),  # YCbCr
        (273, _LONG, count, places[0]),  # the first byte of each strip
        (277, _SHORT, 1, 3),  # samples per pixel
        (278, _LONG, 1, height),  # rows of a strip
        (279, _LONG, count, places[1]),  # bytes of each strip
        (284, _SHORT, 1, 1),  # the samples of a pixel follow each other
        (530, _SHORT, 2, sampling),
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
    """Whether this OpenCV does what `decode_strips` needs: tried once, with two small pictures."""
    pixels = (np.arange(2 * 16 * 24 * 3) ** 2 % 251).astype(np.uint8).reshape(2, 16, 24, 3)
    first, second = (encode_image(picture, "jpg") for picture in pixels)
    start = head_bytes(2)
    data = bytearray(start) + first + second
    out = np.zeros_like(pixels)
    done = decode_strips(memoryview(data), [(0, start, len(first)), (1, start + len(first), len(second))], out)
    return done == {0, 1} and np.array_equal(out, [decode_image(first, "jpg"), decode_image(second, "jpg")])
