from __future__ import annotations

import json
from typing import Any

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from image_data import picture
from packer.sample import Transform
from packer.transforms import IDENTITY, MAX_OUTPUT_PIXELS, MODES, Mode, Resize, TransformError

NO_BOXES = np.zeros((0, 4))
SIDES = st.integers(1, 120)


def resize_of(mode: Mode, n: int, size: tuple[int, int]) -> Resize:
    return Resize(n if mode in ("short", "long") else size, mode)


def test_letterbox_is_centred_and_filled() -> None:
    image = np.full((100, 200, 3), 7, np.uint8)
    out, boxes, affine = Resize((64, 64))(image, np.array([[0.0, 0, 200, 100], [50, 20, 60, 40]]))
    assert out.shape == (64, 64, 3)
    assert affine == (0.32, 0.32, 0.0, 16.0)
    assert (out[16:48] == 7).all()
    assert (out[:16] == 114).all()
    assert (out[48:] == 114).all()
    np.testing.assert_allclose(boxes, np.array([[0, 16, 64, 48], [16, 22.4, 19.2, 28.8]]))
    assert (Resize(64, fill=0)(image, NO_BOXES)[0][0] == 0).all()


def test_letterbox_affine_is_that_of_the_rounded_size() -> None:
    _, boxes, affine = Resize((100, 100))(np.zeros((7, 30, 3), np.uint8), np.array([[0.0, 0, 30, 7]]))
    assert affine == (100 / 30, 23 / 7, 0.0, 38.0)  # 7 * 100 / 30 = 23.3 becomes 23
    np.testing.assert_allclose(boxes, [[0, 38, 100, 61]])


def test_sizes_of_all_modes() -> None:
    assert Resize((320, 240), "letterbox").output_size(99, 1) == (320, 240)
    assert Resize((320, 240), "stretch").output_size(99, 1) == (320, 240)
    assert Resize((320, 240), "crop").output_size(99, 1) == (320, 240)
    assert Resize(50, "stretch").output_size(10, 20) == (50, 50)
    assert Resize(256, "short").output_size(500, 375) == (341, 256)
    assert Resize(256, "short").output_size(375, 500) == (256, 341)
    assert Resize(256, "long").output_size(500, 375) == (256, 192)
    assert Resize(3, "long").output_size(2, 1) == (3, 2)  # 1.5 is rounded up
    assert Resize(8, "long").output_size(10000, 1) == (8, 1)


def test_crop_takes_the_centre() -> None:
    image = picture(40, 100)
    out, _, affine = Resize((40, 40), "crop")(image, NO_BOXES)
    np.testing.assert_array_equal(out, image[:, 30:70])
    assert affine == (1.0, 1.0, -30.0, 0.0)
    assert out.flags.c_contiguous


def test_nothing_to_do_returns_the_inputs() -> None:
    image, boxes = picture(40, 60), np.array([[1.0, 2, 3, 4]])
    for transform in (*(Resize((60, 40), m) for m in ("letterbox", "stretch", "crop")), Resize(40, "short"), Resize(60, "long")):
        out, moved, affine = transform(image, boxes)
        assert out is image
        assert moved is boxes
        assert affine == IDENTITY


def test_padding_without_scaling_keeps_the_pixels() -> None:
    image = picture(40, 60)
    out, boxes, affine = Resize((60, 50))(image, np.array([[1.0, 2, 3, 4]]))
    np.testing.assert_array_equal(out[5:45], image)
    assert affine == (1.0, 1.0, 0.0, 5.0)
    np.testing.assert_array_equal(boxes, [[1, 7, 3, 9]])


def test_area_when_shrinking_and_linear_when_growing() -> None:
    image = picture(64, 96)
    down = Resize((30, 20), "stretch")(image, NO_BOXES)[0]
    np.testing.assert_array_equal(down, cv2.resize(image, (30, 20), interpolation=cv2.INTER_AREA))
    one_side = Resize((96, 20), "stretch")(image, NO_BOXES)[0]
    np.testing.assert_array_equal(one_side, cv2.resize(image, (96, 20), interpolation=cv2.INTER_AREA))
    for size in ((200, 100), (96, 65), (200, 20)):
        out = Resize(size, "stretch")(image, NO_BOXES)[0]
        np.testing.assert_array_equal(out, cv2.resize(image, size, interpolation=cv2.INTER_LINEAR))


