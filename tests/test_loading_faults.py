"""Data that breaks under training, and training that breaks over its data: what every way of loading does about it.

A *way* reads a whole data set; each must raise the same errors, or replace the same samples.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import importlib
import json
import multiprocessing
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Subset

import loaders.handles
from batch_data import MemoryDataset, producer_threads
from loaders.batches import BatchLoader
from loaders.collate import collate_list
from loaders.dataset import PackedDataset, SampleError
from loaders.format import FormatError
from loaders.memmap import MemmapDataset
from loaders.shards import ShardDataset, ShardStream
from packed_data import Packed, encode, image, write_packed

LAYOUTS: dict[str, type[PackedDataset]] = {"tar": ShardDataset, "memmap": MemmapDataset}
ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    gc.collect()
    for child in multiprocessing.active_children():  # torch's: one that is left would keep the interpreter from ending
        child.kill()
        child.join(30)
    assert producer_threads() == []


@pytest.fixture(params=LAYOUTS)
def packed(request: pytest.FixtureRequest, tmp_path: Path) -> Packed:
    """Three shards of 4, 3 and 3 detection samples: indices 4 to 6 are in shard 1."""
    return write_packed(tmp_path / "out", request.param, sizes=((80, 80),))


def open_set(packed: Packed, **options: Any) -> Any:
    return LAYOUTS[packed.layout](packed.root, **options)


def file_of(packed: Packed, shard: int) -> Path:
    """The file that holds a shard's images."""
    return packed.shard(shard) if packed.layout == "tar" else packed.shard(shard) / "image.npy"


def unchanged(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    del rng
    return sample


# The ways. Each gives the indices of the samples that it read.


def item(ds: Any) -> list[int]:
    return [ds[i]["index"] for i in range(len(ds))]


def items(ds: Any) -> list[int]:
    return [sample["index"] for sample in ds.__getitems__(range(len(ds)))]


def gather(ds: Any) -> list[int]:
    out = {name: np.zeros((len(ds), *shape), dtype) for name, (shape, dtype) in ds.batch_fields().items()}
    used: list[int] = ds.gather(np.arange(len(ds)), out).tolist()
    ds.gather_ragged(used)
    return used


def batches(workers: int) -> Callable[[Any], list[int]]:
    def way(ds: Any) -> list[int]:
        with BatchLoader(ds, 2, shuffle=False, workers=workers) as loader:
            return [i for batch in loader for i in batch["index"].tolist()]

    return way


def closing(loader: DataLoader[Any]) -> Iterator[Any]:
    """Its items. After an error torch would end its workers when the garbage collector comes: they then are not told, and it waits 5 s for
    each."""
    batches = iter(loader)
    try:
        yield from batches
    finally:
        with contextlib.suppress(RuntimeError):  # a spawned worker may abort in torch's own code while it exits, of which torch tells here
            getattr(batches, "_shutdown_workers", int)()


def torch_loader(workers: int, method: str | None = None) -> Callable[[Any], list[int]]:
    def way(ds: Any) -> list[int]:
        context = method or ("fork" if workers else None)
        loader = DataLoader(
            ds, 2, num_workers=workers, collate_fn=collate_list, multiprocessing_context=context, timeout=60 * bool(workers)
        )
        return [i for batch in closing(loader) for i in batch["index"].tolist()]

    return way


WAYS = {
    "item": item,
    "items": items,
    "gather": gather,
    "batches 0": batches(0),
    "batches 1": batches(1),
    "batches 2": batches(2),
    "batches 4": batches(4),
    "torch 0": torch_loader(0),
    "torch 2": torch_loader(2),
}
SPAWNED = [pytest.param(f"torch {method}", marks=pytest.mark.slow) for method in ("spawn", "forkserver")]
FAST_WAYS = [way if way != "torch 2" else pytest.param(way, marks=pytest.mark.slow) for way in WAYS if way not in ("torch 0", "batches 1")]
ALL_WAYS = [*FAST_WAYS, *SPAWNED]


def read(way: str, ds: Any) -> list[int]:
    found = WAYS.get(way)
    return found(ds) if found else torch_loader(1, way.removeprefix("torch "))(ds)


# Files that change under an open data set


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 4)


def overwrite(path: Path) -> None:
    with path.open("r+b") as f:
        f.write(b"\0" * path.stat().st_size)


def lengthen(path: Path) -> None:
    os.truncate(path, path.stat().st_size + 512)


