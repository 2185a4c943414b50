"""Which column of a CSV table means what: declared by options, else recognised by its name, never by its values.

The one exception is RetinaNet's shape (path,x1,y1,x2,y2,class), which has no header by definition.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr

from packer.sample import PackError
from packer.sources.csv_unused import why_a_box
from packer.sources.table import Row, Table
from packer.sources.tree import is_picture

Coords = Literal["pixel", "normalized"]
BoxFormat = Literal["xyxy", "xywh", "cxcywh"]
Ref = StrictStr | Annotated[StrictInt, Field(ge=0)]

# Best first: a table may hold both an id and a file name, and the file name is what finds the picture.
PATH_NAMES = (
    *("filename", "file_name", "image_path", "img_path", "filepath", "file_path", "path", "image_name", "img_name"),
    *("file", "image", "img", "image_id", "imageid", "id"),
)
LABEL_NAMES = ("label", "class", "category", "target", "class_name", "label_name", "labelname", "category_name", "classname", "cell_type")
SPLIT_NAMES = ("split", "dataset", "subset", "set", "partition", "phase", "usage")
CORNER_NAMES = {
    "x1": ("x1", "xmin", "x_min"),
    "y1": ("y1", "ymin", "y_min"),
    "x2": ("x2", "xmax", "x_max"),
    "y2": ("y2", "ymax", "y_max"),
}
SIZE_NAMES = {"x": ("x",), "y": ("y",), "w": ("w",), "h": ("h",)}
FLAG_NAMES = {
    "difficult": ("difficult", "isdifficult", "is_difficult"),
    "truncated": ("truncated", "istruncated", "is_truncated"),
    "occluded": ("occluded", "isoccluded", "is_occluded"),
}
_OPEN_IMAGES = frozenset({"imageid", "labelname", "xmin", "xmax", "ymin", "ymax"})
_KAGGLE_WHEAT = frozenset({"image_id", "width", "height", "bbox", "source"})


class Columns(BaseModel):
    """``[source] columns``: the column of each role, a name or a 0-based number. `split = false` leaves a split column alone."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    path: Ref | None = None
    label: Ref | None = None
    x1: Ref | None = None
    y1: Ref | None = None
    x2: Ref | None = None
    y2: Ref | None = None
    x: Ref | None = None
    y: Ref | None = None
    w: Ref | None = None
    h: Ref | None = None
    bbox: Ref | None = None
    split: Ref | Literal[False] | None = None


@dataclass(slots=True)
class Roles:
    """What the columns of one table are, as 0-based numbers.

    `boxes`: four columns in the order of `box_format`, one column that holds all four numbers, or () for a table of labels.
    `size`: the columns of the PICTURE's width and height. `flags`: name -> column. `extra`: name -> column, as asked for.
    """

    path: int
    label: int | None
    boxes: tuple[int, ...]
    box_format: BoxFormat
    normalized: bool
    split: int | None
    num_columns: int
    size: tuple[int, int] | None = None
    flags: dict[str, int] = field(default_factory=dict)
    extra: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Wanted:
    """What the options say about columns."""

    columns: Columns = field(default_factory=Columns)
    header: bool | None = None
    coords: Coords | None = None
    box_format: BoxFormat | None = None
    class_name: str | None = None
    extra: tuple[str | int, ...] = ()


def is_retinanet(cells: list[str]) -> bool:
    """The row has the shape path,x1,y1,x2,y2,class of a RetinaNet table (or path,,,,, for a picture without objects)."""
    if len(cells) != 6 or not is_picture(cells[0].replace("\\", "/")):
        return False
    if not any(cells[1:]):
        return True
    return bool(cells[5]) and not _is_number(cells[5]) and all(_is_number(c) for c in cells[1:5])


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def looks_like(table: Table, first: Row | None, wanted: Wanted) -> str | None:
    """Which columns make a table one of labels or boxes, in words; None when it is another kind of table."""
    d, header = wanted.columns, table.header
    if not header:
        declared = isinstance(d.path, int)
        return "columns by number" if declared else "RetinaNet's columns" if first is not None and is_retinanet(first[1]) else None
    if isinstance(d.path, int):
        return "columns by number"

    def known(ref: str | int | None, names: tuple[str, ...]) -> str | None:
        if ref is not None:
            return str(ref) if str(ref).strip().lower() in header or isinstance(ref, int) else None
        return next((n for n in names if n in header), None)

    path, label = known(d.path, PATH_NAMES), known(d.label, LABEL_NAMES)
    sets = [[known(getattr(d, k), names) for k, names in group.items()] for group in (CORNER_NAMES, SIZE_NAMES, {"bbox": ("bbox",)})]
    box = next((found for found in sets if None not in found), [])
    what = [label or wanted.class_name, *box]
    if path is None or not any(what):
        return None
    return "columns " + ", ".join([path, *(w for w in what if w)])


