"""`CsvSource`: what columns mean, which picture a row means, boxes in every format, and what is said about rows that cannot be true."""

from __future__ import annotations

import pickle
import random
import unicodedata
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from packer.sample import Annotation, Finding, Item, Listing, PackError
from packer.sources.csv import CsvOptions, CsvSource, sniff, why_not
from source_contract import SourceContract

CORNERS = "image,x1,y1,x2,y2,class\n"
LEFT_TOP = {"x": "left", "y": "top", "w": "width", "h": "height"}.items()


def make(root: Path, tables: dict[str, str | bytes], pictures: Iterable[str]) -> Path:
    for name, text in tables.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    for name in pictures:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"")
    return root


class Read:
    """A listed source, its findings, and the annotation of every picture that is not refused."""

    def __init__(self, root: Path, classes: list[str] | None = None, **options: Any) -> None:
        self.findings: list[Finding] = []
        self.source = CsvSource(root, CsvOptions.model_validate(options), classes)
        self.listing: Listing = self.source.list(self.findings.append)
        self.items: dict[str, Item] = {i.path: i for i in self.listing.items}
        self.annotations: dict[str, Annotation] = {}
        for item in self.listing.items:
            annotation = self.source.annotate(item, self.findings.append)
            assert (annotation is None) == item.refused
            if annotation is not None:
                self.annotations[item.path] = annotation

    @property
    def codes(self) -> list[tuple[str, str | None]]:
        return [(f.code, f.sample) for f in self.findings]

    @property
    def labels(self) -> dict[str, str | None]:
        return {path: self.items[path].label for path in self.annotations}

    def boxes(self, path: str) -> list[list[float]]:
        return self.annotations[path].boxes.tolist()

    def one(self, code: str) -> Finding:
        (found,) = [f for f in self.findings if f.code == code]
        return found


def refusal(root: Path, **options: Any) -> str:
    with pytest.raises(PackError) as caught:
        Read(root, **options)
    return str(caught.value)


class CsvContract(SourceContract):
    def test_a_pickled_copy_annotates_alike(self, root: Path) -> None:
        """Rows are read while listing, so a copy is made afterwards."""
        source = self.make(root)
        assert isinstance(source, CsvSource)
        items = [i for i in source.list(lambda _: None).items if not i.refused]
        copy = pickle.loads(pickle.dumps(source))
        assert items
        for item in items:
            assert repr(copy.annotate(item, pytest.fail)) == repr(source.annotate(item, pytest.fail))


class TestBoxTable(CsvContract):
    def make(self, root: Path) -> CsvSource:
        rows = "a.jpg,1,2,3,4,x,train\nb.jpg,,,,,,val\nbad.jpg,1,2,3,4,,test\na.jpg,1,2,3,5,y,train\n../outside/secret.jpg,1,2,3,4,z,val\n"
        if not any(root.iterdir()):
            make(root, {"t.csv": CORNERS.strip() + ",split\n" + rows}, ["a.jpg", "b.jpg", "bad.jpg", "no row.jpg", "notes.txt", ".hidden"])
        return CsvSource(root, CsvOptions(file="t.csv"))


class TestLabelTable(CsvContract):
    def make(self, root: Path) -> CsvSource:
        if not any(root.iterdir()):
            make(root, {"data/t.csv": "id,label,who\na,x,p\nb,y,q\nbad,,\n"}, ["i/a.jpg", "i/b.jpg", "i/bad.jpg", "notes.txt", ".x/y"])
        return CsvSource(root, CsvOptions(extra=("who",)))


# Which columns


@pytest.mark.parametrize(
    ("header", "cell"),
    [("image,label", "a.jpg"), ("file_name,class", "a.jpg"), ("Image_ID,Category", "a"), ("id,target", "a"), ("kids,PATH,Label", "a.jpg")],
)
def test_label_tables_are_recognised_by_header(tmp_path: Path, header: str, cell: str) -> None:
    row = ",".join(cell if n.lower() in ("image", "file_name", "image_id", "id", "path") else "crack" for n in header.split(","))
    r = Read(make(tmp_path, {"t.csv": f"{header}\n{row}\n"}, ["a.jpg"]))
    assert (r.listing.task, r.listing.classes, r.labels, r.codes) == ("classification", ["crack"], {"a.jpg": "crack"}, [])
    assert sniff(tmp_path) is not None


def test_control_box_table(tmp_path: Path) -> None:
    rows = "i/a.jpg,10,8,30,24,crack\ni/b.jpg,1,2,3,4,slag\ni/a.jpg, +35 ,27.50,5.5e1,40,porosity\n"
    r = Read(make(tmp_path, {"boxes.csv": CORNERS + rows}, ["i/a.jpg", "i/b.jpg"]))
    assert r.findings == []
    assert (r.listing.task, r.listing.classes, r.listing.has_splits) == ("detection", ["crack", "porosity", "slag"], False)
    a = r.annotations["i/a.jpg"]
    assert a.boxes.tolist() == [[10, 8, 30, 24], [35, 27.5, 55, 40]]
    assert a.boxes.dtype == np.float64
    assert (a.path, a.labels, a.lines, a.places) == ("boxes.csv", ["crack", "porosity"], [2, 4], ["line 2", "line 4"])
    assert (a.size, a.normalized, a.label, a.extra) == (None, False, None, None)
    for flags in (a.difficult, a.truncated, a.occluded):
        assert (flags.dtype, flags.tolist()) == (np.uint8, [0, 0])
    assert (r.listing.num_files, r.listing.num_used, r.listing.num_ignored) == (3, 1, 0)


def test_retinanet_without_header_with_a_negative(tmp_path: Path) -> None:
    root = make(tmp_path, {"boxes.csv": "a.jpg,10,8,30,24,crack\nn.jpg,,,,,\n"}, ["a.jpg", "n.jpg"])
    by_number = {"path": 0, "x1": 1, "y1": 2, "x2": 3, "y2": 4, "label": 5}
    for options in ({}, {"header": False}, {"header": False, "columns": by_number}, {"columns": by_number}):
        r = Read(root, **options)
        assert (r.findings, r.listing.classes) == ([], ["crack"])
        assert r.boxes("a.jpg") == [[10, 8, 30, 24]]
        assert r.annotations["n.jpg"].boxes.shape == (0, 4)
        assert any("RetinaNet" in note for note in r.listing.notes) == ("columns" not in options)
    assert "RetinaNet" in str(sniff(root))


