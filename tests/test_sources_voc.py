from __future__ import annotations

import os
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packer.sample import Finding, Item, PackError, Source
from packer.sources.splits import SPLIT_NAMES, split_of
from packer.sources.tree import File
from packer.sources.voc import VocOptions, VocSource
from packer.sources.voc_layout import Layout
from packer.sources.voc_splits import Names
from source_contract import SourceContract, say
from voc_data import codes, listed, put, put_pair, source, voc_object, voc_xml

SPLIT_CSV = "train_val_test_split.csv"
CYRILLIC = "\u0448\u043e\u0432 01"


def ref(item: Item) -> str | None:
    """The XML of a listed picture."""
    return None if item.ref is None else str(item.ref.path)


class TestContract(SourceContract):
    def make(self, root: Path) -> Source:
        for name in ("w1", "w2", "lot/w3"):
            put_pair(root, name)
        put_pair(root, "bad", "<annotation><object/></annotation>")
        put_pair(root, "unsafe", f'<!DOCTYPE a [<!ENTITY e SYSTEM "file://{root.parent}/outside/secret.jpg">]><annotation>&e;</annotation>')
        put_pair(root, "path", voc_xml(voc_object(), head="<filename>../../outside/secret.jpg</filename>"))
        put(root, "images/alone.jpg")
        put(root, "annotations/alone_too.xml", voc_xml())
        put(root, "annotations/.hidden.xml")
        put(root, "notes.md")
        names = ("w1", "w2", "lot/w3", "bad", "unsafe", "path", "../outside/secret", "gone")
        put(root, SPLIT_CSV, "image_id,split\n" + "".join(f"{n},{('train', 'val')[len(n) % 2]}\n" for n in names))
        return VocSource(root, VocOptions())


class TestContractLists(SourceContract):
    def make(self, root: Path) -> Source:
        for name in ("1", "2", "3"):
            put_pair(root, name, images="JPEGImages", annotations="Annotations")
        put(root, "JPEGImages/readme")
        put(root, "ImageSets/Main/train.txt", "1\n")
        put(root, "ImageSets/Main/val.txt", "2\n")
        put(root, "ImageSets/Main/crack_train.txt", "1  1\n2 -1\n")
        return VocSource(root, VocOptions(origin=1), ["crack"])


# Folders


@pytest.mark.parametrize(("images", "annotations"), [("images", "annotations"), ("JPEGImages", "Annotations"), ("Images", "ANNOTATIONS")])
def test_folders_by_name(tmp_path: Path, images: str, annotations: str) -> None:
    put_pair(tmp_path, "w", images=images, annotations=annotations)
    listing, findings = listed(tmp_path)
    assert [(i.path, ref(i)) for i in listing.items] == [(f"{images}/w.jpg", f"{annotations}/w.xml")]
    assert (listing.task, listing.classes, listing.has_splits, listing.num_files, listing.num_used) == ("detection", None, False, 2, 1)
    assert findings == []


@pytest.mark.parametrize(
    ("images", "annotations"),
    [
        (".", "."),
        ("data", "data"),
        ("photos/all", "labels/xml"),
        ("VOCdevkit/VOC2012/JPEGImages", "VOCdevkit/VOC2012/Annotations"),
        ("images", "xml"),
    ],
)
def test_folders_by_content_are_said(tmp_path: Path, images: str, annotations: str) -> None:
    put_pair(tmp_path, "w1", images=images, annotations=annotations)
    put_pair(tmp_path, "lot/w2", images=images, annotations=annotations)
    put(tmp_path, "masks/lot/other.png")
    listing, findings = listed(tmp_path)
    got = {i.path: ref(i) for i in listing.items if not i.refused}
    assert got == {str(Path(images, f"{n}.jpg")): str(Path(annotations, f"{n}.xml")) for n in ("w1", "lot/w2")}
    assert any("found by content: 2 pairs" in note for note in listing.notes)
    assert [(f.code, f.path) for f in findings] == [("unused-file" if images != "." else "missing-annotation", "masks/lot/other.png")]


