"""Settings that advise and tune propose, and their results in a comparison."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from runner.base.json_values import replace_nonfinite
from runner.tools.measure.comparison_result import ComparisonResult, TrialOutcome


@dataclass(frozen=True)
class Candidate:
    """Overrides that may be faster: only mechanics, which change results by rounding at most."""

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
        ratio, numerics = self.outcome.ratio, self.outcome.numerics
        data: dict[str, Any] = {
            "rule": self.rule,
            "overrides": list(self.candidate.overrides),
            "advised": self.outcome.is_advised,
            "speedup": ratio.middle if ratio else None,
            "low": ratio.low if ratio else None,
            "high": ratio.high if ratio else None,
            "rounds": ratio.num if ratio else 0,
            "verdict": ratio.verdict if ratio else "not tried",
            "numerics_differ": numerics.differ if numerics else None,
            "why_not": self.outcome.why_not or None,
            "later_s": self.outcome.later_s,
            "pays_at": self.outcome.pays_at,
        }
        return replace_nonfinite(data)  # type: ignore[no-any-return]


def judge_candidate(
    result: ComparisonResult, rule: str, candidate: Candidate, at_most: float | None = None
) -> TriedCandidate:
    """Return a candidate with its outcome; without a ratio if blocks are too short for the periodic work it concerns.

    at_most  largest possible gain according to the evidence of the run
    """
    outcome, base = result.outcome(result.of(candidate.name)), result.baseline
    period, effect = PERIODIC_WORK.get(rule, ("", ""))
    if period and not base.covers(period) and not outcome.why_not:
        limit = "" if at_most is None else f"; according to the run it gains at most {100 * (at_most - 1):+.0f} %"
        why_not = f"blocks of {base.updates} updates are too short to measure {effect}{limit}"
        outcome = dataclasses.replace(outcome, ratio=None, why_not=why_not, later_s=None, pays_at=None)
    return TriedCandidate(rule, candidate, outcome)


# rule -> periodic work that short blocks may not contain, and the effect of its candidates for messages
PERIODIC_WORK: Mapping[str, tuple[str, str]] = {
    "checkpoints too often": ("checkpoint", "less frequent checkpoints"),
    "logs too often": ("log", "less frequent rows of metrics"),
}
