from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from packer.sample import Finding, Listing, Source
from packer.sources.folder import FolderOptions, FolderSource
from source_contract import SourceContract


def put(root: Path, *paths: str) -> None:
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        if not (root / path).exists():
            (root / path).write_bytes(path.encode())


def listed(root: Path, classes: Sequence[str] | None = None) -> tuple[Listing, list[Finding]]:
    findings: list[Finding] = []
    return FolderSource(root, FolderOptions(), classes).list(findings.append), findings


def codes(findings: list[Finding]) -> list[tuple[str, str, str]]:
    return [(f.level, f.code, f.path) for f in findings]


class TestContractClasses(SourceContract):
    def make(self, root: Path) -> Source:
        put(
            root,
            "crack/b.jpg",
            "crack/a.png",
            "slag/deep/er/x.tif",
            "beside.jpg",
            "crack/notes.txt",
            "slag/.hidden/y.jpg",
            "crack/Thumbs.db",
        )
        if not (root / "crack/pipe.jpg").exists():
            os.mkfifo(root / "crack/pipe.jpg")
        return FolderSource(root, FolderOptions())


class TestContractSplits(SourceContract):
    def make(self, root: Path) -> Source:
        put(root, "train/crack/1.jpg", "train/slag/2.jpg", "Valid/crack/3.jpg", "testing/4.jpg", "beside.jpg", "train/readme")
        return FolderSource(root, FolderOptions())


class TestContractUnlabelled(SourceContract):
    def make(self, root: Path) -> Source:
        put(root, "a.jpg", "b.jpg", "notes.txt")
        if not (root / "c.jpg").is_symlink():
            (root / "c.jpg").symlink_to("gone")
        return FolderSource(root, FolderOptions())


def test_the_first_folder_is_the_class(tmp_path: Path) -> None:
    put(tmp_path, "slag/a.jpg", "crack/2020/lot1/b.jpg", "crack/b.jpg")
    listing, findings = listed(tmp_path)
    assert [(i.path, i.label, i.split) for i in listing.items] == [
        ("crack/2020/lot1/b.jpg", "crack", None),
        ("crack/b.jpg", "crack", None),
        ("slag/a.jpg", "slag", None),
    ]
    assert (listing.task, listing.classes, listing.has_splits) == ("classification", ["crack", "slag"], False)
    assert findings == []


def test_split_folders_in_any_case_and_spelling(tmp_path: Path) -> None:
    put(tmp_path, "TRAIN/crack/1.jpg", "validation/slag/2.jpg", "dev/crack/3.jpg", "Testing/crack/4.jpg")
    listing, findings = listed(tmp_path)
    assert {i.path: (i.split, i.label) for i in listing.items} == {
        "TRAIN/crack/1.jpg": ("train", "crack"),
        "validation/slag/2.jpg": ("val", "slag"),
        "dev/crack/3.jpg": ("val", "crack"),
        "Testing/crack/4.jpg": ("test", "crack"),
    }
    assert (listing.classes, listing.has_splits) == (["crack", "slag"], True)
    assert any("validation (val)" in note for note in listing.notes)
    assert codes(findings) == [("warning", "class-not-in-train", "validation/slag")]


def test_an_empty_class_keeps_its_id(tmp_path: Path) -> None:
    put(tmp_path, "a/1.jpg", "c/2.jpg")
    (tmp_path / "b").mkdir()
    listing, findings = listed(tmp_path)
    assert listing.classes == ["a", "b", "c"]
    assert codes(findings) == [("warning", "empty-class", "b")]


def test_flat_pictures_are_unlabelled(tmp_path: Path) -> None:
    put(tmp_path, "a.jpg", "b.jpg")
    (tmp_path / "empty").mkdir()
    listing, findings = listed(tmp_path)
    assert (listing.task, listing.classes, len(listing.items)) == ("unlabelled", [], 2)
    assert codes(findings) == [("warning", "empty-folder", "empty")]


