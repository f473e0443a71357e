"""Check the members of a task or hook before the first update: parameters of methods, and types of attributes."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FunctionType
from typing import Any

from runner.base.errors import TaskFault
from runner.base.task import Fit, Task
from runner.engine.contract_checks import describe_value
from runner.engine.error_diagnosis import locate_definition


def check_members(task: Task, source: Path) -> None:
    """Raise TaskFault if a member of the task cannot be used as class Task declares it.

    `loss` is excluded: its arguments depend on the phase, see `check_arguments`.
    """
    check_methods(task, Task, source, exclude=("loss",))
    for name, declared in vars(Task).items():
        if isinstance(declared, property):
            _check_mapping(task, name, source)
    for name, (is_valid, what, fix) in _ATTRIBUTES.items():
        value = getattr(task, name)
        if not is_valid(value):
            where = locate_definition(type(task), source)
            raise TaskFault(f"{name} must be {what}, but is {value!r}", where=where, fix=f"{name} = {fix}")


def check_methods(instance: object, base: type, source: Path, *, exclude: tuple[str, ...] = ()) -> None:
    """Raise TaskFault if a method that overrides one of `base` does not accept the same arguments."""
    for name, declared in vars(base).items():
        if name.startswith("_") or name in exclude or not isinstance(declared, FunctionType):
            continue
        method = getattr(instance, name)
        if getattr(method, "__func__", None) is declared:
            continue
        arguments = [
            parameter.name for parameter in inspect.signature(declared).parameters.values()
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        ][1:]  # fmt: skip
        takes_options = inspect.signature(declared).parameters.keys() & {"options"}
        options = ["*", "samples: int = 3"] if takes_options else []
        fix = f"def {name}({', '.join(['self', *arguments, *options])}):"
        check_arguments(method, name, arguments, source, fix=fix)


def check_arguments(
    function: Callable[..., Any], name: str, arguments: list[str] | tuple[str, ...], source: Path, *, fix: str
) -> None:
    """Raise TaskFault if a function cannot be called with these positional arguments.

    Keyword-only parameters are settings, whose values come from the configuration.
    """
    where = locate_definition(function, source)
    if not callable(function):
        raise TaskFault(f"{name} must be a method, but is {describe_value(function)}", where=str(source), fix=fix)
    try:
        signature = inspect.signature(function)
    except ValueError:  # a builtin without a signature
        return
    settings = [item.name for item in signature.parameters.values() if item.kind is item.KEYWORD_ONLY]
    try:
        signature.bind(*arguments, **dict.fromkeys(settings))
    except TypeError as error:
        how = f"with {', '.join(arguments)}" if arguments else "without arguments"
        raise TaskFault(f"{name} is called {how}: {error}", where=where, fix=fix) from error


def _check_mapping(task: Task, name: str, source: Path) -> None:
    try:
        value = getattr(task, name)
    except Exception:  # it may need begin_phase; its first use reports the error
        return
    if isinstance(value, Mapping):
        for key, item in value.items():
            is_valid, expected = _VALUES[name]
            if not is_valid(item):
                what = f"{name}[{key!r}] must be a {expected}, but is {describe_value(item)}"
                raise TaskFault(what, where=locate_definition(type(task), source), fix=f"see {name} of runner.Task")
        return
    if inspect.ismethod(value):
        what, fix = "is a method", f"write @property above def {name}(self):"
        raise TaskFault(f"{name} must be a property, but {what}", where=locate_definition(value, source), fix=fix)
    what = f"{name} must be a mapping, but is {describe_value(value)}"
    raise TaskFault(what, where=locate_definition(type(task), source), fix=f"@property\ndef {name}(self): return {{}}")


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0


def _is_mapping(value: Any) -> bool:
    return isinstance(value, Mapping)


def _is_fit(value: Any) -> bool:
    """Return whether it has the methods of a Fit; it need not inherit from the class."""
    return all(callable(getattr(value, name, None)) for name, member in vars(Fit).items() if callable(member))


# mapping of a task -> whether a value of it is valid, and what it must be
_VALUES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "losses": (callable, "Callable"),
    "fits": (_is_fit, "Fit"),
    "packages": (_is_mapping, "Mapping"),
    "objectives": (_is_mapping, "Mapping"),
}
# attribute -> whether a value is valid, what it must be, an example
_ATTRIBUTES: Mapping[str, tuple[Callable[[Any], bool], str, str]] = {
    "item": (lambda value: isinstance(value, str) and bool(value), "the name of what is counted", '"token"'),
    "baseline_name": (lambda value: isinstance(value, str) and bool(value), "the name of a model", '"constant answer"'),
    "items_per_sample": (_is_positive, "a number above 0", "1.0"),
    "loss_is_additive": (lambda value: isinstance(value, bool), "True or False", "False"),
}
