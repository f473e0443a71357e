"""What is tried where a run does not fit: what is known for nothing always, traces while there is time."""

from __future__ import annotations

from typing import Any

import pytest

from runner.engine import changes
from runner.plan.fits import Needs
from tests.plan.test_fits import HERE, composed, demand, plan

WORDS = ("global_batch_size=64", "micro_batch_size=64", "precision=fp32")


def tried(monkeypatch: pytest.MonkeyPatch, sample_gib: float, seconds: float) -> tuple[list[Any], list[Any], int]:
    """Return what is found and what is left where a trace takes so long, and its samples so much; and all traces."""
    asked: list[Any] = []

    def needs_of(*given: Any) -> Needs:
        asked.append(given)
        return Needs({"train": demand(1, 64, sample_gib=sample_gib)})

    monkeypatch.setattr(changes, "needs_of", needs_of)
    monkeypatch.setattr(changes.time, "process_time", lambda: seconds * len(asked))
    needs = Needs({"train": demand(1, 64)})
    made = plan(*WORDS, needs=needs)
    assert not made.memory[0].prediction.fits
    return *changes.changes_of(composed(*WORDS), HERE, made, needs, {}), len(asked)


def test_what_there_was_no_time_for_is_told_and_what_costs_none_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    found, untried, traces = tried(monkeypatch, 0.1, 2 * changes.MOST_S)
    assert {change.words[0].partition("=")[0] for change in found} == {"micro_batch_size", "memory"}
    assert (untried, traces) == ([changes.BUDGET], 1)
    _, untried, traces = tried(monkeypatch, 0.1, 0.0)
    assert (untried, traces) == ([], 2)


def test_no_block_is_chosen_where_all_would_not_be_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    found, untried, traces = tried(monkeypatch, 0.5, 0.0)
    assert [change.words[0].partition("=")[0] for change in found] == ["micro_batch_size"]
    assert (untried, traces) == ([], 1)
