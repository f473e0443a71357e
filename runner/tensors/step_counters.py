"""Save in checkpoints, and restore, the numbers that an optimizer changes outside of its state.

Such numbers are in attributes of the optimizer, or in its parameter groups, next to settings such as the learning rate,
which checkpoints do not contain, because they come from the configuration.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

COUNTERS = ("k", "weight_sum", "lr_max")  # in the parameter groups of schedulefree 1.4
_AT_START = "_numbers_at_start"  # attribute of the optimizer
_KINDS = _GROUP, _OPTIMIZER = "<group>", "<optimizer>"  # no module can have these names
_SETTINGS = {"lr", "lr_scale", "base_lr", "initial_lr"}
_PLAIN = (int, float, str, type(None))
_DTYPES = {
    str(dtype): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.bfloat16, torch.float16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}


def keep_counters_in_state(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer in training mode, with its counters in the state of each parameter."""
    for group in optimizer.param_groups:
        group["train_mode"] = True  # `train()` would also create an empty state for each parameter
    optimizer.register_step_pre_hook(_load_counters)
    optimizer.register_step_post_hook(_store_counters)
    return optimizer


def _load_counters(optimizer: Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        states = (optimizer.state[weight] for weight in group["params"] if weight in optimizer.state)
        counters = next((state for state in states if COUNTERS[0] in state), None)
        group.update({name: counters[name] for name in COUNTERS} if counters else {})


def _store_counters(optimizer: Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for weight in group["params"]:
            if optimizer.state.get(weight):
                optimizer.state[weight].update({name: group[name] for name in COUNTERS})


def remember_numbers(optimizer: Optimizer) -> None:
    """Record the numbers in the groups and attributes, so that checkpoints contain those that change afterwards.

    A number is None, a bool, an int, a float, a str, or a tensor with one element. `step` is not wrapped: the numbers
    are compared when a checkpoint is written.
    """
    vars(optimizer)[_AT_START] = [dict(_numbers(kind, holder, set())) for kind, _, holder in _holders(optimizer)]


def changed_numbers(optimizer: Optimizer, weights: Iterable[Tensor]) -> dict[str, Any]:
    """Return the numbers that changed since `remember_numbers`, by "<parameter name>.<place>.<key>".

    The place is `<group>` or `<optimizer>`, where the number was found.

    weights  plain tensors of the parameters; tensors that share memory with them are not numbers
    The numbers are repeated for each parameter of a group, because a rank may own only some of the parameters.
    """
    result: dict[str, Any] = {}
    if _AT_START not in vars(optimizer):
        return result
    storages = _storages(weights)
    for (kind, names, holder), at_start in zip(_holders(optimizer), vars(optimizer)[_AT_START], strict=True):
        for key, value in _numbers(kind, holder, storages):
            if key not in at_start or repr(value) != repr(at_start[key]):  # NaN equals itself, and 0 is not 0.0
                result |= {f"{name}.{kind}.{key}": value for name in names}
    return result


def select_changed(optimizer: Optimizer, numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Return the saved numbers that came from `changed_numbers`."""
    is_kept = _AT_START in vars(optimizer)
    return {name: value for name, value in numbers.items() if is_kept and is_changed_number(name)}


def is_changed_number(name: str) -> bool:
    """Return whether the name is one of `changed_numbers`; other numbers belong to the state of a parameter."""
    return any(f".{kind}." in name for kind in _KINDS)


def restore_numbers(optimizer: Optimizer, numbers: Mapping[str, Any], weights: Iterable[Tensor]) -> None:
    """Restore the numbers that `changed_numbers` returned."""
    if not numbers:
        return
    storages, device = _storages(weights), optimizer.param_groups[0]["params"][0].device
    saved: defaultdict[tuple[str, str], dict[str, Any]] = defaultdict(dict)
    for full_name, value in numbers.items():
        for kind in _KINDS:
            name, found, key = full_name.partition(f".{kind}.")
            saved[name, kind] |= {key: value} if found else {}
    new: dict[tuple[int, str], tuple[Tensor, Tensor]] = {}  # a tensor in two places, with equal values, stays one
    for kind, names, holder in _holders(optimizer):
        for key, value in next((saved[name, kind] for name in names if saved.get((name, kind))), {}).items():
            current = holder.get(key)
            if not isinstance(value, list):
                holder[key] = value
            elif not isinstance(current, Tensor):
                holder[key] = _decode(value, device)
            elif _is_own_scalar(current, storages):  # a view of a parameter is restored with the parameter
                # Not in place: groups share a tensor of the defaults until a step replaces it.
                _, holder[key] = new.setdefault((id(current), repr(value)), (current, _decode(value, device)))
                holder[key].requires_grad_(current.requires_grad)


def is_number(value: Any) -> bool:
    """Return whether a value that was read from a checkpoint can be one of `changed_numbers`."""
    if not isinstance(value, list):
        return isinstance(value, _PLAIN)
    is_tensor = len(value) == 4 and isinstance(value[0], (int, float)) and isinstance(value[1], str)
    return (
        is_tensor
        and value[1] in _DTYPES
        and value[2] in [[1] * dims for dims in range(9)]
        and value[3] in (True, False)
    )


def _holders(optimizer: Optimizer) -> Iterator[tuple[str, list[str], dict[str, Any]]]:
    """Yield the groups and the attributes, each with the names of its parameters."""
    groups = [group for group in optimizer.param_groups if group["params"]]
    yield from ((_GROUP, group["names"], group) for group in groups)
    if groups:
        yield _OPTIMIZER, [name for group in groups for name in group["names"]], vars(optimizer)


def _numbers(kind: str, holder: Mapping[str, Any], storages: Collection[int]) -> Iterator[tuple[str, Any]]:
    """Yield the numbers of a group or of the attributes, as JSON-serializable values."""
    for key, value in holder.items():
        if kind == _GROUP and key in _SETTINGS:
            continue
        if isinstance(value, _PLAIN):
            yield key, value
        elif _is_own_scalar(value, storages):
            yield key, [value.item(), str(value.dtype), list(value.shape), value.device.type == "cpu"]


def _is_own_scalar(value: Any, storages: Collection[int]) -> bool:
    """Return whether a value is a plain tensor with one element outside of these storages."""
    is_scalar = type(value) is Tensor and value.numel() == 1 and str(value.dtype) in _DTYPES
    return is_scalar and value.device.type != "meta" and value.untyped_storage().data_ptr() not in storages


def _storages(tensors: Iterable[Tensor]) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def _decode(value: list[Any], device: torch.device) -> Tensor:
    element, dtype, shape, is_on_host = value
    return torch.tensor(element, dtype=_DTYPES[dtype], device="cpu" if is_on_host else device).reshape(shape)
