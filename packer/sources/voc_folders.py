"""Split folders of a Pascal VOC data set: ``train/images`` and ``train/annotations``, flat ``train``, or ``images/train``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from packer.sample import Finding, Report
from packer.sources.splits import split_of
from packer.sources.tree import File, Tree
from packer.sources.voc_layout import Layout, below, common, find_layout
from packer.sources.voc_splits import Splits

_WAY_OUT = 'rename or move them, or say which pictures are meant: [source] images = "..." and annotations = "...", or a split_file'


def find_split_folders(tree: Tree, xml: list[File]) -> dict[str, str]:
    """Folder -> split, where the first folders that differ, or one above them, all have a split's name; else nothing."""
    parents = {f.path.rpartition("/")[0] for f in (*tree.pictures, *xml)}
    if not parents - {""}:
        return {}
    parts = common(list(parents - {""})).split("/")
    depth = next((i for i, part in enumerate(parts) if split_of(part)), len(parts) if parts != [""] else 0)
    tops = sorted({"/".join(p.split("/")[: depth + 1]) for p in parents if p.count("/") >= depth and p})
    found = {top: split for top in tops if (split := split_of(top.rpartition("/")[2]))}
    return found if len(found) == len(tops) else {}


def split_layouts(tree: Tree, xml: list[File], folders: Mapping[str, str], report: Report) -> list[Layout]:
    """A layout for each split folder, all alike. A folder whose pictures lie elsewhere in it is an error.

    Raises:
        PackError: no layout fits the folders.
    """
    within = sorted({rest for f in tree.folders for d in folders if (rest := below(f, d))})
    inner = Tree(pictures=_inside(tree.pictures, folders), folders=within)
    alike = find_layout(inner, _inside(xml, folders), None, None)
    layouts = []
    for folder in folders:
        layout = Layout(_join(folder, alike.images), _join(folder, alike.annotations))
        layouts.append(layout)
        pictures = [f.path for f in tree.pictures if below(f.path, folder) is not None]
        if pictures and all(below(p, layout.images) is None for p in pictures):
            message = (
                f"none of its {len(pictures)} pictures, such as {pictures[0]}, lies in {layout.images}/, as in the other split folders"
            )
            report(Finding("error", "split-folders", folder, f"{message}: {_WAY_OUT}"))
    return layouts


def splits_within(tree: Tree, layout: Layout, report: Report) -> Splits:
    """The splits of ``images/train``, ``images/val``: the first folder below that of the pictures. Split and other folders are an error."""
    first = {f.path: _first(rest) for f in tree.pictures if (rest := below(f.path, layout.images)) is not None}
    heads = sorted({h for h in first.values() if h})
    named = {h: split for h in heads if (split := split_of(h))}
    if not named:
        return Splits()
    others = [h for h in heads if h not in named]
    if others:
        shown = f"{', '.join(others[:5])}{', ...' if len(others) > 5 else ''}"
        message = f"split folders ({', '.join(named)}) and other folders ({shown}) lie side by side, without a split file: {_WAY_OUT}"
        report(Finding("error", "split-folders", _join(layout.images, next(iter(named))), message))
    folders = {_join(layout.images, h): split for h, split in named.items()}
    return splits_of(tree, folders)


def splits_of(tree: Tree, folders: Mapping[str, str]) -> Splits:
    """The splits of the pictures below split folders."""
    of = {f.path: split for f in tree.pictures for d, split in folders.items() if below(f.path, d) is not None}
    return Splits(of, name="the folders " + ", ".join(f"{d} ({split})" for d, split in folders.items()))


def check_dropped(tree: Tree, layout: Layout, report: Report) -> None:
    """An error when a folder with a split's name holds pictures and the data set was found elsewhere."""
    dropped: dict[str, None] = {}
    for file in tree.pictures:
        if below(file.path, layout.images) is None:
            parts = file.path.split("/")[:-1]
            # masks/train beside images/train is no split left out, val/images beside train/images is one.
            top = next((i for i in range(len(parts)) if below(f"{layout.images}/", "/".join(parts[: i + 1])) is None), 0)
            if split_of(parts[top]):
                dropped["/".join(parts[: top + 1])] = None
    if dropped:
        names = ", ".join([*dropped][:5])
        message = f"split folders ({names}) hold pictures, and pictures are taken from {layout.images or '.'}/ only: {_WAY_OUT}"
        report(Finding("error", "split-folders", next(iter(dropped)), message))


def _inside(files: list[File], folders: Mapping[str, str]) -> list[File]:
    """The files below any of the folders, with their paths below it."""
    return [replace(f, path=rest) for f in files for d in folders if (rest := below(f.path, d)) is not None]


def _first(path: str) -> str:
    return path.partition("/")[0] if "/" in path else ""


def _join(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder and name else folder or name
