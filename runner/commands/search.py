"""`accel-run search`: search for the settings that give the best metric."""

from __future__ import annotations

import math
from dataclasses import replace

from runner.base.errors import ConfigError, Problem
from runner.commands.arguments import SETTINGS_HELP, parse_arguments, parse_budget, parse_command_keys
from runner.commands.sweep_arguments import TOGETHER_HELP, TRIAL_KEYS, parse_sweep_options

HELP = f"""usage: accel-run search 'KEY=RANGE' ... [trials=20] [metric=val/loss] [goal=min] [budget_s=S] [key=value ...]

Searches for the settings that give the best metric; Optuna (TPE) proposes each trial. A trial is a separate run in
outputs/<run name>. A trial that raises an error, or whose metric is not finite, counts as failed. To resume after
Ctrl-C (exit 75), a crash or a kill, or to add trials, run the same command with the same run=NAME.

ranges; quote them, because shells interpret brackets
  'KEY=log(1e-4,1e-2)'         a number in this range, on a log scale; also tag(log,interval(1e-4,1e-2))
  'KEY=interval(0,0.5)'        a number in this range; an integer if the key is an integer
  'KEY=range(16,129,16)'       one of 16, 32, ..., 128
  'KEY=a,b', 'KEY=choice(a,b)', 'GROUP=glob(adam*)'    one of these

  trials=20                    total number of trials of the search
{TOGETHER_HELP}
  budget_s=S                   start no new trial after this many seconds

{SETTINGS_HELP}
Requires Optuna: pip install "accel-run[search]"

examples
  accel-run search 'optimizer.lr=log(1e-4,1e-2)' run=lr
  accel-run search --task ./my_task.py 'task.hidden=range(32,257,32)' trials=8
  accel-run report lr
"""
COMMAND_KEYS = {"trials": "20", "budget_s": "", **TRIAL_KEYS}


def run(argv: list[str]) -> int:
    """Search; return 0 if a trial has a value, or 75 if the search was saved and stopped."""
    keys, rest, _ = parse_command_keys(argv, COMMAND_KEYS)
    options, trials, budget_s = parse_sweep_options(keys), keys["trials"], keys["budget_s"]
    if not trials.isdecimal() or not int(trials):
        what = "the number of trials must be an integer of at least 1"
        raise ConfigError(Problem(what, f"trials={trials}", f"use trials={COMMAND_KEYS['trials']}"))
    from runner.sweeps.study import search

    request = replace(parse_arguments(rest, command_keys=COMMAND_KEYS).request, command=("search", *argv))
    return search(
        request, options, num_trials=int(trials), budget_s=parse_budget(budget_s, "3600") if budget_s else math.inf
    )
