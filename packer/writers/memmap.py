"""The memmap layout: one shard is a folder of plain NPY files, written and read back."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loaders.format import FormatError, Index, Layout, Task, open_array
from packer.sample import PackError, Sample, WrittenShard
from packer.writers.csr import IndexBuilder


def fixed_files(task: Task, dtype: str) -> dict[str, tuple[str, tuple[int, ...] | None]]:
    """name -> (dtype, shape of one entry) of every file of a shard; None where only the shard itself can tell."""
    files: dict[str, tuple[str, tuple[int, ...] | None]] = {
        "image.npy": (np.dtype(dtype).newbyteorder("<").str, None),
        "key.npy": ("<i8", ()),
        "source.npy": ("S", ()),
        "affine.npy": ("<f8", (4,)),
        "original_size.npy": ("<i4", (2,)),
    }
    if task == "classification":
        files["label.npy"] = ("<i8", ())
    if task == "detection":
        files |= {"boxes.npy": ("<f4", (4,)), "labels.npy": ("<i8", ()), "difficult.npy": ("|u1", ()), "box_offsets.npy": ("<i8", ())}
    return files


def npy_header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """Magic string and header of an NPY file, version 1.0. NumPy pads it so that its length does not depend on ``shape[0]``."""
    f = io.BytesIO()
    np.lib.format.write_array_header_1_0(f, {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape})
    return f.getvalue()


class MemmapWriter:
    """Writes one memmap shard into the folder `path`. See `packer.sample.Writer`.

    `dtype` uint8, float16 or float32. `normalize` is (mean, std), each three numbers for R, G, B on the 0 to 1 scale: the stored
    value is (v / 255 - mean) / std. Without it a float image holds v / 255.
    """

    layout: Layout = "memmap"

    def __init__(
        self, path: Path, task: Task, *, dtype: str = "uint8", normalize: tuple[tuple[float, ...], tuple[float, ...]] | None = None
    ) -> None:
        self._path, self._task = path, task
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._table = _cast_table(self._dtype, normalize)
        path.mkdir()
        self._image = (path / "image.npy").open("wb", buffering=1 << 20)
        self._shape: tuple[int, ...] | None = None
        self._index = IndexBuilder(task)
        self._columns: dict[str, list[Any]] = {"key": [], "source": [], "affine": [], "original_size": [], "label": []}

    def write(self, sample: Sample) -> None:
        image = sample.image
        if image is None:
            raise PackError(f"{sample.source}: the memmap layout needs decoded pixels")
        if self._shape is None:
            self._shape = image.shape
            self._image.write(npy_header(self._dtype, (0, *image.shape)))
        if image.shape != self._shape:
            raise PackError(f"{sample.source}: image of shape {image.shape} in a shard of {self._shape}")
        # uint8 passes through; floats come from a table of 256 values per channel, so each pixel is computed once per data set.
        data = image if self._table is None else self._table[image, np.arange(3)]
        self._image.write(np.ascontiguousarray(data).data)
        for name, value in (
            ("key", sample.key),
            ("source", sample.source.encode()),
            ("affine", sample.affine),
            ("original_size", (sample.original_height, sample.original_width)),
            ("label", sample.label),
        ):
            self._columns[name].append(value)
        self._index.add(memmap_row(sample.key, sample.width, sample.height, sample.label), sample.boxes, sample.labels, sample.difficult)

    def close(self) -> WrittenShard:
        n = len(self._index)
        shape = self._shape or (0, 0, 3)
        self._image.seek(0)
        self._image.write(npy_header(self._dtype, (n, *shape)))
        self._image.close()
        index = self._index.build()
        c = self._columns
        arrays: dict[str, NDArray[Any]] = {
            "key.npy": np.array(c["key"], "<i8"),
            "source.npy": np.array(c["source"], "S"),
            "affine.npy": np.array(c["affine"], "<f8").reshape(n, 4),
            "original_size.npy": np.array(c["original_size"], "<i4").reshape(n, 2),
        }
        if self._task == "classification":
            arrays["label.npy"] = np.array(c["label"], "<i8")
        if index.boxes is not None and index.labels is not None and index.difficult is not None and index.box_offsets is not None:
            arrays |= {"boxes.npy": index.boxes, "labels.npy": index.labels}
            arrays |= {"difficult.npy": index.difficult, "box_offsets.npy": index.box_offsets}
        for name, array in arrays.items():
            with (self._path / name).open("wb") as f:
                np.lib.format.write_array(f, array, version=(1, 0), allow_pickle=False)
        return WrittenShard({name: _entry(self._path / name) for name in sorted(["image.npy", *arrays])}, index)

    def abort(self) -> None:
        with contextlib.suppress(OSError):  # closing writes what is still buffered; on a full disk that fails once more
            self._image.close()
        shutil.rmtree(self._path, ignore_errors=True)


def _entry(path: Path) -> tuple[int, str]:
    with path.open("rb") as f:
        return os.fstat(f.fileno()).st_size, hashlib.file_digest(f, "sha256").hexdigest()


def _cast_table(dtype: np.dtype[Any], normalize: tuple[tuple[float, ...], tuple[float, ...]] | None) -> NDArray[Any] | None:
    """[256, 3] values that uint8 pixels become, or None for uint8."""
    if dtype == np.uint8:
        return None
    mean, std = (np.asarray(v, np.float64) for v in normalize or ((0.0,) * 3, (1.0,) * 3))
    table: NDArray[Any] = ((np.arange(256)[:, None] / 255 - mean) / std).astype(dtype)
    return table


def memmap_row(key: int, width: int, height: int, label: int) -> dict[str, int]:
    """A `SAMPLE_DTYPE` row as a dict: offsets, sizes and crc32 are 0 in this layout."""
    zero = dict.fromkeys(("image_offset", "image_size", "json_offset", "json_size", "image_crc32", "json_crc32", "num_boxes"), 0)
    return {**zero, "key": key, "width": width, "height": height, "label": label}


def derive_index(path: Path, task: Task, dtype: str) -> tuple[Index, NDArray[np.bytes_]]:
    """Index and source names of the shard in folder `path`, from its files alone.

    Raises:
        FormatError: a file is missing, unreadable, of another dtype or shape, or does not fit the others; it names the file.
    """
    arrays = {name: open_array(path / name) for name in fixed_files(task, dtype)}
    n = _rows(arrays["key.npy"])
    num_boxes = _rows(arrays["boxes.npy"]) if task == "detection" else 0
    for name, (kind, entry) in fixed_files(task, dtype).items():
        array = arrays[name]
        rows = {"boxes.npy": num_boxes, "labels.npy": num_boxes, "difficult.npy": num_boxes, "box_offsets.npy": n + 1}.get(name, n)
        if kind != ("S" if array.dtype.kind == "S" else array.dtype.str):
            raise FormatError(f"{path / name}: dtype is {array.dtype}, expected {kind}")
        if (
            array.ndim != (4 if entry is None else 1 + len(entry))
            or array.shape[0] != rows
            or (entry is not None and array.shape[1:] != entry)
        ):
            raise FormatError(f"{path / name}: shape is {array.shape}, expected {rows} rows of {entry or '(H, W, 3)'}")
    image = arrays["image.npy"]
    if image.shape[3] != 3:
        raise FormatError(f"{path / 'image.npy'}: shape is {image.shape}, expected [N, H, W, 3]")
    counts = np.zeros(n, "<i8")
    if task == "detection":
        offsets = arrays["box_offsets.npy"]
        counts = np.diff(offsets)
        if offsets[0] != 0 or offsets[-1] != num_boxes or (counts < 0).any():
            raise FormatError(f"{path / 'box_offsets.npy'}: does not rise from 0 to the {num_boxes} boxes")
    builder = IndexBuilder(task)
    labels = arrays["label.npy"] if task == "classification" else np.full(n, -1)
    start = 0
    for i in range(n):
        end = start + int(counts[i])
        boxes: list[Any] = [arrays[f"{k}.npy"][start:end] if task == "detection" else np.zeros(0) for k in ("boxes", "labels", "difficult")]
        row = memmap_row(int(arrays["key.npy"][i]), image.shape[2], image.shape[1], int(labels[i]))
        builder.add(row, boxes[0].reshape(-1, 4), boxes[1], boxes[2])
        start = end
    return builder.build(), arrays["source.npy"]


def _rows(array: NDArray[Any]) -> int:
    return int(array.shape[0]) if array.ndim else 0
