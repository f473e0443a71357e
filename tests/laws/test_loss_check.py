"""A loss that is not a sum is detected before the first update, and the check does not affect training."""

from __future__ import annotations

import json
from collections import UserDict
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import default_collate

from runner import per_sample_noise
from runner.axes.precision import bf16, fp32
from runner.axes.prefetch import Prefetch
from runner.base.batch import BatchSamples, MicroBatch
from runner.base.errors import Exit, TaskFault
from runner.base.task import Task
from runner.config.configuration import Choice
from runner.distributed.parallel import Parallel
from runner.distributed.world import World
from runner.durable.checkpoint import load, newest_valid
from runner.engine.checks.additivity_check import BatchReader, check_loss_is_sum
from runner.engine.checks.batch_halves import split_in_halves
from runner.loading.fetcher import Fetcher
from runner.loading.loaders import Loader
from tests.forkserver import ForkServer

WORLD = World(torch.device("cpu"))
SIZE, WIDTH, CLASSES = 8, 6, 5
Loss = Callable[[nn.Module, Any], Any]


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 12), nn.BatchNorm1d(12), nn.Dropout(0.5), nn.Linear(12, CLASSES))


def batch_of(size: int = SIZE) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(size, WIDTH, generator=generator), torch.randint(0, CLASSES, (size,), generator=generator)


def micro_of(batch: Any, size: int = SIZE) -> MicroBatch:
    return MicroBatch(batch, last=True, samples=BatchSamples(0, 0, list(range(10, 10 + size)), list(range(size))))


def parts_of(model: nn.Module, precision: Any = fp32) -> Any:
    return SimpleNamespace(
        world=WORLD, bare=model, model=model, parallel=Parallel(WORLD), precision=precision(WORLD, model),
        source=Path(__file__), task=Task(), plan=SimpleNamespace(choices={"compile": Choice("off", "off", {})}),
    )  # fmt: skip


def find_message(
    loss: Loss, batch: Any = None, *, model: nn.Module | None = None, precision: Any = fp32,
    first: MicroBatch | None = None, loader: Loader | None = None,
) -> str:  # fmt: skip
    """Return the message about a loss, or "" if there is none."""
    parts = parts_of(model or model_of(), precision)
    read = None if loader is None else BatchReader(loader, Prefetch(WORLD.device))
    try:
        check_loss_is_sum(parts, loss, first or micro_of(batch_of() if batch is None else batch), read)
    except TaskFault as fault:
        return str(fault)
    return ""


def noisy(size: float, reduction: str) -> Loss:
    def loss(model: nn.Module, batch: Any) -> Any:
        x, y = batch
        return F.mse_loss(model(x), torch.zeros(len(x), CLASSES) + size * torch.randn(1), reduction=reduction), len(y)

    return loss


def denoised(reduction: str) -> Loss:
    """A diffusion loss, whose draws for a sample depend on the batch size."""

    def loss(model: nn.Module, batch: Any) -> Any:
        x, y = batch
        time, noise = torch.rand(len(x), 1), torch.randn_like(x)
        restored = model(x * (1 - time) + noise * time)
        return F.mse_loss(restored, noise[:, :CLASSES], reduction=reduction), len(y)

    return loss


def heavy(reduction: str) -> Loss:
    def loss(model: nn.Module, batch: Any) -> Any:
        drawn = torch.randn(len(batch[0]), 1).mul(5).exp()
        predicted = model(batch[0]) * drawn
        return F.mse_loss(predicted, torch.zeros_like(predicted), reduction=reduction), len(batch[1])

    return loss


def masked(reduction: str) -> Loss:
    """Hides random samples, possibly all."""

    def loss(model: nn.Module, batch: Any) -> Any:
        x, y = batch
        is_hidden = torch.rand(len(x)) < 0.6
        losses = F.cross_entropy(model(x), y, reduction="none") * is_hidden
        count = is_hidden.sum()
        return losses.sum() if reduction == "sum" else losses.sum() / count.clamp(min=1), count

    return loss


def mixed(reduction: str) -> Loss:
    """Mixes each sample with another one, as mixup does."""

    def loss(model: nn.Module, batch: Any) -> Any:
        x, y = batch
        part = torch.distributions.Beta(0.2, 0.2).sample()
        other = torch.randperm(len(x))
        predicted = model(part * x + (1 - part) * x[other])
        kept = part * F.cross_entropy(predicted, y, reduction=reduction)
        return kept + (1 - part) * F.cross_entropy(predicted, y[other], reduction=reduction), len(y)

    return loss


