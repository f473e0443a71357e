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

from runner.base.errors import AccelRunError, Exit, HostMemoryError, Problem, remake
from runner.base.secret import without_secrets


class OutOfTime(AccelRunError):
    """The time of a trial is over before a cell has answered."""

    exit_code = Exit.CONFIG


def _out_of_time() -> OutOfTime:
    return OutOfTime("must be longer: the time was over before a cell had answered", where="budget_s", fix=_MORE_TIME)


class NoAnswer(AccelRunError):
    """Nothing was heard."""


class JsonSocket:
    """A socket to a process of ours: lines of JSON there and back."""

    def __init__(self, line: socket.socket) -> None:
        self.line = line
        self._heard = b""

    def hear(self, timeout_s: float) -> dict[str, Any] | None:
        """Return the next answer, None where the other end is gone. Raises NoAnswer if none comes in time."""
        until = time.monotonic() + timeout_s
        while b"\n" not in self._heard:
            ready, _, _ = select.select([self.line], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                raise NoAnswer(f"no answer within {timeout_s:.0f} s")
            content = self.line.recv(1 << 16)
            if not content:
                return None
            self._heard += content
        text, _, self._heard = self._heard.partition(b"\n")
        answer: dict[str, Any] = json.loads(text)
        return answer


class ForkServer:
    """A process that has imported what cells need and computed nothing; cells are forks of it.

    So each begins as a fresh process does, without the seconds of importing torch.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str], cores: int) -> None:
        self.folder = folder
        line, theirs = socket.socketpair()
        self._line = JsonSocket(line)
        self._said = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - closed in __exit__
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
                stderr=self._said,
                start_new_session=True,
                env={**STEADY, **without_secrets(os.environ), **environment},
            )
        self._answer()

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._line.line.close()
        self._said.close()

    def fork(self, line: socket.socket, said: IO[bytes]) -> int:
        """Return the number of a new process, whose socket is `line` and whose standard error is `said`."""
        order = json.dumps({"do": "fork"}).encode()
        socket.send_fds(self._line.line, [order], [line.fileno(), said.fileno()])
        return int(self._answer("pid")["pid"])

    def wait(self, pid: int) -> int:
        """Return how a process of this server ended; negative for a signal."""
        self._line.line.sendall(json.dumps({"do": "wait", "pid": pid}).encode())
        return int(self._answer("code")["code"])

    def _answer(self, what: str = "") -> dict[str, Any]:
        """Return the next answer that tells this; what was asked before Ctrl-C, and never heard, is passed over."""
        while True:
            answer = self._line.hear(START_S)
            if answer is None:
                said = _last_line(self._said) or "nobody knows why"
                raise AccelRunError(f"the process that makes cells ended: {said}")
            if not what or what in answer:
                return answer


class VariantProcess(JsonSocket):
    """A cell and its data workers: a session of its own, stopped and continued as a whole."""

    def __init__(self, server: ForkServer, number: int, clock: Callable[[], float], until: float) -> None:
        ours, theirs = socket.socketpair()
        super().__init__(ours)
        self._server, self.number, self._clock = server, number, clock
        self.until = until  # when nobody waits for its answers any more
        self._said = tempfile.TemporaryFile(dir=server.folder)  # noqa: SIM115 - closed in `end`
        with theirs:
            self.pid = server.fork(theirs, self._said)
        self._code: int | None = None

    def __enter__(self) -> VariantProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def make(self, updates: int, timeout_s: float) -> float:
        """Let it make so many updates; return the seconds they took."""
        made = self.block(updates, timeout_s)
        return float(made["seconds"] - made["behind_s"])

    def block(self, updates: int, timeout_s: float, unpaid: int = 0) -> dict[str, Any]:
        """Let it make so many updates; return what they took, without the `unpaid` ones before them."""
        return self.ask({"do": "make", "updates": updates, "unpaid": unpaid}, timeout_s)

    def ask(self, order: Mapping[str, Any], timeout_s: float = 600.0) -> dict[str, Any]:
        """Return the answer to an order. Raises AccelRunError with what ended the cell, or that it took too long."""
        with suppress(OSError):  # it has died: hear what it has to say of that
            self.line.sendall((json.dumps(order) + "\n").encode())
        return self.answer(timeout_s)

    def answer(self, timeout_s: float) -> dict[str, Any]:
        """Return the next answer; raises as `ask` does, and OutOfTime where the time is over first."""
        left_s = max(0.0, self.until - self._clock())
        try:
            answer = self.hear(min(timeout_s, left_s))
        except NoAnswer as error:
            raise _out_of_time() if left_s < timeout_s else error from None
        if answer is None:
            raise self._death()
        if "error" in answer:
            problems = tuple(Problem(**problem) for problem in answer["error"])
            raise remake(AccelRunError, problems, Exit(answer["exit_code"]))
        return answer

    def pause(self) -> None:
        """Nothing of it runs until `resume`."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """It runs again."""
        self._signal(signal.SIGCONT)

    def end(self) -> None:
        """It is over, with all its children."""
        if self._said.closed:
            return
        self._signal(signal.SIGKILL)
        with suppress(AccelRunError, OSError):
            self._ended()
        self.line.close()
        self._said.close()

    def _ended(self) -> int:
        if self._code is None:
            self._code = self._server.wait(self.pid)
        return self._code

    def _signal(self, number: signal.Signals) -> None:
        if self._code is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    def _death(self) -> AccelRunError:
        code = self._ended()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
        kind = HostMemoryError if code == -signal.SIGKILL else AccelRunError
        killed = ": the machine's memory may be used up" if kind is HostMemoryError else ""
        last = _last_line(self._said)
        return kind(f"its process {how}{killed}{f' ({last})' if last else ''}")


def _last_line(said: IO[bytes]) -> str:
    """Return the last line that a process wrote to standard error; empty where it wrote none."""
    said.seek(0)
    return next(iter(said.read().decode(errors="replace").strip().splitlines()[-1:]), "")


# glibc's malloc learns from what is freed from which size on it asks the system for memory each time: processes that do
# the same learn different things, and differ by a fifth for as long as they live. Source: mallopt(3), M_MMAP_THRESHOLD.
STEADY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}


_MORE_TIME = "give it more, as budget_s=600"


START_S = 300.0  # in which torch is imported, on the slowest disk
