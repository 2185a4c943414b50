"""`ShardDataset` against data that `packed_data` wrote, and what it shares with `MemmapDataset`."""

from __future__ import annotations

import os
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from build_data import read_json, sign_manifest
from loaders.collate import collate_list
from loaders.dataset import PackedDataset, SampleError
from loaders.format import FormatError, sha256_file
from loaders.handles import ProcessCache
from loaders.memmap import MemmapDataset
from loaders.shards import ShardDataset, ShardStream
from packed_data import CLASSES, Packed, write_packed

LAYOUTS: dict[str, type[PackedDataset]] = {"tar": ShardDataset, "memmap": MemmapDataset}


@pytest.fixture(scope="module", params=["tar", "memmap"])
def packed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Packed:
    """Detection, 10 samples in 3 shards, with images without boxes. Tests do not change it."""
    return write_packed(tmp_path_factory.mktemp("packed") / "out", request.param, "detection")


def open_set(packed: Packed, **options: Any) -> PackedDataset:
    return LAYOUTS[packed.layout](packed.root, **options)


def check_sample(sample: dict[str, Any], packed: Packed, n: int, index: int) -> None:
    assert sample["image"].dtype == torch.from_numpy(packed.images[n]).dtype
    assert np.array_equal(sample["image"].permute(1, 2, 0).numpy(), packed.images[n])
    assert sample["boxes"].dtype == torch.float32
    assert sample["boxes"].shape == (len(packed.boxes[n]), 4)
    assert np.array_equal(sample["boxes"].numpy(), packed.boxes[n])
    assert sample["labels"].dtype == torch.int64
    assert np.array_equal(sample["labels"].numpy(), packed.box_labels[n])
    assert sample["difficult"].dtype == torch.uint8
    assert np.array_equal(sample["difficult"].numpy(), packed.difficult[n])
    assert (sample["key"], sample["index"]) == (packed.keys[n], index)
    assert type(sample["key"]) is int
    assert type(sample["index"]) is int


