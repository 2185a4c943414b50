"""Verify one memmap shard: every file by its checksum, and what the files say by the index."""

from __future__ import annotations

from collections.abc import Iterator

from loaders.format import FormatError, ShardEntry, open_index
from packer.engines import Tick
from packer.problems import REBUILD, Problem, ShardTask, VerifyContext, file_problems
from packer.writers.compare import index_differences, shard_rows
from packer.writers.memmap import derive_index


def verify_memmap(context: VerifyContext, task: ShardTask, shard: ShardEntry, tick: Tick) -> Iterator[Problem]:
    """All problems of the shard."""
    manifest = context.manifest
    damaged = False
    for name, entry in sorted((shard.files or {}).items()):
        for problem in file_problems(context.root, f"{shard.path}/{name}", entry.num_bytes, None if context.quick else entry.sha256):
            damaged = True
            yield problem
        tick(0)
    if damaged:
        return
    try:
        derived, names = derive_index(context.root / shard.path, manifest.task, str(manifest.output.get("dtype", "uint8")))
    except FormatError as e:
        yield Problem("error", "bad-structure", shard.path, str(e) + REBUILD)
        return
    if len(derived.samples) != shard.num_samples:
        text = f"{len(derived.samples):,} samples, the manifest says {shard.num_samples:,}"
        yield Problem("error", "wrong-count", shard.path, text + REBUILD)
        return
    try:
        index = shard_rows(open_index(context.root, manifest, task.split), task.start, shard.num_samples)
    except FormatError:
        return  # reported once for the split
    sources = {int(key): name.decode("utf-8", "backslashreplace") for key, name in zip(derived.samples["key"], names, strict=True)}
    for key, text in index_differences(index, derived):
        message = f"the index does not agree with the shard: {text}{REBUILD}"
        yield Problem("error", "index-differs", shard.path, message, key, None if key is None else sources.get(key))
