"""The parts of a run on a GPU are timed by events on the stream, without synchronization, and add up to the run."""

from __future__ import annotations

import pytest
import torch

from runner.base.loaded_torch import is_stand_in
from runner.base.stopwatch import PARTS, DeviceStopwatch, seconds_between
from runner.durable.record_files import read_record
from tests.gpu.runs import Runs

pytestmark = pytest.mark.gpu
PLAIN = "precision=fp32 prefetch=none"


@pytest.mark.parametrize(
    "args", [PLAIN, "precision=fp32 prefetch=stream", f"{PLAIN} dataloader.num_workers=2", "precision=fp16"]
)
def test_timed_parts_add_up_to_the_total_time(args: str, runs: Runs) -> None:
    result = read_record(runs.train("run", f"device=cuda:0 updates=12 evaluate.every=4 {args}")).evidence
    assert result is not None
    (phase,) = result.phases
    assert phase.seconds is not None
    assert sum(phase.parts_s.values()) == pytest.approx(phase.seconds, rel=0.02)
    for part in ("transfer", "forward", "backward", "optimizer", "evaluation", "saving"):
        assert result.parts_s[part] > 0, part
    assert result.device_total_gib
    assert result.device_peak_gib
    assert result.num_alloc_retries == 0


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_recording_device_events_does_not_synchronize() -> None:
    """On the device's clock, the events of a part enclose two events of the test, and two other events enclose them."""
    device = torch.device("cuda")
    size = 128 if is_stand_in() else 1024  # the clock of a GPU has a resolution of half a microsecond
    matrix = torch.randn(size, size, device=device)
    torch.mm(matrix, matrix)
    outer = [torch.Event(device, enable_timing=True) for _ in range(2)]
    inner = [[torch.Event(device, enable_timing=True) for _ in range(2)] for _ in range(10)]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        outer[0].record()
        stopwatch = DeviceStopwatch(device)
        for update, (begin, end) in enumerate(inner, 1):
            stopwatch.lap("hooks")
            begin.record()
            for _ in range(3):
                torch.mm(matrix, matrix)
            end.record()
            stopwatch.lap("forward")
            stopwatch.stop(update)
        outer[1].record()
        snapshot = stopwatch.snapshot()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    spent = stopwatch.finish()
    least_s, most_s = (sum(one.elapsed_time(other) for one, other in events) / 1e3 for events in (inner, [outer]))
    assert 0 < 0.999 * least_s <= spent["forward"] <= 1.001 * most_s
    assert sum(seconds_between({}, snapshot()).get(part, 0.0) for part in PARTS) == pytest.approx(spent["forward"])
