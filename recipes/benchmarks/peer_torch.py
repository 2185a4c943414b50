"""torch's DataLoader, in the forms that people write it: over numpy memmaps, over picture files, over the package's own tar data set."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import cv2
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from augment_plain import decode, letterbox, random_resized_crop
from loaders.collate import collate_list
from loaders.shards import ShardDataset
from protocol import Batch, Epoch, serve


class Memmap(Dataset[tuple[torch.Tensor, int]]):
    """Images and labels of a packed memmap, read with numpy and torch alone; `__getitems__` of the subclass gathers a whole batch."""

    def __init__(self, root: str) -> None:
        folders = sorted(Path(root, "train").glob("shard-*"))
        maps = [np.load(folder / "image.npy", mmap_mode="c") for folder in folders]
        self.starts = np.cumsum([0, *map(len, maps)])
        self.maps = [torch.from_numpy(m) for m in maps]
        self.rows = [torch.from_numpy(m.reshape(len(m), -1)) for m in maps]
        self.labels = torch.from_numpy(np.concatenate([np.load(folder / "label.npy") for folder in folders]))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        shard = int(self.starts.searchsorted(i, "right")) - 1
        return self.maps[shard][i - int(self.starts[shard])], int(self.labels[i])


class MemmapBatches(Memmap):
    def __getitems__(self, indices: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = torch.as_tensor(indices)
        if len(self.maps) == 1:
            images = self.rows[0].index_select(0, chosen)
        else:
            chosen = chosen.sort().values  # the rows of a batch have no order; so each shard is gathered at once
            cuts = np.searchsorted(chosen.numpy(), self.starts)
            images = torch.empty((len(chosen), self.rows[0].shape[1]), dtype=torch.uint8)
            for rows, start, first, last in zip(self.rows, self.starts[:-1].tolist(), cuts[:-1], cuts[1:], strict=True):
                if first < last:
                    torch.index_select(rows, 0, chosen[first:last] - start, out=images[first:last])
        return images.reshape(-1, *self.maps[0].shape[1:]), self.labels.index_select(0, chosen)


class Files(Dataset[tuple[torch.Tensor, int]]):
    """Class folders of JPEGs: read, decode with cv2, then `change`."""

    def __init__(self, root: str, change: Callable[[Any, random.Random], Any]) -> None:
        folders = sorted(Path(root, "train").iterdir())
        self.paths = [(str(path), label) for label, folder in enumerate(folders) for path in sorted(folder.iterdir())]
        self.change = change
        self.rng = random.Random()

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        path, label = self.paths[i]
        return torch.from_numpy(self.change(decode(np.fromfile(path, np.uint8)), self.rng)), label


class Voc(Dataset[dict[str, Any]]):
    """Pascal VOC: read and decode the JPEG, parse the XML, then `change(image, rows, rng)`; rows are float32 [N, 5]: xyxy, class."""

    def __init__(self, root: str, change: Callable[[Any, Any, random.Random], tuple[Any, Any]]) -> None:
        self.paths = sorted(Path(root, "images").iterdir())
        self.folder = Path(root, "annotations")
        self.change = change
        self.classes: dict[str, int] = {}
        self.rng = random.Random()

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, i: int) -> dict[str, Any]:
        path = self.paths[i]
        objects = ElementTree.parse(self.folder / f"{path.stem}.xml").getroot().findall("object")
        corners = ("xmin", "ymin", "xmax", "ymax")
        rows = [
            [
                *(float(o.findtext(f"bndbox/{c}") or "nan") for c in corners),
                self.classes.setdefault(o.findtext("name") or "", len(self.classes)),
            ]
            for o in objects
        ]
        image, boxes = self.change(decode(np.fromfile(path, np.uint8)), np.array(rows, np.float32).reshape(-1, 5), self.rng)
        return {"image": torch.from_numpy(image), "boxes": torch.from_numpy(boxes)}


def _collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
    boxes = [sample["boxes"] for sample in samples]
    place = torch.repeat_interleave(torch.arange(len(boxes)), torch.tensor([len(b) for b in boxes]))
    return {"image": torch.stack([sample["image"] for sample in samples]), "boxes": torch.cat(boxes), "place": place}


def _same(batch: Any) -> Any:
    return batch


def _quiet(_: int) -> None:
    cv2.setNumThreads(0)


def _epochs(ds: Dataset[Any], batch: int, workers: int, collate: Callable[[Any], Any] | None, split: Callable[[Any], Batch]) -> Epoch:
    more: dict[str, Any] = {"persistent_workers": True, "prefetch_factor": 4, "worker_init_fn": _quiet} if workers else {}
    if not workers:
        cv2.setNumThreads(0)
    loader: DataLoader[Any] = DataLoader(ds, batch, shuffle=True, num_workers=workers, collate_fn=collate, drop_last=True, **more)

    def epoch() -> Iterator[Batch]:
        for b in loader:
            yield split(b)

    return epoch


def _pair(batch: Any) -> Batch:
    return batch[0], batch[1], None


def _detection(batch: Any) -> Batch:
    return batch["image"], None, [batch["boxes"][:, :4]]


def memmap(root: str, batch: int, workers: int, batched: bool) -> Epoch:
    ds = (MemmapBatches if batched else Memmap)(root)
    return _epochs(ds, batch, workers, _same if batched else None, _pair)


class _PackedBatches(Dataset[Any]):
    """`ShardDataset`, a batch at a time: its `gather` decodes into one array."""

    def __init__(self, root: str) -> None:
        self.ds = ShardDataset(root)

    def __len__(self) -> int:
        return len(self.ds)

    def __getitems__(self, indices: Sequence[int]) -> dict[str, Any]:
        out = {name: np.empty((len(indices), *shape), dtype) for name, (shape, dtype) in self.ds.batch_fields().items()}
        self.ds.gather(indices, out)
        return {name: torch.from_numpy(array) for name, array in out.items()}


def _packed(batch: Any) -> Batch:
    return batch["image"], batch["label"], None


def packed(root: str, batch: int, workers: int, batched: bool) -> Epoch:
    """Over the package's own tar data set."""
    if batched:
        return _epochs(_PackedBatches(root), batch, workers, _same, _packed)
    return _epochs(ShardDataset(root), batch, workers, collate_list, _packed)


