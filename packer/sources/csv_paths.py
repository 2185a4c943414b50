"""From what a CSV row calls its picture to a picture of the listing. Only names are compared; nothing is opened."""

from __future__ import annotations

import posixpath
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

MISSING, OUTSIDE, AMBIGUOUS = -1, -2, -3
"""In place of a picture's number: there is none, the path leads out of the data set, more than one fits (this value or a lower one)."""

_URL = re.compile(r"[a-z][a-z0-9+.-]+://|(?:https?|file|ftp|s3|gs|data):", re.IGNORECASE)
_DRIVE = re.compile(r"[a-z]:/", re.IGNORECASE)
_MAX_FOLDERS_SAID = 3


@dataclass(slots=True)
class Resolved:
    """`pictures` int32 [number of names]: position in the listing, or `MISSING`, `OUTSIDE`, or `AMBIGUOUS` and lower, see
    `PictureIndex.twins`. `hint`: what to say about missing ones, or "". `notes`: what was found out, for the user.
    """

    pictures: NDArray[np.int32]
    hint: str = ""
    notes: list[str] = field(default_factory=list)


def plain_folder(text: str) -> str | None:
    """A folder below the root as "a/b" ("" is the root itself); None when it leads outside."""
    plain = posixpath.normpath(text.replace("\\", "/"))
    return None if _leaves(plain) else "" if plain == "." else plain


def _leaves(path: str) -> bool:
    return path.startswith(("/", "../")) or path == ".." or _DRIVE.match(path) is not None


def _stem(path: str) -> str:
    """The path without its last suffix."""
    return posixpath.splitext(path)[0]


class PictureIndex:
    """Finds pictures by name. `paths`: of the listing, POSIX, below the root."""

    def __init__(self, paths: Sequence[str]) -> None:
        self.paths = paths
        self._exact = {path: i for i, path in enumerate(paths)}
        self._twins: list[list[int]] = []
        self._composed: dict[str, int] = {}
        for i, path in enumerate(paths):
            if not path.isascii() and not unicodedata.is_normalized("NFC", path):
                self._put(self._composed, unicodedata.normalize("NFC", path), i)
        self._stems: dict[str, int] | None = None

    def resolve(self, names: Sequence[str], table: str, image_dir: str | None) -> Resolved:
        """Find the picture of every name as the table `table` writes it.

        A name is looked for below `image_dir` where it is given, below the root, then below the table's own folder: as it is, with
        ``\\`` as ``/``, in Unicode's composed form, with a suffix added. Where none is found so and no `image_dir` is given, the one
        folder below which some are found is taken, and said; with two such folders nothing is taken.
        """
        bases = list(dict.fromkeys([*([image_dir] if image_dir is not None else []), "", posixpath.dirname(table)]))
        result = Resolved(np.fromiter((self._find(name, bases) for name in names), np.int32, len(names)))
        missing = np.flatnonzero(result.pictures == MISSING).tolist()
        if image_dir is not None or not missing or (result.pictures >= 0).any():
            return result
        folders = self._folders_of({_composed(_slashes(names[i])) for i in missing})
        if len(folders) == 1:
            result.notes.append(f'{table}: its pictures are found below {folders[0]!r} (as image_dir = "{folders[0]}" would say)')
            for i in missing:
                result.pictures[i] = self._find(names[i], folders)
        elif folders:
            shown = ", ".join(folders[:_MAX_FOLDERS_SAID]) + (", ..." if len(folders) > _MAX_FOLDERS_SAID else "")
            result.hint = f"; pictures of such names are below several folders ({shown}): say which, image_dir = {folders[0]!r}"
        return result

    def twins(self, value: int) -> list[str]:
        """The pictures that fit a name which was resolved to `value`, `AMBIGUOUS` or lower."""
        return [self.paths[i] for i in self._twins[AMBIGUOUS - value]]

    def _put(self, known: dict[str, int], key: str, i: int) -> None:
        other = known.get(key)
        if other is None:
            known[key] = i
        elif other >= 0:
            known[key] = AMBIGUOUS - len(self._twins)
            self._twins.append([other, i])
        else:
            self._twins[AMBIGUOUS - other].append(i)

    def _find(self, name: str, bases: Sequence[str]) -> int:
        for base in bases:
            if (found := self._exact.get(f"{base}/{name}" if base else name)) is not None:
                return found
        if _URL.match(name):
            return OUTSIDE
        plain = _slashes(name)
        if _leaves(plain) and not plain.startswith("../"):
            return OUTSIDE
        result = OUTSIDE
        for base in bases:
            path = posixpath.normpath(posixpath.join(base, plain))
            if _leaves(path):
                continue
            result = self._named(path)
            if result != MISSING:
                break
        return result

    def _named(self, path: str) -> int:
        """The picture at a plain path: exactly, else in composed form, else with a suffix added."""
        if (found := self._exact.get(path)) is not None:
            return found
        path = _composed(path)
        for known in (self._exact, self._composed, self.stems):
            if (found := known.get(path)) is not None:
                return found
        return MISSING

    @property
    def stems(self) -> dict[str, int]:
        """Composed path without its last suffix -> picture, or `AMBIGUOUS` and lower; made when it is first needed."""
        if self._stems is None:
            self._stems = {}
            for i, path in enumerate(self.paths):
                self._put(self._stems, _composed(_stem(path)), i)
        return self._stems

    def _folders_of(self, names: set[str]) -> list[str]:
        """The folders, sorted, below which a picture of one of these names lies (with or without its suffix); a few suffice."""
        folders: set[str] = set()
        for path in self.paths:
            path = _composed(path)
            cut = path.find("/")
            while cut >= 0:
                rest = path[cut + 1 :]
                if rest in names or _stem(rest) in names:
                    folders.add(path[:cut])
                cut = path.find("/", cut + 1)
            if len(folders) > _MAX_FOLDERS_SAID:
                break
        return sorted(folders)


def _slashes(name: str) -> str:
    return posixpath.normpath(name.replace("\\", "/"))


def _composed(text: str) -> str:
    return text if text.isascii() else unicodedata.normalize("NFC", text)
