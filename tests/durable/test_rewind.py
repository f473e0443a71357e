"""A crash while a run returns to an earlier checkpoint loses nothing."""

from __future__ import annotations

from pathlib import Path

from tests.faults.crash_states import states
from tests.faults.histories import RETURN, check


def test_a_crash_during_a_rewind_loses_nothing(tmp_path: Path) -> None:
    recording = RETURN.record(tmp_path / "recorded")
    for state in states(recording.start, recording.operations, 300, RETURN.name):
        check(RETURN, state, tmp_path / "state")
