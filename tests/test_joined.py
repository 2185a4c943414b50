"""Files mapped as one array: the same rows as each file has alone, whatever is done to the files."""

from __future__ import annotations

import errno
import gc
import json
import os
import resource
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import loaders.handles
import loaders.joined
import loaders.memmap
from loaders.dataset import SampleError
from loaders.format import Manifest, manifest_text
from loaders.handles import OpenFile
from loaders.joined import MappedRows, RowKind, Rows
from loaders.memmap import MemmapDataset
from loaders.npy import read_header
from loaders.quiet import one_thread
from packed_data import Packed, write_packed


def written(folder: Path, counts: list[int], row: int, dtype: Any = np.uint8) -> tuple[list[Path], list[np.ndarray]]:
    rng = np.random.default_rng(sum(counts) + row)
    arrays = [rng.integers(0, 200, (count, row)).astype(dtype) for count in counts]
    paths = [folder / f"{i}.npy" for i in range(len(counts))]
    for path, array in zip(paths, arrays, strict=True):
        np.save(path, array)
    return paths, arrays


def mapper(paths: list[Path], arrays: list[np.ndarray]) -> MappedRows:
    sizes, counts = [path.stat().st_size for path in paths], [len(array) for array in arrays]
    return MappedRows(np.array(sizes, np.int64), np.array(counts, np.int64))


def add(rows: MappedRows, number: int, path: Path) -> Rows:
    file = OpenFile(path)
    with path.open("rb") as f:
        (_, values), dtype, start = read_header(f)
    return rows.map(number, file, RowKind(values, dtype, start))


def of(rows: Rows, count: int) -> np.ndarray:
    return rows.array[rows.first : rows.first + count]


@settings(deadline=None, max_examples=60)
@given(
    counts=st.lists(st.integers(1, 40), min_size=1, max_size=7),
    row=st.integers(1, 700),
    dtype=st.sampled_from([np.uint8, np.float16, np.float32]),
    order=st.randoms(use_true_random=False),
)
def test_all_files_are_one_array(tmp_path_factory: pytest.TempPathFactory, counts: list[int], row: int, dtype: Any, order: Any) -> None:
    """In whatever order they are added: odd rows, files shorter than a page and longer, empty ones."""
    paths, arrays = written(tmp_path_factory.mktemp("j"), counts, row, dtype)
    rows = mapper(paths, arrays)
    numbers = list(range(len(counts)))
    order.shuffle(numbers)
    found = {number: add(rows, number, paths[number]) for number in numbers}
    assert {id(each.array) for each in found.values()} == {id(rows.joined)}
    for number, array in enumerate(arrays):
        assert np.array_equal(of(found[number], len(array)), array)
    assert rows.joined is not None
    where = np.concatenate([found[i].first + np.arange(len(array)) for i, array in enumerate(arrays)])
    chosen = np.random.default_rng(0).permutation(len(where))
    assert np.array_equal(rows.joined[where[chosen]], np.concatenate(arrays)[chosen])


def test_what_is_written_stays_in_the_process_and_outlives_the_mapper(tmp_path: Path) -> None:
    paths, arrays = written(tmp_path, [5, 6], 3000)
    rows = mapper(paths, arrays)
    held = [of(add(rows, i, path), len(arrays[i])) for i, path in enumerate(paths)]
    held[1] += 1
    assert np.array_equal(of(add(rows, 1, paths[1]), 6), arrays[1] + 1)  # asked for again: nothing is mapped anew
    del rows
    assert [np.array_equal(np.load(path), array) for path, array in zip(paths, arrays, strict=True)] == [True, True]
    for path in paths:
        path.unlink()
    assert np.array_equal(held[0], arrays[0])
    assert np.array_equal(held[1], arrays[1] + 1)


def test_a_file_that_another_one_replaced_is_mapped_apart(tmp_path: Path) -> None:
    """What is held of the old one stays as it was."""
    paths, arrays = written(tmp_path, [4, 4], 500)
    rows = mapper(paths, arrays)
    old = of(add(rows, 0, paths[0]), 4)
    np.save(tmp_path / "new.npy", arrays[0][::-1])
    os.replace(tmp_path / "new.npy", paths[0])
    new = add(rows, 0, paths[0])
    assert new.array is not rows.joined
    assert np.array_equal(of(new, 4), arrays[0][::-1])
    assert np.array_equal(old, arrays[0])
    assert add(rows, 1, paths[1]).array is rows.joined


