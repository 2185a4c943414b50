"""README, CHANGELOG and help texts say what the code does."""

from __future__ import annotations

import ast
import importlib
import os
import re
import subprocess
import sys
import tomllib
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


def told_codes() -> set[str]:
    """Codes of findings: kebab-case literals among the first arguments of a call that makes or reports one, anywhere in packer."""
    speakers = {
        "Finding",
        "ImageError",
        "XmlFault",
        "RowFault",
        "say",
        "add",
        "boxes",
        "picture",
        "fault",
        "note",
        "refuse",
        "_say",
        "_refuse",
    }
    codes = set()
    for path in sorted((ROOT / "packer").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in speakers:
                literals = [arg.value for arg in node.args[:3] if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
                codes |= {literal for literal in literals if re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", literal)}
    return codes


def test_readme_explains_every_finding() -> None:
    section = README.partition("<!-- findings -->")[2].partition("<!-- /findings -->")[0]
    explained = re.findall(r"^\| `([a-z0-9-]+)` \| (?:error|skip|warning) \|", section, re.MULTILINE)
    assert len(explained) == len(set(explained))
    assert "empty-box" in told_codes()
    assert told_codes() <= set(explained)
    code = "\n".join(path.read_text("utf-8") for path in (ROOT / "packer").rglob("*.py"))
    assert [name for name in explained if f'"{name}"' not in code] == []
