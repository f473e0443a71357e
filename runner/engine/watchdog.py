"""Detect hangs in a thread, report them with the stacks of all threads, and end the process.

The training thread reports its current operation by setting one attribute (`ProgressMark.now`), and never calls this
module. The watchdog thread checks the attribute periodically and counts its checks instead of the clock: a stopped
process, a suspended machine or a debugger cause one long pause between two checks, which counts as one check.

A single process ends itself. A rank of our launcher only publishes heartbeats (runner.host.heartbeat): the launcher
receives those of all ranks, so it can tell the blocking rank from those that wait for it.
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
from pathlib import Path

from runner.base.errors import Exit, Hang, SystemLimit, format_error, resume_note
from runner.base.secret import sanitize
from runner.base.values import Auto, Positive
from runner.base.world import World
from runner.config.option_table import make
from runner.distributed.timeouts import within
from runner.durable.checkpoint import newest
from runner.host import scratch, stacks
from runner.host.heartbeat import Heartbeat, HeartbeatTable
from runner.host.process_tree import descendants
from runner.plan.run_plan import Plan

START, DATA, UPDATE, EVALUATION, SUMMARY = "start", "data", "update", "evaluation", "summary"
CHECKPOINT, FINISH, PREDICTION, SEARCH, END = "checkpoint", "finish", "prediction", "search", "end"

WORKER = "data worker"
TICK_S = 0.25
LEAST_S = 50.0  # a hanging update is reported within a minute, with its stacks
TIMES = 10
RECENT = 100  # number of operations longer than a tick
SETTLED = 3  # number of later durations after which the first one, which may include compilation, is ignored
COMPILED_AGAIN = 1.5  # factor on the first duration: another shape, or a busier machine, may take longer
TELL_S = 3.0  # to record the hang on a disk that may itself hang


def _nowhere(_: Hang) -> None:
    """Discard the output."""


class ProgressMark:
    """Current activity of the run, read by the watchdog; the training thread only sets `now`.

    now      (kind, update): a new tuple for each operation, even if equal to the previous one
    done     kinds with one completed operation in this phase: the next one needs no compilation or start-up
    made     completed updates of all phases, including earlier processes; a shared value, 0 before the first one
    ending   whether training is over and only seconds remain, so that a stop has no effect; a shared value
    writing  returns the update of the checkpoint that a thread writes, and a counter of disk progress; else None
    """

    def __init__(self) -> None:
        self.made = ctypes.c_uint64()
        self.ending = ctypes.c_bool()
        self.writing: Callable[[], tuple[int, object] | None] = lambda: None
        self.begin("")

    def begin(self, phase: str) -> None:
        """Start a phase and discard the times learned in the previous one."""
        self.now: tuple[str, int] = (
            START,
            0,
        )  # first, because the operation that ends here belongs to the previous phase
        self.phase, self.done = phase, set[str]()


@dataclass(frozen=True)
class WatchdogLimits:
    """Timeouts in seconds; None: derived from recent durations."""

    update_s: float | None
    first_update_s: float
    data_s: float | None
    checkpoint_s: float

    def of(self, kind: str, *, is_first: bool, longest_s: float, least_s: float = 0.0) -> float:
        """Return the timeout of this kind of work; at least `least_s` if derived."""
        if kind in (CHECKPOINT, END):
            return self.checkpoint_s
        if is_first or kind == START:
            return self.first_update_s
        given = self.data_s if kind == DATA else self.update_s
        return max(LEAST_S, least_s, TIMES * longest_s) if given is None else given


@dataclass(frozen=True)
class HangTraces:
    """Where a hang is recorded.

    keep         writes the stacks; abandoned if it blocks, like `record`
    record       writes the error
    checkpoints  folder of the checkpoints; None: the run cannot be resumed
    file         name of the file with the stacks, in the run directory
    """

    keep: Callable[[str], object]
    record: Callable[[Hang], object] = _nowhere
    checkpoints: Path | None = None
    file: str = "stacks.txt"


@contextmanager
def watched(
    plan: Plan,
    world: World,
    traces: HangTraces,
) -> Iterator[ProgressMark]:
    """Yield a progress mark, which is watched inside the context if the plan enables the watchdog."""
    pulse, choice = ProgressMark(), plan.choices["watchdog"]
    limits = make(WATCHDOGS, choice.function, **choice.options)
    board = HeartbeatTable(world.heartbeat_folder, world.rank) if world.heartbeat_folder is not None else None
    if (
        board is not None
    ):  # also without a watchdog: the launcher needs them to handle signals and to report a lost rank
        pulse.made, pulse.ending = board.num_updates(), board.is_ending()
    if limits is None:
        yield pulse
        return
    compiles = plan.choices["compile"].name != "off"
    alone = _ExitOnHang(world, pulse, limits.checkpoint_s, traces)
    show: Callable[[Heartbeat], None] = board.publish if board is not None else alone
    watchdog = _WatchdogThread(pulse, limits, show, compiles=compiles, is_one_of_many=world.world_size > 1)
    thread = threading.Thread(target=watchdog.run, name="watchdog", daemon=True)
    # At once: a rank may be stopped, or hold the GIL, before the first check.
    show(Heartbeat(ticks=1, limit_s=limits.first_update_s, kind=START, is_first=True))
    try:
        thread.start()
    except RuntimeError as error:
        raise SystemLimit(
            f"the thread that watches for hangs cannot be started: {error}",
            fix="raise the limit on processes (ulimit -u), or use watchdog=off",
        ) from error
    try:
        yield pulse
    finally:
        watchdog.stop.set()
        thread.join()  # blocks if it is already ending the process
        show(Heartbeat())


@dataclass
class _Known:
    """Durations of one kind of work: the first, and later ones of measurable length.

    update     number of the update of the last operation
    num_later  operations as representative as the first one: those of later updates, or of an evaluation
    """

    first_s: float
    update: int
    num_later: int = 0
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))


class Waited:
    """Durations of each kind of work in this phase, from which timeouts are derived.

    The first duration, which may include compilation, is the reference until some later ones are known.

    compiles  whether models are compiled: another shape, such as a smaller last batch, is compiled again
    """

    def __init__(self, limits: WatchdogLimits, done: Set[str], *, compiles: bool) -> None:
        self.limits, self.done, self.compiles = limits, done, compiles
        self._known: dict[str, _Known] = {}

    def took(self, kind: str, update: int, seconds: float) -> None:
        """Record the duration of a completed piece of work."""
        known = self._known.get(kind)
        if known is None:
            self._known[kind] = _Known(seconds, update)
            return
        # An update may have several operations, for example around an evaluation or a save; most of them are short.
        known.num_later += kind == EVALUATION or update > known.update
        known.update = update
        if seconds > TICK_S:
            known.recent.append(seconds)

    def limit_s(self, kind: str, *, is_first: bool | None = None) -> float:
        """Return the current timeout of this kind of work in seconds."""
        known = self._known.get(kind) or _Known(0.0, 0)
        of_first = known.first_s if known.num_later < SETTLED else 0.0
        return self.limits.of(
            kind,
            is_first=kind not in self.done if is_first is None else is_first,
            longest_s=max(of_first, *known.recent, 0.0),
            least_s=COMPILED_AGAIN * known.first_s if self.compiles else 0.0,
        )


class _WatchdogThread:
    """Watchdog thread: compare the pulse with its previous value at each tick."""

    def __init__(
        self,
        pulse: ProgressMark,
        limits: WatchdogLimits,
        show: Callable[[Heartbeat], None],
        *,
        compiles: bool,
        is_one_of_many: bool,
    ) -> None:
        self.pulse, self.limits, self.show = pulse, limits, show
        self.compiles, self.is_one_of_many = compiles, is_one_of_many
        self.stop = threading.Event()
        self._main = threading.main_thread().ident or 0

    def run(self) -> None:
        """Run until `stop` is set."""
        ticks, same = 1, 0  # the first heartbeat was published before the thread started
        before, phase = self.pulse.now, self.pulse.phase
        waited = Waited(self.limits, self.pulse.done, compiles=self.compiles)
        is_first = True  # as of the start of the operation: a first operation remains one until its end
        written: tuple[int, object] | None = None  # by the writer thread
        still = 0  # ticks without disk progress
        while not self.stop.wait(TICK_S):
            ticks += 1
            now, same = self.pulse.now, same + 1
            write = self.pulse.writing()
            still, written = (still + 1 if write and write == written else 0), write
            if write and now[0] == CHECKPOINT:
                same = min(same, still)  # waiting for the disk is progress as long as the disk makes progress
            if now is not before:
                waited.took(*before, same * TICK_S)
                before, same = now, 0
                is_first = now[0] not in waited.done
            if self.pulse.phase != phase:
                waited = Waited(self.limits, self.pulse.done, compiles=self.compiles)
                is_first = now[0] not in waited.done  # several may have completed since the last check
                phase = self.pulse.phase
            waits = False
            if max(same, still) > _CLOSER_LOOK:
                frames = stacks.current_frames(self._main)
                if _is_debugged(frames):
                    same = still = 0
                waits = self.is_one_of_many and bool(frames) and stacks.waits_for_ranks(frames[0])
            limit_s = waited.limit_s(now[0], is_first=is_first)
            if write and still * TICK_S > self.limits.checkpoint_s:
                self.show(
                    Heartbeat(
                        ticks, still * TICK_S, self.limits.checkpoint_s, False, CHECKPOINT, False, write[0], phase
                    )
                )
                continue
            self.show(Heartbeat(ticks, same * TICK_S, limit_s, waits, now[0], is_first, now[1], phase))


class _ExitOnHang:
    """End this process after a timeout."""

    def __init__(self, world: World, pulse: ProgressMark, patience_s: float, traces: HangTraces) -> None:
        self.world, self.pulse, self.patience_s, self.traces = world, pulse, patience_s, traces

    def __call__(self, heartbeat: Heartbeat) -> None:
        # A rank cannot see what others do: they may be writing a checkpoint.
        if not heartbeat.is_overdue or (heartbeat.is_waiting and heartbeat.waited_s <= self.patience_s):
            return
        try:
            self._report(heartbeat)
        finally:
            with suppress(Exception):
                for pid in descendants(os.getpid()):
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            with suppress(Exception):
                folder = scratch.shared_folder()
                if folder is not None:
                    within(1.0, lambda: shutil.rmtree(folder, ignore_errors=True))
            os._exit(Exit.HANG)

    def _report(self, heartbeat: Heartbeat) -> None:
        """Print and record the hang within seconds, even if something blocks or fails."""
        of_threads = {_named(self.world): "has no stacks to show"}
        with suppress(Exception):
            of_threads[_named(self.world)] = stacks.dump()
        with suppress(Exception):  # also TimeoutError
            of_threads |= within(stacks.ANSWER_S + 1.0, _of_workers)
        is_kept = False
        with suppress(Exception):
            within(TELL_S, lambda: self.traces.keep(stacks.join_stacks(of_threads)))
            is_kept = True
        who = _named(self.world) if self.world.world_size > 1 else ""
        error = hang(heartbeat, self.world.rank, who, of_threads, self.traces.file if is_kept else None)
        with suppress(Exception):
            checkpoints = self.traces.checkpoints
            last = within(1.0, lambda: newest(checkpoints)) if checkpoints else None
            made = int(self.pulse.made.value)
            if last or made:
                error.add_note(resume_note(last, made))
        with suppress(Exception):
            lead = "\n" if os.isatty(2) else ""  # the line of a progress bar is incomplete
            within(1.0, lambda: os.write(2, f"{lead}{sanitize(format_error(error))}\n".encode()))
        if is_kept:  # otherwise the disk would not accept this either
            with suppress(Exception):
                within(TELL_S, lambda: self.traces.record(error))


def _of_workers() -> dict[str, str]:
    folder = scratch.shared_folder()
    answers = stacks.request_stacks(folder, descendants(os.getpid())) if folder is not None else {}
    return {f"{WORKER} {pid}": text for pid, text in answers.items()}


def hang(
    heartbeat: Heartbeat, rank: int, who: str, of_threads: Mapping[str, str], file: str | None = "stacks.txt"
) -> Hang:
    """Return the error for an overdue heartbeat: the operation, its place in the code, and what to do.

    who         "rank 1 of 2", or empty
    of_threads  process -> its stacks, or a note about why there are none; the hanging process first
    file        file in the run's folder with all stacks; None: they could not be written
    """
    noun, key = _WORDS[heartbeat.kind]
    key = "first_update_s" if heartbeat.is_first and key != "checkpoint_s" else key
    what = noun.format(update=heartbeat.update) + (f" of phase {heartbeat.phase}" if heartbeat.phase else "")
    calls = (stacks.user_frame(stacks.parse_main_thread(text)) for text in of_threads.values())
    place = next(filter(None, calls), None)
    error = Hang(
        f"{what} hangs: waited {heartbeat.waited_s:.0f} s, and the limit is {heartbeat.limit_s:.0f} s",
        where=": ".join(filter(None, (who, str(place) if place else ""))),
        fix=way_out(of_threads, f"watchdog.{key}={_rounded(4 * heartbeat.limit_s)}", file),
    )
    if heartbeat.phase:
        error.place = {"rank": rank, "phase": heartbeat.phase, "update": heartbeat.update}
    return error


def way_out(of_threads: Mapping[str, str], longer: str = "", file: str | None = "stacks.txt") -> str:
    """Return a summary of the main threads' stacks and the fix; of data workers only the first stuck one."""
    lines: list[str] = []
    num_workers = 0
    for name, text in of_threads.items():
        frames = stacks.parse_main_thread(text)
        if name.startswith(WORKER):
            if num_workers or not stacks.user_frame(frames):
                continue
            num_workers += 1
        if len(lines) > _LINES:
            continue
        lines += [f"{name} is at", *stacks.format_summary(frames)] if frames else [f"{name} {text.strip()}"]
    lines += [f"{file} in the run's folder has all threads" if file else "the stacks of all threads cannot be written"]
    lines += ["run the same command again" + (f"; if it takes that long: {longer}" if longer else "")]
    return "\n".join(lines)


