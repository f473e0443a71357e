"""Suggestions for invalid overrides: what to type instead. Every suggestion is a valid override."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from runner.base.errors import Problem, to_one_line
from runner.config.aliases import (
    TASK_PHASES,
    equivalent_keys,
    suggestion_for_key,
    suggestion_for_option,
    suggestion_for_value,
)
from runner.config.config_files import shipped_options
from runner.config.options import (
    AXES,
    GROUPS,
    all_keys,
    canonical_option,
    find_signature,
    list_options,
    option_with_key,
)
from runner.config.request import format_value
from runner.config.schema import (
    MAX_SHOWN,
    REQUIRED,
    Key,
    describe_mismatch,
    find_nearest,
)
from runner.config.settings import MAIN_KEYS

LIST_KEYS_HINT = "accel-run plan shows every key"


MAX_HINTS = 50  # maximum number of unknown keys to find similar ones for; more have another cause


def suggest_override(key: str, value: str, command_keys: tuple[str, ...] = ()) -> str:
    """Return what to type instead of an invalid override; every suggestion is valid."""
    name, value = to_one_line(key, MAX_SHOWN).replace("-", "_"), to_one_line(value, MAX_SHOWN)
    if name == "resume":  # a command, too
        new_run = f"; a new run that starts from another one: resume={value}" if value else ""
        return f"use accel-run resume {value}".rstrip() + new_run
    if name == "task" and value.endswith(".py"):
        return f"use --task {shlex.quote(value)}"
    if suggestion := translate_key(name, value, command_keys):
        return suggestion
    if name in MAIN_KEYS:
        return f"use {name}={value or '...'}"
    match = name if name in GROUPS else find_nearest(name, [*GROUPS, *command_keys, *all_keys()], cutoff=0.7)
    is_plausible = (
        match == name or match in GROUPS or match in command_keys or is_valid_override(f"{match}={value or 'true'}")
    )
    if match is None or not (is_plausible or match.rpartition(".")[2] == name.rpartition(".")[2]):
        return LIST_KEYS_HINT  # an invalid value shows that another key was meant
    return fix_values(f"use {match}={value or '...'}", command_keys)


def suggest_sweep(key: str, value: str, command_keys: tuple[str, ...] = ()) -> str:
    """Return what to type instead of an invalid override of a sweep, such as lr=0.1,0.2; each value is corrected."""
    value = to_one_line(value, MAX_SHOWN)
    if re.match(r"(choice|range|interval)\(", value):
        return suggest_override(key, "", command_keys).replace("=...", f"={value}")
    values = [value] if value.startswith(("[", ",")) else value.split(",")
    first, *others = [suggest_override(key, each, command_keys).split(" ") for each in values]
    if any(len(words) != len(first) for words in others):
        return " ".join(first)
    return " ".join(map(_join_values, zip(first, *others, strict=True)))


def _join_values(settings: Sequence[str]) -> str:
    """Return key=1,2 for key=1 and key=2; the first text if they are not settings of the same key."""
    keys = {setting.partition("=")[0] for setting in settings}
    values = dict.fromkeys(setting.partition("=")[2] for setting in settings)
    return f"{keys.pop()}={','.join(values)}" if len(keys) == 1 and len(values) > 1 else settings[0]


def translate_key(name: str, value: str, command_keys: tuple[str, ...]) -> str:
    """Return a suggestion for a key of another tool, or for a key of accel-run in a group of another tool."""
    if name.lower() in command_keys:
        return f"use {name.lower()}={value or '...'}" if name not in command_keys else ""
    is_batch_key, prediction_keys = (
        _BATCH_KEY.search(name),
        [key for key in command_keys if key.startswith("inference.")],
    )
    if (key := f"inference.{'batch_size' if is_batch_key else name.lower()}") in prediction_keys:
        return f"use {key}={value or '...'}"
    if is_batch_key and prediction_keys:
        return f"the task's prediction has no batch size; it has {', '.join(prediction_keys)}"
    if suggestion := suggestion_for_key(name, value):
        parts = name.lower().split("_")
        if len(parts) == 2 and (key := next((command_key for command_key in command_keys if command_key in parts), "")):
            return f"use {key}={value or '...'}"  # batch_size in benchmark, which has batch
        return fix_values(suggestion, command_keys)
    for key in equivalent_keys(name):
        if key != name and (key in GROUPS or key in all_keys()):
            return fix_values(f"use {key}={value or '...'}", command_keys)
    return ""


def name_phases(problem: Problem, names: Sequence[str]) -> Problem:
    """Return the problem with the names of the task's phases in its suggestion."""
    return replace(problem, fix=problem.fix.replace(TASK_PHASES, ", ".join(names)))


