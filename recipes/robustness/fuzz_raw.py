"""Fuzz targets of the packing side: annotations, tables, picture files."""

from __future__ import annotations

import io
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from fuzz_target import Failure, Target, choice
from PIL import Image, ImageCms, PngImagePlugin

from loaders.cells import SubJpegs, open_grid
from loaders.codecs import DecodeError, encode_image
from loaders.jpeg import JpegError, parse_header, restart_offsets
from loaders.strips import LEAST_TOGETHER, decode_strips, head_bytes
from packer.boxes import Picture, place_boxes
from packer.findings import Findings
from packer.images import ImageError, check, decode, probe, reset_orientation, upright
from packer.sample import Annotation, Item, PackError
from packer.sources.csv import CsvOptions, CsvSource, why_not
from packer.sources.csv import sniff as sniff_csv
from packer.sources.tree import File
from packer.sources.voc import VocOptions, VocSource
from packer.sources.voc_xml import root_element

MAX_PIXELS = 1 << 20
SMALL_PIXELS = 1 << 12
MAX_LINE = 200_000  # in JSON a character may take twelve bytes


def picture(height: int = 40, width: int = 72) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """A smooth picture with some detail, uint8 [height, width, 3]."""
    y, x = np.mgrid[:height, :width]
    return np.stack([3 * x % 256, 5 * y % 256, (x * y) // 8 % 256], 2).astype(np.uint8)


def _saved(kind: str, mode: str = "RGB", **options: Any) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(picture()).convert(mode).save(buffer, kind, **options)
    return buffer.getvalue()


def _unshown(line: str) -> None:
    line.encode()


def _checked(findings: Findings) -> str:
    """Findings can be written, and none is long."""
    text = findings.jsonl()
    text.encode()
    if max(map(len, text.splitlines()), default=0) > MAX_LINE:
        raise Failure(f"a finding of {max(map(len, text.splitlines()))} characters")
    return text


def _checked_annotation(annotation: Annotation | None, findings: Findings) -> object:
    placed = None
    if annotation is not None:
        placed = place_boxes(Picture("images/w.jpg", 72, 40, 1), annotation, findings.add)
        count = len(annotation.boxes)
        lengths = {len(annotation.labels), len(annotation.difficult), len(annotation.truncated), len(annotation.occluded), count}
        if lengths != {count} or (placed is not None and not np.isfinite(placed.boxes).all()):
            raise Failure(f"a senseless annotation: {annotation!r:.300}")
    return annotation, placed


_XML = (
    '<?xml version="1.0" encoding="{0}"?>\n<annotation><folder>images</folder><filename>w.jpg</filename><size><width>72</width>'
    "<height>40</height><depth>3</depth></size><object><name>裂纹</name><difficult>0</difficult><truncated>1</truncated><bndbox>"
    "<xmin>1</xmin><ymin>2.5</ymin><xmax>30</xmax><ymax>31</ymax></bndbox></object><object><name>slag</name><bndbox><xmin>5</xmin>"
    "<ymin>2</ymin><xmax>9</xmax><ymax>11</ymax></bndbox><part><name>p</name></part></object></annotation>"
)
_XML_TOKENS = tuple(
    t.encode()
    for t in (
        *("<object>", "</object>", "<bndbox>", "</bndbox>", "<name>", "</name>", "<size>", "</annotation>", "<![CDATA[", "]]>", "<!--"),
        *('<!DOCTYPE a [<!ENTITY e "x">]>', "<!ENTITY % p SYSTEM 'file:///etc/passwd'> %p;", "&e;", "&#0;", "&#x110000;", "&amp;", "<?x?>"),
        *('xmlns:v="u"', "<v:object>", "<polygon/>", "\ufeff", "\x00", "encoding='utf-16'", "encoding='hex'", "encoding='cp037'"),
    )
)


def voc_xml(scratch: Path) -> Target:
    """One annotation file, through `VocSource.annotate`."""
    for folder in ("images", "annotations"):
        (scratch / folder).mkdir()
    path = scratch / "annotations" / "w.xml"
    (scratch / "images" / "w.jpg").write_bytes(_saved("JPEG"))
    sources = [VocSource(scratch, VocOptions(encoding=e, origin=o)) for e, o in ((None, 0), ("gbk", 1))]  # type: ignore[arg-type]  # 0 and 1

    def run(data: bytes) -> object:
        number, data = choice(data, len(sources))
        path.write_bytes(data)
        findings = Findings(_unshown)
        info = (scratch / "annotations/w.xml").stat()
        listed = File("annotations/w.xml", info.st_size, info.st_mtime_ns)
        result = sources[number].annotate(Item("images/w.jpg", "train", 1, 1, ref=listed), findings.add)
        if result is None and not any(f.level != "warning" for f in findings):
            raise Failure("a sample is left out, and nothing says so")
        return _checked_annotation(result, findings), _checked(findings), root_element(data[:4096])

    seeds = [bytes([n]) + _XML.format(e).encode(e) for n in (0, 1) for e in ("utf-8", "gbk", "utf-16")]
    return Target("voc-xml", run, (), seeds, _XML_TOKENS)


def voc_splits(scratch: Path) -> Target:
    """Split tables and lists, through `VocSource.list`."""
    places = ("train_val_test_split.csv", "ImageSets/Main/train.txt")
    for folder in ("images", "annotations", "ImageSets/Main"):
        (scratch / folder).mkdir(parents=True)
    pictures = {f"images/w{i}.jpg" for i in range(4)}
    for i in range(4):
        (scratch / f"images/w{i}.jpg").write_bytes(b"\xff\xd8")
        (scratch / f"annotations/w{i}.xml").write_text(_XML.format("utf-8"), "utf-8")

    def run(data: bytes) -> object:
        number, data = choice(data, len(places))
        (scratch / places[number]).write_bytes(data)
        os.utime(scratch / places[number], ns=(1, 1))  # the listing tells it, and is compared
        findings = Findings(_unshown)
        try:
            listing = VocSource(scratch, VocOptions()).list(findings.add)
        finally:
            (scratch / places[number]).unlink()
        if {item.path for item in listing.items} != pictures:
            raise Failure(f"the listing is not the pictures that are there: {listing.items!r:.300}")
        return listing, _checked(findings)

    table = "image_id,split\nw0,train\nw1,val\nw2.jpg,test\nimages/w3.jpg,train\n"
    seeds = [b"\0" + table.encode(e) for e in ("utf-8", "utf-16")] + [b"\1w0\nw1 1\nw2 -1\n", b"\1w0\r\nw3 0\r\n"]
    return Target("voc-splits", run, (PackError,), seeds, (b"../", b"/etc/", b"train", b"\r", b"\n", b'"', b"\0", b"sep=;\n", b"\\"))


_CSV_OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"encoding": "utf-16-le"},
    {"header": False, "columns": {"path": 0, "label": 1}},
    {"delimiter": ";", "image_dir": "a", "coords": "normalized", "box_format": "cxcywh", "class_name": "x"},
    {"encoding": "gbk", "extra": ["note"]},
)


