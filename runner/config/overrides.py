"""Parse overrides in Hydra's grammar; report those that cannot be used, with a suggestion."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.base.errors import Problem, to_one_line
from runner.config.aliases import suggestion_for_argument
from runner.config.guarded_yaml import MAX_DEPTH, refuse_calls
from runner.config.options import GROUPS, all_keys, canonical_option, list_all_options, list_options
from runner.config.request import Request, format_value
from runner.config.schema import MAX_SHOWN
from runner.config.settings import MAIN_KEYS
from runner.config.suggestions import LIST_KEYS_HINT, MAX_HINTS, suggest_option, suggest_override

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

EMPTY_RUN = Problem("needs a value", "run=", "use run=NAME, or leave it out")

MAX_ARGUMENT_CHARACTERS = 20_000  # maximum characters of an argument
MAX_PARSE_PROBLEMS = 200  # number of problems after which the remaining arguments are not parsed
_SYNTAX = "write lists as KEY=[1,2], and quote text with special characters: 'KEY=\"a (b)\"'"


def parse_overrides(request: Request, *, sweeps: bool = False) -> tuple[list[Override], list[Problem]]:
    """Parse each argument with Hydra's grammar; an invalid one becomes a problem with a suggestion."""
    from runner.config.override_grammar import INVALID, parse_override  # Hydra is slow to import

    parsed: list[Override] = []
    problems: list[Problem] = []
    for argument in _read_assignments(request, problems):
        if len(problems) >= MAX_PARSE_PROBLEMS:
            what = "this and later arguments were not parsed, because too many earlier ones are invalid"
            problems.append(
                Problem(what, argument, "fix the earlier arguments first; put long lists of settings into a file")
            )
            break
        # Rejected here, because the parser would take seconds.
        if len(argument) > MAX_ARGUMENT_CHARACTERS or _nesting_depth(argument) > MAX_DEPTH:
            limits = f"at most {MAX_ARGUMENT_CHARACTERS:,} characters and {MAX_DEPTH} levels of nested brackets"
            what = f"must have {limits}; it has {len(argument):,} characters"
            problems.append(Problem(what, argument, "put it into a file"))
            continue
        try:
            override = parse_override(argument)
        except INVALID:
            problems.append(Problem("must be KEY=VALUE, but cannot be parsed", argument, _SYNTAX))
            continue
        refuse_calls(override.key_or_group, None, argument)
        if "${" in argument.partition("=")[2]:
            fix = "write the value itself; the shell inserts an environment variable for $NAME outside of single quotes"
            problems.append(Problem("${...} is allowed only in files", argument, fix))
            continue
        if override.is_sweep_override() and not sweeps:
            is_interval = override.value_type is not None and override.value_type.name == "INTERVAL_SWEEP"
            advice = (
                "use accel-run search to find the best value"
                if is_interval
                else "use accel-run train -m to train each value"
            )
            problems.append(Problem("is a sweep over several values; to pass a list, write [1,2]", argument, advice))
            continue
        parsed.append(override)
    return parsed, problems


def _nesting_depth(argument: str) -> int:
    """Return the nesting depth of brackets, including those in quoted text."""
    depth = deepest = 0
    for char in argument:
        depth += (char in "[{(") - (char in ")}]")
        deepest = max(deepest, depth)
    return deepest


