"""Choose the best of several variants: measure all of them, then the best one once more."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from runner.tools.measure.compare import CompareLimits
from runner.tools.measure.comparison_result import ComparisonResult, TrialOutcome, Variant, VariantResult

NO_OUTCOME = TrialOutcome()
Measure = Callable[[Sequence[Variant], CompareLimits], ComparisonResult]


@dataclass(frozen=True)
class Confirmation:
    """How the best variant is measured once more.

    least_s  seconds that this takes at least
    rounds   fewest and most blocks; None: as before
    extends  True: it gets this time even beyond the budget; False: without the time, or without other candidates, the
             first comparison counts
    say      receives the name of the best variant
    """

    least_s: float = 10.0
    rounds: tuple[int, int] | None = None
    extends: bool = True
    say: Callable[[str], None] = lambda _: None


@dataclass(frozen=True)
class Selection:
    """Measured variants, and the best of them.

    leader   the fastest in the first comparison that computes the same; empty: none is clearly faster
    outcome  of the leader in the second comparison: the first one, which selected it, overestimates it
    """

    trials: ComparisonResult
    leader: str = ""
    outcome: TrialOutcome = NO_OUTCOME

    @property
    def best(self) -> VariantResult | None:
        """The leader if it is clearly faster in both comparisons; None: no clear change."""
        return self.trials.of(self.leader) if self.leader and self.outcome.is_faster else None

    def no_better(self, what: str) -> str:
        """Return the sentence if no variant is better than the baseline."""
        others = [each for each in self.trials.variants[1:] if self.trials.ratio(each) and not each.is_untried]
        if not others:
            return f"nothing was compared with {what}"
        return f"no clear change: {what} is as good as any that was measured"


def select(
    measure: Measure,
    variants: Sequence[Variant],
    limits: CompareLimits,
    *,
    may_win: Callable[[VariantResult], bool] = lambda _: True,
    confirmation: Confirmation = Confirmation(),
    clock: Callable[[], float] | None = None,
) -> Selection:
    """Measure all variants against the first, then the best of them once more against it alone.

    Among many identical variants, some interval excludes 1 by chance: only what both comparisons find is a change.
    """
    clock = clock or time.monotonic
    until = clock() + limits.budget_s
    is_one = len(variants) == 2 and not confirmation.extends
    share = 1.0 if is_one else SHARE_OF_FIRST
    first = dataclasses.replace(limits, budget_s=share * limits.budget_s)
    trials = measure(
        variants, dataclasses.replace(first, rounds=confirmation.rounds or limits.rounds) if is_one else first
    )
    trials.needs_s /= share
    outcomes = {each.name: trials.outcome(each) for each in trials.variants[1:] if each.blocks and may_win(each)}
    faster = [name for name, outcome in outcomes.items() if outcome.is_faster]
    if not faster:
        return Selection(trials)
    leader = max(faster, key=lambda name: outcomes[name].gain)
    left_s = until - clock()
    if is_one or (left_s < confirmation.least_s and not confirmation.extends):
        return Selection(trials, leader, outcomes[leader])
    confirmation.say(leader)
    rest = dataclasses.replace(
        limits,
        budget_s=max(confirmation.least_s, left_s),
        rounds=confirmation.rounds or limits.rounds,
        seed=limits.seed + 1,
    )
    second = measure([variants[0], trials.of(leader).variant], rest)
    return Selection(trials, leader, second.outcome(second.of(leader)))


SHARE_OF_FIRST = 0.7  # of the budget, for all variants; the rest is for the best one
