"""WebDataset tars of any origin, read in sequence by webdataset's own iterators: for `loaders.stream.ShardStream`.

Nothing in them is trusted: no shell, no pickle, and a tar that is cut short is an error, where webdataset silently ends.
"""

from __future__ import annotations

import glob
import hashlib
import os
import re
import struct
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import fsspec  # type: ignore[import-untyped]  # it has neither stubs nor py.typed
import numpy as np
from braceexpand import braceexpand
from numpy.typing import NDArray
from webdataset.tariterators import group_by_keys, tar_file_iterator  # type: ignore[import-untyped]  # stubs, but no py.typed

from loaders.buffer import Item
from loaders.codecs import DecodeError, ImagePart, decode_image, decode_meta
from loaders.faults import OnError, Replacements, SampleError
from loaders.jpeg import JpegError, parse_header
from loaders.keyed import KeyedRandom
from loaders.regions import SampleDict, Transform, transformed
from loaders.tarset import image_part

IMAGE_SUFFIXES = ("jpg", "jpeg", "png", "webp")
PICKLED_SUFFIXES = ("pickle", "pkl", "pyd", "pth", "pt", "joblib", "dill")
# fsspec knows neither the short suffixes nor those before the query of a URL.
_COMPRESSIONS = {"gz": "gzip", "tgz": "gzip", "bz2": "bz2", "tbz": "bz2", "tbz2": "bz2", "xz": "xz", "txz": "xz"}
# How compressed files begin -> what they are, and the end of a name that says so.
_MAGIC = {b"\x1f\x8b": ("gzip", ".tar.gz"), b"BZh": ("bzip2", ".tar.bz2"), b"\xfd7zXZ\0": ("xz", ".tar.xz")}
_BLOCK = 512
MAX_FOREIGN_PIXELS = 1 << 28
"""Of a picture in a foreign tar. OpenCV takes 16 bytes for each pixel that a PNG of a hundred bytes claims."""
MAX_EXTENDED_BYTES = 1 << 20
"""Of a long name or of further header fields, which `tarfile` reads as a whole."""
# Fields by which a header of some bytes becomes a member of terabytes.
_SIZE_FIELDS = re.compile(rb"(?:^|\n)\d+ (GNU\.sparse[^=\n]*|size)=")
# Members that hold a long name or further header fields of the next member.
_FIELD_TYPES = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE)
_HEADER_TYPES = (*_FIELD_TYPES, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)

RawSample = dict[str, Any]


def is_foreign(source: str | Path | Sequence[str | Path]) -> bool:
    """Whether a source names tars, rather than the folder of a packed data set."""
    if not isinstance(source, str | Path):
        if not isinstance(source, Sequence) or not all(isinstance(entry, str | Path) for entry in source):
            raise TypeError(
                f"source is {source!r:.200}, expected the folder of a packed data set, or tars: a path, a URL or a list of such"
            )
        return True
    if os.path.exists(source):  # Path.exists raises where a signed URL is too long for a file name
        return not os.path.isdir(source)
    return bool(re.search(r"://|::|\.(tar|tgz|tbz2?|txz)\b|^pipe:|\|", str(source), re.IGNORECASE))


def expand_sources(source: str | Path | Sequence[str | Path]) -> list[str]:
    """Every tar of a source, as a path or URL: braces and (in local paths) wildcards expanded, in that order.

    Raises:
        ValueError: an entry is a command, or nothing is found.
    """
    entries = [str(source)] if isinstance(source, str | Path) else [str(entry) for entry in source]
    for text in entries:
        if re.search(r"(^|::)\s*pipe:|\|", text) or text.strip() == "-":
            raise ValueError(f"{text!r}: commands and pipes are not run: give paths, or URLs that fsspec opens (https://, s3://, ...)")
    result: list[str] = []
    for text in entries:
        for url in [text] if os.path.isfile(text) else braceexpand(text):
            local = "://" not in url and "::" not in url
            found = sorted(glob.glob(url)) if local and glob.has_magic(url) else [url]
            if not found or (local and not os.path.isfile(found[0])):
                raise ValueError(f"{url!r}: no such tar file")
            result += [str(Path(f).absolute()) for f in found] if local else found
    if not result:
        raise ValueError(f"{source!r}: names no tar")
    return result


class Share(Protocol):
    """Which of several consumers reads."""

    @property
    def consumer(self) -> int: ...

    @property
    def consumers(self) -> int: ...


@dataclass(slots=True)
class LastGood:
    """The good sample that one iteration gave last. `before`: what it had given before it was resumed, encoded, the newest first."""

    before: Iterator[RawSample]
    raw: RawSample | None = None

    def seek(self) -> RawSample | None:
        """It, or None where there is none; of a resumed iteration that has given none yet, the newest before that decodes."""
        while self.raw is None and (raw := next(self.before, None)) is not None:
            with suppress(SampleError):
                decode_parts(raw)
                self.raw = raw
        return self.raw


