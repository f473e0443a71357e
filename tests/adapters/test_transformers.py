"""Arguments of Trainer that the adapter does not have are refused with what to use instead."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from runner.adapters.transformers import UNSUPPORTED, TransformersTask
from runner.base.errors import TaskFault


@pytest.mark.parametrize("name", [*UNSUPPORTED, "unknown"])
def test_an_argument_of_the_trainer_is_refused_by_name(name: str) -> None:
    with pytest.raises(TaskFault, match=name) as caught:
        TransformersTask(nn.Linear(1, 1), {}, **{name: None})
    (problem,) = caught.value.problems
    assert problem.fix == UNSUPPORTED.get(name, "remove it")


class Classifier(nn.Module):
    """Stands for AutoModelForSequenceClassification with three labels."""

    loss_type = "ForSequenceClassification"

    def __init__(self, problem_type: str | None = None) -> None:
        super().__init__()
        self.config = SimpleNamespace(problem_type=problem_type, num_labels=3)
        self.linear = nn.Linear(2, 3)

    def forward(self, features: Tensor) -> Any:
        return SimpleNamespace(logits=self.linear(features))


def stack(samples: Sequence[Any]) -> dict[str, Tensor]:
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


@pytest.mark.parametrize("problem_type", [None, "multi_label_classification"])
def test_labels_of_floats_are_independent_classes(problem_type: str | None) -> None:
    """As in transformers, whose models choose the loss by the labels if the configuration names none."""
    torch.manual_seed(0)
    task = TransformersTask(Classifier(problem_type), {"train": []}, collator=stack)
    batch = {"features": torch.rand(4, 2), "labels": torch.eye(4, 3)}
    total, count = task.loss(task.model, batch)
    logits = task.model(batch["features"]).logits
    expected = nn.functional.binary_cross_entropy_with_logits(logits, batch["labels"])
    torch.testing.assert_close(total / count, expected)


def test_labels_of_integers_are_one_class() -> None:
    torch.manual_seed(0)
    task = TransformersTask(Classifier(), {"train": []}, collator=stack)
    batch = {"features": torch.rand(4, 2), "labels": torch.tensor([0, 2, 1, 2])}
    total, count = task.loss(task.model, batch)
    logits = task.model(batch["features"]).logits
    torch.testing.assert_close(total / count, nn.functional.cross_entropy(logits, batch["labels"]))


@pytest.mark.parametrize(("kind", "kept"), [(None, ["features", "labels"]), ("custom", ["features", "labels", "name"])])
def test_columns_that_the_model_does_not_accept_are_kept_for_a_transform(kind: str | None, kept: list[str]) -> None:
    class Columns(list[Any]):
        """Stands for a dataset of the library `datasets`."""

        column_names: Sequence[str] = ("features", "labels", "name")
        format: Mapping[str, Any] = {"type": kind}

        def remove_columns(self, names: Sequence[str]) -> Columns:
            result = Columns(self)
            result.column_names = [name for name in self.column_names if name not in names]
            return result

    task = TransformersTask(Classifier(), {"train": Columns()}, collator=stack)
    assert list(task.dataset("train").column_names) == kept  # type: ignore[attr-defined]


def test_every_argument_of_the_trainer_is_supported_or_refused() -> None:
    transformers = pytest.importorskip("transformers", reason="the package transformers is not installed")
    arguments = set(inspect.signature(transformers.Trainer).parameters)
    assert arguments - set(inspect.signature(TransformersTask).parameters) <= set(UNSUPPORTED)
