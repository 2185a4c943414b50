"""`Tiles`: windows that cover every pixel, alike through every way to read them."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch.utils.data import DataLoader

from loaders.augment import Tiles
from loaders.batches import BatchLoader
from loaders.collate import collate_indexed, collate_list
from loaders.dataset import PackedDataset, SampleError
from loaders.memmap import MemmapDataset
from loaders.shards import ShardDataset
from packed_data import Packed, write_packed

SIZES = ((97, 131), (40, 50), (12, 16), (64, 40))


@pytest.fixture(scope="module", params=["grid", "png", "memmap"])
def packed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Packed:
    root = tmp_path_factory.mktemp("packed") / "out"
    if request.param == "memmap":
        return write_packed(root, "memmap", sizes=SIZES[:1])
    return write_packed(root, sizes=SIZES, grid=(request.param == "grid",), parts=("jpg",) if request.param == "grid" else ("png",))


def open_set(packed: Packed, **options: Any) -> PackedDataset:
    return (ShardDataset if packed.layout == "tar" else MemmapDataset)(packed.root, **options)


@pytest.mark.parametrize(("size", "overlap"), [(32, 0), ((40, 50), (8, 20)), (16, 5), (200, 10)])
def test_windows_put_together_are_the_pictures(packed: Packed, size: Any, overlap: Any) -> None:
    tiles = Tiles(open_set(packed), size, overlap, fill=9)
    whole = [np.zeros_like(image) for image in packed.images]
    seen = [np.zeros(image.shape[:2], int) for image in packed.images]
    for i in range(len(tiles)):
        tile = tiles.load(i)
        n, (y, x) = tile["picture"], tile["offset"].tolist()
        assert tile["image"].shape == (*tiles.size, 3)
        h, w = min(tiles.size[0], whole[n].shape[0] - y), min(tiles.size[1], whole[n].shape[1] - x)
        whole[n][y : y + h, x : x + w] = tile["image"][:h, :w]
        seen[n][y : y + h, x : x + w] += 1
        assert (tile["image"][h:] == 9).all()
        assert (tile["image"][:, w:] == 9).all()
        assert h == min(tiles.size[0], whole[n].shape[0])  # a window leaves the picture only where that is smaller
        assert (tile["key"], tile["index"]) == (packed.keys[n], i)
    assert all((s > 0).all() for s in seen)
    assert all(np.array_equal(w, image) for w, image in zip(whole, packed.images, strict=True))


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 200), st.integers(1, 60), st.data())
def test_windows_overlap_as_asked(length: int, size: int, data: st.DataObject) -> None:
    overlap = data.draw(st.integers(0, size - 1))
    tiles = Tiles(Lengths(length), size, overlap)  # type: ignore[arg-type]  # all that it needs for this
    pictures, places = tiles.places(np.arange(len(tiles)))
    starts = places[:, 1]
    assert (pictures == 0).all()
    assert (places[:, 0] == 0).all()
    assert starts[0] == 0
    assert starts[-1] == max(length - size, 0)
    assert (np.diff(starts)[:-1] == size - overlap).all()
    assert (np.diff(starts) <= size - overlap).all()
    assert (np.diff(starts) > 0).all()


class Lengths:
    """A data set of one picture, one pixel high."""

    transform = None

    def __init__(self, length: int) -> None:
        self.length = length

    def image_sizes(self) -> NDArray[np.int64]:
        return np.array([[1, self.length]])


def test_boxes_are_those_of_the_window(packed: Packed) -> None:
    tiles = Tiles(open_set(packed), (6, 7), (2, 3), min_visible=0.2)
    found: dict[int, int] = {}
    for i in range(len(tiles)):
        tile = tiles.load(i)
        y, x = tile["offset"].tolist()
        back = tile["boxes"] + np.array([x, y, x, y], np.float32)
        boxes, labels = packed.boxes[tile["picture"]], packed.box_labels[tile["picture"]]
        area = np.prod(boxes[:, 2:] - boxes[:, :2], axis=1)
        inside = np.clip(boxes, [x, y, x, y], [x + 7, y + 6, x + 7, y + 6])
        share = np.prod(inside[:, 2:] - inside[:, :2], axis=1) / area
        clear = np.abs(share - 0.2) > 1e-4
        expected = share >= 0.2
        if clear.all():
            assert np.allclose(back, inside[expected], atol=1e-5)
            assert np.array_equal(tile["labels"], labels[expected])
            found[i] = len(back)
    assert sum(found.values()) > 5


def test_batches_are_the_windows(packed: Packed) -> None:
    tiles = Tiles(open_set(packed), 30, 5)
    seen = []
    with BatchLoader(tiles, batch_size=4, shuffle=False, remainder="pad", workers=2) as loader:
        for batch in loader:
            for row, index in enumerate(batch["index"].tolist()):
                tile = tiles[index]
                for name in ("image", "boxes", "labels", "difficult", "offset"):
                    assert torch.equal(batch[name][row], tile[name]), name
                assert (batch["picture"][row], batch["key"][row]) == (tile["picture"], tile["key"])
                if batch["valid"][row]:
                    seen.append(index)
    assert seen == list(range(len(tiles)))
    with BatchLoader(tiles, batch_size=4, shuffle=False, collate=collate_indexed) as loader:
        boxes = next(iter(loader))["boxes"]
    assert torch.equal(boxes[:, 1:], torch.cat([tiles[i]["boxes"] for i in range(4)]))


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_torch_dataloader(packed: Packed, method: str) -> None:
    tiles = Tiles(open_set(packed), (30, 40), 5)
    loader = DataLoader(tiles, batch_size=7, num_workers=2, collate_fn=collate_list, multiprocessing_context=method)
    count = 0
    for batch in loader:
        for row, index in enumerate(batch["index"].tolist()):
            assert index == count
            assert torch.equal(batch["image"][row], tiles[index]["image"])
            assert batch["offset"][row].tolist() == tiles.places([index])[1][0].tolist()
            count += 1
    assert count == len(tiles)


def test_classification_and_selections(tmp_path: Path) -> None:
    packed = write_packed(tmp_path / "out", "tar", "classification", sizes=((50, 60),))
    ds = ShardDataset(packed.root)
    tiles = Tiles(ds.select([4, 1]), (50, 30))
    assert len(tiles) == 4
    assert [tiles[i]["label"] for i in range(4)] == [packed.labels[4]] * 2 + [packed.labels[1]] * 2
    assert [tiles[i]["picture"] for i in range(4)] == [0, 0, 1, 1]
    with BatchLoader(tiles, batch_size=4, shuffle=False) as loader:
        assert next(iter(loader))["label"].tolist() == [packed.labels[4]] * 2 + [packed.labels[1]] * 2
    assert tiles.task == "classification"
    assert tiles.classes == ds.classes


def test_a_picture_without_a_grid_is_decoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = write_packed(tmp_path / "out", parts=("png",), sizes=((60, 80),), counts=(3,))
    ds, regions = ShardDataset(packed.root), []
    original = ShardDataset.load_region

    def spy(self: ShardDataset, i: int, region: tuple[int, int, int, int]) -> dict[str, Any]:
        regions.append((i, region))
        return original(self, i, region)

    monkeypatch.setattr(ShardDataset, "load_region", spy)
    tiles = Tiles(ds, 20)
    for tile in (tiles[i] for i in range(len(tiles))):
        y, x = tile["offset"].tolist()
        assert np.array_equal(tile["image"].permute(1, 2, 0), packed.images[tile["picture"]][y : y + 20, x : x + 20])
    assert regions == [(n, (0, 0, 60, 80)) for n in range(3)]


def test_pickled_small_and_equal(packed: Packed) -> None:
    tiles = Tiles(open_set(packed), (30, 20), 7, min_visible=0.3, fill=1)
    tiles[0]
    data = pickle.dumps(tiles)
    assert len(data) < 10_000
    other = pickle.loads(data)
    assert (len(other), other.fingerprint, other.fill, other.min_visible) == (len(tiles), tiles.fingerprint, 1, 0.3)
    assert torch.equal(other[3]["image"], tiles[3]["image"])
    assert tiles.fingerprint != Tiles(open_set(packed), (30, 20), 6).fingerprint
    assert "windows" in repr(tiles)


def test_indices(packed: Packed) -> None:
    tiles = Tiles(open_set(packed), 30)
    assert tiles[-1]["index"] == len(tiles) - 1
    assert torch.equal(tiles[-1]["image"], tiles[len(tiles) - 1]["image"])
    for bad in (len(tiles), -len(tiles) - 1):
        with pytest.raises(IndexError):
            tiles[bad]
        with pytest.raises(IndexError):
            tiles.places([0, bad])


@pytest.mark.parametrize(("size", "overlap"), [(0, 0), (10, 10), (10, -1), ((10, 5), (9, 5)), ((0, 5), 0)])
def test_wrong_arguments(packed: Packed, size: Any, overlap: Any) -> None:
    with pytest.raises(ValueError, match="expected 0 <= overlap < size"):
        Tiles(open_set(packed), size, overlap)


def test_no_transform_and_no_replacement(tmp_path: Path) -> None:
    packed = write_packed(tmp_path / "out", counts=(2,), sizes=((60, 80),))
    with pytest.raises(ValueError, match="without one"):
        Tiles(ShardDataset(packed.root, transform=lambda sample, rng: sample), 20)  # noqa: ARG005  # a transform takes both
    packed.shard(0).write_bytes(b"")
    tiles = Tiles(ShardDataset(packed.root, on_error="replace"), 20)
    with pytest.raises(SampleError, match="cut short"):
        tiles[0]
