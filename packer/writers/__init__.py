"""Writers: samples to one shard on disk, one module per layout. A new layout attaches by one line in `WRITERS`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from loaders.format import Layout, Task
from packer.sample import Writer

# layout -> (module, class); imported on use.
WRITERS: dict[Layout, tuple[str, str]] = {
    "tar": ("packer.writers.tar", "TarWriter"),
    "memmap": ("packer.writers.memmap", "MemmapWriter"),
}


def open_writer(layout: Layout, path: Path, task: Task, **options: Any) -> Writer:
    """A writer for the shard at `path` (a ``.tar`` file, or a folder). Options are the layout's own (memmap: `dtype`, `normalize`)."""
    module, name = WRITERS[layout]
    make: Callable[..., Writer] = getattr(importlib.import_module(module), name)
    return make(path, task, **options)
