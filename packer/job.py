"""A shard job: a pure function of (specification, source items, shard) -> shard files and a record.

All parallel running is a map over jobs, so the bytes do not depend on who runs them.
"""

from __future__ import annotations

import hashlib
import os
import struct
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from loaders.codecs import EncodeError, ImagePart, encode_image, require_fit
from loaders.format import Layout, Task
from packer.boxes import Picture, place_boxes
from packer.images import Decoded, ImageError, ImageInfo, check, decode, probe, reset_orientation, upright
from packer.perceptual import HASH_BYTES, MIN_SIDE, picture_hash
from packer.sample import Annotation, Finding, Item, Report, Sample, Source, Transform, Writer, WrittenShard
from packer.sources.tree import File, change_of
from packer.transcode import TranscodeError, add_restart_grid
from packer.transforms import TransformError
from packer.writers import open_writer

Boxes = NDArray[np.float64]
DIGEST_BYTES = 16
BATCH_ITEMS = 64


@dataclass(frozen=True, slots=True)
class Spec:
    """Everything that decides a sample's bytes, besides its source."""

    layout: Layout
    task: Task
    classes: tuple[str, ...]
    transform: Transform | None = None
    image: Literal["keep", "jpg", "png", "webp"] = "keep"
    quality: int = 90
    subsampling: Literal["420", "444"] = "420"
    restart_grid: bool | Literal["lossless"] = True
    dtype: str = "uint8"
    normalize: tuple[tuple[float, ...], tuple[float, ...]] | None = None
    exif: Literal["auto", "apply", "ignore"] = "auto"
    boxes: Literal["fail", "clip"] = "fail"
    pixel_range: tuple[int, int] | None = None
    max_pixels: int = 200_000_000
    max_file_bytes: int = 1 << 30

    def writer_options(self) -> dict[str, Any]:
        return {"dtype": self.dtype, "normalize": self.normalize} if self.layout == "memmap" else {}


@dataclass(frozen=True, slots=True)
class Job:
    """`items` of one split, in stored order, with their `keys` (positions in the listing). `number` counts over all splits."""

    number: int
    split: str
    keys: tuple[int, ...]
    items: tuple[Item, ...]


@dataclass(slots=True)
class Remarks:
    """What only the whole data set can judge, gathered per job and merged: the lowest box coordinate as declared, how many boxes
    touch the right or lower edge, the highest 16-bit value and how many 16-bit pictures there are, the image parts used, the pictures of
    each class that has any, and, where images must have one size, the first two sizes ("WxH") with a picture of each.
    """

    lowest: float = np.inf
    num_at_edge: int = 0
    max_16bit: int = -1
    num_16bit: int = 0
    parts: dict[str, int] = field(default_factory=dict)
    classes: dict[str, int] = field(default_factory=dict)
    sizes: dict[str, str] = field(default_factory=dict)

    def merge(self, other: Remarks) -> None:
        self.lowest = min(self.lowest, other.lowest)
        self.num_at_edge += other.num_at_edge
        self.max_16bit = max(self.max_16bit, other.max_16bit)
        self.num_16bit += other.num_16bit
        for mine, others in ((self.parts, other.parts), (self.classes, other.classes)):
            for name, n in others.items():
                mine[name] = mine.get(name, 0) + n
        for size, picture in other.sizes.items():
            if len(self.sizes) < 2:
                self.sizes.setdefault(size, picture)


@dataclass(slots=True)
class JobResult:
    """`shard` is None when no sample was left. `digests` uint8 [num_items, 2, 16]: of each item's picture bytes and of its annotation
    (zeros where it could not be read); `packed` bool [num_items]; `hashes` uint8 [num_items, HASH_BYTES], where they were wanted.
    """

    shard: WrittenShard | None
    digests: NDArray[np.uint8]
    packed: NDArray[np.bool_]
    findings: list[Finding]
    remarks: Remarks
    hashes: NDArray[np.uint8] | None = None


@dataclass(slots=True)
class SampleFacts:
    """What a sample tells besides itself; `picture_hash` only where `wants_hash` was set."""

    wants_hash: bool = False
    picture_hash: bytes = bytes(HASH_BYTES)
    image_crc32: int = 0
    image_digest: bytes = bytes(DIGEST_BYTES)
    annotation_digest: bytes = bytes(DIGEST_BYTES)
    remarks: Remarks = field(default_factory=Remarks)


