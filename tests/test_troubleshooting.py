"""The README's table of troubles quotes what users really see."""

from __future__ import annotations

import inspect
import multiprocessing.reduction
import multiprocessing.spawn
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.utils.data.dataloader
from torch.utils.data import DataLoader

from loaders.batches import BatchLoader
from loaders.collate import collate_list
from loaders.memmap import MemmapDataset
from loaders.shards import ShardDataset
from packed_data import write_packed

README = (Path(__file__).parent.parent / "README.md").read_text("utf-8")
SECTION = README.partition("<!-- troubleshooting -->")[2].partition("<!-- /troubleshooting -->")[0]
ROWS = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in SECTION.splitlines() if line.startswith("| ")][1:]
QUOTED = re.findall(r"`([^`]+)`", " ".join(row[0] for row in ROWS))


def plain(text: str) -> str:
    """Without the numbers of a case."""
    return re.sub(r"\d+", "#", text)


def is_quoted(error: BaseException) -> bool:
    said = f"{type(error).__name__}: {error}"
    return any(plain(quote) in plain(said) for quote in QUOTED)


def test_every_row_has_cause_and_cure() -> None:
    assert len(ROWS) >= 15
    assert all(len(row) == 3 and all(row) for row in ROWS)


def provoke(root: Path, what: str) -> None:
    detection = MemmapDataset(write_packed(root / "boxes", "memmap").root)
    if what == "boxes":
        list(DataLoader(detection, batch_size=2))
    if what == "sizes":
        sizes = write_packed(root / "sizes", "tar", "classification", sizes=((12, 16), (20, 8))).root
        list(DataLoader(ShardDataset(sizes), batch_size=2))
    if what == "label":
        detection[0]["label"]
    if what in ("no boxes", "valid"):
        labels = MemmapDataset(write_packed(root / "labels", "memmap", "classification").root)
        batch = next(iter(BatchLoader(labels, 2, workers=0)))
        batch["boxes" if what == "no boxes" else "valid"]


@pytest.mark.parametrize("what", ["boxes", "sizes", "label", "no boxes", "valid"])
def test_the_error_is_quoted_as_it_is_seen(tmp_path: Path, what: str) -> None:
    with pytest.raises((RuntimeError, KeyError)) as error:
        provoke(tmp_path, what)
    assert is_quoted(error.value), error.value


def test_the_cure_for_boxes_of_unequal_number_works(tmp_path: Path) -> None:
    ds = MemmapDataset(write_packed(tmp_path, "memmap").root)
    batch = next(iter(DataLoader(ds, batch_size=4, collate_fn=collate_list)))
    assert [len(boxes) for boxes in batch["boxes"]] == [2, 0, 1, 3]


def source(module: object) -> str:
    """On one line, with string literals that go on in the next line joined."""
    text = inspect.getsource(module)  # type: ignore[arg-type]  # a module
    return re.sub(r"\"\s*f?\"", "", re.sub(r"\s+", " ", text))


@pytest.mark.parametrize(
    ("quote", "where"),
    [
        ("Too many open files", lambda: source(torch.utils.data.dataloader)),
        ("DataLoader timed out after", lambda: source(torch.utils.data.dataloader)),
        ("Cannot re-initialize CUDA in forked subprocess", lambda: source(torch.cuda)),
        ("items of ancdata", lambda: source(multiprocessing.reduction)),
        ("An attempt has been made to start a new process", lambda: source(multiprocessing.spawn)),
    ],
)
def test_what_cannot_be_provoked_here_is_quoted_from_its_source(quote: str, where: Callable[[], str]) -> None:
    assert any(quote in text for text in QUOTED)
    assert quote in where()
