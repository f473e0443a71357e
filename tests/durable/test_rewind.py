"""If a crash interrupts the return to an earlier checkpoint, nothing is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.base.errors import ConfigError, Problem
from runner.durable import files
from runner.durable.checkpoint import newest_first, save
from runner.durable.directory import RunDirectory
from runner.durable.rewind import rewind_run
from tests.faults.crash_states import states
from tests.faults.histories import RETURN, check, snapshot
from tests.faults.recording import Quick


def test_checkpoints_stay_aside_if_a_newer_one_was_saved(tmp_path: Path) -> None:
    """The resumed run fails only after this save."""
    reported: list[str] = []
    with files.use_system(Quick()):
        RETURN.prepare(tmp_path)
        run = RunDirectory.find(tmp_path / "runs", "one")
        with pytest.raises(ConfigError), rewind_run(run, "1", reported.append):
            save(run.checkpoints, snapshot(4))
            raise ConfigError(Problem("is refused", "task", "use another one"))
    assert len(reported) == 1, "only the rewind must be reported, no restored checkpoint"
    assert [path.name for path in newest_first(run.checkpoints)] == ["update-0000000004", "update-0000000001"]


def test_a_crash_during_a_rewind_loses_nothing(tmp_path: Path) -> None:
    recording = RETURN.record(tmp_path / "recorded")
    for state in states(recording.start, recording.operations, 300, RETURN.name):
        check(RETURN, state, tmp_path / "state")
