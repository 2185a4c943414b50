"""What the workloads load: raw pictures and packed sets, made once and kept in the bench folder."""

from __future__ import annotations

import csv
import json
import os
import random
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path

import cv2
import numpy as np

from contest import HERE
from loaders.shards import ShardDataset
from venvs import python_of

RECIPES = HERE.parent
PHOTO_TAR, CIFAR_TAR = "imagenet_241.tar", "cifar10_12k.tar"
VIEWS = 400
"""Different pictures of a generated set of full size; more samples repeat them, as hard links."""


class Data:
    """Makes and finds data sets below ``bench/data``. A set is complete when its ``NAME.done`` is there.

    `given`: a folder with real pictures in `imagenet_241.tar` and `cifar10_12k.tar`; None: pictures are generated. `scale`: share of the
    full number of samples. `unusable`: package -> why, see `venvs.usable`.
    """

    def __init__(self, bench: Path, given: Path | None, workers: int, scale: float, unusable: dict[str, str]) -> None:
        self.bench = bench
        self.root = bench / "data"
        self.given = given
        self.workers = workers
        self.scale = scale
        self.unusable = unusable

    def count(self, full: int, batch: int) -> int:
        """A number of samples near ``full * scale`` that fills whole batches, at least four."""
        return max(4, round(full * self.scale / batch)) * batch

    def cached(self, name: str, make: Callable[[Path], None]) -> Path:
        target, done = self.root / name, self.root / f"{name}.done"
        if not done.exists():
            print(f"  making {name}", flush=True)
            self.root.mkdir(parents=True, exist_ok=True)
            if target.is_dir():
                shutil.rmtree(target)
            target.unlink(missing_ok=True)
            make(target)
            done.touch()
        return target

    # Raw pictures

    def photos(self, num: int) -> Path:
        """Class folders of `num` photographs of about 500x375 pixels and 110 kB."""
        return self._folders(f"photos-{num}", num, PHOTO_TAR, (375, 500))

    def cifar(self, num: int) -> Path:
        """Class folders of `num` JPEGs of 32x32 pixels."""
        return self._folders(f"cifar-{num}", num, CIFAR_TAR, (32, 32))

    def _folders(self, name: str, num: int, tar: str, size: tuple[int, int]) -> Path:
        if self.given is not None and not (self.given / tar).is_file():
            raise ValueError(f"{self.given / tar}: not found; without --data pictures are generated")
        kind = "generated" if self.given is None else "real"

        def make(target: Path) -> None:
            views = "real" if self.given else f"generated-{self._views()}"
            source = self.cached(f"{Path(tar).stem}-{views}", lambda path: self._originals(path, tar, size))
            _repeat(source, target, num)

        return self.cached(f"{name}-{kind}", make)

    def _views(self) -> int:
        return max(16, round(VIEWS * self.scale))

    def _originals(self, target: Path, tar: str, size: tuple[int, int]) -> None:
        if self.given is None:
            _generate(target, size, self._views())
            return
        with tarfile.open(self.given / tar) as archive:
            for member in archive.getmembers():
                parts = Path(member.name).parts
                content = archive.extractfile(member) if member.isfile() and "train" in parts else None
                if content is not None:
                    path = target / parts[-2] / parts[-1]
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(content.read())

    def welding(self, num: int, size: str, quality: int = 90) -> Path:
        """Weld radiographs in Pascal VOC form, by `recipes/make_welding_v2.py`, all of them in the split train."""

        def make(target: Path) -> None:
            options = ["--num", num, "--size", size, "--quality", quality, "--workers", self.workers]
            _call([sys.executable, RECIPES / "make_welding_v2.py", target, *options])
            with (target / "train_val_test_split.csv").open("w", encoding="utf-8", newline="") as f:
                stems = sorted(path.stem for path in (target / "images").iterdir())
                csv.writer(f).writerows([("image_id", "split"), *((stem, "train") for stem in stems)])

        return self.cached(f"welding-{num}-{size}-{quality}", make)

    # Packed sets

    def pack(self, source: Path, kind: str, *flags: str) -> Path:
        """`pack build` of a raw set; `kind` is "folder" or "voc"."""
        how = ["--recipe", RECIPES / "welding_v2.toml"] if kind == "voc" else ["--source", kind]

        def make(target: Path) -> None:
            command = [Path(sys.executable).with_name("pack"), "build", "--quiet", "--workers", self.workers]
            _call([*command, *how, *flags, source, target])

        return self.cached(f"{source.name}-pack{''.join(flags).replace('--', '-')}", make)

    def unpacked(self, packed: Path) -> Path:
        """The pictures of a packed tar set as files in class folders."""

        def make(target: Path) -> None:
            ds = ShardDataset(packed)
            labels = ds.labels
            assert labels is not None
            for i, label in enumerate(labels.tolist()):
                path = target / "train" / ds.classes[label] / f"{i:06d}.jpg"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(ds.encoded(i))

        return self.cached(f"{packed.name}-files", make)

    def ffcv(self, source: Path, mode: str, max_resolution: int | None = None) -> Path | None:
        """FFCV's own file of a raw set (JPEG quality 90, or raw); None where FFCV cannot be used."""
        options = {"source": str(source), "mode": mode, "max_resolution": max_resolution, "quality": 90, "workers": self.workers}
        return self._foreign("ffcv", "ffcv", "peer_ffcv.py", "write", f"{source.name}-{mode}-{max_resolution}.beton", options)

    def mds(self, source: Path) -> Path | None:
        """mosaicml-streaming's shards of the original files."""
        options = {"source": str(source)}
        return self._foreign("mosaicml-streaming", "peers", "peer_streaming.py", "write_mds", f"{source.name}-mds", options)

    def litdata(self, source: Path) -> Path | None:
        """litdata's chunks of the original files."""
        return self._foreign("litdata", "peers", "peer_streaming.py", "write_litdata", f"{source.name}-litdata", {"source": str(source)})

    def _foreign(self, package: str, venv: str, script: str, verb: str, name: str, options: Mapping[str, object]) -> Path | None:
        if self.unusable.get(package, "unknown"):
            return None

        def make(target: Path) -> None:
            _call([python_of(self.bench, venv), HERE / script, verb, json.dumps({**options, "out": str(target)})])

        try:
            return self.cached(name, make)
        except RuntimeError as e:
            self.unusable[package] = f"it could not write its files: {str(e).splitlines()[-1][:300]}"
            return None


