"""Feeds damaged and hostile bytes to every reader of this toolkit: nothing but a result or a documented error may come out.

    python recipes/robustness/fuzz.py --seconds 60                          # all targets, 60 s together, nothing to install
    python recipes/robustness/fuzz.py --seconds 600 --engine atheris --target csv   # guided by coverage; needs `pip install atheris`
    python recipes/robustness/fuzz.py --target csv --reproduce failures/csv-0123456789ab.bin

Any other exception, a dead process, two runs that differ, more than 1 GiB or more than 10 s is a failure: the input is saved, the exit
status is 1. Each target runs in a process of its own, so that a crash of a decoder is seen, too.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import json
import mmap
import os
import re
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
TARGETS = {
    "voc-xml": "fuzz_raw:voc_xml",
    "voc-splits": "fuzz_raw:voc_splits",
    "csv": "fuzz_raw:csv_table",
    "image": "fuzz_raw:image",
    "jpeg": "fuzz_raw:jpeg",
    "manifest": "fuzz_packed:manifest",
    "index": "fuzz_packed:index",
    "shard": "fuzz_packed:shard",
    "foreign-tar": "fuzz_packed:foreign_tar",
    "meta": "fuzz_packed:meta",
}
MAX_FAILURES = 20
"""Different ones of a target, after which it is left."""
HANG_S = 120.0
_MAX_CORPUS = 2000
_SLOT = 1 << 21


@dataclass
class Result:
    """What came of a target. `failures`: (message, file with the input). `seconds`: spent in it."""

    target: str
    executions: int = 0
    seconds: float = 0.0
    failures: list[tuple[str, str]] = field(default_factory=list)


def open_target(name: str, scratch: Path) -> Any:
    """The `fuzz_target.Target` of this name (or of ``module:function``); what it writes goes below `scratch`, an empty folder."""
    for folder in (HERE, ROOT):
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    module, _, function = TARGETS.get(name, name).partition(":")
    return getattr(importlib.import_module(module), function)(scratch)


def save_input(folder: Path, target: str, data: bytes) -> str:
    """Keep an input under a name made of its bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{target.replace(':', '-')}-{hashlib.sha256(data).hexdigest()[:12]}.bin"
    path.write_bytes(data)
    return str(path)


class _Current:
    """The input at work, in a mapped file: it outlives the process."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as f:
            self._map = mmap.mmap(f.fileno(), _SLOT)

    def put(self, data: bytes) -> None:
        self._map[:8] = (0).to_bytes(8, "little")
        self._map[16 : 16 + len(data)] = data
        self._map[8:16] = (int.from_bytes(self._map[8:16], "little") + 1).to_bytes(8, "little")
        self._map[:8] = (len(data) + 1).to_bytes(8, "little")

    def get(self) -> tuple[int, bytes | None]:
        """(how many inputs began, the last one)."""
        size = int.from_bytes(self._map[:8], "little")
        return int.from_bytes(self._map[8:16], "little"), self._map[16 : 15 + size] if size else None


def run_builtin(name: str, seconds: float, seed: int, failures: Path, current: _Current, scratch: Path) -> Result:
    """Fuzz one target in this process with the built-in mutator. Inputs that give a new kind of outcome are mutated further."""
    target = open_target(name, scratch)
    from fuzz_mutate import Mutator
    from fuzz_target import Failure, execute, execute_twice

    mutator = Mutator(f"{seed} {name}", target.seeds, target.tokens, target.repair)
    result, kinds, start = Result(name), set[str](), time.monotonic()
    waiting = list(target.seeds)
    while time.monotonic() - start < seconds or waiting:
        data = waiting.pop() if waiting else mutator.next()
        current.put(data)
        result.executions += 1
        try:
            outcome = (execute_twice if result.executions % 8 == 1 else execute)(target, data)
        except Failure as e:
            if (kind := _place(e) or _kind(str(e))) not in kinds:
                kinds.add(kind)
                trace = "".join(traceback.format_exception(e.__cause__)[-4:]) if e.__cause__ else ""
                result.failures.append((f"{e}\n{trace}", save_input(failures, name, data)))
                if len(result.failures) >= MAX_FAILURES:
                    break
            continue
        if (kind := _kind(outcome)) not in kinds and len(mutator.corpus) < _MAX_CORPUS:
            kinds.add(kind)
            mutator.corpus.append(data)
    result.seconds = time.monotonic() - start
    return result


def _place(failure: Exception) -> str:
    """Where in our code an exception passed last, "" for a failure without one."""
    frames = traceback.extract_tb(failure.__cause__.__traceback__ if failure.__cause__ else None)
    ours = [f for f in frames if Path(f.filename).parent != HERE and ROOT in Path(f.filename).parents]
    return f"{type(failure.__cause__).__name__} at {ours[-1].filename}:{ours[-1].lineno}" if ours else ""


def _kind(outcome: str) -> str:
    """An outcome without its numbers and quoted text: what makes it one of a kind."""
    return re.sub(r"'[^']*'|\"[^\"]*\"|[0-9]+|0x[0-9a-f]+|\S*/\S*|[^\x00-\x7f]+", "_", outcome)[:160]


def run_atheris(name: str, seconds: float, failures: Path, current: _Current, scratch: Path) -> None:
    """Fuzz one target in this process with atheris. Does not return: libFuzzer ends the process."""
    atheris: Any = importlib.import_module("atheris")  # wanted for this engine only
    with atheris.instrument_imports(include=["packer", "loaders"]):
        target = open_target(name, scratch)
    from fuzz_target import execute

    corpus, tokens = scratch.parent / "corpus", scratch.parent / "tokens"
    corpus.mkdir()
    for i, seed in enumerate(target.seeds):
        (corpus / f"seed{i}").write_bytes(seed)
    tokens.write_text("".join('"' + "".join(f"\\x{b:02x}" for b in token) + '"\n' for token in target.tokens))

    def one(data: bytes) -> None:
        current.put(data)
        execute(target, data)

    def mutate(data: bytes, size: int, seed: int) -> bytes:
        changed: bytes = atheris.Mutate(data, size)
        return target.repair(changed)[:size] if seed % 2 else changed

    options = [f"-max_total_time={int(seconds)}", f"-dict={tokens}", f"-artifact_prefix={failures / name}-"]
    options += ["-rss_limit_mb=4096", "-timeout=60", "-max_len=65536"]
    atheris.Setup([sys.argv[0], *options, str(corpus)], one, custom_mutator=mutate)
    atheris.Fuzz()


def run_target(name: str, seconds: float, seed: int, engine: str, failures: Path) -> Result:
    """Fuzz one target in a process of its own, and judge that process's end."""
    failures.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as folder:
        slot, log = Path(folder, "current"), Path(folder, "log")
        slot.touch()
        os.truncate(slot, _SLOT)
        Path(folder, "scratch").mkdir()
        current = _Current(slot)
        command = [sys.executable, __file__, "--child", folder, "--target", name, "--engine", engine]
        command += ["--seconds", str(seconds), "--seed", str(seed), "--failures", str(failures)]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "OPENCV_LOG_LEVEL": "OFF", "PYTHONWARNINGS": "ignore"}
        start = time.monotonic()
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=output, env=env)
            hung = _watch(process, current)
        text = log.read_text("utf-8", "replace")
        count, data = current.get()
        said = process.stdout.read() if process.stdout else b""
        with contextlib.suppress(ValueError, TypeError):
            result = Result(**json.loads(said.splitlines()[-1] if said.splitlines() else b""))
            result.failures = [(message, path) for message, path in result.failures]
            return result
        result = Result(name, count, time.monotonic() - start)
        if hung or process.returncode:
            reason = f"no end after {HANG_S:.0f} s" if hung else f"the process ended with status {process.returncode}"
            kept = save_input(failures, name, data) if data is not None else "no input: it failed before the first"
            result.failures.append((f"{reason}\n{text[-3000:]}", kept))
        return result


