"""Names of splits, as data sets write them, and ours."""

from __future__ import annotations

SPLIT_NAMES = {
    "train": "train",
    "val": "val",
    "validation": "val",
    "valid": "val",
    "dev": "val",
    "test": "test",
    "testing": "test",
}
EXPECTED = "train, val (validation, valid, dev) or test (testing)"


def split_of(text: str) -> str | None:
    """``train``, ``val`` or ``test`` for a name in any case with any white space around it; None for anything else."""
    return SPLIT_NAMES.get(text.strip().lower())