def test_tensorflow_width_and_height_are_the_pictures(tmp_path: Path) -> None:
    header = "filename,width,height,class,xmin,ymin,xmax,ymax\n"
    r = Read(make(tmp_path, {"t.csv": header + "a.jpg,64,48,crack,10,8,30,24\nb.jpg,,,crack,1,1,2,2\n"}, ["a.jpg", "b.jpg"]))
    assert (r.boxes("a.jpg"), r.annotations["a.jpg"].size, r.annotations["b.jpg"].size) == ([[10, 8, 30, 24]], (64, 48), None)
    assert r.findings == []


@pytest.mark.parametrize("cells", ["64,49", "64,", "64.5,48", "-64,48", "x,48", "inf,48"])
def test_sizes_that_disagree_or_make_no_sense_are_not_used(tmp_path: Path, cells: str) -> None:
    header = "filename,width,height,class,xmin,ymin,xmax,ymax\n"
    r = Read(make(tmp_path, {"t.csv": header + f"a.jpg,64,48,crack,10,8,30,24\na.jpg,{cells},crack,10,8,30,25\n"}, ["a.jpg"]))
    assert r.annotations["a.jpg"].size is None
    assert r.codes == [("bad-size", "a.jpg")]
    assert r.findings[0].line == 3


def test_columns_in_another_order_are_read_by_name(tmp_path: Path) -> None:
    r = Read(make(tmp_path, {"t.csv": "filename,cell_type,xmin,xmax,ymin,ymax\na.jpg,WBC,260,491,177,376\n"}, ["a.jpg"]))
    assert (r.boxes("a.jpg"), r.listing.classes) == ([[260, 177, 491, 376]], ["WBC"])


def test_open_images(tmp_path: Path) -> None:
    header = "ImageID,Source,LabelName,Confidence,XMin,XMax,YMin,YMax,IsOccluded,IsTruncated,IsGroupOf\n"
    root = make(tmp_path, {"t.csv": header + "0a,x,/m/01,1,0.25,0.5,0.125,0.75,1,0,0\n0a,x,/m/02,1,0,1,0,1,-1,1,0\n"}, ["img/0a.jpg"])
    r = Read(root)
    a = r.annotations["img/0a.jpg"]
    assert (a.normalized, a.labels) == (True, ["/m/01", "/m/02"])
    assert a.boxes.tolist() == [[0.25, 0.125, 0.5, 0.75], [0, 0, 1, 1]]
    assert (a.occluded.tolist(), a.truncated.tolist(), a.difficult.tolist()) == ([1, 0], [0, 1], [0, 0])
    assert r.findings == []
    assert any("Open Images" in note for note in r.listing.notes)
    assert any("'img'" in note for note in r.listing.notes)
    assert not Read(root, coords="pixel").annotations["img/0a.jpg"].normalized


def test_kaggle_bbox_in_one_cell(tmp_path: Path) -> None:
    rows = 'image_id,width,height,bbox,source\na,1024,768,"[834.0, 222.0, 56.0, 36.0]",x\nb,1024,768,,x\n'
    root = make(tmp_path, {"train.csv": rows}, ["train/a.jpg", "train/b.jpg"])
    assert "class_name" in refusal(root)
    r = Read(root, class_name="wheat")
    assert (r.boxes("train/a.jpg"), r.annotations["train/a.jpg"].labels) == ([[834, 222, 890, 258]], ["wheat"])
    assert r.boxes("train/b.jpg") == []
    assert r.annotations["train/a.jpg"].size == (1024, 768)
    assert any("Kaggle" in note for note in r.listing.notes)


@pytest.mark.parametrize("cell", ["1 2 3 4", "(1;2;3;4)", "[ 1,2 , 3 4 ]"])
def test_spellings_of_a_bbox_cell(tmp_path: Path, cell: str) -> None:
    root = make(tmp_path, {"t.csv": f'image,label,bbox\na.jpg,x,"{cell}"\n'}, ["a.jpg"])
    assert "box_format" in refusal(root)
    assert Read(root, box_format="xyxy").boxes("a.jpg") == [[1, 2, 3, 4]]
    assert Read(root, box_format="cxcywh").boxes("a.jpg") == [[-0.5, 0, 2.5, 4]]


def test_a_corner_and_a_size_are_told_apart_from_a_centre(tmp_path: Path) -> None:
    root = make(tmp_path, {"t.csv": "image,label,x,y,w,h\na.jpg,x,10,20,4,6\n"}, ["a.jpg"])
    declared = {"x": "x", "y": "y", "w": "w", "h": "h"}
    assert "corner or a centre" in refusal(root)
    assert "'xyxy'" in refusal(root, box_format="xyxy")
    assert Read(root, columns=declared).boxes("a.jpg") == [[10, 20, 14, 26]]
    assert Read(root, box_format="xywh").boxes("a.jpg") == [[10, 20, 14, 26]]
    assert Read(root, box_format="cxcywh", columns=declared).boxes("a.jpg") == [[8, 17, 12, 23]]


def test_declared_columns_win_over_recognised_ones(tmp_path: Path) -> None:
    root = make(tmp_path, {"t.csv": "id,name,path,label,what\n1,a.jpg,b.jpg,x,y\n"}, ["a.jpg", "b.jpg"])
    assert Read(root, columns={"path": " Name ", "label": 4}).labels == {"a.jpg": "y"}
    assert Read(root).labels == {"b.jpg": "x"}


