"""Memory predictions: fitting micro-batch sizes, remedies and reports."""

from __future__ import annotations

import dataclasses
import json
import re
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.base.json_converter import decode_valid, encode
from runner.base.text import format_bytes, wrap
from runner.config.configuration import Configuration, compose
from runner.config.request import Request
from runner.plan.cuda_allocator import AllocatorSettings
from runner.plan.inventory import Cpu, Device, Inventory
from runner.plan.memory_fit import (
    GIB,
    Demand,
    MemoryNeeds,
    RankMemory,
    RankPart,
    choose_micro_batch_size,
    largest_micro_batch,
    may_fit,
    predict_memory,
)
from runner.plan.memory_trace import Bytes, ComputeCost, Layer, ModelSizes, Traced
from runner.plan.overhead import get_overhead
from runner.plan.planner import make_plan, should_trace_memory
from runner.plan.prediction_text import FittingChange, format_prediction, summarize_memory
from runner.plan.rank_devices import RankDevice
from runner.plan.run_plan import Plan
from runner.plan.update_time import DeviceRates

MIB = 2**20
T4 = Device("cuda", 0, "Tesla T4", "GPU-0", 15 * GIB, capability=(7, 5))
HERE = Inventory((T4,), Cpu("a processor", 8, 16, 64 * GIB))


