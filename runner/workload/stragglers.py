"""Detect stragglers: which rank delays the others, and in which part of the update."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

PARTS = ("data", "transfer", "forward", "backward", "optimizer")  # the rest of an update is spent waiting
WAIT = "wait"

Update = Sequence[Mapping[str, float]]  # per rank, seconds of each part and of waiting; missing parts took 0

WINDOW = 20  # updates per decision
THRESHOLD = 0.10  # minimum lost fraction of an update
MIN_LOST_S = 0.001  # smaller losses are not reported
MIN_FREQUENCY = 0.6  # minimum fraction of the updates with the same straggler


@dataclass(frozen=True)
class Straggler:
    """A straggler, and the part of the update in which it exceeds the others most.

    lost_s    seconds per update that the others wait for it
    lost      `lost_s` as a fraction of the update, 0 to 1
    own_s     seconds of the straggler in that part
    others_s  median seconds of the other ranks in that part
    """

    rank: int
    part: str
    lost_s: float
    lost: float
    own_s: float
    others_s: float

    def __str__(self) -> str:
        return (
            f"rank {self.rank} is a straggler: its {self.part} takes {_ms(self.own_s)}, compared with"
            f" {_ms(self.others_s)} on the others; {100 * self.lost:.0f} % of each update is spent waiting for it"
        )


def find_straggler(updates: Sequence[Update]) -> Straggler | None:
    """Return the straggler in these updates, or None.

    It is the rank with the longest busy time, if the others wait for it for more than THRESHOLD of an update.
    Times are not divided by samples: shares are balanced so that all ranks finish together, and then a rank that is
    slower per sample delays no other.
    All values are medians over the updates, so a single outlier has no effect. Time that all ranks wait
    (communication) is not lost: only the waiting time beyond that of the slowest rank is.
    """
    if not updates or len(updates[0]) < 2:
        return None
    ranks = range(len(updates[0]))
    busy = [[sum(times.get(part, 0.0) for part in PARTS) for times in update] for update in updates]
    medians = [median(row[rank] for row in busy) for rank in ranks]
    rank = max(ranks, key=lambda rank: (medians[rank], -rank))
    others = [other for other in ranks if other != rank]
    frequency = sum(row[rank] >= max(row) for row in busy) / len(busy)
    exchange_s = [min(times.get(WAIT, 0.0) for times in update) for update in updates]
    update_s = median(max(row) + wait for row, wait in zip(busy, exchange_s, strict=True))
    lost_s = min(
        median(median(row[rank] - row[other] for other in others) for row in busy),
        median(median(_waited(update, other, rank) for other in others) for update in updates),
    )
    if frequency < MIN_FREQUENCY or lost_s <= THRESHOLD * update_s:
        return None
    own = {part: median(update[rank].get(part, 0.0) for update in updates) for part in PARTS}
    theirs = {part: median(_seconds(updates, other, part) for other in others) for part in PARTS}
    part = max(PARTS, key=lambda part: own[part] - theirs[part])
    return Straggler(rank, part, lost_s, lost_s / update_s, own[part], theirs[part])


class StragglerDetector:
    """Monitor the latest updates, and report a straggler and its part once per change.

    A straggler must be found in two consecutive windows: on a shared machine any rank is slow at times.

    window    number of updates per decision; with fewer, decisions are noisier
    warm_up   number of first updates to ignore, because they include start-up work
    """

    def __init__(self, *, window: int = WINDOW, warm_up: int = 5) -> None:
        self.window, self._warm_up_left = window, warm_up
        self._samples: tuple[int, ...] = ()
        self._updates: deque[Update] = deque(maxlen=window)
        self._suspected: Straggler | None = None
        self.found: Straggler | None = None

    def observe(self, update: Update, samples: Sequence[int]) -> Straggler | None:
        """Add an update; return the straggler if it is new, else None; `found` is the current one.

        A change of shares resets the window; the smaller last update of an epoch is ignored.
        """
        if self._warm_up_left:
            self._warm_up_left -= 1
            return None
        if sum(samples) < sum(self._samples):
            return None
        if tuple(samples) != self._samples:
            self._samples = tuple(samples)
            self._updates.clear()
        self._updates.append(update)
        if len(self._updates) < self.window:
            return None
        current = find_straggler(tuple(self._updates))
        self._updates.clear()
        if current and current.lost_s < MIN_LOST_S:
            current = None
        suspected, self._suspected = self._suspected, current
        if current and not (suspected and (current.rank, current.part) == (suspected.rank, suspected.part)):
            return None  # a single window may be slowed by another process
        previous, self.found = self.found, current
        is_known = current and previous and (current.rank, current.part) == (previous.rank, previous.part)
        return None if is_known else current


def _waited(update: Update, rank: int, slowest: int) -> float:
    return update[rank].get(WAIT, 0.0) - update[slowest].get(WAIT, 0.0)


def _seconds(updates: Sequence[Update], rank: int, part: str) -> float:
    return median(update[rank].get(part, 0.0) for update in updates)


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms" if seconds >= 0.01 else f"{1000 * seconds:.1f} ms"
