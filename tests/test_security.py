"""Hostile input end to end: nothing outside is touched, nothing is expanded, what is refused is named without taking its memory."""

from __future__ import annotations

import functools
import io
import json
import os
import struct
import subprocess
import sys
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from build_data import read_json, sign_manifest
from conftest import picture, save
from image_data import png_chunk, png_of
from image_data import save as encoded
from loaders.codecs import DecodeError, decode_image
from loaders.faults import SampleError
from loaders.format import FormatError, read_manifest
from loaders.memmap import MemmapDataset
from loaders.shards import ShardDataset, ShardStream
from packed_data import write_packed
from packer.findings import MAX_MESSAGE, MAX_PATH, Findings
from packer.sample import Finding
from packer.sources.tree import walk
from packer.sources.voc_xml import XmlFault, decode_xml, parse_voc

ROOT = Path(__file__).parent.parent

# XML

_LAUGHS = '<!ENTITY a0 "ha">' + "".join(f'<!ENTITY a{i} "{f"&a{i - 1};" * 10}">' for i in range(1, 12))
DOCTYPES = {
    "billion laughs": (_LAUGHS, "&a11;"),
    "quadratic": (f'<!ENTITY a "{"x" * 50_000}">', "&a;" * 20_000),
    "external": ('<!ENTITY e SYSTEM "file:///etc/passwd">', "&e;"),
    "parameter": ('<!ENTITY % p SYSTEM "file:///etc/passwd"> %p;', ""),
    "built by a parameter": ("<!ENTITY % p '<!ENTITY &#37; q SYSTEM \"file:///etc/passwd\">'> %p; %q;", ""),
    "unparsed": ('<!NOTATION n SYSTEM "n"><!ENTITY u SYSTEM "file:///etc/passwd" NDATA n>', ""),
    "attribute defaults": (f'<!ATTLIST object a CDATA "{"x" * 100_000}">', "<object/>" * 50_000),
}


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "gbk"])
@pytest.mark.parametrize("name", DOCTYPES)
def test_a_doctype_that_declares_anything_is_refused_before_it_is_used(name: str, encoding: str) -> None:
    subset, body = DOCTYPES[name]
    declaration = '<?xml version="1.0" encoding="gbk"?>' if encoding == "gbk" else ""
    text = f"{declaration}<!DOCTYPE annotation [{subset}]><annotation><object><name>{body}</name></object></annotation>"
    with pytest.raises(XmlFault) as e:
        parse_voc(decode_xml(text.encode(encoding)))
    # Four bytes a character without a byte order mark are no encoding that is guessed.
    assert e.value.code == "unsafe-xml"
    assert len(str(e.value)) < 300


# Paths that data name

OUTSIDE = [
    "../outside/secret.png",
    "{outside}/secret.png",
    "in/../../outside/secret.png",
    "..\\outside\\secret.png",
    "file://{outside}/secret.png",
]

WATCH = """
import sys
opened = []
sys.addaudithook(lambda event, args: opened.append(args[0]) if event in ("open", "os.scandir", "os.listdir") else None)
from pathlib import Path
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/tests"]
from build_data import run_build
outcome = run_build(Path(sys.argv[2]), Path(sys.argv[3]), run={"on_error": "skip"}, )
print([str(x) for x in opened if "outside" in str(x)])
"""


