"""`accel-run advise`: rules propose settings, and those with a measured gain are recommended."""

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
from runner.tools.measure.compare import MIN_ROUNDS, SLACK, CompareLimits, Comparison, LogFunction
from runner.tools.measure.comparison_result import (
    BASELINE_NAME,
    NO_TIME_LEFT,
    ComparisonResult,
    Variant,
    VariantResult,
)
from runner.tools.measure.measurement_context import complete_evidence, measure_evidence, open_context
from runner.tools.measure.rules import RuleFinding, findings
from runner.tools.measure.selection import Candidate, TriedCandidate, judge_candidate


@dataclass(frozen=True)
class Entry:
    """One piece of advice.

    tried  setting with its comparison; None for a manual change, which is in `finding.by_hand`
    gain   speed relative to the current settings: measured for a setting, an upper bound for a manual change; None:
           unknown
    """

    finding: RuleFinding
    tried: TriedCandidate | None
    gain: float | None

    @property
    def what(self) -> str:
        """The setting or the manual change."""
        return self.tried.candidate.name if self.tried else self.finding.by_hand


@dataclass(frozen=True)
class Advice:
    """The advice for a training run.

    tried  all candidates, the fastest first
    """

    task: str
    device_name: str
    update_ms: float
    findings: tuple[RuleFinding, ...]
    tried: tuple[TriedCandidate, ...] = ()
    notes: tuple[str, ...] = ()
    mode: str = ""
    seconds: float = 0.0

    @property
    def advised(self) -> list[TriedCandidate]:
        """The recommended candidates, at most one per finding, the fastest first."""
        best: dict[str, TriedCandidate] = {}
        for tried in self.tried:
            if tried.outcome.is_advised:
                best.setdefault(tried.rule, tried)
        return list(best.values())

    @property
    def entries(self) -> list[Entry]:
        """Settings and manual changes by decreasing gain; unknown gains come last."""
        by_rule = {finding.rule: finding for finding in self.findings}
        entries = [Entry(by_rule[tried.rule], tried, tried.outcome.gain) for tried in self.advised]
        entries += [Entry(finding, None, finding.at_most) for finding in self.findings if finding.by_hand]
        return sorted(entries, key=lambda entry: -(entry.gain or 0.0))


@dataclass(frozen=True)
class AdviceInputs:
    """Records of a finished run.

    monitor    metric -> mean over the run
    throttled  throttling reason -> share of the time
    phase      the longest training phase, which is measured
    """

    evidence: Evidence | None = None
    monitor: Mapping[str, float] = field(default_factory=dict)
    throttled: Mapping[str, float] = field(default_factory=dict)
    phase: str | None = None


def advise(request: Request, run: AdviceInputs, budget_s: float, log: LogFunction) -> Advice:
    """Find settings that make updates faster on this machine, and measure them.

    run  records of a finished run; missing values are measured
    Raises AccelRunError if the current settings cannot be measured.
    """
    began = time.monotonic()
    limits = CompareLimits(budget_s=budget_s, phase=run.phase, time_first_evaluation=True)
    with open_context(request) as context:
        comparison, plan, notes = context.comparison, context.plan, context.notes
        log("measuring the current settings")
        first_limits = dataclasses.replace(limits, run_evaluations=True)
        with comparison.open_variant(Variant(BASELINE_NAME), first_limits) as (call, opened):
            now, probe = measure_evidence(call, opened, plan)
        recorded_device, device = run.evidence.device_name if run.evidence else None, plan.device_name
        if recorded_device is not None and recorded_device != device:
            notes.append(f"the run was on {recorded_device}, but this is {device}: everything is measured again")
            run = AdviceInputs()
        evidence = complete_evidence(run.evidence, now)
        facts = context.facts(evidence, opened, probe, monitor=run.monitor, throttled=run.throttled)
        all_findings = findings(facts)
        candidates = select_candidates(all_findings)
        result = try_candidates(comparison, limits, candidates, began + budget_s, opened, log)
    at_most = {finding.rule: finding.at_most for finding in all_findings}
    tried = [judge_candidate(result, rule, candidate, at_most[rule]) for rule, candidate in candidates]
    measured_ms = result.baseline.median_ms
    return Advice(
        task=plan.choices["task"].name,
        device_name=opened.opened["device_name"],
        update_ms=measured_ms if math.isfinite(measured_ms) else facts.update_ms() or math.nan,
        findings=tuple(all_findings),
        tried=tuple(sorted(tried, key=lambda candidate: -candidate.outcome.gain)),
        notes=(*notes, *result.notes),
        mode=result.mode,
        seconds=time.monotonic() - began,
    )


def try_candidates(
    comparison: Comparison,
    limits: CompareLimits,
    candidates: Sequence[tuple[str, Candidate]],
    deadline: float,
    opened: VariantResult,
    log: LogFunction,
) -> ComparisonResult:
    """Compare the candidates with the current settings, as time allows; set `why_not` of those that are not tried.

    deadline  time on the clock of the comparison
    opened    measurements of the current settings, to estimate the time
    """
    left = deadline - comparison.clock()
    least_s = SLACK * (2 * opened.startup.taken_s + SLACK * MIN_ROUNDS * 3 * opened.turn_s)  # for two variants
    hint = f"budget_s={limits.budget_s:g} is too short"
    variants = [Variant(BASELINE_NAME), *(Variant(candidate.name, candidate.overrides) for _, candidate in candidates)]
    if not candidates or left < least_s:
        untried = ComparisonResult([VariantResult(variant) for variant in variants], "interleaved")
        for trial in untried.variants[1:]:
            trial.why_not = f"{NO_TIME_LEFT}; {hint}"
        return untried
    log(f"trying {len(candidates)} setting{'s' if len(candidates) > 1 else ''} for at most {left:.0f} s")
    result = comparison.compare(variants, dataclasses.replace(limits, budget_s=left), lambda _: None)
    for trial in result.variants[1:]:
        if trial.is_untried:
            trial.why_not = f"{trial.why_not or UNFINISHED}; {hint}"
    return result


def select_candidates(all_findings: Sequence[RuleFinding]) -> list[tuple[str, Candidate]]:
    """Return at most MAX_CANDIDATES (rule, candidate): the first candidate of each finding, then the second, ..."""
    selected: dict[Candidate, str] = {}
    for index in range(max((len(finding.candidates) for finding in all_findings), default=0)):
        for finding in all_findings:
            if index < len(finding.candidates):
                selected.setdefault(finding.candidates[index], finding.rule)
    return [(rule, candidate) for candidate, rule in selected.items()][:MAX_CANDIDATES]


def as_json(advice: Advice) -> dict[str, Any]:
    """Return the advice as JSON-serializable data; unknown values are null."""
    data: dict[str, Any] = {
        "task": advice.task,
        "device": advice.device_name,
        "update_ms": advice.update_ms,
        "advice": [
            {
                "rule": entry.finding.rule,
                "what": entry.what,
                "evidence": entry.finding.evidence,
                "tried": entry.tried.as_json() if entry.tried else None,
                "gain": entry.gain,
            }
            for entry in advice.entries
        ],
        "findings": [
            encode(finding) | {"candidates": [list(candidate.overrides) for candidate in finding.candidates]}
            for finding in advice.findings
        ],
        "tried": [candidate.as_json() for candidate in advice.tried],
        "notes": list(advice.notes),
        "mode": advice.mode or None,
        "seconds": advice.seconds,
    }
    return replace_nonfinite(data)  # type: ignore[no-any-return]


UNFINISHED = "not measured: the time budget was used up before its third block"
MAX_CANDIDATES = 8
