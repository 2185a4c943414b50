"""The shared cases: 88 small data sets, each with what must come of it. Skipped where the folder beside the project is absent."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

CASES = Path(__file__).parent.parent.parent / "shared" / "cases"
PACK = Path(sys.executable).parent / "pack"
LARGE = "csv-scale-1m-rows"
NUM_PARALLEL = 2

pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.skipif(not (CASES / "run_cases.py").is_file(), reason="no shared cases beside the project"),
    pytest.mark.skipif(not PACK.is_file(), reason="the project is not installed beside this interpreter"),
]


def case_ids() -> list[str]:
    with tarfile.open(CASES / "cases.tar") as tar:
        return sorted({name.split("/")[0] for name in tar.getnames() if name.endswith("/case.json")})


def run_cases(*groups: list[str]) -> list[tuple[int, str]]:
    """(exit status, output) of the runner over each group, all at the same time."""
    command = [sys.executable, str(CASES / "run_cases.py"), "--pack", str(PACK)]
    started = [subprocess.Popen([*command, *ids], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for ids in groups]
    return [(p.wait(), output) for p in started for output in [p.communicate(timeout=900)[0]]]


def test_all_cases_but_the_large_one_agree() -> None:
    ids = [i for i in case_ids() if i != LARGE]
    assert len(ids) >= 87
    groups = [ids[n::NUM_PARALLEL] for n in range(NUM_PARALLEL)]
    for (status, output), group in zip(run_cases(*groups), groups, strict=True):
        assert status == 0, output
        assert "0 differ" in output
        agree, skipped = (int(output.splitlines()[-1].split()[n]) for n in (0, 4))
        assert agree + skipped == len(group), output


def test_large_case_agrees() -> None:
    [(status, output)] = run_cases([LARGE])
    assert status == 0, output
    assert output.splitlines()[-1] == "1 agree, 0 differ, 0 skipped"
