"""The keys `objective.NAME.KEY`, which change on the command line what OBJECTIVES of a task file declares."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from runner.base.errors import Problem
from runner.base.values import Positive, PositiveInt
from runner.config.options import options_with_function
from runner.config.phases import GROUPS
from runner.config.schema import Key, Signature, did_you_mean

OBJECTIVE = "objective"


def keys_of_objectives(
    declared: Mapping[str, Any], given: Mapping[str, Any], signature: Callable[[str, str], Signature | None]
) -> dict[str, Key]:
    """Return the keys of all objectives by their full name; null: as for the whole run.

    declared   OBJECTIVES
    given      keys that the command line sets, and group -> option of the run
    signature  (group, option) -> the function behind it
    """
    found: dict[str, Key] = {}
    for name, content in declared.items():
        if not isinstance(content, Mapping):  # reported when the task is loaded
            continue
        lead = f"{OBJECTIVE}.{name}."
        every, norm = content.get("every", 1), content.get("max_grad_norm")
        found[f"{lead}every"] = Key(f"{lead}every", PositiveInt, every, "it is part of one update in `every`")
        help_of_norm = "maximum gradient norm for clipping; null: that of the run"
        found[f"{lead}max_grad_norm"] = Key(f"{lead}max_grad_norm", Positive | None, norm, help_of_norm)
        for group in GROUPS:
            option = _option_of(name, group, content, given)
            found[lead + group] = Key(lead + group, str, option, f"option of {group}")
            behind = signature(group, option)
            for key, of_option in (behind.keys if behind else {}).items():
                full = f"{lead}{group}.{key}"
                is_declared = option == content.get(group, given[group])
                default = content.get(f"{group}.{key}") if is_declared else None
                found[full] = Key(full, of_option.type | None, default, f"{of_option.help}; null: as without it")
    return found


def problems_of_objectives(
    declared: Mapping[str, Any], given: Mapping[str, Any], task_file: Path | None
) -> Iterator[Problem]:
    """Yield a problem for each option of the command line that does not exist."""
    for name in declared:
        for group in GROUPS:
            key, known = f"{OBJECTIVE}.{name}.{group}", options_with_function(group, task_file)
            if given.get(key, known[0]) not in known:
                what = f"unknown {group}; must be one of {', '.join(known)}"
                yield Problem(what, f"{key}={given[key]}", did_you_mean(str(given[key]), known))


def _option_of(name: str, group: str, content: Mapping[str, Any], given: Mapping[str, Any]) -> str:
    return str(given.get(f"{OBJECTIVE}.{name}.{group}", content.get(group, given[group])))


def nested_objectives(keys: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return full names of keys with values as objective -> key -> value."""
    found: dict[str, dict[str, Any]] = {}
    for full, value in keys.items():
        _, name, key = full.split(".", 2)
        found.setdefault(name, {})[key] = value
    return found


def flat_objectives(objectives: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return objective -> key -> value as full names of keys with values."""
    return {f"{OBJECTIVE}.{name}.{key}": value for name, keys in objectives.items() for key, value in keys.items()}
