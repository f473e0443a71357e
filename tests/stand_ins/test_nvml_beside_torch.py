"""torch and NVML see the same simulated GPUs, because the stand-in's devices and the NVML stub have the same UUIDs.

The driver orders GPUs by bus address and torch by speed, so only UUIDs identify them.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from runner.monitor.alerts import MIN_THROTTLED_SAMPLES
from tests.gpu.runs import TASK
from tests.nvml_stub import GIB, NvmlStub
from tests.stand_ins.commands_on_gpus import FIRST, PAIR, SCENARIOS, SECOND, UUIDS, Reported, run_commands
from tests.stand_ins.cuda.build import why_not
from tests.stand_ins.forked import StandIn

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "it can be built")


@pytest.fixture(scope="module")
def reported(stand_in: StandIn, nvml_stub: NvmlStub, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reported]:
    library = nvml_stub.folder / "new" / "libnvidia-ml.so.1"
    return stand_in.server.call(run_commands, library, tmp_path_factory.mktemp("commands"))


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENARIOS)
def test_every_command_reports_the_same_gpus(name: str, reported: Mapping[str, Reported]) -> None:
    seen, scenario = reported[name], SCENARIOS[name]
    usable = [each for each in seen.doctor["hardware"]["devices"] if each["usable"]]
    assert [each["index"] for each in usable] == list(range(len(scenario.usable)))
    free_gib = {each["name"]: each["free_bytes"] / GIB for each in usable}
    assert free_gib == pytest.approx(dict(scenario.usable), abs=0.01)
    by_driver = {f"GPU {number}": state for number, state in enumerate(scenario.driver)}
    assert {subject: state for subject, state in seen.findings("driver").items() if subject} == by_driver
    assert [each["uuid"] for each in seen.monitor["gpus"]] == list(scenario.watched)
    device, name_of_device, precision = scenario.device
    rows = {key: (value, why) for key, value, why in re.findall(r"^(\w+) +(\S+) +(.*)$", seen.plan, re.MULTILINE)}
    assert (rows["device"][0], rows["precision"][0]) == (device, precision)
    assert name_of_device in rows["device"][1]
    if scenario.usable:
        free = re.search(r"^available +([\d.]+) GiB", seen.plan, re.MULTILINE)
        assert free is not None
        assert float(free[1]) == pytest.approx(scenario.usable[name_of_device], rel=0.005)  # rounded to three digits


@pytest.mark.slow
def test_all_problems_of_a_faulty_gpu_are_reported(reported: Mapping[str, Reported]) -> None:
    seen = reported["sick"]
    assert seen.findings("processes") == {"GPU 0": "warn"}
    (watched,) = seen.monitor["gpus"]
    assert [(each["pid"], each["memory_gib"]) for each in watched["processes"]] == [(4000000, 1.0)]
    readings = seen.monitor["readings"]
    assert (readings["gpu0/throttle_reasons"], readings["gpu0/ecc_uncorrected"]) == (64, 2)


@pytest.mark.slow
def test_counters_without_permission_have_no_readings(reported: Mapping[str, Reported]) -> None:
    readings = reported["denied"].monitor["readings"]
    assert not {"gpu0/util", "gpu0/power_w"} & readings.keys()
    assert readings["gpu0/temperature_c"] == 50
    assert reported["denied"].monitor["missing"]


@pytest.mark.slow
def test_lost_and_hidden_gpus_are_reported_with_the_reason(reported: Mapping[str, Reported]) -> None:
    def reasons(name: str) -> dict[str, str]:
        devices = reported[name].doctor["hardware"]["devices"]
        return {each["name"]: each["why_not"] for each in devices if not each["usable"]}

    assert reasons("lost")[FIRST].startswith("lost")
    assert UUIDS[1] in reasons("by uuid")[FIRST]
    assert reasons("hidden").keys() == {FIRST, SECOND}


@pytest.mark.slow
def test_indices_unlike_those_of_the_driver_are_reported(reported: Mapping[str, Reported]) -> None:
    assert reported["pair"].findings("numbering") == {"cuda:0": "warn", "cuda:1": "warn"}
    for name in ("t4", "by number"):  # the only GPU that torch sees has the same index for the driver
        assert reported[name].findings("numbering") == {"": "ok"}


@pytest.mark.slow
def test_a_run_uses_and_monitors_its_mig_instance(stand_in: StandIn, nvml_stub: NvmlStub, tmp_path: Path) -> None:
    scenario = SCENARIOS["instance"]
    env = {
        **scenario.variables,
        "NVML_STUB": str(nvml_stub.write(scenario.state)),
        "WAIT_FOR_LINES": "outputs/r/gpu.csv:4",
    }
    args = f"train --task {TASK} run=r device=cuda updates=4 global_batch_size=16 micro_batch_size=8"
    args += " monitor=on monitor.interval_s=0.05"
    result = stand_in.command(scenario.machine, args, tmp_path, env=env, before=_load(nvml_stub))
    assert result.code == 0, result.out + result.err
    run = tmp_path / "outputs/r"
    plan = json.loads((run / "plan.json").read_text())
    assert (plan["device"], plan["device_uuid"]) == ("cuda:0", scenario.watched[0])
    with (run / "gpu.csv").open() as file:
        assert {row["uuid"] for row in csv.DictReader(file) if row["device"] != "cpu"} == set(scenario.watched)


def test_a_run_is_planned_and_monitored_on_its_gpu(stand_in: StandIn, nvml_stub: NvmlStub, tmp_path: Path) -> None:
    """The run trains on torch's cuda:1, which is the driver's GPU 0.

    Its second update waits until the monitor has taken more samples than an alert needs.
    """
    env = {"NVML_STUB": str(nvml_stub.write(PAIR | {"0.throttle": 64, "event_types": 11, "events": "0:8:48"}))}
    args = f"train --task {TASK} run=r device=cuda:1 updates=8 global_batch_size=16 micro_batch_size=8"
    waiting = env | {"WAIT_FOR_LINES": f"outputs/r/gpu.csv:{MIN_THROTTLED_SAMPLES + 4}"}
    args += " monitor=on monitor.interval_s=0.05"
    result = stand_in.command("pair", args, tmp_path, env=waiting, before=_load(nvml_stub))
    assert result.code == 0, result.out + result.err
    run = tmp_path / "outputs/r"
    plan = json.loads((run / "plan.json").read_text())
    assert (plan["device"], plan["device_uuid"]) == ("cuda:1", UUIDS[1])
    with (run / "gpu.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["device"] != "cpu"]
    assert {row["uuid"] for row in rows} == {UUIDS[1]}
    assert {float(row["util_percent"]) for row in rows} == {20.0}
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    kinds = {event["what"] for event in events if event["kind"] == "machine"}
    assert {"xid", "slowed"} <= kinds


def _load(nvml_stub: NvmlStub) -> str:
    """Return code that loads the stub, which the run then uses as the driver library."""
    return f"import ctypes; ctypes.CDLL({str(nvml_stub.folder / 'new' / 'libnvidia-ml.so.1')!r})\n"
