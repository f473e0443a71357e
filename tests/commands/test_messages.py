"""Messages of commands about typos, about rejected attempts to resume a run, and about the source of a value."""

from __future__ import annotations

import json
import os
from pathlib import Path

from tests.commands_here import run_here

TASK = Path(__file__).parents[1] / "faults" / "task_to_attack.py"


def test_status_shows_a_rejected_attempt_to_resume(tmp_path: Path) -> None:
    run, cause = tmp_path / "outputs" / "a", "no checkpoint is whole"
    run.mkdir(parents=True)
    (run / "run.json").write_text(json.dumps({"state": "preempted"}))
    (run / "error.json").write_text(json.dumps({"cause": cause, "exit_code": 65, "fix": "train"}))
    os.utime(run / "run.json", (1e9, 1e9))
    assert f"{cause} (exit 65) (" in run_here("status a", tmp_path).out, "the error of the later attempt must be shown"
    os.utime(run / "error.json", (9e8, 9e8))
    assert cause not in run_here("status a", tmp_path).out


def test_status_reports_that_all_checkpoints_are_damaged(tmp_path: Path) -> None:
    args = f"train --task {TASK} device=cpu monitor=off tracker=none run=a resume_allow=[updates]"
    assert run_here(f"{args} updates=2", tmp_path).code == 0
    for file in (tmp_path / "outputs" / "a" / "checkpoints").rglob("*.safetensors"):
        file.write_bytes(b"damaged")
    assert run_here(f"{args} updates=4", tmp_path).code == 65
    assert "(exit 65)" in run_here("status a", tmp_path).out


def test_explain_names_the_profile_file_of_a_key(tmp_path: Path) -> None:
    (tmp_path / "conf" / "hardware").mkdir(parents=True)
    file = tmp_path / "conf" / "hardware" / "mine.yaml"
    file.write_text("# @package _global_\ndata: {path: /data}\nhardware: {title: x, devices: []}\n")
    result = run_here(f"explain data.path --task {TASK} --config-dir conf hardware=mine", tmp_path)
    assert f"the profile mine ({file})" in result.out, result


def test_a_task_file_without_flag_suggests_the_flag(tmp_path: Path) -> None:
    result = run_here("train my_task.py", tmp_path)
    assert result.code == 78
    assert result.err.split()[-2:] == ["--task", "my_task.py"]
