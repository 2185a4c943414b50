"""Virtual environments of the peers, made below the bench folder. What cannot be installed is recorded, and its rows are left out."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

TORCH = ["torch==2.14.1", "torchvision==0.29.1"]
# What is installed one after the other, so that one that fails leaves the others alone. FFCV is built from source, against OpenCV and
# libturbojpeg of the system, with the numpy that its pins allow.
WANTED: dict[str, list[list[str]]] = {
    "peers": [[*TORCH, "numpy", "opencv-python-headless"], ["mosaicml-streaming"], ["litdata"], ["nvidia-dali-cuda120"]],
    "ffcv": [[*TORCH, "numpy", "pillow", "pandas"], ["ffcv"]],
}
SYSTEM = ("opencv4", "libturbojpeg")
MODULES = {"mosaicml-streaming": "streaming", "litdata": "litdata", "nvidia-dali-cuda120": "nvidia.dali", "ffcv": "ffcv.loader"}


def python_of(bench: Path, venv: str) -> Path:
    """The interpreter of "main" (this one), "peers" or "ffcv"."""
    return Path(sys.executable) if venv == "main" else bench / venv / "bin" / "python"


def install(bench: Path) -> None:
    """Make what is missing; takes minutes and several GB."""
    for venv, groups in WANTED.items():
        python = python_of(bench, venv)
        if not python.exists():
            subprocess.run([sys.executable, "-m", "venv", str(bench / venv)], check=True)
        for group in groups:
            print(f"{venv}: pip install {' '.join(group)}", flush=True)
            failure = _system_lacks() if group == ["ffcv"] else ""
            if not failure:
                done = subprocess.run([python, "-m", "pip", "install", "--quiet", *group], capture_output=True, text=True)
                failure = "\n".join(done.stderr.splitlines()[-20:]) if done.returncode else ""
            _record(bench, group[0], failure)
            if failure:
                print(f"{group[0]}: not installed: {failure}", flush=True)


def _system_lacks() -> str:
    config = shutil.which("pkg-config")
    if config and not subprocess.run([config, "--exists", *SYSTEM]).returncode:
        return ""
    return "FFCV is built against the system's libraries; on Debian: apt-get install libopencv-dev libturbojpeg0-dev pkg-config"


def _record(bench: Path, name: str, failure: str) -> None:
    path = bench / "installs.json"
    said: dict[str, str] = json.loads(path.read_text("utf-8")) if path.exists() else {}
    path.write_text(json.dumps({**said, name: failure}, indent=1), "utf-8")


def usable(bench: Path) -> dict[str, str]:
    """Package -> why it cannot be used, empty where it can; each is imported once, in its own environment."""
    path = bench / "installs.json"
    said: dict[str, str] = json.loads(path.read_text("utf-8")) if path.exists() else {}
    found: dict[str, str] = {}
    for venv, groups in WANTED.items():
        python = python_of(bench, venv)
        for package in (group[0] for group in groups[1:]):
            if not python.exists():
                found[package] = "its virtual environment was not made: run.py --install"
                continue
            done = subprocess.run([python, "-c", f"import {MODULES[package]}"], capture_output=True, text=True)
            found[package] = "" if not done.returncode else said.get(package) or done.stderr.strip().splitlines()[-1]
    return found


def versions(bench: Path, usable_packages: dict[str, str]) -> dict[str, str]:
    """Package -> installed version, of those that can be used."""
    wanted = {venv: [g[0] for g in groups[1:] if not usable_packages[g[0]]] for venv, groups in WANTED.items()}
    code = "import sys; from importlib.metadata import version; print(*(version(p) for p in sys.argv[1:]))"
    found: dict[str, str] = {}
    for venv, packages in wanted.items():
        if packages:
            done = subprocess.run([python_of(bench, venv), "-c", code, *packages], capture_output=True, text=True, check=True)
            found.update(zip(packages, done.stdout.split(), strict=True))
    return found