class ForeignTars:
    """A list of tars. The reader protocol of `ShardStream`: shards, one consumer's encoded samples, decoding."""

    def __init__(self, urls: Sequence[str], seed: int, transform: Transform | None, on_error: OnError = "raise") -> None:
        # One array of bytes: a list of a million str would be copied page by page in forked workers.
        self._urls = np.array([url.encode() for url in urls])
        self._seed = seed
        self._transform = transform
        self._random = KeyedRandom()
        self._replacements = Replacements() if on_error == "replace" else None
        self.num_shards = len(urls)
        self.num_samples: int | None = None  # only reading all of them can tell

    @property
    def num_replaced(self) -> int:
        return 0 if self._replacements is None else self._replacements.total

    def _url(self, shard: int) -> str:
        return bytes(self._urls[shard]).decode()

    @property
    def fingerprint(self) -> str:
        """Hex SHA-256 over the names of the tars; folders, hosts and queries may change."""
        names = [re.split(r"[?#]", self._url(shard))[0].rpartition("/")[2] for shard in range(self.num_shards)]
        return hashlib.sha256("\n".join(names).encode()).hexdigest()

    def items(self, order: NDArray[np.int64], place: Share) -> Iterator[Item]:
        """The samples of one consumer's shards; `data` is each part's bytes.

        Raises:
            ValueError: there are fewer shards than consumers, so that some would get nothing.
        """
        consumer, consumers = place.consumer, place.consumers
        if self.num_shards < consumers:
            raise ValueError(
                f"{self.num_shards} shards (the first is {self._url(0)}) cannot be split over {consumers} readers (ranks x DataLoader "
                f"workers): use fewer workers, so that there are at most {self.num_shards} readers, or more and smaller shards"
            )
        for shard in order[consumer::consumers].tolist():
            for number, sample in enumerate(read_tar(self._url(shard))):
                num_bytes = sum(len(part) for part in sample.values())
                yield Item((shard << 32) + number, num_bytes, sample.copy)

    def decode(self, index: int, raw: RawSample, epoch: int, last: LastGood) -> SampleDict:
        """A sample's parts to its fields, transformed; under "replace" those of the `last` good sample, where these are damaged."""
        sample = self._decoded(raw, last)
        sample["index"] = index
        if self._transform is None:
            return sample
        with self._random.generator(self._seed, epoch, index) as rng:
            return transformed(self._transform, sample, rng, lambda: f"sample {raw['__key__']} of {raw['__url__']}, epoch {epoch}")

    def _decoded(self, raw: RawSample, last: LastGood) -> SampleDict:
        if self._replacements is None:
            return decode_parts(raw)
        try:
            sample = decode_parts(raw)
        except SampleError as e:
            good = last.seek()
            if good is None:
                raise SampleError(f"{e}. No good sample came before it that could take its place") from None
            sample = decode_parts(good)
            self._replacements.count(f"sample {raw['__key__']} of {raw['__url__']} was replaced by {good['__key__']}", e)
        else:
            last.raw = raw
        return sample


def read_tar(url: str) -> Iterator[RawSample]:
    """The samples of one tar as webdataset gives them: `__key__`, `__url__` and each part's bytes.

    Raises:
        SampleError: it cannot be opened or read, is damaged, or ends before its end-of-archive block.
    """
    try:
        with fsspec.open(url, "rb", compression=_compression(url)) as file:
            guarded = _GuardedTar(file, url)
            members = ({**member, "__url__": url} for member in tar_file_iterator(guarded))
            yield from group_by_keys(members)
            if not guarded.ended:
                raise SampleError(f"{url}: ends without an end-of-archive block: it was cut short. Fetch or make it again")
    except SampleError:
        raise
    except MemoryError:
        raise
    except Exception as e:  # tarfile and the decompressors raise whatever they like; all of it is about this tar
        # webdataset appends objects to the arguments: the first is the message.
        raise SampleError(f"{url}: cannot be read: {e.args[0] if e.args and not isinstance(e, OSError) else e}") from e


def _compression(url: str) -> str:
    found = re.search(rf"\.({'|'.join(_COMPRESSIONS)})(?=[?#]|::|$)", url.lower())
    return _COMPRESSIONS[found[1]] if found else "infer"


class _Readable(Protocol):
    def read(self, size: int = -1, /) -> bytes: ...


