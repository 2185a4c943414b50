"""From rows, in the order of their tables, to what is said about each picture: one stable sort, then CSR arrays.

Rows of one picture that contradict each other are found here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from packer.sample import Finding, Level
from packer.sources.csv_columns import BoxFormat, Roles
from packer.sources.csv_rows import NO_LABEL, NO_SPLIT, SPLITS, UNUSABLE, Rows, shown

FLAGS = ("difficult", "truncated", "occluded")


@dataclass(slots=True)
class TableRows:
    """One table that was read. `path` is below the root; `pictures` int32: of each name of `rows.names`, negative where not found."""

    path: str
    roles: Roles
    rows: Rows
    pictures: NDArray[np.int32]


@dataclass(slots=True)
class Groups:
    """What the tables say about N pictures, M boxes in all; a picture's boxes are rows box_offsets[i]:box_offsets[i+1], in table order.

    Per picture: `table` int16 (which one, -1: no sound row), `split` int8 and `label` int32 (-1: none), `line` int64 of its first row,
    `size` int32 [N, 2] (width, height; 0: none), `extra` int32 [N] a kept column (-1: none). Per box: `boxes` float64 [M, 4] xyxy,
    `labels` int32, `lines` int64, `flags` uint8 [M, 3] in the order of `FLAGS`.
    """

    table: NDArray[np.int16]
    split: NDArray[np.int8]
    label: NDArray[np.int32]
    line: NDArray[np.int64]
    size: NDArray[np.int32]
    box_offsets: NDArray[np.int64]
    boxes: NDArray[np.float64]
    labels: NDArray[np.int32]
    lines: NDArray[np.int64]
    flags: NDArray[np.uint8]
    extra: dict[str, NDArray[np.int32]] = field(default_factory=dict)


class Said:
    """Gathers findings, one for each (code, sample), and which pictures they refuse: `refused` bool [number of pictures]."""

    def __init__(self, pictures: Sequence[str]) -> None:
        self.pictures = pictures
        self.refused = np.zeros(len(pictures), bool)
        self._findings: dict[tuple[str, str | None], Finding] = {}

    def add(self, level: Level, code: str, path: str, line: int | None, message: str, sample: str | int | None, count: int = 1) -> None:
        """`sample`: a picture's number, or a name as written where there is no picture."""
        if isinstance(sample, int):
            self.refused[sample] |= level != "warning"
            sample = self.pictures[sample]
        message = message if line is None else f"line {line}: {message}"
        known = self._findings.get((code, sample))
        if known is None:
            self._findings[code, sample] = Finding(level, code, path, message, sample=sample, line=line, count=count)
        else:
            self._findings[code, sample] = replace(known, count=known.count + count)

    def sorted(self) -> list[Finding]:
        """By file, line, sample, code."""
        return sorted(self._findings.values(), key=lambda f: (f.path, f.line or 0, f.sample or "", f.code))


def group_rows(tables: Sequence[TableRows], labels: Sequence[str], said: Said) -> Groups:
    """Group all sound rows by picture and say where they contradict each other. `labels`: names of the row's class numbers."""
    parts = [_Columns.of(t, i) for i, t in enumerate(tables)]
    rows = _Columns.join(parts)
    rows = rows.take(np.argsort(rows.picture, kind="stable"))
    view = _View(tables, rows, said)
    view.check_splits()
    if tables[0].roles.boxes:
        view.check_negatives()
    else:
        view.check_labels(labels)
    return view.groups(len(said.pictures))


def _array(values: Any, dtype: str, columns: int = 0) -> NDArray[Any]:
    flat = np.frombuffer(values, dtype) if len(values) else np.zeros(0, dtype)
    return flat.reshape(-1, columns) if columns else flat


def _xyxy(numbers: NDArray[np.float64], box_format: BoxFormat) -> NDArray[np.float64]:
    """float64 [R, 4] as written -> corners."""
    if box_format == "xyxy":
        return numbers
    xy, wh = numbers[:, :2], numbers[:, 2:]
    with np.errstate(over="ignore", invalid="ignore"):  # infinite numbers are refused where boxes are checked
        first = xy - wh / 2 if box_format == "cxcywh" else xy
        last = xy + wh / 2 if box_format == "cxcywh" else xy + wh
    return np.concatenate([first, last], axis=1)


