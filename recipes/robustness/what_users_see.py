"""What `pack build` says when something stands in its way: each case is run for real, its words are printed and checked.

    python recipes/robustness/what_users_see.py

A disk that is full and one that cannot be written are mounted (tmpfs), which only root may do; without that these two are said to be
left out. After each case whose cause can be removed, it is, and the same command must end with what an undisturbed build makes.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from processes import Command
from raw_sets import differences, folders, tree

NUM_PICTURES = 30
LEFT_OUT = "left out: no file system can be mounted here"
OPTIONS = ["--resize", "300x200", "--image", "png", "--shard-samples", "1", "--no-shuffle"]


@dataclass
class Seen:
    """One case. `said`: all that the command printed; `wrong`: what is not as it should be."""

    case: str
    command: str
    status: int
    said: str
    wrong: str | None = None

    @property
    def text(self) -> str:
        lines = [f"$ {self.command}", *self.said.splitlines(), f"[exit status {self.status}]"] if self.command else [self.said]
        return "\n".join("   " + line for line in [*lines, *([f"WRONG: {self.wrong}"] if self.wrong else [])])


class Cases:
    """Each method that `CASES` names is a case: it gives the command that met it, the words expected, and checks what follows by itself."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.src = folder, folder / "src"
        # The last in the order of work is the smallest file: it can be changed while the others are packed.
        folders(self.src, NUM_PICTURES, size=(240, 180), suffixes=(".png",))
        folders(self.src, 1, classes=("zzz",), size=(20, 15), suffixes=(".png",))
        self.last = next((self.src / "zzz").iterdir())
        out = folder / "undisturbed"
        if self.build(out).finish():
            raise SystemExit("the undisturbed build failed")
        self.whole = tree(out)

    def build(self, out: Path, *options: object, src: Path | None = None) -> Command:
        place = self.folder / f"run-{len(list(self.folder.iterdir()))}"
        return Command(place, "build", src or self.src, out, *OPTIONS, *options)

    def stopped(self, out: Path, workers: int) -> Command:
        """A build that holds its breath after its first shard."""
        build = self.build(out, "--workers", workers)
        build.until(lambda: build.ended() or any((out / ".partial").glob("*.record")), "the first shard is done")
        if not build.ended():
            os.killpg(build.process.pid, signal.SIGSTOP)
        return build

    def same_again(self, out: Path) -> None:
        """The same command, with nothing in its way now."""
        build = self.build(out)
        assert build.finish() == 0, build.said
        assert not differences(tree(out), self.whole), "not byte-identical after the cause was removed"

    def disk_full(self) -> tuple[Command, str]:
        with mounted(self.folder / "small", "size=600k") as disk:
            build = self.build(disk / "out")
            build.finish()
            subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
            self.same_again(disk / "out")
        return (
            build,
            r"disk full, or over quota: about [\d,]+ more bytes needed, [\d,]+ free there; make room and run the same command again",
        )

    def read_only_disk(self) -> tuple[Command, str]:
        with mounted(self.folder / "locked", "ro") as disk:
            build = self.build(disk / "out")
            build.finish()
        return build, r"locked/out: cannot be made: Read-only file system"

    def read_only_out(self) -> tuple[Command, str]:
        with mounted(self.folder / "frozen", "size=1m") as out:
            subprocess.run(["mount", "-o", "remount,ro", str(out)], check=True)
            build = self.build(out)
            build.finish()
        assert "source:" not in build.said, "the source was read first"
        return build, r"frozen: cannot be written: no permission, or the file system is read-only"

    def two_builds(self) -> tuple[Command, str]:
        out = self.folder / "shared"
        first = self.stopped(out, 1)
        second = self.build(out)
        second.finish()
        os.killpg(first.process.pid, signal.SIGCONT)
        assert first.finish() == 0, first.said
        assert not differences(tree(out), self.whole), "the first build was disturbed"
        return second, r"shared: another build is running there; wait for it, or choose another folder"

    def dead_worker(self) -> tuple[Command, str]:
        out = self.folder / "killed"
        build = self.stopped(out, 2)
        os.kill(build.workers()[0], signal.SIGKILL)
        os.killpg(build.process.pid, signal.SIGCONT)
        build.finish()
        self.same_again(out)
        return build, (
            r"a worker process died \(signal 9\) while working on (the end of the train shard of \S+ to )?\S+\.png: "
            r"probably killed for lack of memory; use fewer --workers; finished shards are kept, run the same command again"
        )

    def picture_changed(self) -> tuple[Command, str]:
        out = self.folder / "changed"
        build = self.stopped(out, 1)
        before = self.last.read_bytes()
        self.last.write_bytes(before + b"more")
        os.killpg(build.process.pid, signal.SIGCONT)
        build.finish()
        assert not (out / "manifest.json").exists(), "published all the same"
        self.last.write_bytes(before)
        self.same_again(out)
        return build, r"zzz/p0000\.png: .*changed.*\(source-changed\)"

    def out_in_src(self) -> tuple[Command, str]:
        return self.refused(self.src / "out", r"SRC .* and OUT .* must not lie inside one another")

    def src_in_out(self) -> tuple[Command, str]:
        return self.refused(self.src, r"must not lie inside one another", src=self.src / "zzz")

    def out_is_a_file(self) -> tuple[Command, str]:
        (self.folder / "file").write_text("thesis")
        seen = self.refused(self.folder / "file", r"file: is a file; OUT must be a new or empty folder")
        assert (self.folder / "file").read_text() == "thesis", "the file was touched"
        return seen

    def out_holds_something_else(self) -> tuple[Command, str]:
        (self.folder / "home").mkdir()
        (self.folder / "home" / "thesis.txt").write_text("x")
        return self.refused(self.folder / "home", r"home: is not empty and was not made by pack .*choose another folder")

    def src_missing(self) -> tuple[Command, str]:
        return self.refused(self.folder / "out", r"nowhere: no such folder", src=self.folder / "nowhere")

    def refused(self, out: Path, words: str, src: Path | None = None) -> tuple[Command, str]:
        before = tree(self.src)
        build = self.build(out, src=src)
        build.finish()
        assert tree(self.src) == before, "SRC was written to"
        return build, words


