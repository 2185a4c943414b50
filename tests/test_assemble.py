from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from batch_data import MemoryDataset, MixedSizes
from loaders.batches import BatchLoader
from loaders.collate import collate_indexed, collate_padded

Sample = dict[str, Any]


def test_a_classification_batch() -> None:
    batch = next(iter(BatchLoader(MemoryDataset(20), batch_size=8, shuffle=False)))
    assert list(batch) == ["image", "label", "key", "index"]
    assert batch["image"].shape == (8, 3, 4, 5)
    assert batch["image"].dtype == torch.uint8
    assert batch["image"].is_contiguous(memory_format=torch.channels_last)
    assert (batch["image"] == torch.arange(8)[:, None, None, None]).all()
    for name in ("label", "key", "index"):
        assert batch[name].dtype == torch.int64
    assert batch["index"].tolist() == list(range(8))
    assert batch["label"].tolist() == [0, 1, 2, 3, 4, 5, 6, 0]
    assert batch["key"].tolist() == list(range(1000, 1008))


def test_an_unlabelled_batch() -> None:
    assert list(next(iter(BatchLoader(MemoryDataset(4, "unlabelled"), batch_size=4)))) == ["image", "key", "index"]


def double(sample: Sample, rng: np.random.Generator) -> Sample:
    return {**sample, "image": np.repeat(sample["image"], 2, axis=0), "draw": float(rng.random()), "name": f"s{sample['index']}"}


def same(sample: Sample, rng: np.random.Generator) -> Sample:
    del rng
    return sample


@pytest.mark.parametrize("transform", [None, same])
def test_a_detection_batch(transform: object) -> None:
    ds = MemoryDataset(20, "detection", transform=transform)
    batch = next(iter(BatchLoader(ds, batch_size=4, shuffle=False)))
    assert [b.tolist() for b in batch["boxes"]] == [[], [[1.0] * 4], [[2.0] * 4] * 2, []]
    assert [b.tolist() for b in batch["labels"]] == [[], [1], [2, 2], []]
    assert [b.tolist() for b in batch["difficult"]] == [[], [1], [0, 0], []]
    assert (batch["boxes"][0].shape, batch["boxes"][0].dtype) == ((0, 4), torch.float32)
    padded = next(iter(BatchLoader(ds, batch_size=4, shuffle=False, collate=collate_padded)))
    assert padded["boxes"].shape == (4, 2, 4)
    assert padded["mask"].sum(1).tolist() == [0, 1, 2, 0]
    indexed = next(iter(BatchLoader(ds, batch_size=4, shuffle=False, collate=collate_indexed)))
    assert indexed["boxes"].tolist() == [[1.0] * 5, [2.0] * 5, [2.0] * 5]
    for other in (batch, padded, indexed):
        assert other["key"].tolist() == [1000, 1001, 1002, 1003]
        assert other["image"][:, 0, 0, 0].tolist() == [0, 1, 2, 3]


def test_a_transform_decides_the_size_and_may_add_fields() -> None:
    ds = MemoryDataset(20, transform=double)
    loader = BatchLoader(ds, batch_size=4, shuffle=False)
    batch = next(iter(loader))
    assert batch["image"].shape == (4, 3, 8, 5)
    assert batch["image"].is_contiguous(memory_format=torch.channels_last)
    assert batch["draw"].tolist() == [np.random.default_rng([0, i]).random() for i in range(4)]
    assert batch["name"] == ["s0", "s1", "s2", "s3"]
    loader.set_epoch(3)
    assert next(iter(loader))["draw"].tolist() == [np.random.default_rng([3, i]).random() for i in range(4)]


