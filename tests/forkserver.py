"""A fork server for accel-run commands: real processes, with real signals, that do not import torch again.

The server is a separate process that has imported torch and the runner and has never started a thread. Each command,
and each function called in a separate process, is a fork of it. The server reads one request per line from standard
input, and answers with the PID and then the exit code. IMPORT_FIRST in a command's environment names test modules to
import before the command starts.
"""

from __future__ import annotations

import base64
import ctypes
import importlib
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TextIO, TypeVar

ROOT = Path(__file__).parent.parent
T = TypeVar("T")
PR_SET_PDEATHSIG = 1  # linux/prctl.h
SERVER = "from tests.forkserver import serve; serve()"


def serve() -> None:
    """Serve requests until standard input is closed."""
    from tests.warm import warm

    warm()
    _answer_all(sys.stdin, sys.stdout)


def _answer_all(requests: TextIO, answers: TextIO) -> None:
    import runner.cli

    for line in requests:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            code: Any = 70
            try:
                if "twin" in request:
                    _be_twin(*request["twin"])
                _renew_thread_pool()
                _prepare(request)
                code = _call(request) if "function" in request else runner.cli.main(request["words"])
            except BaseException:
                traceback.print_exc()
            finally:
                with suppress(BaseException):
                    sys.stdout.flush()
                    sys.stderr.flush()
                os._exit(code)
        print(json.dumps({"pid": pid}), file=answers, flush=True)
        if "twin" not in request:
            _, status, used = os.wait4(pid, 0)
            result = {"code": os.waitstatus_to_exitcode(status), "cpu_s": used.ru_utime + used.ru_stime}
            print(json.dumps(result), file=answers, flush=True)


