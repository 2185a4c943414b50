"""What `ShardDataset` and `MemmapDataset` share: samples by number, selections, keyed randomness, replacement, pickling.

A data set holds numpy arrays only (forked workers share their pages), opens in O(1) for any number of samples, opens shards when first
needed, and is pickled as a path plus options. *Position* is a sample's place in the stored split; *index* is its place in the data set
object in hand. The two differ in a data set made by `PackedDataset.select`.
"""

from __future__ import annotations

import hashlib
import operator
import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, SupportsIndex, TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch.utils.data import Dataset

from loaders.format import MANIFEST_NAME, FormatError, Layout, Manifest, open_index, read_manifest, sha256_file
from loaders.handles import ProcessCache, max_open_shards
from loaders.keyed import KeyedRandom

SampleDict = dict[str, Any]
Transform = Callable[[SampleDict, np.random.Generator], SampleDict]
OnError = Literal["raise", "replace"]
T = TypeVar("T")

# After 16 neighbours the tries double their distance, so that a whole missing shard costs few of them.
REPLACEMENT_OFFSETS = (*range(1, 17), *(1 << k for k in range(5, 40)))


class SampleError(RuntimeError):
    """A stored sample cannot be read: missing or short file, wrong checksum, undecodable image.

    The message names shard, key, source and the way out. It has one argument, so that it crosses process borders unchanged.
    """


