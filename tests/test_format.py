"""The specification's code: manifest and index are read back as written, and anything else is refused with its place."""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from build_data import read_json, sign_manifest
from loaders.format import (
    SAMPLE_DTYPE,
    FormatError,
    Manifest,
    canonical_json,
    index_path,
    manifest_text,
    open_array,
    open_index,
    read_manifest,
    shard_path,
)
from packed_data import write_packed


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_packed(tmp_path / "set", "tar", "detection", (3, 2)).root


class TestManifest:
    def test_round_trip(self, root: Path) -> None:
        manifest = read_manifest(root)
        assert manifest_text(manifest).encode() == (root / "manifest.json").read_bytes()
        assert manifest.splits["train"].num_samples == 5
        assert [s.path for s in manifest.splits["train"].shards] == ["train/shard-000000.tar", "train/shard-000001.tar"]

    def test_checksum_is_over_the_canonical_rest(self, root: Path) -> None:
        raw = read_json(root)
        said = raw.pop("self_sha256")
        assert said == hashlib.sha256((json.dumps(raw, sort_keys=True, indent=1, ensure_ascii=False) + "\n").encode()).hexdigest()

    def test_no_transform_is_null_and_stays(self, root: Path) -> None:
        raw = read_json(root)
        assert raw["transform"] is None
        sign_manifest(root, {**raw, "transform": {"mode": "letterbox"}})
        assert read_manifest(root).transform == {"mode": "letterbox"}

    @pytest.mark.parametrize(
        ("change", "place"),
        [
            (lambda m: m.pop("classes"), "classes: Field required"),
            (lambda m: m.update(surprise=1), "surprise: Extra inputs are not permitted"),
            (lambda m: m.update(layout="zip"), "layout: "),
            (lambda m: m.update(classes=["a", 1]), "classes.1: "),
            (lambda m: m["splits"].update({"Bad Name": {"num_samples": 0, "shards": []}}), "splits.Bad Name"),
            (lambda m: m["splits"]["train"].update(num_samples=True), "splits.train.num_samples: "),
            (lambda m: m["splits"]["train"].update(num_samples=6), "splits.train.num_samples is 6, its shards hold 5"),
            (lambda m: m["splits"]["train"]["shards"][1].update(path="../x.tar"), "splits.train.shards.1.path: "),
            (lambda m: m["splits"]["train"]["shards"][1].update(path="/x.tar"), "is not a plain path below"),
            (lambda m: m["splits"]["train"]["shards"][1].update(path="a//x.tar"), "is not a plain path below"),
            (lambda m: m["splits"]["train"]["shards"][1].update(path="a\\x.tar"), "is not a plain path below"),
            (lambda m: m["splits"]["train"]["shards"][1].update(sha256="A" * 64), "splits.train.shards.1.sha256: "),
            (lambda m: m["splits"]["train"]["shards"][0].pop("sha256"), "a shard has either sha256 (tar) or files (memmap)"),
            (lambda m: m.update(layout="memmap"), "does not fit layout 'memmap'"),
            (lambda m: m["files"].update({"../../etc/passwd": m["files"]["findings.jsonl"]}), "is not a plain path below"),
            (lambda m: m["files"]["findings.jsonl"].update(num_bytes=-1), "files.findings.jsonl.num_bytes: "),
            (lambda m: m["source"].update(fingerprint="x"), "source.fingerprint: "),
        ],
    )
    def test_wrong_values_are_named(self, change: Any, place: str, root: Path) -> None:
        raw = read_json(root)
        change(raw)
        sign_manifest(root, raw)
        with pytest.raises(FormatError) as caught:
            read_manifest(root)
        assert str(caught.value).startswith(f"{root}/manifest.json: ")
        assert place in str(caught.value)

    def test_all_problems_at_once(self, root: Path) -> None:
        sign_manifest(root, {**read_json(root), "layout": "zip", "task": "other", "classes": 3})
        with pytest.raises(FormatError, match=r"layout: .*task: .*classes: "):
            read_manifest(root)

    def test_other_version(self, root: Path) -> None:
        sign_manifest(root, {**read_json(root), "format_version": 2})
        with pytest.raises(FormatError, match="format_version is 2, this release reads version 1"):
            read_manifest(root)

    @pytest.mark.parametrize(
        "spelling",
        [
            lambda raw: json.dumps(raw),
            lambda raw: canonical_json(raw).replace("\n", "\r\n"),
            lambda raw: canonical_json(raw) + "\n",
            lambda raw: canonical_json(raw).replace('"task": "detection"', '"task": "detection", "task": "detection"'),
            lambda raw: canonical_json({**raw, "self_sha256": "0" * 64}),
            lambda raw: canonical_json({k: v for k, v in raw.items() if k != "self_sha256"}),
        ],
    )
    def test_equal_value_in_another_spelling(self, spelling: Any, root: Path) -> None:
        (root / "manifest.json").write_text(spelling(read_json(root)), newline="")
        with pytest.raises(FormatError, match="was changed after it was written: self_sha256 says"):
            read_manifest(root)

    def test_another_spelling_with_a_checksum_of_its_own(self, root: Path) -> None:
        raw = read_json(root)
        said = raw["self_sha256"]
        for spelling in (lambda text: text.replace('\n "', '\n  "'), lambda text: text.replace('"task"', '"task": "x",\n "task"')):
            without = spelling(canonical_json({k: v for k, v in raw.items() if k != "self_sha256"}))
            text = spelling(canonical_json(raw)).replace(said, hashlib.sha256(without.encode()).hexdigest())
            (root / "manifest.json").write_text(text)
            with pytest.raises(FormatError, match="was changed after it was written: self_sha256 says"):
                read_manifest(root)

    def test_the_checksum_is_no_other_line_like_it(self, root: Path) -> None:
        raw = read_json(root)
        for _ in range(2):
            sign_manifest(root, {**raw, "output": {"self_sha256": read_json(root)["self_sha256"], "z": 1}})
            assert read_manifest(root).output["z"] == 1

    def test_missing(self, tmp_path: Path) -> None:
        with pytest.raises(FormatError, match=r"nothing/manifest\.json: not found: no such folder"):
            read_manifest(tmp_path / "nothing")
        with pytest.raises(FormatError, match="not found: the folder holds no finished packed data set"):
            read_manifest(tmp_path)

    def test_names_outside_ascii(self, root: Path) -> None:
        raw = read_json(root)
        raw["classes"] = ["Riß", "裂纹", "\u2028", '"', "\\"]
        sign_manifest(root, raw)
        manifest = read_manifest(root)
        assert manifest.classes == raw["classes"]
        assert manifest_text(manifest).encode() == (root / "manifest.json").read_bytes()

    def test_is_frozen(self, root: Path) -> None:
        manifest = read_manifest(root)
        with pytest.raises(ValueError, match="frozen"):
            manifest.layout = "memmap"  # type: ignore[misc]
        assert isinstance(manifest, Manifest)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda child: st.lists(child, max_size=4) | st.dictionaries(st.text(), child, max_size=4),
    max_leaves=20,
)


