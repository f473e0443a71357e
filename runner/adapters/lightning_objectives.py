"""Suggest the OBJECTIVES that replace the optimizers of a LightningModule with several of them."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from torch.optim import Optimizer

from runner.config.options import find_signature

KERNELS = ("foreach", "fused", "capturable", "differentiable")  # parameters that do not change the update


def suggest_objectives(module: Any) -> str:
    """Return the OBJECTIVES with which a task trains the parameters of each optimizer of the module.

    A comment names what the settings cannot express. The result is a template if configure_optimizers fails because
    the module has not been set up, or if optimizers share a parameter.
    """
    settings = ""
    try:
        answer = module.configure_optimizers()
        if isinstance(answer, Optimizer):
            return "return the loss from training_step, without manual_backward and optimizer steps"
        optimizers, schedules = _list_optimizers(answer)
        paths = {id(each): [*accumulate(name.split("."), "{}.{}".format)] for name, each in module.named_parameters()}
        owned = [[paths[id(each)] for group in one.param_groups for each in group["params"]] for one in optimizers]
        lines = [
            _declare_objective(each, own, [other for other in owned if other is not own], schedules.get(id(each), ""))
            for each, own in zip(optimizers, owned, strict=True)
        ]
        declared = "\n".join(["OBJECTIVES = {", *lines, "}"])
        settings = 'SETTINGS = {"scheduler": "constant", "max_grad_norm": None}\n'
    except Exception:  # any code of the user
        declared = 'OBJECTIVES = {"NAME": {"trains": ["MODULE"], "optimizer": "adam", "optimizer.lr": 0.001}}'
    return (
        "write a task whose loss(self, model, batch, objective) returns the loss of each optimizer, as in"
        " docs/examples/own_gan.py. Declare the objectives in the order in which training_step updates them:\n"
        f"{settings}{declared}"
    )


def _list_optimizers(answer: Any) -> tuple[list[Optimizer], dict[int, str]]:
    """Return the optimizers of configure_optimizers, and id of an optimizer -> class of its schedule."""
    schedules: list[Any] = []
    if isinstance(answer[0], (list, tuple)):
        answer, schedules = answer
    optimizers = [each["optimizer"] if isinstance(each, Mapping) else each for each in answer]
    schedules = [*schedules, *(each.get("lr_scheduler") for each in answer if isinstance(each, Mapping))]
    plain = [each["scheduler"] if isinstance(each, Mapping) else each for each in schedules if each is not None]
    return optimizers, {id(each.optimizer): type(each).__name__ for each in plain}


def _declare_objective(
    optimizer: Optimizer, paths: Sequence[list[str]], others: Iterable[Sequence[list[str]]], schedule: str
) -> str:
    """Return the entry of OBJECTIVES for an optimizer: the largest modules that only it trains, and its options.

    paths     for each of its parameters, the modules that contain it, the largest first, and its own name
    others    the paths of the other optimizers
    schedule  class of the schedule of the optimizer; "" without one
    """
    taken = {part for other in others for path in other for part in path}
    trains = list(dict.fromkeys(next(part for part in path if part not in taken) for path in paths))
    values, by_group = _optimizer_values(optimizer, has_schedule=bool(schedule))
    option = type(optimizer).__name__.lower()
    signature = find_signature("optimizer", option)
    known = {} if signature is None else signature.keys
    options = {"trains": trains, "optimizer": option, **dict(_options(values, known))}
    content = ", ".join(f'"{key}": {_format_literal(value)}' for key, value in options.items())
    notes = [f'with {schedule}: set "scheduler" and its keys'] if schedule else []
    missing = [f"{key}={_format_literal(value)}" for key, value in _missing_options(optimizer, values, known)]
    missing += [f"{key} of each parameter group" for key in by_group]
    if missing:
        notes.append(f"for {', '.join(missing)}: define the optimizer in OPTIMIZERS")
    note = f"  # {'; '.join(notes)}" if notes else ""
    return f'"{"_".join(trains).replace(".", "_")}": {{{content}}},{note}'


def _optimizer_values(optimizer: Optimizer, *, has_schedule: bool) -> tuple[dict[str, Any], list[str]]:
    """Return the options of the optimizer, and the names of those that differ between its parameter groups.

    A schedule changes options of the groups when it is constructed. So with a schedule, the options that were passed to
    the optimizer's constructor are returned.
    """
    groups = [{**group, "lr": group.get("initial_lr", group["lr"])} for group in optimizer.param_groups]
    values, by_group = dict(optimizer.defaults), []
    for key in optimizer.defaults:
        if any(group[key] != groups[0][key] for group in groups):
            by_group.append(key)
        elif not has_schedule:
            values[key] = groups[0][key]
    return {key: _as_plain(value) for key, value in values.items()}, by_group


def _options(values: Mapping[str, Any], known: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the learning rate, and other options that differ from the defaults of the option of the same name."""
    yield "optimizer.lr", values["lr"]
    for key, value in values.items():
        if key in known and key != "lr" and value != _as_plain(known[key].default):
            yield f"optimizer.{key}", value
    if values.get("weight_decay") and "decay_1d" in known:
        yield "optimizer.decay_1d", True  # torch decays all parameters


def _missing_options(
    optimizer: Optimizer, values: Mapping[str, Any], known: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    """Yield options that change the update, differ from torch's defaults, and are not settings."""
    for key, parameter in inspect.signature(type(optimizer)).parameters.items():
        if key not in (*KERNELS, "lr", *known) and values.get(key, parameter.default) != _as_plain(parameter.default):
            yield key, values[key]


def _as_plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _format_literal(value: Any) -> str:
    return repr(value) if value is None or isinstance(value, bool) else json.dumps(value)
