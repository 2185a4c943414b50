"""The fuzz harness: that it sees faults of each kind, a short run of all targets, and every input that ever failed."""

from __future__ import annotations

import gzip
import importlib
import lzma
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROBUSTNESS = Path(__file__).parent.parent / "recipes" / "robustness"

CRASH_TARGET = """
import os
from fuzz_target import Target

def dies(scratch):
    return Target("dies", lambda data: os.abort() if data == b"die" else data, (), [b"die"])

def raises(scratch):
    return Target("raises", lambda data: {}["no"] if b"7" in data else len(data), (), [b"seed 123"])
"""


@pytest.fixture
def fuzz(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROBUSTNESS))
    return importlib.import_module("fuzz")


@pytest.fixture
def bounded() -> Iterator[None]:
    """An input that once hung must not hang the tests."""

    def expired(*_: object) -> None:
        raise TimeoutError("no end after 60 s")

    before = signal.signal(signal.SIGALRM, expired)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def run_fuzz(*args: object, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(path or "")}
    command = [sys.executable, str(ROBUSTNESS / "fuzz.py"), *map(str, args)]
    return subprocess.run(
        command, capture_output=True, text=True, errors="backslashreplace", timeout=500, env=env, stdin=subprocess.DEVNULL
    )


# Every input that failed once: (target, input, what comes out now)

_BLOCK = 512


def tar_header(size_field: bytes, name: bytes = b"a.jpg", kind: bytes = b"0") -> bytes:
    """A tar header with a right checksum; `size_field` has 12 bytes."""
    header = bytearray(name.ljust(100, b"\0") + b"0000644\0" + b"0000000\0" * 2 + size_field + b"00000000000\0" + b" " * 8 + kind)
    header += bytes(257 - len(header)) + b"ustar\x0000"
    header += bytes(_BLOCK - len(header))
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header)


_PLAIN_TAR = tar_header(b"00000000003\0", b"a.cls") + b"3".ljust(_BLOCK, b"\0") + bytes(2 * _BLOCK)

FOUND: dict[str, tuple[str, bytes, str]] = {
    # `_GuardedTar` stepped backwards over a negative size, for ever.
    "negative tar size": ("foreign-tar", b"\0" + tar_header(b"\xff" * 11 + b"\0") + bytes(4 * _BLOCK), "damaged tar header: a size of -"),
    # A name that is not UTF-8 made a message that could not be printed.
    "name of no encoding": ("foreign-tar", b"\0" + tar_header(b"\xff" * 12, b"\xd9.jpg") + bytes(4 * _BLOCK), "\\udcd9.jpg: damaged"),
    # zlib's and lzma's own errors went through; bzip2's is an OSError.
    "damaged gzip": ("foreign-tar", b"\1" + gzip.compress(_PLAIN_TAR, mtime=0)[:12] + b"\xff" * 40, "cannot be read"),
    "damaged xz": ("foreign-tar", b"\3" + lzma.compress(_PLAIN_TAR)[:24] + b"\xff" * 60, "cannot be read"),
    # `tarfile` looks for gzip inside, too, and stumbles with a TypeError over its end.
    "gzip in a tar's place": ("foreign-tar", b"\0\x1f\x8b\x08\x04" + bytes(6), "is compressed by gzip"),
    # Infinity was accepted as a number.
    "infinity in a manifest": ("manifest", b'{"format_version": Infinity}', "Infinity is no JSON number"),
    # A name of 250 kB made a message of 250 kB.
    "long name in a split list": ("voc-splits", b"\1" + b"\1" * 60_000, "Listing("),
}


@pytest.mark.parametrize("name", FOUND)
@pytest.mark.usefixtures("bounded")
def test_inputs_that_failed_once(name: str, fuzz: ModuleType, tmp_path: Path) -> None:
    target, data, expected = FOUND[name]
    execute_twice = importlib.import_module("fuzz_target").execute_twice
    assert expected in execute_twice(fuzz.open_target(target, tmp_path), data)


# The harness itself


