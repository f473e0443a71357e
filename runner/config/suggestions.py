"""Suggestions for invalid overrides: what to type instead. Every suggestion is a valid override."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from runner.base.errors import to_one_line
from runner.config.aliases import fix_of_key, fix_of_option, fix_of_value, own_names
from runner.config.config_files import shipped_options
from runner.config.options import AXES, GROUPS, all_keys, function_of, option_name, option_with, options_of
from runner.config.request import override_of, text_of_value
from runner.config.schema import (
    MAX_SHOWN,
    REQUIRED,
    Key,
    fault,
    nearest,
)
from runner.config.settings import MAIN_KEYS

if TYPE_CHECKING:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import Override


SHOWN_BY = "accel-run plan shows every key"


MAX_HINTS = 50  # maximum number of unknown keys to find similar ones for; more have another cause


def parse_override(parser: OverridesParser, argument: str) -> Override:
    """Parse an override. Non-ASCII letters, as in a path, need no quotes, which Hydra's grammar requires."""
    key, _, value = argument.partition("=")
    if value.isascii() or set(value) & set("'\"[]{}(),$"):
        return parser.parse_override(argument)
    override = parser.parse_override(override_of(key, value))
    override.input_line = argument
    return override


def suggest_override(key: str, value: str, own_keys: tuple[str, ...] = ()) -> str:
    """Return what to type instead of an invalid override; every suggestion is valid."""
    name, value = to_one_line(key, MAX_SHOWN).replace("-", "_"), to_one_line(value, MAX_SHOWN)
    if name == "resume":
        return fix_of_key("resume_from", value) if "." in value else f"use accel-run resume {value}".rstrip()
    if suggestion := translate_key(name, value, own_keys):
        return suggestion
    if name in MAIN_KEYS:
        return f"use {name}={value or '...'}"
    near = name if name in GROUPS else nearest(name, [*GROUPS, *own_keys, *all_keys()], cutoff=0.7)
    is_meant = near == name or near in GROUPS or near in own_keys or is_valid_override(f"{near}={value or 'true'}")
    if near is None or not (is_meant or near.rpartition(".")[2] == name.rpartition(".")[2]):
        return SHOWN_BY  # an invalid value shows that another key was meant
    return with_valid_values(f"use {near}={value or '...'}", own_keys)


def translate_key(name: str, value: str, own_keys: tuple[str, ...]) -> str:
    """Return a suggestion for a key of another tool, or for one of ours in a group of another tool."""
    if name.lower() in own_keys:
        return f"use {name.lower()}={value or '...'}" if name not in own_keys else ""
    is_batch, of_prediction = _NAMES_A_BATCH.search(name), [own for own in own_keys if own.startswith("inference.")]
    if (own := f"inference.{'batch_size' if is_batch else name.lower()}") in of_prediction:
        return f"use {own}={value or '...'}"
    if is_batch and of_prediction:
        return f"the task's prediction has no batch size; it has {', '.join(of_prediction)}"
    if suggestion := fix_of_key(name, value):
        parts = name.lower().split("_")
        if len(parts) == 2 and (own := next((each for each in own_keys if each in parts), "")):
            return f"use {own}={value or '...'}"  # batch_size in benchmark, which has batch
        return with_valid_values(suggestion, own_keys)
    for own in own_names(name):
        if own != name and (own in GROUPS or own in all_keys()):
            return with_valid_values(f"use {own}={value or '...'}", own_keys)
    return ""


_NAMES_A_BATCH = re.compile(r"(?i)(?:^|_)(?:batch_?size|batch|bs|bsz|mbs|b)$")


def with_valid_values(suggestion: str, own_keys: tuple[str, ...] = ()) -> str:
    """Return the suggestion with its invalid values replaced by valid ones.

    Values of other tools are translated by the same tables as typed ones; otherwise the default is used.
    """

    def checked(found: re.Match[str]) -> str:
        key, value = found["key"], found["value"]
        is_of_ours = key in GROUPS or key in all_keys()
        if value == "..." and is_of_ours and key not in GROUPS and is_valid_override(f"{key}=true"):
            value = "true"  # a flag
        if not is_of_ours or key in own_keys or _PLACEHOLDER.fullmatch(value):
            return found[0]
        argument = valid_override(key, value)
        return argument if re.search(rf"(?<![\w.]){key.partition('.')[0]}=", suggestion) else _with_option(argument)

    return _SETTING.sub(checked, suggestion)


