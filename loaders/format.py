"""THE SPECIFICATION of packed data, and the code that reads and writes its JSON and index.

Both sides import this module; it imports neither of them, nor torch, nor click.

Format version 1
================

A folder with a ``manifest.json`` is complete: it is written last, by an atomic rename. Everything is little-endian. Nothing depends
on time, host, absolute paths or the number of workers: the same input, options and library versions give the same bytes. ::

    out/
      manifest.json                      this module's `Manifest`
      findings.jsonl                     what was said about the input, one JSON object a line (may be empty)
      README.md                          data card, the only file that the manifest does not cover
      train/shard-000000.tar             layout "tar": WebDataset shards
      train/shard-000000.tar.idx         N+1 uint64: byte offset of each sample's first header, then of the end-of-archive blocks
      train/shard-000000/*.npy           layout "memmap": one folder a shard
      index/train/samples.npy            `SAMPLE_DTYPE [N]`, in stored order
      index/train/box_offsets.npy        int64 [N+1]; detection, both layouts: boxes of sample i are rows box_offsets[i]:box_offsets[i+1]
      index/train/boxes.npy              float32 [M, 4] xyxy, absolute pixels of the stored image, 0-based, half-open
      index/train/labels.npy             int64 [M], class ids
      index/train/difficult.npy          uint8 [M], 0 or 1
      index/train/restart_offsets.npy    int64 [N+1], CSR over restarts; tar, only where a JPEG of the split has a restart grid
      index/train/restarts.npy           uint32 [R], see `loaders.jpeg.restart_offsets`

Shards are the truth, ``index/`` is derived from them.

**Key.** The sample's position in the sorted listing of the source's pictures, refused ones included; unique over all splits.

**Tar shard.** Plain USTAR, regular files only; mtime, uid and gid 0, mode 0644, empty owner names; member names
``<key as nine digits>.<part>``; the parts of one sample are adjacent and sorted by name; two zero blocks at the end, nothing after
them. Parts: exactly one image (``jpg``, ``png`` or ``webp``, named by its bytes), ``json``, and ``cls`` (ASCII class id) for
classification. The JSON object always holds the same keys: ``source`` (path below the source root, POSIX), ``width``, ``height`` (of
the stored image), ``original_width``, ``original_height``, ``affine`` ``[sx, sy, tx, ty]`` with stored = original * s + t, in the
frame the annotations are in; classification adds ``label``; detection adds ``boxes`` (always floats), ``labels``, ``difficult``,
``truncated``, ``occluded`` (0 or 1); ``extra`` (strings) where CSV columns are kept on request.

**Memmap shard.** ``image.npy`` uint8 (or float16, float32) [N, H, W, 3] RGB; ``key.npy`` int64 [N]; ``source.npy`` bytes
[N], UTF-8; ``affine.npy`` float64 [N, 4]; ``original_size.npy`` int32 [N, 2] (h, w); classification ``label.npy`` int64 [N];
detection ``boxes.npy`` float32 [M, 4], ``labels.npy`` int64 [M], ``difficult.npy`` uint8 [M], ``box_offsets.npy`` int64 [N+1].
Each is a plain NPY file, readable with ``np.load(path, mmap_mode="r")``.

**Index.** Offsets point at a part's data, not at its header; in the memmap layout offsets, sizes and crc32 are 0.

**Canonical JSON** is ``json.dumps(value, sort_keys=True, indent=1, ensure_ascii=False)`` and a line feed, UTF-8. The manifest's
``self_sha256`` is over the canonical JSON without that key.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal, NoReturn

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from loaders.npy import FormatError as FormatError
from loaders.npy import open_array as open_array

FORMAT_VERSION: Literal[1] = 1
MANIFEST_NAME = "manifest.json"
FINDINGS_NAME = "findings.jsonl"
README_NAME = "README.md"
INDEX_DIR = "index"
IMAGE_PARTS = ("jpg", "png", "webp")
MAX_MANIFEST_BYTES = 1 << 28
MAX_MANIFEST_VALUES = 1 << 22
"""Above it reading takes gigabytes. A shard has about 7 values in the tar layout, 40 in the memmap layout."""
_MAX_PROBLEMS = 1000

Layout = Literal["tar", "memmap"]
Task = Literal["classification", "detection", "unlabelled"]

SAMPLE_DTYPE = np.dtype(
    [
        ("shard", "<u4"),
        ("key", "<i8"),
        ("image_offset", "<i8"),
        ("image_size", "<u4"),
        ("json_offset", "<i8"),
        ("json_size", "<u4"),
        ("image_crc32", "<u4"),
        ("json_crc32", "<u4"),
        ("width", "<u4"),
        ("height", "<u4"),
        ("label", "<i4"),  # -1: none
        ("num_boxes", "<u4"),
    ]
)


def canonical_json(value: Any) -> str:
    """The one spelling of a JSON document, so that equal values have equal bytes."""
    return json.dumps(value, sort_keys=True, indent=1, ensure_ascii=False) + "\n"


def sha256_file(path: Path) -> str:
    """Hex SHA-256 of a file's bytes, read in 1 MiB pieces."""
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def _below_root(path: str) -> str:
    pure = PurePosixPath(path)
    if not path or pure.is_absolute() or ".." in pure.parts or "\\" in path or "\0" in path or str(pure) != path:
        raise ValueError(f"{path!r} is not a plain path below the data set's folder")
    return path


