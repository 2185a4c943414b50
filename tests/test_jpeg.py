from __future__ import annotations

import contextlib
import struct

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from image_data import exif, picture, save, with_exif
from loaders.codecs import encode_image
from loaders.jpeg import MAX_SEGMENTS, JpegError, parse_header, restart_interval, restart_offsets

SIZES = ((64, 64), (375, 500), (1, 1), (17, 331), (8, 16), (40, 208))
SAMPLINGS = ("420", "444", "422", "440")


def test_header_of_a_photo() -> None:
    header = parse_header(with_exif(save(picture(30, 50), "JPEG", subsampling=2), exif(6)))
    assert (header.width, header.height, header.precision, header.sof) == (50, 30, 8, 0xC0)
    assert [(c.id, c.horizontal, c.vertical) for c in header.components] == [(1, 2, 2), (2, 1, 1), (3, 1, 1)]
    assert header.mcu_size == (16, 16)
    assert header.mcus == (4, 2)
    assert header.restart_interval == 0
    assert not header.progressive
    assert header.adobe_transform == -1


def test_header_offsets_point_at_frame_exif_and_scan() -> None:
    data = with_exif(save(picture(), "JPEG"), exif(3))
    header = parse_header(data)
    assert data[header.sof_offset : header.sof_offset + 2] == b"\xff\xc0"
    assert data[header.exif_offset : header.exif_offset + 4] == b"II*\0"
    sos = data.index(b"\xff\xda")
    assert header.scan_offset == sos + 2 + struct.unpack_from(">H", data, sos + 2)[0]


def test_progressive_gray_and_adobe_are_told() -> None:
    assert parse_header(save(picture(), "JPEG", progressive=True)).progressive
    gray = parse_header(save(picture()[..., 0], "JPEG"))
    assert len(gray.components) == 1
    assert gray.mcu_size == (8, 8)
    cmyk = parse_header(save(Image.new("CMYK", (8, 8)), "JPEG"))
    assert len(cmyk.components) == 4
    assert cmyk.adobe_transform == 0


def test_fill_bytes_before_a_marker_are_passed_over() -> None:
    data = save(picture(), "JPEG")
    header = parse_header(data[:2] + b"\xff" * 70000 + data[2:])
    assert (header.width, header.height) == (60, 40)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "FF D8"),
        (b"\x89PNG\r\n\x1a\n", "FF D8"),
        (b"\xff\xd8", "FF D8"),
        (b"\xff\xd8\xff\xd9\0\0", "before any scan"),
        (b"\xff\xd8\xff\xe0\xff\xff", "cut short"),
        (b"\xff\xd8\xff\xe0\0\0\0\0", "cut short"),
        (b"\xff\xd8\xff\xff", "cut short"),
        (b"\xff\xd8ab\0\4", "where a marker was expected"),
        (b"\xff\xd8\xff\xda\0\2", "before its frame header"),
        (b"\xff\xd8\xff\xc0\0\4\0\0\xff\xda\0\2", "incomplete frame header"),
        (b"\xff\xd8\xff\xc0\0\x0b\x08\0\0\0\0\1\1\x11\0\xff\xda\0\2", "0x0 pixels"),
        (b"\xff\xd8\xff\xc0\0\x0b\x08\0\1\0\1\1\1\x51\0\xff\xda\0\2", "sampling factors 5x1"),
        (b"\xff\xd8" + b"\xff\xfe\0\2" * (MAX_SEGMENTS + 1), "segments"),
    ],
)
def test_broken_headers_are_refused_with_the_reason(data: bytes, said: str) -> None:
    with pytest.raises(JpegError, match=said):
        parse_header(data)


def test_interval_is_the_first_that_divides_the_row() -> None:
    assert restart_interval(512, "420") == 4  # 32 MCUs
    assert restart_interval(80, "420") == 5
    assert restart_interval(144, "420") == 3
    assert restart_interval(14 * 16, "420") == 7
    assert restart_interval(11 * 16, "420") == 11  # prime: the whole row
    assert restart_interval(512, "444") == 8  # 64 MCUs of 8 pixels
    assert restart_interval(11 * 16, "444") == 2  # 22 MCUs
    assert restart_interval(1, "420") == 1


def test_grid_of_the_header() -> None:
    assert parse_header(encode_image(picture(100, 128), "jpg")).grid == (7, 2)  # 8 MCUs a row, 4 to a cell
    assert parse_header(encode_image(picture(100, 128), "jpg", subsampling="444")).grid == (13, 2)  # 16 MCUs, 8 to a cell
    assert parse_header(encode_image(picture(17, 16 * 13), "jpg")).grid == (2, 1)  # a prime number of MCUs: whole rows
    assert parse_header(encode_image(picture(1, 1), "jpg")).grid == (1, 1)
    assert parse_header(encode_image(picture(100, 128), "jpg", restart_grid=False)).grid == (0, 0)
    assert parse_header(jpeg_with(picture(100, 128), cv2.IMWRITE_JPEG_RST_INTERVAL, 3)).grid == (0, 0)
    progressive = jpeg_with(picture(100, 128), cv2.IMWRITE_JPEG_RST_INTERVAL, 4, cv2.IMWRITE_JPEG_PROGRESSIVE, 1)
    assert parse_header(progressive).grid == (0, 0)


