"""Laws of saving: when a checkpoint is due, how that is written, and which one is better."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.base.schema import fault
from runner.base.values import Every
from runner.engine import saving
from runner.engine.saving import CHECKPOINTS, SavePolicy, default, off, parse_every


@pytest.mark.parametrize(
    ("every", "parsed"),
    [
        (200, (200.0, "updates")),
        ("200updates", (200.0, "updates")),
        ("1update", (1.0, "updates")),
        ("007 updates", (7.0, "updates")),
        ("2epochs", (2.0, "epochs")),
        ("1epoch", (1.0, "epochs")),
        ("10min", (10.0, "min")),
        ("0.5min", (0.5, "min")),
        (".5 min", (0.5, "min")),
        ("10.0minutes", (10.0, "min")),
        ("1 minute", (1.0, "min")),
    ],
)
def test_a_time_to_save_means_what_it_says(every: int | str, parsed: tuple[float, str]) -> None:
    assert parse_every(every) == parsed


@given(st.from_regex(r"[0-9. ]{0,6}(updates?|epochs?|min(utes?)?)", fullmatch=True))
def test_all_that_the_schema_lets_through_is_understood(text: str) -> None:
    if fault(Every, text) is None:
        number, unit = parse_every(text)
        assert number > 0
        assert unit in ("updates", "epochs", "min")
        assert unit == "min" or number == int(number)


@pytest.mark.parametrize(
    ("policy", "updates_per_epoch", "due"),
    [
        (default(every=4), 5, [4, 8, 12]),
        (default(every="4updates"), 5, [4, 8, 12]),
        (default(every="1epoch"), 5, [5, 10]),
        (default(every="2epochs"), 5, [10]),
        (default(every="1epoch"), 1, list(range(1, 13))),
        (default(every=100), 5, []),
        (default(every="10min"), 5, []),
        (default(), 5, []),
        (off(), 5, []),
    ],
)
def test_which_updates_are_saved(policy: SavePolicy, updates_per_epoch: int, due: list[int]) -> None:
    assert [update for update in range(1, 13) if policy.due(update, updates_per_epoch)] == due


@pytest.mark.parametrize(("every", "seconds"), [("10min", 600.0), ("0.5min", 30.0), ("auto", 300.0)])
def test_minutes_are_counted_from_the_last_save(every: Any, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(saving, "time", SimpleNamespace(monotonic=lambda: now))
    policy = default(every=every)
    policy.saved()
    now += seconds - 0.1
    assert not policy.is_late()
    now += 0.1
    assert policy.is_late()
    assert policy.is_late(), "due until it is saved"
    policy.saved()
    assert not policy.is_late()
    now += seconds
    assert policy.is_late()


@pytest.mark.parametrize(
    ("better", "value", "best", "is_better"),
    [
        ("min", 1.0, None, True), ("min", 1.0, 2.0, True), ("min", 2.0, 2.0, False), ("min", 3.0, 2.0, False),
        ("max", 1.0, None, True), ("max", 3.0, 2.0, True), ("max", 2.0, 2.0, False), ("max", 1.0, 2.0, False),
        ("min", math.nan, 2.0, False), ("max", math.nan, 2.0, False),
    ],
)  # fmt: skip
def test_better_is_strictly_better(better: Any, value: float, best: float | None, is_better: bool) -> None:
    assert default(best_is=better).is_better(value, best) == is_better
    assert off(best_is=better).is_better(value, best) == is_better


def test_what_is_kept_is_what_was_said() -> None:
    assert (default(keep=7, best=None).keep, default(keep=7, best=None).best) == (7, None)
    assert (off(keep=7, best="val/x").keep, off(keep=7, best="val/x").best) == (7, "val/x")
    assert {"default": default, "off": off} == CHECKPOINTS
