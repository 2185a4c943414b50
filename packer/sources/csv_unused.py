"""The columns of a CSV table that no role takes: they are named, and a table of labels is refused where they look like a box."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

_NOT_A_WORD = re.compile(r"[^a-z0-9]")
_PREFIX = re.compile(r"^(?:boundingbox|bndbox|bbox|box)(?=.)")
_PICTURE_SIZE = {"width", "height"}
_CELLS = frozenset({"bbox", "bboxes", "box", "boxes", "bndbox", "boundingbox", "boundingboxes"})
_CORNERS = {
    "x1": ("x1", "xmin", "minx", "left", "x0", "xtl"),
    "y1": ("y1", "ymin", "miny", "top", "y0", "ytl"),
    "x2": ("x2", "xmax", "maxx", "right", "xbr"),
    "y2": ("y2", "ymax", "maxy", "bottom", "ybr"),
}
_LENGTHS = {"w": ("w", "width"), "h": ("h", "height")}
_PLAIN = {"x": ("x",), "y": ("y",), **_LENGTHS}
_CENTER = {
    "x": ("cx", "xc", "xcenter", "centerx", "xcentre", "centrex", "xmid"),
    "y": ("cy", "yc", "ycenter", "centery", "ycentre", "centrey", "ymid"),
    **_LENGTHS,
}
_CORNER_AND_SIZE = {"x": _CORNERS["x1"], "y": _CORNERS["y1"], **_LENGTHS}
_FORMATS: tuple[tuple[Mapping[str, Sequence[str]], str], ...] = (
    (_CORNERS, ""),
    (_CENTER, ' and box_format = "cxcywh"'),
    (_CORNER_AND_SIZE, ' and box_format = "xywh"'),
    (_PLAIN, ' and box_format = "xywh" (x, y are a corner) or "cxcywh" (a centre)'),
)
_NUMBERS = frozenset(word for words, _ in _FORMATS for names in words.values() for word in names)


def why_a_box(unused: Sequence[str], first_line: str) -> str | None:
    """What to say of a table of labels whose unused columns look like a box, and what to do; None where they do not."""
    looks = _box_columns(unused)
    if not looks:
        return None
    kept = ", ".join(f'"{name}"' for name in looks)
    return (
        f"columns {', '.join(looks)} look like a box, but their names do not say how to read it; its first line is {first_line!r}; "
        f'say [source] {_how_to_declare(looks)}, with coords = "normalized" for fractions of width and height; '
        f"where they are no box, extra = [{kept}] keeps them as text"
    )


def _box_columns(unused: Sequence[str]) -> list[str]:
    """Those of the unused columns that look like a box: one cell for all, or two numbers of one.

    The names width and height alone are the picture's size, as TensorFlow writes it, and no box.
    """
    cells = [name for name in unused if _NOT_A_WORD.sub("", name) in _CELLS]
    numbers = [name for name in unused if _word(name) in _NUMBERS]
    return cells + numbers if cells or (len(numbers) > 1 and set(numbers) != _PICTURE_SIZE) else []


def _how_to_declare(names: Sequence[str]) -> str:
    """The options of ``[source]`` that make a box of these columns."""
    if any(_NOT_A_WORD.sub("", name) in _CELLS for name in names):
        return f'columns = {{bbox = "{names[0]}"}} and box_format = "xyxy", "xywh" or "cxcywh"'
    by_word = {_word(name): name for name in names}
    for words, how in _FORMATS:
        found = {role: next((by_word[w] for w in known if w in by_word), None) for role, known in words.items()}
        if None not in found.values():
            return "columns = {" + ", ".join(f'{role} = "{name}"' for role, name in found.items()) + "}" + how
    return "columns = {x1 = ..., y1 = ..., x2 = ..., y2 = ...}, or columns = {x = ..., y = ..., w = ..., h = ...} and box_format"


def _word(name: str) -> str:
    """A column's name without punctuation and without "bbox" in front of it."""
    return _PREFIX.sub("", _NOT_A_WORD.sub("", name))
