"""Training does not read the test split, which must not influence model selection."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from runner.base.task import Task
from runner.cli import main
from tests.tasks.test_resume_of_tasks import ARGUMENTS, NEEDS

SHORT = ARGUMENTS | {"gpt": ["updates=3", "global_batch_size=4"], "dynamo": ["updates=1", "global_batch_size=4"]}


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("task", SHORT)
def test_training_does_not_read_the_test_split(task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither baselines nor hooks that evaluate the model read this split."""
    name, *options = task.split()
    if name in NEEDS:
        pytest.importorskip(NEEDS[name], reason=f"the extra {name} is not installed")
    read: set[str] = set()

    def record(dataset: Any) -> Any:
        def recorded(self: Task, split: str) -> Any:
            read.add(split)
            return dataset(self, split)

        return recorded

    module = importlib.import_module(f"runner.tasks.{name}.task")
    own = [kind for kind in vars(module).values() if isinstance(kind, type) and issubclass(kind, Task)]
    for kind in own:
        if "dataset" in vars(kind):
            monkeypatch.setattr(kind, "dataset", record(vars(kind)["dataset"]))
    monkeypatch.chdir(tmp_path)
    args = [f"task={name}", *options, *SHORT[task], "evaluate.samples=2", "evaluate.every=2", "checkpoint.every=1"]
    assert main(["train", *args, "run=mine", "device=cpu", "monitor=off"]) == 0
    assert read == {"train", "val"}
