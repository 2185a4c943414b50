"""`BatchLoader(processes=True)`: the same batches as threads make, whatever happens to the processes."""

from __future__ import annotations

import errno
import gc
import multiprocessing
import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from batch_data import producer_threads
from loaders.augment import RandomResizedCrop
from loaders.batches import BatchLoader
from loaders.collate import collate_indexed, collate_padded
from loaders.dataset import PackedDataset, SampleError
from loaders.memmap import MemmapDataset
from loaders.shards import ShardDataset
from loaders.slots import SPARE_FILES, SharedMemory
from packed_data import Packed, write_packed

pytestmark = pytest.mark.slow

Sample = dict[str, Any]
ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    before = open_files()
    yield
    gc.collect()
    assert multiprocessing.active_children() == []
    assert producer_threads() == []
    assert open_files() <= before


def open_files() -> int:
    """Memory that is shared, and what talks with processes."""
    names = []
    for number in os.listdir("/proc/self/fd"):
        try:
            names.append(os.readlink(f"/proc/self/fd/{number}"))
        except OSError:
            continue  # the one that lists them
    return sum("shardpack" in name for name in names)


@pytest.fixture
def packed(tmp_path: Path) -> Packed:
    return write_packed(tmp_path / "out", sizes=((90, 120), (64, 80), (100, 50)), counts=(20, 13, 9))


def crop(size: int = 32) -> RandomResizedCrop:
    return RandomResizedCrop(size)


# Whatever they are asked for, both give the same


def draws(sample: Sample, rng: np.random.Generator) -> Sample:
    """Fields of several kinds; an image whose memory is not the batch's."""
    image = np.full((5, 4, 3), sample["index"], np.uint8)
    return {**sample, "image": image, "draw": float(rng.random()), "name": f"s{sample['index']}", "vector": np.arange(3) * rng.random()}


def as_list(samples: list[Sample]) -> Sample:
    return {"images": [s["image"] for s in samples], "index": [s["index"] for s in samples]}


class Changes:
    """A batch transform that adds large and small tensors of several dtypes and layouts."""

    def __init__(self) -> None:
        self.epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __call__(self, batch: Sample) -> Sample:
        image = batch["image"].float() / 7
        wide = image.repeat(1, 1, 8, 8)
        return {
            **batch,
            "epoch": self.epoch,
            "float": image,
            "wide": wide,
            "rows": wide.contiguous(memory_format=torch.channels_last),
            "half": wide.bfloat16(),
            "small half": image[0].bfloat16(),
            "gaps": wide[:, :, ::2, 1::3],
            "part": batch["image"][1:3, :, 2:, ::2],
            "expanded": wide[:1].expand(4, *wide.shape[1:]),
            "nothing": image[:0],
            "scalar": torch.tensor(3.5),
            "float8": image[0].to(torch.float8_e5m2),
            "conjugate": [torch.complex(t, t).conj() for t in (image[0], wide)],
            "negative": torch.complex(image, image).conj().imag,
            "twice": [wide, wide, image],
            "again": image,
            "nested": {"a": [wide[0], (image[1], None)], "text": "x"},
        }


def assert_equal(a: Any, b: Any) -> None:
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        torch.testing.assert_close(a, b, rtol=0, atol=0)
        if a.ndim == 4 and a.numel() and a.is_contiguous(memory_format=torch.channels_last):
            assert b.is_contiguous(memory_format=torch.channels_last)
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for name in a:
            assert_equal(a[name], b[name])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_equal(x, y)
    else:
        assert a == b


