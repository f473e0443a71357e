"""One rank in its forked process: setup, and the report of its exit."""

from __future__ import annotations

import dataclasses
import faulthandler
import gc
import json
import os
import signal
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from runner.base import output
from runner.base.errors import AccelRunError, Exit, Problem
from runner.base.parent_death import die_with_parent
from runner.base.rank_env import RankInfo
from runner.base.stacks import answer_in
from runner.distributed.peer_loss import is_of_a_lost_rank

Main = Callable[[RankInfo], tuple[int, Any]]


@dataclasses.dataclass(frozen=True)
class RankReport:
    """The report that a rank wrote before it exited.

    is_told     it had time to tell anything: it has returned or raised
    what        how it ended, as in "raised ValueError: no such file"; empty where it returned
    time_s      of the monotonic clock, which all processes of a machine share
    """

    what: str = ""
    result: Any = None
    problems: tuple[Problem, ...] = ()
    traceback: str = ""
    is_victim: bool = False
    time_s: float | None = None
    is_told: bool = True


def live(main: Main, member: RankInfo, supervisor: int, folder: Path, mask: set[signal.Signals]) -> NoReturn:
    """Be a rank until the process ends, with the code that `main` returned or raised; called right after the fork.

    supervisor  process to die with
    folder      where the report goes
    mask        signals that were blocked before the fork
    """
    code = int(Exit.SOFTWARE)
    try:
        _settle_in(supervisor, folder, member.rank)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        code, report = _lived(main, member)
        (folder / f"report-{member.rank}").write_text(json.dumps(dataclasses.asdict(report)), encoding="utf-8")
    except OSError:
        code = code or int(Exit.INPUT_OUTPUT)  # an end whose result is lost is not a good one
    finally:
        with suppress(Exception):
            output.finish()
        os._exit(code)  # what the supervisor registered for its own exit must not run here


def read_report(folder: Path, rank: int) -> RankReport:
    """Return the report of the rank, or the traceback of a crash without a report."""
    try:
        told = json.loads((folder / f"report-{rank}").read_text(encoding="utf-8"))
        return RankReport(**{**told, "problems": tuple(Problem(**problem) for problem in told["problems"])})
    except (OSError, ValueError):  # killed before it was written, or while
        pass
    try:
        crash = (folder / f"crash-{rank}").read_text(encoding="utf-8", errors="replace")
    except OSError:
        crash = ""
    return RankReport(traceback=crash.partition("\nExtension modules:")[0].strip(), is_told=False)


def _settle_in(supervisor: int, folder: Path, rank: int) -> None:
    """Die with the supervisor, ignore terminal signals, and write a traceback if Python itself crashes."""
    die_with_parent(supervisor)
    gc.freeze()  # what was imported stays: looking through it again would take 0.2 s, and copy its pages
    os.setsid()
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
            signal.signal(number, signal.SIG_DFL)
    # The supervisor repeats it until the rank has ended: who does not listen yet, or no longer, must not die of it.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    descriptor = os.open(folder / f"crash-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    faulthandler.enable(descriptor, all_threads=True)
    answer_in(folder)


def _lived(main: Main, member: RankInfo) -> tuple[int, RankReport]:
    """Call `main`; return the exit code and the report."""
    try:
        code, result = main(member)
        assert 0 <= code <= 255, f"an exit code is a byte, but is {code}"
        json.dumps(result)
        return int(code), RankReport(result=result)
    except BaseException as error:
        return _code_of(error), RankReport(
            _what(error),
            problems=error.problems if isinstance(error, AccelRunError) else (),
            traceback="".join(traceback.format_exception(error)).strip(),
            is_victim=is_of_a_lost_rank(error),
            time_s=time.monotonic(),
        )


def _code_of(error: BaseException) -> int:
    if isinstance(error, AccelRunError):
        return int(error.exit_code)
    if isinstance(error, SystemExit):
        return error.code & 0xFF if isinstance(error.code, int) else int(error.code is not None)
    return int(Exit.INTERRUPTED if isinstance(error, KeyboardInterrupt) else Exit.SOFTWARE)


def _what(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"left by sys.exit({error.code!r})"
    if isinstance(error, AccelRunError):
        return f"ended: {error.problems[0]}".splitlines()[0]
    return f"raised {type(error).__name__}: {error}".splitlines()[0].rstrip(": ")
