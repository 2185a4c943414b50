"""Values to bytes and back, side by side: the image part and the JSON part of a sample. Imports neither torch nor the packing side."""

from __future__ import annotations

import json
from typing import Any, Literal, cast

import cv2
import numpy as np
import simplejpeg  # type: ignore[import-untyped]  # it ships a stub, but no py.typed
from numpy.typing import NDArray

from loaders.jpeg import restart_interval

ImagePart = Literal["jpg", "png", "webp"]
Subsampling = Literal["444", "422", "420", "440", "411"]

# libjpeg's own limit; WebP's is in its bit stream.
MAX_SIDE = {"jpg": 65500, "png": 1_000_000, "webp": 16383}
# zlib level 3 and libpng's choice among all filters: 0.5 to 9 % larger than level 6 on four sets of photos, at two to four times its speed.
PNG_COMPRESSION = 3
_JPEG_SAMPLING = {"444": 0x111111, "422": 0x211111, "420": 0x221111, "440": 0x121111, "411": 0x411111}

# Before OpenCV 4.11 there is no IMREAD_COLOR_RGB and the channels are swapped in a second pass.
_READS_RGB = hasattr(cv2, "IMREAD_COLOR_RGB")
READ_FLAGS = (cv2.IMREAD_COLOR_RGB if _READS_RGB else cv2.IMREAD_COLOR) | cv2.IMREAD_IGNORE_ORIENTATION


class DecodeError(ValueError):
    """A part cannot be decoded. The message says why; the caller adds shard, key and source."""


class EncodeError(ValueError):
    """A value cannot be stored in the part asked for. The message says why and names the way out."""


def encode_image(
    image: NDArray[np.uint8],
    part: ImagePart,
    *,
    quality: int = 90,
    restart_grid: bool = True,
    subsampling: Subsampling = "420",
) -> bytes:
    """Encode `image` (uint8 [H, W, 3] RGB). The same pixels and options give the same bytes.

    JPEG is baseline with optimised Huffman tables (3 % smaller and 3 % faster to decode) and, with `restart_grid`, the restart
    interval of `loaders.jpeg.restart_interval`. `quality` 1 to 100 is for JPEG and (lossy) WebP; PNG is lossless.

    Raises:
        EncodeError: not uint8 [H, W, 3], or larger than the format allows.
    """
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or 0 in image.shape:
        raise EncodeError(f"an image is uint8 [H, W, 3], found {image.dtype} {list(image.shape)}")
    if not 1 <= quality <= 100:
        raise EncodeError(f"quality is 1 to 100, found {quality}")
    height, width = image.shape[:2]
    require_fit(width, height, part)
    if part == "jpg":
        interval = restart_interval(width, subsampling) if restart_grid else 0
        params = [
            *(cv2.IMWRITE_JPEG_QUALITY, quality),
            *(cv2.IMWRITE_JPEG_OPTIMIZE, 1),
            *(cv2.IMWRITE_JPEG_PROGRESSIVE, 0),
            *(cv2.IMWRITE_JPEG_RST_INTERVAL, interval),
            *(cv2.IMWRITE_JPEG_SAMPLING_FACTOR, _JPEG_SAMPLING[subsampling]),
        ]
    elif part == "png":
        params = [cv2.IMWRITE_PNG_COMPRESSION, PNG_COMPRESSION, cv2.IMWRITE_PNG_STRATEGY, cv2.IMWRITE_PNG_STRATEGY_DEFAULT]
    else:
        params = [cv2.IMWRITE_WEBP_QUALITY, quality]
    try:
        ok, encoded = cv2.imencode("." + part, cv2.cvtColor(image, cv2.COLOR_RGB2BGR), params)
    except cv2.error as e:
        raise EncodeError(f"{part} of {width}x{height} pixels: {e}") from None
    if not ok:
        raise EncodeError(f"{part} of {width}x{height} pixels: the encoder refused it without a reason")
    return encoded.tobytes()


def require_fit(width: int, height: int, part: ImagePart) -> None:
    """Refuse a picture that is larger than the format allows, without encoding it.

    Raises:
        EncodeError: a side is over `MAX_SIDE`.
    """
    if max(height, width) > MAX_SIDE[part]:
        raise EncodeError(f"{width}x{height} pixels do not fit in {part}, which takes {MAX_SIDE[part]} a side: resize, or store as png")