def _crop224(image: Any, rng: random.Random) -> Any:
    return random_resized_crop(image, 224, rng)


class _Letterbox:
    def __init__(self, side: int, area: bool) -> None:
        self.side, self.area = side, area

    def __call__(self, image: Any, rows: Any, _: random.Random) -> tuple[Any, Any]:
        canvas, scale, x, y = letterbox(image, self.side, self.area)
        rows[:, :4] = rows[:, :4] * np.float32(scale) + np.array([x, y, x, y], np.float32)
        return canvas, rows


class _Crop:
    """A random part, boxes moved and clipped, those with less than a tenth of their area in it dropped."""

    def __init__(self, side: int) -> None:
        self.side = side

    def __call__(self, image: Any, rows: Any, rng: random.Random) -> tuple[Any, Any]:
        side, boxes = self.side, rows[:, :4]
        y, x = rng.randint(0, image.shape[0] - side), rng.randint(0, image.shape[1] - side)
        cut = (boxes - np.array([x, y, x, y], np.float32)).clip(0, side)
        area = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
        left = (cut[:, 2] - cut[:, 0]) * (cut[:, 3] - cut[:, 1])
        rows[:, :4] = cut
        return np.ascontiguousarray(image[y : y + side, x : x + side]), rows[left >= 0.1 * area]


def files_crop(root: str, batch: int, workers: int) -> Epoch:
    return _epochs(Files(root, _crop224), batch, workers, None, _pair)


def voc_letterbox(root: str, batch: int, workers: int, side: int, area: bool = False) -> Epoch:
    return _epochs(Voc(root, _Letterbox(side, area)), batch, workers, _collate, _detection)


def voc_crop(root: str, batch: int, workers: int, side: int) -> Epoch:
    return _epochs(Voc(root, _Crop(side)), batch, workers, _collate, _detection)


if __name__ == "__main__":
    serve({"memmap": memmap, "packed": packed, "files_crop": files_crop, "voc_letterbox": voc_letterbox, "voc_crop": voc_crop})
