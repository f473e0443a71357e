"""parallelism.stages=auto traces a pipeline with each possible number of stages."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.base.errors import ConfigError
from runner.config.configuration import Configuration, compose
from runner.config.request import Request
from runner.forecast.demand import predict_needs
from runner.forecast.stage_memory import StagePrediction
from runner.plan.inventory import Cpu, Inventory
from runner.plan.memory_fit import GIB, MemoryNeeds
from runner.plan.memory_trace import Traced
from runner.plan.planner import make_plan, planning_inventory, should_trace_memory
from runner.plan.run_plan import PhasePlan

MESSAGE = "an operation without fake tensors"
HERE = Inventory((), Cpu("a CPU", 8, 8, 8 * GIB))
LAYERED = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

from runner import Task


class Layered(Task):
    def __init__(self, layers):
        self.model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(layers)))

    def loss(self, model, batch):
        return model(batch[0]).square().sum(), len(batch[0])

    def dataset(self, split):
        return TensorDataset(torch.randn(64, 128))


def build(*, layers: int = 4):
    return Layered(layers)
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "layered.py"
    path.write_text(LAYERED)
    return path


def configuration(file: Path, *args: str) -> Configuration:
    fixed = ("parallelism=pipeline", "parallelism.world_size=4", "micro_batch_size=2", "global_batch_size=8")
    return compose(Request((*fixed, *args), file))


def on_gpus(file: Path, *args: str) -> tuple[Configuration, Inventory]:
    """Return a configuration and the machine that its hardware profile describes."""
    settings = configuration(file, "+hardware=h100", *args)
    return settings, planning_inventory(settings)[0]


@pytest.mark.parametrize(("error", "expected"), [("NotImplementedError", None), ("ConfigError(())", 0)])
def test_rejected_layers_differ_from_undefined_layers(file: Path, error: str, expected: int | None) -> None:
    layers = f"    def layers(self):\n        raise {error}\n"
    source = "from runner.base.errors import ConfigError\n" + LAYERED.replace(
        "\n\ndef build", f"\n{layers}\n\ndef build"
    )
    file.write_text(source)
    needs = predict_needs(compose(Request(("device=cpu", "global_batch_size=2"), file)), HERE)
    assert needs.demands["train"].model.num_layers == expected


def stages_of(needs: MemoryNeeds) -> int:
    return len(needs.demands["train"].stages)


def test_auto_traces_each_number_of_stages(file: Path) -> None:
    settings, there = on_gpus(file)
    needs = predict_needs(settings, there)
    assert set(needs.by_stages) == {2, 4}
    assert len({traced.demands["train"].read_s for traced in needs.by_stages.values()}) == 1, "measured once"
    for stages, traced in needs.by_stages.items():
        fixed, _ = on_gpus(file, f"parallelism.stages={stages}")
        asked = predict_needs(fixed, there)
        assert not asked.by_stages
        assert (stages_of(traced), traced.layout) == (stages, asked.layout)
        assert make_plan(fixed, there, needs=traced).memory == make_plan(fixed, there, needs=asked).memory
    plan = make_plan(settings, there, needs=needs)
    assert plan.batch.stages == stages_of(needs)
    assert needs.layout == needs.by_stages[plan.batch.stages].layout
    assert all(memory.is_exact for memory in plan.memory)


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (("task.layers=3",), {2}),
        (("global_batch_size=1", "micro_batch_size=1"), {4}),  # one sample cannot be divided among two pipelines
        (("parallelism.split=[1,3]",), set()),
        (("parallelism.world_size=2",), set()),
        pytest.param(("memory=budget",), set(), marks=pytest.mark.slow),
    ],
)
def test_only_possible_numbers_of_stages_are_traced(file: Path, args: tuple[str, ...], expected: set[int]) -> None:
    settings, there = on_gpus(file, *args)
    needs = predict_needs(settings, there)
    assert set(needs.by_stages) == expected
    assert make_plan(settings, there, needs=needs).batch.stages == stages_of(needs)


def test_traced_and_untraced_cpu_plans_have_equal_stages(file: Path) -> None:
    settings = configuration(file, "device=cpu")
    assert not should_trace_memory(settings, HERE)
    needs = predict_needs(settings, HERE, alternatives=True)
    assert make_plan(settings, HERE, needs=needs).batch.stages == make_plan(settings, HERE).batch.stages
    assert stages_of(needs) == make_plan(settings, HERE).batch.stages


@pytest.mark.parametrize(("untraceable", "expected"), [({2}, {4}), ({4}, {2}), ({2, 4}, {4})])
def test_untraceable_numbers_of_stages_are_a_last_resort(
    file: Path, monkeypatch: pytest.MonkeyPatch, untraceable: set[int], expected: set[int]
) -> None:
    trace = StagePrediction.trace

    def fail(prediction: StagePrediction, phase: PhasePlan, size: int) -> list[Traced]:
        if prediction.count in untraceable:
            raise RuntimeError(MESSAGE)
        return trace(prediction, phase, size)

    monkeypatch.setattr(StagePrediction, "trace", fail)
    settings, there = on_gpus(file)
    needs = predict_needs(settings, there)
    plan = make_plan(settings, there, needs=needs)
    assert set(needs.by_stages) == expected == {plan.batch.stages}
    is_known = not untraceable & expected
    assert all(memory.is_exact == is_known for memory in plan.memory)
    assert (MESSAGE in needs.demands["train"].why_not) != is_known


def test_a_model_with_one_layer_cannot_be_pipelined(file: Path) -> None:
    settings, there = on_gpus(file, "task.layers=1")
    with pytest.raises(ConfigError):
        predict_needs(settings, there)