def _named(world: World) -> str:
    return f"rank {world.rank} of {world.world_size}" if world.world_size > 1 else "the main thread"


def _is_debugged(frames: list[stacks.StackFrame]) -> bool:
    """Return True if a debugger is attached to this process."""
    if "pydevd" in sys.modules or any(stacks.is_debugger(frame.file) for frame in frames):
        return True
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return False
    return "\nTracerPid:\t0\n" not in status


def _rounded(seconds: float) -> int:
    return max(10, round(seconds / 10) * 10)


def default(
    *,
    update_s: Positive | Auto = "auto",
    first_update_s: Positive = 1800.0,
    data_s: Positive | Auto = "auto",
    checkpoint_s: Positive = 600.0,
) -> WatchdogLimits | None:
    """End the run after a timeout, with the stacks of all threads and ranks.

    update_s        timeout in seconds for an update, an evaluation batch or its summary; auto: 50, or ten times the
                    recent maximum
    first_update_s  timeout in seconds for the first one in a phase, including building, loading and compiling
    data_s          timeout in seconds for loading a batch; auto: 50, or ten times the recent maximum
    checkpoint_s    timeout in seconds without disk progress while a checkpoint is written, and for the end of the run
    """
    return WatchdogLimits(
        None if update_s == "auto" else update_s,
        first_update_s,
        None if data_s == "auto" else data_s,
        checkpoint_s,
    )


def off() -> WatchdogLimits | None:
    """No timeouts."""
    return None


_CLOSER_LOOK = 4  # ticks
_LINES = 12  # of stacks in a message
_WORDS: Mapping[str, tuple[str, str]] = {
    START: ("the start", "first_update_s"),
    DATA: ("the next batch for update {update}", "data_s"),
    UPDATE: ("update {update}", "update_s"),
    EVALUATION: ("a batch of the evaluation after update {update}", "update_s"),
    SUMMARY: ("the summary of the evaluation after update {update}", "update_s"),
    CHECKPOINT: ("the checkpoint of update {update}", "checkpoint_s"),
    FINISH: ("the end", "update_s"),
    SEARCH: ("the search for what is not finite in update {update}", "update_s"),
    PREDICTION: ("prediction {update}", "update_s"),
    END: ("the end", "checkpoint_s"),
}

WATCHDOGS: Mapping[str, Callable[..., WatchdogLimits | None]] = {"default": default, "off": off}
