"""How fast `pack build` packs welding pictures, against bare loops that make the same decode and encode calls and nothing else.

    python recipes/benchmarks/pack_rate.py                                  # 2,000 pictures of 1600x1200, three rounds
    python recipes/benchmarks/pack_rate.py --num 400 --rounds 1 --workers 2
    python recipes/benchmarks/run.py pack                                   # the same, with its rows in the table of all workloads

Two workloads, each measured against its loop, build and loop by turns, so that a slow minute of the machine hits both:

    keep     pack build --image keep                               loop: read, strict decode at 1/8 (`packer.images.check`)
    resize   pack build --resize 640 --mode letterbox --image jpg  loop: read, decode, letterbox, `encode_image` at quality 90

What is timed. A build is a whole command, from its start to its exit: it lists, parses XML, hashes, writes, syncs and renames. Its
start-up is taken out by builds of the first few pictures only (a tree of links), one before and one after it: rate = (N - n) / (T_N - T_n),
where T_n is the shortest of all rounds, so that a slow start never flatters a build. A loop is timed in processes that are already
running, from the first picture to the last; it reads no XML, hashes and writes nothing, and the pictures' headers were probed before.
Both find the files in the page cache. Memory is VmHWM, a high-water mark, of each process of the build, read twice a second: reading
it more often takes processor time from the build.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from rich.console import Console
from rich.table import Table

from loaders.codecs import encode_image
from packer.images import ImageInfo, check, decode, probe
from packer.transforms import Resize

RECIPES = Path(__file__).parent.parent
RECIPE = RECIPES / "welding_v2.toml"
SIDE = 640
QUALITY = 90
MAX_PIXELS = 200_000_000
SAMPLE_S = 0.5
WORKLOADS: dict[str, list[str]] = {
    "keep": ["--image", "keep"],
    "resize": ["--resize", str(SIDE), "--mode", "letterbox", "--image", "jpg", "--quality", str(QUALITY)],
}
Task = tuple[Path, ImageInfo]


@dataclass
class Peaks:
    """Largest VmHWM in MB (10^6 bytes) of the command's first process and of any process below it."""

    main: float = 0.0
    worker: float = 0.0


@dataclass
class Measured:
    """One workload: seconds of whole builds and of builds of the first few pictures, pictures per second of the loop; a round each."""

    num: int
    num_few: int
    whole_s: list[float] = field(default_factory=list)
    few_s: list[float] = field(default_factory=list)
    loop: list[float] = field(default_factory=list)
    peaks: Peaks = field(default_factory=Peaks)

    def build(self) -> list[float]:
        """Pictures per second of the builds, start-up taken out."""
        start_up = min(self.few_s)
        if min(self.whole_s) <= start_up:
            raise ValueError(f"building {self.num} pictures took no longer than building {self.num_few}: take more (--num)")
        return [(self.num - self.num_few) / (whole - start_up) for whole in self.whole_s]


def loop_keep(task: Task) -> int:
    path, info = task
    data = path.read_bytes()
    check(data, info)
    return len(data)


def loop_resize(task: Task) -> int:
    path, info = task
    image = decode(path.read_bytes(), info).image
    out, _, _ = Resize(SIDE, "letterbox")(image, np.zeros((0, 4)))
    return len(encode_image(out, "jpg", quality=QUALITY, restart_grid=True))


LOOPS = {"keep": loop_keep, "resize": loop_resize}


def _ready(_: int) -> int:
    time.sleep(0.2)
    return os.getpid()


def loop_rate(name: str, tasks: list[Task], workers: int) -> float:
    """Pictures per second of a bare loop in `workers` running processes."""
    with multiprocessing.get_context("forkserver").Pool(workers, cv2.setNumThreads, (1,)) as pool:
        while len(set(pool.map(_ready, range(workers), chunksize=1))) < workers:
            pass
        pool.map(LOOPS[name], tasks[:workers], chunksize=1)  # first calls load libraries
        start = time.perf_counter()
        for _ in pool.imap_unordered(LOOPS[name], tasks, chunksize=4):
            pass
        return len(tasks) / (time.perf_counter() - start)


def build_seconds(source: Path, out: Path, flags: list[str], workers: int, peaks: Peaks) -> float:
    """Wall-clock time of one `pack build`; `out` is removed afterwards.

    Raises:
        RuntimeError: the build failed.
    """
    pack = Path(sys.executable).with_name("pack")
    command: list[str | Path] = [pack, "build", "--recipe", RECIPE, "--workers", str(workers), "--quiet", *flags, source, out]
    with tempfile.TemporaryFile("w+") as log:
        start = time.perf_counter()
        process = subprocess.Popen(command, stdout=log, stderr=log)
        while process.returncode is None:
            try:
                process.wait(SAMPLE_S)
            except subprocess.TimeoutExpired:
                _sample_memory(process.pid, peaks)
        spent = time.perf_counter() - start
        log.seek(0)
        text = log.read()
    shutil.rmtree(out, ignore_errors=True)
    if process.returncode:
        raise RuntimeError(f"pack build exited with {process.returncode}:\n{text}")
    return spent


def _sample_memory(root: int, peaks: Peaks) -> None:
    parents: dict[int, int] = {}
    high: dict[int, float] = {}
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            fields = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
        except OSError:
            continue  # it ended meanwhile
        pid = int(status.parent.name)
        parents[pid] = int(fields["PPid"])
        high[pid] = int(fields.get("VmHWM", "0 kB").split()[0]) * 1024 / 1e6
    for pid, megabytes in high.items():
        if pid == root:
            peaks.main = max(peaks.main, megabytes)
            continue
        above = pid
        while above > 1 and above != root:
            above = parents.get(above, 0)
        if above == root:
            peaks.worker = max(peaks.worker, megabytes)


