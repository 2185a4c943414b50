"""`MemmapDataset`: samples of the memmap layout, without decoding and without copies."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from loaders.dataset import PackedDataset, SampleError, Wanted
from loaders.faults import OnError
from loaders.format import FormatError, Layout, open_array
from loaders.handles import MapWatch, OpenFile, is_shortage, shortage
from loaders.joined import MappedRows, RowKind
from loaders.npy import read_header
from loaders.regions import Region, Transform, View

BATCHES_AT_ONCE = 16
BYTES_AT_ONCE = 16 << 20
ROWS_A_SHARD = 8
"""Where a batch has fewer from each shard, most of its time goes into opening and asking them, and it must not wait for other batches."""


class _Images(NamedTuple):
    """A shard's images [N, H, W, 3]. `rows`: an array with one row an image, in which they are from `first` on: that of all shards, or one
    of this shard alone."""

    array: NDArray[Any]
    rows: NDArray[Any]
    first: int
    watch: MapWatch


class _Meta(NamedTuple):
    """Per sample: affine float64 [N, 4], original size (h, w) int32 [N, 2], source as bytes [N]."""

    affine: NDArray[Any]
    original_size: NDArray[Any]
    source: NDArray[Any]
    watch: MapWatch


class _BadShard(Exception):
    """A file of a shard cannot be used; the message says which, and why."""


class MemmapDataset(PackedDataset):
    """One split of memmap shards, by sample number. See `PackedDataset` for arguments, samples and errors.

    `image` shares memory with the map: a view [3, H, W] of the stored [H, W, 3] uint8, float16 or float32, nothing is copied. It may be
    written to, and the file never changes, since the pages are private to the process and copied when first written. But later reads of
    the same sample may see the change, here and in children forked from here: clone before changing in place. A `transform` gets a copy
    and may change it freely. As long as an image is held, its whole data set may stay mapped, also where its files are deleted.

    A shard's size is compared with the manifest when it is opened, and again before each sample and each batch is read: a file that was
    cut short is a `SampleError`. Not if it is cut *while* it is read, or before a sample's view of the map is used: the operating system
    then ends the process (SIGBUS). Never overwrite packed data in place while it is in use; a file that is deleted, or replaced by a
    rename, does no harm.

    Raises:
        ValueError: `check_crc` is set: this layout keeps no checksum per sample (`pack verify` compares whole files).
    """

    layout: ClassVar[Layout] = "memmap"

    def __init__(
        self,
        root: str | Path,
        split: str = "train",
        transform: Transform | None = None,
        seed: int = 0,
        on_error: OnError = "raise",
        check_crc: bool = False,
    ) -> None:
        if check_crc:
            raise ValueError(f"{root}: check_crc: memmaps have no checksum per sample; `pack verify {root}` compares whole files")
        super().__init__(root, split, transform, seed, on_error)

    def _open(self, selection: NDArray[np.int64] | None) -> None:
        super()._open(selection)
        self._rows = MappedRows(self._index.shard_bytes, np.diff(self._index.shard_starts))

    def batches_at_once(self, batch_size: int) -> int:
        """How many batches `BatchLoader` should gather by one call: several, of small pictures from few shards. To find the samples of a
        batch, and to pass it from thread to thread, costs as much as to copy a megabyte."""
        shape, dtype = self.batch_fields()["image"]
        if batch_size < ROWS_A_SHARD * self._index.num_shards:
            return 1
        return max(1, min(BATCHES_AT_ONCE, BYTES_AT_ONCE // (math.prod(shape) * dtype.itemsize * batch_size)))

    def _images(self, shard: int) -> _Images:
        """Raises _BadShard where the shard cannot be mapped, or was cut short since."""
        try:
            images = self._open_shard(shard, lambda: self._open_images(shard))
        except OSError as e:
            raise shortage(e, self._index.shard_path(shard)) from None
        if (changed := images.watch.changed()) is not None:
            raise _BadShard(changed)
        return images

    def _open_images(self, shard: int) -> _Images:
        path, count = self._index.shard_path(shard) / "image.npy", len(self._index.shard_range(shard))
        try:
            file = OpenFile(path)
            if file.size != self._index.shard_bytes[shard]:
                raise _BadShard(
                    f"{path}: {file.size} bytes, the manifest says {self._index.shard_bytes[shard]}: it was cut short or replaced"
                )
            with open(file.fd, "rb", closefd=False) as f:
                shape, dtype, start = read_header(f)
            if len(shape) != 4 or shape[0] != count or shape[3] != 3 or dtype not in (np.uint8, np.float16, np.float32):
                raise _BadShard(f"{path}: {dtype} {shape}, expected uint8, float16 or float32 ({count}, height, width, 3)")
            rows, first, watched = self._rows.map(shard, file, RowKind(math.prod(shape[1:]), dtype, start))
        except FileNotFoundError:
            raise _BadShard(f"{path}: not found") from None
        except OSError as e:
            if is_shortage(e):
                raise
            raise _BadShard(f"{path}: cannot be mapped: {e}") from None
        except ValueError as e:
            raise _BadShard(f"{path}: cannot be mapped: {e}") from None
        return _Images(rows[first : first + count].reshape(shape), rows, first, MapWatch([(path, watched)]))

    def _read_image(self, position: int) -> NDArray[Any]:
        shard = self._index.shard_of(position)
        try:
            image: NDArray[Any] = self._images(shard).array[position - self._index.shard_range(shard).start]
        except _BadShard as e:
            raise self._error(position, e) from None
        return image

    def _begin_views(self, wanted: Sequence[Wanted]) -> list[Callable[[], View] | SampleError]:
        return [partial(self._view, position, region) for position, region, _ in wanted]  # pixels are there: no size saves anything

    def _view(self, position: int, region: Region) -> View:
        image, (y, x, h, w) = self._read_image(position), region
        if image.shape[:2] != self._size(position):
            raise self._error(position, f"the image is (height, width) {image.shape[:2]}, the index says {self._size(position)}")
        return View(image[y : y + h, x : x + w], y, x, 1)

    def _reads_regions(self, position: int) -> bool:
        del position
        return True

    def _private(self, image: NDArray[Any]) -> NDArray[Any]:
        return image.copy()

    def _gather_images(self, used: NDArray[np.int64], out: NDArray[Any]) -> None:
        if not len(used):
            return
        positions = self._index.positions(used)
        shards = self._index.shards_of(positions)
        present = np.flatnonzero(np.bincount(shards))
        joined = self._rows.joined  # None in the first batch, too
        # Of each shard: whether it is no part of `joined`, or cannot be used; and what makes a position a row of the array that it is in.
        alone, shift = np.ones(self._index.num_shards, np.bool_), -self._index.shard_starts[:-1]
        for shard in [] if joined is None else present.tolist():
            images = self._images_for(shard, out)
            if images is not None and images.rows is joined:
                alone[shard] = False
                shift[shard] += images.first
        rows, slots = positions + shift[shards], out.reshape(len(out), -1)
        ends = [len(used)]
        if alone[present].any():
            ends = [*(np.flatnonzero(np.diff(np.where(alone[shards], shards, -1))) + 1).tolist(), len(used)]
        for start, end in pairwise([0, *ends]):
            shard = int(shards[start])
            if joined is not None and not alone[shard]:
                _take(joined, rows[start:end], slots[start:end])
                continue
            images = self._images_for(shard, out)
            if images is not None:
                _take(images.rows, rows[start:end] + images.first, slots[start:end])
                continue
            for j in range(start, end):
                used[j], image = self._with_replacement(int(used[j]), lambda i: self._read_image(self._index.position(i)))
                out[j] = image

    def _images_for(self, shard: int, out: NDArray[Any]) -> _Images | None:
        """A shard's images, which `out` can take; None where the shard cannot be used."""
        try:
            images = self._images(shard)
        except _BadShard:
            return None
        if out.shape[1:] != images.array.shape[1:] or out.dtype != images.array.dtype:
            expected, found = (images.array.dtype, images.array.shape[1:]), (out.dtype, out.shape[1:])
            raise ValueError(f"the images of {self._index.shard_path(shard)} are {expected}, the slots of out['image'] are {found}")
        return images

    def _read_meta(self, position: int) -> dict[str, Any]:
        shard = self._index.shard_of(position)
        row = position - self._index.shard_range(shard).start
        try:
            meta = self._open_shard((shard, "meta"), lambda: self._open_meta(shard))
            if (changed := meta.watch.changed()) is not None:
                raise _BadShard(changed)
            return {
                "source": bytes(meta.source[row]).decode(),
                "affine": tuple(float(v) for v in meta.affine[row]),
                "original_size": (int(meta.original_size[row, 0]), int(meta.original_size[row, 1])),
            }
        except (_BadShard, UnicodeDecodeError) as e:
            raise self._sample_error(position, "unknown", e) from None

    def _open_meta(self, shard: int) -> _Meta:
        folder = self._index.shard_path(shard)
        count = len(self._index.shard_range(shard))
        paths = [folder / name for name in ("affine.npy", "original_size.npy", "source.npy")]
        try:
            arrays = [np.asarray(open_array(path)) for path in paths]
        except FormatError as e:
            raise _BadShard(str(e)) from None
        for path, array, shape in zip(paths, arrays, ((count, 4), (count, 2), (count,)), strict=True):
            if array.shape != shape:
                raise _BadShard(f"{path}: shape {array.shape}, expected {shape}")
        affine, size, source = arrays
        return _Meta(affine, size, source, MapWatch(list(zip(paths, arrays, strict=True))))


def _take(source: NDArray[Any], rows: NDArray[np.int64], out: NDArray[Any]) -> None:
    """``out[:] = source[rows]``, without the GIL."""
    if torch.get_num_threads() > 1 or not source.flags.aligned:  # of what is not aligned, NumPy copies all first
        torch.index_select(torch.from_numpy(source), 0, torch.from_numpy(rows), out=torch.from_numpy(out))
    else:
        # In one thread a third faster, for rows of 150 kB. "clip", since "raise" would fill a copy of `out`; no row is out of range.
        np.take(source, rows, axis=0, out=out, mode="clip")
