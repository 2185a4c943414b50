"""A smaller form of ``recipes/robustness/scale.py``: outcome and findings of many rows and files, through real processes. No times."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_many_rows_and_many_files(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "recipes/robustness/scale.py"), "--rows", "50000", "--files", "5000", "--folder", str(tmp_path)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, env=environ, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        f"{command} of {what}" for what in ("a table of 50,000 rows", "5,000 files") for command in ("check", "build")
    ]
    assert all("MB in the main process" in line for line in lines)
    assert list(tmp_path.iterdir()) == []
