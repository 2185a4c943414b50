"""The part of a JPEG that a region needs: which bytes, put together to a smaller JPEG, decoded and cut.

Where `loaders.jpeg.restart_offsets` finds a grid of cells, any rectangle of cells is a JPEG of its own: the header with another height
and width, for each row of cells one contiguous slice of the entropy-coded data, the restart markers numbered anew, EOI. The cells of a
region grown by one pixel (chroma upsampling looks at its neighbour), decoded and cut, equal the same region of the full decode in every
pixel.

Without a grid the rows below a region can still be left out: see `decode_region`.

Nothing trusts header or offsets: what does not fit is a `JpegError`, and no byte outside the image part is ever asked for.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import cast

import numpy as np
import simplejpeg  # type: ignore[import-untyped]  # it ships a stub, but no py.typed
from numpy.typing import NDArray

from loaders.codecs import DecodeError
from loaders.jpeg import EOI, SOF0, JpegError, JpegHeader, parse_header
from loaders.regions import Region, Size

Blank = Callable[[tuple[int, int, int]], NDArray[np.uint8]]
"""Gives memory for an image of a shape: uint8, C-contiguous, any content."""
Read = Callable[[list[memoryview], int, int], None]
"""``read(views, offset, size)`` fills the views, one after the other, with the `size` bytes of the image part from `offset` on; raises
where it cannot."""
Expect = Callable[[int, int], None]
"""``expect(offset, size)`` tells that these bytes of the image part will be read soon."""

MAX_GAP = 4096
"""Bytes between two needed slices that are rather read along than skipped. Measured: processor time to read and assemble, in us.

| a region of | MAX_GAP | 0 | 1 KiB | 4 KiB | 16 KiB | 64 KiB |
|---|---|---|---|---|---|---|
| 64 kB (rows of cells: 2 kB), `RandomResizedCrop` | page cache | 227 | 147 | 108 | 107 | 116 |
| | disk (POSIX_FADV_DONTNEED) | 484 | 431 | 386 | 344 | 403 |
| 4.3 MB (rows of cells: 24 kB), 640 x 640 | page cache | 440 | 424 | 412 | 421 | 179 |
| | disk | 948 | 994 | 996 | 1051 | 946 |

The one figure in favour of 64 KiB buys a tenth of that crop's time, decoding included, with five times the bytes: 20 % of the picture. From
a disk, where the reads overlap, it buys nothing.
"""
_JUNK = memoryview(bytearray(MAX_GAP))
"""Where bytes between slices go. Written by all threads, read by none."""
_ROWS_PAY = 8192
"""Pixels below a region without a grid from which on they are left out: about 30 us to decode, and at most as much to copy the file first
(117 kB; a small one breaks even at 1000 pixels)."""
_PLAIN_WIDTH = 4
"""libjpeg interpolates no chroma that is only two samples wide: so narrow a rest at the right edge is decoded with the cell before it."""
_SCALES = (8, 4, 2)
_MIN_SCALED_SIDE = 8
"""Below it two of libjpeg's scaling factors give the same number of pixels, and `simplejpeg` would take the smaller one."""


@dataclass(slots=True)  # not frozen: that alone would double the time to make one
class Grid:
    """A JPEG's cells. `head`: the bytes before the first entropy-coded one. `offsets`: see `loaders.jpeg.restart_offsets`. `num_bytes`:
    length of the whole JPEG. `rows`, `columns`: how many cells. `cell_height`, `cell_width`: pixels."""

    head: bytes | memoryview
    header: JpegHeader
    offsets: NDArray[np.uint32]
    num_bytes: int
    rows: int
    columns: int
    cell_height: int
    cell_width: int


