"""Training, evaluation, checkpoints and inference with schedule-free AdamW match a plain loop with its package."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from torch import Tensor

from runner.base.errors import ConfigError
from runner.base.order import permutation
from runner.config.request import Request
from runner.distributed.world import World
from runner.durable import checkpoint
from runner.engine.hooks.checkpointing import Checkpointing
from runner.engine.hooks.rank_sync import RankSync
from runner.engine.opening import open_phase
from runner.records.events import Console
from runner.trained.trained_run import open_trained
from tests.distributed.ranks import run_ranks
from tests.forkserver import ForkServer
from tests.rounding import PROMISED

schedulefree = pytest.importorskip("schedulefree", reason="the package schedulefree is not installed")

TASK = Path(__file__).parents[1] / "task_of_averages.py"
UPDATES, SIZE, WARMUP = 6, 8, 3
TOLERANCE = PROMISED[torch.float64]


def request_of(folder: Path, *args: str) -> Request:
    settings = (
        f"updates={UPDATES}", "device=cpu", "run=mine", "monitor=off", "backend.threads=1", "checkpoint=off",
        "optimizer=schedulefree", "optimizer.lr=0.05", "optimizer.weight_decay=0.02", "optimizer.decay_1d=true",
        f"scheduler.warmup={WARMUP}", "max_grad_norm=null", "evaluate.every=2", f"output_root={folder}",
    )  # fmt: skip
    return Request((*settings, *args), TASK)


def load_saved(folder: Path, stem: str = "optimizer_average", update: int = UPDATES) -> dict[str, Tensor]:
    return dict(checkpoint.load(checkpoint.checkpoint_path(folder / "mine" / "checkpoints", update)).tensors(stem))


def run_training(folder: Path, *args: str, world: World | None = None) -> None:
    with open_phase(request_of(folder, *args), world) as phase:
        assert phase.run_updates() is None


def validation_losses(folder: Path) -> list[float]:
    rows = [json.loads(line) for line in (folder / "mine" / "metrics.jsonl").read_text().splitlines()]
    return [row["val/loss"] for row in rows if "val/loss" in row]


def train_plain_loop(folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor], list[float]]:
    """Return the training weights, evaluation weights and evaluation losses of a plain loop."""
    with open_phase(request_of(folder)) as phase:
        task, model = phase.run.parts.task, phase.run.parts.bare
        x, y = task.dataset("train").tensors
        optimizer = schedulefree.AdamWScheduleFree(
            model.parameters(), lr=0.05, betas=(0.9, 0.999), weight_decay=0.02, warmup_steps=WARMUP
        )
        result = []
        optimizer.train()
        for update in range(UPDATES):
            epoch, number = divmod(update, len(x) // SIZE)
            rows = permutation(0, epoch, len(x))[number * SIZE : (number + 1) * SIZE].tolist()
            loss, items = task.loss(model, (x[rows], y[rows]))
            optimizer.zero_grad()
            (loss / items).backward()
            optimizer.step()
            if update % 2:
                kept = {name: weight.detach().clone() for name, weight in model.named_parameters()}
                optimizer.eval()
                total, items = task.loss(model, task.dataset("val").tensors)
                result.append(float(total.detach()) / items)
                averaged = {name: weight.detach().clone() for name, weight in model.named_parameters()}
                optimizer.train()
                model.load_state_dict(kept)
        return kept, averaged, result


def assert_close(one: dict[str, Tensor], other: dict[str, Tensor], tolerance: float) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], rtol=0, atol=tolerance)


def test_training_and_evaluation_match_a_plain_loop(tmp_path: Path) -> None:
    weights, averaged, measured = train_plain_loop(tmp_path / "hand")
    run_training(tmp_path)
    assert_close(load_saved(tmp_path, "model"), weights, TOLERANCE)
    assert_close(load_saved(tmp_path), averaged, TOLERANCE)
    assert validation_losses(tmp_path) == pytest.approx(measured, rel=TOLERANCE)


def test_an_evaluation_does_not_change_training(tmp_path: Path) -> None:
    run_training(tmp_path / "often", "evaluate.every=1")
    run_training(tmp_path / "never", "evaluate.every=0")
    for stem in ("model", "optimizer", "optimizer_average"):
        assert_close(load_saved(tmp_path / "often", stem), load_saved(tmp_path / "never", stem), 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
def test_a_resumed_run_is_bitwise_equal(strategy: str, tmp_path: Path) -> None:
    args = (f"parallelism={strategy}", *([] if strategy == "single" else ["parallelism.world_size=2"]))

    def stop_after_three(world: World | None) -> None:
        with open_phase(request_of(tmp_path / "stopped", *args), world) as phase:
            for update in phase.updates():
                if update == 3:
                    break
            phase.hook(RankSync).exchange.close()
            phase.hook(Checkpointing).save()

    for act in (
        lambda world: run_training(tmp_path / "straight", *args, world=world),
        stop_after_three,
        lambda world: run_training(tmp_path / "stopped", *args, world=world),
    ):
        act(None) if strategy == "single" else run_ranks(act, 2)
    for stem in ("optimizer_average", "model", "optimizer"):
        assert_close(load_saved(tmp_path / "stopped", stem), load_saved(tmp_path / "straight", stem), 0.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "world_size"), [("micro_batch_size=2", 1), ("parallelism=ddp", 2), ("parallelism=fsdp", 2)]
)
def test_neither_accumulation_nor_ranks_change_the_weights(setting: str, world_size: int, tmp_path: Path) -> None:
    run_training(tmp_path / "one", "micro_batch_size=8")
    if world_size == 1:
        run_training(tmp_path / "other", setting)
    else:
        ranks = (setting, f"parallelism.world_size={world_size}")
        run_ranks(lambda world: run_training(tmp_path / "other", *ranks, world=world), world_size)
    for stem in ("model", "optimizer_average"):
        assert_close(load_saved(tmp_path / "other", stem), load_saved(tmp_path / "one", stem), TOLERANCE)


def test_inference_and_initialization_from_a_run_use_the_evaluation_weights(server: ForkServer, tmp_path: Path) -> None:
    args = [word for word in request_of(tmp_path).overrides if not word.startswith("output_root")]
    assert server.run(["train", "--task", str(TASK), *args], tmp_path).code == 0
    folder = tmp_path / "outputs"
    with ExitStack() as stack:
        parts = open_trained(Request(("run=mine", f"output_root={folder}"), TASK), Console(), stack).parts
        assert_close(dict(parts.bare.state_dict()), load_saved(folder), 0.0)
    with open_phase(request_of(tmp_path / "next")) as phase:
        from runner.durable.weight_source import find_weights
        from runner.engine.parts.weights import read_tensors

        assert phase.run.parts is not None
        weights, averages = read_tensors(find_weights("mine", folder), "weights")
        assert weights.keys() == averages.keys()
        assert_close({name: tensor.read() for name, tensor in averages.items()}, load_saved(folder), 0.0)


def test_schedule_free_cannot_be_combined_with_averaging(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        run_training(tmp_path, "averaging=ema")
    assert [problem.where for problem in caught.value.problems] == ["averaging=ema"]
