"""`read_table`: quoting, encodings, true line numbers, and what is said about files that are no tables."""

from __future__ import annotations

import csv
import hashlib
import io
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packer.sample import PackError
from packer.sources.table import Table, read_table


def table(tmp_path: Path, data: bytes | str, **options: Any) -> Table:
    path = tmp_path / "t.csv"
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return read_table(path, "sub/t.csv", **options)


def refusal(tmp_path: Path, data: bytes | str, **options: Any) -> str:
    with pytest.raises(PackError) as caught:
        list(table(tmp_path, data, **options).rows)
    assert str(caught.value).startswith("sub/t.csv")
    return str(caught.value)


def test_header_is_lower_cased_and_everything_is_stripped(tmp_path: Path) -> None:
    t = table(tmp_path, " Image , LabelName\n a.jpg ,\tCrack \n")
    assert t.header == ["image", "labelname"]
    assert list(t.rows) == [(2, ["a.jpg", "Crack"])]


def test_without_header_the_first_row_is_data(tmp_path: Path) -> None:
    t = table(tmp_path, "a.jpg,crack\n", header=False)
    assert (t.header, list(t.rows)) == ([], [(1, ["a.jpg", "crack"])])


@pytest.mark.parametrize("words", ["NA", "None", "nan", "", "01", "1.0", "1e5", "true"])
def test_cells_stay_text(tmp_path: Path, words: str) -> None:
    assert list(table(tmp_path, f"image,label\na.jpg,{words}\n").rows) == [(2, ["a.jpg", words])]


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
def test_lines_are_physical_lines(tmp_path: Path, newline: str) -> None:
    rows = ["image,label", "", 'a.jpg,"two', 'lines"', " , ", "b.jpg,x"]
    t = table(tmp_path, newline.join(rows))
    assert [line for line, _ in t.rows] == [3, 6]


def test_rfc_4180(tmp_path: Path) -> None:
    t = table(tmp_path, 'image,label\n"weld, top.jpg","a ""b"""\n4"pipe.jpg, "spaced"\n')
    assert [cells for _, cells in t.rows] == [["weld, top.jpg", 'a "b"'], ['4"pipe.jpg', "spaced"]]


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_delimiter_is_taken_from_the_first_line(tmp_path: Path, delimiter: str) -> None:
    t = table(tmp_path, f'\n"a,b;c|d{chr(9)}"{delimiter}x{delimiter}y\n1{delimiter}2{delimiter}3\n')
    assert t.delimiter == delimiter
    assert list(t.rows) == [(3, ["1", "2", "3"])]


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("line", ["sep=;", "SEP=;", '"sep=;"', "\ufeffsep=;"])
def test_excels_line_above_the_table_gives_the_delimiter(tmp_path: Path, line: str, newline: str) -> None:
    t = table(tmp_path, newline.join([line, "a,b,c;d", "1,2,3;4", ""]))
    assert (t.delimiter, t.header, t.first_line) == (";", ["a,b,c", "d"], "a,b,c;d")
    assert list(t.rows) == [(3, ["1,2,3", "4"])]


def test_a_line_sep_is_passed_over_with_a_given_delimiter_and_without_header(tmp_path: Path) -> None:
    t = table(tmp_path, "sep=;\na;b,c\n", delimiter=",", header=False)
    assert list(t.rows) == [(2, ["a;b", "c"])]
    assert table(tmp_path, "sep=\t\na\tb,c,d\n").header == ["a", "b,c,d"]
    assert table(tmp_path, "sep=;\n").header == []


@pytest.mark.parametrize("line", ["sep=", "sep=;;x", "separator=;"])
def test_other_lines_are_no_line_sep(tmp_path: Path, line: str) -> None:
    assert table(tmp_path, line + ",b\n1,2\n", delimiter=",").header == [line, "b"]
    assert "sep" in table(tmp_path, line + "\n1\n").header[0]


def test_a_given_delimiter_wins(tmp_path: Path) -> None:
    assert table(tmp_path, "a;b,c,d\n", delimiter=";").header == ["a", "b,c,d"]


@pytest.mark.parametrize("delimiter", ["", ",,", '"', "\n", "\0"])
def test_a_wrong_delimiter_is_refused(tmp_path: Path, delimiter: str) -> None:
    assert "delimiter" in refusal(tmp_path, "a,b\n", delimiter=delimiter)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_byte_order_marks(tmp_path: Path, encoding: str) -> None:
    t = table(tmp_path, "Größe,label\nä.jpg,crack\n".encode(encoding))
    assert t.header == ["größe", "label"]
    assert list(t.rows) == [(2, ["ä.jpg", "crack"])]