def with_negatives(reduction: str) -> Loss:
    """Compares each sample with a sample of the batch, drawn with replacement."""

    def loss(model: nn.Module, batch: Any) -> Any:
        x, y = batch
        predicted, other = model(x), model(x[torch.randint(len(x), (len(x),))])
        losses = F.relu(1 + (predicted - other).square().sum(1) - predicted.square().sum(1))
        return getattr(losses, reduction)(), len(y)

    return loss


def with_steps(number: int, reduction: str) -> Loss:
    """Draws one of `number` steps, as many as there are samples in the batch or in a half."""

    def loss(model: nn.Module, batch: Any) -> Any:
        x, y = batch
        steps = torch.randint(number, (len(x), 1)) / number
        return getattr(model(steps * x).square().sum(1), reduction)(), len(y)

    return loss


def with_fused_dropout(reduction: str) -> Loss:
    def loss(model: nn.Module, batch: Any) -> Any:
        predicted, _ = torch.native_dropout(model(batch[0]), 0.5, True)
        return F.cross_entropy(predicted, batch[1], reduction=reduction), len(batch[1])

    return loss


def with_anchor(model: nn.Module, batch: Any) -> Any:
    x, y = batch
    return (model(x) - model(x[torch.randint(len(x), (1,))])).square().sum(), len(y)


def drawn_by_numpy(reduction: str) -> Loss:
    def loss(model: nn.Module, batch: Any) -> Any:
        drawn = torch.as_tensor(np.random.rand(len(batch[0]), 1), dtype=torch.float32)
        return F.cross_entropy(model(batch[0] + drawn), batch[1], reduction=reduction), len(batch[1])

    return loss


def with_own_draws(model: nn.Module, batch: Any) -> Any:
    x, y = batch
    drawn = 3 * per_sample_noise(batch).normal(WIDTH)
    return F.cross_entropy(model(x + drawn), y, reduction="sum"), len(y)


def contrastive(model: nn.Module, batch: Any) -> Any:
    codes = F.normalize(model(batch[0]), dim=1)
    return F.cross_entropy(codes @ codes.T, torch.arange(len(codes)), reduction="sum"), len(codes)


def in_place(reduction: str) -> Loss:
    """Normalizes and masks its batch in place."""

    def loss(model: nn.Module, batch: Any) -> Any:
        x, y = (batch["x"], batch["y"]) if isinstance(batch, UserDict) else batch
        x.sub_(1).div_(4)
        y[0] = 0
        return F.cross_entropy(model(x), y, reduction=reduction), len(y)

    return loss


def padded(model: nn.Module, batch: Any) -> Any:
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="sum", ignore_index=0), (y != 0).sum()


def score(model: nn.Module, batch: Any) -> Any:
    """A difference of large sums, which in bfloat16 leaves few significant bits."""
    shifted = batch[0] + 1
    return (20 + model(batch[0])).sum() - (20 + model(shifted)).sum(), len(batch[0])


def at_least_one(model: nn.Module, batch: Any) -> Any:
    """Only one sample has items, so one half has none."""
    has_items = (batch[0][:, :1] == batch_of()[0][0, 0]).any(1)
    losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
    return (losses * has_items).sum(), has_items.sum().clamp(min=1)


SUMS: dict[str, Loss] = {
    "a small difference of large sums": score,
    "at least one item": at_least_one,
    "a sum": lambda model, batch: (F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1])),
    "items that are not samples": padded,
    "separate draws for each sample": with_own_draws,
    "a mean of micro-batches": lambda model, batch: (F.cross_entropy(model(batch[0]), batch[1]), 1),
    "zero": lambda model, batch: (model(batch[0]).sum() * 0, len(batch[1])),
    "a sum with draws": noisy(5.0, "sum"),
    "a sum with draws for each sample": denoised("sum"),
    "a sum with heavy draws": heavy("sum"),
    "a sum over masked samples": masked("sum"),
    "a sum over a mixture of samples": mixed("sum"),
    "a sum with draws by NumPy": drawn_by_numpy("sum"),
    "a sum with random negatives": with_negatives("sum"),
    "a sum with as many steps as samples": with_steps(SIZE, "sum"),
    "a sum with half as many steps as samples": with_steps(SIZE // 2, "sum"),
    "a sum with fused dropout": with_fused_dropout("sum"),
    "an error in eval mode": lambda model, batch: {}["x"] if not model.training else None,
    "not a number": lambda model, batch: (model(batch[0]).sum() * float("nan"), len(batch[1])),
    "rejected by another check": lambda model, batch: model(batch[0]).mean(),
}