@pytest.mark.parametrize("kind", ["csv", "voc", "split"])
def test_no_path_in_the_data_leads_out(kind: str, tmp_path: Path) -> None:
    src, outside = tmp_path / "src", tmp_path / "outside"
    save(outside / "secret.png", picture(33, 21, 5))
    names = [name.format(outside=outside) for name in OUTSIDE]
    box = "<object><name>x</name><bndbox><xmin>1</xmin><ymin>1</ymin><xmax>9</xmax><ymax>9</ymax></bndbox></object>"
    for i in range(len(names) + 1):
        save(src / "images" / f"w{i}.png", picture(32, 20, i))
    if kind == "csv":
        (src / "data.csv").write_text("path,label\n" + "".join(f"{name},a\n" for name in ["images/w0.png", *names]))
    else:
        (src / "annotations").mkdir()
        for i, name in enumerate(["w0.png", *names]):
            claim = f"<folder>{outside}</folder><filename>{name if kind == 'voc' else f'w{i}.png'}</filename><path>{name}</path>"
            (src / "annotations" / f"w{i}.xml").write_text(f"<annotation>{claim}{box}</annotation>")
        if kind == "split":
            ids = ["w0", *names]
            (src / "train_val_test_split.csv").write_text("image_id,split\n" + "".join(f"{name},train\n" for name in ids))
    command = [sys.executable, "-c", WATCH, str(ROOT), str(src), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
    secret = (outside / "secret.png").read_bytes()
    assert not any(secret in p.read_bytes() for p in (tmp_path / "out").rglob("*") if p.is_file())
    findings = [json.loads(line) for line in (tmp_path / "out" / "findings.jsonl").read_text("utf-8").splitlines()]
    assert len(findings) >= len(names)


# Links


def test_links_that_multiply_end(tmp_path: Path) -> None:
    """Each of 9 folders links to all others: without a bound there are about a million ways through them."""
    for i in range(9):
        save(tmp_path / f"d{i}" / "x.png", picture(8, 8, i))
        for j in range(9):
            if i != j:
                (tmp_path / f"d{i}" / f"to{j}").symlink_to(tmp_path / f"d{j}")
    findings: list[Finding] = []
    tree = walk(tmp_path, findings.append)
    assert {f.path for f in tree.pictures} >= {f"d{i}/x.png" for i in range(9)}
    assert len(tree.pictures) < 2000
    assert {f.code for f in findings} == {"link-loop"}


def test_links_to_themselves_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.png").symlink_to("b.png")
    (tmp_path / "b.png").symlink_to("a.png")
    (tmp_path / "c.png").symlink_to("c.png")
    findings: list[Finding] = []
    walk(tmp_path, findings.append)
    assert [(f.code, f.path) for f in findings] == [("broken-link", name) for name in ("a.png", "b.png", "c.png")]


# Pictures that grow

BOMBS_CHILD = """
import json, resource, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from packer.images import ImageError, check, decode, probe
from loaders.codecs import DecodeError, decode_image
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
found, start = {}, peak()
for path in sorted(Path(sys.argv[2]).iterdir()):
    data = path.read_bytes()
    try:
        info = probe(data, max_pixels=200_000_000)
        check(data, info)
        decode(data, info)
        if info.format == "png":
            decode_image(data, "png")
        found[path.name] = "fine"
    except (ImageError, DecodeError) as e:
        found[path.name] = getattr(e, "code", "loader")
print(json.dumps([found, (peak() - start) // 1024]))
"""


def _tiff(tags: dict[int, int], data: bytes, width: int = 8, height: int = 8) -> bytes:
    """A gray TIFF of 8 bits; a tag with the value -1 points at the data."""
    tags = {256: width, 257: height, 258: 8, 262: 1, 277: 1, **tags}
    start = 8 + 2 + 12 * len(tags) + 4
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, start if value < 0 else value) for tag, value in sorted(tags.items()))
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(4) + data


