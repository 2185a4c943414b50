"""What is said about the rows and pictures of a CSV data set, besides rows that contradict each other (`csv_groups`)."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from packer.sources.csv_groups import Groups, Said, TableRows
from packer.sources.csv_paths import MISSING, OUTSIDE, PictureIndex
from packer.sources.csv_rows import NO_LABEL, Rows, shown
from packer.sources.tree import Tree

_SHOWN_SAMPLE = 300


def check_names(table: TableRows, index: PictureIndex, hint: str, said: Said) -> None:
    """Rows whose picture was not found: one finding for each name. `hint`: what to add about missing ones."""
    lost = np.flatnonzero(table.pictures < 0)
    if not len(lost):
        return
    lines, counts = _first_lines(table.rows)
    written = list(table.rows.names)
    for number in lost.tolist():
        found, name = int(table.pictures[number]), written[number]
        if found == OUTSIDE:
            code, message = "path-outside", f"path {shown(name)} leads outside the data set or is a URL; it was not opened"
        elif found == MISSING:
            code, message = "missing-image", f"there is no picture {shown(name)}{hint}"
        else:
            twins = index.twins(found)
            code, message = "ambiguous-image", f"{shown(name)} may be {' or '.join(twins[:5])}; write the whole name"
        said.add("skip", code, table.path, int(lines[number]), message, name[:_SHOWN_SAMPLE], int(counts[number]))


def _first_lines(rows: Rows) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Of each name: the first line it stands in, and in how many rows; faulty rows included."""
    name = np.frombuffer(rows.name, np.int32) if len(rows.name) else np.zeros(0, np.int32)
    line = np.frombuffer(rows.line, np.int64) if len(rows.line) else np.zeros(0, np.int64)
    counts = np.bincount(name, minlength=len(rows.names))
    lines = np.full(len(rows.names), np.iinfo(np.int64).max)
    lines[name[::-1]] = line[::-1]  # of several values for one place the last one written stays
    for (number, _), fault in rows.faults.items():
        if number >= 0:
            counts[number] += fault.count
            lines[number] = min(lines[number], fault.line)
    return lines, counts


def check_faults(table: TableRows, said: Said) -> None:
    """Rows that cannot be true."""
    written = list(table.rows.names)
    for (number, code), fault in table.rows.faults.items():
        picture = int(table.pictures[number]) if number >= 0 else -1
        sample = picture if picture >= 0 else written[number][:_SHOWN_SAMPLE] if number >= 0 else None
        said.add(fault.level, code, table.path, fault.line, fault.message, sample, fault.count)


def check_pictures(tree: Tree, tables: Sequence[TableRows], groups: Groups, said: Said) -> None:
    """Pictures that no row names."""
    named = groups.table >= 0
    for table in tables:
        faulty = np.array([number for number, _ in table.rows.faults if number >= 0], np.int64)
        found = table.pictures[faulty]
        named[found[found >= 0]] = True
    names = ", ".join(t.path for t in tables)
    for picture in np.flatnonzero(~named).tolist():
        if not tree.pictures[picture].refused:
            path = tree.pictures[picture].path
            said.add("skip", "no-row", path, None, f"has no row in {names}", picture)


def check_classes(given: Sequence[str] | None, names: Sequence[str], groups: Groups, tables: Sequence[TableRows], said: Said) -> list[str]:
    """The classes in id order: the given ones, pictures with others being refused, else the sorted ones of the pictures not refused."""
    is_detection = bool(tables[0].roles.boxes)
    if is_detection:
        label, line = groups.labels, groups.lines
        picture = np.repeat(np.arange(len(groups.table)), np.diff(groups.box_offsets))
    else:
        picture = np.flatnonzero(groups.label != NO_LABEL)
        label, line = groups.label[picture], groups.line[picture]
    if given is None:
        return sorted(names[i] for i in np.unique(label[~said.refused[picture]]).tolist())
    allowed = set(given)
    known = np.array([name in allowed for name in names], bool)
    for row in np.flatnonzero(~known[label]).tolist():
        p = int(picture[row])
        message = f"class {shown(names[label[row]])} is not one of [source] classes"
        said.add("skip", "unknown-class", tables[groups.table[p]].path, int(line[row]), message, p)
    return list(given)


def check_lists(names: Sequence[str], groups: Groups, tables: Sequence[TableRows], said: Said) -> None:
    """Labels that look like several classes in one cell: packed as one class, verbatim, and said once for each."""
    used, first, counts = np.unique(groups.label, return_index=True, return_counts=True)
    known = set(names)
    for label, picture, count in zip(used.tolist(), first.tolist(), counts.tolist(), strict=True):
        if label != NO_LABEL and _looks_like_list(names[label], known):
            path, line = tables[groups.table[picture]].path, int(groups.line[picture])
            message = f"class {shown(names[label])} looks like several classes in one cell; it is packed as one class, as it is written"
            said.add("warning", "looks-multi-label", path, line, message, picture, count)


def _looks_like_list(name: str, known: set[str]) -> bool:
    parts = [p.strip() for p in re.split(r"[|;]", name)]
    if len(parts) > 1 and all(parts):
        return True
    parts = [p.strip() for p in name.split(",")]
    return len(parts) > 1 and all(p in known for p in parts)
