from __future__ import annotations

import os
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packer.sample import Annotation, Finding, Item
from packer.sources.tree import File
from packer.sources.voc_xml import MAX_OBJECTS, XmlFault, decode_xml, parse_voc, root_element, text_codec
from voc_data import put, put_pair, source, voc_object, voc_xml


def annotate(root: Path, xml: str | bytes, **options: object) -> tuple[Annotation | None, list[Finding]]:
    put_pair(root, "w", xml)
    findings: list[Finding] = []
    info = (root / "annotations/w.xml").stat()
    item = Item("images/w.jpg", None, 0, 0, ref=File("annotations/w.xml", info.st_size, info.st_mtime_ns))
    annotation = source(root, **options).annotate(item, findings.append)
    assert all((f.path, f.sample) == ("annotations/w.xml", "images/w.jpg") for f in findings)
    return annotation, findings


def good(root: Path, xml: str | bytes, **options: object) -> Annotation:
    annotation, findings = annotate(root, xml, **options)
    assert findings == []
    assert annotation is not None
    return annotation


def refused(root: Path, xml: str | bytes, **options: object) -> Finding:
    annotation, findings = annotate(root, xml, **options)
    assert annotation is None
    assert [f.level for f in findings] == ["skip"]
    return findings[0]


# Numbers


def test_a_whole_annotation(tmp_path: Path) -> None:
    flags = "<truncated>1</truncated><difficult>0</difficult><occluded>true</occluded><pose>Unspecified</pose>"
    xml = voc_xml(
        voc_object(extra=flags),
        voc_object("slag", (1, 2.5, "3e1", " 40\n"), "<difficult> 1 </difficult><truncated>Unspecified</truncated>"),
    )
    a = good(tmp_path, xml)
    assert a.boxes.tolist() == [[11, 9, 30, 24], [1, 2.5, 30, 40]]
    assert a.boxes.dtype == np.float64
    assert a.labels == ["crack", "slag"]
    assert (a.difficult.tolist(), a.truncated.tolist(), a.occluded.tolist()) == ([0, 1], [1, 0], [1, 0])
    assert a.size == (64, 48)
    assert a.places == ["object 1", "object 2"]
    assert a.path == "annotations/w.xml"
    assert not a.normalized


def test_origin_1_is_shifted_at_the_near_corner_only(tmp_path: Path) -> None:
    assert good(tmp_path, voc_xml(voc_object()), origin=1).boxes.tolist() == [[10, 8, 30, 24]]


NUMBER = st.floats(1, 1e6, allow_nan=False) | st.integers(1, 10_000)


@settings(deadline=None)
@given(st.lists(st.tuples(NUMBER, NUMBER, NUMBER, NUMBER), max_size=5), st.sampled_from([0, 1]))
def test_numbers_come_back_exactly(tmp_path_factory: pytest.TempPathFactory, boxes: list[tuple[float, ...]], origin: int) -> None:
    xml = voc_xml(*(voc_object(box=box) for box in boxes))
    got = good(tmp_path_factory.mktemp("voc"), xml, origin=origin).boxes
    assert got.tolist() == [[b[0] - origin, b[1] - origin, b[2], b[3]] for b in boxes]


def test_a_zero_under_origin_1_is_clipped_and_told_once(tmp_path: Path) -> None:
    a, findings = annotate(tmp_path, voc_xml(voc_object(box=(0, 0, 63, 47)), voc_object(box=(5, 0, 63, 47))), origin=1)
    assert a is not None
    assert a.boxes.tolist() == [[0, 0, 63, 47], [4, 0, 63, 47]]
    assert [(f.level, f.code, f.object, f.count) for f in findings] == [("warning", "origin-mismatch", 1, 2)]


def test_negative_and_non_finite_numbers_are_passed_on_as_written(tmp_path: Path) -> None:
    a = good(tmp_path, voc_xml(voc_object(box=(-5, 3, "inf", "NaN"))), origin=1)
    assert np.array_equal(a.boxes, [[-6, 2, np.inf, np.nan]], equal_nan=True)
    assert "-5, 3, inf, NaN" in a.places[0]


@pytest.mark.parametrize("text", ["12px", "1e400", "1_000", "", "12,5", "0x10"])
def test_what_is_no_number_is_quoted(tmp_path: Path, text: str) -> None:
    f = refused(tmp_path, voc_xml(voc_object(), voc_object(box=(1, 2, text, 4))))
    assert (f.code, f.object) == ("bad-number", 2)
    assert f"<xmax> is {text!r}" in f.message


