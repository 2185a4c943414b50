"""Random augmentation while training, with boxes: crops, flips, letterbox, affine; and `Tiles` for evaluation.

Each transform is ``transform(sample, rng) -> sample``, as ``ShardDataset(transform=...)`` and `MemmapDataset` take it, and can be pickled.
All randomness comes from the `rng` given. The crops offer `region` and `size` (see `loaders.regions`): put one first in a `Compose`, and
only the part of a picture that it needs is read and decoded.

`image` [H, W, 3] keeps its dtype. Boxes are xyxy pixels, half-open; `labels` and `difficult` are dropped along with them. Arguments that
several have in common: `size`: (height, width) of the output, or one number for both. `min_visible`: a box is dropped when less than this
share of its area is left in the picture. `fill`: the value of pixels outside the picture. `flip`: the probability of a horizontal flip.
`interpolation`: "linear" (`cv2.INTER_LINEAR`) or "area" (`cv2.INTER_AREA`: averages over all pixels when shrinking; slower).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import cv2
import numpy as np
from numpy.typing import NDArray

from loaders.boxes import clip_boxes, clipped, visible_shares
from loaders.regions import Region, SampleDict, Size, Transform, transformed
from loaders.tiles import Tiles

__all__ = ["Compose", "Flip", "Letterbox", "RandomAffine", "RandomCrop", "RandomResizedCrop", "Tiles"]

Interpolation = Literal["linear", "area"]
_ATTEMPTS = 10


class Compose:
    """Several transforms, one after the other, with one `rng`. `region` and `size` are those of the first one."""

    def __init__(self, *transforms: Transform) -> None:
        self.transforms = transforms
        self.region: Callable[[SampleDict, np.random.Generator], Region] | None = None
        self.size: Any = None
        if transforms:
            self.region = getattr(transforms[0], "region", None)
            self.size = getattr(transforms[0], "size", None)

    def __call__(self, sample: SampleDict, rng: np.random.Generator) -> SampleDict:
        for number, transform in enumerate(self.transforms):
            if number == 0:
                sample = transform(sample, rng)
                sample.pop("view", None)  # it would tell a later crop that its region was cut already
            else:
                sample = transformed(transform, sample, rng, partial(_inside, transform))
        return sample


def _inside(transform: Transform) -> str:
    return f"{type(transform).__name__}, inside Compose"


class RandomResizedCrop:
    """A random part of the picture, resized to `size`; as torchvision's.

    The part has a share of the picture's area drawn from `scale`, and an aspect ratio (width / height) drawn from `ratio`, logarithmically;
    where ten draws do not fit into the picture, the largest centred part within `ratio` is taken.
    """

    fills_out = True

    def __init__(
        self,
        size: int | Size,
        scale: tuple[float, float] = (0.08, 1.0),
        ratio: tuple[float, float] = (3 / 4, 4 / 3),
        flip: float = 0.5,
        *,
        min_visible: float = 0.1,
        interpolation: Interpolation = "linear",
    ) -> None:
        self.size = _size(size)
        self.scale, self.ratio, self.flip = _range("scale", scale, 1.0), _range("ratio", ratio), _share("flip", flip)
        self.min_visible, self.interpolation = _share("min_visible", min_visible), _interpolation(interpolation)

    def region(self, sample: SampleDict, rng: np.random.Generator) -> Region:
        height, width = sample["height"], sample["width"]
        (least, most), low, high = self.scale, math.log(self.ratio[0]), math.log(self.ratio[1])
        for _ in range(_ATTEMPTS):
            area = height * width * (least + (most - least) * rng.random())
            ratio = math.exp(low + (high - low) * rng.random())
            h, w = round(math.sqrt(area / ratio)), round(math.sqrt(area * ratio))
            if 0 < h <= height and 0 < w <= width:
                return _corner(rng, height - h), _corner(rng, width - w), h, w
        h = min(height, max(1, round(width / self.ratio[0])))
        w = min(width, max(1, round(height * self.ratio[1])))
        return (height - h) // 2, (width - w) // 2, h, w

    def __call__(self, sample: SampleDict, rng: np.random.Generator) -> SampleDict:
        if "view" not in sample:
            return transformed(self, sample, rng, lambda: "RandomResizedCrop")
        image, flip, out = sample["image"], rng.random() < self.flip, sample.get("out")
        h, w = image.shape[:2]
        result = {**sample}
        if flip and h * w < math.prod(self.size) and image.dtype == np.uint8 and self.interpolation == "linear":
            # The smaller one of both is mirrored. The pixels are the same, or a level of rounding apart where OpenCV's weights are.
            result["image"] = _resized(cv2.flip(image, 1), self.size, self.interpolation, out)
        else:
            resized = _resized(image, self.size, self.interpolation, None if flip else out)
            result["image"] = _mirrored(resized, True, False, out) if flip else resized
        if "boxes" in sample:
            scale = np.array([self.size[1] / w, self.size[0] / h] * 2)
            result.update(clipped(sample, sample["boxes"] * scale, self.size, self.min_visible))
            if flip:
                _mirror_boxes(result, self.size, True, False)
        return result


class RandomCrop:
    """A random part of `size`, pixel by pixel: nothing is resized. A smaller picture is put at a random place on a canvas of `fill`.

    Args:
        keep_box: take a part that shows `min_visible` of at least one box, where the picture has one; then no such sample loses all.
        centre_on_box: probability of putting the part's centre on a box chosen at random, instead of anywhere.
        jitter: by how much, in part sizes, that centre may be off at most, so that objects are not always in the middle.
    """

    def __init__(
        self,
        size: int | Size,
        flip: float = 0.0,
        *,
        min_visible: float = 0.1,
        keep_box: bool = False,
        centre_on_box: float = 0.0,
        jitter: float = 0.25,
        fill: int = 114,
    ) -> None:
        self.size, self.flip, self.fill = _size(size), _share("flip", flip), fill
        self.min_visible, self.keep_box = _share("min_visible", min_visible), keep_box
        self.centre_on_box, self.jitter = _share("centre_on_box", centre_on_box), _share("jitter", jitter)

    def region(self, sample: SampleDict, rng: np.random.Generator) -> Region:
        free = sample["height"] - min(self.size[0], sample["height"]), sample["width"] - min(self.size[1], sample["width"])
        size = sample["height"] - free[0], sample["width"] - free[1]
        boxes = sample.get("boxes")
        if boxes is not None and len(boxes):
            if self.centre_on_box and rng.random() < self.centre_on_box:
                return self._on_box(boxes, free, size, self.jitter, rng)
            if self.keep_box:
                for _ in range(_ATTEMPTS):
                    y, x = _corner(rng, free[0]), _corner(rng, free[1])
                    if (visible_shares(boxes, (y, x, *size)) >= max(self.min_visible, 1e-6)).any():
                        return y, x, *size
                return self._on_box(boxes, free, size, 0.0, rng)
        return _corner(rng, free[0]), _corner(rng, free[1]), *size

    def _on_box(self, boxes: NDArray[np.float32], free: Size, size: Size, jitter: float, rng: np.random.Generator) -> Region:
        x0, y0, x1, y1 = boxes[rng.integers(len(boxes))].tolist()
        y = (y0 + y1 - size[0]) / 2 + size[0] * jitter * rng.uniform(-1, 1)
        x = (x0 + x1 - size[1]) / 2 + size[1] * jitter * rng.uniform(-1, 1)
        return min(max(round(y), 0), free[0]), min(max(round(x), 0), free[1]), *size

    def __call__(self, sample: SampleDict, rng: np.random.Generator) -> SampleDict:
        if "view" not in sample:
            return transformed(self, sample, rng, lambda: "RandomCrop")
        image = sample["image"]
        h, w = image.shape[:2]
        top, left = _corner(rng, self.size[0] - h), _corner(rng, self.size[1] - w)
        result = {**sample, "image": _on_canvas(image, self.size, (top, left), self.fill)}
        if "boxes" in sample:
            inside = clip_boxes(sample["boxes"], (h, w), self.min_visible, self.keep_box)
            result.update(inside.fields(sample, (left, top)))
        return _flipped(result, rng.random() < self.flip, False)


class Flip:
    """Mirror left and right with probability `horizontal`, top and bottom with probability `vertical`."""

    def __init__(self, horizontal: float = 0.5, vertical: float = 0.0) -> None:
        self.horizontal, self.vertical = _share("horizontal", horizontal), _share("vertical", vertical)

    def __call__(self, sample: SampleDict, rng: np.random.Generator) -> SampleDict:
        across, down = rng.random(2).tolist()
        return _flipped(dict(sample), across < self.horizontal, down < self.vertical)


class Letterbox:
    """The whole picture, resized to fit into `size` with its aspect kept, centred on a canvas of `fill`. Draws nothing.

    Adds `affine` float64 [4] (sx, sy, tx, ty): output = stored * s + t, for x and y; what is found in the output can be mapped back.
    """

    def __init__(self, size: int | Size, fill: int = 114, interpolation: Interpolation = "linear") -> None:
        self.canvas, self.fill, self.interpolation = _size(size), fill, _interpolation(interpolation)

    def size(self, height: int, width: int) -> Size:
        """(height, width) that a picture of `height` x `width` has on the canvas."""
        h, w = self.canvas
        if width * h >= height * w:
            return max(1, (2 * height * w + width) // (2 * width)), w
        return h, max(1, (2 * width * h + height) // (2 * height))

    def __call__(self, sample: SampleDict, rng: np.random.Generator) -> SampleDict:
        del rng
        image = sample["image"]
        y, x, scale = sample.get("view", (0, 0, 1))
        h, w = image.shape[:2]
        new = self.size(h, w)
        top, left = (self.canvas[0] - new[0]) // 2, (self.canvas[1] - new[1]) // 2
        by, move = np.array([new[1] / w, new[0] / h]), np.array([left, top], np.float64)
        result = {**sample, "image": _on_canvas(_resized(image, new, self.interpolation), self.canvas, (top, left), self.fill)}
        result["affine"] = np.concatenate((by / scale, move - np.array([x, y]) * by / scale))
        if "boxes" in sample:
            result["boxes"] = (sample["boxes"] * np.tile(by, 2) + np.tile(move, 2)).astype(np.float32)
        return result


class RandomAffine:
    """The whole picture fitted into `size`, then turned, sheared, scaled, shifted and flipped at random, in one interpolation.

    Args:
        degrees: turned by up to this angle, either way.
        scale: range of the factor by which the fitted picture is enlarged.
        translate: shifted by up to this share of `size`, either way.
        shear: sheared by up to this angle in degrees, either way, along x and along y.

    A box becomes the smallest upright one that holds its turned corners.
    """

    def __init__(
        self,
        size: int | Size,
        degrees: float = 10.0,
        scale: tuple[float, float] = (0.8, 1.25),
        translate: float = 0.1,
        shear: float = 0.0,
        flip: float = 0.5,
        *,
        min_visible: float = 0.1,
        fill: int = 114,
    ) -> None:
        self.canvas, self.degrees, self.scale, self.fill = _size(size), degrees, _range("scale", scale), fill
        self.translate, self.shear, self.flip = _share("translate", translate), shear, _share("flip", flip)
        self.min_visible = _share("min_visible", min_visible)
        if not 0 <= shear < 90:
            raise ValueError(f"shear is {shear}, expected degrees from 0 to below 90")

    def size(self, height: int, width: int) -> Size:
        """(height, width) that a picture of `height` x `width` has at the largest scale."""
        fit = self.scale[1] * min(self.canvas[0] / height, self.canvas[1] / width)
        return max(1, math.ceil(height * fit)), max(1, math.ceil(width * fit))

    def _matrix(self, height: int, width: int, rng: np.random.Generator) -> NDArray[np.float64]:
        """[2, 3]: output = matrix @ (x, y, 1), both in pixels from the upper left corner of the first one."""
        turn, shear_x, shear_y = np.deg2rad(np.array([self.degrees, self.shear, self.shear]) * rng.uniform(-1, 1, 3)).tolist()
        zoom = rng.uniform(*self.scale) * min(self.canvas[0] / height, self.canvas[1] / width)
        shift = rng.uniform(-self.translate, self.translate, 2)
        mirror = -1.0 if rng.random() < self.flip else 1.0
        rotation = np.array([[math.cos(turn), math.sin(turn)], [-math.sin(turn), math.cos(turn)]])
        linear = zoom * rotation @ np.array([[1.0, math.tan(shear_x)], [math.tan(shear_y), 1.0]]) * [mirror, 1.0]
        canvas = np.array([self.canvas[1], self.canvas[0]], np.float64)
        offset = canvas * (0.5 + shift) - linear @ [width / 2, height / 2]
        return np.column_stack((linear, offset))

    def __call__(self, sample: SampleDict, rng: np.random.Generator) -> SampleDict:
        image = sample["image"]
        matrix = self._matrix(image.shape[0], image.shape[1], rng)
        # OpenCV counts from the centre of the first pixel.
        centred = matrix.copy()
        centred[:, 2] += matrix[:, :2] @ [0.5, 0.5] - 0.5
        warped = cv2.warpAffine(
            _cv_image(image), centred, self.canvas[::-1], flags=cv2.INTER_LINEAR, borderValue=(self.fill, self.fill, self.fill)
        )
        result = {**sample, "image": warped.astype(image.dtype, copy=False)}
        if "boxes" in sample:
            corners = sample["boxes"].astype(np.float64)[:, [0, 1, 2, 1, 0, 3, 2, 3]].reshape(-1, 4, 2)
            corners = corners @ matrix[:, :2].T + matrix[:, 2]
            boxes = np.concatenate((corners.min(1), corners.max(1)), axis=1)
            result.update(clipped(sample, boxes, self.canvas, self.min_visible))
        return result


def _corner(rng: np.random.Generator, free: int) -> int:
    return int(rng.random() * (free + 1)) if free > 0 else 0  # a sixth of the time of rng.integers


def _cv_image(image: NDArray[Any]) -> NDArray[Any]:
    return image.astype(np.float32) if image.dtype == np.float16 else image  # OpenCV interpolates no half precision


def _resized(image: NDArray[Any], size: Size, interpolation: Interpolation, out: NDArray[Any] | None = None) -> NDArray[Any]:
    """`image` at `size`: in `out`, where OpenCV finds that it fits."""
    h, w = image.shape[:2]
    if (h, w) == size:
        return image
    # INTER_AREA enlarges by repeating pixels.
    area = interpolation == "area" and size[0] <= h and size[1] <= w
    resized = cv2.resize(_cv_image(image), size[::-1], dst=out, interpolation=cv2.INTER_AREA if area else cv2.INTER_LINEAR)
    return resized.astype(image.dtype, copy=False)


def _on_canvas(image: NDArray[Any], size: Size, corner: Size, fill: int) -> NDArray[Any]:
    h, w = image.shape[:2]
    if (h, w) == size:
        return image
    canvas = np.full((*size, image.shape[2]), fill, image.dtype)
    canvas[corner[0] : corner[0] + h, corner[1] : corner[1] + w] = image
    return canvas


def _flipped(sample: SampleDict, across: bool, down: bool) -> SampleDict:
    """Mirror image and boxes of `sample`, which is changed."""
    if across or down:
        image = sample["image"]
        sample["image"] = _mirrored(image, across, down)
        if "boxes" in sample:
            _mirror_boxes(sample, image.shape[:2], across, down)
    return sample


def _mirrored(image: NDArray[Any], across: bool, down: bool, out: NDArray[Any] | None = None) -> NDArray[Any]:
    """`image` mirrored: in `out`, where OpenCV finds that it fits."""
    if image.dtype == np.float16:
        return np.ascontiguousarray(image[:: -1 if down else 1, :: -1 if across else 1])
    return cv2.flip(image, -1 if across and down else int(across), dst=out)


def _mirror_boxes(sample: SampleDict, size: Size, across: bool, down: bool) -> None:
    x0, y0, x1, y1 = sample["boxes"].T
    if across:
        x0, x1 = size[1] - x1, size[1] - x0
    if down:
        y0, y1 = size[0] - y1, size[0] - y0
    sample["boxes"] = np.stack((x0, y0, x1, y1), axis=1)


# Arguments


def _size(size: int | Size) -> Size:
    height, width = (size, size) if isinstance(size, int) else size
    if height < 1 or width < 1:
        raise ValueError(f"size is {size}, expected (height, width) of at least 1 pixel")
    return height, width


def _share(name: str, value: float) -> float:
    if not 0 <= value <= 1:
        raise ValueError(f"{name} is {value}, expected 0 to 1")
    return value


def _range(name: str, values: tuple[float, float], high: float = math.inf) -> tuple[float, float]:
    if not 0 < values[0] <= values[1] <= high:
        raise ValueError(f"{name} is {values}, expected (low, high) with 0 < low <= high" + (f" <= {high}" if high < math.inf else ""))
    return values


def _interpolation(name: Interpolation) -> Interpolation:
    if name not in ("linear", "area"):
        raise ValueError(f"interpolation is {name!r}, expected 'linear' or 'area'")
    return name