def decode_image(data: bytes | memoryview, part: ImagePart, out: NDArray[np.uint8] | None = None) -> NDArray[np.uint8]:
    """Decode an image part to uint8 [H, W, 3] RGB, C-contiguous and writable.

    `out`: decoded into, and returned, where it is C-contiguous uint8 of exactly the picture's shape; any other is left alone and a
    new array returned. After a DecodeError its content is undefined. JPEG is decoded strictly: a picture that is cut short or visibly
    corrupt is refused, not filled up. No EXIF orientation is applied (packed pictures are upright).

    Raises:
        DecodeError: anything wrong with the data.
    """
    try:
        if part == "jpg":
            return _decode_jpeg(data, out)
        if part == "png":
            _check_chunks(data)
        image = cv2.imdecode(np.frombuffer(data, np.uint8), READ_FLAGS)
    except MemoryError:  # a fault of the machine, not of the data
        raise
    except Exception as e:  # decoders raise whatever they like; all of it is about these bytes
        raise DecodeError(f"{part} of {len(data)} bytes: {e or type(e).__name__}") from None
    if image is None:
        raise DecodeError(f"{part} of {len(data)} bytes: is cut short, corrupt or of another format")
    if not _READS_RGB:
        cv2.cvtColor(image, cv2.COLOR_BGR2RGB, dst=image)
    if out is not None and _fits(out, image.shape):
        np.copyto(out, image)
        return out
    return cast("NDArray[np.uint8]", image)


def _check_chunks(data: bytes | memoryview) -> None:
    """OpenCV makes room for a chunk of the 4 GB that its header may claim before it looks whether they are there."""
    pos = 8
    while pos + 8 <= len(data):
        pos += 12 + int.from_bytes(data[pos : pos + 4], "big")
    if pos > len(data):
        raise ValueError(f"is cut short: a chunk ends at byte {pos}")


def _decode_jpeg(data: bytes | memoryview, out: NDArray[np.uint8] | None) -> NDArray[np.uint8]:
    if out is not None:
        # simplejpeg takes any buffer that is large enough, so the shape is ours to compare.
        height, width, _, _ = simplejpeg.decode_jpeg_header(data)
        if _fits(out, (height, width, 3)):
            simplejpeg.decode_jpeg(data, "RGB", buffer=out)
            return out
    return cast("NDArray[np.uint8]", simplejpeg.decode_jpeg(data, "RGB"))


def decode_jpeg_into(data: memoryview, out: NDArray[np.uint8]) -> bool:
    """Whether these bytes are a sound JPEG of exactly the shape of `out` (C-contiguous uint8 [H, W, 3]), which then holds the picture.

    For many small pictures: `decode_image` costs a fifth more, and says what is wrong. After False the content of `out` is undefined.
    """
    if bytes(data[:2]) != b"\xff\xd8":
        return False
    try:
        decoded: NDArray[np.uint8] = simplejpeg.decode_jpeg(data, "RGB", buffer=out)
    except MemoryError:
        raise
    except Exception:  # see `decode_image`
        return False
    return decoded.shape == out.shape


def _fits(out: NDArray[np.uint8], shape: tuple[int, ...]) -> bool:
    return out.shape == shape and out.dtype == np.uint8 and out.flags.c_contiguous and out.flags.writeable


def float32_list(array: NDArray[np.float32]) -> list[Any]:
    """Nested lists of Python floats that `json` writes in the shortest spelling that a float32 needs (0.1, not 0.10000000149011612).

    ``np.array(json.loads(json.dumps(x)), np.float32)`` equals `array` exactly; every number keeps its decimal point (10.0).
    """
    exact = array.astype(np.float64)
    if not (exact == np.rint(exact)).all():
        short = np.array([float(str(x)) for x in array.ravel()]).reshape(array.shape)
        # The spelling is short for a float32 but is read as a float64 first: where rounding twice would end elsewhere, keep all digits.
        exact = np.where(short.astype(np.float32) == array, short, exact)
    return cast("list[Any]", exact.tolist())


def encode_meta(meta: dict[str, Any]) -> bytes:
    """The JSON part of a sample: compact, keys sorted, UTF-8.

    Raises:
        ValueError: it holds a NaN, an infinity or a lone surrogate, which JSON in UTF-8 cannot say.
    """
    return _META_ENCODER.encode(meta).encode()


_META_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def decode_meta(data: bytes | memoryview) -> dict[str, Any]:
    """Read a sample's JSON part.

    Raises:
        DecodeError: no JSON object in UTF-8, or it holds NaN or Infinity.
    """
    try:
        meta = json.loads(bytes(data).decode(), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as e:
        raise DecodeError(f"json of {len(data)} bytes: {e or 'nested too deeply'}") from None
    if not isinstance(meta, dict):
        raise DecodeError(f"json of {len(data)} bytes: expected an object, found {type(meta).__name__}")
    return meta


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")
