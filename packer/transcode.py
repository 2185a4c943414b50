"""Restart markers for JPEGs that are packed as they are, added without decoding to pixels.

The work is done by libjpeg-turbo's program ``jpegtran``: it reads the quantised coefficients and writes the same ones with other entropy
coding, so nothing is lost. No Python package does this: TurboJPEG's own transform knows no restart markers. The bytes are a function of
the picture and of the program's version, which goes into the manifest's `created_by` and into the key of a job's record.
"""

from __future__ import annotations

import functools
import os
import shutil
import signal
import subprocess

import numpy as np

from loaders.codecs import DecodeError, decode_image
from loaders.jpeg import JpegError, interval_of_row, parse_header, restart_offsets
from packer.sample import PackError, UsageError

_PROGRAM = "jpegtran"
_TIMEOUT_S = 600
_WARNED = 2  # the exit status for "written, with a warning"; what was written is compared in any case


class TranscodeError(Exception):
    """No restart grid can be added to a JPEG. The message says why, and lacks the file's name."""


def program_version() -> str:
    """What ``jpegtran`` says of itself, such as "libjpeg-turbo version 2.1.5 (build 20230203)".

    Raises:
        UsageError: there is none, or it is not libjpeg-turbo's (others choose other codes, or write progressive pictures).
    """
    try:
        ran = subprocess.run([_path(), "-version"], stdin=subprocess.DEVNULL, capture_output=True, timeout=_TIMEOUT_S, check=False)
        lines = (ran.stdout + ran.stderr).decode(errors="replace").splitlines()
    except (OSError, subprocess.TimeoutExpired) as e:
        lines = [str(e)]
    said = " ".join(lines[0].split())[:100] if lines else ""
    if not said.startswith("libjpeg-turbo version "):
        raise UsageError(f"restart_grid lossless needs the {_PROGRAM} of libjpeg-turbo; {_path()} says {said!r}. {_WAY_OUT}")
    return said


_WAY_OUT = "Install the package libjpeg-turbo-progs (Debian, Ubuntu) or libjpeg-turbo-utils (Fedora), or give --restart-grid on"


def _path() -> str:
    return _found(os.environ.get("PATH", os.defpath))


@functools.cache
def _found(search_path: str) -> str:
    """Looked for once, not for each picture: all are to be made by one program."""
    path = shutil.which(_PROGRAM, path=search_path)
    if path is None:
        raise UsageError(f"restart_grid lossless needs the program {_PROGRAM}, which is not on the PATH. {_WAY_OUT}")
    return path


def add_restart_grid(data: bytes) -> bytes:
    """A JPEG with the same pixels, bit for bit, and the restart grid of `loaders.jpeg.interval_of_row`; `data` where it has one already.

    `data` decodes strictly. The result is baseline (of a progressive or arithmetic-coded picture too), with optimised Huffman tables and
    all metadata segments; bytes after the picture's end are dropped. Takes about 10 ms, more for large pictures.

    Raises:
        TranscodeError: what `jpegtran` made is not that, or it made nothing.
        MemoryError: it had not enough memory, or was killed: a fault of the machine, not of the picture.
        PackError: it does not end, or is there no more.
    """
    if len(restart_offsets(data)):
        return data
    try:
        header = parse_header(data)
    except JpegError as e:
        raise TranscodeError(str(e)) from None
    made = _run(data, interval_of_row(header.mcus[0], header.mcu_size[0]))
    if not len(restart_offsets(made)):
        raise TranscodeError(f"{_PROGRAM} wrote a picture without a usable grid")
    try:
        same = np.array_equal(decode_image(data, "jpg"), decode_image(made, "jpg"))
    except DecodeError as e:
        raise TranscodeError(f"what {_PROGRAM} wrote cannot be decoded: {e}") from None
    if not same:
        raise TranscodeError(f"{_PROGRAM} wrote a picture with other pixels")
    return made


def _run(data: bytes, interval: int) -> bytes:
    command = [_path(), "-copy", "all", "-optimize", "-restart", f"{interval}B"]
    try:
        ran = subprocess.run(command, input=data, capture_output=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise PackError(f"{_PROGRAM} has not ended within {_TIMEOUT_S} s on a JPEG of {len(data)} bytes; give --restart-grid on") from None
    except (FileNotFoundError, PermissionError) as e:
        raise PackError(
            f"{command[0]}: {e.strerror}: the program went away while packing; bring it back and run the same command again, finished "
            "shards are kept"
        ) from None
    if ran.returncode == -signal.SIGKILL or b"Insufficient memory" in ran.stderr:
        raise MemoryError(f"{_PROGRAM} had not enough memory for a JPEG of {len(data)} bytes")
    if ran.returncode not in (0, _WARNED):
        reason = " ".join(ran.stderr.decode(errors="replace").split())[:300]
        raise TranscodeError(f"{_PROGRAM} ended with status {ran.returncode}: {reason or 'without a reason'}")
    return ran.stdout
