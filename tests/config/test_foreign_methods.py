"""Methods of other frameworks are errors, before any code runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.base.errors import ConfigError, Problem
from runner.config.configuration import compose
from runner.config.request import Request
from runner.config.task_file import FOREIGN_METHODS

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


def problems_of(text: str, folder: Path) -> list[Problem]:
    (folder / "mine.py").write_text(text)
    try:
        compose(Request((), folder / "mine.py"))
    except ConfigError as error:
        return list(error.problems)
    return []


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(FOREIGN_METHODS))
def test_a_method_of_another_framework_is_refused_with_its_line(name: str, tmp_path: Path) -> None:
    (problem,) = problems_of(TASK.format(name=name), tmp_path)
    assert problem.where == f"{tmp_path / 'mine.py'}:9"
    assert name in problem.what


def test_other_methods_and_those_that_the_task_calls_are_allowed(tmp_path: Path) -> None:
    assert not problems_of(TASK.format(name="evaluate"), tmp_path)
    used = TASK.format(name="training_step").replace("batch): ...", "batch):\n        return self.training_step()")
    assert not problems_of(used, tmp_path)
