"""Nurseries of cells that are forks of one process, which has torch imported: seconds less for each.

For tests of what is done with cells; tests/measure/test_trial.py has real nurseries, each a process of its own.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from runner.measure.trial import without_secrets

SERVER = """
import gc, json, os, socket, sys, traceback
from runner.base.configuration import Request, compose
from runner.measure import cell
compose(Request())
gc.collect()
gc.freeze()
with socket.socket(fileno=int(sys.argv[1])) as line:
    while True:
        content, given, _, _ = socket.recv_fds(line, 1 << 16, 2)
        if not content:
            break
        order = json.loads(content)
        if "wait" in order:
            answer = os.waitstatus_to_exitcode(os.waitpid(order["wait"], 0)[1])
        else:
            us, answer = os.getpid(), os.fork()
            if answer == 0:
                code = 70
                try:
                    line.close()
                    os.setsid()
                    os.dup2(given[1], 2)
                    os.chdir(order["cwd"])
                    code = cell.main(given[0], us, order["cores"])
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(code)
            for number in given:
                os.close(number)
        line.sendall(json.dumps(answer).encode())
"""


class Nurseries:
    """In the place of `subprocess` where nurseries are started; a nursery with an environment of its own is real."""

    DEVNULL = subprocess.DEVNULL

    def __init__(self) -> None:
        self._environment = without_secrets(os.environ)
        self._process: subprocess.Popen[bytes] | None = None

    def Popen(self, words: list[str], **given: Any) -> Any:  # noqa: N802 - the name that is stood in for
        """Return a nursery, to be killed and waited for."""
        assert words[1:3] == ["-m", "runner.measure.cell"]
        if _own(given["env"]) != _own(self._environment):
            return subprocess.Popen(words, **given)
        if self._process is None:
            self._start()
        order = {"cores": int(words[5]), "cwd": str(Path.cwd())}
        socket.send_fds(self._line, [json.dumps(order).encode()], [*given["pass_fds"], given["stderr"].fileno()])
        return _Forked(self, int(self.answer()))

    def wait(self, pid: int) -> int:
        """Return how a nursery ended."""
        self._line.sendall(json.dumps({"wait": pid}).encode())
        return int(self.answer())

    def answer(self) -> Any:
        content = self._line.recv(1 << 10)
        assert content, "the process that makes nurseries died"
        return json.loads(content)

    def close(self) -> None:
        """All nurseries end."""
        if self._process is not None:
            self._line.close()
            self._process.wait(timeout=30)

    def _start(self) -> None:
        self._line, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", SERVER, str(theirs.fileno())],
                pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                env={**self._environment, "PYTHONPATH": str(Path(__file__).parents[2])},
            )  # fmt: skip


def _own(environment: dict[str, str]) -> dict[str, str]:
    """Return what is not of pytest, which tells in the environment which test it is at."""
    return {name: value for name, value in environment.items() if not name.startswith("PYTEST_")}


class _Forked:
    def __init__(self, nurseries: Nurseries, pid: int) -> None:
        self._nurseries, self._pid = nurseries, pid

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)

    def wait(self) -> int:
        return self._nurseries.wait(self._pid)
