"""Processes of variants: forks of a server that has imported torch, controlled over sockets with JSON lines."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from runner.base.errors import AccelRunError, Exit, HostMemoryError, Problem, rebuild_error
from runner.base.secret import drop_secrets
from runner.host.stacks import parse_main_thread, request_stacks, user_frame


class BudgetExhausted(AccelRunError):
    """The budget ended before a variant replied."""

    exit_code = Exit.CONFIG


def budget_exhausted() -> BudgetExhausted:
    return BudgetExhausted(
        "must be longer: the time budget was used up before a variant replied",
        where="budget_s",
        fix="use a larger one, as budget_s=600",
    )


class ReplyTimeout(AccelRunError):
    """No reply arrived in time."""


class JsonSocket:
    """A socket to another process that carries one JSON object per line in both directions."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._received = b""

    def receive(self, timeout_s: float) -> dict[str, Any] | None:
        """Return the next answer, None if the other end is closed. Raises NoAnswer if none arrives in time."""
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._received:
            ready, _, _ = select.select([self.sock], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise ReplyTimeout(f"no reply within {timeout_s:.0f} s")
            content = self.sock.recv(1 << 16)
            if not content:
                return None
            self._received += content
        text, _, self._received = self._received.partition(b"\n")
        message: dict[str, Any] = json.loads(text)
        return message


class ForkServer:
    """A process that has only imported modules; variants are forks of it.

    A fork starts like a new process, without the seconds of importing torch.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str], cores: int) -> None:
        self.folder = folder
        sock, theirs = socket.socketpair()
        self._socket = JsonSocket(sock)
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
                env={**MALLOC_ENVIRONMENT, **drop_secrets(os.environ), **environment},
            )
        self._receive_reply()

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._socket.sock.close()
        self._errors.close()

    def fork(self, sock: socket.socket, errors: IO[bytes], ranks: int) -> int:
        """Start a process with this socket and standard error; return its PID."""
        command = json.dumps({"do": "fork", "ranks": ranks, "stacks": str(self.folder)}).encode()
        socket.send_fds(self._socket.sock, [command], [sock.fileno(), errors.fileno()])
        return int(self._receive_reply("pid")["pid"])

    def wait(self, pid: int) -> int:
        """Wait for a forked process; return its exit code, negative for a signal."""
        self._socket.sock.sendall(json.dumps({"do": "wait", "pid": pid}).encode())
        return int(self._receive_reply("code")["code"])

    def _receive_reply(self, key: str = "") -> dict[str, Any]:
        """Return the next reply with this key; skip replies to commands that Ctrl-C interrupted."""
        while True:
            reply = self._socket.receive(START_TIMEOUT_S)
            if reply is None:
                raise AccelRunError(f"the fork server ended: {_last_line(self._errors) or 'unknown reason'}")
            if not key or key in reply:
                return reply


class VariantProcess(JsonSocket):
    """A variant and its data workers: a separate session, paused and resumed together.

    deadline  by `clock`: replies are not awaited beyond it
    ranks     number of ranks, each also in a separate session; 0: the process itself trains
    """

    def __init__(
        self, server: ForkServer, number: int, clock: Callable[[], float], deadline: float, ranks: int = 0
    ) -> None:
        ours, theirs = socket.socketpair()
        super().__init__(ours)
        self._server, self.number, self._clock = server, number, clock
        self.deadline = deadline
        self._errors = tempfile.TemporaryFile(dir=server.folder)  # noqa: SIM115 - closed in `end`
        with theirs:
            self.pid = server.fork(theirs, self._errors, ranks)
        self._sessions = [self.pid]
        self._code: int | None = None
        self._command = "start"

    def __enter__(self) -> VariantProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

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
            self.sock.sendall((json.dumps(command) + "\n").encode())
        return self.receive_reply(timeout_s)

    def receive_reply(self, timeout_s: float) -> dict[str, Any]:
        """Return the next reply. Raises like `call`, and BudgetExhausted if the deadline passes first."""
        left_s = max(0.0, self.deadline - self._clock())
        try:
            reply = self.receive(min(timeout_s, left_s))
        except ReplyTimeout as error:
            raise budget_exhausted() if left_s < timeout_s else self._describe_timeout(error) from None
        if reply is None:
            code = self._wait()
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
            kind = HostMemoryError if code == -signal.SIGKILL else AccelRunError
            killed = ": the machine may be out of memory" if kind is HostMemoryError else ""
            last = _last_line(self._errors)
            raise kind(f"its process {how}{killed}{f' ({last})' if last else ''}")
        if "error" in reply:
            problems = tuple(Problem(**problem) for problem in reply["error"])
            raise rebuild_error(AccelRunError, problems, Exit(reply["exit_code"]))
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
        self.sock.close()
        self._errors.close()

    def _wait(self) -> int:
        if self._code is None:
            self._code = self._server.wait(self.pid)
        return self._code

    def _signal(self, number: signal.Signals) -> None:
        for session in self._sessions if self._code is None else ():
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(session, number)

    def _describe_timeout(self, error: ReplyTimeout) -> ReplyTimeout:
        """Return the error with the command and, if the process itself trains, the place where it is."""
        frames = parse_main_thread(request_stacks(self._server.folder, {self.pid: "R"}).get(self.pid, ""))
        place = f"; it is at {frames[0]}" if frames else ""
        user = user_frame(frames)
        called = f", called from {user}" if user is not None and user != frames[0] else ""
        return ReplyTimeout(f"{error.problems[0].what} to `{self._command}` by the process of a variant{place}{called}")


def _last_line(errors: IO[bytes]) -> str:
    errors.seek(0)
    return next(iter(errors.read().decode(errors="replace").strip().splitlines()[-1:]), "")


# glibc's malloc adapts its mmap threshold at run time. Identical processes settle on different thresholds and differ by
# 20 % in speed for their whole lifetime. Source: mallopt(3), M_MMAP_THRESHOLD.
MALLOC_ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}
START_TIMEOUT_S = 300.0  # importing torch from a slow disk takes minutes
