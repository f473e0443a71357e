"""Trials: settings that take turns in blocks of updates, each in a process of its own, and how they compare.

Order, caches and neighbours decide what techniques seem to gain when one is measured after the other. Here all cells
are alive at once and only one of them runs: in every round each makes one block, in an order drawn anew, and is stopped
(SIGSTOP, with its data workers) until its next turn. Where the memory does not hold them together, a cell is started
again for each of its blocks.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import random
import select
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

from runner.base.configuration import Request, merge_overrides
from runner.base.errors import AccelRunError, Exit, HostMemoryError, Problem, remake
from runner.base.host import ROOT, free_memory_bytes
from runner.base.scratch import private_folder
from runner.base.secret import without_secrets
from runner.measure.statistics import USUAL, ProcessSpread, Ratio, as_many_as, between, paired
from runner.observe.machine_sample import CpuLoad, GrantedCpuLoad, cpu_load

Mode = Literal["interleaved", "restarted"]

# What a cell does not do: speak, watch, or write where runs of the user's lie.
QUIET = (
    "run=trial", "resume=fresh", "tracker=none", "monitor=off", "profiler=off", "benchmark=none", "watchdog=off",
    "launcher=local", "on_oom=stop",
)  # fmt: skip


@dataclass(frozen=True)
class Variant:
    """A setting to be measured: overrides of the configuration, and of the environment of its process.

    against  the name of the cell that it is compared with; empty: the first one
    """

    name: str
    overrides: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    against: str = ""


@dataclass(frozen=True)
class CompareLimits:
    """How long it is measured, and how finely.

    budget_s      seconds for all, start-ups included; what is under way when they are over is ended
    rounds        fewest and most blocks of each cell
    block_s       seconds of a block of the baseline, about
    least         fewest updates of a block, where they do not take too long
    start_s       that a cell may take to its first update
    together      False: one after the other in each round, never two of them alive
    evaluates     evaluations on the way are made, and belong to what is measured
    first_evaluation  what the first evaluation of a compiled model takes longer than later ones, for it is compiled
                  anew without gradients, belongs to its beginning
    phase         whose updates are measured; None: the first that trains
    """

    budget_s: float = 120.0
    rounds: tuple[int, int] = (6, 60)
    block_s: float = 0.4
    least: int = 1
    start_s: float = 300.0
    together: bool = True
    evaluates: bool = False
    first_evaluation: bool = False
    phase: str | None = None
    seed: int = 0


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


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, with what was measured until then."""

    def __init__(self, trials: ComparisonResult) -> None:
        super().__init__()
        self.trials = trials


def measure(
    request: Request, cells: Sequence[Variant], limits: CompareLimits, say: Callable[[str], None] = print
) -> ComparisonResult:
    """Return the cells measured in turns against the first; each stands on the request's settings, its own over them.

    What ends a cell is its `why_not`. Raises AccelRunError where the first one cannot be measured.
    """
    with Comparison(request) as arena:
        return arena.measure(cells, limits, say)


Asked = Callable[[Mapping[str, Any]], dict[str, Any]]


