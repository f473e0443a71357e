"""What a phase does between its updates."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.engine.hooks.evaluation import Evaluation
from tests.engine.test_saving_of_runs import opened


@pytest.mark.parametrize(("updates", "every"), [(1, 1), (9, 1), (10, 1), (25, 2), (400, 40)])
def test_auto_evaluates_about_ten_times_and_never_more_than_once_an_update(
    updates: int, every: int, tmp_path: Path
) -> None:
    with opened(tmp_path, f"updates={updates}", "evaluate.every=auto") as phase:
        assert phase.hook(Evaluation).every == every
