"""Files and folders that cannot be read or written, as a user whom permissions bind: root reads everything, so root steps down first."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from as_nobody import NOBODY
from conftest import picture, save, voc_xml

pytestmark = pytest.mark.long

ROOT = Path(__file__).parent.parent


@pytest.fixture
def area() -> Iterator[Path]:
    """A folder that everyone can reach (pytest's own is its user's); `src` is readable, `out` is writable for nobody."""
    path = Path(tempfile.mkdtemp(prefix="pack-rights-"))
    path.chmod(0o755)
    for name in ("src", "out"):
        (path / name).mkdir()
    if os.getuid() == 0:
        os.chown(path / "out", NOBODY, NOBODY)
    yield path
    for folder, _, _ in os.walk(path):  # rmtree of a user who is not root needs the rights that a test has taken
        os.chmod(folder, 0o755)
    for folder in sorted(path.rglob("*")):
        if folder.is_dir():
            folder.chmod(0o755)
    shutil.rmtree(path)


def pack(*args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(Path(__file__).with_name("as_nobody.py")), *map(str, args), "--workers", "1"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environ, stdin=subprocess.DEVNULL, cwd="/")
    assert "Traceback" not in done.stderr + done.stdout, done.stderr
    return done


def class_folders(root: Path) -> None:
    for i, name in enumerate(("crack/a", "crack/b", "slag/c", "slag/d")):
        save(root / f"{name}.jpg", picture(seed=i))


def voc(root: Path) -> None:
    rows = ["image_id,split"]
    for i in range(4):
        save(root / "images" / f"w{i}.jpg", picture(seed=i))
        (root / "annotations").mkdir(exist_ok=True)
        (root / "annotations" / f"w{i}.xml").write_text(voc_xml(f"w{i}", (64, 48), [("crack", (2, 3, 20, 15))]))
        rows.append(f"w{i},train")
    (root / "train_val_test_split.csv").write_text("\n".join(rows) + "\n")


def table(root: Path) -> None:
    for i in range(4):
        save(root / "pictures" / f"w{i}.jpg", picture(seed=i))
    (root / "labels.csv").write_text("filename,label\n" + "".join(f"pictures/w{i}.jpg,{'ab'[i % 2]}\n" for i in range(4)))


MAKERS = {"folder": class_folders, "voc": voc, "csv": table}
# kind, what loses which rights: 444 may be listed and not entered, 111 the reverse; findings there must be; samples left
FAULTS = [
    (
        "folder",
        {"crack/a.jpg": 0o000, "slag": 0o444, "pore": 0o000, "void": 0o111},
        {("unreadable", "crack/a.jpg"), ("unreadable", "slag/c.jpg"), ("unreadable", "pore"), ("unreadable", "void")},
        1,
    ),
    (
        "voc",
        {"images/w1.jpg": 0o000, "annotations/w2.xml": 0o000, "more": 0o000},
        {("unreadable", "images/w1.jpg"), ("unreadable", "annotations/w2.xml"), ("unreadable", "more")},
        2,
    ),
    ("csv", {"pictures/w2.jpg": 0o000, "closed": 0o444}, {("unreadable", "pictures/w2.jpg"), ("unreadable", "closed/w9.jpg")}, 3),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "modes", "findings", "left"), FAULTS)
def test_what_cannot_be_read_is_named_and_the_rest_goes_on(
    area: Path, kind: str, modes: dict[str, int], findings: set[tuple[str, str]], left: int
) -> None:
    MAKERS[kind](area / "src")
    for path, mode in modes.items():
        if not (area / "src" / path).exists():
            save(area / "src" / path / "w9.jpg", picture(seed=9))
        (area / "src" / path).chmod(mode)
    done = pack("check", "--json", "--source", kind, "--on-error", "skip", area / "src")
    report = json.loads(done.stdout)
    found = {(f["code"], f["path"]): f["message"] for f in report["findings"]}
    assert findings <= found.keys(), done.stdout
    assert all("Permission denied" in found[key] for key in findings)
    assert report["num_samples"] == left
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "path", "words"),
    [
        ("voc", "train_val_test_split.csv", "train_val_test_split.csv: cannot be read: Permission denied"),
        ("csv", "labels.csv", "labels.csv: cannot be read: Permission denied"),
        ("auto", "labels.csv", "labels.csv: cannot be read: Permission denied"),
        ("folder", ".", "src: cannot be read: Permission denied"),
    ],
)
def test_what_everything_hangs_on_is_refused_in_one_message(area: Path, kind: str, path: str, words: str) -> None:
    MAKERS["csv" if kind == "auto" else kind](area / "src")
    (area / "src" / path).chmod(0)
    done = pack("check", "--source", kind, area / "src")
    assert done.returncode in (1, 2)
    assert words in done.stderr


@pytest.mark.slow
def test_a_source_in_a_closed_folder_is_refused(area: Path) -> None:
    class_folders(area / "src" / "data")
    (area / "src").chmod(0)
    done = pack("check", area / "src" / "data")
    assert done.returncode in (1, 2)
    assert "src/data" in done.stderr
    assert "Permission denied" in done.stderr
    assert "output" not in done.stderr


@pytest.mark.slow
def test_an_output_that_cannot_be_written_is_refused(area: Path) -> None:
    class_folders(area / "src")
    (area / "out").chmod(0o555)
    done = pack("build", area / "src", area / "out" / "new")
    assert done.returncode == 1
    assert "ermission" in done.stderr
    assert str(area / "out") in done.stderr
    assert not list((area / "out").iterdir())


def test_a_source_that_cannot_be_read_is_said_in_json(area: Path) -> None:
    (area / "src").chmod(0)
    done = pack("check", area / "src", "--json")
    assert done.returncode == 1, done.stderr
    (finding,) = json.loads(done.stdout)["findings"]
    assert (finding["code"], finding["message"]) == ("cannot-pack", f"{area / 'src'}: cannot be read: Permission denied")


@pytest.mark.slow
def test_a_closed_folder_counts_as_left_out(area: Path) -> None:
    class_folders(area / "src")
    (area / "src/slag").chmod(0)
    done = pack("build", area / "src", area / "out/set", "--on-error", "skip", "--max-skip", "0")
    assert done.returncode == 1, done.stderr
    assert "1 of 3 samples (0 pictures, and 1 missing, out of reach or badly named) would be left out, --max-skip allows 0" in done.stderr
    done = pack("build", area / "src", area / "out/set", "--on-error", "skip")
    assert done.returncode == 0, done.stderr
    assert "packed 2 samples" in done.stderr
    assert "; 1 left out" in done.stderr


@pytest.mark.slow
def test_a_build_for_nobody_says_what_it_left_out_and_verifies(area: Path) -> None:
    class_folders(area / "src")
    (area / "src/crack/a.jpg").chmod(0o000)
    done = pack("build", area / "src", area / "out/set", "--on-error", "skip")
    assert done.returncode == 0, done.stderr
    assert "packed 3 samples" in done.stderr
    assert "1 finding: 1 unreadable (skip)" in done.stderr
    verified = pack("verify", area / "out/set")
    assert verified.returncode == 0, verified.stderr
