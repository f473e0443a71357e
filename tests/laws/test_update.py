"""The update does not depend on how its samples are divided into micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runner.axes.optimizer import adamw
from runner.axes.parallelism import single
from runner.axes.precision import bf16, fp16, fp32
from runner.axes.scheduler import constant
from runner.base.batch import MicroBatch
from runner.base.errors import DataError
from runner.distributed.world import World
from runner.engine.parts.phase_kinds import count_updates
from runner.engine.update.loop import Position, Training, train_updates
from tests.rounding import PROMISED, allowed, distance

CPU = World(torch.device("cpu"))


def make_model(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 5)).to(dtype)


def token_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """A loss whose number of items is known only on the device, as with padding."""
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="sum", ignore_index=-1), (y >= 0).sum()


def sample_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="sum"), len(y)


def training(
    model: nn.Module, loss: Any, *, precision: Any = fp32, max_grad_norm: float | None = 1.0, **options: Any
) -> Training:
    named = list(model.named_parameters())
    return Training(
        position=Position("train"),
        model=model,
        loss=loss,
        parameters=[weight for _, weight in named],
        optimizer=adamw(named, lr=0.01),
        schedule=constant(100),
        precision=precision(CPU, model, **options),
        parallel=single(CPU),
        per_item=1 / 32,
        max_grad_norm=max_grad_norm,
    )


def cut(x: Tensor, y: Tensor, sizes: list[int]) -> list[MicroBatch]:
    assert sum(sizes) == len(x)
    parts = list(zip(x.split(sizes), y.split(sizes), strict=True))
    return [MicroBatch(part, number == len(parts) - 1) for number, part in enumerate(parts)]


def data(updates: int, *, ignored: bool, dtype: torch.dtype = torch.float64) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    made = []
    for _ in range(updates):
        x = torch.randn(32, 6, generator=generator, dtype=torch.float64).to(dtype)
        y = torch.randint(0, 5, (32,), generator=generator)
        if ignored:
            y[torch.rand(32, generator=generator) < 0.4] = -1
        made.append((x, y))
    return made


def weights_after(sizes: list[int], loss: Any, *, ignored: bool, max_grad_norm: float | None) -> Tensor:
    model = make_model()
    run = training(model, loss, max_grad_norm=max_grad_norm)
    batches = iter([micro for x, y in data(5, ignored=ignored) for micro in cut(x, y, sizes)])
    assert [step.update for step in train_updates(run, batches, 5)] == [1, 2, 3, 4, 5]
    return torch.cat([weight.detach().flatten() for weight in model.parameters()])


@pytest.mark.parametrize("sizes", [[8, 8, 8, 8], [20, 7, 5], [31, 1]])
@pytest.mark.parametrize("max_grad_norm", [None, 0.05])
@pytest.mark.parametrize(("loss", "ignored"), [(sample_loss, False), (token_loss, True)])
def test_accumulation_does_not_change_the_update(
    sizes: list[int], max_grad_norm: float | None, loss: Any, ignored: bool
) -> None:
    whole = weights_after([32], loss, ignored=ignored, max_grad_norm=max_grad_norm)
    parts = weights_after(sizes, loss, ignored=ignored, max_grad_norm=max_grad_norm)
    assert (whole - parts).abs().max() <= PROMISED[torch.float64]


@pytest.mark.parametrize("ignored", [False, True])
def test_the_update_equals_that_of_the_mean_loss(ignored: bool) -> None:
    by_hand = make_model()
    optimizer = torch.optim.AdamW(
        [
            {"params": [weight for weight in by_hand.parameters() if weight.dim() > 1], "weight_decay": 0.1},
            {"params": [weight for weight in by_hand.parameters() if weight.dim() < 2], "weight_decay": 0.0},
        ],
        lr=0.01, betas=(0.9, 0.95),
    )  # fmt: skip
    norms = []
    for x, y in data(5, ignored=ignored):
        F.cross_entropy(by_hand(x), y, ignore_index=-1).backward()
        norms.append(float(nn.utils.clip_grad_norm_(by_hand.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
    model = make_model()
    run = training(model, token_loss if ignored else sample_loss)
    batches = iter([micro for x, y in data(5, ignored=ignored) for micro in cut(x, y, [20, 7, 5])])
    steps = list(train_updates(run, batches, 5))
    for mine, theirs in zip(model.parameters(), by_hand.parameters(), strict=True):
        assert (mine - theirs).abs().max() <= PROMISED[torch.float64]
    assert [float(step.grad_norm) for step in steps if step.grad_norm is not None] == pytest.approx(
        norms, rel=PROMISED[torch.float64]
    )


def test_samples_of_a_smaller_last_update_have_equal_weights() -> None:
    """The last update of an epoch is a mean over fewer samples, not a fraction of a mean."""
    (x, y), *_ = data(1, ignored=False)
    model, by_hand = make_model(), make_model()
    steps = list(
        train_updates(training(model, sample_loss, max_grad_norm=1e9), iter([MicroBatch((x[:5], y[:5]), True)]), 1)
    )
    F.cross_entropy(by_hand(x[:5]), y[:5]).backward()
    norm = torch.linalg.vector_norm(
        torch.cat([weight.grad.flatten() for weight in by_hand.parameters() if weight.grad is not None])
    )
    assert steps[0].grad_norm is not None
    assert float(steps[0].grad_norm) == pytest.approx(float(norm), rel=PROMISED[torch.float64])


def test_loss_scaling_does_not_change_the_clipped_norm() -> None:
    norms = {}
    for name, precision, options in (("fp32", fp32, {}), ("fp16", fp16, {"init_scale": 1024.0})):
        model = make_model(torch.float32)
        if name == "fp16":  # equal weights and inputs; only the scaling differs
            options["keep_fp32"] = ["0", "2"]
        run = training(model, sample_loss, precision=precision, **options)
        batches = iter([MicroBatch(batch, True) for batch in data(3, ignored=False, dtype=torch.float32)])
        norms[name] = [float(step.grad_norm) for step in train_updates(run, batches, 3) if step.grad_norm is not None]
    assert distance(norms["fp32"], norms["fp16"]) <= allowed(torch.float32, terms=32)


def poisoned(at: int, updates: int) -> Iterator[MicroBatch]:
    for number, (x, y) in enumerate(data(updates, ignored=False, dtype=torch.float32)):
        yield MicroBatch((x * float("inf") if number == at else x, y), True)


def test_an_overflow_skips_the_update() -> None:
    model = make_model(torch.float32)
    run = training(model, sample_loss, precision=fp16, init_scale=1024.0)
    seen = []

    class Recorded:
        def factor(self, update: int) -> float:
            seen.append(update)
            return 1.0

    object.__setattr__(run, "schedule", Recorded())
    before = None
    for step in train_updates(run, poisoned(2, 5), 5):
        if step.update == 2:
            before = [weight.detach().clone() for weight in model.parameters()]
        if step.update == 3:
            assert before is not None
            assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
            assert run.precision.values()["precision/loss_scale"] == 512.0
    assert seen == [0, 1, 2, 2, 3]
    assert run.precision.num_skipped() == 1


@pytest.mark.parametrize("precision", [fp32, bf16, fp16])
def test_training_reduces_the_loss_in_every_precision(precision: Any) -> None:
    model = make_model(torch.float32)
    run = training(model, sample_loss, precision=precision)
    (x, y), *_ = data(1, ignored=False, dtype=torch.float32)
    losses = [float(step.loss_sum) for step in train_updates(run, iter([MicroBatch((x, y), True)] * 60), 60)]
    assert losses[-1] < 0.7 * losses[0]


def test_losses_are_summed_exactly_in_any_dtype() -> None:
    """In bfloat16, 256 + 1 is 256, at which a sum over micro-batches must not stay."""

    def one(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        return (model(batch[0]).sum() * 0 + 1).bfloat16(), 1

    x = torch.zeros(1, 6, dtype=torch.float64)
    micros = iter([MicroBatch((x,), last=number == 299) for number in range(300)])
    (step,) = train_updates(training(make_model(), one), micros, 1)
    assert float(step.loss_sum) == step.items == 300  # type: ignore[arg-type]


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("precision", [fp32, fp16])
def test_unreadable_micro_batches_do_not_change_the_update(place: int, precision: Any) -> None:
    (x, y), *_ = data(1, ignored=False)
    micros = cut(x, y, [20, 12])
    results = []
    for skips in (False, True):
        read = [micro._replace(last=False) for micro in micros]
        if skips:
            read.insert(place, MicroBatch(None, last=False, bad=((7, "broken"),), is_counted=False))
        read[-1] = read[-1]._replace(last=True)
        run = training(make_model(), sample_loss, precision=precision)
        (step,) = train_updates(run, iter(read), 1)
        assert step.bad == (((7, "broken"),) if skips else ())
        results.append([step.loss_sum, torch.as_tensor(step.items), step.grad_norm, *run.parameters])
    for plain, skipped in zip(*results, strict=True):
        assert torch.equal(plain, skipped)


@pytest.mark.parametrize("precision", [fp32, fp16])
def test_an_update_without_readable_samples_is_a_data_error(precision: Any) -> None:
    micros = [MicroBatch(None, last, ((index, "broken"),), is_counted=False) for index, last in ((7, False), (3, True))]
    with pytest.raises(DataError) as caught:
        next(train_updates(training(make_model(), sample_loss, precision=precision), iter(micros), 1))
    assert "7, 3" in caught.value.problems[0].what


class InMemory(torch.autograd.Function):
    """Writes a value to given memory, because the outputs of a CUDA graph are always in the same memory."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, memory: list[Tensor]) -> Tensor:
        memory[0].copy_(value)
        return memory[0].detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient, None


