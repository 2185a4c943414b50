"""Random numbers that depend on a key only: not on threads, ranks, workers, or on what was drawn before."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

_MASK = (1 << 64) - 1


def rekey(bits: np.random.Philox, seed: int, epoch: int, index: int) -> None:
    """Put a Philox-4x64 generator at the start of the stream of (seed, epoch, index).

    Layout: key words (seed, epoch), counter words (0, 0, 0, index), each modulo 2**64. The counter runs from its first word, so streams
    never meet.
    """
    state = _fresh.state
    words = state["state"]
    words["counter"][3] = index & _MASK
    words["key"][:] = seed & _MASK, epoch & _MASK
    bits.state = state  # type: ignore[assignment]  # its own stub takes a TypedDict; copied


class _State(threading.local):
    """Each thread's state of a generator that has drawn nothing: making a new one takes longer than a draw."""

    def __init__(self) -> None:
        # Lists: the generator reads them in half the time of arrays.
        self.state: dict[str, Any] = {
            "bit_generator": "Philox",
            "state": {"counter": [0, 0, 0, 0], "key": [0, 0]},
            "buffer": [0, 0, 0, 0],
            "buffer_pos": 4,
            "has_uint32": 0,
            "uinteger": 0,
        }


_fresh = _State()


class KeyedRandom:
    """Lends a thread's `numpy.random.Generator`s, re-keyed for each use: making a new one costs several times as much."""

    def __init__(self) -> None:
        self._local = threading.local()

    def __reduce__(self) -> tuple[type[KeyedRandom], tuple[()]]:
        return KeyedRandom, ()  # nothing but scratch memory: a copy in another process starts anew

    def take(self, seed: int, epoch: int, index: int) -> np.random.Generator:
        """A generator at the start of the stream of (seed, epoch, index), the caller's alone until it is given back."""
        # Taken out while in use: several are under way at a time, and a transform that loads other samples (mosaic, mixup) gets here too.
        idle: list[np.random.Generator] = self._local.__dict__.setdefault("idle", [])
        generator = idle.pop() if idle else np.random.Generator(np.random.Philox(key=0))
        bits = generator.bit_generator
        assert isinstance(bits, np.random.Philox)
        rekey(bits, seed, epoch, index)
        return generator

    def give_back(self, generators: Iterable[np.random.Generator]) -> None:
        self._local.__dict__.setdefault("idle", []).extend(generators)

    @contextmanager
    def generator(self, seed: int, epoch: int, index: int) -> Iterator[np.random.Generator]:
        """`take`, and give back when the block ends."""
        generator = self.take(seed, epoch, index)
        try:
            yield generator
        finally:
            self.give_back([generator])
