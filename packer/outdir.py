"""The output folder: who may write it, one build at a time, and how a finished build takes the place of an older one.

The rule behind all of it: nothing is ever deleted that we did not make.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from loaders.format import FINDINGS_NAME, INDEX_DIR, MANIFEST_NAME, README_NAME, FormatError, Manifest, read_manifest
from packer.plan import SPLITS
from packer.records import PARTIAL_DIR, sync_path, write_file
from packer.sample import PackError

JOURNAL_NAME = "publishing.json"
_PLACE = re.compile(rf"({'|'.join(SPLITS)})/shard-[0-9]{{6,}}(\.tar(\.idx)?)?")


def siblings(out: Path) -> tuple[Path, Path]:
    """(``.OUT.new``, ``.OUT.old``): where ``--overwrite`` builds, and where the old data set waits for the swap.

    Beside the folder itself, where `out` is a link to it: a rename must stay within one file system.
    """
    out = out.resolve()
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
    """Make the folder if need be and hold it for this build alone. The lock ends with the process, however it ends.

    A folder that was made for nothing is removed again.
    """
    made = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as e:
        raise PackError(f"{folder}: cannot be made: {e.strerror}") from None
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            replaced = not os.path.samestat(os.fstat(fd), folder.stat())
        except (BlockingIOError, FileNotFoundError):
            replaced = True
        except OSError as e:
            raise PackError(f"{folder}: cannot be locked: {e.strerror}") from None
        if replaced:
            raise PackError(f"{folder}: another build is running there; wait for it, or choose another folder")
        yield
    finally:
        os.close(fd)
        if made:
            with contextlib.suppress(OSError):  # not empty, as it should be
                folder.rmdir()


def open_partial(out: Path) -> Path:
    """``OUT/.partial/``, made if need be, without half-written files of earlier runs; an interrupted publication is taken back first."""
    partial = out / PARTIAL_DIR
    try:
        partial.mkdir(exist_ok=True)
    except OSError as e:
        raise PackError(f"{out}: cannot be written: {e.strerror}") from None
    if not (out / MANIFEST_NAME).exists():
        _undo_publication(out, partial)
    for path in [*partial.glob("tmp-*"), *out.glob("tmp-*")]:
        _remove(path)
    return partial


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def begin_publication(partial: Path, moves: dict[str, str]) -> None:
    """Write down which file of ``.partial/`` goes where below OUT, before any goes."""
    write_file(partial / JOURNAL_NAME, json.dumps(moves).encode())


def _undo_publication(out: Path, partial: Path) -> None:
    """Shards back to ``.partial/``, and nothing else left of what `packer.publish` makes: another plan may follow."""
    journal = partial / JOURNAL_NAME
    if not journal.exists():
        return
    for name, place in _moves(journal).items():
        if (out / place).exists() and not (partial / name).exists():
            os.replace(out / place, partial / name)
    for split in SPLITS:
        for path in (out / split).glob("shard-*"):  # only where the journal is damaged: they are packed again
            _remove(path)
        with contextlib.suppress(OSError):  # not there, or not ours alone
            (out / split).rmdir()
    for name in (INDEX_DIR, FINDINGS_NAME, README_NAME):
        _remove(out / name)
    sync_path(partial)
    journal.unlink()


def _moves(journal: Path) -> dict[str, str]:
    """What the journal says, as far as it makes sense: nothing but shards is ever moved."""
    try:
        moves = json.loads(journal.read_bytes())
    except ValueError:
        return {}
    if not isinstance(moves, dict):
        return {}
    return {name: place for name, place in moves.items() if "/" not in name and _PLACE.fullmatch(str(place))}


def close_partial(partial: Path) -> None:
    """Remove ``.partial/`` after publication."""
    shutil.rmtree(partial, ignore_errors=True)


def known_files(manifest: Manifest) -> set[str]:
    """Path below OUT of every file that belongs to a packed data set."""
    known = {MANIFEST_NAME, README_NAME, *manifest.files}
    for split in manifest.splits.values():
        for shard in split.shards:
            known |= {shard.path} if shard.files is None else {f"{shard.path}/{name}" for name in shard.files}
    return known


def remove_data_set(folder: Path) -> str | None:
    """Remove a packed data set. Files that the manifest does not know are not ours: they stay, and the text says so.

    The manifest goes last, so that an interruption leaves a folder that is still known as ours.
    """
    try:
        known = known_files(read_manifest(folder))
    except FormatError as e:
        return f"{folder} is kept, since what is ours in it cannot be told: {e}"
    for path in known - {MANIFEST_NAME}:
        with contextlib.suppress(OSError):
            (folder / path).unlink()
    close_partial(folder / PARTIAL_DIR)
    for below, _, _ in os.walk(folder, topdown=False):
        with contextlib.suppress(OSError):  # not empty
            os.rmdir(below)
    (folder / MANIFEST_NAME).unlink()
    try:
        folder.rmdir()
    except OSError:
        return f"{folder} is kept: it holds files that pack did not make"
    return None


def swap_in(out: Path) -> str | None:
    """Put the finished ``.OUT.new`` in the place of OUT and remove the old data set. Returns what could not be removed, for the user."""
    new, old = siblings(out)
    out = out.resolve()
    os.replace(out, old)
    os.replace(new, out)
    sync_path(out.parent)
    return remove_data_set(old)


def repair_swap(out: Path) -> str | None:
    """Finish a swap that was interrupted between its two renames, or after them. Returns what was done, for the user."""
    new, old = siblings(out)
    if not (old / MANIFEST_NAME).is_file():
        return None
    with locked(old):  # held by a build that is in the middle of its swap
        if (out / MANIFEST_NAME).is_file():
            done = f"removed what an interrupted --overwrite of {out} had left"
        elif out.exists():
            return None
        elif (new / MANIFEST_NAME).is_file():
            os.replace(new, out.resolve())
            done = f"finished an interrupted --overwrite of {out}"
        else:
            os.replace(old, out.resolve())
            return f"took back an interrupted --overwrite of {out}"
        return remove_data_set(old) or done