def brighten(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """Changes everything in place, as Albumentations and OpenCV do."""
    sample["image"][:] = 255 - sample["image"]
    sample["boxes"] += 1
    sample["noise"] = rng.integers(0, 1 << 40, 3)
    return sample


# Samples


def test_every_sample_is_what_was_packed(packed: Packed) -> None:
    ds = open_set(packed)
    assert len(ds) == len(packed.images) == 10
    for n in range(10):
        check_sample(ds[n], packed, n, n)
    assert list(ds[0]) == ["image", "boxes", "labels", "difficult", "key", "index"]


def test_index_may_be_negative_or_numpy_but_not_out_of_range(packed: Packed) -> None:
    ds = open_set(packed)
    check_sample(ds[-1], packed, 9, 9)
    check_sample(ds[np.int64(4)], packed, 4, 4)
    check_sample(ds[torch.tensor(4)], packed, 4, 4)  # type: ignore[index]  # a 0-d tensor has __index__
    for bad in (10, -11):
        with pytest.raises(IndexError, match=f"index {bad} is out of range.*10 samples"):
            ds[bad]
    with pytest.raises(TypeError):
        ds["0"]  # type: ignore[index]


def test_iterating_ends(packed: Packed) -> None:
    assert [s["index"] for s in open_set(packed)] == list(range(10))  # type: ignore[attr-defined]  # by __getitem__


def test_getitems_equals_getitem(packed: Packed) -> None:
    ds = open_set(packed)
    for sample, n in zip(ds.__getitems__([7, 0, 7]), [7, 0, 7], strict=True):
        check_sample(sample, packed, n, n)


def test_meta(packed: Packed) -> None:
    ds = open_set(packed)
    for n in (0, 5, -1):
        height, width = packed.images[n].shape[:2]
        meta = ds.meta(n)
        assert meta == {"source": packed.sources[n], "affine": packed.affine, "original_size": (2 * height + 1, 2 * width)}
        assert all(type(v) is float for v in meta["affine"])


def test_labels_of_detection_are_csr(packed: Packed) -> None:
    ds = open_set(packed)
    assert ds.classes == CLASSES
    assert ds.labels is not None
    assert ds.box_offsets is not None
    assert (ds.labels.dtype, ds.box_offsets.dtype) == (np.int64, np.int64)
    for n in range(10):
        assert np.array_equal(ds.labels[ds.box_offsets[n] : ds.box_offsets[n + 1]], packed.box_labels[n])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_classification_and_unlabelled(tmp_path: Path, layout: Any) -> None:
    packed = write_packed(tmp_path / "c", layout, "classification")
    ds = open_set(packed)
    assert ds.labels is not None
    assert ds.labels.tolist() == packed.labels
    assert ds.labels.dtype == np.int64
    assert [ds[n]["label"] for n in range(10)] == packed.labels
    assert type(ds[1]["label"]) is int
    assert "boxes" not in ds[1]
    assert ds.box_offsets is None
    selected = ds.select([5, 1])
    assert selected.labels is not None
    assert selected.labels.tolist() == [packed.labels[5], packed.labels[1]]
    with pytest.raises(ValueError, match="has no boxes"):
        ds.gather_ragged([0])

    plain = open_set(write_packed(tmp_path / "u", layout, "unlabelled"))
    assert plain.labels is None
    assert plain.classes == []
    assert list(plain[0]) == ["image", "key", "index"]


@pytest.mark.parametrize("part", ["jpg", "png", "webp"])
def test_every_image_part_is_read(tmp_path: Path, part: str) -> None:
    packed = write_packed(tmp_path / "out", parts=(part,))
    check_sample(ShardDataset(packed.root)[3], packed, 3, 3)


# Selections


def test_select_keeps_order_and_numbers_anew(packed: Packed) -> None:
    ds = open_set(packed)
    fold = ds.select([9, 2, 2, -10])
    assert type(fold) is type(ds)
    for index, n in enumerate([9, 2, 2, 0]):
        check_sample(fold[index], packed, n, index)
    assert fold.meta(1)["source"] == packed.sources[2]
    assert len(ds) == 10
    check_sample(fold.select([1])[0], packed, 2, 0)
    mask = np.arange(10) % 2 == 1
    assert [s["key"] for s in ds.select(mask).__getitems__(range(5))] == [packed.keys[n] for n in (1, 3, 5, 7, 9)]
    assert len(ds.select([])) == 0


def test_select_refuses_nonsense(packed: Packed) -> None:
    ds = open_set(packed)
    with pytest.raises(IndexError, match="index 10 is out of range"):
        ds.select([0, 10])
    with pytest.raises(IndexError, match="index -11 is out of range"):
        ds.select([-11, 3])
    with pytest.raises(ValueError, match=r"shape \(3,\), expected \(10,\)"):
        ds.select([True, False, True])
    with pytest.raises(ValueError, match="expected one dimension of ints"):
        ds.select([0.5])
    with pytest.raises(ValueError, match="expected one dimension of ints"):
        ds.select([[1]])


def test_labels_and_offsets_of_a_selection(packed: Packed) -> None:
    fold = open_set(packed).select([3, 1, 0])
    assert fold.labels is not None
    assert fold.box_offsets is not None
    assert fold.box_offsets.tolist() == [0, *np.cumsum([len(packed.boxes[n]) for n in (3, 1, 0)])]
    assert np.array_equal(fold.labels, np.concatenate([packed.box_labels[n] for n in (3, 1, 0)]))


def test_fingerprint_tells_data_split_and_selection_apart(packed: Packed, tmp_path: Path) -> None:
    ds = open_set(packed)
    other = write_packed(tmp_path / "other", packed.layout, seed=5)
    prints = {ds.fingerprint, ds.select([1, 2]).fingerprint, ds.select([2, 1]).fingerprint, open_set(other).fingerprint}
    assert len(prints) == 4
    assert open_set(packed, seed=3).fingerprint == ds.fingerprint
    assert pickle.loads(pickle.dumps(ds.select([1, 2]))).fingerprint == ds.select([1, 2]).fingerprint


# Gathering


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_gather_equals_single_samples(packed: Packed, data: st.DataObject) -> None:
    ds = open_set(packed)
    if data.draw(st.booleans()):
        ds = ds.select(data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=12)))
    indices = data.draw(st.lists(st.integers(0, len(ds) - 1), max_size=12))
    fields = ds.batch_fields()
    assert fields == {"image": ((12, 16, 3), np.uint8), "key": ((), np.int64), "index": ((), np.int64)}
    out = {name: np.full((14, *shape), 77, dtype) for name, (shape, dtype) in fields.items()}
    used = ds.gather(np.array(indices, np.int64), out)
    assert used.tolist() == indices
    boxes, labels, difficult, offsets = ds.gather_ragged(np.array(indices, np.int64))
    assert (boxes.dtype, labels.dtype, difficult.dtype, offsets.dtype) == (np.float32, np.int64, np.uint8, np.int64)
    assert (boxes.shape, offsets[0], offsets[-1]) == ((len(labels), 4), 0, len(labels))
    for j, i in enumerate(indices):
        sample, rows = ds.load(i), slice(offsets[j], offsets[j + 1])
        assert np.array_equal(out["image"][j], sample["image"])
        assert (out["key"][j], out["index"][j]) == (sample["key"], i)
        assert np.array_equal(boxes[rows], sample["boxes"])
        assert np.array_equal(labels[rows], sample["labels"])
        assert np.array_equal(difficult[rows], sample["difficult"])
    assert all((array[len(indices) :] == 77).all() for array in out.values())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gather_labels(tmp_path: Path, layout: Any) -> None:
    packed = write_packed(tmp_path / "out", layout, "classification")
    ds = open_set(packed)
    assert ds.batch_fields()["label"] == ((), np.int64)
    out = {"label": np.zeros(3, np.int64)}
    ds.gather([8, 0, 4], out)
    assert out["label"].tolist() == [packed.labels[n] for n in (8, 0, 4)]


