"""The command line: help, wrong usage, messages and exit statuses. What the commands do is tested with their modules."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from build_data import pack, pack_command, read_json, run_build, tree
from packer import build as build_module
from packer import cli, info, verify
from packer.recipe import Recipe
from packer.run import Outcome

COMMANDS = ("build", "check", "verify", "info", "bench")


def run(*args: object) -> Result:
    """In this process; no exception but the exit may come out."""
    result = CliRunner().invoke(cli.main, [str(a) for a in args])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
    return result


class TestHelp:
    def test_commands(self) -> None:
        assert set(cli.main.commands) == set(COMMANDS)
        for flag in ("--help", "-h"):
            result = run(flag)
            assert result.exit_code == 0
            for name in COMMANDS:
                assert f"  {name} " in result.stdout

    @pytest.mark.parametrize("name", COMMANDS)
    def test_every_option_and_command_has_help(self, name: str) -> None:
        command = cli.main.commands[name]
        assert command.help
        result = run(name, "--help")
        assert result.exit_code == 0
        options = [p for p in command.params if isinstance(p, click.Option)]
        assert options or name == "info"
        for option in options:
            assert option.help, option.name
            assert all(flag in result.stdout for flag in option.opts), option.name
            assert option.help[0].isupper(), option.name

    def test_version(self) -> None:
        result = run("--version")
        assert result.exit_code == 0
        assert "0.1.0" in result.stdout

    def test_as_a_program(self) -> None:
        done = pack("--help")
        assert done.returncode == 0
        assert "Pack an image data set once" in done.stdout


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["biuld", "a", "b"], "No such command 'biuld'"),
        (["build"], "Missing argument 'SRC'"),
        (["build", "a"], "Missing argument 'OUT'"),
        (["build", "a", "b", "c"], "Got unexpected extra argument (c)"),
        (["build", "a", "b", "--shard-sise", "3"], "--shard-sise"),
        (["build", "a", "b", "--format", "zip"], "'zip' is not one of 'tar', 'memmap'"),
        (["build", "a", "b", "--source", "cocoa"], "'cocoa' is not one of"),
        (["build", "a", "b", "--workers", "0"], "0 is not in the range x>=1"),
        (["build", "a", "b", "--workers", "two"], "'two' is not a valid integer"),
        (["build", "a", "b", "--quality", "101"], "101 is not in the range 1<=x<=100"),
        (["build", "a", "b", "--split", "train:0.8"], "'train:0.8' is not like train=0.8,val=0.1,test=0.1"),
        (["build", "a", "b", "--format", "memmap", "--normalize", "a", "1"], "'a' is not like 0.485,0.456,0.406"),
        (["build", "a", "b", "--classes", "/nowhere/c.txt"], "/nowhere/c.txt"),
        (["build", "a", "b", "--classes", os.devnull], "holds no class name"),
        (["verify"], "Missing argument 'OUT'"),
        (["info", "a", "--json"], "No such option"),
        (["check", "a", "--quality", "3"], "No such option"),
    ],
)
def test_wrong_usage(args: list[str], said: str) -> None:
    result = run(*args)
    assert result.exit_code == 2
    assert said in result.stderr.replace("\n", " ")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"crack\n\nslag\n", ", line 2: is blank, and a line's position is the class id"),
        (b"\ncrack\n", ", line 1: is blank"),
        (b"# my classes\ncrack\n", ", line 1: '# my classes' would become class 0"),
        (b"crack\nsl\xe4g\n", ", line 2: byte 0xe4 is not text in UTF-8"),
        (None, "c.txt: cannot be read: No such file or directory"),
    ],
)
def test_a_classes_file_that_cannot_be_meant(content: bytes | None, said: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "c.txt").write_bytes(content)
    result = run("build", "a", "b", "--classes", tmp_path / "c.txt")
    assert result.exit_code == 2
    assert said in result.stderr.replace("\n", " ")


def test_wrong_values_of_a_source_name_the_recipe(make_folder: Callable[..., Path], tmp_path: Path) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text('[source]\nkind = "csv"\n[source.columns]\nlabel = -1\n')
    result = run("check", make_folder(), "--recipe", recipe)
    assert result.exit_code == 2
    assert f"error: {recipe}: 1 wrong value(s):\n  [source] columns.label: " in result.stderr
    assert result.stderr.rstrip().endswith("greater than or equal to 0, found -1")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--shard-size", "big"], "[output] shard_size: 'big' is no size such as 256MB or 1GiB"),
        (["--resize", "wide"], "[transform] resize: 'wide' is no size such as 640x480 or 640"),
        (["--resize", "64x64", "--mode", "short"], "takes one number"),
        (["--split", "train=0.5,val=0.1"], "add up to 0.6, expected 1"),
        (["--split", "train=0.5,valid=0.5"], "valid"),
        (["--group", "seam"], "group needs shares"),
        (["--group", "(", "--split", "train=1"], "'(' is no regular expression"),
        (["--max-skip", "many"], "'many' is neither a number of samples nor a share such as 1%"),
        (["--dtype", "float32"], "dtype and normalize belong to format memmap"),
        (["--format", "memmap", "--image", "jpg"], "image belongs to format tar"),
        (["--recipe", "/nowhere/r.toml"], "/nowhere/r.toml: cannot be read: No such file or directory"),
    ],
)
def test_wrong_values(args: list[str], said: str, make_folder: Callable[..., Path], tmp_path: Path) -> None:
    result = run("build", make_folder(2), tmp_path / "out", *args)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert said in result.stderr
    assert not (tmp_path / "out").exists()


class TestPaths:
    @pytest.mark.parametrize("command", [["build", "SRC", "OUT"], ["check", "SRC"], ["verify", "SRC"], ["info", "SRC"]])
    def test_missing(self, command: list[str], tmp_path: Path) -> None:
        paths = {"SRC": str(tmp_path / "typo"), "OUT": str(tmp_path / "out")}
        result = run(*(paths.get(c, c) for c in command))
        assert result.exit_code == 1
        assert result.stderr.startswith(f"error: {tmp_path}/typo")
        assert "no such folder" in result.stderr
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("command", ["check", "verify", "info"])
    def test_a_file(self, command: str, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("x")
        result = run(command, tmp_path / "file")
        assert result.exit_code == 1
        assert f"{tmp_path}/file" in result.stderr

    def test_nothing_in_it(self, tmp_path: Path) -> None:
        (tmp_path / "src").mkdir()
        for command in (["build", tmp_path / "src", tmp_path / "out"], ["check", tmp_path / "src"]):
            result = run(*command)
            assert result.exit_code == 1
            assert "holds no picture" in result.stderr
        assert not (tmp_path / "out").exists()

    def test_name_that_is_no_text(self, make_folder: Callable[..., Path], tmp_path: Path) -> None:
        out = os.fsencode(tmp_path) + b"/out\xff"
        assert run("build", make_folder(3), os.fsdecode(out)).exit_code == 0
        env = {**os.environ, "PYTHONIOENCODING": "utf-8"}
        done = subprocess.run([*pack_command("info"), out], capture_output=True, env=env, cwd=Path(__file__).parent.parent)
        assert done.returncode == 0, done.stderr
        assert b"\\udcff: 3 samples" in done.stdout


class TestBuild:
    def test_flags_reach_the_recipe(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        seen: list[tuple[Path, Path, Recipe, bool]] = []

        def fake(src: Path, out: Path, recipe: Recipe, console: object, *, overwrite: bool) -> Outcome:
            del console
            seen.append((src, out, recipe, overwrite))
            return Outcome(True, "")

        monkeypatch.setattr(build_module, "build", fake)
        (tmp_path / "c.txt").write_text("\ufeffslag\n  crack \n\n \n", "utf-8")
        (tmp_path / "r.toml").write_text('[output]\nquality = 50\nseed = 3\n[source]\norigin = 1\n[run]\non_error = "skip"\n')
        result = run(
            *("build", "a", "b", "--recipe", tmp_path / "r.toml", "--source", "voc", "--classes", tmp_path / "c.txt"),
            *("--split", "train=0.75, val=0.25", "--group", "s(\\d)", "--format", "memmap", "--resize", "64x32", "--mode", "stretch"),
            *("--boxes", "clip", "--workers", 3, "--engine", "local", "--max-skip", "2%", "--seed", 7, "--no-shuffle"),
            *("--dtype", "float16", "--normalize", "0.5", "0.1,0.2,0.3", "--shard-size", "1GiB", "--no-restart-grid", "--overwrite"),
        )
        assert result.exit_code == 0, result.stderr
        [(src, out, recipe, overwrite)] = seen
        assert (src, out, overwrite) == (Path("a"), Path("b"), True)
        assert (recipe.source.kind, recipe.source.classes, recipe.source.boxes) == ("voc", ["slag", "crack"], "clip")
        assert recipe.source.own == {"origin": 1}
        assert (recipe.split.shares, recipe.split.group) == ({"train": 0.75, "val": 0.25}, "s(\\d)")
        assert (recipe.transform.resize, recipe.transform.mode) == ((64, 32), "stretch")
        o = recipe.output
        assert (o.format, o.quality, o.seed, o.shuffle, o.dtype, o.shard_size) == ("memmap", 50, 7, False, "float16", 1 << 30)
        assert (o.normalize, o.restart_grid, o.image) == (((0.5, 0.5, 0.5), (0.1, 0.2, 0.3)), False, "keep")
        assert (recipe.run.workers, recipe.run.on_error, recipe.run.max_skip) == (3, "skip", 0.02)

    @pytest.mark.parametrize(
        ("flags", "grid"),
        [
            ((), True),
            (("--restart-grid", "on"), True),
            (("--restart-grid", "off"), False),
            (("--no-restart-grid",), False),
            (("--restart-grid", "lossless"), "lossless"),
        ],
    )
    def test_restart_grid(self, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], grid: object) -> None:
        seen: list[Recipe] = []
        monkeypatch.setattr(build_module, "build", lambda *args, **_: seen.append(args[2]) or Outcome(True, ""))
        assert run("build", "a", "b", "--subsampling", "444", *flags).exit_code == 0
        assert (seen[0].output.restart_grid, seen[0].output.subsampling) == (grid, "444")

    def test_says_what_it_did(self, make_voc: Callable[..., Path], tmp_path: Path) -> None:
        result = run("build", make_voc(10), tmp_path / "out", "--workers", 1)
        assert result.exit_code == 0
        assert result.stdout == ""
        said = result.stderr.splitlines()
        assert said[0].startswith("source: voc (")
        assert "train: 6 samples in 1 shard(s)" in said
        assert said[-1] == f"packed 10 samples into {tmp_path}/out; 0 left out. Check it with: pack verify {tmp_path}/out"

    def test_quiet(self, make_voc: Callable[..., Path], tmp_path: Path) -> None:
        src = make_voc(5)
        assert run("build", src, tmp_path / "a", "--quiet").stderr == ""
        (src / "stray.txt").write_text("x")
        said = run("build", src, tmp_path / "b", "--quiet").stderr.splitlines()
        assert len(said) == 1
        assert said[0].startswith("warning: stray.txt: ")

    def test_failure(self, make_folder: Callable[..., Path], tmp_path: Path) -> None:
        src = make_folder(5)
        (src / "slag" / "bad.jpg").write_bytes(b"x")
        result = run("build", src, tmp_path / "out")
        assert result.exit_code == 1
        assert result.stderr.splitlines()[-1].startswith("error: 1 of 6 pictures cannot be packed; --on-error skip would leave them out")

    def test_recipe_and_flags_give_the_same_bytes(self, make_voc: Callable[..., Path], tmp_path: Path) -> None:
        src = make_voc(6)
        (tmp_path / "r.toml").write_text('[transform]\nresize = [32, 24]\n[output]\nformat = "memmap"\nseed = 5\n')
        assert run("build", src, tmp_path / "a", "--recipe", tmp_path / "r.toml").exit_code == 0
        assert run("build", src, tmp_path / "b", "--resize", "32x24", "--format", "memmap", "--seed", 5).exit_code == 0
        assert tree(tmp_path / "a") == tree(tmp_path / "b")


class TestCheck:
    def test_clean(self, make_folder: Callable[..., Path]) -> None:
        result = run("check", make_folder(5))
        assert (result.exit_code, result.stdout) == (0, "5 samples can be packed, 0 would be left out\n")

    def test_json(self, make_folder: Callable[..., Path]) -> None:
        src = make_folder(5)
        (src / "slag" / "bad.jpg").write_bytes(b"x")
        (src / "note.txt").write_text("x")
        result = run("check", src, "--json")
        assert result.exit_code == 1
        said = json.loads(result.stdout)
        assert set(said) == {"findings", "num_samples", "num_skipped"}
        assert (said["num_samples"], said["num_skipped"]) == (5, 1)
        assert {(f["level"], f["path"]) for f in said["findings"]} == {("skip", "slag/bad.jpg"), ("warning", "note.txt")}
        assert all({"level", "code", "path", "sample", "message"} <= set(f) for f in said["findings"])
        assert result.stderr.splitlines()[-1] == "error: 1 of 6 pictures cannot be packed; --on-error skip would leave them out and pack 5"

    def test_warnings_and_allowed_skips_exit_0(self, make_folder: Callable[..., Path]) -> None:
        src = make_folder(5)
        (src / "note.txt").write_text("x")
        assert run("check", src).exit_code == 0
        (src / "slag" / "bad.jpg").write_bytes(b"x")
        result = run("check", src, "--on-error", "skip", "--json")
        assert (result.exit_code, json.loads(result.stdout)["num_skipped"]) == (0, 1)
        assert run("check", src, "--on-error", "skip", "--max-skip", 0).exit_code == 1


class TestVerify:
    def test_sound(self, make_folder: Callable[..., Path], tmp_path: Path) -> None:
        assert run_build(make_folder(4), tmp_path / "out").ok
        assert run("verify", tmp_path / "out").stdout == f"{tmp_path}/out: sound\n"
        assert run("verify", tmp_path / "out", "--quick").stdout == f"{tmp_path}/out: sound (quick look: no checksums, no decoding)\n"
        result = run("verify", tmp_path / "out", "--quiet")
        assert (result.exit_code, result.output) == (0, "")

    def test_json_of_damage(self, make_folder: Callable[..., Path], tmp_path: Path) -> None:
        assert run_build(make_folder(4), tmp_path / "out").ok
        (tmp_path / "out" / "findings.jsonl").unlink()
        (tmp_path / "out" / "other.txt").write_text("x")
        result = run("verify", tmp_path / "out", "--json")
        assert result.exit_code == 1
        said = json.loads(result.stdout)
        assert said["ok"] is False
        assert [(p["level"], p["code"], p["path"], p["sample"], p["source"]) for p in said["problems"]] == [
            ("warning", "unknown-file", "other.txt", None, None),
            ("error", "missing-file", "findings.jsonl", None, None),
        ]
        assert result.stderr == f"error: {tmp_path}/out: 1 problem(s)\n"

    def test_warning_exits_0(self, make_folder: Callable[..., Path], tmp_path: Path) -> None:
        assert run_build(make_folder(4), tmp_path / "out").ok
        (tmp_path / "out" / "other.txt").write_text("x")
        result = run("verify", tmp_path / "out")
        assert result.exit_code == 0
        assert "warning: other.txt: not in the manifest (unknown-file)" in result.stderr


class TestInfo:
    def test_prints(self, make_folder: Callable[..., Path], tmp_path: Path) -> None:
        assert run_build(make_folder(4), tmp_path / "out").ok
        result = run("info", tmp_path / "out")
        assert result.exit_code == 0
        assert result.stdout.splitlines() == list(info.describe(tmp_path / "out"))

    def test_reader_that_goes_away(self, make_folder: Callable[..., Path], tmp_path: Path) -> None:
        out = tmp_path / "out"
        assert run_build(make_folder(4), out).ok
        reader, writer = os.pipe()
        os.close(reader)
        done = subprocess.run(
            pack_command("info", out), stdout=writer, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parent.parent, check=False
        )
        os.close(writer)
        assert done.returncode == 1
        assert done.stderr == ""


@pytest.mark.parametrize(
    ("command", "module", "name", "said"),
    [
        (["build", "a", "b"], build_module, "build", "error: interrupted; what is finished is kept: "),
        (["check", "a"], build_module, "check", "error: interrupted; nothing was written"),
        (["verify", "a"], verify, "verify", "error: interrupted; nothing was changed"),
    ],
)
def test_interrupted(command: list[str], module: Any, name: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import signal

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, name, interrupt)
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    try:
        result = run(*command)
    finally:
        signal.signal(signal.SIGINT, before[0])
        signal.signal(signal.SIGTERM, before[1])
    assert result.exit_code == 1
    assert result.stderr.startswith(said)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            ValueError("odd"),
            "error: internal error while working on the output: ValueError: odd; set PACK_DEBUG=1 for details",
        ),
        (MemoryError(), "error: out of memory"),
        (OSError(28, "No space left on device"), "error: disk full while working on the output"),
        (PermissionError(13, "Permission denied", "x/y"), "error: x/y: Permission denied"),
    ],
)
def test_no_traceback_whatever_happens(error: Exception, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(info, "describe", fail)
    result = run("info", "x")
    assert result.exit_code == 1
    assert result.stderr.startswith(said)
    assert "Traceback" not in result.stderr
    monkeypatch.setenv("PACK_DEBUG", "1")
    assert ("Traceback" in run("info", "x").stderr) == isinstance(error, ValueError)


def test_import_is_light() -> None:
    code = "import packer.cli, sys; assert not {'torch', 'cv2', 'pandas', 'webdataset', 'rich'} & set(sys.modules), sorted(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent.parent).returncode == 0


def test_console_on_a_terminal(make_folder: Callable[..., Path], tmp_path: Path) -> None:
    """On a pseudo-terminal there is a progress bar, which goes away; the lines stay."""
    import pty

    main, worker = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    command = pack_command("build", make_folder(6), tmp_path / "out", "--workers", 1)
    process = subprocess.Popen(command, stderr=worker, stdout=worker, stdin=worker, env=env, cwd=Path(__file__).parent.parent)
    os.close(worker)
    said = b""
    while True:
        try:
            piece = os.read(main, 4096)
        except OSError:  # the other side is closed
            break
        if not piece:
            break
        said += piece
    os.close(main)
    assert process.wait() == 0
    assert b"packing" in said
    assert b"6/6" in said
    assert b"packed 6 samples into" in said
    assert read_json(tmp_path / "out")["splits"]["train"]["num_samples"] == 6
