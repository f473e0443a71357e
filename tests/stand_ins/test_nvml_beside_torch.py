"""GPUs that torch and NVML see at once: stand-in devices for torch, the NVML stub for their driver, the same UUIDs.

The driver numbers GPUs by bus address and torch by speed, so that only UUIDs tell which is which.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.runs import TASK
from tests.nvml_stub import DRIVER, GIB, SLICED, NvmlStub, State, gpu
from tests.stand_ins.cuda.build import why_not
from tests.stand_ins.cuda.devices import MACHINES, MIG
from tests.stand_ins.forked import StandIn

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "it can be built")

CHECKS = "doctor --json checks=[driver,processes,gpus,versions,numbering]"
Figures = dict[str, Any]


def driver_of(machine: str, order: Sequence[int] = (0,)) -> State:
    """Describe the GPUs of a machine as their driver does; `order` has torch's numbers by bus address."""
    devices, state = MACHINES[machine], DRIVER | {"count": len(MACHINES[machine])}
    for at, number in enumerate(order):
        device = devices[number]
        state |= gpu(
            at, name=device.name, uuid=f"GPU-00000000-0000-4000-8000-{number:012d}", bus=f"00000000:{at + 1:02x}:00.0",
            cc="{}.{}".format(*device.capability), memory_total=device.memory, memory_used=(number + 1) * GIB,
            util=10 * (number + 1), temperature=50, power=100000, sm_clock=1500, throttle=0, processes="",
        )  # fmt: skip
    return state


@dataclass(frozen=True)
class Machine:
    """Runs commands where both libraries see GPUs."""

    stand_in: StandIn
    stub: NvmlStub
    folder: Path

    def run(self, machine: str, words: str, state: State, **variables: str) -> str:
        library = f"import ctypes; ctypes.CDLL({str(self.stub.folder / 'new' / 'libnvidia-ml.so.1')!r})\n"
        env = {"NVML_STUB": str(self.stub.write(state)), **variables}
        ended = self.stand_in.command(machine, words, self.folder, env=env, before=library)
        assert ended.code in (0, 69), ended.out + ended.err
        return ended.out

    def examined(self, machine: str, state: State, **variables: str) -> tuple[list[Figures], dict[str, Figures]]:
        """Return the GPUs of the inventory, and doctor's findings by check and subject."""
        told = json.loads(self.run(machine, CHECKS, state, **variables))
        found = {f"{each['check']} {each['subject']}".strip(): each for each in told["findings"]}
        return told["hardware"]["devices"], found


@pytest.fixture
def here(stand_in: StandIn, nvml_stub: NvmlStub, tmp_path: Path) -> Machine:
    return Machine(stand_in, nvml_stub, tmp_path)


def free_gib(devices: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    return {each["name"]: each["free_bytes"] / GIB for each in devices if each["usable"]}


def test_a_t4_is_the_same_gpu_for_both(here: Machine) -> None:
    devices, found = here.examined("t4", driver_of("t4") | {"0.processes": f"4000000:{GIB}"})
    (device,) = devices
    assert device["usable"]
    assert free_gib(devices)["Tesla T4"] == pytest.approx(14.56 - 1, abs=0.01)
    assert found["processes GPU 0"]["state"] == "warn"
    assert found["numbering"]["state"] == "ok"


@pytest.mark.parametrize("wanted", ["", "1", "GPU-00000000-0000-4000-8000-000000000001"])
def test_gpus_are_matched_by_uuid_where_bus_order_is_another(wanted: str, here: Machine) -> None:
    variables = {"CUDA_VISIBLE_DEVICES": wanted} if wanted else {}
    devices, found = here.examined("pair", driver_of("pair", order=(1, 0)), **variables)
    first, second = MACHINES["pair"]
    expected = {first.name: first.memory / GIB - 1, second.name: second.memory / GIB - 2}
    if wanted:
        del expected[first.name]
        (hidden,) = [each for each in devices if not each["usable"]]
        assert hidden["name"] == first.name
        assert wanted in hidden["why_not"]
    assert free_gib(devices) == pytest.approx(expected, abs=0.01)
    assert [each["index"] for each in devices if each["usable"]] == list(range(len(expected)))
    if wanted:
        assert found["numbering"]["state"] == "ok", "the only one that torch sees has the driver's number"
    else:
        assert {found[f"numbering cuda:{index}"]["state"] for index in range(2)} == {"warn"}


def test_a_lost_gpu_and_denied_counters_leave_the_other_gpu_usable(here: Machine) -> None:
    lost = {f"1.err.{name}": 15 for name in ("power", "util", "memory_total", "temperature", "sm_clock")}
    state = driver_of("pair", order=(1, 0)) | lost | {"0.err.power": 4, "0.err.util": 4}
    devices, found = here.examined("pair", state, CUDA_VISIBLE_DEVICES="1")
    assert [each["name"] for each in devices if each["usable"]] == ["NVIDIA GeForce RTX 3070"]
    (other,) = [each for each in devices if not each["usable"]]
    assert other["why_not"].startswith("lost")
    assert (found["driver GPU 0"]["state"], found["driver GPU 1"]["state"]) == ("ok", "FAIL")


@pytest.mark.parametrize("instance", MIG, ids=lambda instance: instance.mig_uuid[8:12])
def test_a_mig_instance_is_planned_for_alone(instance: Any, here: Machine) -> None:
    used = {f"0.mig.{at}.memory_used": (at + 1) * GIB for at in range(2)}
    devices, _ = here.examined("a100mig", SLICED | used, CUDA_VISIBLE_DEVICES=instance.mig_uuid)
    (device,) = [each for each in devices if each["usable"]]
    assert (device["uuid"], device["name"]) == (instance.mig_uuid, instance.name)
    assert device["memory_bytes"] == instance.memory
    left = 40192 / 1024 - 1 - MIG.index(instance)
    assert device["free_bytes"] / GIB == pytest.approx(left)


def test_a_run_is_planned_and_monitored_on_the_gpu_that_it_trains_on(here: Machine) -> None:
    """Training on torch's cuda:1, which the driver calls GPU 0."""
    state = driver_of("pair", order=(1, 0)) | {"0.throttle": 64, "event_types": 11, "events": "0:8:48"}
    words = f"train --task {TASK} run=r device=cuda:1 updates=8 global_batch_size=16 micro_batch_size=8"
    here.run("pair", f"{words} monitor=on monitor.interval_s=0.05", state)
    run = here.folder / "outputs/r"
    uuid = MACHINES["pair"][1].uuid.replace("000000000000", "000000000001")
    plan = json.loads((run / "plan.json").read_text())
    assert (plan["device"], plan["device_uuid"]) == ("cuda:1", uuid)
    with (run / "gpu.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["device"] != "cpu"]
    assert {row["uuid"] for row in rows} == {uuid}
    assert {float(row["util_percent"]) for row in rows} == {20.0}
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    said = {event["what"] for event in events if event["kind"] == "machine"}
    assert {"xid", "slowed"} <= said
