"""What every source must do, whatever it reads: inherit `SourceContract` in a test class, and say how a data set is made."""

from __future__ import annotations

import hashlib
import os
import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from packer.sample import Annotation, Finding, Source
from packer.sources.tree import is_ignored, is_picture

_recording: list[list[str]] = []


def _hook(event: str, args: tuple[object, ...]) -> None:
    if _recording and event in ("open", "os.listdir", "os.scandir") and isinstance(args[0], (str, bytes, os.PathLike)):
        _recording[-1].append(os.path.abspath(os.fsdecode(args[0])))


sys.addaudithook(_hook)  # cannot be removed again; it costs nothing while nothing is recorded


@contextmanager
def opened_paths() -> Iterator[list[str]]:
    """Every path that is opened or listed meanwhile."""
    paths: list[str] = []
    _recording.append(paths)
    try:
        yield paths
    finally:
        _recording.remove(paths)


def say(finding: Finding) -> str:
    """All that a finding says, as one text."""
    return " ".join(str(v) for v in (finding.path, finding.sample, finding.line, finding.object, finding.message) if v is not None)


class SourceContract:
    """Inherit and implement `make`. The data set must hold good samples, at least one that is refused while listing, and at least one
    file that is not packed."""

    def make(self, root: Path) -> Source:
        """Write a data set below the empty folder `root` and open it; called again on the same root, it only opens it."""
        raise NotImplementedError

    @pytest.fixture
    def root(self, tmp_path: Path) -> Path:
        root = tmp_path / "data"
        root.mkdir()
        (tmp_path / "outside").mkdir()
        (tmp_path / "outside" / "secret.jpg").write_bytes(b"secret")
        self.make(root)
        return root

    def test_items_are_sorted_and_unique(self, root: Path) -> None:
        items = self.make(root).list(_ignore).items
        paths = [item.path for item in items]
        assert len(paths) > 1
        assert paths == sorted(set(paths))
        for item in items:
            if not item.refused:
                info = (root / item.path).stat()
                assert (item.num_bytes, item.mtime_ns) == (info.st_size, info.st_mtime_ns)

    def test_refused_items_are_kept_and_named(self, root: Path) -> None:
        findings: list[Finding] = []
        items = self.make(root).list(findings.append).items
        refused = {item.path for item in items if item.refused}
        assert refused
        assert refused < {item.path for item in items}
        assert refused <= {f.sample for f in findings if f.level == "skip"}

    def test_splits_are_all_or_none(self, root: Path) -> None:
        listing = self.make(root).list(_ignore)
        allowed = {"train", "val", "test"} if listing.has_splits else {None}
        assert {item.split for item in listing.items if not item.refused} <= allowed

    def test_same_input_gives_the_same_listing(self, root: Path) -> None:
        first_findings: list[Finding] = []
        again_findings: list[Finding] = []
        first, again = self.make(root).list(first_findings.append), self.make(root).list(again_findings.append)
        assert first == again
        assert first_findings == again_findings

    def test_a_pickled_copy_annotates_alike(self, root: Path) -> None:
        source = self.make(root)
        before = pickle.dumps(source)
        items = source.list(_ignore).items
        copies = [pickle.loads(before), pickle.loads(pickle.dumps(source))]
        for item in items:
            if item.refused:
                continue
            expected: list[Finding] = []
            annotation = source.annotate(item, expected.append)
            for copy in copies:
                got: list[Finding] = []
                assert repr(copy.annotate(pickle.loads(pickle.dumps(item)), got.append)) == repr(annotation)
                assert got == expected

    def test_annotations_are_whole(self, root: Path) -> None:
        source = self.make(root)
        listing = source.list(_ignore)
        annotated = 0
        for item in listing.items:
            if item.refused:
                continue
            findings: list[Finding] = []
            annotation = source.annotate(item, findings.append)
            left_out = any(f.level == "skip" and f.sample == item.path for f in findings)
            assert left_out == (annotation is None), item.path
            if annotation is not None:
                annotated += 1
                _check_annotation(annotation, listing.classes, listing.task)
        assert annotated

    def test_root_is_never_written_to(self, root: Path) -> None:
        before = _snapshot(root)
        source = self.make(root)
        for item in source.list(_ignore).items:
            if not item.refused:
                source.annotate(item, _ignore)
        assert _snapshot(root) == before

    def test_findings_name_files_that_exist(self, root: Path) -> None:
        findings: list[Finding] = []
        source = self.make(root)
        for item in source.list(findings.append).items:
            if not item.refused:
                source.annotate(item, findings.append)
        assert findings
        for finding in findings:
            assert os.path.lexists(root / finding.path), finding
            assert not finding.path.startswith("/"), finding
            assert str(root) not in say(finding)
            assert len(say(finding)) < 10_000

    def test_nothing_outside_the_root_is_opened_and_no_picture(self, root: Path) -> None:
        source = self.make(root)
        with opened_paths() as paths:
            for item in source.list(_ignore).items:
                if not item.refused:
                    source.annotate(item, _ignore)
        ours = [p for p in paths if p.startswith(str(root.parent))]
        assert ours
        assert [p for p in ours if p != str(root) and not p.startswith(f"{root}/")] == []
        assert [p for p in ours if is_picture(p)] == []

    def test_numbers_add_up(self, root: Path) -> None:
        findings: list[Finding] = []
        listing = self.make(root).list(findings.append)
        shown, ignored = _regular_files(root)
        items = {item.path for item in listing.items}
        assert listing.num_files == len(shown | items) + ignored
        assert listing.num_ignored == ignored
        rest = shown - items
        named = rest & {f.path for f in findings}
        assert named
        assert len(rest - named) <= listing.num_used <= len(rest)


def _ignore(_finding: Finding) -> None:
    pass


def _check_annotation(annotation: Annotation, classes: list[str] | None, task: str) -> None:
    n = len(annotation.labels)
    assert annotation.boxes.shape == (n, 4)
    assert annotation.boxes.dtype == np.float64
    assert len(annotation.places) == n
    assert len(annotation.lines) in (0, n)
    for flags in (annotation.difficult, annotation.truncated, annotation.occluded):
        assert flags.shape == (n,)
        assert flags.dtype == np.uint8
        assert set(flags.tolist()) <= {0, 1}
    if task == "classification":
        assert annotation.label is not None
        assert classes is None or annotation.label in classes
    if task == "unlabelled":
        assert annotation.label is None


def _snapshot(root: Path) -> dict[str, tuple[int, str]]:
    return {
        str(p.relative_to(root)): (p.lstat().st_mtime_ns, hashlib.sha256(p.read_bytes()).hexdigest() if p.is_file() else "")
        for p in sorted(root.rglob("*"))
    }


def _regular_files(root: Path) -> tuple[set[str], int]:
    """Paths of the files that are no hidden or system files, and the number of those that are."""
    shown: set[str] = set()
    ignored = 0
    for folder, _, names in os.walk(root):
        for name in names:
            path = (Path(folder) / name).relative_to(root)
            if not (root / path).is_file():
                continue
            if any(map(is_ignored, path.parts)):
                ignored += 1
            else:
                shown.add(path.as_posix())
    return shown, ignored
