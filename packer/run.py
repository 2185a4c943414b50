"""The steps of a build that need no output folder: what to pack, in which jobs, run them, and what they came to."""

from __future__ import annotations

import hashlib
import importlib.metadata
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from loaders.format import Manifest, SourceEntry
from packer.engines import Engine, TaskFunction
from packer.findings import Findings
from packer.job import DIGEST_BYTES, Job, Remarks, Spec, sizes_differ
from packer.near_duplicates import near_duplicate_findings
from packer.plan import (
    SAMPLE_OVERHEAD_BYTES,
    Sizing,
    assign_splits,
    default_shard_bytes,
    group_of,
    make_jobs,
    samples_per_shard,
    source_splits,
    surveyed,
)
from packer.publish import FinishedShard, Heading
from packer.recipe import Recipe
from packer.records import job_files, load_record, sync_shard
from packer.remarks import changed_tables, duplicate_findings, remark_findings, same_files
from packer.sample import Finding, Listing, PackError, Source, UsageError
from packer.sources import detect, open_source
from packer.sources.tree import case_twins, distinct
from packer.transcode import program_version
from packer.transforms import Resize
from packer.work import Chunk, Context, chunks, describe_task, digest_chunk, pack_job, scan_chunk, survey

SYNC_THREADS = 8


class Console(Protocol):
    """Where a build speaks to its user."""

    def say(self, text: str) -> None: ...

    def finding(self, text: str) -> None: ...

    def progress(self, title: str, total: int) -> AbstractContextManager[Callable[[int], None]]:
        """A context that gives a function to call with how many pictures went by."""
        ...


@dataclass(slots=True)
class Outcome:
    """`ok`: exit status 0. `num_samples`, `num_skipped`: samples packed (or fit to be), and left out."""

    ok: bool
    message: str
    num_samples: int = 0
    num_skipped: int = 0
    findings: Findings | None = None
    manifest: Manifest | None = None


class Digests:
    """Digests of all items, by key: the source's fingerprint, and what duplicates are found by."""

    def __init__(self, listing: Listing) -> None:
        self._listing = listing
        self.array: NDArray[np.uint8] = np.zeros((len(listing.items), 2, DIGEST_BYTES), np.uint8)

    def put(self, job: Job, digests: NDArray[np.uint8]) -> None:
        self.array[list(job.keys)] = digests

    def fingerprint(self) -> str:
        h = hashlib.sha256(self._listing.digest.encode())
        for item, digest in zip(self._listing.items, self.array, strict=True):
            h.update(item.path.encode("utf-8", "surrogateescape") + b"\0" + digest.tobytes())
        return h.hexdigest()


@dataclass(slots=True)
class Plan:
    """All that is known before the first shard is written. `num_bytes`: about how many bytes the shards will hold in all."""

    source: Source
    kind: str
    listing: Listing
    spec: Spec
    jobs: list[Job]
    num_bytes: int


@dataclass(slots=True)
class Run:
    """The parts of one command that its steps share."""

    src: Path
    recipe: Recipe
    console: Console
    findings: Findings
    engine: Engine
    versions: Mapping[str, str]

    def map(self, function: TaskFunction, context: Context, tasks: Sequence[Any], title: str) -> Iterator[tuple[int, Any]]:
        total = sum(len(t.items) for t in tasks)
        with self.console.progress(title, total) as advance:
            yield from self.engine.map(function, context, tasks, describe=describe_task, on_progress=advance)

    def remark(self, plan: Plan, remarks: Remarks, digests: Digests, hashes: NDArray[np.uint8] | None = None) -> None:
        """Findings that only the whole data set can give; `hashes` uint8 [N, HASH_BYTES] by key, to look for near-duplicates."""
        split_of: list[str | None] = [None] * len(plan.listing.items)
        for job in plan.jobs:
            for key in job.keys:
                split_of[key] = job.split
        for finding in duplicate_findings(plan.listing, split_of, digests.array, same_files(plan.source.root)):
            self.findings.add(finding)
        if hashes is not None:
            self.console.say("  comparing pictures for near-duplicates")
            for finding in near_duplicate_findings(plan.listing, split_of, digests.array, hashes):
                self.findings.add(finding)
        for finding in changed_tables(plan.source.root, plan.listing):
            self.findings.add(finding)
        for finding in remark_findings(
            plan.listing, plan.kind, plan.source, plan.spec, remarks, classes_given=self.recipe.source.classes is not None
        ):
            self.findings.add(finding)