@given(st.integers(1, 65500), st.sampled_from(SAMPLINGS))
def test_interval_always_divides_the_row(width: int, subsampling: str) -> None:
    per_row = -(-width // (16 if subsampling in ("420", "422") else 8))
    assert per_row % restart_interval(width, subsampling) == 0


def expected_offsets(data: bytes) -> list[int]:
    """The same by a walk in plain Python."""
    start = parse_header(data).scan_offset
    found, pos = [start], start
    while True:
        pos = data.index(b"\xff", pos)
        if 0xD0 <= data[pos + 1] <= 0xD7:
            found.append(pos + 2)
        elif data[pos + 1] == 0xD9:
            return [*found, pos]
        pos += 1 + (data[pos + 1] != 0xFF)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("subsampling", SAMPLINGS)
def test_offsets_of_what_we_encode(size: tuple[int, int], subsampling: str) -> None:
    data = encode_image(picture(*size), "jpg", subsampling=subsampling)  # type: ignore[arg-type]  # parametrized with plain strings
    header = parse_header(data)
    offsets = restart_offsets(data)
    per_row, rows = header.mcus
    assert offsets.dtype == np.uint32
    assert len(offsets) == per_row // header.restart_interval * rows + 1
    assert offsets.tolist() == expected_offsets(data)
    assert data[offsets[-1] : offsets[-1] + 2] == b"\xff\xd9"
    np.testing.assert_array_equal(restart_offsets(memoryview(data)), offsets)


def test_offsets_stop_at_the_end_of_the_picture() -> None:
    data = encode_image(picture(), "jpg")
    np.testing.assert_array_equal(restart_offsets(data + b"maker data" + data), restart_offsets(data))


def test_gray_has_a_grid_of_8_pixel_cells() -> None:
    params = [cv2.IMWRITE_JPEG_RST_INTERVAL, 4]
    data = cv2.imencode(".jpg", np.ascontiguousarray(picture(40, 64)[..., 0]), params)[1].tobytes()
    assert len(restart_offsets(data)) == 2 * 5 + 1


def test_cells_decode_on_their_own() -> None:
    """The point of it all: a one-cell JPEG made of the header and one cell's bytes shows that part of the picture."""
    data = encode_image(picture(64, 128), "jpg", subsampling="444")
    header, offsets = parse_header(data), restart_offsets(data)
    whole = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)
    assert whole is not None
    width = header.restart_interval * 8
    for cell in (0, 5, len(offsets) - 2):
        end = offsets[cell + 1] - (0 if cell == len(offsets) - 2 else 2)
        sof = header.sof_offset + 5
        head = data[:sof] + struct.pack(">HH", 8, width) + data[sof + 4 : header.scan_offset]
        part = head + data[offsets[cell] : end] + b"\xff\xd9"
        per_row = 128 // width
        y, x = cell // per_row * 8, cell % per_row * width
        np.testing.assert_array_equal(cv2.imdecode(np.frombuffer(part, np.uint8), cv2.IMREAD_COLOR), whole[y : y + 8, x : x + width])


def jpeg_with(image: np.ndarray, *params: int) -> bytes:
    return cv2.imencode(".jpg", image, list(params))[1].tobytes()


def replace_interval(data: bytes, interval: int) -> bytes:
    at = data.index(b"\xff\xdd")
    return data[: at + 4] + struct.pack(">H", interval) + data[at + 6 :]


def test_no_grid_where_cells_cannot_be_used() -> None:
    image = picture(64, 128)
    grid = encode_image(image, "jpg")
    offsets = restart_offsets(grid)
    assert len(offsets) > 3
    markers = [int(o) - 2 for o in offsets[1:-1]]
    unusable = {
        "no interval": encode_image(image, "jpg", restart_grid=False),
        "across rows": jpeg_with(image, cv2.IMWRITE_JPEG_RST_INTERVAL, 3),
        "several rows": jpeg_with(image, cv2.IMWRITE_JPEG_RST_INTERVAL, 16),
        "progressive": jpeg_with(image, cv2.IMWRITE_JPEG_RST_INTERVAL, 4, cv2.IMWRITE_JPEG_PROGRESSIVE, 1),
        "png": save(image, "PNG"),
        "empty": b"",
        "cut": grid[: offsets[2]],
        "no EOI": grid[:-2],
        "fewer than the interval says": replace_interval(grid, 2),
        "more than the interval says": replace_interval(grid, 8),
        "numbered wrongly": grid[: markers[1] + 1] + b"\xd0" + grid[markers[1] + 2 :],
        "another marker": grid[: markers[1] + 1] + b"\xda" + grid[markers[1] + 2 :],
        "extended sequential": grid.replace(b"\xff\xc0", b"\xff\xc1", 1),
        "a scan of one component": grid[: (at := grid.index(b"\xff\xda")) + 4] + b"\x01" + grid[at + 5 :],
    }
    assert {name for name, data in unusable.items() if len(restart_offsets(data))} == set()


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_damage_never_raises_and_offsets_stay_inside(data: st.DataObject) -> None:
    jpeg = bytearray(encode_image(picture(48, 96), "jpg"))
    for at, value in data.draw(st.lists(st.tuples(st.integers(0, len(jpeg) - 1), st.integers(0, 255)), max_size=4)):
        jpeg[at] = value
    damaged = bytes(jpeg[data.draw(st.integers(0, 4)) : data.draw(st.integers(0, len(jpeg)))])
    offsets = restart_offsets(damaged).astype(np.int64)
    assert (np.diff(offsets) >= 0).all()
    assert not len(offsets) or (offsets[-1] <= len(damaged) - 2 and damaged[offsets[-1] : offsets[-1] + 2] == b"\xff\xd9")


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=200))
def test_any_bytes_give_a_header_or_a_jpeg_error(data: bytes) -> None:
    for candidate in (data, b"\xff\xd8\xff" + data):
        assert len(restart_offsets(candidate)) == 0
        with contextlib.suppress(JpegError):
            assert parse_header(candidate).scan_offset <= len(candidate)
