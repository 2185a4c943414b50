"""`Monitor`: does training wait for data? Wraps any loader, measures every step, says what to change.

    batches = Monitor(BatchLoader(ds, 64))
    for epoch in range(10):
        for batch in batches:
            train(batch)
        print(batches.summary)

Data time is how long the loop waited for a batch, step time how long it kept one. A device computes behind the host's back: there a wait is
only lost time when the device had nothing to do meanwhile, so with ``synchronize=True`` each step ends when the device is done. That costs
the overlap of steps; take it for a measurement, not for a training.
"""

from __future__ import annotations

import json
import time
import warnings
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
import torch

from loaders.advice import Advice, advise
from loaders.batches import default_workers
from loaders.usage import LOOK_EVERY_S, Usage


class ScalarWriter(Protocol):
    """What is used of ``torch.utils.tensorboard.SummaryWriter``."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any: ...


@dataclass(frozen=True, slots=True)
class Summary:
    """One epoch, or what has run of it. Times in seconds, percentiles 50, 90 and 99 over its steps; None: nobody could tell.

    `data_share` is data time / (data + step time); `first_s` the wait for the first batch; `cpu_share` the processor time of this process
    and its children per second and usable core; `rss_bytes` the most memory seen of this process; `read_bytes` what it read from storage,
    not from the page cache; `gpu_share` and `gpu_bytes` are means of what the driver says.
    """

    epoch: int
    num_steps: int
    num_samples: int
    seconds: float
    data_s: float
    step_s: float
    data_share: float
    samples_per_s: float
    first_s: float
    data_percentiles_s: tuple[float, float, float]
    step_percentiles_s: tuple[float, float, float]
    cpu_share: float
    rss_bytes: int
    read_bytes: int | None
    gpu_share: float | None
    gpu_bytes: int | None

    def __str__(self) -> str:
        lines = [
            f"epoch {self.epoch}: {self.num_steps:,} steps, {self.num_samples:,} samples in {self.seconds:.2f} s, "
            f"{self.samples_per_s:,.0f} samples/s",
            f"  waiting for data {self.data_share:.1%} ({self.data_s:.2f} s, the first batch {self.first_s:.2f} s)",
            f"  data ms  {_percentiles(self.data_percentiles_s)}",
            f"  step ms  {_percentiles(self.step_percentiles_s)}",
            f"  processor {self.cpu_share:.0%} of {default_workers()} cores, memory {self.rss_bytes / 1e6:,.0f} MB"
            + ("" if self.read_bytes is None else f", read from storage {self.read_bytes / 1e6:,.0f} MB"),
        ]
        if self.gpu_share is not None and self.gpu_bytes is not None:
            lines.append(f"  device {self.gpu_share:.0%} busy, {self.gpu_bytes / 1e6:,.0f} MB")
        return "\n".join(lines)


def _percentiles(values: tuple[float, float, float]) -> str:
    return "  ".join(f"p{p} {1000 * value:.2f}" for p, value in zip((50, 90, 99), values, strict=True))


class Monitor:
    """Iterable over the same batches, which measures. Everything else is the loader's: ``len``, `set_epoch`, `state_dict`, `close`, ...

    Args:
        batches: any loader.
        warn_share: a `RuntimeWarning` ends an epoch whose data share is above; None: never. The first batch counts.
        log: a file that gets one JSON object per line: ``{"kind": "steps" | "epoch", ...}``; appended to.
        log_every: steps per line, and per scalar of `writer`.
        writer: such as ``torch.utils.tensorboard.SummaryWriter``.
        synchronize: wait for the device at the end of each step; see above.
        device: number of the CUDA device that is waited for and watched; None: the current one. Watching needs the package pynvml
            (nvidia-ml-py).
    """

    def __init__(
        self,
        batches: Iterable[Any],
        warn_share: float | None = 0.2,
        log: str | Path | None = None,
        log_every: int = 100,
        writer: ScalarWriter | None = None,
        synchronize: bool = False,
        device: int | None = None,
    ) -> None:
        if log_every < 1:
            raise ValueError(f"log_every is {log_every}, expected 1 or more")
        self.batches = batches
        self.warn_share, self.log_every, self.writer, self.synchronize = warn_share, log_every, writer, synchronize
        self.log = None if log is None else Path(log)
        self.device = device
        self.summary: Summary | None = None
        """Of the last epoch, also of one that was left early."""
        self._epoch = 0
        self._step = 0  # those of earlier epochs

    def __len__(self) -> int:
        return len(self.batches)  # type: ignore[arg-type]  # a stream without a length raises TypeError, as it would itself

    def __getattr__(self, name: str) -> Any:
        if name == "batches":  # not set yet, while unpickled
            raise AttributeError(name)
        return getattr(self.batches, name)

    def __iter__(self) -> Iterator[Any]:
        run = _Run(self._loaders_epoch(), self.device)
        with _Lines(self.log) as lines:
            try:
                yield from self._measured(run, lines)
            finally:
                if run.data_s:
                    self.summary = run.summary()
                    self._epoch += 1
                    self._step += len(run.data_s)
            if run.data_s and self.summary is not None:
                lines.write({"kind": "epoch", "step": self._step, **asdict(self.summary)})
                self._tell(self.summary)

    def _loaders_epoch(self) -> int:
        """Which epoch the loader begins, where it knows; else the number of those before it here."""
        state = self.batches.state_dict() if hasattr(self.batches, "state_dict") else {}
        epoch = state.get("epoch", self._epoch)
        return epoch if isinstance(epoch, int) else self._epoch

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *_: object) -> None:
        close = getattr(self.batches, "close", None)
        if close is not None:
            close()

    def _measured(self, run: _Run, lines: _Lines) -> Iterator[Any]:
        # A step of some milliseconds leaves little of this in the processor's caches, where a method called or an attribute looked up costs
        # microseconds: local names, and no call that could be spared.
        clock, synchronize = time.perf_counter, self.synchronize and torch.cuda.is_available()
        add_data, add_step, add_size = run.data_s.append, run.step_s.append, run.sizes.append
        look_at, steps_left = 0.0, self.log_every - self._step % self.log_every
        before = clock()
        for batch in self.batches:  # to begin counts as waiting: a DataLoader starts its workers there
            got = clock()
            size = num_samples(batch)
            yield batch
            del batch
            if synchronize:
                torch.cuda.synchronize(self.device)
            now = clock()
            add_data(got - before)
            add_step(now - got)
            add_size(size)
            if now >= look_at:
                run.usage.look()
                look_at = now + LOOK_EVERY_S
            steps_left -= 1
            if not steps_left:
                steps_left = self.log_every
                self._note(run, lines)
            before = now

    def _note(self, run: _Run, lines: _Lines) -> None:
        """The last `log_every` steps: one line, and scalars."""
        data_s, step_s = sum(run.data_s[-self.log_every :]), sum(run.step_s[-self.log_every :])
        samples, step = sum(run.sizes[-self.log_every :]), self._step + len(run.data_s)
        values = {"data_share": data_s / (data_s + step_s), "samples_per_s": samples / (data_s + step_s), "rss_bytes": run.usage.rss_bytes}
        if self.writer is not None:
            for name, value in values.items():
                self.writer.add_scalar(f"loader/{name}", value, step)
        lines.write({"kind": "steps", "epoch": run.epoch, "step": step, "data_s": data_s, "step_s": step_s, **values})

    @property
    def advice(self) -> Advice | None:
        """What most likely makes the last epoch wait, and the setting to change; None when there is no epoch yet."""
        return None if self.summary is None else advise(self.summary, self.batches)

    def _tell(self, summary: Summary) -> None:
        if self.warn_share is None or summary.data_share <= self.warn_share:
            return
        advice = advise(summary, self.batches)
        warnings.warn(
            f"training waited for data {summary.data_share:.0%} of epoch {summary.epoch} ({summary.data_s:.1f} of {summary.seconds:.1f} s)."
            f" Most likely: {advice.cause}. Try: {advice.cure}",
            RuntimeWarning,
            stacklevel=3,
        )


class _Run:
    """The numbers of one epoch."""

    def __init__(self, epoch: int, device: int | None) -> None:
        self.epoch = epoch
        self.data_s, self.step_s, self.sizes = array("d"), array("d"), array("q")
        self.usage = Usage(device)

    def summary(self) -> Summary:
        data_s, step_s, num_samples = sum(self.data_s), sum(self.step_s), sum(self.sizes)
        seconds = data_s + step_s
        percentiles = np.percentile((self.data_s, self.step_s), (50, 90, 99), axis=1).T.tolist()
        return Summary(
            epoch=self.epoch,
            num_steps=len(self.data_s),
            num_samples=num_samples,
            seconds=seconds,
            data_s=data_s,
            step_s=step_s,
            data_share=data_s / seconds,
            samples_per_s=num_samples / seconds,
            first_s=self.data_s[0],
            data_percentiles_s=tuple(percentiles[0]),
            step_percentiles_s=tuple(percentiles[1]),
            **self.usage.total(),
        )


class _Lines:
    """JSON lines appended to a file, one `write` each, so that two processes do not mix them; without a path, nothing."""

    def __init__(self, path: Path | None) -> None:
        self._file: IO[str] | None = None if path is None else path.open("a", encoding="utf-8")

    def write(self, line: Mapping[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()

    def __enter__(self) -> _Lines:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()


def num_samples(batch: Any) -> int:
    """Length of the first tensor in a batch (nested dicts, lists and tuples); 0 when it has none."""
    return _first_length(batch) or 0


def _first_length(value: Any) -> int | None:
    # Runs between steps that have emptied the processor's caches. Plain containers come first: to ask of another object whether it is a
    # Tensor or a Mapping runs code of their metaclasses. `shape` is a third of what `len` costs, which goes through torch's dispatcher.
    if isinstance(value, dict):
        inner: Iterable[Any] = value.values()
    elif isinstance(value, (list, tuple)):
        inner = value
    elif isinstance(value, torch.Tensor):
        shape = value.shape
        return shape[0] if shape else None
    elif isinstance(value, Mapping):
        inner = value.values()
    else:
        return None
    for item in inner:
        if (found := _first_length(item)) is not None:
            return found
    return None
