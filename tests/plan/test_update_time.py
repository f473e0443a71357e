"""The predicted time of an update: its parts, exact cases, and how it depends on batch, device, link and ranks."""

from __future__ import annotations

import dataclasses
import math
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.config.config_files import profile_facts
from runner.config.configuration import Configuration, compose
from runner.config.request import Request
from runner.plan.inventory import Cpu, Device, Inventory
from runner.plan.memory_fit import GIB, Demand, MemoryNeeds, TracedPoint
from runner.plan.memory_trace import Bytes, ComputeCost, ModelSizes
from runner.plan.planner import make_plan
from runner.plan.update_time import (
    BASE_LATENCY_S,
    BUBBLE,
    COMMUNICATION,
    FUSED_BYTES,
    LAUNCH_S,
    LAUNCHES,
    LINK_LATENCY_S,
    LOADING,
    NETWORK_LATENCY_S,
    OPTIMIZER,
    OTHERS,
    PRODUCTS,
    SELECTIVE_LAUNCH_S,
    UPDATE_HOST_S,
    DeviceRates,
    Ring,
    Shards,
    UpdateTime,
    find_rates,
    make_ring,
    make_ring_across,
    predict_phase_time,
    reduce_buckets,
)
from runner.workload.partition import ideal_bubble
from scripts.measure.update_time import ROWS, Row, write_profiles
from scripts.measure.update_time import predict as predict_row

# so that the achieved rates are round: 1e12 products and 1e11 bytes per second
DEVICE = DeviceRates(2e12, 1.25e11, 0.5, link_bytes_per_s=1.25e10)
MODEL = ModelSizes(block=10**7, outside=2 * 10**7, trained=10**8, buckets=(10**6, *[33 * 10**6] * 3), num_layers=4)


def demand(*, launches: int = 0) -> Demand:
    """Return a demand of 1e12 products, 1e10 bytes for them and 3e10 other bytes per sample."""
    points = tuple(
        TracedPoint(size, Bytes(parameters=10**8), 0, ComputeCost(10**12, 4 * 10**10, launches, 10**10).scale(size))
        for size in (1, 8)
    )
    return Demand("train", points, ComputeCost(moved_bytes=5 * 10**10), MODEL)


GPU = Device("cuda", 0, "device 0", "GPU-0", 1000 * GIB, capability=(9, 0))


@cache
def composed(*args: str) -> Configuration:
    return compose(Request(args))


def predict(
    *args: str, need: Demand | None = None, devices: tuple[DeviceRates, ...] = (DEVICE,), is_gpu: bool = True
) -> UpdateTime | None:
    """Return the time of an update on these devices."""
    gpus = tuple(
        Device("cuda", rank, f"device {rank}", f"GPU-{rank}", 1000 * GIB, capability=(9, 0))
        for rank in range(len(devices) if is_gpu else 0)
    )
    need = need or demand()
    here = Inventory(gpus, Cpu("a processor", 8, 16, 1000 * GIB))
    plan = make_plan(composed(*args), here, needs=MemoryNeeds({"train": need}))
    rates = {rank.name: device for rank, device in zip(plan.ranks, devices, strict=False)}
    return predict_phase_time(plan, plan.selected[0], need, rates)


def known(time: UpdateTime | None) -> UpdateTime:
    assert time is not None
    return time


def on_ranks(count: int, *args: str, batch: int = 8, device: DeviceRates = DEVICE) -> UpdateTime:
    """Return the time of an update on `count` equal devices, each with one micro-batch of `batch` samples."""
    sizes = (f"global_batch_size={batch * count}", f"micro_batch_size={batch}")
    return known(predict(*sizes, *args, devices=(device,) * count))


# ---------------------------------------------------------------- computation


def test_compute_time_is_the_sum_of_two_rooflines() -> None:
    time = known(predict("global_batch_size=8", "micro_batch_size=4"))
    parts = {part.name: part.seconds for part in time.parts}
    assert parts == {PRODUCTS: pytest.approx(8.0), OTHERS: pytest.approx(2.4), OPTIMIZER: pytest.approx(0.5)}
    assert time.seconds == pytest.approx(10.9)
    assert time.is_complete


def test_matrix_products_are_limited_by_slow_memory() -> None:
    slow = dataclasses.replace(DEVICE, bytes_per_s=1.25e9)
    assert known(predict("global_batch_size=1", devices=(slow,))).part(PRODUCTS) == pytest.approx(10.0)


