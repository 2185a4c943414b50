"""Packed sets for the robustness harnesses, what verifying says of them, and one that can be damaged and put back."""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from raw_sets import folders, tree, voc

from packer.build import build
from packer.engines.local import LocalEngine
from packer.problems import Problem, as_json
from packer.recipe import load_recipe
from packer.verify import verify

SMALL: dict[str, Any] = {"shard_samples": 4}
GRID: dict[str, Any] = {"resize": "64x48"}
SETS: dict[str, tuple[str, dict[str, Any]]] = {
    "tar-detection": ("voc", {"output": SMALL}),
    "tar-restart-grid": ("voc", {"output": {**SMALL, "image": "jpg"}, "transform": {"resize": "64"}}),
    "tar-classes": ("folders", {"output": SMALL}),
    "tar-unlabelled": ("pictures", {"output": {**SMALL, "image": "webp"}, "split": {"train": "0.7", "val": "0.3"}}),
    "memmap-detection": ("voc", {"output": {**SMALL, "format": "memmap"}, "transform": GRID}),
    "memmap-classes": ("folders", {"output": {**SMALL, "format": "memmap", "dtype": "float16"}, "transform": GRID}),
}


class Silent:
    """A `packer.run.Console` that says nothing."""

    def say(self, text: str) -> None: ...

    def finding(self, text: str) -> None: ...

    @contextlib.contextmanager
    def progress(self, title: str, total: int) -> Iterator[Callable[[int], None]]:  # noqa: ARG002  the protocol's names
        yield lambda _: None


def pack(src: Path, out: Path, tables: dict[str, Any], *, overwrite: bool = False) -> None:
    """Build in this process.

    Raises:
        SystemExit: it could not.
    """
    outcome = build(src, out, load_recipe(None, {**tables, "run": {"workers": 1}}), Silent(), overwrite=overwrite)
    if not outcome.ok:
        raise SystemExit(f"{out}: {outcome.message}")


def problems_of(root: Path, quick: bool = False) -> list[dict[str, Any]]:
    """What the library finds, as ``pack verify --json`` says it."""
    found: list[Problem] = verify(root, LocalEngine(1), quick=quick, progress=Silent().progress)
    return list(as_json(found)["problems"])


def problems_by_command(root: Path) -> list[dict[str, Any]]:
    """What the command finds; its exit status must agree."""
    done = subprocess.run(
        [sys.executable, "-m", "packer.cli", "verify", str(root), "--json"], capture_output=True, text=True, timeout=120, check=False
    )
    said = json.loads(done.stdout)
    errors = any(p["level"] == "error" for p in said["problems"])
    if (done.returncode, said["ok"]) != (int(errors), not errors):
        raise AssertionError(f"exit status {done.returncode}, ok is {said['ok']}, problems: {said['problems']}")
    return list(said["problems"])


def sources(folder: Path) -> None:
    """Make the raw sets that `SETS` name, below `folder`."""
    voc(folder / "voc", 25)
    folders(folder / "folders", 20, splits=("train", "val"))
    folders(folder / "pictures", 16, classes=("",))


@dataclass
class Mutant:
    """A packed set that may be damaged and put back. `files`: what it holds, path -> bytes; README.md is none of it."""

    root: Path
    whole: dict[str, bytes | None]
    rng: random.Random
    files: list[str] = field(init=False)
    manifest: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.files = sorted(name for name, data in self.whole.items() if data is not None and name != "README.md")
        self.manifest = json.loads(self.whole["manifest.json"] or b"")

    def bytes_of(self, name: str) -> bytes:
        return self.whole[name] or b""

    def pick(self, at_least: int = 0) -> str:
        return self.rng.choice([name for name in self.files if len(self.bytes_of(name)) >= at_least])

    def shards(self) -> list[dict[str, Any]]:
        return [shard for split in self.manifest["splits"].values() for shard in split["shards"]]

    def put_back(self) -> None:
        """Undo whatever was done."""
        now = tree(self.root)
        for name in sorted(now.keys() - self.whole.keys(), reverse=True):
            path = self.root / name
            if path.is_symlink() or not path.is_dir():
                path.unlink()
            else:
                path.rmdir()
        for name, data in self.whole.items():
            path = self.root / name
            if path.is_symlink() or (data is not None and path.is_dir()):
                path.unlink() if path.is_symlink() else path.rmdir()
            if data is None:
                path.mkdir(exist_ok=True)
            elif not path.is_file() or path.read_bytes() != data:
                path.write_bytes(data)


@dataclass(frozen=True)
class Damage:
    """What was done, and which files a problem must name: one of each tuple of `named`."""

    says: str
    named: tuple[tuple[str, ...], ...]
