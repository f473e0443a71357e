"""Which rank holds the others up, and in which part of the update."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

PARTS = ("data", "transfer", "forward", "backward", "optimizer")  # what a rank does; the rest of an update it waits
WAIT = "wait"

Update = Sequence[Mapping[str, float]]  # per rank, seconds of each part and of waiting; what is not named took none

WINDOW = 20  # updates that are looked at together
THRESHOLD = 0.10  # least part of an update that is lost
LEAST_S = 0.001  # less is not worth a word
OFTEN = 0.6  # least part of the updates in which it is the same rank


@dataclass(frozen=True)
class Slow:
    """The rank that holds the others up, and the part in which it exceeds them most.

    lost_s        seconds of each update that the others wait for it
    lost          the same as a part of the update, 0 to 1
    own_s         seconds of the rank in that part
    others_s      median seconds of the others in that part
    num_samples   samples of the rank and of all, where it only takes longer because it has more of them, else None
    """

    rank: int
    part: str
    lost_s: float
    lost: float
    own_s: float
    others_s: float
    num_samples: tuple[int, int] | None = None

    def __str__(self) -> str:
        why = ""
        if self.num_samples:
            share, total = self.num_samples
            why = f" (it has {share} of {total} samples and is not slower per sample)"
        return (
            f"rank {self.rank} holds the others up: its {self.part} takes {_ms(self.own_s)}, theirs"
            f" {_ms(self.others_s)}; {100 * self.lost:.0f} % of each update is spent waiting for it{why}"
        )


def slow(updates: Sequence[Update], samples: Sequence[int] | None = None, threshold: float = THRESHOLD) -> Slow | None:
    """Return who holds the others up in these updates, and where, or None.

    It is the rank with the largest busy time, if the others wait for it for more than `threshold` of an update.
    Seconds count as they are, not per sample: shares are dealt so that all are done at once, and then a rank that is
    slower per sample keeps nobody waiting. `samples` per rank only tell whether a rank is slow or has too many.
    All numbers are medians over the updates, so a single hiccup names nobody. What all wait for (the exchange) is not
    lost: only what the others wait longer than the slow rank.
    """
    if not updates or len(updates[0]) < 2:
        return None
    ranks = range(len(updates[0]))
    busy = [[_busy(times) for times in update] for update in updates]
    medians = [median(row[rank] for row in busy) for rank in ranks]
    rank = max(ranks, key=lambda rank: (medians[rank], -rank))
    others = [other for other in ranks if other != rank]
    often = sum(row[rank] >= max(row) for row in busy) / len(busy)
    exchange_s = [min(times.get(WAIT, 0.0) for times in update) for update in updates]
    whole_s = median(max(row) + wait for row, wait in zip(busy, exchange_s, strict=True))
    lost_s = min(
        median(median(row[rank] - row[other] for other in others) for row in busy),
        median(median(_waited(update, other, rank) for other in others) for update in updates),
    )
    if often < OFTEN or lost_s <= threshold * whole_s:
        return None
    own = {part: median(update[rank].get(part, 0.0) for update in updates) for part in PARTS}
    theirs = {part: median(_seconds(updates, other, part) for other in others) for part in PARTS}
    part = max(PARTS, key=lambda part: own[part] - theirs[part])
    crowded = samples is not None and _only_has_more(updates, rank, others, part, samples)
    num_samples = (samples[rank], sum(samples)) if samples is not None and crowded else None
    return Slow(rank, part, lost_s, lost_s / whole_s, own[part], theirs[part], num_samples)


class Watch:
    """Look at the last updates again and again, and name a rank and part once, until it is another one or it is over.

    It must be found in two windows in a row: on a shared machine any rank is slow for a while.

    window    updates that are looked at together; shorter is noisier
    warm_up   first updates that are not looked at: they start everything
    """

    def __init__(self, *, window: int = WINDOW, warm_up: int = 5, threshold: float = THRESHOLD) -> None:
        self.window, self.threshold = window, threshold
        self._unseen = warm_up
        self._samples: tuple[int, ...] = ()
        self._updates: deque[Update] = deque(maxlen=window)
        self._suspected: Slow | None = None
        self.found: Slow | None = None

    def observe(self, update: Update, samples: Sequence[int]) -> Slow | None:
        """Take in one update; return who holds the others up where that is news, else None; `found` has it always.

        Where the shares changed, looking begins anew; the ragged end of an epoch, with fewer samples, is left out.
        """
        if self._unseen:
            self._unseen -= 1
            return None
        if sum(samples) < sum(self._samples):
            return None
        if tuple(samples) != self._samples:
            self._samples = tuple(samples)
            self._updates.clear()
        self._updates.append(update)
        if len(self._updates) < self.window:
            return None
        found = slow(tuple(self._updates), self._samples, self.threshold)
        self._updates.clear()
        if found and found.lost_s < LEAST_S:
            found = None
        suspected, self._suspected = self._suspected, found
        if found and not (suspected and (found.rank, found.part) == (suspected.rank, suspected.part)):
            return None  # once is a neighbor on the machine, twice is the rank
        before, self.found = self.found, found
        is_known = found and before and (found.rank, found.part) == (before.rank, before.part)
        return None if is_known else found


def _busy(times: Mapping[str, float]) -> float:
    return sum(times.get(part, 0.0) for part in PARTS)


def _waited(update: Update, rank: int, slowest: int) -> float:
    """Return how much longer than the slowest a rank waited, in seconds."""
    return update[rank].get(WAIT, 0.0) - update[slowest].get(WAIT, 0.0)


def _seconds(updates: Sequence[Update], rank: int, part: str) -> float:
    return median(update[rank].get(part, 0.0) for update in updates)


def _only_has_more(
    updates: Sequence[Update], rank: int, others: Sequence[int], part: str, samples: Sequence[int]
) -> bool:
    """Tell whether the rank has more samples than the others and takes no longer than they for each."""
    per_sample = [_seconds(updates, other, part) / samples[other] for other in others if samples[other]]
    if part == "optimizer" or not per_sample or samples[rank] <= median(samples[other] for other in others):
        return False
    return _seconds(updates, rank, part) / samples[rank] <= median(per_sample) * (1 + THRESHOLD)


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms" if seconds >= 0.01 else f"{1000 * seconds:.1f} ms"
