"""Trace a run on fake weights: operations on data alone are computed, all others are only traced.

Parameters become fake as soon as a module registers them, so a model of any size needs no memory; results of
operations on them are fake, too. Values computed from data alone (masks, counts, lengths) are real, so code whose
shapes depend on the data is traced as well. This module models a run on a CPU, operation by operation.

Source: torch._subclasses.fake_tensor, private in torch 2.13; used only here.
"""

from __future__ import annotations

import warnings
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

from runner.forecast.output_cache import CachingFakeMode, OutputCache, find_tensors
from runner.plan.memory_trace import ComputeCost, Event


class NotTraceable(Exception):
    """An operation needs the value of a fake tensor."""


@dataclass
class StorageBlock:
    """A storage, shared by a tensor and its views.

    kind   its use, a field of `Bytes`
    layer  module in whose forward pass it was allocated
    """

    number: int
    size: int
    kind: str
    layer: str


@dataclass
class AllocationRecorder:
    """Record allocations, frees and operations.

    kind    kind of the tensors that are created now, a field of `Bytes`
    stage   what operations are attributed to: forward, backward or update, or a layer whose cost is measured
    events  allocations and frees, in order
    work    stage -> cost of its operations
    layers  names of the modules whose forward pass is running, the innermost one last
    """

    kind: str = "temporary"
    stage: str = ""
    events: list[Event] = field(default_factory=list)
    blocks: list[StorageBlock] = field(default_factory=list)
    work: dict[str, ComputeCost] = field(default_factory=dict)
    layers: list[str] = field(default_factory=lambda: [""])
    layer_flops: dict[str, int] = field(default_factory=dict)  # layer -> FLOPs of its forward passes
    convolved: set[tuple[str, tuple[int, ...]]] = field(default_factory=set)  # layer, shape of a sample
    _in_use: dict[int, tuple[StorageBlock, Any]] = field(default_factory=dict)  # storage address -> block
    _ignored: set[int] = field(default_factory=set)

    def record_tensor(self, tensor: Tensor, kind: str = "") -> StorageBlock | None:
        """Record the storage of a tensor once, with its kind if given; return None if the storage is not counted."""
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # a sparse tensor, or a subclass that wraps other tensors
            return None
        address, size = storage._cdata, storage.nbytes()
        entry = self._in_use.get(address)
        if entry is not None and entry[0].size != size:  # resized in place
            self._record_free(address)
            kind, entry = kind or entry[0].kind, None
        if entry is None:
            if not size or address in self._ignored:
                return None
            block = StorageBlock(len(self.blocks), size, kind or self.kind, self.layers[-1])
            self.blocks.append(block)
            self.events.append((block.number, size))
            self._in_use[address] = entry = (block, weakref.ref(storage, lambda _: self._record_free(address)))
        elif kind:
            entry[0].kind = kind
        return entry[0]

    def ignore(self, tensor: Tensor) -> None:
        """Do not count the storage of this tensor, because it represents a storage that is already counted."""
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address not in self._ignored:
            self._ignored.add(address)
            weakref.finalize(storage, self._ignored.discard, address)

    def blocks_in_use(self) -> list[StorageBlock]:
        return [block for block, _ in self._in_use.values()]

    def record_operation(self, flops: int, moved: int, launches: int) -> None:
        self.work[self.stage] = self.work.get(self.stage, ComputeCost()) + ComputeCost(
            flops, moved, launches, moved if flops else 0
        )
        if self.stage == "forward":
            layer = self.layers[-1]
            self.layer_flops[layer] = self.layer_flops.get(layer, 0) + flops

    def _record_free(self, address: int) -> None:
        entry = self._in_use.pop(address, None)
        if entry is not None:
            self.events.append((entry[0].number, 0))


