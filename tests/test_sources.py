from __future__ import annotations

import importlib
import os
from pathlib import Path

import pytest

from packer.recipe import SourceTable
from packer.sample import Finding, PackError
from packer.sources import KINDS, detect, open_source
from voc_data import put, put_pair, voc_object, voc_xml


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_keeps_its_name_and_options(tmp_path: Path, kind: str) -> None:
    source = open_source(kind, tmp_path, {}, ["b", "a"])
    assert (source.kind, source.root) == (kind, tmp_path)
    module, name = KINDS[kind]
    assert type(source) is getattr(importlib.import_module(module), name)


def test_wrong_options_are_all_named(tmp_path: Path) -> None:
    with pytest.raises(PackError) as e:
        open_source("voc", tmp_path, {"origin": 2, "images": "../up", "annotations": "/abs", "encoding": "hex", "orign": 1}, None)
    message = str(e.value)
    for part in (
        "[source] origin",
        "[source] images",
        "'../up'",
        "[source] annotations",
        "'/abs'",
        "'hex'",
        "[source] orign: unknown key",
        "split_file",
    ):
        assert part in message
    assert message.startswith("5 wrong")
    with pytest.raises(PackError, match="kind 'folder' has: no keys") as e:
        open_source("folder", tmp_path, {"clases": ["a"]}, None)
    shared = list(SourceTable.model_fields)
    assert str(e.value).endswith(f"every kind has: {', '.join(shared)}")


def test_unknown_kind_and_wrong_root(tmp_path: Path) -> None:
    with pytest.raises(PackError, match="expected one of folder, voc, csv"):
        open_source("coc", tmp_path, {}, None)
    with pytest.raises(PackError, match="no such folder"):
        open_source("folder", tmp_path / "gone", {}, None)
    put(tmp_path, "file")
    with pytest.raises(PackError, match="is a file"):
        detect(tmp_path / "file")


@pytest.mark.parametrize(
    ("images", "annotations", "name"),
    [
        ("images", "annotations", "w"),
        ("images", "annotations", "lot1/deep/w"),
        (".", ".", "w"),
        ("data", "data", "w"),
        ("JPEGImages", "Annotations", "w"),
    ],
)
def test_voc_is_detected_by_the_root_element(tmp_path: Path, images: str, annotations: str, name: str) -> None:
    put_pair(tmp_path, name, voc_xml(voc_object()), images, annotations)
    put(tmp_path, "boxes.csv", "image,x1,y1,x2,y2,class\n")
    kind, why = detect(tmp_path)
    assert kind == "voc"
    assert os.path.normpath(f"{annotations}/{name}.xml") in why


@pytest.mark.parametrize("name", ["b/self.jpg", "b/self.xml", "b/self.csv", "self.csv", "self"])
@pytest.mark.parametrize("target", ["self", "0.jpg/foo", "t" * 300], ids=["loop", "below a file", "too long"])
def test_a_link_that_leads_nowhere_stops_no_detection(tmp_path: Path, name: str, target: str) -> None:
    for path in ("a/0.jpg", "b/0.jpg", "0.jpg"):
        put(tmp_path, path)
    link = tmp_path / name
    link.symlink_to(link.name if target == "self" else target)
    kind, _ = detect(tmp_path)
    assert kind == "folder"
    findings: list[Finding] = []
    open_source(kind, tmp_path, {}, None).list(findings.append)
    assert ("broken-link", name) in [(f.code, f.path) for f in findings]


def test_an_xml_of_another_kind_is_no_voc(tmp_path: Path) -> None:
    put_pair(tmp_path, "w", "<annotations/>", "crack", "crack")
    assert detect(tmp_path)[0] == "folder"


def test_a_voc_file_among_others_is_seen(tmp_path: Path) -> None:
    put_pair(tmp_path, "a", b"")
    put_pair(tmp_path, "b", "<annotations/>")
    put_pair(tmp_path, "c")
    assert detect(tmp_path)[0] == "voc"


def test_csv_is_detected_by_its_columns(tmp_path: Path) -> None:
    put(tmp_path, "images/a.jpg")
    put(tmp_path, "labels.csv", "image,label\nimages/a.jpg,crack\n")
    kind, why = detect(tmp_path)
    assert kind == "csv"
    assert "labels.csv" in why


def test_a_split_table_is_no_csv_data_set(tmp_path: Path) -> None:
    put(tmp_path, "crack/a.jpg")
    put(tmp_path, "slag/b.jpg")
    put(tmp_path, "train_val_test_split.csv", "image_id,split\na,train\n")
    assert detect(tmp_path)[0] == "folder"


def test_a_root_with_nothing_to_pack_is_refused(tmp_path: Path) -> None:
    put(tmp_path, "docs/readme.txt")
    put(tmp_path, ".hidden/a.jpg")
    with pytest.raises(PackError, match="holds no picture"):
        detect(tmp_path)


def test_loops_of_links_end(tmp_path: Path) -> None:
    put(tmp_path, "a/b/x.jpg")
    (tmp_path / "a/b/up").symlink_to(tmp_path)
    assert detect(tmp_path)[0] == "folder"


ODD_TABLE = "patient,finding\n1,crack\n"


@pytest.mark.parametrize(
    "paths",
    [
        ["images/a.jpg"],
        ["images/a.jpg", "imgs/b.jpg"],
        ["a.jpg"],
        ["crack/a.jpg", "docs/a.txt"],
        ["train/images/a.jpg", "val/images/b.jpg"],
    ],
)
def test_a_table_that_does_not_fit_is_not_passed_over(tmp_path: Path, paths: list[str]) -> None:
    for path in paths:
        put(tmp_path, path)
    put(tmp_path, "labels.csv", ODD_TABLE)
    with pytest.raises(PackError) as e:
        detect(tmp_path)
    for part in ("labels.csv: ", "--source folder", "[source]", "columns"):
        assert part in str(e.value)


@pytest.mark.parametrize("paths", [["crack/a.jpg", "slag/b.jpg"], ["train/crack/a.jpg", "val/slag/lot/b.jpg"]])
def test_a_table_beside_class_folders_stands_in_no_way(tmp_path: Path, paths: list[str]) -> None:
    for path in paths:
        put(tmp_path, path)
    put(tmp_path, "notes.csv", ODD_TABLE)
    assert detect(tmp_path)[0] == "folder"
