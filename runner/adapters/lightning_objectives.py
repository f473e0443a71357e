"""The OBJECTIVES of a task that correspond to the optimizers of a LightningModule with several of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from torch.optim import Optimizer

from runner.config.options import find_signature


def suggest_objectives(module: Any) -> str:
    """Return the OBJECTIVES with which a task trains the parameters of each optimizer of the module.

    They are a template if configure_optimizers fails, because the module has not been set up, or if optimizers share a
    parameter.
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
    options = {"trains": trains, "optimizer": type(optimizer).__name__.lower(), **dict(_differing_options(optimizer))}
    content = ", ".join(f'"{key}": {_format_literal(value)}' for key, value in options.items())
    note = f'  # with {schedule}: set "scheduler" and its keys' if schedule else ""
    return f'"{"_".join(trains).replace(".", "_")}": {{{content}}},{note}'


def _differing_options(optimizer: Optimizer) -> Iterator[tuple[str, Any]]:
    """Yield the learning rate, and other options of the optimizer that differ from those of the option of its name."""
    yield "optimizer.lr", optimizer.defaults["lr"]
    signature = find_signature("optimizer", type(optimizer).__name__.lower())
    known = {} if signature is None else signature.keys
    for key, value in optimizer.defaults.items():
        if key in known and key != "lr" and _as_plain(value) != _as_plain(known[key].default):
            yield f"optimizer.{key}", _as_plain(value)
    if optimizer.defaults.get("weight_decay") and "decay_1d" in known:
        yield "optimizer.decay_1d", True  # torch decays all parameters


def _as_plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _format_literal(value: Any) -> str:
    return repr(value) if value is None or isinstance(value, bool) else json.dumps(value)
