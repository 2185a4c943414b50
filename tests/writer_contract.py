"""What every writer must do, whatever its layout: inherit `WriterContract` in a test class, and say how a writer is opened."""

from __future__ import annotations

import hashlib
import io
import os
from pathlib import Path

import cv2
import numpy as np
import pytest

from loaders.codecs import encode_image
from loaders.format import Layout, Task
from packer.records import shard_file
from packer.sample import PackError, Sample, Writer, WrittenShard
from packer.writers import WRITERS, open_writer

HEIGHT, WIDTH = 24, 40
TASKS: tuple[Task, ...] = ("classification", "detection", "unlabelled")


def pixels(n: int) -> np.ndarray:
    small = np.random.default_rng(n).integers(0, 256, (3, 4, 3), np.uint8)
    return np.asarray(cv2.resize(small, (WIDTH, HEIGHT)))


def make_sample(n: int, task: Task, num_boxes: int | None = None, part: str = "jpg") -> Sample:
    """Sample n, with key 3 n + 1; without `num_boxes` a detection sample has n % 3 boxes."""
    image = pixels(n)
    sample = Sample(3 * n + 1, f"images/bild_{n}_ä.{part}", WIDTH, HEIGHT, 2 * WIDTH, 2 * HEIGHT + n, (0.5, 0.25, float(n), -1.5))
    sample.image, sample.encoded, sample.suffix = image, encode_image(image, part), part  # type: ignore[arg-type]  # a literal, given as str
    if task == "classification":
        sample.label = n % 4
    if task == "detection":
        m = n % 3 if num_boxes is None else num_boxes
        rng = np.random.default_rng(n)
        sample.boxes = np.sort(rng.uniform(0, HEIGHT, (m, 2, 2)), axis=1).reshape(m, 4).astype(np.float32)
        sample.labels = rng.integers(0, 4, m)
        sample.difficult, sample.truncated, sample.occluded = rng.integers(0, 2, (3, m)).astype(np.uint8)
    return sample


class WriterContract:
    """Inherit and set `layout`."""

    layout: Layout

    def open(self, path: Path, task: Task) -> Writer:
        return open_writer(self.layout, path, task)

    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        """Where the shard goes: a folder that holds another file."""
        folder = tmp_path / "partial"
        folder.mkdir()
        (folder / "neighbour").write_bytes(b"do not touch")
        return folder / ("shard.tar" if self.layout == "tar" else "shard")

    def pack(self, path: Path, task: Task, samples: list[Sample]) -> WrittenShard:
        writer = self.open(path, task)
        for sample in samples:
            writer.write(sample)
        return writer.close()

    def on_disk(self, path: Path) -> dict[str, bytes]:
        """All files of the folder that the shard is in, but for the neighbour."""
        files = {str(p.relative_to(path.parent)): p.read_bytes() for p in sorted(path.parent.rglob("*")) if p.is_file()}
        assert files.pop("neighbour") == b"do not touch"
        return files

    def test_is_in_the_table(self, path: Path) -> None:
        writer = self.open(path, "unlabelled")
        assert writer.layout == self.layout
        assert type(writer).__name__ == WRITERS[self.layout][1]
        writer.abort()

    @pytest.mark.parametrize("task", TASKS)
    def test_same_samples_same_bytes(self, path: Path, task: Task) -> None:
        samples = [make_sample(n, task) for n in range(5)]
        self.pack(path, task, samples)
        first = self.on_disk(path)
        other = path.parent.parent / "again" / path.name
        other.parent.mkdir()
        (other.parent / "neighbour").write_bytes(b"do not touch")
        self.pack(other, task, samples)
        assert self.on_disk(other) == first

    @pytest.mark.parametrize("task", TASKS)
    def test_files_are_those_on_disk_with_their_sizes_and_hashes(self, path: Path, task: Task) -> None:
        written = self.pack(path, task, [make_sample(n, task) for n in range(5)])
        expected = {}
        for name, (num_bytes, sha) in written.files.items():
            data = shard_file(path, name).read_bytes()
            assert (len(data), hashlib.sha256(data).hexdigest()) == (num_bytes, sha)
            expected[str(shard_file(path, name).relative_to(path.parent))] = data
        assert self.on_disk(path) == expected

    @pytest.mark.parametrize("task", TASKS)
    def test_index_says_what_the_samples_say(self, path: Path, task: Task) -> None:
        samples = [make_sample(n, task) for n in range(5)]
        index = self.pack(path, task, samples).index
        rows = index.samples
        assert rows["key"].tolist() == [1, 4, 7, 10, 13]
        assert set(rows["shard"].tolist()) == {0}
        assert rows["label"].tolist() == ([0, 1, 2, 3, 0] if task == "classification" else [-1] * 5)
        assert {(int(r["width"]), int(r["height"])) for r in rows} == {(WIDTH, HEIGHT)}
        assert rows["num_boxes"].tolist() == ([0, 1, 2, 0, 1] if task == "detection" else [0] * 5)
        if task != "detection":
            assert (index.boxes, index.labels, index.difficult, index.box_offsets) == (None,) * 4
            return
        assert index.boxes is not None
        assert index.labels is not None
        assert index.difficult is not None
        assert index.box_offsets is not None
        assert index.box_offsets.tolist() == [0, 0, 1, 3, 3, 4]
        np.testing.assert_array_equal(index.boxes, np.concatenate([s.boxes for s in samples]))
        np.testing.assert_array_equal(index.labels, np.concatenate([s.labels for s in samples]))
        np.testing.assert_array_equal(index.difficult, np.concatenate([s.difficult for s in samples]))

    def test_a_shard_without_any_box(self, path: Path) -> None:
        index = self.pack(path, "detection", [make_sample(n, "detection", 0) for n in range(3)]).index
        assert index.boxes is not None
        assert index.boxes.shape == (0, 4)
        assert index.box_offsets is not None
        assert index.box_offsets.tolist() == [0, 0, 0, 0]

    def test_order_is_that_of_writing(self, path: Path) -> None:
        index = self.pack(path, "unlabelled", [make_sample(n, "unlabelled") for n in (2, 0, 1)]).index
        assert index.samples["key"].tolist() == [7, 1, 4]

    @pytest.mark.parametrize("num_samples", [0, 1, 3])
    def test_abort_removes_everything(self, path: Path, num_samples: int) -> None:
        writer = self.open(path, "detection")
        for n in range(num_samples):
            writer.write(make_sample(n, "detection"))
        writer.abort()
        assert self.on_disk(path) == {}
        assert not path.exists()

    def test_abort_after_close_removes_everything(self, path: Path) -> None:
        writer = self.open(path, "detection")
        writer.write(make_sample(1, "detection"))
        writer.close()
        writer.abort()
        assert self.on_disk(path) == {}
        assert not path.exists()

    def test_abort_on_a_full_disk_removes_everything(self, path: Path) -> None:
        """What is still waiting cannot be written when the file is closed, either."""
        writer = self.open(path, "detection")
        writer.write(make_sample(1, "detection"))
        (file,) = (value for value in vars(writer).values() if isinstance(value, io.IOBase))
        with open("/dev/full", "wb", buffering=0) as full:
            os.dup2(full.fileno(), file.fileno())
        writer.abort()
        assert file.closed
        assert self.on_disk(path) == {}
        assert not path.exists()

    def test_a_sample_without_pixels_is_refused_by_name(self, path: Path) -> None:
        sample = make_sample(0, "unlabelled")
        sample.image = sample.encoded = None
        writer = self.open(path, "unlabelled")
        with pytest.raises(PackError, match=sample.source):
            writer.write(sample)
        writer.abort()
