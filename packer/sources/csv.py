"""CSV tables: a label for each picture, or boxes, one row each. Coordinates and columns are taken as declared, or by a known header.

Every row is read while listing, into compact arrays (about 60 bytes a row), so nothing is read again for a picture.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictStr, field_validator, model_validator

from loaders.format import Task
from packer.sample import Annotation, Item, Listing, PackError, Report
from packer.sources.csv_checks import check_classes, check_faults, check_lists, check_names, check_pictures
from packer.sources.csv_columns import BoxFormat, Columns, Coords, Ref, Wanted, find_roles
from packer.sources.csv_files import find_tables, open_table, sniff_tables
from packer.sources.csv_groups import Groups, Said, TableRows, group_rows
from packer.sources.csv_paths import PictureIndex, plain_folder
from packer.sources.csv_rows import NO_LABEL, NO_SPLIT, SPLITS, Vocabulary, read_rows
from packer.sources.csv_why import why_not_tables
from packer.sources.splits import EXPECTED, split_of
from packer.sources.table import Table
from packer.sources.tree import File, Tree, report_unsupported, walk

STAMP_BYTES = 16


class CsvOptions(BaseModel):
    """``[source]`` of kind "csv". What is not given is recognised by column names, and said.

    `file`: the table, or one for each split. `header`: the first row holds names. `image_dir`: folder of the pictures. `coords`:
    pixels, or fractions of width and height. `box_format`: what four numbers mean. `class_name`: of all rows, where no column says it.
    `extra`: columns kept as text.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    file: StrictStr | dict[str, StrictStr] | None = None
    header: StrictBool | None = None
    delimiter: StrictStr | None = Field(None, min_length=1, max_length=1)
    encoding: StrictStr | None = None
    image_dir: StrictStr | None = None
    columns: Columns = Columns()
    coords: Coords | None = None
    box_format: BoxFormat | None = None
    class_name: StrictStr | None = Field(None, min_length=1)
    extra: tuple[Ref, ...] = ()

    @field_validator("file")
    @classmethod
    def _splits(cls, value: str | dict[str, str] | None) -> str | dict[str, str] | None:
        if isinstance(value, dict):
            names = [split_of(split) for split in value]
            if not names or None in names or len(set(names)) != len(names):
                raise ValueError(f"splits are {', '.join(value) or 'none'}; expected each of {EXPECTED} at most once")
        return value

    @field_validator("image_dir")
    @classmethod
    def _below_root(cls, value: str | None) -> str | None:
        if value is not None and plain_folder(value) is None:
            raise ValueError(f"{value!r} leads outside the data set's folder")
        return value

    @model_validator(mode="after")
    def _one_split(self) -> CsvOptions:
        if isinstance(self.file, dict) and self.columns.split not in (None, False):
            raise ValueError("file gives a table for each split, so columns.split has nothing to say; leave one of the two out")
        return self


def sniff(root: Path) -> str | None:
    """Why a folder looks like a CSV data set, in words, or None. Reads the first lines of the tables at its top or one folder below."""
    return sniff_tables(root)


def why_not(root: Path) -> list[tuple[str, str]]:
    """The tables that `sniff` looks at and does not recognise, sorted, as (path below the root, reason), and workbooks at the top.

    A table of only names and splits is passed over. Reads first lines only; never raises: what cannot be read has that for a reason.
    """
    return why_not_tables(root)


