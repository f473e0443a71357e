"""Check once, before the first update, that the loss is summed over the batch and not averaged.

With a mean instead of the sum, gradients and the loss shown are too small by the number of items, but nothing fails.
The loss of a batch must equal the sum of the losses of its halves, in eval mode, in which samples do not depend on each
other. What is called here leaves no trace in the model, the generators or the order of the data.
"""

from __future__ import annotations

import ast
import inspect
import math
import statistics
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from copy import copy
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode

from runner.axes.dataloader import Loader
from runner.axes.prefetch import Prefetch
from runner.base import noise
from runner.base.batch import BatchSamples, MicroBatch
from runner.base.errors import TaskFault
from runner.base.global_rng import seed_everything
from runner.base.module_buffers import restored
from runner.base.order import Micro
from runner.base.sample_rng import global_generators
from runner.base.text import words_of
from runner.engine.assemble import Parts
from runner.engine.contract_checks import checked_loss
from runner.engine.error_diagnosis import place_of
from runner.engine.evaluate import as_in_use

TOLERANCE = 0.05  # relative to the loss: bfloat16 and size-dependent kernels round differently; a mean is off by a half
SPREAD = 0.05  # relative spread of a loss that draws random numbers; above it, averages over several draws decide
NEAR_MEAN = 0.2
_NUMBERS_OF_DRAWS = 16, 32, 64  # number of draws to average, increased until the result is clear
_LONGEST_S = 30.0  # duration of one of these steps after which no further step is run


class _Values(NamedTuple):
    """Loss and item counts of a batch and of its two halves."""

    whole: tuple[float, float]
    halves: tuple[tuple[float, float], tuple[float, float]]

    @property
    def scale(self) -> float:
        return max(abs(self.whole[0]), sum(abs(loss) for loss, _ in self.halves))

    @property
    def is_sum(self) -> bool:
        """True if the values are consistent with a sum; counts that do not add up are of another kind of item."""
        numbers = [*self.whole, *self.halves[0], *self.halves[1]]
        if not all(map(math.isfinite, numbers)) or not self.scale:
            return True
        if not math.isclose(self.whole[1], sum(count for _, count in self.halves), rel_tol=1e-6):
            return not self.has_constant_count
        return self._adds_up

    @property
    def has_constant_count(self) -> bool:
        """True if the loss is a sum but a batch and its halves have the same count, as with len((x, y)).

        Both halves must contribute: a count that is at least 1 is correct if one half has no items.
        """
        is_constant = self.whole[1] == self.halves[0][1] == self.halves[1][1] != 0
        return is_constant and self._adds_up and all(abs(loss) > NEAR_MEAN * self.scale for loss, _ in self.halves)

    @property
    def undecided(self) -> str:
        """Return why the values are inconclusive, or "" if they are conclusive."""
        numbers = [*self.whole, *self.halves[0], *self.halves[1]]
        if not all(map(math.isfinite, numbers)):
            return _NOT_FINITE
        return "" if self.scale else "it is 0 for the first batch"

    @property
    def off_sum(self) -> float:
        """Return the difference between the loss of the batch and the sum of the losses of its halves."""
        return self.whole[0] - sum(loss for loss, _ in self.halves)

    @property
    def off_mean(self) -> float:
        """Return the difference between the loss of the batch and the mean of the losses of its halves."""
        return self.whole[0] - self._mean

    @property
    def _mean(self) -> float:
        return sum(loss * count for loss, count in self.halves) / max(self.whole[1], 1e-30)

    @property
    def _adds_up(self) -> bool:
        return abs(self.off_sum) <= TOLERANCE * self.scale

    def is_mean(self, tolerance: float) -> bool:
        return abs(self.off_mean) <= tolerance * abs(self._mean)


def check_sum(
    parts: Parts, loss: Callable[[nn.Module, Any], Any], first: MicroBatch, read: Reader | None = None
) -> str:
    """Raise TaskFault on every rank if the loss of a batch is not the sum of the losses of its halves.

    Return "" if the check was conclusive, else why it was not. Call it on every rank: the model may run collectives.
    Exceptions raised by the loss are ignored here and reported by the first update.

    read  reads samples as a batch: for the halves of a batch that cannot be cut, and for a batch of one sample
    """
    world = parts.world
    with ExitStack() as stack:
        compared = _Compared(parts, loss, _split(first, read, parts), stack)
        fault, why = compared.judged() if first.counts else (None, "")
    told = world.gather([fault, why, first.counts])
    faults = [there[0] for there in told]
    # rank 0 drew the samples of this batch
    said = faults[0] if not parts.parallel.splits_batch else next(filter(None, faults), None)
    if said is not None:
        what, where, fix = said
        raise TaskFault(what, where=where, fix=fix)
    reasons = [why for _, why, counts in told if counts]
    return reasons[0] if reasons and all(reasons) else ""


