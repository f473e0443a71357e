"""From what was measured to advice: rules propose, trials decide. Only what was tried and is faster is advised."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from runner.config.request import Request
from runner.plan.inventory import Inventory
from runner.records.evidence import Evidence
from runner.tools.measure.compare import CompareLimits, Comparison, enough, needed_s
from runner.tools.measure.comparison_result import UNTRIED, ComparisonResult, Variant, VariantResult
from runner.tools.measure.criteria import Criterion, criteria, rule_of_thumb
from runner.tools.measure.facts import Facts
from runner.tools.measure.hardware_profile import Profile
from runner.tools.measure.measuring_place import filled, look, measuring
from runner.tools.measure.rules import Candidate, RuleFinding, findings
from runner.tools.measure.tried import Tried, known_number, outcome, tried_as_json

Say = Callable[[str], None]


@dataclass(frozen=True)
class Entry:
    """One piece of advice.

    tried  the setting and its trial; None where it is for the user to do in the code: `finding.by_hand`
    gain   times as fast as the training as it is: measured, or predicted at most; None where that is not known
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
    """What can be said of a run.

    tried     every candidate, the fastest first
    together  the advised ones that do not exclude each other, tried as one; None where there were not two of them
    device    CPU against GPU, measured; empty where only one of them is here
    """

    task: str
    device_name: str
    update_ms: float
    findings: tuple[RuleFinding, ...]
    tried: tuple[Tried, ...]
    together: Tried | None
    criteria: tuple[Criterion, ...]
    rule_of_thumb: str
    measured_verdict: str
    checks: tuple[RangeCheck, ...]
    facts: Facts
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    mode: str = ""

    @property
    def advised(self) -> list[Tried]:
        """The candidates that are clearly faster and compute the same, one for each finding, the fastest first."""
        best: dict[str, Tried] = {}
        for tried in self.tried:
            if tried.is_advised and tried.rule not in best:
                best[tried.rule] = tried
        return list(best.values())

    @property
    def entries(self) -> list[Entry]:
        """What was tried and what is for the user to do in one list, the largest gain first; unknown ones come last.

        A slow transform of which readers that were tried hide more than they leave has the gain of what they leave.
        """
        found = {finding.rule: finding for finding in self.findings}
        entries = [Entry(found[tried.rule], tried, tried.gain) for tried in self.advised]
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
        """What a profile would hold: all together, or the best one."""
        every = [self.together] if self.together is not None and self.together.is_advised else []
        return max([*every, *self.advised], key=lambda tried: tried.gain, default=None)


def profile_of(advice: Advice, chosen: Tried) -> Profile:
    """Return what was chosen as a profile: what it was tried on, and what each setting gained."""
    lines = [f"Task {advice.task} on {advice.device_name}: an update took {advice.update_ms:.4g} ms without it."]
    if chosen.ratio:
        lines.append(
            f"{chosen.candidate.name}: {chosen.ratio}, {chosen.ratio.num} blocks in turns with the run as it was"
        )
    if chosen.rule == "together":
        lines += [f"{each.candidate.name} alone: {each.ratio}" for each in advice.advised]
    seen = {each.rule for each in advice.advised}
    lines += [finding.evidence for finding in advice.findings if finding.rule in seen]
    return Profile(chosen.candidate.overrides, f"advised for {advice.task}", "advise", tuple(lines))


@dataclass(frozen=True)
class RangeCheck:
    """A reading against the range in which it is expected; `fine` is None where it is not known."""

    name: str
    value: str
    expected: str
    fine: bool | None


@dataclass(frozen=True)
class AdviceInputs:
    """What a finished run has told: its evidence, what the monitor saw, and the phase that took longest."""

    evidence: Evidence | None = None
    monitor: Mapping[str, float] = field(default_factory=dict)
    throttled: Mapping[str, float] = field(default_factory=dict)
    phase: str | None = None


