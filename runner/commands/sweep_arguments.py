"""Options of sweeps and searches: concurrent trials, metric and goal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from runner.base.errors import ConfigError, Problem

if TYPE_CHECKING:
    from runner.sweeps.sweep import SweepOptions

# key -> default value
TRIAL_KEYS = {"together": "", "metric": "", "goal": ""}
SWEEP_KEYS = {**TRIAL_KEYS, "retry": "false"}
TOGETHER_HELP = """\
  together=2                   trials that run at the same time (default: 1; with launcher=slurm, all trials of a sweep)
  metric=NAME, goal=min|max    metric of the last evaluation by which trials are compared, and whether lower or higher
                               is better (default: early_stopping.metric and early_stopping.best_is if set,
                               otherwise checkpoint.best and checkpoint.best_is)"""


def parse_sweep_options(keys: Mapping[str, str]) -> SweepOptions:
    """Return the options of the sweep. Raises ConfigError listing all invalid values."""
    from runner.sweeps.sweep import SweepOptions

    problems = []
    together, goal, retry = keys["together"], _GOAL_ALIASES.get(keys["goal"], keys["goal"]), keys.get("retry", "false")
    if together and not (together.isdecimal() and int(together)):
        problems.append(Problem("must be an integer of at least 1", f"together={together}", "use together=2"))
    if goal not in ("", "min", "max"):
        problems.append(Problem("must be min or max", f"goal={goal}", "use goal=min if lower is better"))
    if retry not in ("true", "false"):
        problems.append(Problem("must be true or false", f"retry={retry}", "use retry=true"))
    if problems:
        raise ConfigError(problems)
    return SweepOptions(
        keys["metric"] or None,
        "max" if goal == "max" else "min" if goal else None,
        int(together) if together else None,
        retry == "true",
    )


_GOAL_ALIASES = {"minimize": "min", "minimise": "min", "maximize": "max", "maximise": "max"}  # aliases of other tools
