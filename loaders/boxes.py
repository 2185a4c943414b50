"""What is left of boxes inside a picture. Boxes are [N, 4] xyxy pixels, 0-based, half-open."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from loaders.regions import Region, SampleDict, Size

_TOLERANCE = 1e-6  # of a share of the area: boxes are float32


class Clipped(NamedTuple):
    """`boxes` float64 [M, 4], the kept ones, clipped; `keep` bool [N]: which of the old ones they are."""

    boxes: NDArray[np.float64]
    keep: NDArray[np.bool_]

    def fields(self, sample: SampleDict, move: tuple[int, int] = (0, 0)) -> SampleDict:
        """The ragged fields of `sample` that are left, its boxes moved by (x, y)."""
        boxes = (self.boxes + np.array([*move, *move])).astype(np.float32)
        return {"boxes": boxes, **{name: sample[name][self.keep] for name in ("labels", "difficult") if name in sample}}


def visible_shares(boxes: NDArray[Any], region: Region) -> NDArray[np.float64]:
    """Which share of each box's area lies inside a region, float64 [N], 0 to 1; 0 for a box without area."""
    y, x, h, w = region
    corners = boxes.astype(np.float64)
    inside = np.clip(corners, [x, y, x, y], [x + w, y + h, x + w, y + h])
    area, visible = ((b[:, 2] - b[:, 0]) * (b[:, 3] - b[:, 1]) for b in (corners, inside))
    return np.divide(visible, area, out=np.zeros(len(corners)), where=area > 0)


def clip_boxes(boxes: NDArray[Any], size: Size, min_visible: float, keep_one: bool = False) -> Clipped:
    """Clip to a picture of `size` (h, w); drop boxes of which nothing, or less than `min_visible` of the area, is left.

    `keep_one`: where that would drop all, the one of which the largest share is left stays (if any is).
    """
    shares = visible_shares(boxes, (0, 0, *size))
    keep = (shares > 0) & (shares >= min_visible - _TOLERANCE)
    if keep_one and not keep.any() and (shares > 0).any():
        keep[shares.argmax()] = True
    h, w = size
    return Clipped(np.clip(boxes[keep].astype(np.float64), 0, [w, h, w, h]), keep)


def clipped(sample: SampleDict, boxes: NDArray[Any], size: Size, min_visible: float) -> SampleDict:
    """The ragged fields of `sample`, with `boxes` in place of its own, clipped to a picture of `size` (h, w)."""
    return clip_boxes(boxes, size, min_visible).fields(sample)