def test_flat_folders_of_splits_pair_in_place(tmp_path: Path) -> None:
    put_pair(tmp_path, "a", images="one", annotations="one")
    put_pair(tmp_path, "a", images="two", annotations="two")
    listing, findings = listed(tmp_path)
    assert [(i.path, ref(i)) for i in listing.items] == [("one/a.jpg", "one/a.xml"), ("two/a.jpg", "two/a.xml")]
    assert findings == []


def test_options_name_folders(tmp_path: Path) -> None:
    put_pair(tmp_path, "w")
    put_pair(tmp_path, "w", images="more/pics", annotations="more/xml")
    listing, findings = listed(tmp_path, images="more/pics", annotations="more/xml/")
    assert [(i.path, ref(i)) for i in listing.items] == [("more/pics/w.jpg", "more/xml/w.xml")]
    assert codes(findings) == [("warning", "unused-file", "annotations/w.xml"), ("warning", "unused-file", "images/w.jpg")]
    with pytest.raises(PackError, match="no such folder below the root; its folders are: annotations, images, more"):
        listed(tmp_path, images="pics")


def test_what_cannot_be_paired_is_refused_with_the_way_out(tmp_path: Path) -> None:
    put(tmp_path, "a/x.jpg")
    put(tmp_path, "b/y.xml")
    with pytest.raises(PackError, match=r"'a/x.jpg'.*'b/y.xml'.*annotations ="):
        listed(tmp_path)
    (tmp_path / "b/y.xml").unlink()
    with pytest.raises(PackError, match="no XML file"):
        listed(tmp_path)


def test_two_folders_of_one_kind_are_not_guessed(tmp_path: Path) -> None:
    put_pair(tmp_path, "w")
    put(tmp_path, "JPEGImages/w.jpg")
    with pytest.raises(PackError, match=r"JPEGImages and images both hold.*\[source\] images"):
        listed(tmp_path)


# Pairs


def test_stems_keep_all_but_the_last_suffix_and_subfolders(tmp_path: Path) -> None:
    for name in ("pipe.v2.0001", "clip.mp4#t=1", "lot1/w", "lot2/w", "cam[2] 0'41"):
        put_pair(tmp_path, name)
    listing, findings = listed(tmp_path)
    assert all(ref(i) == i.path.replace("images/", "annotations/").removesuffix(".jpg") + ".xml" for i in listing.items)
    assert len(listing.items) == 5
    assert findings == []


def test_names_pair_after_nfc_only_where_no_exact_partner_is_there(tmp_path: Path) -> None:
    nfc, nfd = unicodedata.normalize("NFC", "soudé"), unicodedata.normalize("NFD", "soudé")
    put(tmp_path, f"images/{nfd}.jpg")
    put(tmp_path, f"annotations/{nfc}.xml", voc_xml())
    both = ("exact-" + nfc, "exact-" + nfd)
    for name in both:
        put_pair(tmp_path, name)
    listing, findings = listed(tmp_path)
    assert {i.path: ref(i) for i in listing.items} == {
        f"images/{nfd}.jpg": f"annotations/{nfc}.xml",
        **{f"images/{n}.jpg": f"annotations/{n}.xml" for n in both},
    }
    assert [f.code for f in findings] == ["case-twins"] * 2


def test_missing_partners(tmp_path: Path) -> None:
    put_pair(tmp_path, "ok")
    put(tmp_path, "images/alone.jpg")
    put(tmp_path, "annotations/alone_too.xml", voc_xml())
    listing, findings = listed(tmp_path)
    assert {i.path: i.refused for i in listing.items} == {"images/alone.jpg": True, "images/ok.jpg": False}
    assert codes(findings) == [("skip", "missing-annotation", "images/alone.jpg"), ("skip", "missing-image", "annotations/alone_too.xml")]
    assert "annotations/alone.xml" in findings[0].message
    assert "images/alone_too" in findings[1].message


@pytest.mark.parametrize(
    ("filename", "kept"), [("d.png", {"images/d.png"}), ("D:\\x\\d.jpg", {"images/d.jpg"}), ("other.jpg", set()), ("", set())]
)
def test_two_pictures_with_one_stem(tmp_path: Path, filename: str, kept: set[str]) -> None:
    put_pair(tmp_path, "d", voc_xml(voc_object(), head=f"<filename>{filename}</filename>"))
    put(tmp_path, "images/d.png")
    put(tmp_path, SPLIT_CSV, "image_id,split\nd,train\n")
    listing, findings = listed(tmp_path)
    assert {i.path for i in listing.items if not i.refused} == kept
    refused = {"images/d.jpg", "images/d.png"} - kept
    assert {(f.level, f.code, f.sample) for f in findings} == {("skip", "duplicate-stem", p) for p in refused}
    assert all("images/d.jpg and images/d.png" in f.message for f in findings)


