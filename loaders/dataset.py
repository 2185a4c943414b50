"""What `ShardDataset` and `MemmapDataset` share: samples by number, selections, keyed randomness, replacement, pickling.

A data set holds numpy arrays only (forked workers share their pages), opens in O(1) for any number of samples, opens shards when first
needed, and is pickled as a path plus options. *Position* is a sample's place in the stored split; *index* is its place in the data set
object in hand. The two differ in a data set made by `PackedDataset.select`.
"""

from __future__ import annotations

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

from loaders.format import FormatError, Layout, Task
from loaders.handles import ProcessCache, max_open_shards
from loaders.keyed import KeyedRandom, rekey
from loaders.regions import Region, SampleDict, Size, Transform, View, ask_region, call, least_size, show
from loaders.scratch import Scratch
from loaders.split import Ragged, SplitIndex

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
            not be kept after the call. Numpy arrays in the result become tensors, anything else is passed through. A transform that has
            `region` or `size` is given part of the picture, which costs less to read and decode: see `loaders.regions`.
        seed: of the transform's randomness.
        on_error: "raise" raises `SampleError` for a damaged sample; "replace" gives the next good one in its place (with its own `key`
            and `index`), counts it in `num_replaced` and warns once.
        check_crc: compare every image with the CRC-32 in the index (tar layout only); then all its bytes are read, also for a region.

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
        self._share_epoch(torch.zeros(1, dtype=torch.int64))
        self._open(None)

    def _open(self, selection: NDArray[np.int64] | None) -> None:
        self._index = SplitIndex(self.root, self.split, self.layout, selection)
        self._shards: ProcessCache[Any] = ProcessCache(max_open_shards())
        self._random = KeyedRandom()
        self._local = threading.local()
        self._scratch = Scratch()
        self._num_replaced = 0

    # Pickling: a path and options. The arrays are mapped again on the other side.

    def __getstate__(self) -> dict[str, Any]:
        names = ("root", "split", "transform", "seed", "on_error", "check_crc", "_epoch")
        index = self._index
        return {**{name: self.__dict__[name] for name in names}, "selection": index.selection, "manifest_sha256": index.manifest_sha256}

    def __setstate__(self, state: dict[str, Any]) -> None:
        selection, manifest_sha256 = state.pop("selection"), state.pop("manifest_sha256")
        self.__dict__.update(state)
        self._share_epoch(self._epoch)
        self._open(selection)
        if self._index.manifest_sha256 != manifest_sha256:
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
        return len(self._index)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.root)!r}, split={self.split!r}): {len(self)} samples, {self.task}"

    @property
    def task(self) -> Task:
        """ "classification", "detection" or "unlabelled"."""
        return self._index.task

    @property
    def classes(self) -> list[str]:
        """Class names; a class id is a position in it."""
        return self._index.classes

    @property
    def labels(self) -> NDArray[np.int64] | None:
        """Class ids: int64 [N]; detection int64 [M], sample i has rows ``box_offsets[i]:box_offsets[i+1]``; unlabelled None."""
        return self._index.labels

    @property
    def box_offsets(self) -> NDArray[np.int64] | None:
        """Detection: int64 [N+1], see `labels`; else None."""
        return self._index.box_offsets

    @property
    def fingerprint(self) -> str:
        """Hex SHA-256 over the manifest, the split and the selection: equal means the same samples under the same indices."""
        return self._index.fingerprint

    @property
    def num_replaced(self) -> int:
        """Damaged samples that ``on_error="replace"`` replaced so far in this process."""
        return self._num_replaced

    def select(self, indices: ArrayLike) -> Self:
        """A data set of the same type with these samples, in this order; for folds and subsets.

        `indices`: 0-based ints of this data set (negative ones count from the end, repeats are allowed), or bool [N]. A selected data
        set is pickled with its positions, 8 bytes a sample.
        """
        index = self._index.select(indices)
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__, _index=index, _num_replaced=0)
        return other

    def meta(self, i: SupportsIndex) -> dict[str, Any]:
        """Where sample `i` comes from: `source` (path below the source root), `affine` (sx, sy, tx, ty floats; stored = original * s + t),
        `original_size` (h, w) in pixels.

        Raises:
            SampleError: it cannot be read.
        """
        return self._read_meta(self._index.position(self._index.index(i)))

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
        index = self._index.index(i)
        if self.transform is None:
            index, image = self._with_replacement(index, lambda j: self._read_image(self._index.position(j)))
            return {"image": image, **self._fields(index)}
        return self._transformed(self.transform, index, epoch, self._read_view)

    def load_region(self, i: SupportsIndex, region: Region) -> SampleDict:
        """Part of sample `i` as numpy, untransformed: `image` [h, w, 3] (private) of the region (y, x, height, width), 0-based pixels
        inside the picture; `boxes` moved along, neither clipped nor dropped.

        Raises:
            IndexError: out of range.
            ValueError: the region is empty or leaves the picture.
            SampleError: it cannot be read; never replaced, since another picture has other regions.
        """
        index = self._index.index(i)
        position = self._index.position(index)
        y, x, h, w = region
        height, width = self._size(position)
        if not (0 <= y < y + h <= height and 0 <= x < x + w <= width):
            raise ValueError(f"region (y, x, height, width) {region} is empty or leaves {self._name(index)} of {(height, width)}")
        view = self._read_view(position, region, None)
        return show(self._fields(index), View(np.array(view.image), view.y, view.x, view.scale))

    def _fields(self, index: int) -> SampleDict:
        """Everything but the image."""
        position = self._index.position(index)
        return {**self._index.annotation(position), "key": int(self._index.samples["key"][position]), "index": index}

    def _size(self, position: int) -> tuple[int, int]:
        row = self._index.samples[position]
        return int(row["height"]), int(row["width"])

    def _name(self, index: int) -> str:
        key = int(self._index.samples["key"][self._index.position(index)])
        return f"sample {index} (key {key:09d}) of {self.root}, split {self.split!r}"

    def _transformed(
        self, transform: Transform, index: int, epoch: int | None, read: Callable[[int, Region, Size | None], View]
    ) -> SampleDict:
        """Ask for the region, read it by ``read(position, region, least size)``, transform it; all with one generator."""
        epoch = self.epoch if epoch is None else epoch

        def view(rng: np.random.Generator, j: int) -> tuple[SampleDict, View]:
            if j != index:
                assert isinstance(rng.bit_generator, np.random.Philox)
                rekey(rng.bit_generator, self.seed, epoch, j)
            position, fields = self._index.position(j), self._fields(j)
            region = ask_region(transform, fields, *self._size(position), rng, lambda: f"{self._name(j)}, epoch {epoch}")
            return fields, read(position, region, least_size(transform, region))

        with self._random.generator(self.seed, epoch, index) as rng:
            used, (fields, seen) = self._with_replacement(index, lambda j: view(rng, j))
            private = View(self._private(seen.image), seen.y, seen.x, seen.scale)
            return call(transform, fields, private, rng, lambda: f"{self._name(used)}, epoch {epoch}")

    # Many samples: the seam for BatchLoader

    def image_size(self) -> tuple[int, int] | None:
        """(h, w) in pixels when all images have one size, else None. Looks at all samples once, vectorised."""
        return self._index.image_size

    def image_sizes(self) -> NDArray[np.int64]:
        """(h, w) of each image in pixels, int64 [N, 2]."""
        return self._index.sizes

    @property
    def image_dtype(self) -> np.dtype[Any]:
        """Of stored images: uint8, or what the memmap was packed with."""
        return self._index.image_dtype

    def reads_regions(self, i: SupportsIndex) -> bool:
        """Whether `load_region` of sample `i` costs only what the region does; else the image is decoded as a whole."""
        return self._reads_regions(self._index.position(self._index.index(i)))

    def batch_fields(self) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
        """Per-sample shape and dtype of the fields that `gather` fills.

        `image` ((H, W, 3), uint8 or the memmap's dtype) only where all images have one size; `label` for classification.
        """
        size, int64 = self.image_size(), np.dtype(np.int64)
        fields: dict[str, tuple[tuple[int, ...], np.dtype[Any]]] = {}
        if size is not None:
            fields["image"] = ((*size, 3), self._index.image_dtype)
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
        used = self._index.checked(indices)
        count = len(used)
        if "image" in out:
            if len(out["image"]) < count or not out["image"].flags.c_contiguous:
                raise ValueError(f"out['image'] has shape {out['image'].shape}, expected at least {count} C-contiguous slots")
            self._gather_images(used, out["image"][:count])
        positions = self._index.positions(used)
        if "label" in out:
            out["label"][:count] = self._index.samples["label"][positions]
        if "key" in out:
            out["key"][:count] = self._index.samples["key"][positions]
        if "index" in out:
            out["index"][:count] = used
        return used

    def gather_ragged(self, indices: ArrayLike) -> Ragged:
        """Boxes of several samples by one CSR take: `boxes` float32 [T, 4], `labels` int64 [T], `difficult` uint8 [T], `offsets` int64
        [B+1]: sample j of the batch has rows ``offsets[j]:offsets[j+1]``.

        Raises:
            ValueError: the data set has no boxes.
            IndexError: an index out of range.
        """
        return self._index.ragged(indices)

    # Errors

    def _error(self, position: int, reason: object) -> SampleError:
        try:
            source = str(self._read_meta(position)["source"])
        except SampleError:
            source = "unknown: its metadata cannot be read either"
        return self._sample_error(position, source, reason)

    def _sample_error(self, position: int, source: str, reason: object) -> SampleError:
        key = int(self._index.samples["key"][position])
        shard = self._index.shard_path(self._index.shard_of(position))
        return SampleError(
            f"{shard}: sample {key:09d} (source {source}): {reason}. `pack verify {self.root}` lists everything that is damaged, the "
            '`pack build` command that made it repairs it; on_error="replace" goes on with other samples'
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
    def _read_view(self, position: int, region: Region, size: Size | None) -> View:
        """A region (inside the picture) of the image at a stored position, scaled down at most to `size` where that saves work; or
        SampleError. The image may be memory of this thread's `Scratch`."""

    @abstractmethod
    def _reads_regions(self, position: int) -> bool:
        """See `reads_regions`."""

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


def to_tensors(sample: SampleDict) -> SampleDict:
    """Numpy arrays of a sample to tensors that share their memory where they can; an `image` [H, W, C] to a view [C, H, W]."""
    return {name: _tensor(name, value) for name, value in sample.items()}


def _tensor(name: str, value: Any) -> Any:
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "biufc":
        return value
    if not value.flags.writeable or min(value.strides, default=0) < 0 or not value.dtype.isnative:
        # torch has no negative strides and no read-only tensors: a flipped or borrowed array is copied.
        value = value.astype(value.dtype.newbyteorder("="), copy=True, order="C")
    tensor = torch.from_numpy(value)
    return tensor.permute(2, 0, 1) if name == "image" and tensor.ndim == 3 else tensor
