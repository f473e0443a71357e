"""Rules of thumb for choosing between GPU and CPU, applied to a training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from runner.tools.measure.facts import Facts

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
        """Return the recommendation for this value."""
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


def evaluate_criteria(facts: Facts) -> list[Criterion]:
    """Return all rules with the values of the training; unknown values are None."""
    evidence, probe = facts.evidence, facts.probe
    channels, side = _image_dimensions(probe.get("input_shape"))
    # Common thresholds for images with many channels on a desktop GPU. Reports show the measurement beside them.
    return [
        Criterion("training samples", 500, 100, evidence.num_samples),
        Criterion("samples per update", 16, 8, evidence.global_batch_size),
        Criterion("channels", 100, 20, channels),
        Criterion("pixels of a side", 256, 128, side),
        Criterion("layers that are trained", 2, None, probe.get("trained_layers")),
        # A CPU core computes 3.5 MFLOP while a GPU launches an operator (35 us at 100 GFLOP/s). A layer of 100,000
        # parameters needs as much for 16 samples; networks have about ten such layers.
        Criterion("parameters", 1_000_000, 100_000, evidence.num_parameters),
        Criterion("epochs", 10, None, evidence.epochs),
        Criterion("terms of the loss", 2, None, probe.get("loss_terms")),
    ]


def _image_dimensions(shape: object) -> tuple[float | None, float | None]:
    """Return the number of channels and the shorter side of images (B, C, H, W) or volumes; None for other inputs.

    Channels are taken as last if only that makes all sides equal, as in cubes (B, H, W, C).
    """
    if not isinstance(shape, (list, tuple)) or len(shape) < 4:
        return None, None
    if len(set(shape[1:-1])) == 1 < len(set(shape[2:])):
        return float(shape[-1]), float(shape[1])
    return float(shape[1]), float(min(shape[2:]))
