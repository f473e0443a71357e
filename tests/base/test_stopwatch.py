"""The timed parts add up to the elapsed time, and are assigned to the right update."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runner.base import stopwatch as module
from runner.base.stopwatch import BETWEEN, PARTS, DeviceStopwatch, Stopwatch, new_stopwatch, seconds_between


class Timeline:
    """A host clock and a device clock that the test advances; it also determines when the device reaches an event."""

    now = 100.0
    reached = 0.0
    waited = 0
    num_made = 0

    def perf_counter(self) -> float:
        return self.now


class FakeEvent:
    """A `torch.Event` on the timeline."""

    line: Timeline

    def __init__(self, device: Any, *, enable_timing: bool) -> None:
        assert enable_timing
        self.line.num_made += 1

    def record(self) -> None:
        self.at = self.line.now

    def query(self) -> bool:
        return self.line.reached >= self.at

    def synchronize(self) -> None:
        self.line.waited += not self.query()
        self.line.reached = max(self.line.reached, self.at)

    def elapsed_time(self, later: FakeEvent) -> float:
        assert later.query(), "torch raises an error for an event that the device has not reached"
        return 1e3 * (later.at - self.at)


@pytest.fixture
def line(monkeypatch: pytest.MonkeyPatch) -> Timeline:
    made = FakeEvent.line = Timeline()
    monkeypatch.setattr(module, "time", made)
    monkeypatch.setattr(torch, "Event", FakeEvent)
    return made


@pytest.fixture(params=["host", "device"])
def stopwatch(request: pytest.FixtureRequest, line: Timeline) -> Stopwatch:
    return Stopwatch() if request.param == "host" else DeviceStopwatch(torch.device("cuda"))


@pytest.mark.parametrize("kind", ["host", "device"])
def test_each_update_is_reported_once_and_in_order(kind: str) -> None:
    line = FakeEvent.line = Timeline()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "time", line)
        patch.setattr(torch, "Event", FakeEvent)
        messages: list[Any] = []
        stopwatch = (
            Stopwatch(messages.append) if kind == "host" else DeviceStopwatch(torch.device("cuda"), messages.append)
        )
        for update in range(1, 6):
            line.now += 100.0
            stopwatch.lap("hooks")
            line.now += update
            stopwatch.lap("forward")
            stopwatch.stop(update)
            line.reached = line.now - 150.0  # time by which the device lags behind
        stopwatch.finish()
    assert [(lap.update, lap.seconds) for lap in messages] == [
        (update, {"hooks": 100.0, "forward": float(update)}) for update in range(1, 6)
    ]


STEPS = st.lists(st.tuples(st.sampled_from([*PARTS, "hooks", "stop", *BETWEEN[1:]]), st.integers(0, 8)), max_size=60)


@pytest.mark.slow
@given(STEPS)
@pytest.mark.parametrize("kind", ["host", "device"])
def test_the_parts_of_a_phase_add_up_to_its_time(kind: str, steps: list[tuple[str, int]]) -> None:
    line = FakeEvent.line = Timeline()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "time", line)
        patch.setattr(torch, "Event", FakeEvent)
        stopwatch = Stopwatch() if kind == "host" else DeviceStopwatch(torch.device("cuda"))
        expected: dict[str, float] = {}
        update, snapshots = 0, [stopwatch.snapshot()]
        for part, eighths in steps:
            line.now += eighths / 8
            if part == "stop":
                line.now -= eighths / 8  # stop() must not add a lap, because the update ended with its last lap
                update += 1
                stopwatch.stop(update)
                snapshots.append(stopwatch.snapshot())
            elif part in BETWEEN[1:]:
                expected["hooks"] = expected.get("hooks", 0.0) + eighths / 8
                with stopwatch.during(part):
                    line.now += 0.25
                expected[part] = expected.get(part, 0.0) + 0.25
            else:
                stopwatch.lap(part)
                expected[part] = expected.get(part, 0.0) + eighths / 8
            line.reached = max(line.reached, line.now - eighths / 4)  # time by which the device lags behind
        spent = stopwatch.finish()
        assert {part: seconds for part, seconds in spent.items() if seconds} == {
            part: seconds for part, seconds in expected.items() if seconds
        }
        assert sum(spent.values()) == line.now - 100.0
        windows = [seconds_between(one(), other()) for one, other in itertools.pairwise(snapshots)]
        rest = seconds_between(snapshots[-1](), spent)
        assert sum(sum(window.values()) for window in [*windows, rest]) == line.now - 100.0


def test_nested_parts_are_timed_separately(stopwatch: Stopwatch, line: Timeline) -> None:
    with stopwatch.during("evaluation"):
        line.now += 1.0
        with stopwatch.during("saving"):
            line.now += 0.5
        line.now += 0.25
    line.now += 0.125
    assert stopwatch.finish() == {"hooks": 0.125, "evaluation": 1.25, "saving": 0.5}


def test_time_after_an_error_counts_for_the_enclosing_part(stopwatch: Stopwatch, line: Timeline) -> None:
    """The error occurs in a nested part."""
    with pytest.raises(KeyError), stopwatch.during("evaluation"):
        line.now += 1.0
        raise KeyError
    line.now += 0.5
    assert stopwatch.finish() == {"hooks": 0.5, "evaluation": 1.0}


def test_the_last_update_has_no_parts_of_earlier_ones(stopwatch: Stopwatch, line: Timeline) -> None:
    assert stopwatch.last is None
    for update, part in ((1, "data"), (2, "backward")):
        line.now += update
        stopwatch.lap(part)
        line.reached = line.now
        stopwatch.stop(update)
        assert stopwatch.last is not None
        assert stopwatch.last.update == update
        assert stopwatch.last.seconds == {part: float(update)}


def test_the_next_phase_starts_at_zero(stopwatch: Stopwatch, line: Timeline) -> None:
    line.now += 1.0
    stopwatch.lap("data")
    stopwatch.stop(7)
    stopwatch.begin()
    line.reached = line.now
    assert stopwatch.last is None, "update 7 must not be counted, because it belongs to the previous phase"
    line.now += 0.5
    stopwatch.lap("forward")
    line.reached = line.now
    stopwatch.stop(1)
    assert stopwatch.last is not None
    assert stopwatch.last.update == 1
    assert stopwatch.finish() == {"forward": 0.5} | ({"hooks": 0.0} if stopwatch.spent().get("hooks") == 0.0 else {})


def test_a_cpu_uses_the_host_clock() -> None:
    assert type(new_stopwatch(torch.device("cpu"))) is Stopwatch


# ---------------------------------------------------------------- on a device


def test_device_events_are_read_without_waiting(line: Timeline) -> None:
    device = DeviceStopwatch(torch.device("cuda"))
    for update in (1, 2):
        line.now += update
        device.lap("forward")
        line.now += 0.5
        device.lap("backward")
        device.stop(update)
        assert device.last is None, "the device has not reached the event"
        assert device.spent() == {}
    line.reached = 101.5
    device.stop(3)
    assert device.last is not None
    assert (device.last.update, device.last.seconds) == (1, {"forward": 1.0, "backward": 0.5})
    line.reached = 110.0
    device.stop(4)
    assert device.last.update == 4
    assert line.waited == 0


def test_a_snapshot_has_the_times_before_its_creation(line: Timeline) -> None:
    device = DeviceStopwatch(torch.device("cuda"))
    snapshots = []
    for update in range(1, 4):
        line.now += 1.0
        device.lap("forward")
        device.stop(update)
        snapshots.append(device.snapshot())
    line.reached = 110.0
    device.stop(4)
    assert [snapshot() for snapshot in snapshots] == [{"forward": 1.0}, {"forward": 2.0}, {"forward": 3.0}]


def test_completed_events_are_reused(line: Timeline) -> None:
    device = DeviceStopwatch(torch.device("cuda"))
    for update in range(1, 50):
        for part in ("hooks", *PARTS):
            line.now += 0.125
            device.lap(part)
        device.stop(update)
        line.reached = line.now
    assert line.num_made < 4 * len(PARTS), "the memory for events must not grow with the run"