@pytest.mark.parametrize("why", ["size", "kind", "many", "addresses"])
def test_files_that_cannot_be_joined_are_mapped_apart(tmp_path: Path, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    paths, arrays = written(tmp_path, [4, 5, 6], 500)
    if why == "kind":  # the same bytes, of other values
        np.save(paths[2], arrays[2].view(np.float16))
    if why == "many":
        monkeypatch.setattr(loaders.joined, "max_open_shards", lambda: 2)
    if why == "addresses":
        monkeypatch.setattr(loaders.joined, "_MOST_ADDRESSES", 1000)
    if why == "size":
        arrays[1] = arrays[1][:4]
    rows = mapper(paths, arrays)
    first = add(rows, 0, paths[0])
    assert np.array_equal(of(first, 4), arrays[0])
    last = add(rows, 2, paths[2])
    assert last.first == 0
    assert last.array is not first.array
    assert np.array_equal(last.array.view(np.uint8), arrays[2])
    assert (rows.joined is None) == (why != "kind")


def test_where_addresses_are_limited_files_are_mapped_apart(tmp_path: Path) -> None:
    paths, arrays = written(tmp_path, [4], 500)
    rows = mapper(paths, arrays)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (64 << 30, limits[1]))
    try:
        found = add(rows, 0, paths[0])
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    assert rows.joined is None
    assert np.array_equal(of(found, 4), arrays[0])


def test_where_memory_lacks_files_are_mapped_apart_from_then_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths, arrays = written(tmp_path, [4, 5, 6], 500)
    rows = mapper(paths, arrays)
    held = of(add(rows, 0, paths[0]), 4)

    def lacks(_address: int, _file: OpenFile) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    with monkeypatch.context() as patched:
        patched.setattr(loaders.joined, "_map_at", lacks)
        assert np.array_equal(of(add(rows, 1, paths[1]), 5), arrays[1])
    assert rows.joined is None
    assert np.array_equal(of(add(rows, 2, paths[2]), 6), arrays[2])
    assert rows.joined is None
    assert np.array_equal(held, arrays[0])


def test_a_file_that_cannot_be_mapped_leaves_its_place_taken(tmp_path: Path) -> None:
    paths, arrays = written(tmp_path, [4, 5000], 500)
    rows = mapper(paths, arrays)
    first = add(rows, 0, paths[0])
    assert rows.joined is not None
    file = OpenFile(paths[1])
    os.close(file.fd)
    file.fd = os.open(paths[1], os.O_WRONLY)  # which cannot be mapped
    address = rows.joined.ctypes.data - 128 + (rows.joined.shape[0] - 5000) // 2 * 500
    with pytest.raises(PermissionError):
        loaders.joined._map_at(address & -4096, file)
    maps = Path("/proc/self/maps").read_text().splitlines() if sys.platform == "linux" else []
    bounds = [tuple(int(edge, 16) for edge in line.split()[0].split("-")) for line in maps]
    assert all(any(low <= address + k * 4096 < high for low, high in bounds) for k in range(3)) or not maps
    assert np.array_equal(of(first, 4), arrays[0])


def test_maps_beyond_one_a_file_are_counted_and_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()
    before = loaders.handles._extra_maps.count
    monkeypatch.setattr(loaders.handles, "_MOST_EXTRA_MAPS", before + 11)
    paths, arrays = written(tmp_path, [4, 5, 6], 500)
    first, second = mapper(paths, arrays), mapper(paths, arrays)
    held = add(first, 0, paths[0])
    assert first.joined is not None
    apart = add(second, 0, paths[0])  # six more are too many
    assert second.joined is None
    assert np.array_equal(of(apart, 4), of(held, 4))
    assert loaders.handles._extra_maps.count == before + 6
    del first
    assert loaders.handles._extra_maps.count == before + 6  # what is held needs them
    del held
    gc.collect()
    assert loaders.handles._extra_maps.count == before
    third = mapper(paths, arrays)
    add(third, 0, paths[0])
    assert third.joined is not None


