"""Relatives of the shared cases: files of another kind than their name says, objects and splits that would be passed over, look-alikes."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import tarfile
import unicodedata
import zipfile
from pathlib import Path
from typing import Any

import pytest

from build_data import Recorder
from conftest import picture, save, voc_xml
from packer.build import check
from packer.content import described, told, told_of_text
from packer.findings import as_dict
from packer.recipe import load_recipe
from packer.sample import PackError, UsageError

TABLE = "filename,label\na.jpg,crack\nb.jpg,slag\nc.jpg,crack\n"
XML = voc_xml("w1", (64, 48), [("crack", (2, 3, 20, 15))])


def zipped(name: str) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(name, "x")
    return buffer.getvalue()


def tarred() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("a.jpg"))
    return buffer.getvalue()


def put(root: Path, files: dict[str, bytes | str | None]) -> Path:
    """Write files; None is a picture, each another one."""
    for number, (name, content) in enumerate(files.items()):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            save(path, picture(seed=number))
        else:
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return root


def voc(root: Path, files: dict[str, bytes | str | None], split: str | None = "train_val_test_split.csv") -> Path:
    base: dict[str, bytes | str | None] = {}
    for i in range(3):
        base |= {f"images/w{i}.jpg": None, f"annotations/w{i}.xml": voc_xml(f"w{i}", (64, 48), [("crack", (2, 3, 20, 15))])}
    if split is not None:
        base[split] = "image_id,split\nw0,train\nw1,val\nw2,test\n"
    return put(root, {**base, **files})


def look(root: Path, **source: Any) -> tuple[dict[tuple[object, object], dict[str, object]], int, str]:
    """Findings by (code, path), pictures that can be packed, and what was said besides."""
    console = Recorder()
    outcome = check(root, load_recipe(None, {"source": source, "run": {"workers": 1}}), console)
    return {(f.code, f.path): as_dict(f) for f in outcome.findings or ()}, outcome.num_samples, console.text


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (gzip.compress(b"x"), "a gzip file: unpack it first"),
        (bz2.compress(b"x"), "a bzip2 file: unpack it first"),
        (lzma.compress(b"x"), "an xz file: unpack it first"),
        (lzma.compress(b"x", lzma.FORMAT_ALONE), "an LZMA file: unpack it first"),
        (zipped("a.jpg"), "a ZIP archive: unpack it first"),
        (zipped("xl/workbook.xml"), "an Excel/OpenDocument workbook: save it as CSV"),
        (tarred(), "a tar archive: unpack it first"),
        (b"7z\xbc\xaf\x27\x1c\0\4", "a 7-Zip archive: unpack it first"),
        (b"\0\0\0\x1cftypavif", "an AVIF picture"),
        (b"\0\0\0\x18ftypisom", "a film (MP4, QuickTime)"),
        (b"II*\0\x10\0\0\0CR\2\0", "a camera's raw file"),
        (b"\n<!DOCTYPE html><html>", "a page in HTML, as a failed download leaves it: fetch it again"),
        (b'{"error": 404}', "a text in JSON"),
        (b"/annex/objects/SHA256E-s1--aa.jpg\n", "a git-annex pointer (fetch the real file with 'git annex get')"),
        (b"\x89PNG\n\x1a\n\0", "a PNG picture whose line ends were changed by a transfer in text mode: fetch it again"),
        (b"\xff\xd8\xff\xe0".decode("latin-1").encode(), "a binary file that was saved as text, which cannot be undone: fetch it again"),
        (bytes(512), "nothing but zero bytes at its start, as a broken copy leaves it: fetch it again"),
        (b"\0\x05\x16\x07\0\2\0\0", "what macOS keeps beside a file (AppleDouble), not the file itself"),
    ],
)
def test_what_a_file_really_is_is_said_wherever_it_is_read(tmp_path: Path, data: bytes, said: str) -> None:
    assert told(data) == said
    found, packed, _ = look(put(tmp_path / "f", {"crack/a.jpg": None, "slag/b.jpg": None, "crack/x.jpg": data}))
    assert (str(found["unsupported-image", "crack/x.jpg"]["message"]).startswith(f"is {said};"), packed) == (True, 2)
    found, packed, _ = look(voc(tmp_path / "v", {"annotations/w1.xml": data}))
    assert (str(found["bad-xml", "annotations/w1.xml"]["message"]), packed) == (f"is {said}; expected an XML file", 2)
    with pytest.raises(PackError) as caught:
        look(put(tmp_path / "c", {"a.jpg": None, "labels.csv": data}), kind="csv")
    assert f"labels.csv: is {said}" in str(caught.value)


def test_tables_and_xml_are_not_mistaken() -> None:
    for text in (TABLE, XML, "\ufeff" + TABLE, "x", "", "[Header]\n", "{x}"):
        for codec in ("utf-8", "utf-16"):
            assert told(text.encode(codec)) is None
    assert described(b"404: Not Found\n") == "a text that begins with '404: Not Found'"
    assert described(b"\x80\x04\x95") == "of no known format: it starts with the bytes 80 04 95"


@pytest.mark.parametrize(
    "folder", ["P1", "P1 001", "P7 WIDTH", "GIF87", "GIF89a", "PAR1", "BZh91AY&SY", "8BPS", "qoif", "DDS 1", "LZIP", "IIRO", "%PDF"]
)
def test_the_name_of_a_picture_at_the_start_of_a_table_or_list_says_nothing_of_the_file(tmp_path: Path, folder: str) -> None:
    table = f"{folder}/a.jpg,crack\nb.jpg,slag Stra\u00dfe\n"
    for number, codec in enumerate(("utf-8", "utf-8-sig", "cp1252")):
        files: dict[str, bytes | str | None] = {f"{folder}/a.jpg": None, "b.jpg": None, "labels.csv": table.encode(codec)}
        columns = {"path": 0, "label": 1}
        found, packed, _ = look(put(tmp_path / str(number), files), kind="csv", header=False, columns=columns, encoding=codec)
        assert (found, packed) == ({}, 2)
    names = put(tmp_path / "voc", {f"JPEGImages/{folder}.jpg": None, f"Annotations/{folder}.xml": XML})
    _, packed, said = look(put(names, {"ImageSets/Main/train.txt": f"{folder}\n"}), kind="voc")
    assert packed == 1, said


def test_short_magics_still_tell_a_picture() -> None:
    for data, said in (
        (b"P5\n# made by hand\n2 2\n255\n", "a PNM picture"),
        (b"P6 2 2 255\n", "a PNM picture"),
        (b"P7\nWIDTH 2\n", "a PNM picture"),
        (b"GIF89a\2\0", "a GIF picture"),
        (bz2.compress(b""), "a bzip2 file: unpack it first"),
        (b"PAR1\x15\0", "a Parquet table: save it as CSV"),
    ):
        assert told(data) == said
        assert told_of_text(data + b"\0") == said  # no clean text
    for text in (b"P1\tP2\tlabel\n", b"P1\n", b"P1 welds/001.jpg,crack\n", b"BZh1/a.jpg\n", b"GIF89/1.jpg,cat\n"):
        assert told(text) is told_of_text(text) is None


def test_archives_are_named_and_where_all_hangs_on_them_refused(tmp_path: Path) -> None:
    found, packed, _ = look(put(tmp_path / "a", {"crack/a.jpg": None, "slag/b.jpg": None, "crack/x.jpg.gz": b"x", "more.7z": b"x"}))
    assert (set(found), packed) == ({("archive", "crack/x.jpg.gz"), ("archive", "more.7z")}, 2)
    found, _, _ = look(voc(tmp_path / "b", {"train_val_test_split.csv.gz": gzip.compress(b"x")}, split=None))
    assert found["archive", "train_val_test_split.csv.gz"]["level"] == "error"
    for name, files, kind, said in (
        ("c", {"images.zip": b"x"}, "auto", "images.zip lies there, and archives are not opened: unpack it first"),
        ("d", {"a.jpg": None, "labels.csv.gz": b"x"}, "auto", "labels.csv.gz: is compressed: unpack it first"),
        ("e", {"a.jpg": None, "labels.csv.xz": b"x"}, "csv", "labels.csv.xz lies there"),
        ("f", {"a.jpg": None, "annotations.tar": b"x"}, "voc", "annotations.tar lies there"),
        ("g", {"a.jpg": None, "metadata.jsonl": b"{}"}, "auto", "metadata.jsonl: by its name it holds labels, and .jsonl is not read"),
    ):
        with pytest.raises(PackError) as caught:
            look(put(tmp_path / name, dict(files)), kind=kind)
        assert said in str(caught.value)


def test_a_placeholder_of_icloud_is_a_picture_that_is_missing(tmp_path: Path) -> None:
    files: dict[str, bytes | str | None] = {
        "crack/a.jpg": None,
        "slag/b.jpg": None,
        "crack/.c.jpg.icloud": b"x",
        "crack/.a.jpg.icloud": b"x",
    }
    found, packed, said = look(put(tmp_path / "src", files))
    assert (set(found), packed) == ({("not-downloaded", "crack/c.jpg")}, 2)
    assert found["not-downloaded", "crack/c.jpg"]["level"] == "skip"
    assert "1 finding: 1 not-downloaded (skip)" in said


OBJECT = XML[XML.index("<object>") : XML.index("</annotation>")].strip()


@pytest.mark.parametrize(
    "wrong",
    [
        OBJECT.replace("object>", "Object>"),
        f"<objects>{OBJECT}</objects>",
        OBJECT.replace("object>", "item>"),
        OBJECT.replace("</object>", OBJECT + "</object>"),
        OBJECT[OBJECT.index("<bndbox>") : OBJECT.index("</object>")],
    ],
)
def test_an_object_in_the_wrong_place_never_makes_a_picture_without_defects(tmp_path: Path, wrong: str) -> None:
    found, packed, _ = look(voc(tmp_path / "src", {"annotations/w1.xml": XML.replace(OBJECT, wrong)}))
    assert (set(found), packed) == ({("misplaced-object", "annotations/w1.xml")}, 2)


def test_a_flag_that_is_no_flag_is_said(tmp_path: Path) -> None:
    xml = XML.replace("<difficult>0<", "<difficult>2<")
    assert xml != XML
    found, packed, _ = look(voc(tmp_path / "src", {"annotations/w1.xml": xml}))
    assert "<difficult> is '2', expected 0 or 1; taken as 0" in str(found["bad-flag", "annotations/w1.xml"]["message"])
    assert packed == 3


def test_splits_that_would_be_lost_are_said(tmp_path: Path) -> None:
    found, _, said = look(voc(tmp_path / "a", {}, split="Train_Val_Test_Split.CSV"))
    assert found == {}
    assert "splits: from Train_Val_Test_Split.CSV" in said
    found, _, _ = look(voc(tmp_path / "b", {"train.txt": "w0\n", "my_splits.csv": "x"}, split=None))
    assert {("unused-split", "train.txt"), ("unused-split", "my_splits.csv")} <= set(found)
    lists: dict[str, bytes | str | None] = {"ImageSets/Main/train.txt": "w0\nw1\nw2\n", "ImageSets/Main/val.txt": "\n"}
    assert set(look(voc(tmp_path / "c", lists, split=None))[0]) == {("empty-split", "ImageSets/Main/val.txt")}
    (put(tmp_path / "d", {"val/crack/a.jpg": None}) / "train").mkdir()
    assert set(look(tmp_path / "d")[0]) == {("empty-split", "train")}
    table = "filename,label,phase\na.jpg,x,train\nb.jpg,y,test\n"
    assert "column 'phase' gives the splits" in look(put(tmp_path / "e", {"a.jpg": None, "b.jpg": None, "t.csv": table}))[2]


def test_names_that_look_alike_are_said(tmp_path: Path) -> None:
    nfc, nfd = (unicodedata.normalize(form, "é") for form in ("NFC", "NFD"))
    table = TABLE.replace("slag", "Crack") + f"d.jpg,{nfc}\ne.jpg,{nfd}\n"
    files: dict[str, bytes | str | None] = {**dict.fromkeys([f"{n}.jpg" for n in "abcde"]), "labels.csv": table}
    found, packed, _ = look(put(tmp_path / "src", files))
    assert (set(found), packed) == ({("case-twins", ".")}, 5)
    assert "'Crack', 'crack'" in str(found["case-twins", "."]["message"])
    assert r"'e\u0301', '\xe9'" in str(found["case-twins", "."]["message"])  # which print the same
    assert found["case-twins", "."]["count"] == 2


@pytest.mark.parametrize("kind", ["folder", "voc", "csv"])
def test_a_given_class_without_pictures_is_said(tmp_path: Path, kind: str) -> None:
    files: dict[str, bytes | str | None] = {"crack/a.jpg": None, "slag/b.jpg": None}
    if kind == "voc":
        files = {"images/w1.jpg": None, "annotations/w1.xml": XML.replace("crack", "slag")}
    if kind == "csv":
        files = {"a.jpg": None, "labels.csv": "filename,label\na.jpg,slag\n"}
    found, _, _ = look(put(tmp_path, files), kind=kind, classes=["crack", "slag", "ghost"])
    empty = 1 if kind == "folder" else 2
    names = "'ghost'" if kind == "folder" else "'crack', 'ghost'"
    message = str(found["empty-class", "."]["message"])
    assert message == f"no picture of {empty} of the 3 classes of [source] classes was packed: {names}; they keep their ids"
    assert found["empty-class", "."]["level"] == "warning"


@pytest.mark.parametrize("kind", ["folder", "voc", "csv"])
def test_a_class_name_that_is_too_long_is_left_out(tmp_path: Path, kind: str) -> None:
    long, fits = "x" * 201, "y" * 200
    files: dict[str, bytes | str | None] = {f"{long}/a.jpg": None, f"{fits}/b.jpg": None}
    if kind == "voc":
        files = {"images/a.jpg": None, "annotations/a.xml": XML.replace("w1", "a").replace("crack", long)}
        files |= {"images/b.jpg": None, "annotations/b.xml": XML.replace("w1", "b").replace("crack", fits)}
    if kind == "csv":
        files = {"a.jpg": None, "b.jpg": None, "labels.csv": f"filename,label\na.jpg,{long}\nb.jpg,{fits}\n"}
    found, packed, _ = look(put(tmp_path, files), kind=kind)
    ((code, _),) = found
    assert (code, packed) == ("bad-class-name", 1)
    (finding,) = found.values()
    assert finding["level"] == "skip"
    assert "has 201 characters, at most 200" in str(finding["message"])


def test_a_cell_of_a_million_characters_harms_no_row(tmp_path: Path) -> None:
    table = "filename,label,mask\na.jpg,crack," + "1 2 " * 250_000 + "\nb.jpg,slag,\n"
    found, packed, _ = look(put(tmp_path / "src", {"a.jpg": None, "b.jpg": None, "labels.csv": table}))
    assert (found, packed) == ({}, 2)


@pytest.mark.parametrize("encoding", ["punycode", "nope\0", "", "idna", "rot13"])
def test_an_encoding_that_is_none_is_one_message(tmp_path: Path, encoding: str) -> None:
    with pytest.raises(PackError, match="is no known encoding"):
        look(put(tmp_path / "src", {"a.jpg": None, "labels.csv": TABLE}), kind="csv", encoding=encoding)


def test_a_mode_without_a_size_is_refused() -> None:
    with pytest.raises(UsageError, match="--mode crop says how to resize: give --resize too"):
        load_recipe(None, {"transform": {"mode": "crop"}})
    assert load_recipe(None, {"transform": {"mode": "crop", "resize": "64"}}).transform.resize == 64
