"""Reads one delimited text file as a stream of text cells: no type guessing, true line numbers, strict decoding.

Quoting is RFC 4180's. Cells are stripped; header names are stripped and lower-cased.
"""

from __future__ import annotations

import codecs
import csv
import io
import re
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path

from loaders.format import sha256_file
from packer.content import LOOK_BYTES, told_of_text
from packer.sample import PackError
from packer.sources.voc_xml import text_codec

DELIMITERS = (",", ";", "\t", "|")
MAX_LINE_CHARS = 1 << 24
# The module's own limit, 131,072, is less than one cell of run-length masks has. The setting is the whole process's.
csv.field_size_limit(MAX_LINE_CHARS)
_BOMS = {
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF32_LE: "utf-32",  # before UTF-16, whose mark it starts with
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
_SEP_LINE = re.compile(r'"?sep=([^"\r\n])"?', re.IGNORECASE)
_QUOTED = re.compile(r'"[^"]*"?')

Row = tuple[int, list[str]]


@dataclass(slots=True)
class Table:
    """One delimited file, opened.

    `header`: names, stripped and lower-cased, or [] where the file has none. `rows`: (line, cells), `line` being the 1-based physical
    line on which the row starts; rows without any text in them are passed over. It reads the file while it is consumed and raises
    `PackError` where the file is no such table. `first_line`: the first row's text, shortened, for messages.
    """

    path: Path
    header: list[str]
    rows: Iterator[Row]
    delimiter: str
    first_line: str

    @property
    def digest(self) -> str:
        """Hex SHA-256 of the file's bytes (reads the file)."""
        return sha256_file(self.path)


def read_table(path: Path, name: str, *, encoding: str | None = None, delimiter: str | None = None, header: bool = True) -> Table:
    """Open a delimited file of any size; it is streamed, one row at a time.

    Args:
        path: The file.
        name: What messages call it (its path below the source root).
        encoding: Of the text. None: UTF-8, or what a byte order mark says (UTF-8, UTF-16, UTF-32).
        delimiter: One character. None: what Excel's line ``sep=;`` above the table says, else of comma, semicolon, tab and bar the one
            that is most often in the first line. Such a line is never part of the table.
        header: The first row holds the column names.

    Raises:
        PackError: the file cannot be read, is not text in this encoding, holds a NUL, a quote that is never closed or a line or
            cell over `MAX_LINE_CHARS` characters; from here, or from `rows`.
    """
    if delimiter is not None and (len(delimiter) != 1 or delimiter in '"\r\n\0'):
        raise PackError(f"{name}: delimiter is {delimiter!r}, expected one character such as ',' or ';'")
    encoding = _encoding(path, name, encoding)
    first_line, sep_line, sep = _start(path, name, encoding)
    delimiter = delimiter or sep or _delimiter(first_line)
    rows: Iterator[Row] = _rows(path, name, encoding, delimiter, sep_line)
    names: list[str] = []
    if header:
        names = [cell.lower() for cell in next(rows, (0, []))[1]]
    shown = first_line.strip()
    return Table(path, names, rows, delimiter, shown if len(shown) <= 200 else shown[:200] + "...")


def _encoding(path: Path, name: str, given: str | None) -> str:
    """The codec's name, with a byte order mark taken care of."""
    try:
        with path.open("rb") as f:
            start = f.read(LOOK_BYTES)
    except OSError as e:
        raise PackError(f"{name}: cannot be read: {e.strerror}") from None
    try:
        codec = None if given is None else text_codec(given)
    except ValueError as e:
        raise PackError(f"{name}: encoding {e}") from None
    if (what := told_of_text(start, codec)) is not None:
        raise PackError(f"{name}: is {what}; expected a table in text (CSV)")
    if codec is None:
        return next((codec for bom, codec in _BOMS.items() if start.startswith(bom)), "utf-8")
    return "utf-8-sig" if codec == "utf-8" else codec


def _rows(path: Path, name: str, encoding: str, delimiter: str, sep_line: int) -> Generator[Row, None, None]:
    ended = False

    def lines(f: io.TextIOBase) -> Iterator[str]:
        nonlocal ended
        number = 0
        while line := f.readline(MAX_LINE_CHARS):
            number += 1
            if len(line) == MAX_LINE_CHARS:
                raise PackError(f"{name}, line {number}: has over {MAX_LINE_CHARS} characters; is this a text table?")
            if "\0" in line:
                raise PackError(f"{name}, line {number}: holds a NUL character; a file in UTF-16 without byte order mark needs {_HOW}")
            yield "\n" if number == sep_line else line  # a blank line in its place keeps the line numbers true
        ended = True

    start = 0
    try:
        with path.open(encoding=encoding, newline="") as f:
            reader = csv.reader(lines(f), delimiter=delimiter, skipinitialspace=True)
            while True:
                start = reader.line_num + 1
                row = next(reader, None)
                if row is None:
                    return
                if ended:  # the reader asked for one more line in the middle of this row
                    raise PackError(f'{name}, line {start}: a quote (") is opened in this row and never closed')
                cells = [cell.strip() for cell in row]
                if any(cells):
                    yield start, cells
    except UnicodeDecodeError:
        raise PackError(_bad_byte(path, name, encoding)) from None
    except csv.Error as e:
        raise PackError(f'{name}, line {start}: {e}; is a quote (") in this row never closed?') from None
    except OSError as e:
        raise PackError(f"{name}: cannot be read: {e.strerror}") from None


_HOW = '[source] encoding = "utf-16-le" in a recipe (the name of the file\'s encoding)'


def _start(path: Path, name: str, encoding: str) -> tuple[str, int, str | None]:
    """The table's first line of text, then the number (0: none) and the delimiter of Excel's line ``sep=;`` above it."""
    number, sep_line, sep = 0, 0, None
    try:
        with path.open(encoding=encoding, newline="") as f:
            while line := f.readline(MAX_LINE_CHARS):
                number += 1
                if not sep_line and (match := _SEP_LINE.fullmatch(line.rstrip("\r\n"))):
                    sep_line, sep = number, match[1]
                elif line.strip():
                    return line, sep_line, sep
    except UnicodeDecodeError:
        raise PackError(_bad_byte(path, name, encoding)) from None
    return "", sep_line, sep


def _delimiter(line: str) -> str:
    bare = _QUOTED.sub("", line)
    return max(DELIMITERS, key=bare.count)


def _bad_byte(path: Path, name: str, encoding: str) -> str:
    """What to say of a file that does not decode: the line and value of the first wrong byte."""
    decoder = codecs.getincrementaldecoder(encoding)()
    newlines = io.IncrementalNewlineDecoder(None, translate=True)
    line, wrong = 1, "bytes"
    with path.open("rb") as f:
        try:
            while chunk := f.read(1 << 16):
                line += newlines.decode(decoder.decode(chunk)).count("\n")
            decoder.decode(b"", True)
            wrong = "the last bytes"
        except UnicodeDecodeError as e:
            line += newlines.decode(e.object[: e.start].decode(encoding, "ignore"), True).count("\n")
            wrong = f"byte 0x{e.object[e.start]:02x}"
    shown = "UTF-8" if encoding.startswith("utf-8") else encoding
    return (
        f"{name}, line {line}: {wrong} is not text in {shown}; save the file as UTF-8, or name its encoding in a recipe: "
        f'[source] encoding = "cp1252" (western Windows), "gbk", ...'
    )
