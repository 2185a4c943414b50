"""The output folder: refused places, the lock, publication taken back, and the swap of --overwrite."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from build_data import Recorder, change_byte, differences, read_json, run_build, sign_manifest, stamps, tree
from packer import build as build_module
from packer import outdir, records
from packer import restore as restore_module
from packer.outdir import begin_publication, check_places, is_ours, locked, open_partial, remove_data_set, repair_swap, siblings, swap_in
from packer.sample import PackError, UsageError


@pytest.fixture
def src(make_folder: Callable[..., Path]) -> Path:
    return make_folder(6)


class TestPlaces:
    def refused(self, src: Path, out: Path, message: str) -> None:
        before = tree(out.parent) if out.parent.is_dir() else None
        with pytest.raises(PackError, match=message):
            run_build(src, out)
        assert before is None or tree(out.parent) == before

    def test_source_missing(self, tmp_path: Path) -> None:
        self.refused(tmp_path / "nothing", tmp_path / "out", "nothing: no such folder")

    def test_source_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("x")
        self.refused(tmp_path / "file", tmp_path / "out", "file: is not a folder")

    def test_source_a_broken_link(self, tmp_path: Path) -> None:
        (tmp_path / "link").symlink_to("nowhere")
        self.refused(tmp_path / "link", tmp_path / "out", "link: no such folder")

    def test_out_a_file(self, src: Path, tmp_path: Path) -> None:
        (tmp_path / "out").write_text("precious")
        self.refused(src, tmp_path / "out", "out: is a file; OUT must be a new or empty folder")

    def test_out_a_broken_link(self, src: Path, tmp_path: Path) -> None:
        (tmp_path / "out").symlink_to("nowhere")
        self.refused(src, tmp_path / "out", "out: is a broken symbolic link")

    def test_out_inside_source(self, src: Path) -> None:
        self.refused(src, src / "deep" / "out", "must not lie inside one another")

    def test_source_inside_out(self, src: Path) -> None:
        self.refused(src / "slag", src, "must not lie inside one another")

    def test_source_is_out(self, src: Path) -> None:
        self.refused(src, src, "must not lie inside one another")

    def test_source_inside_out_by_a_link(self, src: Path, tmp_path: Path) -> None:
        (tmp_path / "link").symlink_to(src)
        self.refused(src, tmp_path / "link" / "out", "must not lie inside one another")

    def test_everything_is_inside_the_root(self, src: Path) -> None:
        with pytest.raises(PackError, match="must not lie inside one another"):
            check_places(src, Path("/"))

    def test_out_not_empty(self, src: Path, tmp_path: Path) -> None:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "thesis.txt").write_text("precious")
        self.refused(src, tmp_path / "out", r"not empty and was not made by pack \(no manifest.json and no .partial/ of pack in it\)")
        with pytest.raises(PackError, match="not empty"):
            run_build(src, tmp_path / "out", overwrite=True)
        assert (tmp_path / "out" / "thesis.txt").read_text() == "precious"

    def test_parent_is_a_file(self, src: Path, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("x")
        self.refused(src, tmp_path / "file" / "out", "out: cannot be made: Not a directory")

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
    def test_parent_not_writable(self, src: Path, tmp_path: Path) -> None:
        (tmp_path / "locked").mkdir(mode=0o500)
        self.refused(src, tmp_path / "locked" / "out", "cannot be made: Permission denied")

    def test_name_too_long(self, src: Path, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="has 300 bytes, at most 250 can be"):
            run_build(src, tmp_path / ("x" * 300))

    def test_empty_folder_and_new_parents_are_fine(self, src: Path, tmp_path: Path) -> None:
        (tmp_path / "empty").mkdir()
        assert run_build(src, tmp_path / "empty").ok
        assert run_build(src, tmp_path / "a" / "b" / "c").ok
        assert differences(tree(tmp_path / "empty"), tree(tmp_path / "a" / "b" / "c")) == []

    def test_working_folder_as_out(self, src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "here").mkdir()
        monkeypatch.chdir(tmp_path / "here")
        assert run_build(src, Path(".")).ok
        assert (tmp_path / "here" / "manifest.json").is_file()
        assert run_build(src, Path("."), output={"seed": 1}, overwrite=True).ok
        assert sorted(p.name for p in tmp_path.iterdir()) == ["here", "src"]

    def test_is_ours_by_the_marker(self, tmp_path: Path) -> None:
        assert not is_ours(tmp_path)
        open_partial(tmp_path)
        assert is_ours(tmp_path)
        (tmp_path / ".partial" / "shardpack").write_bytes(b"something else")
        assert not is_ours(tmp_path)

    @pytest.mark.parametrize("length", [None, 0, 5])
    def test_killed_before_the_marker_was_whole(self, length: int | None, src: Path, tmp_path: Path) -> None:
        out = tmp_path / "out"
        (out / ".partial").mkdir(parents=True)
        if length is not None:
            (out / ".partial" / "shardpack").write_bytes(outdir.MARKER_TEXT[:length])
        assert run_build(src, out).ok
        assert not (out / ".partial").exists()

    @pytest.mark.parametrize("inside", [(), ("download",), ("download", "shardpack")])
    def test_foreign_folder_with_a_partial_folder(self, inside: tuple[str, ...], src: Path, tmp_path: Path) -> None:
        """A download tool's, say."""
        out = tmp_path / "out"
        (out / ".partial").mkdir(parents=True)
        for name in inside:
            (out / ".partial" / name).write_text("")
        for name in ("thesis.txt", "README.md", "tmp-x"):
            (out / name).write_text("mine")
        self.refused(src, out, "was not made by pack")

    @pytest.mark.parametrize("text", ['{"manifest_version": 3, "name": "an extension"}', "[]", "", "{", "5", "[" * 5000, "\xff"])
    def test_foreign_manifest(self, text: str, src: Path, tmp_path: Path) -> None:
        out = tmp_path / "out"
        out.mkdir()
        (out / "manifest.json").write_text(text, "latin-1")
        (out / "icon.png").write_bytes(b"mine")
        self.refused(src, out, "was not made by pack")
        before = tree(tmp_path)
        with pytest.raises(PackError, match="was not made by pack"):
            run_build(src, out, overwrite=True)
        assert tree(tmp_path) == before

    @pytest.mark.parametrize("tables", [{}, {"output": {"format": "memmap"}, "transform": {"resize": "16"}}], ids=["tar", "memmap"])
    @pytest.mark.parametrize("gone", ["index", "train"])
    def test_damaged_manifest_with_a_second_sign(self, tables: dict[str, Any], gone: str, src: Path, tmp_path: Path) -> None:
        out = tmp_path / "out"
        assert run_build(src, out, **tables).ok
        (out / "manifest.json").write_bytes(b"\0\0")
        shutil.rmtree(out / gone)
        assert is_ours(out)
        shutil.rmtree(out / ({"index", "train"} - {gone}).pop())
        assert not is_ours(out)

    def test_foreign_partial_folder_in_a_finished_set(self, src: Path, tmp_path: Path) -> None:
        out = tmp_path / "out"
        assert run_build(src, out).ok
        (out / ".partial").mkdir()
        (out / ".partial" / "tmp-mine").write_text("mine")
        assert run_build(src, out).ok
        (out / "train" / "shard-000000.tar").unlink()
        with pytest.raises(PackError, match=r"\.partial: was not made by pack, which needs this place; move it"):
            run_build(src, out)
        assert (out / ".partial" / "tmp-mine").read_text() == "mine"


