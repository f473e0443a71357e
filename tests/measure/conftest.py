"""What tests of suites share."""

from __future__ import annotations

import pytest

from runner.measure import contest


@pytest.fixture
def few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Suites make few and short blocks: what tests plant is far above the noise."""
    monkeypatch.setattr(contest, "ROUNDS", (3, 4))
    monkeypatch.setattr(contest, "BLOCK_S", 0.05)
