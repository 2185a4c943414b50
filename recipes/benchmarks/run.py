"""All benchmarks: the package against its peers, and against loops that do the unavoidable calls and nothing else.

    python recipes/benchmarks/run.py --install                      # virtual environments for the peers: minutes, several GB
    python recipes/benchmarks/run.py                                # everything: about an hour on two cores
    python recipes/benchmarks/run.py memmap224 tar32 --rounds 3
    python recipes/benchmarks/run.py --list
    python recipes/benchmarks/run.py --readme                       # put the last results into README.md

How it is measured. Each loader is a process of its own, in its own virtual environment where it needs one, and waits until it is told to
load. One runs at a time, some seconds each, by turns; so imports, compilation and warm-up are not counted, and a slow minute of the machine
hits all of them. Before that each gives one epoch that is looked at in full: number of samples, sum of labels, and sum of pixels where the
same pixels are due. Ratios are taken round by round. All get the same pictures (in the page cache), batch size, augmentation, and number of
threads or worker processes. Real photographs are taken from ``--data``; without it pictures are generated.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import large_sets
import pack_rate
import report
from contest import load_average, measure, wait_until_quiet
from data import Data
from venvs import WANTED, install, python_of, usable, versions
from workloads import WORKLOADS

ROOT = Path(__file__).parent.parent.parent
FACTS = {
    "open": ("a data set of 1,000,000 samples in 500 shards", large_sets.open_large),
    "flat": ("memory over 20 epochs of CIFAR, batch 512", large_sets.flat_memory),
}
OURS = ("shardpack", "torch", "numpy", "opencv-python-headless", "simplejpeg", "webdataset")
QUIET_LOAD = 0.3
TITLES = {
    **{name: workload.title for name, workload in WORKLOADS.items()},
    **{name: title for name, (title, _) in FACTS.items()},
    "pack": "pack build of 1600x1200 weld pictures, against loops of the same decode and encode calls",
}


def machine() -> dict[str, Any]:
    """What the figures depend on, without the name of the host."""
    cpu = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text("utf-8"), re.MULTILINE)
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": cpu[1] if cpu else platform.processor() or platform.machine(),
        "memory_gb": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9,
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
    }


def pack_workloads(data: Data, rounds: int) -> dict[str, Any]:
    """`pack_rate`'s two, in the form of contests."""
    source = data.cached(f"pack-raw-{data.count(2000, 1)}", lambda path: pack_rate.make_welding(path, data.count(2000, 1), data.workers))
    scratch = data.bench / "pack-scratch"
    found: dict[str, Any] = {}
    for name, measured in pack_rate.measure_in(source, scratch, data.workers, rounds).items():
        found[f"pack-{name}"] = {"title": f"pack build, {name}: 1600x1200 weld pictures", "rows": pack_rate.rows_of(measured)}
    return found


def one(name: str, data: Data, rounds: int, seconds: float) -> dict[str, Any]:
    """Measure a workload and print its table: name -> title and rows or facts."""
    print(f"{name}: {TITLES[name]} (load average {load_average():.2f})", flush=True)
    found: dict[str, Any]
    if name in FACTS:
        title, make = FACTS[name]
        found = {name: {"title": title, "facts": make(data, rounds)}}
    elif name == "pack":
        found = pack_workloads(data, rounds)
    else:
        contestants = WORKLOADS[name].contestants(data)
        if not contestants:
            print("  left out: it needs the program jpegtran (libjpeg-turbo-progs)", flush=True)
            return {}
        logs = data.bench / "logs" / name
        logs.mkdir(parents=True, exist_ok=True)
        pythons = {venv: python_of(data.bench, venv) for venv in ("main", *WANTED)}
        found = {name: {"title": TITLES[name], "rows": report.rows_of(measure(contestants, pythons, logs, rounds, seconds))}}
    for workload in found.values():
        (report.show if "rows" in workload else report.show_facts)(workload["title"], workload.get("rows") or workload["facts"])
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Benchmarks of loading and packing, against peers and bare loops.")
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help="which ones (default: all); see --list")
    parser.add_argument("--list", action="store_true", help="print the workloads and end")
    parser.add_argument("--install", action="store_true", help="make the peers' virtual environments and end")
    parser.add_argument("--readme", action="store_true", help="put the last results into README.md and end")
    parser.add_argument(
        "--bench-dir", type=Path, default=ROOT / ".bench", help="environments, data and results (default .bench in the clone)"
    )
    parser.add_argument(
        "--data", type=Path, help="folder with imagenet_241.tar and cifar10_12k.tar: real pictures instead of generated ones"
    )
    parser.add_argument("--rounds", type=int, default=5, help="medians over this many (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each loader in a round (default %(default)s)")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="threads or processes (default: one a core)")
    parser.add_argument("--short", action="store_true", help="small data, one short round: whether it runs, not how fast")
    parser.add_argument("--no-peers", action="store_true", help="leave out what needs another virtual environment")
    args = parser.parse_args()
    if unknown := sorted(set(args.workloads) - set(TITLES)):
        parser.error(f"no workload {', '.join(unknown)}; there are {', '.join(TITLES)}")
    return args


def measure_all(args: argparse.Namespace, bench: Path) -> dict[str, Any]:
    """Everything that was asked for, in the form of ``results.json``."""
    packages = [group[0] for groups in WANTED.values() for group in groups[1:]]
    missing = dict.fromkeys(packages, "left out by --no-peers") if args.no_peers else usable(bench)
    rounds, seconds = (1, 0.2) if args.short else (args.rounds, args.seconds)
    data = Data(bench, args.data.absolute() if args.data else None, args.workers, 0.02 if args.short else 1.0, missing)
    if not args.short and (load := wait_until_quiet(QUIET_LOAD, 120)) > QUIET_LOAD:
        print(f"the load average is {load:.2f}: other processes run, and these figures will not be good ones", file=sys.stderr)
    workloads: dict[str, Any] = {}
    for name in args.workloads or list(TITLES):
        workloads |= one(name, data, rounds, seconds)
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": machine(),
        "versions": {name: version(name) for name in OURS} | versions(bench, missing),
        "rounds": rounds,
        "seconds": seconds,
        "workers": args.workers,
        "missing": {name: reason for name, reason in missing.items() if reason},
        "workloads": workloads,
    }


def main() -> int:
    args = parse()
    bench: Path = args.bench_dir.absolute()
    if args.list:
        for name, title in TITLES.items():
            print(f"{name:<16} {title}")
        return 0
    bench.mkdir(parents=True, exist_ok=True)
    results = bench / "results.json"
    try:
        if args.install:
            install(bench)
        elif args.readme:
            report.update_readme(ROOT / "README.md", report.markdown(json.loads(results.read_text("utf-8"))))
        else:
            found = measure_all(args, bench)
            results.write_text(json.dumps(found, indent=1), "utf-8")
            (bench / "results.md").write_text(report.markdown(found), "utf-8")
            print(f"written: {results} and {bench / 'results.md'}")
    except (ValueError, RuntimeError, OSError) as e:
        print(f"run: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
