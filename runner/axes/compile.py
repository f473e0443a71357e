"""Apply torch.compile to the model in place; the names in its state_dict do not change.

Keys that several options share:

backend    inductor: generate kernels; eager and aot_eager: only trace, to debug compilation
dynamic    true: one dynamic-shape kernel; false: one per shape; null: specialize on the first shape, then generalize
fullgraph  raise an error if the model cannot be compiled as one graph
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn

from runner.base import noise
from runner.base.accelerator import get_accelerator
from runner.base.compilers import check_capability, find_missing_compiler
from runner.base.errors import ConfigError
from runner.base.values import Auto, NonNegative

# torch itself caches compiled code on disk between runs, in the folder that host/scratch.private_compile_cache sets.


# The function that a run calls at the start of each forward pass, if any.
BeginForward = Callable[[], None]

_FIRST_PART_BYTES = 1 << 20  # small, as in DistributedDataParallel, so that communication starts early


def off(model: nn.Module, blocks: Sequence[nn.Module], device: torch.device) -> None:
    """Run the model eagerly."""


def default(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    device: torch.device,
    *,
    backend: Literal["inductor", "eager", "aot_eager"] = "inductor",
    dynamic: bool | None = None,
    fullgraph: bool = False,
    split_mib: NonNegative | Auto = "auto",
) -> None:
    """Compile the whole model.

    split_mib  MiB of parameters after which the graph is split, so that ranks exchange the gradients of one part while
               another part is computed; 0: one graph; auto: 25 with parallelism=ddp, else 0
    Raises ConfigError if the compiler that inductor needs is missing.
    Source: torch.compile.
    """
    _check_compiler(device, backend)
    size = 0 if split_mib == "auto" else int(split_mib * (1 << 20))
    _compile(model, backend=_split_backend(backend, size) if size else backend, dynamic=dynamic, fullgraph=fullgraph)


def reduce_overhead(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    device: torch.device,
    *,
    dynamic: bool | None = None,
    fullgraph: bool = False,
) -> BeginForward | None:
    """Compile the whole model and replay it as CUDA graphs: less launch overhead, more memory.

    Raises ConfigError if the compiler that inductor needs is missing.
    Source: torch.compile, mode "reduce-overhead".
    """
    _check_compiler(device, "inductor")
    if device.type != "cuda":
        warnings.warn(f"compile=reduce-overhead is the same as compile=default on {device.type}", stacklevel=2)
    _compile(model, mode="reduce-overhead", dynamic=dynamic, fullgraph=fullgraph)
    return _use_cuda_graphs(model) if device.type == "cuda" else None


def max_autotune(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    device: torch.device,
    *,
    cuda_graphs: bool = True,
    dynamic: bool | None = None,
    fullgraph: bool = False,
) -> BeginForward | None:
    """Compile the whole model and benchmark several kernels per matrix product; the first update takes minutes.

    cuda_graphs  also use CUDA graphs
    Raises ConfigError if the compiler that inductor needs is missing.
    Source: torch.compile, modes "max-autotune" and "max-autotune-no-cudagraphs".
    """
    _check_compiler(device, "inductor")
    mode = "max-autotune" if cuda_graphs else "max-autotune-no-cudagraphs"
    _compile(model, mode=mode, dynamic=dynamic, fullgraph=fullgraph)
    return _use_cuda_graphs(model) if cuda_graphs and device.type == "cuda" else None


def regional(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    device: torch.device,
    *,
    backend: Literal["inductor", "eager", "aot_eager"] = "inductor",
    dynamic: bool | None = None,
    fullgraph: bool = False,
) -> None:
    """Compile each of the task's blocks; equal blocks share compiled code, which shortens the first update.

    fullgraph  raise an error if a block cannot be compiled as one graph
    Raises ConfigError if the compiler that inductor needs is missing.
    Source: https://docs.pytorch.org/tutorials/recipes/regional_compilation.html
    """
    _check_compiler(device, backend)
    if not blocks:
        warnings.warn("compile=regional compiles the whole model, because the task defines no blocks", stacklevel=2)
    for part in dict.fromkeys(blocks) if blocks else [model]:
        _compile(part, backend=backend, dynamic=dynamic, fullgraph=fullgraph)


def nothing_was_compiled() -> bool:
    """Return whether this process has compiled no graph, for example because the task never calls the model itself."""
    dynamo = sys.modules.get("torch._dynamo.utils")  # private; absent if nothing has imported the compiler
    return dynamo is None or not dynamo.counters["stats"].get("unique_graphs")


def _compile(module: nn.Module, **options: Any) -> None:
    noise.exclude_from_graphs()
    if not type(module).forward.__module__.startswith("torch.nn."):
        module.compile(**options)
        return
    # Dynamo skips frames of torch.nn, so it would skip a model that is a bare nn.Sequential. Such a model needs a frame
    # outside torch.nn around it, which torch.compile(module) adds, but Module.compile does not. Checked on torch 2.13.
    call: Callable[..., Any] = module._call_impl

    def framed(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    module._call_impl = framed  # type: ignore[method-assign]
    try:
        module.compile(**options)
    finally:
        del module._call_impl


def _use_cuda_graphs(module: nn.Module) -> BeginForward:
    """Return the function that starts an iteration of CUDA graphs.

    The outputs of an iteration overwrite those of the previous one. Without this function, torch starts an iteration at
    each call of the model while no backward pass is pending, so in an evaluation the second call for a batch would
    overwrite the output of the first. Once the function has been called, torch starts no iterations by itself.
    Source: torch.compiler.cudagraph_mark_step_begin; GenerationTracker in cudagraph_trees.py of torch 2.13.
    """
    _copy_gradients_before_replay(module)
    return torch.compiler.cudagraph_mark_step_begin


def _copy_gradients_before_replay(module: nn.Module) -> None:
    """Before each call, copy gradients out of the memory of CUDA graphs, because the call overwrites them.

    Autograd does not copy the first gradient of a parameter, so it stays in the memory of the graph. The backward pass
    of the next micro-batch would add to it, for which torch raises an error. Without gradient accumulation, there are
    no gradients to copy here. Gradients of fsdp are DTensors in the memory of its reduce-scatter and need no copy.
    """
    # Private, checked on torch 2.13: a forward pre-hook would become part of the graph, and could not run before it.
    compiled: Callable[..., Any] = module._compiled_call_impl  # type: ignore[assignment]
    copied: dict[nn.Parameter, int] = {}  # address of the copied gradient, which is never in the memory of a graph

    def call(*args: Any, **kwargs: Any) -> Any:
        for parameter in module.parameters():
            gradient = parameter.grad
            if type(gradient) is torch.Tensor and copied.get(parameter) != gradient.data_ptr():
                parameter.grad = gradient.clone()
                copied[parameter] = parameter.grad.data_ptr()
        return compiled(*args, **kwargs)

    module._compiled_call_impl = call


def _split_backend(backend: str, part_bytes: int) -> Callable[..., Any]:
    """Return a backend that compiles a graph in parts with at least `part_bytes` of parameters each.

    The backward pass of a compiled graph returns all gradients at its end, so communication could not overlap with it.
    DDPOptimizer, which splits graphs for DistributedDataParallel, is private; checked on torch 2.13.
    """
    from torch._dynamo import lookup_backend  # imports the compiler, which takes seconds
    from torch._dynamo.backends.distributed import DDPOptimizer

    compile_part = lookup_backend(backend)

    def compile_parts(graph: Any, inputs: Any, **options: Any) -> Any:
        return DDPOptimizer(part_bytes, compile_part, min(_FIRST_PART_BYTES, part_bytes)).compile_fn(
            graph, inputs, **options
        )

    return compile_parts


def _check_compiler(device: torch.device, backend: str) -> None:
    """Raise ConfigError if this rank's machine has no compiler: the plan has checked only the machine of rank 0."""
    if backend != "inductor":
        return
    problem = check_capability(str(device), get_accelerator(device).capability())
    if problem := problem or find_missing_compiler(device.type):
        raise ConfigError(replace(problem, where="compile"))


COMPILES: Mapping[str, Callable[..., BeginForward | None]] = {
    "off": off,
    "default": default,
    "reduce-overhead": reduce_overhead,
    "max-autotune": max_autotune,
    "regional": regional,
}
