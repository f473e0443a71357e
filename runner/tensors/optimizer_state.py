"""Measure, export and import the state of optimizers, and detect changes by a failed step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from runner.base.errors import IncompatibleResume, TaskFault
from runner.base.text import abbreviate
from runner.tensors.module_buffers import overwrite
from runner.tensors.step_counters import changed_numbers, restore_numbers, select_changed
from runner.tensors.stored_tensor import Saved, StoredTensor, first_row, in_memory

SHARED_STATE = "<state>"  # name of the entries of `state` that belong to no parameter; no module can have it
_TENSOR = {"<tensor>": True}  # stands for a tensor in a stored list or dictionary


class StepChangeDetector:
    """Detect whether a failed step changed anything, and remove the state that it initialized.

    Adam's kernels increment the step count first, so the version of that tensor shows whether a step has started. The
    versions of parameters do not show it, because fused kernels change parameters without incrementing their versions.
    Other libraries increment no versions at all.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        is_adam = _optimizer_kind(optimizer) in ("torch.AdamW", "torch.Adam")
        is_plain = _optimizer_kind(optimizer) == "torch.SGD" and not optimizer.defaults.get("fused")
        self._read_versions = self._step_versions if is_adam else self._all_versions if is_plain else None

    def begin(self) -> None:
        """Start a step."""
        self._num_states = len(self.optimizer.state)
        self._before = self._read_versions() if self._read_versions is not None else []

    def is_unchanged(self) -> bool:
        """Return whether the failed step has changed nothing; False if that cannot be determined."""
        state = self.optimizer.state
        fresh = list(state)[self._num_states :]
        if self._read_versions is None or any(float(state[slot].get("step", 0.0)) for slot in fresh):
            return False
        for slot in fresh:
            del state[slot]
        return self._read_versions() == self._before

    def _step_versions(self) -> list[int]:
        return [state["step"]._version for state in self.optimizer.state.values()]

    def _all_versions(self) -> list[int]:
        held = [value for state in self.optimizer.state.values() for value in state.values()]
        weights = [weight for group in self.optimizer.param_groups for weight in group["params"]]
        return [tensor._version for tensor in (*weights, *held) if isinstance(tensor, Tensor)]


def state_bytes(optimizer: Optimizer) -> int:
    """Return the memory of this rank's state tensors in bytes; 0 before the first update."""
    parts = {id(part): part.numel() * part.element_size() for part in state_tensors(optimizer)}
    return sum(parts.values())


def state_tensors(optimizer: Optimizer) -> Iterator[Tensor]:
    """Yield the plain tensors of this rank's state; a shared one once per use."""
    for state in optimizer.state.values():
        for _, value in _nested_tensors(state):
            yield from (part for _, part in _plain_tensors(value, into_shards=True))


def expected_state_bytes(optimizer: Optimizer) -> int:
    """Return the expected size of the state in bytes, if it is kept in the precision of the parameters.

    The state is built on the meta device, so no memory is used. For optimizers whose initial state is not known here,
    the actual size is returned, or two tensors per parameter before the first update.
    """
    new_state = _FULL_PRECISION.get(_optimizer_kind(optimizer)) or _NEW_STATES.get(_optimizer_kind(optimizer))
    total = 0 if new_state else state_bytes(optimizer)
    if total:
        return total
    for slot in _slots(optimizer):
        for _, part in _plain_tensors(slot.parameter, into_shards=True):
            if new_state is None:
                total += 2 * part.numel() * part.element_size()
                continue
            # Only step counts of kernels that are not fused are allocated, because they are not on the parameter's
            # device: a few bytes each.
            twin = nn.Parameter(torch.empty_like(part, device="meta"), requires_grad=False)
            state = new_state(optimizer, slot._replace(parameter=twin))
            total += sum(held.numel() * held.element_size() for held in state.values() if isinstance(held, Tensor))
    return total


