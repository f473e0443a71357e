"""A streaming dataset of Hugging Face gives the same training on several ranks as in one process, also after a kill."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from runner.durable.checkpoint import load, newest_valid
from tests.forkserver import ForkServer
from tests.rounding import ADAPTIVE, distance

pytest.importorskip("datasets", reason="the package datasets is not installed")

TASK = """
import datasets
import torch
from torch import nn

from runner import Task

SETTINGS = {
    "updates": 12, "global_batch_size": 8, "optimizer": "adam", "optimizer.lr": 0.01, "checkpoint.every": 2,
    "evaluate.every": 0,
}


def build(context, *, buffer: int = 0):
    return Numbers(context.data_path, buffer)


class Numbers(Task):
    def __init__(self, folder, buffer):
        self.model = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
        self.folder, self.buffer = folder, buffer

    def dataset(self, split):
        if split == "val":
            return [{"number": torch.tensor(3)}]
        files = sorted(map(str, self.folder.glob("*.jsonl")))
        numbers = datasets.load_dataset(
            "json", data_files=files, split="train", streaming=True, cache_dir=str(self.folder / "cache")
        ).with_format("torch")
        return numbers.shuffle(seed=1, buffer_size=self.buffer) if self.buffer else numbers

    def loss(self, model, batch):
        x = batch["number"].to(torch.get_default_dtype()).view(-1, 1) / 70
        return (model(x) - x.sin()).square().sum(), len(x)

    def begin_update(self, progress):
        from tests.faults.ending import reached

        reached("update", progress.update + 1)
"""
SIZES = (17, 23, 5, 16, 10)  # samples per file; the updates need more samples than all files have
RANKS = "parallelism=ddp parallelism.world_size=2 parallelism.shares=[5,3] micro_batch_size=2 dataloader.num_workers=1"
KILLED = {"at": "update", "number": 10, "by": "SIGKILL"}


def train(server: ForkServer, folder: Path, args: str, fault: dict[str, Any] | None = None) -> dict[str, Tensor]:
    if not folder.exists():
        (folder / "data").mkdir(parents=True)
        (folder / "numbers_task.py").write_text(TASK)
        for index, size in enumerate(SIZES):
            first = sum(SIZES[:index])
            lines = [json.dumps({"number": number}) for number in range(first, first + size)]
            (folder / "data" / f"{index}.jsonl").write_text("\n".join(lines))
    env = {"IMPORT_FIRST": "tests.projects.in_float64 tests.faults.ending", "FAULT": json.dumps(fault or {})}
    result = server.run(
        f"train --task numbers_task.py data.path=data device=cpu monitor=off run=mine {args}", folder, env
    )
    if fault:
        assert result.code == -9, result.err
        return {}
    assert result.code == 0, result.err
    path = newest_valid(folder / "outputs" / "mine" / "checkpoints")
    assert path is not None
    return dict(load(path).tensors("model"))


def resumed_at(folder: Path) -> list[int]:
    lines = (folder / "outputs" / "mine" / "events.jsonl").read_text().splitlines()
    return [event["update"] for event in map(json.loads, lines) if event["kind"] == "resume"]


@pytest.mark.slow
@pytest.mark.parametrize("buffer", [0, 6], ids=["in order", "shuffled"])
@pytest.mark.parametrize("shards", [5, 2])
def test_ranks_and_resumes_do_not_change_training(buffer: int, shards: int, server: ForkServer, tmp_path: Path) -> None:
    """A shuffled stream is read again, because its state lacks the shuffle buffer. Shards have 2 and 3 files."""
    args = f"task.buffer={buffer} data.shards={shards}"
    whole = train(server, tmp_path / "whole", args)
    ranks = train(server, tmp_path / "ranks", f"{args} {RANKS}")
    assert distance(*({name: each[name].tolist() for name in whole} for each in (whole, ranks))) <= ADAPTIVE
    train(server, tmp_path / "killed", args, KILLED)
    resumed = train(server, tmp_path / "killed", args)
    (start,) = resumed_at(tmp_path / "killed")
    assert 0 < start < KILLED["number"]
    assert all(resumed[name].equal(whole[name]) for name in whole)
