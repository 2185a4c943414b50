"""`DevicePrefetcher`: batches on the device before they are asked for.

    for batch in DevicePrefetcher(batches, "cuda"):
        model(batch["image"])  # copied while the step before was running

A thread takes batches from any iterable and starts their copies on a stream of its own. The consumer's stream waits for a copy by an event,
so the host never waits; and a batch's source memory is held until its copy is done, so that nobody refills it meanwhile.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch

from loaders.engine import Ordered


class Copy(Protocol):
    """A copy under way."""

    def wait(self) -> Any:
        """The batch on the device, safe to use from here on in the caller's current stream. Called once, by the consumer."""
        ...

    def is_done(self) -> bool:
        """Whether the source memory is not read any more. Never waits."""
        ...


StartCopy = Callable[[Any], Copy]


class DevicePrefetcher:
    """Iterable over the batches of another iterable, moved to a device ahead of their use, in the same order.

    A batch is a tensor or dicts, lists, tuples and named tuples of them, nested in any way; values that are no tensors pass unchanged. Each
    batch is memory of its own: it may be kept. Copies overlap with computation where the source is page-locked, as `BatchLoader` makes it
    when CUDA is there. On the CPU nothing is copied, and the thread alone remains.

    An error of the iterable reaches the consumer at its batch. Leaving the loop ends the thread; an iterable that blocks for ever keeps it,
    as a daemon. One iteration at a time, as the iterable itself allows it.

    Args:
        batches: such as a `BatchLoader` or torch's DataLoader; iterated once per epoch.
        device: "cuda", "cuda:1", "cpu" or a `torch.device`.
        depth: batches that are ready or being copied, beside the one that the consumer holds; 1 or more. Device memory is theirs.

    Raises:
        ValueError: depth is out of range, or there is no such device.
    """

    def __init__(self, batches: Iterable[Any], device: str | torch.device = "cuda", depth: int = 3) -> None:
        if depth < 1:
            raise ValueError(f"depth is {depth}, expected 1 or more")
        self.batches = batches
        self.device = check_device(device)
        self.depth = depth
        self._start_copy: StartCopy = _CudaCopies(self.device) if self.device.type == "cuda" else _NoCopy
        self._state: Mapping[str, Any] | None = None

    def __len__(self) -> int:
        """As the iterable counts."""
        return len(self.batches)  # type: ignore[arg-type]  # a stream without a length raises TypeError, as it would itself

    def __iter__(self) -> Iterator[Any]:
        source = _Source(self.batches, self._start_copy)
        self._state = source.state()
        try:
            # One thread: it takes from the iterable, which is nobody else's meanwhile. `total` is not known and not needed.
            with Ordered(source, sys.maxsize, workers=1, ahead=self.depth) as copies:
                for copied in copies:
                    if isinstance(copied, _End):
                        return
                    copy, self._state = copied
                    batch = copy.wait()
                    del copy, copied
                    yield batch
                    del batch  # the consumer alone decides how long it lives
        finally:
            try:
                source.close()
            finally:
                self._take_back()

    def _take_back(self) -> None:
        """Where the loop was left near its end, the iterable may be an epoch ahead of the consumer."""
        if self._state is not None and "epoch" in self._state and hasattr(self.batches, "set_epoch"):
            self.batches.set_epoch(self._state["epoch"])

    def set_epoch(self, epoch: int) -> None:
        """Passed on to the iterable."""
        self._state = None
        self.batches.set_epoch(epoch)  # type: ignore[attr-defined]  # as `len`

    def state_dict(self) -> dict[str, Any]:
        """The iterable's state after the batch that the consumer got last; those copied ahead do not count."""
        return dict(self._state if self._state is not None else self.batches.state_dict())  # type: ignore[attr-defined]  # as `len`

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Passed on to the iterable: the next iteration goes on from there."""
        self.batches.load_state_dict(state)  # type: ignore[attr-defined]  # as `len`
        self._state = None


class _End:
    """What the producer thread gives when there is no batch left."""


class _Source:
    """Called by the one producer thread: the next batch, its copy started, with the iterable's state after it."""

    def __init__(self, batches: Iterable[Any], start_copy: StartCopy) -> None:
        self._batches = batches
        self._iterator: Iterator[Any] | None = None
        self._start_copy = start_copy
        self._under_way: deque[tuple[Copy, Any]] = deque()
        self._busy = False

    def __call__(self, number: int) -> tuple[Copy, Mapping[str, Any] | None] | _End:
        del number
        if self._iterator is None:
            self._iterator = iter(self._batches)
        self._busy = True
        try:
            batch = next(self._iterator)
        except StopIteration:
            return _End()
        finally:
            self._busy = False
        state, copy = self.state(), self._start_copy(batch)
        self._under_way.append((copy, batch))
        while self._under_way and self._under_way[0][0].is_done():
            self._under_way.popleft()
        return copy, state

    def state(self) -> Mapping[str, Any] | None:
        return self._batches.state_dict() if hasattr(self._batches, "state_dict") else None

    def close(self) -> None:
        close = getattr(self._iterator, "close", None)
        if close is not None and not self._busy:  # a generator that still runs, in a thread that was not waited for, cannot be closed
            close()


class _NoCopy:
    """The CPU's batches are where they shall be."""

    def __init__(self, batch: Any) -> None:
        self._batch = batch

    def wait(self) -> Any:
        return self._batch

    def is_done(self) -> bool:
        return True


class _CudaCopies:
    """Starts copies on a side stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch gives it no types

    def __call__(self, batch: Any) -> Copy:
        with torch.cuda.stream(self.stream):
            moved = map_tensors(batch, lambda t: t.to(self.device, non_blocking=True))
            return _CudaCopy(moved, self.stream.record_event(), self.device)


class _CudaCopy:
    def __init__(self, moved: Any, event: torch.cuda.Event, device: torch.device) -> None:
        self._moved, self._event, self._device = moved, event, device

    def wait(self) -> Any:
        stream = torch.cuda.current_stream(self._device)  # not that of the current device, which may be another
        stream.wait_event(self._event)
        moved, self._moved = self._moved, None
        # The memory belongs to the side stream's pool: the allocator must know who else reads it before it lends it again.
        map_tensors(moved, lambda t: t.record_stream(stream))
        return moved

    def is_done(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]  # torch gives it no types


def map_tensors(batch: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """The same nest of dicts, lists and (named) tuples with each tensor changed; anything else is kept."""
    if isinstance(batch, torch.Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return {name: map_tensors(value, change) for name, value in batch.items()}
    if isinstance(batch, list | tuple):
        values = [map_tensors(value, change) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    return batch


def check_device(device: str | torch.device) -> torch.device:
    """`device` as a `torch.device`, an index filled in for CUDA.

    Raises:
        ValueError: it is neither the CPU nor a CUDA device of this machine.
    """
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as e:
        raise ValueError(f"device is {device!r}, expected such as 'cuda', 'cuda:0' or 'cpu': {e}") from None
    if found.type == "cpu":
        return found
    if found.type != "cuda":
        raise ValueError(f"device is {device!r}, expected 'cuda' or 'cpu'")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index: int | None = found.index  # None without a number, whatever the stubs say
    if index is None:
        index = torch.cuda.current_device() if count else 0
    if index >= count:
        raise ValueError(f"device is {device!r}, but this process sees {count} CUDA devices; device='cpu' works everywhere")
    return torch.device("cuda", index)
