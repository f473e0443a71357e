"""Suggestions for invalid overrides: what to type instead. Every suggestion is a valid override."""

from __future__ import annotations

import re
from typing import Any

from runner.base.errors import to_one_line
from runner.config.aliases import equivalent_keys, suggestion_for_key, suggestion_for_value
from runner.config.options import GROUPS, all_keys, canonical_option, list_options
from runner.config.request import format_value
from runner.config.schema import MAX_SHOWN, Key, describe_mismatch, find_nearest
from runner.config.settings import MAIN_KEYS

LIST_KEYS_HINT = "accel-run plan shows every key"
MAX_HINTS = 50  # maximum number of unknown keys to find similar ones for; more have another cause


def suggest_override(key: str, value: str, command_keys: tuple[str, ...] = ()) -> str:
    """Return what to type instead of an invalid override; every suggestion is valid."""
    name, value = to_one_line(key, MAX_SHOWN).replace("-", "_"), to_one_line(value, MAX_SHOWN)
    if name == "resume":
        return suggestion_for_key("resume_from", value) if "." in value else f"use accel-run resume {value}".rstrip()
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
    is_exact = match == name or match in command_keys or match in GROUPS
    return fix_values(f"use {match}={value or '...'}", command_keys) if is_exact else f"did you mean {match}?"


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
        return fix_values(suggestion, command_keys)
    for key in equivalent_keys(name):
        if key != name and (key in GROUPS or key in all_keys()):
            return fix_values(f"use {key}={value or '...'}", command_keys)
    return ""


def fix_values(suggestion: str, command_keys: tuple[str, ...] = ()) -> str:
    """Return the suggestion with `...` for each value that is not valid for its key."""

    def fix_value(match: re.Match[str]) -> str:
        key, value = match["key"], match["value"]
        if key in command_keys or not (key in GROUPS or key in all_keys()) or _PLACEHOLDER.fullmatch(value):
            return match[0]
        flag = f"{key}=true" if value == "..." else ""
        candidates = (match[0], flag, suggestion_for_value(key, value).removeprefix("use "))
        return next((candidate for candidate in candidates if is_valid_override(candidate)), f"{key}=...")

    return _SETTING.sub(fix_value, suggestion)


_BATCH_KEY = re.compile(r"(?i)(?:^|_)(?:batch_?size|batch|bs|bsz|mbs|b)$")
_PLACEHOLDER = re.compile(r"\[?[A-Z]+\]?")  # NAME, [NAME]: to be filled in by the user
_SETTING = re.compile(r"(?<![\w.'])(?P<key>[a-z][\w.]*)=(?P<value>\S+?)(?=[,;)]?(?:\s|$))")


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


def suggest_value(name: str, key: Key, value: Any) -> str:
    """Return the value that an invalid one was meant to be; empty if it is not recognized."""
    if isinstance(value, float) and value.is_integer() and not describe_mismatch(key.type, int(value)):
        return f"use {name}={int(value)}"
    if suggestion := suggestion_for_value(name, value):
        return suggestion
    if isinstance(value, (int, float)) and not isinstance(value, bool) and not describe_mismatch(key.type, str(value)):
        return f"use '{name}=\"{value}\"', for a text"
    if not describe_mismatch(key.type, [value]):
        return f"use {name}=[{format_value(value)}]"
    return ""
