"""A resumed run is bitwise equal to an uninterrupted one."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from runner.durable.checkpoint import checkpoint_path, load
from runner.durable.directory import RunDirectory
from runner.engine.checkpoints import oom_history
from tests.forkserver import ForkServer
from tests.waiting import wait_until

TASK = Path(__file__).with_name("task_with_everything.py")
BASE = ["train", "--task", str(TASK), "run=mine", "device=cpu", "monitor=off"]


def final_tensors(folder: Path, update: int) -> dict[str, torch.Tensor]:
    checkpoint = load(checkpoint_path(folder / "outputs" / "mine" / "checkpoints", update))
    return {f"{stem}/{name}": tensor for stem in checkpoint.stems for name, tensor in checkpoint.tensors(stem).items()}


def rows(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of metrics.jsonl without timings."""
    text = (folder / "outputs" / "mine" / "metrics.jsonl").read_text()
    return [
        {key: value for key, value in json.loads(line).items() if not key.startswith("perf/")}
        for line in text.splitlines()
    ]


def assert_equal_runs(straight: Path, resumed: Path, update: int) -> None:
    mine, theirs = final_tensors(resumed, update), final_tensors(straight, update)
    assert mine.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(mine[name], tensor), name
    assert rows(resumed) == rows(straight)


Straight = Callable[..., Path]


