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

from runner.base.errors import AccelRunError, Exit, Problem, find_system_limit
from runner.base.rank_env import RankInfo
from runner.distributed.peer_loss import is_peer_loss
from runner.host import output
from runner.host.parent_death import die_with_parent
from runner.host.stacks import dump_on_signal

Main = Callable[[RankInfo], tuple[int, Any]]


@dataclasses.dataclass(frozen=True)
class RankReport:
    """How a rank ended, according to the report that it wrote before it exited.

    is_complete  False: the process exited before it could write the report
    what         how it ended, such as "raised ValueError: no such file"; empty if it returned
    is_victim    the error is a consequence of another rank's exit
    time_s       time of the error on the monotonic clock, which all processes of a machine share
    """

    what: str = ""
    result: Any = None
    problems: tuple[Problem, ...] = ()
    traceback: str = ""
    is_victim: bool = False
    time_s: float | None = None
    is_complete: bool = True


def run_rank_process(
    main: Main, member: RankInfo, supervisor: int, folder: Path, mask: set[signal.Signals]
) -> NoReturn:
    """Run a rank and exit with the code that `main` returned or raised; called right after the fork.

    supervisor  PID of the supervising process; if it ends, the rank is killed
    folder      folder for the report
    mask        signals that were blocked before the fork
    """
    code: int | None = None
    try:
        _set_up(supervisor, folder, member.rank)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        code, report = _call_main(main, member)
        (folder / f"report-{member.rank}").write_text(json.dumps(dataclasses.asdict(report)), encoding="utf-8")
    except OSError as error:  # without its report, the rank counts as failed
        code = code or int(Exit.INPUT_OUTPUT if find_system_limit(error) is None else Exit.SYSTEM)
    finally:
        with suppress(Exception):
            output.finish()
        os._exit(Exit.SOFTWARE if code is None else code)  # skips the exit handlers that the supervisor registered


def read_report(folder: Path, rank: int) -> RankReport:
    """Return the report of the rank, or the traceback of a crash without a report."""
    try:
        fields = json.loads((folder / f"report-{rank}").read_text(encoding="utf-8"))
        return RankReport(**{**fields, "problems": tuple(Problem(**problem) for problem in fields["problems"])})
    except (OSError, ValueError):  # killed before or while writing it
        pass
    try:
        crash = (folder / f"crash-{rank}").read_text(encoding="utf-8", errors="replace")
    except OSError:
        crash = ""
    return RankReport(traceback=crash.partition("\nExtension modules:")[0].strip(), is_complete=False)


def _set_up(supervisor: int, folder: Path, rank: int) -> None:
    """Die with the supervisor, leave its session, and write a traceback if Python itself crashes."""
    die_with_parent(supervisor)
    gc.freeze()  # imported modules stay: collecting them would take 0.2 s and copy their shared pages
    # A separate session, so that Ctrl-C reaches the supervisor only, and the supervisor finds orphans of the rank by
    # their session.
    os.setsid()
    # The supervisor's pipe is closed in this process: a signal would write to whatever file gets its descriptor next.
    signal.set_wakeup_fd(-1)
    for signal_number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP):
        # Keep SIGHUP ignored, as under nohup.
        if signal_number != signal.SIGHUP or signal.getsignal(signal_number) != signal.SIG_IGN:
            signal.signal(signal_number, signal.SIG_DFL)
    # The supervisor repeats SIGUSR1 until the rank exits. Without a handler, the signal would kill the rank.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    descriptor = os.open(folder / f"crash-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    faulthandler.enable(descriptor, all_threads=True)
    dump_on_signal(folder)


def _call_main(main: Main, member: RankInfo) -> tuple[int, RankReport]:
    try:
        code, result = main(member)
        assert 0 <= code <= 255, f"an exit code is a byte, but is {code}"
        json.dumps(result)
        return int(code), RankReport(result=result)
    except BaseException as raised:
        error = find_system_limit(raised) or raised
        return _exit_code(error), RankReport(
            _describe(error),
            problems=error.problems if isinstance(error, AccelRunError) else (),
            traceback="".join(traceback.format_exception(raised)).strip(),
            is_victim=is_peer_loss(error),
            time_s=time.monotonic(),
        )


def _exit_code(error: BaseException) -> int:
    if isinstance(error, AccelRunError):
        return int(error.exit_code)
    if isinstance(error, SystemExit):
        return error.code & 0xFF if isinstance(error.code, int) else int(error.code is not None)
    return int(Exit.INTERRUPTED if isinstance(error, KeyboardInterrupt) else Exit.SOFTWARE)


def _describe(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"exited with sys.exit({error.code!r})"
    if isinstance(error, AccelRunError):
        return f"ended: {error.problems[0]}".splitlines()[0]
    return f"raised {type(error).__name__}: {error}".splitlines()[0].rstrip(": ")
