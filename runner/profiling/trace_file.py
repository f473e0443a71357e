"""Analyze a trace of torch's profiler: time breakdown and host waits.

Source of the format: Trace Event Format, https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsChNAySU
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

DATA = "accel-run: data"  # the annotation around the wait for a batch
OWN = "accel-run: wait of the profiler"  # no wait of the run
ASIDE = "accel-run: aside"  # an evaluation or a save: no part of an update

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
        """The thread that makes the updates."""
        return next((event["tid"] for event in self._annotations("ProfilerStep#")), None)

    def shares(self) -> dict[str, float]:
        """Return part -> share of the time of the recorded updates; they add up to 1, and are none without updates.

        Where a device worked: kernels, copies (while no kernel ran) and idle. Else: operators, data (until a batch is
        there, whatever is done for it), and between operators.
        """
        if not self.updates:
            return {}
        kernels = _merged(self._of("kernel", "gpu_memset"))
        copies = _merged(self._of("gpu_memcpy"))
        start, end = self.updates[0][0], self.updates[-1][1]
        if kernels or copies:
            end = max(end, *(interval[1] for interval in (*kernels[-1:], *copies[-1:])))
            first, second, names = kernels, copies, ("kernels", "copies", "idle")
        else:
            first, second = self.data, _merged(map(_interval, self._operators()))
            names = ("data", "operators", "between operators")
        window = _without([(start, end)], self.aside)
        first = _common(first, window)
        second = _without(_common(second, window), first)
        found = [_length(first) / _length(window), _length(second) / _length(window)]
        return dict(zip(names, (*found, max(0.0, 1.0 - sum(found))), strict=True))

    def data_share(self) -> float | None:
        """Return the share of the recorded updates in which the host waited for a batch; None without updates."""
        if not self.updates:
            return None
        window = _without([(self.updates[0][0], self.updates[-1][1])], self.aside)
        return _length(_common(self.data, window)) / _length(window)

    def device_waits(self) -> dict[str, float]:
        """Return the call of CUDA in which the host waited -> how often in an update, without the profiler's own."""
        own = _merged([*map(_interval, self._annotations(OWN)), *self.aside])
        counted = _without(_merged(self.updates), own)
        found: dict[str, float] = {}
        for event in self.events:
            is_of_cuda = event.get("cat") in ("cuda_runtime", "cuda_driver")
            if is_of_cuda and event["name"] in _WAITING and _holds(counted, event["ts"]):
                found[event["name"]] = found.get(event["name"], 0.0) + 1.0 / max(1, len(self.updates))
        return found

    @cached_property
    def data(self) -> list[Interval]:
        """When the host waited for a batch."""
        return _merged(_interval(event) for event in self._annotations(DATA))

    @cached_property
    def aside(self) -> list[Interval]:
        """When something was done that is no part of an update."""
        return _merged(_interval(event) for event in self._annotations(ASIDE))

    def _annotations(self, start: str) -> Iterable[dict[str, Any]]:
        return (
            event
            for event in self.events
            if event.get("cat") == "user_annotation" and event["name"].startswith(start) and event["ph"] == "X"
        )

    def _of(self, *kinds: str) -> Iterable[Interval]:
        return (_interval(event) for event in self.events if event.get("cat") in kinds and event["ph"] == "X")

    def _operators(self) -> Iterable[dict[str, Any]]:
        """Return what computes on the thread of the updates: operators and graphs, not the Python around them."""
        for event in self.events:
            if event["ph"] != "X" or event.get("tid") != self.thread:
                continue
            name = event["name"]
            is_operator = "::" in name and not name.startswith(("autograd::", "torch::autograd"))
            if (event.get("cat") == "cpu_op" and is_operator) or name.startswith(_GRAPHS):
                yield event


# ---------------------------------------------------------------- intervals


def _interval(event: Mapping[str, Any]) -> Interval:
    return float(event["ts"]), float(event["ts"]) + float(event.get("dur", 0.0))


def _merged(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union, in order and without overlap."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def _common(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """Return what is in both unions."""
    found, first, second = [], 0, 0
    while first < len(one) and second < len(other):
        start, end = max(one[first][0], other[second][0]), min(one[first][1], other[second][1])
        if start < end:
            found.append((start, end))
        if one[first][1] < other[second][1]:
            first += 1
        else:
            second += 1
    return found


def _without(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """Return what is in the first union and not in the second."""
    edges = [float("-inf"), *(edge for interval in other for edge in interval), float("inf")]
    gaps = [(edges[index], edges[index + 1]) for index in range(0, len(edges), 2)]
    return _common(one, gaps)


def _length(union: Iterable[Interval]) -> float:
    return sum(end - start for start, end in union)


def _holds(union: Sequence[Interval], when: float) -> bool:
    index = bisect_right(union, (when, float("inf"))) - 1
    return index >= 0 and when <= union[index][1]


_GRAPHS = ("## Call Compiled", "Torch-Compiled Region", "CompiledFunction", "Call CompiledFxGraph")
_WAITING = {
    "cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy", "cuStreamSynchronize",
    "cuCtxSynchronize", "cuEventSynchronize",
}  # fmt: skip
