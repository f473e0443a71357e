"""The command line can override the keys of OBJECTIVES in a task file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from runner.base.errors import ConfigError
from runner.base.task import Task
from runner.cli import main
from runner.config.configuration import Choice, compose
from runner.config.request import Request
from runner.engine.update.objectives import parse_objectives
from runner.plan.planner import plan_this_process

OBJECTIVES = {
    "actor": {"trains": ["actor"], "optimizer": "adam", "optimizer.lr": 0.5, "every": 2},
    "critic": {"trains": ["critic"], "max_grad_norm": 3.0},
}


class Pair(Task):
    objectives = OBJECTIVES

    def __init__(self) -> None:
        self.model = nn.ModuleDict({"actor": nn.Linear(1, 1), "critic": nn.Linear(1, 1)})


@pytest.fixture
def task(tmp_path: Path) -> Path:
    file = tmp_path / "mine.py"
    file.write_text(f"OBJECTIVES = {OBJECTIVES}\ndef build(): ...\n")
    return file


def make_plan(task: Path, *args: str) -> Any:
    return plan_this_process(compose(Request((*args, "device=cpu"), task)))[0]


def specs(task: Path, *args: str) -> dict[str, Any]:
    return {spec.name: spec for spec in parse_objectives(Pair(), make_plan(task, *args).phases[0])}


def test_the_command_line_overrides_objectives(task: Path) -> None:
    result = specs(
        task, "objective.actor.optimizer.lr=1e-4", "objective.actor.every=3", "objective.critic.max_grad_norm=0.5"
    )
    assert result["actor"].optimizer.options["lr"] == 1e-4
    assert (result["actor"].every, result["critic"].max_grad_norm) == (3, 0.5)
    assert result["critic"].optimizer == specs(task)["critic"].optimizer


def test_an_objective_accepts_keys_of_an_overridden_optimizer(task: Path) -> None:
    result = specs(task, "objective.actor.optimizer=sgd", "objective.actor.optimizer.momentum=0.3")["actor"].optimizer
    assert isinstance(result, Choice)
    assert (result.name, result.options["momentum"], result.options["lr"]) == ("sgd", 0.3, 0.01)


def test_the_plan_has_only_keys_that_are_set(task: Path) -> None:
    values = make_plan(task, "objective.actor.optimizer.lr=1e-4").values()
    assert {key: value for key, value in values.items() if key.startswith("objective.")} == {
        "objective.actor.optimizer.lr": 1e-4
    }
    assert not [key for key in make_plan(task).values() if key.startswith("objective.")]


@pytest.mark.parametrize(
    "word",
    [
        "objective.actor.optimizer.lrr=1",
        "objective.actr.optimizer.lr=1",
        "objective.actor.optimizer.lr=-1",
        "objective.actor.optimizer.lr=much",
        "objective.actor.every=0",
        "objective.actor.optimizer=adem",
        "objective.actor.trains=[critic]",
    ],
)
def test_an_invalid_key_or_value_is_rejected(word: str, task: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        make_plan(task, word)
    assert [problem.where for problem in caught.value.problems] == [word]


def test_run_settings_replaced_by_all_objectives_are_noted(tmp_path: Path) -> None:
    """The note reports that they have no effect."""
    file = tmp_path / "both.py"
    declared = {name: {**content, "optimizer.lr": 0.1} for name, content in OBJECTIVES.items()}
    file.write_text(f"OBJECTIVES = {declared}\ndef build(): ...\n")
    suggested = ("objective.actor.optimizer.lr=0.3", "objective.critic.optimizer.lr=0.3")
    (note,) = make_plan(file, "optimizer.lr=0.3").notes
    assert note.startswith("optimizer.lr=0.3")
    assert all(word in note for word in suggested)
    assert make_plan(file, *suggested).notes == ()
    assert make_plan(file, "max_grad_norm=0.3").notes == (), "only the actor declares max_grad_norm"


def test_explain_shows_the_keys_of_objectives(task: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key = "objective.actor.optimizer.lr"
    assert main(["explain", key, "--task", str(task)]) == 0
    assert f"{key} = 0.5" in capsys.readouterr().out


@pytest.mark.parametrize("value", ["['actor', 'critic']", "('actor',)", "'actor'"])
def test_objectives_that_are_not_a_mapping_are_reported(value: str, tmp_path: Path) -> None:
    """The error names the line."""
    file = tmp_path / "listed.py"
    file.write_text(f"def build(): ...\n\nOBJECTIVES = {value}\n")
    with pytest.raises(ConfigError) as caught:
        compose(Request((), file))
    assert [problem.where for problem in caught.value.problems] == [f"{file}:3"]
