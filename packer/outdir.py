"""The output folder: who may write it, one build at a time, and how a finished build takes the place of an older one.

The rule behind all of it: nothing is ever deleted that we did not make.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from loaders.format import MANIFEST_NAME
from packer.records import PARTIAL_DIR, sync_folder, write_file
from packer.sample import PackError

JOURNAL_NAME = "publishing.json"


def siblings(out: Path) -> tuple[Path, Path]:
    """(``.OUT.new``, ``.OUT.old``): where ``--overwrite`` builds, and where the old data set waits for the swap."""
    return out.with_name(f".{out.name}.new"), out.with_name(f".{out.name}.old")


def check_places(src: Path, out: Path) -> None:
    """Refuse, before any work, places that cannot be right.

    Raises:
        PackError: SRC is no folder, OUT is a file, one lies inside the other, or OUT is a folder that is not ours.
    """
    if not src.exists():
        raise PackError(f"{src}: no such folder")
    if not src.is_dir():
        raise PackError(f"{src}: is not a folder; SRC is the folder that holds the data set")
    if out.is_symlink() and not out.exists():
        raise PackError(f"{out}: is a broken symbolic link")
    if out.exists() and not out.is_dir():
        raise PackError(f"{out}: is a file; OUT must be a new or empty folder")
    a, b = src.resolve(), out.resolve()
    if a == b or a in b.parents or b in a.parents:
        raise PackError(f"SRC {src} and OUT {out} must not lie inside one another")
    if out.is_dir() and not is_ours(out) and any(out.iterdir()):
        raise PackError(f"{out}: is not empty and was not made by pack (no {MANIFEST_NAME}, no {PARTIAL_DIR}/); choose another folder")


def is_ours(out: Path) -> bool:
    """Whether a folder holds a packed data set or an unfinished build of one."""
    return (out / MANIFEST_NAME).is_file() or (out / PARTIAL_DIR).is_dir()


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make the folder if need be and hold it for this build alone. The lock ends with the process, however it ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as e:
        raise PackError(f"{folder}: cannot be made: {e.strerror}") from None
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise PackError(f"{folder}: another build is running there; wait for it, or choose another folder") from None
        yield
    finally:
        os.close(fd)


def open_partial(out: Path) -> Path:
    """``OUT/.partial/``, made if need be, without half-written files of earlier runs; an interrupted publication is taken back first."""
    partial = out / PARTIAL_DIR
    try:
        partial.mkdir(exist_ok=True)
    except OSError as e:
        raise PackError(f"{out}: cannot be written: {e.strerror}") from None
    _undo_publication(out, partial)
    for path in partial.glob("tmp-*"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    return partial


def begin_publication(partial: Path, moves: dict[str, str]) -> None:
    """Write down which file of ``.partial/`` goes where below OUT, before any goes."""
    write_file(partial / JOURNAL_NAME, json.dumps(moves).encode())


def _undo_publication(out: Path, partial: Path) -> None:
    journal = partial / JOURNAL_NAME
    if not journal.exists():
        return
    if not (out / MANIFEST_NAME).exists():
        for name, place in json.loads(journal.read_bytes()).items():
            if (out / place).exists() and not (partial / name).exists():
                os.replace(out / place, partial / name)
        sync_folder(partial)
    journal.unlink()


def close_partial(partial: Path) -> None:
    """Remove ``.partial/`` after publication."""
    shutil.rmtree(partial, ignore_errors=True)


def swap_in(out: Path) -> None:
    """Put the finished ``.OUT.new`` in the place of OUT and remove the old data set."""
    new, old = siblings(out)
    os.replace(out, old)
    os.replace(new, out)
    sync_folder(out.parent)
    shutil.rmtree(old, ignore_errors=True)


def repair_swap(out: Path) -> str | None:
    """Finish a swap that was interrupted between its two renames, or after them. Returns what was done, for the user."""
    new, old = siblings(out)
    if not (old / MANIFEST_NAME).is_file():
        return None
    if not out.exists():
        if (new / MANIFEST_NAME).is_file():
            os.replace(new, out)
            shutil.rmtree(old, ignore_errors=True)
            return f"finished an interrupted --overwrite of {out}"
        os.replace(old, out)
        return f"took back an interrupted --overwrite of {out}"
    if (out / MANIFEST_NAME).is_file():
        shutil.rmtree(old, ignore_errors=True)
        return f"removed what an interrupted --overwrite of {out} had left"
    return None
