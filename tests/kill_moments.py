"""Kills a build just before its n-th touch of the file system, for every n, and looks whether the next command makes it whole.

A program (``python tests/kill_moments.py SCENARIO FOLDER STEP``), started by test_interrupt.py: it forks, so that each build begins in
a process without threads and dies by a real SIGKILL; imports are paid once. Prints
``{"moments": number, "foreign": number, "failures": [text, ...]}``; `foreign`: how often somebody else's files were put into OUT after
the kill.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent)]

from build_data import Tree, change_byte, differences, run_build, tree  # noqa: E402  found by the line above
from packer.outdir import is_ours, siblings  # noqa: E402

EVENTS = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir")
Job = Callable[[], Any]
# Put into OUT where it is ours: no command may lose them.
FOREIGN = ("mine.txt", "tmp-notes/mine.txt", "index/mine.txt", "index/train/mine.npy", "train/mine.txt", "train/shard-notes/mine.txt")


def in_child(job: Job, below: Path, die_at: int | None = None) -> tuple[bool, int]:
    """Run in a fork; (killed, touches of `below` that were seen). An exception ends this program."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        seen = [0]

        def hook(event: str, args: tuple[Any, ...]) -> None:
            if event in EVENTS and isinstance(args[0], str | bytes | os.PathLike) and os.fsdecode(args[0]).startswith(str(below)):
                if seen[0] == die_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                seen[0] += 1

        try:
            sys.addaudithook(hook)
            job()
            os.write(writer, str(seen[0]).encode())
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(3)
    os.close(writer)
    _, status = os.waitpid(pid, 0)
    with os.fdopen(reader) as f:
        seen_text = f.read()
    if os.WIFSIGNALED(status):
        return True, -1
    if os.WEXITSTATUS(status):
        raise SystemExit("the build raised")
    return False, int(seen_text)


def put_foreign(out: Path) -> None:
    for name in FOREIGN:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text("mine")


def take_foreign(folder: Path) -> set[str]:
    """Remove the foreign files, and their folders where these are empty then; which were there?"""
    found = {name for name in FOREIGN if (folder / name).is_file() and (folder / name).read_text() == "mine"}
    for name in found:
        (folder / name).unlink()
    for below in ("tmp-notes", "index/train", "index", "train/shard-notes", "train", ""):
        if (folder / below).is_dir() and not any((folder / below).iterdir()):
            (folder / below).rmdir()
    return found


class Scenario:
    """`prepare` makes the folder as it is before the command; `command` is killed; `after` is the next command (the same by default);
    `expected` is what OUT must be in the end.
    """

    def __init__(self, folder: Path) -> None:
        self.src, self.out = folder / "src", folder / "work" / "out"
        self.folder = folder
        self.expected: Tree = {}

    def reference(self, **tables: Any) -> Tree:
        out = self.folder / "reference"
        shutil.rmtree(out, ignore_errors=True)
        assert run_build(self.src, out, **tables).ok
        return tree(out)

    def prepare(self) -> None:
        shutil.rmtree(self.out.parent, ignore_errors=True)
        self.out.parent.mkdir()

    def command(self) -> None: ...

    def after(self) -> None:
        self.command()

    def at_once(self) -> str | None:
        """What is wrong right after the kill."""
        return None


class Fresh(Scenario):
    tables: ClassVar[dict[str, Any]] = {"output": {"shard_samples": 2}}

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.expected = self.reference(**self.tables)

    def command(self) -> None:
        assert run_build(self.src, self.out, **self.tables).ok


class FreshMemmap(Fresh):
    tables: ClassVar[dict[str, Any]] = {"output": {"shard_samples": 2, "format": "memmap"}, "transform": {"resize": "24"}}


class OtherPlan(Fresh):
    """The next command cuts fewer shards of another layout and splits: nothing of the first may stay."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.other: dict[str, Any] = {"output": {"shard_samples": 4, "format": "memmap"}, "transform": {"resize": "16"}}
        self.expected = self.reference(**self.other)

    def after(self) -> None:
        # Once the first is complete only --overwrite may replace it.
        assert run_build(self.src, self.out, overwrite=True, **self.other).ok


class Overwrite(Scenario):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.new = {"output": {"shard_samples": 3}}
        self.old = self.reference(output={"shard_samples": 4, "seed": 1})
        self.saved = self.folder / "old"
        shutil.rmtree(self.saved, ignore_errors=True)
        shutil.copytree(self.folder / "reference", self.saved)
        self.expected = self.reference(**self.new)

    def prepare(self) -> None:
        super().prepare()
        shutil.copytree(self.saved, self.out)

    def command(self) -> None:
        assert run_build(self.src, self.out, overwrite=True, **self.new).ok

    def at_once(self) -> str | None:
        """Old or new, whole, at its place; or for one moment the place is empty."""
        if self.out.exists() and tree(self.out) not in (self.old, self.expected):
            return "OUT is neither the old nor the new data set"
        return None


class Restore(Scenario):
    """Two shards are damaged (one also lost its offsets), or with `everything` index and findings as well."""

    everything = False

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.tables = {"output": {"shard_samples": 2}}
        self.expected = self.reference(**self.tables)

    def prepare(self) -> None:
        super().prepare()
        shutil.copytree(self.folder / "reference", self.out)
        change_byte(self.out / "train/shard-000000.tar", 700, 1)
        (self.out / "train/shard-000001.tar").unlink()
        (self.out / "train/shard-000001.tar.idx").unlink()
        if self.everything:
            change_byte(self.out / "index/train/samples.npy", 200, 255)
            (self.out / "findings.jsonl").unlink()
            (self.out / "README.md").write_text("mine\n")

    def command(self) -> None:
        assert run_build(self.src, self.out, **self.tables).ok


class RestoreAll(Restore):
    everything = True


SCENARIOS: dict[str, type[Scenario]] = {s.__name__: s for s in (Fresh, FreshMemmap, OtherPlan, Overwrite, Restore, RestoreAll)}


def main(name: str, folder: Path, step: int) -> None:
    scenario = SCENARIOS[name](folder)
    scenario.prepare()
    _, total = in_child(scenario.command, scenario.out.parent)
    failures, num_foreign = [], 0
    for moment in range(0, total, step):
        scenario.prepare()
        killed, _ = in_child(scenario.command, scenario.out.parent, moment)
        if not killed:
            failures.append(f"moment {moment} of {total}: not reached")
        wrong = scenario.at_once()
        if wrong:
            failures.append(f"moment {moment} of {total}: {wrong}")
        foreign = is_ours(scenario.out)
        if foreign:
            put_foreign(scenario.out)
        in_child(scenario.after, scenario.out.parent)
        found = take_foreign(scenario.out) | take_foreign(siblings(scenario.out)[1])  # where an overwritten set's foreign files stay
        if foreign and found != set(FOREIGN):
            failures.append(f"moment {moment} of {total}: lost {set(FOREIGN) - found}")
        num_foreign += foreign
        differ = differences(tree(scenario.out), scenario.expected)
        if differ:
            failures.append(f"moment {moment} of {total}: differs in {differ}")
        beside = sorted(p.name for p in scenario.out.parent.iterdir())
        if beside != ["out"]:
            failures.append(f"moment {moment} of {total}: left {beside}")
    sys.stdout.write(json.dumps({"moments": total, "foreign": num_foreign, "failures": failures}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
