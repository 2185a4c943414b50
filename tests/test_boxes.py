"""Frames, units, edges and copies of boxes: what is packed, what is said, and what leaves a picture out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packer.boxes import SLACK, Picture, PlacedBoxes, place_boxes
from packer.sample import Annotation, Finding

W, H = 64, 48
GOOD = (10.0, 12.0, 30.0, 24.0)
NARROW = (10.0, 12.0, 47.0, 40.0)  # fits 64x48 and 48x64
WIDE = (10.0, 12.0, 60.0, 40.0)  # fits 64x48 only
HIGH = (10.0, 12.0, 40.0, 60.0)  # fits 48x64 only


def annotation(boxes: Sequence[Sequence[float]], labels: Sequence[str] | None = None, **fields: Any) -> Annotation:
    n = len(boxes)
    return Annotation(
        "annotations/a.xml",
        boxes=np.array(boxes, np.float64).reshape(-1, 4),
        labels=list(labels or ["crack"] * n),
        places=[f"object {i + 1}" for i in range(n)],
        **fields,
    )


def place(said: Annotation, orientation: int = 1, size: tuple[int, int] = (W, H), **rules: Any) -> tuple[PlacedBoxes | None, list[Finding]]:
    findings: list[Finding] = []
    return place_boxes(Picture("images/a.jpg", *size, orientation), said, findings.append, **rules), findings


def packed(said: Annotation, orientation: int = 1, size: tuple[int, int] = (W, H), **rules: Any) -> PlacedBoxes:
    """Placed without a word."""
    placed, findings = place(said, orientation, size, **rules)
    assert findings == []
    assert placed is not None
    return placed


def refused(said: Annotation, orientation: int = 1, **rules: Any) -> list[Finding]:
    placed, findings = place(said, orientation, **rules)
    assert placed is None
    assert {f.level for f in findings} >= {"skip"}
    return findings


def warned(said: Annotation, orientation: int = 1, **rules: Any) -> tuple[PlacedBoxes, Finding]:
    placed, findings = place(said, orientation, **rules)
    assert placed is not None
    assert [f.level for f in findings] == ["warning"]
    return placed, findings[0]


def test_good_boxes_come_out_as_they_went_in() -> None:
    said = annotation([GOOD, (0, 0, W, H), (0.25, 3.5, 7.75, 9)], ["crack", "slag", "crack"], size=(W, H))
    placed = packed(said)
    assert placed.boxes.dtype == np.float64
    assert placed.boxes.tolist() == said.boxes.tolist()
    assert placed.keep.tolist() == [0, 1, 2]
    assert placed.upright


def test_no_boxes_are_shape_0_4() -> None:
    placed = packed(annotation([]))
    assert placed.boxes.shape == (0, 4)
    assert placed.keep.shape == (0,)


def test_the_annotation_is_not_changed() -> None:
    said = annotation([(-5, 2, 70, 30), (np.nan, 0, 1, 1)], size=(W, H))
    before = said.boxes.copy()
    place(said, outside="clip")
    np.testing.assert_array_equal(said.boxes, before)


# Frames ---------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("orientation", range(1, 9))
def test_turned_swaps_the_sides_from_orientation_5_on(orientation: int) -> None:
    assert Picture("a", W, H, orientation).turned == ((H, W) if orientation >= 5 else (W, H))


@pytest.mark.parametrize("orientation", [5, 6, 7, 8])
@pytest.mark.parametrize(("size", "upright"), [((W, H), False), ((H, W), True)])
def test_size_tells_the_frame(orientation: int, size: tuple[int, int], upright: bool) -> None:
    placed = packed(annotation([NARROW], size=size), orientation)
    assert placed.upright is upright
    assert placed.boxes.tolist() == [list(NARROW)]


@pytest.mark.parametrize("orientation", [5, 6, 7, 8])
@pytest.mark.parametrize(("box", "upright"), [(WIDE, False), (HIGH, True)])
def test_without_size_the_frame_is_the_only_one_that_the_boxes_fit(orientation: int, box: tuple[float, ...], upright: bool) -> None:
    assert packed(annotation([NARROW, box]), orientation).upright is upright


def test_rounding_over_the_edge_does_not_hide_the_frame() -> None:
    placed = packed(annotation([(1, 1, W + SLACK / 2, 40)]), 6)
    assert not placed.upright
    assert placed.boxes.tolist() == [[1, 1, W, 40]]


@pytest.mark.parametrize("orientation", [5, 6, 7, 8])
def test_a_size_of_neither_frame_leaves_it_to_the_boxes(orientation: int) -> None:
    placed, finding = warned(annotation([WIDE], size=(640, 481)), orientation)
    assert not placed.upright
    assert finding.code == "size-mismatch"


@pytest.mark.parametrize("orientation", range(2, 9))
def test_where_nothing_tells_the_upright_frame_is_taken_and_said(orientation: int) -> None:
    size = None if orientation >= 5 else (W, H)
    placed, finding = warned(annotation([NARROW], size=size), orientation)
    assert placed.upright
    assert finding.code == "exif-frame-assumed"
    assert f"orientation {orientation}" in finding.message
    assert 'exif = "ignore"' in finding.message


def test_a_square_picture_tells_nothing() -> None:
    placed, findings = place(annotation([(1, 1, 20, 30)], size=(64, 64)), 6, (64, 64))
    assert placed is not None
    assert placed.upright
    assert [f.code for f in findings] == ["exif-frame-assumed"]


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_picture_without_boxes_is_turned_upright_without_a_word(orientation: int) -> None:
    assert packed(annotation([]), orientation).upright


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("boxes", [[], [NARROW]])
@pytest.mark.parametrize(("exif", "upright"), [("apply", True), ("ignore", False)])
def test_a_declared_frame_is_not_guessed_at(orientation: int, boxes: list[Any], exif: Any, upright: bool) -> None:
    assert packed(annotation(boxes), orientation, exif=exif).upright is upright


def test_the_declared_frame_is_the_one_that_boxes_must_lie_in() -> None:
    assert packed(annotation([WIDE]), 6, exif="ignore").boxes.tolist() == [list(WIDE)]
    (finding,) = refused(annotation([WIDE]), 6, exif="apply")
    assert finding.code == "box-outside"
    assert "48x64 after its EXIF orientation" in finding.message


@pytest.mark.parametrize(("size", "upright", "scale"), [((H, W), True, (H, W)), ((W, H), False, (W, H))])
def test_fractions_are_of_the_frame_that_size_tells(size: tuple[int, int], upright: bool, scale: tuple[int, int]) -> None:
    placed = packed(annotation([(0.25, 0.25, 0.75, 0.5)], normalized=True, size=size), 6)
    assert placed.upright is upright
    assert placed.boxes.tolist() == [[scale[0] * 0.25, scale[1] * 0.25, scale[0] * 0.75, scale[1] * 0.5]]


def test_fractions_fit_both_frames_so_the_upright_one_is_taken_and_said() -> None:
    placed, finding = warned(annotation([(0.25, 0.25, 0.75, 0.5)], normalized=True), 6)
    assert placed.boxes.tolist() == [[12, 16, 36, 32]]
    assert finding.code == "exif-frame-assumed"


# Units and numbers ----------------------------------------------------------------------------------------------------------------------


def test_fractions_become_pixels() -> None:
    assert packed(annotation([(0, 0, 1, 1), (0.5, 0.25, 0.75, 1)], normalized=True)).boxes.tolist() == [[0, 0, 64, 48], [32, 12, 48, 48]]


@pytest.mark.parametrize("box", [(0.25, 0.25, 0.75, 0.5), (0, 0, 0.5, 1), (0, 0, 1, 0.999)])
def test_fractions_where_pixels_are_declared_are_suspect(box: tuple[float, ...]) -> None:
    (finding,) = refused(annotation([GOOD, box]))
    assert (finding.code, finding.object, finding.count) == ("suspect-units", 2, 1)
    assert 'coords = "normalized"' in finding.message


def test_a_box_of_one_whole_pixel_is_not_suspect() -> None:
    assert packed(annotation([(0, 0, 1, 1)])).boxes.tolist() == [[0, 0, 1, 1]]


@pytest.mark.parametrize("outside", ["fail", "clip"])
def test_pixels_where_fractions_are_declared_are_suspect(outside: Any) -> None:
    """Clipping would make one box of the whole picture from it."""
    (finding,) = refused(annotation([(0, 0, 30, 24)], normalized=True), outside=outside)
    assert finding.code == "suspect-units"
    assert 'coords = "pixel"' in finding.message


def test_a_fraction_a_little_over_1_is_outside_and_says_what_inside_is() -> None:
    (finding,) = refused(annotation([(0.5, 0.5, 1.25, 1)], normalized=True))
    assert finding.code == "box-outside"
    assert "fractions of 64x48 go from 0 to 1" in finding.message
    placed, _ = warned(annotation([(0.5, 0.5, 1.25, 1)], normalized=True), outside="clip")
    assert placed.boxes.tolist() == [[32, 24, 64, 48]]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("column", range(4))
@pytest.mark.parametrize("normalized", [False, True])
def test_no_number_is_no_coordinate(value: float, column: int, normalized: bool) -> None:
    boxes = np.array([[0.25, 0.25, 0.5, 0.5]] * 2) * (1 if normalized else 40)
    boxes[1, column] = value
    (finding,) = refused(annotation(boxes.tolist(), normalized=normalized), outside="clip")
    assert (finding.code, finding.object) == ("non-finite-box", 2)
    assert f"{value:g}" in finding.message


def test_huge_fractions_do_not_overflow_with_a_warning() -> None:
    assert [f.code for f in refused(annotation([(0, 0, 1e308, 1e308)], normalized=True))] == ["suspect-units"]


@pytest.mark.parametrize("box", [(30, 12, 10, 24), (10, 24, 30, 12), (10, 12, 10, 24), (10, 12, 30, 12), (64, 0, 64, 48)])
def test_a_box_without_area_is_refused(box: tuple[float, ...]) -> None:
    (finding,) = refused(annotation([box]))
    assert finding.code == "empty-box"
    assert "expected x1 < x2 and y1 < y2" in finding.message


def test_one_pixel_of_the_devkit_hints_at_the_origin() -> None:
    (finding,) = refused(annotation([(10, 12, 10, 24)]))
    assert "origin = 1" in finding.message


def test_exchanged_corners_hint_at_width_and_height() -> None:
    (finding,) = refused(annotation([(40, 30, 20, 12)]))
    assert "width and height" in finding.message
    assert "origin" not in finding.message


def test_a_table_gets_no_hint_about_voc() -> None:
    said = annotation([(10, 12, 10, 24)], lines=[7])
    (finding,) = refused(said)
    assert "origin" not in finding.message
    assert (finding.line, finding.object) == (7, None)


def test_every_kind_of_fault_is_told_once_with_its_number() -> None:
    boxes = [GOOD, (np.nan, 0, 1, 1), (9, 9, 5, 12), (9, 9, 5, 13), (0.5, 0.5, 0.75, 1), (60, 40, 90, 47), (-9, 3, 4, 9), (np.inf, 0, 1, 1)]
    findings = refused(annotation(boxes))
    assert [(f.code, f.object, f.count) for f in findings] == [
        ("non-finite-box", 2, 2),
        ("empty-box", 3, 2),
        ("suspect-units", 5, 1),
        ("box-outside", 6, 2),
    ]
    assert {(f.path, f.sample) for f in findings} == {("annotations/a.xml", "images/a.jpg")}
    assert "object 6: box [60, 40, 90, 47] (crack)" in findings[3].message


# Outside --------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("box", [(-5, 10, 20, 30), (10, -5, 20, 30), (10, 10, 70, 30), (10, 10, 20, 50), (-9, -9, 90, 90)])
def test_over_the_edge(box: tuple[float, ...]) -> None:
    (finding,) = refused(annotation([GOOD, box]))
    assert (finding.code, finding.object) == ("box-outside", 2)
    assert "64x48" in finding.message
    assert "--boxes clip" in finding.message
    placed, warning = warned(annotation([GOOD, box]), outside="clip")
    assert placed.boxes.tolist() == [list(GOOD), [max(box[0], 0), max(box[1], 0), min(box[2], W), min(box[3], H)]]
    assert (warning.code, warning.object, warning.count) == ("box-clipped", 2, 1)


@pytest.mark.parametrize("box", [(64, 0, 70, 10), (70, 50, 90, 60), (-9, 0, 0, 10), (-9, -9, -1, -1), (0, 48, 10, 49)])
def test_wholly_outside_is_refused_under_clip_too(box: tuple[float, ...]) -> None:
    findings = refused(annotation([box, (60, 40, 70, 44)]), outside="clip")
    assert [(f.code, f.object, f.count) for f in findings] == [("box-outside", 1, 1)]
    assert "--boxes clip" not in findings[0].message


def test_rounding_over_the_edge_is_cut_off_without_a_word() -> None:
    e = SLACK * 0.99
    assert packed(annotation([(-e, -e, W + e, H + e)])).boxes.tolist() == [[0, 0, W, H]]
    assert refused(annotation([(0, 0, W + 2 * SLACK, H)]))[0].code == "box-outside"


@pytest.mark.parametrize("outside", ["fail", "clip"])
def test_nothing_but_rounding_beyond_the_edge_is_no_box(outside: Any) -> None:
    """Cut to the picture it would have no area at all."""
    (finding,) = refused(annotation([(W, 3, W + SLACK / 2, 9)]), outside=outside)
    assert finding.code == "box-outside"


def test_narrower_than_float32_can_tell_is_no_box() -> None:
    (finding,) = refused(annotation([(10, 10, 10 + 1e-9, 20)]))
    assert finding.code == "empty-box"


coordinate = st.one_of(
    st.floats(-100, 100), st.floats(-0.002, 0.002), st.floats(63.9, 64.1), st.integers(-5, 70).map(float), st.just(np.nan)
)


@settings(deadline=None)
@given(
    st.lists(st.tuples(coordinate, coordinate, coordinate, coordinate), max_size=5),
    st.integers(1, 8),
    st.sampled_from(["auto", "apply", "ignore"]),
    st.sampled_from(["fail", "clip"]),
    st.booleans(),
)
def test_whatever_is_placed_lies_inside_and_has_area(boxes: list[Any], orientation: int, exif: Any, outside: Any, normalized: bool) -> None:
    said = annotation(boxes, normalized=normalized)
    placed, findings = place(said, orientation, exif=exif, outside=outside)
    if placed is None:
        assert any(f.level == "skip" for f in findings)
        return
    assert {f.level for f in findings} <= {"warning"}
    stored = placed.boxes.astype(np.float32)
    width, height = (H, W) if placed.upright and orientation >= 5 else (W, H)
    assert (stored[:, :2] < stored[:, 2:]).all()
    assert (stored >= 0).all()
    assert (stored[:, 2:] <= [width, height]).all()
    # No box is lost but copies.
    assert {tuple(b) for b in placed.boxes.tolist()} == {
        tuple(b) for b in np.clip(said.boxes * (np.tile([width, height], 2) if normalized else 1), 0, np.tile([width, height], 2)).tolist()
    }


# Declared size --------------------------------------------------------------------------------------------------------------------------


def test_another_size_is_a_warning_while_all_boxes_lie_inside() -> None:
    placed, finding = warned(annotation([GOOD], size=(640, 480)))
    assert finding.code == "size-mismatch"
    assert "640x480" in finding.message
    assert "64x48" in finding.message
    assert placed.boxes.tolist() == [list(GOOD)]


@pytest.mark.parametrize("outside", ["fail", "clip"])
def test_another_size_and_boxes_outside_belong_to_another_resolution(outside: Any) -> None:
    findings = refused(annotation([(100, 120, 300, 240), (5, 5, 100, 40)], size=(640, 480)), outside=outside)
    assert {f.code for f in findings} == {"box-outside", "size-mismatch"}
    assert all(f.level == "skip" for f in findings)


# Copies ---------------------------------------------------------------------------------------------------------------------------------


def test_an_exact_copy_is_left_out_with_a_warning() -> None:
    said = annotation([GOOD, NARROW, GOOD, GOOD], ["crack", "slag", "crack", "crack"])
    placed, finding = warned(said)
    assert placed.keep.tolist() == [0, 1]
    assert placed.boxes.tolist() == [list(GOOD), list(NARROW)]
    assert (finding.code, finding.object, finding.count) == ("duplicate-box", 3, 2)


def test_two_classes_of_one_box_are_both_kept_with_a_warning() -> None:
    placed, finding = warned(annotation([GOOD, GOOD], ["crack", "slag"]))
    assert placed.keep.tolist() == [0, 1]
    assert (finding.code, finding.object) == ("two-classes-one-box", 2)


def test_copies_of_clashing_boxes() -> None:
    said = annotation([GOOD] * 5, ["crack", "slag", "crack", "slag", "crack"])
    placed, findings = place(said)
    assert placed is not None
    assert placed.keep.tolist() == [0, 1]
    assert [(f.code, f.count) for f in findings] == [("duplicate-box", 3), ("two-classes-one-box", 1)]


def test_nearly_equal_boxes_are_no_copies() -> None:
    assert packed(annotation([GOOD, (10, 12, 30, 24.01)])).keep.tolist() == [0, 1]