def test_compiled_elementwise_operators_access_less_memory() -> None:
    eager, compiled = known(predict("global_batch_size=1")), known(predict("global_batch_size=1", "compile=default"))
    assert compiled.part(OTHERS) == pytest.approx(FUSED_BYTES * eager.part(OTHERS))
    assert compiled.part(PRODUCTS) == eager.part(PRODUCTS)


@pytest.mark.slow
@given(st.integers(0, 10**6), st.sampled_from([("none", LAUNCH_S), ("selective", SELECTIVE_LAUNCH_S)]))
@settings(max_examples=10)
def test_eager_updates_take_at_least_the_launch_time(launches: int, memory: tuple[str, float]) -> None:
    name, launch_s = memory
    time = known(predict("global_batch_size=1", f"memory={name}", need=demand(launches=launches)))
    host = UPDATE_HOST_S + launches * launch_s
    assert time.seconds == pytest.approx(max(1.0 + 0.3 + 0.5, host))
    assert (time.part(LAUNCHES) > 0) == (host > 1.8)


def test_compiled_and_cpu_updates_have_no_launch_time() -> None:
    need = demand(launches=10**9)
    assert known(predict("global_batch_size=1", "compile=default", need=need)).part(LAUNCHES) == 0
    assert known(predict("global_batch_size=1", need=need, is_gpu=False)).part(LAUNCHES) == 0


@given(st.floats(1.0, 100.0), st.floats(1.0, 100.0))
@settings(max_examples=20)
def test_a_faster_device_has_shorter_predicted_updates(compute: float, memory: float) -> None:
    slow = known(predict("global_batch_size=1"))
    fast = dataclasses.replace(DEVICE, flops_per_s=2e12 * compute, bytes_per_s=1.25e11 * memory)
    assert known(predict("global_batch_size=1", devices=(fast,))).seconds <= slow.seconds


def test_larger_batches_have_longer_predicted_updates() -> None:
    times = [known(predict(f"global_batch_size={size}")).seconds for size in (1, 2, 5, 8, 13)]
    assert sorted(set(times)) == times


def test_devices_of_unknown_rates_have_no_prediction() -> None:
    assert predict("global_batch_size=2", devices=(DeviceRates(),)) is None
    assert predict("global_batch_size=2", "parallelism=ddp", devices=(DEVICE, DeviceRates(1e12))) is None


def test_models_of_unknown_operators_have_no_prediction() -> None:
    points = tuple(dataclasses.replace(point, work=ComputeCost()) for point in demand().points)
    assert predict("global_batch_size=1", need=dataclasses.replace(demand(), points=points)) is None


# ---------------------------------------------------------------- data loading

SIZES = ("global_batch_size=8", "micro_batch_size=8")  # an update of 8 samples computes for 8 + 2.4 + 0.5 s
COMPUTED_S = 10.9


@pytest.mark.parametrize(
    ("args", "read_s", "waiting"),
    [
        (["dataloader.num_workers=2"], 1.0, 0.0),  # 4 s of reading overlap with the device
        (["dataloader.num_workers=2"], 3.0, 12 - COMPUTED_S),
        (
            ["dataloader.num_workers=0"],
            3.0,
            24 - COMPUTED_S,
        ),  # reading does not overlap with host time, which is 0 here
        (["dataloader=thread"], 1.5, 12 - COMPUTED_S),
        (["dataloader.num_workers=4", "dataloader.workers_above_ms=20000"], 2.0, 16 - COMPUTED_S),  # no workers
    ],
)
def test_the_device_waits_for_slow_reading(args: list[str], read_s: float, waiting: float) -> None:
    need = dataclasses.replace(demand(), read_s=read_s)
    assert known(predict(*SIZES, *args, need=need, is_gpu=False)).part(LOADING) == pytest.approx(waiting)


def test_reading_without_workers_delays_kernel_launches() -> None:
    launches = 400_000
    host_s = UPDATE_HOST_S + launches * LAUNCH_S
    assert host_s < COMPUTED_S, "the host reads in the remaining time"
    need = dataclasses.replace(demand(launches=launches), read_s=1.0)
    time = known(predict(*SIZES, "dataloader.num_workers=0", need=need))
    assert time.part(LOADING) == pytest.approx(8 - (COMPUTED_S - host_s))


