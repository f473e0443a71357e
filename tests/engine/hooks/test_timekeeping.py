"""The record of a phase contains its peak memory, or None if the device reports none."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from runner.engine.hooks import timekeeping
from runner.engine.hooks.timekeeping import Timekeeping
from tests.opened import opened

GIB = 2**30


def test_the_peak_memory_of_a_phase_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peak: list[Any] = [None]
    host = [1.0]
    with opened(tmp_path, "checkpoint=off") as phase:
        hook, record = phase.hook(Timekeeping), phase.record
        monkeypatch.setattr(timekeeping, "get_accelerator", lambda _: SimpleNamespace(peak_memory=lambda: peak[0]))
        monkeypatch.setattr(timekeeping, "host_peak_gib", lambda: host[0])
        record.peak_host_gib = 0.0
        hook.update_record()
        assert (record.peak_device_gib, record.peak_reserved_gib, record.peak_host_gib) == (None, None, 1.0)
        for allocated, reserved, on_host in ((3, 4, 0.5), (2, 6, 2.0)):
            peak[0], host[0] = SimpleNamespace(allocated=allocated * GIB, reserved=reserved * GIB), on_host
            hook.update_record()
        assert (record.peak_device_gib, record.peak_reserved_gib, record.peak_host_gib) == (3.0, 6.0, 2.0)
        host[0] = 5.0
        hook.end()
        assert record.peak_host_gib == 5.0
