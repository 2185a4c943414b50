from __future__ import annotations

import io
import json
from typing import Any

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from PIL import Image

from image_data import exif, picture, save, with_exif
from loaders.codecs import (
    DecodeError,
    EncodeError,
    ImagePart,
    decode_image,
    decode_jpeg_into,
    decode_meta,
    encode_image,
    encode_meta,
    float32_list,
)
from loaders.jpeg import parse_header, restart_offsets

PARTS: tuple[ImagePart, ...] = ("jpg", "png", "webp")


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("size", [(40, 60), (1, 1), (3, 200), (255, 17)])
def test_round_trip_keeps_shape_and_channels(part: ImagePart, size: tuple[int, int]) -> None:
    image = picture(*size)
    back = decode_image(encode_image(image, part, quality=95), part)
    assert back.shape == image.shape
    assert back.dtype == np.uint8
    assert back.flags.c_contiguous
    assert back.flags.writeable
    if part == "png":
        np.testing.assert_array_equal(back, image)
    red = np.zeros((32, 32, 3), np.uint8)
    red[..., 0] = 220
    assert abs(decode_image(encode_image(red, part), part).astype(int) - red).max() < 12


@pytest.mark.parametrize("part", PARTS)
def test_equal_pixels_give_equal_bytes(part: ImagePart) -> None:
    image = picture(64, 64)
    padded = np.zeros((64, 70, 3), np.uint8)
    padded[:, :64] = image
    assert encode_image(image, part) == encode_image(image.copy(), part) == encode_image(padded[:, :64], part)


@pytest.mark.parametrize("subsampling", ["420", "444", "422", "440"])
def test_our_jpegs_are_baseline_with_a_grid_and_alike_to_every_reader(subsampling: Any) -> None:
    sampling = {"420": (2, 2), "444": (1, 1), "422": (2, 1), "440": (1, 2)}[subsampling]
    for height, width in ((375, 500), (17, 16 * 13), (1, 1)):
        data = encode_image(picture(height, width), "jpg", subsampling=subsampling)
        header = parse_header(data)
        assert (header.sof, header.width, header.height) == (0xC0, width, height)
        assert (header.components[0].horizontal, header.components[0].vertical) == sampling
        assert len(restart_offsets(data)) >= 2
        ours = decode_image(data, "jpg")
        with Image.open(io.BytesIO(data)) as im:
            np.testing.assert_array_equal(np.asarray(im), ours)
        bgr = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)
        assert bgr is not None
        np.testing.assert_array_equal(bgr[..., ::-1], ours)


def test_options_of_the_encoder() -> None:
    image = picture(200, 300)
    assert len(restart_offsets(encode_image(image, "jpg", restart_grid=False))) == 0
    assert len(encode_image(image, "jpg", quality=50)) < len(encode_image(image, "jpg", quality=95))
    assert len(encode_image(image, "webp", quality=50)) < len(encode_image(image, "webp", quality=95))


@pytest.mark.parametrize(
    "image", [np.zeros((4, 4), np.uint8), np.zeros((4, 4, 4), np.uint8), np.zeros((4, 4, 3)), np.zeros((0, 4, 3), np.uint8)]
)
def test_only_rgb_bytes_are_encoded(image: Any) -> None:
    with pytest.raises(EncodeError, match="uint8"):
        encode_image(image, "png")


def test_too_large_for_the_format_or_a_wrong_quality() -> None:
    with pytest.raises(EncodeError, match="65501x1 pixels do not fit in jpg"):
        encode_image(np.zeros((1, 65501, 3), np.uint8), "jpg")
    with pytest.raises(EncodeError, match="16383 a side"):
        encode_image(np.zeros((16384, 1, 3), np.uint8), "webp")
    with pytest.raises(EncodeError, match="found 101"):
        encode_image(picture(), "jpg", quality=101)


@pytest.mark.parametrize("part", PARTS)
def test_decoding_into_a_slot(part: ImagePart) -> None:
    data = encode_image(picture(), part)
    expected = decode_image(data, part)
    batch = np.zeros((3, 40, 60, 3), np.uint8)
    result = decode_image(memoryview(data), part, batch[1])
    assert np.shares_memory(result, batch)
    np.testing.assert_array_equal(batch[1], expected)
    assert not batch[0].any()
    assert not batch[2].any()


def test_a_jpeg_is_decoded_into_a_slot_of_its_shape_or_refused() -> None:
    data = memoryview(encode_image(picture(), "jpg"))
    slot = np.zeros((40, 60, 3), np.uint8)
    assert decode_jpeg_into(data, slot)
    np.testing.assert_array_equal(slot, decode_image(data, "jpg"))
    for shape in ((60, 40, 3), (80, 60, 3), (40, 59, 3)):
        assert not decode_jpeg_into(data, np.zeros(shape, np.uint8))
    for wrong in (b"", data[:-20], data[:300], encode_image(picture(), "png"), encode_image(picture(), "webp")):
        assert not decode_jpeg_into(memoryview(wrong), slot)


