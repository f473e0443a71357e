"""The record of a plan agrees with plan.json. Reading it never raises an error, whatever the file contains."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runner.config.configuration import compose
from runner.config.request import Request
from runner.durable.record_files import read_plan
from runner.plan.inventory import Cpu, Inventory
from runner.plan.planner import make_plan
from runner.plan.run_plan import Plan
from runner.records.plan_record import PlanRecord

OLD = Path(__file__).parent / "run_of_version_1"


def test_a_plan_record_has_the_values_of_the_plan(tmp_path: Path) -> None:
    plan = make_plan(
        compose(Request(("device=cpu", "global_batch_size=8"))), Inventory((), Cpu("a processor", 4, 8, 0))
    )
    (tmp_path / "plan.json").write_text(plan.to_json())
    result = read_plan(tmp_path)
    assert result.wrong == ()
    assert (result.device, result.device_name, result.updates) == (plan.device, plan.device_name, plan.settings.updates)
    assert (result.batch.shares, result.reasons) == (plan.batch.shares, plan.reasons)
    assert {group: choice.name for group, choice in result.choices.items()} == {
        group: choice.name for group, choice in plan.choices.items()
    }
    assert [(phase.name, phase.updates) for phase in result.phases] == [
        (each.name, each.updates) for each in plan.phases
    ]


def test_a_plan_of_version_1_is_read_completely() -> None:
    result, plan = read_plan(OLD), Plan.from_json((OLD / "plan.json").read_text())
    assert (result.wrong, result.is_known) == ((), True)
    assert (result.device, result.updates, result.batch.micro_batch_size) == (plan.device, 6, 4)


@pytest.mark.parametrize("content", ["", "{", "[1]", "null", "{}", '{"choices": 3, "ranks": [4], "batch": []}'])
def test_unreadable_values_are_unknown(tmp_path: Path, content: str) -> None:
    assert read_plan(tmp_path) == PlanRecord()
    (tmp_path / "plan.json").write_text(content)
    assert not read_plan(tmp_path).is_known


def test_an_invalid_value_does_not_affect_other_values(tmp_path: Path) -> None:
    content = json.loads((OLD / "plan.json").read_text())
    (tmp_path / "plan.json").write_text(json.dumps({**content, "reasons": 3}))
    result = read_plan(tmp_path)
    assert result.wrong == ("reasons",)
    assert result.choices == read_plan(OLD).choices
