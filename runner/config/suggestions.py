"""Suggestions for invalid overrides: what to type instead, and only what is accepted."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, Any

from runner.base.errors import readable
from runner.config.aliases import (
    fix_of_key,
    fix_of_option,
    fix_of_value,
    other_ways,
    own_names,
)
from runner.config.config_files import shipped_options
from runner.config.options import AXES, GROUPS, all_keys, function_of, option_name, option_with, options_of, plain_keys
from runner.config.request import text_of_value, word_of
from runner.config.schema import (
    MAX_SHOWN,
    REQUIRED,
    Key,
    fault,
    nearest,
)

if TYPE_CHECKING:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import Override


SHOWN_BY = "accel-run plan shows every key"


MAX_HINTS = 50  # unknown keys for which a near one is searched: more are another kind of mistake


def read_word(parser: OverridesParser, word: str) -> Override:
    """Return what the word says. Letters beyond ASCII, as in a path, need no quotes, which Hydra's grammar wants."""
    key, _, value = word.partition("=")
    if value.isascii() or set(value) & set("'\"[]{}(),$"):
        return parser.parse_override(word)
    override = parser.parse_override(word_of(key, value))
    override.input_line = word
    return override


def proper_word(key: str, value: str, own_keys: tuple[str, ...] = ()) -> str:
    """Return what to type instead of what was typed; what it suggests is accepted."""
    name, value = readable(key, MAX_SHOWN).replace("-", "_"), readable(value, MAX_SHOWN)
    if name == "resume":
        return fix_of_key("resume_from", value) if "." in value else f"use accel-run resume {value}".rstrip()
    if said := meant(name, value, own_keys):
        return said
    if name == "checkpoint" and value:  # a folder or a file, as --checkpoint of other tools is given
        return fix_of_option("checkpoint", value) or acceptable(f"use checkpoint={value}")
    if name in GROUPS and value.lower() in ("", "true"):  # a switch elsewhere
        return fix_of_option(name, "true") or f"use {name}=NAME, one of {', '.join(options_of(name))}"
    near = name if name in GROUPS else nearest(name, [*GROUPS, *own_keys, *plain_keys()], cutoff=0.7)
    is_meant = near == name or near in GROUPS or near in own_keys or is_accepted(f"{near}={value or 'true'}")
    if near is None or not (is_meant or near.rpartition(".")[2] == name.rpartition(".")[2]):
        return SHOWN_BY  # a value that does not fit shows that something else was meant
    return acceptable(f"use {near}={value or '...'}", own_keys)


def meant(name: str, value: str, own_keys: tuple[str, ...]) -> str:
    """Return what to say instead of a key of another tool, or of one of ours in a group of another tool."""
    if name.lower() in own_keys:
        return f"use {name.lower()}={value or '...'}" if name not in own_keys else ""
    is_batch, of_prediction = _NAMES_A_BATCH.search(name), [own for own in own_keys if own.startswith("inference.")]
    if (own := f"inference.{'batch_size' if is_batch else name.lower()}") in of_prediction:
        return f"use {own}={value or '...'}"
    if is_batch and of_prediction:
        return f"the task's prediction has no batch size; it has {', '.join(of_prediction)}"
    if said := fix_of_key(name, value):
        parts = name.lower().split("_")
        if len(parts) == 2 and (own := next((each for each in own_keys if each in parts), "")):
            return f"use {own}={value or '...'}"  # batch_size in benchmark, which has batch
        return acceptable(said, own_keys)
    for own in own_names(name):
        if own != name and (own in GROUPS or own in all_keys()):
            return acceptable(f"use {own}={value or '...'}", own_keys)
    return ""


_NAMES_A_BATCH = re.compile(r"(?i)(?:^|_)(?:batch_?size|batch|bs|bsz|mbs|b)$")


