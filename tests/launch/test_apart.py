"""A question in a process of its own: its answer, its errors, and a word to whoever waits for long."""

from __future__ import annotations

import time

import pytest

from runner.launch import apart as module
from runner.launch.apart import apart


def slow(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


def late() -> None:
    raise TimeoutError("its own")


def test_who_waits_for_long_is_told_once_and_gets_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 0.05)
    told: list[int] = []

    assert apart(slow, 0.4, long=lambda: told.append(1)) == 0.4
    assert told == [1]


def test_who_does_not_wait_is_told_nothing() -> None:
    told: list[int] = []

    assert apart(slow, 0.0, long=lambda: told.append(1)) == 0.0
    assert told == []


def test_an_error_is_that_of_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 0.05)

    with pytest.raises(TimeoutError, match="its own"):
        apart(late, long=lambda: None)
