"""Fuzz targets of packed data: manifest, index, shards, foreign tars, metadata."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import hashlib
import io
import json
import lzma
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fuzz_raw import picture
from fuzz_target import Failure, Target, choice
from PIL import Image

from loaders.codecs import DecodeError, decode_meta, encode_image
from loaders.dataset import PackedDataset, SampleError
from loaders.foreign import decode_parts, read_tar
from loaders.format import FormatError, canonical_json, manifest_text, read_manifest
from loaders.memmap import MemmapDataset
from loaders.shards import ShardDataset
from packer.build import build
from packer.engines.local import LocalEngine
from packer.info import describe
from packer.problems import Problem
from packer.recipe import load_recipe
from packer.verify import verify

ERRORS = (FormatError, SampleError)
_BLOCK = 512


class _Silent:
    """A `packer.run.Console` that says nothing."""

    def say(self, text: str) -> None: ...

    def finding(self, text: str) -> None: ...

    @contextlib.contextmanager
    def progress(self, _title: str, _total: int) -> Iterator[Callable[[int], None]]:
        yield lambda _: None


def _packed_sets(scratch: Path) -> dict[str, Path]:
    """A small detection set in both layouts, made by the real build."""
    raw = scratch / "raw"
    for i in range(5):
        for folder in ("images", "annotations"):
            (raw / folder).mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture(40 + i, 72)).save(raw / f"images/w{i}.png")
        box = f"<bndbox><xmin>{i}</xmin><ymin>1</ymin><xmax>30</xmax><ymax>20</ymax></bndbox>"
        xml = f"<annotation><filename>w{i}.png</filename>{('<object><name>slag</name>' + box + '</object>') * (i % 3)}</annotation>"
        (raw / f"annotations/w{i}.xml").write_text(xml)
    for layout in ("tar", "memmap"):
        output = {"format": layout, "shard_samples": 5, "image": "jpg" if layout == "tar" else "keep"}
        tables: dict[str, Any] = {"output": output, "run": {"workers": 1}}
        if layout == "memmap":
            tables["transform"] = {"resize": "24x16"}
        if not build(raw, scratch / layout, load_recipe(None, tables), _Silent()).ok:
            raise RuntimeError("the seed data set could not be packed")
    return {layout: scratch / layout for layout in ("tar", "memmap")}


def _verified(root: Path, *, quick: bool) -> list[Problem]:
    problems = verify(root, LocalEngine(1), quick=quick, progress=_Silent().progress)
    for problem in problems:
        problem.message.encode()
    return problems


def _use(dataset: PackedDataset) -> list[object]:
    """What a training run asks of a data set."""
    result: list[object] = [len(dataset), dataset.classes, dataset.fingerprint, dataset.image_size(), dataset.batch_fields()]
    for i in range(min(len(dataset), 5)):
        height, width = dataset.image_sizes()[i].tolist()
        asked: list[Callable[[], object]] = [lambda: dataset.load(i), lambda: dataset.meta(i), lambda: dataset.gather_ragged([i])]  # noqa: B023  called at once
        if height and width:
            asked.append(lambda: dataset.load_region(i, (height // 2, width // 2, 1, 1)))  # noqa: B023  called at once
        for ask in asked:
            try:
                result.append(ask())
            except ERRORS as e:
                result.append(str(e))
    return result


def _read_all(root: Path, layout: str, *, quick: bool) -> object:
    """Everything that reads a packed folder; each may refuse it for itself."""
    cls: type[PackedDataset] = ShardDataset if layout == "tar" else MemmapDataset
    problems = _verified(root, quick=quick)
    result: list[object] = [problems]
    for read in (lambda: list(describe(root)), lambda: _use(cls(root))):
        try:
            result.append(read())
        except ERRORS as e:
            result.append(str(e))
    return result


def manifest(scratch: Path) -> Target:
    """``manifest.json``, read by everything that reads it."""
    roots = _packed_sets(scratch)

    def run(data: bytes) -> object:
        layout = "memmap" if b'"layout": "memmap"' in data else "tar"
        root = roots[layout]
        (root / "manifest.json").write_bytes(data)
        try:
            read = read_manifest(root)
        except FormatError:
            if [p.code for p in _verified(root, quick=True)] != ["bad-manifest"]:
                raise Failure("verify does not name the manifest") from None
            raise
        if manifest_text(read).encode() != data:
            raise Failure("a manifest was accepted that is not written as it is read")
        return _read_all(root, layout, quick=True)

    seeds = [(root / "manifest.json").read_bytes() for root in roots.values()]
    tokens = (
        *(b'"../x"', b'"/etc/passwd"', b'"a\\\\b"', b'"\\u0000"', b"[[[[", b'{"a":', b"NaN"),
        *(b"1e999", b'"\\ud800"', b"\xef\xbb\xbf", b"null", b"[]", b"{}", b"-1"),
    )
    return Target("manifest", run, ERRORS, seeds, tokens, _sign)


def _sign(data: bytes) -> bytes:
    """A manifest in canonical form whose own checksum is right, where it is JSON at all."""
    try:
        raw = json.loads(data)
        raw.pop("self_sha256", None)
        body = canonical_json({**raw, "self_sha256": hashlib.sha256(canonical_json(raw).encode()).hexdigest()})
        return body.encode()
    except (ValueError, RecursionError, AttributeError, TypeError):
        return data


def _covered(name: str, scratch: Path, wanted: Callable[[str], bool], repair: Callable[[bytes, bytes], bytes]) -> Target:
    """The covered files of both sets that are `wanted`; the manifest is signed anew, so that no checksum saves the readers."""
    files = []
    for layout, root in _packed_sets(scratch).items():
        sound = read_manifest(root)
        inside = [f"{shard.path}/{file}" for s in sound.splits.values() for shard in s.shards for file in shard.files or {}]
        shards = [shard.path for s in sound.splits.values() for shard in s.shards if layout == "tar"]
        files += [(layout, root, path, (root / path).read_bytes()) for path in sorted({*sound.files, *inside, *shards}) if wanted(path)]

    def run(data: bytes) -> object:
        number, data = choice(data, len(files))
        layout, root, path, sound = files[number]
        manifest = (root / "manifest.json").read_bytes()
        try:
            (root / path).write_bytes(data)
            (root / "manifest.json").write_bytes(_resigned(manifest, path, data))
            return _read_all(root, layout, quick=False)
        finally:
            # Never in place: a data set of before may still map the file.
            for target, content in ((root / path, sound), (root / "manifest.json", manifest)):
                target.unlink()
                target.write_bytes(content)

    def repaired(data: bytes) -> bytes:
        number, rest = choice(data, len(files))
        return data[:1] + repair(rest, files[number][3])

    seeds = [bytes([i]) + sound for i, (_, _, _, sound) in enumerate(files)]
    return Target(name, run, ERRORS, seeds, (b"\xff" * 8, b"\0" * 8, b"\x7f" * 8, b"|O", b"<f8", b"True"), repaired)


def _resigned(manifest: bytes, path: str, data: bytes) -> bytes:
    raw: dict[str, Any] = json.loads(manifest)
    entry = {"num_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    if path in raw["files"]:
        raw["files"][path] = entry
    for split in raw["splits"].values():
        for shard in split["shards"]:
            if shard["path"] == path:
                shard.update(entry)
            elif path.startswith(shard["path"] + "/"):
                shard["files"][path.rpartition("/")[2]] = entry
                shard["num_bytes"] = sum(f["num_bytes"] for f in shard["files"].values())
    return _sign(json.dumps(raw).encode())


def index(scratch: Path) -> Target:
    """Every ``.npy`` file, of the index and of memmap shards, and ``.tar.idx``."""

    def same_shape(data: bytes, sound: bytes) -> bytes:
        head = sound.find(b"\n") + 1 if sound.startswith(b"\x93NUMPY") else 0
        body = data[head:] if data[:6] == sound[:6] else data
        return sound[:head] + body[: len(sound) - head].ljust(len(sound) - head, b"\xff")

    return _covered("index", scratch, lambda path: path.endswith((".npy", ".idx")), same_shape)


def shard(scratch: Path) -> Target:
    """Our own tar shards."""
    return _covered("shard", scratch, lambda path: path.endswith(".tar"), lambda data, _: repair_tar(data))


def repair_tar(data: bytes) -> bytes:
    """The same tar with the checksum of every header made right."""
    result, pos = bytearray(data), 0
    while pos + _BLOCK <= len(data) and any(data[pos : pos + _BLOCK]):
        header = result[pos : pos + _BLOCK]
        header[148:156] = b" " * 8
        result[pos + 148 : pos + 156] = b"%06o\0 " % sum(header)
        try:
            size = int(header[124:135].strip(b" \0") or b"0", 8)
        except ValueError:
            break
        pos += _BLOCK + -(-max(size, 0) // _BLOCK) * _BLOCK
    return bytes(result)


_SUFFIXES: dict[str, Callable[[bytes], bytes]] = {
    ".tar": bytes,
    ".tar.gz": lambda d: gzip.compress(d, mtime=0),
    ".tar.bz2": bz2.compress,
    ".tar.xz": lzma.compress,
}


def foreign_tar(scratch: Path) -> Target:
    """Tars of any origin, as `ShardStream` reads them."""
    suffixes = list(_SUFFIXES)
    outside = scratch / "inside"
    outside.mkdir()

    def run(data: bytes) -> object:
        number, data = choice(data, len(suffixes))
        path = outside / f"x{suffixes[number]}"
        for before in outside.iterdir():
            before.unlink()
        path.write_bytes(data)
        result = []
        for raw in read_tar(str(path)):
            try:
                result.append(decode_parts(raw))
            except SampleError as e:
                result.append({"error": str(e)})
        if sorted(p.name for p in scratch.iterdir()) != ["inside"] or sorted(p.name for p in outside.iterdir()) != [path.name]:
            raise Failure("a file was written")
        return result

    def repaired(data: bytes) -> bytes:
        number, rest = choice(data, len(suffixes))
        return data[:1] + repair_tar(rest) if suffixes[number] == ".tar" else data

    plain = [_tar(form) for form in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)]
    seeds = [bytes([i]) + pack(data) for i, pack in enumerate(_SUFFIXES.values()) for data in plain]
    types = tuple(bytes([c]) for c in b"12356xgLKS")
    sizes = (b"\0" * 512, b"00000000000", b"77777777777", b"\x80" + b"\xff" * 11, b"\xff" * 12, b"ustar\00000", b"ustar  \0")
    fields = (b"19 GNU.sparse.size=9\n", b"20 size=99999999999\n", b"17 path=../../y\n", b"../../x.jpg", b"/etc/passwd")
    return Target("foreign-tar", run, (SampleError,), seeds, (*types, *sizes, *fields), repaired)


def _tar(form: int) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form) as tar:
        for key in ("a", "dir/" + ("l" * 110 if form != tarfile.USTAR_FORMAT else "b")):
            parts = {"png": encode_image(picture(6, 8), "png"), "cls": b"3", "json": b'{"n": [1, 2.5]}', "txt": b"hello"}
            for part, data in parts.items():
                info = tarfile.TarInfo(f"{key}.{part}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
        link = tarfile.TarInfo("link.jpg")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    return buffer.getvalue()


def meta(_scratch: Path) -> Target:
    """A sample's JSON part."""

    def run(data: bytes) -> object:
        return decode_meta(data)

    seeds = [b'{"affine":[1.0,1.0,0.0,0.0],"boxes":[[1.5,2.0,3.0,4.0]],"source":"a/\\u00e4.jpg","width":3}', "{'ä': 1}".encode()]
    return Target("meta", run, (DecodeError,), seeds, (b"NaN", b"1e999", b"[[[[[[", b'{"a":', b'"\\ud800"', b"\xef\xbb\xbf", b"\0"))
