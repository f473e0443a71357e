"""Tune: the mechanics with which updates are fastest here, found by halving and proven in fresh rounds.

One axis after the other: its candidates take turns with the best that is known so far, the better half of them again
and for longer, and the last one is adopted where it is clearly faster (successive halving: Jamieson and Talwalkar,
Non-stochastic Best Arm Identification, AISTATS 2016). What all axes came to is then measured anew against the settings
as they are: a winner looks better than it is in the rounds in which it was chosen, so those decide nothing.
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
from runner.tools.measure.compare import CompareLimits
from runner.tools.measure.comparison_result import UNTRIED, ComparisonResult, Variant
from runner.tools.measure.hardware_profile import Profile
from runner.tools.measure.measuring_place import look, measuring
from runner.tools.measure.rules import Candidate
from runner.tools.measure.statistics import NEGLIGIBLE
from runner.tools.measure.tried import Tried, outcome, tried_as_json
from runner.tools.measure.tune_axes import AXES, TuneCandidate, TuneTarget, Words, reason_of

Say = Callable[[str], None]
Measure = Callable[[Sequence[Variant], CompareLimits], ComparisonResult]
AS_IT_IS = "as it is"


@dataclass(frozen=True)
class TuneAxis:
    """Settings that exclude each other.

    offer   what is tried beside the settings found so far
    weight  of its share of the time
    alone   one of its cells may fill the memory: never two of them alive
    """

    name: str
    offer: Callable[[Words], TuneCandidate]
    weight: float = 1.0
    alone: bool = False


@dataclass(frozen=True)
class TuneResult:
    """What a search came to.

    tried    every candidate with its last trial, against the best that was known before its axis
    left     axis or setting -> why it was not tried
    adopted  the winners of the axes
    proof    these together against the settings as they are, in fresh rounds; None where there were none
    needs_s  seconds of budget in which every candidate would be tried; 0 where every one was
    """

    tried: tuple[Tried, ...] = ()
    left: Mapping[str, str] = field(default_factory=dict)
    adopted: tuple[Tried, ...] = ()
    proof: Tried | None = None
    notes: tuple[str, ...] = ()
    needs_s: float = 0.0

    @property
    def has_tried(self) -> bool:
        """True where a setting was measured, and was not left for lack of time."""
        return any(not each.is_untried for each in self.tried) or not self.tried

    @property
    def words(self) -> Words:
        """The settings that are clearly faster than those as they are; none where the proof failed."""
        return self.proof.candidate.overrides if self.proof is not None and self.proof.is_advised else ()


@dataclass(frozen=True)
class Tuned:
    """A search, and what it was made on.

    update_ms  of the settings as they are
    phase      of the task, whose updates were measured
    """

    task: str
    device_name: str
    phase: str
    update_ms: float
    found: TuneResult
    notes: tuple[str, ...] = ()
    seconds: float = 0.0


def tune(request: Request, budget_s: float, say: Say) -> Tuned:
    """Return the mechanics with which the training of the request is fastest here.

    What the words of the request say stays as it is said.
    Raises AccelRunError where the training itself cannot be measured.
    """
    began = time.monotonic()
    with measuring(request) as place:
        arena, plan, notes = place.arena, place.plan, place.notes
        say("measures the training as it is")
        with arena.alone(Variant(AS_IT_IS), CompareLimits(budget_s)) as (ask, opened):
            now, probe = look(ask, opened, plan)
            attends = bool(ask({"do": "report"})["attention"])
        facts = place.facts(now, opened, probe)
        phase = opened.opened["phase"]
        target = TuneTarget(place.request, compose(request), place.inventory, facts, phase, attends)
        axes = [
            TuneAxis(name, target.offers(name), weight, fills and facts.gpu is not None)
            for name, (_, weight, fills) in AXES.items()
        ]
        opening_s = opened.start_s + opened.first_update_s + opened.warm_up_s + 2 * CompareLimits().block_s
        before_s = time.monotonic() - began
        found = search(
            axes,
            lambda cells, limits: arena.compare(cells, limits, lambda _: None),
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


# ---------------------------------------------------------------- the search


def search(
    axes: Sequence[TuneAxis],
    measure: Measure,
    budget_s: float,
    opening_s: float,
    say: Say = print,
    clock: Callable[[], float] = time.monotonic,
) -> TuneResult:
    """Return the best settings of the axes, proven against the settings as they are.

    What an axis leaves of its share goes to those after it; what all leave, to candidates for which no time was left.

    opening_s  seconds that a process takes until its updates take what they take from then on
    """
    hunt = _Hunt(measure, clock, say, opening_s)
    deadline, is_first, missed = clock() + budget_s, True, set[str]()
    while is_first or (hunt.missed and hunt.missed != missed):
        # The proof of nothing needs no time, but what is found late is proven too.
        kept_s = PROOF_SHARE * budget_s if is_first or hunt.adopted else 2 * hunt.least_s
        until = deadline - max(kept_s, hunt.least_s)
        if not is_first and until - clock() < hunt.least_s:
            break
        missed, hunt.lacks_s = hunt.missed, 0.0
        behind = {each.rule for each in hunt.tried if each.is_untried}
        walk = [axis for axis in axes if is_first or axis.name in behind]
        for number, axis in enumerate(walk):
            offer = axis.offer(hunt.words)
            hunt.left |= offer.left
            candidates = [each for each in offer.candidates if is_first or each.name in missed]
            if candidates:
                left_s = until - clock()
                share_s = left_s * axis.weight / sum(other.weight for other in walk[number:])
                needs_s = MARGIN * hunt.needs_s(len(candidates))
                hunt.halve(axis, candidates, min(left_s, max(share_s, needs_s)))
        is_first = False
    weights = sum(axis.weight for axis in axes)
    all_s = max(MORE * budget_s, hunt.lacks_s * weights / (1 - PROOF_SHARE)) if hunt.lacks_s else 0.0
    proof = hunt.prove(max(deadline - clock(), hunt.least_s)) if hunt.adopted else None
    return TuneResult(tuple(hunt.tried), hunt.left, tuple(hunt.adopted), proof, tuple(hunt.notes), all_s)


class _Hunt:
    """What is known on the way."""

    def __init__(self, measure: Measure, clock: Callable[[], float], say: Say, opening_s: float) -> None:
        self.measure, self.clock, self.say, self.opening_s = measure, clock, say, opening_s
        self.words: Words = ()
        self.tried: list[Tried] = []
        self.adopted: list[Tried] = []
        self.left: dict[str, str] = {}
        self.notes: list[str] = []
        self.lacks_s = 0.0  # most seconds that an axis of weight 1 would have needed; 0 where none lacked time
        self.fills = False  # what was adopted may fill the memory

    @property
    def missed(self) -> set[str]:
        """Names of the candidates that were not tried because no time was left for them."""
        return {each.candidate.name for each in self.tried if each.is_untried}

    @property
    def least_s(self) -> float:
        """Seconds in which two cells can be compared: one half for their start, the other for rounds."""
        return 4 * self.opening_s

    def needs_s(self, num: int) -> float:
        """Return seconds in which so many candidates are halved: half of the time of each rung is for its starts."""
        return 2 * self.opening_s * sum(playing + 1 for playing in _halves(num))

    def halve(self, axis: TuneAxis, candidates: Sequence[Candidate], seconds: float) -> None:
        """Let the candidates take turns, the better half again, until one is left; adopt it where it is better."""
        until, playing, rounds = self.clock() + seconds, list(candidates), SCREENING
        seen: dict[str, Tried] = {}
        while playing:
            if until - self.clock() < self.least_s:
                self.lacks_s = max(self.lacks_s, self.needs_s(len(playing)) / axis.weight)
                if seen:  # what leads is taken as it stands: the proof decides in any case
                    self._adopt(axis, seen[playing[0].name])
                seen = {each.name: Tried(axis.name, each, None, why_not=UNTRIED) for each in playing} | seen
                break
            while _share(len(playing)) * (until - self.clock()) < self.least_s:  # fewer, rather than none
                seen.setdefault(playing[-1].name, Tried(axis.name, playing[-1], None, why_not=UNTRIED))
                self.lacks_s = max(self.lacks_s, self.needs_s(len(playing)) / axis.weight)
                playing.pop()
            is_last, share = len(playing) == 1, _share(len(playing))
            rung_s = share * (until - self.clock())
            self.say(f"{axis.name}: {len(playing)} to try, for at most {rung_s:.0f} s")
            turns = PROVING if is_last else (rounds, rounds)
            limits = CompareLimits(rung_s, turns, start_s=rung_s, together=not axis.alone, first_evaluation=True)
            cells = [Variant(AS_IT_IS, self.words)]
            cells += [Variant(each.name, merge_overrides(self.words, each.overrides)) for each in playing]
            try:
                trials = self.measure(cells, limits)
            except AccelRunError as error:
                seen |= {each.name: Tried(axis.name, each, None, why_not=reason_of(error)) for each in playing}
                break
            self.notes += trials.notes
            self.lacks_s = max(self.lacks_s, trials.needs_s / share / axis.weight)
            seen |= {each.name: outcome(trials, axis.name, each) for each in playing}
            if is_last:
                self._adopt(axis, seen[playing[0].name])
                break
            hopes = [each for each in playing if _may_be_better(seen[each.name])]
            hopes.sort(key=lambda each: -seen[each.name].gain)
            playing, rounds = hopes[: max(1, len(playing) // 2)], 2 * rounds
        self.tried = [each for each in self.tried if each.candidate.name not in seen] + list(seen.values())

    def prove(self, seconds: float) -> Tried:
        """Return what was adopted against the settings as they are, in rounds that chose nothing."""
        self.say(f"measures what was found against the settings as they are, for at most {seconds:.0f} s")
        found = Candidate(self.words)
        start_s = max(seconds, self.least_s)
        limits = CompareLimits(
            seconds, PROVING, start_s=start_s, together=not self.fills, first_evaluation=True, seed=1
        )
        try:
            trials = self.measure([Variant(AS_IT_IS), Variant(found.name, found.overrides)], limits)
        except AccelRunError as error:
            return Tried(PROOF, found, None, why_not=reason_of(error))
        self.notes += trials.notes
        return outcome(trials, PROOF, found)

    def _adopt(self, axis: TuneAxis, best: Tried) -> None:
        if not best.is_advised:
            return
        self.words = merge_overrides(self.words, best.candidate.overrides)
        self.adopted.append(best)
        self.fills = self.fills or axis.alone
        self.opening_s += max(0.0, best.later_s or 0.0)
        self.say(f"{axis.name}: {best.candidate.name} is faster, {best.told}")


def _halves(num: int) -> list[int]:
    """Return how many candidates take part in each rung, `num` in the first and one in the last."""
    return [num] if num == 1 else [num, *_halves(max(1, num // 2))]


def _share(num: int) -> float:
    """Return the share of the time of a halving that begins with so many, which is for its first rung."""
    return (num + 1) / sum(playing + 1 for playing in _halves(num))


def _may_be_better(tried: Tried) -> bool:
    """Tell whether more rounds could show that it is clearly faster."""
    computes_the_same = tried.numerics is None or not tried.numerics.differ
    could_be = tried.ratio is not None and tried.ratio.high > 1 + NEGLIGIBLE
    return could_be and computes_the_same and tried.pays and not tried.why_not


# ---------------------------------------------------------------- what can be tried here


# ---------------------------------------------------------------- what is told


def profile_of(tuned: Tuned) -> Profile:
    """Return what was found as a profile; without settings where nothing is clearly faster."""
    found = tuned.found
    lines = [f"Task {tuned.task} on {tuned.device_name}: an update took {tuned.update_ms:.4g} ms without it."]
    if found.proof is None:
        lines.append("No setting: nothing that was tried is clearly faster.")
    elif found.words:
        lines.append(f"All of it: {found.proof.told}, {_rounds(found.proof)} after everything was chosen.")
        lines += [f"{each.candidate.name}: {each.told}, {_rounds(each)}" for each in found.adopted]
    else:
        lines.append(f"No setting: {found.proof.candidate.name} failed in fresh rounds, {found.proof.reason}")
    others = [each for each in found.tried if each not in found.adopted]
    lines += [f"Tried: {each.candidate.name}: {each.reason}" for each in others if not each.is_untried]
    untried = [each for each in others if each.is_untried]
    lines += [f"Not tried: {each.candidate.name}: {each.reason.removeprefix('not tried: ')}" for each in untried]
    return Profile(found.words, f"tuned for {tuned.task}", "tune", tuple(" ".join(line.split()) for line in lines))


def _rounds(tried: Tried) -> str:
    return f"{tried.ratio.num if tried.ratio else 0} blocks in turns"


def as_json(tuned: Tuned) -> dict[str, Any]:
    """Return all of it, JSON-able; what is not known is null."""
    found = tuned.found
    return {
        "task": tuned.task,
        "device": tuned.device_name,
        "phase": tuned.phase,
        "update_ms": tuned.update_ms if math.isfinite(tuned.update_ms) else None,
        "settings": list(found.words),
        "proof": tried_as_json(found.proof) if found.proof else None,
        "adopted": [tried_as_json(each) for each in found.adopted],
        "tried": [tried_as_json(each) for each in found.tried],
        "left": dict(found.left),
        "needs_s": found.needs_s or None,
        "notes": list(tuned.notes),
        "seconds": tuned.seconds,
    }


PROOF = "proof"
PROOF_SHARE = 0.25  # of the budget, for measuring what was found against the settings as they are
MORE = 1.5  # times the budget, at least, is said to be enough where it was not: rounds took long, and not the starts
MARGIN = 1.1  # of the time that an axis needs: its rungs begin a little later than they could
SCREENING = 3  # rounds of the first rung; twice as many in each further one
PROVING = (10, 120)  # rounds, fewest and most, that adopt a setting
