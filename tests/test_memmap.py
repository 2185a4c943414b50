"""What only `MemmapDataset` does. What it shares with `ShardDataset` is in test_shards.py."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from loaders.dataset import SampleError
from loaders.memmap import MemmapDataset
from packed_data import Packed, write_packed


@pytest.fixture
def packed(tmp_path: Path) -> Packed:
    return write_packed(tmp_path / "out", "memmap", "classification")


def test_image_shares_memory_with_the_map_and_never_changes_the_file(packed: Packed) -> None:
    path = packed.shard(1) / "image.npy"
    before = path.read_bytes()
    ds = MemmapDataset(packed.root)
    image = ds[5]["image"]
    assert image.shape == (3, 12, 16)
    assert image.permute(1, 2, 0).is_contiguous()  # stored order: the view was not copied
    assert image.data_ptr() == ds[5]["image"].data_ptr()
    assert image.data_ptr() + 12 * 16 * 3 == ds[6]["image"].data_ptr()
    image.add_(1)  # writable, and no warning
    assert np.array_equal(ds[5]["image"].permute(1, 2, 0).numpy(), packed.images[5] + 1)
    out = {"image": np.zeros((1, 12, 16, 3), np.uint8)}
    ds.gather([5], out)
    assert np.array_equal(out["image"][0], packed.images[5] + 1)
    assert path.read_bytes() == before
    assert np.array_equal(MemmapDataset(packed.root)[5]["image"].permute(1, 2, 0).numpy(), packed.images[5])


def test_a_transform_gets_a_copy(packed: Packed) -> None:
    def blacken(sample: dict[str, Any], _rng: np.random.Generator) -> dict[str, Any]:
        sample["image"][:] = 0
        return sample

    ds = MemmapDataset(packed.root, transform=blacken)
    assert not ds[5]["image"].any()
    ds.transform = None
    assert np.array_equal(ds[5]["image"].permute(1, 2, 0).numpy(), packed.images[5])


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_float_images_keep_their_dtype(tmp_path: Path, dtype: Any) -> None:
    packed = write_packed(tmp_path / "out", "memmap", dtype=dtype)
    ds = MemmapDataset(packed.root)
    image = ds[3]["image"]
    assert image.dtype == torch.from_numpy(np.zeros(1, dtype)).dtype
    assert np.array_equal(image.permute(1, 2, 0).numpy(), packed.images[3])
    shape, found = ds.batch_fields()["image"]
    assert (shape, found) == ((12, 16, 3), np.dtype(dtype))
    out = {"image": np.zeros((2, *shape), found)}
    ds.gather([9, 3], out)
    assert np.array_equal(out["image"][1], packed.images[3])


@pytest.mark.parametrize("how", ["cut", "longer", "gone", "other"])
def test_a_changed_shard_is_a_sample_error_before_it_is_mapped(packed: Packed, how: str) -> None:
    path = packed.shard(1) / "image.npy"
    if how == "gone":
        path.unlink()
    elif how == "other":
        with path.open("r+b") as f:
            f.write(b"x")
    else:
        os.truncate(path, path.stat().st_size + (8 if how == "longer" else -1))
    ds = MemmapDataset(packed.root)
    reason = {"gone": "not found", "other": "cannot be mapped"}.get(how, "bytes, the manifest says .*cut short or replaced")
    pattern = rf"shard-000001: sample 000000038 \(source images/bild_5_ä\.jpg\): .*image\.npy: .*{reason}.*pack verify"
    with pytest.raises(SampleError, match=pattern):
        ds[5]
    with pytest.raises(SampleError, match=pattern):
        ds.gather([0, 5, 9], {"image": np.zeros((3, 12, 16, 3), np.uint8)})
    assert np.array_equal(ds[9]["image"].permute(1, 2, 0).numpy(), packed.images[9])


def test_damaged_metadata_is_a_sample_error_of_meta_only(packed: Packed) -> None:
    np.save(packed.shard(0) / "affine.npy", np.zeros((1, 4)))
    ds = MemmapDataset(packed.root)
    assert ds[0]["label"] == 0
    with pytest.raises(SampleError, match=r"affine\.npy: shape \(1, 4\), expected \(4, 4\)"):
        ds.meta(0)


def test_check_crc_is_refused(packed: Packed) -> None:
    with pytest.raises(ValueError, match=r"no checksum per sample.*pack verify"):
        MemmapDataset(packed.root, check_crc=True)
