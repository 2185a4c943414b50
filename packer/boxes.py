"""From what a source says to boxes of the stored picture: which frame, which unit, and whether the numbers can be true.

A box that cannot be true refuses its picture: leaving out the box alone would turn a defect into background.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from packer.sample import Annotation, Finding, Report

SLACK = 1e-3
"""Pixels that a box may stick out by rounding (fractions times a size); it is cut off without a word."""
FAR = 2
"""A fraction beyond this is no box over the edge: it is a number of pixels."""


@dataclass(slots=True)
class PlacedBoxes:
    """`boxes` float64 [N, 4] xyxy pixels, half-open, in the frame given by `upright`; `keep` int64 [N] indexes the annotation's rows."""

    boxes: NDArray[np.float64]
    keep: NDArray[np.int64]
    upright: bool


@dataclass(frozen=True, slots=True)
class Picture:
    """Size of the stored pixels and their EXIF orientation (1 to 8)."""

    path: str
    width: int
    height: int
    orientation: int

    @property
    def turned(self) -> tuple[int, int]:
        """(width, height) after the orientation is applied."""
        return (self.height, self.width) if self.orientation >= 5 else (self.width, self.height)


def place_boxes(
    picture: Picture,
    annotation: Annotation,
    report: Report,
    *,
    exif: Literal["auto", "apply", "ignore"] = "auto",
    outside: Literal["fail", "clip"] = "fail",
) -> PlacedBoxes | None:
    """Check all boxes of a picture; None when it must be left out (one `skip` finding per kind of fault was reported)."""
    if _plainly_sound(picture, annotation):
        return PlacedBoxes(annotation.boxes, np.arange(len(annotation.boxes)), exif != "ignore")
    say = _Speaker(picture, annotation, report)
    finite = np.asarray(np.isfinite(annotation.boxes).all(axis=1))
    # In the place of a box that is no box, one without any fault, so that the others are judged all the same.
    raw = np.where(finite[:, None], annotation.boxes, [0, 0, 1, 1])
    upright = _frame(picture, annotation, raw, exif, say)
    width, height = picture.turned if upright else (picture.width, picture.height)
    with np.errstate(over="ignore"):
        boxes = raw * [width, height, width, height] if annotation.normalized else raw
    clipped = np.clip(boxes, 0, [width, height, width, height])
    beyond = np.maximum(-boxes[:, :2], boxes[:, 2:] - [width, height]).max(1, initial=-np.inf)
    flat, suspect = _no_area(raw), _suspect_units(raw, annotation.normalized)
    # As it is stored: nothing may be left of a box that lies on the edge, or that is narrower than float32 can tell.
    nothing = _no_area(clipped.astype(np.float32)) & ~flat & ~suspect
    flat |= nothing & (beyond <= 0)
    gone = nothing & (beyond > 0)
    out = ((beyond > SLACK) & ~flat & ~suspect) | gone
    refused = gone if outside == "clip" else out
    if not finite.all():
        say.boxes("skip", "non-finite-box", ~finite, "is not finite: NaN or infinity is no coordinate")
    if flat.any():
        say.boxes("skip", "empty-box", flat, "has no area: expected x1 < x2 and y1 < y2" + _empty_hint(raw[flat], annotation))
    if suspect.any():
        say.boxes("skip", "suspect-units", suspect, _units_hint(annotation.normalized))
    if refused.any():
        inside = f"fractions of {width}x{height} go from 0 to 1" if annotation.normalized else f"the picture is {width}x{height}"
        inside += " after its EXIF orientation" if upright and picture.orientation >= 5 else ""
        say.boxes(
            "skip", "box-outside", refused, f"reaches outside: {inside}" + ("; --boxes clip cuts such boxes" if outside == "fail" else "")
        )
    agrees = _size_agrees(picture, annotation, upright, bool(out.any()), say)
    if not agrees or not finite.all() or (flat | suspect | refused).any():
        return None
    if out.any():
        say.boxes("warning", "box-clipped", out, f"reached outside and was cut to the picture's {width}x{height}")
    keep = _without_copies(clipped, annotation, say)
    return PlacedBoxes(clipped[keep], keep, upright)


def _plainly_sound(picture: Picture, annotation: Annotation) -> bool:
    """The common case, a quarter of the time: nothing to turn, to scale or to say. What is not plainly sound is looked at closely."""
    if picture.orientation != 1 or annotation.normalized or annotation.size not in (None, (picture.width, picture.height)):
        return False
    seen = set()
    for x1, y1, x2, y2 in annotation.boxes.tolist():
        # A side of a pixel or more is no rounding and no fraction of a normalized box.
        if not (0 <= x1 <= x2 - 1 and 0 <= y1 <= y2 - 1 and x2 <= picture.width and y2 <= picture.height) or x2 <= 1 or y2 <= 1:
            return False
        seen.add((x1, y1, x2, y2))
    return len(seen) == len(annotation.boxes)