def acceptable(said: str, own_keys: tuple[str, ...] = ()) -> str:
    """Return the suggestion with values that are accepted in the place of those that are not.

    What another tool takes for a value goes through the same tables as what is typed; else it is the default.
    """

    def checked(found: re.Match[str]) -> str:
        key, value = found["key"], found["value"]
        is_of_ours = key in GROUPS or key in all_keys()
        if value == "..." and is_of_ours and key not in GROUPS and is_accepted(f"{key}=true"):
            value = "true"  # a switch
        if not is_of_ours or key in own_keys or _PLACEHOLDER.fullmatch(value):
            return found[0]
        word = accepted(key, value)
        return word if re.search(rf"(?<![\w.]){key.partition('.')[0]}=", said) else _with_option(word)

    return _SETTING.sub(checked, said)


def _with_option(word: str) -> str:
    """Return the word behind the option that it belongs to, where the usual one has no such key."""
    group, _, name = word.partition("=")[0].partition(".")
    usual = function_of(group, shipped_options()[group]) if group in AXES and name else None
    option = option_with(group, name) if group in AXES and name else None
    return f"{group}={option} {word}" if usual and option and name.partition(".")[0] not in usual.keys else word


def accepted(key: str, value: str) -> str:
    """Return a word for the key that is accepted, with this value if it can be."""
    if key in GROUPS:
        known = options_of(key)
        is_absent = value.lower() in ("false", "no", "null")  # as text, where another tool has it
        name = option_name(key, None if is_absent else value, known)
        if name in known:
            return f"{key}={name if is_absent else value}"
        said = fix_of_option(key, value).removeprefix("use ")
        near = nearest(value, known) if not said else None
        return said or (f"{key}={near}" if near else f"{key}=NAME, one of {', '.join(known)}")
    for word in (f"{key}={value}", *other_ways(key, value)):
        if is_accepted(word):
            return word
    group, _, name = key.partition(".")
    usual = function_of(group, shipped_options()[group]) if group in AXES else None  # optimizers differ in their rates
    candidates = [*([usual.keys[name]] if usual and name in usual.keys else []), *all_keys()[key]]
    default = next((other.default for other in candidates if other.default not in (None, REQUIRED)), None)
    return f"{key}={text_of_value(default)}" if default is not None else f"{key}=..."


def is_accepted(word: str) -> bool:
    """Tell whether a setting can be read and has a value that its key takes, whatever option has that key."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        override = read_word(OverridesParser.create(), word)
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


_PLACEHOLDER = re.compile(r"\.\.\.|\[?[A-Z]+\]?")  # NAME, [NAME]: to be filled in by who reads it


_SETTING = re.compile(r"(?<![\w.'])(?P<key>[a-z][\w.]*)=(?P<value>\S+?)(?=[,;)]?(?:\s|$))")


def instead_of_deleting(key: str) -> str:
    """Return what to say instead of ~KEY."""
    if key in GROUPS:
        known = options_of(key)
        absent = option_name(key, None, known)
        return f"use {key}={absent if absent in known else shipped_options().get(key, known[0])}"
    return f"leave it out, or use {accepted(key, 'null')}" if key in all_keys() else "leave it out"


def example_of(name: str, key: Key, value: Any) -> str:
    """Return a word that fits in the place of one that does not: what was meant, else the default."""
    if isinstance(value, float) and value.is_integer() and not fault(key.type, int(value)):
        return f"use {name}={int(value)}"
    if said := fix_of_value(name, value):
        return said
    if isinstance(value, (int, float)) and not isinstance(value, bool) and not fault(key.type, str(value)):
        return f"use '{name}=\"{value}\"', for a text"
    written = f"[{','.join(map(text_of_value, value))}]" if isinstance(value, list) else text_of_value(value)
    if word := next(
        (word for word in other_ways(name, written) if word != f"{name}={written}" and _fits_key(word, name, key)), ""
    ):
        return f"use {word}"
    known = () if key.default in (None, REQUIRED) or fault(key.type, key.default) else (key.default,)
    return next((f"use {name}={text_of_value(default)}, the default" for default in known), "")


def _fits_key(word: str, name: str, key: Key) -> bool:
    """Tell whether the word is accepted: for the key itself by its type, which a task may have declared."""
    if not word.startswith(f"{name}=") or name in all_keys():
        return is_accepted(word)
    return fault(key.type, _plain_value(word.partition("=")[2])) is None


def _plain_value(text: str) -> Any:
    """Return what a word's text means: a number, a list or the text itself."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