@functools.cache
def _bombs() -> dict[str, tuple[bytes, str]]:
    """Name -> (file, what is said of it)."""
    zeros = zlib.compress(bytes(100 << 20), 9)
    small = np.zeros((8, 8, 3), np.uint8)
    head = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    huge_png = b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", head) + png_chunk(b"IDAT", zeros) + png_chunk(b"IEND", b"")
    strips, tiles = {259: 8, 273: -1, 278: 8, 279: len(zeros)}, {324: -1, 325: len(zeros)}
    gif = b"GIF89a" + struct.pack("<HHBBB", 8, 8, 0x80, 0, 0) + bytes(6) + b"\x2c" + struct.pack("<HHHHB", 0, 0, 65535, 65535, 0)
    webp, jpeg = encoded(small, "WEBP"), bytearray(encoded(small, "JPEG"))
    struct.pack_into(">HH", jpeg, jpeg.index(b"\xff\xc0") + 5, 65_500, 65_500)
    canvas = struct.pack("<4sIBxxx", b"VP8X", 10, 0) + b"\xff" * 6
    inner = bytearray(webp[12:])
    struct.pack_into("<HH", inner, inner.index(b"\x9d\x01\x2a") + 3, 16_383, 16_383)
    tiny_canvas = struct.pack("<4sIBxxx", b"VP8X", 10, 0) + b"\7\0\0\7\0\0"

    def riff(body: bytes) -> bytes:
        return b"RIFF" + struct.pack("<I", len(body) + 4) + b"WEBP" + body

    def bmp(width: int, height: int, bits: int, compression: int, data: bytes) -> bytes:
        return (
            b"BM"
            + struct.pack("<IHHIIiiHHIIiiII", 0, 0, 0, 1078, 40, width, height, 1, bits, compression, 0, 0, 0, 256, 0)
            + bytes(1024)
            + data
        )

    return {
        "png-size": (huge_png, "image-too-large"),
        "png-idat": (png_of(small, color=2, bits=8, idat=zeros), "fine"),
        "png-ztxt": (png_of(small, color=2, bits=8, before=png_chunk(b"zTXt", b"Comment\0\0" + zeros)), "fine"),
        "png-itxt": (png_of(small, color=2, bits=8, before=png_chunk(b"iTXt", b"Comment\0\1\0\0\0" + zeros)), "fine"),
        "png-iccp": (png_of(small, color=2, bits=8, before=png_chunk(b"iCCP", b"icc\0\0" + zeros)), "fine"),
        "tiff-size": (_tiff(strips, zeros, 60_000, 60_000), "image-too-large"),
        "tiff-deflate": (_tiff(strips, zeros), "fine"),
        "tiff-tile-deflate": (_tiff({**tiles, 259: 8, 322: 1 << 15, 323: 1 << 15}, zeros), "corrupt-image"),
        "tiff-tile-lzw": (_tiff({**tiles, 259: 5, 322: 1 << 15, 323: 1 << 15}, zeros), "corrupt-image"),
        "tiff-tile-raw": (_tiff({**tiles, 259: 1, 322: 1 << 30, 323: 1 << 30}, zeros), "corrupt-image"),
        "gif-frame": (gif + b"\x02\x04\x84\x8f\xa9\xcb\x00\x3b", "corrupt-image"),
        "gif-size": (gif.replace(struct.pack("<HH", 8, 8), b"\xff" * 4, 1) + b"\x02\x04\x84\x8f\xa9\xcb\x00\x3b", "image-too-large"),
        "webp-canvas": (riff(canvas + webp[12:]), "image-too-large"),
        "webp-frame": (riff(tiny_canvas + bytes(inner)), "corrupt-image"),
        "bmp-size": (bmp(60_000, -60_000, 8, 0, b""), "image-too-large"),
        "bmp-rle": (bmp(8, 8, 8, 1, b"\xff\0" * 1000), "corrupt-image"),
        "jpeg-size": (bytes(jpeg), "image-too-large"),
    }


@pytest.mark.slow
def test_decompression_bombs_are_named_without_their_memory(tmp_path: Path) -> None:
    bombs = _bombs()
    for name, (data, _) in bombs.items():
        (tmp_path / name).write_bytes(data)
    command = [sys.executable, "-c", BOMBS_CHILD, str(ROOT), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    found, mebibytes = json.loads(done.stdout.splitlines()[-1])
    assert found == {name: said for name, (_, said) in bombs.items()}
    assert mebibytes < 150


# Foreign tars


def _member(name: str, data: bytes = b"", **fields: Any) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for field, value in fields.items():
        setattr(info, field, value)
    return info, data


def _tar(path: Path, *members: tuple[tarfile.TarInfo, bytes], form: int = tarfile.PAX_FORMAT) -> Path:
    with tarfile.open(path, "w", format=form) as tar:
        for info, data in members:
            tar.addfile(info, io.BytesIO(data))
    return path


def test_names_links_and_devices_in_a_tar_touch_nothing(tmp_path: Path) -> None:
    png = encoded(np.zeros((4, 5, 3), np.uint8), "PNG")
    inside = tmp_path / "in"
    inside.mkdir()
    (inside / "victim.txt").write_text("as it was")
    names = ["../evil.png", "/tmp/evil-abs.png", "a/../../../evil2.png", "victim.txt/x.png", "a\\evil3.png", "C:\\evil4.png", "nul\n.png"]
    members = [_member(name, png) for name in names]
    kinds = (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE)
    members += [_member(f"victim{i}", type=kind, linkname="/etc/passwd") for i, kind in enumerate(kinds)]
    before = {p: p.lstat().st_mtime_ns for p in tmp_path.rglob("*")}
    path = _tar(tmp_path / "in" / "x.tar", *members)
    samples = list(ShardStream(str(path), shuffle=0))
    assert [s["key"] for s in samples] == [name.rpartition(".")[0] for name in names]
    assert all(tuple(s["image"].shape) == (3, 4, 5) for s in samples)
    path.unlink()
    assert {p: p.lstat().st_mtime_ns for p in tmp_path.rglob("*") if p != inside} == {p: t for p, t in before.items() if p != inside}
    assert not Path("/tmp/evil-abs.png").exists()


SPARSE = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "a.png", "GNU.sparse.realsize": "99999999999999"}


