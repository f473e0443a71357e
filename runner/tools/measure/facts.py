"""Facts about a run and the machine, the input of rules. Rules ignore unknown values, which are None."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runner.base.json_converter import decode
from runner.base.stopwatch import OUTSIDE
from runner.durable.files import read_object
from runner.monitor.samples import Summary
from runner.plan.inventory import Cpu, Device, Inventory
from runner.records.evidence import Evidence


@dataclass(frozen=True)
class Facts:
    """Measurements, settings, and the machine.

    values     all values of the plan
    gpu        GPU of the training; None: the CPU trains
    probe      results of runner.tools.measure.probe
    monitor    metric -> mean over the run
    throttled  reason -> share of the time
    """

    evidence: Evidence
    values: Mapping[str, Any]
    cpu: Cpu
    gpus: tuple[Device, ...] = ()
    gpu: Device | None = None
    probe: Mapping[str, Any] = field(default_factory=dict)
    monitor: Mapping[str, float] = field(default_factory=dict)
    throttled: Mapping[str, float] = field(default_factory=dict)

    def seconds(self) -> float | None:
        """Return the seconds of all updates and the work between them; None if unknown."""
        seconds = sum(value for part, value in self.evidence.parts_s.items() if part not in OUTSIDE)
        return seconds or None

    def share(self, *parts: str) -> float | None:
        """Return the share of these parts in the time of updates; None if one is unknown."""
        total, spent = self.seconds(), [self.evidence.parts_s.get(part) for part in parts]
        if total is None or any(value is None for value in spent):
            return None
        return sum(value for value in spent if value is not None) / total

    def update_ms(self) -> float | None:
        """Return the mean milliseconds of an update with the work between updates."""
        total, updates = self.seconds(), self.evidence.updates
        return 1e3 * total / updates if total and updates else None

    def on_cpu(self) -> bool | None:
        """Return whether the CPU trains; None if unknown."""
        return None if self.evidence.device is None else self.evidence.device.startswith("cpu")


def find_device(inventory: Inventory, name: str | None) -> Device | None:
    """Return the GPU with this torch name; None for a CPU or an absent GPU."""
    return next((device for device in inventory.usable if device.torch_name == name), None)


def read_monitor_summary(run_dir: Path) -> tuple[dict[str, float], dict[str, float]]:
    """Return metric -> mean over the run, and throttling reason of the first GPU -> share of the time.

    Both are empty for a run without monitor.
    """
    total = decode(Summary, read_object(run_dir / "monitor.json")).value.whole
    return {name: stat.mean for name, stat in total.metrics.items()}, dict(total.slowed.get("gpu0", {}))
