"""What `ShardDataset` and `MemmapDataset` share: samples by number, selections, keyed randomness, replacement, pickling.

A data set holds numpy arrays only (forked workers share their pages), opens in O(1) for any number of samples, opens shards when first
needed, and is pickled as a path plus options. *Position* is a sample's place in the stored split; *index* is its place in the data set
object in hand. The two differ in a data set made by `PackedDataset.select`.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self, SupportsIndex, TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch.utils.data import Dataset

from loaders.arguments import folder, function, one_of, whole
from loaders.faults import OnError, Replacements, share
from loaders.faults import SampleError as SampleError
from loaders.format import FormatError, Layout, Task
from loaders.handles import ProcessCache, max_open_shards
from loaders.keyed import KeyedRandom, rekey
from loaders.regions import Region, SampleDict, Size, Transform, View, ask_region, asks, call, least_size, show
from loaders.scratch import Scratch
from loaders.split import Ragged, SplitIndex

T = TypeVar("T")
Wanted = tuple[int, Region, Size | None]
"""A stored position, the region of its picture, and the least (height, width) of that; None: it is not scaled."""
_AHEAD = 16
"""Samples begun before the first is finished, each holding its bytes. Four gain a third of what 16 do."""
_SMALL_AHEAD, _SMALL_PIXELS = 32, 1 << 16
"""Of pictures of 256 x 192, 32 at a time take a tenth less; of 500 x 375, which no longer fit into the caches, 3 % more."""


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
            and `index`, the same in every thread, worker and rank), counts it in `num_replaced` and warns of the first. Only damage is
            replaced: what a transform raises, or a lack of memory or of open files, is raised.
        check_crc: compare every image with the CRC-32 in the index (tar layout only), so that all its bytes are read, also for a region;
            and the index's files with the manifest, once, when the data set is opened.

    Raises:
        FormatError: the folder is no packed data set of this layout, or has no such split; later: the folder now holds another data set,
            or the index was changed while in use. Never replaced.
        TypeError, ValueError: an argument is of another kind, or out of range.

    Safe to use from several threads, and after any error. `epoch` and `num_replaced` are kept in shared memory: `set_epoch` reaches
    DataLoader workers that are already running, and what they replace is counted here.
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
        one_of("on_error", on_error, ("raise", "replace"))
        function("transform", transform, "transform(sample, rng) -> sample")
        self.root = folder("root", root)
        self.split = split
        self.transform = transform
        self.seed = whole("seed", seed)
        self.on_error: OnError = on_error
        self.check_crc = bool(check_crc)
        self._replacements = self._new_replacements()
        self._share_epoch(torch.zeros(1, dtype=torch.int64))
        self._open(None)

    def _new_replacements(self) -> Replacements | None:
        return Replacements() if self.on_error == "replace" else None

    def _open(self, selection: NDArray[np.int64] | None) -> None:
        self._index = SplitIndex(self.root, self.split, self.layout, selection, check=self.check_crc)
        self._shards: ProcessCache[Any] = ProcessCache(max_open_shards())
        self._random = KeyedRandom()
        self._local = threading.local()
        self._scratch = Scratch()

    # Pickling: a path and options. The arrays are mapped again on the other side.

    def __getstate__(self) -> dict[str, Any]:
        names = ("root", "split", "transform", "seed", "on_error", "check_crc", "_epoch", "_replacements")
        index = self._index
        return {**{name: self.__dict__[name] for name in names}, "selection": index.selection, "manifest_sha256": index.manifest_sha256}

    def __setstate__(self, state: dict[str, Any]) -> None:
        selection, manifest_sha256 = state.pop("selection"), state.pop("manifest_sha256")
        self.__dict__.update(state)
        self._share_epoch(self._epoch)
        self._open(selection)
        if self._index.manifest_sha256 != manifest_sha256:
            raise FormatError(self._index.was_replaced)

    # The epoch lives in shared memory: DataLoader workers with persistent_workers=True would never see a plain attribute change.

    def _share_epoch(self, epoch: torch.Tensor) -> None:
        self._epoch = share(epoch)
        self._epoch_array: NDArray[np.int64] = self._epoch.numpy()

    @property
    def epoch(self) -> int:
        """The epoch that keys the transform's randomness."""
        return int(self._epoch_array[0])

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, also for workers that are running; a data set and its selections share it. Warns of what was replaced since."""
        epoch = whole("epoch", epoch, 0)
        if epoch != self.epoch:
            self.report_replaced()
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
        """Damaged samples that ``on_error="replace"`` replaced so far, DataLoader workers included."""
        return 0 if self._replacements is None else self._replacements.total

    def report_replaced(self) -> None:
        """Warn of how many samples were replaced since the last report. `BatchLoader` calls it after each epoch, `set_epoch` too."""
        if self._replacements is not None:
            self._replacements.report(f"{self.root}, split {self.split!r}")

    def select(self, indices: ArrayLike) -> Self:
        """A data set of the same type with these samples, in this order; for folds and subsets.

        `indices`: 0-based ints of this data set (negative ones count from the end, repeats are allowed), or bool [N]. A selected data
        set is pickled with its positions, 8 bytes a sample.
        """
        index = self._index.select(indices)
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__, _index=index, _replacements=self._new_replacements())
        return other

    def meta(self, i: SupportsIndex) -> dict[str, Any]:
        """Where sample `i` comes from: `source` (path below the source root), `affine` (sx, sy, tx, ty floats; stored = original * s + t),
        `original_size` (h, w) in pixels.

        Raises:
            SampleError: it cannot be read.
        """
        self._index.check_maps()
        return self._read_meta(self._index.position(self._index.index(i)))

    # One sample

    def __getitem__(self, i: SupportsIndex) -> SampleDict:
        return to_tensors(self.load(i))

    def __getitems__(self, indices: Sequence[SupportsIndex]) -> list[SampleDict]:
        """Several samples at once, as torch's DataLoader asks for them."""
        return [to_tensors(sample) for sample in self.load_many([(i, None) for i in indices])]

    def load(self, i: SupportsIndex, epoch: int | None = None) -> SampleDict:
        """Sample `i` as numpy: what ``ds[i]`` is made of, after the transform, before tensors are made.

        `image` is [H, W, 3]; in the memmap layout without a transform it is the map itself. `epoch` keys the transform's randomness;
        None takes the data set's own.

        Raises:
            IndexError: out of range.
            SampleError: it cannot be read, under ``on_error="raise"`` or when no replacement is good either.
        """
        index = self._index.index(i)
        self._index.check_maps()
        if self.transform is None:
            index, image = self._with_replacement(index, lambda j: self._read_image(self._index.position(j)))
            return {"image": image, **self._fields(index)}
        return self._transformed(self.transform, index, epoch, self._read_view)

    def load_many(
        self, keys: Sequence[tuple[SupportsIndex, int | None]], out: Callable[[int], NDArray[Any] | None] | None = None
    ) -> Iterator[SampleDict]:
        """`load` of each (index, epoch), in order; with the same results and errors, and faster where a transform has `region` or `size`.

        Those are asked, and bytes are read, for several samples ahead: between two decodes, which fill the processor's caches, that costs
        more than twice what it does in one go (20 % of a crop of a picture of 64 kB).

        `out`: ``out(n)`` is asked for memory for the image of ``keys[n]``, C-contiguous [H, W, C], just before that image is transformed;
        a transform that has `fills_out` may then give that very array as its image.
        """
        transform = self.transform
        if transform is None or not asks(transform):
            yield from (self.load(*key) for key in keys)
            return
        ahead = self._ahead(keys)
        for start in range(0, len(keys), ahead):
            self._index.check_maps()
            generators: list[np.random.Generator] = []
            try:
                begun = self._begun(transform, keys[start : start + ahead], generators)
                begun.reverse()
                while begun:  # each is dropped once it is done
                    number = min(start + ahead, len(keys)) - len(begun)
                    yield begun.pop()(None if out is None else partial(out, number))
            finally:
                self._random.give_back(generators)

    def _ahead(self, keys: Sequence[tuple[SupportsIndex, int | None]]) -> int:
        if len(keys) <= _AHEAD:
            return _AHEAD
        self._index.check_maps()
        height, width = self._size(self._index.position(self._index.index(keys[0][0])))
        return _SMALL_AHEAD if height * width <= _SMALL_PIXELS else _AHEAD

    def _begun(
        self, transform: Transform, keys: Sequence[tuple[SupportsIndex, int | None]], generators: list[np.random.Generator]
    ) -> list[Callable[[Callable[[], NDArray[Any] | None] | None], SampleDict]]:
        """All of `load` but what follows on reading, now; the rest of each when it is called. Generators are added to `generators`."""
        indices = [self._index.index(i) for i, _ in keys]
        positions = [self._index.position(index) for index in indices]
        rows = self._index.rows(positions)
        wanted: list[Wanted] = []
        rest = []
        columns = indices, positions, rows["height"].tolist(), rows["width"].tolist()
        for (_, given), index, position, height, width in zip(keys, *columns, strict=True):
            epoch = self.epoch if given is None else given
            rng = self._random.take(self.seed, epoch, index)
            generators.append(rng)
            fields, where = self._fields(index), partial(self._name, index, epoch)
            region = ask_region(transform, fields, height, width, rng, where)
            wanted.append((position, region, least_size(transform, region)))
            rest.append((index, epoch, rng, fields, where))
        return [partial(self._finish, transform, view, *each) for view, each in zip(self._begin_views(wanted), rest, strict=True)]

    def _finish(
        self,
        transform: Transform,
        view: Callable[[], View] | SampleError,
        index: int,
        epoch: int,
        rng: np.random.Generator,
        fields: SampleDict,
        where: Callable[[], str],
        out: Callable[[], NDArray[Any] | None] | None,
    ) -> SampleDict:
        try:
            seen = _seen(view)
        except SampleError:
            return self.load(index, epoch)  # which replaces it, or says the same again in its place
        return call(transform, fields, View(self._private(seen.image), *seen[1:]), rng, where, out)

    def load_region(self, i: SupportsIndex, region: Region) -> SampleDict:
        """Part of sample `i` as numpy, untransformed: `image` [h, w, 3] (private) of the region (y, x, height, width), 0-based pixels
        inside the picture; `boxes` moved along, neither clipped nor dropped.

        Raises:
            IndexError: out of range.
            ValueError: the region is empty or leaves the picture.
            SampleError: it cannot be read; never replaced, since another picture has other regions.
        """
        index = self._index.index(i)
        self._index.check_maps()
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

    def _name(self, index: int, epoch: int | None = None) -> str:
        key = int(self._index.samples["key"][self._index.position(index)])
        when = "" if epoch is None else f", epoch {epoch}"
        return f"sample {index} (key {key:09d}) of {self.root}, split {self.split!r}{when}"

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
            region = ask_region(transform, fields, *self._size(position), rng, partial(self._name, j, epoch))
            return fields, read(position, region, least_size(transform, region))

        with self._random.generator(self.seed, epoch, index) as rng:
            used, (fields, seen) = self._with_replacement(index, lambda j: view(rng, j))
            private = View(self._private(seen.image), seen.y, seen.x, seen.scale)
            return call(transform, fields, private, rng, partial(self._name, used, epoch))

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
        self._index.check_maps()
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

        `out`: C-contiguous arrays [>= B, ...] of `batch_fields`' shapes and dtypes. Sort the indices by stored position where you can: of a
        memmap each shard is then gathered by one call.

        Returns:
            int64 [B]: the indices really there, which differ from `indices` where ``on_error="replace"`` replaced a damaged sample.
            Give these to `gather_ragged`.

        Raises:
            IndexError: an index out of range; nothing was written.
            SampleError: as `load`.
        """
        used = self._index.checked(indices)
        self._index.check_maps()
        count = len(used)
        if "image" in out:
            if len(out["image"]) < count or not out["image"].flags.c_contiguous:
                raise ValueError(f"out['image'] has shape {out['image'].shape}, expected at least {count} C-contiguous slots")
            self._gather_images(used, out["image"][:count])
        rows = self._index.rows(self._index.positions(used))
        if "label" in out:
            out["label"][:count] = self._index.class_ids(rows)
        if "key" in out:
            out["key"][:count] = rows["key"]
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
        self._index.check_maps()
        return self._index.ragged(indices)

    # Errors

    def _open_shard(self, key: Hashable, make: Callable[[], T]) -> T:
        """A shard's open file or maps, made when first needed: only of the data set that was opened, not of one that replaced it."""

        def opened() -> T:
            self._index.check_manifest()
            return make()

        opened_shard: T = self._shards.get(key, opened)
        return opened_shard

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
            "`pack build` command that made it repairs it"
            + ('; on_error="replace" goes on with other samples' if self._replacements is None else "")
        )

    def _with_replacement(self, index: int, read: Callable[[int], T]) -> tuple[int, T]:
        """`read(index)`, or of the next good sample under ``on_error="replace"``; with the index that was read."""
        if self._replacements is None:
            return index, read(index)
        try:
            return index, read(index)
        except SampleError as error:
            first = error
        return self._replacements.find(index, len(self), read, first)

    # What a layout adds

    @abstractmethod
    def _read_image(self, position: int) -> NDArray[Any]:
        """The image [H, W, 3] at a stored position, or SampleError."""

    @abstractmethod
    def _begin_views(self, wanted: Sequence[Wanted]) -> list[Callable[[], View] | SampleError]:
        """For each region (inside its picture) what gives it, or raises SampleError; or the error that is known by now. Scaled down at most
        to the size given, where that saves work. What is better done for several samples at once is done now. The image may be memory of
        this thread's `Scratch`."""

    def _read_view(self, position: int, region: Region, size: Size | None) -> View:
        [view] = self._begin_views([(position, region, size)])
        return _seen(view)

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


def _seen(view: Callable[[], View] | SampleError) -> View:
    if isinstance(view, SampleError):
        raise view
    return view()


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