@pytest.mark.parametrize(
    ("member", "reason"),
    [
        (_member("a.png", b"1\n0\n1\n".ljust(512, b"\0"), pax_headers=SPARSE), "sparse members are not supported"),
        (
            _member("a.png", b"x", pax_headers={"GNU.sparse.size": "99999999999", "GNU.sparse.map": "0,1"}),
            "sparse members are not supported",
        ),
        (_member("a.png", b"x", pax_headers={"size": "9999999999999"}), "sizes over 8 GB are not supported"),
        (_member("a.png", b"x", pax_headers={"comment": "y" * (2 << 20)}), "a tar header of 2097"),
        (_member("a" * (2 << 20) + ".png", b"x"), "a tar header of 2097"),
    ],
    ids=["sparse 1.0", "sparse 0.1", "size", "large field", "long name"],
)
def test_members_that_grow_are_refused(member: tuple[tarfile.TarInfo, bytes], reason: str, tmp_path: Path) -> None:
    with pytest.raises(SampleError, match=reason):
        list(ShardStream(str(_tar(tmp_path / "x.tar", member))))


def test_a_foreign_picture_that_claims_gigabytes_is_refused(tmp_path: Path) -> None:
    for part, name in (("png", "png-size"), ("jpg", "jpeg-size")):
        with pytest.raises(SampleError, match=r"pixels, at most 268435456 are decoded"):
            list(ShardStream(str(_tar(tmp_path / f"{part}.tar", _member(f"a.{part}", _bombs()[name][0])))))


def test_a_png_chunk_that_claims_gigabytes_is_refused() -> None:
    data = bytearray(encoded(np.zeros((8, 8, 3), np.uint8), "PNG"))
    at = data.index(b"IDAT") - 4
    data[at : at + 4] = b"\xff\0\0\0"
    with pytest.raises(DecodeError, match="is cut short: a chunk ends at byte 42"):
        decode_image(bytes(data), "png")


# Manifests


def _readers(root: Path) -> dict[str, Callable[[], object]]:
    layout = "memmap" if (root / "train" / "shard-000000").is_dir() else "tar"
    cls: type[MemmapDataset | ShardDataset] = MemmapDataset if layout == "memmap" else ShardDataset
    return {"read": lambda: read_manifest(root), "dataset": lambda: cls(root), "stream": lambda: ShardStream(root)}


TEXTS: dict[str, Callable[[str], bytes]] = {
    "bom": lambda text: b"\xef\xbb\xbf" + text.encode(),
    "utf-16": lambda text: text.encode("utf-16"),
    "twice the same key": lambda text: text.replace('"format_version": 1,', '"format_version": 1,\n "format_version": 1,').encode(),
    "NaN": lambda text: text.replace('"format_version": 1', '"format_version": NaN').encode(),
    "a number of 5000 digits": lambda text: text.replace('"num_bytes": ', '"num_bytes": ' + "9" * 5000, 1).encode(),
    "1e999": lambda text: text.replace('"num_samples": 10', '"num_samples": 1e999').encode(),
    "many values": lambda text: text.replace('"output": {}', '"output": {"a": [' + "[]," * 4_200_000 + "1]}").encode(),
    "deep": lambda text: b"[" * 1_000_000 + text.encode(),
}


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("layout", ["tar", "memmap"])
def test_hostile_text_of_a_manifest_is_one_clear_error(name: str, layout: Any, tmp_path: Path) -> None:
    root = write_packed(tmp_path / "p", layout).root
    path = root / "manifest.json"
    changed = TEXTS[name](path.read_text("utf-8"))
    assert changed != path.read_bytes()
    path.write_bytes(changed)
    for reader, read in _readers(root).items():
        with pytest.raises(FormatError, match=r"manifest\.json") as e:
            read()
        assert len(str(e.value)) < 1000, reader


