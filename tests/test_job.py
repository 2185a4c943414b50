"""From one source item to one stored sample: which bytes are kept, which are made anew, and what is said about faults."""

from __future__ import annotations

import errno
import io
import os
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from PIL import Image, ImageOps

from image_data import exif, picture, png_chunk, png_of, save, tiff_of, webp_with_exif, with_exif
from loaders.codecs import decode_image
from loaders.jpeg import parse_header, restart_offsets
from packer.images import probe
from packer.job import (
    DIGEST_BYTES,
    Job,
    JobResult,
    Remarks,
    SampleFacts,
    Spec,
    annotation_digest,
    class_ids,
    make_sample,
    read_item,
    run_job,
)
from packer.sample import Annotation, Finding, Item, Listing, Report, Sample
from packer.transforms import Resize
from packer.writers.tar import read_samples

H, W = 40, 60
CLASSES = ("crack", "slag")
TAR = Spec("tar", "classification", CLASSES)
BOXES = Spec("tar", "detection", CLASSES)
PIXELS = picture(H, W)
JPEG = save(PIXELS, "JPEG", quality=92)
PNG = save(PIXELS, "PNG")
WEBP = save(PIXELS, "WEBP", lossless=True)


def boxes_of(*boxes: tuple[float, ...], size: tuple[int, int] | None = None, label: str = "crack") -> Annotation:
    n = len(boxes)
    return Annotation(
        "a.xml",
        boxes=np.array(boxes, np.float64).reshape(-1, 4),
        labels=[label] * n,
        difficult=np.arange(n, dtype=np.uint8) % 2,
        truncated=np.zeros(n, np.uint8),
        occluded=np.ones(n, np.uint8),
        size=size,
        places=[f"object {i + 1}" for i in range(n)],
    )


class Given:
    """A source that says what it is given; None is a sample that it leaves out."""

    kind = "given"

    def __init__(self, root: Path, said: dict[str, Annotation | None]) -> None:
        self.root, self.said, self.options = root, said, dict[str, Any]()

    def list(self, report: Report) -> Listing:
        raise NotImplementedError

    def annotate(self, item: Item, report: Report) -> Annotation | None:
        said = self.said[item.path]
        if said is None:
            report(Finding("skip", "bad-xml", "a.xml", "is broken", sample=item.path))
        return said


def put(root: Path, name: str, data: bytes) -> Item:
    (root / name).write_bytes(data)
    stat = (root / name).stat()
    return Item(name, "train", stat.st_size, stat.st_mtime_ns)


Made = tuple[Sample | None, list[Finding], SampleFacts]


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Made]:
    """Makes one sample of a file's bytes."""

    def make(data: bytes, spec: Spec = TAR, said: Annotation | None = None, *, encode: bool = True, name: str = "a.jpg") -> Made:
        item = put(tmp_path, name, data)
        said = Annotation(name, label="crack") if said is None else said
        findings: list[Finding] = []
        facts = SampleFacts()
        return make_sample(spec, tmp_path, 7, item, said, class_ids(spec), findings.append, facts, encode=encode), findings, facts

    return make


def made(result: Made) -> Sample:
    """The sample, made without a word."""
    sample, findings, _ = result
    assert findings == []
    assert sample is not None
    return sample


def pixels_of(sample: Sample) -> np.ndarray:
    """Decoded by OpenCV, which would apply an orientation, had it been left in the file."""
    assert sample.encoded is not None
    image = cv2.imdecode(np.frombuffer(sample.encoded, np.uint8), cv2.IMREAD_COLOR)
    assert image is not None
    assert image.shape == (sample.height, sample.width, 3)
    return np.asarray(image[:, :, ::-1])


def close_to(a: np.ndarray, b: np.ndarray, within: float = 4) -> bool:
    return a.shape == b.shape and float(np.abs(a.astype(int) - b.astype(int)).mean()) < within