def run_job(spec: Spec, source: Source, job: Job, path: Path | None, tick: Callable[[int], None], *, hashes: bool = False) -> JobResult:
    """Pack one shard to `path`; with path None only look (`pack check`): everything is read and decoded, nothing encoded or written.

    `hashes`: also take perceptual hashes of the pictures.
    `tick` is called with each item's position before it is read, and with their number at the end. A fault of a sample becomes a
    finding, never an exception; what is raised (disk full, no memory) is a fault of the job, and no file is left at `path`.
    """
    writer = None if path is None else open_writer(spec.layout, path, spec.task, **spec.writer_options())
    run = _JobRun(spec, source, job, writer, hashes)
    try:
        for start in range(0, len(job.items), BATCH_ITEMS):
            run.pack(range(start, min(start + BATCH_ITEMS, len(job.items))), tick)
        tick(len(job.items))
        return run.finish()
    except BaseException:
        if run.writer is not None:
            run.writer.abort()
        raise


class _JobRun:
    """A job's state while its batches go by."""

    def __init__(self, spec: Spec, source: Source, job: Job, writer: Writer | None, hashes: bool) -> None:
        self.spec, self.source, self.job, self.writer = spec, source, job, writer
        self._findings: list[Finding] = []
        self._remarks = Remarks()
        self._digests = np.zeros((len(job.items), 2, DIGEST_BYTES), np.uint8)
        self._packed = np.zeros(len(job.items), bool)
        self._hashes = np.zeros((len(job.items), HASH_BYTES), np.uint8) if hashes else None
        self._ids = class_ids(spec)

    def pack(self, batch: range, tick: Callable[[int], None]) -> None:
        """Annotations of a batch are read together, which takes half the time that they take between pictures (the processor's caches);
        pictures go one by one, each into the memory that the one before has left.
        """
        spec, items = self.spec, self.job.items
        said: list[list[Finding]] = [[] for _ in batch]
        annotations = [self.source.annotate(items[i], found.append) for i, found in zip(batch, said, strict=True)]
        digests: list[bytes] = []
        for i, annotation, found in zip(batch, annotations, said, strict=True):
            tick(i)
            facts = SampleFacts(wants_hash=self._hashes is not None)
            encode = self.writer is not None
            sample = make_sample(
                spec, self.source.root, self.job.keys[i], items[i], annotation, self._ids, found.append, facts, encode=encode
            )
            digests.append(facts.image_digest + facts.annotation_digest)
            if self._hashes is not None:
                self._hashes[i] = np.frombuffer(facts.picture_hash, np.uint8)
            self._findings += found
            if sample is None:
                continue
            self._remarks.merge(facts.remarks)
            if facts.remarks.sizes and next(iter(facts.remarks.sizes)) != next(iter(self._remarks.sizes)):
                continue  # said once, for the whole data set, by `remarks.remark_findings`
            self._packed[i] = True
            if self.writer is not None:
                self.writer.write(sample)
        self._digests[batch.start : batch.stop] = np.frombuffer(b"".join(digests), np.uint8).reshape(-1, 2, DIGEST_BYTES)

    def finish(self) -> JobResult:
        shard = None
        if self.writer is not None and self._packed.any():
            shard = self.writer.close()
        elif self.writer is not None:
            self.writer.abort()
        return JobResult(shard, self._digests, self._packed, self._findings, self._remarks, self._hashes)


def sizes_differ(sizes: Mapping[str, str]) -> Finding:
    """The data-set-level fault of a memmap of unequal images; `sizes` as in `Remarks`."""
    (size_a, a), (size_b, b), *_ = sizes.items()
    message = (
        f"a memmap needs images of one size: {a} is {size_a}, {b} is {size_b}; "
        "give --resize WxH (with --mode letterbox, stretch or crop), or use --format tar"
    )
    return Finding("error", "sizes-differ", ".", message)


