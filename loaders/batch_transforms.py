"""Random and fixed changes of whole batches, on the device where the batch is: for `batch_transform` of `BatchLoader` and `DeviceDataset`.

    DeviceDataset(ds, "cuda", 512, batch_transform=Sequence(Flip(), Shift(4), Normalize(MEAN, STD, torch.float16)))

Each takes a batch (a dict with `image` [B, 3, H, W] and `index` int64 [B]) and returns it, changed. What is drawn for a sample depends on
(seed, epoch, index) alone, by integer hashes: the same on every device, for any batch size and number of ranks, and after a resume. Only
`MixUp` also depends on the batch: it mixes with another sample of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from loaders.sampling import hash_key

Batch = dict[str, Any]
BatchTransform = Callable[[Batch], Batch]

_QUANTILES = 4096


def begin_epoch(transform: BatchTransform | None, epoch: int) -> None:
    """Tell a transform that has `set_epoch` which epoch begins."""
    set_epoch = getattr(transform, "set_epoch", None)
    if set_epoch is not None:
        set_epoch(epoch)


class Sequence:
    """One transform after the other."""

    def __init__(self, *transforms: BatchTransform) -> None:
        self.transforms = transforms

    def __call__(self, batch: Batch) -> Batch:
        for transform in self.transforms:
            batch = transform(batch)
        return batch

    def set_epoch(self, epoch: int) -> None:
        for transform in self.transforms:
            begin_epoch(transform, epoch)


class Normalize:
    """``(image / 255 - mean) / std`` per channel, as `dtype`; half precision is half the bytes for what follows.

    Args:
        mean, std: three numbers each, for pixels from 0 to 1.
        dtype: torch.float32, float16 or bfloat16.
    """

    def __init__(self, mean: tuple[float, float, float], std: tuple[float, float, float], dtype: torch.dtype = torch.float32) -> None:
        if len(mean) != 3 or len(std) != 3 or min(std) <= 0:
            raise ValueError(f"mean is {mean}, std {std}: expected three numbers each, std above 0")
        self.scale = torch.tensor([1 / (255 * s) for s in std]).view(1, 3, 1, 1)
        self.offset = torch.tensor([-m / s for m, s in zip(mean, std, strict=True)]).view(1, 3, 1, 1)
        self.dtype = dtype

    def __call__(self, batch: Batch) -> Batch:
        image = batch["image"]
        # Multiplied in float32: a half has 11 bits, and the offset is added to products of up to 255 of them.
        scale, offset = self.scale.to(image.device, non_blocking=True), self.offset.to(image.device, non_blocking=True)
        return {**batch, "image": torch.addcmul(offset, image, scale).to(self.dtype)}


class _Random:
    def __init__(self, seed: int, label: int) -> None:
        self._seed, self._label = seed, label
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        self._key = hash_key(self._seed, self._label, epoch)

    def uniform(self, index: torch.Tensor, draw: int = 0) -> torch.Tensor:
        """A number from 0 to 1, 1 excluded, per sample: float32 [B] on the device of `index`."""
        # SplitMix64's output function, see loaders.sampling; torch has no unsigned integers to shift, hence the masks.
        z = index + _signed(hash_key(self._key, draw))
        z = z * _signed(0x9E3779B97F4A7C15)
        z = (z ^ _shifted(z, 30)) * _signed(0xBF58476D1CE4E5B9)
        z = (z ^ _shifted(z, 27)) * _signed(0x94D049BB133111EB)
        return _shifted(z ^ _shifted(z, 31), 40).to(torch.float32) / 2**24


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def _shifted(z: torch.Tensor, bits: int) -> torch.Tensor:
    return (z >> bits) & ((1 << (64 - bits)) - 1)


class Flip(_Random):
    """Mirrors left and right with probability `p`. For classification: boxes are not moved."""

    def __init__(self, p: float = 0.5, seed: int = 0) -> None:
        super().__init__(seed, 1)
        self.p = p

    def __call__(self, batch: Batch) -> Batch:
        _no_boxes(batch, self)
        image = batch["image"]
        chosen = self.uniform(batch["index"]) < self.p
        return {**batch, "image": torch.where(chosen.view(-1, 1, 1, 1), image.flip(3), image)}


class Shift(_Random):
    """Moves each image by up to `pixels` up or down and left or right; the border is repeated. For classification.

    What is usually written as padding and a random crop, by one gather for the whole batch.
    """

    def __init__(self, pixels: int, seed: int = 0) -> None:
        super().__init__(seed, 2)
        if pixels < 0:
            raise ValueError(f"pixels is {pixels}, expected 0 or more")
        self.pixels = pixels

    def __call__(self, batch: Batch) -> Batch:
        _no_boxes(batch, self)
        image, index = batch["image"], batch["index"]
        places = []
        for draw, size in enumerate(image.shape[2:]):
            moved = (self.uniform(index, draw) * (2 * self.pixels + 1)).to(torch.int64) - self.pixels
            places.append((torch.arange(size, device=image.device) + moved[:, None]).clamp_(0, size - 1))
        count, channels, height, width = image.shape
        rows = torch.arange(count, device=image.device)[:, None] * height + places[0]
        pixels = (rows[:, :, None] * width + places[1][:, None, :]).view(-1)
        # Whole pixels by number: a quarter of the time that an index for each axis takes on a CPU.
        moved = image.permute(0, 2, 3, 1).reshape(-1, channels).index_select(0, pixels)
        return {**batch, "image": moved.view(count, height, width, channels).permute(0, 3, 1, 2)}


class MixUp(_Random):
    """Mixes each sample with the one at the other end of its batch, as in Zhang et al. 2018 (arXiv:1710.09412), by a weight of its own.

    `image` becomes floating point (float32 where it was uint8) and `label` float32 [B, num_classes], which torch's cross_entropy takes.

    Args:
        alpha: of Beta(alpha, alpha); above 0.
        num_classes: columns of `label`.
    """

    def __init__(self, alpha: float, num_classes: int, seed: int = 0) -> None:
        super().__init__(seed, 3)
        if alpha <= 0 or num_classes < 1:
            raise ValueError(f"alpha is {alpha}, num_classes {num_classes}: expected above 0, and 1 or more")
        self.num_classes = num_classes
        self._quantiles = torch.from_numpy(beta_quantiles(alpha, _QUANTILES)).float()

    def __call__(self, batch: Batch) -> Batch:
        _no_boxes(batch, self)
        image, label = batch["image"], batch["label"]
        place = (self.uniform(batch["index"]) * _QUANTILES).to(torch.int64)
        weight = self._quantiles.to(image.device, non_blocking=True)[place]
        image = image if image.is_floating_point() else image.float()
        hot = torch.nn.functional.one_hot(label, self.num_classes).float()
        return {
            **batch,
            "image": image.flip(0).lerp(image, weight.to(image.dtype).view(-1, 1, 1, 1)),
            "label": hot.flip(0).lerp(hot, weight.view(-1, 1)),
        }


def beta_quantiles(alpha: float, n: int) -> NDArray[np.float64]:
    """Quantiles of Beta(alpha, alpha) in the middles of n equal parts of 0..1: float64 [n], ascending.

    On 0..1/2 with x = t**p / 2 the density in t is proportional to t**(max(alpha, 1) - 1) * (1 - x)**(alpha - 1): with p = 1 / alpha
    where alpha is below 1, else 1, it has no pole. The rest is the mirror image.
    """
    power = 1 / min(alpha, 1)
    t = np.linspace(0, 1, 20_001)
    density = t ** (max(alpha, 1) - 1) * (1 - t**power / 2) ** (alpha - 1)
    share = np.concatenate([[0], np.cumsum((density[1:] + density[:-1]) / 2)])
    wanted = (np.arange(n) + 0.5) / n
    low = np.interp(2 * np.minimum(wanted, 1 - wanted), share / share[-1], t) ** power / 2
    quantiles: NDArray[np.float64] = np.where(wanted <= 0.5, low, 1 - low)
    return quantiles


def _no_boxes(batch: Batch, transform: object) -> None:
    if "boxes" in batch:
        raise ValueError(f"{type(transform).__name__} changes images only, and this batch has boxes: use a transform of loaders.augment")
