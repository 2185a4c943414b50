"""The part of a JPEG that a region needs: exact, minimal, and safe against bytes and offsets that lie."""

from __future__ import annotations

import contextlib
import io
import struct
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import cv2
import numpy as np
import pytest
import simplejpeg  # type: ignore[import-untyped]  # it ships a stub, but no py.typed
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from image_data import picture, save
from loaders import crops
from loaders.cells import MAX_GAP, Reading, SubJpeg, SubJpegs, open_grid
from loaders.codecs import DecodeError, decode_image, encode_image
from loaders.crops import dct_scale, decode_scaled
from loaders.jpeg import JpegError, parse_header, restart_interval, restart_offsets
from loaders.regions import Region

SAMPLINGS = {"420": 0x221111, "444": 0x111111, "422": 0x211111, "440": 0x121111, "411": 0x411111}
PRIMES = (1, 2, 3, 7, 17, 31, 61, 127, 211, 331)


def jpeg(height: int, width: int, sampling: str, interval: int, seed: int = 0, quality: int = 90) -> bytes:
    """A picture of noise and edges (chroma that differs from pixel to pixel shows every wrong neighbour)."""
    rng = np.random.default_rng(seed)
    pixels = picture(height, width, seed) // 2 + rng.integers(0, 128, (height, width, 3), dtype=np.uint8)
    params = [cv2.IMWRITE_JPEG_RST_INTERVAL, interval, cv2.IMWRITE_JPEG_QUALITY, quality]
    if sampling == "gray":
        return cv2.imencode(".jpg", np.ascontiguousarray(pixels[..., 0]), params)[1].tobytes()
    return cv2.imencode(".jpg", pixels, [*params, cv2.IMWRITE_JPEG_SAMPLING_FACTOR, SAMPLINGS[sampling]])[1].tobytes()