class Comparison:
    """Where cells of one request are measured; leaving the `with` block ends every process.

    cores  that cells and their data workers run on; 0: all there are
    clock  by which the budget is kept; None: the machine's
    fork   what makes a process of a cell, of its number and the time until which it is waited for
    """

    def __init__(
        self,
        request: Request,
        cores: int = 0,
        clock: Callable[[], float] | None = None,
        fork: Callable[[Variant, int, float], VariantProcess] | None = None,
    ) -> None:
        self.request, self.cores, self.clock = request, cores, clock or time.monotonic
        self.fork = fork or self._fork
        self.load = cpu_load(os.getpid(), ROOT)
        self.number = 0  # of processes started
        self.known = USUAL  # of how far processes that do the same lie apart
        self.error = AccelRunError("nothing was started")  # the last one
        self.processes: dict[str, VariantProcess] = {}
        self.compiled: dict[tuple[str, ...], Path] = {}  # cell -> folder of its compiled code, which its restarts find
        self._nurseries: dict[tuple[tuple[str, str], ...], _ForkServer] = {}

    def __enter__(self) -> Comparison:
        self._stack = ExitStack()
        self.folder = self._stack.enter_context(private_folder())
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def measure(
        self, cells: Sequence[Variant], limits: CompareLimits, say: Callable[[str], None] = print
    ) -> ComparisonResult:
        """Return the cells measured in turns against the first, as the function `measure` does.

        Raises Interrupted at Ctrl-C once blocks have begun.
        """
        began = self.clock()
        self.limits, self.deadline = limits, began + limits.budget_s
        self.block_s = max(LONGER * limits.block_s, limits.budget_s / 2 / (len(cells) * limits.rounds[0]))
        trials = self._opened(cells)
        try:
            self._admit(trials, began, say)
            while self._play(trials):
                if all(cell.why_not != UNTRIED for cell in trials.cells):
                    break
                if not self._admit(trials, self.clock(), say):
                    self._play(trials, to_the_end=True)
                    break
            self._hear(trials)
        except KeyboardInterrupt:
            with suppress(KeyboardInterrupt):  # the second one is meant
                self._hear(trials)
            raise Interrupted(trials) from None
        finally:
            for process in self.processes.values():
                process.end()
            self.processes.clear()
            if trials.mode == "interleaved":
                self.known += trials.own_spread
        trials.seconds = self.clock() - began
        self._say_what_it_needs(trials)
        trials.notes += disturbances(trials)
        return trials

    @contextmanager
    def alone(self, cell: Variant, limits: CompareLimits) -> Iterator[tuple[Asked, VariantResult]]:
        """Give one cell that has made its first updates, for looking at: how to ask it, and what is known so far.

        Raises AccelRunError where it cannot be opened.
        """
        self.limits, self.deadline, self.block_s = limits, math.inf, LONGER * limits.block_s
        measured = VariantResult(cell)
        process = self.start(measured, math.inf)
        if process is None:
            raise self.error
        try:
            yield process.ask, measured
        finally:
            process.end()

    def prepare(self, cell: Variant) -> None:
        """What a cell imports is imported: that takes seconds, once, and no cell begins with it."""
        if self.fork == self._fork:
            self._nursery(cell.environment)

    def _fork(self, cell: Variant, number: int, until: float) -> VariantProcess:
        return VariantProcess(self._nursery(cell.environment), number, self.clock, until)

    def _nursery(self, environment: Mapping[str, str]) -> _ForkServer:
        key = tuple(sorted(environment.items()))
        if key not in self._nurseries:
            self._nurseries[key] = self._stack.enter_context(_ForkServer(self.folder, environment, self.cores))
        return self._nurseries[key]

    def compiled_folder(self, cell: Variant) -> Path:
        """Return the folder of the cell's compiled code, the same one whenever it is started again."""
        return self.compiled.setdefault((cell.name, *cell.overrides), self.folder / f"compiled-{self.number}")

    def start(self, measured: VariantResult, until: float) -> VariantProcess | None:
        """Start the process of a cell and let it make its first updates; None where it cannot, with why_not said.

        until  by the clock; a start that is under way then is ended
        """
        self.number += 1
        cell = measured.cell
        own = (*QUIET, f"output_root={self.folder / f'cell-{self.number}'}")
        self.prepare(cell)
        since = self.clock()
        process = self._stack.enter_context(self.fork(cell, self.number, until))
        try:
            process.answer(self.limits.start_s)
            measured.opened = process.ask(
                {
                    "do": "begin",
                    "overrides": list(merge_overrides(merge_overrides(self.request.overrides, cell.overrides), own)),
                    "task_file": _text(self.request.task_file),
                    "config_dir": _text(self.request.config_dir),
                    "compiled": str(self.compiled_folder(cell)),
                    "phase": self.limits.phase,
                    "evaluates": self.limits.evaluates,
                },
                self.limits.start_s,
            )
            start_s, first_update_s = self.clock() - since, process.make(1, self.limits.start_s)
            began, num, made = self.clock(), 1, 0
            while self.clock() - began < self.limits.block_s:
                process.make(num, self.limits.start_s)
                num, made = min(2 * num, WARM_UPDATES), made + num
            is_first = not measured.start_s
            if is_first:  # what is opened again finds what it has compiled
                measured.start_s, measured.first_update_s = start_s, first_update_s
                measured.warm_up_s, measured.warm_up_updates = self.clock() - began, made
            comes_up = self.limits.first_evaluation and (is_first or self.limits.evaluates)
            if comes_up and measured.opened["values"]["compile"] != "off":
                more_s = process.ask({"do": "evaluate"}, self.limits.start_s)["more_s"]
                measured.evaluation_s = measured.evaluation_s or more_s
            ahead = measured.opened["ahead"]
            measured.unpaid = ahead + 1 if ahead else 0
            measured.updates = measured.updates or updates_of_a_block(process, measured, self.limits, self.block_s)
        except OutOfTime as error:
            self._clear_away(process)
            self.error = error
            if len(measured.blocks_ms) < LEAST_ROUNDS:
                measured.why_not = f"{NO_TIME}: not ready after {self.clock() - since:.0f} s"
            return None
        except AccelRunError as error:
            self.error, measured.why_not = error, _reason(error)
            self._clear_away(process)
            return None
        except KeyboardInterrupt:
            process.end()
            raise
        finally:
            measured.taken_s = self.clock() - since
        process.until = self.deadline
        return process

    def _opened(self, cells: Sequence[Variant]) -> ComparisonResult:
        """Start the baseline, which is stopped then; the others wait to be admitted."""
        baseline = VariantResult(cells[0])
        self.prepare(cells[0])
        first = self.start(baseline, math.inf)  # without it there is nothing to compare with
        if first is None:
            raise self.error
        together = self.limits.together and _fit_together(first, baseline, len(cells))
        waiting = [VariantResult(cell, why_not=UNTRIED) for cell in cells[1:]]
        mode: Mode = "interleaved" if together else "restarted"
        trials = ComparisonResult([baseline, *waiting], mode, num_cores=self.load.num_cores, known=self.known)
        if together:
            self.processes[baseline.cell.name] = first
            first.pause()
        else:
            first.end()
            if self.limits.together:
                trials.notes.append("the memory does not hold all cells at once: each is started again for each block")
        return trials

    def _admit(self, trials: ComparisonResult, since: float, say: Callable[[str], None]) -> bool:
        """Start those that wait, as far as there is time; tell whether there were any. What compiles begins last.

        Time for rounds is put by, half of all since then where there are more than two cells: a start that would go
        into it is not made, and one that comes to it is ended.
        """
        half_s = (self.deadline - since) / 2 if len(trials.cells) > 2 else 0.0
        playing = [cell for cell in trials.cells if cell.plays]
        num = len(playing)
        for measured in sorted((cell for cell in trials.cells if cell.why_not == UNTRIED), key=_compiles):
            turns = [self._turn_s(trials, cell) for cell in playing]
            rounds_s = SLACK * LEAST_ROUNDS * (sum(turns) + max(turns))
            until = self.deadline - max(half_s, rounds_s)
            is_interleaved = trials.mode == "interleaved"
            if until - self.clock() < (_start_s(trials, measured) if is_interleaved else 0.0):
                continue
            measured.why_not = ""
            if is_interleaved:
                say(f"starts {measured.cell.name}")
                process = self.start(measured, until)
                if process is None:
                    continue
                self.processes[measured.cell.name] = process
                process.pause()
            playing.append(measured)
        return len(playing) > num

    def _turn_s(self, trials: ComparisonResult, cell: VariantResult) -> float:
        """Return about how many seconds a turn of a cell takes, its start included where it begins with one."""
        turn_s = cell.turn_s or max(each.turn_s for each in trials.cells)
        return turn_s if trials.mode == "interleaved" else turn_s + (cell.taken_s or _start_s(trials, cell))

    def _play(self, trials: ComparisonResult, *, to_the_end: bool = False) -> bool:
        """Make rounds until every interval is narrow enough, and tell whether time is left.

        No block is begun that would end after the deadline. While some cells wait, those that play make way for them
        as soon as their blocks agree; what processes differ by is found out after that.

        to_the_end  nobody who waits can be started
        """
        least, most = self.limits.rounds
        first = len(trials.others)
        last = most if to_the_end else first + most
        order = random.Random(self.limits.seed + first)
        begins_anew = to_the_end or all(cell.why_not != UNTRIED for cell in trials.cells)
        renewed = first
        whole_s = SLACK * LEAST_ROUNDS * sum(self._turn_s(trials, cell) for cell in trials.cells if not cell.why_not)
        if begins_anew and first and self.clock() + whole_s <= self.deadline:  # those that made way, too
            for cell in trials.cells:
                cell.is_out = False
            leave_out(trials, most)
        if all(not cell.plays for cell in trials.cells[1:]) and first:
            return True
        for number in range(first, last):
            if begins_anew and min(last - number, number - renewed) >= LEAST_ROUNDS and self._is_time(trials):
                renewed = number
                if not self._renew(trials):
                    return False
            trials.others.append(_kept_busy(self.load))  # all cells are stopped
            playing = [cell for cell in trials.cells if cell.plays]
            if len(playing) < 2 and number - first >= least:
                return True
            order.shuffle(playing)
            for measured in playing:
                if self.clock() + self._turn_s(trials, measured) > self.deadline:
                    if any(len(each.blocks_ms) < LEAST_ROUNDS for each in playing):
                        whose = "those that began last" if first else "each setting"
                        made = f"{number - first} of {LEAST_ROUNDS} blocks"
                        trials.notes.append(f"the time was over after {made} of {whose}")
                        for each in playing:
                            each.is_short = len(each.blocks_ms) < LEAST_ROUNDS
                    return False
                self.turn(trials, measured, number)
            if trials.baseline.why_not:
                raise self.error
            if number - first + 1 >= least:
                leave_out(trials, most, with_processes=begins_anew)
                if all(not cell.plays for cell in trials.cells[1:]):
                    return True
        return True

    def _is_time(self, trials: ComparisonResult) -> bool:
        """Tell whether half of those that play have made blocks for as long as a start takes, and there is time."""
        playing = [cell for cell in trials.cells if cell.plays]
        due = self._due(trials, 1.0)
        if len(playing) < 2 or 2 * len(due) < len(playing):
            return False
        rounds_s = LEAST_ROUNDS * sum(self._turn_s(trials, cell) for cell in playing)
        starts_s = sum(cell.again_s or cell.taken_s for cell in self._due(trials, NEARLY))
        return self.clock() + SLACK * (starts_s + rounds_s) <= self.deadline

    def _due(self, trials: ComparisonResult, share: float) -> list[VariantResult]:
        """Return the cells whose process has made enough blocks, and for this share of what another takes to start."""
        due = []
        for cell in trials.cells:
            process = self.processes.get(cell.cell.name)
            if process is None or not cell.plays:
                continue
            num = sum(maker == process.number for maker in cell.made_by.values())
            start_s = cell.again_s or cell.taken_s
            if num >= self.limits.rounds[0] and cell.made_s(process.number) >= share * start_s:
                due.append(cell)
        return due

    def _renew(self, trials: ComparisonResult) -> bool:
        """Begin cells anew, and tell whether the baseline lives; those that are nearly due with those that are.

        What is the same in all blocks of a process, and another one that does the same does otherwise, no number of its
        blocks would show. One that cannot begin anew has no more blocks, and what was measured of it stands.
        """
        for measured in self._due(trials, NEARLY):
            usual_s = measured.again_s or measured.taken_s
            until = min(self.deadline, self.clock() + PATIENCE * usual_s)
            if self.clock() >= self.deadline:
                return False
            process = self.processes[measured.cell.name]
            self._ask_for_report(measured, process)
            del self.processes[measured.cell.name]
            self._clear_away(process)
            taken_s = measured.taken_s
            try:
                new = self.start(measured, until)
            finally:
                measured.again_s, measured.taken_s = measured.taken_s, taken_s
            if new is not None:
                self.processes[measured.cell.name] = new
                new.pause()
                continue
            reason = measured.why_not or f"not ready after {measured.again_s:.0f} s"
            measured.why_not, measured.is_over = "", True
            trials.notes.append(f"{measured.cell.name} could not begin anew: {reason}")
            if measured is trials.baseline:
                return False
        return True

    def _say_what_it_needs(self, trials: ComparisonResult) -> None:
        """Say in which time all that were not compared would be, by what those that were took."""
        if not any(cell.is_untried for cell in trials.cells):
            return
        cells = [trials.baseline, *sorted(trials.cells[1:], key=_compiles)]
        starts = [
            # Nobody knows what a start takes that was ended: twice as long is a guess, and reaches it soon.
            cell.taken_s * (2 if cell.why_not.startswith(NO_TIME) else 1) or _start_s(trials, cell)
            for cell in cells
        ]
        turns = [self._turn_s(trials, cell) for cell in cells]
        trials.needs_s = needed_s(starts if trials.mode == "interleaved" else starts[:1], turns)
        seen = {_compiles(cell) for cell in cells if cell.taken_s and not cell.is_untried}
        trials.needs_more = any(
            cell.why_not.startswith(NO_TIME) or (cell.why_not == UNTRIED and _compiles(cell) not in seen)
            for cell in cells
        )

    def turn(self, trials: ComparisonResult, measured: VariantResult, number: int) -> None:
        """Let one cell make its block."""
        process = self.processes.get(measured.cell.name) or self.start(measured, self.deadline)
        if process is None:
            if isinstance(self.error, OutOfTime) and measured is trials.baseline:
                measured.why_not = ""  # the time is over, and what was measured before stands
            return
        # A block may take twice as long as it was begun for; the baseline's are waited for: all is said against them.
        process.until = math.inf if measured is trials.baseline else self.deadline + measured.turn_s
        try:
            process.go_on()
            made = process.block(measured.updates, self.limits.start_s, measured.unpaid)
            measured.made_by[number] = process.number
            measured.behind_s[number] = made["behind_s"]
            measured.blocks_ms[number] = 1e3 * (made["seconds"] - made["behind_s"]) / measured.updates
            for part, seconds in made["parts_s"].items():
                measured.parts_s[part] = measured.parts_s.get(part, 0.0) + seconds
            measured.updates_ms[number] = made["updates_ms"]
            measured.slowed.update(made["slowed"])
            if made["joules"] is not None:
                measured.block_j[number] = made["joules"] / measured.updates
            if trials.mode == "restarted":
                measured.report = process.ask({"do": "report"}, ANSWER_S)
        except OutOfTime as error:
            self.error, measured.why_not = error, "its last block took more than twice as long as those before"
        except AccelRunError as error:
            self.error, measured.why_not = error, _reason(error)
        if trials.mode == "restarted" or measured.why_not:
            self.processes.pop(measured.cell.name, None)
            self._clear_away(process)
        else:
            process.pause()

    def _clear_away(self, process: VariantProcess) -> None:
        """End a process that others follow; what it has saved may be as large as the model."""
        process.end()
        shutil.rmtree(self.folder / f"cell-{process.number}", ignore_errors=True)

    def _hear(self, trials: ComparisonResult) -> None:
        """Hear what the cells have to tell."""
        for measured in trials.cells:
            process = self.processes.get(measured.cell.name)
            if process is None:
                continue
            self._ask_for_report(measured, process)

    @staticmethod
    def _ask_for_report(measured: VariantResult, process: VariantProcess) -> None:
        with suppress(AccelRunError):
            process.until = math.inf
            process.go_on()
            report = process.ask({"do": "report"}, ANSWER_S)
            # The answer of a block that was interrupted comes first.
            report = report if "losses" in report else process.answer(ANSWER_S)
            measured.report = fuller_report(measured.report, report)


