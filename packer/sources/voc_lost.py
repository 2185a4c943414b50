"""Files of a Pascal VOC data set that look as if they said the splits, where nothing is found that does."""

from __future__ import annotations

import re
from collections.abc import Iterable

from packer.sample import Finding, Report
from packer.sources.tree import File, is_archive
from packer.sources.voc_splits import LISTS, SPLIT_FILE

_LIKE_SPLITS = re.compile(r"(?:train|val|valid|validation|test|trainval|(?:.*[_-])?splits?(?:[_-].*)?)\.(?:csv|tsv|txt)", re.DOTALL)


def check_lost_splits(others: Iterable[File], report: Report) -> None:
    """For a data set without splits: an error for a packed split file or list, a warning for a file that is called like one."""
    for file in others:
        folder, _, name = file.path.lower().rpartition("/")
        packed = is_archive(name)
        plain = name.rpartition(".")[0] if packed else name
        if packed and (plain == SPLIT_FILE or (plain in LISTS and folder.endswith("imagesets/main"))):
            message = "says which split a picture is in, and is compressed: unpack it first"
            report(Finding("error", "archive", file.path, message, sample=file.path))
        elif not packed and _LIKE_SPLITS.fullmatch(plain):
            message = (
                "looks like a file of splits, and is not used, so that everything is in one split: [source] split_file names a CSV with "
                "the columns image_id and split; lists of names are read from ImageSets/Main/"
            )
            report(Finding("warning", "unused-split", file.path, message, sample=file.path))
