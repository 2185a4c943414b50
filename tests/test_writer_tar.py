"""Tar shards, byte by byte: plain USTAR, found by webdataset, and no byte that could be another one."""

from __future__ import annotations

import io
import json
import math
import tarfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset as wds
from hypothesis import given, settings
from hypothesis import strategies as st

from loaders.codecs import decode_image
from loaders.format import SAMPLE_DTYPE, FormatError, Index, Task
from loaders.jpeg import restart_offsets
from packer.sample import Sample
from packer.writers.compare import index_differences, shard_rows
from packer.writers.csr import IndexBuilder, concatenate
from packer.writers.tar import BLOCK, END, TarSample, TarWriter, derive_row, member_header, member_name, padding, read_samples
from writer_contract import TASKS, WriterContract, make_sample


class TestContract(WriterContract):
    layout = "tar"


def pack(path: Path, task: Task = "detection", n: int = 4, parts: tuple[str, ...] = ("jpg", "png", "webp")) -> tuple[list[Sample], Index]:
    samples = [make_sample(i, task, part=parts[i % len(parts)]) for i in range(n)]
    writer = TarWriter(path, task)
    for sample in samples:
        writer.write(sample)
    return samples, writer.close().index


def read(data: bytes) -> list[TarSample]:
    return list(read_samples(io.BytesIO(data), len(data)))


# Bytes ----------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", TASKS)
def test_plain_ustar(tmp_path: Path, task: Task) -> None:
    samples, _ = pack(tmp_path / "a.tar", task)
    data = (tmp_path / "a.tar").read_bytes()
    with tarfile.open(tmp_path / "a.tar", "r:") as tar:
        members = tar.getmembers()
        assert tar.pax_headers == {}
        for m in members:
            assert m.type == tarfile.REGTYPE
            assert (m.mode, m.uid, m.gid, m.mtime, m.uname, m.gname, m.linkname) == (0o644, 0, 0, 0, "", "", "")
            assert m.pax_headers == {}
            header = data[m.offset : m.offset + BLOCK]
            assert header[257:265] == b"ustar\x0000"
            assert header[345:] == bytes(BLOCK - 345)
    labels = ["cls"] if task == "classification" else []
    assert [m.name for m in members] == [f"{s.key:09d}.{p}" for s in samples for p in sorted([*labels, str(s.suffix), "json"])]
    assert data.endswith(END)
    assert len(data) == sum(BLOCK + m.size + padding(m.size) for m in members) + len(END)


def test_a_key_of_more_than_nine_digits(tmp_path: Path) -> None:
    sample = make_sample(0, "unlabelled")
    sample.key = 12_345_678_901
    writer = TarWriter(tmp_path / "a.tar", "unlabelled")
    writer.write(sample)
    assert writer.close().index.samples["key"].tolist() == [sample.key]
    (found,) = read((tmp_path / "a.tar").read_bytes())
    assert found.key == sample.key


@pytest.mark.filterwarnings("ignore:Exception ignored in. <_io.FileIO:pytest.PytestUnraisableExceptionWarning")  # webdataset closes late
@pytest.mark.parametrize("task", TASKS)
def test_webdatasets_default_reader_finds_exactly_the_samples(tmp_path: Path, task: Task) -> None:
    samples, _ = pack(tmp_path / "a.tar", task, n=7)
    found = list(wds.WebDataset(str(tmp_path / "a.tar"), shardshuffle=False))
    assert [f["__key__"] for f in found] == [f"{s.key:09d}" for s in samples]
    for f, s in zip(found, samples, strict=True):
        assert {k for k in f if not k.startswith("__")} == {s.suffix, "json"} | ({"cls"} if task == "classification" else set())
        assert f[s.suffix] == s.encoded
        if task == "classification":
            assert f["cls"] == str(s.label).encode()


@pytest.mark.parametrize("task", TASKS)
def test_json_always_has_the_same_keys(tmp_path: Path, task: Task) -> None:
    samples, _ = pack(tmp_path / "a.tar", task)
    own = {"classification": {"label"}, "detection": {"boxes", "labels", "difficult", "truncated", "occluded"}, "unlabelled": set()}
    always = {"source", "width", "height", "original_width", "original_height", "affine"}
    for found, sample in zip(read((tmp_path / "a.tar").read_bytes()), samples, strict=True):
        meta = json.loads(found.parts["json"][1])
        assert set(meta) == always | own[task]
        assert (meta["source"], meta["width"], meta["height"]) == (sample.source, sample.width, sample.height)
        assert (meta["original_width"], meta["original_height"]) == (sample.original_width, sample.original_height)
        assert meta["affine"] == list(sample.affine)
        if task == "detection":
            assert all(type(v) is float for box in meta["boxes"] for v in box)
            np.testing.assert_array_equal(np.array(meta["boxes"], np.float32).reshape(-1, 4), sample.boxes)
            for name in ("labels", "difficult", "truncated", "occluded"):
                assert meta[name] == getattr(sample, name).tolist()


