"""NPY files: mapped in O(1), from any number of threads at a time, and nothing in them is trusted.

NumPy's own reader evaluates the header as a Python literal, which CPython 3.11 cannot do in two threads at once ("SystemError: AST
constructor recursion depth mismatch", python/cpython#106905): a set of many shards, opened while training, would fail now and then.
"""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray


class FormatError(ValueError):
    """Packed data is not as the specification says. The message names the file, what was found and what was expected."""


_MAGIC = b"\x93NUMPY\x01\x00"
_HEADER = re.compile(
    r"\{'descr': (?P<descr>'[^']*'|\[[^\]]*\]), 'fortran_order': (?P<fortran>True|False), 'shape': \((?P<shape>[0-9, ]*)\), \} *\n"
)
_FIELD = r"\('(\w+)', '([<>|=][a-zA-Z][0-9]+)'\)"
_FIELDS = re.compile(rf"\[{_FIELD}(, {_FIELD})*\]")
_PLAIN = re.compile(r"'([<>|=][a-zA-Z][0-9]+)'")


def open_array(path: Path, dtype: np.dtype[Any] | None = None) -> NDArray[Any]:
    """Map one NPY file for reading, in O(1) (an empty array is returned as it is: nothing can be mapped).

    Raises:
        FormatError: missing, no NPY file, cut short, or of another dtype.
    """
    try:
        if not path.is_file():  # nor a pipe, which would never end
            raise FormatError(f"{path}: not found")
        array = map_array(path)
    except FormatError:
        raise
    except OSError as e:
        raise FormatError(f"{path}: cannot be opened: {e.strerror or e}") from None
    except Exception as e:  # a damaged header may make NumPy raise anything; all of it is about this file
        raise FormatError(f"{path}: is no complete NPY file: {e or type(e).__name__}") from None
    if dtype is not None and array.dtype != dtype:
        raise FormatError(f"{path}: dtype is {array.dtype}, expected {dtype}")
    return array


def map_array(path: Path) -> NDArray[Any]:
    """`open_array` without its names for what is wrong.

    Raises:
        OSError: it cannot be opened.
        ValueError: as `read_header`.
    """
    with path.open("rb") as f:
        shape, dtype, start = read_header(f)
        return np.memmap(f, dtype, "r", start, shape) if math.prod(shape) else np.zeros(shape, dtype)


def read_header(f: BinaryIO) -> tuple[tuple[int, ...], np.dtype[Any], int]:
    """Shape and dtype of an NPY file's values, and the bytes before them.

    Raises:
        ValueError: it is no NPY file of version 1.0 in C order, or not as long as its header says.
    """
    magic = f.read(len(_MAGIC) + 2)
    if magic[:-2] != _MAGIC:
        raise ValueError(f"it starts with {magic[:-2]!r}, expected {_MAGIC!r}")
    shape, fortran, dtype = _parsed(f.read(int.from_bytes(magic[-2:], "little")))
    start = f.tell()
    if fortran or math.prod(shape) * dtype.itemsize != os.fstat(f.fileno()).st_size - start:
        raise ValueError(f"header says {dtype} {list(shape)}{' in Fortran order' if fortran else ''}, which the bytes are not")
    return shape, dtype, start


def _parsed(header: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, whether in Fortran order, dtype."""
    match = _HEADER.fullmatch(header.decode("latin-1"))
    descr = match["descr"] if match else ""
    if match is None or not (_PLAIN.fullmatch(descr) or _FIELDS.fullmatch(descr)):
        raise ValueError(f"the header is {header[:200]!r}, which NumPy does not write for plain numbers, text or rows of them")
    dtype = np.dtype(descr.strip("'") if descr.startswith("'") else re.findall(_FIELD, descr))
    if dtype.hasobject:
        raise ValueError(f"dtype is {dtype}: objects are not read")
    return tuple(int(n) for n in match["shape"].split(",") if n.strip()), match["fortran"] == "True", dtype
