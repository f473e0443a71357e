"""Arguments of Trainer that the adapter does not have are refused with what to use instead."""

from __future__ import annotations

import inspect

import pytest
from torch import nn

from runner.adapters.transformers import UNSUPPORTED, TransformersTask
from runner.base.errors import TaskFault


@pytest.mark.parametrize("name", [*UNSUPPORTED, "unknown"])
def test_an_argument_of_the_trainer_is_refused_by_name(name: str) -> None:
    with pytest.raises(TaskFault, match=name) as caught:
        TransformersTask(nn.Linear(1, 1), {}, **{name: None})
    (problem,) = caught.value.problems
    assert problem.fix == UNSUPPORTED.get(name, "remove it")


def test_every_argument_of_the_trainer_is_supported_or_refused() -> None:
    transformers = pytest.importorskip("transformers", reason="the package transformers is not installed")
    arguments = set(inspect.signature(transformers.Trainer).parameters)
    assert arguments - set(inspect.signature(TransformersTask).parameters) <= set(UNSUPPORTED)