@pytest.mark.parametrize("way", ALL_WAYS)
def test_a_shard_that_is_cut_short_while_it_is_open_is_named(packed: Packed, way: str) -> None:
    for transform in (None, unchanged):
        ds = open_set(packed, transform=transform)
        assert item(ds) == list(range(10))
        path = file_of(packed, 1)
        before = path.read_bytes()
        cut(path)
        with pytest.raises(
            SampleError, match=r"shard-000001.*: sample 0000000\d\d \(source .*(cut short|changed while in use).*pack verify"
        ):
            read(way, ds)
        assert ds[9]["index"] == 9  # still usable
        path.write_bytes(before)  # the same file, whole again
        assert item(ds) == list(range(10))


@pytest.mark.parametrize("way", ["item", "batches 2", "torch 2"])
def test_a_file_of_another_size_is_not_read(packed: Packed, way: str) -> None:
    lengthen(file_of(packed, 1))
    with pytest.raises(SampleError, match=r"sample 000000031 \(source .*bytes, the manifest says \d+: it was cut short or replaced"):
        read(way, open_set(packed))


def test_a_deleted_shard_that_is_open_can_be_read(packed: Packed) -> None:
    ds = open_set(packed)
    assert item(ds) == list(range(10))
    shutil.rmtree(packed.root)
    for way in ("item", "gather", "batches 2"):
        assert read(way, ds) == list(range(10))
    assert np.array_equal(ds[5]["image"].permute(1, 2, 0).numpy(), packed.images[5])
    with pytest.raises(SampleError, match=r"shard-000000.*sample 000000003.*(No such file|not found)"):
        read("torch 2", ds)  # workers open their own files


@pytest.mark.parametrize("on_error", ["raise", "replace"])
@pytest.mark.parametrize("way", ["item", "gather", "batches 4", "torch 2"])
def test_another_data_set_in_its_place_is_never_mixed_in(packed: Packed, way: str, on_error: str, tmp_path: Path) -> None:
    ds = open_set(packed, on_error=on_error)
    assert ds[0]["index"] == 0
    other = write_packed(tmp_path / "other", packed.layout, sizes=((80, 80),), seed=9)
    packed.root.rename(tmp_path / "old")
    other.root.rename(packed.root)
    with pytest.raises(FormatError, match="was replaced while the data set was in use: open it again"):
        read(way, ds)


def test_a_manifest_that_is_written_again_is_the_same_data_set(packed: Packed) -> None:
    ds = open_set(packed)
    manifest = packed.root / "manifest.json"
    data = manifest.read_bytes()
    manifest.unlink()
    assert ds[0]["index"] == 0  # what is there can be read
    manifest.write_bytes(data)
    os.utime(manifest, ns=(1, 1))
    assert item(ds) == list(range(10))


@pytest.mark.parametrize("way", FAST_WAYS)
def test_changed_content_of_the_same_size_is_found_by_crc(tmp_path: Path, way: str) -> None:
    packed = write_packed(tmp_path / "out", sizes=((80, 80),), parts=("png",))
    ds = ShardDataset(packed.root, check_crc=True)
    assert item(ds) == list(range(10))
    row = np.load(packed.root / "index/train/samples.npy")[5]
    with packed.shard(1).open("r+b") as f:
        f.seek(int(row["image_offset"]) + int(row["image_size"]) - 4)
        f.write(b"\0\0\0\0")
    with pytest.raises(SampleError, match=r"shard-000001.tar: sample 000000038 \(source images/bild_5_ä.png\).*CRC-32.*bytes were changed"):
        read(way, ds)


@pytest.mark.parametrize("way", ALL_WAYS)
def test_a_corrupt_picture_is_named(tmp_path: Path, way: str) -> None:
    packed = write_packed(tmp_path / "out", sizes=((80, 80),))
    damage(packed, 5)
    with pytest.raises(
        SampleError, match=r"shard-000001.tar: sample 000000038 \(source images/bild_5_ä.jpg\).*cannot be decoded.*on_error"
    ):
        read(way, ShardDataset(packed.root))


def damage(packed: Packed, *samples: int) -> None:
    """Make pictures of tar samples undecodable, with the right number of bytes."""
    rows = np.load(packed.root / "index/train/samples.npy")
    for n in samples:
        with packed.shard(int(rows[n]["shard"])).open("r+b") as f:
            f.seek(int(rows[n]["image_offset"]) + 200)
            f.write(bytes(int(rows[n]["image_size"]) - 200))