@pytest.mark.parametrize(
    ("numbers", "options", "box"),
    [
        ("x,y,width,height", {"columns": {"x": "x", "y": "y", "w": "width", "h": "height"}, "box_format": "xywh"}, [1, 2, 4, 8]),
        ("left,top,right,bottom", {"columns": {"x1": "left", "y1": "top", "x2": "right", "y2": "bottom"}}, [1, 2, 3, 6]),
        ("cx,cy,w,h", {"columns": {"x": "cx", "y": "cy", "w": "w", "h": "h"}, "box_format": "cxcywh"}, [-0.5, -1, 2.5, 5]),
        (
            "x_center,Y Center,width,height",
            {"columns": {"x": "x_center", "y": "y center", "w": "width", "h": "height"}, "box_format": "cxcywh"},
            [-0.5, -1, 2.5, 5],
        ),
        (
            "bbox_left,bbox_top,bbox_width,bbox_height",
            {"columns": {r: f"bbox_{n}" for r, n in LEFT_TOP}, "box_format": "xywh"},
            [1, 2, 4, 8],
        ),
    ],
)
def test_labels_beside_what_looks_like_a_box_are_refused(tmp_path: Path, numbers: str, options: dict[str, Any], box: list[float]) -> None:
    root = make(tmp_path, {"t.csv": f"filename,{numbers},label\na.jpg,1,2,3,6,x\na.jpg,1,2,3,6,y\n"}, ["a.jpg"])
    names = numbers.lower().split(",")
    message = refusal(root)
    assert message.startswith(f"t.csv: columns {', '.join(names)} look like a box")
    assert f"'filename,{numbers},label'" in message
    assert "columns = {" + ", ".join(f'{role} = "{name}"' for role, name in options["columns"].items()) + "}" in message
    assert f'"{options.get("box_format", "normalized")}"' in message
    assert Read(root, **options).boxes("a.jpg") == [box, box]
    assert "look like a box" in refusal(root, class_name="defect")
    kept = Read(make(tmp_path, {"t.csv": f"filename,{numbers},label\na.jpg,1,2,3,6,x\n"}, []), extra=names)
    assert (kept.labels, kept.annotations["a.jpg"].extra) == ({"a.jpg": "x"}, dict(zip(names, "1236", strict=True)))


@pytest.mark.parametrize(("header", "way_out"), [("bounding_box", 'bbox = "bounding_box"'), ("x,y", "x1 = ..."), ("w,h", "box_format")])
def test_parts_of_a_box_are_refused_too(tmp_path: Path, header: str, way_out: str) -> None:
    row = ",".join("1" for _ in header.split(","))
    message = refusal(make(tmp_path, {"t.csv": f"image,label,{header}\na.jpg,x,{row}\n"}, ["a.jpg"]))
    assert "look like a box" in message
    assert way_out in message


@pytest.mark.parametrize("header", ["width,height", "confidence,annotator", "top,who", "height,box id"])
def test_other_columns_that_are_not_used_are_named(tmp_path: Path, header: str) -> None:
    r = Read(make(tmp_path, {"t.csv": f"image,label,{header},\na.jpg,x,1,2,\n"}, ["a.jpg"]))
    assert r.labels == {"a.jpg": "x"}
    assert f"t.csv: columns not used: {header.replace(',', ', ')}" in r.listing.notes


def test_columns_not_used_of_boxes_and_without_header(tmp_path: Path) -> None:
    root = make(tmp_path, {"t.csv": "image,x1,y1,x2,y2,class,who,truncated\na.jpg,1,2,3,4,x,me,0\n"}, ["a.jpg"])
    assert [n for n in Read(root).listing.notes if "not used" in n] == ["t.csv: columns not used: who"]
    assert not [n for n in Read(root, extra=["who"]).listing.notes if "not used" in n]
    make(root, {"t.csv": "a.jpg,me,x,7\n"}, [])
    assert "t.csv: columns not used: 1, 3 (counted from 0)" in Read(root, header=False, columns={"path": 0, "label": 2}).listing.notes


@pytest.mark.parametrize(
    ("text", "options", "said"),
    [
        ("a.jpg,crack\nb.jpg,slag\n", {}, ["'a.jpg,crack'", "header = false", "file_name"]),
        ("a.jpg,crack\n", {"columns": {"path": "image", "label": "label"}}, ["'a.jpg,crack'", "'image'"]),
        ("a.jpg,crack\n", {"header": False}, ["'a.jpg,crack'", "by number"]),
        ("a.jpg,crack\n", {"header": False, "columns": {"path": "image"}}, ["'image'", "number"]),
        ("a.jpg,crack\n", {"header": False, "columns": {"path": 0, "label": 2}}, ["column 2", "there are 2"]),
        ("image,tag\na.jpg,crack\n", {}, ["label", "class_name", "'image,tag'"]),
        ("image,label,class\na.jpg,1,crack\n", {}, ["label, class", "say which"]),
        ("image,label,label\na.jpg,1,crack\n", {}, ["twice"]),
        ("image,x1,y1,x2,class\na.jpg,1,2,3,crack\n", {}, ["no column for y2", "ymax"]),
        (CORNERS, {}, ["0 rows in t.csv", "image,x1"]),
        ("", {}, ["the file is empty"]),
        (CORNERS + "a.jpg,1,2,3,4,x\n", {"box_format": "xywh"}, ["corners"]),
        (CORNERS + "a.jpg,1,2,3,4,x\n", {"columns": {"x1": "x1", "bbox": "class"}}, ["a box is given once"]),
        (CORNERS + "a.jpg,1,2,3,4,x\n", {"class_name": "y", "columns": {"label": "class"}}, ["class_name"]),
        (CORNERS + "a.jpg,1,2,3,4,x\n", {"extra": ["operator"]}, ["operator", "extra"]),
        (CORNERS + "a.jpg,1,2,3,4,x\n", {"image_dir": "imgs"}, ["'imgs'", "no picture"]),
        ("image,label\na.jpg,inclusi\xf3n\n".encode("cp1252"), {}, ["line 2", "0xf3", "encoding"]),
    ],
)
def test_tables_that_cannot_be_read_say_why(tmp_path: Path, text: str | bytes, options: dict[str, Any], said: list[str]) -> None:
    message = refusal(make(tmp_path, {"t.csv": text}, ["a.jpg", "b.jpg"]), **options)
    assert "t.csv" in message or "image_dir" in message
    for words in said:
        assert words in message


