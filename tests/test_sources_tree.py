from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packer.sample import Finding, PackError
from packer.sources.tree import File, Tree, case_twins, distinct, is_picture, printable, report_unsupported, suffix_of, walk
from source_contract import opened_paths, say


def put(root: Path, *paths: str) -> None:
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(path.encode())


def look(root: Path) -> tuple[Tree, list[Finding]]:
    findings: list[Finding] = []
    return walk(root, findings.append), findings


def test_files_are_sorted_with_size_and_mtime_and_nothing_is_opened(tmp_path: Path) -> None:
    put(tmp_path, "b/2.jpg", "a/1.png", "b/1.JPG", "notes.txt", "z.jpeg")
    os.utime(tmp_path / "z.jpeg", ns=(5, 1_234_567_891))
    with opened_paths() as paths:
        tree, findings = look(tmp_path)
    assert [f.path for f in tree.pictures] == ["a/1.png", "b/1.JPG", "b/2.jpg", "z.jpeg"]
    assert (tree.pictures[-1].num_bytes, tree.pictures[-1].mtime_ns) == (6, 1_234_567_891)
    assert [f.path for f in tree.others] == ["notes.txt"]
    assert tree.folders == ["a", "b"]
    assert (tree.num_files, tree.num_ignored) == (5, 0)
    assert findings == []
    assert not [p for p in paths if Path(p).is_file()]


def test_hidden_and_system_files_are_ignored_and_counted(tmp_path: Path) -> None:
    put(
        tmp_path,
        "a/x.jpg",
        "a/._x.jpg",
        "a/.DS_Store",
        "a/Thumbs.db",
        "a/DESKTOP.INI",
        "__MACOSX/a/y.jpg",
        ".git/z.jpg",
        "a/.ipynb_checkpoints/c.jpg",
    )
    tree, findings = look(tmp_path)
    assert [f.path for f in tree.pictures] == ["a/x.jpg"]
    assert tree.folders == ["a"]
    assert (tree.num_files, tree.num_ignored) == (8, 7)
    assert findings == []


def test_links_are_followed_also_out_of_the_root(tmp_path: Path) -> None:
    put(tmp_path, "data/a/x.jpg", "elsewhere/y.jpg")
    root = tmp_path / "data"
    (root / "a" / "link.jpg").symlink_to("x.jpg")
    (root / "b").symlink_to(tmp_path / "elsewhere")
    (root / "c").symlink_to(tmp_path / "elsewhere")
    tree, findings = look(root)
    assert [f.path for f in tree.pictures] == ["a/link.jpg", "a/x.jpg", "b/y.jpg", "c/y.jpg"]
    assert findings == []


def test_a_folder_inside_itself_is_entered_once(tmp_path: Path) -> None:
    put(tmp_path, "a/b/x.jpg")
    (tmp_path / "a" / "b" / "up").symlink_to("../..")
    tree, findings = look(tmp_path)
    assert [f.path for f in tree.pictures] == ["a/b/x.jpg"]
    assert [(f.level, f.code, f.path) for f in findings] == [("warning", "link-loop", "a/b/up")]


@pytest.mark.parametrize("target", ["gone.jpg", "broken.jpg"], ids=["missing", "itself"])
def test_broken_links_are_named(tmp_path: Path, target: str) -> None:
    put(tmp_path, "x.jpg")
    (tmp_path / "broken.jpg").symlink_to(target)
    (tmp_path / "broken.txt").symlink_to("nothing")
    tree, findings = look(tmp_path)
    assert [(f.path, f.refused) for f in tree.pictures] == [("broken.jpg", True), ("x.jpg", False)]
    assert [(f.level, f.code, f.path) for f in findings] == [
        ("skip", "broken-link", "broken.jpg"),
        ("warning", "broken-link", "broken.txt"),
    ]
    assert target in findings[0].message


def test_pipes_and_sockets_are_named_and_never_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's path is short
    os.mkfifo(tmp_path / "pipe.jpg")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("talk")
        tree, findings = look(tmp_path)
    assert [(f.path, f.refused) for f in tree.pictures] == [("pipe.jpg", True)]
    assert [(f.level, f.code, f.path) for f in findings] == [("skip", "not-a-file", "pipe.jpg"), ("warning", "not-a-file", "talk")]
    assert tree.num_files == 1  # the picture, which keeps its place in the list


