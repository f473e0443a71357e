"""Checks of GPUs join the data of NVML and torch by UUID; missing data produces no findings."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from runner.base.errors import Problem
from runner.monitor.machine_sample import pids_are_of_host
from runner.monitor.nvml import Gpu
from runner.plan.inventory import Cpu, Device, Inventory, match_devices
from runner.tools.doctor import gpu_checks
from runner.tools.doctor.findings import CheckContext, CheckResult
from tests.nvml_stub import DRIVER, GIB, PAIR, SLICED, T4, NvmlStub, State, gpu
from tests.plan.test_inventory import OtherNvml, torch_with

# Runs the checks that do not compute. torch lists the GPUs in the order of SEES.
EXAMINE = """
import json, os, pathlib
from runner.tools.doctor import gpu_checks
from runner.tools.doctor.findings import CheckContext
from runner.plan.inventory import Cpu, Device, Inventory

if "CONTAINER" in os.environ:
    gpu_checks.pids_are_of_host = lambda: False
sees = json.loads(os.environ.get("SEES", "[]"))
devices = tuple(Device("cuda", index, name, uuid, 8 * 2**30) for index, (name, uuid) in enumerate(sees))
inventory = Inventory(devices, Cpu("a CPU", 1, 1, 2**30), "2.13.0", os.environ.get("BUILT"), 91002)
context = CheckContext(pathlib.Path("outputs"), pathlib.Path("."), inventory=inventory)
checks = {"driver": gpu_checks.driver, "processes": gpu_checks.processes, "numbering": gpu_checks.numbering}
found = {name: [finding.to_json() for finding in check(context)] for name, check in checks.items()}
found["versions"] = [finding.to_json() for finding in gpu_checks.versions(CheckContext(
    context.root, context.scratch, inventory=Inventory((), inventory.cpu, "2.13.0", os.environ.get("BUILT"), 91002)))]
