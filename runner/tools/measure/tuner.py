"""`accel-run tune`: find the mechanics with which updates are fastest here, and prove them in new rounds.

One axis after the other: its candidates are compared with the best settings so far, and the best of them once more. The
result of all axes is then compared with the current settings: a winner looks better than it is in the rounds in which
it was chosen, so those decide nothing.
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
from runner.tools.measure.candidates import Candidate, Tried, tried_in
from runner.tools.measure.compare import CompareLimits, Say
from runner.tools.measure.comparison_result import BASELINE_NAME, UNTRIED, TrialOutcome, Variant
from runner.tools.measure.hardware_profile import Profile
from runner.tools.measure.measuring_place import inspect, measuring
from runner.tools.measure.selection import Confirmation, Measure, select
from runner.tools.measure.tune_axes import AXES, Offer, Overrides, TuneTarget, reason_of


@dataclass(frozen=True)
class TuneAxis:
    """Settings that exclude each other.

    offer   what to try with the settings found so far
    weight  of its share of the time
    alone   one of its variants may fill the memory: never two of them alive
    """

    name: str
    offer: Callable[[Overrides], Offer]
    weight: float = 1.0
    alone: bool = False


@dataclass(frozen=True)
class TuneResult:
    """The result of a search.

    tried    every candidate with its last comparison, against the best settings before its axis
    left     axis or setting -> why it was not tried
    adopted  the winners of the axes
    proof    these together against the current settings, in new rounds; None if there were none
    needs_s  budget in seconds in which every candidate would be tried; 0 if every one was
    """

    tried: tuple[Tried, ...] = ()
    left: Mapping[str, str] = field(default_factory=dict)
    adopted: tuple[Tried, ...] = ()
    proof: Tried | None = None
    notes: tuple[str, ...] = ()
    needs_s: float = 0.0

    @property
    def has_tried(self) -> bool:
        """True unless every candidate was left out for lack of time."""
        return any(not each.outcome.is_untried for each in self.tried) or not self.tried

    @property
    def overrides(self) -> Overrides:
        """The settings that are clearly faster than the current ones; none if the proof failed."""
        return self.proof.candidate.overrides if self.proof is not None and self.proof.outcome.is_advised else ()


@dataclass(frozen=True)
class Tuned:
    """A search, and the training it was performed on.

    update_ms  of the current settings
    phase      whose updates were measured
    """

    task: str
    device_name: str
    phase: str
    update_ms: float
    found: TuneResult
    notes: tuple[str, ...] = ()
    seconds: float = 0.0


def tune(request: Request, budget_s: float, say: Say) -> Tuned:
    """Return the mechanics with which the training is fastest here; settings on the command line are not changed.

    Raises AccelRunError if the training itself cannot be measured.
    """
    began = time.monotonic()
    with measuring(request) as place:
        comparison, plan, notes = place.comparison, place.plan, place.notes
        say("measures the current settings")
        with comparison.alone(Variant(BASELINE_NAME), CompareLimits(budget_s)) as (ask, opened):
            now, probe = inspect(ask, opened, plan)
            attends = bool(ask({"do": "report"})["attention"])
        facts = place.facts(now, opened, probe)
        phase = opened.opened["phase"]
        target = TuneTarget(place.request, compose(request), place.inventory, facts, phase, attends)
        axes = [
            TuneAxis(name, target.offers(name), weight, fills and facts.gpu is not None)
            for name, (_, weight, fills) in AXES.items()
        ]
        opening_s = opened.startup.warmed_up_s + 2 * CompareLimits().block_s
        before_s = time.monotonic() - began
        found = search(
            axes,
            lambda variants, limits: comparison.compare(variants, limits, lambda _: None),
            budget_s - before_s,
            opening_s,
            say,
        )
    if found.needs_s:
        found = dataclasses.replace(found, needs_s=before_s + found.needs_s)
    trained = [each.name for each in plan.selected if each.kind == "train"]
    if len(trained) > 1:
        notes.append(f"measured in phase {phase}; {', '.join(name for name in trained if name != phase)} was not")
    return Tuned(
        plan.choices["task"].name,
        opened.opened["device_name"],
        phase,
        facts.update_ms() or math.nan,
        found,
        (*notes, *dict.fromkeys(found.notes)),
        time.monotonic() - began,
    )


# ---------------------------------------------------------------- search


def search(
    axes: Sequence[TuneAxis],
    measure: Measure,
    budget_s: float,
    opening_s: float,
    say: Say = print,
    clock: Callable[[], float] | None = None,
) -> TuneResult:
    """Return the best settings of the axes, compared with the current settings in new rounds.

    Time that an axis leaves goes to those after it; time that all leave, to candidates without a turn so far.

    opening_s  seconds until the updates of a new process run at their final speed
    """
    clock = clock or time.monotonic
    state = _Search(measure, clock, say, opening_s)
    deadline, is_first, missed = clock() + budget_s, True, set[str]()
    while is_first or (state.untried and state.untried != missed):
        # Without an adopted setting the proof needs no time, but one that is adopted late needs some.
        kept_s = PROOF_SHARE * budget_s if is_first or state.adopted else 2 * state.least_s
        until = deadline - max(kept_s, state.least_s)
        if not is_first and until - clock() < state.least_s:
            break
        missed, state.lacks_s = state.untried, 0.0
        behind = {each.rule for each in state.tried.values() if each.outcome.is_untried}
        walk = [axis for axis in axes if is_first or axis.name in behind]
        for number, axis in enumerate(walk):
            offer = axis.offer(state.overrides)
            state.left |= offer.left
            candidates = [each for each in offer.candidates if is_first or each.name in missed]
            if candidates:
                left_s = until - clock()
                share_s = left_s * axis.weight / sum(other.weight for other in walk[number:])
                state.try_axis(axis, candidates, min(left_s, max(share_s, MARGIN * state.needs_s(len(candidates)))))
        is_first = False
    weights = sum(axis.weight for axis in axes)
    all_s = max(MORE * budget_s, state.lacks_s * weights / (1 - PROOF_SHARE)) if state.lacks_s else 0.0
    proof = state.prove(max(deadline - clock(), state.least_s)) if state.adopted else None
    return TuneResult(tuple(state.tried.values()), state.left, tuple(state.adopted), proof, tuple(state.notes), all_s)


class _Search:
    """The best settings so far, and what was tried."""

    def __init__(self, measure: Measure, clock: Callable[[], float], say: Say, opening_s: float) -> None:
        self.measure, self.clock, self.say, self.opening_s = measure, clock, say, opening_s
        self.overrides: Overrides = ()
        self.tried: dict[str, Tried] = {}
        self.adopted: list[Tried] = []
        self.left: dict[str, str] = {}
        self.notes: list[str] = []
        self.lacks_s = 0.0  # most seconds that an axis of weight 1 would have needed; 0 if none lacked time
        self.fills = False  # an adopted setting may fill the memory

    @property
    def untried(self) -> set[str]:
        """Names of the candidates that had no time."""
        return {name for name, each in self.tried.items() if each.outcome.is_untried}

    @property
    def least_s(self) -> float:
        """Seconds in which two variants can be compared: one half for their start, the other for rounds."""
        return 4 * self.opening_s

    def needs_s(self, num: int) -> float:
        """Return the seconds for so many candidates, and the best of them once more."""
        return 2 * self.opening_s * (num + 1) / SHARE_OF_ALL if num > 1 else self.least_s

    def try_axis(self, axis: TuneAxis, candidates: Sequence[Candidate], seconds: float) -> None:
        """Compare candidates with the best settings so far, and adopt the winner; fewer, if the time is short."""
        playing = list(candidates)
        while playing and self.needs_s(len(playing)) > seconds:
            self.lacks_s = max(self.lacks_s, self.needs_s(len(candidates)) / axis.weight)
            late = playing.pop()
            self.tried[late.name] = Tried(axis.name, late, TrialOutcome(why_not=UNTRIED))
        if not playing:
            return
        self.say(f"{axis.name}: {len(playing)} to try, for at most {seconds:.0f} s")
        limits = CompareLimits(seconds, SCREENING, start_s=seconds, together=not axis.alone, first_evaluation=True)
        variants = [Variant(BASELINE_NAME, self.overrides)]
        variants += [Variant(each.name, merge_overrides(self.overrides, each.overrides)) for each in playing]
        confirmation = Confirmation(self.least_s, PROVING, extends=False)
        try:
            found = select(self.measure, variants, limits, confirmation=confirmation, clock=self.clock)
        except AccelRunError as error:
            outcome = TrialOutcome(why_not=reason_of(error))
            self.tried |= {each.name: Tried(axis.name, each, outcome) for each in playing}
            return
        self.notes += found.trials.notes
        self.lacks_s = max(self.lacks_s, found.trials.needs_s / axis.weight)
        for each in playing:
            tried = tried_in(found.trials, axis.name, each)
            self.tried[each.name] = tried
            if each.name == found.leader:
                self._adopt(axis, dataclasses.replace(tried, outcome=found.outcome))

    def _adopt(self, axis: TuneAxis, best: Tried) -> None:
        self.tried[best.candidate.name] = best
        if not best.outcome.is_advised:
            return
        self.overrides = merge_overrides(self.overrides, best.candidate.overrides)
        self.adopted.append(best)
        self.fills = self.fills or axis.alone
        self.opening_s += max(0.0, best.outcome.later_s or 0.0)
        self.say(f"{axis.name}: {best.candidate.name} is faster, {best.outcome.summary}")

    def prove(self, seconds: float) -> Tried:
        """Compare what was adopted with the current settings, in rounds that chose nothing."""
        self.say(f"compares the result with the current settings, for at most {seconds:.0f} s")
        found = Candidate(self.overrides)
        limits = CompareLimits(
            seconds, PROVING, start_s=max(seconds, self.least_s), together=not self.fills, first_evaluation=True, seed=2
        )
        try:
            trials = self.measure([Variant(BASELINE_NAME), Variant(found.name, found.overrides)], limits)
        except AccelRunError as error:
            return Tried(PROOF, found, TrialOutcome(why_not=reason_of(error)))
        self.notes += trials.notes
        return tried_in(trials, PROOF, found)


# ---------------------------------------------------------------- results


def profile_of(tuned: Tuned) -> Profile:
    """Return the result as a profile; without settings if nothing is clearly faster."""
    found = tuned.found
    lines = [f"Task {tuned.task} on {tuned.device_name}: an update took {tuned.update_ms:.4g} ms without it."]
    if found.proof is None:
        lines.append("No setting: nothing that was tried is clearly faster.")
    elif found.overrides:
        lines.append(f"All of it: {found.proof.outcome.summary}, {_rounds(found.proof)} after everything was chosen.")
        lines += [f"{each.candidate.name}: {each.outcome.summary}, {_rounds(each)}" for each in found.adopted]
    else:
        reason = found.proof.outcome.reason
        lines.append(f"No setting: {found.proof.candidate.name} failed in new rounds, {reason}")
    for each in (each for each in found.tried if each not in found.adopted):
        title = "Not tried" if each.outcome.is_untried else "Tried"
        lines.append(f"{title}: {each.candidate.name}: {each.outcome.reason.removeprefix('not tried: ')}")
    lines = [" ".join(line.split()) for line in lines]
    return Profile(found.overrides, f"tuned for {tuned.task}", "tune", tuple(lines))


def _rounds(tried: Tried) -> str:
    return f"{tried.outcome.ratio.num if tried.outcome.ratio else 0} interleaved blocks"


def as_json(tuned: Tuned) -> dict[str, Any]:
    """Return all of it as JSON-serializable data; unknown values are null."""
    found = tuned.found
    return {
        "task": tuned.task,
        "device": tuned.device_name,
        "phase": tuned.phase,
        "update_ms": tuned.update_ms if math.isfinite(tuned.update_ms) else None,
        "settings": list(found.overrides),
        "proof": found.proof.as_json() if found.proof else None,
        "adopted": [each.as_json() for each in found.adopted],
        "tried": [each.as_json() for each in found.tried],
        "left": dict(found.left),
        "needs_s": found.needs_s or None,
        "notes": list(tuned.notes),
        "seconds": tuned.seconds,
    }


PROOF = "proof"
PROOF_SHARE = 0.25  # of the budget, for the proof
SHARE_OF_ALL = 0.7  # of the time of an axis, for all of its candidates; the rest is for the best one
MORE = 1.5  # times a budget that was too short, at least, that is said to be enough
MARGIN = 1.1  # times the estimate that an axis gets: its comparisons begin a little late
SCREENING = (3, 12)  # rounds, fewest and most, with all candidates of an axis
PROVING = (10, 120)  # rounds that adopt a setting
