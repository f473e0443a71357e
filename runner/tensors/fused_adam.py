"""Adam and AdamW that call torch's fused kernel without the Python code around it.

torch's `step` spends 100 us on wrappers, on groups of devices and on checks of options that are never used here: as
much as a small model needs for its forward pass. The results are bit-identical. Checked on torch 2.13.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer
from torch.optim import optimizer as torch_optimizer


class FusedAdam(Adam):
    """torch.optim.Adam with `fused=True`."""

    kind = "torch.Adam"  # in checkpoints

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        if not _step(self, torch._fused_adam_):
            _adam_step(self)

    step.hooked = True  # type: ignore[attr-defined]  # torch would wrap it at construction


class FusedAdamW(AdamW):
    """torch.optim.AdamW with `fused=True`."""

    kind = "torch.AdamW"

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        if not _step(self, torch._fused_adamw_):
            _adamw_step(self)

    step.hooked = True  # type: ignore[attr-defined]


def _with_profile_hook(step: Any) -> Any:
    return step if getattr(step, "hooked", False) else Optimizer.profile_hook_step(step)


_adam_step, _adamw_step = _with_profile_hook(Adam.step), _with_profile_hook(AdamW.step)


_ONE = torch.tensor(1.0, device="cpu")


@torch.no_grad()
def _step(optimizer: Optimizer, kernel: Any) -> bool:
    """Update the parameters with one kernel per group; return False, without updating any, if torch's `step` is needed.

    It is needed with hooks or a profiler, for a learning rate that is a tensor, for several dtypes or devices, and for
    gradients that are not sharded like their weights. At the first step, it would import torch's compiler, which takes
    two seconds; the state is therefore created here.
    """
    if _has_observers(optimizer):
        return False
    calls = []
    for group in optimizer.param_groups:
        weights = [weight for weight in group["params"] if weight.grad is not None]
        if not _share_dtype_and_device(weights) or isinstance(group["lr"], Tensor):
            return False
        is_sharded = any(hasattr(weight, "device_mesh") for weight in weights)  # DTensors
        if is_sharded and not all(_placements(weight.grad) == _placements(weight) for weight in weights):
            return False
        states = [optimizer.state[weight] for weight in weights]
        if not all(states):
            optimizer._init_group(group, [], [], [], [], [], [])  # type: ignore[attr-defined]  # creates missing states
        calls.append((group, weights, states, is_sharded))
    found_inf = getattr(optimizer, "found_inf", None)
    scales = {"grad_scale": getattr(optimizer, "grad_scale", None), "found_inf": found_inf}
    for group, weights, states, is_sharded in calls:
        if not weights:
            continue
        steps = [state["step"] for state in states]
        if steps[0].device.type == "cpu":  # here, foreach would convert the Python number 1 once per tensor
            torch._foreach_add_(steps, _ONE, alpha=1.0)
        else:
            torch._foreach_add_(steps, 1)
        tensors = [
            weights,
            [weight.grad for weight in weights],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
        ]
        kernel(
            *(map(_shards, tensors) if is_sharded else tensors),
            [],
            steps,
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
            **scales,
        )
        if found_inf is not None:
            torch._foreach_sub_(steps, [found_inf] * len(steps))
    return True


def skip_compiler_import() -> None:
    """Keep torch's optimizers from importing torch._dynamo, which takes two seconds, at the first call of a method.

    torch wraps these methods to exclude them from compiled graphs (torch._disable_dynamo, 2.11 to 2.13), and caches the
    wrapped method in `__dynamo_disable`. Here, no graph contains them, so the plain method is stored there instead.
    Does nothing if the compiler is imported.
    """
    if "torch._dynamo" in sys.modules:
        return
    for method in vars(Optimizer).values():
        code = getattr(method, "__code__", None)
        if code is not None and code.co_filename == torch._compile.__file__:
            method.__wrapped__.__dynamo_disable = method.__wrapped__


def _has_observers(optimizer: Optimizer) -> bool:
    return bool(
        torch_optimizer._global_optimizer_pre_hooks
        or torch_optimizer._global_optimizer_post_hooks
        or optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or torch._C._autograd._profiler_enabled()
    )


def _share_dtype_and_device(weights: list[Tensor]) -> bool:
    return len({(weight.dtype, weight.device) for weight in weights}) <= 1


def _placements(tensor: Any) -> Any:
    """Return how a DTensor is distributed; None for a plain tensor."""
    return getattr(tensor, "placements", None)


def _shards(tensors: Iterable[Any]) -> list[Tensor]:
    """Return the local tensors of DTensors with equal placements.

    Adam computes element by element, so it needs no other shards. With DTensors, torch would plan the sharding of each
    argument again.
    """
    return [getattr(tensor, "_local_tensor", tensor) for tensor in tensors]
