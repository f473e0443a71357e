"""Methods of other frameworks are rejected, with the name of the replacement, before any code runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from runner.base.errors import ConfigError, Problem
from runner.config.configuration import compose
from runner.config.request import Request

TASK = """
from runner import Task

class Net:
    def training_step(self): ...

class Mine(Task):
    def loss(self, model, batch): ...
    def {name}(self): ...

def build(): ...
raise SystemExit("a task file is not executed to be checked")
"""
LINE = 9  # line of the method in the file
# Methods that users override, from the documentation of Lightning 2.6 and of the Trainer of transformers 5.
LIGHTNING = (
    "backward configure_callbacks configure_gradient_clipping configure_model configure_optimizers lr_scheduler_step "
    "on_after_backward on_after_batch_transfer on_before_backward on_before_batch_transfer on_before_optimizer_step "
    "on_before_zero_grad on_fit_end on_fit_start on_load_checkpoint on_predict_batch_end on_predict_batch_start "
    "on_predict_end on_predict_epoch_end on_predict_epoch_start on_predict_start on_save_checkpoint on_test_batch_end "
    "on_test_batch_start on_test_end on_test_epoch_end on_test_epoch_start on_test_start on_train_batch_end "
    "on_train_batch_start on_train_end on_train_epoch_end on_train_epoch_start on_train_start on_validation_batch_end "
    "on_validation_batch_start on_validation_end on_validation_epoch_end on_validation_epoch_start "
    "on_validation_model_zero_grad on_validation_start optimizer_step optimizer_zero_grad predict_dataloader "
    "predict_step prepare_data setup teardown test_dataloader test_step train_dataloader training_step "
    "transfer_batch_to_device val_dataloader validation_step "
    "test_epoch_end training_epoch_end training_step_end validation_epoch_end validation_step_end"  # names before 2.0
)
TRANSFORMERS = (
    "compute_loss compute_metrics create_optimizer create_optimizer_and_scheduler create_scheduler "
    "get_eval_dataloader get_test_dataloader get_train_dataloader get_train_sampler prediction_step"
)


def problems_of(text: str, folder: Path) -> list[Problem]:
    (folder / "mine.py").write_text(text)
    try:
        compose(Request((), folder / "mine.py"))
    except ConfigError as error:
        return list(error.problems)
    return []


def test_methods_of_other_frameworks_name_their_replacement(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    names = [*LIGHTNING.split(), *TRANSFORMERS.split()]
    methods = "\n    ".join(f"def {name}(self): ..." for name in names)
    problems = problems_of(TASK.replace("def {name}(self): ...", methods), tmp_path)
    assert [problem.where for problem in problems] == [
        f"{tmp_path / 'mine.py'}:{line}" for line in range(LINE, LINE + len(names))
    ]
    assert {name: problem.fix for name, problem in zip(names, problems, strict=True)} == snapshot


@pytest.mark.parametrize(
    ("imported", "base"),
    [
        ("import runner", "runner.Task"),
        ("import runner as accel", "accel.Task"),
        ("from runner import Task as Base", "Base"),
        ("from runner import *", "Task"),
        ("from runner.base import task", "task.Task"),
        ("from runner.adapters.lightning import LightningTask", "LightningTask"),
        ("from runner.adapters.transformers import TransformersTask as Base", "Base"),
        ("from runner import Task\n\nclass Base(Task): ...\n\nclass Second(Base): ...\n", "Second"),
    ],
)
def test_a_task_class_is_recognized_by_its_base_class(imported: str, base: str, tmp_path: Path) -> None:
    text = TASK.replace("from runner import Task", imported).replace("Mine(Task)", f"Mine({base})")
    (problem,) = problems_of(text.format(name="validation_step"), tmp_path)
    assert "Mine.validation_step" in problem.what


@pytest.mark.parametrize("imported", ["from lightning_like import Task", "class Task: ..."])
def test_other_classes_named_task_are_not_checked(imported: str, tmp_path: Path) -> None:
    text = TASK.format(name="setup").replace("from runner import Task", imported)
    assert not problems_of(text, tmp_path)


@pytest.mark.parametrize("use", ["self.{name}()", "getattr(self, '{name}')()"])
@pytest.mark.parametrize("name", ["setup", "backward", "training_step"])
def test_methods_called_in_the_same_file_are_allowed(name: str, use: str, tmp_path: Path) -> None:
    text = TASK.replace("batch): ...", f"batch):\n        return {use}")
    assert not problems_of(text.format(name=name), tmp_path)


@pytest.mark.parametrize(("mixin", "is_known"), [("from other import Mixin", False), ("class Mixin: ...", True)])
def test_methods_of_foreign_base_classes_are_allowed(mixin: str, is_known: bool, tmp_path: Path) -> None:
    """A base class of another file may call them."""
    text = TASK.replace("from runner import Task", f"from runner import Task\n\n{mixin}")
    text = text.replace("Mine(Task)", "Mine(Mixin, Task)").format(name="setup")
    assert bool(problems_of(text, tmp_path)) == is_known


def test_methods_of_the_task_contract_are_allowed(tmp_path: Path) -> None:
    assert not problems_of(TASK.format(name="evaluate"), tmp_path)
