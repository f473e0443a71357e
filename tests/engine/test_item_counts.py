"""A count of items that is not finite is a fault of the task, not of its gradients."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.axes.precision import NotFinite
from runner.base.errors import TaskFault
from runner.config.request import Request
from runner.engine.opening import open_phase

TASK = """
import torch
from torch import nn
from runner import Task


def build():
    return Counted()


class Counted(Task):
    def __init__(self):
        self.model = nn.Linear(1, 1)

    def dataset(self, split):
        return torch.utils.data.TensorDataset(torch.arange(64.0)[:, None])

    def loss(self, model, batch):
        (x,) = batch
        return model(x / 64).sum(), torch.where(x.max() > 60, torch.nan, float(len(x)))
"""


def test_a_count_that_is_not_finite_in_a_later_update_is_a_fault_of_the_task(tmp_path: Path) -> None:
    (tmp_path / "counted.py").write_text(TASK)
    settings = ("updates=1000", "global_batch_size=8", "micro_batch_size=1", "device=cpu", "run=small", "monitor=off",
                f"output_root={tmp_path}", "backend.threads=1", "checkpoint=off", "evaluate.every=1000")  # fmt: skip
    with open_phase(Request(settings, tmp_path / "counted.py")) as phase:
        with pytest.raises(NotFinite) as raised:
            list(phase.updates())
        located = phase.translate_error(raised.value)
    assert isinstance(located, TaskFault)
    assert "nan items" in str(located)
