"""Build the hooks of the task file and of packages, and attribute their errors to them."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from runner.base.errors import TaskFault
from runner.config.configuration import Choice
from runner.config.option_table import file_of_reference, make
from runner.config.own_tables import ENABLED, HOOK
from runner.engine.contract_checks import describe_value
from runner.engine.error_diagnosis import locate_definition
from runner.engine.hooks.forward_state import ForwardState
from runner.engine.hooks.hook import Hook, PhaseView, Wants
from runner.engine.task_loading import task_errors
from runner.engine.task_members import check_methods

_EXPLAINED = (
    "begin", "after_update", "wants", "readings", "after_evaluation", "state_dict", "load_state_dict", "end",
)  # fmt: skip

_RETURNS: Mapping[str, tuple[type, str]] = {
    "wants": (Wants, "return runner.Wants(stop=False)"),
    "readings": (Mapping, 'return {"name": value}'),
}


def build_hooks(phase: PhaseView, kinds: Sequence[type[Hook]]) -> tuple[Hook, ...]:
    """Return hooks of these kinds, with those of the plan before ForwardState, which notes what an update changed."""
    shipped = [kind(phase) for kind in kinds]
    at = [type(hook) for hook in shipped].index(ForwardState)
    return (*shipped[:at], *(_built(phase, choice) for choice in phase.run_.plan.hooks), *shipped[at:])


def _built(phase: PhaseView, choice: Choice) -> Hook:
    source = file_of_reference(choice.function)
    keys = {name: value for name, value in choice.options.items() if name != ENABLED}
    kinds: dict[str, Callable[..., Hook]] = {}
    hook = make(kinds, choice.function, phase, **keys)
    if not isinstance(hook, Hook):
        raise TaskFault(f"the hook {choice.name} must be a subclass of runner.Hook", where=str(source))
    if getattr(hook, "phase", None) is not phase:
        fix = "call super().__init__(phase) in its __init__"
        raise TaskFault(f"the hook {choice.name} does not initialize runner.Hook", where=str(source), fix=fix)
    check_methods(hook, Hook, source)
    hook.name = f"{HOOK}.{choice.name}"
    for name in _EXPLAINED:
        if getattr(type(hook), name) is not getattr(Hook, name):
            setattr(hook, name, _explaining(getattr(hook, name), source, choice.name))
    return hook


def _explaining(method: Callable[..., Any], source: Path, name: str) -> Callable[..., Any]:
    """Return the method, with its exceptions as faults of the file that defines the hook."""

    @functools.wraps(method)
    def call(*given: Any) -> Any:
        with task_errors(source, f"{method.__name__} of the hook {name}"):
            found = method(*given)
        if method.__name__ == "state_dict":
            _check_state(found, source, name)
        kind, fix = _RETURNS.get(method.__name__, (object, ""))
        if not isinstance(found, kind):
            what = f"{method.__name__} of the hook {name} must return a {kind.__name__}, but returned"
            raise TaskFault(f"{what} {describe_value(found)}", where=locate_definition(method, source), fix=fix)
        return found

    return call


def _check_state(state: Any, source: Path, name: str) -> None:
    """Raise TaskFault for a state that a checkpoint cannot hold."""
    tensors = state.values() if isinstance(state, dict) else ()
    rest = {key: value for key, value in state.items() if not isinstance(value, Tensor)} if tensors else state
    try:
        json.dumps(rest)
        is_named = not isinstance(state, dict) or all(isinstance(key, str) for key in state)
    except (TypeError, ValueError, RecursionError):
        is_named = False
    if not is_named:
        what = f"state_dict of the hook {name} returned a state that a checkpoint cannot hold"
        fix = "return a dict of tensors, numbers, texts, lists and dicts of these, with texts as keys"
        raise TaskFault(what, where=str(source), fix=fix)
