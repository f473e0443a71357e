"""Suggestions for unknown keys: the key that was probably meant, or the equivalent of a key of another tool."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection

from runner.base.errors import to_one_line
from runner.config.aliases import suggestion_for_key, suggestion_for_option
from runner.config.options import GROUPS, all_keys, canonical_option, list_options
from runner.config.schema import MAX_SHOWN, describe_mismatch, did_you_mean, find_nearest
from runner.config.settings import MAIN_KEYS

LIST_KEYS_HINT = "run accel-run plan to see every key"
MAX_HINTS = 50  # with more unknown keys than this, similar keys are not searched: the cause is not a typo


def suggest_override(key: str, value: str, command_keys: tuple[str, ...] = ()) -> str:
    """Return what to type instead of an argument that is not of the form key=value."""
    name, value = to_one_line(key, MAX_SHOWN).replace("-", "_"), to_one_line(value, MAX_SHOWN)
    if name == "resume":  # also a command
        new_run = f"; to start a new run from another one, use resume={value}" if value else ""
        return f"use accel-run resume {value}".rstrip() + new_run
    if suggestion := translate_key(name, value, command_keys):
        return suggestion
    own_keys = [own for own in command_keys if not own.startswith("--")]
    match = find_nearest(name, [*GROUPS, *MAIN_KEYS, *own_keys, *all_keys()])
    if match == "task" and value.endswith(".py"):
        return f"use --task {shlex.quote(value)}"
    if match:
        return _omit_refused_values(f"use {match}={value or '...'}", command_keys)
    flags = [own.removeprefix("--") for own in ("--help", "--config-dir", *command_keys) if own.startswith("--")]
    flag = find_nearest(name.replace("_", "-"), flags)
    return f"did you mean --{flag}?" if flag else LIST_KEYS_HINT


def translate_key(name: str, value: str, command_keys: tuple[str, ...]) -> str:
    """Return a suggestion for a key of another tool, or for a key of the command that differs only in case.

    Returns an empty string if there is none.
    """
    for own in (name.lower(), f"inference.{name.lower()}"):
        if own in command_keys:
            return f"use {own}={value or '...'}" if own != name else ""
    suggestion = _omit_refused_values(suggestion_for_key(name, value), command_keys)
    return "leave it out" if "=..." in suggestion and value.lower() in ("false", "no", "off") else suggestion


def suggest_option(group: str, option: str, available: Collection[str]) -> str:
    """Return what to type instead of an unknown option of a group; empty if unknown."""
    if setting := suggestion_for_option(group, option):
        return f"use {setting}"
    return did_you_mean(option, available)


def _omit_refused_values(suggestion: str, command_keys: tuple[str, ...]) -> str:
    """Return the suggestion with `...` instead of each value that its setting would refuse: a suggestion must work."""

    def checked(match: re.Match[str]) -> str:
        key, value = match["key"], match["value"]
        is_own = key in command_keys or not (key in GROUPS or key in all_keys())
        if key in GROUPS and not is_own:
            known = list_options(key)
            setting = f"{key}={value.lower()}" if value.lower() in known else suggestion_for_option(key, value)
            if setting and value not in known:
                return setting
        values = [value] if value.startswith("[") else re.sub(r"^\w+\(|\)$", "", value).split(",")  # choice(1,2)
        return match[0] if is_own or all(_is_accepted(key, each) for each in values) else f"{key}=..."

    return _SETTING.sub(checked, suggestion)


def _is_accepted(key: str, text: str) -> bool:
    """Return whether some option has this key and accepts the value; placeholders such as NAME are accepted."""
    from runner.config.override_grammar import INVALID, parse_override  # Hydra is slow to import

    if re.fullmatch(r"\.\.\.|\[?[A-Z]+\]?", text):
        return True
    try:
        value = parse_override(f"{key}={text}").value()
    except INVALID:
        return False
    if key in GROUPS:
        return canonical_option(key, value, list_options(key)) in list_options(key)
    return any(describe_mismatch(known.type, value) is None for known in all_keys()[key])


_SETTING = re.compile(r"(?<![\w.'])(?P<key>[a-z][\w.]*)=(?P<value>(?:[^\s()]|\([^\s()]*\))+?)(?=[,;)]?(?:\s|$))")
