"""The types that cross the stages of packing. They carry data and no verbs; every stage imports this module, it imports none of them.

source -> Item (listing) -> Annotation (what the source says) -> Sample (what is stored) -> writer
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from loaders.format import Index, Layout, Task

Level = Literal["error", "skip", "warning"]
MAX_CLASS_CHARS = 200
"""Of a class name, of any kind of source: one that is longer is a cell or tag that took in what follows it."""


class PackError(Exception):
    """The job cannot go on. The message is for the user: the file, the place, what was found, what was expected, the way out."""


class UsageError(PackError):
    """What was asked for cannot be meant: a wrong value in a recipe or flag. Exit status 2."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something said about the input.

    `error` is a fault of the whole data set and always fails the build; `skip` leaves one sample out (or fails under
    ``--on-error fail``); `warning` changes nothing. `code` is kebab-case and stable. `path` is the file at fault and `sample` the
    picture concerned, both below the source root; `line` and `object` count from 1.
    """

    level: Level
    code: str
    path: str
    message: str
    sample: str | None = None
    line: int | None = None
    object: int | None = None
    count: int = 1


Report = Callable[[Finding], None]


@dataclass(frozen=True, slots=True)
class Item:
    """One picture of a source's listing, not read yet.

    `path` is below the source root, POSIX. `split` is None where the source has no splits. `label` is the class name (classification).
    `ref` belongs to the source: what it needs to find the annotation again. `stamp` is a digest of everything besides the picture
    that the sample is made of (path, size and mtime of its XML, its CSV rows): a changed stamp makes a shard job run again.
    A `refused` item is numbered and never packed; its finding is given while listing.
    """

    path: str
    split: str | None
    num_bytes: int
    mtime_ns: int
    label: str | None = None
    ref: Any = None
    stamp: bytes = b""
    refused: bool = False


@dataclass(slots=True)
class Listing:
    """What a source holds.

    `items`: every picture, refused ones included, sorted by path; an item's position in it is its key. `classes`: id order; None where
    only a scan of all annotations can tell. `has_splits`: the source says which split an item belongs to. `num_files`: regular files
    seen below the root; `num_ignored`: of those (and of hidden folders), the ones a stated rule passes over (hidden and system files);
    `num_used`: annotation and table files that were read or will be. `digest`: hex SHA-256 over the contents of the data-set-level
    files (split file, CSV tables); `tables`: their path -> (num_bytes, mtime_ns) as they were listed. `notes`: what was detected, for
    the user, one line each.
    """

    items: list[Item]
    task: Task
    classes: list[str] | None
    has_splits: bool
    num_files: int = 0
    num_ignored: int = 0
    num_used: int = 0
    digest: str = ""
    tables: dict[str, tuple[int, int]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Annotation:
    """What a source says about one picture, in the frame and unit that it uses.

    `boxes` float64 [N, 4] xyxy, 0-based half-open pixels, or fractions of width and height when `normalized`. `labels`: class name per
    box. `difficult`, `truncated`, `occluded`: uint8 [N]. `size`: (width, height) that the annotation claims for the picture, None when
    it claims nothing usable. `path`: the file the boxes come from; `places`: per box, what a message calls it ("object 2", "line 7");
    `lines`: per box, its line in `path`, or empty. `extra`: kept CSV columns, strings.
    """

    path: str
    label: str | None = None
    boxes: NDArray[np.float64] = field(default_factory=lambda: np.zeros((0, 4)))
    labels: list[str] = field(default_factory=list)
    difficult: NDArray[np.uint8] = field(default_factory=lambda: np.zeros(0, np.uint8))
    truncated: NDArray[np.uint8] = field(default_factory=lambda: np.zeros(0, np.uint8))
    occluded: NDArray[np.uint8] = field(default_factory=lambda: np.zeros(0, np.uint8))
    size: tuple[int, int] | None = None
    normalized: bool = False
    places: list[str] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    extra: dict[str, str] | None = None


@dataclass(slots=True)
class Sample:
    """One sample as it is stored.

    Either `encoded` (the image part's bytes, with `suffix` jpg, png or webp) or `image` (uint8 [H, W, 3] RGB) is set, by the layout's
    need; `encoded_crc32` is the CRC-32 of `encoded` where that is known already. `affine` (sx, sy, tx, ty): stored = original * s + t.
    `boxes` float32 [N, 4] xyxy pixels of the stored image, 0-based, half-open; `labels` int64 [N]; `difficult`, `truncated`,
    `occluded` uint8 [N]. `label` is -1 where there is none.
    """

    key: int
    source: str
    width: int
    height: int
    original_width: int
    original_height: int
    affine: tuple[float, float, float, float]
    image: NDArray[np.uint8] | None = None
    encoded: bytes | None = None
    encoded_crc32: int | None = None
    suffix: str | None = None
    label: int = -1
    boxes: NDArray[np.float32] = field(default_factory=lambda: np.zeros((0, 4), np.float32))
    labels: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    difficult: NDArray[np.uint8] = field(default_factory=lambda: np.zeros(0, np.uint8))
    truncated: NDArray[np.uint8] = field(default_factory=lambda: np.zeros(0, np.uint8))
    occluded: NDArray[np.uint8] = field(default_factory=lambda: np.zeros(0, np.uint8))
    extra: dict[str, str] | None = None


class Source(Protocol):
    """Reads one kind of raw data set. Attach a new one by one file in ``packer/sources/`` and one line in its table.

    Duties: never write below `root`, never open a path outside it that the data names; give findings for faults instead of raising
    (PackError only where no listing is possible at all); be picklable (worker processes get a copy) and deterministic.
    """

    kind: str
    root: Path
    options: dict[str, Any]
    """The options that were given and are not the defaults, as JSON values."""

    def list(self, report: Report) -> Listing:
        """List every picture once, without opening any. Called once, in the main process, before `annotate`."""
        ...

    def annotate(self, item: Item, report: Report) -> Annotation | None:
        """What the source says about a listed item; None when the sample must be left out (a `skip` finding was reported)."""
        ...


class Transform(Protocol):
    """A deterministic change of picture and boxes. Attach a new one in ``packer/transforms.py``."""

    def describe(self) -> dict[str, Any]:
        """JSON values that say what it does, for the manifest and the key of a job."""
        ...

    def output_size(self, width: int, height: int) -> tuple[int, int]:
        """(width, height) that a picture of this size will have."""
        ...

    def __call__(
        self, image: NDArray[np.uint8], boxes: NDArray[np.float64]
    ) -> tuple[NDArray[np.uint8], NDArray[np.float64], tuple[float, float, float, float]]:
        """Change image [H, W, 3] and boxes [N, 4]; the affine maps what came in to what goes out. The inputs are not modified."""
        ...


@dataclass(slots=True)
class WrittenShard:
    """What a writer made: `files` maps each file's name below the shard's path ("" for a tar itself) to (num_bytes, hex SHA-256)."""

    files: dict[str, tuple[int, str]]
    index: Index


class Writer(Protocol):
    """Writes one shard. Attach a new layout by one file in ``packer/writers/`` and one line in its table.

    The same samples in the same order give the same bytes. Nothing outside `path` is touched (a tar writer makes one file there, a
    memmap writer one folder). Nothing is synced here: a shard counts by its checksum until it is published, and is synced then.
    """

    layout: Layout

    def write(self, sample: Sample) -> None: ...

    def close(self) -> WrittenShard: ...

    def abort(self) -> None:
        """Give up: close files and remove what was written."""
        ...
