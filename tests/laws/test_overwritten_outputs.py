"""A model compiled to CUDA graphs reuses the memory of its outputs in the next call, so outputs must be copied.

A model whose output is one buffer, which each call overwrites, simulates this without a GPU.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.forkserver import ForkServer

pytestmark = pytest.mark.slow

TASK = """
import torch, torch.nn.functional as F
from torch import nn
from runner import Task

class Overwritten(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value, buffer):
        buffer.copy_(value)
        return buffer.detach()  # another tensor over the same memory

    @staticmethod
    def backward(ctx, gradient): return gradient, None

class WithLoss(nn.Module):
    def __init__(self, overwrites):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
        self.outputs = [torch.zeros(()), torch.zeros(())] if overwrites else []

    def forward(self, inputs, targets):
        scores = self.layers(inputs)
        found = F.cross_entropy(scores, targets, reduction="sum"), (scores.argmax(1) == targets).sum().float()
        if not self.outputs: return found
        return tuple(Overwritten.apply(value, buffer) for value, buffer in zip(found, self.outputs))

class Small(Task):
    def __init__(self, overwrites): self.model = WithLoss(overwrites)
    def dataset(self, split):
        g = torch.Generator().manual_seed(len(split))
        return torch.utils.data.TensorDataset(torch.randn(90, 6, generator=g), torch.randint(3, (90,), generator=g))
    def loss(self, model, batch): return model(*batch)[0], len(batch[1])
    def evaluate(self, model, batch):
        loss, right = model(*batch)
        return {"loss": (loss, len(batch[1])), "accuracy": (right, len(batch[1]))}

def build(*, overwrites: bool = False) -> Task: return Small(overwrites)
"""


@pytest.mark.parametrize("args", ["", "max_grad_norm=1 scheduler=plateau averaging=ema precision=bf16"])
def test_overwritten_outputs_do_not_change_results(args: str, server: ForkServer, tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(TASK)
    base = "train --task task.py updates=6 global_batch_size=32 micro_batch_size=8 evaluate.every=2 log_every=1"
    actual = []
    for run, overwrites in (("plain", "false"), ("overwritten", "true")):
        line = f"{base} monitor=off device=cpu checkpoint=off run={run} task.overwrites={overwrites} {args}"
        result = server.run(line, tmp_path)
        assert result.code == 0, result.err
        rows = map(json.loads, (tmp_path / "outputs" / run / "metrics.jsonl").read_text().splitlines())
        actual.append([{name: row[name] for name in row if not name.startswith("perf/")} for row in rows])
    assert any("val/accuracy" in row for row in actual[0])
    assert actual[0] == actual[1]
