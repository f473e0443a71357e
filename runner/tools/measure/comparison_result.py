"""The result of a comparison: measurements of each variant, ratios, numerical differences, disturbances."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from runner.base.errors import AccelRunError
from runner.base.json_converter import encode
from runner.tools.measure.statistics import (
    PRIOR_SPREAD,
    ProcessSpread,
    Ratio,
    effective_processes,
    estimate_process_spread,
    paired_ratio,
)

Mode = Literal["interleaved", "restarted"]
BASELINE_NAME = "as it is"  # name of the baseline if it has the current settings


@dataclass(frozen=True)
class RankSetup:
    """CPU ranks over gloo.

    settle  number of updates before the first block, in which load balancing adapts the share of the batch that each
            rank computes to its measured speed
    """

    num: int
    settle: int = 0


@dataclass(frozen=True)
class Variant:
    """Settings to measure: overrides of the configuration.

    against  name of the variant to compare with; empty: the baseline
    ranks    None: one process without a process group
    """

    name: str
    overrides: tuple[str, ...] = ()
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
    process           number of the process that ran the block
    updates_ms        milliseconds of each of its last updates, including the wait
    """

    ms: float
    run_queue_wait_s: float = 0.0
    process: int = 0
    updates_ms: tuple[float, ...] = ()


@dataclass
class Startup:
    """Seconds before updates run at their final speed. Restarts change only the last two fields.

    start_s       seconds until the run is built; first_update_s and warm_up_s follow
    evaluation_s  extra time of the first evaluation compared with later ones; 0 if not measured
    taken_s       duration of the first start (in mode `restarted`, of the latest), until it was ready or was ended
    again_s       duration of the last restart
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
        """Return the seconds from the start of the process to the end of the warm-up."""
        return self.start_s + self.first_update_s + self.warm_up_s

    @property
    def restart_s(self) -> float:
        """Return the expected seconds of a restart."""
        return self.again_s or self.taken_s


@dataclass
class VariantResult:
    """Measurements of a variant.

    blocks     round -> block; only rounds in which the variant was active
    parts_s    seconds of these blocks by part of the stopwatch
    throttled  reason for reduced clocks -> number of blocks
    updates    number of updates per block; a block takes about the same time for every variant
    untimed    number of updates before each block that are not timed: their data may have become ready while the
               process was stopped
    opened     description of the run, sent by its process; `values` has the settings that it actually uses
    report     memory, losses and kernels from its process at the end
    why_not    reason why nothing, or nothing more, was measured; empty if the variant did not fail
    is_out     left out of further rounds, because its ratio is known well enough
    is_over    its process could not be restarted: only its blocks so far count
    is_short   the budget ended before its third block
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
        """Return the median milliseconds of an update; NaN without blocks."""
        return statistics.median(block.ms for block in self.blocks.values()) if self.blocks else math.nan

    @property
    def turn_s(self) -> float:
        """Return the expected seconds of a block with its untimed updates."""
        if not self.blocks:
            return (self.updates + self.untimed) * self.startup.warm_up_s / max(1, self.startup.warm_up_updates)
        return self.total_s / len(self.blocks) * (1 + self.untimed / self.updates)

    @property
    def total_s(self) -> float:
        """Return the seconds of all blocks, run-queue wait included."""
        return sum(self._seconds_of_block(block) for block in self.blocks.values())

    @property
    def startup_s(self) -> float:
        """Return the seconds before updates run at their final speed; NaN if unknown."""
        startup = self.startup
        return startup.warmed_up_s + startup.evaluation_s - startup.warm_up_updates * self.median_ms / 1e3

    @property
    def is_untried(self) -> bool:
        """True if nothing but the time budget prevented the comparison."""
        return self.is_short or self.why_not.startswith((NO_TIME_LEFT, START_TIMED_OUT))

    @property
    def is_active(self) -> bool:
        """True if it runs in the next round."""
        return not (self.why_not or self.is_out or self.is_over)

    @property
    def peak_gib(self) -> float | None:
        """Return the peak memory of the GPU, or of the process if there is no GPU."""
        peak = self.report.get("peak_device_gib", self.report.get("peak_host_gib"))
        return None if peak is None else float(peak)

    def process_blocks(self, number: int) -> list[Block]:
        return [block for block in self.blocks.values() if block.process == number]

    def process_s(self, number: int) -> float:
        """Return the seconds of the blocks of one process."""
        return sum(map(self._seconds_of_block, self.process_blocks(number)))

    def covers(self, periodic_work: str) -> bool:
        """Return whether each block has a whole number of periods of "log", "checkpoint" or "evaluation"."""
        period = self.opened["periods"].get(periodic_work)
        return period is not None and self.updates % period == 0

    def _seconds_of_block(self, block: Block) -> float:
        return block.ms * self.updates / 1e3 + block.run_queue_wait_s


