"""A shuffle buffer: what a stream is mixed by. Its draws are pure arithmetic, so that any position can be reached again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from loaders.sampling import hash_key, hashes

MAX_BUFFER_BYTES = 1 << 28


@dataclass(slots=True)
class Item:
    """A sample to come: its index, the bytes that it takes encoded, and how to get them (`data`, once they are there)."""

    index: int
    num_bytes: int
    load: Callable[[], Any]
    valid: bool = True
    data: Any = None


def buffered(items: Iterable[Item], size: int, key: int, skip: int = 0) -> Iterator[Item]:
    """Pass items through a buffer, giving a random one, loaded, for each that comes in.

    Args:
        items: in stored order. Loaded when they enter the buffer, so that reads are sequential.
        size: items in the buffer, and `MAX_BUFFER_BYTES` at most; below 2 nothing is shuffled.
        key: of the draws.
        skip: leave out that many. Which they were is worked out from the numbers alone; only items that are in the buffer then are loaded.
    """
    for given, item in enumerate(_mixed(items, size, key, skip)):
        if given >= skip:
            if item.data is None:
                item.data = item.load()
            yield item


def _mixed(items: Iterable[Item], size: int, key: int, skip: int) -> Iterator[Item]:
    if size < 2:
        yield from items
        return
    buffer: list[Item] = []
    held, given, draws = 0, 0, _draws(key)
    for item in items:
        if given >= skip:
            item.data = item.load()
        buffer.append(item)
        held += item.num_bytes
        while len(buffer) > size or (held > MAX_BUFFER_BYTES and len(buffer) > 1):
            chosen = _take(buffer, next(draws))
            held -= chosen.num_bytes
            given += 1
            yield chosen
    while buffer:
        yield _take(buffer, next(draws))


def _take(buffer: list[Item], draw: int) -> Item:
    place = draw % len(buffer)
    buffer[place], buffer[-1] = buffer[-1], buffer[place]
    return buffer.pop()


def _draws(key: int) -> Iterator[int]:
    """Endless 64-bit numbers, the same on every platform."""
    chunk = 0
    while True:
        yield from hashes(1024, hash_key(key, chunk)).tolist()
        chunk += 1
