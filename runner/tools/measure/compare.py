"""Compare variants of a training: each runs in a separate process, interleaved in blocks of updates.

If variants are measured one after the other, order, caches and other processes decide what seems to be faster. Here all
of them are alive, and only one runs: in each round every variant runs one block, in random order, and is then stopped
(SIGSTOP, with its data workers). If they do not fit in memory together, each is restarted for each of its blocks.
Reasons and numbers: docs/decisions/0015-interleave-benchmark-variants.md.
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
    Block,
    ComparisonResult,
    Mode,
    Variant,
    VariantResult,
    disturbances,
    fuller_report,
)
from runner.tools.measure.fork_server import ForkServer, OutOfTime, VariantProcess
from runner.tools.measure.statistics import USUAL

# A variant prints and watches nothing, and writes nothing into the user's run folders.
QUIET = (
    "run=trial", "resume=fresh", "tracker=none", "monitor=off", "profiler=off", "watchdog=off",
    "launcher=local", "on_oom=stop",
)  # fmt: skip
Say = Callable[[str], None]
Ask = Callable[[Mapping[str, Any]], dict[str, Any]]


@dataclass(frozen=True)
class CompareLimits:
    """How long and how finely variants are measured.

    budget_s          seconds for everything, start-up included; work in progress at its end is stopped
    rounds            fewest and most blocks of each variant
    block_s           approximate seconds of a block of the baseline
    min_updates       fewest updates of a block, unless they take too long
    start_s           longest time until the first update of a variant
    together          False: restart for each block, never two variants alive
    evaluates         run evaluations; they are part of what is measured
    first_evaluation  add to the start-up how much longer the first evaluation of a compiled model takes: it compiles
                      again without gradients
    phase             whose updates are measured; None: the first that trains
    """

    budget_s: float = 120.0
    rounds: tuple[int, int] = (6, 60)
    block_s: float = 0.4
    min_updates: int = 1
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


class Comparison:
    """Measures variants of one request; leaving the `with` block ends every process.

    cores  for variants and their data workers; 0: all
    clock  for the budget; None: the machine's
    fork   creates the process of a variant from its number and the time until which it is waited for
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
        self.known = USUAL  # spread between identical processes
        self.error = AccelRunError("nothing was started")  # the last one
        self.processes: dict[str, VariantProcess] = {}
        self.compiled: dict[tuple[str, ...], Path] = {}  # variant -> folder of its compiled code, kept over restarts
        self._fork_servers: dict[tuple[tuple[str, str], ...], ForkServer] = {}

    def __enter__(self) -> Comparison:
        self._stack = ExitStack()
        self.folder = self._stack.enter_context(private_folder())
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def compare(self, variants: Sequence[Variant], limits: CompareLimits, say: Say = print) -> ComparisonResult:
        """Measure the variants interleaved with the first; their overrides are added to the request's settings.

        The error that ends a variant is its `why_not`. Raises AccelRunError if the first one cannot be measured, and
        Interrupted on Ctrl-C after the first block.
        """
        began = self.clock()
        self.limits, self.deadline = limits, began + limits.budget_s
        self.block_s = max(LONGER * limits.block_s, limits.budget_s / 2 / (len(variants) * limits.rounds[0]))
        trials = self._start_baseline(variants)
        try:
            self._start_waiting(trials, began, say)
            while self._run_rounds(trials):
                if all(each.why_not != UNTRIED for each in trials.variants):
                    break
                if not self._start_waiting(trials, self.clock(), say):
                    self._run_rounds(trials, is_last=True)
                    break
            self._collect_reports(trials)
        except KeyboardInterrupt:
            with suppress(KeyboardInterrupt):  # a second Ctrl-C ends it at once
                self._collect_reports(trials)
            raise Interrupted(trials) from None
        finally:
            for process in self.processes.values():
                process.end()
            self.processes.clear()
            if trials.mode == "interleaved":
                self.known += trials.own_spread
        trials.seconds = self.clock() - began
        self._estimate_budget(trials)
        trials.notes += disturbances(trials)
        return trials

    @contextmanager
    def alone(self, variant: Variant, limits: CompareLimits) -> Iterator[tuple[Ask, VariantResult]]:
        """Open one warmed-up variant for other questions; yield a function that asks it, and what is known so far.

        Raises AccelRunError if it cannot be opened.
        """
        self.limits, self.deadline, self.block_s = limits, math.inf, LONGER * limits.block_s
        measured = VariantResult(variant)
        process = self.start(measured, math.inf)
        if process is None:
            raise self.error
        try:
            yield process.ask, measured
        finally:
            process.end()

    def prepare(self, variant: Variant) -> None:
        """Import what variants need. This takes seconds, once, and is not part of any start-up."""
        if self.fork == self._fork:
            self._fork_server(variant.environment)

    def _fork(self, variant: Variant, number: int, until: float) -> VariantProcess:
        return VariantProcess(self._fork_server(variant.environment), number, self.clock, until, variant.num_ranks)

    def _fork_server(self, environment: Mapping[str, str]) -> ForkServer:
        key = tuple(sorted(environment.items()))
        if key not in self._fork_servers:
            self._fork_servers[key] = self._stack.enter_context(ForkServer(self.folder, environment, self.cores))
        return self._fork_servers[key]

    def compiled_folder(self, variant: Variant) -> Path:
        """Return the folder of the variant's compiled code, the same one after each restart."""
        return self.compiled.setdefault((variant.name, *variant.overrides), self.folder / f"compiled-{self.number}")

    def start(self, measured: VariantResult, until: float) -> VariantProcess | None:
        """Start the process of a variant and warm it up; None, with its `why_not`, if that fails.

        until  by the clock; a start in progress then is ended
        """
        self.number += 1
        self.prepare(measured.variant)
        since, startup = self.clock(), measured.startup
        process = self._stack.enter_context(self.fork(measured.variant, self.number, until))
        try:
            process.answer(self.limits.start_s)
            measured.opened = process.ask(self._begin(measured.variant), self.limits.start_s)
            start_s, first_update_s = self.clock() - since, process.run(1, self.limits.start_s)
            began, num, made = self.clock(), 1, 0
            while self.clock() - began < self.limits.block_s:
                process.run(num, self.limits.start_s)
                num, made = min(2 * num, WARM_UPDATES), made + num
            is_first = not startup.start_s
            if is_first:  # a restart finds compiled code
                startup.start_s, startup.first_update_s = start_s, first_update_s
                startup.warm_up_s, startup.warm_up_updates = self.clock() - began, made
            is_in_time = self.limits.first_evaluation and (is_first or self.limits.evaluates)
            if is_in_time and measured.opened["values"]["compile"] != "off":
                more_s = process.ask({"do": "evaluate"}, self.limits.start_s)["more_s"]
                startup.evaluation_s = startup.evaluation_s or more_s
            ahead = measured.opened["ahead"]
            measured.untimed = ahead + 1 if ahead else 0
            measured.updates = measured.updates or updates_of_a_block(process, measured, self.limits, self.block_s)
        except OutOfTime as error:
            self._discard(process)
            self.error = error
            if len(measured.blocks) < LEAST_ROUNDS:
                measured.why_not = f"{NO_TIME}: not ready after {self.clock() - since:.0f} s"
            return None
        except AccelRunError as error:
            self.error, measured.why_not = error, _reason(error)
            self._discard(process)
            return None
        except KeyboardInterrupt:
            process.end()
            raise
        finally:
            startup.taken_s = self.clock() - since
        process.until = self.deadline
        return process

    def _begin(self, variant: Variant) -> dict[str, Any]:
        """Return the first order to a process."""
        own = (*QUIET, f"output_root={self.folder / f'variant-{self.number}'}")
        return {
            "do": "begin",
            "overrides": list(merge_overrides(merge_overrides(self.request.overrides, variant.overrides), own)),
            "task_file": _text(self.request.task_file),
            "config_dir": _text(self.request.config_dir),
            "compiled": str(self.compiled_folder(variant)),
            "phase": self.limits.phase,
            "evaluates": self.limits.evaluates,
            "slow": variant.ranks.slow if variant.ranks else 1.0,
            "settle": variant.ranks.settle if variant.ranks else 0,
        }

    def _start_baseline(self, variants: Sequence[Variant]) -> ComparisonResult:
        """Start the baseline and stop it; the others wait."""
        baseline = VariantResult(variants[0])
        self.prepare(variants[0])
        first = self.start(baseline, math.inf)  # without it there is nothing to compare with
        if first is None:
            raise self.error
        together = self.limits.together and _fit_together(
            first, baseline, sum(each.num_ranks or 1 for each in variants)
        )
        waiting = [VariantResult(variant, why_not=UNTRIED) for variant in variants[1:]]
        mode: Mode = "interleaved" if together else "restarted"
        trials = ComparisonResult([baseline, *waiting], mode, num_cores=self.load.num_cores, known=self.known)
        if together:
            self.processes[baseline.name] = first
            first.pause()
        else:
            self._discard(first)
            if self.limits.together:
                trials.notes.append("not all variants fit in memory at once: each is restarted for each block")
        return trials

    def _start_waiting(self, trials: ComparisonResult, since: float, say: Say) -> bool:
        """Start the waiting variants as time allows, those that compile last; return whether any was started.

        Time for rounds is reserved: with more than two variants, half of the time since `since`. No start begins in it,
        and a start that reaches it is ended.
        """
        half_s = (self.deadline - since) / 2 if len(trials.variants) > 2 else 0.0
        playing = [each for each in trials.variants if each.plays]
        num = len(playing)
        for measured in sorted((each for each in trials.variants if each.why_not == UNTRIED), key=_compiles):
            turns = [self._turn_s(trials, each) for each in playing]
            rounds_s = SLACK * LEAST_ROUNDS * (sum(turns) + max(turns))
            until = self.deadline - max(half_s, rounds_s)
            is_interleaved = trials.mode == "interleaved"
            if until - self.clock() < (_start_s(trials, measured) if is_interleaved else 0.0):
                continue
            measured.why_not = ""
            if is_interleaved:
                say(f"starts {measured.name}")
                process = self.start(measured, until)
                if process is None:
                    continue
                self.processes[measured.name] = process
                process.pause()
            playing.append(measured)
        return len(playing) > num

    def _turn_s(self, trials: ComparisonResult, measured: VariantResult) -> float:
        """Return the expected seconds of a variant's turn, with its start if each turn begins with one."""
        turn_s = measured.turn_s or max(each.turn_s for each in trials.variants)
        is_open = trials.mode == "interleaved"
        return turn_s if is_open else turn_s + (measured.startup.taken_s or _start_s(trials, measured))

    def _run_rounds(self, trials: ComparisonResult, *, is_last: bool = False) -> bool:
        """Run rounds until every interval is narrow; return whether time is left.

        No block starts that would end after the deadline. While some variants wait, those that run make way as soon as
        their blocks agree; the variation between processes is measured after that.

        is_last  no waiting variant can be started
        """
        least, most = self.limits.rounds
        first = len(trials.busy_cores)
        last = most if is_last else first + most
        order = random.Random(self.limits.seed + first)
        restarts = is_last or all(each.why_not != UNTRIED for each in trials.variants)
        restarted = first
        turns_s = sum(self._turn_s(trials, each) for each in trials.variants if not each.why_not)
        if restarts and first and self.clock() + SLACK * LEAST_ROUNDS * turns_s <= self.deadline:
            for each in trials.variants:  # those that made way return
                each.is_out = False
            leave_out(trials, most)
        if all(not each.plays for each in trials.variants[1:]) and first:
            return True
        for number in range(first, last):
            if (
                restarts
                and min(last - number, number - restarted) >= LEAST_ROUNDS
                and self._has_time_to_restart(trials)
            ):
                restarted = number
                if not self._restart_due(trials):
                    return False
            trials.busy_cores.append(_busy_cores(self.load))  # all variants are stopped
            playing = [each for each in trials.variants if each.plays]
            if len(playing) < 2 and number - first >= least:
                return True
            order.shuffle(playing)
            for measured in playing:
                if self.clock() + self._turn_s(trials, measured) > self.deadline:
                    _note_short(trials, playing, number - first, is_later=bool(first))
                    return False
                self.turn(trials, measured, number)
            if trials.baseline.why_not:
                raise self.error
            if number - first + 1 >= least:
                leave_out(trials, most, with_processes=restarts)
                if all(not each.plays for each in trials.variants[1:]):
                    return True
        return True

    def turn(self, trials: ComparisonResult, measured: VariantResult, number: int) -> None:
        """Run one block of a variant."""
        process = self.processes.get(measured.name) or self.start(measured, self.deadline)
        if process is None:
            if isinstance(self.error, OutOfTime) and measured is trials.baseline:
                measured.why_not = ""  # the time is over, and earlier blocks count
            return
        # A block may take twice as long as estimated. The baseline's are always waited for: the others need them.
        process.until = math.inf if measured is trials.baseline else self.deadline + measured.turn_s
        try:
            process.resume()
            made = process.block(measured.updates, self.limits.start_s, measured.untimed)
            updates, wait_s, joules = measured.updates, made["run_queue_wait_s"], made["joules"]
            measured.blocks[number] = Block(
                1e3 * (made["seconds"] - wait_s) / updates, wait_s, process.number, tuple(made["updates_ms"]),
                None if joules is None else joules / updates,
            )  # fmt: skip
            for part, seconds in made["parts_s"].items():
                measured.parts_s[part] = measured.parts_s.get(part, 0.0) + seconds
            measured.throttled.update(made["throttled"])
            if trials.mode == "restarted":
                measured.report = process.ask({"do": "report"}, ANSWER_S)
        except OutOfTime as error:
            self.error, measured.why_not = error, "its last block took more than twice as long as those before"
        except AccelRunError as error:
            self.error, measured.why_not = error, _reason(error)
        if trials.mode == "restarted" or measured.why_not:
            self.processes.pop(measured.name, None)
            self._discard(process)
        else:
            process.pause()

    def _has_time_to_restart(self, trials: ComparisonResult) -> bool:
        """Return whether half of the running variants are due, and there is time to restart them."""
        playing = [each for each in trials.variants if each.plays]
        if len(playing) < 2 or 2 * len(self._due(trials, 1.0)) < len(playing):
            return False
        rounds_s = LEAST_ROUNDS * sum(self._turn_s(trials, each) for each in playing)
        starts_s = sum(each.startup.restart_s for each in self._due(trials, NEARLY))
        return self.clock() + SLACK * (starts_s + rounds_s) <= self.deadline

    def _due(self, trials: ComparisonResult, share: float) -> list[VariantResult]:
        """Return the variants whose process has run enough blocks, for this share of the time of a restart."""
        running = [each for each in trials.variants if each.plays and each.name in self.processes]
        numbers = {each.name: self.processes[each.name].number for each in running}
        return [
            each
            for each in running
            if len(each.of_process(numbers[each.name])) >= self.limits.rounds[0]
            and each.process_s(numbers[each.name]) >= share * each.startup.restart_s
        ]

    def _restart_due(self, trials: ComparisonResult) -> bool:
        """Restart variants, those that are nearly due with those that are; return whether the baseline lives.

        What is the same in all blocks of a process, but not in another identical process, no number of its blocks
        shows. A variant that cannot restart runs no more blocks, and its blocks so far count.
        """
        for measured in self._due(trials, NEARLY):
            if self.clock() >= self.deadline:
                return False
            until = min(self.deadline, self.clock() + PATIENCE * measured.startup.restart_s)
            process = self.processes.pop(measured.name)
            self._ask_for_report(measured, process)
            self._discard(process)
            startup, taken_s = measured.startup, measured.startup.taken_s
            try:
                new = self.start(measured, until)
            finally:
                startup.again_s, startup.taken_s = startup.taken_s, taken_s
            if new is not None:
                self.processes[measured.name] = new
                new.pause()
                continue
            reason = measured.why_not or f"not ready after {measured.startup.again_s:.0f} s"
            measured.why_not, measured.is_over = "", True
            trials.notes.append(f"{measured.name} could not restart: {reason}")
            if measured is trials.baseline:
                return False
        return True

    def _estimate_budget(self, trials: ComparisonResult) -> None:
        """Set the budget in which the untried variants would be compared too, by what the others took."""
        if not any(each.is_untried for each in trials.variants):
            return
        ordered = [trials.baseline, *sorted(trials.variants[1:], key=_compiles)]
        starts = [
            # How long an ended start would have taken is unknown: twice as long is a guess that grows quickly.
            each.startup.taken_s * (2 if each.why_not.startswith(NO_TIME) else 1) or _start_s(trials, each)
            for each in ordered
        ]
        turns = [self._turn_s(trials, each) for each in ordered]
        trials.needs_s = needed_s(starts if trials.mode == "interleaved" else starts[:1], turns)
        seen = {_compiles(each) for each in ordered if each.startup.taken_s and not each.is_untried}
        trials.needs_more = any(
            each.why_not.startswith(NO_TIME) or (each.why_not == UNTRIED and _compiles(each) not in seen)
            for each in ordered
        )

    def _discard(self, process: VariantProcess) -> None:
        """End a process and remove its files: a checkpoint may be as large as the model."""
        process.end()
        shutil.rmtree(self.folder / f"variant-{process.number}", ignore_errors=True)

    def _collect_reports(self, trials: ComparisonResult) -> None:
        for measured in trials.variants:
            if measured.name in self.processes:
                self._ask_for_report(measured, self.processes[measured.name])

    @staticmethod
    def _ask_for_report(measured: VariantResult, process: VariantProcess) -> None:
        with suppress(AccelRunError):
            process.until = math.inf
            process.resume()
            report = process.ask({"do": "report"}, ANSWER_S)
            # The answer to an interrupted block comes first.
            report = report if "losses" in report else process.answer(ANSWER_S)
            measured.report = fuller_report(measured.report, report)


