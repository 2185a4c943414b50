"""Deterministic changes of picture and boxes, made once while packing. Random augmentation belongs to training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import cv2
import numpy as np
from numpy.typing import NDArray

Mode = Literal["letterbox", "stretch", "crop", "short", "long"]
Affine = tuple[float, float, float, float]

MODES: tuple[Mode, ...] = get_args(Mode)
IDENTITY: Affine = (1.0, 1.0, 0.0, 0.0)
# 800 MB as RGB. Only a picture of extreme aspect ratio gets there: 1x10000 pixels with mode short and 224 would become 224x2240000.
MAX_OUTPUT_PIXELS = 1 << 28


class TransformError(ValueError):
    """A picture cannot be transformed. `code` is kebab-case and stable; the message lacks the file's name."""

    code = "resize-too-large"


@dataclass(frozen=True, slots=True)
class _Geometry:
    """The region `x, y, w, h` of the input is resized to `new_w, new_h` and put at `left, top` of a canvas `out_w, out_h`."""

    x: int
    y: int
    w: int
    h: int
    new_w: int
    new_h: int
    left: int
    top: int
    out_w: int
    out_h: int

    @property
    def affine(self) -> Affine:
        sx, sy = self.new_w / self.w, self.new_h / self.h
        return sx, sy, self.left - self.x * sx, self.top - self.y * sy


@dataclass(frozen=True, slots=True)
class Resize:
    """Resize pictures, boxes along with them. Implements `packer.sample.Transform`.

    `size`: (width, height), or one number N. `mode`:

    - ``letterbox``: the whole picture, aspect kept, centred on a canvas of `size` filled with `fill` (gray, 0 to 255).
    - ``stretch``: the whole picture made to fit `size`; the aspect changes.
    - ``crop``: the largest centred part of the aspect of `size`, cut in whole pixels and then resized. For classification only:
      boxes follow the affine, out of the picture where they must.
    - ``short``, ``long``: aspect kept; the short (long) side becomes N.

    An N means (N, N) in the first three modes. Sizes are rounded half up and at least 1. The affine (sx, sy, tx, ty) is that of the
    pixels as they are resized, for pixel edges: stored = original * s + t. Pixels are averaged over their area (INTER_AREA) when
    shrinking; else interpolated linearly, since cubic makes overshoots at edges, which look like defects.
    """

    size: tuple[int, int] | int
    mode: Mode = "letterbox"
    fill: int = 114

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"resize mode is one of {', '.join(MODES)}, found {self.mode!r}")
        numbers = (self.size,) if isinstance(self.size, int) else self.size
        if len(numbers) not in (1, 2) or not all(1 <= n <= 65535 for n in numbers):
            raise ValueError(f"resize takes N or WxH, each 1 to 65535, found {self.size!r}")
        if self.mode in ("short", "long") and not isinstance(self.size, int):
            raise ValueError(f"resize mode {self.mode} takes one number (the {self.mode} side), found {self.size!r}")
        if not 0 <= self.fill <= 255:
            raise ValueError(f"fill is 0 to 255, found {self.fill}")

    def output_size(self, width: int, height: int) -> tuple[int, int]:
        """(width, height) that a picture of `width` x `height` pixels will have.

        Raises:
            TransformError: it would be larger than `MAX_OUTPUT_PIXELS`.
        """
        geometry = self._geometry(width, height)
        return geometry.out_w, geometry.out_h

    def __call__(self, image: NDArray[np.uint8], boxes: NDArray[np.float64]) -> tuple[NDArray[np.uint8], NDArray[np.float64], Affine]:
        """Resize image (uint8 [H, W, 3]) and boxes (float64 [N, 4] xyxy pixels, half-open).

        The inputs are not modified; where nothing is to be done, they are returned themselves. Boxes are neither clipped nor dropped.

        Raises:
            TransformError: the output would be larger than `MAX_OUTPUT_PIXELS`.
        """
        g = self._geometry(image.shape[1], image.shape[0])
        if (g.out_h, g.out_w) == image.shape[:2] == (g.new_h, g.new_w) == (g.h, g.w):
            return image, boxes, IDENTITY
        part = image[g.y : g.y + g.h, g.x : g.x + g.w]
        shrinks = g.new_w <= g.w and g.new_h <= g.h
        resized: Any = np.ascontiguousarray(part)
        if (g.new_h, g.new_w) != (g.h, g.w):
            resized = cv2.resize(part, (g.new_w, g.new_h), interpolation=cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR)
        if (g.out_h, g.out_w) != (g.new_h, g.new_w):
            canvas = np.full((g.out_h, g.out_w, 3), self.fill, np.uint8)
            canvas[g.top : g.top + g.new_h, g.left : g.left + g.new_w] = resized
            resized = canvas
        sx, sy, tx, ty = g.affine
        return resized, boxes * (sx, sy, sx, sy) + (tx, ty, tx, ty), g.affine

    def describe(self) -> dict[str, Any]:
        """For the manifest: JSON-able, and all that the output depends on."""
        size = self.size if isinstance(self.size, int) else list(self.size)
        return {"resize": size, "mode": self.mode} | ({"fill": self.fill} if self.mode == "letterbox" else {})

    def _geometry(self, w: int, h: int) -> _Geometry:
        if isinstance(self.size, int) and self.mode in ("short", "long"):
            side = min(w, h) if self.mode == "short" else max(w, h)
            new_w, new_h = _scaled(w, self.size, side), _scaled(h, self.size, side)
            geometry = _Geometry(0, 0, w, h, new_w, new_h, 0, 0, new_w, new_h)
        else:
            geometry = self._fixed(w, h, *((self.size, self.size) if isinstance(self.size, int) else self.size))
        if geometry.out_w * geometry.out_h > MAX_OUTPUT_PIXELS:
            raise TransformError(
                f"{w}x{h} pixels would become {geometry.out_w}x{geometry.out_h}, over the limit of {MAX_OUTPUT_PIXELS} pixels: "
                f"use mode long, letterbox or stretch for pictures of such an aspect ratio"
            )
        return geometry

    def _fixed(self, w: int, h: int, out_w: int, out_h: int) -> _Geometry:
        wide = w * out_h >= h * out_w  # wider than the target, or of its aspect: in whole numbers, so that equal means equal
        if self.mode == "letterbox":
            new_w, new_h = (out_w, _scaled(h, out_w, w)) if wide else (_scaled(w, out_h, h), out_h)
            return _Geometry(0, 0, w, h, new_w, new_h, (out_w - new_w) // 2, (out_h - new_h) // 2, out_w, out_h)
        if self.mode == "crop":
            part_w, part_h = (_scaled(h, out_w, out_h), h) if wide else (w, _scaled(w, out_h, out_w))
            return _Geometry((w - part_w) // 2, (h - part_h) // 2, part_w, part_h, out_w, out_h, 0, 0, out_w, out_h)
        return _Geometry(0, 0, w, h, out_w, out_h, 0, 0, out_w, out_h)


def _scaled(length: int, numerator: int, denominator: int) -> int:
    """length * numerator / denominator, rounded half up, at least 1."""
    return max(1, (2 * length * numerator + denominator) // (2 * denominator))
