"""The tables of scripts/mutants.py name existing code."""

from __future__ import annotations

import ast
import importlib
import json
import sys
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from scripts.mutants import (
    BY_HAND,
    EQUIVALENT,
    FRESH,
    RESTORING,
    RESUME_LAWS,
    ROOT,
    SAVING,
    SIGNATURES,
    TARGETS,
    Mutant,
    Verdicts,
    digest_of,
    follow_moves,
    is_restoring,
    map_of,
    mirror_of,
    mutants_of,
    places,
    replace_function,
    shown,
    target_files,
)


@cache
def every_mutant() -> list[Mutant]:
    return [mutant for path in target_files(ROOT) for mutant in mutants_of(path, (ROOT / path).read_text())]


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_a_target_has_mutants(target: str) -> None:
    assert any(mutant.path.startswith(target) for mutant in every_mutant())


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(RESTORING))
def test_a_restoring_function_has_statements_to_leave_out(name: str) -> None:
    owners = {
        mutant.function for mutant in every_mutant() if mutant.operator == "not restored"
        and name in (mutant.function.rpartition(".")[2], f"{Path(mutant.path).stem}.{mutant.function}")
    }  # fmt: skip
    assert owners


@pytest.mark.slow
@pytest.mark.parametrize(("path", "old", "new"), BY_HAND)
def test_a_change_by_hand_is_one_mutant_that_compiles(path: str, old: str, new: str) -> None:
    source = (ROOT / path).read_text()
    result = [
        mutant for mutant in every_mutant() if (mutant.path, mutant.before, mutant.after) == (path, old, new)
        and mutant.operator == "not restored"
    ]  # fmt: skip
    assert len(result) == 1
    changed = source.encode()[: result[0].start] + new.encode() + source.encode()[result[0].stop :]
    compile(changed, path, "exec")


@pytest.mark.slow
def test_fields_with_fresh_values_are_saved_in_checkpoints() -> None:
    saved = {
        key.value for path in target_files(ROOT) for node, _, function in places(ast.parse((ROOT / path).read_text()))
        if function == SAVING and isinstance(node, ast.Dict) for key in node.keys if isinstance(key, ast.Constant)
    }  # fmt: skip
    assert set(FRESH) <= saved


@pytest.mark.slow
def test_survivors_with_a_reason_are_mutants() -> None:
    known = {(each.path, each.function, shown(each.before), shown(each.after)) for each in every_mutant()}
    listed = {(row["path"], row["function"], row["before"], row["after"]) for row in
              tomllib.loads(EQUIVALENT.read_text())["mutant"]}  # fmt: skip
    assert listed - known == set()


@pytest.mark.parametrize("test", [SIGNATURES, *RESUME_LAWS])
def test_preferred_tests_exist(test: str) -> None:
    file, _, name = test.partition("::")
    assert f"def {name}" in (ROOT / file).read_text()


def test_a_module_without_a_test_file_is_mirrored_by_the_closest_folder(tmp_path: Path) -> None:
    (tmp_path / "tests/base").mkdir(parents=True)
    (tmp_path / "tests/base/test_batch.py").touch()
    assert mirror_of(tmp_path, "runner/base/batch.py") == "tests/base/test_batch.py"
    assert mirror_of(tmp_path, "runner/base/parts/order.py") == "tests/base/"


def test_every_target_is_mirrored_by_tests() -> None:
    assert all((ROOT / mirror_of(ROOT, path)).exists() for path in target_files(ROOT))


def test_the_map_of_a_test_file_follows_it(tmp_path: Path) -> None:
    tree, maps = tmp_path / "tree", tmp_path / "maps"
    moved = tree / "tests/new/test_a.py"
    for folder in (moved.parent, maps):
        folder.mkdir(parents=True)
    moved.write_text("def test_a(): ...")
    row = {"digest": digest_of(moved), "statements": [], "tests": {"tests/old/test_a.py::test_a": {"passed": True}}}
    map_of(maps, "tests/old/test_a.py").write_text(json.dumps(row))
    follow_moves(tree, maps)
    assert [path.name for path in maps.iterdir()] == ["tests+new+test_a.py.json"]
    assert list(json.loads(map_of(maps, "tests/new/test_a.py").read_text())["tests"]) == ["tests/new/test_a.py::test_a"]


def test_restoring_functions_are_found_by_name_and_by_module() -> None:
    assert is_restoring("runner/engine/meter.py", "Meter.load")
    assert is_restoring("runner/engine/weights.py", "load_initial_weights")
    assert not is_restoring("runner/engine/training.py", "load_initial_weights")


MODULE = """
from contextlib import contextmanager
from functools import cache, cached_property

def plain():
    return 1

def outer():
    def inner():
        return 1
    return inner()

@contextmanager
def managed():
    yield 1

@cache
def cached():
    return 1

class Parent:
    def method(self):
        return 1

class Child(Parent):
    def method(self):
        assert super().method()
        return 1
    @property
    def value(self):
        return 1
    @cached_property
    def kept(self):
        return 1
    @classmethod
    def made(cls):
        return 1
"""
CALLS = {
    "plain": "module.plain()",
    "outer.inner": "module.outer()",
    "managed": "module.managed().__enter__()",
    "Child.method": "module.Child().method()",
    "Child.value": "module.Child().value",
    "Child.kept": "module.Child().kept",
    "Child.made": "module.Child.made()",
}


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of an imported module with MODULE as its source."""
    name = f"module_of_{tmp_path.name.rstrip('0123456789_')}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, name, raising=False)
    importlib.invalidate_caches()
    importlib.import_module(name)
    return name


@pytest.mark.parametrize("function", CALLS)
def test_a_function_of_an_imported_module_gets_the_code_of_a_mutant(function: str, module: str, tmp_path: Path) -> None:
    changed = MODULE.replace("return 1", "return 2").replace("yield 1", "yield 2")
    assert replace_function(tmp_path, f"{module}.py", function, changed)
    assert eval(CALLS[function], {"module": sys.modules[module]}) == 2


@pytest.mark.parametrize("function", ["cached", "", "Child", "missing"])
def test_a_change_whose_effect_an_import_or_a_cache_may_hold_is_not_put_into_a_function(
    function: str, module: str, tmp_path: Path
) -> None:
    assert not replace_function(tmp_path, f"{module}.py", function, MODULE)


@pytest.mark.parametrize(("edited", "is_known"), [("", True), ("runner/a.py", False), ("tests/test_a.py", False)])
def test_the_verdict_on_a_mutant_holds_while_its_file_and_the_test_are_the_same(
    edited: str, is_known: bool, tmp_path: Path
) -> None:
    for name in ("runner/a.py", "tests/test_a.py"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("def a():\n    return 1\n")
    first, *_ = mutants_of("runner/a.py", (tmp_path / "runner/a.py").read_text())
    result: dict[str, Any] = {"key": first.key, "path": first.path, "status": "killed", "by": "tests/test_a.py::test_a"}
    Verdicts(tmp_path / "verdicts.json", tmp_path).kept(result)
    if edited:
        (tmp_path / edited).write_text("def a():\n    return 2\n")
    actual = Verdicts(tmp_path / "verdicts.json", tmp_path).known(first)
    assert (actual is not None) is is_known
