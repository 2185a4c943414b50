"""What `loaders.monitor` costs a step.

    python recipes/benchmarks/monitor_cost.py

The same batches are iterated with and without it, by turns: first with empty steps, where the difference of the wall-clock time is its
cost; then with steps that wait 5 ms, where the difference of the processor time is.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator

import torch

from loaders.monitor import Monitor

STEP_S = 0.005
ROUNDS = 9


def batches(count: int) -> Iterator[dict[str, torch.Tensor]]:
    batch = {"image": torch.zeros(64, 3, 8, 8, dtype=torch.uint8), "label": torch.zeros(64, dtype=torch.int64)}
    return (batch for _ in range(count))


def cost(count: int, step_s: float, clock: Callable[[], float]) -> list[float]:
    """Seconds a step that the monitor adds, one number a round."""

    def seconds(loader: Iterable[object]) -> float:
        began = clock()
        for _ in loader:
            if step_s:
                time.sleep(step_s)
        return clock() - began

    return [(seconds(Monitor(list(batches(count)), warn_share=None)) - seconds(list(batches(count)))) / count for _ in range(ROUNDS)]


def main() -> None:
    for words, found in (
        ("empty steps, wall-clock time", cost(20_000, 0.0, time.perf_counter)),
        ("steps of 5 ms, processor time", cost(200, STEP_S, time.process_time)),
    ):
        median, low, high = statistics.median(found), min(found), max(found)
        print(
            f"monitor, {words}: {median * 1e6:.1f} us a step ({low * 1e6:.1f} to {high * 1e6:.1f}), "
            f"{median / STEP_S:.2%} of a step of 5 ms ({low / STEP_S:.2%} to {high / STEP_S:.2%})"
        )


if __name__ == "__main__":
    main()
