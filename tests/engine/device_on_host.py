"""Make the CPU act as a device that reaches each event 20 ms after it was recorded. Import this module first."""

from __future__ import annotations

import time
from typing import Any

import torch

from runner.base import stopwatch
from runner.distributed import parallel
from tests.engine.virtual_time import sleep

LAG_S = 0.02


class LateEvent:
    """An event on the timeline of this device."""

    def __init__(self, device: Any, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = time.perf_counter()

    def query(self) -> bool:
        return time.perf_counter() >= self.at + LAG_S

    def synchronize(self) -> None:
        sleep(max(0.0, self.at + LAG_S - time.perf_counter()))  # lint-tests: sleep: of virtual time

    def elapsed_time(self, later: LateEvent) -> float:
        assert later.query(), "torch raises for an event that the device has not reached"
        return 1e3 * (later.at - self.at)


torch.Event = LateEvent  # type: ignore[misc,assignment]
parallel.new_stopwatch = stopwatch.DeviceStopwatch  # type: ignore[assignment]
