"""Replace the clock of `accel-run monitor`, which each sample advances, so that slow machines take as many samples."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

from runner.commands import monitor
from runner.monitor import machine_display, monitor_thread

make_display = machine_display.make_display
CLOCK = SimpleNamespace(**{**vars(time), "now": 0.0, "monotonic": lambda: CLOCK.now})


def counting(*streams: Any, as_json: bool) -> Any:
    """Create a display that advances the clock by the interval after each sample."""
    display: Any = make_display(*streams, as_json=as_json)
    show = display.sample

    def sample(view: Any) -> None:
        show(view)
        CLOCK.now += view.interval_s

    display.sample = sample
    return display


machine_display.make_display = counting
monitor.time = CLOCK  # type: ignore[assignment]
monitor_thread.READ_TIMEOUT_S = 60.0  # the stub driver never hangs, but may be slow