@dataclass(frozen=True)
class Numerics:
    """Relative differences between the numbers of a variant and of its baseline.

    loss, grad_norm  differences in the first update, which has the same weights and samples
    later            difference of the mean loss of the first updates
    moved            distance between the weights after the first updates, relative to the baseline's distance from its
                     initial weights: 2 is the opposite direction; None: unknown
    tolerance        tolerance for losses
    moved_tolerance  tolerance for `moved`
    """

    loss: float
    grad_norm: float
    later: float
    tolerance: float
    moved: float | None = None
    moved_tolerance: float = math.inf

    @property
    def differ(self) -> bool:
        """True if the differences are larger than rounding or a different number format can explain."""
        weights_differ = self.moved is not None and self.moved > self.moved_tolerance
        losses_differ = max(self.loss, self.later) > self.tolerance
        return weights_differ or losses_differ or self.grad_norm > GRADIENT_FACTOR * self.tolerance

    def __str__(self) -> str:
        text = f"loss of the first update by {self.loss:.1%}, gradient norm by {self.grad_norm:.1%}"
        return text if self.moved is None else f"{text}, weights by {self.moved:.1%}"


@dataclass(frozen=True)
class TrialOutcome:
    """The conclusion about one variant, as read by every suite, tune and advise.

    ratio    speed relative to its baseline; None: not compared, for the reason in `why_not`
    later_s  seconds by which the start-up takes longer than that of the baseline; None: unknown
    pays_at  number of updates after which faster updates make up for a longer start-up; None: not longer, or unknown
    updates  number of updates of the run; None: unknown
    """

    ratio: Ratio | None = None
    numerics: Numerics | None = None
    why_not: str = ""
    later_s: float | None = None
    pays_at: int | None = None
    updates: int | None = None

    @property
    def is_untried(self) -> bool:
        """True if nothing but the time budget prevented the comparison."""
        return self.ratio is None and self.why_not.startswith((NO_TIME_LEFT, START_TIMED_OUT))

    @property
    def is_wrong(self) -> bool:
        """True if its numerical results differ from the baseline's."""
        return self.numerics is not None and self.numerics.differ

    @property
    def is_faster(self) -> bool:
        """True if its updates are clearly faster and have the same numerical results."""
        return self.ratio is not None and self.ratio.verdict == "better" and not self.why_not and not self.is_wrong

    @property
    def pays(self) -> bool:
        """True if the run is long enough to make up for the start-up time, or of unknown length."""
        return self.pays_at is None or self.updates is None or self.pays_at < self.updates

    @property
    def is_advised(self) -> bool:
        """True if it is clearly faster, has the same results, and the run is long enough."""
        return self.is_faster and self.pays

    @property
    def gain(self) -> float:
        """Return the speed relative to the baseline; 0 if unknown."""
        return self.ratio.middle if self.ratio else 0.0

    @property
    def summary(self) -> str:
        """Return the gain and the start-up cost."""
        if self.pays_at is None or self.later_s is None:
            return str(self.ratio)
        return (
            f"{self.ratio}; start-up takes {self.later_s:.2g} s longer, which pays off after {self.pays_at:,} updates"
        )

    @property
    def reason(self) -> str:
        """Return why it is not recommended."""
        if self.why_not or self.ratio is None:
            return self.why_not or "not tried"
        if self.is_wrong:
            return f"numerical results differ: {self.numerics} ({self.ratio})"
        if not self.pays:
            return f"faster, but its start-up does not pay off within {self.updates:,} updates: {self.summary}"
        if self.ratio.verdict == "better":
            return f"better, but another setting is even better: {self.ratio}"
        return f"{self.ratio.verdict}: {self.ratio}"

    @property
    def verdict(self) -> str:
        """Return the verdict on speed and numerical results, for a table."""
        speed = "unknown" if self.ratio is None else self.ratio.verdict
        return f"{speed}; numerical results differ: {self.numerics}" if self.is_wrong else speed


