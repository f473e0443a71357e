"""Remedies for a run that does not fit: those without cost are always tried, others are traced while time is left."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import pytest

from runner.base.errors import ConfigError, Problem
from runner.forecast import demand as engine_needs
from runner.forecast import remedies
from runner.plan.memory_fit import GIB, MemoryNeeds
from runner.plan.planner import make_plan
from runner.plan.prediction_text import format_prediction
from runner.plan.update_time import DEFAULT_PRODUCT_EFFICIENCY, LIMITED_PRODUCT_EFFICIENCY
from tests.plan.test_memory_fit import HERE, composed, demand, plan

WORDS = ("global_batch_size=64", "micro_batch_size=64", "precision=fp32")
plan_here = partial(make_plan, inventory=HERE)


def find_remedies(
    monkeypatch: pytest.MonkeyPatch, sample_gib: float, seconds: float
) -> tuple[list[Any], list[Any], int]:
    """Return the found remedies, the untried ones and the number of traces if a trace takes `seconds`."""
    asked: list[Any] = []

    def predict_needs(*given: Any) -> MemoryNeeds:
        asked.append(given)
        return MemoryNeeds({"train": demand(1, 64, sample_gib=sample_gib)})

    monkeypatch.setattr(remedies, "predict_needs", predict_needs)
    monkeypatch.setattr(remedies.time, "process_time", lambda: seconds * len(asked))
    needs = MemoryNeeds({"train": demand(1, 16, 64)})
    made = plan(*WORDS, needs=needs)
    assert not made.memory[0].prediction.fits
    return *remedies.find_changes(composed(*WORDS), HERE, made, needs, ()), len(asked)


@pytest.mark.slow
def test_remedies_after_the_time_limit_are_untried(monkeypatch: pytest.MonkeyPatch) -> None:
    result, untried, traces = find_remedies(monkeypatch, 0.1, 2 * remedies.MAX_CPU_S)
    assert {change.overrides[0].partition("=")[0] for change in result} == {"micro_batch_size", "memory"}
    assert (untried, traces) == ([remedies.BUDGET], 1)
    _, untried, traces = find_remedies(monkeypatch, 0.1, 0.0)
    assert (untried, traces) == ([], 2)


def test_insufficient_recomputation_is_not_proposed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    result, untried, traces = find_remedies(monkeypatch, 0.5, 0.0)
    assert [change.overrides[0].partition("=")[0] for change in result] == ["micro_batch_size"]
    assert (untried, traces) == ([], 1)


@pytest.mark.parametrize(("samples", "expected"), [(64, "micro_batch_size=16"), (61, "micro_batch_size=auto")])
def test_every_remedy_is_a_valid_override(monkeypatch: pytest.MonkeyPatch, samples: int, expected: str) -> None:
    """A single process rejects a size that does not divide the batch, unless the plan has chosen it."""
    args = (f"global_batch_size={samples}", f"micro_batch_size={samples}", "precision=fp32")
    held = plan(*args, "micro_batch_size=auto", needs=MemoryNeeds({"train": demand(1, samples)})).batch.micro_batch_size
    needs = MemoryNeeds({"train": demand(1, held, samples)})
    monkeypatch.setattr(remedies, "predict_needs", lambda *_: needs)
    result, _ = remedies.find_changes(composed(*args), HERE, plan(*args, needs=needs), needs, ())
    assert (expected,) in [change.overrides for change in result]
    for change in result:
        again = plan(*args, *change.overrides, needs=needs)
        assert again.memory[0].prediction.fits
        assert again.memory[0].prediction.total == change.bytes


@pytest.mark.parametrize("samples", [64, 61])
def test_the_recommended_micro_batch_size_fits_on_a_cpu(samples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, `auto` does not depend on memory. The batch size, 61, is a prime."""
    needs = MemoryNeeds({"train": demand(*range(1, samples + 1))})
    monkeypatch.setattr(remedies, "predict_needs", lambda *_: needs)
    args = (f"global_batch_size={samples}", "device=cpu", "memory=budget", "memory.limit_gib=10", "memory.recompute=[]")
    made = plan(*args, needs=needs)
    assert not made.memory[0].prediction.fits
    changes, _ = remedies.find_changes(composed(*args), HERE, made, needs, ())
    ((setting,),) = (change.overrides for change in changes)
    assert f"recommended: {setting.removeprefix('micro_batch_size=')} " in " ".join(
        " ".join(format_prediction(made, needs, {}, changes)).split()
    )
    assert plan(*args, setting, needs=needs).memory[0].prediction.fits


