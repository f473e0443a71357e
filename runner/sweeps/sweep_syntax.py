"""Parse sweeps and search spaces, which are overrides with several values in Hydra's grammar; report all errors."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any

from runner.base.errors import ConfigError, Problem
from runner.config.config_files import cache_config_files
from runner.config.configuration import Configuration, compose
from runner.config.options import GROUPS, list_options
from runner.config.overrides import parse_overrides
from runner.config.request import Request, merge_overrides
from runner.config.settings import MAIN_KEYS

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override  # noqa: TID251 - a name for what `parse` returns

MAX_TRIALS = 1000  # each trial is composed and checked before the first one starts, and has a folder


@dataclass(frozen=True)
class SearchSpace:
    """The search space of a key: one of `values`, as typed, or a number from low to high.

    step        numbers are low, low + step, ...; 0: continuous
    is_log      log-uniform: values below and above the geometric mean are equally likely
    is_integer  integers only
    """

    key: str
    values: tuple[str, ...] = ()
    low: float = 0.0
    high: float = 0.0
    step: float = 0.0
    is_log: bool = False
    is_integer: bool = False

    @property
    def ends(self) -> tuple[str, ...]:
        """Return the overrides with which the space is validated: each value, or both ends."""
        return self.values or tuple(self.format_override(number) for number in (self.low, self.high))

    @property
    def size(self) -> float:
        """Number of different values; infinite for continuous numbers."""
        step = self.step or float(self.is_integer)
        return len(self.values) or (1 + round((self.high - self.low) / step) if step else math.inf)

    def as_recorded(self, text: str) -> SearchSpace:
        """Return the space with numbers in Python's notation if `text`, written by an earlier version, uses it."""
        pairs = [value.partition("=") for value in self.values]
        plain = replace(self, values=tuple(f"{key}={plain_number(number)}" for key, _, number in pairs))
        return plain if str(plain) == text else self

    def format_override(self, value: float | str) -> str:
        """Return the override with this value; continuous numbers are rounded for readability."""
        text = value if isinstance(value, str) else f"{value:.0f}" if self.is_integer else f"{value:.6g}"
        return f"{self.key}={text}"

    def __str__(self) -> str:
        if self.values:
            return ", ".join(text.partition("=")[2] for text in self.values)
        how = " on a log scale" if self.is_log else f" in steps of {self.step:g}" if self.step else ""
        return f"{self.low:g} to {self.high:g}{how}"


def expand_sweep(request: Request) -> list[Request]:
    """Return one request per combination of the comma lists, ranges, choices and globs among the overrides.

    Raises ConfigError if a list is empty, infinite or too long, or if a key is given twice.
    """
    parsed, problems = parse_overrides(request, sweeps=True)
    problems += _find_misplaced(parsed)
    choices = [_expand(override, request, problems) for override in parsed]
    count = math.prod(map(len, choices))
    if count > MAX_TRIALS and not problems:
        overrides = " ".join(_text(override) for override in parsed if override.is_sweep_override())
        fix = "list fewer, or try some of them: accel-run search with the same arguments"
        problems.append(Problem(f"make {count:,} combinations; a sweep has at most {MAX_TRIALS:,}", overrides, fix))
    if problems:
        raise ConfigError(problems)
    choices = _keep_texts(parsed, choices, replace(request, overrides=()))
    return [replace(request, overrides=overrides) for overrides in product(*choices)]


def parse_search_space(request: Request) -> tuple[Request, tuple[SearchSpace, ...]]:
    """Return the request with the fixed settings, and the search space; `log(a,b)` is short for tag(log,interval(a,b)).

    Raises ConfigError with all problems, including range limits that are invalid for their key.
    """
    overrides = tuple(_LOG_CALL.sub(r"tag(log,interval(\1))", text) for text in request.overrides)
    parsed, problems = parse_overrides(replace(request, overrides=overrides), sweeps=True)
    problems += _find_misplaced(parsed)
    fixed = replace(
        request, overrides=tuple(_text(override) for override in parsed if not override.is_sweep_override())
    )
    axes: list[SearchSpace] = []
    sources: list[Override] = []
    for override in parsed:
        if override.is_sweep_override() and (axis := _parse_axis(override, fixed, problems)):
            axes.append(axis)
            sources.append(override)
    if not axes and not problems:
        fix = "for example: accel-run search 'optimizer.lr=log(1e-4,1e-2)'"
        problems.append(Problem("no key has a range or several values, so there is nothing to search", "search", fix))
    if problems:
        raise ConfigError(problems)
    _check_ends(fixed, axes)
    texts = _keep_texts(sources, [list(axis.ends) for axis in axes], fixed)
    return fixed, tuple(
        replace(axis, values=tuple(values)) if axis.values else axis for axis, values in zip(axes, texts, strict=True)
    )


