"""Validate the return values of task methods; errors name the method, the returned value and the fix."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from runner.base.errors import TaskFault
from runner.base.secret import redact
from runner.base.task import Prediction
from runner.durable.directory import is_plain_path
from runner.engine.error_diagnosis import locate_definition

Number = Tensor | int | float  # a tensor has shape ()
LOSS_FIX = 'return F.cross_entropy(logits, y, reduction="sum"), len(y)'
NUMBERS_FIX = 'return {**metrics, "perplexity": math.exp(metrics["loss"])}'
METRIC_FIX = 'return {"accuracy": ((logits.argmax(1) == y).sum(), len(y))}'


def validate_loss(
    answer: Any, loss: Callable[..., Any], source: Path, *, look: bool = False, name: str = "loss"
) -> tuple[Tensor, Number]:
    """Return the loss sum, a tensor of shape (), and the item count.

    name  of the task method, for messages
    look  also check the value of a tensor count; synchronizes with the device
    Raises TaskFault for anything else, a negative count, or a sum without gradient while gradients are enabled.
    """
    if not isinstance(answer, tuple) or len(answer) not in ((2, 3) if name == "loss" else (2,)):
        raise _not_a_loss(answer, locate_definition(loss, source), name)
    total, count = answer[0], _number(answer[1])
    if not isinstance(total, Tensor) or total.numel() != 1 or total.is_complex() or count is None:
        raise _not_a_loss(answer, locate_definition(loss, source), name)
    if torch.is_grad_enabled() and not total.requires_grad:
        raise TaskFault(
            f"{name} must return a sum that has a gradient, but it has none",
            where=locate_definition(loss, source),
            fix="compute it from model(...), without detach, item or no_grad",
        )
    if not isinstance(count, Tensor) or (look and type(count) is Tensor and not count.is_meta):
        check_count(count, name, loss, source)
    return (total.reshape(()) if total.dim() else total), count


def validate_metrics(
    found: Any, evaluate: Callable[..., Any], source: Path, *, verb: str = "evaluate must return"
) -> dict[str, tuple[Number, Number]]:
    """Return the sum and count of each metric of a batch. Raises TaskFault for anything else.

    verb  what returns them, for messages
    """
    if not isinstance(found, Mapping):
        what = f"{verb} a mapping of names to (sum, count), but returned {describe_value(found)}"
        raise TaskFault(what, where=locate_definition(evaluate, source), fix=METRIC_FIX)
    metrics = {}
    for name, pair in found.items():
        if not isinstance(name, str) or not name:
            what = f"evaluate must name its metrics with text, but one has the name {name!r}"
            raise TaskFault(what, where=locate_definition(evaluate, source), fix=METRIC_FIX)
        _must_be_public(name, evaluate, source)
        is_pair = isinstance(pair, tuple | list) and len(pair) == 2
        total, count = (_number(pair[0]), _number(pair[1])) if is_pair else (None, None)
        if total is None or count is None:
            raise TaskFault(
                f"{verb} (sum, count) for each metric, two numbers or tensors with one element, but"
                f" {name} is {describe_value(pair)}",
                where=locate_definition(evaluate, source),
                fix=_fix_of_pair(name, pair),
            )
        metrics[name] = (total, count)
    return metrics


def validate_numbers(
    found: Any, method: Callable[..., Any], source: Path, *, fix: str = NUMBERS_FIX
) -> dict[str, float]:
    """Return the dictionary of numbers returned by `summarize`, `baselines` or the function of a metric.

    Raises TaskFault for anything else.
    """
    where, name_of = locate_definition(method, source), _name_of(method)
    if not isinstance(found, Mapping):
        what = f"{name_of} must return a mapping of names to numbers, but returned {describe_value(found)}"
        raise TaskFault(what, where=where, fix=fix)
    figures = {}
    for name, value in found.items():
        number = _number(value)
        if not isinstance(name, str) or number is None:
            what = f"{name_of} must return a mapping of names to numbers, but {name!r} is {describe_value(value)}"
            raise TaskFault(what, where=where, fix=fix)
        _must_be_public(name, method, source)
        figures[name] = float(number)
    return figures


def validate_prediction(found: Any, predict: Callable[..., Any], source: Path) -> Prediction:
    """Return what `predict` yielded. Raises TaskFault for values that cannot be written to files."""
    _must_be_prediction(found, predict, source)
    prediction: Prediction = found
    for name in (*prediction.files, *prediction.plots):
        _must_be_public(name, predict, source)
    return prediction


def _must_be_prediction(found: Any, predict: Callable[..., Any], source: Path) -> None:
    problem = _problem_of_prediction(found)
    if problem is not None:
        what, fix = problem
        # only here: finding the line of a function takes longer than most predictions
        raise TaskFault(what, where=locate_definition(predict, source), fix=fix)


def _problem_of_prediction(found: Any) -> tuple[str, str] | None:
    """Return what is wrong with a prediction and how to fix it, or None."""
    fix = 'yield Prediction({"sample.txt": text}), from runner.base.task'
    if not isinstance(found, Prediction):
        return f"predict must yield Prediction, but yielded {describe_value(found)}", fix
    tables: list[tuple[str, Any, tuple[type, ...], str]] = [
        ("files", found.files, (str, bytes, np.ndarray), "text, bytes or a NumPy array"),
        ("plots", found.plots, (bytes,), "bytes of a picture"),
    ]
    for part, held, kinds, of in tables:
        if not isinstance(held, Mapping) or not all(isinstance(name, str) for name in held):
            return f"{part} of a Prediction must map names of files to {of}, but is {describe_value(held)}", fix
        for name, content in held.items():
            if not is_plain_path(name):
                what = f"files of a Prediction are named with letters, digits, '.', '_' and '-', unlike {name!r}"
                return what, fix
            if not isinstance(content, kinds) or (isinstance(content, np.ndarray) and content.dtype.hasobject):
                what = f"{part} of a Prediction must hold {of}, but {name} is {describe_value(content)}"
                return what, "write tensor.cpu().numpy()" if isinstance(content, Tensor) else fix
    text: Any = found.text
    if not isinstance(text, str):
        return f"text of a Prediction must be text, but is {describe_value(text)}", fix
    items: Any = found.items
    if isinstance(items, bool) or not isinstance(items, Integral) or int(items) < 0:
        what = f"items of a Prediction must be a number of items, 0 or more, but is {describe_value(items)}"
        return what, "items=len(tokens)"
    return None


def check_count(count: Number, what: str, method: Callable[..., Any], source: Path) -> None:
    """Raise TaskFault unless `count` is a number of items, 0 or more; a device tensor is synchronized."""
    value = float(count)
    if not (math.isfinite(value) and value >= 0):
        raise TaskFault(
            f"{what} must return a number of items that is 0 or more, but returned {value:g}",
            where=locate_definition(method, source),
            fix="return (the sum, the number of items): len(y), or mask.sum()",
        )


def validate_modules(found: Any, method: Callable[..., Any], source: Path) -> list[nn.Module]:
    """Return the modules returned by `blocks` or `layers`. Raises TaskFault for anything else."""
    modules = list(found) if isinstance(found, Iterable) else None
    if modules is not None and all(isinstance(each, nn.Module) for each in modules):
        return modules
    name = _name_of(method)
    what = f"{name} must return a list of modules of the model, but returned {describe_value(found)}"
    raise TaskFault(what, where=locate_definition(method, source), fix=f"return list(self.model.{name})")


def check_length(dataset: Any, name: str, method: Callable[..., Any], source: Path) -> None:
    """Raise TaskFault if a data set has no valid length."""
    try:
        len(dataset)
    except (TypeError, ValueError) as error:
        what = f"len() of the samples that {name} returned is invalid: {error}"
        raise TaskFault(
            what, where=locate_definition(method, source), fix="return a whole number from __len__"
        ) from error


def describe_value(answer: Any) -> str:
    """Return a description of a value: shapes of tensors, types of anything else."""
    if isinstance(answer, Tensor):
        return f"a tensor of shape {tuple(answer.shape)}"
    if isinstance(answer, np.ndarray):
        return f"an array of {answer.dtype} and shape {answer.shape}"
    if isinstance(answer, tuple | list) and len(answer) <= _FEW:
        opening, closing = "()" if isinstance(answer, tuple) else "[]"
        return f"{opening}{', '.join(describe_value(item) for item in answer)}{closing}"
    if isinstance(answer, int | float | None) or (isinstance(answer, str) and len(answer) < _SHORT):
        return repr(answer)
    return type(answer).__name__


def _name_of(method: Callable[..., Any]) -> str:
    """Return the name of a function, or the type of another callable, such as partial."""
    return str(getattr(method, "__name__", type(method).__name__))


def _must_be_public(name: str, method: Callable[..., Any], source: Path) -> None:
    """Raise TaskFault for a name that holds a secret: it is a key in checkpoints, which cannot be replaced there."""
    shown = redact(name)
    if shown != name:
        what = f"{_name_of(method)} returned a name that holds a secret: {shown}"
        raise TaskFault(what, where=locate_definition(method, source), fix="name it without the secret")


def _not_a_loss(answer: Any, where: str, name: str) -> TaskFault:
    fix = LOSS_FIX
    if isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[0], Tensor) and answer[0].numel() == 1:
        fix = "return total, len(y), or the number of items as a tensor with one element: mask.sum()"
    return TaskFault(
        f"{name} must return (the sum over items as a scalar tensor, the number of items), but returned"
        f" {describe_value(answer)}",
        where=where,
        fix=fix,
    )


def _fix_of_pair(name: str, pair: Any) -> str:
    if isinstance(pair, Tensor) or _number(pair) is not None:
        return f'return {{"{name}": (the sum over the batch, len(y))}}'
    if isinstance(pair, tuple | list) and any(isinstance(part, Tensor) and part.numel() != 1 for part in pair):
        return f'add up what has several elements: {{"{name}": (values.sum(), mask.sum())}}'
    return METRIC_FIX


def _number(value: Any) -> Number | None:
    """Return a real number as int, float or tensor of shape (), or None for anything else."""
    if isinstance(value, Tensor):
        is_one = value.numel() == 1 and not value.is_complex() and value.dtype != torch.bool
        return value.detach().reshape(()) if is_one else None
    if isinstance(value, bool | np.bool_):
        return None
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else None


_FEW, _SHORT = 4, 40
