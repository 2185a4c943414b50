"""`DeviceDataset` gives what `BatchLoader` gives, batch for batch, and goes on where it stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from loaders.batches import BatchLoader
from loaders.collate import collate_indexed, collate_list, collate_padded
from loaders.device import DeviceDataset
from loaders.memmap import MemmapDataset
from loaders.shards import ShardDataset
from packed_data import Packed, write_packed

DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")])]


@pytest.fixture(params=["memmap", "tar"])
def layout(request: pytest.FixtureRequest) -> Any:
    return request.param


def opened(packed: Packed, **options: Any) -> MemmapDataset | ShardDataset:
    kind = MemmapDataset if packed.layout == "memmap" else ShardDataset
    return kind(packed.root, **options)


def assert_equal(got: dict[str, Any], expected: dict[str, Any]) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, list):
            assert all(torch.equal(g.cpu(), e) for g, e in zip(got[name], value, strict=True)), name
        else:
            assert torch.equal(got[name].cpu(), value), name
            assert got[name].stride() == value.stride(), name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("task", ["classification", "detection", "unlabelled"])
@pytest.mark.parametrize("remainder", ["drop", "pad"])
@pytest.mark.parametrize("shuffle", [True, False])
def test_batches_are_those_of_batch_loader(tmp_path: Path, layout: Any, task: Any, remainder: Any, shuffle: bool, device: str) -> None:
    ds = opened(write_packed(tmp_path, layout, task, counts=(13, 20, 4)))
    resident = DeviceDataset(ds, device, 8, shuffle, seed=3, remainder=remainder)
    with BatchLoader(ds, 8, shuffle, seed=3, remainder=remainder) as loader:
        assert len(resident) == len(loader)
        for _ in range(2):
            for got, expected in zip(resident, loader, strict=True):
                assert got["image"].device.type == device
                assert_equal(got, expected)


@pytest.mark.parametrize("collate", [collate_list, collate_padded, collate_indexed])
def test_boxes_in_every_form(tmp_path: Path, collate: Any) -> None:
    ds = opened(write_packed(tmp_path, "memmap", "detection"))
    with BatchLoader(ds, 4, collate=collate) as loader:
        for got, expected in zip(DeviceDataset(ds, "cpu", 4, collate=collate), loader, strict=True):
            assert_equal(got, expected)


def test_boxes_are_those_of_the_picture_that_is_really_there(tmp_path: Path) -> None:
    packed = write_packed(tmp_path, "tar", "detection", counts=(10,))
    row = np.load(packed.root / "index/train/samples.npy")[4]
    with packed.shard(0).open("r+b") as shard:
        shard.seek(int(row["image_offset"]) + 200)
        shard.write(bytes(int(row["image_size"]) - 200))
    ds = ShardDataset(packed.root, on_error="replace")
    with pytest.warns(UserWarning, match="replaced"):
        resident = DeviceDataset(ds, "cpu", 5, shuffle=False)
    whole = write_packed(tmp_path / "whole", "tar", "detection", counts=(10,))
    indices = []
    for batch in resident:
        indices += batch["index"].tolist()
        for index, boxes in zip(batch["index"].tolist(), batch["boxes"], strict=True):
            assert np.array_equal(boxes, ShardDataset(whole.root).load(index)["boxes"])
    assert indices[4] != 4
    assert indices[:4] + indices[5:] == [0, 1, 2, 3, 5, 6, 7, 8, 9]


def test_weights_and_ranks(tmp_path: Path) -> None:
    ds = opened(write_packed(tmp_path, "memmap", "classification", counts=(40,)))
    for rank in range(3):
        options: dict[str, Any] = {"rank": rank, "world_size": 3, "weights": "balanced", "seed": 4}
        with BatchLoader(ds, 4, **options) as loader:
            for got, expected in zip(DeviceDataset(ds, "cpu", 4, **options), loader, strict=True):
                assert_equal(got, expected)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_float_images(tmp_path: Path, dtype: Any) -> None:
    packed = write_packed(tmp_path, "memmap", "classification", dtype=dtype)
    batch = next(iter(DeviceDataset(opened(packed), "cpu", 10, shuffle=False)))
    assert torch.equal(batch["image"].permute(0, 2, 3, 1), torch.from_numpy(np.stack(packed.images)))


def test_upload_in_many_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = write_packed(tmp_path, "memmap", "classification", counts=(13, 20, 4))
    monkeypatch.setattr("loaders.resident.UPLOAD_BYTES", 5 * packed.images[0].nbytes)
    monkeypatch.setattr("loaders.resident.ROWS_AHEAD", 20)
    batches = list(DeviceDataset(opened(packed), "cpu", 8, shuffle=False, remainder="pad"))
    images = torch.cat([b["image"][b["valid"]] for b in batches]).permute(0, 2, 3, 1)
    assert torch.equal(images, torch.from_numpy(np.stack(packed.images)))
    assert torch.cat([b["key"][b["valid"]] for b in batches]).tolist() == packed.keys


@pytest.mark.parametrize("steps", range(6))
def test_a_state_goes_on_in_either_loader(tmp_path: Path, steps: int) -> None:
    ds = opened(write_packed(tmp_path, "memmap", "classification", counts=(40,)))
    with BatchLoader(ds, 8, seed=1) as loader:
        expected = [b["index"].tolist() for _ in range(2) for b in loader]
    resident = DeviceDataset(ds, "cpu", 8, seed=1)
    iterator = iter(resident)
    got = [next(iterator)["index"].tolist() for _ in range(min(steps, 5))]
    state = resident.state_dict()
    with BatchLoader(ds, 8) as loader:
        loader.load_state_dict(state)
        assert got + [b["index"].tolist() for b in loader] in (expected[:5], expected[:10])
    other = DeviceDataset(ds, "cpu", 8)
    other.load_state_dict(state)
    assert (got + [b["index"].tolist() for _ in range(2) for b in other])[:10] == expected
    with pytest.raises(ValueError, match="another data set"):
        other.load_state_dict({**state, "fingerprint": "other"})


def test_a_loaded_position_serves_one_iteration(tmp_path: Path) -> None:
    ds = opened(write_packed(tmp_path, "memmap", "classification", counts=(40,)))
    resident = DeviceDataset(ds, "cpu", 8)
    next(iter(resident))
    resident.load_state_dict(resident.state_dict())
    for _ in resident:
        break
    assert sorted(i for batch in resident for i in batch["index"].tolist()) == list(range(40))
    assert resident.state_dict()["epoch"] == 1


def test_one_iterator_at_a_time(tmp_path: Path) -> None:
    resident = DeviceDataset(opened(write_packed(tmp_path, "memmap")), "cpu", 4)
    first = iter(resident)
    next(first)
    second = iter(resident)
    with pytest.raises(RuntimeError, match="one at a time"):
        next(first)
    assert len(list(second)) == 2
    assert resident.state_dict()["epoch"] == 1
    resident.set_epoch(0)
    assert resident.state_dict()["epoch"] == 0


def test_batches_are_kept(tmp_path: Path) -> None:
    packed = write_packed(tmp_path, "memmap", counts=(20,))
    batches = list(DeviceDataset(opened(packed), "cpu", 4, shuffle=False))
    assert torch.equal(torch.cat([b["image"] for b in batches]).permute(0, 2, 3, 1), torch.from_numpy(np.stack(packed.images)))


def test_batch_transform_knows_the_epoch(tmp_path: Path) -> None:
    class Transform:
        epoch = -1

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
            return {"epoch": self.epoch, **batch}

    ds = opened(write_packed(tmp_path, "memmap"))
    resident = DeviceDataset(ds, "cpu", 4, batch_transform=Transform())
    with BatchLoader(ds, 4, batch_transform=Transform()) as loader:
        for batches in (resident, loader):
            assert [[b["epoch"] for b in batches] for _ in range(2)] == [[0, 0], [1, 1]]  # type: ignore[attr-defined]


def test_what_does_not_fit_is_said_in_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ds = opened(write_packed(tmp_path, "memmap", "unlabelled", counts=(10,)))
    needed = 10 * (12 * 16 * 3 + 16)
    fit = DeviceDataset.fits(ds, "cpu")
    assert fit
    assert fit.needed_bytes == needed
    monkeypatch.setattr("loaders.resident._free_bytes", lambda _: int(needed / 0.6) - 2)
    assert not DeviceDataset.fits(ds, "cpu")
    assert DeviceDataset.fits(ds, "cpu", fraction=0.9)
    with pytest.raises(ValueError, match=r"MB of data does not fit into 60% of the .* free on cpu: take BatchLoader"):
        DeviceDataset(ds, "cpu", 2)


def test_what_cannot_be_resident(tmp_path: Path) -> None:
    mixed = opened(write_packed(tmp_path / "mixed", "tar", sizes=((8, 8), (9, 8))))
    with pytest.raises(ValueError, match="differ in size"):
        DeviceDataset(mixed, "cpu", 2)
    packed = write_packed(tmp_path / "set", "memmap")
    with pytest.raises(ValueError, match="has a transform"):
        DeviceDataset(opened(packed, transform=lambda sample, _: sample), "cpu", 2)
    with pytest.raises(ValueError, match="fraction is 0"):
        DeviceDataset.fits(opened(packed), "cpu", fraction=0)
    with pytest.raises(ValueError, match="no batch in an epoch"):
        DeviceDataset(opened(packed), "cpu", 64)
