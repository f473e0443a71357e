"""Rows of metrics: losses stay on the device until a row is due, and are then copied without waiting."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from runner.base.errors import NumericError, TaskFault
from runner.base.world import World
from runner.engine.loop import StepInfo

Row = dict[str, Any]


@dataclass
class Clock:
    """Seconds of the host by what they were spent on, since the start of the run."""

    data: float = 0.0
    hooks: float = 0.0
    evaluation: float = 0.0
    saving: float = 0.0
    starting: float = 0.0
    ranks: float = 0.0  # waiting for other ranks, exchange included
    started: float = field(default_factory=time.perf_counter)

    def outside_updates(self) -> float:
        """Return the seconds that were not training."""
        return self.hooks


@dataclass
class _Pending:
    """A row whose numbers are on their way from the device."""

    row: Row
    numbers: Tensor  # on the host: loss sums, items, grad norm
    arrived: torch.Event | None  # None: nothing had to be copied

    def is_here(self) -> bool:
        return self.arrived is None or bool(self.arrived.query())


class Meter:
    """Collects what updates were and writes a row every `every` updates.

    write     gets each finished row
    readings  returns what else belongs into a row (loss scale, GPU)
    overflow_is_skipped  a non-finite loss is the scaler's business: it skips that update
    """

    def __init__(
        self,
        world: World,
        phase: str,
        *,
        every: int,
        write: Callable[[Row], None],
        readings: Callable[[], Mapping[str, Any]],
        clock: Clock,
        overflow_is_skipped: bool,
    ) -> None:
        self.world, self.phase, self.every = world, phase, every
        self.write, self.readings, self.clock = write, readings, clock
        self.overflow_is_skipped = overflow_is_skipped
        self.last_row: Row = {}
        self._losses: list[Tensor] = []
        self._items: list[Tensor | int] = []
        self._last: StepInfo | None = None
        self._pending: list[_Pending] = []
        self.items_seen = 0.0
        self.restart_clock()

    def __call__(self, step: StepInfo) -> None:
        """Note one update; write a row when one is due."""
        if step.loss_sum is not None:
            self._losses.append(step.loss_sum)
        self._items.append(step.items)
        self._last = step
        if step.update % self.every == 0:
            self._close_row()

    def flush(self) -> None:
        """Wait for the rows on their way and write them. Raises NumericError where a loss is not finite."""
        while self._pending:
            self._finish(self._pending.pop(0))

    def close_window(self) -> None:
        """Write a row for the updates since the last one, as at the end of a phase."""
        if self._items:
            self._close_row()
        self.flush()

    def state(self) -> dict[str, Any]:
        """Return the updates not yet in a row, so that a resumed run writes the same row; checks they are finite."""
        self.flush()
        losses = [float(loss) for loss in self._losses]
        last = self._last
        if last is not None and losses:
            self._check_items([float(count) for count in self._items], last.update)
        if last is not None and not self.overflow_is_skipped:
            self._check(losses, last.update)
        return {
            "losses": losses,
            "items": [float(count) for count in self._items],
            "items_seen": self.items_seen,
            # Where the row of a finished phase is still to come, no update will bring these again.
            "update": last.update if last else None,
            "lr": last.lr if last else None,
            "grad_norm": float(last.grad_norm) if last and last.grad_norm is not None else None,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Take back what `state` returned."""
        self._losses = [self._number(loss) for loss in state["losses"]]
        self._items = [self._number(count) for count in state["items"]]
        self.items_seen = float(state["items_seen"])
        if state["update"] is not None:
            norm = None if state["grad_norm"] is None else self._number(state["grad_norm"])
            self._last = StepInfo(state["update"], None, 0, norm, state["lr"], ())
        self.restart_clock()

    def restart_clock(self) -> None:
        """Forget the time until now, as after the first update, whose start-up does not describe the rest."""
        self._since, self._outside, self._data = time.perf_counter(), self.clock.outside_updates(), self.clock.data
        self._untimed = len(self._items)  # updates of this window that the clock has not seen

    def _close_row(self) -> None:
        assert self._last is not None
        now, step = time.perf_counter(), self._last
        outside, data = self.clock.outside_updates() - self._outside, self.clock.data - self._data
        seconds = max(now - self._since - outside, 1e-9)
        row: Row = {"update": step.update, "phase": self.phase}
        row |= {"lr": step.lr} if step.lr is not None else {}
        timing = {"seconds": seconds, "losses": len(self._losses), "untimed": self._untimed, "data": data}
        numbers = [self._number(value) for value in (*self._losses, *self._items)]
        norm = self._number(math.nan if step.grad_norm is None else step.grad_norm)
        self._losses, self._items = [], []
        self.restart_clock()
        self._pending.append(self._copy({**row, "_": timing}, [*numbers, norm]))
        while self._pending and self._pending[0].is_here():
            self._finish(self._pending.pop(0))

    def _number(self, value: float | Tensor) -> Tensor:
        return torch.as_tensor(value, dtype=self.world.widest)

    def _copy(self, row: Row, values: list[Tensor]) -> _Pending:
        device = self.world.device
        if device.type == "cpu":
            return _Pending(row, torch.stack(values), None)
        stacked = torch.stack([value.to(device, non_blocking=True) for value in values])
        on_host = torch.empty(stacked.shape, dtype=stacked.dtype, pin_memory=device.type == "cuda")
        on_host.copy_(stacked, non_blocking=True)
        arrived = torch.Event(device)
        arrived.record()
        return _Pending(row, on_host, arrived)

    def _finish(self, pending: _Pending) -> None:
        if pending.arrived is not None:
            pending.arrived.synchronize()
        timing = pending.row.pop("_")
        numbers = pending.numbers.tolist()
        losses, items, norm = numbers[: timing["losses"]], numbers[timing["losses"] : -1], numbers[-1]
        count = len(items)
        if losses:
            self._check_items(items, pending.row["update"])
        fine = [index for index, loss in enumerate(losses) if math.isfinite(loss)]
        total = sum(items)
        self.items_seen += total
        row = pending.row
        if losses:
            counted = max(sum(items[index] for index in fine), 1e-30)
            row["train/loss"] = sum(losses[index] for index in fine) / counted if fine else None
            row["train/grad_norm"] = norm if math.isfinite(norm) else None
        seconds, timed = timing["seconds"], count - timing["untimed"]
        row["perf/items_per_s"] = sum(items[count - timed :]) / seconds if timed else None
        row["perf/step_time_ms"] = 1e3 * seconds / timed if timed else None
        row["perf/data_wait"] = timing["data"] / seconds
        row |= self.readings()
        self.last_row = row
        self.write(row)
        if not self.overflow_is_skipped:
            self._check(losses, row["update"])

    @staticmethod
    def _check_items(items: list[float], update: int) -> None:
        """Raise TaskFault with the number of the first update without items; `update` is the last."""
        for number, count in enumerate(items, update - len(items) + 1):
            if count == 0:
                raise TaskFault(
                    f"the losses of a whole update count no items (update {number})",
                    fix="return (the sum, the number of items); or are all its samples bad? events.jsonl lists them",
                )

    def _check(self, losses: list[float], update: int) -> None:
        """Raise NumericError with the number of the first update whose loss is not finite; `update` is the last."""
        for number, loss in enumerate(losses, update - len(losses) + 1):
            if not math.isfinite(loss):
                raise NumericError(
                    f"the loss is not finite at update {number}",
                    where=f"phase {self.phase}",
                    fix="lower optimizer.lr, raise scheduler.warmup or set max_grad_norm; the last checkpoint is older",
                )


def as_line(row: Row) -> str:
    """Return a row as one line of JSON; numbers that are none become null."""
    return json.dumps({key: None if _is_none(value) else value for key, value in row.items()})


def _is_none(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