def csv_table(scratch: Path) -> Target:
    """A whole table with its paths, through `CsvSource`."""
    pictures = {f"a/w{i}.jpg" for i in range(3)}
    (scratch / "a").mkdir()
    for path in pictures:
        (scratch / path).write_bytes(b"\xff\xd8")

    def run(data: bytes) -> object:
        number, data = choice(data, len(_CSV_OPTIONS))
        (scratch / "data.csv").write_bytes(data)
        os.utime(scratch / "data.csv", ns=(1, 1))
        sniffed, reasons = sniff_csv(scratch), why_not(scratch)
        findings = Findings(_unshown)
        source = CsvSource(scratch, CsvOptions(**_CSV_OPTIONS[number]))
        listing = source.list(findings.add)
        if {item.path for item in listing.items} != pictures:
            raise Failure(f"the listing is not the pictures that are there: {listing.items!r:.300}")
        annotations = [_checked_annotation(source.annotate(item, findings.add), findings) for item in listing.items]
        return sniffed, reasons, listing, annotations, _checked(findings)

    boxes = "filename,width,height,class,xmin,ymin,xmax,ymax\na/w0.jpg,72,40,slag,1,2,30,31\n"
    boxes += "a/w0.jpg,72,40,crack,1.5,2,9,9\nw1.jpg,72,40,,,,,\n"
    labels = 'path,label,split,note\na/w0.jpg,slag,train,x\na/w1.jpg,"c,1",val,\na/w2,porosity,test,"q"\n'
    seeds = [b"\0" + boxes.encode(), b"\0" + labels.encode(), b"\0" + labels.encode("utf-16"), b"\1" + labels.encode("utf-16-le")]
    seeds += [b"\2a/w0.jpg,slag\na/w1.jpg,crack\n", b"\3path;cx;cy;w;h\nw0.jpg;0.5;0.5;0.2;0.1\n", b"\4" + labels.encode("gbk")]
    tokens = (b"../", b"/etc/passwd", b"C:\\", b"http://h/x.jpg", b"\\", b'"', b"\r", b"\n", b",", b";", b"\t", b"\0", b"sep=;\n", b"\xff")
    return Target("csv", run, (PackError,), seeds, (*tokens, b"bbox", b"[1,2,3,4]", b"xmin", b"\xe2\x80\xae", b"image_path,x1,y1"))


