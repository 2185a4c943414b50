"""Which split each picture of a Pascal VOC data set belongs to: a split table, or the lists of ``ImageSets/Main``."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from packer.content import told_of_text
from packer.sample import Finding, Level, PackError, Report
from packer.sources.splits import EXPECTED, split_of
from packer.sources.table import read_table
from packer.sources.tree import File
from packer.sources.voc_layout import Layout, below, id_of, nfc, without_suffix

SPLIT_FILE = "train_val_test_split.csv"
LISTS = {"train.txt": "train", "val.txt": "val", "test.txt": "test", "trainval.txt": "train"}
_FLAGS = ("1", "-1", "0")


class Row(NamedTuple):
    """One line of a split file: `id` and `split` as written."""

    file: str
    line: int
    id: str
    split: str


@dataclass(slots=True)
class Splits:
    """`of`: picture path -> split. `faulty`: pictures that are listed, yet without a usable split (reported). `missing`: id -> its first
    row, for ids without picture (not reported yet). `files`: what was read; `name`: what to call it, "" where there are no splits."""

    of: dict[str, str] = field(default_factory=dict)
    faulty: set[str] = field(default_factory=set)
    missing: dict[str, Row] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)
    name: str = ""


class Names:
    """Finds pictures by what a split file calls them. Ids are text: "001", "01" and "1" are three."""

    def __init__(self, pictures: list[File], layout: Layout) -> None:
        self._layout = layout
        self._paths = [f.path for f in pictures if below(f.path, layout.images) is not None]
        self._exact: dict[str, list[str]] = {}
        self._fallbacks: list[dict[str, list[str]]] = []
        for path in self._paths:
            self._exact.setdefault(id_of(path, layout.images) or path, []).append(path)

    def find(self, text: str) -> list[str]:
        """Pictures by id, else by file name, path below the root, or name without folders; each also after Unicode NFC.

        More than one where pictures share the id, or where a name without folders stands for several.
        """
        if text in self._exact:
            return self._exact[text]
        self._build()
        for form in dict.fromkeys((text, nfc(text), nfc(text.replace("\\", "/").removeprefix("./")))):
            for table in self._fallbacks:
                if form in table:
                    return table[form]
        return []

    def same_id(self, paths: list[str]) -> bool:
        return len({id_of(p, self._layout.images) for p in paths}) == 1

    def _build(self) -> None:
        """Only a split file with other spellings than the plain id pays for these tables."""
        if self._fallbacks or not self._paths:
            return
        forms: list[Callable[[str], str]] = [
            lambda p: id_of(p, self._layout.images) or p,
            lambda p: below(p, self._layout.images) or p,
            lambda p: p,
            without_suffix,
            lambda p: p.rpartition("/")[2],
            lambda p: without_suffix(p.rpartition("/")[2]),
        ]
        for form in forms:
            table: dict[str, list[str]] = {}
            for path in self._paths:
                table.setdefault(nfc(form(path)), []).append(path)
            self._fallbacks.append(table)


def read_splits(
    root: Path, names: Names, layout: Layout, others: list[File], split_file: str | None, encoding: str | None, report: Report
) -> Splits:
    """Read the split file, else the lists, else nothing; every fault in them is reported.

    Raises:
        PackError: `split_file` does not exist, or a file is no text in a known encoding.
    """
    have = {f.path for f in others}
    folders = list(dict.fromkeys(("", layout.base)))
    if split_file is not None and split_file not in have:
        raise PackError(f"[source] split_file = {split_file!r}: no such file below the root")
    csv = split_file or _split_file(folders, others)
    if csv is not None:
        rows = _table_rows(root / csv, csv, encoding, report)
        return Splits(files=[csv]) if rows is None else _assign(rows, names, Splits(files=[csv], name=csv), report)
    lists = _lists(folders, others)
    if not lists:
        return Splits()
    found = Splits(files=list(lists), name=", ".join(lists))
    listed = [*_list_rows(root, lists, names, encoding)]
    for path in sorted(lists.keys() - {row.file for row in listed}):
        report(Finding("warning", "empty-split", path, f"no picture is in split {lists[path]}: the list is empty"))
    return _assign(iter(listed), names, found, report)


def has_split_file(folders: list[str], others: list[File]) -> bool:
    """Whether `read_splits` would find a file in one of the folders."""
    return _split_file(folders, others) is not None or bool(_lists(folders, others))


def _split_file(folders: list[str], others: list[File]) -> str | None:
    """The first folder's split file, by its name in any case, the exact one before others."""
    for folder in folders:
        wanted = _join(folder, SPLIT_FILE)
        found = [f.path for f in others if f.path.rpartition("/")[0] == folder and f.path.lower() == wanted.lower()]
        if found:
            return wanted if wanted in found else found[0]
    return None


