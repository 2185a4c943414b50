"""The `region` and `size` protocol of transforms, through every data set that offers it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from loaders.augment import RandomResizedCrop
from loaders.batches import BatchLoader
from loaders.dataset import PackedDataset, SampleError
from loaders.format import index_path
from loaders.handles import OpenFile
from loaders.jpeg import parse_header
from loaders.memmap import MemmapDataset
from loaders.regions import transformed
from loaders.scratch import Scratch
from loaders.shards import ShardDataset, ShardStream
from packed_data import Packed, write_packed

# Pictures with and without cells, of one MCU and of many, and the kinds that can only be decoded as a whole.
SETS: dict[str, dict[str, Any]] = {
    "grid": {"grid": (True,), "sizes": ((97, 131), (12, 16), (64, 200))},
    "some with a grid": {"grid": (True, False), "sizes": ((97, 131), (97, 131))},
    "no grid": {"sizes": ((97, 131),)},
    "png and webp": {"parts": ("png", "webp", "jpg"), "grid": (True,), "sizes": ((97, 131),)},
    "memmap": {"layout": "memmap", "sizes": ((97, 131),)},
}


@pytest.fixture(scope="module", params=SETS)
def packed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Packed:
    """Detection, 10 samples. Tests do not change it."""
    return write_packed(tmp_path_factory.mktemp("packed") / "out", **SETS[request.param])


def open_set(packed: Packed, **options: Any) -> PackedDataset:
    return (ShardDataset if packed.layout == "tar" else MemmapDataset)(packed.root, **options)


class Recording:
    """Takes a random region, remembers what it was asked and given, changes its picture in place. Picklable, but for `seen`."""

    def __init__(self) -> None:
        self.seen: list[tuple[dict[str, Any], dict[str, Any], tuple[int, ...]]] = []
        self.asked = threading.local()

    def region(self, sample: dict[str, Any], rng: np.random.Generator) -> tuple[int, int, int, int]:
        h, w = rng.integers(1, sample["height"] + 1), rng.integers(1, sample["width"] + 1)
        self.asked.sample = dict(sample)
        self.asked.region = rng.integers(sample["height"] - h + 1), rng.integers(sample["width"] - w + 1), h, w
        region: tuple[int, int, int, int] = self.asked.region  # numpy ints, as a user's transform would give
        return region

    def __call__(self, sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        given = {name: value.copy() if isinstance(value, np.ndarray) else value for name, value in sample.items()}
        self.seen.append((self.asked.sample, given, tuple(int(v) for v in self.asked.region)))
        sample["image"][:] = 255 - sample["image"]
        sample["noise"] = int(rng.integers(1 << 40))
        return sample


def test_the_transform_is_asked_first_and_gets_its_region(packed: Packed) -> None:
    recording = Recording()
    ds, plain = open_set(packed, transform=recording, seed=3), open_set(packed)
    for n in range(10):
        result = ds.load(n)
        asked, given, (y, x, h, w) = recording.seen[-1]
        height, width = packed.images[n].shape[:2]
        assert (asked["height"], asked["width"], asked["key"], asked["index"]) == (height, width, packed.keys[n], n)
        assert "image" not in asked
        assert np.array_equal(asked["boxes"], packed.boxes[n])
        assert np.array_equal(given["image"], packed.images[n][y : y + h, x : x + w])
        assert given["view"] == (y, x, 1)
        assert given["boxes"].dtype == np.float32
        # Moved; neither clipped nor dropped.
        assert np.array_equal(given["boxes"], packed.boxes[n] - np.array([x, y, x, y], np.float32))
        assert np.array_equal(given["labels"], packed.box_labels[n])
        assert list(result) == ["image", "boxes", "labels", "difficult", "key", "index", "noise"]
        assert np.array_equal(result["image"], 255 - packed.images[n][y : y + h, x : x + w])
        assert np.array_equal(plain.load(n)["image"], packed.images[n])  # the transform's picture was its own
        assert np.array_equal(plain.load(n)["boxes"], packed.boxes[n])


def test_one_generator_is_asked_and_then_called(packed: Packed) -> None:
    ds = open_set(packed, transform=Recording(), seed=5)
    for n in (0, 4):
        rng = np.random.Generator(np.random.Philox(key=[5, 2], counter=[0, 0, 0, n]))
        height, width = packed.images[n].shape[:2]
        h, w = rng.integers(1, height + 1), rng.integers(1, width + 1)
        rng.integers(height - h + 1), rng.integers(width - w + 1)
        sample = ds.load(n, epoch=2)
        assert sample["image"].shape == (h, w, 3)
        assert sample["noise"] == rng.integers(1 << 40)


def test_tensors_of_regions_stay_what_they_are(packed: Packed) -> None:
    """Pictures are decoded into memory that is used again: never while anyone holds a view of it."""
    ds = open_set(packed, transform=Recording(), seed=1)
    expected = [torch.from_numpy(np.array(ds.load(n)["image"])) for n in range(10)]

    def held(_: int) -> list[torch.Tensor]:
        return [ds[n]["image"] for n in range(10)]

    with ThreadPoolExecutor(4) as pool:
        for images in pool.map(held, range(8)):
            assert all(torch.equal(image.permute(1, 2, 0), e) for image, e in zip(images, expected, strict=True))


def same(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name])


class Mosaic(Recording):
    """Loads other samples of `ds` while those around its own are under way."""

    ds: PackedDataset
    inner = False

    def __call__(self, sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        sample = super().__call__(sample, rng)
        if self.inner:
            return sample
        self.inner = True
        others = [int(other["image"].sum()) for other in self.ds.load_many([((sample["index"] + k) % len(self.ds), 7) for k in (1, 2)])]
        self.inner = False
        return {**sample, "others": others}


@pytest.mark.parametrize("kind", ["regions", "plain", "mosaic", "mosaic of itself"])
def test_many_are_as_one_by_one(packed: Packed, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "mosaic of itself":  # not all at a time
        monkeypatch.setattr("loaders.tarset._TOGETHER_BYTES", 12_000)
    transform = Mosaic() if "mosaic" in kind else Recording()
    transform.ds = open_set(packed, transform=Recording())
    ds = open_set(packed, transform=transform if kind != "plain" else lambda sample, rng: {**sample, "noise": int(rng.integers(1 << 40))})
    if kind == "mosaic of itself":
        transform.ds = ds
    keys = [(int(i), epoch) for epoch in (3, None) for i in np.random.default_rng(0).integers(-len(ds), len(ds), 9)]
    expected = [ds.load(*key) for key in keys]
    for one, other in zip(expected, ds.load_many(keys), strict=True):
        same(one, other)
    for one, other in zip(expected[:3], ds.load_many(keys), strict=False):  # and given up on the way
        same(one, other)


@pytest.mark.parametrize("damage", ["entropy-coded", "markers", "cut short", "header", "checksum", "row"])
def test_damage_among_many_is_told_in_its_place(tmp_path: Path, damage: str) -> None:
    packed = write_packed(tmp_path / "out", counts=(10,), grid=(True,), sizes=((97, 131),))
    ds = ShardDataset(packed.root, transform=Sized((0, 0, 97, 131), None), check_crc=damage == "checksum")
    good = [ds.load(i) for i in range(10)]
    bad = 9 if damage == "cut short" else 6
    row, cells = ds._index.samples[bad], ds._index.cells(bad)
    assert cells is not None
    at = int(row["image_offset"]) + int(cells[2])
    with packed.shard(0).open("r+b") as shard:  # the same file, which is open already
        if damage == "cut short":
            shard.truncate(at)
        elif damage == "header":
            shard.seek(int(row["image_offset"]) + parse_header(ds.encoded(bad)).sof_offset + 6)
            shard.write(b"\x60")  # one pixel less in height, and as many rows of cells
        elif damage == "row":
            rows = np.load(packed.root / "index/train/samples.npy")
            rows["image_offset"][bad] = 1 << 40
            np.save(packed.root / "index/train/samples.npy", rows)
            ds = ShardDataset(packed.root, transform=ds.transform)
        else:
            shard.seek(at - 2 if damage == "markers" else at)
            shard.write(b"\xff\xda" if damage == "markers" else b"\xff\xd9" * 4)
    many = ds.load_many([(i, None) for i in range(10)])
    for one in good[:bad]:
        same(one, next(many))
    with pytest.raises(SampleError, match=f"sample {int(row['key']):09d}"):
        next(many)


@pytest.mark.parametrize(("parts", "grid"), [(("jpg",), (True,)), (("png", "jpg", "jpg"), (True, True, False))])
def test_a_damaged_one_of_many_is_replaced_as_one_by_one(tmp_path: Path, parts: tuple[str, ...], grid: tuple[bool, ...]) -> None:
    packed = write_packed(tmp_path / "out", counts=(10,), grid=grid, parts=parts, sizes=((97, 131), (64, 80)))
    row = ShardDataset(packed.root)._index.samples[4]
    data, start = bytearray(packed.shard(0).read_bytes()), int(row["image_offset"])
    data[start + int(row["image_size"]) // 2 : start + int(row["image_size"])] = bytes(int(row["image_size"]) - int(row["image_size"]) // 2)
    packed.shard(0).write_bytes(data)
    ds = ShardDataset(packed.root, transform=Recording(), on_error="replace")
    with pytest.warns(UserWarning, match="replaced"):
        expected = [ds.load(i, 2) for i in range(10)]
    assert [sample["index"] for sample in expected] != list(range(10))
    for one, other in zip(expected, ds.load_many([(i, 2) for i in range(10)]), strict=True):
        same(one, other)
    assert ds.num_replaced == 2


# Into the batch


class Derived(RandomResizedCrop):
    """Keeps its pictures, so they must not be anyone else's."""


