"""Engines: who runs the jobs. A new engine attaches by one file and one line in `ENGINES`.

An engine is a map of one module-level function over tasks. Results come back in any order, each with its task's number, so that
nothing depends on which worker was quicker.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

Tick = Callable[[int], None]
"""Called by a running task with the position, within the task, of what it works on next; progress and fault reports come from it."""

TaskFunction = Callable[[Any, Any, Tick], Any]
"""``function(context, task, tick) -> result``: module-level, picklable, and the same for every engine."""


class Engine(Protocol):
    """Runs tasks. `context` is handed to each worker once. Exceptions of the function, and the death of a worker, raise PackError."""

    def map(
        self,
        function: TaskFunction,
        context: Any,
        tasks: Sequence[Any],
        *,
        describe: Callable[[Any, int], str],
        on_progress: Callable[[int], None],
    ) -> Iterator[tuple[int, Any]]:
        """Yield (task number, result) as tasks finish. `describe(task, position)` names what a task is on, for messages;
        `on_progress(n)` is called now and then with how many positions went by since the last call.
        """
        ...


ENGINES: dict[str, tuple[str, str]] = {"local": ("packer.engines.local", "LocalEngine")}


def open_engine(name: str, workers: int) -> Engine:
    """The engine called `name` with `workers` workers."""
    module, cls = ENGINES[name]
    make: Callable[[int], Engine] = getattr(importlib.import_module(module), cls)
    return make(workers)
