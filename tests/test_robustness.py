"""The robustness harnesses of recipes/robustness, in short; `make robustness` runs them in full."""

from __future__ import annotations

import importlib
import random
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from packer.problems import REBUILD

pytestmark = pytest.mark.long

SCRIPTS = Path(__file__).parent.parent / "recipes" / "robustness"


def script(name: str) -> ModuleType:
    sys.path.insert(0, str(SCRIPTS))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(SCRIPTS))


@pytest.mark.slow
def test_killed_and_resumed(tmp_path: Path) -> None:
    failures = script("kill_and_resume").kill_and_resume(tmp_path, [148], seed=4)  # memmap, built over; main, power, worker
    assert not failures, "\n".join(failures)


@pytest.mark.slow
def test_mutations_are_found(tmp_path: Path) -> None:
    mutations = script("mutations")
    failures, kinds = mutations.mutate(tmp_path, 160, seed=5, cli_every=80)
    assert failures == []
    assert sum(kinds.values()) == 160
    assert len(kinds) == len(mutations.KINDS)


def test_a_blind_verdict_would_be_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The harness itself: a verify that finds nothing, or accuses another file, is told of."""
    mutations = script("mutations")
    nothing: list[dict[str, Any]] = []
    monkeypatch.setattr(mutations, "problems_of", lambda _: nothing)
    assert len(mutations.mutate(tmp_path / "a", 10, seed=0)[0]) == 10
    damage = mutations.Damage("x", (("train/shard-000000.tar",),))
    right = {"level": "error", "path": "train/shard-000000.tar"}
    assert mutations.missed(damage, [right]) is None
    assert mutations.missed(damage, [right, {"level": "error", "path": "val/shard-000000.tar"}]) == "accuses ['val/shard-000000.tar']"
    assert mutations.missed(damage, [{**right, "path": "index/train"}]) == "no problem names train/shard-000000.tar"


@pytest.mark.slow
def test_healthy_sets_are_not_accused(tmp_path: Path) -> None:
    assert script("healthy").healthy(tmp_path, 12, seed=6) == []


RESTORABLE = ["flipped", "truncated", "longer", "zeroed", "deleted", "folder_deleted", "swapped", "copied_over"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tar-restart-grid", "memmap-detection"])
def test_what_verify_says_to_do_restores_every_byte(name: str, tmp_path: Path) -> None:
    """Of each kind of damage: the message that names the file is followed, and all is as it was."""
    sets, damages = script("packed_sets"), script("damages")
    sets.sources(tmp_path / "src")
    source, tables = sets.SETS[name]
    src, out = tmp_path / "src" / source, tmp_path / name
    sets.pack(src, out, tables)
    m = sets.Mutant(out, script("raw_sets").tree(out), random.Random(name))
    for kind in RESTORABLE * 2:
        damage = getattr(damages, kind)(m)
        said = {p["path"]: p["message"] for p in sets.problems_of(out)}
        for names in damage.named:
            message = said[next(n for n in names if n in said)]
            if "move it away" in message:
                (out / names[0]).rmdir()
            elif "or move the folder away" in message:
                shutil.rmtree(out)
            elif not message.endswith("pack build --overwrite packs all of it anew"):
                assert message.endswith(REBUILD), (damage, message)
        sets.pack(src, out, tables, overwrite="--overwrite" in said.get("manifest.json", ""))
        left = out.with_name(f".{out.name}.old")
        if left.exists():  # an overwritten set whose manifest was damaged: nobody can tell what in it is ours
            shutil.rmtree(left)
        assert script("raw_sets").differences(script("raw_sets").tree(out), m.whole) == [], damage


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("users")
    yield script("what_users_see").Cases(folder)
    shutil.rmtree(folder)


@pytest.mark.slow
@pytest.mark.parametrize("case", script("what_users_see").CASES)
def test_what_users_see(case: str, cases: Any) -> None:
    users = script("what_users_see")
    seen = users.see(cases, case)
    sys.stdout.write(seen.text + "\n")  # shown by pytest -rP
    if seen.said == users.LEFT_OUT:
        pytest.skip(seen.said)
    assert seen.wrong is None, seen.text
