"""`begin_update` may set state of the model to a function of the progress, but may not update it incrementally."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.forkserver import ForkServer

TASK = """
import copy, torch
from torch import nn
from tests.engine.task_of_averages import Regression

SETTINGS = {"updates": 3, "global_batch_size": 8}

def build():
    return Moved()

class Pair(nn.Module):
    def __init__(self, student):
        super().__init__()
        self.student, self.teacher = student, copy.deepcopy(student).requires_grad_(False)
        self.register_buffer("temperature", torch.zeros(()))

    def forward(self, x):
        return self.student(x) + 0 * self.teacher(x)

class Moved(Regression):
    def __init__(self):
        super().__init__()
        self.model = Pair(self.model)

    @torch.no_grad()
    def begin_update(self, progress):
        for one, other in zip(self.model.teacher.parameters(), self.model.student.parameters(), strict=True):
            HERE
"""


@pytest.mark.parametrize("change", ["one.lerp_(other, 0.1)", "one.data = one.data * 0.9 + other.data * 0.1"])
def test_incremental_changes_of_weights_in_begin_update_are_rejected(
    change: str, server: ForkServer, tmp_path: Path
) -> None:
    """`begin_update` is called again after a resume, which would change the weights twice."""
    (tmp_path / "moved.py").write_text(TASK.replace("HERE", change))
    result = server.run("train --task moved.py run=mine device=cpu monitor=off", tmp_path)
    assert result.code == 70
    assert "begin_update" in result.err
    assert "teacher." in result.err
    assert "after_update" in result.err


def test_random_draws_of_begin_update_must_depend_on_the_progress(server: ForkServer, tmp_path: Path) -> None:
    (tmp_path / "moved.py").write_text(TASK.replace("HERE", "self.model.temperature.normal_()"))
    result = server.run("train --task moved.py run=mine device=cpu monitor=off", tmp_path)
    assert result.code == 70
    assert "temperature" in result.err
    assert "progress.update" in result.err


REPEATABLE = {
    "a temperature": "self.model.temperature.fill_(progress.update)",
    "a copy": "one.copy_(other)",
    "a value that differs by rounding": "other.dim() > 1 and other.sub_(other.mean()).div_(other.norm())",
}


@pytest.mark.parametrize("change", REPEATABLE.values(), ids=REPEATABLE)
def test_begin_update_can_set_state_that_depends_only_on_the_progress(
    change: str, server: ForkServer, tmp_path: Path
) -> None:
    (tmp_path / "moved.py").write_text(TASK.replace("HERE", change))
    result = server.run("train --task moved.py run=mine device=cpu monitor=off", tmp_path)
    assert result.code == 0, result.err
