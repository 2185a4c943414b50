"""Results as a table on the terminal, as JSON and as Markdown for the README. Targets are printed, and kept out of the README."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from contest import Result, ratios

START, END = "<!-- speed -->", "<!-- /speed -->"
Row = dict[str, Any]


def rows_of(results: Sequence[Result]) -> list[Row]:
    """One dict a contestant, ours first, for JSON."""
    ours = next(r for r in results if r.contestant.role == "ours")
    rows: list[Row] = []
    for result in results:
        c = result.contestant
        row: Row = {"name": c.name, "role": c.role, "venv": c.venv, "note": c.note}
        if result.failure:
            rows.append({**row, "failure": result.failure})
            continue
        row["rates"] = [round(rate, 1) for rate in result.rates]
        row["per_cpu_s"] = round(statistics.median(result.per_cpu_s), 1)
        row["peak_mb"] = round(result.peak_mb, 1)
        row["read_bytes"] = round(result.read_bytes)
        if c.picture_bytes:
            row |= {"read_share": round(result.read_bytes / c.picture_bytes, 4), "read_target": c.read_target}
        if result is not ours:
            median, low, high = ratios(ours, result)
            row |= {"ratio": round(median, 3), "ratio_low": round(low, 3), "ratio_high": round(high, 3), "target": c.target}
            row["reached"] = None if c.target is None else median >= c.target
        rows.append(row)
    return rows


def number(value: float | None) -> str:
    """Three significant digits, no exponent; nothing for None."""
    if value is None:
        return ""
    if abs(value) >= 100:
        return f"{float(f'{value:.3g}'):,.0f}"
    return f"{value:.3g}"


def show(title: str, rows: Sequence[Row]) -> None:
    """Print a contest, with the targets."""
    table = Table(
        "",
        "img/s",
        "ours / it",
        "lowest to highest",
        "target",
        "img per CPU-s",
        "peak MB",
        "kB read a sample",
        title=title,
        title_justify="left",
    )
    for row in rows:
        if "failure" in row:
            table.add_row(row["name"], "failed", "", "", "", "", "", "")
            continue
        target = ""
        if row.get("target") is not None:
            target = f"{row['target']:g} {'ok' if row['reached'] else 'below'}"
        table.add_row(
            row["name"],
            number(statistics.median(row["rates"])),
            f"{row['ratio']:.2f}" if "ratio" in row else "",
            f"{row['ratio_low']:.2f} to {row['ratio_high']:.2f}" if "ratio" in row else "",
            target,
            number(row["per_cpu_s"]),
            number(row["peak_mb"]),
            "" if row["read_bytes"] is None else number(row["read_bytes"] / 1000),
        )
    console = Console(width=150)
    console.print(table)
    for row in rows:
        if "failure" in row:
            console.print(f"{row['name']}: {row['failure']}", markup=False)
        if "read_share" in row:
            target = f"; at most {row['read_target']:.0%}: {'ok' if row['read_share'] <= row['read_target'] else 'above'}"
            console.print(f"{row['name']} reads {row['read_share']:.1%} of a picture's bytes{target if row['read_target'] else ''}")


def show_facts(title: str, facts: Sequence[Row]) -> None:
    """Print a workload that is no contest: facts with limits."""
    table = Table("", "measured", "at most", title=title, title_justify="left")
    for fact in facts:
        limit = "" if fact["limit"] is None else f"{fact['limit']:g} {fact['unit']} {'ok' if fact['value'] <= fact['limit'] else 'above'}"
        table.add_row(fact["name"], f"{number(fact['value'])} {fact['unit']}", limit)
    Console(width=150).print(table)


def markdown(result: Row) -> str:
    """The README's part: where and when it was measured, then a table of contests and one of facts."""
    host, lines = result["machine"], []
    lines.append(
        f"Measured on {result['date']} on {host['cores']} cores of {host['cpu']}, {host['memory_gb']:.0f} GB, {host['system']}; files in "
        f"the page cache. {result['rounds']} rounds of {result['seconds']:g} s each, by turns, each loader in a process of its own: "
        "medians, in brackets the lowest and highest ratio of a round. Memory: the most above the imports, without pages of files."
    )
    lines += ["", "Versions: " + ", ".join(f"{name} {version}" for name, version in sorted(result["versions"].items())) + ".", ""]
    lines += ["| | images/s | ours / it | images per CPU-second | peak MB |", "|---|---|---|---|---|"]
    contests = {name: w for name, w in result["workloads"].items() if "rows" in w}
    for workload in contests.values():
        lines.append(f"| **{workload['title']}** | | | | |")
        lines += [_markdown_row(row) for row in workload["rows"] if "failure" not in row]
    facts = {name: w for name, w in result["workloads"].items() if "facts" in w}
    if facts:
        lines += ["", "| | measured |", "|---|---|"]
        for workload in facts.values():
            lines.append(f"| **{workload['title']}** | |")
            lines += [f"| {fact['name']} | {number(fact['value'])} {fact['unit']} |" for fact in workload["facts"]]
    missing = [f"{name}: {reason}" for name, reason in sorted(result["missing"].items())]
    failed = [f"{row['name']}: {row['failure']}" for w in contests.values() for row in w["rows"] if "failure" in row]
    if missing or failed:
        lines += ["", "Not measured: " + "; ".join([*missing, *failed]) + "."]
    return "\n".join(lines) + "\n"


def _markdown_row(row: Row) -> str:
    name = f"`{row['name']}`" if row["role"] == "ours" else row["name"] + (f" ({row['note']})" if row["note"] else "")
    if "read_share" in row:
        name += f", reads {row['read_share']:.1%} of a picture's bytes"
    ratio = f"{row['ratio']:.2f} ({row['ratio_low']:.2f} to {row['ratio_high']:.2f})" if "ratio" in row else ""
    return f"| {name} | {number(statistics.median(row['rates']))} | {ratio} | {number(row['per_cpu_s'])} | {number(row['peak_mb'])} |"


def update_readme(readme: Path, text: str) -> None:
    """Put `text` between the marks.

    Raises:
        ValueError: the marks are not there, once each and in order.
    """
    before, start, rest = readme.read_text("utf-8").partition(START)
    _, end, after = rest.partition(END)
    if not start or not end or START in rest:
        raise ValueError(f"{readme}: expected {START} and after it {END}, once each")
    readme.write_text(f"{before}{START}\n{text}{END}{after}", "utf-8")