def test_reading_while_a_shard_is_cut_and_mended_gives_the_sample_or_an_error(tmp_path: Path) -> None:
    packed = write_packed(tmp_path / "out", sizes=((80, 80),))
    ds, path = ShardDataset(packed.root), packed.shard(1)
    data = path.read_bytes()
    results: list[str] = []
    stop = threading.Event()

    def reader() -> None:
        while not stop.is_set():
            try:
                good = np.array_equal(ds[5]["image"].permute(1, 2, 0).numpy(), packed.images[5])
                results.append("good" if good else "wrong")
            except SampleError:
                results.append("error")

    threads = [threading.Thread(target=reader) for _ in range(2)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 30
    while not {"good", "error"} <= set(results) and time.monotonic() < deadline:
        os.truncate(path, 700)
        time.sleep(0.002)
        with path.open("r+b") as f:  # in one write: a file of the right length whose end is still zeros would be another fault
            f.write(data)
        time.sleep(0.002)
    stop.set()
    for thread in threads:
        thread.join(30)
    assert {"good", "error"} == set(results)


@pytest.mark.parametrize("kind", ["folder", "pipe", "denied"])
def test_what_cannot_be_opened_is_named(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = write_packed(tmp_path / "out")
    path = packed.shard(1)
    reason = "is no regular file"
    if kind == "denied":  # the tests may run as root, whom nobody denies anything
        real = os.open

        def denied(name: Any, *args: Any, **kwargs: Any) -> int:
            if str(name) == str(path):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(name))
            return real(name, *args, **kwargs)

        monkeypatch.setattr(os, "open", denied)
        reason = "Permission denied"
    else:
        path.unlink()
        os.mkfifo(path) if kind == "pipe" else path.mkdir()
    with pytest.raises(SampleError, match=rf"shard-000001.tar: sample 000000031.*{reason}"):
        batches(2)(ShardDataset(packed.root))


def test_offsets_file_is_not_needed(tmp_path: Path) -> None:
    packed = write_packed(tmp_path / "out")
    for number in range(3):
        Path(f"{packed.shard(number)}.idx").unlink()
    assert batches(2)(ShardDataset(packed.root)) == list(range(10))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("on_error", ["raise", "replace"])
@pytest.mark.parametrize("workers", [0, 3])
def test_a_folder_that_disappears_in_mid_epoch(
    tmp_path: Path, layout: Any, on_error: str, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loaders.memmap.BATCHES_AT_ONCE", 1)  # else all is read before it disappears
    packed = write_packed(tmp_path / layout, layout, counts=(2,) * 40)
    ds = open_set(packed, on_error=on_error)
    given: list[int] = []

    def train() -> None:
        for batch in loader:
            given.extend(batch["index"].tolist())
            if len(given) == 4:
                shutil.rmtree(packed.root)
                ds._shards = loaders.handles.ProcessCache(4)  # all that was open is let go, as by a small limit

    words = rf"{layout}/train/shard-0000.*" + ("No other sample" if on_error == "replace" else "sample 0000")
    with warnings.catch_warnings(), BatchLoader(ds, 2, shuffle=False, workers=workers) as loader:
        warnings.simplefilter("ignore")
        with pytest.raises(SampleError, match=words):
            train()
    assert 4 <= len(given) < 80


# A damaged index


def write_index(packed: Packed, name: str, change: Callable[[Any], None]) -> None:
    path = packed.root / f"index/train/{name}.npy"
    array = np.load(path)
    change(array)
    np.save(path, array)


@pytest.mark.parametrize("way", FAST_WAYS)
def test_an_index_that_is_cut_short_while_open_is_an_error_and_no_crash(packed: Packed, way: str) -> None:
    ds = open_set(packed, on_error="replace")
    assert item(ds) == list(range(10))
    os.truncate(packed.root / "index/train/samples.npy", 0)
    with pytest.raises(FormatError, match=r"samples\.npy: has 0 bytes, and had \d+ when it was opened.*Open the data set again"):
        read(way, ds)


@pytest.mark.parametrize("name", ["samples", "boxes", "labels", "box_offsets"])
def test_a_damaged_index_file_is_named_when_opening(packed: Packed, name: str) -> None:
    path = packed.root / f"index/train/{name}.npy"
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(FormatError, match=rf"{name}\.npy: is no complete NPY file"):
        open_set(packed)
    path.unlink()
    with pytest.raises(FormatError, match=rf"{name}\.npy: not found"):
        open_set(packed)


def test_check_crc_compares_the_index_when_opening(tmp_path: Path) -> None:
    packed = write_packed(tmp_path / "out")
    ShardDataset(packed.root, check_crc=True)
    write_index(packed, "boxes", lambda boxes: boxes.__setitem__((0, 0), -5))
    assert ShardDataset(packed.root)[0]["boxes"][0, 0] == -5
    with pytest.raises(FormatError, match=r"index/train/boxes\.npy: has SHA-256 .*, the manifest says .*pack build"):
        ShardDataset(packed.root, check_crc=True)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("image_size", 0xFFFFFFFF), ("image_offset", 1 << 50), ("image_offset", (1 << 63) - 9), ("image_offset", -5)),
        *(("shard", 0), ("shard", 99)),
    ],
)
def test_wrong_numbers_in_the_index_are_refused(tmp_path: Path, field: str, value: int) -> None:
    for grid in (False, True):
        packed = write_packed(tmp_path / f"{grid}", sizes=((80, 80),), grid=(grid,))
        write_index(packed, "samples", lambda rows: rows[field].__setitem__(5, value))
        for options in ({}, {"transform": unchanged}):
            with pytest.raises(SampleError, match=r"sample 000000038 .*the index says shard .* the index is damaged"):
                batches(2)(ShardDataset(packed.root, **options))  # type: ignore[arg-type]


