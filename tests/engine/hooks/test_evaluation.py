"""How often a phase is evaluated."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.config.request import Request
from runner.engine.hooks.evaluation import Evaluation
from runner.engine.opening import open_phase

TASK = Path(__file__).parents[1] / "task_of_averages.py"


@pytest.mark.parametrize(
    ("words", "expected"),
    [("updates=40", 4), ("updates=7", 1), ("updates=1", 1), ("updates=40 evaluate.every=0", 0)],
)
def test_by_default_a_phase_is_evaluated_ten_times_but_at_most_after_each_update(
    words: str, expected: int, tmp_path: Path
) -> None:
    settings = ("device=cpu", "run=mine", "monitor=off", "checkpoint=off", f"output_root={tmp_path}")
    with open_phase(Request((*settings, *words.split()), TASK)) as phase:
        assert phase.hook(Evaluation).every == expected
