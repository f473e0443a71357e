"""Measure the cost of a model's layers on a device: bytes of parameters and activations, and seconds."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from runner.base.batch import map_tensors
from runner.tensors.module_buffers import restore_forward_state

ADAMW_BYTES = 16.0
"""Bytes per trained float32 parameter: 4 each for the value, the gradient and the two moments."""


@dataclass(frozen=True)
class LayerCost:
    """Cost of one layer.

    name              its name in the model, such as blocks.3
    num_trained       number of trained parameters
    constant_bytes    bytes of frozen parameters and buffers
    activation_bytes  bytes kept for the backward pass of one micro-batch; 0 if not measured
    seconds           duration of the forward and backward pass of one micro-batch; if not measured, the number of
                      parameters, which is used as a relative time
    """

    name: str
    num_trained: int
    constant_bytes: int
    activation_bytes: int = 0
    seconds: float = 0.0

    def state_bytes(self, bytes_per_parameter: float = ADAMW_BYTES) -> int:
        """Return the bytes that do not depend on the batch: parameters, gradients and optimizer state."""
        return math.ceil(self.num_trained * bytes_per_parameter) + self.constant_bytes


def estimate_costs(model: nn.Module, layers: Sequence[nn.Module]) -> list[LayerCost]:
    """Estimate costs without running the model. Parameters shared by several layers are counted in each."""
    costs = []
    for name, layer in zip(layer_names(model, layers), layers, strict=True):
        weights = list(layer.parameters())
        trained = sum(weight.numel() for weight in weights if weight.requires_grad)
        constant = [*layer.buffers(), *(weight for weight in weights if not weight.requires_grad)]
        count = sum(weight.numel() for weight in weights)
        costs.append(LayerCost(name, trained, sum(tensor.nbytes for tensor in constant), seconds=float(count)))
    return costs


def measure_costs(
    model: nn.Module,
    layers: Sequence[nn.Module],
    inputs: Sequence[Any],
    *,
    scale: float = 1.0,
    repeats: int = 3,
    synchronize: Callable[[], None] = lambda: None,
    weights: Callable[[nn.Module], AbstractContextManager[Any]] = nullcontext,
) -> list[LayerCost]:
    """Measure the cost of each layer by running the layers in sequence, each with the output of the previous one.

    Gradients, buffers, frozen parameters and random states are restored. Seconds are the median of several passes
    after a warm-up.

    inputs   arguments of the first layer; all layers and inputs must be on one device
    scale    micro-batch size divided by the batch size of `inputs`; multiplies all costs that depend on the batch
    repeats  number of timed passes
    weights  context manager that allocates the weights of a layer, for models on the meta device
    """
    costs: list[LayerCost] = []
    value: Any = tuple(inputs)
    devices = {tensor.device for tensor in model.parameters() if tensor.device.type == "cuda"}
    modules = [module for layer in layers for module in layer.modules()]
    with restore_forward_state(modules), torch.random.fork_rng(devices=list(devices)), torch.enable_grad():
        for number, (cost, layer) in enumerate(zip(estimate_costs(model, layers), layers, strict=True)):
            # The first layer takes several arguments, the others the output of the previous layer.
            call = (lambda args, layer=layer: layer(*args)) if number == 0 else layer
            with weights(layer):
                saved, value_after = measure_saved_bytes(layer, call, detach_inputs(value))
                timed = [_time_pass(layer, call, detach_inputs(value), synchronize) for _ in range(repeats + 1)]
            seconds = timed[1:]  # without the warm-up
            costs.append(
                LayerCost(
                    cost.name,
                    cost.num_trained,
                    cost.constant_bytes,
                    math.ceil(saved * scale),
                    statistics.median(seconds) * scale,
                )
            )
            value = value_after
    return costs


def layer_names(model: nn.Module, layers: Sequence[nn.Module]) -> list[str]:
    """Return the name of each layer in the model; for a layer outside the model, the joined names of its parts."""
    module_names: dict[nn.Module, str] = {module: name for name, module in model.named_modules() if name}
    weight_names: dict[nn.Parameter, str] = {weight: name for name, weight in model.named_parameters()}
    names = []
    for number, layer in enumerate(layers):
        parts = [module_names[child] for child in layer.children() if child in module_names]
        parts += [weight_names[weight] for weight in layer.parameters(recurse=False) if weight in weight_names]
        names.append(module_names.get(layer) or "+".join(dict.fromkeys(parts)) or f"{type(layer).__name__} {number}")
    return names


def parameter_names(model: nn.Module, layer: nn.Module) -> Mapping[str, nn.Parameter]:
    """Return the layer's parameters by their names in the model."""
    weights = set(layer.parameters())
    return {name: weight for name, weight in model.named_parameters() if weight in weights}


@contextmanager
def record_saved_storages(ignored: Iterable[Tensor]) -> Iterator[Mapping[int, int]]:
    """Map each storage that autograd saves inside the context to its bytes. Storages of `ignored` tensors are skipped.

    Storages are identified by the private `_cdata`, because data_ptr() is 0 for all fake tensors.
    """
    excluded = {tensor.untyped_storage()._cdata for tensor in ignored}
    saved: dict[int, int] = {}

    def record(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in excluded:
            saved[storage._cdata] = storage.nbytes()
        # Returning the tensor itself would create a reference cycle if it is an output of the node that saves it.
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        yield saved


def measure_saved_bytes(layer: nn.Module, call: Callable[[Any], Any], value: Any) -> tuple[int, Any]:
    """Return the bytes that the layer saves for its backward pass, each storage once, and its detached output."""
    with record_saved_storages([*layer.parameters(), *layer.buffers()]) as storages:
        output = call(value)
    return sum(storages.values()), map_tensors(lambda tensor: tensor.detach(), output)


def _time_pass(layer: nn.Module, call: Callable[[Any], Any], value: Any, synchronize: Callable[[], None]) -> float:
    """Return the seconds of a forward and backward pass; leaves no gradient."""
    trained: list[Tensor] = [weight for weight in layer.parameters() if weight.requires_grad]
    map_tensors(lambda tensor: trained.append(tensor) if tensor.requires_grad else None, value)
    synchronize()
    start = time.perf_counter()
    output = call(value)
    outputs: list[Tensor] = []
    map_tensors(lambda tensor: outputs.append(tensor) if tensor.requires_grad else None, output)
    if outputs and trained:
        torch.autograd.grad(outputs, trained, [torch.ones_like(tensor) for tensor in outputs], allow_unused=True)
    synchronize()
    return time.perf_counter() - start


def detach_inputs(value: Any) -> Any:
    """Return a copy whose tensors require gradients if possible, like the activations that a stage receives."""
    # Cloned, because autograd forbids in-place operations, which a layer may contain, on a leaf.
    return map_tensors(
        lambda tensor: tensor.detach().requires_grad_().clone() if tensor.is_floating_point() else tensor, value
    )