def test_wrong_labels_and_box_offsets_in_the_index_are_refused(tmp_path: Path) -> None:
    for layout in LAYOUTS:
        packed = write_packed(tmp_path / layout / "c", layout, "classification")  # type: ignore[arg-type]  # a key of LAYOUTS
        write_index(packed, "samples", lambda rows: rows["label"].__setitem__(5, 3))
        for way in ("item", "gather", "batches 4"):
            with pytest.raises(FormatError, match=r"samples\.npy: a label is 3, expected 0 to 2: the index is damaged"):
                read(way, open_set(packed))
        packed = write_packed(tmp_path / layout / "d", layout)  # type: ignore[arg-type]
        write_index(packed, "box_offsets", lambda offsets: offsets.__setitem__(5, -3))
        for way in ("item", "gather", "batches 4"):
            with pytest.raises(FormatError, match=r"box_offsets\.npy: row 4 does not fit num_boxes"):
                read(way, open_set(packed))


# Lack of files is no damage


@pytest.mark.parametrize("layout", LAYOUTS)
def test_few_open_files_suffice_and_a_lack_of_them_replaces_nothing(tmp_path: Path, layout: str) -> None:
    packed = write_packed(tmp_path / "out", layout, "classification", counts=(1,) * 60)  # type: ignore[arg-type]
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd"))
    taken: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 40, limits[1]))
    try:
        sets = [open_set(packed, on_error="replace") for _ in range(3)]  # 3 x at least 16 files are more than there are
        for _ in range(2):
            for ds in sets:
                assert batches(2)(ds) == list(range(60))
                assert ds.gather(range(60), {"image": np.empty((60, 12, 16, 3), np.uint8)}).tolist() == list(range(60))
        ds = sets[0]
        for each in sets:
            each._shards.clear()
        while free_file():
            taken.append(os.open(os.devnull, os.O_RDONLY))
        with pytest.raises(OSError, match=r"shard-0000.*Too many open files.*ulimit -n"):
            batches(0)(ds)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for fd in taken:
            os.close(fd)
    assert ds.num_replaced == 0
    assert batches(2)(ds) == list(range(60))


def free_file() -> bool:
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        return False
    return True


# Replacing


def damaged_sets(tmp_path: Path) -> Iterator[tuple[Packed, list[int]]]:
    """Data sets with what is read in the place of each sample."""
    packed = write_packed(tmp_path / "tar", "tar", counts=(8, 8, 8), sizes=((80, 80),))
    damage(packed, 2, 3, 23)
    packed.shard(1).unlink()
    yield packed, [0, 1, 4, 4, *range(4, 8), *range(16, 23), 16, *range(16, 23), 0]
    packed = write_packed(tmp_path / "memmap", "memmap", counts=(8, 8, 8))
    cut(packed.shard(1) / "image.npy")
    yield packed, [*range(8), *range(16, 24), *range(16, 24)]


@pytest.mark.filterwarnings("ignore:.*replaced:UserWarning")
def test_the_same_samples_are_replaced_in_every_way_and_counted(tmp_path: Path) -> None:
    for packed, expected in damaged_sets(tmp_path):
        bad = sum(i != n for n, i in enumerate(expected))
        for name, way in WAYS.items():
            ds = open_set(packed, on_error="replace")
            # Shard 1 is gone: its first sample finds 16 by 8 steps, its last by 1.
            assert sorted(set(way(ds))) == sorted(set(expected)), name
            assert ds.num_replaced == bad, name
        first = item(open_set(packed, on_error="replace"))
        for name, way in WAYS.items():
            assert way(open_set(packed, on_error="replace")) == first, name
        merged = [
            [
                batch["index"].tolist()
                for batch in BatchLoader(open_set(packed, on_error="replace"), 3, seed=5, workers=w, rank=r, world_size=2)
            ]
            for w in (0, 1, 4)
            for r in (0, 1)
        ]
        assert merged[0:2] == merged[2:4] == merged[4:6]
        whole = BatchLoader(open_set(packed, on_error="replace"), 6, seed=5)
        assert [sorted([*a, *b]) for a, b in zip(merged[0], merged[1], strict=True)] == [sorted(b["index"].tolist()) for b in whole]


