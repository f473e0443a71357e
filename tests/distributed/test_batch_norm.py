"""Synchronized batch norm gives the result of one process with all samples, whatever the shares of the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from runner.base.errors import ConfigError
from runner.distributed.batch_norm import synchronize_batch_norms
from runner.distributed.dummy_pass import run_dummy_pass, without_side_effects
from runner.distributed.world import World
from tests.distributed.ranks import CPU, run_ranks
from tests.rounding import PROMISED, allowed, distance, distance_of_each

SAMPLES = {1: (8, 4), 2: (8, 4, 3, 5), 3: (8, 4, 2, 3, 2)}


def make_model(dimensions: int, dtype: torch.dtype, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    convolution: Any = {1: nn.Linear, 2: nn.Conv2d, 3: nn.Conv3d}[dimensions]
    norm: Any = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}[dimensions]
    kernel = () if dimensions == 1 else (1,)
    layers = [convolution(4, 6, *kernel), norm(6, **options), nn.Tanh(), convolution(6, 3, *kernel), norm(3, **options)]
    model = nn.Sequential(*layers)
    for weight in model.parameters():
        nn.init.normal_(weight)
    return model.to(dtype)  # initialized in float32, so that every dtype has the same weights


def samples(dimensions: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return (torch.randn(SAMPLES[dimensions], generator=generator, dtype=torch.float64) * 3 + 1).to(dtype)


def loss_of(output: Tensor, first: int) -> Tensor:
    """Return a loss that weights each sample by its index in the global batch."""
    number = torch.arange(first, first + len(output), dtype=output.dtype).view(-1, *[1] * (output.dim() - 1))
    return (output * number.cos()).pow(3).sum()


def run_passes(
    world: World, dimensions: int, shares: Sequence[int], dtype: torch.dtype, passes: int = 2, **options: Any
) -> dict[str, Any]:
    """Return outputs, gradients of inputs and parameters, and buffers after passes over this rank's samples."""
    model = synchronize_batch_norms(make_model(dimensions, dtype, **options), world)
    first = sum(shares[: world.rank])
    mine = samples(dimensions, dtype)[first : first + shares[world.rank]].requires_grad_()
    outputs = [model(mine * factor) for factor in range(1, 1 + passes)]
    torch.autograd.backward([loss_of(output, first) for output in outputs])
    gradients = {name: world.sum(weight.grad.clone()) for name, weight in model.named_parameters()}  # type: ignore[union-attr]
    assert mine.grad is not None
    model.eval()
    return {
        "parts": [*[output.tolist() for output in outputs], mine.grad.tolist(), model(mine).tolist()],
        "gradients": {name: gradient.tolist() for name, gradient in gradients.items()},
        "buffers": {name: buffer.tolist() for name, buffer in model.named_buffers()},
    }


