"""The search for a non-finite value repeats the update, with the same random draws for each sample."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from runner.axes.precision import NotFinite
from runner.base.errors import NumericError, TaskFault
from runner.config.request import Request
from runner.distributed.world import World
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
def test_a_sample_that_is_nonfinite_due_to_random_draws_is_found(
    modules: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled code skips the hooks of the search, so the search runs eagerly. It does not import the compiler."""
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


def locate_in_first_micro_batch(task: str, folder: Path, *args: str) -> NumericError:
    """Train until a value is not finite; return the error, which must name the samples of the first micro-batch."""
    (folder / "not_finite.py").write_text(task)
    settings = ("updates=2", *args, "device=cpu", "run=small", "monitor=off", f"output_root={folder}",
                "backend.threads=1", "checkpoint=off", "evaluate.every=0")  # fmt: skip
    with open_phase(Request(settings, folder / "not_finite.py")) as phase:
        first = next(phase.order.micro_batches(0))
        with pytest.raises(NotFinite) as raised:
            list(phase.updates())
        located = phase.translate_error(raised.value)
    assert isinstance(located, NumericError)
    assert located.place["samples"] == first.indices
    return located


def test_a_module_with_a_nonfinite_backward_pass_is_found(tmp_path: Path) -> None:
    located = locate_in_first_micro_batch(ROOT, tmp_path, "global_batch_size=8", "micro_batch_size=2")
    assert located.place["update"] == 1
    assert "Root" in located.problems[0].what


OBJECTIVES = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from runner import Task

OBJECTIVES = {"first": {"trains": ["one"]}, "second": {"trains": ["two"]}}

def build():
    return Mine()

