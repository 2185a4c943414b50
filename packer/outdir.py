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
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

from loaders.format import (
    FINDINGS_NAME,
    INDEX_ARRAYS,
    INDEX_DIR,
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    README_NAME,
    FormatError,
    Manifest,
    read_manifest,
)
from packer.plan import SPLITS
from packer.records import PARTIAL_DIR, sync_path, write_file
from packer.sample import PackError, UsageError
from packer.sources.tree import check_root

JOURNAL_NAME = "publishing.json"
MARKER_NAME = "shardpack"
MARKER_TEXT = b"Unfinished work of pack (shardpack). The same build command again goes on from here and removes this folder in the end.\n"
MAX_NAME_BYTES = 255 - len("..new")
_SPLIT = f"(?:{'|'.join(SPLITS)})"
_PLACE = re.compile(rf"{_SPLIT}/shard-[0-9]{{6,}}(\.tar(\.idx)?)?")
_TOP = "|".join(map(re.escape, (MANIFEST_NAME, README_NAME, FINDINGS_NAME)))
_WRITTEN = re.compile(rf"{re.escape(README_NAME)}|{re.escape(FINDINGS_NAME)}|{INDEX_DIR}/{_SPLIT}/(?:{'|'.join(INDEX_ARRAYS)})\.npy")
_TEMPORARY = re.compile(rf"tmp-[0-9]+-(?:{_TOP}|(?:{'|'.join(INDEX_ARRAYS)})\.npy)")


def siblings(out: Path) -> tuple[Path, Path]:
    """(``.OUT.new``, ``.OUT.old``): where ``--overwrite`` builds, and where the old data set waits for the swap.

    Beside the folder itself, where `out` is a link to it: a rename must stay within one file system.
    """
    out = out.resolve()
    return out.with_name(f".{out.name}.new"), out.with_name(f".{out.name}.old")


def check_places(src: Path, out: Path) -> None:
    """Refuse, before any work, places that cannot be right.

    Raises:
        UsageError: OUT's name is too long.
        PackError: SRC is no folder, OUT is a file, one lies inside the other, or OUT is a folder that is not ours.
    """
    check_root(src)
    name = out.resolve().name
    if len(os.fsencode(name)) > MAX_NAME_BYTES:
        raise UsageError(
            f"OUT's name {name[:40]!r}... has {len(os.fsencode(name))} bytes, at most {MAX_NAME_BYTES} can be: "
            "a file system allows 255, and --overwrite works beside OUT under longer names"
        )
    if out.is_symlink() and not out.exists():
        raise PackError(f"{out}: is a broken symbolic link")
    if out.exists() and not out.is_dir():
        raise PackError(f"{out}: is a file; OUT must be a new or empty folder")
    a, b = src.resolve(), out.resolve()
    if a == b or a in b.parents or b in a.parents:
        raise PackError(f"SRC {src} and OUT {out} must not lie inside one another")
    if out.is_dir() and not is_ours(out) and not is_blank(out):
        raise PackError(
            f"{out}: is not empty and was not made by pack (no {MANIFEST_NAME} and no {PARTIAL_DIR}/ of pack in it); choose another folder"
        )


def check_writable(out: Path) -> None:
    """Refuse, before any work, a folder that the work could not be written to.

    Raises:
        PackError: this process may not write there.
    """
    if not os.access(out, os.W_OK | os.X_OK):
        raise PackError(f"{out}: cannot be written: no permission, or the file system is read-only")


def is_blank(folder: Path) -> bool:
    """Whether there is nothing to lose: empty, or a build was killed before it could mark its ``.partial/``."""
    return all(p.name == PARTIAL_DIR and p.is_dir() and not p.is_symlink() and not any(p.iterdir()) for p in folder.iterdir())


def is_ours(folder: Path) -> bool:
    """Whether a folder holds a packed data set, or an unfinished build of one, made by pack."""
    if os.path.lexists(folder / MANIFEST_NAME):
        return _has_our_manifest(folder)
    return _is_marked(folder / PARTIAL_DIR)


