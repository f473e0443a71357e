"""accel-run commands in forked processes: real processes, with real signals, that do not import torch again.

The server is a process of its own that has torch and the runner loaded and has never started a thread; each command
is a fork of it. Its standard input takes one request per line, its output gives the pid and then the exit code.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SERVER = """
import json, os, sys
import torch, torch._dynamo
torch.set_num_threads(1)
import runner.cli, runner.engine.session, runner.engine.screen, runner.engine.train, runner.engine.assemble
import runner.engine.infer, runner.plan.plan, hydra, numpy.testing, safetensors.torch, rich.live
for line in sys.stdin:
    request = json.loads(line)
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            os.setsid()
            os.chdir(request["cwd"])
            os.environ.update(request["env"])
            for number, name in ((1, "out"), (2, "err")):
                os.dup2(os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            sys.argv = ["accel-run", *request["words"]]
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

    def start(self, words: list[str], folder: Path, env: Mapping[str, str] | None = None) -> int:
        """Start a command and return its pid; `wait` must follow."""
        self._files = (folder / ".out", folder / ".err")
        request = {
            "words": words, "cwd": str(folder), "env": dict(env or {}),
            "out": str(self._files[0]), "err": str(self._files[1]),
        }  # fmt: skip
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return int(self._answer()["pid"])

    def wait(self) -> Ended:
        """Wait for the command that was started."""
        code = int(self._answer()["code"])
        out, err = (path.read_text(errors="replace") for path in self._files)
        return Ended(code, out, err)

    def run(self, words: str | list[str], folder: Path, env: Mapping[str, str] | None = None) -> Ended:
        """Run a command to its end."""
        self.start(words.split() if isinstance(words, str) else words, folder, env)
        return self.wait()

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(timeout=30)
        self.process.stdout.close()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the fork server died"
        return json.loads(line)
