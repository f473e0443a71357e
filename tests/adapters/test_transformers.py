"""Trainer arguments that the adapter does not support raise an error with the replacement."""

from __future__ import annotations

import csv
import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from runner.adapters.transformers import UNSUPPORTED, TransformersTask
from runner.base.errors import TaskFault
from runner.durable.checkpoint import load, newest_valid
from tests.forkserver import ForkServer
from tests.rounding import allowed, distance


@pytest.mark.parametrize("name", [*UNSUPPORTED, "unknown"])
def test_an_unsupported_trainer_argument_is_named(name: str) -> None:
    with pytest.raises(TaskFault, match=name) as caught:
        TransformersTask(nn.Linear(1, 1), {}, **{name: None})
    (problem,) = caught.value.problems
    assert problem.fix == UNSUPPORTED.get(name, "remove it")


class Classifier(nn.Module):
    """Substitute for AutoModelForSequenceClassification with three labels."""

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
def test_float_labels_are_independent_classes(problem_type: str | None) -> None:
    """As in transformers, the dtype of the labels selects the loss if the configuration does not."""
    torch.manual_seed(0)
    task = TransformersTask(Classifier(problem_type), {"train": []}, collator=stack)
    batch = {"features": torch.rand(4, 2), "labels": torch.eye(4, 3)}
    total, count = task.loss(task.model, batch)
    logits = task.model(batch["features"]).logits
    expected = nn.functional.binary_cross_entropy_with_logits(logits, batch["labels"])
    torch.testing.assert_close(total / count, expected)


def test_integer_labels_are_mutually_exclusive_classes() -> None:
    torch.manual_seed(0)
    task = TransformersTask(Classifier(), {"train": []}, collator=stack)
    batch = {"features": torch.rand(4, 2), "labels": torch.tensor([0, 2, 1, 2])}
    total, count = task.loss(task.model, batch)
    logits = task.model(batch["features"]).logits
    torch.testing.assert_close(total / count, nn.functional.cross_entropy(logits, batch["labels"]))


@pytest.mark.parametrize(("kind", "kept"), [(None, ["features", "labels"]), ("custom", ["features", "labels", "name"])])
def test_columns_for_a_custom_transform_are_kept(kind: str | None, kept: list[str]) -> None:
    """The model does not accept these columns."""

    class Columns(list[Any]):
        """Substitute for a dataset of the library `datasets`."""

        column_names: Sequence[str] = ("features", "labels", "name")
        format: Mapping[str, Any] = {"type": kind}

        def remove_columns(self, names: Sequence[str]) -> Columns:
            result = Columns(self)
            result.column_names = [name for name in self.column_names if name not in names]
            return result

    task = TransformersTask(Classifier(), {"train": Columns()}, collator=stack)
    assert list(task.dataset("train").column_names) == kept  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("problem_type", "labels"),
    [(None, torch.tensor([0, 2])), (None, torch.eye(2, 3)), ("single_label_classification", None),
     ("multi_label_classification", None), ("regression", None)],
)  # fmt: skip
def test_predictions_contain_logits_and_classes(problem_type: str | None, labels: Tensor | None) -> None:
    torch.manual_seed(0)
    task = TransformersTask(Classifier(problem_type), {"train": []}, collator=stack)
    assert task.predicts == "predict_batch"
    batch = {"features": torch.randn(2, 2)} | ({} if labels is None else {"labels": labels})
    logits = task.model(batch["features"]).logits
    columns = task.predict_batch(task.model, batch)
    if problem_type == "regression":
        assert columns.keys() == {"prediction"}
        assert torch.equal(columns["prediction"], logits)
        return
    has_many = problem_type == "multi_label_classification" or (labels is not None and labels.is_floating_point())
    assert columns.keys() == {"label", "logits"}
    assert torch.equal(columns["logits"], logits)
    assert columns["label"].tolist() == ((logits > 0).long() if has_many else logits.argmax(-1)).tolist()


def test_a_regression_with_one_output_predicts_a_vector() -> None:
    model = Classifier("regression")
    model.linear = nn.Linear(2, 1)
    task = TransformersTask(model, {"train": []}, collator=stack)
    batch = {"features": torch.randn(4, 2)}
    assert torch.equal(task.predict_batch(model, batch)["prediction"], model(batch["features"]).logits[:, 0])


def test_models_with_other_heads_need_predict_batch() -> None:
    """The task must define it."""

    class Translator(Classifier):
        loss_type = "ForConditionalGeneration"

    class Own(TransformersTask):
        def predict_batch(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
            return {}

    assert TransformersTask(Translator(), {"train": []}, collator=stack).predicts == ""
    assert Own(Translator(), {"train": []}, collator=stack).predicts == "predict_batch"


TEXTS = """
import torch
from transformers import BertConfig, BertForSequenceClassification

from runner.adapters.transformers import TransformersTask

SETTINGS = {"updates": 2, "global_batch_size": 4}


def texts(number):
    generator = torch.Generator().manual_seed(number)
    tokens = [torch.randint(1, 32, (4 + row % 5,), generator=generator) for row in range(number)]
    return [{"input_ids": row.tolist(), "labels": int(row.sum()) % 3} for row in tokens]


def padded(samples):
    longest = max(len(sample["input_ids"]) for sample in samples)
    tokens = torch.tensor([sample["input_ids"] + [0] * (longest - len(sample["input_ids"])) for sample in samples])
    labels = torch.tensor([sample["labels"] for sample in samples])
    return {"input_ids": tokens, "attention_mask": (tokens != 0).long(), "labels": labels}


def build():
    size = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = BertForSequenceClassification(BertConfig(**size, intermediate_size=32, num_labels=3))
    return TransformersTask(model, {"train": texts(8), "test": texts(10)}, collator=padded)
"""


def test_inference_writes_the_predictions_of_the_model(server: ForkServer, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the package transformers is not installed")
    (tmp_path / "texts_task.py").write_text(TEXTS, encoding="utf-8")
    result = server.run("train --task texts_task.py run=one", tmp_path)
    assert result.code == 0, result.err
    result = server.run("inference one inference.split=test", tmp_path)
    assert result.code == 0, result.err

    namespace: dict[str, Any] = {}
    exec(TEXTS, namespace)  # noqa: S102 - the task above
    model = namespace["build"]().model.eval()
    newest = newest_valid(tmp_path / "outputs" / "one" / "checkpoints")
    assert newest is not None
    model.load_state_dict(load(newest).tensors("model"))
    batch = namespace["padded"](namespace["texts"](10))
    with torch.no_grad():
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    with (tmp_path / "outputs" / "one" / "predictions" / "test.csv").open(encoding="utf-8", newline="") as lines:
        rows = [*csv.DictReader(lines)]
    assert [int(row["label"]) for row in rows] == logits.argmax(-1).tolist()
    written = torch.tensor([[float(row[f"logits.{column}"]) for column in range(3)] for row in rows])
    assert distance(logits.numpy(), written.numpy()) <= allowed(torch.float32, terms=64)


def test_all_trainer_arguments_are_supported_or_rejected() -> None:
    transformers = pytest.importorskip("transformers", reason="the package transformers is not installed")
    arguments = set(inspect.signature(transformers.Trainer).parameters)
    assert arguments - set(inspect.signature(TransformersTask).parameters) <= set(UNSUPPORTED)
