"""Build on a complete data set: agreed, repaired byte for byte, or refused with the difference named."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from build_data import Recorder, change_byte, differences, pack, read_json, run_build, sign_manifest, stamps, tree
from conftest import picture, save
from packer.outdir import open_partial
from packer.sample import PackError

TAR = {"output": {"shard_samples": 4}}
MEMMAP = {"output": {"shard_samples": 4, "format": "memmap"}, "transform": {"resize": "32x24"}}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A class-folder set of 14 pictures, of which the first four (of class "bad", unshuffled a shard of their own) are broken."""
    root = tmp_path_factory.mktemp("restore")
    for i in range(10):
        save(root / "src" / ("crack", "slag")[i % 2] / f"{i}.png", picture(30, 20, i))
    for i in range(4):
        path = root / "src" / "bad" / f"{i}.png"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"no picture")
    return root


@pytest.fixture
def made(sources: Path, tmp_path: Path) -> Callable[[dict[str, Any]], tuple[Path, Path, dict[str, Any]]]:
    """Gives (source, a fresh copy of the packed set, its tables)."""

    def make(tables: dict[str, Any]) -> tuple[Path, Path, dict[str, Any]]:
        output: dict[str, Any] = {**tables["output"], "shuffle": False}
        whole: dict[str, Any] = {**tables, "output": output, "run": {"on_error": "skip"}}
        kept = sources / str(output.get("format", "tar"))
        if not kept.exists():
            assert run_build(sources / "src", kept, **whole).ok
        shutil.copytree(kept, tmp_path / "out")
        return sources / "src", tmp_path / "out", whole

    return make


Made = Callable[[dict[str, Any]], tuple[Path, Path, dict[str, Any]]]


@pytest.mark.parametrize("tables", [TAR, MEMMAP], ids=["tar", "memmap"])
def test_complete_data_set_is_left_alone(tables: dict[str, Any], made: Made) -> None:
    src, out, whole = made(tables)
    before, stamped = tree(out), stamps(out)
    console = Recorder()
    outcome = run_build(src, out, console, **whole)
    assert outcome.ok
    assert outcome.message == "already complete: 10 samples, every file as the manifest says"
    assert tree(out) == before
    assert stamps(out) == stamped
    assert "packing" not in console.passed


def test_how_the_work_is_done_makes_no_other_plan(made: Made) -> None:
    src, out, whole = made(TAR)
    for run in ({"on_error": "fail"}, {"max_skip": 0}, {"workers": 2}):
        assert run_build(src, out, **{**whole, "run": run}).message.startswith("already complete")


def test_end_says_so(made: Made) -> None:
    src, out, _ = made(TAR)
    done = pack("build", src, out, "--shard-samples", 4, "--no-shuffle", "--on-error", "skip")
    assert done.returncode == 0
    assert done.stderr.endswith("already complete: 10 samples, every file as the manifest says\n")


def files_of(out: Path) -> list[str]:
    return sorted(p.relative_to(out).as_posix() for p in out.rglob("*") if p.is_file() and p.name != "manifest.json")


FILES = {
    "tar": ["train/shard-000000.tar", "train/shard-000001.tar.idx", "train/shard-000002.tar", "index/train/samples.npy", "findings.jsonl"],
    "memmap": ["train/shard-000001/image.npy", "train/shard-000002/key.npy", "index/train/samples.npy", "README.md"],
}
CASES = [(layout, name, how) for layout, names in FILES.items() for name in names for how in ("changed", "truncated", "missing")]


