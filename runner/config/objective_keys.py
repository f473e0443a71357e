"""The keys `objective.NAME.KEY`, with which the command line overrides the OBJECTIVES of a task file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from runner.base.errors import Problem
from runner.base.values import Positive, PositiveInt
from runner.config.options import implemented_options, unknown_option
from runner.config.phases import PHASE_GROUPS
from runner.config.schema import Key, Signature

OBJECTIVE = "objective"


def list_objective_keys(
    declared: Mapping[str, Any], selected: Mapping[str, Any], signature: Callable[[str, str], Signature | None]
) -> dict[str, Key]:
    """Return full name -> key for the keys of all objectives. If a value is null, the setting of the run applies.

    declared   OBJECTIVES
    selected   keys that the command line sets, and group -> option of the run
    signature  (group, option) -> signature of the option
    """
    keys: dict[str, Key] = {}
    for name, declaration in declared.items():
        if not isinstance(declaration, Mapping):  # reported when the task is loaded
            continue
        prefix = f"{OBJECTIVE}.{name}."
        every, max_norm = declaration.get("every", 1), declaration.get("max_grad_norm")
        keys[f"{prefix}every"] = Key(
            f"{prefix}every", PositiveInt, every, "train the objective in the first update and every n-th one after it"
        )
        norm_help = "maximum gradient norm for clipping; null: max_grad_norm of the run"
        keys[f"{prefix}max_grad_norm"] = Key(f"{prefix}max_grad_norm", Positive | None, max_norm, norm_help)
        for group in PHASE_GROUPS:
            option = str(selected.get(f"{OBJECTIVE}.{name}.{group}", declaration.get(group, selected[group])))
            keys[prefix + group] = Key(prefix + group, str, option, f"option of {group}")
            option_signature = signature(group, option)
            for key, option_key in (option_signature.keys if option_signature else {}).items():
                full = f"{prefix}{group}.{key}"
                is_declared = option == declaration.get(group, selected[group])
                default = declaration.get(f"{group}.{key}") if is_declared else None
                keys[full] = Key(full, option_key.type | None, default, f"{option_key.help}; null: not set")
    return keys


def check_objective_options(
    declared: Mapping[str, Any], selected: Mapping[str, Any], task_file: Path | None
) -> Iterator[Problem]:
    """Yield a problem for each option of the command line that does not exist."""
    for name in declared:
        for group in PHASE_GROUPS:
            key, available = f"{OBJECTIVE}.{name}.{group}", implemented_options(group, task_file)
            if selected.get(key, available[0]) not in available:
                yield unknown_option(group, selected[key], available, f"{key}={selected[key]}")


def declared_key_notes(declared: Mapping[str, Any], requested: Mapping[str, Any]) -> Iterator[str]:
    """Yield a note for each key of the command line that has no effect, because every objective declares it."""
    contents = [content for content in declared.values() if isinstance(content, Mapping)]
    if any(key.startswith(f"{OBJECTIVE}.") for key in requested):  # these keys may replace what is declared
        return
    for key, value in requested.items():
        if contents and all(key in content for content in contents):
            instead = " ".join(f"{OBJECTIVE}.{name}.{key}={value}" for name in declared)
            yield f"{key}={value} has no effect: every objective declares {key}; use {instead}"


def nest_objectives(flat: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Convert full name of a key -> value to objective -> key -> value."""
    objectives: dict[str, dict[str, Any]] = {}
    for name, value in flat.items():
        _, objective, key = name.split(".", 2)
        objectives.setdefault(objective, {})[key] = value
    return objectives


def flatten_objectives(objectives: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Convert objective -> key -> value to full name of the key -> value."""
    return {f"{OBJECTIVE}.{name}.{key}": value for name, keys in objectives.items() for key, value in keys.items()}