def make_sample(
    spec: Spec,
    root: Path,
    key: int,
    item: Item,
    annotation: Annotation | None,
    ids: Mapping[str, int],
    report: Report,
    facts: SampleFacts,
    *,
    encode: bool,
) -> Sample | None:
    """Read, check, place and transform one item, `annotation` being what the source says about it (None: it was refused), and `ids`
    the class ids by name.

    None when it is left out; the picture is looked at even where the annotation was refused.
    """

    def refuse(code: str, message: str) -> None:
        report(Finding("skip", code, item.path, message, sample=item.path))

    if annotation is not None:
        facts.annotation_digest = annotation_digest(annotation)
    data = read_item(root, item, spec.max_file_bytes, report)
    if data is None:
        return None
    facts.image_crc32 = zlib.crc32(data)
    facts.image_digest = picture_digest(len(data), facts.image_crc32)
    try:
        info = probe(data, max_pixels=spec.max_pixels)
    except ImageError as e:
        refuse(e.code, str(e))
        return None
    unknown = [] if annotation is None else _unknown_classes(spec, annotation, ids)
    if annotation is not None and unknown:
        names = ", ".join(map(repr, unknown[:5]))
        report(Finding("skip", "unknown-class", annotation.path, f"class {names} is not one of the given classes", sample=item.path))
    if info.frames > 1:
        message = f"holds {info.frames} frames or pages; the first one is taken"
        report(Finding("warning", "many-frames", item.path, message, sample=item.path))
    picture = Picture(item.path, info.width, info.height, info.orientation)
    placed = None
    if annotation is not None:
        placed = place_boxes(picture, annotation, report, exif=spec.exif, outside=spec.boxes)
    turn = spec.exif != "ignore" if placed is None else placed.upright
    try:
        boxes = np.zeros((0, 4)) if placed is None else placed.boxes
        sample, stored_boxes = _pixels(spec, key, item, data, info, turn, boxes, facts, encode)
    except (ImageError, TransformError, EncodeError) as e:
        refuse(getattr(e, "code", "not-encodable"), str(e))
        return None
    if annotation is None or placed is None or unknown:
        return None
    if spec.restart_grid == "lossless":
        _add_restart_grid(sample, report)
    _annotate(spec, sample, annotation, ids, stored_boxes, placed.keep)
    facts.remarks.classes = {spec.classes[i]: 1 for i in {sample.label, *sample.labels.tolist()} if i >= 0}
    if spec.layout == "memmap":
        facts.remarks.sizes = {f"{sample.width}x{sample.height}": item.path}
    if len(placed.boxes):
        edge = [sample.original_width, sample.original_height]
        facts.remarks.lowest = float(placed.boxes.min())
        facts.remarks.num_at_edge = int((placed.boxes[:, 2:] == edge).any(1).sum())
    return sample


def read_item(root: Path, item: Item, max_bytes: int, report: Report) -> bytes | None:
    """The picture's bytes; None (and a finding) when it cannot be read, is too large, or is no longer the file that was listed."""
    try:
        with open(os.path.join(root, item.path), "rb", buffering=0) as f:
            stat = os.fstat(f.fileno())
            listed = File(item.path, item.num_bytes, item.mtime_ns)
            change = change_of(listed, stat)
            if change is None and stat.st_size > max_bytes:
                message = f"{stat.st_size} bytes, over the limit of {max_bytes} ([source] max_file_bytes)"
                report(Finding("skip", "file-too-large", item.path, message, sample=item.path))
                return None
            data = b""
            if change is None:
                data = f.readall()
                change = change_of(listed, os.fstat(f.fileno()))
                if change is None and len(data) != item.num_bytes:
                    change = "changed while packing: it grew or shrank while it was read; run the command again"
    except OSError as e:
        report(Finding("skip", "unreadable", item.path, f"cannot be read: {e.strerror}", sample=item.path))
        return None
    if change is not None:
        report(Finding("error", "source-changed", item.path, change, sample=item.path))
        return None
    return data


def picture_digest(num_bytes: int, crc32: int) -> bytes:
    """Size and CRC-32 of a picture file, in `DIGEST_BYTES`. A stronger hash of every byte would cost 5 % of the packing rate, and the
    CRC is needed for the index anyway; pictures with equal digests are compared byte by byte before anything is said of them.
    """
    return struct.pack("<QI4x", num_bytes, crc32)


def annotation_digest(annotation: Annotation) -> bytes:
    """Digest of what an annotation says; two pictures with equal bytes and equal digests are true copies."""
    h = hashlib.sha256(repr((annotation.label, annotation.labels)).encode("utf-8", "surrogatepass"))
    for array in (annotation.boxes, annotation.difficult, annotation.truncated, annotation.occluded):
        h.update(np.ascontiguousarray(array).tobytes())
    return h.digest()[:DIGEST_BYTES]


def class_ids(spec: Spec) -> dict[str, int]:
    """Class ids by name; made once for many samples."""
    return {name: i for i, name in enumerate(spec.classes)}


def _unknown_classes(spec: Spec, annotation: Annotation, ids: Mapping[str, int]) -> list[str]:
    names = annotation.labels if annotation.label is None else [annotation.label]
    return sorted({name for name in names if name not in ids}) if spec.task != "unlabelled" else []


