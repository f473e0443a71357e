"""Trace a run on fake weights: operations on data alone are computed, all others are only traced.

Parameters become fake as soon as a module registers them, so a model of any size needs no memory; results of
operations on them are fake, too. Values computed from data alone (masks, counts, lengths) are real, so code whose
shapes depend on the data is traced as well. This module models a run on a CPU, operation by operation.

Source: torch._subclasses.fake_tensor, private in torch 2.13; used only here.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import is_lazy
from torch.utils import flop_counter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from runner.forecast.output_cache import OutputCache
from runner.plan.memory_trace import ComputeCost, Event


class NotTraceable(Exception):
    """An operation needs the value of a fake tensor."""


@dataclass
class CheckpointedBlock:
    """A storage, which a tensor and its views share.

    kind   its use, a field of `Bytes`
    layer  module in whose forward pass it was allocated
    """

    number: int
    size: int
    kind: str
    layer: str


@dataclass
class AllocationLedger:
    """Record allocations, frees and operations.

    kind    kind of tensors that are created now
    stage   stage to which operations are attributed
    """

    kind: str = "temporary"
    stage: str = ""
    events: list[Event] = field(default_factory=list)
    blocks: list[CheckpointedBlock] = field(default_factory=list)
    work: dict[str, ComputeCost] = field(default_factory=dict)
    layers: list[str] = field(default_factory=lambda: [""])
    flops_of: dict[str, int] = field(default_factory=dict)  # layer -> operations of forward passes
    _alive: dict[int, tuple[CheckpointedBlock, Any]] = field(default_factory=dict)  # storage address -> block
    _ignored: set[int] = field(default_factory=set)

    def saw(self, tensor: Tensor, kind: str = "") -> CheckpointedBlock | None:
        """Record the storage of a tensor once, with its kind if given; return None for tensors without storage."""
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # sparse, or a wrapper around others
            return None
        address, size = storage._cdata, storage.nbytes()
        known = self._alive.get(address)
        if known is not None and known[0].size != size:  # resized in place
            self._end(address)
            kind, known = kind or known[0].kind, None
        if known is None:
            if not size or address in self._ignored:
                return None
            block = CheckpointedBlock(len(self.blocks), size, kind or self.kind, self.layers[-1])
            self.blocks.append(block)
            self.events.append((block.number, size))
            self._alive[address] = known = (block, weakref.ref(storage, lambda _: self._end(address)))
        elif kind:
            known[0].kind = kind
        return known[0]

    def ignore(self, tensor: Tensor) -> None:
        """Do not count the storage of this tensor: it represents one that is already counted."""
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address not in self._ignored:
            self._ignored.add(address)
            weakref.finalize(storage, self._ignored.discard, address)

    def alive(self) -> list[CheckpointedBlock]:
        """Return the blocks in use."""
        return [block for block, _ in self._alive.values()]

    def did(self, flops: int, moved: int, launches: int) -> None:
        """Record the operations of an operator."""
        self.work[self.stage] = self.work.get(self.stage, ComputeCost()) + ComputeCost(flops, moved, launches)
        if self.stage == "forward":
            layer = self.layers[-1]
            self.flops_of[layer] = self.flops_of.get(layer, 0) + flops

    def _end(self, address: int) -> None:
        known = self._alive.pop(address, None)
        if known is not None:
            self.events.append((known[0].number, 0))


class FakeRun(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Compute operations on real tensors, trace operations on fake ones, and record both.

    A real tensor into which a fake one was written counts as fake. While `answers` is True, `item()` of a fake tensor
    returns 0, for the runner's checks for finite numbers; otherwise it raises NotTraceable.

    refused  the last operation that could not be traced: a task may catch its exception

    cached   False: compute the outputs of each operation, also of those seen before; the results are the same
    """

    def __init__(self, ledger: AllocationLedger, *, cached: bool = True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ledger = ledger
        self.answers = True
        self.refused = ""
        self.fakes = FakeTensorMode(allow_non_fake_inputs=True)
        self.is_cached = cached
        self._cache = OutputCache(self.fakes)
        self._written: set[int] = set()  # storages of real tensors that were written from fake ones

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE:  # most calls of a trace, and no operation
            return args[0].fake_device if isinstance(args[0], FakeTensor) else func(*args)
        kwargs = kwargs or {}
        given = _tensors((args, kwargs))
        if not any(map(self.is_fake, given)):
            answer = func(*args, **kwargs)
            self._count(func, args, kwargs, given, answer)
            return answer
        if func in _NUMBERS:
            if not self.answers:
                self.refused = f"{func} needs a value of a tensor that depends on the weights"
                raise NotTraceable(self.refused)
            return _NUMBERS[func]
        key = self._key(func, args, kwargs, given)
        known = None if key is None else self._cache.get(key)
        if known is not None:
            answer = self._cache.outputs(known, given)
            for tensor in _tensors(answer):
                self.ledger.saw(tensor)
            if known.cost:
                self.ledger.did(*known.cost)
            return answer
        try:
            answer = self._followed(func, args, kwargs, given)
        except _NOT_FOLLOWED as error:
            self.refused = f"{func} cannot be traced: {type(error).__name__}"
            raise
        cost = self._count(func, args, kwargs, given, answer)
        if key is not None and key not in self._cache:
            self._cache.put(key, given, answer, cost)
        return answer

    def _key(self, func: Any, args: Any, kwargs: Any, given: Sequence[Tensor]) -> Any:
        """Return the key of the operation in the cache, or None if it reads a mask, or real tensors without content.

        A view of such a tensor shares the storage of the fake one that stands for it, which is not counted.
        """
        if not self.is_cached or func in _INDEXING or func is _aten.masked_select.default:
            return None
        real = [tensor for tensor in given if type(tensor) is not FakeTensor]
        if real and (func._schema.is_mutable or func.is_view or any(map(self.is_fake, real))):
            return None
        return self._cache.key(func, args, kwargs)

    def is_fake(self, tensor: Tensor) -> bool:
        """Return whether the tensor has no content or an invalid one."""
        return isinstance(tensor, FakeTensor) or (
            bool(self._written) and tensor.untyped_storage()._cdata in self._written
        )

    def faked(self, tensor: Tensor) -> Tensor:
        """Return a fake tensor like this one; its memory is counted as that of the original."""
        if isinstance(tensor, FakeTensor):
            return tensor
        fake = self.fakes.from_tensor(tensor)
        self.ledger.ignore(fake)
        return fake

    @contextmanager
    def building(self) -> Iterator[None]:
        """Replace parameters that modules register inside the context by fake ones."""

        def replaced(module: nn.Module, name: str, weight: nn.Parameter | None) -> nn.Parameter | None:
            if weight is None or isinstance(weight, FakeTensor) or is_lazy(weight):  # no shape yet: in its first pass
                return weight
            fake: Any = self.fakes.from_tensor(
                weight
            )  # the same fake tensor for the same weight, so that tied weights stay tied
            return fake  # type: ignore[no-any-return]

        hook = register_module_parameter_registration_hook(replaced)  # type: ignore[arg-type]
        try:
            yield
        finally:
            hook.remove()

    def _followed(self, func: Any, args: Any, kwargs: Any, given: Sequence[Tensor]) -> Any:
        real = {id(fake): tensor for tensor in given if (fake := self.faked(tensor)) is not tensor}
        if func in _INDEXING:  # the number of elements of a real mask is known, that of a fake one is not
            args = (args[0], [index for given in args[1] for index in self._places(given)], *args[2:])
        elif func is _aten.masked_select.default and not self.is_fake(args[1]):
            shape = torch.broadcast_shapes(args[0].shape, args[1].shape)  # type: ignore[no-untyped-call]
            func, args = _aten.index.Tensor, (args[0].expand(shape), [*self._places(args[1].expand(shape))])
        if not all(type(tensor) is FakeTensor for tensor in _tensors((args, kwargs))):
            args, kwargs = tree_map(lambda leaf: self.faked(leaf) if isinstance(leaf, Tensor) else leaf, (args, kwargs))
        answer = self.fakes.dispatch(func, (), args, kwargs)
        correct = _CORRECTED.get(func)
        if correct is not None:
            with self.fakes:
                answer = correct(args, answer)
        if real and func._schema.is_mutable:
            for fake in _written(func, args, kwargs):
                if id(fake) in real:
                    storage = real[id(fake)].untyped_storage()
                    self._written.add(storage._cdata)
                    weakref.finalize(storage, self._written.discard, storage._cdata)
            answer = tree_map(lambda leaf: real.get(id(leaf), leaf), answer)
        return answer

    def _places(self, index: Tensor | None) -> Sequence[Tensor | None]:
        """Convert a real mask to index tensors, whose number of elements is known."""
        if index is None or index.dtype not in (torch.bool, torch.uint8) or self.is_fake(index):
            return [index]
        return index.nonzero().unbind(1)

    def _count(
        self, func: Any, args: Any, kwargs: Any, given: Sequence[Tensor], answer: Any
    ) -> tuple[int, int, int] | None:
        """Record outputs and cost of an operation; return the cost: operations, bytes, launches; None for a view."""
        made = _tensors(answer)
        for tensor in made:
            self.ledger.saw(tensor)
        if func.is_view:
            return None
        flops = _FLOPS.get(func.overloadpacket)
        count = int(flops(*args, **kwargs, out_val=answer)) if flops else 0
        written = _written(func, args, kwargs) if func._schema.is_mutable else made
        moved = sum(tensor.numel() * tensor.element_size() for tensor in [*given, *written])
        cost = (count, moved, int(func.namespace != "prim" and func.overloadpacket not in _WITHOUT_KERNEL))
        self.ledger.did(*cost)
        return cost


@contextmanager
def in_layers(ledger: AllocationLedger, model: nn.Module) -> Iterator[None]:
    """Record in the ledger which module of the model runs."""
    names = {module: name for name, module in model.named_modules()}

    def enter(module: nn.Module, _: Any) -> None:
        ledger.layers.append(names.get(module, ledger.layers[-1]))
        if isinstance(module, nn.LSTM) and any(isinstance(weight, FakeTensor) for weight in module.parameters()):
            raise NotTraceable("an LSTM uses another kernel with fake weights")

    def leave(module: nn.Module, _: Any, __: Any) -> None:
        ledger.layers.pop()

    hooks = [
        register_module_forward_pre_hook(enter),
        register_module_forward_hook(leave, always_call=True),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _tensors(value: Any) -> list[Tensor]:
    """Return the tensors in arguments or results of an operation; ten times as fast as torch's pytree."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [tensor for part in value for tensor in _tensors(part)]
    return _tensors([*value.values()]) if isinstance(value, dict) else []


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors into which an operation writes."""
    places = {argument.name: argument for argument in func._schema.arguments}
    values = {**dict(zip(places, args, strict=False)), **kwargs}
    return [
        leaf
        for name, value in values.items()
        if places[name].alias_info is not None and places[name].alias_info.is_write
        for leaf in _tensors(value)
    ]


def _group_norm(args: Any, made: Any) -> Any:
    """Return output, means and deviations; the latter have the weight's dtype, not the input's as in torch."""
    return made if args[1] is None else (made[0], *(one.to(args[1].dtype) for one in made[1:]))


def _group_norm_backward(args: Any, made: Any) -> Any:
    """Return the three gradients; the first has the input's dtype, not the weight's as in torch."""
    return made if made[0] is None else (made[0].to(args[1].dtype), *made[1:])


def _flash_flops(query: Any, key: Any, value: Any, *_: Any, out_val: Any = None, **__: Any) -> int:
    return int(flop_counter.sdpa_flop_count(query.shape, key.shape, value.shape))  # type: ignore[no-untyped-call]


def _flash_backward_flops(grad: Any, query: Any, key: Any, value: Any, *_: Any, out_val: Any = None, **__: Any) -> int:
    shapes = (grad.shape, query.shape, key.shape, value.shape)
    return int(flop_counter.sdpa_backward_flop_count(*shapes))  # type: ignore[no-untyped-call]


_aten = torch.ops.aten
_DEVICE = torch.ops.prim.device.default
_FLOPS: dict[Any, Callable[..., Any]] = {
    **flop_counter.flop_registry,
    # torch counts only GPU kernels
    _aten._scaled_dot_product_flash_attention_for_cpu: _flash_flops,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _flash_backward_flops,
}
_CORRECTED: dict[
    Any, Callable[[Any, Any], Any]
] = {  # observed in torch 2.13 with 16-bit inputs and float32 weights, on a CPU
    _aten.native_group_norm.default: _group_norm,
    _aten.native_group_norm_backward.default: _group_norm_backward,
}
# Some operators launch several kernels on a GPU; these launch none, nor do views and those of `prim`.
_WITHOUT_KERNEL = {
    _aten.empty,
    _aten.empty_like,
    _aten.empty_strided,
    _aten.new_empty,
    _aten.new_empty_strided,
    _aten._unsafe_view,
}
_INDEXING = {
    _aten.index.Tensor,
    _aten.index_put.default,
    _aten.index_put_.default,
    _aten._index_put_impl_.default,
    _aten._unsafe_index.Tensor,
    _aten._unsafe_index_put.default,
}
_NOT_FOLLOWED = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
_NUMBERS: dict[Any, Any] = {_aten._local_scalar_dense.default: 0, _aten.equal.default: True}
