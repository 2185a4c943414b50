"""What a file really is, told from its first bytes, where it is not what its name says; and what to do about it."""

from __future__ import annotations

import codecs
import re

LOOK_BYTES = 512
"""The first bytes that are enough to tell."""

_UNPACK = "unpack it first"
WORKBOOK = "an Excel/OpenDocument workbook: save it as CSV"
_AS_TEXT = "a binary file that was saved as text, which cannot be undone: fetch it again"
_AGAIN = "fetch it again"
# first bytes -> what it is, ready to stand behind "is"
_STARTS: dict[bytes, str] = {
    b"\x1f\x8b": f"a gzip file: {_UNPACK}",
    b"\x1f\x9d": f"a compress (.Z) file: {_UNPACK}",
    b"\xfd7zXZ\0": f"an xz file: {_UNPACK}",
    b"]\0\0\x80\0": f"an LZMA file: {_UNPACK}",
    b"\x28\xb5\x2f\xfd": f"a Zstandard file: {_UNPACK}",
    b"\x04\x22\x4d\x18": f"an LZ4 file: {_UNPACK}",
    b"LZIP": f"an lzip file: {_UNPACK}",
    b"7z\xbc\xaf\x27\x1c": f"a 7-Zip archive: {_UNPACK}",
    b"Rar!\x1a\x07": f"a RAR archive: {_UNPACK}",
    b"version https://git-lfs": "a Git LFS pointer (fetch the real file with 'git lfs pull')",
    b"/annex/objects/": "a git-annex pointer (fetch the real file with 'git annex get')",
    b"\xd0\xcf\x11\xe0": WORKBOOK,
    b"PAR1": "a Parquet table: save it as CSV",
    b"\x93NUMPY": "a numpy array",
    b"\x89HDF\r\n": "an HDF5 file",
    b"SQLite format 3\0": "an SQLite data base",
    b"%PDF": "a PDF file",
    b"%!PS": "a PostScript file",
    b"\0\x05\x16\x07": "what macOS keeps beside a file (AppleDouble), not the file itself",
    b"\xff\xd8\xff": "a JPEG picture",
    b"\x89PNG\r\n\x1a\n": "a PNG picture",
    b"GIF87a": "a GIF picture",
    b"GIF89a": "a GIF picture",
    b"\x89PNG": f"a PNG picture whose line ends were changed by a transfer in text mode: {_AGAIN}",
    b"\xc2\x89PNG": _AS_TEXT,
    b"\xc3\xbf\xc3\x98\xc3\xbf": _AS_TEXT,
    b"\xef\xbf\xbdPNG": _AS_TEXT,
    b"\xef\xbf\xbd\xef\xbf\xbd": _AS_TEXT,
    b"\xef\xbb\xbf\xff\xd8": _AS_TEXT,
    b"\xef\xbb\xbf\x89PNG": _AS_TEXT,
    b"/9j/": "a JPEG picture in base64 text: decode it",
    b"iVBORw0KGgo": "a PNG picture in base64 text: decode it",
    b"data:image/": "a data URI, a picture in base64 text: decode it",
    b"\0\0\0\x0cjP  \r\n\x87\n": "a JPEG 2000 picture",
    b"\xff\x4f\xff\x51": "a JPEG 2000 picture",
    b"\0\0\0\x0cJXL \r\n\x87\n": "a JPEG XL picture",
    b"\xff\x0a": "a JPEG XL picture",
    b"II\xbc\x01": "a JPEG XR picture",
    b"8BPS": "a Photoshop file",
    b"\0\0\1\0": "a Windows icon",
    b"\0\0\2\0": "a Windows cursor, or a TGA picture",
    b"#?RADIANCE": "a Radiance HDR picture",
    b"v/1\1": "an OpenEXR picture",
    b"qoif": "a QOI picture",
    b"DDS ": "a DDS texture",
    b"SIMPLE  =": "a FITS file",
    b"FUJIFILMCCD-RAW": "a camera's raw file",
    b"IIRO": "a camera's raw file",
    b"IIRS": "a camera's raw file",
    b"IIU\0": "a camera's raw file",
    b"\x1a\x45\xdf\xa3": "a Matroska or WebM film",
}
_TIFF_STARTS = (b"II*\0", b"MM\0*")
_BRANDS = {b"avif": "an AVIF picture", b"avis": "an AVIF picture", b"crx ": "a camera's raw file"}
_BRANDS |= dict.fromkeys((b"heic", b"heix", b"hevc", b"heim", b"heis"), "a HEIC picture") | dict.fromkeys(
    (b"mif1", b"msf1"), "a HEIF picture"
)
_BZIP2 = re.compile(rb"BZh[1-9](?:1AY&SY|\x17rE8P\x90)")  # a first block, or the end of an empty file
_PNM = re.compile(rb"P[1-7]\s+[#\d]|P7\s+(?:WIDTH|HEIGHT|DEPTH|MAXVAL|TUPLTYPE)\b")
_MARKUP = re.compile(rb"<(?:!doctype\s+html|html|head|body)\b", re.IGNORECASE)
_JSON = re.compile(rb'[\[{]\s*(?:["\[{\]}]|$)')
_SHOWN = 40
# So many letters begin no list or table by chance; the name of a picture may well begin with PAR1 or GIF89a.
_LONG = 9
_TEXT_CONTROLS = b"\t\n\v\f\r\x1a"  # the last: end of text, in DOS
_CONTROLS = bytes(set(range(32)) - set(_TEXT_CONTROLS))


