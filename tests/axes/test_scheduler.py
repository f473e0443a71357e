"""Schedules equal those of torch, are stateless except for plateau, and never reach a learning rate of 0."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import lr_scheduler

from runner.axes.scheduler import (
    SCHEDULERS,
    Schedule,
    build_schedule,
    constant,
    cosine,
    inverse_sqrt,
    linear,
    multistep,
    one_cycle,
    plateau,
    polynomial,
    step,
    warm_restarts,
    wsd,
)
from runner.base.errors import ConfigError, IncompatibleResume, TaskFault
from tests.rounding import allowed

UPDATES = 60
ROUNDED = allowed(torch.float64, UPDATES)  # torch computes some rates from those of the previous update


def curve_of(schedule: Schedule, updates: int = UPDATES) -> list[float]:
    return [schedule.factor(update) for update in range(updates)]


def torch_curve(name: str, updates: int = UPDATES, **options: Any) -> list[float]:
    """Return the learning rates of a torch scheduler for `updates` updates, with a peak of 1."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = getattr(lr_scheduler, name)(optimizer, **options)
    rates = []
    for _ in range(updates):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (
            polynomial(UPDATES, warmup=0, power=3.0),
            torch_curve("PolynomialLR", total_iters=UPDATES, power=3.0),
        ),
        (
            wsd(UPDATES, warmup=0, decay=1.0 / 3.0),
            [1.0] * (UPDATES - 20) + torch_curve("LinearLR", 20, start_factor=1.0, end_factor=0.0, total_iters=20),
        ),
        (
            inverse_sqrt(UPDATES, warmup=10),
            torch_curve("LambdaLR", lr_lambda=lambda update: min((update + 1) / 10, (10 / (update + 1)) ** 0.5)),
        ),
        (constant(UPDATES), torch_curve("ConstantLR", factor=1.0)),
        (
            constant(UPDATES, warmup=7),
            torch_curve("LinearLR", start_factor=1 / 7, end_factor=1.0, total_iters=6),
        ),
        (
            linear(UPDATES, warmup=0, final_factor=0.2),
            torch_curve("LinearLR", start_factor=1.0, end_factor=0.2, total_iters=UPDATES),
        ),
        (
            cosine(UPDATES, warmup=0, final_factor=0.1),
            torch_curve("CosineAnnealingLR", T_max=UPDATES, eta_min=0.1),
        ),
        (step(UPDATES, every=13, gamma=0.3), torch_curve("StepLR", step_size=13, gamma=0.3)),
        (
            multistep(UPDATES, milestones=[40, 9, 0.25], gamma=0.5),
            torch_curve("MultiStepLR", milestones=[9, 15, 40], gamma=0.5),
        ),
        (
            warm_restarts(UPDATES, period=8, growth=2, final_factor=0.05),
            torch_curve("CosineAnnealingWarmRestarts", T_0=8, T_mult=2, eta_min=0.05),
        ),
        (
            warm_restarts(UPDATES, period=8, growth=1),
            torch_curve("CosineAnnealingWarmRestarts", T_0=8, T_mult=1),
        ),
    ],
)
def test_a_schedule_equals_the_torch_scheduler(ours: Schedule, theirs: list[float]) -> None:
    assert curve_of(ours, len(theirs)) == pytest.approx(theirs, rel=ROUNDED, abs=ROUNDED)


