"""With a coupled loss, buffers and frozen parameters that forward passes change match those of a plain loop."""

from __future__ import annotations

import copy
import gc
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runner.axes.optimizer import adamw
from runner.axes.parallelism import ddp
from runner.base.errors import TaskFault
from runner.base.order import Order
from runner.engine.update import model_states
from runner.engine.update.loop import train_updates
from tests.distributed.ranks import run_ranks
from tests.laws.test_coupled import (
    ALONE,
    GLOBAL,
    NUM_SAMPLES,
    UPDATES,
    WIDTH,
    Clip,
    batches_of,
    result,
    trained,
    training,
)
from tests.rounding import PROMISED, distance


class Dropped(Clip):
    """Draws from the global generator, and changes buffers that affect its output."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self.model.image.append(nn.Dropout(0.5))
        self.model.register_buffer("mean", torch.zeros(WIDTH, dtype=dtype))
        self.model.text.append(nn.BatchNorm1d(8, dtype=dtype))

    def embed(self, model: Any, batch: Any) -> Any:
        model.mean = 0.9 * model.mean + batch[0].mean(0)
        return model(batch[0] - model.mean, batch[1])


class Growing(Dropped):
    """Also has a buffer whose shape changes in each pass, followed by a buffer that is changed in place."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self.model.register_buffer("all", torch.zeros(0, WIDTH, dtype=dtype))
        self.model.register_buffer("total", torch.zeros(WIDTH, dtype=dtype))

    def embed(self, model: Any, batch: Any) -> Any:
        model.all = torch.cat([model.all, batch[0]])
        model.total += batch[1].sum(0)
        shifted = batch[0] - model.all.mean(0), batch[1] - model.total
        return super().embed(model, (*shifted, *batch[2:]))


class Late(Dropped):
    """Changes its buffers only from the second update on."""

    is_late = False

    def embed(self, model: Any, batch: Any) -> Any:
        model.text[-1].train(self.is_late)
        return super().embed(model, batch) if self.is_late else model(*batch[:2])


class Frozen(Dropped):
    """Changes a frozen parameter in place."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self.model.center = nn.Parameter(torch.zeros(WIDTH, dtype=dtype), requires_grad=False)

    def embed(self, model: Any, batch: Any) -> Any:
        with torch.no_grad():
            model.center.lerp_(batch[1].mean(0), 0.5)
        return super().embed(model, (batch[0], batch[1] - model.center, batch[2]))


class Replaced(Frozen):
    """Replaces the data of its frozen parameter, as momentum encoders do. The version counter does not change."""

    def embed(self, model: Any, batch: Any) -> Any:
        model.center.data = 0.5 * model.center.data + 0.5 * batch[1].mean(0)
        return Dropped.embed(self, model, (batch[0], batch[1] - model.center, batch[2]))


class LateFrozen(Frozen):
    """Changes its frozen parameter, and its buffers, only from the second update on."""

    is_late = False

    def embed(self, model: Any, batch: Any) -> Any:
        return super().embed(model, batch) if self.is_late else model(*batch[:2])


class Follower(Dropped):
    """Has a momentum encoder that starts as a copy of its source.

    Its LayerNorm therefore does not change before the first optimizer step.
    """

    is_late = False  # the second update is compared

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self.model.source = nn.Sequential(nn.Linear(WIDTH, WIDTH, dtype=dtype), nn.LayerNorm(WIDTH, dtype=dtype))
        self.model.follower = copy.deepcopy(self.model.source).requires_grad_(False)

    def embed(self, model: Any, batch: Any) -> Any:
        for slow, fast in zip(model.follower.parameters(), model.source.parameters(), strict=True):
            slow.data = slow.data * 0.99 + fast.data * 0.01
        return super().embed(model, (batch[0], model.source(batch[1]) * model.follower(batch[1]), batch[2]))


class Counted(Dropped):
    """Counts all passes in a buffer, and from the second update on, updates statistics with `F.batch_norm`."""

    is_late = False

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self.model.norm = nn.Module()
        for name, value in (("count", 0), ("mean", torch.zeros(WIDTH)), ("spread", torch.ones(WIDTH))):
            self.model.norm.register_buffer(name, torch.as_tensor(value, dtype=dtype))

    def embed(self, model: Any, batch: Any) -> Any:
        norm = model.norm
        norm.count += 1
        x = F.batch_norm(batch[0], norm.mean, norm.spread, training=True) if self.is_late else batch[0]
        return super().embed(model, (x - norm.mean, batch[1], batch[2]))


class Once(Dropped):
    """Changes state that all passes use, but only in the last micro-batch of an update."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self.model.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.model.register_buffer("shift", torch.zeros(WIDTH, dtype=dtype))
        self.model.center = nn.Parameter(torch.zeros(WIDTH, dtype=dtype), requires_grad=False)

    def embed(self, model: Any, batch: Any) -> Any:
        model.calls += 1
        if model.calls == 4:
            model.shift += batch[0].mean(0)
            with torch.no_grad():
                model.center.add_(1)
        return super().embed(model, (batch[0] + model.shift, batch[1] + model.center, batch[2]))


