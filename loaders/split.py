"""The numbers of one split: which samples, where they are stored, their labels and boxes. Reads manifest and index, no shard.

*Position* is a sample's place in the stored split; *index* is its place in the selection at hand. They differ after `SplitIndex.select`.
"""

from __future__ import annotations

import hashlib
import operator
from functools import cached_property
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike, NDArray

from loaders.format import (
    INDEX_ARRAYS,
    INDEX_DIR,
    MANIFEST_NAME,
    FormatError,
    Index,
    Layout,
    Manifest,
    ShardEntry,
    index_path,
    open_index,
    read_manifest,
    sha256_file,
)
from loaders.handles import MapWatch, give_back, map_sparsely

_ROWS_AT_A_TIME = 1 << 16
Ragged = tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.uint8], NDArray[np.int64]]


class SplitIndex:
    """One split of a packed folder, or a selection of it. Numpy arrays only, mapped: opened in O(1) for any number of samples.

    `shard_bytes`: int64 [shards], bytes of each tar, or of a memmap shard's images (-1: unknown).
    `samples`: `SAMPLE_DTYPE` rows by position; `boxes` float32 [M, 4], `box_labels` int64 [M], `difficult` uint8 [M] and `offsets` int64
    by position (detection, else None); `shard_starts` int64 [shards + 1]: position of each shard's first sample; `restarts` and
    `restart_offsets`: cells of crop-decodable JPEGs, CSR by position (None where the split has none).

    Raises:
        FormatError: no packed data set of this layout, or no such split; or, with `check`, an index file has another checksum.
    """

    def __init__(self, root: Path, split: str, layout: Layout, selection: NDArray[np.int64] | None = None, *, check: bool = False) -> None:
        path = root / MANIFEST_NAME
        self._manifest_state = _state_of(path)
        manifest = read_manifest(root)
        if manifest.layout != layout:
            reader = "loaders.shards.ShardDataset" if manifest.layout == "tar" else "loaders.memmap.MemmapDataset"
            raise FormatError(f"{path}: layout is {manifest.layout!r}, expected {layout!r}: use {reader}")
        index = open_index(root, manifest, split)
        self.root, self.split, self.task, self.classes = root, split, manifest.task, list(manifest.classes)
        self.manifest_sha256 = sha256_file(path)
        self.selection = selection
        try:
            self.image_dtype = np.dtype(manifest.fields["image"].dtype)
        except (KeyError, TypeError) as e:
            raise FormatError(f"{path}: fields.image.dtype is missing or no dtype: {e}") from None
        # Plain arrays over the maps: slicing an np.memmap makes another one, which costs on every access.
        self.samples = np.asarray(index.samples)
        self.boxes = None if index.boxes is None else np.asarray(index.boxes)
        self.box_labels = None if index.labels is None else np.asarray(index.labels)
        self.difficult = None if index.difficult is None else np.asarray(index.difficult)
        self.offsets = None if index.box_offsets is None else np.asarray(index.box_offsets)
        self.restarts = None if index.restarts is None else np.asarray(index.restarts)
        self.restart_offsets = None if index.restart_offsets is None else np.asarray(index.restart_offsets)
        self._watch = MapWatch([(root / index_path(split, name), array) for name, array in _arrays(index)])
        for _, array in _arrays(index):
            map_sparsely(array)
        if check:
            self._check_files(manifest)
        self.check_manifest()
        shards = manifest.splits[split].shards
        self.shard_starts = np.cumsum([0, *(s.num_samples for s in shards)], dtype=np.int64)
        self.shard_bytes = np.array([_image_bytes(s) if layout == "memmap" else s.num_bytes for s in shards], np.int64)
        self._shard_paths = np.array([s.path.encode() for s in shards], np.bytes_)

    # Is it still what was opened?

    def _check_files(self, manifest: Manifest) -> None:
        for name, entry in manifest.files.items():
            if name.startswith(f"{INDEX_DIR}/{self.split}/") and (found := sha256_file(self.root / name)) != entry.sha256:
                raise FormatError(
                    f"{self.root / name}: has SHA-256 {found}, the manifest says {entry.sha256}: its bytes were changed. {self._way_out}"
                )

    @property
    def was_replaced(self) -> str:
        """What is said when the folder holds another data set now."""
        return f"{self.root}: the packed data was replaced while the data set was in use: open it again"

    def check_manifest(self) -> None:
        """Cheap as long as nobody touches the manifest. A folder that was taken away is not noticed here: what is open can still be read.

        Raises:
            FormatError: the folder holds another data set now, whose shards this index does not describe.
        """
        path = self.root / MANIFEST_NAME
        state = _state_of(path)
        if state is None or state == self._manifest_state:
            return
        if sha256_file(path) != self.manifest_sha256:
            raise FormatError(self.was_replaced)
        self._manifest_state = state

    def check_maps(self) -> None:
        """Costs a microsecond or two.

        Raises:
            FormatError: a mapped file of the index is shorter or longer than it was: reading on might end the process.
        """
        changed = self._watch.changed()
        if changed is not None:
            raise FormatError(f"{changed}. Open the data set again. {self._way_out}")

    def __len__(self) -> int:
        return len(self.samples) if self.selection is None else len(self.selection)

    @property
    def num_shards(self) -> int:
        return len(self._shard_paths)

    def select(self, indices: ArrayLike) -> SplitIndex:
        """The samples `indices` (ints, or bool [N]) in that order, numbered anew; the arrays are shared."""
        chosen = np.asarray(indices)
        if chosen.dtype == np.bool_:
            if chosen.shape != (len(self),):
                raise ValueError(f"a bool selection has shape {chosen.shape}, expected ({len(self)},)")
            chosen = np.flatnonzero(chosen)
        other = object.__new__(SplitIndex)
        derived = ("labels", "box_offsets", "image_size", "sizes", "fingerprint")
        other.__dict__.update({name: value for name, value in self.__dict__.items() if name not in derived})
        other.selection = self.positions(self.checked(chosen))
        return other

    # Indices to positions to shards

    def index(self, i: SupportsIndex) -> int:
        """One index, in range and not negative, or IndexError."""
        index, count = operator.index(i), len(self)
        if not -count <= index < count:
            raise IndexError(f"index {index} is out of range: split {self.split!r} has {count} samples")
        return index % count

    def checked(self, indices: ArrayLike) -> NDArray[np.int64]:
        """A private int64 [B] copy of `indices`, in range and not negative; IndexError, or ValueError for anything but ints [B]."""
        raw = np.asarray(indices)
        if raw.ndim != 1 or (raw.dtype.kind not in "iu" and raw.size):
            raise ValueError(f"indices have dtype {raw.dtype} and shape {raw.shape}, expected one dimension of ints")
        result, count = raw.astype(np.int64), len(self)
        if result.size and result.view(np.uint64).max() >= count:  # a negative one is larger than any other
            low, high = int(result.min()), int(result.max())
            if low < -count or high >= count:
                raise IndexError(f"index {low if low < -count else high} is out of range: split {self.split!r} has {count} samples")
            if low < 0:
                result[result < 0] += count
        return result

    def position(self, index: int) -> int:
        return index if self.selection is None else int(self.selection[index])

    def positions(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        return indices if self.selection is None else self.selection[indices]

    def shard_of(self, position: int) -> int:
        return int(self.shard_starts.searchsorted(position, "right")) - 1

    def shards_of(self, positions: ArrayLike) -> NDArray[np.int64]:
        return self.shard_starts.searchsorted(positions, "right") - 1

    def shard_range(self, shard: int) -> range:
        """Positions of a shard's samples (`shard` counts from 0)."""
        return range(int(self.shard_starts[shard]), int(self.shard_starts[shard + 1]))

    def shard_path(self, shard: int) -> Path:
        return self.root / str(self._shard_paths[shard], "utf-8")

    # Columns; each is worked out once, when first asked for

    def _column(self, name: str) -> NDArray[Any]:
        self.check_maps()
        column = self.samples[name]
        return column if self.selection is None else column[self.selection]

    @cached_property
    def labels(self) -> NDArray[np.int64] | None:
        """Int64 [N]; detection [M], see `box_offsets`; unlabelled None."""
        if self.task == "classification":
            return self._column("label").astype(np.int64)
        if self.selection is None or self.task == "unlabelled":
            return self.box_labels
        return self.ragged(np.arange(len(self)))[1]

    @cached_property
    def box_offsets(self) -> NDArray[np.int64] | None:
        """Int64 [N+1]: sample i has the boxes ``box_offsets[i]:box_offsets[i+1]``; None without boxes."""
        if self.selection is None or self.offsets is None:
            return self.offsets
        counts = self.offsets[self.selection + 1] - self.offsets[self.selection]
        return np.concatenate((np.zeros(1, np.int64), np.cumsum(counts)))

    @cached_property
    def image_size(self) -> tuple[int, int] | None:
        """(h, w) when all images have one size, else None. Reads a part of the rows at a time, and keeps none of their pages."""
        size: tuple[int, int] | None = None
        for start in range(0, len(self), _ROWS_AT_A_TIME):
            self.check_maps()
            part = slice(start, start + _ROWS_AT_A_TIME)
            rows = self.samples[part if self.selection is None else self.selection[part]]
            size = size or (int(rows["height"][0]), int(rows["width"][0]))
            if (rows["height"] != size[0]).any() or (rows["width"] != size[1]).any():
                return None
            give_back(self.samples)
        return size

    @cached_property
    def fingerprint(self) -> str:
        """Hex SHA-256 over manifest, split and selection."""
        digest = hashlib.sha256(f"{self.manifest_sha256} {self.split}".encode())
        if self.selection is not None:
            digest.update(self.selection.astype("<i8").tobytes())
        return digest.hexdigest()

    def annotation(self, position: int) -> dict[str, Any]:
        """`label` int, or private `boxes` [N, 4], `labels` [N], `difficult` [N] of one sample; empty when unlabelled."""
        if self.task == "classification":
            label = int(self.samples["label"][position])
            if not 0 <= label < len(self.classes):
                raise self._bad_label(label)
            return {"label": label}
        if self.boxes is None or self.box_labels is None or self.difficult is None or self.offsets is None:
            return {}
        rows = slice(int(self.offsets[position]), int(self.offsets[position + 1]))
        if rows.start < 0 or rows.stop - rows.start != int(self.samples["num_boxes"][position]):
            raise self._bad_offsets(position)
        return {"boxes": self.boxes[rows].copy(), "labels": self.box_labels[rows].copy(), "difficult": self.difficult[rows].copy()}

    def rows(self, positions: NDArray[np.int64] | list[int]) -> NDArray[Any]:
        """Copies of the rows at these positions, `SAMPLE_DTYPE` [B]."""
        return self.samples.take(positions)  # a tenth of what indexing takes with rows of several fields

    def class_ids(self, rows: NDArray[Any]) -> NDArray[np.int32]:
        """Labels of rows of classification samples, int32 [B]. FormatError where one is none of the classes."""
        labels: NDArray[np.int32] = rows["label"]
        if self.classes and labels.size and labels.view("<u4").max() >= len(self.classes):  # a negative one is larger than any other
            raise self._bad_label(int(labels.min()) if labels.min() < 0 else int(labels.max()))
        return labels

    def _bad_label(self, label: int) -> FormatError:
        path = self.root / index_path(self.split, "samples")
        return FormatError(f"{path}: a label is {label}, expected 0 to {len(self.classes) - 1}: the index is damaged. {self._way_out}")

    def _bad_offsets(self, position: int) -> FormatError:
        path = self.root / index_path(self.split, "box_offsets")
        return FormatError(f"{path}: row {position} does not fit num_boxes of samples.npy: the index is damaged. {self._way_out}")

    @property
    def _way_out(self) -> str:
        return f"`pack verify {self.root}` lists what is damaged, the `pack build` command that made it repairs it"

    def cells(self, position: int) -> NDArray[np.uint32] | None:
        """`loaders.jpeg.restart_offsets` of the image at a position; None where it has no restart grid."""
        if self.restarts is None or self.restart_offsets is None:
            return None
        start, stop = int(self.restart_offsets[position]), int(self.restart_offsets[position + 1])
        return self.restarts[start:stop] if stop > start else None

    @cached_property
    def sizes(self) -> NDArray[np.int64]:
        """(h, w) of each image, int64 [N, 2]."""
        return np.stack([self._column(name).astype(np.int64) for name in ("height", "width")], axis=1)

    def ragged(self, indices: ArrayLike) -> Ragged:
        """Boxes of several samples by one CSR take, see `PackedDataset.gather_ragged`."""
        if self.boxes is None or self.box_labels is None or self.difficult is None or self.offsets is None:
            raise ValueError(f"{self.root}: task is {self.task!r}: it has no boxes")
        positions = self.positions(self.checked(indices))
        starts = self.offsets[positions]
        counts = self.offsets[positions + 1] - starts
        unfit = (starts < 0) | (counts != self.samples["num_boxes"][positions])
        if unfit.any():
            raise self._bad_offsets(int(positions[unfit.argmax()]))
        offsets = np.zeros(len(positions) + 1, np.int64)
        np.cumsum(counts, out=offsets[1:])
        rows = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], counts)
        return self.boxes[rows], self.box_labels[rows], self.difficult[rows], offsets


def _arrays(index: Index) -> list[tuple[str, NDArray[Any]]]:
    arrays = ((name, getattr(index, name)) for name in INDEX_ARRAYS)
    return [(name, array) for name, array in arrays if array is not None]


def _state_of(path: Path) -> tuple[int, int, int] | None:
    """What changes when a file is written or replaced; None: it is not there."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def _image_bytes(shard: ShardEntry) -> int:
    """Bytes that a memmap shard's images have on disk; -1 where the manifest does not say."""
    entry = (shard.files or {}).get("image.npy")
    return -1 if entry is None else entry.num_bytes
