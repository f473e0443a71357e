"""When a phase evaluates, and which hooks receive the metrics."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runner.engine.evaluation.evaluate import EvaluationResult
from runner.engine.hooks import evaluation
from runner.engine.hooks.evaluation import Evaluation, warn_unknown_metric
from runner.engine.hooks.hook import Hook
from runner.engine.update.loop import StepInfo
from tests.opened import opened


class Receiver(Hook):
    """Records the metrics of each evaluation."""

    received: list[EvaluationResult]

    def after_evaluation(self, result: EvaluationResult) -> None:
        self.received.append(result)


class Evaluated:
    """A phase of ten updates whose evaluations return `result`."""

    def __init__(self, phase: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.phase, self.hook, self.monkeypatch = phase, phase.hook(Evaluation), monkeypatch
        self.result: EvaluationResult | None = EvaluationResult({"loss": 0.5})
        self.evaluated: list[int] = []
        self.calls: list[Any] = []
        self.written: list[Any] = []
        self.warned: list[str] = []
        self.receiver = Receiver(phase)
        self.receiver.received = []
        self.hook.held_out, self.hook.samples = object(), [0, 1]
        phase.hooks = (*phase.hooks, self.receiver)
        monkeypatch.setattr(evaluation, "evaluate", self._evaluate)
        monkeypatch.setattr(phase.run.observers, "write", self.written.append)
        monkeypatch.setattr(phase.run.observers.screen, "warn", self.warned.append)

    def _evaluate(self, *args: Any, on_batch: Any, should_stop: Any, on_last_batch: Any) -> EvaluationResult | None:
        assert self.phase.is_evaluating
        self.calls.append(args)
        self.evaluated.append(self.phase.position.update)
        on_batch()
        assert should_stop() == (self.phase.run.stop.requested is not None)
        on_last_batch()
        return self.result

    def set_every(self, number: Any, *, has_interim: bool = True) -> None:
        """Set `evaluate.every`."""
        self.hook.__dict__.pop("every", None)
        self.monkeypatch.setattr(type(self.phase.work), "has_interim_evaluation", has_interim)
        object.__setattr__(self.phase.planned.evaluate, "every", number)

    def run(self, *, start: int = 0, stop: int = 10) -> list[int]:
        """Return the updates after which a process evaluates."""
        self.evaluated.clear()
        self.phase.position.update = start
        self.hook.begin()
        for update in range(start + 1, stop + 1):
            self.phase.position.update = update
            self.hook.after_update(StepInfo(update, None, 1, None, None, ()))
        self.hook.end()
        return list(self.evaluated)


@pytest.fixture
def phase(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Evaluated]:
    with opened(tmp_path, "updates=10", "checkpoint=off") as one:
        yield Evaluated(one, monkeypatch)


@pytest.mark.parametrize(
    ("every", "has_interim", "expected"),
    [
        (4, True, [4, 8, 10]),
        (5, True, [5, 10]),  # only once at the end
        (0, True, [10]),
        ("4updates", True, [4, 8, 10]),
        ("1epochs", True, [3, 6, 9, 10]),
        ("2 epochs", True, [6, 10]),
        (4, False, [10]),
        ("auto", True, list(range(1, 11))),
    ],
)
def test_evaluations_are_due_at_each_interval_and_at_the_end(
    every: Any, has_interim: bool, expected: list[int], phase: Evaluated
) -> None:
    phase.phase.order = replace(phase.phase.order, num_samples=3, global_batch_size=1, sampler=None)
    phase.set_every(every, has_interim=has_interim)
    assert phase.run() == expected
    assert phase.hook.is_done


@pytest.mark.parametrize(("total", "every"), [(1, 1), (9, 1), (10, 1), (25, 2), (1000, 100)])
def test_auto_evaluates_about_ten_times(
    total: int, every: int, phase: Evaluated, monkeypatch: pytest.MonkeyPatch
) -> None:
    phase.set_every("auto")
    monkeypatch.setattr(phase.phase.work, "total", total, raising=False)
    assert phase.hook.every == every


def test_a_resumed_phase_runs_only_missing_evaluations(phase: Evaluated) -> None:
    phase.set_every(4)
    assert phase.run(stop=5) == [4], "a stopped phase does not evaluate at its end"
    state = phase.hook.state_dict()
    assert state == 4
    for restored, expected in ((4, [8, 10]), (-1, [4, 8, 10])):
        phase.hook.load_state_dict(restored)
        assert phase.run(start=4) == expected
    phase.hook.load_state_dict(10)
    assert phase.run(start=10) == []


def test_a_task_without_validation_data_is_never_evaluated(phase: Evaluated) -> None:
    phase.set_every(1)
    phase.hook.held_out = None
    assert phase.hook.is_done
    assert phase.run() == []


def test_metrics_are_written_and_passed_to_the_other_hooks(phase: Evaluated) -> None:
    phase.set_every(0)
    phase.result = EvaluationResult({"loss": 0.5, "none": math.nan, "bad": math.nan, "inf": math.inf}, ("none",))
    tally = phase.phase.run.tally
    before = tally.num_evaluations
    assert phase.run() == [10]
    ((_, loader, samples, _),) = phase.calls
    assert (loader.fetcher, samples) == (phase.hook.held_out, [0, 1])
    (result,) = phase.receiver.received
    assert list(result.metrics) == ["val/loss", "val/none", "val/bad", "val/inf"]
    assert result.empty == ("val/none",)
    (row,) = [row for row in phase.written if "val/loss" in row]
    assert (row["update"], row["phase"], row["val/loss"], row["val/inf"]) == (10, "train", 0.5, math.inf)
    assert phase.phase.record.metrics["val/loss"] == 0.5
    assert phase.phase.run.progress.metrics is result.metrics
    assert tally.num_evaluations == before + 1
    (warning,) = phase.warned
    assert [name for name in result.metrics if name in warning] == ["val/bad", "val/inf"]
    assert not phase.phase.is_evaluating


def test_a_stopped_evaluation_stops_the_phase_and_is_repeated(phase: Evaluated) -> None:
    phase.set_every(4)
    phase.result = None
    assert phase.run(stop=4) == [4]
    assert phase.phase.must_stop
    assert not phase.hook.is_done
    assert phase.receiver.received == []
    assert not phase.phase.is_evaluating
    assert phase.run(start=4, stop=4) == [4]


def test_an_unknown_metric_is_reported_with_a_similar_one(phase: Evaluated) -> None:
    warn_unknown_metric(phase.phase, "key", "val/los", {"val/loss": 0.0})
    warn_unknown_metric(phase.phase, "key", "zzz", {"val/loss": 0.0})
    similar, other = phase.warned
    assert similar.startswith("key=val/los:")
    assert similar.count("val/loss") == 2
    assert other.startswith("key=zzz:")
    assert other.count("val/loss") == 1
