"""The output folder: refused places, the lock, publication taken back, and the swap of --overwrite."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from build_data import Recorder, change_byte, differences, run_build, stamps, tree
from packer import build as build_module
from packer import outdir
from packer.outdir import begin_publication, check_places, is_ours, locked, open_partial, remove_data_set, repair_swap, siblings, swap_in
from packer.sample import PackError


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
        self.refused(src, tmp_path / "out", r"not empty and was not made by pack \(no manifest.json, no .partial/\)")
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
        with pytest.raises((PackError, OSError), match="File name too long"):
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

    def test_is_ours(self, tmp_path: Path) -> None:
        assert not is_ours(tmp_path)
        (tmp_path / ".partial").mkdir()
        assert is_ours(tmp_path)


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

    def test_file_system_without_locks(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*_: int) -> None:
            raise OSError(37, "No locks available")

        monkeypatch.setattr(outdir.fcntl, "flock", refuse)
        with pytest.raises(PackError, match="cannot be locked: No locks available"), locked(tmp_path / "out"):
            pass


class TestPublication:
    def begun(self, out: Path) -> Path:
        """A publication with one shard moved of two, an index, a card, and temporary files."""
        partial = out / ".partial"
        partial.mkdir(parents=True)
        (partial / "a.tar").write_bytes(b"A")
        (partial / "b.tar").write_bytes(b"B")
        begin_publication(partial, {"a.tar": "train/shard-000000.tar", "b.tar": "train/shard-000001.tar"})
        (out / "train").mkdir()
        os.replace(partial / "a.tar", out / "train/shard-000000.tar")
        (out / "index" / "train").mkdir(parents=True)
        (out / "index" / "train" / "samples.npy").write_bytes(b"x")
        (out / "README.md").write_text("x")
        (out / "tmp-1-manifest.json").write_text("x")
        (partial / "tmp-2-c.tar").write_text("x")
        return partial

    def test_is_taken_back(self, tmp_path: Path) -> None:
        partial = self.begun(tmp_path)
        open_partial(tmp_path)
        assert tree(tmp_path) == {".partial": None, ".partial/a.tar": b"A", ".partial/b.tar": b"B"}
        assert partial.is_dir()

    @pytest.mark.parametrize("garbage", [b"", b"{", b"[1]", b"\xff\xfe", b'{"a.tar": 5}', b'{"x": "train/shard-000000.tar"}'])
    def test_is_taken_back_with_a_damaged_journal(self, garbage: bytes, tmp_path: Path) -> None:
        partial = self.begun(tmp_path)
        (partial / "publishing.json").write_bytes(garbage)
        open_partial(tmp_path)
        left = tree(tmp_path)
        assert {name for name in left if not name.startswith(".partial")} == set()
        assert left[".partial/b.tar"] == b"B"

    @pytest.mark.parametrize("place", ["/", "../mine", "train/../../mine", "mine", "README.md", "train/shard-1.tar/../../../mine"])
    def test_damaged_journal_moves_nothing_foreign(self, place: str, tmp_path: Path) -> None:
        out, mine = tmp_path / "out", tmp_path / "mine"
        partial = self.begun(out)
        mine.write_text("mine")
        (out / "mine").write_text("mine")
        (partial / "publishing.json").write_text(json.dumps({"x": place, "../y": "train/shard-000000.tar"}))
        open_partial(out)
        assert (mine.read_text(), (out / "mine").read_text()) == ("mine", "mine")
        assert sorted(p.name for p in tmp_path.iterdir()) == ["mine", "out"]

    def test_foreign_files_stay(self, tmp_path: Path) -> None:
        self.begun(tmp_path)
        (tmp_path / "train" / "notes.txt").write_text("mine")
        open_partial(tmp_path)
        assert (tmp_path / "train" / "notes.txt").read_text() == "mine"

    def test_finished_data_set_is_not_taken_apart(self, tmp_path: Path) -> None:
        self.begun(tmp_path)
        (tmp_path / "manifest.json").write_text("{}")
        open_partial(tmp_path)
        assert (tmp_path / "train" / "shard-000000.tar").read_bytes() == b"A"

    def test_journal_is_written_before_the_first_move(self, tmp_path: Path) -> None:
        (tmp_path / ".partial").mkdir()
        begin_publication(tmp_path / ".partial", {"a": "train/b"})
        assert json.loads((tmp_path / ".partial" / "publishing.json").read_text()) == {"a": "train/b"}


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

    @pytest.mark.parametrize("name", [".out.new", ".out.old"])
    def test_foreign_folder_in_the_way(self, name: str, src: Path, tmp_path: Path) -> None:
        out = tmp_path / "out"
        assert run_build(src, out).ok
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.txt").write_text("x")
        with pytest.raises(PackError, match="is in the way of --overwrite and was not made by pack; move it"):
            run_build(src, out, overwrite=True)
        assert (tmp_path / name / "mine.txt").read_text() == "x"

    def test_foreign_files_in_the_old_set_are_kept(self, src: Path, tmp_path: Path) -> None:
        out = tmp_path / "out"
        assert run_build(src, out).ok
        (out / "train" / "notes.txt").write_text("mine")
        console = Recorder()
        assert run_build(src, out, console, output={"seed": 1}, overwrite=True).ok
        assert tree(tmp_path / ".out.old") == {"train": None, "train/notes.txt": b"mine"}
        assert f"{tmp_path}/.out.old is kept: it holds files that pack did not make" in console.said

    def test_old_set_with_a_damaged_manifest_is_kept(self, src: Path, tmp_path: Path) -> None:
        out = tmp_path / "out"
        assert run_build(src, out).ok
        change_byte(out / "manifest.json", 30, 1)
        before = tree(out)
        console = Recorder()
        assert run_build(src, out, console, overwrite=True).ok
        assert tree(tmp_path / ".out.old") == before
        assert any("is kept, since what is ours in it cannot be told" in line for line in console.said)

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
