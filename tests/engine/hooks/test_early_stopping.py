"""Early stopping counts evaluations without improvement, also across a resumption."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from runner.config.settings import EarlyStoppingSettings
from runner.engine.evaluation.evaluate import EvaluationResult
from runner.engine.hooks.early_stopping import EarlyStopping


def stops_at(values: list[float], **settings: Any) -> int | None:
    """Return the number (from 1) of the evaluation that stops the phase, restoring the hook after each evaluation."""
    planned = EarlyStoppingSettings(**settings)

    def hook() -> EarlyStopping:
        phase: Any = SimpleNamespace(planned=SimpleNamespace(early_stopping=planned))
        return EarlyStopping(phase)

    stopping = hook()
    for number, value in enumerate(values, 1):
        stopping.after_evaluation(EvaluationResult({"val/loss": value, "val/other": math.nan}, ("val/other",)))
        again = hook()
        again.load_state_dict(stopping.state_dict())
        assert again.ends_phase == stopping.ends_phase
        stopping = again
        if stopping.ends_phase:
            return number
    return None


@pytest.mark.parametrize(
    ("values", "settings", "expected"),
    [
        ([3, 2, 1, 1, 1], {"patience": 2}, 5),
        ([3, 2, 1, 1, 0.5, 1, 1], {"patience": 2}, 7),
        ([1, 1, 1, 1], {"patience": None}, None),
        ([1, 2, 3, 3, 3], {"patience": 2, "best_is": "max"}, 5),
        ([3.0, 2.95, 2.9, 2.85], {"patience": 3, "min_delta": 0.2}, 4),
        ([3.0, 2.95, 2.7, 2.65], {"patience": 2, "min_delta": 0.2}, None),
        ([math.nan, math.nan], {"patience": 2}, 2),
        ([2, math.nan, 1, math.nan], {"patience": 2}, None),
        ([5, 5, 5], {"patience": 1, "metric": "val/other"}, None),
    ],
)
def test_when_a_phase_stops(values: list[float], settings: dict[str, Any], expected: int | None) -> None:
    assert stops_at(values, **settings) == expected
