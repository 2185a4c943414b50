"""Memmap shards: plain NPY files that anyone can map, and what can be derived from them alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loaders.format import FormatError, Task
from packer.sample import PackError, Sample, WrittenShard
from packer.writers.compare import index_differences
from packer.writers.memmap import MemmapWriter, derive_index, fixed_files, npy_header
from writer_contract import HEIGHT, TASKS, WIDTH, WriterContract, make_sample


class TestContract(WriterContract):
    layout = "memmap"


def pack(path: Path, task: Task = "detection", n: int = 4, **options: Any) -> tuple[list[Sample], WrittenShard]:
    samples = [make_sample(i, task) for i in range(n)]
    writer = MemmapWriter(path, task, **options)
    for sample in samples:
        writer.write(sample)
    return samples, writer.close()


@pytest.mark.parametrize("dtype", ["uint8", "float16", "float32"])
@pytest.mark.parametrize("task", TASKS)
def test_each_file_is_mapped_by_numpy_alone(tmp_path: Path, task: Task, dtype: str) -> None:
    samples, written = pack(tmp_path / "s", task, dtype=dtype)
    names = set(fixed_files(task, dtype))
    assert set(written.files) == names == {p.name for p in (tmp_path / "s").iterdir()}
    a = {name: np.load(tmp_path / "s" / name, mmap_mode="r", allow_pickle=False) for name in names}
    assert all(isinstance(array, np.memmap) for array in a.values())
    for name, (kind, _) in fixed_files(task, dtype).items():
        assert a[name].dtype.str.startswith("|S" if kind == "S" else kind)
    assert a["image.npy"].shape == (4, HEIGHT, WIDTH, 3)
    assert a["key.npy"].tolist() == [1, 4, 7, 10]
    assert [v.decode() for v in a["source.npy"]] == [s.source for s in samples]
    np.testing.assert_array_equal(a["affine.npy"], [s.affine for s in samples])
    np.testing.assert_array_equal(a["original_size.npy"], [(s.original_height, s.original_width) for s in samples])
    if task == "classification":
        assert a["label.npy"].tolist() == [0, 1, 2, 3]
    if task == "detection":
        assert a["box_offsets.npy"].tolist() == [0, 0, 1, 3, 3]
        np.testing.assert_array_equal(a["boxes.npy"], np.concatenate([s.boxes for s in samples]))
        np.testing.assert_array_equal(a["labels.npy"], np.concatenate([s.labels for s in samples]))
        np.testing.assert_array_equal(a["difficult.npy"], np.concatenate([s.difficult for s in samples]))


def images(path: Path) -> np.ndarray:
    return np.asarray(np.load(path / "image.npy", mmap_mode="r"))


def test_pixels_are_stored_as_they_are(tmp_path: Path) -> None:
    samples, _ = pack(tmp_path / "s")
    np.testing.assert_array_equal(images(tmp_path / "s"), [s.image for s in samples])


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_floats_without_normalize_go_from_0_to_1(tmp_path: Path, dtype: str) -> None:
    samples, _ = pack(tmp_path / "s", dtype=dtype)
    expected = (np.array([s.image for s in samples], np.float64) / 255).astype(dtype)
    np.testing.assert_array_equal(images(tmp_path / "s"), expected)
    assert images(tmp_path / "s").dtype == np.dtype(dtype)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_normalize_is_per_channel_in_rgb_order(tmp_path: Path, dtype: str) -> None:
    mean, std = (0.5, 0.25, 0.125), (0.5, 2.0, 0.25)
    samples, _ = pack(tmp_path / "s", dtype=dtype, normalize=(mean, std))
    expected = ((np.array([s.image for s in samples], np.float64) / 255 - mean) / std).astype(dtype)
    np.testing.assert_array_equal(images(tmp_path / "s"), expected)


@settings(deadline=None)
@given(st.integers(0, 10**12), st.integers(1, 65500), st.integers(1, 65500), st.sampled_from(["|u1", "<f2", "<f4"]))
def test_the_header_keeps_its_length_while_samples_are_counted(n: int, h: int, w: int, dtype: str) -> None:
    """It is written first without a count and overwritten at the end."""
    assert len(npy_header(np.dtype(dtype), (n, h, w, 3))) == len(npy_header(np.dtype(dtype), (0, h, w, 3)))


def test_an_image_of_another_size_is_refused_by_name(tmp_path: Path) -> None:
    writer = MemmapWriter(tmp_path / "s", "unlabelled")
    writer.write(make_sample(0, "unlabelled"))
    odd = make_sample(1, "unlabelled")
    odd.image = np.zeros((HEIGHT + 1, WIDTH, 3), np.uint8)
    with pytest.raises(PackError, match=r"bild_1_ä.jpg: image of shape \(25, 40, 3\) in a shard of \(24, 40, 3\)"):
        writer.write(odd)
    writer.abort()


def test_a_view_that_is_not_contiguous_is_stored_right(tmp_path: Path) -> None:
    sample = make_sample(0, "unlabelled")
    assert sample.image is not None
    sample.image = sample.image[:, ::-1]
    writer = MemmapWriter(tmp_path / "s", "unlabelled")
    writer.write(sample)
    writer.close()
    np.testing.assert_array_equal(images(tmp_path / "s")[0], sample.image)


def test_a_shard_without_samples_can_be_closed(tmp_path: Path) -> None:
    _, written = pack(tmp_path / "s", n=0)
    assert len(written.index.samples) == 0
    assert np.load(tmp_path / "s" / "image.npy").shape == (0, 0, 0, 3)
    assert np.load(tmp_path / "s" / "boxes.npy").shape == (0, 4)


def test_an_existing_folder_is_not_written_into(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    with pytest.raises(FileExistsError):
        MemmapWriter(tmp_path / "s", "unlabelled")


# Reading back ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["uint8", "float16"])
@pytest.mark.parametrize("task", TASKS)
def test_the_derived_index_is_the_writers(tmp_path: Path, task: Task, dtype: str) -> None:
    samples, written = pack(tmp_path / "s", task, dtype=dtype)
    index, sources = derive_index(tmp_path / "s", task, dtype)
    assert list(index_differences(written.index, index)) == []
    np.testing.assert_array_equal(written.index.samples, index.samples)
    assert [s.decode() for s in sources] == [s.source for s in samples]


def test_without_any_box(tmp_path: Path) -> None:
    writer = MemmapWriter(tmp_path / "s", "detection")
    writer.write(make_sample(0, "detection", 0))
    written = writer.close()
    index, _ = derive_index(tmp_path / "s", "detection", "uint8")
    assert list(index_differences(written.index, index)) == []


@pytest.mark.parametrize("name", sorted(fixed_files("detection", "uint8")))
@pytest.mark.parametrize("fault", ["missing", "cut", "no-npy", "empty", "rows", "dimension", "scalar", "dtype"])
def test_a_file_that_is_not_as_it_must_be_is_named(tmp_path: Path, name: str, fault: str) -> None:
    pack(tmp_path / "s")
    path = tmp_path / "s" / name
    array = np.load(path)
    if fault == "missing":
        path.unlink()
    elif fault == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    elif fault == "no-npy":
        path.write_bytes(b"no NPY file")
    elif fault == "empty":
        path.write_bytes(b"")
    elif fault == "rows":
        np.save(path, np.concatenate([array, array[:1]]))
    elif fault == "dimension":
        np.save(path, array[..., None])
    elif fault == "scalar":
        np.save(path, array.reshape(-1)[0])
    else:
        np.save(path, np.char.decode(array, "utf-8") if array.dtype.kind == "S" else array.astype(">i2"))
    with pytest.raises(FormatError, match=r"/s/\w+\.npy: "):
        derive_index(tmp_path / "s", "detection", "uint8")


@pytest.mark.parametrize("offsets", [[0, 2, 1, 3, 3], [1, 1, 1, 3, 3], [0, 0, 1, 3, 4], [0, 0, 0, 0, 0]])
def test_offsets_rise_from_0_to_the_boxes(tmp_path: Path, offsets: list[int]) -> None:
    pack(tmp_path / "s")
    np.save(tmp_path / "s" / "box_offsets.npy", np.array(offsets, "<i8"))
    with pytest.raises(FormatError, match=r"box_offsets.npy: does not rise from 0 to the 3 boxes"):
        derive_index(tmp_path / "s", "detection", "uint8")


def test_another_dtype_than_the_manifests_is_named(tmp_path: Path) -> None:
    pack(tmp_path / "s", dtype="float16")
    with pytest.raises(FormatError, match=r"image.npy: dtype is float16, expected <f4"):
        derive_index(tmp_path / "s", "detection", "float32")


def test_four_channels_are_refused(tmp_path: Path) -> None:
    pack(tmp_path / "s", n=2)
    np.save(tmp_path / "s" / "image.npy", np.zeros((2, 5, 6, 4), np.uint8))
    with pytest.raises(FormatError, match=r"image.npy: shape is \(2, 5, 6, 4\)"):
        derive_index(tmp_path / "s", "detection", "uint8")
