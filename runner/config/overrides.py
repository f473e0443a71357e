"""Parse overrides in Hydra's grammar; report those that cannot be used, with what to type instead."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from runner.base.errors import Problem, readable
from runner.config.aliases import (
    fix_of_argument,
    fix_of_key,
    fix_of_option,
    fix_of_value,
)
from runner.config.guarded_yaml import MAX_DEPTH, refuse_calls
from runner.config.options import GROUPS, all_keys, option_name, options_of, options_of_groups, plain_keys
from runner.config.request import Request, key_of, plain_key_of, text_of_value
from runner.config.schema import (
    MAX_SHOWN,
    did_you_mean,
    nearest,
)
from runner.config.suggestions import (
    MAX_HINTS,
    SHOWN_BY,
    is_valid_override,
    parse_override,
    suggest_instead_of_deleting,
    suggest_override,
    translate_key,
    valid_override,
)

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override


MAX_WORD = 20_000  # maximum characters of an argument


MAX_UNREAD = 200  # number of problems after which the remaining arguments are not parsed


def parse(request: Request, *, sweeps: bool = False) -> tuple[list[Override], list[Problem]]:
    """Parse each argument with Hydra's grammar; an invalid one becomes a problem with a suggestion."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser = OverridesParser.create()
    parsed: list[Override] = []
    problems: list[Problem] = []
    for argument in _joined(request, problems):
        if len(problems) >= MAX_UNREAD:
            what = "and the arguments after it were not parsed: too many before it are invalid"
            problems.append(Problem(what, argument, "fix those first; put many settings into a file"))
            break
        if len(argument) > MAX_WORD or _depth(argument) > MAX_DEPTH:  # the parser would take seconds to reject it
            what = f"must have at most {MAX_WORD:,} characters and be nested at most {MAX_DEPTH} deep"
            problems.append(Problem(f"{what}, but has {len(argument):,}", argument, "put long texts into a file"))
            continue
        try:
            override = parse_override(parser, argument)
        except (HydraException, RecursionError, ValueError) as error:  # ValueError: a number of 5,000 digits
            if _HALF_A_LIST.search(argument):
                what = "has an empty value in its list"
                problems.append(Problem(what, argument, "use key=1,2, or choice(1,2)"))
                continue
            near = _nearly(argument, request.own_keys) if len(problems) < MAX_HINTS else ""
            problems.append(
                Problem(
                    f"cannot be parsed: {_why_invalid(argument, error)}", argument, near or _readable_word(argument)
                )
            )
            continue
        refuse_calls(override.key_or_group, None, argument)
        if "${" in argument.partition("=")[2]:
            fix = "write the value; a shell replaces $NAME outside of single quotes"
            problems.append(Problem("${...} is allowed in files only", argument, fix))
            continue
        if override.is_sweep_override() and not sweeps:
            if suggestion := _no_sweep(argument, request.own_keys):
                problems.append(Problem("is not one value", argument, suggestion))
                continue
            is_open = override.value_type is not None and override.value_type.name == "INTERVAL_SWEEP"
            means = "find the best of them with accel-run search" if is_open else "run them all with accel-run train -m"
            quoting = f", or quote it: '{_quoted(argument)}'" if _may_be_quoted(argument) else ""
            problems.append(Problem("is a sweep over several values", argument, f"{means}{quoting}"))
            continue
        parsed.append(override)
    return parsed, problems


def _no_sweep(argument: str, own_keys: tuple[str, ...]) -> str:
    """Return a suggestion for values with commas that are meant as one value, such as gpus=0,1 or betas=0.9,0.95."""
    key, _, value = argument.partition("=")
    name = key.lstrip("+")
    if name in own_keys:
        return ""
    if name not in GROUPS and name not in all_keys():
        return translate_key(name, value, own_keys)
    if re.fullmatch(r"\d{1,3}(,\d{3})+", value) or name == "device":  # 1,000
        suggestion = fix_of_value(name, value) or f"use {valid_override(name, value)}"
        return suggestion if "," not in suggestion or name == "device" else ""
    is_list = name in all_keys() and is_valid_override(f"{name}=[{value}]")
    return f"use {name}=[{value}]" if is_list else ""


