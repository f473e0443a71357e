"""After the last update of a run on a CPU, passes in bfloat16 are timed: nothing changes, and only a gain is reported.

The clock is virtual: a forward pass advances it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from runner.base.global_rng import random_state
from runner.config.request import Request
from runner.engine.hooks import precision_trial
from runner.engine.hooks.precision_trial import PrecisionTrial
from runner.engine.opening import open_phase

TASK = Path(__file__).with_name("task_with_statistics.py")


class Clock:
    """Forward passes take a second in float32, and `of_bf16` seconds in bfloat16."""

    def __init__(self, of_bf16: float) -> None:
        self.now, self.of_bf16, self.passes = 0.0, of_bf16, list[bool]()
        self.lines: list[str] = []  # that the run has printed

    @property
    def proposals(self) -> list[str]:
        return [line for line in self.lines if line.startswith("precision=bf16")]

    def advance(self, *_: Any) -> None:
        if torch.is_grad_enabled():
            self.passes.append(torch.is_autocast_enabled("cpu"))
            self.now += self.of_bf16 if self.passes[-1] else 1.0


@contextmanager
def opened(folder: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, *args: str) -> Iterator[Any]:
    """Yield the phase of a run of three updates; its hooks read this clock."""
    monkeypatch.setattr(precision_trial, "BUDGET_SHARE", 1e9)
    monkeypatch.setattr(precision_trial, "MAX_BUDGET_S", 1000.0)
    monkeypatch.setattr(PrecisionTrial, "clock", lambda _: clock.now)
    settings = ("updates=3", "global_batch_size=8", "device=cpu", "monitor=off", f"output_root={folder}", *args)
    with open_phase(Request(settings, TASK)) as phase:
        phase.parts.bare.register_forward_pre_hook(clock.advance)
        monkeypatch.setattr(phase.run.observers.screen, "info", clock.lines.append)
        yield phase


@pytest.mark.parametrize(("of_bf16", "is_reported"), [(0.5, True), (0.95, False), (3.0, False)])
def test_a_gain_is_reported_and_nothing_changes(
    of_bf16: float, is_reported: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(of_bf16)
    with opened(tmp_path, clock, monkeypatch) as phase:
        before: list[Any] = []

        def end(hook: PrecisionTrial) -> None:
            before.append(state_of(hook.phase))
            END(hook)

        monkeypatch.setattr(PrecisionTrial, "end", end)
        phase.run_updates()
        after = state_of(phase)
        assert clock.passes.count(True) == precision_trial.ROUNDS + 1, "the trial has run"
        assert all(weight.grad is None for weight in phase.parts.bare.parameters())
    ((tensors, generators),) = before
    assert all(torch.equal(tensors[name], after[0][name]) for name in tensors)
    assert torch.equal(generators, after[1])
    assert len(clock.proposals) == is_reported
    assert all("0.50" in line for line in clock.proposals)


END = PrecisionTrial.end


def state_of(phase: Any) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    tensors, _ = random_state(torch.device("cpu"))
    return {name: value.clone() for name, value in phase.parts.bare.state_dict().items()}, tensors["torch"].clone()


@pytest.mark.parametrize("args", [("precision=fp32",), ("precision=bf16",)], ids=str)
def test_there_is_no_trial_if_the_format_is_set(
    args: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(0.5)
    monkeypatch.setattr(PrecisionTrial, "_measure", lambda _: pytest.fail("measured"))  # lint-tests: private: a spy
    with opened(tmp_path, clock, monkeypatch, *args) as phase:
        hook = phase.hook(PrecisionTrial)
        phase.position.update = phase.total
        hook.end()


def test_a_trial_beyond_the_budget_stops_after_a_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(0.5)
    with opened(tmp_path, clock, monkeypatch) as phase:
        monkeypatch.setattr(precision_trial, "MAX_BUDGET_S", 5.0)  # ten more passes of a second take longer
        phase.run_updates()
    assert True not in clock.passes
    assert not clock.proposals


def test_an_error_of_the_trial_does_not_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(Clock):
        def advance(self, *_: Any) -> None:
            super().advance()
            if torch.is_autocast_enabled("cpu"):
                raise RuntimeError("not implemented for bfloat16")

    clock = Failing(0.5)
    with opened(tmp_path, clock, monkeypatch) as phase:
        assert phase.run_updates() is None
        assert phase.record.finished
    assert not clock.proposals