def advise(request: Request, run: AdviceInputs, budget_s: float, say: Say) -> Advice:
    """Return what would make these updates faster, tried here.

    run  what it does not tell is measured now
    Raises AccelRunError where the training itself cannot be measured.
    """
    began = time.monotonic()
    limits = CompareLimits(budget_s=budget_s, phase=run.phase, first_evaluation=True)
    with measuring(request) as place:
        arena, plan, notes = place.arena, place.plan, place.notes
        say("measures the training as it is")
        with arena.alone(Variant("as it is"), dataclasses.replace(limits, evaluates=True)) as (ask, opened):
            now, probe = look(ask, opened, plan)
        there, here = run.evidence.device_name if run.evidence else None, plan.device_name
        if there is not None and there != here:
            notes.append(f"the run was made on {there}, and this is {here}: everything is measured again")
            run = AdviceInputs()
        evidence = filled(run.evidence, now)
        facts = place.facts(evidence, opened, probe, monitor=run.monitor, throttled=run.throttled)
        found = findings(facts)
        trials, tried, together = try_candidates(arena, limits, found, began + budget_s, opened, say)
    rows = criteria(facts)
    return Advice(
        task=plan.choices["task"].name,
        device_name=opened.opened["device_name"],
        update_ms=trials.baseline.median_ms if trials and trials.baseline.blocks_ms else facts.update_ms() or math.nan,
        findings=tuple(found),
        tried=tuple(tried),
        together=together,
        criteria=tuple(rows),
        rule_of_thumb=rule_of_thumb(rows),
        measured_verdict=_measured_verdict(facts, tried, place.inventory),
        checks=tuple(checks(facts)),
        facts=facts,
        notes=(*notes, *(trials.notes if trials else ())),
        seconds=time.monotonic() - began,
        mode=trials.mode if trials else "",
    )


# ---------------------------------------------------------------- what is known


# ---------------------------------------------------------------- trials


def try_candidates(
    arena: Comparison,
    limits: CompareLimits,
    found: Sequence[RuleFinding],
    deadline: float,
    opened: VariantResult,
    say: Say,
) -> tuple[ComparisonResult | None, list[Tried], Tried | None]:
    """Try the candidates of all findings, then the best of each together, as far as there is time.

    deadline  by the arena's clock
    opened    the training as it is, which tells what a start takes and an update
    """
    wanted = _to_try(found)
    if not wanted:
        return None, [], None
    asked_s, left = limits.budget_s, deadline - arena.clock()
    least_s = needed_s([opened.taken_s] * 2, [opened.turn_s] * 2)
    if SHARE_OF_TRIALS * left < least_s:
        num = len(wanted) + 1
        needs_s = needed_s([opened.taken_s] * num, [opened.turn_s] * num)
        over = _too_short(asked_s, left, ComparisonResult([opened], "interleaved", needs_s=needs_s))
        return None, [Tried(rule, candidate, None, why_not=f"{UNTRIED}; {over}") for rule, candidate in wanted], None
    cells = [Variant(candidate.name, candidate.overrides) for _, candidate in wanted]
    say(f"tries {len(cells)} setting{'s' if len(cells) > 1 else ''} in turns, for at most {left:.0f} s")
    limits = dataclasses.replace(limits, budget_s=SHARE_OF_TRIALS * left)
    trials = arena.compare([Variant("as it is"), *cells], limits, lambda _: None)
    for measured in trials.cells[1:]:
        if measured.is_untried:
            measured.why_not = f"{measured.why_not or UNFINISHED}; {_too_short(asked_s, left, trials)}"
    most = {finding.rule: finding.at_most for finding in found}
    tried = [outcome(trials, rule, candidate, most.get(rule)) for rule, candidate in wanted]
    tried.sort(key=lambda each: -each.gain)
    best: dict[str, Tried] = {}
    for each in tried:
        if each.is_advised and each.rule not in best:
            best[each.rule] = each
    overrides = _without_conflicts(list(best.values()))
    if len(overrides) < 2:
        return trials, tried, None
    left = deadline - arena.clock()
    if left < least_s:
        trials.notes.append(f"the best were not tried together: budget_s={asked_s:g} left no time for it")
        return trials, tried, None
    say("tries the best of them together")
    all_of_them = Candidate(tuple(word for words in overrides for word in words))
    rest = dataclasses.replace(limits, budget_s=left)
    both = arena.compare([Variant("as it is"), Variant(all_of_them.name, all_of_them.overrides)], rest, lambda _: None)
    return trials, tried, outcome(both, "together", all_of_them)


def _too_short(asked_s: float, left_s: float, trials: ComparisonResult) -> str:
    """Return that the budget was too short, and which would do: so much of it was left for what needs more."""
    return f"budget_s={asked_s:g} is too short: {enough(asked_s - left_s + trials.needs_s / SHARE_OF_TRIALS, trials)}"


def _to_try(found: Sequence[RuleFinding]) -> list[tuple[str, Candidate]]:
    """Return rule and candidate, at most MOST: the first of each finding, then the second, and so on."""
    taken: dict[tuple[str, ...], str] = {}
    for place in range(max((len(finding.candidates) for finding in found), default=0)):
        for finding in found:
            if place < len(finding.candidates):
                taken.setdefault(finding.candidates[place].overrides, finding.rule)
    by_overrides = {candidate.overrides: candidate for finding in found for candidate in finding.candidates}
    return [(rule, by_overrides[overrides]) for overrides, rule in list(taken.items())[:MOST]]


