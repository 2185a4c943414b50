"""`ShardDataset`: random access to the samples of tar shards, through the index. Import it from `loaders.shards`.

Nothing is mapped but the index, no tar header is read, and no JSON is parsed except by `ShardDataset.meta`.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from loaders.cells import Grid, Reading, SubJpeg, SubJpegs, open_grid
from loaders.codecs import DecodeError, ImagePart, decode_image, decode_jpeg_into, decode_meta
from loaders.crops import dct_scale, decode_region, scaled_cut
from loaders.dataset import PackedDataset, SampleError, Wanted
from loaders.format import Layout
from loaders.handles import OpenFile, is_shortage, shortage
from loaders.jpeg import JpegError, JpegHeader, parse_header
from loaders.regions import Region, SampleDict, Size, View
from loaders.strips import LEAST_TOGETHER, MAX_PIXELS, decode_strips, decodes_strips, head_bytes

_MIN_BUFFER = 1 << 18
_WHOLE_BYTES = 1 << 17
"""A picture of no more is read in one go, though only some of its cells are needed: to copy 100 kB takes as long as a second call."""
_SAMPLES_AT_ONCE = 2048
_GROUP = 64
"""Small pictures that are read and decoded together: 192 kB of 32x32 stay in the caches."""
_READ_ALONG = 1 << 14
"""Bytes between two small pictures that are rather read along than skipped: a call costs more, above all where another thread takes the
GIL. Of pictures of 32x32, four batches of 512 at a time: 16.5 us a picture, with 4 KiB 18.5."""
_TOGETHER_BYTES = 1 << 26
"""Fewer pictures than usual are under way at a time where they are larger than this in all."""


class _Part(NamedTuple):
    """Where a sample's "image" or "json" (`name`) lies in its shard, in bytes; `height`, `width` of the image in pixels."""

    position: int
    name: str
    shard: int
    offset: int
    size: int
    crc32: int
    height: int
    width: int


