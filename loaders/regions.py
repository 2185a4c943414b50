"""How a transform is asked and called while loading: the region that it needs, the picture that it gets.

A transform is any ``transform(sample, rng) -> sample``. It may offer more:

- ``region(sample, rng) -> (y, x, height, width)``: asked before the picture is decoded, with the sample without `image` plus `height` and
  `width` of the stored picture. Only that region is read and decoded where the stored bytes allow it. The same `rng` then goes to
  ``__call__``, going on where `region` stopped.
- ``size``: (height, width), or a function ``size(height, width)`` of the region's that gives it. A JPEG may then be decoded at 1/2, 1/4 or
  1/8 as long as the region stays at least that large.

``__call__`` of such a transform gets `image` [h, w, 3] of the region, `boxes` moved along (and scaled), neither clipped nor dropped, and
`view` (y, x, scale): the image's first pixel lies at (y, x) of the stored picture, and a pixel is `scale` of its pixels wide. A sample
without `view` is a whole picture of which no region was asked. `view` is taken out of the result.

A transform whose class sets ``fills_out = True`` may find `out` beside it: memory for the image that it gives, C-contiguous [H, W, C] of
the batch's shape and dtype (often its own, not always). Where it gives this very array, no copy into the batch is made.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

SampleDict = dict[str, Any]
Transform = Callable[[SampleDict, np.random.Generator], SampleDict]
Region = tuple[int, int, int, int]
"""(y, x, height, width) in pixels of the stored picture, 0-based."""
Size = tuple[int, int]
"""(height, width) in pixels."""


class View(NamedTuple):
    """A region as it was decoded: `image` [h, w, 3], whose first pixel lies at (`y`, `x`) of the stored picture; each pixel stands for
    `scale` x `scale` of its pixels."""

    image: NDArray[Any]
    y: int
    x: int
    scale: int


def asks(transform: Transform) -> bool:
    """Whether a transform has `region` or `size`."""
    return getattr(transform, "region", None) is not None or getattr(transform, "size", None) is not None


def ask_region(
    transform: Transform, sample: SampleDict, height: int, width: int, rng: np.random.Generator, where: Callable[[], str]
) -> Region:
    """The region that `transform` wants of a picture of `height` x `width`; all of it where it has no `region`. `sample`: without image.

    Raises:
        ValueError: the answer is no region inside the picture. Exceptions of the transform say `where()` it was.
    """
    region = getattr(transform, "region", None)
    if region is None:
        return 0, 0, height, width
    try:
        answer = region({**sample, "height": height, "width": width}, rng)
    except Exception as e:
        e.add_note(f"in the transform's region of {where()}")
        raise
    try:
        y, x, h, w = (operator.index(value) for value in answer)
    except (TypeError, ValueError):
        raise ValueError(f"the transform's region of {where()} is {answer!r}, expected four ints (y, x, height, width)") from None
    if not (0 <= y < y + h <= height and 0 <= x < x + w <= width):
        raise ValueError(
            f"the transform's region of {where()} is (y, x, height, width) {(y, x, h, w)}, which is empty or leaves the picture of "
            f"(height, width) {(height, width)}"
        )
    return y, x, h, w


def least_size(transform: Transform, region: Region) -> Size | None:
    """The (height, width) below which the region must not be scaled down; None: it must not be scaled at all.

    Raises:
        ValueError: the transform's `size` is something else than two ints of at least 1, or a function that gives them.
    """
    size: Any = getattr(transform, "size", None)
    if callable(size):
        size = size(region[2], region[3])
    if size is None:
        return None
    try:
        height, width = (operator.index(value) for value in size)
    except (TypeError, ValueError):
        height = width = 0
    if height < 1 or width < 1:
        raise ValueError(f"the transform's size is {size!r}, expected (height, width) of at least 1; None where pictures keep their size")
    return height, width


def show(fields: SampleDict, view: View) -> SampleDict:
    """A sample of the view's image and `fields`; `boxes` float32 [N, 4] of the whole picture are moved and scaled along."""
    if "boxes" not in fields:
        return {"image": view.image, **fields}
    boxes = (fields["boxes"] - np.array([view.x, view.y] * 2, np.float32)) / np.float32(view.scale)
    return {"image": view.image, **fields, "boxes": boxes}


def call(
    transform: Transform,
    fields: SampleDict,
    view: View,
    rng: np.random.Generator,
    where: Callable[[], str],
    out: Callable[[], NDArray[Any] | None] | None = None,
) -> SampleDict:
    """`transform` on a view; `fields` are the rest of the sample, of the whole picture. `out`: gives memory for its image.

    Raises:
        TypeError: it returned no dict. Exceptions of the transform say `where()` it was.
    """
    sample = {**show(fields, view), "view": view[1:]} if asks(transform) else {"image": view.image, **fields}
    # Not inherited: a class derived from it may keep its image, which then must be nobody else's.
    if out is not None and "fills_out" in vars(type(transform)) and (memory := out()) is not None:
        sample["out"] = memory
    try:
        result = transform(sample, rng)
    except Exception as e:
        e.add_note(f"in the transform of {where()}")
        raise
    if not isinstance(result, dict):
        raise TypeError(f"the transform of {where()} returned {type(result).__name__}, expected the sample dict")
    result.pop("view", None)
    result.pop("out", None)
    return result


def transformed(transform: Transform, sample: SampleDict, rng: np.random.Generator, where: Callable[[], str]) -> SampleDict:
    """`transform` on a sample whose whole `image` [H, W, 3] is there already.

    Raises:
        ValueError, TypeError: as `ask_region` and `call`.
    """
    image, fields = sample["image"], {name: value for name, value in sample.items() if name != "image"}
    y, x, h, w = ask_region(transform, fields, image.shape[0], image.shape[1], rng, where)
    return call(transform, fields, View(image[y : y + h, x : x + w], y, x, 1), rng, where)
