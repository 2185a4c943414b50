"""Verify: packed data -> problems. Finds any changed, missing or extra byte of what the manifest covers, and reports all of it."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np

from loaders.format import (
    FINDINGS_NAME,
    INDEX_DIR,
    MANIFEST_NAME,
    README_NAME,
    FormatError,
    Index,
    Manifest,
    index_path,
    open_index,
    read_manifest,
)
from packer.engines import Engine, Tick
from packer.outdir import holds_packed_files, is_ours, known_files
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
        what = "is a file, expected the folder of a packed data set" if root.exists() else "no such folder"
        raise PackError(f"{root}: {what}")
    try:
        manifest = read_manifest(root)
    except FormatError as e:
        return [Problem("error", "bad-manifest", MANIFEST_NAME, str(e) + _way_out(root))]
    problems = [
        *_not_covered(manifest),
        *_stray_files(root, manifest),
        *_covered_files(root, manifest, quick),
        *_index_opens(root, manifest),
    ]
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


def _way_out(root: Path) -> str:
    """What to do about a manifest that is of no use: nothing else says what the folder held."""
    if os.path.lexists(root / MANIFEST_NAME):
        return "; bring the file back, or pack build --overwrite packs all of it anew"
    if is_ours(root):
        return "; the same pack build command again goes on from there"
    lost = "; bring the file back, or move the folder away and let pack build pack all of it anew"
    return lost if holds_packed_files(root) else ""


def _not_covered(manifest: Manifest) -> Iterator[Problem]:
    """Files that every data set has, and that nothing would vouch for."""
    needed = [FINDINGS_NAME, *(index_path(split, "samples") for split in manifest.splits)]
    if manifest.layout == "tar":
        needed += [shard.path + ".idx" for split in manifest.splits.values() for shard in split.shards]
    for name in sorted(set(needed) - manifest.files.keys()):
        yield Problem("error", "bad-manifest", MANIFEST_NAME, f"files does not list {name}")


def _covered_files(root: Path, manifest: Manifest, quick: bool) -> Iterator[Problem]:
    for name, entry in sorted(manifest.files.items()):
        problems = list(file_problems(root, name, entry.num_bytes, None if quick else entry.sha256))
        yield from problems
        if name == FINDINGS_NAME and not problems and not quick:
            yield from _finding_counts(root, manifest)


def _finding_counts(root: Path, manifest: Manifest) -> Iterator[Problem]:
    """The manifest's numbers of findings against the lines of the file."""
    said = manifest.findings.model_dump()
    found: Counter[str] = Counter()
    with (root / FINDINGS_NAME).open("rb") as f:
        for number, line in enumerate(f, 1):
            try:
                level = json.loads(line)["level"]
                if level not in said:
                    raise ValueError(f"level {level!r:.100}")
            except (ValueError, KeyError, TypeError, RecursionError) as e:
                yield Problem("error", "wrong-count", FINDINGS_NAME, f"line {number} is no finding: {e or type(e).__name__}{REBUILD}")
                return
            found[level] += 1
    for level, count in said.items():
        if found[level] != count:
            text = f"{found[level]:,} findings of level {level}, the manifest says {count:,}"
            yield Problem("error", "wrong-count", FINDINGS_NAME, text + REBUILD)


def _index_opens(root: Path, manifest: Manifest) -> Iterator[Problem]:
    for split in sorted(manifest.splits):
        try:
            index = open_index(root, manifest, split)
        except FormatError as e:
            yield Problem("error", "bad-index", f"{INDEX_DIR}/{split}", str(e) + REBUILD)
        else:
            yield from _unknown_class(manifest, split, index)


def _unknown_class(manifest: Manifest, split: str, index: Index) -> Iterator[Problem]:
    """A class id that has no name in the manifest."""
    if manifest.task == "unlabelled":
        return
    name, labels = ("labels", index.labels) if manifest.task == "detection" else ("samples", index.samples["label"])
    if labels is None or not len(labels):
        return
    lowest, highest = int(np.min(labels)), int(np.max(labels))
    if lowest < 0 or highest >= len(manifest.classes):
        text = f"class ids {lowest} to {highest}, the manifest names {len(manifest.classes):,} classes"
        yield Problem("error", "bad-index", index_path(split, name), text + REBUILD)


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
