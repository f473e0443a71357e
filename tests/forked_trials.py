"""Run the trials of a sweep as forks of the sweep, which has loaded torch, instead of new interpreters.

Imported by a command of the fork server with IMPORT_FIRST. A trial is still a separate process with its own PID,
signals and exit code. Only the start of Python is skipped; tests/launch and one test of tests/commands cover it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import traceback
from types import SimpleNamespace
from typing import IO, Any

from runner.sweeps import pool


class ForkedTrial:
    """The part of subprocess.Popen that the pool uses, for `python -P -c PROGRAM ARGUMENT...`."""

    def __init__(self, line: list[str], *, env: dict[str, str], stdin: Any = None, stdout: Any = None, **_: Any):
        assert line[1:3] == ["-P", "-c"], line
        ends = os.pipe() if stdout == subprocess.PIPE else None
        sys.stdout.flush()
        sys.stderr.flush()
        self.code: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            self._become(line, env, ends[1] if ends else None, reads_nothing=stdin == subprocess.DEVNULL)
        self.stdout: IO[str] | None = None
        if ends:
            os.close(ends[1])
            self.stdout = os.fdopen(ends[0], errors="replace")

    def _become(self, line: list[str], env: dict[str, str], output: int | None, *, reads_nothing: bool) -> None:
        code: Any = 70
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
                signal.signal(number, signal.SIG_DFL)
            if reads_nothing:
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            for number in (1, 2) if output is not None else ():
                os.dup2(output, number)
            sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
            os.environ.clear()
            os.environ.update(env)
            sys.argv = ["-c", *line[4:]]
            exec(line[3], {"__name__": "__main__"})  # noqa: S102 - as `python -c` does
        except SystemExit as ended:
            code = ended.code or 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def poll(self) -> int | None:
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


pool.subprocess = SimpleNamespace(  # type: ignore[assignment]
    Popen=ForkedTrial, PIPE=subprocess.PIPE, STDOUT=subprocess.STDOUT, DEVNULL=subprocess.DEVNULL
)
