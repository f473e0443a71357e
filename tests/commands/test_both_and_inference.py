"""The run and the checkpoint that `accel-run inference` and `accel-run both` use, their predictions and exit codes."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.commands_here import run_here
from tests.forkserver import ForkServer
from tests.suggestions import suggested
from tests.waiting import wait_until

TASK = Path(__file__).parents[1] / "end_to_end" / "task_with_everything.py"
ON_CPU = ["--task", str(TASK), "device=cpu", "monitor=off", "updates=30", "checkpoint.every=10"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two runs; `second` was trained last."""
    folder = tmp_path_factory.mktemp("trained")
    for name, seed in (("first", 0), ("second", 1)):
        result = run_here(["train", f"run={name}", f"seed={seed}", *ON_CPU], folder)
        assert result.code == 0, result.err
    return folder


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    for name in ("first", "second"):
        os.utime(tmp_path / "outputs" / name / "run.json")
    return tmp_path


def predictions(run: Path) -> dict[str, bytes]:
    """Return the prediction files, but not the summary, which contains durations."""
    return {file.name: file.read_bytes() for file in (run / "predictions").iterdir() if file.name != "summary.json"}


def summary(run: Path) -> dict[str, Any]:
    content = json.loads((run / "predictions" / "summary.json").read_text())
    assert isinstance(content, dict)
    return content


def damage(checkpoint: Path) -> None:
    content = bytearray((checkpoint / "model.safetensors").read_bytes())
    content[-3] ^= 1
    (checkpoint / "model.safetensors").write_bytes(content)


def test_both_trains_a_run_and_predicts_with_it(tmp_path: Path) -> None:
    result = run_here(["both", *ON_CPU, "inference.samples=1"], tmp_path)
    assert result.code == 0, result.err
    (run,) = (tmp_path / "outputs").iterdir()
    assert run.name.startswith("task_with_everything-")
    record = json.loads((run / "run.json").read_text())
    assert record["state"] == "done"
    assert shlex.split(record["command"]) == ["accel-run", "both", *ON_CPU, "inference.samples=1"]
    assert list(predictions(run)) == ["answer-0.npy"]
    assert summary(run)["checkpoint_update"] == 30


def test_the_both_command_prints_remaining_commands_when_stopped(server: ForkServer, tmp_path: Path) -> None:
    args = [*ON_CPU[:4], "updates=1000", "log_every=1", "task.sleep_s=0.02"]
    pid = server.start(["both", "run=mine", *args], tmp_path)
    metrics = tmp_path / "outputs" / "mine" / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.stat().st_size)
    os.kill(pid, signal.SIGINT)
    result = server.wait()
    assert result.code == 75, result.err
    assert not (tmp_path / "outputs" / "mine" / "predictions").exists()
    *_, resume, inference = result.out.splitlines()
    assert ("resume" in resume, "inference" in inference) == (True, True)
    assert suggested(resume) == suggested(inference) == ["run=mine"]


def test_the_both_command_predicts_nothing_if_training_fails(tmp_path: Path) -> None:
    """The exit code is that of training."""
    result = run_here(["both", "run=mine", *ON_CPU, "task.fail_at=20"], tmp_path)
    assert result.code == 70
    assert not (tmp_path / "outputs" / "mine" / "predictions").exists()


@pytest.mark.slow
def test_inference_skips_a_run_that_failed_to_start(folder: Path) -> None:
    failed = run_here(["train", "run=failed", *ON_CPU, "task.fail_at=1"], folder)
    assert failed.code == 70, failed.err
    listed = json.loads(run_here("runs --json", folder).out)
    assert [row["name"] for row in listed] == ["failed", "second", "first"]
    for command in ("inference", "status", "report", "resume"):
        result = run_here(command, folder)
        assert result.code == 0, result.err
        assert "second" in result.out + result.err, command
        assert "failed" in result.out + result.err, f"{command}: the skipped run is not reported"
    assert json.loads((folder / "outputs" / "failed" / "run.json").read_text())["state"] == "failed"


