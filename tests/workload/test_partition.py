"""Pipeline splits are optimal, and the simulated schedules match the theory."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.base.errors import Problem
from runner.workload import partition
from runner.workload.partition import Split, StageDevice, ideal_bubble, max_in_flight, orders, split
from tests.rounding import allowed

GIB = 2**30
SCHEDULES = ["gpipe", "1f1b"]
ROUNDED = allowed(torch.float64, 2 * 8 * 4)  # at most 8 micro-batches in 4 stages; tests with more use integers


@pytest.mark.parametrize("balance", ["memory", "time"])
def test_ten_equal_layers_on_11_and_8_gb_split_6_to_4(balance: partition.Balance) -> None:
    devices = [StageDevice(11 * GIB, 11.0), StageDevice(8 * GIB, 8.0)]
    result = split([0.1] * 10, [GIB // 2] * 10, devices, balance=balance)
    assert isinstance(result, Split)
    assert str(result) == "6 : 4"
    assert [list(part) for part in result.ranges] == [list(range(6)), list(range(6, 10))]


def test_nineteen_equal_layers_are_split_by_memory() -> None:
    """The devices have 11 and 8 GB."""
    assert str(split([1.0] * 19, [GIB // 2] * 19, [StageDevice(11 * GIB), StageDevice(8 * GIB)])) == "11 : 8"


def test_memory_decides_between_equal_times() -> None:
    """With 1 : 2 and with 2 : 1, the slowest stage takes 2 s."""
    large_first, small_first = (
        [StageDevice(4 * GIB), StageDevice(2 * GIB)],
        [StageDevice(2 * GIB), StageDevice(4 * GIB)],
    )
    assert str(split([1.0] * 3, [GIB // 2] * 3, large_first, balance="time")) == "2 : 1"
    assert str(split([1.0] * 3, [GIB // 2] * 3, small_first, balance="time")) == "1 : 2"


@st.composite
def cases(draw: st.DrawFn) -> dict[str, list[int]]:
    num_layers = draw(st.integers(1, 8))
    num_stages = draw(st.integers(1, 4))
    small = st.integers(0, 6)

    def numbers(of: st.SearchStrategy[int], count: int) -> list[int]:
        return draw(st.lists(of, min_size=count, max_size=count))

    return {
        "costs": numbers(small, num_layers),
        "bytes": numbers(small, num_layers),
        "kept": numbers(small, num_layers),
        "in_flight": numbers(st.integers(1, 3), num_stages),
        "memory": numbers(st.integers(1, 30), num_stages),
        "speed": numbers(st.sampled_from([1, 2, 4]), num_stages),
    }


def every_split(num_layers: int, num_stages: int) -> Iterator[tuple[int, ...]]:
    for cuts in itertools.combinations(range(1, num_layers), num_stages - 1):
        yield tuple(stop - start for start, stop in itertools.pairwise([0, *cuts, num_layers]))


def cost_of(case: dict[str, list[int]], sizes: tuple[int, ...], balance: str) -> tuple[float, ...] | None:
    """Return the cost of a split, or None if a device has too little memory."""
    seconds, shares, start = [], [], 0
    for stage, size in enumerate(sizes):
        part = slice(start, start + size)
        used = sum(case["bytes"][part]) + case["in_flight"][stage] * sum(case["kept"][part])
        if used > case["memory"][stage]:
            return None
        seconds.append(sum(case["costs"][part]) / case["speed"][stage])
        shares.append(used / case["memory"][stage])
        start += size
    squares = round(sum(share**2 for share in shares), 9)
    return (max(seconds), max(shares), squares) if balance == "time" else (max(shares), squares)


@pytest.mark.slow
@settings(max_examples=400)
@given(case=cases(), balance=st.sampled_from(["memory", "time"]))
def test_no_other_split_is_better(case: dict[str, list[int]], balance: partition.Balance) -> None:
    devices = [StageDevice(size, speed) for size, speed in zip(case["memory"], case["speed"], strict=True)]
    result = split(
        [float(cost) for cost in case["costs"]],
        case["bytes"],
        devices,
        balance=balance,
        activation_bytes=case["kept"],
        in_flight=case["in_flight"],
    )
    possible = {
        sizes: cost
        for sizes in every_split(len(case["costs"]), len(devices))
        if (cost := cost_of(case, sizes, balance)) is not None
    }
    if not possible:
        assert isinstance(result, Problem)
        return
    assert isinstance(result, Split)
    assert sum(result.sizes) == len(case["costs"])
    assert min(result.sizes) >= 1
    assert possible[result.sizes] == min(possible.values())
    assert all(used <= size for used, size in zip(result.used_bytes, case["memory"], strict=True))


@settings(max_examples=50)
@given(num_layers=st.integers(1, 12), num_stages=st.integers(1, 4), cost=st.floats(0.01, 10))
def test_equal_layers_on_equal_devices_differ_by_one(num_layers: int, num_stages: int, cost: float) -> None:
    if num_layers >= num_stages:
        for balance in ("memory", "time"):
            result = split([cost] * num_layers, [7] * num_layers, [StageDevice(1000)] * num_stages, balance=balance)  # type: ignore[arg-type]
            assert isinstance(result, Split)
            assert max(result.sizes) - min(result.sizes) <= 1


def test_fewer_layers_than_stages_are_refused() -> None:
    problem = split([1.0] * 2, [1] * 2, [StageDevice(GIB)] * 3)
    assert isinstance(problem, Problem)
    assert problem.where == "parallelism=pipeline"
    assert "(3)" in problem.what
    assert "2 ranks" in problem.fix


def test_layers_that_do_not_fit_are_reported() -> None:
    one = split([1.0] * 3, [1, 5 * GIB, 1], [StageDevice(4 * GIB), StageDevice(3 * GIB)])
    assert isinstance(one, Problem)
    assert re.findall(r"layer \d|[\d,.]+ MiB", one.what) == ["layer 1", "5,120.0 MiB", "4,096.0 MiB"]
    together = split([1.0] * 4, [2 * GIB] * 4, [StageDevice(4 * GIB), StageDevice(3 * GIB)])
    assert isinstance(together, Problem)
    assert "8,192.0 MiB" in together.what
    assert together.what.endswith("4,096.0 MiB + 3,072.0 MiB")


@pytest.mark.parametrize(
    ("sizes", "text"), [([2, 2], "add up to the model's 5"), ([5, 0], "at least 1"), ([5], "has 1: [5]")]
)
def test_invalid_splits_are_refused(sizes: list[int], text: str) -> None:
    problem = partition.split_from_sizes(sizes, [1.0] * 5, [1] * 5, [StageDevice(GIB)] * 2)
    assert isinstance(problem, Problem)
    assert text in problem.what


def test_the_table_lists_each_layer_with_device_and_share() -> None:
    costs, sizes = [1.0, 2.0, 1.0], [GIB, 2 * GIB, GIB]
    result = split(costs, sizes, [StageDevice(4 * GIB), StageDevice(2 * GIB)])
    assert isinstance(result, Split)
    lines = partition.format_split(result, ["a", "b", "c"], ["rank 0", "rank 1"], sizes, costs).splitlines()
    assert [line.split() for line in lines] == [
        ["layer", "device", "bytes", "time"],
        ["a", "rank", "0", "1,024.0", "MiB", "25.0%"],
        ["b", "rank", "0", "2,048.0", "MiB", "50.0%"],
        ["=", "2", "layers", "75.0%", "used", "3,072.0", "MiB", "75.0%"],
        ["c", "rank", "1", "1,024.0", "MiB", "25.0%"],
        ["=", "1", "layers", "50.0%", "used", "1,024.0", "MiB", "25.0%"],
    ]


# ---------------------------------------------------------------- simulated time


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("num_devices", [1, 2, 3, 4])
@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_idle_time_of_equal_stages_is_the_ideal_bubble(
    schedule: partition.Schedule, num_devices: int, rounds: int
) -> None:
    count = rounds * num_devices
    seconds = partition.simulated_seconds(schedule, [1.0] * num_devices, [2.0] * num_devices, count)
    result = 1 - 3.0 * count / seconds
    assert result == pytest.approx(ideal_bubble(num_devices, count), abs=ROUNDED)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("num_devices", "count"), [(2, 1), (3, 2), (4, 3), (2, 6), (3, 9), (4, 1)])
def test_each_stage_runs_each_micro_batch_once_per_pass(
    schedule: partition.Schedule, num_devices: int, count: int
) -> None:
    rows = orders(schedule, num_devices, count)
    wanted = itertools.product("FB", range(num_devices), range(count))
    assert sorted(itertools.chain(*rows)) == sorted(wanted)
    for device, row in enumerate(rows):
        assert {stage for _, stage, _ in row} == {device}
        in_flight = itertools.accumulate(1 if kind == "F" else -1 for kind, _, _ in row)
        assert max(in_flight) == max_in_flight(schedule, num_devices, count)[device]


@settings(max_examples=100)
@given(
    seconds=st.lists(st.floats(0.01, 5), min_size=1, max_size=4),
    count=st.integers(1, 8),
    schedule=st.sampled_from(["gpipe", "1f1b"]),
)
def test_pipeline_time_is_bounded_by_stages_and_critical_path(
    seconds: list[float], count: int, schedule: partition.Schedule
) -> None:
    """A pipeline takes at least the time of its slowest stage and of its critical path."""
    back = [2 * second for second in seconds]
    took = partition.simulated_seconds(schedule, seconds, back, count)
    assert took >= max(seconds) * 3 * count * (1 - ROUNDED)
    assert took >= math.fsum(seconds) * 3 * (1 - ROUNDED)
    assert took <= math.fsum(seconds) * 3 * count * (1 + ROUNDED)


def test_stages_have_the_expected_micro_batches_in_flight() -> None:
    """With 1F1B, there is one for each remaining stage, including the stage itself; with GPipe, all are in flight."""
    assert max_in_flight("1f1b", 4, 8) == (4, 3, 2, 1)
    assert max_in_flight("1f1b", 4, 2) == (2, 2, 2, 1)
    assert max_in_flight("gpipe", 3, 8) == (8, 8, 8)
    assert max_in_flight("1f1b", 3, None) == (3, 2, 1)