def test_padding_repeats_what_was_loaded_once() -> None:
    loads: list[int] = []

    def count(sample: Sample, rng: np.random.Generator) -> Sample:
        del rng
        loads.append(sample["index"])
        return sample

    loader = BatchLoader(MemoryDataset(5, "detection", transform=count), batch_size=8, shuffle=False, remainder="pad")
    (batch,) = loader
    assert loads == [0, 1, 2, 3, 4]
    assert batch["index"].tolist() == [0, 1, 2, 3, 4, 4, 4, 4]
    assert batch["image"][:, 0, 0, 0].tolist() == [0, 1, 2, 3, 4, 4, 4, 4]
    assert [len(b) for b in batch["boxes"]] == [0, 1, 2, 0, 1, 1, 1, 1]
    assert batch["valid"].tolist() == [True] * 5 + [False] * 3


def broken(change: Any) -> BatchLoader:
    def transform(sample: Sample, rng: np.random.Generator) -> Any:
        del rng
        return change(sample) if sample["index"] == 2 else sample

    return BatchLoader(MemoryDataset(4, "detection", transform=transform), batch_size=4, shuffle=False)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: {**s, "image": s["image"][:3]}, r"sample 2 \(key 1002\): image has shape \(3, 5, 3\) .* first of its batch \(4, 5, 3\)"),
        (lambda s: {**s, "image": s["image"].astype(np.float32)}, r"sample 2 \(key 1002\): image has .*float32"),
        (lambda s: {**s, "image": s["image"][0]}, r"sample 2 \(key 1002\): image is an array of shape \(5, 3\) .* expected"),
        (lambda s: {**s, "image": torch.zeros(3, 4, 5)}, r"sample 2 \(key 1002\): image is Tensor"),
        (lambda s: {k: v for k, v in s.items() if k != "image"}, r"sample 2 \(key 1002\): image is NoneType"),
        (lambda s: {**s, "boxes": s["boxes"][:1]}, r"1002 has 1 boxes, 2 labels"),
        (lambda s: {**s, "more": 1}, r"1002 has \['more'\]"),
    ],
)
def test_samples_that_do_not_fit_together_are_named(change: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        next(iter(broken(change)))


def test_a_transform_may_change_the_size_from_batch_to_batch() -> None:
    def scale(sample: Sample, rng: np.random.Generator) -> Sample:
        del rng
        return {**sample, "image": np.repeat(sample["image"], 1 + sample["index"] // 4, axis=1)}

    sizes = [b["image"].shape[3] for b in BatchLoader(MemoryDataset(12, transform=scale), batch_size=4, shuffle=False)]
    assert sizes == [5, 10, 15]


def test_images_of_different_size_are_refused_with_the_ways_out() -> None:
    with pytest.raises(ValueError, match=r"differ in size.*--resize.*transform.*collate"):
        BatchLoader(MixedSizes(12), batch_size=4)


def test_a_collate_of_ones_own_gets_samples() -> None:
    def as_list(samples: list[Sample]) -> dict[str, Any]:
        return {"image": [s["image"] for s in samples], "index": [s["index"] for s in samples]}

    loader = BatchLoader(MixedSizes(7), batch_size=4, shuffle=False, collate=as_list, remainder="pad")
    batches = list(loader)
    assert [tuple(image.shape) for image in batches[0]["image"]] == [(3, 4, 5), (3, 5, 5), (3, 6, 5), (3, 4, 5)]
    assert batches[1]["index"] == [4, 5, 6, 6]
    assert batches[1]["valid"].tolist() == [True, True, True, False]


def test_batch_transform_runs_in_the_threads_and_sees_everything() -> None:
    ds = MemoryDataset(10)

    def scale(batch: dict[str, Any]) -> dict[str, Any]:
        return {"x": batch["image"].float() / 255, "y": batch["label"], "weight": batch["valid"].float()}

    batches = list(BatchLoader(ds, batch_size=4, shuffle=False, remainder="pad", batch_transform=scale))
    assert [list(b) for b in batches] == [["x", "y", "weight"]] * 3
    assert batches[2]["weight"].tolist() == [1, 1, 0, 0]
    forgot: Any = {}.update
    with pytest.raises(TypeError, match="batch_transform returned None"):
        next(iter(BatchLoader(ds, batch_size=4, batch_transform=forgot)))
