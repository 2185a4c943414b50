"""README, CHANGELOG and help texts say what the code does."""

from __future__ import annotations

import ast
import codecs
import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from itertools import pairwise
from pathlib import Path

import click
import pytest

import packer.cli

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text("utf-8")


def group() -> click.Group:
    """The one click group of the command line."""
    found = {id(value): value for value in vars(packer.cli).values() if isinstance(value, click.Group)}
    assert len(found) == 1
    return next(iter(found.values()))


COMMANDS = group().commands
OPTIONS = [(name, p) for name, command in sorted(COMMANDS.items()) for p in command.params if isinstance(p, click.Option)]
OPTION_IDS = [f"{name} {option.opts[0]}" for name, option in OPTIONS]


def test_there_are_the_commands_of_the_contract() -> None:
    assert {"build", "check", "verify", "info"} <= set(COMMANDS)


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_readme_names_every_command(name: str) -> None:
    assert f"`pack {name}" in README


@pytest.mark.parametrize(("name", "option"), OPTIONS, ids=OPTION_IDS)
def test_readme_names_every_option(name: str, option: click.Option) -> None:
    for spelling in [*option.opts, *option.secondary_opts]:
        if spelling.startswith("--"):
            assert re.search(rf"{re.escape(spelling)}(?![\w-])", README), f"pack {name} {spelling} is not in README.md"


@pytest.mark.parametrize(("name", "option"), OPTIONS, ids=OPTION_IDS)
def test_every_option_has_help(name: str, option: click.Option) -> None:
    assert option.help, f"pack {name} {option.opts[0]} has no help text"
    assert not option.hidden


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_has_help(name: str) -> None:
    assert COMMANDS[name].help
    assert not COMMANDS[name].hidden


def test_readme_names_no_option_that_does_not_exist() -> None:
    known = {spelling for _, option in OPTIONS for spelling in [*option.opts, *option.secondary_opts]}
    table = re.findall(r"^\| `(--[^`]*)` ", README, re.MULTILINE)
    said = {name for cell in table for name in re.findall(r"--[a-z][a-z-]*", cell)}
    assert said
    assert said <= known