class TestLock:
    def test_held_twice(self, tmp_path: Path) -> None:
        with locked(tmp_path / "out"), pytest.raises(PackError, match="another build is running"), locked(tmp_path / "out"):
            pass
        with locked(tmp_path / "out"):
            pass

    def test_folder_replaced_before_the_lock(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Another --overwrite swaps between open and flock: the lock would be one on the folder that is thrown away."""
        flock = outdir.fcntl.flock

        def late(fd: int, how: int) -> None:
            (tmp_path / "out").rename(tmp_path / "old")
            (tmp_path / "out").mkdir()
            flock(fd, how)

        monkeypatch.setattr(outdir.fcntl, "flock", late)
        with pytest.raises(PackError, match="another build is running"), locked(tmp_path / "out"):
            pass

    def test_folder_made_for_nothing_goes_while_it_is_held(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Else another build may lock it in between, and loses it."""
        close, there = os.close, []

        def late(fd: int) -> None:
            there.append((tmp_path / "out").exists())
            close(fd)

        with locked(tmp_path / "out"):
            monkeypatch.setattr(outdir.os, "close", late)
        monkeypatch.undo()
        assert there == [False]

    def test_folder_that_another_build_holds_is_not_removed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """It was locked just after we made it."""

        def refuse(*_: int) -> None:
            raise BlockingIOError

        monkeypatch.setattr(outdir.fcntl, "flock", refuse)
        with pytest.raises(PackError, match="another build is running"), locked(tmp_path / "out"):
            pass
        assert (tmp_path / "out").is_dir()

    def test_file_system_without_locks(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*_: int) -> None:
            raise OSError(37, "No locks available")

        monkeypatch.setattr(outdir.fcntl, "flock", refuse)
        with pytest.raises(PackError, match="cannot be locked: No locks available"), locked(tmp_path / "out"):
            pass


MINE = ("tmp-mine.txt", "tmp-notes/a.txt", "index/mine.txt", "index/train/mine.npy", "train/notes.txt", "train/shard-notes/n.txt")


class TestPublication:
    def begun(self, out: Path) -> Path:
        """A publication with one shard moved of two, an index, a card, and temporary files."""
        out.mkdir(exist_ok=True)
        partial = open_partial(out)
        (partial / "a.tar").write_bytes(b"A")
        (partial / "b.tar").write_bytes(b"B")
        moves = {"a.tar": "train/shard-000000.tar", "b.tar": "train/shard-000001.tar"}
        begin_publication(out, partial, moves, ["index/train/samples.npy", "index/train/boxes.npy", "README.md", "findings.jsonl"])
        (out / "train").mkdir()
        os.replace(partial / "a.tar", out / "train/shard-000000.tar")
        (out / "index" / "train").mkdir(parents=True)
        (out / "index" / "train" / "samples.npy").write_bytes(b"x")
        (out / "index" / "train" / "tmp-1-boxes.npy").write_bytes(b"x")
        (out / "README.md").write_text("x")
        (out / "tmp-1-manifest.json").write_text("x")
        (partial / "tmp-2-c.tar").write_text("x")
        return partial

    def test_is_taken_back(self, tmp_path: Path) -> None:
        self.begun(tmp_path)
        open_partial(tmp_path)
        mark = {".partial": None, ".partial/shardpack": outdir.MARKER_TEXT}
        assert tree(tmp_path) == {**mark, ".partial/a.tar": b"A", ".partial/b.tar": b"B"}

    @pytest.mark.parametrize(
        "garbage",
        [
            b"",
            b"{",
            b"[1]",
            b"\xff\xfe",
            b'{"moves": {"a.tar": 5}, "files": []}',
            b'{"moves": {}, "files": [7]}',
            b'{"moves": {}, "files": ["index"]}',
            b'{"moves": {}, "files": ["index/train/../x"]}',
            b'{"moves": {}, "files": ["thesis.txt"]}',
            b'{"moves": {}}',
        ],
    )
    def test_damaged_journal_is_told(self, garbage: bytes, tmp_path: Path) -> None:
        partial = self.begun(tmp_path)
        (partial / "publishing.json").write_bytes(garbage)
        before = tree(tmp_path)
        with pytest.raises(PackError, match=r"publishing\.json: is damaged, so that it cannot be told what in .* is ours; move"):
            open_partial(tmp_path)
        assert tree(tmp_path) == before

    @pytest.mark.parametrize("place", ["/", "../mine", "train/../../mine", "mine", "README.md", "train/shard-1.tar/../../../mine"])
    def test_damaged_journal_moves_nothing_foreign(self, place: str, tmp_path: Path) -> None:
        out = tmp_path / "out"
        partial = self.begun(out)
        (tmp_path / "mine").write_text("mine")
        for moves in ({"x": place}, {"../y": "train/shard-000000.tar"}):
            (partial / "publishing.json").write_text(json.dumps({"moves": moves, "files": []}))
            before = tree(tmp_path)
            with pytest.raises(PackError, match="is damaged"):
                open_partial(out)
            assert tree(tmp_path) == before

    def test_foreign_files_stay(self, tmp_path: Path) -> None:
        self.begun(tmp_path)
        for name in MINE:
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text("mine")
        open_partial(tmp_path)
        files = {name for name, data in tree(tmp_path).items() if data is not None and not name.startswith(".partial")}
        assert files == set(MINE)

    @pytest.mark.parametrize("name", ["train/shard-000000.tar", "README.md", "index/train/samples.npy"])
    def test_nothing_is_overwritten(self, name: str, src: Path, tmp_path: Path) -> None:
        """Somebody put a file into OUT between two runs."""
        out = tmp_path / "out"
        bad = src / "slag" / "bad.jpg"
        bad.write_bytes(b"no picture")
        assert not run_build(src, out).ok
        bad.unlink()
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text("mine")
        with pytest.raises(PackError, match=f"{name}: is in the way of what is published now, and is not of this build; move it"):
            run_build(src, out)
        assert (out / name).read_text() == "mine"
        (out / name).unlink()
        assert run_build(src, out).ok
        assert run_build(src, tmp_path / "fresh").ok
        assert differences(tree(out), tree(tmp_path / "fresh")) == []

    def test_finished_data_set_is_not_taken_apart(self, tmp_path: Path) -> None:
        partial = self.begun(tmp_path)
        (tmp_path / "manifest.json").write_text("{}")
        open_partial(tmp_path)
        assert (tmp_path / "train" / "shard-000000.tar").read_bytes() == b"A"
        assert not (partial / "publishing.json").exists()  # no later command may believe it

    def test_journal_is_written_before_the_first_move(self, tmp_path: Path) -> None:
        partial = open_partial(tmp_path)
        begin_publication(tmp_path, partial, {"a": "train/b"}, ["README.md"])
        assert json.loads((partial / "publishing.json").read_text()) == {"moves": {"a": "train/b"}, "files": ["README.md"]}

    def test_every_folder_with_new_names_is_synced(self, src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Before the manifest gets its name, and after."""
        events: list[str] = []
        sync, replace = records.os.fsync, os.replace

        def seen_sync(fd: int) -> None:
            events.append(os.readlink(f"/proc/self/fd/{fd}"))
            sync(fd)

        def seen_replace(a: Any, b: Any) -> None:
            events.append(f"to {b}")
            replace(a, b)

        monkeypatch.setattr(os, "fsync", seen_sync)
        monkeypatch.setattr(os, "replace", seen_replace)
        out = tmp_path / "out"
        assert run_build(src, out).ok
        published = events.index(f"to {out / 'manifest.json'}")
        assert {str(out / name) for name in ("", "train", "index", "index/train")} | {str(tmp_path)} <= set(events[:published])
        assert events[published + 1] == str(out)


class TestOverwrite:
    def test_replaces(self, src: Path, tmp_path: Path) -> None:
        out = tmp_path / "out"
        assert run_build(src, out, output={"seed": 1}).ok
        assert run_build(src, out, overwrite=True).ok
        assert run_build(src, tmp_path / "fresh").ok
        assert differences(tree(out), tree(tmp_path / "fresh")) == []
        assert sorted(p.name for p in tmp_path.iterdir()) == ["fresh", "out", "src"]

    def test_of_nothing_is_a_build(self, src: Path, tmp_path: Path) -> None:
        assert run_build(src, tmp_path / "out", overwrite=True).ok

    def test_failure_of_the_new_leaves_the_old(self, src: Path, tmp_path: Path) -> None:
        out = tmp_path / "out"
        assert run_build(src, out).ok
        before, stamped = tree(out), stamps(out)
        (src / "slag" / "bad.jpg").write_bytes(b"no picture")
        outcome = run_build(src, out, overwrite=True)
        assert not outcome.ok
        assert str(tmp_path / ".out.new" / "findings.jsonl") in outcome.message
        assert tree(out) == before
        assert stamps(out) == stamped
        (src / "slag" / "bad.jpg").unlink()
        console = Recorder()
        assert run_build(src, out, console, overwrite=True).ok
        assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "src"]

    def refused(self, src: Path, out: Path, message: str) -> None:
        """Before any work."""
        before, console = tree(out.parent), Recorder()
        with pytest.raises(PackError, match=message):
            run_build(src, out, console, output={"seed": 5}, overwrite=True)
        assert tree(out.parent) == before
        assert console.passed == {}

    @pytest.mark.parametrize("name", [".out.new", ".out.old"])
    @pytest.mark.parametrize("file", ["mine.txt", "manifest.json"])
    def test_foreign_folder_in_the_way(self, file: str, name: str, src: Path, tmp_path: Path) -> None:
        out = tmp_path / "out"
        assert run_build(src, out).ok
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text("{}")
        self.refused(src, out, rf"\{name}: is in the way of --overwrite and .* pack did not make|not made by pack.*; move it")

    def test_foreign_files_in_the_old_set_are_kept(self, src: Path, tmp_path: Path) -> None:
        out = tmp_path / "out"
        assert run_build(src, out).ok
        (out / "train" / "notes.txt").write_text("mine")
        (out / "empty").mkdir()
        console = Recorder()
        assert run_build(src, out, console, output={"seed": 1}, overwrite=True).ok
        assert tree(tmp_path / ".out.old") == {"empty": None, "train": None, "train/notes.txt": b"mine"}
        assert f"{tmp_path}/.out.old is kept: it holds files that pack did not make" in console.said
        self.refused(src, out, r"\.out\.old: is in the way of --overwrite and holds what pack did not make, or cannot tell; move it")
        shutil.rmtree(tmp_path / ".out.old")
        assert run_build(src, out, output={"seed": 5}, overwrite=True).ok

    def test_old_set_with_a_damaged_manifest_is_kept(self, src: Path, tmp_path: Path) -> None:
        out = tmp_path / "out"
        assert run_build(src, out).ok
        change_byte(out / "manifest.json", 30, 1)
        before = tree(out)
        console = Recorder()
        assert run_build(src, out, console, overwrite=True).ok
        assert tree(tmp_path / ".out.old") == before
        assert any("is kept, since what is ours in it cannot be told" in line for line in console.said)
        self.refused(src, out, r"\.out\.old: is in the way of --overwrite")

    def test_new_set_with_a_damaged_manifest(self, src: Path, tmp_path: Path) -> None:
        out, (new, _) = tmp_path / "out", siblings(tmp_path / "out")
        assert run_build(src, out).ok
        assert run_build(src, new).ok
        change_byte(new / "manifest.json", 30, 1)
        self.refused(src, out, r"\.out\.new/manifest\.json: .*; an earlier --overwrite left this folder, .*: move it")

    def test_foreign_files_in_a_new_set_that_is_not_wanted(self, src: Path, tmp_path: Path) -> None:
        """They must not get into OUT."""
        out, (new, _) = tmp_path / "out", siblings(tmp_path / "out")
        assert run_build(src, out).ok
        assert run_build(src, new, output={"seed": 1}).ok
        (new / "mine.txt").write_text("mine")
        before = tree(out)
        with pytest.raises(PackError, match=r"\.out\.new is kept: it holds files that pack did not make; it is in the way"):
            run_build(src, out, output={"seed": 5}, overwrite=True)
        assert (tree(out), tree(new)) == (before, {"mine.txt": b"mine"})

    def test_out_is_a_link(self, src: Path, tmp_path: Path) -> None:
        """The link stays, the folder behind it is replaced."""
        (tmp_path / "disk").mkdir()
        (tmp_path / "disk" / "data").mkdir()
        (tmp_path / "out").symlink_to("disk/data")
        assert run_build(src, tmp_path / "out").ok
        assert run_build(src, tmp_path / "out", output={"seed": 1}, overwrite=True).ok
        assert (tmp_path / "out").is_symlink()
        assert [p.name for p in (tmp_path / "disk").iterdir()] == ["data"]
        assert run_build(src, tmp_path / "fresh", output={"seed": 1}).ok
        assert differences(tree(tmp_path / "disk" / "data"), tree(tmp_path / "fresh")) == []

    def test_finished_but_not_swapped_is_used(self, src: Path, tmp_path: Path) -> None:
        out, (new, _) = tmp_path / "out", siblings(tmp_path / "out")
        assert run_build(src, out, output={"seed": 1}).ok
        assert run_build(src, new).ok
        console = Recorder()
        assert run_build(src, out, console, overwrite=True).ok
        assert "packing" not in console.passed
        assert sum(line.startswith("source: ") for line in console.said) == 1
        assert run_build(src, tmp_path / "fresh").ok
        assert differences(tree(out), tree(tmp_path / "fresh")) == []

    def test_finished_is_kept_when_the_look_at_it_fails(self, src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Such as by a worker that was killed for lack of memory."""
        out, (new, _) = tmp_path / "out", siblings(tmp_path / "out")
        assert run_build(src, out, output={"seed": 1}).ok
        assert run_build(src, new).ok
        before = tree(tmp_path)

        def fail(*_: object) -> None:
            raise PackError("a worker process died")

        monkeypatch.setattr(restore_module, "source_fingerprint", fail)
        with pytest.raises(PackError, match="a worker process died"):
            run_build(src, out, overwrite=True)
        assert tree(tmp_path) == before

    def test_finished_but_cannot_be_made_whole(self, src: Path, tmp_path: Path) -> None:
        """Made by other library versions, and damaged: it is packed anew."""
        out, (new, _) = tmp_path / "out", siblings(tmp_path / "out")
        assert run_build(src, out, output={"seed": 1}).ok
        assert run_build(src, new).ok
        raw = read_json(new)
        raw["splits"]["train"]["shards"][0]["sha256"] = "0" * 64
        sign_manifest(new, raw)
        assert run_build(src, out, overwrite=True).ok
        assert run_build(src, tmp_path / "fresh").ok
        assert differences(tree(out), tree(tmp_path / "fresh")) == []

    def test_finished_but_not_what_is_asked_for_now(self, src: Path, tmp_path: Path) -> None:
        out, (new, old) = tmp_path / "out", siblings(tmp_path / "out")
        assert run_build(src, out, output={"seed": 1}).ok
        assert run_build(src, new, output={"seed": 2}).ok
        assert run_build(src, out, overwrite=True).ok
        assert run_build(src, tmp_path / "fresh").ok
        assert differences(tree(out), tree(tmp_path / "fresh")) == []
        assert not new.exists()
        assert not old.exists()


class TestRepair:
    @pytest.fixture
    def sets(self, src: Path, tmp_path: Path) -> tuple[Path, Path, Path]:
        """(OUT, ``.OUT.new``, ``.OUT.old``): all complete; a test moves them to where an interruption left them."""
        out, (new, old) = tmp_path / "out", siblings(tmp_path / "out")
        assert run_build(src, new).ok
        assert run_build(src, old, output={"seed": 1}).ok
        return out, new, old

    def test_between_the_renames(self, sets: tuple[Path, Path, Path], src: Path) -> None:
        out, new, old = sets
        expected = tree(new)
        console = Recorder()
        assert run_build(src, out, console).message.startswith("already complete")
        assert console.said[0] == f"finished an interrupted --overwrite of {out}"
        assert tree(out) == expected
        assert not new.exists()
        assert not old.exists()

    def test_after_the_renames(self, sets: tuple[Path, Path, Path]) -> None:
        out, new, old = sets
        new.rename(out)
        assert repair_swap(out) == f"removed what an interrupted --overwrite of {out} had left"
        assert (out / "manifest.json").is_file()
        assert not old.exists()

    def test_while_the_old_is_removed(self, sets: tuple[Path, Path, Path]) -> None:
        out, new, old = sets
        new.rename(out)
        for path in sorted(old.rglob("*"), reverse=True)[:5]:
            if path.is_file() and path.name != "manifest.json":
                path.unlink()
        assert repair_swap(out) is not None
        assert not old.exists()

    @pytest.mark.parametrize("renamed", [0, 1])
    def test_is_on_disk_before_the_old_goes(self, renamed: int, sets: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
        out, new, _ = sets
        if renamed:
            new.rename(out)
        synced: list[Path] = []
        at_removal: list[list[Path]] = []

        def remove(folder: Path) -> str | None:
            at_removal.append(list(synced))
            return remove_data_set(folder)

        monkeypatch.setattr(outdir, "sync_path", synced.append)
        monkeypatch.setattr(outdir, "remove_data_set", remove)
        assert repair_swap(out)
        assert at_removal == [[out.parent]]

    def test_foreign_folder_in_the_place_of_the_old(self, sets: tuple[Path, Path, Path]) -> None:
        out, _, old = sets
        remove_data_set(old)
        old.mkdir()
        (old / "manifest.json").write_text('{"name": "an extension"}')
        assert repair_swap(out) is None
        assert (old / "manifest.json").exists()

    def test_new_set_is_gone(self, sets: tuple[Path, Path, Path]) -> None:
        out, new, old = sets
        expected = tree(old)
        remove_data_set(new)
        assert not new.exists()
        assert repair_swap(out) == f"took back an interrupted --overwrite of {out}"
        assert tree(out) == expected

    def test_nothing_to_do(self, sets: tuple[Path, Path, Path]) -> None:
        out, _, old = sets
        remove_data_set(old)
        assert repair_swap(out) is None
        assert not old.exists()

    def test_strange_folder_in_its_place(self, sets: tuple[Path, Path, Path]) -> None:
        out, new, old = sets
        out.mkdir()
        (out / "mine.txt").write_text("x")
        assert repair_swap(out) is None
        assert old.exists()
        assert new.exists()

    def test_other_build_is_swapping_just_now(self, sets: tuple[Path, Path, Path]) -> None:
        out, new, old = sets
        before = tree(out.parent)
        with locked(old), pytest.raises(PackError, match="another build is running"):
            repair_swap(out)
        assert tree(out.parent) == before
        assert new.exists()

    def test_swap_holds_both_locks(self, src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        out = tmp_path / "out"
        assert run_build(src, out, output={"seed": 1}).ok
        refused = []

        def swap(out: Path) -> str | None:
            for folder in (out, siblings(out)[0]):
                with pytest.raises(PackError, match="another build is running"), locked(folder):
                    pass
                refused.append(folder)
            return swap_in(out)

        monkeypatch.setattr(build_module, "swap_in", swap)
        assert run_build(src, out, overwrite=True).ok
        assert len(refused) == 2
