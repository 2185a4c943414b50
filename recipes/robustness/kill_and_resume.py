"""Kill real `pack build` processes at random moments; the same command again must end with the bytes of an uninterrupted build.

    python recipes/robustness/kill_and_resume.py                 # 50 rounds, two to three seconds each
    python recipes/robustness/kill_and_resume.py --rounds 500 --seed 7
    python recipes/robustness/kill_and_resume.py --only 17       # one round again, as in a failure's message

A round: an empty OUT, or one that holds a finished older data set and is built over with `--overwrite`; layout tar or memmap; one to
three kills, then the command to its end. A kill comes at a moment drawn evenly from the length of an uninterrupted build, or (four in
ten) from the time that publishing takes, and is one of

    main     SIGKILL of the main process; its workers must end by themselves
    worker   SIGKILL of one worker, as for lack of memory; the build must name the picture and fail, or go on, and never hang
    group    SIGKILL of all processes at once
    power    as group, then as after a power cut: the newest one to four files are cut short, end in zeros, or are gone

Right after each kill OUT is complete, old or new, or has no manifest (for one moment of a swap the old set lies whole beside it). In
the end: every file as in an uninterrupted build, nothing beside OUT, no process, no temporary file, SRC untouched. One thing no
program can do: with all of its processes killed at once nobody is left to remove Python's empty ``pymp-*`` folder in TMPDIR.

A power cut cannot damage the journal of publishing, which is on disk before anything is moved. It is cut all the same: the build may
then refuse, and must name it; what its message says to do must lead to the same bytes.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from processes import Command, Hang
from raw_sets import differences, digest, tree, voc

Tree = dict[str, bytes | None]
NUM_PICTURES = 36
LAYOUTS = {
    "tar": ["--resize", "160", "--image", "jpg", "--shard-samples", "3", "--workers", "2"],
    "memmap": ["--resize", "160x120", "--format", "memmap", "--shard-samples", "3", "--workers", "2"],
}
OLD = ["--resize", "64x48", "--seed", "1", "--shard-samples", "5"]
KINDS = ("main", "worker", "group", "power")
SHARE_AT_THE_END = 0.4
JOURNAL = "publishing.json"
DAMAGED_JOURNAL = f"{JOURNAL}: is damaged, so that it cannot be told what in "
MARKER = "shardpack"


@dataclass(frozen=True)
class Reference:
    """An uninterrupted build: what it makes, the seconds that it takes, and those of them that publishing takes."""

    made: Tree
    whole_s: float
    end_s: float


class Round:
    """One round of one kind of work. `play` gives what is wrong, nothing when all is well."""

    def __init__(self, folder: Path, src: Path, number: int, seed: int, references: dict[str, Reference], old: Path) -> None:
        self.rng = random.Random(f"{seed}/{number}")
        self.kinds = [KINDS[number % len(KINDS)], *self.rng.choices(KINDS, k=self.rng.choice([0, 0, 1, 2]))]
        self.layout = self.rng.choice(list(LAYOUTS))
        self.over = self.rng.random() < 0.5
        self.reference, self.old = references[self.layout], old
        self.folder = folder / f"round-{number}"
        self.work = self.folder / "work"
        self.out, self.new, self.before = self.work / "out", self.work / ".out.new", self.work / ".out.old"
        self.args = ["build", src, self.out, *LAYOUTS[self.layout], *(["--overwrite"] if self.over else [])]
        self.says = f"{self.layout}, {'--overwrite' if self.over else 'fresh'}, kills: {', '.join(self.kinds)}"
        self.orphaned = self.journal_cut = False

    def play(self) -> Iterator[str]:
        if self.over:
            self.work.mkdir(parents=True)
            shutil.copytree(self.old, self.out)
        for n, kind in enumerate(self.kinds):
            if not self.kill(kind, must=n == 0):
                break
            yield from self.at_once(kind)
            if kind == "power":
                self.cut_power()
        yield from self.resume()
        shutil.rmtree(self.folder)

    def kill(self, kind: str, must: bool) -> bool:
        """Start the command and kill it. A build that was quicker is not killed; where it `must` be, an earlier moment is tried."""
        for attempt in range(20):
            build = Command(self.folder, *self.args)
            at_end = self.rng.random() < SHARE_AT_THE_END
            moment = self.rng.random() * (self.reference.end_s if at_end else self.reference.whole_s) * 0.9**attempt
            if at_end:
                build.until(lambda b=build: b.ended() or self.publishing(), "it publishes")  # type: ignore[misc]  # bound now
                time.sleep(moment)
            else:
                time.sleep(max(0.0, build.started + moment - time.monotonic()))
            if self.strike(kind, build):
                return True
            if not must:
                return False
            shutil.rmtree(self.work)
            self.work.mkdir()
            if self.over:
                shutil.copytree(self.old, self.out)
        raise Hang(f"no build could be killed in time ({kind})")

    def publishing(self) -> bool:
        return any((folder / ".partial" / JOURNAL).exists() for folder in (self.out, self.new))

    def strike(self, kind: str, build: Command) -> bool:
        """Whether the build was still there to be killed."""
        if kind == "worker":
            build.until(lambda: build.ended() or bool(build.workers()), "there is a worker")
            workers = build.workers()
            if not workers:
                build.finish()
                return False
            os.kill(self.rng.choice(workers), signal.SIGKILL)
            status, said = build.finish(), build.said
            named = "a worker process died (signal 9) while working on " in said and ("w00" in said or "an empty shard" in said)
            if status and not named:
                raise AssertionError(f"exit status {status} after a worker was killed, but it said: {said}")
            return True
        self.orphaned |= kind != "main" or len(build.workers()) < 2
        if build.ended():
            build.finish()
            return False
        if kind == "main":
            build.process.kill()
        else:
            build.kill_all()
        build.finish()
        return True

    def at_once(self, kind: str) -> Iterator[str]:
        """What is wrong right after the kill."""
        if not self.over:
            if (self.out / "manifest.json").exists() and whole(self.out) != self.reference.made:
                yield f"after {kind}: OUT has a manifest and is not complete: {differences(whole(self.out), self.reference.made)}"
        elif self.out.exists():
            if whole(self.out) not in (whole(self.old), self.reference.made):
                yield f"after {kind}: OUT is neither the old nor the new data set"
        elif whole(self.before) != whole(self.old) or whole(self.new) != self.reference.made:
            yield f"after {kind}: OUT is away, and the old and the new data set do not lie beside it"

    def cut_power(self) -> None:
        """The newest files lose what may not have reached the disk."""
        places = [self.out, self.new] if not (self.out / "manifest.json").exists() else [self.out / ".partial", self.new / ".partial"]
        files = [f for place in places for f in place.rglob("*") if f.is_file() and f.name not in (MARKER, "manifest.json")]
        if (self.new / "manifest.json").exists():
            files = [f for f in files if ".partial" in f.parts]
        files.sort(key=lambda f: f.stat().st_mtime_ns, reverse=True)
        for file in files[: self.rng.randint(1, 4)]:
            size = file.stat().st_size
            how = self.rng.choice(["cut", "zeros", "gone"])
            self.journal_cut |= file.name == JOURNAL
            if how == "gone" and file.name != JOURNAL:
                file.unlink()
                continue
            at = self.rng.randrange(size + 1)
            os.truncate(file, at)
            if how == "zeros":
                os.truncate(file, size)

    def resume(self) -> Iterator[str]:
        """The same command to its end: what is wrong then."""
        build = Command(self.folder, *self.args)
        status = build.finish()
        if status and self.journal_cut and DAMAGED_JOURNAL in build.said:  # do as it says
            folder = self.new if (self.new / ".partial" / JOURNAL).exists() else self.out
            shutil.rmtree(folder)
            build = Command(self.folder, *self.args)
            status = build.finish()
        if status:
            yield f"the same command again ended with {status}: {build.said}"
        differ = differences(tree(self.out), self.reference.made) if self.out.is_dir() else ["all"]
        if differ:
            yield f"differs in {differ}"
        beside = sorted(p.name for p in self.work.iterdir())
        if beside != ["out"]:
            yield f"left beside OUT: {beside}"
        left = sorted(p.name for p in build.temp.iterdir())
        if not all(self.orphaned and name.startswith("pymp-") for name in left):
            yield f"left in TMPDIR: {left}"


def whole(out: Path) -> Tree:
    """A data set without unfinished work."""
    return {name: data for name, data in tree(out).items() if name.split("/")[0] != ".partial"} if out.is_dir() else {}


def measure(folder: Path, src: Path, out: Path, args: list[str]) -> Reference:
    """Build without interruption, and let `pack verify` judge it."""
    build = Command(folder, "build", src, out, *args)
    build.until(lambda: build.ended() or (out / ".partial" / JOURNAL).exists(), "it publishes")
    publishes = time.monotonic()
    build.until(build.ended, "the build ends")
    end = time.monotonic()
    if build.finish():
        raise SystemExit(f"the uninterrupted build failed: {build.said}")
    check = Command(folder, "verify", out)
    if check.finish():
        raise SystemExit(f"the uninterrupted build is not sound: {check.said}")
    return Reference(tree(out), end - build.started, end - publishes)


def kill_and_resume(folder: Path, numbers: list[int], seed: int, say: bool = False) -> list[str]:
    """Play rounds below an empty `folder`. Returns what went wrong, one text a round that did; that round's folder is kept."""
    src, old = folder / "src", folder / "old"
    voc(src, NUM_PICTURES, size=(240, 180))
    before = digest(src)
    references = {name: measure(folder, src, folder / name, args) for name, args in LAYOUTS.items()}
    measure(folder, src, old, OLD)
    failures = []
    for done, number in enumerate(numbers, 1):
        played = Round(folder, src, number, seed, references, old)
        try:
            wrong = list(played.play())
        except (AssertionError, Hang) as e:
            wrong = [str(e)]
        if wrong:
            failures.append(f"round {number} of seed {seed} ({played.says}): {'; '.join(wrong)}")
        if say:
            print(f"{done:4}  {played.says}{'' if not wrong else '  FAILED: ' + '; '.join(wrong)}", flush=True)
    if digest(src) != before:
        failures.append("SRC was changed")
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill pack build at random moments and resume it")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="play only the round of this number")
    args = parser.parse_args()
    numbers = list(range(args.rounds)) if args.only is None else [args.only]
    folder = Path(tempfile.mkdtemp(prefix="kill-and-resume-"))
    failures = kill_and_resume(folder, numbers, args.seed, say=True)
    for failure in failures:
        print(failure)
    if failures:
        print(f"folders of rounds that failed are kept in {folder}")
    else:
        shutil.rmtree(folder)
    print(f"kill and resume: {len(numbers) - len(failures):,} of {len(numbers):,} identical")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
