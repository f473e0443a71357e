"""Detect hangs in a thread, report them with the stacks of all threads, and end the process.

The training thread reports its current operation to a `ProgressMark`, and never waits for this module. The watchdog
thread checks the mark periodically and counts its checks instead of the clock: a stopped process, a suspended machine
or a debugger cause one long pause between two checks, which counts as one check.

A single process ends itself. A rank of our launcher only publishes heartbeats (runner.host.heartbeat): the launcher
receives the heartbeats of all ranks, so it can distinguish the blocking rank from ranks that wait for it.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from runner.base.errors import Exit, Hang, SystemLimit, format_error, resume_note
from runner.base.secret import sanitize
from runner.base.values import Auto, Positive
from runner.config.chosen_option import make_chosen
from runner.distributed.timeouts import call_with_timeout
from runner.distributed.world import World
from runner.durable.checkpoint import newest_name
from runner.host import scratch, stacks
from runner.host.heartbeat import Heartbeat, HeartbeatTable
from runner.host.process_tree import descendants
from runner.plan.run_plan import Plan

START, DATA, UPDATE, EVALUATION, SUMMARY = "start", "data", "update", "evaluation", "summary"
CHECKPOINT, FINISH, PREDICTION, SEARCH, END = "checkpoint", "finish", "prediction", "search", "end"

BEFORE_UPDATE = (START, DATA, UPDATE)

WORKER = "data worker"
TICK_S = 0.25
MIN_TIMEOUT_S = 50.0  # a hang in an update is reported within a minute, with stacks
TIMEOUT_FACTOR = 10  # automatic timeout, as a multiple of the longest recent duration
MAX_RECENT = 100  # number of durations to keep; only operations longer than a tick count
NUM_SETTLED = 3  # number of later durations after which the first one, which may include compilation, is ignored
RECOMPILE_FACTOR = 1.5  # factor on the first duration: compiling for another shape may take longer
STOP_TIMEOUT_S = 5.0  # after a stop request, for the first update of a process; clusters kill after 10 to 30 s
REPORT_TIMEOUT_S = 3.0  # to record the hang on a disk that may itself be blocked


class ProgressMark:
    """Current operation of the run, which the watchdog checks. No other decision depends on `now`.

    now              (kind, update): a new tuple for each operation, even if equal to the previous one
    completed_kinds  kinds with one completed operation in this phase: the next one needs no compilation or start-up
    num_updates      number of completed updates of all phases and processes; 0 until this process completes one
    is_ending        whether training is over and only seconds remain, so that a stop has no effect
    write_progress   returns the update of the checkpoint that a thread writes, and a counter of disk progress, or None
    is_stopping      returns whether a stop was requested

    A launcher reads `num_updates` and `is_ending` through shared memory.
    """

    _now: tuple[str, int]

    def __init__(self) -> None:
        self.num_updates = ctypes.c_uint64()
        self.is_ending = ctypes.c_bool()
        self.write_progress: Callable[[], tuple[int, object] | None] = lambda: None
        self.is_stopping: Callable[[], bool] = lambda: False
        self.begin("")

    @property
    def has_nothing_to_save(self) -> bool:
        """True if this process has completed no update and is not writing or evaluating."""
        return not self.num_updates.value and not self.is_ending.value and self.now[0] in BEFORE_UPDATE

    @property
    def now(self) -> tuple[str, int]:
        """The current operation."""
        return self._now

    def advance(self, kind: str, update: int) -> None:
        """Start the next operation of the loop; it replaces the current one."""
        self._now = (kind, update)

    def advance_batch(self, kind: str, update: int) -> None:
        """Start a batch of this kind; from the second one of a phase on, the kind is recorded as completed."""
        if kind in self._started_batches:
            self.completed_kinds.add(kind)
        self._started_batches.add(kind)
        self.advance(kind, update)

    @contextmanager
    def doing(self, kind: str, update: int) -> Iterator[None]:
        """Interrupt the current operation inside the context; on exit, with or without an error, it continues."""
        interrupted = self._now
        self._now = (kind, update)
        try:
            yield
        finally:
            self._now = (interrupted[0], interrupted[1])  # a new tuple, so that its time starts again

    def begin(self, phase: str) -> None:
        """Start a phase and discard the times learned in the previous one."""
        # `now` first, because the operation that ends here belongs to the previous phase.
        self._now = (START, 0)
        self.phase, self.completed_kinds, self._started_batches = phase, set[str](), set[str]()


@dataclass(frozen=True)
class WatchdogLimits:
    """Timeouts in seconds; None: derived from recent durations."""

    update_s: float | None
    first_update_s: float
    data_s: float | None
    checkpoint_s: float

    @property
    def total_s(self) -> float:
        """The longest time between two collectives of a rank that is not overdue, unless derived timeouts grow.

        Between two collectives, a rank may load a batch, compute, and write a checkpoint.
        """
        return (
            self.first_update_s + self.checkpoint_s + (self.update_s or MIN_TIMEOUT_S) + (self.data_s or MIN_TIMEOUT_S)
        )

    def timeout_s(self, kind: str, *, is_first: bool, longest_s: float, least_s: float = 0.0) -> float:
        """Return the timeout of this kind of work; at least `least_s` if derived."""
        if kind in (CHECKPOINT, END):
            return self.checkpoint_s
        if is_first or kind == START:
            return self.first_update_s
        setting_s = self.data_s if kind == DATA else self.update_s
        return max(MIN_TIMEOUT_S, least_s, TIMEOUT_FACTOR * longest_s) if setting_s is None else setting_s


@dataclass(frozen=True)
class HangTraces:
    """Where a hang is recorded.

    write_stacks  writes the stacks; abandoned if it blocks, like `record_error`
    record_error  writes the error; by default it is discarded
    checkpoints   folder of the checkpoints; None: the run cannot be resumed
    file          name of the file with the stacks, in the run directory
    record_end    writes the exit code of a process that leaves before its first update
    """

    write_stacks: Callable[[str], object]
    record_error: Callable[[Hang], object] = lambda _: None
    checkpoints: Path | None = None
    file: str = "stacks.txt"
    record_end: Callable[[Exit], object] = lambda _: None


@contextmanager
def run_watchdog(plan: Plan, world: World, traces: HangTraces) -> Iterator[ProgressMark]:
    """Yield a progress mark, which a thread checks inside the context if the plan enables the watchdog."""
    progress_mark, choice = ProgressMark(), plan.choices["watchdog"]
    limits = make_chosen(WATCHDOGS, choice)
    table = HeartbeatTable(world.heartbeat_folder, world.rank) if world.heartbeat_folder is not None else None
    if table is not None:
        # Also without a watchdog: the launcher needs both to handle signals and to report a lost rank.
        progress_mark.num_updates, progress_mark.is_ending = table.num_updates(), table.is_ending()
    if limits is None:
        yield progress_mark
        return
    compiles = not plan.choices["compile"].uses("off")
    publish: Callable[[Heartbeat], None] = (
        _ExitOnHang(world, progress_mark, limits.checkpoint_s, traces) if table is None else table.publish
    )
    watchdog = _WatchdogThread(progress_mark, limits, publish, compiles=compiles, has_other_ranks=world.world_size > 1)
    if world.world_size == 1:  # otherwise the launcher ends all ranks, or none
        watchdog.leave = partial(_leave, traces)
    thread = threading.Thread(target=watchdog.run, name="watchdog", daemon=True)
    # Published before the thread starts, because a rank may be stopped, or hold the GIL, before the first check.
    publish(Heartbeat(ticks=1, limit_s=limits.first_update_s, kind=START, is_first=True))
    try:
        thread.start()
    except RuntimeError as error:
        raise SystemLimit(
            f"the watchdog thread cannot be started: {error}",
            fix="raise the limit on processes (ulimit -u), or use watchdog=off",
        ) from error
    try:
        yield progress_mark
    finally:
        watchdog.stop.set()
        thread.join()  # blocks if it is already ending the process
        publish(Heartbeat())


@dataclass
class _KindDurations:
    """Durations of one kind of work: the first, and later ones of measurable length.

    update     number of the update of the last operation
    num_later  number of later operations comparable with the first: one of each update, and all evaluation batches
    """

    first_s: float
    update: int
    num_later: int = 0
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_RECENT))


class WorkDurations:
    """Durations of each kind of work in this phase, from which timeouts are derived.

    The first duration, which may include compilation, is the reference until some later ones are known.

    completed_kinds  see `ProgressMark`
    compiles         whether models are compiled: a new shape, such as a smaller last batch, causes a recompilation
    """

    def __init__(self, limits: WatchdogLimits, completed_kinds: Set[str], *, compiles: bool) -> None:
        self.limits, self.completed_kinds, self.compiles = limits, completed_kinds, compiles
        self._by_kind: dict[str, _KindDurations] = {}

    def record(self, kind: str, update: int, seconds: float) -> None:
        """Record the duration of a completed piece of work."""
        durations = self._by_kind.get(kind)
        if durations is None:
            self._by_kind[kind] = _KindDurations(seconds, update)
            return
        # An update may have several operations, for example around an evaluation or a save; most of them are short.
        durations.num_later += kind == EVALUATION or update > durations.update
        durations.update = update
        if seconds > TICK_S:
            durations.recent.append(seconds)

    def limit_s(self, kind: str, *, is_first: bool | None = None) -> float:
        """Return the current timeout of this kind of work in seconds."""
        durations = self._by_kind.get(kind) or _KindDurations(0.0, 0)
        first_s = durations.first_s if durations.num_later < NUM_SETTLED else 0.0
        return self.limits.timeout_s(
            kind,
            is_first=kind not in self.completed_kinds if is_first is None else is_first,
            longest_s=max(first_s, *durations.recent, 0.0),
            least_s=RECOMPILE_FACTOR * durations.first_s if self.compiles else 0.0,
        )


class _WatchdogThread:
    """Watchdog thread: compare the progress mark with its previous value at each tick."""

    def __init__(
        self,
        progress_mark: ProgressMark,
        limits: WatchdogLimits,
        publish: Callable[[Heartbeat], None],
        *,
        compiles: bool,
        has_other_ranks: bool,
    ) -> None:
        self.progress_mark, self.limits, self.publish = progress_mark, limits, publish
        self.compiles, self.has_other_ranks = compiles, has_other_ranks
        self.leave: Callable[[], object] = lambda: None
        self.stop = threading.Event()
        self._main = threading.main_thread().ident or 0

    def run(self) -> None:
        """Run until `stop` is set."""
        ticks = 1  # the first heartbeat was published before the thread started
        same = 0  # ticks in the current operation
        before, phase = self.progress_mark.now, self.progress_mark.phase
        durations = WorkDurations(self.limits, self.progress_mark.completed_kinds, compiles=self.compiles)
        is_first = True  # set when an operation starts: a first operation remains first until it ends
        last_write: tuple[int, object] | None = None  # progress of the writer thread at the previous tick
        still = 0  # ticks without disk progress
        stopping = 0  # ticks since a stop request, with nothing to save
        while not self.stop.wait(TICK_S):
            ticks += 1
            now, same = self.progress_mark.now, same + 1
            is_stopping = self.progress_mark.is_stopping() and self.progress_mark.has_nothing_to_save
            stopping = stopping + 1 if is_stopping else 0
            if stopping * TICK_S > STOP_TIMEOUT_S:
                self.leave()
            write = self.progress_mark.write_progress()
            still, last_write = (still + 1 if write and write == last_write else 0), write
            if write and now[0] == CHECKPOINT:
                same = min(same, still)  # waiting for the disk is progress as long as the disk makes progress
            if now is not before:
                durations.record(*before, same * TICK_S)
                before, same = now, 0
                is_first = now[0] not in durations.completed_kinds
            if self.progress_mark.phase != phase:
                durations = WorkDurations(self.limits, self.progress_mark.completed_kinds, compiles=self.compiles)
                is_first = now[0] not in durations.completed_kinds  # several may have completed since the last check
                phase = self.progress_mark.phase
            waits = False
            if max(same, still) > _TICKS_BEFORE_STACKS:
                frames = stacks.current_frames(self._main)
                if _is_debugged(frames):
                    same = still = 0
                waits = self.has_other_ranks and bool(frames) and stacks.waits_for_ranks(frames[0])
            limit_s = durations.limit_s(now[0], is_first=is_first)
            if write and still * TICK_S > self.limits.checkpoint_s:
                self.publish(
                    Heartbeat(
                        ticks, still * TICK_S, self.limits.checkpoint_s, False, CHECKPOINT, False, write[0], phase
                    )
                )
                continue
            self.publish(Heartbeat(ticks, same * TICK_S, limit_s, waits, now[0], is_first, now[1], phase))


class _ExitOnHang:
    """Report a hang and end this process.

    wait_s  timeout in seconds while this rank waits for others
    """

    def __init__(self, world: World, progress_mark: ProgressMark, wait_s: float, traces: HangTraces) -> None:
        self.world, self.progress_mark, self.wait_s, self.traces = world, progress_mark, wait_s, traces

    def __call__(self, heartbeat: Heartbeat) -> None:
        # A rank that waits for others has a longer timeout: they may be writing a checkpoint, which it cannot see.
        if not heartbeat.is_overdue or (heartbeat.is_waiting and heartbeat.waited_s <= self.wait_s):
            return
        try:
            self._report(heartbeat)
        finally:
            _end_process(Exit.HANG)

    def _report(self, heartbeat: Heartbeat) -> None:
        """Print and record the hang within seconds, even if something blocks or fails."""
        world = self.world
        name = f"rank {world.rank} of {world.world_size}" if world.world_size > 1 else "the main thread"
        thread_stacks = {name: "has no stacks to show"}
        with suppress(Exception):
            thread_stacks[name] = stacks.dump()
        with suppress(Exception):  # also TimeoutError
            thread_stacks |= call_with_timeout(stacks.ANSWER_S + 1.0, _request_worker_stacks)
        is_written = False
        with suppress(Exception):
            call_with_timeout(REPORT_TIMEOUT_S, lambda: self.traces.write_stacks(stacks.join_stacks(thread_stacks)))
            is_written = True
        rank_name = name if self.world.world_size > 1 else ""
        file = self.traces.file if is_written else None
        error = hang_error(heartbeat, self.world.rank, rank_name, thread_stacks, file)
        with suppress(Exception):
            checkpoints = self.traces.checkpoints
            last = call_with_timeout(1.0, lambda: newest_name(checkpoints)) if checkpoints else None
            num_updates = int(self.progress_mark.num_updates.value)
            if last or num_updates:
                error.add_note(resume_note(last, num_updates))
        with suppress(Exception):
            lead = "\n" if os.isatty(2) else ""  # the line of a progress bar is incomplete
            call_with_timeout(1.0, lambda: os.write(2, f"{lead}{sanitize(format_error(error))}\n".encode()))
        if is_written:  # otherwise the disk would not accept this either
            with suppress(Exception):
                call_with_timeout(REPORT_TIMEOUT_S, lambda: self.traces.record_error(error))


def _leave(traces: HangTraces) -> None:
    """End this process, which has trained nothing, although its main thread is still waiting for data or compiling."""
    code, checkpoints = Exit.INTERRUPTED, traces.checkpoints
    with suppress(Exception):
        if checkpoints is not None and call_with_timeout(1.0, lambda: newest_name(checkpoints)):
            code = Exit.PREEMPTED
    with suppress(Exception):
        call_with_timeout(1.0, lambda: os.write(2, f"{LEFT_EARLY}\n".encode()))
    with suppress(Exception):
        call_with_timeout(REPORT_TIMEOUT_S, lambda: traces.record_end(code))
    _end_process(code)


def _end_process(code: Exit) -> None:
    """Kill the descendants of this process and exit."""
    with suppress(Exception):
        for pid in descendants(os.getpid()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    with suppress(Exception):
        folder = scratch.shared_folder()
        if folder is not None:
            call_with_timeout(1.0, lambda: shutil.rmtree(folder, ignore_errors=True))
    # sys.exit would end this thread only, and exit handlers may block as the main thread does.
    os._exit(code)


def _request_worker_stacks() -> dict[str, str]:
    folder = scratch.shared_folder()
    answers = stacks.request_stacks(folder, descendants(os.getpid())) if folder is not None else {}
    return {f"{WORKER} {pid}": text for pid, text in answers.items()}


def hang_error(
    heartbeat: Heartbeat, rank: int, rank_name: str, thread_stacks: Mapping[str, str], file: str | None = "stacks.txt"
) -> Hang:
    """Return the error for an overdue heartbeat: the operation, its place in the code, and what to do.

    rank_name      "rank 1 of 2", or empty
    thread_stacks  process -> its stacks, or a note about why there are none; the hanging process first
    file           file in the run's folder with all stacks; None: they could not be written
    """
    noun, key = _DESCRIPTIONS[heartbeat.kind]
    key = "first_update_s" if heartbeat.is_first and key != "checkpoint_s" else key
    what = noun.format(update=heartbeat.update) + (f" of phase {heartbeat.phase}" if heartbeat.phase else "")
    calls = (stacks.user_frame(stacks.parse_main_thread(text)) for text in thread_stacks.values())
    place = next(filter(None, calls), None)
    error = Hang(
        f"{what} timed out: waited {heartbeat.waited_s:.0f} s, but the limit is {heartbeat.limit_s:.0f} s",
        where=": ".join(filter(None, (rank_name, str(place) if place else ""))),
        fix=format_hang(thread_stacks, f"watchdog.{key}={max(10, round(4 * heartbeat.limit_s / 10) * 10)}", file),
    )
    if heartbeat.phase:
        error.place = {"rank": rank, "phase": heartbeat.phase, "update": heartbeat.update}
    return error


def format_hang(thread_stacks: Mapping[str, str], override: str = "", file: str | None = "stacks.txt") -> str:
    """Return a summary of the main threads' stacks, with only the first stuck data worker, and the fix.

    override  setting that raises the timeout
    """
    lines: list[str] = []
    num_workers = 0
    for name, text in thread_stacks.items():
        frames = stacks.parse_main_thread(text)
        if name.startswith(WORKER):
            if num_workers or not stacks.user_frame(frames):
                continue
            num_workers += 1
        if len(lines) > _MAX_STACK_LINES:
            break
        lines += [f"{name} is at", *stacks.format_summary(frames)] if frames else [f"{name} {text.strip()}"]
    lines += [
        f"see {file} in the run's folder for the stacks of all threads"
        if file
        else "the stacks of all threads cannot be written"
    ]
    lines += ["run the same command again" + (f"; if it may take that long, use {override}" if override else "")]
    return "\n".join(lines)


def _is_debugged(frames: list[stacks.StackFrame]) -> bool:
    if "pydevd" in sys.modules or any(stacks.is_debugger(frame.file) for frame in frames):
        return True
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return False
    return "\nTracerPid:\t0\n" not in status


def default(
    *,
    update_s: Positive | Auto = "auto",
    first_update_s: Positive = 1800.0,
    data_s: Positive | Auto = "auto",
    checkpoint_s: Positive = 600.0,
) -> WatchdogLimits | None:
    """End the run after a timeout, and report the stacks of all threads and ranks.

    update_s        timeout in seconds for an update, an evaluation batch or its summary; auto: ten times the
                    recent maximum, at least 50
    first_update_s  timeout in seconds for the first update or evaluation batch of a phase, including building, loading
                    and compiling
    data_s          timeout in seconds for loading a batch; auto: ten times the recent maximum, at least 50
    checkpoint_s    timeout in seconds without disk progress while a checkpoint is written, and timeout for the end of
                    the run
    """
    return WatchdogLimits(
        None if update_s == "auto" else update_s,
        first_update_s,
        None if data_s == "auto" else data_s,
        checkpoint_s,
    )


def off() -> WatchdogLimits | None:
    """Disable all timeouts."""
    return None


LEFT_EARLY = "Stopped before the first update: there was nothing to save."
_TICKS_BEFORE_STACKS = 4  # in one operation, before the stacks are read
_MAX_STACK_LINES = 12  # in a message
# kind -> its description, and the key of its timeout
_DESCRIPTIONS: Mapping[str, tuple[str, str]] = {
    START: ("the start", "first_update_s"),
    DATA: ("the next batch for update {update}", "data_s"),
    UPDATE: ("update {update}", "update_s"),
    EVALUATION: ("a batch of the evaluation after update {update}", "update_s"),
    SUMMARY: ("the summary of the evaluation after update {update}", "update_s"),
    CHECKPOINT: ("the checkpoint of update {update}", "checkpoint_s"),
    FINISH: ("the end", "update_s"),
    SEARCH: ("the search for non-finite values in update {update}", "update_s"),
    PREDICTION: ("prediction {update}", "update_s"),
    END: ("the end", "checkpoint_s"),
}

WATCHDOGS: Mapping[str, Callable[..., WatchdogLimits | None]] = {"default": default, "off": off}
