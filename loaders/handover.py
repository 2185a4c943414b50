"""Batches from process to process: pickled, but for tensors in memory that both have mapped. Those are named by their place."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from loaders.assemble import Batch
from loaders.slots import Fields, Slot

_LARGE = 1 << 16
"""Bytes from which on a tensor outside a slot is copied into one, instead of going through the pipe."""
_ALIGN = 64
_BYTE = np.dtype(np.uint8)


class _Place(NamedTuple):
    """Bytes `start` to `stop` of the array `name` in a slot; `stride`: that a tensor has over them."""

    slot: int
    name: str
    start: int
    stop: int
    stride: tuple[int, ...]


class _Reference(NamedTuple):
    """A tensor in a slot. `serial`: equal for the same object."""

    serial: int
    place: _Place
    dtype: torch.dtype
    size: tuple[int, ...]


def pickled(batches: list[Batch], slots: list[Slot], take: Callable[[Fields, int], Slot | None]) -> bytes:
    """The batches. `slots`: where their tensors may lie. `take`: gives one more, for large tensors that lie elsewhere, or None."""
    file = io.BytesIO()
    _Pickler(file, slots, _copied(batches, slots, take)).dump(batches)
    return file.getvalue()


def unpickled(data: bytes, slots: Mapping[int, Slot]) -> list[Batch]:
    """The batches; `slots`, by number, those of the other side."""
    batches: list[Batch] = _Unpickler(io.BytesIO(data), slots).load()
    return batches


def _is_plain(value: object) -> bool:
    """A tensor that is memory, dtype, size and strides, and nothing else."""
    return (
        type(value) is torch.Tensor
        and value.device.type == "cpu"
        and value.layout == torch.strided
        and not (value.requires_grad or value.is_quantized or value.is_conj() or value.is_neg())
    )


def _place(tensor: torch.Tensor, slots: list[Slot]) -> _Place | None:
    """Where a tensor lies in a slot, if it does."""
    if not tensor.numel():
        return None
    stride = tuple(tensor.stride())
    num_bytes = (sum((n - 1) * step for n, step in zip(tensor.shape, stride, strict=True)) + 1) * tensor.itemsize
    for slot in slots:
        for name, array in slot.arrays.items():
            start = tensor.data_ptr() - array.__array_interface__["data"][0]
            if 0 <= start <= start + num_bytes <= array.nbytes:
                return _Place(slot.number, name, start, start + num_bytes, stride)
    return None


def _copied(batches: list[Batch], slots: list[Slot], take: Callable[[Fields, int], Slot | None]) -> dict[int, _Place]:
    """Copies large tensors outside slots into one more; their places by `id`."""
    large = {id(t): t for t in _tensors(batches) if t.nbytes >= _LARGE and _place(t, slots) is None}
    if not large:
        return {}
    dense = {number: _dense(tensor) for number, tensor in large.items()}
    size = sum(-(-flat.nbytes // _ALIGN) * _ALIGN for flat, _ in dense.values())
    slot = take({"bytes": ((), _BYTE)}, _rounded(size))
    if slot is None:
        return {}
    memory, start = torch.from_numpy(slot.arrays["bytes"]), 0
    copied: dict[int, _Place] = {}
    for number, (flat, stride) in dense.items():
        stop = start + flat.nbytes
        memory[start:stop].view(flat.dtype).copy_(flat)
        copied[number] = _Place(slot.number, "bytes", start, stop, stride)
        start = -(-stop // _ALIGN) * _ALIGN
    return copied


def _tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if _is_plain(value):
            yield value
    elif isinstance(value, (list, tuple, dict)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _tensors(each)


def _dense(tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Its values in one dimension without repeats, in the order of its strides, and the strides that `tensor` has over them: channels_last
    stays so, and what `expand` made stays small."""
    repeats = [step == 0 and size > 1 for size, step in zip(tensor.shape, tensor.stride(), strict=True)]
    once = tensor[tuple(slice(0, 1) if repeated else slice(None) for repeated in repeats)]
    order = sorted(range(once.ndim), key=once.stride, reverse=True)
    if not once.permute(order).is_contiguous():
        once, order = once.contiguous(), list(range(once.ndim))
    stride = tuple(0 if repeated else step for repeated, step in zip(repeats, once.stride(), strict=True))
    return once.permute(order).reshape(-1), stride


def _rounded(num_bytes: int) -> int:
    """Up to an eighth more, so that what changes its size a little finds a slot that was used before."""
    step = 1 << max(num_bytes.bit_length() - 4, 0)
    return -(-num_bytes // step) * step


def _of_bytes(values: NDArray[np.uint8], dtype: torch.dtype, size: tuple[int, ...]) -> torch.Tensor:
    return torch.from_numpy(values).view(dtype).reshape(size)


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, slots: list[Slot], copied: dict[int, _Place]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._slots, self._copied = slots, copied
        self._serials: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> _Reference | None:
        if not _is_plain(obj):
            return None
        place = self._copied.get(id(obj)) or _place(obj, self._slots)
        if place is None:
            return None
        return _Reference(self._serials.setdefault(id(obj), len(self._serials)), place, obj.dtype, tuple(obj.shape))

    def reducer_override(self, obj: Any) -> Any:
        if not _is_plain(obj):
            return NotImplemented
        # A tenth of the time that torch's own way takes.
        with suppress(TypeError):
            return torch.from_numpy, (obj.numpy(),)
        return _of_bytes, (obj.reshape(-1).contiguous().view(torch.uint8).numpy(), obj.dtype, tuple(obj.shape))  # bfloat16 and its like


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, slots: Mapping[int, Slot]) -> None:
        super().__init__(file)
        self._slots = slots
        self._made: dict[int, torch.Tensor] = {}

    def persistent_load(self, pid: _Reference) -> torch.Tensor:
        if pid.serial not in self._made:
            # A view of the slot's array, which counts as its user; cut before it is a tensor, so that its storage is no more than its part.
            place = pid.place
            cut = self._slots[place.slot].bytes(place.name)[place.start : place.stop]
            self._made[pid.serial] = torch.from_numpy(cut).view(pid.dtype).as_strided(pid.size, place.stride)
        return self._made[pid.serial]
