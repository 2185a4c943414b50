"""What a fuzz target is, and what counts as a failure."""

from __future__ import annotations

import resource
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

MAX_SECONDS = 10.0
"""Processor time of one input."""
MAX_GROWTH_BYTES = 1 << 30
"""By how much one input may raise the peak of the process's memory."""


class Failure(Exception):
    """An input did what none may do; the message says what."""


def _as_is(data: bytes) -> bytes:
    return data


@dataclass(frozen=True)
class Target:
    """One reader of hostile bytes.

    `run` gives a value whose `repr` is the same for the same input, or raises one of `errors`: those that its documentation names.
    `seeds`: valid inputs. `tokens`: pieces that mean something in the format. `repair`: makes checksums right again.
    """

    name: str
    run: Callable[[bytes], object]
    errors: tuple[type[Exception], ...]
    seeds: Sequence[bytes]
    tokens: Sequence[bytes] = ()
    repair: Callable[[bytes], bytes] = _as_is


def execute(target: Target, data: bytes) -> str:
    """What the target makes of an input, shortened: a result, or one of its errors.

    Raises:
        Failure: anything else came out, or it took too much time or memory.
    """
    before, start = _peak_bytes(), time.process_time()
    try:
        outcome = repr(target.run(data))
    except target.errors as e:
        outcome = f"{type(e).__name__}: {e}"
        try:
            outcome.encode()
        except UnicodeEncodeError:
            raise Failure(f"the message of {type(e).__name__} cannot be printed: {e!r:.300}") from e
    except Exception as e:
        raise Failure(f"{type(e).__name__}: {e}"[:500]) from e
    seconds, growth = time.process_time() - start, _peak_bytes() - before
    if seconds > MAX_SECONDS:
        raise Failure(f"took {seconds:.1f} s, the limit is {MAX_SECONDS} s")
    if growth > MAX_GROWTH_BYTES:
        raise Failure(f"took {growth >> 20} MiB, the limit is {MAX_GROWTH_BYTES >> 20} MiB")
    return outcome if len(outcome) < 2000 else f"{outcome[:2000]}... {zlib.crc32(outcome.encode('utf-8', 'surrogatepass')):08x}"


def execute_twice(target: Target, data: bytes) -> str:
    """As `execute`; a second run must come to the same."""
    first, second = execute(target, data), execute(target, data)
    if first != second:
        raise Failure(f"two runs differ: {first[:200]} and {second[:200]}")
    return first


def choice(data: bytes, count: int) -> tuple[int, bytes]:
    """Inputs of targets with variants begin with a byte that chooses one: (its number, the rest)."""
    return (data[0] % count, data[1:]) if data else (0, data)


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