VALUES: dict[str, tuple[tuple[str | int, ...], Any]] = {
    "up": (("splits", "train", "shards", 0, "path"), "../x/shard-000000.tar"),
    "absolute": (("splits", "train", "shards", 0, "path"), "/etc/passwd"),
    "NUL": (("splits", "train", "shards", 0, "path"), "train/a\0b"),
    "backslash": (("splits", "train", "shards", 0, "path"), "train\\..\\..\\x"),
    "not plain": (("splits", "train", "shards", 0, "path"), "train//shard-000000.tar"),
    "negative": (("splits", "train", "num_samples"), -1),
    "huge": (("splits", "train", "num_samples"), 1 << 70),
    "text for a number": (("splits", "train", "num_samples"), "10"),
    "bool for a number": (("format_version",), True),
    "list for a dict": (("splits",), []),
    "unknown key": (("evil",), 1),
    "split that leads out": (("splits", "../x"), {"num_samples": 0, "shards": []}),
    "file that leads out": (("files", "../x"), {"num_bytes": 0, "sha256": "0" * 64}),
    "short checksum": (("source", "fingerprint"), "00"),
    "many wrong values": (("classes",), [1] * 100_000),
}


@pytest.mark.parametrize("name", VALUES)
def test_hostile_values_of_a_signed_manifest_are_one_clear_error(name: str, tmp_path: Path) -> None:
    root = write_packed(tmp_path / "p").root
    place, value = VALUES[name]
    raw = read_json(root)
    node: Any = raw
    for key in place[:-1]:
        node = node[key]
    node[place[-1]] = value
    sign_manifest(root, raw)
    for reader, read in _readers(root).items():
        with pytest.raises(FormatError, match=r"manifest\.json") as e:
            read()
        assert len(str(e.value)) < 4000, reader


@pytest.mark.slow
def test_a_hostile_manifest_at_the_command_line(tmp_path: Path) -> None:
    root = write_packed(tmp_path / "p").root
    (root / "manifest.json").write_bytes(b"[" * (100 << 20))
    child = "import resource, subprocess, sys; r = subprocess.run(sys.argv[1:], capture_output=True, text=True, timeout=100)\n"
    child += "print(r.returncode, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024, (r.stdout + r.stderr).count(chr(10)))\n"
    child += "print(r.stdout + r.stderr)"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    for command in ("verify", "info"):
        args = [sys.executable, "-c", child, sys.executable, "-m", "packer.cli", command, str(root)]
        done = subprocess.run(args, capture_output=True, text=True, timeout=120, env=env, stdin=subprocess.DEVNULL)
        first, *rest = done.stdout.splitlines()
        code, mebibytes, lines = map(int, first.split())
        assert (code, "Traceback" in done.stdout) == (1, False)
        assert mebibytes < 600, command
        assert lines < 5, command
        assert "values, a manifest has at most" in " ".join(rest)


# Findings


def test_a_finding_is_as_long_as_we_say_not_as_the_input_says() -> None:
    lines: list[str] = []
    findings = Findings(lines.append)
    findings.add(Finding("skip", "x", "a.csv", "y" * 10**6, sample="z" * 10**6))
    [kept] = findings
    assert len(kept.message) < MAX_MESSAGE + 50
    assert kept.message.endswith("... (1,000,000 characters)")
    assert kept.sample is not None
    assert len(kept.sample) < MAX_PATH + 50
    assert len(findings.jsonl()) < 2 * (MAX_MESSAGE + MAX_PATH)
    assert all(len(line) < 2 * (MAX_MESSAGE + MAX_PATH) for line in lines)
