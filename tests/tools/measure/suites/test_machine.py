"""suite=machine: rates are work divided by time."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from runner.base.errors import ConfigError
from runner.commands import benchmark
from runner.config.config_files import profile_facts
from runner.config.request import Request
from runner.plan.inventory import GIB, Cpu, Device, Inventory
from runner.tools.doctor import arithmetic
from runner.tools.measure import machine_rates
from runner.tools.measure.machine_rates import (
    MachineOperation,
    MachineRequest,
    Rate,
    fastest_sizes,
    measure_interleaved,
)
from runner.tools.measure.suite import SuiteRequest, screen
from runner.tools.measure.suites import SUITES, machine
from runner.tools.measure.suites.machine import DataSheetPeaks
from tests.rounding import allowed

TASK = Path(__file__).parents[1] / "task_to_measure.py"
CPU = Cpu("a CPU", 1, 1, 4 * GIB)
DEVICE = torch.device("cpu")
H100 = Device("cuda", 0, "NVIDIA H100 80GB HBM3", memory_bytes=80 * GIB, capability=(9, 0))


def turn(once: Callable[[], float], name: str = "fp32", size: int = 1, amount: float = 1.0) -> MachineOperation:
    return MachineOperation("matmul", "cpu", name, size, amount, once)


def taking(*seconds: float) -> Callable[[], float]:
    each = itertools.cycle(seconds)
    return lambda: next(each)


# ---------------------------------------------------------------- interleaving


@pytest.mark.parametrize(("args", "meant"), [("round=3", "rounds"), ("suite=machine round=3", "rounds")])
def test_a_typo_may_refer_to_a_key_of_the_suite(args: str, meant: str) -> None:
    with pytest.raises(ConfigError) as raised:
        benchmark.run(args.split())
    (problem,) = raised.value.problems
    assert problem.fix == f"did you mean {meant}?"


def test_a_rate_is_work_over_time() -> None:
    rates, failed = measure_interleaved([turn(taking(0.5), amount=2.0 * 1024**3)], rounds=5, seconds=60)

    assert failed == {}
    assert rates[0].per_s == (4.0 * 1024**3,) * 5


def test_median_and_quartiles_are_reported() -> None:
    rates, _ = measure_interleaved([turn(taking(1.0, 0.5, 0.25, 0.2, 0.1))], rounds=5, seconds=60)

    assert rates[0].median == 4.0
    assert rates[0].quartiles == (2.0, 5.0)


def test_the_fastest_size_counts() -> None:
    sizes = [turn(taking(1.0), size=256, amount=1.0), turn(taking(1.0), size=512, amount=8.0)]

    (rate,) = fastest_sizes(measure_interleaved(sizes, rounds=3, seconds=60)[0])

    assert (rate.size, rate.median) == (512, 8.0)


def test_variants_are_interleaved_in_random_order() -> None:
    played: list[str] = []

    def once(name: str) -> float:
        played.append(name)
        return 1.0

    names = "abcdef"
    measure_interleaved([turn(lambda name=name: once(name), name) for name in names], rounds=6, seconds=60)  # type: ignore[misc]

    rounds = ["".join(played[start : start + len(names)]) for start in range(0, len(played), len(names))]
    assert all(sorted(each) == list(names) for each in rounds), "each is part of each round"
    assert len(set(rounds)) > 1


def test_a_failing_part_is_skipped_with_its_reason() -> None:
    what = "\"addmm_impl_cpu_\" not implemented for 'Half'"

    def fails() -> float:
        raise RuntimeError(f"{what}\nand a stack")

    rates, failed = measure_interleaved([turn(fails, "fp16"), turn(taking(1.0), "fp32")], rounds=3, seconds=60)

    assert failed == {"cpu fp16": what}
    assert [rate.name for rate in rates] == ["fp32"]


def test_a_failing_size_does_not_affect_others() -> None:
    def no_memory() -> float:
        raise torch.OutOfMemoryError("no memory is left")

    rates, failed = measure_interleaved([turn(no_memory, size=512), turn(taking(1.0), size=256)], rounds=3, seconds=60)

    assert ([rate.size for rate in rates], failed) == ([256], {})


def test_a_small_budget_still_makes_a_few_rounds() -> None:
    rates, _ = measure_interleaved([turn(taking(1.0))], rounds=50, seconds=0.0)

    assert len(rates[0].per_s) == machine_rates.MIN_ROUNDS


# ---------------------------------------------------------------- the parts


@pytest.fixture
def asked(tmp_path: Path) -> MachineRequest:
    return MachineRequest(Inventory((), CPU), "cpu", 3)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call takes exactly one millisecond."""

    def planted(call: Callable[[], object], device: torch.device) -> float:
        call()
        return 1e-3

    monkeypatch.setattr(arithmetic, "time_call", planted)
    monkeypatch.setattr(machine_rates, "MAX_SIDE", 512)


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_products_by_a_planted_clock_have_the_exact_rate(asked: MachineRequest) -> None:
    rates = {(rate.name, rate.size): rate.median for rate in machine_rates.matmul(asked, 60.0).rates}

    assert {name for name, _ in rates} >= {"fp32", "bf16", "fp64"}
    for (name, size), rate in rates.items():
        assert rate == pytest.approx(2.0 * size**3 / 1e-3, rel=allowed(torch.float64, 4)), name


