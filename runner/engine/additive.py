"""Is a loss the sum over its batch? Looked at once, before the first update: a mean would be trained on unnoticed.

With a mean in the place of the sum, gradients are smaller by the number of items and the loss shown is as well, but
nothing fails. The loss of a batch must equal the sum of the losses of its halves, in eval mode, in which samples do not
depend on each other. What is called here leaves no trace in the model, the generators or the order of the data.
"""

from __future__ import annotations

import ast
import inspect
import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from copy import copy
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode

from runner.base import noise
from runner.base.batch import MicroBatch, Samples
from runner.base.buffers import restored
from runner.base.errors import TaskFault
from runner.engine.assemble import Parts
from runner.engine.contract import checked_loss
from runner.engine.evaluate import as_in_use
from runner.engine.faults import place_of

TOLERANCE = 0.05  # of the loss: bfloat16 and kernels for another size round; a mean is off by a half
SPREAD = 0.05  # of a loss that draws random numbers, over three draws: with more nothing can be told
NEAR_MEAN = 0.2


class _Values(NamedTuple):
    """Loss and items of a batch, and those of its halves."""

    whole: tuple[float, float]
    halves: tuple[tuple[float, float], tuple[float, float]]

    @property
    def scale(self) -> float:
        return max(abs(self.whole[0]), sum(abs(loss) for loss, _ in self.halves))

    @property
    def is_sum(self) -> bool:
        """True where nothing speaks against a sum; counts that do not add up are of another kind of item."""
        numbers = [*self.whole, *self.halves[0], *self.halves[1]]
        if not all(map(math.isfinite, numbers)) or not self.scale:
            return True
        if not math.isclose(self.whole[1], sum(count for _, count in self.halves), rel_tol=1e-6):
            return not self.has_constant_count
        return self._adds_up

    @property
    def has_constant_count(self) -> bool:
        """True for a sum whose count is the same for a batch and its halves, as len((x, y)) is.

        Both halves must contribute: a count that is at least 1 is right where one of them has no items.
        """
        is_constant = self.whole[1] == self.halves[0][1] == self.halves[1][1] != 0
        return is_constant and self._adds_up and all(abs(loss) > NEAR_MEAN * self.scale for loss, _ in self.halves)

    @property
    def _adds_up(self) -> bool:
        return abs(self.whole[0] - sum(loss for loss, _ in self.halves)) <= TOLERANCE * self.scale

    def is_mean(self, tolerance: float) -> bool:
        mean = sum(loss * count for loss, count in self.halves) / max(self.whole[1], 1e-30)
        return abs(self.whole[0] - mean) <= tolerance * abs(mean)


def check_sum(parts: Parts, loss: Callable[[nn.Module, Any], Any], first: MicroBatch) -> None:
    """Raise TaskFault, on every rank, where the loss of a batch is not the sum of those of its halves.

    A batch that cannot be cut between samples is not looked at, nor a model whose eval mode mixes samples. All ranks
    must ask, for there may be collectives in a model. Whatever the loss raises is left to the first update.
    """
    world, whole_batch = parts.world, not parts.parallel.splits_batch
    halves = halves_of(first) if first.counts and not _mixes_samples(parts.bare) else None
    again: list[float] = []
    with ExitStack() as stack:
        stack.enter_context(counters_restored([parts.task, *parts.bare.modules()]))
        stack.enter_context(as_in_use(parts.bare, world.device))
        stack.enter_context(parts.parallel.gathered(parts.model))
        stack.enter_context(torch.no_grad())
        stack.enter_context(noise.no_pass())
        stack.enter_context(_eager(is_compiled=parts.plan.choices["compile"].name != "off"))

        def value(part: Part, precision: Callable[[], AbstractContextManager[Any]]) -> tuple[float, float]:
            noise.start_pass(part.samples)
            with precision(), restored(parts.bare.modules()), _Unchanged(parts.bare):
                total, count = checked_loss(loss(parts.model, part.batch), loss, parts.source)
            return float(total), float(count)

        def values(precision: Callable[[], AbstractContextManager[Any]]) -> _Values | None:
            if halves is None:
                return None
            with suppress(Exception):  # a loss may not know eval mode or halves; the first update says what is wrong
                return _Values(value(whole, precision), (value(halves[0], precision), value(halves[1], precision)))
            return None

        def is_doubtful(found: _Values | None) -> bool:
            doubtful = found is not None and not found.is_sum
            return bool(world.from_first(doubtful)) if whole_batch else doubtful  # all stages go on alike

        whole, forward = Part(first.batch, first.samples), parts.precision.forward
        found = values(forward)
        is_wrong = is_doubtful(found)
        if (
            is_wrong and parts.precision.dtype is not torch.float32
        ):  # only rounded, as large sums whose difference is small?
            forward = nullcontext
            exact = values(forward)
            is_wrong = is_doubtful(exact)
            found = exact or found
        if is_wrong and found is not None:  # is it random?
            with suppress(Exception):
                again = [value(whole, forward)[0], value(whole, forward)[0]]
    fault = _fault(found, again, loss, parts) if is_wrong and found is not None and len(again) == 2 else None
    told = world.gather(fault)
    said = told[0] if whole_batch else next(filter(None, told), None)  # rank 0 has drawn what the model was given
    if said is not None:
        what, where, fix = said
        raise TaskFault(what, where=where, fix=fix)


