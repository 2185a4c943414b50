"""What a finished job leaves in ``OUT/.partial/``, so that no later run does it again.

A job's record is keyed by everything that its bytes depend on: the specification, the versions of the codecs, and of each item its key,
path, size, mtime and the source's stamp. The shard and its record are both on disk, under their final names in ``.partial/``, before
the job counts as done; a record is trusted only when the shard has exactly its bytes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loaders.format import INDEX_ARRAYS, Index, canonical_json, sha256_file
from packer.job import Job, JobResult, Remarks, Spec
from packer.sample import Finding, Source, WrittenShard

PARTIAL_DIR = ".partial"

# Findings about a state that a second look may find changed although size and mtime are the same.
_NOT_FINAL = {"unreadable", "source-changed"}


@dataclass(frozen=True, slots=True)
class JobFiles:
    """Where a job's results lie: `shard` (a tar or a folder) with its companions, and `record`."""

    shard: Path
    record: Path

    @property
    def temporary(self) -> Path:
        """Written here first; the process id keeps a killed build's orphan and its successor apart."""
        return self.shard.with_name(f"tmp-{os.getpid()}-{self.shard.name}")


def job_key(spec: Spec, versions: Mapping[str, str], source: Source, job: Job) -> str:
    """Hex digest of all that the job's bytes depend on."""
    what = [describe_spec(spec), dict(versions), source.kind, source.options, job.split]
    h = hashlib.sha256(canonical_json(what).encode("utf-8", "surrogatepass"))
    for key, item in zip(job.keys, job.items, strict=True):
        h.update(repr((key, item.path, item.num_bytes, item.mtime_ns, item.label, item.stamp)).encode("utf-8", "surrogatepass"))
    return h.hexdigest()[:32]


def describe_spec(spec: Spec) -> dict[str, Any]:
    """The specification as JSON values."""
    out = {f.name: getattr(spec, f.name) for f in dataclasses.fields(spec)}
    out["transform"] = None if spec.transform is None else spec.transform.describe()
    return out


def job_files(partial: Path, spec: Spec, key: str) -> JobFiles:
    return JobFiles(partial / (key + (".tar" if spec.layout == "tar" else "")), partial / (key + ".record"))


def shard_file(shard: Path, name: str) -> Path:
    """A shard's file by its name in `WrittenShard.files`: "" and ".idx" beside a tar, else a file of the shard's folder."""
    return shard.with_name(shard.name + name) if not name or name.startswith(".") else shard / name


def save_record(files: JobFiles, result: JobResult) -> None:
    """Move a job's shard from its temporary place and write its record.

    Nothing is synced: after a power cut the checksums tell what of it is whole. `run_plan` syncs before anything is published.
    """
    if result.shard is not None:
        if files.shard.is_dir():
            shutil.rmtree(files.shard)
        for name in result.shard.files:
            if not name or name.startswith("."):
                os.replace(shard_file(files.temporary, name), shard_file(files.shard, name))
        if files.temporary.is_dir():
            os.replace(files.temporary, files.shard)
    arrays: dict[str, NDArray[Any]] = {"digests": result.digests, "packed": result.packed}
    if result.shard is not None:
        arrays |= {f"index_{k}": v for k in INDEX_ARRAYS if (v := getattr(result.shard.index, k)) is not None}
    head = {
        "files": None if result.shard is None else result.shard.files,
        "findings": [dataclasses.asdict(f) for f in result.findings],
        "remarks": dataclasses.asdict(result.remarks),
        "final": not any(f.code in _NOT_FINAL for f in result.findings),
    }
    arrays["head"] = np.frombuffer(json.dumps(head).encode(), np.uint8)
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **arrays)
    write_file(files.record, buffer.getvalue(), sync=False)


def load_record(files: JobFiles, *, reuse: bool) -> JobResult | None:
    """A job's result, or None when there is none, or (under `reuse`) when it is not final or the shard is not as it was written."""
    try:
        with files.record.open("rb") as f, np.load(f, allow_pickle=False) as z:
            arrays = {name: z[name] for name in z.files}
        head = json.loads(arrays.pop("head").tobytes())
        findings = [Finding(**f) for f in head["findings"]]
        remarks = Remarks(**head["remarks"])
        shard = None
        if head["files"] is not None:
            index = Index(**{k.removeprefix("index_"): v for k, v in arrays.items() if k.startswith("index_")})
            shard = WrittenShard({name: (int(n), str(sha)) for name, (n, sha) in head["files"].items()}, index)
        if reuse and not (head["final"] and (shard is None or is_intact(files.shard, shard.files))):
            return None
        return JobResult(shard, arrays["digests"], arrays["packed"], findings, remarks)
    except Exception:  # a damaged record may make zipfile and NumPy raise anything; whatever it is, the job is done again
        return None


def is_intact(shard: Path, files: Mapping[str, tuple[int, str]]) -> bool:
    """Whether every file of a shard has exactly the bytes that were written."""
    return all(has_bytes(shard_file(shard, name), num_bytes, sha256) for name, (num_bytes, sha256) in files.items())


def has_bytes(path: Path, num_bytes: int, sha256: str) -> bool:
    """Whether this is a readable file of just this size and hex SHA-256."""
    try:
        return path.is_file() and path.stat().st_size == num_bytes and sha256_file(path) == sha256
    except OSError:
        return False


def write_file(path: Path, data: bytes, *, sync: bool = True) -> None:
    """Write a whole file: under another name first, on disk (`sync`), then renamed."""
    temporary = path.with_name(f"tmp-{os.getpid()}-{path.name}")
    with temporary.open("wb") as f:
        f.write(data)
        f.flush()
        if sync:
            os.fsync(f.fileno())
    os.replace(temporary, path)
    if sync:
        sync_path(path.parent)


def sync_shard(shard: Path) -> None:
    """Put a shard's files (and, of a folder, their names) on disk; nothing where a job left no sample."""
    files = [*shard.iterdir(), shard] if shard.is_dir() else [shard, shard_file(shard, ".idx")]
    for file in files:
        if file.exists():
            sync_path(file)


def sync_path(path: Path) -> None:
    """Put a file's bytes, or a folder's names, on disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
