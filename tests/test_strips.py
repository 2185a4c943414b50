"""Several small JPEGs decoded by one call: the same pixels as one by one, and nothing that does not belong there."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from image_data import picture
from loaders import strips, tarset
from loaders.batches import BatchLoader
from loaders.codecs import decode_image, encode_image
from loaders.dataset import SampleError
from loaders.shards import ShardDataset
from loaders.strips import decode_strips, decodes_strips, head_bytes
from packed_data import write_packed

SAMPLINGS = ("444", "422", "420", "440", "411")


def laid_out(encoded: list[bytes], rows: list[int], junk: int) -> tuple[memoryview, list[tuple[int, int, int]]]:
    """What `decode_strips` takes."""
    data, pictures = bytearray(head_bytes(len(encoded))), []
    for row, part in zip(rows, encoded, strict=True):
        pictures.append((row, len(data), len(part)))
        data += part + bytes(range(256))[:junk]
    return memoryview(data), pictures


def saved(height: int, width: int, seed: int = 0, mode: str = "RGB", **options: Any) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(picture(height, width, seed)).convert(mode).save(buffer, "JPEG", **options)
    return buffer.getvalue()


def test_this_opencv_decodes_strips() -> None:
    assert decodes_strips()  # all else here would be empty


@settings(deadline=None, max_examples=60)
@given(
    height=st.integers(1, 48),
    width=st.integers(1, 48),
    sampling=st.sampled_from(SAMPLINGS),
    qualities=st.lists(st.integers(1, 100), min_size=8, max_size=20),
    grid=st.booleans(),
    junk=st.integers(0, 40),
    seed=st.integers(0, 1000),
)
def test_pixels_are_those_of_one_at_a_time(
    height: int, width: int, sampling: Any, qualities: list[int], grid: bool, junk: int, seed: int
) -> None:
    noise = np.random.default_rng(seed).integers(0, 128, (height, width, 3), dtype=np.uint8)
    encoded = [
        encode_image(picture(height, width, n) // 2 + noise, "jpg", quality=q, restart_grid=grid, subsampling=sampling)
        for n, q in enumerate(qualities)
    ]
    rows = np.random.default_rng(seed).permutation(len(encoded) + 2)[: len(encoded)].tolist()
    out = np.full((len(encoded) + 2, height, width, 3), 7, np.uint8)
    data, pictures = laid_out(encoded, rows, junk)
    assert decode_strips(data, pictures, out) == set(rows)
    for row, part in zip(rows, encoded, strict=True):
        np.testing.assert_array_equal(out[row], decode_image(part, "jpg"))
    assert all((out[row] == 7).all() for row in set(range(len(out))) - set(rows))


def without(data: bytes, *markers: int) -> bytes:
    """The JPEG less its segments with these markers."""
    pos, kept = 2, [data[:2]]
    while data[pos + 1] != 0xDA:
        end = pos + 2 + int.from_bytes(data[pos + 2 : pos + 4], "big")
        kept.append(b"" if data[pos + 1] in markers else data[pos:end])
        pos = end
    return b"".join([*kept, data[pos:]])


def decoy() -> bytes:
    """A comment where others have their frame header, with the same bytes; the real one says another size."""
    like, real = saved(20, 24), saved(16, 24)
    place, own = (data.index(b"\xff\xc0") for data in (like, real))
    frame = like[place : place + 19]
    return real[:own][: place - 4] + b"\xff\xfe" + (2 + len(frame)).to_bytes(2, "big") + frame + real[own:]


def sampled(chroma: int) -> bytes:
    """Chroma that says other sampling factors; what comes of it nobody knows."""
    data = bytearray(saved(20, 24))
    data[data.index(b"\xff\xc0") + 14] = chroma
    return bytes(data)


ODD: dict[str, bytes] = {
    "gray": saved(20, 24, mode="L"),
    "cmyk": saved(20, 24, mode="CMYK"),
    "stored as RGB": saved(20, 24, keep_rgb=True),
    "progressive": saved(20, 24, progressive=True),
    "subsampling": saved(20, 24, subsampling=0),
    "turned": saved(24, 20),
    "lower": saved(19, 24),
    "higher": saved(40, 24),
    "narrower": saved(20, 23),
    "no Huffman tables": without(saved(20, 24), 0xC4),
    "no quantisers": without(saved(20, 24), 0xDB),
    "decoy": decoy(),
    "sampling": sampled(0x12),
    "no end": saved(20, 24)[:-2],
    "more after the end": saved(20, 24) + b"\0",
    "fill bytes": saved(20, 24).replace(b"\xff\xc0", b"\xff\xff\xc0"),
    "png": encode_image(picture(20, 24), "png"),
    "cut in its header": saved(20, 24)[:100],
    "begins only": b"\xff\xd8\xff\xe0\x00\x10JFIF\x00",
    "nothing": b"",
}


@pytest.mark.parametrize("place", [0, 5, 9])
@pytest.mark.parametrize("name", ODD)
def test_odd_pictures_are_left_to_others(name: str, place: int) -> None:
    encoded = [saved(20, 24, seed, optimize=seed % 2 > 0) for seed in range(9)]
    encoded.insert(place, ODD[name])
    out = np.zeros((10, 20, 24, 3), np.uint8)
    done = decode_strips(*laid_out(encoded, list(range(10)), 5), out)
    # The first one that fits says which subsampling the others have.
    assert done == (set() if (name, place) == ("subsampling", 0) else set(range(10)) - {place})
    for row in done:
        np.testing.assert_array_equal(out[row], decode_image(encoded[row], "jpg"))


def test_what_other_encoders_write_is_decoded_together() -> None:
    """Comments, EXIF, a profile, restart markers, one segment for all tables."""
    plain = saved(20, 24)
    segments = [
        plain[i : i + 2 + int.from_bytes(plain[i + 2 : i + 4], "big")] for i in range(len(plain)) if plain[i : i + 2] == b"\xff\xc4"
    ]
    tables = b"".join(segment[4:] for segment in segments)
    merged = without(plain, 0xC4).replace(b"\xff\xda", b"\xff\xc4" + (2 + len(tables)).to_bytes(2, "big") + tables + b"\xff\xda", 1)
    exif = Image.Exif()
    exif[0x010E] = "weld"
    encoded = [plain, merged, saved(20, 24, 3, comment=b"seam"), saved(20, 24, 4, exif=exif), saved(20, 24, 5, icc_profile=bytes(300))]
    encoded += [encode_image(picture(20, 24, 6), "jpg"), saved(20, 24, 7, optimize=True), saved(20, 24, 8, quality=20)]
    out = np.zeros((len(encoded), 20, 24, 3), np.uint8)
    assert len(decode_strips(*laid_out(encoded, list(range(len(encoded))), 1), out)) == len(encoded)
    for row, part in enumerate(encoded):
        np.testing.assert_array_equal(out[row], decode_image(part, "jpg"))


def test_few_pictures_are_not_worth_it() -> None:
    encoded = [saved(20, 24, seed) for seed in range(strips.LEAST_TOGETHER - 1)]
    out = np.zeros((len(encoded), 20, 24, 3), np.uint8)
    assert not decode_strips(*laid_out(encoded, list(range(len(encoded))), 0), out)


def test_a_refusal_of_libtiff_leaves_all(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = [saved(20, 24, seed) for seed in range(9)]
    monkeypatch.setattr(cv2, "imdecode", lambda *_: None)
    assert not decode_strips(*laid_out(encoded, list(range(9)), 0), np.zeros((9, 20, 24, 3), np.uint8))


class Counted:
    """`decode_strips`, and the rows that it filled."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: list[set[int]] = []
        monkeypatch.setattr(tarset, "decode_strips", self)

    def __call__(self, data: memoryview, pictures: list[tuple[int, int, int]], out: NDArray[np.uint8]) -> set[int]:
        done = decode_strips(data, pictures, out)
        self.rows.append(set(done))
        return done


