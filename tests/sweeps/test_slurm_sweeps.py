"""Sweeps and searches with launcher=slurm, with stand-ins for SLURM and for training (tests/slurm_stub.py)."""

from __future__ import annotations

import csv
import json
import os
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from runner.cli import main
from runner.sweeps import job_pool
from runner.sweeps.trials import Sweep
from runner.tools.report.watch import watch
from tests import slurm_stub
from tests.waiting import wait_until

TASK = ["--task", str(Path(__file__).parent / "task_of_trials.py"), "run=mine", "launcher=slurm"]
SEEDS = ["train", "-m", "seed=1,2,3", *TASK]


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Simulate a cluster whose jobs are followed without delay."""
    slurm_stub.install(tmp_path, monkeypatch)
    monkeypatch.setattr(job_pool, "POLL_S", 0.05)
    monkeypatch.setattr(job_pool, "EXIT_CODE_DELAY_S", 0.0)
    return tmp_path


def arrays(cluster: Path) -> list[str]:
    """Return the indices of the submitted job arrays."""
    folder = cluster / "submitted"
    lines = [line for script in sorted(folder.iterdir()) for line in script.read_text().splitlines()]
    return [line.partition("=")[2].strip("'") for line in lines if line.startswith("#SBATCH --array=")]


def table(cluster: Path, *columns: str) -> list[tuple[str, ...]]:
    with (cluster / "outputs" / "mine" / "results.csv").open() as file:
        return [tuple(row[column] for column in columns) for row in csv.DictReader(file)]


def states(cluster: Path) -> list[tuple[str, ...]]:
    return table(cluster, "state", "exit_code")


@pytest.mark.slow
def test_a_grid_is_submitted_as_one_array(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The table is that of a local sweep."""
    grid = ["train", "-m", "optimizer.lr=0.001,0.01", "task.hidden=8,16", "together=2", *TASK]
    assert main([*grid, "launcher.time_min=30"]) == 0
    assert arrays(cluster) == ["1-4%2"]
    assert "#SBATCH --time=30\n" in (cluster / "script").read_text()
    assert table(cluster, "name", "optimizer.lr", "task.hidden", "state", "exit_code", "val/loss", "is_best") == [
        ("mine-1", "0.001", "8", "finished", "0", "0.1", "1"),
        ("mine-2", "0.001", "16", "finished", "0", "0.2", "0"),
        ("mine-3", "0.01", "8", "finished", "0", "0.3", "0"),
        ("mine-4", "0.01", "16", "finished", "0", "0.4", "0"),
    ]
    out = capsys.readouterr().out
    assert [line[:5] for line in out.splitlines() if line.startswith("[")][:4] == [f"[{n}/4]" for n in (1, 2, 3, 4)]
    assert main([*grid, "launcher.time_min=60"]) == 0, "other resources must not start another sweep"
    assert arrays(cluster) == ["1-4%2"], "finished trials must not be repeated"


