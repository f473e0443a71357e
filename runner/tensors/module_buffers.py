"""List the buffers of a model, detect changes to tensors, and run forward passes without changing buffers."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from runner.tensors.bitwise import bitwise_equal, is_dense


class BufferRef(NamedTuple):
    """A reference to a buffer of a model; the tensor itself may be replaced.

    is_saved  whether checkpoints include it
    """

    name: str
    module: nn.Module
    key: str
    is_saved: bool

    @property
    def tensor(self) -> Tensor | None:
        """The current buffer."""
        return buffers_of(self.module).get(self.key)


def list_buffers(model: nn.Module) -> list[BufferRef]:
    """Return the buffers of a model, including those that are None."""
    return [
        BufferRef(f"{path}.{key}".lstrip("."), module, key, key not in module._non_persistent_buffers_set)
        for path, module in model.named_modules()
        for key in buffers_of(module)
    ]


class _Buffers(ChainMap[str, Tensor | None]):
    """The buffers of a module and its parameters that are treated as buffers; an assignment replaces either."""

    def __setitem__(self, key: str, value: Tensor | None) -> None:
        (self.maps[1] if key in self.maps[1] else self.maps[0])[key] = value


_treated_as_buffers: WeakKeyDictionary[nn.Module, dict[str, Tensor | None]] = WeakKeyDictionary()


def treat_as_buffer(module: nn.Module, key: str) -> None:
    """Treat a parameter of the module as a buffer in `buffers_of` and `list_buffers`.

    It is not registered as a buffer, because a task may copy the `buffers()` of one module to those of another one,
    which must then have equally many.
    """
    _treated_as_buffers.setdefault(module, {})[key] = module._parameters[key]


def buffers_of(module: nn.Module) -> MutableMapping[str, Tensor | None]:
    """Return the buffers of a module (not of its children), and its parameters that are treated as such."""
    parameters = _treated_as_buffers.get(module) if _treated_as_buffers else None
    return _Buffers(module._buffers, parameters) if parameters else module._buffers


class TensorVersion(NamedTuple):
    """A tensor at some time, None if there was none, and its version, which in-place changes increment.

    Writes through .data, by a norm's kernel or by compiled code do not increment it: compare bits to find them.
    """

    tensor: Tensor | None
    version: int

    @classmethod
    def of(cls, tensor: Tensor | None) -> TensorVersion:
        """Record a tensor."""
        return cls(tensor, -1 if tensor is None or tensor.is_inference() else tensor._version)

    def is_changed(self, now: Tensor | None) -> bool:
        """Return whether `now` is another tensor or was changed in place.

        Inference tensors have no version and always count as changed.
        """
        if now is not self.tensor:
            return True
        return now is not None and (now.is_inference() or now._version != self.version)


@contextmanager
def restore_buffers(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Restore the buffers of these modules (not of their children) on exit, whether changed in place or replaced.

    Non-persistent buffers that serve as caches keep their new size: their module may have recorded
    that size elsewhere.
    """
    saved = [
        (module, key, buffer, buffer.clone())
        for module in modules
        for key, buffer in buffers_of(module).items()
        if buffer is not None and is_dense(buffer)
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for module, key, buffer, before in saved:
                _restore_buffer(module, key, buffer, before)


def _restore_buffer(module: nn.Module, key: str, buffer: Tensor, before: Tensor) -> None:
    current = buffers_of(module).get(key)
    if current is not buffer:
        if key in module._non_persistent_buffers_set and (current is None or current.shape != buffer.shape):
            return
        buffers_of(module)[key] = buffer
    elif buffer.shape != before.shape:  # resized in place
        if key in module._non_persistent_buffers_set:
            return
        buffer.resize_(before.shape)
    if is_writable(buffer) and not (
        buffer.device.type == "cpu" and bitwise_equal(buffer, before)
    ):  # not compared on a GPU, because that would synchronize
        buffer.copy_(before)


def overwrite(tensor: Tensor, values: Tensor) -> None:
    """Copy values into a tensor; elements that share memory, as after `expand`, are written once.

    The tensor is written in place instead of being replaced, because other buffers may be views of its memory.
    """
    target, source = tensor, values
    for dim in _repeated_dims(tensor):
        if torch.equal(values.narrow(dim, 0, 1).expand_as(values), values):
            target, source = target.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
    target.copy_(source)


def is_writable(tensor: Tensor) -> bool:
    """Return whether torch can write into the tensor in place: not if elements share memory, as after `expand`."""
    return not (is_overlapping(tensor) or tensor.is_inference())


def is_overlapping(tensor: Tensor) -> bool:
    """Return whether elements of the tensor share memory, as after `expand`."""
    return bool(_repeated_dims(tensor))


def _repeated_dims(tensor: Tensor) -> list[int]:
    if not is_dense(tensor):
        return []
    return [dim for dim, size in enumerate(tensor.shape) if size > 1 and tensor.stride(dim) == 0]
