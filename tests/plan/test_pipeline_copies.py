"""parallelism.stages: several pipelines, each with a copy of the model."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import yaml

from runner.base.errors import ConfigError
from runner.config.configuration import compose
from runner.config.request import Request
from runner.launch.training_ranks import options_for_ranks, ranks_to_keep
from runner.plan.inventory import Cpu, Device, Inventory
from runner.plan.memory_fit import GIB, Demand, MemoryNeeds, RankPart, predict_memory
from runner.plan.memory_trace import ComputeCost
from runner.plan.planner import MICRO_BATCHES_PER_STAGE, make_plan, should_trace_memory
from runner.plan.rank_devices import RankDevice
from runner.plan.run_plan import Plan, rank_part
from runner.plan.update_time import BUBBLE, COMMUNICATION, PRODUCTS, find_rank_rates, predict_training_time
from tests.plan.test_shard_size import on_machines
from tests.plan.test_strategy import model
from tests.plan.test_update_time import DEVICE, known, predict, staged

RANKS = 4


def plan_for(stages: int | str, *args: str, memory: MemoryNeeds | None = None) -> Plan:
    args = ("parallelism=pipeline", f"parallelism.stages={stages}", "global_batch_size=33", "device=cpu", *args)
    inventory = Inventory((), Cpu("a CPU", 8, 8, 8 * GIB))
    return make_plan(compose(Request(args)), inventory, on_machines(RANKS), memory)


def test_each_pipeline_has_an_equal_share() -> None:
    batch = plan_for(2).batch
    assert (batch.shares, batch.stages) == ((17, 16), 2)
    assert [batch.share_of(rank) for rank in range(RANKS)] == [17, 17, 16, 16]
    assert batch.micro_batch_size == -(-17 // (2 * MICRO_BATCHES_PER_STAGE))
    assert (plan_for("all").batch.shares, plan_for("all").batch.stages) == ((33,), RANKS)


@pytest.mark.parametrize(
    ("args", "size"),
    [
        (("parallelism=ddp", "parallelism.shares=[19,13]", "cpu_micro_batch_size=4"), 4),
        (("parallelism=ddp", "global_batch_size=2"), 1),
        (("parallelism=ddp", "global_batch_size=32", "micro_batch_size=64"), 64),
    ],
)
def test_an_evaluation_has_a_valid_micro_batch_size(args: tuple[str, ...], size: int) -> None:
    settings = compose(Request(("global_batch_size=32", "device=cpu", *args)), has_updates=False)
    ranks = [RankDevice("cpu", "a CPU")] * RANKS
    batch = make_plan(settings, Inventory((), Cpu("a CPU", 8, 8, 8 * GIB)), ranks).batch
    assert batch.micro_batch_size == size
    assert len(set(batch.shares)) == 1


def equal_stages(count: int, gib: float) -> MemoryNeeds:
    """Return the memory needs of a model that is traced as `count` equal stages, which send 1 MB per sample."""
    work = ComputeCost(10**12 // count, 10**10 // count, 0, 10**9 // count, received=10**6)
    part = model(gib / count)
    points = tuple(dataclasses.replace(point, work=work.scale(point.micro_batch_size)) for point in part.points)
    sizes = dataclasses.replace(part.model, trained=int(gib * GIB / 4 / count), buckets=(int(gib * GIB / 4 / count),))
    stage = dataclasses.replace(part, points=points, model=sizes, step=ComputeCost(moved_bytes=10**8))
    return MemoryNeeds({"train": Demand.from_stages([stage] * count)})


@pytest.mark.parametrize(
    ("gib", "link_gb_s", "expected"),
    [
        (8.0, 400.0, 2),  # a shorter bubble
        (8.0, 2.0, "all"),  # the all-reduce of two copies takes longer than the bubble
        (8.0, None, 2),  # the time is unknown
        (26.0, 400.0, "all"),  # two stages do not fit
        (26.0, None, "all"),
        (80.0, 400.0, "all"),  # nothing fits
    ],
)
def test_auto_chooses_the_fastest_fitting_number_of_stages(
    tmp_path: Path, gib: float, link_gb_s: float | None, expected: int | str
) -> None:
    device = {
        "name": "a GPU", "memory_gib": 16, "capability": [9, 0], "bf16_tensor_tflops": 1000.0, "fp32_tflops": 100.0,
        "memory_bandwidth_gb_s": 1000.0, "link_gb_s": link_gb_s,
    }  # fmt: skip
    (tmp_path / "hardware").mkdir()
    content = {"hardware": {"title": "a GPU", "devices": [device]}}
    (tmp_path / "hardware" / "own.yaml").write_text("# @package _global_\n" + yaml.safe_dump(content))
    by_stages = {stages: equal_stages(stages, gib) for stages in (2, RANKS)}
    need = dataclasses.replace(by_stages[RANKS], by_stages=by_stages)
    args = ("+hardware=own", "parallelism=pipeline", "global_batch_size=32", "device=cpu")

    def plan(stages: int | str, memory: MemoryNeeds) -> Plan:
        configuration = compose(Request((*args, f"parallelism.stages={stages}"), config_dir=tmp_path))
        return make_plan(configuration, Inventory((), Cpu("a CPU", 8, 8, 8 * GIB)), on_machines(RANKS), memory)

    made, times = plan("auto", need), []
    assert made.choices["parallelism"].options["stages"] == expected
    for stages, traced in by_stages.items():
        explicit = plan(stages, traced)
        if stages == made.batch.stages:
            assert explicit.memory == made.memory, "auto must use the trace with this number of stages"
        if all(memory.prediction.fits for memory in explicit.memory):
            times.append(predict_training_time(explicit, traced, find_rank_rates(explicit, [{"devices": [device]}])))
    if len(times) > 1 and link_gb_s is not None:
        assert all(str(time) in made.reasons["parallelism.stages"] for time in times)


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ((), "all"),  # not traced
        (("parallelism.split=[3,1]",), 2),
        (("parallelism.split=[1,1,1,1]",), "all"),
    ],
)
def test_auto_without_a_trace_follows_the_split(args: tuple[str, ...], expected: int | str) -> None:
    assert plan_for("auto", *args).choices["parallelism"].options["stages"] == expected


def test_stages_of_unknown_memory_are_not_chosen() -> None:
    known_needs = equal_stages(RANKS, 8.0)
    by_stages = {2: MemoryNeeds({}), RANKS: known_needs}
    made = plan_for("auto", memory=dataclasses.replace(known_needs, by_stages=by_stages))
    assert made.choices["parallelism"].options["stages"] == "all"


@pytest.mark.parametrize(("args", "expected"), [((), 2), (("memory=budget",), "all")])
def test_auto_uses_one_pipeline_with_a_memory_budget(args: tuple[str, ...], expected: int | str) -> None:
    by_stages = {stages: equal_stages(stages, 8.0) for stages in (2, RANKS)}
    made = plan_for("auto", *args, memory=dataclasses.replace(by_stages[RANKS], by_stages=by_stages))
    assert made.choices["parallelism"].options["stages"] == expected


def test_traces_for_other_world_sizes_are_ignored() -> None:
    """After the loss of a rank, a run still has the traces for its former world size."""
    traced = equal_stages(3, 8.0)
    lost = plan_for("auto", memory=dataclasses.replace(traced, by_stages={3: traced, 9: equal_stages(9, 8.0)}))
    assert lost.choices["parallelism"].options["stages"] == "all"
    assert lost.reasons["parallelism.stages"] != plan_for("auto").reasons["parallelism.stages"]


def test_auto_notes_pipelines_that_span_machines() -> None:
    """Machines of three ranks cannot be divided into pipelines of two."""
    args = ("parallelism=pipeline", "parallelism.stages=auto", "global_batch_size=33", "device=cpu")
    by_stages = {stages: equal_stages(stages, 8.0) for stages in (2, 3, 6)}
    need = dataclasses.replace(by_stages[6], by_stages=by_stages)
    here = Inventory((), Cpu("a CPU", 8, 8, 8 * GIB))

    def notes(*counts: int) -> tuple[str, ...]:
        made = make_plan(compose(Request(args)), here, on_machines(*counts), need)
        assert made.batch.stages == 2
        return made.notes

    assert any("parallelism.stages=2" in note for note in notes(3, 3))
    assert not any("parallelism.stages=2" in note for note in notes(2, 2, 2))


def test_only_several_possible_pipelines_need_a_trace() -> None:
    def is_traced(count: int, stages: int | str, *more: str) -> bool:
        gpus = tuple(Device("cuda", index, "a GPU", f"GPU-{index}", 16 * GIB) for index in range(count))
        here = Inventory(gpus, Cpu("a CPU", 8, 8, 8 * GIB))
        args = ("parallelism=pipeline", f"parallelism.stages={stages}", "micro_batch_size=1", "backend=default", *more)
        return should_trace_memory(compose(Request(args)), here)

    assert [is_traced(count, "auto") for count in (2, 3, 4, 6)] == [False, False, True, True]
    assert not is_traced(4, 2)
    assert not is_traced(4, "auto", "parallelism.split=[1,1]"), "the split has two stages"


@pytest.mark.parametrize("stages", [1, 3, 8])
def test_stages_must_divide_the_ranks(stages: int) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_for(stages)
    (problem,) = caught.value.problems
    assert problem.where == f"parallelism.stages={stages}"
    assert "use 2, 4, or" in problem.fix


def test_fewer_samples_than_pipelines_are_rejected() -> None:
    with pytest.raises(ConfigError) as caught:
        plan_for(2, "global_batch_size=1")
    (problem,) = caught.value.problems
    assert problem.where == "global_batch_size=1"
    assert plan_for(2, problem.fix.split()[1].rstrip(",")).batch.shares == (1, 1)


def test_copies_of_a_stage_need_memory_for_gradient_buckets() -> None:
    need, rank = model(20), on_machines(RANKS)[0]
    copies, single = (predict_memory(need, 2, rank, RankPart("pipeline", count, stages=2)) for count in (4, 2))
    assert copies.parts["gradients"] == 2 * single.parts["gradients"]
    others = {name for name in single.parts if name not in ("gradients", "allocator")}
    assert {name: copies.parts[name] for name in others} == {name: single.parts[name] for name in others}


def test_copies_of_a_stage_need_the_same_memory() -> None:
    small, large = model(4), model(12)
    staged_model = dataclasses.replace(model(16), stages=(small, large))
    plan = plan_for(2, memory=MemoryNeeds({"train": staged_model}))
    totals = [memory.prediction.total for memory in plan.memory]
    assert totals[:2] == totals[2:]
    assert totals[0] < totals[1]
    part = rank_part(plan.choices["parallelism"], plan.phases[0])
    assert (part.count, part.num_stages) == (RANKS, 2)


def test_stages_traced_for_another_world_size_are_not_used() -> None:
    """After the loss of a rank, each stage is predicted to need an equal part of the model's memory."""
    whole = model(16)
    staged_model = dataclasses.replace(whole, stages=(model(4), model(12)))
    with_stages, without = (plan_for("all", memory=MemoryNeeds({"train": each})) for each in (staged_model, whole))
    assert with_stages.memory == without.memory
    assert not any(memory.is_exact for memory in with_stages.memory)


