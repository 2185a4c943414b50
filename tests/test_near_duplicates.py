"""Perceptual hashes, the search among them, and what `pack check --near-duplicates` says."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import packer.near_duplicates as search
from build_data import Recorder, pack
from loaders.format import Task
from packer.build import check
from packer.job import DIGEST_BYTES
from packer.near_duplicates import COVER, NUM_BITS, RADIUS, near_duplicate_findings, nearest_earlier
from packer.perceptual import HASH_BYTES, picture_hash
from packer.recipe import load_recipe
from packer.sample import Finding, Item, Listing

Image = NDArray[np.uint8]
NONE = np.iinfo(np.int64).max


def distance(a: bytes, b: bytes) -> int:
    return (int.from_bytes(a, "big") ^ int.from_bytes(b, "big")).bit_count()


def photo(seed: int, height: int = 240, width: int = 320, contrast: float = 60) -> Image:
    """uint8 [H, W, 3]: blotches of many sizes, some noise."""
    rng = np.random.default_rng(seed)
    total = np.zeros((height, width), np.float32)
    for cells in (3, 6, 12, 24):
        coarse = rng.normal(size=(cells, cells)).astype(np.float32)
        total += np.asarray(cv2.resize(coarse, (width, height), interpolation=cv2.INTER_CUBIC)) / cells**0.5
    gray = 120 + contrast * total / total.std() + rng.normal(size=total.shape)
    return np.clip(gray[..., None] + [0, 8, -8], 0, 255).astype(np.uint8)


def encoded(image: Image, suffix: str, *options: int) -> bytes:
    return cv2.imencode(suffix, image[:, :, ::-1], list(options))[1].tobytes()


def again(image: Image, suffix: str, *options: int) -> Image:
    return np.asarray(cv2.imdecode(np.frombuffer(encoded(image, suffix, *options), np.uint8), cv2.IMREAD_COLOR), np.uint8)[:, :, ::-1]


COPIES: dict[str, Callable[[Image], Image]] = {
    "half": lambda im: np.asarray(cv2.resize(im, None, fx=0.5, fy=0.5, interpolation=cv2.INTER_AREA), np.uint8),
    "larger": lambda im: np.asarray(cv2.resize(im, (500, 400), interpolation=cv2.INTER_CUBIC), np.uint8),
    "quality 50": lambda im: again(im, ".jpg", cv2.IMWRITE_JPEG_QUALITY, 50),
    "webp": lambda im: again(im, ".webp", cv2.IMWRITE_WEBP_QUALITY, 60),
    "brighter": lambda im: np.clip(im * 1.1 + 10, 0, 255).astype(np.uint8),
    "gray": lambda im: np.asarray(cv2.cvtColor(im, cv2.COLOR_RGB2GRAY), np.uint8),
}


# The hash ---------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("contrast", [60, 5])
@pytest.mark.parametrize("name", COPIES)
def test_copies_are_within_the_radius(name: str, contrast: float) -> None:
    images = [photo(seed, contrast=contrast) for seed in range(20)]
    distances = [distance(picture_hash(image), picture_hash(COPIES[name](image))) for image in images]
    assert max(distances) <= RADIUS, distances


@pytest.mark.parametrize("contrast", [60, 5])
def test_other_pictures_are_not(contrast: float) -> None:
    hashes = [picture_hash(photo(seed, contrast=contrast)) for seed in range(60)]
    assert min(distance(a, b) for i, a in enumerate(hashes) for b in hashes[:i]) > 2 * RADIUS


def test_turned_and_mirrored_pictures_are_other_pictures() -> None:
    image = photo(1)
    for other in (image[::-1], image[:, ::-1], np.rot90(image)):
        assert distance(picture_hash(image), picture_hash(np.ascontiguousarray(other))) > RADIUS


@pytest.mark.parametrize("value", [0, 1, 128, 255])
def test_a_picture_without_structure_has_no_hash(value: int) -> None:
    flat = np.full((300, 400, 3), value, np.uint8)
    noise = np.clip(flat + np.random.default_rng(0).normal(size=flat.shape), 0, 255).astype(np.uint8)
    assert picture_hash(flat) == picture_hash(noise) == bytes(HASH_BYTES)


@pytest.mark.parametrize("shape", [(1, 2, 3), (2, 1), (5, 4000, 3), (33, 31, 1), (700, 300)])
def test_every_shape_has_a_hash_that_is_not_zero(shape: tuple[int, ...]) -> None:
    image = np.zeros(shape, np.uint8)
    image.ravel()[: image.size // 2] = 250
    assert picture_hash(image)[0] >= 128
    assert len(picture_hash(image)) == HASH_BYTES


# The search -------------------------------------------------------------------------------------------------------------------------------


def one_by_one(hashes: Sequence[bytes], contents: Sequence[int], splits: Sequence[int], labels: Sequence[int]) -> list[list[int]]:
    """The rule as it is written, every pair looked at."""
    kept: list[int] = []
    found: list[list[int]] = [[], [], []]
    for i in range(len(hashes)):
        near = [(distance(hashes[i], hashes[j]), j) for j in kept]
        near = [(d, j) for d, j in near if d <= RADIUS]
        other = [(d, j) for d, j in near if contents[i] != contents[j]]
        for best, chosen in zip(
            found, (other, [x for x in other if splits[x[1]] != splits[i]], [x for x in other if labels[x[1]] != labels[i]]), strict=True
        ):
            best.append(min((d << 40 | j for d, j in chosen), default=NONE))
        if not any(d <= COVER and (splits[j], labels[j]) == (splits[i], labels[i]) for d, j in near):
            kept.append(i)
    return found


def spread(seed: int, count: int, centres: int, flips: float) -> NDArray[np.uint8]:
    """uint8 [count, HASH_BYTES]: hashes around a few centres."""
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 2, (centres, NUM_BITS))[rng.integers(0, centres, count)] ^ (rng.random((count, NUM_BITS)) < flips)
    return np.packbits(bits.astype(np.uint8), axis=1)


@settings(deadline=None, max_examples=60)
@given(
    st.integers(0, 1 << 30),
    st.integers(0, 60),
    st.integers(1, 8),
    st.sampled_from([0, 0.01, 0.03, 0.05, 0.1]),
    st.sampled_from([3, 16, 2048]),
    st.sampled_from([0, 8, 1 << 40]),
)
def test_against_comparing_every_pair(seed: int, count: int, centres: int, flips: float, block: int, dense: int) -> None:
    rng = np.random.default_rng(seed)
    hashes = spread(seed, count, centres, flips)
    contents, splits, labels = rng.integers(0, count + 1, count), rng.integers(0, 3, count), rng.integers(0, 2, count)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "_BLOCK", block)
        patch.setattr(search, "_DENSE_SHARE", dense)  # 0: by candidates only; the largest: by products only
        patch.setattr(search, "_CHUNK", 7)
        found = nearest_earlier(hashes, contents, splits, labels)
    rows = [row.tobytes() for row in hashes]
    expected = one_by_one(rows, contents.tolist(), splits.tolist(), labels.tolist())
    assert [found.any.tolist(), found.other_split.tolist(), found.other_label.tolist()] == expected


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 1 << 30), st.sampled_from([0.005, 0.02, 0.04]))
def test_nothing_nearer_than_the_promise_is_missed(seed: int, flips: float) -> None:
    hashes = spread(seed, 50, 5, flips)
    splits = np.random.default_rng(seed).integers(0, 2, 50)
    labels = np.random.default_rng(seed + 1).integers(0, 3, 50)
    found = nearest_earlier(hashes, np.arange(50), splits, labels)
    for i in range(50):
        near = [j for j in range(i) if distance(hashes[i].tobytes(), hashes[j].tobytes()) <= RADIUS - COVER]
        assert not near or found.any[i] != NONE
        assert not any(splits[j] != splits[i] for j in near) or found.other_split[i] != NONE
        assert not any(labels[j] != labels[i] for j in near) or found.other_label[i] != NONE


@pytest.mark.parametrize("flips", [0, 0.005])
def test_many_copies_of_one_picture_stand_behind_few(flips: float) -> None:
    hashes = spread(1, 6000, 1, flips)
    found = nearest_earlier(hashes, np.arange(6000), np.arange(6000) % 2, np.zeros(6000, np.int64))
    assert int((found.any == NONE).sum()) == 1
    named = {int(value) & ((1 << 40) - 1) for value in found.any[1:]}
    assert len(named) < 200


# What is said -----------------------------------------------------------------------------------------------------------------------------

Row = tuple[int, int, str | None, str]
"""Which bytes, which hash (0: none), the split, the label."""


def told(rows: list[Row], task: Task = "classification") -> list[Finding]:
    items = [Item(f"{i}.jpg", None, 1, 1, label=label) for i, (*_, label) in enumerate(rows)]
    digests = np.ones((len(rows), 2, DIGEST_BYTES), np.uint8)
    hashes = np.zeros((len(rows), HASH_BYTES), np.uint8)
    for i, (content, look, _, _) in enumerate(rows):
        digests[i, 0, 0] = content
        hashes[i] = spread(look, 1, 1, 0)[0] if look else 0
    return list(near_duplicate_findings(Listing(items, task, [], False), [split for _, _, split, _ in rows], digests, hashes))


def codes(rows: list[Row], task: Task = "classification") -> list[tuple[str, str]]:
    found = told(rows, task)
    assert all(f.level == "warning" and f.sample == f.path for f in found)
    return [(f.code, f.path) for f in found]


def test_no_pictures_and_other_pictures() -> None:
    assert codes([]) == []
    assert codes([(1, 1, "train", "a"), (2, 2, "val", "b")]) == []


def test_each_kind_names_both_files_and_the_distance() -> None:
    (across,) = told([(1, 1, "train", "a"), (2, 1, "val", "a")])
    assert (across.code, across.path) == ("near-duplicate-across-splits", "1.jpg")
    assert "looks like 0.jpg (a perceptual hash differs in 0 of 144 bits), which is in train; this one is in val" in across.message
    (label,) = told([(1, 1, "train", "a"), (2, 1, "train", "b")])
    assert (label.code, label.path) == ("near-duplicate-other-label", "1.jpg")
    assert "which has label 'a'; this one has 'b'" in label.message
    (near,) = told([(1, 1, "train", "a"), (2, 1, "train", "a")])
    assert (near.code, near.path, near.message) == (
        "near-duplicate",
        "1.jpg",
        "looks like 0.jpg (a perceptual hash differs in 0 of 144 bits)",
    )


def test_both_faults_at_once() -> None:
    rows: list[Row] = [(1, 1, "train", "a"), (2, 1, "val", "b")]
    assert codes(rows) == [("near-duplicate-across-splits", "1.jpg"), ("near-duplicate-other-label", "1.jpg")]
    assert codes(rows, "detection") == [("near-duplicate-across-splits", "1.jpg")]


def test_the_same_bytes_are_left_to_the_exact_search() -> None:
    assert codes([(1, 1, "train", "a"), (1, 1, "val", "b"), (1, 1, "train", "a")]) == []


def test_a_copy_is_compared_with_the_same_bytes_of_every_split() -> None:
    rows: list[Row] = [(1, 1, "train", "a"), (1, 1, "val", "a"), (2, 1, "train", "a")]
    (finding,) = told(rows)
    assert (finding.code, finding.path) == ("near-duplicate-across-splits", "2.jpg")
    assert "looks like 1.jpg" in finding.message


def test_a_picture_that_is_left_out_stands_for_no_other() -> None:
    for left_out in ((1, 0, "train", "a"), (1, 1, None, "a")):  # refused; in no split
        rows: list[Row] = [left_out, (1, 1, "train", "a"), (2, 1, "train", "a")]
        (finding,) = told(rows)
        assert (finding.code, finding.path) == ("near-duplicate", "2.jpg")
        assert "looks like 1.jpg" in finding.message


def test_another_label_is_seen_behind_any_number_of_copies() -> None:
    rows: list[Row] = [(1, 1, "train", "a"), (2, 1, "train", "b"), (3, 1, "train", "b"), (4, 1, "train", "a")]
    found = told(rows)
    assert [(f.code, f.path) for f in found] == [("near-duplicate-other-label", f"{i}.jpg") for i in (1, 2, 3)]
    assert "looks like 1.jpg" in found[2].message  # which stands behind 0.jpg but for its label


def test_without_a_hash_or_a_split_there_is_nothing_to_say() -> None:
    assert codes([(1, 0, "train", "a"), (2, 0, "val", "a")]) == []
    assert codes([(1, 1, "train", "a"), (2, 1, None, "a")]) == []


# The command ------------------------------------------------------------------------------------------------------------------------------


def write(root: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return root


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    flat = np.full((90, 120, 3), 200, np.uint8)
    return write(
        tmp_path / "raw",
        {
            "test/cat/0.png": encoded(photo(1), ".png"),
            "test/dog/1.png": encoded(photo(2), ".png"),
            "train/cat/2.jpg": encoded(COPIES["half"](photo(1)), ".jpg"),  # a leak
            "train/cat/3.png": encoded(photo(3), ".png"),
            "train/cat/4.bmp": encoded(photo(4), ".bmp"),
            "train/cat/flat.png": encoded(flat, ".png"),
            "train/dog/5.webp": encoded(COPIES["brighter"](photo(3)), ".webp", cv2.IMWRITE_WEBP_QUALITY, 60),  # another label
            "train/dog/6.jpg": encoded(photo(5), ".jpg"),
            "train/dog/7.jpg": encoded(photo(5), ".jpg", cv2.IMWRITE_JPEG_QUALITY, 50),  # once more
            "train/dog/8.png": encoded(photo(2), ".png"),  # the same bytes
            "train/dog/flat.jpg": encoded(flat, ".jpg"),
        },
    )


NEAR = [
    ("near-duplicate-across-splits", "train/cat/2.jpg", "test/cat/0.png"),
    ("near-duplicate-other-label", "train/dog/5.webp", "train/cat/3.png"),
    ("near-duplicate", "train/dog/7.jpg", "train/dog/6.jpg"),
]


@pytest.mark.parametrize("transform", [{}, {"resize": "64x64"}], ids=["as it is", "resized"])
@pytest.mark.parametrize("output", [{"format": "tar"}, {"format": "tar", "image": "webp"}], ids=["keep", "webp"])
def test_check_names_copies(folder: Path, transform: dict[str, str], output: dict[str, str]) -> None:
    recipe = load_recipe(None, {"run": {"workers": 1}, "transform": transform, "output": output})
    found = list(check(folder, recipe, Recorder(), near_duplicates=True).findings or ())
    near = [f for f in found if f.code.startswith("near-")]
    assert [(f.code, f.path) for f in near] == [(code, path) for code, path, _ in NEAR]
    assert all(f"looks like {other} (" in f.message for f, (_, _, other) in zip(near, NEAR, strict=True))
    assert [f.path for f in found if f.code == "split-leak"] == ["train/dog/8.png"]


@pytest.mark.slow
def test_the_flag_as_text_and_json(folder: Path) -> None:
    done = pack("check", folder, "--near-duplicates", "--workers", 2)
    assert done.returncode == 0, done.stderr
    assert all(f"warning: {path}: looks like {other} (" in done.stderr and f"({code})" in done.stderr for code, path, other in NEAR)
    done = pack("check", folder, "--near-duplicates", "--json", "--workers", 1)
    found = [f for f in json.loads(done.stdout)["findings"] if f["code"].startswith("near-")]
    assert [(f["code"], f["path"], f["level"]) for f in found] == [(code, path, "warning") for code, path, _ in NEAR]


def test_nothing_is_compared_unless_asked_for(folder: Path) -> None:
    found = check(folder, load_recipe(None, {"run": {"workers": 1}}), Recorder()).findings or ()
    assert [f.code for f in found if f.code.startswith("near-")] == []


def test_a_copy_that_is_stored_turned_is_found(tmp_path: Path) -> None:
    """A camera stores pixels as they come and says how to turn them; what was saved upright is the same picture."""
    turned = encoded(np.ascontiguousarray(np.rot90(photo(1))), ".jpg")  # EXIF orientation 6: turn clockwise to see it
    exif = b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0"
    turned = turned[:2] + b"\xff\xe1" + (len(exif) + 2).to_bytes(2, "big") + exif + turned[2:]
    root = write(tmp_path / "raw", {"train/a/0.jpg": encoded(photo(1), ".jpg"), "val/a/1.jpg": turned})
    found = check(root, load_recipe(None, {"run": {"workers": 1}}), Recorder(), near_duplicates=True).findings or ()
    assert [(f.code, f.path) for f in found if f.code.startswith("near-")] == [("near-duplicate-across-splits", "val/a/1.jpg")]
