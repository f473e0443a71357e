"""The contrastive example trains the same model as a plain loop, with any settings and after restarts."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from runner.base.order import permutation
from runner.tensors.global_rng import seed_everything
from tests.end_to_end.examples import EXAMPLES, ON_CPU, build, train
from tests.forkserver import ForkServer
from tests.rounding import PROMISED, distance

EXAMPLE = EXAMPLES / "own_clip.py"
SEED, SIZE, UPDATES = 3, 64, 20  # an epoch has 16 updates
SETTINGS = f"seed={SEED} global_batch_size={SIZE} updates={UPDATES} scheduler=constant max_grad_norm=1.0 precision=fp32"


@cache
def train_by_hand() -> dict[str, Tensor]:
    """Train with a plain PyTorch loop; return the weights."""
    seed_everything(SEED)
    task = build("own_clip", SEED)
    dataset, model = task.dataset("train"), task.model
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for update in range(UPDATES):
        epoch, number = divmod(update, len(dataset) // SIZE)
        indices = permutation(SEED, epoch, len(dataset))[number * SIZE : (number + 1) * SIZE]
        images, texts = model(*dataset[indices.tolist()])
        logits, labels = model.scale.exp() * images @ texts.T, torch.arange(SIZE)
        loss = nn.functional.cross_entropy(logits, labels) + nn.functional.cross_entropy(logits.T, labels)
        optimizer.zero_grad()
        (loss / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


def trained(server: ForkServer, folder: Path, args: str, *faults: dict[str, Any] | None) -> Any:
    """Train the example; return its weights and metrics."""
    weights, directory = train(server, folder, "own_clip", f"{SETTINGS} {args}", faults or (None,))
    return weights, json.loads((directory / "run.json").read_text())["metrics"]


TWO = "parallelism=ddp parallelism.world_size=2"
WAYS = {
    "micro-batches": "micro_batch_size=16",
    "unequal shares": f"{TWO} parallelism.shares=[38,26] micro_batch_size=8",
    "recomputed": "memory=checkpoint micro_batch_size=16",
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", WAYS)
def test_training_matches_a_plain_loop(way: str, server: ForkServer, tmp_path: Path) -> None:
    plain = train_by_hand()
    weights, metrics = trained(server, tmp_path, WAYS[way])
    for name, tensor in plain.items():
        assert distance(tensor.tolist(), weights[name].tolist()) <= PROMISED[torch.float32] * UPDATES, name
    assert 0 < metrics["val/loss"] < 4.158  # ln 64, the loss of an untrained model


def test_the_evaluate_command_equals_evaluation_in_training(server: ForkServer, tmp_path: Path) -> None:
    """The loss is computed over global batches, whose size does not divide the number of samples."""
    settings = f"{SETTINGS} updates=4 evaluate.every=4 evaluate.samples=200 micro_batch_size=16"
    _, directory = train(server, tmp_path, "own_clip", settings, (None,))
    inside = json.loads((directory / "run.json").read_text())["metrics"]["val/loss"]
    result = server.run(["evaluate", "mine", "checkpoint=last", "--json"], tmp_path)
    assert result.code == 0, result.err
    assert json.loads(result.out)["metrics"]["val/loss"] == inside


@pytest.mark.slow
def test_a_resumed_run_is_bitwise_equal(server: ForkServer, tmp_path: Path) -> None:
    results, args = [], f"{TWO} micro_batch_size=8 averaging=ema"
    for name, faults in (("whole", (None,)), ("cut", ({"at": "update", "number": 8, "by": "raise"}, None))):
        (tmp_path / name).mkdir()
        weights, _ = trained(server, tmp_path / name, f"{args} checkpoint.every=3", *faults)
        results.append(weights)
    whole, cut = results
    assert [name for name, tensor in whole.items() if not torch.equal(tensor, cut[name])] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "args", [f"{TWO} parallelism.batch_norm=sync", "parallelism.world_size=2 parallelism=pipeline"]
)
def test_unsupported_strategies_are_rejected(args: str, server: ForkServer, tmp_path: Path) -> None:
    (tmp_path / "own_clip.py").write_text(EXAMPLE.read_text(encoding="utf-8"))
    result = server.run(f"train --task own_clip.py {ON_CPU} {args}", tmp_path)
    assert result.code == 78, result.err
    assert args.rsplit(maxsplit=1)[-1] in result.err
