"""Find non-finite values: in tensors that are saved, and in the calls of modules."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from runner.base.batch import map_tensors
from runner.base.errors import NumericError
from runner.base.text import abbreviate
from runner.tensors.module_buffers import list_buffers

UNREACHED_FIX = (
    "if the loss does not depend on these values, they keep their initial values: initialize them, or do not train them"
)
STATISTICS_FIX = (
    "these buffers were finite at the start of the phase; if they are batch norm statistics, check the input of the"
    " batch norm"
)


def check_finite(tensors: Iterable[tuple[str, Tensor]], where: str, fix: str = UNREACHED_FIX) -> None:
    """Raise NumericError with the names of the tensors that contain non-finite values."""
    bad = [name for name, tensor in tensors if not is_finite(tensor)]
    if bad:
        raise NumericError(f"not finite, and therefore not saved: {abbreviate(bad)}", where=where, fix=fix)


def finite_buffers(model: nn.Module) -> list[str]:
    """Return the names of the floating-point buffers that checkpoints contain and whose values are finite now."""
    buffers = [(ref.name, ref.tensor) for ref in list_buffers(model) if ref.is_saved]
    return [
        name
        for name, tensor in buffers
        if tensor is not None and tensor.is_floating_point() and not tensor.is_meta and is_finite(tensor)
    ]


def is_finite(value: Any) -> bool:
    """Return True if all floating-point values in a tensor, or in nested tuples, lists and mappings, are finite."""
    results: list[bool] = []

    def check(tensor: Tensor) -> Tensor:
        tensor = getattr(tensor, "_local_tensor", tensor)  # of a sharded tensor, the local shard
        if tensor.is_floating_point() or tensor.is_complex():
            # A sum needs one pass at memory speed. The exact check needs ten; it runs only if the sum is not finite.
            values = tensor.detach()
            values = values.float() if values.element_size() == 1 else values  # torch cannot sum float8
            results.append(bool(torch.isfinite(values.sum())) or bool(torch.isfinite(values).all()))
        return tensor

    map_tensors(check, _unpack(value))
    return all(results)


class _NonFinite(NamedTuple):
    """Kinds of non-finite values in the inputs or the output of a call.

    mask  infinities of a mask: a tensor without gradients whose only infinities are negative
    """

    nan: bool = False
    inf: bool = False
    mask: bool = False


@dataclass
class ModuleCall:
    """One call of a module.

    is_outer  no other call contains it
    inside    non-finite gradients with respect to the inputs, added during the backward pass
    outside   non-finite gradients with respect to the output, likewise
    """

    name: str
    module: nn.Module
    inputs: _NonFinite
    inside: list[Tensor]
    is_outer: bool
    output: _NonFinite = field(default_factory=_NonFinite)
    outside: list[Tensor] = field(default_factory=list)

    def __str__(self) -> str:
        kind = type(self.module).__name__
        return f"{self.name} ({kind})" if self.name else f"the model itself ({kind})"

    @property
    def makes_inf(self) -> bool:
        """True if the output has infinities although no input has NaN or infinities."""
        return (self.output.inf or self.output.mask) and not any(self.inputs)

    @property
    def breaks_gradient(self) -> bool:
        """True if its backward pass turned finite gradients into non-finite ones."""
        weights = self.module.parameters(recurse=False)
        is_bad = self.inside or not is_finite([weight.grad for weight in weights if weight.grad is not None])
        return bool(is_bad) and not self.outside


@dataclass
class ModuleCalls:
    """Record the module calls of a forward pass, in order of completion."""

    completed: list[ModuleCall] = field(default_factory=list)
    _open: list[ModuleCall] = field(default_factory=list)
    _is_over: bool = True

    def begin(self) -> None:
        """Start a forward pass."""
        self._is_over = False
        self.completed.clear()
        self._open.clear()

    def end(self) -> None:
        """End the forward pass: later calls are recomputations for the backward pass."""
        self._is_over = True

    def find_origin(self) -> ModuleCall | None:
        """Return the first call that produced NaN, or the call whose infinities became NaN in another call.

        Without NaN, return the call that produced the infinities in the model's output. Masks contain -inf, and logits
        may contain it, so infinities explain a NaN only if the call that produced it received them, and not in a mask.
        """
        producer = None
        for call in self.completed:
            if call.output.nan and not call.inputs.nan and (producer or not call.inputs.inf):
                return producer if call.inputs.inf else call
            if call.makes_inf:
                producer = call
        return producer if any(call.is_outer and any(call.output) for call in self.completed) else None

    def find_backward_origin(self) -> ModuleCall | None:
        """Return the innermost module nearest to the loss whose backward pass turned finite gradients non-finite."""
        candidates = [call for call in self.completed if call.breaks_gradient]
        origin = candidates[-1] if candidates else None
        for call in reversed(candidates):
            if origin is not None and call.name != origin.name and f"{call.name}.".startswith(_prefix(origin.name)):
                origin = call
        return origin

    def _enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not self._is_over:
            inputs = (args, kwargs)
            self._open.append(
                ModuleCall(name, module, _find_non_finite(inputs), _watch_gradients(inputs), is_outer=not self._open)
            )

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not self._is_over and self._open:
            call = self._open.pop()
            self.completed.append(call)
            call.output, call.outside = _find_non_finite(output), _watch_gradients(output)


@contextmanager
def record_calls(model: nn.Module) -> Iterator[ModuleCalls]:
    """Record every module call of the model inside the context."""
    calls = ModuleCalls()
    hooks = []
    for name, module in model.named_modules():
        enter, leave = partial(calls._enter, name), calls._leave
        hooks.append(module.register_forward_pre_hook(enter, with_kwargs=True))
        hooks.append(module.register_forward_hook(leave, with_kwargs=True))
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def _prefix(name: str) -> str:
    return f"{name}." if name else ""


def _watch_gradients(value: Any) -> list[Tensor]:
    """Return a list to which each non-finite gradient of a tensor in `value` is added."""
    found: list[Tensor] = []

    def check(gradient: Tensor) -> None:
        if not is_finite(gradient):
            found.append(gradient)

    def add_hook(tensor: Tensor) -> Tensor:
        if tensor.requires_grad:
            tensor.register_hook(check)  # type: ignore[no-untyped-call]
        return tensor

    map_tensors(add_hook, _unpack(value))
    return found


def _find_non_finite(value: Any) -> _NonFinite:
    found = _NonFinite()

    def check(tensor: Tensor) -> Tensor:
        nonlocal found
        if not is_finite(tensor):
            local = getattr(tensor, "_local_tensor", tensor).detach()
            nan, inf = bool(local.isnan().any()), bool(local.isinf().any())
            is_mask = not tensor.requires_grad and not bool((local.real == math.inf).any())
            found = _NonFinite(found.nan or nan, found.inf or (inf and not is_mask), found.mask or (inf and is_mask))
        return tensor

    map_tensors(check, _unpack(value))
    return found


def _unpack(value: Any) -> Any:
    """Return the value with nested dataclasses converted to mappings of their fields."""
    if is_dataclass(value) and not isinstance(value, type):
        return {item.name: _unpack(getattr(value, item.name, None)) for item in fields(value)}
    if isinstance(value, (tuple, list)):
        return [_unpack(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _unpack(item) for key, item in value.items()}
    return value
