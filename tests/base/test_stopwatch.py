"""The parts of an update add up to it, and belong to the update that they are told of."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from runner.base import stopwatch as module
from runner.base.stopwatch import PARTS, DeviceStopwatch, Stopwatch, stopwatch


def test_each_part_has_the_time_since_the_mark_before() -> None:
    watch = Stopwatch()
    for update, part in ((1, "data"), (2, "backward")):
        watch.start()
        time.sleep(0.02)
        watch.lap(part)
        watch.lap("wait")
        watch.stop(update)
        assert watch.last is not None
        assert watch.last.update == update
        assert watch.last.seconds[part] >= 0.02
        assert sum(watch.last.seconds.values()) < watch.last.seconds[part] + 0.01
        assert set(watch.last.seconds) == set(PARTS)


def test_a_cpu_has_the_clock_of_the_host() -> None:
    assert type(stopwatch(torch.device("cpu"))) is Stopwatch


class FakeEvent:
    """A mark on a timeline that the test moves on; the device reaches it when the test says so."""

    now = 0.0
    reached = 0.0

    def __init__(self, device: Any, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = FakeEvent.now

    def query(self) -> bool:
        return FakeEvent.reached >= self.at

    def elapsed_time(self, later: FakeEvent) -> float:
        return 1e3 * (later.at - self.at)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> DeviceStopwatch:
    FakeEvent.now = FakeEvent.reached = 0.0
    monkeypatch.setattr(module, "torch", SimpleNamespace(Event=FakeEvent))
    return DeviceStopwatch(torch.device("cuda"))


def test_a_device_is_read_when_it_is_there_and_never_waited_for(device: DeviceStopwatch) -> None:
    for update in (1, 2):
        device.start()
        FakeEvent.now += update
        device.lap("forward")
        FakeEvent.now += 0.5
        device.lap("backward")
        device.stop(update)
        assert device.last is None, "the device has not reached it"
    FakeEvent.reached = 1.5
    device.start()
    device.stop(3)
    assert device.last is not None
    assert (device.last.update, device.last.seconds["forward"], device.last.seconds["backward"]) == (1, 1.0, 0.5)
    FakeEvent.reached = 10.0
    device.start()
    device.stop(4)
    assert device.last.update == 4


def test_another_phase_begins_with_nothing(device: DeviceStopwatch) -> None:
    device.start()
    FakeEvent.now = FakeEvent.reached = 1.0
    device.stop(7)
    assert device.last is not None
    device.start()
    FakeEvent.now = 2.0
    device.stop(8)
    device.forget()
    FakeEvent.reached = 10.0
    device.start()
    device.stop(1)
    assert device.last is not None
    assert device.last.update == 1, "update 8 was of the phase before"