@pytest.mark.parametrize("together", [True, False])
def test_a_gathered_batch_is_the_same_with_and_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, together: bool) -> None:
    packed = write_packed(tmp_path / "out", counts=(40, 3, 50, 27), parts=("jpg",) * 7 + ("png",))
    counted = Counted(monkeypatch)
    if not together:
        monkeypatch.setattr(tarset, "decodes_strips", lambda: False)
    ds = ShardDataset(packed.root)
    order = np.random.default_rng(0).integers(0, 120, 192)
    out = np.zeros((192, 12, 16, 3), np.uint8)
    assert ds.gather(order, {"image": out}).tolist() == order.tolist()
    for row, index in enumerate(order.tolist()):
        np.testing.assert_array_equal(out[row], packed.images[index])
    jpegs = int((order % 8 != 7).sum())
    assert sum(map(len, counted.rows)) == (jpegs if together else 0)  # repeats too


def test_changed_bytes_are_never_decoded_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """libtiff would take them without a word."""
    packed = write_packed(tmp_path / "out", counts=(30,))
    rows = np.load(packed.root / "index/train/samples.npy")
    path = next((packed.root / "train").glob("*.tar"))
    data = bytearray(path.read_bytes())
    cut, harmless = 11, 17
    end = int(rows["image_offset"][cut] + rows["image_size"][cut])
    data[end - 60 : end] = bytes(60)
    data[int(rows["image_offset"][harmless]) + 14] ^= 1  # a density that nobody looks at
    path.write_bytes(data)
    counted = Counted(monkeypatch)
    slots = np.zeros((30, 12, 16, 3), np.uint8)
    with pytest.raises(SampleError, match=rf"sample {packed.keys[cut]:09d}"):
        ShardDataset(packed.root).gather(range(30), {"image": slots})
    with pytest.warns(UserWarning, match="was replaced"):
        used = ShardDataset(packed.root, on_error="replace").gather(range(30), {"image": slots})
    assert used.tolist() == [cut + 1 if n == cut else n for n in range(30)]
    for row, n in enumerate(used.tolist()):
        np.testing.assert_array_equal(slots[row], packed.images[n])
    assert counted.rows == [set(range(30)) - {cut, harmless}] * 2
    with pytest.warns(UserWarning, match="was replaced"):
        used = ShardDataset(packed.root, on_error="replace", check_crc=True).gather(range(30), {"image": slots})
    assert used.tolist() == [n + 1 if n in (cut, harmless) else n for n in range(30)]


