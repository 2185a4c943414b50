"""Sound settings for torch's DataLoader over a packed data set, for those who keep it. `BatchLoader` needs none of this.

    loader = DataLoader(ds, **dataloader_kwargs(ds, batch_size=64, device="cuda"))

The classic failures of worker processes are looked for before the first one starts, and named with their cure.
"""

from __future__ import annotations

import random
import resource
import shutil
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import default_collate

from loaders.batches import default_workers
from loaders.collate import collate_list
from loaders.prefetch import check_device, map_tensors
from loaders.quiet import be_one_of_many

SHARED_MEMORY = "/dev/shm"
TIMEOUT_S = 300
"""A batch that takes longer raises an error instead of waiting for ever."""
SPARE_FILES = 128
"""File descriptors that a process needs beside the tensors in flight."""


class Samples(Protocol):
    """A map-style data set; with `task`, as packed ones have it, the collate is chosen by it."""

    def __len__(self) -> int: ...

    def __getitem__(self, i: int, /) -> Any: ...


def worker_init(worker_id: int) -> None:
    """For ``DataLoader(worker_init_fn=worker_init)``: one thread for OpenCV and torch each, no CUDA, and seeds of its own.

    `random`, NumPy's global generator and torch are seeded by torch's seed of the worker, which differs per worker and epoch and follows
    ``torch.manual_seed``. Transforms of packed data sets need no seed: they draw from the generator that they are given.
    """
    del worker_id
    be_one_of_many()
    seed = torch.initial_seed()  # the base seed + worker_id
    random.seed(seed)
    np.random.seed(seed % 2**32)  # the global generator: it is what users' transforms draw from


def dataloader_kwargs(
    dataset: Samples,
    batch_size: int = 64,
    device: str | torch.device = "cpu",
    workers: int | None = None,
    prefetch_factor: int = 2,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    context: str | None = None,
) -> dict[str, Any]:
    """Keyword arguments for ``torch.utils.data.DataLoader(dataset, **kwargs)``; add `shuffle`, or a sampler.

    Reads one sample, to know how large a batch is.

    Args:
        dataset: map-style, not empty.
        batch_size: samples per batch.
        device: where the batches go: memory is page-locked for CUDA only.
        workers: processes; None: the cores that this process may use, divided by the local ranks. 0: none.
        prefetch_factor: batches made ahead by each worker.
        collate_fn: None: `collate_list` for detection, torch's own otherwise.
        context: how workers start: "fork", "forkserver" or "spawn"; None: fork, or forkserver where CUDA is in use already.

    Raises:
        ValueError: an argument is out of range; or /dev/shm, the limit of open files or a CUDA context would break the workers.
    """
    count = default_workers() if workers is None else workers
    if batch_size < 1 or count < 0 or prefetch_factor < 1:
        raise ValueError(
            f"batch_size {batch_size} and prefetch_factor {prefetch_factor} must be 1 or more, workers {workers} 0 or more, or None"
        )
    if len(dataset) == 0:
        raise ValueError("the data set is empty: there is nothing to load")
    if collate_fn is None:
        collate_fn = collate_list if getattr(dataset, "task", None) == "detection" else default_collate
    kwargs: dict[str, Any] = {
        "batch_size": batch_size,
        "num_workers": count,
        "pin_memory": check_device(device).type == "cuda",
        "collate_fn": collate_fn,
    }
    if count == 0:
        return kwargs
    if context is None:
        context = "forkserver" if _cuda_in_use() else "fork"
    check_context(context)
    num_bytes, num_tensors = batch_cost(dataset, batch_size, collate_fn)
    check_shared_memory(num_bytes, count, prefetch_factor)
    check_open_files(num_tensors, count, prefetch_factor)
    return kwargs | {
        "persistent_workers": True,
        "prefetch_factor": prefetch_factor,
        "timeout": TIMEOUT_S,
        "multiprocessing_context": context,
        "worker_init_fn": worker_init,
    }


def batch_cost(dataset: Samples, batch_size: int, collate_fn: Callable[[list[Any]], Any]) -> tuple[int, int]:
    """Bytes and number of tensors (with memory of their own) of a batch, reckoned from batches of one and two samples."""
    sample = dataset[0]
    one, two = (_tensors(collate_fn([sample] * n)) for n in (1, 2))
    more = batch_size - 1
    return one[0] + more * (two[0] - one[0]), one[1] + more * (two[1] - one[1])


def _tensors(batch: Any) -> tuple[int, int]:
    """Bytes and number of memory blocks: views of one block are sent through one file descriptor."""
    sizes: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()

    map_tensors(batch, note)
    return sum(sizes.values()), len(sizes)


def _cuda_in_use() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]  # torch gives it no types


def check_context(context: str) -> None:
    """Raises ValueError where workers started by `context` could not work."""
    if context not in ("fork", "forkserver", "spawn"):
        raise ValueError(f"context is {context!r}, expected 'fork', 'forkserver' or 'spawn'")
    if context == "fork" and _cuda_in_use():
        raise ValueError(
            "context='fork', but CUDA is in use in this process already: a forked worker that touches it fails with 'Cannot re-initialize "
            "CUDA in forked subprocess'. Take context='forkserver', or start the workers before the model goes to the device; BatchLoader "
            "starts no processes"
        )


def check_shared_memory(batch_bytes: int, workers: int, prefetch_factor: int) -> None:
    """Raises ValueError where the batches in flight do not fit into shared memory: a worker that touches a missing page is killed."""
    try:
        free = shutil.disk_usage(SHARED_MEMORY).free
    except FileNotFoundError:
        return  # another system than Linux, with another kind of shared memory
    needed = batch_bytes * _in_flight(workers, prefetch_factor)
    if needed > free:
        raise ValueError(
            f"{SHARED_MEMORY} has {free / 1e6:,.1f} MB free, but {workers} workers with prefetch_factor {prefetch_factor} and batches of "
            f"{batch_bytes / 1e6:,.1f} MB need {needed / 1e6:,.1f} MB: a worker would be killed by a bus error. Give the container more "
            f"(docker run --shm-size={max(1, -(-needed * 2 // 10**9))}g, or --ipc=host), take fewer workers or smaller batches, or "
            "BatchLoader, whose threads use no shared memory"
        )


def check_open_files(batch_tensors: int, workers: int, prefetch_factor: int) -> None:
    """Raises ValueError where the tensors in flight, one file descriptor each, are more than this process may open."""
    if torch.multiprocessing.get_sharing_strategy() != "file_descriptor":  # type: ignore[no-untyped-call]  # torch gives it no types
        return
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = batch_tensors * _in_flight(workers, prefetch_factor) + SPARE_FILES
    if limit != resource.RLIM_INFINITY and needed > limit:
        more = "" if most == resource.RLIM_INFINITY else f" (here at most {most})"
        raise ValueError(
            f"this process may open {limit} files, but {workers} workers with prefetch_factor {prefetch_factor} and batches of "
            f"{batch_tensors} tensors need about {needed}: it would fail with 'too many open files' or 'received 0 items of ancdata'. "
            f"Raise the limit: ulimit -n {needed}{more}; or take a collate that makes few tensors (see loaders.collate), or BatchLoader"
        )


def _in_flight(workers: int, prefetch_factor: int) -> int:
    """Batches that exist at a time: those made ahead, one that the consumer holds, and one that it has just been given."""
    return workers * prefetch_factor + 2