@dataclass(slots=True)
class _Columns:
    """Rows as arrays of equal length R; `boxes` [R, 4] or [0, 4] in tables of labels."""

    picture: NDArray[np.int32]
    table: NDArray[np.int16]
    line: NDArray[np.int64]
    split: NDArray[np.int8]
    label: NDArray[np.int32]
    size: NDArray[np.int32]
    boxes: NDArray[np.float64]
    flags: NDArray[np.uint8]
    extra: dict[str, NDArray[np.int32]]

    @classmethod
    def of(cls, t: TableRows, number: int) -> _Columns:
        """A table's rows that have a picture."""
        rows, r = t.rows, len(t.rows.name)
        flags = np.zeros((r if t.roles.boxes else 0, len(FLAGS)), np.uint8)
        for i, name in enumerate(t.roles.flags):
            flags[:, FLAGS.index(name)] = _array(rows.flags, "u1", len(t.roles.flags))[:, i]
        columns = cls(
            picture=t.pictures[_array(rows.name, "i4")],
            table=np.full(r, number, np.int16),
            line=_array(rows.line, "i8"),
            split=_array(rows.split, "i1"),
            label=_array(rows.label, "i4"),
            size=_array(rows.size, "i4", 2) if t.roles.size else np.zeros((r, 2), np.int32),
            boxes=_xyxy(_array(rows.numbers, "f8", 4), t.roles.box_format),
            flags=flags,
            extra={name: _array(values, "i4") for name, values in rows.extra.items()},
        )
        return columns if (columns.picture >= 0).all() else columns.take(np.flatnonzero(columns.picture >= 0))

    @classmethod
    def join(cls, parts: Sequence[_Columns]) -> _Columns:
        if len(parts) == 1:
            return parts[0]

        def joined(name: str) -> NDArray[Any]:
            return np.concatenate([getattr(p, name) for p in parts])

        return cls(
            joined("picture"),
            joined("table"),
            joined("line"),
            joined("split"),
            joined("label"),
            joined("size"),
            joined("boxes"),
            joined("flags"),
            {name: np.concatenate([p.extra[name] for p in parts]) for name in parts[0].extra},
        )

    def take(self, order: NDArray[np.int64]) -> _Columns:
        boxed = len(self.flags) > 0
        return _Columns(
            self.picture[order],
            self.table[order],
            self.line[order],
            self.split[order],
            self.label[order],
            self.size[order],
            self.boxes[order] if boxed else self.boxes,
            self.flags[order] if boxed else self.flags,
            {name: values[order] for name, values in self.extra.items()},
        )


