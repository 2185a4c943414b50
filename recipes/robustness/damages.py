"""Ways to damage the files of a packed data set. Each does it once, at random, and says which files verifying has to name."""

from __future__ import annotations

import copy
import os
import random
import shutil
from collections.abc import Iterator
from typing import Any

from packed_sets import Damage, Mutant

from loaders.format import canonical_json

STRANGERS = ["notes.txt", "shard-000055.tar", ".hidden", "tmp-1-x", "Thumbs.db", "größe.npy", "shard-000044", "x.tar.idx"]


def flipped(m: Mutant) -> Damage:
    name = m.pick(at_least=1)
    data = bytearray(m.bytes_of(name))
    # Evenly over the file, or near its head or its end: headers and end blocks are short.
    spans = (range(len(data)), range(min(len(data), 512)), range(max(0, len(data) - 1500), len(data)))
    at = m.rng.choice(m.rng.choice(spans))
    data[at] ^= m.rng.randrange(1, 256)
    (m.root / name).write_bytes(data)
    return Damage(f"byte {at} of {name} changed", ((name,),))


def truncated(m: Mutant) -> Damage:
    name = m.pick(at_least=1)
    size = len(m.bytes_of(name))
    at = m.rng.choice([0, size - 1, m.rng.randrange(size), m.rng.randrange(size) // 512 * 512])
    os.truncate(m.root / name, at)
    return Damage(f"{name} cut to {at} of {size} bytes", ((name,),))


def longer(m: Mutant) -> Damage:
    name = m.pick()
    more = m.rng.choice([b"\0", b"\n", bytes(1024), m.rng.randbytes(m.rng.randrange(1, 2000)), m.bytes_of(m.pick(at_least=1))])
    with (m.root / name).open("ab") as f:
        f.write(more)
    return Damage(f"{len(more)} bytes appended to {name}", ((name,),))


def zeroed(m: Mutant) -> Damage:
    name = m.pick(at_least=1)
    data = m.bytes_of(name)
    a = m.rng.randrange(len(data))
    changed = data[:a] + bytes(len(data) - a)
    if changed == data:
        return flipped(m)
    (m.root / name).write_bytes(changed)
    return Damage(f"{name} is zeros from byte {a} on", ((name,),))


def deleted(m: Mutant) -> Damage:
    name = m.pick()
    (m.root / name).unlink()
    kind = m.rng.choice(["gone", "a folder", "a dead link"])
    if kind == "a folder":
        (m.root / name).mkdir()
    elif kind == "a dead link":
        (m.root / name).symlink_to("nowhere")
    return Damage(f"{name} is {kind}", ((name,),))


def folder_deleted(m: Mutant) -> Damage:
    folder = m.rng.choice([name for name, data in m.whole.items() if data is None])
    shutil.rmtree(m.root / folder)
    return Damage(f"folder {folder} deleted", tuple((name,) for name in m.files if name.startswith(folder + "/")))


def duplicated(m: Mutant) -> Damage:
    name = m.pick()
    head, _, tail = name.rpartition("/")
    twins = [f"copy-{tail}", f"{tail}.bak", tail.replace("000000", "000099") + "~", "shard-000077.tar"]
    twin = (head + "/" if head else "") + m.rng.choice(twins)
    shutil.copyfile(m.root / name, m.root / twin)
    return Damage(f"{name} copied to {twin}", ((twin,),))


def shard_duplicated(m: Mutant) -> Damage:
    shard = m.rng.choice(m.shards())["path"]
    twin = shard.replace("shard-0000", "shard-0001")
    if m.manifest["layout"] == "tar":
        shutil.copyfile(m.root / shard, m.root / twin)
        return Damage(f"{shard} copied to {twin}", ((twin,),))
    shutil.copytree(m.root / shard, m.root / twin)
    return Damage(f"{shard} copied to {twin}", ((f"{twin}/image.npy",), (f"{twin}/key.npy",)))


def swapped(m: Mutant) -> Damage:
    a, b = _two(m)
    (m.root / a).write_bytes(m.bytes_of(b))
    (m.root / b).write_bytes(m.bytes_of(a))
    named = (("manifest.json",),) if "manifest.json" in (a, b) else ((a,), (b,))
    return Damage(f"{a} and {b} swapped", named)


def copied_over(m: Mutant) -> Damage:
    a, b = _two(m)
    (m.root / a).write_bytes(m.bytes_of(b))
    return Damage(f"{a} has the bytes of {b}", ((a,),))


def _two(m: Mutant) -> tuple[str, str]:
    """Two files of different bytes: often of the same name or ending, where a swap is likely."""
    a = m.pick()
    others = [name for name in m.files if m.bytes_of(name) != m.bytes_of(a)]
    alike = [name for name in others if name.rpartition("/")[2] == a.rpartition("/")[2] or name.endswith(a.rpartition("/")[2][-9:])]
    return a, m.rng.choice(alike if alike and m.rng.random() < 0.7 else others)


def extra(m: Mutant) -> Damage:
    folder = m.rng.choice(["", *(name + "/" for name, data in m.whole.items() if data is None)])
    name = folder + m.rng.choice(STRANGERS)
    kind = m.rng.choice(["file", "empty file", "folder", "link", "file in a folder"])
    if kind == "folder":
        (m.root / name).mkdir()
    elif kind == "link":
        (m.root / name).symlink_to(m.rng.choice(["/", "nowhere", "manifest.json"]))
    elif kind == "file in a folder":
        (m.root / name).mkdir()
        name += "/x.npy"
        (m.root / name).write_bytes(b"x")
    else:
        (m.root / name).write_bytes(b"" if kind == "empty file" else m.rng.randbytes(600))
    return Damage(f"extra {kind} {name}", ((name,),))


def renamed(m: Mutant) -> Damage:
    name = m.pick()
    new = name + m.rng.choice(["x", ".old", "~"])
    (m.root / name).rename(m.root / new)
    return Damage(f"{name} renamed to {new}", (("manifest.json",),) if name == "manifest.json" else ((name,), (new,)))


def edited_manifest(m: Mutant) -> Damage:
    """Any value, any key; well-formed, and its own checksum as it was."""
    raw = copy.deepcopy(m.manifest)
    places = [p for p in _places(raw) if p[0] != "self_sha256"]
    *way, last = m.rng.choice(places)
    node = raw
    for key in way:
        node = node[key]
    if m.rng.random() < 0.3 and isinstance(node, dict):
        node[f"{last}x"] = node.pop(last)
    else:
        node[last] = _other(node[last], m.rng)
    (m.root / "manifest.json").write_text(canonical_json(raw), "utf-8")
    return Damage(f"manifest: {'.'.join(map(str, [*way, last]))} edited", (("manifest.json",),))


def _places(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    below = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, child in below:
        yield from _places(child, (*path, key))


def _other(value: Any, rng: random.Random) -> Any:
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, int):
        return value + rng.choice([-1, 1, 1000])
    if isinstance(value, str):
        return value + "x" if not value or rng.random() < 0.5 else value[:-1] + ("0" if value[-1] != "0" else "1")
    return rng.choice([[], {}, "x", None]) or "x"
