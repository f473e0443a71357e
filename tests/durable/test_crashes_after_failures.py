"""Files that a crash leaves after a failed save, or after a part has been reported to rank 0."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from runner.base.errors import StorageError
from runner.durable import files
from runner.durable.checkpoint import save, save_part
from tests.durable.parts import parts_of
from tests.faults.crash_states import states
from tests.faults.histories import check_checkpoints, on_disk, snapshot
from tests.faults.recording import Faults, Quick, Recording


def test_a_crash_after_a_failed_sync_leaves_no_damaged_checkpoint(tmp_path: Path) -> None:
    """The checkpoint already has its final name, which must be removed before its files."""
    run = tmp_path / "run"
    with files.use_system(Quick()):
        save(run, snapshot(1))
        shutil.copytree(run, tmp_path / "counted")
    counted = Faults()
    with counted.active():
        save(tmp_path / "counted", snapshot(2))
    last = max(number for number, (operation, _) in enumerate(counted.trace) if operation == "fsync")
    recording = Recording(run)
    with Faults({last: "EIO"}, recording).active(), pytest.raises(StorageError):
        save(run, snapshot(2))
    for state in states(recording.start, recording.operations, 120, "a sync that fails"):
        with on_disk(state, tmp_path / "state") as found:
            check_checkpoints(found, 1)


def test_a_report_surviving_a_crash_has_all_its_files(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    recording = Recording(tmp_path / "run")
    with files.use_system(recording):
        save_part(recording.root, parts_of(snapshot(1))[1])
    num_reports = 0
    for state in states(recording.start, recording.operations, 120, "a part"):
        with on_disk(state, tmp_path / "state") as found:
            reports = [path for path in found.rglob("*.json") if not path.name.startswith(files.TEMPORARY)]
            for report in reports:
                listed = json.loads(report.read_text())["files"]
                sizes = {path.name: path.stat().st_size for path in report.parent.iterdir()}
                assert all(sizes.get(entry["name"]) == entry["size"] for entry in listed), state
            num_reports += len(reports)
    assert num_reports