CASES: dict[str, Any] = {
    "crops, padded, ranks": ("tar", {"transform": crop()}, {"collate": collate_padded, "remainder": "pad", "rank": 1, "world_size": 2}),
    "fields of all kinds": ("tar", {"transform": draws}, {"collate": collate_indexed, "batch_transform": Changes()}),
    "own collate, weights": ("tar", {}, {"collate": as_list, "weights": "balanced"}),
    "gathered, several at a time": ("memmap", {}, {"shuffle": False, "remainder": "pad"}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_batches_are_those_of_threads(tmp_path: Path, case: str) -> None:
    layout, of_set, of_loader = CASES[case]
    sizes = ((90, 120), (64, 80)) if layout == "tar" else ((6, 5),)
    packed = write_packed(tmp_path / "out", layout, sizes=sizes, counts=(20, 13, 9))
    ds = (ShardDataset if layout == "tar" else MemmapDataset)(packed.root, **of_set)
    with BatchLoader(ds, 4, seed=3, workers=0, **of_loader) as threads:
        expected = [list(threads) for _ in range(2)]
    with BatchLoader(ds, 4, seed=3, workers=2, processes=True, **of_loader) as loader:
        found = [list(loader)]
        children = {child.pid for child in multiprocessing.active_children()}
        iterator = iter(loader)
        found.append([next(iterator), next(iterator)])
        state = loader.state_dict()
        list(iterator)
        loader.load_state_dict(state)
        found[1] += loader
        assert {child.pid for child in multiprocessing.active_children()} == children  # they live on, from epoch to epoch
    assert_equal(found, expected)  # all are valid still, after the loader's end


def test_batches_that_are_held_never_change(packed: Packed) -> None:
    rng = random.Random(5)
    ds = ShardDataset(packed.root, transform=crop())
    held: list[tuple[Any, Any]] = []
    with BatchLoader(ds, 3, workers=2, processes=True) as loader:
        for _ in range(8):
            for batch in loader:
                held.append((batch["image"], batch["image"].clone()))
                rng.shuffle(held)
                del held[rng.randrange(12) :]
                for image, as_it_was in held:
                    assert torch.equal(image, as_it_was)
        del batch, image
        kept = len(loader._slots._ring)
        held.clear()
        assert kept <= 2 * (2 * 4 + 2)
    assert loader._slots._ring == type(loader._slots._ring)()


class Remembers:
    """Looks whether the first batch that it saw is as it was."""

    def __init__(self) -> None:
        self.first: torch.Tensor | None = None
        self.copy = torch.zeros(0)

    def __call__(self, batch: Sample) -> Sample:
        if self.first is None:
            self.first, self.copy = batch["image"], batch["image"].clone()
        return {**batch, "same": torch.equal(self.first, self.copy)}


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_what_a_transform_or_a_forked_child_remembers_never_changes(packed: Packed) -> None:
    ds = ShardDataset(packed.root, transform=crop())
    with BatchLoader(ds, 3, workers=1, processes=True, batch_transform=Remembers()) as loader:
        image = next(iter(loader))["image"]
        as_it_was = image.clone()
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                os.read(reading, 1)  # until the parent has gone on
                status = int(not torch.equal(image, as_it_was))
            finally:
                os._exit(status)
        del image
        for _ in range(3):
            assert all(batch["same"] for batch in loader)
        os.write(writing, b"x")
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        os.close(reading)
        os.close(writing)


def test_batches_may_be_held_beyond_the_limit_of_open_files(packed: Packed) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.open(os.devnull, os.O_RDONLY)  # of those that are free
    os.close(lowest)
    held: list[Any] = []
    with BatchLoader(ShardDataset(packed.root, transform=crop()), 1, shuffle=False, workers=1, processes=True) as loader:
        next(iter(loader))  # starts the process
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + SPARE_FILES + 60, hard))
        try:
            for _ in range(3):
                held += [(batch["image"], batch["image"].clone()) for batch in loader]
            assert open_files() > len(loader._slots._ring) + 20  # what is held beyond the ring has one each
            others = [os.open(os.devnull, os.O_RDONLY) for _ in range(SPARE_FILES - 8)]
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    for fd in others:
        os.close(fd)
    assert len(held) == 126
    assert all(torch.equal(image, as_it_was) for image, as_it_was in held)
    del held