def weighted_by_hand(model: nn.Module, batch: Any) -> Any:
    losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
    return losses.sum() / len(losses), len(losses)


MEANS: dict[str, Loss] = {
    "a mean": lambda model, batch: (F.cross_entropy(model(batch[0]), batch[1]), len(batch[1])),
    "a mean of a tensor": lambda model, batch: (model(batch[0]).square().mean(), len(batch[1])),
    "a mean with few draws": noisy(0.001, "mean"),
    "a mean with many draws": noisy(5.0, "mean"),
    "a mean with draws for each sample": denoised("mean"),
    "a mean with heavy draws": heavy("mean"),
    "a mean over masked samples": masked("mean"),
    "a mean with as many steps as samples": with_steps(SIZE, "mean"),
    "a mean with fused dropout": with_fused_dropout("mean"),
    "a mean by hand": weighted_by_hand,
}


@pytest.mark.parametrize("name", SUMS)
@pytest.mark.parametrize("precision", [fp32, bf16])
def test_sums_and_undecidable_losses_are_not_reported(name: str, precision: Any) -> None:
    assert find_message(SUMS[name], precision=precision) == ""


@pytest.mark.slow_beyond(2)
@pytest.mark.parametrize("name", MEANS)
def test_a_mean_with_a_count_is_rejected(name: str) -> None:
    assert "loss() returns a mean" in find_message(MEANS[name])
    assert 'reduction="sum"' in find_message(MEANS[name])


def test_a_mean_of_micro_batches_is_reported_as_unchecked() -> None:
    result = check_loss_is_sum(parts_of(model_of(), fp32), SUMS["a mean of micro-batches"], micro_of(batch_of()))
    assert "count" in result.reason
    assert not any(check_loss_is_sum(parts_of(model_of(), fp32), SUMS["a sum"], micro_of(batch_of())))


def test_an_unreadable_first_batch_leaves_the_loss_unchecked() -> None:
    empty = MicroBatch(None, last=False, bad=((10, "broken"),), is_counted=False)
    assert check_loss_is_sum(parts_of(model_of()), SUMS["a sum"], empty).reason


@pytest.mark.parametrize("precision", [fp32, bf16])
def test_a_mean_of_equal_predictions_is_reported(precision: Any) -> None:
    model = model_of()
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    result = check_loss_is_sum(parts_of(model, precision), SUMS["a mean of micro-batches"], micro_of(batch_of()))
    assert "count" in result.reason


def test_the_attribute_for_coupled_losses_is_named() -> None:
    assert "loss_is_additive" in find_message(contrastive)


def test_a_mean_of_one_sample_is_rejected() -> None:
    x, y = batch_of()
    loader = Loader(Fetcher(list(zip(x, y, strict=True)), default_collate, bad_samples="stop"))
    first = MicroBatch((x[:1], y[:1]), last=True, samples=BatchSamples(0, 0, [0], [0]))
    assert "loss() returns a mean" in find_message(MEANS["a mean"], first=first, loader=loader)
    assert find_message(SUMS["a sum"], first=first, loader=loader) == ""


def packed(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    return torch.cat([x for x, _ in samples]), torch.stack([y for _, y in samples])


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_packed_samples_are_collated_again_in_halves(reduction: str) -> None:
    x, y = batch_of()
    samples = list(zip(x, y, strict=True))

    def loss(model: nn.Module, batch: Any) -> Any:
        return F.cross_entropy(model(batch[0].view(-1, WIDTH)), batch[1], reduction=reduction), len(batch[1])

    first = MicroBatch(packed(samples), last=True, samples=BatchSamples(0, 0, range(SIZE), range(SIZE)))
    message = find_message(loss, first=first, loader=Loader(Fetcher(samples, packed, bad_samples="stop")))
    assert ("loss() returns a mean" in message) == (reduction == "mean")
    assert bool(message) == (reduction == "mean")


def in_training_only(model: nn.Module, batch: Any) -> Any:
    if not model.training:
        raise ValueError("for training")
    return F.cross_entropy(model(batch[0]), batch[1]), len(batch[1])


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize(
    "loss", [drawn_by_numpy("mean"), mixed("mean"), with_negatives("mean"), with_anchor, in_training_only]
)
def test_undecidable_losses_are_reported(loss: Loss) -> None:
    assert check_loss_is_sum(parts_of(model_of()), loss, micro_of(batch_of())).reason
    assert not any(check_loss_is_sum(parts_of(model_of()), SUMS["a sum"], micro_of(batch_of())))


def test_batch_norms_are_reported() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, 12), nn.BatchNorm1d(12, track_running_stats=False), nn.Linear(12, CLASSES))
    assert "batch norm" in check_loss_is_sum(parts_of(model), MEANS["a mean"], micro_of(batch_of())).reason


