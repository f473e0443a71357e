"""The GAN example trains the same model as a plain loop, with any settings and after restarts."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from runner.base import noise
from runner.base.batch import BatchSamples
from runner.base.order import permutation
from runner.durable.checkpoint import load, newest_valid
from runner.tensors.global_rng import seed_everything
from tests.end_to_end.examples import EXAMPLES, ON_CPU, build, train
from tests.forkserver import ForkServer
from tests.rounding import PROMISED, distance

EXAMPLE = EXAMPLES / "own_gan.py"
SEED, SIZE, UPDATES = 3, 64, 20  # an epoch has 16 updates
SETTINGS = f"seed={SEED} global_batch_size={SIZE} updates={UPDATES} max_grad_norm=1.0 log_every=1"
RATES = {"discriminator": 1e-3, "generator": 5e-4}


@cache
def train_by_hand() -> tuple[dict[str, Tensor], dict[str, list[float]]]:
    """Train with a plain PyTorch loop; return the weights and the losses by objective."""
    seed_everything(SEED)
    task = build("own_gan", SEED)
    dataset, model = task.dataset("train"), task.model
    optimizers = {name: torch.optim.Adam(getattr(model, name).parameters(), lr=lr) for name, lr in RATES.items()}
    losses: dict[str, list[float]] = {name: [] for name in optimizers}
    for update in range(UPDATES):
        epoch, number = divmod(update, len(dataset) // SIZE)
        indices = permutation(SEED, epoch, len(dataset))[number * SIZE : (number + 1) * SIZE].tolist()
        for name, optimizer in optimizers.items():
            noise.start_pass(BatchSamples(SEED, epoch, indices, range(number * SIZE, (number + 1) * SIZE)))
            total, count = task.loss(model, dataset[indices], name)
            model.zero_grad()
            (total / count).backward()
            nn.utils.clip_grad_norm_(getattr(model, name).parameters(), 1.0)
            optimizer.step()
            losses[name].append(float(total.detach()) / count)
    noise.start_pass(None)
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}, losses


def trained(server: ForkServer, folder: Path, args: str) -> Any:
    """Train the example; return the weights and the rows of metrics.jsonl."""
    weights, directory = train(server, folder, "own_gan", f"{SETTINGS} {args}")
    return weights, [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


TWO = "parallelism=ddp parallelism.world_size=2"
WAYS = {
    "micro-batches": "micro_batch_size=16",
    "unequal shares": f"{TWO} parallelism.shares=[38,26] micro_batch_size=8",
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", WAYS)
def test_training_matches_a_plain_loop(way: str, server: ForkServer, tmp_path: Path) -> None:
    plain, losses = train_by_hand()
    weights, rows = trained(server, tmp_path, f"scheduler=constant {WAYS[way]}")
    for name, tensor in plain.items():
        assert distance(tensor.tolist(), weights[name].tolist()) <= PROMISED[torch.float32] * UPDATES, name
    for name, expected in losses.items():
        result = [row[f"train/{name}/loss"] for row in rows if f"train/{name}/loss" in row]
        assert distance(expected, result) <= PROMISED[torch.float32] * UPDATES


SHARES = "parallelism.shares=[38,26]"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "cut_at"),
    [("", 8), (SHARES, 8), (f"{SHARES} objective.generator.every=2", 11)],
    ids=["equal", "unequal", "unequal, every second update"],
)
def test_a_resumed_run_is_bitwise_equal(way: str, cut_at: int, server: ForkServer, tmp_path: Path) -> None:
    """This includes the optimizer, schedule and loss scale of each objective, which all change before the interruption.

    With `every=2` the last checkpoint is between two steps of the generator.
    """
    args = (
        f"{SETTINGS} {TWO} micro_batch_size=8 averaging=ema checkpoint.every=3 evaluate.every=2"
        " precision=fp16 precision.init_scale=256 precision.growth_interval=4"
        " scheduler=plateau scheduler.metric=val/radius_error scheduler.patience=0 scheduler.threshold=0.5"
        f" scheduler.gamma=0.9 {way}"
    )
    results = []
    for name, faults in (("whole", (None,)), ("cut", ({"at": "update", "number": cut_at, "by": "raise"}, None))):
        (tmp_path / name).mkdir()
        weights, directory = train(server, tmp_path / name, "own_gan", args, faults)
        path = newest_valid(directory / "checkpoints")
        assert path is not None
        results.append((weights, load(path).state["objectives"]))
    (whole, expected), (cut, found) = results
    assert [name for name, tensor in whole.items() if not torch.equal(tensor, cut[name])] == []
    assert found == expected
    assert all(state["schedule"]["level"] < 0.9 for state in expected.values())


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize(
    ("args", "old", "new"),
    [
        ("parallelism.world_size=2 parallelism=fsdp", "", ""),
        ("", '"trains": ["generator"]', '"trains": ["generater"]'),
        ("", '"trains": ["generator"]', '"trains": ["generator", "discriminator.0"]'),
        ("", '"optimizer.lr": 5e-4', '"optimizer.rate": 5e-4'),
    ],
)
def test_invalid_objectives_are_rejected(args: str, old: str, new: str, server: ForkServer, tmp_path: Path) -> None:
    (tmp_path / "own_gan.py").write_text(EXAMPLE.read_text(encoding="utf-8").replace(old, new))
    result = server.run(f"train --task own_gan.py {ON_CPU} {args}", tmp_path)
    assert result.code == 78, result.err


def test_a_loss_that_ignores_its_parameters_is_rejected(server: ForkServer, tmp_path: Path) -> None:
    """In the step of an objective, parameters of other objectives have no gradients."""
    ignored = EXAMPLE.read_text(encoding="utf-8").replace("-model.discriminator(fake)", "-model.discriminator(real)", 1)
    (tmp_path / "own_gan.py").write_text(ignored)
    result = server.run(f"train --task own_gan.py {ON_CPU}", tmp_path)
    assert result.code == 70, result.err
    assert "own_gan.py" in result.err
    assert "objective generator" in result.err


def test_objectives_can_use_custom_optimizers(server: ForkServer, tmp_path: Path) -> None:
    own = """