class OutOfTime(AccelRunError):
    """The time of a trial is over before a cell has answered."""

    exit_code = Exit.CONFIG


def _out_of_time() -> OutOfTime:
    return OutOfTime("must be longer: the time was over before a cell had answered", where="budget_s", fix=_MORE_TIME)


class NoAnswer(AccelRunError):
    """Nothing was heard."""


class JsonSocket:
    """A socket to a process of ours: lines of JSON there and back."""

    def __init__(self, line: socket.socket) -> None:
        self.line = line
        self._heard = b""

    def hear(self, timeout_s: float) -> dict[str, Any] | None:
        """Return the next answer, None where the other end is gone. Raises Silence where none comes in time."""
        until = time.monotonic() + timeout_s
        while b"\n" not in self._heard:
            ready, _, _ = select.select([self.line], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                raise NoAnswer(f"no answer within {timeout_s:.0f} s")
            content = self.line.recv(1 << 16)
            if not content:
                return None
            self._heard += content
        text, _, self._heard = self._heard.partition(b"\n")
        answer: dict[str, Any] = json.loads(text)
        return answer


class _ForkServer:
    """A process that has imported what cells need and computed nothing; cells are forks of it.

    So each begins as a fresh process does, without the seconds of importing torch.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str], cores: int) -> None:
        self.folder = folder
        line, theirs = socket.socketpair()
        self._line = JsonSocket(line)
        self._said = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - closed in __exit__
        with theirs:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "runner.measure.variant_process",
                    *map(str, (theirs.fileno(), os.getpid(), cores)),
                ],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._said,
                start_new_session=True,
                env={**STEADY, **without_secrets(os.environ), **environment},
            )
        self._answer()

    def __enter__(self) -> _ForkServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._line.line.close()
        self._said.close()

    def fork(self, line: socket.socket, said: IO[bytes]) -> int:
        """Return the number of a new process, whose socket is `line` and whose standard error is `said`."""
        order = json.dumps({"do": "fork"}).encode()
        socket.send_fds(self._line.line, [order], [line.fileno(), said.fileno()])
        return int(self._answer("pid")["pid"])

    def wait(self, pid: int) -> int:
        """Return how a process of this nursery ended; negative for a signal."""
        self._line.line.sendall(json.dumps({"do": "wait", "pid": pid}).encode())
        return int(self._answer("code")["code"])

    def _answer(self, what: str = "") -> dict[str, Any]:
        """Return the next answer that tells this; what was asked before Ctrl-C, and never heard, is passed over."""
        while True:
            answer = self._line.hear(START_S)
            if answer is None:
                said = _last_line(self._said) or "nobody knows why"
                raise AccelRunError(f"the process that makes cells ended: {said}")
            if not what or what in answer:
                return answer


class VariantProcess(JsonSocket):
    """A cell and its data workers: a session of its own, stopped and continued as a whole."""

    def __init__(self, nursery: _ForkServer, number: int, clock: Callable[[], float], until: float) -> None:
        ours, theirs = socket.socketpair()
        super().__init__(ours)
        self._nursery, self.number, self._clock = nursery, number, clock
        self.until = until  # when nobody waits for its answers any more
        self._said = tempfile.TemporaryFile(dir=nursery.folder)  # noqa: SIM115 - closed in `end`
        with theirs:
            self.pid = nursery.fork(theirs, self._said)
        self._code: int | None = None

    def __enter__(self) -> VariantProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def make(self, updates: int, timeout_s: float) -> float:
        """Let it make so many updates; return the seconds they took."""
        made = self.block(updates, timeout_s)
        return float(made["seconds"] - made["behind_s"])

    def block(self, updates: int, timeout_s: float, unpaid: int = 0) -> dict[str, Any]:
        """Let it make so many updates; return what they took, without the `unpaid` ones before them."""
        return self.ask({"do": "make", "updates": updates, "unpaid": unpaid}, timeout_s)

    def ask(self, order: Mapping[str, Any], timeout_s: float = 600.0) -> dict[str, Any]:
        """Return the answer to an order. Raises AccelRunError with what ended the cell, or that it took too long."""
        with suppress(OSError):  # it has died: hear what it has to say of that
            self.line.sendall((json.dumps(order) + "\n").encode())
        return self.answer(timeout_s)

    def answer(self, timeout_s: float) -> dict[str, Any]:
        """Return the next answer; raises as `ask` does, and OutOfTime where the time is over first."""
        left_s = max(0.0, self.until - self._clock())
        try:
            answer = self.hear(min(timeout_s, left_s))
        except NoAnswer as error:
            raise _out_of_time() if left_s < timeout_s else error from None
        if answer is None:
            raise self._death()
        if "error" in answer:
            problems = tuple(Problem(**problem) for problem in answer["error"])
            raise remake(AccelRunError, problems, Exit(answer["exit_code"]))
        return answer

    def pause(self) -> None:
        """Nothing of it runs until `go_on`."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """It runs again."""
        self._signal(signal.SIGCONT)

    def end(self) -> None:
        """It is over, with all its children."""
        if self._said.closed:
            return
        self._signal(signal.SIGKILL)
        with suppress(AccelRunError, OSError):
            self._ended()
        self.line.close()
        self._said.close()

    def _ended(self) -> int:
        if self._code is None:
            self._code = self._nursery.wait(self.pid)
        return self._code

    def _signal(self, number: signal.Signals) -> None:
        if self._code is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    def _death(self) -> AccelRunError:
        code = self._ended()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
        kind = HostMemoryError if code == -signal.SIGKILL else AccelRunError
        killed = ": the machine's memory may be used up" if kind is HostMemoryError else ""
        last = _last_line(self._said)
        return kind(f"its process {how}{killed}{f' ({last})' if last else ''}")


def _last_line(said: IO[bytes]) -> str:
    """Return the last line that a process wrote to standard error; empty where it wrote none."""
    said.seek(0)
    return next(iter(said.read().decode(errors="replace").strip().splitlines()[-1:]), "")


def updates_of_a_block(
    process: VariantProcess, measured: VariantResult, limits: CompareLimits, longest_s: float
) -> int:
    """Return how many updates take about `block_s`, or more where the data is read ahead, or to hold what comes around.

    longest_s  seconds that a block may take to be a whole number of rows, saves and evaluations
    """
    seconds = process.make(1, limits.start_s)
    num = 1
    while seconds < limits.block_s / 2 and num < LONGEST_BLOCK:
        growth = min(MOST_GROWTH, limits.block_s / max(seconds, 1e-6) / 2)  # one reading may be far off
        num = min(LONGEST_BLOCK, max(2 * num, int(num * growth)))
        seconds = process.make(num, limits.start_s)
    update_s = seconds / num
    least = limits.least if limits.least * update_s <= longest_s else 1
    num = max(least, round(limits.block_s / update_s), AHEAD * measured.unpaid)
    periods: dict[str, int] = {name: period for name, period in measured.opened["periods"].items() if period}
    if not limits.evaluates:
        periods.pop("evaluation", None)
    whole: int = max(1, measured.opened["readers"])  # workers that began together bring their batches together
    num = -(-num // whole) * whole
    for period in sorted(periods.values()):
        both = math.lcm(whole, period)
        if both <= LONGER * num or both * update_s <= longest_s:
            whole, num = both, -(-num // both) * both
    return num


def _fit_together(process: VariantProcess, baseline: VariantResult, num: int) -> bool:
    """Tell whether so many processes like the baseline's have room on the host and on the GPU."""
    report = process.ask({"do": "report"}, ANSWER_S)
    each = ROOM * report["peak_host_gib"] * 2**30
    if each * (num - 1) > free_memory_bytes():
        return False
    free = baseline.opened.get("free_gib")
    return free is None or ROOM * (report["reserved_gib"] + CONTEXT_GIB) * (num - 1) <= free - report["reserved_gib"]


def _compiles(measured: VariantResult) -> bool:
    """Tell whether its start may take the time of ten others, for it compiles."""
    return any(word.startswith("compile=") and word != "compile=off" for word in measured.cell.overrides)


def _start_s(trials: ComparisonResult, measured: VariantResult) -> float:
    """Return about how many seconds a start takes, by those that were alike; else by all, but those that were ended."""
    seen = [cell for cell in trials.cells if cell.taken_s and not cell.why_not.startswith(NO_TIME)]
    alike = [cell.taken_s for cell in seen if _compiles(cell) == _compiles(measured)]
    return statistics.median(alike or [cell.taken_s for cell in seen])


def needed_s(starts: Sequence[float], turns: Sequence[float]) -> float:
    """Return the seconds of budget in which cells that take so long to start, and for a block, are compared.

    starts  of all, the baseline's first; of the baseline alone where each turn begins with a start
    """
    rounds_s = SLACK * LEAST_ROUNDS * (sum(turns) + max(turns))
    openings_s = sum(starts[:-1]) + max(starts)  # there must be time for the longest when the last one begins
    return SLACK * max(openings_s + rounds_s, 2 * openings_s if len(turns) > 2 else 0.0)


def enough(budget_s: float, trials: ComparisonResult) -> str:
    """Return the words for the budget in which all would be tried."""
    needed = 10 * math.ceil(budget_s / 10)
    return f"budget_s={needed} may be enough" if trials.needs_more else f"about budget_s={needed} tries all"


def _kept_busy(load: CpuLoad | GrantedCpuLoad) -> float:
    """Return how many of the cores for this process others keep busy, looked at for a moment in which cells stand."""
    load.percent()
    time.sleep(STILL_S)
    return load.num_cores * (load.percent() or 0.0) / 100


def leave_out(trials: ComparisonResult, most: int, *, with_processes: bool = True) -> None:
    """Mark the cells of which enough is known: their interval is narrow, they are clearly slower, or have most blocks.

    One that others name as what they are compared with goes with the last of them. Who is out stays out: what is learnt
    of processes afterwards would bring back some, for a block here and there.
    """
    for cell in trials.cells[1:]:
        if cell.is_out:
            continue
        ratio, rival = trials.ratio(cell, with_processes=with_processes), trials.against(cell)
        if rival.why_not or rival.is_over or len(cell.blocks_ms) >= most:
            cell.is_out = True
        elif ratio is not None and not cell.why_not:
            cell.is_out = ratio.is_narrow or ratio.high < CLEARLY_SLOWER
    for cell in trials.cells[1:]:
        others = [each for each in trials.cells if each.cell.against == cell.cell.name]
        if others:
            cell.is_out = not any(each.plays for each in others)


def _reason(error: AccelRunError) -> str:
    """Return the first problem in one line."""
    problem = error.problems[0]
    return " ".join(f"{problem.where + ': ' if problem.where else ''}{problem.what}".split())


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


def _text(path: Path | None) -> str | None:
    return str(path) if path else None


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


# glibc's malloc learns from what is freed from which size on it asks the system for memory each time: processes that do
# the same learn different things, and differ by a fifth for as long as they live. Source: mallopt(3), M_MMAP_THRESHOLD.
STEADY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}
_MORE_TIME = "give it more, as budget_s=600"
UNTRIED = "not tried: no time was left for its start"
NO_TIME = "not tried: it had no time to start"
LEAST_ROUNDS = 3  # fewer say nothing of their spread
SLACK = 1.2  # of what blocks will take, by what updates before them took
WARM_UPDATES = 64
LONGEST_BLOCK = 20_000
MOST_GROWTH = 32  # times as many updates as before are made next, to find out how many a block has
LONGER = 4  # times as long a block may become to be a whole number of evaluations, rows or saves, in any case
AHEAD = 4  # times as many updates as can be read ahead, of a block: what is left of the head start is a fifth at most
ANSWER_S = 60.0
START_S = 300.0  # in which torch is imported, on the slowest disk
ROOM = 1.2  # of what the baseline has taken: others may take more
CONTEXT_GIB = 0.6  # of a process on a GPU, besides what torch has reserved
CLEARLY_SLOWER = 0.95
RESTLESS = 0.15
STILL_S = 0.05  # before each round, in which nothing of ours runs
BUSY_CORES = 0.25
PATIENCE = 5  # times as long as before a process may take to begin anew
NEARLY = 0.5  # of the time of a start in blocks: begun anew with those that have made more
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
