"""From the words of a command line to an exit code. Loads only what the command needs: `--help` loads nothing."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from runner import __version__
from runner.base.errors import AccelRunError, Exit, Problem, UsageError

# command -> (module in runner.commands, what it does)
COMMANDS = {
    "train": ("train", "train a task; the same command with the same run=NAME resumes"),
    "inference": ("inference", "predict with the newest checkpoint of a run (short: infer)"),
    "infer": ("inference", ""),
    "both": ("both", "train, then predict with what was trained"),
    "plan": ("plan", "show every derived value with its reason, and stop"),
    "explain": ("explain", "tell which file, profile or override set a value"),
    "status": ("status", "show a run: progress, checkpoints, last error"),
    "new": ("new", "write a one-file task of your own"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; user errors are printed without a traceback."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(words)
    except AccelRunError as error:
        print_problems(error)
        return int(error.exit_code)
    except BrokenPipeError:  # the reader of a pipe went away, as in `accel-run plan | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return int(Exit.DONE)
    except KeyboardInterrupt:
        print("accel-run: interrupted before anything was saved", file=sys.stderr)
        return int(Exit.INTERRUPTED)


def print_problems(error: AccelRunError) -> None:
    """Print every problem on stderr, one paragraph each, numbered when there are several."""
    many = len(error.problems) > 1
    lines = [f"accel-run: {len(error.problems)} problems"] if many else []
    for number, problem in enumerate(error.problems, 1):
        lead = f"  {number}. " if many else "accel-run: "
        lines.append(lead + _on_one_screen(problem, " " * len(lead)))
    print("\n".join(lines), file=sys.stderr)


def overview() -> str:
    """Return what `accel-run --help` prints."""
    rows = "\n".join(f"  {name:<11}{summary}" for name, (_, summary) in COMMANDS.items() if summary)
    return f"""accel-run {__version__}: train PyTorch models as fast as the machine at hand allows, with the same numbers anywhere.

usage: accel-run COMMAND [key=value ...]

commands
{rows}

examples
  accel-run train                              the default task, on real text, on any machine
  accel-run train +hardware=t4 updates=1000    options that suit a T4
  accel-run plan precision=bf16                what would be done, and why
  accel-run train --task ./my_task.py          a task of your own, made by: accel-run new my_task.py

accel-run COMMAND --help tells more. Exit codes: 0 done, 75 saved and stopped (run it again), 78 wrong configuration.
"""


def _dispatch(words: list[str]) -> int:
    if not words:
        sys.stderr.write(overview())
        return int(Exit.USAGE)
    first = words[0]
    if first in ("--help", "-h", "help"):
        sys.stdout.write(overview())
        return int(Exit.DONE)
    if first in ("--version", "-V"):
        print(f"accel-run {__version__}")
        return int(Exit.DONE)
    if first not in COMMANDS:
        raise _unknown(first)
    module = import_module(f"runner.commands.{COMMANDS[first][0]}")
    if any(word in ("--help", "-h") for word in words[1:]):
        sys.stdout.write(module.HELP)
        return int(Exit.DONE)
    run: Callable[[list[str]], int] = module.run
    return run(words[1:])


def _unknown(word: str) -> AccelRunError:
    import difflib

    close = difflib.get_close_matches(word, COMMANDS, n=1, cutoff=0.5)
    if close:
        fix = f"did you mean accel-run {close[0]}?"
    elif "=" in word:
        fix = f"a command comes first: accel-run train {word}"
    else:
        fix = f"commands: {', '.join(name for name, (_, summary) in COMMANDS.items() if summary)}"
    error = UsageError("unknown command", where=word, fix=fix)
    error.exit_code = Exit.CONFIG
    return error


def _on_one_screen(problem: Problem, indent: str) -> str:
    where = f"{problem.where}: " if problem.where else ""
    return f"{where}{problem.what}" + (f"\n{indent}{problem.fix}" if problem.fix else "")
