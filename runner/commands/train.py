"""`accel-run train`: train a task, or sweep over several settings."""

from __future__ import annotations

from dataclasses import replace

from runner.base.errors import ConfigError, Problem
from runner.commands.arguments import SETTINGS_HELP, parse_arguments, parse_command_keys
from runner.commands.sweep_arguments import SWEEP_KEYS, TOGETHER_HELP, parse_sweep_options

HELP = f"""usage: accel-run train [--task FILE] [--config-dir DIR] [-m] [key=value ...]

Trains a task and writes everything to outputs/<run name>. To resume a run that was stopped by Ctrl-C, SIGTERM (exit
75), a crash or a kill, run the same command with the same run=NAME.

{SETTINGS_HELP}
sweep: -m trains every combination of values, each as a separate run in outputs/<run name>
  key=1,2                      two values; also key=choice(1,2), and key=range(1,5) for 1, 2, 3, 4
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
        keys, rest, _ = parse_command_keys(argv, SWEEP_KEYS)
        options = parse_sweep_options(keys)
        from runner.sweeps.sweep import sweep

        request = parse_arguments(rest, multirun=True, command_keys=SWEEP_KEYS).request
        return sweep(replace(request, command=("train", *argv)), options)
    request = replace(parse_arguments(argv).request, command=("train", *argv))
    sweep_overrides = [arg for arg in request.overrides if arg.partition("=")[0] in SWEEP_KEYS]
    if sweep_overrides:
        raise ConfigError(
            Problem("applies only to a sweep over several values", arg, "add -m") for arg in sweep_overrides
        )
    from runner.launch.start import start_training

    return int(start_training(request))