def told(start: bytes) -> str | None:
    """What a file of these first bytes is, with the way out where there is one; None for plain text, XML and what is not known.

    `start`: at least the first `LOOK_BYTES` of the file, or all of it.
    """
    for magic, what in _STARTS.items():
        if start.startswith(magic):
            return what
    if _BZIP2.match(start):
        return f"a bzip2 file: {_UNPACK}"
    if start.startswith(b"PK\x03\x04"):
        workbook = b"[Content_Types].xml" in start or b"xl/" in start or b"opendocument.spreadsheet" in start
        return WORKBOOK if workbook else f"a ZIP archive: {_UNPACK}"
    if start[257:262] == b"ustar":
        return f"a tar archive: {_UNPACK}"
    if start[:4] in _TIFF_STARTS:
        return "a camera's raw file" if is_raw(start) else "a TIFF picture"
    if start[:4] == b"RIFF":
        return {b"WEBP": "a WebP picture", b"AVI ": "an AVI film"}.get(start[8:12], "a RIFF file, of sound perhaps")
    if start[4:8] == b"ftyp":
        return _BRANDS.get(start[8:12], "a film (MP4, QuickTime)")
    if start[128:132] == b"DICM":
        return "a DICOM file"
    if len(start) >= 8 and not start[:LOOK_BYTES].strip(b"\0"):
        return f"nothing but zero bytes at its start, as a broken copy leaves it: {_AGAIN}"
    return "a PNM picture" if _PNM.match(start) else _text(start)


def told_of_text(start: bytes, encoding: str | None = None) -> str | None:
    """As `told`, for a file that is to be plain text: where it is clean text, a few letters at its start make it nothing else.

    `encoding`: a codec that it may be in, where it is not UTF-8.
    """
    if not _is_clean(start[:LOOK_BYTES], encoding):
        return told(start)
    long = (what for magic, what in _STARTS.items() if (len(magic) >= _LONG or not magic.isascii()) and start.startswith(magic))
    return next(long, None) or _text(start)


def _is_clean(start: bytes, encoding: str | None) -> bool:
    if start.translate(None, _CONTROLS) != start:
        return False
    for codec in ("utf-8", encoding):
        try:
            if codec is not None:
                codecs.getincrementaldecoder(codec)().decode(start)  # the last character may be cut
                return True
        except UnicodeDecodeError:
            continue
    return False


def is_raw(start: bytes) -> bool:
    """Whether a TIFF file is a camera's: Canon's mark follows the header."""
    return start[8:10] == b"CR"


def _text(start: bytes) -> str | None:
    text = start[:LOOK_BYTES].removeprefix(codecs.BOM_UTF8).lstrip()
    if _MARKUP.match(text):
        return f"a page in HTML, as a failed download leaves it: {_AGAIN}"
    if text.startswith(b"<svg"):
        return "a drawing in SVG"
    if _JSON.match(text):
        return "a text in JSON"
    return None


def described(start: bytes) -> str:
    """As `told`, and for the rest: a text, how it begins, or the first bytes in hex."""
    what = told(start)
    if what is not None:
        return what
    if start.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"<"):
        return "a text in XML or HTML"
    text = " ".join(start[:LOOK_BYTES].decode("utf-8-sig", "replace").split())[:_SHOWN]
    if text.isprintable() and text and "\ufffd" not in text:
        return f"a text that begins with {text!r}"
    return f"of no known format: it starts with the bytes {start[:8].hex(' ').upper()}"
