"""Reads one Pascal VOC annotation file: bytes -> text -> the few elements that matter. Nothing outside the bytes is ever opened.

The text is decoded here and not by expat, which knows no multi-byte encoding (gbk, Shift_JIS); expat then reads it with handlers that
refuse every entity of the file's own. No tree is built, so memory stays bounded by the file's size.
"""

from __future__ import annotations

import codecs
import re
from dataclasses import dataclass, field
from typing import NoReturn
from xml.parsers import expat

MAX_XML_BYTES = 1 << 24
MAX_OBJECTS = 100_000
MAX_DEPTH = 200
MAX_QUOTED = 80
_DECLARATION = re.compile(rb"""<\?xml\s[^>]{0,200}?\bencoding\s*=\s*["']([A-Za-z][A-Za-z0-9._:-]{0,40})["']""")
_BOMS = ((codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"))
_BARE_UTF16 = ((b"<\0", "utf-16-le"), (b"\0<", "utf-16-be"))
# Files that say gb2312 or gbk often hold characters of its supersets; what is valid in one means the same in the other.
_SUPERSETS = {"gb2312": "gb18030", "gbk": "gb18030"}
# No character sets, or of quadratic cost.
_NO_TEXT = {"punycode", "idna", "unicode-escape", "raw-unicode-escape", "utf-7", "undefined"}
_WAY_OUT = '[source] encoding in a recipe, such as "gbk", names the true one'
_SHAPES = ("polygon", "robndbox", "segm", "points")
_TEXTS = ("name", "difficult", "truncated", "occluded")
CORNERS = ("xmin", "ymin", "xmax", "ymax")


class XmlFault(Exception):
    """The file cannot be used. `code` is the finding's; `line` counts from 1 where there is one."""

    def __init__(self, code: str, message: str, line: int | None = None) -> None:
        super().__init__(message)
        self.code, self.line = code, line


@dataclass(slots=True)
class VocObject:
    """Direct children of an ``<object>`` by local name, as text.

    `box`: the children of its ``<bndbox>``, None without one. `repeated`: a child that stands there twice; `shape`: another kind of
    shape that is there.
    """

    texts: dict[str, str] = field(default_factory=dict)
    box: dict[str, str] | None = None
    repeated: str | None = None
    shape: str | None = None


@dataclass(slots=True)
class VocDocument:
    """`filename` and `size` (children of ``<size>`` as text) are None where the file has none."""

    filename: str | None = None
    size: dict[str, str] | None = None
    objects: list[VocObject] = field(default_factory=list)


def quoted(text: str) -> str:
    """Text of the input for a message, shortened."""
    return repr(text if len(text) <= MAX_QUOTED else text[:MAX_QUOTED] + "...")


def text_codec(name: str) -> str:
    """The Python codec of a character set.

    Raises:
        ValueError: Python knows no character set of this name.
    """
    try:
        codec = codecs.lookup(name).name
        "a".encode(codec)  # refuses codecs that are not for text
    except (LookupError, ValueError):
        codec = "undefined"
    if codec.replace("_", "-") in _NO_TEXT:
        raise ValueError(f"{name!r} is no known encoding, expected a name such as 'utf-8', 'gbk' or 'cp1252'")
    return _SUPERSETS.get(codec, codec)


def decode_xml(data: bytes, encoding: str | None = None) -> str:
    """The text of an XML file by its byte order mark, its declaration, or else `encoding` (default UTF-8).

    A file whose declaration turns out to be false is read by `encoding` where one is given.

    Raises:
        XmlFault: the bytes are no text in that encoding.
    """
    if not data:
        raise XmlFault("bad-xml", "is empty (0 bytes), expected an XML file")
    for bom, codec in _BOMS:
        if data.startswith(bom):
            return _decode(data[len(bom) :], codec, "its byte order mark")
    for start, codec in _BARE_UTF16:
        if data.startswith(start):
            return _decode(data, codec, "its first bytes")
    declared = _DECLARATION.match(data[:400].lstrip())
    if declared is None:
        return _decode(data, text_codec(encoding or "utf-8"), "[source] encoding" if encoding else "the XML standard, as it declares none")
    try:
        return _decode(data, _declared_codec(declared[1].decode("ascii")), "its declaration")
    except XmlFault:
        if encoding is None:
            raise
        return _decode(data, text_codec(encoding), "[source] encoding")


def _declared_codec(name: str) -> str:
    try:
        codec = text_codec(name)
    except ValueError:
        raise XmlFault("bad-xml", f"line 1: declares the encoding {name!r}, which is not known; {_WAY_OUT}", 1) from None
    # The declaration could be read byte by byte, so the file is in no encoding of two- or four-byte units.
    if codec.startswith(("utf-16", "utf-32")):
        raise XmlFault("bad-xml", f"line 1: declares the encoding {name!r}, and the bytes are not in it; {_WAY_OUT}", 1)
    return codec


def _decode(data: bytes, codec: str, by: str) -> str:
    try:
        return data.decode(codec)
    except UnicodeDecodeError as e:
        line = data.count(b"\n", 0, e.start) + 1
        column = e.start - (data.rfind(b"\n", 0, e.start) + 1) + 1
        where = f"line {line}, column {column}: byte 0x{data[e.start]:02x}"
        message = f"{where} is not text in {codec} (the encoding by {by}); {_WAY_OUT}"
        raise XmlFault("bad-xml", message, line) from None


def parse_voc(text: str) -> VocDocument:
    """Find the elements of a VOC annotation, by local name and in any order.

    Raises:
        XmlFault: `bad-xml` (not well-formed, or nested deeper than `MAX_DEPTH`), `unsafe-xml` (declares entities), `not-voc` (another
            root element), `file-too-large` (over `MAX_OBJECTS` objects).
    """
    reader = _Reader()
    parser = expat.ParserCreate()
    parser.buffer_text = True
    parser.StartElementHandler = reader.start
    parser.EndElementHandler = reader.end
    parser.CharacterDataHandler = reader.text.append
    parser.EntityDeclHandler = _unsafe
    parser.UnparsedEntityDeclHandler = _unsafe
    parser.ExternalEntityRefHandler = _unsafe
    parser.SkippedEntityHandler = _unsafe
    try:
        parser.Parse(text, True)
    except expat.ExpatError as e:
        reason = expat.ErrorString(e.code)
        raise XmlFault("bad-xml", f"line {e.lineno}, column {e.offset + 1}: not well-formed XML: {reason}", e.lineno) from None
    except UnicodeEncodeError:
        raise XmlFault("bad-xml", "holds a lone surrogate, which is no character") from None
    return reader.document


class _Found(Exception):
    pass


def root_element(start: bytes) -> str | None:
    """Local name of a file's root element, from its first bytes; None where that can't be told. Every encoding's markup is ASCII."""
    codec = next((c for mark, c in _BOMS + _BARE_UTF16 if c.startswith("utf-16") and start.startswith(mark)), "latin-1")

    def found(tag: str, _attributes: dict[str, str]) -> NoReturn:
        raise _Found(tag.rpartition(":")[2])

    parser = expat.ParserCreate()
    parser.StartElementHandler = found
    parser.EntityDeclHandler = _unsafe
    try:
        parser.Parse(start.removeprefix(codecs.BOM_UTF8).decode(codec, "ignore").removeprefix("\ufeff"), False)
    except _Found as e:
        return str(e)
    except (expat.ExpatError, XmlFault, UnicodeEncodeError):
        return None
    return None


def _unsafe(*args: object) -> NoReturn:
    name = next((a for a in args if isinstance(a, str)), "")
    raise XmlFault("unsafe-xml", f"declares or uses the entity {quoted(name)}: entities are never expanded; write the text out")


class _Reader:
    """Expat handlers. `depth` counts open elements; what lies in an element that does not matter is passed over by depth alone."""

    def __init__(self) -> None:
        self.document = VocDocument()
        self.text: list[str] = []
        self._depth = 0
        self._object: VocObject | None = None
        self._fields: dict[str, str] | None = None  # children of the open <size> or <bndbox>
        self._leaf = 0  # depth of the innermost element that was opened last: only that one is plain text

    def start(self, tag: str, _attributes: dict[str, str]) -> None:
        self._depth = depth = self._depth + 1
        self._leaf = depth
        self.text.clear()
        if depth > 3 or (depth == 3 and self._object is None):
            if depth > MAX_DEPTH:
                raise XmlFault("bad-xml", f"elements are nested over {MAX_DEPTH} deep")
            return
        name = tag.rpartition(":")[2]
        if depth == 1:
            if name != "annotation":
                raise XmlFault("not-voc", f"the root element is <{name[:MAX_QUOTED]}>, a Pascal VOC file has <annotation>")
        elif depth == 2:
            if name == "object":
                if len(self.document.objects) == MAX_OBJECTS:
                    raise XmlFault("file-too-large", f"has over {MAX_OBJECTS} objects")
                self._object = VocObject()
                self.document.objects.append(self._object)
            elif name == "size" and self.document.size is None:
                self.document.size = self._fields = {}
        elif self._object is not None:
            self._start_part(self._object, name)

    def _start_part(self, obj: VocObject, name: str) -> None:
        if name == "bndbox":
            if obj.box is not None:
                obj.repeated = "bndbox"
            obj.box = self._fields = {}
        elif name in _SHAPES:
            obj.shape = name

    def end(self, tag: str) -> None:
        depth = self._depth
        self._depth = depth - 1
        if depth == self._leaf:
            self._end_leaf(tag, depth)
        else:
            self._end_parent(depth)

    def _end_leaf(self, tag: str, depth: int) -> None:
        name = tag.rpartition(":")[2]
        if self._object is None:
            if depth == 3 and self._fields is not None:
                self._fields.setdefault(name, "".join(self.text))
            elif depth == 2 and name == "filename" and self.document.filename is None:
                self.document.filename = "".join(self.text).strip()
            elif depth == 2 and name == "size":
                self._fields = None
        elif depth == 4 and self._fields is not None:
            if name in CORNERS:
                self._put(self._fields, name)
        elif depth == 3:
            self._fields = None
            if name in _TEXTS:
                self._put(self._object.texts, name)
        elif depth == 2:
            self._object = None

    def _put(self, fields: dict[str, str], name: str) -> None:
        if name in fields and self._object is not None:
            self._object.repeated = name
        fields[name] = "".join(self.text)

    def _end_parent(self, depth: int) -> None:
        if depth == 2:
            self._object = self._fields = None
        elif depth == 3:
            self._fields = None