class _Split(NamedTuple):
    """A batch and its halves.

    is_cut  the halves are slices of the batch; otherwise they were collated again, perhaps with other draws
    why     why there are no halves
    """

    whole: BatchPart | None
    halves: tuple[BatchPart, BatchPart] | None
    is_cut: bool = True
    why: str = ""


def _split(first: MicroBatch, read: Reader | None, parts: Parts) -> _Split:
    if not first.counts:
        return _Split(None, None)
    if _mixes_samples(parts.bare):
        return _Split(None, None, why="a batch norm without running statistics mixes the samples of a batch")
    if first.samples is None:
        return _Split(None, None, why="it is not known which samples are in a batch")
    indices = list(first.samples.indices)
    try:
        if len(indices) == 1 and read is not None:
            indices.append(read.other_than(indices[0]))
            first = read(indices, first.samples)
        halves = halves_of(first)
        if halves is not None or read is None or len(indices) < 2:
            return _Split(BatchPart(first.batch, first.samples), halves, why="" if halves else _UNCUT)
        middle, known = len(indices) // 2, first.samples
        assert known is not None
        one, other = (read(part, known) for part in (indices[:middle], indices[middle:]))
        again = BatchPart(one.batch, one.samples), BatchPart(other.batch, other.samples)
        return _Split(BatchPart(first.batch, first.samples), again, is_cut=False)
    except Exception as error:
        return _Split(None, None, why=f"two halves of a batch cannot be read: {words_of(error)}")


class Reader:
    """Read samples as a batch on the device, in the same way as training does."""

    def __init__(self, loader: Loader, prefetch: Prefetch) -> None:
        self._loader, self._prefetch = loader, prefetch

    def __call__(self, indices: Sequence[int], like: BatchSamples) -> MicroBatch:
        """Return a batch of these samples in the epoch of `like`. Raises IndexError if a sample is unreadable."""
        key = Micro(like.epoch, list(indices), last=False, first=min(like.places, default=0), seed=like.seed)
        # Do not use the training loader: its workers are prefetching.
        loader = self._loader.alike(self._loader.fetcher)
        try:
            (found,) = self._prefetch(iter(loader.batches([key])))
        finally:
            loader.close()
        if not found.counts or found.bad:
            raise IndexError(f"samples that cannot be read are among {key.indices}")
        return found

    def other_than(self, index: int) -> int:
        """Return the index of another sample."""
        if len(self._loader.fetcher) < 2:
            raise IndexError("the data set has one sample")
        return (index + 1) % len(self._loader.fetcher)


class _Compared:
    """Call a loss on a batch and its halves from the same model and random state."""

    def __init__(self, parts: Parts, loss: Callable[..., Any], split: _Split, stack: ExitStack) -> None:
        self.parts, self.loss, self.split = parts, loss, split
        self.why, self.draws = split.why, False
        stack.enter_context(_left_alone(parts))

    def judged(self) -> tuple[tuple[str, str, str] | None, str]:
        """Return the fault or None, and why the check was inconclusive or ""."""
        forward = self.parts.precision.forward
        found = self._values(forward)
        if self._agree(found is not None and not found.is_sum) and self.parts.precision.dtype is not torch.float32:
            forward = nullcontext  # in float32 the difference may turn out to be rounding of large sums
            found = self._values(forward) or found
        if found is None:
            return None, self.why
        if not self._agree(self.draws or not found.is_sum):
            return None, found.undecided
        several = [found]
        for number in (4, *_NUMBERS_OF_DRAWS):
            since = time.perf_counter()
            while len(several) < number:
                next_one = self._values(forward, seed=len(several))
                if next_one is None:
                    return None, self.why
                several.append(next_one)
            kind = _kind_of(several)
            takes_long = time.perf_counter() - since > _LONGEST_S
            if self._agree(bool(kind) or takes_long):
                break
        return self._verdict(kind, several)

    def _verdict(self, kind: str, several: Sequence[_Values]) -> tuple[tuple[str, str, str] | None, str]:
        if kind == "sum":
            return None, next((each.undecided for each in several if each.undecided), "")
        if not kind:
            return None, f"its random draws differ too much ({len(several)} draws)"
        if kind == "neither" and not self.split.is_cut:
            return None, "the halves of a batch, collated again, have other losses"
        return _fault(kind, averaged(several), self.loss, self.parts), ""

    def _values(self, precision: Callable[[], AbstractContextManager[Any]], seed: int = 0) -> _Values | None:
        """Return the losses of the batch and its halves, or None if the loss raises: some losses fail in eval mode."""
        whole, halves = self.split.whole, self.split.halves
        if whole is None or halves is None:
            return None
        try:
            value = self._value
            return _Values(
                value(whole, precision, seed), (value(halves[0], precision, seed), value(halves[1], precision, seed))
            )
        except _Changes:
            self.why = "it changes weights of the model"
        except Exception as error:  # reported by the first update
            self.why = f"it raises in eval mode: {words_of(error)}"
        return None

    def _value(
        self, part: BatchPart, precision: Callable[[], AbstractContextManager[Any]], seed: int
    ) -> tuple[float, float]:
        bare = self.parts.bare
        noise.start_pass(part.samples)
        seed_everything(seed)
        generators = global_generators()
        before = [generator.mark() for generator in generators]
        with precision(), restored(bare.modules()), _Unchanged(bare):
            total, count = checked_loss(self.loss(self.parts.model, part.batch), self.loss, self.parts.source)
        self.draws = self.draws or [generator.mark() for generator in generators] != before
        return float(total), float(count)

    def _agree(self, flag: bool) -> bool:
        """Return the flag of rank 0 if all ranks run every pass together."""
        return flag if self.parts.parallel.splits_batch else bool(self.parts.world.from_first(flag))


