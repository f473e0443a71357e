"""Batch norms synchronized across the concurrent micro-batches of all ranks, weighted by their sizes.

Without synchronization, each rank normalizes over its own micro-batch, so unequal shares give unequal statistics. With
it, the micro-batches of all ranks form one batch, and running statistics are the same on every rank. Every rank must
run the same number of forward passes. A dummy pass (see `dummy_pass.py`) contributes a count of zero: it joins the
collectives and is normalized by the statistics of the other ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from runner.base.errors import ConfigError, Problem, TaskFault
from runner.base.text import abbreviate
from runner.distributed.dummy_pass import CollectiveCounter
from runner.distributed.world import World


def synchronize_batch_norms(model: nn.Module, world: World) -> nn.Module:
    """Synchronize every batch norm of the model across all ranks during training; evaluation is not affected.

    Replaces the class of the norms in place: names, parameters, buffers and hooks remain. On a GPU this uses
    torch's nn.SyncBatchNorm. Call it before the model is wrapped or compiled. Returns the model.
    Raises ConfigError, on every rank, if another kind of batch norm is trained, such as a subclass with its own forward
    method, which would not be synchronized. The model is then unchanged.
    Sources: Ioffe and Szegedy, Batch Normalization, ICML 2015; the statistics of micro-batches of unequal size are
    combined as in Chan, Golub and LeVeque, Updating Formulae and a Pairwise Algorithm for Computing Sample Variances,
    1979.
    """
    if world.world_size > 1:
        _check_supported(model)
        for module in model.modules():
            if type(module) in _SYNCED_CLASSES:
                if world.device.type == "cuda":
                    module.__dict__["process_group"] = None  # all ranks
                    module.__class__ = _GPUSyncBatchNorm
                else:
                    module.__class__ = _SYNCED_CLASSES[type(module)]
    return model


def _check_supported(model: nn.Module) -> None:
    others = {
        name: type(module).__name__
        for name, module in training_modules(model)
        if isinstance(module, nn.modules.batchnorm._BatchNorm)
        and type(module) not in _SYNCED_CLASSES
        and not isinstance(module, CollectiveCounter)
    }
    if others:
        named = abbreviate([f"{name or 'the model'} ({kind})" for name, kind in others.items()], _MAX_NAMED)
        what = f"sync supports only torch's BatchNorm1d, 2d and 3d, but the model has other batch norms: {named}"
        fix = "use parallelism.batch_norm=per_rank, or nn.BatchNorm1d, nn.BatchNorm2d or nn.BatchNorm3d in the model"
        raise ConfigError(Problem(what, "parallelism.batch_norm", fix))


def training_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return (name, module) of the modules in training mode after `model.train()`, which a task may override."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.train()
        return [(name, module) for name, module in model.named_modules() if module.training]
    finally:
        for module, mode in modes:
            module.training = mode


class _SyncedBatchNorm(CollectiveCounter, nn.modules.batchnorm._BatchNorm):
    """Synchronized batch norm for any device; a mixin for torch's 1-d, 2-d and 3-d classes, which check the shape."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        if not self.training:
            return super().forward(input)
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        output, mean, variance, total = _Normalize.apply(input, self.weight, self.bias, self.eps, self.is_counted)  # type: ignore[no-untyped-call]
        self._update_running_statistics(mean, variance, total)
        assert isinstance(output, Tensor)
        return output

    @torch.no_grad()
    def _update_running_statistics(self, mean: Tensor, variance: Tensor, total: Tensor) -> None:
        """Update the running statistics as torch does: unbiased variance; cumulative average if `momentum` is None."""
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        step: Any = 1.0 / self.num_batches_tracked.double() if self.momentum is None else self.momentum
        unbiased = variance * (total / (total - 1))
        self.running_mean.add_((mean - self.running_mean) * step)
        self.running_var.add_((unbiased - self.running_var) * step)


class _BatchNorm1d(_SyncedBatchNorm, nn.BatchNorm1d):
    pass


class _BatchNorm2d(_SyncedBatchNorm, nn.BatchNorm2d):
    pass


class _BatchNorm3d(_SyncedBatchNorm, nn.BatchNorm3d):
    pass


