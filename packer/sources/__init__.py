"""The kinds of raw data set that can be read. A new one is one module with a class and one line in `KINDS`."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from packer.sample import PackError, Source, UsageError
from packer.sources.folder_checks import is_layout_name
from packer.sources.splits import split_of
from packer.sources.tree import (
    PICTURE_SUFFIXES,
    archive_hint,
    check_root,
    is_archive,
    is_folder,
    is_ignored,
    is_picture,
    is_regular,
    printable,
    suffix_of,
)
from packer.sources.voc_xml import root_element

KINDS = {
    "folder": ("packer.sources.folder", "FolderSource"),
    "voc": ("packer.sources.voc", "VocSource"),
    "csv": ("packer.sources.csv", "CsvSource"),
}

# Keys of ``[source]`` that are the same for every kind.
SHARED_KEYS = ("kind", "classes", "exif", "pixel_range", "boxes", "max_pixels", "max_file_bytes")

_LOOK_ENTRIES = 20_000
_LOOK_DEPTH = 4
_LOOK_BYTES = 1 << 13
_XML_PER_FOLDER = 3
_XML_IN_ALL = 60
_TABLES_SHOWN = 10


def open_source(kind: str, root: Path, options: Mapping[str, Any], classes: list[str] | None) -> Source:
    """A source of a kind, with `options` being the keys of ``[source]`` that belong to it; `classes` fixes the ids' order.

    Raises:
        UsageError: wrong options, all of them named.
        PackError: unknown kind; `root` is missing or no folder.
    """
    if kind not in KINDS:
        raise PackError(f"[source] kind = {kind!r} is not known, expected one of {', '.join(KINDS)}")
    check_root(root)
    module, name = KINDS[kind]
    source_class = getattr(importlib.import_module(module), name)
    try:
        checked = source_class.Options.model_validate(dict(options))
    except ValidationError as e:
        known = ", ".join(source_class.Options.model_fields) or "no keys of its own"
        problems: dict[str, list[Any]] = {}
        for problem in e.errors():
            problems.setdefault(_key(problem["loc"], options), []).append(problem)
        lines = "".join(f"\n  {_problem(key, tried, kind, known)}" for key, tried in problems.items())
        raise UsageError(f"{len(problems)} wrong value(s):{lines}") from None
    source: Source = source_class(root, checked, classes)
    return source


def _key(loc: tuple[int | str, ...], options: Mapping[str, Any]) -> str:
    """The key that a user wrote; pydantic's place ends with the type it tried, where a value may be of several."""
    value: Any = options
    key = []
    for part in loc:
        if not (part in value if isinstance(value, Mapping) else isinstance(value, list) and isinstance(part, int)):
            break
        key.append(str(part))
        value = value[part]
    return ".".join(key)


def _problem(key: str, tried: Sequence[Any], kind: str, known: str) -> str:
    """One wrong value; `tried`: what each type that it may have says of it."""
    if tried[0]["type"] == "extra_forbidden":
        return f"[source] {key}: unknown key; kind {kind!r} has: {known}; every kind has: {', '.join(SHARED_KEYS)}"
    found = repr(tried[0]["input"])
    said = ", or: ".join(str(problem["msg"]).removeprefix("Value error, ") for problem in tried)
    return f"[source] {key}: {said}" + (f", found {found}" if len(found) <= 80 else "")


class _Look(NamedTuple):
    """What a short look saw: a VOC file, a picture (paths below the root), whether all was seen, and archives."""

    voc: str | None
    picture: str | None
    complete: bool
    archives: tuple[str, ...] = ()


def detect(root: Path) -> tuple[str, str]:
    """The kind of data set below `root`, from a short look at it, and a sentence that says why.

    Raises:
        PackError: `root` is missing or no folder, or holds no picture and no table, or a table that does not fit, without class folders.
    """
    check_root(root)
    look = _look(root)
    if look.voc is not None:
        return "voc", f"{look.voc} has the root element <annotation> of Pascal VOC"
    table: str | None = importlib.import_module(KINDS["csv"][0]).sniff(root)
    if table is not None:
        return "csv", table
    if look.picture is None and look.complete:
        suffixes, hint = " ".join(sorted(PICTURE_SUFFIXES)), archive_hint(look.archives)
        raise PackError(f"{root}: holds no picture, no VOC XML and no CSV table; pictures are known by their suffix: {suffixes}{hint}")
    _check_tables(root)
    return "folder", "there is neither an XML file of Pascal VOC nor a CSV table with columns that are known"


def _check_tables(root: Path) -> None:
    """Raises PackError: a table lies here that is not recognised, and the tree does not look like class folders."""
    reasons: list[tuple[str, str]] = importlib.import_module(KINDS["csv"][0]).why_not(root)
    if not reasons or _like_classes(root):
        return
    listed = "".join(f"\n  {path}: {reason}" for path, reason in reasons[:_TABLES_SHOWN])
    if len(reasons) > _TABLES_SHOWN:
        listed += f"\n  and {len(reasons) - _TABLES_SHOWN:,} more"
    raise PackError(
        f"{root}: holds a table that is not recognised, and no class folders:{listed}\n"
        'say in a recipe what the columns are ([source] kind = "csv", columns = {...}); or take --source folder to pack folders as classes'
    )


def _like_classes(root: Path) -> bool:
    """Two or more folders hold pictures, maybe below split folders, and none is called like a part of another layout."""
    folders = [e for e in _entries(root) if is_folder(e)]
    if folders and all(split_of(e.name) for e in folders):
        folders = [e for split in folders for e in _entries(Path(split.path)) if is_folder(e)]
    if any(is_layout_name(e.name) or e.name.lower() == "data" for e in folders):
        return False
    names: set[str] = set()
    for entry in folders:
        if entry.name not in names and _look(Path(entry.path)).picture is not None:
            names.add(entry.name)
        if len(names) > 1:
            return True
    return False


def _look(root: Path) -> _Look:
    """Breadth first, in order of names, until a VOC file is seen or the bounds are reached (they also end loops of links)."""
    folders, seen, opened = [""], 0, 0
    picture: str | None = None
    archives: list[str] = []
    for folder in folders:
        if seen > _LOOK_ENTRIES:
            return _Look(None, picture, complete=False)
        entries = _entries(root / folder)
        seen += len(entries)
        xml = 0
        for entry in entries:
            path = f"{folder}/{entry.name}" if folder else entry.name
            if is_folder(entry):
                if path.count("/") < _LOOK_DEPTH:
                    folders.append(path)
            elif suffix_of(path) == ".xml" and xml < _XML_PER_FOLDER and opened < _XML_IN_ALL and is_regular(entry):
                xml, opened = xml + 1, opened + 1
                if _root_element(entry.path) == "annotation":
                    return _Look(printable(path), picture, complete=False)
            elif picture is None and is_picture(path):
                picture = path
            elif is_archive(path):
                archives.append(path)
    return _Look(None, picture, complete=True, archives=tuple(archives))


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return sorted((e for e in entries if not is_ignored(e.name)), key=lambda e: e.name)
    except OSError:
        return []


def _root_element(path: str) -> str | None:
    try:
        with open(path, "rb") as f:
            return root_element(f.read(_LOOK_BYTES))
    except OSError:
        return None
