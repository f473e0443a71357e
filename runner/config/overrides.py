"""Parse overrides in Hydra's grammar; report those that cannot be used, with what to type instead."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from runner.base.errors import Problem, readable
from runner.config.aliases import (
    fix_of_key,
    fix_of_option,
    fix_of_value,
    fix_of_word,
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
    accepted,
    instead_of_deleting,
    is_accepted,
    meant,
    proper_word,
    read_word,
)

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override


MAX_WORD = 20_000  # characters of a word of the command line


MAX_UNREAD = 200  # problems after which the rest of the words are not looked at: something else went wrong


def parse(request: Request, *, sweeps: bool = False) -> tuple[list[Override], list[Problem]]:
    """Read each word with Hydra's grammar; a word that is none becomes a problem with the way to write it."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser = OverridesParser.create()
    parsed: list[Override] = []
    problems: list[Problem] = []
    for word in _joined(request, problems):
        if len(problems) >= MAX_UNREAD:
            what = "and all after it must wait, not looked at: too much before it cannot be read"
            problems.append(Problem(what, word, "fix that first; put many settings into a file"))
            break
        if len(word) > MAX_WORD or _depth(word) > MAX_DEPTH:  # the grammar would take seconds to say no
            what = f"must have at most {MAX_WORD:,} characters and be nested at most {MAX_DEPTH} deep"
            problems.append(Problem(f"{what}, but has {len(word):,}", word, "put long texts into a file"))
            continue
        try:
            override = read_word(parser, word)
        except (HydraException, RecursionError, ValueError) as error:  # ValueError: a number of 5,000 digits
            if _HALF_A_LIST.search(word):
                what = "has nothing where a value of its list should be"
                problems.append(Problem(what, word, "use key=1,2, or choice(1,2)"))
                continue
            near = _nearly(word, request.own_keys) if len(problems) < MAX_HINTS else ""
            problems.append(Problem(f"cannot be read: {_why_unread(word, error)}", word, near or _readable_word(word)))
            continue
        refuse_calls(override.key_or_group, None, word)
        if "${" in word.partition("=")[2]:
            fix = "write the value; a shell replaces $NAME outside of single quotes"
            problems.append(Problem("${...} can stand in files only", word, fix))
            continue
        if override.is_sweep_override() and not sweeps:
            if said := _no_sweep(word, request.own_keys):
                problems.append(Problem("is not one value", word, said))
                continue
            is_open = override.value_type is not None and override.value_type.name == "INTERVAL_SWEEP"
            means = "find the best of them with accel-run search" if is_open else "run them all with accel-run train -m"
            quoting = f", or quote it: '{_quoted(word)}'" if _may_be_quoted(word) else ""
            problems.append(Problem("is a sweep over several values", word, f"{means}{quoting}"))
            continue
        parsed.append(override)
    return parsed, problems


def _no_sweep(word: str, own_keys: tuple[str, ...]) -> str:
    """Return what to say instead of values with commas that are one value, such as gpus=0,1 or betas=0.9,0.95."""
    key, _, value = word.partition("=")
    name = key.lstrip("+")
    if name in own_keys:
        return ""
    if name not in GROUPS and name not in all_keys():
        return meant(name, value, own_keys)
    if re.fullmatch(r"\d{1,3}(,\d{3})+", value) or name == "device":  # 1,000
        said = fix_of_value(name, value) or f"use {accepted(name, value)}"
        return said if "," not in said or name == "device" else ""
    is_list = name in all_keys() and is_accepted(f"{name}=[{value}]")
    return f"use {name}=[{value}]" if is_list else ""