def tool_versions(recipe: Recipe) -> dict[str, str]:
    """Versions that the bytes of an encoded image, or an accepted one, may depend on.

    Raises:
        UsageError: the recipe needs a program that is not there.
    """
    packages = {
        "shardpack": "shardpack",
        "numpy": "numpy",
        "opencv": "opencv-python-headless",
        "pillow": "pillow",
        "simplejpeg": "simplejpeg",
    }
    versions = {name: importlib.metadata.version(package) for name, package in packages.items()}
    return {**versions, "jpegtran": program_version()} if recipe.output.restart_grid == "lossless" else versions


def make_plan(run: Run) -> Plan | None:
    """List, scan where names or strata need it, and cut into jobs.

    None when there is nothing to look at. Faults of the whole data set (findings of level error) stand in the way of publishing, not of
    looking at every picture: all that is wrong is to be said at once.
    """
    table = run.recipe.source
    kind, why = (table.kind, "as given") if table.kind != "auto" else detect(run.src)
    run.console.say(f"source: {kind} ({why})")
    try:
        source = open_source(kind, run.src, table.own, table.classes)
    except UsageError as e:
        raise UsageError(f"{run.recipe.name}: {e}") from None
    if run.recipe.output.format == "memmap" and source.options.get("extra"):
        raise UsageError(
            "[source] extra: kept columns go into the JSON of a tar sample, and a memmap has none; use --format tar, or leave it out"
        )
    listing = source.list(run.findings.add)
    for note in listing.notes:
        run.console.say(f"  {note}")
    if run.findings.counts()["error"] and all(item.refused for item in listing.items):
        return None
    if not listing.items:
        raise PackError(f"{run.src}: no pictures found for source {kind}")
    if listing.task == "detection" and run.recipe.transform.resize is not None and run.recipe.transform.mode == "crop":
        raise UsageError("mode crop would cut boxes away: for detection use letterbox, stretch, short or long")
    names = _scan(run, source, listing)
    if listing.classes is None:
        listing.classes = sorted(set().union(*names))
    twins = [] if kind == "folder" else [", ".join(f"'{name}'" for name in distinct(group)) for group in case_twins(listing.classes)]
    if twins:
        message = f"classes {'; '.join(twins[:5])} differ by upper and lower case only (or by Unicode form); all are kept"
        run.findings.add(Finding("warning", "case-twins", ".", message, count=len(twins)))
    spec = _spec(run.recipe, listing)
    splits = _splits(run, listing, names)
    sizing, num_bytes = _sizing(run, Context(spec, source, None, run.versions), listing)
    jobs = make_jobs(listing, splits, sizing=sizing, shuffle=run.recipe.output.shuffle, seed=run.recipe.output.seed)
    return Plan(source, kind, listing, spec, jobs, num_bytes)


def _scan(run: Run, source: Source, listing: Listing) -> list[frozenset[str]]:
    """Class names per item: read from every annotation where ids or strata need it, else from the listing (empty when not needed)."""
    stratify = bool(run.recipe.split.shares) and not listing.has_splits
    if listing.classes is not None and not (stratify and listing.task == "detection"):
        return [frozenset([item.label] if item.label is not None else []) for item in listing.items]
    context = Context(_spec(run.recipe, listing), source, None, run.versions)
    parts = dict(run.map(scan_chunk, context, chunks(listing.items), "reading annotations"))
    return [names for number in sorted(parts) for names in parts[number]]


def _spec(recipe: Recipe, listing: Listing) -> Spec:
    s, t, o = recipe.source, recipe.transform, recipe.output
    transform = None if t.resize is None else Resize(t.resize, t.mode)
    return Spec(
        layout=o.format,
        task=listing.task,
        classes=tuple(listing.classes or ()),
        transform=transform,
        image=o.image,
        quality=o.quality,
        subsampling=o.subsampling,
        restart_grid=o.restart_grid,
        dtype=o.dtype,
        normalize=o.normalize,
        exif=s.exif,
        boxes=s.boxes,
        pixel_range=s.pixel_range,
        max_pixels=s.max_pixels,
        max_file_bytes=s.max_file_bytes,
    )


def _splits(run: Run, listing: Listing, names: Sequence[frozenset[str]]) -> list[str | None]:
    split = run.recipe.split
    if not split.shares or listing.has_splits:
        if split.shares:
            run.console.say("  the source says which split a picture is in; [split] is not used")
        elif not listing.has_splits:
            run.console.say("  no splits in the source and none asked for: everything is train")
        return source_splits(listing)
    group = None if split.group is None else group_of(split.group)
    if split.group is not None and not any(re.search(split.group, item.path) for item in listing.items):
        raise UsageError(f"group {split.group!r} matches no path, such as {listing.items[0].path!r}: nothing would be kept together")
    splits = assign_splits(listing.items, names, split.shares, run.recipe.output.seed, group)
    for name in split.shares.keys() - set(splits):
        message = f"no picture is left for split {name} (share {split.shares[name]:g}): too few pictures, or groups too large"
        run.findings.add(Finding("warning", "empty-split", ".", message))
    return splits


