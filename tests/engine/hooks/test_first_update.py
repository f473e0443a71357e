"""Checks around the first update: missing gradients, and buffers that a newly built model would lack."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from runner.base.errors import Exit, TaskFault
from runner.cli import main
from runner.distributed.world import World
from runner.engine.hooks.first_update import FirstUpdate
from runner.engine.hooks.timekeeping import Timekeeping
from runner.engine.update.loop import StepInfo
from tests.opened import opened

TASK = """
import torch
from runner import Task

class Own(Task):
    def __init__(self):
        self.model = torch.nn.Linear(2, 1)
    def dataset(self, split):
        if split != "train":
            raise NotImplementedError
        return torch.utils.data.TensorDataset(torch.ones(8, 2))
    def loss(self, model, batch):
        total = model(batch[0]).square().sum()
        return total if WHEN else (total, len(batch[0]))

def build():
    return Own()
"""


class First:
    """The hook of a phase whose first update is simulated."""

    def __init__(self, phase: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.phase, self.hook = phase, FirstUpdate(phase)
        self.warned: list[str] = []
        self.infos: list[str] = []
        self.gradients: dict[str, bool] = {"0.weight": True}
        monkeypatch.setattr(phase.run.observers.screen, "warn", self.warned.append)
        monkeypatch.setattr(phase.run.observers.screen, "info", self.infos.append)
        monkeypatch.setattr(phase.work, "first_gradients", lambda: self.gradients)
        self.hook.begin()

    def update(self, number: int = 1) -> None:
        self.phase.position.update = number
        self.hook.after_update(StepInfo(number, None, 1, None, None, ()))


@pytest.fixture
def first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[First]:
    with opened(tmp_path, "checkpoint=off") as phase:
        monkeypatch.setattr(type(phase.parts.task), "loss_is_additive", False)
        yield First(phase, monkeypatch)


@pytest.mark.parametrize(
    ("here", "there", "missed"),
    [
        ({"a": True, "b": False}, {"a": False, "b": False}, ["b"]),
        ({"a": False}, {"a": True}, []),
        ({"a": True}, {"b": False}, ["b"]),  # stages of a pipeline
        ({"a": True}, {"b": True}, []),
    ],
)
def test_parameters_without_gradient_on_any_rank_are_reported(
    here: dict[str, bool], there: dict[str, bool], missed: list[str], first: First, monkeypatch: pytest.MonkeyPatch
) -> None:
    first.gradients = here
    monkeypatch.setattr(World, "gather", lambda _, value: [value, there if isinstance(value, dict) else value])
    first.update()
    assert len(first.warned) == bool(missed)
    assert all(f" {name} " in first.warned[0] for name in missed)


@pytest.mark.parametrize("number", [1, 2])
def test_missing_gradients_are_reported_only_after_the_first_phase_update(number: int, first: First) -> None:
    """After a resume, the first update has other samples, which may reach other parameters."""
    first.gradients = {"0.bias": False}
    first.update(number)
    first.update(1)
    assert ["0.bias" in text for text in first.warned] == [True] * (number == 1)


UNFROZEN = """
import torch
from runner import Task

SETTINGS = {"updates": 4, "global_batch_size": 4, "log_every": 1}

class Own(Task):
    def __init__(self):
        self.model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
        self.model[0].requires_grad_(FROZEN_AT_FIRST)
    def begin_update(self, progress):
        self.model[0].requires_grad_(progress.update >= UNFROZEN_AFTER)
    def dataset(self, split):
        return torch.utils.data.TensorDataset(torch.ones(8, 2))
    def loss(self, model, batch):
        return model(batch[0]).square().sum(), len(batch[0])

def build():
    return Own()
