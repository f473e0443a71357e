"""`plan` supports models that cannot train on a single sample."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.commands_here import run_here

TASK = """
import torch
import torch.nn.functional as F
from torch import nn
from runner import Task
def build(*, width: int = 8) -> Task: return Normed(width)
class Normed(Task):
    def __init__(self, width):
        self.model = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, 2))
    def dataset(self, split): return torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randint(0, 2, (64,)))
    def loss(self, model, batch):
        x, y = batch
        return F.cross_entropy(model(x), y, reduction="sum"), len(y)
"""


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("args", ["", "task.width=4000 global_batch_size=64 +hardware=t4"])
def test_a_batch_norm_of_vectors_is_planned(args: str, tmp_path: Path) -> None:
    (tmp_path / "normed.py").write_text(TASK)
    result = run_here(f"plan --task normed.py {args}", tmp_path)
    assert result.code == 0, result.err
