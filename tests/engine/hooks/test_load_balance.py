"""Times of all ranks are averaged over the updates of a row, and changed shares are recorded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from runner.base.stopwatch import PARTS
from runner.engine.hooks.hook import Wants
from runner.engine.hooks.load_balance import LoadBalance
from runner.engine.hooks.rank_sync import RankSync, StepStatus
from runner.engine.hooks.timekeeping import Timekeeping
from runner.engine.update.balance import ShareChange
from runner.engine.update.loop import StepInfo
from runner.workload.share_solver import Decision
from runner.workload.stragglers import Straggler, StragglerDetector
from tests.opened import opened


def status(*forward: float | None, **others: float) -> StepStatus:
    """Return the status of ranks with these forward times; other parts take the same time on all ranks."""
    seconds = tuple(
        None if spent is None else {**dict.fromkeys(PARTS, 0.0), "forward": spent, **others} for spent in forward
    )
    return StepStatus(Wants(), 0, seconds, tuple(range(1, 1 + len(forward))))


class Observed:
    """The load-balancing hook of a phase; the test sets what the ranks report."""

    def __init__(self, phase: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.phase, self.hook = phase, phase.hook(LoadBalance)
        self.observed: list[Any] = []
        self.change = ShareChange()
        self.num_reread = 0
        self.events: list[dict[str, Any]] = []
        self.printed: list[str] = []
        self.rows: list[Any] = []
        self.tally: list[Any] = phase.run.tally.ranks_s
        screen = phase.run.observers.screen
        for name in ("info", "warn"):
            monkeypatch.setattr(screen, name, self.printed.append)
        monkeypatch.setattr(screen, "record_event", lambda kind, **values: self.events.append({"kind": kind, **values}))
        monkeypatch.setattr(phase.shares, "observe", self._observe)
        monkeypatch.setattr(phase, "reread", self._reread)
        monkeypatch.setattr(phase.run.observers, "write", self.rows.append)

    def _observe(self, *args: Any) -> ShareChange:
        self.observed.append(args)
        return self.change

    def _reread(self) -> None:
        self.num_reread += 1

    def after_update(self, update: int, ranks: StepStatus | None) -> None:
        self.phase.position.update = update
        self.phase.hook(RankSync).status = ranks
        self.hook.after_update(StepInfo(update, None, 1, None, None, ()))


@pytest.fixture
def seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Observed]:
    with opened(tmp_path, "checkpoint=off", "log_every=2") as phase:
        monkeypatch.setattr(phase.parts.parallel, "splits_batch", True)
        yield Observed(phase, monkeypatch)


@pytest.mark.parametrize("is_startup", [True, False])
def test_rows_have_mean_times_by_rank_and_part_without_start_up(is_startup: bool, seen: Observed) -> None:
    seen.phase.hook(Timekeeping).until_first_update = 5.0 if is_startup else None
    seen.after_update(1, None)
    seen.after_update(2, status(None, 7.0))
    for update, (first, second) in enumerate([(9.0, 9.0), (1.0, 2.0), (2.0, 2.0), (3.0, 5.0)], start=3):
        seen.after_update(update, status(first, second))
    columns = seen.hook.readings()
    num = 3 if is_startup else 4
    first, second = (6.0, 9.0) if is_startup else (15.0, 18.0)
    assert columns == {"rank0/forward_ms": 1e3 * first / num, "rank1/forward_ms": 1e3 * second / num}
    assert [times["forward"] for times in seen.tally] == [first, second]
    seen.after_update(7, status(0.5, 0.0, data=0.25))
    columns = seen.hook.readings()
    assert columns == {f"rank{n}/{part}_ms": 1e3 * s for part, each in (("forward", (0.5, 0.0)), ("data", (0.25, 0.25)))
                       for n, s in enumerate(each)}  # fmt: skip
    assert [times["forward"] for times in seen.tally] == [first + 0.5, second]
    assert seen.hook.readings() == {}


def test_times_after_the_last_row_are_counted_at_the_phase_end(seen: Observed) -> None:
    seen.phase.hook(Timekeeping).until_first_update = None
    seen.after_update(1, status(1.0, 2.0))
    assert seen.tally == []
    seen.hook.close(None)
    assert [times["forward"] for times in seen.tally] == [1.0, 2.0]


def test_rows_have_a_bounded_size_for_any_number_of_ranks(seen: Observed) -> None:
    seen.phase.hook(Timekeeping).until_first_update = None
    num_ranks = 256
    for update in (1, 2):
        seen.after_update(update, status(*(float(update * rank) for rank in range(num_ranks)), data=0.25))
    columns = seen.hook.readings()
    assert columns == {
        "ranks/data_min_ms": 250.0, "ranks/data_median_ms": 250.0, "ranks/data_max_ms": 250.0,
        "ranks/forward_min_ms": 0.0, "ranks/forward_median_ms": 1.5e3 * 127.5, "ranks/forward_max_ms": 1.5e3 * 255,
    }  # fmt: skip
    assert [times["forward"] for times in seen.tally] == [3.0 * rank for rank in range(num_ranks)]


def test_idle_time_is_read_when_a_row_is_due(seen: Observed, monkeypatch: pytest.MonkeyPatch) -> None:
    idle: dict[str, float] = {}
    monkeypatch.setattr(seen.phase.parts.parallel, "idle_fractions", lambda: dict(idle))
    for update in (1, 2, 3):
        idle["rank0/idle"] = float(update)
        seen.after_update(update, status(1.0, 1.0))
    assert seen.hook.readings()["rank0/idle"] == 2.0


def test_new_shares_are_recorded_and_batches_are_read_again(seen: Observed) -> None:
    seen.after_update(1, status(1.0, 2.0))
    assert (seen.rows, seen.events, seen.printed, seen.num_reread) == ([], [], [], 0)
    seen.change = ShareChange(Decision((5, 3), 0.25, 0.125, "rank 0 is faster"), reread=True)
    seen.after_update(2, status(1.0, 2.0))
    (row,) = seen.rows
    values = {"shares": [5, 3], "old_ms": 250.0, "new_ms": 125.0}
    assert row == {"update": 2, "phase": "train", **{f"balance/{key}": value for key, value in values.items()}}
    assert seen.events == [{"kind": "shares", "update": 2, "reason": "rank 0 is faster", **values}]
    assert seen.printed == ["rank 0 is faster"]
    assert seen.num_reread == 1
    ((first, seconds, samples), _) = seen.observed
    assert (first, [times["forward"] for times in seconds], samples) == (1, [1.0, 2.0], (1, 2))


def test_ranks_with_different_work_are_not_compared(seen: Observed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seen.phase.parts.parallel, "splits_batch", False)
    seen.after_update(1, status(1.0, 2.0))
    assert seen.observed == []
    assert seen.hook.readings() != {}


def test_a_straggler_is_reported_and_recorded(seen: Observed, monkeypatch: pytest.MonkeyPatch) -> None:
    straggler = Straggler(1, "forward", 0.25, 0.5, 0.5, 0.125)

    def observe(_: Any, seconds: Any, samples: Any) -> Straggler | None:
        assert samples == (1, 2)
        return straggler if seconds[1]["forward"] > seconds[0]["forward"] else None

    monkeypatch.setattr(StragglerDetector, "observe", observe)
    seen.after_update(1, status(0.5, 0.5))
    seen.after_update(2, status(0.5, 1.0))
    assert seen.printed == [str(straggler)]
    assert seen.events == [{"kind": "slow rank", "update": 2, **asdict(straggler)}]
