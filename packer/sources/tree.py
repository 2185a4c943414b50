"""Walks the folder of a raw data set once and says what lies in it. No file is opened.

Rules, the same for every source: hidden names (leading dot) and files of operating systems are ignored and counted; symbolic links
are followed, also out of the root, each link being a file of its own, but a folder inside itself is not entered again; only regular
files are taken; a name that is not UTF-8 cannot be written into packed data and is reported. A picture is known by its suffix.
"""

from __future__ import annotations

import os
import stat
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from packer.sample import Finding, Level, PackError, Report

PICTURE_SUFFIXES = frozenset(
    {".jpg", ".jpeg", ".jpe", ".jfif", ".mpo", ".png", ".webp", ".bmp", ".dib", ".tif", ".tiff", ".gif"},
)
TABLE_SUFFIXES = frozenset({".csv", ".tsv", ".xls", ".xlsx", ".xlsm", ".ods"})
ARCHIVE_SUFFIXES = frozenset(
    {".gz", ".bz2", ".xz", ".lzma", ".z", ".zst", ".lz4", ".lz", ".zip", ".tar", ".tgz", ".tbz2", ".txz", ".tzst", ".7z", ".rar"},
)
_PLACEHOLDER = ".icloud"
SYSTEM_NAMES = frozenset(
    {
        "thumbs.db",
        "ehthumbs.db",
        "desktop.ini",
        "icon\r",
        "__macosx",
        "$recycle.bin",
        "system volume information",
        "lost+found",
        "@eadir",
        "#recycle",
    }
)
MAX_ENTERED = 64
"""How often one folder is entered by different links: a dozen folders that link to each other would make a billion paths."""
_KINDS = {stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


@dataclass(frozen=True, slots=True)
class File:
    """A file below the root: POSIX path, size in bytes, mtime in nanoseconds. `refused`: it cannot be read, a finding was given."""

    path: str
    num_bytes: int
    mtime_ns: int
    refused: bool = False


@dataclass(slots=True)
class Tree:
    """What lies below a root; every list is sorted by path.

    `pictures` and `others`: files by suffix; refused ones stand only among the pictures. `folders`: without the root. `num_files`:
    regular files and refused pictures seen, those of ignored folders included; `num_ignored`: of these, the ones that a rule passes over.
    """

    pictures: list[File] = field(default_factory=list)
    others: list[File] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)
    num_files: int = 0
    num_ignored: int = 0


@dataclass(frozen=True, slots=True)
class _Folder:
    """A folder to read. `prefix` is its path below the root with a slash, "" for the root; `ids` are (device, inode) from the root on."""

    prefix: str
    ids: tuple[tuple[int, int], ...]


def is_ignored(name: str) -> bool:
    """Hidden, or a file or folder that an operating system leaves behind."""
    return name.startswith(".") or name.casefold() in SYSTEM_NAMES


def suffix_of(path: str) -> str:
    """The last suffix in lower case with its dot, "" without one."""
    stem, dot, suffix = path.rpartition(".")
    return "" if not dot or not stem or stem.endswith("/") or "/" in suffix else f".{suffix.lower()}"


def is_picture(path: str) -> bool:
    """By suffix, in any case."""
    return suffix_of(path) in PICTURE_SUFFIXES


def is_archive(path: str) -> bool:
    """An archive or a compressed file, by suffix: neither is opened."""
    return suffix_of(path) in ARCHIVE_SUFFIXES


def archive_hint(paths: Iterable[str]) -> str:
    """What to add to a message about missing files where archives, of `paths`, lie there; "" where none does."""
    found = [path for path in paths if is_archive(path)]
    more = f" and {len(found) - 1:,} more" if len(found) > 1 else ""
    return f"; {printable(found[0])}{more} lies there, and archives are not opened: unpack it first" if found else ""


def printable(path: str) -> str:
    """A path for people and for JSON: bytes that are not UTF-8 as ``\\xf3``."""
    return path.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def change_of(file: File, now: os.stat_result) -> str | None:
    """In words, how a file differs now from when it was listed; None where size and mtime are the same."""
    if (now.st_size, now.st_mtime_ns) == (file.num_bytes, file.mtime_ns):
        return None
    what = "it was written again after it was listed"
    if now.st_size != file.num_bytes:
        what = f"{file.num_bytes} bytes when it was listed, {now.st_size} now"
    return f"changed while packing: {what}; run the command again"


