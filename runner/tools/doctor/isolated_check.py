"""One check in a process of its own: a crash, a hang or a traceback of it is a finding, and nothing of it stays."""

from __future__ import annotations

import dataclasses
import faulthandler
import json
import os
import re
import select
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Set
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import IO, Any, NoReturn

from runner.base.errors import AccelRunError
from runner.base.secret import fit_to_show
from runner.base.text import error_line, first_line
from runner.host.parent_death import die_with_parent
from runner.host.process_tree import children, kill_descendants, state_of
from runner.tools.doctor.findings import Answer, CheckContext, CheckResult, DoctorCheck, failed

TICK_S = 0.1  # between two looks at the clock
Watch = Callable[[str, float], None]  # (subject, seconds so far), at each tick


@dataclass
class CheckOutput:
    """What the process of a check has told so far.

    begun      subjects that were begun
    answer     what it hands on besides its findings
    has_ended  it came to its end
    """

    findings: list[CheckResult] = field(default_factory=list)
    begun: list[str] = field(default_factory=list)
    answer: str | None = None
    has_ended: bool = False
    raised: CheckResult | None = None


def tried(
    name: str, check: DoctorCheck, context: CheckContext, watch: Watch, answers: dict[str, str]
) -> Iterator[CheckResult]:
    """Yield what the check finds; where its process ends before its time, that is a finding, and the rest is tried.

    watch    called about every TICK_S, and as soon as a subject is begun
    answers  what a check hands on to later ones is put here under its name
    """
    ends_at = context.clock() + check.limit_s
    since = context.clock()
    while True:
        try:
            trial = _Trial(check, context, ends_at)
        except OSError as error:
            what = f"no process could be started for it: {error.strerror}"
            yield _signed(failed("", what, "raise ulimit -u and ulimit -n, or end what runs"), name, check, 0.0)
            return
        try:
            for finding in trial.findings(watch):
                yield _signed(finding, name, check, finding.took_s)
                since = context.clock()
        finally:
            trial.close()
        told = trial.told
        if told.answer is not None:
            answers[name] = told.answer
        if told.has_ended:
            return
        end = _signed(trial.how_it_ended(), name, check, context.clock() - since)
        yield end
        since = context.clock()
        fresh = set(told.begun) - context.begun
        if trial.is_late or not fresh:
            return
        context = dataclasses.replace(context, begun=context.begun | fresh, found=(*context.found, *told.findings, end))


class _Trial:
    """A check that is being made, from the fork to the end of all that it started."""

    def __init__(self, check: DoctorCheck, context: CheckContext, ends_at: float) -> None:
        self.told = CheckOutput()
        self.is_late = False
        self._limit_s, self._ends_at = check.limit_s, ends_at
        self._clock = context.clock
        self._began = context.clock()
        self._status: int | None = None
        self._text = ""  # what it printed
        self._known: Set[int] = children()
        self._heard = b""
        parent = os.getpid()
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()  # or it would be printed twice
        with ExitStack() as unless_born:
            self._said: IO[bytes] = unless_born.enter_context(tempfile.TemporaryFile(dir=context.scratch))
            self._pipe, theirs = os.pipe2(os.O_CLOEXEC)
            unless_born.callback(os.close, self._pipe)
            try:
                self.pid = os.fork()
                if self.pid == 0:
                    _live(check, context, theirs, self._said.fileno(), parent, ends_at - context.clock())
            finally:
                os.close(theirs)
            _living[self.pid] = self._known
            self._ended = os.pidfd_open(self.pid)
            unless_born.pop_all()

    def findings(self, watch: Watch) -> Iterator[CheckResult]:
        """Yield the findings as they are told, until the process has ended or its time is up."""
        num_yielded = 0
        while True:
            left_s = self._ends_at - self._clock()
            ready, _, _ = select.select([self._pipe, self._ended], [], [], max(0.0, min(TICK_S, left_s)))
            if ready:
                self._hear()
            yield from self.told.findings[num_yielded:]
            num_yielded = len(self.told.findings)
            if self.told.has_ended or self.told.raised or self._ended in ready:
                return
            if left_s <= 0:
                self.is_late = True
                return
            watch(self.told.begun[-1] if self.told.begun else "", self._clock() - self._began)

    def how_it_ended(self) -> CheckResult:
        """Return why there was no regular end."""
        subject = self.told.begun[-1] if self.told.begun else ""
        if self.told.raised:
            return dataclasses.replace(self.told.raised, subject=subject)
        last, line = self._last_words()
        at = f", at {line}" if line else ""
        if self.is_late:
            stuck = " and cannot be ended: it waits for the system" if self._status is None else ""
            what = f"did not come back within {self._limit_s:g} s{stuck}{at}"
            return failed(subject, what, "see what it waits for: dmesg | tail; then try it alone")
        number = -(self._status or 0)
        if number == signal.SIGKILL:
            return failed(subject, "was killed from outside: for want of memory?", "dmesg | tail; free some memory")
        how = f"crashed ({signal.Signals(number).name})" if number > 0 else f"left with exit code {self._status}"
        said = f": {last}" if last else ""
        return failed(subject, f"{how}{said}{at}", "reinstall what the line names, or report it to its maintainers")

    def close(self) -> None:
        """The process and all that it started are gone; what cannot be killed is left to the system."""
        if self._said.closed:
            return
        if not self.told.has_ended:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        select.select([self._ended], [], [], _FAREWELL_S)
        self._reap()
        _clear(self.pid)
        self._said.seek(0)
        self._text = self._said.read()[-_SAID_BYTES:].decode(errors="replace")
        self._said.close()
        for descriptor in (self._pipe, self._ended):
            os.close(descriptor)

    def _reap(self) -> None:
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if pid:
            self._status = os.waitstatus_to_exitcode(status)

    def _hear(self) -> None:
        """Take in what has been told."""
        while select.select([self._pipe], [], [], 0)[0]:
            heard = os.read(self._pipe, 1 << 16)
            if not heard:
                break
            self._heard += heard
        *lines, self._heard = self._heard.split(b"\n")
        for line in lines:
            _take(json.loads(line), self.told)

    def _last_words(self) -> tuple[str, str]:
        """Return the last line that was printed, and the line of Python that was being run."""
        match = _STACKS.search(self._text)
        before, stacks = (self._text[: match.start()], self._text[match.end() :]) if match else (self._text, "")
        frame = _FRAME.search(stacks.rpartition("(most recent call first):")[2])  # the main thread comes last
        where = f"{'/'.join(frame[1].split('/')[-2:])}:{frame[2]} ({frame[3]})" if frame else ""
        lines = [line for line in before.splitlines() if line.strip()]
        return fit_to_show(lines[-1].strip()) if lines else "", where


