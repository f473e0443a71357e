"""Fixtures for tests of suites."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait

import pytest

from runner.tools.measure import advisor, compare, fork_server, selection, suite, tuner
from runner.tools.measure.suites import before_after, ladder
from tests.tools.measure.shared_virtual_time import SharedVirtualTime, Wait
from tests.tools.measure.virtual_fork_servers import VirtualForkServers

TIMED = (advisor, before_after, suite, selection, ladder, compare, tuner)


@pytest.fixture
def few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure only a few short blocks, because differences in tests are far above the noise."""
    monkeypatch.setattr(suite, "ROUNDS", (3, 4))
    monkeypatch.setattr(suite, "BLOCK_S", 0.05)


@pytest.fixture(scope="session")
def fork_servers() -> Iterator[VirtualForkServers]:
    made = VirtualForkServers()
    yield made
    made.close()


@pytest.fixture(scope="module", autouse=True)
def virtual_time(fork_servers: VirtualForkServers) -> Iterator[SharedVirtualTime]:
    """Make all variants forks of one process. The variants and the code that measures them use only virtual time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fork_server, "subprocess", fork_servers)
        patch.setattr(fork_server, "wait", Wait(fork_servers.time))
        for module in TIMED:
            patch.setattr(module, "time", fork_servers.time)
        yield fork_servers.time


@pytest.fixture
def shown(screen: Callable[..., None]) -> Callable[..., None]:
    """The fixture `screen`, for modules in which `screen` is a function under test."""
    return screen


@pytest.fixture
def real_time() -> Iterator[None]:
    """Use real fork servers and the real clock."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fork_server, "subprocess", subprocess)
        patch.setattr(fork_server, "wait", wait)
        for module in TIMED:
            patch.setattr(module, "time", time)
        yield
