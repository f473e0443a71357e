"""A fixture for tests on the stand-in: a fork server that has imported torch with the stand-in."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.forkserver import ForkServer
from tests.stand_ins.cuda.build import why_not
from tests.stand_ins.forked import StandIn
from tests.workers import STAND_IN


@pytest.fixture(scope="session")
def stand_in(pytestconfig: pytest.Config) -> Iterator[StandIn]:
    """Run programs on machines with stand-in GPUs; workers of pytest share the process that has imported torch."""
    if reason := why_not():
        pytest.skip(reason)
    if pipes := pytestconfig.stash.get(STAND_IN, []):
        with ForkServer.connected(pipes) as server:
            yield StandIn(server)
        return
    with StandIn.started() as made:
        yield made