def test_extra_columns_are_kept_as_strings(tmp_path: Path) -> None:
    sample = make_sample(0, "unlabelled")
    sample.extra = {"plant": "Köln", "id": "007"}
    writer = TarWriter(tmp_path / "a.tar", "unlabelled")
    writer.write(sample)
    writer.close()
    (found,) = read((tmp_path / "a.tar").read_bytes())
    assert json.loads(found.parts["json"][1])["extra"] == sample.extra


def test_index_points_at_the_data_of_each_part(tmp_path: Path) -> None:
    samples, index = pack(tmp_path / "a.tar")
    data = (tmp_path / "a.tar").read_bytes()
    for row, sample in zip(index.samples, samples, strict=True):
        image = data[row["image_offset"] :][: row["image_size"]]
        meta = data[row["json_offset"] :][: row["json_size"]]
        assert image == sample.encoded
        assert json.loads(meta)["source"] == sample.source
        assert (zlib.crc32(image), zlib.crc32(meta)) == (row["image_crc32"], row["json_crc32"])


def test_idx_is_energons_first_headers_then_the_end(tmp_path: Path) -> None:
    samples, _ = pack(tmp_path / "a.tar", "classification")
    offsets = np.frombuffer((tmp_path / "a.tar.idx").read_bytes(), "<u8")
    with tarfile.open(tmp_path / "a.tar") as tar:
        first: dict[str, int] = {}
        for m in tar.getmembers():
            first.setdefault(m.name.partition(".")[0], m.offset)
    assert offsets[:-1].tolist() == list(first.values())
    assert len(offsets) == len(samples) + 1
    assert offsets[-1] + len(END) == (tmp_path / "a.tar").stat().st_size


def test_restarts_are_there_where_a_grid_is(tmp_path: Path) -> None:
    samples, index = pack(tmp_path / "a.tar", n=6)
    assert index.restarts is not None
    assert index.restart_offsets is not None
    for i, sample in enumerate(samples):
        mine = index.restarts[index.restart_offsets[i] : index.restart_offsets[i + 1]]
        expected = restart_offsets(sample.encoded or b"") if sample.suffix == "jpg" else []
        assert mine.tolist() == list(expected)
        assert (len(mine) > 0) == (sample.suffix == "jpg")


def test_without_a_grid_there_are_no_restart_arrays(tmp_path: Path) -> None:
    _, index = pack(tmp_path / "a.tar", parts=("png",))
    assert (index.restarts, index.restart_offsets) == (None, None)


# Reading back ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", TASKS)
def test_what_is_read_back_gives_the_writers_index(tmp_path: Path, task: Task) -> None:
    samples, index = pack(tmp_path / "a.tar", task, n=6)
    builder = IndexBuilder(task)
    for found, sample in zip(read((tmp_path / "a.tar").read_bytes()), samples, strict=True):
        row, meta, part, image = derive_row(found, task)
        assert (part, image, meta["source"]) == (sample.suffix, sample.encoded, sample.source)
        builder.add(row, sample.boxes, sample.labels, sample.difficult, restart_offsets(image) if part == "jpg" else None)
    assert list(index_differences(index, builder.build())) == []


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, list[range]]:
    """A shard's bytes, and where the data of its parts lies."""
    path = tmp_path_factory.mktemp("tar") / "a.tar"
    pack(path, "classification", n=3)
    with tarfile.open(path) as tar:
        data = [range(m.offset_data, m.offset_data + m.size) for m in tar.getmembers()]
    return path.read_bytes(), data


def rejects(data: bytes) -> bool:
    try:
        read(data)
    except FormatError as e:
        return str(e).startswith("byte ")
    return False


def test_every_byte_outside_the_data_has_one_possible_value(shard: tuple[bytes, list[range]]) -> None:
    """Each is changed in its lowest bit, its highest bit and to a value from a tar's own alphabet."""
    whole, parts = shard
    inside = {i for part in parts for i in part}
    outside = [i for i in range(len(whole)) if i not in inside]
    assert len(outside) > 5000
    for i in outside:
        old = whole[i]
        new = (old ^ 1, old ^ 0x80, ord("-") if old != ord("-") else 0)[i % 3]
        changed = whole[:i] + bytes([new]) + whole[i + 1 :]
        assert rejects(changed), f"byte {i} changed from {old} to {new} went unseen"


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_any_change_of_a_header_is_seen(shard: tuple[bytes, list[range]], data: st.DataObject) -> None:
    whole, parts = shard
    part = data.draw(st.sampled_from(parts))
    i = part.start - BLOCK + data.draw(st.integers(0, BLOCK - 1))
    new = data.draw(st.integers(0, 255).filter(lambda v: v != whole[i]))
    assert rejects(whole[:i] + bytes([new]) + whole[i + 1 :])


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_a_shard_cut_short_or_longer_is_seen(shard: tuple[bytes, list[range]], data: st.DataObject) -> None:
    whole, _ = shard
    assert rejects(whole[: data.draw(st.integers(0, len(whole) - 1))])
    assert rejects(whole + data.draw(st.binary(min_size=1, max_size=2000)))


