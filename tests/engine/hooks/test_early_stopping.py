"""Early stopping counts evaluations without improvement, including those before a resume."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from runner.config.settings import EarlyStoppingSettings
from runner.engine.evaluation.evaluate import EvaluationResult
from runner.engine.hooks.early_stopping import EarlyStopping


def make_hook(**settings: Any) -> EarlyStopping:
    phase: Any = SimpleNamespace(planned=SimpleNamespace(early_stopping=EarlyStoppingSettings(**settings)))
    return EarlyStopping(phase)


def stops_at(values: list[float], **settings: Any) -> int | None:
    """Return the number (from 1) of the evaluation that stops the phase, restoring the hook after each evaluation."""

    def hook() -> EarlyStopping:
        return make_hook(**settings)

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
def test_a_phase_stops_when_the_metric_stops_improving(
    values: list[float], settings: dict[str, Any], expected: int | None
) -> None:
    assert stops_at(values, **settings) == expected


@pytest.mark.parametrize("now", [{"metric": "val/accuracy", "best_is": "max"}, {"best_is": "max"}])
def test_a_new_metric_starts_without_the_best_value_of_the_old_one(now: dict[str, Any]) -> None:
    """A loss of 2.5 would be better than any accuracy."""
    before, after = make_hook(patience=2), make_hook(patience=2, **now)
    for value in (2.5, 3.0):
        before.after_evaluation(EvaluationResult({"val/loss": value}, ()))
    after.load_state_dict(before.state_dict())
    for value in (0.5, 0.6, 0.7):
        after.after_evaluation(EvaluationResult({"val/loss": value, "val/accuracy": value}, ()))
        assert not after.ends_phase


def test_a_state_of_an_earlier_version_applies_to_the_current_metric() -> None:
    stopping = make_hook(patience=2)
    stopping.load_state_dict({"best": 1.0, "num_bad": 1})
    stopping.after_evaluation(EvaluationResult({"val/loss": 2.0}, ()))
    assert stopping.ends_phase
