"""Facts about a run and the machine, the input of rules; and rules of thumb for choosing between GPU and CPU.

Rules ignore unknown values, which are None.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

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
    gpu        GPU of the run; None: it trains on the CPU
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


# ---------------------------------------------------------------- rules of thumb

Verdict = Literal["GPU", "CPU", "either", "unknown"]


@dataclass(frozen=True)
class Criterion:
    """A rule of thumb: a GPU helps from `gpu_from` on, and not below `cpu_below`; None: no such threshold."""

    name: str
    gpu_from: float | None
    cpu_below: float | None
    value: float | None = None

    @property
    def verdict(self) -> Verdict:
        if self.value is None:
            return "unknown"
        if self.gpu_from is not None and self.value >= self.gpu_from:
            return "GPU"
        if self.cpu_below is not None and self.value < self.cpu_below:
            return "CPU"
        return "either"

    @property
    def rule(self) -> str:
        """Return the thresholds as text."""
        above = "" if self.gpu_from is None else f"GPU from {self.gpu_from:,.0f}"
        below = "" if self.cpu_below is None else f"CPU below {self.cpu_below:,.0f}"
        return ", ".join(filter(None, (above, below)))


def evaluate_criteria(evidence: Evidence, batch: Mapping[str, Any]) -> list[Criterion]:
    """Return all rules with the values of the training and of a batch (`inspect_batch`); unknown values are None."""
    channels, side = _image_dimensions(batch.get("input_shape") or ())
    # Common thresholds for images with many channels on a desktop GPU. Reports show the measurement beside them.
    return [
        Criterion("training samples", 500, 100, evidence.num_samples),
        Criterion("samples per update", 16, 8, evidence.global_batch_size),
        Criterion("channels", 100, 20, channels),
        Criterion("pixels per side", 256, 128, side),
        # A CPU core computes 3.5 MFLOP while a GPU launches an operator (35 us at 100 GFLOP/s). A layer of 100,000
        # parameters needs about as many for 16 samples, and a network has about ten such layers.
        Criterion("parameters", 1_000_000, 100_000, evidence.num_parameters),
        Criterion("epochs", 10, None, evidence.epochs),
        Criterion("terms of the loss", 2, None, batch.get("loss_terms")),
    ]


def _image_dimensions(shape: Sequence[int]) -> tuple[float | None, float | None]:
    """Return the number of channels and the shorter side of images (B, C, H, W) or volumes; None for other inputs.

    Channels are taken as last if only that makes all sides equal, as in cubes (B, H, W, C).
    """
    if len(shape) < 4:
        return None, None
    if len(set(shape[1:-1])) == 1 < len(set(shape[2:])):
        return float(shape[-1]), float(shape[1])
    return float(shape[1]), float(min(shape[2:]))