def test_names_that_are_not_utf8_are_named_in_escaped_form(tmp_path: Path) -> None:
    base = os.fsencode(tmp_path)
    os.mkdir(base + b"/f\xfcr")
    for name in (b"/\xf3n.jpg", b"/\xf3n.txt", b"/f\xfcr/x.jpg"):
        Path(os.fsdecode(base + name)).write_bytes(b"")
    tree, findings = look(tmp_path)
    assert (tree.pictures, tree.others, tree.folders) == ([], [], [])
    assert {(f.level, f.code, f.path) for f in findings} == {
        ("skip", "name-not-utf8", "\\xf3n.jpg"),
        ("warning", "name-not-utf8", "\\xf3n.txt"),
        ("skip", "name-not-utf8", "f\\xfcr/x.jpg"),
    }
    assert tree.num_files == 3
    for finding in findings:
        say(finding).encode("utf-8")


def test_names_that_differ_by_case_only_are_named_together(tmp_path: Path) -> None:
    put(tmp_path, "Crack/z.jpg", "crack/W1.jpg", "crack/w1.jpg", "crack/w2.jpg", "other/W2.jpg")
    tree, findings = look(tmp_path)
    assert len(tree.pictures) == 5
    assert [f.code for f in findings] == ["case-twins", "case-twins"]
    assert "Crack, crack" in findings[0].message
    assert "crack/W1.jpg, crack/w1.jpg" in findings[1].message


def test_names_that_print_the_same_are_told_apart() -> None:
    assert distinct(["e\u0301.jpg", "\xe9.jpg"]) == [r"e\u0301.jpg", r"\xe9.jpg"]
    assert distinct(["\xc9", "\xe9"]) == ["\xc9", "\xe9"]


def test_a_folder_that_cannot_be_read_is_a_skip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, "a/x.jpg", "b/y.jpg")
    scandir = os.scandir

    def refuse(path: str) -> object:
        if os.fspath(path).rstrip("/").endswith("/a"):
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)  # permissions mean nothing to root, who may be running this
    tree, findings = look(tmp_path)
    assert [f.path for f in tree.pictures] == ["b/y.jpg"]
    assert [(f.level, f.code, f.path) for f in findings] == [("skip", "unreadable", "a")]
    assert "Permission denied" in findings[0].message


def test_a_wrong_root_is_refused(tmp_path: Path) -> None:
    put(tmp_path, "file")
    with pytest.raises(PackError, match="no such folder"):
        look(tmp_path / "gone")
    with pytest.raises(PackError, match="is a file"):
        look(tmp_path / "file")


def test_unsupported_files_are_named_with_the_suffixes_that_are_read(tmp_path: Path) -> None:
    put(tmp_path, "IMG_1.heic", "noext", "x.jpg.part")
    tree, findings = look(tmp_path)
    report_unsupported(tree.others, findings.append)
    assert [(f.level, f.code, f.path) for f in findings] == [
        ("warning", "unsupported-file", p) for p in ("IMG_1.heic", "noext", "x.jpg.part")
    ]
    assert all(".webp" in f.message for f in findings)
    assert "'.heic'" in findings[0].message


@pytest.mark.parametrize(
    ("path", "suffix"),
    [
        ("a/x.JPG", ".jpg"),
        ("x.tar.gz", ".gz"),
        ("a.b/noext", ""),
        ("noext", ""),
        (".jpg", ""),
        ("a/.jpg", ""),
        ("x.", "."),
        ("x.y/z.Tif", ".tif"),
    ],
)
def test_suffix(path: str, suffix: str) -> None:
    assert suffix_of(path) == suffix
    assert is_picture(path) == (suffix in (".jpg", ".tif"))


@given(st.binary(max_size=30).filter(lambda b: b"\0" not in b))
def test_any_name_can_be_printed(name: bytes) -> None:
    shown = printable(os.fsdecode(name))
    shown.encode("utf-8")
    try:
        assert shown == name.decode("utf-8")
    except UnicodeDecodeError:
        assert "\\x" in shown


@given(st.lists(st.text("aAbB", min_size=1, max_size=3), unique=True))
def test_case_twins_are_exactly_the_names_that_collide(names: list[str]) -> None:
    groups = list(case_twins(names))
    grouped = [name for group in groups for name in group]
    assert sorted(grouped) == sorted(n for n in names if sum(m.lower() == n.lower() for m in names) > 1)
    assert all(len({n.lower() for n in group}) == 1 for group in groups)


def test_a_table_is_said_to_be_unused_not_unread() -> None:
    findings: list[Finding] = []
    report_unsupported([File("labels.CSV", 1, 1), File("a.heic", 1, 1)], findings.append)
    assert "a table that this source does not use" in findings[0].message
    assert "suffix '.heic' is not read" in findings[1].message