RelPath = Annotated[str, AfterValidator(_below_root)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Count = Annotated[int, Field(ge=0, lt=1 << 62)]
SplitName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class FileEntry(_Strict):
    """A file's size in bytes and hex SHA-256."""

    num_bytes: Count
    sha256: Sha256


class ShardEntry(_Strict):
    """One shard: `sha256` in the tar layout, `files` (name -> entry) in the memmap layout. `num_bytes` is the sum over its files."""

    path: RelPath
    num_samples: Count
    num_bytes: Count
    sha256: Sha256 | None = None
    files: dict[RelPath, FileEntry] | None = None

    @model_validator(mode="after")
    def _one_kind(self) -> ShardEntry:
        if (self.sha256 is None) == (self.files is None):
            raise ValueError("a shard has either sha256 (tar) or files (memmap)")
        if self.files is not None and self.num_bytes != (total := sum(file.num_bytes for file in self.files.values())):
            raise ValueError(f"num_bytes of shard {self.path} is {self.num_bytes}, its files hold {total}")
        return self


class SplitEntry(_Strict):
    num_samples: Count
    shards: list[ShardEntry]


class FieldEntry(_Strict):
    """One field of a sample: where it is kept (`part` of a tar sample, or `file` of a memmap shard) and what it means."""

    dtype: str
    shape: list[int | str]
    part: str | None = None
    file: str | None = None
    meaning: str


class SourceEntry(_Strict):
    kind: str
    options: dict[str, Any]
    fingerprint: Sha256


class FindingCounts(_Strict):
    error: Count = 0
    skip: Count = 0
    warning: Count = 0


class Manifest(_Strict):
    """``manifest.json``. Data only; `read_manifest` and `manifest_text` are its reader and writer."""

    format_version: Literal[1]
    layout: Layout
    task: Task
    classes: list[str]
    fields: dict[str, FieldEntry]
    splits: dict[SplitName, SplitEntry]
    source: SourceEntry
    transform: dict[str, Any] | None
    output: dict[str, Any]
    findings: FindingCounts
    files: dict[RelPath, FileEntry]
    created_by: dict[str, str]

    @model_validator(mode="after")
    def _sums(self) -> Manifest:
        for name, split in self.splits.items():
            total = sum(s.num_samples for s in split.shards)
            if total != split.num_samples:
                raise ValueError(f"splits.{name}.num_samples is {split.num_samples}, its shards hold {total}")
            for shard in split.shards:
                if (shard.files is None) != (self.layout == "tar"):
                    raise ValueError(f"shard {shard.path} does not fit layout {self.layout!r}")
        return self


def manifest_text(manifest: Manifest) -> str:
    """The bytes of ``manifest.json`` as text: canonical JSON with `self_sha256`."""
    body = manifest.model_dump(mode="json", exclude_none=True)
    body["transform"] = manifest.transform
    return canonical_json({**body, "self_sha256": hashlib.sha256(canonical_json(body).encode()).hexdigest()})


def read_manifest(root: Path) -> Manifest:
    """Read and check ``root/manifest.json``.

    Raises:
        FormatError: it is missing, not canonical, of another version, or holds a wrong value; every problem is listed with its place.
    """
    path = root / MANIFEST_NAME
    text = _manifest_bytes(root, path)
    try:
        raw = json.loads(text, parse_constant=_no_constant)
        is_canonical = text == canonical_json(raw)
        said = raw.pop("self_sha256", None) if isinstance(raw, dict) else None
        # Writing the JSON is most of the work (0.1 s for 500 memmap shards): canonical text without this line need not be written again.
        line = f'\n "self_sha256": "{said}",'
        body = text.replace(line, "", 1) if is_canonical and line in text else canonical_json(raw)
        expected = hashlib.sha256(body.encode()).hexdigest()
    except (ValueError, RecursionError) as e:
        raise FormatError(f"{path}: is not JSON in UTF-8: {e or 'nested too deeply'}") from None
    if not isinstance(raw, dict):
        raise FormatError(f"{path}: expected a JSON object, found {type(raw).__name__}")
    version = raw.get("format_version")
    if version != FORMAT_VERSION or isinstance(version, bool):  # True equals 1
        raise FormatError(f"{path}: format_version is {version!r:.100}, this release reads version {FORMAT_VERSION}")
    try:
        manifest = Manifest.model_validate(raw)
    except ValidationError as e:
        if e.error_count() > _MAX_PROBLEMS:  # to list them would take a gigabyte a million
            raise FormatError(f"{path}: {e.error_count()} wrong values: this is no manifest of a packed data set") from None
        problems = "; ".join(f"{'.'.join(map(str, p['loc'])) or 'manifest'}: {p['msg']}"[:300] for p in e.errors()[:10])
        raise FormatError(f"{path}: {problems}") from None
    if said != expected or not is_canonical:
        raise FormatError(f"{path}: was changed after it was written: self_sha256 says {said!r:.100}, the content gives {expected!r}")
    return manifest


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _manifest_bytes(root: Path, path: Path) -> str:
    try:
        if not path.is_file():  # nor a pipe, which would never end
            raise FormatError(f"{path}: not found: {_why_no_manifest(root)}")
        size = path.stat().st_size
        if size > MAX_MANIFEST_BYTES:
            raise FormatError(f"{path}: {size} bytes, a manifest has at most {MAX_MANIFEST_BYTES}")
        text = path.read_bytes().decode()
        if (count := sum(map(text.count, ",[{"))) > MAX_MANIFEST_VALUES:
            raise FormatError(f"{path}: {count} values, a manifest has at most {MAX_MANIFEST_VALUES}")
        return text
    except OSError as e:
        raise FormatError(f"{path}: cannot be read: {e.strerror}") from None
    except UnicodeDecodeError as e:
        raise FormatError(f"{path}: is not JSON in UTF-8: {e}") from None


def _why_no_manifest(root: Path) -> str:
    if root.is_dir():
        return "the folder holds no finished packed data set (an interrupted build has none); a raw one is packed by `pack build SRC OUT`"
    return "it is a file, expected the folder of a packed data set" if root.exists() else "no such folder"


@dataclass(slots=True)
class Index:
    """Numbers for random access to one split, or to one shard while it is written.

    `samples` `SAMPLE_DTYPE [N]`; detection: `boxes` float32 [M, 4], `labels` int64 [M], `difficult` uint8 [M], `box_offsets`
    int64 [N+1], else None; `restarts` uint32 [R] with `restart_offsets` int64 [N+1] where a JPEG has a restart grid, else None.
    """

    samples: NDArray[np.void]
    boxes: NDArray[np.float32] | None = None
    labels: NDArray[np.int64] | None = None
    difficult: NDArray[np.uint8] | None = None
    box_offsets: NDArray[np.int64] | None = None
    restarts: NDArray[np.uint32] | None = None
    restart_offsets: NDArray[np.int64] | None = None


INDEX_ARRAYS: dict[str, np.dtype[Any]] = {
    "samples": SAMPLE_DTYPE,
    "boxes": np.dtype("<f4"),
    "labels": np.dtype("<i8"),
    "difficult": np.dtype("u1"),
    "box_offsets": np.dtype("<i8"),
    "restarts": np.dtype("<u4"),
    "restart_offsets": np.dtype("<i8"),
}


def index_path(split: str, name: str) -> str:
    """Path of an index array below the data set's folder."""
    return f"{INDEX_DIR}/{split}/{name}.npy"


def shard_path(split: str, number: int, layout: Layout) -> str:
    """Path of a shard below the data set's folder."""
    return f"{split}/shard-{number:06d}" + (".tar" if layout == "tar" else "")


def open_index(root: Path, manifest: Manifest, split: str) -> Index:
    """Map a split's index arrays, in O(1) for any number of samples. No checksum is looked at: that is `pack verify`'s work.

    Raises:
        FormatError: the split does not exist, or an array is missing, has another dtype or does not fit the others.
    """
    if split not in manifest.splits:
        have = ", ".join(sorted(manifest.splits)) or "none"
        raise FormatError(f"{root}: has no split {split!r}; it has: {have}")
    arrays = {
        name: open_array(root / index_path(split, name), dtype)
        for name, dtype in INDEX_ARRAYS.items()
        if name == "samples" or index_path(split, name) in manifest.files
    }
    index = Index(**arrays)
    n = manifest.splits[split].num_samples
    if index.samples.shape != (n,):
        raise FormatError(f"{root / index_path(split, 'samples')}: shape {index.samples.shape}, the manifest says ({n},)")
    if manifest.task == "detection":
        if index.box_offsets is None or index.boxes is None or index.labels is None or index.difficult is None:
            raise FormatError(f"{root / INDEX_DIR / split}: the manifest lists no boxes, labels, difficult or box_offsets")
        m = int(index.box_offsets[-1]) if index.box_offsets.shape == (n + 1,) else -1
        if index.boxes.shape != (m, 4) or index.labels.shape != (m,) or index.difficult.shape != (m,):
            raise FormatError(
                f"{root / INDEX_DIR / split}: box arrays do not fit together: box_offsets {index.box_offsets.shape} ends at {m}, "
                f"boxes {index.boxes.shape}, labels {index.labels.shape}, difficult {index.difficult.shape}, {n} samples"
            )
    if index.restart_offsets is not None:
        r = int(index.restart_offsets[-1]) if index.restart_offsets.shape == (n + 1,) else -1
        if index.restarts is None or index.restarts.shape != (r,):
            raise FormatError(f"{root / INDEX_DIR / split}: restarts and restart_offsets do not fit together")
    return index
