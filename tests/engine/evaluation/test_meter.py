"""Rows of the meter are sums over a window divided by its items, even if the run is stopped and resumed within it."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from runner.base import stopwatch
from runner.base.stopwatch import PARTS, Stopwatch
from runner.distributed.world import World
from runner.engine.evaluation import meter as module
from runner.engine.evaluation.meter import Meter, Row, UpdateClock
from runner.engine.update.loop import StepInfo
from runner.tensors.async_copy import PendingCopy

CPU = World(torch.device("cpu"))


class Time:
    """A clock that advances only when the test sets it."""

    now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    stopped = Time()
    monkeypatch.setattr(module, "time", stopped)
    monkeypatch.setattr(stopwatch, "time", stopped)
    return stopped


def make_meter(
    rows: list[Row], *, every: int = 4, readings: Any = dict, is_starting: bool = False, **more: Any
) -> Meter:
    given = {"every": every, "write": rows.append, "readings": readings, "is_starting": is_starting, **more}
    return Meter(CPU, "train", stopwatch=Stopwatch(), **given)


def step(update: int, loss: float, items: Tensor | int = 1, norm: float | None = 0.5) -> StepInfo:
    grad_norm = None if norm is None else torch.tensor(norm)
    return StepInfo(update, torch.tensor(loss), items, grad_norm, 0.1 * update, ())


def without_performance(row: Row) -> Row:
    return {key: value for key, value in row.items() if not key.startswith("perf/")}


# ---------------------------------------------------------------- rows


def test_the_loss_is_averaged_over_the_items_of_a_window() -> None:
    rows: list[Row] = []
    meter = make_meter(rows, every=3)
    losses, items = [3.0, 5.0, 1.5, 8.0, 2.0, 4.0], [2, torch.tensor(3), 7, 1, torch.tensor(2.5), 4]
    for number, (loss, count) in enumerate(zip(losses, items, strict=True), 1):
        meter(step(number, loss, count, norm=number / 4))
    assert [without_performance(row) for row in rows] == [
        {"update": 3, "phase": "train", "lr": 0.1 * 3, "train/loss": 9.5 / 12, "train/grad_norm": 0.75},
        {"update": 6, "phase": "train", "lr": 0.1 * 6, "train/loss": 14.0 / 7.5, "train/grad_norm": 1.5},
    ]
    assert meter.last_row is rows[-1]
    assert meter.items_seen == 19.5


def test_losses_are_summed_in_float64() -> None:
    rows: list[Row] = []
    meter = make_meter(rows, every=2)
    meter(step(1, 2.0**24, 2**24 + 1))  # not representable in float32
    meter(step(2, 1.0, 2))
    assert rows[0]["train/loss"] == (2**24 + 1) / (2**24 + 3)


def test_the_end_of_a_phase_writes_a_partial_window_once() -> None:
    rows: list[Row] = []
    meter = make_meter(rows, every=4)
    for number in range(1, 6):
        meter(step(number, 2.0 * number))
    meter.close_window()
    meter.close_window()
    assert [(row["update"], row["train/loss"]) for row in rows] == [(4, 5.0), (5, 10.0)]


def test_rows_have_readings_and_none_for_unknown_norms() -> None:
    rows: list[Row] = []
    meter = make_meter(rows, every=1, readings=lambda: [{"gpu0/util": 3.0}])
    meter(step(1, 1.0, norm=None))
    meter(step(2, 1.0, norm=math.inf))
    assert [row["train/grad_norm"] for row in rows] == [None, None]
    assert rows[0]["gpu0/util"] == 3.0


# ---------------------------------------------------------------- stopping within a window


def test_the_state_is_restored_from_json_even_with_non_finite_numbers() -> None:
    meter = make_meter([], every=4)
    meter(step(1, math.nan, norm=math.inf))
    again = make_meter([], every=4)
    again.load(json.loads(json.dumps(meter.state())))
    assert str(again.state()) == str(meter.state()), "as text, because NaN is not equal to NaN"


@given(st.integers(1, 12), st.integers(1, 6), st.lists(st.integers(0, 12), max_size=3))
def test_a_window_interrupted_by_stops_gives_the_same_row(total: int, every: int, stops: list[int]) -> None:
    uninterrupted: list[Row] = []
    stopped: list[Row] = []
    whole, current = make_meter(uninterrupted, every=every), make_meter(stopped, every=every)
    for update in range(1, total + 1):
        info = step(update, 1 / update, torch.tensor(update / 3) if update % 2 else update, norm=1 / (update + 1))
        info = info._replace(extra={"accuracy": (torch.tensor(1 / update), update)})
        whole(info)
        current(info)
        if update in stops:
            state = json.loads(json.dumps(current.state()))
            current = make_meter(stopped, every=every)
            current.load(state)
    whole.close_window()
    current.close_window()
    assert [without_performance(row) for row in stopped] == [without_performance(row) for row in uninterrupted]
    assert current.items_seen == whole.items_seen
    assert current.state() == whole.state()


# ---------------------------------------------------------------- non-finite values


def test_an_update_that_overflowed_is_excluded_from_the_row() -> None:
    rows: list[Row] = []
    meter = make_meter(rows, every=2)
    meter(step(1, 6.0, 3))
    meter(step(2, math.inf, 5))
    for number in (3, 4):
        meter(step(number, math.nan, 5))
    meter(step(5, math.nan))
    assert [row["train/loss"] for row in rows] == [2.0, None]
    assert meter.items_seen == 18, "skipped updates also read samples"
    meter.state()


# ---------------------------------------------------------------- time


def run_update(meter: Any, time: Time, number: int, parts_s: dict[str, float], items: int = 3) -> None:
    """Run an update whose parts take these times, and record it."""
    for part, seconds in parts_s.items():
        time.now += seconds
        meter.stopwatch.lap(part)
    meter.stopwatch.stop(number)
    meter(step(number, 1.0, items))


def test_the_time_of_a_row_excludes_hooks(time: Time) -> None:
    rows: list[Row] = []
    meter = make_meter(rows, every=2)
    for number in range(1, 5):
        run_update(meter, time, number, {"hooks": 10.0, "data": 0.125, "forward": 0.25, "optimizer": 0.125})
    for row in rows:
        assert (row["perf/step_time_ms"], row["perf/data_wait"]) == (500.0, 0.25)


def test_the_parts_of_a_row_add_up_to_its_step_time(time: Time) -> None:
    rows: list[Row] = []
    meter = make_meter(rows, every=2)
    for number in range(1, 7):
        run_update(meter, time, number, {"hooks": 1.0, "data": number / 8, "forward": 0.5, "backward": 1 / number})
        with meter.stopwatch.during("evaluation"):
            time.now += 2.0
    for row in rows:
        parts = [row[f"perf/{part}_ms"] for part in PARTS if f"perf/{part}_ms" in row]
        assert sum(parts) == pytest.approx(row["perf/step_time_ms"], abs=1e-3)
        assert row["perf/hooks_ms"] == 1000.0
    assert "perf/wait_ms" not in rows[0], "parts that did not occur are missing, not 0"
    assert [row.get("perf/evaluation_ms") for row in rows] == [1000.0, 2000.0, 2000.0], (
        "each row includes the evaluations before its last update"
    )


def test_the_data_wait_is_known_before_the_first_row(time: Time) -> None:
    meter = make_meter([], every=100)
    assert meter.data_wait() is None
    run_update(meter, time, 1, {"data": 5.0, "forward": 1.0})
    meter.restart_clock()
    assert meter.data_wait() is None, "the first update is start-up"
    for number, (data, forward) in enumerate([(1.0, 1.0), (2.0, 0.0)], 2):
        run_update(meter, time, number, {"data": data, "forward": forward})
    assert meter.data_wait() == 0.75


def test_untimed_updates_are_excluded_from_the_step_time(time: Time) -> None:
    rows: list[Row] = []
    meter = make_meter(rows, every=4)
    run_update(meter, time, 1, {"data": 60.0}, items=100)  # the first update includes start-up
    meter.restart_clock()
    state = None
    for number in range(2, 7):
        run_update(meter, time, number, {"forward": 0.5})
        state = meter.state()
    again = make_meter(rows, every=4)
    again.load(state)
    for number in (7, 8):
        run_update(again, time, number, {"forward": 0.25})
    assert [row["perf/step_time_ms"] for row in rows] == [500.0, 250.0]


@pytest.mark.parametrize("every", [1, 2, 3, 5, 100])
def test_throughput_is_items_over_time_since_the_first_update(time: Time, every: int) -> None:
    rows: list[Row] = []
    meter = make_meter(rows, every=every, is_starting=True)
    run_update(meter, time, 1, {"data": 60.0}, items=100)
    meter.restart_clock()
    began, items = time.now, 0
    for number in range(2, 12):
        run_update(meter, time, number, {"hooks": 0.25, "forward": 0.25 * number}, items=number)
        result, items = time.now, items + number
        with meter.stopwatch.during("evaluation"):
            time.now += 2.0  # work after the last update slows none of them down
    meter.close_window()
    assert meter.timed.throughput == pytest.approx(items / (result - began))
    assert rows[-1]["perf/throughput"] == rows[-1]["perf/items_per_s"] == meter.timed.throughput
    assert meter.timed.pace == pytest.approx(10 / (result - began))


def test_throughput_is_unknown_before_a_second_update(time: Time) -> None:
    rows: list[Row] = []
    meter = make_meter(rows, every=1, is_starting=True)
    run_update(meter, time, 1, {"data": 60.0}, items=100)
    meter.restart_clock()
    meter.close_window()
    assert meter.timed.throughput is None
    assert rows[0]["perf/step_time_ms"] is None, "the first update of a process is start-up, even in a separate row"


def test_every_second_of_a_process_is_assigned_to_a_part(time: Time) -> None:
    clock = UpdateClock(started=time.now)
    time.now += 3.0
    clock.begin()
    time.now += 10.0
    clock.end({"data": 4.0, "starting": 6.0}, updates=5)
    time.now += 0.5
    clock.begin()
    time.now += 1.0
    clock.end({"data": 1.0}, updates=2)
    time.now += 0.25
    assert clock.all() == {"starting": 9.5, "data": 5.0, "closing": 0.25}
    assert (sum(clock.all().values()), clock.updates) == (time.now - 100.0, 7)


def test_a_window_without_any_timed_update_has_no_speed(time: Time) -> None:
    rows: list[Row] = []
    meter = make_meter([], every=4)
    meter(step(1, 1.0))
    again = make_meter(rows, every=4)
    again.load(meter.state())
    again.close_window()
    assert (rows[0]["perf/step_time_ms"], rows[0]["perf/items_per_s"], rows[0]["train/loss"]) == (None, None, 1.0)


# ---------------------------------------------------------------- rows whose values are still being copied


class Late:
    """An asynchronous copy that completes when `arrived` is set."""

    arrived = False
    waited = 0

    def __call__(self, numbers: Tensor) -> PendingCopy:
        def wait() -> None:
            self.waited += 1

        event: Any = SimpleNamespace(query=lambda: self.arrived, synchronize=wait)
        return PendingCopy(numbers, event)


def test_rows_are_written_in_order_as_soon_as_their_values_arrive() -> None:
    rows: list[Row] = []
    late = Late()
    meter = make_meter(rows, every=1, send=late)
    meter(step(1, 1.0))
    meter(step(2, 2.0))
    assert rows == [], "training does not wait for the copies"
    late.arrived = True
    meter(step(3, 3.0))
    assert [row["update"] for row in rows] == [1, 2, 3]


def test_flushing_waits_for_pending_rows() -> None:
    rows: list[Row] = []
    late = Late()
    meter = make_meter(rows, every=1, send=late)
    meter(step(1, 1.0))
    meter(step(2, 2.0))
    meter.flush()
    assert ([row["update"] for row in rows], late.waited) == ([1, 2], 2)
    meter(step(3, 3.0))
    assert meter.state()["losses"] == []
    assert [row["update"] for row in rows] == [1, 2, 3], "a checkpoint refers only to written rows"


def test_a_resumed_meter_restores_the_gradient_norm_exactly() -> None:
    meter, rows = make_meter([]), []
    norm = torch.tensor(1 / 3, dtype=torch.float64)
    meter(StepInfo(1, torch.tensor(1.0), 1, norm, 0.1, ()))
    resumed = make_meter(rows)
    resumed.load(meter.state())
    resumed.close_window()
    assert rows[0]["train/grad_norm"] == 1 / 3
