"""Maps of large files: what of them counts as a process's memory."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest

from loaders.handles import give_back, map_sparsely
from loaders.npy import map_array

ROWS, WIDTH = 1 << 20, 64


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """64 MB, just written: Linux may keep it in pieces of 2 MB. Row i holds i, eight times."""
    path = tmp_path / "large.npy"
    np.save(path, np.repeat(np.arange(ROWS), WIDTH // 8).reshape(ROWS, WIDTH // 8))
    return path


def counted(path: Path) -> int:
    """Bytes of a file that this process has mapped and touched."""
    counts, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            ours = line.endswith(str(path))
        elif ours and line.startswith("Rss:"):
            counts += int(line.split()[1]) * 1024
    return counts


@pytest.mark.skipif(sys.platform != "linux", reason="/proc/self/smaps")
def test_few_rows_of_a_large_file_count_little(large: Path) -> None:
    array = np.asarray(map_array(large))
    map_sparsely(array)
    chosen = np.random.default_rng(0).integers(0, ROWS, 64)
    assert (array[chosen] == chosen[:, None]).all()
    assert 0 < counted(large) <= 10 << 20
    assert (array == np.arange(ROWS)[:, None]).all()  # over all borders
    give_back(array)
    assert counted(large) == 0
    assert (array[chosen] == chosen[:, None]).all()


@pytest.mark.parametrize("rows", [1, 100, 300_000])
def test_advice_changes_no_value(tmp_path: Path, rows: int) -> None:
    np.save(tmp_path / "a.npy", np.arange(rows * 8).reshape(rows, 8))
    array = np.asarray(map_array(tmp_path / "a.npy"))
    map_sparsely(array)
    assert np.array_equal(array, np.load(tmp_path / "a.npy"))


def test_what_is_no_map_is_left_alone() -> None:
    for array in (np.zeros(0), np.zeros(10)):
        map_sparsely(array)
