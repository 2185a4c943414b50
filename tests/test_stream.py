"""`ShardStream`: exact splits, shuffles, foreign tars, and what it refuses."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import pickle
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
import webdataset
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import loaders.buffer
import loaders.stream
from loaders.buffer import Item, buffered
from loaders.collate import collate_list
from loaders.dataset import SampleError
from loaders.format import FormatError
from loaders.sampling import hash_key, permutation, shuffle_quality
from loaders.shards import ShardDataset, ShardStream
from packed_data import Packed, encode, image, write_packed


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Packed:
    """23 samples in 6 shards of different sizes. Tests do not change it."""
    return write_packed(tmp_path_factory.mktemp("packed") / "out", counts=(4, 1, 7, 3, 5, 3))


def noise(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {"index": sample["index"], "key": sample["key"], "noise": int(rng.integers(1 << 40))}


def indices(stream: Any) -> list[int]:
    return [int(i) for sample in stream for i in torch.as_tensor(sample["index"]).reshape(-1)]


# Packed data


def test_samples_are_those_of_the_data_set(packed: Packed) -> None:
    ds = ShardDataset(packed.root)
    seen = 0
    for sample in ShardStream(packed.root, shuffle=5):
        expected = ds[sample["index"]]
        assert sample.keys() == expected.keys()
        assert all(torch.equal(torch.as_tensor(sample[k]), torch.as_tensor(expected[k])) for k in expected)
        seen += 1
    assert seen == 23


def test_no_shuffle_is_stored_order(packed: Packed) -> None:
    assert indices(ShardStream(packed.root, shuffle=0)) == list(range(23))
    assert indices(ShardStream(packed.root, shuffle=0, rank=1, world_size=3)) == list(range(7, 14))


def test_shuffle_depends_on_seed_and_epoch(packed: Packed) -> None:
    stream = ShardStream(packed.root, shuffle=8, seed=3)
    first = indices(stream)
    assert indices(stream) == first != list(range(23))
    assert sorted(first) == list(range(23))
    stream.set_epoch(1)
    assert stream.epoch == 1
    assert indices(stream) != first
    assert indices(ShardStream(packed.root, shuffle=8, seed=4)) != first
    stream.set_epoch(0)
    assert indices(stream) == first


def test_order_never_changes_between_releases(packed: Packed) -> None:
    assert indices(ShardStream(packed.root, shuffle=8, seed=3)) == GOLDEN_ORDER


GOLDEN_ORDER = [7, 14, 6, 11, 5, 12, 8, 18, 16, 9, 15, 17, 3, 4, 1, 19, 22, 0, 13, 10, 20, 21, 2]


def as_worker(worker: int, workers: int, action: Callable[[], Any]) -> Any:
    """What `action` gives in a DataLoader worker."""
    info = type("Info", (), {"id": worker, "num_workers": workers})()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loaders.stream, "get_worker_info", lambda: info)
        return action()


@settings(deadline=None, max_examples=60)
@given(
    world_size=st.integers(1, 30),
    workers=st.integers(1, 4),
    shuffle=st.sampled_from([0, 1, 4, 100]),
    epoch=st.integers(0, 3),
    remainder=st.sampled_from(["drop", "pad"]),
)
def test_ranks_and_workers_share_an_epoch_equally(
    packed: Packed, world_size: int, workers: int, shuffle: int, epoch: int, remainder: Any
) -> None:
    parts: list[list[list[int]]] = []
    real: list[int] = []
    for rank in range(world_size):
        stream = ShardStream(packed.root, shuffle=shuffle, rank=rank, world_size=world_size, remainder=remainder)
        stream.set_epoch(epoch)
        if remainder == "drop" and world_size > 23:
            with pytest.raises(ValueError, match=f"23 samples are fewer than {world_size} ranks"):
                indices(stream)
            return
        samples = [as_worker(worker, workers, lambda stream=stream: list(stream)) for worker in range(workers)]
        assert all(("valid" in sample) == (remainder == "pad") for part in samples for sample in part)
        real += [sample["index"] for part in samples for sample in part if sample.get("valid", True)]
        parts.append([indices(part) for part in samples])
        assert stream.num_samples == sum(map(len, parts[-1])) == (23 // world_size if remainder == "drop" else -(-23 // world_size))
    lengths = [[len(part) for part in rank] for rank in parts]
    assert all(rank == lengths[0] for rank in lengths)  # so batches of any size are as many on every rank
    assert max(lengths[0]) - min(lengths[0]) <= 1
    assert len(set(real)) == len(real) == (23 if remainder == "pad" else 23 - 23 % world_size)


@pytest.mark.parametrize("size", [2, 5, 100])
def test_buffer_is_bounded_in_samples_and_bytes(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(loaders.buffer, "MAX_BUFFER_BYTES", 1000)
    taken = 0

    def items() -> Iterator[Item]:
        nonlocal taken
        for taken in range(1, 51):
            yield Item(taken, 100, lambda: bytes(100))

    given, ahead = [], []
    for item in buffered(items(), size, key=7):
        given.append(item.index)
        ahead.append(taken - len(given))
    assert sorted(given) == list(range(1, 51))
    assert max(ahead) == min(size, 10)


def test_transform_is_keyed_by_index_and_epoch(packed: Packed) -> None:
    stream = ShardStream(packed.root, shuffle=4, seed=9, transform=noise)
    stream.set_epoch(2)
    ds = ShardDataset(packed.root, seed=9, transform=noise)
    ds.set_epoch(2)
    assert all(sample["noise"] == ds[sample["index"]]["noise"] for sample in stream)


def test_damage_is_an_error(tmp_path: Path) -> None:
    copy = write_packed(tmp_path / "out")
    copy.shard(1).unlink()
    with pytest.raises(SampleError, match=r"shard-000001\.tar: sample"):
        list(ShardStream(copy.root))


def read_with_workers(stream: ShardStream, method: str) -> None:
    loader = DataLoader(
        stream, batch_size=3, num_workers=2, collate_fn=collate_list, multiprocessing_context=method, persistent_workers=True
    )
    orders = []
    for epoch in range(2):
        stream.set_epoch(epoch)
        orders.append(indices(loader))
        assert len(set(orders[-1])) == len(orders[-1]) == 23
    assert orders[0] != orders[1]


def test_dataloader_fork(packed: Packed) -> None:
    read_with_workers(ShardStream(packed.root, shuffle=5, transform=noise), "fork")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_dataloader_spawn_and_forkserver(packed: Packed, method: str) -> None:
    read_with_workers(ShardStream(packed.root, shuffle=5, transform=noise), method)


def test_rank_comes_from_torch_distributed(packed: Packed, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = ShardStream(packed.root, shuffle=0)
    assert stream.num_samples == 23
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    assert indices(stream) == list(range(11, 22))
    data = pickle.dumps(stream)
    monkeypatch.undo()
    assert len(data) < 4000
    assert indices(pickle.loads(data)) == list(range(11, 22))  # a spawned worker has no process group


def test_refused_arguments(packed: Packed, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="give both or neither"):
        ShardStream(packed.root, rank=1)
    with pytest.raises(ValueError, match="rank is 2 of world_size 2, expected 0 to world_size - 1"):
        ShardStream(packed.root, rank=2, world_size=2)
    with pytest.raises(ValueError, match="epoch is -1, expected a whole number of 0 or more"):
        ShardStream(packed.root).set_epoch(-1)
    with pytest.raises(ValueError, match="shuffle is -1"):
        ShardStream(packed.root, shuffle=-1)
    with pytest.raises(FormatError, match=r"use loaders.memmap.MemmapDataset"):
        ShardStream(write_packed(tmp_path / "m", "memmap").root)
    with pytest.raises(FormatError, match="no such folder"):
        ShardStream(tmp_path / "nowhere")


# States


@settings(deadline=None, max_examples=60)
@given(
    split=st.sampled_from([(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (4, 2)]),
    shuffle=st.sampled_from([0, 3, 8, 100]),
    epoch=st.integers(0, 2),
    remainder=st.sampled_from(["drop", "pad"]),
    data=st.data(),
)
def test_resume_gives_exactly_the_rest(
    packed: Packed, split: tuple[int, int], shuffle: int, epoch: int, remainder: Any, data: st.DataObject
) -> None:
    (world_size, workers), seed = split, data.draw(st.integers(0, 5))
    rank, worker = data.draw(st.integers(0, world_size - 1)), data.draw(st.integers(0, workers - 1))

    def read(stream: ShardStream, stop: int | None = None) -> list[tuple[int, int, bool]]:
        samples = islice(stream, stop)
        return as_worker(worker, workers, lambda: [(s["index"], s["noise"], s.get("valid", True)) for s in samples])

    def make() -> ShardStream:
        return ShardStream(packed.root, "train", shuffle, seed, marked_noise, rank, world_size, remainder=remainder)

    stream = make()
    stream.set_epoch(epoch)
    whole = as_worker(worker, workers, lambda: read(stream))
    stop = data.draw(st.integers(0, len(whole)))
    got = as_worker(worker, workers, lambda: read(stream, stop))
    state = json.loads(json.dumps(as_worker(worker, workers, stream.state_dict)))
    assert (state["epoch"], state["samples_seen"]) == (epoch, stop)
    other = make()

    def resume() -> list[tuple[int, int, bool]]:
        other.load_state_dict(state)
        assert other.state_dict() == state
        return read(other)

    assert got + as_worker(worker, workers, resume) == whole
    other.set_epoch(epoch)
    assert as_worker(worker, workers, lambda: read(other)) == whole  # a loaded position serves once


def marked_noise(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {"index": sample["index"], "noise": int(rng.integers(1 << 40))}


def test_a_buffer_of_limited_bytes_resumes(packed: Packed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaders.buffer, "MAX_BUFFER_BYTES", 1500)
    whole = indices(ShardStream(packed.root, shuffle=100))
    for stop in range(0, 24, 3):
        first, second = ShardStream(packed.root, shuffle=100), ShardStream(packed.root, shuffle=100)
        got = indices(islice(first, stop))
        second.load_state_dict(first.state_dict())
        assert got + indices(second) == whole


def test_what_was_seen_is_not_read_again(packed: Packed, monkeypatch: pytest.MonkeyPatch) -> None:
    stream, other = ShardStream(packed.root, shuffle=5), ShardStream(packed.root, shuffle=5)
    got = indices(islice(stream, 12))
    read: list[int] = []
    encoded = ShardDataset.encoded
    monkeypatch.setattr(ShardDataset, "encoded", lambda self, index: read.append(index) or encoded(self, index))
    other.load_state_dict(stream.state_dict())
    rest = indices(other)
    assert sorted(read) == sorted(rest) == sorted(set(range(23)) - set(got))


def test_set_epoch_keeps_a_loaded_position_of_that_epoch(packed: Packed) -> None:
    stream = ShardStream(packed.root, shuffle=5)
    stream.set_epoch(2)
    whole = indices(stream)
    state = {**stream.state_dict(), "samples_seen": 20}
    other = ShardStream(packed.root, shuffle=5)
    other.load_state_dict(state)
    assert other.epoch == 2
    other.set_epoch(2)
    assert indices(other) == whole[20:]
    other.load_state_dict(state)
    other.set_epoch(3)
    assert len(indices(other)) == 23
    finished = ShardStream(packed.root, shuffle=5)
    finished.load_state_dict({**state, "samples_seen": 23})
    assert indices(finished) == []


def test_states_that_do_not_fit_are_refused(packed: Packed) -> None:
    stream = ShardStream(packed.root, shuffle=5)
    state = stream.state_dict()
    for change, words in [
        ({"seed": 3}, "'seed' is 3, here it is 0"),
        ({"shuffle": 6}, "'shuffle' is 6, here it is 5"),
        ({"world_size": 4, "rank": 1}, "'rank' is 1, here it is 0; 'world_size' is 4, here it is 1"),
        ({"fingerprint": "x"}, "'fingerprint' is 'x'"),
        ({"samples_seen": -1}, "'samples_seen' is -1, expected an integer of 0 or more"),
        ({"epoch": True}, "'epoch' is True"),
        ({"model": 1}, "'model' is unknown"),
    ]:
        with pytest.raises(ValueError, match="cannot be resumed by this ShardStream") as e:
            stream.load_state_dict({**state, **change})
        assert words in str(e.value)
    stream.load_state_dict(state)
    with pytest.raises(
        ValueError, match=r"loaded for rank 0 of 1, worker 0 of 1, and rank 0 of 1, worker 1 of 2 iterates.*StatefulDataLoader"
    ):
        as_worker(1, 2, lambda: iter(stream))


def test_quality_is_what_the_docstring_says() -> None:
    """Index arithmetic alone, by the stream's own code."""
    count, shards, batch_size = 32_768, 32, 128
    labels = (np.arange(count) * 64 // count)[permutation(count, 99)]  # sorted by class, shuffled while packing

    def order(size: int, epoch: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        starts = permutation(shards, 0, epoch, 1) * (count // shards)
        items = (Item(int(start) + n, 1, bytes) for start in starts for n in range(count // shards))
        return np.array([item.index for item in buffered(items, size, hash_key(0, epoch, 2, 0))])

    for size, low, high in ((1000, 5, 5.5), (4000, 1.25, 1.35)):
        quality = shuffle_quality(order(size, 0), order(size, 1), batch_size, labels)
        assert low < quality.co_batch < high
        assert quality.label_chi2 == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("remainder", ["drop", "pad"])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataloader_gets_as_many_batches_on_every_rank(packed: Packed, workers: int, remainder: Any) -> None:
    for world_size in (1, 2, 4):
        parts = []
        for rank in range(world_size):
            stream = ShardStream(packed.root, shuffle=5, rank=rank, world_size=world_size, remainder=remainder)
            parts.append(list(DataLoader(stream, batch_size=3, num_workers=workers, collate_fn=collate_list)))
        assert len({len(part) for part in parts}) == 1
        batches = [batch for part in parts for batch in part]
        valid = [torch.as_tensor(batch.get("valid", [True] * len(batch["index"]))) for batch in batches]
        got = [int(i) for batch, real in zip(batches, valid, strict=True) for i in torch.as_tensor(batch["index"])[real]]
        assert len(set(got)) == len(got) == (23 if remainder == "pad" else 23 - 23 % world_size)


# Foreign tars


def write_tar(path: Path, samples: dict[str, dict[str, bytes]], **options: Any) -> Path:
    with tarfile.open(path, "w", **options) as tar:
        for key, parts in samples.items():
            for name, data in parts.items():
                info = tarfile.TarInfo(f"{key}.{name}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    return path


def foreign(tmp_path: Path, shards: int = 3, count: int = 4) -> dict[str, Any]:
    """Tars that webdataset's own writer made; key -> image."""
    images = {}
    rng = np.random.default_rng(0)
    for s in range(shards):
        with webdataset.TarWriter(str(tmp_path / f"x-{s:03d}.tar")) as sink:
            for n in range(count):
                key = f"dir.with.dots/s{s}n{n}"
                images[key] = image(rng, 8, 10)
                meta = json.dumps({"n": n}).encode()
                sink.write({"__key__": key, "png": encode(images[key], "png"), "cls": str(n).encode(), "json": meta, "txt": b"hi"})
    return images


def test_foreign_samples(tmp_path: Path) -> None:
    images = foreign(tmp_path)
    samples = list(ShardStream(str(tmp_path / "x-{000..002}.tar"), shuffle=0))
    assert [s["key"] for s in samples] == list(images)
    assert [s["index"] for s in samples] == [(s << 32) + n for s in range(3) for n in range(4)]
    for sample in samples:
        assert np.array_equal(sample["image"].permute(1, 2, 0).numpy(), images[sample["key"]])
        assert sample["json"] == {"n": sample["label"]}
        assert sample["txt"] == b"hi"
        assert not any(name.startswith("__") for name in sample)


@pytest.mark.parametrize("form", ["list", "wildcard", "url", "one"])
def test_forms_of_a_foreign_source(tmp_path: Path, form: str) -> None:
    foreign(tmp_path)
    paths = sorted(tmp_path.glob("x-*.tar"))
    sources = {"list": paths, "wildcard": str(tmp_path / "x-*.tar"), "url": [p.as_uri() for p in paths], "one": paths[0]}
    assert len(list(ShardStream(sources[form]))) == (4 if form == "one" else 12)  # type: ignore[arg-type]


def test_other_schemes_are_opened_by_fsspec(tmp_path: Path) -> None:
    foreign(tmp_path, shards=1)
    fsspec.filesystem("memory").pipe("/bucket/x-000.tar", (tmp_path / "x-000.tar").read_bytes())
    assert len(list(ShardStream("memory://bucket/x-{000..000}.tar"))) == 4


def test_foreign_shards_go_to_ranks_once_and_shuffled(tmp_path: Path) -> None:
    images = foreign(tmp_path, shards=5)
    source = str(tmp_path / "x-*.tar")
    keys = [s["key"] for rank in range(2) for s in ShardStream(source, shuffle=10, rank=rank, world_size=2)]
    assert Counter(keys) == Counter(images.keys())
    assert keys != list(images)
    assert ShardStream(source).num_samples is None
    with pytest.raises(ValueError, match=r"5 shards .* cannot be split over 6 readers"):
        list(ShardStream(source, rank=0, world_size=6))


def test_foreign_transform_and_pickle(tmp_path: Path) -> None:
    foreign(tmp_path)
    stream = ShardStream(str(tmp_path / "x-*.tar"), shuffle=4, transform=noise)
    by_key = {s["key"]: s["noise"] for s in stream}
    assert len(set(by_key.values())) == 12
    halves = [s for rank in range(2) for s in ShardStream(str(tmp_path / "x-*.tar"), transform=noise, rank=rank, world_size=2)]
    assert {s["key"]: s["noise"] for s in halves} == by_key
    assert {s["key"]: s["noise"] for s in pickle.loads(pickle.dumps(stream))} == by_key


def test_our_own_tars_are_readable_as_foreign_ones(packed: Packed) -> None:
    samples = list(ShardStream(str(packed.root / "train/*.tar"), shuffle=0))
    assert [s["key"] for s in samples] == [f"{key:09d}" for key in packed.keys]
    assert [s["json"]["source"] for s in samples] == packed.sources
    assert all(np.array_equal(s["image"].permute(1, 2, 0).numpy(), i) for s, i in zip(samples, packed.images, strict=True))


def test_gzipped_tar(tmp_path: Path) -> None:
    foreign(tmp_path, shards=1)
    data = gzip.compress((tmp_path / "x-000.tar").read_bytes())
    (tmp_path / "y.tar.gz").write_bytes(data)
    assert len(list(ShardStream(tmp_path / "y.tar.gz"))) == 4
    (tmp_path / "y.tar.gz").write_bytes(data[:-30])
    with pytest.raises(SampleError, match=r"y\.tar\.gz"):
        list(ShardStream(tmp_path / "y.tar.gz"))


@pytest.mark.parametrize(
    ("name", "compress"),
    [("y.tgz", gzip.compress), ("y.TGZ", gzip.compress), ("y.tbz2", bz2.compress), ("y.tar.bz2", bz2.compress), ("y.txz", lzma.compress)],
)
def test_compressed_tars_by_any_suffix(tmp_path: Path, name: str, compress: Callable[[bytes], bytes]) -> None:
    foreign(tmp_path, shards=1)
    (tmp_path / name).write_bytes(compress((tmp_path / "x-000.tar").read_bytes()))
    for source in (tmp_path / name, str(tmp_path / f"*{name[1:]}"), (tmp_path / name).as_uri()):
        assert len(list(ShardStream(source))) == 4
    with pytest.raises(ValueError, match=r"none\.tgz'?: no such tar file"):
        ShardStream(tmp_path / "none.tgz")


def test_compressed_tar_behind_a_url_with_a_query(tmp_path: Path) -> None:
    foreign(tmp_path, shards=1)
    query = "token=" + 300 * "a"  # longer than a file's name may be
    fsspec.filesystem("memory").pipe(f"/signed/x.tgz?{query}", gzip.compress((tmp_path / "x-000.tar").read_bytes()))
    assert len(list(ShardStream(f"memory://signed/x.tgz?{query}"))) == 4


def test_a_file_is_no_folder_of_a_packed_data_set(tmp_path: Path) -> None:
    foreign(tmp_path, shards=1)
    (tmp_path / "x-000.tar").rename(tmp_path / "shard")
    assert len(list(ShardStream(tmp_path / "shard"))) == 4


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_names_in_every_tar_format(tmp_path: Path, form: int) -> None:
    key = "a" * 70 + "/" + "b" * 70
    path = write_tar(tmp_path / "x.tar", {key: {"cls": b"1"}, "c": {"cls": b"2"}}, format=form)
    assert [(s["key"], s["label"]) for s in ShardStream(path, shuffle=0)] == [(key, 1), ("c", 2)]


def test_folders_and_links_in_a_tar_are_passed_over(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        for name, kind in (("d", tarfile.DIRTYPE), ("d/latest", tarfile.SYMTYPE)):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "elsewhere"
            tar.addfile(info)
        info = tarfile.TarInfo("d/a.cls")
        info.size = 1
        tar.addfile(info, io.BytesIO(b"7"))
    assert [(s["key"], s["label"]) for s in ShardStream(tmp_path / "x.tar")] == [("d/a", 7)]


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE])
def test_a_part_that_is_a_link_is_named(tmp_path: Path, kind: bytes) -> None:
    """It has no data of its own: the sample would come without its picture."""
    path = write_tar(tmp_path / "x.tar", {"b": {"cls": b"1"}})
    with tarfile.open(path, "a") as tar:
        info = tarfile.TarInfo("a.jpg")
        info.type, info.linkname = kind, "b.jpg"
        tar.addfile(info)
    with pytest.raises(SampleError, match=r"x\.tar: a\.jpg is a link to 'b\.jpg'.*--dereference"):
        list(ShardStream(path, shuffle=0))


@pytest.mark.parametrize(("mode", "program"), [("w:gz", "gzip"), ("w:bz2", "bzip2"), ("w:xz", "xz")])
def test_a_compressed_tar_without_the_suffix_is_named(tmp_path: Path, mode: str, program: str) -> None:
    with tarfile.open(tmp_path / "x.tar", mode) as tar:  # type: ignore[call-overload]  # its modes are literals
        tar.addfile(tarfile.TarInfo("a.cls"))
    with pytest.raises(SampleError, match=rf"x\.tar: is compressed by {program}, .*name it \*\.tar\."):
        list(ShardStream(tmp_path / "x.tar", shuffle=0))


def test_a_tar_cut_anywhere_before_its_end_raises(tmp_path: Path) -> None:
    """The last data are zeros, so that a look at the file's tail could not tell."""
    path = write_tar(tmp_path / "x.tar", {"a": {"cls": b"1"}, "b": {"bin": bytes(1500)}})
    data = path.read_bytes()
    end = 512 * (1 + 1 + 1 + 3)
    assert not any(data[end:])
    for size in [0, 1, 511, 512, 513, 1023, 1024, 1100, 1536, 1537, 2048, 2560, end - 1, end, end + 511]:
        path.write_bytes(data[:size])
        with pytest.raises(SampleError, match=r"x\.tar"):
            list(ShardStream(path, shuffle=0))
    path.write_bytes(data[: end + 512])
    assert len(list(ShardStream(path, shuffle=0))) == 2


def test_a_damaged_header_raises(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "x.tar", {"a": {"cls": b"1"}, "b": {"cls": b"2"}})
    data = bytearray(path.read_bytes())
    data[1024] ^= 1
    path.write_bytes(data)
    with pytest.raises(SampleError, match="damaged tar header at byte 1024"):
        list(ShardStream(path))


@pytest.mark.parametrize(
    "source",
    ["pipe:cat x.tar", "pipe:curl http://h/x-{000..001}.tar", "cat x.tar |", "simplecache::pipe:cat x.tar", ["ok.tar", "pipe:x"], ["-"]],
)
def test_commands_are_refused(source: Any) -> None:
    with pytest.raises(ValueError, match="commands and pipes are not run"):
        ShardStream(source)


def test_missing_tars_are_named_at_once(tmp_path: Path) -> None:
    foreign(tmp_path, shards=1)
    with pytest.raises(ValueError, match=r"x-001\.tar'?: no such tar file"):
        ShardStream(str(tmp_path / "x-{000..001}.tar"))
    with pytest.raises(ValueError, match="no such tar file"):
        ShardStream(str(tmp_path / "y-*.tar"))
    with pytest.raises(ValueError, match="names no tar"):
        ShardStream([])


@pytest.mark.parametrize("part", ["pyd", "pickle", "pth", "extra.pkl", "PYD"])
def test_pickled_parts_are_refused(tmp_path: Path, part: str) -> None:
    path = write_tar(tmp_path / "x.tar", {"a": {part: pickle.dumps(1)}})
    with pytest.raises(SampleError, match=rf"x\.tar: sample a: part '{part.lower()}' is a pickle"):
        list(ShardStream(path))


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ({"cls": b"cat"}, "part 'cls': invalid literal"),
        ({"json": b"[1]"}, "part 'json': .*expected an object"),
        ({"jpg": b"GIF89a??"}, "part 'jpg': is neither JPEG, PNG nor WebP"),
        ({"jpg": b"\xff\xd8\xff\xe0"}, "part 'jpg': "),
    ],
)
def test_undecodable_parts_are_named(tmp_path: Path, parts: dict[str, bytes], reason: str) -> None:
    path = write_tar(tmp_path / "x.tar", {"k": parts})
    with pytest.raises(SampleError, match=rf"x\.tar: sample k: {reason}"):
        list(ShardStream(path))


def test_duplicate_parts_are_an_error(tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    with tarfile.open(path, "w") as tar:
        for _ in range(2):
            info = tarfile.TarInfo("a.txt")
            tar.addfile(info, io.BytesIO(b""))
    with pytest.raises(SampleError, match="duplicate file name"):
        list(ShardStream(path))


def test_which_part_is_the_image(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    picture, mask = image(rng, 8, 8), encode(image(rng, 8, 8), "png")
    png = encode(picture, "png")
    cases = {"a": {"jpg": png, "seg.png": mask}, "b": {"left.png": png}, "c": {"l.png": mask, "r.png": mask}}
    a, b, c = ShardStream(write_tar(tmp_path / "x.tar", cases), shuffle=0)
    assert np.array_equal(a["image"].permute(1, 2, 0).numpy(), picture)  # a PNG whatever its name says
    assert a["seg.png"] == mask  # a mask must not be turned into RGB
    assert np.array_equal(b["image"].permute(1, 2, 0).numpy(), picture)
    assert c == {"key": "c", "index": 2, "l.png": mask, "r.png": mask}


def test_a_foreign_stream_resumes_by_reading_again(tmp_path: Path) -> None:
    foreign(tmp_path, shards=4)
    source = str(tmp_path / "x-*.tar")
    with pytest.raises(ValueError, match="remainder='pad': only reading"):
        ShardStream(source, remainder="pad")
    for world_size, shuffle in ((1, 0), (1, 5), (2, 5)):
        make = partial(ShardStream, source, shuffle=shuffle, transform=noise, rank=world_size - 1, world_size=world_size)
        whole = [s["noise"] for s in make()]
        for stop in range(0, len(whole) + 1, 3):
            first, second = make(), make()
            got = [s["noise"] for s in islice(first, stop)]
            second.load_state_dict(first.state_dict())
            assert got + [s["noise"] for s in second] == whole
    state = ShardStream(source).state_dict()
    (tmp_path / "moved").mkdir()
    for path in tmp_path.glob("x-*.tar"):
        path.rename(tmp_path / "moved" / path.name)
    moved = ShardStream(str(tmp_path / "moved" / "x-*.tar"))
    moved.load_state_dict(state)  # another folder, the same tars
    with pytest.raises(ValueError, match="'fingerprint' is"):
        ShardStream(str(tmp_path / "moved" / "x-00[01].tar")).load_state_dict(state)
