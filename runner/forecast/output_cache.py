"""Cache the outputs of operations on fake tensors by the shapes of their inputs.

A model repeats few distinct operations many times: one pass of a ResNet-50 with a transformer runs 27,000 operations,
of which fewer than 2,000 are distinct. torch has such a cache, too (`FakeTensorMode.cache`), but computing a key takes
about 0.2 ms, which adds up to most of the time of a trace. Here, a key contains only what differs between tensors of
one CPU trace, and an entry also contains the cost of the operation. torch's cache is off, because adding an entry takes
as long as running the operation. Operations that result from torch's decompositions are cached separately, without
costs.

Source: torch/_subclasses/fake_tensor.py of torch 2.13, `_validate_cache_key` and `_get_output_tensor_from_cache_entry`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

Cost = tuple[int, int, int]  # floating-point operations, bytes read and written, kernel launches
_CPU = torch.device("cpu")
LEAVES = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format})
_UNCACHEABLE_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}


@dataclass(frozen=True)
class CachedOutput:
    """An output tensor: one of the inputs, a view of an input, or a new tensor.

    returned_input  index of the input that is returned, or -1
    viewed_input    index of the input whose storage is shared, or -1
    """

    returned_input: int = -1
    viewed_input: int = -1
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    offset: int = 0
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class CachedOperation:
    """Outputs and cost of an operation; `cost` is None for a view."""

    outputs: tuple[CachedOutput | None, ...]
    kind: type | None  # tuple or list; None: a single output
    cost: Cost | None


class OutputCache:
    """Maps an operator, the metadata of its tensor arguments, and its other arguments to its outputs."""

    def __init__(self, fakes: FakeTensorMode) -> None:
        self._fakes = fakes
        self._entries: dict[Any, CachedOperation | None] = {}
        # torch's constructor takes longer than most operations, and sets the same attributes for each tensor.
        self._attributes = vars(FakeTensor(fakes, torch.empty(0, device="meta"), _CPU))

    def key(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the key of an operation, or None if its outputs depend on more than the metadata of its inputs."""
        # A float argument of an in-place operation, such as a learning rate, does not affect its outputs' metadata.
        part = _key_part_without_floats if func._schema.is_mutable else _key_part
        try:
            # Results of operations on integers, such as a division, may have the default dtype.
            key = (func, torch.get_default_dtype(), part(args), part(kwargs) if kwargs else None)
            hash(key)
        except (_Uncacheable, TypeError):  # TypeError: an unhashable argument
            return None
        return key

    def __contains__(self, key: Any) -> bool:
        return key in self._entries

    def get(self, key: Any) -> CachedOperation | None:
        """Return the entry of a key; None if there is none, or the operation cannot be cached."""
        return self._entries.get(key)

    def put(self, key: Any, inputs: Sequence[Tensor], result: Any, cost: Cost | None) -> None:
        """Store the result of an operation for these input tensors."""
        func = key[0]
        outputs = result if isinstance(result, (tuple, list)) else (result,)
        described: list[CachedOutput | None] = []
        self._entries[key] = None
        if _UNCACHEABLE_TAGS.intersection(func.tags) or func.namespace not in ("aten", "prims"):
            return
        if any(argument.is_out for argument in func._schema.arguments):  # a given output may be resized
            return
        for output in outputs:
            if output is None:
                described.append(None)
            elif type(output) is not FakeTensor or (item := _describe_output(output, inputs)) is None:
                return
            else:
                described.append(item)
        kind = list if isinstance(result, list) else tuple if isinstance(result, tuple) else None
        self._entries[key] = CachedOperation(tuple(described), kind, cost)

    def outputs(self, entry: CachedOperation, inputs: Sequence[Tensor]) -> Any:
        """Return new outputs of a cached operation for these input tensors."""
        outputs = [item and self._make_output(item, inputs) for item in entry.outputs]
        return entry.kind(outputs) if entry.kind else outputs[0]

    def _make_output(self, output: CachedOutput, inputs: Sequence[Tensor]) -> Tensor:
        if output.returned_input >= 0:
            return inputs[output.returned_input]
        empty = torch.empty_strided(output.shape, output.stride, dtype=output.dtype, device="meta")
        if output.viewed_input >= 0:
            # As in torch: in this context, fake tensors report the device of their storage, which is meta.
            with in_kernel_invocation_manager(self._fakes):
                empty.set_(inputs[output.viewed_input].untyped_storage(), output.offset, output.shape, output.stride)
        fake = Tensor._make_subclass(FakeTensor, empty, False, dispatch_device=True, device_for_backend_keys=_CPU)
        torch._C._set_throw_on_mutable_data_ptr(fake)
        vars(fake).update(self._attributes)
        return fake