def _pixels(
    spec: Spec, key: int, item: Item, data: bytes, info: ImageInfo, turn: bool, boxes: Boxes, facts: SampleFacts, encode: bool
) -> tuple[Sample, Boxes]:
    """The sample without its annotation, and where the boxes went: pixels decoded (strictly and whole), turned, transformed, encoded."""
    width, height = (info.height, info.width) if turn and info.orientation >= 5 else (info.width, info.height)
    sample = Sample(key, item.path, width, height, width, height, (1.0, 1.0, 0.0, 0.0))
    rotate = turn and info.orientation != 1
    part = _part(spec, info, rotate)
    sample.suffix = part
    facts.remarks.parts = {part: 1}
    if spec.layout == "tar" and spec.transform is None and info.verbatim and not rotate and _keeps_bytes(spec, info):
        seen = check(data, info, min_side=MIN_SIDE if facts.wants_hash else 1)
        if facts.wants_hash:
            facts.picture_hash = picture_hash(seen)
        sample.encoded = reset_orientation(data, info)
        if sample.encoded is data:
            sample.encoded_crc32 = facts.image_crc32
        return sample, boxes
    decoded = decode(data, info, pixel_range=spec.pixel_range)
    _remark_depth(decoded, facts.remarks)
    image = upright(decoded.image, info.orientation) if rotate else decoded.image
    if facts.wants_hash:
        facts.picture_hash = picture_hash(image)
    if spec.transform is not None:
        if encode:
            image, boxes, sample.affine = spec.transform(image, boxes)
            sample.height, sample.width = image.shape[:2]
        else:
            sample.width, sample.height = spec.transform.output_size(width, height)
    if spec.layout == "memmap":
        sample.image = image
    elif encode:
        grid = bool(spec.restart_grid)
        sample.encoded = encode_image(image, part, quality=spec.quality, restart_grid=grid, subsampling=spec.subsampling)
    else:
        require_fit(sample.width, sample.height, part)
    return sample, boxes


def _add_restart_grid(sample: Sample, report: Report) -> None:
    """Where a JPEG is packed as it is, or nearly, and has no grid; `pack check` looks too, for what it would say."""
    if sample.suffix != "jpg" or sample.encoded is None:
        return
    try:
        encoded = add_restart_grid(sample.encoded)
    except TranscodeError as e:
        message = f"no restart markers could be added, so a crop decodes the whole picture; it is stored as it is: {e}"
        report(Finding("warning", "no-restart-grid", sample.source, message, sample=sample.source))
        return
    if encoded is not sample.encoded:
        sample.encoded, sample.encoded_crc32 = encoded, None


def _part(spec: Spec, info: ImageInfo, rotate: bool) -> ImagePart:
    """The image part's name: under ``keep`` that of the bytes, or jpg for a JPEG and png for the rest where it must be encoded anew."""
    if spec.image != "keep":
        return spec.image
    if info.verbatim and spec.transform is None and not rotate:
        return "jpg" if info.format == "jpeg" else "webp" if info.format == "webp" else "png"
    return "jpg" if info.format == "jpeg" else "png"


def _keeps_bytes(spec: Spec, info: ImageInfo) -> bool:
    """``--image jpg`` encodes every JPEG anew (quality and restart grid are asked for); a PNG stays a PNG byte for byte."""
    return spec.image == "keep" or (spec.image == "png" and info.format == "png")


def _remark_depth(decoded: Decoded, remarks: Remarks) -> None:
    if decoded.max_16bit is not None:
        remarks.max_16bit, remarks.num_16bit = decoded.max_16bit, 1


def _annotate(spec: Spec, sample: Sample, annotation: Annotation, ids: Mapping[str, int], boxes: Boxes, keep: NDArray[np.int64]) -> None:
    sample.extra = annotation.extra
    if spec.task == "classification" and annotation.label is not None:
        sample.label = ids[annotation.label]
    if spec.task == "detection":
        if spec.transform is not None:  # rounding may carry an edge box a hair outside
            boxes = np.clip(boxes, 0, [sample.width, sample.height] * 2)
        sample.boxes = boxes.astype(np.float32)
        sample.labels = np.array([ids[annotation.labels[i]] for i in keep.tolist()], np.int64)
        sample.difficult = annotation.difficult[keep]
        sample.truncated = annotation.truncated[keep]
        sample.occluded = annotation.occluded[keep]