def jpeg(_scratch: Path) -> Target:
    """Header, restart offsets, the decoding of regions, and of several pictures at a time."""

    def run(data: bytes) -> object:
        offsets = restart_offsets(data)
        header = parse_header(data)
        if header.height * header.width <= SMALL_PIXELS:
            count, size = LEAST_TOGETHER, len(data)  # fewer are not decoded at all
            start = head_bytes(count)
            out = np.zeros((count, header.height, header.width, 3), np.uint8)
            decode_strips(memoryview(bytearray(start) + data * count), [(n, start + n * size, size) for n in range(count)], out)
        if not len(offsets):
            return header
        steps = np.diff(offsets.astype(np.int64))
        if not (steps[:-1] > 0).all() or steps[-1] < 0 or offsets[-1] > len(data) - 2:  # an empty last cell is damage like any other
            raise Failure(f"offsets do not rise, or leave the data: {offsets!r:.300}")
        grid, result = open_grid(data[: int(offsets[0])], offsets, len(data)), []
        height, width = min(header.height, 64), min(header.width, 64)
        for region in ((0, 0, height, width), (height // 2, width // 3, 1, 1), (height - 1, width - 1, 1, 1)):
            jpegs = SubJpegs([(grid, region, 1)])
            [sub], [made] = jpegs.parts, jpegs.assemble(memoryview(bytearray(jpegs.num_bytes)), [memoryview(data)])
            if sub.height * sub.width <= MAX_PIXELS:
                result.append(zlib.crc32(sub.decode(made, lambda shape: np.zeros(shape, np.uint8)).tobytes()))
        return header, offsets, result

    seeds = [encode_image(picture(h, w), "jpg") for h, w in ((40, 72), (64, 96), (8, 130))]
    seeds += [_saved("JPEG", m, progressive=p) for m, p in (("RGB", True), ("L", False), ("CMYK", False))]
    seeds += [with_exif(_saved("JPEG"))]
    tokens = [bytes([0xFF, m]) for m in (*range(0xC0, 0xE2), 0xEE, 0xFE, 0xFF, 0, 1)] + [b"\xff\xdd\0\4\0\1", b"\xff\xda\0\x08\1\1\0\0?\0"]
    return Target("jpeg", run, (JpegError, DecodeError), seeds, tokens)


def with_exif(data: bytes, orientation: int = 6) -> bytes:
    """The JPEG with an EXIF orientation."""
    block = b"Exif\0\0II*\0" + struct.pack("<IHHHIHHI", 8, 1, 0x112, 3, 1, orientation, 0, 0)
    return data[:2] + b"\xff\xe1" + struct.pack(">H", len(block) + 2) + block + data[2:]


def image(_scratch: Path) -> Target:
    """Any picture file: its header, then the strict decoders."""

    def run(data: bytes) -> object:
        info = probe(data, max_pixels=MAX_PIXELS)
        check(data, info)
        decoded = decode(data, info)
        if decoded.image.shape != (info.height, info.width, 3) or decoded.image.dtype != np.uint8:
            raise Failure(f"decoded to {decoded.image.dtype} {decoded.image.shape}, the header says {info}")
        turned = upright(decoded.image, info.orientation)
        if info.orientation != 1 and info.format in ("jpeg", "png", "webp"):
            reset = probe(reset_orientation(data, info), max_pixels=MAX_PIXELS)
            if reset.orientation != 1:
                raise Failure(f"the orientation {info.orientation} is {reset.orientation} after it was reset")
        return info, turned.shape, zlib.crc32(turned.tobytes())

    tokens = [b"IHDR", b"IDAT", b"IEND", b"iCCP", b"zTXt", b"eXIf", b"acTL", b"tRNS", b"PLTE", b"VP8X", b"VP8L", b"VP8 ", b"ANMF", b"EXIF"]
    tokens += [b"\xff\xc4", b"\xff\xda", b"\xff\xdb", b"II*\0", b"II+\0"]
    return Target("image", run, (ImageError,), _pictures(), tokens, repair_png)


def _pictures() -> list[bytes]:
    text = PngImagePlugin.PngInfo()
    text.add_text("Comment", "x" * 300, zip=True)
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    frames = [Image.fromarray(picture()).quantize(8), Image.fromarray(255 - picture()).quantize(8)]
    result = [_saved("JPEG"), _saved("JPEG", progressive=True), _saved("JPEG", "CMYK"), _saved("JPEG", "L"), with_exif(_saved("JPEG"))]
    result += [_saved("PNG", m) for m in ("RGB", "L", "P", "1", "RGBA")] + [_saved("PNG", pnginfo=text, icc_profile=profile)]
    result += [_saved("WEBP"), _saved("WEBP", lossless=True), _saved("WEBP", "RGBA"), _saved("BMP"), _saved("BMP", "P"), _saved("BMP", "1")]
    result += [_saved("TIFF", compression=c) for c in ("raw", "tiff_lzw", "tiff_adobe_deflate", "packbits", "jpeg")]
    for kind in ("GIF", "TIFF", "WEBP", "PNG"):
        buffer = io.BytesIO()
        frames[0].save(buffer, kind, save_all=True, append_images=frames[1:])
        result.append(buffer.getvalue())
    buffer = io.BytesIO()
    Image.fromarray(np.arange(2880, dtype=np.uint16).reshape(40, 72) * 20).save(buffer, "PNG")
    return [*result, buffer.getvalue()]


def repair_png(data: bytes) -> bytes:
    """The same PNG with the checksum of every chunk made right; other bytes as they are."""
    if data[:8] != b"\x89PNG\r\n\x1a\n":
        return data
    result, pos = bytearray(data), 8
    while pos + 12 <= len(data):
        end = pos + 8 + int.from_bytes(data[pos : pos + 4], "big")
        if end + 4 > len(data):
            break
        result[end : end + 4] = struct.pack(">I", zlib.crc32(data[pos + 4 : end]))
        pos = end + 4
    return bytes(result)
