"""Numbers of a recipe's command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable


def whole_from(least: int) -> Callable[[str], int]:
    """For ``add_argument(type=...)``: a whole number of at least `least`."""

    def number(text: str) -> int:
        if not text.strip().lstrip("+-").isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least {least}")
        return int(text)

    return number