@pytest.mark.parametrize("batch", [[1, 2, 5, 6, 9], [6, 2, 9, 1, 5], [2, 2, 3]])
def test_gather_names_or_replaces_each_damaged_sample_of_a_batch(tmp_path: Path, batch: list[int]) -> None:
    packed = write_packed(tmp_path / "out", parts=("jpg", "jpg", "jpg", "png"))  # 3 and 7 are PNG
    path = packed.root / "index/train/samples.npy"
    rows = np.load(path)
    rows["image_crc32"][2] += 1  # only check_crc sees it
    rows["image_size"][6] -= 30  # a JPEG that ends too early
    rows["height"], rows["width"] = 12, 16
    np.save(path, rows)
    raw = read_json(packed.root)
    raw["files"]["index/train/samples.npy"]["sha256"] = sha256_file(path)
    sign_manifest(packed.root, raw)
    slots = np.zeros((5, 12, 16, 3), np.uint8)
    ds = ShardDataset(packed.root, check_crc=True, on_error="replace")
    with pytest.warns(UserWarning, match=r"was replaced by sample"):
        used = ds.gather(batch, {"image": slots})
    assert used.tolist() == [{2: 3, 6: 7}.get(i, i) for i in batch]
    assert ds.num_replaced == sum(i in (2, 6) for i in batch)
    for slot, n in zip(slots, used.tolist(), strict=False):
        assert np.array_equal(slot, packed.images[n])
    first = next(i for i in batch if i in (2, 6))
    with pytest.raises(SampleError, match=rf"sample {packed.keys[first]:09d}.*the (image has CRC-32|jpg cannot be decoded)"):
        ShardDataset(packed.root, check_crc=True).gather(batch, {"image": slots})


def test_gather_refuses_a_picture_of_another_shape(tmp_path: Path) -> None:
    packed = write_packed(tmp_path / "out", sizes=((12, 16), (16, 12)))
    path = packed.root / "index/train/samples.npy"
    rows = np.load(path)
    rows["height"], rows["width"] = 12, 16
    np.save(path, rows)
    slots = np.zeros((1, 12, 16, 3), np.uint8)
    with pytest.raises(SampleError, match=r"sample 000000010 .*decoded to .*\(16, 12, 3\), the index says \(12, 16, 3\)"):
        ShardDataset(packed.root).gather([1], {"image": slots})
    ShardDataset(packed.root).gather([2], {"image": slots})
    assert np.array_equal(slots[0], packed.images[2])


