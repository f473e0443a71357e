"""The kernels of torch.nn.SyncBatchNorm, which torch has only for CUDA, written with operators of the stand-in.

Sources: torch/nn/modules/_functions.py, which calls them; aten/src/ATen/native/cuda/Normalization.cuh of torch 2.13.
"""

from __future__ import annotations

from typing import Any

_LIBRARIES: list[Any] = []  # kept alive, because a deleted library is unregistered


def give_batch_norm() -> None:
    """Register the kernels for the device type "cuda"."""
    import torch

    library = torch.library.Library("aten", "IMPL")
    for kernel in (stats, gather_stats_with_counts, elemt, backward_reduce, backward_elemt):
        library.impl(f"batch_norm_{kernel.__name__}", kernel, "CUDA")
    _LIBRARIES.append(library)


def stats(x: Any, eps: float) -> tuple[Any, Any]:
    """Return the mean and 1 / standard deviation of each channel."""
    rows = _rows(x)
    return rows.mean(0), (rows.var(0, correction=0) + eps).rsqrt()


def gather_stats_with_counts(
    x: Any, means: Any, inverses: Any, running_mean: Any, running_var: Any, momentum: float, eps: float, counts: Any
) -> tuple[Any, Any]:
    """Combine the statistics of all ranks, weighted by their numbers of rows, and update the running statistics."""
    share = (counts / counts.sum()).to(means.dtype)[:, None]
    mean = (share * means).sum(0)
    variance = (share * (inverses**-2 - eps + (means - mean) ** 2)).sum(0)
    if running_mean is not None:
        total = counts.sum().to(variance.dtype)
        running_mean.copy_((1 - momentum) * running_mean + momentum * mean)
        running_var.copy_((1 - momentum) * running_var + momentum * variance * total / (total - 1))
    return mean, (variance + eps).rsqrt()


def elemt(x: Any, weight: Any, bias: Any, mean: Any, inverse: Any, eps: float) -> Any:
    """Return the normalized values."""
    result = (x - _over(mean, x)) * _over(inverse, x)
    result = result if weight is None else result * _over(weight, x)
    return (result if bias is None else result + _over(bias, x)).to(x.dtype)


def backward_reduce(
    grad: Any, x: Any, mean: Any, inverse: Any, weight: Any, needs_x: bool, needs_weight: bool, needs_bias: bool
) -> tuple[Any, Any, Any, Any]:
    """Return the sums of the gradient and of its products with x - mean, and the gradients of weight and bias."""
    rows, deviations = _rows(grad), _rows(x) - mean
    sum_of_grad, sum_of_products = rows.sum(0), (rows * deviations).sum(0)
    return sum_of_grad, sum_of_products, sum_of_products * inverse, sum_of_grad.clone()


def backward_elemt(
    grad: Any, x: Any, mean: Any, inverse: Any, weight: Any, sum_of_grad: Any, sum_of_products: Any, counts: Any
) -> Any:
    """Return the gradient of the input, computed from sums over all ranks."""
    total = counts.sum().to(mean.dtype)
    scale = inverse if weight is None else inverse * weight
    of_mean, of_variance = sum_of_grad / total, sum_of_products / total * inverse**2
    result = (grad - _over(of_mean, x) - (x - _over(mean, x)) * _over(of_variance, x)) * _over(scale, x)
    return result.to(x.dtype)


def _rows(x: Any) -> Any:
    """Reshape (batch, channels, ...) to (rows, channels) in float32."""
    return x.float().transpose(0, 1).flatten(1).T


def _over(channels: Any, x: Any) -> Any:
    return channels.view(1, -1, *[1] * (x.dim() - 2))