def updates_of_a_block(
    process: VariantProcess, measured: VariantResult, limits: CompareLimits, longest_s: float
) -> int:
    """Return how many updates take about `block_s`; more if data is read ahead, or to include periodic work.

    longest_s  seconds that a block may take to be a whole number of rows, checkpoints and evaluations
    """
    seconds, num = process.run(1, limits.start_s), 1
    while seconds < limits.block_s / 2 and num < LONGEST_BLOCK:
        growth = min(MOST_GROWTH, limits.block_s / max(seconds, 1e-6) / 2)  # one reading may be far off
        num = min(LONGEST_BLOCK, max(2 * num, int(num * growth)))
        seconds = process.run(num, limits.start_s)
    update_s = seconds / num
    least = limits.min_updates if limits.min_updates * update_s <= longest_s else 1
    num = max(least, round(limits.block_s / update_s), AHEAD * measured.untimed)
    periods = [
        period
        for name, period in measured.opened["periods"].items()
        if period and (name != "evaluation" or limits.evaluates)
    ]
    whole: int = max(1, measured.opened["readers"])  # workers that started together deliver their batches together
    num = -(-num // whole) * whole
    for period in sorted(periods):
        both = math.lcm(whole, period)
        if both <= LONGER * num or both * update_s <= longest_s:
            whole, num = both, -(-num // both) * both
    return num


def needed_s(starts: Sequence[float], turns: Sequence[float]) -> float:
    """Return the budget in seconds in which variants are compared, given the seconds of their starts and blocks.

    starts  the baseline's first; of the baseline alone if each turn begins with a start
    """
    rounds_s = SLACK * LEAST_ROUNDS * (sum(turns) + max(turns))
    openings_s = sum(starts[:-1]) + max(starts)  # there must be time for the longest when the last one begins
    return SLACK * max(openings_s + rounds_s, 2 * openings_s if len(turns) > 2 else 0.0)


def enough(budget_s: float, trials: ComparisonResult) -> str:
    """Return a sentence with the budget in which all would be tried."""
    needed = 10 * math.ceil(budget_s / 10)
    return f"budget_s={needed} may be enough" if trials.needs_more else f"about budget_s={needed} tries all"


def leave_out(trials: ComparisonResult, most: int, *, with_processes: bool = True) -> None:
    """Mark the variants of which enough is known: narrow interval, clearly slower, or the most blocks.

    One that others are compared with leaves with the last of them. Leaving is final: what is learned about processes
    later would bring some back for a block here and there.
    """
    for each in trials.variants[1:]:
        if each.is_out:
            continue
        ratio, rival = trials.ratio(each, with_processes=with_processes), trials.against(each)
        if rival.why_not or rival.is_over or len(each.blocks) >= most:
            each.is_out = True
        elif ratio is not None and not each.why_not:
            each.is_out = ratio.is_narrow or ratio.high < CLEARLY_SLOWER
    for each in trials.variants[1:]:
        others = [other for other in trials.variants if other.variant.against == each.name]
        if others:
            each.is_out = not any(other.plays for other in others)


def _note_short(trials: ComparisonResult, playing: Sequence[VariantResult], rounds: int, *, is_later: bool) -> None:
    """Mark the variants that have too few blocks when the time is over."""
    if any(len(each.blocks) < LEAST_ROUNDS for each in playing):
        whose = "the variants started last" if is_later else "each variant"
        trials.notes.append(f"the time was over after {rounds} of {LEAST_ROUNDS} blocks of {whose}")
        for each in playing:
            each.is_short = len(each.blocks) < LEAST_ROUNDS


def _fit_together(process: VariantProcess, baseline: VariantResult, processes: int) -> bool:
    """Return whether so many processes like the baseline's fit on the host and on the GPU."""
    report, num = process.ask({"do": "report"}, ANSWER_S), processes / (baseline.variant.num_ranks or 1)
    each = ROOM * report["peak_host_gib"] * 2**30
    if each * (num - 1) > free_memory_bytes():
        return False
    free = baseline.opened.get("free_gib")
    return free is None or ROOM * (report["reserved_gib"] + CONTEXT_GIB) * (num - 1) <= free - report["reserved_gib"]


def _compiles(measured: VariantResult) -> bool:
    """Return whether it compiles, so that its start may take the time of ten others."""
    return any(word.startswith("compile=") and word != "compile=off" for word in measured.variant.overrides)


def _start_s(trials: ComparisonResult, measured: VariantResult) -> float:
    """Return the expected seconds of a start: the median of similar variants, or of all; ended starts do not count."""
    seen = [each for each in trials.variants if each.startup.taken_s and not each.why_not.startswith(NO_TIME)]
    alike = [each.startup.taken_s for each in seen if _compiles(each) == _compiles(measured)]
    return statistics.median(alike or [each.startup.taken_s for each in seen])


def _busy_cores(load: CpuLoad | GrantedCpuLoad) -> float:
    """Return how many of this process's cores others use, over a moment in which all variants are stopped."""
    load.percent()
    time.sleep(STILL_S)
    return load.num_cores * (load.percent() or 0.0) / 100


def _reason(error: AccelRunError) -> str:
    """Return the first problem in one line."""
    problem = error.problems[0]
    return " ".join(f"{problem.where + ': ' if problem.where else ''}{problem.what}".split())


def _text(path: Path | None) -> str | None:
    return str(path) if path else None


LEAST_ROUNDS = 3  # fewer say nothing about their spread
SLACK = 1.2  # blocks may take longer than the updates before them suggest
WARM_UPDATES = 64
LONGEST_BLOCK = 20_000
MOST_GROWTH = 32  # times as many updates next, while the length of a block is being found
LONGER = 4  # times as long a block may always be to include whole evaluations, rows or checkpoints
AHEAD = 4  # a block has as many times the updates that can be read ahead: at most a fifth of the head start remains
ANSWER_S = 60.0
ROOM = 1.2  # times the memory of the baseline: others may need more
CONTEXT_GIB = 0.6  # of a process on a GPU, besides what torch has reserved
CLEARLY_SLOWER = 0.95
STILL_S = 0.05  # before each round, in which all variants are stopped
PATIENCE = 5  # times as long as before that a restart may take
NEARLY = 0.5  # of the time of a restart in blocks: such variants restart together with those that are due
