"""Rules of thumb for GPU or CPU, and expected ranges, with the values of a training."""

from __future__ import annotations

from collections.abc import Sequence
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
        """Return what the rule says about this value."""
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


def criteria(facts: Facts) -> list[Criterion]:
    """Return the table; unknown values are None."""
    evidence, probe = facts.evidence, facts.probe
    channels, side = _of_input(probe.get("input_shape"))
    # Common thresholds for images with many channels on a desktop GPU. The measurement is shown beside them.
    return [
        Criterion("training samples", 500, 100, evidence.num_samples),
        Criterion("samples per update", 16, 8, evidence.global_batch_size),
        Criterion("channels", 100, 20, channels),
        Criterion("pixels of a side", 256, 128, side),
        Criterion("layers that are trained", 2, None, probe.get("trained_layers")),
        Criterion("parameters", None, None, evidence.num_parameters),
        Criterion("epochs", 10, None, evidence.epochs),
        Criterion("terms of the loss", 2, None, probe.get("loss_terms")),
    ]


def rule_of_thumb(rows: Sequence[Criterion]) -> str:
    """Return the device to start with by the rule of thumb alone, and why; empty if values are unknown."""
    known = {row.name: row.value for row in rows}
    samples, batch = known["training samples"], known["samples per update"]
    if samples is None or batch is None:
        return ""
    small = [f"{samples:,.0f} training samples are fewer than 200"] if samples < 200 else []
    small += [f"{batch:.0f} samples per update are fewer than 16"] if batch < 16 else []
    return f"CPU first: {' and '.join(small)}" if small else "GPU: at least 200 training samples and 16 per update"


def _of_input(shape: object) -> tuple[float | None, float | None]:
    """Return channels and the shorter side of images (B, C, H, W) or volumes; None for other inputs.

    Channels come last if only that makes all sides equal, as in cubes (B, H, W, C).
    """
    if not isinstance(shape, (list, tuple)) or len(shape) < 4:
        return None, None
    if len(set(shape[1:-1])) == 1 < len(set(shape[2:])):
        return float(shape[-1]), float(shape[1])
    return float(shape[1]), float(min(shape[2:]))


# ---------------------------------------------------------------- expected ranges


@dataclass(frozen=True)
class RangeCheck:
    """A value and its expected range; `fine` is None if it is unknown."""

    name: str
    value: str
    expected: str
    fine: bool | None


def checks(facts: Facts) -> list[RangeCheck]:
    """Return the values to check first when training is slow, with their expected ranges."""
    evidence, values, rows = facts.evidence, facts.values, list[RangeCheck]()
    wait, workers = facts.share("data"), values.get("dataloader.num_workers")
    if facts.on_cpu() is False:
        util, others = facts.monitor.get("gpu0/util"), facts.monitor.get("gpu0/other_processes")
        peak, total = evidence.device_peak_reserved_gib, evidence.device_total_gib
        used = 100 * peak / total if peak and total else None
        precision = str(values.get("precision"))
        rows.append(RangeCheck("GPU utilization", _percent(util), "80 to 100 %", None if util is None else util >= 80))
        rows.append(RangeCheck("GPU memory", _percent(used), "50 to 80 %", None if used is None else 50 <= used <= 80))
        if others is not None:
            rows.append(RangeCheck("other processes on the GPU", f"{others:.1f}", "0", others == 0))
        rows.append(RangeCheck("autocast", precision, "bf16 or fp16", precision in ("bf16", "fp16")))
    waits = _percent(None if wait is None else 100 * wait)
    rows.append(RangeCheck("waiting for data", waits, "under 10 %", None if wait is None else wait < 0.1))
    if workers is not None:
        is_fine = workers > 0 or (wait or 0) < 0.1
        rows.append(RangeCheck("data workers", str(workers), "more than 0 if training waits for data", is_fine))
    return rows


def _percent(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.0f} %"