class Part(NamedTuple):
    """A part of a batch, with the samples that draws are for."""

    batch: Any
    samples: Samples | None


def halves_of(whole: MicroBatch) -> tuple[Part, Part] | None:
    """Return the batch in two parts, None where it cannot be cut between samples for sure.

    Every tensor with dimensions must have one row for each sample. Lists without tensors that are as long are cut too,
    numbers and text are for both parts.
    """
    samples = whole.samples
    size = 0 if samples is None else len(samples.indices)
    if samples is None or size < 2 or not any(tensor.dim() for tensor in _tensors(whole.batch)):
        return None
    rows = slice(0, size // 2), slice(size // 2, size)
    try:
        one, other = (
            Part(
                _part(whole.batch, size, part),
                samples._replace(indices=samples.indices[part], places=samples.places[part]),
            )
            for part in rows
        )
    except _CannotBeCut:
        return None
    return one, other


class _CannotBeCut(Exception):
    pass


class _Changes(Exception):
    """The loss changes weights, such as those of a teacher: it must not be called without need."""


def _part(value: Any, size: int, rows: slice) -> Any:
    if isinstance(value, Tensor):
        if value.dim() and len(value) != size:
            raise _CannotBeCut
        return value[rows] if value.dim() else value
    if value is None or isinstance(value, str | bytes | int | float):
        return value
    if isinstance(value, list) and len(value) == size:
        if _tensors(value):
            raise _CannotBeCut  # one tensor for each sample, or parts of a batch of this size?
        return value[rows]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_part(item, size, rows) for item in value))
    if type(value) in (tuple, list):
        return type(value)(_part(item, size, rows) for item in value)
    if isinstance(value, Mapping):
        items = {key: _part(item, size, rows) for key, item in value.items()}
        if not isinstance(value, MutableMapping):
            return items
        alike = copy(value)  # of its type: those of Hugging Face have attributes for their keys
        alike.update(items)
        return alike
    raise _CannotBeCut


def _tensors(value: Any) -> list[Tensor]:
    """Return the tensors of a batch; it is not rebuilt, which a packed sequence would refuse."""
    if isinstance(value, Tensor):
        return [value]
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple | list) else ()
    return [tensor for part in parts for tensor in _tensors(part)]


def _mixes_samples(model: nn.Module) -> bool:
    """Tell whether samples depend on each other in eval mode too: batch norms without running statistics."""
    return any(isinstance(each, _BatchNorm) and each.running_mean is None for each in model.modules())


@contextmanager
def counters_restored(objects: Sequence[object]) -> Iterator[None]:
    """Restore numbers, flags and text in the attributes of objects: a loss may count its calls."""
    kept = [(vars(each), dict(vars(each))) for each in objects]
    try:
        yield
    finally:
        for attributes, before in kept:
            for name in [name for name, value in attributes.items() if isinstance(value, _PLAIN)]:
                if name not in before:  # counted from the first call
                    del attributes[name]
            attributes.update({name: value for name, value in before.items() if isinstance(value, _PLAIN)})


def _eager(*, is_compiled: bool) -> AbstractContextManager[Any]:
    """Return a context in which nothing is compiled for eval mode and halves."""
    return torch.compiler.set_stance("force_eager") if is_compiled else nullcontext()


