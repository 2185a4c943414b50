"""Doubts about class folders: trees that are another layout, one level too high, or deeper than the first folder says."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping

from packer.sample import Finding, Report
from packer.sources.splits import split_of
from packer.sources.tree import Tree, case_twins, distinct

LAYOUT_NAMES = frozenset({"images", "imgs", "labels", "annotations", "jpegimages", "imagesets", "segmentationclass"})
# COCO's splits and VOC's years; a class may well end in a year ("Audi A4 Sedan 2014").
_YEAR_SPLIT = re.compile(r"(.*[_-])?(train|val|valid|test|trainval|unlabeled|minival|voc)[_-]?20\d\d", re.DOTALL)
_LAYOUT_FILE = re.compile(r"(data|dataset)\.ya?ml|instances_.*\.json|.*\.coco\.json", re.DOTALL)


def is_layout_name(name: str) -> bool:
    """Whether a folder is called like a part of YOLO, COCO or VOC, such as ``labels`` or ``train2017``."""
    return name.lower() in LAYOUT_NAMES or _YEAR_SPLIT.fullmatch(name.lower()) is not None


def check_layout(tree: Tree, names: Collection[str], classes: Collection[str] | None, report: Report) -> None:
    """An error when the class `names` are parts of another layout, or a file of one lies in the tree and `classes` are not given."""
    doubtful = sorted(n for n in names if is_layout_name(n) and n not in (classes or ()))
    files = [] if classes else [f.path for f in tree.others if _LAYOUT_FILE.fullmatch(f.path.rpartition("/")[2].lower())]
    if not doubtful and not files:
        return
    shown = ", ".join(map(repr, sorted(names)[:5])) + (", ..." if len(names) > 5 else "")
    packed = f"would pack as classes {shown}" if names else "would pack without labels"
    seen = f" ({files[0]} lies here)" if files else ""
    message = (
        f"looks like YOLO (or COCO, or VOC without XML){seen}, which kind folder {packed}: take another --source (voc, csv), pack the "
        "folder that holds the class folders or only pictures, or, if these really are class names, list all of them in "
        "[source] classes = [...]"
    )
    folder = next((f for f in tree.folders if doubtful and f.rpartition("/")[2] == doubtful[0]), ".")
    report(Finding("error", "other-layout", files[0] if files else folder, message))


def check_single(tree: Tree, folder: str, report: Report) -> None:
    """An error or a warning when the only class folder has folders of its own."""
    inner = [f for f in tree.folders if f.rpartition("/")[0] == folder]
    splits = [f for f in inner if split_of(f.rpartition("/")[2]) and any(p.path.startswith(f + "/") for p in tree.pictures)]
    if splits:
        message = f"the only folder holds split folders ({', '.join(splits)}): point pack at {folder}/, or give [source] classes = [...]"
        report(Finding("error", "wrong-root", folder, message))
    elif inner:
        message = f"the only class is {folder.rpartition('/')[2]!r}, and it has folders of its own: if those are the classes, pack that "
        report(Finding("warning", "one-class", folder, message + "folder instead"))


def check_nested(tree: Tree, class_folders: Collection[str], depth: int, report: Report) -> None:
    """One warning when all pictures of a class folder, `depth` folders deep, lie in two or more folders below it."""
    inner: dict[str, dict[str, None]] = {}
    direct: set[str] = set()
    for file in tree.pictures:
        parts = file.path.split("/")
        folder = "/".join(parts[: depth + 1])
        if folder not in class_folders:
            continue
        if len(parts) == depth + 2:
            direct.add(folder)
        else:
            inner.setdefault(folder, {})["/".join(parts[: depth + 2])] = None
    nested = [f for f, below in inner.items() if f not in direct and len(below) > 1]
    if nested:
        one, other = list(inner[nested[0]])[:2]
        name = nested[0].rpartition("/")[2]
        more = f" (the same in {len(nested) - 1} more class folders)" if len(nested) > 1 else ""
        message = (
            f"{one}/ and {other}/ are both packed as class {name!r}{more}: the first folder is the class; if the inner ones are, move "
        )
        report(Finding("warning", "nested-folders", nested[0], message + "them up"))


def check_case(class_folders: Mapping[str, str], report: Report) -> None:
    """Warnings about classes that differ by case only; twins within one folder were named by the walk."""
    for group in case_twins(sorted(set(class_folders.values()))):
        folders = [f for f, name in class_folders.items() if name in group]
        if len({f.rpartition("/")[0] for f in folders}) == len(folders):
            shown = ", ".join(f"'{name}'" for name in distinct(group))
            message = f"classes {shown} differ by upper and lower case only ({', '.join(distinct(folders))}); both are kept"
            report(Finding("warning", "case-twins", folders[-1], message))


def check_train(used: Iterable[tuple[str, str | None, str]], report: Report) -> None:
    """A warning for each class that `used`, (class folder, split, class), has in other splits and not in train, if train has any."""
    rows = sorted(set(used), key=lambda row: row[0])
    trained = {name for _, split, name in rows if split == "train"}
    missing: dict[str, list[str]] = {}
    for folder, split, name in rows:
        if split is not None and name not in trained:
            missing.setdefault(name, []).append(folder)
    for name, folders in missing.items() if trained else ():
        message = f"class {name!r} has no picture in train, and some in {', '.join(folders)}: nothing can learn it"
        report(Finding("warning", "class-not-in-train", folders[0], message))
