"""Estimate the time of an update from its operations, its bytes and the peak rates of the device.

In training, matrix products reach about half of a device's peak (Chowdhery et al., PaLM, 2022, table 3: 46 %;
Korthikanti et al., 2022, table 5: 42 to 57 %), and memory accesses about 80 % of its bandwidth (STREAM on GPUs).
Bytes are counted per operation, without caches and fusion. Computation and memory access may or may not overlap, so
the estimate is a range: from the longer of the two to their sum.

On a GPU, an update takes at least the time of its kernel launches, which the host issues sequentially: 5 to 10 us
each are assumed, the cost of an eager PyTorch operator on a current host. The trace counts operators, assumed to be
one kernel each. A compiled model launches fewer, so it has no such lower bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runner.plan.memory_fit import Demand, TracedPoint
from runner.plan.memory_trace import ComputeCost

COMPUTE_EFFICIENCY, MEMORY_EFFICIENCY = 0.5, 0.8
LAUNCH_S = (5e-6, 10e-6)  # s per eager PyTorch operator: assumed, not measured
PEAK_KEYS = {"fp32": "fp32_tflops", "tf32": "tf32_tflops", "bf16": "bf16_tensor_tflops", "fp16": "fp16_tensor_tflops"}


@dataclass(frozen=True)
class DevicePeaks:
    """Peak rates of a device.

    flops_per_s, bytes_per_s  from its profile
    """

    flops_per_s: float | None = None
    bytes_per_s: float | None = None

    @property
    def is_known(self) -> bool:
        """Return whether a time can be estimated."""
        return self.flops_per_s is not None and self.bytes_per_s is not None


@dataclass(frozen=True)
class TimeEstimate:
    """A range of seconds, and how it was estimated."""

    low: float
    high: float
    how: str

    @property
    def middle(self) -> float:
        """Return the center of the range, for comparisons."""
        return (self.low + self.high) / 2

    def __str__(self) -> str:
        unit, factor = ("s", 1.0) if self.high >= 1 else ("ms", 1e3)
        low, high = f"{self.low * factor:.3g}", f"{self.high * factor:.3g}"
        return f"{low} {unit}" if low == high else f"{low} to {high} {unit}"


def find_peaks(name: str, precision: str, profiles: Iterable[Mapping[str, Any]]) -> DevicePeaks:
    """Return the peak rates of the device of this name.

    profiles  facts of hardware profiles; the first that has the device is used
    """
    for facts in profiles:
        for device in facts.get("devices") or ():
            if str(device.get("name", "")).lower() != name.lower():
                continue
            flops, memory = device.get(PEAK_KEYS[precision]), device.get("memory_bandwidth_gb_s")
            flops = device.get("fp32_tflops") if flops is None else flops
            return DevicePeaks(flops * 1e12 if flops else None, memory * 1e9 if memory else None)
    return DevicePeaks()


def estimate_update_time(
    demand: Demand, micro_batches: Iterable[int], peaks: DevicePeaks, *, has_launch_cost: bool = False
) -> TimeEstimate | None:
    """Return the estimated time of an update of a rank; None if the peak rates of its device are unknown.

    micro_batches    sizes of the micro-batches
    has_launch_cost  each operator launches a kernel, as on a GPU without compilation
    """
    points = [demand.at(samples) for samples in micro_batches]
    estimate = _estimate_work(demand, points, peaks)
    num_launches = demand.step.launches + sum(point.work.launches for point in points)
    return _apply_launch_bound(estimate, num_launches) if estimate is not None and has_launch_cost else estimate


def _apply_launch_bound(estimate: TimeEstimate, num_launches: int) -> TimeEstimate:
    """Return the range, with both ends at least the time of this number of kernel launches."""
    low, high = (num_launches * seconds for seconds in LAUNCH_S)
    if estimate.low >= low and estimate.high >= high:
        return estimate
    cost = " to ".join(f"{seconds * 1e6:g}" for seconds in LAUNCH_S)
    how = f"{num_launches:,} kernel launches at an assumed {cost} us each; without them: {estimate}, {estimate.how}"
    return TimeEstimate(max(estimate.low, low), max(estimate.high, high), how)


def _estimate_work(demand: Demand, points: Sequence[TracedPoint], peaks: DevicePeaks) -> TimeEstimate | None:
    """Return the estimated time of computation and memory access."""
    work = sum((point.work for point in points), ComputeCost())
    if peaks.flops_per_s is None or peaks.bytes_per_s is None:
        return None
    moved = work.moved_bytes + demand.step.moved_bytes
    compute, memory = (
        work.flops / (peaks.flops_per_s * COMPUTE_EFFICIENCY),
        moved / (peaks.bytes_per_s * MEMORY_EFFICIENCY),
    )
    how = (
        f"{_format_si(work.flops)}FLOP at {COMPUTE_EFFICIENCY:.0%} of {_format_si(peaks.flops_per_s)}FLOP/s,"
        f" {_format_si(moved)}B at {MEMORY_EFFICIENCY:.0%} of {_format_si(peaks.bytes_per_s)}B/s"
    )
    return TimeEstimate(max(compute, memory), compute + memory, how)


def _format_si(value: float) -> str:
    """Format a number with an SI prefix: `1.43 T`."""
    for prefix, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if value >= size:
            return f"{value / size:.3g} {prefix}"
    return f"{value:.3g} "