def export_state(optimizer: Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the state as tensors by "<parameter name>.<key>" and a JSON-serializable rest.

    Entries of `state` whose key is not a parameter have SHARED_STATE instead of the name of a parameter. The tensors
    are the optimizer's own, not copies; sharded parameters give DTensors. Learning rates and other options are not
    state: they come from the configuration. Raises TaskFault for a key or a value that a checkpoint cannot store.
    """
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, Any] = changed_numbers(optimizer, _weights(optimizer))
    seen: set[int] = set()
    states = {slot.name: optimizer.state.get(slot.parameter, {}) for slot in _slots(optimizer)}
    for name, state in {**states, SHARED_STATE: _shared_state(optimizer)}.items():
        for key, value in state.items():
            if not isinstance(key, str):
                raise _unsaved(f"a key of type {type(key).__name__}", name, optimizer)
            if not isinstance(value, Tensor):
                numbers[f"{name}.{key}"] = _without_tensors(value, f"{name}: state[{key!r}]", optimizer)
        for key, part in _flatten_state(state):
            # bitsandbytes shares one table among all parameters; safetensors requires separate memory per tensor
            tensors[f"{name}.{key}"] = part.detach().clone() if id(part) in seen else part.detach()
            seen.add(id(part))
    return tensors, {"optimizer": _optimizer_kind(optimizer), "numbers": numbers}


def import_state(optimizer: Optimizer, tensors: Saved, rest: Mapping[str, Any]) -> None:
    """Restore, bit for bit, the state returned by `export_state`.

    Memory layout and device follow the parameters of this optimizer, which may use other kernels than the optimizer
    that was saved. A parameter may have no state (not updated yet), but not a partial one. Sharded parameters accept
    full tensors or DTensors. Raises IncompatibleResume, with nothing changed, if names, shapes or types differ.
    """
    if rest["optimizer"] != _optimizer_kind(optimizer):
        raise IncompatibleResume(
            f"the checkpoint's optimizer is {rest['optimizer']}, but this run's is {_optimizer_kind(optimizer)}",
            where="optimizer",
            fix="resume with the optimizer it was saved with, or use resume=fresh",
        )
    numbers: Mapping[str, Any] = rest["numbers"]
    outside_of_state = select_changed(optimizer, numbers)
    unused = {*tensors, *numbers} - outside_of_state.keys()
    new_state = _NEW_STATES.get(_optimizer_kind(optimizer))
    problems: list[str] = []
    restored: dict[Tensor, dict[str, Any]] = {}
    for slot in _slots(optimizer):
        if new_state is not None:
            state = new_state(optimizer, slot)
        else:
            state = _read_state(slot.name, partial(_zeros_for, slot.parameter, tensors), unused, numbers)
        parts = {f"{slot.name}.{key}": part for key, part in _flatten_state(state)}
        counts = {f"{slot.name}.{key}": key for key, value in state.items() if not isinstance(value, Tensor)}
        if unused.isdisjoint({*parts, *counts}):
            continue
        for full_name, part in parts.items():
            problems += _differences(full_name, part, tensors.get(full_name))
        problems += [f"{full_name} is missing" for full_name in counts if full_name not in numbers]
        unused -= {*parts, *counts}
        if not problems:
            for full_name, part in parts.items():
                copy_values(part, tensors[full_name])
            if new_state is not None:  # otherwise, `_read_state` has set the numbers
                state.update({key: numbers[full_name] for full_name, key in counts.items()})
            restored[slot.parameter] = state
    shared = _shared_state(optimizer)
    if new_state is None:
        saved = _read_state(SHARED_STATE, partial(_copy_of_shared, optimizer, tensors), unused, numbers)
        names = (f"{SHARED_STATE}.{key}" for key, _ in _flatten_state(saved))
        problems += [f"{name} is missing" for name in names if name not in tensors]
        shared |= saved
        unused = {name for name in unused if not name.startswith(f"{SHARED_STATE}.")}
    problems += [f"{full_name} belongs to no parameter of this optimizer" for full_name in sorted(unused)]
    if problems:
        raise IncompatibleResume(
            f"the checkpoint's optimizer state does not fit: {abbreviate(problems, 3, '; ')}",
            where="optimizer",
            fix="resume with the model and optimizer it was saved with, or use resume=fresh",
        )
    optimizer.state.clear()
    optimizer.state.update({**restored, **shared})
    restore_numbers(optimizer, outside_of_state, _weights(optimizer))


class _Slot(NamedTuple):
    """A parameter and its position in an optimizer."""

    name: str
    parameter: nn.Parameter
    group: Mapping[str, Any]
    group_index: int
    position: int


def _slots(optimizer: Optimizer) -> Iterator[_Slot]:
    for group_index, group in enumerate(optimizer.param_groups):
        for position, (name, parameter) in enumerate(zip(group["names"], group["params"], strict=True)):
            yield _Slot(name, parameter, group, group_index, position)


def _weights(optimizer: Optimizer) -> Iterator[Tensor]:
    """Yield the plain tensors of this rank's parameters."""
    for slot in _slots(optimizer):
        yield from (part for _, part in _plain_tensors(slot.parameter, into_shards=True))


def _optimizer_kind(optimizer: Optimizer) -> str:
    """Return library and class: bitsandbytes.AdamW8bit and torchao.AdamW8bit keep different states."""
    library = type(optimizer).__module__.partition(".")[0]
    return getattr(optimizer, "kind", f"{library}.{type(optimizer).__name__}")


def _plain_tensors(tensor: Tensor, *, into_shards: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Yield the plain tensors inside a tensor subclass with their name suffixes; inside DTensors only if requested."""
    if not hasattr(tensor, "__tensor_flatten__") or (hasattr(tensor, "device_mesh") and not into_shards):
        yield "", tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        inner = getattr(tensor, name)
        if isinstance(inner, Tensor):  # a DTensor also lists its mesh
            yield from ((f".{name}{suffix}", part) for suffix, part in _plain_tensors(inner, into_shards=into_shards))


def _flatten_state(state: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    for name, value in _nested_tensors(state):
        yield from ((f"{name}{suffix}", part) for suffix, part in _plain_tensors(value))


def _nested_tensors(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in lists, tuples and dictionaries by "<key>.<index>", such as the factors of Shampoo."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, (Mapping, list, tuple)):
        lead = f"{name}." if name else ""
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _nested_tensors(item, f"{lead}{key}")


def _without_tensors(value: Any, where: str, optimizer: Optimizer) -> Any:
    """Return a JSON-serializable copy of a value, with a marker instead of each tensor; tuples become lists."""
    if isinstance(value, Tensor):
        return _TENSOR
    if isinstance(value, (list, tuple)):
        return [_without_tensors(item, where, optimizer) for item in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _without_tensors(item, where, optimizer) for key, item in value.items()}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise _unsaved(f"a value of type {type(value).__name__}", where, optimizer)


def _unsaved(what: str, where: str, optimizer: Optimizer) -> TaskFault:
    return TaskFault(
        f"the state of the optimizer {type(optimizer).__name__} contains {what}, which a checkpoint cannot store:"
        f" {where}",
        fix="keep only tensors, numbers, strings, lists, and dictionaries with string keys in `state`",
    )


def _read_state(
    name: str, make: Callable[[str], Tensor], saved_names: Collection[str], numbers: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the saved state under a name, for an optimizer defined by the task; `make` returns its tensors by name."""
    lead = f"{name}."

    def fill(value: Any, name: str) -> Any:
        if value == _TENSOR:
            return make(name) if name in saved_names else torch.zeros(())  # reported as missing
        if isinstance(value, list):
            return [fill(item, f"{name}.{index}") for index, item in enumerate(value)]
        if isinstance(value, dict):
            return {key: fill(item, f"{name}.{key}") for key, item in value.items()}
        return value

    own = [name for name in saved_names if name.startswith(lead)]
    state = {name.removeprefix(lead): fill(numbers[name], name) for name in own if name in numbers}
    nested = {f"{lead}{name}" for name, _ in _nested_tensors(state)}
    return state | {name.removeprefix(lead): make(name) for name in own if name not in {*numbers, *nested}}


def _zeros_for(parameter: Tensor, tensors: Saved, name: str) -> Tensor:
    """Return zeros with the shape of a saved tensor of a parameter's state, with its memory layout if shapes are equal.

    Step counts are on the host, as in torch's optimizers.
    """
    saved = tensors[name]
    if saved.shape == parameter.shape:
        return torch.zeros_like(parameter, dtype=saved.dtype, requires_grad=False)
    return torch.zeros(saved.shape, dtype=saved.dtype, device=parameter.device if saved.shape else "cpu")


def _shared_state(optimizer: Optimizer) -> dict[Any, Any]:
    states: Mapping[Any, Any] = optimizer.state
    return {key: value for key, value in states.items() if not isinstance(key, Tensor)}


def _copy_of_shared(optimizer: Optimizer, tensors: Saved, name: str) -> Tensor:
    """Return a copy of a saved tensor, on the device of the optimizer's tensor if the optimizer has created it."""
    saved = in_memory(tensors[name])
    device = optimizer.param_groups[0]["params"][0].device if saved.shape else torch.device("cpu")
    created = dict(_flatten_state(_shared_state(optimizer))).get(name.removeprefix(f"{SHARED_STATE}."))
    return saved.to(device if created is None else created.device, copy=True)


def _differences(name: str, part: Tensor, saved: Tensor | StoredTensor | None) -> list[str]:
    if saved is None:
        return [f"{name} is missing"]
    return [
        f"{name} must be {_format_value(expected)}, but is {_format_value(found)}"
        for expected, found in ((tuple(part.shape), tuple(saved.shape)), (part.dtype, saved.dtype))
        if expected != found
    ]


def _format_value(value: object) -> str:
    return str(value).removeprefix("torch.")


def copy_values(part: Tensor, saved: Tensor | StoredTensor) -> None:
    """Copy a full tensor into one that may be sharded; from a stored tensor, only the rows of the shard are read.

    The memory layout of the target is kept, because fused kernels read raw memory: state and parameter must have the
    same layout.
    """
    mesh = getattr(part, "device_mesh", None)
    with torch.no_grad():
        if isinstance(saved, StoredTensor) and mesh is not None and is_split_by_rows(part):
            local: Tensor = part.to_local()  # type: ignore[attr-defined]
            start = first_local_row(part)
            local.copy_(saved.read(start, start + local.shape[0]))
            return
        full = in_memory(saved)
        if mesh is not None and not hasattr(full, "device_mesh"):
            from torch.distributed.tensor import distribute_tensor  # noqa: TID251 - a tensor type, no communication

            full = distribute_tensor(full.to(part.device), mesh, part.placements, src_data_rank=None)  # type: ignore[attr-defined]
        if mesh is None:
            overwrite(part, full)
        else:
            part.copy_(full)


def is_split_by_rows(tensor: Any) -> bool:
    """Return whether each rank holds some rows of a DTensor, in the order of the last dimension of its mesh."""
    *outer, last = tensor.placements
    return bool(last.is_shard(0)) and all(placement.is_replicate() for placement in outer)


def first_local_row(tensor: Any) -> int:
    """Return the first row that this rank holds of a DTensor that is split by rows."""
    mesh = tensor.device_mesh
    dimension = mesh.ndim - 1
    return first_row(tensor.shape[0], mesh.size(dimension), mesh.get_local_rank(dimension))


# Initial state of a parameter at its first step; the optimizer is not modified.


def _new_adam_state(optimizer: Optimizer, slot: _Slot) -> dict[str, Any]:
    # fused kernels count steps on the device; the others on the host, where reading needs no synchronization
    fused = slot.group.get("fused", False)
    wide = torch.get_default_dtype() == torch.float64 and not fused
    return {
        "step": torch.zeros(
            (), dtype=torch.float64 if wide else torch.float32, device=slot.parameter.device if fused else "cpu"
        ),
        "exp_avg": torch.zeros_like(slot.parameter, requires_grad=False),
        "exp_avg_sq": torch.zeros_like(slot.parameter, requires_grad=False),
    }


def _new_sgd_state(optimizer: Optimizer, slot: _Slot) -> dict[str, Any]:
    if not slot.group["momentum"]:
        return {}
    return {"momentum_buffer": torch.zeros_like(slot.parameter, requires_grad=False)}


def _new_bitsandbytes_state(optimizer: Any, slot: _Slot) -> dict[str, Any]:
    previous = optimizer.state.pop(slot.parameter, None)
    optimizer.init_state(slot.group, slot.parameter, slot.group_index, slot.position)
    state: dict[str, Any] = optimizer.state.pop(slot.parameter)
    if previous is not None:
        optimizer.state[slot.parameter] = previous
    return state


def _new_torchao_state(optimizer: Any, slot: _Slot) -> dict[str, Any]:
    return {
        "step": torch.tensor(0.0),
        "exp_avg": optimizer._new_buffer(slot.parameter, True),  # signed
        "exp_avg_sq": optimizer._new_buffer(slot.parameter, False),
    }


def _zero_step_count() -> Tensor:
    """Return a step count of 0 on the host, as torch's optimizers without a fused kernel keep it."""
    return torch.zeros((), dtype=torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32)


def _new_nadam_state(optimizer: Optimizer, slot: _Slot) -> dict[str, Any]:
    means = {name: torch.zeros_like(slot.parameter, requires_grad=False) for name in ("exp_avg", "exp_avg_sq")}
    return {"step": _zero_step_count(), "mu_product": _zero_step_count() + 1.0, **means}


def _new_rmsprop_state(optimizer: Optimizer, slot: _Slot) -> dict[str, Any]:
    is_needed = {"square_avg": True, "momentum_buffer": slot.group["momentum"], "grad_avg": slot.group["centered"]}
    means = {
        name: torch.zeros_like(slot.parameter, requires_grad=False) for name, is_used in is_needed.items() if is_used
    }
    return {"step": _zero_step_count(), **means}


def _new_adafactor_state(optimizer: Optimizer, slot: _Slot) -> dict[str, Any]:
    weight = slot.parameter
    if weight.dim() < 2:
        return {"step": _zero_step_count(), "variance": torch.zeros_like(weight, requires_grad=False)}
    *rows, height, width = weight.shape
    return {
        "step": _zero_step_count(),
        "row_var": weight.new_zeros((*rows, height, 1), requires_grad=False),
        "col_var": weight.new_zeros((*rows, 1, width), requires_grad=False),
    }


def _new_lion_state(optimizer: Optimizer, slot: _Slot) -> dict[str, Any]:
    return {"exp_avg": torch.zeros_like(slot.parameter, requires_grad=False)}


def _new_muon_state(optimizer: Optimizer, slot: _Slot) -> dict[str, Any]:
    if slot.group["rule"] == "adamw":
        return _new_adam_state(optimizer, slot)
    return {"momentum_buffer": torch.zeros_like(slot.parameter, requires_grad=False)}


_NEW_STATES: Mapping[str, Callable[[Any, _Slot], dict[str, Any]]] = {
    "torch.AdamW": _new_adam_state,
    "torch.Adam": _new_adam_state,
    "torch.SGD": _new_sgd_state,
    "torch.NAdam": _new_nadam_state,
    "torch.RMSprop": _new_rmsprop_state,
    "torch.Adafactor": _new_adafactor_state,
    "runner.Lion": _new_lion_state,
    "runner.MuonWithAdamW": _new_muon_state,
    "bitsandbytes.AdamW8bit": _new_bitsandbytes_state,
    "torchao.AdamW8bit": _new_torchao_state,
}
# State of 8-bit optimizers in the precision of the parameters
_FULL_PRECISION: Mapping[str, Callable[[Any, _Slot], dict[str, Any]]] = {
    "bitsandbytes.AdamW8bit": _new_adam_state,
    "torchao.AdamW8bit": _new_adam_state,
}
