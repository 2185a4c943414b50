"""The three collates: whole form, ragged form, property tests, faults."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from loaders.collate import Collate, collate_indexed, collate_list, collate_padded

COLLATES = [collate_list, collate_padded, collate_indexed]


def make(counts: list[int], seed: int = 0) -> list[dict[str, Any]]:
    """Samples with `counts[i]` boxes, as data sets give them."""
    rng = np.random.default_rng(seed)
    return [
        {
            "image": torch.from_numpy(rng.integers(0, 256, (4, 5, 3), dtype=np.uint8)).permute(2, 0, 1),
            "boxes": torch.from_numpy(rng.uniform(0, 9, (n, 4)).astype(np.float32)),
            "labels": torch.from_numpy(rng.integers(0, 9, n)),
            "difficult": torch.from_numpy(rng.integers(0, 2, n, dtype=np.uint8)),
            "key": 100 + i,
            "index": i,
        }
        for i, n in enumerate(counts)
    ]


def csr(samples: list[dict[str, Any]]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    offsets = np.cumsum([0, *(len(s["boxes"]) for s in samples)])
    boxes, labels, difficult = (np.concatenate([s[name].numpy() for s in samples]) for name in ("boxes", "labels", "difficult"))
    return boxes, labels, difficult, offsets


def check_boxes(collate: Collate, batch: dict[str, Any], samples: list[dict[str, Any]]) -> None:
    counts = [len(s["boxes"]) for s in samples]
    if collate is collate_list:
        for name in ("boxes", "labels", "difficult"):
            assert [t.dtype for t in batch[name]] == [s[name].dtype for s in samples]
            assert all(torch.equal(t, s[name]) for t, s in zip(batch[name], samples, strict=True))
    elif collate is collate_padded:
        m = max(counts)
        assert batch["boxes"].shape == (len(samples), m, 4)
        assert (batch["mask"].dtype, batch["mask"].shape) == (torch.bool, (len(samples), m))
        assert (batch["boxes"].dtype, batch["labels"].dtype, batch["difficult"].dtype) == (torch.float32, torch.int64, torch.uint8)
        for i, (n, s) in enumerate(zip(counts, samples, strict=True)):
            assert batch["mask"][i].tolist() == [True] * n + [False] * (m - n)
            for name, fill in (("boxes", 0), ("labels", -1), ("difficult", 0)):
                assert torch.equal(batch[name][i, :n], s[name])
                assert (batch[name][i, n:] == fill).all()
    else:
        assert (batch["boxes"].dtype, batch["boxes"].shape) == (torch.float32, (sum(counts), 5))
        assert batch["boxes"][:, 0].tolist() == [i for i, n in enumerate(counts) for _ in range(n)]
        assert torch.equal(batch["boxes"][:, 1:], torch.cat([s["boxes"] for s in samples]))
        for name in ("labels", "difficult"):
            assert torch.equal(batch[name], torch.cat([s[name] for s in samples]))


@pytest.mark.parametrize("collate", COLLATES)
@settings(deadline=None, max_examples=50)
@given(counts=st.lists(st.integers(0, 6), min_size=1, max_size=9), seed=st.integers(0, 99))
def test_both_forms(collate: Collate, counts: list[int], seed: int) -> None:
    samples = make(counts, seed)
    batch = collate(samples)
    check_boxes(collate, batch, samples)
    assert batch["image"].shape == (len(counts), 3, 4, 5)
    assert batch["image"].is_contiguous(memory_format=torch.channels_last)
    assert all(torch.equal(image, s["image"]) for image, s in zip(batch["image"], samples, strict=True))
    assert (batch["key"].dtype, batch["key"].tolist()) == (torch.int64, [s["key"] for s in samples])
    assert (batch["index"].dtype, batch["index"].tolist()) == (torch.int64, list(range(len(counts))))
    check_boxes(collate, collate.ragged(*csr(samples)), samples)
    check_boxes(collate, collate.ragged(*map(torch.from_numpy, csr(samples))), samples)


@pytest.mark.parametrize("collate", COLLATES)
def test_classification_and_other_fields(collate: Collate) -> None:
    samples = [
        {
            **{k: s[k] for k in ("image", "key")},
            "label": i,
            "area": 0.5 * i,
            "hit": i == 1,
            "name": "ab"[i],
            "v": torch.ones(2),
            "w": torch.ones(i),
        }
        for i, s in enumerate(make([0, 0]))
    ]
    batch = collate(samples)
    assert "boxes" not in batch
    assert (batch["label"].dtype, batch["label"].tolist()) == (torch.int64, [0, 1])
    assert (batch["area"].dtype, batch["area"].tolist()) == (torch.float64, [0.0, 0.5])
    assert (batch["hit"].dtype, batch["hit"].tolist()) == (torch.bool, [False, True])
    assert batch["name"] == ["a", "b"]
    assert batch["v"].shape == (2, 2)
    assert [len(w) for w in batch["w"]] == [0, 1]


def test_text_keys_stay_a_list() -> None:
    assert collate_list([{"key": "a/1"}, {"key": "a/2"}]) == {"key": ["a/1", "a/2"]}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_float_images(dtype: torch.dtype) -> None:
    samples = [{"image": s["image"].to(dtype)} for s in make([0, 0, 0])]
    batch = collate_list(samples)
    assert batch["image"].dtype == dtype
    assert torch.equal(batch["image"], torch.stack([s["image"] for s in samples]))


def test_a_batch_shares_no_memory_with_its_samples() -> None:
    samples = make([2, 1])
    batch = collate_padded(samples)
    batch["image"].zero_()
    batch["boxes"].zero_()
    assert samples[0]["image"].any()
    assert samples[0]["boxes"].any()


def test_boxes_of_a_transform_get_the_promised_dtypes() -> None:
    samples = make([2, 0])
    for s in samples:
        s["boxes"], s["labels"] = s["boxes"].double(), s["labels"].int()
    batch = collate_indexed(samples)
    assert (batch["boxes"].dtype, batch["labels"].dtype) == (torch.float32, torch.int64)
    samples[1]["boxes"] = torch.zeros(0)  # np.array([]) where a transform dropped every box
    assert collate_list(samples)["boxes"][1].shape == (0, 4)


def test_unequal_images_name_keys_sizes_and_the_way_out() -> None:
    samples = make([1, 1, 1])
    samples[2]["image"] = torch.zeros(3, 7, 8, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"key 100 is torch.uint8 \(3, 4, 5\), key 102 is torch.uint8 \(3, 7, 8\).*--resize"):
        collate_list(samples)


def test_fields_that_do_not_fit_say_which() -> None:
    samples = make([2, 1])
    del samples[1]["difficult"]
    samples[1]["extra"] = 1
    with pytest.raises(ValueError, match=r"only key 100 has \['difficult'\], only key 101 has \['extra'\]"):
        collate_list(samples)
    samples = make([2, 1])
    samples[1]["labels"] = samples[1]["labels"][:0]
    with pytest.raises(ValueError, match="key 101 has 1 boxes, 0 labels and 1 difficult"):
        collate_padded(samples)
    with pytest.raises(ValueError, match="need labels and difficult"):
        collate_padded([{"boxes": torch.zeros(1, 4)}])
    with pytest.raises(ValueError, match="at least one sample"):
        collate_list([])


@pytest.mark.parametrize("collate", COLLATES)
def test_pickles_and_works_in_a_worker(collate: Collate) -> None:
    assert type(pickle.loads(pickle.dumps(collate))) is type(collate)
    samples = make([2, 0, 3, 1])
    loader = DataLoader(samples, batch_size=4, collate_fn=collate, num_workers=1, multiprocessing_context="fork")  # type: ignore[arg-type]
    (batch,) = list(loader)
    check_boxes(collate, batch, samples)
    assert batch["image"].is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(batch["image"], torch.stack([s["image"] for s in samples]))
