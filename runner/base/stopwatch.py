"""Measure the time of each part of a phase without synchronizing with the device.

The time between two calls of `lap` is attributed to the part given to the second call, so the parts sum to the elapsed
time. On a CPU the host's clock is used. On a GPU the parts are marked by events on the device's stream, which are read
when complete, an update or two later. So nothing blocks, and host work that overlaps with work of the device is not
counted.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # part names are needed before torch is loaded
    import torch

PARTS = ("data", "transfer", "forward", "backward", "optimizer", "wait")
"""Parts of an update. data: waiting for the batch; transfer: copying it to the device, if that is not the host;
wait: waiting for other ranks, including communication."""
BETWEEN = ("hooks", "logging", "drawing", "evaluation", "saving")
"""Parts of the time between updates; hooks: everything without a separate part."""
OUTSIDE = ("starting", "first_update", "closing")
"""Parts of a run before and after its timed updates."""

THROUGHPUT = "perf/throughput"
"""Key in metrics.jsonl: items per second over the updates of the phase so far, without the first one of a process."""

Seconds = Mapping[str, float]
TimeSnapshot = Callable[[], Seconds]


class Lap(NamedTuple):
    """Seconds of each part since the previous update; parts that did not occur are missing."""

    update: int
    seconds: Seconds


class Stopwatch:
    """Accumulate the seconds of each part: call `lap` at the end of each part, `stop` at the end of each update.

    on_lap  called with the lap of every update, in order, once it is known
    """

    def __init__(self, on_lap: Callable[[Lap], object] | None = None) -> None:
        self.on_lap = on_lap
        self.begin()

    def begin(self) -> None:
        """Start a phase with empty totals."""
        self._spent: defaultdict[str, float] = defaultdict(float)
        self._stopped: Seconds = {}  # totals at the end of the last update,
        self._before: Seconds = {}  # and of the one before
        self._update = 0
        self._between = "hooks"
        self._since = time.perf_counter()

    def lap(self, part: str) -> None:
        """Attribute the time since the last call to `part`."""
        now = time.perf_counter()
        self._spent[part] += now - self._since
        self._since = now

    @contextmanager
    def during(self, part: str) -> Iterator[None]:
        """Attribute the time inside the context to `part`, except for nested parts; called between updates."""
        self.lap(self._between)
        outer, self._between = self._between, part
        try:
            yield
        finally:
            self.lap(part)
            self._between = outer

    def stop(self, update: int) -> None:
        """End update number `update`, after the lap of its last part."""
        self._update, self._before, self._stopped = update, self._stopped, dict(self._spent)
        if self.on_lap is not None:
            self.on_lap(Lap(update, _subtract(self._stopped, self._before)))

    @property
    def last(self) -> Lap | None:
        """Return the seconds of the newest completed update and of the time before it; None before the first."""
        return Lap(self._update, _subtract(self._stopped, self._before)) if self._stopped else None

    def snapshot(self) -> TimeSnapshot:
        """Return a function that returns the totals at the end of the last update; it may wait for the device."""
        spent = self._stopped
        return lambda: spent

    def spent(self) -> Seconds:
        """Return the totals per part that are known so far."""
        return dict(self._spent)

    def finish(self) -> Seconds:
        """Return the final totals per part; synchronizes with the device."""
        self.lap(self._between)
        return self.spent()


@dataclass
class _Group:
    """Events of an update and of the time before it; the first event is also the last one of the previous group.

    is_rest  True for the time after the last update
    spent    totals per part at the end of the group, once known
    """

    update: int
    marks: list[tuple[str, torch.Event]]
    is_rest: bool = False
    spent: Seconds | None = None


class DeviceStopwatch(Stopwatch):
    """Stopwatch that records events on a GPU stream; results are available once the device has completed an update."""

    def __init__(self, device: torch.device, on_lap: Callable[[Lap], object] | None = None) -> None:
        from torch import Event

        self._new_event = partial(Event, device, enable_timing=True)
        self._free: list[torch.Event] = []  # reused, because creating an event takes longer
        super().__init__(on_lap)

    def begin(self) -> None:
        super().begin()
        self._last: Lap | None = None
        self._pending: deque[_Group] = deque()
        self._marks = [("", self._mark())]

    def lap(self, part: str) -> None:
        self._marks.append((part, self._mark()))

    def stop(self, update: int) -> None:
        self._close_group(update)
        self._read_completed()

    def spent(self) -> Seconds:
        self._read_completed()
        return dict(self._spent)

    @property
    def last(self) -> Lap | None:
        return self._last

    def snapshot(self) -> TimeSnapshot:
        if not self._pending:
            spent = dict(self._spent)
            return lambda: spent
        group = self._pending[-1]
        return lambda: self._totals_after(group)

    def finish(self) -> Seconds:
        self.lap(self._between)
        self._close_group(self._update, is_rest=True)
        return self._totals_after(self._pending[-1])

    def _close_group(self, update: int, *, is_rest: bool = False) -> None:
        self._update = update
        self._pending.append(_Group(update, self._marks, is_rest))
        self._marks = [("", self._marks[-1][1])]

    def _totals_after(self, group: _Group) -> Seconds:
        while group.spent is None:
            self._pending[0].marks[-1][1].synchronize()
            self._read()
        return group.spent

    def _read_completed(self) -> None:
        while self._pending and self._pending[0].marks[-1][1].query():
            self._read()

    def _read(self) -> None:
        """Add the times of the oldest pending update, which the device has completed."""
        group = self._pending.popleft()
        seconds: defaultdict[str, float] = defaultdict(float)
        for (_, before), (part, after) in pairwise(group.marks):
            seconds[part] += before.elapsed_time(after) / 1e3
        for part, spent in seconds.items():
            self._spent[part] += spent
        self._last = Lap(group.update, dict(seconds))
        if self.on_lap is not None and not group.is_rest:
            self.on_lap(self._last)
        group.spent = dict(self._spent)
        self._free += (event for _, event in group.marks[:-1])

    def _mark(self) -> torch.Event:
        event = self._free.pop() if self._free else self._new_event()
        event.record()
        return event


def new_stopwatch(device: torch.device, on_lap: Callable[[Lap], object] | None = None) -> Stopwatch:
    """Return the stopwatch for this device."""
    return DeviceStopwatch(device, on_lap) if device.type == "cuda" else Stopwatch(on_lap)


def seconds_between(since: Seconds, until: Seconds) -> dict[str, float]:
    """Return the seconds per part between two snapshots; parts without time are missing."""
    return _subtract(until, since)


def _subtract(until: Seconds, since: Seconds) -> dict[str, float]:
    return {part: spent for part in until if (spent := until[part] - since.get(part, 0.0)) > 0}