def is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether an entry, or what it links to, is a folder; False where that cannot be told: the walk names such a link."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def is_regular(entry: os.DirEntry[str]) -> bool:
    """Whether an entry, or what it links to, is a regular file; False where that cannot be told."""
    try:
        return entry.is_file()
    except OSError:
        return False


def check_root(root: Path) -> None:
    """Raises PackError: `root` is missing, no folder or not readable."""
    try:
        with os.scandir(root):
            pass
    except FileNotFoundError:
        raise PackError(f"{root}: no such folder; expected the folder of a raw data set") from None
    except NotADirectoryError:
        raise PackError(f"{root}: is not a folder, it is a file; expected the folder of a raw data set") from None
    except OSError as e:
        raise PackError(f"{root}: cannot be read: {e.strerror}") from None


def walk(root: Path, report: Report) -> Tree:
    """List everything below `root`. Faults are findings; their order does not depend on the file system.

    Raises:
        PackError: `root` is missing, no folder or not readable.
    """
    check_root(root)
    return _Walk(os.fspath(root), report).run()


def report_unsupported(files: Iterable[File], report: Report) -> None:
    """One `unsupported-file` or `archive` warning for each file that a source has no use for."""
    known = " ".join(sorted(PICTURE_SUFFIXES))
    for file in files:
        suffix = suffix_of(file.path)
        if is_archive(file.path):
            report(Finding("warning", "archive", file.path, f"not packed: an archive ({suffix}): unpack it first", sample=file.path))
            continue
        what = f"suffix {suffix!r} is not read" if suffix else "it has no suffix"
        if suffix in TABLE_SUFFIXES:
            what = "a table that this source does not use"
        message = f"not packed: {what}; pictures are known by their suffix: {known}"
        report(Finding("warning", "unsupported-file", file.path, message, sample=file.path))


def no_pictures(tree: Tree) -> Finding:
    """The fault of a data set that holds none."""
    hint = archive_hint(f.path for f in tree.others)
    return Finding("error", "no-pictures", ".", f"no picture lies below the root; nothing can be packed{hint}")


def case_twins(names: Iterable[str]) -> Iterator[list[str]]:
    """Groups of names that differ by upper and lower case, or Unicode's composed and decomposed form, only, each sorted."""
    groups: dict[str, list[str]] = {}
    for name in names:
        key = name.casefold() if name.isascii() else unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())
        groups.setdefault(key, []).append(name)
    return (sorted(group) for group in groups.values() if len(group) > 1)


def distinct(names: Sequence[str]) -> list[str]:
    """Names as a message shows them: where two look the same, all but ASCII as code points (``caf\\xe9``, ``cafe\\u0301``)."""
    alike = len({unicodedata.normalize("NFC", name) for name in names}) < len(names)
    return [name.encode("ascii", "backslashreplace").decode() for name in names] if alike else list(names)


