"""Traces in several processes: the same demand as in one, and real weights only in the first process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runner.base.errors import SystemLimit
from runner.base.json_converter import encode
from runner.config.configuration import compose
from runner.config.request import Request
from runner.forecast.demand import predict_needs
from runner.host.subprocesses import run_in_subprocess
from runner.plan.inventory import Inventory, read_cpu

HERE = Inventory((), replace(read_cpu()[0], memory_bytes=2**31))
TWO_PHASES = """
import os
from pathlib import Path
import torch
from torch import nn
from runner import Task

PHASES = {"one": {"updates": 2}, "two": {"updates": 2}}

class Phased(Task):
    def __init__(self, where, traced):
        self.where, self.traced = Path(where), traced
        self.model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8))
    def dataset(self, split):
        return torch.utils.data.TensorDataset(torch.ones(32, 8))
    def loss(self, model, batch):
        (self.where / str(os.getpid())).touch()
        out = model(batch[0])
        if not self.traced:
            out.sum().item()  # needs real weights
            (self.where / f"real {os.getpid()}").touch()
        return out.square().sum(), len(out)

def build(*, where: str = "", traced: bool = True):
    return Phased(where, traced)
"""


def demands(folder: Path, num_processes: int, *args: str) -> Any:
    """Return the predicted demand, and record the processes that call the loss in `folder`."""
    folder.mkdir()
    file = folder.with_name("phased.py")
    file.write_text(TWO_PHASES)
    configuration = compose(Request((f"task.where={folder}", "device=cpu", "global_batch_size=8", *args), file))
    needs = run_in_subprocess(predict_needs, configuration, HERE, True, None, num_processes)
    assert set(needs.demands) == {"one", "two"}, needs.why_not
    return encode({name: replace(demand, read_s=None) for name, demand in needs.demands.items()})


def test_traces_in_several_processes_give_the_same_demand(tmp_path: Path) -> None:
    expected = demands(tmp_path / "one", 1)
    assert len(list((tmp_path / "one").iterdir())) == 1
    assert demands(tmp_path / "three", 3) == expected
    assert len(list((tmp_path / "three").iterdir())) == 3, "for two phases, each with two sizes"


def test_a_limit_on_processes_does_not_prevent_the_prediction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise SystemLimit("cannot start a subprocess")

    monkeypatch.setattr("runner.forecast.demand.Subprocess", refuse)
    assert demands(tmp_path / "limited", 3)
    assert len(list((tmp_path / "limited").iterdir())) == 1


@pytest.mark.slow
def test_only_one_process_computes_with_real_weights(tmp_path: Path) -> None:
    expected = demands(tmp_path / "one", 1, "task.traced=false")
    assert demands(tmp_path / "two", 2, "task.traced=false") == expected
    assert len(list((tmp_path / "two").glob("real *"))) == 1
