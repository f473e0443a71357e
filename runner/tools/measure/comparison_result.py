"""What a comparison measured of each variant, and what follows from it: ratios, numerics, disturbances."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from runner.tools.measure.statistics import USUAL, ProcessSpread, Ratio, as_many_as, between, paired

Mode = Literal["interleaved", "restarted"]


@dataclass(frozen=True)
class Variant:
    """A setting to be measured: overrides of the configuration, and of the environment of its process.

    against  the name of the cell that it is compared with; empty: the first one
    """

    name: str
    overrides: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    against: str = ""


@dataclass
class VariantResult:
    """What was measured of a cell.

    blocks_ms       milliseconds per update, by round; only rounds in which it took part are there. What it stood in
                    line for a core behind processes of others is not in it
    behind_s        seconds of that, by round
    made_by         number of the process that made the block, by round
    parts_s         seconds of these blocks by part, as the stopwatch of the cell tells them
    updates_ms      milliseconds of each of the last updates of a block, by round
    block_j         joules per update, by round, where the device counts them
    slowed          what held the device's clocks down -> in how many blocks
    start_s         seconds from nothing to a built run; first_update_s and warm_up_s come after them
    evaluation_s    that its first evaluation takes longer than later ones, where that was looked at
    taken_s         that its start took the last time, until it could make its first block or was ended; again_s where
                    it was begun anew between its blocks
    updates         of a block: about the same time for every cell, so that short ones are timed as well as long ones
    unpaid          updates before each block whose data may have become ready while the cell was stopped: not timed
    opened          what the run is made of, as the process told it; the plan's values are what was really used
    report          memory, losses and kernels, as the process told them at the end
    why_not         why nothing, or nothing more, was measured; empty where all is well
    """

    cell: Variant
    blocks_ms: dict[int, float] = field(default_factory=dict)
    behind_s: dict[int, float] = field(default_factory=dict)
    made_by: dict[int, int] = field(default_factory=dict)
    parts_s: dict[str, float] = field(default_factory=dict)
    updates_ms: dict[int, list[float]] = field(default_factory=dict)
    block_j: dict[int, float] = field(default_factory=dict)
    slowed: Counter[str] = field(default_factory=Counter)
    start_s: float = 0.0
    taken_s: float = 0.0
    again_s: float = 0.0
    first_update_s: float = 0.0
    warm_up_s: float = 0.0
    evaluation_s: float = 0.0
    warm_up_updates: int = 0
    updates: int = 0
    unpaid: int = 0
    opened: dict[str, Any] = field(default_factory=dict)
    report: dict[str, Any] = field(default_factory=dict)
    why_not: str = ""
    is_out: bool = False  # it was left out of further rounds: what is known is enough
    is_over: bool = False  # it could not begin anew: what it has made stands
    is_short: bool = False  # the time was over before its third block

    @property
    def median_ms(self) -> float:
        """Return the milliseconds of an update; NaN where none was measured."""
        return statistics.median(self.blocks_ms.values()) if self.blocks_ms else float("nan")

    @property
    def start_up_s(self) -> float:
        """Return the seconds from nothing to the end of its warm-up."""
        return self.start_s + self.first_update_s + self.warm_up_s

    @property
    def turn_s(self) -> float:
        """Return about how many seconds a block takes, with the updates before it that are not timed."""
        if not self.blocks_ms:
            return (self.updates + self.unpaid) * self.warm_up_s / max(1, self.warm_up_updates)
        return self.lasted_s / len(self.blocks_ms) * (1 + self.unpaid / self.updates)

    @property
    def lasted_s(self) -> float:
        """Return the seconds that its blocks took, in line for cores and all."""
        return sum(self.blocks_ms.values()) * self.updates / 1e3 + sum(self.behind_s.values())

    @property
    def opening_s(self) -> float:
        """Return the seconds before updates take what they take from then on; NaN where that is not known."""
        return self.start_up_s + self.evaluation_s - self.warm_up_updates * self.median_ms / 1e3

    @property
    def is_untried(self) -> bool:
        """True where the time, and nothing else, kept it from being compared."""
        return self.is_short or self.why_not == UNTRIED or self.why_not.startswith(NO_TIME)

    @property
    def plays(self) -> bool:
        """True where it takes part in the next round."""
        return not (self.why_not or self.is_out or self.is_over)

    def made_s(self, process: int) -> float:
        """Return the seconds of the blocks that this process has made."""
        own = [number for number, maker in self.made_by.items() if maker == process]
        return sum(self.blocks_ms[at] * self.updates / 1e3 + self.behind_s[at] for at in own)

    def sees(self, what: str) -> bool:
        """Tell whether each block holds it as often as the training does: rows ("log"), "checkpoint", "evaluation"."""
        period = self.opened["periods"].get(what)
        return period is not None and self.updates % period == 0


@dataclass(frozen=True)
class Numerics:
    """How far a cell's numbers are from the baseline's, relatively.

    loss, grad_norm  of the first update: same weights, same samples
    later            the mean loss of the first updates
    moved            where the first updates have brought the weights: 1 is as far apart as the baseline's weights have
                     come, and 2 the opposite way; None where it is not known
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
        """True where it is more than another rounding: the cell computes something else."""
        is_elsewhere = self.moved is not None and self.moved > self.moved_tolerance
        is_off = max(self.loss, self.later) > self.tolerance or self.grad_norm > GRADIENT_FACTOR * self.tolerance
        return is_elsewhere or is_off

    def __str__(self) -> str:
        text = f"loss of the first update {self.loss:.1%} off, gradient norm {self.grad_norm:.1%} off"
        return text if self.moved is None else f"{text}, weights moved {self.moved:.1%} off"


