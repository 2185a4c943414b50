"""Large inputs through real ``pack`` processes: a CSV table of a million rows and a folder of 100,000 files, with peak memory and seconds.

    python recipes/robustness/scale.py [--rows 1000000] [--files 100000] [--workers 2] [--folder FOLDER]

For each input: ``pack check``, then ``pack build``. Memory is the proportional set size, so that pages which processes share count once;
the peak of the sum over all processes and that of the main one are printed. Exit status 1: a bound is broken, or an outcome is not the
expected one. The bounds, 1.2 GB and 240 s, are for the two full sizes.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np

MAX_BYTES, MAX_S = 1_200_000_000, 240.0
POLL_S = 0.2
ROWS_PER_PICTURE = 500
NUM_FAULTY = 10
CLASSES = ("crack", "incomplete_fusion", "porosity", "slag")


@dataclass(frozen=True, slots=True)
class Ran:
    """One command: its exit status, what it printed, seconds, and peak bytes of memory, of all its processes and of the main one."""

    status: int
    text: str
    seconds: float
    peak_all: int
    peak_main: int


def encoded(seed: int) -> bytes:
    """A JPEG of 64 x 48 pixels."""
    small = np.random.default_rng(seed).integers(0, 256, (4, 5, 3), np.uint8)
    return cv2.imencode(".jpg", cv2.resize(small, (64, 48)))[1].tobytes()


def make_table(root: Path, num_rows: int) -> int:
    """A table of boxes over as many pictures as needed; a few rows have a box without area. Returns faulty pictures."""
    root.mkdir(parents=True)
    num_pictures = -(-num_rows // ROWS_PER_PICTURE)
    for i in range(num_pictures):
        (root / f"w{i:06d}.jpg").write_bytes(encoded(i))
    faulty, every = set(), max(num_rows // NUM_FAULTY, 1)
    with (root / "boxes.csv").open("w", encoding="utf-8") as f:
        f.write("filename,x1,y1,x2,y2,label\n")
        for row in range(num_rows):
            picture, number = row % num_pictures, row // num_pictures
            x, y = number % 50, number // 50 % 30
            wide = 0 if row % every == every - 1 else 2 + number % 9
            if not wide:
                faulty.add(picture)
            f.write(f"w{picture:06d}.jpg,{x},{y},{x + wide},{y + 3 + number % 11},{CLASSES[row % 4]}\n")
    return len(faulty)


def make_folder(root: Path, num_files: int) -> int:
    """Class folders of `num_files` pictures in all, a few of them empty. Returns how many are."""
    pictures, faulty, every = [encoded(i) for i in range(64)], 0, max(num_files // NUM_FAULTY, 1)
    for name in CLASSES:
        (root / name).mkdir(parents=True)
    for i in range(num_files):
        empty = i % every == every - 1
        faulty += empty
        # A comment's worth of bytes behind the end makes each file another one.
        data = b"" if empty else pictures[i % 64] + i.to_bytes(8, "big")
        (root / CLASSES[i % 4] / f"w{i:06d}.jpg").write_bytes(data)
    return faulty


def run(arguments: list[str]) -> Ran:
    """Run ``pack`` with `arguments` and watch the memory of its processes."""
    start = time.monotonic()
    process = subprocess.Popen([sys.executable, "-m", "packer.cli", *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    peaks, done = [0, 0], threading.Event()

    def watch() -> None:
        while not done.wait(POLL_S):
            sizes = [proportional(pid) for pid in family(process.pid)]
            peaks[0], peaks[1] = max(peaks[0], sum(sizes)), max(peaks[1], sizes[0])

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        output = process.communicate()[0]
    finally:
        done.set()
        watcher.join()
    return Ran(process.returncode, output.decode("utf-8", "replace"), time.monotonic() - start, peaks[0], peaks[1])


def family(pid: int) -> Iterator[int]:
    """A process and all below it."""
    yield pid
    try:
        children = [Path(f"/proc/{pid}/task/{task.name}/children").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return
    for child in itertools.chain.from_iterable(text.split() for text in children):
        yield from family(int(child))


def proportional(pid: int) -> int:
    """Bytes of memory of a process, 0 where it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def report(name: str, ran: Ran, expected: list[str], *, bounded: bool) -> bool:
    """Print one line; whether all is as expected."""
    print(f"{name}: {ran.seconds:.1f} s, peak {ran.peak_all / 1e6:.0f} MB in all, {ran.peak_main / 1e6:.0f} MB in the main process")
    lacking = [text for text in expected if text not in ran.text]
    if ran.status != 0 or lacking:
        print(f"  exit status {ran.status}, expected to read {lacking}:\n{ran.text[-3000:]}")
        return False
    if bounded and (ran.peak_all > MAX_BYTES or ran.seconds > MAX_S):
        print(f"  over the bounds of {MAX_BYTES / 1e6:.0f} MB and {MAX_S:.0f} s")
        return False
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--files", type=int, default=100_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="where the inputs are made for the time of the run [default: the system's]")
    args = parser.parse_args()
    good = True
    with tempfile.TemporaryDirectory(prefix="pack-scale-", dir=args.folder) as folder:
        root = Path(folder)
        num_pictures = -(-args.rows // ROWS_PER_PICTURE)
        inputs = [
            ("csv", f"table of {args.rows:,} rows", make_table(root / "csv", args.rows), num_pictures, "empty-box", args.rows == 1_000_000),
            ("folder", f"{args.files:,} files", make_folder(root / "folder", args.files), args.files, "empty-file", args.files == 100_000),
        ]
        for kind, name, faulty, pictures, code, bounded in inputs:
            options = ["--source", kind, "--workers", str(args.workers), "--on-error", "skip"]
            said = [f"{faulty:,} {code} (skip)"] if faulty else []
            counts = f"{pictures - faulty:,} pictures fit to pack + {faulty:,} left out"
            checked = run(["check", str(root / kind), *options])
            good &= report(f"check of a {name}" if kind == "csv" else f"check of {name}", checked, [counts, *said], bounded=bounded)
            built = run(["build", str(root / kind), str(root / f"{kind}-out"), *options])
            good &= report(f"build of a {name}" if kind == "csv" else f"build of {name}", built, [counts, *said], bounded=bounded)
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
