"""Trains in forked children, interrupts each as Ctrl-C does, and prints a JSON line of what was left behind: for test_loading_faults.

    python interrupted_training.py DATA TRIALS

DATA holds `tar` and `memmap`, packed detection data. Forked, since importing torch takes longer than a trial.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import DataLoader

from loaders.batches import BatchLoader
from loaders.collate import collate_list
from loaders.memmap import MemmapDataset
from loaders.shards import ShardDataset, ShardStream

INTERRUPTED, THREADS_LEFT = 77, 78
SECONDS = 20.0
"""Longest wait for a child; far more than it needs, since the machine may be busy."""


def slowly(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    time.sleep(0.001 * rng.random())
    return sample


def batch_loader(ds: Any, workers: int) -> Iterator[Any]:
    loader = BatchLoader(ds, 4, workers=workers)
    while True:
        yield from loader


def torch_loader(ds: Any, workers: int) -> Iterator[Any]:
    while True:
        yield from DataLoader(ds, 4, num_workers=workers, collate_fn=collate_list)


def broken_off(ds: Any) -> Iterator[Any]:
    """Iterators that are dropped half way, again and again."""
    while True:
        for number, batch in enumerate(BatchLoader(ds, 4, workers=3)):
            yield batch
            if number == 3:
                break


def kinds(data: Path) -> dict[str, Callable[[], Iterator[Any]]]:
    tar, memmap = data / "tar", data / "memmap"
    return {
        "tar, 0 threads": lambda: batch_loader(ShardDataset(tar), 0),
        "tar, 2 threads": lambda: batch_loader(ShardDataset(tar), 2),
        "tar, transform, 4 threads": lambda: batch_loader(ShardDataset(tar, transform=slowly), 4),
        "memmap, 2 threads": lambda: batch_loader(MemmapDataset(memmap), 2),
        "memmap, transform, 4 threads": lambda: batch_loader(MemmapDataset(memmap, transform=slowly), 4),
        "broken off": lambda: broken_off(ShardDataset(tar, transform=slowly)),
        "stream": lambda: torch_loader(ShardStream(tar), 0),
        "stream, 2 workers": lambda: torch_loader(ShardStream(tar, transform=slowly), 2),
        "foreign, 1 worker": lambda: torch_loader(ShardStream(str(tar / "train/shard-*.tar"), transform=without_parts), 1),
        "torch, 0 workers": lambda: torch_loader(ShardDataset(tar), 0),
        "torch, 2 workers": lambda: torch_loader(ShardDataset(tar, transform=slowly), 2),
        "torch, memmap, 2 workers": lambda: torch_loader(MemmapDataset(memmap, transform=slowly), 2),
    }


def without_parts(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {"image": slowly(sample, rng)["image"], "index": sample["index"]}


def train(batches: Callable[[], Iterator[Any]], ready: int) -> None:
    interrupted = False
    try:
        os.write(ready, b"!")
        for number, batch in enumerate(batches()):
            batch["image"].float().mean()
            if number == 0:
                os.write(ready, b"!")
    except KeyboardInterrupt:
        interrupted = True
    # Outside the handler: the traceback that held the iterator is gone.
    gc.collect()
    held = [t.name for t in threading.enumerate() if t.name.startswith("loaders-")]
    sys.exit(THREADS_LEFT if held else INTERRUPTED if interrupted else 1)


def session_processes(session: int) -> list[int]:
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == session and fields[0] != "Z":
                found.append(int(entry))
    return found


def wait_for(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.005)
    return False


def files_left(before: tuple[set[str], set[str]], pid: int, torchs_own: bool) -> list[str]:
    """What was not there before. Not counted: an empty folder of `multiprocessing`, which an interrupt can part from the note to remove it
    (in CPython, between two lines); and, where torch's workers run, memory that torch has just named and not unlinked yet."""
    shared = set(os.listdir("/dev/shm")) - before[0]
    temporary = set(os.listdir(tempfile.gettempdir())) - before[1]
    for name in list(temporary):
        if name.startswith("pymp-"):
            with contextlib.suppress(OSError):
                os.rmdir(Path(tempfile.gettempdir(), name))
                temporary.remove(name)
    ours = (f"torch_{pid}_", f"psm_{pid}") if not torchs_own else (f"psm_{pid}",)
    return sorted([name for name in shared if name.startswith(ours)] + list(temporary))


def trial(name: str, batches: Callable[[], Iterator[Any]], first: bool, delay: float) -> dict[str, Any]:
    """`first`: the interrupt comes before the first batch, else after it."""
    before = set(os.listdir("/dev/shm")), set(os.listdir(tempfile.gettempdir()))
    reading, ready = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        train(batches, ready)
        sys.exit(1)
    os.close(ready)
    for _ in range(1 if first else 2):
        os.read(reading, 1)
    time.sleep(delay)
    start = time.monotonic()
    os.killpg(pid, signal.SIGINT)  # as a terminal does: all processes of the group
    status: list[int] = []

    presses = 1

    def ended() -> bool:
        nonlocal presses
        # CPython swallows an interrupt that falls into a hook of fork(). So while torch starts its workers Ctrl-C may take two presses.
        if "worker" in name and presses < 3 and time.monotonic() - start > 4 * presses:
            presses += 1
            os.killpg(pid, signal.SIGINT)
        done, code = os.waitpid(pid, os.WNOHANG)
        status.extend([os.waitstatus_to_exitcode(code)] if done else [])
        return bool(done)

    faults = []
    if not wait_for(ended):
        faults.append("still runs")
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    elif status != [INTERRUPTED] and not ("worker" in name and status == [1]):  # torch may raise that its worker was interrupted
        faults.append(f"exit status {status[0]}")
    seconds = time.monotonic() - start
    if not wait_for(lambda: not session_processes(pid)):
        faults.append("processes are left")
        for left in session_processes(pid):
            os.kill(left, signal.SIGKILL)
    os.close(reading)
    left = files_left(before, pid, torchs_own="worker" in name)
    if left:
        faults.append(f"files are left: {left}")
    return {"kind": name, "first": first, "delay": round(delay, 4), "seconds": round(seconds, 3), "presses": presses, "faults": faults}


def main() -> None:
    data, trials = Path(sys.argv[1]), int(sys.argv[2])
    moments = random.Random(0)
    gc.freeze()  # a child that collects would copy all pages of torch's objects
    for number in range(trials):
        for name, batches in kinds(data).items():
            sys.stdout.write(json.dumps(trial(name, batches, number % 2 == 0, moments.random() * 0.15)) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
