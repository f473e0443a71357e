"""Build the hooks of the task file and of packages, and report their errors as faults of the file that defines them."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from runner.base.errors import TaskFault
from runner.config.configuration import Choice
from runner.config.custom_tables import ENABLED, HOOK
from runner.config.option_table import call_option, find_entry, reference_file
from runner.durable.checkpoint import LoadedCheckpoint
from runner.durable.safetensors_writer import unsupported_reason
from runner.engine.contract.contract_checks import check_methods, describe_value
from runner.engine.contract.error_diagnosis import locate_definition
from runner.engine.contract.task_loading import task_errors
from runner.engine.evaluation.media import parse_number
from runner.engine.hooks.forward_state import ForwardState
from runner.engine.hooks.hook import Hook, PhaseView, Wants
from runner.engine.parts.assemble import Parts

_WRAPPED_METHODS = (
    "begin", "before_step", "after_update", "wants", "readings", "after_evaluation", "state_dict", "load_state_dict",
    "end",
)  # fmt: skip

_RETURN_TYPES: Mapping[str, tuple[type, str]] = {
    "wants": (Wants, "return runner.Wants(stop=False)"),
    "readings": (Mapping, 'return {"name": value}'),
}


def build_hooks(phase: PhaseView, classes: Sequence[type[Hook]]) -> tuple[Hook, ...]:
    """Create all hooks, with those of the plan before ForwardState, which records what an update has changed."""
    built_in = [hook_class(phase) for hook_class in classes]
    index = [type(hook) for hook in built_in].index(ForwardState)
    custom = [_build_hook(phase, choice) for choice in phase.run.plan.hooks]
    return (*built_in[:index], *custom, *built_in[index:])


def _build_hook(phase: PhaseView, choice: Choice) -> Hook:
    source = reference_file(choice.function)
    options = {name: value for name, value in choice.options.items() if name != ENABLED}
    built_in: dict[str, Callable[..., Hook]] = {}  # none: the function is in the task file or a package
    hook = call_option(built_in, choice.function, phase, **options)
    if not isinstance(hook, Hook):
        raise TaskFault(f"the hook {choice.name} must be a subclass of runner.Hook", where=str(source))
    if getattr(hook, "phase", None) is not phase:
        fix = "call super().__init__(phase) in __init__ of the hook"
        raise TaskFault(f"the hook {choice.name} does not call __init__ of runner.Hook", where=str(source), fix=fix)
    check_methods(hook, Hook, source)
    hook.name = f"{HOOK}.{choice.name}"
    for name in _WRAPPED_METHODS:
        if getattr(type(hook), name) is not getattr(Hook, name):
            setattr(hook, name, _wrap_method(getattr(hook, name), source, choice.name))
    return hook


def check_hook_states(phase: PhaseView) -> None:
    """Raise TaskFault if a hook of the plan has a state that a checkpoint cannot store. Every rank must call it.

    A hook whose state_dict() raises is not refused: its state may be created by the first update.
    """
    for choice in phase.run.plan.hooks:
        (hook,) = (hook for hook in phase.hooks if hook.name == f"{HOOK}.{choice.name}")
        try:
            state = type(hook).state_dict(hook)  # not the wrapper, which turns exceptions into a TaskFault
        except Exception:
            continue
        _check_state(state, reference_file(choice.function), choice.name)


def load_for_inference(parts: Parts, checkpoint: LoadedCheckpoint) -> None:
    """Call `load_for_inference` of the hooks of the plan. Raises TaskFault if one of them raises."""
    for choice in parts.plan.hooks:
        hook_class = find_entry(choice.function)
        with task_errors(reference_file(choice.function), f"load_for_inference() of the hook {choice.name}"):
            hook_class.load_for_inference(parts, checkpoint)


def _wrap_method(method: Callable[..., Any], source: Path, name: str) -> Callable[..., Any]:
    """Wrap a method: report its exceptions and invalid results as faults of the file that defines the hook."""

    @functools.wraps(method)
    def call(*args: Any) -> Any:
        with task_errors(source, f"{method.__name__}() of the hook {name}"):
            result = method(*args)
        if method.__name__ == "state_dict":
            _check_state(result, source, name)
        expected, fix = _RETURN_TYPES.get(method.__name__, (object, ""))
        if not isinstance(result, expected):
            what = f"{name}.{method.__name__}() must return a {expected.__name__}, but returned"
            raise TaskFault(f"{what} {describe_value(result)}", where=locate_definition(method, source), fix=fix)
        if method.__name__ != "readings" or not isinstance(result, Mapping):
            return result
        try:
            return {key: _parse_reading(key, value) for key, value in result.items()}
        except (TypeError, ValueError) as error:
            where = locate_definition(method, source)
            raise TaskFault(f"{name}.readings(): {error}", where=where, fix=fix) from error

    return call


def _parse_reading(name: str, value: Any) -> float | None:
    number = parse_number(name, 0.0 if value is None else value)
    return None if value is None else number


def _check_state(state: Any, source: Path, name: str) -> None:
    tensors = (
        {key: value for key, value in state.items() if isinstance(value, Tensor)} if isinstance(state, dict) else {}
    )
    reasons = (_unsavable_reason(tensor) for tensor in tensors.values())
    reason = next((f"; {key}: {reason}" for key, reason in zip(tensors, reasons, strict=True) if reason), "")
    try:
        json.dumps({key: value for key, value in state.items() if key not in tensors} if tensors else state)
        is_serializable = not isinstance(state, dict) or all(isinstance(key, str) for key in state)
    except (TypeError, ValueError, RecursionError):
        is_serializable = False
    if reason or not is_serializable:
        what = f"state_dict() of the hook {name} returned a state that a checkpoint cannot store{reason}"
        fix = "return a dict with string keys whose values are dense tensors, numbers, strings, lists or dicts"
        raise TaskFault(what, where=str(source), fix=fix)


def _unsavable_reason(tensor: Tensor) -> str | None:
    return "it has no data" if tensor.is_meta else unsupported_reason(tensor)
