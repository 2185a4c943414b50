"""What only the whole data set can tell."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loaders.format import Task
from packer.job import DIGEST_BYTES, Remarks, Spec
from packer.remarks import DARK_16BIT, duplicate_findings, remark_findings, same_files
from packer.sample import Annotation, Finding, Item, Listing, Report

Row = tuple[int, int, str | None]
"""A digest of the picture, one of the annotation (0: unknown), and the split."""


def _always(a: Item, b: Item) -> bool:
    return a.num_bytes == b.num_bytes


def duplicates(rows: list[Row], task: Task = "classification", same_bytes: Callable[[Item, Item], bool] = _always) -> list[Finding]:
    items = [Item(f"{i}.jpg", None, 1, 1, label=f"class {annotation}") for i, (_, annotation, _) in enumerate(rows)]
    digests = np.zeros((len(rows), 2, DIGEST_BYTES), np.uint8)
    for i, (image, annotation, _) in enumerate(rows):
        digests[i, 0, -1], digests[i, 1, 0] = image, annotation
    return list(duplicate_findings(Listing(items, task, [], False), [split for *_, split in rows], digests, same_bytes))


def told(rows: list[Row], task: Task = "classification") -> list[tuple[str, str]]:
    found = duplicates(rows, task)
    assert all(f.level == "warning" and f.sample == f.path for f in found)
    return [(f.code, f.path) for f in found]


def test_nothing_is_said_about_different_pictures() -> None:
    assert told([(1, 1, "train"), (2, 1, "val"), (3, 2, "test")]) == []
    assert told([]) == []
    assert told([(1, 1, "train")]) == []


def test_true_copies_in_one_split_are_silent() -> None:
    assert told([(1, 1, "train"), (1, 1, "train"), (1, 1, "train")]) == []


def test_the_same_bytes_in_two_splits_are_a_leak() -> None:
    (finding,) = duplicates([(1, 1, "train"), (2, 1, "train"), (1, 1, "test")])
    assert (finding.code, finding.path) == ("split-leak", "2.jpg")
    assert "0.jpg, which is in train; this one is in test" in finding.message


def test_the_same_bytes_with_two_labels() -> None:
    (finding,) = duplicates([(1, 1, "train"), (1, 2, "train")])
    assert (finding.code, finding.path) == ("duplicate-image", "1.jpg")
    assert "0.jpg, which has label 'class 1', this one has 'class 2'" in finding.message


def test_the_same_bytes_with_other_boxes() -> None:
    (finding,) = duplicates([(1, 1, "train"), (1, 2, "train")], "detection")
    assert finding.message == "has the same bytes as 0.jpg, which has other boxes"


def test_both_at_once_and_each_copy_once() -> None:
    rows: list[Row] = [(9, 1, "train"), (5, 1, "val"), (9, 2, "val"), (5, 1, "val"), (9, 1, "test")]
    assert told(rows) == [("split-leak", "2.jpg"), ("duplicate-image", "2.jpg"), ("split-leak", "4.jpg")]


def test_without_labels_only_leaks_are_told() -> None:
    assert told([(1, 1, "train"), (1, 2, "train"), (1, 1, "val")], "unlabelled") == [("split-leak", "2.jpg")]


def test_pictures_that_could_not_be_read_are_no_copies() -> None:
    assert told([(0, 1, "train"), (0, 2, "val"), (0, 0, None)]) == []


def test_an_annotation_that_could_not_be_read_is_no_other_label() -> None:
    assert told([(1, 1, "train"), (1, 0, "train")]) == []
    assert told([(1, 0, "train"), (1, 1, "train"), (1, 1, "train")]) == []


def test_labels_are_compared_with_the_first_that_is_known() -> None:
    (finding,) = duplicates([(1, 0, "train"), (1, 1, "train"), (1, 2, "train")])
    assert (finding.path, finding.message.split(",")[0]) == ("2.jpg", "has the same bytes as 1.jpg")


def test_equal_digests_of_other_bytes_are_no_copies() -> None:
    """1.jpg and 3.jpg are one picture, 0.jpg and 2.jpg another, and all four have one digest."""
    rows: list[Row] = [(1, 1, "train"), (1, 2, "val"), (1, 1, "train"), (1, 2, "test")]

    def same_parity(a: Item, b: Item) -> bool:
        return int(a.path[0]) % 2 == int(b.path[0]) % 2

    assert [(f.code, f.path) for f in duplicates(rows, same_bytes=same_parity)] == [("split-leak", "3.jpg")]
    assert duplicates(rows, same_bytes=lambda a, b: False) == []  # noqa: ARG005  (it is called by position)


def test_files_are_compared_byte_by_byte(tmp_path: Path) -> None:
    for name, data in (("a", b"x" * 99), ("b", b"x" * 99), ("c", b"x" * 98 + b"y")):
        (tmp_path / name).write_bytes(data)
        os.utime(tmp_path / name, ns=(1, 1))
    a, b, c, gone = (Item(name, None, 99, 1) for name in ("a", "b", "c", "gone"))
    same = same_files(tmp_path)
    assert same(a, b)
    assert not same(a, c)
    assert not same(a, gone)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.sampled_from(["train", "val"])), max_size=20))
def test_against_comparing_every_pair(rows: list[Row]) -> None:
    leaks, others = set(), set()
    for i, (image, annotation, split) in enumerate(rows):
        before = [row for row in rows[:i] if row[0] == image and image]
        if before and before[0][2] != split:
            leaks.add(f"{i}.jpg")
        known = [row for row in before if row[1]]
        if known and annotation and known[0][1] != annotation:
            others.add(f"{i}.jpg")
    found = told(rows)
    assert len(found) == len(set(found))
    assert {path for code, path in found if code == "split-leak"} == leaks
    assert {path for code, path in found if code == "duplicate-image"} == others


# Origin, depth, formats -----------------------------------------------------------------------------------------------------------------


class Given:
    kind = "voc"
    root = Path()

    def __init__(self, **options: Any) -> None:
        self.options = options

    def list(self, report: Report) -> Listing:
        raise NotImplementedError

    def annotate(self, item: Item, report: Report) -> Annotation | None:
        raise NotImplementedError


LISTING = Listing([Item("a.jpg", None, 1, 1)], "detection", ["crack"], False)
TAR, MEMMAP = Spec("tar", "detection", ("crack",)), Spec("memmap", "detection", ("crack",))


def remarked(remarks: Remarks, spec: Spec = TAR, kind: str = "voc", **options: Any) -> list[Finding]:
    found = list(remark_findings(LISTING, kind, Given(**options), spec, remarks))
    assert all((f.level, f.path, f.sample) == ("warning", ".", None) for f in found)
    return found


def test_a_clean_set_has_no_remarks() -> None:
    assert remarked(Remarks()) == []
    assert remarked(Remarks(lowest=0, num_at_edge=5, max_16bit=60000, num_16bit=3, parts={"jpg": 9})) == []


def test_numbers_from_1_to_the_width_contradict_origin_0() -> None:
    (finding,) = remarked(Remarks(lowest=1, num_at_edge=1234))
    assert finding.code == "origin-mismatch"
    assert "origin = 1" in finding.message
    assert "1,234 boxes" in finding.message


@pytest.mark.parametrize(
    "remarks", [Remarks(lowest=0, num_at_edge=5), Remarks(lowest=0.5, num_at_edge=5), Remarks(lowest=1), Remarks(lowest=2, num_at_edge=5)]
)
def test_other_numbers_do_not(remarks: Remarks) -> None:
    assert remarked(remarks) == []


def test_the_origin_is_judged_only_where_it_is_0_and_the_source_is_voc() -> None:
    remarks = Remarks(lowest=1, num_at_edge=5)
    assert remarked(remarks, origin=1) == []
    assert remarked(remarks, kind="csv") == []
    assert len(remarked(remarks, origin=0)) == 1


@pytest.mark.parametrize(("highest", "range_end"), [(0, 1), (1, 1), (255, 255), (1000, 1023), (DARK_16BIT - 1, 4095)])
def test_dark_16bit_pictures_name_the_range_that_holds_them(highest: int, range_end: int) -> None:
    (finding,) = remarked(Remarks(max_16bit=highest, num_16bit=7), MEMMAP)
    assert finding.code == "dark-16bit"
    assert f"pixel_range = [0, {range_end}]" in finding.message
    assert "7 16-bit pictures" in finding.message


def test_bright_or_declared_16bit_pictures_are_silent() -> None:
    assert remarked(Remarks(max_16bit=DARK_16BIT, num_16bit=1)) == []
    assert remarked(Remarks(max_16bit=9, num_16bit=1), Spec("tar", "detection", ("crack",), pixel_range=(0, 1023))) == []


def test_mixed_formats_are_told_for_tars() -> None:
    remarks = Remarks(parts={"png": 2, "jpg": 1500})
    (finding,) = remarked(remarks)
    assert finding.code == "mixed-image-parts"
    assert "1,500 jpg, 2 png" in finding.message
    assert "--image jpg, png or webp" in finding.message
    assert remarked(remarks, MEMMAP) == []


def test_a_memmap_of_two_sizes_is_an_error_that_names_two_pictures() -> None:
    remarks = Remarks()
    for size, path in (("60x40", "a.jpg"), ("60x40", "b.jpg"), ("30x40", "c.jpg"), ("20x20", "d.jpg")):
        remarks.merge(Remarks(sizes={size: path}))
    (finding,) = remark_findings(LISTING, "voc", Given(), TAR, remarks)
    assert (finding.level, finding.code, finding.path) == ("error", "sizes-differ", ".")
    assert "a.jpg is 60x40, c.jpg is 30x40" in finding.message
    assert "--resize" in finding.message
