"""`Tiles`: a data set of windows that slide over the pictures of another one. Import it from `loaders.augment`."""

from __future__ import annotations

import hashlib
import operator
import threading
from collections.abc import Sequence
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch.utils.data import Dataset

from loaders.boxes import clip_boxes
from loaders.dataset import PackedDataset, to_tensors
from loaders.format import Task
from loaders.regions import Region, SampleDict, Size, View, show
from loaders.split import Ragged


class Tiles(Dataset[SampleDict]):
    """Windows of `size` over all pictures of `ds`, row by row, without chance: for evaluation on large pictures. Map-style.

    Neighbours share `overlap` pixels; the last window of a row or column ends at the picture's edge, and overlaps more. A picture smaller
    than `size` gives one window, filled up with `fill` on the right and below. ``tiles[i]`` is a sample as `ds` gives it: `image`
    [3, *size], `boxes` of the window (clipped; dropped where less than `min_visible` of the area is inside), `key` of the picture, `index`
    i, and

    - `picture`: index of the picture in `ds`,
    - `offset`: int64 [2], (y, x) of the window in it.

    What a model finds in a window lies in the picture at ``boxes + [x, y, x, y]``. For `BatchLoader` (``shuffle=False, remainder="pad"``
    keeps order and shows every window once) and torch's DataLoader.

    Args:
        ds: `ShardDataset` or `MemmapDataset` without a transform.
        size: (height, width) of a window in pixels, or one number for both.
        overlap: pixels, (down, across), or one number for both; smaller than `size`.

    Raises:
        ValueError: `ds` has a transform, or size and overlap do not fit.
        SampleError: (of samples) a picture cannot be read. It is not replaced, whatever `ds` is told.
    """

    transform = None

    def __init__(self, ds: PackedDataset, size: int | Size, overlap: int | Size = 0, *, min_visible: float = 0.1, fill: int = 114) -> None:
        if ds.transform is not None:
            raise ValueError("ds has a transform; windows are cut from stored pictures: open it without one")
        self.ds, self.min_visible, self.fill = ds, min_visible, fill
        self.size = (size, size) if isinstance(size, int) else size
        self.overlap = (overlap, overlap) if isinstance(overlap, int) else overlap
        if not all(0 <= o < s for s, o in zip(self.size, self.overlap, strict=True)):
            raise ValueError(f"size is {size} and overlap is {overlap}, expected 0 <= overlap < size")
        self._count()

    def _count(self) -> None:
        free = np.maximum(self.ds.image_sizes() - self.size, 0)
        self._step = np.subtract(self.size, self.overlap)
        self._grid: NDArray[np.int64] = -(-free // self._step) + 1  # windows down and across, [N, 2]
        self._starts = np.concatenate((np.zeros(1, np.int64), np.cumsum(self._grid.prod(axis=1))))
        self._local = threading.local()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_step", "_grid", "_starts", "_local")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._count()

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __repr__(self) -> str:
        return f"Tiles({self.ds!r}, size={self.size}, overlap={self.overlap}): {len(self)} windows"

    @property
    def task(self) -> Task:
        """As `ds` has it."""
        return self.ds.task

    @property
    def classes(self) -> list[str]:
        """As `ds` has them."""
        return self.ds.classes

    @property
    def fingerprint(self) -> str:
        """Hex SHA-256: equal means the same windows under the same indices."""
        return hashlib.sha256(f"{self.ds.fingerprint} tiles {self.size} {self.overlap}".encode()).hexdigest()

    def places(self, indices: ArrayLike) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Where windows lie: index of the picture in `ds`, int64 [B], and (y, x) in it, int64 [B, 2].

        Raises:
            IndexError: an index is out of range. Negative ones count from the end.
        """
        chosen = np.asarray(indices, np.int64)
        count = len(self)
        if chosen.size and not -count <= chosen.min() <= chosen.max() < count:
            raise IndexError(f"indices {chosen.min()} to {chosen.max()} are out of range: there are {count} windows")
        chosen = np.where(chosen < 0, chosen + count, chosen)
        pictures = self._starts.searchsorted(chosen, "right") - 1
        within = chosen - self._starts[pictures]
        down, across = np.divmod(within, self._grid[pictures, 1])
        free = np.maximum(self.ds.image_sizes()[pictures] - self.size, 0)
        return pictures, np.minimum(np.stack((down, across), axis=1) * self._step, free)

    def __getitem__(self, i: SupportsIndex) -> SampleDict:
        return to_tensors(self.load(i))

    def __getitems__(self, indices: Sequence[SupportsIndex]) -> list[SampleDict]:
        """Several windows at once, as torch's DataLoader asks for them."""
        return [to_tensors(self.load(i)) for i in indices]

    def load(self, i: SupportsIndex, epoch: int | None = None) -> SampleDict:
        """Window `i` as numpy. `epoch` changes nothing."""
        del epoch
        index = operator.index(i)
        pictures, offsets = self.places([index])
        image: NDArray[Any] = np.empty((*self.size, 3), self.ds.image_dtype)
        sample = self._read(int(pictures[0]), offsets[0], image)
        if "boxes" in sample:
            sample.update(clip_boxes(sample["boxes"], self.size, self.min_visible).fields(sample))
        return {**sample, "index": index % len(self), "picture": int(pictures[0]), "offset": offsets[0]}

    def _read(self, picture: int, offset: NDArray[np.int64], out: NDArray[Any]) -> SampleDict:
        """Fill `out` with a window's pixels; the rest of its picture's sample, with boxes moved."""
        y, x = offset.tolist()
        height, width = self.ds.image_sizes()[picture].tolist()
        h, w = min(self.size[0], height), min(self.size[1], width)
        sample = self._whole_or_part(picture, (y, x, h, w))
        out[:h, :w] = sample["image"]
        out[h:], out[:h, w:] = self.fill, self.fill
        return {**sample, "image": out}

    def _whole_or_part(self, picture: int, region: Region) -> SampleDict:
        """`ds.load_region`; a picture that must be decoded as a whole is kept by the thread until it comes to another one."""
        if self.ds.reads_regions(picture):
            return self.ds.load_region(picture, region)
        kept = self._local.__dict__.get("picture")
        if kept is None or kept["index"] != picture:
            height, width = self.ds.image_sizes()[picture].tolist()
            kept = self._local.picture = self.ds.load_region(picture, (0, 0, height, width))
        y, x, h, w = region
        fields = {name: value for name, value in kept.items() if name != "image"}
        return show(fields, View(kept["image"][y : y + h, x : x + w], y, x, 1))

    # What `BatchLoader` asks for

    def batch_fields(self) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
        """Per-window shape and dtype of the fields that `gather` fills."""
        int64 = np.dtype(np.int64)
        fields: dict[str, tuple[tuple[int, ...], np.dtype[Any]]] = {"image": ((*self.size, 3), self.ds.image_dtype)}
        if self.task == "classification":
            fields["label"] = ((), int64)
        return {**fields, "key": ((), int64), "index": ((), int64), "picture": ((), int64), "offset": ((2,), int64)}

    def gather(self, indices: ArrayLike, out: dict[str, NDArray[Any]]) -> NDArray[np.int64]:
        """Fill ``out[name][:B]`` with the windows `indices`, see `PackedDataset.gather`."""
        chosen = np.asarray(indices, np.int64) % len(self)
        pictures, offsets = self.places(indices)
        values: dict[str, NDArray[np.int64]] = {"index": chosen, "picture": pictures, "offset": offsets}
        for j, picture in enumerate(pictures.tolist()):
            sample = self._read(picture, offsets[j], out["image"][j])
            for name in ("label", "key"):
                if name in out:
                    out[name][j] = sample[name]
        for name, value in values.items():
            if name in out:
                out[name][: len(chosen)] = value
        return chosen

    def gather_ragged(self, indices: ArrayLike) -> Ragged:
        """Boxes of several windows, see `PackedDataset.gather_ragged`."""
        pictures, places = self.places(indices)
        boxes, labels, difficult, offsets = self.ds.gather_ragged(pictures)
        moves = np.repeat(places[:, ::-1], np.diff(offsets), axis=0)
        kept, keep = clip_boxes(boxes - np.tile(moves, 2).astype(np.float32), self.size, self.min_visible)
        before: NDArray[np.int64] = np.concatenate((np.zeros(1, np.int64), np.cumsum(keep)))
        return kept.astype(np.float32), labels[keep], difficult[keep], before[offsets]
