"""Run a check in a subprocess, so that a crash, a hang or an exception becomes a finding."""

from __future__ import annotations

import dataclasses
import faulthandler
import os
import re
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Set
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection, Pipe, wait
from typing import IO, Any, NoReturn

from runner.base.errors import AccelRunError
from runner.base.secret import sanitize
from runner.base.text import error_line, first_line
from runner.host.parent_death import die_with_parent
from runner.host.process_tree import children, kill_descendants, process_state
from runner.tools.doctor.findings import CheckContext, CheckResult, DoctorCheck, SharedResult, failed

TICK_S = 0.1  # polling interval
Watch = Callable[[str, float], None]  # (subject, seconds so far), at each tick


def run_check(
    name: str, check: DoctorCheck, context: CheckContext, watch: Watch, shared_results: dict[str, str]
) -> Iterator[CheckResult]:
    """Yield the findings of a check, and the reason if its process ends early.

    watch           called about every TICK_S
    shared_results  receives the SharedResult of the check, if there is one, under the name of the check
    """
    try:
        process = _CheckProcess(check, context)
    except OSError as error:
        what = f"no process could be started: {error.strerror}"
        yield _label(failed("", what, "raise ulimit -u and ulimit -n, or end other processes"), name, check, 0.0)
        return
    since = context.clock()
    try:
        for finding in process.findings(watch):
            yield _label(finding, name, check, finding.took_s)
            since = context.clock()
    finally:
        process.close()
    if process.shared_result is not None:
        shared_results[name] = process.shared_result
    if not process.has_ended:
        yield _label(process.end_reason(), name, check, context.clock() - since)


class _CheckProcess:
    """A running check, from the fork to the end of all its processes.

    subject        what is being checked, such as a GPU; a finding about a crash names it
    shared_result  value for later checks; None if the check yielded none
    has_ended      whether the check completed; False if it raised an exception, crashed or was killed
    """

    def __init__(self, check: DoctorCheck, context: CheckContext) -> None:
        self.subject = ""
        self.shared_result: str | None = None
        self.has_ended = self._is_late = False
        self._raised: CheckResult | None = None
        self._limit_s, self._clock, self._began = check.limit_s, context.clock, context.clock()
        self._status: int | None = None
        self._text = ""  # output that the check has printed
        self._known_children: Set[int] = children()
        parent = os.getpid()
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()  # otherwise the child would print the buffered text, too
        with ExitStack() as on_error:
            self._log: IO[bytes] = on_error.enter_context(tempfile.TemporaryFile(dir=context.scratch))
            self._messages, theirs = Pipe(duplex=False)
            on_error.callback(self._messages.close)
            with theirs:
                self.pid = os.fork()
                if self.pid == 0:
                    _run_in_child(check, context, theirs, self._log.fileno(), parent)
            _running.append(self)
            self._ended = os.pidfd_open(self.pid)
            on_error.pop_all()

    def findings(self, watch: Watch) -> Iterator[CheckResult]:
        """Yield the findings as they arrive, until the process has ended or its time is up."""
        while True:
            took_s = self._clock() - self._began
            ready = wait([self._messages, self._ended], max(0.0, min(TICK_S, self._limit_s - took_s)))
            if ready:
                yield from self._read_messages()
            if self.has_ended or self._raised or self._ended in ready:
                return
            if took_s >= self._limit_s:
                self._is_late = True
                return
            watch(self.subject, self._clock() - self._began)

    def end_reason(self) -> CheckResult:
        """Return a finding with the reason why the process did not end normally."""
        subject = self.subject
        if self._raised:
            return dataclasses.replace(self._raised, subject=subject)
        last, line = self._last_output()
        at = f", at {line}" if line else ""
        if self._is_late:
            stuck = " and cannot be killed, because it waits in the kernel" if self._status is None else ""
            what = f"did not finish within {self._limit_s:g} s{stuck}{at}"
            return failed(subject, what, "look for the reason in dmesg | tail; then run this check alone")
        number = -(self._status or 0)
        if number == signal.SIGKILL:
            return failed(
                subject, "was killed by another process, possibly out of memory", "dmesg | tail; free some memory"
            )
        how = f"crashed ({signal.Signals(number).name})" if number > 0 else f"exited with code {self._status}"
        said = f": {last}" if last else ""
        return failed(
            subject, f"{how}{said}{at}", "reinstall the package that the line names, or report it to its maintainers"
        )

    def close(self) -> None:
        """Kill the process and its descendants; a process that cannot be killed is left behind."""
        if self._log.closed:
            return
        if not self.has_ended:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        wait([self._ended], _KILL_WAIT_S)
        with suppress(ChildProcessError):  # a signal handler that interrupted this method may have reaped the process
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._status = os.waitstatus_to_exitcode(status)
        if process_state(self.pid) != "D":  # D: uninterruptible sleep, in which it cannot be killed
            kill_descendants({self.pid}, self._known_children - {self.pid}, 0.0)
        self._log.seek(0)
        self._text = self._log.read()[-_LOG_BYTES:].decode(errors="replace")
        self._log.close()
        self._messages.close()
        os.close(self._ended)
        _running.remove(self)

    def _read_messages(self) -> Iterator[CheckResult]:
        with suppress(EOFError, OSError):  # OSError: the check was killed while it sent
            while self._messages.poll():
                kind, value = self._messages.recv()
                if kind == "begin":
                    self.subject = value
                elif kind == "finding":
                    yield value
                elif kind == "shared result":
                    self.shared_result = value
                elif kind == "raised":
                    self._raised = value
                else:
                    self.has_ended = True

    def _last_output(self) -> tuple[str, str]:
        """Return the last printed line, and the location of the running Python line."""
        match = _STACKS.search(self._text)
        before, stacks = (self._text[: match.start()], self._text[match.end() :]) if match else (self._text, "")
        frame = _FRAME.search(stacks.rpartition("(most recent call first):")[2])  # the main thread comes last
        where = f"{'/'.join(frame[1].split('/')[-2:])}:{frame[2]} ({frame[3]})" if frame else ""
        lines = [line for line in before.splitlines() if line.strip()]
        return sanitize(lines[-1].strip()) if lines else "", where