def _no_area(boxes: NDArray[Any]) -> NDArray[np.bool_]:
    return np.asarray((boxes[:, :2] >= boxes[:, 2:]).any(axis=1))


def _suspect_units(raw: NDArray[np.float64], normalized: bool) -> NDArray[np.bool_]:
    """Boxes in the other unit than the declared one, by all appearances: as they got into the wrong file, or under a wrong option."""
    if normalized:
        return np.asarray((np.abs(raw) > FAR).any(axis=1))
    return np.asarray((raw >= 0).all(axis=1) & (raw <= 1).all(axis=1) & (raw != np.round(raw)).any(axis=1) & ~_no_area(raw))


def _units_hint(normalized: bool) -> str:
    if normalized:
        return 'lies far outside 0 to 1, yet fractions are declared: if these are pixels, say coords = "pixel"'
    return 'lies within 0 to 1, yet pixels are declared: if these are fractions, say coords = "normalized"'


def _empty_hint(raw: NDArray[np.float64], annotation: Annotation) -> str:
    if annotation.lines:
        return "; corners in another order, or width and height in their place?"
    touching = ((raw[:, 0] == raw[:, 2]) | (raw[:, 1] == raw[:, 3])).any()
    return (
        "; in the VOC devkit's convention (1-based, inclusive) it is one pixel wide: say origin = 1"
        if touching
        else "; are xmax, ymax a width and height?"
    )


def _frame(picture: Picture, annotation: Annotation, boxes: NDArray[np.float64], exif: str, say: _Speaker) -> bool:
    """True: boxes are in the upright picture. Without boxes a picture is turned upright."""
    if exif != "auto" or picture.orientation == 1:
        return exif != "ignore"
    if not len(boxes):
        return True
    stored, turned = (picture.width, picture.height), picture.turned
    if stored != turned and annotation.size in (stored, turned):
        return annotation.size == turned
    if stored != turned and not annotation.normalized:
        fits = [bool((boxes[:, 2:] <= np.add(frame, SLACK)).all()) for frame in (stored, turned)]
        if fits[0] != fits[1]:
            return fits[1]
    say.picture(
        "warning",
        "exif-frame-assumed",
        f"EXIF orientation {picture.orientation}, and nothing tells whether the boxes belong to the stored or the upright picture: "
        'upright is taken; exif = "ignore" takes the stored one',
    )
    return True


def _size_agrees(picture: Picture, annotation: Annotation, upright: bool, sticks_out: bool, say: _Speaker) -> bool:
    """The picture's own size wins; a declared one that differs is a warning while all boxes lie inside."""
    actual = picture.turned if upright else (picture.width, picture.height)
    if annotation.size is None or annotation.size == actual:
        return True
    sizes = f"the annotation says {annotation.size[0]}x{annotation.size[1]}, the picture is {actual[0]}x{actual[1]}"
    if sticks_out:
        say.picture("skip", "size-mismatch", f"{sizes}, and boxes reach outside: they belong to another resolution")
        return False
    say.picture("warning", "size-mismatch", f"{sizes}; all boxes lie inside, the picture's own size is taken")
    return True


def _without_copies(boxes: NDArray[np.float64], annotation: Annotation, say: _Speaker) -> NDArray[np.int64]:
    """Row numbers without exact copies (same class, same box); the first of each stays."""
    seen: dict[tuple[float, ...], set[str]] = {}
    copy, clash = np.zeros(len(boxes), bool), np.zeros(len(boxes), bool)
    for i, (box, label) in enumerate(zip(boxes.tolist(), annotation.labels, strict=True)):
        labels = seen.setdefault(tuple(box), set())
        copy[i], clash[i] = label in labels, bool(labels) and label not in labels
        labels.add(label)
    if copy.any():
        say.boxes("warning", "duplicate-box", copy, "is a duplicate of an earlier one (same class, same numbers) and was left out")
    if clash.any():
        say.boxes("warning", "two-classes-one-box", clash, "has the same numbers as one of another class; both are kept")
    return np.flatnonzero(~copy)


class _Speaker:
    """Gives findings about one picture's boxes: one per code, naming the first box concerned."""

    def __init__(self, picture: Picture, annotation: Annotation, report: Report) -> None:
        self._picture, self._annotation, self._report = picture, annotation, report

    def boxes(self, level: Literal["skip", "warning"], code: str, where: NDArray[np.bool_], message: str) -> None:
        a, i = self._annotation, int(np.flatnonzero(where)[0])
        numbers = ", ".join(f"{v:g}" for v in a.boxes[i])
        self._report(
            Finding(
                level,
                code,
                a.path,
                f"{a.places[i]}: box [{numbers}] ({a.labels[i]}) {message}",
                sample=self._picture.path,
                line=a.lines[i] if a.lines else None,
                object=None if a.lines else i + 1,
                count=int(where.sum()),
            )
        )

    def picture(self, level: Literal["skip", "warning"], code: str, message: str) -> None:
        self._report(Finding(level, code, self._annotation.path, message, sample=self._picture.path))