@pytest.mark.usefixtures("quick")
def test_a_format_without_kernels_is_skipped_with_the_reason(
    asked: MachineRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(number: Any, *_: Any) -> float:
        if number.name == "fp16":
            raise RuntimeError("not implemented for 'Half'")
        return 1e-3

    monkeypatch.setattr(machine_rates, "time_product", refuses)
    result = machine_rates.matmul(asked, 60.0)

    assert set(result.skipped) == {"cpu fp16 matmul"}
    assert "'Half'" in result.skipped["cpu fp16 matmul"]
    assert "fp16" not in {rate.name for rate in result.rates}


@pytest.mark.usefixtures("quick")
def test_the_triad_reads_two_arrays_and_writes_one(asked: MachineRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_rates, "MIN_ARRAY_BYTES", machine_rates.MIB)
    monkeypatch.setattr(machine_rates, "cache_bytes", lambda device: 0)
    (rate,) = machine_rates.copies(asked, 60.0).rates

    assert rate.median == 3.0 * machine_rates.MIB / 1e-3


def test_an_array_of_the_triad_is_four_times_the_cache(asked: MachineRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_rates, "MIN_ARRAY_BYTES", 1)
    monkeypatch.setattr(machine_rates, "cache_bytes", lambda device: 10 * machine_rates.MIB)

    assert machine_rates.triad(asked.inventory.cpu.device).size == 40 * machine_rates.MIB


def test_the_last_caches_of_all_cores_count_each_once(asked: MachineRequest, tmp_path: Path) -> None:
    """Two cores have separate last-level caches, and two share one: 3 x 32 MiB."""
    kinds = {"index0": ("1", "48K", "{core}"), "index2": ("3", "32M", "{shared}")}
    for core, shared in {0: "0", 1: "1", 2: "2-3", 3: "2-3"}.items():
        for name, values in kinds.items():
            index = tmp_path / f"sys/devices/system/cpu/cpu{core}/cache" / name
            index.mkdir(parents=True)
            for file, value in zip(("level", "size", "shared_cpu_list"), values, strict=True):
                (index / file).write_text(value.format(core=core, shared=shared) + "\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine_rates, "affinity", lambda: {0, 1, 2, 3})
        assert machine_rates.cache_bytes(torch.device("cpu"), tmp_path) == 96 * machine_rates.MIB
        patch.setattr(machine_rates, "affinity", lambda: {2})
        assert machine_rates.cache_bytes(torch.device("cpu"), tmp_path) == 32 * machine_rates.MIB
    assert machine_rates.cache_bytes(torch.device("cpu"), tmp_path / "none") == 0


def test_without_a_gpu_all_that_needs_one_is_listed_with_the_reason() -> None:
    broken = dataclasses.replace(H100, usable=False, why_not="its driver does not answer")
    skipped = machine.skipped_without_gpu(["matmul", "copies"], Inventory((broken,), CPU), "auto")

    assert {"GPU bf16 matmul", "GPU fp64 matmul", "device to device"} <= set(skipped)
    assert set(skipped.values()) == {f"{H100.name}: {broken.why_not}"}
    assert len(set(machine.skipped_without_gpu(["matmul"], Inventory((), CPU), "auto").values())) == 1
    assert machine.skipped_without_gpu(["matmul", "copies"], Inventory((H100,), CPU), "auto") == {}
    messages = machine.skipped_without_gpu(["matmul"], Inventory((H100,), CPU), "cpu")
    assert all(why.startswith("device=cpu ") for why in messages.values())


# ---------------------------------------------------------------- peaks


@pytest.fixture(scope="module")
def peaks() -> DataSheetPeaks:
    return DataSheetPeaks(profile_facts())


def rate_of(part: str, name: str) -> Rate:
    return Rate(part, "cuda:0", name, 1, (1.0,))


def test_a_peak_comes_from_the_profile_of_this_device_with_its_source(peaks: DataSheetPeaks) -> None:
    facts = profile_facts()["h100"]["devices"][0]

    peak, source = peaks.find(H100, rate_of("matmul", "bf16"))
    assert peak == facts["bf16_tensor_tflops"] * 1e12
    assert facts["source"]["bf16_tensor_tflops"] in source
    peak, _ = peaks.find(H100, rate_of("copies", "memory, triad"))
    assert peak == facts["memory_bandwidth_gb_s"] * 1e9


@pytest.mark.parametrize(
    ("device", "part", "name", "why"),
    [
        (CPU.device, "matmul", "fp32", "not reported here"),
        (H100, "matmul", "fp64", "does not state it"),
        (H100, "copies", "host to device, pinned", "does not state it"),
        (dataclasses.replace(H100, name="NVIDIA H100 PCIe"), "matmul", "bf16", "no hardware profile for"),
    ],
)
def test_an_unpublished_peak_is_not_guessed(
    peaks: DataSheetPeaks, device: Device, part: str, name: str, why: str
) -> None:
    peak, source = peaks.find(device, rate_of(part, name))

    assert peak is None
    assert why in source


# ---------------------------------------------------------------- the suite


def wanted(folder: Path, *args: str, **options: str) -> SuiteRequest:
    settings = ("updates=100", "global_batch_size=16", "device=cpu", "backend.threads=1", "task.sleep_ms=0")
    request = Request((*settings, f"output_root={folder / 'outputs'}"), TASK)
    return SuiteRequest(request, args, {**SUITES["machine"].options, **options}, folder, "here-", 10.0, lambda _: None)


@pytest.mark.parametrize(
    ("args", "options", "messages"),
    [
        (("matmull",), {}, "did you mean matmul"),
        ((), {"rounds": "0"}, "must be integers from 1 on"),
    ],
)
def test_typos_are_reported_before_anything_is_measured(
    tmp_path: Path, args: tuple[str, ...], options: dict[str, str], messages: str
) -> None:
    with pytest.raises(ConfigError, match=messages):
        machine.run(wanted(tmp_path, *args, **options))
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use small sizes, so that the forked processes end quickly."""
    monkeypatch.setattr(machine_rates, "MAX_SIDE", 256)
    monkeypatch.setattr(machine_rates, "MIN_ARRAY_BYTES", machine_rates.MIB)
    monkeypatch.setattr(machine_rates, "CACHE_FACTOR", 0)


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_all_limits_are_measured_and_stored(tmp_path: Path) -> None:
    report = machine.run(wanted(tmp_path, rounds="3"))

    assert {table.title.split()[0] for table in report.tables} == {"products", "memory"}
    assert report.headline.startswith("cpu: ")
    kept = json.loads((tmp_path / "here-machine.json").read_text())
    assert kept["suite"] == "machine"
    assert kept["date"].endswith("UTC")
    assert kept["hardware"]["inventory"]["torch_version"]
    assert any(line.startswith("not measured") for line in screen(report))


def _dies(*_: Any) -> Any:
    import os

    os._exit(9)


@pytest.mark.usefixtures("small")
def test_a_part_whose_process_dies_is_skipped_and_the_others_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "PART_FUNCTIONS", {**machine.PART_FUNCTIONS, "matmul": _dies})
    report = machine.run(wanted(tmp_path, "matmul", "copies", rounds="3"))

    assert "matmul" in report.skipped
    assert [table.title for table in report.tables] == ["memory and copies"]