@pytest.mark.parametrize("args", [("dataloader.cache=memory",), ()])
def test_loading_time_of_cached_samples_is_unknown(args: tuple[str, ...]) -> None:
    need = dataclasses.replace(demand(), read_s=1.0 if args else None)
    assert LOADING not in [part.name for part in known(predict(*SIZES, *args, need=need)).parts]


def test_the_loading_time_of_a_custom_loader_is_unknown(tmp_path: Path) -> None:
    file = tmp_path / "own_loader.py"
    file.write_text(
        "from runner import Task\ndef build() -> Task: ...\n"
        "def fast(fetcher, device): ...\nDATALOADERS = {'fast': fast}\n"
    )
    need = dataclasses.replace(demand(), read_s=1.0)
    for name, has_part in (("fast", False), ("default", True)):
        here = Inventory((GPU,), Cpu("a processor", 8, 16, 1000 * GIB))
        configuration = compose(Request((*SIZES, f"dataloader={name}"), file))
        plan = make_plan(configuration, here, needs=MemoryNeeds({"train": need}))
        time = known(predict_phase_time(plan, plan.selected[0], need, {GPU.name: DEVICE}))
        assert (LOADING in [part.name for part in time.parts]) == has_part


# ---------------------------------------------------------------- communication


def test_a_single_rank_does_not_communicate() -> None:
    ring = make_ring([DEVICE])
    assert ring is not None
    assert (ring.gather(1e9), ring.reduce(1e9), ring.send(1e9)) == (0, 0, 0)
    assert on_ranks(1).part(COMMUNICATION) == 0


def test_collectives_take_the_time_of_a_ring_algorithm() -> None:
    ring = make_ring([DEVICE] * 5)
    assert ring is not None
    steps = 4 * LINK_LATENCY_S
    assert ring.gather(1e10) == pytest.approx(0.8 + steps + BASE_LATENCY_S)
    assert ring.reduce(1e10) == pytest.approx(1.6 + 2 * steps + BASE_LATENCY_S)
    assert ring.send(1e10) == pytest.approx(1.0 + LINK_LATENCY_S + BASE_LATENCY_S)


def test_the_slowest_link_limits_a_ring() -> None:
    fast = dataclasses.replace(DEVICE, link_bytes_per_s=1e12)
    assert make_ring([fast, DEVICE]) == make_ring([DEVICE, DEVICE])
    assert make_ring([DEVICE, DeviceRates(1e12, 1e12)]) is None


def test_network_and_latency_limit_several_machines() -> None:
    device = dataclasses.replace(DEVICE, network_bytes_per_s=1.25e9, per_machine=4)
    inside, between = make_ring([device] * 4), make_ring([device] * 8)
    assert inside == Ring(4, 1e10, pytest.approx(3 * LINK_LATENCY_S))
    assert between == Ring(8, 1e9, pytest.approx(6 * LINK_LATENCY_S + NETWORK_LATENCY_S), uses_network=True)
    assert make_ring([dataclasses.replace(device, network_bytes_per_s=None)] * 8) is None


def test_only_the_last_bucket_does_not_overlap() -> None:
    ring = Ring(2, 1e9, 0.0)
    each = ring.reduce(10**6)
    traffic = reduce_buckets((10**6,) * 10, 1.0, ring)
    assert traffic.total == pytest.approx(10 * each)
    assert traffic.exposed == pytest.approx(each), "the other buckets are sent before the backward pass ends"
    assert reduce_buckets((10**6,) * 10, 0.0, ring).exposed == pytest.approx(traffic.total), "nothing to overlap with"
    slow = reduce_buckets((10**6,) * 10, 5 * each, ring)
    assert slow.exposed == pytest.approx(0.5 * each + 10 * each - 5 * each), (
        "sends everything after the first bucket is complete"
    )
    assert reduce_buckets((), 1.0, ring).exposed == 0