@pytest.mark.parametrize(
    "size",
    [
        "<width>0</width><height>0</height>",
        "<width>64</width>",
        "<width>a</width><height>48</height>",
        "<width>-1</width><height>1.5</height>",
        "",
    ],
)
def test_a_size_that_is_none_is_told(tmp_path: Path, size: str) -> None:
    a, findings = annotate(tmp_path, voc_xml(voc_object(), head=f"<size>{size}</size>"))
    assert a is not None
    assert a.size is None
    assert [(f.level, f.code) for f in findings] == [("warning", "bad-size")]


def test_no_size_is_no_fault(tmp_path: Path) -> None:
    assert good(tmp_path, voc_xml(voc_object(), head="")).size is None


# Objects


def test_no_objects_is_a_negative(tmp_path: Path) -> None:
    a = good(tmp_path, voc_xml())
    assert a.boxes.shape == (0, 4)
    assert (a.labels, a.difficult.shape, a.places) == ([], (0,), [])


@pytest.mark.parametrize(
    ("obj", "code", "mention"),
    [
        ("<object><bndbox/></object>", "missing-class", "no <name>"),
        (voc_object(" \u3000 "), "missing-class", "empty"),
        (voc_object("c" * 201), "bad-class-name", "201 characters"),
        ("<object><name>a</name></object>", "missing-box", "no <bndbox>"),
        ("<object/>", "missing-box", "no <bndbox>"),
        ("<object><name>a</name><polygon><x1>1</x1></polygon></object>", "missing-box", "<polygon>"),
        ("<object><name>a</name><robndbox><cx>1</cx></robndbox></object>", "missing-box", "<robndbox>"),
        ("<object><name>a</name><bndbox><xmin>1</xmin></bndbox></object>", "missing-box", "<ymin>"),
        (voc_object(box=("<b>1</b>", 2, 3, 4)), "missing-box", "<xmin>"),
        (voc_object(extra="<name>slag</name>"), "repeated-element", "<name>"),
        (voc_object(extra="<bndbox><xmin>1</xmin></bndbox>"), "repeated-element", "<bndbox>"),
        (voc_object().replace("</bndbox>", "<xmax>5</xmax></bndbox>"), "repeated-element", "<xmax>"),
    ],
)
def test_an_object_with_a_fault_refuses_the_picture(tmp_path: Path, obj: str, code: str, mention: str) -> None:
    a, findings = annotate(tmp_path, voc_xml(voc_object(), obj, voc_object()))
    assert a is None
    fault = next(f for f in findings if f.code == code)
    assert (fault.level, fault.object) == ("skip", 2)
    assert mention in fault.message
    assert len(fault.message) < 300


def test_all_faults_are_told_once_per_kind(tmp_path: Path) -> None:
    broken = "<object><name>a</name></object>"
    a, findings = annotate(tmp_path, voc_xml(broken, voc_object(""), broken, broken, voc_object(box=("x", 1, 2, 3))))
    assert a is None
    assert [(f.level, f.code, f.object, f.count) for f in findings] == [
        ("skip", "missing-box", 1, 3),
        ("skip", "missing-class", 2, 1),
        ("skip", "bad-number", 5, 1),
    ]
    assert "3, 4" in findings[0].message


def test_only_direct_children_count(tmp_path: Path) -> None:
    part = "<part><name>tip</name><bndbox><xmin>1</xmin><ymin>1</ymin><xmax>2</xmax><ymax>2</ymax></bndbox></part>"
    a = good(tmp_path, voc_xml("<parts><name>inner</name></parts>", voc_object(extra=part + part), "<segmented>0</segmented>"))
    assert a.labels == ["crack"]
    assert a.boxes.tolist() == [[11, 9, 30, 24]]


def test_elements_in_any_order(tmp_path: Path) -> None:
    box = "<bndbox><ymax>24</ymax><xmax>30</xmax><ymin>9</ymin><xmin>11</xmin></bndbox>"
    obj = f"<object>{box}<difficult>1</difficult><name>crack</name></object>"
    a = good(tmp_path, f"<annotation>{obj}<size><height>48</height><width>64</width></size></annotation>")
    assert (a.boxes.tolist(), a.size, a.difficult.tolist()) == ([[11, 9, 30, 24]], (64, 48), [1])


# Text


@pytest.mark.parametrize(
    ("name", "label"),
    [
        (" crack\n", "crack"),
        ("\u3000incomplete  fusion\u00a0", "incomplete  fusion"),
        ("cr<!-- note -->ack", "crack"),
        ("<![CDATA[crack<1mm]]>", "crack<1mm"),
        ("cr<![CDATA[a]]>ck", "crack"),
        ("slag &amp; gas", "slag & gas"),
        ("&#x88c2;&#32441;", "裂纹"),
    ],
)
def test_class_names_are_text_after_parsing(tmp_path: Path, name: str, label: str) -> None:
    assert good(tmp_path, voc_xml(voc_object(name))).labels == [label]