def _without_conflicts(advised: Sequence[Tried]) -> list[tuple[str, ...]]:
    """Return the overrides of those that set no key that a better one sets."""
    taken: set[str] = set()
    kept = []
    for tried in advised:
        keys = {word.partition("=")[0] for word in tried.candidate.overrides}
        groups = {key.partition(".")[0] for key in keys if "." not in key}
        if not keys & taken and not any(key.partition(".")[0] in groups for key in taken):
            taken |= keys
            kept.append(tried.candidate.overrides)
    return kept


# ---------------------------------------------------------------- what stands beside it


def _measured_verdict(facts: Facts, tried: Sequence[Tried], inventory: Inventory) -> str:
    """Return which device is faster, by measurement."""
    if not inventory.usable:
        return f"{NOT_MEASURED}: there is no GPU here"
    other = next((each for each in tried if each.rule == "device" and each.ratio), None)
    if other is None or other.ratio is None:
        return f"{NOT_MEASURED}: nothing suggested to try the other device; use device=cpu to compare"
    here, there = ("CPU", "GPU") if facts.on_cpu() else ("GPU", "CPU")
    if other.ratio.verdict == "no clear change":
        return f"either: {there} against {here} {other.ratio}"
    faster = there if other.ratio.verdict == "better" else here
    return f"{faster}: {there} against {here} {other.ratio}"


def checks(facts: Facts) -> list[RangeCheck]:
    """Return what people look at first when training is slow, with the ranges in which it is expected."""
    util, peak, total = (
        facts.monitor.get("gpu0/util"),
        facts.evidence.device_peak_reserved_gib,
        facts.evidence.device_total_gib,
    )
    wait, workers = facts.share("data"), facts.values.get("dataloader.num_workers")
    on_gpu = facts.on_cpu() is False
    rows = []
    if on_gpu:
        rows.append(RangeCheck("GPU utilisation", _percent(util), "80 to 100 %", None if util is None else util >= 80))
        used = 100 * peak / total if peak and total else None
        rows.append(RangeCheck("GPU memory", _percent(used), "50 to 80 %", None if used is None else 50 <= used <= 80))
        used_precision = str(facts.values.get("precision"))
        others = facts.monitor.get("gpu0/other_processes")
        if others is not None:
            rows.append(RangeCheck("other processes on the GPU", f"{others:.1f}", "0", others == 0))
        rows.append(RangeCheck("autocast", used_precision, "bf16 or fp16", used_precision in ("bf16", "fp16")))
    waits = _percent(None if wait is None else 100 * wait)
    rows.append(RangeCheck("waiting for data", waits, "under 10 %", None if wait is None else wait < 0.1))
    if workers is not None:
        rows.append(
            RangeCheck(
                "data workers", str(workers), "more than 0 where data is waited for", workers > 0 or (wait or 0) < 0.1
            )
        )
    return rows


def _percent(value: float | None) -> str:
    return "not known" if value is None else f"{value:.0f} %"


def as_json(advice: Advice) -> dict[str, Any]:
    """Return all of it, JSON-able; what is not known is null."""

    def entry(each: Entry) -> dict[str, Any]:
        return {
            "rule": each.finding.rule,
            "what": each.what,
            "evidence": each.finding.evidence,
            "tried": tried_as_json(each.tried) if each.tried else None,
            "gain": each.gain,
        }

    return {
        "task": advice.task,
        "device": advice.device_name,
        "update_ms": known_number(advice.update_ms),
        "advice": [entry(each) for each in advice.entries],
        "findings": [
            {
                "rule": finding.rule,
                "evidence": finding.evidence,
                "candidates": [list(candidate.overrides) for candidate in finding.candidates],
                "by_hand": finding.by_hand or None,
                "at_most": finding.at_most,
            }
            for finding in advice.findings
        ],
        "tried": [tried_as_json(each) for each in advice.tried],
        "together": tried_as_json(advice.together) if advice.together else None,
        "criteria": [
            {"name": row.name, "value": row.value, "rule": row.rule, "verdict": row.verdict} for row in advice.criteria
        ],
        "rule_of_thumb": advice.rule_of_thumb or None,
        "measured": advice.measured_verdict,
        "checks": [dataclasses.asdict(check) for check in advice.checks],
        "notes": list(advice.notes),
        "mode": advice.mode or None,
        "seconds": advice.seconds,
    }


SHARE_OF_TRIALS = 0.75  # of what is left of the budget; the rest is for trying the best together
UNFINISHED = "not tried to the end: the time was over before its third block"
MOST = 8  # candidates
NOT_MEASURED = "not measured"
