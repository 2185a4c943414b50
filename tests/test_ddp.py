"""Real process groups (gloo) of 1 to 4 ranks: disjoint, complete, the same number of batches, no hang, resume under another world size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from ddp_rank import BATCH, SETS, STOP
from loaders.sampling import num_batches
from packed_data import write_packed

ROOT = Path(__file__).parent.parent
COUNTS = {"uneven": (7, 1, 12, 3), "one": (10,), "few": (1, 1)}
NUM = {name: sum(counts) for name, counts in COUNTS.items()}
WORLDS = (1, 2, 3, 4)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of four processes got. They make a group of 4, then of 3, 2 and 1 of them."""
    folder = tmp_path_factory.mktemp("ddp")
    for name, counts in COUNTS.items():
        write_packed(folder / name, "memmap" if name == "one" else "tar", counts=counts)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "tests" / "ddp_rank.py"), str(folder)]
    runs = [subprocess.Popen([*command, str(r)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env) for r in range(4)]
    try:
        outputs = [run.communicate(timeout=240)[0] for run in runs]
    finally:
        for run in runs:
            if run.poll() is None:
                run.kill()
                run.communicate()
    for run, output in zip(runs, outputs, strict=True):
        assert run.returncode == 0, output
    return [json.loads((folder / f"rank-{r}.json").read_text()) for r in range(4)]


def batches(ranks: list[dict[str, Any]], world_size: int, name: str, kind: str) -> list[list[list[int]]]:
    return [ranks[rank][str(world_size)][name][kind] for rank in range(world_size)]


@pytest.mark.slow
@pytest.mark.parametrize("world_size", WORLDS)
def test_every_sample_once_in_as_many_batches_on_every_rank(ranks: list[dict[str, Any]], world_size: int) -> None:
    for name in SETS:
        for kind in ("pad", "sampler"):
            got = batches(ranks, world_size, name, kind)
            assert [len(rank) for rank in got] == [num_batches(NUM[name], BATCH, world_size, "pad")] * world_size
            assert sorted(chain(*chain(*got))) == list(range(NUM[name])), (name, kind)
        got = batches(ranks, world_size, name, "weights")
        assert len({len(rank) for rank in got}) == 1
        assert len(list(chain(*chain(*got)))) == NUM[name]
    assert batches(ranks, world_size, "uneven", "pad") == batches(ranks, world_size, "uneven", "sampler")


@pytest.mark.slow
@pytest.mark.parametrize("world_size", WORLDS)
def test_drop_leaves_out_the_same_number_everywhere(ranks: list[dict[str, Any]], world_size: int) -> None:
    for name in ("uneven", "one"):
        if NUM[name] < BATCH * world_size:
            assert "drop" not in ranks[0][str(world_size)][name]
            continue
        got = batches(ranks, world_size, name, "drop")
        seen = list(chain(*chain(*got)))
        assert all(len(batch) == BATCH for rank in got for batch in rank)
        assert [len(rank) for rank in got] == [NUM[name] // (BATCH * world_size)] * world_size
        assert len(set(seen)) == len(seen)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", WORLDS)
def test_streams_stay_in_step(ranks: list[dict[str, Any]], world_size: int) -> None:
    for name in ("uneven", "few"):
        padded = batches(ranks, world_size, name, "stream pad")
        assert len({len(rank) for rank in padded}) == 1
        assert sorted(chain(*chain(*padded))) == list(range(NUM[name]))
        if NUM[name] >= world_size:
            dropped = batches(ranks, world_size, name, "stream drop")
            seen = list(chain(*chain(*dropped)))
            assert len({len(rank) for rank in dropped}) == 1
            assert len(set(seen)) == len(seen) == NUM[name] - NUM[name] % world_size


@pytest.mark.slow
def test_four_ranks_are_resumed_by_three(ranks: list[dict[str, Any]]) -> None:
    before = [rank["interrupted"] for rank in ranks]
    assert all(rank["state"] == before[0]["state"] for rank in before)
    assert before[0]["state"]["samples_seen"] == STOP * 2 * 4
    after = [rank["resumed"] for rank in ranks[:3]]
    assert len({len(rank) for rank in after}) == 1
    got = [*chain(*(rank["got"] for rank in before)), *chain(*chain(*after))]
    assert sorted(got) == list(range(NUM["uneven"]))