"""


@pytest.mark.parametrize(
    ("requires_grad", "unfrozen_after", "is_named"), [(False, 2, True), (False, 9, False), (True, 2, False)]
)
def test_gradients_of_parameters_missing_from_the_optimizer_are_reported_once(
    requires_grad: bool, unfrozen_after: int, is_named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """A task that freezes parameters in __init__ and unfreezes them later would silently not train them."""
    monkeypatch.chdir(tmp_path)
    task = UNFROZEN.replace("FROZEN_AT_FIRST", str(requires_grad)).replace("UNFROZEN_AFTER", str(unfrozen_after))
    Path("own.py").write_text(task)
    code = main(["train", "--task", "own.py", "device=cpu", "monitor=off", "backend.threads=1", "checkpoint=off"])
    output = "".join(capfd.readouterr())
    assert code == 0, output
    named = [line for line in output.splitlines() if "begin_update" in line]
    assert len(named) == is_named
    assert all("0.weight" in line and "1.weight" not in line for line in named)


def add(model: Any) -> None:
    model.register_buffer("late", torch.zeros(2))


def grow(model: Any) -> None:
    model.bank = torch.zeros(3)


def remove(model: Any) -> None:
    del model.bank


def fill(model: Any) -> None:
    model.bank += 1


@pytest.mark.parametrize(("change", "name"), [(add, "late"), (grow, "bank"), (remove, None), (fill, None)])
@pytest.mark.parametrize("is_here", [True, False])
def test_adding_or_resizing_a_buffer_is_rejected_on_every_rank(
    is_here: bool, change: Any, name: str | None, first: First, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = first.phase.parts.bare
    model.register_buffer("bank", torch.zeros(2))
    first.hook.begin()
    if is_here:
        change(model)
    there: dict[type, Any] = {bool: name is not None, list: [name] if name else []}  # of another rank
    monkeypatch.setattr(World, "gather", lambda _, value: [value, there.get(type(value), value)])
    if name is None:
        first.update()
        return
    with pytest.raises(TaskFault) as raised:
        first.update()
    assert f": {name}" in raised.value.problems[0].what
    assert f'register_buffer("{name}"' in raised.value.problems[0].fix


def test_a_buffer_excluded_from_the_state_dict_can_be_added(first: First) -> None:
    model = first.phase.parts.bare
    add(model)

    def leave_out(_: Any, state: dict[str, Any], *rest: Any) -> None:
        del state["late"]

    model.register_state_dict_post_hook(leave_out)
    first.update()
    assert first.hook.phase.run.has_started


@pytest.mark.parametrize("has_started", [True, False])
def test_the_start_of_a_process_is_reported_once(
    has_started: bool, first: First, monkeypatch: pytest.MonkeyPatch
) -> None:
    phase, run = first.phase, first.phase.run
    run.has_started = has_started
    shown: list[Any] = []
    monkeypatch.setattr(run.observers.screen, "show_first_update", lambda *args: shown.append(args))
    monkeypatch.setattr(phase.loader, "decision", "two workers", raising=False)
    assert phase.hook(Timekeeping).until_first_update is None
    first.update()
    first.update(2)
    num = 0 if has_started else 1
    assert [args[0] for args in shown] == [1] * num
    assert all(args[1] >= 0.0 for args in shown)
    assert first.infos == ["two workers"] * num
    assert run.has_started
    assert (phase.hook(Timekeeping).until_first_update is not None) == (not has_started)


@pytest.mark.parametrize("is_off", [True, False])
@pytest.mark.parametrize("was_compiled", [True, False])
def test_a_model_left_uncompiled_despite_the_setting_is_reported(
    was_compiled: bool, is_off: bool, first: First, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = first.phase.run.plan.choices["compile"]
    monkeypatch.setattr(type(compiled), "uses", lambda _, name: is_off and name == "off")
    monkeypatch.setattr("runner.engine.hooks.first_update.nothing_was_compiled", lambda: not was_compiled)
    first.update()
    assert ["compile=" in text for text in first.warned] == [True] * (not is_off and not was_compiled)


@pytest.mark.parametrize("when", ["True", "not model.training"])
def test_a_loss_without_a_count_is_reported_once(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """If the loss is invalid only in eval mode, the run trains and reports that the check of the sum was skipped."""
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(TASK.replace("WHEN", when))
    args = ("updates=2", "global_batch_size=4", "device=cpu", "monitor=off", "backend.threads=1", "sharpness=sam")
    code = main(["train", "--task", "own.py", "averaging=ema", "sharpness.rho=0.07", *args])
    output = "".join(capfd.readouterr())
    assert code == (0 if "training" in when else Exit.SOFTWARE), output
    assert output.count("loss() must return (") == 1
    (line,) = [line for line in output.splitlines() if line.startswith("training ")]
    assert "sharpness sam, rho 0.07" in line
    assert "averaging ema" in line
    assert "adapter" not in line