@dataclass
class ComparisonResult:
    """All cells, the baseline first, with what was found.

    mode       interleaved, or restarted for each block
    notes      what a reader must know to trust the figures
    needs_s    about the seconds of budget in which every cell would be compared; 0 where every one was
    needs_more True where it may be more: how long one of them takes to start is not known
    others     cores that other processes kept busy before each round, when every cell stood still
    num_cores  that there are for this process
    known      of the spread between processes, before these
    """

    cells: list[VariantResult]
    mode: Mode
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)
    needs_s: float = 0.0
    needs_more: bool = False
    others: list[float] = field(default_factory=list)
    num_cores: float = 1.0
    known: ProcessSpread = USUAL

    @property
    def baseline(self) -> VariantResult:
        """The cell that the others are compared with."""
        return self.cells[0]

    def of(self, name: str) -> VariantResult:
        """Return the cell of that name."""
        return next(cell for cell in self.cells if cell.cell.name == name)

    def against(self, cell: VariantResult) -> VariantResult:
        """Return what a cell is compared with: the baseline, if it names no other."""
        return self.of(cell.cell.against) if cell.cell.against else self.baseline

    def ratio(
        self, cell: VariantResult, against: VariantResult | None = None, *, with_processes: bool = True
    ) -> Ratio | None:
        """Return how many times as fast a cell is as what it is compared with; None: they had no round in common.

        with_processes  the interval holds what processes that do the same differ by, too
        """
        against = against or self.against(cell)
        rounds = sorted(cell.blocks_ms.keys() & against.blocks_ms.keys())
        if not rounds:
            return None
        theirs, ours = ([each.blocks_ms[number] for number in rounds] for each in (against, cell))
        return paired(theirs, ours, half=self._half(cell, against, rounds) if with_processes else 0.0)

    def _half(self, cell: VariantResult, against: VariantResult, rounds: Sequence[int]) -> float:
        """Return how far processes of two cells may lie apart that do the same; 0 where each block has its own."""
        if self.mode == "restarted" or not (cell.made_by and against.made_by):
            return 0.0
        return self.spread.half(*(as_many_as([each.made_by[number] for number in rounds]) for each in (cell, against)))

    @property
    def spread(self) -> ProcessSpread:
        """How far processes that do the same lie apart, by all that is known."""
        return self.known + self.own_spread

    @property
    def own_spread(self) -> ProcessSpread:
        """What these cells alone tell of it."""
        return between([(cell.blocks_ms, cell.made_by) for cell in self.cells])

    def more_to_open_s(self, cell: VariantResult) -> float | None:
        """Return how many seconds later than the baseline's its updates are under way; None where it is not known."""
        seconds = cell.opening_s - self.baseline.opening_s
        return seconds if math.isfinite(seconds) else None

    def numerics(self, cell: VariantResult) -> Numerics | None:
        """Return how far its first updates are from those it is compared with; None where they are not known."""
        against = self.against(cell)
        ours, theirs = against.report, cell.report
        if not (ours.get("losses") and theirs.get("losses")):
            return None
        num = min(len(ours["losses"]), len(theirs["losses"]))
        norms = [report["grad_norms"][0] if report.get("grad_norms") else 0.0 for report in (ours, theirs)]
        used, before = cell.opened["values"], against.opened["values"]
        changed = [key for key in TOLERANCES if used.get(key) != before.get(key)]
        moved = relative_distance(ours.get("moved"), theirs.get("moved"))
        draws = bool(ours.get("draws") or theirs.get("draws"))
        return Numerics(
            _off(ours["losses"][0], theirs["losses"][0]),
            _off(*norms),
            _off(statistics.fmean(ours["losses"][:num]), statistics.fmean(theirs["losses"][:num])),
            max([ROUNDING, *(TOLERANCES[key] for key in changed)]),
            moved,
            max([MOVED, *(MOVED_TOLERANCES.get(key, MOVED_DRAWN if draws else MOVED) for key in changed)]),
        )


