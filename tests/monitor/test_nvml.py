"""Tests of the NVML wrapper with the real pynvml, and a stub of the driver library that reads a text file."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from runner.monitor.nvml import METRICS, Gpu, Nvml, decode_throttle_reasons, visible
from tests.nvml_stub import GIB, MIB, PAIR, ROOT, SLICED, T4, NvmlStub, State, gpu

LOOK = """
import dataclasses, json
from runner.monitor.nvml import open_nvml
with open_nvml() as nvml:
    print(json.dumps({
        "why_not": nvml.why_not, "driver": nvml.driver_version, "cuda": nvml.cuda_version, "notes": nvml.notes,
        "gpus": [dataclasses.asdict(gpu) for gpu in nvml.gpus],
        "readings": [nvml.read(gpu) for gpu in nvml.gpus],
        "processes": [
            None if nvml.processes(gpu) is None else [dataclasses.astuple(each) for each in nvml.processes(gpu)]
            for gpu in nvml.gpus
        ],
    }))
"""


def test_properties_readings_and_processes_of_a_t4_are_read(nvml_stub: NvmlStub) -> None:
    seen = nvml_stub.run(LOOK, T4)
    (facts,), (reading,) = seen["gpus"], seen["readings"]

    assert (seen["why_not"], seen["driver"], seen["cuda"], seen["notes"]) == ("", "580.159.03", "13.0", [])
    assert facts["name"] == "Tesla T4"
    assert facts["capability"] == [7, 5]
    assert facts["memory_bytes"] == 15360 * MIB
    assert facts["mig"] is None, "a T4 does not support MIG"
    assert reading == {
        "util_percent": 85,
        "memory_util_percent": 40,
        "memory_used_bytes": 8 * GIB,
        "memory_reserved_bytes": 400 * MIB,
        "memory_total_bytes": 15360 * MIB,
        "memory_free_bytes": (15360 - 8192 - 400) * MIB,
        "temperature_c": 61.0,
        "temperature_limit_c": 93.0,
        "power_w": 54.321,
        "power_limit_w": 70.0,
        "sm_clock_mhz": 1590,
        "memory_clock_mhz": 5000,
        "throttle_reasons": 4,
        "energy_j": 1234.0,
        "pcie_generation": 3,
        "pcie_width": 16,
        "ecc_corrected": 0,
        "ecc_uncorrected": 0,
    }
    assert decode_throttle_reasons(reading["throttle_reasons"]) == ("power limit",)
    assert seen["processes"] == [[[4242, GIB], [77, None]]]


def test_older_drivers_give_the_same_readings(nvml_stub: NvmlStub) -> None:
    """The wrapper calls older functions."""
    new, old = nvml_stub.run(LOOK, T4), nvml_stub.run(LOOK, T4, driver="old")

    assert old["readings"][0].pop("memory_used_bytes") == 8 * GIB + 400 * MIB, (
        "the older function counts reserved memory as used"
    )
    assert new["readings"][0].pop("memory_used_bytes") == 8 * GIB
    assert (old["readings"][0].pop("memory_reserved_bytes"), new["readings"][0].pop("memory_reserved_bytes")) == (
        None,
        400 * MIB,
    )
    assert old == new


def test_different_gpus_are_listed_in_bus_order_with_sizes(nvml_stub: NvmlStub) -> None:
    seen = nvml_stub.run(LOOK, PAIR)

    assert [facts["memory_bytes"] for facts in seen["gpus"]] == [11264 * MIB, 8192 * MIB]
    assert [facts["capability"] for facts in seen["gpus"]] == [[7, 5], [8, 6]]


@pytest.mark.slow_beyond(2)
@pytest.mark.parametrize(
    ("state", "reason"),
    [
        (None, "no NVIDIA driver is installed"),
        ({"err.init": 9}, "driver is not loaded"),
        ({"err.init": 4}, "no permission"),
        ({"err.init": 18}, "restart the machine"),
        ({"err.init": 999}, "failed to start: Unknown Error"),
        ({"count": 0}, "reports no GPU"),
    ],
)
def test_without_nvml_a_reason_is_given(nvml_stub: NvmlStub, state: Any, reason: str) -> None:
    """No GPU is listed."""
    seen = nvml_stub.run(LOOK, state)

    assert reason in seen["why_not"]
    assert seen["gpus"] == []


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("code", [2, 3, 4, 999])
def test_missing_readings_are_none_and_do_not_affect_others(nvml_stub: NvmlStub, code: int) -> None:
    broken: State = T4 | dict.fromkeys(
        [f"0.err.{name}" for name in ("power", "util", "memory_used", "processes")], code
    )
    (healthy,), (reading,) = nvml_stub.run(LOOK, T4)["readings"], nvml_stub.run(LOOK, broken)["readings"]

    assert None not in healthy.values()
    assert {name for name, value in reading.items() if value is None} == {
        "power_w", "util_percent", "memory_util_percent", "memory_used_bytes", "memory_reserved_bytes",
        "memory_total_bytes", "memory_free_bytes",
    }  # fmt: skip


def test_the_drivers_not_available_value_is_no_reading(nvml_stub: NvmlStub) -> None:
    (reading,) = nvml_stub.run(LOOK, T4 | {"0.sm_clock": 0xFFFFFFFF})["readings"]

    assert reading["sm_clock_mhz"] is None


def test_a_lost_gpu_is_reported_without_affecting_others(nvml_stub: NvmlStub) -> None:
    seen = nvml_stub.run(LOOK, PAIR | {"0.err.handle": 15})

    (note,) = seen["notes"]
    assert note.startswith("GPU 0 ")
    assert [facts["name"] for facts in seen["gpus"]] == ["NVIDIA GeForce RTX 3070"]


def test_a_gpu_lost_during_monitoring_is_not_queried_again(nvml_stub: NvmlStub) -> None:
    code = """
