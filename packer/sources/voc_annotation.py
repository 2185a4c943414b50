"""From the texts of a VOC annotation to numbers. Whether a box fits its picture is not looked at here."""

from __future__ import annotations

import math

import numpy as np

from packer.sample import Annotation, Finding, Level, Report
from packer.sources.class_names import long_name
from packer.sources.voc_layout import nfc, without_suffix
from packer.sources.voc_xml import CORNERS, VocDocument, VocObject, quoted

_FLAG_VALUES = {"1": True, "true": True, "yes": True} | dict.fromkeys(("0", "false", "no", "", "unspecified"), False)
_WARNINGS = ("origin-mismatch", "bad-flag")


def annotation_of(document: VocDocument, path: str, sample: str, origin: int, report: Report) -> Annotation | None:
    """What a file at `path` says about the picture `sample`; None when an object of it has a fault.

    Every object is looked at; faults of one kind are one `skip` finding. With `origin` 1 the numbers are 1-based and inclusive, and
    come out as ``[xmin - 1, ymin - 1, xmax, ymax]``; with 0 they come out as they are.
    """
    speaker = _Speaker(path, sample, report)
    _check_filename(document, speaker)
    annotation = Annotation(path, size=_size(document, speaker))
    rows: list[list[float]] = []
    flags: list[list[bool]] = []
    for number, obj in enumerate(document.objects, 1):
        label, row = _label(obj, number, speaker), _corners(obj, number, speaker)
        if label is None or row is None:
            continue
        place = f"object {number}"
        if min(row) < origin:
            # These numbers are about to be shifted or refused: show them as they are written.
            place += f" (written {', '.join(obj.box[c].strip() for c in CORNERS)})" if obj.box else ""
        if origin:
            row[0], row[1] = (_from_one(v, number, speaker) for v in row[:2])
        rows.append(row)
        annotation.labels.append(label)
        annotation.places.append(place)
        flags.append([_flag(obj, name, number, speaker) for name in ("difficult", "truncated", "occluded")])
    if speaker.flush():
        return None
    annotation.boxes = np.array(rows, np.float64).reshape(-1, 4)
    annotation.difficult, annotation.truncated, annotation.occluded = np.array(flags, np.uint8).reshape(-1, 3).T.copy()
    return annotation


def base_name(path: str) -> str:
    """The last part of a path as any system writes it."""
    return path.replace("\\", "/").rpartition("/")[2]


def _label(obj: VocObject, number: int, speaker: _Speaker) -> str | None:
    name = obj.texts.get("name", "").strip()
    if not name:
        what = "its <name> is empty" if "name" in obj.texts else "it has no <name>"
        speaker.fault("missing-class", number, f"{what}: the class is unknown")
        return None
    if (fault := long_name(name)) is not None:
        speaker.fault("bad-class-name", number, fault)
        return None
    return name


def _corners(obj: VocObject, number: int, speaker: _Speaker) -> list[float] | None:
    """[xmin, ymin, xmax, ymax] as written."""
    if obj.repeated is not None:
        speaker.fault("repeated-element", number, f"<{obj.repeated}> stands in it more than once")
        return None
    if obj.box is None:
        other = f", only a <{obj.shape}>, which is no upright box" if obj.shape else ""
        speaker.fault("missing-box", number, f"it has no <bndbox>{other}")
        return None
    row = []
    for name in CORNERS:
        text = obj.box.get(name)
        if text is None:
            speaker.fault("missing-box", number, f"its <bndbox> has no <{name}> with a number")
            return None
        value = _number(text.strip())
        if value is None:
            speaker.fault("bad-number", number, f"<{name}> is {quoted(text.strip())}, expected a number such as 12 or 12.5")
            return None
        row.append(value)
    return row


def _number(text: str) -> float | None:
    """A float as written; NaN and infinity when they are spelled out, for the check of boxes to refuse."""
    try:
        value = float(text)
    except ValueError:
        return None
    overflow = math.isinf(value) and "inf" not in text.lower()
    return None if overflow or "_" in text else value


def _from_one(value: float, number: int, speaker: _Speaker) -> float:
    if 0 <= value < 1:
        speaker.fault("origin-mismatch", number, f"a corner at {value:g}, yet origin = 1 counts from 1: taken as 1; is origin = 0 right?")
        return 0.0
    return value - 1


def _flag(obj: VocObject, name: str, number: int, speaker: _Speaker) -> bool:
    text = obj.texts.get(name, "").strip()
    value = _FLAG_VALUES.get(text.lower())
    if value is None:
        speaker.fault("bad-flag", number, f"<{name}> is {quoted(text)}, expected 0 or 1; taken as 0")
    return bool(value)


def _size(document: VocDocument, speaker: _Speaker) -> tuple[int, int] | None:
    if document.size is None:
        return None
    texts = [document.size.get(name, "").strip() for name in ("width", "height")]
    values = [_number(text) for text in texts]
    width, height = (int(v) if v is not None and v >= 1 and v.is_integer() else 0 for v in values)
    if width and height:
        return width, height
    shown = " x ".join(quoted(text) if text else "nothing" for text in texts)
    speaker.say("warning", "bad-size", f"<size> is {shown}, expected two whole numbers over 0; the picture's own size is taken")
    return None


def _check_filename(document: VocDocument, speaker: _Speaker) -> None:
    """Pairing is by the XML's own name; a `<filename>` that names another picture may mean that files were mixed up."""
    if not document.filename:
        return
    name, own = nfc(base_name(document.filename)), nfc(without_suffix(base_name(speaker.path)))
    if own not in (name, without_suffix(name)):
        message = f"<filename> is {quoted(document.filename)}, paired with {speaker.sample} by the name of the file"
        speaker.say("warning", "filename-mismatch", message)


class _Speaker:
    """Gives findings about one file; faults of objects are kept until `flush` and told once per code."""

    def __init__(self, path: str, sample: str, report: Report) -> None:
        self.path, self.sample, self._report = path, sample, report
        self._faults: dict[str, tuple[str, list[int]]] = {}

    def say(self, level: Level, code: str, message: str) -> None:
        self._report(Finding(level, code, self.path, message, sample=self.sample))

    def fault(self, code: str, number: int, message: str) -> None:
        """Note a fault of the object `number`; the first message of a code is the one that is told."""
        numbers = self._faults.setdefault(code, (message, []))[1]
        if number not in numbers[-1:]:
            numbers.append(number)

    def flush(self) -> bool:
        """Report the faults. True when one of them leaves the sample out."""
        refused = False
        for code, (message, numbers) in self._faults.items():
            level: Level = "warning" if code in _WARNINGS else "skip"
            refused |= level == "skip"
            more = f" (also objects {', '.join(map(str, numbers[1:6]))}{', ...' if len(numbers) > 6 else ''})" if numbers[1:] else ""
            message = f"object {numbers[0]}: {message}{more}"
            self._report(Finding(level, code, self.path, message, sample=self.sample, object=numbers[0], count=len(numbers)))
        return refused
