"""A structure-aware mutator for `fuzz.py` that needs nothing installed: the same seed gives the same inputs."""

from __future__ import annotations

import random
import re
import struct
from collections.abc import Callable, Sequence

MAX_BYTES = 1 << 16
_NUMBER = re.compile(rb"-?\d+(?:\.\d+)?")
_EXTREME_INTS = (0, 1, 2, 3, 127, 128, 255, 256, 32767, 32768, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1)
_EXTREME_TEXTS = (
    *(b"0", b"-0", b"-1", b"1e308", b"1e999", b"-1e999", b"nan", b"NaN", b"inf", b"Infinity", b"null", b"true", b"0x10", b"1_0"),
    *(b"9" * 20, b"9" * 400, b"9" * 5000, b"0." + b"1" * 400, b"-9223372036854775809", b"18446744073709551616", "\u0663".encode(), b"1,5"),
)


class Mutator:
    """Makes inputs out of `corpus`, which it may be given more of.

    `tokens`: pieces that mean something in the format. `repair`: makes checksums and the like right again; used for half of the inputs,
    so that the code behind the checksum is reached, too.
    """

    def __init__(self, seed: str, corpus: Sequence[bytes], tokens: Sequence[bytes], repair: Callable[[bytes], bytes]) -> None:
        self._random = random.Random(seed)
        self.corpus = list(corpus)
        self._tokens = tokens
        self._repair = repair
        self._changes = (
            *(self._flip, self._flip, self._set, self._binary, self._binary, self._number, self._number),
            *(self._delete, self._copy, self._repeat, self._truncate, self._splice, self._token, self._token),
        )

    def next(self) -> bytes:
        """Another input of at most `MAX_BYTES`."""
        r = self._random
        data = r.choice(self.corpus)
        for _ in range(min(8, 1 + int(r.expovariate(0.7)))):
            data = r.choice(self._changes)(data)[:MAX_BYTES]
        return self._repair(data) if r.random() < 0.5 else data

    def _span(self, data: bytes, longest: int = 64) -> tuple[int, int]:
        """A short stretch; now and then any."""
        start = self._random.randint(0, len(data))
        limit = len(data) - start if self._random.random() < 0.1 else min(longest, len(data) - start)
        return start, start + self._random.randint(0, limit)

    def _flip(self, data: bytes) -> bytes:
        return self._put(data, lambda old: old ^ (1 << self._random.randrange(8)))

    def _set(self, data: bytes) -> bytes:
        return self._put(data, lambda _: self._random.choice((0, 0xFF, 0x7F, 0x80, 0x20, 0x0A, self._random.randrange(256))))

    def _put(self, data: bytes, value: Callable[[int], int]) -> bytes:
        if not data:
            return b"\0"
        at = self._random.randrange(len(data))
        return data[:at] + bytes([value(data[at])]) + data[at + 1 :]

    def _binary(self, data: bytes) -> bytes:
        """A binary integer of 2, 4 or 8 bytes becomes an extreme one, or one nearby."""
        code = self._random.choice("HIQ")
        order, size = self._random.choice("<>"), struct.calcsize("<" + code)
        if len(data) < size:
            return data
        at = self._random.randint(0, len(data) - size)
        if self._random.random() < 0.5:
            value = self._random.choice(_EXTREME_INTS)
        else:
            value = struct.unpack_from(order + code, data, at)[0] + self._random.randint(-3, 3)
        return data[:at] + struct.pack(order + code, value % (1 << (8 * size))) + data[at + size :]

    def _number(self, data: bytes) -> bytes:
        """A number written in digits becomes an extreme one."""
        found = [m.span() for m in _NUMBER.finditer(data)]
        if not found:
            return data
        start, end = self._random.choice(found)
        extreme = self._random.choice((*_EXTREME_TEXTS, *(str(v).encode() for v in _EXTREME_INTS)))
        return data[:start] + extreme + data[end:]

    def _delete(self, data: bytes) -> bytes:
        start, end = self._span(data)
        return data[:start] + data[end:]

    def _copy(self, data: bytes) -> bytes:
        start, end = self._span(data)
        at = self._random.randint(0, len(data))
        return data[:at] + data[start:end] + data[at:]

    def _repeat(self, data: bytes) -> bytes:
        start, end = self._span(data)
        return data[:end] + data[start:end] * self._random.choice((2, 10, 100, 3000)) + data[end:]

    def _truncate(self, data: bytes) -> bytes:
        return data[: self._random.randint(0, len(data))]

    def _splice(self, data: bytes) -> bytes:
        other = self._random.choice(self.corpus)
        return data[: self._random.randint(0, len(data))] + other[self._random.randint(0, len(other)) :]

    def _token(self, data: bytes) -> bytes:
        if not self._tokens:
            return data
        start, end = self._span(data, 16)
        return data[:start] + self._random.choice(self._tokens) + data[end if self._random.random() < 0.5 else start :]
