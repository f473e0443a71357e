"""Ranks whose model calls wait for each other must make the same calls; otherwise, all ranks report the difference."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor, nn, ones

from runner.base.errors import Exit
from runner.distributed.matched_calls import UnmatchedCalls, matched_calls
from runner.distributed.world import World
from tests.distributed.ranks import run_ranks
from tests.forkserver import CompletedCommand, ForkServer


class Summing(nn.Module):
    """A model that calls a collective, as a pipelined model does."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world

    def forward(self, x: Tensor) -> Tensor:
        return self.world.sum(x)


def outcome(world: World, num_calls: int, fails: bool) -> str:
    """Return the error of a rank after `num_calls` calls; the model must still work afterwards."""
    model = Summing(world)
    try:
        with matched_calls(model, world):
            for _ in range(num_calls):
                model(ones(1))
            if fails:
                raise ValueError("mine")
    except (ValueError, UnmatchedCalls) as error:
        return f"{error}{' of this rank' if error.__cause__ else ''}"
    finally:
        assert model(ones(1)).item() == world.world_size
    return ""


def test_results_and_common_errors_are_passed_on() -> None:
    assert run_ranks(lambda world: outcome(world, 2, fails=False), 2) == ["", ""]
    assert run_ranks(lambda world: outcome(world, 1, fails=True), 2) == ["mine", "mine"]


@pytest.mark.parametrize("num_calls", [0, 1, 2], ids=["first", "between", "last"])
def test_an_error_of_one_rank_is_raised_on_all_ranks(num_calls: int) -> None:
    def run(world: World) -> str:
        return outcome(world, num_calls if world.rank else 2, fails=world.rank == 1)

    text = "rank 1 failed: ValueError: mine"
    assert run_ranks(run, 2) == [text, f"{text} of this rank"]


def test_ranks_with_different_numbers_of_calls_are_reported() -> None:
    answers = run_ranks(lambda world: outcome(world, 1 + world.rank, fails=False), 2)
    assert answers[0] == answers[1]
    assert answers[0].startswith("rank 0")


TASK = """
import os, torch
from torch import nn
from runner import Task
class Mine(Task):
    def __init__(self):
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    def dataset(self, split):
        return torch.utils.data.TensorDataset(torch.randn(32, 4, generator=torch.Generator().manual_seed(0)))
    def loss(self, model, batch):
        if torch.distributed.get_rank() in FAILING_IN_LOSS and not self.model.training:
            raise ValueError("not in eval mode")
        return model(batch[0]).square().sum(), len(batch[0])
    def evaluate(self, model, batch):
        if torch.distributed.get_rank() in FAILING_IN_EVALUATE:
            raise FileNotFoundError("words of the task")
        return {"size": (model(batch[0]).square().sum(), len(batch[0]))}
def build(): return Mine()
"""


def run_on_two_pipelines(
    server: ForkServer, folder: Path, *, in_loss: str = "()", in_evaluate: str = "()"
) -> CompletedCommand:
    text = TASK.replace("FAILING_IN_LOSS", in_loss).replace("FAILING_IN_EVALUATE", in_evaluate)
    (folder / "mine.py").write_text(text)
    return server.run(
        "train --task mine.py run=r updates=2 global_batch_size=8 device=cpu monitor=off parallelism=pipeline"
        " parallelism.stages=2 parallelism.world_size=4",
        folder,
    )


def test_an_early_error_of_one_rank_ends_the_run(server: ForkServer, tmp_path: Path) -> None:
    """The error occurs before the first update, and its text is reported."""
    result = run_on_two_pipelines(server, tmp_path, in_evaluate="(1,)")
    assert result.code == Exit.SOFTWARE, result.err
    assert "rank 1: " in result.err
    assert "FileNotFoundError" in result.err


def test_a_loss_failing_in_eval_mode_does_not_prevent_training(server: ForkServer, tmp_path: Path) -> None:
    """The loss fails on one of two pipelines, on all of its ranks, so none waits. The first check is inconclusive."""
    result = run_on_two_pipelines(server, tmp_path, in_loss="(2, 3)")
    assert result.code == Exit.DONE, result.err
