"""Logs have bounded sizes, and no decision depends on the system clock, which may be changed."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from runner.cli import main
from runner.durable import checkpoint
from runner.durable.directory import generate_run_name, list_runs
from runner.engine.checkpoints.save_policy import SavePolicy
from runner.host.process_tree import process_identity
from runner.records import events
from tests.faults.tallies import Tally
from tests.forkserver import ForkServer

Amount = Callable[[int, int], int]
HERE = Path(__file__).parent
BASE = ["train", "run=mine", "device=cpu", "monitor=off", "--task"]
FAULTS, CLOCKS = [*BASE, str(HERE / "task_of_faults.py")], [*BASE, str(HERE / "task_of_clocks.py")]
LOGS = ("console.log", "events.jsonl", "error.json", "run.json", "metrics.jsonl")
BYTES_OF_A_START = 8192  # limit per start, for console.log and events.jsonl together


def sizes(run: Path) -> dict[str, int]:
    return {name: (run / name).stat().st_size if (run / name).exists() else 0 for name in LOGS}


def checkpoints_of(run: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in (run / "checkpoints").rglob("*") if path.is_file()}


def test_restarting_a_finished_run_does_not_change_it(
    tmp_path: Path, server: ForkServer, amount: Amount, tally: Tally
) -> None:
    run = tmp_path / "outputs" / "mine"
    assert server.run(FAULTS, tmp_path).code == 0
    before, rows, saved = sizes(run), (run / "metrics.jsonl").read_bytes(), checkpoints_of(run)
    names = sorted(path.name for path in run.iterdir())
    count = amount(2, 100)
    for _ in range(count):
        assert server.run(FAULTS, tmp_path).code == 0
        tally.tried += 1
    after = sizes(run)
    assert (run / "metrics.jsonl").read_bytes() == rows
    assert checkpoints_of(run) == saved
    assert sorted(path.name for path in run.iterdir()) == names
    grown = after["console.log"] + after["events.jsonl"] - before["console.log"] - before["events.jsonl"]
    tally.notes["bytes of a start"] = grown // count
    assert grown <= BYTES_OF_A_START * count
    assert after["run.json"] <= before["run.json"] + 100


@pytest.mark.slow
def test_repeated_rejected_starts_do_not_change_a_run(
    tmp_path: Path, server: ForkServer, amount: Amount, tally: Tally
) -> None:
    run, refused = tmp_path / "outputs" / "mine", [*FAULTS, "seed=5"]
    assert server.run(FAULTS, tmp_path).code == 0
    assert server.run(refused, tmp_path).code == 88
    before, rows, saved = sizes(run), (run / "metrics.jsonl").read_bytes(), checkpoints_of(run)
    count = amount(2, 50)
    for _ in range(count):
        assert server.run(refused, tmp_path).code == 88
        tally.tried += 1
    after = sizes(run)
    assert (run / "metrics.jsonl").read_bytes() == rows
    assert checkpoints_of(run) == saved
    grown = after["console.log"] + after["events.jsonl"] - before["console.log"] - before["events.jsonl"]
    assert grown <= BYTES_OF_A_START * count
    assert abs(after["error.json"] - before["error.json"]) <= 100
    assert after["run.json"] == before["run.json"]


def test_logs_are_rotated_at_their_maximum_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "MAX_LOG_BYTES", 5000)
    for _ in range(200):
        log, console = events.Events(tmp_path / "events.jsonl"), events.Console(tmp_path / "console.log", level="error")
        log.record("start", text="x" * 100)
        console.info("y" * 100)
        log.close()
        console.close()
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 4 * 5500
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "console-earlier.log", "console.log", "events-earlier.jsonl", "events.jsonl",
    ]  # fmt: skip
    assert all(json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines())


def test_a_row_after_a_torn_row_starts_a_new_line(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text('{"kind": "start"}\n{"kind": "en')
    log = events.Events(tmp_path / "events.jsonl")
    log.record("resume", update=3)
    log.close()
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    assert len(lines) == 3
    assert json.loads(lines[2])["kind"] == "resume"


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("step_s", [10 * 365 * 86400, -10 * 365 * 86400, 3600])
def test_jumps_of_the_system_clock_do_not_change_results(
    step_s: int, tmp_path: Path, server: ForkServer, tally: Tally
) -> None:
    args = [*CLOCKS, "checkpoint.every=30min"]
    for name, clock in (("still", "0"), ("jumping", str(step_s))):
        folder = tmp_path / name
        folder.mkdir()
        result = server.run(args, folder, env={"CLOCK_S": clock})
        assert result.code == 0, result.err
        assert "Traceback" not in result.out + result.err
        run = folder / "outputs" / "mine"
        # Save intervals use the monotonic clock, so only evaluations and the end of the run have saved.
        again = server.run(args, folder, env={"CLOCK_S": str(-int(clock))})
        assert again.code == 0, again.err
        assert json.loads((run / "run.json").read_text())["state"] == "done"
        tally.tried += 2
    still, jumping = (tmp_path / name / "outputs" / "mine" for name in ("still", "jumping"))
    theirs, ours = (checkpoint.load(checkpoint.checkpoint_path(run / "checkpoints", 40)) for run in (still, jumping))
    for stem in theirs.stems:
        expected, actual = theirs.tensors(stem), ours.tensors(stem)
        assert all(torch.equal(actual[name], tensor) for name, tensor in expected.items()), stem
    assert sorted(path.name for path in (still / "checkpoints").iterdir()) == sorted(
        path.name for path in (jumping / "checkpoints").iterdir()
    )


def test_save_intervals_use_a_monotonic_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = SavePolicy(seconds=60.0)
    monkeypatch.setattr(time, "time", lambda: 4e9)
    assert not policy.is_due_by_time()
    began = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: began + 61)
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert policy.is_due_by_time()


@pytest.mark.parametrize("started", ["2001-01-01T00:00:00+00:00", "2199-01-01T00:00:00+00:00"])
@pytest.mark.parametrize("is_ours", [True, False])
def test_run_states_do_not_depend_on_the_clock(
    started: str, is_ours: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "outputs" / "mine"
    run.mkdir(parents=True)
    record = {"state": "running", "pid": os.getpid(), "started": started, "birth": process_identity(os.getpid())}
    (run / "run.json").write_text(json.dumps(record if is_ours else record | {"birth": "another boot 12"}))
    monkeypatch.chdir(tmp_path)
    assert main(["status", "mine"]) == 0
    assert capsys.readouterr().out.startswith("mine: running" if is_ours else "mine: killed")


def test_runs_with_any_modification_time_are_found_and_ordered(tmp_path: Path) -> None:
    times = {"future": 4e9, "now": 1.8e9, "past": 1e6, "at-zero": 0.0, "before": -1e6}
    for name, written in times.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text("{}")
        os.utime(tmp_path / name / "run.json", (written, written))
    result = [path.name for path in list_runs(tmp_path)]
    assert sorted(result) == sorted(times)
    assert result[:3] == ["future", "now", "past"]
    assert generate_run_name("gpt") != generate_run_name("gpt")  # unique within one second