def traced(samples: int, model_gib: float = 1.0, sample_gib: float = 0.5) -> Traced:
    """Return a handmade trace: weights, gradients, states of twice the size, and activations of 64 MiB per block."""
    quarter, each = int(model_gib * GIB / 4), int(sample_gib * GIB)
    peak = Bytes(quarter, 0, quarter, 2 * quarter, each * samples, MIB * samples)
    sizes = [quarter] * 4 + [64 * MIB] * (each * samples // (64 * MIB)) + [MIB] * samples
    events = tuple(enumerate(sizes))
    layers = tuple(Layer(f"blocks.{number}.mlp", each * samples // 4, 10**9) for number in range(4))
    work, step = ComputeCost(10**12 * samples, 10**10 * samples), ComputeCost(moved_bytes=10**10)
    return Traced("train", samples, 1, peak, events, layers, (), work, step, ModelSizes(quarter // 8, num_layers=4))


@cache
def demand(*samples: int, model_gib: float = 1.0, sample_gib: float = 0.5) -> Demand:
    return Demand.from_traces([traced(each, model_gib, sample_gib) for each in samples], AllocatorSettings())


def device(gib: float, **other: int) -> RankDevice:
    return RankDevice("cuda:0", "a GPU", "", int(gib * GIB), **other)


@cache
def composed(*args: str) -> Configuration:
    return compose(Request(args))


def plan(*args: str, needs: MemoryNeeds | None, on: Inventory = HERE) -> Plan:
    return make_plan(composed(*args), on, needs=needs)


@given(st.integers(1, 64), st.sampled_from([(8,), (2, 8), (1, 4, 16)]))
@settings(max_examples=20)
def test_traced_sizes_are_exact_and_memory_is_monotonic(samples: int, sizes: tuple[int, ...]) -> None:
    need = demand(*sizes)
    for point in need.points:
        assert need.at(point.micro_batch_size) == point
    assert need.at(samples + 1).peak.total >= need.at(samples).peak.total
    assert need.at(samples).reserved >= need.at(samples).peak.total
    assert need.at(samples).peak.optimizer == 2 * need.at(samples).peak.gradients, (
        "weights do not depend on the number of samples"
    )


@given(
    st.floats(0.5, 40), st.integers(1, 64), st.sampled_from(["single", "ddp", "fsdp", "pipeline"]), st.integers(2, 8)
)
@settings(max_examples=30)
def test_the_largest_micro_batch_is_found(gib: float, most: int, strategy: str, count: int) -> None:
    need, rank = demand(2, 8), device(gib, overhead_bytes=GIB // 2)
    part = RankPart(strategy, 1 if strategy == "single" else count)
    result = largest_micro_batch(need, rank, most, part)
    assert not result or predict_memory(need, result, rank, part).fits
    assert result == most or not predict_memory(need, result + 1, rank, part).fits


def test_each_strategy_has_its_memory() -> None:
    need = demand(2, 8)
    rank = device(16, overhead_bytes=100, communication_bytes=11)
    alone = predict_memory(need, 4, rank)
    assert alone.parts["libraries"] == 100
    assert alone.total == sum(alone.parts.values())
    ddp, fsdp = predict_memory(need, 4, rank, RankPart("ddp", 4)), predict_memory(need, 4, rank, RankPart("fsdp", 4))
    assert ddp.parts["libraries"] == 111
    assert ddp.parts["gradients"] == 2 * alone.parts["gradients"], "a bucket for each gradient"
    assert fsdp.parts["optimizer"] * 4 == alone.parts["optimizer"]
    assert fsdp.parts["activations"] == alone.parts["activations"], "activations are not sharded"
    several = predict_memory(need, 4, rank, RankPart("fsdp", 4, share=8))
    assert several.parts["gradients"] >= alone.parts["gradients"], (
        "sharded only after the last micro-batch of an update"
    )
    sharded = predict_memory(need, 4, rank, RankPart("fsdp", 4, share=8, shards_gradients=True))
    assert sharded.parts["gradients"] < several.parts["gradients"]
    half = predict_memory(need, 4, rank, RankPart("fsdp", 4, gathered_size=0.5))
    assert half.parts["parameters"] < fsdp.parts["parameters"]
    whole = dataclasses.replace(need, model=dataclasses.replace(need.model, block=0))
    assert predict_memory(whole, 4, rank, RankPart("fsdp", 4)).parts["parameters"] > alone.parts["parameters"], (
        "a model without blocks is gathered completely"
    )
    stages = predict_memory(need, 4, rank, RankPart("pipeline", 2, in_flight=2.0, passes=3))
    assert stages.parts["activations"] == 2 * alone.parts["activations"]
    assert stages.parts["inputs"] == 3 * alone.parts["inputs"], "all samples of an update are read at once"
    on_cpu = predict_memory(need, 4, RankDevice("cpu", "CPU", "", 64 * GIB), RankPart("ddp", 4))
    assert on_cpu.parts["allocator"] == 0
    assert on_cpu.capacity == 16 * GIB, "ranks on a CPU share host memory"
    assert predict_memory(need, 4, device(0)).fits, "a device of unknown size is not reported as too small"


def test_ddp_buckets_count_at_a_peak_without_gradients() -> None:
    """If activations are large, the peak is at the end of the forward pass, before gradients exist."""
    point = demand(4).points[0]
    late = dataclasses.replace(point, peak=dataclasses.replace(point.peak, gradients=0))
    need = dataclasses.replace(demand(4), points=(late,), model=ModelSizes(trained=5 * MIB))
    assert predict_memory(need, 4, device(16), RankPart("ddp", 2)).parts["gradients"] == 5 * MIB


@pytest.mark.parametrize(("args", "in_flight"), [("1f1b", 1.0), ("gpipe", 4.0)])
def test_a_stage_stores_the_micro_batches_in_flight(args: str, in_flight: float) -> None:
    choice = composed("parallelism=pipeline", f"parallelism.schedule={args}").choices["parallelism"]
    assert RankPart.from_choice(choice, 2, 64, 8).in_flight == in_flight


def test_insufficient_remedies_are_not_traced() -> None:
    """Four samples take 2 GiB. Weights, gradients and states take 1 GiB, and states take half of it."""
    thought = predict_memory(demand(4), 4, device(2.7))
    assert not thought.fits
    assert may_fit(thought, ["optimizer=adamw8bit"])
    assert may_fit(thought, ["memory=checkpoint"])
    tight = predict_memory(demand(4), 4, device(1.2))
    assert not may_fit(tight, ["optimizer=adamw8bit"])
    assert may_fit(tight, ["micro_batch_size=auto"])
    assert not may_fit(predict_memory(demand(4), 4, device(0.4)), ["micro_batch_size=auto", "optimizer=adamw8bit"])


@given(st.integers(1, 512), st.integers(1, 512))
def test_a_share_is_split_into_few_equal_micro_batches(share: int, held: int) -> None:
    size = choose_micro_batch_size(share, held)
    least, made = -(-share // min(held, share)), -(-share // size)
    assert 1 <= size <= min(held, share)
    assert made == least or (share % size == 0 and made * 3 <= least * 4)


def test_auto_uses_the_largest_fitting_micro_batch() -> None:
    args = ("global_batch_size=64", "micro_batch_size=auto", "precision=fp16")
    needs = MemoryNeeds({"train": demand(4, 16)})
    made = plan(*args, needs=needs)
    size = made.batch.micro_batch_size
    held = largest_micro_batch(needs.demands["train"], made.ranks[0], 64)
    assert size <= held < 64
    assert made.batch.accumulation_steps * size >= 64
    assert "share of 64" in made.reason("micro_batch_size")
    assert made.memory[0].samples == size
    assert all(each.prediction.fits for each in made.memory)
    assert Plan.from_json(made.to_json()) == made
    small = plan("global_batch_size=8", *args[1:], needs=needs)
    assert (small.batch.micro_batch_size, small.batch.accumulation_steps) == (8, 1)
    assert small.reason("micro_batch_size").startswith("auto: ")
    assert small.reason("micro_batch_size") != made.reason("micro_batch_size")
    asked = plan("global_batch_size=64", "micro_batch_size=32", needs=needs)
    assert asked.batch.micro_batch_size == 32, "requested values are not changed"
    assert not asked.memory[0].prediction.fits


def test_a_cpu_computes_its_share_in_one_micro_batch() -> None:
    needs = MemoryNeeds({"train": demand(4, 16, sample_gib=8.0)})
    made = plan("global_batch_size=64", "micro_batch_size=auto", "device=cpu", needs=needs)
    assert made.batch.micro_batch_size == 64
    assert not made.memory[0].prediction.fits


def test_memory_used_by_other_processes_is_unavailable() -> None:
    """The capacity of a present device is its free memory, limited by the memory fraction of this process."""
    args, needs = ("global_batch_size=64", "micro_batch_size=auto"), MemoryNeeds({"train": demand(4, 16)})
    whole = plan(*args, needs=needs).memory[0]
    busy = dataclasses.replace(HERE, devices=(dataclasses.replace(T4, free_bytes=5 * GIB),))
    shared = plan(*args, needs=needs, on=busy).memory[0]
    half = plan(*args, "memory.fraction=0.5", needs=needs).memory[0]
    limited = plan(*args, "memory.allocator='per_process_memory_fraction:0.5'", needs=needs).memory[0]
    assert limited == half, "the setting of torch's allocator has the same effect"
    assert (whole.prediction.capacity, shared.prediction.capacity) == (15 * GIB, 5 * GIB)
    assert half.prediction.capacity == 7.5 * GIB
    assert shared.samples < half.samples < whole.samples


def test_predictions_for_another_allocator_are_inexact() -> None:
    needs = MemoryNeeds({"train": demand(4, 16)})
    made = plan("micro_batch_size=4", "memory.allocator='backend:cudaMallocAsync'", needs=needs)
    lines = format_prediction(made, needs, {})
    assert not [line for line in lines if re.search(r" fits($|\s)", line)], "every figure is marked"
    assert any("NOT EXACT" in line for line in lines)


def test_a_model_too_large_for_one_sample_is_reported() -> None:
    made = plan(
        "global_batch_size=4", "micro_batch_size=auto", needs=MemoryNeeds({"train": demand(1, 4, sample_gib=20.0)})
    )
    assert made.batch.micro_batch_size == 1
    assert not made.memory[0].prediction.fits
    assert any("predicted" in note and "accel-run plan" in note for note in made.notes), made.notes


def test_blocks_chosen_by_the_trace_are_recomputed() -> None:
    known = Demand.from_traces([dataclasses.replace(traced(4), recompute=(1, 2)), traced(16)], AllocatorSettings())
    args = ("global_batch_size=4", "micro_batch_size=4", "device=cpu", "memory=budget")
    made = plan(*args, needs=MemoryNeeds({"train": known}))
    assert made.choices["memory"].options["recompute"] == [1, 2]
    assert "2 blocks" in made.reason("memory.recompute")
    asked = plan(*args, "memory.recompute=[0]", needs=MemoryNeeds({"train": known}))
    assert asked.choices["memory"].options["recompute"] == [0], "requested values are not changed"
    assert known.recompute_at(5) == (), "more samples fit without recomputation in the trace"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("args", "device", "is_wanted"),
    [
        (("micro_batch_size=auto",), T4, True),
        (("micro_batch_size=8",), T4, False),
        (("micro_batch_size=8", "parallelism=auto"), T4, True),
        (("micro_batch_size=auto", "device=cpu"), T4, False),
        (("micro_batch_size=auto",), None, False),
        (("micro_batch_size=8", "memory=budget"), None, True),
    ],
)
def test_a_run_is_traced_only_if_needed(args: tuple[str, ...], device: Device | None, *, is_wanted: bool) -> None:
    here = dataclasses.replace(HERE, devices=(device,) if device else ())
    assert should_trace_memory(compose(Request(args)), here) is is_wanted


def test_library_memory_has_a_margin() -> None:
    known = [get_overhead("cuda", capability) for capability in [(7, 5), (8, 6), (9, 0)]]
    assert [each.libraries for each in known] == sorted(each.libraries for each in known)
    assert known[0].libraries > (450 + 16) * MIB
    assert get_overhead("cuda", None) == get_overhead("cuda", (12, 0)) == known[-1]
    assert get_overhead("cpu", None).communication == 0


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "passes"), [("ddp", 2), ("fsdp", 1), ("fsdp", 2)])
def test_upper_bounds_are_marked_as_bounds(strategy: str, passes: int) -> None:
    needs = MemoryNeeds({"train": demand(2, 8)})
    gpus = tuple(dataclasses.replace(T4, index=number, uuid=f"GPU-{number}") for number in range(4))
    args = (f"parallelism={strategy}", "micro_batch_size=2", f"global_batch_size={8 * passes}")
    made = plan(*args, needs=needs, on=dataclasses.replace(HERE, devices=gpus))
    assert {each.prediction.bounds for each in made.memory} == {("parameters", "gradients")[: 2 * (strategy == "fsdp")]}
    table = {line.split()[0]: line for line in format_prediction(made, needs, {}) if line.strip()}
    assert ("up to" in table["gradients"]) == (strategy == "fsdp")
    of_all = needs.demands["train"].model.trained or needs.demands["train"].points[-1].peak.gradients
    if strategy == "fsdp":
        gradients = made.memory[0].prediction.parts["gradients"]
        assert (gradients >= of_all) == (passes > 1), (
            "complete between micro-batches; an equal part if an update has one micro-batch"
        )
    again = decode_valid(RankMemory, json.loads(json.dumps(encode(made.memory[0]))))
    assert again == made.memory[0]


def test_memory_needs_survive_serialization() -> None:
    needs = MemoryNeeds({"train": demand(2, 8)}, "a reason")
    again = decode_valid(MemoryNeeds, json.loads(json.dumps(encode(needs))))
    assert again.demands["train"].at(5) == needs.demands["train"].at(5)
    assert again.why_not == needs.why_not


def test_the_recommended_size_fits_and_divides_the_batch() -> None:
    needs = MemoryNeeds({"train": demand(1, 64)})
    made = plan("global_batch_size=64", "micro_batch_size=auto", needs=needs)
    held = largest_micro_batch(needs.demands["train"], made.ranks[0], 64)
    advised = made.batch.micro_batch_size
    assert advised < held < 64
    assert 64 % advised == 0
    text = " ".join(" ".join(format_prediction(made, needs, {})).split())
    assert f"about {held} on rank 0" in text
    assert f"(this run: {advised})" in text
    assert f"recommended: {advised} " in text
    assert f"{64 // advised} micro-batches" in text


@pytest.mark.parametrize("count", [1, 3, 8])
def test_prediction_lines_are_short_and_mark_estimates(count: int) -> None:
    gpus = tuple(
        Device("cuda", number, f"NVIDIA Long Name {number}", f"GPU-{number}", (8 + number) * GIB, capability=(8, 6))
        for number in range(count)
    )
    args = ("global_batch_size=128", "micro_batch_size=16", f"parallelism={'ddp' if count > 1 else 'single'}")
    needs = MemoryNeeds({"train": demand(4, 16)}, why_not="an operation without a fake")
    made = plan(*args, needs=needs, on=dataclasses.replace(HERE, devices=gpus))
    changes = [
        FittingChange(("micro_batch_size=4", "optimizer=adamw8bit"), GIB, 1.5),
        FittingChange(("precision=bf16",), GIB, None),
    ]
    lines = format_prediction(
        made, needs, {gpu.name: DeviceRates(1e13, 1e11) for gpu in gpus}, changes, [("memory=budget",)]
    )
    text = "\n".join(lines)
    for columns in (60, 80) if count == 1 else (80,):
        assert max(map(len, wrap(text, columns).split("\n"))) <= columns, text
    assert all(line.endswith(".") for line in lines if line.startswith("Traced on fake")), (
        "only the terminal wraps lines"
    )
    assert "DOES NOT FIT" in text or all(each.prediction.fits for each in made.memory)
    for words_of_it in ("predicted", "blocks.*.mlp 100%", "update time", "x 1.50", "unknown", "NOT EXACT", "not tried"):
        assert words_of_it in text, text
    assert all("predicted" in line for line in summarize_memory(made.memory))
    assert "Traced on fake" in text
    rough = MemoryNeeds({"train": dataclasses.replace(needs.demands["train"], why_not="no")})
    marked = "\n".join(
        format_prediction(plan(*args, needs=rough, on=dataclasses.replace(HERE, devices=gpus)), rough, {})
    )
    assert "Traced on fake" not in marked
    assert not re.search(r" fits($|\s)", marked), "every figure is marked"
    untold = format_prediction(
        plan(*args, needs=MemoryNeeds({}, why_not="no"), on=dataclasses.replace(HERE, devices=gpus)), needs, {}
    )
    assert "not predicted" in untold[0]


def test_sizes_have_readable_units() -> None:
    assert [format_bytes(size) for size in (0, 2048, 3 * MIB, 2 * GIB)] == ["0", "2 KiB", "3 MiB", "2 GiB"]
