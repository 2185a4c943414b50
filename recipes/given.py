"""Numbers of a recipe's command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable


def whole_from(least: int) -> Callable[[str], int]:
    """For ``add_argument(type=...)``: a whole number of at least `least`."""

    def number(text: str) -> int:
        value = int(text)  # its ValueError is told by argparse
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is less than {least}")
        return value

    return number