def _sizing(run: Run, context: Context, listing: Listing) -> tuple[Sizing, int]:
    """How to cut shards, and about how many bytes they will hold in all; where images are made anew, from a few that are made now."""
    o, spec = run.recipe.output, context.spec
    alive = [item for item in listing.items if not item.refused]
    if spec.layout == "tar" and spec.transform is None and spec.image == "keep":
        total = sum(item.num_bytes + SAMPLE_OVERHEAD_BYTES for item in alive)
        return Sizing(o.shard_size or default_shard_bytes(total, "tar"), o.shard_samples), total
    found = survey(context, [(i, listing.items[i]) for i in surveyed(listing.items)])
    if spec.layout == "memmap":
        sizes = {f"{w}x{h}": name for name, _, (w, h) in reversed(found)}
        if len(sizes) > 1:
            raise PackError(sizes_differ(sizes).message)
        width, height = found[0][2] if found else (1, 1)
        mean = float(width * height * 3 * np.dtype(spec.dtype).itemsize)
    else:
        mean = float(np.mean([n for _, n, _ in found])) + SAMPLE_OVERHEAD_BYTES if found else 1e5
    target = o.shard_size or default_shard_bytes(mean * len(alive), spec.layout)
    return Sizing(target, o.shard_samples or samples_per_shard(target, mean)), round(mean * len(alive))


def run_plan(run: Run, plan: Plan, partial: Path) -> tuple[list[FinishedShard], Remarks, Digests, int]:
    """Run all jobs; their shards in order, what they remarked, digests, and how many pictures were packed."""
    context = Context(plan.spec, plan.source, partial, run.versions, plan.num_bytes)
    done: dict[int, str] = {}
    num_reused = 0
    # Largest first, so that no worker begins a large shard when the others are done.
    order = sorted(plan.jobs, key=lambda job: -sum(item.num_bytes for item in job.items))
    with ThreadPoolExecutor(SYNC_THREADS) as disk:  # what is finished goes to disk while the rest is packed
        synced = []
        for number, result in run.map(pack_job, context, order, "packing"):
            done[order[number].number] = result.key
            num_reused += result.reused
            for finding in result.findings:
                run.findings.tell(finding)
            synced.append(disk.submit(sync_shard, job_files(partial, plan.spec, result.key).shard))
        for wait in synced:
            wait.result()
    if num_reused:
        run.console.say(f"{num_reused:,} of {len(plan.jobs):,} shards were already there from an earlier run")
    shards: list[FinishedShard] = []
    remarks, digests, packed = Remarks(), Digests(plan.listing), 0
    for job in plan.jobs:
        files = job_files(partial, plan.spec, done[job.number])
        record = load_record(files, reuse=False)
        if record is None:
            raise PackError(f"{files.record}: vanished while packing; run the command again")
        for finding in record.findings:
            run.findings.add(finding)
        remarks.merge(record.remarks)
        digests.put(job, record.digests)
        packed += int(record.packed.sum())
        if record.shard is not None:
            shards.append(FinishedShard(job.split, files.shard, record.shard))
    return shards, remarks, digests, packed


def heading_of(run: Run, plan: Plan, image_parts: Sequence[str], fingerprint: str) -> Heading:
    """What the manifest says besides the shards."""
    recipe = run.recipe
    options = recipe.source.model_dump(mode="json", exclude_defaults=True, exclude={"kind", "classes"})
    output = recipe.output.model_dump(mode="json", exclude_none=True)
    if recipe.output.subsampling == "420":  # what every pack has that was made before there was a choice
        del output["subsampling"]
    if plan.spec.layout == "tar":
        output["image_parts"] = list(image_parts)
    if recipe.split.shares and not plan.listing.has_splits:
        output["split"] = recipe.split.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
    return Heading(
        layout=plan.spec.layout,
        task=plan.listing.task,
        classes=list(plan.spec.classes),
        source=SourceEntry(kind=plan.kind, options=options, fingerprint=fingerprint),
        transform=None if plan.spec.transform is None else dict(plan.spec.transform.describe()),
        output=output,
        created_by=dict(run.versions),
    )


def source_fingerprint(run: Run, plan: Plan) -> str:
    """The fingerprint that packing would find, from reading the source without decoding it."""
    digests = Digests(plan.listing)
    context = Context(plan.spec, plan.source, None, run.versions)
    tasks: list[Chunk] = chunks(plan.listing.items, 200)
    for number, array in run.map(digest_chunk, context, tasks, "reading the source"):
        start = tasks[number].start
        digests.array[start : start + len(array)] = array
    return digests.fingerprint()
