"""Which loader settings are the fastest for this data on this machine: measured, not guessed.

    result = tune(ds, batch_size=64, seconds=60)
    print(result.best.code)

Every setting of a small grid is run in turns: each round visits all of them for a moment, so that whatever else the machine does falls on
all alike, and the median over the rounds counts. `loaders.machine` measures why it comes out as it does.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from torch.utils.data import DataLoader

from loaders.assemble import BatchSource
from loaders.batches import BatchLoader, default_workers
from loaders.workers import dataloader_kwargs

Kind = Literal["threads", "processes"]
Progress = Callable[[str], None]

ROUNDS = 5
ALIKE = 0.95
"""Settings this close to the fastest count as fast: the cheapest of them is recommended."""


@dataclass(frozen=True, slots=True)
class Setting:
    """`BatchLoader` with so many threads, or torch's DataLoader with so many processes; 0: all is done in the training loop."""

    kind: Kind
    workers: int
    batch_size: int

    def __str__(self) -> str:
        name = "BatchLoader" if self.kind == "threads" else "DataLoader"
        return f"{name}, {self.workers} {self.kind}, batch {self.batch_size}"

    @property
    def code(self) -> str:
        """Ready to paste, for a data set `ds`."""
        if self.kind == "threads":
            return (
                "from loaders.batches import BatchLoader\n\n"
                f"batches = BatchLoader(ds, batch_size={self.batch_size}, shuffle=True, workers={self.workers})"
            )
        return (
            "from torch.utils.data import DataLoader\n"
            "from loaders.workers import dataloader_kwargs\n\n"
            f"settings = dataloader_kwargs(ds, {self.batch_size}, device, workers={self.workers})\n"
            "batches = DataLoader(ds, shuffle=True, drop_last=True, **settings)"
        )

    def open(self, ds: Any) -> Iterable[Any]:
        """The loader."""
        if self.kind == "threads":
            return BatchLoader(ds, self.batch_size, workers=self.workers)
        return DataLoader(ds, shuffle=True, drop_last=True, **dataloader_kwargs(ds, self.batch_size, workers=self.workers))


@dataclass(frozen=True, slots=True)
class Speed:
    """What a setting reached: samples per second, one number a round."""

    setting: Setting
    rounds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.rounds)


@dataclass(frozen=True, slots=True)
class Tuning:
    """`speeds` in the order of the grid; `best` is recommended for `reason`; `other_batches` are other batch sizes with best's workers."""

    speeds: tuple[Speed, ...]
    other_batches: tuple[Speed, ...]
    best: Setting
    reason: str

    def speed_of(self, setting: Setting) -> Speed:
        return next(s for s in self.speeds if s.setting == setting)


def grid(batch_size: int, cores: int) -> list[Setting]:
    """Threads and processes: none, powers of two up to the cores, the cores, and for threads one more, which fills the gaps of reading."""
    counts = sorted({0, cores, *(2**k for k in range(cores.bit_length()) if 2**k <= cores)})
    threads = [Setting("threads", n, batch_size) for n in [*counts, cores + 1]]
    return threads + [Setting("processes", n, batch_size) for n in counts]


def tune(ds: BatchSource, batch_size: int = 64, seconds: float = 60.0, progress: Progress = lambda _: None) -> Tuning:
    """Run the grid, then other batch sizes with the best setting; about `seconds` in all.

    Args:
        ds: as training will use it, with its transform.
        batch_size: that training wants; the recommendation keeps it.
        seconds: of measuring. Below 10 the result is a guess.
        progress: called with a line about what runs.

    Raises:
        ValueError: no batch in an epoch, or as `BatchLoader` and `loaders.workers.dataloader_kwargs`.
    """
    if seconds <= 0:
        raise ValueError(f"seconds is {seconds}, expected above 0")
    settings = grid(batch_size, default_workers())
    speeds = race(ds, settings, seconds * 0.8, progress)
    best, reason = recommend(speeds)
    sizes = [size for size in (batch_size // 2, batch_size, batch_size * 2, batch_size * 4) if 1 <= size <= len(ds)]
    others = [Setting(best.kind, best.workers, size) for size in sizes]
    return Tuning(tuple(speeds), tuple(race(ds, others, seconds * 0.2, progress, rounds=3)), best, reason)


def recommend(speeds: Iterable[Speed]) -> tuple[Setting, str]:
    """Of those within 5 % of the fastest, the one with the fewest workers but one at least, threads before processes.

    Fewer workers leave more to the training. Without any, nothing is made while the training computes, which a loop that only loads, as it
    is measured here, does not show: so none is recommended only where it is clearly faster, and that is said.
    """
    ranked = sorted(speeds, key=lambda s: -s.median)
    fast = [s for s in ranked if s.median >= ALIKE * ranked[0].median]
    best = min(fast, key=lambda s: (s.setting.workers == 0, s.setting.workers, s.setting.kind == "processes"))
    reason = f"{best.median:,.0f} samples/s, the fastest"
    if best is not ranked[0]:
        reason = f"{best.median:,.0f} samples/s, within {1 - ALIKE:.0%} of the fastest ({ranked[0].setting}: {ranked[0].median:,.0f})"
    if best.setting.workers == 0:
        reason += "; where a GPU computes the steps, workers=1 loads meanwhile"
    return best.setting, reason


def race(ds: Any, settings: list[Setting], seconds: float, progress: Progress, rounds: int = ROUNDS) -> list[Speed]:
    """Run each setting for an equal share of `seconds`, in turns; fewer rounds, but at least one, where batches take too long for all."""
    slice_s = seconds / (rounds * len(settings))
    runners = [_Runner(ds, setting) for setting in settings]
    end = time.perf_counter() + seconds
    try:
        for number in range(rounds):
            if number and time.perf_counter() > end:
                break
            for runner in runners:
                progress(f"round {number + 1} of {rounds}: {runner.setting}")
                runner.run(slice_s)
    finally:
        for runner in runners:
            runner.close()
    return [Speed(runner.setting, tuple(runner.rates)) for runner in runners]


class _Runner:
    """One setting's loader, kept between its turns."""

    def __init__(self, ds: Any, setting: Setting) -> None:
        self.setting = setting
        self.rates: list[float] = []
        self._ds = ds
        self._loader: Iterable[Any] | None = None
        self._batches: Iterator[Any] = iter(())

    def _endless(self) -> Iterator[Any]:
        self._loader = self.setting.open(self._ds)
        while True:
            yield from self._loader

    def run(self, seconds: float) -> None:
        """Take batches for `seconds`, at least two. What was made ahead while another setting ran is taken first and does not count."""
        first = self._loader is None
        if first:
            self._batches = self._endless()
        for _ in range(_made_ahead(self.setting) + (2 if first else 0)):
            next(self._batches)
        began = now = time.perf_counter()
        count = 0
        while count < 2 or now - began < seconds:
            next(self._batches)
            count += 1
            now = time.perf_counter()
        self.rates.append(count * self.setting.batch_size / (now - began))

    def close(self) -> None:
        self._batches = iter(())
        if isinstance(self._loader, BatchLoader):
            self._loader.close()
        self._loader = None  # a DataLoader ends its workers when it is garbage


def _made_ahead(setting: Setting) -> int:
    if setting.workers == 0:
        return 0
    return setting.workers + 2 if setting.kind == "threads" else 2 * setting.workers
