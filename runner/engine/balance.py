"""Decide the share of each rank in an update: fixed, or balanced by measured speed."""

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
    reread    prefetched batches no longer belong to this rank
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

    def made(self, update: int) -> Shares:
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

    Timings arrive one update late and batches are prefetched: an update is divided when it is read, and
    read again if the shares changed in between.
    """

    def __init__(self, order: Order) -> None:
        super().__init__(order)
        self.balance = ShareSolver(order.global_batch_size, len(order.shares), start=order.shares)
        self._heard = 0  # number of updates whose timings have arrived
        self._dealt: dict[int, Shares] = {}  # update -> shares, for updates not run or not observed yet
        self._guard = threading.Lock()  # a prefetch thread may call this

    def of(self, update: int) -> Shares | None:
        with self._guard:
            shares = self._now(update)
            self._dealt[update] = shares
            return shares

    def made(self, update: int) -> Shares:
        return self.order.samples_per_rank(update - 1, self._dealt.get(update - 1))

    def observe(self, update: int, seconds: tuple[Mapping[str, float], ...], samples: Shares) -> ShareChange:
        with self._guard:
            busy = [sum(there[part] for part in PARTS if part != "wait") for there in seconds]
            exchange_s = min(there["wait"] for there in seconds)
            decision = self.balance.observe(busy, samples, exchange_s)
            self._heard = max(0, update - 1)
            for number in [number for number in self._dealt if number < update - _KEPT]:
                del self._dealt[number]
            ahead = [number for number in self._dealt if number >= update]
            reread = any(self._dealt[number] != self._now(number) for number in ahead)
            if reread:
                for number in ahead:
                    del self._dealt[number]
        return ShareChange(decision, reread)

    def state(self) -> dict[str, Any]:
        return self.balance.state()

    def load(self, state: Mapping[str, Any], update: int) -> None:
        self._heard = update
        if state:
            self.balance.load(state)

    def _now(self, update: int) -> Shares:
        return self.balance.ahead(max(0, update - self._heard))


_KEPT = 64  # number of updates by which a device may lag behind


def make_shares(wanted: Any, order: Order) -> FixedShares:
    """Return measured shares for `speed`, else fixed ones."""
    return MeasuredShares(order) if wanted == "speed" and len(order.shares) > 1 else FixedShares(order)
