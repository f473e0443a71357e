"""Options of sweeps and searches: concurrent trials, metric and goal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from runner.base.errors import ConfigError, Problem

if TYPE_CHECKING:
    from runner.sweeps.sweep import SweepRequest

# key -> default value
BOTH = {"together": "1", "metric": "", "goal": ""}
GRID = {**BOTH, "retry": "false"}
TOGETHER_HELP = """\
  together=1                   number of concurrent trials
  metric=NAME, goal=min|max    how trials are compared, at their last evaluation (default: as for early_stopping)"""


def wish_of(own: Mapping[str, str]) -> SweepRequest:
    """Return the options of the sweep. Raises ConfigError listing all invalid values."""
    from runner.sweeps.sweep import SweepRequest

    problems = []
    together, goal, retry = own["together"], _GOALS.get(own["goal"], own["goal"]), own.get("retry", "false")
    if not (together.isdecimal() and int(together)):
        problems.append(Problem("must be an integer of at least 1", f"together={together}", "use together=2"))
    if goal not in ("", "min", "max"):
        problems.append(Problem("must be min or max", f"goal={goal}", "use goal=min if lower is better"))
    if retry not in ("true", "false"):
        problems.append(Problem("must be true or false", f"retry={retry}", "use retry=true"))
    if problems:
        raise ConfigError(problems)
    return SweepRequest(
        own["metric"] or None,
        "max" if goal == "max" else "min" if goal else None,
        int(together),
        retry == "true",
    )


_GOALS = {"minimize": "min", "minimise": "min", "maximize": "max", "maximise": "max"}  # aliases of other tools
