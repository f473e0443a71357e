"""`accel-run search`: settings that are best by a metric, each tried by a training of its own."""

from __future__ import annotations

import math

from runner.base.errors import ConfigError, Problem
from runner.commands.arguments import SETTINGS_HELP, budget, own_words, read
from runner.commands.sweep_words import BOTH, TOGETHER_HELP, wish_of

HELP = f"""usage: accel-run search 'KEY=RANGE' ... [trials=20] [metric=val/loss] [goal=min] [budget_s=S] [key=value ...]

Searches the settings that are best by a metric: trains with some, and lets Optuna (TPE) say what to try next. Each
trial is a run of its own in outputs/<run name>. A trial that fails, or whose metric is not finite, counts as failed.
The same command with the same run=NAME goes on, after Ctrl-C (exit 75), a crash or a kill, and with a larger trials=.

ranges, in quotes, for brackets mean something to a shell
  'KEY=log(1e-4,1e-2)'         a number between them, on a log scale; also tag(log,interval(1e-4,1e-2))
  'KEY=interval(0,0.5)'        a number between them; whole where the key is
  'KEY=range(16,129,16)'       one of 16, 32, ..., 128
  'KEY=a,b', 'KEY=choice(a,b)', 'GROUP=glob(adam*)'    one of them

  trials=20                    of the whole search
{TOGETHER_HELP}
  budget_s=S                   after so many seconds no other trial is begun

{SETTINGS_HELP}
needs Optuna: pip install "accel-run[search]"

examples
  accel-run search 'optimizer.lr=log(1e-4,1e-2)' run=lr
  accel-run search --task ./my_task.py 'optimizer.lr=log(1e-4,1e-1)' 'task.hidden=range(32,257,32)' trials=40 run=first
  accel-run report lr
"""
OWN = {"trials": "20", "budget_s": "", **BOTH}


def run(words: list[str]) -> int:
    """Search; return 0 where a trial has a value, or 75 when it was saved and stopped."""
    own, rest, _ = own_words(words, OWN)
    wish, trials, given = wish_of(own), own["trials"], own["budget_s"]
    if not trials.isdecimal() or not int(trials):
        what = "must be a whole number of at least 1: how many trials there will be"
        raise ConfigError(Problem(what, f"trials={trials}", f"use trials={OWN['trials']}"))
    from runner.launch.search import search

    request = read(rest, own=OWN).request
    return search(request, wish, num_trials=int(trials), budget_s=budget(given, "3600") if given else math.inf)
