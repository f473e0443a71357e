"""`accel-run advise`: rules propose settings, comparisons decide. Only what was tried and is faster is advised."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from runner.base.json_converter import encode
from runner.base.json_values import replace_nonfinite
from runner.config.request import Request
from runner.records.evidence import Evidence
from runner.tools.measure.candidates import Candidate, Tried, tried_in
from runner.tools.measure.compare import CompareLimits, Comparison, Say, enough, needed_s
from runner.tools.measure.comparison_result import (
    BASELINE_NAME,
    UNTRIED,
    ComparisonResult,
    Variant,
    VariantResult,
)
from runner.tools.measure.measuring_place import filled, inspect, measuring
from runner.tools.measure.rules import RuleFinding, findings


@dataclass(frozen=True)
class Entry:
    """One piece of advice.

    tried  the setting and its comparison; None if it is a manual change: `finding.by_hand`
    gain   times as fast as the current settings: measured, or predicted at most; None: unknown
    """

    finding: RuleFinding
    tried: Tried | None
    gain: float | None

    @property
    def what(self) -> str:
        """What to do."""
        return self.tried.candidate.name if self.tried else self.finding.by_hand


@dataclass(frozen=True)
class Advice:
    """The advice for a training.

    tried  every candidate, the fastest first
    """

    task: str
    device_name: str
    update_ms: float
    findings: tuple[RuleFinding, ...]
    tried: tuple[Tried, ...] = ()
    notes: tuple[str, ...] = ()
    mode: str = ""
    seconds: float = 0.0

    @property
    def advised(self) -> list[Tried]:
        """The candidates that are clearly faster and compute the same, one for each finding, the fastest first."""
        best: dict[str, Tried] = {}
        for each in self.tried:
            if each.outcome.is_advised:
                best.setdefault(each.rule, each)
        return list(best.values())

    @property
    def entries(self) -> list[Entry]:
        """Settings and manual changes in one list, the largest gain first; unknown ones come last.

        A slow transform has the gain that is left of it if the advised readers hide the larger part.
        """
        found = {finding.rule: finding for finding in self.findings}
        entries = [Entry(found[tried.rule], tried, tried.outcome.gain) for tried in self.advised]
        hidden = max((entry.gain or 1.0 for entry in entries if entry.finding.rule == "data wait"), default=1.0)
        for finding in self.findings:
            if finding.by_hand:
                most = finding.at_most
                if finding.rule == "slow transform" and most is not None and most / hidden <= hidden:
                    most = max(1.0, most / hidden)
                entries.append(Entry(finding, None, most))
        return sorted(entries, key=lambda entry: -(entry.gain or 0.0))


@dataclass(frozen=True)
class AdviceInputs:
    """What a finished run recorded: its evidence, the monitor's figures, and the phase that took longest."""

    evidence: Evidence | None = None
    monitor: Mapping[str, float] = field(default_factory=dict)
    throttled: Mapping[str, float] = field(default_factory=dict)
    phase: str | None = None


def advise(request: Request, run: AdviceInputs, budget_s: float, say: Say) -> Advice:
    """Return what would make these updates faster, tried on this machine.

    run  what it did not record is measured now
    Raises AccelRunError if the training itself cannot be measured.
    """
    began = time.monotonic()
    limits = CompareLimits(budget_s=budget_s, phase=run.phase, first_evaluation=True)
    with measuring(request) as place:
        comparison, plan, notes = place.comparison, place.plan, place.notes
        say("measures the current settings")
        own = dataclasses.replace(limits, evaluates=True)
        with comparison.alone(Variant(BASELINE_NAME), own) as (ask, opened):
            now, probe = inspect(ask, opened, plan)
        there, here = run.evidence.device_name if run.evidence else None, plan.device_name
        if there is not None and there != here:
            notes.append(f"the run was on {there}, and this is {here}: everything is measured again")
            run = AdviceInputs()
        evidence = filled(run.evidence, now)
        facts = place.facts(evidence, opened, probe, monitor=run.monitor, throttled=run.throttled)
        found = findings(facts)
        wanted = candidates_of(found)
        trials = try_candidates(comparison, limits, wanted, began + budget_s, opened, say)
    most = {finding.rule: finding.at_most for finding in found}
    tried = [tried_in(trials, rule, each, most[rule]) for rule, each in wanted]
    measured_ms = trials.baseline.median_ms
    return Advice(
        task=plan.choices["task"].name,
        device_name=opened.opened["device_name"],
        update_ms=measured_ms if math.isfinite(measured_ms) else facts.update_ms() or math.nan,
        findings=tuple(found),
        tried=tuple(sorted(tried, key=lambda each: -each.outcome.gain)),
        notes=(*notes, *trials.notes),
        mode=trials.mode,
        seconds=time.monotonic() - began,
    )