def test_first_gather_and_last_scatter_do_not_overlap() -> None:
    shards = Shards.of(MODEL, 10**8, {"communicate": "float32", "reshard_after_forward": True})
    assert (shards.count, shards.block, shards.outside) == (8, 10**7, 2 * 10**7)
    ring = Ring(2, 1e9, 0.0)
    block, outside = ring.gather(10**7), ring.gather(2 * 10**7)
    traffic = shards.traffic(1, 10.0, 20.0, ring)
    assert traffic.total == pytest.approx(3 * (8 * block) + 2 * outside)
    assert traffic.exposed == pytest.approx(2 * block + 2 * outside)
    bound = shards.traffic(1, 0.0, 0.0, ring)
    assert bound.exposed == pytest.approx(bound.total - block), (
        "all except the gather of a block that is still in memory"
    )
    kept = dataclasses.replace(shards, reshards=False).traffic(1, 10.0, 20.0, ring)
    assert kept.total == pytest.approx(traffic.total - 8 * block)
    half = Shards.of(MODEL, 10**8, {"communicate": "bfloat16"})
    assert (half.block, half.block_gradients) == (shards.block / 2, shards.block_gradients), "gradients are float32"


def test_a_model_without_blocks_is_gathered_at_once() -> None:
    shards = Shards.of(ModelSizes(outside=10**8, trained=10**8), 10**8, {})
    ring = Ring(2, 1e9, 0.0)
    traffic = shards.traffic(1, 10.0, 20.0, ring)
    assert traffic.exposed == traffic.total == pytest.approx(2 * ring.gather(10**8))


def test_groups_gather_inside_and_reduce_across() -> None:
    device = dataclasses.replace(DEVICE, network_bytes_per_s=1.25e9, per_machine=2)
    across = make_ring_across([device] * 4, 2)
    assert across == Ring(2, 1e9 / 2, NETWORK_LATENCY_S, uses_network=True), "both ranks of a machine share its network"
    assert make_ring_across([device] * 4, 4) == make_ring([device])
    assert make_ring_across([DEVICE] * 4, 2) == Ring(2, 1e10, LINK_LATENCY_S)
    shards = Shards.of(MODEL, 10**8, {})
    inside = Ring(2, 1e10, 0.0)
    more = shards.traffic(1, 10.0, 20.0, inside, across).total - shards.traffic(1, 10.0, 20.0, inside).total
    assert more == pytest.approx(8 * across.reduce(10**7 / 2) + across.reduce(2 * 10**7 / 2))
    all_ranks = on_ranks(4, "parallelism=fsdp", device=device)
    groups = on_ranks(4, "parallelism=fsdp", "parallelism.shard_size=2", device=device)
    assert groups.part(COMMUNICATION) < all_ranks.part(COMMUNICATION), "parameters do not cross the network"
    assert groups.part(OPTIMIZER) == pytest.approx(0.5 / 2)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_communication_time_grows_with_ranks_and_slower_links(strategy: str) -> None:
    option = f"parallelism={strategy}"
    times = [on_ranks(count, option) for count in (2, 3, 8)]
    exposed = [time.part(COMMUNICATION) for time in times]
    assert 0 < exposed[0] < exposed[1] < exposed[2]
    assert len({time.part(PRODUCTS) for time in times}) == 1, "each rank has the same share"
    fast = on_ranks(8, option, device=dataclasses.replace(DEVICE, link_bytes_per_s=1e12))
    assert fast.part(COMMUNICATION) < exposed[2]
    assert fast.seconds == pytest.approx(sum(part.seconds or 0.0 for part in fast.parts))


def test_fsdp_divides_the_optimizer_step() -> None:
    assert on_ranks(4, "parallelism=fsdp").part(OPTIMIZER) == pytest.approx(0.5 / 4)
    assert on_ranks(4, "parallelism=ddp").part(OPTIMIZER) == pytest.approx(0.5)


def test_an_unknown_link_gives_a_lower_bound() -> None:
    time = on_ranks(2, "parallelism=ddp", device=dataclasses.replace(DEVICE, link_bytes_per_s=None))
    assert not time.is_complete
    assert str(time).startswith("at least ")


def test_the_slowest_rank_determines_the_time() -> None:
    slow = dataclasses.replace(DEVICE, flops_per_s=1e12)
    args = ("global_batch_size=16", "micro_batch_size=8", "parallelism=ddp")
    for devices in ((DEVICE, slow), (slow, DEVICE)):
        assert known(predict(*args, devices=devices)).part(PRODUCTS) == pytest.approx(16.0)
    shares = known(predict(*args, "parallelism.shares=[12,4]", devices=(DEVICE, slow)))
    assert shares.part(PRODUCTS) == pytest.approx(12.0)


