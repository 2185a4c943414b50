"""Checks of arguments, so that a wrong one is named where it is given, and not where it is first used."""

from __future__ import annotations

import operator
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def whole(name: str, value: Any, low: int | None = None, meaning: str = "") -> int:
    """`value` as an int. Anything that counts as one is taken (NumPy's ints too), except bool.

    Raises:
        TypeError: it is no whole number.
        ValueError: it is less than `low`.
    """
    expected = f"expected {meaning or 'a whole number'}{'' if low is None or meaning else f' of {low} or more'}"
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is {value!r:.200}, {expected}") from None
    if isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}, {expected}")
    if low is not None and number < low:
        raise ValueError(f"{name} is {number}, {expected}")
    return number


def one_of(name: str, value: Any, options: Sequence[str]) -> None:
    """Refuse a `value` that is none of the words.

    Raises:
        ValueError: it is another one.
    """
    if value not in options:
        raise ValueError(f"{name} is {value!r:.200}, expected {' or '.join(map(repr, options))}")


def function(name: str, value: Any, form: str) -> None:
    """Refuse a `value` that cannot be called; None can stand for none.

    Raises:
        TypeError: it is neither.
    """
    if value is not None and not callable(value):
        raise TypeError(f"{name} is {value!r:.200}, expected a function {form}, or None")


def folder(name: str, value: Any) -> Path:
    """`value` as an absolute path: a worker process may have another current folder.

    Raises:
        TypeError: it is no path.
    """
    if not isinstance(value, str | os.PathLike):
        raise TypeError(f"{name} is {value!r:.200}, expected the path of a folder that `pack build` made")
    path = os.fspath(value)
    if not isinstance(path, str):
        raise TypeError(f"{name} is {path!r:.200}, expected a path of text, not of bytes")
    return Path(path).absolute()