@contextmanager
def _left_alone(parts: Parts) -> Iterator[None]:
    """Put the model in eval mode without gradients; restore the model, the task and the generators on exit."""
    with (
        counters_restored([parts.task, *parts.bare.modules()]),
        as_in_use(parts.bare, parts.world.device),
        parts.parallel.gathered(parts.model),
        torch.no_grad(),
        noise.no_pass(),
        _eager(is_compiled=parts.plan.choices["compile"].name != "off"),
    ):
        yield


def averaged(several: Sequence[_Values]) -> _Values:
    """Return the averages over draws."""

    def mean(pairs: Iterable[tuple[float, float]]) -> tuple[float, float]:
        losses, counts = zip(*pairs, strict=True)
        return statistics.fmean(losses), statistics.fmean(counts)

    one, other = (mean(each.halves[half] for each in several) for half in (0, 1))
    return _Values(mean(each.whole for each in several), (one, other))


def _kind_of(several: Sequence[_Values]) -> str:
    """Return "sum", "mean", "count" or "neither", or "" if random draws hide the answer.

    All generators use the same seed for a batch and its halves, so draws shared by all samples cancel. Draws
    per sample do not: their averages must be closer to one hypothesis than to the other by six standard
    errors. By Student's t distribution, 16 draws err in 2 of 100,000 cases.
    """
    found = averaged(several)
    if any(each.undecided == _NOT_FINITE for each in several):
        return "sum"  # inconclusive; the first update reports it
    if all(each.is_sum for each in several):
        return "sum"
    losses = [each.whole[0] for each in several]
    spread = max(losses) - min(losses)
    if all(each.is_mean(TOLERANCE) for each in several) or (
        spread <= SPREAD * found.scale and found.is_mean(NEAR_MEAN)
    ):
        return "count" if found.has_constant_count else "mean"
    if spread <= 1e-3 * found.scale:
        return "count" if found.has_constant_count else "neither"
    if len(several) < _NUMBERS_OF_DRAWS[0]:
        return ""
    from_sum, from_mean = [each.off_sum for each in several], [each.off_mean for each in several]
    if found.whole[1] == found.halves[0][1] == found.halves[1][1] != 0:  # a mean of micro-batches, or a wrong count
        return "sum" if _is_far(from_sum) else "count" if found.has_constant_count else ""
    if _is_far(from_sum) and found.is_mean(NEAR_MEAN):
        return "mean"
    return "sum" if _is_far(from_mean) and abs(statistics.fmean(from_sum)) <= NEAR_MEAN * found.scale else ""


def _is_far(differences: Sequence[float]) -> bool:
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    return abs(statistics.fmean(differences)) > 6 * error


class BatchPart(NamedTuple):
    """Part of a batch, with the samples that determine its random draws."""

    batch: Any
    samples: BatchSamples | None