class _GPUSyncBatchNorm(CollectiveCounter, nn.SyncBatchNorm):
    """torch's synchronized batch norm, extended so that a dummy pass joins its collectives with an empty batch."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        if self.is_counted or not self.training:
            return super().forward(input)
        empty = input[:0]
        if empty.dtype in (torch.float16, torch.bfloat16):
            # torch sends the statistics of a batch as float32, but those of an empty batch in the dtype of the input.
            empty = empty.float()
        joined: Tensor = super().forward(empty)
        batch_alone = self.running_mean is None
        output = F.batch_norm(
            input, self.running_mean, self.running_var, self.weight, self.bias, batch_alone, 0.0, self.eps
        )
        # The sum of the empty batch is zero; adding it makes the backward pass join the collectives too.
        return output + joined.sum().to(output.dtype)


class _Normalize(torch.autograd.Function):
    """(x, weight, bias, eps, is_counted) -> (normalized x, mean (C,), variance (C,), values per channel ())."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, is_counted: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        mean, variance, total = _gather_statistics(wide, is_counted)
        shape = _per_channel(x)
        scale = (variance + eps).rsqrt()
        hat = (wide - mean.view(shape)) * scale.view(shape)
        ctx.save_for_backward(hat, weight, scale, total)
        ctx.is_counted = is_counted
        output = hat if weight is None else hat * weight.view(shape)
        output = output if bias is None else output + bias.view(shape)
        ctx.mark_non_differentiable(mean, variance, total)
        return output.to(x.dtype), mean, variance, total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        hat, weight, scale, total = ctx.saved_tensors
        if not ctx.is_counted:  # not a product with zero: normalized values may be infinite
            hat = torch.zeros_like(hat)
        output_gradient = gradients[0].to(hat.dtype) if ctx.is_counted else hat
        dims, shape = _all_but_channels(hat), _per_channel(hat)
        bias_gradient, weight_gradient = output_gradient.sum(dims), (output_gradient * hat).sum(dims)
        x_gradient = None
        if ctx.needs_input_grad[0]:  # the same on all ranks
            both = torch.stack([bias_gradient, weight_gradient])  # a copy: the sums over the ranks are not returned
            dist.all_reduce(both)
            mean, slope = both / total
            inner = output_gradient - mean.view(shape) - hat * slope.view(shape) if ctx.is_counted else hat
            x_gradient = inner * (scale if weight is None else scale * weight).view(shape)
            x_gradient = x_gradient.to(gradients[0].dtype)
        weight_output = weight_gradient.to(weight.dtype) if ctx.needs_input_grad[1] else None
        bias_output = bias_gradient.to(weight.dtype) if ctx.needs_input_grad[2] else None
        return x_gradient, weight_output, bias_output, None, None


def _gather_statistics(x: Tensor, is_counted: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean and variance (C,) over the values of all ranks, and the number of values per channel ()."""
    dims = _all_but_channels(x)
    channels = x.shape[1]
    mine = x.new_zeros(2 * channels + 1)
    if is_counted and x.numel():
        variance, mean = torch.var_mean(x, dims, correction=0)
        mine = torch.cat([mean, variance, mine.new_tensor([x.numel() // channels])])
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, mine)
    means, variances, num = torch.split(torch.stack(rows), [channels, channels, 1], dim=1)
    total = num.sum()
    if total.device.type == "cpu" and total <= 1:
        raise TaskFault(
            f"a batch norm needs more than one value per channel over all ranks, but has {int(total)}",
            where="parallelism.batch_norm=sync",
            fix="use a larger micro_batch_size",
        )
    mean = (means * num).sum(0) / total
    variance = ((variances + (means - mean).square()) * num).sum(0) / total
    return mean, variance, total


def _all_but_channels(x: Tensor) -> list[int]:
    return [dim for dim in range(x.dim()) if dim != 1]


def _per_channel(x: Tensor) -> list[int]:
    return [-1 if dim == 1 else 1 for dim in range(x.dim())]


_SYNCED_CLASSES: dict[type[nn.Module], type[_SyncedBatchNorm]] = {
    nn.BatchNorm1d: _BatchNorm1d,
    nn.BatchNorm2d: _BatchNorm2d,
    nn.BatchNorm3d: _BatchNorm3d,
}

_MAX_NAMED = 5
"""Maximum number of modules that an error lists; a ResNet-50 has 53 batch norms."""
