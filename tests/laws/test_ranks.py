"""The update depends neither on the number of ranks nor on their shares of the samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from runner.axes.optimizer import adamw
from runner.axes.parallelism import ddp
from runner.axes.precision import bf16, fp16, fp32
from runner.axes.scheduler import constant
from runner.base.batch import MicroBatch
from runner.base.order import Order
from runner.distributed.parallel import ForwardPasses, Parallel
from runner.distributed.replicated import Replicated
from runner.distributed.world import World
from runner.engine.update.loop import Position, StepInfo, Training, train_updates
from tests.distributed.ranks import CPU, run_ranks
from tests.faults.tallies import IS_LONG
from tests.rounding import PROMISED, allowed, distance

ALONE = World(CPU)
NUM_SAMPLES, WIDTH, TOKENS, CLASSES = 45, 6, 4, 5


def make_model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, CLASSES)).to(dtype)


def samples(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(60, TOKENS, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    y = torch.randint(-1, CLASSES, (60, TOKENS), generator=generator)  # -1 is padding, which is not counted
    return x, y


def token_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    x, y = batch
    return F.cross_entropy(model(x).transpose(1, 2), y, reduction="sum", ignore_index=-1), (y >= 0).sum()


def batches_of(order: Order, dtype: torch.dtype) -> Iterator[MicroBatch]:
    x, y = samples(dtype)
    for key in order.from_update(0):
        batch = (x[key.indices], y[key.indices]) if key.indices else None
        yield MicroBatch(batch, key.last, is_counted=key.is_counted)


def training(model: nn.Module, parallel: Parallel, loss: Any = token_loss, precision: Any = fp32) -> Training:
    named = list(model.named_parameters())
    wrapped = parallel.wrap(model, lambda: list(model), [])
    parameters = [weight for _, weight in named]
    parallel.begin(parameters)
    return Training(
        position=Position("train"),
        model=wrapped,
        loss=loss,
        parameters=parameters,
        optimizer=adamw(named, lr=0.01),
        schedule=constant(100),
        precision=precision(parallel.world, model),
        parallel=parallel,
        per_item=1 / 32,
        max_grad_norm=0.5,
    )


def trained(
    world: World,
    strategy: Callable[[World], Parallel],
    *,
    shares: tuple[int, ...],
    micro: int,
    updates: int = 6,
    dtype: torch.dtype = torch.float64,
    loss: Any = token_loss,
    precision: Any = fp32,
    num_samples: int = NUM_SAMPLES,
) -> dict[str, Any]:
    """Run some updates; return losses, norms, counts and the final weights."""
    parallel = strategy(world)
    total = sum(shares)
    order = Order(
        num_samples, total, micro, seed=3, shares=shares if world.world_size > 1 else (),
        rank=world.rank, is_lockstep=parallel.is_lockstep,
    )  # fmt: skip
    run = training(make_model(dtype), parallel, loss, precision)
    steps: list[StepInfo] = list(train_updates(run, batches_of(order, dtype), updates))
    # gather_full returns {} on ranks other than 0
    weights = parallel.gather_full(run.model.state_dict()) or run.model.state_dict()
    return {
        "losses": [float(step.loss_sum) / float(step.items) for step in steps if step.loss_sum is not None],
        "items": [float(step.items) for step in steps],
        "norms": [float(step.grad_norm) for step in steps if step.grad_norm is not None],
        "weights": {name: tensor.flatten().tolist() for name, tensor in weights.items()},
        "skipped": run.precision.num_skipped(),
    }


SPLITS = [((16, 16), 16), ((19, 13), 19), ((19, 13), 4), ((31, 1), 8), ((11, 8, 13), 5), ((1, 30, 1), 7)]


@pytest.mark.slow_beyond(1)
@pytest.mark.sampled(4)
@pytest.mark.parametrize(("shares", "micro"), SPLITS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
def test_shares_and_ranks_do_not_change_the_updates(shares: tuple[int, ...], micro: int, dtype: torch.dtype) -> None:
    """The second update of each epoch has 13 samples, so shares are uneven and a rank may have none."""
    alone = trained(ALONE, ddp, shares=shares, micro=sum(shares), dtype=torch.float64)
    tolerance = allowed(dtype, terms=sum(alone["items"]))  # rounding errors accumulate over all updates
    for rank, result in enumerate(
        run_ranks(lambda world: trained(world, ddp, shares=shares, micro=micro, dtype=dtype), len(shares))
    ):
        assert result["items"] == alone["items"]
        for key in ("losses", "norms", "weights"):
            assert distance(alone[key], result[key]) <= tolerance, (rank, key)


@given(
    parts=st.lists(st.integers(1, 20), min_size=2, max_size=3),
    micro=st.integers(1, 20),
    num_samples=st.integers(3, 60),
    updates=st.integers(1, 4),
)
@settings(max_examples=25 if IS_LONG else 5)
def test_any_split_over_ranks_matches_one_process(parts: list[int], micro: int, num_samples: int, updates: int) -> None:
    """Shares, micro-batches and epoch lengths are random, and include uneven updates and ranks without samples."""
    shares = tuple(parts)
    given = {"shares": shares, "updates": updates, "num_samples": num_samples}
    alone = trained(ALONE, ddp, micro=sum(shares), **given)
    results = run_ranks(lambda world: trained(world, ddp, micro=micro, **given), len(shares))
    for result in results:
        assert result["items"] == alone["items"]
        for key in ("losses", "norms", "weights"):
            assert distance(alone[key], result[key]) < PROMISED[torch.float64], key


def test_all_ranks_skip_an_update_that_overflows_on_one() -> None:
    def explosive(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        total, count = token_loss(model, batch)
        return total * (1e9 if int(batch[1].sum()) == trigger else 1.0), count

    y = samples(torch.float32)[1]
    first = next(iter(Order(NUM_SAMPLES, 32, 32, seed=3).micro_batches(0))).indices
    trigger = int(y[first[19:]].sum())  # sum of the labels of rank 1 in the first update

    results = run_ranks(
        lambda world: trained(
            world, ddp, shares=(19, 13), micro=32, dtype=torch.float32, loss=explosive, precision=fp16, updates=4
        ),
        2,
    )
    assert [result["skipped"] for result in results] == [1, 1]
    assert results[0]["norms"][1:] == results[1]["norms"][1:]


def test_bfloat16_losses_of_ranks_are_close_to_one_process() -> None:
    alone = trained(ALONE, ddp, shares=(19, 13), micro=32, dtype=torch.float32, precision=bf16)
    for result in run_ranks(
        lambda world: trained(world, ddp, shares=(19, 13), micro=32, dtype=torch.float32, precision=bf16), 2
    ):
        # losses are means
        assert distance(alone["losses"], result["losses"]) <= torch.finfo(torch.bfloat16).eps / 4


def test_only_parameters_used_on_a_rank_have_gradients() -> None:
    class Picky(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return self[0](x) if int(x[0, 0, 0].item() * 1e3) % 2 else self[1](x)

    def grads(world: World) -> list[list[float] | None]:
        torch.manual_seed(0)
        model = Picky(*(nn.Linear(WIDTH, CLASSES) for _ in range(3))).double()
        parallel = ddp(world)
        run = training(model, parallel)
        x, y = samples(torch.float64)
        passes = ForwardPasses(run.model, run.loss, run.precision.forward, run.precision.backward)
        # The two ranks use different layers and swap them in the second update, in which no gradient of the first may
        # remain.
        for layers in ((0.0015, 0.0025), (0.0025, 0.0015)):
            for weight in run.parameters:
                weight.grad = None
            picked = x[:20].clone()
            picked[:10, 0, 0], picked[10:, 0, 0] = layers
            parts = [MicroBatch((picked[:10], y[:10]), False), MicroBatch((picked[10:], y[10:20]), True)]
            given = parts if world.world_size == 1 else [parts[world.rank]._replace(last=True)]
            parallel.reduce(parallel.accumulate(passes, iter(given)))
        return [None if weight.grad is None else weight.grad.flatten().tolist() for weight in run.parameters]

    alone = grads(ALONE)
    assert [gradient is None for gradient in alone] == [False] * 4 + [True] * 2
    for result in run_ranks(grads, 2):
        assert [gradient is None for gradient in result] == [gradient is None for gradient in alone]
        for one, other in zip(alone[:4], result[:4], strict=True):
            np.testing.assert_allclose(one, other, rtol=PROMISED[torch.float64], atol=PROMISED[torch.float64])


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradients_accumulated_in_parts_are_complete(reentrant: bool) -> None:
    """A block is applied three times with recomputation, and reentrant checkpoints add to its gradient three times."""

    def gradient(world: World) -> list[float]:
        torch.manual_seed(0)
        block = nn.Linear(WIDTH, WIDTH).double()
        parallel = Replicated(world, bucket_bytes=1) if world.world_size > 1 else Parallel(world)
        parallel.wrap(block, lambda: [block], [])
        parallel.begin(list(block.parameters()))

        def loss(model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
            x = batch.requires_grad_()
            for _ in range(3):
                x = checkpoint(block, x, use_reentrant=reentrant)
            return (x**2).sum(), len(batch)

        x = samples(torch.float64)[0][:8].reshape(-1, WIDTH)
        given = x if world.world_size == 1 else x[world.rank :: 2]
        passes = ForwardPasses(block, loss, nullcontext, lambda total: total.backward())
        parallel.reduce(parallel.accumulate(passes, iter([MicroBatch(given, last=True)])))
        assert block.weight.grad is not None
        return block.weight.grad.flatten().tolist()

    alone = gradient(ALONE)
    for result in run_ranks(gradient, 2):
        np.testing.assert_allclose(result, alone, rtol=PROMISED[torch.float64])
