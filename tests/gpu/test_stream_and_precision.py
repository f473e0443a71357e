"""CUDA streams, half precision, and a training loop without synchronization."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runner.axes.optimizer import adamw
from runner.axes.parallelism import single
from runner.axes.precision import bf16, fp16, fp32, tf32
from runner.axes.prefetch import none, stream
from runner.axes.scheduler import constant
from runner.base.batch import MicroBatch
from runner.base.loaded_torch import is_stand_in
from runner.base.stopwatch import new_stopwatch
from runner.distributed.world import World
from runner.engine.evaluation.meter import Meter, Row
from runner.engine.update.loop import Position, StepInfo, Training, train_updates

pytestmark = pytest.mark.gpu

CUDA = World(torch.device("cuda", 0))


def sum_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="sum"), len(y)


def training(precision: Any) -> Training:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8)).to(CUDA.device)
    named = list(model.named_parameters())
    return Training(
        position=Position("train"),
        model=model,
        loss=sum_loss,
        parameters=[weight for _, weight in named],
        optimizer=adamw(named, lr=0.01, kernel="fused"),
        schedule=constant(1000),
        precision=precision(CUDA, model),
        parallel=single(CUDA),
        per_item=1 / 64,
        max_grad_norm=1.0,
    )


def on_host() -> Iterator[MicroBatch]:
    """Yield the same four micro-batches in pinned memory forever; an update has two of them."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4, 32, 32, generator=generator).pin_memory()
    y = torch.randint(0, 8, (4, 32), generator=generator).pin_memory()
    number = 0
    while True:
        yield MicroBatch((x[number % 4], y[number % 4]), last=number % 2 == 1)
        number += 1


def steps(precision: Any, prefetch: Any, updates: int) -> list[StepInfo]:
    run = training(precision)
    with run.precision.flags:
        return list(train_updates(run, prefetch(CUDA.device)(on_host()), updates))


def loss_of(step: StepInfo) -> Tensor:
    assert step.loss_sum is not None
    return step.loss_sum


def test_a_prefetched_batch_is_complete_when_it_is_read() -> None:
    """The reader is slow. Without the wait, it would read too early; without record_stream, a later batch."""
    size = 2**16 if is_stand_in() else 4 * 2**20  # on the stand-in, a race changes no value

    def number_batches() -> Iterator[MicroBatch]:
        for number in range(16):
            yield MicroBatch(torch.full((size,), number, dtype=torch.int32).pin_memory(), last=True)

    right = []
    for number, item in enumerate(stream(CUDA.device)(number_batches())):
        assert item.batch.device == CUDA.device
        torch.cuda._sleep(20_000_000)  # about 10 ms, during which the next copy runs
        right.append((item.batch == number).sum())
        del item
    assert torch.stack(right).tolist() == [size] * 16


def test_page_locked_copies_keep_the_memory_format() -> None:
    """The copies are dense."""
    images = torch.randn(4, 3, 8, 8)
    last = images.to(memory_format=torch.channels_last)
    given = [images, images[:, 1:], images[1:3], images[:, :1].expand(-1, 3, -1, -1), last, last[:, 1:], images[:, :0]]
    for tensor, pinned in zip(given, MicroBatch(given, last=True).pin_memory().batch, strict=True):
        assert pinned.is_pinned() or not pinned.numel()
        assert torch.equal(pinned, tensor)
        assert pinned.untyped_storage().nbytes() == pinned.nbytes
    assert MicroBatch(last, last=True).pin_memory().batch.is_contiguous(memory_format=torch.channels_last)
    assert MicroBatch(torch.ones(2, requires_grad=True), last=True).pin_memory().batch.requires_grad


def test_prefetching_changes_neither_batches_nor_losses() -> None:
    plain = [item.batch for item in islice(none(CUDA.device)(on_host()), 6)]
    ahead = [item.batch for item in islice(stream(CUDA.device)(on_host()), 6)]
    for mine, theirs in zip(ahead, plain, strict=True):
        assert torch.equal(mine[0], theirs[0])
        assert torch.equal(mine[1], theirs[1])
    losses = [torch.stack([loss_of(step) for step in steps(fp32, prefetch, 20)]) for prefetch in (none, stream)]
    assert torch.equal(*losses)


@pytest.mark.parametrize("precision", [fp32, tf32, bf16, fp16])
def test_training_reduces_the_loss_in_every_precision(precision: Any) -> None:
    if precision in (tf32, bf16) and torch.cuda.get_device_capability(CUDA.device) < (8, 0):
        pytest.skip("needs capability 8.0")
    losses = [float(loss_of(step)) for step in steps(precision, stream, 60)]
    assert losses[-1] < 0.7 * losses[0]


def test_an_overflow_is_counted_without_waiting() -> None:
    run = training(fp16)
    poison = MicroBatch((torch.full((32, 32), torch.inf), torch.zeros(32, dtype=torch.int64)), last=True)
    (x, y), *_ = next(on_host())
    batches = none(CUDA.device)(iter([MicroBatch((x, y), last=True), poison, MicroBatch((x, y), last=True)]))
    finite = [bool(loss_of(step).isfinite()) for step in train_updates(run, batches, 3)]
    assert finite == [True, False, True]
    assert run.precision.num_skipped() == 1


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("precision", [fp32, bf16])
@pytest.mark.parametrize("prefetch", [none, stream])
def test_loop_and_rows_never_wait_for_the_device(precision: Any, prefetch: Any) -> None:
    rows: list[Row] = []
    meter = Meter(CUDA, "train", every=2, write=rows.append, readings=list, stopwatch=new_stopwatch(CUDA.device))
    run = training(precision)
    updates = train_updates(run, prefetch(CUDA.device)(on_host()), 12)
    for step in islice(updates, 4):  # one-time initialization of streams, optimizer state and library handles may wait
        meter(step)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in updates:
            meter(step)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    meter.flush()
    assert [row["update"] for row in rows] == [2, 4, 6, 8, 10, 12]


def test_metric_rows_do_not_depend_on_the_device_of_tensors() -> None:
    rows: list[Row] = []
    for device in ("cuda", "cpu"):
        world = World(torch.device(device))
        meter = Meter(world, "train", every=2, write=rows.append, readings=list, stopwatch=new_stopwatch(world.device))
        for number in (1, 2):
            loss, norm = torch.tensor(1 / number, device=device), torch.tensor(0.5, device=device)
            items = torch.tensor(3, device=device) if number == 1 else 4
            meter(StepInfo(number, loss, items, norm, 0.1, ()))
        meter.flush()
    from_device, from_host = ({key: row[key] for key in row if not key.startswith("perf/")} for row in rows)
    assert from_device == from_host
