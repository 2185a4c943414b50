from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import cv2
import numpy as np
import pytest
import simplejpeg  # type: ignore[import-untyped]  # it ships a stub, but no py.typed
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from image_data import exif, picture, png_chunk, png_of, save, tiff_of, webp_with_exif, with_exif
from packer import headers
from packer.images import (
    MAX_JPEG_SCANS,
    ImageError,
    ImageInfo,
    check,
    decode,
    probe,
    reset_orientation,
    upright,
)

BIG = 10**9
PICTURE = picture()
PILLOW = Image.fromarray(PICTURE)
rng = np.random.default_rng(0)
GRAY16 = rng.integers(0, 65536, (7, 9), dtype=np.uint16)
RGB16 = rng.integers(0, 65536, (7, 9, 3), dtype=np.uint16)

FILES: dict[str, bytes] = {
    "jpeg": save(PICTURE, "JPEG", quality=95, subsampling=0),
    "jpeg progressive": save(PICTURE, "JPEG", progressive=True),
    "jpeg 420 optimised": save(PICTURE, "JPEG", optimize=True),
    "jpeg gray": save(PICTURE[..., 0], "JPEG"),
    "jpeg cmyk": save(PILLOW.convert("CMYK"), "JPEG"),
    "jpeg cmyk 420 progressive": save(PILLOW.convert("CMYK"), "JPEG", subsampling=2, progressive=True),
    "png": save(PICTURE, "PNG"),
    "png gray": save(PICTURE[..., 0], "PNG"),
    "png rgba": save(PILLOW.convert("RGBA"), "PNG"),
    "png palette": save(PILLOW.convert("P"), "PNG"),
    "png 1 bit": save(PILLOW.convert("1"), "PNG"),
    "png gray 16": save(Image.fromarray(GRAY16), "PNG"),
    "png rgb 16": png_of(RGB16, color=2, bits=16),
    "png animated": save(PILLOW, "PNG", save_all=True, append_images=[PILLOW.rotate(180)]),
    "webp": save(PICTURE, "WEBP"),
    "webp lossless": save(PICTURE, "WEBP", lossless=True),
    "webp rgba": save(PILLOW.convert("RGBA").rotate(20), "WEBP"),
    "webp animated": save(PILLOW, "WEBP", save_all=True, append_images=[PILLOW.rotate(180)]),
    "gif": save(PILLOW, "GIF"),
    "gif animated": save(PILLOW, "GIF", save_all=True, append_images=[PILLOW.rotate(180), PILLOW.rotate(90)]),
    "bmp": save(PICTURE, "BMP"),
    "tiff": save(PICTURE, "TIFF"),
    "tiff deflate": save(PICTURE, "TIFF", compression="tiff_adobe_deflate"),
    "tiff pages": save(PILLOW, "TIFF", save_all=True, append_images=[PILLOW, PILLOW]),
    "tiff gray 16": tiff_of(GRAY16),
    "tiff rgb 16": tiff_of(RGB16),
}


def info_of(data: bytes) -> ImageInfo:
    return probe(data, max_pixels=BIG)


def pixels(data: bytes, **options: Any) -> np.ndarray:
    return decode(data, info_of(data), **options).image


def refused(data: bytes, max_pixels: int = BIG) -> ImageError:
    """The error of probing and decoding; both `check` and `decode` must agree that there is one."""
    with pytest.raises(ImageError) as caught:
        decode(data, probe(data, max_pixels=max_pixels))
    with pytest.raises(ImageError):
        check(data, probe(data, max_pixels=max_pixels))
    return caught.value


# --- what the header says