@pytest.mark.parametrize("anneal", ["cos", "linear"])
def test_one_cycle_equals_the_torch_scheduler(anneal: Any) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = lr_scheduler.OneCycleLR(
        optimizer, max_lr=1.0, total_steps=UPDATES, pct_start=0.3, anneal_strategy=anneal, cycle_momentum=False
    )
    rates = []
    for update in range(UPDATES):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if update < UPDATES - 1:  # torch raises an error for one more step
            scheduler.step()
    assert curve_of(one_cycle(UPDATES, warmup=0.3, anneal=anneal)) == pytest.approx(rates, rel=ROUNDED, abs=ROUNDED)
    assert max(rates) == 1.0


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("cooldown", [0, 3])
def test_plateau_equals_torch_for_positive_metrics(mode: Any, cooldown: int) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = lr_scheduler.ReduceLROnPlateau(
        optimizer, mode=mode, factor=0.5, patience=2, threshold=0.01, cooldown=cooldown, min_lr=0.1
    )
    ours = plateau(100, mode=mode, gamma=0.5, patience=2, threshold=0.01, cooldown=cooldown, floor=0.1)
    metrics = torch.rand(80, generator=torch.Generator().manual_seed(1)).add(0.5).tolist() + [float("nan")] * 3
    levels = set()
    for update, metric in enumerate(metrics):
        theirs.step(metric)
        ours.observe(metric, update)
        assert ours.factor(update) == pytest.approx(optimizer.param_groups[0]["lr"])
        levels.add(ours.factor(update))
    assert min(levels) == 0.1
    assert len(levels) > 3


def test_a_slightly_worse_negative_metric_is_no_improvement() -> None:
    schedule = plateau(100, patience=0, threshold=0.1)
    for update, metric in enumerate([-1.0, -0.95]):
        schedule.observe(metric, update)
    assert schedule.factor(2) == pytest.approx(0.1)


def test_plateau_ignores_metrics_during_warmup() -> None:
    schedule = plateau(100, warmup=5, patience=0)
    for update in range(5):
        schedule.observe(1.0 + update, update)
    assert curve_of(schedule, 6) == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])


def test_plateau_continues_from_its_saved_state() -> None:
    """The state may be saved after an improvement, after bad metrics, or during the cooldown."""
    metrics = [3.0, 2.0, 2.0, 2.0, 2.0, 1.0, 1.5, 1.5, 1.5, 1.5, 0.5, 0.9, 0.9, 0.9]

    def fresh() -> Schedule:
        return plateau(99, patience=1, cooldown=2)

    def factors(schedule: Schedule, first: int, last: int) -> list[float]:
        result = []
        for update in range(first, last):
            schedule.observe(metrics[update], update)
            result.append(schedule.factor(update))
        return result

    expected = factors(fresh(), 0, len(metrics))
    assert len(set(expected)) >= 3
    for stop in range(len(metrics)):
        uninterrupted, resumed = fresh(), fresh()
        before = factors(uninterrupted, 0, stop)
        resumed.load(json.loads(json.dumps(uninterrupted.state())))
        assert resumed.state() == uninterrupted.state()
        assert before + factors(resumed, stop, len(metrics)) == expected


@pytest.mark.parametrize(
    ("saved", "factor"),
    [
        ({}, 0.25),  # saved by an earlier version, in which the state did not name the metric
        ({"metric": "val/error", "mode": "min"}, 0.25),
        ({"metric": "val/loss", "mode": "min"}, 0.5),
        ({"metric": "val/error", "mode": "max"}, 0.5),
    ],
)
def test_plateau_does_not_compare_different_metrics(saved: dict[str, str], factor: float) -> None:
    """`plateau` restores its level, but not the best value of another metric."""
    schedule = plateau(9, metric="val/error", patience=0, gamma=0.5)
    schedule.load({"level": 0.5, "best": 0.1, "num_bad": 0, "rest": 0, **saved})
    schedule.observe(2.0, 1)
    assert schedule.factor(1) == factor


def test_the_state_of_another_schedule_is_rejected() -> None:
    with pytest.raises(IncompatibleResume, match=r"best, level, metric, mode, num_bad, rest, .* nothing"):
        plateau(10).load({})
    with pytest.raises(IncompatibleResume):
        cosine(10).load(plateau(10).state())
    cosine(10).load(step(10).state())