class PackedDataset(Dataset[SampleDict], ABC):
    """Map-style data set over one split of a packed folder. Use a subclass: `ShardDataset` or `MemmapDataset`.

    ``ds[i]`` gives a dict: `image` (uint8 [3, H, W] tensor, a view of HWC memory), `label` int (classification) or `boxes` float32
    [N, 4] xyxy pixels, `labels` int64 [N] and `difficult` uint8 [N] (detection), `key` int (the sample's number in the source listing)
    and `index` int: its 0-based place in this object, so in a selected data set ``ds[i]["index"] == i`` too.

    Args:
        root: folder with a ``manifest.json``.
        split: which of its splits.
        transform: ``transform(sample, rng) -> sample``, called with a numpy dict before tensors are made. Its `image` [H, W, 3], `boxes`,
            `labels` and `difficult` are private and writable. `rng` depends on (seed, epoch, index) only, see `loaders.keyed`; it must
            not be kept after the call. Numpy arrays in the result become tensors, anything else is passed through.
        seed: of the transform's randomness.
        on_error: "raise" raises `SampleError` for a damaged sample; "replace" gives the next good one in its place (with its own `key`
            and `index`), counts it in `num_replaced` and warns once.
        check_crc: compare every image with the CRC-32 in the index (tar layout only).

    Raises:
        FormatError: the folder is no packed data set of this layout, or has no such split.

    Safe to use from several threads. `epoch` is kept in shared memory, so that `set_epoch` reaches DataLoader workers that are already
    running; `num_replaced` counts per process.
    """

    layout: ClassVar[Layout]

    def __init__(
        self,
        root: str | Path,
        split: str = "train",
        transform: Transform | None = None,
        seed: int = 0,
        on_error: OnError = "raise",
        check_crc: bool = False,
    ) -> None:
        if on_error not in ("raise", "replace"):
            raise ValueError(f"on_error is {on_error!r}, expected 'raise' or 'replace'")
        self.root = Path(root).absolute()  # a spawned worker may have another current folder
        self.split = split
        self.transform = transform
        self.seed = operator.index(seed)
        self.on_error: OnError = on_error
        self.check_crc = check_crc
        self._selection: NDArray[np.int64] | None = None
        self._share_epoch(torch.zeros(1, dtype=torch.int64))
        self._open()

    def _open(self) -> None:
        manifest = read_manifest(self.root)
        if manifest.layout != self.layout:
            other = "loaders.shards.ShardDataset" if manifest.layout == "tar" else "loaders.memmap.MemmapDataset"
            path, name = self.root / MANIFEST_NAME, type(self).__name__
            raise FormatError(f"{path}: layout is {manifest.layout!r}, {name} reads {self.layout!r}: use {other}")
        index = open_index(self.root, manifest, self.split)
        # Plain arrays over the maps: np.memmap pickles and slices as a class of its own, which costs on every access.
        self._samples = np.asarray(index.samples)
        self._boxes = None if index.boxes is None else np.asarray(index.boxes)
        self._box_labels = None if index.labels is None else np.asarray(index.labels)
        self._difficult = None if index.difficult is None else np.asarray(index.difficult)
        self._offsets = None if index.box_offsets is None else np.asarray(index.box_offsets)
        self.task = manifest.task
        self.classes = list(manifest.classes)
        try:
            self._image_dtype = np.dtype(manifest.fields["image"].dtype)
        except (KeyError, TypeError) as e:
            raise FormatError(f"{self.root / MANIFEST_NAME}: fields.image.dtype is missing or no dtype: {e}") from None
        self._manifest_sha256 = sha256_file(self.root / MANIFEST_NAME)
        self._read_shard_list(manifest)
        self._shards: ProcessCache[Any] = ProcessCache(max_open_shards())
        self._random = KeyedRandom()
        self._local = threading.local()
        self._reset()

    def _read_shard_list(self, manifest: Manifest) -> None:
        shards = manifest.splits[self.split].shards
        self._shard_paths = np.array([s.path.encode() for s in shards], dtype=np.bytes_)
        self._shard_starts = np.cumsum([0, *(s.num_samples for s in shards)], dtype=np.int64)

    def _reset(self) -> None:
        """Forget what depends on the selection."""
        self._num_replaced = 0
        self._labels: NDArray[np.int64] | None = None
        self._box_offsets: NDArray[np.int64] | None = None
        self._image_size: tuple[int, int] | Literal["unknown"] | None = "unknown"
        self._fingerprint: str | None = None

    # Pickling: a path and options. The arrays are mapped again on the other side.

    def __getstate__(self) -> dict[str, Any]:
        names = ("root", "split", "transform", "seed", "on_error", "check_crc", "_selection", "_epoch", "_manifest_sha256")
        return {name: self.__dict__[name] for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._share_epoch(state["_epoch"])
        self._open()
        if self._manifest_sha256 != state["_manifest_sha256"]:
            raise FormatError(f"{self.root}: the packed data was replaced while the data set was in use: open it again")

    # The epoch lives in shared memory: DataLoader workers with persistent_workers=True would never see a plain attribute change.

    def _share_epoch(self, epoch: torch.Tensor) -> None:
        self._epoch = share_epoch(epoch)
        self._epoch_array: NDArray[np.int64] = self._epoch.numpy()

    @property
    def epoch(self) -> int:
        """The epoch that keys the transform's randomness."""
        return int(self._epoch_array[0])

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, also for workers that are running; a data set and its selections share it."""
        self._epoch_array[0] = epoch

    # What is in it

    def __len__(self) -> int:
        return len(self._samples) if self._selection is None else len(self._selection)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.root)!r}, split={self.split!r}): {len(self)} samples, {self.task}"

    @property
    def labels(self) -> NDArray[np.int64] | None:
        """Class ids: int64 [N]; detection int64 [M], sample i has rows ``box_offsets[i]:box_offsets[i+1]``; unlabelled None."""
        if self._labels is None and self.task != "unlabelled":
            if self.task == "classification":
                labels = self._samples["label"] if self._selection is None else self._samples["label"][self._selection]
                self._labels = labels.astype(np.int64)
            elif self._selection is None:
                self._labels = self._box_labels
            else:
                self._labels = self.gather_ragged(np.arange(len(self)))[1]
        return self._labels

    @property
    def box_offsets(self) -> NDArray[np.int64] | None:
        """Detection: int64 [N+1], see `labels`; else None."""
        if self._box_offsets is None and self._offsets is not None:
            if self._selection is None:
                self._box_offsets = self._offsets
            else:
                counts = self._offsets[self._selection + 1] - self._offsets[self._selection]
                self._box_offsets = np.concatenate(([0], np.cumsum(counts)))
        return self._box_offsets

    @property
    def fingerprint(self) -> str:
        """Hex SHA-256 over the manifest, the split and the selection: equal means the same samples under the same indices."""
        if self._fingerprint is None:
            digest = hashlib.sha256(f"{self._manifest_sha256} {self.split}".encode())
            if self._selection is not None:
                digest.update(self._selection.astype("<i8").tobytes())
            self._fingerprint = digest.hexdigest()
        return self._fingerprint

    @property
    def num_replaced(self) -> int:
        """Damaged samples that ``on_error="replace"`` replaced so far in this process."""
        return self._num_replaced

    def select(self, indices: ArrayLike) -> Self:
        """A data set of the same type with these samples, in this order; for folds and subsets.

        `indices`: 0-based ints of this data set (negative ones count from the end, repeats are allowed), or bool [N]. A selected data
        set is pickled with its positions, 8 bytes a sample.
        """
        chosen = np.asarray(indices)
        if chosen.dtype == np.bool_:
            if chosen.shape != (len(self),):
                raise ValueError(f"a bool selection has shape {chosen.shape}, expected ({len(self)},)")
            chosen = np.flatnonzero(chosen)
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other._selection = self._positions(self._checked(chosen))
        other._reset()
        return other

    def meta(self, i: SupportsIndex) -> dict[str, Any]:
        """Where sample `i` comes from: `source` (path below the source root), `affine` (sx, sy, tx, ty floats; stored = original * s + t),
        `original_size` (h, w) in pixels.

        Raises:
            SampleError: it cannot be read.
        """
        return self._read_meta(self._position(self._index(i)))

    # One sample

    def __getitem__(self, i: SupportsIndex) -> SampleDict:
        return to_tensors(self.load(i))

    def __getitems__(self, indices: Sequence[SupportsIndex]) -> list[SampleDict]:
        """Several samples at once, as torch's DataLoader asks for them."""
        return [to_tensors(self.load(i)) for i in indices]

    def load(self, i: SupportsIndex, epoch: int | None = None) -> SampleDict:
        """Sample `i` as numpy: what ``ds[i]`` is made of, after the transform, before tensors are made.

        `image` is [H, W, 3]; in the memmap layout without a transform it is the map itself. `epoch` keys the transform's randomness;
        None takes the data set's own.

        Raises:
            IndexError: out of range.
            SampleError: it cannot be read, under ``on_error="raise"`` or when no replacement is good either.
        """
        index, image = self._with_replacement(self._index(i), lambda j: self._read_image(self._position(j)))
        return self.finish(index, image, epoch)

    def finish(self, index: int, image: NDArray[Any], epoch: int | None = None) -> SampleDict:
        """The second half of `load`: a decoded image [H, W, 3] to a whole, transformed sample. `index` must be in range."""
        position = self._position(index)
        sample: SampleDict = {"image": image}
        if self.task == "classification":
            sample["label"] = int(self._samples["label"][position])
        elif self._boxes is not None and self._box_labels is not None and self._difficult is not None and self._offsets is not None:
            rows = slice(int(self._offsets[position]), int(self._offsets[position + 1]))
            sample["boxes"] = self._boxes[rows].copy()
            sample["labels"] = self._box_labels[rows].copy()
            sample["difficult"] = self._difficult[rows].copy()
        sample["key"] = int(self._samples["key"][position])
        sample["index"] = index
        if self.transform is None:
            return sample
        epoch = self.epoch if epoch is None else epoch
        sample["image"] = self._private(image)
        where = f"sample {index} (key {sample['key']:09d}) of {self.root}, split {self.split!r}, epoch {epoch}"
        with self._random.generator(self.seed, epoch, index) as rng:
            return transformed(self.transform, sample, rng, where)

    # Many samples: the seam for BatchLoader

    def image_size(self) -> tuple[int, int] | None:
        """(h, w) in pixels when all images have one size, else None. Looks at all samples once, vectorised."""
        if self._image_size == "unknown":
            rows: Any = slice(None) if self._selection is None else self._selection
            sizes = [self._samples[name][rows] for name in ("height", "width")]
            one = len(self) > 0 and all(int(values.min()) == int(values.max()) for values in sizes)
            self._image_size = (int(sizes[0][0]), int(sizes[1][0])) if one else None
        return self._image_size

    def batch_fields(self) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
        """Per-sample shape and dtype of the fields that `gather` fills.

        `image` ((H, W, 3), uint8 or the memmap's dtype) only where all images have one size; `label` for classification.
        """
        size, int64 = self.image_size(), np.dtype(np.int64)
        fields: dict[str, tuple[tuple[int, ...], np.dtype[Any]]] = {}
        if size is not None:
            fields["image"] = ((*size, 3), self._image_dtype)
        if self.task == "classification":
            fields["label"] = ((), int64)
        return {**fields, "key": ((), int64), "index": ((), int64)}

    def gather(self, indices: ArrayLike, out: dict[str, NDArray[Any]]) -> NDArray[np.int64]:
        """Fill ``out[name][:B]`` with the samples `indices` (int64 [B], 0-based), in place, for the names in `out`, untransformed.

        `out`: C-contiguous arrays [>= B, ...] of `batch_fields`' shapes and dtypes. Sort the indices by stored position where you can:
        then each shard is gathered by one call.

        Returns:
            int64 [B]: the indices really there, which differ from `indices` where ``on_error="replace"`` replaced a damaged sample.
            Give these to `gather_ragged`.

        Raises:
            IndexError: an index out of range; nothing was written.
            SampleError: as `load`.
        """
        used = self._checked(indices)
        count = len(used)
        if "image" in out:
            if len(out["image"]) < count or not out["image"].flags.c_contiguous:
                raise ValueError(f"out['image'] has shape {out['image'].shape}, expected at least {count} C-contiguous slots")
            self._gather_images(used, out["image"][:count])
        positions = self._positions(used)
        if "label" in out:
            out["label"][:count] = self._samples["label"][positions]
        if "key" in out:
            out["key"][:count] = self._samples["key"][positions]
        if "index" in out:
            out["index"][:count] = used
        return used

    def gather_ragged(self, indices: ArrayLike) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.uint8], NDArray[np.int64]]:
        """Boxes of several samples by one CSR take: `boxes` float32 [T, 4], `labels` int64 [T], `difficult` uint8 [T], `offsets` int64
        [B+1]: sample j of the batch has rows ``offsets[j]:offsets[j+1]``.

        Raises:
            ValueError: the data set has no boxes.
            IndexError: an index out of range.
        """
        if self._boxes is None or self._box_labels is None or self._difficult is None or self._offsets is None:
            raise ValueError(f"{self.root}: task is {self.task!r}: it has no boxes")
        positions = self._positions(self._checked(indices))
        starts = self._offsets[positions]
        offsets = np.zeros(len(positions) + 1, np.int64)
        np.cumsum(self._offsets[positions + 1] - starts, out=offsets[1:])
        rows = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], np.diff(offsets))
        return self._boxes[rows], self._box_labels[rows], self._difficult[rows], offsets

    # Indices, errors

    def _index(self, i: SupportsIndex) -> int:
        index, count = operator.index(i), len(self)
        if not -count <= index < count:
            raise IndexError(f"index {index} is out of range: split {self.split!r} has {count} samples")
        return index % count

    def _checked(self, indices: ArrayLike) -> NDArray[np.int64]:
        """A private int64 [B] copy of `indices`, in range and not negative."""
        raw = np.asarray(indices)
        if raw.ndim != 1 or (raw.dtype.kind not in "iu" and raw.size):
            raise ValueError(f"indices have dtype {raw.dtype} and shape {raw.shape}, expected one dimension of ints")
        result, count = raw.astype(np.int64), len(self)
        if result.size:
            low, high = int(result.min()), int(result.max())
            if low < -count or high >= count:
                raise IndexError(f"index {low if low < -count else high} is out of range: split {self.split!r} has {count} samples")
            if low < 0:
                result[result < 0] += count
        return result

    def _position(self, index: int) -> int:
        return index if self._selection is None else int(self._selection[index])

    def _positions(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        return indices if self._selection is None else self._selection[indices]

    @property
    def num_shards(self) -> int:
        """Shards of the split."""
        return len(self._shard_paths)

    def _shard_of(self, position: int) -> int:
        return int(self._shard_starts.searchsorted(position, "right")) - 1

    def _shard_path(self, shard: int) -> Path:
        return self.root / str(self._shard_paths[shard], "utf-8")

    def _error(self, position: int, reason: object) -> SampleError:
        try:
            source = str(self._read_meta(position)["source"])
        except SampleError:
            source = "unknown: its metadata cannot be read either"
        return self._sample_error(position, source, reason)

    def _sample_error(self, position: int, source: str, reason: object) -> SampleError:
        key = int(self._samples["key"][position])
        return SampleError(
            f"{self._shard_path(self._shard_of(position))}: sample {key:09d} (source {source}): {reason}. `pack verify {self.root}` lists "
            'everything that is damaged, the `pack build` command that made it repairs it; on_error="replace" goes on with other samples'
        )

    def _with_replacement(self, index: int, read: Callable[[int], T]) -> tuple[int, T]:
        """`read(index)`, or of the next good sample under ``on_error="replace"``; with the index that was read."""
        try:
            return index, read(index)
        except SampleError as error:
            if self.on_error == "raise":
                raise
            first = error
        for offset in REPLACEMENT_OFFSETS:
            if offset >= len(self):
                break
            other = (index + offset) % len(self)
            try:
                result = read(other)
            except SampleError:
                continue
            self._count_replacement(index, other, first)
            return other, result
        raise SampleError(f"{first}. No other sample that was tried in its place can be read either")

    def _count_replacement(self, index: int, other: int, error: SampleError) -> None:
        with self._shards.lock:
            self._num_replaced += 1
            first = self._num_replaced == 1
        if first:
            warnings.warn(
                f"sample {index} was replaced by sample {other}; further ones are counted in num_replaced only: {error}",
                stacklevel=2,
            )

    # What a layout adds

    @abstractmethod
    def _read_image(self, position: int) -> NDArray[Any]:
        """The image [H, W, 3] at a stored position, or SampleError."""

    @abstractmethod
    def _private(self, image: NDArray[Any]) -> NDArray[Any]:
        """`image` as memory that a transform may change."""

    @abstractmethod
    def _gather_images(self, used: NDArray[np.int64], out: NDArray[Any]) -> None:
        """Fill ``out[j]`` with the image of sample ``used[j]``; where another one is put in its place, ``used[j]`` becomes its index."""

    @abstractmethod
    def _read_meta(self, position: int) -> dict[str, Any]:
        """See `meta`."""


def share_epoch(epoch: torch.Tensor) -> torch.Tensor:
    """An epoch counter (int64 [1]) in memory that worker processes share, however they are started."""
    if not epoch.is_shared():  # type: ignore[no-untyped-call]  # torch gives these two no types
        epoch.share_memory_()  # type: ignore[no-untyped-call]
    return epoch


def transformed(transform: Transform, sample: SampleDict, rng: np.random.Generator, where: str) -> SampleDict:
    """`transform(sample, rng)`; an exception in it says where it happened.

    Raises:
        TypeError: it returned no dict.
    """
    try:
        result = transform(sample, rng)
    except Exception as e:
        e.add_note(f"in the transform of {where}")
        raise
    if not isinstance(result, dict):
        raise TypeError(f"the transform of {where} returned {type(result).__name__}, expected the sample dict")
    return result


def to_tensors(sample: SampleDict) -> SampleDict:
    """Numpy arrays of a sample to tensors that share their memory where they can; an `image` [H, W, C] to a view [C, H, W]."""
    return {name: _tensor(name, value) for name, value in sample.items()}


def _tensor(name: str, value: Any) -> Any:
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "biufc":
        return value
    if not value.flags.writeable or any(stride < 0 for stride in value.strides) or not value.dtype.isnative:
        # torch has no negative strides and no read-only tensors: a flipped or borrowed array is copied.
        value = value.astype(value.dtype.newbyteorder("="), copy=True, order="C")
    tensor = torch.from_numpy(value)
    return tensor.permute(2, 0, 1) if name == "image" and tensor.ndim == 3 else tensor
