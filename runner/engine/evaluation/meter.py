"""Collect metrics: losses stay on the device until a row is due and are then copied asynchronously."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from runner.base.errors import TaskFault
from runner.base.stopwatch import BETWEEN, PARTS, THROUGHPUT, Seconds, Stopwatch, TimeSnapshot, seconds_between
from runner.distributed.world import World
from runner.engine.contract.contract_checks import LOSSES_HAVE, invalid_count_fault, no_items_error
from runner.engine.update.loop import StepInfo
from runner.tensors.async_copy import PendingCopy, start_copy

Row = dict[str, Any]


@dataclass
class UpdateClock:
    """Breakdown of this process's time by part.

    All time is counted: time before a phase is `starting`, time after the last phase is `closing`.

    started      start of the run, by `time.perf_counter`
    parts_s      part -> seconds, of the finished phases
    updates      number of timed updates; the first update of a process counts as start-up
    num_updates  number of all updates
    """

    started: float = field(default_factory=lambda: time.perf_counter())  # noqa: PLW0108 - tests replace the clock
    parts_s: dict[str, float] = field(default_factory=dict)
    updates: int = 0
    num_updates: int = 0

    def __post_init__(self) -> None:
        self._since = self.started

    def begin(self) -> None:
        """Start a phase."""
        self.parts_s = add_times(self.parts_s, {"starting": time.perf_counter() - self._since})

    def end(self, parts_s: Seconds, updates: int) -> None:
        """End a phase: add its times and the number of its updates, timed or not."""
        self.parts_s = add_times(self.parts_s, parts_s)
        self.updates += updates - ("first_update" in parts_s)
        self.num_updates += updates
        self._since = time.perf_counter()

    def all(self) -> dict[str, float]:
        """Return the seconds of this process so far, by part."""
        return add_times(self.parts_s, {"closing": time.perf_counter() - self._since})


def add_times(left: Seconds, right: Seconds) -> dict[str, float]:
    """Return the sum of two dictionaries, part by part."""
    return {part: left.get(part, 0.0) + right.get(part, 0.0) for part in {**left, **right}}


@dataclass(frozen=True)
class TimedUpdate:
    """Items and seconds of the updates after the first one of a process.

    The seconds run from the end of the first update to the end of the last one, so they include work between updates:
    evaluations, checkpoints and logging.
    """

    items: float = 0.0
    seconds: float = 0.0
    updates: int = 0

    def __add__(self, right: TimedUpdate) -> TimedUpdate:
        return TimedUpdate(self.items + right.items, self.seconds + right.seconds, self.updates + right.updates)

    @property
    def throughput(self) -> float | None:
        """Return items per second, or None before the end of the second update."""
        return self.items / self.seconds if self.items and self.seconds else None

    @property
    def pace(self) -> float | None:
        """Return updates per second, over the same time as `throughput`."""
        return None if self.throughput is None else self.updates / self.seconds


@dataclass(frozen=True)
class _Window:
    """Updates of one row: time range, number of losses, and number of untimed updates."""

    since: TimeSnapshot
    until: TimeSnapshot
    num_losses: int
    num_untimed: int
    extra: Sequence[str] = ()  # names of additional metrics; their sums and counts come last in `_Pending.numbers`


@dataclass(frozen=True)
class _Pending:
    """Row whose numbers are being copied from the device.

    numbers  loss sums, item counts, grad norm, and sums and counts of additional metrics; None: still being copied
    """

    row: Row
    window: _Window
    numbers: Sequence[float | None]
    copy: PendingCopy

    def read(self) -> list[float]:
        """Return all numbers; blocks until they have arrived."""
        arrived = iter(self.copy.read().tolist())
        return [next(arrived) if number is None else number for number in self.numbers]


class Meter:
    """Collect the results of updates and write a row every `every` updates.

    write        receives each finished row
    readings     returns the additional columns of a row from each hook, such as the loss scale or GPU utilization
    stopwatch    time breakdown of the phase
    is_starting  the first update of the phase is the first of its process: it is not timed, and `restart_clock` is
                 called after it
    send         copies device numbers to the host
    locate       returns file:line of the loss, for messages
    """

    def __init__(
        self,
        world: World,
        phase: str,
        *,
        every: int,
        write: Callable[[Row], None],
        readings: Callable[[], Iterable[Mapping[str, Any]]],
        stopwatch: Stopwatch,
        is_starting: bool = False,
        send: Callable[[Tensor], PendingCopy] = start_copy,
        locate: Callable[[], str] = lambda: "",
    ) -> None:
        self.world, self.phase, self.every, self.send = world, phase, every, send
        self.write, self.readings, self.stopwatch = write, readings, stopwatch
        self._locate = locate
        self.last_row: Row = {}
        self.step_times_ms: deque[float] = deque(maxlen=_MAX_STEP_TIMES)  # of the latest rows
        self.timed = TimedUpdate()
        self._losses: list[Tensor | float] = []
        self._items: list[Tensor | int | float] = []
        self._extra: dict[str, tuple[Tensor | float, Tensor | float]] = {}  # name -> (sum, count) since the last row
        self._last: StepInfo | None = None
        self._pending: list[_Pending] = []
        self.items_seen = 0.0
        self._is_starting = is_starting
        self._begin_window()

    def __call__(self, step: StepInfo) -> None:
        """Record one update; write a row when one is due."""
        if step.loss_sum is not None:
            self._losses.append(step.loss_sum)
        self._items.append(step.items)
        for name, (total, count) in step.extra.items():
            before = self._extra.get(name, (0.0, 0.0))
            self._extra[name] = before[0] + total, before[1] + count
        self._last = step
        if step.update % self.every == 0:
            self._close_row()

    def flush(self) -> None:
        """Wait for pending rows and write them."""
        with self.stopwatch.during("logging"):
            while self._pending:
                self._finish(self._pending.pop(0))

    def close_window(self) -> None:
        """Write a row for the updates that no row contains yet, and all pending rows; called at the end of a phase."""
        if self._items:
            self._close_row()
        self.flush()

    def state(self) -> dict[str, Any]:
        """Return the updates not yet in a row, so that a resumed run writes the same row as an uninterrupted one."""
        self.flush()
        losses = [float(loss) for loss in self._losses]
        last = self._last
        if last is not None and losses:
            self._check_items([float(count) for count in self._items], last.update)
        return {
            "losses": losses,
            "items": [float(count) for count in self._items],
            "items_seen": self.items_seen,
            "extra": {name: [float(total), float(count)] for name, (total, count) in self._extra.items()},
            # If the phase has finished but its last row is not written yet, no later update provides these values.
            "update": last.update if last else None,
            "lr": last.lr if last else None,
            "grad_norm": float(last.grad_norm) if last and last.grad_norm is not None else None,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        self._losses, self._items = [*state["losses"]], [*state["items"]]
        self.items_seen = float(state["items_seen"])
        self._extra = {name: (total, count) for name, (total, count) in state.get("extra", {}).items()}
        if state["update"] is not None:
            norm = None if state["grad_norm"] is None else torch.tensor(state["grad_norm"], dtype=self.world.widest)
            self._last = StepInfo(state["update"], None, 0, norm, state["lr"], ())
        self._begin_window()

    def restart_clock(self) -> None:
        """Restart timing; called after the first update of a process, whose time includes start-up."""
        self._begin_window()
        self._is_starting = False

    def _begin_window(self) -> None:
        self._since = self.stopwatch.snapshot()
        self._untimed = len(self._items)  # number of untimed updates in this window

    def data_wait(self) -> float | None:
        """Return the share of update time that was spent waiting for data since the last row.

        If no timed update followed the last row, return the share in that row; None if there is no row yet. On an
        accelerator, only updates that the device has completed count.
        """
        share = (
            _data_wait(seconds_between(self._since(), self.stopwatch.spent()))
            if len(self._items) > self._untimed
            else None
        )
        return self.last_row.get("perf/data_wait") if share is None else share

    def _close_row(self) -> None:
        with self.stopwatch.during("logging"):
            assert self._last is not None
            step = self._last
            row: Row = {"update": step.update, "phase": self.phase}
            row |= {"lr": step.lr} if step.lr is not None else {}
            untimed = len(self._items) if self._is_starting else self._untimed
            window = _Window(self._since, self.stopwatch.snapshot(), len(self._losses), untimed, tuple(self._extra))
            norm = math.nan if step.grad_norm is None else step.grad_norm
            extra = [number for pair in self._extra.values() for number in pair]
            numbers, copy = self._copy_to_host([*self._losses, *self._items, norm, *extra])
            self._losses, self._items, self._extra = [], [], {}
            self._begin_window()
            self._pending.append(_Pending(row, window, numbers, copy))
            while self._pending and self._pending[0].copy.is_complete():
                self._finish(self._pending.pop(0))

    def _copy_to_host(self, values: Sequence[Tensor | float]) -> tuple[list[float | None], PendingCopy]:
        """Start one copy of all device values; return all values, with None in place of device values, and the copy."""
        numbers = [None if isinstance(value, Tensor) else float(value) for value in values]
        on_device = [value.to(self.world.device, self.world.widest) for value in values if isinstance(value, Tensor)]
        return numbers, self.send(torch.stack(on_device) if on_device else torch.empty(0))

    def _finish(self, pending: _Pending) -> None:
        row, window = pending.row, pending.window
        numbers = pending.read()
        until = len(numbers) - 2 * len(window.extra)
        extra = iter(numbers[until:])
        losses, items, norm = numbers[: window.num_losses], numbers[window.num_losses : until - 1], numbers[until - 1]
        if losses:
            self._check_items(items, row["update"])
        finite = [index for index, loss in enumerate(losses) if math.isfinite(loss)]
        self.items_seen += sum(items)
        if losses:
            num_items = max(sum(items[index] for index in finite), 1e-30)
            row["train/loss"] = sum(losses[index] for index in finite) / num_items if finite else None
            row["train/grad_norm"] = norm if math.isfinite(norm) else None
        for name, total, count in zip(window.extra, extra, extra, strict=True):
            row[f"train/{name}"] = total / count if count and math.isfinite(total) else None
        row |= self._timing(window, items[window.num_untimed :])
        for readings in self.readings():
            if taken := row.keys() & readings.keys():
                what = f"readings() of a hook returned metrics that the row already has: {', '.join(sorted(taken))}"
                raise TaskFault(what, fix="use other names")
            row |= readings
        self.last_row = row
        self.write(row)

    def _timing(self, window: _Window, items: list[float]) -> Row:
        """Return the speed and time breakdown of a window.

        items  number of items of each timed update
        """
        parts_s = seconds_between(window.since(), window.until())
        seconds = sum(parts_s.get(part, 0.0) for part in PARTS)
        if not items or not seconds:
            return {"perf/items_per_s": None, "perf/step_time_ms": None, "perf/data_wait": None}
        self.timed += TimedUpdate(sum(items), sum(parts_s.get(part, 0.0) for part in (*PARTS, *BETWEEN)), len(items))
        row: Row = {
            "perf/items_per_s": self.timed.throughput,  # the name in trackers; both names have the same value
            THROUGHPUT: self.timed.throughput,
            "perf/step_time_ms": 1e3 * seconds / len(items),
            "perf/data_wait": _data_wait(parts_s),
        }
        self.step_times_ms.append(row["perf/step_time_ms"])
        for part in (*PARTS, *BETWEEN):
            if part in parts_s:
                row[f"perf/{part}_ms"] = round(1e3 * parts_s[part] / len(items), 4)
        return row

    def _check_items(self, items: list[float], update: int) -> None:
        """Raise TaskFault if an update has no items or a negative count; `update` is the number of the last update."""
        for number, count in enumerate(items, update - len(items) + 1):
            if count < 0:
                raise invalid_count_fault(LOSSES_HAVE, count, "at least 0", number, self._locate())
            if count == 0:
                raise no_items_error(number, self._locate())


def _data_wait(parts_s: Seconds) -> float | None:
    seconds = sum(parts_s.get(part, 0.0) for part in PARTS)
    return parts_s.get("data", 0.0) / seconds if seconds else None


_MAX_STEP_TIMES = 1000  # rows whose step times are stored
