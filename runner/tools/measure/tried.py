"""What a comparison says of a proposed setting: whether it is faster, computes the same, and pays for its start-up."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from runner.tools.measure.comparison_result import NO_TIME, UNTRIED, ComparisonResult, Numerics
from runner.tools.measure.rules import Candidate
from runner.tools.measure.statistics import Ratio


@dataclass(frozen=True)
class Tried:
    """A candidate after its trial.

    ratio     None where it could not be measured: `why_not` says why
    numerics  how far its first losses are from the baseline's; None where they are not known
    later_s   seconds later that its updates are under way; None where that is not known
    pays_at   updates after which these are made up for; None where it begins no later, as far as can be told
    updates   of the training; None where that is not known
    """

    rule: str
    candidate: Candidate
    ratio: Ratio | None
    numerics: Numerics | None = None
    why_not: str = ""
    later_s: float | None = None
    pays_at: int | None = None
    updates: int | None = None

    @property
    def is_untried(self) -> bool:
        """True where the time, and nothing else, kept it from being compared."""
        return self.ratio is None and self.why_not.startswith((UNTRIED, NO_TIME))

    @property
    def is_faster(self) -> bool:
        """True where its updates are clearly faster and compute the same."""
        is_faster = self.ratio is not None and self.ratio.verdict == "better"
        return is_faster and not self.why_not and not (self.numerics is not None and self.numerics.differ)

    @property
    def pays(self) -> bool:
        """True where the training is long enough for what it takes to begin; unknown lengths are."""
        return self.pays_at is None or self.updates is None or self.pays_at < self.updates

    @property
    def is_advised(self) -> bool:
        """True where it is clearly faster, computes the same, and the training is long enough for it."""
        return self.is_faster and self.pays

    @property
    def opening(self) -> str:
        """Words for what it takes to begin; empty where that is nothing to speak of."""
        if self.pays_at is None or self.later_s is None:
            return ""
        return f"begins {self.later_s:.2g} s later, pays after {self.pays_at:,} updates"

    @property
    def gain(self) -> float:
        """How many times as fast it is; 0 where nobody knows."""
        return self.ratio.middle if self.ratio else 0.0

    @property
    def rounds_otherwise(self) -> bool:
        """True where its first loss is not the baseline's to the last digit."""
        return self.numerics is not None and self.numerics.loss > 0

    @property
    def told(self) -> str:
        """Words for what was gained, and for what it takes to begin."""
        return f"{self.ratio}{f'; {self.opening}' if self.opening else ''}"

    @property
    def reason(self) -> str:
        """Words for why it is not advised."""
        if self.why_not:
            return self.why_not
        if self.ratio is None:
            return "not tried"
        if self.numerics is not None and self.numerics.differ:
            return f"computes something else: {self.numerics} ({self.ratio})"
        if not self.pays:
            return f"faster, but the {self.updates:,} updates are too few for it: {self.told}"
        if self.ratio.verdict == "better":
            return f"better, but another setting is better still: {self.ratio}"
        return f"{self.ratio.verdict}: {self.ratio}"


def outcome(trials: ComparisonResult, rule: str, candidate: Candidate, at_most: float | None = None) -> Tried:
    """Return what a trial says of a candidate; of what blocks are too short to hold, only what the evidence says."""
    measured, base = trials.of(candidate.name), trials.baseline
    ratio, numerics, why_not = trials.ratio(measured), trials.numerics(measured), measured.why_not
    around = AROUND.get(rule)
    if around is not None and not base.sees(around[0]) and not why_not:
        most = "" if at_most is None else f"; by the evidence it gains at most {100 * (at_most - 1):+.0f} %"
        why_not = f"a trial of blocks of {base.updates} updates cannot see {around[1]}{most}"
        return Tried(rule, candidate, None, numerics, why_not)
    later_s, pays_at = trials.more_to_open_s(measured), None
    if later_s is not None and later_s > UNNOTICED_S and measured.median_ms < base.median_ms:
        pays_at = math.ceil(1e3 * later_s / (base.median_ms - measured.median_ms))
    return Tried(rule, candidate, ratio, numerics, why_not, later_s, pays_at, base.opened.get("updates"))


def tried_as_json(each: Tried) -> dict[str, Any]:
    """Return a trial, JSON-able; what is not known is null."""
    ratio = each.ratio
    return {
        "rule": each.rule,
        "overrides": list(each.candidate.overrides),
        "advised": each.is_advised,
        "speedup": known_number(ratio.middle) if ratio else None,
        "low": known_number(ratio.low) if ratio else None,
        "high": known_number(ratio.high) if ratio else None,
        "rounds": ratio.num if ratio else 0,
        "verdict": ratio.verdict if ratio else "not tried",
        "numerics_differ": each.numerics.differ if each.numerics else None,
        "why_not": each.why_not or None,
        "later_s": each.later_s,
        "pays_at": each.pays_at,
    }


def known_number(value: float) -> float | None:
    return value if math.isfinite(value) else None


UNNOTICED_S = 0.5  # by which the beginnings of the same setting differ


# What rules see and short blocks may not hold: its name among the periods of a cell, and in words.
AROUND: Mapping[str, tuple[str, str]] = {
    "checkpoints too often": ("checkpoint", "saves that come around less often"),
    "logs too often": ("log", "rows of metrics that come around less often"),
}
