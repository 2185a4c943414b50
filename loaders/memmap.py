"""`MemmapDataset`: samples of the memmap layout, without decoding and without copies."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from loaders.dataset import OnError, PackedDataset
from loaders.format import FormatError, Layout, open_array
from loaders.regions import Region, Size, Transform, View

_META_FILES = ("affine.npy", "original_size.npy", "source.npy")


class _Images(NamedTuple):
    """A shard's images [N, H, W, 3], and the same memory as a torch tensor with one row a sample, for `index_select`."""

    array: NDArray[Any]
    rows: torch.Tensor


class MemmapDataset(PackedDataset):
    """One split of memmap shards, by sample number. See `PackedDataset` for arguments, samples and errors.

    `image` shares memory with the map: a view [3, H, W] of the stored [H, W, 3] uint8, float16 or float32, nothing is copied. It may be
    written to, and the file never changes, since the pages are private to the process and copied when first written. But the next
    read of the same sample in this process sees the change, for as long as its shard stays open: clone before changing in place.
    A `transform` gets a copy and may change it freely.

    A shard's size is compared with the manifest when it is opened. A file that is cut short *after* that cannot be noticed in time: the
    operating system ends a process that touches the missing pages (SIGBUS). Never overwrite packed data in place while it is in use.

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

    def _images(self, shard: int) -> _Images:
        """Raises FormatError where the shard cannot be mapped."""
        images: _Images = self._shards.get(shard, lambda: self._open_images(shard))
        return images

    def _open_images(self, shard: int) -> _Images:
        path = self._index.shard_path(shard) / "image.npy"
        try:
            size = path.stat().st_size
            if size != self._index.image_bytes[shard]:
                raise FormatError(f"{path}: {size} bytes, the manifest says {self._index.image_bytes[shard]}: it was cut short or replaced")
            array = np.asarray(np.load(path, mmap_mode="c", allow_pickle=False))
        except FileNotFoundError:
            raise FormatError(f"{path}: not found") from None
        except (OSError, ValueError, SyntaxError, OverflowError) as e:
            raise e if isinstance(e, FormatError) else FormatError(f"{path}: cannot be mapped: {e}") from None
        count = len(self._index.shard_range(shard))
        if array.ndim != 4 or array.shape[0] != count or array.shape[3] != 3 or array.dtype not in (np.uint8, np.float16, np.float32):
            raise FormatError(f"{path}: {array.dtype} {array.shape}, expected uint8, float16 or float32 ({count}, height, width, 3)")
        return _Images(array, torch.from_numpy(array.reshape(count, math.prod(array.shape[1:]))))

    def _read_image(self, position: int) -> NDArray[Any]:
        shard = self._index.shard_of(position)
        try:
            image: NDArray[Any] = self._images(shard).array[position - self._index.shard_range(shard).start]
        except FormatError as e:
            raise self._error(position, e) from None
        return image

    def _read_view(self, position: int, region: Region, size: Size | None) -> View:
        del size  # the pixels are there: nothing is saved by taking fewer
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
        positions = self._index.positions(used)
        shards = self._index.shard_starts.searchsorted(positions, "right") - 1
        bounds = [0, *(np.flatnonzero(np.diff(shards)) + 1).tolist(), len(used)] if len(used) else [0]
        for first, last in pairwise(bounds):
            shard = int(shards[first])
            try:
                images = self._images(shard)
            except FormatError:
                for j in range(first, last):
                    used[j], image = self._with_replacement(int(used[j]), lambda i: self._read_image(self._index.position(i)))
                    out[j] = image
                continue
            if out.shape[1:] != images.array.shape[1:] or out.dtype != images.array.dtype:
                expected, found = (images.array.dtype, images.array.shape[1:]), (out.dtype, out.shape[1:])
                raise ValueError(f"the images of {self._index.shard_path(shard)} are {expected}, the slots of out['image'] are {found}")
            rows = torch.from_numpy(positions[first:last] - self._index.shard_starts[shard])
            torch.index_select(images.rows, 0, rows, out=torch.from_numpy(out[first:last].reshape(last - first, images.rows.shape[1])))

    def _read_meta(self, position: int) -> dict[str, Any]:
        shard = self._index.shard_of(position)
        row = position - self._index.shard_range(shard).start
        try:
            affine, size, source = self._shards.get((shard, "meta"), lambda: self._open_meta(shard))
            return {
                "source": bytes(source[row]).decode(),
                "affine": tuple(float(v) for v in affine[row]),
                "original_size": (int(size[row, 0]), int(size[row, 1])),
            }
        except (FormatError, UnicodeDecodeError) as e:
            raise self._sample_error(position, "unknown", e) from None

    def _open_meta(self, shard: int) -> tuple[NDArray[Any], ...]:
        folder = self._index.shard_path(shard)
        count = len(self._index.shard_range(shard))
        arrays = tuple(np.asarray(open_array(folder / name)) for name in _META_FILES)
        for name, array, shape in zip(_META_FILES, arrays, ((count, 4), (count, 2), (count,)), strict=True):
            if array.shape != shape:
                raise FormatError(f"{folder / name}: shape {array.shape}, expected {shape}")
        return arrays