def open_grid(head: bytes | memoryview, offsets: NDArray[np.uint32], num_bytes: int) -> Grid:
    """Read the header `head` and compare the number of cells with its size. Costs a few microseconds for any number of cells.

    Raises:
        JpegError: no JPEG header, none with a grid, or the offsets are not as many as there are cells.
    """
    header = parse_header(head)
    rows, columns = header.grid
    if not rows:
        raise JpegError("has no restart grid, though the index lists its cells")
    if len(offsets) != rows * columns + 1:
        raise JpegError(f"has {rows}x{columns} cells, for which the index has {rows * columns + 1} offsets, found {len(offsets)}")
    if not header.scan_offset == len(head) == int(offsets[0]):
        raise JpegError(f"has its first entropy-coded byte at {header.scan_offset}, the index says {int(offsets[0])}")
    mcu_width, mcu_height = header.mcu_size
    return Grid(head, header, offsets, num_bytes, rows, columns, mcu_height, mcu_width * header.restart_interval)


def dct_scale(header: JpegHeader, height: int, width: int, size: Size) -> int:
    """The largest of 8, 4, 2, 1 by which a region of `height` x `width` pixels may be divided and still be at least `size` (h, w).

    1 for sampling factors other than 4:2:0, 4:4:4 and gray: there the chroma of a scaled decode differs from a scaled chroma.
    """
    if min(size) < _MIN_SCALED_SIDE or height < 2 * size[0] or width < 2 * size[1]:
        return 1
    first, *others = ((c.horizontal, c.vertical) for c in header.components)
    if others and (len(others) != 2 or first not in ((1, 1), (2, 2)) or others != [(1, 1), (1, 1)]):
        return 1
    return next(s for s in (*_SCALES, 1) if height >= s * size[0] and width >= s * size[1])


_MARKERS = np.tile(np.arange(0xD0, 0xD8, dtype=np.uint8), 1 << 12)


def _markers_from(cell: int, count: int) -> NDArray[np.uint8]:
    """The second bytes of the restart markers after `count` cells, of which the first has the number `cell`."""
    first = cell & 7
    if first + count <= len(_MARKERS):
        return _MARKERS[first : first + count]
    return ((np.arange(first, first + count) & 7) | 0xD0).astype(np.uint8)