def test_one_image_size_is_found_in_parts_and_leaves_no_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loaders.split._ROWS_AT_A_TIME", 4)
    same = write_packed(tmp_path / "same")
    ds = ShardDataset(same.root)
    assert ds.image_size() == (12, 16)
    if Path("/proc/self/smaps").exists():
        maps = Path("/proc/self/smaps").read_text("utf-8").split(str(same.root / "index/train/samples.npy"))
        assert [part.split("Rss:")[1].split()[0] for part in maps[1:]] == ["0"]
    last = write_packed(tmp_path / "last", sizes=((12, 16),) * 9 + ((12, 17),))
    assert ShardDataset(last.root).image_size() is None
    assert ShardDataset(last.root).select([0, 8, 1, 2, 3]).image_size() == (12, 16)
    assert ShardDataset(last.root).select([0, 1, 2, 3, 9]).image_size() is None
    assert ShardDataset(last.root).select([]).image_size() is None


def test_gather_checks_indices_and_slots_first(packed: Packed) -> None:
    ds = open_set(packed)
    slots = np.full((4, 12, 16, 3), 5, np.uint8)
    with pytest.raises(IndexError, match="index 10 is out of range"):
        ds.gather([0, 10], {"image": slots})
    with pytest.raises(ValueError, match="expected at least 5"):
        ds.gather([0] * 5, {"image": slots})
    with pytest.raises(ValueError, match="C-contiguous"):
        ds.gather([0], {"image": slots[:, ::-1]})
    assert (slots == 5).all()
    for wrong in (np.zeros((4, 12, 17, 3), np.uint8), np.zeros((4, 12, 16, 3), np.float32)):
        with pytest.raises(ValueError, match=r"out\['image'\]"):
            ds.gather([0], {"image": wrong})


def test_images_of_several_sizes_are_no_batch_field(tmp_path: Path) -> None:
    packed = write_packed(tmp_path / "out", sizes=((12, 16), (10, 8)))
    ds = ShardDataset(packed.root)
    assert ds.image_size() is None
    assert "image" not in ds.batch_fields()
    with pytest.raises(ValueError, match="several sizes"):
        ds.gather([0], {"image": np.zeros((1, 12, 16, 3), np.uint8)})
    even = ds.select(range(0, 10, 2))
    assert even.image_size() == (12, 16)
    assert "image" in even.batch_fields()
    assert ds.select([]).image_size() is None


# Transforms


def test_transform_gets_private_memory_and_keyed_randomness(packed: Packed) -> None:
    ds, plain = open_set(packed, transform=brighten, seed=5), open_set(packed)
    first = [ds[n] for n in range(10)]
    assert np.array_equal(first[0]["image"].permute(1, 2, 0).numpy(), 255 - packed.images[0])
    assert np.array_equal(first[0]["boxes"].numpy(), packed.boxes[0] + 1)
    assert first[0]["noise"].dtype == torch.int64
    for n in range(10):
        check_sample(plain[n], packed, n, n)  # nothing leaked into map or index
    assert len({tuple(s["noise"].tolist()) for s in first}) == 10
    backwards = [ds[n]["noise"] for n in reversed(range(10))][::-1]
    assert all(torch.equal(a["noise"], b) for a, b in zip(first, backwards, strict=True))


def test_randomness_depends_on_seed_epoch_and_index_only(packed: Packed) -> None:
    ds = open_set(packed, transform=brighten, seed=5)
    base = ds[4]["noise"].tolist()
    ds.set_epoch(1)
    assert ds.epoch == 1
    assert ds[4]["noise"].tolist() != base
    assert ds.load(4, epoch=0)["noise"].tolist() == base
    assert open_set(packed, transform=brighten, seed=6)[4]["noise"].tolist() != base
    assert open_set(packed, transform=brighten, seed=-1)[4]["noise"].tolist() != base
    with ThreadPoolExecutor(4) as pool:
        noises = list(pool.map(lambda _: ds.load(4, epoch=0)["noise"].tolist(), range(40)))
    assert noises == [base] * 40


def test_random_stream_is_the_documented_one(packed: Packed) -> None:
    expected = np.random.Generator(np.random.Philox(key=[5, 2], counter=[0, 0, 0, 4])).integers(0, 1 << 40, 3)
    assert np.array_equal(open_set(packed, transform=brighten, seed=5).load(4, epoch=2)["noise"], expected)


