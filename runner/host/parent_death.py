"""End a process when its parent exits."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

from runner.base.paths import PACKAGE


def die_with_parent(parent: int | None = None, by: int = signal.SIGKILL) -> None:
    """Have the kernel send a signal to this process when the thread that started it ends.

    parent  PID of the parent process; if it has already exited, this process is killed at once. None: unknown
    by      the signal; use one that the process handles to give it time to save
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(by), 0, 0, 0)
    # The parent may have exited before prctl, in which case the kernel sends no signal.
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def child_command(args: Sequence[str], by: signal.Signals, report: int | None = None) -> list[str]:
    """Return the command line of `accel-run ARGS` in a subprocess that gets a signal when the caller's thread ends.

    by      as in `die_with_parent`
    report  file descriptor to which the subprocess sends its error instead of printing it
    """
    lines = [
        f"import sys; sys.path.append({str(PACKAGE.parent)!r})",  # a checkout that is not installed is searched last
        f"from runner.host.parent_death import die_with_parent; die_with_parent(int(sys.argv.pop(1)), {int(by)})",
        "from runner.cli import main",
    ]
    if report is None:
        lines.append("sys.exit(main())")
    else:
        lines.append("from functools import partial; from runner.host.command_process import send_error")
        lines.append(f"sys.exit(main(report=partial(send_error, {report})))")
    # -P: do not import a runner.py of the current folder
    return [sys.executable, "-P", "-c", "; ".join(lines), str(os.getpid()), *args]


_PR_SET_PDEATHSIG = 1  # linux/prctl.h
