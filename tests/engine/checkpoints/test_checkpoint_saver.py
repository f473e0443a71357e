"""A resumed phase restores its best checkpoints, its newest checkpoint and its save costs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from runner.durable.checkpoint_writer import NoWriter, SavedCheckpoint
from runner.durable.safetensors_writer import HostBuffer
from runner.engine.checkpoints import save_policy
from runner.engine.checkpoints.checkpoint_saver import Saver
from runner.engine.checkpoints.save_policy import SaveCost, SavePolicy, default

SCREEN = cast(Any, SimpleNamespace(warn=lambda text: None, event=lambda kind, **facts: None))


class BusyWriter(NoWriter):
    """A writer that has been writing a checkpoint for `busy_s` seconds."""

    busy_s: float | None = 0.0


def saver(policy: SavePolicy, save_cost: SaveCost | None = None, **known: Any) -> Saver:
    return Saver(
        policy, NoWriter(), save_cost or SaveCost(), (HostBuffer(), HostBuffer()), SCREEN, **{"on_disk": None, **known}
    )


@pytest.mark.parametrize(("best_is", "sign"), [("min", 1), ("max", -1)])
def test_best_checkpoints_of_a_resumed_phase_are_restored(best_is: Any, sign: int) -> None:
    result = saver(default(best_is=best_is, keep_best=2), bests=[(sign * 1.0, 4), (sign * 3.0, 2)])
    assert not result.is_best(sign * 3.0)
    assert not result.is_best(math.nan)
    assert not result.is_best(sign * -math.inf)
    assert result.is_best(sign * 2.0)
    result.add_best(sign * 2.0, 6)
    assert result.bests == [(sign * 1.0, 4), (sign * 2.0, 6)]
    assert not result.is_best(sign * 2.5)


def test_the_requested_number_of_best_checkpoints_is_kept() -> None:
    result = saver(default(keep_best=3))
    for number, value in enumerate([5.0, 9.0, 7.0, 9.5, 1.0], start=1):
        is_best = result.is_best(value)
        assert is_best == (number != 4)
        if is_best:
            result.add_best(value, number)
    assert result.bests == [(1.0, 5), (5.0, 1), (7.0, 3)]


@pytest.mark.parametrize("best_is", ["min", "max"])
def test_the_earlier_of_equal_checkpoints_ranks_first(best_is: Any) -> None:
    result = saver(default(best_is=best_is, keep_best=2))
    for number in (5, 10):
        result.add_best(0.5, number)
    assert result.bests == [(0.5, 5), (0.5, 10)]


def test_a_resumed_phase_knows_its_newest_checkpoint() -> None:
    assert saver(default(), on_disk=12).newest_number() == 12
    assert saver(default()).newest_number() is None


def test_checkpoint_interval_after_resume_uses_earlier_save_costs() -> None:
    save_cost = SaveCost()
    for _ in range(10):
        save_cost.record_update(0.5, writing=False)
    for seconds in (1.0, 3.0, 2.0):
        save_cost.record_pause(seconds)
        save_cost.record_write(SavedCheckpoint(Path("update-1"), 1, 100, seconds, seconds))
    resumed = SaveCost()
    resumed.load(json.loads(json.dumps(save_cost.state())))
    assert resumed.last == save_cost.last
    policy = default(every="auto")
    saver(policy, resumed)
    assert policy.seconds == pytest.approx(200.0)  # the median save took 2 s, and saves may use 1 % of the time


def test_a_write_longer_than_the_interval_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now, printed = 1000.0, list[str]()
    monkeypatch.setattr(save_policy, "time", SimpleNamespace(monotonic=lambda: now))
    writer = BusyWriter()
    screen = cast(Any, SimpleNamespace(warn=printed.append, event=lambda kind, **facts: None))
    policy = default(every="1min")
    policy.restart_interval()
    result = Saver(policy, writer, SaveCost(), (HostBuffer(), HostBuffer()), screen, on_disk=None)
    now += 61.0
    assert not result.is_due_by_time(), "the writer is busy"
    assert not printed, "a write that has just started, for example of a best checkpoint, is not slow"
    writer.busy_s = 61.0
    assert not result.is_due_by_time()
    assert len(printed) == 1
    assert "61.0 s" in printed[0]
    assert not result.is_due_by_time()
    assert len(printed) == 1
    writer.busy_s = None
    assert result.is_due_by_time()
