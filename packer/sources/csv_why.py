"""Why the tables beside pictures are none that can be read as labels or boxes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from packer.content import WORKBOOK
from packer.sample import PackError
from packer.sources.csv_columns import LABEL_NAMES, PATH_NAMES, SPLIT_NAMES, Wanted
from packer.sources.csv_files import TABLE_SUFFIXES, describe_table, list_near, open_table
from packer.sources.table import Table
from packer.sources.tree import ARCHIVE_SUFFIXES, is_picture, suffix_of

# Labels that are not read, by the names that people give them.
_LABEL_STEMS = frozenset(
    {"label", "labels", "annotation", "annotations", "metadata", "target", "targets", "ground_truth", "groundtruth", "gt"}
)
_LABEL_SUFFIXES = frozenset({".json", ".jsonl", ".txt", ".parquet", ".feather", ".arrow", ".pkl", ".npy", ".npz", ".mat", ".h5", ".hdf5"})
WORKBOOK_SUFFIXES = frozenset({".xlsx", ".xls", ".ods"})


def why_not_tables(root: Path) -> list[tuple[str, str]]:
    """See `packer.sources.csv.why_not`."""
    result = [(name, reason) for names in list_near(root) for name in names if (reason := _reason(root, name)) is not None]
    workbooks = next(iter(list_near(root, WORKBOOK_SUFFIXES)))
    return sorted(result + [(name, f"is {WORKBOOK}") for name in workbooks] + list(_not_read(root)))


def _not_read(root: Path) -> Iterator[tuple[str, str]]:
    """Compressed tables, and labels of another kind, at the top of the folder."""
    for name in next(iter(list_near(root, ARCHIVE_SUFFIXES))):
        if suffix_of(name.rpartition(".")[0]) in TABLE_SUFFIXES:
            yield name, "is compressed: unpack it first"
    for name in next(iter(list_near(root, _LABEL_SUFFIXES))):
        if name.rpartition(".")[0].lower() in _LABEL_STEMS:
            yield name, f"by its name it holds labels, and {suffix_of(name)} is not read: save them as CSV"


def _reason(root: Path, name: str) -> str | None:
    try:
        if describe_table(root / name, name, Wanted()) is not None:
            return None
        table, first = open_table(root / name, name, Wanted(), None, None)
    except PackError as e:
        return str(e).removeprefix(name).lstrip(":, ")
    except (OSError, ValueError) as e:  # gone meanwhile; a codec's own refusal
        return f"cannot be read: {getattr(e, 'strerror', None) or e}"
    return _lacks(table) if first is None else None


def _lacks(table: Table) -> str | None:
    """What a table lacks; None for one that only divides pictures into splits."""
    header = set(table.header) - {""}
    if not header:
        return "the file is empty"
    first = f"its first line is {table.first_line!r}"
    if any(is_picture(name.replace("\\", "/")) for name in header):
        return f'{first}, no header; say kind = "csv", header = false and columns by number, columns = {{path = 0, label = 1}}'
    has_path, known = bool(header & set(PATH_NAMES)), {*PATH_NAMES, *SPLIT_NAMES}
    if has_path and header <= known and header & set(SPLIT_NAMES):
        return None
    lacks = [] if has_path else [f"the picture's path ({', '.join(PATH_NAMES)})"]
    if not header & set(LABEL_NAMES):
        lacks.append(f"the class ({', '.join(LABEL_NAMES)})")
    return f'{first}; expected a column for {" and one for ".join(lacks)}, or kind = "csv" and columns = {{path = ..., label = ...}}'
