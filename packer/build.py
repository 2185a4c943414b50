"""Build: source -> plan -> shard jobs -> published data set. And `check`, the same without writing anything."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from loaders.format import FINDINGS_NAME, MANIFEST_NAME, FormatError, read_manifest
from packer.engines import open_engine
from packer.findings import Findings
from packer.job import JobResult, Remarks
from packer.outdir import (
    check_places,
    check_writable,
    close_partial,
    is_blank,
    is_ours,
    locked,
    open_partial,
    remove_data_set,
    repair_swap,
    siblings,
    swap_in,
)
from packer.perceptual import HASH_BYTES
from packer.publish import publish
from packer.recipe import Recipe
from packer.records import write_file
from packer.restore import OtherDataSet, restore
from packer.run import Console, Digests, Outcome, Plan, Run, heading_of, make_plan, run_plan, tool_versions
from packer.sample import Item, Listing, PackError
from packer.sources.tree import check_root
from packer.work import Context, check_job


def default_workers() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0))


def build(src: Path, out: Path, recipe: Recipe, console: Console, *, overwrite: bool = False) -> Outcome:
    """Pack `src` into `out`. The same command again goes on where an interrupted one stopped.

    Raises:
        PackError: the job cannot be done. Nothing was published, and a finished data set at `out` is as it was.
    """
    check_places(src, out)
    repaired = repair_swap(out)
    if repaired:
        console.say(repaired)
    with locked(out):
        if overwrite and (out / MANIFEST_NAME).is_file():
            return _replace(src, out, recipe, console)
        return _build_in(_start(src, recipe, console), out)


def _replace(src: Path, out: Path, recipe: Recipe, console: Console) -> Outcome:
    """Build beside the finished data set `out`, and put the new one in its place when it is complete."""
    new, old = siblings(out)
    _check_siblings(new, old)
    if (new / MANIFEST_NAME).is_file():
        # Finished by an earlier --overwrite that was interrupted just before the swap: is it what is asked for now?
        with locked(new):
            try:
                return _swap(out, restore(_start(src, recipe, console), new), console)
            except OtherDataSet:
                left = remove_data_set(new)
        if left:
            raise PackError(f"{left}; it is in the way of --overwrite: move it")
    with locked(new):
        return _swap(out, _build_in(_start(src, recipe, console), new), console)


def _check_siblings(new: Path, old: Path) -> None:
    """Refuse, before any work, folders beside OUT that the work or the swap would fail on."""
    if new.exists() and not is_ours(new) and not is_blank(new):
        raise PackError(f"{new}: is in the way of --overwrite and was not made by pack; move it")
    if (new / MANIFEST_NAME).is_file():
        try:
            read_manifest(new)
        except FormatError as e:
            raise PackError(f"{e}; an earlier --overwrite left this folder, and what is ours in it cannot be told: move it") from None
    if os.path.lexists(old) and (old.is_symlink() or not old.is_dir() or any(old.iterdir())):
        raise PackError(f"{old}: is in the way of --overwrite and holds what pack did not make, or cannot tell; move it")


def _swap(out: Path, outcome: Outcome, console: Console) -> Outcome:
    """Swap in what was built beside `out`, if it was."""
    left = swap_in(out) if outcome.ok else None
    if left:
        console.say(left)
    return outcome


def check(src: Path, recipe: Recipe, console: Console, *, near_duplicates: bool = False) -> Outcome:
    """Say everything that `build` would say about `src`, and which pictures look alike if asked to. Nothing is written anywhere."""
    check_root(src)
    run = _start(src, recipe, console)
    plan = make_plan(run)
    if plan is None:
        return _judge(run, 0, [])
    context = Context(plan.spec, plan.source, None, run.versions, hashes=near_duplicates)
    hashes = np.zeros((len(plan.listing.items), HASH_BYTES), np.uint8) if near_duplicates else None
    results: dict[int, JobResult] = {}
    for number, result in run.map(check_job, context, plan.jobs, "checking"):
        results[number] = result
        for finding in result.findings:
            run.findings.tell(finding)
    remarks, digests, packed = Remarks(), Digests(plan.listing), 0
    for number, job in enumerate(plan.jobs):
        for finding in results[number].findings:
            run.findings.add(finding)
        remarks.merge(results[number].remarks)
        digests.put(job, results[number].digests)
        if hashes is not None and (taken := results[number].hashes) is not None:
            hashes[list(job.keys)] = taken
        packed += int(results[number].packed.sum())
    run.remark(plan, remarks, digests, hashes)
    _say_sums(run, plan.listing, packed)
    return _judge(run, packed, plan.listing.items)


def _start(src: Path, recipe: Recipe, console: Console) -> Run:
    findings = Findings(console.finding)
    versions = tool_versions(recipe)
    return Run(src, recipe, console, findings, open_engine(recipe.run.engine, recipe.run.workers or default_workers()), versions)


def _build_in(run: Run, out: Path) -> Outcome:
    if (out / MANIFEST_NAME).is_file():
        return restore(run, out)
    check_writable(out)
    plan = make_plan(run)
    partial = open_partial(out)
    try:
        return _pack(run, out, plan, partial)
    except (OSError, PackError) as e:
        if os.path.isdir(partial):
            raise
        raise PackError(f"{out}: is gone, or its {partial.name}/ is: removed or moved while the build ran; run the command again") from e


def _pack(run: Run, out: Path, plan: Plan | None, partial: Path) -> Outcome:
    if plan is None:
        return _fail(run, out, _judge(run, 0, []))
    shards, remarks, digests, packed = run_plan(run, plan, partial)
    run.remark(plan, remarks, digests)
    _say_sums(run, plan.listing, packed)
    outcome = _judge(run, packed, plan.listing.items)
    if not outcome.ok:
        return _fail(run, out, outcome)
    head = heading_of(run, plan, sorted(remarks.parts), digests.fingerprint())
    outcome.manifest = publish(out, partial, shards, head, run.findings)
    close_partial(partial)
    return outcome


def _say_sums(run: Run, listing: Listing, num_packed: int) -> None:
    """The numbers add up: every file is packed, left out by a finding, used as annotation, named otherwise, or ignored by rule."""
    pictures = len(listing.items)
    others = listing.num_files - listing.num_ignored - pictures - listing.num_used
    run.console.say(
        f"files: {listing.num_files:,} = {num_packed:,} pictures fit to pack + {pictures - num_packed:,} left out"
        f" + {listing.num_used:,} annotation files + {max(others, 0):,} others named in findings;"
        f" {listing.num_ignored:,} hidden or system files ignored"
    )


def _fail(run: Run, out: Path, outcome: Outcome) -> Outcome:
    """A failed build leaves its findings, and no manifest."""
    path = out / FINDINGS_NAME
    write_file(path, run.findings.jsonl().encode("utf-8", "backslashreplace"))
    return replace(outcome, message=f"{outcome.message}; nothing was published, all findings are in {path}")


def _judge(run: Run, packed: int, items: Sequence[Item]) -> Outcome:
    """Whether the findings allow to publish. Left out is also what is no listed picture: a row without one, a closed folder."""
    for line in run.findings.summary():
        run.console.say(line)
    counts, policy = run.findings.counts(), run.recipe.run
    pictures, missing = len(items) - packed, run.findings.num_missing({item.path for item in items})
    skipped, total = pictures + missing, len(items) + missing
    what = f"{skipped:,} of {total:,} pictures"
    if missing:
        what = f"{skipped:,} of {total:,} samples ({pictures:,} pictures, and {missing:,} missing, out of reach or badly named)"
    problem = ""
    if counts["error"]:
        problem = "the data set has faults that concern all of it (level error)"
    elif counts["skip"] and policy.on_error == "fail":
        problem = f"{what} cannot be packed; --on-error skip would leave them out and pack {packed:,}"
    elif policy.max_skip is not None and skipped > allowed_skips(policy.max_skip, total):
        limit = f"{policy.max_skip:,}" if isinstance(policy.max_skip, int) else f"{policy.max_skip * 100:g}%"
        problem = f"{what} would be left out, --max-skip allows {limit}"
    elif not packed:
        problem = "nothing to pack: every picture was left out"
    return Outcome(not problem, problem, packed, skipped, run.findings)


def allowed_skips(limit: int | float, total: int) -> float:
    """A whole number is a number of pictures, a fraction below 1 a share of all."""
    return limit if isinstance(limit, int) else limit * total
