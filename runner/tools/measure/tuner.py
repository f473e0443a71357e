"""`accel-run tune`: find the settings with the fastest updates on this machine, and confirm them in new rounds.

For each axis, the candidates are compared with the best settings so far, and the best candidate is measured again. The
result of all axes is then compared with the current settings. Only this last comparison counts: the rounds that select
a winner overestimate its gain.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from runner.base.errors import AccelRunError
from runner.config.configuration import compose
from runner.config.request import Request, merge_overrides
from runner.tools.measure.compare import SHORT_BUDGET, CompareLimits, LogFunction
from runner.tools.measure.comparison_result import BASELINE_NAME, NO_TIME_LEFT, TrialOutcome, Variant, format_reason
from runner.tools.measure.hardware_profile import Profile
from runner.tools.measure.measurement_context import measure_evidence, open_context
from runner.tools.measure.selection import Candidate, Confirmation, Measure, TriedCandidate, judge_candidate, select
from runner.tools.measure.tune_axes import AXES, Offer, Overrides, TuneTarget


@dataclass(frozen=True)
class TuneAxis:
    """Mutually exclusive settings.

    offer         returns the candidates, given the settings adopted so far
    weight        share of the time that the axis gets, relative to the weights of other axes
    fills_memory  one of its variants may fill the memory, so two of them must never be in memory together
    """

    name: str
    offer: Callable[[Overrides], Offer]
    weight: float = 1.0
    fills_memory: bool = False


@dataclass(frozen=True)
class TuneResult:
    """The result of a search.

    tried    all candidates, each with its last comparison against the settings adopted before its axis
    skipped  axis or setting -> why it was not tried
    adopted  winners of the axes
    proof    all adopted settings against the current settings, in new rounds; None if nothing was adopted
    """

    tried: tuple[TriedCandidate, ...] = ()
    skipped: Mapping[str, str] = field(default_factory=dict)
    adopted: tuple[TriedCandidate, ...] = ()
    proof: TriedCandidate | None = None
    notes: tuple[str, ...] = ()

    @property
    def has_tried(self) -> bool:
        """True unless all candidates were left out for lack of time."""
        return any(not each.outcome.is_untried for each in self.tried) or not self.tried

    @property
    def overrides(self) -> Overrides:
        """The settings that are clearly faster than the current ones; none if the proof failed."""
        return self.proof.candidate.overrides if self.proof is not None and self.proof.outcome.is_advised else ()


@dataclass(frozen=True)
class TuneReport:
    """The result of a search, and the training run that was tuned.

    phase      phase whose updates were measured
    update_ms  milliseconds of an update with the current settings
    """

    task: str
    device_name: str
    phase: str
    update_ms: float
    result: TuneResult
    notes: tuple[str, ...] = ()
    seconds: float = 0.0


def tune(request: Request, budget_s: float, log: LogFunction) -> TuneReport:
    """Find the fastest settings for a training run on this machine; settings on the command line are not changed.

    Raises AccelRunError if the current settings cannot be measured.
    """
    began = time.monotonic()
    with open_context(request) as context:
        comparison, plan, notes = context.comparison, context.plan, context.notes
        log("measuring the current settings")
        with comparison.open_variant(Variant(BASELINE_NAME), CompareLimits(budget_s)) as (call, opened):
            now, probe = measure_evidence(call, opened, plan)
            has_attention = bool(call({"do": "report"})["attention"])
        facts = context.facts(now, opened, probe)
        phase = opened.opened["phase"]
        target = TuneTarget(context.request, compose(request), context.inventory, facts, phase, has_attention)
        axes = [
            TuneAxis(name, target.offers(name), weight, fills_memory and facts.gpu is not None)
            for name, (_, weight, fills_memory) in AXES.items()
        ]
        startup_s = opened.startup.warmed_up_s + 2 * CompareLimits().block_s
        result = search(
            axes,
            lambda variants, limits: comparison.compare(variants, limits, lambda _: None),
            budget_s - (time.monotonic() - began),
            startup_s,
            log,
        )
    trained = [planned.name for planned in plan.selected if planned.kind == "train"]
    if len(trained) > 1:
        notes.append(f"measured in phase {phase}; {', '.join(name for name in trained if name != phase)} was not")
    return TuneReport(
        plan.choices["task"].name,
        opened.opened["device_name"],
        phase,
        facts.update_ms() or math.nan,
        result,
        (*notes, *dict.fromkeys(note for note in result.notes if note != SHORT_BUDGET)),
        time.monotonic() - began,
    )


# ---------------------------------------------------------------- search


def search(
    axes: Sequence[TuneAxis],
    measure: Measure,
    budget_s: float,
    startup_s: float,
    log: LogFunction = print,
    clock: Callable[[], float] | None = None,
) -> TuneResult:
    """Search the axes one after the other, and compare the result with the current settings in new rounds.

    Time that an axis does not use goes to later axes, and then to candidates that had no time.

    startup_s  seconds until the updates of a new process run at their final speed
    """
    clock = clock or time.monotonic
    state = _Search(measure, clock, log, startup_s)
    deadline, is_first, missed = clock() + budget_s, True, set[str]()
    while is_first or (state.untried and state.untried != missed):
        # Without an adopted setting the proof needs no time, but a setting that is adopted late needs some.
        proof_s = PROOF_SHARE * budget_s if is_first or state.adopted else 2 * state.min_comparison_s
        axes_deadline = deadline - max(proof_s, state.min_comparison_s)
        if not is_first and axes_deadline - clock() < state.min_comparison_s:
            break
        missed = state.untried
        untried_axes = {tried.rule for tried in state.tried.values() if tried.outcome.is_untried}
        pending = [axis for axis in axes if is_first or axis.name in untried_axes]
        for number, axis in enumerate(pending):
            offer = axis.offer(state.overrides)
            state.skipped |= offer.skipped
            candidates = [candidate for candidate in offer.candidates if is_first or candidate.name in missed]
            if candidates:
                left_s = axes_deadline - clock()
                share_s = left_s * axis.weight / sum(other.weight for other in pending[number:])
                state.try_axis(
                    axis, candidates, min(left_s, max(share_s, TIME_MARGIN * state.needs_s(len(candidates))))
                )
        is_first = False
    proof = state.prove(max(deadline - clock(), state.min_comparison_s)) if state.adopted else None
    return TuneResult(tuple(state.tried.values()), state.skipped, tuple(state.adopted), proof, tuple(state.notes))


class _Search:
    """State of a search: the best settings so far, and the tried candidates."""

    def __init__(self, measure: Measure, clock: Callable[[], float], log: LogFunction, startup_s: float) -> None:
        self.measure, self.clock, self.log, self.startup_s = measure, clock, log, startup_s
        self.overrides: Overrides = ()
        self.tried: dict[str, TriedCandidate] = {}
        self.adopted: list[TriedCandidate] = []
        self.skipped: dict[str, str] = {}
        self.notes: list[str] = []
        self.fills_memory = False  # whether an adopted setting may fill the memory

    @property
    def untried(self) -> set[str]:
        """Names of the candidates that had no time."""
        return {name for name, tried in self.tried.items() if tried.outcome.is_untried}

    @property
    def min_comparison_s(self) -> float:
        """Seconds to compare two variants: half of them for their start-up, half for rounds."""
        return 4 * self.startup_s

    def needs_s(self, num: int) -> float:
        """Return the seconds to compare this number of candidates and to measure the best of them again."""
        return 2 * self.startup_s * (num + 1) / SHARE_OF_ALL if num > 1 else self.min_comparison_s

    def try_axis(self, axis: TuneAxis, candidates: Sequence[Candidate], seconds: float) -> None:
        """Compare candidates, as many as time allows, with the best settings so far, and adopt the winner."""
        active = list(candidates)
        while active and self.needs_s(len(active)) > seconds:
            late = active.pop()
            self.tried[late.name] = TriedCandidate(axis.name, late, TrialOutcome(why_not=NO_TIME_LEFT))
        if not active:
            return
        self.log(f"{axis.name}: {len(active)} candidate{'s' if len(active) > 1 else ''}, for at most {seconds:.0f} s")
        limits = CompareLimits(
            seconds, SCREENING_ROUNDS, start_s=seconds, interleave=not axis.fills_memory, time_first_evaluation=True
        )
        variants = [Variant(BASELINE_NAME, self.overrides)]
        variants += [
            Variant(candidate.name, merge_overrides(self.overrides, candidate.overrides)) for candidate in active
        ]
        confirmation = Confirmation(self.min_comparison_s, PROOF_ROUNDS, extends=False)
        try:
            selection = select(self.measure, variants, limits, confirmation=confirmation, clock=self.clock)
        except AccelRunError as error:
            outcome = TrialOutcome(why_not=format_reason(error))
            self.tried |= {candidate.name: TriedCandidate(axis.name, candidate, outcome) for candidate in active}
            return
        self.notes += selection.result.notes
        for candidate in active:
            tried = judge_candidate(selection.result, axis.name, candidate)
            self.tried[candidate.name] = tried
            if candidate.name == selection.leader:
                self._adopt(axis, dataclasses.replace(tried, outcome=selection.outcome))

    def _adopt(self, axis: TuneAxis, best: TriedCandidate) -> None:
        self.tried[best.candidate.name] = best
        if not best.outcome.is_advised:
            return
        self.overrides = merge_overrides(self.overrides, best.candidate.overrides)
        self.adopted.append(best)
        self.fills_memory = self.fills_memory or axis.fills_memory
        self.startup_s += max(0.0, best.outcome.later_s or 0.0)
        self.log(f"{axis.name}: {best.candidate.name} is faster, {best.outcome.summary}")

    def prove(self, seconds: float) -> TriedCandidate:
        """Compare all adopted settings with the current settings, in new rounds."""
        self.log(f"comparing the result with the current settings, for at most {seconds:.0f} s")
        candidate = Candidate(self.overrides)
        limits = CompareLimits(
            seconds,
            PROOF_ROUNDS,
            start_s=max(seconds, self.min_comparison_s),
            interleave=not self.fills_memory,
            time_first_evaluation=True,
            seed=2,
        )
        try:
            result = self.measure([Variant(BASELINE_NAME), Variant(candidate.name, candidate.overrides)], limits)
        except AccelRunError as error:
            return TriedCandidate(PROOF, candidate, TrialOutcome(why_not=format_reason(error)))
        self.notes += result.notes
        return judge_candidate(result, PROOF, candidate)


# ---------------------------------------------------------------- results


def make_profile(report: TuneReport) -> Profile:
    """Make a hardware profile of the result; without settings if nothing is clearly faster."""
    result = report.result
    lines = [
        f"Task {report.task} on {report.device_name}: an update took {report.update_ms:.4g} ms without this profile."
    ]
    if result.proof is None:
        lines.append("No settings: nothing that was tried is clearly faster.")
    elif result.overrides:
        lines.append(f"Together: {result.proof.outcome.summary}, {_format_rounds(result.proof)} after the selection.")
        lines += [
            f"{tried.candidate.name}: {tried.outcome.summary}, {_format_rounds(tried)}" for tried in result.adopted
        ]
    else:
        reason = result.proof.outcome.reason
        lines.append(f"No settings: {result.proof.candidate.name} was rejected when measured once more: {reason}")
    for tried in (tried for tried in result.tried if tried not in result.adopted):
        title = "Not tried" if tried.outcome.is_untried else "Tried"
        lines.append(f"{title}: {tried.candidate.name}: {tried.outcome.reason.removeprefix('not tried: ')}")
    lines = [" ".join(line.split()) for line in lines]
    return Profile(result.overrides, f"tuned for {report.task}", "tune", tuple(lines))


def _format_rounds(tried: TriedCandidate) -> str:
    return f"{tried.outcome.ratio.num if tried.outcome.ratio else 0} interleaved blocks"


def as_json(report: TuneReport) -> dict[str, Any]:
    """Return the report as JSON-serializable data; unknown values are null."""
    result = report.result
    return {
        "task": report.task,
        "device": report.device_name,
        "phase": report.phase,
        "update_ms": report.update_ms if math.isfinite(report.update_ms) else None,
        "settings": list(result.overrides),
        "proof": result.proof.as_json() if result.proof else None,
        "adopted": [tried.as_json() for tried in result.adopted],
        "tried": [tried.as_json() for tried in result.tried],
        "left": dict(result.skipped),
        "notes": list(report.notes),
        "seconds": report.seconds,
    }


PROOF = "proof"
PROOF_SHARE = 0.25  # share of the budget for the proof
SHARE_OF_ALL = 0.7  # share of the time of an axis for all of its candidates; the rest is to measure the best one again
TIME_MARGIN = 1.1  # factor on the estimated time of an axis, because its comparisons start a little later
SCREENING_ROUNDS = (3, 12)  # minimum and maximum number of rounds with all candidates of an axis
PROOF_ROUNDS = (10, 120)  # minimum and maximum number of rounds of a comparison that decides on adopting a setting
