"""Parse the arguments of a command into flags and overrides."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from runner.base.errors import ConfigError, Problem
from runner.base.secret import sanitize
from runner.base.text import wrap_for_terminal
from runner.commands import COMMANDS
from runner.config.options import GROUPS, all_keys, list_options
from runner.config.overrides import EMPTY_RUN, parse_overrides
from runner.config.request import Request, format_override, unquote
from runner.config.schema import describe_mismatch, did_you_mean, find_nearest, settings_keys

JSON = "--json"


@dataclass(frozen=True)
class Arguments:
    """Parsed arguments of a command: settings, flags, and positional arguments."""

    request: Request
    multirun: bool = False
    positional: tuple[str, ...] = ()


def parse_arguments(
    argv: list[str], *, positional: int = 0, multirun: bool = False, command_keys: Iterable[str] = ()
) -> Arguments:
    """Separate `--task FILE`, `--config-dir DIR`, `-m` and up to `positional` positional arguments from the overrides.

    command_keys  keys and flags of the command that were parsed before, as candidates for suggestions
    Raises ConfigError if a flag lacks its value, or if the first argument is another command.
    """
    if argv and not positional and argv[0] in COMMANDS and argv[0] not in (*GROUPS, *all_keys()):
        example = shlex.join(takewhile(lambda arg: "=" not in arg, argv))
        raise ConfigError(Problem("is a command, not a setting", argv[0], f"use accel-run {example}"))
    pending = list(argv)
    overrides: list[str] = []
    positionals: list[str] = []
    paths: dict[str, Path] = {}
    is_sweep = False
    while pending:
        arg = pending.pop(0)
        flag, has_value, value = arg.partition("=")
        if flag in ("--task", "--config-dir"):
            if not has_value:
                if not pending or _is_setting(pending[0], command_keys) or pending[0].startswith("-"):
                    raise ConfigError(Problem("needs a path", flag, f"use {flag} ./{_EXAMPLES[flag]}"))
                value = pending.pop(0)
            paths[flag] = Path(value).expanduser()
        elif arg in ("-m", "--multirun") and multirun:
            is_sweep = True
        elif (
            arg.startswith("-")
            and not has_value
            and pending
            and "=" not in pending[0]
            and not pending[0].startswith("-")
        ):
            overrides += [arg, pending.pop(0)]  # an option value in the style of other tools, not a run name
        elif (
            len(positionals) < positional
            and not _is_setting(arg, command_keys)
            and not arg.startswith(("-", "~"))
            and (not pending or pending[0] != "=")
        ):
            positionals.append(arg)
        else:
            overrides.append(arg)
    return Arguments(
        Request(
            tuple(overrides), _absolute(paths.get("--task")), _absolute(paths.get("--config-dir")), tuple(command_keys)
        ),
        is_sweep,
        tuple(positionals),
    )


def _is_setting(arg: str, command_keys: Iterable[str]) -> bool:
    """Return whether `arg` has the form key=value; if a file or folder has this name, the key must also exist."""
    key, has_value, _ = arg.partition("=")
    with suppress(OSError, RuntimeError):  # the name is too long, or `~NAME` names an unknown user
        if has_value and Path(arg).expanduser().exists():
            return key.lstrip("+") in (*GROUPS, *all_keys(), *command_keys)
    return bool(has_value)


def parse_run_request(argv: list[str], command_keys: Iterable[str] = ()) -> Request:
    """Return the request of `COMMAND [last|NAME|DIR] [key=value ...]`, with the run as a run= override.

    Raises ConfigError if two runs are given, and for unknown options, before the run is looked up.
    """
    arguments = parse_arguments(argv, positional=1, command_keys=command_keys)
    request = arguments.request
    refuse_unknown_options(request)
    run_overrides = [arg for arg in request.overrides if arg.startswith("run=")]
    if "run=" in run_overrides or "" in arguments.positional:
        raise ConfigError(EMPTY_RUN)
    keys = {*GROUPS, *all_keys(), *command_keys}
    names = [arg for arg in request.overrides if "=" not in arg and not arg.startswith("~")]
    is_run = bool(names) and not names[0].endswith(".py") and not find_nearest(names[0], keys)
    if arguments.positional and is_run:
        what = f"this command takes a single run, but {arguments.positional[0]} is also given"
        raise ConfigError(Problem(what, names[0], "run the command once for each run"))
    if names and (problems := parse_overrides(request)[1]):  # otherwise, they are reported only once the run is found
        raise ConfigError(problems)
    if arguments.positional and run_overrides:
        what = f"this command takes a single run, but {arguments.positional[0]} is also given"
        raise ConfigError(Problem(what, run_overrides[-1], "remove one of them"))
    return replace(
        request, overrides=(*request.overrides, *(format_override("run", arg) for arg in arguments.positional))
    )


def refuse_unknown_options(request: Request) -> None:
    """Raise ConfigError with all invalid arguments if one has the form of an option, such as --jsn."""
    if any(arg.startswith("-") for arg in request.overrides):
        _, problems = parse_overrides(request)
        raise ConfigError(problems)


def parse_command_keys(
    argv: Sequence[str], defaults: Mapping[str, str], flag: str = ""
) -> tuple[dict[str, str], list[str], bool]:
    """Return the values of a command's own keys, the other arguments, and whether the flag was given.

    defaults  key -> default value
    flag      the flag of the command, such as --json; empty if it has none
    Raises ConfigError for a key without a value.
    """
    values, rest, problems = dict(defaults), [], []
    for arg in argv:
        key, has_value, value = arg.partition("=")
        if key in values and has_value:
            values[key] = unquote(value)
        elif key in values:
            problems.append(Problem("needs a value", key, f"use {key}={_EXAMPLES.get(key, defaults[key]) or 'NAME'}"))
        elif not flag or arg != flag:
            rest.append(arg)
    if problems:
        raise ConfigError(problems)
    return values, rest, flag in argv


@dataclass(frozen=True)
class ParsedOptions:
    """The options and flags that a command was given; the values of options have been converted to their types."""

    given: dict[str, Any]
    flags: set[str]


def parse_options(
    argv: Iterable[str], options_type: type, flags: Collection[str], guess: Callable[[str], str] = lambda arg: ""
) -> tuple[ParsedOptions, list[Problem]]:
    """Parse the arguments of a command that takes no training settings; return them and all problems.

    options_type  dataclass of the keys
    guess         returns what an argument that is neither a key nor a flag probably means; "" if unknown
    """
    keys = settings_keys(options_type)
    options, problems = ParsedOptions({}, set()), []
    for arg in argv:
        key, has_value, quoted = arg.partition("=")
        text = unquote(quoted)
        if arg in flags:
            options.flags.add(arg)
        elif key in keys and has_value:
            candidates: list[Any] = [None] if text in ("null", "none", "") else [text]
            for number_type in (int, float):
                with suppress(ValueError):
                    candidates.append(number_type(text))
            value = next(
                (value for value in candidates if describe_mismatch(keys[key].type, value) is None),
                candidates[len(candidates) > 1],
            )
            if wrong := describe_mismatch(keys[key].type, value):
                problems.append(Problem(wrong, arg))
            options.given[key] = value
        else:
            problems.append(_unknown_argument(arg, keys, flags, guess))
    return options, problems


def _unknown_argument(arg: str, keys: Collection[str], flags: Collection[str], guess: Callable[[str], str]) -> Problem:
    key, has_value, value = arg.partition("=")
    if arg.startswith("-"):
        plain = key.lstrip("-").replace("-", "_")
        near = f"use {plain}={value or '...'}" if plain in keys else did_you_mean(arg, flags)
        return Problem("unknown option", arg, near or f"use {', '.join(flags)} or key=value")
    if has_value:
        return Problem("unknown key", arg, did_you_mean(key, keys) or f"use one of {', '.join(keys)}")
    meant = find_nearest(f"--{arg}", flags, cutoff=0.8) or (f"{arg}=..." if arg in keys else guess(arg))
    fix = f"use {meant}" if meant else f"use one of {', '.join(keys)}"
    return Problem("is not a setting; settings have the form key=value", arg, fix)


def pop_checkpoint_choice(argv: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the value of `checkpoint=best|last|N` (None if it is not given) and the other arguments.

    Settings of the group `checkpoint`, such as `checkpoint=off` and `checkpoint.every=10min`, stay arguments.
    Raises ConfigError for a value that is neither such a choice nor an option of the group.
    """
    from runner.durable.checkpoint_choice import BEST, LAST, is_choice

    chosen, rest = None, []
    group_options = [] if any(arg.startswith("--config-dir") for arg in argv) else list_options("checkpoint")
    for arg in argv:
        key, has_value, value = arg.partition("=")
        if key != "checkpoint" or not has_value or (group_options and value in group_options):
            rest.append(arg)
        elif is_choice(value):
            chosen = value
        elif not group_options:
            rest.append(arg)
        else:
            what = f"must be {BEST}, {LAST} or the number of an update, but is {value}"
            fix = (
                did_you_mean(value, [BEST, LAST, *group_options])
                or "run accel-run status to list the checkpoints of the run"
            )
            raise ConfigError(Problem(what, "checkpoint", fix))
    return chosen, rest


