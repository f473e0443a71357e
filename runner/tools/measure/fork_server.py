"""Fork the process of each variant from a server that has imported torch, and send it commands over a connection."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import IO, Any

from runner.base.errors import AccelRunError, Exit, HostMemoryError
from runner.base.secret import drop_secrets


class BudgetExhausted(AccelRunError):
    """The budget ended before a variant replied."""

    exit_code = Exit.CONFIG

    def __init__(self) -> None:
        what = "is too short: the time budget was used up before a variant replied"
        super().__init__(what, where="budget_s", fix="use a larger budget, such as budget_s=600")


class ReplyTimeout(AccelRunError):
    """No reply arrived in time."""


class ForkServer:
    """A process that has only imported modules; variants are forks of it.

    A fork starts with the state of a new process, but saves the seconds of importing torch.
    """

    def __init__(self, folder: Path, cores: int) -> None:
        self.folder = folder
        # A socket, because it sends a command together with its descriptors in one call, which Ctrl-C cannot interrupt.
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(START_TIMEOUT_S)
        self._replies = self._socket.makefile("r", encoding="utf-8")
        self._errors = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - closed in __exit__
        with theirs:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "runner.tools.measure.variant_process",
                    *map(str, (theirs.fileno(), os.getpid(), cores)),
                ],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                start_new_session=True,
                env={**MALLOC_ENVIRONMENT, **drop_secrets(os.environ)},
            )
        self._receive_reply()

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._replies.close()
        self._socket.close()
        self._errors.close()

    def fork(self, connection: Connection, errors: IO[bytes], ranks: int) -> int:
        """Start a process with this connection and standard error; return its PID."""
        command = json.dumps({"do": "fork", "ranks": ranks}).encode()
        socket.send_fds(self._socket, [command], [connection.fileno(), errors.fileno()])
        return int(self._receive_reply("pid")["pid"])

    def wait(self, pid: int) -> int:
        """Wait for a forked process; return its exit code, negative for a signal."""
        self._socket.sendall(json.dumps({"do": "wait", "pid": pid}).encode())
        return int(self._receive_reply("code")["code"])

    def _receive_reply(self, key: str = "") -> dict[str, Any]:
        """Return the next reply with this key; skip replies to commands that Ctrl-C interrupted."""
        try:
            for text in self._replies:
                reply: dict[str, Any] = json.loads(text)
                if not key or key in reply:
                    return reply
        except OSError as error:  # not only TimeoutError: after a timeout, every further read raises OSError
            raise ReplyTimeout(f"no reply from the fork server within {START_TIMEOUT_S:.0f} s") from error
        raise AccelRunError(f"the fork server ended: {_last_line(self._errors) or 'unknown reason'}")


class VariantProcess:
    """A variant and its data workers: a separate session, paused and resumed together.

    deadline  time on `clock` after which replies are not awaited
    ranks     number of ranks, each also in a separate session; 0: the process itself trains
    """

    def __init__(
        self, server: ForkServer, number: int, clock: Callable[[], float], deadline: float, ranks: int = 0
    ) -> None:
        self._connection, theirs = Pipe()
        self._server, self.number, self._clock = server, number, clock
        self.deadline = deadline
        self._errors = tempfile.TemporaryFile(dir=server.folder)  # noqa: SIM115 - closed in `end`
        with theirs:
            self.pid = server.fork(theirs, self._errors, ranks)
        self._sessions = [self.pid]
        self._code: int | None = None
        self._command = "start"

    def run(self, updates: int, timeout_s: float) -> float:
        reply = self.run_block(updates, timeout_s)
        return float(reply["seconds"] - reply["run_queue_wait_s"])

    def run_block(self, updates: int, timeout_s: float, untimed: int = 0) -> dict[str, Any]:
        """Run a block of updates, after `untimed` updates that are not measured; return its measurements."""
        return self.call({"do": "run", "updates": updates, "untimed": untimed}, timeout_s)

    def call(self, command: Mapping[str, Any], timeout_s: float = 600.0) -> dict[str, Any]:
        """Send a command and return the reply. Raises AccelRunError for a failed command, a dead process, a timeout."""
        self._command = str(command["do"])
        with suppress(OSError):  # the process died: receive_reply raises the reason
            self._connection.send(command)
        return self.receive_reply(timeout_s)

    def receive(self, timeout_s: float) -> dict[str, Any] | AccelRunError | None:
        """Return the next reply, or None if the process has ended. Raises ReplyTimeout if none arrives in time."""
        if not wait([self._connection], timeout_s):
            raise ReplyTimeout(f"no reply to `{self._command}` from the process of a variant within {timeout_s:.0f} s")
        try:
            return self._connection.recv()  # type: ignore[no-any-return]
        except (EOFError, OSError):
            return None

    def receive_reply(self, timeout_s: float) -> dict[str, Any]:
        """Return the next reply. Raises like `call`, and BudgetExhausted if the deadline passes first."""
        left_s = max(0.0, self.deadline - self._clock())
        try:
            reply = self.receive(min(timeout_s, left_s))
        except ReplyTimeout:
            if left_s < timeout_s:
                raise BudgetExhausted from None
            raise
        if reply is None:
            code = self._wait()
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            kind = HostMemoryError if code == -signal.SIGKILL else AccelRunError
            killed = ": the machine may be out of memory" if kind is HostMemoryError else ""
            last = _last_line(self._errors)
            raise kind(f"its process {how}{killed}{f' ({last})' if last else ''}")
        if isinstance(reply, AccelRunError):
            raise reply
        if "ranks" in reply:
            self._sessions += reply["ranks"]
        return reply

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def end(self) -> None:
        """Kill the process and its children."""
        if self._errors.closed:
            return
        self._signal(signal.SIGKILL)
        with suppress(AccelRunError, OSError):
            self._wait()
        self._connection.close()
        self._errors.close()

    def _wait(self) -> int:
        if self._code is None:
            self._code = self._server.wait(self.pid)
        return self._code

    def _signal(self, number: signal.Signals) -> None:
        for session in self._sessions if self._code is None else ():
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(session, number)


def _last_line(errors: IO[bytes]) -> str:
    errors.seek(0)
    return next(iter(errors.read().decode(errors="replace").strip().splitlines()[-1:]), "")


# glibc's malloc adapts its mmap threshold at run time. Identical processes settle on different thresholds and differ by
# 20 % in speed for their whole lifetime. Source: mallopt(3), M_MMAP_THRESHOLD.
MALLOC_ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}
START_TIMEOUT_S = 300.0  # importing torch from a slow disk takes minutes
