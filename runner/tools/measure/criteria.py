"""GPU or CPU? The thresholds that people go by, with the values of this run, beside what was measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from runner.tools.measure.facts import Facts

Verdict = Literal["GPU", "CPU", "either", "not known"]


@dataclass(frozen=True)
class Criterion:
    """A line of the table: from `gpu_from` on a GPU is said to help, below `cpu_below` not to; None: no such line."""

    name: str
    gpu_from: float | None
    cpu_below: float | None
    value: float | None = None

    @property
    def verdict(self) -> Verdict:
        """What the rule of thumb says to this value."""
        if self.value is None:
            return "not known"
        if self.gpu_from is not None and self.value >= self.gpu_from:
            return "GPU"
        if self.cpu_below is not None and self.value < self.cpu_below:
            return "CPU"
        return "either"

    @property
    def rule(self) -> str:
        """The thresholds in words."""
        above = "" if self.gpu_from is None else f"GPU from {self.gpu_from:,.0f}"
        below = "" if self.cpu_below is None else f"CPU below {self.cpu_below:,.0f}"
        return ", ".join(word for word in (above, below) if word)


def criteria(facts: Facts) -> list[Criterion]:
    """Return the table; a value that nobody knows, or that this task does not have, is None."""
    seen, probe = facts.evidence, facts.probe
    channels, side = _of_input(probe.get("input_shape"))
    values: Mapping[str, float | None] = {
        "training samples": seen.num_samples,
        "samples per update": seen.global_batch_size,
        "channels": channels,
        "pixels of a side": side,
        "layers that are trained": probe.get("trained_layers"),
        "parameters": seen.num_parameters,
        "epochs": seen.epochs,
        "terms of the loss": probe.get("loss_terms"),
    }
    return [Criterion(name, *THRESHOLDS[name], value) for name, value in values.items()]


def rule_of_thumb(rows: list[Criterion]) -> str:
    """Return what to begin with by the rule of thumb alone, and why; empty where the values are unknown."""
    known = {row.name: row.value for row in rows}
    samples, batch = known["training samples"], known["samples per update"]
    if samples is None or batch is None:
        return ""
    small = [
        words
        for words, is_small in (
            (f"{samples:,.0f} training samples are fewer than 200", samples < 200),
            (f"{batch:.0f} samples per update are fewer than 16", batch < 16),
        )
        if is_small
    ]
    return f"CPU first: {' and '.join(small)}" if small else "GPU: at least 200 training samples and 16 per update"


def _of_input(shape: object) -> tuple[float | None, float | None]:
    """Return channels and the shorter side of pictures (B, C, H, W) or volumes; nothing for what is no picture.

    Channels come last where that alone makes all sides alike, as in cubes (B, H, W, C).
    """
    if not isinstance(shape, (list, tuple)) or len(shape) < 4:
        return None, None
    if len(set(shape[1:-1])) == 1 < len(set(shape[2:])):
        return float(shape[-1]), float(shape[1])
    return float(shape[1]), float(min(shape[2:]))


# name -> from which value on a GPU is said to help, below which not. Rules of thumb for pictures of many channels on a
# desktop GPU: that is why what was measured stands beside them.
THRESHOLDS: Mapping[str, tuple[float | None, float | None]] = {
    "training samples": (500, 100),
    "samples per update": (16, 8),
    "channels": (100, 20),
    "pixels of a side": (256, 128),
    "layers that are trained": (2, None),
    "parameters": (None, None),
    "epochs": (10, None),
    "terms of the loss": (2, None),
}