def _has_our_manifest(folder: Path) -> bool:
    """By its shape; where that is damaged, by other files that nobody else makes. A ``manifest.json`` alone may be anyone's."""
    path = folder / MANIFEST_NAME
    if not path.is_file():
        return False
    with contextlib.suppress(OSError, ValueError, RecursionError):
        raw = json.loads(path.read_bytes()) if path.stat().st_size <= MAX_MANIFEST_BYTES else None
        if isinstance(raw, dict) and {"format_version", "self_sha256"} <= raw.keys():
            return True
    return holds_packed_files(folder)


def holds_packed_files(folder: Path) -> bool:
    """Whether some files are there that nobody but pack makes."""
    signs = (f"{INDEX_DIR}/{{}}/samples.npy", "{}/shard-000000.tar.idx", "{}/shard-000000/affine.npy")
    return any((folder / sign.format(split)).is_file() for sign in signs for split in SPLITS)


def _is_marked(partial: Path) -> bool:
    """Whether this is a ``.partial/`` that `open_partial` made. A kill may cut the marker's text short, before anything else is there."""
    marker = partial / MARKER_NAME
    if partial.is_symlink() or not marker.is_file():
        return False
    with marker.open("rb") as f:
        text = f.read(len(MARKER_TEXT) + 1)
    return text == MARKER_TEXT or (MARKER_TEXT.startswith(text) and [path.name for path in partial.iterdir()] == [MARKER_NAME])


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
        try:
            if made:
                with contextlib.suppress(OSError):  # a parent that may not be read cannot be synced
                    sync_path(folder.parent)
            yield
        finally:
            if made:  # still under the lock: another build must not find the folder and then lose it
                with contextlib.suppress(OSError):  # not empty, as it should be
                    folder.rmdir()
    finally:
        os.close(fd)


def open_partial(out: Path) -> Path:
    """``OUT/.partial/``, made and marked if need be, without half-written files of earlier runs.

    An interrupted publication is taken back first.

    Raises:
        PackError: it cannot be written, was not made by pack, or its journal is damaged.
    """
    partial = out / PARTIAL_DIR
    try:
        partial.mkdir(exist_ok=True)
        if not _is_marked(partial) and (partial.is_symlink() or any(partial.iterdir())):
            raise PackError(f"{partial}: was not made by pack, which needs this place; move it")
        _mark(partial)
    except OSError as e:
        raise PackError(f"{out}: cannot be written: {e.strerror}") from None
    if (out / MANIFEST_NAME).exists():
        (partial / JOURNAL_NAME).unlink(missing_ok=True)  # that publication came to its end
    else:
        _undo_publication(out, partial)
    for path in partial.glob("tmp-*"):
        _remove(path)
    remove_temporary(out)
    return partial


def _mark(partial: Path) -> None:
    """Write the marker, on disk before anything that it vouches for."""
    marker = partial / MARKER_NAME
    if marker.is_file() and marker.read_bytes() == MARKER_TEXT:
        return
    marker.write_bytes(MARKER_TEXT)
    for path in (marker, partial, partial.parent):
        sync_path(path)


def remove_temporary(folder: Path) -> None:
    """Remove the files that a killed `records.write_file` of ours left right in `folder`."""
    for path in folder.glob("tmp-*"):
        if _TEMPORARY.fullmatch(path.name) and path.is_file() and not path.is_symlink():
            path.unlink()


