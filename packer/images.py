"""Strict probing and decoding of untrusted picture files.

Whatever is wrong with a file, and whatever a decoder raises about it, comes out as `ImageError`. Formats are told by their bytes,
never by their names.

Rules for pixels: gray becomes three equal channels; 1-bit white is 255; palettes are expanded; alpha and palette transparency are
dropped, not composited; 16 bits become 8 by round(v / 257) or by a declared range; CMYK is converted; of an animation or a
multi-page file the first frame is taken. Float, signed and 32-bit pixels are refused: they have no agreed range.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import cv2
import numpy as np
import simplejpeg  # type: ignore[import-untyped]  # it ships a stub, but no py.typed
from numpy.typing import NDArray
from PIL import BmpImagePlugin, GifImagePlugin, ImageFile, JpegImagePlugin, TiffImagePlugin, WebPImagePlugin

from packer.headers import HeaderError, ImageFormat, png_still, tiff_orientation
from packer.probing import ImageError, ImageInfo, jpeg_header, pillow_unguarded, probe, reset_orientation, strict, turbo_reads

__all__ = ["Decoded", "ImageError", "ImageInfo", "check", "decode", "probe", "reset_orientation", "upright"]

# An encoder makes about ten. Each costs a pass over the whole picture, so a small file with thousands would run for hours.
MAX_JPEG_SCANS = 500
# Modes that Pillow converts to RGB exactly as our rules say. Not in it: F, I, I;16*, LAB, HSV.
_CONVERTIBLE = ("1", "L", "P", "RGB", "RGBA", "RGBX", "RGBa", "LA", "La", "PA", "CMYK", "YCbCr")
_TIFF_PHOTOMETRIC, _TIFF_PLANAR, _TIFF_SAMPLE_FORMAT = 262, 284, 339
_MIN_IS_WHITE, _INTERLEAVED, _UNSIGNED = 0, 1, 1
# NumPy takes indices as int64: eight times the pixels' bytes, so in pieces.
_ROWS_AT_ONCE = 64

PixelRange = tuple[int, int] | None


@dataclass(slots=True)
class Decoded:
    """`image` uint8 [H, W, 3] RGB, C-contiguous, in the stored frame. `max_16bit`: the largest value of a 16-bit picture, else None."""

    image: NDArray[np.uint8]
    max_16bit: int | None


@strict
def check(data: bytes, info: ImageInfo, *, min_side: int = 1) -> NDArray[np.uint8]:
    """Decode fully and strictly, only to know that it can be done. `info` is what `probe` said about `data`.

    Returns the picture, not turned, uint8 [H, W, C]: RGB, or gray of a JPEG, which is reduced where `min_side` pixels a side are left.

    Raises:
        ImageError: the picture is cut short, corrupt or of unsupported pixels.
    """
    if info.format == "jpeg" and info.verbatim:
        _limit_scans(data)
        # At 1/8 all entropy-coded data is read (min_factor counts only with the other two); in gray chroma is read but not computed.
        factor = 8 if min_side == 1 else 1
        gray = simplejpeg.decode_jpeg(data, "GRAY", min_height=min_side, min_width=min_side, min_factor=factor)
        return cast("NDArray[np.uint8]", gray)
    return _decode(data, info, None).image


@strict
def decode(data: bytes, info: ImageInfo, *, pixel_range: PixelRange = None) -> Decoded:
    """Decode to RGB by the module's rules; the EXIF orientation is not applied. `info` is what `probe` said about `data`.

    `pixel_range` (lo, hi), within 0 to 65535: of a 16-bit picture the values lo to hi become 0 to 255, those outside are clipped.

    Raises:
        ImageError: the picture is cut short, corrupt or of unsupported pixels.
    """
    return _decode(data, info, pixel_range)


def _decode(data: bytes, info: ImageInfo, pixel_range: PixelRange) -> Decoded:
    decoded = _DECODERS[info.format](data, info, pixel_range)
    if decoded.image.shape != (info.height, info.width, 3):
        raise ImageError("corrupt-image", f"decodes to shape {list(decoded.image.shape)}, the header says {[info.height, info.width, 3]}")
    return decoded


def upright(image: NDArray[np.uint8], orientation: int) -> NDArray[np.uint8]:
    """Turn a stored picture (uint8 [H, W] or [H, W, C]) as its EXIF orientation (1 to 8) says. C-contiguous; the input for 1."""
    if orientation == 1:
        return np.ascontiguousarray(image)
    turned: Any
    if orientation in (2, 4):
        turned = cv2.flip(image, 1 if orientation == 2 else 0)
    elif orientation in (5, 7):
        turned = cv2.transpose(image)
        turned = turned if orientation == 5 else cv2.flip(turned, -1)
    elif orientation in (3, 6, 8):
        turned = cv2.rotate(image, {3: cv2.ROTATE_180, 6: cv2.ROTATE_90_CLOCKWISE, 8: cv2.ROTATE_90_COUNTERCLOCKWISE}[orientation])
    else:
        raise ValueError(f"an EXIF orientation is 1 to 8, found {orientation}")
    return cast("NDArray[np.uint8]", turned.reshape(turned.shape[:2] + image.shape[2:]))  # OpenCV drops the axis of a single channel


def _limit_scans(data: bytes) -> None:
    if jpeg_header(data).progressive and (scans := data.count(b"\xff\xda")) > MAX_JPEG_SCANS:
        raise ImageError("corrupt-image", f"is a progressive JPEG of {scans} scans, of which at most {MAX_JPEG_SCANS} are read")


def _decode_jpeg(data: bytes, info: ImageInfo, pixel_range: PixelRange) -> Decoded:  # noqa: ARG001  (one signature for all formats)
    _limit_scans(data)
    if not turbo_reads(jpeg_header(data)):
        return _with_pillow(JpegImagePlugin.JpegImageFile, data)
    if info.mode == "CMYK":
        # Pillow knows Adobe's inversion but passes over damage, which simplejpeg sees.
        simplejpeg.decode_jpeg(data, "CMYK", min_height=1, min_width=1, min_factor=8)
        return _with_pillow(JpegImagePlugin.JpegImageFile, data)
    return Decoded(simplejpeg.decode_jpeg(data, "RGB"), None)


def _decode_png(data: bytes, info: ImageInfo, pixel_range: PixelRange) -> Decoded:
    """With OpenCV: it refuses missing rows that Pillow leaves black, and keeps all 16 bits of colour."""
    return _with_opencv(png_still(data), info, pixel_range)


def _decode_tiff(data: bytes, info: ImageInfo, pixel_range: PixelRange) -> Decoded:
    orientation = tiff_orientation(data, 0, len(data))
    if orientation is not None:  # both libraries would turn the picture
        data = orientation.reset(data)
    with pillow_unguarded(), TiffImagePlugin.TiffImageFile(io.BytesIO(data)) as im:
        if any(f != _UNSIGNED for f in im.tag_v2.get(_TIFF_SAMPLE_FORMAT, (_UNSIGNED,))):
            raise ImageError(
                "unsupported-pixels", f"has float or signed pixels (Pillow mode {im.mode}), which have no agreed range: convert it"
            )
        if info.mode.startswith("I;16"):
            values = np.asarray(im).astype(np.uint16)
            # Pillow inverts min-is-white (as films are stored) for up to 8 bits only.
            return _from_16bit(65535 - values if im.tag_v2.get(_TIFF_PHOTOMETRIC) == _MIN_IS_WHITE else values, pixel_range)
        interleaved = im.tag_v2.get(_TIFF_PLANAR, _INTERLEAVED) == _INTERLEAVED
    if info.bits <= 8:
        return _with_pillow(TiffImagePlugin.TiffImageFile, data)
    if info.bits == 16 and info.mode in ("RGB", "RGBA") and interleaved:  # OpenCV garbles separate planes of 16 bits
        return _with_opencv(data, info, pixel_range)
    kind = f"{info.bits} bits in Pillow's mode {info.mode}" + ("" if interleaved else ", in planes")
    raise ImageError("unsupported-pixels", f"has pixels of {kind}, which are not read: convert it to 8 or 16 bits, gray or RGB")


def _pillow_decoder(plugin: Callable[[io.BytesIO], ImageFile.ImageFile]) -> Callable[[bytes, ImageInfo, PixelRange], Decoded]:
    return lambda data, info, pixel_range: _with_pillow(plugin, data)  # noqa: ARG005  (one signature for all formats)


def _with_pillow(plugin: Callable[[io.BytesIO], ImageFile.ImageFile], data: bytes) -> Decoded:
    """The plug-in is named, so that Pillow cannot take the bytes for something else (EPS starts a program)."""
    with pillow_unguarded(), plugin(io.BytesIO(data)) as im:
        if im.mode not in _CONVERTIBLE:
            raise ImageError("unsupported-pixels", f"has pixels in Pillow's mode {im.mode}, which are not packed: convert it to 8-bit RGB")
        im.load()
        return Decoded(np.array(im.convert("RGB")), None)


def _with_opencv(data: bytes, info: ImageInfo, pixel_range: PixelRange) -> Decoded:
    """Decode a picture without orientation, animation or palette transparency; an alpha channel is dropped."""
    values = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_UNCHANGED)
    if values is None:
        raise HeaderError("has incomplete or damaged pixel data")
    if values.dtype != (np.uint16 if info.bits == 16 else np.uint8):
        raise ImageError("unsupported-pixels", f"decodes to {values.dtype}, its header says {info.bits} bits")
    if values.ndim == 3:
        values = cv2.cvtColor(values, cv2.COLOR_BGR2RGB if values.shape[2] == 3 else cv2.COLOR_BGRA2RGB)
    if info.bits == 16:
        return _from_16bit(cast("NDArray[np.uint16]", values), pixel_range)
    return Decoded(_three_channels(cast("NDArray[np.uint8]", values)), None)


def _from_16bit(values: NDArray[np.uint16], pixel_range: PixelRange) -> Decoded:
    table = _table(pixel_range)
    image = np.empty(values.shape, np.uint8)
    for row in range(0, len(values), _ROWS_AT_ONCE):
        np.take(table, values[row : row + _ROWS_AT_ONCE], out=image[row : row + _ROWS_AT_ONCE], mode="clip")
    return Decoded(_three_channels(image), int(values.max()))


@functools.lru_cache(maxsize=4)
def _table(pixel_range: PixelRange) -> NDArray[np.uint8]:
    """The 8-bit value of each of the 65,536 others."""
    low, high = pixel_range or (0, 65535)
    if not 0 <= low < high <= 65535:
        raise ValueError(f"pixel_range is two rising numbers from 0 to 65535, found {low} and {high}")
    table: NDArray[np.uint8] = np.clip(np.floor((np.arange(65536) - low) * (255 / (high - low)) + 0.5), 0, 255).astype(np.uint8)
    return table


def _three_channels(values: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return cast("NDArray[np.uint8]", cv2.cvtColor(values, cv2.COLOR_GRAY2RGB)) if values.ndim == 2 else values


_DECODERS: dict[ImageFormat, Callable[[bytes, ImageInfo, PixelRange], Decoded]] = {
    "jpeg": _decode_jpeg,
    "png": _decode_png,
    "tiff": _decode_tiff,
    "webp": _pillow_decoder(WebPImagePlugin.WebPImageFile),
    "bmp": _pillow_decoder(BmpImagePlugin.BmpImageFile),
    "gif": _pillow_decoder(GifImagePlugin.GifImageFile),
}
