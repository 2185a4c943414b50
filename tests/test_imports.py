"""Who may import whom, function-local imports included; what no module may use; what an import must not load."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("packer", "loaders")

READ_SIDE = ("loaders.format", "loaders.codecs", "loaders.jpeg", "loaders.sampling")
# A module may import what stands in the row of its longest matching prefix: those modules and everything below them.
ALLOWED: dict[str, tuple[str, ...]] = {
    "loaders": ("loaders",),
    "loaders.npy": (),
    "loaders.format": ("loaders.npy",),
    "loaders.sampling": ("loaders.format",),
    "loaders.jpeg": ("loaders.format",),
    "loaders.codecs": ("loaders.format", "loaders.jpeg"),
    "packer": ("packer", *READ_SIDE),
    "packer.sample": ("loaders.format",),
    "packer.content": (),
    "packer.sources": ("packer.sample", "packer.sources", "packer.content", "loaders.format"),
    "packer.transforms": ("packer.sample", "loaders.format"),
    "packer.writers": ("packer.sample", "packer.writers", *READ_SIDE),
    "packer.engines": ("packer.sample", "packer.engines", "packer.work"),  # work: named, for preloading in workers
    "packer.verify": ("packer", "loaders"),
    "packer.report": ("packer", "loaders"),
    "packer.bench": ("packer", "loaders"),
}
# Helpers of a package that its plug-ins may share; plug-ins never import each other.
PLUGINS = {
    "packer.sources": ("folder", "voc", "csv", "coco", "yolo"),
    "packer.writers": ("tar", "memmap"),
    "packer.engines": ("local", "ray"),
}
NEVER_IMPORTED = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "yaml", "code", "pty", "imp"}
# Messages between a process and those that it started itself, over a pipe that has no name; as in `multiprocessing`, which does so unseen.
PIPES = {"loaders.processes": "pickle", "loaders.handover": "pickle"}
NEVER_CALLED = {"eval", "exec", "compile", "__import__", "torch.load", "yaml.load", "subprocess.getoutput", "subprocess.getstatusoutput"}
NEVER_CALLED |= {f"os.{name}" for name in dir(os) if name.startswith(("exec", "spawn", "posix_spawn")) or name in ("system", "popen")}
WITHOUT_TORCH = ("loaders.format", "loaders.codecs", "loaders.jpeg", "loaders.sampling", "packer.cli")


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(path): path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))}
TREES = {name: ast.parse(path.read_text("utf-8")) for name, path in FILES.items()}


def imports(module: str) -> Iterator[tuple[str, int]]:
    """Full name of everything a module imports, anywhere in it, with the line."""
    package = module if FILES[module].name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield (full if full in FILES else base), node.lineno


def below(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def ours(module: str) -> list[tuple[str, int]]:
    return [(name, line) for name, line in imports(module) if any(below(name, package) for package in PACKAGES)]


def named(module: str) -> list[tuple[str, int]]:
    """Our modules that stand as a string, as in a table of plug-ins that are imported on use ("packer.writers.tar:TarWriter")."""
    strings = [node for node in ast.walk(TREES[module]) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return [(str(node.value).partition(":")[0], node.lineno) for node in strings if str(node.value).partition(":")[0] in FILES]


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def plugin(module: str) -> tuple[str, str] | None:
    """(package, name) of a plug-in module."""
    package, _, name = module.rpartition(".")
    return (package, name) if name in PLUGINS.get(package, ()) else None


def test_walk_sees_local_and_relative_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "def f():\n    from ..format import read_manifest\n    import os.path\nfrom . import csv\nfrom packer import sample"
    monkeypatch.setitem(FILES, "packer.sources.probe", Path("probe.py"))
    monkeypatch.setitem(TREES, "packer.sources.probe", ast.parse(code))
    monkeypatch.setitem(FILES, "packer.sources.csv", Path("csv.py"))
    found = {(name, line) for name, line in imports("packer.sources.probe")}
    assert found == {("packer.format", 2), ("os.path", 3), ("packer.sources.csv", 4), ("packer.sample", 5)}


@pytest.mark.parametrize("module", FILES)
def test_module_imports_only_what_the_table_allows(module: str) -> None:
    row = max((prefix for prefix in ALLOWED if below(module, prefix)), key=len)
    found = [*ours(module), *named(module)]
    wrong = [f"line {line}: {name}" for name, line in found if not any(below(name, allowed) for allowed in (module, *ALLOWED[row]))]
    assert not wrong, f"{module} (row {row!r}) imports {wrong}"


@pytest.mark.parametrize("module", [module for module in FILES if plugin(module)])
def test_plugins_never_import_each_other(module: str) -> None:
    wrong = [f"line {line}: {name}" for name, line in [*ours(module), *named(module)] if plugin(name) and name != module]
    assert not wrong


def test_imports_make_no_cycle() -> None:
    graph = {module: {name for name, _ in ours(module) if name in FILES and name != module} for module in FILES}
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, f"import cycle: {' -> '.join([*path, module])}"
        if module not in done:
            for name in sorted(graph[module]):
                visit(name, (*path, module))
            done.add(module)

    for module in graph:
        visit(module, ())
    assert done == set(FILES)


@pytest.mark.parametrize("module", FILES)
def test_module_uses_no_pickle_no_eval_no_shell(module: str) -> None:
    never = NEVER_IMPORTED - {PIPES.get(module)}
    wrong = [f"line {line}: import {name}" for name, line in imports(module) if name.split(".")[0] in never]
    for node in ast.walk(TREES[module]):
        if not isinstance(node, ast.Call):
            continue
        if dotted(node.func) in NEVER_CALLED:
            wrong.append(f"line {node.lineno}: {dotted(node.func)}")
        for keyword in node.keywords:
            # Only a literal False is known to be harmless.
            harmless = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
            if keyword.arg in ("shell", "allow_pickle") and not harmless:
                wrong.append(f"line {node.lineno}: {keyword.arg}={ast.unparse(keyword.value)}")
        if dotted(node.func) in ("np.load", "numpy.load") and not any(k.arg == "allow_pickle" for k in node.keywords):
            wrong.append(f"line {node.lineno}: np.load without allow_pickle=False")
    assert not wrong


def loaded(module: str) -> set[str]:
    """Top-level names of all modules that a fresh interpreter holds after importing one."""
    code = f"import sys, {module}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_import_does_not_load_torch(module: str) -> None:
    names = loaded(module)
    assert module.partition(".")[0] in names
    assert "torch" not in names


def test_importing_the_format_loads_neither_torch_nor_click_nor_opencv() -> None:
    assert loaded("loaders.format") & {"torch", "click", "cv2", "packer", "pandas"} == set()
