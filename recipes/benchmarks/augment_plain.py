"""RandomResizedCrop and flip as every contestant but the package does them: with OpenCV, on the decoded picture. NumPy and OpenCV only."""

from __future__ import annotations

import math
import random
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)


def decode(data: bytes | NDArray[np.uint8]) -> NDArray[np.uint8]:
    """RGB uint8 [H, W, 3], the way that costs least: OpenCV 4.11 and later write RGB without a second pass."""
    array = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else data
    flag: int | None = getattr(cv2, "IMREAD_COLOR_RGB", None)
    if flag is not None:
        image: Any = cv2.imdecode(array, flag | cv2.IMREAD_IGNORE_ORIENTATION)
        return image  # type: ignore[no-any-return]  # OpenCV's stubs allow any dtype
    bgr: Any = cv2.imdecode(array, cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION)
    rgb: Any = cv2.cvtColor(bgr, cv2.COLOR_BGR2RGB, dst=bgr)
    return rgb  # type: ignore[no-any-return]  # as above


def crop_region(height: int, width: int, rng: random.Random) -> tuple[int, int, int, int]:
    """(y, x, h, w): as torchvision's RandomResizedCrop draws it."""
    low, high = math.log(RATIO[0]), math.log(RATIO[1])
    for _ in range(10):
        area, ratio = height * width * rng.uniform(*SCALE), math.exp(rng.uniform(low, high))
        h, w = round(math.sqrt(area / ratio)), round(math.sqrt(area * ratio))
        if 0 < h <= height and 0 < w <= width:
            return rng.randint(0, height - h), rng.randint(0, width - w), h, w
    h, w = min(height, round(width / RATIO[0])), min(width, round(height * RATIO[1]))
    return (height - h) // 2, (width - w) // 2, h, w


def random_resized_crop(image: NDArray[Any], size: int, rng: random.Random, out: NDArray[Any] | None = None) -> NDArray[Any]:
    """[size, size, 3], bilinear, flipped every second time; into `out` where it is given."""
    y, x, h, w = crop_region(image.shape[0], image.shape[1], rng)
    part = image[y : y + h, x : x + w]
    if rng.random() < 0.5:
        part = cv2.resize(part, (size, size), interpolation=cv2.INTER_LINEAR)
        return cv2.flip(part, 1, dst=out)
    return cv2.resize(part, (size, size), dst=out, interpolation=cv2.INTER_LINEAR)


def letterbox(image: NDArray[Any], size: int, area: bool = False, fill: int = 114) -> tuple[NDArray[Any], float, int, int]:
    """[size, size, 3] on a canvas of `fill`, with scale and offsets (x, y): new = old * scale + offset."""
    h, w = image.shape[:2]
    scale = min(size / h, size / w)
    nh, nw = round(h * scale), round(w * scale)
    canvas = np.full((size, size, 3), fill, np.uint8)
    y, x = (size - nh) // 2, (size - nw) // 2
    canvas[y : y + nh, x : x + nw] = cv2.resize(image, (nw, nh), interpolation=cv2.INTER_AREA if area else cv2.INTER_LINEAR)
    return canvas, scale, x, y
