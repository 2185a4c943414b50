"""Which loader settings are the fastest for this data on this machine: measured, not guessed.

    result = tune(ds, batch_size=64, seconds=60)
    print(result.best.code)

Every setting of a small grid is run in turns: each round visits all of them for a moment, from another one on each time, so that
whatever else the machine does falls on all alike, and the median over the rounds counts. Threads and DataLoader's processes end with their
turn; those of a `BatchLoader`, which take seconds to start, wait for the next one.
`loaders.machine` measures why it comes out as it does.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal, get_args

from torch.utils.data import DataLoader

from loaders.assemble import BatchSource
from loaders.batches import BatchLoader, default_workers
from loaders.workers import dataloader_kwargs

Kind = Literal["threads", "processes", "dataloader"]
KINDS: tuple[Kind, ...] = get_args(Kind)
Progress = Callable[[str], None]

ROUNDS = 5
ALIKE = 0.95
"""Settings this close to the fastest count as fast: the cheapest of them is recommended."""


@dataclass(frozen=True, slots=True)
class Setting:
    """`BatchLoader` with so many "threads" or "processes", or torch's "dataloader" with so many processes; 0: all is done in the training
    loop."""

    kind: Kind
    workers: int
    batch_size: int

    def __str__(self) -> str:
        name = "DataLoader" if self.kind == "dataloader" else "BatchLoader"
        return f"{name}, {self.workers} {'threads' if self.kind == 'threads' else 'processes'}, batch {self.batch_size}"

    @property
    def imports(self) -> tuple[str, ...]:
        """What `statement` needs."""
        if self.kind != "dataloader":
            return ("from loaders.batches import BatchLoader",)
        return "import torch", "from torch.utils.data import DataLoader", "from loaders.workers import dataloader_kwargs"

    @property
    def statement(self) -> str:
        """Makes `batches` of a data set `ds`."""
        if self.kind != "dataloader":
            more = ", processes=True" if self.kind == "processes" else ""
            return f"batches = BatchLoader(ds, batch_size={self.batch_size}, shuffle=True, workers={self.workers}{more})"
        return (
            'device = "cuda" if torch.cuda.is_available() else "cpu"\n'
            f"settings = dataloader_kwargs(ds, {self.batch_size}, device, workers={self.workers})\n"
            "batches = DataLoader(ds, shuffle=True, drop_last=True, **settings)"
        )

    @property
    def code(self) -> str:
        """Ready to paste, for a data set `ds`."""
        return "\n".join([*self.imports, "", self.statement])

    def open(self, ds: Any) -> Iterable[Any]:
        """The loader."""
        if self.kind != "dataloader":
            return BatchLoader(ds, self.batch_size, workers=self.workers, processes=self.kind == "processes")
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
    """`speeds` in the order of the grid; `best` is recommended for `reason`; `other_batches` are other batch sizes with best's workers;
    `left_out` names settings that cannot run here, with the reason."""

    speeds: tuple[Speed, ...]
    left_out: tuple[tuple[Setting, str], ...]
    other_batches: tuple[Speed, ...]
    best: Setting
    reason: str


def grid(batch_size: int, cores: int) -> list[Setting]:
    """Threads and processes: none, powers of two up to the cores, the cores, and for threads one more, which fills the gaps of reading. Of
    the processes of `BatchLoader`, which live through all rounds, one number: a core each."""
    counts = sorted({0, cores, *(2**k for k in range(cores.bit_length()) if 2**k <= cores)})
    threads = [Setting("threads", n, batch_size) for n in [*counts, cores + 1]]
    processes = [Setting("processes", cores, batch_size)] if cores > 1 else []
    return threads + processes + [Setting("dataloader", n, batch_size) for n in counts]


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
    if not seconds > 0:  # nor is NaN
        raise ValueError(f"seconds is {seconds}, expected above 0")
    settings = grid(batch_size, default_workers())
    speeds, left_out = race(ds, settings, seconds * 0.8, progress)
    best, reason = recommend(speeds)
    sizes = [size for size in (batch_size // 2, batch_size, batch_size * 2, batch_size * 4) if 1 <= size <= len(ds)]
    others = [Setting(best.kind, best.workers, size) for size in sizes]
    return Tuning(tuple(speeds), tuple(left_out), tuple(race(ds, others, seconds * 0.2, progress, rounds=3)[0]), best, reason)


def recommend(speeds: Iterable[Speed]) -> tuple[Setting, str]:
    """Of those within 5 % of the fastest, the one with the fewest workers but one at least, threads before processes.

    Fewer workers leave more to the training. Without any, nothing is made while the training computes, which a loop that only loads, as it
    is measured here, does not show: so none is recommended only where it is clearly faster, and that is said.
    """
    ranked = sorted(speeds, key=lambda s: -s.median)
    fast = [s for s in ranked if s.median >= ALIKE * ranked[0].median]
    best = min(fast, key=lambda s: (s.setting.workers == 0, s.setting.workers, KINDS.index(s.setting.kind)))
    reason = f"{best.median:,.0f} samples/s, the fastest"
    if best is not ranked[0]:
        reason = f"{best.median:,.0f} samples/s, within {1 - ALIKE:.0%} of the fastest ({ranked[0].setting}: {ranked[0].median:,.0f})"
    if best.setting.workers == 0:
        reason += "; where a GPU computes the steps, workers=1 loads meanwhile"
    return best.setting, reason


def race(
    ds: Any, settings: list[Setting], seconds: float, progress: Progress, rounds: int = ROUNDS
) -> tuple[list[Speed], list[tuple[Setting, str]]]:
    """Run each setting for an equal share of `seconds`, in turns; fewer rounds, but at least one, where batches take too long for all.

    Returns the speeds, and the settings that cannot run here (a small /dev/shm, few open files, a transform that cannot be pickled), with
    the reason.

    Raises:
        ValueError: none can run.
    """
    rates: dict[Setting, list[float]] = {setting: [] for setting in settings}
    left_out: dict[Setting, str] = {}
    end = time.perf_counter() + seconds
    with ExitStack() as opened:
        kept: dict[Setting, BatchLoader] = {}
        for number in range(rounds):
            if number and time.perf_counter() > end:
                break
            first = number % len(settings)
            for setting in settings[first:] + settings[:first]:
                if setting in left_out:
                    continue
                progress(f"round {number + 1} of {rounds}: {setting}")
                try:
                    loader = kept.get(setting) or setting.open(ds)
                except (TypeError, ValueError) as e:
                    left_out[setting] = str(e)
                    continue
                if isinstance(loader, BatchLoader) and setting not in kept:
                    kept[setting] = opened.enter_context(loader)
                try:
                    rates[setting].append(_turn(loader, setting, seconds / (rounds * len(settings))))
                except RuntimeError as e:
                    if setting.kind != "processes":
                        raise
                    left_out[setting] = str(e)  # a notebook, say, whose functions no process can import
    if len(left_out) == len(settings):
        raise ValueError(next(iter(left_out.values())))
    speeds = [Speed(setting, tuple(found)) for setting, found in rates.items() if setting not in left_out]
    return speeds, list(left_out.items())


def _turn(loader: Iterable[Any], setting: Setting, seconds: float) -> float:
    """Samples per second of a loader; at least two batches are timed.

    The first batch of each worker is not: it starts them, opens files, and they all come at a time.
    """
    batches = _endless(loader)
    try:
        for _ in range(max(1, setting.workers)):
            next(batches)
        began = now = time.perf_counter()
        count = 0
        while count < 2 or now - began < seconds:
            next(batches)
            count += 1
            now = time.perf_counter()
    finally:
        batches.close()
    return count * setting.batch_size / (now - began)


def _endless(loader: Iterable[Any]) -> Generator[Any, None, None]:
    while True:
        yield from loader