def test_split_folders_of_bare_pictures_are_unlabelled(tmp_path: Path) -> None:
    put(tmp_path, "train/a.jpg", "test/b.jpg", "c.jpg")
    listing, findings = listed(tmp_path)
    assert (listing.task, listing.classes, listing.has_splits) == ("unlabelled", [], True)
    assert {i.path: (i.split, i.refused) for i in listing.items} == {
        "train/a.jpg": ("train", False),
        "test/b.jpg": ("test", False),
        "c.jpg": (None, True),
    }
    assert codes(findings) == [("skip", "no-split", "c.jpg")]


def test_pictures_beside_class_folders_are_refused(tmp_path: Path) -> None:
    put(tmp_path, "crack/a.jpg", "b.jpg")
    listing, findings = listed(tmp_path)
    assert {i.path: i.refused for i in listing.items} == {"b.jpg": True, "crack/a.jpg": False}
    assert codes(findings) == [("skip", "no-class", "b.jpg")]


def test_unlabelled_test_pictures_beside_labelled_training_ones_are_refused(tmp_path: Path) -> None:
    put(tmp_path, "train/crack/a.jpg", "test/b.jpg")
    listing, findings = listed(tmp_path)
    assert listing.classes == ["crack"]
    assert codes(findings) == [("skip", "no-class", "test/b.jpg")]


def test_given_classes_fix_the_order_and_refuse_others(tmp_path: Path) -> None:
    put(tmp_path, "crack/a.jpg", "slag/b.jpg", "slag/c.jpg", "porosity/d.jpg")
    listing, findings = listed(tmp_path, ["porosity", "void", "crack"])
    assert listing.classes == ["porosity", "void", "crack"]
    assert {i.path for i in listing.items if i.refused} == {"slag/b.jpg", "slag/c.jpg"}
    assert sorted(codes(findings)) == [
        ("skip", "unknown-class", "slag/b.jpg"),
        ("skip", "unknown-class", "slag/c.jpg"),
    ]


def test_split_and_class_folders_side_by_side_are_an_error(tmp_path: Path) -> None:
    put(tmp_path, "train/a.jpg", "bus/b.jpg")
    _, findings = listed(tmp_path)
    assert codes(findings) == [("error", "mixed-folders", "train")]
    assert "bus" in findings[0].message


def test_a_class_may_be_called_train_when_the_classes_say_so(tmp_path: Path) -> None:
    put(tmp_path, "train/a.jpg", "bus/b.jpg")
    listing, findings = listed(tmp_path, ["bus", "train"])
    assert [(i.label, i.split) for i in listing.items] == [("bus", None), ("train", None)]
    assert findings == []


def test_classes_without_class_folders_are_an_error(tmp_path: Path) -> None:
    put(tmp_path, "a.jpg")
    _, findings = listed(tmp_path, ["crack"])
    assert codes(findings) == [("error", "no-class-folders", ".")]


def test_no_picture_at_all_is_an_error(tmp_path: Path) -> None:
    put(tmp_path, "crack/a.txt")
    listing, findings = listed(tmp_path)
    assert listing.items == []
    assert ("error", "no-pictures", ".") in codes(findings)


def test_classes_that_differ_by_case_only_across_splits_are_named(tmp_path: Path) -> None:
    put(tmp_path, "train/Crack/a.jpg", "val/crack/b.jpg", "train/slag/c.jpg")
    listing, findings = listed(tmp_path)
    assert listing.classes == ["Crack", "crack", "slag"]
    assert [f.code for f in findings] == ["case-twins", "class-not-in-train"]
    assert "train/Crack" in findings[0].message
    assert "val/crack" in findings[0].message


def test_twin_class_folders_side_by_side_are_named_once(tmp_path: Path) -> None:
    put(tmp_path, "Crack/a.jpg", "crack/b.jpg")
    _, findings = listed(tmp_path)
    assert [f.code for f in findings] == ["case-twins"]


def test_a_single_class_with_folders_of_its_own_is_doubted(tmp_path: Path) -> None:
    put(tmp_path, "dataset/crack/a.jpg", "dataset/slag/b.jpg")
    listing, findings = listed(tmp_path)
    assert listing.classes == ["dataset"]
    assert codes(findings) == [("warning", "one-class", "dataset")]