class Grows:
    """Adds tensors of 64 kB and more, each of another size."""

    def __call__(self, batch: Sample) -> Sample:
        size = 20_000 + 317 * int(batch["index"].sum())
        return {**batch, "large": torch.full((size,), size), "larger": torch.full((2 * size,), 2 * size)}


def test_memory_of_sizes_that_change_is_bounded(packed: Packed) -> None:
    ds = ShardDataset(packed.root, transform=crop())
    with BatchLoader(ds, 2, workers=1, processes=True, batch_transform=Grows()) as loader:
        for _ in range(5):
            for batch in loader:
                assert (batch["large"] == len(batch["large"])).all()
                assert (batch["larger"] == 2 * len(batch["large"])).all()
        [child] = multiprocessing.active_children()
        mapped = Path(f"/proc/{child.pid}/maps").read_text().count("shardpack-batch")
        assert mapped <= len(loader._slots._ring) + 3  # what the parent has, and was in use when the last one was taken
        assert open_files() <= 2 * (len(loader._slots._ring) + 3)
        del batch


# Errors


class Fails(RandomResizedCrop):
    """Fails at one sample, in the way that `how` says."""

    def __init__(self, how: Path) -> None:
        super().__init__(16)
        self.how = how

    def __call__(self, sample: Sample, rng: np.random.Generator) -> Sample:
        if sample["index"] == 9:
            how = self.how.read_text()
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "exit":
                os._exit(7)
            errors = {"value": ValueError("of the test"), "odd": Odd("a", "b"), "interrupt": KeyboardInterrupt("of the test")}
            if how in errors:
                raise errors[how]
        return super().__call__(sample, rng)


class Odd(Exception):
    """No copy of it can be made from its `args`."""

    def __init__(self, a: str, b: str) -> None:
        super().__init__(a + b)


FAILURES: dict[str, tuple[type[BaseException], str]] = {
    "value": (ValueError, "of the test"),
    "odd": (RuntimeError, r"(?s)in a process of the loader.*test_processes.*Odd: ab"),
    "kill": (RuntimeError, r"process \d+ .* ended by SIGKILL: the system ends processes when memory runs out"),
    "exit": (RuntimeError, r"process \d+ .* ended with exit code 7"),
    "interrupt": (KeyboardInterrupt, "of the test"),
}