@pytest.mark.parametrize("part", PARTS)
def test_a_slot_that_does_not_fit_is_left_alone(part: ImagePart) -> None:
    data = encode_image(picture(), part)
    locked = np.zeros((40, 60, 3), np.uint8)
    locked.flags.writeable = False
    slots: list[Any] = [np.zeros(s, np.uint8) for s in ((60, 40, 3), (80, 60, 3), (40, 59, 3), (40, 60))]
    slots += [np.zeros((40, 120, 3), np.uint8)[:, ::2], np.zeros((40, 60, 3), np.int16), locked]
    for slot in slots:
        result = decode_image(data, part, slot)
        assert not np.shares_memory(result, slot)
        assert not slot.any()
        np.testing.assert_array_equal(result, decode_image(data, part))


def test_gray_becomes_three_channels_and_no_orientation_is_applied() -> None:
    gray = save(picture()[..., 0], "JPEG")
    assert decode_image(gray, "jpg").shape == (40, 60, 3)
    for part, data in (("jpg", with_exif(save(picture(), "JPEG"), exif(6))), ("png", save(picture(), "PNG", exif=b"Exif\0\0" + exif(6)))):
        assert decode_image(data, part).shape == (40, 60, 3)  # type: ignore[arg-type]  # a plain string in the loop


@pytest.mark.parametrize("part", PARTS)
def test_what_is_cut_short_is_refused(part: ImagePart) -> None:
    data = encode_image(picture(), part)
    slot = np.zeros((40, 60, 3), np.uint8)
    for length in {0, 1, 10, len(data) // 3, len(data) // 2, len(data) - 20, len(data) - 2}:
        for out in (None, slot):
            with pytest.raises(DecodeError, match=f"{part} of {length} bytes"):
                decode_image(data[:length], part, out)


@settings(deadline=None, max_examples=100)
@given(st.binary(max_size=100), st.sampled_from(PARTS))
def test_any_bytes_give_decode_error(data: bytes, part: ImagePart) -> None:
    start = {"jpg": b"\xff\xd8\xff", "png": b"\x89PNG\r\n\x1a\n", "webp": b"RIFF\x20\0\0\0WEBPVP8 "}[part]
    for candidate in (data, start + data):
        with pytest.raises(DecodeError):
            decode_image(candidate, part)


FLOAT32 = st.floats(width=32, allow_nan=False, allow_infinity=False)


@settings(deadline=None, max_examples=300)
@given(hnp.arrays(np.float32, st.tuples(st.integers(0, 5), st.just(4)), elements=FLOAT32))
def test_float32_survives_json_exactly(boxes: Any) -> None:
    meta = decode_meta(encode_meta({"boxes": float32_list(boxes)}))
    back = np.array(meta["boxes"], np.float32).reshape(-1, 4)
    assert back.tobytes() == boxes.tobytes()
    assert all(type(v) is float for row in meta["boxes"] for v in row)


@settings(deadline=None, max_examples=100)
@given(hnp.arrays(np.float32, 40, elements=FLOAT32))
def test_no_number_is_written_longer_than_float32_needs(values: Any) -> None:
    assert all(len(json.dumps(v)) <= len(json.dumps(float(x))) for v, x in zip(float32_list(values), values, strict=True))


def test_spelling_of_numbers() -> None:
    assert encode_meta({"b": float32_list(np.array([0.1, 10, 0.333333, 4095.75], np.float32))}) == b'{"b":[0.1,10.0,0.333333,4095.75]}'
    assert float32_list(np.zeros((0, 4), np.float32)) == []


def test_meta_round_trip_is_compact_sorted_utf8() -> None:
    meta = {"source": "шов/焊缝 1.jpg", "a": [1, 2.5, None, True], "label": 3}
    data = encode_meta(meta)
    assert data == '{"a":[1,2.5,null,true],"label":3,"source":"шов/焊缝 1.jpg"}'.encode()
    assert decode_meta(memoryview(data)) == meta


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "\udcf3"])
def test_what_json_cannot_say_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"Out of range|surrogates"):
        encode_meta({"x": value})


@pytest.mark.parametrize("data", [b"", b"{", b"[1]", b"3", b'{"a":NaN}', b'{"a":-Infinity}', b"\xff\xfe{}", b"[" * 100_000, b'{"a":1}x'])
def test_broken_meta_is_a_decode_error(data: bytes) -> None:
    with pytest.raises(DecodeError, match="json of"):
        decode_meta(data)