# ---------------------------------------------------------------- pipelines


def staged(count: int, received: int) -> Demand:
    """Return the demand of a pipeline with equal stages."""
    whole = demand()
    points = tuple(
        dataclasses.replace(point, work=dataclasses.replace(point.work, received=received)) for point in whole.points
    )
    return Demand.from_stages([dataclasses.replace(whole, points=points)] * count)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("count", "micro_batches"), [(2, 4), (4, 4), (4, 16)])
def test_the_bubble_of_equal_stages_matches_the_formula(schedule: str, count: int, micro_batches: int) -> None:
    args = (f"global_batch_size={micro_batches}", "micro_batch_size=1", "parallelism=pipeline")
    need = staged(count, 0)
    time = known(predict(*args, f"parallelism.schedule={schedule}", need=need, devices=(DEVICE,) * count))
    busy = time.part(PRODUCTS) + time.part(OTHERS)
    assert busy == pytest.approx(1.3 * micro_batches)
    assert time.part(BUBBLE) / (busy + time.part(BUBBLE)) == pytest.approx(ideal_bubble(count, micro_batches))
    assert time.part(COMMUNICATION) == 0
    sends = known(
        predict(*args, f"parallelism.schedule={schedule}", need=staged(count, 10**9), devices=(DEVICE,) * count)
    )
    assert sends.part(COMMUNICATION) > 0
    assert sends.part(BUBBLE) == time.part(BUBBLE)


def test_an_untraced_pipeline_is_divided_equally() -> None:
    args = ("global_batch_size=8", "micro_batch_size=1", "parallelism=pipeline")
    time = known(predict(*args, devices=(DEVICE,) * 2))
    assert time.part(PRODUCTS) == pytest.approx(4.0)
    assert not time.is_complete, "the size of its messages is unknown"


# ---------------------------------------------------------------- profiles


def test_rates_come_from_the_profile_of_the_device() -> None:
    profiles = list(profile_facts().values())
    h100 = find_rates("nvidia h100 80gb hbm3", "bf16", profiles)
    assert (h100.flops_per_s, h100.bytes_per_s) == (989e12, 3350e9)
    assert (h100.link_bytes_per_s, h100.network_bytes_per_s, h100.per_machine) == (450e9, 400e9, 8)
    t4 = find_rates("Tesla T4", "bf16", profiles)
    assert t4.flops_per_s == 8.1e12, "bfloat16 is emulated"
    assert find_rates("Tesla T4", "fp16", profiles).product_efficiency < t4.product_efficiency, "70 W limit its clock"
    assert h100.product_efficiency > t4.product_efficiency
    in_tf32, in_fp32 = (find_rates("NVIDIA H100 80GB HBM3", name, profiles) for name in ("tf32", "fp32"))
    assert in_tf32.product_efficiency == t4.product_efficiency < in_fp32.product_efficiency
    assert not find_rates("an unknown GPU", "bf16", profiles).is_known
    assert find_rates("Tesla T4", "my_format", profiles).flops_per_s == 8.1e12


@pytest.mark.parametrize("profile", ["h100", "a100"])
def test_one_machine_communicates_faster_than_eight(profile: str) -> None:
    facts = profile_facts()[profile]
    device = find_rates(facts["devices"][0]["name"], "bf16", [facts])
    eight, many = make_ring([device] * 8), make_ring([device] * 64)
    assert eight is not None
    assert many is not None
    assert math.inf > eight.bytes_per_s > many.bytes_per_s


# ---------------------------------------------------------------- measurements

TESTED = ("GPT-2", "GPT 11M, fp16, 2 x T4", "GPT 0.5B, 32 x V100, 8 pipelines")
TESTED_ROWS = [row for row in ROWS if row.name.startswith(TESTED) and not row.is_calibration]


@pytest.mark.slow
@pytest.mark.parametrize("row", TESTED_ROWS, ids=lambda row: row.name)
def test_gpt_predictions_are_within_a_quarter(row: Row, tmp_path: Path) -> None:
    """Other rows of docs/update-time.md take longer to trace, or are similar to a tested one."""
    write_profiles(tmp_path)
    assert 0.75 < predict_row(row, tmp_path).seconds / row.measured < 1.25