@pytest.mark.parametrize(
    "options",
    [
        {"colums": {}},
        {"columns": {"path": -1}},
        {"columns": {"path": True}},
        {"columns": {"paht": "x"}},
        {"delimiter": ";;"},
        {"coords": "relative"},
        {"image_dir": "../up"},
        {"file": {}},
        {"file": {"train": "a.csv", "fold1": "b.csv"}},
        {"file": {"val": "a.csv", "valid": "b.csv"}},
        {"file": {"val": "a.csv"}, "columns": {"split": "s"}},
        {"header": "no"},
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        CsvOptions.model_validate(options)


def test_class_name_is_said_to_hide_a_class_column(tmp_path: Path) -> None:
    r = Read(make(tmp_path, {"t.csv": CORNERS + "a.jpg,1,2,3,4,x\n"}, ["a.jpg"]), class_name="defect")
    assert r.listing.classes == ["defect"]
    assert any("'class' is not used" in note for note in r.listing.notes)


def test_an_encoding_and_a_delimiter_as_declared(tmp_path: Path) -> None:
    r = Read(
        make(tmp_path, {"t.csv": "image;label\na,b.jpg;inclusi\xf3n\n".encode("cp1252")}, ["a,b.jpg"]), encoding="cp1252", delimiter=";"
    )
    assert r.labels == {"a,b.jpg": "inclusión"}


# Which table


def test_the_one_table_is_found_one_folder_below(tmp_path: Path) -> None:
    root = make(
        tmp_path, {"data/t.csv": "image,label\na.jpg,x\n", "data/notes.csv": "who,when\n", "x/y/t.csv": "image,label\n"}, ["i/a.jpg"]
    )
    r = Read(root)
    assert r.annotations["i/a.jpg"].path == "data/t.csv"
    assert r.codes == [("unsupported-file", "data/notes.csv"), ("unsupported-file", "x/y/t.csv")]
    assert "data/t.csv" in str(sniff(root))


def test_several_tables_must_be_told_apart(tmp_path: Path) -> None:
    root = make(tmp_path, {f"{s}_labels.csv": "image,label\na.jpg,x\n" for s in ("val", "train")}, ["a.jpg"])
    assert '{train = "train_labels.csv", val = "val_labels.csv"}' in refusal(root)
    assert Read(root, file="val_labels.csv").labels == {"a.jpg": "x"}


@pytest.mark.parametrize(("file", "said"), [("gone.csv", "t.csv"), ("../t.csv", "below"), ("/etc/passwd", "below"), (".", "below")])
def test_a_declared_table_must_be_there(tmp_path: Path, file: str, said: str) -> None:
    assert said in refusal(make(tmp_path, {"t.csv": "image,label\na.jpg,x\n"}, ["a.jpg"]), file=file)


def test_no_table(tmp_path: Path) -> None:
    assert "none" in refusal(make(tmp_path, {}, ["a.jpg"]))


def test_one_table_for_each_split(tmp_path: Path) -> None:
    tables = {"a.csv": "image,label,split\n1,x,whatever\n", "b.csv": "image,label,split\n2,y,\n"}
    r = Read(make(tmp_path, tables, ["p/1.jpg", "q/2.jpg"]), file={"train": "a.csv", "Valid": "b.csv"})
    assert {p: (i.split, i.label) for p, i in r.items.items()} == {"p/1.jpg": ("train", "x"), "q/2.jpg": ("val", "y")}
    assert (r.listing.has_splits, r.listing.num_used, r.findings) == (True, 2, [])


def test_a_picture_in_the_tables_of_two_splits(tmp_path: Path) -> None:
    tables = {"a.csv": "image,label\n1.jpg,x\n2.jpg,x\n", "b.csv": "image,label\n2.jpg,x\n"}
    f = Read(make(tmp_path, tables, ["1.jpg", "2.jpg"]), file={"train": "a.csv", "test": "b.csv"}).one("split-conflict")
    assert (f.level, f.path, f.sample, f.line) == ("error", "b.csv", "2.jpg", 2)
    assert "'train' in a.csv, line 3" in f.message


def test_tables_of_two_kinds(tmp_path: Path) -> None:
    tables = {"a.csv": "image,label\n1.jpg,x\n", "b.csv": CORNERS + "2.jpg,1,2,3,4,x\n"}
    assert "one kind" in refusal(make(tmp_path, tables, ["1.jpg", "2.jpg"]), file={"train": "a.csv", "test": "b.csv"})


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("train_val_test_split.csv", "image_id,split\na,train\n"),
        ("t.csv", "a.jpg,crack\n"),
        ("t.csv", "who,when\n"),
        ("t.txt", "image,label\n"),
        (".t.csv", "image,label\n"),
        ("a/b/t.csv", "image,label\n"),
    ],
)
def test_what_does_not_look_like_a_csv_data_set(tmp_path: Path, name: str, text: str) -> None:
    assert sniff(make(tmp_path, {name: text}, ["a.jpg"])) is None


def test_sniff_names_table_and_columns_also_of_text_that_does_not_decode(tmp_path: Path) -> None:
    assert sniff(make(tmp_path, {"t.csv": b"image,label\na.jpg,\xf3\n"}, [])) == "t.csv has columns image, label"
    assert sniff(tmp_path / "gone") is None


def test_why_a_table_is_not_recognised(tmp_path: Path) -> None:
    tables: dict[str, str | bytes] = {
        "bare.csv": "a.jpg,crack\n",
        "onehot.csv": "filename,a,b\na.jpg,1,0\n",
        "who.tsv": "who\tlabel\n",
        "empty.csv": "",
        "renamed.csv": b"PK\x03\x04\0\0 [Content_Types].xml",
        "nul.csv": "a\0b\n",
        "sub/notes.csv": "who,when\n",
        "book.XLSX": b"",
        "old.xls": b"",
        "calc.ods": b"",
        "train_val_test_split.csv": "image_id,split\na,train\n",
        "good.csv": "image,label\n",
        "a/b/deep.csv": "who,when\n",
        ".hidden.csv": "who,when\n",
        "sub/book.xlsx": b"",
    }
    reasons = dict(why_not(make(tmp_path, tables, ["a.jpg"])))
    workbooks = ["book.XLSX", "calc.ods", "old.xls", "renamed.csv"]
    assert sorted(reasons) == sorted([*workbooks, "bare.csv", "onehot.csv", "who.tsv", "empty.csv", "nul.csv", "sub/notes.csv"])
    assert {reasons[name].partition(";")[0] for name in workbooks} == {"is an Excel/OpenDocument workbook: save it as CSV"}
    assert "'a.jpg,crack', no header" in reasons["bare.csv"]
    assert "header = false" in reasons["bare.csv"]
    assert "'filename,a,b'; expected a column for the class (label, class" in reasons["onehot.csv"]
    assert "expected a column for the picture's path (filename, file_name" in reasons["who.tsv"]
    assert "the class (" not in reasons["who.tsv"]
    assert "path (" in reasons["sub/notes.csv"]
    assert "the class (" in reasons["sub/notes.csv"]
    assert reasons["empty.csv"] == "the file is empty"
    assert reasons["nul.csv"].startswith("line 1: holds a NUL")


