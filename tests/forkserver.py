"""accel-run commands in forked processes: real processes, with real signals, that do not import torch again.

The server is a process of its own that has torch and the runner loaded and has never started a thread; each command
is a fork of it. Its standard input takes one request per line, its output gives the pid and then the exit code.
IMPORT_FIRST in a command's environment names modules of tests that prepare the process before the command begins.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SERVER = """
import importlib, json, os, sys, tempfile
import runner.cli
from tests.warm import warm
warm()
for line in sys.stdin:
    request = json.loads(line)
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            os.setsid()
            os.chdir(request["cwd"])
            os.environ.update(request["env"])
            tempfile.tempdir = None
            for number, name in ((1, "out"), (2, "err")):
                os.dup2(os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            sys.argv = ["accel-run", *request["words"]]
            for module in request["env"].get("IMPORT_FIRST", "").split():
                importlib.import_module(module)
            exec(request["before"], {})
            try:
                code = runner.cli.main(request["words"])
            except BaseException:
                import traceback
                traceback.print_exc()
            sys.stdout.flush(); sys.stderr.flush()
        finally:
            os._exit(code)
    print(json.dumps({"pid": pid}), flush=True)
    _, status = os.waitpid(pid, 0)
    print(json.dumps({"code": os.waitstatus_to_exitcode(status)}), flush=True)
"""


@dataclass(frozen=True)
class Ended:
    """How a command ended; `code` is negative for a signal."""

    code: int
    out: str
    err: str


class ForkServer:
    """Runs accel-run commands one at a time."""

    def __init__(self) -> None:
        root = Path(__file__).parent.parent
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
        )
        self._running: int | None = None

    def start(self, words: list[str], folder: Path, env: Mapping[str, str] | None = None, before: str = "") -> int:
        """Start a command and return its pid; `wait` must follow, else it is killed by the next start.

        before  Python that the new process runs first, to change what it finds: limits, mounts, its user
        """
        self._clear()
        self._files = (folder / ".out", folder / ".err")
        request = {
            "words": words, "cwd": str(folder), "env": dict(env or {}), "before": before,
            "out": str(self._files[0]), "err": str(self._files[1]),
        }  # fmt: skip
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        self._running = int(self._answer()["pid"])
        return self._running

    def wait(self) -> Ended:
        """Wait for the command that was started."""
        code = int(self._answer()["code"])
        self._running = None
        out, err = (path.read_text(errors="replace") for path in self._files)
        return Ended(code, out, err)

    def run(
        self, words: str | list[str], folder: Path, env: Mapping[str, str] | None = None, before: str = ""
    ) -> Ended:
        """Run a command to its end."""
        self.start(words.split() if isinstance(words, str) else words, folder, env, before)
        return self.wait()

    def close(self) -> None:
        self._clear()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(timeout=30)
        self.process.stdout.close()

    def _clear(self) -> None:
        """Kill the command of a test that failed before it waited: others wait for this server, too."""
        if self._running is not None and self.process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._running, signal.SIGKILL)
            self._answer()
        self._running = None

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the fork server died"
        return json.loads(line)
