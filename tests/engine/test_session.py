"""How a run gets its name, and which names are refused."""

from __future__ import annotations

import pytest

from runner.base.errors import ConfigError
from runner.config.configuration import compose
from runner.config.request import Request
from runner.engine.job import choose_run_name


@pytest.mark.parametrize("name", ["last", "../x", "a/b", ".", "..", "-x", "two words"])
def test_a_name_outside_of_the_output_folder_is_refused(name: str) -> None:
    with pytest.raises(ConfigError):
        choose_run_name(compose(Request((f"run={name}",))))


def test_a_run_without_a_name_is_named_after_its_task() -> None:
    assert choose_run_name(compose(Request(("run=mine",)))) == "mine"
    assert "gpt" in choose_run_name(compose(Request(("task=gpt",))))
