"""What verifying says, and what its parts share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from loaders.format import Manifest, sha256_file
from packer.findings import printable

MANY = 6
"""Problems of one code in one file from which on they are one line."""
REBUILD = "; the same pack build command again restores it"


@dataclass(frozen=True, slots=True)
class Problem:
    """`path` is below the data set's folder; `sample` a key and `source` a picture's name where the damage can be tied to one."""

    level: Literal["error", "warning"]
    code: str
    path: str
    message: str
    sample: int | None = None
    source: str | None = None


@dataclass(frozen=True, slots=True)
class ShardTask:
    """One shard to verify: `number` within its split, `start` the split's row of its first sample. `items` is for progress only."""

    split: str
    number: int
    start: int
    items: range


@dataclass(frozen=True, slots=True)
class VerifyContext:
    root: Path
    manifest: Manifest
    quick: bool


def file_problems(root: Path, name: str, num_bytes: int, sha256: str | None) -> Iterator[Problem]:
    """Whether a file is there, has its size and (unless None) its checksum. Of another kind of file (a pipe, ...) nothing is read."""
    path = root / name
    try:
        size = path.stat().st_size
        if path.is_dir():
            text = "is a folder where a file belongs; move it away, then the same pack build command again restores the file"
            yield Problem("error", "missing-file", name, text)
        elif not path.is_file():
            yield Problem("error", "missing-file", name, "is no regular file" + REBUILD)
        elif size != num_bytes:
            yield Problem("error", "wrong-size", name, f"{size:,} bytes, the manifest says {num_bytes:,}{REBUILD}")
        elif sha256 is not None and (found := sha256_file(path)) != sha256:
            yield Problem("error", "checksum", name, f"content was changed: sha256 is {found}, the manifest says {sha256}{REBUILD}")
    except (FileNotFoundError, NotADirectoryError):
        yield Problem("error", "missing-file", name, "is missing" + REBUILD)
    except OSError as e:
        yield Problem("error", "unreadable", name, f"cannot be read: {e.strerror}")


def cannot_verify(message: str) -> Problem:
    """There is nothing that could be looked at."""
    return Problem("error", "cannot-verify", ".", message)


def as_json(problems: list[Problem]) -> dict[str, Any]:
    """What ``pack verify --json`` prints."""
    fields = ("level", "code", "path", "sample", "source", "message")
    return {"ok": not any(p.level == "error" for p in problems), "problems": [{f: getattr(p, f) for f in fields} for p in problems]}


def as_line(problem: Problem) -> str:
    """One line for people."""
    sample = "" if problem.sample is None else f" sample {problem.sample:09d}"
    source = "" if problem.source is None else f" ({problem.source})"
    return printable(f"{problem.level}: {problem.path}{sample}{source}: {problem.message} ({problem.code})")


def as_lines(problems: Sequence[Problem]) -> Iterator[str]:
    """Lines for people: one a problem, in order. Where a file has `MANY` of a code (a cut shard: one for each sample), the first speaks
    for all, with their number.
    """
    same: defaultdict[tuple[str, str, str], list[Problem]] = defaultdict(list)
    for problem in problems:
        same[problem.level, problem.code, problem.path].append(problem)
    for problem in problems:
        group = same[problem.level, problem.code, problem.path]
        if len(group) < MANY:
            yield as_line(problem)
        elif problem is group[0]:
            yield f"{as_line(problem)}, and {len(group) - 1:,} more in this file: --json names all"
