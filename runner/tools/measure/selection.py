"""Judge the settings proposed by `advise` and `tune`, and choose the best of several, which is measured twice."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runner.base.json_values import replace_nonfinite
from runner.tools.measure.compare import CompareLimits
from runner.tools.measure.comparison_result import (
    ComparisonResult,
    TrialOutcome,
    Variant,
    VariantResult,
    encode_outcome,
)

NO_OUTCOME = TrialOutcome()
Measure = Callable[[Sequence[Variant], CompareLimits], ComparisonResult]


@dataclass(frozen=True)
class Confirmation:
    """How the best variant is measured a second time.

    least_s  minimum time budget in seconds
    rounds   minimum and maximum number of blocks; None: as in the first comparison
    extends  True: measure again even beyond the budget; False: use the result of the first comparison if time is too
             short for a second one, or if there is a single candidate
    log      called with the name of the best variant
    """

    least_s: float = 10.0
    rounds: tuple[int, int] | None = None
    extends: bool = True
    log: Callable[[str], None] = lambda _: None


@dataclass(frozen=True)
class Selection:
    """Measured variants, and the best of them.

    leader   fastest variant of the first comparison, among those with the numerical results of the baseline; empty:
             none of them is clearly faster
    outcome  outcome of the leader in the second comparison, because the first, which selected it, overestimates its
             gain; without a second comparison, the outcome in the first
    """

    result: ComparisonResult
    leader: str = ""
    outcome: TrialOutcome = NO_OUTCOME

    @property
    def best(self) -> VariantResult | None:
        """The leader if it is clearly faster in both comparisons; None: no clear change."""
        return self.result.of(self.leader) if self.leader and self.outcome.is_faster else None

    def describe_no_gain(self, baseline: str) -> str:
        """Return the sentence for a baseline that no variant beats."""
        compared = [trial for trial in self.result.variants[1:] if self.result.ratio(trial) and not trial.is_untried]
        if not compared:
            return f"nothing was compared with {baseline}"
        return f"no clear change: no measured setting is better than {baseline}"


def select(
    measure: Measure,
    variants: Sequence[Variant],
    limits: CompareLimits,
    *,
    may_win: Callable[[VariantResult], bool] = lambda _: True,
    confirmation: Confirmation = Confirmation(),
    clock: Callable[[], float] | None = None,
) -> Selection:
    """Measure all variants against the first, then measure the best of them against it again.

    With many variants, the confidence interval of some speed ratio excludes 1 by chance, so only a gain in both
    comparisons counts.
    """
    clock = clock or time.monotonic
    deadline = clock() + limits.budget_s
    is_single = len(variants) == 2 and not confirmation.extends
    share = 1.0 if is_single else SHARE_OF_FIRST
    first = dataclasses.replace(limits, budget_s=share * limits.budget_s)
    if is_single:
        first = dataclasses.replace(first, rounds=confirmation.rounds or limits.rounds)
    result = measure(variants, first)
    outcomes = {each.name: result.outcome(each) for each in result.variants[1:] if each.blocks and may_win(each)}
    faster = [name for name, outcome in outcomes.items() if outcome.is_faster]
    if not faster:
        return Selection(result)
    leader = max(faster, key=lambda name: outcomes[name].gain)
    left_s = deadline - clock()
    if is_single or (left_s < confirmation.least_s and not confirmation.extends):
        return Selection(result, leader, outcomes[leader])
    confirmation.log(leader)
    rest = dataclasses.replace(
        limits,
        budget_s=max(confirmation.least_s, left_s),
        rounds=confirmation.rounds or limits.rounds,
        seed=limits.seed + 1,
    )
    second = measure([variants[0], result.of(leader).variant], rest)
    return Selection(result, leader, second.outcome(second.of(leader)))


SHARE_OF_FIRST = 0.7  # share of the budget for the first comparison


# ---------------------------------------------------------------- candidates


@dataclass(frozen=True)
class Candidate:
    """Overrides that may make updates faster.

    They set only mechanics: settings of how an update is computed, which change its result by rounding at most.
    """

    overrides: tuple[str, ...]

    @property
    def name(self) -> str:
        """The overrides as typed on the command line."""
        return " ".join(self.overrides)


@dataclass(frozen=True)
class TriedCandidate:
    """A candidate with the outcome of its comparison.

    rule  the rule or axis that proposed it
    """

    rule: str
    candidate: Candidate
    outcome: TrialOutcome

    def as_json(self) -> dict[str, Any]:
        """Return JSON-serializable data; unknown values are null."""
        data = {
            "rule": self.rule,
            "overrides": list(self.candidate.overrides),
            "advised": self.outcome.is_advised,
            **encode_outcome(self.outcome),
        }
        return replace_nonfinite(data)  # type: ignore[no-any-return]


def judge_candidate(
    result: ComparisonResult, rule: str, candidate: Candidate, at_most: float | None = None
) -> TriedCandidate:
    """Return a candidate with its outcome, without a ratio if blocks are too short for the periodic work it affects.

    at_most  largest possible gain according to the evidence of the run
    """
    outcome, base = result.outcome(result.of(candidate.name)), result.baseline
    period, effect = PERIODIC_WORK.get(rule, ("", ""))
    if period and not base.covers(period) and not outcome.why_not:
        limit = "" if at_most is None else f"; the run's measurements limit the gain to {100 * (at_most - 1):+.0f} %"
        why_not = f"blocks of {base.updates} updates are too short to measure {effect}{limit}"
        outcome = dataclasses.replace(outcome, ratio=None, why_not=why_not, later_s=None, pays_at=None)
    return TriedCandidate(rule, candidate, outcome)


# rule -> periodic work, which short blocks may lack, and, for messages, the effect of the rule's candidates
PERIODIC_WORK: Mapping[str, tuple[str, str]] = {
    "checkpoints too often": ("checkpoint", "less frequent checkpoints"),
    "logs too often": ("log", "less frequent rows of metrics"),
}
