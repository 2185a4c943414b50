"""What a picture file is, told from its header: size, orientation, mode, and whether its bytes may be packed as they are.

`packer.images` is the public face of this module.
"""

from __future__ import annotations

import functools
import io
import struct
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

import cv2
from PIL import BmpImagePlugin, Image, TiffImagePlugin

from loaders.jpeg import JpegError, JpegHeader, parse_header
from packer.content import described
from packer.headers import (
    Chunk,
    HeaderError,
    ImageFormat,
    Orientation,
    gif_frames,
    png_chunks,
    sniff,
    tiff_orientation,
    tiff_pages,
    webp_chunks,
)

_SUFFIX: dict[ImageFormat, str] = {"jpeg": "jpg", "webp": "webp"}
_JPEG_MODES = {1: "L", 3: "RGB", 4: "CMYK"}
# (color type, bits) -> Pillow's mode
_PNG_MODES = {(0, 1): "1", (0, 2): "L", (0, 4): "L", (0, 8): "L", (0, 16): "I;16", (2, 8): "RGB", (2, 16): "RGB"}
_PNG_MODES |= {(3, 1): "P", (3, 2): "P", (3, 4): "P", (3, 8): "P", (4, 8): "LA", (4, 16): "LA", (6, 8): "RGBA", (6, 16): "RGBA"}
# Huffman-coded, 8 bits: baseline, extended, progressive. Arithmetic-coded files (C9, CA) are decoded, but few readers know them.
_COMMON_SOF, _ARITHMETIC_SOF = (0xC0, 0xC1, 0xC2), (0xC9, 0xCA)
# Sampling factors (luma, chroma) that TurboJPEG, behind simplejpeg and so behind our loaders, has a name for.
_TURBO_SAMPLING = {((1, 1), (1, 1)), ((2, 1), (1, 1)), ((2, 2), (1, 1)), ((1, 2), (1, 1)), ((4, 1), (1, 1))}
_TURBO_SAMPLING |= {((1, 2), (1, 2)), ((2, 1), (2, 1)), ((2, 2), (1, 2)), ((2, 2), (2, 1))}

_MAX_TILE_PIXELS = 1 << 24

P = ParamSpec("P")
R = TypeVar("R")


class ImageError(Exception):
    """A picture is refused. `code` is kebab-case and stable; the message lacks the file's name, which the caller puts in front."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class ImageInfo:
    """What a picture file's header says.

    `width`, `height`: pixels of the stored frame, before the EXIF orientation is applied. `orientation`: 1 to 8; 1 also where there
    is none or a senseless one. `mode`: Pillow's name. `bits` per channel. `frames`: more than 1 for an animation or a multi-page
    file. `verbatim`: the bytes may be packed as they are, as long as the pixels need no turning. `may_have_exif`: False where there is
    certainly no orientation tag.
    """

    format: ImageFormat
    width: int
    height: int
    orientation: int
    mode: str
    bits: int
    frames: int
    verbatim: bool
    may_have_exif: bool = True

    @property
    def suffix(self) -> str:
        """The image part that the picture is kept as: jpg, webp or png."""
        return _SUFFIX.get(self.format, "png")


def strict(function: Callable[P, R]) -> Callable[P, R]:
    """Turn any exception into an `ImageError`: decoders raise OSError, SyntaxError, ValueError, cv2.error and more.

    Only a lack of memory stays what it is.
    """

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except ImageError:
            raise
        except HeaderError as e:
            raise ImageError("truncated-image" if e.truncated else "corrupt-image", str(e)) from None
        except MemoryError:  # a fault of the machine now, not of the file: it must not be remembered as one
            raise
        except Exception as e:
            if isinstance(e, cv2.error) and e.code == cv2.Error.StsNoMem:
                raise MemoryError(str(e)) from None
            text = " ".join(str(e).split()) or type(e).__name__
            if text == "unknown pixel mode":  # Pillow, about a TIFF
                raise ImageError(
                    "unsupported-pixels", "has pixels of a kind that Pillow cannot read: convert it to 8 or 16 bits, gray or RGB"
                ) from None
            cut = any(word in text.lower() for word in ("truncated", "cut short", "premature end of jpeg file", "unexpected end"))
            raise ImageError("truncated-image" if cut else "corrupt-image", f"cannot be decoded: {text[:300]}") from None

    return wrapped


@contextmanager
def pillow_unguarded() -> Iterator[None]:
    """Pillow without its own pixel limit (ours was checked, and is settable) and without warnings about what we refuse or ignore.

    Both are global to the process: not for code that shares it with other users of Pillow. Packing has processes of its own.
    """
    limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        Image.MAX_IMAGE_PIXELS = limit


@strict
def probe(data: bytes, *, max_pixels: int) -> ImageInfo:
    """Read a picture file's header. `max_pixels`: width times height of the largest picture accepted, checked before any decoding.

    Raises:
        ImageError: `empty-file`, `unsupported-image`, `unsupported-pixels`, `image-too-large`, `truncated-image`, `corrupt-image`.
    """
    if not data:
        raise ImageError("empty-file", "is empty (0 bytes)")
    kind = sniff(data)
    if kind is None:
        raise ImageError("unsupported-image", f"is {described(data)}; JPEG, PNG, WebP, BMP, TIFF and GIF are packed")
    info = _PROBES[kind](data)
    pixels = info.width * info.height
    if info.width < 1 or info.height < 1:
        raise ImageError("corrupt-image", f"says {info.width}x{info.height} pixels")
    if pixels > max_pixels:
        raise ImageError("image-too-large", f"is {info.width}x{info.height} = {pixels} pixels, the limit is {max_pixels}")
    return info


@strict
def reset_orientation(data: bytes, info: ImageInfo) -> bytes:
    """The same JPEG, PNG or WebP file with its orientation tag set to 1 in place; only a PNG chunk's checksum changes with it."""
    found = _find_orientation(data, info.format) if info.may_have_exif else None
    if found is None or found.value == 1:
        return data
    data = found.reset(data)
    if info.format == "png":
        chunk = next(c for c in png_chunks(data) if c.name == b"eXIf")
        end = chunk.start + chunk.num_bytes
        data = data[:end] + struct.pack(">I", zlib.crc32(data[chunk.start - 4 : end])) + data[end + 4 :]
    return data