class CsvSource:
    """CSV tables, see the module. `classes` fixes the ids; a picture with another class is left out."""

    kind = "csv"
    Options = CsvOptions

    def __init__(self, root: Path, options: CsvOptions, classes: Sequence[str] | None = None) -> None:
        self.root = root
        self.options: dict[str, Any] = options.model_dump(mode="json", exclude_defaults=True)
        self.classes = classes
        self._options = options
        self._groups: Groups | None = None
        self._tables: tuple[_Known, ...] = ()
        self._names: tuple[str, ...] = ()
        self._extra: dict[str, tuple[str, ...]] = {}

    def list(self, report: Report) -> Listing:
        """Raises PackError: no table, a missing column, no row, or a table that cannot be read."""
        tree = walk(self.root, report)
        said = Said([f.path for f in tree.pictures])
        vocabulary, notes = Vocabulary(), _Notes()
        tables = self._read(tree, vocabulary, said, notes)
        used = {t.path for t in tables}
        report_unsupported([f for f in tree.others if f.path not in used], report)
        names = tuple(vocabulary.labels)
        groups = group_rows(tables, names, said)
        for table in tables:
            check_faults(table, said)
        check_pictures(tree, tables, groups, said)
        classes = check_classes(self.classes, names, groups, tables, said)
        task: Task = "detection" if tables[0].roles.boxes else "classification"
        if task == "classification":
            check_lists(names, groups, tables, said)
        for finding in said.sorted():
            report(finding)
        self._groups, self._names = groups, names
        self._tables = tuple(_Known(t.path, t.roles.normalized) for t in tables)
        self._extra = {name: tuple(values) for name, values in vocabulary.extra.items()}
        return Listing(
            [self._item(i, file, task, bool(said.refused[i])) for i, file in enumerate(tree.pictures)],
            task,
            classes,
            notes.has_splits,
            num_files=tree.num_files,
            num_ignored=tree.num_ignored,
            num_used=len(used),
            digest=notes.digest.hexdigest(),
            tables={f.path: (f.num_bytes, f.mtime_ns) for f in tree.others if f.path in used},
            notes=notes.lines,
        )

    def annotate(self, item: Item, report: Report) -> Annotation | None:  # noqa: ARG002  all rows were judged while listing
        g = self._groups
        if g is None:
            raise RuntimeError("annotate() needs list() first")
        i = item.ref
        if item.refused or g.table[i] < 0:
            return None
        table = self._tables[g.table[i]]
        extra = {name: self._extra[name][values[i]] for name, values in g.extra.items() if values[i] >= 0} if g.extra else None
        if item.label is not None:
            return Annotation(table.path, label=item.label, extra=extra)
        rows = slice(g.box_offsets[i], g.box_offsets[i + 1])
        difficult, truncated, occluded = g.flags[rows].T.copy()
        lines = g.lines[rows].tolist()
        return Annotation(
            table.path,
            boxes=g.boxes[rows].copy(),
            labels=[self._names[label] for label in g.labels[rows].tolist()],
            difficult=difficult,
            truncated=truncated,
            occluded=occluded,
            size=(int(g.size[i, 0]), int(g.size[i, 1])) if g.size[i].all() else None,
            normalized=table.normalized,
            places=[f"line {line}" for line in lines],
            lines=lines,
            extra=extra,
        )

    def _read(self, tree: Tree, vocabulary: Vocabulary, said: Said, notes: _Notes) -> Sequence[TableRows]:
        """Read every table; rows without picture are reported."""
        o, tables, index = self._options, [], PictureIndex(said.pictures)
        wanted = Wanted(o.columns, o.header, o.coords, o.box_format, o.class_name, o.extra)
        image_dir = None if o.image_dir is None else plain_folder(o.image_dir)
        if image_dir and not any(f.path.startswith(image_dir + "/") for f in tree.pictures):
            raise PackError(f"[source] image_dir is {o.image_dir!r}: no picture lies below it")
        for name, split in find_tables(self.root, [f.path for f in tree.others], o.file, wanted, o.encoding, o.delimiter):
            table, first = open_table(self.root / name, name, wanted, o.encoding, o.delimiter)
            roles = find_roles(name, table, first, wanted if split is None else _without_split(wanted))
            rows = read_rows(table, roles, o.class_name, split, vocabulary)
            if not rows.name and not rows.faults:
                raise PackError(f"0 rows in {name}" + (f", only its header: {table.first_line}" if table.header else "; the file is empty"))
            found = index.resolve(tuple(rows.names), name, image_dir)
            tables.append(TableRows(name, roles, rows, found.pictures))
            check_names(tables[-1], index, found.hint, said)
            notes.add(table, tables[-1], split, [*roles.notes, *found.notes])
        if len({bool(t.roles.boxes) for t in tables}) > 1:
            raise PackError(f"{', '.join(t.path for t in tables)}: some hold boxes, some only labels; a data set is of one kind")
        return tables

    def _item(self, i: int, file: File, task: Task, refused: bool) -> Item:
        g = self._groups
        assert g is not None
        split = None if g.split[i] == NO_SPLIT else SPLITS[g.split[i]]
        label = None if task == "detection" or g.label[i] == NO_LABEL else self._names[g.label[i]]
        return Item(file.path, split, file.num_bytes, file.mtime_ns, label, i, self._stamp(g, i, split, label), refused or file.refused)

    def _stamp(self, g: Groups, i: int, split: str | None, label: str | None) -> bytes:
        """Digest of all that the rows say about a picture."""
        h = hashlib.blake2b(repr((split, label)).encode(), digest_size=STAMP_BYTES)
        begin, end = g.box_offsets[i : i + 2].tolist()
        if label is None:
            h.update(g.size[i].tobytes() + g.boxes[begin:end].tobytes() + g.flags[begin:end].tobytes())
            h.update(repr([self._names[n] for n in g.labels[begin:end].tolist()]).encode())
        for name, values in g.extra.items():
            h.update(repr((name, self._extra[name][values[i]] if values[i] >= 0 else None)).encode())
        return h.digest()


def _without_split(wanted: Wanted) -> Wanted:
    """The file gives the split, so no column does."""
    return replace(wanted, columns=wanted.columns.model_copy(update={"split": False}))


@dataclass(frozen=True, slots=True)
class _Known:
    """What `annotate` needs of a table."""

    path: str
    normalized: bool


class _Notes:
    """What the tables are, gathered while they are read."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.digest = hashlib.sha256()
        self.has_splits = False

    def add(self, table: Table, read: TableRows, split: str | None, more: Sequence[str]) -> None:
        roles = read.roles
        what = ("normalized " if roles.normalized else "") + f"boxes ({roles.box_format})" if roles.boxes else "labels"
        self.lines += [f"{what} from {read.path}" + (f" for split {split}" if split else ""), *more]
        self.digest.update(f"{read.path}\0{table.digest}\n".encode())
        self.has_splits |= split is not None or roles.split is not None
