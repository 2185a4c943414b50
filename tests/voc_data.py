"""Writes small Pascal VOC data sets for tests; the pictures hold no pixels, as no source opens them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from packer.sample import Finding, Listing
from packer.sources.voc import VocOptions, VocSource


def voc_object(name: str = "crack", box: Sequence[object] = (11, 9, 30, 24), extra: str = "") -> str:
    corners = "".join(f"<{k}>{v}</{k}>" for k, v in zip(("xmin", "ymin", "xmax", "ymax"), box, strict=True))
    return f"<object><name>{name}</name>{extra}<bndbox>{corners}</bndbox></object>"


def voc_xml(*objects: str, head: str = "<size><width>64</width><height>48</height><depth>3</depth></size>") -> str:
    return "<annotation>\n" + head + "\n" + "\n".join(objects) + "\n</annotation>\n"


def put(root: Path, path: str, content: str | bytes = b"") -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    if not (root / path).exists():
        (root / path).write_bytes(content.encode() if isinstance(content, str) else content)


def put_pair(root: Path, name: str, xml: str | bytes | None = None, images: str = "images", annotations: str = "annotations") -> None:
    put(root, f"{images}/{name}.jpg", name)
    put(root, f"{annotations}/{name}.xml", voc_xml(voc_object()) if xml is None else xml)


def source(root: Path, **options: object) -> VocSource:
    return VocSource(root, VocOptions.model_validate(options))


def listed(root: Path, **options: object) -> tuple[Listing, list[Finding]]:
    findings: list[Finding] = []
    return source(root, **options).list(findings.append), findings


def codes(findings: list[Finding]) -> list[tuple[str, str, str]]:
    return [(f.level, f.code, f.path) for f in findings]
