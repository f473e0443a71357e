"""Run collected tests in forked worker processes: `pytest --workers 3`.

Each worker of pytest-xdist imports and collects all tests again, which takes 14 s of CPU time for 8,000 tests. Here
the session collects once, and workers are forks of it. A worker takes one file after another, in collection order,
so that module fixtures are set up once and no worker is idle while files are left.
"""

from __future__ import annotations

import itertools
import os
import signal
import struct
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

import pytest

from tests.faults import tallies
from tests.forkserver import ForkServer
from tests.stand_ins.cuda.build import why_not
from tests.stand_ins.forked import StandIn

Files = Sequence[Sequence[pytest.Item]]
NUMBER = struct.Struct("H")  # of a file, in a pipe that all workers read and that holds 32,768 numbers
SERVER: pytest.StashKey[ForkServer] = pytest.StashKey()  # key in the stash of the configuration; each worker has a twin
STAND_IN: pytest.StashKey[list[str]] = pytest.StashKey()  # pipes of a worker's twin of the server on the stand-in


def run_all(session: pytest.Session, num_workers: int) -> None:
    """Run the collected tests and report them here, as pytest does for tests that run in its process."""
    assert threading.active_count() == 1, f"cannot fork while other threads run: {threading.enumerate()}"
    files = [list(items) for _, items in itertools.groupby(session.items, key=lambda item: item.path)]
    temporary: Any = session.config._tmp_path_factory  # type: ignore[attr-defined]  # lint-tests: private: of pytest
    temporary.getbasetemp()  # one folder for all workers
    with ExitStack() as stack:
        queue, filling = os.pipe()
        stack.callback(os.close, queue)
        with os.fdopen(filling, "wb") as file:
            file.write(b"".join(NUMBER.pack(number) for number in range(len(files))))
        server = session.config.stash[SERVER]
        num_workers = min(num_workers, len(files))
        stand_ins = stack.enter_context(_stand_ins(session, num_workers))
        workers = [
            stack.enter_context(Worker(session, files, queue, stack.enter_context(server.twin()), pipes))
            for pipes in stand_ins
        ]
        while any(worker.runs for worker in workers):
            wait([channel for worker in workers for channel in worker.channels])
            for worker in workers:
                worker.report()
            if session.shouldfail:
                raise session.Failed(session.shouldfail)


@contextmanager
def _stand_ins(session: pytest.Session, number: int) -> Iterator[list[list[str]]]:
    """Start a server on the GPU stand-in if a test needs it; yield the pipes of a twin for each worker."""
    if not any("stand_in" in getattr(item, "fixturenames", ()) for item in session.items) or why_not():
        yield [[]] * number
        return
    with StandIn.started() as stand_in, stand_in.server.twins_at(number) as pipes:
        yield pipes


class Worker:
    """A forked process that runs test files until none is left."""

    def __init__(
        self, session: pytest.Session, files: Files, queue: int, server: ForkServer, stand_in: list[str]
    ) -> None:
        self._session = session
        self._hook = session.config.hook
        self._test: dict[str, Any] = {"nodeid": "no test", "location": ("", None, "no test")}  # running now
        self._reports, sending = Pipe(duplex=False)
        self._pid = os.fork()
        if self._pid == 0:
            code = 1
            try:
                session.config.stash[SERVER] = server
                session.config.stash[STAND_IN] = stand_in
                _work(session, files, queue, sending)
                code = 0
            except BaseException:
                sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
            finally:
                sys.stderr.flush()
                os._exit(code)
        sending.close()
        self._end = os.pidfd_open(self._pid)
        self.runs = True

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *error: object) -> None:
        if self.runs:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
        self._reports.close()
        os.close(self._end)

    @property
    def channels(self) -> list[Any]:
        """Connections that are readable when there are results to report."""
        return [self._reports, self._end] if self.runs else []

    def report(self) -> None:
        """Report the results that the process has sent. If it died, fail its current test."""
        if not self.runs:
            return
        has_ended = bool(wait([self._end], 0))
        while self._reports.poll():
            try:
                kind, content = self._reports.recv()
            except EOFError:
                break
            getattr(self, kind)(content)
        if has_ended:
            self.runs = False
            if code := os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1]):
                reason = f"its process ended with exit code {code}; the remaining tests of this file did not run"
                lost = pytest.TestReport(**self._test, keywords={}, outcome="failed", longrepr=reason, when="call")
                self._hook.pytest_runtest_logreport(report=lost)

    def started(self, test: dict[str, Any]) -> None:
        self._test = test
        self._hook.pytest_runtest_logstart(**test)

    def reported(self, content: dict[str, Any]) -> None:
        report = self._hook.pytest_report_from_serializable(config=self._session.config, data=content)
        self._hook.pytest_runtest_logreport(report=report)

    def finished(self, test: dict[str, Any]) -> None:
        self._hook.pytest_runtest_logfinish(**test)

    def counted(self, output: dict[str, Any]) -> None:
        tallies.unpack(output["tallies"])
        snapshots: Any = self._session.config._syrupy  # type: ignore[attr-defined]  # lint-tests: private: of syrupy
        snapshots.add_worker_report(output["syrupy_report"])


def _work(session: pytest.Session, files: Files, queue: int, sending: Connection) -> None:
    """Run files until none is left, and send the reports."""
    config = session.config
    output: dict[str, Any] = {}
    sender = _Sender(config, sending)
    config.pluginmanager.unregister(name="terminalreporter")
    config.pluginmanager.register(sender, "terminalreporter")
    capture: Any = config.pluginmanager.get_plugin("capturemanager")
    capture.stop_global_capturing()  # its files are shared with the parent process
    capture.start_global_capturing()
    capture.suspend_global_capture()
    for item, following in _lookahead(itertools.chain.from_iterable(files[number] for number in _numbers(queue))):
        config.hook.pytest_runtest_protocol(item=item, nextitem=following)
    os.environ["PYTEST_XDIST_WORKER"] = "worker"  # syrupy supports workers of pytest-xdist
    config.workeroutput = output  # type: ignore[attr-defined]
    syrupy: Any = config.pluginmanager.get_plugin("syrupy")
    syrupy.pytest_sessionfinish(session, 0)
    sending.send(("counted", {**output, "tallies": tallies.pack()}))


def _numbers(queue: int) -> Iterator[int]:
    while number := os.read(queue, NUMBER.size):
        yield NUMBER.unpack(number)[0]


def _lookahead(items: Iterator[pytest.Item]) -> Iterator[tuple[pytest.Item, pytest.Item | None]]:
    """Yield each item with the next one, which determines the fixtures to tear down."""
    item = next(items, None)
    while item is not None:
        following = next(items, None)
        yield item, following
        item = following


class _Sender:
    """The terminal reporter of a worker: sends reports to the session."""

    def __init__(self, config: pytest.Config, sending: Connection) -> None:
        self._config, self._sending = config, sending
        self._tw = config.get_terminal_writer()  # for plugins that write to the terminal: stacks after a timeout

    def pytest_runtest_logstart(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        self._sending.send(("started", {"nodeid": nodeid, "location": location}))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        content = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._sending.send(("reported", content))

    def pytest_runtest_logfinish(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        self._sending.send(("finished", {"nodeid": nodeid, "location": location}))
