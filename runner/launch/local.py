"""Fork and supervise the ranks of a run on this machine, and report the rank that fails.

torchrun and torch.distributed.elastic are not used: torchrun exits with 1 for every exit code, and the elastic engine
may report a rank that only lost a peer instead of the one that failed (docs/decisions/0009).
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

from runner.base.errors import AccelRunError, Exit, Hang, Problem, RankLost, SystemLimit, rebuild_error
from runner.base.loaded_torch import cuda_is_initialized
from runner.base.rank_env import RankInfo
from runner.base.text import abbreviate
from runner.durable.signals import STOP_SIGNALS, install_handler, restore_handlers
from runner.engine.process.watchdog import LEFT_EARLY, STOP_TIMEOUT_S
from runner.host import output, stacks
from runner.host.process_tree import KILL_TIMEOUT_S, children, kill_descendants, subreaper
from runner.host.scratch import private_folder
from runner.launch.hangs import TICK_S, HangDetector, HangReport
from runner.launch.rank_process import Main, read_report, run_rank_process
from runner.records.events import Console


@dataclass(frozen=True)
class Failure:
    """How a rank failed.

    exit_code     exit code of the rank; 128 + n for signal n
    signal        name of the signal that ended it, or None
    what          description: "was ended by SIGKILL", "raised ValueError: no such file"
    problems      problems of the AccelRunError that ended the rank, if any
    traceback     traceback of the exception or crash; empty if there is none
    is_victim     the failure is a consequence of another rank's exit
    seconds       time from the start of the ranks to the failure
    exited_early  it was killed, or exited without an exception
    """

    rank: int
    exit_code: int
    signal: str | None
    what: str
    problems: tuple[Problem, ...]
    traceback: str
    is_victim: bool
    seconds: float
    exited_early: bool = False


Notify = Callable[[str, Failure | None], None]  # a message, and the rank that failed first; None: no rank failed


@dataclass(frozen=True)
class LaunchResult:
    """How the ranks of one start ended.

    code         0; 75 if a rank saved and stopped; 130 if the user forced the end; else the exit code of the cause
    cause        the first failure that is not a consequence of another one; None: no rank failed
    failures     in order of time
    killed       ranks that were killed, because they hung or did not exit after the failure of another rank
    results      the second value that `main` returned, by rank; None for ranks that failed
    stop         the first signal that requested a stop, such as "SIGINT", or None; ranks must not be restarted after it
    num_updates  number of completed updates of all phases; 0 if this start completed none
    place        rank, phase and update of the cause, those of them that are known
    """

    code: int
    cause: Failure | None
    failures: tuple[Failure, ...]
    killed: tuple[int, ...]
    results: tuple[Any, ...]
    stop: str | None
    num_updates: int = 0
    place: Mapping[str, Any] = field(default_factory=dict)


def run_ranks(
    main: Main,
    num_ranks: int,
    *,
    attempt: int = 0,
    grace_s: float = 2.0,
    on_notice: Notify | None = None,
    saves: bool = True,
) -> LaunchResult:
    """Call `main(member)` in a forked process per rank; return how they ended once all have exited.

    `main` returns an exit code and a JSON-serializable result; an AccelRunError ends the rank with its exit code.

    After the first failure, the other ranks have `grace_s` seconds to exit (twice that, until a rank is known to be
    the cause); then they are killed. After SIGINT, SIGTERM, SIGHUP or SIGUSR1, this process sends SIGUSR1 to the ranks,
    which save and stop; a second SIGINT or SIGTERM kills them, or a third one if training is already over on rank 0. If
    the ranks hang, the stacks of all are collected, the blocking rank is reported, and all are killed (exit code 83).

    This process must have one thread, must not have initialized CUDA, and must not have computed on several threads:
    locks and thread pools do not survive a fork. Raises SystemLimit if it has other threads, as in a debugger, or has
    initialized CUDA, and SystemLimit or CannotCreate if the ranks cannot be started.

    on_notice  called immediately when a rank fails, or a process does not exit after SIGKILL; default: a warning
    saves      the ranks have something to save after a stop request; otherwise the first request kills them (130)
    """
    output.stop_threads()  # a thread writes the output while the terminal is stalled
    _check_can_fork(num_ranks)
    _check_descriptors(num_ranks)
    _check_threads(num_ranks)
    with private_folder() as folder, _SignalRequests(saves) as requests, _cleanup() as ranks:
        started = time.monotonic()
        for rank in range(num_ranks):
            member = RankInfo(rank, rank, num_ranks, num_ranks, f"file://{folder}/store", attempt)
            _fork(main, member, folder, requests, ranks)
        supervisor = _Supervisor(ranks, folder, requests, started, grace_s, on_notice or _warn)
        supervisor.run()
        return supervisor.result()


def _check_can_fork(num_ranks: int) -> None:
    """Raise SystemLimit if ranks forked from this process would not work."""
    others = [thread.name for thread in threading.enumerate() if thread is not threading.current_thread()]
    if threading.current_thread() is not threading.main_thread():
        what = f"ranks must be started from the main thread, not from thread {threading.current_thread().name}"
    elif others:
        what = f"ranks cannot be forked while other threads run, such as a debugger's: {abbreviate(others)}"
    elif cuda_is_initialized():
        what = "ranks cannot be forked after CUDA was initialized in this process"
    else:
        return
    raise SystemLimit(
        what, fix=f"start the ranks with torchrun: torchrun --nproc-per-node={num_ranks} -m runner train ..."
    )


def _check_descriptors(num_ranks: int) -> None:
    """Raise SystemLimit if a rank could not open the files and sockets that it needs to join the others.

    Otherwise, Gloo would abort the rank (SIGABRT) in a thread that accepts connections.
    """
    opened = []
    try:
        for _ in range(_JOIN_DESCRIPTORS + num_ranks):
            opened.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        raise SystemLimit(
            f"{num_ranks} ranks need more open files than the limit of this process allows: {error.strerror}",
            fix="raise the limit on open files (ulimit -n), or use fewer ranks",
        ) from error
    finally:
        for descriptor in opened:
            os.close(descriptor)


def _check_threads(num_ranks: int) -> None:
    """Raise SystemLimit if the ranks could not start the threads with which Gloo connects them.

    Otherwise, a rank would block forever: if the constructor of a Gloo process group cannot start its second thread, it
    destroys the condition variable that its first thread waits for (torch 2.13).
    """
    pid = -1
    with suppress(OSError):
        pid = os.fork()  # not in this process: a thread may still be counted after it was joined
    if pid == 0:
        code = 1
        try:
            threading.stack_size(1 << 16)
            for _ in range(num_ranks * (1 + _JOIN_THREADS) - 1):
                threading.Thread(target=threading.Event().wait, daemon=True).start()
            code = 0
        finally:
            os._exit(code)  # whatever the error is, the child must not continue as a second launcher
    if pid == -1 or os.waitpid(pid, 0)[1]:
        raise SystemLimit(
            f"{num_ranks} ranks need more processes and threads than the limits of this process allow",
            fix="raise the limit with ulimit -u (in a container: pids), or use fewer ranks",
        )


def _warn(text: str, _: Failure | None) -> None:
    Console().warning(text)


def to_error(result: LaunchResult) -> AccelRunError:
    """Return the error for a failure: the rank's own error with its exit code, if it raised one, else RankLost."""
    cause = result.cause
    assert cause is not None, "nothing failed"
    if cause.exit_code == Exit.HANG and cause.problems:  # its message names the rank
        return rebuild_error(Hang, cause.problems, Exit.HANG, result.place)
    if cause.problems:
        is_specific = cause.rank != 0 and not any(
            other.problems == cause.problems for other in result.failures if other is not cause
        )
        lead = f"rank {cause.rank}: " if is_specific else ""  # an error that all ranks report names no rank
        problems = [
            Problem(problem.what, f"{lead}{problem.where}".removesuffix(": "), problem.fix)
            for problem in cause.problems
        ]
        return rebuild_error(AccelRunError, tuple(problems), Exit(cause.exit_code), result.place)
    what = f"rank {cause.rank} of {len(result.results)} {cause.what}, after {cause.seconds:.1f} s"
    if cause.is_victim and result.killed:
        ranks = abbreviate(result.killed)
        what += f"; rank {ranks} did not respond" if len(result.killed) == 1 else f"; ranks {ranks} did not respond"
    if cause.signal and cause.traceback:  # a crash in C code; stacks.txt has all threads
        fix = "\n".join([*_crash_site(cause.traceback), _RERUN_HINT])
    else:
        hint = _SIGNAL_HINTS.get(cause.signal or "", _RERUN_HINT)
        fix = f"{cause.traceback}\n{_RERUN_HINT}" if cause.traceback else hint
    error = RankLost(what, fix=fix.replace("\n", "\n    "))
    error.place = result.place
    if cause.signal is None and cause.exit_code == Exit.SOFTWARE and not cause.is_victim:
        error.exit_code = Exit.SOFTWARE  # the same exit code as with one rank
    return error