def scaled_cut(region: Region, scale: int) -> tuple[slice, slice]:
    """The rows and columns of a picture at 1/`scale` that hold a region of it."""
    y, x, h, w = region
    return slice(y // scale, -(-(y + h) // scale)), slice(x // scale, -(-(x + w) // scale))


class SubJpeg:
    """The smaller JPEG that holds a region at 1/`scale` (1, 2, 4 or 8) of its size.

    `region` must lie inside the picture. `num_bytes`: its length. `height`, `width`: pixels at full scale. `y`, `x`: where its region
    begins in the stored picture: the region's corner, or for a scaled one the last multiple of `scale` before it.

    Raises:
        JpegError: the offsets of the cells do not rise, or leave the part.
    """

    __slots__ = ("_cut", "_grid", "_markers", "_numbers", "_places", "_starts", "_stops", "height", "num_bytes", "scale", "width", "x", "y")

    def __init__(self, grid: Grid, region: Region, scale: int = 1) -> None:
        y, x, h, w = region
        header = grid.header
        grow = 1 if scale == 1 else 0
        top, bottom = max(y - grow, 0) // grid.cell_height, -(-min(y + h + grow, header.height) // grid.cell_height)
        left, right = max(x - grow, 0) // grid.cell_width, -(-min(x + w + grow, header.width) // grid.cell_width)
        if left and header.width - left * grid.cell_width <= _PLAIN_WIDTH:
            left -= 1
        top_pixel, left_pixel = top * grid.cell_height, left * grid.cell_width
        self._grid, self.scale = grid, scale
        # At the picture's edges the padding of the last MCUs is none of the picture, here as there.
        self.height = min(bottom * grid.cell_height, header.height) - top_pixel
        self.width = min(right * grid.cell_width, header.width) - left_pixel
        self.y, self.x = y - y % scale, x - x % scale
        self._cut = scaled_cut((y - top_pixel, x - left_pixel, h, w), scale)
        self._lay_out(top, bottom, left, right)

    def _lay_out(self, top: int, bottom: int, left: int, right: int) -> None:
        """Where each row's slice is read, where it goes, and where its markers then are."""
        grid, columns = self._grid, self._grid.columns
        run = grid.offsets[top * columns + left : (bottom - 1) * columns + right + 1]
        holds_end = bottom == grid.rows and right == columns
        inside = run[0] >= len(grid.head) and int(run[-1]) + (2 if holds_end else 0) <= grid.num_bytes
        if not inside or not (run[1:] > run[:-1]).all():
            raise JpegError(f"has {grid.num_bytes} bytes, and the index's offsets of its cells do not rise within them")
        shape = (grid.rows, columns)
        self._starts = grid.offsets[:-1].reshape(shape)[top:bottom, left].astype(np.int64)
        # A cell is taken with the marker after it: RSTn, or the EOI, at which the last offset points.
        ends = grid.offsets[1:].reshape(shape)[top:bottom, left:right].astype(np.int64)
        if holds_end:
            ends[-1, -1] += 2
        self._stops = ends[:, -1]
        lengths = self._stops - self._starts
        places = lengths.cumsum()
        self.num_bytes = len(grid.head) + int(places[-1])
        self._places = places - lengths + len(grid.head)
        self._markers = (ends + (self._places - self._starts - 1)[:, None]).ravel()
        self._numbers = _markers_from(top * columns + left, (bottom - top) * columns).reshape(-1, columns)[:, : right - left].flatten()
        if holds_end:
            self._numbers[-1] = EOI

    def stretches(self, buffer: memoryview) -> Iterator[tuple[list[memoryview], int, int]]:
        """What to read: views, to be filled one after the other; the offset in the image part where their bytes begin; how many they are.

        `buffer`: writable, of `num_bytes`. Slices at most `MAX_GAP` apart are one stretch; bytes between them go to waste.
        """
        starts, stops, places = self._starts.tolist(), self._stops.tolist(), self._places.tolist()
        if len(starts) * self._grid.columns == len(self._markers):  # whole rows of cells: their slices follow each other
            yield [buffer[places[0] : self.num_bytes]], starts[0], stops[-1] - starts[0]
            return
        views: list[memoryview] = []
        begin = end = starts[0]
        for start, stop, place in zip(starts, stops, places, strict=True):
            if start - end > MAX_GAP:
                yield views, begin, end - begin
                views, begin = [], start
            elif start > end:
                views.append(_JUNK[: start - end])
            views.append(buffer[place : place + stop - start])
            end = stop
        yield views, begin, end - begin

    def assemble(self, buffer: memoryview, read: Read, expect: Expect | None = None) -> None:
        """Make the JPEG in `buffer` (writable, of `num_bytes`), reading only what it needs.

        `expect` hears of all reads but the first before the first is made: a disk then makes them at once, in a third of the time.

        Raises:
            JpegError: where the offsets say that a cell ends, there is no marker, or another one.
        """
        grid = self._grid
        stretches = list(self.stretches(buffer))
        if expect is not None:
            for _, offset, size in stretches[1:]:
                expect(offset, size)
        for views, offset, size in stretches:
            read(views, offset, size)
        buffer[: len(grid.head)] = grid.head
        struct.pack_into(">HH", buffer, grid.header.sof_offset + 5, self.height, self.width)
        data = np.frombuffer(buffer, np.uint8)
        if not ((data[self._markers - 1] == 0xFF) & (data[self._markers] == self._numbers)).all():
            raise JpegError("has other bytes than restart markers where the index says that cells end")
        data[self._markers] = _markers_from(0, len(self._markers))
        data[self._markers[-1]] = EOI

    def decode(self, data: memoryview, blank: Blank) -> NDArray[np.uint8]:
        """The region, uint8 [h, w, 3] RGB, of the assembled JPEG: a view of what `blank` gave.

        Raises:
            DecodeError: it cannot be decoded.
        """
        return decode_scaled(data, self.height, self.width, self.scale, blank)[self._cut]


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


def reader(data: bytes | memoryview) -> Read:
    """Read from memory."""
    source = memoryview(data)

    def read(views: list[memoryview], offset: int, size: int) -> None:
        del size
        for view in views:
            view[:] = source[offset : offset + len(view)]
            offset += len(view)

    return read
