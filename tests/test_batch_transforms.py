"""Changes of whole batches: right values, the same for any way of cutting an epoch into batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from loaders.batch_transforms import Flip, MixUp, Normalize, Sequence, Shift, _Random, beta_quantiles
from loaders.sampling import _mix, hash_key

N = 64


def batch(seed: int = 0, n: int = N) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    image = torch.randint(0, 256, (n, 6, 5, 3), generator=generator, dtype=torch.uint8).permute(0, 3, 1, 2)
    return {"image": image, "label": torch.randint(0, 4, (n,), generator=generator), "index": torch.arange(n) * 7}


def part(whole: dict[str, Any], chosen: list[int]) -> dict[str, Any]:
    return {name: value[chosen] for name, value in whole.items()}


def test_normalize() -> None:
    mean, std = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)
    given = batch()
    expected = (given["image"].double() / 255 - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    for dtype, close in ((torch.float32, 1e-5), (torch.float16, 2e-3), (torch.bfloat16, 2e-2)):
        image = Normalize(mean, std, dtype)(given)["image"]
        assert image.dtype == dtype
        assert image.is_contiguous(memory_format=torch.channels_last)
        assert (image.double() - expected).abs().max() < close
    with pytest.raises(ValueError, match="std above 0"):
        Normalize(mean, (1, 0, 1))


def test_uniform_is_the_order_hash() -> None:
    """Against integers of any size, as `loaders.sampling` computes them."""
    random = _Random(5, 1)
    random.set_epoch(3)
    index = torch.tensor([0, 1, 2, 1_000_003, 2**40])
    key = hash_key(hash_key(5, 1, 3), 2)
    expected = [(_mix((int(i) + key) * 0x9E3779B97F4A7C15 % 2**64) >> 40) / 2**24 for i in index]
    assert random.uniform(index, 2).tolist() == expected


def test_uniform_is_uniform_and_draws_are_independent() -> None:
    random = _Random(0, 1)
    index = torch.arange(100_000)
    first, second = random.uniform(index, 0), random.uniform(index, 1)
    counts = torch.histc(first, 20, 0, 1)
    assert float(((counts - 5000) ** 2 / 5000).sum()) < 50  # chi-square with 19 degrees of freedom
    assert abs(float(torch.corrcoef(torch.stack([first, second]))[0, 1])) < 0.02
    assert abs(float(torch.corrcoef(torch.stack([first[1:], first[:-1]]))[0, 1])) < 0.02


@pytest.mark.parametrize("transform", [Flip(seed=1), Shift(2, seed=1)])
def test_random_changes_do_not_depend_on_the_batch(transform: Any) -> None:
    given = batch()
    transform.set_epoch(4)
    whole = transform(given)["image"]
    for chosen in ([3], [9, 1, 40], list(range(32, 64))):
        assert torch.equal(transform(part(given, chosen))["image"], whole[chosen])
    transform.set_epoch(5)
    assert not torch.equal(transform(given)["image"], whole)


def test_flip_mirrors_some() -> None:
    given = batch(n=1000)
    image = Flip()(given)["image"]
    mirrored = (image == given["image"].flip(3)).flatten(1).all(1)
    kept = (image == given["image"]).flatten(1).all(1)
    assert bool((mirrored | kept).all())
    assert 420 < int(mirrored.sum()) < 580
    assert torch.equal(Flip(p=0.0)(given)["image"], given["image"])
    assert torch.equal(Flip(p=1.0)(given)["image"], given["image"].flip(3))


def test_shift_moves_every_way_and_repeats_the_border() -> None:
    given = batch(n=2000)
    image = Shift(2)(given)["image"]
    padded = torch.nn.functional.pad(given["image"].float(), (2, 2, 2, 2), mode="replicate").to(torch.uint8)
    found = torch.zeros(len(image), 5, 5, dtype=torch.bool)
    for y in range(5):
        for x in range(5):
            found[:, y, x] = (image == padded[:, :, y : y + 6, x : x + 5]).flatten(1).all(1)
    assert bool(found.flatten(1).any(1).all())
    counts = found.sum(0).flatten()
    assert int(counts.min()) > 40  # 80 expected of each of the 25
    assert torch.equal(Shift(0)(given)["image"], given["image"])
    with pytest.raises(ValueError, match="pixels is -1"):
        Shift(-1)


@pytest.mark.parametrize("alpha", [0.1, 0.2, 0.5, 1.0, 2.0, 8.0])
def test_beta_quantiles(alpha: float) -> None:
    quantiles = beta_quantiles(alpha, 4096)
    assert bool((np.diff(quantiles) >= 0).all())
    assert quantiles.mean() == pytest.approx(0.5, abs=1e-9)
    assert quantiles.var() == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=2e-3)  # of Beta(alpha, alpha)
    fourth = 3 / (16 * (2 * alpha + 1) * (2 * alpha + 3))
    assert ((quantiles - 0.5) ** 4).mean() == pytest.approx(fourth, rel=4e-3)


def test_mixup_mixes_images_and_labels_alike() -> None:
    given = batch()
    mixed = MixUp(0.4, 4)(given)
    assert mixed["label"].shape == (N, 4)
    assert torch.allclose(mixed["label"].sum(1), torch.ones(N))
    own, other = given["image"].double(), given["image"].flip(0).double()
    for row in range(N):
        a, b = int(given["label"][row]), int(given["label"].flip(0)[row])
        if a != b:
            weight = float(mixed["label"][row, a])
            assert torch.allclose(mixed["image"][row].double(), weight * own[row] + (1 - weight) * other[row], atol=1e-3)


def test_sequence_and_boxes() -> None:
    given = batch()
    chain = Sequence(Flip(seed=2), Normalize((0, 0, 0), (1, 1, 1)))
    chain.set_epoch(7)
    alone = Flip(seed=2)
    alone.set_epoch(7)
    assert torch.allclose(chain(given)["image"], alone(given)["image"] / 255)
    for transform in (Flip(), Shift(1), MixUp(1, 4)):
        with pytest.raises(ValueError, match=r"has boxes: use a transform of loaders\.augment"):
            transform({**given, "boxes": []})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_the_same_on_cuda() -> None:
    given = batch()
    moved = {name: value.cuda() for name, value in given.items()}
    for transform in (Flip(), Shift(2), Normalize((0.1, 0.2, 0.3), (1, 2, 3))):
        assert torch.allclose(transform(moved)["image"].cpu().float(), transform(given)["image"].float(), atol=1e-6)