class _GuardedTar:
    """A tar stream that follows the headers while it is read: `tarfile` takes a damaged header, or none, for the end of the archive.

    `ended` becomes True at the end-of-archive block.
    """

    def __init__(self, file: _Readable, url: str) -> None:
        self._file, self._url = file, url
        self._header = bytearray()
        self._extended = bytearray()
        self._skip = self._keep = self._position = 0
        self.ended = False

    def __repr__(self) -> str:
        return self._url  # webdataset puts it in its messages

    def read(self, size: int = -1) -> bytes:
        """Bytes of the file, as asked for.

        Raises:
            SampleError: a damaged header is among them.
        """
        data = self._file.read(size)
        if self._position == 0:
            for magic, (program, ending) in _MAGIC.items():
                if data.startswith(magic):
                    raise SampleError(
                        f"{self._url}: is compressed by {program}, and its name does not say so: name it *{ending}, or decompress it"
                    )
        place = 0
        while place < len(data) and not self.ended:
            if self._skip:
                step = min(self._skip, len(data) - place)
                self._skip -= step
                if self._keep:
                    self._take_extended(data[place : place + min(step, self._keep)])
            else:
                step = min(_BLOCK - len(self._header), len(data) - place)
                self._header += data[place : place + step]
                if len(self._header) == _BLOCK:
                    self._take_header(bytes(self._header))
                    self._header.clear()
            place += step
            self._position += step
        return data

    def _take_header(self, header: bytes) -> None:
        if not any(header):
            self.ended = True
            return
        try:
            info = tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape")
        except tarfile.HeaderError as e:
            at = self._position - self._position % _BLOCK
            raise SampleError(f"{self._url}: damaged tar header at byte {at}: {e}") from None
        if info.size < 0:
            raise SampleError(f"{self._url}: {info.name}: damaged tar header: a size of {info.size} bytes")
        if info.type == tarfile.GNUTYPE_SPARSE:
            raise SampleError(f"{self._url}: {info.name}: sparse members are not supported: make the tar without --sparse")
        if (info.issym() or info.islnk()) and info.name.rpartition("/")[2].find(".") > 0:  # named like a part of a sample
            raise SampleError(
                f"{self._url}: {info.name} is a link to {info.linkname!r}, which has no data of its own: links are not followed; make the "
                "tar with `tar --dereference --hard-dereference`"
            )
        if info.type in _HEADER_TYPES:
            if info.size > MAX_EXTENDED_BYTES:
                raise SampleError(f"{self._url}: a tar header of {info.size} bytes, at most {MAX_EXTENDED_BYTES} are read")
            self._keep = info.size if info.type in _FIELD_TYPES else 0
        # As in tarfile: links, devices, folders and pipes have no data, whatever their size says.
        if info.isreg() or info.type not in tarfile.SUPPORTED_TYPES or info.type in _HEADER_TYPES:
            self._skip = -(-info.size // _BLOCK) * _BLOCK

    def _take_extended(self, data: bytes) -> None:
        self._extended += data
        self._keep -= len(data)
        if self._keep:
            return
        if found := _SIZE_FIELDS.search(self._extended):
            what = "sizes over 8 GB" if found[1] == b"size" else "sparse members"
            raise SampleError(f"{self._url}: tar header field {found[1].decode()!r}: {what} are not supported: make the tar without")
        self._extended.clear()


def decode_parts(raw: RawSample) -> SampleDict:
    """Parts of a foreign sample to fields.

    `image` uint8 [H, W, 3] RGB comes from the part named jpg, jpeg, png or webp, else from the only one with such a suffix (``left.jpg``),
    by its bytes and not by its name; ``cls`` becomes `label`, ``json`` a dict; other parts stay bytes.

    Raises:
        SampleError: a part is pickled or cannot be decoded.
    """
    where = f"{raw['__url__']}: sample {raw['__key__']}"
    parts = {name: data for name, data in raw.items() if not name.startswith("__")}
    for name in parts:
        if name.rpartition(".")[2] in PICKLED_SUFFIXES:
            raise SampleError(f"{where}: part {name!r} is a pickle, which can run any code when read: refused. Store npy or json")
    image = _image_name(parts)
    sample: SampleDict = {"key": raw["__key__"]}
    for name, data in parts.items():
        try:
            if name == image:
                kind = image_part(data)
                if kind is None:
                    raise DecodeError(f"is neither JPEG, PNG nor WebP: it begins with {data[:8]!r}")
                _check_pixels(data, kind)
                sample["image"] = decode_image(data, kind)
            elif name == "cls":
                sample["label"] = int(data)
            elif name == "json":
                sample["json"] = decode_meta(data)
            else:
                sample[name] = data
        except (DecodeError, ValueError) as e:
            raise SampleError(f"{where}: part {name!r}: {e}") from None
    return sample


def _check_pixels(data: bytes, kind: ImagePart) -> None:
    """No index says how large the picture is to be, and a few bytes may claim gigabytes. A WebP is bounded by its format."""
    width = height = 0
    if kind == "jpg":
        with suppress(JpegError):  # what is wrong with it, the decoder says
            header = parse_header(data)
            width, height = header.width, header.height
    elif kind == "png" and len(data) >= 24:
        width, height = struct.unpack_from(">II", data, 16)
    if width * height > MAX_FOREIGN_PIXELS:
        raise DecodeError(f"is {width}x{height} pixels, at most {MAX_FOREIGN_PIXELS} are decoded")


def _image_name(parts: RawSample) -> str | None:
    plain = [name for name in IMAGE_SUFFIXES if name in parts]
    dotted = [name for name in parts if name.rpartition(".")[2] in IMAGE_SUFFIXES]
    return plain[0] if plain else dotted[0] if len(dotted) == 1 else None