def test_why_not_never_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_not(tmp_path / "gone") == []
    make(tmp_path, {"t.csv": "who,when\n"}, [])

    def gone(*_: object, **__: object) -> None:
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(Path, "open", gone)
    assert why_not(tmp_path) == [("t.csv", "cannot be read: No such file or directory")]


# Which picture


@pytest.mark.parametrize(
    ("cell", "picture"),
    [
        ("images/lot1/a.jpg", "images/lot1/a.jpg"),
        ("images\\lot1\\a.jpg", "images/lot1/a.jpg"),
        (".\\images\\lot1\\a.jpg", "images/lot1/a.jpg"),
        ("./images//lot1/./a.jpg", "images/lot1/a.jpg"),
        ("images/../images/lot1/a.jpg", "images/lot1/a.jpg"),
        ("images\\b.jpg", "images\\b.jpg"),
        ("lot1/c", "lot1/c.png"),
        ("lot1\\c", "lot1/c.png"),
        ("d.e", "d.e.jpg"),
        ("a:b.jpg", "a:b.jpg"),
        ("001", "001.jpg"),
        ("nfd/soud\u00e9.jpg", unicodedata.normalize("NFD", "nfd/soud\u00e9.jpg")),
        ("nfd\\soud\u00e9", unicodedata.normalize("NFD", "nfd/soud\u00e9.jpg")),
        (unicodedata.normalize("NFD", "nfc/soud\u00e9"), "nfc/soud\u00e9.jpg"),
    ],
)
def test_spellings_of_a_path(tmp_path: Path, cell: str, picture: str) -> None:
    pictures = {"images/lot1/a.jpg", "images\\b.jpg", "images/b.jpg", "lot1/c.png", "d.e.jpg", "a:b.jpg", "001.jpg", "1.jpg", picture}
    r = Read(make(tmp_path, {"t.csv": f"image,label\n{cell},x\n"}, pictures))
    assert r.labels == {picture: "x"}
    assert {f.code for f in r.findings} == {"no-row"}


def test_image_dir_comes_before_the_root_and_the_tables_own_folder(tmp_path: Path) -> None:
    root = make(tmp_path, {"ann/t.csv": "image,label\na.jpg,x\n"}, ["a.jpg", "images/a.jpg", "ann/a.jpg"])
    assert set(Read(root, image_dir=".\\images\\").labels) == {"images/a.jpg"}
    assert set(Read(root).labels) == {"a.jpg"}
    (root / "a.jpg").unlink()
    assert set(Read(root).labels) == {"ann/a.jpg"}


def test_a_path_from_the_tables_own_folder_may_go_up_within_the_root(tmp_path: Path) -> None:
    root = make(tmp_path, {"ann/t.csv": "image,label\n../images/a.jpg,x\n../../images/a.jpg,x\n"}, ["images/a.jpg"])
    r = Read(root)
    assert (r.labels, r.codes) == ({"images/a.jpg": "x"}, [("path-outside", "../../images/a.jpg")])


def test_ids_below_one_folder_are_found_and_said(tmp_path: Path) -> None:
    r = Read(make(tmp_path, {"t.csv": "image,label\na,x\nlot/b,y\ngone,x\n"}, ["images/a.jpg", "images/lot/b.jpg"]))
    assert r.labels == {"images/a.jpg": "x", "images/lot/b.jpg": "y"}
    assert r.codes == [("missing-image", "gone")]
    assert any("'images'" in note for note in r.listing.notes)


def test_ids_below_two_folders_are_not_guessed(tmp_path: Path) -> None:
    r = Read(make(tmp_path, {"t.csv": "image,label\na,x\n"}, ["images/a.jpg", "thumbs/a.jpg"]))
    f = r.one("missing-image")
    assert (r.labels, f.sample, f.line, f.level, f.path) == ({}, "a", 2, "skip", "t.csv")
    assert "images, thumbs" in f.message
    assert "image_dir" in f.message


def test_a_folder_is_not_searched_for_where_some_paths_are_found_as_written(tmp_path: Path) -> None:
    r = Read(make(tmp_path, {"t.csv": "image,label\ni/a.jpg,x\nb.jpg,x\n"}, ["i/a.jpg", "i/b.jpg"]))
    assert r.codes == [("no-row", "i/b.jpg"), ("missing-image", "b.jpg")]


def test_an_id_of_two_pictures_is_ambiguous(tmp_path: Path) -> None:
    r = Read(make(tmp_path, {"t.csv": "image,label\na,x\nb.jpg,x\na,x\n"}, ["a.jpg", "a.png", "b.jpg", "b.jpg.png"]))
    f = r.one("ambiguous-image")
    assert (f.sample, f.line, f.count) == ("a", 2, 2)
    assert "a.jpg or a.png" in f.message
    assert r.labels == {"b.jpg": "x"}