class CannotMount(Exception):
    """Not root, or no right to mount."""


@contextlib.contextmanager
def mounted(folder: Path, options: str) -> Iterator[Path]:
    """A file system of its own, in memory."""
    folder.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(folder)], capture_output=True).returncode:
        raise CannotMount
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


CASES = [
    "disk_full",
    "read_only_disk",
    "read_only_out",
    "two_builds",
    "dead_worker",
    "picture_changed",
    "out_in_src",
    "src_in_out",
    "out_is_a_file",
    "out_holds_something_else",
    "src_missing",
]


def see(made: Cases, case: str) -> Seen:
    """Run one case."""
    run: Callable[[], tuple[Command, str]] = getattr(made, case)
    try:
        build, words = run()
    except CannotMount:
        return Seen(case, "", 0, LEFT_OUT)
    except AssertionError as e:
        return Seen(case, "", 0, "what follows is wrong", str(e))
    status = int(build.process.returncode)
    wrong = None
    if status not in (1, 2):
        wrong = f"exit status {status}, expected 1 or (wrong usage) 2"
    elif not re.search(words, build.said):
        wrong = f"expected words like: {words}"
    elif "Traceback" in build.said:
        wrong = "a traceback"
    return Seen(case, f"pack {' '.join(build.args)}", status, build.said.strip(), wrong)


def main() -> int:
    folder = Path(tempfile.mkdtemp(prefix="what-users-see-"))
    num_wrong = 0
    try:
        made = Cases(folder)
        for case in CASES:
            seen = see(made, case)
            num_wrong += seen.wrong is not None
            print(f"== {case.replace('_', ' ')}")
            print(seen.text.replace(str(folder) + "/", ""))
    finally:
        shutil.rmtree(folder)
    print(f"what users see: {len(CASES) - num_wrong} of {len(CASES)} as expected")
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
