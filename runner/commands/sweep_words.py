"""The words of a sweep and of a search that are no settings: how many trials at once, and which is the best."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from runner.base.errors import ConfigError, Problem
from runner.commands.arguments import own_words

if TYPE_CHECKING:
    from runner.launch.sweep import Wish

# key -> its value where nobody says another
BOTH = {"together": "1", "metric": "", "goal": ""}
GRID = {**BOTH, "retry": "false"}
TOGETHER_HELP = """\
  together=1|N|auto            trials at once; auto: as many as the device's memory holds, by prediction
  metric=NAME, goal=min|max    by what trials are compared, at their last evaluation (default: early_stopping's)"""


def wish_of(words: Sequence[str], usual: Mapping[str, str]) -> tuple[Wish, list[str]]:
    """Return what was said of the sweep, and the other words. Raises ConfigError with every slip."""
    from runner.launch.sweep import Wish

    own, rest, _ = own_words(words, usual)
    problems = []
    together, goal, retry = own["together"], _GOALS.get(own["goal"], own["goal"]), own.get("retry", "false")
    if together != "auto" and not (together.isdecimal() and int(together)):
        what = "must be a whole number of at least 1, or auto"
        problems.append(Problem(what, f"together={together}", "say together=2, or together=auto"))
    if goal not in ("", "min", "max"):
        problems.append(Problem("must be min or max", f"goal={goal}", "say goal=min where less is better"))
    if retry not in ("true", "false"):
        problems.append(Problem("must be true or false", f"retry={retry}", "say retry=true"))
    if problems:
        raise ConfigError(problems)
    wish = Wish(
        own["metric"] or None,
        "max" if goal == "max" else "min" if goal else None,
        "auto" if together == "auto" else int(together),
        retry == "true",
    )
    return wish, rest


def value_of(words: Sequence[str], key: str, usual: str) -> str:
    """Return the value of one of the command's own keys."""
    return next((value for name, _, value in (word.partition("=") for word in reversed(words)) if name == key), usual)


_GOALS = {"minimize": "min", "minimise": "min", "maximize": "max", "maximise": "max"}  # as other programs call it