def test_two_annotations_for_one_picture_are_not_guessed(tmp_path: Path) -> None:
    put_pair(tmp_path, "d")
    put(tmp_path, "annotations/d.XML", voc_xml())
    listing, findings = listed(tmp_path)
    assert [i.refused for i in listing.items] == [True]
    assert ("skip", "duplicate-stem", "images/d.jpg") in codes(findings)


def test_a_broken_link_takes_part_in_pairing(tmp_path: Path) -> None:
    put_pair(tmp_path, "ok")
    (tmp_path / "images/gone.jpg").symlink_to("nowhere")
    put(tmp_path, "annotations/gone.xml", voc_xml())
    listing, findings = listed(tmp_path)
    assert {i.path: i.refused for i in listing.items} == {"images/gone.jpg": True, "images/ok.jpg": False}
    assert codes(findings) == [("skip", "broken-link", "images/gone.jpg")]


def test_the_stamp_follows_the_annotation(tmp_path: Path) -> None:
    put_pair(tmp_path, "a")
    put_pair(tmp_path, "b")
    before = listed(tmp_path)[0].items
    os.utime(tmp_path / "annotations/a.xml", ns=(1, 1))
    after = listed(tmp_path)[0].items
    assert before[0].stamp != after[0].stamp
    assert before[1] == after[1]
    assert len(before[0].stamp) == 16


# Splits


def splits(
    root: Path, table: str | bytes, names: tuple[str, ...] = ("w1", "w2", "w3"), **options: object
) -> tuple[dict[str, str | None], list[Finding]]:
    for name in names:
        put_pair(root, name)
    put(root, SPLIT_CSV, table)
    listing, findings = listed(root, **options)
    return {i.path.removeprefix("images/").removesuffix(".jpg"): i.split for i in listing.items}, findings


@pytest.mark.parametrize(
    "table",
    [
        "image_id,split\nw1,train\nw2,val\nw3,test\n",
        "image_id;split\r\nw1; Train \r\nw2;VALID\r\n\r\nw3;testing",
        "split,extra,image_id\ntrain,1,w1\nvalidation,2,w2\ntest,3,w3\n",
        "image_id,split\nw1.jpg,train\nimages/w2.jpg,dev\nimages\\w3.jpg,test\n",
        "\ufeffImage_ID,Split\n./w1.jpg,train\nimages/w2,val\nw3,test\n",
        "image_id\tsplit\nw1\ttrain\nw2\tval\nw3\ttest\n".encode("utf-16"),
    ],
    ids=["plain", "semicolon", "columns", "file-names", "bom", "utf-16"],
)
def test_split_tables(tmp_path: Path, table: str | bytes) -> None:
    got, findings = splits(tmp_path, table)
    assert got == {"w1": "train", "w2": "val", "w3": "test"}
    assert findings == []


def test_ids_are_text(tmp_path: Path) -> None:
    got, findings = splits(tmp_path, "image_id,split\n001,train\n01,val\n1,test\n", ("001", "01", "1"))
    assert got == {"001": "train", "01": "val", "1": "test"}
    assert findings == []


def test_an_exact_stem_wins_over_a_file_name(tmp_path: Path) -> None:
    got, findings = splits(tmp_path, "image_id,split\na.jpg,train\na,val\n", ("a", "a.jpg"))
    assert got == {"a": "val", "a.jpg": "train"}
    assert findings == []


def test_ids_below_folders(tmp_path: Path) -> None:
    got, findings = splits(tmp_path, "image_id,split\nlot1/w,train\nimages/lot2/w.jpg,val\nonly,test\n", ("lot1/w", "lot2/w", "lot3/only"))
    assert got == {"lot1/w": "train", "lot2/w": "val", "lot3/only": "test"}
    assert findings == []