@pytest.mark.parametrize(
    "cell",
    [
        "../outside/secret.jpg",
        "images/../../outside/secret.jpg",
        "..\\outside\\secret.jpg",
        "/etc/secret.jpg",
        "\\\\host\\share\\secret.jpg",
        "C:\\secret.jpg",
        "file:///etc/hostname",
        "file:secret.jpg",
        "HTTPS://example.com/x.jpg",
        "http:/example.com/x.jpg",
        "s3://bucket/x.jpg",
        "gs://bucket/x.jpg",
        "data:image/png;base64,AAAA",
        "..",
    ],
)
def test_paths_that_leave_the_root_are_refused(tmp_path: Path, cell: str) -> None:
    root = make(tmp_path / "root", {"t.csv": f'image,label\n"{cell}",x\na.jpg,x\n"{cell}",x\n'}, ["a.jpg"])
    make(tmp_path, {}, ["outside/secret.jpg"])
    r = Read(root)
    f = r.one("path-outside")
    assert (f.level, f.path, f.line, f.sample, f.count) == ("skip", "t.csv", 2, cell, 2)
    assert repr(cell) in f.message
    assert set(r.items) == {"a.jpg"}


def test_a_cell_without_end_is_shortened(tmp_path: Path) -> None:
    f = Read(make(tmp_path, {"t.csv": f"image,label\ndata:{'A' * 10_000},x\na.jpg,x\n"}, ["a.jpg"])).one("path-outside")
    assert len(str(f)) < 1000


def test_pictures_and_rows_without_the_other(tmp_path: Path) -> None:
    r = Read(make(tmp_path, {"t.csv": "image,label\na.jpg,x\ngone.jpg,y\n"}, ["a.jpg", "b.jpg", "c.txt"]))
    assert {(f.level, f.code, f.path, f.sample, f.line) for f in r.findings} == {
        ("skip", "no-row", "b.jpg", "b.jpg", None),
        ("skip", "missing-image", "t.csv", "gone.jpg", 3),
        ("warning", "unsupported-file", "c.txt", "c.txt", None),
    }
    assert (r.listing.classes, r.items["b.jpg"].refused, r.items["a.jpg"].refused) == (["x"], True, False)


def test_a_picture_that_the_walk_refused_stays_refused(tmp_path: Path) -> None:
    root = make(tmp_path, {"t.csv": "image,label\na.jpg,x\nb.jpg,x\n"}, ["a.jpg"])
    (root / "b.jpg").symlink_to("gone.jpg")
    r = Read(root)
    assert (r.items["b.jpg"].refused, r.codes) == (True, [("broken-link", "b.jpg")])


# Labels


def test_labels_are_text(tmp_path: Path) -> None:
    names = ["NA", "None", "nan", "null", "N/A", "01", "1", "1.0", "1e0", "007", "true", "-"]
    rows = "".join(f"{i}.jpg,{name}\n" for i, name in enumerate(names))
    r = Read(make(tmp_path, {"t.csv": "image,label\n" + rows}, [f"{i}.jpg" for i in range(len(names))]))
    assert list(r.listing.classes or []) == sorted(names)
    assert r.labels == {f"{i}.jpg": name for i, name in enumerate(names)}
    assert r.findings == []


def test_a_row_of_another_table_is_named_with_it(tmp_path: Path) -> None:
    tables = {"train.csv": "image,label\na.jpg,x\nb.jpg,x\n", "test.csv": "image,label\nc.jpg,x\na.jpg,x\nb.jpg,y\n"}
    r = Read(make(tmp_path, tables, ["a.jpg", "b.jpg", "c.jpg"]), file={"train": "train.csv", "test": "test.csv"})
    same, conflict = r.one("duplicate-row"), r.one("label-conflict")
    assert (same.path, same.line, same.message) == ("test.csv", 3, "line 3: says the same as train.csv, line 2; one of them is enough")
    assert (conflict.path, conflict.line) == ("test.csv", 4)
    assert "class 'y' here, 'x' in train.csv, line 3; a picture has one class" in conflict.message


def test_blank_labels_and_repeated_rows(tmp_path: Path) -> None:
    rows = "a.jpg,x\nb.jpg,x\nb.jpg,y\nc.jpg,\n./a.jpg,x\na.jpg,x\nb.jpg,x\n"
    r = Read(make(tmp_path, {"t.csv": "image,label\n" + rows}, ["a.jpg", "b.jpg", "c.jpg"]))
    same, conflict, blank = r.one("duplicate-row"), r.one("label-conflict"), r.one("missing-class")
    assert (same.level, same.sample, same.line, same.count) == ("warning", "a.jpg", 6, 2)
    assert "line 2" in same.message
    assert (conflict.level, conflict.sample, conflict.line) == ("skip", "b.jpg", 4)
    assert "'y' here, 'x' in line 3" in conflict.message
    assert (blank.level, blank.sample, blank.line) == ("skip", "c.jpg", 5)
    assert r.labels == {"a.jpg": "x"}
    assert r.listing.classes == ["x"]


@pytest.mark.parametrize(
    ("label", "warned"), [("crack|slag", True), ("a;b", True), ("slag,x", True), ("slag, line", False), ("|", False), ("N/A", False)]
)
def test_several_classes_in_one_cell_are_one_class_and_said(tmp_path: Path, label: str, warned: bool) -> None:
    r = Read(make(tmp_path, {"t.csv": f'image,label\na.jpg,"{label}"\nb.jpg,slag\nc.jpg,x\n'}, ["a.jpg", "b.jpg", "c.jpg"]))
    assert r.labels["a.jpg"] == label
    assert r.codes == ([("looks-multi-label", "a.jpg")] if warned else [])


def test_given_classes_fix_the_order_and_refuse_others(tmp_path: Path) -> None:
    r = Read(make(tmp_path, {"t.csv": "image,label\na.jpg,x\nb.jpg,y\nc.jpg,Y\n"}, ["a.jpg", "b.jpg", "c.jpg"]), classes=["y", "x", "z"])
    assert (r.listing.classes, set(r.labels)) == (["y", "x", "z"], {"a.jpg", "b.jpg"})
    f = r.one("unknown-class")
    assert (f.level, f.sample, f.line, f.path) == ("skip", "c.jpg", 4, "t.csv")
    assert "'Y'" in f.message
    boxes = CORNERS + "a.jpg,1,2,3,4,x\na.jpg,1,2,3,4,Y\na.jpg,1,2,3,5,Y\nb.jpg,1,2,3,4,y\n"
    r = Read(make(tmp_path, {"t.csv": boxes}, []), classes=["y", "x"], file="t.csv")
    f = r.one("unknown-class")
    assert (f.sample, f.line, f.count, set(r.annotations)) == ("a.jpg", 3, 2, {"b.jpg"})