def find_roles(name: str, table: Table, first: Row | None, wanted: Wanted) -> Roles:
    """Say what each column is.

    Args:
        name: The table's path, for messages.
        table: The opened table; `table.header` is [] where it has none.
        first: Its first row, where it has no header.
        wanted: What the options declare; the rest is recognised by name.

    Raises:
        PackError: a column that is needed is missing, stands there twice, or the declarations contradict each other.
    """
    return _Finder(name, table, first, wanted).roles()


class _Finder:
    """Holds what every step of `find_roles` needs."""

    def __init__(self, name: str, table: Table, first: Row | None, wanted: Wanted) -> None:
        self.name, self.table, self.wanted = name, table, wanted
        self.declared = wanted.columns
        self.num_columns = len(table.header) or len(first[1] if first else [])
        self.shape = not table.header and first is not None and is_retinanet(first[1]) and self.declared == Columns()
        self.notes: list[str] = []

    def roles(self) -> Roles:
        if self.shape:
            self.declared = Columns(path=0, x1=1, y1=2, x2=3, y2=4, label=5)
            self.notes.append(f"{self.name} has no header and RetinaNet's columns: path,x1,y1,x2,y2,class")
        elif not self.table.header and self.declared.path is None:
            raise self.missing("path", "the file has no header, so columns are given by number: columns = {path = 0, label = 1}")
        boxes, box_format = self.boxes()
        path = self.find("path", self.declared.path, PATH_NAMES)
        label = self.label()
        if path is None:
            raise self.missing("path", f"expected one of {', '.join(PATH_NAMES)}, or columns = {{path = ...}}")
        if label is None and self.wanted.class_name is None:
            known = f"expected one of {', '.join(LABEL_NAMES)}, or columns = {{label = ...}}, or class_name where all are of one class"
            raise self.missing("label", known)
        split = None if self.declared.split is False else self.find("split", self.declared.split, SPLIT_NAMES)
        if split is not None and self.declared.split is None:
            self.notes.append(f"{self.name}: column {self.table.header[split]!r} gives the splits")
        flags = {k: c for k, names in FLAG_NAMES.items() if boxes and (c := self.find(k, None, names)) is not None}
        extra = {str(ref): self.column("extra", ref) for ref in self.wanted.extra}
        roles = Roles(
            path=path,
            label=label,
            boxes=boxes,
            box_format=box_format,
            normalized=self.normalized(boxes),
            split=split,
            num_columns=self.num_columns,
            size=self.size(boxes),
            flags=flags,
            extra=extra,
            notes=self.notes,
        )
        self.check_unused(roles)
        return roles

    def check_unused(self, roles: Roles) -> None:
        """Name the columns that nothing takes; refuse labels beside what looks like a box. Columns of `extra` are kept, so not unused."""
        taken = {roles.path, roles.label, roles.split, *roles.boxes, *(roles.size or ()), *roles.flags.values(), *roles.extra.values()}
        names = self.table.header or [str(c) for c in range(self.num_columns)]
        said = LABEL_NAMES if self.wanted.class_name is not None else ()  # by `label`
        unused = [name for c, name in enumerate(names) if c not in taken and name and name not in said]
        if not roles.boxes and (reason := why_a_box(unused, self.table.first_line)) is not None:
            raise PackError(f"{self.name}: {reason}")
        if unused:
            self.notes.append(f"{self.name}: columns not used: {', '.join(unused)}" + ("" if self.table.header else " (counted from 0)"))

    def missing(self, role: str, expected: str) -> PackError:
        line = f"its first line is {self.table.first_line!r}" if self.table.first_line else "the file is empty"
        hint = (
            "; without a header line, say header = false and give columns by number, columns = {path = 0, ...}" if self.table.header else ""
        )
        return PackError(f"{self.name}: no column for {role}: {line}; {expected}{hint}")

    def column(self, role: str, ref: str | int) -> int:
        """The number of a declared column."""
        if isinstance(ref, int):
            if ref >= self.num_columns:
                raise self.missing(role, f"column {ref} was declared (counted from 0), there are {self.num_columns}")
            return ref
        wanted = ref.strip().lower()
        if self.table.header.count(wanted) > 1:
            raise PackError(
                f"{self.name}: column {ref!r} ({role}) stands there twice in {self.table.first_line!r}; give its number (from 0)"
            )
        if wanted not in self.table.header:
            raise self.missing(
                role, f"column {ref!r} was declared for it" + ("" if self.table.header else "; without a header, give its number (from 0)")
            )
        return self.table.header.index(wanted)

    def find(self, role: str, ref: str | int | None, names: tuple[str, ...]) -> int | None:
        """A declared column, else the first of `names` that the header has."""
        if ref is not None:
            return self.column(role, ref)
        known = next((n for n in names if n in self.table.header), None)
        return None if known is None else self.column(role, known)

    def label(self) -> int | None:
        found = [n for n in LABEL_NAMES if n in self.table.header]
        if self.wanted.class_name is not None:
            if self.wanted.columns.label is not None:
                raise PackError(
                    f"{self.name}: class_name is for tables without a class column, but columns.label names one; give one of the two"
                )
            if found or self.shape:
                which = repr(found[0]) if found else "5"
                self.notes.append(f"{self.name}: column {which} is not used: class_name says that all are {self.wanted.class_name!r}")
            return None
        if self.declared.label is None and len(found) > 1:
            raise PackError(f'{self.name}: columns {", ".join(found)} may all be the class; say which: columns = {{label = "{found[0]}"}}')
        return self.find("label", self.declared.label, LABEL_NAMES)

    def boxes(self) -> tuple[tuple[int, ...], BoxFormat]:
        """The box columns and how to read them."""
        d = self.declared
        corners = {k: self.find(k, getattr(d, k), names) for k, names in CORNER_NAMES.items()}
        sizes = {k: self.find(k, getattr(d, k), names) for k, names in SIZE_NAMES.items()}
        bbox = self.find("bbox", d.bbox, ("bbox",))
        by_corners = any(getattr(d, k) is not None for k in CORNER_NAMES)
        by_sizes = any(getattr(d, k) is not None for k in SIZE_NAMES)
        if by_corners + by_sizes + (d.bbox is not None) > 1:
            raise PackError(f"{self.name}: columns declare more than one of x1,y1,x2,y2 / x,y,w,h / bbox; a box is given once")
        declared = by_corners or by_sizes or d.bbox is not None
        if by_corners or (not declared and any(c is not None for c in corners.values())):
            return self.all_of(corners), self.format_of_corners()
        if bbox is not None and not by_sizes:
            return (bbox,), self.format_of_bbox()
        if by_sizes or None not in sizes.values():
            return self.all_of(sizes), self.format_of_sizes(by_sizes)
        return (), "xyxy"

    def all_of(self, found: dict[str, int | None]) -> tuple[int, ...]:
        for role, column in found.items():
            if column is None:
                names = {**CORNER_NAMES, **SIZE_NAMES}[role]
                raise self.missing(role, f"a box needs {', '.join(found)}; expected {' or '.join(names)}, or columns = {{{role} = ...}}")
        return tuple(c for c in found.values() if c is not None)

    def format_of_corners(self) -> BoxFormat:
        if self.wanted.box_format not in (None, "xyxy"):
            raise PackError(
                f"{self.name}: box_format is {self.wanted.box_format!r}, but x1, y1, x2, y2 are corners (xyxy); "
                "declare columns = {x = ..., y = ..., w = ..., h = ...} for the other formats"
            )
        return "xyxy"

    def format_of_sizes(self, declared: bool) -> BoxFormat:
        if self.wanted.box_format == "xyxy":
            raise PackError(f'{self.name}: box_format is \'xyxy\', but w and h hold a size; say box_format = "xywh" or "cxcywh"')
        if self.wanted.box_format is None and not declared:
            raise PackError(f'{self.name}: do columns x, y hold a corner or a centre? Say box_format = "xywh" or "cxcywh"')
        return self.wanted.box_format or "xywh"

    def format_of_bbox(self) -> BoxFormat:
        if self.wanted.box_format is not None:
            return self.wanted.box_format
        if set(self.table.header) != _KAGGLE_WHEAT:
            raise PackError(f'{self.name}: what do the four numbers of column bbox mean? Say box_format = "xyxy", "xywh" or "cxcywh"')
        self.notes.append(f"{self.name}: this header (image_id,width,height,bbox,source) is Kaggle's, its bbox is x, y, w, h")
        return "xywh"

    def normalized(self, boxes: tuple[int, ...]) -> bool:
        if self.wanted.coords is not None or not boxes:
            return self.wanted.coords == "normalized"
        if set(self.table.header) >= _OPEN_IMAGES:
            self.notes.append(f"{self.name}: this header is Open Images', its corners are fractions of width and height (coords)")
            return True
        return False

    def size(self, boxes: tuple[int, ...]) -> tuple[int, int] | None:
        header = self.table.header
        if not boxes or header.count("width") != 1 or header.count("height") != 1:
            return None
        width, height = header.index("width"), header.index("height")
        return None if width in boxes or height in boxes else (width, height)