@pytest.mark.slow
@pytest.mark.long
def test_all_targets_for_a_while(tmp_path: Path) -> None:
    seed = 2  # a change must fail for its own faults, not by luck; longer runs by hand take others
    done = run_fuzz("--seconds", 25, "--seed", seed, "--failures", tmp_path)
    assert done.returncode == 0, f"seed {seed}\n{done.stdout}{done.stderr}"
    lines = done.stdout.splitlines()
    assert len(lines) == 10
    assert all(line.endswith(" 0 failures") for line in lines)


def test_a_process_that_dies_is_a_failure_with_its_input(tmp_path: Path) -> None:
    (tmp_path / "crash_target.py").write_text(CRASH_TARGET)
    done = run_fuzz("--target", "crash_target:dies", "--seconds", 1, "--failures", tmp_path / "kept", path=tmp_path)
    assert done.returncode == 1
    assert "1 failures" in done.stdout
    assert f"ended with status -{signal.SIGABRT.value}" in done.stdout
    [kept] = (tmp_path / "kept").iterdir()
    assert kept.read_bytes() == b"die"


def test_an_exception_is_kept_once_and_can_be_reproduced(tmp_path: Path) -> None:
    (tmp_path / "crash_target.py").write_text(CRASH_TARGET)
    args = ("--target", "crash_target:raises", "--failures", tmp_path / "kept")
    done = run_fuzz(*args, "--seconds", 1, "--seed", 5, path=tmp_path)
    assert done.returncode == 1
    assert "1 failures" in done.stdout
    assert "KeyError: 'no'" in done.stdout
    assert "(seed 5)" in done.stdout
    [kept] = (tmp_path / "kept").iterdir()
    assert b"7" in kept.read_bytes()
    again = run_fuzz(*args, "--reproduce", kept, path=tmp_path)
    assert again.returncode == 1
    assert "KeyError: 'no'" in again.stderr


def test_what_counts_as_a_failure(fuzz: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fuzz.TARGETS
    harness = importlib.import_module("fuzz_target")

    def outcome(run: Callable[[bytes], object], errors: tuple[type[Exception], ...] = (ValueError,)) -> str:
        return str(harness.execute_twice(harness.Target("t", run, errors, [b""]), b"x"))

    def raises(error: Exception) -> Callable[[bytes], object]:
        def run(_: bytes) -> object:
            raise error

        return run

    assert outcome(len) == "1"
    assert outcome(raises(ValueError("said"))) == "ValueError: said"
    with pytest.raises(harness.Failure, match="KeyError: 'x'"):
        outcome(raises(KeyError("x")))
    with pytest.raises(harness.Failure, match="cannot be printed"):
        outcome(raises(ValueError("\ud800")))
    numbers = iter(range(9))
    with pytest.raises(harness.Failure, match="two runs differ"):
        outcome(lambda _: next(numbers))
    monkeypatch.setattr(harness, "MAX_GROWTH_BYTES", 1 << 22)
    with pytest.raises(harness.Failure, match="MiB, the limit is 4 MiB"):
        outcome(lambda _: len(b"x" * (_peak_bytes() + (64 << 20))))
    monkeypatch.setattr(harness, "MAX_SECONDS", -1.0)
    with pytest.raises(harness.Failure, match=r"s, the limit is -1.0 s"):
        outcome(len)


def _peak_bytes() -> int:
    resource = importlib.import_module("resource")
    return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * 1024


def test_the_mutator_is_a_function_of_its_seed_and_changes_things(fuzz: ModuleType) -> None:
    assert fuzz.MAX_FAILURES
    mutate = importlib.import_module("fuzz_mutate")
    corpus, repaired = [b'{"n": 12, "name": "x"}', b""], b"repaired"

    def inputs(seed: str) -> list[bytes]:
        mutator = mutate.Mutator(seed, corpus, [b"TOKEN"], lambda _: repaired)
        return [mutator.next() for _ in range(400)]

    made = inputs("1")
    assert made == inputs("1")
    assert made != inputs("2")
    assert 150 < made.count(repaired) < 250
    rest = {data for data in made if data != repaired}
    assert len(rest) > 80
    assert any(b"TOKEN" in data for data in rest)
    assert max(map(len, rest)) <= mutate.MAX_BYTES
