"""Build on a data set that is complete already: agree, repair byte for byte, or refuse and name the difference."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from loaders.format import README_NAME, SAMPLE_DTYPE, FormatError, Manifest, index_path, open_array, read_manifest
from packer.card import data_card
from packer.outdir import close_partial, expected_files, open_partial, remove_temporary
from packer.publish import Heading, move_shards, publish
from packer.records import PARTIAL_DIR, has_bytes, sync_path, write_file
from packer.run import Outcome, Plan, Run, heading_of, make_plan, run_plan, source_fingerprint
from packer.sample import PackError


class OtherDataSet(PackError):
    """What is there is whole, or may be, but not what the command would build."""


def restore(run: Run, out: Path) -> Outcome:
    """Compare `out` with what the command would build. All equal: done. Bytes damaged or missing: made again and put back.

    Raises:
        OtherDataSet: another plan, another source, or the bytes cannot be made again as they were (other library versions).
        PackError: the comparison or the repair cannot be done.
    """
    try:
        manifest = read_manifest(out)
    except FormatError as e:
        raise PackError(f"{e}; --overwrite packs it anew") from None
    plan = make_plan(run)
    if plan is None or run.findings.counts()["error"]:
        raise PackError(f"{run.src}: has faults now that it did not have when {out} was packed; see above")
    fingerprint = source_fingerprint(run, plan)
    found = heading_of(run, plan, manifest.output.get("image_parts", []), fingerprint)
    differences = list(_differences(manifest, found))
    if differences:
        raise OtherDataSet(
            f"{out}: holds a finished data set made by another plan:\n  "
            + "\n  ".join(differences)
            + "\nchoose another OUT, or --overwrite"
        )
    total = sum(s.num_samples for s in manifest.splits.values())
    damaged = list(_damaged(out, manifest))
    for path in damaged:
        run.console.say(f"damaged or missing: {path}")
    card = data_card(manifest).encode()
    if not has_bytes(out / README_NAME, len(card), hashlib.sha256(card).hexdigest()):
        run.console.say(f"damaged or missing: {README_NAME}")
        write_file(out / README_NAME, card)
        damaged.append(README_NAME)
    if damaged not in ([], [README_NAME]):
        _remake(run, plan, out, manifest, damaged)
    remove_temporary(out)
    close_partial(out / PARTIAL_DIR)  # also where an interruption left it, after the manifest was written
    message = f"restored {len(damaged):,} damaged or missing files, byte for byte"
    if not damaged:
        message = f"already complete: {total:,} samples, every file as the manifest says"
    return Outcome(True, message, total, manifest=manifest)


def _differences(manifest: Manifest, found: Heading) -> Iterator[str]:
    was: dict[str, Any] = {
        "format": manifest.layout,
        "task": manifest.task,
        "classes": manifest.classes,
        "source kind": manifest.source.kind,
        "source options": manifest.source.options,
        "transform": manifest.transform,
    }
    now = [found.layout, found.task, found.classes, found.source.kind, found.source.options, found.transform]
    for (name, old), new in zip(was.items(), now, strict=True):
        if old != new:
            yield f"{name}: was {old!s:.300}, is now {new!s:.300}"
    # What the parts came to is no option: nobody can ask for others.
    for key in sorted((manifest.output.keys() | found.output.keys()) - {"image_parts"}):
        if manifest.output.get(key) != found.output.get(key):
            yield f"output {key}: was {manifest.output.get(key, 'not given')}, is now {found.output.get(key, 'not given')}"
    if manifest.source.fingerprint != found.source.fingerprint:
        yield "source: pictures or annotations were added, removed or changed since"


def _damaged(out: Path, manifest: Manifest) -> Iterator[str]:
    """Paths of the manifest's files that are missing or not as it says."""
    for path, (num_bytes, sha256) in expected_files(manifest).items():
        if not has_bytes(out / path, num_bytes, sha256):
            yield path


def _remake(run: Run, plan: Plan, out: Path, manifest: Manifest, damaged: Sequence[str]) -> None:
    """Make the damaged shards again, or all where index or findings are damaged too, and put the same bytes back."""
    expected = expected_files(manifest)
    paths = [path for path in damaged if path in expected]
    for path in paths:
        if (out / path).is_dir():
            raise PackError(f"{out / path}: is a folder where a file belongs; move it away")
    partial = open_partial(out)
    staging = Path(tempfile.mkdtemp(prefix="tmp-", dir=partial))
    places = _places(plan, out, manifest, paths)
    if places is None:
        shards, remarks, digests, _ = run_plan(run, plan, partial)
        run.remark(plan, remarks, digests)
        publish(staging, partial, shards, heading_of(run, plan, sorted(remarks.parts), digests.fingerprint()), run.findings)
    else:
        shards, _, _, _ = run_plan(run, replace(plan, jobs=[job for job in plan.jobs if job.number in places]), partial)
        move_shards(staging, partial, list(zip(shards, (places[n] for n in sorted(places)), strict=False)))
    wrong = [path for path in paths if not has_bytes(staging / path, *expected[path])]
    if wrong:
        close_partial(partial)
        changed = {k: v for k, v in manifest.created_by.items() if run.versions.get(k) != v}
        hint = f"it was made with {changed}" if changed else f"{wrong[0]} comes out differently"
        raise OtherDataSet(f"{out}: cannot be restored byte for byte: {hint}; use --overwrite to pack it anew")
    for path in paths:
        (out / path).parent.mkdir(parents=True, exist_ok=True)
        os.replace(staging / path, out / path)
    for below in {parent for path in paths for parent in PurePosixPath(path).parents}:
        sync_path(out / below)


def _places(plan: Plan, out: Path, manifest: Manifest, damaged: Sequence[str]) -> dict[int, str] | None:
    """Number of the job -> path below OUT, for each damaged shard; None where more than shards is damaged.

    The index tells which pictures a shard holds: a job that packed none has no shard, so that counting would not do.
    """
    starts: dict[str, tuple[str, int]] = {}
    for name, split in manifest.splits.items():
        row = 0
        for shard in split.shards:
            starts[shard.path] = name, row
            row += shard.num_samples
    job_of = np.zeros(len(plan.listing.items), np.int64)
    for job in plan.jobs:
        job_of[list(job.keys)] = job.number
    places: dict[int, str] = {}
    for path in damaged:
        place = next((p for p in (path, path.removesuffix(".idx"), path.rpartition("/")[0]) if p in starts), None)
        if place is None:
            return None
        split_name, row = starts[place]
        samples = open_array(out / index_path(split_name, "samples"), SAMPLE_DTYPE)
        places[int(job_of[samples["key"][row]])] = place
    return places
