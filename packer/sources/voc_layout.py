"""Finds the two folders of a Pascal VOC data set and pairs pictures with annotations, by path below them without the last suffix."""

from __future__ import annotations

import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from packer.sample import Finding, PackError, Report
from packer.sources.tree import File, Tree, archive_hint

IMAGE_FOLDERS = ("images", "jpegimages")
XML_FOLDERS = ("annotations",)
_MAX_CANDIDATES = 20


@dataclass(frozen=True, slots=True)
class Layout:
    """The folders of pictures and of XML files, below the root, "" for the root itself. They are equal in a flat data set.
    `found` is a sentence where they were found by content."""

    images: str
    annotations: str
    found: str | None = None

    @property
    def base(self) -> str:
        """The innermost folder that holds both."""
        return common([self.images, self.annotations])


@dataclass(slots=True)
class Pairs:
    """`xml`: picture path -> its XML. `refused`: pictures that must be left out (reported). `orphans`: id -> XML without picture."""

    xml: dict[str, File] = field(default_factory=dict)
    refused: set[str] = field(default_factory=set)
    orphans: dict[str, File] = field(default_factory=dict)

    def add(self, other: Pairs) -> None:
        """Take in the pairs and the refused pictures of another folder. Orphans stay with it: ids hold within a folder."""
        self.xml |= other.xml
        self.refused |= other.refused


def below(path: str, folder: str) -> str | None:
    """The rest of a path below a folder ("" is the root); None when it lies elsewhere."""
    if not folder:
        return path
    return path[len(folder) + 1 :] if path.startswith(folder + "/") else None


def id_of(path: str, folder: str) -> str | None:
    """Path below `folder` without its last suffix."""
    rest = below(path, folder)
    return None if rest is None else without_suffix(rest)


def without_suffix(path: str) -> str:
    stem, dot, suffix = path.rpartition(".")
    return stem if dot and stem and not stem.endswith("/") and "/" not in suffix else path


def nfc(text: str) -> str:
    return unicodedata.normalize("NFC", text)


def find_layout(tree: Tree, xml: list[File], images: str | None, annotations: str | None) -> Layout:
    """Take the folders by option, by name, or else by content: where most pictures have an XML of the same name.

    Raises:
        PackError: an option names no folder, two folders fit equally, or none does.
    """
    chosen_images = _by_option("images", images, tree) if images is not None else _by_name("images", IMAGE_FOLDERS, tree, tree.pictures)
    chosen_xml = (
        _by_option("annotations", annotations, tree) if annotations is not None else _by_name("annotations", XML_FOLDERS, tree, xml)
    )
    if chosen_images is not None and chosen_xml is not None:
        return Layout(chosen_images, chosen_xml)
    if not xml:
        raise PackError(
            "no XML file lies below the root, a Pascal VOC data set has one for each picture; expected the folders images (or JPEGImages) "
            'and annotations; [source] images = "..." and annotations = "..." in a recipe name others'
            + archive_hint(f.path for f in tree.others)
        )
    return _by_content(tree.pictures, xml, chosen_images, chosen_xml, archive_hint(f.path for f in tree.others))


def _by_option(key: str, value: str, tree: Tree) -> str:
    if value == ".":
        return ""
    if value not in tree.folders:
        top = ", ".join(f for f in tree.folders if "/" not in f) or "none"
        raise PackError(f"[source] {key} = {value!r}: no such folder below the root; its folders are: {top}")
    return value


def _by_name(key: str, names: tuple[str, ...], tree: Tree, files: list[File]) -> str | None:
    """A top folder of one of these names; one that holds such files is preferred to one that doesn't."""
    named = [f for f in tree.folders if "/" not in f and f.lower() in names]
    filled = [f for f in named if any(file.path.startswith(f + "/") for file in files)]
    if len(filled) > 1:
        raise PackError(f"{' and '.join(filled)} both hold files of the data set; [source] {key} in a recipe says which one to take")
    # An empty one counts only where no file of the kind lies anywhere else.
    return filled[0] if filled else named[0] if named and not files else None