@settings(deadline=None)
@given(JSON)
def test_canonical_json_is_a_fixed_point(value: Any) -> None:
    text = canonical_json(value)
    assert json.loads(text) == value
    assert canonical_json(json.loads(text)) == text
    assert text.endswith("\n")


def test_canonical_json_is_this_text() -> None:
    assert canonical_json({"b": [1, 0.5, "ä"], "a": {}}) == '{\n "a": {},\n "b": [\n  1,\n  0.5,\n  "ä"\n ]\n}\n'


def test_paths() -> None:
    assert index_path("train", "samples") == "index/train/samples.npy"
    assert shard_path("val", 12, "tar") == "val/shard-000012.tar"
    assert shard_path("val", 12, "memmap") == "val/shard-000012"


def test_sample_dtype_is_as_the_specification_says() -> None:
    """Little-endian and packed: a row is 60 bytes on every machine."""
    assert SAMPLE_DTYPE.itemsize == 60
    assert SAMPLE_DTYPE.descr == [
        ("shard", "<u4"),
        ("key", "<i8"),
        ("image_offset", "<i8"),
        ("image_size", "<u4"),
        ("json_offset", "<i8"),
        ("json_size", "<u4"),
        ("image_crc32", "<u4"),
        ("json_crc32", "<u4"),
        ("width", "<u4"),
        ("height", "<u4"),
        ("label", "<i4"),
        ("num_boxes", "<u4"),
    ]


ARRAYS = [np.arange(6, dtype="<i8").reshape(2, 3), np.zeros((0, 4), "<f4"), np.zeros(3, SAMPLE_DTYPE), np.array([b"a", b"bc"])]


class TestArrays:
    @pytest.mark.parametrize("array", ARRAYS, ids=lambda a: str(a.dtype)[:10])
    def test_mapped_as_written(self, array: np.ndarray, tmp_path: Path) -> None:
        np.save(tmp_path / "a.npy", array)
        found = open_array(tmp_path / "a.npy", array.dtype)
        assert found.dtype == array.dtype
        assert found.shape == array.shape
        assert (found == array).all()
        assert isinstance(found, np.memmap) == (array.size > 0)
        assert not isinstance(found, np.memmap) or not found.flags.writeable

    def test_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "a.npy"
        with pytest.raises(FormatError, match=r"a\.npy: not found"):
            open_array(path)
        np.save(path, np.arange(3, dtype="<i4"))
        with pytest.raises(FormatError, match=r"a\.npy: dtype is int32, expected int64"):
            open_array(path, np.dtype("<i8"))
        np.save(path, np.arange(3, dtype=">i8"))
        with pytest.raises(FormatError, match="dtype is >i8, expected int64"):
            open_array(path, np.dtype("<i8"))
        np.save(path, np.asfortranarray(np.ones((2, 3))))
        with pytest.raises(FormatError, match="in Fortran order, which the bytes are not"):
            open_array(path)
        np.savez(path.with_suffix(".npz"), a=np.ones(3))
        with pytest.raises(FormatError, match="is no complete NPY file"):
            open_array(path.with_suffix(".npz"))
        np.save(path, np.array([{}]), allow_pickle=True)
        with pytest.raises(FormatError, match="is no complete NPY file"):
            open_array(path)
        path.unlink()
        path.mkdir()
        with pytest.raises(FormatError, match="not found"):
            open_array(path)

    @settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(cut=st.integers(0, 175), at=st.integers(0, 127), value=st.integers(0, 255))
    def test_damaged_headers_never_raise_anything_else(self, tmp_path: Path, cut: int, at: int, value: int) -> None:
        path = tmp_path / "a.npy"
        np.save(path, np.arange(6, dtype="<i8"))
        data = bytearray(path.read_bytes())
        data[at] = value
        for damaged in (bytes(data), bytes(data[:cut])):
            path.write_bytes(damaged)
            with contextlib.suppress(FormatError):
                open_array(path)


