"""The save policy: when a checkpoint is due, how intervals are parsed, and which checkpoint is better."""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.base.values import Every
from runner.config.schema import describe_mismatch
from runner.durable.checkpoint_writer import SavedCheckpoint
from runner.engine.checkpoints import save_policy
from runner.engine.checkpoints.save_policy import CHECKPOINTS, SaveCost, SavePolicy, default, off, parse_every


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
def test_checkpoint_intervals_are_parsed(every: int | str, parsed: tuple[float, str]) -> None:
    assert parse_every(every) == parsed


@pytest.mark.slow
@given(st.from_regex(r"[0-9. ]{0,6}(updates?|epochs?|min(utes?)?)", fullmatch=True))
def test_every_interval_that_the_schema_accepts_is_parsed(text: str) -> None:
    if describe_mismatch(Every, text) is None:
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
def test_saves_follow_the_checkpoint_interval(policy: SavePolicy, updates_per_epoch: int, due: list[int]) -> None:
    assert [update for update in range(1, 13) if policy.is_due(update, updates_per_epoch)] == due


@pytest.mark.parametrize(("every", "seconds"), [("10min", 600.0), ("0.5min", 30.0), ("auto", 60.0)])
def test_minutes_are_counted_from_the_last_save(every: Any, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(save_policy, "time", SimpleNamespace(monotonic=lambda: now))
    policy = default(every=every)
    policy.restart_interval()
    now += seconds - 0.1
    assert not policy.is_due_by_time()
    now += 0.1
    assert policy.is_due_by_time()
    assert policy.is_due_by_time(), "due until it is saved"
    policy.restart_interval()
    assert not policy.is_due_by_time()
    now += seconds
    assert policy.is_due_by_time()


@pytest.mark.parametrize("every", [100, "2epochs", "10min"])
def test_a_failed_save_is_retried_once_after_a_minute(every: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(save_policy, "time", SimpleNamespace(monotonic=lambda: now))
    policy = default(every=every)
    for _ in range(2):
        policy.restart_interval()
        policy.record_result(has_succeeded=False)
        now += 59.0
        assert not policy.is_due_by_time()
        now += 1.0
        assert policy.is_due_by_time()
        policy.restart_interval()
        policy.record_result(has_succeeded=False)
        now += 90.0
        assert not policy.is_due_by_time(), (
            "three failures in a row end the run, so retries must outlast a disk that is unavailable for minutes"
        )
        policy.restart_interval()
        policy.record_result(has_succeeded=True)
        now += 90.0
        assert not policy.is_due_by_time()
    without = off()
    without.record_result(has_succeeded=False)
    now += 90.0
    assert not without.is_due_by_time()


@pytest.mark.parametrize(
    ("better", "value", "best", "is_better"),
    [
        ("min", 1.0, None, True), ("min", 1.0, 2.0, True), ("min", 2.0, 2.0, False), ("min", 3.0, 2.0, False),
        ("max", 1.0, None, True), ("max", 3.0, 2.0, True), ("max", 2.0, 2.0, False), ("max", 1.0, 2.0, False),
        ("min", math.nan, 2.0, False), ("max", math.nan, 2.0, False),
    ],
)  # fmt: skip
def test_an_equal_metric_is_not_an_improvement(better: Any, value: float, best: float | None, is_better: bool) -> None:
    assert default(best_is=better).is_better(value, best) == is_better
    assert off(best_is=better).is_better(value, best) == is_better


def test_policies_have_the_requested_keep_and_best_settings() -> None:
    assert (default(keep=7, best=None).keep, default(keep=7, best=None).best) == (7, None)
    assert (off(keep=7, best="val/x").keep, off(keep=7, best="val/x").best) == (7, "val/x")
    assert {"default": default, "off": off} == CHECKPOINTS


# ---------------------------------------------------------------- cost of saves, and the interval derived from it


def make_saved_checkpoint(write_s: float = 2.0, total_s: float = 2.5) -> SavedCheckpoint:
    return SavedCheckpoint(Path("update-0000000001"), 1, 1_200_000_000, write_s, total_s)


def record_save(save_cost: SaveCost, held_s: float, during: list[float], written: SavedCheckpoint) -> None:
    """Record a save that paused training, and the durations of the updates during its write."""
    save_cost.record_pause(held_s)
    for seconds in during:
        save_cost.record_update(seconds, writing=True)
    save_cost.record_write(written)


def test_the_cost_of_a_save_includes_pause_and_slowdown() -> None:
    save_cost = SaveCost()
    for seconds in (0.5, 0.4, 0.6, 9.0, 0.5):  # one of them is an outlier
        save_cost.record_update(seconds, writing=False)
    assert save_cost.expected_s() is None
    record_save(save_cost, 0.3, [0.7, 0.6, 0.5], make_saved_checkpoint())
    assert save_cost.last is not None
    assert save_cost.last.held_s == 0.3
    assert save_cost.last.slowed_s == pytest.approx(0.3)
    assert save_cost.cost_s == pytest.approx(0.6)
    assert save_cost.expected_s() == pytest.approx(2.3)
    record_save(save_cost, 0.1, [0.4], make_saved_checkpoint(1.0))
    assert save_cost.last.slowed_s == 0.0, "never negative"
    assert (save_cost.num_saves, save_cost.held_s, save_cost.slowed_s) == (2, pytest.approx(0.4), pytest.approx(0.3))
    assert save_cost.expected_s() == pytest.approx(2.3), "the slowest of the last three"


def test_failed_saves_are_excluded_from_save_costs() -> None:
    save_cost, good = SaveCost(), make_saved_checkpoint()
    save_cost.record_update(0.5, writing=False)
    for written in (None, good, good):
        save_cost.record_pause(0.1)
        save_cost.record_update(5.0, writing=True)
        save_cost.record_write(written)
    assert save_cost.slowed_s == pytest.approx(4.5)
    assert len(save_cost.state()) == 1


def test_save_costs_are_restored_on_resume() -> None:
    save_cost, resumed = SaveCost(), SaveCost()
    save_cost.record_update(0.5, writing=False)
    for seconds in (3.0, 1.0, 2.0, 1.5):
        record_save(save_cost, 0.25, [0.5], make_saved_checkpoint(seconds))
    resumed.load(save_cost.state())
    assert resumed.expected_s() == save_cost.expected_s() == 2.25
    assert resumed.cost_s == save_cost.cost_s
    assert resumed.last == save_cost.last
    resumed.load([])
    assert resumed.expected_s() is None


@pytest.mark.parametrize(
    ("cost_s", "write_s", "update_s", "seconds", "message"),
    [
        (0.0, 0.0, 0.0, 60.0, ""),
        (0.5, 2.0, 0.1, 60.0, ""),
        (0.84, 2.0, 0.1, 84.0, ""),
        (5.0, 20.0, 1.0, 500.0, ""),
        (5.7, 20.0, 10.0, 570.0, ""),
        (
            12.0,
            50.0,
            10.0,
            540.0,
            "checkpoint overhead is 2.2%, above 1%: each save costs 12.0 s of training time, .* every 540 s, .*",
        ),
        (1.0, 700.0, 10.0, 60.0, "writing a checkpoint to disk takes 700 s, so more than 10 min of work are at risk"),
    ],
)
def test_the_automatic_interval_depends_on_the_save_cost(
    cost_s: float, write_s: float, update_s: float, seconds: float, message: str
) -> None:
    policy = default()
    text = policy.adapt(cost_s, write_s, update_s)
    assert policy.seconds == pytest.approx(seconds)
    assert re.match(f"{message}$", text)
    if "at risk" not in text or text.startswith("checkpoint overhead"):
        assert policy.seconds is not None
        assert policy.seconds + write_s + update_s <= 600 * (1 + 2 * sys.float_info.epsilon), (
            "at most 10 minutes of work at risk"
        )


@pytest.mark.parametrize("every", [200, "10min", "2epochs"])
def test_an_explicit_interval_is_not_adapted(every: Any) -> None:
    policy = default(every=every)
    before = policy.seconds
    assert policy.adapt(100.0, 100.0, 1.0) == ""
    assert policy.seconds == before


def test_no_suggestion_repeats_a_current_setting() -> None:
    """`advice` suggests settings for a disk that is too slow."""
    assert "checkpoint.every=auto" in default(every=1).advice
    for policy in (default(), default(best=None)):
        assert "checkpoint.every=auto" not in policy.advice


def test_the_description_states_the_checkpoint_interval() -> None:
    assert re.findall(r"\d+%|\d+ min", str(default())) == ["1%", "10 min"]
    assert str(default(every="2.5min")) == "every 2.5 min"
    assert str(default(every=1, best=None)) == "every 1 update"
    assert str(default(every="3epochs", best=None)) == "every 3 epochs"
    assert "every" not in str(off())


def test_the_summary_shows_the_number_and_times_of_saves() -> None:
    save_cost = SaveCost()
    save_cost.record_pause(0.5)
    assert re.findall(r"[\d.,]+", save_cost.summary(20.0)) == ["1", "0.50", "2.50"], "nothing is written yet"
    record_save(save_cost, 0.25, [], make_saved_checkpoint(write_s=3.0))
    assert re.findall(r"[\d.,]+", save_cost.summary(20.0)) == ["2", "0.75", "3.75", "1.12", "3.00"]