@pytest.mark.parametrize(("layout", "name", "how"), CASES)
def test_damaged_file_comes_back(layout: str, name: str, how: str, made: Made) -> None:
    src, out, whole = made(TAR if layout == "tar" else MEMMAP)
    expected, untouched = tree(out), stamps(out)
    path = out / name
    assert name in files_of(out)
    if how == "changed":
        change_byte(path, path.stat().st_size // 2, 0x10)
    elif how == "truncated":
        os.truncate(path, path.stat().st_size - 1)
    else:
        path.unlink()
    console = Recorder()
    outcome = run_build(src, out, console, **whole)
    assert (outcome.ok, outcome.message) == (True, "restored 1 damaged or missing files, byte for byte")
    assert f"damaged or missing: {name}" in console.said
    assert differences(tree(out), expected) == []
    other = [p for p in untouched if p != str(path) and not Path(p).is_dir()]
    assert {p: stamps(out)[p] for p in other} == {p: untouched[p] for p in other}


@pytest.mark.parametrize("damaged", ["train/shard-000001.tar", "index/train/samples.npy", "README.md"])
def test_foreign_files_stay(damaged: str, made: Made) -> None:
    src, out, whole = made(TAR)
    mine = (
        "tmp-mine.txt",
        "tmp-notes/precious.txt",
        "tmp-1-mine",
        "index/tmp-x",
        "index/mine.txt",
        "train/shard-notes/n.txt",
        "train/tmp-1",
    )
    for name in mine:
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_text("mine")
    expected = tree(out)
    (out / damaged).unlink()
    assert run_build(src, out, **whole).message.startswith("restored 1 ")
    assert differences(tree(out), expected) == []


def test_one_shard_lost_costs_one_shard(made: Made) -> None:
    """The shard's number is not its job's: the first job packed nothing."""
    src, out, whole = made(TAR)
    expected = tree(out)
    (out / "train/shard-000001.tar").unlink()
    (out / "README.md").unlink()
    console = Recorder()
    assert run_build(src, out, console, **whole).message.startswith("restored 2 ")
    assert differences(tree(out), expected) == []
    assert console.passed["packing"] == (4, 4)


def test_card_alone_costs_no_packing(made: Made) -> None:
    src, out, whole = made(TAR)
    expected = tree(out)
    (out / "README.md").write_text("other")
    console = Recorder()
    assert run_build(src, out, console, **whole).ok
    assert differences(tree(out), expected) == []
    assert "packing" not in console.passed


@pytest.mark.parametrize("tables", [TAR, MEMMAP], ids=["tar", "memmap"])
def test_everything_but_the_manifest_lost(tables: dict[str, Any], made: Made) -> None:
    src, out, whole = made(tables)
    expected = tree(out)
    for path in out.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != "manifest.json":
            path.unlink()
    assert run_build(src, out, **whole).ok
    assert differences(tree(out), expected) == []


def test_left_over_partial_folder_is_cleaned_away(made: Made) -> None:
    src, out, whole = made(TAR)
    expected = tree(out)
    (open_partial(out) / "old.record").write_bytes(b"x")
    (out / "tmp-17-README.md").write_bytes(b"x")
    assert run_build(src, out, **whole).message.startswith("already complete")
    assert differences(tree(out), expected) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"output": {"seed": 3}}, "output seed: was 0, is now 3"),
        ({"output": {"shard_samples": 5}}, "output shard_samples: was 4, is now 5"),
        ({"output": {"format": "memmap"}, "transform": {"resize": "8x8"}}, "format: was tar, is now memmap"),
        ({"transform": {"resize": "8"}}, "transform: was None, is now {"),
        ({"source": {"classes": ["slag", "crack", "bad"]}}, "classes: was ['bad', 'crack', 'slag'], is now ['slag', 'crack', 'bad']"),
        ({"source": {"exif": "ignore"}}, "source options: was {}, is now {'exif': 'ignore'}"),
        ({"split": {"train": "1"}}, "output split: was not given, is now {'train': 1.0}"),
    ],
)
def test_other_plan_is_refused(changes: dict[str, Any], said: str, made: Made) -> None:
    src, out, whole = made(TAR)
    before = tree(out)
    tables = {t: {**whole.get(t, {}), **changes.get(t, {})} for t in whole.keys() | changes.keys()}
    with pytest.raises(PackError) as caught:
        run_build(src, out, **tables)
    assert "holds a finished data set made by another plan:\n  " in str(caught.value)
    assert said in str(caught.value)
    assert str(caught.value).endswith("choose another OUT, or --overwrite")
    assert tree(out) == before


@pytest.mark.parametrize("change", ["pixel", "added", "removed", "renamed"])
def test_other_source_is_refused(change: str, made: Made, tmp_path: Path) -> None:
    src, out, whole = made(TAR)
    shutil.copytree(src, tmp_path / "src")
    src, before = tmp_path / "src", tree(out)
    path = src / "crack" / "4.png"
    if change == "pixel":
        stat = path.stat()
        save(path, picture(30, 20, 99))
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    elif change == "added":
        save(src / "slag" / "new.png", picture(30, 20, 50))
    elif change == "removed":
        path.unlink()
    else:
        path.rename(src / "crack" / "four.png")
    with pytest.raises(PackError, match="source: pictures or annotations were added, removed or changed since"):
        run_build(src, out, **whole)
    assert tree(out) == before


def test_touched_source_is_the_same_source(made: Made, tmp_path: Path) -> None:
    src, out, whole = made(TAR)
    shutil.copytree(src, tmp_path / "src")
    os.utime(tmp_path / "src" / "crack" / "4.png", (1, 1))
    assert run_build(tmp_path / "src", out, **whole).message.startswith("already complete")


def test_changed_annotation_is_another_source(make_voc: Callable[..., Path], tmp_path: Path) -> None:
    src, out = make_voc(6), tmp_path / "out"
    assert run_build(src, out).ok
    xml = src / "annotations" / "weld_0002.xml"
    xml.write_text(xml.read_text().replace("<ymax>15<", "<ymax>16<"))
    with pytest.raises(PackError, match="annotations were added, removed or changed"):
        run_build(src, out)


def test_bytes_that_cannot_be_made_again(made: Made) -> None:
    """As after an upgrade of a codec: the manifest knows other bytes than this installation makes."""
    src, out, whole = made(TAR)
    raw = read_json(out)
    raw["splits"]["train"]["shards"][0]["sha256"] = "0" * 64
    raw["created_by"]["opencv"] = "3.0"
    sign_manifest(out, raw)
    with pytest.raises(PackError, match=r"cannot be restored byte for byte: it was made with {'opencv': '3.0'}; use --overwrite"):
        run_build(src, out, **whole)
    assert not (out / ".partial").exists()


def test_damaged_manifest_names_the_way_out(made: Made) -> None:
    src, out, whole = made(TAR)
    change_byte(out / "manifest.json", 40, 1)
    with pytest.raises(PackError, match=r"manifest\.json: .*; --overwrite packs it anew"):
        run_build(src, out, **whole)


def test_source_with_faults_now(make_voc: Callable[..., Path], tmp_path: Path) -> None:
    src, out = make_voc(6), tmp_path / "set"
    assert run_build(src, out).ok
    with (src / "train_val_test_split.csv").open("a") as f:
        f.write("weld_0000,test\n")
    with pytest.raises(PackError, match="has faults now that it did not have"):
        run_build(src, out)


def test_folder_in_a_files_place(made: Made) -> None:
    src, out, whole = made(TAR)
    path = out / "train/shard-000000.tar"
    path.unlink()
    path.mkdir()
    console = Recorder()
    with pytest.raises(PackError, match="is a folder where a file belongs; move it away"):
        run_build(src, out, console, **whole)
    assert "packing" not in console.passed