def test_what_goes_wrong_comes_at_its_batch_and_the_loader_stays_usable(packed: Packed, tmp_path: Path) -> None:
    flag = tmp_path / "how"
    with BatchLoader(ShardDataset(packed.root, transform=Fails(flag)), 4, shuffle=False, workers=2, processes=True) as loader:
        for how, (kind, text) in FAILURES.items():
            flag.write_text(how)
            iterator = iter(loader)
            assert [next(iterator)["index"].tolist() for _ in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
            with pytest.raises(kind, match=text) as caught:
                next(iterator)
            if how == "kill":  # the README's table of troubles quotes it
                quote = re.sub(r"\d+", "123", str(caught.value)).partition(":")[0]
                assert f"| `{quote}` |" in (ROOT / "README.md").read_text("utf-8")
            if how != "interrupt":
                assert "in batch 2 (from 0) of epoch 0, rank 0" in caught.value.__notes__
            if how == "value":
                assert "test_processes.py" in str(caught.value.__cause__)  # where it was, in the process
        flag.write_text("nothing")
        assert [i for batch in loader for i in batch["index"].tolist()] == list(range(40))


class Unloadable(RandomResizedCrop):
    """No process can load it while `flag` exists."""

    def __init__(self, flag: Path, size: int) -> None:
        super().__init__(size)
        self.flag = flag

    def __setstate__(self, state: dict[str, Any]) -> None:
        if state["flag"].exists():
            raise ValueError("cannot be loaded, of the test")
        self.__dict__.update(state)


def test_after_a_part_that_no_process_can_load_nothing_old_is_used(packed: Packed, tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    ds: PackedDataset = ShardDataset(packed.root, transform=Unloadable(flag, 16))
    with BatchLoader(ds, 4, workers=1, processes=True) as loader:
        assert next(iter(loader))["image"].shape[2:] == (16, 16)
        ds.transform = Unloadable(flag, 24)
        flag.touch()
        for _ in range(2):
            with pytest.raises(ValueError, match="cannot be loaded, of the test"):
                next(iter(loader))
        flag.unlink()
        assert next(iter(loader))["image"].shape[2:] == (24, 24)


def warns(sample: Sample, rng: np.random.Generator) -> Sample:
    class OwnWarning(UserWarning):
        pass

    warnings.warn("of the test", OwnWarning, stacklevel=1)
    return {**sample, "image": sample["image"][:20, :20], "draw": rng.random()}


def test_warnings_of_a_category_that_cannot_be_sent_arrive(packed: Packed) -> None:
    with (
        BatchLoader(ShardDataset(packed.root, transform=warns), 4, workers=1, processes=True) as loader,
        pytest.warns(UserWarning, match="OwnWarning: of the test"),
    ):
        next(iter(loader))


def test_damaged_samples_are_named_or_replaced_and_counted(packed: Packed) -> None:
    with packed.shard(1).open("r+b") as file:
        file.truncate(packed.shard(1).stat().st_size // 3)
    with (
        pytest.raises(SampleError, match=r"shard-000001.*sample 0\d+ \(source .*pack verify"),
        BatchLoader(ShardDataset(packed.root, transform=crop()), 4, workers=1, processes=True) as loader,
    ):
        list(loader)
    numbers = []
    for processes in (False, True):
        ds = ShardDataset(packed.root, transform=crop(), on_error="replace")
        with BatchLoader(ds, 4, workers=2, processes=processes) as loader, pytest.warns(UserWarning, match="replaced") as told:
            rows = [batch["index"].tolist() for batch in loader]
        numbers.append((ds.num_replaced, rows))
        assert any("was replaced by sample" in str(w.message) for w in told)
        assert any("pack verify" in str(w.message) for w in told)
    assert numbers[0] == numbers[1]
    assert numbers[0][0] > 3


def test_what_cannot_be_sent_is_said_when_the_loader_is_made(packed: Packed) -> None:
    with pytest.raises(TypeError, match=r"ds, or its transform, cannot be pickled: .*lambda.*top of a module.*processes=False"):
        BatchLoader(ShardDataset(packed.root, transform=lambda sample, rng: {**sample, "x": rng.random()}), 4, processes=True)
    with pytest.raises(TypeError, match=r"batch_transform cannot be pickled"):
        BatchLoader(ShardDataset(packed.root, transform=crop()), 4, processes=True, batch_transform=lambda batch: batch)
    with pytest.raises(ValueError, match="processes=True has no process with workers=0"):
        BatchLoader(ShardDataset(packed.root, transform=crop()), 4, workers=0, processes=True)
    with pytest.raises(TypeError, match="processes is 4, expected True or False: how many, `workers` says"):
        BatchLoader(ShardDataset(packed.root, transform=crop()), 4, processes=4)  # type: ignore[arg-type]


def test_a_transform_that_is_changed_between_epochs_is_sent_anew(packed: Packed) -> None:
    ds: PackedDataset = ShardDataset(packed.root, transform=crop(16))
    with BatchLoader(ds, 4, workers=1, processes=True) as loader:
        assert next(iter(loader))["image"].shape[2:] == (16, 16)
        ds.transform = crop(24)
        assert next(iter(loader))["image"].shape[2:] == (24, 24)


def test_no_shared_memory_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(OSError, match=r"no shared memory of 5,000 bytes for a batch: No space left on device\. Take a smaller batch_size"):
        SharedMemory(5000)
    monkeypatch.undo()
    memory = SharedMemory(5000)
    array: NDArray[np.uint8] = np.ndarray((5000,), np.uint8, buffer=memory.map)
    del memory
    array[:] = 7  # the map lives as long as an array of it
    assert array.sum() == 35000


# Nothing is left behind


def test_processes_end_with_the_loader_in_every_way(packed: Packed) -> None:
    ds = ShardDataset(packed.root, transform=crop())
    loader = BatchLoader(ds, 4, workers=2, processes=True)
    for _ in loader:
        break
    children = multiprocessing.active_children()
    assert len(children) == 2
    del loader
    gc.collect()
    assert multiprocessing.active_children() == []
    loader = BatchLoader(ds, 4, workers=2, processes=True)
    iterator = iter(loader)
    next(iterator)
    loader.close()
    loader.close()
    assert multiprocessing.active_children() == []
    with pytest.raises(RuntimeError, match="closed"):
        next(iterator)


def test_closing_while_processes_start_ends_them_for_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loaders.engine.JOIN_S", 0.1)
    packed = write_packed(tmp_path / "out", "memmap", "classification", sizes=((6, 5),), counts=(200,))
    loader = BatchLoader(MemmapDataset(packed.root), 4, workers=2, processes=True)  # several batches at a time, which are tried singly
    iter(loader)
    while len(multiprocessing.active_children()) < 2:
        time.sleep(0.01)
    loader.close()
    deadline = time.monotonic() + 20
    while producer_threads() and time.monotonic() < deadline:
        assert multiprocessing.active_children() == []
        time.sleep(0.05)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_starts_processes_of_its_own(packed: Packed) -> None:
    loader = BatchLoader(ShardDataset(packed.root, transform=crop()), 4, shuffle=False, workers=1, processes=True)
    iterator = iter(loader)
    next(iterator)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            status = int([i for batch in loader for i in batch["index"].tolist()] != list(range(40)))
            loader.close()
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert [i for batch in iterator for i in batch["index"].tolist()] == list(range(4, 40))
    loader.close()


SCRIPT = """
import os, signal, sys, time
from loaders.augment import RandomResizedCrop
from loaders.batches import BatchLoader
from loaders.shards import ShardDataset

def main(root, how):
    loader = BatchLoader(ShardDataset(root, transform=RandomResizedCrop(16)), 4, workers=2, processes=True)
    for n, batch in enumerate(loader):
        if n == 2:
            import multiprocessing
            print(*(child.pid for child in multiprocessing.active_children()), flush=True)
            if how == "exit":
                sys.exit(3)
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)

{guard}main(sys.argv[1], sys.argv[2])
"""


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_processes_end_with_the_script(packed: Packed, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("{guard}", 'if __name__ == "__main__":\n    '))
    runs = {}
    for how in ("exit", "kill", "interrupt"):
        command = [sys.executable, str(script), str(packed.root), how]
        runs[how] = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True)
    for how, run in runs.items():
        with run:
            assert run.stdout is not None
            assert run.stderr is not None
            children = [int(pid) for pid in run.stdout.readline().split()]
            assert len(children) == 2, run.stderr.read()
            if how == "interrupt":
                os.killpg(run.pid, signal.SIGINT)  # as a terminal does: to all of them
            errors = run.stderr.read()
        assert run.returncode == {"exit": 3, "kill": -signal.SIGKILL, "interrupt": -signal.SIGINT}[how]
        assert errors.count("Traceback") == (how == "interrupt"), errors  # of the script; the processes say nothing
        deadline = time.monotonic() + 20
        while any(map(is_alive, children)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not any(map(is_alive, children))


def test_a_script_without_a_guard_is_told(packed: Packed, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("{guard}", ""))
    done = subprocess.run([sys.executable, script, packed.root, "x"], capture_output=True, text=True, timeout=60, cwd=ROOT, check=False)
    assert done.returncode == 1
    assert 'must start its work under `if __name__ == "__main__":`' in done.stderr.splitlines()[-2]