def _why_invalid(argument: str, error: BaseException) -> str:
    """Explain why an argument is invalid, without terms of the grammar."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    key, has_value, value = argument.partition("=")
    if not has_value or not key.strip("+~"):
        return "a setting is written key=value"
    if not re.fullmatch(r"[+~]{0,2}[A-Za-z_][\w./@-]*", key):
        return "a key has letters, digits, _ and dots"
    for opening, closing in ("[]", "{}", "()"):
        if value.count(opening) != value.count(closing):
            more = opening if value.count(opening) > value.count(closing) else closing
            return f"{more} has no counterpart"
    for quote in ("'", '"'):
        if value.count(quote) % 2:
            return f"{quote} has no counterpart"
    if value.startswith("("):
        return "lists are written with [ and ]"
    if len(value) > 4000 and value.strip("-").isdigit():
        return "the number has too many digits"
    special = sorted(set(value) & set("(){}[]:,;&|<>?!*^`\\\"'#= "))
    return (
        f"the value has {' '.join(special)}, which must be quoted"
        if special
        else "the value is not a text, a number or a list"
    )


_HALF_A_LIST = re.compile(r"=\s*,|,\s*,|,\s*$|=\s*(choice|range|interval|glob)\(\s*\)$")


def _readable_word(argument: str) -> str:
    """Return a suggestion for an argument that cannot be parsed."""
    if items := re.fullmatch(r"([\w.]+)=\(([\w.,+-]*)\)", argument):  # a Python tuple
        return f"use {items[1]}=[{items[2]}]"
    key, _, value = argument.partition("=")
    if key in all_keys():
        listed = f"{key}=[{value.strip('[](){} ')}]"
        if is_valid_override(listed):
            return f"use {listed}"
    if between := re.fullmatch(r"[+]{0,2}([\w.]+)=(\w*log\w*|uniform)\((.*)\)", argument):
        kind = "interval" if between[2] == "uniform" else "log"
        return f"accel-run search '{between[1]}={kind}({between[3]})' finds the best between two numbers"
    if _may_be_quoted(argument):
        return f"quote it: '{_quoted(argument)}'"
    text = value.strip("\"'")
    return f"use {valid_override(key, text)}"


def _may_be_quoted(argument: str) -> bool:
    """Return whether the value may be a text: that of a group or of a number may not."""
    key = key_of(argument)
    return is_valid_override(_quoted(argument)) if key in GROUPS or key in all_keys() else True


def _depth(argument: str) -> int:
    """Return the nesting depth of brackets, including those in quoted text."""
    depth = deepest = 0
    for char in argument:
        depth += (char in "[{(") - (char in ")}]")
        deepest = max(deepest, depth)
    return deepest


def _joined(request: Request, problems: list[Problem]) -> Iterator[str]:
    """Yield arguments of the form key=value; report `--lr 0.1`, `lr = 3` and arguments without value as problems."""

    def proper(key: str, value: str) -> str:
        return suggest_override(key, value, request.own_keys) if len(problems) < MAX_HINTS else SHOWN_BY

    rest = list(request.overrides)
    while rest:
        argument = rest.pop(0)
        if argument.startswith("-"):
            key, has_value, value = argument.lstrip("-").partition("=")
            if not has_value and rest and "=" not in rest[0] and not rest[0].startswith("-"):
                value = rest.pop(0)
                while _NUMBER.fullmatch(value.rpartition(",")[2]) and rest and _NUMBER.fullmatch(rest[0]):
                    value += f",{rest.pop(0)}"  # --betas 0.9 0.95
                argument = f"{argument} {value}"
                value = f"[{value}]" if "," in value else value
            what, fix = "unknown option; settings have the form key=value", proper(key, value)
            if key in ("m", "multirun"):
                what, fix = "unknown option here", "accel-run train -m runs each of several values; search needs no -m"
            problems.append(Problem(what, argument, fix))
        elif rest and rest[0] == "=":
            value = rest[1] if len(rest) > 1 else ""
            del rest[:2]
            problems.append(Problem("has spaces around =", f"{argument} = {value}".strip(), proper(argument, value)))
        elif argument.endswith("=") and rest and "=" not in rest[0]:
            value = rest.pop(0)
            problems.append(Problem("has a space after =", f"{argument} {value}", proper(argument[:-1], value)))
        elif argument.endswith(":") and rest and "=" not in rest[0] and not rest[0].startswith("-"):
            value = rest.pop(0)
            problems.append(Problem("has a colon instead of =", f"{argument} {value}", proper(argument[:-1], value)))
        elif spaced := re.fullmatch(r"([\w.+]+)(?: +=\s*|= +)(.+)", argument):
            problems.append(Problem("has spaces around =", argument, proper(spaced[1].lstrip("+"), spaced[2])))
        elif colon := re.fullmatch(r"([\w.]+):([^/].*|$)", argument):
            fix = proper(colon[1], colon[2]) if _is_key(colon[1], request.own_keys) else SHOWN_BY
            problems.append(Problem("has a colon instead of =", argument, fix))
        elif (
            "=" not in argument
            and rest
            and "=" not in rest[0]
            and _is_key(argument, request.own_keys)
            and argument not in GROUPS
        ):
            value = rest.pop(0)
            problems.append(Problem("has a space instead of =", f"{argument} {value}", proper(argument, value)))
        elif "=" not in argument and not argument.startswith("~"):
            what = "is not a setting; settings have the form key=value"
            fix = fix_of_argument(readable(argument, MAX_SHOWN), options_of_groups()) or proper(argument, "")
            problems.append(Problem(what, argument if argument.strip() else f"{argument!r}", fix))
        else:
            yield argument


def _is_key(argument: str, own_keys: tuple[str, ...]) -> bool:
    return argument in own_keys or argument in GROUPS or argument in all_keys() or bool(fix_of_key(argument))


_NUMBER = re.compile(r"[+-]?\d+\.?\d*(?:e[+-]?\d+)?")


def _nearly(argument: str, own_keys: tuple[str, ...]) -> str:
    """Return "did you mean X?" if the key is invalid, such as a.,b for a.b."""
    key = argument.partition("=")[0]
    if re.fullmatch(r"[+]{0,2}[\w.]*\w", key) and ".." not in key:
        return ""
    near = nearest(re.sub(r"\W+", ".", key).strip("."), [*GROUPS, *own_keys, *plain_keys()], cutoff=0.8)
    return f"did you mean {near}?" if near else ""


def _quoted(argument: str) -> str:
    key, _, value = argument.partition("=")
    return f'{readable(key, MAX_SHOWN)}="{readable(value, MAX_SHOWN)}"'


def split(
    parsed: list[Override], request: Request, problems: list[Problem]
) -> tuple[dict[str, str], list[tuple[str, Any, str]]]:
    """Divide overrides into group -> option and (key, value, argument); invalid ones become problems."""
    groups: dict[str, str] = {}
    values = []
    for override in parsed:
        key, argument = override.key_or_group, override.input_line or ""
        if override.is_delete():
            problems.append(
                Problem("settings cannot be deleted", argument, suggest_instead_of_deleting(plain_key_of(argument)))
            )
        elif key == "hydra" or key.startswith(("hydra.", "hydra/")):
            problems.append(
                Problem(
                    "Hydra's own settings cannot be changed: it only composes the configuration",
                    argument,
                    "leave it out",
                )
            )
        elif override.package is not None:
            fix = f"use {key}={readable(text_of_value(override.value()), MAX_SHOWN)}"
            problems.append(Problem("packages (@) are not supported", argument, fix))
        elif key in GROUPS:
            known = options_of(key, request.config_dir, request.task_file)
            option = option_name(key, override.value(), known)
            if key in groups:
                problems.append(
                    Problem(f"{key} is given twice, {groups[key]} and {option}", argument, "give one of them")
                )
            elif key == "task" and request.task_file:
                problems.append(Problem("the task is given twice, here and by --task", argument, "give one of them"))
            elif option not in known:
                near = fix_of_option(key, option) or did_you_mean(option, known)
                if key == "task" and option.endswith(".py"):
                    near = f"use --task {readable(option, MAX_SHOWN)}"
                listed = "one of " + ", ".join(known)
                problems.append(Problem(f"unknown {key}; must be {listed}", argument, near))
            else:
                groups[key] = option
        else:
            values.append((key, override.value(), argument))
    return groups, values