def test_extra_columns_are_kept_as_text(tmp_path: Path) -> None:
    table = "image,label,Operator,kids\na.jpg,x,007,True\nb.jpg,x,,\n"
    r = Read(make(tmp_path, {"t.csv": table}, ["a.jpg", "b.jpg"]), extra=["operator", 3])
    assert r.annotations["a.jpg"].extra == {"operator": "007", "3": "True"}
    assert r.annotations["b.jpg"].extra == {"operator": "", "3": ""}
    table = CORNERS.strip() + ",who\na.jpg,1,2,3,4,x,p\na.jpg,1,2,3,5,x,q\nb.jpg,1,2,3,4,x,p\nb.jpg,1,2,3,5,x,p\n"
    r = Read(make(tmp_path, {"t.csv": table}, []), extra=["who"])
    assert (r.annotations["a.jpg"].extra, r.annotations["b.jpg"].extra) == ({}, {"who": "p"})
    assert (r.codes, r.findings[0].level, r.findings[0].line) == ([("extra-differs", "a.jpg")], "warning", 3)


# Splits


def test_a_split_column(tmp_path: Path) -> None:
    values = ["train", "VAL", "validation", "Valid", "dev", "test", " Testing "]
    rows = "".join(f"{i}.jpg,x,{v}\n" for i, v in enumerate(values))
    root = make(tmp_path, {"t.csv": "image,label,subset\n" + rows}, [f"{i}.jpg" for i in range(len(values))])
    r = Read(root)
    assert [i.split for i in r.listing.items] == ["train", "val", "val", "val", "val", "test", "test"]
    assert (r.findings, r.listing.has_splits) == ([], True)
    assert any("'subset'" in note for note in r.listing.notes)
    off = Read(root, columns={"split": False})
    assert ({i.split for i in off.listing.items}, off.listing.has_splits) == ({None}, False)


def test_splits_that_contradict_or_are_unknown_are_faults_of_the_data_set(tmp_path: Path) -> None:
    rows = "a.jpg,1,2,3,4,x,train\nb.jpg,1,2,3,4,x,trian\na.jpg,5,6,7,8,x,test\nc.jpg,1,2,3,4,x,\nd.jpg,1,2,3,4,x,val\n"
    r = Read(make(tmp_path, {"t.csv": CORNERS.strip() + ",split\n" + rows}, [f"{c}.jpg" for c in "abcd"]))
    conflict = r.one("split-conflict")
    assert (conflict.level, conflict.sample, conflict.line) == ("error", "a.jpg", 4)
    assert "'test' here and in 'train' in line 2" in conflict.message
    assert [(f.level, f.sample, f.line) for f in r.findings if f.code == "unknown-split"] == [("error", "b.jpg", 3), ("error", "c.jpg", 5)]
    assert "'trian'" in next(f for f in r.findings if f.line == 3).message
    assert set(r.annotations) == {"d.jpg"}


# Boxes


@pytest.mark.parametrize(
    ("row", "code", "said"),
    [
        ("x.jpg,1,2,3,4,", "incomplete-row", "1, 2, 3, 4"),
        ("x.jpg,,,,,crack", "incomplete-row", "'crack'"),
        ("x.jpg,1,,3,4,crack", "incomplete-row", "'crack'"),
        ("x.jpg,1,,,,", "incomplete-row", "1"),
        ("x.jpg,1,2,3,abc,crack", "bad-number", "'abc' in column 'y2' is no number"),
        ('x.jpg,1,2,"4,5",3,crack', "bad-number", "'4,5' in column 'x2' is no number; this looks like a decimal comma, write 4.5"),
        ("x.jpg,1,2,3,1_0,crack", "bad-number", "'1_0'"),
        ("x.jpg,1,2,3,4", "ragged-row", "5 cells, expected 6"),
        ("x.jpg,1,2,3,4,crack,more", "ragged-row", "7 cells, expected 6"),
        ("x.jpg", "ragged-row", "1 cells"),
    ],
)
def test_rows_that_cannot_be_true_refuse_their_picture(tmp_path: Path, row: str, code: str, said: str) -> None:
    table = CORNERS + f'x.jpg,1,2,3,4,"cr\nack"\n{row}\na.jpg,10,8,30,24,crack\n{row}\n'
    r = Read(make(tmp_path, {"t.csv": table}, ["a.jpg", "x.jpg"]))
    assert r.codes == [(code, "x.jpg")]
    assert (r.findings[0].level, r.findings[0].line, r.findings[0].count) == ("skip", 4, 2)
    assert "line 4: " in r.findings[0].message
    assert said in r.findings[0].message
    assert set(r.annotations) == {"a.jpg"}
    assert r.listing.classes == ["crack"]


def test_rows_without_a_path_and_with_blank_cells_too_many(tmp_path: Path) -> None:
    r = Read(make(tmp_path, {"t.csv": CORNERS + ",1,2,3,4,crack\na.jpg,1,2,3,4,crack,,\n,1,2,3,4,slag\n"}, ["a.jpg"]))
    f = r.one("no-path")
    assert (f.level, f.sample, f.line, f.count, r.codes) == ("skip", None, 2, 2, [("no-path", None)])
    assert r.boxes("a.jpg") == [[1, 2, 3, 4]]


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "1e400"])
@pytest.mark.parametrize("box_format", ["xywh", "cxcywh"])
def test_numbers_that_are_not_finite_are_left_to_the_check_of_boxes(tmp_path: Path, text: str, box_format: str) -> None:
    r = Read(make(tmp_path, {"t.csv": f"image,label,x,y,w,h\na.jpg,x,{text},1,{text},1\n"}, ["a.jpg"]), box_format=box_format)
    assert not np.isfinite(r.annotations["a.jpg"].boxes).all()
    assert r.findings == []


def test_flags_must_be_flags(tmp_path: Path) -> None:
    table = CORNERS.strip() + ",difficult,occluded\na.jpg,1,2,3,4,x,True,0\nb.jpg,1,2,3,4,x,maybe,0\n"
    r = Read(make(tmp_path, {"t.csv": table}, ["a.jpg", "b.jpg"]))
    assert (r.codes, r.annotations["a.jpg"].difficult.tolist()) == ([("bad-flag", "b.jpg")], [1])