def _crash_site(traceback: str) -> list[str]:
    frames = stacks.parse_main_thread(traceback)
    lines = [
        "the main thread was at",
        *stacks.format_summary(frames),
        "see stacks.txt in the run's folder for the stacks of all threads",
    ]
    if frames and stacks.is_collective(frames[0]):
        lines.append("check that all ranks call the same collectives in the same order, with tensors of the same size")
    return lines


# ---------------------------------------------------------------- supervision


@dataclass
class _Rank:
    """A forked rank. It stays a zombie until all ranks have exited, so that its PID is not reused."""

    number: int
    pid: int
    descriptor: int
    status: int | None = None  # exit code, or minus the signal
    result: Any = None
    is_killed: bool = False

    def send(self, number: int) -> None:
        if self.status is None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.descriptor, number)

    def send_to_group(self, number: int) -> None:
        with suppress(ProcessLookupError):  # the rank has not called setsid yet
            os.killpg(self.pid, number)

    def kill(self) -> None:
        self.is_killed = self.is_killed or self.status is None
        self.send(signal.SIGKILL)


@dataclass
class _Supervisor:
    """Waits for exits and stop requests, and handles the other ranks accordingly."""

    ranks: list[_Rank]
    folder: Path
    requests: _SignalRequests
    started: float
    grace_s: float
    on_notice: Notify
    failures: list[Failure] = field(default_factory=list)
    limit: float = float("inf")  # time at which the remaining ranks are killed
    next_reminder: float = 0.0
    is_reported: bool = False
    is_forced: bool = False
    left_early: bool = False
    leave_at: float = float("inf")  # time at which the ranks are killed if there is nothing to save
    hangs: HangDetector = field(init=False)

    def __post_init__(self) -> None:
        self.hangs = HangDetector(self.folder, {rank.number: rank.pid for rank in self.ranks})

    def run(self) -> None:
        while living := [rank for rank in self.ranks if rank.status is None]:
            for rank in _wait(living, self.requests, self._wait_s()):
                info = os.waitid(os.P_PID, rank.pid, os.WEXITED | os.WNOWAIT)  # without reaping it
                assert info is not None
                rank.status = info.si_status if info.si_code == os.CLD_EXITED else -info.si_status
                self._record_exit(rank)
            self._handle_requests()
            found = None if self.failures else self.hangs.check([rank.number for rank in living if rank.status is None])
            if found is not None:
                self._record_hang(found)
                self._handle_requests()
            if time.monotonic() > self.limit + KILL_TIMEOUT_S:
                text = "a process does not exit after SIGKILL: it is blocked in the kernel, perhaps by a hanging disk"
                self.on_notice(text, None)
                return
        if self.failures and not self.is_reported:
            self._report(self._cause())

    def _record_hang(self, found: HangReport) -> None:
        """End all ranks; the blocking rank is the cause."""
        problem, seconds = found.error.problems[0], time.monotonic() - self.started
        self.failures.append(
            Failure(found.rank, int(Exit.HANG), None, problem.what, (problem,), found.stacks, False, seconds)
        )
        self.limit = time.monotonic()
        self._report(self.failures[-1])

    def result(self) -> LaunchResult:
        cause = self._cause() if self.failures else None
        stopped = [rank.status for rank in self.ranks if rank.status in (Exit.PREEMPTED, Exit.INTERRUPTED)]
        code = cause.exit_code if cause else int(max(stopped, default=Exit.DONE))
        return LaunchResult(
            int(Exit.INTERRUPTED) if self.is_forced else int(Exit.PREEMPTED) if self.left_early else code,
            cause,
            tuple(sorted(self.failures, key=lambda failure: failure.seconds)),
            tuple(rank.number for rank in self.ranks if rank.is_killed),
            tuple(rank.result for rank in self.ranks),
            self.requests.stop,
            self.hangs.num_updates(),
            self.hangs.last_place(cause.rank) if cause else {},
        )

    def _record_exit(self, rank: _Rank) -> None:
        assert rank.status is not None
        report = read_report(self.folder, rank.number)
        is_unsaved = rank.status == Exit.INTERRUPTED and report.result is not None
        is_success = rank.status in (Exit.DONE, Exit.PREEMPTED)
        exited_early = is_success and not report.is_complete  # by os._exit during training
        if (is_success and not exited_early) or is_unsaved:
            rank.result = report.result
            return
        if rank.is_killed and rank.status == -signal.SIGKILL:
            return
        rank.is_killed = False  # it failed before the kill
        signal_name = _signal_name(-rank.status) if rank.status < 0 else None
        what = report.what or f"exited early with exit code {rank.status}"
        failure = Failure(
            rank.number,
            128 - rank.status if signal_name else int(Exit.RANK_LOST) if exited_early else rank.status,
            signal_name,
            f"was ended by {signal_name}" if signal_name else what,
            report.problems,
            report.traceback,
            not signal_name and (report.is_victim or rank.status == Exit.RANK_LOST),
            (report.time_s or time.monotonic()) - self.started,
            exited_early=signal_name is not None or not report.what,
        )
        # If a rank has waited too long for a stopped one, NCCL's watchdog aborts it, or gloo raises an error in it.
        if (failure.is_victim or signal_name == "SIGABRT") and not any(not other.is_victim for other in self.failures):
            stopped = self.hangs.report_stopped([other.number for other in self.ranks if other.status is None])
            if stopped is not None:
                self.failures.append(replace(failure, is_victim=True))
                self._record_hang(stopped)
                return
        self.failures.append(failure)
        now = time.monotonic()
        self.limit = min(self.limit, now + self.grace_s * (2 if failure.is_victim else 1))
        if not failure.is_victim and not self.is_reported:
            self._report(failure)

    def _report(self, failure: Failure) -> None:
        self.is_reported = True
        text = f"rank {failure.rank} of {len(self.ranks)} {failure.what}, after {failure.seconds:.1f} s"
        self.on_notice(text, failure)

    def _cause(self) -> Failure:
        return min(self.failures, key=lambda failure: (failure.is_victim, failure.seconds))

    def _handle_requests(self) -> None:
        now = time.monotonic()
        if self.requests.should_suspend:
            for rank in self.ranks:  # in separate sessions, which the terminal does not signal
                rank.send_to_group(signal.SIGSTOP)
            self.requests.suspend()
            for rank in self.ranks:
                rank.send_to_group(signal.SIGCONT)
        if self.requests.stop and now >= self.next_reminder:
            # Repeated, because a rank may not have installed its handler yet; for others, a repetition is a no-op.
            self.next_reminder = now + REMINDER_S
            for rank in self.ranks:
                rank.send(signal.SIGUSR1)
        if self.requests.stop:
            self.leave_at = min(self.leave_at, now + STOP_TIMEOUT_S)
        if now >= self.leave_at and not self.left_early and not self.failures and self.hangs.has_nothing_to_save():
            self.left_early, self.limit = True, now
            output.write_if_ready(f"{LEFT_EARLY}\n")
        is_first_enough = self.requests.stop is not None and not self.requests.saves
        if is_first_enough or self.requests.num_stops > 1 + self.hangs.is_ending():
            self.is_forced = True
            self.limit = min(self.limit, now)
        if now >= self.limit:
            for rank in self.ranks:
                rank.kill()

    def _wait_s(self) -> float:
        now = time.monotonic()
        due = min(self.limit, self.next_reminder if self.requests.stop else float("inf"), now + TICK_S)
        return max(0.0, due - now) if now < self.limit else 0.1