@pytest.fixture(scope="module")
def straight(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Straight:
    """Return a function that maps arguments to the folder of an uninterrupted run, cached for all tests."""
    known: dict[tuple[str, ...], Path] = {}

    def of(*args: str) -> Path:
        if args not in known:
            known[args] = tmp_path_factory.mktemp("straight")
            done = server.run([*BASE, *args], known[args])
            assert done.code == 0, done.err
        return known[args]

    return of


@pytest.mark.sampled(1)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("workers", [0, 2])
def test_resume_after_sigkill(
    precision: str, accumulation: int, workers: int, server: ForkServer, straight: Straight, tmp_path: Path
) -> None:
    computed = [f"precision={precision}", f"micro_batch_size={12 // accumulation}"]
    args = [*BASE, *computed, f"dataloader.num_workers={workers}"]
    killed = tmp_path
    at = 39 * accumulation  # after the checkpoint of update 37, before the next one
    checkpoint = killed / "outputs" / "mine" / "checkpoints" / "update-0000000037"
    result = server.run([*args, f"task.kill_at={at}", f"task.wait_for={checkpoint}"], killed)
    assert result.code == -signal.SIGKILL, result.err
    again = server.run([*args, f"task.kill_at={at}", f"task.wait_for={checkpoint}"], killed, env={"NO_KILL": "1"})
    assert again.code == 0, again.err
    assert json.loads((killed / "outputs" / "mine" / "run.json").read_text())["state"] == "done"
    assert_equal_runs(straight(*computed), killed, 100)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_resume_after_a_stop_signal(
    number: signal.Signals, server: ForkServer, straight: Straight, tmp_path: Path
) -> None:
    stopped = tmp_path
    args = [*BASE, "task.stop_at=20", f"task.held={stopped / 'held'}", "dataloader.num_workers=2"]
    pid = server.start(args, stopped)
    wait_until((stopped / "held").exists)
    os.killpg(pid, number)  # terminals and schedulers also signal the data workers
    result = server.wait()
    assert result.code == 75, result.err
    assert "run=mine" in result.out
    state = json.loads((stopped / "outputs" / "mine" / "run.json").read_text())["state"]
    assert state == "preempted"
    again = server.run(args, stopped, env={"NO_KILL": "1"})
    assert again.code == 0, again.err
    assert_equal_runs(straight(), stopped, 100)


def test_a_damaged_checkpoint_is_skipped(server: ForkServer, straight: Straight, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(straight(), damaged)
    checkpoint = checkpoint_path(damaged / "outputs" / "mine" / "checkpoints", 100)
    content = bytearray((checkpoint / "model.safetensors").read_bytes())
    content[-3] ^= 1
    (checkpoint / "model.safetensors").write_bytes(content)
    again = server.run(BASE, damaged)
    assert again.code == 0, again.err
    assert "update-0000000100" in again.err + again.out
    assert_equal_runs(straight(), damaged, 100)


def folder_state(folder: Path) -> dict[Path, tuple[int, bytes]]:
    """Return path -> modification time and content of everything in a folder."""
    paths = [folder, *folder.rglob("*")]
    return {path: (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"") for path in paths}


def test_a_finished_run_is_not_changed(server: ForkServer, straight: Straight, tmp_path: Path) -> None:
    shutil.copytree(straight(), tmp_path, dirs_exist_ok=True)
    run = tmp_path / "outputs" / "mine"
    before = folder_state(run)
    for args in (BASE, ["resume", "mine"], ["resume", "mine", "dataloader.num_workers=1"]):
        again = server.run(args, tmp_path)
        assert again.code == 0, again.err
        assert "resume_allow=[updates]" in again.out
        assert folder_state(run) == before  # the same files with the same content, and no others
    assert server.run([*BASE, "seed=1"], tmp_path).code == 88


def test_a_finished_run_of_two_ranks_is_not_changed(server: ForkServer, tmp_path: Path) -> None:
    args = [*BASE, "updates=4", "parallelism=ddp", "parallelism.world_size=2"]
    assert server.run(args, tmp_path).code == 0
    before = folder_state(tmp_path / "outputs" / "mine")
    again = server.run(args, tmp_path)
    assert again.code == 0, again.err
    assert folder_state(tmp_path / "outputs" / "mine") == before


def test_the_command_both_predicts_with_a_finished_run(server: ForkServer, tmp_path: Path) -> None:
    assert server.run(["new", "my_task.py"], tmp_path).code == 0
    args = ["both", "run=mine", "device=cpu", "monitor=off", "updates=2", "--task", "my_task.py"]
    assert server.run(args, tmp_path).code == 0
    shutil.rmtree(tmp_path / "outputs" / "mine" / "predictions")
    before = (tmp_path / "outputs" / "mine" / "run.json").read_bytes()
    again = server.run(args, tmp_path)
    assert again.code == 0, again.err
    assert (tmp_path / "outputs" / "mine" / "run.json").read_bytes() == before
    assert list((tmp_path / "outputs" / "mine" / "predictions").iterdir())


def test_changes_of_results_must_be_allowed_by_name(server: ForkServer, tmp_path: Path) -> None:
    assert server.run([*BASE, "updates=4"], tmp_path).code == 0
    refused = server.run([*BASE, "updates=4", "seed=1", "global_batch_size=24"], tmp_path)
    assert refused.code == 88
    assert "seed" in refused.err
    assert "global_batch_size" in refused.err
    by_name = server.run([*BASE, "updates=6"], tmp_path)
    assert by_name.code == 88
    assert "resume_allow=[updates]" in by_name.err
    longer = server.run([*BASE, "updates=6", "resume_allow=[updates]"], tmp_path)
    assert longer.code == 0, longer.err
    assert rows(tmp_path)[-1]["update"] == 6


@pytest.mark.slow
def test_settings_without_effect_on_results_can_change(server: ForkServer, straight: Straight, tmp_path: Path) -> None:
    changed = tmp_path
    args = BASE
    first = server.run([*args, "dataloader.num_workers=2", "updates=100", "task.fail_at=60"], changed)
    assert first.code == 70
    resumed = server.run(
        [*args, "dataloader=thread", "checkpoint.every=10", "task.fail_at=60"], changed, env={"NO_KILL": "1"}
    )
    assert resumed.code == 0, resumed.err
    assert_equal_runs(straight(), changed, 100)


def test_resume_fresh_starts_from_scratch_and_keeps_old_files(server: ForkServer, tmp_path: Path) -> None:
    assert server.run([*BASE, "updates=4"], tmp_path).code == 0
    run = tmp_path / "outputs" / "mine"
    with RunDirectory.create_or_open(run.parent, "mine") as directory:
        oom_history.write_reductions(directory, [oom_history.ReducedMicroBatch("train", 2, None, 4, 8, 1)])
    again = server.run([*BASE, "updates=4", "seed=3", "resume=fresh"], tmp_path)
    assert again.code == 0, again.err
    assert oom_history.read_reductions(run) == []
    assert list((run / "checkpoints").glob("earlier-*"))
    assert (run / "metrics-earlier-1.jsonl").is_file()
    assert rows(tmp_path)[-1]["update"] == 4
