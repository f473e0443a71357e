"""The YAML files of a group match the functions of its axis in names, keys, defaults and documentation."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from runner.config.options import AXES as FILES
from runner.config.schema import REQUIRED, describe_mismatch, read_functions

ROOT = Path(__file__).parents[2]
AXES = sorted(FILES)
OPTIONS = [(axis, file.stem) for axis in AXES for file in sorted((ROOT / "conf" / axis).glob("*.yaml"))]


def table_of(axis: str) -> Mapping[str, Callable[..., Any]]:
    """Return the last mapping of functions that the file defines."""
    module = importlib.import_module(f"runner.{FILES[axis].removesuffix('.py').replace('/', '.')}")
    tables = [
        value
        for name, value in vars(module).items()
        if name.isupper() and not name.startswith("_") and isinstance(value, Mapping)
    ]
    assert tables, f"runner/{FILES[axis]} has no table of its options"
    result: Mapping[str, Callable[..., Any]] = tables[-1]
    return result


def file_of(axis: str, option: str) -> Path:
    return ROOT / "conf" / axis / f"{option}.yaml"


def keys_of(axis: str, option: str) -> Any:
    return OmegaConf.to_container(OmegaConf.load(file_of(axis, option)))


def has_function(axis: str, option: str) -> bool:
    """Return whether a function implements the option. If none implements `auto`, the plan replaces it."""
    return option != "auto" or option in table_of(axis)


def without_lists(value: Any) -> Any:
    return tuple(map(without_lists, value)) if isinstance(value, (list, tuple)) else value


def test_axes_match_the_configuration_groups_and_modules() -> None:
    assert {axis for axis, _ in OPTIONS} == set(AXES)
    files = {path.stem for path in (ROOT / "runner" / "axes").glob("*.py")} - {"__init__"}
    assert files <= set(AXES)


@pytest.mark.parametrize("axis", AXES)
def test_every_implemented_option_is_in_the_table(axis: str) -> None:
    files = {option for group, option in OPTIONS if group == axis and has_function(axis, option)}
    assert files == set(table_of(axis))


@pytest.mark.parametrize("axis", AXES)
def test_option_names_are_those_of_their_functions(axis: str) -> None:
    for option, function in table_of(axis).items():
        assert function.__name__ == option.replace("-", "_")


@pytest.mark.slow
@pytest.mark.parametrize(("axis", "option"), OPTIONS)
def test_yaml_keys_and_defaults_match_the_signature(axis: str, option: str) -> None:
    if not has_function(axis, option):
        assert keys_of(axis, option) == {}
        return
    signature = read_functions(ROOT / "runner" / FILES[axis])[option.replace("-", "_")]
    given = keys_of(axis, option)
    assert list(given) == list(signature.keys), "the keys must be in the same order"
    for name, key in signature.keys.items():
        assert key.default is not REQUIRED
        assert without_lists(given[name]) == without_lists(key.default), name
        assert type(given[name]) is type(key.default) or isinstance(given[name], list), name
        assert describe_mismatch(key.type, given[name]) is None, f"{name} {describe_mismatch(key.type, given[name])}"
        assert key.help, f"the docstring of {option} must say what {name} means"


@pytest.mark.slow
@pytest.mark.parametrize(("axis", "option"), OPTIONS)
def test_yaml_files_document_options_and_keys(axis: str, option: str) -> None:
    first, *lines = file_of(axis, option).read_text(encoding="utf-8").splitlines()
    assert first.startswith("# ")
    assert first.endswith(".")
    assert lines == ["{}"] if not keys_of(axis, option) else all("  # " in line for line in lines)


@pytest.mark.parametrize("task", sorted(path.stem for path in (ROOT / "conf" / "task").glob("*.yaml")))
def test_the_yaml_file_of_a_task_matches_its_build_function(task: str) -> None:
    build = read_functions(ROOT / "tasks" / task / "task.py")["build"]
    given = keys_of("task", task)
    assert list(given) == list(build.keys), "the keys must be in the same order"
    assert {name: without_lists(value) for name, value in given.items()} == {
        name: without_lists(key.default) for name, key in build.keys.items()
    }
    assert all(key.help for key in build.keys.values())