def slow(parameters, *, lr: float = 0.1):
    \"\"\"SGD, a tenth as fast.

    lr  learning rate
    \"\"\"
    import torch

    return torch.optim.SGD([weight for _, weight in parameters], lr=lr / 10)


OPTIMIZERS = {"slow": slow}
"""
    text = EXAMPLE.read_text(encoding="utf-8").replace(
        '"optimizer": "adam", "optimizer.lr": 5e-4', '"optimizer": "slow"'
    )
    (tmp_path / "own_gan.py").write_text(text + own)
    result = server.run(f"train --task own_gan.py updates=2 {ON_CPU}", tmp_path)
    assert result.code == 0, result.err


@pytest.mark.parametrize(
    ("table", "class_name"),
    [("OBJECTIVES = gan_of_base.ALL", "gan_of_base.Ring"), ("OBJECTIVES = gan_of_base.ALL", "Mine"), ("", "Mine")],
    ids=["table in the task file", "table beside a subclass", "table beside the base class"],
)
def test_objectives_of_an_imported_task_class_are_found(
    table: str, class_name: str, server: ForkServer, tmp_path: Path
) -> None:
    text = EXAMPLE.read_text(encoding="utf-8")
    (tmp_path / "gan_of_base.py").write_text(text.replace("OBJECTIVES =", "ALL =") if table else text)
    task = f"import gan_of_base\n\n{table}\n\nclass Mine(gan_of_base.Ring):\n    pass\n\n"
    (tmp_path / "task_of_base.py").write_text(
        f"{task}def build(context):\n    return {class_name}(16, 8, context.seed)\n"
    )
    result = server.run(f"train --task task_of_base.py updates=2 log_every=1 {ON_CPU}", tmp_path)
    assert result.code == 0, result.err
    (metrics,) = tmp_path.rglob("metrics.jsonl")
    row = json.loads(metrics.read_text().splitlines()[0])
    assert {"train/discriminator/loss", "train/generator/loss"} <= row.keys()


def test_all_losses_are_evaluated_by_default(server: ForkServer, tmp_path: Path) -> None:
    text = EXAMPLE.read_text(encoding="utf-8")
    (tmp_path / "own_gan.py").write_text(text[: text.index("    def evaluate")])
    result = server.run(f"train --task own_gan.py updates=2 {ON_CPU}", tmp_path)
    assert result.code == 0, result.err
    metrics = json.loads((tmp_path / "outputs/mine/run.json").read_text())["metrics"]
    assert {f"val/{name}/loss" for name in RATES} <= metrics.keys()


def test_untrained_parameters_are_listed(server: ForkServer, tmp_path: Path) -> None:
    text = EXAMPLE.read_text(encoding="utf-8")
    generator = text[text.index('    "generator": {') :].partition("\n")[0]
    (tmp_path / "own_gan.py").write_text(text.replace(f"{generator}\n", ""))
    result = server.run(f"train --task own_gan.py updates=1 {ON_CPU}", tmp_path)
    assert result.code == 0, result.err
    (line,) = (line for line in result.out.splitlines() if "generator.0.weight" in line)
    count = sum(weight.numel() for name, weight in build("own_gan", 0).model.named_parameters() if "generator" in name)
    assert f"{count:,}" in line


def test_the_start_report_names_the_optimizers(server: ForkServer, tmp_path: Path) -> None:
    args = f"train --task {EXAMPLE} {ON_CPU} updates=1 global_batch_size=64"
    result = server.run(args, tmp_path)
    assert result.code == 0, result.err
    assert "adamw" not in result.out
    lines = [line for line in result.out.splitlines() if "objective" in line]
    assert [line.endswith(", optimizer adam") for line in lines] == [True, True]
    result = server.run(args.replace("run=mine", "run=other") + " objective.generator.optimizer=adamw", tmp_path)
    assert result.code == 0, result.err
    assert "optimizer adamw" in result.out