def penalized(strength: float, *, per_item: bool) -> Loss:
    """Return a sum with an L2 penalty that is added once per batch or once per item."""

    def loss(model: nn.Module, batch: Any) -> Any:
        x, y = batch
        penalty = strength * sum(weight.square().sum() for weight in model.parameters())
        return F.cross_entropy(model(x), y, reduction="sum") + penalty * (len(y) if per_item else 1), len(y)

    return loss


@pytest.mark.parametrize("precision", [fp32, bf16])
def test_a_penalty_per_batch_causes_a_warning(precision: Any) -> None:
    def check(loss: Loss) -> tuple[str, str]:
        return check_loss_is_sum(parts_of(model_of(), precision), loss, micro_of(batch_of()))

    reason, warning = check(penalized(0.01, per_item=False))
    assert not reason
    assert "regularizer" in warning
    assert not any(check(penalized(0.01, per_item=True)))


def test_small_deviations_in_half_precision_are_undecided() -> None:
    model = model_of().bfloat16()

    def loss(model: nn.Module, batch: Any) -> Any:
        total, count = penalized(0.01, per_item=False)(model, (batch[0].bfloat16(), batch[1]))
        return total.float(), count

    reason, warning = check_loss_is_sum(parts_of(model), loss, micro_of(batch_of()))
    assert reason
    assert not warning


@pytest.mark.parametrize("count", [len, lambda batch: 1])
def test_the_count_must_grow_with_the_batch(count: Callable[[Any], int]) -> None:
    def loss(model: nn.Module, batch: Any) -> Any:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), count(batch)

    assert "len(y)" in find_message(loss)


def test_losses_may_use_batch_norms_in_eval_mode() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 12), nn.BatchNorm1d(12, track_running_stats=False), nn.Linear(12, CLASSES))
    x, y = batch_of()
    batch = torch.cat([x[:4], 100 + 50 * x[4:]]), y

    def loss(model: nn.Module, batch: Any) -> Any:
        return model(batch[0]).square().square().sum(), len(batch[1])

    assert find_message(loss, batch, model=model) == ""
    assert find_message(loss, batch, model=nn.Sequential(model[0], model[2])) == ""


def test_all_passes_of_the_check_see_the_same_buffers() -> None:
    """If each call fills a queue of keys, the keys of the first call must not hide a mean."""
    model = model_of()
    model.register_buffer("keys", torch.zeros(16, CLASSES))

    def loss(model: nn.Module, batch: Any) -> Any:
        codes = model(batch[0])
        before = model.keys.clone()
        model.keys.copy_(torch.cat([codes.detach(), before])[:16])
        return F.cross_entropy(10 * codes @ before.T, batch[1]), len(batch[1])

    assert "loss() returns a mean" in find_message(loss, model=model)
    assert not model.keys.any()


def test_a_loss_with_an_auxiliary_term_is_not_reported() -> None:
    """If the loss updates a teacher, the teacher must not change during the check."""
    model = model_of()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    draws = torch.get_rng_state()

    def loss(model: nn.Module, batch: Any) -> Any:
        torch.rand(3)
        model(batch[0])
        with torch.no_grad():
            model[3].weight.lerp_(model[3].weight * 2, 0.5)  # type: ignore[index, operator]
        return F.cross_entropy(model(batch[0]), batch[1]), len(batch[1])

    assert find_message(loss, model=model) == ""
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), draws)
    assert model.training


def test_call_counters_are_restored() -> None:
    model = model_of()
    model.calls = 0  # type: ignore[assignment]

    def loss(model: nn.Module, batch: Any) -> Any:
        model.calls += 1  # type: ignore[assignment, operator]
        model.counted_from_the_first_call = getattr(model, "counted_from_the_first_call", 0) + 1  # type: ignore[assignment, operator]
        return F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1])

    assert find_message(loss, model=model) == ""
    assert model.calls == 0
    assert not hasattr(model, "counted_from_the_first_call")