def test_overwritten_losses_and_counts_are_kept() -> None:
    """Each forward pass starts a CUDA graph iteration, which reuses the memory of the previous iteration."""
    loss_memory, count_memory, num_begun = torch.zeros((), dtype=torch.float64), torch.zeros(()), 0

    def begin() -> None:
        nonlocal num_begun
        num_begun += 1
        loss_memory.fill_(torch.nan)
        count_memory.fill_(torch.nan)

    def in_memory(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        loss, count = sample_loss(model, batch)
        return InMemory.apply(loss, [loss_memory]), count_memory.fill_(count)

    micros = [micro for x, y in data(5, ignored=False) for micro in cut(x, y, [20, 7, 5])]
    overwritten = training(make_model(), in_memory)
    overwritten.precision.before_forward(begin)
    found = list(train_updates(overwritten, iter(micros), 5))
    assert num_begun == len(micros)
    for step, plain in zip(found, train_updates(training(make_model(), sample_loss), iter(micros), 5), strict=True):
        assert step.loss_sum is not None
        assert plain.loss_sum is not None
        assert torch.equal(step.loss_sum, plain.loss_sum)
        assert step.items == plain.items


@pytest.mark.parametrize(
    ("epochs", "updates_per_epoch", "updates"),
    [(1.1, 100, 110), (0.7, 10, 7), (1.001, 1000, 1001), (2.5, 3, 8), (3, 7, 21), (0.001, 10, 1), (1e-5, 10**6, 10)],
)
def test_fractional_epochs_are_exact(epochs: float, updates_per_epoch: int, updates: int) -> None:
    assert count_updates(epochs, updates_per_epoch) == updates
