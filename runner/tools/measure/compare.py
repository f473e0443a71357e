"""Compare variants of a training: each runs in a separate process, interleaved in blocks of updates.

If variants are measured one after the other, order, caches and other processes decide what seems to be faster. Here all
of them are alive, and only one runs: in each round every variant runs one block, in random order, and is then stopped
(SIGSTOP, with its data workers). If they do not fit in memory together, each is restarted for each of its blocks.
"""

from __future__ import annotations

import math
import os
import random
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.base.errors import AccelRunError
from runner.config.request import Request, merge_overrides
from runner.host.resources import ROOT, free_memory_bytes
from runner.host.scratch import private_folder
from runner.monitor.machine_sample import CpuLoad, GrantedCpuLoad, cpu_load
from runner.tools.measure.comparison_result import (
    NO_TIME,
    UNTRIED,
    ComparisonResult,
    Mode,
    Variant,
    VariantResult,
    disturbances,
    fuller_report,
)
from runner.tools.measure.fork_server import ForkServer, OutOfTime, VariantProcess
from runner.tools.measure.statistics import USUAL

# What a cell does not do: speak, watch, or write where runs of the user's lie.
QUIET = (
    "run=trial", "resume=fresh", "tracker=none", "monitor=off", "profiler=off", "watchdog=off",
    "launcher=local", "on_oom=stop",
)  # fmt: skip


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


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, with what was measured until then."""

    def __init__(self, trials: ComparisonResult) -> None:
        super().__init__()
        self.trials = trials


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
        self._fork_servers: dict[tuple[tuple[str, str], ...], ForkServer] = {}

    def __enter__(self) -> Comparison:
        self._stack = ExitStack()
        self.folder = self._stack.enter_context(private_folder())
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def compare(
        self, cells: Sequence[Variant], limits: CompareLimits, say: Callable[[str], None] = print
    ) -> ComparisonResult:
        """Return the variants measured interleaved with the first; overrides are on top of the request's settings.

        What ends a variant is its `why_not`. Raises AccelRunError if the first one cannot be measured, and Interrupted
        at Ctrl-C once blocks have started.
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
            self._fork_server(cell.environment)

    def _fork(self, cell: Variant, number: int, until: float) -> VariantProcess:
        return VariantProcess(self._fork_server(cell.environment), number, self.clock, until)

    def _fork_server(self, environment: Mapping[str, str]) -> ForkServer:
        key = tuple(sorted(environment.items()))
        if key not in self._fork_servers:
            self._fork_servers[key] = self._stack.enter_context(ForkServer(self.folder, environment, self.cores))
        return self._fork_servers[key]

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
            process.resume()
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
            process.resume()
            report = process.ask({"do": "report"}, ANSWER_S)
            # The answer of a block that was interrupted comes first.
            report = report if "losses" in report else process.answer(ANSWER_S)
            measured.report = fuller_report(measured.report, report)


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


def _text(path: Path | None) -> str | None:
    return str(path) if path else None


LEAST_ROUNDS = 3  # fewer say nothing of their spread
SLACK = 1.2  # of what blocks will take, by what updates before them took
WARM_UPDATES = 64
LONGEST_BLOCK = 20_000
MOST_GROWTH = 32  # times as many updates as before are made next, to find out how many a block has
LONGER = 4  # times as long a block may become to be a whole number of evaluations, rows or saves, in any case
AHEAD = 4  # times as many updates as can be read ahead, of a block: what is left of the head start is a fifth at most
ANSWER_S = 60.0
ROOM = 1.2  # of what the baseline has taken: others may take more
CONTEXT_GIB = 0.6  # of a process on a GPU, besides what torch has reserved
CLEARLY_SLOWER = 0.95
STILL_S = 0.05  # before each round, in which nothing of ours runs
PATIENCE = 5  # times as long as before a process may take to begin anew
NEARLY = 0.5  # of the time of a start in blocks: begun anew with those that have made more
