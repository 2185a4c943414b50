"""``pack info --shuffle``: the numbers on sets that come sorted by class, and the lines."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import webdataset.filters
from click.testing import CliRunner

from build_data import run_build
from loaders.format import open_index, read_manifest
from loaders.sampling import permutation
from packed_data import write_packed
from packer.cli import main
from packer.shuffling import describe_shuffle, picture_labels, qualities, webdataset_order, webdataset_shuffle

BLOCK, WEBDATASET, STORED = "BatchLoader", "webdataset .shuffle(1000)", "stored order"


@pytest.mark.parametrize(("count", "size"), [(0, 10), (1, 10), (57, 10), (500, 1000), (3000, 1000)])
def test_the_simulation_is_webdatasets_own_code(count: int, size: int) -> None:
    items: Iterator[int] = iter(range(count))
    expected = list(webdataset.filters._shuffle(items, size, rng=random.Random(7)))
    assert list(webdataset_shuffle(range(count), size, random.Random(7))) == expected


def test_the_simulation_visits_shards_in_a_shuffled_order() -> None:
    orders = [webdataset_order([3000, 2000, 1, 2500], 0, epoch) for epoch in (0, 1)]
    for order in orders:
        assert sorted(order) == list(range(7501))
    assert (orders[0] != orders[1]).any()


def test_a_source_sorted_by_class_is_mixed_as_by_chance() -> None:
    """65,536 samples of 64 classes, listed class by class, shuffled while packing (the default) into 64 shards."""
    count = 65_536
    labels = (np.arange(count) * 64 // count)[permutation(count, 5)]
    found = qualities([count // 64] * 64, labels, batch_size=256, seed=0)
    block = found[BLOCK]
    assert block.label_chi2 is not None
    assert 0.9 <= block.label_chi2 <= 1.1
    assert block.co_batch < 1.3
    assert found[WEBDATASET].co_batch > 5
    assert found[STORED].co_batch == pytest.approx((count - 1) / 255)


def test_shards_sorted_by_class_are_mixed_while_the_set_is_one_window() -> None:
    """Packed with --no-shuffle: up to 16,383 samples are shuffled as a whole, and webdataset's buffer does not reach far enough."""
    count = 16_000
    found = qualities([500] * 32, np.arange(count) * 40 // count, batch_size=128, seed=0)
    block, other = found[BLOCK], found[WEBDATASET]
    assert block.label_chi2 is not None
    assert other.label_chi2 is not None
    assert 0.9 <= block.label_chi2 <= 1.1
    assert block.co_batch < 1.3
    assert other.label_chi2 > 10


def test_lines(tmp_path: Path, make_folder: Callable[..., Path]) -> None:
    assert run_build(make_folder(40), tmp_path / "out", output={"shard_samples": 7}).ok
    lines = list(describe_shuffle(tmp_path / "out", 4))
    assert lines[0].split() == ["shuffle", "of", "train,", "batches", "of", "4", "label", "chi2/dof", "co-batch", "ratio"]
    assert len(lines) == 6
    for line, name in zip(lines[1:4], (BLOCK, WEBDATASET, STORED), strict=True):
        assert line.startswith(name)
        assert all(float(value) >= 0 for value in line.split()[-2:])
    assert lines[3].split()[-1] == "13.00"  # every pair meets again: 39 / 3
    shown = CliRunner().invoke(main, ["info", str(tmp_path / "out"), "--shuffle", "--batch-size", "4"])
    assert shown.exit_code == 0
    assert "\n".join(lines) in shown.stdout
    assert "co-batch ratio" not in CliRunner().invoke(main, ["info", str(tmp_path / "out")]).stdout
    few = CliRunner().invoke(main, ["info", str(tmp_path / "out"), "--shuffle"])
    assert few.exit_code == 0
    assert "shuffle of train: 40 samples are fewer than two batches of 256: give a smaller --batch-size" in few.stdout
    assert CliRunner().invoke(main, ["info", str(tmp_path / "out"), "--batch-size", "1"]).exit_code == 2


def test_shards_of_large_classes_are_told_about(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write_packed(tmp_path / "out", "tar", "classification", counts=(8,))
    labels = np.arange(65_536) // 1024
    clumped = qualities([1024] * 64, labels, 256, 0)
    assert clumped[BLOCK].label_chi2 is not None
    assert clumped[BLOCK].label_chi2 > 1.5
    monkeypatch.setattr("packer.shuffling.qualities", lambda *_: clumped)
    assert "pack with --shuffle" in list(describe_shuffle(tmp_path / "out", 4))[-1]


def test_one_class_per_picture(tmp_path: Path) -> None:
    for task, expected in (("classification", [0, 1, 2, 0]), ("unlabelled", None)):
        root = write_packed(tmp_path / task, "tar", task, counts=(4,)).root  # type: ignore[arg-type]  # one of the tasks
        labels = picture_labels(open_index(root, read_manifest(root), "train"))
        assert (None if labels is None else labels.tolist()) == expected
    packed = write_packed(tmp_path / "d", "memmap", counts=(9,))
    labels = picture_labels(open_index(packed.root, read_manifest(packed.root), "train"))
    assert labels is not None
    assert labels.tolist() == [int(ids[0]) if len(ids) else -1 for ids in packed.box_labels]
    bare = write_packed(tmp_path / "bare", "memmap", counts=(3,), num_boxes=(0,)).root
    assert picture_labels(open_index(bare, read_manifest(bare), "train")) is None
