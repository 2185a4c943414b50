"""One finding per (code, sample), shown in part, kept whole."""

from __future__ import annotations

import json

import pytest

from packer.findings import NUM_SHOWN, Findings, as_dict, as_json, as_line
from packer.sample import Finding


@pytest.fixture
def shown() -> list[str]:
    return []


@pytest.fixture
def findings(shown: list[str]) -> Findings:
    return Findings(shown.append)


def test_nothing_found_says_nothing(findings: Findings, shown: list[str]) -> None:
    assert (len(findings), findings.jsonl(), findings.summary(), shown) == (0, "", [], [])
    assert findings.counts() == {"error": 0, "skip": 0, "warning": 0}


def test_a_further_one_of_the_same_code_and_sample_only_counts(findings: Findings, shown: list[str]) -> None:
    for line in range(1, 1001):
        findings.add(Finding("skip", "no-class", "b.csv", f"line {line}", sample="a.jpg", line=line))
    (only,) = findings
    assert (only.count, only.line, only.message) == (1000, 1, "line 1")
    assert len(shown) == 1
    assert findings.counts()["skip"] == 1


def test_counts_of_both_are_added(findings: Findings) -> None:
    findings.add(Finding("skip", "c", "p", "m", sample="a.jpg", count=3))
    findings.add(Finding("skip", "c", "p", "m", sample="a.jpg", count=4))
    assert [f.count for f in findings] == [7]


def test_a_more_severe_one_takes_the_place(findings: Findings) -> None:
    """Else a sample would be left out while its finding is a warning."""
    findings.add(Finding("warning", "c", "p", "harmless", sample="a.jpg"))
    findings.add(Finding("skip", "c", "p", "left out", sample="a.jpg"))
    findings.add(Finding("warning", "c", "p", "harmless", sample="a.jpg"))
    (only,) = findings
    assert (only.level, only.message, only.count) == ("skip", "left out", 3)
    assert findings.counts() == {"error": 0, "skip": 1, "warning": 0}


def test_other_code_sample_or_place_is_another_finding(findings: Findings) -> None:
    for finding in (
        Finding("skip", "c", "p", "m", sample="a.jpg"),
        Finding("skip", "d", "p", "m", sample="a.jpg"),
        Finding("skip", "c", "p", "m", sample="b.jpg"),
        Finding("skip", "c", "p", "m"),
        Finding("skip", "c", "q", "m"),
        Finding("skip", "c", "q", "m", line=2),
    ):
        findings.add(finding)
    assert len(findings) == 6
    assert {f.count for f in findings} == {1}


def test_the_first_twenty_of_a_code_are_shown_and_all_are_kept(findings: Findings, shown: list[str]) -> None:
    for i in range(NUM_SHOWN + 5):
        findings.add(Finding("warning", "many", f"{i}.jpg", "m"))
    findings.add(Finding("warning", "few", "x.jpg", "m"))
    assert len(shown) == NUM_SHOWN + 1
    assert len(findings.jsonl().splitlines()) == NUM_SHOWN + 6
    head, tail = findings.summary()
    assert head == "26 findings: 25 many (warning), 1 few (warning)"
    assert "5 of them not shown" in tail


def test_summary_names_the_severe_ones_first_then_the_frequent_ones(findings: Findings) -> None:
    for level, code, n in (("warning", "w", 3), ("skip", "rare", 1), ("skip", "often", 2), ("error", "e", 1)):
        for i in range(n):
            findings.add(Finding(level, code, f"{i}", "m"))  # type: ignore[arg-type]  # the levels are literals above
    assert findings.summary() == ["7 findings: 1 e (error), 2 often (skip), 1 rare (skip), 3 w (warning)"]


def test_order_is_that_of_adding(findings: Findings) -> None:
    for name in ("c", "a", "b", "a"):
        findings.add(Finding("skip", "x", name, "m"))
    assert [f.path for f in findings] == ["c", "a", "b"]


def test_json_holds_what_says_something() -> None:
    whole = Finding("error", "c", "p.csv", "m")
    assert json.loads(as_json(whole)) == {"level": "error", "code": "c", "path": "p.csv", "sample": None, "message": "m"}
    rich = Finding("skip", "c", "p.csv", "m", sample="a.jpg", line=3, object=2, count=5)
    assert as_dict(rich) == {
        "level": "skip",
        "code": "c",
        "path": "p.csv",
        "sample": "a.jpg",
        "message": "m",
        "line": 3,
        "object": 2,
        "count": 5,
    }


@pytest.mark.parametrize("name", ["a\nb.jpg", "ü.jpg", 'a"b.jpg', "inclusi\udcf3n.jpg", "裂纹\x1b[31m.jpg"])
def test_any_name_makes_one_line_that_reads_back(findings: Findings, name: str) -> None:
    findings.add(Finding("skip", "c", name, f"about {name}", sample=name))
    text = findings.jsonl().encode("utf-8", "backslashreplace").decode()
    assert text.count("\n") == 1
    assert json.loads(text)["path"] == name
    line = as_line(Finding("skip", "c", name, "m"))
    assert line.isprintable()
    line.encode()


def test_line_for_people() -> None:
    assert as_line(Finding("warning", "c", "a.jpg", "is odd", sample="a.jpg")) == "warning: a.jpg: is odd (c)"
    assert as_line(Finding("skip", "c", "b.csv", "is odd", sample="a.jpg", line=7)) == "skip: b.csv:7 [a.jpg]: is odd (c)"
    assert as_line(Finding("skip", "c", "b.csv", "is odd", sample="a.jpg", count=1201)).endswith(
        "(and 1,200 more like it in this sample) (c)"
    )
    assert as_line(Finding("error", "c", ".", "is odd", count=2)) == "error: .: is odd (and 1 more like it) (c)"
