"""Faulty GPUs as the monitor, the summary, the doctor and the inventory report them."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from tests.nvml_stub import GIB, MIB, PAIR, SLICED, T4, NvmlStub, State, gpu

# Sample the GPUs twice as the monitor does, with THEN in between, then produce the other reports.
EXAMINE = """
import json, os, pathlib
from runner.monitor import machine_sample
from runner.monitor.alerts import AlertMonitor
from runner.monitor.health_rules import assess_health
from runner.monitor.machine_sample import Gpus, ProcessTree
from runner.monitor.nvml import open_nvml, visible
from runner.monitor.samples import SampledGpu, SampleTally
from runner.plan.inventory import Cpu, Inventory, match_devices
from runner.base.gpu_facts import TorchView
from runner.tools.doctor import gpu_checks
from runner.tools.doctor.findings import CheckContext

from tests.nvml_stub import change

alerts, readings, tally = [], [], SampleTally()
Gpus.SELDOM_S = Gpus.TURN_S = 0.0
if "IN_CONTAINER" in os.environ:
    machine_sample.pids_are_of_host = lambda: False
with open_nvml() as nvml:
    chosen = visible(nvml.gpus).gpus
    nvml.watch_events(chosen)
    tree = ProcessTree(int(os.environ.get("ROOT", os.getpid())))
    gpus, watching = Gpus(nvml, chosen, tree), AlertMonitor(nvml, chosen)
    for changed in ({}, json.loads(os.environ["THEN"])):
        change(changed)
        readings.append(gpus.sample())
        tally.add("train", 1.0, readings[-1])
        alerts += watching.check(readings[-1], gpus.users, nvml.events())
    devices = {f"gpu{at}": SampledGpu(gpu.name, gpu.uuid) for at, gpu in enumerate(chosen)}
    verdict = assess_health(tally.summary(devices, [alert.text for alert in alerts]), alerts)
context = CheckContext(pathlib.Path("outputs"), pathlib.Path("."), inventory=Inventory((), Cpu("a CPU", 1, 1, 2**30)))
checks = (gpu_checks.driver, gpu_checks.processes, gpu_checks.numbering)
with open_nvml() as nvml:
    listed, notes = match_devices(nvml, TorchView("2.13.0", cuda_version="13.0"), os.environ)
