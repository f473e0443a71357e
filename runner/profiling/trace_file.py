"""Analyze a trace of torch's profiler: time breakdown, host waits and memory over time.

Source of the format: Trace Event Format, https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsChNAySU
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

DATA = "accel-run: data"  # the annotation around the wait for a batch
OWN = "accel-run: wait of the profiler"  # no wait of the run
ASIDE = "accel-run: aside"  # an evaluation or a save: no part of an update
MARK = "accel-run: mark "  # and a number: memory that is known by then, see `memory`

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

    def marks(self) -> dict[int, float]:
        """Return number of the mark -> when it was made."""
        return {int(event["name"].removeprefix(MARK)): event["ts"] for event in self._annotations(MARK)}

    def addresses(self) -> set[int]:
        """Return where memory was allocated."""
        return {
            int(event["args"]["Addr"])
            for event in self.events
            if event["name"] == "[memory]" and int(event["args"]["Bytes"]) > 0
        }

    def backward(self) -> list[Interval]:
        """Return when a backward pass was at work."""
        return _merged(self._named("autograd::engine::"))

    def optimizer(self) -> list[Interval]:
        """Return when the optimizer made its step."""
        return _merged(_interval(event) for event in self._annotations("Optimizer.step#"))

    def _annotations(self, start: str) -> Iterable[dict[str, Any]]:
        return (
            event
            for event in self.events
            if event.get("cat") == "user_annotation" and event["name"].startswith(start) and event["ph"] == "X"
        )

    def _named(self, start: str) -> Iterable[Interval]:
        return (
            _interval(event)
            for event in self.events
            if event.get("cat") == "cpu_op" and event["name"].startswith(start) and event["ph"] == "X"
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


@dataclass(frozen=True)
class MemoryTimeline:
    """Bytes of each kind over the time of an update, and when they were the most.

    times_ms  from the beginning of the update; `held[kind][i]` is what that kind held from `times_ms[i]` on
    """

    times_ms: Sequence[float]
    held: Mapping[str, Sequence[int]]

    @property
    def peak(self) -> int:
        """The index at which all kinds together hold the most."""
        return max(range(len(self.times_ms)), key=lambda index: sum(row[index] for row in self.held.values()))

    def at_peak(self) -> dict[str, int]:
        """Return kind -> bytes at the peak; kinds that hold nothing there are left out."""
        return {kind: row[self.peak] for kind, row in self.held.items() if row[self.peak]}

    def thinned(self, most: int) -> MemoryTimeline:
        """Return at most about `most` moments, among them the highest of each stretch."""
        if len(self.times_ms) <= most:
            return self
        totals = [sum(row[index] for row in self.held.values()) for index in range(len(self.times_ms))]
        step = -(-len(totals) // most)
        kept = [
            max(range(start, min(start + step, len(totals))), key=totals.__getitem__)
            for start in range(0, len(totals), step)
        ]
        return MemoryTimeline(
            [self.times_ms[i] for i in kept], {kind: [row[i] for i in kept] for kind, row in self.held.items()}
        )


KINDS = ("parameters", "optimizer state", "gradients", "inputs", "activations", "temporaries", "other")


def memory(
    trace: TraceFile,
    is_on_gpu: bool,
    lasting: Mapping[int, tuple[str, int]],
    marked: Sequence[tuple[str, Sequence[int]]],
    gpu: int = 0,
) -> MemoryTimeline | None:
    """Return who held memory when in the last recorded update; None where the trace says nothing of memory.

    lasting  address -> kind and bytes, of what was there before
    gpu      index of its GPU, if any: each GPU has a separate address space
    marked   kind and addresses of each mark, in order: blocks at these addresses are of this kind since allocation
    """
    changes = sorted(
        (
            (
                event["ts"],
                int(event["args"]["Addr"]),
                int(event["args"]["Bytes"]),
                int(event["args"]["Total Allocated"]),
            )
            for event in trace.events
            if event["name"] == "[memory]" and _gpu(event) == (gpu if is_on_gpu else None)
        ),
        key=lambda change: change[0],
    )
    if not changes or not trace.updates:
        return None
    blocks = _blocks(changes, trace, marked)
    start, end = trace.updates[-1]
    held = dict.fromkeys(KINDS, 0)
    for kind, nbytes in lasting.values():
        held[kind] += nbytes
    if is_on_gpu:  # there the allocator knows of all; on the host it counts from when it is first asked
        held["other"] = max(0, changes[0][3] - changes[0][2] - sum(held.values()))
    times = [0.0]
    rows: dict[str, list[int]] = {kind: [] for kind in KINDS}
    freed: dict[int, str] = {}
    for (when, address, nbytes, _), kind in zip(changes, blocks, strict=True):
        if when > end:
            break
        if when > start and not rows["other"]:
            for name, row in rows.items():
                row.append(held[name])
        of = kind or freed.get(address) or (lasting[address][0] if address in lasting else "other")
        held[of] = max(0, held[of] + nbytes)
        if when > start and not _holds(trace.aside, when):
            times.append((when - start - _length(_common(trace.aside, [(start, when)]))) / 1e3)
            for name, row in rows.items():
                row.append(held[name])
    if not rows["other"]:
        return None
    return MemoryTimeline(times, {kind: row for kind, row in rows.items() if any(row)})


def _gpu(event: Mapping[str, Any]) -> int | None:
    """Return the index of the GPU on which memory was allocated or freed, None for the host."""
    return int(event["args"]["Device Id"]) if int(event["args"]["Device Type"]) != 0 else None


def _blocks(
    changes: Sequence[tuple[float, int, int, int]], trace: TraceFile, marked: Sequence[tuple[str, Sequence[int]]]
) -> list[str]:
    """Return the kind of each change; "" for memory that was allocated before."""
    found = [""] * len(changes)
    when_marked = trace.marks()
    marks = sorted((when_marked[number], number) for number in range(len(marked)) if number in when_marked)
    backward, optimizer = trace.backward(), trace.optimizer()
    live: dict[int, list[int]] = {}  # address -> the changes of the block at this address
    coming = iter([*marks, (float("inf"), -1)])
    at, number = next(coming)
    for index, (when, address, nbytes, _) in enumerate(changes):
        while at < when:
            kind, addresses = marked[number]
            for known in addresses:
                for change in live.get(known, ()):
                    found[change] = kind
            at, number = next(coming)
        if nbytes > 0:
            live[address] = [index]
            is_temporary = _holds(backward, when) or _holds(optimizer, when)
            found[index] = "inputs" if _holds(trace.data, when) else "temporaries" if is_temporary else "activations"
        elif address in live:
            first = live.pop(address)[0]
            found[index] = found[first]
    while number >= 0:  # after the last change
        for known in marked[number][1]:
            for change in live.get(known, ()):
                found[change] = marked[number][0]
        at, number = next(coming)
    return found


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