def test_inference_uses_the_last_trained_run(folder: Path) -> None:
    for args in ("inference", "infer", "inference run=last"):
        shutil.rmtree(folder / "outputs" / "second" / "predictions", ignore_errors=True)
        result = run_here(args, folder)
        assert result.code == 0, result.err
        assert result.out.startswith("second: update-0000000030 ")
        assert sorted(predictions(folder / "outputs" / "second")) == ["answer-0.npy", "answer-1.npy"]
    assert not (folder / "outputs" / "first" / "predictions").exists()


@pytest.mark.slow
def test_inference_and_evaluate_respect_the_log_level(folder: Path) -> None:
    for command in ("inference", "evaluate"):
        assert "update-0000000030" in run_here(command, folder).out
        result = run_here(command, folder, env={"ACCEL_RUN_LOG_LEVEL": "warning"})
        assert (result.code, "update-0000000030" in result.out) == (0, False), result.err


@pytest.mark.slow
def test_inference_accepts_a_run_by_name_and_by_folder(folder: Path) -> None:
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    for args, here in [
        ("inference run=first", folder),
        ("inference run=outputs/first", folder),
        (f"inference run={folder}/outputs/first --task {TASK}", elsewhere),
        ("inference run=first output_root=../outputs", elsewhere),
    ]:
        result = run_here(args, here)
        assert result.code == 0, result.err
        assert result.out.startswith("first: ")


def test_inference_rejects_the_task_file_of_a_foreign_run(folder: Path) -> None:
    """A run folder from elsewhere does not decide which code runs."""
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir(exist_ok=True)
    result = run_here(f"inference run={folder}/outputs/first", elsewhere)
    assert result.code == 89
    assert result.err.endswith(f" --task {TASK}\n")


def test_predictions_depend_on_the_seed(folder: Path) -> None:
    result = []
    for seed in (3, 3, 4):
        assert run_here(f"inference inference.seed={seed}", folder).code == 0
        result.append(predictions(folder / "outputs" / "second"))
    assert result[0] == result[1]
    assert result[0].keys() == result[2].keys()
    assert result[0] != result[2]


def test_the_summary_contains_durations_and_memory(folder: Path) -> None:
    assert run_here("inference inference.samples=7", folder).code == 0
    result = summary(folder / "outputs" / "second")
    assert result.keys() == {
        "checkpoint_update", "predictions", "items", "item", "seconds", "items_per_s", "model", "latency_ms",
        "world_size", "peak_host_gib",
    }  # fmt: skip
    assert (result["checkpoint_update"], result["predictions"], result["items"], result["item"]) == (30, 7, 7, "sample")
    latency = result["latency_ms"]
    assert latency.keys() == {"mean", "median", "p95", "p99"}
    assert latency["median"] > 0
    assert latency["p95"] is latency["p99"] is None, "these statistics need more than 6 calls after the first"
    model = result["model"]
    assert (model["calls"], model["samples_per_call"]) == (7, 1)
    assert 0 < model["seconds"] < result["seconds"]
    assert model["seconds"] == pytest.approx((model["first_call_ms"] + 6 * latency["mean"]) / 1e3)
    assert model["ms_per_sample"] == pytest.approx(1e3 * model["seconds"] / 7)
    assert result["items_per_s"] == pytest.approx(7 / result["seconds"])


def test_a_damaged_newest_checkpoint_is_skipped_and_reported(folder: Path) -> None:
    checkpoints = folder / "outputs" / "second" / "checkpoints"
    damage(checkpoints / "update-0000000030")
    before = sorted(checkpoints.iterdir())
    result = run_here("inference", folder)
    assert result.code == 0, result.err
    assert re.fullmatch(r"warning: .*-0000000030 .*: model\.safetensors .*\n", result.err)
    assert summary(folder / "outputs" / "second")["checkpoint_update"] < 30
    assert sorted(checkpoints.iterdir()) == before  # inference does not move checkpoints


def test_exit_code_is_65_if_all_checkpoints_are_damaged(folder: Path) -> None:
    for checkpoint in (folder / "outputs" / "second" / "checkpoints").glob("update-*"):
        damage(checkpoint)
    result = run_here("inference", folder)
    assert result.code == 65
    assert suggested(result.err) == ["run=second"]


