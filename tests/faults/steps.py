"""Count the lines or calls of Python that something runs: what it costs, on any machine and beside any load."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


class TooManySteps(Exception):
    """Raised inside of what takes more steps than it may."""


def steps(act: Callable[[], object], at_most: float = float("inf")) -> int:
    """Return how many lines of Python `act` runs; raises TooManySteps as soon as they are too many."""
    return _counted("line", act, at_most)


def calls(act: Callable[[], object], at_most: float = float("inf")) -> int:
    """Return how many functions of Python `act` calls, which is cheaper to count; raises TooManySteps."""
    return _counted("call", act, at_most)


def _counted(kind: str, act: Callable[[], object], at_most: float) -> int:
    count = 0

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == kind
        if count > at_most:
            raise TooManySteps
        return trace if kind == "line" else None  # None: no more of this call

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(before)
    return count
