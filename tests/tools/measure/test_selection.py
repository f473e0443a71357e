"""The best variant is selected from the measured ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from runner.tools.measure.compare import CompareLimits
from runner.tools.measure.selection import select


def test_unstarted_variants_are_not_candidates() -> None:
    """The process of such a variant has not reported settings."""
    unstarted = SimpleNamespace(name="other", blocks={}, opened={})
    trials: Any = SimpleNamespace(variants=[SimpleNamespace(name="base"), unstarted])

    def may_win(each: Any) -> bool:
        return bool(each.opened["values"])

    result = select(lambda *_: trials, [SimpleNamespace()] * 3, CompareLimits(), may_win=may_win)  # type: ignore[list-item]
    assert result.leader == ""
