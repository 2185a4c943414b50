"""Healthy packed data sets of varied shape, of which `pack verify` must say nothing."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

from packed_sets import pack, problems_of
from raw_sets import CLASSES, folders, voc


def healthy(folder: Path, num: int, seed: int) -> list[str]:
    """Pack `num` sets of varied shape below `folder` and verify them. The false alarms."""
    alarms = []
    for n in range(num):
        rng = random.Random(f"{seed}/healthy/{n}")
        root = folder / f"healthy-{n}"
        says, tables = _some_source(root / "src", rng)
        tables = _some_tables(tables, rng)
        pack(root / "src", root / "out", tables)
        if rng.random() < 0.5:
            (root / "out" / "README.md").write_bytes(rng.choice([b"", b"mine\n", rng.randbytes(100)]))
        (root / "link").symlink_to("out")
        where = root / rng.choice(["out", "link"])
        problems = [*problems_of(where), *problems_of(where, quick=True)]
        if problems:
            alarms.append(f"healthy set {n} of seed {seed} ({says}, {tables}): {problems[:3]}")
        shutil.rmtree(root)
    return alarms


def _some_source(src: Path, rng: random.Random) -> tuple[str, dict[str, Any]]:
    """Make a small source; (what it is, the tables it needs)."""
    num = rng.choice([1, 1, 2, 5, 11])
    suffixes = rng.choice([(".jpg",), (".png",), (".webp",), (".jpg", ".png", ".webp")])
    kind = rng.choice(["voc", "boxless voc", "classes", "one class", "split folders", "pictures", "names"])
    split: dict[str, Any] = {}
    if kind in ("classes", "one class", "pictures", "names") and rng.random() < 0.6:
        split = {"train": "0.8", "val": "0.1", "test": "0.1"}  # with few pictures some stay empty
    if kind == "voc" or kind == "boxless voc":
        voc(src, num, suffixes=suffixes, max_boxes=0 if kind == "boxless voc" else 3)
        tables: dict[str, Any] = {"source": {"kind": "voc", "classes": list(CLASSES)}}
    elif kind == "names":
        folders(src, num, classes=("Riß", "ポア", "шлак и шов", "a'b\"c&<d>"), suffixes=suffixes, stem="写真 №")
        tables = {"source": {"kind": "folder"}}
    else:
        classes = {"one class": ("crack",), "pictures": ("",)}.get(kind, CLASSES)
        folders(src, num, classes=classes, splits=("train", "val", "test") if kind == "split folders" else ("",), suffixes=suffixes)
        tables = {"source": {"kind": "folder"}}
    return f"{kind} of {num} {'/'.join(suffixes)}", {**tables, **({"split": split} if split else {})}


def _some_tables(tables: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    output: dict[str, Any] = {"shard_samples": rng.choice([1, 2, 3, 50]), "shuffle": rng.random() < 0.5, "seed": rng.randrange(5)}
    resize: dict[str, Any] = {"resize": rng.choice(["32x24", "40"]), "mode": rng.choice(["letterbox", "stretch"])}
    if rng.random() < 0.5:
        output |= {"image": rng.choice(["keep", "jpg", "png", "webp"]), "restart_grid": rng.random() < 0.5}
        if output["image"] == "keep" or rng.random() < 0.5:
            resize = {}
    else:
        output |= {"format": "memmap", "dtype": rng.choice(["uint8", "float16", "float32"])}
        if output["dtype"] != "uint8" and rng.random() < 0.7:
            output["normalize"] = [[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]]
    return {**tables, "output": output, **({"transform": resize} if resize else {})}
