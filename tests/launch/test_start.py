"""Ranks that somebody else has started must agree before they begin."""

from __future__ import annotations

import pytest

from runner.base.errors import ConfigError, Exit
from runner.launch.start import _must_agree

SAME = {"accel-run": "0.1.0", "torch": "2.13.0", "task": "gpt"}


def test_ranks_with_the_same_software_agree() -> None:
    _must_agree([SAME, dict(SAME), dict(SAME)])


def test_unequal_software_is_named_by_rank() -> None:
    with pytest.raises(ConfigError) as caught:
        _must_agree([SAME, {**SAME, "torch": "2.11.0"}, {**SAME, "task": "cape"}])
    assert caught.value.exit_code == Exit.CONFIG
    assert [(problem.where, problem.what) for problem in caught.value.problems] == [
        ("torch", "must be the same on every rank, but is 2.13.0 on rank 0 and 2.11.0 on rank 1"),
        ("task", "must be the same on every rank, but is gpt on rank 0 and cape on rank 2"),
    ]