def _join(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def _lists(folders: list[str], others: list[File]) -> dict[str, str]:
    """Path -> split of the lists in ``ImageSets/Main``; trainval is taken only where neither train nor val is there."""
    for folder in folders:
        main = _join(folder, "imagesets/main/").lower()
        found = {f.path: f.path[len(main) :].lower() for f in others if f.path.lower().startswith(main)}
        lists = {path: LISTS[name] for path, name in found.items() if name in LISTS}
        both = {path: split for path, split in lists.items() if found[path] != "trainval.txt"}
        if lists:
            return both if {"train", "val"} & set(both.values()) else lists
    return {}


def _table_rows(path: Path, name: str, encoding: str | None, report: Report) -> Iterator[Row] | None:
    """None when a column is missing (reported)."""
    try:
        for _ in (table := read_table(path, name)).rows:
            pass
        chosen = None
    except PackError:
        if encoding is None:
            raise
        chosen = encoding
    table = read_table(path, name, encoding=chosen)
    missing = [column for column in ("image_id", "split") if column not in table.header]
    if missing:
        message = f"the first line is {table.first_line!r}: no column {' and '.join(missing)}; expected a header with image_id and split"
        report(Finding("error", "missing-column", name, message, line=1))
        return None
    where = table.header.index("image_id"), table.header.index("split")

    def cell(cells: list[str], column: int) -> str:
        return cells[column] if column < len(cells) else ""

    return (Row(name, line, cell(cells, where[0]), cell(cells, where[1])) for line, cells in table.rows)


def _list_rows(root: Path, lists: dict[str, str], names: Names, encoding: str | None) -> Iterator[Row]:
    for name, split in lists.items():
        for number, line in enumerate(_text(root / name, name, encoding).splitlines(), 1):
            text = line.strip()
            if not text:
                continue
            head, _, flag = text.rpartition(" ")
            # Lists for one class have a flag behind the id; an id may itself hold blanks.
            if flag in _FLAGS and head and not names.find(text):
                text = head.strip()
            yield Row(name, number, text, split)


def _text(path: Path, name: str, encoding: str | None) -> str:
    try:
        data = path.read_bytes()
    except OSError as e:
        raise PackError(f"{name}: cannot be read: {e.strerror}") from None
    if (what := told_of_text(data, encoding)) is not None:
        raise PackError(f"{name}: is {what}; expected a list in text")
    utf16 = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    for codec in ("utf-16" if utf16 else "utf-8-sig", encoding):
        try:
            if codec is not None and "\0" not in (text := data.decode(codec)):
                return text
        except UnicodeDecodeError:
            continue
    raise PackError(
        f'{name}: is not text in UTF-8 (or holds a NUL); save it as UTF-8, or name its encoding in a recipe: [source] encoding = "gbk", ...'
    )


@dataclass(slots=True)
class _Fault:
    """The first row with a fault, and how many there are."""

    row: Row
    count: int = 0


def _assign(rows: Iterator[Row], names: Names, splits: Splits, report: Report) -> Splits:
    """Give each picture the split of its first row; repeated, contradicting, unknown and ambiguous rows are reported once per picture."""
    first: dict[str, Row] = {}
    faults: dict[str, dict[str, _Fault]] = {"duplicate-row": {}, "split-conflict": {}, "unknown-split": {}, "ambiguous-id": {}}

    def note(code: str, key: str, row: Row) -> None:
        faults[code].setdefault(key, _Fault(row)).count += 1

    for row in rows:
        split, paths = split_of(row.split), names.find(row.id)
        if split is None:
            note("unknown-split", row.id, row)
            splits.faulty.update(paths)
        elif not paths:
            splits.missing.setdefault(row.id, row)
        elif not names.same_id(paths):
            note("ambiguous-id", row.id, row)
        else:
            for path in paths:
                earlier = first.setdefault(path, row)
                if earlier is not row:
                    note("duplicate-row" if splits.of[path] == split else "split-conflict", path, row)
                splits.of.setdefault(path, split)
    for name, fault in faults["unknown-split"].items():
        value = f"{fault.row.split!r} is no split" if fault.row.split else "the split is blank"
        _say("error", "unknown-split", fault, f"{value}, in the row of {name!r}; expected {EXPECTED}", name, report)
    for path, fault in faults["duplicate-row"].items():
        _say("warning", "duplicate-row", fault, f"{fault.row.id!r} repeats {_place(first[path], fault.row)}, same split", path, report)
    for path, fault in faults["split-conflict"].items():
        row, earlier = fault.row, first[path]
        message = f"{row.id!r} is in {row.split!r} here and in {earlier.split!r} in {_place(earlier, row)}; a picture belongs to one split"
        _say("error", "split-conflict", fault, message, path, report)
    for name, fault in faults["ambiguous-id"].items():
        pictures = " or ".join(names.find(name)[:5])
        _say("skip", "ambiguous-id", fault, f"{name!r} may be {pictures}: write its path", name, report)
    return splits


def _place(row: Row, seen_from: Row) -> str:
    return f"line {row.line}" if row.file == seen_from.file else f"{row.file}, line {row.line}"


def _say(level: Level, code: str, fault: _Fault, message: str, sample: str, report: Report) -> None:
    row = fault.row
    report(Finding(level, code, row.file, f"line {row.line}: {message}", sample=sample, line=row.line, count=fault.count))