def test_every_cut_at_a_block_is_seen(shard: tuple[bytes, list[range]]) -> None:
    whole, _ = shard
    assert all(rejects(whole[:i]) for i in range(0, len(whole), BLOCK))


def test_the_untouched_shard_is_read(shard: tuple[bytes, list[range]]) -> None:
    assert [s.key for s in read(shard[0])] == [1, 4, 7]


def test_everything_before_a_fault_is_yielded(shard: tuple[bytes, list[range]]) -> None:
    whole, parts = shard
    last = parts[-1].start - BLOCK
    reader = read_samples(io.BytesIO(whole[:last] + b"x" + whole[last + 1 :]), len(whole))
    assert [next(reader).key, next(reader).key] == [1, 4]
    with pytest.raises(FormatError, match=f"byte {last}: "):
        next(reader)


class _NoHugeReads(io.BytesIO):
    def read(self, n: int | None = -1, /) -> bytes:
        assert n is not None
        assert 0 <= n < 1 << 20
        return super().read(n)


def test_a_size_beyond_the_file_is_not_read() -> None:
    """A reader that trusts it would allocate 8 GB."""
    data = member_header("000000001.jpg", 8**11 - 1) + bytes(BLOCK)
    with pytest.raises(FormatError, match=r"byte 0: member 000000001.jpg of 8589934591 bytes is cut short"):
        list(read_samples(_NoHugeReads(data), len(data)))


@pytest.mark.parametrize(
    "name", ["0000000001.jpg", "00000001.jpg", "000000001", "000000001.JPG", "000000001.a.jpg", "x/00000001.jpg", "+00000001.jpg"]
)
def test_a_name_that_is_not_ours_is_refused(name: str) -> None:
    data = member_header(name, 0) + END
    with pytest.raises(FormatError, match="byte 0: "):
        read(data)


def members(*parts: tuple[str, bytes]) -> bytes:
    return b"".join(member_header(name, len(data)) + data + bytes(padding(len(data))) for name, data in parts) + END


def test_parts_out_of_order_or_twice_are_refused() -> None:
    for names in (("000000001.json", "000000001.jpg"), ("000000001.jpg", "000000001.jpg")):
        with pytest.raises(FormatError, match="is out of order"):
            read(members(*((name, b"x") for name in names)))


META: dict[str, Any] = {"source": "a.jpg", "width": 4, "height": 3, "label": 2}
BOXES: dict[str, Any] = {"boxes": [[0.0, 0.0, 1.0, 1.0]], "labels": [0], "difficult": [0], "truncated": [0], "occluded": [0]}


def parsed(task: Task, meta: Any, **parts: bytes) -> dict[str, int]:
    text = meta if isinstance(meta, bytes) else json.dumps(meta).encode()
    everything = {"jpg": b"image", "json": text, **parts}
    return derive_row(TarSample(1, 0, {k: (512, v) for k, v in everything.items()}), task)[0]


def test_a_row_from_its_parts() -> None:
    assert parsed("classification", META, cls=b"2")["label"] == 2
    assert parsed("detection", META | BOXES)["num_boxes"] == 1
    assert parsed("unlabelled", META)["label"] == -1