class _SignalRequests:
    """Records the requests that signals make inside the context; `wakeup_fd` becomes readable after each signal.

    saves  the ranks have something to save; otherwise, the first request kills them
    """

    def __init__(self, saves: bool) -> None:
        self.saves = saves
        self.stop: str | None = None
        self.should_suspend = False
        self.num_stops = 0  # SIGINT and SIGTERM; SIGUSR1 and SIGHUP do not count, as in a run of one process

    def __enter__(self) -> _SignalRequests:
        self.wakeup_fd, self._wakeup_write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._previous_wakeup_fd = signal.set_wakeup_fd(self._wakeup_write_fd, warn_on_full_buffer=False)
        self._previous = install_handler((*STOP_SIGNALS, signal.SIGTSTP), self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        restore_handlers(self._previous)
        signal.set_wakeup_fd(self._previous_wakeup_fd)
        self.close()

    def close(self) -> None:
        os.close(self.wakeup_fd)
        os.close(self._wakeup_write_fd)

    def drain(self) -> None:
        with suppress(BlockingIOError):
            os.read(self.wakeup_fd, 4096)

    def suspend(self) -> None:
        self.should_suspend = False
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, self._handle)

    def _handle(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGTSTP:
            self.should_suspend = True
            return
        self.stop = self.stop or signal.Signals(number).name
        self.num_stops += number not in (signal.SIGUSR1, signal.SIGHUP)


def _wait(living: Iterable[_Rank], requests: _SignalRequests, timeout_s: float) -> list[_Rank]:
    """Return the ranks that have exited; empty after `timeout_s` or a signal."""
    by_descriptor = {rank.descriptor: rank for rank in living}
    poll = select.poll()
    for descriptor in (requests.wakeup_fd, *by_descriptor):
        poll.register(descriptor, select.POLLIN)
    ready = [descriptor for descriptor, _ in poll.poll(timeout_s * 1000 + 1)]
    requests.drain()
    return [by_descriptor[descriptor] for descriptor in ready if descriptor in by_descriptor]


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


# ---------------------------------------------------------------- starting


def _fork(main: Main, member: RankInfo, folder: Path, requests: _SignalRequests, ranks: list[_Rank]) -> None:
    """Add the rank that runs `main` to `ranks`. Raises SystemLimit if the system cannot start it.

    Signals are blocked during the fork: an exception in a handler, such as the timeout of a test, would leave a rank
    that is not in the list and would never be killed.
    """
    supervisor = os.getpid()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()  # otherwise the rank would print the buffered output again
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        pid = os.fork()
        if pid == 0:
            requests.close()
            for other in ranks:  # otherwise rank n would hold n descriptors, and their total would grow quadratically
                os.close(other.descriptor)
            run_rank_process(main, member, supervisor, folder, {signal.Signals(number) for number in mask})
        try:
            ranks.append(_Rank(member.rank, pid, os.pidfd_open(pid)))
        except BaseException:  # including exceptions in handlers, which run if another thread receives the signal
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
    except OSError as error:
        raise SystemLimit(
            f"rank {member.rank} of {member.world_size} cannot be started: {error.strerror}",
            fix="raise the limits on processes (ulimit -u) and open files (ulimit -n), or use fewer ranks",
        ) from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@contextmanager
def _cleanup() -> Iterator[list[_Rank]]:
    """Yield a list for ranks; on exit, kill them and their descendants in any case.

    Inside the context, this process is the subreaper, so that it finds orphans. Every rank leads a separate session;
    the remaining processes of these sessions are killed. Descendants in other sessions, such as a tracker's process
    that writes the last rows, are left alone if no rank failed, and otherwise have OTHERS_S seconds to exit.
    """
    ranks: list[_Rank] = []
    existing = children()
    with subreaper():
        try:
            yield ranks
        finally:
            for rank in ranks:
                rank.kill()
            success_codes = (Exit.DONE, Exit.PREEMPTED, Exit.INTERRUPTED)
            has_failed = any(rank.status not in success_codes and not rank.is_killed for rank in ranks)
            kill_descendants({rank.pid for rank in ranks}, existing, OTHERS_S if has_failed else None)
            for rank in ranks:
                os.close(rank.descriptor)
                os.waitpid(rank.pid, os.WNOHANG)


REMINDER_S = 0.5  # interval between stop requests, since a rank may not have installed its handler yet
_JOIN_DESCRIPTORS = 10  # besides a socket per peer: crash file, folders, pipe, store, Gloo's listener and poll
_JOIN_THREADS = 3  # of Gloo: one per device, and two for collectives
OTHERS_S = 4.0  # for processes that outlive their rank on purpose; with the grace period, all have ended after 10 s

_RERUN_HINT = "run the same command again"
_SIGNAL_HINTS: Mapping[str, str] = {
    "SIGKILL": "run the command again; if memory was short (see `dmesg`), use a smaller dataloader.num_workers or"
    " micro_batch_size"
}
