"""For the tests of building, verifying and the command line: a console that remembers, short ways to run, folders as values."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from loaders.format import canonical_json
from packer.build import build
from packer.recipe import load_recipe
from packer.run import Outcome

# (file name, bytes) or None for a folder
Tree = dict[str, bytes | None]


class Recorder:
    """A `packer.run.Console` that keeps what it is told."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.findings: list[str] = []
        self.passed: dict[str, tuple[int, int]] = {}

    def say(self, text: str) -> None:
        self.said.append(text)

    def finding(self, text: str) -> None:
        self.findings.append(text)

    @contextlib.contextmanager
    def progress(self, title: str, total: int) -> Iterator[Callable[[int], None]]:
        done = [0]

        def advance(n: int) -> None:
            done[0] += n
            self.passed[title] = (done[0], total)

        self.passed[title] = (0, total)
        yield advance

    @property
    def text(self) -> str:
        return "\n".join(self.said)


def run_build(src: Path, out: Path, console: Recorder | None = None, *, overwrite: bool = False, **tables: Any) -> Outcome:
    """Build in this process: ``run_build(src, out, output={"shard_samples": 4})``; one worker unless ``run`` says otherwise."""
    recipe = load_recipe(None, {**tables, "run": {"workers": 1, **tables.get("run", {})}})
    return build(src, out, recipe, console or Recorder(), overwrite=overwrite)


def pack_command(*args: object) -> list[str]:
    return [sys.executable, "-m", "packer.cli", *map(str, args)]


def pack(*args: object, cwd: Path | None = None, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """``pack ARGS`` in a process of its own. No traceback may ever come out of it."""
    root = str(Path(__file__).parent.parent)
    done = subprocess.run(
        pack_command(*args),
        capture_output=True,
        text=True,
        errors="backslashreplace",
        timeout=120,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": root, **(env or {})},
        stdin=subprocess.DEVNULL,
    )
    assert "Traceback" not in done.stderr + done.stdout or (env or {}).get("PACK_DEBUG"), done.stderr
    return done


def tree(root: Path) -> Tree:
    """Everything below a folder: path -> bytes, None for a folder."""
    return {p.relative_to(root).as_posix(): p.read_bytes() if p.is_file() else None for p in sorted(root.rglob("*"))}


def stamps(root: Path) -> dict[str, tuple[int, int]]:
    """Path -> (mtime, inode) of the folder and everything below it."""
    return {str(p): (p.lstat().st_mtime_ns, p.lstat().st_ino) for p in [root, *root.rglob("*")]}


def differences(a: Tree, b: Tree) -> list[str]:
    """Names of what is in one of the two only, or differs."""
    return sorted(name for name in a.keys() | b.keys() if a.get(name, b"?") != b.get(name, b"?"))


def change_byte(path: Path, offset: int, value: int) -> None:
    """Change one byte in place: `value` (1 to 255) is xored, so that it always changes."""
    with path.open("r+b") as f:
        f.seek(offset)
        old = f.read(1)[0]
        f.seek(offset)
        f.write(bytes([old ^ value]))


def sign_manifest(root: Path, raw: dict[str, Any]) -> None:
    """Write a manifest whose own checksum is right, whatever else it says."""
    body = {k: v for k, v in raw.items() if k != "self_sha256"}
    text = canonical_json({**body, "self_sha256": hashlib.sha256(canonical_json(body).encode("utf-8", "surrogatepass")).hexdigest()})
    (root / "manifest.json").write_bytes(text.encode("utf-8", "surrogatepass"))


def read_json(root: Path) -> dict[str, Any]:
    """The manifest as plain JSON."""
    raw: dict[str, Any] = json.loads((root / "manifest.json").read_text("utf-8"))
    return raw


def pixels(data: bytes) -> NDArray[np.uint8]:
    """uint8 [H, W, 3] RGB by OpenCV alone."""
    image = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)
    return np.ascontiguousarray(image[:, :, ::-1])