class _Stored(NamedTuple):
    """A picture that is gathered: which row of the batch it goes to, and where its bytes are."""

    row: int
    shard: int
    offset: int
    size: int
    crc32: int


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
    restart grid only the cells that a transform's `region` needs are decoded, and read where it has over 128 KiB; of any other baseline
    JPEG no row below the region is decoded; what else there is, is decoded whole and cut: all with the same result.
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
        try:
            return bytes(self._image_part(self._index.position(index)))
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
        return self._decoded(position, self._image_part(position), None)

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

    def _begin_views(self, wanted: Sequence[Wanted]) -> list[Callable[[], View] | SampleError]:
        try:
            return self._begin_together(wanted)
        except (JpegError, SampleError) as e:
            if len(wanted) > 1:  # which of them is it?
                return [view for each in wanted for view in self._begin_views([each])]
            return [e if isinstance(e, SampleError) else self._error(wanted[0][0], f"the jpg {e}")]

    def _begin_together(self, wanted: Sequence[Wanted]) -> list[Callable[[], View] | SampleError]:
        """Of crop-decodable JPEGs the bytes are read, and ready for the decoder. Raises JpegError or SampleError, for any of them."""
        views: list[Callable[[], View] | SampleError] = [partial(self._whole_view, *each) for each in wanted]
        found = {number: cells for number, (position, _, _) in enumerate(wanted) if (cells := self._index.cells(position)) is not None}
        if not found:
            return views
        chosen = [wanted[number] for number in found]
        parts = self._parts([position for position, _, _ in chosen], "image")
        if len(wanted) > 1 and sum(part.size for part in parts) > _TOGETHER_BYTES:
            half = len(wanted) // 2
            return [*self._begin_together(wanted[:half]), *self._begin_together(wanted[half:])]
        # Each picture of a batch of small ones is read as a whole; all lie in memory that was used before.
        at_once = [part.size if part.size <= _WHOLE_BYTES or self.check_crc else 0 for part in parts]
        memory = self._scratch.blank((sum(at_once),), "pictures").data
        places = [memory[end - size : end] for size, end in zip(at_once, accumulate(at_once), strict=True)]
        opened = [self._open_grid(*each) for each in zip(parts, found.values(), places, strict=True)]
        jpegs = SubJpegs(
            [
                (grid, region, dct_scale(grid.header, region[2], region[3], size))
                for (grid, _), (_, region, size) in zip(opened, chosen, strict=True)
            ]
        )
        made = jpegs.assemble(self._scratch.blank((jpegs.num_bytes,), "cells").data, [source for _, source in opened])
        for number, (position, _, _), jpeg, data in zip(found, chosen, jpegs.parts, made, strict=True):
            views[number] = partial(self._cells_view, position, jpeg, data)
        return views

    def _open_grid(self, part: _Part, cells: NDArray[np.uint32], place: memoryview) -> tuple[Grid, memoryview | Reading]:
        """A picture's header and cells, and where its bytes come from. It is read into `place` where there is any. Raises JpegError."""
        if not 0 < (head_size := int(cells[0])) <= part.size:
            raise JpegError(f"has {part.size} bytes, the index says that its cells begin at byte {head_size}")
        source: memoryview | Reading
        if place:
            source = self._read_part(part, place)
            head: bytes | bytearray = bytes(source[:head_size])  # kept longer than the rest
        else:
            source = Reading(partial(self._read, part), partial(self._expect, part))
            head = bytearray(head_size)
            self._read(part, [memoryview(head)], 0, head_size)
        grid = open_grid(head, cells, part.size)
        found, size = (grid.header.height, grid.header.width), (part.height, part.width)
        if found != size:
            raise JpegError(f"says (height, width) {found}, the index says {size}")
        return grid, source

    def _cells_view(self, position: int, jpeg: SubJpeg, data: memoryview) -> View:
        try:
            return View(jpeg.decode(data, self._scratch.blank), jpeg.y, jpeg.x, jpeg.scale)
        except DecodeError as e:
            raise self._error(position, f"the jpg cannot be decoded: {e}") from None

    def _whole_view(self, position: int, region: Region, size: Size | None) -> View:
        return self._view_of(self._image_part(position), position, region, size)

    def _reads_regions(self, position: int) -> bool:
        return self._index.cells(position) is not None

    def _view_of(self, data: bytes | memoryview, position: int, region: Region, size: Size | None) -> View:
        """A region of an image without a grid of cells."""
        y, x = region[:2]
        header: JpegHeader | None = None
        if image_part(data) == "jpg":
            with suppress(JpegError):  # what is wrong with it, the decoder says
                header = parse_header(data)
        if header is None or (header.height, header.width) != self._size(position):
            return View(self._decoded(position, data, None)[scaled_cut(region, 1)], y, x, 1)
        scale = dct_scale(header, region[2], region[3], size)
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

    def _parts(self, positions: list[int], name: str) -> list[_Part]:
        """Where "image" or "json" of these samples lie. Refuses a row of a damaged index, before it asks for another shard's bytes, or for
        more memory than there is."""
        rows = self._index.rows(positions)
        columns = (rows[column].tolist() for column in ("shard", f"{name}_offset", f"{name}_size", f"{name}_crc32", "height", "width"))
        parts = [_Part(position, name, *values) for position, *values in zip(positions, *columns, strict=True)]
        for part, shard in zip(parts, self._index.shards_of(positions).tolist(), strict=True):
            end = part.offset + part.size
            if part.shard != shard or not 0 <= part.offset <= end <= self._index.shard_bytes[shard]:
                reason = f"the index says shard {part.shard}, bytes {part.offset} to {end}, which are not in it: the index is damaged"
                raise self._unreadable(part, reason)
        return parts

    def _image_part(self, position: int) -> memoryview:
        """A stored image, in this thread's buffer: valid until its next read."""
        [part] = self._parts([position], "image")
        return self._read_part(part, self._buffer("image", part.size))

    def _expect(self, part: _Part, offset: int, size: int) -> None:
        with suppress(OSError):  # a hint; what is wrong, reading says
            self._file(part.shard).will_need(part.offset + offset, size)

    def _read(self, part: _Part, views: list[memoryview], offset: int, size: int) -> None:
        """Fill the views with the `size` bytes of a part from `offset` on."""
        try:
            count = self._file(part.shard).read_scattered(views, part.offset + offset, size)
        except OSError as e:
            if is_shortage(e):
                raise shortage(e, self._index.shard_path(part.shard)) from None
            raise self._unreadable(part, e.strerror or str(e)) from None
        if count < size:
            end = part.offset + offset + size
            raise self._unreadable(
                part, f"the file ends {size - count} bytes short of the {part.name}'s end at byte {end}: it was cut short"
            )

    def _read_part(self, part: _Part, view: memoryview) -> memoryview:
        """Read a whole part into `view`, of its size."""
        self._read(part, [view], 0, part.size)
        if self.check_crc and zlib.crc32(view) != part.crc32:
            reason = f"the {part.name} has CRC-32 {zlib.crc32(view):08x}, the index says {part.crc32:08x}: its bytes were changed"
            raise self._unreadable(part, reason)
        return view

    def _unreadable(self, part: _Part, reason: str) -> SampleError:
        # The source's name is in the JSON: where that is what cannot be read, asking for it again would never end.
        return self._error(part.position, reason) if part.name == "image" else self._sample_error(part.position, "unknown", reason)

    def _read_meta(self, position: int) -> dict[str, Any]:
        [part] = self._parts([position], "json")
        data = bytes(self._read_part(part, self._buffer("json", part.size)))
        try:
            meta = decode_meta(data)
            affine = tuple(float(v) for v in meta["affine"])
            size = (int(meta["original_height"]), int(meta["original_width"]))
            return {"source": str(meta["source"]), "affine": affine, "original_size": size}
        except (DecodeError, KeyError, TypeError, ValueError) as e:
            raise self._sample_error(position, "unknown", f"the json part is not as the format says: {type(e).__name__}: {e}") from None

    def _private(self, image: NDArray[Any]) -> NDArray[Any]:
        return image  # decoded for this sample alone

    def batches_at_once(self, batch_size: int) -> int:
        """How many batches `BatchLoader` should gather by one call: several, of pictures so small that most of the time goes into calls.
        The samples of consecutive batches lie closer together in the file than those of one."""
        return max(1, _SAMPLES_AT_ONCE // batch_size) if self._is_small() else 1

    def _is_small(self) -> bool:
        size = self.image_size()
        return size is not None and math.prod(size) <= MAX_PIXELS

    def _gather_images(self, used: NDArray[np.int64], out: NDArray[Any]) -> None:
        size = self.image_size()
        if size is None or out.shape[1:] != (*size, 3) or out.dtype != np.uint8:
            have = "several sizes" if size is None else f"(height, width) {size}"
            raise ValueError(f"out['image'] is {out.dtype} {out.shape}, the stored images are uint8 of {have}")
        positions = self._index.positions(used)
        order = positions.argsort(kind="stable")
        positions = positions[order]
        rows, shards = self._index.rows(positions), self._index.shards_of(positions)
        offsets, sizes = rows["image_offset"], rows["image_size"].astype(np.int64)
        fits = (rows["shard"] == shards) & (offsets >= 0) & (offsets <= self._index.shard_bytes[shards] - sizes)
        columns = (order, shards, offsets, sizes, rows["image_crc32"])
        stored = [_Stored(*values) for values in zip(*(column[fits].tolist() for column in columns), strict=True)]
        failed: list[int] = order[~fits].tolist()
        count = _GROUP if self._is_small() and sizes.max(initial=0) <= _WHOLE_BYTES else 1
        for start in range(0, len(stored), count):
            failed += self._decode_group(stored[start : start + count], out)
        for row in sorted(failed):
            used[row], _ = self._with_replacement(int(used[row]), partial(self._read_into, out[row]))

    def _decode_group(self, group: list[_Stored], out: NDArray[np.uint8]) -> list[int]:
        """Decode JPEGs, at ascending places, into their rows of `out`; gives the rows of those that it could not. `_read_into` takes those,
        or says why not. What that does for each sample is done here for several: of a picture of 32x32 it is most of the work."""
        try:
            data, starts = self._read_group(group)
        except OSError:
            return [picture.row for picture in group]
        parts = {picture.row: data[start : start + picture.size] for start, picture in zip(starts, group, strict=True)}
        done: set[int] = set()
        together = len(group) >= LEAST_TOGETHER and decodes_strips()
        if together or self.check_crc:
            sound = [
                (picture.row, start, picture.size)
                for start, picture in zip(starts, group, strict=True)
                if zlib.crc32(parts[picture.row]) == picture.crc32
            ]
            if self.check_crc:
                parts = {row: parts[row] for row, _, _ in sound}
            if together:
                done = decode_strips(data, sound, out)
        done.update(row for row, part in parts.items() if row not in done and decode_jpeg_into(part, out[row]))
        return [picture.row for picture in group if picture.row not in done]

    def _read_group(self, group: list[_Stored]) -> tuple[memoryview, list[int]]:
        """Read the pictures, behind room for `decode_strips`, and say where each begins. Those that lie close together are read by one
        call, with what lies between them. Raises OSError."""
        stretches: list[tuple[int, int, int, int]] = []  # shard, first byte, end, place
        starts: list[int] = []
        shard, begin, end, place = group[0].shard, group[0].offset, group[0].offset, head_bytes(len(group))
        for picture in group:
            if picture.shard != shard or not 0 <= picture.offset - end <= _READ_ALONG:
                stretches.append((shard, begin, end, place))
                shard, begin, place = picture.shard, picture.offset, place + end - begin
            starts.append(place + picture.offset - begin)
            end = picture.offset + picture.size
        stretches.append((shard, begin, end, place))
        data = self._buffer("image", place + end - begin)
        for shard, begin, end, place in stretches:
            if self._file(shard).read_scattered([data[place : place + end - begin]], begin, end - begin) < end - begin:
                raise OSError("cut short")
        return data, starts

    def _read_into(self, slot: NDArray[np.uint8], index: int) -> None:
        position = self._index.position(index)
        self._decoded(position, self._image_part(position), slot)