@pytest.mark.slow_beyond(1)
@pytest.mark.sampled(3)
@pytest.mark.parametrize("dimensions", [1, 2, 3])
@pytest.mark.parametrize("shares", [(5, 3), (1, 7), (2, 5, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["64", "32"])
def test_ranks_normalize_like_one_process_with_all_samples(
    dimensions: int, shares: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Rounding grows by 3 * 2 * 2: the loss is cubic, and each of two norms subtracts a mean and divides by a std."""
    alone = run_passes(World(CPU), dimensions, (8,), torch.float64)
    terms = 2 * samples(dimensions, dtype)[:, 0].numel()  # per channel, in two passes
    tolerance = allowed(dtype, terms=terms, growth=12.0)
    results = run_ranks(lambda world: run_passes(world, dimensions, shares, dtype), len(shares))
    for number, whole in enumerate(alone["parts"]):
        assert distance(whole, [row for result in results for row in result["parts"][number]]) <= tolerance
    for result in results:
        # The gradient of a bias before a norm is only rounding error, so the scale is that of all gradients.
        assert distance(alone["gradients"], result["gradients"]) <= tolerance
        assert distance_of_each(alone["buffers"], result["buffers"]) <= tolerance
        assert result["buffers"] == results[0]["buffers"]


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "options",
    [{"momentum": None}, {"momentum": 0.3, "eps": 0.1}, {"affine": False}, {"track_running_stats": False}],
    ids=str,
)
def test_options_work_as_in_one_process(options: dict[str, Any]) -> None:
    alone = run_passes(World(CPU), 2, (8,), torch.float64, passes=3, **options)
    results = run_ranks(lambda world: run_passes(world, 2, (5, 3), torch.float64, 3, **options), 2)
    # Without running statistics, evaluation normalizes by the current batch, which differs by rank.
    for number, whole in enumerate(alone["parts"][:-1]):
        assert distance(whole, [row for result in results for row in result["parts"][number]]) < PROMISED[torch.float64]
    for name, buffer in alone["buffers"].items():
        assert distance(buffer, results[1]["buffers"][name]) < PROMISED[torch.float64], name


def test_dummy_passes_do_not_change_running_statistics() -> None:
    def run(world: World) -> dict[str, Any]:
        model = synchronize_batch_norms(make_model(2, torch.float64), world)
        mine = samples(2, torch.float64)[5 * world.rank : 5 + 3 * world.rank]
        outputs = [model(mine)]
        torch.autograd.backward(loss_of(outputs[0], 5 * world.rank))
        before = {name: weight.grad.clone() for name, weight in model.named_parameters()}  # type: ignore[union-attr]
        if world.rank == 0:
            output = model(mine * 2)
            torch.autograd.backward(loss_of(output, 0))
            outputs.append(output)
        else:
            passes: Any = _Passes(model, lambda model, x: (loss_of(model(x), 5) * float("nan"), len(x)))
            run_dummy_pass(passes, mine * float("inf"), list(model.parameters()))
            assert all(torch.equal(before[name], weight.grad) for name, weight in model.named_parameters())  # type: ignore[arg-type]
        gradients = {name: world.sum(weight.grad).tolist() for name, weight in model.named_parameters()}  # type: ignore[arg-type]
        buffers = {name: buffer.tolist() for name, buffer in model.named_buffers()}
        return {"gradients": gradients, "buffers": buffers}

    model = make_model(2, torch.float64)
    x = samples(2, torch.float64)
    torch.autograd.backward([loss_of(model(x), 0), loss_of(model(x[:5] * 2), 0)])
    for result in run_ranks(run, 2):
        gradients = {name: weight.grad.tolist() for name, weight in model.named_parameters()}  # type: ignore[union-attr]
        assert distance(gradients, result["gradients"]) < PROMISED[torch.float64]
        for name, buffer in model.named_buffers():
            assert distance(buffer.tolist(), result["buffers"][name]) < PROMISED[torch.float64]


class _Passes:
    def __init__(self, model: nn.Module, loss: Any) -> None:
        self.model, self.loss = model, loss
        self.forward = torch.enable_grad


def test_dummy_passes_restore_buffers_and_frozen_parameters() -> None:
    model = make_model(1, torch.float64)
    frozen = model.get_parameter("0.bias").requires_grad_(False)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with without_side_effects(model):
        model(samples(1, torch.float64))
        frozen.add_(1)
        assert not torch.equal(before["1.running_mean"], model.get_buffer("1.running_mean"))
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_names_types_and_single_processes_are_unchanged() -> None:
    plain = make_model(2, torch.float32)
    assert synchronize_batch_norms(plain, World(CPU)) is plain
    assert type(plain[1]) is nn.BatchNorm2d

    def find_names(world: World) -> list[str]:
        model = synchronize_batch_norms(make_model(2, torch.float32), world)
        assert isinstance(model[1], nn.BatchNorm2d)  # type: ignore[index]
        return list(model.state_dict())

    assert run_ranks(find_names, 2) == [list(plain.state_dict())] * 2


class Activated(nn.BatchNorm2d):
    """A subclass that overrides forward, as in third-party models."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


class Frozen(nn.Sequential):
    """A model whose norms stay in evaluation mode."""

    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
        return self


def synchronize(model: nn.Module) -> list[list[str]]:
    """Synchronize the norms on two ranks. Return for each the message, the types of all modules and their modes."""

    def describe(world: World) -> list[Any]:
        messages = ""
        try:
            synchronize_batch_norms(model, world)
        except ConfigError as error:
            messages = str(error)
        modules = list(model.modules())
        return [messages, [type(module).__name__ for module in modules], [module.training for module in modules]]

    return run_ranks(describe, 2)


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("norm", "kind"),
    [
        (lambda: Activated(3), "Activated"),
        (nn.LazyBatchNorm2d, "LazyBatchNorm2d"),
        (lambda: nn.SyncBatchNorm(3), "SyncBatchNorm"),
    ],
    ids=["subclass", "lazy", "torch's own"],
)
@pytest.mark.parametrize("mode", [True, False])
def test_unsupported_norms_are_rejected_on_all_ranks(norm: Any, kind: str, mode: bool) -> None:
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Sequential(nn.Tanh(), norm())).train(mode)
    before = [type(module).__name__ for module in model.modules()]
    for messages, types, training in synchronize(model):
        assert messages.startswith("parallelism.batch_norm: ")
        assert f"norms: 1.1 ({kind})\n" in messages
        assert "parallelism.batch_norm=per_rank" in messages
        assert types == before
        assert training == [mode] * len(before)


def test_the_error_names_at_most_five_norms() -> None:
    for messages, _, _ in synchronize(nn.Sequential(*(Activated(3) for _ in range(7)))):
        assert "norms: 0 (Activated), 1 (Activated)," in messages
        assert "4 (Activated) and 2 more\n" in messages
    assert "model (Activated)\n" in synchronize(Activated(3))[0][0]


def test_norms_in_eval_mode_may_be_of_any_kind() -> None:
    for messages, types, training in synchronize(Frozen(Activated(3), nn.BatchNorm1d(3))):
        assert messages == ""
        assert types == ["Frozen", "Activated", "_BatchNorm1d"]
        assert training == [True] * 3


def test_conversion_is_idempotent_and_one_process_accepts_any_norm() -> None:
    def find_names(world: World) -> list[str]:
        return [
            type(module).__name__
            for module in synchronize_batch_norms(synchronize_batch_norms(make_model(2, torch.float32), world), world)
        ]  # type: ignore[arg-type, union-attr, attr-defined]

    assert run_ranks(find_names, 2)[0].count("_BatchNorm2d") == 2
    assert type(synchronize_batch_norms(Activated(3), World(CPU))) is Activated


def test_one_value_per_channel_is_rejected_on_all_ranks() -> None:
    def single_value(world: World) -> str:
        model = synchronize_batch_norms(nn.BatchNorm1d(3), world)
        try:
            with without_side_effects(model) if world.rank else torch.enable_grad():
                model(torch.zeros(1, 3))
        except Exception as error:
            return str(error)
        return ""

    for messages in run_ranks(single_value, 2):
        assert "per channel" in messages
        assert "has 1\n" in messages


def test_half_precision_inputs_are_normalized_in_float32() -> None:
    def output(world: World) -> list[Any]:
        model = synchronize_batch_norms(nn.BatchNorm1d(3), world)
        x = (torch.randn(16, 3, generator=torch.Generator().manual_seed(2)) + 100)[8 * world.rank :][:8]
        made = model(x.to(torch.bfloat16))
        assert made.dtype == torch.bfloat16
        return [made.float().tolist(), model.running_mean.tolist()]  # type: ignore[union-attr, operator]

    x = (torch.randn(16, 3, generator=torch.Generator().manual_seed(2)) + 100).to(torch.bfloat16)
    expected = nn.BatchNorm1d(3)(x.float())
    got = run_ranks(output, 2)
    assert distance(expected.tolist(), got[0][0] + got[1][0]) < 2**-8