def progress_printer(command: str) -> Callable[[str], None]:
    """Return a function that reports the progress of a command on standard error."""

    def print_progress(text: str) -> None:
        print(wrap_for_terminal(sanitize(f"{command}: {text}"), sys.stderr), file=sys.stderr, flush=True)

    return print_progress


def parse_budget(text: str, default: str) -> float:
    """Return `budget_s=` in seconds. Raises ConfigError unless it is a positive number."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ConfigError(Problem("must be a number of seconds above 0", f"budget_s={text}", f"use budget_s={default}"))
    return seconds


def _absolute(path: Path | None) -> Path | None:
    return path.absolute() if path else None


_EXAMPLES = {"--task": "my_task.py", "--config-dir": "conf", "apply": "true", "goal": "min"}

SETTINGS_HELP = """settings: key=value, in any order; accel-run plan lists all of them
  task=NAME, --task FILE       the task to train: a built-in one, or your own file
  +hardware=NAME               hardware profile: auto, cpu, t4, rtx3050ti_4gb, pair_11gb_8gb, a100, h100, h200, ...
  updates=N or epochs=N        length of the training
  global_batch_size=N          samples per update; micro_batch_size=N: samples per forward and backward pass
  optimizer.lr=X, scheduler=NAME, max_grad_norm=X, seed=N
  precision=auto|fp32|tf32|bf16|fp16, compile=off|default|..., device=auto|cpu|cuda:0
  phases=[NAME,...]            run only these phases of the task; phase.NAME.KEY=VALUE changes a setting of one phase
  run=NAME                     name of the run's folder in output_root (outputs); an existing name resumes
  --config-dir DIR             your own configuration files, searched before the built-in ones
"""

CHECKPOINT_HELP = """\
  checkpoint=best|last|N       the checkpoint: the best by checkpoint.best (default if there is one), the last, or the
                               one of update N"""