@settings(deadline=None, max_examples=150)
@given(st.sampled_from(MODES), st.integers(1, 100), st.tuples(SIDES, SIDES), SIDES, SIDES, st.data())
def test_affine_maps_corners_boxes_and_back(
    mode: Mode, n: int, size: tuple[int, int], width: int, height: int, data: st.DataObject
) -> None:
    transform: Transform = resize_of(mode, n, size)
    image = np.zeros((height, width, 3), np.uint8)
    xs = sorted(data.draw(st.tuples(st.floats(0, width), st.floats(0, width))))
    ys = sorted(data.draw(st.tuples(st.floats(0, height), st.floats(0, height))))
    boxes = np.array([[0.0, 0, width, height], [xs[0], ys[0], xs[1], ys[1]]])
    before = boxes.copy()
    out, moved, (sx, sy, tx, ty) = transform(image, boxes)
    np.testing.assert_array_equal(boxes, before)
    assert (out.shape[1], out.shape[0]) == transform.output_size(width, height)
    assert min(out.shape) >= 1
    assert out.dtype == np.uint8
    assert out.flags.c_contiguous
    assert moved.dtype == np.float64
    scale, shift = np.array([sx, sy, sx, sy]), np.array([tx, ty, tx, ty])
    np.testing.assert_allclose(moved, boxes * scale + shift, atol=1e-9)
    np.testing.assert_allclose((moved - shift) / scale, boxes, atol=1e-6)
    np.testing.assert_allclose((moved.astype(np.float32) - shift) / scale, boxes, atol=1e-3)
    if mode in ("stretch", "short", "long"):
        np.testing.assert_allclose(moved[0], [0, 0, out.shape[1], out.shape[0]], atol=1e-9)
    if mode == "letterbox":
        assert (moved[0, :2] >= 0).all()
        assert (moved[0, 2:] <= np.array(out.shape[1::-1]) + 1e-9).all()
        np.testing.assert_allclose(moved[0], np.round(moved[0]), atol=1e-9)


@settings(deadline=None, max_examples=150)
@given(st.sampled_from(MODES), st.integers(20, 200), st.tuples(st.integers(20, 200), st.integers(20, 200)), st.data())
def test_a_drawn_rectangle_stays_in_its_box(mode: Mode, n: int, size: tuple[int, int], data: st.DataObject) -> None:
    width, height = data.draw(st.tuples(st.integers(60, 300), st.integers(60, 300)))
    x1, y1 = data.draw(st.tuples(st.integers(5, width - 40), st.integers(5, height - 40)))
    x2, y2 = x1 + data.draw(st.integers(20, 35)), y1 + data.draw(st.integers(20, 35))
    image = np.zeros((height, width, 3), np.uint8)
    image[y1:y2, x1:x2] = 255
    out, moved, (sx, sy, _, _) = resize_of(mode, n, size)(image, np.array([[x1, y1, x2, y2]], np.float64))
    box = np.clip(moved[0], 0, [out.shape[1], out.shape[0]] * 2)
    if (box[2:] - box[:2] < 2).any():
        return  # cropped away or too thin to find
    ys, xs = np.nonzero(out[..., 0] > 127)  # the fill is 114
    drawn = np.array([xs.min(), ys.min(), xs.max() + 1, ys.max() + 1])
    np.testing.assert_allclose(drawn, box, atol=1.01)
    assert min(sx, sy) > 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [(1, 5000), (5000, 1), (1, 1), (2, 3)])
def test_extreme_shapes(mode: Mode, shape: tuple[int, int]) -> None:
    image = np.full((*shape, 3), 9, np.uint8)
    transform = resize_of(mode, 16, (24, 16))
    out, _, _ = transform(image, NO_BOXES)
    assert (out.shape[1], out.shape[0]) == transform.output_size(shape[1], shape[0])
    assert (out == 9).any()


def test_a_picture_that_would_become_gigantic_is_refused() -> None:
    transform = Resize(1000, "short")
    for act in (lambda: transform.output_size(1, 10_000), lambda: transform(np.zeros((10_000, 1, 3), np.uint8), NO_BOXES)):
        with pytest.raises(TransformError, match=f"1x10000 pixels would become 1000x10000000, over the limit of {MAX_OUTPUT_PIXELS}"):
            act()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"size": (10, 10), "mode": "short"}, "mode short takes one number"),
        ({"size": 10, "mode": "fit"}, "one of letterbox, stretch, crop, short, long, found 'fit'"),
        ({"size": 0}, "found 0"),
        ({"size": (10, 70000)}, "70000"),
        ({"size": (1, 2, 3)}, "N or WxH"),
        ({"size": 10, "fill": 256}, "found 256"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Resize(**options)


def test_description_is_json_and_complete() -> None:
    assert Resize((64, 32)).describe() == {"resize": [64, 32], "mode": "letterbox", "fill": 114}
    assert Resize(64, "short").describe() == {"resize": 64, "mode": "short"}
    assert json.loads(json.dumps(Resize(9, "crop").describe())) == {"resize": 9, "mode": "crop"}
