"""Record the buffers and frozen parameters of a model before forward passes that are repeated."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from runner.base.errors import TaskFault
from runner.tensors.bitwise import bitwise_equal, is_dense
from runner.tensors.module_buffers import TensorVersion, buffers_of, is_writable


class _TensorState(NamedTuple):
    """A buffer or frozen parameter at some time.

    copy  None if there was no tensor, or one that is not dense, which is restored without its values
    """

    seen: TensorVersion
    copy: Tensor | None

    def differs(self, now: Tensor | None, *, in_bits: bool) -> bool:
        """Return whether the value has changed; without `in_bits`, compare only if torch recorded a change."""
        is_changed = self.seen.is_changed(now)
        # The fake tensors of a memory prediction have no values to compare.
        if self.copy is None or now is None or type(now) not in (Tensor, nn.Parameter) or not is_dense(now):
            return is_changed
        return (is_changed or in_bits) and not bitwise_equal(now, self.copy)

    def restore(self) -> Tensor | None:
        """Return the tensor with its value at that time."""
        tensor = self.seen.tensor
        if tensor is None or self.copy is None:
            return tensor
        if tensor.shape != self.copy.shape or not is_writable(tensor):
            return self.copy.to(tensor.device, copy=True)
        with torch.no_grad():
            return tensor.copy_(self.copy)


# Larger ones belong to a pretrained model, of which the host may not have room for a copy.
MAX_FROZEN_BYTES = 1 << 30

_TensorKey = tuple[nn.Module, str]  # the module that owns a buffer or parameter, and its name in this module
ModelState = dict[_TensorKey, _TensorState]


class ModelStates:
    """Records the buffers and frozen parameters of a model before each forward pass.

    A tensor has one copy, which all states share, until a pass changes it; then it is copied before each pass. The
    shared copies are kept for later updates, because a norm in eval mode may be in training mode later, for example.
    They are on the host, because they would take device memory during backward passes. Frozen parameters of more than
    `MAX_FROZEN_BYTES` in total are not copied, so a pass must not change them.
    """

    def __init__(self) -> None:
        self.is_first = True  # in the first update
        self._constant: ModelState = {}
        self._changing: set[_TensorKey] = set()

    def record(self, model: nn.Module) -> ModelState:
        """Return the state of the model. Raises TaskFault if a pass has changed a parameter that was not copied."""
        tensors = {(module, key): tensor for module in model.modules() for key, tensor in _list_state(module)}
        before, self._constant, states = self._constant, {}, {}
        # Writes through .data, by the kernel of a batch norm or by compiled code increment no version, so the bits of
        # all tensors are compared in the first update. In later updates, the bits of all tensors of a module are
        # compared if one has a new version: a batch norm increments that of num_batches_tracked.
        modules = {key[0] for key, state in before.items() if state.seen.is_changed(tensors.get(key))}
        frozen = [tensor for tensor in tensors.values() if isinstance(tensor, nn.Parameter)]
        copies_frozen = sum(tensor.nbytes for tensor in frozen) <= MAX_FROZEN_BYTES
        for key, tensor in tensors.items():
            old = before.get(key)
            is_copied = copies_frozen or not isinstance(tensor, nn.Parameter)
            if old is not None and old.differs(tensor, in_bits=self.is_first or key[0] in modules):
                if not is_copied:
                    raise _large_frozen_fault(key)
                self._changing.add(key)
            seen, is_constant = TensorVersion.of(tensor), key not in self._changing
            if old is not None and is_constant:
                states[key] = old._replace(seen=seen)
            else:
                states[key] = _TensorState(seen, _copy_dense(tensor, on_host=is_constant) if is_copied else None)
            if is_constant:
                self._constant[key] = states[key]
        return states

    def restore(self, states: ModelState) -> None:
        """Restore the tensors that any pass has changed."""
        for key, state in states.items():
            if key in self._changing:
                module, name = key
                tensors: Any = module._parameters if name in module._parameters else buffers_of(module)
                tensors[name] = state.restore()


def _list_state(module: nn.Module) -> Iterator[tuple[str, Tensor | None]]:
    """Yield the buffers and frozen parameters of a module, not of its children."""
    yield from buffers_of(module).items()
    for key, weight in module._parameters.items():
        if weight is not None and not weight.requires_grad and is_writable(weight):
            yield key, weight


def _copy_dense(tensor: Tensor | None, *, on_host: bool) -> Tensor | None:
    if tensor is None or not is_dense(tensor):
        return None
    return tensor.detach().to("cpu" if on_host else tensor.device, copy=True)


def _large_frozen_fault(key: _TensorKey) -> TaskFault:
    module, name = key
    return TaskFault(
        f"embed() changes a frozen parameter of {type(module).__name__}, {name}, but is called twice for most"
        f" micro-batches, and parameters are restored only if those that are frozen have at most"
        f" {MAX_FROZEN_BYTES >> 30} GiB in total",
        fix=f'register it as a buffer: self.register_buffer("{name}", ...), or change it in begin_update',
    )
