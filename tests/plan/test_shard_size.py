"""parallelism.shard_size: each group of this many ranks holds a copy of the model."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from runner.base.errors import ConfigError, Problem
from runner.config.configuration import compose
from runner.config.request import Request
from runner.launch.training_ranks import options_for_ranks
from runner.plan.inventory import Cpu, Inventory
from runner.plan.memory_fit import GIB, MemoryNeeds, RankPart, predict_memory
from runner.plan.memory_trace import ComputeCost, ModelSizes
from runner.plan.planner import make_plan
from runner.plan.rank_devices import RankDevice, number_machines, ranks_per_machine
from runner.plan.run_plan import Plan
from runner.plan.strategy import choose_strategy
from runner.plan.update_time import BASE_LATENCY_S, Ring, Shards, UpdateTime, find_rank_rates, predict_training_time
from tests.plan.test_strategy import model, needs


def on_machines(*counts: int, gib: float = 16) -> list[RankDevice]:
    """Return the devices of machines with these numbers of ranks."""
    local_ranks = [local_rank for count in counts for local_rank in range(count)]
    devices = [RankDevice(f"cuda:{index}", "a GPU", "", int(gib * GIB)) for index in local_ranks]
    return number_machines(devices, local_ranks)


def plan_for(ranks: Sequence[RankDevice], shard_size: int | str, needs: MemoryNeeds | None = None) -> Plan:
    args = ("parallelism=fsdp", f"parallelism.shard_size={shard_size}", "global_batch_size=32", "device=cpu")
    return make_plan(compose(Request(args)), Inventory((), Cpu("a CPU", 8, 8, 8 * GIB)), ranks, needs)


def problems(ranks: Sequence[RankDevice], shard_size: int) -> list[Problem]:
    with pytest.raises(ConfigError) as caught:
        plan_for(ranks, shard_size)
    return list(caught.value.problems)


@pytest.mark.parametrize(
    ("local_ranks", "expected"),
    [([0], (1,)), ([0, 1, 2], (3,)), ([0, 1, 0, 1], (2, 2)), ([0, 1, 0], (2, 1)), ([0, 0, 0], (1, 1, 1))],
)
def test_machines_are_inferred_from_rank_numbers(local_ranks: list[int], expected: tuple[int, ...]) -> None:
    assert ranks_per_machine(number_machines([RankDevice("cpu", "CPU")] * len(local_ranks), local_ranks)) == expected


@pytest.mark.parametrize(
    ("counts", "expected"),
    [((4,), "all"), ((4, 4), 4), ((2, 2, 2), 2), ((4, 2), "all"), ((1, 1), "all"), ((1,), "all")],
)
def test_auto_shards_within_equal_machines(counts: tuple[int, ...], expected: int | str) -> None:
    made = plan_for(on_machines(*counts), "auto")
    assert made.choices["parallelism"].options["shard_size"] == expected
    assert made.reasons["parallelism.shard_size"].startswith("auto: ")


@pytest.mark.parametrize(("gib", "expected"), [(16, 4), (6, "all")])
def test_auto_shards_over_all_ranks_if_needed(gib: float, expected: int | str) -> None:
    made = plan_for(on_machines(4, 4, gib=gib), "auto", needs(model(24)))
    assert made.choices["parallelism"].options["shard_size"] == expected


@pytest.mark.parametrize(("network_gb_s", "expected"), [(400.0, "all"), (20.0, 4), (None, 4)])
def test_auto_chooses_the_fastest_shard_size(tmp_path: Path, network_gb_s: float | None, expected: int | str) -> None:
    """In smaller groups, each rank updates a larger part of the model, which is faster only on a slow network."""
    device = {
        "name": "a GPU", "memory_gib": 16, "capability": [9, 0], "bf16_tensor_tflops": 1000.0, "fp32_tflops": 100.0,
        "memory_bandwidth_gb_s": 1000.0, "link_gb_s": 400.0, "network_gb_s": network_gb_s, "gpus_per_machine": 4,
    }  # fmt: skip
    (tmp_path / "hardware").mkdir()
    content = {"hardware": {"title": "a GPU", "devices": [device]}}
    (tmp_path / "hardware" / "own.yaml").write_text("# @package _global_\n" + yaml.safe_dump(content))
    demand = model(24)
    work = ComputeCost(10**12, 10**10, 0, 10**9)
    points = tuple(dataclasses.replace(point, work=work.scale(point.micro_batch_size)) for point in demand.points)
    need = needs(dataclasses.replace(demand, points=points, step=ComputeCost(moved_bytes=5 * 10**11)))
    args = ("+hardware=own", "parallelism=fsdp", "global_batch_size=32", "device=cpu")

    def plan(shard_size: int | str) -> Plan:
        configuration = compose(Request((*args, f"parallelism.shard_size={shard_size}"), config_dir=tmp_path))
        return make_plan(configuration, Inventory((), Cpu("a CPU", 8, 8, 8 * GIB)), on_machines(4, 4), need)

    def time(shard_size: int | str) -> UpdateTime:
        made, profiles = plan(shard_size), [{"devices": [device]}]
        predicted = predict_training_time(made, need, find_rank_rates(made, profiles))
        assert predicted is not None
        return predicted

    made = plan("auto")
    sizes: tuple[int | str, ...] = (4, "all")
    assert made.choices["parallelism"].options["shard_size"] == expected
    if network_gb_s is None:
        assert not time("all").is_complete
        return
    assert min(sizes, key=lambda size: time(size).seconds) == expected
    assert all(str(time(size)) in made.reasons["parallelism.shard_size"] for size in sizes)


def test_parallelism_auto_keeps_shards_within_equal_machines() -> None:
    assert choose_strategy(needs(model(20)), on_machines(2, 2), 32, None).options == {"shard_size": "auto"}
    assert choose_strategy(needs(model(20)), on_machines(4), 32, None).options == {}


@pytest.mark.parametrize("shard_size", [1, 3, 8])
def test_shard_size_must_divide_the_ranks(shard_size: int) -> None:
    (problem,) = problems(on_machines(4), shard_size)
    assert problem.where == f"parallelism.shard_size={shard_size}"
    assert "2, 4" in problem.fix


@pytest.mark.parametrize(
    ("counts", "shard_size", "is_noted"),
    [
        ((4, 4), 2, False),
        ((2, 2), 4, False),
        ((3, 3), 2, True),
        ((4, 2), 2, False),
        ((4, 2), 3, True),
        ((2, 2, 4), 4, False),
        ((2, 4, 2), 4, True),
    ],
)
def test_groups_that_share_machines_are_noted(counts: tuple[int, ...], shard_size: int, is_noted: bool) -> None:
    notes = plan_for(on_machines(*counts), shard_size).notes
    assert any("parallelism.shard_size" in note for note in notes) == is_noted


def test_one_process_ignores_the_shard_size() -> None:
    assert plan_for(on_machines(1), 4).world_size == 1


def test_memory_depends_on_the_shard_size() -> None:
    need, rank = model(20), on_machines(8)[0]
    in_pairs, of_two = (
        predict_memory(need, 2, rank, part) for part in (RankPart("fsdp", 8, shard_size=2), RankPart("fsdp", 2))
    )
    assert in_pairs.parts == of_two.parts
    assert in_pairs.total > predict_memory(need, 2, rank, RankPart("fsdp", 8)).total


@pytest.mark.parametrize(("kept", "expected"), [([0, 1, 2], "all"), ([0, 3], 2), ([1], 2)])
def test_shard_size_after_a_loss_of_ranks(kept: list[int], expected: int | str) -> None:
    assert options_for_ranks({"shard_size": 2}, kept, 4)["shard_size"] == expected


@pytest.mark.parametrize(("gib", "expected"), [(12, "sharded"), (13, "full")])
def test_gradients_stay_sharded_only_if_needed(gib: float, expected: str) -> None:
    """Samples are processed one at a time, because the activations of the whole share of a rank do not fit."""
    made = plan_for(on_machines(4, gib=gib), "all", needs(model(24, activations=1.0)))
    assert made.choices["parallelism"].options["gradients"] == expected
    assert made.reasons["parallelism.gradients"].startswith("auto: ")
    assert all(memory.prediction.fits for memory in made.memory)


@pytest.mark.parametrize(
    ("gib", "activations", "expected"),
    [
        (13, 1.0, ("whole", "full")),
        (12, 1.0, ("whole", "sharded")),
        (10, 1.0, ("sharded", "sharded")),
        (10, 0.05, ("sharded", "full")),
        (2, 1.0, ("whole", "sharded")),  # nothing fits
    ],
)
def test_evaluations_gather_the_model_if_it_fits(gib: float, activations: float, expected: tuple[str, str]) -> None:
    made = plan_for(on_machines(4, gib=gib), "all", needs(model(24, activations=activations)))
    options = made.choices["parallelism"].options
    assert (options["evaluation"], options["gradients"]) == expected
    assert all(memory.prediction.fits for memory in made.memory) == (gib > 2)


def test_sharded_gradients_are_sent_after_each_micro_batch() -> None:
    ring = Ring(4, 1e9, 0.0)
    once, each = (
        Shards.of(ModelSizes(block=10**8, trained=10**9), 10**9, {"gradients": option}).traffic(3, 0.0, 0.0, ring)
        for option in ("full", "sharded")
    )
    gathered = 3 * 10 * 2 * ring.gather(10**8)  # ten blocks are gathered before each of the two passes
    assert each.total - gathered == pytest.approx(3 * (once.total - gathered))


def test_network_all_reduces_overlap_with_communication_inside_machines() -> None:
    """A block of 80 MB in groups of 8 ranks, without computation.

    Each link inside a machine takes 70 ms to gather or scatter a block at 1 GB/s. Each network adapter takes 175 ms to
    all-reduce the 10 MB of a shard over 8 groups at 0.1 GB/s.
    """
    shards = Shards.of(ModelSizes(block=8 * 10**7, trained=8 * 10**8), 8 * 10**8, {})
    inside, network, link = Ring(8, 1e9, 0.0), Ring(8, 1e8, 0.0, uses_network=True), Ring(8, 1e8, 0.0)
    gather, total = inside.gather(8 * 10**7), network.reduce(10**7)
    assert gather == pytest.approx(0.07 + BASE_LATENCY_S)
    assert total == pytest.approx(0.175 + BASE_LATENCY_S)
    blocks = shards.count - 1
    first_and_last = 2 * gather + total
    concurrent = shards.traffic(1, 0.0, 0.0, inside, network)
    assert concurrent.exposed == pytest.approx(first_and_last + blocks * (gather + max(2 * gather, total)))
    shared = shards.traffic(1, 0.0, 0.0, inside, link)
    assert shared.exposed == pytest.approx(first_and_last + blocks * (3 * gather + total)), (
        "both collectives use the same links"
    )
    assert concurrent.total == shared.total
