"""What tests of suites share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from runner.measure import contest, trial
from tests.measure.nursery import Nurseries


@pytest.fixture
def few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Suites make few and short blocks: what tests plant is far above the noise."""
    monkeypatch.setattr(contest, "ROUNDS", (3, 4))
    monkeypatch.setattr(contest, "BLOCK_S", 0.05)


@pytest.fixture(scope="session")
def nurseries() -> Iterator[Nurseries]:
    made = Nurseries()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def forked_nurseries(request: pytest.FixtureRequest, nurseries: Nurseries, monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes that make cells are forked, but where they themselves are tested."""
    if request.path.name != "test_trial.py":
        monkeypatch.setattr(trial, "subprocess", nurseries)