class CachingFakeMode(FakeTensorMode):
    """A mode that computes fake tensors, and caches the operations that result from torch's decompositions.

    The backward pass of a group norm, for example, is decomposed into fifty operations.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)  # type: ignore[no-untyped-call]
        self.cache_enabled = False
        self._outputs = OutputCache(self)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, as in `FakeRun`."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = find_tensors((args, kwargs))
        # Operations without tensors, such as constructors, may return constants.
        is_traced = bool(tensors) and all(type(tensor) is FakeTensor for tensor in tensors)
        key = self._outputs.key(func, args, kwargs) if is_traced and isinstance(func, torch._ops.OpOverload) else None
        if key is None:
            return self.dispatch(func, types, args, kwargs)
        if entry := self._outputs.get(key):
            return self._outputs.outputs(entry, tensors)
        result = self.dispatch(func, types, args, kwargs)
        if key not in self._outputs:
            self._outputs.put(key, tensors, result, None)
        return result


class _Uncacheable(Exception):
    """An argument that the key of an operation cannot contain."""


def find_tensors(value: Any) -> list[Tensor]:
    """Return the tensors in arguments or results of an operation; ten times as fast as torch's pytree."""
    if type(value) in LEAVES:
        return []
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [tensor for part in value if type(part) not in LEAVES for tensor in find_tensors(part)]
    return find_tensors([*value.values()]) if isinstance(value, dict) else []


def _key_part(value: Any) -> Any:
    """Return the part of a key for an argument; types are included because 1 == 1.0 == True."""
    kind = type(value)
    if kind in LEAVES:
        return kind, value
    if isinstance(value, Tensor):
        fake = kind is FakeTensor
        if (
            not (fake or kind in (Tensor, torch.nn.Parameter))
            or (value.fake_device if fake else value.device) != _CPU  # type: ignore[attr-defined]
            or value.layout is not torch.strided
            or value.is_complex()
            or value.is_neg()
            or (fake and value.constant is not None)  # type: ignore[attr-defined]
        ):
            raise _Uncacheable
        return fake, value.dtype, value.shape, value.stride(), value.storage_offset()
    if isinstance(value, (tuple, list)):
        return tuple([_key_part(item) for item in value])
    if isinstance(value, dict):
        return tuple([(name, _key_part(item)) for name, item in value.items()])
    return kind, value


def _key_part_without_floats(value: Any) -> Any:
    if isinstance(value, float):
        return float
    if isinstance(value, dict):
        return tuple([(name, _key_part_without_floats(item)) for name, item in value.items()])
    return tuple(map(_key_part_without_floats, value)) if type(value) is tuple else _key_part(value)


def _describe_output(output: FakeTensor, inputs: Sequence[Tensor]) -> CachedOutput | None:
    """Return the entry of an output tensor; None if the output cannot be reconstructed from its metadata."""
    for number, tensor in enumerate(inputs):
        if tensor is output:
            return CachedOutput(returned_input=number)
    if output.layout is not torch.strided or output.is_complex() or output.device != _CPU or output.requires_grad:
        return None
    shape, stride = tuple(output.shape), tuple(output.stride())
    storage = output.untyped_storage()
    for number, tensor in enumerate(inputs):
        if tensor.untyped_storage()._cdata == storage._cdata:  # not data_ptr(), which is 0 for fake tensors
            is_fake = type(tensor) is FakeTensor
            return (
                CachedOutput(-1, number, shape, stride, int(output.storage_offset()), output.dtype) if is_fake else None
            )
    # The active modes would intercept this call, count it and return a fake tensor.
    with torch.utils._python_dispatch._disable_current_modes():
        fresh = torch.empty_strided(shape, stride, dtype=output.dtype, device="meta")
    # An output may be a view into a new storage that is larger.
    if output.storage_offset() or fresh.untyped_storage().nbytes() != storage.nbytes():
        return None
    return CachedOutput(-1, -1, shape, stride, 0, output.dtype)