def kill_all_checks() -> None:
    """Kill all running checks and their descendants; for a signal handler."""
    for process in list(_running):
        process.close()


# ---------------------------------------------------------------- in the child


def _run_in_child(check: DoctorCheck, context: CheckContext, messages: Connection, log: int, parent: int) -> NoReturn:

    def send(kind: str, value: Any = None) -> None:
        messages.send((kind, value))

    code = 1
    try:
        die_with_parent(parent)
        _prepare_child(log, check.limit_s)
        since = context.clock()
        for found in check.function(dataclasses.replace(context, begin=lambda subject: send("begin", subject))):
            if isinstance(found, SharedResult):
                send("shared result", str(found))
                continue
            send("finding", dataclasses.replace(found, took_s=context.clock() - since))
            since = context.clock()
        send("end")
        code = 0
    except AccelRunError as error:
        problem = error.problems[0]
        where = f"{problem.where}: " if problem.where else ""
        send("raised", failed("", f"{where}{first_line(problem.what)}", problem.fix))
    except BaseException as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{'/'.join(last.filename.split('/')[-2:])}:{last.lineno} ({last.name})"
        fix = "if the location is in accel-run, report this error: a check must not raise"
        send("raised", failed("", sanitize(f"{error_line(error)}, at {where}"), fix))
    finally:
        os._exit(code)


def _prepare_child(log: int, limit_s: float) -> None:
    """Start a session, and redirect output to a file; dump the stack there on a crash and shortly before the limit."""
    os.setsid()
    signal.set_wakeup_fd(-1)
    for stop in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(stop, signal.SIG_DFL)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, descriptor in ((0, nothing), (1, log), (2, log)):
        os.dup2(descriptor, number)
    sys.stdin, sys.stdout, sys.stderr = sys.__stdin__, sys.__stderr__, sys.__stderr__
    faulthandler.enable(2, all_threads=False)
    faulthandler.dump_traceback_later(max(0.05, limit_s - min(0.5, limit_s / 4)), file=2)


# ---------------------------------------------------------------- in the parent


def _label(finding: CheckResult, name: str, check: DoctorCheck, took_s: float) -> CheckResult:
    return dataclasses.replace(finding, check=name, took_s=round(took_s, 3), why=finding.why or check.why)


_running: list[_CheckProcess] = []
_KILL_WAIT_S = 2.0  # a process that takes longer to die is waiting for a disk or a driver
_LOG_BYTES = 16384
_STACKS = re.compile(r"^Fatal Python error: |^Timeout \(", re.MULTILINE)
_FRAME = re.compile(r'File "([^"]+)", line (\d+) in (\S+)')
