"""`accel-run train`: train a task, or several settings of it one after another."""

from __future__ import annotations

from runner.base.configuration import Request
from runner.base.errors import ConfigError, Problem
from runner.commands.arguments import SETTINGS_HELP, own_words, read
from runner.commands.sweep_words import GRID, TOGETHER_HELP, wish_of

HELP = f"""usage: accel-run train [key=value ...] [-m]

Trains the task of the configuration and leaves everything in outputs/<run name>. The same command with the same
run=NAME goes on where it stopped: after Ctrl-C, SIGTERM (exit 75), a crash or a kill.

{SETTINGS_HELP}
  -m                           a sweep: every combination of key=1,2, key=range(1,5) and key=choice(a,b), each a run of
                               its own in outputs/<run name>, which gets sweep.json and results.csv; with it
{TOGETHER_HELP}
  retry=true                   try failed trials again when the sweep goes on

examples
  accel-run train
  accel-run train +hardware=t4 updates=1000 run=first
  accel-run train --task ./my_task.py optimizer.lr=0.01
  accel-run train -m optimizer.lr=0.001,0.003 seed=0,1 run=sweep
"""


def run(words: list[str]) -> int:
    """Train; return 0, or 75 when it was saved and stopped."""
    if {"-m", "--multirun"} & set(words):
        own, rest, _ = own_words(words, GRID)
        wish = wish_of(own)
        from runner.launch.sweep import sweep

        return sweep(read(rest, multirun=True, own=GRID).request, wish)
    request = read(words).request
    meant = [word for word in request.overrides if word.partition("=")[0] in GRID]
    if meant:
        raise ConfigError(Problem("is for a sweep over several values", word, "use -m with it") for word in meant)
    return train_and_point(request)


def train_and_point(request: Request) -> int:
    """Train, and say in a line what would make it faster where that is plain; return 0, or 75."""
    from runner.launch.start import train

    code, job = train(request)
    if job is not None and code == 0:
        from runner.measure.hint import hint  # now: a slip is answered without it
        from runner.observe.events import Console

        pointed = hint(job)
        if pointed:
            Console().info(pointed)  # goes on when nobody reads any more
    return int(code)
