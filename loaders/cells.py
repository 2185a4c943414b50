"""The cells of JPEGs that a region needs: which bytes, put together to a smaller JPEG.

Where `loaders.jpeg.restart_offsets` finds a grid of cells, any rectangle of cells is a JPEG of its own: the header with another height
and width, for each row of cells one contiguous slice of the entropy-coded data, the restart markers numbered anew, EOI. The cells of a
region grown by one pixel (chroma upsampling looks at its neighbour), decoded and cut, equal the same region of the full decode in every
pixel.

Nothing trusts header or offsets: what does not fit is a `JpegError`, and no byte outside the image part is ever asked for.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from loaders.crops import Blank, decode_scaled, scaled_cut
from loaders.jpeg import EOI, JpegError, JpegHeader, parse_header
from loaders.regions import Region

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
_PLAIN_WIDTH = 4
"""libjpeg interpolates no chroma that is only two samples wide: so narrow a rest at the right edge is decoded with the cell before it."""


class Reading(NamedTuple):
    """Where the bytes of an image part come from, when they are not in memory.

    ``read(views, offset, size)`` fills the views, one after the other, with the `size` bytes from `offset` on, or raises.
    ``expect(offset, size)`` tells that these bytes will be read soon.
    """

    read: Callable[[list[memoryview], int, int], None]
    expect: Callable[[int, int], None]


@dataclass(slots=True)  # not frozen: that alone would double the time to make one
class Grid:
    """A JPEG's cells. `head`: the bytes before the first entropy-coded one. `offsets`: see `loaders.jpeg.restart_offsets`. `num_bytes`:
    length of the whole JPEG. `rows`, `columns`: how many cells. `cell_height`, `cell_width`: pixels."""

    head: bytes | bytearray | memoryview
    header: JpegHeader
    offsets: NDArray[np.uint32]
    num_bytes: int
    rows: int
    columns: int
    cell_height: int
    cell_width: int


def open_grid(head: bytes | bytearray | memoryview, offsets: NDArray[np.uint32], num_bytes: int) -> Grid:
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


class SubJpeg:
    """The smaller JPEG that holds a region (which must lie inside the picture) at 1/`scale` (1, 2, 4 or 8) of its size. Where its bytes
    lie, `SubJpegs` works out.

    `num_bytes`: its length. `height`, `width`: pixels at full scale. `y`, `x`: where its region begins in the stored picture: the region's
    corner, or for a scaled one the last multiple of `scale` before it.
    """

    __slots__ = ("_cut", "_slices", "bottom", "grid", "height", "left", "num_bytes", "right", "scale", "top", "width", "x", "y")

    def __init__(self, grid: Grid, region: Region, scale: int = 1) -> None:
        y, x, h, w = region
        header = grid.header
        grow = 1 if scale == 1 else 0
        self.top, self.bottom = max(y - grow, 0) // grid.cell_height, -(-min(y + h + grow, header.height) // grid.cell_height)
        self.left, self.right = max(x - grow, 0) // grid.cell_width, -(-min(x + w + grow, header.width) // grid.cell_width)
        if self.left and header.width - self.left * grid.cell_width <= _PLAIN_WIDTH:
            self.left -= 1
        top_pixel, left_pixel = self.top * grid.cell_height, self.left * grid.cell_width
        self.grid, self.scale = grid, scale
        # At the picture's edges the padding of the last MCUs is none of the picture, here as there.
        self.height = min(self.bottom * grid.cell_height, header.height) - top_pixel
        self.width = min(self.right * grid.cell_width, header.width) - left_pixel
        self.y, self.x = y - y % scale, x - x % scale
        self._cut = scaled_cut((y - top_pixel, x - left_pixel, h, w), scale)
        self.num_bytes = 0
        self._slices: list[tuple[int, int, int]] = []

    def place(self, slices: list[tuple[int, int, int]]) -> None:
        """Say for the bytes of each row of cells, or of several that follow each other, where they start and stop in the part, and where
        they go."""
        self._slices = slices
        start, stop, place = slices[-1]
        self.num_bytes = place + stop - start

    def fill(self, buffer: memoryview, source: memoryview | Reading) -> None:
        """Put header and slices into `buffer`, of `num_bytes`. The restart markers still have their old numbers."""
        if isinstance(source, Reading):
            stretches = list(self.stretches(buffer))
            for _, offset, size in stretches[1:]:  # a disk then makes all reads at once, in a third of the time
                source.expect(offset, size)
            for views, offset, size in stretches:
                source.read(views, offset, size)
        else:
            for start, stop, place in self._slices:
                buffer[place : place + stop - start] = source[start:stop]
        head = self.grid.head
        buffer[: len(head)] = head
        struct.pack_into(">HH", buffer, self.grid.header.sof_offset + 5, self.height, self.width)

    def stretches(self, buffer: memoryview) -> Iterator[tuple[list[memoryview], int, int]]:
        """What to read: views, to be filled one after the other; the offset in the image part where their bytes begin; how many they are.

        `buffer`: writable, of `num_bytes`. Slices at most `MAX_GAP` apart are one stretch; bytes between them go to waste.
        """
        begin = end = self._slices[0][0]
        views: list[memoryview] = []
        for start, stop, place in self._slices:
            if start - end > MAX_GAP:
                yield views, begin, end - begin
                views, begin = [], start
            elif start > end:
                views.append(_JUNK[: start - end])
            views.append(buffer[place : place + stop - start])
            end = stop
        yield views, begin, end - begin

    def decode(self, data: memoryview, blank: Blank) -> NDArray[np.uint8]:
        """The region, uint8 [h, w, 3] RGB, of the assembled JPEG: a view of what `blank` gave.

        Raises:
            DecodeError: it cannot be decoded.
        """
        return decode_scaled(data, self.height, self.width, self.scale, blank)[self._cut]


class SubJpegs:
    """The smaller JPEGs of several regions, worked out and assembled together: what there is to do for each cell is done for all cells at
    once. For the dozens of cells of one region most of the time would go into the calls.

    `parts`: a `SubJpeg` for each (grid, region, scale) asked for. `num_bytes`: of all together.

    Raises:
        JpegError: the offsets of some cells do not rise, or leave their part. Of several, ask each alone to learn which it is.
    """

    def __init__(self, wanted: Sequence[tuple[Grid, Region, int]]) -> None:
        self.parts = [SubJpeg(*each) for each in wanted]
        columns = [
            (
                p.top,
                p.left,
                p.bottom - p.top,
                p.right - p.left,
                p.grid.columns,
                len(p.grid.head),
                p.grid.num_bytes,
                p.bottom == p.grid.rows and p.right == p.grid.columns,
            )
            for p in self.parts
        ]
        top, left, rows, wide, of_row, head, num_bytes, holds_end = np.array(columns, np.int64).T
        # The offsets that each picture needs, one run after the other.
        runs = [p.grid.offsets[p.top * p.grid.columns + p.left : (p.bottom - 1) * p.grid.columns + p.right + 1] for p in self.parts]
        offsets = np.concatenate(runs).astype(np.int64)
        run_sizes = (rows - 1) * of_row + wide + 1
        run_starts = _sums_before(run_sizes)
        rises = offsets[1:] > offsets[:-1]
        rises[run_starts[1:] - 1] = True
        inside = (offsets[run_starts] >= head) & (offsets[run_starts + run_sizes - 1] + 2 * holds_end <= num_bytes)
        if not (rises.all() and inside.all()):
            raise JpegError(f"has {num_bytes[0]} bytes, and the index's offsets of its cells do not rise within them")
        # Rows of cells, each one slice. A cell is taken with the marker after it: RSTn, or the EOI, at which the last offset points.
        picture = np.arange(len(rows)).repeat(rows)
        row = np.arange(len(picture)) - _sums_before(rows)[picture]
        first, wides = run_starts[picture] + row * of_row[picture], wide[picture]
        starts, stops = offsets[first], offsets[first + wides]
        stops[rows.cumsum() - 1] += 2 * holds_end
        lengths = stops - starts
        places = _sums_before(lengths) + head.cumsum()[picture]
        self.num_bytes = int(places[-1] + lengths[-1])
        # Cells: where the marker after each is when all slices are in their places, which number it has, and which it gets.
        num_cells = rows * wide
        cell_row = np.arange(len(wides)).repeat(wides)
        column = np.arange(len(cell_row)) - _sums_before(wides)[cell_row]
        ends = offsets[(first[cell_row] + column) + 1]
        last_cells = num_cells.cumsum() - 1
        ends[last_cells] += 2 * holds_end
        self._markers = ends + (places - starts - 1)[cell_row]
        number = ((top[picture] + row) * of_row[picture] + left[picture])[cell_row] + column
        self._numbers = _restart_markers(number)
        self._numbers[last_cells[holds_end.astype(bool)]] = EOI
        self._new_numbers = _restart_markers(np.arange(len(number)) - _sums_before(num_cells).repeat(num_cells))
        self._new_numbers[last_cells] = EOI
        # Whole rows of cells follow each other in the part: they are one slice.
        apart = np.ones(len(starts) + 1, np.bool_)
        np.not_equal(starts[1:], stops[:-1], out=apart[1:-1])
        first_rows = _sums_before(rows)
        apart[first_rows] = True
        begins = places[first_rows] - head
        slices = np.stack((starts[apart[:-1]], stops[apart[1:]], (places - begins[picture])[apart[:-1]]), axis=1)
        counts = np.add.reduceat(apart[:-1], first_rows, dtype=np.int64)
        self._begins: list[int] = begins.tolist()
        at_hand = iter(map(tuple, slices.tolist()))
        for part, count in zip(self.parts, counts.tolist(), strict=True):
            part.place(list(islice(at_hand, count)))

    def assemble(self, buffer: memoryview, sources: Sequence[memoryview | Reading]) -> list[memoryview]:
        """Make the JPEGs in `buffer` (writable, of `num_bytes`) and give their places there. `sources`: the image part of each.

        Raises:
            JpegError: where the offsets say that a cell ends, there is no marker, or another one.
        """
        made = [buffer[begin : begin + part.num_bytes] for begin, part in zip(self._begins, self.parts, strict=True)]
        for part, place, source in zip(self.parts, made, sources, strict=True):
            part.fill(place, source)
        data = np.frombuffer(buffer, np.uint8)
        if not ((data[self._markers - 1] == 0xFF) & (data[self._markers] == self._numbers)).all():
            raise JpegError("has other bytes than restart markers where the index says that cells end")
        data[self._markers] = self._new_numbers
        return made


def _sums_before(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """The sum of all earlier ones, for each."""
    return sizes.cumsum() - sizes


def _restart_markers(numbers: NDArray[np.int64]) -> NDArray[np.uint8]:
    """The second bytes of the restart markers after cells with these numbers."""
    return ((numbers & 7) | 0xD0).astype(np.uint8)
