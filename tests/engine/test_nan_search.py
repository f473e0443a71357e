"""The search for a non-finite value repeats the passes of the update, with the same draws for each sample."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from runner.axes.precision import NotFinite
from runner.base.errors import NumericError
from runner.config.request import Request
from runner.engine.hooks import nan_search
from runner.engine.opening import open_phase

TASK = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from runner import Task, per_sample_noise

def build():
    return Drawn()

class Drawn(Task):
    def __init__(self):
        self.model, self.bad = nn.Linear(1, 1), []
    def dataset(self, split):
        return TensorDataset(torch.arange(64.0)[:, None])
    def loss(self, model, batch):
        drawn = per_sample_noise(batch).normal(1).abs() > 1.8
        self.bad += batch[0][drawn].int().tolist()
        return torch.where(drawn, torch.nan, model(batch[0] / 64)).sum(), len(batch[0])
"""


@pytest.mark.parametrize("modules", [(), ("torch._dynamo",)])
def test_a_sample_whose_random_draws_are_not_finite_is_found(
    modules: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled code, which does not call the hooks of the search, is not run; torch.compile is not loaded for that."""
    stances = []

    @contextmanager
    def set_stance(stance: str) -> Iterator[None]:
        stances.append(stance)
        yield

    (tmp_path / "drawn.py").write_text(TASK)
    settings = ("updates=1000", "global_batch_size=8", "micro_batch_size=1", "device=cpu", "run=small", "monitor=off",
                f"output_root={tmp_path}", "backend.threads=1", "checkpoint=off", "evaluate.every=1000")  # fmt: skip
    with open_phase(Request(settings, tmp_path / "drawn.py")) as phase:
        with pytest.raises(NotFinite) as raised:
            list(phase.updates())
        task: Any = phase.run.parts.task
        monkeypatch.setattr(nan_search, "sys", SimpleNamespace(modules=dict.fromkeys(modules)))
        monkeypatch.setattr(torch.compiler, "set_stance", set_stance)
        located = phase.translate_error(raised.value)
    assert isinstance(located, NumericError)
    assert located.place["samples"] == task.bad[:1]
    assert stances == ["force_eager"] * len(modules)


ROOT = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from runner import Task

def build():
    return OfRoot()

class Root(nn.Module):
    def forward(self, x):
        return torch.sqrt(x.relu() * 0)  # has no derivative at 0

class OfRoot(Task):
    def __init__(self):
        self.model = nn.Sequential(nn.Linear(1, 1), Root(), nn.Linear(1, 1))
    def dataset(self, split):
        return TensorDataset(torch.arange(64.0)[:, None])
    def loss(self, model, batch):
        return model(batch[0]).sum(), len(batch[0])
"""


def locate_in_first_micro_batch(task: str, folder: Path, *words: str) -> NumericError:
    """Train until a number is not finite; return the error, whose samples are those of the first micro-batch."""
    (folder / "not_finite.py").write_text(task)
    settings = ("updates=2", *words, "device=cpu", "run=small", "monitor=off", f"output_root={folder}",
                "backend.threads=1", "checkpoint=off", "evaluate.every=0")  # fmt: skip
    with open_phase(Request(settings, folder / "not_finite.py")) as phase:
        first = next(phase.order.micro_batches(0))
        with pytest.raises(NotFinite) as raised:
            list(phase.updates())
        located = phase.translate_error(raised.value)
    assert isinstance(located, NumericError)
    assert located.place["samples"] == first.indices
    return located


def test_a_module_whose_backward_pass_is_not_finite_is_found(tmp_path: Path) -> None:
    located = locate_in_first_micro_batch(ROOT, tmp_path, "global_batch_size=8", "micro_batch_size=2")
    assert located.place["update"] == 1
    assert "Root" in located.problems[0].what


LARGE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from runner import Task

def build():
    return Large()

class Large(Task):
    def __init__(self):
        self.model = nn.Linear(1, 1)
        nn.init.zeros_(self.model.weight)
        nn.init.zeros_(self.model.bias)
    def dataset(self, split):
        return TensorDataset(torch.ones(8, 1))
    def loss(self, model, batch):
        return model(batch[0]).sum() * 3e38, len(batch[0])
"""


def test_gradients_whose_norm_overflows_are_found(tmp_path: Path) -> None:
    """Each of the two is 3e38, and the root of the sum of their squares exceeds the largest float32 number."""
    located = locate_in_first_micro_batch(LARGE, tmp_path, "global_batch_size=1", "micro_batch_size=1")
    assert "float32" in located.problems[0].what


COUPLED = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from runner import Task

def build(*, fault: str) -> Task:
    return Negatives(fault)

class Bad(nn.Module):
    def forward(self, x):
        return torch.where(self.at(x), x * torch.inf, x)
    def at(self, x):
        return (x.detach().amax(1, keepdim=True) > 41.5) & (x.detach().amax(1, keepdim=True) < 42.5)

class BadBackward(Bad):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
    def forward(self, x):
        return x * self.scale + ((self.scale - self.scale).abs().sqrt() if self.at(x).any() else 0)

class Negatives(Task):
    def __init__(self, fault):
        self.fault = fault
        self.model = nn.Sequential(nn.Identity(), nn.Linear(2, 2))
        if fault in ("module", "backward"):
            self.model[0] = Bad() if fault == "module" else BadBackward()
    def dataset(self, split):
        return TensorDataset(torch.arange(64.0)[:, None].repeat(1, 2), torch.arange(64) // 2 % 2)
    def embed(self, model, batch):
        x, label = batch
        return {"code": model(x), "label": label}
    def couple(self, embeddings):
        codes, labels = embeddings["code"] / 64, embeddings["label"]
        num_negatives = (labels[:, None] != labels).sum(1)  # 0 in a micro-batch of one label
        loss = (codes.square().sum(1) * num_negatives.log()).sum()
        if self.fault == "couple":
            loss = loss * torch.inf
        if self.fault == "gradient":
            loss = loss + (codes - codes).abs().sqrt().sum()
        return loss, len(codes)
"""


@pytest.mark.parametrize(
    ("fault", "cause", "has_sample"),
    [
        ("module", "in the output of 0 (Bad)", True),
        ("backward", "in the backward pass of 0 (BadBackward)", True),
        ("couple", "couple is not (", False),
        ("gradient", "couple is finite, but its gradient is not (", False),
    ],
)
def test_a_loss_of_coupled_samples_is_searched_as_a_whole(
    fault: str, cause: str, has_sample: bool, tmp_path: Path
) -> None:
    """`couple` is not finite for a micro-batch, which has one label, but is for the samples of an update."""
    (tmp_path / "coupled.py").write_text(COUPLED)
    settings = ("updates=8", "global_batch_size=8", "micro_batch_size=2", "device=cpu", "run=small", "monitor=off",
                f"output_root={tmp_path}", "backend.threads=1", "checkpoint=off", "evaluate.every=1000",
                "sampler=sequential", f"task.fault={fault}")  # fmt: skip
    with open_phase(Request(settings, tmp_path / "coupled.py")) as phase:
        with pytest.raises(NotFinite) as raised:
            list(phase.updates())
        located = phase.translate_error(raised.value)
    assert isinstance(located, NumericError)
    assert cause in str(located)
    assert located.place["update"] == (6 if has_sample else 1)
    assert located.place.get("samples") == ([42, 43] if has_sample else None)
