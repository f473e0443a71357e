"""The profiler locates the lines that wait for the device, and only those."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from runner.profiling.device_waits import DeviceWaits

MODEL = nn.Linear(3, 3)


@contextmanager
def watch(waits: Any) -> Iterator[None]:
    waits.start()
    try:
        yield
    finally:
        waits.stop()


def test_torchs_sync_warnings_are_located(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other warnings are passed on."""
    modes: list[Any] = []
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    waits = DeviceWaits(MODEL, lambda file: file == __file__)
    with warnings.catch_warnings(record=True) as others:
        warnings.simplefilter("always")
        with watch(waits):
            for _ in range(2):
                warnings.warn("called a synchronizing CUDA operation (Triggered internally at ...)", stacklevel=1)
                warnings.warn("mind the gap", stacklevel=1)
                waits.update()
    (wait,) = waits.table()
    assert (wait.per_update, wait.in_task) == (1.0, True)
    assert "test_torchs_sync_warnings" in wait.place
    assert {str(other.message) for other in others} == {"mind the gap"}
    assert modes == ["warn", 0]


def test_a_wait_after_backward_is_not_attributed_to_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)
    waits = DeviceWaits(MODEL, lambda file: False)
    warn = partial(warnings.warn, "called a synchronizing CUDA operation (Triggered internally at ...)")

    def hold_back(*_: Any) -> None:  # the autograd engine defers the warnings of its nodes in the same way
        torch.autograd.Variable._execution_engine.queue_callback(warn)

    loss = MODEL(torch.ones(2, 3)).sum()
    loss.grad_fn.register_prehook(hold_back)
    with watch(waits):
        loss.backward()
        warn()  # outside of the backward pass, the caller is named
        # raises an error unless it is filtered
        warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=1)
        waits.update()
    places = [wait.place for wait in waits.table()]
    assert len(places) == 2
    assert sum(place.endswith("backward pass") for place in places) == 1