def test_a_bare_name_that_stands_for_two_pictures_is_not_guessed(tmp_path: Path) -> None:
    got, findings = splits(tmp_path, "image_id,split\nw,train\n", ("lot1/w", "lot2/w"))
    assert got == {"lot1/w": None, "lot2/w": None}
    assert [f.code for f in findings] == ["ambiguous-id", "no-split", "no-split"]
    assert "images/lot1/w.jpg or images/lot2/w.jpg" in findings[0].message


def test_unknown_and_blank_splits_are_errors(tmp_path: Path) -> None:
    got, findings = splits(tmp_path, "image_id,split\nw1,train\nw2,trian\nw3,\n")
    assert got == {"w1": "train", "w2": None, "w3": None}
    assert [(f.level, f.code, f.path, f.line, f.sample) for f in findings] == [
        ("error", "unknown-split", SPLIT_CSV, 3, "w2"),
        ("error", "unknown-split", SPLIT_CSV, 4, "w3"),
    ]
    assert "'trian'" in findings[0].message
    assert "blank" in findings[1].message


def test_rows_that_repeat_or_contradict(tmp_path: Path) -> None:
    table = "image_id,split\nw1,train\nw2,val\nw1,train\nw1,Train\nw2,test\nw3,train\n"
    got, findings = splits(tmp_path, table)
    assert got == {"w1": "train", "w2": "val", "w3": "train"}
    assert [(f.level, f.code, f.path, f.line, f.count) for f in findings] == [
        ("warning", "duplicate-row", SPLIT_CSV, 4, 2),
        ("error", "split-conflict", SPLIT_CSV, 6, 1),
    ]
    assert "line 2" in findings[0].message
    for part in ("'w2'", "'val'", "'test'", "line 3", "line 6"):
        assert part in findings[1].message


def test_ids_without_picture_and_pictures_without_row(tmp_path: Path) -> None:
    put(tmp_path, "annotations/orphan.xml", voc_xml())
    got, findings = splits(tmp_path, "image_id,split\nw1,train\ngone,val\norphan,train\n,test\n", ("w1", "w2"))
    assert got == {"w1": "train", "w2": None}
    assert [(f.level, f.code, f.path, f.sample) for f in findings] == [
        ("skip", "missing-image", "annotations/orphan.xml", "orphan"),
        ("skip", "missing-image", SPLIT_CSV, "gone"),
        ("skip", "missing-image", SPLIT_CSV, ""),
        ("skip", "no-split", "images/w2.jpg", "images/w2.jpg"),
    ]
    assert "line 4" in findings[0].message
    assert "images/gone" in findings[1].message
    assert SPLIT_CSV in findings[3].message


@pytest.mark.parametrize(
    ("table", "missing"), [("w1,train\nw2,val\n", "image_id and split"), ("image_id,set\nw1,train\n", "split"), ("", "image_id and split")]
)
def test_missing_columns_are_an_error_that_quotes_the_first_line(tmp_path: Path, table: str, missing: str) -> None:
    _, findings = splits(tmp_path, table, ("w1", "w2"))
    assert codes(findings) == [("error", "missing-column", SPLIT_CSV)]
    assert f"no column {missing};" in findings[0].message
    assert table.partition("\n")[0] in findings[0].message


def test_a_table_in_another_encoding(tmp_path: Path) -> None:
    name = "焊缝"
    table = f"image_id,split\n{name},train\n".encode("gbk")
    with pytest.raises(PackError, match="line 2"):
        splits(tmp_path, table, (name,))
    got, findings = splits(tmp_path, table, (name,), encoding="gbk")
    assert got == {name: "train"}
    assert findings == []


def test_another_split_file_by_option(tmp_path: Path) -> None:
    put(tmp_path, "meta/s.csv", "image_id,split\nw1,test\n")
    got, findings = splits(tmp_path, "image_id,split\nw1,train\n", ("w1",), split_file="meta/s.csv")
    assert got == {"w1": "test"}
    assert codes(findings) == [("warning", "unsupported-file", SPLIT_CSV)]
    with pytest.raises(PackError, match="no such file below the root"):
        listed(tmp_path, split_file="gone.csv")


