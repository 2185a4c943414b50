"""Build on a data set that is complete already: agree, repair byte for byte, or refuse and name the difference."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from loaders.format import Manifest, ShardEntry, manifest_text, read_manifest, sha256_file
from packer.card import data_card
from packer.outdir import close_partial, open_partial
from packer.publish import Heading, publish
from packer.records import is_intact, sync_folder
from packer.run import Outcome, Plan, Run, heading_of, make_plan, run_plan, source_fingerprint
from packer.sample import PackError


def restore(run: Run, out: Path) -> Outcome:
    """Compare `out` with what the command would build. All equal: done. Bytes damaged or missing: made again and put back.

    Raises:
        PackError: another plan, another source, or the bytes cannot be made again as they were (other library versions).
    """
    manifest = read_manifest(out)
    plan = make_plan(run)
    if plan is None:
        raise PackError(f"{run.src}: has faults now that it did not have when {out} was packed; see above")
    fingerprint = source_fingerprint(run, plan)
    found = heading_of(run, plan, manifest.output.get("image_parts", []), fingerprint)
    differences = list(_differences(manifest, found))
    if differences:
        raise PackError(
            f"{out}: holds a finished data set made by another plan:\n  "
            + "\n  ".join(differences)
            + "\nchoose another OUT, or --overwrite"
        )
    damaged = list(_damaged(out, manifest))
    if not damaged:
        total = sum(s.num_samples for s in manifest.splits.values())
        return Outcome(True, f"already complete: {total:,} samples, every file as the manifest says", total, manifest=manifest)
    for path in damaged:
        run.console.say(f"damaged or missing: {path}")
    _remake(run, plan, out, manifest, damaged)
    return Outcome(True, f"restored {len(damaged):,} damaged or missing files, byte for byte", manifest=manifest)


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
            yield f"{name}: was {old}, is now {new}"
    for key in sorted(manifest.output.keys() | found.output.keys()):
        if manifest.output.get(key) != found.output.get(key):
            yield f"output {key}: was {manifest.output.get(key)}, is now {found.output.get(key)}"
    if manifest.source.fingerprint != found.source.fingerprint:
        yield "source: pictures or annotations were added, removed or changed since"


def _damaged(out: Path, manifest: Manifest) -> Iterator[str]:
    """Paths of files that are missing or not as the manifest says."""
    for split in manifest.splits.values():
        for shard in split.shards:
            for name, (num_bytes, sha) in _files(shard).items():
                if not is_intact(out / shard.path, {name: (num_bytes, sha)}):
                    yield shard.path + (f"/{name}" if name else "")
    for name, entry in manifest.files.items():
        path = out / name
        if not (path.is_file() and path.stat().st_size == entry.num_bytes and sha256_file(path) == entry.sha256):
            yield name
    card = out / "README.md"
    if not (card.is_file() and card.read_bytes() == data_card(manifest).encode()):
        yield "README.md"


def _files(shard: ShardEntry) -> dict[str, tuple[int, str]]:
    if shard.files is None:
        return {"": (shard.num_bytes, str(shard.sha256))}
    return {name: (f.num_bytes, f.sha256) for name, f in shard.files.items()}


def _remake(run: Run, plan: Plan, out: Path, manifest: Manifest, damaged: Sequence[str]) -> None:
    """Make the whole set again beside the old one, see that it is the same, and move the damaged files' twins into place."""
    partial = open_partial(out)
    shards, remarks, digests, _ = run_plan(run, plan, partial)
    run.remark(plan, remarks, digests)
    staging = Path(tempfile.mkdtemp(prefix="tmp-", dir=partial))
    try:
        again = publish(staging, partial, shards, heading_of(run, plan, sorted(remarks.parts), digests.fingerprint()), run.findings)
        if manifest_text(again) != manifest_text(manifest):
            changed = {k: v for k, v in manifest.created_by.items() if again.created_by.get(k) != v}
            hint = f"it was made with {changed}" if changed else "the result differs"
            raise PackError(f"{out}: cannot be restored byte for byte: {hint}; use --overwrite to pack it anew")
        for path in damaged:
            (out / path).parent.mkdir(parents=True, exist_ok=True)
            if (out / path).is_dir():
                raise PackError(f"{out / path}: is a folder where a file belongs; move it away")
            os.replace(staging / path, out / path)
            sync_folder((out / path).parent)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        close_partial(partial)
