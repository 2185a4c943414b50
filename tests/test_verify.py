"""Verify: any changed, missing or extra byte is found and tied to its file and sample; sound data give no alarm; nothing makes it fall."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from build_data import Recorder, change_byte, pack, read_json, run_build, sign_manifest
from conftest import CLASSES, picture, save, voc_xml
from loaders.format import FormatError, sha256_file
from packer.engines.local import LocalEngine
from packer.outdir import open_partial
from packer.problems import Problem, as_json, as_line, as_lines
from packer.sample import PackError
from packer.verify import verify

LAYOUTS: dict[str, dict[str, Any]] = {
    "tar": {"output": {"shard_samples": 3}},
    "memmap": {"output": {"shard_samples": 3, "format": "memmap"}, "transform": {"resize": "24x16"}},
    "restarts": {"output": {"shard_samples": 3, "image": "jpg"}},
}


def problems(root: Path, *, quick: bool = False, workers: int = 1) -> list[Problem]:
    return verify(root, LocalEngine(workers), quick=quick, progress=Recorder().progress)


def errors(root: Path, *, quick: bool = False) -> list[Problem]:
    return [p for p in problems(root, quick=quick) if p.level == "error"]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A detection set of 8 pictures, two splits, in each layout; a class-folder set as "classes". One finding in each."""
    root = tmp_path_factory.mktemp("verify")
    rows = ["image_id,split"]
    for i in range(8):
        save(root / "voc" / "images" / f"w{i}.{('jpg', 'png')[i % 2]}", picture(20 + i, 16, i))
        objects = [(CLASSES[(i + j) % 4], (1 + j, 2, 9 + j, 12)) for j in range(i % 3)]
        (root / "voc" / "annotations").mkdir(exist_ok=True)
        (root / "voc" / "annotations" / f"w{i}.xml").write_text(voc_xml(f"w{i}", (20 + i, 16), objects))
        rows.append(f"w{i},{('train', 'train', 'train', 'val')[i % 4]}")
        save(root / "folder" / ("crack", "slag")[i % 2] / f"{i}.webp", picture(15, 14, i))
    (root / "voc" / "train_val_test_split.csv").write_text("\n".join(rows) + "\n")
    for kind in ("voc", "folder"):
        (root / kind / "stray.txt").write_text("x")
    for name, tables in LAYOUTS.items():
        assert run_build(root / "voc", root / name, **tables).ok
    assert run_build(root / "folder", root / "classes", **LAYOUTS["tar"]).ok
    return {name: root / name for name in [*LAYOUTS, "classes"]}


