"""Reads the rows of one CSV table into compact arrays. Text stays text; only box numbers and picture sizes are parsed.

A row that cannot be true is a fault of its picture and is kept as such; reading goes on.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

from packer.sample import Level
from packer.sources.class_names import long_name
from packer.sources.csv_columns import Roles
from packer.sources.splits import EXPECTED, split_of
from packer.sources.table import Table

SPLITS = ("train", "val", "test")
NO_SPLIT = NO_LABEL = -1
UNUSABLE = -1
"""In place of a width or height that is no whole number over 0."""

_SPLIT_IDS = {name: i for i, name in enumerate(SPLITS)}
_FLAG_VALUES = {"1": 1, "1.0": 1, "true": 1, "yes": 1, "0": 0, "0.0": 0, "false": 0, "no": 0, "": 0, "-1": 0}  # Open Images: -1 unknown
_BRACKETS = re.compile(r"^[\[(]\s*|\s*[\])]$")
_BETWEEN = re.compile(r"\s*[,;]\s*|\s+")
_DECIMAL_COMMA = re.compile(r"[+-]?[0-9]*,[0-9]+")
_SHOWN = 120


def shown(text: str) -> str:
    """A cell for a message: quoted, shortened."""
    return repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "...")


class RowFault(Exception):
    """What is wrong with one row."""

    def __init__(self, code: str, message: str, level: Level = "skip") -> None:
        super().__init__(message)
        self.code, self.level = code, level


@dataclass(slots=True)
class Fault:
    """The first of `count` rows of a picture with the same kind of fault."""

    level: Level
    line: int
    message: str
    count: int = 1


@dataclass(slots=True)
class Vocabulary:
    """Texts met in all tables of a data set -> number, in the order they were met: classes, and values of each kept column."""

    labels: dict[str, int] = field(default_factory=dict)
    extra: dict[str, dict[str, int]] = field(default_factory=dict)


@dataclass(slots=True)
class Rows:
    """The sound rows of one table, R of them, and the faults of the others.

    `names`: path cell as written -> number. Per row: `name` int32, `line` int64, `split` int8 (of `SPLITS`, or -1), `label` int32 (of
    the vocabulary; -1 in a table of boxes: the picture has none), `numbers` float64 [R * 4] as written, `flags` uint8 [R * F] in the
    order of `Roles.flags`, `size` int32 [R * 2] (0 blank, -1 unusable), `extra` int32 each. Fields that the table does not have are empty.
    `faults`: (name, code) -> fault; name -1 where the row names no picture.
    """

    names: dict[str, int] = field(default_factory=dict)
    name: array[int] = field(default_factory=lambda: array("i"))
    line: array[int] = field(default_factory=lambda: array("q"))
    split: array[int] = field(default_factory=lambda: array("b"))
    label: array[int] = field(default_factory=lambda: array("i"))
    numbers: array[float] = field(default_factory=lambda: array("d"))
    flags: array[int] = field(default_factory=lambda: array("B"))
    size: array[int] = field(default_factory=lambda: array("i"))
    extra: dict[str, array[int]] = field(default_factory=dict)
    faults: dict[tuple[int, str], Fault] = field(default_factory=dict)


def read_rows(table: Table, roles: Roles, class_name: str | None, split: str | None, vocabulary: Vocabulary) -> Rows:
    """Read a whole table.

    Args:
        table: The opened table.
        roles: What its columns are.
        class_name: The class of every row, where there is no column for it.
        split: The split of every row, where the table is of one split.
        vocabulary: Grows by the texts met.

    Raises:
        PackError: the file is no such table, see `read_table`.
    """
    rows = Rows(extra={name: array("i") for name in roles.extra})
    parse_label = _label_rule(roles, class_name, table.header)
    parse_split = _split_rule(roles, split)
    num_columns, path = roles.num_columns, roles.path
    for line, cells in table.rows:
        number = NO_LABEL
        try:
            written = cells[path] if path < len(cells) else ""
            if written:
                number = rows.names.setdefault(written, len(rows.names))
            if len(cells) != num_columns and (len(cells) < num_columns or any(cells[num_columns:])):
                raise RowFault("ragged-row", f"has {len(cells)} cells, expected {num_columns}")
            if not written:
                raise RowFault("no-path", "names no picture: the path is blank")
            split_id = parse_split(cells)
            label, numbers = parse_label(cells)
            if label is not None and (too_long := long_name(label)) is not None:
                raise RowFault("bad-class-name", too_long)
            flags = [_flag(name, cells[column]) for name, column in roles.flags.items()]
        except RowFault as e:
            _add_fault(rows, number, line, e)
            continue
        rows.name.append(number)
        rows.line.append(line)
        rows.split.append(split_id)
        rows.label.append(NO_LABEL if label is None else vocabulary.labels.setdefault(label, len(vocabulary.labels)))
        if roles.boxes:
            rows.numbers.extend(numbers)
        if flags:
            rows.flags.extend(flags)
        if roles.size:
            rows.size.extend((_length(cells[roles.size[0]]), _length(cells[roles.size[1]])))
        for name, column in roles.extra.items():
            values = vocabulary.extra.setdefault(name, {})
            rows.extra[name].append(values.setdefault(cells[column], len(values)))
    return rows


def _add_fault(rows: Rows, number: int, line: int, fault: RowFault) -> None:
    known = rows.faults.get((number, fault.code))
    if known is None:
        rows.faults[number, fault.code] = Fault(fault.level, line, str(fault))
    else:
        known.count += 1


def _split_rule(roles: Roles, split: str | None) -> Callable[[list[str]], int]:
    if roles.split is None:
        fixed = NO_SPLIT if split is None else _SPLIT_IDS[split]
        return lambda _: fixed
    column = roles.split
    known: dict[str, int] = {}

    def parse(cells: list[str]) -> int:
        text = cells[column]
        if text not in known:
            name = split_of(text)
            if name is None:
                raise RowFault(
                    "unknown-split", f"split is {shown(text)}, expected {EXPECTED}; columns.split = false ignores the column", "error"
                )
            known[text] = _SPLIT_IDS[name]
        return known[text]

    return parse


def _label_rule(roles: Roles, class_name: str | None, header: list[str]) -> Callable[[list[str]], tuple[str | None, list[float]]]:
    """Parses a row into its class (None: a picture without objects) and its four numbers."""
    column, boxes = roles.label, roles.boxes
    names = [repr(header[c]) if header else str(c) for c in boxes]

    def label_of(cells: list[str]) -> str:
        return class_name or "" if column is None else cells[column]

    def only_label(cells: list[str]) -> tuple[str | None, list[float]]:
        label = label_of(cells)
        if not label:
            raise RowFault("missing-class", "the class is blank")
        return label, []

    def label_and_box(cells: list[str]) -> tuple[str | None, list[float]]:
        texts = [cells[c] for c in boxes]
        label = label_of(cells)
        if label and all(texts):
            return label, [_number(t, n) for t, n in zip(texts, names, strict=True)] if len(texts) == 4 else _bbox(texts[0], names[0])
        if not any(texts) and (not label or column is None):
            return None, _NO_NUMBERS
        if label:
            raise RowFault(
                "incomplete-row", f"class {shown(label)} without all four numbers of a box (a picture without objects has neither)"
            )
        raise RowFault("incomplete-row", f"box {shown(', '.join(texts))} without a class (a picture without objects has neither)")

    return label_and_box if boxes else only_label


_NO_NUMBERS = [0.0] * 4


def _number(text: str, column: str) -> float:
    """A number as people write it; NaN and infinity are numbers here, and refused where boxes are checked."""
    try:
        if "_" not in text:  # Python's own spelling of thousands
            return float(text)
    except ValueError:
        pass
    comma = f"; this looks like a decimal comma, write {text.replace(',', '.')}" if _DECIMAL_COMMA.fullmatch(text) else ""
    raise RowFault("bad-number", f"{shown(text)} in column {column} is no number{comma}")


def _bbox(text: str, column: str) -> list[float]:
    parts = _BETWEEN.split(_BRACKETS.sub("", text))
    if len(parts) != 4:
        raise RowFault("bad-number", f"{shown(text)} in column {column} holds {len(parts)} numbers, expected 4")
    return [_number(p, column) for p in parts]


def _flag(name: str, text: str) -> int:
    value = _FLAG_VALUES.get(text.lower())
    if value is None:
        raise RowFault("bad-flag", f"{name} is {shown(text)}, expected 0 or 1")
    return value


def _length(text: str) -> int:
    """A picture's width or height in pixels; 0 for a blank cell, `UNUSABLE` for anything but a whole number over 0."""
    try:
        value = float(text) if text else 0.0
    except ValueError:
        return UNUSABLE
    return int(value) if (value.is_integer() and 0 < value < 1 << 31) or not text else UNUSABLE
