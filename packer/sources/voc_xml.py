"""Reads one Pascal VOC annotation file: bytes -> text -> the few elements that matter. Nothing outside the bytes is ever opened.

The text is decoded here and not by expat, which knows no multi-byte encoding (gbk, Shift_JIS). A file that declares an entity is
refused before its tree is built: handlers in Python for every element would take twice as long.
"""

from __future__ import annotations

import codecs
import re
from dataclasses import dataclass, field
from typing import NoReturn
from xml.etree import ElementTree
from xml.parsers import expat

from packer.content import told

MAX_XML_BYTES = 1 << 22
MAX_OBJECTS = 100_000
MAX_QUOTED = 80
_DECLARATION = re.compile(rb"""<\?xml\s[^>]{0,200}?\bencoding\s*=\s*["']([A-Za-z][A-Za-z0-9._:-]{0,40})["']""")
_BOMS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
_BARE_UTF16 = ((b"<\0", "utf-16-le"), (b"\0<", "utf-16-be"))
# Files that say gb2312 or gbk often hold characters of its supersets; what is valid in one means the same in the other.
_SUPERSETS = {"gb2312": "gb18030", "gbk": "gb18030"}
# No character sets, or of quadratic cost.
_NO_TEXT = {"punycode", "idna", "unicode-escape", "raw-unicode-escape", "utf-7", "undefined"}
_WAY_OUT = '[source] encoding in a recipe, such as "gbk", names the true one'
# Children of the root that hold no object; what lies in others is looked through.
_PLAIN = frozenset({"folder", "filename", "path", "source", "owner", "size", "segmented"})
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
    if not data.startswith(b"<") and (what := told(data)) is not None:
        raise XmlFault("bad-xml", f"is {what}; expected an XML file")
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
        XmlFault: `bad-xml` (not well-formed), `unsafe-xml` (declares entities), `not-voc` (another root element), `misplaced-object`
            (one that would be passed over), `file-too-large` (over `MAX_OBJECTS` objects).
    """
    try:
        if "<!ENTITY" in text or "<!ATTLIST" in text:
            _refuse_entities(text)
        root = ElementTree.fromstring(text)  # without declared entities there is nothing to expand or to fetch
    except (ElementTree.ParseError, expat.ExpatError) as e:
        line, column = e.position if isinstance(e, ElementTree.ParseError) else (e.lineno, e.offset)
        reason = expat.ErrorString(e.code)
        raise XmlFault("bad-xml", f"line {line}, column {column + 1}: not well-formed XML: {reason}", line) from None
    except UnicodeEncodeError:
        raise XmlFault("bad-xml", "holds a lone surrogate, which is no character") from None
    if (name := _local(root)) != "annotation":
        raise XmlFault("not-voc", f"the root element is <{name[:MAX_QUOTED]}>, a Pascal VOC file has <annotation>")
    document = VocDocument()
    for child in root:
        name = _local(child)
        if name == "object":
            document.objects.append(_object(child))
        elif name == "filename" and document.filename is None:
            document.filename = (child.text or "").strip()
        elif name == "size" and document.size is None:
            document.size = {_local(part): part.text or "" for part in reversed(child)}  # the first of a name counts
        elif name not in _PLAIN:
            _refuse_objects(child, "<annotation>")
    if len(document.objects) > MAX_OBJECTS:
        raise XmlFault("file-too-large", f"has over {MAX_OBJECTS} objects")
    return document


def _object(element: ElementTree.Element) -> VocObject:
    """Direct children only: a ``<part>`` has names and boxes of its own. An element with children is no plain text."""
    found = VocObject()
    for child in element:
        name = _local(child)
        if name in _TEXTS and not len(child):
            if name in found.texts:
                found.repeated = name
            found.texts[name] = child.text or ""
        elif name == "bndbox":
            if found.box is not None:
                found.repeated = name
            found.box = {}
            for corner in child:
                name = _local(corner)
                if name in found.box:
                    found.repeated = name
                if name in CORNERS and not len(corner):
                    found.box[name] = corner.text or ""
        elif name in _SHAPES:
            found.shape = name
        elif name.lower() == "object":
            _refuse_objects(child, "<object>")
    return found


def _refuse_objects(element: ElementTree.Element, place: str) -> None:
    """Raise where an element that is none of VOC's holds an object or a box: without it the picture would pass for one without defects."""
    for inner in element.iter():
        if (name := _local(inner)).lower() in ("object", "bndbox"):
            parent = place if inner is element else f"<{_local(element)[:MAX_QUOTED]}>"
            raise XmlFault(
                "misplaced-object",
                f"<{name}> lies in {parent}, where none is looked for: every object is an <object> directly in <annotation>",
            )


def _local(element: ElementTree.Element) -> str:
    return element.tag.rpartition("}")[2]


def _refuse_entities(text: str) -> None:
    """Raise where the text really declares an entity, or attributes: in a comment the word is harmless.

    The default value of an attribute is repeated in every element: 300 kB of XML would take gigabytes.
    """
    parser = expat.ParserCreate()
    parser.AttlistDeclHandler = _unsafe_attributes
    parser.EntityDeclHandler = parser.UnparsedEntityDeclHandler = parser.ExternalEntityRefHandler = _unsafe
    parser.Parse(text, True)


class _Found(Exception):
    pass


def root_element(start: bytes) -> str | None:
    """Local name of a file's root element, from its first bytes; None where that can't be told. Every encoding's markup is ASCII."""
    codec = next((c for mark, c in _BOMS + _BARE_UTF16 if c != "utf-8" and start.startswith(mark)), "latin-1")

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


def _unsafe_attributes(element: str, *_: object) -> NoReturn:
    raise XmlFault("unsafe-xml", f"declares attributes of the element {quoted(element)}, which may multiply their text: leave the DTD out")


def _unsafe(*args: object) -> NoReturn:
    name = next((a for a in args if isinstance(a, str)), "")
    raise XmlFault("unsafe-xml", f"declares or uses the entity {quoted(name)}: entities are never expanded; write the text out")