def test_the_first_is_told_and_the_rest_with_each_epoch(tmp_path: Path) -> None:
    packed = write_packed(tmp_path / "out", sizes=((80, 80),))
    damage(packed, 2, 7)
    ds = ShardDataset(packed.root, on_error="replace")
    loader = BatchLoader(ds, 5, shuffle=False, workers=2)
    with pytest.warns(UserWarning) as told:  # noqa: PT030  # the texts are compared below
        list(loader)
    assert [bool(re.search(p, str(w.message))) for p, w in zip(("sample [27] was replaced", "1 damaged sample"), told, strict=True)] == [
        True
    ] * 2
    with pytest.warns(UserWarning, match=r"split 'train': 2 damaged sample.*pack verify"):
        list(loader)
    assert (ds.num_replaced, ds.select([2]).num_replaced) == (4, 0)
    with pytest.warns(UserWarning, match="1 damaged sample"):  # noqa: PT031
        ds[2]
        ds.set_epoch(1)
    ds.set_epoch(2)  # nothing new to tell: the tests run with warnings as errors


@pytest.mark.parametrize("way", WAYS)
def test_a_data_set_without_a_good_sample_is_an_error(packed: Packed, way: str) -> None:
    for shard in range(3):
        cut(file_of(packed, shard))
    with pytest.raises(SampleError, match=r"shard-00000\d.*sample 0000000.*No other sample that was tried in its place"):
        read(way, open_set(packed, on_error="replace"))


def test_a_fault_of_the_transform_is_not_replaced(tmp_path: Path) -> None:
    packed = write_packed(tmp_path / "out")

    def fails(*_: Any) -> dict[str, Any]:
        raise MemoryError("no memory for the crop")

    for way in ("item", "batches 0", "batches 4", "torch 2"):
        ds = ShardDataset(packed.root, on_error="replace", transform=fails)
        with pytest.raises(MemoryError, match="no memory for the crop"):
            read(way, ds)
        assert ds.num_replaced == 0


# Streams