@pytest.mark.slow
@pytest.mark.parametrize("args", [[], *([name] for name in sorted(COMMANDS))], ids=lambda args: " ".join(args) or "pack")
def test_installed_script_prints_help(args: list[str]) -> None:
    script = Path(sys.executable).with_name("pack")
    done = subprocess.run([script, *args, "--help"], capture_output=True, text=True, timeout=60, env={**os.environ, "COLUMNS": "120"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Usage: pack")
    assert "--help" in done.stdout


def test_every_file_that_readme_names_exists() -> None:
    named = set(re.findall(r"\b(?:recipes|loaders|packer|tests)/[\w/]+\.(?:py|toml)", README))
    assert {name for name in named if name.startswith("recipes/")}
    assert [name for name in sorted(named) if not (ROOT / name).is_file()] == []


def test_every_recipe_is_in_the_readme() -> None:
    recipes = sorted((ROOT / "recipes").glob("*.py")) + sorted((ROOT / "recipes").glob("*.toml"))
    assert [path.name for path in recipes if f"`recipes/{path.name}`" not in README] == []


def test_names_that_readme_imports_exist() -> None:
    lines = re.findall(r"^from ((?:loaders|packer)[\w.]*) import (.+)$", README, re.MULTILINE)
    assert lines
    for module, names in lines:
        for name in names.split(","):
            assert hasattr(importlib.import_module(module), name.strip()), f"{module} has no {name}"


def test_version_is_the_newest_of_the_changelog() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert newest is not None
    assert newest[1] == version


def test_constraints_hold_every_direct_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    direct = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    lines = [line for line in (ROOT / "constraints.txt").read_text("utf-8").splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines)
    assert lines == sorted(lines, key=str.lower)
    pinned = {line.partition("==")[0].lower().replace("_", "-") for line in lines}
    assert {re.split(r"[<>=!~\[; ]", name)[0].lower() for name in direct} <= pinned


@pytest.mark.slow
def test_makefile_names_its_targets() -> None:
    done = subprocess.run(["make", "help"], capture_output=True, text=True, cwd=ROOT, timeout=20)
    assert done.returncode == 0, done.stderr
    for target in ("demo", "test", "lint", "types", "bench", "clean"):
        assert re.search(rf"^{target} ", done.stdout, re.MULTILINE)


CODE = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
LEVELS = ("error", "skip", "warning")
PACKER = {path: ast.parse(path.read_text("utf-8")) for path in sorted((ROOT / "packer").rglob("*.py"))}
VERIFY = {path: tree for path, tree in PACKER.items() if path.name.startswith(("verify", "problems"))}
BUILD = {path: tree for path, tree in PACKER.items() if path not in VERIFY}


def explained(section: str) -> dict[str, tuple[str, str]]:
    """code -> (level, the rest of its row) of a table in the README."""
    text = README.partition(f"<!-- {section} -->")[2].partition(f"<!-- /{section} -->")[0]
    rows = re.findall(r"^\| `([a-z0-9-]+)` \| (error|skip|warning) \| (.+) \|$", text, re.MULTILINE)
    assert len({code for code, _, _ in rows}) == len(rows) > 10
    return {code: (level, rest) for code, level, rest in rows}


def words(node: ast.AST | None) -> set[str]:
    """String literals in an expression that look like a code."""
    found = (n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)) if node else ()
    return {value for value in found if CODE.fullmatch(value)}


def places_of_code() -> dict[str, set[int]]:
    """Name of a function or class of packer -> which of its arguments is a `code`."""
    places: dict[str, set[int]] = {}
    for tree in PACKER.values():
        for owner in ast.walk(tree):
            for node in ast.iter_child_nodes(owner):
                if isinstance(node, ast.FunctionDef):
                    names = [a.arg for a in node.args.args]
                    called = owner.name if node.name == "__init__" and isinstance(owner, ast.ClassDef) else node.name
                elif isinstance(node, ast.ClassDef):
                    names = [f.target.id for f in node.body if isinstance(f, ast.AnnAssign) and isinstance(f.target, ast.Name)]
                    called = node.name
                else:
                    continue
                if "code" in names:
                    places.setdefault(called, set()).add(names.index("code") - (names[0] == "self"))
    return places


def assigned(target: ast.expr, value: ast.expr | None) -> set[str]:
    """What a variable or attribute `code` is set to."""
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        return set().union(*map(assigned, target.elts, value.elts))
    return words(value) if ast.unparse(target).rpartition(".")[2] == "code" else set()


def codes(trees: dict[Path, ast.Module]) -> set[str]:
    """Every literal that is passed as an argument `code`, assigned to a variable, field or attribute `code`, or stands in for one."""
    places = places_of_code()
    assert places["Finding"] == places["Problem"] == {1}
    found: set[str] = set()
    for node in (node for tree in trees.values() for node in ast.walk(tree)):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func).rpartition(".")[2]
            found |= set().union(*(words(node.args[i]) for i in places.get(name, ()) if i < len(node.args)))
            found |= set().union(*(words(k.value) for k in node.keywords if k.arg == "code"))
            if name == "getattr" and len(node.args) == 3 and words(node.args[1]) == {"code"}:
                found |= words(node.args[2])
        elif isinstance(node, ast.Assign):
            found |= set().union(*(assigned(target, node.value) for target in node.targets))
        elif isinstance(node, ast.AnnAssign):
            found |= assigned(node.target, node.value)
    return found - {"code"}  # the name that getattr is given


def is_encoding(word: str) -> bool:
    try:
        codecs.lookup(word)
    except LookupError:
        return False
    return True


