"""Runs with a sampler give the same result after a kill, with data workers, and on ranks with unequal shares."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from runner.durable.checkpoint import load, newest_valid
from tests.forkserver import ForkServer
from tests.rounding import PROMISED, distance

TASK = Path(__file__).with_name("task_of_samplers.py")
TRAIN = f"train --task {TASK} run=mine device=cpu monitor=off updates=14 checkpoint.every=1"
SAMPLERS = [
    "weighted", "mixture sampler.weights=[0.5,0.5]", "length_buckets", "token_budget sampler.tokens=24", "backwards",
]  # fmt: skip
TWO = "parallelism=ddp parallelism.world_size=2 parallelism.shares=[5,3] dataloader.num_workers=0"
KILL: dict[str, Any] = {"at": "update", "number": 6, "by": "SIGKILL"}


def trained(server: ForkServer, folder: Path, args: str, *faults: dict[str, Any]) -> tuple[dict[str, Any], list[float]]:
    """Return the weights and losses of a run that is restarted after each fault."""
    folder.mkdir()
    for fault in (*faults, {}):
        env = {"IMPORT_FIRST": "tests.faults.ending", "FAULT": json.dumps(fault)}
        result = server.run(f"{TRAIN} {args}", folder, env)
        assert (result.code == 0) is not bool(fault), result.err
    directory = folder / "outputs" / "mine"
    path = newest_valid(directory / "checkpoints")
    assert path is not None
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return load(path).tensors("model"), [row["train/loss"] for row in rows if "train/loss" in row]


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda words: words.split()[0])
def test_resumes_workers_and_ranks_do_not_change_results(sampler: str, server: ForkServer, tmp_path: Path) -> None:
    args = f"sampler={sampler}"
    weights, losses = trained(server, tmp_path / "alone", f"{args} dataloader.num_workers=0")
    resumed, again = trained(server, tmp_path / "killed", f"{args} dataloader.num_workers=2", KILL)
    assert again == losses
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in weights.items())
    shared, on_ranks = trained(server, tmp_path / "ranks", f"{args} {TWO}")
    assert distance(losses, on_ranks) <= 14 * PROMISED[torch.float32]
    assert all(
        distance(tensor.tolist(), shared[name].tolist()) <= 14 * PROMISED[torch.float32]
        for name, tensor in weights.items()
    )


WRONG = [
    ("sampler=nothing", 70, "must return a sampler"),
    ("sampler=mixture sampler.weights=[1,2,3]", 78, "sampler.weights"),
    ("sampler=token_budget sampler.tokens=3", 65, "sampler.tokens=3"),
    ("sampler=token_budget dataloader.drop_last=true", 78, "dataloader.drop_last"),
    ("sampler=mixture data.train_samples=9", 65, "data.train_samples=9"),
]


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize(("args", "code", "named"), WRONG, ids=[row[0] for row in WRONG])
def test_invalid_samplers_are_rejected(args: str, code: int, named: str, server: ForkServer, tmp_path: Path) -> None:
    result = server.run(f"{TRAIN} {args} dataloader.num_workers=0", tmp_path)
    assert result.code == code
    assert named in result.err


def test_sampler_and_weights_must_not_change_on_resume(server: ForkServer, tmp_path: Path) -> None:
    task = tmp_path / "mine.py"
    task.write_text(TASK.read_text())
    line = f"train --task {task} run=mine device=cpu monitor=off dataloader.num_workers=0 sampler=weighted"
    assert server.run(f"{line} updates=3", tmp_path).code == 0
    more = "updates=5 resume_allow=[updates]"
    other = server.run(f"{line} {more} sampler.replacement=false", tmp_path)
    assert other.code == 88
    task.write_text(TASK.read_text().replace("index % 3", "index % 4"))
    assert server.run(f"{line} {more}", tmp_path).code == 88
    task.write_text(TASK.read_text())
    assert server.run(f"{line} {more}", tmp_path).code == 0
