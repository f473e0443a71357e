"""Run commands on simulated GPUs that both torch and NVML see, and list the expected reports.

The stand-in's devices for torch and the NVML stub for the driver have the same UUIDs. The stub reads its state at each
call, so that one process runs all scenarios.
"""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

from tests.gpu.runs import TASK
from tests.nvml_stub import DRIVER, GIB, SLICED, State, as_text, gpu
from tests.stand_ins.cuda.devices import MACHINES, MIG, VARIABLE, encode
from tests.stand_ins.cuda.install import describe

COMMANDS = {
    "doctor": ("doctor", "--json", "checks=[driver,processes,gpus,versions,numbering]"),
    "monitor": ("monitor", "--json", "seconds=0.1", "log_dir=null"),
    "plan": ("plan", "--task", str(TASK), "global_batch_size=16", "micro_batch_size=8"),
}
FIRST, SECOND = (device.name for device in MACHINES["pair"])
UUIDS = [f"GPU-00000000-0000-4000-8000-{number:012d}" for number in range(2)]


def driver_of(machine: str, order: Sequence[int] = (0,)) -> State:
    """Return the machine as NVML sees it; `order` has torch's device indices in the order of bus addresses."""
    devices, state = MACHINES[machine], DRIVER | {"count": len(MACHINES[machine])}
    for at, number in enumerate(order):
        device = devices[number]
        state |= gpu(
            at, name=device.name, uuid=UUIDS[number], bus=f"00000000:{at + 1:02x}:00.0",
            cc="{}.{}".format(*device.capability), memory_total=device.memory, memory_used=(number + 1) * GIB,
            util=10 * (number + 1), temperature=50, power=100000, sm_clock=1500, throttle=0, processes="",
        )  # fmt: skip
    return state


PAIR = driver_of("pair", order=(1, 0))
T4, T4_STATE = MACHINES["t4"][0].name, driver_of("t4")
# GPUs with another process, thermal throttling, and uncorrected memory errors
SICK: State = {"0.processes": f"4000000:{GIB}", "0.throttle": 64, "0.ecc_corrected": 0, "0.ecc_uncorrected": 2}
DENIED: State = {f"0.err.{name}": 4 for name in ("power", "util", "memory_util")}
LOST: State = {f"1.err.{name}": 15 for name in ("power", "util", "memory_total", "temperature", "sm_clock")}
INSTANCE = MIG[1]


@dataclass(frozen=True)
class Scenario:
    """A machine, and the expected report of each command.

    usable   names of the GPUs that torch can use, in torch's order, with their free memory in GiB
    driver   verdict of `doctor` on each of the driver's GPUs
    watched  UUIDs of the GPUs that the monitor reads
    device   device of the plan, name of the GPU, and the precision that it supports natively
    """

    machine: str
    state: State
    usable: Mapping[str, float]
    driver: Sequence[str]
    watched: Sequence[str]
    device: tuple[str, str, str]
    variables: Mapping[str, str] = field(default_factory=dict)


def one_of_pair(wanted: str, watched: str, state: State = PAIR, driver: Sequence[str] = ("ok", "ok")) -> Scenario:
    """CUDA_VISIBLE_DEVICES names the second GPU of the pair, which the driver numbers first."""
    variables = {"CUDA_VISIBLE_DEVICES": wanted}
    return Scenario("pair", state, {SECOND: 5.79}, driver, [watched], ("cuda:0", SECOND, "bf16"), variables)


SCENARIOS = {
    "t4": Scenario("t4", T4_STATE, {T4: 13.56}, ["ok"], UUIDS[:1], ("cuda:0", T4, "fp16")),
    "sick": Scenario("t4", T4_STATE | SICK, {T4: 13.56}, ["FAIL"], UUIDS[:1], ("cuda:0", T4, "fp16")),
    "denied": Scenario("t4", T4_STATE | DENIED, {T4: 13.56}, ["ok"], UUIDS[:1], ("cuda:0", T4, "fp16")),
    "pair": Scenario("pair", PAIR, {FIRST: 9.57, SECOND: 5.79}, ["ok", "ok"], UUIDS[::-1], ("cuda:0", FIRST, "fp16")),
    "by uuid": one_of_pair(UUIDS[1], UUIDS[1]),
    # The monitor does not import torch. It uses an index as the driver's, and notes that CUDA's may differ.
    "by number": one_of_pair("1", UUIDS[0]),
    "lost": one_of_pair("1", UUIDS[0], PAIR | LOST, ("ok", "FAIL")),
    "hidden": Scenario("pair", PAIR, {}, ["ok", "ok"], [], ("cpu", "", "fp32"), {"CUDA_VISIBLE_DEVICES": ""}),
    "instance": Scenario(
        "a100mig", SLICED | {f"0.mig.{at}.memory_used": (at + 1) * GIB for at in range(2)},
        {INSTANCE.name: 37.25}, ["ok"], [INSTANCE.mig_uuid], ("cuda:0", INSTANCE.name, "bf16"),
        {"CUDA_VISIBLE_DEVICES": INSTANCE.mig_uuid},
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Reported:
    """The output of the commands."""

    doctor: Any
    monitor: Any
    plan: str

    def findings(self, check: str) -> dict[str, str]:
        """Return the findings of `doctor`, as a mapping of subjects to states."""
        return {each["subject"]: each["state"] for each in self.doctor["findings"] if each["check"] == check}


def run_commands(library: Path, folder: Path) -> dict[str, Reported]:
    """Run every command in this process, in each scenario."""
    from runner.cli import main

    os.chdir(folder)
    ctypes.CDLL(str(library))
    os.environ["NVML_STUB"] = str(folder / "state")
    result = {}
    for name, scenario in SCENARIOS.items():
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        os.environ.update({VARIABLE: encode(MACHINES[scenario.machine]), **scenario.variables})
        describe()
        (folder / "state").unlink(missing_ok=True)
        (folder / "state").write_text(as_text(scenario.state))
        printed = {}
        for command, argv in COMMANDS.items():
            with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
                code = main(list(argv))
            assert code in (0, 69), f"{name}: {command} ended with {code}: {err.getvalue()}"
            printed[command] = out.getvalue()
        result[name] = Reported(
            json.loads(printed["doctor"]), json.loads(printed["monitor"].splitlines()[0]), printed["plan"]
        )
    return result
