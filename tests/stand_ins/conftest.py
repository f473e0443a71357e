"""Fixture for tests on the stand-in: a fork server that has imported torch with the stand-in."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.stand_ins.cuda.build import why_not
from tests.stand_ins.forked import StandIn


@pytest.fixture(scope="session")
def stand_in() -> Iterator[StandIn]:
    """Runs programs on machines with stand-in GPUs."""
    if reason := why_not():
        pytest.skip(reason)
    with StandIn.started() as made:
        yield made
