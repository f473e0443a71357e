"""What all tests share."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults import tallies
from tests.forkserver import ForkServer


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Report tests that need a GPU as skipped where there is none."""
    import torch

    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device here"))


@pytest.fixture(scope="session")
def server() -> Iterator[ForkServer]:
    """accel-run in processes of its own, without importing torch each time."""
    made = ForkServer()
    yield made
    made.close()


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder for TMPDIR: the names of sockets, which data workers make in it, have 107 bytes at most."""
    with tempfile.TemporaryDirectory(prefix="test-") as name:
        yield Path(name)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take the counts of a process that has run a part of the tests."""
    tallies.unpack(getattr(node, "workeroutput", {}).get("tallies", []))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Hand the counts of this process on, where it runs only a part of the tests."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["tallies"] = tallies.packed()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show what the fault suites have tried."""
    if tallies.TALLIES:
        terminalreporter.section("faults injected")
        tallies.show(terminalreporter.write_line)