def test_interpolated_sizes_are_verified_by_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """The allocator may reserve more than interpolation predicts; here, 9 samples do not fit."""
    wide = dataclasses.replace(demand(9).points[0], reserved=16 * GIB)
    exact = dataclasses.replace(demand(1, 8, 64), points=(*demand(1, 8).points, wide, *demand(64).points))
    monkeypatch.setattr(remedies, "predict_needs", lambda *_: MemoryNeeds({"train": exact}))
    needs = MemoryNeeds({"train": demand(1, 64)})
    result, _ = remedies.find_changes(composed(*WORDS), HERE, plan(*WORDS, needs=needs), needs, ())
    assert ("micro_batch_size=8",) in [change.overrides for change in result]


def test_fitting_micro_batches_are_traced() -> None:
    needs = MemoryNeeds({"train": demand(1, 64)})
    planned, asked_for = plan(*WORDS, needs=needs), composed(*WORDS)
    asked, more = (
        engine_needs.sizes_to_trace(planned, asked_for, plan_here, needs, alternatives=alternatives)
        for alternatives in (False, True)
    )
    assert asked == {("train", 64)}
    fitting = plan(*WORDS, "micro_batch_size=auto", needs=needs).batch.micro_batch_size
    assert more == {("train", 64), ("train", fitting)}


def test_unavailable_remedies_do_not_block_combinations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Smaller micro-batches and checkpointing suffice without 8-bit states, which need bitsandbytes."""
    large = MemoryNeeds({"train": demand(1, 64, model_gib=14.6)})

    def predict_needs(configuration: Any, *_: Any) -> MemoryNeeds:
        choices = configuration.choices
        if choices["optimizer"].function == "adamw8bit":
            raise ConfigError(Problem("bitsandbytes is not installed"))
        is_small = configuration.settings.micro_batch_size == "auto" and choices["memory"].function == "checkpoint"
        return MemoryNeeds({"train": demand(1, 64, model_gib=12.0, sample_gib=0.05)}) if is_small else large

    monkeypatch.setattr(remedies, "predict_needs", predict_needs)
    result, _ = remedies.find_changes(composed(*WORDS), HERE, plan(*WORDS, needs=large), large, ())
    (change,) = result
    assert "memory=checkpoint" in change.overrides
    assert "optimizer=adamw8bit" not in change.overrides


def test_remedies_are_timed_in_their_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """16-bit matrix products are faster by the ratio in the profile and the fractions that a T4 reaches."""
    speeds = {"fp32_tflops": 10.0, "fp16_tensor_tflops": 40.0, "memory_bandwidth_gb_s": 1e9}
    profiles = [{"devices": [{"name": HERE.devices[0].name, **speeds}]}]
    needs, half = (MemoryNeeds({"train": demand(1, 64, sample_gib=gib)}) for gib in (0.3, 0.1))
    monkeypatch.setattr(remedies, "predict_needs", lambda *_: half)
    made = plan(*WORDS, needs=needs)
    result, _ = remedies.find_changes(composed(*WORDS), HERE, made, needs, profiles)
    expected = 10.0 * DEFAULT_PRODUCT_EFFICIENCY / (40.0 * LIMITED_PRODUCT_EFFICIENCY["tesla t4"])
    factors = {change.overrides: change.factor for change in result}
    assert factors[("precision=fp16",)] == pytest.approx(expected, rel=0.05)
    assert [change.factor for change in result] == sorted(change.factor or 0.0 for change in result)


def test_settings_of_the_user_apply_to_tried_remedies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both memory=checkpoint and the option that it replaces have the setting memory.fraction."""
    asked: list[Any] = []
    monkeypatch.setattr(remedies, "predict_needs", lambda *given: asked.append(given[0]) or needs)
    args, needs = (*WORDS, "memory.fraction=0.5", "optimizer.lr=0.01"), MemoryNeeds({"train": demand(1, 64)})
    remedies.find_changes(composed(*args), HERE, plan(*args, needs=needs), needs, ())
    tried = [(each.choices["memory"].options["fraction"], each.choices["optimizer"].options["lr"]) for each in asked]
    assert tried
    assert set(tried) == {(0.5, 0.01)}
    assert "checkpoint" in {each.choices["memory"].function for each in asked}


def test_each_phase_is_traced_at_its_own_size() -> None:
    words = ("task=dynamo", "task.size=full")
    planned = plan(*words, needs=MemoryNeeds({}))
    phases = {phase.name: phase.batch.micro_batch_size for phase in planned.selected if phase.kind == "train"}
    sizes = engine_needs.sizes_to_trace(planned, composed(*words), plan_here, MemoryNeeds({}), alternatives=False)
    assert sizes == set(phases.items())
    assert len(set(phases.values())) > 1, "the phases must differ"