_BATCH_KEY = re.compile(r"(?i)(?:^|_)(?:batch_?size|batch|bs|bsz|mbs|b)$")


def fix_values(suggestion: str, command_keys: tuple[str, ...] = ()) -> str:
    """Return the suggestion with its invalid values replaced by valid ones.

    Values of other tools are translated by the same tables as typed ones; otherwise the default is used.
    """

    def fix_value(match: re.Match[str]) -> str:
        key, value = match["key"], match["value"]
        is_known = key in GROUPS or key in all_keys()
        if value == "..." and is_known and key not in GROUPS and is_valid_override(f"{key}=true"):
            value = "true"  # a flag
        if not is_known or key in command_keys or _PLACEHOLDER.fullmatch(value):
            return match[0]
        argument = make_valid_override(key, value)
        return argument if re.search(rf"(?<![\w.]){key.partition('.')[0]}=", suggestion) else _add_option(argument)

    return _SETTING.sub(fix_value, suggestion)


def _add_option(argument: str) -> str:
    """Return the argument preceded by the option that has its key, if the default option does not have it."""
    group, _, name = argument.partition("=")[0].partition(".")
    default_signature = find_signature(group, shipped_options()[group]) if group in AXES and name else None
    option = option_with_key(group, name) if group in AXES and name else None
    return (
        f"{group}={option} {argument}"
        if default_signature and option and name.partition(".")[0] not in default_signature.keys
        else argument
    )


def make_valid_override(key: str, value: str) -> str:
    """Return a valid override of the key, with this value if possible."""
    if key in GROUPS:
        available = list_options(key)
        is_absent = value.lower() in ("false", "no", "null")  # written as text in other tools
        name = canonical_option(key, None if is_absent else value, available)
        if name in available:
            return f"{key}={name if is_absent else value}"
        suggestion = suggestion_for_option(key, value).removeprefix("use ")
        match = find_nearest(value, available) if not suggestion else None
        return suggestion or (f"{key}={match}" if match else f"{key}=NAME, one of {', '.join(available)}")
    for argument in (f"{key}={value}", suggestion_for_value(key, value).removeprefix("use ")):
        if is_valid_override(argument):
            return argument
    group, _, name = key.partition(".")
    default_signature = (
        find_signature(group, shipped_options()[group]) if group in AXES else None
    )  # optimizers differ in their default rates
    candidates = [
        *([default_signature.keys[name]] if default_signature and name in default_signature.keys else []),
        *all_keys()[key],
    ]
    default = next((candidate.default for candidate in candidates if candidate.default not in (None, REQUIRED)), None)
    return f"{key}={format_value(default)}" if default is not None else f"{key}=..."


def is_valid_override(argument: str) -> bool:
    """Return whether an override can be parsed and its value is valid for its key in any option."""
    from runner.config.override_grammar import INVALID, parse_override  # Hydra is slow to import

    try:
        override = parse_override(argument)
        is_sweep = override.is_sweep_override()
    except INVALID:
        return False
    key = override.key_or_group
    if is_sweep or (key not in GROUPS and key not in all_keys()):
        return False
    value = override.value()
    if key in GROUPS:
        return canonical_option(key, value, list_options(key)) in list_options(key)
    return any(describe_mismatch(known.type, value) is None for known in all_keys()[key])


_PLACEHOLDER = re.compile(r"\.\.\.|\[?[A-Z]+\]?")  # NAME, [NAME]: to be filled in by the user


_SETTING = re.compile(r"(?<![\w.'])(?P<key>[a-z][\w.]*)=(?P<value>\S+?)(?=[,;)]?(?:\s|$))")


def suggest_for_deletion(key: str) -> str:
    """Return a suggestion for ~KEY."""
    if key in GROUPS:
        available = list_options(key)
        off_option = canonical_option(key, None, available)
        return f"use {key}={off_option if off_option in available else shipped_options().get(key, available[0])}"
    return f"leave it out, or use {make_valid_override(key, 'null')}" if key in all_keys() else "leave it out"


def suggest_value(name: str, key: Key, value: Any) -> str:
    """Return a valid value for an invalid one: the intended value if it is recognized, else the default."""
    if isinstance(value, float) and value.is_integer() and not describe_mismatch(key.type, int(value)):
        return f"use {name}={int(value)}"
    if suggestion := suggestion_for_value(name, value):
        return suggestion
    if isinstance(value, (int, float)) and not isinstance(value, bool) and not describe_mismatch(key.type, str(value)):
        return f"use '{name}=\"{value}\"', for a text"
    if not describe_mismatch(key.type, [value]):
        return f"use {name}=[{format_value(value)}]"
    defaults = () if key.default in (None, REQUIRED) or describe_mismatch(key.type, key.default) else (key.default,)
    return next((f"use {name}={format_value(default)}, the default" for default in defaults), "")