print(json.dumps(found))
"""
Told = dict[str, list[dict[str, Any]]]


def run_checks(stub: NvmlStub, state: State | None, **variables: str) -> Told:
    answer: Told = stub.run(EXAMINE, state, **variables)
    return answer


def states(findings: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(each["subject"], each["state"]) for each in findings]


def test_a_power_limit_under_load_is_normal(nvml_stub: NvmlStub, screen: Callable[..., None]) -> None:
    result = run_checks(nvml_stub, T4)["driver"]

    assert [each["state"] for each in result] == ["ok", "ok"]
    screen("\n".join(each["seen"] for each in result))


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize(("bits", "fix"), [(64, "cooling"), (4 + 8, "power supply"), (128, "cables")])
def test_a_throttled_gpu_is_reported_with_advice(nvml_stub: NvmlStub, bits: int, fix: str) -> None:
    t4 = run_checks(nvml_stub, T4 | {"0.throttle": bits})["driver"][1]

    assert (t4["state"], fix in t4["fix"]) == ("warn", True)


def test_missing_readings_are_omitted(nvml_stub: NvmlStub) -> None:
    bare = DRIVER | {"count": 1} | gpu(0, name="Quiet", uuid="GPU-1", memory_total=GIB)
    _, quiet = run_checks(nvml_stub, bare)["driver"]

    assert (quiet["state"], quiet["seen"]) == ("ok", "Quiet")


@pytest.mark.slow
def test_uncorrectable_memory_errors_fail_the_check(nvml_stub: NvmlStub) -> None:
    assert run_checks(nvml_stub, T4 | {"0.ecc_uncorrected": 0})["driver"][1]["state"] == "ok"
    t4 = run_checks(nvml_stub, T4 | {"0.ecc_uncorrected": 3})["driver"][1]
    assert t4["state"] == "FAIL"
    assert re.search(r"\b3 errors\b", t4["seen"])


@pytest.mark.slow
def test_other_processes_are_listed_sorted_by_memory_if_known(
    nvml_stub: NvmlStub,
) -> None:
    crowd = ",".join(f"{4_000_000 + number}:{number * GIB}" for number in range(1, 11))
    (t4,) = run_checks(nvml_stub, T4)["processes"]
    (crowded,) = run_checks(nvml_stub, T4 | {"0.processes": crowd})["processes"]
    (silent,) = run_checks(nvml_stub, {key: value for key, value in T4.items() if key != "0.processes"})["processes"]

    assert (t4["state"], t4["figures"]) == ("warn", {"processes": 2})
    assert t4["seen"].startswith("process 4242")
    assert t4["seen"].endswith("unknown memory")
    *largest, others = crowded["seen"].split("; ")
    assert largest == [f"process {4_000_000 + number}, {number}.0 GiB" for number in (10, 9, 8, 7)]
    assert others == "and 6 more"
    assert silent["state"] == "skip"


@pytest.mark.slow
def test_an_empty_process_list_does_not_mean_an_idle_gpu(nvml_stub: NvmlStub) -> None:
    def alone(**values: object) -> dict[str, Any]:
        state = {key: value for key, value in T4.items() if key not in ("0.memory_used", "0.util")}
        (result,) = run_checks(nvml_stub, state | gpu(0, processes="", **values))["processes"]
        return result

    idle, full, busy = (
        alone(memory_used=100 * 2**20, util=0), alone(memory_used=8 * GIB, util=0), alone(memory_used=0, util=85)
    )  # fmt: skip
    assert [each["state"] for each in (idle, full, busy)] == ["ok", "warn", "warn"]
    assert full["seen"].startswith("8.0 GiB ")
    assert "85 % busy" in busy["seen"]
    bare = {key: value for key, value in T4.items() if "memory" not in key and key != "0.util"}
    assert run_checks(nvml_stub, bare | {"0.processes": ""})["processes"][0]["state"] == "skip"


@pytest.mark.slow
def test_processes_are_named_only_in_the_same_pid_namespace(nvml_stub: NvmlStub) -> None:
    state = T4 | {"0.processes": f"{os.getpid()}:{GIB}"}
    (inside,) = run_checks(nvml_stub, state, CONTAINER="1")["processes"]
    (outside,) = run_checks(nvml_stub, state)["processes"]

    assert inside["seen"] == f"process {os.getpid()}, 1.0 GiB"
    assert pids_are_of_host() == (psutil.Process().name() in outside["seen"])


@pytest.mark.slow
def test_gpus_with_differing_indices_are_identified_by_uuid(nvml_stub: NvmlStub) -> None:
    slow, fast = (PAIR["0.name"], PAIR["0.uuid"]), (PAIR["1.name"], PAIR["1.uuid"])
    turned = run_checks(nvml_stub, PAIR, SEES=json.dumps([fast, slow]))["numbering"]
    same = run_checks(nvml_stub, PAIR, SEES=json.dumps([slow, fast]))["numbering"]

    assert states(turned) == [("cuda:0", "warn"), ("cuda:1", "warn")]
    assert re.match(rf"cuda:0 .* is GPU 1 .*{PAIR['1.uuid']}$", turned[0]["seen"])
    assert turned[0]["fix"].split() == ["export", "CUDA_DEVICE_ORDER=PCI_BUS_ID"]
    assert states(same) == [("", "ok")]
    by_bus = run_checks(nvml_stub, PAIR, SEES=json.dumps([fast, slow]), CUDA_DEVICE_ORDER="PCI_BUS_ID")["numbering"]
    assert "CUDA_VISIBLE_DEVICES=" in by_bus[0]["fix"]


@pytest.mark.slow
def test_an_invalid_entry_of_cuda_visible_devices_is_reported(nvml_stub: NvmlStub) -> None:
    for wanted in ("1,7", "GPU-9999", "0,0"):
        *_, last = run_checks(nvml_stub, PAIR, CUDA_VISIBLE_DEVICES=wanted)["numbering"]
        assert last["state"] == "warn"
        assert wanted in last["seen"]


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize(
    ("built", "state", "expected"),
    [
        ("13.0", "ok", "supports up to 13.0"),
        ("12.8", "ok", ""),
        ("13.1", "warn", "(PTX)"),
        ("14.0", "FAIL", "supports CUDA 14.0"),
    ],
)
def test_the_driver_must_support_the_cuda_version_of_torch(
    nvml_stub: NvmlStub, built: str, state: str, expected: str
) -> None:
    cuda, cudnn = run_checks(nvml_stub, T4, BUILT=built)["versions"]

    assert cuda["state"] == state
    assert expected in cuda["seen"] + cuda["fix"] + cuda["why"]
    assert "http" not in cuda["fix"]
    assert (cudnn["state"], cudnn["seen"]) == ("ok", "9.10.2 (used by torch 2.13.0)")


def test_a_machine_without_a_gpu_has_nothing_to_fix(nvml_stub: NvmlStub) -> None:
    for findings in run_checks(nvml_stub, None).values():
        assert {each["state"] for each in findings} == {"skip"}


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize(("error", "expected"), [(9, "not loaded"), (4, "no permission"), (18, "different versions")])
def test_an_installed_driver_that_does_not_respond_fails(nvml_stub: NvmlStub, error: int, expected: str) -> None:
    (driver,) = run_checks(nvml_stub, DRIVER | {"err.init": error})["driver"]

    assert driver["state"] == "FAIL"
    assert expected in driver["seen"]
    assert "modprobe" in driver["fix"]


def test_only_a_lost_gpu_fails(nvml_stub: NvmlStub) -> None:
    driver, lost, other = run_checks(nvml_stub, PAIR | {"0.err.uuid": 15})["driver"]

    assert (driver["state"], lost["state"], other["state"]) == ("ok", "FAIL", "ok")
    assert lost["seen"].startswith("GPU 0 ")
    assert other["subject"] == "GPU 1"


def test_a_lost_single_gpu_is_not_a_driver_problem(nvml_stub: NvmlStub) -> None:
    (lost,) = run_checks(nvml_stub, T4 | {"0.err.all": 15})["driver"][-1:]

    assert (lost["state"], "modprobe" in lost["fix"]) == ("FAIL", False)
    assert lost["seen"].startswith("GPU 0 ")


def test_processes_of_mig_instances_are_listed(nvml_stub: NvmlStub) -> None:
    subjects = [each["subject"] for each in run_checks(nvml_stub, SLICED)["processes"]]
    assert subjects == ["GPU 0", SLICED["0.mig.0.uuid"], SLICED["0.mig.1.uuid"]]


def test_gpus_without_a_selected_mig_instance_are_skipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """CUDA makes only one instance of one GPU visible to a process. Other GPUs are not a problem."""
    instance = Gpu(0, "MIG-77aa", "NVIDIA A100 MIG 3g.40gb", 40 * GIB, (8, 0))
    split = [
        Gpu(0, "GPU-one", "NVIDIA A100", 80 * GIB, (8, 0), mig=True, instances=(instance,)),
        Gpu(1, "GPU-two", "NVIDIA A100", 80 * GIB, (8, 0), mig=True),
    ]
    devices, notes = match_devices(OtherNvml(split), torch_with(instance), {})
    inventory = Inventory(devices, Cpu("a CPU", 1, 1, GIB), "2.13.0", "13.0", 91002, notes=notes)
    monkeypatch.setattr(gpu_checks, "take_inventory", lambda: inventory)
    found = [each for each in gpu_checks.gpus(CheckContext(tmp_path, tmp_path)) if isinstance(each, CheckResult)]

    assert [each.state for each in found] == ["ok", "skip"]


def test_compilers_are_checked_once(tmp_path: Path) -> None:
    missing = Problem("needs a compiler", fix="install it")
    new, old = (Device("cuda", index, "a GPU", capability=(7 - index, 0)) for index in (0, 1))

    def check(*devices: Device, without: Problem | None = None, device: str = "auto") -> list[tuple[str, str]]:
        inventory = Inventory(devices, Cpu("a CPU", 1, 1, GIB), no_cpu_compiler=missing, no_gpu_compiler=without)
        context = CheckContext(tmp_path, tmp_path, device, inventory)
        return [(each.state, each.fix) for each in gpu_checks.compiler(context)]

    assert check(without=missing) == [("skip", "")]
    assert check(new, without=missing, device="cpu") == [("skip", "")]
    assert check(new, new) == [("ok", "")]
    assert check(new, new, without=missing) == [("warn", missing.fix)]
    assert check(new, old, without=missing) == [("warn", missing.fix), ("warn", "use compile=off")]
