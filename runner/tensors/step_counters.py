"""Keep numbers that an optimizer changes outside of its state in its state, where checkpoints find them.

Such numbers are in the parameter groups, beside the settings, which checkpoints leave to the configuration, or in
attributes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from runner.base.errors import TaskFault

COUNTERS = ("k", "weight_sum", "lr_max")  # schedulefree 1.4
_SIZE = "size"
_SETTINGS = {"params", "names", "lr", "lr_scale", "base_lr", "state", "param_groups", "defaults"}
_Place = tuple[str, int, str]  # prefix of names in the state, number of the group, name


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


def keep_changed_numbers_in_state(optimizer: Optimizer, location: str) -> None:
    """Store each number that a step changes in a group, or in an attribute, in the state of a parameter of the group.

    location  of the function that returned the optimizer, for messages
    The next step reads them from there, also after a resume. Raises TaskFault if a step changes the length of a
    container, which may hold anything.
    """
    changed: set[_Place] = set()
    step = optimizer.step

    def counted(*args: Any, **keys: Any) -> Any:
        _load(optimizer)
        before = _marks(optimizer)
        result = step(*args, **keys)
        differing = {place for place, mark in _marks(optimizer).items() if before.get(place) != mark}
        sizes = sorted(key for prefix, _, key in differing if prefix == _SIZE)
        if sizes:
            what = f"a step of the optimizer changes {sizes[0]}, which checkpoints do not contain"
            raise TaskFault(what, where=location, fix="keep tensors and numbers in self.state[parameter]")
        changed.update(differing)
        _store(optimizer, changed)
        return result

    # Not with hooks of torch: they also run inside, in the step of a base class.
    optimizer.step = counted  # type: ignore[method-assign]


def _load(optimizer: Optimizer) -> None:
    for prefix, _, holder, weights in _holders(optimizer):
        for weight in weights:
            state = optimizer.state.get(weight, {})
            kept = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
            if kept:
                holder.update(kept)
                break


def _store(optimizer: Optimizer, changed: Collection[_Place]) -> None:
    for prefix, number, holder, weights in _holders(optimizer):
        values = {prefix + key: holder[key] for lead, place, key in changed if (lead, place) == (prefix, number)}
        if values:  # an optimizer may recognize the first step of a parameter by its empty state
            weight = next((weight for weight in weights if optimizer.state.get(weight)), weights[0])
            optimizer.state[weight].update(values)


def _holders(optimizer: Optimizer) -> Iterator[tuple[str, int, dict[str, Any], list[nn.Parameter]]]:
    """Yield the groups and the attributes, each with the parameters whose state may hold their numbers."""
    for number, group in enumerate(optimizer.param_groups):
        if group["params"]:
            yield "group.", number, group, group["params"]
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    if weights:
        yield "optimizer.", 0, vars(optimizer), weights


def _marks(optimizer: Optimizer) -> dict[_Place, Any]:
    """Return the numbers, the versions of tensors, and the sizes of containers."""
    result: dict[_Place, Any] = {}
    for prefix, number, holder, _ in _holders(optimizer):
        for key, value in holder.items():
            if key in _SETTINGS or isinstance(value, bool):
                continue
            if isinstance(value, (int, float)):
                result[prefix, number, key] = value
            elif isinstance(value, Tensor):
                result[prefix, number, key] = id(value), value._version
            elif isinstance(value, (list, dict, set, deque)):
                result[_SIZE, number, key] = len(value)
    return result
