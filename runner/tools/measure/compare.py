"""Compare variants of a training run: each runs in a separate process, interleaved in blocks of updates.

If variants are measured one after the other, order, caches and other processes bias the result. Here all variants are
alive, and one runs at a time: in each round every variant runs one block, in random order, and is then stopped
(SIGSTOP, with its data workers). If they do not fit in memory together, each is restarted for each of its blocks.
Reasons and numbers: docs/decisions/0015-interleave-benchmark-variants.md.
"""

from __future__ import annotations

import math
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from runner.base.errors import AccelRunError
from runner.config.request import Request, merge_overrides
from runner.host.resources import ROOT, free_memory_bytes
from runner.host.scratch import private_folder
from runner.monitor.machine_sample import CpuLoad, QuotaCpuLoad, make_cpu_load
from runner.tools.measure.comparison_result import (
    NO_TIME_LEFT,
    START_TIMED_OUT,
    Block,
    ComparisonResult,
    Mode,
    Variant,
    VariantResult,
    describe_disturbances,
    expected_start_s,
    format_reason,
    is_compiled,
    merge_reports,
)
from runner.tools.measure.fork_server import START_TIMEOUT_S, BudgetExhausted, ForkServer, VariantProcess
from runner.tools.measure.statistics import PRIOR_SPREAD

# No logging or monitoring in variants, and no files in the user's run folders.
VARIANT_OVERRIDES = (
    "run=trial", "resume=fresh", "tracker=none", "monitor=off", "profiler=off", "watchdog=off",
    "launcher=local", "on_oom=stop",
)  # fmt: skip
LogFunction = Callable[[str], None]
CallFunction = Callable[[Mapping[str, Any]], dict[str, Any]]


@dataclass(frozen=True)
class CompareLimits:
    """Limits of a comparison.

    budget_s               total time in seconds, start-up included; unfinished work is stopped at its end
    rounds                 minimum and maximum number of blocks of each variant
    block_s                approximate seconds of a block of the baseline
    min_updates            minimum number of updates in a block, unless they take too long
    start_s                timeout for the first update of a variant
    interleave             False: restart a variant for each of its blocks, so that two are never alive together
    run_evaluations        run evaluations within blocks; their time counts
    time_first_evaluation  add the extra time of the first evaluation, which compiles again, to the start-up
    phase                  phase whose updates are measured; None: the first training phase
    """

    budget_s: float = 120.0
    rounds: tuple[int, int] = (6, 60)
    block_s: float = 0.4
    min_updates: int = 1
    start_s: float = 300.0
    interleave: bool = True
    run_evaluations: bool = False
    time_first_evaluation: bool = False
    phase: str | None = None
    seed: int = 0


class ComparisonInterrupted(KeyboardInterrupt):
    """Ctrl-C during a comparison, with the measurements so far."""

    def __init__(self, result: ComparisonResult) -> None:
        super().__init__()
        self.result = result