def _by_content(pictures: list[File], xml: list[File], images: str | None, annotations: str | None, hint: str) -> Layout:
    best: tuple[int, str, str] | None = None
    for xml_folder in [annotations] if annotations is not None else _xml_candidates(xml):
        ids = {nfc(i) for f in xml if (i := id_of(f.path, xml_folder)) is not None}
        counts: Counter[str] = Counter()
        for file in pictures:
            for folder in [images] if images is not None else _ancestors(file.path):
                name = id_of(file.path, folder)
                if name is not None and nfc(name) in ids:
                    counts[folder] += 1
        for folder, count in sorted(counts.items()):
            # More pairs win; then the deeper folder of pictures, whose ids are shorter.
            if best is None or (count, folder.count("/"), folder != "") > (best[0], best[1].count("/"), best[1] != ""):
                best = (count, folder, xml_folder)
    if best is None:
        if not pictures:
            raise PackError("no picture lies below the root: a Pascal VOC data set has one for each XML file" + hint)
        raise PackError(
            f"no picture below the root has an XML file of the same name: pictures such as {_example(pictures)}, XML such as "
            f'{_example(xml)}; [source] images = "..." and annotations = "..." in a recipe name the two folders'
        )
    count, folder, xml_folder = best
    shown = f"pictures from {folder or '.'}/, annotations from {xml_folder or '.'}/"
    return Layout(folder, xml_folder, f"{shown} (found by content: {count} pairs)")


def _xml_candidates(xml: list[File]) -> list[str]:
    """The folder that all XML files lie in, and within each top folder the one that all of its XML files lie in."""
    tops: dict[str, list[str]] = defaultdict(list)
    for file in xml:
        parent = file.path.rpartition("/")[0]
        tops[parent.partition("/")[0]].append(parent)
    largest = sorted(tops, key=lambda top: (-len(tops[top]), top))[:_MAX_CANDIDATES]
    everywhere = common([f.path.rpartition("/")[0] for f in xml])
    return sorted({everywhere, *(common(tops[top]) for top in largest)})


def common(folders: list[str]) -> str:
    """The innermost folder that holds all of these, "" for the root."""
    parts = [f.split("/") if f else [] for f in set(folders)]
    first, last = min(parts), max(parts)
    same = 0
    while same < min(len(first), len(last)) and first[same] == last[same]:
        same += 1
    return "/".join(first[:same])


def _ancestors(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[:i]) for i in range(len(parts))]


def _example(files: list[File]) -> str:
    return repr(files[0].path) if files else "(none)"


def pair(pictures: Iterable[File], xml: Iterable[File], layout: Layout, filename_of: Callable[[File], str | None], report: Report) -> Pairs:
    """Pair by id, exactly or else after Unicode NFC.

    `filename_of` reads an XML's ``<filename>``; it is asked only where two pictures have one id. A picture
    without XML, or whose partner cannot be told, is refused by a `skip` finding.
    """
    groups, files = _grouped(pictures, layout.images), _grouped(xml, layout.annotations)
    pairs = Pairs()
    matched = {i: i for i in groups if i in files}
    rest = _by_nfc(i for i in files if i not in matched)
    for i, names in _by_nfc(i for i in groups if i not in matched).items():
        if len(names) == 1 and len(rest.get(i, ())) == 1:
            matched[names[0]] = rest[i][0]
    for i, group in groups.items():
        if i in matched:
            _pair_group(group, files[matched[i]], filename_of, pairs, report)
            continue
        where = f"{layout.annotations}/{i}.xml" if layout.annotations else f"{i}.xml"
        for file in group:
            message = f"has no annotation: looked for {where}; a picture without objects needs an XML without <object>"
            _refuse(file, "missing-annotation", message, pairs, report)
    taken = set(matched.values())
    pairs.orphans = {i: group[0] for i, group in files.items() if i not in taken}
    return pairs


def _pair_group(group: list[File], xml: list[File], filename_of: Callable[[File], str | None], pairs: Pairs, report: Report) -> None:
    if len(xml) > 1:
        names = " and ".join(f.path for f in xml)
        for file in group:
            _refuse(file, "duplicate-stem", f"{names} both fit; keep one of them", pairs, report)
        return
    chosen = group
    if len(group) > 1:
        said = filename_of(xml[0])
        chosen = [f for f in group if said is not None and nfc(f.path.rpartition("/")[2]) == nfc(said)]
        names = " and ".join(f.path for f in group)
        for file in group:
            if file in chosen:
                continue
            decided = f"its <filename> names {chosen[0].path}" if chosen else f"its <filename> names neither ({said!r})"
            _refuse(file, "duplicate-stem", f"{names} share one annotation, {xml[0].path}; {decided}", pairs, report)
    for file in chosen:
        pairs.xml[file.path] = xml[0]


def _refuse(file: File, code: str, message: str, pairs: Pairs, report: Report) -> None:
    report(Finding("skip", code, file.path, message, sample=file.path))
    pairs.refused.add(file.path)


def _grouped(files: Iterable[File], folder: str) -> dict[str, list[File]]:
    groups: dict[str, list[File]] = {}
    for file in files:
        i = id_of(file.path, folder)
        if i is not None:
            groups.setdefault(i, []).append(file)
    return groups


def _by_nfc(ids: Iterable[str]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for i in ids:
        groups.setdefault(nfc(i), []).append(i)
    return groups