def _watch(process: subprocess.Popen[bytes], current: _Current) -> bool:
    """Wait for the process; True where it had to be killed, since no new input began for `HANG_S`."""
    seen, since = -1, time.monotonic()
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.2)
            return False
        count, _ = current.get()
        if count != seen:
            seen, since = count, time.monotonic()
        elif time.monotonic() - since > HANG_S:
            process.kill()
            process.wait()
            return True


def reproduce(name: str, path: Path) -> str:
    """Run one saved input, twice; the outcome. Raises what is wrong with it."""
    with tempfile.TemporaryDirectory() as folder:
        target = open_target(name, Path(folder))
        outcome: str = importlib.import_module("fuzz_target").execute_twice(target, path.read_bytes())
        return outcome


def _child(folder: Path, name: str, seconds: float, seed: int, engine: str, failures: Path) -> None:
    current = _Current(folder / "current")
    if engine == "atheris":
        run_atheris(name, seconds, failures, current, folder / "scratch")
    else:
        print(json.dumps(asdict(run_builtin(name, seconds, seed, failures, current, folder / "scratch"))))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="for all chosen targets together")
    parser.add_argument("--target", action="append", help=f"may be repeated; default: all of {', '.join(TARGETS)}")
    parser.add_argument("--seed", type=int, default=0, help="of the built-in mutator")
    parser.add_argument("--engine", choices=("builtin", "atheris"), default="builtin")
    parser.add_argument("--failures", type=Path, default=Path("fuzz-failures"), help="folder for inputs that fail")
    parser.add_argument("--reproduce", type=Path, metavar="FILE", help="run one saved input of one --target")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    names = args.target or list(TARGETS)
    if wrong := [name for name in names if name not in TARGETS and ":" not in name]:
        parser.error(f"--target {wrong[0]}: expected one of {', '.join(TARGETS)}")
    if args.reproduce and len(names) != 1:
        parser.error("--reproduce needs one --target")
    if args.child:
        _child(args.child, names[0], args.seconds, args.seed, args.engine, args.failures)
        return 0
    if args.reproduce:
        print(reproduce(names[0], args.reproduce))
        return 0
    failed = 0
    for name in names:
        result = run_target(name, args.seconds / len(names), args.seed, args.engine, args.failures)
        rate = result.executions / max(result.seconds, 1e-9)
        print(f"{name:12} {result.executions:9,} executions  {rate:8,.0f} a second  {len(result.failures)} failures", flush=True)
        for message, path in result.failures:
            failed += 1
            print(f"  {path} (seed {args.seed})\n    " + message.rstrip().replace("\n", "\n    "), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