def _read_assignments(request: Request, problems: list[Problem]) -> Iterator[str]:
    """Yield arguments of the form key=value; report `--lr 0.1`, `lr 0.1` and arguments without value as problems."""

    def suggest(key: str, value: str) -> str:
        if len(problems) >= MAX_HINTS:
            return LIST_KEYS_HINT
        return suggest_override(key, value, request.command_keys)

    pending = list(request.overrides)
    while pending:
        argument = pending.pop(0)
        if argument.startswith("-"):
            key, has_value, value = argument.lstrip("-").partition("=")
            if not has_value and ":" in key:
                key, _, value = key.partition(":")
            elif not has_value and pending and "=" not in pending[0] and not pending[0].startswith("-"):
                value = pending.pop(0)
                argument = f"{argument} {value}"
            what, fix = "unknown option; settings have the form key=value", suggest(key, value)
            if key in ("m", "multirun"):
                what, fix = "unknown option here", "remove it; accel-run train -m trains each of several values"
            if key == "json":
                what, fix = (
                    "unknown option here",
                    "remove it; accel-run runs --json and accel-run evaluate --json print JSON",
                )
            problems.append(Problem(what, argument, fix))
        elif pending and (
            pending[0] == "=" or (argument.endswith(("=", ":")) and not re.search("^[-~]|=", pending[0]))
        ):
            # Reported as one problem: a secret is then recognized by its key and not printed.
            equals_sign = f" {pending.pop(0)}" if pending[0] == "=" else ""
            value = pending.pop(0) if pending else ""
            key = argument.rstrip("=:")
            what = "is not a setting; settings have the form key=value"
            problems.append(Problem(what, f"{argument}{equals_sign} {value}".strip(), suggest(key, value)))
        elif "=" not in argument and not argument.startswith("~"):
            what = "is not a setting; settings have the form key=value"
            fix = _suggest_for_lone(argument)
            key, separator, value = re.sub("[:/]", "=", argument, count=1).partition("=")
            if not fix and separator and (":" in argument or value in list_all_options().get(key, ())):
                fix = suggest(key, value.strip())  # optimizer:adamw, optimizer/adamw
            if not fix and pending and _may_be_value(pending[0]):  # optimizer.lr 0.1
                fix = suggest(argument, pending[0])
                if fix != LIST_KEYS_HINT and _suggest_for_lone(pending[0]).replace("+", "") in ("", fix):
                    argument = f"{argument} {pending.pop(0)}"
                else:
                    fix = ""
            fix = fix or suggest(argument, "")
            problems.append(Problem(what, argument if argument.strip() else f"{argument!r}", fix))
        else:
            yield argument


def _suggest_for_lone(argument: str) -> str:
    return suggestion_for_argument(to_one_line(argument, MAX_SHOWN), list_all_options())


def _may_be_value(argument: str) -> bool:
    """Return whether the argument may be the value of the key before it, rather than a setting or an option."""
    is_key = argument in GROUPS or argument in all_keys() or argument in MAIN_KEYS
    return not is_key and "=" not in argument and not argument.startswith(("-", "~", "+"))


def split_overrides(
    parsed: list[Override], request: Request, problems: list[Problem]
) -> tuple[dict[str, str], list[tuple[str, Any, str]]]:
    """Divide overrides into group -> option and (key, value, argument); invalid ones become problems."""
    groups: dict[str, str] = {}
    values = []
    for override in parsed:
        key, argument = override.key_or_group, override.input_line or ""
        if override.is_delete():
            problems.append(Problem("settings cannot be deleted", argument, "leave it out, or set another value"))
        elif key == "hydra" or key.startswith(("hydra.", "hydra/")):
            problems.append(
                Problem(
                    "Hydra's own settings cannot be changed: it only composes the configuration",
                    argument,
                    "leave it out",
                )
            )
        elif override.package is not None:
            fix = f"use {key}={to_one_line(format_value(override.value()), MAX_SHOWN)}"
            problems.append(Problem("Hydra's packages (@) are not supported", argument, fix))
        elif key in GROUPS:
            available = list_options(key, request.config_dir, request.task_file)
            option = canonical_option(key, override.value(), available)
            if key in groups:
                problems.append(
                    Problem(f"{key} is given twice, {groups[key]} and {option}", argument, "remove one of them")
                )
            elif key == "task" and request.task_file:
                problems.append(Problem("the task is given twice, here and by --task", argument, "remove one of them"))
            elif option not in available:
                suggestion = suggest_option(key, option, available)
                if isinstance(given := override.value(), dict):
                    keys = " ".join(f"{key}.{name}={format_value(item)}" for name, item in given.items())
                    suggestion = f"use {to_one_line(keys, MAX_SHOWN)}"
                if key == "task" and (file := _task_file(option)):
                    suggestion = f"use --task {shlex.quote(to_one_line(file, MAX_SHOWN))}"
                listed = "one of " + ", ".join(available)
                problems.append(Problem(f"unknown {key}; must be {listed}", argument, suggestion))
            else:
                groups[key] = option
        elif key == "run" and override.value() == "":  # as from run=$NAME, where NAME is not set
            problems.append(EMPTY_RUN)
        else:
            values.append((key, override.value(), argument))
    return groups, values


def _task_file(option: str) -> str:
    """Return the task file that task=VALUE means: FILE.py, or NAME.py in this folder for NAME; empty if none."""
    if option.endswith(".py"):
        return option
    return f"./{option}.py" if option.isidentifier() and Path(f"{option}.py").is_file() else ""
