"""Opening a trained run restores the phase and progress of its checkpoint and leaves the process unchanged."""

from __future__ import annotations

import gc
import random
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from runner.base.task import Progress
from runner.config.request import Request
from runner.durable import checkpoint
from runner.durable.directory import RunDirectory
from runner.host.gc_pause import paused_collection
from runner.records.events import Console
from runner.trained.trained_run import load_trained_model, open_trained
from tests.commands_here import run_here

TASK = """
import torch

from tests.engine.task_of_averages import Regression

SETTINGS = {"global_batch_size": 8}

PHASES = {"one": {"updates": 2}, "two": {"updates": 3}}


def build():
    return Noted()


class Noted(Regression):
    def __init__(self):
        super().__init__()
        self.calls = []
        self.model.register_buffer("moved", torch.zeros(()))

    def begin_phase(self, phase):
        super().begin_phase(phase)
        self.calls.append(phase)

    def begin_update(self, progress):
        self.calls.append(progress)
        self.model.moved.fill_(10.0 * (progress.phase == "two") + progress.update + progress.epoch)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the trained run `mine`, its task `noted.py` and its weights `w.safetensors`."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "noted.py").write_text(TASK)
    args = ["train", "--task", "noted.py", "run=mine", f"output_root={folder}", "device=cpu", "monitor=off"]
    result = run_here(args, folder)
    assert result.code == 0, result.err
    last = checkpoint.load(checkpoint.checkpoint_path(folder / "mine" / "checkpoints", 5))
    save_file(last.tensors("model"), folder / "w.safetensors")
    return folder


def request_of(folder: Path, *overrides: str) -> Request:
    return Request((f"output_root={folder}", *overrides), folder / "noted.py")


def calls_of(request: Request) -> list[Any]:
    with ExitStack() as stack:
        task: Any = open_trained(request, Console(level="warning"), stack, None).parts.task
        return list(task.calls)


def test_a_run_is_opened_with_the_phase_and_progress_of_its_checkpoint(folder: Path) -> None:
    assert calls_of(request_of(folder, "run=mine")) == ["one", "two", Progress("two", 3, 3, 3 * 8 / 64)]


@pytest.mark.parametrize(
    ("length", "progress"),
    [
        ((), Progress("two", 3, 3, 0.0)),
        (("phase.two.epochs=2",), Progress("two", 1, 1, 2.0)),
    ],
)
def test_given_weights_are_opened_at_the_end_of_the_last_phase(
    length: tuple[str, ...], progress: Progress, folder: Path
) -> None:
    """A task that depends on its progress, for example for a temperature, must behave as at the end of training."""
    weights = f"weights={folder / 'w.safetensors'}"
    request = request_of(folder, weights, "run=given", "device=cpu", "monitor=off", *length)
    assert calls_of(request) == ["one", "two", progress]


def test_given_weights_override_buffers_that_the_task_updates(folder: Path) -> None:
    """The runner does not know after which update given weights were written."""
    weights = f"weights={folder / 'w.safetensors'}"
    with ExitStack() as stack:
        request = request_of(folder, weights, "run=given", "device=cpu", "monitor=off", "phase.two.epochs=2")
        model = open_trained(request, Console(level="warning"), stack, None).parts.bare
        assert float(model.moved) == 10 + 3 + 3 * 8 / 64


def test_loading_a_model_changes_no_random_generator(folder: Path) -> None:
    def draw() -> list[float]:
        return [torch.rand(()).item(), np.random.random(), random.random()]

    def seed() -> None:
        torch.manual_seed(7)
        np.random.seed(7)
        random.seed(7)

    seed()
    expected = draw()
    seed()
    load_trained_model(RunDirectory.find(folder, "mine"), request_of(folder, "run=mine"), "last")
    assert draw() == expected


def test_garbage_collection_is_enabled_after_opening_a_run(folder: Path) -> None:
    with paused_collection():  # as the command line does during imports
        assert not gc.isenabled()
        calls_of(request_of(folder, "run=mine"))
        assert gc.isenabled()


def test_a_finished_run_names_its_best_checkpoint_unless_it_is_last(folder: Path) -> None:
    """The report shows the metrics of the last evaluation, but inference uses the best checkpoint."""
    task = Path(__file__).parents[1] / "engine" / "task_of_averages.py"
    args = ["train", "--task", str(task), f"output_root={folder}", "device=cpu", "monitor=off", "updates=6"]
    args += ["evaluate.every=2", "checkpoint.every=2"]
    worse = run_here([*args, "run=worse", "checkpoint.best_is=max"], folder)
    better = run_here([*args, "run=better"], folder)
    assert (worse.code, better.code) == (0, 0), worse.err
    assert "update-0000000002" in worse.out
    assert "update-00000000" not in better.out


def test_a_model_keeps_modules_replaced_by_a_custom_precision(tmp_path: Path) -> None:
    table = """
from torch import nn


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


def doubled(model):
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.utils.parametrize.register_parametrization(module, "weight", Doubled())


PRECISIONS = {"doubled": ("fp32", doubled)}
"""
    (tmp_path / "noted.py").write_text(TASK + table)
    overrides = ("run=mine", f"output_root={tmp_path}", "device=cpu", "monitor=off", "precision=doubled")
    result = run_here(["train", "--task", "noted.py", *overrides], tmp_path)
    assert result.code == 0, result.err
    weights = checkpoint.load(checkpoint.checkpoint_path(tmp_path / "mine" / "checkpoints", 5)).tensors("model")
    model = load_trained_model(RunDirectory.find(tmp_path, "mine"), request_of(tmp_path, "run=mine"), "last")
    assert {name: tensor.tolist() for name, tensor in model.state_dict().items()} == {
        name: tensor.tolist() for name, tensor in weights.items()
    }
