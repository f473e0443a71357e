"""Processes of variants: forks of a server that has imported torch, asked over a socket in lines of JSON."""

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


class OutOfTime(AccelRunError):
    """The budget ended before a variant answered."""

    exit_code = Exit.CONFIG


def out_of_time() -> OutOfTime:
    return OutOfTime(
        "must be longer: the time was over before a variant had answered", where="budget_s", fix=_MORE_TIME
    )


class NoAnswer(AccelRunError):
    """No answer arrived in time."""


class JsonSocket:
    """A socket to another process, with lines of JSON in both directions."""

    def __init__(self, line: socket.socket) -> None:
        self.line = line
        self._received = b""

    def receive(self, timeout_s: float) -> dict[str, Any] | None:
        """Return the next answer, None if the other end is closed. Raises NoAnswer if none arrives in time."""
        until = time.monotonic() + timeout_s
        while b"\n" not in self._received:
            ready, _, _ = select.select([self.line], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                raise NoAnswer(f"no answer within {timeout_s:.0f} s")
            content = self.line.recv(1 << 16)
            if not content:
                return None
            self._received += content
        text, _, self._received = self._received.partition(b"\n")
        answer: dict[str, Any] = json.loads(text)
        return answer


class ForkServer:
    """A process that has imported what variants need and computed nothing; variants are forks of it.

    So each starts like a new process, without the seconds of importing torch.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str], cores: int) -> None:
        self.folder = folder
        line, theirs = socket.socketpair()
        self._line = JsonSocket(line)
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
                env={**STEADY, **drop_secrets(os.environ), **environment},
            )
        self._answer()

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._line.line.close()
        self._errors.close()

    def fork(self, line: socket.socket, errors: IO[bytes], ranks: int) -> int:
        """Start a process with this socket and standard error; return its PID."""
        order = json.dumps({"do": "fork", "ranks": ranks}).encode()
        socket.send_fds(self._line.line, [order], [line.fileno(), errors.fileno()])
        return int(self._answer("pid")["pid"])

    def wait(self, pid: int) -> int:
        """Return the exit code of a process of this server; negative for a signal."""
        self._line.line.sendall(json.dumps({"do": "wait", "pid": pid}).encode())
        return int(self._answer("code")["code"])

    def _answer(self, what: str = "") -> dict[str, Any]:
        """Return the next answer with this key, skipping those to orders that Ctrl-C interrupted."""
        while True:
            answer = self._line.receive(START_S)
            if answer is None:
                raise AccelRunError(f"the fork server ended: {_last_line(self._errors) or 'unknown reason'}")
            if not what or what in answer:
                return answer


class VariantProcess(JsonSocket):
    """A variant and its data workers: a separate session, stopped and continued as a whole.

    ranks  each is a separate session, too; 0: the process itself trains
    """

    def __init__(
        self, server: ForkServer, number: int, clock: Callable[[], float], until: float, ranks: int = 0
    ) -> None:
        ours, theirs = socket.socketpair()
        super().__init__(ours)
        self._server, self.number, self._clock = server, number, clock
        self.until = until  # by the clock: the end of waiting for its answers
        self._errors = tempfile.TemporaryFile(dir=server.folder)  # noqa: SIM115 - closed in `end`
        with theirs:
            self.pid = server.fork(theirs, self._errors, ranks)
        self._sessions = [self.pid]
        self._code: int | None = None

    def __enter__(self) -> VariantProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def run(self, updates: int, timeout_s: float) -> float:
        """Run so many updates; return the seconds they took."""
        made = self.block(updates, timeout_s)
        return float(made["seconds"] - made["run_queue_wait_s"])

    def block(self, updates: int, timeout_s: float, untimed: int = 0) -> dict[str, Any]:
        """Run a block of updates after `untimed` ones; return its measurements."""
        return self.ask({"do": "run", "updates": updates, "untimed": untimed}, timeout_s)

    def ask(self, order: Mapping[str, Any], timeout_s: float = 600.0) -> dict[str, Any]:
        """Return the answer to an order. Raises AccelRunError with what ended the process, or that it took too long."""
        with suppress(OSError):  # it has died: its answer has the reason
            self.line.sendall((json.dumps(order) + "\n").encode())
        return self.answer(timeout_s)

    def answer(self, timeout_s: float) -> dict[str, Any]:
        """Return the next answer; raises like `ask`, and OutOfTime if the time is over first."""
        left_s = max(0.0, self.until - self._clock())
        try:
            answer = self.receive(min(timeout_s, left_s))
        except NoAnswer as error:
            raise out_of_time() if left_s < timeout_s else error from None
        if answer is None:
            raise self._death()
        if "error" in answer:
            problems = tuple(Problem(**problem) for problem in answer["error"])
            raise rebuild_error(AccelRunError, problems, Exit(answer["exit_code"]))
        if "ranks" in answer:
            self._sessions += answer["ranks"]
        return answer

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def end(self) -> None:
        """Kill it with all its children."""
        if self._errors.closed:
            return
        self._signal(signal.SIGKILL)
        with suppress(AccelRunError, OSError):
            self._ended()
        self.line.close()
        self._errors.close()

    def _ended(self) -> int:
        if self._code is None:
            self._code = self._server.wait(self.pid)
        return self._code

    def _signal(self, number: signal.Signals) -> None:
        for session in self._sessions if self._code is None else ():
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(session, number)

    def _death(self) -> AccelRunError:
        code = self._ended()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
        kind = HostMemoryError if code == -signal.SIGKILL else AccelRunError
        killed = ": the machine may be out of memory" if kind is HostMemoryError else ""
        last = _last_line(self._errors)
        return kind(f"its process {how}{killed}{f' ({last})' if last else ''}")


def _last_line(errors: IO[bytes]) -> str:
    """Return the last line that a process wrote to standard error."""
    errors.seek(0)
    return next(iter(errors.read().decode(errors="replace").strip().splitlines()[-1:]), "")


# glibc's malloc adapts the size from which it requests memory from the kernel: identical processes adapt differently,
# and differ by a fifth for their whole lifetime. Source: mallopt(3), M_MMAP_THRESHOLD.
STEADY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}
_MORE_TIME = "give it more, as budget_s=600"
START_S = 300.0  # to import torch from the slowest disk