def kebab_words(trees: dict[Path, ast.Module]) -> set[str]:
    """Every literal with a hyphen that looks like a code, wherever it stands, but for encodings and distributions."""
    distributions = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["dependencies"]
    names = {re.split(r"[<>=!~\[; ]", line)[0] for line in distributions}
    found = set().union(*map(words, trees.values()))
    return {word for word in found if "-" in word and word not in names and not is_encoding(word)}


def test_readme_explains_every_finding() -> None:
    found = codes(BUILD)
    # Passed on, from a variable, a class attribute, a default of getattr, an exception, a conditional expression.
    assert {"empty-box", "path-outside", "resize-too-large", "not-encodable", "bad-xml", "truncated-image", "unreadable"} <= found
    missing = (found | kebab_words(BUILD)) - set(explained("findings"))
    assert not missing, f"README.md says nothing about {sorted(missing)}"


def test_readme_explains_every_problem_of_verify() -> None:
    found = codes(VERIFY)
    assert {"checksum", "bad-sample", "missing-file"} <= found
    missing = (found | kebab_words(VERIFY)) - set(explained("problems"))
    assert not missing, f"README.md says nothing about {sorted(missing)}"


@pytest.mark.parametrize(("section", "trees"), [("findings", BUILD), ("problems", VERIFY)], ids=["findings", "problems"])
def test_readme_explains_no_code_that_is_never_told(section: str, trees: dict[Path, ast.Module]) -> None:
    assert set(explained(section)) - codes(trees) - kebab_words(trees) == set()


@pytest.mark.parametrize(("section", "trees"), [("findings", BUILD), ("problems", VERIFY)], ids=["findings", "problems"])
def test_levels_of_the_readme_are_those_of_the_code(section: str, trees: dict[Path, ast.Module]) -> None:
    rows = explained(section)
    pairs: set[tuple[str, str]] = set()
    for node in (node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.Call)):
        for level, code in pairwise(node.args):
            if isinstance(level, ast.Constant) and level.value in LEVELS and isinstance(code, ast.Constant) and code.value in rows:
                pairs.add((str(level.value), str(code.value)))
    assert len(pairs) > 10
    assert [pair for pair in sorted(pairs) if pair[0] != rows[pair[1]][0] and pair[0] not in rows[pair[1]][1]] == []


def shape(text: str) -> list[str]:
    """Lines of output, sorted, without numbers, digests and the width of columns: what does not depend on the size of pictures."""
    plain = re.sub(r"\b[0-9a-f]{16}\b", "#", text)
    plain = re.sub(r"\b[kMG]?B\b", "B", re.sub(r"\d[\d.,]*", "#", plain))
    return sorted(" ".join(line.split()) for line in plain.splitlines() if line.strip())


@pytest.mark.slow
def test_the_tour_of_the_readme_works_as_it_is_written(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    tour = README.partition("## Five minutes")[2].partition("\n## ")[0]
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", tour, re.MULTILINE | re.DOTALL)
    bin_folder = Path(sys.executable).parent
    env = {**os.environ, "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}

    def run(command: list[str]) -> str:
        program = {"python": sys.executable, "pack": str(bin_folder / "pack")}[command[0]]
        done = subprocess.run([program, *command[1:]], stdout=-1, stderr=subprocess.STDOUT, text=True, cwd=tmp_path, env=env, timeout=120)
        assert done.returncode == 0, f"{command}: {done.stdout}"
        return done.stdout

    ran = 0
    for language, block in blocks:
        if language == "python":
            run(["python", "-c", block])
            continue
        for command, shown in re.findall(r"^(?:\$ )?((?:pack|python) .+)\n((?:(?!\$ |python ).*\n)*)", block, re.MULTILINE):
            small = ["--size", "240x180"] if command.startswith("python recipes/make_welding_v2.py") else []
            printed = run([*shlex.split(command), *small])
            ran += 1
            if shown:
                assert shape(printed) == shape(shown), command
    assert ran == 6
