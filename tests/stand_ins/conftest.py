"""What tests on the stand-in share: one process that has imported torch with it, and forks for all that runs on it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.stand_ins.cuda.build import why_not
from tests.stand_ins.forked import StandIn


@pytest.fixture(scope="session")
def stand_in() -> Iterator[StandIn]:
    """Machines whose GPUs are stand-ins."""
    if reason := why_not():
        pytest.skip(reason)
    with StandIn.started() as made:
        yield made