def jpeg_header(data: bytes) -> JpegHeader:
    try:
        return parse_header(data)
    except JpegError as e:
        raise HeaderError(str(e), truncated="cut short" in str(e)) from None


def turbo_reads(header: JpegHeader) -> bool:
    """Whether simplejpeg takes a JPEG of these sampling factors."""
    factors = [(c.horizontal, c.vertical) for c in header.components]
    if len(factors) == 4 and factors.pop() != factors[0]:  # black is sampled like luma
        return False
    return len(factors) == 1 or (len(factors) == 3 and factors[1] == factors[2] and (factors[0], factors[1]) in _TURBO_SAMPLING)


def _find_orientation(data: bytes, kind: ImageFormat) -> Orientation | None:
    if kind == "jpeg":
        return _exif_orientation(data, jpeg_header(data))
    if kind == "tiff":
        return tiff_orientation(data, 0, len(data))
    if kind in ("png", "webp"):
        chunks, name = (png_chunks(data), b"eXIf") if kind == "png" else (webp_chunks(data), b"EXIF")
        chunk = next((c for c in chunks if c.name == name), None)
        return tiff_orientation(data, chunk.start, chunk.start + chunk.num_bytes) if chunk else None
    return None


def _exif_orientation(data: bytes, header: JpegHeader) -> Orientation | None:
    start = header.exif_offset  # behind FF E1, two bytes of length (which count themselves) and "Exif\0\0"
    return tiff_orientation(data, start, start - 8 + int.from_bytes(data[start - 8 : start - 6], "big")) if start else None


def _value(found: Orientation | None) -> int:
    return found.value if found and 1 <= found.value <= 8 else 1


def _probe_jpeg(data: bytes) -> ImageInfo:
    header = jpeg_header(data)
    count = len(header.components)
    if header.sof not in _COMMON_SOF + _ARITHMETIC_SOF:
        raise ImageError(
            "unsupported-image",
            f"is a JPEG of a kind (SOF marker FF {header.sof:02X}: lossless or hierarchical) that no decoder here reads",
        )
    if header.precision != 8 or count not in _JPEG_MODES:
        raise ImageError(
            "unsupported-pixels", f"is a JPEG of {count} channels with {header.precision} bits; 1, 3 or 4 channels with 8 bits are packed"
        )
    verbatim = header.sof in _COMMON_SOF and count != 4 and turbo_reads(header)
    orientation, exif = _value(_exif_orientation(data, header)), header.exif_offset > 0
    return ImageInfo("jpeg", header.width, header.height, orientation, _JPEG_MODES[count], 8, 1, verbatim, exif)


