"""Finds and opens the tables of a CSV data set."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Set
from pathlib import Path

from packer.sample import PackError
from packer.sources.csv_columns import Wanted, is_retinanet, looks_like
from packer.sources.csv_paths import plain_folder
from packer.sources.csv_rows import SPLITS
from packer.sources.splits import split_of
from packer.sources.table import Row, Table, read_table
from packer.sources.tree import archive_hint, is_folder, is_ignored, is_regular, suffix_of

TABLE_SUFFIXES = frozenset({".csv", ".tsv"})
_MAX_FOLDERS_LOOKED_INTO = 20


def open_table(path: Path, name: str, wanted: Wanted, encoding: str | None, delimiter: str | None) -> tuple[Table, Row | None]:
    """Open a table and tell whether it has a header; without one, its first row is given too.

    Raises:
        PackError: see `read_table`.
    """
    numbered = all(ref is None or isinstance(ref, int) for ref in wanted.columns.model_dump().values())
    if wanted.header is not True:
        bare = read_table(path, name, encoding=encoding, delimiter=delimiter, header=False)
        first = next(bare.rows, None)
        if wanted.header is False or (numbered and first is not None and is_retinanet(first[1])):
            return read_table(path, name, encoding=encoding, delimiter=delimiter, header=False), first
    return read_table(path, name, encoding=encoding, delimiter=delimiter, header=True), None


def describe_table(path: Path, name: str, wanted: Wanted, encoding: str | None = None, delimiter: str | None = None) -> str | None:
    """In words, which columns make a file a table of labels or boxes; None when it is none. Reads its first lines only."""
    for codec in dict.fromkeys((encoding, "latin-1")):  # column names are ASCII; whether the rest decodes is told when it is read
        try:
            table, first = open_table(path, name, wanted, codec, delimiter)
        except PackError:
            continue
        return looks_like(table, first, wanted)
    return None


def sniff_tables(root: Path) -> str | None:
    """Why a folder looks like a CSV data set: the tables at its top, else one folder below, by their header lines; or None."""
    for names in list_near(root):
        for name in names:
            what = describe_table(root / name, name, Wanted())
            if what is not None:
                return f"{name} has {what}"
    return None


def list_near(root: Path, suffixes: Set[str] = TABLE_SUFFIXES) -> Iterator[list[str]]:
    """The files with such suffixes at the top of a folder, then those one folder below (none where there are many folders), sorted."""
    files, folders = _entries(root, "", suffixes)
    yield files
    if len(folders) <= _MAX_FOLDERS_LOOKED_INTO:
        yield [name for folder in folders for name in _entries(root / folder, folder + "/", suffixes)[0]]


def _entries(folder: Path, prefix: str, suffixes: Set[str]) -> tuple[list[str], list[str]]:
    """Sorted files with such suffixes, and folders, of one folder."""
    files, folders = [], []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if is_ignored(entry.name):
                    continue
                if suffix_of(entry.name) in suffixes and is_regular(entry):
                    files.append(prefix + entry.name)
                elif is_folder(entry):
                    folders.append(entry.name)
    except OSError:
        return [], []
    return sorted(files), sorted(folders)


def find_tables(
    root: Path,
    others: Iterable[str],
    file: str | Mapping[str, str] | None,
    wanted: Wanted,
    encoding: str | None,
    delimiter: str | None,
) -> list[tuple[str, str | None]]:
    """The tables to read, as (path below the root, split or None).

    Args:
        root: The data set's folder.
        others: Its files besides the pictures, below the root.
        file: The option of this name; None: the one table at the top that looks like one, else the one in a folder below.
        wanted, encoding, delimiter: How tables are read.

    Raises:
        PackError: a declared one is not there; none or several fit.
    """
    others = list(others)
    known = [name for name in others if suffix_of(name) in TABLE_SUFFIXES]
    if isinstance(file, str):
        return [(_declared(root, file, known), None)]
    if file is not None:
        return [(_declared(root, name, known), split_of(split)) for split, name in file.items()]
    for depth in (0, 1):
        near = [name for name in known if name.count("/") == depth]
        fits = [name for name in near if describe_table(root / name, name, wanted, encoding, delimiter)]
        if len(fits) > 1:
            raise PackError(f"several tables fit: {', '.join(fits)}; say which: [source] {_proposal(fits)}")
        if fits or (depth == 0 and len(near) == 1 and len(known) == 1):  # the only one there is: reading it says what it lacks
            return [((fits or near)[0], None)]
    tables = ", ".join(known[:5]) + (", ..." if len(known) > 5 else "")
    raise PackError(
        f"no table of labels or boxes found at the top of the folder or one folder below (tables there: {tables or 'none'}); "
        f'[source] file = "..." names it, columns = {{...}} its columns{archive_hint(others)}'
    )


def _declared(root: Path, file: str, known: list[str]) -> str:
    name = plain_folder(file)
    if not name:
        raise PackError(f"[source] file is {file!r}, expected a file below the data set's folder")
    if not os.path.isfile(root / name):  # False, too, where a link's target cannot be reached
        there = ", ".join(known[:5]) + (", ..." if len(known) > 5 else "")
        raise PackError(f"[source] file is {file!r}: there is no such file; tables there: {there or 'none'}")
    return name


def _proposal(names: list[str]) -> str:
    """How to write the option `file`: by split where the names tell it."""
    by_split: dict[str, str] = {}
    for name in names:
        words = name.rpartition("/")[2].rpartition(".")[0].replace("-", "_").split("_")
        split = next((s for w in words if (s := split_of(w))), None)
        if split is not None:
            by_split.setdefault(split, name)
    if len(by_split) > 1:
        return "file = {" + ", ".join(f'{s} = "{by_split[s]}"' for s in SPLITS if s in by_split) + f'}} or file = "{names[0]}"'
    return f'file = "{names[0]}"'
