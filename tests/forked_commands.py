"""Run the commands of `runner.train` and `runner.evaluate` as forks of the fork server instead of new interpreters.

A command is still a separate process with its own PID, signals, pipes and exit code. Only the start of Python and the
import of torch are skipped; tests of tests/test_api.py without `forked_commands`, and with notebooks, cover them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest

from runner.host import command_process
from tests.forkserver import ForkServer
from tests.waiting import wait_until

BECOME = """
import os, sys
from pathlib import Path
os.dup2(os.open({report!r}, os.O_WRONLY), {number})
sys.argv = ["-c", str(os.getppid()), *{words!r}]
Path({ready!r}).touch()
code = 70
try:
    exec({program!r}, {{"__name__": "__main__"}})
except SystemExit as ended:
    code = ended.code or 0
finally:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
"""


class ForkedCommand:
    """The part of subprocess.Popen that command_process uses, for `python -P -c PROGRAM PARENT ARGUMENT...`."""

    def __init__(self, server: ForkServer, line: Sequence[str], *, pass_fds: Sequence[int], **_: Any) -> None:
        assert list(line[1:3]) == ["-P", "-c"], line
        self._server = server
        self._code: int | None = None
        (out, to_out), (err, to_err) = os.pipe(), os.pipe()
        self.stdout: IO[bytes] = os.fdopen(out, "rb")
        self.stderr: IO[bytes] = os.fdopen(err, "rb")

        def mine(number: int) -> str:
            return f"/proc/{os.getpid()}/fd/{number}"

        with tempfile.TemporaryDirectory() as name:
            ready = Path(name) / "ready"
            begin = BECOME.format(
                report=mine(pass_fds[0]), number=pass_fds[0], words=list(line[5:]), ready=str(ready), program=line[3]
            )
            self.pid = server.start_program(begin, Path.cwd(), os.environ, (mine(to_out), mine(to_err)))
            wait_until(ready.exists, "the command")
        os.close(to_out)
        os.close(to_err)

    def poll(self) -> None:
        """Return None, because the caller notices the end of a command by its closed pipes."""

    def wait(self) -> int:
        if self._code is None:
            self._code = self._server.wait().code
        return self._code

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)


@contextmanager
def forked_commands(server: ForkServer) -> Iterator[None]:
    """Replace new interpreters by forks inside the context."""
    with pytest.MonkeyPatch.context() as patch:
        made = SimpleNamespace(
            Popen=lambda line, **options: ForkedCommand(server, line, **options),
            PIPE=subprocess.PIPE, DEVNULL=subprocess.DEVNULL,
        )  # fmt: skip
        patch.setattr(command_process, "subprocess", made)
        yield
