"""Verify: packed data -> problems. Finds any changed, missing or extra byte of what the manifest covers, and reports all of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from loaders.format import INDEX_DIR, MANIFEST_NAME, README_NAME, FormatError, Manifest, open_index, read_manifest
from packer.engines import Engine, Tick
from packer.outdir import known_files
from packer.problems import REBUILD, Problem, ShardTask, VerifyContext, file_problems
from packer.records import PARTIAL_DIR
from packer.sample import PackError
from packer.verify_memmap import verify_memmap
from packer.verify_tar import verify_tar

NUM_UNKNOWN_SHOWN = 100


Progress = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]


def verify(root: Path, engine: Engine, *, quick: bool, progress: Progress) -> list[Problem]:
    """All problems of the packed data set at `root`, in a stable order; empty when it is sound.

    `quick` looks at names, sizes, structure and index only: no checksums, no decoding.
    """
    if not root.is_dir():
        raise PackError(f"{root}: no such folder")
    try:
        manifest = read_manifest(root)
    except FormatError as e:
        return [Problem("error", "bad-manifest", MANIFEST_NAME, str(e))]
    problems = [*_stray_files(root, manifest), *_covered_files(root, manifest, quick), *_index_opens(root, manifest)]
    tasks = _tasks(manifest)

    def describe(task: ShardTask, position: int) -> str:
        return f"{manifest.splits[task.split].shards[task.number].path} (sample {position})"

    with progress("verifying", sum(len(t.items) for t in tasks)) as advance:
        context = VerifyContext(root, manifest, quick)
        results = dict(engine.map(verify_shard, context, tasks, describe=describe, on_progress=advance))
    return [*problems, *(p for number in range(len(tasks)) for p in results[number])]


def _tasks(manifest: Manifest) -> list[ShardTask]:
    tasks = []
    for name, split in sorted(manifest.splits.items()):
        start = 0
        for number, shard in enumerate(split.shards):
            tasks.append(ShardTask(name, number, start, range(shard.num_samples)))
            start += shard.num_samples
    return tasks


def verify_shard(context: VerifyContext, task: ShardTask, tick: Tick) -> list[Problem]:
    """One shard's problems; runs in a worker."""
    shard = context.manifest.splits[task.split].shards[task.number]
    look = verify_tar if context.manifest.layout == "tar" else verify_memmap
    problems: list[Problem] = []
    try:
        problems.extend(look(context, task, shard, tick))
    except Exception as e:  # whatever hostile bytes make a library raise, the other shards are still looked at
        problems.append(Problem("error", "unreadable", shard.path, f"cannot be checked: {type(e).__name__}: {e}{REBUILD}"))
    tick(len(task.items))
    return problems


def _covered_files(root: Path, manifest: Manifest, quick: bool) -> Iterator[Problem]:
    for name, entry in sorted(manifest.files.items()):
        yield from file_problems(root, name, entry.num_bytes, None if quick else entry.sha256)


def _index_opens(root: Path, manifest: Manifest) -> Iterator[Problem]:
    for split in sorted(manifest.splits):
        try:
            open_index(root, manifest, split)
        except FormatError as e:
            yield Problem("error", "bad-index", f"{INDEX_DIR}/{split}", str(e) + REBUILD)


def _stray_files(root: Path, manifest: Manifest) -> Iterator[Problem]:
    """What the manifest does not know. A stranger is a warning, unless it passes for a shard."""
    known = known_files(manifest)
    if not (root / README_NAME).is_file():
        yield Problem("warning", "missing-file", README_NAME, "the data card is missing" + REBUILD)
    num_warned = 0
    for path in sorted(_walk(root)):
        if path in known:
            continue
        parts = path.split("/")
        inside = len(parts) > 1 and parts[0] in manifest.splits
        shard_like = len(parts) > 2 or path.endswith(".tar") or (parts[-1].startswith("shard-") and "." not in parts[-1])
        if inside and shard_like:
            yield Problem("error", "unknown-shard", path, "is not in the manifest, yet readers may take it for data; remove it")
        elif num_warned < NUM_UNKNOWN_SHOWN:
            num_warned += 1
            hint = "an interrupted build's work" if parts[0] == PARTIAL_DIR else "not in the manifest"
            yield Problem("warning", "unknown-file", path, hint)


def _walk(root: Path) -> Iterator[str]:
    """Every file, every link and every empty folder below root, POSIX paths."""
    for folder, subfolders, files in os.walk(root):
        below = Path(folder).relative_to(root)
        links = [name for name in subfolders if os.path.islink(os.path.join(folder, name))]
        for name in [*files, *links] if files or subfolders or below == Path(".") else [""]:
            yield (below / name).as_posix().encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