class Unwritable(Dropped):
    """Replaces buffers that cannot be changed in place: an inference tensor, an expanded tensor and None."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        with torch.inference_mode():
            self.model.register_buffer("inferred", torch.zeros(WIDTH, dtype=dtype))
            self.model.register_buffer("constant", torch.ones(WIDTH, dtype=dtype))
        self.model.register_buffer("expanded", torch.zeros(1, dtype=dtype).expand(WIDTH))
        self.model.register_buffer("absent", None)
        self.model.register_buffer("nothing", None)
        self.model.register_buffer("sparse", torch.eye(WIDTH, dtype=dtype).to_sparse())

    def embed(self, model: Any, batch: Any) -> Any:
        with torch.inference_mode():
            model.inferred = model.inferred + batch[0].mean(0)
        model.expanded = (model.expanded[:1] + batch[0].mean()).expand(WIDTH)
        before = 0 if model.absent is None else model.absent
        model.absent = before + batch[1].mean(0)
        shifted = batch[0] - model.inferred.clone() - model.expanded - model.constant.clone()
        return super().embed(model, (shifted, (model.sparse @ (batch[1] - model.absent).T).T, batch[2]))


class Unversioned(Dropped):
    """Updates buffers with `F.batch_norm`, which does not increment their version counters.

    There is no `num_batches_tracked` beside them.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self.model.register_buffer("seen", torch.zeros(WIDTH, dtype=dtype))
        self.model.register_buffer("spread", torch.ones(WIDTH, dtype=dtype))

    def embed(self, model: Any, batch: Any) -> Any:
        x = F.batch_norm(batch[0], model.seen, model.spread, training=True)
        return super().embed(model, (x - model.seen, batch[1] / model.spread, batch[2]))


@pytest.mark.parametrize(
    "kind", [Dropped, Growing, Late, Frozen, Replaced, Follower, Counted, Once, Unwritable, Unversioned]
)
def test_repeated_forward_passes_use_the_same_draws_and_buffers(kind: type[Dropped]) -> None:
    """The outputs of the first and second pass of a micro-batch are bitwise equal, and state advances once."""
    task: Any = kind(torch.float64)
    seen: list[Any] = []

    def embed(model: Any, batch: Any) -> Any:
        actual = task.embed(model, batch)
        seen.append((batch[0].clone(), [each.detach().clone() for each in actual]))
        return actual

    run = training(task, ddp(ALONE), embed=embed)
    order = Order(NUM_SAMPLES, GLOBAL, 8, seed=3, drop_last=True)
    batches = batches_of(order, torch.float64)
    if hasattr(kind, "is_late"):
        next(train_updates(run, batches, 2))
        task.is_late = True
        seen.clear()
    plain = copy.deepcopy(task)
    torch.manual_seed(5)
    next(train_updates(run, batches, 2))
    after = torch.get_rng_state()
    first, again = seen[:4], seen[4:]
    assert len(again) == 3
    for x, outputs in again:
        (before,) = (kept for batch, kept in first if torch.equal(batch, x))
        assert all(torch.equal(one, other) for one, other in zip(before, outputs, strict=True))
    torch.manual_seed(5)
    batches = batches_of(order, torch.float64)
    for micro in itertools.islice(batches, 4, 8) if hasattr(kind, "is_late") else itertools.islice(batches, 4):
        plain.embed(plain.model, micro.batch)
    assert torch.equal(torch.get_rng_state(), after)
    for name, buffer in plain.model.named_buffers():
        assert torch.equal(buffer.to_dense(), task.model.get_buffer(name).to_dense()), name
    for name, weight in plain.model.named_parameters():
        assert weight.requires_grad or torch.equal(weight, task.model.get_parameter(name)), name


