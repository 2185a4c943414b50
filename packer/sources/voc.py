"""Pascal VOC: one XML file per picture, boxes in ``<object>``.

Folders ``images`` (or ``JPEGImages``) and ``annotations``, or others; see `voc_layout` for how they are found, `voc_splits` and
`voc_folders` for splits.
"""

from __future__ import annotations

import builtins
import hashlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict

from packer.sample import Annotation, Finding, Item, Level, Listing, Report
from packer.sources.tree import File, Tree, change_of, no_pictures, report_unsupported, suffix_of, walk
from packer.sources.voc_annotation import annotation_of, base_name
from packer.sources.voc_folders import check_dropped, find_split_folders, split_layouts, splits_of, splits_within
from packer.sources.voc_layout import Layout, Pairs, below, find_layout, nfc, pair
from packer.sources.voc_lost import check_lost_splits
from packer.sources.voc_splits import Names, Splits, has_split_file, read_splits
from packer.sources.voc_xml import MAX_XML_BYTES, XmlFault, decode_xml, parse_voc, text_codec

_CHANGED = "source-changed"


def _path_below(value: str) -> str:
    path = PurePosixPath(value)
    if not value or path.is_absolute() or ".." in path.parts or "\\" in value or "\0" in value:
        raise ValueError(f"{value!r} is no path below the root, such as 'images' or 'data/images'")
    return str(path)


def _known_encoding(value: str) -> str:
    text_codec(value)
    return value


