"""`accel-run advise`: rules propose settings, comparisons decide. Only what was tried and is faster is advised."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from runner.base.json_converter import encode
from runner.base.json_values import finite
from runner.config.request import Request
from runner.plan.inventory import Inventory
from runner.records.evidence import Evidence
from runner.tools.measure.candidates import Candidate, Tried, tried_in
from runner.tools.measure.compare import CompareLimits, Comparison, Say, enough, needed_s
from runner.tools.measure.comparison_result import (
    BASELINE_NAME,
    UNTRIED,
    ComparisonResult,
    TrialOutcome,
    Variant,
    VariantResult,
)
from runner.tools.measure.criteria import Criterion, RangeCheck, checks, criteria, rule_of_thumb
from runner.tools.measure.facts import Facts
from runner.tools.measure.hardware_profile import Profile
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
class Trials:
    """What was tried.

    tried     every candidate, the fastest first
    together  the advised ones that do not exclude each other, tried as one; None if there were fewer than two
    """

    tried: tuple[Tried, ...] = ()
    together: Tried | None = None
    notes: tuple[str, ...] = ()
    mode: str = ""
    update_ms: float = math.nan  # of the current settings


@dataclass(frozen=True)
class Advice:
    """The advice for a training.

    device_verdict  CPU against GPU, measured
    """

    task: str
    device_name: str
    update_ms: float
    findings: tuple[RuleFinding, ...]
    trials: Trials
    criteria: tuple[Criterion, ...]
    device_verdict: str
    checks: tuple[RangeCheck, ...] = ()
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def advised(self) -> list[Tried]:
        """The candidates that are clearly faster and compute the same, one for each finding, the fastest first."""
        return list(best_of_each(self.trials.tried).values())

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

    @property
    def to_apply(self) -> Tried | None:
        """What a profile contains: all together, or the best one."""
        together = self.trials.together
        every = [together] if together is not None and together.outcome.is_advised else []
        return max([*every, *self.advised], key=lambda tried: tried.outcome.gain, default=None)


def best_of_each(tried: Sequence[Tried]) -> dict[str, Tried]:
    """Return rule -> its fastest advised candidate; `tried` has the fastest first."""
    best: dict[str, Tried] = {}
    for each in tried:
        if each.outcome.is_advised:
            best.setdefault(each.rule, each)
    return best


def profile_of(advice: Advice, chosen: Tried) -> Profile:
    """Return the chosen settings as a profile, with the evidence."""
    lines = [f"Task {advice.task} on {advice.device_name}: an update took {advice.update_ms:.4g} ms without it."]
    ratio = chosen.outcome.ratio
    if ratio:
        lines.append(f"{chosen.candidate.name}: {ratio}, {ratio.num} blocks interleaved with the current settings")
    if chosen.rule == TOGETHER:
        lines += [f"{each.candidate.name} alone: {each.outcome.ratio}" for each in advice.advised]
    seen = {each.rule for each in advice.advised}
    lines += [finding.evidence for finding in advice.findings if finding.rule in seen]
    return Profile(chosen.candidate.overrides, f"advised for {advice.task}", "advise", tuple(lines))


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
        trials = try_candidates(comparison, limits, found, began + budget_s, opened, say)
    return Advice(
        task=plan.choices["task"].name,
        device_name=opened.opened["device_name"],
        update_ms=trials.update_ms if math.isfinite(trials.update_ms) else facts.update_ms() or math.nan,
        findings=tuple(found),
        trials=trials,
        criteria=tuple(criteria(facts)),
        device_verdict=_device_verdict(facts, trials.tried, place.inventory),
        checks=tuple(checks(facts)),
        notes=(*notes, *trials.notes),
        seconds=time.monotonic() - began,
    )


def try_candidates(
    comparison: Comparison,
    limits: CompareLimits,
    found: Sequence[RuleFinding],
    deadline: float,
    opened: VariantResult,
    say: Say,
) -> Trials:
    """Try the candidates of all findings, then the best of each together, as time allows.

    deadline  by the clock of the comparison
    opened    the current settings: how long a start and an update take
    """
    wanted = _to_try(found)
    if not wanted:
        return Trials()
    asked_s, left = limits.budget_s, deadline - comparison.clock()

    def too_short(trials: ComparisonResult) -> str:
        needed = asked_s - left + trials.needs_s / SHARE_OF_TRIALS
        return f"budget_s={asked_s:g} is too short: {enough(needed, trials)}"

    def needs_s(num: int) -> float:
        return needed_s([opened.startup.taken_s] * num, [opened.turn_s] * num)

    if SHARE_OF_TRIALS * left < needs_s(2):
        over = too_short(ComparisonResult([opened], "interleaved", needs_s=needs_s(len(wanted) + 1)))
        return Trials(tuple(Tried(rule, each, TrialOutcome(why_not=f"{UNTRIED}; {over}")) for rule, each in wanted))
    variants = [Variant(candidate.name, candidate.overrides) for _, candidate in wanted]
    say(f"tries {len(variants)} setting{'s' if len(variants) > 1 else ''}, for at most {left:.0f} s")
    first = dataclasses.replace(limits, budget_s=SHARE_OF_TRIALS * left)
    trials = comparison.compare([Variant(BASELINE_NAME), *variants], first, lambda _: None)
    for measured in trials.variants[1:]:
        if measured.is_untried:
            measured.why_not = f"{measured.why_not or UNFINISHED}; {too_short(trials)}"
    most = {finding.rule: finding.at_most for finding in found}
    tried = [tried_in(trials, rule, candidate, most.get(rule)) for rule, candidate in wanted]
    tried.sort(key=lambda each: -each.outcome.gain)
    together, left = None, deadline - comparison.clock()
    overrides = _without_conflicts(list(best_of_each(tried).values()))
    if len(overrides) > 1 and left < needs_s(2):
        trials.notes.append(f"the best were not tried together: budget_s={asked_s:g} left no time for it")
    elif len(overrides) > 1:
        say("tries the best of them together")
        every = Candidate(tuple(word for words in overrides for word in words))
        rest = dataclasses.replace(limits, budget_s=left)
        both = [Variant(BASELINE_NAME), Variant(every.name, every.overrides)]
        together = tried_in(comparison.compare(both, rest, lambda _: None), TOGETHER, every)
    return Trials(tuple(tried), together, tuple(trials.notes), trials.mode, trials.baseline.median_ms)


def _to_try(found: Sequence[RuleFinding]) -> list[tuple[str, Candidate]]:
    """Return rule and candidate, at most MOST: the first of each finding, then the second, and so on."""
    taken: dict[Candidate, str] = {}
    for place in range(max((len(finding.candidates) for finding in found), default=0)):
        for finding in found:
            if place < len(finding.candidates):
                taken.setdefault(finding.candidates[place], finding.rule)
    return [(rule, candidate) for candidate, rule in taken.items()][:MOST]


def _without_conflicts(advised: Sequence[Tried]) -> list[tuple[str, ...]]:
    """Return the overrides of those that set no key of a better one."""
    taken: set[str] = set()
    kept = []
    for tried in advised:
        keys = {word.partition("=")[0] for word in tried.candidate.overrides}
        groups = {key.partition(".")[0] for key in keys if "." not in key}
        if not keys & taken and not any(key.partition(".")[0] in groups for key in taken):
            taken |= keys
            kept.append(tried.candidate.overrides)
    return kept


def _device_verdict(facts: Facts, tried: Sequence[Tried], inventory: Inventory) -> str:
    """Return which device is faster, by measurement."""
    if not inventory.usable:
        return f"{NOT_MEASURED}: there is no GPU here"
    ratio = next((each.outcome.ratio for each in tried if each.rule == "device" and each.outcome.ratio), None)
    if ratio is None:
        return f"{NOT_MEASURED}: nothing suggested the other device; use device=cpu to compare"
    here, there = ("CPU", "GPU") if facts.on_cpu() else ("GPU", "CPU")
    faster = {"better": there, "worse": here}.get(ratio.verdict, "either")
    return f"{faster}: {there} against {here} {ratio}"


def as_json(advice: Advice) -> dict[str, Any]:
    """Return all of it as JSON-serializable data; unknown values are null."""
    trials = advice.trials
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
        "tried": [each.as_json() for each in trials.tried],
        "together": trials.together.as_json() if trials.together else None,
        "criteria": [
            {"name": row.name, "value": row.value, "rule": row.rule, "verdict": row.verdict} for row in advice.criteria
        ],
        "rule_of_thumb": rule_of_thumb(advice.criteria) or None,
        "measured": advice.device_verdict,
        "checks": encode(advice.checks),
        "notes": list(advice.notes),
        "mode": trials.mode or None,
        "seconds": advice.seconds,
    }
    return finite(found)  # type: ignore[no-any-return]


TOGETHER = "together"
SHARE_OF_TRIALS = 0.75  # of the remaining budget; the rest is for the best together
UNFINISHED = "not tried to the end: the time was over before its third block"
MOST = 8  # candidates
NOT_MEASURED = "not measured"
