"""The data card: its YAML header must parse, whatever a class is called, and say what the loader of Hugging Face needs."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from loaders.format import FileEntry, FindingCounts, Layout, Manifest, ShardEntry, SourceEntry, SplitEntry, Task
from packer.card import data_card, image_parts


def manifest(
    task: Task = "classification", layout: Layout = "tar", classes: tuple[str, ...] = ("crack", "slag"), **changes: Any
) -> Manifest:
    file = FileEntry(num_bytes=1000, sha256="0" * 64)

    def shard(split: str, n: int) -> ShardEntry:
        kind: dict[str, Any] = {"sha256": file.sha256} if layout == "tar" else {"files": {"image.npy": file}}
        return ShardEntry(path=f"{split}/shard-{n:06d}" + (".tar" if layout == "tar" else ""), num_samples=1500, num_bytes=1000, **kind)

    splits = changes.pop("splits", ("train", "val", "test"))
    values: dict[str, Any] = {
        "format_version": 1,
        "layout": layout,
        "task": task,
        "classes": [] if task == "unlabelled" else list(classes),
        "fields": {},
        "splits": {name: SplitEntry(num_samples=3000, shards=[shard(name, 0), shard(name, 1)]) for name in splits},
        "source": SourceEntry(kind="voc", options={}, fingerprint="0" * 64),
        "transform": None,
        "output": {"image_parts": ["jpg", "png"]},
        "findings": FindingCounts(),
        "files": {},
        "created_by": {"shardpack": "0.1.0"},
    }
    return Manifest(**{**values, **changes})


def header(card: str) -> dict[str, Any]:
    """The YAML between the first two lines of dashes, as Hugging Face takes it."""
    start, text, _ = card.split("---\n", 2)
    assert start == ""
    parsed: dict[str, Any] = yaml.safe_load(text)
    return parsed


def features(card: str) -> dict[str, Any]:
    return {f.pop("name"): f for f in header(card)["dataset_info"]["features"]}


def struct(card: str) -> dict[str, Any]:
    return {f.pop("name"): f for f in features(card)["json"]["struct"]}


def test_configs_name_the_tars_of_each_split() -> None:
    (config,) = header(data_card(manifest()))["configs"]
    assert config == {
        "config_name": "default",
        "data_files": [
            {"split": "train", "path": "train/*.tar"},
            {"split": "validation", "path": "val/*.tar"},
            {"split": "test", "path": "test/*.tar"},
        ],
    }


def test_only_splits_that_are_there_are_named() -> None:
    (config,) = header(data_card(manifest(splits=("test",))))["configs"]
    assert config["data_files"] == [{"split": "test", "path": "test/*.tar"}]


def test_features_of_classification() -> None:
    card = data_card(manifest())
    assert features(card) == {
        "jpg": {"dtype": "image"},
        "png": {"dtype": "image"},
        "cls": {"dtype": {"class_label": {"names": {"0": "crack", "1": "slag"}}}},
        "json": features(card)["json"],
        "__key__": {"dtype": "string"},
        "__url__": {"dtype": "string"},
    }
    fields = struct(card)
    assert set(fields) == {"source", "width", "height", "original_width", "original_height", "affine", "label"}
    assert fields["source"] == {"dtype": "string"}
    assert fields["label"] == fields["width"] == {"dtype": "int64"}
    assert fields["affine"] == {"list": "float64"}


def test_features_of_detection() -> None:
    card = data_card(manifest("detection"))
    assert "cls" not in features(card)
    fields = struct(card)
    assert "label" not in fields
    assert fields["boxes"] == {"list": {"list": "float64"}}
    assert {name for name in fields if fields[name] == {"list": "int64"}} == {"labels", "difficult", "truncated", "occluded"}


@pytest.mark.parametrize("task", ["classification", "detection"])
def test_features_of_kept_columns(task: Task) -> None:
    """A loader drops what is in no feature. Columns may be named by number."""
    source = SourceEntry(kind="csv", options={"extra": ["operator: #1", 3]}, fingerprint="0" * 64)
    kept = struct(data_card(manifest(task, source=source)))["extra"]
    assert kept == {"struct": [{"name": "operator: #1", "dtype": "string"}, {"name": "3", "dtype": "string"}]}
    assert "extra" not in struct(data_card(manifest(task)))


def test_features_without_labels() -> None:
    card = data_card(manifest("unlabelled"))
    assert set(features(card)) == {"jpg", "png", "json", "__key__", "__url__"}
    assert set(struct(card)) == {"source", "width", "height", "original_width", "original_height", "affine"}
    assert "Classes" not in card


def test_a_memmap_has_no_header_and_names_its_reader() -> None:
    card = data_card(manifest(layout="memmap", output={}))
    assert card.startswith("# Packed image data set")
    assert "from loaders.memmap import MemmapDataset" in card


def class_names(*names: str) -> list[str]:
    found = features(data_card(manifest(classes=names)))["cls"]["dtype"]["class_label"]["names"]
    return [found[str(i)] for i in range(len(found))]


HARD = [
    *("yes", "null", "~", "1.0", "-", "", " ", "a: b", "# a", 'say "no"', "it's", "back\\slash", "---", "%s", "{}", "\\u0041"),
    *("two\nlines", "tab\t", "裂纹", "🔥", "\x00", "\x7f", "\x85", "\u2028", "\u00a0", "\ufeff", "\U000e0001"),
]


def test_class_names_survive_yaml() -> None:
    assert class_names(*HARD) == HARD


@settings(deadline=None)
@given(st.lists(st.text(max_size=12), min_size=1, max_size=4))
def test_any_class_name_survives_yaml(names: list[str]) -> None:
    assert class_names(*names) == names


def test_numbers_and_order_of_the_table() -> None:
    lines = data_card(manifest(splits=("test", "val", "train"))).splitlines()
    assert [line for line in lines if line.startswith(("| t", "| v"))] == [
        "| train | 3,000 | 2 | 2,000 |",
        "| val | 3,000 | 2 | 2,000 |",
        "| test | 3,000 | 2 | 2,000 |",
    ]
    assert any("9,000 samples, task `classification`, layout `tar`, made by shardpack 0.1.0." in line for line in lines)


@pytest.mark.parametrize(("splits", "shown"), [(("train", "val", "test"), "train"), (("val", "train"), "train"), (("test", "val"), "test")])
def test_the_example_loads_a_split_that_is_there(splits: tuple[str, ...], shown: str) -> None:
    card = data_card(manifest(splits=splits))
    assert f'ShardDataset("out/", split="{shown}")' in card
    code = card.split("```python\n")[1].split("```")[0]
    compile(code, "README.md", "exec")


def test_the_transform_is_told() -> None:
    assert '`{"mode": "letterbox", "resize": 640}`' in data_card(manifest(transform={"resize": 640, "mode": "letterbox"}))


def test_image_parts() -> None:
    assert image_parts(manifest()) == ["jpg", "png"]
    assert image_parts(manifest(layout="memmap", output={})) == []