@pytest.fixture
def copy(packed: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    def make(name: str) -> Path:
        root = tmp_path / name
        shutil.copytree(packed[name], root)
        return root

    return make


def covered(root: Path) -> list[str]:
    return sorted(p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file() and p.name != "README.md")


class TestSound:
    @pytest.mark.parametrize("quick", [False, True])
    @pytest.mark.parametrize("name", [*LAYOUTS, "classes"])
    def test_no_alarm(self, name: str, quick: bool, packed: dict[str, Path]) -> None:
        assert problems(packed[name], quick=quick) == []

    def test_with_workers(self, packed: dict[str, Path]) -> None:
        assert problems(packed["tar"], workers=2) == []

    def test_progress_counts_samples(self, packed: dict[str, Path]) -> None:
        console = Recorder()
        assert verify(packed["tar"], LocalEngine(1), quick=False, progress=console.progress) == []
        assert console.passed == {"verifying": (8, 8)}

    def test_files_of_other_readers_are_warnings(self, copy: Callable[[str], Path]) -> None:
        root = copy("tar")
        (root / ".nv-meta").mkdir()
        (root / ".nv-meta" / "dataset.yaml").write_text("x")
        (root / "train" / "notes.txt").write_text("x")
        (root / "empty").mkdir()
        (root / "README.md").write_text("other words")
        found = problems(root)
        assert {(p.level, p.code, p.path) for p in found} == {
            ("warning", "unknown-file", ".nv-meta/dataset.yaml"),
            ("warning", "unknown-file", "train/notes.txt"),
            ("warning", "unknown-file", "empty"),
        }
        (root / "README.md").unlink()
        assert ("warning", "missing-file", "README.md") in {(p.level, p.code, p.path) for p in problems(root)}

    def test_interrupted_builds_work_is_named(self, copy: Callable[[str], Path]) -> None:
        root = copy("tar")
        (root / ".partial").mkdir()
        (root / ".partial" / "x.record").write_text("x")
        [found] = problems(root)
        assert (found.level, found.path, found.message) == ("warning", ".partial/x.record", "an interrupted build's work")

    def test_many_unknown_files_do_not_flood(self, copy: Callable[[str], Path]) -> None:
        root = copy("tar")
        for i in range(150):
            (root / f"x{i}").touch()
        assert len(problems(root)) == 100


class Part:
    """Where a sample lies in a shard, by tarfile alone."""

    def __init__(self, root: Path) -> None:
        self.samples: dict[str, list[tuple[int, int, int, str]]] = {}
        self.json: dict[str, list[tuple[int, int]]] = {}
        for path in root.rglob("*.tar"):
            name = path.relative_to(root).as_posix()
            spans: dict[int, list[int]] = {}
            sources: dict[int, str] = {}
            self.json[name] = []
            with tarfile.open(path) as tar:
                for member in tar:
                    key = int(member.name.partition(".")[0])
                    end = member.offset_data + -(-member.size // 512) * 512
                    spans.setdefault(key, []).extend((member.offset, end))
                    if member.name.endswith(".json"):
                        stream = tar.extractfile(member)
                        assert stream is not None
                        sources[key] = json.loads(stream.read())["source"]
                        self.json[name].append((member.offset_data, member.offset_data + member.size))
            self.samples[name] = [(min(s), max(s), key, sources[key]) for key, s in spans.items()]

    def at(self, name: str, offset: int) -> tuple[int, str] | None:
        return next(((key, source) for start, end, key, source in self.samples[name] if start <= offset < end), None)

    def in_json(self, name: str, offset: int) -> bool:
        return any(start <= offset < end for start, end in self.json[name])


def flips(root: Path, number: int, seed: int) -> Iterator[tuple[str, int, int]]:
    """(file, offset, xor): evenly over the files, and in tars evenly over what there is of headers, data, padding and end."""
    rng = random.Random(seed)
    files = [f for f in covered(root) if (root / f).stat().st_size]
    for _ in range(number):
        name = rng.choice(files)
        size = (root / name).stat().st_size
        offset = rng.choice([rng.randrange(size), rng.randrange(min(size, 512)), size - 1 - rng.randrange(min(size, 1500))])
        yield name, offset, rng.randrange(1, 256)


def check_flips(root: Path, number: int, seed: int) -> None:
    parts = Part(root)
    for name, offset, value in flips(root, number, seed):
        change_byte(root / name, offset, value)
        found = errors(root)
        change_byte(root / name, offset, value)
        where = f"{name} byte {offset} xor {value}: {found}"
        named = {p.path for p in found}
        if name == "manifest.json":
            assert [p.code for p in found] == ["bad-manifest"], where
            continue
        assert name in named, where
        # A damaged index is also at odds with the shards, in their split; nothing else is accused.
        split = name.split("/")[1] if name.startswith("index/") else name.split("/")[0]
        assert all(p == name or p.startswith((f"index/{split}", f"{split}/")) for p in named), where
        if name.endswith(".tar"):
            sample = parts.at(name, offset)
            accused = {(p.sample, p.source) for p in found if p.sample is not None}
            if sample is None:
                assert accused == set(), where
            elif parts.in_json(name, offset):
                assert {key for key, _ in accused} == {sample[0]}, where
            else:
                assert accused == {sample}, where
    assert problems(root) == []


@pytest.mark.parametrize(("name", "number"), [("tar", 130), ("memmap", 130), ("restarts", 60), ("classes", 80)])
def test_single_flipped_bytes(name: str, number: int, copy: Callable[[str], Path]) -> None:
    check_flips(copy(name), number, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tar", "memmap", "restarts", "classes"])
def test_many_single_flipped_bytes(name: str, copy: Callable[[str], Path]) -> None:
    check_flips(copy(name), 400, seed=2)


@pytest.mark.slow
def test_every_fifth_byte_of_a_shard(copy: Callable[[str], Path]) -> None:
    root = copy("classes")
    name = "train/shard-000002.tar"
    parts = Part(root)
    for offset in range(0, (root / name).stat().st_size, 5):
        change_byte(root / name, offset, 1)
        found = errors(root)
        change_byte(root / name, offset, 1)
        assert name in {p.path for p in found}, offset
        sample = parts.at(name, offset)
        assert {p.sample for p in found if p.sample is not None} == ({sample[0]} if sample else set()), offset


class TestWholeFiles:
    @pytest.mark.parametrize("name", ["tar", "memmap", "classes"])
    def test_each_file_missing(self, name: str, copy: Callable[[str], Path]) -> None:
        root = copy(name)
        for path in covered(root):
            moved = root.parent / "moved"
            (root / path).rename(moved)
            found = errors(root)
            moved.rename(root / path)
            assert path in {p.path for p in found}, path
            assert found[0].code in ("missing-file", "bad-manifest"), path

    @pytest.mark.parametrize("name", ["tar", "memmap", "classes"])
    @pytest.mark.parametrize("quick", [False, True])
    def test_each_file_cut_short_or_longer(self, name: str, quick: bool, copy: Callable[[str], Path]) -> None:
        root = copy(name)
        for path in covered(root):
            data = (root / path).read_bytes()
            for changed in (data[:-1], data[: len(data) // 2], b"", data + b"\0"):
                if changed == data:
                    continue
                (root / path).write_bytes(changed)
                assert path in {p.path for p in errors(root, quick=quick)}, (path, len(changed), len(data))
            (root / path).write_bytes(data)

    @pytest.mark.parametrize("quick", [False, True])
    @pytest.mark.parametrize("name", ["tar", "memmap"])
    def test_two_shards_swapped(self, name: str, quick: bool, copy: Callable[[str], Path]) -> None:
        root = copy(name)
        a, b = (root / "train" / f"shard-{i:06d}{'.tar' if name == 'tar' else ''}" for i in (0, 1))
        a.rename(root / "x")
        b.rename(a)
        (root / "x").rename(b)
        named = {p.path for p in errors(root, quick=quick)}
        for shard in (a, b):
            assert any(path.startswith(shard.relative_to(root).as_posix()) for path in named)

    def test_cut_at_a_sample(self, copy: Callable[[str], Path]) -> None:
        """A whole sample less, with proper end blocks: every tar reader is content."""
        root = copy("tar")
        path = root / "train/shard-000000.tar"
        start = int(np.fromfile(f"{path}.idx", "<u8")[-2])
        path.write_bytes(path.read_bytes()[:start] + bytes(1024))
        codes = {(p.code, p.path) for p in errors(root)}
        assert {("wrong-size", "train/shard-000000.tar"), ("wrong-count", "train/shard-000000.tar")} <= codes

    @pytest.mark.parametrize(
        ("name", "make", "code"),
        [
            ("tar", "train/shard-000009.tar", "unknown-shard"),
            ("tar", "val/x.tar", "unknown-shard"),
            ("tar", "train/shard-000009/image.npy", "unknown-shard"),
            ("memmap", "train/shard-000009/image.npy", "unknown-shard"),
            ("memmap", "train/shard-000000/extra.npy", "unknown-shard"),
            ("memmap", "train/x.tar", "unknown-shard"),
        ],
    )
    def test_what_passes_for_a_shard_is_a_problem(self, name: str, make: str, code: str, copy: Callable[[str], Path]) -> None:
        root = copy(name)
        (root / make).parent.mkdir(exist_ok=True)
        shutil.copy(next(p for p in (root / "train").rglob("*") if p.is_file()), root / make)
        assert [(p.code, p.path) for p in errors(root)] == [(code, make)]

    def test_linked_or_empty_shard_folder_is_a_problem(self, copy: Callable[[str], Path]) -> None:
        root = copy("memmap")
        (root / "train" / "shard-000007").symlink_to("shard-000000")
        (root / "train" / "shard-000008").mkdir()
        (root / "elsewhere").symlink_to("/")
        assert [(p.code, p.level, p.path) for p in problems(root)] == [
            ("unknown-file", "warning", "elsewhere"),
            ("unknown-shard", "error", "train/shard-000007"),
            ("unknown-shard", "error", "train/shard-000008"),
        ]

    @pytest.mark.parametrize("name", ["train/shard-000000.tar", "manifest.json", "findings.jsonl", "index/train/samples.npy"])
    def test_pipe_or_folder_in_a_files_place(self, name: str, copy: Callable[[str], Path]) -> None:
        root = copy("tar")
        (root / name).unlink()
        os.mkfifo(root / name)
        assert name in {p.path for p in errors(root)}
        (root / name).unlink()
        (root / name).mkdir()
        assert name in {p.path for p in errors(root)}


class TestWayOut:
    """What the message says to do about a manifest that is of no use."""

    def said(self, root: Path) -> str:
        [found] = errors(root)
        assert (found.code, found.path) == ("bad-manifest", "manifest.json")
        return found.message

    def test_damaged(self, copy: Callable[[str], Path]) -> None:
        root = copy("tar")
        change_byte(root / "manifest.json", 100, 1)
        assert self.said(root).endswith("; bring the file back, or pack build --overwrite packs all of it anew")

    def test_lost(self, copy: Callable[[str], Path]) -> None:
        root = copy("tar")
        (root / "manifest.json").unlink()
        assert self.said(root).endswith("; bring the file back, or move the folder away and let pack build pack all of it anew")

    def test_unfinished(self, tmp_path: Path) -> None:
        open_partial(tmp_path)
        assert self.said(tmp_path).endswith("; the same pack build command again goes on from there")
        shutil.rmtree(tmp_path / ".partial")
        assert "again" not in self.said(tmp_path)

    def test_folder_in_a_files_place(self, copy: Callable[[str], Path]) -> None:
        root = copy("tar")
        (root / "findings.jsonl").unlink()
        (root / "findings.jsonl").mkdir()
        [found] = errors(root)
        assert found.path == "findings.jsonl"
        assert found.message == "is a folder where a file belongs; move it away, then the same pack build command again restores the file"


class TestQuick:
    @pytest.mark.parametrize("name", ["tar", "memmap"])
    def test_passes_over_changed_content(self, name: str, copy: Callable[[str], Path]) -> None:
        root = copy(name)
        path = root / ("train/shard-000000.tar" if name == "tar" else "train/shard-000000/image.npy")
        change_byte(path, 700, 1)
        assert errors(root, quick=True) == []
        assert errors(root) != []

    def test_sees_headers_index_and_end(self, copy: Callable[[str], Path]) -> None:
        root = copy("tar")
        path = root / "train/shard-000000.tar"
        change_byte(path, 3, 1)
        [found] = errors(root, quick=True)
        assert found.message.startswith("no header of the image part where the index says")
        change_byte(path, 3, 1)
        assert found.sample == Part(root).samples["train/shard-000000.tar"][0][2]
        change_byte(path, path.stat().st_size - 1, 1)
        [found] = errors(root, quick=True)
        assert found.message.startswith("does not end with two zero blocks")

    def test_sees_an_index_that_disagrees(self, copy: Callable[[str], Path]) -> None:
        root = copy("memmap")
        keys = np.load(root / "train/shard-000000/key.npy", allow_pickle=False)
        np.save(root / "train/shard-000000/key.npy", keys + 1)
        assert {(p.code, p.path) for p in errors(root, quick=True)} == {("index-differs", "train/shard-000000")}


class TestResigned:
    """Manifests whose own checksum is right: damage that only the comparison of shard, index and manifest can show."""

    def changed(self, root: Path, change: Callable[[dict[str, Any]], None]) -> list[Problem]:
        raw = read_json(root)
        change(raw)
        sign_manifest(root, raw)
        return errors(root)

    def test_shard_counts_shifted(self, copy: Callable[[str], Path]) -> None:
        def change(raw: dict[str, Any]) -> None:
            raw["splits"]["train"]["shards"][0]["num_samples"] += 1
            raw["splits"]["train"]["shards"][1]["num_samples"] -= 1

        for name in ("tar", "memmap"):
            assert {p.code for p in self.changed(copy(name), change)} == {"wrong-count"}

    @pytest.mark.parametrize("count", [0, 2**40, 2**61])
    @pytest.mark.parametrize("name", ["tar", "memmap"])
    def test_counts_that_are_not_there(self, name: str, count: int, copy: Callable[[str], Path]) -> None:
        def change(raw: dict[str, Any]) -> None:
            train = raw["splits"]["train"]
            train["shards"][0]["num_samples"] = count
            train["num_samples"] = sum(s["num_samples"] for s in train["shards"])

        codes = {p.code for p in self.changed(copy(name), change)}
        assert {"bad-index", "wrong-count"} <= codes

    @pytest.mark.parametrize("size", [0, 2**61])
    def test_sizes_that_are_not_there(self, size: int, copy: Callable[[str], Path]) -> None:
        def change(raw: dict[str, Any]) -> None:
            raw["splits"]["train"]["shards"][0]["num_bytes"] = size

        assert ("wrong-size", "train/shard-000000.tar") in {(p.code, p.path) for p in self.changed(copy("tar"), change)}

    def test_shard_left_out(self, copy: Callable[[str], Path]) -> None:
        def change(raw: dict[str, Any]) -> None:
            train = raw["splits"]["train"]
            train["num_samples"] -= train["shards"].pop()["num_samples"]

        assert {"bad-index", "unknown-shard"} <= {p.code for p in self.changed(copy("tar"), change)}

    def test_index_derived_from_other_labels(self, copy: Callable[[str], Path]) -> None:
        root = copy("tar")
        path = root / "index/train/labels.npy"
        labels = np.load(path, allow_pickle=False)
        labels[0] = (labels[0] + 1) % 4
        np.save(path, labels)

        def change(raw: dict[str, Any]) -> None:
            raw["files"]["index/train/labels.npy"]["sha256"] = sha256_file(path)

        [found] = self.changed(root, change)
        assert (found.code, found.path) == ("index-differs", "train/shard-000000.tar")
        assert "labels differ" in found.message
        assert found.sample is not None

    @pytest.mark.parametrize("name", ["tar", "memmap", "classes"])
    def test_class_ids_without_a_name(self, name: str, copy: Callable[[str], Path]) -> None:
        found = self.changed(copy(name), lambda raw: raw["classes"].pop())
        array = "samples" if name == "classes" else "labels"
        assert {(p.code, p.path) for p in found} <= {("bad-index", f"index/{split}/{array}.npy") for split in ("train", "val")}
        assert found
        assert re.search(r"class ids \d to \d, the manifest names \d classes", found[0].message)

    @pytest.mark.parametrize("level", ["error", "skip", "warning"])
    def test_numbers_of_findings(self, level: str, copy: Callable[[str], Path]) -> None:
        def change(raw: dict[str, Any]) -> None:
            raw["findings"][level] += 1

        [found] = self.changed(copy("tar"), change)
        assert (found.code, found.path) == ("wrong-count", "findings.jsonl")
        assert f"findings of level {level}, the manifest says" in found.message

    @pytest.mark.parametrize(
        "line", [b"x\n", b"[]\n", b'{"code": "x"}\n', b'{"level": "fatal"}\n', b'{"level": []}\n', b"[" * 5000, b"\xff\n"]
    )
    def test_findings_that_are_none(self, line: bytes, copy: Callable[[str], Path]) -> None:
        root = copy("tar")
        (root / "findings.jsonl").write_bytes(line)
        resign(root, "findings.jsonl")
        [found] = errors(root)
        assert (found.code, found.path) == ("wrong-count", "findings.jsonl")
        assert found.message.startswith("line 1 is no finding: ")

    def test_shard_size_that_is_not_the_sum_of_its_files(self, copy: Callable[[str], Path]) -> None:
        def change(raw: dict[str, Any]) -> None:
            raw["splits"]["train"]["shards"][1]["num_bytes"] += 1

        [found] = self.changed(copy("memmap"), change)
        assert (found.code, found.path) == ("bad-manifest", "manifest.json")
        assert "num_bytes of shard train/shard-000001 is" in found.message

    @pytest.mark.parametrize("path", ["findings.jsonl", "index/val/samples.npy", "train/shard-000001.tar.idx"])
    def test_files_that_nothing_vouches_for(self, path: str, copy: Callable[[str], Path]) -> None:
        found = self.changed(copy("tar"), lambda raw: raw["files"].pop(path))
        assert ("bad-manifest", "manifest.json", f"files does not list {path}") in {(p.code, p.path, p.message) for p in found}

    @pytest.mark.parametrize(
        "value", [None, True, -1, 2**70, 1.5, "x", "../../etc/passwd", "/etc/passwd", "\ud800", [], [[]], {}, {"a": 1}]
    )
    def test_any_value_anywhere(self, value: Any, copy: Callable[[str], Path]) -> None:
        """One leaf or branch of the manifest is replaced, in turn."""
        root = copy("memmap")
        whole = read_json(root)

        def places(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
            if path:
                yield path
            if len(path) < 5:
                below = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
                for key, child in below:
                    yield from places(child, (*path, key))

        chosen = [p for p in places(whole) if p[0] != "self_sha256"]
        random.Random(repr(value)).shuffle(chosen)
        for path in chosen[:25]:
            raw = json.loads(json.dumps(whole))
            node = raw
            for key in path[:-1]:
                node = node[key]
            node[path[-1]] = value
            sign_manifest(root, raw)
            for quick in (True, False):
                assert all(isinstance(p.message, str) for p in problems(root, quick=quick))


class TestHostile:
    @pytest.mark.parametrize(
        "data",
        [
            b"",
            b"\xff\xfe\x00",
            b"null",
            b"[]",
            b"3",
            b'"x"',
            b"{}",
            b'{"format_version": 2}',
            b'{"format_version": 1}',
            b'{"format_version": true}',
            b'{"format_version": ' + b"9" * 5000 + b"}",
            b"[" * 100_000,
            b'{"a":' * 100_000,
            b'{"format_version": 1, "source": {"options": ' + b'{"a":' * 900 + b"1" + b"}" * 902,
            b'{"format_version": 1, "x": "\\ud800"}',
            b'{"format_version": 1, "x": NaN}',
            b'{"format_version": "' + b"y" * 10**6 + b'"}',
        ],
    )
    def test_manifest(self, data: bytes, copy: Callable[[str], Path]) -> None:
        root = copy("tar")
        (root / "manifest.json").write_bytes(data)
        [found] = problems(root)
        assert (found.level, found.code, found.path) == ("error", "bad-manifest", "manifest.json")
        assert len(found.message) < 4000

    def test_huge_manifest_is_not_read(self, copy: Callable[[str], Path]) -> None:
        root = copy("tar")
        os.truncate(root / "manifest.json", 1 << 40)
        [found] = problems(root)
        assert "a manifest has at most" in found.message

    @pytest.mark.parametrize(
        "header",
        [
            b"",
            b"\x93NUMPY",
            b"\x93NUMPY\x01\x00\x10\x00" + b"{'descr': '<i8',",
            b"\x93NUMPY\x01\x00\x40\x00" + b"{'descr': '|O', 'fortran_order': False, 'shape': (3,)}".ljust(63) + b"\n",
            b"\x93NUMPY\x01\x00\x50\x00" + b"{'descr': '<i8', 'fortran_order': False, 'shape': (1125899906842624,)}".ljust(79) + b"\n",
            b"\x93NUMPY\x01\x00\x50\x00" + b"{'descr': '<i8', 'fortran_order': False, 'shape': ()}".ljust(79) + b"\n" + bytes(8),
            b"\x93NUMPY\x01\x00\x50\x00" + b"{'descr': '<i8', 'fortran_order': False, 'shape': (-3,)}".ljust(79) + b"\n" + bytes(8),
            b"\x93NUMPY\x01\x00\x50\x00" + b"{'descr': '|S0', 'fortran_order': False, 'shape': (1152921504606846976,)}".ljust(79) + b"\n",
            b"\x93NUMPY\x03\x00\xff\xff\xff\xff" + b"(" * 300,
            b"PK\x03\x04" + bytes(100),
            b"\x80\x04\x95 cos\nsystem\n",
        ],
    )
    @pytest.mark.parametrize("name", ["index/train/samples.npy", "index/train/box_offsets.npy", "train/shard-000000/key.npy"])
    def test_arrays_with_matching_checksums(self, name: str, header: bytes, copy: Callable[[str], Path]) -> None:
        root = copy("memmap")
        (root / name).write_bytes(header)
        resign(root, name)
        found = errors(root)
        assert found
        assert any(p.path in name or name in p.message for p in found)

    def test_arrays_of_hostile_numbers(self, copy: Callable[[str], Path]) -> None:
        for name in ("tar", "memmap"):
            root = copy(name)
            for path in sorted(root.glob("index/train/*.npy")):
                data = path.read_bytes()
                array = np.load(path, allow_pickle=False)
                for fill in (0x00, 0xFF, 0x7F):
                    hostile = np.frombuffer(bytes([fill]) * array.nbytes, array.dtype).reshape(array.shape)
                    np.save(path, hostile)
                    resign(root, path.relative_to(root).as_posix())
                    if not np.array_equal(hostile, array):
                        assert errors(root), (path, fill)
                path.write_bytes(data)
                resign(root, path.relative_to(root).as_posix())
            assert problems(root) == []

    def test_shards_of_hostile_numbers(self, copy: Callable[[str], Path]) -> None:
        root = copy("memmap")
        for path in sorted(root.glob("train/shard-000000/*.npy")):
            if path.name in ("image.npy", "source.npy", "affine.npy", "original_size.npy"):
                continue
            array = np.load(path, allow_pickle=False)
            for fill in (0xFF, 0x7F):
                np.save(path, np.frombuffer(bytes([fill]) * array.nbytes, array.dtype).reshape(array.shape))
                resign(root, path.relative_to(root).as_posix())
                assert errors(root), (path, fill)
            np.save(path, array)
            resign(root, path.relative_to(root).as_posix())

    @pytest.mark.parametrize(
        "size_field", [b"-0000000001", b"77777777777", b"0000000_012", b"           ", b"00000000x12", b"\x80" + bytes(10)]
    )
    def test_tar_headers_with_a_matching_checksum(self, size_field: bytes, copy: Callable[[str], Path]) -> None:
        root = copy("tar")
        path = root / "train/shard-000000.tar"
        data = bytearray(path.read_bytes())
        data[124:135] = size_field
        data[148:156] = b" " * 8
        data[148:156] = b"%06o\0 " % sum(data[:512])
        path.write_bytes(data)
        resign(root, "train/shard-000000.tar")
        found = errors(root)
        assert ("bad-structure", "train/shard-000000.tar") in {(p.code, p.path) for p in found}

    @pytest.mark.parametrize(
        "meta",
        [b"{}", b"null", b"[1]", b"{" * 300, b"\xff", b'{"source": 5}', b'{"boxes": "x"}', b"NaN", b'{"source": ' + b"9" * 4400 + b"}"],
    )
    def test_json_parts_with_matching_checksums(self, meta: bytes, copy: Callable[[str], Path]) -> None:
        root = copy("tar")
        path = root / "train/shard-000000.tar"
        with tarfile.open(path) as tar:
            members = [(m.name, tar.extractfile(m).read()) for m in tar]  # type: ignore[union-attr]
        from packer.writers.tar import END, member_header, padding

        data, changed = b"", False
        for name, part in members:
            if name.endswith(".json") and not changed:
                part, changed = meta, True
            data += member_header(name, len(part)) + part + bytes(padding(len(part)))
        path.write_bytes(data + END)
        resign(root, "train/shard-000000.tar")
        key = int(members[0][0].partition(".")[0])
        found = errors(root)
        assert ("bad-sample", key) in {(p.code, p.sample) for p in found}


def resign(root: Path, name: str) -> None:
    """Let the manifest agree with the bytes of one file."""
    raw = read_json(root)
    entry = {"num_bytes": (root / name).stat().st_size, "sha256": sha256_file(root / name)}
    if name in raw["files"]:
        raw["files"][name] = entry
    for split in raw["splits"].values():
        for shard in split["shards"]:
            if shard["path"] == name:
                shard |= entry
            elif name.startswith(shard["path"] + "/"):
                shard["files"][name.rpartition("/")[2]] = entry
                shard["num_bytes"] = sum(file["num_bytes"] for file in shard["files"].values())
    sign_manifest(root, raw)


class TestReport:
    def test_no_folder_and_no_data_set(self, tmp_path: Path) -> None:
        with pytest.raises(PackError, match="nothing: no such folder"):
            problems(tmp_path / "nothing")
        [found] = problems(tmp_path)
        assert "the folder holds no finished packed data set (an interrupted build has none)" in found.message

    def test_json(self) -> None:
        found = [Problem("warning", "a", "p", "m"), Problem("error", "b", "q", "n", 7, "images/x.jpg")]
        assert as_json(found) == {
            "ok": False,
            "problems": [
                {"level": "warning", "code": "a", "path": "p", "sample": None, "source": None, "message": "m"},
                {"level": "error", "code": "b", "path": "q", "sample": 7, "source": "images/x.jpg", "message": "n"},
            ],
        }
        assert as_json(found[:1])["ok"] is True

    def test_line(self) -> None:
        assert as_line(Problem("error", "b", "q", "n\x1b[0m", 7, "x\ny.jpg")) == r"error: q sample 000000007 (x\ny.jpg): n\x1b[0m (b)"

    def test_command(self, copy: Callable[[str], Path]) -> None:
        root = copy("tar")
        done = pack("verify", root, "--json")
        assert (done.returncode, json.loads(done.stdout)) == (0, {"ok": True, "problems": []})
        path = root / "train/shard-000000.tar"
        offset = int(np.fromfile(f"{path}.idx", "<u8")[0]) + 600
        change_byte(path, offset, 8)
        key, source = Part(root).at("train/shard-000000.tar", offset) or (0, "")
        done = pack("verify", root)
        assert done.returncode == 1
        assert f"error: train/shard-000000.tar sample {key:09d} ({source}): " in done.stderr
        assert f"error: {root}: " in done.stderr.splitlines()[-1]
        assert done.stdout == ""


def test_bad_manifest_is_a_format_error_for_readers(packed: dict[str, Path], tmp_path: Path) -> None:
    from loaders.format import read_manifest

    with pytest.raises(FormatError):
        read_manifest(tmp_path)
    assert read_manifest(packed["tar"]).task == "detection"


def test_a_cut_shard_is_few_lines_and_all_of_its_samples_in_json(tmp_path: Path) -> None:
    for i in range(25):
        save(tmp_path / "src/crack" / f"{i:02d}.png", picture(8, 8, i))
    assert run_build(tmp_path / "src", tmp_path / "out").ok
    (shard,) = (tmp_path / "out/train").glob("*.tar")
    os.truncate(shard, 10)
    found = errors(tmp_path / "out")
    assert {p.path for p in found} == {f"train/{shard.name}"}
    damaged = [p for p in found if p.code == "damaged-sample"]
    assert sorted(p.sample for p in damaged if p.sample is not None) == list(range(25))
    lines = list(as_lines(found))
    assert len(lines) == len(found) - 24 < 6
    (line,) = [line for line in lines if "damaged-sample" in line]
    assert line == f"{as_line(damaged[0])}, and 24 more in this file: --json names all"
    assert list(as_lines(damaged[:5])) == [as_line(p) for p in damaged[:5]]


def test_a_file_is_not_called_a_folder_that_is_missing(tmp_path: Path) -> None:
    (tmp_path / "x.tar").write_bytes(b"")
    with pytest.raises(PackError, match=r"x\.tar: is a file, expected the folder of a packed data set"):
        problems(tmp_path / "x.tar")
