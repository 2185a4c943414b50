"""What a packed data set holds, as text: read from manifest and index alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from loaders.format import Index, Manifest, open_index, read_manifest
from packer.findings import printable
from packer.plan import SPLITS

MAX_NAME = 60
"""Characters of a class name that are printed: one long name would make every line as wide."""


def describe(root: Path) -> Iterator[str]:
    """Lines for ``pack info``: splits, classes with counts, ranges of image and box sizes, bytes, transform.

    Nothing that the manifest says can garble a terminal.

    Raises:
        FormatError: manifest or index cannot be read.
    """
    return map(printable, _lines(root))


def _lines(root: Path) -> Iterator[str]:
    manifest = read_manifest(root)
    splits = sorted(manifest.splits, key=lambda s: SPLITS.index(s) if s in SPLITS else len(SPLITS))
    indexes = {name: open_index(root, manifest, name) for name in splits}
    total = sum(s.num_samples for s in manifest.splits.values())
    num_bytes = sum(x.num_bytes for s in manifest.splits.values() for x in s.shards)
    yield f"{root}: {total:,} samples, {manifest.task}, layout {manifest.layout}, {human_bytes(num_bytes)}"
    yield f"source: {manifest.source.kind}, fingerprint {manifest.source.fingerprint[:16]}"
    yield "transform: " + ("none" if manifest.transform is None else json.dumps(manifest.transform, sort_keys=True))
    yield "findings: " + ", ".join(f"{n:,} {level}" for level, n in manifest.findings.model_dump().items())
    yield "made by: " + ", ".join(f"{name} {version}" for name, version in sorted(manifest.created_by.items()))
    yield ""
    rows = [["split", "samples", "shards", "bytes"]]
    for name in splits:
        entry = manifest.splits[name]
        size = human_bytes(sum(x.num_bytes for x in entry.shards))
        rows.append([name, f"{entry.num_samples:,}", f"{len(entry.shards):,}", size])
    yield from table(rows)
    if manifest.classes:
        yield ""
        yield from table(_class_rows(manifest, indexes))
    if total:
        yield ""
        yield from table(_range_rows(manifest, list(indexes.values())))


def _class_rows(manifest: Manifest, indexes: dict[str, Index]) -> list[list[str]]:
    unit = "boxes" if manifest.task == "detection" else "samples"
    rows = [["id", "class", *(f"{name} {unit}" for name in indexes)]]
    counts = []
    for index in indexes.values():
        labels = np.asarray(index.samples["label"] if index.labels is None else index.labels)
        counts.append(np.bincount(labels[(labels >= 0) & (labels < len(manifest.classes))], minlength=len(manifest.classes)))
    for i, name in enumerate(manifest.classes):
        rows.append([str(i), _short(printable(name)), *(f"{int(c[i]):,}" for c in counts)])  # escaped here, so that columns stay aligned
    return rows


def _short(name: str) -> str:
    return name if len(name) <= MAX_NAME else name[: MAX_NAME - 3] + "..."


def _range_rows(manifest: Manifest, indexes: list[Index]) -> list[list[str]]:
    rows = [["", "min", "median", "max"]]
    samples = np.concatenate([i.samples for i in indexes])
    series = {"image width": samples["width"], "image height": samples["height"]}
    if manifest.layout == "tar":
        series["image bytes"] = samples["image_size"]
    if manifest.task == "detection":
        boxes = np.concatenate([i.boxes for i in indexes if i.boxes is not None])
        series |= {"boxes per image": samples["num_boxes"]}
        if len(boxes):
            series |= {"box width": boxes[:, 2] - boxes[:, 0], "box height": boxes[:, 3] - boxes[:, 1]}
    for name, values in series.items():
        rows.append([name, *(f"{float(v):,.6g}" for v in (values.min(), np.median(values), values.max()))])
    return rows


def table(rows: list[list[str]]) -> Iterator[str]:
    """Columns of text; the first is left-aligned where it is no number, the others right-aligned."""
    widths = [max(len(r[c]) for r in rows) for c in range(len(rows[0]))]
    words = [not all(r[c].replace(",", "").replace(".", "").isdigit() for r in rows[1:]) and c < 2 for c in range(len(widths))]
    for row in rows:
        yield "  ".join(v.ljust(w) if left else v.rjust(w) for v, w, left in zip(row, widths, words, strict=True)).rstrip()


def human_bytes(n: int) -> str:
    """1234567 -> "1.2 MB"."""
    if n < 1000:
        return f"{n} B"
    value = n / 1000
    for unit in ("kB", "MB", "GB"):
        if round(value, 1) < 1000:
            return f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"