@pytest.mark.parametrize("is_aliased", [True, False])
def test_frozen_and_trained_parameters_may_share_memory(is_aliased: bool) -> None:
    """After `slow.data = fast.data`, restoring the frozen parameter must not write to the trained one."""
    task: Any = Dropped(torch.float64)
    task.model.fast = nn.Parameter(torch.linspace(0, 1, WIDTH, dtype=torch.float64))
    task.model.slow = nn.Parameter(torch.zeros(WIDTH, dtype=torch.float64), requires_grad=False)
    embed, seen = task.embed, []

    def embed_shifted(model: Any, batch: Any) -> Any:
        model.slow.data = model.fast.data if is_aliased else model.fast.data.clone()
        seen.append(model.slow.clone())
        return embed(model, (batch[0], (batch[1] + model.fast) * model.slow, batch[2]))

    run = training(task, ddp(ALONE), embed=embed_shifted)
    order = Order(NUM_SAMPLES, GLOBAL, 8, seed=3, drop_last=True)
    updates = train_updates(run, batches_of(order, torch.float64), UPDATES)
    for _ in updates:
        weight = task.model.fast.detach().clone()
        assert torch.equal(task.model.slow, weight) is is_aliased
        assert len(seen) == 7
        assert all(torch.equal(each, seen[0]) for each in seen)
        seen.clear()


@pytest.mark.parametrize(
    "view", [lambda data: data, lambda data: data.t(), lambda data: data[:2], lambda data: data[1:]],
    ids=["all", "transposed", "start", "end"],
)  # fmt: skip
def test_restored_parameters_still_share_memory(view: Any) -> None:
    """A frozen parameter may be a slice or the transpose of a trained one, such as the tied weight of a decoder."""
    model: Any = nn.Module()
    model.fast = nn.Parameter(torch.arange(12.0).view(3, 4))
    model.slow = nn.Parameter(view(model.fast.data), requires_grad=False)
    states = model_states.ModelStates()
    before = states.record(model, after_passes=False)
    model.slow.data = torch.zeros_like(model.slow)
    states.record(model, after_passes=True)
    states.restore(before)
    assert torch.equal(model.slow, view(model.fast))
    with torch.no_grad():
        model.fast += 1
    assert torch.equal(model.slow, view(model.fast))


def test_constant_state_is_copied_at_most_once() -> None:
    """Constant buffers and frozen parameters may be so large that a copy per micro-batch would not fit."""
    size, most = 54321, 0
    task: Any = Dropped(torch.float64)
    task.model.register_buffer("table", torch.ones(size))
    task.model.backbone = nn.Parameter(torch.ones(size), requires_grad=False)

    def embed(model: Any, batch: Any) -> Any:
        nonlocal most
        alive = [each for each in gc.get_objects() if type(each) in (Tensor, nn.Parameter) and each.numel() == size]
        most = max(most, len({each.data_ptr() for each in alive}))
        return task.embed(model, batch)

    run = training(task, ddp(ALONE), embed=embed)
    list(train_updates(run, batches_of(Order(NUM_SAMPLES, GLOBAL, 8, seed=3), torch.float64), 2))
    assert most == 4


def test_late_changes_to_frozen_parameters_are_rejected() -> None:
    """Copying all frozen parameters, in case a later pass changes them, would cost too much."""
    task: Any = LateFrozen(torch.float64)
    updates = train_updates(
        training(task, ddp(ALONE)), batches_of(Order(NUM_SAMPLES, GLOBAL, 8, seed=3), torch.float64), 2
    )
    next(updates)
    task.is_late = True
    with pytest.raises(TaskFault) as caught:
        next(updates)
    assert "center" in caught.value.problems[0].fix


