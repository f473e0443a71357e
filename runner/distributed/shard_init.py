"""Allocate a rank's part of a model that was built with deferred initialization, and compute its values."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from runner.distributed.deferred_init import DeferredInit, TensorRef
from runner.tensors.optimizer_state import first_local_row


@dataclass(frozen=True)
class DeferredModel:
    """A model without its large tensors.

    recording  record of the model's construction, from which the values of these tensors are computed
    loaded     names of tensors that need no values, because a checkpoint will replace them
    """

    recording: DeferredInit
    loaded: Collection[str] = ()

    def prepare(self, model: nn.Module, device: torch.device) -> DeferredShards:
        """Initialize what is not sharded: buffers and scalars.

        Must be called while the model still has the parameters with which it was constructed.
        """
        model._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))  # type: ignore[no-untyped-call]
        whole: dict[int, Tensor] = {}
        for module in model.modules():
            for key, buffer in module._buffers.items():
                if buffer is not None and self.recording.is_deferred(buffer):
                    if id(buffer) not in whole:
                        whole[id(buffer)] = self.recording.value(buffer).to(device)
                    module._buffers[key] = whole[id(buffer)]
            for key, weight in module._parameters.items():
                if weight is not None and not weight.dim() and self.recording.is_deferred(weight):
                    if id(weight) not in whole:
                        value = self.recording.value(weight).to(device)
                        whole[id(weight)] = nn.Parameter(value, requires_grad=weight.requires_grad)
                    module._parameters[key] = whole[id(weight)]  # type: ignore[assignment]
        refs = {
            name: self.recording.ref(weight)
            for name, weight in model.named_parameters(remove_duplicate=False)
            if self.recording.is_deferred(weight)
        }
        return DeferredShards(self, refs, device)

    def materialize(self, model: nn.Module, layers: Iterable[nn.Module], device: torch.device) -> None:
        """Allocate and compute the parameters of these layers in place, one at a time; tied ones stay tied."""
        loaded = {weight for name, weight in model.named_parameters(remove_duplicate=False) if name in self.loaded}
        for weight in self._deferred_parameters(layers):
            is_loaded = weight in loaded
            value = torch.empty_like(weight, device=device) if is_loaded else self.recording.value(weight).to(device)
            allocated = nn.Parameter(value, requires_grad=weight.requires_grad)
            vars(allocated).update(vars(weight))
            # In place, so that all modules that share the parameter get the new one.
            torch.utils.swap_tensors(weight, allocated)  # type: ignore[no-untyped-call]

    @contextmanager
    def materialized(self, layer: nn.Module) -> Iterator[None]:
        """Inside the context, replace a layer's deferred parameters with initialized ones on the CPU.

        The deferred parameters are not changed in place, because the graph of a pass may outlive the context.
        """
        values = {
            weight: nn.Parameter(self.recording.value(weight), requires_grad=weight.requires_grad)
            for weight in self._deferred_parameters([layer])
        }
        replaced = [(module, dict(module._parameters)) for module in layer.modules()]
        for module, weights in replaced:
            module._parameters.update({key: values[weight] for key, weight in weights.items() if weight in values})
        try:
            yield
        finally:
            for module, weights in replaced:
                module._parameters.update(weights)

    def _deferred_parameters(self, layers: Iterable[nn.Module]) -> list[nn.Parameter]:
        weights = dict.fromkeys(weight for layer in layers for weight in layer.parameters())
        return [weight for weight in weights if self.recording.is_deferred(weight)]


@dataclass(frozen=True)
class DeferredShards:
    """The sharded parameters of a model that have no memory yet, by name."""

    model: DeferredModel
    refs: dict[str, TensorRef]
    device: torch.device

    def materialize(self, model: nn.Module) -> None:
        """Allocate this rank's shards and initialize them; host memory holds one full parameter at a time.

        All shards are allocated first: otherwise, a shard could take the memory of the full parameter that was freed
        before it, and malloc could not reuse that memory for the next full parameter.
        """
        shards: dict[int, nn.Parameter] = {}
        names: dict[str, int] = {}
        for name, module, key in _places(model):
            weight: Any = module._parameters[key]
            if not isinstance(weight, DTensor) or not weight.is_meta:
                continue
            if id(weight) not in shards:
                shards[id(weight)], names[name] = self._allocate(weight), id(weight)
            module._parameters[key] = shards[id(weight)]
        for name, number in names.items():
            if name not in self.model.loaded:
                self._initialize(name, shards[number])

    def _allocate(self, weight: DTensor) -> nn.Parameter:
        local = torch.empty(weight.to_local().shape, dtype=weight.dtype, device=self.device)
        dtensor = DTensor.from_local(
            local, weight.device_mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride()
        )
        return nn.Parameter(dtensor, requires_grad=weight.requires_grad)

    def _initialize(self, name: str, shard: Any) -> None:
        local, value = shard.to_local(), self.model.recording.value(self.refs[name])
        start = first_local_row(shard)
        with torch.no_grad():
            local.copy_(value[start : start + len(local)])


def _places(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield the name, module and key of each parameter; tied ones several times."""
    for path, module in model.named_modules():
        for key, weight in module._parameters.items():
            if weight is not None:
                yield f"{path}.{key}" if path else key, module, key