class _Walk:
    def __init__(self, root: str, report: Report) -> None:
        self._root, self._report, self._tree = root, report, Tree()
        self._entered: Counter[tuple[int, int]] = Counter()

    def run(self) -> Tree:
        info = os.stat(self._root)
        stack = [_Folder("", ((info.st_dev, info.st_ino),))]
        while stack:
            stack += self._read(stack.pop())
        tree = self._tree
        tree.pictures.sort(key=lambda f: f.path)
        tree.others.sort(key=lambda f: f.path)
        tree.folders.sort()
        return tree

    def _read(self, folder: _Folder) -> list[_Folder]:
        """Take one folder's files; returns its folders, the last one first (they go on a stack)."""
        try:
            with os.scandir(os.path.join(self._root, folder.prefix)) as entries:
                found = sorted(entries, key=lambda e: e.name)
        except OSError as e:
            path = printable(folder.prefix.rstrip("/") or ".")
            self._say("skip", "unreadable", path, f"folder cannot be read: {e.strerror}; nothing in it is packed", sample=path)
            return []
        below, names = [], []
        self._placeholders(folder.prefix, {entry.name for entry in found})
        for entry in found:
            if is_ignored(entry.name):
                self._count_ignored(entry)
                continue
            names.append(entry.name)
            child = self._take(entry, folder)
            if child is not None:
                below.append(child)
        self._twins(folder.prefix, names)
        return below[::-1]

    def _take(self, entry: os.DirEntry[str], folder: _Folder) -> _Folder | None:
        path = folder.prefix + entry.name
        try:
            info = entry.stat()
        except OSError as e:
            if entry.is_symlink():
                self._refuse(
                    path,
                    "broken-link",
                    f"symbolic link to {self._target(entry)}, which cannot be reached: {e.strerror}{_annex(self._target(entry))}",
                )
            else:
                self._refuse(path, "unreadable", f"cannot be looked at: {e.strerror}")
            return None
        if stat.S_ISDIR(info.st_mode):
            return self._enter(path, info, folder)
        if not stat.S_ISREG(info.st_mode):
            kind = _KINDS.get(stat.S_IFMT(info.st_mode), "a special file")
            self._refuse(path, "not-a-file", f"is {kind}, not a regular file: not opened")
            return None
        self._tree.num_files += 1
        if not _is_utf8(path):
            message = "the name is not UTF-8: rename the file (shown here with its bytes as \\xNN)"
            self._say("skip" if is_picture(path) else "warning", "name-not-utf8", printable(path), message, sample=printable(path))
            return None
        files = self._tree.pictures if is_picture(path) else self._tree.others
        files.append(File(path, info.st_size, info.st_mtime_ns))
        return None

    def _enter(self, path: str, info: os.stat_result, folder: _Folder) -> _Folder | None:
        identity = (info.st_dev, info.st_ino)
        if identity in folder.ids:
            shown = printable(path)
            self._say("warning", "link-loop", shown, "links to a folder that it lies in: not entered again")
            return None
        self._entered[identity] += 1
        if self._entered[identity] > MAX_ENTERED:
            message = f"links to a folder that other links led to {MAX_ENTERED} times: not entered again"
            self._say("warning", "link-loop", printable(path), message)
            return None
        if _is_utf8(path):
            self._tree.folders.append(path)
        return _Folder(path + "/", (*folder.ids, identity))

    def _refuse(self, path: str, code: str, message: str) -> None:
        """A picture that cannot be one is a sample left out and keeps its place in the list; anything else is just named."""
        shown, picture = printable(path), is_picture(path)
        self._say("skip" if picture else "warning", code, shown, message, sample=shown)
        if picture and _is_utf8(path):
            self._tree.pictures.append(File(path, 0, 0, refused=True))
            self._tree.num_files += 1

    def _placeholders(self, prefix: str, names: set[str]) -> None:
        """iCloud keeps `.x.jpg.icloud` in place of an x.jpg that is not on this disk: hidden, and yet a file of the data set."""
        for name in sorted(n for n in names if n.startswith(".") and n.endswith(_PLACEHOLDER)):
            real = name[1 : -len(_PLACEHOLDER)]
            if real and real not in names:
                self._refuse(prefix + real, "not-downloaded", f"only its placeholder {printable(name)} is here: let iCloud download it")

    def _twins(self, prefix: str, names: list[str]) -> None:
        for group in case_twins(names):
            names_shown = ", ".join(printable(prefix + name) for name in distinct(group))
            message = f"names differ by upper and lower case only (or by Unicode form): {names_shown}; "
            message += "on a disk that ignores that, one overwrites the other"
            self._say("warning", "case-twins", printable(prefix + group[-1]), message)

    def _count_ignored(self, entry: os.DirEntry[str]) -> None:
        """Count the regular files of an ignored entry; nothing in there is worth a finding, and links are not followed."""
        stack = [entry]
        while stack:
            entry = stack.pop()
            try:
                if entry.is_dir(follow_symlinks=False):
                    with os.scandir(entry.path) as entries:
                        stack += entries
                elif entry.is_file(follow_symlinks=False):
                    self._tree.num_files += 1
                    self._tree.num_ignored += 1
            except OSError:
                continue

    def _target(self, entry: os.DirEntry[str]) -> str:
        try:
            return repr(printable(os.readlink(entry.path)))
        except OSError:
            return "another file"

    def _say(self, level: Level, code: str, path: str, message: str, sample: str | None = None) -> None:
        self._report(Finding(level, code, path, message, sample=sample))


def _annex(target: str) -> str:
    return "; 'git annex get' fetches what it stands for" if ".git/annex/" in target else ""


def _is_utf8(path: str) -> bool:
    if path.isascii():
        return True
    try:
        path.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