@dataclass
class ComparisonResult:
    """The measurements of all variants, the baseline first.

    mode          interleaved, or restarted for each block
    notes         disturbances and limits of the measurement, for the user
    busy_cores    cores used by other processes before each round, while every variant was stopped
    num_cores     number of cores available to this process
    prior_spread  variation between identical processes from earlier comparisons
    """

    variants: list[VariantResult]
    mode: Mode
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)
    busy_cores: list[float] = field(default_factory=list)
    num_cores: float = 1.0
    prior_spread: ProcessSpread = PRIOR_SPREAD

    @property
    def baseline(self) -> VariantResult:
        return self.variants[0]

    def of(self, name: str) -> VariantResult:
        return next(trial for trial in self.variants if trial.name == name)

    def against(self, trial: VariantResult) -> VariantResult:
        return self.of(trial.variant.against) if trial.variant.against else self.baseline

    @property
    def skipped(self) -> dict[str, str]:
        """Return name -> reason for variants that were not measured, or only in part."""
        return {trial.name: trial.why_not for trial in self.variants if trial.why_not}

    def outcome(self, trial: VariantResult) -> TrialOutcome:
        """Return the conclusion about a variant other than the baseline."""
        later_s, gained_ms, pays_at = self.later_s(trial), self.baseline.median_ms - trial.median_ms, None
        if later_s is not None and later_s > MIN_DELAY_S and gained_ms > 0:
            pays_at = math.ceil(1e3 * later_s / gained_ms)
        return TrialOutcome(
            self.ratio(trial), self.numerics(trial), trial.why_not, later_s, pays_at,
            self.baseline.opened.get("updates"),
        )  # fmt: skip

    def ratio(
        self, trial: VariantResult, against: VariantResult | None = None, *, with_processes: bool = True
    ) -> Ratio | None:
        """Return the speed of a variant relative to another, by default its baseline; None: no round in common.

        with_processes  include the variation between identical processes in the interval
        """
        against = against or self.against(trial)
        rounds = sorted(trial.blocks.keys() & against.blocks.keys())
        if not rounds:
            return None
        base_blocks, blocks = ([each.blocks[number] for number in rounds] for each in (against, trial))
        half_width = 0.0
        if with_processes and self.mode == "interleaved" and all(block.process for block in (*base_blocks, *blocks)):
            half_width = self.spread.half_width(
                *(effective_processes([block.process for block in part]) for part in (blocks, base_blocks))
            )
        return paired_ratio([block.ms for block in base_blocks], [block.ms for block in blocks], half_width=half_width)

    @property
    def spread(self) -> ProcessSpread:
        """The variation between identical processes, from this comparison and earlier ones."""
        return self.prior_spread + self.measured_spread

    @property
    def measured_spread(self) -> ProcessSpread:
        """The variation between identical processes, from this comparison alone."""
        return estimate_process_spread(
            [
                (
                    {at: block.ms for at, block in trial.blocks.items()},
                    {at: b.process for at, b in trial.blocks.items()},
                )
                for trial in self.variants
            ]
        )

    def later_s(self, trial: VariantResult) -> float | None:
        """Return by how many seconds the start-up takes longer than that of the baseline; None if unknown."""
        seconds = trial.startup_s - self.baseline.startup_s
        return seconds if math.isfinite(seconds) else None

    def numerics(self, trial: VariantResult) -> Numerics | None:
        """Return the differences between the first updates of a variant and of its baseline; None if unknown."""
        against = self.against(trial)
        base, other = against.report, trial.report
        if not (base.get("losses") and other.get("losses")):
            return None
        num = min(len(base["losses"]), len(other["losses"]))
        norms = [report["grad_norms"][0] if report.get("grad_norms") else 0.0 for report in (base, other)]
        values, base_values = trial.opened["values"], against.opened["values"]
        changed = [key for key in TOLERANCES if values.get(key) != base_values.get(key)]
        is_random = bool(base.get("draws") or other.get("draws"))
        return Numerics(
            _relative_difference(base["losses"][0], other["losses"][0]),
            _relative_difference(*norms),
            _relative_difference(statistics.fmean(base["losses"][:num]), statistics.fmean(other["losses"][:num])),
            max([LOSS_ROUNDING, *(TOLERANCES[key] for key in changed)]),
            relative_distance(base.get("moved"), other.get("moved")),
            max(
                [
                    WEIGHT_TOLERANCE,
                    *(
                        WEIGHT_TOLERANCES.get(key, WEIGHT_TOLERANCE_RANDOM if is_random else WEIGHT_TOLERANCE)
                        for key in changed
                    ),
                ]
            ),
        )


