"""Building: the bytes depend on source and options alone, nothing is lost in silence, and work that was done is kept."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from build_data import Recorder, change_byte, differences, pack, run_build, stamps, tree
from conftest import picture, save
from loaders.format import open_index, read_manifest
from packer import build as build_module
from packer import work
from packer.build import allowed_skips, check
from packer.job import Job
from packer.outdir import locked
from packer.recipe import load_recipe
from packer.sample import Item, PackError, UsageError

TAR = {"output": {"shard_samples": 4}}
MEMMAP = {"output": {"shard_samples": 4, "format": "memmap"}, "transform": {"resize": "32x24"}}
SKIP = {"on_error": "skip"}


class Backwards:
    """An engine that runs the last task first and reports nothing on the way."""

    def map(self, function: Any, context: Any, tasks: Sequence[Any], *, describe: Any, on_progress: Any) -> Iterator[tuple[int, Any]]:
        del describe, on_progress
        for number in reversed(range(len(tasks))):
            yield number, function(context, tasks[number], lambda _: None)


@pytest.mark.parametrize("tables", [TAR, MEMMAP], ids=["tar", "memmap"])
def test_bytes_depend_on_no_engine(
    tables: dict[str, Any], make_voc: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    src = make_voc(14)
    for workers in (1, 2, 3):
        assert run_build(src, tmp_path / str(workers), **tables, run={"workers": workers}).ok
    monkeypatch.setattr(build_module, "open_engine", lambda *_: Backwards())
    assert run_build(src, tmp_path / "backwards", **tables).ok
    expected = tree(tmp_path / "1")
    assert len([name for name in expected if name.startswith("train/shard-")]) > 3
    for other in ("2", "3", "backwards"):
        assert differences(tree(tmp_path / other), expected) == []


def test_source_is_left_alone(make_voc: Callable[..., Path], tmp_path: Path) -> None:
    src = make_voc(6)
    before, stamped = tree(src), stamps(src)
    assert run_build(src, tmp_path / "out").ok
    check(src, load_recipe(None, {}), Recorder())
    assert tree(src) == before
    assert stamps(src) == stamped


def test_outcome_progress_and_sums(make_voc: Callable[..., Path], tmp_path: Path) -> None:
    src = make_voc(10)
    (src / "notes.txt").write_text("x")
    (src / ".hidden").write_text("x")
    console = Recorder()
    outcome = run_build(src, tmp_path / "out", console, **TAR)
    assert (outcome.ok, outcome.message, outcome.num_samples, outcome.num_skipped) == (True, "", 10, 0)
    assert console.passed["packing"] == (10, 10)
    # 10 pictures, 10 XML, the split file, notes.txt and the hidden file
    sums = [line for line in console.said if line.startswith("files: ")]
    assert sums == [
        "files: 23 = 10 pictures fit to pack + 0 left out + 11 annotation files + 1 others named in findings; "
        "1 hidden or system files ignored"
    ]
    assert len(console.findings) == 1
    assert "notes.txt" in console.findings[0]


def broken(make_voc: Callable[..., Path], n: int = 20) -> Path:
    """A VOC set whose picture 7 (in train) is cut short and whose picture 13 (in val) has no XML."""
    src = make_voc(n)
    path = src / "images" / "weld_0007.jpg"
    path.write_bytes(path.read_bytes()[:-300])
    (src / "annotations" / "weld_0013.xml").unlink()
    return src


def test_fail_publishes_nothing_and_skip_goes_on_from_there(make_voc: Callable[..., Path], tmp_path: Path) -> None:
    src, out = broken(make_voc), tmp_path / "out"
    outcome = run_build(src, out, **TAR)
    assert not outcome.ok
    assert outcome.message == (
        "2 of 20 pictures cannot be packed; --on-error skip would leave them out and pack 18; "
        f"nothing was published, all findings are in {out}/findings.jsonl"
    )
    assert sorted(p.name for p in out.iterdir()) == [".partial", "findings.jsonl"]
    found = [json.loads(line) for line in (out / "findings.jsonl").read_text().splitlines()]
    assert {f["sample"] for f in found if f["level"] == "skip"} == {"images/weld_0007.jpg", "images/weld_0013.jpg"}

    console = Recorder()
    outcome = run_build(src, out, console, **TAR, run=SKIP)
    assert (outcome.ok, outcome.num_samples, outcome.num_skipped) == (True, 18, 2)
    assert "5 of 5 shards were already there from an earlier run" in console.said  # 12 train, 4 val, 4 test
    assert run_build(src, tmp_path / "at once", **TAR, run=SKIP).ok
    assert differences(tree(out), tree(tmp_path / "at once")) == []
    manifest = read_manifest(out)
    assert manifest.findings.skip == 2
    keys = np.concatenate([open_index(out, manifest, s).samples["key"] for s in manifest.splits])
    assert sorted(keys) == [k for k in range(20) if k not in (7, 13)]


def test_mended_picture_redoes_its_job_only(make_voc: Callable[..., Path], tmp_path: Path) -> None:
    src, out = broken(make_voc), tmp_path / "out"
    (src / "annotations" / "weld_0013.xml").write_text((src / "annotations" / "weld_0003.xml").read_text())
    assert not run_build(src, out, **TAR).ok
    save(src / "images" / "weld_0007.jpg", picture(80, 60, 7))
    console = Recorder()
    assert run_build(src, out, console, **TAR).ok
    assert "4 of 5 shards were already there from an earlier run" in console.said
    assert run_build(src, tmp_path / "at once", **TAR).ok
    assert differences(tree(out), tree(tmp_path / "at once")) == []


def garble(path: Path, how: str) -> None:
    data = path.read_bytes()
    if how == "truncated":
        path.write_bytes(data[: len(data) // 2])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "deleted":
        path.unlink()
    elif how == "swapped":
        path.write_bytes(data[::-1])
    else:
        for offset in range(0, len(data), max(len(data) // 40, 1)):
            change_byte(path, offset, 0x55)


@pytest.mark.parametrize("how", ["truncated", "empty", "deleted", "swapped", "flipped"])
@pytest.mark.parametrize("tables", [TAR, MEMMAP], ids=["tar", "memmap"])
def test_damaged_partial_files_are_made_again(how: str, tables: dict[str, Any], make_voc: Callable[..., Path], tmp_path: Path) -> None:
    src, out = broken(make_voc, 15), tmp_path / "out"
    assert not run_build(src, out, **tables).ok
    files = sorted(p for p in (out / ".partial").rglob("*") if p.is_file())
    records = [p for p in files if p.suffix == ".record"]
    assert len(records) == 5
    garble(records[1], how)
    of_another_job = [p for p in files if p.suffix != ".record" and records[2].stem in str(p)]
    garble(of_another_job[0], how)
    console = Recorder()
    assert run_build(src, out, console, **tables, run=SKIP).ok
    assert "3 of 5 shards were already there from an earlier run" in console.said
    assert run_build(src, tmp_path / "at once", **tables, run=SKIP).ok
    assert differences(tree(out), tree(tmp_path / "at once")) == []


@pytest.mark.parametrize("offset", range(0, 1400, 97))
def test_any_flipped_byte_of_a_record_is_harmless(offset: int, make_folder: Callable[..., Path], tmp_path: Path) -> None:
    src, out = make_folder(4), tmp_path / "out"
    (src / "slag" / "bad.jpg").write_bytes(b"no picture")
    assert not run_build(src, out).ok
    [record] = (out / ".partial").glob("*.record")
    change_byte(record, offset, 0xFF)
    assert run_build(src, out, run=SKIP).ok
    assert run_build(src, tmp_path / "at once", run=SKIP).ok
    assert differences(tree(out), tree(tmp_path / "at once")) == []


@pytest.mark.parametrize(
    ("limit", "ok", "said"),
    [
        (2, True, ""),
        (1, False, "2 of 20 pictures would be left out, --max-skip allows 1"),
        ("10%", True, ""),
        ("9.5%", False, "2 of 20 pictures would be left out, --max-skip allows 9.5%"),
        (0, False, "--max-skip allows 0"),
    ],
)
def test_max_skip(limit: int | str, ok: bool, said: str, make_voc: Callable[..., Path], tmp_path: Path) -> None:
    outcome = run_build(broken(make_voc), tmp_path / "out", **TAR, run={**SKIP, "max_skip": limit})
    assert outcome.ok == ok
    assert said in outcome.message
    assert (tmp_path / "out" / "manifest.json").exists() == ok


def test_allowed_skips_of_a_share_of_all() -> None:
    assert allowed_skips(0.25, 8) == 2
    assert allowed_skips(3, 8) == 3


def test_fault_of_the_whole_set_fails_under_skip_too(make_voc: Callable[..., Path], tmp_path: Path) -> None:
    src, out = make_voc(10), tmp_path / "out"
    with (src / "train_val_test_split.csv").open("a") as f:
        f.write("weld_0000,test\n")
    outcome = run_build(src, out, run=SKIP)
    assert not outcome.ok
    assert "the data set has faults that concern all of it (level error); nothing was published" in outcome.message
    assert not (out / "manifest.json").exists()
    assert "weld_0000" in (out / "findings.jsonl").read_text()


def test_nothing_left_to_pack(tmp_path: Path) -> None:
    (tmp_path / "src" / "a").mkdir(parents=True)
    (tmp_path / "src" / "a" / "x.jpg").write_bytes(b"\xff\xd8\xff no picture")
    outcome = run_build(tmp_path / "src", tmp_path / "out", run=SKIP)
    assert not outcome.ok
    assert outcome.message.startswith("nothing to pack: every picture was left out")
    checked = check(tmp_path / "src", load_recipe(None, {"run": SKIP}), Recorder())
    assert (checked.ok, checked.message) == (False, "nothing to pack: every picture was left out")


def test_split_shares_and_groups(tmp_path: Path) -> None:
    src, out = tmp_path / "src", tmp_path / "out"
    for i in range(60):
        save(src / ("crack", "slag")[i // 30] / f"seam{i // 5:02d}_{i:02d}.png", picture(16, 12, i))
    assert run_build(src, out, split={"train": "0.5", "val": "0.3", "test": "0.2", "group": r"seam\d+"}).ok
    manifest = read_manifest(out)
    assert {name: s.num_samples for name, s in manifest.splits.items()} == {"train": 30, "val": 20, "test": 10}
    assert manifest.output["split"] == {"train": 0.5, "val": 0.3, "test": 0.2, "group": r"seam\d+"}
    seams = {name: set(open_index(out, manifest, name).samples["key"] // 5) for name in manifest.splits}
    assert sum(map(len, seams.values())) == 12  # none in two splits
    for name in manifest.splits:
        labels = open_index(out, manifest, name).samples["label"]
        assert (labels == 0).sum() == (labels == 1).sum()


def test_source_splits_win_over_shares(make_voc: Callable[..., Path], tmp_path: Path) -> None:
    console = Recorder()
    src = make_voc(10)
    assert run_build(src, tmp_path / "a", console, split={"train": "1"}).ok
    assert "  the source says which split a picture is in; [split] is not used" in console.said
    assert run_build(src, tmp_path / "b").ok
    assert differences(tree(tmp_path / "a"), tree(tmp_path / "b")) == []


@pytest.mark.parametrize("tables", [{}, {"transform": {"resize": "32"}}, MEMMAP], ids=["keep", "resize", "memmap"])
def test_check_says_what_build_says_and_writes_nothing(tables: dict[str, Any], make_voc: Callable[..., Path], tmp_path: Path) -> None:
    src = broken(make_voc)
    (src / "images" / "weld_0001.jpg").write_bytes((src / "images" / "weld_0000.jpg").read_bytes())
    (src / "stray.txt").write_text("x")
    before, stamped = tree(tmp_path), stamps(tmp_path)
    checked = check(src, load_recipe(None, tables), Recorder())
    assert tree(tmp_path) == before
    assert stamps(tmp_path) == stamped
    built = run_build(src, tmp_path / "out", **tables)
    assert checked.findings is not None
    assert built.findings is not None
    assert list(checked.findings) == list(built.findings)
    assert {"truncated-image", "no-annotation"} & {f.code for f in checked.findings}
    assert (checked.num_samples, checked.num_skipped) == (built.num_samples, built.num_skipped)
    assert checked.message == built.message.partition("; nothing was published")[0]


def test_picture_that_changes_while_packing(make_folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    src, out = make_folder(6), tmp_path / "out"
    first = next((src / "crack").iterdir())
    run_job = work.run_job

    def meddling(*args: Any) -> Any:
        first.write_bytes(first.read_bytes() + b"\0")
        return run_job(*args)

    monkeypatch.setattr(work, "run_job", meddling)
    outcome = run_build(src, out, run=SKIP)
    assert not outcome.ok
    assert '"source-changed"' in (out / "findings.jsonl").read_text()
    monkeypatch.undo()
    assert run_build(src, out).ok
    assert run_build(src, tmp_path / "at once").ok
    assert differences(tree(out), tree(tmp_path / "at once")) == []


def meddle(monkeypatch: pytest.MonkeyPatch, change: Callable[[], object]) -> None:
    """Let `change` happen when everything is planned and packing begins."""
    run_job = work.run_job

    def meddling(*args: Any, **more: Any) -> Any:
        change()
        return run_job(*args, **more)

    monkeypatch.setattr(work, "run_job", meddling)


@pytest.mark.parametrize(("old", "new"), [("<name>crack<", "<name>other<"), ("<xmax>20<", "<xmax>21<")])
@pytest.mark.parametrize("classes", [None, ["crack", "incomplete_fusion", "porosity", "slag"]])
def test_xml_that_changes_while_packing(
    old: str, new: str, classes: list[str] | None, make_voc: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    src, out = make_voc(6), tmp_path / "out"
    path = src / "annotations" / "weld_0004.xml"
    assert old in path.read_text()
    meddle(monkeypatch, lambda: path.write_text(path.read_text().replace(old, new)))
    outcome = run_build(src, out, run=SKIP, source={"classes": classes} if classes else {})
    assert not outcome.ok
    found = [json.loads(line) for line in (out / "findings.jsonl").read_text().splitlines()]
    assert [(f["level"], f["code"], f["path"]) for f in found if f["level"] != "warning"] == [
        ("error", "source-changed", "annotations/weld_0004.xml")
    ]
    monkeypatch.undo()
    assert run_build(src, out).ok  # the same file as it is now is packed


@pytest.mark.parametrize("gone", [False, True])
def test_table_that_changes_while_packing(
    gone: bool, make_voc: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    src, out = make_voc(6), tmp_path / "out"
    path = src / "train_val_test_split.csv"
    meddle(monkeypatch, lambda: path.unlink(missing_ok=True) if gone else path.write_text(path.read_text().replace("val", "test")))
    assert not run_build(src, out, run=SKIP).ok
    [found] = [json.loads(line) for line in (out / "findings.jsonl").read_text().splitlines()]
    assert (found["level"], found["code"], found["path"]) == ("error", "source-changed", "train_val_test_split.csv")


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("moved", [False, True])
def test_output_that_goes_while_packing(
    moved: bool, workers: int, make_folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"

    def go(*_: Any) -> None:
        if moved:
            out.rename(tmp_path / "elsewhere")
        else:
            shutil.rmtree(out)

    make_plan = build_module.run_plan
    monkeypatch.setattr(build_module, "run_plan", lambda *args: (go(), make_plan(*args))[1])
    with pytest.raises(PackError, match=r"/out: is gone, .*removed or moved while the build ran; run the command again$"):
        run_build(make_folder(6), out, **TAR, run={"workers": workers})
    assert not out.exists()


@pytest.mark.parametrize("length", [251, 253, 255, 256])
def test_output_name_that_is_too_long(length: int, make_folder: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=rf"OUT's name .* has {length} bytes, at most 250 can be"):
        run_build(make_folder(3), tmp_path / ("o" * length))


@pytest.mark.parametrize("overwrite", [False, True])
def test_longest_output_name(overwrite: bool, make_folder: Callable[..., Path], tmp_path: Path) -> None:
    src, out = make_folder(3), tmp_path / ("o" * 250)
    assert run_build(src, out).ok
    assert run_build(src, out, overwrite=overwrite).ok


def with_lost_rows(root: Path) -> Path:
    rows = [f"pictures/w{i}.png,a" for i in range(4)] + [f"../w{i}.png,a" for i in range(3)] + ["pictures/gone.png,a"]
    for i in range(4):
        save(root / "pictures" / f"w{i}.png", picture(16, 12, i))
    (root / "labels.csv").write_text("filename,label\n" + "\n".join(rows) + "\n")
    return root


@pytest.mark.parametrize(("limit", "ok"), [(0, False), (3, False), (4, True), ("49%", False), ("50%", True), (None, True)])
def test_max_skip_counts_what_has_no_picture(limit: Any, ok: bool, tmp_path: Path) -> None:
    outcome = run_build(with_lost_rows(tmp_path / "src"), tmp_path / "out", run={**SKIP, "max_skip": limit})
    assert (outcome.ok, outcome.num_samples, outcome.num_skipped) == (ok, 4, 4)
    if not ok:
        said = "4 of 8 samples (0 pictures, and 4 missing, out of reach or badly named) would be left out, --max-skip allows"
        assert outcome.message.startswith(said)


def test_a_bad_name_counts_and_is_called_so(make_folder: Callable[..., Path], tmp_path: Path) -> None:
    src = make_folder(6)
    save(src / "slag" / "x.png", picture(16, 12, 1))
    os.rename(os.fsencode(src / "slag" / "x.png"), os.fsencode(src / "slag") + b"/x\xf3.png")
    said = "1 of 7 samples (0 pictures, and 1 missing, out of reach or badly named)"
    outcome = run_build(src, tmp_path / "out")
    assert outcome.message.startswith(f"{said} cannot be packed; --on-error skip would leave them out and pack 6")
    outcome = run_build(src, tmp_path / "out", run={**SKIP, "max_skip": 0})
    assert outcome.message.startswith(f"{said} would be left out, --max-skip allows 0")


def test_a_task_at_its_end_names_its_shard() -> None:
    items = tuple(Item(name, None, 1, 1) for name in ("a.jpg", "b.jpg"))
    job = Job(3, "val", (0, 1), items)
    assert [work.describe_task(job, i) for i in range(3)] == ["a.jpg", "b.jpg", "the end of the val shard of a.jpg to b.jpg"]
    assert work.describe_task(work.Chunk(0, items), 2) == "the end of the part of a.jpg to b.jpg"


def test_internal_error_names_the_picture(make_folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    src = make_folder(6)

    def failing(*args: Any) -> None:
        args[-1](3)  # tick
        raise ValueError("odd")

    monkeypatch.setattr(work, "run_job", failing)
    where = r"internal error while working on (crack|porosity|slag)/p00\d\.jpg: ValueError: odd"
    with pytest.raises(PackError, match=where + "; set PACK_DEBUG=1 for details and report it$"):
        run_build(src, tmp_path / "out")
    monkeypatch.setenv("PACK_DEBUG", "1")
    with pytest.raises(PackError, match=where + r"\nTraceback (.|\n)*raise ValueError"):
        run_build(src, tmp_path / "out")


def test_one_build_at_a_time(make_folder: Callable[..., Path], tmp_path: Path) -> None:
    src, out = make_folder(3), tmp_path / "out"
    with locked(out):
        done = pack("build", src, out)
        assert done.returncode == 1
        assert done.stderr == f"error: {out}: another build is running there; wait for it, or choose another folder\n"
    assert run_build(src, out).ok


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 200 kB; only root can have one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k", "none", folder], capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize("workers", [1, 2])
def test_disk_full_is_told_and_resumed(workers: int, small_disk: Path, tmp_path: Path) -> None:
    src, out = tmp_path / "src", small_disk / "out"
    for i in range(24):
        noise = np.random.default_rng(i).integers(0, 256, (60, 60, 3), np.uint8)
        save(src / "a" / f"{i}.png", noise)  # 11 kB each
    total = sum(p.stat().st_size for p in (src / "a").iterdir())
    tables: dict[str, Any] = {"output": {"shard_samples": 3}}
    with pytest.raises(PackError, match=r"disk full") as caught:
        run_build(src, out, **tables, run={"workers": workers})
    words = str(caught.value).replace(",", "").split()
    needed = int(words[words.index("more") - 1])
    assert 40_000 < needed < total
    assert "free there; make room and run the same command again: finished shards are kept" in str(caught.value)
    assert not list((out / ".partial").glob("tmp-*")) or workers == 2
    kept = len([path for path in (out / ".partial").glob("*.record") if not path.name.startswith("tmp-")])
    assert kept >= 1
    subprocess.run(["mount", "-o", "remount,size=4m", small_disk], check=True)
    console = Recorder()
    assert run_build(src, out, console, **tables).ok
    assert f"{kept} of 8 shards were already there from an earlier run" in console.said
    assert run_build(src, tmp_path / "at once", **tables).ok
    assert differences(tree(out), tree(tmp_path / "at once")) == []


def test_no_inodes_left_is_told(small_disk: Path, make_folder: Callable[..., Path]) -> None:
    subprocess.run(["mount", "-o", "remount,size=4m,nr_inodes=12", small_disk], check=True)
    with pytest.raises(PackError, match=r"out of inodes: \d+ of 12 free there, .*run the same command again: finished shards are kept$"):
        run_build(make_folder(30), small_disk / "out", output={"shard_samples": 2})


def test_two_readings_agree(make_voc: Callable[..., Path], tmp_path: Path) -> None:
    """With the classes given no XML is scanned before; the packed data are the same."""
    src = make_voc(15)
    (tmp_path / "copy").mkdir()
    shutil.copytree(src, tmp_path / "copy" / "src")
    classes = {"classes": ["crack", "incomplete_fusion", "porosity", "slag"]}
    scanned, given = Recorder(), Recorder()
    assert run_build(src, tmp_path / "a", scanned).ok
    assert run_build(src, tmp_path / "b", given, source=classes).ok
    assert "reading annotations" in scanned.passed
    assert "reading annotations" not in given.passed
    assert differences(tree(tmp_path / "a"), tree(tmp_path / "b")) == []


def test_check_and_build_both_name_the_one_picture_of_another_size(make_folder: Callable[..., Path], tmp_path: Path) -> None:
    """It lies outside the survey, and alone in its shard."""
    src = make_folder(70)
    save(src / "slag" / "p002.jpg", picture(20, 20))
    tables: dict[str, Any] = {"output": {"format": "memmap", "shard_samples": 1}}
    built = run_build(src, tmp_path / "out", **tables)
    checked = check(src, load_recipe(None, tables), Recorder())
    for outcome in (built, checked):
        assert not outcome.ok
        assert outcome.findings is not None
        assert [f.code for f in outcome.findings] == ["sizes-differ"]
    assert not (tmp_path / "out" / "manifest.json").exists()