def test_copies_exchange_gradients() -> None:
    """The bubble is as long as that of one pipeline with half of the samples."""
    args = ("micro_batch_size=1", "parallelism=pipeline", "parallelism.stages=2")
    one = known(predict(*args, "global_batch_size=8", need=staged(2, 0), devices=(DEVICE,) * 2))
    two = known(predict(*args, "global_batch_size=16", need=staged(2, 0), devices=(DEVICE,) * 4))
    for part in (PRODUCTS, BUBBLE):
        assert two.part(part) == pytest.approx(one.part(part))
    assert one.part(COMMUNICATION) == 0 < two.part(COMMUNICATION)


@pytest.mark.parametrize(
    ("stages", "lost", "kept", "adapted"),
    [
        (2, 5, [0, 1, 2, 3, 6, 7], {"stages": 2, "split": [3, 1]}),  # the other rank of its pipeline is also dropped
        (8, 0, [1, 2, 3, 4, 5, 6, 7], {"stages": "all", "split": None}),  # no pipeline remains complete
        ("all", 1, [0, 2, 3, 4, 5, 6, 7], {"stages": "all", "split": None}),
        ("auto", 1, [0, 2, 3, 4, 5, 6, 7], {"stages": "auto", "split": None}),
    ],
)
def test_complete_pipelines_continue_after_the_loss_of_a_rank(
    stages: int | str, lost: int, kept: list[int], adapted: dict[str, Any]
) -> None:
    options = {"stages": stages, "split": [3, 1]}
    assert ranks_to_keep(options, lost, 8) == kept
    assert options_for_ranks(options, kept, 8) == adapted


def test_auto_keeps_a_split_that_remaining_ranks_can_form() -> None:
    options = {"stages": "auto", "split": [3, 1]}
    assert options_for_ranks(options, [2, 3], 4) == options


@pytest.mark.parametrize("slow", [0, 1, 2, 3])
def test_the_slowest_copy_determines_the_update_time(slow: int) -> None:
    args = ("micro_batch_size=1", "global_batch_size=16", "parallelism=pipeline", "parallelism.stages=2")
    assert DEVICE.flops_per_s is not None
    devices = [DEVICE] * RANKS
    devices[slow] = dataclasses.replace(DEVICE, flops_per_s=DEVICE.flops_per_s / 4)
    fast, time = (
        known(predict(*args, need=staged(2, 0), devices=each)) for each in ((DEVICE,) * RANKS, tuple(devices))
    )
    assert time.part(PRODUCTS) == pytest.approx(4 * fast.part(PRODUCTS))
