"""`ShardDataset`: random access to the samples of tar shards, through the index. Import it from `loaders.shards`.

Nothing is mapped but the index, no tar header is read, and no JSON is parsed except by `ShardDataset.meta`.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from loaders.codecs import DecodeError, ImagePart, decode_image, decode_jpeg_into, decode_meta
from loaders.crops import Expect, Grid, Read, SubJpeg, dct_scale, decode_region, open_grid, reader, scaled_cut
from loaders.dataset import PackedDataset, SampleError
from loaders.format import Layout
from loaders.handles import OpenFile, is_shortage, shortage
from loaders.jpeg import JpegError, JpegHeader, parse_header
from loaders.regions import Region, SampleDict, Size, View

_MIN_BUFFER = 1 << 18


def image_part(data: bytes | memoryview) -> ImagePart | None:
    """Which of the format's image parts these bytes are ("jpg", "png" or "webp"), by their first bytes; None: none of them."""
    head = bytes(data[:12])
    if head.startswith(b"\xff\xd8\xff"):
        return "jpg"
    if head.startswith(b"\x89PNG\r\n\x1a\n"):
        return "png"
    return "webp" if head[:4] == b"RIFF" and head[8:] == b"WEBP" else None


class ShardDataset(PackedDataset):
    """One split of tar shards, by sample number. See `PackedDataset` for arguments, samples and errors.

    Image bytes are read with `os.preadv`, never mapped: a file that is cut short while training gives a `SampleError`, and so does one
    that has another size than the manifest says when it is opened. A deleted file that is open can still be read. Of a JPEG with a
    restart grid only the cells that a transform's `region` needs are read and decoded; of any other baseline JPEG no row below the
    region is decoded; what else there is, is decoded whole and cut: all with the same result.
    """

    layout: ClassVar[Layout] = "tar"

    @property
    def num_shards(self) -> int:
        """Shards of the split."""
        return self._index.num_shards

    def shard_range(self, shard: int) -> range:
        """Indices of a shard's samples (`shard` counts from 0) in the whole split."""
        return self._index.shard_range(shard)

    def encoded(self, index: int) -> bytes:
        """The stored image file of sample `index` (0-based, in range): JPEG, PNG or WebP.

        Raises:
            SampleError: it cannot be read, or `check_crc` finds a difference. Under ``on_error="replace"`` it is empty instead, and
                `load_encoded` finds another sample.
        """
        self._index.check_maps()
        position = self._index.position(index)
        try:
            return bytes(self._read_part(position, self._index.samples[position], "image"))
        except SampleError:
            if self.on_error == "raise":
                raise
            return b""

    def encoded_sizes(self, indices: range) -> list[int]:
        """Bytes of each stored image file of consecutive samples, as the index says."""
        positions = self._index.positions(np.arange(indices.start, indices.stop))
        sizes: list[int] = self._index.samples["image_size"][positions].tolist()
        return sizes

    def load_encoded(self, index: int, data: bytes, epoch: int | None = None) -> SampleDict:
        """`load` of what `encoded` gave: a whole, transformed sample. `index` must be in range.

        Raises:
            SampleError: it cannot be decoded, or has another size than the index says.
        """
        mine = self._index.position(index)

        def image(j: int) -> NDArray[Any]:
            position = self._index.position(j)
            return self._decoded(position, data, None) if data and position == mine else self._read_image(position)

        def view(position: int, region: Region, size: Size | None) -> View:
            return self._view_of(data, position, region, size) if data and position == mine else self._read_view(position, region, size)

        if self.transform is None:
            index, pixels = self._with_replacement(index, image)
            return {"image": pixels, **self._fields(index)}
        return self._transformed(self.transform, index, epoch, view)

    def _read_image(self, position: int) -> NDArray[Any]:
        return self._decoded(position, self._read_part(position, self._index.samples[position], "image"), None)

    def _decoded(self, position: int, data: bytes | memoryview, out: NDArray[np.uint8] | None) -> NDArray[np.uint8]:
        part = image_part(data)
        if part is None:
            raise self._error(position, f"the image is neither JPEG, PNG nor WebP: it begins with {bytes(data[:8])!r}")
        try:
            image = decode_image(data, part, out)
        except DecodeError as e:
            raise self._error(position, f"the {part} cannot be decoded: {e}") from None
        row = self._index.samples[position]
        size = (int(row["height"]), int(row["width"]), 3)
        if image.shape != size:
            raise self._error(position, f"the {part} is decoded to (height, width, channels) {image.shape}, the index says {size}")
        return image

    def _read_view(self, position: int, region: Region, size: Size | None) -> View:
        return self._begin_view(position, region, size)()

    def _begin_view(self, position: int, region: Region, size: Size | None) -> Callable[[], View]:
        row = self._index.samples[position]
        cells = self._index.cells(position)
        if cells is None:
            return lambda: self._view_of(self._read_part(position, row, "image"), position, region, size)
        self._check_row(position, row, "image")
        num_bytes = int(row["image_size"])
        try:
            if not 0 < (head_size := int(cells[0])) <= num_bytes:
                raise JpegError(f"has {num_bytes} bytes, the index says that its cells begin at byte {head_size}")
            if self.check_crc:
                data = self._read_part(position, row, "image")
                return self._cells(position, open_grid(data[:head_size], cells, num_bytes), region, size, reader(data))
            head = self._buffer("head", head_size)
            read, expect = partial(self._read, position, row, "image"), partial(self._expect, row)
            read([head], 0, head_size)
            return self._cells(position, open_grid(head, cells, num_bytes), region, size, read, expect)
        except JpegError as e:
            raise self._error(position, f"the jpg {e}") from None

    def _reads_regions(self, position: int) -> bool:
        return self._index.cells(position) is not None

    def _cells(
        self, position: int, grid: Grid, region: Region, size: Size | None, read: Read, expect: Expect | None = None
    ) -> Callable[[], View]:
        """A region of a crop-decodable JPEG, read, and still to be decoded. Raises JpegError."""
        header = grid.header
        if (header.height, header.width) != self._size(position):
            raise JpegError(f"says (height, width) {(header.height, header.width)}, the index says {self._size(position)}")
        scale = 1 if size is None else dct_scale(header, region[2], region[3], size)
        jpeg = SubJpeg(grid, region, scale)
        data = np.empty(jpeg.num_bytes, np.uint8).data
        jpeg.assemble(data, read, expect)

        def decode() -> View:
            try:
                return View(jpeg.decode(data, self._scratch.blank), jpeg.y, jpeg.x, scale)
            except DecodeError as e:
                raise self._error(position, f"the jpg cannot be decoded: {e}") from None

        return decode

    def _view_of(self, data: bytes | memoryview, position: int, region: Region, size: Size | None) -> View:
        """A region of an image without a grid of cells."""
        y, x = region[:2]
        header: JpegHeader | None = None
        if image_part(data) == "jpg":
            with suppress(JpegError):  # what is wrong with it, the decoder says
                header = parse_header(data)
        if header is None or (header.height, header.width) != self._size(position):
            return View(self._decoded(position, data, None)[scaled_cut(region, 1)], y, x, 1)
        scale = 1 if size is None else dct_scale(header, region[2], region[3], size)
        try:
            image = decode_region(data, header, region, scale, self._scratch.blank)
        except DecodeError as e:
            raise self._error(position, f"the jpg cannot be decoded: {e}") from None
        return View(image, y - y % scale, x - x % scale, scale)

    def _buffer(self, name: str, size: int) -> memoryview:
        """Memory of this thread: valid until it asks for `name` again."""
        buffer: bytearray = self._local.__dict__.get(name, b"")
        if len(buffer) < size:
            buffer = self._local.__dict__[name] = bytearray(max(_MIN_BUFFER, 1 << (size - 1).bit_length()))
        return memoryview(buffer)[:size]

    def _file(self, shard: int) -> OpenFile:
        return self._open_shard(shard, lambda: self._opened(shard))

    def _opened(self, shard: int) -> OpenFile:
        file, expected = OpenFile(self._index.shard_path(shard)), int(self._index.shard_bytes[shard])
        if file.size != expected:
            raise OSError(f"the file has {file.size} bytes, the manifest says {expected}: it was cut short or replaced")
        return file

    def _expect(self, row: np.void, offset: int, size: int) -> None:
        with suppress(OSError):  # a hint; what is wrong, reading says
            self._file(int(row["shard"])).will_need(int(row["image_offset"]) + offset, size)

    def _read(self, position: int, row: np.void, part: str, views: list[memoryview], offset: int, size: int) -> None:
        """Fill the views with the `size` bytes of "image" or "json" from `offset` on."""
        shard, offset = int(row["shard"]), offset + int(row[f"{part}_offset"])
        try:
            count = self._file(shard).read_scattered(views, offset, size)
        except OSError as e:
            if is_shortage(e):
                raise shortage(e, self._index.shard_path(shard)) from None
            raise self._unreadable(position, part, e.strerror or str(e)) from None
        if count < size:
            reason = f"the file ends {size - count} bytes short of the {part}'s end at byte {offset + size}: it was cut short"
            raise self._unreadable(position, part, reason)

    def _check_row(self, position: int, row: np.void, part: str) -> None:
        """Refuse a row of a damaged index, before it asks for another shard's bytes, or for more memory than there is."""
        shard, offset, size = int(row["shard"]), int(row[f"{part}_offset"]), int(row[f"{part}_size"])
        if shard != self._index.shard_of(position) or not 0 <= offset <= offset + size <= self._index.shard_bytes[shard]:
            reason = f"the index says shard {shard}, bytes {offset} to {offset + size}, which are not in it: the index is damaged"
            raise self._unreadable(position, part, reason)

    def _read_part(self, position: int, row: np.void, part: str) -> memoryview:
        """Bytes of "image" or "json", in this thread's buffer: valid until its next read."""
        self._check_row(position, row, part)
        view = self._buffer(part, int(row[f"{part}_size"]))
        self._read(position, row, part, [view], 0, len(view))
        if self.check_crc and zlib.crc32(view) != int(row[f"{part}_crc32"]):
            reason = f"the {part} has CRC-32 {zlib.crc32(view):08x}, the index says {int(row[f'{part}_crc32']):08x}: its bytes were changed"
            raise self._unreadable(position, part, reason)
        return view

    def _unreadable(self, position: int, part: str, reason: str) -> SampleError:
        # The source's name is in the JSON: where that is what cannot be read, asking for it again would never end.
        return self._error(position, reason) if part == "image" else self._sample_error(position, "unknown", reason)

    def _read_meta(self, position: int) -> dict[str, Any]:
        data = bytes(self._read_part(position, self._index.samples[position], "json"))
        try:
            meta = decode_meta(data)
            affine = tuple(float(v) for v in meta["affine"])
            size = (int(meta["original_height"]), int(meta["original_width"]))
            return {"source": str(meta["source"]), "affine": affine, "original_size": size}
        except (DecodeError, KeyError, TypeError, ValueError) as e:
            raise self._sample_error(position, "unknown", f"the json part is not as the format says: {type(e).__name__}: {e}") from None

    def _private(self, image: NDArray[Any]) -> NDArray[Any]:
        return image  # decoded for this sample alone

    def _gather_images(self, used: NDArray[np.int64], out: NDArray[Any]) -> None:
        size = self.image_size()
        if size is None or out.shape[1:] != (*size, 3) or out.dtype != np.uint8:
            have = "several sizes" if size is None else f"(height, width) {size}"
            raise ValueError(f"out['image'] is {out.dtype} {out.shape}, the stored images are uint8 of {have}")
        positions = self._index.positions(used)
        for shard, first, last in self._index.runs(positions):
            for j in self._gather_run(shard, positions[first:last], out[first:last]):
                used[first + j], _ = self._with_replacement(int(used[first + j]), partial(self._read_into, out[first + j]))

    def _gather_run(self, shard: int, positions: NDArray[np.int64], out: NDArray[np.uint8]) -> list[int]:
        """Decode JPEGs of one shard into `out`; gives the places of those that it could not. `_read_into` takes those, or says why not.

        What `_read_into` does for each sample is done here for all at once: of a picture of 32x32 that is nearly half the work.
        """
        rows = self._index.samples[positions]
        offsets, sizes = rows["image_offset"], rows["image_size"].astype(np.int64)
        fits = (rows["shard"] == shard) & (offsets >= 0) & (offsets <= self._index.shard_bytes[shard] - sizes)
        try:
            file = self._file(shard)
        except OSError:
            return list(range(len(positions)))
        buffer = self._buffer("image", int(sizes.max(where=fits, initial=0)))
        columns = (fits, offsets, sizes, rows["image_crc32"])
        return [
            place
            for place, (fit, offset, size, crc32) in enumerate(zip(*(column.tolist() for column in columns), strict=True))
            if not (fit and self._decodes(file, offset, buffer[:size], crc32, out[place]))
        ]

    def _decodes(self, file: OpenFile, offset: int, data: memoryview, crc32: int, slot: NDArray[np.uint8]) -> bool:
        try:
            if file.read_scattered([data], offset, len(data)) < len(data):
                return False
        except OSError:
            return False
        return (not self.check_crc or zlib.crc32(data) == crc32) and decode_jpeg_into(data, slot)

    def _read_into(self, slot: NDArray[np.uint8], index: int) -> None:
        position = self._index.position(index)
        self._decoded(position, self._read_part(position, self._index.samples[position], "image"), slot)