@pytest.mark.parametrize("limit", [1 << 30, 100])
def test_state_may_change_between_updates(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """For example, a hook updates a momentum encoder after each update, and `couple` fills a queue."""
    monkeypatch.setattr(model_states, "MAX_FROZEN_BYTES", limit)
    task: Any = Dropped(torch.float64)
    task.model.slow = nn.Parameter(torch.zeros(1000), requires_grad=False)
    task.model.sparse = nn.Parameter(torch.eye(3).to_sparse(), requires_grad=False)
    task.model.register_buffer("queue", torch.zeros(1000))
    couple = task.couple

    def fill(embeddings: Any) -> Any:
        task.model.queue += 1
        return couple(embeddings)

    task.couple = fill
    run = training(task, ddp(ALONE))
    batches = batches_of(Order(NUM_SAMPLES, GLOBAL, 8, seed=3), torch.float64)
    for update, _ in enumerate(train_updates(run, batches, UPDATES), 1):
        with torch.no_grad():
            task.model.slow += 1
        assert task.model.slow.eq(update).all()
        assert task.model.queue.eq(update).all()
    gc.collect()
    alive = [each for each in gc.get_objects() if type(each) is Tensor and each.numel() == 1000]
    assert len({each.data_ptr() for each in alive} - {task.model.queue.data_ptr()}) <= 1, (
        "all updates must share one copy of the queue"
    )


def test_second_forward_passes_see_the_state_before_couple() -> None:
    """`couple` updates a center that `embed` subtracts."""
    task: Any = Dropped(torch.float64)
    task.model.register_buffer("center", torch.zeros(WIDTH, dtype=torch.float64))
    couple, seen = task.couple, []

    def update_center(embeddings: Any) -> Any:
        task.model.center += 1
        return couple(embeddings)

    def embed(model: Any, batch: Any) -> Any:
        seen.append(float(model.center[0]))
        return task.embed(model, (batch[0], batch[1] - model.center, batch[2]))

    task.couple = update_center
    run = training(task, ddp(ALONE), embed=embed)
    list(train_updates(run, batches_of(Order(NUM_SAMPLES, GLOBAL, 8, seed=3, drop_last=True), torch.float64), 2))
    assert seen == [0.0] * 7 + [1.0] * 7
    assert task.model.center.eq(2).all()


def test_large_frozen_parameters_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a copy, a change cannot be undone, so it is rejected."""
    monkeypatch.setattr(model_states, "MAX_FROZEN_BYTES", 100)

    def train(task: Any) -> None:
        run = training(task, ddp(ALONE))
        list(train_updates(run, batches_of(Order(NUM_SAMPLES, GLOBAL, 8, seed=3), torch.float64), 2))

    backbone = nn.Parameter(torch.ones(100), requires_grad=False)
    constant: Any = Dropped(torch.float64)
    constant.model.backbone = backbone
    train(constant)
    changed: Any = Frozen(torch.float64)
    changed.model.backbone = backbone
    with pytest.raises(TaskFault) as caught:
        train(changed)
    assert "center" in caught.value.problems[0].fix


class Momentum(Clip):
    """Has a frozen weight that follows a trained one in each forward pass."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self.model.slow = nn.Linear(WIDTH, 8, dtype=dtype).requires_grad_(False)

    def embed(self, model: Any, batch: Any) -> Any:
        image, text = model(*batch[:2])
        with torch.no_grad():
            model.slow.weight.lerp_(model.text[2].weight[:, :WIDTH], 0.5)
        return image * model.slow(batch[0]), text


@pytest.mark.parametrize("shares", [(32,), (16, 16)], ids=str)
def test_changed_frozen_parameters_match_those_of_a_plain_loop(shares: tuple[int, ...]) -> None:
    """Each rank runs four micro-batches per update, each of which changes the parameter."""
    micro = GLOBAL // len(shares) // 4
    actual = run_ranks(
        lambda world: trained(world, Momentum, shares=shares, micro=micro, dtype=torch.float64, drop_last=True),
        len(shares),
    )
    task = Momentum(torch.float64)
    optimizer = adamw([(name, each) for name, each in task.model.named_parameters() if each.requires_grad], lr=0.01)
    orders = [
        Order(NUM_SAMPLES, GLOBAL, micro, seed=3, shares=shares[1:] and shares, rank=rank, drop_last=True)
        for rank in range(len(shares))
    ]
    ranks = [batches_of(order, torch.float64) for order in orders]
    losses = []
    for _ in range(UPDATES):
        before, embedded = copy.deepcopy(task.model.slow.weight.data), []
        for batches in ranks:
            task.model.slow.weight.data.copy_(before)
            embedded += [task.embed(task.model, next(batches).batch) for _ in range(4)]
        loss, count = task.couple(tuple(map(torch.cat, zip(*embedded, strict=True))))
        (loss / count).backward()
        losses.append(float(loss.detach()) / count)
        nn.utils.clip_grad_norm_(task.model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    for one in actual:
        assert distance(losses, one["losses"]) <= PROMISED[torch.float64]
        assert distance(result(task.model, [])["weights"], one["weights"]) <= PROMISED[torch.float64]
