"""Complete runs with parallelism.evaluation=sharded: metrics are bitwise equal to those of evaluation=whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from runner.plan.planning_rules import why_no_fsdp
from tests.forkserver import ForkServer

pytestmark = pytest.mark.skipif(bool(why_no_fsdp(torch.__version__)), reason="the plan refuses this version of torch")
TASK = """
import torch
import torch.nn.functional as F
from torch import nn
from runner import Task


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.line, self.norm = nn.Linear(16, 16), nn.BatchNorm1d(16)

    def forward(self, x):
        return x + self.norm(torch.tanh(self.line(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(self.norm(x))


class Normed(Task):
    def __init__(self):
        self.model = Net()

    def dataset(self, split):
        g = torch.Generator().manual_seed(len(split))
        return torch.utils.data.TensorDataset(torch.randn(90, 6, generator=g), torch.randint(3, (90,), generator=g))

    def loss(self, model, batch):
        x, y = batch
        return F.cross_entropy(model(x), y, reduction="sum"), len(y)


def build():
    return Normed()
"""
TRAIN = (
    "train --task task.py updates=8 global_batch_size=30 evaluate.every=4 monitor=off device=cpu parallelism=fsdp"
    " parallelism.world_size=2"
)


def validation_losses(server: ForkServer, folder: Path, evaluation: str, settings: str) -> list[float]:
    (folder / "task.py").write_text(TASK)
    result = server.run(f"{TRAIN} parallelism.evaluation={evaluation} {settings} run={evaluation}", folder)
    assert result.code == 0, result.err
    lines = (folder / "outputs" / evaluation / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line).get("val/loss") for line in lines]
    return [loss for loss in losses if loss is not None]


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize(
    "settings",
    ["parallelism.batch_norm=sync averaging=ema averaging.decay=0.8", "parallelism.batch_norm=sync", "averaging=swa"],
)
def test_sharded_and_whole_evaluation_are_equal(settings: str, server: ForkServer, tmp_path: Path) -> None:
    whole = validation_losses(server, tmp_path, "whole", settings)
    assert len(whole) == 2
    assert validation_losses(server, tmp_path, "sharded", settings) == whole