def _why_unread(word: str, error: BaseException) -> str:
    """Return in plain words why a word is none, not in those of a grammar."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    key, has_value, value = word.partition("=")
    if not has_value or not key.strip("+~"):
        return "a setting is written key=value"
    if not re.fullmatch(r"[+~]{0,2}[A-Za-z_][\w./@-]*", key):
        return "a key has letters, digits, _ and dots"
    for opening, closing in ("[]", "{}", "()"):
        if value.count(opening) != value.count(closing):
            more = opening if value.count(opening) > value.count(closing) else closing
            return f"a {more} has no partner"
    for quote in ("'", '"'):
        if value.count(quote) % 2:
            return f"a {quote} has no partner"
    if value.startswith("("):
        return "lists are written with [ and ]"
    if len(value) > 4000 and value.strip("-").isdigit():
        return "the number has too many digits"
    special = sorted(set(value) & set("(){}[]:,;&|<>?!*^`\\\"'#= "))
    return (
        f"the value has {' '.join(special)}, which have a meaning"
        if special
        else "the value is not text, number or list"
    )


_HALF_A_LIST = re.compile(r"=\s*,|,\s*,|,\s*$|=\s*(choice|range|interval|glob)\(\s*\)$")


def _readable_word(word: str) -> str:
    """Return what to say instead of a word that cannot be read."""
    if items := re.fullmatch(r"([\w.]+)=\(([\w.,+-]*)\)", word):  # a tuple of Python
        return f"use {items[1]}=[{items[2]}]"
    key, _, value = word.partition("=")
    if key in all_keys():
        listed = f"{key}=[{value.strip('[](){} ')}]"
        if is_accepted(listed):
            return f"use {listed}"
    if between := re.fullmatch(r"[+]{0,2}([\w.]+)=(\w*log\w*|uniform)\((.*)\)", word):
        kind = "interval" if between[2] == "uniform" else "log"
        return f"accel-run search '{between[1]}={kind}({between[3]})' finds the best between two numbers"
    if _may_be_quoted(word):
        return f"quote it: '{_quoted(word)}'"
    text = value.strip("\"'")
    return f"use {accepted(key, text)}"


def _may_be_quoted(word: str) -> bool:
    """Tell whether the value may be a text: that of a group or of a number may not."""
    key = key_of(word)
    return is_accepted(_quoted(word)) if key in GROUPS or key in all_keys() else True


def _depth(word: str) -> int:
    """Return how deep brackets are nested, those of a quoted text included."""
    depth = deepest = 0
    for char in word:
        depth += (char in "[{(") - (char in ")}]")
        deepest = max(deepest, depth)
    return deepest


def _joined(request: Request, problems: list[Problem]) -> Iterator[str]:
    """Yield words of the form key=value; explain `--lr 0.1`, `lr = 3` and lone words."""

    def proper(key: str, value: str) -> str:
        return proper_word(key, value, request.own_keys) if len(problems) < MAX_HINTS else SHOWN_BY

    rest = list(request.overrides)
    while rest:
        word = rest.pop(0)
        if word.startswith("-"):
            key, has_value, value = word.lstrip("-").partition("=")
            if not has_value and rest and "=" not in rest[0] and not rest[0].startswith("-"):
                value = rest.pop(0)
                while _NUMBER.fullmatch(value.rpartition(",")[2]) and rest and _NUMBER.fullmatch(rest[0]):
                    value += f",{rest.pop(0)}"  # --betas 0.9 0.95
                word = f"{word} {value}"
                value = f"[{value}]" if "," in value else value
            what, fix = "unknown option; settings have the form key=value", proper(key, value)
            if key in ("m", "multirun"):
                what, fix = "unknown option here", "accel-run train -m runs each of several values; search needs no -m"
            problems.append(Problem(what, word, fix))
        elif rest and rest[0] == "=":
            value = rest[1] if len(rest) > 1 else ""
            del rest[:2]
            problems.append(Problem("has spaces around =", f"{word} = {value}".strip(), proper(word, value)))
        elif word.endswith("=") and rest and "=" not in rest[0]:
            value = rest.pop(0)
            problems.append(Problem("has a space after =", f"{word} {value}", proper(word[:-1], value)))
        elif word.endswith(":") and rest and "=" not in rest[0] and not rest[0].startswith("-"):
            value = rest.pop(0)
            problems.append(Problem("has a colon in the place of =", f"{word} {value}", proper(word[:-1], value)))
        elif spaced := re.fullmatch(r"([\w.+]+)(?: +=\s*|= +)(.+)", word):
            problems.append(Problem("has spaces around =", word, proper(spaced[1].lstrip("+"), spaced[2])))
        elif colon := re.fullmatch(r"([\w.]+):([^/].*|$)", word):
            fix = proper(colon[1], colon[2]) if _is_key(colon[1], request.own_keys) else SHOWN_BY
            problems.append(Problem("has a colon in the place of =", word, fix))
        elif "=" not in word and rest and "=" not in rest[0] and _is_key(word, request.own_keys) and word not in GROUPS:
            value = rest.pop(0)
            problems.append(Problem("has a space in the place of =", f"{word} {value}", proper(word, value)))
        elif "=" not in word and not word.startswith("~"):
            what = "is not a setting; settings have the form key=value"
            fix = fix_of_word(readable(word, MAX_SHOWN), options_of_groups()) or proper(word, "")
            problems.append(Problem(what, word if word.strip() else f"{word!r}", fix))
        else:
            yield word


def _is_key(word: str, own_keys: tuple[str, ...]) -> bool:
    return word in own_keys or word in GROUPS or word in all_keys() or bool(fix_of_key(word))


_NUMBER = re.compile(r"[+-]?\d+\.?\d*(?:e[+-]?\d+)?")


def _nearly(word: str, own_keys: tuple[str, ...]) -> str:
    """Return "did you mean X?" where it is the key that cannot be read, such as a.,b for a.b."""
    key = word.partition("=")[0]
    if re.fullmatch(r"[+]{0,2}[\w.]*\w", key) and ".." not in key:
        return ""
    near = nearest(re.sub(r"\W+", ".", key).strip("."), [*GROUPS, *own_keys, *plain_keys()], cutoff=0.8)
    return f"did you mean {near}?" if near else ""


def _quoted(word: str) -> str:
    key, _, value = word.partition("=")
    return f'{readable(key, MAX_SHOWN)}="{readable(value, MAX_SHOWN)}"'


def split(
    parsed: list[Override], request: Request, problems: list[Problem]
) -> tuple[dict[str, str], list[tuple[str, Any, str]]]:
    """Divide overrides into group -> option and (key, value, word), dropping those that cannot be."""
    groups: dict[str, str] = {}
    values = []
    for override in parsed:
        key, word = override.key_or_group, override.input_line or ""
        if override.is_delete():
            problems.append(Problem("nothing is deleted here", word, instead_of_deleting(plain_key_of(word))))
        elif key == "hydra" or key.startswith(("hydra.", "hydra/")):
            problems.append(Problem("Hydra only composes here; it starts and writes nothing", word, "leave it out"))
        elif override.package is not None:
            fix = f"use {key}={readable(text_of_value(override.value()), MAX_SHOWN)}"
            problems.append(Problem("packages (@) have no meaning here", word, fix))
        elif key in GROUPS:
            known = options_of(key, request.config_dir, request.task_file)
            option = option_name(key, override.value(), known)
            if key in groups:
                problems.append(Problem(f"{key} is given twice, {groups[key]} and {option}", word, "give one of them"))
            elif key == "task" and request.task_file:
                problems.append(Problem("the task is given twice, here and by --task", word, "give one of them"))
            elif option not in known:
                near = fix_of_option(key, option) or did_you_mean(option, known)
                if key == "task" and option.endswith(".py"):
                    near = f"use --task {readable(option, MAX_SHOWN)}"
                listed = "one of " + ", ".join(known)
                problems.append(Problem(f"unknown {key}; must be {listed}", word, near))
            else:
                groups[key] = option
        else:
            values.append((key, override.value(), word))
    return groups, values