def try_candidates(
    comparison: Comparison,
    limits: CompareLimits,
    wanted: Sequence[tuple[str, Candidate]],
    deadline: float,
    opened: VariantResult,
    say: Say,
) -> ComparisonResult:
    """Compare the candidates with the current settings, as time allows; those without a turn say so.

    deadline  by the clock of the comparison
    opened    the current settings: how long a start and an update take
    """
    left = deadline - comparison.clock()

    def too_short(seconds: float, trials: ComparisonResult) -> str:
        return f"budget_s={limits.budget_s:g} is too short: {enough(limits.budget_s - left + seconds, trials)}"

    def needs_s(num: int) -> float:
        return needed_s([opened.startup.taken_s] * num, [opened.turn_s] * num)

    variants = [Variant(BASELINE_NAME), *(Variant(candidate.name, candidate.overrides) for _, candidate in wanted)]
    if not wanted or left < needs_s(2):
        untried = ComparisonResult([VariantResult(each) for each in variants], "interleaved")
        for each in untried.variants[1:]:
            each.why_not = f"{UNTRIED}; {too_short(needs_s(len(variants)), untried)}"
        return untried
    say(f"tries {len(wanted)} setting{'s' if len(wanted) > 1 else ''}, for at most {left:.0f} s")
    trials = comparison.compare(variants, dataclasses.replace(limits, budget_s=left), lambda _: None)
    for measured in trials.variants[1:]:
        if measured.is_untried:
            measured.why_not = f"{measured.why_not or UNFINISHED}; {too_short(trials.needs_s, trials)}"
    return trials


def candidates_of(found: Sequence[RuleFinding]) -> list[tuple[str, Candidate]]:
    """Return rule and candidate, at most MOST: the first of each finding, then the second, and so on."""
    taken: dict[Candidate, str] = {}
    for place in range(max((len(finding.candidates) for finding in found), default=0)):
        for finding in found:
            if place < len(finding.candidates):
                taken.setdefault(finding.candidates[place], finding.rule)
    return [(rule, candidate) for candidate, rule in taken.items()][:MOST]


def as_json(advice: Advice) -> dict[str, Any]:
    """Return all of it as JSON-serializable data; unknown values are null."""
    found: dict[str, Any] = {
        "task": advice.task,
        "device": advice.device_name,
        "update_ms": advice.update_ms,
        "advice": [
            {
                "rule": each.finding.rule,
                "what": each.what,
                "evidence": each.finding.evidence,
                "tried": each.tried.as_json() if each.tried else None,
                "gain": each.gain,
            }
            for each in advice.entries
        ],
        "findings": [
            encode(finding) | {"candidates": [list(each.overrides) for each in finding.candidates]}
            for finding in advice.findings
        ],
        "tried": [each.as_json() for each in advice.tried],
        "notes": list(advice.notes),
        "mode": advice.mode or None,
        "seconds": advice.seconds,
    }
    return replace_nonfinite(found)  # type: ignore[no-any-return]


UNFINISHED = "not tried to the end: the time was over before its third block"
MOST = 8  # candidates