def test_annotation_is_the_label(tmp_path: Path) -> None:
    put(tmp_path, "crack/a.jpg")
    source = FolderSource(tmp_path, FolderOptions())
    item = source.list(lambda _: None).items[0]
    annotation = source.annotate(item, lambda _: None)
    assert annotation is not None
    assert (annotation.label, annotation.path, len(annotation.boxes)) == ("crack", "crack/a.jpg", 0)


@pytest.mark.parametrize(
    ("paths", "path"),
    [
        (["images/train/a.jpg", "labels/train/a.txt", "data.yaml"], "data.yaml"),
        (["images/a.jpg", "labels/a.txt"], "images"),
        (["train/images/a.jpg", "train/labels/a.txt", "valid/images/b.jpg", "valid/labels/b.txt"], "train/images"),
        (["train2017/a.jpg", "val2017/b.jpg", "annotations/instances_train2017.json"], "annotations/instances_train2017.json"),
        (["JPEGImages/a.jpg", "SegmentationClass/a.png"], "JPEGImages"),
        (["train/a.jpg", "valid/b.jpg", "train/_annotations.coco.json"], "train/_annotations.coco.json"),
    ],
)
def test_the_parts_of_another_layout_are_no_classes(tmp_path: Path, paths: list[str], path: str) -> None:
    put(tmp_path, *paths)
    _, findings = listed(tmp_path)
    errors = [f for f in findings if f.level == "error"]
    assert [(f.code, f.path) for f in errors] == [("other-layout", path)]
    assert "looks like YOLO" in errors[0].message
    assert "[source] classes" in errors[0].message


def test_classes_that_are_named_may_be_called_like_parts_of_another_layout(tmp_path: Path) -> None:
    put(tmp_path, "images/a.jpg", "labels/b.jpg", "data.yaml")
    listing, findings = listed(tmp_path, ["images", "labels"])
    assert [i.label for i in listing.items] == ["images", "labels"]
    assert codes(findings) == [("warning", "unsupported-file", "data.yaml")]
    _, findings = listed(tmp_path, ["images"])
    assert ("error", "other-layout", "labels") in codes(findings)


def test_inner_folders_that_share_a_class_are_named_once(tmp_path: Path) -> None:
    put(tmp_path, "metal/crack/a.jpg", "metal/pore/b.jpg", "stone/crack/a.jpg", "stone/chip/b.jpg", "wood/knot/c.jpg")
    _, findings = listed(tmp_path)
    assert codes(findings) == [("warning", "nested-folders", "metal")]
    for part in ("metal/crack/", "metal/pore/", "'metal'", "1 more"):
        assert part in findings[0].message


def test_one_inner_folder_or_pictures_beside_it_are_no_doubt(tmp_path: Path) -> None:
    put(tmp_path, "train/a/lot1/1.jpg", "train/b/lot1/1.jpg", "train/b/lot2/1.jpg", "train/b/1.jpg")
    assert listed(tmp_path)[1] == []


@pytest.mark.parametrize("paths", [["dataset/train/a/1.jpg", "dataset/val/a/2.jpg"], ["dataset/train/1.jpg"]])
def test_split_folders_one_level_down_are_an_error(tmp_path: Path, paths: list[str]) -> None:
    put(tmp_path, *paths)
    _, findings = listed(tmp_path)
    assert codes(findings) == [("error", "wrong-root", "dataset")]
    assert "point pack at dataset/" in findings[0].message
    assert ("error", "wrong-root", "dataset") not in codes(listed(tmp_path, ["dataset"])[1])


def test_a_class_without_training_pictures_is_named(tmp_path: Path) -> None:
    put(tmp_path, "train/a/1.jpg", "train/b/1.jpg", "val/b/2.jpg", "val/c/2.jpg", "test/c/3.jpg")
    (tmp_path / "train/c").mkdir()
    _, findings = listed(tmp_path)
    assert ("warning", "class-not-in-train", "test/c") in codes(findings)
    assert [f.message.split(":")[0] for f in findings if f.code == "class-not-in-train"] == [
        "class 'c' has no picture in train, and some in test/c, val/c"
    ]


def test_without_a_train_split_no_class_is_missing_in_it(tmp_path: Path) -> None:
    put(tmp_path, "test/a/1.jpg", "test/b/1.jpg")
    assert listed(tmp_path)[1] == []