def _probe_png(data: bytes) -> ImageInfo:
    chunks = png_chunks(data)
    if next(chunks) != Chunk(b"IHDR", 16, 13):
        raise HeaderError("does not begin with an IHDR chunk of 13 bytes")
    width, height, bits, color = struct.unpack_from(">IIBB", data, 16)
    mode = _PNG_MODES.get((color, bits))
    if mode is None:
        raise HeaderError(f"has color type {color} with {bits} bits, which no PNG may have")
    orientation, frames, transparent = 1, 1, False
    for chunk in chunks:
        if chunk.name == b"eXIf":
            orientation = _value(tiff_orientation(data, chunk.start, chunk.start + chunk.num_bytes))
        elif chunk.name == b"acTL" and chunk.num_bytes == 8:
            frames = max(1, int.from_bytes(data[chunk.start : chunk.start + 4], "big"))
        elif chunk.name == b"tRNS":
            transparent = True
    verbatim = bits == 8 and mode in ("L", "RGB") and not transparent and frames == 1
    return ImageInfo("png", width, height, orientation, mode, bits, frames, verbatim)


def _probe_webp(data: bytes) -> ImageInfo:
    width = height = frames = 0
    orientation, alpha = 1, False
    for chunk in webp_chunks(data):
        at = chunk.start
        if chunk.name == b"VP8X" and chunk.num_bytes >= 10:
            alpha = bool(data[at] & 0x10)
            width, height = (1 + int.from_bytes(data[p : p + 3], "little") for p in (at + 4, at + 7))
        elif chunk.name == b"VP8 " and not width and chunk.num_bytes >= 10:
            width, height = (v & 0x3FFF for v in struct.unpack_from("<HH", data, at + 6))
        elif chunk.name == b"VP8L" and chunk.num_bytes >= 5:
            (packed,) = struct.unpack_from("<I", data, at + 1)
            alpha |= bool(packed >> 28 & 1)
            if not width:
                width, height = 1 + (packed & 0x3FFF), 1 + (packed >> 14 & 0x3FFF)
        elif chunk.name == b"ANMF":
            frames += 1
        elif chunk.name == b"EXIF":
            orientation = _value(tiff_orientation(data, at, at + chunk.num_bytes))
    return ImageInfo("webp", width, height, orientation, "RGBA" if alpha else "RGB", 8, max(1, frames), not alpha and not frames)


def _probe_gif(data: bytes) -> ImageInfo:
    width, height = struct.unpack_from("<HH", data, 6)
    return ImageInfo("gif", width, height, 1, "P", 8, gif_frames(data), False)


def _probe_bmp(data: bytes) -> ImageInfo:
    with pillow_unguarded(), BmpImagePlugin.BmpImageFile(io.BytesIO(data)) as im:
        return ImageInfo("bmp", *im.size, 1, im.mode, 8, 1, False)


def _probe_tiff(data: bytes) -> ImageInfo:
    orientation = tiff_orientation(data, 0, len(data))
    # Pillow swaps width and height for a turned TIFF, and turns it when loading: hide the tag.
    upright = orientation.reset(data) if orientation else data
    with pillow_unguarded(), TiffImagePlugin.TiffImageFile(io.BytesIO(upright)) as im:
        if im.tag_v2.get(254, 0) & 1:  # as many raw files begin: Pillow would take the thumbnail for the picture
            raise ImageError(
                "unsupported-image", "is a TIFF whose first page is a reduced copy of another (a camera's raw file?): convert it"
            )
        _check_tiles(im)
        bits = im.tag_v2.get(258, (1,))
        return ImageInfo("tiff", *im.size, _value(orientation), im.mode, max(bits), tiff_pages(data), False)


def _check_tiles(im: TiffImagePlugin.TiffImageFile) -> None:
    """A tile is decoded as a whole, however small the picture is."""
    width, height = (im.tag_v2.get(tag, 0) for tag in (322, 323))
    if isinstance(width, int) and isinstance(height, int) and width * height > max(_MAX_TILE_PIXELS, 4 * im.size[0] * im.size[1]):
        raise ImageError("corrupt-image", f"has tiles of {width}x{height} pixels in a picture of {im.size[0]}x{im.size[1]}")


_PROBES: dict[ImageFormat, Callable[[bytes], ImageInfo]] = {
    "jpeg": _probe_jpeg,
    "png": _probe_png,
    "webp": _probe_webp,
    "gif": _probe_gif,
    "bmp": _probe_bmp,
    "tiff": _probe_tiff,
}