def make_welding(out: Path, num: int, workers: int) -> None:
    """Weld pictures of 1600x1200, by `recipes/make_welding_v2.py`.

    Raises:
        RuntimeError: it failed.
    """
    options = ["--num", str(num), "--size", "1600x1200", "--workers", str(workers)]
    done = subprocess.run([sys.executable, RECIPES / "make_welding_v2.py", out, *options], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"make_welding_v2 exited with {done.returncode}: {done.stderr}")


def link_first(source: Path, target: Path, num: int) -> None:
    """A small data set of the first `num` pictures of `source`, as links."""
    for folder, suffix in (("images", ".jpg"), ("annotations", ".xml")):
        (target / folder).mkdir(parents=True)
        for path in sorted((source / folder).glob(f"*{suffix}"))[:num]:
            (target / folder / path.name).symlink_to(path.resolve())
    table = (source / "train_val_test_split.csv").read_text("utf-8").splitlines()
    stems = {path.stem for path in (target / "images").iterdir()}
    kept = [table[0], *(line for line in table[1:] if line.split(",")[0] in stems)]
    (target / "train_val_test_split.csv").write_text("\n".join(kept) + "\n", "utf-8")


def measure(source: Path, scratch: Path, workers: int, rounds: int) -> dict[str, Measured]:
    """All rounds of both workloads over the pictures of `source`."""
    tasks: list[Task] = []
    for path in sorted((source / "images").glob("*.jpg")):
        tasks.append((path, probe(path.read_bytes(), max_pixels=MAX_PIXELS)))
    few = 2 * workers
    if len(tasks) < 10 * few:
        raise ValueError(f"{source}: {len(tasks)} pictures, expected at least {10 * few} for {workers} workers")
    link_first(source, scratch / "few", few)
    results = {name: Measured(len(tasks), few) for name in WORKLOADS}
    for name, flags in WORKLOADS.items():  # one after the other: what one has left to the disk slows the first builds of the next
        for number in range(rounds):
            m = results[name]
            m.few_s.append(build_seconds(scratch / "few", scratch / "out", flags, workers, Peaks()))
            m.whole_s.append(build_seconds(source, scratch / "out", flags, workers, m.peaks))
            m.few_s.append(build_seconds(scratch / "few", scratch / "out", flags, workers, Peaks()))
            m.loop.append(loop_rate(name, tasks, workers))
            start_up = " and ".join(f"{s:.1f}" for s in m.few_s[-2:])
            print(f"round {number}, {name}: build {m.whole_s[-1]:.1f} s, start-up {start_up} s, loop {m.loop[-1]:.0f} img/s", flush=True)
    return results


def measure_in(source: Path, folder: Path, workers: int, rounds: int) -> dict[str, Measured]:
    """`measure` with a scratch folder that is removed afterwards."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="pack-rate-", dir=folder) as scratch:
        return measure(source, Path(scratch), workers, rounds)


def rows_of(m: Measured) -> list[dict[str, Any]]:
    """A workload as rows of `report`: the build, then its loop."""
    builds = m.build()
    ratios = [build / loop for build, loop in zip(builds, m.loop, strict=True)]
    common: dict[str, Any] = {"venv": "main", "note": "", "per_cpu_s": None, "read_bytes": None}
    return [
        {**common, "name": "pack build", "role": "ours", "rates": builds, "peak_mb": m.peaks.main + m.peaks.worker},
        {
            **common,
            "name": "bare loop of the same calls",
            "role": "ceiling",
            "rates": m.loop,
            "peak_mb": None,
            "ratio": statistics.median(ratios),
            "ratio_low": min(ratios),
            "ratio_high": max(ratios),
            "target": None,
        },
    ]


def show(results: dict[str, Measured]) -> None:
    table = Table("workload", "build, img/s", "loop, img/s", "build / loop", "lowest to highest", "peak MB, main", "peak MB, worker")
    for name, m in results.items():
        builds = m.build()
        ratios = [build / loop for build, loop in zip(builds, m.loop, strict=True)]
        table.add_row(
            name,
            f"{statistics.median(builds):.0f}",
            f"{statistics.median(m.loop):.0f}",
            f"{statistics.median(ratios):.2f}",
            f"{min(ratios):.2f} to {max(ratios):.2f}",
            f"{m.peaks.main:.0f}",
            f"{m.peaks.worker:.0f}",
        )
    Console(width=120).print(table)


def main() -> int:
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(description="Packing rate against bare loops of the same calls.")
    parser.add_argument("--data", type=Path, help="welding set to take instead of making one (VOC, images/*.jpg)")
    parser.add_argument("--num", type=int, default=2000, help="pictures to make (default %(default)s)")
    parser.add_argument("--workers", type=int, default=cores, help="processes (default: one a core)")
    parser.add_argument("--rounds", type=int, default=3, help="medians over this many (default %(default)s)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pack-rate-") as folder:
        scratch = Path(folder)
        source = args.data or scratch / "raw"
        try:
            if args.data is None:
                make_welding(source, args.num, args.workers)
            show(measure(source, scratch, args.workers, args.rounds))
        except (ValueError, RuntimeError) as e:
            print(f"pack_rate: {e}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