class FakeRun(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Compute operations on real tensors, trace operations on fake ones, and record both.

    A real tensor into which a fake one was written counts as fake. While `answers_zero` is True, `item()` of a fake
    tensor returns 0, as the runner's checks for finite numbers require; otherwise it raises NotTraceable.

    untraceable  the last operation that could not be traced, recorded because a task may catch the exception
    cached       if False, trace every operation even if its outputs are cached; the results are the same
    """

    def __init__(self, recorder: AllocationRecorder, *, cached: bool = True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recorder = recorder
        self.answers_zero = True
        self.untraceable = ""
        self.fakes = CachingFakeMode() if cached else FakeTensorMode(allow_non_fake_inputs=True)
        self.fakes.cache_enabled = False
        self.is_cached = cached
        self._cache = OutputCache(self.fakes)
        self._overwritten: set[int] = set()  # storages of real tensors that were written from fake ones

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: torch must not wrap `__torch_dispatch__` in `disable`, which takes a third of the time."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE:  # the most frequent call, which is not an operation
            return args[0].fake_device if isinstance(args[0], FakeTensor) else func(*args)
        # Otherwise, function modes such as CudaAutocastMode would be called for each attribute that is read here.
        with torch._C.DisableTorchFunction():
            return self._dispatch(func, args, kwargs)

    def _dispatch(self, func: Any, args: Any, kwargs: Any) -> Any:
        kwargs = kwargs or {}
        tensors = find_tensors((args, kwargs))
        if not any(map(self.is_fake, tensors)):
            result = func(*args, **kwargs)
            self._count(func, args, kwargs, tensors, result)
            return result
        if func in _CONSTANT_RESULTS:
            if not self.answers_zero:
                self.untraceable = f"{func} needs a value of a tensor that depends on the weights"
                raise NotTraceable(self.untraceable)
            return _CONSTANT_RESULTS[func]
        key = self._key(func, args, kwargs, tensors)
        entry = None if key is None else self._cache.get(key)
        if entry is not None:
            result = self._cache.outputs(entry, tensors)
            for tensor in find_tensors(result):
                self.recorder.record_tensor(tensor)
            if entry.cost:
                self.recorder.record_operation(*entry.cost)
            return result
        try:
            result = self._trace(func, args, kwargs, tensors)
        except _UNTRACEABLE as error:
            self.untraceable = f"{func} cannot be traced: {type(error).__name__}"
            raise
        cost = self._count(func, args, kwargs, tensors, result)
        if key is not None and key not in self._cache:
            self._cache.put(key, tensors, result, cost)
        return result

    def _key(self, func: Any, args: Any, kwargs: Any, tensors: Sequence[Tensor]) -> Any:
        """Return the cache key of the operation, or None if it must be traced each time.

        This is the case for indexing, whose mask may be real, and for reading a real tensor without valid content:
        a view of such a tensor shares the storage of its fake counterpart, which is not counted.
        An operation that writes into real tensors is cached only if their content was invalid before. It may read
        other real tensors: for example, the fused step of an optimizer reads its step counters.
        """
        if not self.is_cached or func in _INDEXING or func is _aten.masked_select.default:
            return None
        real = [tensor for tensor in tensors if type(tensor) is not FakeTensor]
        if real and func._schema.is_mutable:
            if not all(map(self.is_fake, _written_tensors(func, args, kwargs))):
                return None
        elif real and (func.is_view or any(map(self.is_fake, real))):
            return None
        return self._cache.key(func, args, kwargs)

    def is_fake(self, tensor: Tensor) -> bool:
        """Return whether the tensor has no content, or content that is not valid."""
        return isinstance(tensor, FakeTensor) or (
            bool(self._overwritten) and tensor.untyped_storage()._cdata in self._overwritten
        )

    def to_fake(self, tensor: Tensor) -> Tensor:
        """Return a fake copy of the tensor, whose memory is not counted, because that of the original is."""
        if isinstance(tensor, FakeTensor):
            return tensor
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The .grad attribute")  # torch reads it even if the tensor is not a leaf
            fake = self.fakes.from_tensor(tensor)
        self.recorder.ignore(fake)
        return fake

    def hide_dropout_mask(self, keys: Tensor, x: Tensor) -> Tensor:
        """Return fake keys for dropout of a fake tensor: computing a mask takes much longer than tracing it."""
        return self.to_fake(keys) if self.is_fake(x) else keys

    @contextmanager
    def without_values(self) -> Iterator[None]:
        """Within the context, raise NotTraceable if the value of a fake tensor is read."""
        self.answers_zero = False
        try:
            yield
        finally:
            self.answers_zero = True

    @contextmanager
    def fake_parameters(self) -> Iterator[None]:
        """Replace parameters that modules register inside the context with fake ones."""

        def replace(module: nn.Module, name: str, weight: nn.Parameter | None) -> nn.Parameter | None:
            # A lazy weight has no shape until its first pass.
            if weight is None or isinstance(weight, FakeTensor) or is_lazy(weight):
                return weight
            # from_tensor returns the same fake tensor for the same weight, so tied weights stay tied.
            fake: Any = self.fakes.from_tensor(weight)
            return fake  # type: ignore[no-any-return]

        hook = register_module_parameter_registration_hook(replace)  # type: ignore[arg-type]
        try:
            yield
        finally:
            hook.remove()

    def _trace(self, func: Any, args: Any, kwargs: Any, tensors: Sequence[Tensor]) -> Any:
        fakes = [self.to_fake(tensor) for tensor in tensors]  # kept alive, so that to_fake returns the same ones below
        real = {id(fake): tensor for fake, tensor in zip(fakes, tensors, strict=True) if fake is not tensor}
        if func in _INDEXING:  # the number of selected elements is known for a real mask, but not for a fake one
            args = (args[0], [index for tensors in args[1] for index in self._mask_to_indices(tensors)], *args[2:])
        elif func is _aten.masked_select.default and not self.is_fake(args[1]):
            shape = torch.broadcast_shapes(args[0].shape, args[1].shape)  # type: ignore[no-untyped-call]
            func, args = _aten.index.Tensor, (args[0].expand(shape), [*self._mask_to_indices(args[1].expand(shape))])
        if not all(type(tensor) is FakeTensor for tensor in find_tensors((args, kwargs))):
            args, kwargs = tree_map(
                lambda leaf: self.to_fake(leaf) if isinstance(leaf, Tensor) else leaf, (args, kwargs)
            )
        result = self.fakes.dispatch(func, (), args, kwargs)
        correct = _CORRECTIONS.get(func)
        if correct is not None:
            with self.fakes:
                result = correct(args, result)
        if real and func._schema.is_mutable:
            for fake in _written_tensors(func, args, kwargs):
                if id(fake) in real:
                    storage = real[id(fake)].untyped_storage()
                    self._overwritten.add(storage._cdata)
                    weakref.finalize(storage, self._overwritten.discard, storage._cdata)
            result = tree_map(lambda leaf: real.get(id(leaf), leaf), result)
        return result

    def _mask_to_indices(self, index: Tensor | None) -> Sequence[Tensor | None]:
        if index is None or index.dtype not in (torch.bool, torch.uint8) or self.is_fake(index):
            return [index]
        return index.nonzero().unbind(1)

    def _count(
        self, func: Any, args: Any, kwargs: Any, tensors: Sequence[Tensor], result: Any
    ) -> tuple[int, int, int] | None:
        """Record the outputs and the cost of an operation; return FLOPs, bytes moved, launches, or None for a view."""
        outputs = find_tensors(result)
        for tensor in outputs:
            self.recorder.record_tensor(tensor)
        if func.is_view:
            return None
        flops = _FLOPS.get(func.overloadpacket)
        count = int(flops(*args, **kwargs, out_val=result)) if flops else 0
        written = _written_tensors(func, args, kwargs) if func._schema.is_mutable else outputs
        moved = sum(tensor.numel() * tensor.element_size() for tensor in [*tensors, *written])
        cost = (count, moved, int(func.namespace != "prim" and func.overloadpacket not in _WITHOUT_KERNEL))
        self.recorder.record_operation(*cost)
        return cost


CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@contextmanager
def record_layers(recorder: AllocationRecorder, model: nn.Module) -> Iterator[None]:
    """Within the context, keep the running modules in `recorder.layers`, and the shapes that convolutions receive."""
    names = {module: name for name, module in model.named_modules()}

    def enter(module: nn.Module, inputs: Any) -> None:
        recorder.layers.append(names.get(module, recorder.layers[-1]))
        if isinstance(module, CONVOLUTIONS):
            recorder.convolved.add((recorder.layers[-1], tuple(inputs[0].shape[1:])))
        if isinstance(module, nn.LSTM) and any(isinstance(weight, FakeTensor) for weight in module.parameters()):
            raise NotTraceable("an LSTM uses a different kernel with fake weights")

    def leave(module: nn.Module, _: Any, __: Any) -> None:
        recorder.layers.pop()

    hooks = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _written_tensors(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    places = {argument.name: argument for argument in func._schema.arguments}
    values = {**dict(zip(places, args, strict=False)), **kwargs}
    return [
        leaf
        for name, value in values.items()
        if places[name].alias_info is not None and places[name].alias_info.is_write
        for leaf in find_tensors(value)
    ]


def _group_norm(args: Any, outputs: Any) -> Any:
    """Return output, means and deviations; the latter two with the weight's dtype instead of the input's."""
    return outputs if args[1] is None else (outputs[0], *(output.to(args[1].dtype) for output in outputs[1:]))


def _group_norm_backward(args: Any, outputs: Any) -> Any:
    """Return the gradients of the input, the weight and the bias, each with the dtype of its tensor."""
    x, mean, weight = args[1], args[2], args[4]
    like = mean if weight is None else weight
    return [
        None if output is None else output.to(of.dtype) for output, of in zip(outputs, (x, like, like), strict=True)
    ]


def _flash_flops(query: Any, key: Any, value: Any, *_: Any, out_val: Any = None, **__: Any) -> int:
    return int(flop_counter.sdpa_flop_count(query.shape, key.shape, value.shape))  # type: ignore[no-untyped-call]


def _flash_backward_flops(grad: Any, query: Any, key: Any, value: Any, *_: Any, out_val: Any = None, **__: Any) -> int:
    shapes = (grad.shape, query.shape, key.shape, value.shape)
    return int(flop_counter.sdpa_backward_flop_count(*shapes))  # type: ignore[no-untyped-call]


_aten = torch.ops.aten
_DEVICE = torch.ops.prim.device.default
_FLOPS: dict[Any, Callable[..., Any]] = {
    **flop_counter.flop_registry,
    # torch's registry has only the GPU kernels.
    _aten._scaled_dot_product_flash_attention_for_cpu: _flash_flops,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _flash_backward_flops,
}
# Dtypes that fake kernels of torch 2.13 get wrong for 16-bit inputs and float32 weights on a CPU.
_CORRECTIONS: dict[Any, Callable[[Any, Any], Any]] = {
    _aten.native_group_norm.default: _group_norm,
    _aten.native_group_norm_backward.default: _group_norm_backward,
}
# On a GPU, these operators launch no kernel, nor do views and operators of `prim`. Any other operator counts as one,
# although some operators launch several kernels.
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
_UNTRACEABLE = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
_CONSTANT_RESULTS: dict[Any, Any] = {_aten._local_scalar_dense.default: 0, _aten.equal.default: True}
