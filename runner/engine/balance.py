"""Which share of each update a rank gets: fixed, or followed from what the ranks take."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from runner.base.order import Order
from runner.base.shares import Shares
from runner.base.speed import Balance, Decision
from runner.base.stopwatch import PARTS


@dataclass(frozen=True)
class Change:
    """What follows from an update.

    decision  what was decided, with its reason
    reread    batches that were read ahead are no longer those of this rank
    """

    decision: Decision | None = None
    reread: bool = False


class FixedShares:
    """Every update is dealt the same way."""

    def __init__(self, order: Order) -> None:
        self.order = order

    def of(self, update: int) -> Shares | None:
        """Return the shares of update number `update` (from 0), None for the usual ones; asked when it is read."""
        return None

    def made(self, update: int) -> Shares:
        """Return how many samples each rank had in update number `update` (from 1)."""
        return self.order.samples_of_ranks(update - 1)

    def observe(self, update: int, seconds: tuple[Mapping[str, float], ...], samples: Shares) -> Change:
        """Take in what each rank took for its samples, `update` updates being made; return what follows."""
        return Change()

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint must keep, JSON-able."""
        return {}

    def load(self, state: Mapping[str, Any], update: int) -> None:
        """Go on after `update` updates from what `state` returned."""


class MeasuredShares(FixedShares):
    """Shares that follow the measured speed of the ranks; the same on all of them, since all hear the same.

    What the ranks took is heard an update late, and batches are read ahead: an update is dealt when it is read, and
    read again where a decision came in between.
    """

    def __init__(self, order: Order) -> None:
        super().__init__(order)
        self.balance = Balance(order.global_batch_size, len(order.shares), start=order.shares)
        self._heard = 0  # updates the balance knows of
        self._dealt: dict[int, Shares] = {}  # update -> shares, for those not made and those not heard of yet
        self._guard = threading.Lock()  # a thread may read ahead

    def of(self, update: int) -> Shares | None:
        with self._guard:
            shares = self._now(update)
            self._dealt[update] = shares
            return shares

    def made(self, update: int) -> Shares:
        return self.order.samples_of_ranks(update - 1, self._dealt.get(update - 1))

    def observe(self, update: int, seconds: tuple[Mapping[str, float], ...], samples: Shares) -> Change:
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
        return Change(decision, reread)

    def state(self) -> dict[str, Any]:
        return self.balance.state()

    def load(self, state: Mapping[str, Any], update: int) -> None:
        self._heard = update
        if state:
            self.balance.load(state)

    def _now(self, update: int) -> Shares:
        return self.balance.ahead(max(0, update - self._heard))


_KEPT = 64  # updates that a device may lag behind


def shares_by(wanted: Any, order: Order) -> FixedShares:
    """Return how updates are dealt: `speed` follows what is measured, anything else is fixed."""
    return MeasuredShares(order) if wanted == "speed" and len(order.shares) > 1 else FixedShares(order)