def test_caches_are_emptied_while_other_threads_make_new_ones() -> None:
    def short() -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    def open_data_sets() -> None:
        for _ in range(2000):
            kept.append([loaders.handles.ProcessCache[None](1) for _ in range(20)])
            del kept[:-5]

    kept: list[list[Any]] = []
    cache = loaders.handles.ProcessCache[None](1)
    threads = [threading.Thread(target=open_data_sets) for _ in range(2)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            with pytest.raises(OSError, match="Too many open files"):
                cache.get(0, short)
    finally:
        sys.setswitchinterval(interval)
        for thread in threads:
            thread.join(60)


def stream_indices(stream: ShardStream, workers: int) -> list[Any]:
    context = "fork" if workers else None
    loader = DataLoader(stream, None, num_workers=workers, multiprocessing_context=context, timeout=60 * bool(workers))
    return [sample["index"] for sample in closing(loader)]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_names_or_replaces_damaged_samples(tmp_path: Path, workers: int) -> None:
    packed = write_packed(tmp_path / "out", sizes=((80, 80),))
    damage(packed, 2)
    packed.shard(2).unlink()
    with pytest.raises(
        SampleError, match=r"shard-00000(0.tar: sample 000000017.*cannot be decoded|2.tar: sample 0000000\d\d.*No such file)"
    ):
        stream_indices(ShardStream(packed.root, shuffle=4), workers)
    for transform in (None, unchanged):
        stream = ShardStream(packed.root, shuffle=0, on_error="replace", transform=transform)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert sorted(stream_indices(stream, workers)) == sorted([0, 1, 3, 3, 4, 5, 6, 0, 0, 0])
        assert stream.num_replaced == 4


def foreign_tar(path: Path, pictures: list[bytes]) -> Path:
    with tarfile.open(path, "w") as tar:
        for n, data in enumerate(pictures):
            info = tarfile.TarInfo(f"{n:03d}.png")
            info.size = len(data)
            (path.parent / "x").write_bytes(data)
            with (path.parent / "x").open("rb") as f:
                tar.addfile(info, f)
    return path


@pytest.mark.parametrize("workers", [0, 1])
def test_a_foreign_stream_names_or_replaces_damaged_samples(tmp_path: Path, workers: int) -> None:
    good = encode(image(np.random.default_rng(0), 8, 9), "png")
    path = foreign_tar(tmp_path / "a.tar", [good, b"bad", good, b"no picture", good])
    with pytest.raises(SampleError, match=r"a.tar: sample 001: part 'png'"):
        stream_indices(ShardStream(path, shuffle=0), workers)
    stream = ShardStream(path, shuffle=0, on_error="replace")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert stream_indices(stream, workers) == [0, 1, 2, 3, 4]
        assert [sample["key"] for sample in stream] == ["000", "000", "002", "002", "004"]
    assert stream.num_replaced == 4
    with pytest.raises(SampleError, match=r"sample 000: .*No good sample came before it"):
        list(ShardStream(foreign_tar(tmp_path / "b.tar", [b"bad", good]), shuffle=0, on_error="replace"))
    cut(path)
    with pytest.raises(SampleError, match=r"a\.tar: .*(cut short|unexpected end)"):
        list(ShardStream(path, shuffle=0, on_error="replace"))


@pytest.mark.filterwarnings("ignore:sample .* was replaced")
@pytest.mark.parametrize("shuffle", [0, 4])
@pytest.mark.parametrize("back", [1, 64])
def test_a_foreign_stream_that_replaces_resumes_exactly(tmp_path: Path, shuffle: int, back: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loaders.stream._BACK", back)
    good = encode(image(np.random.default_rng(0), 8, 9), "png")
    path = foreign_tar(tmp_path / "a.tar", [b"bad" if n in (3, 4, 5, 9) else good for n in range(12)])
    make = partial(ShardStream, path, shuffle=shuffle, seed=3, on_error="replace")
    whole = [sample["key"] for sample in make()]
    if shuffle == 0:
        assert whole == ["000", "001", "002", "002", "002", "002", "006", "007", "008", "008", "010", "011"]
    for stop in range(13):
        first, second = make(), make()
        assert [sample["key"] for sample in islice(first, stop)] == whole[:stop]
        second.load_state_dict(first.state_dict())
        assert [sample["key"] for sample in second] == whole[stop:]


@pytest.mark.filterwarnings("ignore:sample .* was replaced")
def test_iterators_of_one_foreign_stream_replace_each_by_their_own(tmp_path: Path) -> None:
    good = encode(image(np.random.default_rng(0), 8, 9), "png")
    stream = ShardStream(foreign_tar(tmp_path / "a.tar", [good, b"bad", good]), shuffle=0, on_error="replace")
    ahead, behind = iter(stream), iter(stream)
    assert [next(ahead)["key"], next(behind)["key"]] == ["000", "000"]
    assert [sample["key"] for sample in ahead] == ["000", "002"]
    assert next(behind)["key"] == "000"


def test_after_an_error_a_stream_starts_anew(tmp_path: Path) -> None:
    packed = write_packed(tmp_path / "out")
    path = packed.shard(1)
    path.rename(tmp_path / "away")
    stream = ShardStream(packed.root, shuffle=0)
    samples = iter(stream)
    assert [next(samples)["index"] for _ in range(4)] == [0, 1, 2, 3]
    with pytest.raises(SampleError, match="shard-000001"):
        next(samples)
    (tmp_path / "away").rename(path)
    assert [s["index"] for s in stream] == list(range(10))


# Faults of the user's functions, in threads and worker processes


class Stop(BaseException):
    pass


@pytest.mark.parametrize("workers", [0, 1, 4])
@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, MemoryError, GeneratorExit, Stop, ZeroDivisionError])
def test_whatever_a_function_raises_arrives_and_the_loader_stays_usable(error: type[BaseException], workers: int) -> None:
    raising = True

    def fails(batch: Any, _: Any = None) -> Any:
        if raising and int(torch.as_tensor(batch["index"]).max()) >= 8:
            raise error("on purpose")
        return batch

    for arguments, transform in (({"batch_transform": fails}, None), ({}, fails)):
        raising = True
        loader = BatchLoader(MemoryDataset(40, transform=transform), 4, shuffle=False, workers=workers, **arguments)  # type: ignore[arg-type]
        iterator = iter(loader)
        assert [next(iterator)["index"].tolist() for _ in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
        with pytest.raises(error, match="on purpose") as caught:
            next(iterator)
        if issubclass(error, Exception):
            assert caught.value.__notes__[-1] == "in batch 2 (from 0) of epoch 0, rank 0"
        assert producer_threads() == []
        with pytest.raises(RuntimeError, match="ended by an error"):
            next(iterator)
        state, raising = loader.state_dict(), False
        assert [b["index"].tolist()[0] for b in loader] == list(range(0, 40, 4))  # anew
        loader.load_state_dict(state)
        assert [b["index"].tolist()[0] for b in loader] == list(range(8, 40, 4))  # or from the batch that failed


def test_a_collate_that_fails_names_the_batch() -> None:
    def fails(_: list[dict[str, Any]]) -> dict[str, Any]:
        raise KeyError("boxes")

    with pytest.raises(KeyError) as caught:
        next(iter(BatchLoader(MemoryDataset(40), 4, workers=2, collate=fails)))
    assert caught.value.__notes__ == ["in batch 0 (from 0) of epoch 0, rank 0"]
    with pytest.raises(TypeError, match="batch_transform returned NoneType"):
        next(iter(BatchLoader(MemoryDataset(40), 4, workers=2, batch_transform=lambda _: None)))  # type: ignore[arg-type,return-value]


def dies(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    del rng
    if sample["index"] == 3:
        os._exit(9)
    return sample


def test_threads_that_cannot_be_started_are_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    original, started = threading.Thread.start, 0

    def start(thread: threading.Thread) -> None:
        nonlocal started
        started += 1
        if started > 1:
            raise RuntimeError("can't start new thread")
        original(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    before = torch.get_num_threads()
    loader = BatchLoader(MemoryDataset(40), 4, workers=3)
    with pytest.raises(RuntimeError, match=r"loaders-producer-1: the system starts no more threads .*fewer workers.*ulimit -u"):
        iter(loader)
    monkeypatch.undo()
    assert torch.get_num_threads() == before
    assert len(list(loader)) == 10


# Fork


def in_child(function: Callable[[], bool]) -> int:
    """Exit status of a forked child that runs `function`: 0 where it is true. Killed where it hangs."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            status = 0 if function() else 2
        finally:
            os._exit(status)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return -99


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_forked_at_any_moment_can_load(packed: Packed) -> None:
    ds = open_set(packed)
    loader = BatchLoader(ds, 2, shuffle=False, workers=2)
    iterator = iter(loader)
    next(iterator)

    def child() -> bool:
        try:
            next(iterator)
        except RuntimeError as e:
            fresh = [i for batch in loader for i in batch["index"].tolist()]
            return "does not survive fork" in str(e) and fresh == list(range(10)) and batches(0)(ds) == list(range(10))
        return False

    from loaders.engine import _starting
    from loaders.quiet import quiet_opencv

    # Held as by other threads, which the child does not have.
    locks = [loader._slots.lock, ds._shards.lock, _starting.lock, quiet_opencv.lock]
    held = threading.Event()
    over = threading.Event()

    def hold() -> None:
        for lock in locks:
            lock.acquire()
        held.set()
        over.wait(60)
        for lock in locks:
            lock.release()

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(30)
    try:
        assert in_child(child) == 0
    finally:
        over.set()
        holder.join(30)
    assert [i for batch in iterator for i in batch["index"].tolist()] == list(range(2, 10))


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("kind", ["item", "stream"])
def test_a_worker_process_that_dies_is_an_error(tmp_path: Path, kind: str) -> None:
    packed = write_packed(tmp_path / "out")

    def child() -> bool:  # a process of its own: torch raises in the main thread whenever it hears of the death
        ds: Any = ShardDataset(packed.root, transform=dies) if kind == "item" else ShardStream(packed.root, transform=dies)
        list(DataLoader(ds, None, num_workers=1, multiprocessing_context="fork", timeout=60))
        return False

    assert in_child(child) == 1  # an exception, and torch has several; 2 were none, -99 a hang


# Ctrl-C and the end of the process


@pytest.mark.slow
def test_an_interrupt_at_any_moment_ends_training_and_leaves_nothing(tmp_path: Path) -> None:
    for layout in LAYOUTS:
        write_packed(tmp_path / layout, layout, counts=(64, 64), sizes=((64, 64),))  # type: ignore[arg-type]  # a key of LAYOUTS
    script = Path(__file__).parent / "interrupted_training.py"
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path), "2"],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    trials = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(trials) == 2 * 12
    faults = [trial for trial in trials if trial["faults"]]
    assert not faults, json.dumps(faults)


# Arguments


def packed_arguments(**options: Any) -> Callable[[Path], object]:
    return lambda root: ShardDataset(**{"root": root, **options})


def stream_arguments(**options: Any) -> Callable[[Path], object]:
    return lambda root: ShardStream(**{"source": root, **options})


def batch_arguments(**options: Any) -> Callable[[Path], object]:
    return lambda root: BatchLoader(**{"ds": ShardDataset(root), "batch_size": 2, "workers": 1, **options})


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (packed_arguments(root=None), TypeError, "root is None, expected the path of a folder"),
        (packed_arguments(root=7), TypeError, "root is 7, expected the path"),
        (packed_arguments(root=b"out"), TypeError, "root is b'out', expected the path"),
        (packed_arguments(split="trian"), FormatError, "has no split 'trian'; it has: train"),
        (packed_arguments(split=None), FormatError, "has no split None; it has: train"),
        (packed_arguments(seed="a"), TypeError, "seed is 'a', expected a whole number"),
        (packed_arguments(seed=1.5), TypeError, "seed is 1.5"),
        (packed_arguments(transform="flip"), TypeError, r"transform is 'flip', expected a function transform\(sample, rng\)"),
        (packed_arguments(on_error="skip"), ValueError, "on_error is 'skip', expected 'raise' or 'replace'"),
        (packed_arguments(on_error=None), ValueError, "on_error is None"),
        (lambda root: ShardDataset(root / "nowhere"), FormatError, "nowhere/manifest.json: not found: no such folder"),
        (lambda root: ShardDataset(root / "train"), FormatError, "no finished packed data set .*a raw one is packed by `pack build"),
        (lambda root: ShardDataset(root / "manifest.json"), FormatError, "it is a file, expected the folder"),
        (lambda root: ShardDataset(root / "train/shard-000000.tar"), FormatError, "it is a file, expected the folder"),
        (lambda root: MemmapDataset(root), FormatError, "layout is 'tar', expected 'memmap': use loaders.shards.ShardDataset"),
        (lambda root: ShardDataset(root).set_epoch("1"), TypeError, "epoch is '1', expected a whole number"),  # type: ignore[arg-type]
        (lambda root: ShardDataset(root).set_epoch(-1), ValueError, "epoch is -1, expected a whole number of 0 or more"),
        (stream_arguments(source=None), TypeError, "source is None, expected the folder of a packed data set, or tars"),
        (stream_arguments(source=["a.tar", 3]), TypeError, r"source is \['a.tar', 3\]"),
        (stream_arguments(shuffle=True), TypeError, "shuffle is True, expected the number of samples in the buffer, or 0"),
        (stream_arguments(shuffle="1000"), TypeError, "shuffle is '1000'"),
        (stream_arguments(seed=None), TypeError, "seed is None"),
        (stream_arguments(rank="0", world_size=2), TypeError, "rank is '0'"),
        (stream_arguments(rank=0, world_size="2"), TypeError, "world_size is '2'"),
        (stream_arguments(transform=3), TypeError, "transform is 3"),
        (stream_arguments(on_error="warn"), ValueError, "on_error is 'warn'"),
        (stream_arguments(split="val"), FormatError, "has no split 'val'; it has: train"),
        (lambda root: ShardStream(root / "train/shard-000000.tar", check_crc=True), ValueError, "check_crc: tars of other origin"),
        (batch_arguments(ds=[1, 2, 3]), TypeError, "ds is a list, expected ShardDataset, MemmapDataset"),
        (batch_arguments(ds="out"), TypeError, "ds is a str, expected ShardDataset"),
        (lambda root: BatchLoader(Subset(ShardDataset(root), [1, 2]), 2), TypeError, r"use ds.select\(indices\)"),  # type: ignore[arg-type]
        (lambda root: BatchLoader(ShardStream(root), 2), TypeError, "ShardStream, which gives samples in sequence"),  # type: ignore[arg-type]
        (batch_arguments(batch_size="8"), TypeError, "batch_size is '8', expected a whole number"),
        (batch_arguments(batch_size=2.0), TypeError, "batch_size is 2.0"),
        (batch_arguments(batch_size=True), TypeError, "batch_size is True"),
        (batch_arguments(batch_size=0), ValueError, "batch_size 0"),
        (batch_arguments(batch_size=-3), ValueError, "batch_size -3"),
        (batch_arguments(batch_size=99), ValueError, "no batch in an epoch: 10 samples, batch_size 99"),
        (batch_arguments(workers="2"), TypeError, "workers is '2'"),
        (batch_arguments(workers=-1), ValueError, "workers is -1"),
        (batch_arguments(seed="x"), TypeError, "seed is 'x'"),
        (batch_arguments(collate=5), TypeError, "collate is 5, expected a function"),
        (batch_arguments(batch_transform=5), TypeError, "batch_transform is 5, expected a function"),
        (batch_arguments(rank="0", world_size=1), TypeError, "rank is '0'"),
        (batch_arguments(remainder="keep"), ValueError, "remainder is 'keep', expected 'drop' or 'pad'"),
    ],
)
def test_wrong_arguments_are_named_where_they_are_given(
    tmp_path_factory: pytest.TempPathFactory, call: Callable[[Path], object], error: type[Exception], words: str
) -> None:
    root = tmp_path_factory.getbasetemp() / "arguments"
    if not root.exists():
        write_packed(root)
    with pytest.raises(error, match=words):
        call(root)


def test_numbers_of_numpy_are_numbers(tmp_path: Path) -> None:
    packed = write_packed(tmp_path / "out")
    ds = ShardDataset(str(packed.root), seed=np.int64(3))  # type: ignore[arg-type]
    assert len(list(BatchLoader(ds, np.int64(2), workers=np.int32(1)))) == 5  # type: ignore[arg-type]


def test_training_on_data_without_boxes_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "recipes"))
    recipe = importlib.import_module("train_detection")
    write_packed(tmp_path / "out", task="classification")
    monkeypatch.setattr(sys, "argv", ["train_detection.py", "--data", str(tmp_path / "out")])
    assert recipe.main() == 1
    assert "the task is classification, and this trains on boxes" in capsys.readouterr().err