@pytest.mark.parametrize(
    ("name", "mode", "frames", "verbatim", "suffix"),
    [
        ("jpeg", "RGB", 1, True, "jpg"),
        ("jpeg progressive", "RGB", 1, True, "jpg"),
        ("jpeg gray", "L", 1, True, "jpg"),
        ("jpeg cmyk", "CMYK", 1, False, "jpg"),
        ("png", "RGB", 1, True, "png"),
        ("png gray", "L", 1, True, "png"),
        ("png rgba", "RGBA", 1, False, "png"),
        ("png palette", "P", 1, False, "png"),
        ("png 1 bit", "1", 1, False, "png"),
        ("png gray 16", "I;16", 1, False, "png"),
        ("png rgb 16", "RGB", 1, False, "png"),
        ("png animated", "RGB", 2, False, "png"),
        ("webp", "RGB", 1, True, "webp"),
        ("webp lossless", "RGB", 1, True, "webp"),
        ("webp rgba", "RGBA", 1, False, "webp"),
        ("webp animated", "RGB", 2, False, "webp"),
        ("gif", "P", 1, False, "png"),
        ("gif animated", "P", 3, False, "png"),
        ("bmp", "RGB", 1, False, "png"),
        ("tiff", "RGB", 1, False, "png"),
        ("tiff pages", "RGB", 3, False, "png"),
        ("tiff gray 16", "I;16", 1, False, "png"),
    ],
)
def test_probe(name: str, mode: str, frames: int, verbatim: bool, suffix: str) -> None:
    info = info_of(FILES[name])
    assert (info.format, info.mode, info.frames, info.verbatim, info.suffix) == (name.split()[0], mode, frames, verbatim, suffix)
    assert (info.width, info.height) == ((9, 7) if " 16" in name else (60, 40))
    assert info.bits == (16 if " 16" in name else 1 if "1 bit" in name else 8)
    assert info.orientation == 1


def test_a_png_with_transparent_colour_is_not_verbatim() -> None:
    assert not info_of(save(PICTURE, "PNG", transparency=(1, 2, 3))).verbatim


def test_a_jpeg_that_our_loaders_cannot_read_is_not_verbatim() -> None:
    data = bytearray(FILES["jpeg"])
    data[info_sof(data) + 11] = 0x31  # luma 3x1: legal, but without a name in TurboJPEG
    assert not info_of(bytes(data)).verbatim
    with pytest.raises(ValueError, match="subsampling"):
        simplejpeg.decode_jpeg_header(bytes(data))


def info_sof(data: bytes | bytearray) -> int:
    return data.index(b"\xff\xc0")


def test_limit_is_checked_before_decoding_and_names_numbers() -> None:
    bomb = png_of(np.zeros((1, 1, 3)), color=2, bits=8)
    header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", 20000, 20000, 8, 2, 0, 0, 0))
    bomb = bomb[:8] + header + bomb[8 + len(header) :]
    error = refused(bomb, max_pixels=200_000_000)
    assert error.code == "image-too-large"
    assert "20000x20000 = 400000000 pixels, the limit is 200000000" in str(error)
    assert probe(FILES["jpeg"], max_pixels=2400).width == 60
    for name in ("jpeg", "png", "webp", "gif", "bmp", "tiff"):
        assert refused(FILES[name], max_pixels=2399).code == "image-too-large"


def test_pillows_own_limit_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    for data in FILES.values():
        assert pixels(data).size
    assert Image.MAX_IMAGE_PIXELS == 100


# --- pixels


@pytest.mark.parametrize("name", [n for n in FILES if " 16" not in n])
def test_decode_is_pillows_first_frame_in_rgb(name: str) -> None:
    decoded = decode(FILES[name], info_of(FILES[name]))
    with Image.open(io.BytesIO(FILES[name])) as im:
        np.testing.assert_array_equal(decoded.image, np.asarray(im.convert("RGB")))
    assert decoded.image.dtype == np.uint8
    assert decoded.image.flags.c_contiguous
    assert decoded.image.flags.writeable
    assert decoded.max_16bit is None
    check(FILES[name], info_of(FILES[name]))


def test_one_bit_white_is_255_and_palettes_are_expanded() -> None:
    bits = Image.new("1", (8, 8), 1)
    for data in (save(bits, "PNG"), save(bits, "TIFF"), save(bits, "BMP")):
        assert (pixels(data) == 255).all()
    palette = Image.new("P", (8, 8), 1)
    palette.putpalette([0, 0, 0, 200, 100, 50])
    for kind in ("PNG", "GIF", "BMP", "TIFF"):
        assert (pixels(save(palette, kind)) == (200, 100, 50)).all()


