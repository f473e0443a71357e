"""What a comparison measured of each variant, and what follows from it: ratios, numerics, disturbances."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from runner.base.json_converter import encode
from runner.tools.measure.statistics import USUAL, ProcessSpread, Ratio, between, effective_processes, paired

Mode = Literal["interleaved", "restarted"]
BASELINE_NAME = "as it is"  # the settings as given, where a comparison starts from them


@dataclass(frozen=True)
class RankSetup:
    """CPU ranks over gloo.

    slow    times as long as on the others a sample takes on the last rank, by sleeping
    settle  updates until measured shares have settled
    """

    num: int
    slow: float = 1.0
    settle: int = 0


@dataclass(frozen=True)
class Variant:
    """Settings to measure: overrides of the configuration and environment variables of the process.

    against  name of the variant that it is compared with; empty: the first one
    ranks    None: one process without a process group
    """

    name: str
    overrides: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    against: str = ""
    ranks: RankSetup | None = None

    @property
    def num_ranks(self) -> int:
        return self.ranks.num if self.ranks else 0


@dataclass(frozen=True)
class Block:
    """One block of updates.

    ms                milliseconds per update, without the run-queue wait
    run_queue_wait_s  seconds spent waiting for a core that other processes used
    process           number of the process that ran it
    updates_ms        milliseconds of each of its last updates, with the wait
    joules            per update; None: the device does not report them
    """

    ms: float
    run_queue_wait_s: float = 0.0
    process: int = 0
    updates_ms: tuple[float, ...] = ()
    joules: float | None = None


@dataclass
class Startup:
    """Seconds before updates run at their final speed; the first four are of the first process.

    start_s       until the run is built; first_update_s and warm_up_s follow
    evaluation_s  how much longer the first evaluation takes than later ones, if it was measured
    taken_s       of the start, until its first block could begin or it was ended; again_s: of the last restart
    """

    start_s: float = 0.0
    first_update_s: float = 0.0
    warm_up_s: float = 0.0
    evaluation_s: float = 0.0
    warm_up_updates: int = 0
    taken_s: float = 0.0
    again_s: float = 0.0

    @property
    def warmed_up_s(self) -> float:
        """Return the seconds from nothing to the end of the warm-up."""
        return self.start_s + self.first_update_s + self.warm_up_s

    @property
    def restart_s(self) -> float:
        """Return the seconds that another start is expected to take."""
        return self.again_s or self.taken_s


@dataclass
class VariantResult:
    """What was measured of a variant.

    blocks     round -> block; only rounds in which it took part
    parts_s    seconds of these blocks by part of the stopwatch
    throttled  reason for reduced clocks -> number of blocks
    updates    per block: about the same time for every variant, so that short updates are timed as well as long ones
    untimed    updates before each block whose data may have become ready while the process was stopped
    opened     what the run consists of, as its process reported; the plan's values are those really used
    report     memory, losses and kernels, as its process reported at the end
    why_not    why nothing, or nothing more, was measured; empty if all is well
    is_out     left out of further rounds, because enough is known
    is_over    could not restart: its blocks so far count
    is_short   the time was over before its third block
    """

    variant: Variant
    blocks: dict[int, Block] = field(default_factory=dict)
    startup: Startup = field(default_factory=Startup)
    parts_s: dict[str, float] = field(default_factory=dict)
    throttled: Counter[str] = field(default_factory=Counter)
    updates: int = 0
    untimed: int = 0
    opened: dict[str, Any] = field(default_factory=dict)
    report: dict[str, Any] = field(default_factory=dict)
    why_not: str = ""
    is_out: bool = False
    is_over: bool = False
    is_short: bool = False

    @property
    def name(self) -> str:
        return self.variant.name

    @property
    def median_ms(self) -> float:
        """Return the milliseconds of an update; NaN if none was measured."""
        return statistics.median(block.ms for block in self.blocks.values()) if self.blocks else math.nan

    @property
    def turn_s(self) -> float:
        """Return the expected seconds of a block with its untimed updates."""
        if not self.blocks:
            return (self.updates + self.untimed) * self.startup.warm_up_s / max(1, self.startup.warm_up_updates)
        return self.lasted_s / len(self.blocks) * (1 + self.untimed / self.updates)

    @property
    def lasted_s(self) -> float:
        """Return the seconds of all blocks, run-queue wait included."""
        return sum(self._block_s(block) for block in self.blocks.values())

    @property
    def opening_s(self) -> float:
        """Return the seconds before updates run at their final speed; NaN if unknown."""
        startup = self.startup
        return startup.warmed_up_s + startup.evaluation_s - startup.warm_up_updates * self.median_ms / 1e3

    @property
    def is_untried(self) -> bool:
        """True if only lack of time kept it from being compared."""
        return self.is_short or self.why_not.startswith((UNTRIED, NO_TIME))

    @property
    def plays(self) -> bool:
        """True if it takes part in the next round."""
        return not (self.why_not or self.is_out or self.is_over)

    @property
    def peak_gib(self) -> float | None:
        """Return the peak memory of the GPU, or of the process if there is no GPU."""
        found = self.report.get("peak_device_gib", self.report.get("peak_host_gib"))
        return None if found is None else float(found)

    def of_process(self, number: int) -> list[Block]:
        """Return the blocks of one process."""
        return [block for block in self.blocks.values() if block.process == number]

    def process_s(self, number: int) -> float:
        """Return the seconds of the blocks of one process."""
        return sum(map(self._block_s, self.of_process(number)))

    def sees(self, what: str) -> bool:
        """Return whether each block has its share of: rows ("log"), "checkpoint", "evaluation"."""
        period = self.opened["periods"].get(what)
        return period is not None and self.updates % period == 0

    def _block_s(self, block: Block) -> float:
        return block.ms * self.updates / 1e3 + block.run_queue_wait_s


@dataclass(frozen=True)
class Numerics:
    """Relative deviations of a variant's numbers from those it is compared with.

    loss, grad_norm  of the first update: same weights, same samples
    later            of the mean loss of the first updates
    moved            distance of the weights after the first updates, relative to how far the baseline moved: 2 is the
                     opposite direction; None: unknown
    tolerance        of losses; moved_tolerance: of `moved`
    """

    loss: float
    grad_norm: float
    later: float
    tolerance: float
    moved: float | None = None
    moved_tolerance: float = math.inf

    @property
    def differ(self) -> bool:
        """True if the variant computes something else: more than rounding or another number format explains."""
        is_elsewhere = self.moved is not None and self.moved > self.moved_tolerance
        is_off = max(self.loss, self.later) > self.tolerance or self.grad_norm > GRADIENT_FACTOR * self.tolerance
        return is_elsewhere or is_off

    def __str__(self) -> str:
        text = f"loss of the first update {self.loss:.1%} off, gradient norm {self.grad_norm:.1%} off"
        return text if self.moved is None else f"{text}, weights moved {self.moved:.1%} off"


@dataclass(frozen=True)
class TrialOutcome:
    """The conclusion about one variant. Every suite, tune and advise read this record.

    ratio     times as fast as what it is compared with; None: not compared, `why_not` has the reason
    later_s   seconds by which its updates start later than the baseline's; None: unknown
    pays_at   updates after which faster updates make up for that; None: it starts no later, as far as known
    updates   of the training; None: unknown
    """

    ratio: Ratio | None = None
    numerics: Numerics | None = None
    why_not: str = ""
    later_s: float | None = None
    pays_at: int | None = None
    updates: int | None = None

    @property
    def is_untried(self) -> bool:
        """True if only lack of time kept it from being compared."""
        return self.ratio is None and self.why_not.startswith((UNTRIED, NO_TIME))

    @property
    def is_wrong(self) -> bool:
        """True if it computes something else than the baseline, however fast."""
        return self.numerics is not None and self.numerics.differ

    @property
    def is_faster(self) -> bool:
        """True if its updates are clearly faster and compute the same."""
        return self.ratio is not None and self.ratio.verdict == "better" and not self.why_not and not self.is_wrong

    @property
    def pays(self) -> bool:
        """True if the training is long enough for its start-up, or its length is unknown."""
        return self.pays_at is None or self.updates is None or self.pays_at < self.updates

    @property
    def is_advised(self) -> bool:
        """True if it is clearly faster, computes the same, and the training is long enough for it."""
        return self.is_faster and self.pays

    @property
    def gain(self) -> float:
        """Return how many times as fast it is; 0 if unknown."""
        return self.ratio.middle if self.ratio else 0.0

    @property
    def summary(self) -> str:
        """Return the gain and the start-up cost."""
        if self.pays_at is None or self.later_s is None:
            return str(self.ratio)
        return f"{self.ratio}; starts {self.later_s:.2g} s later, pays after {self.pays_at:,} updates"

    @property
    def reason(self) -> str:
        """Return why it is not recommended."""
        if self.why_not or self.ratio is None:
            return self.why_not or "not tried"
        if self.is_wrong:
            return f"computes something else: {self.numerics} ({self.ratio})"
        if not self.pays:
            return f"faster, but the {self.updates:,} updates are too few for it: {self.summary}"
        if self.ratio.verdict == "better":
            return f"better, but another setting is better still: {self.ratio}"
        return f"{self.ratio.verdict}: {self.ratio}"

    @property
    def verdict(self) -> str:
        """Return what is certain about it, for a table."""
        found = "unknown" if self.ratio is None else self.ratio.verdict
        return f"{found}; other numbers: {self.numerics}" if self.is_wrong else found


@dataclass
class ComparisonResult:
    """All variants, the baseline first, with what was found.

    mode        interleaved, or restarted for each block
    notes       what a reader must know to trust the results
    needs_s     approximate budget in seconds in which every variant would be compared; 0 if every one was
    needs_more  True if it may be more: how long one of them takes to start is unknown
    busy_cores  cores that other processes used before each round, while every variant was stopped
    num_cores   available to this process
    known       spread between processes that was known before
    """

    variants: list[VariantResult]
    mode: Mode
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)
    needs_s: float = 0.0
    needs_more: bool = False
    busy_cores: list[float] = field(default_factory=list)
    num_cores: float = 1.0
    known: ProcessSpread = USUAL

    @property
    def baseline(self) -> VariantResult:
        return self.variants[0]

    def of(self, name: str) -> VariantResult:
        """Return the variant of that name."""
        return next(each for each in self.variants if each.name == name)

    def against(self, measured: VariantResult) -> VariantResult:
        """Return what a variant is compared with."""
        return self.of(measured.variant.against) if measured.variant.against else self.baseline

    @property
    def skipped(self) -> dict[str, str]:
        """Return the variants that could not be measured, or not to the end, with the reason."""
        return {each.name: each.why_not for each in self.variants if each.why_not}

    def outcome(self, measured: VariantResult) -> TrialOutcome:
        """Return the conclusion about a variant other than the baseline."""
        later_s, gained_ms, pays_at = self.later_s(measured), self.baseline.median_ms - measured.median_ms, None
        if later_s is not None and later_s > UNNOTICED_S and gained_ms > 0:
            pays_at = math.ceil(1e3 * later_s / gained_ms)
        return TrialOutcome(
            self.ratio(measured), self.numerics(measured), measured.why_not, later_s, pays_at,
            self.baseline.opened.get("updates"),
        )  # fmt: skip

    def ratio(
        self, measured: VariantResult, against: VariantResult | None = None, *, with_processes: bool = True
    ) -> Ratio | None:
        """Return how many times as fast a variant is as what it is compared with; None: no round in common.

        with_processes  the interval includes the variation between identical processes
        """
        against = against or self.against(measured)
        rounds = sorted(measured.blocks.keys() & against.blocks.keys())
        if not rounds:
            return None
        theirs, ours = ([each.blocks[number] for number in rounds] for each in (against, measured))
        half = 0.0
        if with_processes and self.mode == "interleaved" and all(block.process for block in (*theirs, *ours)):
            half = self.spread.half(
                *(effective_processes([block.process for block in each]) for each in (ours, theirs))
            )
        return paired([block.ms for block in theirs], [block.ms for block in ours], half=half)

    @property
    def spread(self) -> ProcessSpread:
        """The variation between identical processes, by all that is known."""
        return self.known + self.own_spread

    @property
    def own_spread(self) -> ProcessSpread:
        """The same by these variants alone."""
        return between(
            [
                ({at: block.ms for at, block in each.blocks.items()}, {at: b.process for at, b in each.blocks.items()})
                for each in self.variants
            ]
        )

    def later_s(self, measured: VariantResult) -> float | None:
        """Return by how many seconds its updates start later than the baseline's; None if unknown."""
        seconds = measured.opening_s - self.baseline.opening_s
        return seconds if math.isfinite(seconds) else None

    def numerics(self, measured: VariantResult) -> Numerics | None:
        """Return how far its first updates deviate from those it is compared with; None if unknown."""
        against = self.against(measured)
        ours, theirs = against.report, measured.report
        if not (ours.get("losses") and theirs.get("losses")):
            return None
        num = min(len(ours["losses"]), len(theirs["losses"]))
        norms = [report["grad_norms"][0] if report.get("grad_norms") else 0.0 for report in (ours, theirs)]
        used, before = measured.opened["values"], against.opened["values"]
        changed = [key for key in TOLERANCES if used.get(key) != before.get(key)]
        draws = bool(ours.get("draws") or theirs.get("draws"))
        return Numerics(
            _off(ours["losses"][0], theirs["losses"][0]),
            _off(*norms),
            _off(statistics.fmean(ours["losses"][:num]), statistics.fmean(theirs["losses"][:num])),
            max([ROUNDING, *(TOLERANCES[key] for key in changed)]),
            relative_distance(ours.get("moved"), theirs.get("moved")),
            max([MOVED, *(MOVED_TOLERANCES.get(key, MOVED_DRAWN if draws else MOVED) for key in changed)]),
        )