class Comparison:
    """Measures variants of one request; leaving the `with` block ends every process.

    cores  number of cores for variants and their data workers; 0: all
    clock  clock of the budget; None: time.monotonic
    """

    def __init__(self, request: Request, cores: int = 0, clock: Callable[[], float] | None = None) -> None:
        self.request, self.cores, self.clock = request, cores, clock or time.monotonic
        self.load = make_cpu_load(os.getpid(), ROOT)
        self.num_started = 0
        self.prior_spread = PRIOR_SPREAD  # variation between identical processes in earlier comparisons
        self.last_error = AccelRunError("nothing was started")
        self.processes: dict[str, VariantProcess] = {}
        self.compiled: dict[tuple[str, ...], Path] = {}  # variant -> folder of its compiled code, kept over restarts

    def __enter__(self) -> Comparison:
        self._stack = ExitStack()
        self.folder = self._stack.enter_context(private_folder())
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def compare(self, variants: Sequence[Variant], limits: CompareLimits, log: LogFunction = print) -> ComparisonResult:
        """Measure the variants, interleaved; the first is the baseline.

        The overrides of a variant are added to those of the request. The error that ends a variant becomes its
        `why_not`. Raises AccelRunError if the baseline cannot be measured, ComparisonInterrupted on Ctrl-C once the
        baseline runs.
        """
        began = self.clock()
        self.limits, self.deadline = limits, began + limits.budget_s
        self.block_s = max(BLOCK_STRETCH * limits.block_s, limits.budget_s / 2 / (len(variants) * limits.rounds[0]))
        result = self._start_baseline(variants)
        try:
            self._start_waiting(result, began, log)
            while self._run_rounds(result):
                if all(trial.why_not != NO_TIME_LEFT for trial in result.variants):
                    break
                if not self._start_waiting(result, self.clock(), log):
                    self._run_rounds(result, is_last=True)
                    break
            self._collect_reports(result)
        except KeyboardInterrupt:
            with suppress(KeyboardInterrupt):  # a second Ctrl-C ends it at once
                self._collect_reports(result)
            raise ComparisonInterrupted(result) from None
        finally:
            for process in self.processes.values():
                process.end()
            self.processes.clear()
            if result.mode == "interleaved":
                self.prior_spread += result.measured_spread
        result.seconds = self.clock() - began
        if any(trial.is_untried for trial in result.variants):
            result.notes.append(SHORT_BUDGET)
        result.notes += describe_disturbances(result)
        return result

    @contextmanager
    def open_variant(self, variant: Variant, limits: CompareLimits) -> Iterator[tuple[CallFunction, VariantResult]]:
        """Start and warm up one variant; yield a function that sends it commands, and its start-up measurements.

        Raises AccelRunError if it cannot be started.
        """
        self.limits, self.deadline, self.block_s = limits, math.inf, BLOCK_STRETCH * limits.block_s
        trial = VariantResult(variant)
        process = self.start(trial, math.inf)
        if process is None:
            raise self.last_error
        try:
            yield process.call, trial
        finally:
            process.end()

    @cached_property
    def fork_server(self) -> ForkServer:
        return self._stack.enter_context(ForkServer(self.folder, self.cores))

    def fork(self, variant: Variant, number: int, deadline: float) -> VariantProcess:
        """Create the process of a variant; its replies are not awaited beyond the deadline."""
        return VariantProcess(self.fork_server, number, self.clock, deadline, variant.num_ranks)

    def compiled_folder(self, variant: Variant) -> Path:
        """Return the folder of the variant's compiled code, the same one after each restart."""
        return self.compiled.setdefault(
            (variant.name, *variant.overrides), self.folder / f"compiled-{self.num_started}"
        )

    def start(self, trial: VariantResult, deadline: float) -> VariantProcess | None:
        """Start the process of a variant and warm it up; if that fails, set its `why_not` and return None.

        deadline  time on `clock` at which an unfinished start is ended
        """
        self.num_started += 1
        process = self.fork(trial.variant, self.num_started, deadline)
        self._stack.callback(process.end)
        since, startup = self.clock(), trial.startup  # the start of the fork server is not counted
        limits = self._limits_for(deadline)
        try:
            process.receive_reply(limits.start_s)
            trial.opened = process.call(self._begin_command(trial.variant), limits.start_s)
            start_s, first_update_s = self.clock() - since, process.run(1, limits.start_s)
            began, num, total = self.clock(), 1, 0
            while self.clock() - began < limits.block_s:
                process.run(num, limits.start_s)
                num, total = min(2 * num, MAX_WARM_UP_UPDATES), total + num
            is_first = not startup.start_s
            if is_first:  # a restart is faster, because it reuses compiled code
                startup.start_s, startup.first_update_s = start_s, first_update_s
                startup.warm_up_s, startup.warm_up_updates = self.clock() - began, total
            must_evaluate = limits.time_first_evaluation and (is_first or limits.run_evaluations)
            if must_evaluate and trial.opened["values"]["compile"] != "off":
                more_s = process.call({"do": "evaluate"}, limits.start_s)["more_s"]
                startup.evaluation_s = startup.evaluation_s or more_s
            ahead = trial.opened["ahead"]
            trial.untimed = ahead + 1 if ahead else 0
            trial.updates = trial.updates or choose_block_updates(process, trial, limits, self.block_s)
        except BudgetExhausted as error:
            self._discard(process)
            self.last_error = error
            if len(trial.blocks) < MIN_ROUNDS:
                trial.why_not = f"{START_TIMED_OUT}: not ready after {self.clock() - since:.0f} s"
            return None
        except AccelRunError as error:
            self.last_error, trial.why_not = error, format_reason(error)
            self._discard(process)
            return None
        except KeyboardInterrupt:
            process.end()
            raise
        finally:
            startup.taken_s = self.clock() - since
        process.deadline = self.deadline
        return process

    def _limits_for(self, deadline: float) -> CompareLimits:
        """Return the limits of a process. The baseline, which all others need, has no deadline and may start slowly."""
        start_s = self.limits.start_s if math.isfinite(deadline) else max(self.limits.start_s, START_TIMEOUT_S)
        return replace(self.limits, start_s=start_s)

    def _begin_command(self, variant: Variant) -> dict[str, Any]:
        fixed = (*VARIANT_OVERRIDES, f"output_root={self.folder / f'variant-{self.num_started}'}")
        return {
            "do": "begin",
            "overrides": list(merge_overrides(merge_overrides(self.request.overrides, variant.overrides), fixed)),
            "task_file": str(self.request.task_file) if self.request.task_file else None,
            "config_dir": str(self.request.config_dir) if self.request.config_dir else None,
            "compiled": str(self.compiled_folder(variant)),
            "phase": self.limits.phase,
            "run_evaluations": self.limits.run_evaluations,
            "settle": variant.ranks.settle if variant.ranks else 0,
        }

    def _start_baseline(self, variants: Sequence[Variant]) -> ComparisonResult:
        """Start the baseline and pause it; the other variants wait."""
        baseline = VariantResult(variants[0])
        first = self.start(baseline, math.inf)  # no deadline, because nothing can be compared without it
        if first is None:
            raise self.last_error
        num_processes = sum(variant.num_ranks or 1 for variant in variants)
        is_interleaved = self.limits.interleave and _fit_in_memory(first, baseline, num_processes)
        waiting = [VariantResult(variant, why_not=NO_TIME_LEFT) for variant in variants[1:]]
        mode: Mode = "interleaved" if is_interleaved else "restarted"
        result = ComparisonResult(
            [baseline, *waiting], mode, num_cores=self.load.num_cores, prior_spread=self.prior_spread
        )
        if is_interleaved:
            self.processes[baseline.name] = first
            first.pause()
        else:
            self._discard(first)
            if self.limits.interleave:
                result.notes.append("not all variants fit in memory at once: each is restarted for each block")
        return result

    def _start_waiting(self, result: ComparisonResult, since: float, log: LogFunction) -> bool:
        """Start the waiting variants as time allows, compiled ones last; return whether any was started.

        Time for the minimum number of rounds is reserved; with more than two variants, this is at least half of the
        time from `since` to the deadline. When the reserved time begins, an unfinished start is ended, and no
        other one begins.
        """
        half_s = (self.deadline - since) / 2 if len(result.variants) > 2 else 0.0
        active = [trial for trial in result.variants if trial.is_active]
        num = len(active)
        for trial in sorted((trial for trial in result.variants if trial.why_not == NO_TIME_LEFT), key=is_compiled):
            turns = [self._expected_turn_s(result, trial) for trial in active]
            rounds_s = SLACK * MIN_ROUNDS * (sum(turns) + max(turns))
            deadline = self.deadline - max(half_s, rounds_s)
            is_interleaved = result.mode == "interleaved"
            if deadline - self.clock() < (expected_start_s(result, trial) if is_interleaved else 0.0):
                continue
            trial.why_not = ""
            if is_interleaved:
                log(f"starting {trial.name}")
                process = self.start(trial, deadline)
                if process is None:
                    continue
                self.processes[trial.name] = process
                process.pause()
            active.append(trial)
        return len(active) > num

    def _expected_turn_s(self, result: ComparisonResult, trial: VariantResult) -> float:
        """Return the expected seconds of the next block of a variant, including a restart if each block needs one."""
        turn_s = trial.turn_s or max(other.turn_s for other in result.variants)
        if result.mode == "interleaved":
            return turn_s
        return turn_s + (trial.startup.taken_s or expected_start_s(result, trial))

    def _run_rounds(self, result: ComparisonResult, *, is_last: bool = False) -> bool:
        """Run rounds until every interval is narrow; return whether time is left.

        No block starts that would end after the deadline. While variants wait to be started, an active one is skipped
        as soon as the interval of its ratio is narrow. Until all variants have started, this interval does not include
        the variation between processes.

        is_last  no waiting variant can be started
        """
        min_rounds, max_rounds = self.limits.rounds
        first = len(result.busy_cores)
        last = max_rounds if is_last else first + max_rounds
        order = random.Random(self.limits.seed + first)
        can_restart = is_last or all(trial.why_not != NO_TIME_LEFT for trial in result.variants)
        last_restart = first
        turns_s = sum(self._expected_turn_s(result, trial) for trial in result.variants if not trial.why_not)
        if can_restart and first and self.clock() + SLACK * MIN_ROUNDS * turns_s <= self.deadline:
            for trial in result.variants:  # resume variants that were left out to make time for waiting ones
                trial.is_out = False
            leave_out(result, max_rounds)
        if all(not trial.is_active for trial in result.variants[1:]) and first:
            return True
        for number in range(first, last):
            is_spaced = min(last - number, number - last_restart) >= MIN_ROUNDS
            if can_restart and is_spaced and self._has_time_to_restart(result):
                last_restart = number
                if not self._restart_due(result):
                    return False
            result.busy_cores.append(_measure_busy_cores(self.load))  # measured while all variants are stopped
            active = [trial for trial in result.variants if trial.is_active]
            if len(active) < 2 and number - first >= min_rounds:
                return True
            order.shuffle(active)
            for trial in active:
                if self.clock() + self._expected_turn_s(result, trial) > self.deadline:
                    _mark_short(result, active, number - first, is_later=bool(first))
                    return False
                self.run_block(result, trial, number)
            if result.baseline.why_not:
                raise self.last_error
            if number - first + 1 >= min_rounds:
                leave_out(result, max_rounds, with_processes=can_restart)
                if all(not trial.is_active for trial in result.variants[1:]):
                    return True
        return True

    def run_block(self, result: ComparisonResult, trial: VariantResult, number: int) -> None:
        process = self.processes.get(trial.name) or self.start(trial, self.deadline)
        if process is None:
            if isinstance(self.last_error, BudgetExhausted) and trial is result.baseline:
                trial.why_not = ""  # the budget is used up, but earlier blocks count
            return
        # A block may take twice as long as estimated. The baseline has no deadline, because all others need its blocks.
        process.deadline = math.inf if trial is result.baseline else self.deadline + trial.turn_s
        try:
            process.resume()
            reply = process.run_block(trial.updates, self._limits_for(process.deadline).start_s, trial.untimed)
            wait_s = reply["run_queue_wait_s"]
            ms = 1e3 * (reply["seconds"] - wait_s) / trial.updates
            trial.blocks[number] = Block(ms, wait_s, process.number, tuple(reply["updates_ms"]))
            for part, seconds in reply["parts_s"].items():
                trial.parts_s[part] = trial.parts_s.get(part, 0.0) + seconds
            trial.throttled.update(reply["throttled"])
            if result.mode == "restarted":
                trial.report = process.call({"do": "report"}, REPLY_TIMEOUT_S)
        except BudgetExhausted as error:
            self.last_error, trial.why_not = error, "its last block took more than twice as long as earlier ones"
        except AccelRunError as error:
            self.last_error, trial.why_not = error, format_reason(error)
        if result.mode == "restarted" or trial.why_not:
            self.processes.pop(trial.name, None)
            self._discard(process)
        else:
            process.pause()

    def _has_time_to_restart(self, result: ComparisonResult) -> bool:
        """Return whether half of the active variants are due for a restart, and there is time to restart them."""
        active = [trial for trial in result.variants if trial.is_active]
        if len(active) < 2 or 2 * len(self._find_due(result, 1.0)) < len(active):
            return False
        rounds_s = MIN_ROUNDS * sum(self._expected_turn_s(result, trial) for trial in active)
        starts_s = sum(trial.startup.restart_s for trial in self._find_due(result, NEARLY_DUE_SHARE))
        return self.clock() + SLACK * (starts_s + rounds_s) <= self.deadline

    def _find_due(self, result: ComparisonResult, share: float) -> list[VariantResult]:
        """Return the variants whose process has run the minimum number of blocks, and for long enough to be restarted.

        share  required running time, as a fraction of the time that a restart takes
        """
        running = [trial for trial in result.variants if trial.is_active and trial.name in self.processes]
        numbers = {trial.name: self.processes[trial.name].number for trial in running}
        return [
            trial
            for trial in running
            if len(trial.process_blocks(numbers[trial.name])) >= self.limits.rounds[0]
            and trial.process_s(numbers[trial.name]) >= share * trial.startup.restart_s
        ]

    def _restart_due(self, result: ComparisonResult) -> bool:
        """Restart the variants that are due or nearly due; return False if time is over or the baseline failed.

        Effects that are constant within a process, such as memory layout, show only as differences between processes. A
        variant that cannot restart runs no more blocks; its blocks so far count.
        """
        for trial in self._find_due(result, NEARLY_DUE_SHARE):
            if self.clock() >= self.deadline:
                return False
            deadline = min(self.deadline, self.clock() + RESTART_TIMEOUT_FACTOR * trial.startup.restart_s)
            process = self.processes.pop(trial.name)
            self._request_report(trial, process)
            self._discard(process)
            startup, taken_s = trial.startup, trial.startup.taken_s
            try:
                new = self.start(trial, deadline)
            finally:
                startup.again_s, startup.taken_s = startup.taken_s, taken_s
            if new is not None:
                self.processes[trial.name] = new
                new.pause()
                continue
            reason = trial.why_not or f"not ready after {trial.startup.again_s:.0f} s"
            trial.why_not, trial.is_over = "", True
            result.notes.append(f"{trial.name} could not restart: {reason}")
            if trial is result.baseline:
                return False
        return True

    def _discard(self, process: VariantProcess) -> None:
        """End a process and remove its files, because a checkpoint may be as large as the model."""
        process.end()
        shutil.rmtree(self.folder / f"variant-{process.number}", ignore_errors=True)

    def _collect_reports(self, result: ComparisonResult) -> None:
        for trial in result.variants:
            if trial.name in self.processes:
                self._request_report(trial, self.processes[trial.name])

    @staticmethod
    def _request_report(trial: VariantResult, process: VariantProcess) -> None:
        with suppress(AccelRunError):
            process.deadline = math.inf
            process.resume()
            report = process.call({"do": "report"}, REPLY_TIMEOUT_S)
            if "losses" not in report:  # this was the reply to an interrupted block
                report = process.receive_reply(REPLY_TIMEOUT_S)
            trial.report = merge_reports(trial.report, report)