def compose_all(requests: Sequence[Request]) -> list[Configuration]:
    """Compose the configurations. Raises ConfigError with the problems of all, without duplicates."""
    configurations = []
    problems: dict[tuple[str, str], Problem] = {}  # by key and text: an unknown key is reported once for all its values
    with cache_config_files():
        for request in requests:
            try:
                configurations.append(compose(request))
            except ConfigError as error:
                for problem in error.problems:
                    problems.setdefault((problem.where.partition("=")[0], problem.what), problem)
    if problems:
        raise ConfigError(problems.values())
    return configurations


def _find_misplaced(parsed: Sequence[Override]) -> list[Problem]:
    problems = []
    count = Counter(override.key_or_group for override in parsed)
    for override in parsed:
        key, text = override.key_or_group, _text(override)
        if key == "resume" and not override.is_sweep_override() and override.value() == "fresh":
            fix = "use another run=NAME, or remove the folder of this one"
            problems.append(
                Problem("every trial would restart from scratch whenever the command is repeated", text, fix)
            )
        if not override.is_sweep_override():
            continue
        if key in _SWEEP_KEYS:
            problems.append(Problem("names the sweep, so it must have only one value", key, f"use {key}=NAME"))
        elif count[key] > 1:
            others = [_text(other) for other in parsed if other.key_or_group == key and other is not override]
            problems.append(Problem(f"{key} is given twice, here and by {others[0]}", text, "remove one of them"))
    return problems


def _expand(override: Override, request: Request, problems: list[Problem]) -> list[str]:
    """Expand an override to a list, with one item if it is not a sweep; empty after a problem."""
    if not override.is_sweep_override():
        return [_text(override)]
    key, text = override.get_key_element(), _text(override)
    value: Any = override.value()
    kind, group = _kind(override), override.key_or_group
    if kind == "GLOB_CHOICE_SWEEP" and group in GROUPS:
        options = list_options(group, request.config_dir, request.task_file)
        names = value.filter(options)
        if not names:
            problems.append(Problem(f"must match an option of {group}: {', '.join(options)}", text))
        return [f"{key}={name}" for name in names]
    if kind in ("GLOB_CHOICE_SWEEP", "INTERVAL_SWEEP"):
        between = "; accel-run search finds the best between two numbers" if kind == "INTERVAL_SWEEP" else ""
        problems.append(Problem("must list its values", text, f"list the values, or use range(a,b){between}"))
        return []
    problem = _check_range(value) if kind == "RANGE_SWEEP" else _check_list(value.list)
    if problem:
        problems.append(Problem(problem[0], text, problem[1]))
        return []
    return [f"{key}={text}" for text in override.sweep_string_iterator()]


def plain_number(text: str) -> str:
    """Return a number in Python's notation, 0.001 for 1e-3; other strings are returned unchanged."""
    for number_type in (int, float):
        with suppress(ValueError):
            return str(number_type(text))
    return text


@cache_config_files()
def _keep_texts(parsed: Sequence[Override], choices: Sequence[list[str]], fixed: Request) -> list[list[str]]:
    """Return the choices, with numbers as typed where the setting is a string, as in a run without a sweep.

    choices  the values of each override; numbers are in Python's notation
    fixed    the other settings
    """
    kept = [*choices]
    for index, override in enumerate(parsed):
        typed = _as_typed(override, choices[index])
        changed = next((text for text in typed if text not in choices[index]), None)
        if changed is None:
            continue
        others = [values[0] for number, values in enumerate(choices) if number != index]
        with suppress(ConfigError):  # reported when all combinations are composed
            values = compose(_add_overrides(fixed, [*others, changed])).flat()
            is_text = isinstance(values.get(MAIN_KEYS.get(override.key_or_group, override.key_or_group)), str)
            kept[index] = typed if is_text else kept[index]
    return kept


def _as_typed(override: Override, values: list[str]) -> list[str]:
    """Return the values of a list with its numbers as typed: Hydra parses them, and writes 0.001 for 1e-3."""
    if "CHOICE_SWEEP" not in _kind(override):
        return values
    parts = map(str.strip, re.split(r"[,()]", _text(override).partition("=")[2]))
    pairs = [value.partition("=") for value in values]
    texts = {text for _, _, text in pairs}  # Hydra keeps some as typed, such as 007 next to 7
    typed = {number: part for part in parts if (number := plain_number(part)) != part and part not in texts}
    return [f"{key}={typed.get(text, text)}" for key, _, text in pairs]