def fuller_report(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Return what two processes of a cell have told: of the one that made more first updates, and the higher peaks."""
    fuller = before if len(before.get("losses", ())) > len(now.get("losses", ())) else now
    peaks = {key: max(before[key], now[key]) for key in before.keys() & now.keys() if key.startswith("peak_")}
    return {**fuller, **peaks}


def _off(ours: float, theirs: float) -> float:
    """Return the relative difference; infinite where one of them is no number."""
    difference = abs(theirs - ours) / max(abs(ours), 1e-12)
    return float("inf") if math.isnan(difference) else difference


def relative_distance(ours: Sequence[float] | None, theirs: Sequence[float] | None) -> float | None:
    """Return how far apart two vectors are, in units of the length of the first; None where one is not known."""
    if ours is None or theirs is None:
        return None
    length, found = math.hypot(*ours), math.dist(ours, theirs)
    return found / length if length and math.isfinite(found) else math.inf


def _spread(values: Sequence[float]) -> float:
    """Return the distance of the quartiles in relation to the median; 0 where there are too few values."""
    if len(values) < 4:
        return 0.0
    low, middle, high = statistics.quantiles(values, n=4)
    return (high - low) / middle


def disturbances(trials: ComparisonResult) -> Iterator[str]:
    """Yield what disturbed the measurement: a spread of the baseline, other processes, clocks that were held down."""
    spread = _spread(list(trials.baseline.blocks_ms.values()))
    if spread > RESTLESS:
        what = f"half of the baseline's blocks lie {spread:.0%} apart"
        yield f"the machine is restless: {what}; other processes run, or it throttles"
    busy = statistics.fmean(trials.others) if trials.others else 0.0
    if busy > BUSY_CORES:
        yield f"the machine is busy: other processes keep {busy:.1f} of {trials.num_cores:g} cores at work"
    seconds = sum(cell.lasted_s for cell in trials.cells)
    behind_s = sum(sum(cell.behind_s.values()) for cell in trials.cells)
    if behind_s > CONTENDED * seconds:
        yield f"{behind_s / seconds:.0%} of the time blocks stood in line behind other processes: it is not counted"
    if trials.mode == "interleaved" and trials.own_spread.freedom and trials.spread.sigma > APART:
        yield f"processes that do the same differ by {trials.spread.sigma:.1%} here: the intervals hold that too"
    blocks = sum(len(cell.blocks_ms) for cell in trials.cells)
    for reason, times in sum((cell.slowed for cell in trials.cells), Counter[str]()).most_common():
        yield f"the device throttles: {reason}, in {times} of {blocks} blocks"


def as_json(trials: ComparisonResult) -> dict[str, Any]:
    """Return all that was measured, JSON-able."""
    rows = []
    for cell in trials.cells:
        ratio, numerics = trials.ratio(cell), trials.numerics(cell)
        rows.append(
            {
                **{key: value for key, value in dataclasses.asdict(cell).items() if key != "updates_ms"},
                "report": {key: value for key, value in cell.report.items() if key != "moved"},
                "median_ms": None if not cell.blocks_ms else cell.median_ms,
                "ratio": None if ratio is None else dataclasses.asdict(ratio) | {"verdict": ratio.verdict},
                "numerics": None if numerics is None else dataclasses.asdict(numerics) | {"differ": numerics.differ},
            }
        )
    return {
        "mode": trials.mode, "seconds": trials.seconds, "notes": trials.notes,
        "between_processes": _spread_as_json(trials) if trials.mode == "interleaved" else None,
        "cells": rows,
    }  # fmt: skip


def _spread_as_json(trials: ComparisonResult) -> dict[str, float]:
    return dataclasses.asdict(trials.spread) | {"sigma": trials.spread.sigma}


UNTRIED = "not tried: no time was left for its start"


NO_TIME = "not tried: it had no time to start"


RESTLESS = 0.15


BUSY_CORES = 0.25


CONTENDED = 0.02  # of the time of all blocks


APART = 0.02  # standard deviation of processes that do the same, from which on it is said


ROUNDING = 1e-3  # relative difference of losses that order of summation makes at most


GRADIENT_FACTOR = 5  # a norm is more sensitive than a mean


# What may change losses by more than rounding, and by how much: other formats, other random draws in dropout.
TOLERANCES: Mapping[str, float] = {
    "precision": 0.03, "micro_batch_size": 0.05, "attention": 0.02, "compile": 0.02, "memory": 0.01, "device": 0.05,
    "backend.threads": 0.01, "optimizer": 0.02,
}  # fmt: skip


# How far apart the weights may be after the first updates, in units of how far they have come. Adam's first updates are
# little more than the signs of the gradients, so another rounding turns those of gradients that should be 0, as of the
# bias of keys: up to 0.1 in small models. The tasks in their tiny sizes: kernels 1e-4, bf16 0.02 to 0.08, fp16 up to
# 0.04, 8 bits 0.1; a seventh of the learning rate 0.85, SGD in the place of Adam 0.99, no movement 1, the opposite 2.
MOVED = 0.3


MOVED_TOLERANCES: Mapping[str, float] = {"precision": 0.6, "optimizer": 0.6, "device": 0.6}


MOVED_DRAWN = 1.6  # where random numbers are drawn that the setting may change: other dropout is up to 1.4 away
