"""A resumed run of each task has the weights, statistics and metrics of an uninterrupted one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from runner.durable.checkpoint import LoadedCheckpoint, load, newest_valid
from tests.forkserver import ForkServer

pytestmark = pytest.mark.slow

# With these settings, a run takes seconds. Each run resumes in the phase in which it was stopped.
ARGUMENTS = {
    "cape": ["updates=6", "global_batch_size=4", "micro_batch_size=2"],
    "dynamo": ["updates=3", "global_batch_size=4"],
    "hyperspectral": ["updates=8", "task.num_cubes=8", "task.height=16", "task.width=16"],
    "hyperspectral task.head=svdd": ["updates=8", "task.num_cubes=8", "task.height=16", "task.width=16"],
    "nmt": ["updates=6", "global_batch_size=4"],
    "tractodiff": ["updates=6", "global_batch_size=8"],
}
# Send SIGTERM during the first save.
STOPPED = {
    "IMPORT_FIRST": "tests.faults.ending",
    "FAULT": json.dumps({"at": "save", "save": 1, "number": 1, "by": "SIGTERM"}),
}
NEEDS = {"cape": "matplotlib", "hyperspectral": "skimage", "tractodiff": "dipy"}


def last(folder: Path) -> LoadedCheckpoint:
    path = newest_valid(folder / "outputs" / "mine" / "checkpoints")
    assert path is not None
    return load(path)


def rows_of_metrics(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "outputs" / "mine" / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if not key.startswith("perf/")} for line in lines]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("task", ARGUMENTS)
def test_a_resumed_task_equals_an_uninterrupted_one(task: str, server: ForkServer, tmp_path: Path) -> None:
    name, *options = task.split()
    if name in NEEDS:
        pytest.importorskip(NEEDS[name], reason=f"the extra {name} is not installed")
    args = ["train", f"task={name}", *options, *ARGUMENTS[task], "run=mine", "device=cpu", "monitor=off"]
    args += ["evaluate.samples=4", "evaluate.every=2", "log_every=1", "checkpoint.every=1"]
    uninterrupted, stopped = tmp_path / "straight", tmp_path / "stopped"
    uninterrupted.mkdir()
    stopped.mkdir()
    done = server.run(args, uninterrupted)
    assert done.code == 0, done.err
    result = server.run(args, stopped, STOPPED)
    assert result.code == 75, result.err
    again = server.run(args, stopped)
    assert again.code == 0, again.err
    mine, theirs = last(stopped), last(uninterrupted)
    assert mine.update == theirs.update
    for name, value in theirs.tensors("model").items():
        assert torch.equal(value, mine.tensors("model")[name]), name
    assert rows_of_metrics(stopped) == rows_of_metrics(uninterrupted)