print(json.dumps({
    "alerts": [[alert.kind, alert.facts.get("device"), alert.text] for alert in alerts],
    "readings": readings,
    "verdicts": [[each.level, each.subject, each.message] for each in verdict],
    "doctor": {check.__name__: [finding.to_json() for finding in check(context)] for check in checks},
    "inventory": [[device.index, device.uuid, device.usable, device.why_not] for device in listed],
    "notes": notes,
}))
"""
Seen = dict[str, Any]


def examine(stub: NvmlStub, state: State, then: State | None = None, **variables: str) -> Seen:
    seen: Seen = stub.run(EXAMINE, state, THEN=json.dumps(then or {}), **variables)
    return seen


def kinds(seen: Seen) -> list[tuple[str, str]]:
    return [(kind, device) for kind, device, _ in seen["alerts"]]


QUIET = {"0.throttle": 0, "0.processes": "", "1.processes": ""}
BY_BUS = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


@pytest.mark.slow
def test_a_lost_gpu_is_reported_by_every_command(nvml_stub: NvmlStub) -> None:
    """The lost GPU has no readings."""
    lost: State = {f"1.err.{name}": 15 for name in ("power", "util", "memory_total", "temperature", "sm_clock")}
    seen = examine(nvml_stub, PAIR | QUIET, lost, **BY_BUS)

    assert kinds(seen) == [("lost", "gpu1")]
    before, after = seen["readings"]
    assert "gpu1/util" in before
    assert not [name for name in after if name.startswith("gpu1/")]
    assert after["gpu0/util"] == 90
    assert ["high", "GPU 1 lost"] in [each[:2] for each in seen["verdicts"]]
    assert not [subject for _, subject, _ in seen["verdicts"] if subject in ("GPU 1 utilization", "GPU 1 memory")]
    states = {each["subject"]: each["state"] for each in seen["doctor"]["driver"]}
    assert (states["GPU 0"], states["GPU 1"]) == ("ok", "FAIL")
    why_not = {index: why_not for index, _, _, why_not in seen["inventory"]}
    assert "bus" in why_not[1]
    assert "bus" not in why_not[0]


@pytest.mark.slow
def test_each_driver_error_is_one_alert_and_one_verdict(nvml_stub: NvmlStub) -> None:
    events = {"event_types": 11}
    seen = examine(nvml_stub, PAIR | QUIET | events, {"events": "0:8:79,0:8:79,1:2:0"}, **BY_BUS)

    assert kinds(seen) == [("xid", "gpu0"), ("ecc", "gpu1")]
    high = [subject for level, subject, _ in seen["verdicts"] if level == "high"]
    assert sorted(high) == ["GPU 0 error", "GPU 1 memory errors"]


@pytest.mark.slow
def test_a_memory_error_reported_twice_is_one_alert(nvml_stub: NvmlStub) -> None:
    """The counter and an event report the error."""
    seen = examine(nvml_stub, T4 | QUIET | {"event_types": 11}, {"0.ecc_uncorrected": 2, "events": "0:2:0"})

    assert kinds(seen) == [("ecc", "gpu0")]
    assert [subject for level, subject, _ in seen["verdicts"] if level == "high"] == ["GPU 0 memory errors"]
    (card,) = [each for each in seen["doctor"]["driver"] if each["subject"] == "GPU 0"]
    assert card["state"] == "FAIL"


@pytest.mark.slow
def test_counters_without_permission_are_unmonitored(nvml_stub: NvmlStub) -> None:
    denied = {f"0.err.{name}": 4 for name in ("power", "energy", "ecc_uncorrected", "events")}
    seen = examine(nvml_stub, T4 | QUIET | {"event_types": 11} | denied)

    assert kinds(seen) == [("denied", "gpu0")]
    (text,) = [text for _, _, text in seen["alerts"]]
    for name in ("power_w", "energy_j", "ecc_uncorrected", "XID"):
        assert name in text
    assert not {"gpu0/power_w", "gpu0/energy_j", "gpu0/ecc_uncorrected"} & seen["readings"][0].keys()
    (card,) = [each for each in seen["doctor"]["driver"] if each["subject"] == "GPU 0"]
    assert card["state"] == "ok"
    assert "power_w" in card["seen"]


@pytest.mark.slow
@pytest.mark.parametrize(("bits", "level"), [(4, "note"), (64, "high"), (8 | 128, "high")])
def test_throttled_clocks_are_rated_by_reason(nvml_stub: NvmlStub, bits: int, level: str) -> None:
    seen = examine(nvml_stub, T4 | QUIET | {"0.throttle": bits})

    assert {each for each, subject, _ in seen["verdicts"] if subject == "GPU 0 clocks"} == {level}


# ---------------------------------------------------------------- MIG

FIRST, SECOND = SLICED["0.mig.0.uuid"], SLICED["0.mig.1.uuid"]


@pytest.mark.slow
def test_errors_in_another_mig_instance_are_not_reported(nvml_stub: NvmlStub) -> None:
    """An XID event may name the GPU instance; otherwise, it concerns every instance of the GPU."""
    state, mine = SLICED | {"event_types": 11}, {"CUDA_VISIBLE_DEVICES": str(SECOND)}

    assert kinds(examine(nvml_stub, state, {"events": "0:8:13:1"}, **mine)) == []
    assert kinds(examine(nvml_stub, state, {"events": "0:8:13:2"}, **mine)) == [("xid", "gpu0")]
    assert kinds(examine(nvml_stub, state, {"events": "0:8:79"}, **mine)) == [("xid", "gpu0")]


@pytest.mark.slow
def test_a_mig_instance_does_not_make_its_gpu_idle(nvml_stub: NvmlStub) -> None:
    users = {"0.mig.1.processes": f"4000000:{GIB}", "0.mig.1.memory_used": 30 * GIB}
    seen = examine(nvml_stub, SLICED | users, CUDA_VISIBLE_DEVICES=str(SECOND))

    assert seen["readings"][0]["gpu0/memory_gib"] == 30
    assert "gpu0/util" not in seen["readings"][0], "NVML does not measure the utilization of an instance"
    assert not [subject for _, subject, _ in seen["verdicts"] if subject == "GPU 0 utilization"]
    (entry,) = seen["inventory"]
    assert entry[1] == SLICED["0.uuid"]


@pytest.mark.slow
def test_a_container_reads_the_memory_of_its_mig_instance(nvml_stub: NvmlStub) -> None:
    denied = {f"0.err.{name}": 4 for name in ("memory_total", "util", "power", "processes")}
    seen = examine(nvml_stub, SLICED | denied, CUDA_VISIBLE_DEVICES=str(FIRST))

    assert seen["readings"][0]["gpu0/memory_total_gib"] == 40192 * MIB / GIB
    assert kinds(seen) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wanted", "uuids"),
    [
        ("1", [PAIR["1.uuid"]]),
        ("1,0", [PAIR["1.uuid"], PAIR["0.uuid"]]),
        ("GPU-3070", [PAIR["1.uuid"]]),
        ("GPU-2080aaaa,GPU-3070bbbb", [PAIR["0.uuid"], PAIR["1.uuid"]]),
    ],
)
def test_hidden_gpus_are_neither_sampled_nor_reported(nvml_stub: NvmlStub, wanted: str, uuids: list[str]) -> None:
    totals = {PAIR["0.uuid"]: 11.0, PAIR["1.uuid"]: 8.0}
    seen = examine(nvml_stub, PAIR | QUIET, {"0.err.all": 15} if len(uuids) == 1 else {}, CUDA_VISIBLE_DEVICES=wanted)

    assert kinds(seen) == []
    result = [seen["readings"][0][f"gpu{at}/memory_total_gib"] for at in range(len(uuids))]
    assert result == [totals[uuid] for uuid in uuids]
    assert f"gpu{len(uuids)}/memory_total_gib" not in seen["readings"][0]


@pytest.mark.slow
def test_processes_of_others_cause_an_alert_and_a_verdict(nvml_stub: NvmlStub) -> None:
    """NVML lists a process of the run, so both use the same PID namespace."""
    own = os.getpid()
    users = gpu(0, processes=f"{own}:{GIB}") | gpu(1, processes=f"{PARENT}:{GIB}")
    seen = examine(nvml_stub, PAIR | QUIET | users, ROOT=str(own), **BY_BUS)

    assert kinds(seen) == [("shared", "gpu1")]
    assert [subject for level, subject, _ in seen["verdicts"] if level == "high"] == ["GPU 1 processes"]
    assert [each["gpu1/other_processes"] for each in seen["readings"]] == [1, 1]
    assert [each["gpu0/other_processes"] for each in seen["readings"]] == [0, 0]
    states = {each["subject"]: each["state"] for each in seen["doctor"]["processes"]}
    assert states["GPU 1"] == "warn"


@pytest.mark.slow
def test_processes_of_unknown_owners_cause_no_alert_or_verdict(nvml_stub: NvmlStub) -> None:
    """In a container, NVML lists PIDs of the host, which may also be PIDs of the run."""
    seen = examine(nvml_stub, PAIR | QUIET | gpu(1, processes=f"{PARENT}:{GIB}"), IN_CONTAINER="1", **BY_BUS)

    assert kinds(seen) == []
    assert "GPU 1 processes" not in [subject for _, subject, _ in seen["verdicts"]]
    assert "gpu1/other_processes" not in seen["readings"][0]


PARENT = os.getppid()  # a PID that exists, but is not one of the run