class _Unchanged(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises before an operation changes a parameter of the model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages = {_storage(weight) for weight in model.parameters()}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function._schema.is_mutable:
            named = {argument.name: value for argument, value in zip(function._schema.arguments, args, strict=False)}
            for argument in function._schema.arguments:
                if argument.alias_info is not None and argument.alias_info.is_write:
                    written = _tensors({**named, **kwargs}.get(argument.name))
                    if any(_storage(tensor) in self.storages for tensor in written):
                        raise _Changes
        return function(*args, **kwargs)


def _storage(tensor: Tensor) -> int:
    local: Tensor = getattr(tensor, "_local_tensor", tensor)
    return int(local.untyped_storage()._cdata)


# ---------------------------------------------------------------- what is wrong


def _fault(found: _Values, again: list[float], loss: Callable[..., Any], parts: Parts) -> tuple[str, str, str] | None:
    """Return what is wrong, where, and the fix; None for a loss whose random draws hide it."""
    losses = [found.whole[0], *again]
    spread = max(losses) - min(losses)
    is_random = spread > 1e-3 * found.scale
    if is_random and (spread > SPREAD * found.scale or not found.is_mean(NEAR_MEAN)):
        return None
    (whole, count), ((one, _), (other, _)) = found.whole, found.halves
    figures = f"the loss of a batch is {whole:.4g}, that of its halves {one:.4g} and {other:.4g}"
    if found.has_constant_count:
        what = f"loss returns a sum whose count is {count:g} for a batch and for each of its halves: {figures}"
        return what, place_of(loss, parts.source), _COUNT
    if found.is_mean(NEAR_MEAN if is_random else TOLERANCE):
        where, fix = _line_to_change(loss, parts.source)
        what = f"loss returns a mean with a count of {count:g}, but must return the sum over the items: {figures}"
        return what, where, fix
    name = type(parts.task).__name__
    what = f"loss must be the sum over the items of a batch, but it is not: {figures}"
    fix = f"return a sum; if the samples of a batch belong together, as in a contrastive loss, write in class {name}:"
    return what, place_of(loss, parts.source), f"{fix}\nloss_is_additive = False"


def _line_to_change(loss: Callable[..., Any], source: Path) -> tuple[str, str]:
    """Return the place of the call that takes the mean, and how it must be."""
    try:
        lines, first = inspect.getsourcelines(loss)
        tree = ast.parse(textwrap.dedent("".join(lines)))
        file = inspect.getsourcefile(loss)
    except (OSError, TypeError, SyntaxError):
        return str(source), _ANYWHERE
    # The statement next to the end comes first: a mean before it may be one of the input.
    statements = tree.body[0].body if isinstance(tree.body[0], ast.FunctionDef) else tree.body
    for call in (node for each in reversed(statements) for node in ast.walk(each) if isinstance(node, ast.Call)):
        before, after = ast.unparse(call), _as_sum(call)
        if after is not None:
            return f"{file}:{first + call.lineno - 1}", f"replace {before} by {after}"
    return place_of(loss, source), _ANYWHERE


def _as_sum(call: ast.Call) -> str | None:
    """Return a call that takes a mean over all elements as one that adds them up, None for another call."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if name == "mean" and isinstance(call.func, ast.Attribute):
        is_of_torch = ast.unparse(call.func.value) == "torch"
        is_over_all = len(call.args) == is_of_torch and not call.keywords
        call.func.attr = "sum"
        return ast.unparse(call) if is_over_all else None
    given = [ast.unparse(word.value) for word in call.keywords if word.arg == "reduction"]
    if not _reduces(vars(nn.functional).get(name)) or given in (["'none'"], ["'sum'"]):
        return None
    call.keywords = [word for word in call.keywords if word.arg != "reduction"]
    call.keywords.append(ast.keyword("reduction", ast.Constant("sum")))
    return ast.unparse(call).replace(chr(39) + "sum" + chr(39), _SUM)


def _reduces(function: Any) -> bool:
    """Tell whether it is a loss of torch, which can be told to add up."""
    try:
        return "reduction" in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


_PLAIN = (bool, int, float, str, type(None))
_SUM = '"sum"'
_COUNT = "return the number of items as the count, such as len(y); len(batch) is the number of tensors in a batch"
_ANYWHERE = 'use reduction="sum", as in F.cross_entropy(logits, y, reduction="sum") or nn.MSELoss(reduction="sum")'
