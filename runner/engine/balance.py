"""Divide updates among ranks: in fixed shares, or in shares balanced by measured speed."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from runner.base.order import Order
from runner.base.share_solver import Decision, ShareSolver
from runner.base.shares import Shares
from runner.base.stopwatch import PARTS


@dataclass(frozen=True)
class ShareChange:
    """Result of observing an update.

    decision  the new shares, with the reason
    reread    prefetched batches have other samples than this rank's new share
    """

    decision: Decision | None = None
    reread: bool = False


class FixedShares:
    """Use the same shares for every update."""

    def __init__(self, order: Order) -> None:
        self.order = order

    def of(self, update: int) -> Shares | None:
        """Return the shares of update number `update` (from 0), or None for the default; called when it is read."""
        return None

    def samples_per_rank(self, update: int) -> Shares:
        """Return the number of samples of each rank in update number `update` (from 1)."""
        return self.order.samples_per_rank(update - 1)

    def observe(self, update: int, seconds: tuple[Mapping[str, float], ...], samples: Shares) -> ShareChange:
        """Record the time and samples of each rank after `update` updates; return the resulting change."""
        return ShareChange()

    def state(self) -> dict[str, Any]:
        """Return the JSON-serializable state for a checkpoint."""
        return {}

    def load(self, state: Mapping[str, Any], update: int) -> None:
        """Restore what `state` returned, after `update` updates."""


class MeasuredShares(FixedShares):
    """Shares balanced by measured speed; identical on all ranks, because all ranks receive the same timings.

    Timings arrive one update late and batches are prefetched: an update is divided when it is read, and read again if
    the shares have changed since.
    """

    def __init__(self, order: Order) -> None:
        super().__init__(order)
        self.balance = ShareSolver(order.global_batch_size, len(order.shares), start=order.shares)
        self._num_received = 0  # number of updates whose timings have arrived
        self._assigned: dict[int, Shares] = {}  # update -> shares, for updates not run or not observed yet
        self._lock = threading.Lock()  # a prefetch thread may call this

    def of(self, update: int) -> Shares | None:
        with self._lock:
            shares = self._current_shares(update)
            self._assigned[update] = shares
            return shares

    def samples_per_rank(self, update: int) -> Shares:
        return self.order.samples_per_rank(update - 1, self._assigned.get(update - 1))

    def observe(self, update: int, seconds: tuple[Mapping[str, float], ...], samples: Shares) -> ShareChange:
        with self._lock:
            busy_s = [sum(rank_seconds[part] for part in PARTS if part != "wait") for rank_seconds in seconds]
            decision = self.balance.observe(busy_s, samples)
            self._num_received = max(0, update - 1)
            for number in [number for number in self._assigned if number < update - _MAX_LAG]:
                del self._assigned[number]
            ahead = [number for number in self._assigned if number >= update]
            reread = any(self._assigned[number] != self._current_shares(number) for number in ahead)
            if reread:
                for number in ahead:
                    del self._assigned[number]
        return ShareChange(decision, reread)

    def state(self) -> dict[str, Any]:
        return self.balance.state()

    def load(self, state: Mapping[str, Any], update: int) -> None:
        self._num_received = update
        if state:
            self.balance.load(state)

    def _current_shares(self, update: int) -> Shares:
        return self.balance.ahead(max(0, update - self._num_received))


_MAX_LAG = 64  # shares are kept for this number of updates, by which a device may lag behind the host


def make_shares(option: Any, order: Order) -> FixedShares:
    """Create the shares for the setting `parallelism.shares`."""
    return MeasuredShares(order) if option == "speed" and len(order.shares) > 1 else FixedShares(order)