@pytest.mark.slow
@pytest.mark.parametrize("option", SCHEDULERS)
@given(updates=st.integers(1, 400), warmup=st.one_of(st.integers(0, 400), st.floats(0, 0.999)))
def test_factors_are_always_above_0_and_at_most_1(option: str, updates: int, warmup: float) -> None:
    if warmup > updates:
        with pytest.raises(ConfigError, match="at most the number of updates"):
            SCHEDULERS[option](updates, warmup=warmup)
        return
    factors = curve_of(SCHEDULERS[option](updates, warmup=warmup), updates)
    assert min(factors) > 0.0
    assert max(factors) <= 1.0


@pytest.mark.parametrize("option", ["constant", "linear", "cosine", "plateau", "warm_restarts"])
def test_warmup_is_linear_up_to_the_peak(option: str) -> None:
    factors = curve_of(SCHEDULERS[option](100, warmup=10))
    assert factors[:10] == pytest.approx([(update + 1) / 10 for update in range(10)])
    assert factors[10] == 1.0
    assert curve_of(SCHEDULERS[option](100, warmup=0.1)) == factors


def test_a_schedule_depends_only_on_the_update_number() -> None:
    for function in SCHEDULERS.values():
        schedule = function(UPDATES, warmup=0.1)
        forward = curve_of(schedule)
        assert [schedule.factor(update) for update in reversed(range(UPDATES))] == forward[::-1]


@pytest.mark.parametrize("option", SCHEDULERS)
def test_a_run_longer_than_its_schedule_keeps_a_valid_factor(option: str) -> None:
    schedule = SCHEDULERS[option](UPDATES)
    assert all(0.0 <= schedule.factor(update) <= 1.0 for update in range(UPDATES, 3 * UPDATES))


def test_an_empty_interval_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"scheduler.every: must be above 0"):
        step(10, every=0.0)
    with pytest.raises(ConfigError, match=r"scheduler.milestones"):
        multistep(10, milestones=[0.5, 0])


@pytest.mark.parametrize("shape", ["linear", "cosine", "sqrt"])
def test_the_stable_part_does_not_depend_on_the_length(shape: Any) -> None:
    """The decay begins at the peak."""
    short, long = (curve_of(wsd(updates, warmup=6, decay=20, shape=shape), updates) for updates in (60, 90))
    assert short[:40] == long[:40]
    assert short[6:41] == [1.0] * 35
    assert short[41:] == sorted(short[41:], reverse=True)
    assert long[-20:] == pytest.approx(short[-20:], abs=0)


@pytest.mark.parametrize(("warmup", "peak"), [(0, 1), (1, 1), (4, 4)])
def test_the_inverse_root_decays_from_the_peak(warmup: int, peak: int) -> None:
    factor = inverse_sqrt(100, warmup=warmup).factor
    assert factor(peak - 1) == 1.0
    assert factor(4 * peak - 1) == 0.5
    assert factor(16 * peak - 1) == 0.25


CURVES = {
    "lambda update: None": "TypeError",
    "lambda optimizer, update: 1.0": "TypeError",
    "torch.optim.lr_scheduler.StepLR": "TypeError",
    "lambda update: 1 / (4 - update)": "update 4",
    "lambda update: float('nan')": "nan",
    "lambda update: 0.5 - update": "-0.5",
    "lambda update, calls=[0]: calls.append(0) or 1 / len(calls)": "depend only on the update",
    "0.5": "float",
}


@pytest.mark.parametrize(("text", "what"), CURVES.items())
def test_an_invalid_custom_schedule_is_rejected_before_training(text: str, what: str, tmp_path: Path) -> None:
    lines = f"import torch\n\ndef mine(updates):\n    return {text}\n\nSCHEDULERS = {{'mine': mine}}\n"
    file = tmp_path / f"{tmp_path.name}.py"
    file.write_text(lines)
    with pytest.raises(TaskFault, match=what):
        build_schedule(f"{file}:SCHEDULERS:mine", 20, {})
