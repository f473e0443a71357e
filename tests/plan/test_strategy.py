"""parallelism=auto chooses the simplest strategy that fits, with a reason in numbers."""

from __future__ import annotations

import dataclasses

import pytest

from runner.config.configuration import compose
from runner.config.request import Request
from runner.plan.inventory import Cpu, Device, Inventory
from runner.plan.memory_fit import GIB, Demand, MemoryNeeds, RankPart, TracedPoint, predict_memory
from runner.plan.memory_trace import Bytes, ModelSizes
from runner.plan.planner import make_plan
from runner.plan.rank_devices import RankDevice, number_machines
from runner.plan.strategy import choose_strategy


def devices(*gib: float) -> list[RankDevice]:
    return [RankDevice(f"cuda:{index}", f"a GPU of {size} GiB", "", int(size * GIB)) for index, size in enumerate(gib)]


def model(gib: float, *, activations: float = 0.05, layers: int | None = 24) -> Demand:
    """Return a demand of `gib` plus activations: float32 weights, gradients and AdamW states in a ratio of 1:1:2."""
    quarter = int(gib * GIB / 4)

    def traced(samples: int) -> TracedPoint:
        peak = Bytes(quarter, 0, quarter, 2 * quarter, int(samples * activations * GIB))
        return TracedPoint(samples, peak, peak.total)

    return Demand("train", (traced(1), traced(2)), model=ModelSizes(quarter // 24, num_layers=layers))


def needs(demand: Demand) -> MemoryNeeds:
    return MemoryNeeds({demand.phase: demand})


@pytest.mark.parametrize(
    ("need", "there", "micro", "name", "options", "reason"),
    [
        (model(4), devices(24), None, "single", {}, "one device"),
        (model(4), devices(16, 16), None, "ddp", {}, "fits on each of 2 devices"),
        (model(4), devices(11, 8), None, "ddp", {"shares": "speed"}, "each can hold an equal share"),
        (
            model(4, activations=0.3),
            devices(11, 8),
            None,
            "ddp",
            {"shares": "memory"},
            "an equal share does not fit on each as a single micro-batch",
        ),
        (model(4, activations=0.3), devices(11, 8), 4, "ddp", {"shares": "speed"}, "each can hold an equal share"),
        (model(20), devices(16, 16), None, "fsdp", {}, "a shard fits"),
        (model(14), devices(11, 8), None, "pipeline", {}, "memory of the larger device unused"),
        (model(17), devices(11, 8), None, "pipeline", {}, "does not fit on the smaller device"),
        (model(10, layers=None), devices(11, 8), None, "fsdp", {}, "equal shards fit"),
        (model(22), devices(16, 16), None, "fsdp", {}, "a shard fits"),
        (model(25), devices(16, 16), None, "fsdp", {}, "a shard fits"),  # if gradients stay sharded
        (model(29), devices(16, 16), None, "fsdp", {}, "a shard fits"),  # if evaluations gather one block at a time
        (model(30), devices(16, 16), None, "pipeline", {}, "the equal shards of fsdp do not fit"),
    ],
)
def test_the_simplest_fitting_strategy_is_chosen(
    need: Demand, there: list[RankDevice], micro: int | None, name: str, options: dict[str, str], reason: str
) -> None:
    result = choose_strategy(needs(need), there, 32, micro)
    assert result.fits
    assert (result.name, result.options) == (name, options), result.reason
    assert result.reason.startswith("auto: ")
    assert reason in result.reason


def on_unequal_machines(*gib: float) -> list[RankDevice]:
    """Return the devices of machines with two ranks each."""
    ranks = devices(*(size for size in gib for _ in range(2)))
    return number_machines(ranks, [0, 1] * len(gib))


@pytest.mark.parametrize(
    ("need", "name", "options", "reason"),
    [
        (model(4), "ddp", {"shares": "speed"}, "4 unequal devices; each can hold an equal share, so"),
        (model(4, activations=1.2), "ddp", {"shares": "memory"}, "4 unequal devices; an equal share does not fit"),
        (model(20), "pipeline", {}, "memory of the larger device unused"),
        (model(20, layers=None), "fsdp", {"shard_size": "auto"}, "equal shards fit"),
    ],
)
def test_unequal_devices_get_unequal_parts(need: Demand, name: str, options: dict[str, str], reason: str) -> None:
    result = choose_strategy(needs(need), on_unequal_machines(16, 11), 32, None)
    assert (result.name, result.options) == (name, options), result.reason
    assert reason in result.reason


def test_shares_by_memory_cover_all_machines() -> None:
    args = ("parallelism=ddp", "parallelism.shares=memory", "global_batch_size=54", "device=cpu")
    here = Inventory((), Cpu("a CPU", 8, 8, 8 * GIB))
    made = make_plan(compose(Request(args)), here, on_unequal_machines(16, 11))
    assert made.batch.shares == (16, 16, 11, 11)
    assert "16 : 16 : 11 : 11" in made.reasons["shares"]


@pytest.mark.parametrize(("layers", "name"), [(4, "pipeline"), (None, "ddp")])
def test_layers_enable_a_pipeline_without_sharding(layers: int | None, name: str) -> None:
    result = choose_strategy(needs(model(20, layers=layers)), devices(16, 16), 32, None, can_shard=False)
    assert (result.name, result.fits) == (name, name == "pipeline")


@pytest.mark.parametrize(("gib", "fits"), [(40, True), (52, False)])
def test_few_layers_form_several_pipelines(gib: float, fits: bool) -> None:
    """Two layers on four ranks form two pipelines of 2 x 32 GiB; each needs a bucket for every gradient."""
    result = choose_strategy(needs(model(gib, layers=2)), devices(32, 32, 32, 32), 32, None, can_shard=False)
    assert (result.name, result.fits) == ("pipeline" if fits else "ddp", fits)


@pytest.mark.parametrize(("gib", "fits"), [(16, True), (14, False)])
def test_copies_of_traced_stages_need_memory_for_gradient_buckets(gib: float, fits: bool) -> None:
    """Each of the two stages takes 12 GiB. On four devices, a bucket for each gradient adds 3 GiB."""
    demand = dataclasses.replace(model(24), stages=(model(12), model(12)))
    there = devices(*(gib for _ in range(4)))
    result = choose_strategy(needs(demand), there, 32, None, can_shard=False)
    assert (result.name, result.fits) == ("pipeline" if fits else "ddp", fits), result.reason
    one_copy = choose_strategy(needs(demand), there[:2], 32, None, can_shard=False)
    assert (one_copy.name, one_copy.fits) == ("pipeline", True)


@pytest.mark.parametrize(("version", "name"), [("2.12.1", "pipeline"), ("2.13.0", "fsdp")])
def test_auto_shards_only_with_a_correct_torch_version(version: str, name: str) -> None:
    gpus = tuple(
        Device("cuda", index, "a GPU", f"GPU-{index}", 16 * GIB, capability=(8, 0), free_bytes=16 * GIB)
        for index in range(2)
    )
    here = Inventory(gpus, Cpu("a processor", 8, 16, 64 * GIB), torch_version=version)
    args = ("parallelism=auto", "global_batch_size=32", "micro_batch_size=1")
    made = make_plan(compose(Request(args)), here, needs=needs(model(20)))
    assert made.choices["parallelism"].function == name


def test_a_model_too_large_for_all_devices_is_reported() -> None:
    result = choose_strategy(needs(model(40, layers=None)), devices(11, 8), 32, None)
    assert (result.name, result.options, result.fits) == ("ddp", {"shares": "memory"}, False)
    assert "1 sample needs 50" in result.reason
    assert "11 GiB + 8 GiB" in result.reason
    assert "layers()" in result.reason


def test_tasks_that_reject_pipelines_get_no_advice_on_layers() -> None:
    refusing, undefined = (choose_strategy(needs(model(40, layers=n)), devices(11, 8), 32, None) for n in (0, None))
    assert (refusing.name, refusing.fits) == ("ddp", False)
    assert undefined.reason.startswith(refusing.reason)
    assert undefined.reason != refusing.reason


def test_micro_batches_for_gradient_accumulation_fit() -> None:
    """Gradients and activations coexist only if an update has several micro-batches."""
    demand, there = model(4, activations=0.5, layers=None), devices(11, 8)
    peaks = [dataclasses.replace(point.peak, gradients=0) for point in demand.points]
    whole = [
        TracedPoint(point.micro_batch_size, peak, peak.total, without_gradients=peak.total, is_whole=True)
        for point, peak in zip(demand.points, peaks, strict=True)
    ]
    sizes = dataclasses.replace(demand.model, outside=4 * GIB, trained=GIB)
    need = needs(dataclasses.replace(demand, points=tuple(whole), model=sizes))
    assert not choose_strategy(need, there, 32, 16).fits
    held = need.max_samples(None, there, 16, RankPart("ddp", 2, 16))
    assert 0 < held < 16
    assert need.fits(there, [held] * 2, RankPart("ddp", 2, 16))


def test_shares_by_speed_fit_the_smallest_device() -> None:
    """The size of micro-batches does not depend on the shares."""
    need, there, part = model(4, activations=0.3), devices(11, 8), RankPart("ddp", 2)
    held = needs(need).max_samples(None, there, 32, part)
    assert (
        predict_memory(need, held, there[1], part).total
        <= 8 * GIB
        < predict_memory(need, held + 1, there[1], part).total
    )
    assert needs(model(20)).max_samples(None, there, 32, part) == 0