def test_a_picture_is_made_in_memory_that_fits(packed: Packed) -> None:
    ds = open_set(packed, transform=RandomResizedCrop(24), seed=4)
    keys = [(i % 10, i // 10) for i in range(40)]
    expected = [ds.load(*key) for key in keys]
    rows, other = np.zeros((40, 24, 24, 3), np.uint8), np.zeros((24, 25, 3), np.uint8)
    for n, (one, sample) in enumerate(zip(expected, ds.load_many(keys, lambda n: rows[n] if n % 3 else None), strict=True)):
        same(one, sample)
        assert np.shares_memory(sample["image"], rows[n]) == bool(n % 3)
        assert "out" not in sample
    for out in (other, other[:20], np.zeros((24, 24, 3), np.float32)):  # of another shape or dtype
        for one, sample in zip(expected[:10], ds.load_many(keys[:10], ([out] * 10).__getitem__), strict=True):
            same(one, sample)
    assert not other.any()
    for transform in (Derived(24), Recording()):
        taken = list(open_set(packed, transform=transform, seed=4).load_many(keys, lambda n: pytest.fail(f"asked for {n}")))
        assert [sample["image"].shape[2] for sample in taken] == [3] * 40


@pytest.mark.parametrize("batch_size", [4, 16])
def test_batches_are_the_same_without_the_copy(packed: Packed, batch_size: int) -> None:
    """Also where rows only repeat a sample (16), and where slots are used again (4)."""
    batches: list[list[dict[str, Any]]] = []
    for transform in (RandomResizedCrop(24), Derived(24)):
        ds = open_set(packed, transform=transform, seed=4)
        loader = BatchLoader(ds, batch_size=batch_size, workers=2, remainder="pad", seed=4)
        batches.append([{**batch, "image": batch["image"].clone()} for _ in range(3) for batch in loader])
    for one, other in zip(*batches, strict=True):
        assert torch.equal(one["index"], other["index"])
        assert torch.equal(one["image"], other["image"])
    first = ds.load(int(one["index"][0]), 2)["image"]
    assert np.array_equal(one["image"][0].permute(1, 2, 0).numpy(), first)


def test_a_plain_transform_has_the_whole_picture_and_no_view(packed: Packed) -> None:
    def look(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        del rng
        assert "view" not in sample
        assert np.array_equal(sample["image"], packed.images[sample["index"]])
        assert sample["image"].flags.c_contiguous
        return sample

    ds = open_set(packed, transform=look)
    kept = [ds.load(n)["image"] for n in range(10)]
    assert all(np.array_equal(image, packed.images[n]) for n, image in enumerate(kept))


def test_load_region(packed: Packed) -> None:
    ds = open_set(packed)
    for n in range(-10, 10):
        height, width = packed.images[n].shape[:2]
        y, x, h, w = height // 3, width // 4, height // 2, width // 2
        sample = ds.load_region(n, (y, x, h, w))
        assert np.array_equal(sample["image"], packed.images[n][y : y + h, x : x + w])
        assert sample["image"].flags.owndata
        assert np.array_equal(sample["boxes"], packed.boxes[n] - np.array([x, y, x, y], np.float32))
        assert (sample["key"], sample["index"]) == (packed.keys[n], n % 10)
        assert "view" not in sample
    for bad in ((0, 0, 98, 1), (-1, 0, 1, 1), (0, 131, 1, 1), (0, 0, 0, 1), (0, 0, 1, 132)):
        with pytest.raises(ValueError, match=r"leaves sample 0 .key 000000003.*97, 131"):
            ds.load_region(0, bad)
    with pytest.raises(IndexError):
        ds.load_region(10, (0, 0, 1, 1))


def test_a_stream_gives_the_same(tmp_path: Path) -> None:
    packed = write_packed(tmp_path / "out", grid=(True, False), sizes=((97, 131), (12, 16)))
    stream = ShardStream(packed.root, transform=Recording(), seed=4, shuffle=5)
    ds = ShardDataset(packed.root, transform=Recording(), seed=4)
    samples = {sample["index"]: sample for sample in stream}
    assert sorted(samples) == list(range(10))
    for n, sample in samples.items():
        assert torch.equal(sample["image"], ds[n]["image"])
        assert sample["noise"] == ds[n]["noise"]
    foreign = ShardStream([str(packed.shard(0))], transform=Recording(), shuffle=0)
    assert sorted(int(sample["key"]) for sample in foreign) == packed.keys[:4]


# Size


class Sized:
    """Wants a region at least 40 x 40 large."""

    def __init__(self, region: tuple[int, int, int, int], size: Any = (40, 40)) -> None:
        self.box, self.size = region, size
        self.view: Any = None

    def region(self, sample: dict[str, Any], rng: np.random.Generator) -> tuple[int, int, int, int]:
        del sample, rng
        return self.box

    def __call__(self, sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        del rng
        self.view = sample["view"]
        return sample


@pytest.mark.parametrize("grid", [True, False])
@pytest.mark.parametrize(
    ("region", "view", "shape"),
    [
        ((0, 0, 400, 600), (0, 0, 8), (50, 75)),
        ((11, 21, 319, 500), (8, 20, 4), (81, 126)),
        ((11, 21, 319, 119), (10, 20, 2), (160, 60)),
        ((11, 21, 79, 300), (11, 21, 1), (79, 300)),
        ((240, 401, 160, 199), (240, 400, 4), (40, 50)),
    ],
)
def test_a_jpeg_is_scaled_down_while_the_region_is_large_enough(
    tmp_path: Path, grid: bool, region: tuple[int, int, int, int], view: tuple[int, int, int], shape: tuple[int, int]
) -> None:
    packed = write_packed(tmp_path / "out", counts=(1,), grid=(grid,), sizes=((400, 600),))
    transform = Sized(region)
    sample = ShardDataset(packed.root, transform=transform).load(0)
    assert transform.view == view
    y, x, scale = view
    assert sample["image"].shape == (*shape, 3)
    assert np.allclose(sample["boxes"], (packed.boxes[0] - np.array([x, y, x, y], np.float32)) / scale)
    part = packed.images[0][y : y + shape[0] * scale, x : x + shape[1] * scale]
    expected = cv2.resize(part, shape[::-1], interpolation=cv2.INTER_AREA)
    assert np.abs(expected.astype(int) - sample["image"]).mean() < 1.5


def test_other_pictures_are_not_scaled(tmp_path: Path) -> None:
    packed = write_packed(tmp_path / "out", counts=(2,), parts=("png", "webp"), sizes=((400, 600),))
    for n in range(2):
        transform = Sized((8, 8, 300, 300))
        sample = ShardDataset(packed.root, transform=transform).load(n)
        assert transform.view == (8, 8, 1)
        assert np.array_equal(sample["image"], packed.images[n][8:308, 8:308])


def test_size_may_depend_on_the_region(tmp_path: Path) -> None:
    packed = write_packed(tmp_path / "out", counts=(1,), grid=(True,), sizes=((400, 600),))
    transform = Sized((0, 0, 400, 300), lambda height, width: (height // 3, width // 2))
    ShardDataset(packed.root, transform=transform).load(0)
    assert transform.view == (0, 0, 2)


@pytest.mark.parametrize("size", [40, "40", (40,), (0, 40), (40.0, 40), (1, 2, 3)])
def test_an_impossible_size_is_refused(tmp_path: Path, size: Any) -> None:
    packed = write_packed(tmp_path / "out", counts=(1,))
    with pytest.raises(ValueError, match=r"size is .*expected \(height, width\)"):
        ShardDataset(packed.root, transform=Sized((0, 0, 5, 5), size)).load(0)


# What is read


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of every read from a shard."""
    seen: list[int] = []
    original = OpenFile.read_scattered

    def spy(self: OpenFile, views: list[memoryview], offset: int, size: int) -> int:
        seen.append(sum(map(len, views)))
        return original(self, views, offset, size)

    monkeypatch.setattr(OpenFile, "read_scattered", spy)
    return seen


def noisy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Packed:
    """One picture of 640 x 960 that takes hundreds of kB."""

    def noise(rng: np.random.Generator, height: int, width: int) -> NDArray[np.uint8]:
        return rng.integers(0, 256, (height, width, 3), dtype=np.uint8)

    monkeypatch.setattr("packed_data.image", noise)
    return write_packed(tmp_path / "out", counts=(1,), sizes=((640, 960),), **options)


def test_a_region_of_a_grid_is_all_that_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: list[int]) -> None:
    packed = noisy(tmp_path, monkeypatch, grid=(True,))
    ds = ShardDataset(packed.root, transform=Sized((300, 500, 64, 96), None))
    assert ds.reads_regions(0)
    image = ds.load(0)["image"]
    assert np.array_equal(image, packed.images[0][300:364, 500:596])
    num_bytes = len(ds.encoded(0))
    assert reads[-1] == num_bytes > 500_000
    assert len(reads[:-1]) == 1 + 5  # the header, 5 rows of cells
    assert sum(reads[:-1]) < 0.03 * num_bytes


def test_reads_are_announced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = noisy(tmp_path, monkeypatch, grid=(True,))
    calls: list[tuple[str, int, int]] = []
    read, need = OpenFile.read_scattered, OpenFile.will_need

    def spy_read(self: OpenFile, views: list[memoryview], offset: int, size: int) -> int:
        calls.append(("read", offset, size))
        return read(self, views, offset, size)

    def spy_need(self: OpenFile, offset: int, size: int) -> None:
        calls.append(("need", offset, size))
        need(self, offset, size)

    monkeypatch.setattr(OpenFile, "read_scattered", spy_read)
    monkeypatch.setattr(OpenFile, "will_need", spy_need)
    ShardDataset(packed.root, transform=Sized((300, 500, 64, 96), None)).load(0)
    assert [kind for kind, *_ in calls] == ["read", *["need"] * 4, *["read"] * 5]  # the header comes first
    assert [place for kind, *place in calls if kind == "need"] == [place for _, *place in calls[6:]]


def test_damage_elsewhere_is_not_seen_but_by_the_checksum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: list[int]) -> None:
    packed = noisy(tmp_path, monkeypatch, grid=(True,))
    transform = Sized((300, 500, 64, 96), None)
    checked = ShardDataset(packed.root, transform=transform, check_crc=True)
    assert np.array_equal(checked.load(0)["image"], packed.images[0][300:364, 500:596])
    assert sum(reads) == len(checked.encoded(0))
    shard = packed.shard(0)
    data = bytearray(shard.read_bytes())
    data[len(data) - 4000 : len(data) - 3000] = bytes(1000)
    shard.write_bytes(data)
    assert np.array_equal(ShardDataset(packed.root, transform=transform).load(0)["image"], packed.images[0][300:364, 500:596])
    with pytest.raises(SampleError, match="CRC-32"):
        ShardDataset(packed.root, transform=transform, check_crc=True).load(0)


def test_damage_below_a_region_without_a_grid_is_not_seen_but_by_the_checksum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = noisy(tmp_path, monkeypatch)
    row = ShardDataset(packed.root)._index.samples[0]
    start, size = int(row["image_offset"]), int(row["image_size"])
    shard = packed.shard(0)
    data = bytearray(shard.read_bytes())
    data[start + size * 9 // 10 : start + size * 9 // 10 + 1000] = b"\xff\xd9" * 500
    shard.write_bytes(data)
    above, below = Sized((300, 500, 64, 96), None), Sized((300, 500, 340, 96), None)
    assert not ShardDataset(packed.root).reads_regions(0)
    for seen in (ShardDataset(packed.root, transform=above).load(0), next(ShardDataset(packed.root, transform=above).load_many([(0, 0)]))):
        assert np.array_equal(seen["image"], packed.images[0][300:364, 500:596])
    with pytest.raises(SampleError, match="jpg cannot be decoded"):
        ShardDataset(packed.root, transform=below).load(0)
    with pytest.raises(SampleError, match="CRC-32"):
        ShardDataset(packed.root, transform=above, check_crc=True).load(0)


def test_more_views_than_one_system_call_takes(tmp_path: Path) -> None:
    data = np.random.default_rng(0).integers(0, 256, 50_000, dtype=np.uint8).tobytes()
    (tmp_path / "data").write_bytes(data)
    file = OpenFile(tmp_path / "data")
    parts = [bytearray(n % 30) for n in range(3000)]
    assert file.read_scattered([memoryview(part) for part in parts], 100, 43_500) == sum(map(len, parts)) == 43_500
    assert b"".join(parts) == data[100:43_600]
    assert file.read_scattered([memoryview(part) for part in parts], 40_000, 43_500) == 10_000  # the end of the file
    assert b"".join(parts)[:10_000] == data[40_000:]


def test_reads_that_end_early_go_on_where_they_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an interrupted read from a network drive does."""
    data = bytes(range(256)) * 4
    (tmp_path / "data").write_bytes(data)
    original = os.preadv

    def short(fd: int, views: list[memoryview], offset: int) -> int:
        return original(fd, [views[0][:7]], offset)

    monkeypatch.setattr(os, "preadv", short)
    for sizes in ((100, 1, 0, 300), (7, 7, 7), (6, 8), (1000,)):
        parts = [bytearray(n) for n in sizes]
        assert OpenFile(tmp_path / "data").read_scattered([memoryview(p) for p in parts], 20, sum(sizes)) == sum(sizes)
        assert b"".join(parts) == data[20 : 20 + sum(sizes)]


# Errors


def rewrite(packed: Packed, name: str, change: Callable[[NDArray[Any]], None]) -> None:
    path = packed.root / index_path("train", name)
    array = np.load(path, allow_pickle=False)
    change(array)
    np.save(path, array)


def test_offsets_that_lie_name_shard_and_sample(tmp_path: Path) -> None:
    def shift(array: NDArray[Any]) -> None:
        array[1:-1] += 1

    def move(array: NDArray[Any]) -> None:
        array[:] = 4_000_000_000

    def taller(array: NDArray[Any]) -> None:
        array["height"] += 1

    for number, (name, change) in enumerate((("restarts", shift), ("restarts", move), ("samples", taller))):
        packed = write_packed(tmp_path / f"out{number}", counts=(1,), grid=(True,), sizes=((97, 131),))
        rewrite(packed, name, change)
        with pytest.raises(SampleError, match=r"shard-000000.tar: sample 000000003 .source images/bild_0.*the jpg (has|says)"):
            ShardDataset(packed.root, transform=Sized((20, 20, 50, 50), None)).load(0)


def test_a_shard_cut_short_or_damaged_in_the_region(tmp_path: Path) -> None:
    packed = write_packed(tmp_path / "out", counts=(2,), grid=(True,), sizes=((97, 131),))
    shard = packed.shard(0)
    data = shard.read_bytes()
    ds = ShardDataset(packed.root)
    first = data.index(ds.encoded(0))
    damaged = bytearray(data)
    for at in range(first + 1000, first + len(ds.encoded(0)) - 500, 7):
        damaged[at] ^= 0x55
    shard.write_bytes(damaged)
    whole = Sized((0, 0, 97, 131), None)
    with pytest.raises(SampleError, match="sample 000000003"):
        ShardDataset(packed.root, transform=whole).load(0)
    replaced = ShardDataset(packed.root, transform=Recording(), seed=9, on_error="replace")
    with pytest.warns(UserWarning, match="sample 0 was replaced by sample 1"):
        sample = replaced.load(0)
    assert sample["index"] == 1
    # The substitute has its own randomness, as if it had been asked for.
    assert sample["noise"] == ShardDataset(packed.root, transform=Recording(), seed=9).load(1)["noise"]
    with pytest.raises(SampleError):
        replaced.load_region(0, (0, 0, 97, 131))
    shard.write_bytes(data[: first + 200])
    with pytest.raises(SampleError, match="cut short"):
        ShardDataset(packed.root, transform=whole).load(0)


@pytest.mark.parametrize(
    ("answer", "error"),
    [((0, 0, 98, 10), ValueError), ((0, 0, 0, 10), ValueError), ((0, -1, 5, 5), ValueError), ((1, 2, 3), ValueError), (None, ValueError)],
)
def test_an_impossible_region_is_refused(packed: Packed, answer: Any, error: type[Exception]) -> None:
    ds = open_set(packed, transform=Sized(answer, None))
    with pytest.raises(error, match=r"sample 0 .key 000000003.* of .*, split 'train', epoch 0"):
        ds.load(0)


def test_an_exception_in_region_says_where(packed: Packed) -> None:
    class Failing(Sized):
        def region(self, sample: dict[str, Any], rng: np.random.Generator) -> tuple[int, int, int, int]:
            del rng
            raise ZeroDivisionError(sample["key"])

    with pytest.raises(ZeroDivisionError) as caught:
        open_set(packed, transform=Failing((0, 0, 1, 1))).load(1)
    assert "in the transform's region of sample 1 (key 000000010)" in caught.value.__notes__[0]


def test_transformed_on_a_picture_in_hand() -> None:
    image = np.arange(10 * 12 * 3, dtype=np.uint8).reshape(10, 12, 3)
    transform = Sized((2, 3, 5, 6))
    sample = transformed(transform, {"image": image, "boxes": np.array([[3, 2, 5, 6]], np.float32)}, np.random.default_rng(0), lambda: "a")
    assert np.array_equal(sample["image"], image[2:7, 3:9])
    assert sample["boxes"].tolist() == [[0, 0, 2, 4]]
    assert transform.view == (2, 3, 1)


# Scratch memory


def test_scratch_is_used_again_only_when_nobody_holds_it() -> None:
    scratch = Scratch()
    first = scratch.blank((10, 20, 3))
    address = first.ctypes.data
    assert first.shape == (10, 20, 3)
    assert first.flags.c_contiguous
    view = first[2:5]
    del first
    second = scratch.blank((10, 20, 3))
    assert second.ctypes.data != address
    del view
    address = second.ctypes.data
    tensor = torch.from_numpy(second[1:])
    del second
    third = scratch.blank((10, 20, 3))
    assert third.ctypes.data != address
    address = third.ctypes.data
    del third, tensor
    assert scratch.blank((8, 9, 3)).ctypes.data == address
    assert scratch.blank((3000, 3000, 3)).shape == (3000, 3000, 3)


def test_scratch_belongs_to_one_thread() -> None:
    scratch = Scratch()
    mine = scratch.blank((5, 5, 3)).ctypes.data
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(lambda: scratch.blank((5, 5, 3)).ctypes.data).result() != mine
    assert scratch.blank((5, 5, 3)).ctypes.data == mine
