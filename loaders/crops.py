"""Decoding a region of a JPEG: no more rows than it needs, at no more pixels than it needs.

Where the picture is a grid of cells, `loaders.cells` leaves out the rest before anything is decoded. Without a grid the rows below a
region can still be left out: see `decode_region`.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from typing import cast

import numpy as np
import simplejpeg  # type: ignore[import-untyped]  # it ships a stub, but no py.typed
from numpy.typing import NDArray

from loaders.codecs import DecodeError
from loaders.jpeg import SOF0, JpegHeader
from loaders.regions import Region, Size

Blank = Callable[[tuple[int, int, int]], NDArray[np.uint8]]
"""Gives memory for an image of a shape: uint8, C-contiguous, any content."""

_ROWS_PAY = 8192
"""Pixels below a region without a grid from which on they are left out: about 30 us to decode, and at most as much to copy the file first
(117 kB; a small one breaks even at 1000 pixels)."""
_SCALES = (8, 4, 2)
_MIN_SCALED_SIDE = 8
"""Below it two of libjpeg's scaling factors give the same number of pixels, and `simplejpeg` would take the smaller one."""


def dct_scale(header: JpegHeader, height: int, width: int, size: Size | None) -> int:
    """The largest of 8, 4, 2, 1 by which a region of `height` x `width` pixels may be divided and still be at least `size` (h, w).

    1 for `size` None, and for sampling factors other than 4:2:0, 4:4:4 and gray: there the chroma of a scaled decode differs from a scaled
    chroma.
    """
    if size is None or min(size) < _MIN_SCALED_SIDE or height < 2 * size[0] or width < 2 * size[1]:
        return 1
    first, *others = ((c.horizontal, c.vertical) for c in header.components)
    if others and (len(others) != 2 or first not in ((1, 1), (2, 2)) or others != [(1, 1), (1, 1)]):
        return 1
    return next(s for s in (*_SCALES, 1) if height >= s * size[0] and width >= s * size[1])


def scaled_cut(region: Region, scale: int) -> tuple[slice, slice]:
    """The rows and columns of a picture at 1/`scale` that hold a region of it."""
    y, x, h, w = region
    return slice(y // scale, -(-(y + h) // scale)), slice(x // scale, -(-(x + w) // scale))


_ROWS_LEFT_OVER = re.compile(r"Corrupt JPEG data: \d+ extraneous bytes before marker 0xd9")


def decode_region(data: bytes | memoryview, header: JpegHeader, region: Region, scale: int, blank: Blank) -> NDArray[np.uint8]:
    """A region, uint8 [h, w, 3] RGB at 1/`scale`, of a JPEG without a grid: a view of what `blank` gave. Equals cutting the full decode.

    Of a baseline JPEG the rows of MCUs below the region are not decoded: damage there is not seen, but that the end is missing is.

    Raises:
        DecodeError: it cannot be decoded.
    """
    image = _rows_above(data, header, region[0] + region[2], scale, blank)
    if image is None:
        image = decode_scaled(data, header.height, header.width, scale, blank)
    return image[scaled_cut(region, scale)]


def _rows_above(data: bytes | memoryview, header: JpegHeader, bottom: int, scale: int, blank: Blank) -> NDArray[np.uint8] | None:
    """A picture down to row `bottom` at least; None where that saves nothing, or the decoder finds fault with anything."""
    mcu_height = 8 * max(c.vertical for c in header.components)
    # Chroma upsampling looks one pixel further; a scaled decode of what `dct_scale` allows has none.
    height = -(-(bottom + (scale == 1)) // mcu_height) * mcu_height
    # With restart markers the decoder may have resynchronised before it says what is accepted below.
    one_scan = header.sof == SOF0 and header.scan_components == len(header.components) and not header.restart_interval
    if not one_scan or (header.height - height) * header.width < _ROWS_PAY:
        return None
    shorter = bytearray(data)
    struct.pack_into(">H", shorter, header.sof_offset + 5, height)
    image = blank((-(-height // scale), -(-header.width // scale), 3))
    try:
        decode_scaled(shorter, height, header.width, scale, lambda _: image)
    except DecodeError as e:
        # The rows are complete: libjpeg tells its first warning only, and gives this one where it looks for the end after the last row.
        return image if _ROWS_LEFT_OVER.search(str(e)) else None
    return image


def decode_scaled(data: bytes | bytearray | memoryview, height: int, width: int, scale: int, blank: Blank) -> NDArray[np.uint8]:
    """Decode a JPEG of `height` x `width` pixels at 1/`scale`, strictly, into memory that `blank` gives.

    Raises:
        DecodeError: it cannot be decoded, or has another size.
    """
    shape = (-(-height // scale), -(-width // scale), 3)
    try:
        # simplejpeg looks at the buffer's length only, and refuses one that is too small.
        least = shape[:2] if scale > 1 else (0, 0)
        image = simplejpeg.decode_jpeg(data, "RGB", min_height=least[0], min_width=least[1], buffer=blank(shape))
    except MemoryError:  # a fault of the machine, not of the data
        raise
    except Exception as e:  # decoders raise whatever they like; all of it is about these bytes
        raise DecodeError(f"jpg of {len(data)} bytes: {e or type(e).__name__}") from None
    if image.shape != shape:
        raise DecodeError(f"jpg of {len(data)} bytes: is decoded to (height, width, channels) {image.shape}, expected {shape}")
    return cast("NDArray[np.uint8]", image)
