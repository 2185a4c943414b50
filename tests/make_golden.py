"""Makes the golden data sets of the present format version: ``python tests/make_golden.py tests/golden``.

They are kept for good: a new version of the format gets new ones beside the old, which must load forever. So the program refuses
folders that exist. Everything is tiny; pictures are PNG (lossless in every library) but for one JPEG with a restart grid.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent)]

import numpy as np  # noqa: E402

from build_data import run_build  # noqa: E402
from conftest import save, voc_xml  # noqa: E402


def gradient(width: int, height: int, seed: int) -> np.ndarray:
    """Pixel (y, x) is (10 x + seed, 10 y, seed), uint8 [height, width, 3] RGB."""
    y, x = np.mgrid[:height, :width]
    return np.stack([10 * x + seed, 10 * y, np.full_like(x, seed)], -1).astype(np.uint8)


def make_sources(root: Path) -> None:
    """`voc`: five pictures, three in train and two in val, with 0 to 2 boxes. `folder`: six pictures of two classes. `jpg`: one."""
    rows = ["image_id,split"]
    boxes: list[list[tuple[str, tuple[float, ...]]]] = [
        [("crack", (1, 2, 5, 6))],
        [],
        [("slag", (0.5, 1.25, 12, 8)), ("crack", (3, 3, 4, 7))],
        [("slag", (2, 0, 9, 8))],
        [("crack", (0, 0, 12, 8)), ("crack", (1, 1, 2, 2)), ("slag", (5, 5, 11, 8))],
    ]
    for i, objects in enumerate(boxes):
        save(root / "voc" / "images" / f"weld_{i}.png", gradient(12, 8, 20 * i))
        (root / "voc" / "annotations").mkdir(exist_ok=True)
        (root / "voc" / "annotations" / f"weld_{i}.xml").write_text(voc_xml(f"weld_{i}", (12, 8), objects))
        rows.append(f"weld_{i},{'train' if i < 3 else 'val'}")
    (root / "voc" / "train_val_test_split.csv").write_text("\n".join(rows) + "\n")
    for i in range(6):
        save(root / "folder" / ("gut", "Riß")[i % 2] / f"teil_{i}.png", gradient(6, 5, 30 * i))
    save(root / "jpg" / "a" / "x.png", gradient(40, 24, 0))


def main(out: Path) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        src = Path(temporary)
        make_sources(src)
        for name, kind, tables in (
            ("v1-tar-detection", "voc", {"output": {"shard_samples": 2}}),
            ("v1-memmap-detection", "voc", {"output": {"shard_samples": 2, "format": "memmap"}}),
            ("v1-tar-classification", "folder", {"output": {"shard_samples": 4}}),
            ("v1-memmap-classification", "folder", {"output": {"shard_samples": 4, "format": "memmap", "dtype": "float16"}}),
            ("v1-tar-restarts", "jpg", {"output": {"image": "jpg"}}),
        ):
            if (out / name).exists():
                raise SystemExit(f"{out / name}: exists, and is never made again")
            assert run_build(src / kind, out / name, **tables).ok


if __name__ == "__main__":
    main(Path(sys.argv[1]))