def _call(command: list[object]) -> None:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, cwd=HERE)
    if done.returncode:
        raise RuntimeError(f"{command[0]} exited with {done.returncode}: {done.stderr.strip()[-2000:]}")


def _generate(target: Path, size: tuple[int, int], count: int) -> None:
    """Pictures with the detail of photographs: a JPEG of quality 90 has about half a byte a pixel."""
    rng = np.random.default_rng(0)
    for number in range(count):
        image = np.zeros((*size, 3), np.float32)
        for octave in range(1, 8):
            cells = min(2**octave, *size)
            noise = rng.normal(0, 80 / octave, (cells, cells, 3)).astype(np.float32)
            image += cv2.resize(noise, size[::-1], interpolation=cv2.INTER_CUBIC)
        path = target / f"class{number % 10}" / f"{number:04d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(path), np.clip(image + 128, 0, 255).astype(np.uint8), [cv2.IMWRITE_JPEG_QUALITY, 90])


def _repeat(source: Path, target: Path, num: int) -> None:
    """`num` pictures below ``target/train/CLASS``, hard links to those of `source` where the file system has them."""
    paths = sorted(path for path in source.rglob("*") if path.is_file())
    random.Random(0).shuffle(paths)
    for number in range(num):
        path = paths[number % len(paths)]
        link = target / "train" / path.parent.name / f"{number:06d}.jpg"
        link.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(path, link)
        except OSError:
            shutil.copyfile(path, link)
