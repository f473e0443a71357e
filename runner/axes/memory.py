"""Memory options of the model: activation checkpointing, memory layout, and limits.

Keys that several options share:

channels_last  use the channels-last memory format for convolutions; auto: on cuda and cpu, if the model has any
fraction       maximum fraction of GPU memory for this process; null: all
allocator      settings of the CUDA caching allocator, such as expandable_segments:True; null: PyTorch's default
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as checkpoint_activations
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from runner.base.accelerator import get_accelerator
from runner.base.errors import ConfigError, Problem
from runner.base.values import Auto, Positive, PositiveFraction, PositiveInt
from runner.config.allocator_settings import ALLOCATOR_VARIABLE, allocator_environment

Lines = tuple[str, ...]  # what was applied, for the start report


def none(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    device: torch.device,
    *,
    channels_last: Auto | bool = "auto",
    fraction: PositiveFraction | None = None,
    allocator: str | None = None,
) -> Lines:
    """Keep all activations for the backward pass.

    Call before compiling, wrapping and building the optimizer.
    """
    return _report(model, device, channels_last=channels_last, fraction=fraction, allocator=allocator)


def checkpoint(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    device: torch.device,
    *,
    every: PositiveInt = 1,
    channels_last: Auto | bool = "auto",
    fraction: PositiveFraction | None = None,
    allocator: str | None = None,
) -> Lines:
    """Keep only the inputs of the task's blocks and recompute activations in the backward pass.

    Gradients, including those with dropout, are bitwise equal to those of memory=none; forward passes without gradients
    are not affected. With a 16-bit precision and several blocks, the 16-bit copies of weights are freed after each
    block, unless modules share weights. If a block is called twice (as in a loss with two forward passes), or another
    module is called both before and after a block, the gradients of the two calls are then summed in float32 instead of
    16 bits, so they differ by rounding.

    every          checkpoint every n-th block
    Call before compiling, wrapping and building the optimizer.
    Source: Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016.
    """
    chosen = blocks[::every]
    _checkpoint_blocks(model, blocks, chosen)
    summary = _describe_checkpointing(chosen, blocks, "recomputed in the backward pass")
    return _report(model, device, summary, channels_last=channels_last, fraction=fraction, allocator=allocator)


def selective(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    device: torch.device,
    *,
    save: Literal["matmul", "attention"] = "matmul",
    channels_last: Auto | bool = "auto",
    fraction: PositiveFraction | None = None,
    allocator: str | None = None,
) -> Lines:
    """Keep the inputs of the task's blocks and their costly results; recompute cheap results.

    Gradients are the same as with memory=checkpoint; forward passes without gradients are not affected.

    save           matmul: keep the results of matrix products, convolutions and attention; attention: keep only those
                   of attention
    Call before compiling, wrapping and building the optimizer.
    Source: Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, 2022;
            torch.utils.checkpoint.create_selective_checkpoint_contexts.
    """
    attention = [
        getattr(torch.ops.aten, name).default for name in _ATTENTION_OPERATIONS if hasattr(torch.ops.aten, name)
    ]
    products = [getattr(torch.ops.aten, name).default for name in _PRODUCT_OPERATIONS]
    contexts = partial(create_selective_checkpoint_contexts, attention + (products if save == "matmul" else []))
    _checkpoint_blocks(model, blocks, blocks, context_fn=contexts)
    kept = "matrix products and attention" if save == "matmul" else "attention"
    summary = _describe_checkpointing(blocks, blocks, f"recomputed in the backward pass except {kept}")
    return _report(model, device, summary, channels_last=channels_last, fraction=fraction, allocator=allocator)


def budget(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    device: torch.device,
    *,
    limit_gib: Positive | None = None,
    recompute: Auto | list[int] = "auto",
    channels_last: Auto | bool = "auto",
    fraction: PositiveFraction | None = None,
    allocator: str | None = None,
) -> Lines:
    """Recompute only as many of the task's blocks as the device's memory requires.

    Gradients are the same as with memory=checkpoint; forward passes without gradients are not affected. The plan traces
    the run on fake tensors and recomputes the blocks that free the most bytes per operation first, until the predicted
    memory is below the limit.

    limit_gib      memory limit on the device in GiB; null: all of its memory
    recompute      indices of the blocks to recompute, without duplicates; auto: chosen by the plan, or all if it could
                   not trace the run
    Call before compiling, wrapping and building the optimizer. Raises ConfigError for a block index out of range.
    Source: Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016; Korthikanti et al., 2022, on choosing.
    """
    listed, blocks = blocks, list(dict.fromkeys(blocks))
    unknown = [number for number in recompute if not 0 <= number < len(blocks)] if recompute != "auto" else []
    if unknown:
        what = f"there is no block {unknown[0]}: the task has {len(blocks)} blocks, numbered from 0"
        raise ConfigError(Problem(what, "memory.recompute", "use memory.recompute=auto"))
    chosen = list(blocks) if recompute == "auto" else [blocks[number] for number in recompute]
    _checkpoint_blocks(model, listed, chosen)
    summary = _describe_checkpointing(chosen, blocks, "recomputed in the backward pass")
    return _report(model, device, summary, channels_last=channels_last, fraction=fraction, allocator=allocator)


@contextmanager
def recompute_blocks(model: nn.Module, blocks: Sequence[nn.Module], chosen: Iterable[int]) -> Iterator[None]:
    """Checkpoint the activations of these blocks inside the context, as memory=budget does."""
    unique = list(dict.fromkeys(blocks))
    before = {unique[number]: vars(unique[number]).get("forward") for number in chosen}
    _checkpoint_blocks(model, blocks, before)
    try:
        yield
    finally:
        for block, forward in before.items():
            if forward is None:
                del vars(block)["forward"]
            else:
                vars(block)["forward"] = forward


# Activation checkpointing


def _checkpoint_blocks(
    model: nn.Module, blocks: Sequence[nn.Module], chosen: Iterable[nn.Module], **options: Any
) -> None:
    frees = not _has_shared_weights(model, blocks)
    for block in dict.fromkeys(chosen):  # wrap a repeated block only once
        _checkpoint_forward(block, frees, **options)


def _has_shared_weights(model: nn.Module, blocks: Sequence[nn.Module]) -> bool:
    """Return whether autocast may convert a weight for several modules, or for a block that is used several times.

    A single block counts as shared: it may be called in a loop, and there is little to free. Repeated calls of one of
    several blocks cannot be seen before they happen. Embeddings do not count, because autocast does not convert them.
    """
    if len(set(blocks)) < max(len(blocks), 2):
        return True
    modules = [module for _, module in model.named_modules(remove_duplicate=False)]  # a module may occur several times
    layers = [module for module in modules if not isinstance(module, (nn.Embedding, nn.EmbeddingBag))]
    weights = [weight for module in layers for weight in module.parameters(recurse=False)]
    return len(set(weights)) < len(weights)


def _checkpoint_forward(block: nn.Module, frees_conversions: bool, **options: Any) -> None:
    """Replace the block's forward in place, which keeps the names in its state_dict.

    Autocast keeps the 16-bit copy of each weight until the end of the forward pass. For all blocks together, this takes
    half as much memory as the model in float32. With `frees_conversions`, the copies are freed after each block. A
    weight that is used several times would then be converted for each use, and its gradients would no longer be summed
    in 16 bits.
    """
    replaced = vars(block).get("forward")  # an earlier replacement, such as precision.keep_fp32
    inner: Callable[..., Any] = partial(_drop_self, replaced) if replaced else type(block).forward

    def forward(self: nn.Module, *inputs: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return inner(self, *inputs, **named)
        compute = partial(inner, self)  # Dynamo can trace a partial, but not the creation of a bound method
        outputs = checkpoint_activations(compute, *inputs, use_reentrant=False, **options, **named)
        if frees_conversions and not torch.compiler.is_compiling():  # compiled code does not use this cache
            torch.clear_autocast_cache()
        return outputs

    # Unlike a closure over the block, a bound method follows the block into a deep copy.
    vars(block)["forward"] = MethodType(forward, block)


def _drop_self(function: Callable[..., Any], _: nn.Module, *inputs: Any, **named: Any) -> Any:
    return function(*inputs, **named)


def _describe_checkpointing(chosen: Sequence[nn.Module], blocks: Sequence[nn.Module], how: str) -> str:
    if not blocks:
        warnings.warn("activation checkpointing has no effect: the task defines no blocks", stacklevel=3)
        return "activation checkpointing: no effect, the task defines no blocks"
    return f"activation checkpointing: {len(chosen)} of {len(blocks)} blocks {how}"


# Layout and limits


def _report(
    model: nn.Module,
    device: torch.device,
    checkpointing: str = "",
    *,
    channels_last: Literal["auto"] | bool,
    fraction: float | None,
    allocator: str | None,
) -> Lines:
    changed = _to_channels_last(model, device, channels_last)
    lines = [
        *([checkpointing] if checkpointing else []),
        *([f"channels_last: {changed} tensors changed"] if changed else []),
        *_limit_memory(device, fraction),
        *_report_allocator(device, allocator),
    ]
    return tuple(lines)


def _to_channels_last(model: nn.Module, device: torch.device, channels_last: Literal["auto"] | bool) -> int:
    """Convert the weights of 2-D convolutions to NHWC; return how many had a different layout."""
    if channels_last is False or (channels_last == "auto" and device.type not in ("cuda", "cpu")):
        return 0
    # Other 4-D parameters, such as position embeddings, gain nothing from it.
    weights = {
        module.weight
        for module in model.modules()
        if isinstance(module, (torch.nn.Conv2d, torch.nn.ConvTranspose2d)) and module.weight.dim() == 4
    }
    if channels_last is True and not weights:
        warnings.warn("memory.channels_last has no effect: the model has no 2-D convolutions", stacklevel=4)
    changed = [weight for weight in weights if not weight.is_contiguous(memory_format=torch.channels_last)]
    for weight in changed:
        weight.data = weight.data.contiguous(memory_format=torch.channels_last)
    return len(changed)


def _limit_memory(device: torch.device, fraction: float | None) -> list[str]:
    if fraction is None:
        return []
    if not get_accelerator(device).limit_memory(fraction):
        warnings.warn(f"memory.fraction has no effect on {device.type}", stacklevel=4)
        return [f"memory.fraction: no effect on {device.type}"]
    return [f"memory.fraction: at most {fraction:.0%} of the memory of {device}"]


def _report_allocator(device: torch.device, allocator: str | None) -> list[str]:
    """Report the allocator's settings, which torch read from the environment when it was imported."""
    requested = allocator_environment(allocator).get(ALLOCATOR_VARIABLE, "")
    actual = os.environ.get(ALLOCATOR_VARIABLE) or os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    if requested and device.type != "cuda":
        warnings.warn(f"memory.allocator has no effect on {device.type}", stacklevel=4)
        return [f"memory.allocator: no effect on {device.type}"]
    if requested and requested != actual:
        warnings.warn(
            f"memory.allocator has no effect: {ALLOCATOR_VARIABLE} is {actual or 'not set'} in this process",
            stacklevel=4,
        )
    return [f"memory.allocator: {actual}"] if actual else []


_PRODUCT_OPERATIONS = ("mm", "addmm", "bmm", "baddbmm", "convolution")
_ATTENTION_OPERATIONS = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)

MEMORIES: Mapping[str, Callable[..., Lines]] = {
    "none": none,
    "checkpoint": checkpoint,
    "selective": selective,
    "budget": budget,
}
