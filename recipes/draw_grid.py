"""Draws ``docs/restart-grid.svg`` for README.md: the cells of a packed JPEG, a crop, and the cells that it needs.

    python recipes/draw_grid.py docs/restart-grid.svg

The cells are those that the loaders decode for this crop of a 500 x 375 picture.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from loaders.cells import SubJpeg, open_grid
from loaders.codecs import encode_image
from loaders.jpeg import restart_offsets

HEIGHT, WIDTH = 375, 500
CROP = (118, 150, 150, 160)  # y, x, height, width


def drawing() -> str:
    """The SVG, one unit a pixel."""
    ramp = np.add.outer(np.arange(HEIGHT), np.arange(WIDTH)) // 4
    data = encode_image(np.dstack([ramp.astype(np.uint8)] * 3), "jpg")
    offsets = restart_offsets(data)
    grid = open_grid(data[: int(offsets[0])], offsets, len(data))
    part = SubJpeg(grid, CROP)
    y, x, h, w = CROP
    down, across = grid.cell_height, grid.cell_width
    top, left = (y - 1) // down * down, (x - 1) // across * across
    width, height = WIDTH + 20, HEIGHT + 20
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="-10 -10 {width} {height}">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#f2f2f2"/>',
        f'<rect x="{left}" y="{top}" width="{part.width}" height="{part.height}" fill="#9ecae1"/>',
        '<g stroke="#888" stroke-width="0.7">',
        *(f'<path d="M{column * across} 0V{HEIGHT}"/>' for column in range(1, grid.columns)),
        *(f'<path d="M0 {row * down}H{WIDTH}"/>' for row in range(1, grid.rows)),
        "</g>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#333"/>',
        f'<rect x="{x}" y="{y}" width="{w}" height="{h}" fill="none" stroke="#d62728" stroke-width="3"/>',
        "</svg>",
    ]
    return "\n".join([*lines, ""])


def main() -> None:
    """Write the drawing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the SVG file to write")
    args = parser.parse_args()
    args.out.write_text(drawing(), "utf-8")
    print(f"{args.out}: {args.out.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
