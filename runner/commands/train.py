"""`accel-run train`: train a task, or sweep over several settings."""

from __future__ import annotations

from runner.base.errors import ConfigError, Problem
from runner.commands.arguments import SETTINGS_HELP, own_arguments, read
from runner.commands.sweep_arguments import GRID, TOGETHER_HELP, wish_of

HELP = f"""usage: accel-run train [key=value ...] [-m]

Trains a task and writes everything to outputs/<run name>. To resume a run that was stopped by Ctrl-C, SIGTERM (exit
75), a crash or a kill, run the same command with the same run=NAME.

{SETTINGS_HELP}
  -m                           sweep: train every combination of key=1,2, key=range(1,5) and key=choice(a,b); each is
                               a separate run in outputs/<run name>, beside sweep.json and results.csv; options:
{TOGETHER_HELP}
  retry=true                   retry failed trials when the sweep resumes

examples
  accel-run train
  accel-run train +hardware=t4 updates=1000 run=first
  accel-run train --task ./my_task.py optimizer.lr=0.01
  accel-run train -m optimizer.lr=0.001,0.003 seed=0,1 run=sweep
"""


def run(argv: list[str]) -> int:
    """Train; return 0, or 75 if it was saved and stopped."""
    if {"-m", "--multirun"} & set(argv):
        own, rest, _ = own_arguments(argv, GRID)
        wish = wish_of(own)
        from runner.sweeps.sweep import sweep

        return sweep(read(rest, multirun=True, own=GRID).request, wish)
    request = read(argv).request
    meant = [arg for arg in request.overrides if arg.partition("=")[0] in GRID]
    if meant:
        raise ConfigError(Problem("applies only to a sweep over several values", arg, "add -m") for arg in meant)
    from runner.launch.start import train

    return int(train(request))
