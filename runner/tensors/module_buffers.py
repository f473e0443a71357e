"""List the buffers of a model, detect changes to tensors, and undo what forward passes change in the model."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Collection, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from runner.base.errors import TaskFault
from runner.base.text import abbreviate
from runner.tensors.bitwise import bitwise_equal, is_dense

# Larger frozen parameters belong to a pretrained model, and a copy of them may not fit in memory.
MAX_FROZEN_BYTES = 1 << 30


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


def frozen_parameters(modules: Iterable[nn.Module]) -> dict[nn.Parameter, str]:
    """Return the frozen parameters of these modules (not of their children), with a name for messages.

    Parameters that are treated as buffers are left out. So are parameters that a strategy has sharded or moved to
    another rank, because they are not plain tensors.
    """
    return {
        weight: f"{type(module).__name__}.{key}"
        for module in modules
        for key, weight in module._parameters.items()
        if weight is not None
        and not weight.requires_grad
        and type(weight) is nn.Parameter
        and is_dense(weight)
        and is_writable(weight)
        and key not in buffers_of(module)
    }


@contextmanager
def restore_parameters(parameters: Collection[nn.Parameter]) -> Iterator[None]:
    """Restore the values of these parameters on exit.

    The values are written through `data`, which does not increment the version counters. So a counter that differs
    afterwards shows that the block has changed its parameter.
    """
    saved = [(weight, weight.data, weight.detach().clone()) for weight in parameters]
    try:
        yield
    finally:
        for weight, data, before in saved:
            weight.data = data  # the block may have assigned other memory, such as that of a trained parameter
            data.copy_(before)


@contextmanager
def restore_forward_state(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Restore the buffers and the frozen parameters of these modules (not of their children) on exit.

    For forward passes that must change nothing, while it is not known yet which frozen parameters they change, as in a
    mean teacher. Raises TaskFault if they change frozen parameters that are too large to be copied.
    """
    owners = list(modules)
    frozen = frozen_parameters(owners)
    is_copied = sum(weight.nbytes for weight in frozen) <= MAX_FROZEN_BYTES
    seen = [TensorVersion.of(weight) for weight in frozen]
    with restore_buffers(owners), restore_parameters([*frozen] if is_copied else ()):
        yield
    changed = [name for before, (weight, name) in zip(seen, frozen.items(), strict=True) if before.is_changed(weight)]
    if changed and not is_copied:
        key = changed[0].rpartition(".")[2]
        raise TaskFault(
            f"a forward pass changes frozen parameters: {abbreviate(changed)}. The change must be undone, which is"
            f" possible only if all frozen parameters take at most {MAX_FROZEN_BYTES >> 30} GiB",
            fix=f'register it as a buffer and change it in place: self.register_buffer("{key}", ...)',
        )


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
