"""Count floating-point operations and bytes of an update while it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count


@dataclass(frozen=True)
class Count:
    """Operations and bytes.

    flops  floating-point operations of matrix products, convolutions and attention; a multiplication and an addition
           are two; recomputation counts again
    bytes  moved between memory and processor without caches: each operation reads its operands once and writes its
           results once; views move nothing. Fused kernels and caches move less
    """

    flops: float
    bytes: float


def counted(make: Callable[[], object], device: torch.device) -> Count:
    """Count what is computed on the device while `make` runs, including backward passes.

    Compiled code cannot be counted: use compile=off.
    """
    flops = FlopCounterMode(display=False, custom_mapping=_OF_CPU)
    with _Bytes(device) as moved, flops:
        make()
    return Count(float(flops.get_total_flops()), float(moved.total))


class _Bytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the bytes that operations on a device read and write."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device, self.total = device, 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        out = func(*args, **given)
        if isinstance(func, torch._ops.OpOverload) and not _only_allocates(func):
            self.total += self._moved(func, args, given, out)
        return out

    def _moved(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
        """Return the bytes of an operation; results in the memory of its operands are views."""
        changed, read = [], []
        for number, argument in enumerate(func._schema.arguments):
            value = kwargs.get(argument.name, args[number] if number < len(args) else None)
            tensors = list(self._tensors(value))
            is_changed = argument.alias_info is not None and argument.alias_info.is_write
            changed += tensors if is_changed else []
            is_overwritten = is_changed and (argument.is_out or func.overloadpacket in _OVERWRITE)
            read += [] if is_overwritten or _only_shapes(func) else tensors
        known = {tensor.data_ptr() for tensor in (*read, *changed)}
        storages = {tensor.untyped_storage().data_ptr() for tensor in (*read, *changed)}
        made = [
            tensor
            for tensor in self._tensors(out)
            if tensor.data_ptr() not in known and tensor.untyped_storage().data_ptr() not in storages
        ]
        if not changed and not made:
            return 0
        written = sum(map(_size, (*changed, *made)))
        if func.overloadpacket in _PICKS and read:  # only the selected rows of a table are read
            return written + min(_size(read[0]), written) + sum(map(_size, read[1:]))
        return written + sum(map(_size, read))

    def _tensors(self, value: Any) -> Iterator[Tensor]:
        for leaf in tree_leaves(value):
            if isinstance(leaf, Tensor) and leaf.device.type == self.device.type and leaf.layout == torch.strided:
                yield leaf


def _size(tensor: Tensor) -> int:
    """Return the bytes of a tensor; expanded values count once."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())


def _only_allocates(func: Any) -> bool:
    return str(func.overloadpacket.__name__).startswith(("empty", "new_empty"))


def _only_shapes(func: Any) -> bool:
    """Return whether only the shapes of the operands matter, as in zeros_like."""
    name = str(func.overloadpacket.__name__)
    return name.startswith("new_") or name.endswith("_like")


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query, key, value))  # type: ignore[no-untyped-call]


def _attention_backward(gradient: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_backward_flop_count(gradient, query, key, value))  # type: ignore[no-untyped-call]


_ATEN = torch.ops.aten
_OVERWRITE = {_ATEN.copy_, _ATEN.zero_, _ATEN.fill_}
_PICKS = {_ATEN.embedding, _ATEN.index_select, _ATEN.gather, _ATEN.index}
# torch counts only GPU kernels; CPU kernels take the same operands in the same order.
_OF_CPU = {
    _ATEN._scaled_dot_product_flash_attention_for_cpu: _attention,
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