def test_alpha_and_transparent_colours_are_dropped_not_composited() -> None:
    rgba = np.dstack([PICTURE, np.zeros((40, 60), np.uint8)])
    for data in (save(rgba, "PNG"), save(rgba, "TIFF"), save(rgba, "WEBP", lossless=True, exact=True)):
        np.testing.assert_array_equal(pixels(data), PICTURE)
    np.testing.assert_array_equal(pixels(save(PICTURE, "PNG", transparency=tuple(map(int, PICTURE[0, 0])))), PICTURE)
    palette = PILLOW.convert("P")
    np.testing.assert_array_equal(pixels(save(palette, "PNG", transparency=bytes(256))), np.asarray(palette.convert("RGB")))
    gray_alpha = np.dstack([PICTURE[..., 0], np.zeros((40, 60), np.uint8)])
    np.testing.assert_array_equal(pixels(save(gray_alpha, "PNG")), np.repeat(PICTURE[..., :1], 3, 2))


def test_red_stays_red_in_cmyk() -> None:
    red = Image.new("RGB", (32, 32), (220, 30, 30)).convert("CMYK")
    for data in (save(red, "JPEG"), save(red, "JPEG", subsampling=2), save(red, "TIFF")):
        assert abs(pixels(data).astype(int) - (220, 30, 30)).max() < 6


