"""Validate the members of a task and what its methods return; errors name the method, the value and the fix."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import chain, product
from numbers import Integral, Real
from pathlib import Path
from types import FunctionType
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor, nn

from runner.base.batch import count_samples
from runner.base.errors import AccelRunError, DataError, TaskFault
from runner.base.secret import redact
from runner.base.task import Fit, Prediction, Progress, Task, default
from runner.base.text import abbreviate
from runner.durable.directory import is_safe_path
from runner.engine.contract.error_diagnosis import locate_definition
from runner.tensors.bitwise import bitwise_equal, is_dense
from runner.tensors.module_buffers import TensorVersion

Number = Tensor | int | float  # a tensor has shape (), except in what validate_metrics returns
LOSS_FIX = 'return F.cross_entropy(logits, y, reduction="sum"), len(y)'
NUMBERS_FIX = 'return {**metrics, "perplexity": math.exp(metrics["loss"])}'
MAX_NUMBERS = 1000  # elements of one metric, each of which becomes a column in metrics.jsonl and trackers
EVALUATE_VALUE = "the result of evaluate()"
METRIC_FIX = 'return {"accuracy": ((logits.argmax(1) == y).sum(), len(y))}'


def validate_loss(
    result: Any,
    loss: Callable[..., Any],
    source: Path,
    *,
    sync: bool = False,
    name: str = "loss",
    objective: str = "",
    allows_zero: bool = True,
) -> tuple[Tensor, Number]:
    """Return the loss sum, a tensor of shape (), and the item count.

    `loss` may return metrics as a third value, which `validate_metrics` checks.

    name         name of the task method, for messages
    objective    name of the objective, for messages
    sync         also check the value of the count if it is a tensor, which synchronizes with the device
    allows_zero  a count of 0 is valid, as for one of several micro-batches
    Raises TaskFault for anything else, for a negative count, and for a sum that does not require grad while gradients
    are enabled.
    """
    title = f"the loss of objective {objective}" if objective else f"{name}()"
    if not isinstance(result, tuple) or len(result) not in ((2, 3) if name == "loss" else (2,)):
        raise _loss_fault(result, locate_definition(loss, source), title)
    total, count = result[0], _to_number(result[1])
    if not isinstance(total, Tensor) or total.numel() != 1 or total.is_complex() or count is None:
        raise _loss_fault(result, locate_definition(loss, source), title)
    if torch.is_grad_enabled() and not total.requires_grad:
        raise TaskFault(
            f"{title} must return a sum that requires grad, but it does not",
            where=locate_definition(loss, source),
            fix="compute it from model(...), without detach, item or no_grad",
        )
    if not isinstance(count, Tensor) or (sync and type(count) is Tensor and not count.is_meta):
        check_count(count, title, loss, source, allows_zero=allows_zero)
    return (total.reshape(()) if total.dim() else total), count


def no_items_error(update: int, location: str, bad: Sequence[tuple[int, str]] = ()) -> AccelRunError:
    """Return the error for an update whose micro-batches all have a count of 0.

    location  place of the loss
    bad       (index, reason) of samples that could not be read, if known
    """
    if bad:
        return DataError(
            f"update {update} has no items, because samples cannot be read: {abbreviate([index for index, _ in bad])};"
            f" the first error: {bad[0][1]}",
            fix="fix these samples: an update needs at least one readable sample",
        )
    return TaskFault(
        f"loss() returned a count of 0 for all micro-batches (update {update})",
        where=location,
        fix="return the sum and the number of items; if all samples were skipped as bad, events.jsonl lists them",
    )


def invalid_count_fault(what: str, count: float, least: str, update: int, location: str) -> TaskFault:
    """Return the error for an update with an invalid number of items."""
    return TaskFault(
        f"{what} a count of {count:g} (update {update}), but each count must be {least}", where=location, fix=_COUNT_FIX
    )


def validate_metrics(
    result: Any, evaluate: Callable[..., Any], source: Path, *, value: str = EVALUATE_VALUE
) -> dict[str, tuple[Number, Number]]:
    """Return the sum and count of each metric of a batch. Raises TaskFault for anything else.

    Vectors and matrices are not divided into elements; see `expand_metrics`.

    value  subject of the error messages: the value that contains the metrics
    """
    if not isinstance(result, Mapping):
        what = f"{value} must be a mapping of names to (sum, count), but is {describe_value(result)}"
        raise TaskFault(what, where=locate_definition(evaluate, source), fix=METRIC_FIX)
    metrics: dict[str, Any] = {}
    for name, pair in result.items():
        if not isinstance(name, str) or not name:
            what = f"metric names in {value} must be strings that are not empty, but one is {name!r}"
            raise TaskFault(what, where=locate_definition(evaluate, source), fix=METRIC_FIX)
        _check_no_secret(name, evaluate, source)
        is_pair = isinstance(pair, tuple | list) and len(pair) == 2
        total, count = _validate_pair(*pair) if is_pair else (None, None)
        if total is None or count is None:
            raise not_a_sum_fault(name, pair, evaluate, source, value=value)
        if isinstance(total, Tensor) and total.numel() > MAX_NUMBERS:
            what = f"metric {name} of {value} has {total.numel():,} numbers, but at most {MAX_NUMBERS:,} are reported"
            fix = "sum over the samples, reduce them, or use runner.Gather"
            raise TaskFault(what, where=locate_definition(evaluate, source), fix=fix)
        metrics[name] = (total, count)
    return metrics


def not_a_sum_fault(
    name: str,
    pair: Any,
    evaluate: Callable[..., Any],
    source: Path,
    *,
    value: str = EVALUATE_VALUE,
    detail: str = "",
) -> TaskFault:
    """Return the error for a metric that is not a sum and a count; `detail` follows the description of its value."""
    return TaskFault(
        f"{value} must contain (sum, count) for each metric, numbers or tensors of the same shape, but"
        f" {name} is {describe_value(pair)}{detail}",
        where=locate_definition(evaluate, source),
        fix=METRIC_FIX,
    )


def _validate_pair(total: Any, count: Any) -> tuple[Number | None, Number | None]:
    """Return a sum and a count, or a vector or a matrix of sums with counts of the same shape; None if invalid.

    A vector with a single count is invalid: it holds the values of the samples, which were not summed.
    """
    if not is_vector(total) or not is_vector(count) or total.shape != count.shape:
        return _to_number(total), _to_number(count)
    is_real = not any(numbers.is_complex() or numbers.dtype == torch.bool for numbers in (total, count))
    return (total.detach(), count.detach()) if is_real else (None, None)


def is_vector(value: Any) -> TypeGuard[Tensor]:
    """Return whether a value is a tensor with several elements."""
    return isinstance(value, Tensor) and value.numel() > 1


def name_elements(name: str, shape: Sequence[int]) -> list[str]:
    """Return the names of the elements of a metric with this shape, row by row: `name.0` or `name.0.1`."""
    return [".".join(map(str, (name, *index))) for index in product(*map(range, shape))]


def expand_metrics(metrics: Mapping[str, tuple[Number, Number]]) -> dict[str, tuple[Number, Number]]:
    """Return the sum and count of each element, with vectors and matrices as one metric per element."""
    expanded: dict[str, tuple[Number, Number]] = {}
    for name, (total, count) in metrics.items():
        if is_vector(total) and is_vector(count):
            pairs = zip(total.reshape(-1).unbind(), count.reshape(-1).unbind(), strict=True)
            expanded.update(zip(name_elements(name, total.shape), pairs, strict=True))
        else:
            expanded[name] = total, count
    return expanded


class ElementCheck:
    """Rejects metrics with one value per sample: the length of a vector of sums must not depend on the batch size.

    method  returns the metrics
    source  file of the task
    value   subject of the error message, as in `validate_metrics`
    """

    def __init__(self, method: Callable[..., Any], source: Path, value: str) -> None:
        self._method, self._source, self._value = method, source, value
        self._first: dict[str, int] = {}
        self.fault: TaskFault | None = None

    def expand(self, metrics: Mapping[str, tuple[Number, Number]]) -> dict[str, tuple[Number, Number]]:
        """Return one metric per element. Raises TaskFault if the number of elements differs from the first call."""
        for name, pair in metrics.items():
            number = pair[0].numel() if is_vector(pair[0]) else 1
            first = self._first.setdefault(name, number)
            if number != first:
                detail = f", with {first} elements for a batch and {number} for half of it: sum over the samples"
                self.fault = not_a_sum_fault(name, pair, self._method, self._source, value=self._value, detail=detail)
                raise self.fault
        return expand_metrics(metrics)


def call_begin_update(task: Task, model: nn.Module, progress: Progress, source: Path) -> None:
    """Call `begin_update`; if it changes the model, call it again to check that a second call changes nothing more.

    A run repeats the call for an update at which it resumes, evaluates or retries, so a moving average would be updated
    twice. Changes in place through `.data` are not detected, and rounding is allowed, as in repeated normalization of
    weights.
    Raises TaskFault with the names of the tensors that the second call changes.
    """
    named = chain(model.named_parameters(), model.named_buffers())
    tensors = {name: tensor for name, tensor in named if type(tensor) in (Tensor, nn.Parameter) and is_dense(tensor)}
    before = {name: (TensorVersion.of(tensor), tensor.data_ptr()) for name, tensor in tensors.items()}
    task.begin_update(progress)
    changed = {
        name: tensor.detach().clone()
        for name, tensor in tensors.items()
        if before[name][0].is_changed(tensor) or before[name][1] != tensor.data_ptr()
    }
    if not changed:
        return
    task.begin_update(progress)
    moved = [name for name, tensor in changed.items() if not _equals_but_for_rounding(tensor, tensors[name])]
    if moved:
        raise TaskFault(
            f"begin_update() may be called more than once for an update, but each call changes {abbreviate(moved)}"
            " again",
            where=locate_definition(task.begin_update, source),
            fix="change weights and buffers in after_update of a hook in HOOKS, which is called once per update;"
            " draw random numbers with a generator seeded with progress.update",
        )


def _equals_but_for_rounding(one: Tensor, other: Tensor) -> bool:
    """Return whether the tensors differ by at most a few units in the last place; a moving average changes more."""
    if bitwise_equal(one, other):
        return True
    dtype = one.dtype
    if (other.shape, other.dtype) != (one.shape, dtype) or not (dtype.is_floating_point or dtype.is_complex):
        return False
    eps, other = torch.finfo(dtype).eps, other.detach().to(one.device)
    if one.element_size() < 4:  # some of these dtypes, such as float8, have no arithmetic
        one, other = one.float(), other.float()
    # Rounding errors of a scaled tensor are relative to each element, those of a centered one to the largest element.
    largest = float(one.nan_to_num(0.0, 0.0, 0.0).abs().max())
    return torch.allclose(one, other, rtol=4 * eps, atol=eps * largest, equal_nan=True)


def validate_numbers(
    result: Any, method: Callable[..., Any], source: Path, *, fix: str = NUMBERS_FIX
) -> dict[str, float]:
    """Return the numbers that `summarize`, `baselines` or a metric function returned, converted to float.

    Raises TaskFault for anything else.
    """
    where, method_name = locate_definition(method, source), f"{_callable_name(method)}()"
    if not isinstance(result, Mapping):
        what = f"{method_name} must return a mapping of names to numbers, but returned {describe_value(result)}"
        raise TaskFault(what, where=where, fix=fix)
    numbers = {}
    for name, value in result.items():
        number = _to_number(value)
        if not isinstance(name, str) or number is None:
            what = f"{method_name} must return a mapping of names to numbers, but {name!r} is {describe_value(value)}"
            raise TaskFault(what, where=where, fix=fix)
        _check_no_secret(name, method, source)
        numbers[name] = float(number)
    return numbers


def validate_prediction(result: Any, predict: Callable[..., Any], source: Path) -> Prediction:
    """Return what `predict` yielded. Raises TaskFault for values that cannot be written to files.

    predict  `Task.predict` or `Task.combine_predictions`
    """
    problem = _find_prediction_problem(result, predict.__name__)
    if problem is not None:
        what, fix = problem
        # Look up the location only for an error, because the lookup takes longer than most predictions.
        raise TaskFault(what, where=locate_definition(predict, source), fix=fix)
    prediction: Prediction = result
    for name in (*prediction.files, *prediction.plots):
        _check_no_secret(name, predict, source)
    return prediction


def _find_prediction_problem(prediction: Any, method: str) -> tuple[str, str] | None:
    fix = 'from runner import Prediction; yield Prediction({"sample.txt": text})'
    if not isinstance(prediction, Prediction):
        return f"{method}() must yield a Prediction, but yielded {describe_value(prediction)}", fix
    tables: list[tuple[str, Any, tuple[type, ...], str]] = [
        ("files", prediction.files, (str, bytes, np.ndarray), "text, bytes or a NumPy array"),
        ("plots", prediction.plots, (bytes,), "the bytes of an image"),
    ]
    for part, mapping, types, description in tables:
        if not isinstance(mapping, Mapping) or not all(isinstance(name, str) for name in mapping):
            return (
                f"the {part} of a Prediction must map file names to {description}, but are {describe_value(mapping)}",
                fix,
            )
        for name, content in mapping.items():
            if not is_safe_path(name):
                what = f"a file name of a Prediction must consist of letters, digits and any of ._-/, but is {name!r}"
                return what, fix
            if not isinstance(content, types) or (isinstance(content, np.ndarray) and content.dtype.hasobject):
                what = f"the {part} of a Prediction must contain {description}, but {name} is {describe_value(content)}"
                return what, "use tensor.cpu().numpy()" if isinstance(content, Tensor) else fix
    text: Any = prediction.text
    if not isinstance(text, str):
        return f"the text of a Prediction must be a str, but is {describe_value(text)}", fix
    items: Any = prediction.items
    if isinstance(items, bool) or not isinstance(items, Integral) or int(items) < 0:
        what = f"the items of a Prediction must be an integer of at least 0, but are {describe_value(items)}"
        return what, "pass the number of items, such as len(tokens)"
    if prediction.part is not None:
        try:
            json.dumps(prediction.part)
        except (TypeError, ValueError) as error:
            return f"the part of a Prediction must be JSON-serializable: {error}", "use tensor.tolist()"
    return None


def check_count(
    count: Number, what: str, method: Callable[..., Any], source: Path, *, allows_zero: bool = True
) -> None:
    """Raise TaskFault unless `count` is finite and at least 0. Synchronizes if `count` is a tensor on a device."""
    value = float(count)
    if not (math.isfinite(value) and value >= 0 and (value or allows_zero)):
        raise TaskFault(
            f"{what} must return a finite number of items {'of at least' if allows_zero else 'above'} 0,"
            f" but returned {value:g}",
            where=locate_definition(method, source),
            fix=_COUNT_FIX,
        )


def validate_modules(result: Any, method: Callable[..., Any], source: Path) -> list[nn.Module]:
    """Return the modules returned by `blocks` or `layers`. Raises TaskFault for anything else."""
    modules = list(result) if isinstance(result, Iterable) else None
    if modules is not None and all(isinstance(module, nn.Module) for module in modules):
        return modules
    name = _callable_name(method)
    what = f"{name}() must return a list of modules of the model, but returned {describe_value(result)}"
    raise TaskFault(what, where=locate_definition(method, source), fix=f"return list(self.model.{name})")


def validate_example(
    result: Any, example: Callable[..., Any], source: Path, *, min_samples: int = 1
) -> tuple[Any, ...]:
    """Return the arguments of one model call, as returned by `example`. Raises TaskFault for anything else."""
    if not isinstance(result, tuple | list):
        what = f"must return a tuple, the arguments of one model call, but returned {describe_value(result)}"
    elif count_samples(result) < min_samples:
        what = f"must return a batch of at least {min_samples} samples, but returned {describe_value(result)}"
    else:
        return tuple(result)
    fix = "return (x,), where x is the first argument of the model, with two samples"
    raise TaskFault(f"example() {what}", where=locate_definition(example, source), fix=fix)


def check_length(dataset: Any, name: str, method: Callable[..., Any], source: Path) -> None:
    """Raise TaskFault if the dataset has no valid length."""
    try:
        len(dataset)
    except (TypeError, ValueError) as error:
        what = f"len() of the samples that {name} returned is invalid: {error}"
        raise TaskFault(what, where=locate_definition(method, source), fix="return an integer from __len__") from error


def describe_value(value: Any) -> str:
    """Describe a value for error messages: shapes of tensors, short values, types of other objects."""
    if isinstance(value, Tensor):
        dtype = "" if value.is_floating_point() else f" and dtype {str(value.dtype).removeprefix('torch.')}"
        return f"a tensor of shape {tuple(value.shape)}{dtype}"
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype} and shape {value.shape}"
    if isinstance(value, tuple | list) and len(value) <= _MAX_DESCRIBED_ITEMS:
        opening, closing = "()" if isinstance(value, tuple) else "[]"
        return f"{opening}{', '.join(describe_value(item) for item in value)}{closing}"
    if isinstance(value, int | float | None) or (isinstance(value, str) and len(value) < _MAX_TEXT_LENGTH):
        return repr(value)
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__


def _callable_name(method: Callable[..., Any]) -> str:
    """Return the name of a function, or the type of another callable such as partial."""
    return str(getattr(method, "__name__", type(method).__name__))


def _check_no_secret(name: str, method: Callable[..., Any], source: Path) -> None:
    """Raise TaskFault for a name that contains a secret: as a key in checkpoints, it could not be redacted."""
    shown = _redact_once(name)
    if shown != name:
        what = f"{_callable_name(method)}() returned a name that contains a secret: {shown}"
        raise TaskFault(what, where=locate_definition(method, source), fix="choose a name without the secret")


_redact_once = lru_cache(maxsize=1 << 16)(redact)  # the names are the same in every batch


def _loss_fault(result: Any, where: str, name: str) -> TaskFault:
    fix = LOSS_FIX
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], Tensor) and result[0].numel() == 1:
        fix = "return total, len(y), or the number of items as a tensor with one element, such as mask.sum()"
    return TaskFault(
        f"{name} must return (the sum over items as a scalar tensor, the number of items), but returned"
        f" {describe_value(result)}",
        where=where,
        fix=fix,
    )


def _to_number(value: Any) -> Number | None:
    """Return a real number as int, float or tensor of shape (), or None for anything else."""
    if isinstance(value, Tensor):
        is_real_scalar = value.numel() == 1 and not value.is_complex() and value.dtype != torch.bool
        return value.detach().reshape(()) if is_real_scalar else None
    if isinstance(value, bool | np.bool_):
        return None
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else None


_MAX_DESCRIBED_ITEMS, _MAX_TEXT_LENGTH = 4, 40


def check_members(task: Task, source: Path) -> None:
    """Raise TaskFault if a member of the task is incompatible with its declaration in Task.

    `loss` is excluded: its arguments depend on the phase, see `check_arguments`.
    """
    check_methods(task, Task, source, exclude=("loss",))
    for name, declared in vars(Task).items():
        if isinstance(declared, default):
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
        raise TaskFault(f"{name}() is called {how}: {error}", where=where, fix=fix) from error


def _check_mapping(task: Task, name: str, source: Path) -> None:
    try:
        value = getattr(task, name)
    except Exception:  # the property may depend on begin_phase; if it really fails, its first use reports it
        return
    if isinstance(value, Mapping):
        for key, item in value.items():
            is_valid, expected = _VALUES[name]
            if not is_valid(item):
                what = f"{name}[{key!r}] must be a {expected}, but is {describe_value(item)}"
                raise TaskFault(
                    what,
                    where=locate_definition(type(task), source),
                    fix=f"see the documentation of {name} in runner.Task",
                )
        return
    if inspect.ismethod(value):
        what, fix = "is a method", f"write @property above def {name}(self):"
        raise TaskFault(f"{name} must be a property, but {what}", where=locate_definition(value, source), fix=fix)
    what = f"{name} must be a mapping, but is {describe_value(value)}"
    fix = f"@property\ndef {name}(self): return {{}}"
    if not isinstance(inspect.getattr_static(type(task), name), property):  # an attribute, perhaps for another purpose
        fix = f"use another name if it is not meant for accel-run, or assign a mapping: self.{name} = {{...}}"
    raise TaskFault(what, where=locate_definition(type(task), source), fix=fix)


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0


def _is_mapping(value: Any) -> bool:
    return isinstance(value, Mapping)


def _is_fit(value: Any) -> bool:
    """Return whether a value has the methods of a Fit; its class need not inherit from Fit."""
    return all(callable(getattr(value, name, None)) for name, member in vars(Fit).items() if callable(member))


# property of Task -> check of each value of its mapping, and the expected type
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


LOSSES_HAVE = "the losses of an update have"
_COUNT_FIX = "return the sum and the number of items, such as len(y) or mask.sum()"
