"""Class folders: ``crack/w1.jpg``, optionally below split folders: ``train/crack/w1.jpg``.

The first folder is the class; pictures may lie deeper in it. Pictures without any class folder are packed unlabelled.
"""

from __future__ import annotations

import builtins
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from packer.sample import Annotation, Finding, Item, Listing, Report
from packer.sources.class_names import long_name
from packer.sources.folder_checks import check_case, check_layout, check_nested, check_single, check_train
from packer.sources.splits import split_of
from packer.sources.tree import File, Tree, no_pictures, report_unsupported, walk


class FolderOptions(BaseModel):
    """``[source]`` of kind "folder" has no keys of its own."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


@dataclass(frozen=True, slots=True)
class _Layout:
    """`split_folders`: top folders that are splits; `class_folders`: folders that are classes, below the root, -> class name."""

    split_folders: Mapping[str, str]
    class_folders: Mapping[str, str]

    @property
    def depth(self) -> int:
        return 1 if self.split_folders else 0


class FolderSource:
    """Class folders, see the module. `classes` fixes the ids; a folder named in it is a class folder, even if its name is a split's."""

    kind = "folder"
    Options = FolderOptions

    def __init__(self, root: Path, options: FolderOptions, classes: Sequence[str] | None = None) -> None:
        self.root = root
        self.options: dict[str, Any] = options.model_dump(mode="json", exclude_defaults=True)
        self.classes = classes

    def list(self, report: Report) -> Listing:
        tree = walk(self.root, report)
        report_unsupported(tree.others, report)
        if not tree.pictures:
            report(no_pictures(tree))
        layout = self._layout(tree, report)
        check_layout(tree, set(layout.class_folders.values()), self.classes, report)
        if layout.class_folders:
            classes = self._classes(tree, layout, report)
            items = [self._classified(f, layout, set(classes), report) for f in tree.pictures]
            check_train(((_head(i.path, layout.depth + 1), i.split, i.label) for i in items if i.label and not i.refused), report)
            notes = [] if layout.split_folders else ["labels: from the class folders"]
        else:
            classes = []
            if self.classes and tree.pictures:
                message = (
                    "[source] classes is given, and no class folder lies below the root: make a folder per class, or leave classes out"
                )
                report(Finding("error", "no-class-folders", ".", message))
            items = [self._unlabelled(f, layout, report) for f in tree.pictures]
            notes = ["no class folders: packed without labels"]
        if layout.split_folders:
            notes.append("splits: from the folders " + ", ".join(f"{name} ({split})" for name, split in layout.split_folders.items()))
        for folder in layout.split_folders:
            if not any(f.path.startswith(folder + "/") for f in tree.pictures):
                report(Finding("warning", "empty-split", folder, "split folder is empty: it holds no picture"))
        return Listing(
            items,
            "classification" if layout.class_folders else "unlabelled",
            classes,
            bool(layout.split_folders),
            num_files=tree.num_files,
            num_ignored=tree.num_ignored,
            digest=hashlib.sha256().hexdigest(),
            notes=notes,
        )

    def annotate(self, item: Item, report: Report) -> Annotation | None:  # noqa: ARG002  the folder's name can have no fault
        return Annotation(item.path, label=item.label)

    def _layout(self, tree: Tree, report: Report) -> _Layout:
        top = [f for f in tree.folders if "/" not in f]
        named = {f: split for f in top if (split := split_of(f)) and f not in (self.classes or ())}
        rest = [f for f in top if f not in named]
        if named and rest:
            report(
                Finding(
                    "error",
                    "mixed-folders",
                    next(iter(named)),
                    f"split folders ({', '.join(named)}) and other folders ({', '.join(rest[:5])}{', ...' if len(rest) > 5 else ''}) lie "
                    "side by side: put the class folders into the split folders, or, if these are class names, list all of them in "
                    "[source] classes",
                )
            )
            named = {}
        if named:
            classes = {f: f.partition("/")[2] for f in tree.folders if f.count("/") == 1 and f.partition("/")[0] in named}
        else:
            classes = {f: f for f in top}
        used = {_head(f.path, 2 if named else 1) for f in tree.pictures}
        if tree.pictures and used.isdisjoint(classes):
            for folder in classes:
                report(Finding("warning", "empty-folder", folder, "holds no picture; no folder does, so none is taken as a class"))
            classes = {}
        return _Layout(named, classes)

    def _classes(self, tree: Tree, layout: _Layout, report: Report) -> builtins.list[str]:
        """Names in id order, with warnings about empty ones and about names that differ by case only."""
        used = {_head(f.path, layout.depth + 1) for f in tree.pictures}
        for folder, name in layout.class_folders.items():
            if folder not in used:
                report(Finding("warning", "empty-class", folder, f"class folder is empty: 0 images for class {name!r}"))
        names = sorted(set(layout.class_folders.values()))
        inner = {f.rpartition("/")[0] for f in tree.folders}
        if self.classes is None and len(names) == 1 and used == set(layout.class_folders) <= inner:
            check_single(tree, next(iter(layout.class_folders)), report)
        else:
            check_nested(tree, layout.class_folders, layout.depth, report)
        check_case(layout.class_folders, report)
        return names if self.classes is None else [*self.classes]

    def _classified(self, file: File, layout: _Layout, classes: set[str], report: Report) -> Item:
        parts = file.path.split("/", layout.depth + 1)
        split = layout.split_folders.get(parts[0]) if layout.split_folders else None
        label = parts[layout.depth] if len(parts) > layout.depth + 1 else None
        refused = file.refused
        if layout.split_folders and split is None:
            refused = _refuse(file, "no-split", "lies beside the split folders, so it belongs to no split: move it into one", report)
        elif label is None:
            refused = _refuse(file, "no-class", "lies beside the class folders, so it has no class: move it into one", report)
        elif label not in classes:
            refused = _refuse(file, "unknown-class", f"its class folder {label!r} is not one of [source] classes", report)
        elif (fault := long_name(label)) is not None:
            refused = _refuse(file, "bad-class-name", fault, report)
        return Item(file.path, split, file.num_bytes, file.mtime_ns, label, refused=refused)

    def _unlabelled(self, file: File, layout: _Layout, report: Report) -> Item:
        top = file.path.partition("/")[0]
        split = layout.split_folders.get(top) if layout.split_folders else None
        refused = file.refused
        if layout.split_folders and split is None:
            refused = _refuse(file, "no-split", "lies beside the split folders, so it belongs to no split: move it into one", report)
        return Item(file.path, split, file.num_bytes, file.mtime_ns, refused=refused)


def _head(path: str, num_parts: int) -> str:
    return "/".join(path.split("/", num_parts)[:num_parts])


def _refuse(file: File, code: str, message: str, report: Report) -> bool:
    report(Finding("skip", code, file.path, message, sample=file.path))
    return True