def test_image_sets_lists(tmp_path: Path) -> None:
    names = ("a", "b", "c", CYRILLIC, "end 1")
    for name in names:
        put_pair(tmp_path, name)
    main = "ImageSets/Main/"
    put(tmp_path, main + "train.txt", f"a\n{CYRILLIC}\n\n")
    put(tmp_path, main + "val.txt", "b  1\nend 1\n")
    put(tmp_path, main + "test.txt", "c.jpg\r\n")
    put(tmp_path, main + "trainval.txt", "a\nb\nend 1\n")
    put(tmp_path, main + "crack_train.txt", "a -1\n")
    put(tmp_path, "ImageSets/Layout/train.txt", "b\n")
    listing, findings = listed(tmp_path)
    assert {i.path: i.split for i in listing.items} == {
        "images/a.jpg": "train",
        f"images/{CYRILLIC}.jpg": "train",
        "images/b.jpg": "val",
        "images/end 1.jpg": "val",
        "images/c.jpg": "test",
    }
    assert findings == []
    assert listing.num_used == 5 + 6


def test_trainval_alone_is_train(tmp_path: Path) -> None:
    for name in ("a", "b"):
        put_pair(tmp_path, name)
    put(tmp_path, "ImageSets/Main/trainval.txt", "a\n")
    put(tmp_path, "ImageSets/Main/test.txt", "b\n")
    assert [i.split for i in listed(tmp_path)[0].items] == ["train", "test"]


def test_a_picture_in_two_lists_is_an_error_with_both_lines(tmp_path: Path) -> None:
    put_pair(tmp_path, "a")
    put(tmp_path, "ImageSets/Main/train.txt", "\na\n")
    put(tmp_path, "ImageSets/Main/val.txt", "a\n")
    _, findings = listed(tmp_path)
    assert [(f.level, f.code) for f in findings] == [("error", "split-conflict")]
    assert "ImageSets/Main/val.txt" in say(findings[0])
    assert "ImageSets/Main/train.txt, line 2" in say(findings[0])


def test_the_table_wins_over_the_lists_and_the_digest_is_its_content(tmp_path: Path) -> None:
    put(tmp_path, "ImageSets/Main/val.txt", "w1\n")
    got, findings = splits(tmp_path, "image_id,split\nw1,train\n", ("w1",))
    assert got == {"w1": "train"}
    assert findings == []
    before = listed(tmp_path)[0].digest
    (tmp_path / "ImageSets/Main/val.txt").write_text("other\n")
    assert listed(tmp_path)[0].digest == before
    (tmp_path / SPLIT_CSV).write_text("image_id,split\nw1,test\n")
    assert listed(tmp_path)[0].digest != before


def test_no_picture_at_all_is_an_error(tmp_path: Path) -> None:
    put(tmp_path, "annotations/a.xml", voc_xml())
    put(tmp_path, "images/a.heic")
    listing, findings = listed(tmp_path)
    assert listing.items == []
    assert {f.code for f in findings} == {"no-pictures", "missing-image", "unsupported-file"}


@given(st.sampled_from(sorted(SPLIT_NAMES)), st.sampled_from(["", " ", "\t", "\u00a0"]), st.booleans())
def test_split_names_in_any_case_with_any_blanks(name: str, blank: str, upper: bool) -> None:
    assert split_of(blank + (name.upper() if upper else name) + blank) == SPLIT_NAMES[name]
    assert split_of(name + "x") is None


IDS = st.lists(
    st.text("ab1.é", min_size=1, max_size=4).filter(lambda s: s.strip(".") and not s.startswith(".")), min_size=1, max_size=8, unique=True
)


@settings(deadline=None)
@given(IDS)
def test_an_id_always_finds_its_own_picture(ids: list[str]) -> None:
    pictures = [File(f"images/{i}.jpg", 0, 0) for i in ids]
    names = Names(pictures, Layout("images", "annotations"))
    for i in ids:
        assert names.find(i) == [f"images/{i}.jpg"]
        assert f"images/{i}.jpg" in names.find(f"images/{i}.jpg")


def test_options_are_kept_where_they_are_no_defaults(tmp_path: Path) -> None:
    assert source(tmp_path, origin=1, encoding="gbk").options == {"origin": 1, "encoding": "gbk"}
    assert source(tmp_path, origin=0).options == {}


# Split folders