def fuller_report(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the reports of two processes: the one with more first updates, and the higher peaks."""
    fuller = before if len(before.get("losses", ())) > len(now.get("losses", ())) else now
    peaks = {key: max(before[key], now[key]) for key in before.keys() & now.keys() if key.startswith("peak_")}
    return {**fuller, **peaks}


def _off(ours: float, theirs: float) -> float:
    """Return the relative difference; infinite if one of them is NaN."""
    difference = abs(theirs - ours) / max(abs(ours), 1e-12)
    return float("inf") if math.isnan(difference) else difference


def relative_distance(ours: Sequence[float] | None, theirs: Sequence[float] | None) -> float | None:
    """Return the distance of two vectors, relative to the length of the first; None if one is unknown."""
    if ours is None or theirs is None:
        return None
    length, found = math.hypot(*ours), math.dist(ours, theirs)
    return found / length if length and math.isfinite(found) else math.inf


def disturbances(trials: ComparisonResult) -> Iterator[str]:
    """Yield what disturbed the measurement: spread of the baseline, other processes, throttling."""
    blocks_ms = [block.ms for block in trials.baseline.blocks.values()]
    low, middle, high = statistics.quantiles(blocks_ms, n=4) if len(blocks_ms) >= 4 else (1.0, 1.0, 1.0)
    if (high - low) / middle > RESTLESS:
        what = f"half of the baseline's blocks differ by {(high - low) / middle:.0%}"
        yield f"the machine is restless: {what}; other processes run, or it throttles"
    busy = statistics.fmean(trials.busy_cores) if trials.busy_cores else 0.0
    if busy > BUSY_CORES:
        yield f"the machine is busy: other processes use {busy:.1f} of {trials.num_cores:g} cores"
    blocks = [block for each in trials.variants for block in each.blocks.values()]
    seconds, wait_s = sum(each.lasted_s for each in trials.variants), sum(block.run_queue_wait_s for block in blocks)
    if wait_s > CONTENDED * seconds:
        yield f"{wait_s / seconds:.0%} of the time, blocks waited for cores used by other processes: it is not counted"
    if trials.mode == "interleaved" and trials.own_spread.freedom and trials.spread.sigma > APART:
        yield f"identical processes differ by {trials.spread.sigma:.1%} here: the intervals include that"
    for reason, times in sum((each.throttled for each in trials.variants), Counter[str]()).most_common():
        yield f"the device throttles: {reason}, in {times} of {len(blocks)} blocks"


def as_json(trials: ComparisonResult) -> dict[str, Any]:
    """Return all that was measured as JSON-serializable data."""
    rows = []
    for each in trials.variants:
        outcome, found = trials.outcome(each), encode(each)
        found["report"].pop("moved", None)
        for block in found["blocks"].values():
            del block["updates_ms"]
        found |= {"median_ms": each.median_ms if each.blocks else None, **outcome_as_json(outcome)}
        rows.append(found)
    spread = encode(trials.spread) | {"sigma": trials.spread.sigma} if trials.mode == "interleaved" else None
    about = {"mode": trials.mode, "seconds": trials.seconds, "notes": trials.notes}
    return {**about, "between_processes": spread, "variants": rows}


def outcome_as_json(outcome: TrialOutcome) -> dict[str, Any]:
    """Return an outcome with its verdicts."""
    found: dict[str, Any] = encode(outcome)
    if outcome.ratio is not None:
        found["ratio"]["verdict"] = outcome.ratio.verdict
    if outcome.numerics is not None:
        found["numerics"]["differ"] = outcome.numerics.differ
    return found


UNTRIED = "not tried: no time was left for its start"
NO_TIME = "not tried: it had no time to start"
UNNOTICED_S = 0.5  # by which the start-ups of the same settings differ
RESTLESS = 0.15  # distance of the quartiles of blocks, relative to the median
BUSY_CORES = 0.25
CONTENDED = 0.02  # of the time of all blocks
APART = 0.02  # standard deviation between identical processes from which a note reports it
ROUNDING = 1e-3  # largest relative difference of losses by order of summation
GRADIENT_FACTOR = 5  # a norm is more sensitive than a mean
# What may change losses by more than rounding, and by how much: other formats, other random draws in dropout.
TOLERANCES: Mapping[str, float] = {
    "precision": 0.03, "micro_batch_size": 0.05, "attention": 0.02, "compile": 0.02, "memory": 0.01, "device": 0.05,
    "backend.threads": 0.01, "optimizer": 0.02,
}  # fmt: skip
# How far apart the weights may be after the first updates, relative to how far they moved. Adam's first updates are
# little more than the signs of the gradients, so other rounding flips those of gradients that should be 0, such as of
# the bias of keys: up to 0.1 in small models. Tasks in size tiny: kernels 1e-4, bf16 0.02 to 0.08, fp16 up to 0.04,
# 8 bits 0.1; a seventh of the learning rate 0.85, SGD instead of Adam 0.99, no movement 1, the opposite direction 2.
MOVED = 0.3
MOVED_TOLERANCES: Mapping[str, float] = {"precision": 0.6, "optimizer": 0.6, "device": 0.6}
MOVED_DRAWN = 1.6  # if the setting may change random draws: other dropout is up to 1.4 away
