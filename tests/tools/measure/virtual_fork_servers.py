"""Fork servers that are forks of one process. This process has imported torch and uses only virtual time.

tests/tools/measure/test_compare.py also uses real fork servers, which are separate processes with the real clock.
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

from runner.base.secret import drop_secrets
from runner.tools.measure.fork_server import MALLOC_ENVIRONMENT
from tests.tools.measure.shared_virtual_time import SharedVirtualTime

SERVER = """
import gc, importlib, json, os, socket, sys, traceback
from runner.config.configuration import compose
from runner.config.request import Request
from runner.tools.measure import variant_process
from tests.composed import composed
from tests.tools.measure.shared_virtual_time import START_S, SharedVirtualTime
from tests.warm import IMPORTED
for name in IMPORTED:
    importlib.import_module(name)
composed()
virtual_time = SharedVirtualTime(int(sys.argv[2]))
serve = variant_process.serve
def serve_in_virtual_time(*given):
    if given[3]:
        virtual_time.install_for_ranks()
    else:
        virtual_time.install()
    return serve(*given)
variant_process.serve = serve_in_virtual_time
class VariantThatTakesTimeToStart(variant_process.TrainingVariant):
    def begin(self, *args, **kwargs):  # not when it is forked: the measuring process may not yet have read the clock
        if self.world is None or self.world.is_first:
            virtual_time.advance(START_S)
        return super().begin(*args, **kwargs)
variant_process.TrainingVariant = VariantThatTakesTimeToStart
variant_process.BlockClock.run_queue_wait = lambda self: lambda: 0.0  # no core is waited for in virtual time
compose(Request())
gc.collect()
gc.freeze()
with socket.socket(fileno=int(sys.argv[1])) as line:
    while True:
        content, given, _, _ = socket.recv_fds(line, 1 << 18, 2)
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
                    os.environ.clear()
                    os.environ.update(order["environment"])
                    code = variant_process.main(given[0], us, order["cores"])
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(code)
            for number in given:
                os.close(number)
        line.sendall(json.dumps(answer).encode())
"""


class VirtualForkServers:
    """Replaces the module `subprocess` in the code that starts fork servers."""

    DEVNULL = subprocess.DEVNULL

    def __init__(self) -> None:
        self.time = SharedVirtualTime(os.memfd_create("virtual time"))
        self._process: subprocess.Popen[bytes] | None = None

    def Popen(self, args: list[str], **given: Any) -> Any:  # noqa: N802 - the name of the replaced class
        """Return a fork server, which supports `kill` and `wait`."""
        assert args[1:3] == ["-m", "runner.tools.measure.variant_process"]
        if self._process is None or self._process.poll() is not None:  # a test may have signaled the process group
            self._start()
        order = {"cores": int(args[5]), "cwd": str(Path.cwd()), "environment": given["env"]}
        message, descriptors = json.dumps(order).encode(), [*given["pass_fds"], given["stderr"].fileno()]
        try:
            socket.send_fds(self._line, [message], descriptors)
        except BrokenPipeError:  # the process has died
            self._start()
            socket.send_fds(self._line, [message], descriptors)
        return _Forked(self, int(self.answer()))

    def wait(self, pid: int) -> int:
        """Return the exit code of a fork server."""
        try:
            self._line.sendall(json.dumps({"wait": pid}).encode())
        except BrokenPipeError:  # the process and its children have died
            return -signal.SIGKILL
        return int(self.answer())

    def answer(self) -> Any:
        content = self._line.recv(1 << 10)
        assert content, "the process that forks the servers died"
        return json.loads(content)

    def close(self) -> None:
        """End all fork servers."""
        if self._process is not None:
            self._line.close()
            self._process.wait(timeout=30)

    def _start(self) -> None:
        if self._process is not None:
            self._line.close()
        self._line, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", SERVER, str(theirs.fileno()), str(self.time.memory)],
                pass_fds=[theirs.fileno(), self.time.memory], start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                env={**MALLOC_ENVIRONMENT, **drop_secrets(os.environ), "PYTHONPATH": str(Path(__file__).parents[3])},
            )  # fmt: skip


class _Forked:
    def __init__(self, fork_servers: VirtualForkServers, pid: int) -> None:
        self._fork_servers, self._pid = fork_servers, pid

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)

    def wait(self) -> int:
        return self._fork_servers.wait(self._pid)