class Root(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
    def forward(self, x):
        return x + (self.scale - self.scale).abs().sqrt()

class Mine(Task):
    def __init__(self):
        self.model = nn.ModuleDict({"one": nn.Linear(1, 1), "two": nn.Sequential(Root(), nn.Linear(1, 1))})
    def dataset(self, split):
        return TensorDataset(torch.ones(8, 1))
    def loss(self, model, batch, objective):
        x = model["one" if objective == "first" else "two"](batch[0]).float()
        return (0.01 if objective == "first" else 10.0) * x.sum(), len(batch[0])
"""


def test_the_search_scales_the_loss_of_an_objective_as_training_does(tmp_path: Path) -> None:
    """With the loss scale of the first objective, the loss gradient of the second one overflows float16."""
    (tmp_path / "mine.py").write_text(OBJECTIVES)
    settings = ("updates=30", "global_batch_size=8", "micro_batch_size=8", "device=cpu", "run=small", "monitor=off",
                "precision=fp16", "log_every=100", "evaluate.every=0", "checkpoint=off", "backend.threads=1",
                f"output_root={tmp_path}")  # fmt: skip
    with open_phase(Request(settings, tmp_path / "mine.py")) as phase:
        with pytest.raises(NotFinite) as raised:
            list(phase.updates())
        located = phase.translate_error(raised.value)
    assert isinstance(located, NumericError)
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
    """Each of the two gradients is 3e38, so the root of the sum of their squares exceeds the largest float32 number."""
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
        ("couple", "couple() is not (", False),
        ("gradient", "couple() is finite, but its gradient is not (", False),
    ],
)
def test_a_loss_of_coupled_samples_is_searched_as_a_whole(
    fault: str, cause: str, has_sample: bool, tmp_path: Path
) -> None:
    """`couple` is finite for the samples of an update, but not for a micro-batch, which has only one label."""
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


CHOSEN = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from runner import Task

def build():
    return Chosen()

class Late(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, gradient):
        return gradient * torch.nan

class Chosen(Task):
    loss_is_additive = False
    def __init__(self):
        self.model, self.fault, self.smallest = nn.Sequential(nn.Linear(1, 1), nn.Identity()), "", 1
        self.differentiates, self.at = [], 5
    def dataset(self, split):
        if split != "train":
            raise NotImplementedError
        return TensorDataset(torch.arange(32.0)[:, None])
    def collate(self, samples):
        if len(samples) < self.smallest:
            raise ValueError("a batch norm needs two")
        x = torch.stack([sample[0] for sample in samples])
        return torch.where(x == self.at, torch.nan, x) if self.fault == "sample" else x
    def loss(self, model, batch):
        self.differentiates.append(torch.is_grad_enabled())
        y = model(batch)
        if self.fault == "loss":
            y = y * torch.where(batch == 5, torch.inf, 1)
        if self.fault == "gradient":
            y = Late.apply(y)
        if self.fault == "items":
            return y.sum() * 0, 0
        return y.square().sum(), len(batch)
"""


class Search:
    """A run whose first update has one micro-batch of the samples 0 to 3 and one of the samples 4 to 7."""

    def __init__(self, phase: Any) -> None:
        self.phase, self.task = phase, phase.run.parts.task

    def train(self) -> Any:
        """Return the error that the phase reports for the update that fails."""
        with pytest.raises((NotFinite, TaskFault)) as raised:
            list(self.phase.updates())
        return self.phase.translate_error(raised.value) or raised.value


@contextmanager
def searching(folder: Path, *args: str) -> Iterator[Search]:
    (folder / "chosen.py").write_text(CHOSEN)
    settings = ("updates=2", "global_batch_size=8", "micro_batch_size=4", "device=cpu", "run=small", "monitor=off",
                f"output_root={folder}", "backend.threads=1", "checkpoint=off", "evaluate.every=0",
                "sampler=sequential", *args)  # fmt: skip
    with open_phase(Request(settings, folder / "chosen.py")) as phase:
        yield Search(phase)


@pytest.fixture
def search(tmp_path: Path) -> Iterator[Search]:
    with searching(tmp_path) as one:
        yield one


@pytest.mark.parametrize(
    ("at", "splits_batch", "is_lockstep"), [(5, True, False), (13, True, True), (13, False, False), (5, False, True)]
)
def test_a_nonfinite_sample_is_found_with_every_strategy(
    at: int, splits_batch: bool, is_lockstep: bool, search: Search, monkeypatch: pytest.MonkeyPatch
) -> None:
    search.task.fault = "sample"
    monkeypatch.setattr(search.phase.parts.parallel, "splits_batch", splits_batch)
    monkeypatch.setattr(search.phase.parts.parallel, "is_lockstep", is_lockstep)
    closed: list[bool] = []
    monkeypatch.setattr(search.phase.loader, "close", lambda: closed.append(True))
    search.task.at = at
    located = search.train()
    assert closed == [True], "threads of the loader must not read samples during the search"
    assert located.place == {"update": 1 + at // 8, "samples": [at]}
    assert located.problems[0].what.endswith(f": {at}")
    assert "rank" not in located.problems[0].what
    assert "bad_samples=skip" in located.problems[0].fix


def test_a_batch_is_named_if_its_samples_cannot_be_collated_individually(search: Search) -> None:
    search.task.fault, search.task.smallest = "sample", 2
    located = search.train()
    assert located.place == {"update": 1, "samples": [4, 5, 6, 7]}
    assert "bad_samples=skip" in located.problems[0].fix


@pytest.mark.parametrize(
    ("fault", "is_lockstep", "samples"),
    [
        ("loss", False, [4, 5, 6, 7]),
        ("loss", True, [4, 5, 6, 7]),
        ("gradient", False, [0, 1, 2, 3]),
        ("gradient", True, None),
    ],
)
def test_the_micro_batch_with_a_nonfinite_loss_or_gradient_is_named(
    fault: str, is_lockstep: bool, samples: list[int] | None, search: Search, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With collectives in the model, no backward pass is repeated, but the weights are gathered."""
    gathered: list[bool] = []

    @contextmanager
    def gather_parameters(model: Any) -> Iterator[None]:
        assert model is search.phase.parts.model
        gathered.append(torch.is_grad_enabled())
        yield

    monkeypatch.setattr(search.phase.parts.parallel, "is_lockstep", is_lockstep)
    monkeypatch.setattr(search.phase.parts.parallel, "gather_parameters", gather_parameters)
    search.task.fault = fault
    located = search.train()
    assert located.place == {"update": 1} | ({} if samples is None else {"samples": samples})
    assert located.problems[0].fix.startswith("fix the loss") == (samples is not None)
    assert gathered == [True] * is_lockstep
    assert search.task.differentiates[-1] == (not is_lockstep)


def test_an_update_without_items_is_a_fault_of_the_task(search: Search) -> None:
    search.task.fault = "items"
    located = search.train()
    assert isinstance(located, TaskFault)
    assert "(update 1)" in located.problems[0].what


@pytest.mark.parametrize("is_lockstep", [True, False])
@pytest.mark.parametrize("has_bad_sample", [True, False])
def test_nonfinite_weights_before_the_update_are_named(
    has_bad_sample: bool, is_lockstep: bool, search: Search, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search.phase.parts.parallel, "is_lockstep", is_lockstep)
    torch.nn.init.constant_(search.task.model[0].bias, torch.inf)
    search.task.fault = "sample" if has_bad_sample else ""
    located = search.train()
    assert "0.bias" in located.problems[0].what
    assert "0.weight" not in located.problems[0].what
    assert located.problems[0].fix.startswith("lower optimizer.lr")
    assert located.place == {"update": 1} | ({"samples": [5]} if has_bad_sample else {})


@pytest.mark.parametrize("kernel", ["fused", "foreach"])
def test_a_late_check_names_weights_changed_by_the_previous_update(kernel: str, tmp_path: Path) -> None:
    """After an overflow, a fused optimizer skips the step itself."""
    with searching(tmp_path, f"optimizer.kernel={kernel}") as search:
        torch.nn.init.constant_(search.task.model[0].weight, torch.nan)
        search.phase.position.update = 1
        located = search.phase.translate_error(NotFinite("late", late=True))
    assert located.place == {"update": 1}
    assert ("optimizer.kernel=fused" in located.problems[0].fix) == (kernel == "foreach")
    assert "0.weight" in located.problems[0].what


def test_a_search_that_fails_does_not_hide_the_error(search: Search, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search.phase.loader.fetcher, "__class__", type("Broken", (), {"__getitem__": lambda *_: 1 / 0}))
    located = search.phase.translate_error(NotFinite("the loss", late=False))
    assert isinstance(located, NumericError)
    assert "ZeroDivisionError" in located.problems[0].what
    assert located.place == {"update": 1}


@pytest.mark.parametrize(
    ("here", "there", "rank", "samples"),
    [
        ("loss", ["unknown", "", 4.0, [], []], 0, [4, 5, 6, 7]),  # any finding is more informative than none
        ("loss", ["module", "there", None, [], [9]], 1, [9]),  # a module is more informative than the loss
        ("sample", ["module", "there", None, [], [9]], 0, [5]),
        ("loss", ["module", "there", None, [7], [9]], 1, [7]),
        ("loss", ["samples", "there", None, [11], [9]], 1, [11]),
    ],
)
def test_the_most_informative_finding_of_all_ranks_is_reported(
    here: str, there: list[Any], rank: int, samples: list[int], search: Search, monkeypatch: pytest.MonkeyPatch
) -> None:
    search.task.fault = here
    monkeypatch.setattr(World, "gather", lambda _, value: [value, there] if isinstance(value, list) else [value, value])
    located = search.train()
    assert located.place["samples"] == samples
    assert f"on rank {rank}, " in located.problems[0].what
    assert ("there" in located.problems[0].what) == (rank == 1)
    assert located.problems[0].what.endswith("not finite: 7") == (samples == [7])


@pytest.mark.parametrize(("items", "is_fault"), [(0.0, True), (float("nan"), True), (4.0, False), (None, False)])
def test_missing_items_are_a_fault_only_if_no_rank_has_items(
    items: float | None, is_fault: bool, search: Search, monkeypatch: pytest.MonkeyPatch
) -> None:
    search.task.fault = "items"
    there: list[Any] = ["unknown", "", items, [], []]
    monkeypatch.setattr(World, "gather", lambda _, value: [value, there] if isinstance(value, list) else [value, value])
    located = search.phase.translate_error(NotFinite("", late=False))
    assert isinstance(located, TaskFault) == is_fault


@pytest.mark.parametrize("is_coupled", [True, False])
@pytest.mark.parametrize("is_lockstep", [True, False])
def test_no_sample_is_named_if_the_repeated_update_is_finite(
    is_lockstep: bool, is_coupled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Backward passes are not repeated if they contain collectives."""
    (tmp_path / "finite.py").write_text(COUPLED if is_coupled else CHOSEN)
    settings = ("updates=2", "global_batch_size=8", "micro_batch_size=2", "device=cpu", "run=small", "monitor=off",
                f"output_root={tmp_path}", "backend.threads=1", "checkpoint=off", "evaluate.every=0",
                *(["task.fault=none"] if is_coupled else []))  # fmt: skip
    with open_phase(Request(settings, tmp_path / "finite.py")) as phase:
        monkeypatch.setattr(phase.parts.parallel, "is_lockstep", is_lockstep)
        located = phase.translate_error(NotFinite("the loss", late=False))
    assert isinstance(located, NumericError)
    assert located.place == {"update": 1}
    (problem,) = located.problems
    assert problem.what.startswith("the loss")
    assert ("backward" in problem.what) == (is_lockstep and not is_coupled)
    assert problem.fix.startswith("lower optimizer.lr")
