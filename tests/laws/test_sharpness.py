"""Sharpness-aware minimization matches a plain loop, with any micro-batches, ranks, retries and resumes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from runner.base.errors import ConfigError
from runner.base.order import permutation
from runner.config.configuration import compose
from runner.config.request import Request
from runner.distributed.world import World
from runner.durable import checkpoint
from runner.engine.hooks.checkpointing import Checkpointing
from runner.engine.hooks.rank_sync import RankSync
from runner.engine.opening import open_phase
from runner.plan.planner import plan_this_process
from tests.distributed.ranks import run_ranks
from tests.end_to_end.examples import train
from tests.forkserver import ForkServer
from tests.rounding import PROMISED, distance

TASK = Path(__file__).parents[1] / "engine" / "task_of_averages.py"
DRAWING = Path(__file__).parent / "task_of_sharpness.py"
FLOAT32 = Path(__file__).parents[1] / "engine" / "task_that_is_saved.py"
UPDATES, SIZE, RHO = 6, 8, 0.1
TOLERANCE = PROMISED[torch.float64]


def request_of(folder: Path, *args: str, task: Path = TASK) -> Request:
    settings = (
        f"updates={UPDATES}", "device=cpu", "run=mine", "monitor=off", "backend.threads=1", "checkpoint=off",
        "log_every=1", "sharpness=sam", f"sharpness.rho={RHO}", "optimizer=sgd", "optimizer.kernel=foreach",
        f"output_root={folder}",
    )  # fmt: skip
    return Request((*settings, *args), task)


def saved(folder: Path, stem: str = "model") -> dict[str, Tensor]:
    return dict(checkpoint.load(checkpoint.checkpoint_path(folder / "mine" / "checkpoints", UPDATES)).tensors(stem))


def trained(folder: Path, *args: str, world: World | None = None, task: Path = TASK) -> dict[str, Tensor]:
    with open_phase(request_of(folder, *args, task=task), world) as phase:
        assert phase.run_updates() is None
    return saved(folder) if world is None or world.is_first else {}


def losses(folder: Path) -> list[float]:
    rows = [json.loads(line) for line in (folder / "mine" / "metrics.jsonl").read_text().splitlines()]
    return [row["train/loss"] for row in rows if "train/loss" in row]


def train_by_hand(folder: Path, *, adaptive: bool) -> tuple[dict[str, Tensor], list[float]]:
    """Train with a plain loop: algorithm 1 of SAM (Foret et al., ICLR 2021) or of ASAM (Kwon et al., ICML 2021)."""
    with open_phase(request_of(folder)) as phase:
        task, model = phase.run.parts.task, phase.run.parts.bare
        x, y = task.dataset("train").tensors
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        weights, result = list(model.parameters()), []

        def gradient(rows: list[int]) -> list[Tensor]:
            loss, items = task.loss(model, (x[rows], y[rows]))
            result.append(float(loss.detach()) / items)
            return list(torch.autograd.grad(loss / items, weights))

        for update in range(UPDATES):
            epoch, number = divmod(update, len(x) // SIZE)
            rows = permutation(0, epoch, len(x))[number * SIZE : (number + 1) * SIZE].tolist()
            first = gradient(rows)
            scales = [weight.detach().abs() if adaptive else torch.ones_like(weight) for weight in weights]
            norm = torch.cat([(scale * each).flatten() for scale, each in zip(scales, first, strict=True)]).norm()
            steps = [RHO * scale**2 * each / norm for scale, each in zip(scales, first, strict=True)]
            with torch.no_grad():
                torch._foreach_add_(weights, steps)
            second = gradient(rows)
            with torch.no_grad():
                torch._foreach_sub_(weights, steps)
            for weight, each in zip(weights, second, strict=True):
                weight.grad = each
            nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
        return {name: weight.detach().clone() for name, weight in model.named_parameters()}, result[::2]


def assert_close(one: dict[str, Tensor], other: dict[str, Tensor], tolerance: float) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], rtol=0, atol=tolerance)


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("adaptive", [False, True])
def test_updates_match_those_of_a_plain_loop(adaptive: bool, tmp_path: Path) -> None:
    expected, measured = train_by_hand(tmp_path / "hand", adaptive=adaptive)
    result = trained(tmp_path / "run", f"sharpness.adaptive={str(adaptive).lower()}")
    assert_close(result, expected, TOLERANCE)
    assert losses(tmp_path / "run") == pytest.approx(measured, rel=TOLERANCE), (
        "the reported loss is the one before the ascent"
    )


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize(("args", "world_size"), [("micro_batch_size=2", 1), ("ddp", 2), ("ddp", 3)])
def test_accumulation_and_ranks_do_not_change_an_update(args: str, world_size: int, tmp_path: Path) -> None:
    expected = trained(tmp_path / "one", "micro_batch_size=8")
    shares = {2: "[7,1]", 3: "[4,3,1]"}

    def rank(world: World) -> None:
        ranks = (f"parallelism.world_size={world_size}", f"parallelism.shares={shares[world_size]}")
        trained(tmp_path / "other", f"parallelism={args}", *ranks, "micro_batch_size=2", world=world)

    if world_size > 1:
        run_ranks(rank, world_size)
    else:
        trained(tmp_path / "other", args)
    assert_close(saved(tmp_path / "other"), expected, TOLERANCE)


def test_both_passes_have_the_same_draws(tmp_path: Path) -> None:
    with open_phase(request_of(tmp_path, "global_batch_size=8", "micro_batch_size=4", task=DRAWING)) as phase:
        assert phase.run_updates() is None
        drawn: list[tuple[float, ...]] = phase.run.parts.task.drawn  # type: ignore[attr-defined]
        calls = phase.run.parts.bare.calls
    of_updates = [drawn[start : start + 4] for start in range(0, len(drawn), 4)]
    assert len(of_updates) == UPDATES
    assert all(passes[:2] == passes[2:] for passes in of_updates)
    assert len({passes for each in of_updates for passes in each}) == 2 * UPDATES
    assert int(calls) == 2 * UPDATES


@pytest.mark.parametrize("first_copy", [0, 2])
def test_only_the_first_pass_changes_frozen_parameters(first_copy: int, tmp_path: Path) -> None:
    """This holds even if forward passes start to change a parameter after the first update."""
    with open_phase(request_of(tmp_path, f"task.first_copy={first_copy}", task=DRAWING)) as phase:
        model, copies = phase.run.parts.bare, []
        weights = [model.line.weight.detach().clone()]
        for _ in phase.updates():
            copies.append(model.copied.clone())
            weights.append(model.line.weight.detach().clone())
    assert len(copies) == UPDATES
    for update, copied in enumerate(copies):
        expected = weights[update] if update >= first_copy else torch.zeros_like(copied)
        assert torch.equal(copied, expected), update


def test_a_resumed_run_is_bitwise_equal(tmp_path: Path) -> None:
    expected = trained(tmp_path / "straight", "micro_batch_size=2")
    with open_phase(request_of(tmp_path / "parts", "micro_batch_size=2")) as phase:
        for update in phase.updates():
            if update == 3:
                break
        phase.hook(RankSync).exchange.close()
        phase.hook(Checkpointing).save()
    assert_close(trained(tmp_path / "parts", "micro_batch_size=2"), expected, 0.0)


def test_an_update_is_repeated_after_out_of_memory(tmp_path: Path) -> None:
    expected = trained(tmp_path / "one")
    with open_phase(request_of(tmp_path / "short")) as phase:
        loss, calls = phase.run.parts.task.loss, []

        def short(model: nn.Module, batch: Any) -> Any:
            calls.append(len(batch[0]))
            if len(calls) == 4:  # in the second pass of the second update
                raise torch.OutOfMemoryError
            return loss(model, batch)

        phase.work.loss.loss = short  # type: ignore[attr-defined]
        assert phase.run_updates() is None
    assert 4 in calls, "the update must be repeated in smaller micro-batches"
    assert_close(saved(tmp_path / "short"), expected, TOLERANCE)


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("strategy", ["fsdp", "pipeline"])
def test_sharded_weights_are_rejected(strategy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_this_process(compose(Request(("sharpness=sam", f"parallelism={strategy}", "device=cpu"))))
    assert [problem.where for problem in caught.value.problems] == ["sharpness=sam"]


@pytest.mark.slow
@pytest.mark.parametrize("example", ["own_gan", "own_clip"])
def test_micro_batches_do_not_change_objectives_and_coupled_losses(
    example: str, server: ForkServer, tmp_path: Path
) -> None:
    args = "global_batch_size=32 updates=3 scheduler=constant sharpness=sam"
    result = []
    for size in (32, 8):
        (tmp_path / str(size)).mkdir()
        result.append(train(server, tmp_path / str(size), example, f"{args} micro_batch_size={size}")[0])
    for name, tensor in result[0].items():
        assert distance(tensor.tolist(), result[1][name].tolist()) <= 3 * PROMISED[torch.float32], name


def test_an_overflow_skips_the_update(tmp_path: Path) -> None:
    args = ("precision=fp16", "precision.init_scale=1.0e7", "updates=40", "evaluate.every=0")
    with open_phase(request_of(tmp_path, *args, task=FLOAT32)) as phase:
        assert phase.run_updates() is None
        assert 0 < phase.run.num_skipped < 40
        assert all(bool(weight.isfinite().all()) for weight in phase.run.parts.bare.parameters())