# ---------------------------------------------------------------- splitting batches


def sizes(batch: Any) -> Any:
    """Return both halves of a batch, with shapes instead of tensors."""

    def shape(value: Any) -> Any:
        if isinstance(value, Tensor):
            return list(value.shape)
        if isinstance(value, dict):
            return {key: shape(item) for key, item in value.items()}
        return [shape(item) for item in value] if isinstance(value, (tuple, list)) else value

    result = split_in_halves(micro_of(batch, 5))
    return result and [[shape(part.batch), list(part.samples.indices)] for part in result if part.samples]


@pytest.mark.parametrize(
    "batch",
    [
        "text",
        torch.zeros(()),
        torch.zeros(3, 2),
        (torch.zeros(5, 2), torch.zeros(6)),
        [torch.zeros(5) for _ in range(5)],
        [torch.zeros(3, 4), torch.zeros(3, 5)],
        {"x": torch.zeros(5), "graph": object()},
        nn.utils.rnn.pack_sequence([torch.zeros(size) for size in (4, 3, 2, 2, 1)]),
    ],
    ids=[
        "text",
        "a number",
        "other rows",
        "edges",
        "one for each sample",
        "pictures",
        "an object",
        "a packed sequence",
    ],
)
def test_ambiguous_batches_are_not_split(batch: Any) -> None:
    assert sizes(batch) is None


def test_nested_tensors_and_lists_of_rows_are_split() -> None:
    names = ["a", "b", "c", "d", "e"]
    batch = {"x": torch.zeros(5, 2), "more": (torch.zeros(5), {"names": names, "scale": 3.0}), "t": torch.zeros(())}
    first = {"x": [2, 2], "more": [[2], {"names": ["a", "b"], "scale": 3.0}], "t": []}
    second = {"x": [3, 2], "more": [[3], {"names": ["c", "d", "e"], "scale": 3.0}], "t": []}
    assert sizes(batch) == [[first, [10, 11]], [second, [12, 13, 14]]]


def test_a_mapping_is_split_into_mappings_of_its_type() -> None:
    class Encoding(UserDict[str, Tensor]):
        def __getattr__(self, name: str) -> Tensor:
            return self.data[name]

    result = split_in_halves(micro_of(Encoding(ids=torch.zeros(5, 2)), 5))
    assert result is not None
    assert [part.batch.ids.shape[0] for part in result] == [2, 3]


# ---------------------------------------------------------------- complete runs

TASK = Path(__file__).parents[1] / "faults" / "task_of_matrix.py"
CHANGES = Path(__file__).parent / "task_of_buffers.py"  # its buffers also change in eval mode
OFF = "import runner.base.task\nrunner.base.task.Task.loss_is_additive = False"


def trained(
    server: ForkServer, folder: Path, args: str, before: str, task: Path = CHANGES
) -> tuple[dict[str, Tensor], Sequence[Any]]:
    folder.mkdir()
    # Batches of two tensors look like batches of two samples, so they are collated again.
    size = "micro_batch_size=4" if task == CHANGES else "micro_batch_size=1"
    line = f"train --task {task} {size} run=mine device=cpu monitor=off updates=5 evaluate.every=0 log_every=1 {args}"
    result = server.run(line, folder, before=before)
    assert result.code == 0, result.err
    path = newest_valid(folder / "outputs/mine/checkpoints")
    assert path is not None
    start = load(path)
    rows = [json.loads(row) for row in (folder / "outputs/mine/metrics.jsonl").read_text().splitlines()]
    tensors = {f"{stem}/{name}": tensor for stem in start.stems for name, tensor in start.tensors(stem).items()}
    return tensors, [row.get("train/loss") for row in rows]


@pytest.mark.slow_beyond(1)
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "args",
    [
        "parallelism=single",
        "parallelism=single dataloader=thread precision=fp16",
        "parallelism=ddp parallelism.world_size=2",
        "parallelism=fsdp parallelism.world_size=2",
        "parallelism=pipeline parallelism.world_size=2",
    ],
)
def test_the_check_does_not_change_results(args: str, server: ForkServer, tmp_path: Path) -> None:
    with_check, losses = trained(server, tmp_path / "with", args, "")
    without, other = trained(server, tmp_path / "without", args, OFF)
    assert losses == other
    assert with_check.keys() == without.keys()
    assert [name for name, tensor in without.items() if not torch.equal(tensor, with_check[name])] == []


