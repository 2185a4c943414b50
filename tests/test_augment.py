"""Augmentation: pictures and boxes move together, the size is the one asked for, and all chance comes from the generator given."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch.utils.data import DataLoader

from loaders.augment import Compose, Flip, Letterbox, RandomAffine, RandomCrop, RandomResizedCrop
from loaders.batches import BatchLoader
from loaders.boxes import clip_boxes, visible_shares
from loaders.collate import collate_list
from loaders.dataset import PackedDataset
from loaders.format import index_path
from loaders.memmap import MemmapDataset
from loaders.shards import ShardDataset
from packed_data import write_packed

SIZE = (120, 160)
TRANSFORMS: dict[str, Callable[[], Any]] = {
    "resized crop": lambda: RandomResizedCrop(SIZE),
    "resized crop, area": lambda: RandomResizedCrop(SIZE, scale=(0.5, 1), min_visible=0.5, interpolation="area"),
    "crop": lambda: RandomCrop(SIZE, flip=0.5),
    "crop that keeps a box": lambda: RandomCrop((50, 60), keep_box=True, min_visible=0.3),
    "crop on a box": lambda: RandomCrop((70, 60), centre_on_box=1.0, flip=0.5),
    "crop larger than the picture": lambda: RandomCrop((400, 500), flip=0.5),
    "flip": lambda: Flip(0.5, 0.5),
    "letterbox": lambda: Letterbox(SIZE),
    "letterbox, area": lambda: Letterbox((160, 90), interpolation="area"),
    "affine": lambda: RandomAffine(SIZE, degrees=0),
    "turned": lambda: RandomAffine((300, 400), degrees=25, scale=(0.5, 0.6), translate=0.02, shear=5, fill=0),
    "composed": lambda: Compose(RandomCrop((200, 220)), Flip(0.5), RandomResizedCrop(SIZE)),
}


def rectangles(rng: np.random.Generator, height: int, width: int) -> dict[str, Any]:
    """A picture with one filled rectangle in each channel; box n is that of channel ``labels[n]``."""
    image = np.zeros((height, width, 3), np.uint8)
    boxes = np.zeros((3, 4), np.float32)
    for channel in range(3):
        x0, y0 = rng.integers(width - 12), rng.integers(height - 12)
        x1, y1 = rng.integers(x0 + 10, width + 1), rng.integers(y0 + 10, height + 1)
        image[y0:y1, x0:x1, channel] = 255
        boxes[channel] = x0, y0, x1, y1
    order = rng.permutation(3)
    return {"image": image, "boxes": boxes[order], "labels": order, "difficult": (order % 2).astype(np.uint8)}


def check_rectangles(sample: dict[str, Any], fill: int, tip: bool = False) -> int:
    """Compare each box with the bright pixels of its channel. `tip`: corners of a turned rectangle cover little of their pixel, so that
    any light counts."""
    image, boxes = sample["image"].astype(int), sample["boxes"]
    assert boxes.dtype == np.float32
    assert len(boxes) == len(sample["labels"]) == len(sample["difficult"])
    assert np.array_equal(sample["difficult"], sample["labels"] % 2)
    for label, (x0, y0, x1, y1) in zip(sample["labels"].tolist(), boxes.tolist(), strict=True):
        assert 0 <= x0 < x1 <= image.shape[1]
        assert 0 <= y0 < y1 <= image.shape[0]
        canvas = (image == fill).all(axis=2)  # else gray could be taken for part of a rectangle
        bright = (image[..., label] > (20 if tip else 127)) & ~canvas
        rows, columns = np.flatnonzero(bright.any(axis=1)), np.flatnonzero(bright.any(axis=0))
        if len(rows) == 0:
            assert min(x1 - x0, y1 - y0) < 1, label
            continue
        found = columns[0], rows[0], columns[-1] + 1, rows[-1] + 1
        assert np.abs(np.subtract(found, (x0, y0, x1, y1))).max() <= (1.6 if tip else 1.0), (found, (x0, y0, x1, y1))
    return len(boxes)


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("size", [(240, 320), (231, 173)])
def test_rectangle_and_box_agree(name: str, size: tuple[int, int]) -> None:
    rng = np.random.default_rng(0)
    transform = TRANSFORMS[name]()
    seen = 0
    for _ in range(60):
        before = rectangles(rng, *size)
        kept = {key: value.copy() for key, value in before.items()}
        after = transform(before, rng)
        assert after["image"].dtype == np.uint8
        seen += check_rectangles(after, fill=114, tip=name == "turned")
        assert all(np.array_equal(before[key], kept[key]) for key in kept)  # what came in is as it was
    assert seen > 60


@pytest.mark.parametrize("grid", [True, False])
@pytest.mark.parametrize(
    "transform",
    [
        RandomResizedCrop(64, scale=(0.3, 1)),
        RandomResizedCrop((64, 100), interpolation="area"),
        RandomCrop(300),
        Letterbox(128),
        RandomAffine(128, degrees=0),
        Compose(RandomResizedCrop(100, scale=(0.5, 1)), Flip(1.0)),
    ],
    ids=lambda t: type(t).__name__,
)
def test_rectangle_and_box_agree_in_scaled_regions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, grid: bool, transform: Any) -> None:
    drawn: list[dict[str, Any]] = []

    def draw(rng: np.random.Generator, height: int, width: int) -> NDArray[np.uint8]:
        drawn.append(rectangles(rng, height, width))
        return drawn[-1]["image"]  # type: ignore[no-any-return]  # the dict holds anything

    monkeypatch.setattr("packed_data.image", draw)
    packed = write_packed(tmp_path / "out", grid=(grid,), sizes=((801, 1203), (640, 480)), num_boxes=(3,))
    for name, dtype in (("boxes", "<f4"), ("labels", "<i8"), ("difficult", "u1")):
        np.save(packed.root / index_path("train", name), np.concatenate([d[name] for d in drawn]).astype(dtype))
    ds = ShardDataset(packed.root, transform=transform)
    for epoch in range(4):
        for n in range(10):
            check_rectangles(ds.load(n, epoch), fill=114)


# Sizes and dtypes


@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.float16])
@pytest.mark.parametrize("name", sorted(set(TRANSFORMS) - {"flip"}))
def test_the_size_is_the_one_asked_for(name: str, dtype: Any) -> None:
    transform = TRANSFORMS[name]()
    rng = np.random.default_rng(1)
    shapes = set()
    for size in ((1, 1), (300, 20), (20, 300), (200, 220)):
        image = rng.integers(0, 255, (*size, 3)).astype(dtype)
        sample = transform({"image": image, "label": 3, "key": 5}, rng)
        assert sample["image"].dtype == dtype
        assert (sample["label"], sample["key"]) == (3, 5)
        assert "boxes" not in sample
        shapes.add(sample["image"].shape)
    assert len(shapes) == 1
    if name in ("resized crop", "letterbox", "crop", "affine"):
        assert shapes == {(*SIZE, 3)}


@settings(deadline=None)
@given(st.integers(1, 3000), st.integers(1, 3000), st.integers(0, 2**32))
def test_regions_lie_inside_pictures_of_any_size(height: int, width: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    box = np.array([[0, 0, width, height]], np.float32)
    for transform in (
        RandomResizedCrop(7),
        RandomResizedCrop((1, 9), scale=(0.001, 0.002), ratio=(0.01, 0.02)),
        RandomCrop((640, 333), centre_on_box=0.5, keep_box=True),
    ):
        y, x, h, w = transform.region({"height": height, "width": width, "boxes": box}, rng)
        assert 0 <= y < y + h <= height
        assert 0 <= x < x + w <= width


def test_resized_crops_have_the_scale_and_ratio_asked_for() -> None:
    rng = np.random.default_rng(2)
    transform = RandomResizedCrop(10, scale=(0.2, 0.4), ratio=(0.5, 2))
    regions = np.array([transform.region({"height": 1000, "width": 1500}, rng) for _ in range(500)])
    area, ratio = regions[:, 2] * regions[:, 3] / 1_500_000, regions[:, 3] / regions[:, 2]
    assert 0.199 < area.min() < 0.22
    assert 0.38 < area.max() < 0.401
    assert 0.49 < ratio.min() < 0.55
    assert 1.9 < ratio.max() < 2.02
    assert regions[:, :2].min() < 50
    strip = RandomResizedCrop(10, scale=(0.9, 1), ratio=(1, 1)).region({"height": 10, "width": 1000}, rng)
    assert strip == (0, 495, 10, 10)  # nothing fits: the centre


# Boxes of crops


def boxes_of(*boxes: tuple[float, float, float, float]) -> dict[str, Any]:
    array = np.array(boxes, np.float32).reshape(-1, 4)
    return {"boxes": array, "labels": np.arange(len(array)), "difficult": np.zeros(len(array), np.uint8)}


@settings(deadline=None, max_examples=200)
@given(
    st.integers(1, 400),
    st.integers(1, 400),
    st.sampled_from([7, 64, 97, 224, 299, 331]),
    st.sampled_from([7, 224, 331]),
    st.integers(0, 99),
)
def test_a_mirrored_crop_is_the_mirror_of_the_crop(height: int, width: int, new_height: int, new_width: int, seed: int) -> None:
    """But for rounding, whichever of the two is mirrored, before or after it is resized."""
    image = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    plain, mirrored = (
        RandomResizedCrop((new_height, new_width), flip=flip)({"image": image}, np.random.default_rng(seed))["image"] for flip in (0.0, 1.0)
    )
    assert (np.abs(mirrored.astype(int) - plain[:, ::-1]) <= 1).all()


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_keep_box_always_keeps_one(data: st.DataObject) -> None:
    height, width = data.draw(st.integers(2, 500)), data.draw(st.integers(2, 500))
    boxes = []
    for _ in range(data.draw(st.integers(1, 4))):
        x0, y0 = data.draw(st.integers(0, width - 2)), data.draw(st.integers(0, height - 2))
        boxes.append((x0, y0, data.draw(st.integers(x0 + 1, width)), data.draw(st.integers(y0 + 1, height))))
    min_visible = data.draw(st.sampled_from([0.0, 0.1, 0.5, 1.0]))
    transform = RandomCrop(data.draw(st.integers(1, 100)), flip=0.5, keep_box=True, min_visible=min_visible)
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    sample = transform({"image": np.zeros((height, width, 3), np.uint8), **boxes_of(*boxes)}, rng)
    assert len(sample["boxes"]) >= 1
    assert len(sample["boxes"]) == len(sample["labels"]) == len(sample["difficult"])


def test_keep_box_is_no_bias_where_boxes_are_everywhere() -> None:
    rng = np.random.default_rng(0)
    sample = {"height": 100, "width": 100, **boxes_of((0, 0, 100, 100))}
    transform = RandomCrop(50, keep_box=True, min_visible=0.2)
    corners = np.array([transform.region(sample, rng)[:2] for _ in range(400)])
    assert corners.min() < 3
    assert corners.max() > 47


def test_centre_on_box() -> None:
    rng = np.random.default_rng(0)
    sample = {"height": 1000, "width": 1000, **boxes_of((300, 400, 340, 420), (2, 2, 6, 6))}
    exact = RandomCrop(100, centre_on_box=1.0, jitter=0.0)
    assert {exact.region(sample, rng) for _ in range(40)} == {(360, 270, 100, 100), (0, 0, 100, 100)}
    loose = RandomCrop(100, centre_on_box=1.0, jitter=0.25)
    regions = np.array([loose.region({**sample, **boxes_of((300, 400, 340, 420))}, rng) for _ in range(200)])
    assert (np.abs(regions[:, 0] - 360) <= 25).all()
    assert (np.abs(regions[:, 1] - 270) <= 25).all()
    assert len(np.unique(regions[:, 0])) > 20
    sometimes = RandomCrop(100, centre_on_box=0.5, jitter=0.0)
    hits = sum(sometimes.region(sample, rng) in ((360, 270, 100, 100), (0, 0, 100, 100)) for _ in range(400))
    assert 150 < hits < 250


def test_boxes_under_the_bound_are_dropped_with_their_labels() -> None:
    boxes = np.array([[0, 0, 10, 10], [-5, 0, 5, 10], [-9, 0, 1, 10], [-10, 0, 0, 10], [5, 5, 5, 9], [90, 90, 130, 110]], np.float32)
    assert visible_shares(boxes, (0, 0, 100, 100)).tolist() == pytest.approx([1, 0.5, 0.1, 0, 0, 0.125])
    for bound, kept in ((0.0, [0, 1, 2, 5]), (0.1, [0, 1, 2, 5]), (0.11, [0, 1, 5]), (0.5, [0, 1]), (1.0, [0])):
        result = clip_boxes(boxes, (100, 100), bound)
        assert np.flatnonzero(result.keep).tolist() == kept
        assert (result.boxes >= 0).all()
        assert (result.boxes <= 100).all()
    assert np.flatnonzero(clip_boxes(boxes[2:], (100, 100), 0.9, keep_one=True).keep).tolist() == [3]
    assert not clip_boxes(boxes[3:5], (100, 100), 0.0, keep_one=True).keep.any()
    fields = clip_boxes(boxes, (100, 100), 0.5).fields({"labels": np.arange(6), "difficult": np.ones(6, np.uint8)}, (3, 4))
    assert fields["boxes"].tolist() == [[3, 4, 13, 14], [3, 4, 8, 14]]
    assert fields["labels"].tolist() == [0, 1]


def test_a_small_picture_is_somewhere_on_the_canvas() -> None:
    rng = np.random.default_rng(0)
    corners = set()
    for _ in range(50):
        sample = RandomCrop((20, 30), fill=7)({"image": np.full((10, 20, 3), 200, np.uint8), **boxes_of((0, 0, 20, 10))}, rng)
        x0, y0, x1, y1 = sample["boxes"][0].astype(int).tolist()
        assert (x1 - x0, y1 - y0) == (20, 10)
        assert (sample["image"][y0:y1, x0:x1] == 200).all()
        assert (sample["image"] == 7).sum() == (20 * 30 - 10 * 20) * 3
        corners.add((y0, x0))
    assert len(corners) > 20


# Letterbox


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 400), st.integers(1, 400), st.integers(1, 100), st.integers(1, 100))
def test_letterbox_maps_back_by_its_affine(height: int, width: int, out_h: int, out_w: int) -> None:
    transform = Letterbox((out_h, out_w))
    h, w = transform.size(height, width)
    assert h == out_h or w == out_w
    assert h <= out_h
    assert w <= out_w
    boxes = np.array([[0, 0, width, height], [0, 0, width / 3, height / 2]], np.float32)
    rng = np.random.default_rng(0)
    sample = transform({"image": np.zeros((height, width, 3), np.uint8), **boxes_of(*map(tuple, boxes))}, rng)
    assert sample["image"].shape == (out_h, out_w, 3)
    sx, sy, tx, ty = sample["affine"]
    assert np.allclose(sample["boxes"], boxes * [sx, sy, sx, sy] + [tx, ty, tx, ty], atol=1e-3)
    assert sample["boxes"][0].tolist() == pytest.approx([tx, ty, tx + w, ty + h], abs=1e-3)


def test_letterbox_of_a_scaled_jpeg_maps_back_too(tmp_path: Path) -> None:
    packed = write_packed(tmp_path / "out", counts=(3,), sizes=((641, 963),))
    ds = ShardDataset(packed.root, transform=Letterbox(100))
    for n in (0, 2):
        sample = ds.load(n)
        sx, sy, tx, ty = sample["affine"]
        assert sx == pytest.approx(100 / 963, rel=0.01)
        assert np.allclose((sample["boxes"] - [tx, ty, tx, ty]) / [sx, sy, sx, sy], packed.boxes[n], atol=1e-3)


# Compose


def test_compose_offers_the_region_of_its_first(tmp_path: Path) -> None:
    packed = write_packed(tmp_path / "out", counts=(4,), grid=(True,), sizes=((200, 300),))

    def brighten(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        del rng
        assert "view" not in sample
        sample["image"] = sample["image"] // 2
        return sample

    inner = RandomCrop((50, 60))
    composed = Compose(inner, brighten, RandomCrop((20, 30)))
    assert composed.size == (50, 60)
    sample = ShardDataset(packed.root, transform=composed, seed=1).load(0)
    assert sample["image"].shape == (20, 30, 3)
    rng = np.random.Generator(np.random.Philox(key=[1, 0], counter=[0, 0, 0, 0]))
    y, x, h, w = inner.region({"height": 200, "width": 300}, rng)
    rng.random()  # its flip
    v, u, _, _ = RandomCrop((20, 30)).region({"height": 50, "width": 60}, rng)
    assert np.array_equal(sample["image"], packed.images[0][y : y + h, x : x + w][v : v + 20, u : u + 30] // 2)
    assert Compose().size is None
    assert Compose(Flip()).region is None
    with pytest.raises(ValueError, match="Broken, inside Compose"):
        Compose(Flip(), Broken(5))({"image": np.zeros((9, 9, 3), np.uint8)}, rng)


class Broken(RandomCrop):
    def region(self, sample: dict[str, Any], rng: np.random.Generator) -> tuple[int, int, int, int]:
        del rng
        return 0, 0, sample["height"] + 1, 1


# Randomness, threads, processes


@pytest.mark.parametrize("name", TRANSFORMS)
def test_all_chance_comes_from_the_generator(name: str) -> None:
    sample = rectangles(np.random.default_rng(3), 150, 190)
    results = []
    for seed in (1, 2):
        np.random.seed(seed)  # the global state is what must not matter
        results.append(TRANSFORMS[name]()(dict(sample), np.random.default_rng(7)))
    assert all(np.array_equal(results[0][key], results[1][key]) for key in results[0])
    if "letterbox" not in name:
        others = [TRANSFORMS[name]()(dict(sample), np.random.default_rng(seed))["boxes"].tolist() for seed in range(8)]
        assert any(boxes != results[0]["boxes"].tolist() for boxes in others)


@pytest.fixture(scope="module", params=["tar", "memmap"])
def ds(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PackedDataset:
    packed = write_packed(tmp_path_factory.mktemp("packed") / "out", request.param, grid=(True,), sizes=((97, 131),))
    return (ShardDataset if request.param == "tar" else MemmapDataset)(packed.root, transform=RandomResizedCrop(32), seed=8)


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_torch_dataloader(ds: PackedDataset, method: str) -> None:
    loader = DataLoader(ds, batch_size=5, num_workers=2, collate_fn=collate_list, multiprocessing_context=method)
    batches = list(loader)
    assert [b["image"].shape for b in batches] == [(5, 3, 32, 32)] * 2
    for batch in batches:
        for row, index in enumerate(batch["index"].tolist()):
            expected = ds[index]
            assert torch.equal(batch["image"][row], expected["image"])
            assert torch.equal(batch["boxes"][row], expected["boxes"])


@pytest.mark.parametrize("workers", [0, 3])
def test_batch_loader(ds: PackedDataset, workers: int) -> None:
    with BatchLoader(ds, batch_size=5, seed=2, workers=workers) as loader:
        for _ in range(2):
            batches = list(loader)
    for batch in batches:
        assert set(batch) == {"image", "boxes", "labels", "difficult", "key", "index"}
        for row, index in enumerate(batch["index"].tolist()):
            expected = ds.load(index, epoch=1)
            assert np.array_equal(batch["image"][row].permute(1, 2, 0).numpy(), expected["image"])
            assert np.array_equal(batch["boxes"][row].numpy(), expected["boxes"])


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_are_pickled(name: str) -> None:
    transform = TRANSFORMS[name]()
    sample = rectangles(np.random.default_rng(3), 150, 190)
    first, second = (t(dict(sample), np.random.default_rng(7)) for t in (transform, pickle.loads(pickle.dumps(transform))))
    assert all(np.array_equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: RandomResizedCrop(0), "size is 0"),
        (lambda: RandomResizedCrop(9, scale=(0.5, 0.1)), r"scale is \(0.5, 0.1\)"),
        (lambda: RandomResizedCrop(9, scale=(0.5, 2)), "scale is"),
        (lambda: RandomResizedCrop(9, ratio=(0, 1)), "ratio is"),
        (lambda: RandomResizedCrop(9, interpolation="cubic"), "interpolation is 'cubic'"),  # type: ignore[arg-type]  # that is the test
        (lambda: RandomCrop((3, -1)), "size is"),
        (lambda: RandomCrop(3, flip=1.5), "flip is 1.5"),
        (lambda: RandomCrop(3, centre_on_box=-1), "centre_on_box is -1"),
        (lambda: Flip(2), "horizontal is 2"),
        (lambda: RandomAffine(9, shear=90), "shear is 90"),
    ],
)
def test_wrong_arguments(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()
