"""A record of a sweep is read back as it was written, and records of earlier versions can be read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from runner.base.json_converter import decode, encode
from runner.records.run_record import ProcessRecord
from runner.records.sweep_record import Goal, SweepRecord, TrialRecord
from runner.sweeps.trials import Sweep, Trial

FULL = SweepRecord(
    kind="search",
    name="mine",
    task="gpt",
    fixed=("updates=2",),
    goal=Goal("val/pck", "max"),
    space={"seed": "0, 1"},
    process=ProcessRecord(state="running", pid=7),
    trials=(TrialRecord(number=1, name="mine-1", words=("seed=1",), exit_code=0, last=1.5, job="7_1"),),
)
VERSION_1: dict[str, Any] = {
    "kind": "sweep", "name": "mine", "state": "done", "task": "cape", "task_file": None, "config_dir": None,
    "launcher": "local", "command": "accel-run train -m seed=0,1", "fixed": ["device=cpu"],
    "goal": {"metric": "val/loss", "best_is": "min"}, "together": "", "space": {}, "pid": 7, "birth": "a-1",
    "host": "here", "started": "2026-01-02T03:04:05+00:00", "written": "2026-01-02T03:05:05+00:00",
    "trials": [
        {"number": 1, "name": "mine-1", "words": ["seed=0"], "exit_code": 0, "state": "done", "last": 2, "best": 1.5,
         "seconds": 3.25},
        {"number": 2, "name": "mine-2", "words": ["seed=1"], "exit_code": None, "state": "waiting", "last": None,
         "best": None, "seconds": None},
    ],
}  # fmt: skip


def test_a_record_is_read_back_as_it_was_written() -> None:
    result = decode(SweepRecord, json.loads(json.dumps(encode(FULL))))
    assert (result.value, result.wrong) == (FULL, ())


def test_a_sweep_of_version_1_is_read_completely(tmp_path: Path) -> None:
    (tmp_path / "sweep.json").write_text(json.dumps(VERSION_1))
    result = Sweep.read(tmp_path)
    assert result.is_intact
    assert result.trials == [Trial(1, "mine-1", ("seed=0",)), Trial(2, "mine-2", ("seed=1",))]
    assert result.codes == {1: 0}
    again = encode(result.record)
    newer = {  # keys that are newer than version 1
        "trials": [{**trial, "job": None} for trial in VERSION_1["trials"]], "goal": {**VERSION_1["goal"], "over": []},
    }  # fmt: skip
    expected = VERSION_1 | newer
    assert {name: again.get(name, expected[name]) for name in expected} == expected


@pytest.mark.parametrize("wrong", [{"fixed": [3]}, {"trials": 3}, {"trials": [{"number": 1}]}, {"fixed": None}])
def test_a_sweep_with_unknown_trials_is_incomplete(tmp_path: Path, wrong: dict[str, object]) -> None:
    (tmp_path / "sweep.json").write_text(json.dumps({**VERSION_1, **wrong}))
    assert not Sweep.read(tmp_path).is_intact
