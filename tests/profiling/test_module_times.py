"""Module times are complete, count nothing twice, and do not change the autograd graph."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from runner.profiling.module_times import OUTSIDE, ModuleTimes

# Sums of powers of two are exact, and different sums of a few of these values are never equal.
FORWARD_S, BACKWARD_S, TWICE_S, DATA_S, OPTIMIZER_S, LOSS_S = (2.0**-power for power in (3, 6, 9, 12, 15, 18))
PASSES = 2  # micro-batches per update


class Clock:
    """A clock that advances only when `sleep` is called."""

    def __init__(self) -> None:
        self.now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def __call__(self) -> float:
        return self.now


CLOCK = Clock()


class Sleeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        CLOCK.sleep(ctx.seconds)
        return gradients[0], None


class Slow(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        CLOCK.sleep(FORWARD_S)
        out: Tensor = Sleeps.apply(x, BACKWARD_S).square()  # saves a tensor for the backward pass
        return out


class Twice(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        CLOCK.sleep(TWICE_S)
        return super().forward(Sleeps.apply(x, TWICE_S))


class SlowSGD(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        CLOCK.sleep(OPTIMIZER_S)
        super().step(closure)


class Out:
    """An output type that the profiler does not know."""

    def __init__(self, y: Tensor) -> None:
        self.y = y


class Net(nn.Module):
    """A residual connection, a module that is used twice, an in-place activation, and an output of a custom class."""

    def __init__(self, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.first, self.twice, self.slow = nn.Linear(4, 8), Twice(8, 8), Slow()
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Out:
        x = self.relu(self.first(x))
        x = x + (checkpoint(self.slow, x, use_reentrant=False) if self.checkpointed else self.slow(x))
        return Out(self.twice(self.twice(x)))


def batches() -> Iterator[Tensor]:
    while True:
        CLOCK.sleep(DATA_S)
        yield torch.ones(3, 4)


def run_updates(times: ModuleTimes, model: nn.Module, updates: int = 2) -> list[Tensor]:
    """Run updates of two micro-batches each, and return the gradients of the last one."""
    optimizer, data = SlowSGD(model.parameters(), lr=0.1), batches()
    for _ in range(updates):
        optimizer.zero_grad()
        for _ in range(PASSES):
            loss = model(times.fetch(data)).y.square().sum()
            CLOCK.sleep(LOSS_S)
            loss.backward()
        optimizer.step()
        times.update()
    return [weight.grad for weight in model.parameters() if weight.grad is not None]


def times_of(model: nn.Module, depth: int = 3) -> ModuleTimes:
    return ModuleTimes(model, torch.device("cpu"), depth=depth, clock=CLOCK)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_slow_module_is_found_in_both_passes(checkpointed: bool) -> None:
    model = Net(checkpointed=checkpointed)
    run_updates(times_of(model), model, updates=1)  # warms up torch
    times = times_of(model)
    times.start()
    run_updates(times, model)
    times.stop()
    rows = {row.path: row for row in times.table()}
    slow, twice = rows["slow"], rows["twice"]
    recomputed_s = FORWARD_S if checkpointed else 0.0
    assert slow.forward.min == slow.forward.max == PASSES * FORWARD_S
    assert slow.backward.min == slow.backward.max == PASSES * (BACKWARD_S + recomputed_s)
    assert twice.forward.mean == twice.backward.mean == 2 * PASSES * TWICE_S
    assert (slow.calls, twice.calls, rows[""].calls) == (2.0, 4.0, 2.0)


def test_self_times_add_up_to_the_time_of_updates() -> None:
    model = Net()
    times = times_of(model)
    times.start()
    began = CLOCK.now
    run_updates(times, model, updates=4)
    wall = CLOCK.now - began
    times.stop()
    rows = {row.path: row for row in times.table()}
    assert {path: row.own.mean for path, row in rows.items()} == {
        "": 0.0,
        "first": 0.0,
        "twice": 2 * PASSES * 2 * TWICE_S,
        "slow": PASSES * (FORWARD_S + BACKWARD_S),
        "relu": 0.0,
        "(data)": PASSES * DATA_S,
        "(optimizer)": OPTIMIZER_S,
        OUTSIDE.path: PASSES * LOSS_S,
    }
    assert 4 * sum(row.own.mean for row in rows.values()) == wall > 0


def test_profiling_does_not_change_gradients() -> None:
    torch.manual_seed(0)
    model = Net()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    times = times_of(model)
    times.start()
    watched = [gradient.clone() for gradient in run_updates(times, model)]
    times.stop()
    model.load_state_dict(start)
    for one, other in zip(watched, run_updates(times_of(model), model), strict=True):
        assert torch.equal(one, other)
    assert not model._forward_hooks  # lint-tests: private: hooks of torch
    assert not model._forward_pre_hooks  # lint-tests: private: hooks of torch


def test_modules_below_the_depth_limit_are_not_listed() -> None:
    model = nn.Sequential(nn.Sequential(Net(), nn.Identity()))
    times = times_of(model, depth=1)
    assert not times.table()  # nothing has been measured yet
    times.start()
    assert list(times.kinds) == ["", "0"]
    times.stop()


def test_evaluations_are_not_counted() -> None:
    model = Net()
    times = times_of(model)
    times.start()
    model.eval()
    with torch.no_grad():
        model(torch.ones(1, 4))
    model.train()
    times.update()
    times.stop()
    assert all(row.calls == 0 for row in times.table())


def test_waits_for_other_ranks_are_not_module_time() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8))

    def wait(*_: Any) -> None:
        CLOCK.sleep(BACKWARD_S)

    def exchange(*_: Any) -> None:  # like a reducer, does some work for each gradient, and the rest at the end
        wait()
        torch.autograd.Variable._execution_engine.queue_callback(wait)

    times = ModuleTimes(model, torch.device("cpu"), depth=3, ranks=2, clock=CLOCK)
    hook = model[2].weight.register_post_accumulate_grad_hook(exchange)
    times.start()
    for _ in range(2):
        model(torch.ones(3, 4)).sum().backward()
        times.update()
    times.stop()
    hook.remove()
    rows = {row.path: row for row in times.table()}
    assert {path: row.own.mean for path, row in rows.items() if row.own.mean} == {"(communication)": 2 * BACKWARD_S}
    assert rows[""].total.max == 0.0
    assert (rows["(communication)"].own.mean, rows["(communication)"].own.std) == (2 * BACKWARD_S, 0.0)
    assert "(communication)" not in {row.path for row in table_of_one_rank()}


def table_of_one_rank() -> list[Any]:
    model = Net()
    times = times_of(model)
    times.start()
    run_updates(times, model, updates=1)
    times.stop()
    return times.table()
