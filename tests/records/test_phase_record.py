"""The record of a phase is restored from checkpoints of any version."""

from __future__ import annotations

import json
import math

import pytest

from runner.base.json_values import to_json
from runner.engine.run import RunProgress
from runner.records.phase_record import PhaseRecord, SampleCounts

VERSION_1 = {  # from checkpoints in which a record had no name and no sample counts
    "updates_before": 4, "metrics": {"val/loss": 1.5, "val/pck": None}, "kept": [2, 4],
    "records": {
        "train": {
            "kind": "train", "updates": 3, "total": 6, "finished": False, "seconds": 2.5, "peak_host_gib": 0.5,
            "peak_device_gib": None, "metrics": {"val/pck": None},
        }
    },
}  # fmt: skip


def test_progress_of_a_run_is_restored_from_its_checkpoint() -> None:
    record = PhaseRecord("train", "first", 3, 6, samples=SampleCounts(num_samples=8, global_batch_size=4))
    progress = RunProgress(2, {"first": record}, {"val/loss": 1.5}, [1])
    assert RunProgress.from_state(json.loads(to_json(progress.state())), is_own=True) == progress


def test_a_checkpoint_of_version_1_is_restored() -> None:
    result = RunProgress.from_state(VERSION_1, is_own=True)
    record = result.records["train"]
    assert (result.updates_before, result.kept, result.metrics["val/loss"]) == (4, [2, 4], 1.5)
    assert (record.name, record.kind, record.updates, record.seconds) == ("train", "train", 3, 2.5)
    assert math.isnan(result.metrics["val/pck"])


def test_kept_checkpoints_of_another_run_are_ignored() -> None:
    assert RunProgress.from_state(VERSION_1, is_own=False).kept == []


@pytest.mark.parametrize("wrong", [{"updates": "3"}, {"metrics": 3}, {"parts_s": {"data": "long"}}])
def test_a_damaged_record_is_rejected(wrong: dict[str, object]) -> None:
    damaged = {**VERSION_1, "records": {"train": {"kind": "train", **wrong}}}
    with pytest.raises(ValueError, match="unreadable"):
        RunProgress.from_state(damaged, is_own=True)


def test_epochs_are_computed_from_the_updates() -> None:
    record = PhaseRecord("train", samples=SampleCounts(num_samples=8, global_batch_size=4))
    record.reached(3)
    assert (record.updates, record.samples.epochs) == (3, 1.5)