def test_what_is_not_aligned_is_not_copied_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A header of another length than NumPy gives it; `np.take` would first make an aligned copy of all shards."""
    packed = write_packed(tmp_path / "out", "memmap", "classification", sizes=((40, 33),), counts=(3, 4), dtype=np.float32)
    manifest = json.loads((packed.root / "manifest.json").read_text())
    for number, shard in enumerate(manifest["splits"]["train"]["shards"]):
        path = packed.shard(number) / "image.npy"
        data = path.read_bytes()
        path.write_bytes(data[:8] + (119).to_bytes(2, "little") + data[10:127].rstrip(b" \n").ljust(118) + b"\n" + data[128:])
        shard["num_bytes"] += 1
        shard["files"]["image.npy"]["num_bytes"] += 1
        assert np.array_equal(np.load(path), np.frombuffer(data[128:], "<f4").reshape(-1, 40, 33, 3))
    del manifest["self_sha256"]
    (packed.root / "manifest.json").write_text(manifest_text(Manifest.model_validate(manifest)))
    monkeypatch.setattr(np, "take", None)
    ds = MemmapDataset(packed.root)
    out = {"image": np.zeros((7, 40, 33, 3), np.float32)}
    with one_thread():
        for _ in range(2):
            ds.gather(np.arange(7), out)
            assert np.array_equal(out["image"], np.stack(packed.images))
    assert ds._rows.joined is not None


@pytest.fixture
def packed(tmp_path: Path) -> Packed:
    return write_packed(tmp_path / "out", "memmap", "classification", sizes=((40, 33),), counts=(9, 1, 7, 20))


def gathered(ds: MemmapDataset, indices: np.ndarray) -> np.ndarray:
    out = {"image": np.full((len(indices), 40, 33, 3), 7, np.uint8)}
    assert ds.gather(indices, out).tolist() == indices.tolist()
    return out["image"]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("joined", [True, False])
def test_a_data_set_gathers_the_same_whether_or_not_its_shards_are_joined(
    packed: Packed, joined: bool, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not joined:
        monkeypatch.setattr(loaders.joined, "max_open_shards", lambda: 3)
    ds = MemmapDataset(packed.root)
    rng = np.random.default_rng(0)
    chosen = [rng.permutation(37), np.array([9]), np.array([36, 9, 0, 9, 36]), np.sort(rng.permutation(37)[:20])]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for indices in chosen:
            assert np.array_equal(gathered(ds, indices), np.stack([packed.images[i] for i in indices]))
    finally:
        torch.set_num_threads(before)
    assert (ds._rows.joined is not None) == joined


def test_a_shard_that_is_gone_spoils_no_other(packed: Packed) -> None:
    (packed.shard(2) / "image.npy").unlink()
    ds = MemmapDataset(packed.root, on_error="replace")
    for _ in range(2):  # before and after the first shard is mapped
        out = {"image": np.zeros((37, 40, 33, 3), np.uint8)}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what is replaced is said once
            used = ds.gather(np.arange(37), out)
        assert [i for i in used.tolist() if 10 <= i < 17] == []
        assert np.array_equal(out["image"], np.stack([packed.images[i] for i in used]))


def test_a_file_cut_right_after_it_was_opened_is_named(packed: Packed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its size is that which it was opened with, not what it is when first watched."""
    watch = loaders.memmap.MapWatch

    def cut(maps: Any) -> Any:
        os.truncate(packed.shard(0) / "image.npy", 500)
        return watch(maps)

    monkeypatch.setattr(loaders.memmap, "MapWatch", cut)
    with pytest.raises(SampleError, match=r"shard-000000/image\.npy: has 500 bytes"):
        MemmapDataset(packed.root)[3]


def test_threads_may_open_the_same_shards(packed: Packed) -> None:
    ds = MemmapDataset(packed.root)
    expected, failed = np.stack(packed.images), []

    def read() -> None:
        for _ in range(20):
            ds._shards.clear()
            if not np.array_equal(gathered(ds, np.arange(37)), expected):
                failed.append(1)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert ds._rows.joined is not None


def test_a_forked_child_has_its_own(packed: Packed) -> None:
    ds = MemmapDataset(packed.root)
    image = ds[5]["image"]
    pid = os.fork()
    if not pid:
        try:
            torch.set_num_threads(1)  # as in DataLoader's workers: torch's own threads do not survive a fork
            ok = np.array_equal(gathered(ds, np.arange(37)), np.stack(packed.images))
            image.add_(1)
            ok &= np.array_equal(gathered(ds, np.arange(5, 6))[0], packed.images[5] + 1)
        finally:
            os._exit(0 if ok else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert np.array_equal(gathered(ds, np.arange(37)), np.stack(packed.images))
