"""Record the buffers and frozen parameters of a model before forward passes that will be run again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from runner.base.errors import TaskFault
from runner.tensors.bitwise import bitwise_equal, is_dense
from runner.tensors.module_buffers import MAX_FROZEN_BYTES, TensorVersion, buffers_of, is_writable


class _TensorState(NamedTuple):
    """The recorded state of a buffer or frozen parameter.

    address  address of its data: an assignment to `.data` changes it without incrementing the version counter
    shared   its data if it shares the storage of a trained parameter, as after `slow.data = fast.data`; else None
    copy     copy of the values; None if there was no tensor, or if it was not copied, so its values are not restored
    """

    seen: TensorVersion
    address: int
    shared: Tensor | None
    copy: Tensor | None

    def is_written(self, now: Tensor | None) -> bool:
        """Return whether the tensor was replaced, or a write to it was recorded; its value may be the same."""
        return self.seen.is_changed(now) or self.address != _address(now)

    def differs(self, now: Tensor | None, *, always_compare: bool) -> bool:
        """Return whether the value has changed; without `always_compare`, compare only if a write was recorded."""
        # The fake tensors of a memory prediction have no values to compare.
        if self.copy is None or now is None or not _has_values(now) or not is_dense(now):
            return self.is_written(now)
        return (always_compare or self.is_written(now)) and not bitwise_equal(now, self.copy)

    def restore(self) -> Tensor | None:
        """Return the tensor with the recorded value."""
        tensor = self.seen.tensor
        if tensor is None or self.copy is None:
            return tensor
        if tensor.shape != self.copy.shape or not is_writable(tensor):
            copy = self.copy.to(tensor.device, copy=True)
            return nn.Parameter(copy, requires_grad=False) if isinstance(tensor, nn.Parameter) else copy
        if self.address != _address(tensor):  # its memory may be that of a trained parameter now
            tensor.data = self.copy.to(tensor.device, copy=True) if self.shared is None else self.shared
            return tensor
        with torch.no_grad():
            return tensor.copy_(self.copy)


_TensorKey = tuple[nn.Module, str]  # the module that owns a buffer or parameter, and its name in this module
ModelState = dict[_TensorKey, _TensorState]


class ModelStates:
    """Records the buffers and frozen parameters of a model between the forward passes of an update.

    Only changes made by forward passes are undone; changes between updates are kept. Consecutive states share the copy
    of a tensor that has not changed. Copies of a tensor that no pass has changed yet are kept on the host, in case a
    later pass changes it: a normalization layer in eval mode may be in training mode later, for example.

    Frozen parameters may be large, and a hook may change all of them after each update. In the first update, they are
    copied if they take at most `MAX_FROZEN_BYTES` in total; later, only if a pass of the first update changed one.
    """

    def __init__(self) -> None:
        self._is_first = True  # in the first update
        self._last: ModelState = {}
        self._changing: set[_TensorKey] = set()

    def record(self, model: nn.Module, *, after_passes: bool) -> ModelState:
        """Return the state of the model.

        after_passes  only passes and `couple` can have changed the model since the last call, so `restore` undoes
                      the changes
        Raises TaskFault if a pass has changed a frozen parameter that was not copied.
        """
        tensors = {(module, key): tensor for module in model.modules() for key, tensor in _list_state(module)}
        copies_frozen = self._copies_frozen(tensors)
        # Writes through .data, by the kernel of a batch norm, or by compiled code do not increment the version counter,
        # so all tensors are compared in the first update. In later updates, all tensors of a module are compared if the
        # version counter of one has changed: a batch norm increments that of num_batches_tracked.
        modules = {key[0] for key, state in self._last.items() if state.seen.is_changed(tensors.get(key))}
        trained = {_storage_address(weight) for weight in model.parameters() if weight.requires_grad} - {0}
        states: ModelState = {}
        for key, tensor in tensors.items():
            old, is_frozen = self._last.get(key), isinstance(tensor, nn.Parameter)
            always_compare = self._is_first or key in self._changing or key[0] in modules
            seen, address = TensorVersion.of(tensor), _address(tensor)
            is_copied = copies_frozen or not is_frozen
            differs = old is None or old.differs(tensor, always_compare=always_compare)
            # For frozen parameters, a write counts as a change: a momentum encoder that still equals the weights it
            # averages is written without changing.
            if after_passes and old is not None and (differs or (is_frozen and old.is_written(tensor))):
                if not is_copied:
                    raise _frozen_fault(key)
                self._changing.add(key)
            copy = None if not is_copied or old is None else old.copy
            on_host = key not in self._changing
            # A copy from before the first change is on the host, and would be transferred for each comparison.
            is_far = copy is not None and tensor is not None and not on_host and copy.device != tensor.device
            if is_copied and (differs or is_far):
                copy = _copy_dense(tensor, on_host=on_host)
            # The data of this tensor, because it may be only a part or the transpose of the trained parameter.
            shared = tensor.data if tensor is not None and _storage_address(tensor) in trained else None
            states[key] = _TensorState(seen, address, shared, copy)
        self._last = states
        return states

    def end_update(self) -> None:
        """Decide after the first update whether frozen parameters are copied in later ones."""
        if self._is_first:
            frozen = {key for key, state in self._last.items() if isinstance(state.seen.tensor, nn.Parameter)}
            # All of them, because the first update may not change every tensor of a momentum encoder.
            self._changing |= frozen if frozen & self._changing else set()
        self._is_first = False

    def restore(self, states: ModelState) -> None:
        """Restore the tensors that any pass has changed."""
        for key, state in states.items():
            if key in self._changing:
                module, name = key
                tensors: Any = module._parameters if name in module._parameters else buffers_of(module)
                tensors[name] = state.restore()

    def _copies_frozen(self, tensors: dict[_TensorKey, Tensor | None]) -> bool:
        frozen = {key: tensor for key, tensor in tensors.items() if isinstance(tensor, nn.Parameter)}
        if not self._is_first:
            return not self._changing.isdisjoint(frozen)
        return sum(tensor.numel() * tensor.element_size() for tensor in frozen.values()) <= MAX_FROZEN_BYTES


def _list_state(module: nn.Module) -> Iterator[tuple[str, Tensor | None]]:
    """Yield the buffers and frozen parameters of a module, not of its children."""
    yield from buffers_of(module).items()
    for key, weight in module._parameters.items():
        if weight is not None and not weight.requires_grad and is_dense(weight) and is_writable(weight):
            yield key, weight


def _has_values(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter)


def _address(tensor: Tensor | None) -> int:
    return tensor.data_ptr() if tensor is not None and _has_values(tensor) and is_dense(tensor) else 0


def _storage_address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if _address(tensor) else 0


def _copy_dense(tensor: Tensor | None, *, on_host: bool) -> Tensor | None:
    if tensor is None or not is_dense(tensor):
        return None
    return tensor.detach().to("cpu" if on_host else tensor.device, copy=True)


def _frozen_fault(key: _TensorKey) -> TaskFault:
    module, name = key
    return TaskFault(
        f"embed() or couple() changes {name}, a frozen parameter of {type(module).__name__}. embed() is called twice"
        " for most micro-batches, so the first of the two changes must be undone. That is possible only if the first"
        " update also changes a frozen parameter, and if the frozen parameters take at most"
        f" {MAX_FROZEN_BYTES >> 30} GiB in total",
        fix=f'register it as a buffer: self.register_buffer("{name}", ...), or change it in after_update of a hook',
    )