@pytest.mark.parametrize(
    ("xmlns", "prefix"), [(' xmlns="http://example.org/voc"', ""), (' xmlns:v="http://example.org/voc"', "v:")], ids=["default", "prefix"]
)
def test_namespaces_do_not_matter(tmp_path: Path, xmlns: str, prefix: str) -> None:
    xml = voc_xml(voc_object()).replace("</", "\0").replace("<", "<" + prefix).replace("\0", "</" + prefix)
    a = good(tmp_path, xml.replace(f"<{prefix}annotation", f"<{prefix}annotation{xmlns}", 1))
    assert (a.labels, a.size) == (["crack"], (64, 48))


@pytest.mark.parametrize(
    "encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "gbk", "GB2312", "gb18030", "big5", "shift_jis", "euc-kr"]
)
def test_declared_encodings(tmp_path: Path, encoding: str) -> None:
    declared = "utf-16" if encoding.startswith("utf-16") else encoding.removesuffix("-sig")
    label = {"euc-kr": "균열", "big5": "裂紋", "shift_jis": "亀裂"}.get(encoding, "裂纹")
    xml = f'<?xml version="1.0" encoding="{declared}"?>\n' + voc_xml(voc_object(label))
    assert good(tmp_path, xml.encode(encoding)).labels == [label]


def test_undeclared_gbk_is_refused_and_read_by_option(tmp_path: Path) -> None:
    for declaration in (
        "",
        '<?xml version="1.0" encoding="utf-8"?>\n',
        '<?xml version="1.0" encoding="utf-16"?>\n',
        '<?xml version="1.0" encoding="x-nonsense"?>\n',
    ):
        root = tmp_path / str(len(declaration))
        xml = (declaration + voc_xml(voc_object("裂纹"))).encode("gbk")
        f = refused(root, xml)
        assert f.code == "bad-xml"
        assert f.line is not None
        assert "[source] encoding" in f.message
        assert good(root, xml, encoding="gbk").labels == ["裂纹"]


def test_the_wrong_byte_is_named_by_line_and_column(tmp_path: Path) -> None:
    f = refused(tmp_path, b"<annotation>\n<name>\xc1\xd1</name></annotation>")
    assert f.line == 2
    assert "line 2, column 7: byte 0xc1" in f.message


def test_the_option_does_not_touch_files_that_declare_their_own(tmp_path: Path) -> None:
    xml = '<?xml version="1.0" encoding="utf-8"?>' + voc_xml(voc_object("裂纹"))
    assert good(tmp_path, xml.encode(), encoding="gbk").labels == ["裂纹"]


@pytest.mark.parametrize("name", ["hex", "idna", "punycode", "unicode_escape", "utf_7", "rot13", "undefined", "no-such", "a\0b"])
def test_what_is_no_character_set_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="no known encoding"):
        text_codec(name)


# Hostile files


@pytest.mark.parametrize(
    ("xml", "code", "mention"),
    [
        (b"", "bad-xml", "0 bytes"),
        (b"no xml", "bad-xml", "line 1, column 1"),
        (voc_xml() + voc_xml(), "bad-xml", "line 5"),
        (voc_xml(voc_object())[:-20], "bad-xml", "line 3"),
        ("<annotation>&foo;</annotation>", "bad-xml", "undefined entity"),
        ("<annotations><image/></annotations>", "not-voc", "<annotations>"),
        ('<!DOCTYPE annotation [<!ENTITY e "x">]><annotation><object><name>&e;</name></object></annotation>', "unsafe-xml", "'e'"),
        ('<!DOCTYPE annotation [<!ENTITY e SYSTEM "file:///etc/passwd">]><annotation/>', "unsafe-xml", "'e'"),
        ('<!DOCTYPE annotation [<!ENTITY % p SYSTEM "file:///etc/passwd"> %p;]><annotation/>', "unsafe-xml", "'p'"),
        ('<!DOCTYPE annotation SYSTEM "http://localhost/x.dtd"><annotation>&far;</annotation>', "bad-xml", "undefined entity"),
        ("<annotation>" + "<a>" * 100_000, "bad-xml", "not well-formed"),
        ("<annotation>" + "<object/>" * (MAX_OBJECTS + 1) + "</annotation>", "file-too-large", "objects"),
        ("<annotation>" + " " * (1 << 22) + "</annotation>", "file-too-large", "4 MiB"),
    ],
    ids=["empty", "text", "two", "cut", "undefined", "dialect", "entity", "external", "parameter", "dtd", "deep", "objects", "large"],
)
def test_files_that_are_no_annotation_are_refused(tmp_path: Path, xml: str | bytes, code: str, mention: str) -> None:
    f = refused(tmp_path, xml)
    assert f.code == code
    assert mention in f.message
    assert len(f.message) < 500


