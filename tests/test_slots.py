from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loaders.slots import Fields, Slots

FIELDS: Fields = {"image": ((2, 3, 3), np.dtype(np.uint8)), "key": ((), np.dtype(np.int64))}


def filled(slots: Slots, value: int, fields: Fields = FIELDS) -> dict[str, torch.Tensor]:
    slot = slots.take(fields, 4)
    for array in slot.arrays.values():
        array[:] = value
    [batch] = slots.lend(slot)
    return batch


def address(tensors: dict[str, torch.Tensor]) -> int:
    return tensors["image"].data_ptr()


def test_a_slot_is_used_again_when_its_tensors_are_gone() -> None:
    slots = Slots(4, pinned=False)
    batch = filled(slots, 1)
    assert batch["image"].shape == (4, 2, 3, 3)
    assert batch["key"].dtype == torch.int64
    first = address(batch)
    del batch
    assert address(filled(slots, 2)) == first


@pytest.mark.parametrize(
    "keep",
    [
        lambda batch: batch["key"],
        lambda batch: batch["image"].permute(0, 3, 1, 2)[1:2],
        lambda batch: batch["image"].numpy()[0],
        lambda batch: batch["image"].untyped_storage(),
        lambda batch: torch.utils.dlpack.from_dlpack(batch["image"]),
        lambda batch: memoryview(batch["image"].numpy()),
        lambda batch: batch["image"].view(torch.int8),
        lambda batch: batch["image"].detach().split(2)[1],
    ],
)
def test_a_slot_is_not_used_again_while_any_view_lives(keep: object) -> None:
    slots = Slots(4, pinned=False)
    batch = filled(slots, 1)
    first, held = address(batch), keep(batch)  # type: ignore[operator]  # one of the lambdas above
    del batch
    assert address(filled(slots, 2)) != first
    del held
    both = filled(slots, 3), filled(slots, 4)
    assert first in map(address, both)


@settings(deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 20)), max_size=60), st.integers(1, 5))
def test_held_batches_keep_their_content(steps: list[tuple[bool, int]], keep: int) -> None:
    slots = Slots(keep, pinned=False)
    held: list[tuple[int, dict[str, torch.Tensor]]] = []
    for value, (release, which) in enumerate(steps):
        if release and held:
            del held[which % len(held)]
        held.append((value, filled(slots, value)))
        for expected, batch in held:
            assert (batch["image"] == expected).all()
            assert (batch["key"] == expected).all()
    assert len(slots._ring) <= keep


def test_a_slot_of_another_shape_is_not_taken() -> None:
    slots = Slots(4, pinned=False)
    first = address(filled(slots, 1))
    larger: Fields = {"image": ((5, 3, 3), np.dtype(np.uint8))}
    assert filled(slots, 2, larger)["image"].shape == (4, 5, 3, 3)
    assert slots.take(FIELDS, 3).arrays["key"].shape == (3,)
    assert address(filled(slots, 3)) == first


def test_a_taken_slot_belongs_to_one_only() -> None:
    slots = Slots(4, pinned=False)
    filled(slots, 1)
    one, other = slots.take(FIELDS, 4), slots.take(FIELDS, 4)
    assert one is not other
    assert not np.shares_memory(one.arrays["image"], other.arrays["image"])


def test_clear_forgets_slots_but_not_what_is_held() -> None:
    slots = Slots(4, pinned=False)
    batch = filled(slots, 7)
    slots.clear()
    assert (batch["image"] == 7).all()
    assert address(filled(slots, 8)) != address(batch)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="page-locked memory needs CUDA")
def test_pinned_slots() -> None:
    slots = Slots(4, pinned=True)
    batches = [filled(slots, value) for value in range(6)]
    for value, batch in enumerate(batches):
        assert batch["image"].is_pinned()
        assert (batch["image"] == value).all()
