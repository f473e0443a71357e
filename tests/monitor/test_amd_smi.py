"""AMD GPUs are read through AMD SMI with the same methods as through NVML; missing readings are None, never 0."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from runner.base.gpu_facts import TorchDevice, TorchView
from runner.monitor import gpu_driver
from runner.monitor.amd_smi import AmdSmi, open_amd_smi
from runner.monitor.gpu_driver import open_driver
from runner.monitor.machine_sample import Gpus, Host
from runner.monitor.nvml import METRICS, GpuProcess, Nvml
from runner.plan.inventory import match_devices
from runner.tools.doctor import gpu_checks
from runner.tools.doctor.findings import CheckContext

GIB, MIB = 2**30, 2**20
ADDRESS = "0000:C1:00.0"


class SmiError(Exception):
    """Substitute for amdsmi.AmdSmiException."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code

    def get_error_code(self) -> int:
        return self.code


def raise_error(code: int) -> Any:
    def query(*_: object) -> None:
        raise SmiError(code)

    return query


def fake(**changes: Any) -> types.ModuleType:
    """Return a module `amdsmi` with one MI210. `changes` replaces its functions; None removes one."""
    module = types.ModuleType("amdsmi")
    temperatures = {("EDGE", "CURRENT"): 48, ("EDGE", "CRITICAL"): 100}
    functions: dict[str, Any] = {
        "init": lambda: None,
        "shut_down": lambda: None,
        "get_processor_handles": lambda: ["card"],
        "get_gpu_device_bdf": lambda card: ADDRESS,
        "get_gpu_asic_info": lambda card: {"market_name": "AMD Instinct MI210"},
        "get_gpu_driver_info": lambda card: {"driver_version": "6.16.6"},
        "get_gpu_vram_usage": lambda card: {"vram_total": 65536, "vram_used": 16384},
        "get_gpu_activity": lambda card: {"gfx_activity": 93, "umc_activity": 41, "mm_activity": "N/A"},
        "get_power_info": lambda card: {"current_socket_power": "N/A", "average_socket_power": 251},
        "get_temp_metric": lambda card, sensor, metric: temperatures[sensor, metric],
        "get_clock_info": lambda card, kind: {"clk": {"GFX": 1700, "MEM": 1600}[kind]},
        "get_energy_count": lambda card: {"energy_accumulator": 2_000_000, "counter_resolution": 15.259},
        "get_gpu_total_ecc_count": lambda card: {"correctable_count": 0, "uncorrectable_count": 3},
        "get_gpu_process_list": lambda card: [{"name": "python", "pid": 77, "mem": GIB}, {"pid": 78, "mem": "N/A"}],
    }
    for name, function in {**functions, **changes}.items():
        if function is not None:
            setattr(module, f"amdsmi_{name}", function)
    attributes = {
        "AmdSmiException": SmiError,
        "AmdSmiTemperatureType": types.SimpleNamespace(EDGE="EDGE", HOTSPOT="HOTSPOT"),
        "AmdSmiTemperatureMetric": types.SimpleNamespace(CURRENT="CURRENT", CRITICAL="CRITICAL"),
        "AmdSmiClkType": types.SimpleNamespace(GFX="GFX", MEM="MEM"),
    }
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def open_smi(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> AmdSmi:
    monkeypatch.setitem(sys.modules, "amdsmi", fake(**changes))
    result = open_amd_smi()
    assert result is not None
    return result


def test_an_amd_gpu_has_the_same_readings_as_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_smi(monkeypatch) as smi:
        (card,) = smi.gpus
        reading = smi.read(card)

    assert (card.name, card.memory_bytes, smi.driver_version) == ("AMD Instinct MI210", 64 * GIB, "6.16.6")
    assert {name: value for name, value in reading.items() if value is not None} == {
        "util_percent": 93, "memory_util_percent": 41, "memory_used_bytes": 16 * GIB, "memory_free_bytes": 48 * GIB,
        "memory_total_bytes": 64 * GIB, "temperature_c": 48, "temperature_limit_c": 100, "power_w": 251,
        "energy_j": pytest.approx(2 * 15.259), "sm_clock_mhz": 1700, "memory_clock_mhz": 1600, "ecc_corrected": 0,
        "ecc_uncorrected": 3,
    }  # fmt: skip
    assert reading.keys() == {metric.name for metric in METRICS}


def test_processes_are_listed_with_their_memory_if_known(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_smi(monkeypatch) as smi:
        assert smi.processes(smi.gpus[0]) == (GpuProcess(77, GIB), GpuProcess(78, None))
    with open_smi(monkeypatch, get_gpu_process_list=raise_error(10)) as smi:
        assert smi.processes(smi.gpus[0]) is None


@pytest.mark.parametrize("answer", [raise_error(2), lambda card: {}, lambda card: {"gfx_activity": "N/A"}, None])
def test_missing_readings_are_none_never_0(answer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_smi(monkeypatch, get_gpu_activity=answer) as smi:
        reading = smi.read(smi.gpus[0])
        assert reading["util_percent"] is None
        assert reading["power_w"] == 251
        assert not smi.denied


def test_the_largest_integer_is_not_a_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {"correctable_count": 2**64 - 1, "uncorrectable_count": 0}
    with open_smi(monkeypatch, get_gpu_total_ecc_count=lambda card: counts) as smi:
        result = smi.read(smi.gpus[0], ["ecc_corrected", "ecc_uncorrected"])
    assert result == {"ecc_corrected": None, "ecc_uncorrected": 0}


def test_the_hot_spot_replaces_a_missing_edge_sensor(monkeypatch: pytest.MonkeyPatch) -> None:
    def sensors(card: object, sensor: str, metric: str) -> int:
        if sensor == "EDGE":
            raise SmiError(2)
        return 57

    with open_smi(monkeypatch, get_temp_metric=sensors) as smi:
        assert smi.read(smi.gpus[0], ["temperature_c"]) == {"temperature_c": 57}


def test_missing_permissions_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_smi(monkeypatch, get_power_info=raise_error(10)) as smi:
        assert smi.read(smi.gpus[0], ["power_w"]) == {"power_w": None}
        assert smi.denied == {smi.gpus[0]: {"power_w"}}


def test_without_the_package_or_the_driver_nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "amdsmi", None)
    assert open_amd_smi() is None
    monkeypatch.setitem(sys.modules, "amdsmi", fake(init=raise_error(34)))
    assert open_amd_smi() is None
    monkeypatch.setitem(sys.modules, "amdsmi", fake(get_processor_handles=list))
    with open_driver() as nvml:
        assert "AMD" not in nvml.why_not


def test_torchs_gpu_is_found_by_its_pci_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """HIP and AMD SMI report different UUIDs for the same GPU."""
    view = TorchView(
        "2.13.0+rocm",
        rocm=True,
        devices=(TorchDevice("AMD Instinct MI210", ADDRESS.lower(), 64 * GIB, None, "gfx90a", 50 * GIB),),
    )
    with open_smi(monkeypatch) as smi:
        (device,), notes = match_devices(smi, view, {})
        assert (device.uuid, device.free_bytes) == (smi.gpus[0].uuid, 48 * GIB)
        assert smi.find(device.uuid) == smi.gpus[0]
    with open_smi(monkeypatch, get_gpu_vram_usage=raise_error(2)) as smi:
        (device,), _ = match_devices(smi, view, {})
    assert device.free_bytes == 50 * GIB, "the free memory must be the one that torch reports"
    assert not notes


@pytest.fixture
def no_nvidia(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_driver, "open_nvml", lambda: Nvml(None, "no NVIDIA driver"))


def test_monitor_reads_an_amd_gpu(no_nvidia: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "amdsmi", fake(get_power_info=raise_error(10)))
    with gpu_driver.open_driver() as smi:
        gpus = Gpus(smi, smi.gpus, Host().process_tree)
        readings = gpus.sample()
    assert [user.pid for user in gpus.users[0]] == [77, 78]
    assert (readings["gpu0/util"], readings["gpu0/memory_gib"], readings["gpu0/ecc_uncorrected"]) == (93, 16, 3)
    assert "gpu0/power_w" not in readings


def test_doctor_checks_an_amd_gpu(no_nvidia: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "amdsmi", fake())
    context = CheckContext(tmp_path, tmp_path)
    result = [*gpu_checks.driver(context), *gpu_checks.processes(context)]
    assert [(each.subject, each.state) for each in result] == [("", "ok"), ("GPU 0", "FAIL"), ("GPU 0", "warn")]
    assert "3 errors" in result[1].seen
    text = " ".join(f"{each.seen} {each.fix}" for each in result[:2])
    assert not re.search("nvidia|cuda|xid", text, re.IGNORECASE), "terms of NVIDIA are used for an AMD GPU"