def test_a_doctype_without_entities_is_harmless(tmp_path: Path) -> None:
    assert good(tmp_path, '<!DOCTYPE annotation SYSTEM "file:///nowhere.dtd">' + voc_xml(voc_object())).labels == ["crack"]


def test_many_elements_take_bounded_memory() -> None:
    text = "<annotation>" + "<a>b</a>" * 100_000 + "</annotation>"
    tracemalloc.start()
    try:
        assert parse_voc(text).objects == []
        assert tracemalloc.get_traced_memory()[1] < 30 * len(text)
    finally:
        tracemalloc.stop()


def test_an_xml_that_is_gone_is_a_finding(tmp_path: Path) -> None:
    put(tmp_path, "images/w.jpg")
    findings: list[Finding] = []
    assert source(tmp_path).annotate(Item("images/w.jpg", None, 0, 0, ref=File("annotations/w.xml", 0, 0)), findings.append) is None
    assert [(f.level, f.code) for f in findings] == [("skip", "unreadable")]


@pytest.mark.parametrize("change", ["longer", "touched", "while it is read"])
def test_an_xml_that_is_not_as_it_was_listed_fails_the_build(tmp_path: Path, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    put_pair(tmp_path, "w", voc_xml(voc_object()))
    path = tmp_path / "annotations/w.xml"
    info = path.stat()
    item = Item("images/w.jpg", None, 0, 0, ref=File("annotations/w.xml", info.st_size, info.st_mtime_ns))
    if change == "longer":
        path.write_text(voc_xml(voc_object("a longer name")))
        os.utime(path, ns=(info.st_mtime_ns, info.st_mtime_ns))
    elif change == "touched":
        os.utime(path, ns=(1, 1))
    else:
        os.utime(path, ns=(1, 1))
        stats, now = iter([info]), path.stat()
        monkeypatch.setattr(os, "fstat", lambda _: next(stats, now))
    findings: list[Finding] = []
    assert source(tmp_path).annotate(item, findings.append) is None
    assert [(f.level, f.code, f.path, f.sample) for f in findings] == [("error", "source-changed", "annotations/w.xml", "images/w.jpg")]
    assert "run the command again" in findings[0].message


@settings(deadline=None, max_examples=200)
@given(st.binary(max_size=200) | st.binary(max_size=60).map(lambda b: b"<annotation>" + b + b"</annotation>"))
def test_any_bytes_parse_or_are_one_fault(data: bytes) -> None:
    code = "read"
    try:
        parse_voc(decode_xml(data))
    except XmlFault as e:
        str(e).encode("utf-8")
        code = e.code
    assert code in {"read", "bad-xml", "unsafe-xml", "not-voc"}


# <filename> and the root element


@pytest.mark.parametrize("filename", ["w.jpg", "w", "w.png", "D:\\scans\\w.jpg", "/mnt/scans/w.JPG", "  w.jpg ", ""])
def test_filenames_that_agree(tmp_path: Path, filename: str) -> None:
    good(tmp_path, voc_xml(head=f"<filename>{filename}</filename>"))


@pytest.mark.parametrize("filename", ["v.jpg", "w/v.jpg", "w.v2.jpg"])
def test_filenames_that_disagree_are_told(tmp_path: Path, filename: str) -> None:
    a, findings = annotate(tmp_path, voc_xml(head=f"<filename>{filename}</filename>"))
    assert a is not None
    assert [(f.level, f.code) for f in findings] == [("warning", "filename-mismatch")]
    assert filename in findings[0].message


@pytest.mark.parametrize(
    ("start", "root"),
    [
        (b"<annotation>", "annotation"),
        (b'\xef\xbb\xbf<?xml version="1.0"?>\n<!-- <x> --><v:annotation a="1" ', None),
        (b'\xef\xbb\xbf<?xml version="1.0"?>\n<!-- <x> --><v:annotation a="1">', "annotation"),
        ("<annotation><a>".encode("utf-16"), "annotation"),
        ('<?xml version="1.0" encoding="gbk"?><annotation><folder>裂'.encode("gbk")[:-1], "annotation"),
        (b"<annotations>", "annotations"),
        (b"", None),
        (b"\x89PNG", None),
        (b'<!DOCTYPE a [<!ENTITY e "x">]><annotation>', None),
    ],
)
def test_the_root_element_from_the_first_bytes(start: bytes, root: str | None) -> None:
    assert root_element(start) == root
