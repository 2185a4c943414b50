"""Collects findings: one per (code, sample), in an order that does not depend on timing, and says whether the build may be published."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, replace

from packer.sample import Finding, Level

NUM_SHOWN = 20
MAX_PATH = 4096
"""Characters. No file has a longer path: what is cut is the text of an input that names one."""
MAX_MESSAGE = 8192
LEVELS: tuple[Level, ...] = ("error", "skip", "warning")


_Key = tuple[str, str | None, str, int | None]


class Findings:
    """`add` is a `packer.sample.Report`. `show` gets the first 20 of each code as they come, as one line of text each."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show
        self._found: dict[_Key, Finding] = {}
        self._shown: Counter[str] = Counter()
        self._told: set[_Key] = set()

    def __iter__(self) -> Iterator[Finding]:
        return iter(self._found.values())

    def __len__(self) -> int:
        return len(self._found)

    def add(self, finding: Finding) -> None:
        """Keep a finding; a further one of the same code and sample only counts, unless it is more severe: then it takes the place."""
        self.tell(finding)
        finding = _bounded(finding)
        key = _key(finding)
        before = self._found.get(key)
        if before is not None:
            worst = min(before, finding, key=lambda f: LEVELS.index(f.level))
            self._found[key] = replace(worst, count=before.count + finding.count)
            return
        self._found[key] = finding

    def tell(self, finding: Finding) -> None:
        """Show a finding that is kept later, in the order of the jobs: a long build is not to be mute until its end."""
        finding = _bounded(finding)
        if _key(finding) in self._told:
            return
        self._told.add(_key(finding))
        self._shown[finding.code] += 1
        if self._shown[finding.code] <= NUM_SHOWN:
            self._show(as_line(finding))

    def counts(self) -> dict[str, int]:
        """Findings per level."""
        found = Counter(f.level for f in self._found.values())
        return {level: found[level] for level in LEVELS}

    def num_missing(self, pictures: Collection[str]) -> int:
        """Samples that `skip` findings leave out besides `pictures`, which are listed: missing, out of reach or badly named ones.

        A folder that cannot be read counts as one, since nobody knows what it holds; of what has no name, every one counts.
        """
        missing = {f.sample or (f.path, f.line): 1 if f.sample else f.count for f in self._found.values() if f.level == "skip"}
        return sum(count for sample, count in missing.items() if sample not in pictures)

    def jsonl(self) -> str:
        """The text of ``findings.jsonl``."""
        return "".join(as_json(f) + "\n" for f in self._found.values())

    def summary(self) -> list[str]:
        """Lines for the end: how many of which code, and which codes were cut short on the screen."""
        if not self._found:
            return []
        codes = Counter((f.level, f.code) for f in self._found.values())
        order = sorted(codes, key=lambda lc: (LEVELS.index(lc[0]), -codes[lc], lc[1]))
        named = ", ".join(f"{codes[lc]:,} {lc[1]} ({lc[0]})" for lc in order)
        lines = [f"{len(self._found):,} finding{'s' if len(self._found) != 1 else ''}: {named}"]
        hidden = sum(max(n - NUM_SHOWN, 0) for n in self._shown.values())
        return [*lines, f"({hidden:,} of them not shown: at most {NUM_SHOWN} of a kind are)"] if hidden else lines


def _bounded(finding: Finding) -> Finding:
    """The input decides how long a name in a table is, but not how long a line of ours gets."""
    sample, message = finding.sample, finding.message
    if len(message) <= MAX_MESSAGE and (sample is None or len(sample) <= MAX_PATH):
        return finding
    return replace(finding, message=_cut(message, MAX_MESSAGE), sample=None if sample is None else _cut(sample, MAX_PATH))


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text):,} characters)"


def _key(finding: Finding) -> _Key:
    whole = finding.sample is None
    return (finding.code, finding.sample, finding.path if whole else "", finding.line if whole else None)


def as_dict(finding: Finding) -> dict[str, object]:
    """A finding as JSON values; `line`, `object` and `count` only where they say something."""
    values = asdict(finding)
    return {k: v for k, v in values.items() if not (v is None and k in ("line", "object")) and not (k == "count" and v == 1)}


def as_json(finding: Finding) -> str:
    """One line of ``findings.jsonl``."""
    return json.dumps(as_dict(finding), ensure_ascii=False, sort_keys=True)


def as_line(finding: Finding) -> str:
    """One line for people: level, place, code, message."""
    place = finding.path + (f":{finding.line}" if finding.line is not None else "")
    subject = f" [{finding.sample}]" if finding.sample not in (None, finding.path) else ""
    more = f" (and {finding.count - 1:,} more like it{'' if finding.sample is None else ' in this sample'})" if finding.count > 1 else ""
    return printable(f"{finding.level}: {place}{subject}: {finding.message}{more} ({finding.code})")


def printable(text: str) -> str:
    """`text` with control characters and the like escaped, so that no name from outside can garble a terminal or end a line."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