def test_small_pictures_are_gathered_several_batches_at_a_time(tmp_path: Path) -> None:
    small = ShardDataset(write_packed(tmp_path / "small", counts=(20, 20)).root)
    assert [small.batches_at_once(n) for n in (1, 64, 512, 4096, 5000)] == [2048, 32, 4, 1, 1]
    large = ShardDataset(write_packed(tmp_path / "large", sizes=((48, 49),)).root)
    assert large.batches_at_once(64) == 1
    mixed = ShardDataset(write_packed(tmp_path / "mixed", sizes=((12, 16), (16, 12))).root)
    assert mixed.batches_at_once(64) == 1


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_every_thread_has_its_part_of_a_short_epoch(tmp_path: Path, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = write_packed(tmp_path / "out", counts=(60, 60))
    ds = ShardDataset(packed.root)
    sizes: list[int] = []
    gather = ds.gather

    def counted(indices: Any, out: Any) -> Any:
        sizes.append(len(indices))
        return gather(indices, out)

    monkeypatch.setattr(ds, "gather", counted)
    with BatchLoader(ds, batch_size=10, workers=workers) as loader:
        seen = [int(i) for batch in loader for i in batch["index"]]
    assert sorted(seen) == list(range(120))
    assert len(sizes) == max(2 * workers, 2)


def test_an_opencv_that_decodes_no_strips_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong: list[Any] = [lambda *_: None, lambda *_: np.zeros((8 * 16, 24, 3), np.uint8), lambda *_: np.zeros((1, 1, 3), np.uint8)]

    def fails(*_: Any) -> Any:
        raise cv2.error("no codec")

    for imdecode in (*wrong, fails):
        strips.decodes_strips.cache_clear()
        monkeypatch.setattr(cv2, "imdecode", imdecode)
        assert not strips.decodes_strips()
    monkeypatch.undo()
    strips.decodes_strips.cache_clear()
    assert strips.decodes_strips()
