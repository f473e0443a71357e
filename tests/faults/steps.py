"""Count the Python lines or calls that a function executes: a cost that does not depend on the machine or its load."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


class TooManySteps(Exception):
    """More steps than allowed."""


def steps(act: Callable[[], object], at_most: float = float("inf")) -> int:
    """Return the number of Python lines that `act` executes; raise TooManySteps as soon as there are too many."""
    return _count("line", act, at_most)


def calls(act: Callable[[], object], at_most: float = float("inf")) -> int:
    """Return the number of Python functions that `act` calls, which is cheaper to count; raise TooManySteps."""
    return _count("call", act, at_most)


def _count(kind: str, act: Callable[[], object], at_most: float) -> int:
    count = 0

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == kind
        if count > at_most:
            raise TooManySteps
        return trace if kind == "line" else None  # None: do not trace lines of this call

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(before)
    return count
