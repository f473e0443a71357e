"""Divide updates among ranks: in fixed shares, or in shares balanced by measured speed."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from runner.base.order import Order
from runner.base.shares import Shares
from runner.base.stopwatch import PARTS
from runner.workload.share_solver import Decision, ShareSolver


@dataclass(frozen=True)
class ShareChange:
    """Result of observing an update.

    decision  the new shares, with the reason; None: unchanged
    reread    the shares of prefetched updates have changed, so their batches are discarded and read again
    """

    decision: Decision | None = None
    reread: bool = False


class FixedShares:
    """Use the same shares for every update.

    In its methods, `index` counts updates from 0, and `num_completed` is the number of completed updates.
    """

    def __init__(self, order: Order) -> None:
        self.order = order

    def of(self, index: int) -> Shares | None:
        """Return the shares of an update; None: those of `order`. Called when the batches of the update are read."""
        return None

    def samples_per_rank(self, index: int) -> Shares:
        """Return the number of samples of each rank in an update."""
        return self.order.samples_per_rank(index)

    def observe(self, num_completed: int, seconds: tuple[Mapping[str, float], ...], samples: Shares) -> ShareChange:
        """Record the time and samples of each rank in the update before the last one; return the resulting change."""
        return ShareChange()

    def state(self) -> dict[str, Any]:
        """Return the JSON-serializable state for a checkpoint."""
        return {}

    def load(self, state: Mapping[str, Any], num_completed: int) -> None:
        """Restore what `state` returned."""


class MeasuredShares(FixedShares):
    """Shares balanced by measured speed; identical on all ranks, because all ranks receive the same timings.

    Timings arrive one update late, and batches are prefetched. The shares of an update are therefore fixed when its
    batches are read. If the shares change before the update runs, its batches are discarded and read again.
    """

    def __init__(self, order: Order) -> None:
        super().__init__(order)
        self.solver = ShareSolver(order.global_batch_size, len(order.shares), start=order.shares)
        self._num_received = 0  # number of updates whose timings have arrived
        self._assigned: dict[int, Shares] = {}  # index -> shares, for updates not run or not observed yet
        self._lock = threading.Lock()  # guards _assigned: a prefetch thread calls `of`

    def of(self, index: int) -> Shares | None:
        with self._lock:
            shares = self._current_shares(index)
            self._assigned[index] = shares
            return shares

    def samples_per_rank(self, index: int) -> Shares:
        return self.order.samples_per_rank(index, self._assigned.get(index))

    def observe(self, num_completed: int, seconds: tuple[Mapping[str, float], ...], samples: Shares) -> ShareChange:
        with self._lock:
            busy_s = [sum(rank_seconds[part] for part in PARTS if part != "wait") for rank_seconds in seconds]
            decision = self.solver.observe(busy_s, samples)
            self._num_received = max(0, num_completed - 1)
            for index in [index for index in self._assigned if index < num_completed - _MAX_LAG]:
                del self._assigned[index]
            ahead = [index for index in self._assigned if index >= num_completed]
            reread = any(self._assigned[index] != self._current_shares(index) for index in ahead)
            if reread:
                for index in ahead:
                    del self._assigned[index]
        return ShareChange(decision, reread)

    def state(self) -> dict[str, Any]:
        return self.solver.state()

    def load(self, state: Mapping[str, Any], num_completed: int) -> None:
        self._num_received = num_completed
        if state:
            self.solver.load(state)

    def _current_shares(self, index: int) -> Shares:
        return self.solver.ahead(max(0, index - self._num_received))


_MAX_LAG = 64  # completed updates whose shares are kept: the device may lag this far behind the host


def make_shares(option: Any, order: Order) -> FixedShares:
    """Create the shares for the setting `parallelism.shares`."""
    return MeasuredShares(order) if option == "speed" and len(order.shares) > 1 else FixedShares(order)