import json
from runner.monitor.nvml import open_nvml
from tests.nvml_stub import change
with open_nvml() as nvml:
    gpu = nvml.gpus[0]
    well = nvml.read(gpu)
    change({"0.err.power": 15})
    nvml.read(gpu)
    change({"0.err.power": 0})
    print(json.dumps([well["util_percent"], nvml.read(gpu)["util_percent"], list(nvml.lost.values())]))
"""
    before, after, why = nvml_stub.run(code, T4)

    assert (before, after) == (85, None)
    assert "off the bus" in why[0]


def test_missing_permissions_are_reported(nvml_stub: NvmlStub) -> None:
    code = """
import json
from runner.monitor.nvml import open_nvml
with open_nvml() as nvml:
    nvml.read(nvml.gpus[0])
    print(json.dumps(sorted(nvml.denied[nvml.gpus[0]])))
"""
    assert nvml_stub.run(code, T4 | {"0.err.power": 4, "0.err.util": 3}) == ["power_w"]


def test_each_error_is_reported_once_with_its_gpu(nvml_stub: NvmlStub) -> None:
    code = """
import json
from runner.monitor.nvml import open_nvml
from tests.nvml_stub import change
with open_nvml() as nvml:
    nvml.watch_events(nvml.gpus[1:])
    told = [nvml.events()]
    for events in ("0:8:13,1:8:79", "0:8:13,1:8:79,1:2:0,1:64:1"):
        change({"events": events})
        told += [nvml.events(), nvml.events()]
    print(json.dumps([[(event.gpu.index, event.kind, event.code) for event in each] for each in told]))
