"""Analyze a trace of torch's profiler: time breakdown and host waits.

Source of the format: Trace Event Format, https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsChNAySU
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

# Annotations in a trace.
DATA = "accel-run: data"  # the wait for a batch
PROFILER_WAIT = "accel-run: wait of the profiler"  # not a wait of the run
EXCLUDED = "accel-run: aside"  # an evaluation or a save, which is no part of an update

Interval = tuple[float, float]  # microseconds from, to


class TraceFile:
    """The events of a trace, read by kind; times are in microseconds."""

    def __init__(self, content: bytes) -> None:
        self.events: list[dict[str, Any]] = json.loads(content)["traceEvents"]

    @cached_property
    def updates(self) -> list[Interval]:
        """Start and end of each recorded update on the host."""
        return sorted(_interval(event) for event in self._annotations("ProfilerStep#"))

    @cached_property
    def thread(self) -> object:
        """The thread that runs the updates."""
        return next((event["tid"] for event in self._annotations("ProfilerStep#")), None)

    def shares(self) -> dict[str, float]:
        """Return part -> share of the time of the recorded updates; the shares add up to 1. Empty without updates.

        On a device: kernels, copies (while no kernel ran) and idle. Otherwise: data (the wait for a batch), operators,
        and between operators.
        """
        if not self.updates:
            return {}
        kernels = _merge(self._intervals("kernel", "gpu_memset"))
        copies = _merge(self._intervals("gpu_memcpy"))
        start, end = self.updates[0][0], self.updates[-1][1]
        if kernels or copies:
            end = max(end, *(interval[1] for interval in (*kernels[-1:], *copies[-1:])))
            first, second, names = kernels, copies, ("kernels", "copies", "idle")
        else:
            first, second = self.data, _merge(map(_interval, self._operators()))
            names = ("data", "operators", "between operators")
        window = _subtract([(start, end)], self.excluded)
        first = _intersect(first, window)
        second = _subtract(_intersect(second, window), first)
        result = [_total_length(first) / _total_length(window), _total_length(second) / _total_length(window)]
        return dict(zip(names, (*result, max(0.0, 1.0 - sum(result))), strict=True))

    def data_share(self) -> float | None:
        """Return the share of the recorded updates in which the host waited for a batch; None without updates."""
        if not self.updates:
            return None
        window = _subtract([(self.updates[0][0], self.updates[-1][1])], self.excluded)
        return _total_length(_intersect(self.data, window)) / _total_length(window)

    def device_waits(self) -> dict[str, float]:
        """Return CUDA call in which the host waits -> calls per update, without those of the profiler."""
        profiler = _merge([*map(_interval, self._annotations(PROFILER_WAIT)), *self.excluded])
        counted = _subtract(_merge(self.updates), profiler)
        result: dict[str, float] = {}
        for event in self.events:
            is_of_cuda = event.get("cat") in ("cuda_runtime", "cuda_driver")
            if is_of_cuda and event["name"] in WAITING_CALLS and _contains(counted, event["ts"]):
                result[event["name"]] = result.get(event["name"], 0.0) + 1.0 / max(1, len(self.updates))
        return result

    @cached_property
    def data(self) -> list[Interval]:
        """Intervals in which the host waited for a batch."""
        return _merge(_interval(event) for event in self._annotations(DATA))

    @cached_property
    def excluded(self) -> list[Interval]:
        """Intervals that are no part of an update."""
        return _merge(_interval(event) for event in self._annotations(EXCLUDED))

    def _annotations(self, start: str) -> Iterable[dict[str, Any]]:
        return (
            event
            for event in self.events
            if event.get("cat") == "user_annotation" and event["name"].startswith(start) and event["ph"] == "X"
        )

    def _intervals(self, *kinds: str) -> Iterable[Interval]:
        return (_interval(event) for event in self.events if event.get("cat") in kinds and event["ph"] == "X")

    def _operators(self) -> Iterable[dict[str, Any]]:
        """Yield the operators and compiled graphs on the thread of the updates, without Python functions."""
        for event in self.events:
            if event["ph"] != "X" or event.get("tid") != self.thread:
                continue
            name = event["name"]
            is_operator = "::" in name and not name.startswith(("autograd::", "torch::autograd"))
            if (event.get("cat") == "cpu_op" and is_operator) or name.startswith(GRAPH_NAMES):
                yield event


def _interval(event: Mapping[str, Any]) -> Interval:
    return float(event["ts"]), float(event["ts"]) + float(event.get("dur", 0.0))


def _merge(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union, in order and without overlap."""
    result: list[Interval] = []
    for start, end in sorted(intervals):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(result[-1][1], end))
        else:
            result.append((start, end))
    return result


def _intersect(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """Return the intersection of two unions."""
    result, first, second = [], 0, 0
    while first < len(one) and second < len(other):
        start, end = max(one[first][0], other[second][0]), min(one[first][1], other[second][1])
        if start < end:
            result.append((start, end))
        if one[first][1] < other[second][1]:
            first += 1
        else:
            second += 1
    return result


def _subtract(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """Return the first union without the second."""
    edges = [float("-inf"), *(edge for interval in other for edge in interval), float("inf")]
    gaps = [(edges[index], edges[index + 1]) for index in range(0, len(edges), 2)]
    return _intersect(one, gaps)


def _total_length(union: Iterable[Interval]) -> float:
    return sum(end - start for start, end in union)


def _contains(union: Sequence[Interval], when: float) -> bool:
    index = bisect_right(union, (when, float("inf"))) - 1
    return index >= 0 and when <= union[index][1]


GRAPH_NAMES = ("## Call Compiled", "Torch-Compiled Region", "CompiledFunction", "Call CompiledFxGraph")
WAITING_CALLS = {
    "cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy", "cuStreamSynchronize",
    "cuCtxSynchronize", "cuEventSynchronize",
}  # fmt: skip
