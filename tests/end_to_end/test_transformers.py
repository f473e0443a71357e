"""Training a transformers model on a folder saved by `datasets` matches a plain loop that uses the model's own loss."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from runner.adapters.transformers import TransformersTask, select_loss
from runner.axes.memory import checkpoint
from runner.base.errors import InputMissing, TaskFault
from runner.base.order import permutation
from runner.tensors.global_rng import seed_everything
from tests.forkserver import ForkServer
from tests.rounding import PROMISED, distance

transformers = pytest.importorskip("transformers", reason="the package transformers is not installed")
datasets = pytest.importorskip("datasets", reason="the package datasets is not installed")

SEED, SIZE, UPDATES = 3, 32, 10
TASK = Path(__file__).parent / "task_of_transformers.py"


@cache
def samples(kind: str) -> dict[str, list[dict[str, Any]]]:
    """Return padded token IDs of different lengths. For gpt2, labels at padding are -100, which the loss ignores."""
    generator = torch.Generator().manual_seed(0)
    result: dict[str, list[dict[str, Any]]] = {}
    for split, number in (("train", 96), ("validation", 40)):
        rows = []
        for _ in range(number):
            tokens = torch.randint(1, 32, (12,), generator=generator)
            length = int(torch.randint(3, 13, (), generator=generator))
            tokens[length:] = 0
            mask = (torch.arange(12) < length).long()
            label: Any = int(tokens.sum()) % 3
            if kind == "gpt2":
                label = torch.where(mask.bool(), tokens, -100).tolist()
            row = {"input_ids": tokens.tolist(), "attention_mask": mask.tolist(), "text": "unused"}
            rows.append({**row, "labels" if kind == "gpt2" else "label": label})
        result[split] = rows
    return result


def write(folder: Path, kind: str) -> None:
    splits = {name: datasets.Dataset.from_list(rows) for name, rows in samples(kind).items()}
    datasets.DatasetDict(splits).save_to_disk(str(folder / "data"))


def model_of(kind: str) -> Any:
    from tests.end_to_end import task_of_transformers

    seed_everything(SEED)
    return task_of_transformers.build(SimpleNamespace(data_path={"train": []}), kind=kind).model


def batch_of(kind: str, rows: list[int], split: str = "train") -> dict[str, Tensor]:
    result = [samples(kind)[split][row] for row in rows]
    label = "labels" if kind == "gpt2" else "label"
    columns = {"input_ids": "input_ids", "attention_mask": "attention_mask", "labels": label}
    return {name: torch.tensor([row[column] for row in result]) for name, column in columns.items()}


@cache
def train_by_hand(kind: str) -> tuple[dict[str, Tensor], float]:
    """Train with the model's own loss; return its weights and the mean validation loss."""
    model = model_of(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for update in range(UPDATES):
        epoch, number = divmod(update, len(samples(kind)["train"]) // SIZE)
        rows = permutation(SEED, epoch, len(samples(kind)["train"]))[number * SIZE : (number + 1) * SIZE].tolist()
        optimizer.zero_grad()
        model(**batch_of(kind, rows)).loss.backward()
        optimizer.step()
    with torch.no_grad():
        loss = float(model.eval()(**batch_of(kind, list(range(40)), "validation")).loss)
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}, loss


def trained(server: ForkServer, folder: Path, kind: str, args: str = "") -> tuple[dict[str, Tensor], dict[str, float]]:
    from runner.durable.checkpoint import load, newest_valid

    write(folder, kind)
    common = f"run=mine device=cpu monitor=off seed={SEED} max_grad_norm=null dataloader.num_workers=0"
    result = server.run(f"train --task {TASK} data.path=data task.kind={kind} {common} {args}", folder)
    assert result.code == 0, result.err
    path = newest_valid(folder / "outputs" / "mine" / "checkpoints")
    assert path is not None
    return load(path).tensors("model"), json.loads((folder / "outputs" / "mine" / "run.json").read_text())["metrics"]


TWO = "parallelism=ddp parallelism.world_size=2"


@pytest.mark.parametrize(
    ("kind", "args"),
    [("gpt2", ""), ("gpt2", "micro_batch_size=8"), ("gpt2", f"{TWO} parallelism.shares=[19,13]"), ("bert", TWO)],
)
def test_training_matches_a_plain_loop(kind: str, args: str, server: ForkServer, tmp_path: Path) -> None:
    expected, loss = train_by_hand(kind)
    weights, metrics = trained(server, tmp_path, kind, args)
    result, wanted = ({name: each.tolist() for name, each in one.items()} for one in (weights, expected))
    assert distance(wanted, result) <= PROMISED[torch.float32] * UPDATES
    assert metrics["val/loss"] == pytest.approx(loss, rel=PROMISED[torch.float32] * UPDATES)
    assert ("val/metrics.accuracy" in metrics) == (kind == "bert")


def test_a_resumed_run_is_bitwise_equal(server: ForkServer, tmp_path: Path) -> None:
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    whole, _ = trained(server, tmp_path / "whole", "gpt2")
    trained(server, tmp_path / "parts", "gpt2", "updates=4")
    (tmp_path / "parts" / "data").rename(tmp_path / "parts" / "old")
    parts, _ = trained(server, tmp_path / "parts", "gpt2", "resume_allow=[updates]")
    assert [name for name, tensor in whole.items() if not torch.equal(tensor, parts[name])] == []


SMALL = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
T5 = {
    "vocab_size": 32,
    "d_model": 16,
    "d_kv": 8,
    "num_layers": 1,
    "num_heads": 2,
    "d_ff": 32,
    "decoder_start_token_id": 0,
}


@pytest.mark.parametrize(
    ("head", "kind", "options", "labels"),
    [
        ("AutoModelForCausalLM", "gpt2", {}, {"labels": (2, 7)}),
        ("AutoModelForCausalLM", "llama", {}, {"labels": (2, 7)}),
        ("AutoModelForMaskedLM", "bert", {}, {"labels": (2, 7)}),
        ("AutoModelForTokenClassification", "bert", {"num_labels": 4}, {"labels": (2, 7)}),
        ("AutoModelForSequenceClassification", "bert", {"num_labels": 4}, {"labels": (2,)}),
        ("AutoModelForSequenceClassification", "bert", {"num_labels": 1}, {"labels": (2, 1)}),
        (
            "AutoModelForSequenceClassification",
            "bert",
            {"num_labels": 4, "problem_type": "multi_label_classification"},
            {"labels": (2, 4)},
        ),
        ("AutoModelForQuestionAnswering", "bert", {}, {"start_positions": (2,), "end_positions": (2,)}),
        ("AutoModelForSeq2SeqLM", "t5", {}, {"labels": (2, 7)}),
    ],
)
def test_the_loss_matches_that_of_the_model(
    head: str, kind: str, options: dict[str, Any], labels: dict[str, tuple[int, ...]]
) -> None:
    torch.manual_seed(0)
    size = T5 if kind == "t5" else SMALL
    config = transformers.AutoConfig.for_model(kind, **size, bos_token_id=None, eos_token_id=None, **options)
    model = getattr(transformers, head).from_config(config).eval()
    is_real = config.problem_type == "multi_label_classification" or options.get("num_labels") == 1
    given = {name: torch.randint(0, 2 if is_real else 4, shape) for name, shape in labels.items()}
    given = {name: value.float() if is_real else value for name, value in given.items()}
    if labels.get("labels") == (2, 7):
        given["labels"][0, 3:] = -100
    batch = {"input_ids": torch.randint(1, 32, (2, 7)), **given}
    total, count = TransformersTask(model, {"train": []}).loss(model, batch)
    assert float(total.detach() / count) == pytest.approx(
        float(model(**batch).loss.detach()), rel=PROMISED[torch.float32]
    )


@pytest.mark.parametrize("kind", ["gpt2", "bert", "llama", "t5"])
def test_activation_checkpointing_does_not_change_gradients(kind: str) -> None:
    """By default, decoders use a cache, to which a recomputed block would append its keys a second time."""
    gradients = []
    for is_checkpointed in (False, True):
        torch.manual_seed(0)
        size = {**(T5 if kind == "t5" else SMALL), "num_layers" if kind == "t5" else "num_hidden_layers": 2}
        config = transformers.AutoConfig.for_model(kind, **size, bos_token_id=None, eos_token_id=None)
        head = {"t5": "AutoModelForSeq2SeqLM", "bert": "AutoModelForMaskedLM"}.get(kind, "AutoModelForCausalLM")
        model = getattr(transformers, head).from_config(config)
        task = TransformersTask(model, {"train": []})
        if is_checkpointed:
            assert len(task.blocks()) == (4 if kind == "t5" else 2)
            checkpoint(model, task.blocks(), torch.device("cpu"))
        torch.manual_seed(1)
        tokens = torch.randint(1, 32, (2, 7))
        total, _ = task.loss(model, {"input_ids": tokens, "labels": tokens})
        total.backward()
        gradients.append({name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None})
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=0)


def test_missing_losses_and_datasets_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(TaskFault):
        select_loss(torch.nn.Linear(1, 1))
    with pytest.raises(InputMissing):
        TransformersTask(model_of("gpt2"), tmp_path / "missing")
