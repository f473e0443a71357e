"""Members of tasks and hooks that have wrong arguments or types are reported by name when the task is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion
from torch import nn

from runner.base.errors import TaskFault
from runner.base.task import Fit, Task
from runner.cli import main
from runner.engine.contract.contract_checks import check_members, check_methods
from runner.engine.hooks.hook import Hook

HERE = Path(__file__)


class Right(Task):
    """Overrides members in every allowed way."""

    item = "token"
    items_per_sample = 64

    def __init__(self) -> None:
        self.model = nn.Linear(1, 1)
        self.collate = list
        self.summarize = dict
        self.fits = {"statistics": Fit()}  # type: ignore[misc]

    def dataset(self, split: str, *more: Any) -> Any:
        return []

    def stream(self, name: str, number: int, of: int) -> Any:
        return []

    def evaluate(self, model: nn.Module, batch: Any, scale: float = 1.0) -> Any:
        return {}

    @property
    def losses(self) -> Any:
        return {"train": self.loss}

    @property
    def packages(self) -> Any:
        return self.known_in_the_phase

    def predict(self, model: nn.Module, generator: Any, /, *, samples: int) -> Any:
        return []


def method(*names: str) -> Any:
    """Return a method with these arguments."""
    space: dict[str, Any] = {}
    exec(f"def method({', '.join(names)}): ...", space)  # noqa: S102 - the names are in this file
    return space["method"]


WRONG: dict[str, Any] = {
    "stream": method("self", "split"),
    "dataset": method("self"),
    "collate": method("self"),
    "evaluate": method("self", "batch"),
    "metrics": {},
    "summarize": method("self"),
    "baselines": method("self", "split"),
    "begin_phase": method("self"),
    "begin_update": None,
    "sample_lengths": method("self"),
    "predict": method("self", "model"),
    "combine_predictions": method("self"),
    "blocks": method("self", "model"),
    "couple": method("self", "one", "other"),
    "losses": method("self"),
    "fits": None,
    "packages": ["numpy"],
    "objectives": method("self"),
    "item": None,
    "items_per_sample": 0,
    "loss_is_additive": "no",
}
WRONG_VALUES: dict[str, Any] = {"losses": {"train": 3}, "fits": {"fit": len}, "packages": {"train": ["numpy"]}}


def test_a_task_can_override_members_in_any_compatible_way() -> None:
    check_members(Right(), HERE)
    assert list(Right().fits) == ["statistics"]
    assert list(Right().losses) == ["train"]


@pytest.mark.parametrize("name", WRONG)
def test_an_invalid_member_is_reported_by_name(name: str) -> None:
    task = type("Wrong", (Right,), {name: WRONG[name]})()
    vars(task).pop(name, None)
    with pytest.raises(TaskFault, match=rf"\b{name}(\(\) is called| must be)"):
        check_members(task, HERE)


@pytest.mark.parametrize("name", WRONG_VALUES)
def test_an_invalid_value_in_a_mapping_is_reported_by_key(name: str) -> None:
    task = type("Wrong", (Right,), {name: WRONG_VALUES[name]})()
    vars(task).pop(name, None)
    with pytest.raises(TaskFault, match=rf"{name}\['\w+'\] must be a"):
        check_members(task, HERE)


def test_the_fix_for_a_wrong_mapping_depends_on_how_it_is_defined(snapshot: SnapshotAssertion) -> None:
    assigned: Any = Task()
    assigned.losses = []  # meant as the task's own record of losses
    messages = []
    for task in (assigned, type("Wrong", (Task,), {"losses": property(lambda self: [])})()):
        with pytest.raises(TaskFault) as raised:
            check_members(task, HERE)
        messages += [(problem.what, problem.fix) for problem in raised.value.problems]
    assert messages == snapshot


@pytest.mark.parametrize("name", ["begin", "after_update", "after_evaluation", "wants", "state_dict", "close"])
def test_a_hook_method_with_wrong_arguments_is_reported_by_name(name: str) -> None:
    hook = type("Mine", (Hook,), {name: method("self", "one", "two", "three")})(object())
    with pytest.raises(TaskFault, match=rf": {name}\(\) is called"):
        check_methods(hook, Hook, HERE)
    check_methods(Hook(object()), Hook, HERE)  # type: ignore[arg-type]


TASK = """
import torch
from torch.utils.data import ConcatDataset
from runner import Task

class Points:
    def __len__(self):
        return 16
    def __getitem__(self, index):
        return torch.ones(2)

class Mine(Task):
    def __init__(self):
        self.model = torch.nn.Linear(2, 1)
    def dataset(self, split):
        return Points()
    def loss(self, model, batch):
        return model(batch).square().sum(), len(batch)

def build(*, size: int = 4) -> Task:
    return Mine()
"""


def member(text: str) -> tuple[str, str]:
    """Return (old, new) to add a one-statement method to TASK, given as `name(arguments): statement`."""
    head, _, statement = text.partition(": ")
    return "def loss", f"def {head}:\n        {statement}\n    def loss"


RETURNS: dict[str, tuple[str, str, str]] = {
    "dataset returns a generator": ("return Points()", "return (point for point in Points())", ""),
    "dataset returns an iterator": ("return Points()", "return iter([1, 2])", ""),
    "a length is not an integer": ("return 16", "return 16.0", ""),
    "a length is negative": ("return 16", "return -1", ""),
    "stream returns nothing": (*member("stream(self, split, shard, num_shards): return"), ""),
    "blocks returns nothing": (*member("blocks(self): return"), ""),
    "blocks returns names": (*member("blocks(self): return ['0']"), "memory=checkpoint"),
    "layers returns nothing": (*member("layers(self): return"), "parallelism=pipeline parallelism.world_size=2"),
    "lengths are ragged": (*member("sample_lengths(self, data): return [[1], [1, 2]] * 8"), "sampler=token_budget"),
    "weights are a dict": (*member("sample_weights(self, data): return {}"), "sampler=weighted"),
}


def train(task: str, args: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Train a task for two updates in this process; return the exit code."""
    name = f"{folder.name}.py"  # unique: tasks are imported by name
    (folder / name).write_text(task)
    monkeypatch.chdir(folder)
    return main(["train", "--task", name, "device=cpu", "monitor=off", "updates=2", *args.split()])


@pytest.mark.slow_beyond(2)
@pytest.mark.parametrize("name", RETURNS)
def test_invalid_return_values_of_members_are_task_errors(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    before, after, args = RETURNS[name]
    assert before in TASK
    assert train(TASK.replace(before, after), args, tmp_path, monkeypatch) == 70
    messages = capfd.readouterr().err
    assert "please report" not in messages
    assert f"{tmp_path.name}.py" in messages or "pipeline" in args


def test_sample_weights_can_require_gradients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = member("sample_weights(self, data): return torch.ones(16, requires_grad=True)")
    assert train(TASK.replace(*weights), "sampler=weighted", tmp_path, monkeypatch) == 0