def test_transform_may_load_other_samples(packed: Packed) -> None:
    inner = open_set(packed, transform=brighten)

    def mosaic(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        before = rng.integers(0, 1 << 40, 3)
        inner.load(0)
        outer.transform = None
        outer.load(1)
        outer.transform = nested if sample["index"] == 2 else mosaic
        outer.load(3)
        outer.transform = mosaic
        return {**sample, "noise": before, "after": rng.integers(0, 1 << 40, 3)}

    def nested(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        rng.random(1000)
        return sample

    outer = open_set(packed, transform=mosaic)
    reference = np.random.Generator(np.random.Philox(key=[0, 0], counter=[0, 0, 0, 2]))
    sample = outer.load(2)
    assert np.array_equal(sample["noise"], reference.integers(0, 1 << 40, 3))
    assert np.array_equal(sample["after"], reference.integers(0, 1 << 40, 3))


def test_what_a_transform_returns_becomes_tensors_where_it_can(packed: Packed) -> None:
    def transform(sample: dict[str, Any], _rng: np.random.Generator) -> dict[str, Any]:
        flipped = np.flip(sample["image"], axis=1)
        return {"image": flipped, "gray": flipped[..., 0], "name": "x", "n": 3, "words": np.array(["a"]), "big": np.array([1.5], ">f4")}

    sample = open_set(packed, transform=transform)[0]
    assert np.array_equal(sample["image"].permute(1, 2, 0).numpy(), packed.images[0][:, ::-1])
    assert torch.is_tensor(sample["gray"])
    assert sample["gray"].shape == (12, 16)
    assert (sample["name"], sample["n"], sample["words"].tolist(), sample["big"].tolist()) == ("x", 3, ["a"], [1.5])


def test_faults_of_a_transform_say_where(packed: Packed) -> None:
    def nothing(_sample: dict[str, Any], _rng: np.random.Generator) -> Any:
        return None

    def fails(_sample: dict[str, Any], _rng: np.random.Generator) -> Any:
        raise KeyError("bad")

    with pytest.raises(TypeError, match=r"sample 1 \(key 000000010\).*returned NoneType"):
        open_set(packed, transform=nothing)[1]
    with pytest.raises(KeyError) as caught:
        open_set(packed, transform=fails, on_error="replace")[1]
    assert "sample 1 (key 000000010)" in caught.value.__notes__[0]


# Damage


def damage(packed: Packed, n: int, how: str) -> None:
    """Harm sample n's image in a tar."""
    row = np.load(packed.root / "index/train/samples.npy")[n]
    path = packed.shard(int(row["shard"]))
    if how == "missing":
        path.unlink()
        return
    with path.open("r+b") as f:
        if how == "cut":
            f.truncate(int(row["image_offset"]) + 10)
        else:
            f.seek(int(row["image_offset"]) + (0 if how == "magic" else int(row["image_size"]) // 2))
            f.write(b"no image" if how == "magic" else bytes(60))


DAMAGE = {"missing": "No such file", "cut": "it was cut short", "magic": "begins with b'no image'", "zeros": "cannot be decoded"}


@pytest.mark.parametrize(("how", "reason"), DAMAGE.items())
def test_damage_names_shard_key_source_and_way_out(tmp_path: Path, how: str, reason: str) -> None:
    packed = write_packed(tmp_path / "out", sizes=((80, 80),))
    damage(packed, 5, how)
    ds = ShardDataset(packed.root)
    source = r"images/bild_5_ä\.jpg" if how in ("magic", "zeros") else ".*"
    pattern = rf"shard-000001\.tar: sample 000000038 \(source {source}.*{reason}.*pack verify.*on_error"
    with pytest.raises(SampleError, match=pattern):
        ds[5]
    with pytest.raises(SampleError, match=pattern):
        ds.gather([0, 5], {"image": np.zeros((2, 80, 80, 3), np.uint8)})
    check_sample(ds[9], packed, 9, 9)


def test_crc_finds_a_change_that_decodes(tmp_path: Path) -> None:
    packed = write_packed(tmp_path / "out", parts=("png",))
    row = np.load(packed.root / "index/train/samples.npy")[2]
    with packed.shard(0).open("r+b") as f:
        f.seek(int(row["image_offset"]) + int(row["image_size"]) - 4)  # the last chunk's own checksum
        f.write(b"\0\0\0\0")
    for n in range(10):
        if n != 2:
            check_sample(ShardDataset(packed.root, check_crc=True)[n], packed, n, n)
    with pytest.raises(SampleError, match=r"has CRC-32 .*, the index says .*: its bytes were changed"):
        ShardDataset(packed.root, check_crc=True)[2]


def test_damaged_json_is_a_sample_error_of_meta_only(tmp_path: Path) -> None:
    packed = write_packed(tmp_path / "out")
    row = np.load(packed.root / "index/train/samples.npy")[2]
    with packed.shard(0).open("r+b") as f:
        f.seek(int(row["json_offset"]))
        f.write(b"nope")
    ds = ShardDataset(packed.root)
    check_sample(ds[2], packed, 2, 2)
    with pytest.raises(SampleError, match=r"sample 000000017 .*json part is not as the format says"):
        ds.meta(2)


def test_replace_takes_the_next_good_sample_and_counts(tmp_path: Path) -> None:
    packed = write_packed(tmp_path / "out", sizes=((80, 80),))
    damage(packed, 9, "zeros")
    damage(packed, 0, "magic")
    ds = ShardDataset(packed.root, on_error="replace")
    with pytest.warns(UserWarning, match=r"sample 9 was replaced by sample 1.*num_replaced"):
        check_sample(ds[9], packed, 1, 1)
    assert ds.num_replaced == 1
    check_sample(ds[0], packed, 1, 1)  # and no second warning: the tests run with warnings as errors
    out = {"image": np.zeros((3, 80, 80, 3), np.uint8), "key": np.zeros(3, np.int64), "index": np.zeros(3, np.int64)}
    used = ds.gather([9, 2, 0], out)
    assert used.tolist() == out["index"].tolist() == [1, 2, 1]
    assert out["key"].tolist() == [packed.keys[n] for n in (1, 2, 1)]
    assert np.array_equal(out["image"][0], packed.images[1])
    assert ds.num_replaced == 4
    assert ds.select([0, 1]).num_replaced == 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_replace_passes_over_a_missing_shard(tmp_path: Path, layout: Any) -> None:
    packed = write_packed(tmp_path / "out", layout, "classification", counts=(3, 40, 30))
    (packed.shard(1) if layout == "tar" else packed.shard(1) / "image.npy").unlink()
    ds = open_set(packed, on_error="replace")
    with pytest.warns(UserWarning, match="sample 3 was replaced by sample 67"):
        assert ds[3]["index"] == 3 + 64
    out = {"image": np.zeros((3, 12, 16, 3), np.uint8), "label": np.zeros(3, np.int64)}
    assert ds.gather([2, 30, 50], out).tolist() == [2, 43, 50]
    assert np.array_equal(out["image"][1], packed.images[43])
    assert out["label"].tolist() == [packed.labels[n] for n in (2, 43, 50)]
    with pytest.raises(SampleError, match="No other sample that was tried") as caught:
        ds.select(range(3, 43))[0]
    assert "on_error" not in str(caught.value)  # it was tried
    with pytest.raises(SampleError, match=r'; on_error="replace" goes on with other samples$'):
        open_set(packed)[3]


def test_a_sample_error_crosses_processes(tmp_path: Path) -> None:
    packed = write_packed(tmp_path / "out", counts=(2,))
    damage(packed, 1, "magic")
    loader = DataLoader(ShardDataset(packed.root), batch_size=1, num_workers=1, collate_fn=collate_list, multiprocessing_context="fork")
    batches = iter(loader)
    assert next(batches)["key"].tolist() == [3]
    with pytest.raises(SampleError, match="sample 000000010"):
        next(batches)
    assert list(batches) == []  # lets torch end its worker; left to the garbage collector it waits for 5 s


# Opening


def test_wrong_folder_layout_split_or_option(packed: Packed, tmp_path: Path) -> None:
    other = "memmap" if packed.layout == "tar" else "tar"
    with pytest.raises(FormatError, match=f"layout is '{packed.layout}', expected '{other}': use loaders"):
        LAYOUTS[other](packed.root)
    with pytest.raises(FormatError, match="has no split 'val'; it has: train"):
        open_set(packed, split="val")
    with pytest.raises(FormatError, match=r"manifest.json: not found"):
        LAYOUTS[packed.layout](tmp_path)
    with pytest.raises(ValueError, match="on_error is 'skip'"):
        open_set(packed, on_error="skip")


def test_opening_touches_no_shard(packed: Packed, tmp_path: Path) -> None:
    copy = write_packed(tmp_path / "out", packed.layout)
    for number in range(3):
        copy.shard(number).rename(copy.root / f"away-{number}")
    ds = open_set(copy)
    assert len(ds) == 10
    assert "image" in ds.batch_fields()


def open_below(root: Path) -> int:
    """Files of this process that are open below a folder."""
    links = (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))
    return sum(os.readlink(link).startswith(str(root)) for link in links if os.path.lexists(link))


def test_shard_files_stay_few_and_close(tmp_path: Path) -> None:
    packed = write_packed(tmp_path / "out", counts=(1,) * 20)
    ds = ShardDataset(packed.root)
    maps = open_below(packed.root)
    ds._shards = ProcessCache(4)
    for n in range(20):
        check_sample(ds[n], packed, n, n)
    assert open_below(packed.root) == maps + 4
    del ds
    assert open_below(packed.root) == 0


def test_process_cache_is_empty_after_fork_even_with_its_lock_held() -> None:
    cache: ProcessCache[int] = ProcessCache(3)
    assert cache.get("a", lambda: 1) == 1
    assert cache.get("a", lambda: 2) == 1
    with cache.lock:
        pid = os.fork()
        if pid == 0:
            os._exit(0 if cache.get("a", lambda: 3) == 3 else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert cache.get("a", lambda: 2) == 1


def test_many_threads_read_the_same(packed: Packed) -> None:
    ds = open_set(packed)
    ds._shards = ProcessCache(1)  # every other read closes a shard under somebody's hands
    start = threading.Barrier(4)

    def read(worker: int) -> None:
        start.wait()
        for n in range(60):
            check_sample(ds[(n * 7 + worker) % 10], packed, (n * 7 + worker) % 10, (n * 7 + worker) % 10)

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(read, worker) for worker in range(4)]:
            done.result()


# Pickling and worker processes


def test_pickle_is_a_path(packed: Packed) -> None:
    ds = open_set(packed, transform=brighten, seed=5, on_error="replace")
    ds.set_epoch(3)
    ds[0]
    data = pickle.dumps(ds)
    assert len(data) < 2000
    copy = pickle.loads(data)
    assert (copy.epoch, copy.seed, copy.on_error, copy.transform) == (3, 5, "replace", brighten)
    assert torch.equal(copy[4]["noise"], ds[4]["noise"])
    fold = pickle.loads(pickle.dumps(open_set(packed).select([4, 2])))
    check_sample(fold[0], packed, 4, 0)


def test_a_pickle_refuses_other_data(tmp_path: Path) -> None:
    ds = ShardDataset(write_packed(tmp_path / "out").root)
    data = pickle.dumps(ds)
    write_packed(tmp_path / "out", seed=3)
    with pytest.raises(FormatError, match="was replaced"):
        pickle.loads(data)


def test_relative_roots_survive_a_change_of_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = write_packed(tmp_path / "out")
    monkeypatch.chdir(tmp_path)
    ds = ShardDataset("out")
    monkeypatch.chdir("/")
    check_sample(ds[0], packed, 0, 0)


def read_with_workers(packed: Packed, method: str) -> None:
    ds = open_set(packed, transform=brighten)
    loader = DataLoader(ds, batch_size=4, num_workers=2, collate_fn=collate_list, multiprocessing_context=method, persistent_workers=True)
    for epoch in range(2):  # the workers of the second epoch are those of the first: set_epoch must reach them
        ds.set_epoch(epoch)
        batches = list(loader)
        assert [b["index"].tolist() for b in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
        for batch in batches:
            for j, n in enumerate(batch["index"].tolist()):
                expected = ds[n]
                assert torch.equal(batch["image"][j], expected["image"])
                assert torch.equal(batch["boxes"][j], expected["boxes"])
                assert torch.equal(batch["noise"][j], expected["noise"])
    del loader


def test_dataloader_fork(packed: Packed) -> None:
    read_with_workers(packed, "fork")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_dataloader_spawn_and_forkserver(packed: Packed, method: str) -> None:
    read_with_workers(packed, method)


def test_stream_is_importable_from_here() -> None:
    assert ShardStream.__module__ == "loaders.stream"