def test_rows_that_say_there_is_no_object(tmp_path: Path) -> None:
    rows = "a.jpg,1,2,3,4,x\na.jpg,,,,,\nb.jpg,,,,,\nb.jpg,,,,,\nb.jpg,,,,,\nc.jpg,,,,,\n"
    r = Read(make(tmp_path, {"t.csv": CORNERS + rows}, ["a.jpg", "b.jpg", "c.jpg"]))
    assert r.codes == [("blank-row", "a.jpg"), ("duplicate-row", "b.jpg")]
    assert [(f.level, f.line, f.count) for f in r.findings] == [("warning", 3, 1), ("warning", 5, 2)]
    assert [r.annotations[f"{c}.jpg"].boxes.shape for c in "abc"] == [(1, 4), (0, 4), (0, 4)]


# What other stages rely on


def test_a_stamp_changes_with_the_rows_of_its_picture_only(tmp_path: Path) -> None:
    table = CORNERS + "a.jpg,1,2,3,4,x\nb.jpg,1,2,3,4,y\nb.jpg,1,2,3,5,x\n"

    def stamps(text: str, **options: Any) -> tuple[bytes, bytes]:
        r = Read(make(tmp_path, {"t.csv": text}, ["a.jpg", "b.jpg"]), **options)
        return r.items["a.jpg"].stamp, r.items["b.jpg"].stamp

    a, b = stamps(table)
    assert (len(a), len(b), a != b) == (16, 16, True)
    assert stamps(table) == (a, b)
    assert stamps(CORNERS + "b.jpg,1,2,3,4,y\nb.jpg,1,2,3,5,x\n\n\na.jpg,1,2,3,4,x\n") == (a, b)
    for changed in (table.replace("3,5,x", "3,6,x"), table.replace("3,5,x", "3,5,y"), table.replace("b.jpg,1,2,3,5,x\n", "")):
        assert stamps(changed)[0] == a
        assert stamps(changed)[1] != b
    labels = "image,label,split\na.jpg,x,train\nb.jpg,x,train\n"
    assert len({*stamps(labels), *stamps(labels.replace("train\nb", "val\nb")), *stamps(labels.replace("a.jpg,x", "a.jpg,y"))}) == 3


def test_the_digest_covers_name_and_bytes_of_the_tables(tmp_path: Path) -> None:
    table = "image,label\na.jpg,x\n"
    digests = [
        Read(make(tmp_path / str(i), {name: text}, ["a.jpg"])).listing.digest
        for i, (name, text) in enumerate([("t.csv", table), ("t.csv", table), ("u.csv", table), ("t.csv", table + "\n")])
    ]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


def test_options_are_those_that_were_given(tmp_path: Path) -> None:
    root = make(tmp_path, {"t.csv": "image,label\na.jpg,x\n"}, ["a.jpg"])
    assert Read(root).source.options == {}
    given_options = {"file": "t.csv", "columns": {"path": 0}, "extra": ["label"]}
    assert Read(root, **given_options).source.options == given_options


def test_annotate_needs_a_listing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="list"):
        CsvSource(tmp_path, CsvOptions()).annotate(Item("a.jpg", None, 0, 0), lambda _: None)


def test_many_scattered_rows_make_few_findings_and_keep_their_order(tmp_path: Path) -> None:
    rng, rows, expected = random.Random(0), [], {f"{i}.jpg": [] for i in range(20)}
    for n in range(5000):
        name = f"{rng.randrange(20)}.jpg"
        expected[name].append([n, 0, n + 1, 1])
        rows.append(f"{name},{n},0,{n + 1},1,c{n % 3}\n" + f"gone{n % 2},{n},0,1,1,x\n")
    r = Read(make(tmp_path, {"t.csv": CORNERS + "".join(rows)}, expected))
    assert [(f.code, f.sample, f.count) for f in r.findings] == [("missing-image", "gone0", 2500), ("missing-image", "gone1", 2500)]
    assert {name: r.boxes(name) for name in expected} == expected
    assert all(a.lines == [2 + 2 * int(b[0]) for b in a.boxes] for a in r.annotations.values())


NUMBER = st.integers(0, 4000).map(lambda n: n / 4)
BOX = st.tuples(st.integers(0, 5), st.tuples(NUMBER, NUMBER, NUMBER, NUMBER), st.sampled_from(["crack", "1", "NA"]))


@settings(deadline=None, max_examples=60)
@given(st.lists(BOX, min_size=1, max_size=30), st.sampled_from(["xyxy", "xywh", "cxcywh"]), st.booleans(), st.sampled_from(",;\t|"))
def test_boxes_come_back_in_every_format(
    tmp_path_factory: pytest.TempPathFactory,
    boxes: list[tuple[int, tuple[float, float, float, float], str]],
    box_format: str,
    in_one_cell: bool,
    delimiter: str,
) -> None:
    root = make(tmp_path_factory.mktemp("boxes"), {}, [f"{i}.png" for i in range(6)])
    expected: dict[str, list[tuple[list[float], str]]] = {}
    names = {"xyxy": ["x1", "y1", "x2", "y2"]}.get(box_format, ["x", "y", "w", "h"])
    lines = [delimiter.join(["image", "label", *(["bbox"] if in_one_cell else names)])]
    for picture, (x, y, w, h), label in boxes:
        expected.setdefault(f"{picture}.png", []).append(([x, y, x + w, y + h], label))
        numbers = {"xyxy": [x, y, x + w, y + h], "xywh": [x, y, w, h], "cxcywh": [x + w / 2, y + h / 2, w, h]}[box_format]
        cells = [f'"{numbers}"'] if in_one_cell else [str(n) for n in numbers]
        lines.append(delimiter.join([f"{picture}.png", label, *cells]))
    make(root, {"t.csv": "\n".join(lines)}, [])
    r = Read(root, box_format=box_format)
    assert {p: list(zip(a.boxes.tolist(), a.labels, strict=True)) for p, a in r.annotations.items()} == expected