@pytest.mark.parametrize(
    ("images", "annotations"),
    [
        ("{}/images", "{}/annotations"),
        ("{}", "{}"),
        ("images/{}", "annotations/{}"),
        ("data/{}/JPEGImages", "data/{}/Annotations"),
        ("data/{}", "data/{}"),
        ("{}/pics/all", "{}/xml"),
    ],
)
def test_splits_are_read_from_folders(tmp_path: Path, images: str, annotations: str) -> None:
    for folder in ("train", "Valid", "test"):
        put_pair(tmp_path, "w", images=images.format(folder), annotations=annotations.format(folder))
    listing, findings = listed(tmp_path)
    got = {i.path: (i.split, ref(i), i.refused) for i in listing.items}
    assert got == {
        f"{images.format(d)}/w.jpg": (split, f"{annotations.format(d)}/w.xml", False)
        for d, split in (("train", "train"), ("Valid", "val"), ("test", "test"))
    }
    assert (listing.has_splits, listing.num_used) == (True, 3)
    assert any("splits: from the folders" in note and "Valid (val)" in note for note in listing.notes)
    assert findings == []


def test_faults_within_split_folders_are_named_by_their_folder(tmp_path: Path) -> None:
    for folder in ("train", "valid"):
        put_pair(tmp_path, "w", images=folder, annotations=folder)
        put(tmp_path, f"{folder}/alone.xml", voc_xml())
    put(tmp_path, "train/bare.jpg")
    put(tmp_path, "loose.jpg")
    listing, findings = listed(tmp_path)
    assert {i.path: i.split for i in listing.items} == {"train/bare.jpg": "train", "train/w.jpg": "train", "valid/w.jpg": "val"}
    assert sorted(codes(findings)) == [
        ("skip", "missing-annotation", "train/bare.jpg"),
        ("skip", "missing-image", "train/alone.xml"),
        ("skip", "missing-image", "valid/alone.xml"),
        ("warning", "unused-file", "loose.jpg"),
    ]
    assert listing.num_used == 2


def test_a_split_file_decides_against_folders(tmp_path: Path) -> None:
    for folder, name in (("train", "a"), ("valid", "b")):
        put_pair(tmp_path, name, images=folder, annotations=folder)
    put(tmp_path, SPLIT_CSV, "image_id,split\na,val\nb,train\n")
    listing, findings = listed(tmp_path)
    assert {i.path: i.split for i in listing.items} == {"train/a.jpg": "val", "valid/b.jpg": "train"}
    assert findings == []


def test_no_split_folder_is_dropped(tmp_path: Path) -> None:
    put_pair(tmp_path, "a", images="train/images", annotations="train/annotations")
    put_pair(tmp_path, "b", images="val/pictures", annotations="val/annotations")
    _, findings = listed(tmp_path)
    assert ("error", "split-folders", "val") in codes(findings)
    put(tmp_path, SPLIT_CSV, "image_id,split\na,train\n")
    _, findings = listed(tmp_path)
    assert ("error", "split-folders", "val") in codes(findings)
    listing, findings = listed(tmp_path, images="train/images", annotations="train/annotations")
    assert [i.path for i in listing.items] == ["train/images/a.jpg"]
    assert {f.level for f in findings} == {"warning"}


@pytest.mark.parametrize("images", ["{}", "images/{}"])
def test_split_folders_beside_others_are_an_error(tmp_path: Path, images: str) -> None:
    for folder in ("train", "valid", "extra"):
        put_pair(tmp_path, "w", images=images.format(folder), annotations=images.format(folder))
    _, findings = listed(tmp_path)
    errors = [f for f in findings if f.level == "error"]
    assert [(f.code, f.path) for f in errors] == [("split-folders", images.format("train"))]
    assert "extra" in errors[0].message


def test_masks_of_splits_are_no_split_left_out(tmp_path: Path) -> None:
    for folder in ("train", "val"):
        put_pair(tmp_path, folder, images=f"images/{folder}", annotations=f"annotations/{folder}")
        put(tmp_path, f"masks/{folder}/m.png")
    listing, findings = listed(tmp_path)
    assert [i.split for i in listing.items] == ["train", "val"]
    assert {f.code for f in findings} == {"unused-file"}