@pytest.mark.slow
def test_failed_trials_have_exit_codes_and_can_be_retried(
    cluster: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exit codes are those of a local sweep."""
    command = ["train", "-m", "task.act=good,fail,killed", *TASK]
    assert main(command) == 70
    assert states(cluster) == [("finished", "0"), ("failed", "70"), ("failed", "137")]
    assert "slurm/42_2_0_log.out" in capsys.readouterr().err
    assert main(command) == 70
    assert arrays(cluster) == ["1-3"]
    monkeypatch.setenv("MENDED", "1")
    assert main([*command, "retry=true"]) == 137
    assert arrays(cluster) == ["1-3", "2-3"]
    assert states(cluster) == [("finished", "0"), ("finished", "0"), ("failed", "137")]


@pytest.mark.slow
def test_a_canceled_job_is_submitted_again_on_request(cluster: Path) -> None:
    """Canceling the job stops only its trial; repeating the command submits it again."""
    for name in ("held", "release"):
        (cluster / name).touch()
    (cluster / "cancel").write_text("42_2")
    (cluster / "unreachable").touch()
    assert main(SEEDS) == 75
    assert states(cluster) == [("finished", "0"), ("waiting", "75"), ("finished", "0")]
    (cluster / "cancel").unlink()
    assert main(SEEDS) == 0
    assert arrays(cluster) == ["1-3", "2"]
    assert states(cluster) == [("finished", "0")] * 3


@pytest.mark.slow
@pytest.mark.parametrize("is_recorded", [True, False], ids=["recorded", "killed before it was recorded"])
def test_a_repeated_command_follows_the_jobs_of_the_first(
    is_recorded: bool, cluster: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first command was interrupted."""
    for name in ("held", "interrupt"):
        (cluster / name).touch()
    assert main(SEEDS) == 75
    assert main(["status", "mine"]) == 0
    assert "scancel 42" in capsys.readouterr().out
    assert states(cluster) == [("submitted", "")] * 3
    assert Sweep.read(cluster / "outputs" / "mine").record.process.state == "submitted"
    if not is_recorded:
        file = cluster / "outputs" / "mine" / "sweep.json"
        content = json.loads(file.read_text())
        file.write_text(json.dumps(content | {"trials": [{**row, "job": None} for row in content["trials"]]}))
    (cluster / "interrupt").unlink()
    (cluster / "release").touch()
    assert main(SEEDS) == 0
    assert arrays(cluster) == ["1-3"]
    assert states(cluster) == [("finished", "0")] * 3


def test_trials_that_ended_later_are_not_repeated(cluster: Path) -> None:
    """The trials ended after the sweep had stopped."""
    command = ["train", "-m", "task.act=good,fail", *TASK]
    for name in ("held", "interrupt"):
        (cluster / name).touch()
    assert main(command) == 75
    for name in ("held", "interrupt"):
        (cluster / name).unlink()
    wait_until(lambda: not list((cluster / "queue").iterdir()), "all jobs have ended")
    assert [result.state for result in Sweep.read(cluster / "outputs" / "mine").results()] == ["finished", "failed"]
    assert main(command) == 70
    assert arrays(cluster) == ["1-2"]


@pytest.mark.parametrize(("are_canceled", "num_waits"), [(False, 3), (True, 0)])
def test_watching_a_page_ends_with_the_last_job(
    are_canceled: bool, num_waits: int, cluster: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("held", "interrupt"):
        (cluster / name).touch()
    assert main(SEEDS) == 75
    (cluster / "interrupt").unlink()
    for job in (cluster / "queue").iterdir() if are_canceled else ():
        job.unlink()
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("runner.tools.report.watch.watch", partial(watch, wait=wait))
    assert main(["report", "mine", "--watch"]) == 0
    assert len(waits) == num_waits
    assert [result.state for result in Sweep.read(cluster / "outputs" / "mine").results()] == ["submitted"] * 3
    (cluster / "held").unlink()


def test_a_sweep_is_live_while_it_may_submit_jobs(cluster: Path) -> None:
    assert main(SEEDS) == 0
    ended = Sweep.read(cluster / "outputs" / "mine")
    assert not ended.is_live()
    process = replace(ended.record.process, state="running")
    assert replace(ended, record=replace(ended.record, process=process)).is_live()


def test_jobs_of_another_user_count_as_live(cluster: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """squeue does not list the jobs of other users."""
    for name in ("held", "interrupt"):
        (cluster / name).touch()
    assert main(SEEDS) == 75
    (cluster / "interrupt").unlink()
    for job in (cluster / "queue").iterdir():
        job.unlink()
    sweep = Sweep.read(cluster / "outputs" / "mine")
    assert not sweep.is_live()
    user = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    assert sweep.is_live()
    (cluster / "held").unlink()


@pytest.mark.slow
def test_a_search_submits_trials_in_parallel_and_uses_results(cluster: Path) -> None:
    pytest.importorskip("optuna")
    search = ["search", "optimizer.lr=log(1e-5,1e-1)", *TASK]
    assert main([*search, "trials=2"]) == 0
    assert main([*search, "trials=5", "together=2"]) == 0
    assert arrays(cluster) == ["1", "2", "3-4", "5"]
    assert table(cluster, "state", "val/loss") == [("finished", f"0.{number}") for number in range(1, 6)]
    journal = (cluster / "outputs" / "mine" / "optuna.journal").read_text()
    reported = [entry["values"] for line in journal.splitlines() if (entry := json.loads(line)).get("values")]
    assert sorted(reported) == [[0.1], [0.2], [0.3], [0.4], [0.5]]


def test_trials_with_different_resources_use_different_arrays(cluster: Path) -> None:
    assert main(["train", "-m", "launcher.time_min=30,60", "seed=1,2", *TASK]) == 0
    assert arrays(cluster) == ["1-2", "3-4"]
    assert states(cluster) == [("finished", "0")] * 4


def test_submission_problems_are_reported_before_creating_a_folder(
    cluster: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "-m", "launcher=local,slurm", *TASK[:-1]]) == 78
    assert main([*SEEDS, "launcher.nodes=2"]) == 78
    assert "parallelism" in capsys.readouterr().err
    monkeypatch.setenv("PATH", str(cluster))
    assert main(SEEDS) == 78
    assert "squeue" in capsys.readouterr().err
    assert not (cluster / "outputs").exists()