# Kept byte for byte ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "suffix"),
    [
        (JPEG, "jpg"),
        (save(PIXELS[:, :, 0], "JPEG"), "jpg"),
        (save(PIXELS, "JPEG", progressive=True), "jpg"),
        (JPEG + b"bytes after the end", "jpg"),
        (with_exif(JPEG, exif(1)), "jpg"),
        (PNG, "png"),
        (save(PIXELS[:, :, 0], "PNG"), "png"),
        (WEBP, "webp"),
    ],
    ids=["jpeg", "gray-jpeg", "progressive", "trailing", "orientation-1", "png", "gray-png", "webp"],
)
@pytest.mark.parametrize("name", ["a.jpg", "a.png", "A.JPEG"])
def test_what_needs_no_change_is_stored_byte_for_byte_under_the_suffix_of_its_bytes(
    make: Callable[..., Made], data: bytes, suffix: str, name: str
) -> None:
    sample = made(make(data, name=name))
    assert sample.encoded == data
    assert (sample.suffix, sample.image) == (suffix, None)
    assert (sample.key, sample.source, sample.label) == (7, name, 0)
    assert (sample.width, sample.height, sample.original_width, sample.original_height) == (W, H, W, H)
    assert sample.affine == (1, 1, 0, 0)


def test_a_damaged_picture_is_not_kept(make: Callable[..., Made]) -> None:
    for data in (JPEG[: len(JPEG) // 2], PNG[:-30], WEBP[: len(WEBP) // 2], b"", b"no picture"):
        sample, findings, facts = make(data)
        assert sample is None
        assert [(f.level, f.path, f.sample) for f in findings] == [("skip", "a.jpg", "a.jpg")]
        assert facts.image_digest != bytes(DIGEST_BYTES) or not data


# Made anew ------------------------------------------------------------------------------------------------------------------------------

ALPHA = np.dstack([PIXELS, np.full((H, W), 9, np.uint8)])
LOSSLESS = {
    "alpha": save(ALPHA, "PNG"),
    "webp-alpha": save(ALPHA, "WEBP", lossless=True, exact=True),
    "bmp": save(PIXELS, "BMP"),
    "tiff": save(PIXELS, "TIFF"),
}


@pytest.mark.parametrize("kind", LOSSLESS)
def test_what_cannot_be_kept_becomes_an_rgb_png(make: Callable[..., Made], kind: str) -> None:
    sample = made(make(LOSSLESS[kind]))
    assert sample.suffix == "png"
    assert probe(sample.encoded or b"", max_pixels=10**6).mode == "RGB"
    np.testing.assert_array_equal(pixels_of(sample), PIXELS)


def test_a_cmyk_jpeg_becomes_an_rgb_jpeg(make: Callable[..., Made]) -> None:
    sample = made(make(save(Image.fromarray(PIXELS).convert("CMYK"), "JPEG", quality=95)))
    assert sample.suffix == "jpg"
    assert probe(sample.encoded or b"", max_pixels=10**6).mode == "RGB"
    assert close_to(pixels_of(sample), PIXELS)


DEEP = np.arange(H * W, dtype=np.uint16).reshape(H, W) * 25


def test_16_bits_become_8_by_one_rule_for_all(make: Callable[..., Made]) -> None:
    data = png_of(DEEP, color=0, bits=16)
    sample, _, facts = make(data)
    assert sample is not None
    assert sample.suffix == "png"
    np.testing.assert_array_equal(pixels_of(sample)[:, :, 0], np.floor(DEEP / 257 + 0.5))
    assert (facts.remarks.num_16bit, facts.remarks.max_16bit) == (1, int(DEEP.max()))
    ranged = made(make(data, replace(TAR, pixel_range=(0, 59975))))
    assert (pixels_of(ranged).min(), pixels_of(ranged).max()) == (0, 255)


def test_of_an_animation_the_first_frame_is_taken_and_said(make: Callable[..., Made]) -> None:
    frames = [Image.fromarray(picture(H, W, seed)) for seed in (0, 1, 2)]
    sample, findings, _ = make(save(frames[0], "GIF", save_all=True, append_images=frames[1:]))
    assert sample is not None
    assert sample.suffix == "png"
    assert [(f.level, f.code) for f in findings] == [("warning", "many-frames")]
    assert "3 frames" in findings[0].message


SOURCES = {
    "jpeg": JPEG,
    "gray": save(PIXELS[:, :, 0], "JPEG"),
    "png": PNG,
    "webp": WEBP,
    "bmp": save(PIXELS, "BMP"),
    "alpha": LOSSLESS["alpha"],
}


@pytest.mark.parametrize("image", ["jpg", "png", "webp"])
@pytest.mark.parametrize("kind", SOURCES)
def test_one_format_for_all(make: Callable[..., Made], kind: str, image: Any) -> None:
    sample = made(make(SOURCES[kind], replace(TAR, image=image, quality=95)))
    assert sample.suffix == image
    assert probe(sample.encoded or b"", max_pixels=10**6).suffix == image
    expected = np.dstack([PIXELS[:, :, 0]] * 3) if kind == "gray" else PIXELS
    assert close_to(pixels_of(sample), expected)
    # A PNG is lossless as it is; a JPEG is asked for with a quality and a grid, so it is always made anew.
    assert (sample.encoded == SOURCES[kind]) == (kind == image == "png")


@pytest.mark.parametrize("grid", [True, False])
def test_a_jpeg_made_anew_has_the_restart_grid_unless_told_otherwise(make: Callable[..., Made], grid: bool) -> None:
    data = save(picture(200, 300), "PNG")
    sample = made(make(data, replace(TAR, image="jpg", restart_grid=grid)))
    assert (len(restart_offsets(sample.encoded or b"")) > 0) == grid


@pytest.mark.parametrize(("subsampling", "luma"), [("420", (2, 2)), ("444", (1, 1))])
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_subsampling_of_a_jpeg_made_anew(make: Callable[..., Made], subsampling: Any, luma: tuple[int, int], mode: str) -> None:
    data = save(Image.fromarray(picture(70, 256)).convert(mode), "PNG")
    encoded = made(make(data, replace(TAR, image="jpg", quality=95, subsampling=subsampling))).encoded or b""
    header = parse_header(encoded)
    assert [(c.horizontal, c.vertical) for c in header.components] == [luma, (1, 1), (1, 1)]  # gray as three equal channels
    assert header.grid == ((5, 4) if subsampling == "420" else (9, 4))


def test_quality_counts(make: Callable[..., Made]) -> None:
    sizes = [len(made(make(PNG, replace(TAR, image="jpg", quality=q))).encoded or b"") for q in (30, 90)]
    assert sizes[0] < sizes[1]


@pytest.mark.parametrize(("data", "suffix"), [(JPEG, "jpg"), (PNG, "png"), (WEBP, "png"), (LOSSLESS["bmp"], "png")])
def test_resized_under_keep(make: Callable[..., Made], data: bytes, suffix: str) -> None:
    sample = made(make(data, replace(TAR, transform=Resize((30, 20), "stretch"))))
    assert (sample.suffix, sample.width, sample.height) == (suffix, 30, 20)
    assert (sample.original_width, sample.original_height) == (W, H)
    assert close_to(pixels_of(sample), cv2.resize(PIXELS, (30, 20), interpolation=cv2.INTER_AREA), within=15)  # chroma of 15x10


# Orientation ----------------------------------------------------------------------------------------------------------------------------


def with_orientation(kind: str, orientation: int, order: str = "<") -> bytes:
    block = exif(orientation, order)
    if kind == "jpeg":
        return with_exif(JPEG, block)
    if kind == "png":
        return png_of(PIXELS, color=2, bits=8, before=png_chunk(b"eXIf", block))
    if kind == "webp":
        return webp_with_exif(WEBP, block, W, H)
    return tiff_of(PIXELS, tags={274: orientation})


def upright_by_pillow(data: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(data)) as im:
        return np.asarray(ImageOps.exif_transpose(im).convert("RGB"))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["jpeg", "png", "webp", "tiff"])
@pytest.mark.parametrize("spec", [TAR, replace(TAR, image="png"), replace(TAR, layout="memmap")], ids=["keep", "png", "memmap"])
def test_every_picture_comes_out_upright(make: Callable[..., Made], kind: str, orientation: int, spec: Spec) -> None:
    data = with_orientation(kind, orientation)
    sample = made(make(data, spec))
    expected = upright_by_pillow(data)
    assert (sample.height, sample.width) == (sample.original_height, sample.original_width) == expected.shape[:2]
    image = sample.image if spec.layout == "memmap" else pixels_of(sample)
    assert image is not None
    if kind == "jpeg":
        assert close_to(image, expected)
    else:
        np.testing.assert_array_equal(image, expected)
    if sample.encoded is not None:
        assert probe(sample.encoded, max_pixels=10**6).orientation == 1


@pytest.mark.parametrize("orientation", range(2, 9))
@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("kind", ["jpeg", "png", "webp"])
def test_boxes_of_the_stored_frame_keep_the_pixels_and_the_tag_is_reset_in_place(
    make: Callable[..., Made], kind: str, orientation: int, order: str
) -> None:
    data = with_orientation(kind, orientation, order)
    box = (5.0, 6.0, 55.0, 30.0)
    sample = made(make(data, replace(BOXES, exif="ignore"), boxes_of(box, size=(W, H))))
    assert sample.encoded is not None
    assert len(sample.encoded) == len(data)
    changed = sum(a != b for a, b in zip(sample.encoded, data, strict=True))
    assert changed == 1 if kind != "png" else 1 <= changed <= 5  # a PNG chunk has a checksum
    info = probe(sample.encoded, max_pixels=10**6)
    assert (info.width, info.height, info.orientation) == (W, H, 1)
    np.testing.assert_array_equal(pixels_of(sample), decode_image(data, info.suffix))  # type: ignore[arg-type]  # a literal, said as str
    assert sample.boxes.tolist() == [list(box)]


@pytest.mark.parametrize("orientation", [5, 6, 7, 8])
@pytest.mark.parametrize(("size", "turned"), [((W, H), False), ((H, W), True)])
@pytest.mark.parametrize("layout", ["tar", "memmap"])
def test_the_size_that_is_declared_tells_whether_to_turn(
    make: Callable[..., Made], orientation: int, size: tuple[int, int], turned: bool, layout: Any
) -> None:
    """A white square under its box, wherever the picture is stored."""
    image = np.zeros((H, W, 3), np.uint8)
    image[8:16, 24:32] = 255
    upright = {
        5: np.transpose(image, (1, 0, 2)),
        6: np.rot90(image, -1),
        7: np.rot90(np.transpose(image, (1, 0, 2)), 2),
        8: np.rot90(image),
    }
    shown = upright[orientation] if turned else image
    ys, xs = np.nonzero(shown[:, :, 0])
    box = (float(xs.min()), float(ys.min()), float(xs.max() + 1), float(ys.max() + 1))
    data = with_exif(save(image, "JPEG", quality=100, subsampling=0), exif(orientation))
    sample = made(make(data, replace(BOXES, layout=layout), boxes_of(box, size=size)))
    assert (sample.width, sample.height) == (H, W) if turned else (W, H)
    assert sample.boxes.tolist() == [list(box)]
    stored = pixels_of(sample) if layout == "tar" else sample.image
    assert stored is not None
    assert close_to(stored, shown)


# Boxes and resizing ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["letterbox", "stretch", "short", "long"])
@pytest.mark.parametrize("layout", ["tar", "memmap"])
def test_boxes_follow_the_pixels_and_the_affine_maps_back(make: Callable[..., Made], mode: Any, layout: Any) -> None:
    said = boxes_of((10, 8, 30, 24), (0, 0, W, H), (59.5, 39.25, W, H))
    spec = replace(BOXES, layout=layout, transform=Resize(32 if mode in ("short", "long") else (32, 48), mode))
    sample = made(make(JPEG, spec, said))
    sx, sy, tx, ty = sample.affine
    back = (sample.boxes - [tx, ty, tx, ty]) / [sx, sy, sx, sy]
    np.testing.assert_allclose(back, said.boxes, atol=1e-3)
    assert (sample.boxes >= 0).all()
    assert (sample.boxes[:, 2:] <= [sample.width, sample.height]).all()
    assert sample.boxes.dtype == np.float32
    assert (sample.image is None) == (layout == "tar")


def test_flags_and_labels_follow_their_boxes_past_a_copy(make: Callable[..., Made]) -> None:
    said = boxes_of((1, 1, 9, 9), (1, 1, 9, 9), (2, 2, 9, 9), (3, 3, 9, 9))
    said.labels = ["slag", "slag", "crack", "slag"]
    said.truncated, said.occluded = np.array([0, 1, 1, 0], np.uint8), np.array([1, 0, 0, 1], np.uint8)
    said.extra = {"plant": "A"}
    sample, findings, _ = make(JPEG, BOXES, said)
    assert [f.code for f in findings] == ["duplicate-box"]
    assert sample is not None
    assert (sample.labels.tolist(), sample.labels.dtype) == ([1, 0, 1], np.int64)
    assert sample.difficult.tolist() == [0, 0, 1]
    assert sample.truncated.tolist() == [0, 1, 0]
    assert sample.occluded.tolist() == [1, 0, 1]
    assert (sample.label, sample.extra) == (-1, {"plant": "A"})


def test_no_boxes_make_a_sample_without_boxes(make: Callable[..., Made]) -> None:
    sample = made(make(JPEG, BOXES, boxes_of()))
    assert sample.boxes.shape == (0, 4)
    assert sample.labels.shape == (0,)


def test_remarks_of_boxes(make: Callable[..., Made]) -> None:
    _, _, facts = make(JPEG, BOXES, boxes_of((1, 3, W, 9), (5, 5, 9, H), (5, 6, 9, 9)))
    assert (facts.remarks.lowest, facts.remarks.num_at_edge) == (1, 2)
    _, _, facts = make(JPEG, BOXES, boxes_of())
    assert (facts.remarks.lowest, facts.remarks.num_at_edge) == (np.inf, 0)


# Left out -------------------------------------------------------------------------------------------------------------------------------


def test_annotation_and_picture_are_both_looked_at(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "src")
    folder.add("a", JPEG[:200], None)
    result = folder.run(TAR, None)
    assert [f.code for f in result.findings] == ["bad-xml", "truncated-image"]
    assert not result.digests[0, 1].any()
    assert not result.packed.any()


def test_all_that_is_wrong_with_one_sample_is_told(make: Callable[..., Made]) -> None:
    sample, findings, _ = make(JPEG[: len(JPEG) // 2], BOXES, boxes_of((5, 5, 99, 9), (9, 9, 5, 5), label="bolt"))
    assert sample is None
    assert {f.code for f in findings} == {"unknown-class", "empty-box", "box-outside", "truncated-image"}


@pytest.mark.parametrize("spec", [TAR, BOXES])
def test_an_unknown_class_leaves_the_sample_out(make: Callable[..., Made], spec: Spec) -> None:
    said = Annotation("a.xml", label="bolt") if spec is TAR else boxes_of((1, 1, 9, 9), label="bolt")
    sample, findings, _ = make(JPEG, spec, said)
    assert sample is None
    assert [(f.level, f.code, f.path, f.sample) for f in findings] == [("skip", "unknown-class", "a.xml", "a.jpg")]
    assert "'bolt'" in findings[0].message


def test_without_labels_there_is_no_unknown_class(make: Callable[..., Made]) -> None:
    assert made(make(JPEG, Spec("tar", "unlabelled", ()), Annotation("a.jpg"))).label == -1


def test_limits(make: Callable[..., Made]) -> None:
    for spec, code, number in (
        (replace(TAR, max_pixels=W * H - 1), "image-too-large", str(W * H)),
        (replace(TAR, max_file_bytes=len(JPEG) - 1), "file-too-large", str(len(JPEG))),
    ):
        sample, findings, _ = make(JPEG, spec)
        assert sample is None
        assert [(f.level, f.code) for f in findings] == [("skip", code)]
        assert number in findings[0].message
    made(make(JPEG, replace(TAR, max_pixels=W * H, max_file_bytes=len(JPEG))))


def read(root: Path, item: Item, limit: int = 10**6) -> tuple[bytes | None, list[Finding]]:
    findings: list[Finding] = []
    return read_item(root, item, limit, findings.append), findings


@pytest.mark.parametrize("change", ["longer", "shorter", "touched", "over the limit"])
def test_a_file_that_changed_while_packing_fails_the_build(tmp_path: Path, change: str) -> None:
    item = put(tmp_path, "a.jpg", JPEG)
    if change == "touched":
        os.utime(tmp_path / "a.jpg", ns=(1, 1))
    else:
        (tmp_path / "a.jpg").write_bytes({"longer": JPEG + b"x", "shorter": JPEG[:-1], "over the limit": JPEG + bytes(10**6)}[change])
        os.utime(tmp_path / "a.jpg", ns=(item.mtime_ns, item.mtime_ns))
    data, findings = read(tmp_path, item)
    assert data is None
    assert [(f.level, f.code, f.path) for f in findings] == [("error", "source-changed", "a.jpg")]
    assert "run the command again" in findings[0].message


def test_a_file_that_shrinks_while_it_is_read_fails_the_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    item = put(tmp_path, "a.jpg", JPEG)
    stat = (tmp_path / "a.jpg").stat()
    (tmp_path / "a.jpg").write_bytes(JPEG[:-1])
    monkeypatch.setattr(os, "fstat", lambda _: stat)
    data, findings = read(tmp_path, item)
    assert data is None
    assert [f.code for f in findings] == ["source-changed"]


def test_a_file_that_is_gone_or_no_file_is_named(tmp_path: Path) -> None:
    item = put(tmp_path, "a.jpg", JPEG)
    (tmp_path / "a.jpg").unlink()
    for message in ("No such file", "Is a directory"):
        data, findings = read(tmp_path, item)
        assert data is None
        assert [(f.level, f.code) for f in findings] == [("skip", "unreadable")]
        assert message in findings[0].message
        (tmp_path / "a.jpg").mkdir(exist_ok=True)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_is_named(tmp_path: Path) -> None:
    item = put(tmp_path, "a.jpg", JPEG)
    (tmp_path / "a.jpg").chmod(0)
    assert [f.code for f in read(tmp_path, item)[1]] == ["unreadable"]


@pytest.mark.parametrize("encode", [True, False])
def test_a_picture_that_its_format_cannot_hold_is_named_by_check_too(make: Callable[..., Made], encode: bool) -> None:
    wide = save(np.zeros((1, 20_000, 3), np.uint8), "PNG")
    sample, findings, _ = make(wide, replace(TAR, image="webp"), encode=encode)
    assert sample is None
    assert [(f.level, f.code) for f in findings] == [("skip", "not-encodable")]
    assert "20000x1" in findings[0].message
    sample, findings, _ = make(wide, replace(TAR, transform=Resize(5, "short")), encode=encode)
    assert sample is not None


@pytest.mark.parametrize("encode", [True, False])
def test_a_picture_that_would_become_too_large_is_named_by_check_too(make: Callable[..., Made], encode: bool) -> None:
    thin = save(np.zeros((1, 8_000, 3), np.uint8), "PNG")
    sample, findings, _ = make(thin, replace(TAR, transform=Resize(500, "short")), encode=encode)
    assert sample is None
    assert [f.code for f in findings] == ["resize-too-large"]


# Whole jobs -----------------------------------------------------------------------------------------------------------------------------


class Folder:
    """Files and what is said about them, and the job that packs them."""

    def __init__(self, root: Path) -> None:
        self.root, self.said, self.items = root, dict[str, Annotation | None](), list[Item]()
        root.mkdir()

    def add(self, name: str, data: bytes, said: Annotation | None) -> None:
        self.items.append(put(self.root, name, data))
        self.said[name] = said

    def run(self, spec: Spec, path: Path | None, ticks: list[int] | None = None) -> JobResult:
        job = Job(0, "train", tuple(range(10, 10 + len(self.items))), tuple(self.items))
        return run_job(spec, Given(self.root, self.said), job, path, (ticks if ticks is not None else []).append)


def label(name: str) -> Annotation:
    return Annotation(name, label="crack")


@pytest.fixture
def zoo(tmp_path: Path) -> Folder:
    """One of everything: good ones, and each fault that a job can meet."""
    folder = Folder(tmp_path / "src")
    for name, data in {
        **SOURCES,
        "cut": JPEG[:300],
        "deep": png_of(DEEP, color=0, bits=16),
        "wide": save(np.zeros((1, 20_000, 3), np.uint8), "PNG"),
    }.items():
        folder.add(f"{name}.jpg", data, boxes_of((5, 5, 9, 9), size=(W, H)) if name != "wide" else boxes_of())
    folder.add("no-xml.jpg", JPEG, None)
    folder.add("nothing.jpg", b"", None)
    folder.add("outside.jpg", JPEG, boxes_of((5, 5, 99, 9)))
    folder.add("bolt.jpg", JPEG, boxes_of((5, 5, 9, 9), label="bolt"))
    folder.add("copies.jpg", JPEG, boxes_of((5, 5, 9, 9), (5, 5, 9, 9)))
    folder.add("turned.jpg", with_orientation("jpeg", 6), boxes_of((5, 5, 9, 9)))
    folder.add("thin.jpg", save(np.zeros((1, 9_000, 3), np.uint8), "PNG"), boxes_of())
    folder.add("late.jpg", JPEG, boxes_of())
    (folder.root / "late.jpg").write_bytes(PNG)
    return folder


SPECS = {
    "keep": BOXES,
    "jpg": replace(BOXES, image="jpg"),
    "webp": replace(BOXES, image="webp"),
    "clip": replace(BOXES, boxes="clip", exif="ignore"),
    "resize": replace(BOXES, transform=Resize((32, 32))),
    "short": replace(BOXES, transform=Resize(500, "short")),
    "memmap": replace(BOXES, layout="memmap", transform=Resize((32, 32))),
    "unequal": replace(BOXES, layout="memmap"),
}


@pytest.mark.parametrize("spec", SPECS.values(), ids=list(SPECS))
def test_check_finds_what_packing_finds(zoo: Folder, tmp_path: Path, spec: Spec) -> None:
    built, checked = zoo.run(spec, tmp_path / "shard"), zoo.run(spec, None)
    assert len(built.findings) > 5
    assert checked.findings == built.findings
    assert checked.packed.tolist() == built.packed.tolist()
    assert checked.digests.tolist() == built.digests.tolist()
    assert checked.remarks == built.remarks
    assert checked.shard is None
    assert built.shard is not None
    assert len(built.shard.index.samples) == int(built.packed.sum())


def test_check_writes_nothing(zoo: Folder, tmp_path: Path) -> None:
    before = sorted(p.name for p in tmp_path.rglob("*"))
    zoo.run(BOXES, None)
    assert sorted(p.name for p in tmp_path.rglob("*")) == before


def test_every_item_is_packed_or_has_a_finding_and_every_good_one_keeps_its_key(zoo: Folder, tmp_path: Path) -> None:
    result = zoo.run(BOXES, tmp_path / "a.tar")
    left_out = {item.path for item, packed in zip(zoo.items, result.packed, strict=True) if not packed}
    assert left_out == {f.sample for f in result.findings if f.level != "warning"}
    assert left_out == {f"{n}.jpg" for n in ("cut", "no-xml", "nothing", "outside", "bolt", "late")}
    with (tmp_path / "a.tar").open("rb") as f:
        keys = [s.key for s in read_samples(f, (tmp_path / "a.tar").stat().st_size)]
    assert keys == [10 + i for i, packed in enumerate(result.packed) if packed]


def test_findings_do_not_depend_on_how_jobs_are_cut(zoo: Folder) -> None:
    whole = zoo.run(BOXES, None).findings
    items, parts = zoo.items, []
    for zoo.items in (items[:5], items[5:]):
        parts += zoo.run(BOXES, None).findings
    assert parts == whole


def test_digests_are_of_picture_and_annotation(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "src")
    for name, data, said in (("a", JPEG, label("a")), ("b", JPEG, label("b")), ("c", PNG, Annotation("c", label="slag")), ("d", PNG, None)):
        folder.add(name, data, said)
    d = folder.run(TAR, None).digests
    assert d.shape == (4, 2, DIGEST_BYTES)
    assert (d[0] == d[1]).all()
    assert (d[2, 0] == d[3, 0]).all()
    assert (d[0, 0] != d[2, 0]).any()
    assert (d[0, 1] != d[2, 1]).any()
    assert not d[3, 1].any()


def test_an_annotation_digest_depends_on_all_that_is_packed() -> None:
    base = boxes_of((1, 2, 3, 4), (5, 6, 7, 8))
    digests = {annotation_digest(base)}
    for change in (
        {"labels": ["crack", "slag"]},
        {"boxes": base.boxes + 1},
        {"boxes": base.boxes[:1]},
        {"difficult": base.difficult ^ 1},
        {"truncated": base.truncated ^ 1},
        {"occluded": base.occluded ^ 1},
        {"label": "crack"},
    ):
        digests.add(annotation_digest(replace(base, **change)))  # type: ignore[arg-type]  # fields by name
    assert len(digests) == 8
    assert annotation_digest(replace(base, path="elsewhere.xml", places=[])) in digests


def test_ticks_say_which_item_is_next_and_then_that_all_are_done(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "src")
    for name in "abc":
        folder.add(name, JPEG, label(name))
    ticks: list[int] = []
    folder.run(TAR, None, ticks)
    assert ticks == [0, 1, 2, 3]


def test_a_job_of_which_nothing_is_left_leaves_no_file(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "src")
    folder.add("a", b"", label("a"))
    for layout in ("tar", "memmap"):
        result = folder.run(replace(TAR, layout=layout), tmp_path / "shard")  # type: ignore[arg-type]  # a literal, said as str
        assert result.shard is None
        assert not (tmp_path / "shard").exists()


@pytest.mark.parametrize("layout", ["tar", "memmap"])
def test_a_fault_of_the_job_is_raised_and_no_file_is_left(tmp_path: Path, layout: Any) -> None:
    folder = Folder(tmp_path / "src")
    for name in "abc":
        folder.add(name, JPEG, label(name))

    def full(i: int) -> None:
        if i == 2:
            raise OSError(errno.ENOSPC, "No space left on device")

    job = Job(0, "train", (0, 1, 2), tuple(folder.items))
    with pytest.raises(OSError, match="No space left"):
        run_job(replace(TAR, layout=layout), Given(folder.root, folder.said), job, tmp_path / "shard", full)
    assert [p.name for p in tmp_path.iterdir()] == ["src"]


def test_a_memmap_of_unequal_images_remarks_two_and_packs_those_of_the_first_size(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "src")
    for name, (h, w) in {"a": (40, 60), "b": (40, 60), "c": (30, 60), "d": (20, 20), "e": (40, 60)}.items():
        folder.add(name, save(picture(h, w), "JPEG"), label(name))
    result = folder.run(replace(TAR, layout="memmap"), tmp_path / "shard")
    assert result.findings == []
    assert list(result.remarks.sizes.items()) == [("60x40", "a"), ("60x30", "c")]
    assert result.packed.tolist() == [True, True, False, False, True]
    assert folder.run(TAR, None).remarks.sizes == {}


def test_memmap_holds_the_decoded_pixels(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "src")
    for name, data in (("a", PNG), ("b", JPEG), ("c", save(PIXELS[:, :, 1], "PNG"))):
        folder.add(name, data, label(name))
    assert folder.run(replace(TAR, layout="memmap"), tmp_path / "shard").findings == []
    images = np.load(tmp_path / "shard" / "image.npy", mmap_mode="r")
    np.testing.assert_array_equal(images[0], PIXELS)
    np.testing.assert_array_equal(images[1], decode_image(JPEG, "jpg"))
    np.testing.assert_array_equal(images[2], np.dstack([PIXELS[:, :, 1]] * 3))


def test_remarks_count_what_was_packed_and_merge(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "src")
    deep = png_of(DEEP, color=0, bits=16)
    for name, data in (("a", JPEG), ("b", JPEG), ("c", PNG), ("d", deep), ("e", WEBP)):
        folder.add(name, data, boxes_of((1, 2, W, H)))
    folder.add("f", deep, None)
    remarks = folder.run(BOXES, None).remarks
    assert remarks == Remarks(1.0, 5, int(DEEP.max()), 1, {"jpg": 2, "png": 2, "webp": 1}, {"crack": 5})
    other = Remarks(0.5, 1, 9, 2, {"png": 1, "jpg": 1}, {"crack": 1, "slag": 1})
    other.merge(remarks)
    assert other == Remarks(0.5, 6, int(DEEP.max()), 3, {"png": 3, "jpg": 3, "webp": 1}, {"crack": 6, "slag": 1})


def test_the_index_has_the_checksum_of_what_is_stored(tmp_path: Path) -> None:
    """Also where the checksum of the source's bytes is known, and the stored ones differ from them by an orientation."""
    folder = Folder(tmp_path / "src")
    for name, data in (("a", JPEG), ("b", with_orientation("jpeg", 6)), ("c", with_orientation("png", 3)), ("d", LOSSLESS["bmp"])):
        folder.add(name, data, boxes_of((5, 5, 9, 9), size=(W, H)))
    shard = folder.run(replace(BOXES, exif="ignore"), tmp_path / "a.tar").shard
    assert shard is not None
    with (tmp_path / "a.tar").open("rb") as f:
        for sample, row in zip(read_samples(f, (tmp_path / "a.tar").stat().st_size), shard.index.samples, strict=True):
            (image,) = (data for part, (_, data) in sample.parts.items() if part != "json")
            assert zlib.crc32(image) == row["image_crc32"]


def test_the_same_job_gives_the_same_bytes(zoo: Folder, tmp_path: Path) -> None:
    shards = [zoo.run(replace(BOXES, image="jpg"), tmp_path / f"{i}.tar").shard for i in range(2)]
    assert shards[0] is not None
    assert shards[1] is not None
    assert shards[0].files == shards[1].files
    assert (tmp_path / "0.tar").read_bytes() == (tmp_path / "1.tar").read_bytes()