def merge_reports(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the reports of two processes of a variant: take the one with more losses, and the higher of both peaks."""
    longer = before if len(before.get("losses", ())) > len(now.get("losses", ())) else now
    peaks = {key: max(before[key], now[key]) for key in before.keys() & now.keys() if key.startswith("peak_")}
    return {**longer, **peaks}


def _relative_difference(base: float, other: float) -> float:
    """Return the relative difference; infinite if one of them is NaN."""
    difference = abs(other - base) / max(abs(base), 1e-12)
    return float("inf") if math.isnan(difference) else difference


def relative_distance(base: Sequence[float] | None, other: Sequence[float] | None) -> float | None:
    """Return the distance of two vectors, relative to the length of the first; None if one is unknown."""
    if base is None or other is None:
        return None
    length, distance = math.hypot(*base), math.dist(base, other)
    return distance / length if length and math.isfinite(distance) else math.inf


def is_compiled(trial: VariantResult) -> bool:
    """Return whether the variant compiles its model, so that its start may take ten times as long."""
    return any(item.startswith("compile=") and item != "compile=off" for item in trial.variant.overrides)


def expected_start_s(result: ComparisonResult, trial: VariantResult) -> float:
    """Return the expected seconds of a start: the median over variants that also compile, or also do not.

    Without such a variant, it is the median of all variants that started in time.
    """
    timed = [
        other for other in result.variants if other.startup.taken_s and not other.why_not.startswith(START_TIMED_OUT)
    ]
    similar = [other.startup.taken_s for other in timed if is_compiled(other) == is_compiled(trial)]
    return statistics.median(similar or [other.startup.taken_s for other in timed])


def format_reason(error: AccelRunError) -> str:
    """Return the first problem as one line."""
    problem = error.problems[0]
    return " ".join(f"{problem.where + ': ' if problem.where else ''}{problem.what}".split())


def describe_disturbances(result: ComparisonResult) -> Iterator[str]:
    """Yield notes on disturbances: noise of the baseline, other processes, throttling."""
    blocks_ms = [block.ms for block in result.baseline.blocks.values()]
    low, middle, high = statistics.quantiles(blocks_ms, n=4) if len(blocks_ms) >= 4 else (1.0, 1.0, 1.0)
    if (high - low) / middle > NOISY_SPREAD:
        what = f"the interquartile range of the baseline's block times is {(high - low) / middle:.0%} of their median"
        yield f"measurements are noisy: {what}; other processes are running, or the machine throttles"
    busy = statistics.fmean(result.busy_cores) if result.busy_cores else 0.0
    if busy > BUSY_CORES:
        yield f"the machine is busy: other processes use {busy:.1f} of {result.num_cores:g} cores"
    blocks = [block for trial in result.variants for block in trial.blocks.values()]
    seconds, wait_s = sum(trial.total_s for trial in result.variants), sum(block.run_queue_wait_s for block in blocks)
    if wait_s > MAX_WAIT_SHARE * seconds:
        yield f"blocks spent {wait_s / seconds:.0%} of the time waiting for cores used by other processes (not counted)"
    if result.mode == "interleaved" and result.measured_spread.freedom and result.spread.sigma > NOTABLE_SIGMA:
        yield f"identical processes differ by {result.spread.sigma:.1%}: the intervals include this variation"
    for reason, times in sum((trial.throttled for trial in result.variants), Counter[str]()).most_common():
        yield f"the device throttles: {reason}, in {times} of {len(blocks)} blocks"


def as_json(result: ComparisonResult) -> dict[str, Any]:
    """Return all measurements as JSON-serializable data."""
    rows = []
    for trial in result.variants:
        row = encode(trial)
        row["report"].pop("moved", None)
        for block in row["blocks"].values():
            del block["updates_ms"]
        row |= {"median_ms": trial.median_ms if trial.blocks else None, **encode_outcome(result.outcome(trial))}
        rows.append(row)
    spread = encode(result.spread) | {"sigma": result.spread.sigma} if result.mode == "interleaved" else None
    about = {"mode": result.mode, "seconds": result.seconds, "notes": result.notes}
    return {**about, "between_processes": spread, "variants": rows}


def encode_outcome(outcome: TrialOutcome) -> dict[str, Any]:
    """Return an outcome as JSON-serializable data, with its verdicts."""
    encoded: dict[str, Any] = encode(outcome)
    if outcome.ratio is not None:
        encoded["ratio"]["verdict"] = outcome.ratio.verdict
    if outcome.numerics is not None:
        encoded["numerics"]["differ"] = outcome.numerics.differ
    return encoded


NO_TIME_LEFT = "not tried: no time was left for its start"
START_TIMED_OUT = "not tried: start-up timed out"
MIN_DELAY_S = 0.5  # a shorter delay of the start-up is ignored: start-ups of identical settings differ by this much
# A note is shown above these values.
NOISY_SPREAD = 0.15  # interquartile range of the baseline's blocks, relative to their median
BUSY_CORES = 0.25  # number of cores that other processes use
MAX_WAIT_SHARE = 0.02  # run-queue wait, as a share of the time of all blocks
NOTABLE_SIGMA = 0.02  # standard deviation between identical processes

LOSS_ROUNDING = 1e-3  # largest relative difference of losses due to the order of summation
GRADIENT_FACTOR = 5  # factor on the tolerance for gradient norms, which are more sensitive than mean losses
# Settings that change losses by more than rounding, with tolerances: other number formats, other dropout masks.
TOLERANCES: Mapping[str, float] = {
    "precision": 0.03, "micro_batch_size": 0.05, "attention": 0.02, "compile": 0.02, "memory": 0.01, "device": 0.05,
    "backend.threads": 0.01, "optimizer": 0.02,
}  # fmt: skip
# Tolerances for the distance of the weights after the first updates, relative to the distance they moved. Adam's first
# updates are little more than the signs of the gradients, so different rounding flips the sign of gradients that should
# be 0, such as those of the key bias; this alone causes a distance of up to 0.1 in small models. Measured with the
# tasks in size tiny: other kernels 1e-4, bf16 0.02 to 0.08, fp16 up to 0.04, 8 bits 0.1; a seventh of the learning rate
# 0.85, SGD instead of Adam 0.99, no movement 1, opposite direction 2.
WEIGHT_TOLERANCE = 0.3
WEIGHT_TOLERANCES: Mapping[str, float] = {"precision": 0.6, "optimizer": 0.6, "device": 0.6}
WEIGHT_TOLERANCE_RANDOM = 1.6  # if the setting may change random draws: other dropout masks lead to up to 1.4
