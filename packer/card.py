"""The data card, ``README.md`` of a packed data set: for people, and a YAML header for Hugging Face ``datasets``."""

from __future__ import annotations

import json

from loaders.format import Manifest

_HF_SPLITS = {"train": "train", "val": "validation", "test": "test"}
_INTS, _FLOATS = "int64", "float64"


def data_card(manifest: Manifest) -> str:
    """Text of ``README.md``, a function of the manifest alone."""
    return (_yaml_header(manifest) if manifest.layout == "tar" else "") + _body(manifest)


def _yaml_header(m: Manifest) -> str:
    """`configs` names the tars of each split (the index files beside them would confuse the loader), and explicit `features` keep it
    from inferring types from the first five samples.
    """
    lines = ["---", "configs:", "- config_name: default", "  data_files:"]
    for split in ("train", "val", "test"):
        if split in m.splits:
            lines += [f"  - split: {_HF_SPLITS[split]}", f'    path: "{split}/*.tar"']
    lines += ["dataset_info:", "  features:"]
    for part in image_parts(m):
        lines += [f"  - name: {part}", "    dtype: image"]
    if m.task == "classification":
        lines += ["  - name: cls", "    dtype:", "      class_label:", "        names:"]
        lines += [f"          '{i}': {_yaml_string(name)}" for i, name in enumerate(m.classes)]
    lines += ["  - name: json", "    struct:"]
    scalars = {"source": "string", "width": _INTS, "height": _INTS, "original_width": _INTS, "original_height": _INTS}
    if m.task == "classification":
        scalars["label"] = _INTS
    for name, dtype in scalars.items():
        lines += [f"    - name: {name}", f"      dtype: {dtype}"]
    lists = {"affine": _FLOATS} | (dict.fromkeys(("labels", "difficult", "truncated", "occluded"), _INTS) if m.task == "detection" else {})
    for name, dtype in lists.items():
        lines += [f"    - name: {name}", f"      list: {dtype}"]
    if m.task == "detection":
        lines += ["    - name: boxes", "      list:", f"        list: {_FLOATS}"]
    kept = m.source.options.get("extra", [])  # CSV columns; a reader that is told all features drops every other one
    if kept:
        lines += ["    - name: extra", "      struct:"]
        for column in kept:
            lines += [f"      - name: {_yaml_string(str(column))}", "        dtype: string"]
    for name in ("__key__", "__url__"):
        lines += [f"  - name: {name}", "    dtype: string"]
    return "\n".join([*lines, "---", "", ""])


def _yaml_string(text: str) -> str:
    """A double-quoted YAML string. JSON's would do, but for characters that YAML takes for line breaks or does not allow."""
    return '"' + "".join(c if c.isprintable() and c not in '"\\' else f"\\U{ord(c):08x}" for c in text) + '"'


def image_parts(m: Manifest) -> list[str]:
    """The image parts that the data set holds."""
    return [str(p) for p in m.output.get("image_parts", [])]


def _body(m: Manifest) -> str:
    total = sum(s.num_samples for s in m.splits.values())
    lines = [
        "# Packed image data set",
        "",
        f"{total:,} samples, task `{m.task}`, layout `{m.layout}`, made by shardpack {m.created_by.get('shardpack', '')}.",
        "",
        "| split | samples | shards | bytes |",
        "|---|---:|---:|---:|",
    ]
    for name in ("train", "val", "test"):
        if name in m.splits:
            s = m.splits[name]
            lines.append(f"| {name} | {s.num_samples:,} | {len(s.shards):,} | {sum(x.num_bytes for x in s.shards):,} |")
    if m.classes:
        lines += ["", "Classes, in id order: " + ", ".join(f"`{c}`".replace("\n", " ") for c in m.classes) + "."]
    if m.transform:
        lines += ["", f"Every picture was transformed: `{json.dumps(m.transform, sort_keys=True)}`."]
    reader = "loaders.shards import ShardDataset" if m.layout == "tar" else "loaders.memmap import MemmapDataset"
    cls = reader.split()[-1]
    split = "train" if "train" in m.splits else next(iter(sorted(m.splits)), "train")
    one_size = "image" not in m.fields or "H" not in m.fields["image"].shape
    collate = "" if m.task != "detection" else '  # batch["boxes"]: a list of float32 [N, 4] tensors, xyxy pixels'
    loop = [f'for batch in BatchLoader(ds, batch_size=64, remainder="pad"):{collate}', '    batch["image"]']
    if not one_size:
        loop = ["# The images differ in size: for batches pack with --resize, or give a transform or a collate of your own."]
    lines += [
        "",
        "```python",
        f"from {reader}",
        *(["from loaders.batches import BatchLoader"] if one_size else []),
        "",
        f'ds = {cls}("out/", split="{split}")',
        'ds[0]["image"]  # uint8 [3, H, W]',
        *loop,
        "```",
        "",
        "`pack verify` checks every byte. The format is described in `loaders/format.py` of shardpack.",
        "",
    ]
    return "\n".join(lines)