def intervals(width: int, sampling: str) -> list[int]:
    per_row = -(-width // {"420": 16, "422": 16, "411": 32}.get(sampling, 8))
    return [n for n in range(1, per_row + 1) if per_row % n == 0]


def decode_region(data: bytes, offsets: NDArray[np.uint32], region: Region, scale: int = 1) -> NDArray[np.uint8]:
    """A region of a whole JPEG in memory, [h, w, 3], at 1/`scale`, as a data set decodes it."""
    sub, made = assembled(SubJpegs([(open_grid(data[: int(offsets[0])], offsets, len(data)), region, scale)]), memoryview(data))
    return sub.decode(made, lambda shape: np.empty(shape, np.uint8))


def assembled(jpegs: SubJpegs, source: memoryview | Reading) -> tuple[SubJpeg, memoryview]:
    """The only one of them, and its bytes."""
    [sub], [made] = jpegs.parts, jpegs.assemble(memoryview(bytearray(jpegs.num_bytes)), [source])
    return sub, made


def reading(data: bytes, see: Callable[[list[memoryview], int, int], None]) -> Reading:
    """Reads from memory, piece by piece, as from a file; `see` is told before."""

    def read(views: list[memoryview], offset: int, size: int) -> None:
        assert size == sum(map(len, views))
        see(views, offset, size)
        for view in views:
            view[:] = data[offset : offset + len(view)]
            offset += len(view)

    return Reading(read, lambda *_: None)


def check_all_edges(data: bytes, regions: list[tuple[int, int, int, int]]) -> None:
    full, offsets = decode_image(data, "jpg"), restart_offsets(data)
    assert len(offsets)
    for y, x, h, w in regions:
        np.testing.assert_array_equal(decode_region(data, offsets, (y, x, h, w)), full[y : y + h, x : x + w], err_msg=f"{y, x, h, w}")


@st.composite
def grids(draw: st.DrawFn) -> tuple[bytes, list[tuple[int, int, int, int]]]:
    """A JPEG with any grid, and regions: any, at every edge, the whole."""
    sampling = draw(st.sampled_from(["gray", *SAMPLINGS]))
    height, width = (draw(st.one_of(st.sampled_from(PRIMES), st.integers(1, 200))) for _ in range(2))
    interval = draw(st.sampled_from(intervals(width, sampling)))
    y0, y1 = sorted(draw(st.lists(st.integers(0, height), min_size=2, max_size=2, unique=True)))
    x0, x1 = sorted(draw(st.lists(st.integers(0, width), min_size=2, max_size=2, unique=True)))
    y, x, h, w = y0, x0, y1 - y0, x1 - x0
    regions = [(y, x, h, w), (0, x, h, w), (height - h, x, h, w), (y, 0, h, w), (y, width - w, h, w), (0, 0, height, width)]
    return jpeg(height, width, sampling, interval, draw(st.integers(0, 1000))), regions


@settings(deadline=None, max_examples=300)
@given(grids())
def test_a_region_equals_the_same_pixels_of_the_full_decode(grid: tuple[bytes, list[tuple[int, int, int, int]]]) -> None:
    check_all_edges(*grid)


@pytest.mark.slow
@settings(deadline=None, max_examples=2500)
@given(grids())
def test_a_region_equals_the_same_pixels_of_the_full_decode_at_length(grid: tuple[bytes, list[tuple[int, int, int, int]]]) -> None:
    check_all_edges(*grid)


@pytest.mark.parametrize("sampling", ["gray", *SAMPLINGS])
def test_every_single_pixel_of_a_small_picture(sampling: str) -> None:
    data = jpeg(35, 37, sampling, 1)
    check_all_edges(data, [(y, x, 1, 1) for y in range(35) for x in range(37)])


@pytest.mark.parametrize("sampling", ["gray", *SAMPLINGS])
@pytest.mark.parametrize("rest", range(1, 9))
def test_a_narrow_rest_at_the_right_edge(sampling: str, rest: int) -> None:
    """Chroma of up to two samples is not interpolated by libjpeg, that of a wider picture is."""
    width = 64 + rest
    data = jpeg(21, width, sampling, 1)
    check_all_edges(data, [(y, x, 21 - y, width - x) for y in (0, 9) for x in range(60, width)])


@pytest.mark.parametrize("sampling", ["gray", "420", "444"])
@pytest.mark.parametrize("scale", [2, 4, 8])
def test_a_scaled_region_is_that_part_of_the_scaled_picture(sampling: str, scale: int) -> None:
    height, width = 203, 331
    data = jpeg(height, width, sampling, intervals(width, sampling)[0])
    whole = decode_scaled(data, height, width, scale, lambda shape: np.empty(shape, np.uint8))
    assert whole.shape == (-(-height // scale), -(-width // scale), 3)
    for y, x, h, w in ((0, 0, height, width), (16, 32, 96, 128), (17, 35, 101, 97), (105, 230, 98, 101), (203 - 98, 331 - 99, 98, 99)):
        part = decode_region(data, restart_offsets(data), (y, x, h, w), scale)
        expected = whole[y // scale : -(-(y + h) // scale), x // scale : -(-(x + w) // scale)]
        np.testing.assert_array_equal(part, expected)
        assert part.shape[0] * scale >= h
        assert part.shape[1] * scale >= w


def test_scales_allowed() -> None:
    header = parse_header(jpeg(800, 800, "420", 0))
    assert [dct_scale(header, n, n, (100, 100)) for n in (100, 199, 200, 399, 400, 799, 800, 5000)] == [1, 1, 2, 2, 4, 4, 8, 8]
    assert dct_scale(header, 800, 300, (100, 100)) == 2  # the narrower side decides
    assert dct_scale(header, 800, 800, (4, 100)) == 1  # a few pixels: not worth it
    assert dct_scale(parse_header(jpeg(64, 64, "gray", 0)), 64, 64, (8, 8)) == 8
    assert dct_scale(parse_header(jpeg(64, 64, "444", 0)), 64, 64, (8, 8)) == 8
    for sampling in ("422", "440", "411"):
        assert dct_scale(parse_header(jpeg(64, 64, sampling, 0)), 64, 64, (8, 8)) == 1
    assert dct_scale(parse_header(save(Image.new("CMYK", (64, 64)), "JPEG")), 64, 64, (8, 8)) == 1


# Without a grid


def decode_rows(data: bytes, region: Region, scale: int = 1) -> tuple[NDArray[np.uint8], int]:
    """A region of a JPEG without a grid, and the height of what was decoded last."""
    shapes = []

    def blank(shape: tuple[int, int, int]) -> NDArray[np.uint8]:
        shapes.append(shape)
        return np.full(shape, 77, np.uint8)

    return crops.decode_region(data, parse_header(data), region, scale, blank), shapes[-1][0]


@st.composite
def rows(draw: st.DrawFn) -> tuple[bytes, Region]:
    """A JPEG without a grid, mostly large enough to be cut, and any region of it."""
    height, width = draw(st.integers(1, 330)), draw(st.one_of(st.sampled_from(PRIMES), st.integers(100, 300)))
    y0, y1 = sorted(draw(st.lists(st.integers(0, height), min_size=2, max_size=2, unique=True)))
    x0, x1 = sorted(draw(st.lists(st.integers(0, width), min_size=2, max_size=2, unique=True)))
    return jpeg(height, width, draw(st.sampled_from(["gray", *SAMPLINGS])), 0, draw(st.integers(0, 1000))), (y0, x0, y1 - y0, x1 - x0)


@settings(deadline=None, max_examples=300)
@given(rows())
def test_rows_down_to_a_region_equal_those_of_the_full_decode(case: tuple[bytes, Region]) -> None:
    data, region = case
    y, x, h, w = region
    image, decoded = decode_rows(data, region)
    full = decode_image(data, "jpg")
    np.testing.assert_array_equal(image, full[y : y + h, x : x + w])
    assert decoded == len(full) or decoded < y + h + 18


@pytest.mark.parametrize("sampling", ["gray", *SAMPLINGS])
def test_every_last_row(sampling: str) -> None:
    data = jpeg(150, 131, sampling, 0)
    full = decode_image(data, "jpg")
    for bottom in range(1, 151):
        image, decoded = decode_rows(data, (bottom - 1, 0, 1, 131))
        np.testing.assert_array_equal(image, full[bottom - 1 : bottom])
        assert bottom <= decoded <= 150
        assert decoded < bottom + 18 or bottom > 60


@pytest.mark.parametrize("sampling", ["gray", "420", "444"])
@pytest.mark.parametrize("scale", [2, 4, 8])
def test_rows_at_a_scale(sampling: str, scale: int) -> None:
    data = jpeg(403, 331, sampling, 0)
    whole = decode_scaled(data, 403, 331, scale, lambda shape: np.empty(shape, np.uint8))
    for y, h in ((0, 64), (1, 97), (33, 256)):
        image, decoded = decode_rows(data, (y, 3, h, 300), scale)
        np.testing.assert_array_equal(image, whole[y // scale : -(-(y + h) // scale), 3 // scale : -(-303 // scale)])
        assert decoded < len(whole)


def progressive(restart: int = 0) -> bytes:
    pixels = picture(400, 300, 5)
    params = [cv2.IMWRITE_JPEG_PROGRESSIVE, int(not restart), cv2.IMWRITE_JPEG_RST_INTERVAL, restart]
    return cv2.imencode(".jpg", pixels, params)[1].tobytes()


@pytest.mark.parametrize("restart", [0, 7])
def test_other_jpegs_are_decoded_whole(restart: int) -> None:
    """Progressive, and with restart markers that make no grid."""
    data = progressive(restart)
    image, decoded = decode_rows(data, (5, 6, 70, 80))
    assert decoded == 400
    np.testing.assert_array_equal(image, decode_image(data, "jpg")[5:75, 6:86])


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_damage_in_the_rows_down_to_a_region_is_told(data: st.DataObject) -> None:
    """Either our error, or the pixels that the decoder has before it sees any damage."""
    good = jpeg(300, 200, data.draw(st.sampled_from(["gray", "420", "444"])), 0, 3)
    start, bad = parse_header(good).scan_offset, bytearray(good)
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(start, len(good) - 3))
        bad[place : place + 2] = data.draw(st.sampled_from([b"\xff\xd9", b"\xff\xd3", b"\xff\xda", b"\xff\xff", b"\0\0", b"\x5a\xa5"]))
    region = (data.draw(st.integers(0, 100)), 10, data.draw(st.integers(1, 150)), 100)
    y, x, h, w = region
    try:
        image, decoded = decode_rows(bytes(bad), region)
    except DecodeError:
        with pytest.raises(DecodeError):
            decode_image(bytes(bad), "jpg")
        return
    assert decoded < 300
    np.testing.assert_array_equal(image, simplejpeg.decode_jpeg(bytes(bad), "RGB", strict=False)[y : y + h, x : x + w])


def test_a_missing_end_is_told_whatever_the_region() -> None:
    good = jpeg(300, 200, "420", 0)
    for length in (len(good) - 1, len(good) - 2, len(good) - 500, len(good) // 2, parse_header(good).scan_offset + 10):
        with pytest.raises(DecodeError):
            decode_rows(good[:length], (0, 0, 30, 30))


def test_a_lack_of_memory_is_no_damage() -> None:
    def blank(shape: tuple[int, int, int]) -> NDArray[np.uint8]:
        raise MemoryError(shape)

    data = jpeg(300, 200, "420", 0)
    for region in ((0, 0, 30, 30), (0, 0, 300, 200)):
        with pytest.raises(MemoryError):
            crops.decode_region(data, parse_header(data), region, 1, blank)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.sampled_from(sorted(SAMPLINGS)), st.integers(1, 150), st.integers(1, 150), st.data()), min_size=1, max_size=5))
def test_several_pictures_together_are_as_each_alone(wanted: list[tuple[str, int, int, st.DataObject]]) -> None:
    asked, sources, expected = [], [], []
    for sampling, height, width, data in wanted:
        encoded = jpeg(height, width, sampling, data.draw(st.sampled_from(intervals(width, sampling))))
        offsets = restart_offsets(encoded)
        y, x = data.draw(st.integers(0, height - 1)), data.draw(st.integers(0, width - 1))
        region = y, x, data.draw(st.integers(1, height - y)), data.draw(st.integers(1, width - x))
        scale = data.draw(st.sampled_from([1, 2, 4, 8]))
        asked.append((open_grid(encoded[: int(offsets[0])], offsets, len(encoded)), region, scale))
        sources.append(data.draw(st.sampled_from([memoryview(encoded), reading(encoded, lambda *_: None)])))
        expected.append(assembled(SubJpegs(asked[-1:]), memoryview(encoded))[1])
    jpegs = SubJpegs(asked)
    assert list(map(bytes, jpegs.assemble(memoryview(bytearray(jpegs.num_bytes)), sources))) == list(map(bytes, expected))


# What is read


def test_only_the_cells_of_the_region_are_read() -> None:
    height, width = 640, 800
    data = jpeg(height, width, "420", restart_interval(width, "420"), quality=98)
    offsets = restart_offsets(data)
    grid = open_grid(data[: offsets[0]], offsets, len(data))
    region = (333, 401, 64, 64)
    seen: list[tuple[int, int]] = []
    sub, buffer = assembled(SubJpegs([(grid, region, 1)]), reading(data, lambda _, offset, size: seen.append((offset, offset + size))))
    rows = range(332 // 16, -(-398 // 16))
    left, right = 400 // grid.cell_width, -(-466 // grid.cell_width)
    needed = [(int(offsets[r * grid.columns + left]), int(offsets[r * grid.columns + right])) for r in rows]
    assert all(b[0] - a[1] > MAX_GAP for a, b in pairwise(needed))  # so that nothing is read along
    assert seen == needed
    small = parse_header(bytes(buffer))
    assert (small.height, small.width) == (len(rows) * 16, (right - left) * grid.cell_width)
    assert len(restart_offsets(bytes(buffer))) == len(rows) * (right - left) + 1  # the markers count from 0 again
    np.testing.assert_array_equal(sub.decode(buffer, lambda s: np.empty(s, np.uint8)), decode_image(data, "jpg")[333:397, 401:465])
    with Image.open(io.BytesIO(buffer)) as im:  # a JPEG like any other
        np.testing.assert_array_equal(np.asarray(im), decode_image(buffer, "jpg"))


def test_slices_close_together_are_read_at_once() -> None:
    data = jpeg(100, 160, "420", 1)
    offsets = restart_offsets(data)
    [sub] = SubJpegs([(open_grid(data[: offsets[0]], offsets, len(data)), (20, 20, 60, 60), 1)]).parts
    stretches = list(sub.stretches(memoryview(bytearray(sub.num_bytes))))
    assert len(stretches) == 1
    assert stretches[0][1] == offsets[10 * 1 + 1]


def test_a_picture_of_one_row_of_cells_is_read_in_one_piece() -> None:
    data = jpeg(150, 17, "444", 3)  # the interval is the row: no columns to leave out
    offsets = restart_offsets(data)
    [sub] = SubJpegs([(open_grid(data[: offsets[0]], offsets, len(data)), (40, 3, 20, 9), 1)]).parts
    ((views, offset, size),) = sub.stretches(memoryview(bytearray(sub.num_bytes)))
    assert (offset, sum(map(len, views)), size) == (offsets[4], offsets[8] - offsets[4], offsets[8] - offsets[4])


# Hostile headers and offsets


def assemble(data: bytes, offsets: NDArray[Any], num_bytes: int | None = None, region: tuple[int, int, int, int] = (30, 30, 40, 40)) -> Any:
    """`decode_region`, with a reader that fails the test where it is asked for bytes outside the part."""
    num_bytes = len(data) if num_bytes is None else num_bytes
    head = data[: int(offsets[0])]

    def see(_: list[memoryview], offset: int, size: int) -> None:
        assert 0 <= offset <= offset + size <= num_bytes

    sub, made = assembled(SubJpegs([(open_grid(head, offsets.astype(np.uint32), num_bytes), region, 1)]), reading(data, see))
    return sub.decode(made, lambda shape: np.empty(shape, np.uint8))


def test_wrong_offsets_are_refused() -> None:
    data = jpeg(96, 128, "420", 1)
    good = restart_offsets(data).astype(np.int64)
    full = decode_image(data, "jpg")
    np.testing.assert_array_equal(assemble(data, good), full[30:70, 30:70])
    wrong = {
        "shifted by a byte": np.concatenate((good[:1], good[1:-1] + 1, good[-1:])),
        "shifted by a cell": np.concatenate((good[:1], good[2:], good[-1:] + 4)),
        "not rising": np.concatenate((good[:1], good[1:][::-1])),
        "all equal": np.full_like(good, good[0]),
        "beyond the part": np.concatenate((good[:1], good[1:] + len(data))),
        "the end beyond the part": np.concatenate((good[:-1], [4_000_000_000])),
        "too few": good[:-1],
        "too many": np.concatenate((good, good[-1:] + 1)),
        "before the header's end": np.concatenate(([good[0] - 2], good[1:])),
    }
    accepted = []
    for name, offsets in wrong.items():
        with contextlib.suppress(JpegError):
            assemble(data, offsets, region=(0, 0, 96, 128))
            accepted.append(name)
    assert accepted == []


def test_headers_that_do_not_fit_are_refused() -> None:
    data = jpeg(96, 128, "420", 1)
    offsets = restart_offsets(data)
    sof = parse_header(data).sof_offset
    wrong = {
        "grid": data.replace(b"\xff\xdd\0\4\0\1", b"\xff\xdd\0\4\0\0"),
        "cells": data[: sof + 5] + struct.pack(">HH", 200, 128) + data[sof + 9 :],
        "first entropy-coded byte": data[:2] + b"\xff\xfe\0\2" + data[2:],
    }
    for said, changed in wrong.items():
        with pytest.raises(JpegError, match=said):
            decode_region(changed, offsets if said != "first entropy-coded byte" else offsets + 5, (0, 0, 8, 8))
    for broken in (b"", b"\xff\xd8", data[:20]):
        with pytest.raises(JpegError):
            decode_region(broken, offsets, (0, 0, 8, 8))


@settings(deadline=None, max_examples=400)
@given(st.data())
def test_damage_gives_pixels_or_our_error_and_reads_nothing_outside(data: st.DataObject) -> None:
    good = bytearray(encode_image(picture(96, 160), "jpg"))
    offsets = restart_offsets(bytes(good)).astype(np.int64)
    for at, value in data.draw(st.lists(st.tuples(st.integers(0, len(good) - 1), st.integers(0, 255)), max_size=4)):
        good[at] = value
    changes = data.draw(st.lists(st.tuples(st.integers(0, len(offsets) - 1), st.integers(0, 2**32 - 1)), max_size=3))
    for at, value in changes:
        offsets[at] = value if data.draw(st.booleans()) else value % (len(good) + 8)
    size = data.draw(st.integers(1, 64))
    try:
        image = assemble(bytes(good), offsets, region=(data.draw(st.integers(0, 32)), data.draw(st.integers(0, 96)), size, size))
    except (JpegError, DecodeError):
        return
    assert image.shape == (size, size, 3)