SIXTEEN = {
    "png gray": (png_of(GRAY16, color=0, bits=16), GRAY16),
    "png gray transparent": (png_of(GRAY16, color=0, bits=16, before=png_chunk(b"tRNS", b"\0\1")), GRAY16),
    "png rgb": (FILES["png rgb 16"], RGB16),
    "png rgba": (png_of(np.dstack([RGB16, GRAY16]), color=6, bits=16), RGB16),
    "png gray alpha": (png_of(np.dstack([GRAY16, GRAY16 // 2]), color=4, bits=16), GRAY16),
    "tiff gray": (tiff_of(GRAY16), GRAY16),
    "tiff gray big-endian": (tiff_of(GRAY16, order=">"), GRAY16),
    "tiff gray min-is-white": (tiff_of(GRAY16, photometric=0), 65535 - GRAY16),
    "tiff rgb": (tiff_of(RGB16), RGB16),
    "tiff rgb big-endian": (tiff_of(RGB16, order=">"), RGB16),
    "tiff rgba": (tiff_of(np.dstack([RGB16, GRAY16])), RGB16),
    "tiff rgb compressed": (cv2.imencode(".tiff", RGB16[..., ::-1])[1].tobytes(), RGB16),
}


@pytest.mark.parametrize("name", SIXTEEN)
def test_sixteen_bits_are_scaled_by_257_or_by_a_declared_range(name: str) -> None:
    data, values = SIXTEEN[name]
    decoded = decode(data, info_of(data))
    expected = np.round(values / 257).astype(np.uint8)
    np.testing.assert_array_equal(decoded.image, expected if values.ndim == 3 else np.repeat(expected[..., None], 3, 2))
    assert decoded.max_16bit == values.max()
    ranged = decode(data, info_of(data), pixel_range=(1000, 40000))
    expected = np.clip(np.round((values.astype(float) - 1000) * 255 / 39000), 0, 255).astype(np.uint8)
    np.testing.assert_array_equal(ranged.image, expected if values.ndim == 3 else np.repeat(expected[..., None], 3, 2))
    assert ranged.max_16bit == values.max()


def test_every_16_bit_value() -> None:
    ramp = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    data = save(Image.fromarray(ramp), "PNG")
    np.testing.assert_array_equal(pixels(data)[..., 1], np.round(ramp / 257))
    assert set(np.unique(pixels(data, pixel_range=(0, 4095)))) == set(range(256))


def test_range_does_not_touch_8_bit_pictures() -> None:
    np.testing.assert_array_equal(pixels(FILES["png"], pixel_range=(0, 10)), PICTURE)


@pytest.mark.parametrize(
    "data",
    [
        tiff_of(GRAY16.astype(np.float32), sample_format=3),
        tiff_of(RGB16.astype(np.float32)),
        tiff_of(GRAY16, sample_format=2),
        tiff_of(GRAY16.astype(np.uint32)),
        tiff_of(RGB16, tags={284: 2}),
        tiff_of(np.dstack([RGB16, GRAY16]), photometric=5),
        tiff_of(PICTURE, photometric=8),
        tiff_of(GRAY16, order=">", photometric=0),
    ],
    ids=["float", "float rgb", "signed", "32 bits", "16-bit planes", "16-bit cmyk", "lab", "big-endian min-is-white"],
)
def test_pixels_without_a_rule_are_refused(data: bytes) -> None:
    error = refused(data)
    assert error.code == "unsupported-pixels"
    assert "convert it" in str(error)


def test_8_bit_planes_and_min_is_white() -> None:
    np.testing.assert_array_equal(pixels(tiff_of(PICTURE, tags={284: 2})), PICTURE)
    inverted = tiff_of(255 - PICTURE[..., 0], photometric=0)
    np.testing.assert_array_equal(pixels(inverted)[..., 0], PICTURE[..., 0])


# --- damage


@pytest.mark.parametrize("name", FILES)
def test_no_cut_is_taken_for_a_picture(name: str) -> None:
    data = FILES[name]
    whole = pixels(data)
    for length in range(1, len(data) - 1, max(1, len(data) // 60)):
        try:
            info = info_of(data[:length])
            check(data[:length], info)
            image = decode(data[:length], info).image
        except ImageError as e:
            assert e.code in ("truncated-image", "corrupt-image", "unsupported-image", "unsupported-pixels")  # noqa: PT017  (some cuts are harmless)
        else:
            # What follows the pixels of a TIFF or GIF may be missing.
            assert name.split()[0] in ("tiff", "gif")
            np.testing.assert_array_equal(image, whole)


@pytest.mark.parametrize("name", ["jpeg", "jpeg progressive", "jpeg gray", "jpeg cmyk", "jpeg cmyk 420 progressive"])
def test_a_jpeg_without_eoi_is_refused_and_bytes_after_it_are_not(name: str) -> None:
    data = FILES[name]
    assert refused(data[:-2]).code == "truncated-image"
    assert refused(data[: len(data) * 2 // 3]).code in ("truncated-image", "corrupt-image")  # by the scan that the cut falls into
    np.testing.assert_array_equal(pixels(data + b"maker data" + data), pixels(data))
    check(data + b"\0" * 1000, info_of(data + b"\0" * 1000))


def test_zeros_inside_a_jpeg_are_refused() -> None:
    data = save(picture(300, 300), "JPEG", quality=95)
    middle = len(data) // 2
    assert refused(data[:middle] + bytes(2000) + data[middle + 2000 :]).code == "corrupt-image"


def test_multi_picture_jpeg_is_one_jpeg() -> None:
    data = save(PILLOW, "MPO", save_all=True, append_images=[PILLOW.rotate(180)])
    assert info_of(data).frames == 1
    assert info_of(data).verbatim
    with Image.open(io.BytesIO(data)) as im:
        assert im.format == "MPO"
        np.testing.assert_array_equal(pixels(data), np.asarray(im))


def test_any_flipped_byte_of_a_png_is_found() -> None:
    data = FILES["png"]
    for at in range(8, len(data), 7):
        damaged = data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]
        assert refused(damaged).code in ("corrupt-image", "truncated-image")


@pytest.mark.parametrize("kind", ["cut stream", "no adler", "half the rows", "no IDAT"])
def test_png_with_good_checksums_but_missing_pixels(kind: str) -> None:
    rows = zlib.compress(b"".join(b"\0" + row.tobytes() for row in PICTURE))
    half = zlib.compress(b"".join(b"\0" + row.tobytes() for row in PICTURE[:20]))
    idat = {"cut stream": rows[: len(rows) // 2], "no adler": rows[:-4], "half the rows": half, "no IDAT": b""}[kind]
    data = png_of(PICTURE, color=2, bits=8, idat=idat)
    if kind == "no IDAT":
        data = data.replace(png_chunk(b"IDAT", b""), b"")
    assert refused(data).code == "corrupt-image"


def test_animated_png_decodes_to_its_first_frame_although_checked_as_a_still() -> None:
    np.testing.assert_array_equal(pixels(FILES["png animated"]), PICTURE)


def test_a_jpeg_of_endless_scans_is_refused_quickly() -> None:
    data = FILES["jpeg progressive"]
    scan = data.rindex(b"\xff\xda")
    assert "scans" in str(refused(data[:scan] + data[scan:-2] * (MAX_JPEG_SCANS + 1) + b"\xff\xd9"))


@pytest.mark.parametrize(
    ("data", "code", "said"),
    [
        (b"", "empty-file", "empty (0 bytes)"),
        (b"\0\3\1" * 20, "unsupported-image", "00 03 01 00"),
        (b"hello", "unsupported-image", "a text that begins with 'hello'"),
        (b"\0\0\0\x18ftypheic" + bytes(20), "unsupported-image", "HEIC"),
        (b"<!DOCTYPE html><html>", "unsupported-image", "HTML"),
        (b"version https://git-lfs.github.com/spec/v1", "unsupported-image", "git lfs pull"),
        (bytes(128) + b"DICM", "unsupported-image", "DICOM"),
        (b"\xff\xd8", "corrupt-image", "FF D8"),
        (b"BM" + bytes(40), "corrupt-image", "cannot be decoded"),
        (b"GIF89a\1\0\1\0\0\0\0;", "truncated-image", "without a complete frame"),
        (b"II*\0" + bytes(20), "corrupt-image", "cannot be decoded"),
        (b"RIFF\4\0\0\0WEBP", "corrupt-image", "0x0"),
        (b"\x89PNG\r\n\x1a\n" + png_chunk(b"IEND", b""), "corrupt-image", "IHDR"),
        (png_of(np.zeros((1, 1)), color=2, bits=3), "corrupt-image", "color type 2 with 3 bits"),
        (FILES["jpeg"].replace(b"\xff\xc0\0\x11\x08", b"\xff\xc0\0\x11\x0c"), "unsupported-pixels", "12 bits"),
        (FILES["jpeg"].replace(b"\xff\xc0", b"\xff\xc3", 1), "unsupported-image", "SOF marker FF C3"),
    ],
)
def test_codes_and_messages(data: bytes, code: str, said: str) -> None:
    error = refused(data)
    assert error.code == code
    assert said in str(error)


@settings(deadline=None, max_examples=200)
@given(st.sampled_from(sorted(FILES)), st.data())
def test_any_damage_gives_a_picture_of_the_stated_size_or_an_image_error(name: str, data: st.DataObject) -> None:
    damaged = bytearray(FILES[name])
    for at, value in data.draw(st.lists(st.tuples(st.integers(0, len(damaged) - 1), st.integers(0, 255)), min_size=1, max_size=5)):
        damaged[at] = value
    content = bytes(damaged)
    try:
        info = probe(content, max_pixels=1_000_000)
        image = decode(content, info).image
    except ImageError:
        return
    assert image.shape == (info.height, info.width, 3)
    assert upright(image, info.orientation).size == image.size
    if info.verbatim:
        check(content, info)


@pytest.mark.parametrize("start", ["png", "jpeg", "webp", "gif", "bmp", "tiff"])
@settings(deadline=None, max_examples=60)
@given(rest=st.binary(max_size=300))
def test_any_bytes_give_an_image_error(start: str, rest: bytes) -> None:
    with pytest.raises(ImageError):
        decode(FILES[start][:12] + rest, probe(FILES[start][:12] + rest, max_pixels=1_000_000))


# --- orientation


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("shape", [(4, 6, 3), (4, 6), (4, 6, 1), (1, 5, 3)])
def test_upright_is_what_pillow_shows(orientation: int, shape: tuple[int, ...]) -> None:
    image = np.arange(np.prod(shape), dtype=np.uint8).reshape(shape)
    shown = upright(image, orientation)
    source = Image.fromarray(image[..., 0] if shape[-1] == 1 else image)
    source.getexif()[0x0112] = orientation
    expected = np.asarray(ImageOps.exif_transpose(source))
    np.testing.assert_array_equal(shown, expected.reshape(expected.shape[:2] + shape[2:]))
    assert shown.flags.c_contiguous


def test_upright_knows_eight_orientations() -> None:
    with pytest.raises(ValueError, match="1 to 8, found 9"):
        upright(PICTURE, 9)


def oriented(kind: str, orientation: int, order: str, tag_kind: int = 3) -> bytes:
    block = exif(orientation, order, tag_kind)
    if kind == "jpeg":
        return with_exif(FILES["jpeg"], block)
    if kind == "webp":
        return webp_with_exif(FILES["webp"], block, 60, 40)
    chunk = png_chunk(b"eXIf", block)
    return png_of(PICTURE, color=2, bits=8, **{"after" if kind == "png after" else "before": chunk})


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("kind", ["jpeg", "png", "png after", "webp"])
@pytest.mark.parametrize("orientation", [2, 3, 6, 8])
def test_orientation_is_found_and_reset_in_place(kind: str, order: str, orientation: int) -> None:
    data = oriented(kind, orientation, order)
    info = info_of(data)
    assert (info.orientation, info.width, info.height, info.verbatim) == (orientation, 60, 40, True)
    with Image.open(io.BytesIO(data)) as im:
        assert im.getexif()[0x0112] == orientation
        np.testing.assert_array_equal(decode(data, info).image, np.asarray(im))
    reset = reset_orientation(data, info)
    assert info_of(reset).orientation == 1
    changed = [i for i, (a, b) in enumerate(zip(data, reset, strict=True)) if a != b]
    assert len(changed) == 1 or ("png" in kind and changed[-1] - changed[0] < 34)  # the checksum stands behind the 34 bytes of EXIF
    check(reset, info_of(reset))
    with Image.open(io.BytesIO(reset)) as im:
        assert im.getexif()[0x0112] == 1
        np.testing.assert_array_equal(np.asarray(ImageOps.exif_transpose(im)), decode(data, info).image)


def test_orientation_as_long_and_senseless_values() -> None:
    for order in ("<", ">"):
        data = oriented("jpeg", 6, order, tag_kind=4)
        assert info_of(data).orientation == 6
        assert info_of(reset_orientation(data, info_of(data))).orientation == 1
    for value in (0, 9, 65535):
        data = oriented("jpeg", value, "<")
        assert info_of(data).orientation == 1
        with Image.open(io.BytesIO(reset_orientation(data, info_of(data)))) as im:
            assert im.getexif()[0x0112] == 1


def test_nothing_to_reset_returns_the_same_bytes() -> None:
    for name in ("jpeg", "png", "webp", "gif"):
        assert reset_orientation(FILES[name], info_of(FILES[name])) is FILES[name]
    data = oriented("jpeg", 1, ">")
    assert reset_orientation(data, info_of(data)) is data


def test_jpeg_and_upright_agree_for_all_eight() -> None:
    """The same picture stored in all eight ways comes out once."""
    back = {1: 1, 2: 2, 3: 3, 4: 4, 5: 5, 6: 8, 7: 7, 8: 6}
    for orientation in range(1, 9):
        stored = upright(PICTURE, back[orientation])
        data = save(stored, "PNG", exif=b"Exif\0\0" + exif(orientation))
        info = info_of(data)
        assert info.orientation == orientation
        np.testing.assert_array_equal(upright(decode(data, info).image, info.orientation), PICTURE)


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("values", [PICTURE, PICTURE[..., 0], GRAY16, RGB16], ids=["rgb", "gray", "gray 16", "rgb 16"])
def test_tiff_is_decoded_in_its_stored_frame(order: Any, values: np.ndarray) -> None:
    plain = tiff_of(values, order=order)
    for orientation in (3, 6):
        data = tiff_of(values, order=order, tags={274: orientation})
        info = info_of(data)
        assert (info.orientation, info.width, info.height) == (orientation, values.shape[1], values.shape[0])
        np.testing.assert_array_equal(decode(data, info).image, pixels(plain))


@pytest.mark.parametrize("block", [b"", b"II*\0", b"II*\0\xff\xff\xff\xff", b"MM\0*\0\0\0\x08\xff\xff", b"rubbish" * 3, exif(6)[:20]])
def test_a_broken_exif_block_says_nothing(block: bytes) -> None:
    data = with_exif(FILES["jpeg"], block)
    assert info_of(data).orientation == 1
    check(data, info_of(data))
    assert reset_orientation(data, info_of(data)) == data


def test_loops_in_a_tiff_end() -> None:
    data = bytearray(tiff_of(PICTURE))
    (directory,) = struct.unpack_from("<I", data, 4)
    data[-4:] = struct.pack("<I", directory)  # the next directory is the first one
    assert headers.tiff_pages(bytes(data)) == 1
    assert info_of(bytes(data)).frames == 1
