"""What `loaders.monitor` costs a step.

    python recipes/benchmarks/monitor_cost.py

The same batches are iterated with and without it, by turns, and the time between the steps is compared: of empty steps, and of steps that
compute for 5 ms, after which little of the monitor is left in the processor's caches.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Iterator

import torch

from loaders.monitor import Monitor

STEP_S = 0.005
ROUNDS = 9
MATRIX = torch.ones(64, 64)


def batches(count: int) -> Iterator[dict[str, torch.Tensor]]:
    batch = {"image": torch.zeros(64, 3, 8, 8, dtype=torch.uint8), "label": torch.zeros(64, dtype=torch.int64)}
    return (batch for _ in range(count))


def step(seconds: float) -> float:
    """Compute for so long; how long it was."""
    began = time.perf_counter()
    while (now := time.perf_counter()) - began < seconds:
        MATRIX.matmul(MATRIX)
    return now - began


def cost(count: int, step_s: float) -> list[float]:
    """Seconds that the monitor adds between two steps, one number a round."""

    def between(loader: Iterable[object]) -> float:
        began = time.perf_counter()
        in_steps = sum(step(step_s) for _ in loader)
        return time.perf_counter() - began - in_steps

    return [(between(Monitor(list(batches(count)), warn_share=None)) - between(list(batches(count)))) / count for _ in range(ROUNDS)]


def main() -> None:
    torch.set_num_threads(1)
    for words, found in (("empty steps", cost(20_000, 0.0)), ("steps of 5 ms", cost(500, STEP_S))):
        median, low, high = statistics.median(found), min(found), max(found)
        print(
            f"monitor, {words}: {median * 1e6:.1f} us a step ({low * 1e6:.1f} to {high * 1e6:.1f}), "
            f"{median / STEP_S:.2%} of a step of 5 ms ({low / STEP_S:.2%} to {high / STEP_S:.2%})"
        )


if __name__ == "__main__":
    main()
