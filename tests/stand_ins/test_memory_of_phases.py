"""The predicted peak memory of each phase is compared with the one that the allocator of the stand-in counts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runner.tools.doctor.first_contact import MEMORY_TOLERANCE
from tests.stand_ins.cuda.build import why_not
from tests.stand_ins.forked import StandIn

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "it can be built")

TASK = Path(__file__).with_name("task_of_fits.py")
PROGRAM = """
import json, os, torch
from pathlib import Path
from runner.cli import main
from runner.config.configuration import compose
from runner.config.request import Request
from runner.durable.record_files import read_record
from runner.forecast.demand import trace_memory_needs
from runner.plan.inventory import take_inventory
from runner.plan.planner import make_plan
os.chdir({folder!r})
settings = {settings!r}.split()
configuration, inventory = compose(Request(tuple(settings), Path({task!r}))), take_inventory()
needs = trace_memory_needs(configuration, inventory)
assert not torch.cuda.is_initialized()
plan, predicted = make_plan(configuration, inventory, needs=needs), {{}}
for memory in plan.memory:
    parts = memory.prediction.parts
    tensors = sum(size for part, size in parts.items() if part not in ("libraries", "allocator"))
    predicted[memory.phase] = [tensors, memory.is_exact]
assert main(["train", "--task", {task!r}, *settings, "run=r"]) == 0
counted = {{name: record.peak_device_gib for name, record in read_record(Path("outputs/r")).result.phases.items()}}
print("peaks", json.dumps({{name: [predicted[name], 2**30 * gib] for name, gib in counted.items()}}))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", ["precision=bf16", pytest.param("precision=fp32 prefetch=none", marks=pytest.mark.long)]
)
def test_peak_memory_of_each_phase_is_predicted(settings: str, stand_in: StandIn, tmp_path: Path) -> None:
    """No phase uses memory of an earlier one.

    Fit phases are traced as on a CPU, so their predictions are not exact, but `projection` computes the same on a GPU.
    """
    given = f"{settings} device=cuda checkpoint=off monitor=off dataloader.num_workers=0"
    out = stand_in.program("a100", PROGRAM.format(folder=str(tmp_path), task=str(TASK), settings=given))
    (line,) = [line for line in out.splitlines() if line.startswith("peaks ")]
    peaks = json.loads(line.removeprefix("peaks "))
    assert {name: is_exact for name, ((_, is_exact), _) in peaks.items()} == {
        "covariance": False, "projection": False, "selection": False, "train": True,
    }  # fmt: skip
    for name in ("projection", "train"):
        (predicted, _), counted = peaks[name]
        assert counted == pytest.approx(predicted, rel=MEMORY_TOLERANCE), (name, peaks)