def _with_option(argument: str) -> str:
    """Return the argument preceded by the option that has its key, if the default option does not have it."""
    group, _, name = argument.partition("=")[0].partition(".")
    usual = function_of(group, shipped_options()[group]) if group in AXES and name else None
    option = option_with(group, name) if group in AXES and name else None
    return f"{group}={option} {argument}" if usual and option and name.partition(".")[0] not in usual.keys else argument


def valid_override(key: str, value: str) -> str:
    """Return a valid override of the key, with this value if possible."""
    if key in GROUPS:
        known = options_of(key)
        is_absent = value.lower() in ("false", "no", "null")  # written as text in other tools
        name = option_name(key, None if is_absent else value, known)
        if name in known:
            return f"{key}={name if is_absent else value}"
        suggestion = fix_of_option(key, value).removeprefix("use ")
        near = nearest(value, known) if not suggestion else None
        return suggestion or (f"{key}={near}" if near else f"{key}=NAME, one of {', '.join(known)}")
    for argument in (f"{key}={value}", fix_of_value(key, value).removeprefix("use ")):
        if is_valid_override(argument):
            return argument
    group, _, name = key.partition(".")
    usual = (
        function_of(group, shipped_options()[group]) if group in AXES else None
    )  # optimizers differ in their default rates
    candidates = [*([usual.keys[name]] if usual and name in usual.keys else []), *all_keys()[key]]
    default = next((other.default for other in candidates if other.default not in (None, REQUIRED)), None)
    return f"{key}={text_of_value(default)}" if default is not None else f"{key}=..."


def is_valid_override(argument: str) -> bool:
    """Return whether an override can be parsed and its value is valid for its key in any option."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        override = parse_override(OverridesParser.create(), argument)
        is_sweep = override.is_sweep_override()
    except (HydraException, RecursionError, ValueError):
        return False
    key = override.key_or_group
    if is_sweep or (key not in GROUPS and key not in all_keys()):
        return False
    value = override.value()
    if key in GROUPS:
        return option_name(key, value, options_of(key)) in options_of(key)
    return any(fault(known.type, value) is None for known in all_keys()[key])


_PLACEHOLDER = re.compile(r"\.\.\.|\[?[A-Z]+\]?")  # NAME, [NAME]: to be filled in by the user


_SETTING = re.compile(r"(?<![\w.'])(?P<key>[a-z][\w.]*)=(?P<value>\S+?)(?=[,;)]?(?:\s|$))")


def suggest_instead_of_deleting(key: str) -> str:
    """Return a suggestion for ~KEY."""
    if key in GROUPS:
        known = options_of(key)
        absent = option_name(key, None, known)
        return f"use {key}={absent if absent in known else shipped_options().get(key, known[0])}"
    return f"leave it out, or use {valid_override(key, 'null')}" if key in all_keys() else "leave it out"


def suggest_value(name: str, key: Key, value: Any) -> str:
    """Return a valid value for an invalid one: the intended value if it is recognized, else the default."""
    if isinstance(value, float) and value.is_integer() and not fault(key.type, int(value)):
        return f"use {name}={int(value)}"
    if suggestion := fix_of_value(name, value):
        return suggestion
    if isinstance(value, (int, float)) and not isinstance(value, bool) and not fault(key.type, str(value)):
        return f"use '{name}=\"{value}\"', for a text"
    if not fault(key.type, [value]):
        return f"use {name}=[{text_of_value(value)}]"
    known = () if key.default in (None, REQUIRED) or fault(key.type, key.default) else (key.default,)
    return next((f"use {name}={text_of_value(default)}, the default" for default in known), "")