class VocOptions(BaseModel):
    """``[source]`` of kind "voc".

    `images`, `annotations`: folders below the root ("." is the root). `origin`: 0, the numbers are half-open pixels counted from 0; 1, the
    devkit's convention, counted from 1 and inclusive. `split_file`: a CSV with the columns image_id and split. `encoding`: of XML
    files that do not declare their own.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    images: Annotated[str, AfterValidator(_path_below)] | None = None
    annotations: Annotated[str, AfterValidator(_path_below)] | None = None
    origin: Literal[0, 1] = 0
    split_file: Annotated[str, AfterValidator(_path_below)] | None = None
    encoding: Annotated[str, AfterValidator(_known_encoding)] | None = None


class VocSource:
    """Pascal VOC, see the module. `classes` fixes the ids; without it only a scan of all annotations tells them."""

    kind = "voc"
    Options = VocOptions

    def __init__(self, root: Path, options: VocOptions, classes: Sequence[str] | None = None) -> None:
        self.root = root
        self.options: dict[str, Any] = options.model_dump(mode="json", exclude_defaults=True)
        self.classes = classes
        self._options = options

    def list(self, report: Report) -> Listing:
        tree = walk(self.root, report)
        if not tree.pictures:
            report(no_pictures(tree))
        xml = [f for f in tree.others if suffix_of(f.path) == ".xml"]
        layouts, splits = self._layouts(tree, xml, report)
        if not splits.name and not splits.files:
            check_lost_splits(tree.others, report)
        pairs, orphans = Pairs(), set[str]()
        for layout in layouts:
            found = pair(tree.pictures, xml, layout, self._filename, report)
            pairs.add(found)
            orphans.update(f.path for f in found.orphans.values())
            _report_missing(found, splits, layout, report)
        used = _report_unused(tree, orphans, splits, layouts, report)
        images = [x.images for x in layouts]
        items = [_item(f, pairs, splits, report) for f in tree.pictures if _inside(f, images)]
        notes = [layouts[0].found] if layouts[0].found else []
        notes.append(f"splits: from {splits.name}" if splits.name else "splits: the source has none")
        return Listing(
            items,
            "detection",
            None if self.classes is None else [*self.classes],
            bool(splits.name),
            num_files=tree.num_files,
            num_ignored=tree.num_ignored,
            num_used=used,
            digest=self._digest(splits.files),
            tables={f.path: (f.num_bytes, f.mtime_ns) for f in tree.others if f.path in splits.files},
            notes=notes,
        )

    def _layouts(self, tree: Tree, xml: builtins.list[File], report: Report) -> tuple[builtins.list[Layout], Splits]:
        """One layout, or one for each split folder, and the splits."""
        options = self._options
        free = options.images is None and options.annotations is None
        folders = find_split_folders(tree, xml) if free and options.split_file is None else {}
        if folders and not has_split_file(["", next(iter(folders)).rpartition("/")[0]], tree.others):
            return split_layouts(tree, xml, folders, report), splits_of(tree, folders)
        layout = find_layout(tree, xml, options.images, options.annotations)
        if free:
            check_dropped(tree, layout, report)
        names = Names(tree.pictures, layout)
        splits = read_splits(self.root, names, layout, tree.others, options.split_file, options.encoding, report)
        return [layout], splits if splits.name or splits.files else splits_within(tree, layout, report)

    def annotate(self, item: Item, report: Report) -> Annotation | None:
        if item.ref is None:
            report(Finding("skip", "missing-annotation", item.path, "has no annotation", sample=item.path))
            return None
        try:
            document = parse_voc(decode_xml(self._read(item.ref), self._options.encoding))
        except XmlFault as e:
            level: Level = "error" if e.code == _CHANGED else "skip"
            report(Finding(level, e.code, item.ref.path, str(e), sample=item.path, line=e.line))
            return None
        return annotation_of(document, item.ref.path, item.path, self._options.origin, report)

    def _read(self, file: File) -> bytes:
        """The XML that was listed, and no other: class ids and splits may have been made from an earlier reading."""
        try:
            # There are as many of these as pictures: Path.open takes longer, and so does a buffer.
            with open(os.path.join(self.root, file.path), "rb", buffering=0) as f:
                before = os.fstat(f.fileno())
                change = change_of(file, before)
                if change is None and before.st_size > MAX_XML_BYTES:
                    raise XmlFault("file-too-large", f"is over {MAX_XML_BYTES >> 20} MiB, an annotation has some kB")
                data = b"" if change else f.readall()
                change = change or change_of(file, os.fstat(f.fileno()))
        except OSError as e:
            raise XmlFault("unreadable", f"cannot be read: {e.strerror}") from None
        if change is not None:
            raise XmlFault(_CHANGED, change)
        return data

    def _filename(self, file: File) -> str | None:
        """The base name in ``<filename>``; None where there is none (what is wrong with the file is said when it is annotated)."""
        try:
            name = parse_voc(decode_xml(self._read(file), self._options.encoding)).filename
        except XmlFault:
            return None
        return base_name(name) if name else None

    def _digest(self, files: Iterable[str]) -> str:
        h = hashlib.sha256()
        for path in sorted(files):
            h.update(path.encode() + b"\0" + hashlib.sha256((self.root / path).read_bytes()).digest())
        return h.hexdigest()


def _item(file: File, pairs: Pairs, splits: Splits, report: Report) -> Item:
    xml = pairs.xml.get(file.path)
    split = splits.of.get(file.path)
    refused = file.refused or file.path in pairs.refused
    if splits.name and split is None:
        refused = True
        if file.path not in splits.faulty:
            why = "does not list it" if splits.files else "do not hold it"
            report(Finding("skip", "no-split", file.path, f"is in no split: {splits.name} {why}", sample=file.path))
    stamp = b""
    if xml is not None:
        stamp = hashlib.blake2b(repr((xml.path, xml.num_bytes, xml.mtime_ns)).encode(), digest_size=16).digest()
    return Item(file.path, split, file.num_bytes, file.mtime_ns, ref=xml, stamp=stamp, refused=refused)


def _report_missing(pairs: Pairs, splits: Splits, layout: Layout, report: Report) -> None:
    """One finding for each id without picture, be it that of an XML, of a split row or of both."""
    rows = {nfc(name): row for name, row in splits.missing.items()}
    for name, file in pairs.orphans.items():
        row = rows.pop(nfc(name), None)
        listed = f"; {row.file}, line {row.line} lists it" if row else ""
        message = f"{name!r} has an annotation and no picture: looked for {_place(layout.images, name)} with a picture's suffix{listed}"
        report(Finding("skip", "missing-image", file.path, message, sample=name))
    for row in rows.values():
        what = (
            f"{row.id!r} has no picture: looked for {_place(layout.images, row.id)} with a picture's suffix"
            if row.id
            else "has no image_id"
        )
        report(Finding("skip", "missing-image", row.file, f"line {row.line}: {what}", sample=row.id, line=row.line))


def _report_unused(tree: Tree, orphans: set[str], splits: Splits, layouts: list[Layout], report: Report) -> int:
    """Name every file that plays no part; returns how many, besides the pictures, do."""
    images, annotations = [x.images for x in layouts], [x.annotations for x in layouts]
    lists = tuple(f"{x.base}/imagesets/".lower() if x.base else "imagesets/" for x in layouts)
    used, rest = 0, []
    for file in tree.others:
        suffix = suffix_of(file.path)
        in_lists = suffix == ".txt" and file.path.lower().startswith(lists)
        if file.path in splits.files or in_lists:
            used += 1
        elif suffix != ".xml":
            rest.append(file)
        elif not _inside(file, annotations):
            _report_outside(file, "annotations", annotations, report)
        elif file.path not in orphans:
            used += 1
    for file in tree.pictures:
        if not file.refused and not _inside(file, images):
            _report_outside(file, "pictures", images, report)
    report_unsupported(rest, report)
    return used


def _inside(file: File, folders: list[str]) -> bool:
    return any(below(file.path, folder) is not None for folder in folders)


def _report_outside(file: File, what: str, folders: list[str], report: Report) -> None:
    folder = ", ".join(f"{f}/" for f in folders)
    report(Finding("warning", "unused-file", file.path, f"not packed: {what} are taken from {folder} only", sample=file.path))


def _place(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name