def _be_twin(requests: str, answers: str) -> None:
    """Serve requests from another pipe until it is closed, then exit; also exit with the first server."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    with open(requests) as reading, open(answers, "w") as writing:  # noqa: PTH123 - each waits for the other side
        for number in (0, 1):  # close the pipes of the first server, so that their readers and writers notice its exit
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
        _answer_all(reading, writing)
    os._exit(0)


def _renew_thread_pool() -> None:
    """Replace torch's thread pool, which is unusable after a fork, as the backend of a run does.

    Otherwise, torch replaces it at the first use, where the threads of the autograd engine, one per GPU, are not
    synchronized: if one of them finds no pool, the process aborts.
    """
    import torch

    torch.set_num_threads(torch.get_num_threads())


def _prepare(request: Mapping[str, Any]) -> None:
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        signal.signal(number, handler)  # the tests may run under nohup, or in the background of a script
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
    exec(request["before"], {})  # noqa: S102 - code of a test


def _call(request: Mapping[str, Any]) -> int:
    """Call a function, and write its return value or exception to a file."""
    function, arguments = pickle.loads(base64.b64decode(request["function"]))
    try:
        result = (function(*arguments), None)
    except BaseException as error:
        traceback.print_exc()
        result = (None, error)
    Path(request["result"]).write_bytes(pickle.dumps(result))
    return 0


@dataclass(frozen=True)
class CompletedCommand:
    """How a command ended; `code` is negative for a signal."""

    code: int
    out: str
    err: str


class ForkServer:
    """Runs accel-run commands one at a time."""

    cpu_s = 0.0  # CPU time of all finished commands of servers that are not children of this process

    def __init__(self, requests: TextIO, answers: TextIO, ancestor: int | None = None) -> None:
        self.requests, self.answers = requests, answers
        self._ancestor = ancestor  # PID of a process whose CPU time includes that of the server
        self._files: tuple[Path, ...] = ()
        self._running: int | None = None

    @classmethod
    @contextmanager
    def started(cls, env: Mapping[str, str] | None = None) -> Iterator[Self]:
        """Import torch and the runner in a separate process; `env` is added to its environment."""
        with subprocess.Popen(
            [sys.executable, "-c", SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **(env or {})},
        ) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            made = cls(process.stdin, process.stdout, os.getpid())
            try:
                yield made
            finally:
                made.clear()
                process.stdin.close()
                process.wait(timeout=30)

    @contextmanager
    def twin(self) -> Iterator[Self]:
        """Start another server, a fork of this one, so that two commands run at the same time."""
        with self.twin_at() as pipes, self.connected(pipes, self._ancestor) as made:
            yield made

    @contextmanager
    def twin_at(self) -> Iterator[list[str]]:
        """Start a twin and yield the paths of its pipes, to which one process may connect."""
        self.clear()
        with self.twins_at(1) as (pipes,):
            self._answer()
            yield pipes

    @contextmanager
    def twins_at(self, number: int) -> Iterator[list[list[str]]]:
        """Start twins as soon as this server, which has no other use, has started; yield their pipes."""
        with tempfile.TemporaryDirectory() as name:
            made = [[str(Path(name) / f"{way}-{twin}") for way in ("requests", "answers")] for twin in range(number)]
            for pipes in made:
                for pipe in pipes:
                    os.mkfifo(pipe)
                self._send({"twin": pipes})
            yield made

    @classmethod
    @contextmanager
    def connected(cls, pipes: Sequence[str], ancestor: int | None = None) -> Iterator[Self]:
        """Connect to the server behind these pipes."""
        with open(pipes[0], "w") as requests, open(pipes[1]) as answers:  # noqa: PTH123 - as the twin opens them
            made = cls(requests, answers, ancestor)
            try:
                yield made
            finally:
                made.clear()

    def start(self, args: list[str], folder: Path, env: Mapping[str, str] | None = None, before: str = "") -> int:
        """Start a command and return its PID. Call `wait` afterwards: the next `start` kills a running command.

        before  Python code that the new process runs first, for example to change limits, mounts or its user
        """
        return self._start({"words": args, "env": dict(env or {}), "before": before}, folder)

    def start_program(self, program: str, folder: Path, env: Mapping[str, str], streams: tuple[str, str]) -> int:
        """Start a program and return its PID; `streams` are paths for standard output and error, such as pipes."""
        return self._start({"words": [], "env": dict(env), "before": program}, folder, streams)

    def wait(self) -> CompletedCommand:
        """Wait until the running command ends."""
        result = self._answer()
        code = int(result["code"])
        ForkServer.cpu_s += 0.0 if os.getpid() == self._ancestor else result["cpu_s"]
        self._running = None
        out, err = (path.read_text(errors="replace") for path in self._files) if self._files else ("", "")
        return CompletedCommand(code, out, err)

    def run(
        self, args: str | list[str], folder: Path, env: Mapping[str, str] | None = None, before: str = ""
    ) -> CompletedCommand:
        """Run a command to completion."""
        self.start(args.split() if isinstance(args, str) else args, folder, env, before)
        return self.wait()

    def call(self, function: Callable[..., T], *arguments: object) -> T:
        """Call an importable function in a separate process; return its value or raise its exception.

        The process has one thread, so that the function may fork, unshare mounts and change its user.
        """
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            packed = base64.b64encode(pickle.dumps((function, arguments))).decode()
            request = {"words": [], "env": {}, "before": "", "function": packed, "result": str(folder / "result")}
            self._start(request, folder)
            result = self.wait()
            assert result.code == 0, f"{function.__name__} ended with {result.code}: {result.out}{result.err}"
            value, error = pickle.loads((folder / "result").read_bytes())
        if error is not None:
            raise error
        return value  # type: ignore[no-any-return]

    def clear(self) -> None:
        """Kill the command of a test that failed before it called `wait`, because other tests need the server."""
        if self._running is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._running, signal.SIGKILL)
            with suppress(AssertionError):
                self._answer()
        self._running = None

    def _start(self, request: dict[str, Any], folder: Path, streams: tuple[str, str] | None = None) -> int:
        self.clear()
        self._files = () if streams else (folder / ".out", folder / ".err")
        out, err = streams or map(str, self._files)
        self._send(request | {"cwd": str(folder), "out": out, "err": err})
        self._running = int(self._answer()["pid"])
        return self._running

    def _send(self, request: Mapping[str, Any]) -> None:
        self.requests.write(json.dumps(request) + "\n")
        self.requests.flush()

    def _answer(self) -> Any:
        line = self.answers.readline()
        assert line, "the fork server died"
        return json.loads(line)