class TestIndex:
    def test_opens(self, root: Path) -> None:
        index = open_index(root, read_manifest(root), "train")
        assert index.samples["shard"].tolist() == [0, 0, 0, 1, 1]
        assert index.box_offsets is not None
        assert index.boxes is not None
        assert index.boxes.shape == (int(index.box_offsets[-1]), 4)
        assert index.restarts is None

    def test_no_such_split(self, root: Path) -> None:
        with pytest.raises(FormatError, match="has no split 'val'; it has: train"):
            open_index(root, read_manifest(root), "val")

    @pytest.mark.parametrize(
        ("name", "array", "message"),
        [
            ("samples", np.zeros(4, SAMPLE_DTYPE), r"samples\.npy: shape \(4,\), the manifest says \(5,\)"),
            ("samples", np.zeros((5, 1), SAMPLE_DTYPE), r"samples\.npy: shape \(5, 1\)"),
            ("boxes", np.zeros((3, 4), "<f4"), "box arrays do not fit together"),
            ("labels", np.zeros(3, "<i8"), "box arrays do not fit together"),
            ("difficult", np.zeros((8, 1), "u1"), "box arrays do not fit together"),
            ("box_offsets", np.zeros(5, "<i8"), "box arrays do not fit together"),
            ("box_offsets", np.zeros((), "<i8"), "box arrays do not fit together"),
            ("box_offsets", np.full(6, -1, "<i8"), "box arrays do not fit together"),
        ],
    )
    def test_arrays_that_do_not_fit(self, name: str, array: np.ndarray, message: str, root: Path) -> None:
        np.save(root / index_path("train", name), array)
        with pytest.raises(FormatError, match=message):
            open_index(root, read_manifest(root), "train")

    def test_detection_without_boxes(self, root: Path) -> None:
        raw = read_json(root)
        del raw["files"][index_path("train", "boxes")]
        sign_manifest(root, raw)
        with pytest.raises(FormatError, match="lists no boxes, labels, difficult or box_offsets"):
            open_index(root, read_manifest(root), "train")

    @pytest.mark.parametrize(
        ("restarts", "offsets"),
        [(np.zeros(3, "<u4"), np.zeros(6, "<i8")), (np.zeros(3, "<u4"), np.zeros(3, "<i8")), (None, np.zeros(6, "<i8"))],
    )
    def test_restarts_that_do_not_fit(self, restarts: np.ndarray | None, offsets: np.ndarray, root: Path) -> None:
        raw = read_json(root)
        for name, array in (("restarts", restarts), ("restart_offsets", offsets)):
            if array is not None:
                np.save(root / index_path("train", name), array)
                raw["files"][index_path("train", name)] = {"num_bytes": 0, "sha256": "0" * 64}
        sign_manifest(root, raw)
        with pytest.raises(FormatError, match="restarts and restart_offsets do not fit together"):
            open_index(root, read_manifest(root), "train")


def test_many_threads_open_arrays_at_a_time(tmp_path: Path) -> None:
    """NumPy's own reader fails here now and then under CPython 3.11, see `loaders.npy`."""
    np.save(tmp_path / "a.npy", np.arange(24, dtype=np.uint8).reshape(2, 3, 4))
    np.save(tmp_path / "b.npy", np.zeros(5, SAMPLE_DTYPE))

    def read(_: int) -> int:
        return int(open_array(tmp_path / "a.npy").sum()) + len(open_array(tmp_path / "b.npy", SAMPLE_DTYPE))

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            assert set(pool.map(read, range(2000))) == {276 + 5}
    finally:
        sys.setswitchinterval(before)


@pytest.mark.parametrize("dtype", ["|u1", "<i8", "<f2", "<f4", "|S17", "<f8", SAMPLE_DTYPE])
@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 3), (1, 2, 3, 4)])
def test_every_header_that_numpy_writes(tmp_path: Path, dtype: Any, shape: tuple[int, ...]) -> None:
    array = np.zeros(shape, dtype)
    np.save(tmp_path / "a.npy", array)
    found = open_array(tmp_path / "a.npy", array.dtype)
    assert found.shape == shape
    assert found.dtype == array.dtype