MEAN = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from runner import Task

SETTINGS = {"global_batch_size": 8, "optimizer.lr": 0.01}

def build():
    return Mean()

class Mean(Task):
    def __init__(self):
        self.model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))

    def dataset(self, split):
        if split != "train":
            raise NotImplementedError
        return TensorDataset(torch.randn(64, 4), torch.randn(64, 2))

    def loss(self, model, batch):
        x, y = batch
        return (model(x) - y).square().mean(), len(x)
"""


@pytest.mark.parametrize("args", ["ddp parallelism.batch_norm=sync", "fsdp parallelism.evaluation=sharded"])
def test_split_models_check_the_loss_without_validation_data(args: str, server: ForkServer, tmp_path: Path) -> None:
    (tmp_path / "mean_on_ranks.py").write_text(MEAN)
    line = f"train --task mean_on_ranks.py run=mine device=cpu updates=2 parallelism.world_size=2 parallelism={args}"
    result = server.run(line, tmp_path)
    assert result.code == Exit.SOFTWARE
    assert "reduction=" in result.err


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("args", ["", "dataloader.num_workers=1", "parallelism=pipeline parallelism.world_size=2"])
def test_reading_another_sample_does_not_change_results(args: str, server: ForkServer, tmp_path: Path) -> None:
    with_check, losses = trained(server, tmp_path / "with", args, "", TASK)
    without, other = trained(server, tmp_path / "without", args, OFF, TASK)
    assert losses == other
    assert [name for name, tensor in without.items() if not torch.equal(tensor, with_check[name])] == []


def test_the_check_costs_two_passes_per_phase(server: ForkServer, tmp_path: Path) -> None:
    """The check runs a complete batch and two halves, without gradients, not between updates or after a resume."""
    (tmp_path / "mine.py").write_text(
        TASK.read_text().replace(
            "        x, y = batch\n        if torch.is_grad_enabled():",
            '        open("calls", "a").write("t" if model.training else "e")\n        x, y = batch\n'
            "        if torch.is_grad_enabled():",
        )
    )
    for run, args in (("first", "updates=4"), ("first", "updates=6 resume_allow=[updates]")):
        line = f"train --task mine.py run={run} device=cpu monitor=off evaluate.every=100 {args}"
        result = server.run(line, tmp_path)
        assert result.code == 0, result.err
    one, other = 4, 2
    evaluation = "e" * 2  # ten samples in batches of 8
    checks = "eee" * 3  # the metrics draw from the generator of NumPy, so they are computed again
    attributes = "ttt"  # another check, because the evaluation changes attributes of the task
    expected = f"{checks}{'t' * one}{evaluation}{attributes}{'t' * other}{evaluation}"
    assert (tmp_path / "calls").read_text() == expected


@pytest.mark.parametrize(
    "kind", [tuple, list, lambda pair: UserDict(x=pair[0], y=pair[1])], ids=["tuple", "list", "dict"]
)
def test_the_check_does_not_change_the_batch(kind: Callable[[Any], Any]) -> None:
    x, y = batch_of()
    assert not find_message(in_place("sum"), kind((x, y)))
    assert torch.equal(x, batch_of()[0])
    assert torch.equal(y, batch_of()[1])
    assert find_message(in_place("mean"), kind((x, y)))


@pytest.mark.parametrize(
    ("third", "is_refused"),
    [
        (lambda x, y: (x[:, 0], torch.ones(len(x))), True),  # not summed over the samples
        (lambda x, y: (x.sum(0), torch.full((WIDTH,), len(x))), False),
        (lambda x, y: (len(y), 1), False),
        (lambda x, y: ((y >= 1).sum(), 1), False),
        (lambda x, y: (y.unique().numel(), CLASSES), False),
        (lambda x, y: (x.square().mean(), 1), False),
        (lambda x, y: (x.square().mean(), len(y)), True),
    ],
    ids=[
        "values of samples",
        "sum per column",
        "items per micro-batch",
        "positives per micro-batch",
        "share of classes",
        "mean",
        "mean with a count",
    ],
)
def test_an_extra_metric_may_have_a_constant_count(third: Callable[..., Any], is_refused: bool) -> None:
    def loss(model: nn.Module, batch: Any) -> Any:
        x, y = batch
        return F.cross_entropy(model(x), y, reduction="sum"), len(y), {"further": third(x, y)}

    assert ("third value" in find_message(loss)) == is_refused