class _View:
    """Rows sorted by picture; group g is rows starts[g] : starts[g] + counts[g]."""

    def __init__(self, tables: Sequence[TableRows], rows: _Columns, said: Said) -> None:
        self.tables, self.rows, self.said = tables, rows, said
        changes = np.diff(rows.picture, prepend=NO_LABEL) != 0
        self.starts = np.flatnonzero(changes)
        self.counts = np.diff(self.starts, append=len(rows.picture))

    def differing(self, values: NDArray[Any]) -> Iterator[tuple[int, int, int]]:
        """(picture, its first row, the first row whose value is another) of each picture whose rows differ."""
        other = np.flatnonzero(values != np.repeat(values[self.starts], self.counts))
        group = np.searchsorted(self.starts, other, "right") - 1
        first = np.flatnonzero(np.diff(group, prepend=-1))
        for row, g in zip(other[first].tolist(), group[first].tolist(), strict=True):
            start = int(self.starts[g])
            yield int(self.rows.picture[start]), start, row

    def place(self, row: int) -> tuple[str, int]:
        return self.tables[self.rows.table[row]].path, int(self.rows.line[row])

    def where(self, row: int, seen_from: int) -> str:
        """What a message about another row calls this one: its line, and its table where that is another one."""
        path, line = self.place(row)
        return f"line {line}" if path == self.place(seen_from)[0] else f"{path}, line {line}"

    def check_splits(self) -> None:
        for picture, a, b in self.differing(self.rows.split):
            path_b, line_b = self.place(b)
            name_a, name_b = (SPLITS[self.rows.split[r]] for r in (a, b))
            where = self.where(a, b)
            message = (
                f"{self.said.pictures[picture]} is in split {name_b!r} here and in {name_a!r} in {where}; a picture belongs to one split"
            )
            self.said.add("error", "split-conflict", path_b, line_b, message, picture)

    def check_labels(self, labels: Sequence[str]) -> None:
        """Tables of labels: one class for each picture."""
        conflicts = set()
        for picture, a, b in self.differing(self.rows.label):
            conflicts.add(picture)
            name_a, name_b = (shown(labels[self.rows.label[r]]) for r in (a, b))
            path, line = self.place(b)
            message = f"class {name_b} here, {name_a} in {self.where(a, b)}; a picture has one class"
            self.said.add("skip", "label-conflict", path, line, message, picture)
        for g in np.flatnonzero(self.counts > 1).tolist():
            start = int(self.starts[g])
            picture = int(self.rows.picture[start])
            if picture not in conflicts:
                path, line = self.place(start + 1)
                message = f"says the same as {self.where(start, start + 1)}; one of them is enough"
                self.said.add("warning", "duplicate-row", path, line, message, picture, int(self.counts[g]) - 1)

    def check_negatives(self) -> None:
        """Tables of boxes: a row without box says that there is none."""
        blank = np.flatnonzero(self.rows.label == NO_LABEL)
        groups, begins, counts = np.unique(np.searchsorted(self.starts, blank, "right") - 1, return_index=True, return_counts=True)
        for g, begin, count in zip(groups.tolist(), begins.tolist(), counts.tolist(), strict=True):
            mine = blank[begin : begin + count]
            picture = int(self.rows.picture[self.starts[g]])
            if len(mine) < self.counts[g]:
                path, line = self.place(int(mine[0]))
                message = "says that the picture has no object, yet other rows give it boxes; the boxes are taken"
                self.said.add("warning", "blank-row", path, line, message, picture, len(mine))
            elif len(mine) > 1:
                path, line = self.place(int(mine[1]))
                message = f"says the same as {self.where(int(mine[0]), int(mine[1]))}; one of them is enough"
                self.said.add("warning", "duplicate-row", path, line, message, picture, len(mine) - 1)

    def sizes(self) -> NDArray[np.int32]:
        """int32 [number of groups, 2]: the picture's size where its rows agree, else 0."""
        size = self.rows.size
        result = size[self.starts]
        bad = {(picture, b) for picture, _, b in self.differing(size[:, 0])} | {
            (picture, b) for picture, _, b in self.differing(size[:, 1])
        }
        bad |= {(int(self.rows.picture[r]), r) for r in np.flatnonzero((size == UNUSABLE).any(1)).tolist()}
        for picture, row in sorted(bad):
            path, line = self.place(row)
            message = "the picture's width and height are no whole numbers over 0, or rows of the picture differ; they are not used"
            self.said.add("warning", "bad-size", path, line, message, picture)
        groups = np.searchsorted(self.rows.picture[self.starts], sorted({picture for picture, _ in bad}))
        result[groups] = 0
        result[(result == 0).any(1)] = 0
        return result

    def kept(self, name: str, values: NDArray[np.int32]) -> NDArray[np.int32]:
        """int32 [number of groups]: the value where all rows agree, else -1."""
        result = values[self.starts]
        for picture, _, row in self.differing(values):
            path, line = self.place(row)
            message = f"column {name!r} is not the same in all rows of the picture; it is not kept"
            self.said.add("warning", "extra-differs", path, line, message, picture)
            result[np.searchsorted(self.rows.picture[self.starts], picture)] = -1
        return result

    def groups(self, num_pictures: int) -> Groups:
        rows, n = self.rows, num_pictures
        which, first = rows.picture[self.starts], self.starts

        def spread(values: NDArray[Any], fill: int) -> NDArray[Any]:
            out = np.full((n, *values.shape[1:]), fill, values.dtype)
            out[which] = values
            return out

        boxed = np.flatnonzero(rows.label != NO_LABEL) if len(rows.flags) else np.zeros(0, np.int64)
        offsets = np.zeros(n + 1, np.int64)
        np.cumsum(np.bincount(rows.picture[boxed], minlength=n), out=offsets[1:])
        return Groups(
            table=spread(rows.table[first], -1),
            split=spread(rows.split[first], NO_SPLIT),
            label=spread(rows.label[first], NO_LABEL),
            line=spread(rows.line[first], 0),
            size=spread(self.sizes(), 0),
            box_offsets=offsets,
            boxes=rows.boxes[boxed],
            labels=rows.label[boxed],
            lines=rows.line[boxed],
            flags=rows.flags[boxed],
            extra={name: spread(self.kept(name, values), -1) for name, values in rows.extra.items()},
        )