def halves_of(whole: MicroBatch) -> tuple[BatchPart, BatchPart] | None:
    """Split a batch into two parts; return None if it cannot be split between samples safely.

    Every tensor with dimensions must have one row per sample. Lists of that length without tensors are split too;
    numbers and text are copied to both parts.
    """
    samples = whole.samples
    size = 0 if samples is None else len(samples.indices)
    if samples is None or size < 2 or not any(tensor.dim() for tensor in _tensors(whole.batch)):
        return None
    rows = slice(0, size // 2), slice(size // 2, size)
    try:
        one, other = (
            BatchPart(
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
    """The loss changes weights, such as those of a teacher, so it must not be called unnecessarily."""


def _part(value: Any, size: int, rows: slice) -> Any:
    if isinstance(value, Tensor):
        if value.dim() and len(value) != size:
            raise _CannotBeCut
        return value[rows] if value.dim() else value
    if value is None or isinstance(value, str | bytes | int | float):
        return value
    if isinstance(value, list) and len(value) == size:
        if _tensors(value):
            raise _CannotBeCut  # ambiguous: one tensor per sample, or parts of a batch of this size
        return value[rows]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_part(item, size, rows) for item in value))
    if type(value) in (tuple, list):
        return type(value)(_part(item, size, rows) for item in value)
    if isinstance(value, Mapping):
        items = {key: _part(item, size, rows) for key, item in value.items()}
        if not isinstance(value, MutableMapping):
            return items
        alike = copy(value)  # keep the type: Hugging Face batches expose their keys as attributes
        alike.update(items)
        return alike
    raise _CannotBeCut


def _tensors(value: Any) -> list[Tensor]:
    """Return the tensors of a batch without rebuilding it, which fails for a packed sequence."""
    if isinstance(value, Tensor):
        return [value]
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple | list) else ()
    return [tensor for part in parts for tensor in _tensors(part)]


def _mixes_samples(model: nn.Module) -> bool:
    """Return True if samples depend on each other in eval mode too (batch norm without running statistics)."""
    return any(isinstance(each, _BatchNorm) and each.running_mean is None for each in model.modules())


@contextmanager
def counters_restored(objects: Sequence[object]) -> Iterator[None]:
    """Restore numbers, flags and text in the attributes of objects, because a loss may count its calls."""
    kept = [(vars(each), dict(vars(each))) for each in objects]
    try:
        yield
    finally:
        for attributes, before in kept:
            for name in [name for name, value in attributes.items() if isinstance(value, _PLAIN)]:
                if name not in before:  # attribute created by the first call
                    del attributes[name]
            attributes.update({name: value for name, value in before.items() if isinstance(value, _PLAIN)})


def _eager(*, is_compiled: bool) -> AbstractContextManager[Any]:
    """Return a context that prevents compilation for eval mode and half batches."""
    return torch.compiler.set_stance("force_eager") if is_compiled else nullcontext()


class _Unchanged(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raise before an operation changes a model parameter."""

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


# ---------------------------------------------------------------- error reports


def _fault(kind: str, found: _Values, loss: Callable[..., Any], parts: Parts) -> tuple[str, str, str]:
    """Return the fault, with its location and the fix."""
    (whole, count), ((one, _), (other, _)) = found.whole, found.halves
    figures = f"the loss of a batch is {whole:.4g}, that of its halves {one:.4g} and {other:.4g}"
    if kind == "count":
        what = f"loss returns a sum whose count is {count:g} for a batch and for each of its halves: {figures}"
        return what, place_of(loss, parts.source), _COUNT
    if kind == "mean":
        where, fix = _line_to_change(loss, parts.source)
        what = f"loss returns a mean with a count of {count:g}, but must return the sum over the items: {figures}"
        return what, where, fix
    name = type(parts.task).__name__
    what = f"loss must be the sum over the items of a batch, but it is not: {figures}"
    fix = f"return a sum; if the samples of a batch belong together, as in a contrastive loss, write in class {name}:"
    return what, place_of(loss, parts.source), f"{fix}\nloss_is_additive = False"


def _line_to_change(loss: Callable[..., Any], source: Path) -> tuple[str, str]:
    """Return the location of the call that takes the mean, and its replacement."""
    try:
        lines, first = inspect.getsourcelines(loss)
        tree = ast.parse(textwrap.dedent("".join(lines)))
        file = inspect.getsourcefile(loss)
    except (OSError, TypeError, SyntaxError):
        return str(source), _ANYWHERE
    # Search backwards from the last statement: an earlier mean may normalize the input.
    statements = tree.body[0].body if isinstance(tree.body[0], ast.FunctionDef) else tree.body
    for call in (node for each in reversed(statements) for node in ast.walk(each) if isinstance(node, ast.Call)):
        before, after = ast.unparse(call), _as_sum(call)
        if after is not None:
            return f"{file}:{first + call.lineno - 1}", f"replace {before} by {after}"
    return place_of(loss, source), _ANYWHERE


def _as_sum(call: ast.Call) -> str | None:
    """Return a call that averages over all elements rewritten as a sum, or None for any other call."""
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
    """Return True if the function is a torch loss with a `reduction` argument."""
    try:
        return "reduction" in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


_NOT_FINITE = "it is not finite for the first batch"
_UNCUT = "the batch cannot be cut into two halves"
_PLAIN = (bool, int, float, str, type(None))
_SUM = '"sum"'
_COUNT = "return the number of items as the count, such as len(y); len(batch) is the number of tensors in a batch"
_ANYWHERE = 'use reduction="sum", as in F.cross_entropy(logits, y, reduction="sum") or nn.MSELoss(reduction="sum")'