def _remove(path: Path) -> None:
    """Remove a file or folder in ``.partial/``; nowhere else is a whole folder ever removed."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def begin_publication(out: Path, partial: Path, moves: dict[str, str], files: Iterable[str] = ()) -> None:
    """Write down, before any is there, which file of ``.partial/`` goes where below `out` and which `files` may be written there.

    Raises:
        PackError: something lies in one of these places already.
    """
    written = list(files)
    for place in [*moves.values(), *written]:
        if os.path.lexists(out / place) and place != FINDINGS_NAME:  # a failed build leaves its findings
            raise PackError(f"{out / place}: is in the way of what is published now, and is not of this build; move it")
    write_file(partial / JOURNAL_NAME, json.dumps({"moves": moves, "files": written}).encode())


def _undo_publication(out: Path, partial: Path) -> None:
    """Shards back to ``.partial/``, and nothing left of what the journal says: another plan may follow."""
    journal = partial / JOURNAL_NAME
    if not journal.exists():
        return
    moves, files = _read_journal(journal, out)
    for name, place in moves.items():
        if (out / place).exists() and not (partial / name).exists():
            os.replace(out / place, partial / name)
    sync_path(partial)
    for file in files:
        (out / file).unlink(missing_ok=True)
    folders = {(out / place).parent for place in [*moves.values(), *files]} - {out}
    for folder in sorted(folders | {out / INDEX_DIR}, reverse=True):
        remove_temporary(folder)
        with contextlib.suppress(OSError):  # not there, or not ours alone
            folder.rmdir()
    journal.unlink()


def _read_journal(journal: Path, out: Path) -> tuple[dict[str, str], list[str]]:
    """(name in ``.partial/`` -> place below OUT of every shard, paths below OUT of other files), nothing but what publication makes.

    Raises:
        PackError: the journal is damaged; it was on disk before anything was published, so that no interruption does that.
    """
    try:
        raw = json.loads(journal.read_bytes())
        moves, files = dict(raw["moves"]), list(raw["files"])
        sound = all("/" not in name and _PLACE.fullmatch(place) for name, place in moves.items())
        sound = sound and all(_WRITTEN.fullmatch(file) for file in files)
    except (ValueError, TypeError, KeyError):
        sound = False
    if not sound:
        raise PackError(
            f"{journal}: is damaged, so that it cannot be told what in {out} is ours; move {out} away and run the command again"
        )
    return moves, files


def close_partial(partial: Path) -> None:
    """Remove ``.partial/`` after publication, if it is ours; the marker goes last."""
    if _is_marked(partial):
        for path in partial.iterdir():
            if path.name != MARKER_NAME:
                with contextlib.suppress(OSError):  # the next command tries again
                    _remove(path)
        if [path.name for path in partial.iterdir()] == [MARKER_NAME]:
            (partial / MARKER_NAME).unlink()
    if not partial.is_symlink():
        with contextlib.suppress(OSError):  # not there, or not empty
            partial.rmdir()


def expected_files(manifest: Manifest) -> dict[str, tuple[int, str]]:
    """Path below OUT -> (num_bytes, hex SHA-256) of every file that the manifest covers."""
    files = {path: (entry.num_bytes, entry.sha256) for path, entry in manifest.files.items()}
    for split in manifest.splits.values():
        for shard in split.shards:
            if shard.files is None:
                files[shard.path] = (shard.num_bytes, str(shard.sha256))
            else:
                files |= {f"{shard.path}/{name}": (entry.num_bytes, entry.sha256) for name, entry in shard.files.items()}
    return files


def known_files(manifest: Manifest) -> set[str]:
    """Path below OUT of every file that belongs to a packed data set."""
    return {MANIFEST_NAME, README_NAME, *expected_files(manifest)}


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
    for below in sorted({parent for path in known for parent in PurePosixPath(path).parents} - {PurePosixPath(".")}, reverse=True):
        with contextlib.suppress(OSError):  # not there, or not empty
            (folder / below).rmdir()
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
    if not _has_our_manifest(old):
        return None
    with locked(old):  # held by a build that is in the middle of its swap
        parent = out.resolve().parent
        if (out / MANIFEST_NAME).is_file():
            done = f"removed what an interrupted --overwrite of {out} had left"
        elif out.exists():
            return None
        elif _has_our_manifest(new):
            os.replace(new, out.resolve())
            done = f"finished an interrupted --overwrite of {out}"
        else:
            os.replace(old, out.resolve())
            sync_path(parent)
            return f"took back an interrupted --overwrite of {out}"
        sync_path(parent)  # the new data set is at its place, also after a power cut, before the old one goes
        return remove_data_set(old) or done
