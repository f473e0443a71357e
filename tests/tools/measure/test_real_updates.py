"""`plan --probe`: three real updates, and what later plans make of them."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from runner.config.request import Request
from runner.plan.corrections import FILE, corrections
from runner.plan.rank_devices import RankDevice
from runner.tools.measure.real_updates import probe

TASK = Path(__file__).parent / "task_to_measure.py"
WORDS = ("updates=100", "global_batch_size=16", "device=cpu", "backend.threads=1", "task.sleep_ms=0")


def test_three_updates_tell_what_libraries_hold_and_how_fast_the_machine_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCEL_RUN_CACHE", str(tmp_path))
    said: list[str] = []
    lines = probe(Request(WORDS, TASK), said.append)
    assert said == ["traces the model", "runs 3 updates"]
    assert [line.split()[0] for line in lines][:3] == ["3", "memory", "update"]
    assert lines[-1].endswith(str(tmp_path / FILE))
    ((name, found),) = corrections().items()
    assert found.libraries is not None
    assert 2**26 < found.libraries < 2**33, "a process that has loaded torch"
    assert found.flops_per_s.keys() == {"fp32"}
    assert found.of(RankDevice("cpu", name)).overhead_bytes == found.libraries
    assert stat.S_IMODE((tmp_path / FILE).stat().st_mode) == 0o600
