"""The tables of scripts/mutants.py name existing code."""

from __future__ import annotations

import ast
import tomllib
from functools import cache
from pathlib import Path

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
    abbreviate,
    is_restoring,
    mirror_of,
    mutants_of,
    places,
    target_files,
)


@cache
def every_mutant() -> list[Mutant]:
    return [mutant for path in target_files(ROOT) for mutant in mutants_of(path, (ROOT / path).read_text())]


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_each_target_has_mutants(target: str) -> None:
    assert any(mutant.path.startswith(target) for mutant in every_mutant())


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(RESTORING))
def test_restoring_functions_have_removable_statements(name: str) -> None:
    owners = {
        mutant.function for mutant in every_mutant() if mutant.operator == "not restored"
        and name in (mutant.function.rpartition(".")[2], f"{Path(mutant.path).stem}.{mutant.function}")
    }  # fmt: skip
    assert owners


@pytest.mark.slow
@pytest.mark.parametrize(("path", "old", "new"), BY_HAND)
def test_each_handwritten_change_is_one_valid_mutant(path: str, old: str, new: str) -> None:
    source = (ROOT / path).read_text()
    result = [
        mutant for mutant in every_mutant() if (mutant.path, mutant.before, mutant.after) == (path, old, new)
        and mutant.operator == "not restored"
    ]  # fmt: skip
    assert len(result) == 1
    changed = source.encode()[: result[0].start] + new.encode() + source.encode()[result[0].stop :]
    compile(changed, path, "exec")


@pytest.mark.slow
def test_fields_with_fresh_values_are_in_checkpoints() -> None:
    saved = {
        key.value for path in target_files(ROOT) for node, _, function in places(ast.parse((ROOT / path).read_text()))
        if function == SAVING and isinstance(node, ast.Dict) for key in node.keys if isinstance(key, ast.Constant)
    }  # fmt: skip
    assert set(FRESH) <= saved


@pytest.mark.slow
def test_every_listed_survivor_is_still_a_mutant() -> None:
    known = {(each.path, each.function, abbreviate(each.before), abbreviate(each.after)) for each in every_mutant()}
    listed = {(row["path"], row["function"], row["before"], row["after"]) for row in
              tomllib.loads(EQUIVALENT.read_text())["mutant"]}  # fmt: skip
    assert listed - known == set()


@pytest.mark.parametrize("test", [SIGNATURES, *RESUME_LAWS])
def test_preferred_tests_exist(test: str) -> None:
    file, _, name = test.partition("::")
    assert f"def {name}" in (ROOT / file).read_text()


def test_the_closest_folder_mirrors_an_untested_module(tmp_path: Path) -> None:
    (tmp_path / "tests/base").mkdir(parents=True)
    (tmp_path / "tests/base/test_batch.py").touch()
    assert mirror_of(tmp_path, "runner/base/batch.py") == "tests/base/test_batch.py"
    assert mirror_of(tmp_path, "runner/base/parts/order.py") == "tests/base/"


def test_every_target_is_mirrored_by_tests() -> None:
    assert all((ROOT / mirror_of(ROOT, path)).exists() for path in target_files(ROOT))


def test_restoring_functions_are_found_by_name_and_by_module() -> None:
    assert is_restoring("runner/engine/evaluation/meter.py", "Meter.load")
    assert is_restoring("runner/engine/parts/weights.py", "load_initial_weights")
    assert not is_restoring("runner/engine/training.py", "load_initial_weights")
