"""JPEG structure: the header, and the grid of restart markers that makes a JPEG decodable in pieces.

A restart marker (``FF D0`` to ``FF D7``, ITU T.81 F.1.1.5.2) resets the DC predictors and aligns to a byte, so the data between two
of them decodes on its own. Where the restart interval of a baseline JPEG divides the MCUs of a row, the picture is a grid of
independent cells, each `restart_interval` MCUs wide and one MCU high.

Nothing here decodes pixels, and nothing trusts the bytes.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

SOI, EOI, SOS, DRI, APP1, APP14 = 0xD8, 0xD9, 0xDA, 0xDD, 0xE1, 0xEE
SOF0, SOF2 = 0xC0, 0xC2
# Every frame header but DHT (C4), JPG (C8) and DAC (CC), which share the range.
_FRAME_MARKERS = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_STANDALONE = frozenset((0x01, *range(0xD0, 0xD8)))
# DHT, DQT, COM and the segments of applications: most of what there is, and nothing in them matters here.
_SKIPPED = frozenset((0xC4, 0xDB, 0xFE, *range(0xE0, 0xF0))) - {APP1, APP14}
# A header of more segments than this is an attack on our time, not a picture: ICC profiles take at most 255, and extended XMP
# reaches this number at 256 MB.
MAX_SEGMENTS = 4096

# libjpeg's sampling factors of the first component (the other two are 1x1).
LUMA_SAMPLING = {"444": (1, 1), "422": (2, 1), "420": (2, 2), "440": (1, 2), "411": (4, 1)}
_SEGMENT = struct.Struct(">BBH").unpack_from
_SOF = struct.Struct(">HBHHB").unpack_from
_U16 = struct.Struct(">H").unpack_from
_INTERVALS = (4, 5, 3, 6, 7, 8, 2)
_INTERVALS_8 = (8, 9, 10, 7, 6, 12, 5, 4, 3, 2)


class JpegError(ValueError):
    """The bytes are no JPEG, or its header is broken or incomplete. The message says what is wrong and at which byte."""


class Component(NamedTuple):
    """One colour component of the frame: its id and its sampling factors (1 to 4)."""

    id: int
    horizontal: int
    vertical: int


@dataclass(slots=True)  # not frozen: that alone would double the time of `parse_header`
class JpegHeader:
    """What stands before the first entropy-coded byte. Offsets are bytes from the start of the data, 0-based.

    `width`, `height`: stored pixels. `precision`: bits per sample. `sof`: the frame marker's second byte (0xC0 baseline, 0xC2
    progressive). `restart_interval`: MCUs, 0 for none. `sof_offset`: the first byte of the frame marker. `scan_offset`: the first
    entropy-coded byte. `scan_components`: number of components in the first scan. `exif_offset`: the EXIF block's TIFF header, 0 for
    none. `adobe_transform`: 0 RGB or CMYK, 1 YCbCr, 2 YCCK, -1 without the Adobe segment.
    """

    width: int
    height: int
    precision: int
    sof: int
    components: tuple[Component, ...]
    restart_interval: int
    sof_offset: int
    scan_offset: int
    scan_components: int
    exif_offset: int
    adobe_transform: int

    @property
    def progressive(self) -> bool:
        return self.sof == SOF2

    @property
    def mcu_size(self) -> tuple[int, int]:
        """(width, height) of an MCU in pixels, for a scan of all components. A single component is never interleaved: 8x8."""
        return _mcu_size(self.components)

    @property
    def mcus(self) -> tuple[int, int]:
        """(MCUs in a row, MCU rows)."""
        w, h = self.mcu_size
        return -(-self.width // w), -(-self.height // h)

    @property
    def grid(self) -> tuple[int, int]:
        """(rows, columns) of the cells that decode on their own; (0, 0) where the header promises none.

        It does for a baseline picture (SOF0, 8 bits) with all components in one scan and a restart interval that divides the MCUs of
        a row.
        """
        interval = self.restart_interval
        if not (interval and self.sof == SOF0 and self.precision == 8 and self.scan_components == len(self.components)):
            return 0, 0
        per_row, rows = self.mcus
        return (0, 0) if per_row % interval else (rows, per_row // interval)


def parse_header(data: bytes | bytearray | memoryview) -> JpegHeader:
    """Read the segments up to the first scan. Takes a few microseconds; reads no pixel data.

    Raises:
        JpegError: no JPEG, cut short, or not to be understood.
    """
    size = len(data)
    if size < 4 or data[0] != 0xFF or data[1] != SOI:
        raise JpegError("does not start with the JPEG marker FF D8")
    sof = sof_offset = interval = exif_offset = 0
    adobe = -1
    pos = 2
    for _ in range(MAX_SEGMENTS):
        if pos + 4 > size:
            raise JpegError(f"is cut short: the header ends at byte {size}")
        ff, marker, length = _SEGMENT(data, pos)
        end = pos + 2 + length
        if ff == 0xFF and marker in _SKIPPED and length >= 2 and end <= size:
            pos = end
            continue
        if ff != 0xFF:
            raise JpegError(f"has {ff:02X} at byte {pos}, where a marker was expected")
        if marker == 0xFF:  # a fill byte
            pos = _after_fill(data, pos)
            continue
        if marker in _STANDALONE:
            pos += 2
            continue
        if marker in (SOI, EOI):
            raise JpegError(f"ends with marker FF {marker:02X} at byte {pos}, before any scan")
        if end > size or length < 2:
            raise JpegError(f"is cut short: segment FF {marker:02X} at byte {pos} ends at byte {end} of {size}")
        if marker == APP1:
            if not exif_offset and length >= 16 and data[pos + 4 : pos + 10] == b"Exif\0\0":
                exif_offset = pos + 10
        elif marker in _FRAME_MARKERS:
            if sof:
                raise JpegError(f"has a second frame header at byte {pos}")
            sof, sof_offset = marker, pos
        elif marker == DRI and length >= 4:
            (interval,) = _U16(data, pos + 4)
        elif marker == APP14 and length >= 14 and data[pos + 4 : pos + 9] == b"Adobe":
            adobe = data[pos + 15]
        elif marker == SOS:
            if not sof:
                raise JpegError(f"has a scan at byte {pos} before its frame header")
            width, height, precision, components = _frame(data, sof_offset)
            in_scan = data[pos + 4] if length > 2 else 0
            return JpegHeader(width, height, precision, sof, components, interval, sof_offset, end, in_scan, exif_offset, adobe)
        pos = end
    raise JpegError(f"has more than {MAX_SEGMENTS} segments before its first scan")


def _after_fill(data: bytes | bytearray | memoryview, pos: int) -> int:
    """The position of the last FF of a run that begins at `pos`."""
    run = bytes(data[pos : pos + 65536])
    return pos + max(1, len(run) - len(run.lstrip(b"\xff")) - 1)


def _frame(data: bytes | bytearray | memoryview, pos: int) -> tuple[int, int, int, tuple[Component, ...]]:
    """Width, height, precision and components of the frame header at `pos`, whose segment is known to lie inside the data."""
    length, precision, height, width, count = _SOF(data, pos + 2) if _U16(data, pos + 2)[0] >= 8 else (0, 0, 0, 0, 0)
    if length < 8 + 3 * count:
        raise JpegError(f"has an incomplete frame header at byte {pos}")
    if not (width and height and count):
        raise JpegError(f"says {width}x{height} pixels in {count} components")
    components = _components(bytes(data[pos + 10 : pos + 10 + 3 * count]))
    for _, horizontal, vertical in components:
        if not (1 <= horizontal <= 4 and 1 <= vertical <= 4):
            raise JpegError(f"has sampling factors {horizontal}x{vertical}, which are 1 to 4, in the frame header at byte {pos}")
    return width, height, precision, components


@lru_cache(64)
def _components(data: bytes) -> tuple[Component, ...]:
    """Of three bytes each."""
    return tuple(Component(number, factors >> 4, factors & 15) for number, factors in zip(data[::3], data[1::3], strict=True))


@lru_cache(64)
def _mcu_size(components: tuple[Component, ...]) -> tuple[int, int]:
    if len(components) == 1:
        return 8, 8
    return 8 * max(c.horizontal for c in components), 8 * max(c.vertical for c in components)


def restart_interval(width: int, subsampling: str) -> int:
    """Restart interval, in MCUs, for a picture `width` pixels wide that we encode with `subsampling` ("420", "444", ...)."""
    mcu_width = 8 * LUMA_SAMPLING[subsampling][0]
    return interval_of_row(-(-width // mcu_width), mcu_width)


def interval_of_row(mcus: int, mcu_width: int) -> int:
    """Restart interval, in MCUs, for a picture with so many MCUs, each so many pixels wide, in a row.

    The first of 4, 5, 3, 6, 7, 8, 2 that divides them, else the whole row; for MCUs 8 pixels wide, of 8, 9, 10, 7, 6, 12, 5, 4, 3, 2.
    Cells about 64 pixels wide cost 1.2 % of the bytes (4:2:0; quality 90) and let a crop skip most of what lies beside it.
    """
    return next((n for n in (_INTERVALS_8 if mcu_width == 8 else _INTERVALS) if mcus % n == 0), mcus)


_NO_GRID: NDArray[np.uint32] = np.zeros(0, np.uint32)
_NO_GRID.flags.writeable = False


def restart_offsets(data: bytes | memoryview) -> NDArray[np.uint32]:
    """Where the cells of a JPEG's restart grid lie: uint32 [cells + 1], byte offsets within `data`, 0-based.

    The first entropy-coded byte, then the byte after each RSTn marker in order, then the first byte (FF) of the EOI marker. Cell i
    (row-major; `interval` MCUs wide, one MCU high) begins at offset i; it ends where the next begins, less the two bytes of the
    marker between them, and the last one at the EOI. Fill bytes FF before a marker belong to the cell before it.

    Empty for any data without a usable grid: no JPEG or a broken one, not baseline (SOF0, 8 bits), more than one scan, no restart
    interval, one that does not divide the MCUs of a row, or markers missing, surplus or out of order. Never raises, whatever the
    bytes. The result may be read-only.
    """
    try:
        header = parse_header(data)
    except JpegError:
        return _NO_GRID
    rows, columns = header.grid
    if not rows or len(data) > np.iinfo(np.uint32).max:
        return _NO_GRID
    cells = rows * columns
    scan = np.frombuffer(data, np.uint8)[header.scan_offset :]
    # In entropy-coded data FF 00 is a stuffed FF and FF FF is fill: everything else after FF is a marker.
    at = np.flatnonzero(scan[:-1] == 0xFF)
    second = scan[at + 1]
    is_marker = (second != 0) & (second != 0xFF)
    at, second = at[is_marker][:cells], second[is_marker][:cells]
    if len(at) < cells or second[-1] != EOI or not np.array_equal(second[:-1], 0xD0 + (np.arange(cells - 1) & 7)):
        return _NO_GRID
    offsets = np.empty(cells + 1, np.uint32)
    offsets[0] = header.scan_offset
    offsets[1:-1] = at[:-1] + (header.scan_offset + 2)
    offsets[-1] = at[-1] + header.scan_offset
    return offsets