"""
    assert nvml_stub.run(code, PAIR | {"event_types": 11}) == [
        [], [[1, "xid", 79]], [], [[1, "ecc uncorrected", 0]], [],
    ]  # fmt: skip


def test_mig_instances_are_found_under_their_gpu(nvml_stub: NvmlStub) -> None:
    (facts,) = nvml_stub.run(LOOK, SLICED)["gpus"]

    assert facts["mig"] is True
    assert [each["mig_name"] for each in facts["instances"]] == [f"MIG-{facts['uuid']}/1/0", f"MIG-{facts['uuid']}/2/0"]
    assert {each["memory_bytes"] for each in facts["instances"]} == {40192 * MIB}


def test_the_placeholder_for_nvml_has_the_same_methods() -> None:
    nvml, stranger = Nvml(why_not="because"), Gpu(0, "GPU-x", "x")

    assert nvml.read(stranger) == {metric.name: None for metric in METRICS}
    assert nvml.events() == []
    nvml.watch_events([stranger])
    assert nvml.processes(stranger) is None
    assert nvml.find("GPU-x") is None
    nvml.close()
    nvml.close()


INSTANCES = tuple(Gpu(0, f"MIG-0000{name}-1111", "cut", mig_name=f"MIG-GPU-c3/{n}/0") for n, name in enumerate("ab"))
BIG, SMALL, CUT = Gpu(0, "GPU-2080aaaa", "x"), Gpu(1, "GPU-3070bbbb", "x"), Gpu(2, "GPU-c3", "x", instances=INSTANCES)


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (None, (BIG, SMALL, CUT)),
        ("0", (BIG,)),
        ("1,0", (SMALL, BIG)),
        (" 1 , 0 ", (SMALL, BIG)),
        ("1abc", (SMALL,)),
        ("", ()),
        ("-1", ()),
        ("0,-1,1", (BIG,)),
        ("0,9,1", (BIG,)),
        ("NoDevFiles", ()),
        ("0,0", ()),
        ("GPU-3070bbbb", (SMALL,)),
        ("GPU-30,GPU-2080aaaa", (SMALL, BIG)),
        ("GPU-", ()),
        ("GPU-30,1", (SMALL,)),
        ("GPU-none,GPU-30", ()),
        ("MIG-0000b", (INSTANCES[1],)),
        ("MIG-0000", ()),
        ("MIG-GPU-c3/0/0", (INSTANCES[0],)),
        ("MIG-GPU-c3/0/0,MIG-0000b", INSTANCES),
    ],
)
def test_cuda_visible_devices_is_interpreted_as_by_cuda(wanted: str | None, expected: tuple[Gpu, ...]) -> None:
    environ = {} if wanted is None else {"CUDA_VISIBLE_DEVICES": wanted}

    assert visible((BIG, SMALL, CUT), environ).gpus == expected


def test_an_index_is_a_guess_if_the_gpus_differ() -> None:
    pair = (Gpu(0, "GPU-2080", "2080 Ti"), Gpu(1, "GPU-3070", "3070"))

    assert "CUDA_DEVICE_ORDER" in visible(pair, {"CUDA_VISIBLE_DEVICES": "0"}).note
    assert visible(pair, {"CUDA_VISIBLE_DEVICES": "0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}).note == ""
    assert visible(pair, {"CUDA_VISIBLE_DEVICES": "GPU-2"}).note == ""
    assert visible(pair[:1], {"CUDA_VISIBLE_DEVICES": "0"}).note == ""


def test_unknown_entries_of_cuda_visible_devices_are_reported() -> None:
    assert "'9'" in visible((BIG, SMALL), {"CUDA_VISIBLE_DEVICES": "0,9"}).note
    for wanted in ("", "-1", "-1,0"):
        assert visible((BIG, SMALL), {"CUDA_VISIBLE_DEVICES": wanted}).note == (
            f"CUDA_VISIBLE_DEVICES={wanted} hides 2 GPUs"
        )
    assert visible((), {"CUDA_VISIBLE_DEVICES": ""}).note == "", "without GPUs, nothing can be hidden"
    assert "hides" not in visible((BIG, SMALL), {"CUDA_VISIBLE_DEVICES": "0,-1"}).note
    assert "twice" in visible((BIG, SMALL), {"CUDA_VISIBLE_DEVICES": "0,0"}).note


def test_the_stub_reads_its_state_in_every_call(nvml_stub: NvmlStub) -> None:
    """This checks the stub itself, because tests in which a GPU changes depend on it."""
    code = """
import json
from runner.monitor.nvml import open_nvml
from tests.nvml_stub import change
nvml = open_nvml()
before = nvml.read(nvml.gpus[0])["util_percent"]
change({"0.util": 7})
print(json.dumps([before, nvml.read(nvml.gpus[0])["util_percent"]]))
"""
    assert nvml_stub.run(code, T4) == [85, 7]


def test_many_processes_are_all_listed(nvml_stub: NvmlStub) -> None:
    many = ",".join(f"{pid}:1" for pid in range(1, 41))
    seen = nvml_stub.run(LOOK, T4 | gpu(0, processes=many))

    assert [pid for pid, _ in seen["processes"][0]] == list(range(1, 41))


def test_querying_gpus_does_not_import_torch() -> None:
    code = "import sys, runner.monitor.nvml as door; door.open_nvml(); assert 'torch' not in sys.modules"

    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