def _parse_axis(override: Override, fixed: Request, problems: list[Problem]) -> SearchSpace | None:
    key, text = override.get_key_element(), _text(override)
    value: Any = override.value()
    kind = _kind(override)
    tags = set(value.tags) if kind == "INTERVAL_SWEEP" else set()
    if kind == "INTERVAL_SWEEP":
        low, high, is_log = float(value.start), float(value.end), "log" in tags
        if not (math.isfinite(low) and math.isfinite(high)):
            problems.append(
                Problem("must have finite limits", text, "use interval(LOW,HIGH), for example interval(0,1)")
            )
        elif low >= high:
            problems.append(Problem("must start below its end", text, f"use interval({high:g},{low:g})"))
        elif is_log and low <= 0:
            fix = f"use log({high / 1000:g},{high:g})" if high > 0 else f"use interval({low:g},{high:g})"
            problems.append(Problem("a log scale must start above 0", text, fix))
        else:
            is_integer = isinstance(value.start, int) or not _accepts_fractions(override, low, high, fixed)
            return SearchSpace(key, (), low, high, is_log=is_log, is_integer=is_integer)
        return None
    overrides = tuple(_expand(override, fixed, problems))
    if kind != "RANGE_SWEEP" or len(overrides) < 2:
        return SearchSpace(key, overrides) if overrides else None
    numbers = sorted(float(override.partition("=")[2]) for override in overrides)
    is_integer = all(isinstance(part, int) for part in (value.start, value.step))
    return SearchSpace(key, (), numbers[0], numbers[-1], abs(float(value.step)), is_integer=is_integer)


def _accepts_fractions(override: Override, low: float, high: float, fixed: Request) -> bool:
    """Return whether the key accepts fractions; a key that accepts no numbers is reported later."""
    if not (low.is_integer() and high.is_integer()):
        return True
    try:
        compose(_add_overrides(fixed, [f"{override.get_key_element()}={low + (high - low) * 0.37 + 0.001!r}"]))
    except ConfigError as error:
        return not any("must be an integer" in problem.what for problem in error.problems)
    return True


def _check_ends(fixed: Request, axes: Sequence[SearchSpace]) -> None:
    """Raise ConfigError if a value of the space is invalid while all other keys have their first value."""
    first = [axis.ends[0] for axis in axes]
    tries = [first]
    for number, axis in enumerate(axes):
        tries += [[*first[:number], text, *first[number + 1 :]] for text in axis.ends[1:]]
    compose_all([_add_overrides(fixed, overrides) for overrides in tries])


def _add_overrides(request: Request, overrides: Sequence[str]) -> Request:
    return replace(request, overrides=merge_overrides(request.overrides, overrides))


def _check_range(value: Any) -> tuple[str, str] | None:
    if value.start is None or value.stop is None or not value.step or not math.isfinite(value.stop - value.start):
        return "has no end" + (": its step is 0" if value.step == 0 else ""), "use range(1,5), or range(1,9,2)"
    count = math.ceil((value.stop - value.start) / value.step)
    if count < 1:
        corrected = (
            f"range({value.stop:g},{value.start:g})" if value.start > value.stop else f"range({value.start + 1:g})"
        )
        return "is empty", f"use {corrected}: the second number is excluded"
    if count > MAX_TRIALS:
        return f"has {count:,} values; a sweep has at most {MAX_TRIALS:,}", "use a larger step: range(a,b,step)"
    return None


def _check_list(values: Sequence[Any]) -> tuple[str, str] | None:
    if any(hasattr(value, "tags") for value in values):
        return "has a range among its values", "list all values: key=1,2,3,8"
    texts = list(map(str, values))
    duplicate = next((text for text in texts if texts.count(text) > 1), None)
    return (f"lists {duplicate} twice", "remove one of them") if duplicate is not None else None


def _kind(override: Override) -> str:
    return override.value_type.name if override.value_type is not None else ""


def _text(override: Override) -> str:
    """Return the override as the user wrote it: undo the replacement of log(a,b) in `parse_search_space`."""
    return _TAGGED_LOG.sub(r"log(\1)", override.input_line or "")


_SWEEP_KEYS = ("run", "output_root")
_LOG_CALL = re.compile(r"\blog\(([^()]*)\)")
_TAGGED_LOG = re.compile(r"\btag\(log,interval\(([^()]*)\)\)")
