"""A count of items that is not finite is a fault of the task, not of its gradients."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.axes.precision import NotFinite
from runner.base.errors import NumericError, TaskFault
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


HEAD = TASK.partition("    def loss")[0]
COUPLED = """
    def begin_update(self, progress):
        self.update = progress.update

    def embed(self, model, batch):
        return model(batch[0] / 64)

    def couple(self, codes):  # receives an update in training, and a micro-batch in the search
        is_update = len(codes) == 8
        bad = torch.where(torch.tensor(self.update == 2 and is_update), torch.nan, 1.0)
"""
NAN_COUNT = HEAD + COUPLED + "        return codes.sum(), 8 * bad\n"
NAN_LOSS = HEAD + COUPLED + "        return codes.sum() * bad, torch.tensor(8.0 * is_update)\n"


SETTINGS = (
    "device=cpu", "run=small", "monitor=off", "checkpoint=off", "backend.threads=1", "evaluate.every=1000",
)  # fmt: skip


def locate_failure(folder: Path, task: str, *more: str) -> BaseException | None:
    """Train until an update is not finite; return the error that is reported."""
    (folder / "counted.py").write_text(task)
    settings = ("updates=1000", "global_batch_size=8", *SETTINGS, f"output_root={folder}", *more)
    with open_phase(Request(settings, folder / "counted.py")) as phase:
        with pytest.raises(NotFinite) as raised:
            list(phase.updates())
        return phase.translate_error(raised.value)


def test_a_later_nonfinite_count_is_a_fault_of_the_task(tmp_path: Path) -> None:
    located = locate_failure(tmp_path, TASK, "micro_batch_size=1")
    assert isinstance(located, TaskFault)
    assert "a count of nan" in str(located)


@pytest.mark.parametrize("sharpness", ["none", "sam"])
def test_a_later_nonfinite_count_of_couple_is_a_fault_of_couple(sharpness: str, tmp_path: Path) -> None:
    located = locate_failure(tmp_path, NAN_COUNT, "micro_batch_size=2", f"sharpness={sharpness}")
    assert isinstance(located, TaskFault)
    assert "couple" in str(located)
    assert "nan" in str(located)
    assert "counted.py:" in str(located)


@pytest.mark.parametrize(
    ("count", "update"),
    [("0", 1), ("8 * (self.update < 2)", 3), ("torch.tensor(0)", 1), ("torch.tensor(8 * (self.update < 2))", 3)],
)
def test_a_zero_count_is_a_fault_of_couple(count: str, update: int, tmp_path: Path) -> None:
    (tmp_path / "counted.py").write_text(HEAD + COUPLED + f"        return codes.sum(), {count}\n")
    settings = ("updates=1000", "global_batch_size=8", "micro_batch_size=2", *SETTINGS, f"output_root={tmp_path}")
    with open_phase(Request(settings, tmp_path / "counted.py")) as phase:
        with pytest.raises((TaskFault, NotFinite)) as raised:
            list(phase.updates())
        fault = phase.translate_error(raised.value) if isinstance(raised.value, NotFinite) else raised.value
    assert isinstance(fault, TaskFault)
    for part in ("couple", " 0", "above 0", "counted.py:"):
        assert part in str(fault)
    assert phase.position.update == update - 1


def test_a_nonfinite_coupled_loss_is_not_a_fault_of_its_count(tmp_path: Path) -> None:
    located = locate_failure(tmp_path, NAN_LOSS, "micro_batch_size=2")
    assert isinstance(located, NumericError)
    assert "update 3" in str(located)
