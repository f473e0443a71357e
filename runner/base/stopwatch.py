"""Where the time of an update goes, part by part, without waiting for the device.

On a CPU the host's clock tells. On a GPU the parts are marked on the device's own timeline and read when they are over,
an update or two later: nobody waits.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from itertools import pairwise
from typing import NamedTuple

import torch

PARTS = ("data", "forward", "backward", "optimizer", "wait")
"""data: until the batch is there; wait: for other ranks, exchange included."""


class Lap(NamedTuple):
    """The seconds of each part of an update."""

    update: int
    seconds: Mapping[str, float]


class Stopwatch:
    """Adds up the seconds of each part of an update: `start`, then a `lap` at the end of each part, then `stop`."""

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._since = time.perf_counter()
        self.last: Lap | None = None

    def forget(self) -> None:
        """Another phase begins: what is known is of the one before."""
        self.last = None

    def start(self) -> None:
        """An update begins."""
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._since = time.perf_counter()

    def lap(self, part: str) -> None:
        """What was done since the last call belongs to `part`."""
        now = time.perf_counter()
        self._seconds[part] += now - self._since
        self._since = now

    def stop(self, update: int) -> None:
        """Update number `update` is over; `last` tells of the newest update that is known."""
        self.last = Lap(update, self._seconds)


class DeviceStopwatch(Stopwatch):
    """The same by marks on the stream of a GPU; `last` lags behind by as much as the device does."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self._marks: list[tuple[str, torch.Event]] = []
        self._under_way: deque[tuple[int, list[tuple[str, torch.Event]]]] = deque()

    def forget(self) -> None:
        super().forget()
        self._under_way.clear()

    def start(self) -> None:
        self._marks = [("", self._mark())]

    def lap(self, part: str) -> None:
        self._marks.append((part, self._mark()))

    def stop(self, update: int) -> None:
        self._under_way.append((update, self._marks))
        while self._under_way and self._under_way[0][1][-1][1].query():
            number, marks = self._under_way.popleft()
            self.last = Lap(number, self._read(marks))

    def _mark(self) -> torch.Event:
        event = torch.Event(self.device, enable_timing=True)
        event.record()
        return event

    @staticmethod
    def _read(marks: list[tuple[str, torch.Event]]) -> dict[str, float]:
        seconds = dict.fromkeys(PARTS, 0.0)
        for (_, before), (part, after) in pairwise(marks):
            seconds[part] += before.elapsed_time(after) / 1e3
        return seconds


def stopwatch(device: torch.device) -> Stopwatch:
    """Return the one that tells the time of this device."""
    return DeviceStopwatch(device) if device.type == "cuda" else Stopwatch()
