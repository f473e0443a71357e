"""A trace computes only tensors whose values it needs, and traces nothing twice."""

from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from runner.config.configuration import Configuration, compose
from runner.config.request import Request
from runner.forecast.demand import predict_needs
from runner.forecast.memory_forecast import forecast
from runner.forecast.phase_tracer import PhaseTracer
from runner.host.subprocesses import run_in_subprocess
from runner.plan.inventory import Inventory, read_cpu
from runner.plan.memory_trace import Traced

DROPPING = """
import torch
from torch import nn
from runner import Task, per_sample_noise

WIDTH = 4096

class Dropping(Task):
    def __init__(self):
        self.model = nn.Sequential(nn.Linear(2, WIDTH), nn.Linear(WIDTH, 1))
    def dataset(self, split):
        return torch.utils.data.TensorDataset(torch.ones(16, 2))
    def loss(self, model, batch):
        (x,) = batch
        wide = model[0](x)
        return model[1](per_sample_noise(x).dropout(wide, 0.1)).square().sum(), len(x)

def build():
    return Dropping()
"""


STACKED = """
import torch
from torch import nn
from runner import Task

class Stacked(Task):
    def __init__(self):
        self.model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)) for _ in range(8)])
    def blocks(self):
        return list(self.model)
    def dataset(self, split):
        return torch.utils.data.TensorDataset(torch.ones(16, 4))
    def loss(self, model, batch):
        (x,) = batch
        return model(x).square().sum(), len(x)

def build():
    return Stacked()
"""


class Computed(TorchDispatchMode):
    """Records the number of elements of the largest computed tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        result = func(*args, **(kwargs or {}))
        if type(result) is Tensor and result.device.type == "cpu":
            self.largest = max(self.largest, result.numel())
        return result


def largest_computed(configuration: Any) -> int:
    with Computed() as computed:
        forecast(configuration, Inventory((), read_cpu()[0]), [8])
    return computed.largest


def count_traces(configuration: Configuration) -> int:
    trace, traced = PhaseTracer.trace, []

    def count(tracer: PhaseTracer) -> Traced:
        traced.append(tracer)
        return trace(tracer)

    PhaseTracer.trace = count  # type: ignore[method-assign]
    predict_needs(configuration, Inventory((), read_cpu()[0]), alternatives=True)
    return len(traced)


def test_dropout_masks_are_not_computed(tmp_path: Path) -> None:
    """A mask has as many elements as the activations, and takes twenty operations per element."""
    file = tmp_path / "dropping.py"
    file.write_text(DROPPING)
    configuration = compose(Request(("micro_batch_size=8", "global_batch_size=16", "device=cpu"), file))
    assert run_in_subprocess(largest_computed, configuration) < 8 * 4096


def test_a_sufficient_budget_needs_no_more_traces(tmp_path: Path) -> None:
    file = tmp_path / "stacked.py"
    file.write_text(STACKED)
    args = ("micro_batch_size=8", "global_batch_size=16", "device=cpu")
    counts = [
        run_in_subprocess(count_traces, compose(Request((*args, *memory), file)))
        for memory in (["memory=none"], ["memory=budget", "memory.limit_gib=64"])
    ]
    assert 0 < counts[0] == counts[1]