def end_all() -> None:
    """All processes of checks that are being made are gone, with what they started: for a signal."""
    for pid in list(_living):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
        _clear(pid)


# ---------------------------------------------------------------- in the process


def _live(check: DoctorCheck, context: CheckContext, line: int, said: int, parent: int, limit_s: float) -> NoReturn:
    """Make the check and tell what it finds, until the process ends."""

    def tell(**message: Any) -> None:
        os.write(line, json.dumps(message).encode() + b"\n")

    code = 1
    try:
        die_with_parent(parent)
        _settle_in(said, limit_s)
        since = context.clock()
        for found in check.function(dataclasses.replace(context, begin=lambda subject: tell(begin=subject))):
            if isinstance(found, Answer):
                tell(answer=str(found))
                continue
            tell(finding=dataclasses.replace(found, took_s=context.clock() - since).to_json())
            since = context.clock()
        tell(end=True)
        code = 0
    except AccelRunError as error:
        tell(raised=_of_ours(error).to_json())
    except BaseException as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{'/'.join(last.filename.split('/')[-2:])}:{last.lineno} ({last.name})"
        fix = "see what it names; if that is accel-run, report it, for a check must not end so"
        tell(raised=failed("", fit_to_show(f"{error_line(error)}, at {where}"), fix).to_json())
    finally:
        os._exit(code)


def _settle_in(said: int, limit_s: float) -> None:
    """Lead a session of its own, print into a file, and leave the stack there at a crash or shortly before the end."""
    os.setsid()
    signal.set_wakeup_fd(-1)
    for stop in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(stop, signal.SIG_DFL)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, descriptor in ((0, nothing), (1, said), (2, said)):
        os.dup2(descriptor, number)
    sys.stdin, sys.stdout, sys.stderr = sys.__stdin__, sys.__stderr__, sys.__stderr__
    faulthandler.enable(2, all_threads=False)
    faulthandler.dump_traceback_later(max(0.05, limit_s - min(0.5, limit_s / 4)), file=2)


def _of_ours(error: AccelRunError) -> CheckResult:
    problem = error.problems[0]
    where = f"{problem.where}: " if problem.where else ""
    return failed("", f"{where}{first_line(problem.what)}", problem.fix)


# ---------------------------------------------------------------- in the one that waits


def _take(message: dict[str, Any], told: CheckOutput) -> None:
    if "begin" in message:
        told.begun.append(message["begin"])
    elif "finding" in message:
        told.findings.append(CheckResult.from_json(message["finding"]))
    elif "answer" in message:
        told.answer = message["answer"]
    elif "raised" in message:
        told.raised = CheckResult.from_json(message["raised"])
    else:
        told.has_ended = True


def _signed(finding: CheckResult, name: str, check: DoctorCheck, took_s: float) -> CheckResult:
    return dataclasses.replace(finding, check=name, took_s=round(took_s, 3), why=finding.why or check.why)


def _clear(pid: int) -> None:
    """What the process started is gone, also where it made itself a session."""
    known = _living.pop(pid, set())
    if state_of(pid) != "D":  # which would not go, and be waited for
        kill_descendants({pid}, known - {pid}, 0.0)


_living: dict[int, Set[int]] = {}  # process of a check -> other children that this process had then
_FAREWELL_S = 2.0  # a killed process is gone by then, or waits for a disk or driver that does not answer
_SAID_BYTES = 16384
_STACKS = re.compile(r"^Fatal Python error: |^Timeout \(", re.MULTILINE)
_FRAME = re.compile(r'File "([^"]+)", line (\d+) in (\S+)')
