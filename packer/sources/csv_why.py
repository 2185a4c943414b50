"""Why the tables beside pictures are none that can be read as labels or boxes."""

from __future__ import annotations

from pathlib import Path

from packer.sample import PackError
from packer.sources.csv_columns import LABEL_NAMES, PATH_NAMES, SPLIT_NAMES, Wanted
from packer.sources.csv_files import describe_table, list_near, open_table
from packer.sources.table import Table
from packer.sources.tree import is_picture

WORKBOOK_SUFFIXES = frozenset({".xlsx", ".xls", ".ods"})
_WORKBOOK = "an Excel/OpenDocument workbook: save it as CSV"
_WORKBOOK_STARTS = (b"PK\x03\x04", b"\xd0\xcf\x11\xe0")


def why_not_tables(root: Path) -> list[tuple[str, str]]:
    """See `packer.sources.csv.why_not`."""
    result = [(name, reason) for names in list_near(root) for name in names if (reason := _reason(root, name)) is not None]
    workbooks = next(iter(list_near(root, WORKBOOK_SUFFIXES)))
    return sorted(result + [(name, _WORKBOOK) for name in workbooks])


def _reason(root: Path, name: str) -> str | None:
    try:
        with (root / name).open("rb") as f:
            if f.read(4).startswith(_WORKBOOK_STARTS):
                return _WORKBOOK
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
