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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from runner.base.configuration import Configuration, Request, compose, function_of, merge_overrides, options_of
from runner.base.errors import AccelRunError
from runner.base.subprocesses import in_subprocess
from runner.measure.advisor import Tried, look, of_one_rank, outcome, planned, tried_as_json
from runner.measure.compare import UNTRIED, CompareLimits, Comparison, ComparisonResult, Variant
from runner.measure.facts import Facts, device_of
from runner.measure.hardware_profile import Profile
from runner.measure.rules import BUSY, Candidate, cache, worker_counts
from runner.measure.statistics import NEGLIGIBLE
from runner.plan.inventory import Inventory
from runner.plan.planner import make_plan

Words = tuple[str, ...]
Say = Callable[[str], None]
Measure = Callable[[Sequence[Variant], CompareLimits], ComparisonResult]
AS_IT_IS = "as it is"


@dataclass(frozen=True)
class TuneCandidate:
    """What an axis has to try, and what it leaves: an axis or a setting -> why."""

    candidates: tuple[Candidate, ...] = ()
    left: Mapping[str, str] = field(default_factory=dict)


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
    plan, inventory = in_subprocess(planned, compose(request))
    one_rank, cores, notes = of_one_rank(request, plan, inventory)
    with Comparison(one_rank, cores) as arena:
        say("measures the training as it is")
        with arena.alone(Variant(AS_IT_IS), CompareLimits(budget_s)) as (ask, opened):
            now, probe = look(ask, opened, plan)
            attends = bool(ask({"do": "report"})["attention"])
        facts = Facts(
            evidence=now,
            values=opened.opened["values"],
            cpu=dataclasses.replace(inventory.cpu, logical_cores=cores) if cores else inventory.cpu,
            gpus=inventory.usable,
            gpu=device_of(inventory, now.device),
            probe=probe,
        )
        phase = opened.opened["phase"]
        place = TuneTarget(one_rank, compose(request), inventory, facts, phase, attends)
        axes = [
            TuneAxis(name, place.offers(name), weight, fills and facts.gpu is not None)
            for name, (_, weight, fills) in AXES.items()
        ]
        opening_s = opened.start_s + opened.first_update_s + opened.warm_up_s + 2 * CompareLimits().block_s
        before_s = time.monotonic() - began
        found = search(
            axes,
            lambda cells, limits: arena.measure(cells, limits, lambda _: None),
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
                seen |= {each.name: Tried(axis.name, each, None, why_not=_reason(error)) for each in playing}
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
            return Tried(PROOF, found, None, why_not=_reason(error))
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


def _reason(error: AccelRunError) -> str:
    return " ".join(str(error).split())


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


@dataclass(frozen=True)
class TuneTarget:
    """The training that is tuned, and where.

    asked    the configuration as it was asked for, whose words are not touched
    phase    whose updates are measured
    attends  the model calls torch's attention
    """

    request: Request
    asked: Configuration
    inventory: Inventory
    facts: Facts
    phase: str
    attends: bool

    def offers(self, name: str) -> Callable[[Words], TuneCandidate]:
        """Return what the axis of that name offers beside settings already found."""
        propose = AXES[name][0]

        def offer(words: Words) -> TuneCandidate:
            before = self.values(words)
            proposed = propose(TuneBaseline(self, before))
            if isinstance(proposed, str):
                return TuneCandidate(left={name: proposed})
            left, candidates = dict[str, str](), []
            for candidate in map(Candidate, proposed):
                why_not = self._why_not(candidate, words, before)
                if why_not:
                    left[candidate.name] = why_not
                else:
                    candidates.append(candidate)
            return TuneCandidate(tuple(candidates[:MOST]), left)

        return offer

    def values(self, words: Words) -> Mapping[str, Any]:
        """Return every key that the plan decides with these words. Raises ConfigError where they cannot be."""
        overrides = merge_overrides(self.request.overrides, words)
        return make_plan(compose(dataclasses.replace(self.request, overrides=overrides)), self.inventory).values()

    def _why_not(self, candidate: Candidate, words: Words, before: Mapping[str, Any]) -> str:
        """Return why it is not to be tried; empty where it is."""
        for word in candidate.overrides:
            key, _, value = word.partition("=")
            for said, source in self.asked.sources.items():
                touched = said == key or (said.startswith(f"{key}.") and str(before.get(key)) != value)
                if touched and source == "command line":
                    return f"{said} was said by the {source}: it stays"
        try:
            after = self.values(merge_overrides(words, candidate.overrides))
        except AccelRunError as error:
            return _reason(error)
        changed = [key for key in before.keys() | after.keys() if before.get(key) != after.get(key)]
        if not changed:
            return "the plan makes the same of it here"
        others = sorted(key for key in changed if not is_mechanics(key))
        return f"would change {', '.join(others)}, which is not for speed alone" if others else ""


@dataclass(frozen=True)
class TuneBaseline:
    """What proposals follow from: the place, and every key of the plan with what was found so far."""

    place: TuneTarget
    values: Mapping[str, Any]

    @property
    def facts(self) -> Facts:
        """What was measured of the settings as they are."""
        return self.place.facts

    @property
    def on_gpu(self) -> bool:
        """True where a CUDA device trains."""
        return self.facts.gpu is not None and self.facts.gpu.kind == "cuda"

    def key(self, name: str) -> str:
        """Return the whole key of a setting: that of the measured phase where phases have their own."""
        of_phase = f"phase.{self.place.phase}.{name}"
        return of_phase if of_phase in self.values else name

    def get(self, name: str) -> Any:
        """Return the value of a setting, that of the measured phase where it has its own; None: there is none."""
        return self.values.get(self.key(name))

    def options(self, group: str) -> list[str]:
        """Return the options of a group that are not in use; what `auto` stands for is."""
        here = options_of(group, self.place.request.config_dir)
        return [name for name in here if name not in ("auto", self.get(group))]

    def choices(self, group: str) -> list[Words]:
        """Return a proposal for each of these options."""
        return [(f"{group}={name}",) for name in self.options(group)]

    def literals(self, group: str, key: str) -> list[str]:
        """Return the values that a key of the chosen option can have by its type, `auto` and the one in use aside."""
        signature = function_of(group, str(self.get(group)))
        known = get_args(signature.keys[key].type) if signature and key in signature.keys else ()
        return [value for value in known if value not in ("auto", self.get(f"{group}.{key}"))]


Proposed = Iterable[Words] | str


def is_mechanics(key: str) -> bool:
    """Tell whether a key of the plan decides how fast updates are made and not what they compute."""
    own = key.split(".", 2)[2] if key.startswith("phase.") else key
    return own in MECHANICS or own.partition(".")[0] in MECHANIC_GROUPS


def _kept_samples(ground: TuneBaseline) -> Proposed:
    """Samples are kept once they are read, where that changes nothing."""
    if not cache(ground.facts)[0]:
        return "samples are read once, are not known to be the same each time, or do not fit into memory"
    return [
        (f"dataloader.cache={where}",)
        for where in ground.literals("dataloader", "cache")
        if ground.on_gpu or where != "device"
    ]


def _readers(ground: TuneBaseline) -> Proposed:
    """Worker processes in other numbers, or other options of the loader."""
    if ground.get("dataloader.cache") != "none":
        return "samples are kept: nobody reads"
    loader, share = ground.get("dataloader"), ground.facts.share("data")
    workers = 1 if loader == "thread" else ground.get("dataloader.num_workers")
    if workers == 0 and share is not None and share < NEGLIGIBLE:
        return f"updates wait for data {share:.1%} of the time"
    counts = worker_counts(ground.facts.cpu.logical_cores, reads_wait=ground.facts.probe.get("sample_busy", 1.0) < BUSY)
    proposed: list[Words] = []
    for option in (loader, *ground.options("dataloader")):
        if option == "thread":  # without a cache it is one worker process, which is among the numbers
            continue
        signature, chosen = function_of("dataloader", option), (f"dataloader={option}",)
        own: Words = () if option == loader else chosen
        if signature is not None and "num_workers" in signature.keys:
            is_as_now = not own or loader == "thread"
            others = [num for num in (*counts, 0) if not (is_as_now and num == workers)]
            proposed += [(*own, f"dataloader.num_workers={num}") for num in others]
        elif own:
            proposed.append(own)
    return proposed


def _read_ahead(ground: TuneBaseline) -> Proposed:
    """More batches read ahead by those who read."""
    key = "dataloader.prefetch_factor" if ground.get("dataloader.num_workers") else "dataloader.depth"
    now = ground.get(key)
    return "nobody reads ahead" if now is None else [(f"{key}={2 * now}",), (f"{key}={4 * now}",)]


def _copies(ground: TuneBaseline) -> Proposed:
    """Copies to the GPU from page-locked memory, on a stream of their own, or neither."""
    if not ground.on_gpu:
        return "no GPU"
    pinned = str(not ground.get("dataloader.pin_memory")).lower()
    return [*ground.choices("prefetch"), (f"dataloader.pin_memory={pinned}",)]


def _threads(ground: TuneBaseline) -> Proposed:
    """Fewer or more threads that compute."""
    if not ground.facts.on_cpu():
        return "the GPU computes"
    cpu, now = ground.facts.cpu, ground.facts.evidence.num_threads
    counts = {1, max(1, cpu.logical_cores // 2), min(cpu.physical_cores, cpu.logical_cores), cpu.logical_cores}
    return [(f"backend.threads={num}",) for num in sorted(counts - {now}, reverse=True)]


def _precision(ground: TuneBaseline) -> Proposed:
    """Formats that the device computes in itself; where losses do not agree, none is adopted."""
    if ground.facts.on_cpu():
        native = {"fp32", "bf16"} if ground.facts.cpu.native_bf16 else {"fp32"}
        found = [words for words in ground.choices("precision") if words[0].partition("=")[2] in native]
        return found or "this CPU multiplies float32 alone"
    return ground.choices("precision")


def _passes(ground: TuneBaseline) -> Proposed:
    """An update cut into more or fewer passes."""
    evidence = ground.facts.evidence
    micro, passes, whole = evidence.micro_batch_size, evidence.accumulation_steps, evidence.global_batch_size
    if ground.facts.probe.get("has_batch_norm"):
        return "batch norms take their statistics from a pass: another size computes something else"
    if not micro or not passes or not whole:
        return "the size of a pass is not known"
    share = min(whole, micro * passes)
    sizes = [share >> shift for shift in range(share.bit_length()) if share % (share >> shift) == 0]
    near = sorted((size for size in sizes if size != micro), key=lambda size: (abs(math.log2(size / micro)), -size))
    return [(f"{ground.key('micro_batch_size')}={size}",) for size in near]


def _optimizer_kernels(ground: TuneBaseline) -> Proposed:
    """Other kernels of the same optimizer: the rule of the update stays."""
    return [(f"{ground.key('optimizer.kernel')}={name}",) for name in ground.literals("optimizer", "kernel")]


def _attention(ground: TuneBaseline) -> Proposed:
    """Other kernels of attention."""
    is_seen = ground.place.attends or ground.facts.values.get("compile") != "off"
    return ground.choices("attention") if is_seen else "the model calls no attention of torch"


def _kernel_search(ground: TuneBaseline) -> Proposed:
    """Whether cuDNN searches for kernels."""
    if not ground.on_gpu:
        return "cuDNN runs on GPUs alone"
    if ground.get("backend") == DETERMINISTIC:
        return "deterministic kernels were asked for: they stay"
    return [words for words in ground.choices("backend") if words != (f"backend={DETERMINISTIC}",)]


def _kept_activations(ground: TuneBaseline) -> Proposed:
    """Activations are kept instead of computed again, where the memory holds them."""
    return "every activation is kept already" if ground.get("memory") == "none" else ground.choices("memory")


def _compiled(ground: TuneBaseline) -> Proposed:
    """The model compiled in other ways, or not; what takes minutes to begin comes last."""
    return sorted(ground.choices("compile"), key=lambda words: words == (f"compile={SLOWEST}",))


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
MOST = 7  # candidates of an axis: as many rungs as there are starts worth making
DETERMINISTIC, SLOWEST = "deterministic", "max-autotune"
# What may change: the rest is the mathematics, and promises of another kind.
MECHANIC_GROUPS = ("precision", "prefetch", "compile", "attention", "memory", "backend")
MECHANICS = (
    "micro_batch_size", "accumulation_steps", "optimizer.kernel", "dataloader", "dataloader.num_workers",
    "dataloader.pin_memory", "dataloader.prefetch_factor", "dataloader.start_method", "dataloader.depth",
    "dataloader.cache",
)  # fmt: skip
# name -> what it proposes, the weight of its share of the time, whether one of its cells may fill the memory.
# Compiling comes last: it takes long to begin, and each axis after it would pay that again.
AXES: Mapping[str, tuple[Callable[[TuneBaseline], Proposed], float, bool]] = {
    "kept samples": (_kept_samples, 1.0, False),
    "readers": (_readers, 2.0, False),
    "read ahead": (_read_ahead, 1.0, False),
    "copies": (_copies, 1.0, False),
    "threads": (_threads, 1.0, False),
    "precision": (_precision, 1.0, False),
    "kept activations": (_kept_activations, 1.0, True),
    "micro-batch": (_passes, 2.0, True),
    "optimizer kernels": (_optimizer_kernels, 1.0, False),
    "attention": (_attention, 1.0, False),
    "kernel search": (_kernel_search, 1.0, False),
    "compile": (_compiled, 3.0, False),
}
