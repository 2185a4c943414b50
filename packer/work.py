"""The functions that engines run over tasks: pack or check a job, scan annotations, hash sources. Module-level, so that they travel."""

from __future__ import annotations

import errno
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from packer.engines import Tick
from packer.job import (
    DIGEST_BYTES,
    Job,
    JobResult,
    SampleFacts,
    Spec,
    annotation_digest,
    class_ids,
    make_sample,
    picture_digest,
    read_item,
    run_job,
)
from packer.records import job_files, job_key, load_record, save_record
from packer.sample import Finding, Item, PackError, Source

_FEW_FILES = 16
"""No shard and its record are more files and folders than this."""


@dataclass(frozen=True, slots=True)
class Context:
    """What every worker is given once. `partial` is None when nothing is to be written (`pack check`); `num_bytes` is about how many
    bytes all shards will hold. `hashes`: `check_job` takes perceptual hashes.
    """

    spec: Spec
    source: Source
    partial: Path | None
    versions: Mapping[str, str]
    num_bytes: int = 0
    hashes: bool = False


@dataclass(frozen=True, slots=True)
class Done:
    """A job's result in short; the whole lies in its record. `reused`: it was there already."""

    key: str
    reused: bool
    findings: list[Finding]


def pack_job(context: Context, job: Job, tick: Tick) -> Done:
    """Pack one shard into ``.partial/``, unless a record says that it is there."""
    assert context.partial is not None
    cv2.setNumThreads(1)  # workers are the parallelism
    key = job_key(context.spec, context.versions, context.source, job)
    files = job_files(context.partial, context.spec, key)
    result = load_record(files, reuse=True)
    reused = result is not None
    if result is None:
        try:
            result = run_job(context.spec, context.source, job, files.temporary, tick)
            save_record(files, result)
        except OSError as e:
            if e.errno in (errno.ENOSPC, errno.EDQUOT):
                raise PackError(_disk_full(context.partial, context.num_bytes)) from e
            raise
    tick(len(job.items))
    return Done(key, reused, result.findings)


def _disk_full(partial: Path, num_bytes: int) -> str:
    done = sum(f.stat().st_size for f in partial.rglob("*") if f.is_file() and not f.relative_to(partial).parts[0].startswith("tmp-"))
    disk = os.statvfs(partial)
    free = disk.f_bavail * disk.f_frsize
    if disk.f_files and disk.f_favail < _FEW_FILES:  # what the shard had is free again, since it was removed
        return (
            f"{partial.parent}: out of inodes: {disk.f_favail:,} of {disk.f_files:,} free there, one for each file or folder; "
            "remove files, or use a larger --shard-size, and run the same command again: finished shards are kept"
        )
    return (
        f"{partial.parent}: disk full, or over quota: about {max(num_bytes - done, 0):,} more bytes needed, {free:,} free there; "
        "make room and run the same command again: finished shards are kept"
    )


def check_job(context: Context, job: Job, tick: Tick) -> JobResult:
    """Everything that packing would look at, with nothing encoded or written."""
    cv2.setNumThreads(1)
    return run_job(context.spec, context.source, job, None, tick, hashes=context.hashes)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive items of a listing."""

    start: int
    items: Sequence[Item]


def scan_chunk(context: Context, chunk: Chunk, tick: Tick) -> list[frozenset[str]]:
    """Class names in the annotation of each item; empty where there is none or it cannot be used (the shard job will say why)."""
    names: list[frozenset[str]] = []
    for i, item in enumerate(chunk.items):
        tick(i)
        annotation = None if item.refused else context.source.annotate(item, _silent)
        if annotation is None:
            names.append(frozenset())
        else:
            names.append(frozenset(annotation.labels if annotation.label is None else [annotation.label]))
    tick(len(chunk.items))
    return names


def digest_chunk(context: Context, chunk: Chunk, tick: Tick) -> NDArray[np.uint8]:
    """uint8 [len(items), 2, 16]: digests of each item's picture bytes and annotation, as packing records them."""
    digests = np.zeros((len(chunk.items), 2, DIGEST_BYTES), np.uint8)
    for i, item in enumerate(chunk.items):
        tick(i)
        if item.refused:
            continue
        annotation = context.source.annotate(item, _silent)
        if annotation is not None:
            digests[i, 1] = np.frombuffer(annotation_digest(annotation), np.uint8)
        data = read_item(context.source.root, item, context.spec.max_file_bytes, _silent)
        if data is not None:
            digests[i, 0] = np.frombuffer(picture_digest(len(data), zlib.crc32(data)), np.uint8)
    tick(len(chunk.items))
    return digests


def survey(context: Context, keys_and_items: Sequence[tuple[int, Item]]) -> list[tuple[str, int, tuple[int, int]]]:
    """(source, encoded bytes, (width, height)) of a few samples, made as packing would; those with faults are passed over."""
    found, ids = [], class_ids(context.spec)
    for key, item in keys_and_items:
        encode = context.spec.layout == "tar"
        annotation = context.source.annotate(item, _silent)
        sample = make_sample(context.spec, context.source.root, key, item, annotation, ids, _silent, SampleFacts(), encode=encode)
        if sample is not None:
            found.append((sample.source, len(sample.encoded or b""), (sample.width, sample.height)))
    return found


def chunks(items: Sequence[Item], size: int = 2000) -> list[Chunk]:
    """Cut a listing for `scan_chunk` and `digest_chunk`."""
    return [Chunk(i, items[i : i + size]) for i in range(0, len(items), size)]


def describe_task(task: Any, position: int) -> str:
    """What a task is on, for messages."""
    items = task.items
    if 0 <= position < len(items):
        return str(items[position].path)
    where = f"the {task.split} shard" if isinstance(task, Job) else "the part"
    return f"the end of {where} of {items[0].path} to {items[-1].path}" if items else "an empty shard"


def _silent(finding: Finding) -> None:
    """The job that packs the item reports it."""
