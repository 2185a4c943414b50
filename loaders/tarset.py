"""`ShardDataset`: random access to the samples of tar shards, through the index. Import it from `loaders.shards`.

Nothing is mapped but the index, no tar header is read, and no JSON is parsed except by `ShardDataset.meta`.
"""

from __future__ import annotations

import zlib
from functools import partial
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from loaders.codecs import DecodeError, ImagePart, decode_image, decode_meta
from loaders.dataset import PackedDataset, SampleError
from loaders.format import Layout
from loaders.handles import OpenFile

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

    Image bytes are read with `os.preadv`, never mapped: a file that is cut short while training gives a `SampleError`.
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
            SampleError: it cannot be read, or `check_crc` finds a difference.
        """
        position = self._index.position(index)
        return bytes(self._read_part(position, self._index.samples[position], "image"))

    def decode(self, index: int, data: bytes) -> NDArray[np.uint8]:
        """What `encoded` gave to uint8 [H, W, 3] RGB.

        Raises:
            SampleError: it cannot be decoded, or has another size than the index says.
        """
        return self._decoded(self._index.position(index), data, None)

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

    def _read_part(self, position: int, row: np.void, part: str) -> memoryview:
        """Bytes of "image" or "json", in this thread's buffer: valid until its next read."""
        size, offset = int(row[f"{part}_size"]), int(row[f"{part}_offset"])
        buffer: bytearray = self._local.__dict__.get(part, b"")
        if len(buffer) < size:
            buffer = self._local.__dict__[part] = bytearray(max(_MIN_BUFFER, 1 << (size - 1).bit_length()))
        view = memoryview(buffer)[:size]
        shard = int(row["shard"])
        try:
            file: OpenFile = self._shards.get(shard, lambda: OpenFile(self._index.shard_path(shard)))
            count = file.read_into(view, offset)
        except (OSError, IndexError, OverflowError) as e:
            raise self._unreadable(position, part, getattr(e, "strerror", None) or str(e)) from None
        if count < size:
            reason = f"the file ends {size - count} bytes short of the {part}'s end at byte {offset + size}: it was cut short"
            raise self._unreadable(position, part, reason)
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
        for j, index in enumerate(used.tolist()):
            used[j], _ = self._with_replacement(index, partial(self._read_into, out[j]))

    def _read_into(self, slot: NDArray[np.uint8], index: int) -> None:
        position = self._index.position(index)
        self._decoded(position, self._read_part(position, self._index.samples[position], "image"), slot)
