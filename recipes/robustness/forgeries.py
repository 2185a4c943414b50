"""Manifests with a fresh checksum of their own that contradict the data: only what they say can give them away."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable
from typing import Any

from packed_sets import Damage, Mutant

from loaders.format import canonical_json


def forged_manifest(m: Mutant) -> Damage:
    """A manifest with a fresh checksum of its own that contradicts the data."""
    raw = copy.deepcopy(m.manifest)
    says, named = m.rng.choice(FORGERIES)(m, raw)
    body = {k: v for k, v in raw.items() if k != "self_sha256"}
    text = canonical_json({**body, "self_sha256": hashlib.sha256(canonical_json(body).encode()).hexdigest()})
    (m.root / "manifest.json").write_text(text, "utf-8")
    return Damage(f"forged manifest: {says}", named)


Forged = tuple[str, tuple[tuple[str, ...], ...]]


def _some_split(m: Mutant, raw: dict[str, Any]) -> tuple[str, dict[str, Any], dict[str, Any], int]:
    """(name, the split, one of its shards, that one's position)."""
    name = m.rng.choice(sorted(raw["splits"]))
    split = raw["splits"][name]
    i = m.rng.randrange(len(split["shards"]))
    return name, split, split["shards"][i], i


def _entry(m: Mutant, raw: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """(path, entry) of a file, whatever list it is in."""
    entries = dict(raw["files"])
    for split in raw["splits"].values():
        for shard in split["shards"]:
            entries |= {f"{shard['path']}/{name}": e for name, e in shard["files"].items()} if "files" in shard else {shard["path"]: shard}
    path = m.rng.choice(sorted(entries))
    return path, entries[path]


def forged_checksum(m: Mutant, raw: dict[str, Any]) -> Forged:
    path, entry = _entry(m, raw)
    entry["sha256"] = hashlib.sha256(m.rng.randbytes(8)).hexdigest()
    return f"checksum of {path}", ((path,),)


def forged_size(m: Mutant, raw: dict[str, Any]) -> Forged:
    path, entry = _entry(m, raw)
    entry["num_bytes"] = max(0, entry["num_bytes"] + m.rng.choice([-1, 1, 512, -512])) if entry["num_bytes"] else 1
    return f"size of {path}", ((path, "manifest.json"),)


def forged_shard_size(m: Mutant, raw: dict[str, Any]) -> Forged:
    _, _, shard, _ = _some_split(m, raw)
    shard["num_bytes"] += 1
    return f"size of shard {shard['path']}", ((shard["path"], "manifest.json"),)


def forged_count(m: Mutant, raw: dict[str, Any]) -> Forged:
    name, split, shard, _ = _some_split(m, raw)
    by = m.rng.choice([-1, 1, 7])
    shard["num_samples"] += by
    split["num_samples"] += by
    return f"count of {shard['path']}", ((shard["path"], f"index/{name}", f"index/{name}/samples.npy"),)


def forged_sum(m: Mutant, raw: dict[str, Any]) -> Forged:
    name, split, _, _ = _some_split(m, raw)
    split["num_samples"] += 1
    return f"count of split {name}", (("manifest.json",),)


def forged_path(m: Mutant, raw: dict[str, Any]) -> Forged:
    _, _, shard, _ = _some_split(m, raw)
    old, new = shard["path"], shard["path"].replace("shard-0", "shard-9")
    shard["path"] = new
    return f"path of {old} is {new}", (tuple(n for n in [old, new, *(f"{new}/{f}" for f in shard.get("files", {}))]),)


def forged_order(m: Mutant, raw: dict[str, Any]) -> Forged:
    name, split, _, _ = _some_split(m, raw)
    if len(split["shards"]) < 2:
        return forged_sum(m, raw)
    a, b = split["shards"][:2]
    split["shards"][:2] = [b, a]
    return f"first shards of {name} exchanged", ((a["path"], b["path"]),)


def forged_split(m: Mutant, raw: dict[str, Any]) -> Forged:
    name = m.rng.choice(sorted(raw["splits"]))
    raw["splits"][name + "x"] = raw["splits"].pop(name)
    return f"split {name} renamed", ((f"index/{name}x", f"index/{name}/samples.npy"),)


def forged_shard_dropped(m: Mutant, raw: dict[str, Any]) -> Forged:
    _, split, shard, i = _some_split(m, raw)
    del split["shards"][i]
    split["num_samples"] -= shard["num_samples"]
    return f"{shard['path']} dropped", tuple((p,) for p in [shard["path"], *(f"{shard['path']}/{f}" for f in shard.get("files", {}))][-1:])


def forged_split_dropped(m: Mutant, raw: dict[str, Any]) -> Forged:
    name = m.rng.choice(sorted(raw["splits"]))
    first = raw["splits"].pop(name)["shards"][0]["path"]
    return f"split {name} dropped", ((first, f"{first}/image.npy", "manifest.json"),)


def forged_file_dropped(m: Mutant, raw: dict[str, Any]) -> Forged:
    path = m.rng.choice(sorted(raw["files"]))
    del raw["files"][path]
    return f"{path} no longer covered", ((path, path.rpartition("/")[0], "manifest.json", *(s["path"] for s in m.shards())),)


def forged_file_added(m: Mutant, raw: dict[str, Any]) -> Forged:
    path = m.rng.choice(["index/train/more.npy", "LICENSE", "train/shard-000088.tar.idx"])
    raw["files"][path] = {"num_bytes": 3, "sha256": hashlib.sha256(b"abc").hexdigest()}
    return f"{path} listed", ((path,),)


def forged_task(m: Mutant, raw: dict[str, Any]) -> Forged:
    raw["task"] = m.rng.choice([t for t in ("classification", "detection", "unlabelled") if t != raw["task"]])
    return f"task is {raw['task']}", (("manifest.json", *_places_of_data(m)),)


def forged_classes(m: Mutant, raw: dict[str, Any]) -> Forged:
    if not raw["classes"]:
        return forged_task(m, raw)
    raw["classes"] = raw["classes"][: m.rng.randrange(len(raw["classes"]))]
    return f"only {len(raw['classes'])} classes", (("manifest.json", *_places_of_data(m)),)


def forged_findings(m: Mutant, raw: dict[str, Any]) -> Forged:
    level = m.rng.choice(sorted(raw["findings"]))
    raw["findings"][level] += 1
    return f"findings of level {level}", (("manifest.json", "findings.jsonl"),)


def forged_layout(m: Mutant, raw: dict[str, Any]) -> Forged:
    raw["layout"] = "tar" if m.manifest["layout"] == "memmap" else "memmap"
    return f"layout is {raw['layout']}", (("manifest.json",),)


def _places_of_data(m: Mutant) -> list[str]:
    index = [f"index/{split}{name}" for split in m.manifest["splits"] for name in ("", "/samples.npy", "/labels.npy")]
    return [*(shard["path"] for shard in m.shards()), *index]


FORGERIES: list[Callable[[Mutant, dict[str, Any]], Forged]] = [
    forged_checksum,
    forged_size,
    forged_shard_size,
    forged_count,
    forged_sum,
    forged_path,
    forged_order,
    forged_split,
    forged_shard_dropped,
    forged_split_dropped,
    forged_file_dropped,
    forged_file_added,
    forged_task,
    forged_classes,
    forged_findings,
    forged_layout,
]