def test_exit_code_is_66_without_a_checkpoint(folder: Path) -> None:
    shutil.rmtree(folder / "outputs" / "second" / "checkpoints")
    result = run_here("inference", folder)
    assert result.code == 66
    assert "no checkpoint" in result.err


def test_exit_code_is_66_for_an_unknown_run(folder: Path) -> None:
    result = run_here("inference run=secnd", folder)
    assert result.code == 66
    assert " second?" in result.err


def test_exit_code_is_78_for_an_unknown_key(folder: Path) -> None:
    result = run_here("inference inference.sample=3", folder)
    assert result.code == 78
    assert "inference.sample=3" in result.err
    assert result.err.endswith(" inference.samples?\n")


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--samples 1", "inference.samples=1"),
        ("first --seed 1", "inference.seed=1"),
        ("samples=1", "inference.samples=1"),
        ("--device cpu", "device=cpu"),
    ],
)
def test_flags_and_training_keys_suggest_inference_settings(folder: Path, typed: str, meant: str) -> None:
    result = run_here(f"inference {typed}", folder)
    assert result.code == 78
    assert result.err.splitlines()[-1].split() == ["use", meant]
    assert run_here(f"inference {meant}", folder).code == 0


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("typed", ["--batch-size 4", "--batch_size=4"])
def test_a_batch_size_suggests_the_inference_key(typed: str, tmp_path: Path) -> None:
    """Without a run, the message uses the keys of the default task."""
    result = run_here(f"inference {typed}", tmp_path)
    assert result.code == 78
    assert result.err.splitlines()[-1].split() == ["use", "inference.batch_size=4"]
    assert "global_batch_size=4" in run_here(f"both {typed}", tmp_path).err


@pytest.mark.slow
def test_inference_accepts_keys_of_the_users_task(tmp_path: Path) -> None:
    """The valid keys are those of the run's task, not of the default task."""
    source = TASK.read_text().replace("samples: int = 2", "colour: int = 2").replace("range(samples)", "range(colour)")
    (tmp_path / "mine.py").write_text(source)
    assert run_here(["train", "--task", "mine.py", *ON_CPU[2:]], tmp_path).code == 0
    result = run_here("inference inference.colour=1", tmp_path)
    assert result.code == 0, result.err


@pytest.mark.slow
def test_a_task_without_predict_is_reported(tmp_path: Path) -> None:
    source = TASK.read_text().replace("def predict", "def no_predict")
    (tmp_path / "mine.py").write_text(source)
    result = run_here(["both", "--task", "mine.py", *ON_CPU[2:]], tmp_path)
    assert result.code == 70
    assert "predict(...)" in result.err
    assert "Traceback" not in result.err


def test_an_error_in_predict_names_the_line(tmp_path: Path) -> None:
    source = TASK.read_text().replace(
        "        for number in range(samples):", "        for number in range(samples + {}):"
    )
    (tmp_path / "mine.py").write_text(source)
    result = run_here(["both", "--task", "mine.py", *ON_CPU[2:]], tmp_path)
    line = next(number for number, text in enumerate(source.splitlines(), 1) if "{})" in text)
    assert result.code == 70
    assert f"mine.py:{line}: predict() raised TypeError" in result.err
    assert "Traceback" not in result.err


def test_inference_is_suggested_only_if_the_task_predicts(trained: Path, tmp_path: Path) -> None:
    mute = tmp_path / "mute.py"
    mute.write_text(TASK.read_text().replace("def predict", "def describe"))
    args = ["train", "run=mute", "--task", str(mute), *ON_CPU[2:]]
    result = run_here(args, tmp_path)
    assert result.code == 0, result.err
    first = (trained / "outputs" / "first" / "console.log").read_text()
    for text, commands in ((result.out, ["report"]), (first, ["inference", "report"])):
        assert re.findall(r"accel-run (\S+) run=", text[text.index("finished") :]) == commands