def test_big_endian_mark(tmp_path: Path) -> None:
    assert table(tmp_path, b"\xfe\xff" + "a,b\n".encode("utf-16-be")).header == ["a", "b"]


def test_a_given_encoding(tmp_path: Path) -> None:
    assert list(table(tmp_path, "a,b\n裂纹,1\n".encode("gbk"), encoding="gbk").rows) == [(2, ["裂纹", "1"])]
    assert table(tmp_path, "\ufeffa,b\n", encoding="UTF8").header == ["a", "b"]


@pytest.mark.parametrize("encoding", ["no-such", "base64", "rot13"])
def test_an_unknown_encoding_is_refused(tmp_path: Path, encoding: str) -> None:
    assert encoding in refusal(tmp_path, "a,b\n", encoding=encoding)


@pytest.mark.parametrize("newline", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("before", [0, 40_000])
def test_a_wrong_byte_is_named_with_line_and_value(tmp_path: Path, newline: bytes, before: int) -> None:
    rows = [b"image,label"] + [b"a.jpg,crack"] * before + [b"a.jpg,inclusi\xf3n"] + [b"b.jpg,x"] * 3
    message = refusal(tmp_path, newline.join(rows))
    assert f"line {before + 2}" in message
    assert "0xf3" in message
    assert "encoding" in message
    assert "UTF-8" in message


def test_a_character_cut_off_at_the_end(tmp_path: Path) -> None:
    assert "line 2" in refusal(tmp_path, "a,b\nx,ä".encode()[:-1])


def test_a_nul_is_named(tmp_path: Path) -> None:
    assert "line 2: holds a NUL" in refusal(tmp_path, "a,b\nx\0,y\n")
    assert "utf-16" in refusal(tmp_path, "a,b\n".encode("utf-16-le"))


@pytest.mark.parametrize("tail", ["", "\n", "c,d\n" * 5, "c,d\n" * 100_000])
def test_a_quote_never_closed_is_named_with_the_line_it_opens_in(tmp_path: Path, tail: str) -> None:
    message = refusal(tmp_path, 'a,b\nx,y\nx,"y\n' + tail)
    assert "line 3" in message
    assert "never closed" in message


def test_an_endless_cell_or_line_is_refused(tmp_path: Path) -> None:
    assert "line 2: field larger" in refusal(tmp_path, 'a,b\n"' + ("x" * 4095 + "\n") * (1 << 12) + 'x",y\n')
    assert "line 1: has over" in refusal(tmp_path, "x," * (1 << 23) + "x")


def test_an_empty_file_has_no_header_and_no_rows(tmp_path: Path) -> None:
    for data in (b"", b"\n\n", b"\xef\xbb\xbf", b",,\n"):
        t = table(tmp_path, data)
        assert (t.header, list(t.rows)) == ([], [])


def test_what_is_no_readable_file(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "gone.csv"):
        with pytest.raises(PackError, match=r"t\.csv: cannot be read"):
            read_table(path, "t.csv")


def test_digest_and_first_line(tmp_path: Path) -> None:
    t = table(tmp_path, "\n image,label \nx,y\n")
    assert t.digest == hashlib.sha256(b"\n image,label \nx,y\n").hexdigest()
    assert t.first_line == "image,label"
    assert len(table(tmp_path, "x" * 1000).first_line) < 250


CELL = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), max_size=6) | st.sampled_from(
    ['"', ",", "\n", "a\r\nb", " x "]
)


@settings(deadline=None, max_examples=200)
@given(st.lists(st.lists(CELL, min_size=1, max_size=4), max_size=6), st.sampled_from(["\n", "\r\n"]), st.sampled_from(["utf-8", "utf-16"]))
def test_whatever_a_csv_writer_writes_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, rows: list[list[str]], end: str, code: str
) -> None:
    written, expected = "", []
    for row in rows:
        cells = [cell.strip() for cell in row]
        if any(cells):
            expected.append((1 + len(list(io.StringIO(written, newline=""))), cells))
        text = io.StringIO(newline="")
        bare_return = any("\r" in cell for cell in row)  # Python 3.11's writer leaves it unquoted
        csv.writer(text, lineterminator=end, quoting=csv.QUOTE_ALL if bare_return else csv.QUOTE_MINIMAL).writerow(row)
        written += text.getvalue()
    path = tmp_path_factory.getbasetemp() / "written.csv"
    path.write_bytes(written.encode(code))
    assert list(read_table(path, "written.csv", delimiter=",", header=False).rows) == expected