def choose_block_updates(process: VariantProcess, trial: VariantResult, limits: CompareLimits, longest_s: float) -> int:
    """Return how many updates take about `block_s`; more if data is prefetched, or to include periodic work.

    longest_s  maximum seconds of a block that includes a whole number of log rows, checkpoints and evaluations
    """
    seconds, num = process.run(1, limits.start_s), 1
    while seconds < limits.block_s / 2 and num < MAX_BLOCK_UPDATES:
        growth = min(MAX_GROWTH, limits.block_s / max(seconds, 1e-6) / 2)  # limited: a single measurement is unreliable
        num = min(MAX_BLOCK_UPDATES, max(2 * num, int(num * growth)))
        seconds = process.run(num, limits.start_s)
    update_s = seconds / num
    min_updates = limits.min_updates if limits.min_updates * update_s <= longest_s else 1
    num = max(min_updates, round(limits.block_s / update_s), UPDATES_PER_PREFETCHED * trial.untimed)
    periods = [
        period
        for name, period in trial.opened["periods"].items()
        if period and (name != "evaluation" or limits.run_evaluations)
    ]
    multiple: int = max(1, trial.opened["readers"])  # data workers that started together deliver batches together
    num = -(-num // multiple) * multiple
    for period in sorted(periods):
        common = math.lcm(multiple, period)
        if common <= BLOCK_STRETCH * num or common * update_s <= longest_s:
            multiple, num = common, -(-num // common) * common
    return num


def leave_out(result: ComparisonResult, max_rounds: int, *, with_processes: bool = True) -> None:
    """Leave out variants that need no more blocks.

    These have a narrow interval, are clearly slower, or have the maximum number of blocks. A variant that others are
    compared with stays until all of them are left out. A variant that is left out stays out until new rounds start,
    because later estimates of the variation between processes would bring it back for single blocks.
    """
    for trial in result.variants[1:]:
        if trial.is_out:
            continue
        ratio, reference = result.ratio(trial, with_processes=with_processes), result.against(trial)
        if reference.why_not or reference.is_over or len(trial.blocks) >= max_rounds:
            trial.is_out = True
        elif ratio is not None and not trial.why_not:
            trial.is_out = ratio.is_narrow or ratio.high < SLOWER_RATIO
    for trial in result.variants[1:]:
        dependents = [other for other in result.variants if other.variant.against == trial.name]
        if dependents:
            trial.is_out = not any(other.is_active for other in dependents)


def _mark_short(result: ComparisonResult, active: Sequence[VariantResult], rounds: int, *, is_later: bool) -> None:
    """Mark the variants that have too few blocks at the end of the budget."""
    if any(len(trial.blocks) < MIN_ROUNDS for trial in active):
        whose = "the variants started last" if is_later else "each variant"
        result.notes.append(f"the time budget was used up after {rounds} of {MIN_ROUNDS} blocks of {whose}")
        for trial in active:
            trial.is_short = len(trial.blocks) < MIN_ROUNDS


def _fit_in_memory(process: VariantProcess, baseline: VariantResult, processes: int) -> bool:
    """Return whether this number of processes like the baseline's fits in the memory of the host and of the GPU."""
    report, num = process.call({"do": "report"}, REPLY_TIMEOUT_S), processes / (baseline.variant.num_ranks or 1)
    host_bytes = MEMORY_MARGIN * report["peak_host_gib"] * 2**30
    if host_bytes * (num - 1) > free_memory_bytes():
        return False
    free = baseline.opened.get("free_gib")
    if free is None:
        return True
    return bool(MEMORY_MARGIN * (report["reserved_gib"] + CONTEXT_GIB) * (num - 1) <= free - report["reserved_gib"])


def _measure_busy_cores(load: CpuLoad | QuotaCpuLoad) -> float:
    """Return how many of this process's cores other processes use, while all variants are stopped."""
    load.percent()
    time.sleep(IDLE_SAMPLE_S)
    return load.num_cores * (load.percent() or 0.0) / 100


SHORT_BUDGET = "there was no time to try everything; use a larger budget_s="
MIN_ROUNDS = 3  # the fewest blocks from which a spread can be estimated
SLACK = 1.2  # factor on expected times, because blocks may take longer than estimated from earlier updates
MAX_WARM_UP_UPDATES = 64  # maximum number of warm-up updates per command
MAX_BLOCK_UPDATES = 20_000
MAX_GROWTH = 32  # maximum factor between two attempts at the number of updates in a block
BLOCK_STRETCH = 4  # a block may always be this many times longer to include whole evaluations, checkpoints or log rows
UPDATES_PER_PREFETCHED = 4  # timed updates per untimed one, so that at most a fifth of the updates are untimed
REPLY_TIMEOUT_S = 60.0
MEMORY_MARGIN = 1.2  # factor on the memory of the baseline, because other variants may need more
CONTEXT_GIB = 0.6  # GPU memory of a process besides what torch has reserved
SLOWER_RATIO = 0.95  # a variant whose interval ends below this ratio is clearly slower and needs no more blocks
IDLE_SAMPLE_S = 0.05  # duration of the measurement of busy cores before each round
RESTART_TIMEOUT_FACTOR = 5  # a restart may take this many times as long as the previous start
NEARLY_DUE_SHARE = 0.5  # after this fraction of its restart time, a variant restarts together with those that are due
