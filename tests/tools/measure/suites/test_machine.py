"""The rates of suite=machine are work divided by time."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from runner.base.errors import ConfigError
from runner.config.config_files import profile_facts
from runner.config.request import Request
from runner.plan.inventory import GIB, Cpu, Device, Inventory
from runner.tools.doctor import arithmetic
from runner.tools.doctor.findings import CheckContext
from runner.tools.measure import machine_rates
from runner.tools.measure.machine_rates import Rate
from runner.tools.measure.suite import SuiteRequest, screen
from runner.tools.measure.suites import SUITES, machine
from runner.tools.measure.suites.machine import DataSheetPeaks
from tests.rounding import allowed

TASK = Path(__file__).parents[1] / "task_to_measure.py"
CPU = Cpu("a CPU", 1, 1, 4 * GIB)
DEVICE = torch.device("cpu")
H100 = Device("cuda", 0, "NVIDIA H100 80GB HBM3", memory_bytes=80 * GIB, capability=(9, 0))


# ---------------------------------------------------------------- parts


@pytest.fixture
def asked() -> CheckContext:
    return CheckContext(Path(), Path(), "cpu", Inventory((), CPU))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every call take exactly one millisecond."""

    def planted(call: Callable[[], object], device: torch.device) -> float:
        call()
        return 1e-3

    monkeypatch.setattr(arithmetic, "time_call", planted)
    monkeypatch.setattr(arithmetic, "MAX_TIMED_SIDE", 512)


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_matrix_product_rates_are_exact_with_a_simulated_clock(asked: CheckContext) -> None:
    rates = {(rate.name, rate.size): rate.per_s for rate in machine_rates.matmul(asked).rates}

    assert {name for name, _ in rates} >= {"fp32", "bf16", "fp64"}
    for (name, size), rate in rates.items():
        assert rate == pytest.approx(2.0 * size**3 / 1e-3, rel=allowed(torch.float64, 4)), name


@pytest.mark.usefixtures("quick")
def test_a_format_without_kernels_is_skipped_with_the_reason(
    asked: CheckContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(number: Any, *_: Any) -> float:
        if number.name == "fp16":
            raise RuntimeError("not implemented for 'Half'")
        return 1e-3

    monkeypatch.setattr(arithmetic, "time_product", refuses)
    result = machine_rates.matmul(asked)

    assert set(result.skipped) == {"cpu fp16 matmul"}
    assert "'Half'" in result.skipped["cpu fp16 matmul"]
    assert "fp16" not in {rate.name for rate in result.rates}


@pytest.mark.usefixtures("quick")
def test_the_triad_reads_two_arrays_and_writes_one(asked: CheckContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_rates, "MIN_ARRAY_BYTES", machine_rates.MIB)
    monkeypatch.setattr(machine_rates, "cache_bytes", lambda device: 0)
    (rate,) = machine_rates.copies(asked).rates

    assert rate.per_s == 3.0 * machine_rates.MIB / 1e-3


@pytest.mark.usefixtures("quick")
def test_triad_arrays_are_four_times_the_cache_size(asked: CheckContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_rates, "MIN_ARRAY_BYTES", 1)
    monkeypatch.setattr(machine_rates, "cache_bytes", lambda device: 10 * machine_rates.MIB)

    assert machine_rates.triad(CPU.device).size == 40 * machine_rates.MIB


def test_each_last_level_cache_counts_once(asked: CheckContext, tmp_path: Path) -> None:
    """Two cores have separate last-level caches and two cores share one, so there are 3 x 32 MiB."""
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


def test_the_reason_is_listed_if_there_is_no_gpu() -> None:
    broken = dataclasses.replace(H100, usable=False, why_not="its driver does not answer")
    assert machine.skipped_without_gpu(Inventory((broken,), CPU), "auto") == {"GPU": f"{H100.name}: {broken.why_not}"}
    assert list(machine.skipped_without_gpu(Inventory((), CPU), "auto")) == ["GPU"]
    assert machine.skipped_without_gpu(Inventory((H100,), CPU), "auto") == {}
    assert machine.skipped_without_gpu(Inventory((H100,), CPU), "cpu")["GPU"].startswith("device=cpu ")


# ---------------------------------------------------------------- peaks


@pytest.fixture(scope="module")
def peaks() -> DataSheetPeaks:
    return DataSheetPeaks(profile_facts())


def rate_of(part: str, name: str) -> Rate:
    return Rate(part, "cuda:0", name, 1, 1.0)


def test_peak_rates_come_from_the_device_profile(peaks: DataSheetPeaks) -> None:
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
def test_an_unpublished_peak_rate_is_not_guessed(
    peaks: DataSheetPeaks, device: Device, part: str, name: str, why: str
) -> None:
    peak, source = peaks.find(device, rate_of(part, name))

    assert peak is None
    assert why in source


# ---------------------------------------------------------------- the suite


def wanted(folder: Path, *args: str) -> SuiteRequest:
    settings = ("updates=100", "global_batch_size=16", "device=cpu", "backend.threads=1", "task.sleep_ms=0")
    request = Request((*settings, f"output_root={folder / 'outputs'}"), TASK)
    return SuiteRequest(request, args, SUITES["machine"].options, folder, "here-", 10.0, lambda _: None)


def test_typos_are_reported_before_measurements(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean matmul"):
        machine.run(wanted(tmp_path, "matmull"))
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use small sizes, so that the forked processes end quickly."""
    monkeypatch.setattr(arithmetic, "MAX_TIMED_SIDE", 256)
    monkeypatch.setattr(machine_rates, "MIN_ARRAY_BYTES", machine_rates.MIB)
    monkeypatch.setattr(machine_rates, "CACHE_FACTOR", 0)


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_all_limits_are_measured_and_stored(tmp_path: Path) -> None:
    report = machine.run(wanted(tmp_path))

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
def test_a_part_whose_process_dies_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "PART_FUNCTIONS", {**machine.PART_FUNCTIONS, "matmul": _dies})
    report = machine.run(wanted(tmp_path, "matmul", "copies"))

    assert "matmul" in report.skipped
    assert [table.title for table in report.tables] == ["memory and copies"]