@pytest.mark.parametrize(
    ("task", "meta", "parts", "message"),
    [
        ("classification", META, {}, "and cls"),
        ("classification", META, {"cls": b"3"}, "cls says b'3', json says 2"),
        ("classification", META, {"cls": b"2", "png": b""}, "expected one image"),
        ("unlabelled", META, {"cls": b"2"}, "expected one image, json"),
        ("classification", {k: v for k, v in META.items() if k != "label"}, {"cls": b"2"}, "KeyError: 'label'"),
        ("unlabelled", {k: v for k, v in META.items() if k != "source"}, {}, "KeyError: 'source'"),
        ("unlabelled", META | {"width": "wide"}, {}, "ValueError"),
        ("unlabelled", META | {"width": None}, {}, "TypeError"),
        ("unlabelled", b"[]", {}, "expected an object"),
        ("unlabelled", b"{", {}, "json part is not as the format says"),
        ("detection", META, {}, "KeyError: 'boxes'"),
        ("detection", META | BOXES | {"labels": []}, {}, "1 boxes and 0 labels"),
        ("detection", META | BOXES | {"boxes": [[1.0, 2.0]]}, {}, "ValueError"),
        ("detection", META | BOXES | {"boxes": [["a", 0, 0, 0]]}, {}, "ValueError"),
    ],
)
def test_parts_that_do_not_fit_the_task_are_refused(task: Task, meta: Any, parts: dict[str, bytes], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        parsed(task, meta, **parts)


# Index of a split -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", TASKS)
def test_a_split_is_its_shards_one_after_another(tmp_path: Path, task: Task) -> None:
    parts = []
    for number, (n, kinds) in enumerate([(3, ("jpg",)), (1, ("png",)), (4, ("png", "jpg"))]):
        parts.append(pack(tmp_path / f"{number}.tar", task, n, kinds)[1])
    whole = concatenate(parts, task)
    assert whole.samples["shard"].tolist() == [0, 0, 0, 1, 2, 2, 2, 2]
    assert whole.samples.dtype == SAMPLE_DTYPE
    assert [p.samples["shard"].any() for p in parts] == [False] * 3
    start = 0
    for part in parts:
        n = len(part.samples)
        assert list(index_differences(shard_rows(whole, start, n), part)) == []
        start += n


def test_no_shards_make_an_empty_index() -> None:
    index = concatenate([], "detection")
    assert len(index.samples) == 0
    assert index.boxes is not None
    assert index.boxes.shape == (0, 4)
    assert index.box_offsets is not None
    assert index.box_offsets.tolist() == [0]


def test_each_difference_is_told_with_its_sample(tmp_path: Path) -> None:
    _, index = pack(tmp_path / "a.tar", n=6)

    def differences(change: Any) -> list[tuple[int | None, str]]:
        other = concatenate([index], "detection")
        change(other)
        return list(index_differences(other, index))

    def set_width(i: Index) -> None:
        i.samples["width"][2] = 9

    def move_box(i: Index) -> None:
        assert i.boxes is not None
        i.boxes[-1, 0] += 1

    def shift_offsets(i: Index) -> None:
        assert i.box_offsets is not None
        i.box_offsets[2] += 1

    def move_restart(i: Index) -> None:
        assert i.restarts is not None
        i.restarts[0] += 1

    def drop_sample(i: Index) -> None:
        i.samples = i.samples[:-1]

    assert differences(lambda _: None) == []
    assert differences(set_width) == [(7, "width is 9 in the index, 40 in the shard")]
    assert differences(move_box) == [(16, "boxes differ")]
    assert differences(shift_offsets) == [(4, "box_offsets differ")]
    assert differences(move_restart) == [(1, "restarts differ")]
    assert differences(drop_sample) == [(None, "5 samples in the index, 6 in the shard")]


def test_differences_are_limited(tmp_path: Path) -> None:
    _, index = pack(tmp_path / "a.tar", "unlabelled", n=30)
    other = concatenate([index], "unlabelled")
    other.samples["image_crc32"] += 1
    other.samples["width"] += 1
    assert len(list(index_differences(other, index, limit=20))) == 20


def test_images_read_back_decode(tmp_path: Path) -> None:
    samples, _ = pack(tmp_path / "a.tar", parts=("png",))
    for found, sample in zip(read((tmp_path / "a.tar").read_bytes()), samples, strict=True):
        np.testing.assert_array_equal(decode_image(found.parts["png"][1], "png"), sample.image)


def test_padding_fills_a_block() -> None:
    assert [padding(n) for n in (0, 1, 511, 512, 513)] == [0, 511, 1, 0, 511]
    assert all((n + padding(n)) % BLOCK == 0 and padding(n) < BLOCK for n in range(0, 5000, 7))
    assert math.gcd(len(END), BLOCK) == BLOCK


@given(st.integers(0, 10**9 - 1), st.sampled_from(["jpg", "json", "cls", "webp"]), st.integers(0, 8**11 - 1))
def test_a_header_is_what_tarfile_writes(key: int, part: str, num_bytes: int) -> None:
    info = tarfile.TarInfo(member_name(key, part))
    info.size, info.mode, info.mtime = num_bytes, 0o644, 0
    assert member_header(info.name, num_bytes) == info.tobuf(tarfile.USTAR_FORMAT, "ascii", "strict")


def test_what_no_header_can_hold_is_refused() -> None:
    for name, num_bytes in (("x" * 101, 1), ("a.jpg", 8**11)):
        with pytest.raises(ValueError, match="does not fit"):
            member_header(name, num_bytes)
