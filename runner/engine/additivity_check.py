"""Check once, before the first update, that loss and metrics are summed over the batch and not averaged.

With a mean instead of the sum, gradients and the loss shown are too small by the number of items, but nothing fails.
The loss of a batch must equal the sum of the losses of its halves, in eval mode, in which samples do not depend on each
other. The calls leave the model, the generators and the order of the data unchanged.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
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
from runner.base.module_buffers import restore_buffers
from runner.base.order import MicroBatchKey
from runner.base.sample_rng import global_generators
from runner.base.text import error_line
from runner.engine.assemble import Parts
from runner.engine.contract_checks import Number, validate_loss, validate_metrics
from runner.engine.error_diagnosis import locate_definition
from runner.engine.evaluate import eval_mode
from runner.engine.mean_rewrite import find_mean_call
from runner.engine.metric_states import MetricStates

TOLERANCE = 0.05  # relative to the loss: bfloat16 and size-dependent kernels round differently; a mean is off by a half
SPREAD = 0.05  # relative spread of a loss that draws random numbers; above it, averages over several draws decide
NEAR_MEAN = 0.2
_Answers = Mapping[str, tuple[Number, Number]]
_NUMBERS_OF_DRAWS = 4, 16, 32, 64  # number of draws to average, increased until the result is clear
_FEWEST_DRAWS = 16  # for a decision that depends on their spread
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

    def __str__(self) -> str:
        (one, _), (other, _) = self.halves
        return f"{self.whole[0]:.4g}, that of its halves {one:.4g} and {other:.4g}"

    def is_mean(self, tolerance: float) -> bool:
        return abs(self.off_mean) <= tolerance * abs(self._mean)


def check_loss_is_sum(
    parts: Parts, loss: Callable[[nn.Module, Any], Any], first: MicroBatch, read: Reader | None = None
) -> str:
    """Raise TaskFault on every rank if the loss of a batch is not the sum of the losses of its halves.

    Return "" if the check was conclusive, else why it was not. Call it on every rank: the model may run collectives.
    Exceptions raised by the loss are ignored here and reported by the first update.

    read  reads samples as a batch: for the halves of a batch that cannot be cut, and for a batch of one sample
    """
    fault, why = None, ""
    with _left_alone(parts):
        compared = _Compared(parts, lambda batch: {"loss": _loss_of(parts, loss, batch)}, _split(first, read, parts))
        verdicts = compared.judged()
        if first.counts:
            verdict = verdicts["loss"]
            fault = _fault(verdict, loss, parts) if verdict.is_fault else None
            why = verdict.why
    gathered = parts.world.gather([fault, why, first.counts])
    faults = [there[0] for there in gathered]
    # rank 0 drew the samples of this batch
    _raise(faults[0] if not parts.parallel.splits_batch else next(filter(None, faults), None))
    reasons = [why for _, why, counts in gathered if counts]
    return reasons[0] if reasons and all(reasons) else ""


def check_metrics_are_sums(parts: Parts, loader: Loader, indices: Sequence[int]) -> dict[str, list[str]]:
    """Raise TaskFault on every rank if a metric of `evaluate` is a mean instead of a sum over the batch.

    Return reason -> metrics that could not be checked. Every rank compares the same held-out samples.

    loader   reads held-out samples
    indices  of the samples of the first batch
    """
    task, read = parts.task, Reader(loader, parts.prefetch)
    like = BatchSamples(parts.plan.settings.seed, 0, indices, range(len(indices)))
    fault: tuple[str, str, str] | None = None
    reasons: dict[str, list[str]] = {}
    states = MetricStates(task, "val", parts.world, parts.source)
    states.begin()
    declared = states.states  # these are not sums
    missing: list[str] = []
    wrong: list[TaskFault] = []
    calls = itertools.count()
    with _left_alone(parts):
        try:
            split = _split(read(indices, like), read, parts)
        except Exception as error:  # reported by the first evaluation
            split = _Split(None, None, why=f"the samples of a batch cannot be read: {error_line(error)}")

        def metrics_of(batch: Any) -> Mapping[str, tuple[Number, Number]]:
            found = task.evaluate(parts.model, batch)
            if declared and isinstance(found, Mapping):
                missing.extend(name for name in declared if name not in found)
                if next(calls) == 0:  # the whole batch: a metric may not accept half of one
                    wrong.extend(states.find_faults(found))
                found = {name: value for name, value in found.items() if name not in declared}
            return validate_metrics(found, task.evaluate, parts.source)

        # Few draws only: an evaluation may be slow, such as one that decodes or samples.
        compared = _Compared(parts, metrics_of, split, noise.EVALUATION, _NUMBERS_OF_DRAWS[:1])
        for name, verdict in compared.judged().items():
            if verdict.kind in ("mean", "count"):
                fault = fault or _fault_of_metric(name, verdict, parts)
            elif verdict.kind == "neither" and task.loss_is_additive:
                reasons.setdefault(_NEITHER, []).append(name)
            elif verdict.why:
                reasons.setdefault(verdict.why, []).append(name)
    states.begin()  # a task may keep its metrics
    if wrong:
        fault = wrong[0].problems[0].what, wrong[0].problems[0].where, wrong[0].problems[0].fix
    if missing:
        what = f"metrics declares {missing[0]}, but evaluate does not return it"
        fault = (
            what,
            locate_definition(task.evaluate, parts.source),
            f'return {{"{missing[0]}": (scores, labels)}} with the rest',
        )
    _raise(parts.world.broadcast(fault))
    return dict(parts.world.broadcast(reasons))


def _raise(fault: Sequence[str] | None) -> None:
    if fault is not None:
        what, where, fix = fault
        raise TaskFault(what, where=where, fix=fix)


def _loss_of(parts: Parts, loss: Callable[[nn.Module, Any], Any], batch: Any) -> tuple[Number, Number]:
    return validate_loss(loss(parts.model, batch), loss, parts.source)


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
        halves = split_in_halves(first)
        if halves is not None or read is None or len(indices) < 2:
            return _Split(BatchPart(first.batch, first.samples), halves, why="" if halves else _UNCUT)
        middle, known = len(indices) // 2, first.samples
        assert known is not None
        one, other = (read(part, known) for part in (indices[:middle], indices[middle:]))
        again = BatchPart(one.batch, one.samples), BatchPart(other.batch, other.samples)
        return _Split(BatchPart(first.batch, first.samples), again, is_cut=False)
    except Exception as error:
        return _Split(None, None, why=f"two halves of a batch cannot be read: {error_line(error)}")


class Reader:
    """Read samples as a batch on the device, in the same way as training does."""

    def __init__(self, loader: Loader, prefetch: Prefetch) -> None:
        self._loader, self._prefetch = loader, prefetch

    def __call__(self, indices: Sequence[int], like: BatchSamples) -> MicroBatch:
        """Return a batch of these samples in the epoch of `like`. Raises IndexError if a sample is unreadable."""
        key = MicroBatchKey(like.epoch, list(indices), last=False, first=min(like.places, default=0), seed=like.seed)
        # Do not use the training loader: its workers are prefetching.
        loader = self._loader.new_like(self._loader.fetcher)
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


class _Verdict(NamedTuple):
    """What the comparison found of one loss or metric.

    kind    "sum", "mean", "count" (a sum with a constant count), "neither", or "" if random draws hide the answer
    values  averages over the draws; None if there are none
    why     why the comparison was inconclusive, or ""
    """

    kind: str
    values: _Values | None = None
    why: str = ""

    @property
    def is_fault(self) -> bool:
        return self.kind in ("mean", "count", "neither") and not self.why


class _Compared:
    """Call a function on a batch and its halves from the same model and random state.

    answer  batch -> name -> (sum, count)
    epoch   epoch of the draws of `per_sample_noise`; None: that of the batch
    """

    def __init__(
        self, parts: Parts, answer: Callable[[Any], _Answers], split: _Split, epoch: int | None = None,
        numbers_of_draws: Sequence[int] = _NUMBERS_OF_DRAWS,
    ) -> None:  # fmt: skip
        self.parts, self.answer, self.split, self.epoch = parts, answer, split, epoch
        self.numbers_of_draws = numbers_of_draws
        self.why, self.draws = split.why, False

    def judged(self) -> dict[str, _Verdict]:
        """Return the verdict on each name; on "loss" alone if there are no values."""
        forward = self.parts.precision.forward
        found = self._values(forward)
        if self._agree(_is_suspicious(found)) and self.parts.precision.dtype is not torch.float32:
            forward = nullcontext  # in float32 the difference may turn out to be rounding of large sums
            found = self._values(forward) or found
        if found is None:
            return {"loss": _Verdict("", why=self.why)}
        if not self._agree(self.draws or _is_suspicious(found)):
            return {name: _Verdict("sum", values, values.undecided) for name, values in found.items()}
        several = [found]
        kinds: dict[str, str] = {}
        for number in self.numbers_of_draws:
            since = time.perf_counter()
            while len(several) < number:
                next_one = self._values(forward, seed=len(several))
                if next_one is None:
                    return {"loss": _Verdict("", why=self.why)}
                several.append(next_one)
            kinds = {name: _kind_of(_of_name(several, name)) for name in found}
            takes_long = time.perf_counter() - since > _LONGEST_S
            if self._agree(all(kinds.values()) or takes_long):
                break
        return {name: self._verdict(kind, _of_name(several, name)) for name, kind in kinds.items()}

    def _verdict(self, kind: str, several: Sequence[_Values]) -> _Verdict:
        why = ""
        if kind == "sum":
            why = next((each.undecided for each in several if each.undecided), "")
        elif not kind:
            why = f"its random draws differ too much ({len(several)} draws)"
        elif kind == "neither" and not self.split.is_cut:
            why = "the halves of a batch, collated again, have other values"
        return _Verdict(kind, averaged(several), why)

    def _values(self, precision: Callable[[], AbstractContextManager[Any]], seed: int = 0) -> dict[str, _Values] | None:
        """Return the values of the batch and its halves, or None if the task raises: some losses fail in eval mode."""
        whole, halves = self.split.whole, self.split.halves
        if whole is None or halves is None:
            return None
        try:
            of_whole, one, other = (self._value(part, precision, seed) for part in (whole, *halves))
        except _Changes:
            self.why = "it changes weights of the model"
        except Exception as error:  # reported by the first update
            self.why = f"it raises in eval mode: {error_line(error)}"
        else:
            return {
                name: _Values(value, (one[name], other[name]))
                for name, value in of_whole.items()
                if name in one and name in other
            }
        return None

    def _value(
        self, part: BatchPart, precision: Callable[[], AbstractContextManager[Any]], seed: int
    ) -> dict[str, tuple[float, float]]:
        bare, samples = self.parts.bare, part.samples
        noise.start_pass(samples if samples is None or self.epoch is None else samples._replace(epoch=self.epoch))
        seed_everything(seed)
        generators = global_generators()
        before = [generator.mark() for generator in generators]
        with precision(), restore_buffers(bare.modules()), _Unchanged(bare):
            found = self.answer(part.batch)
        self.draws = self.draws or [generator.mark() for generator in generators] != before
        return {name: (float(total), float(count)) for name, (total, count) in found.items()}

    def _agree(self, flag: bool) -> bool:
        """Return the flag of rank 0 if all ranks run every pass together."""
        return flag if self.parts.parallel.splits_batch else bool(self.parts.world.broadcast(flag))


def _is_suspicious(found: Mapping[str, _Values] | None) -> bool:
    return found is not None and not all(values.is_sum for values in found.values())


def _of_name(several: Sequence[Mapping[str, _Values]], name: str) -> list[_Values]:
    return [each[name] for each in several if name in each]


@contextmanager
def _left_alone(parts: Parts) -> Iterator[None]:
    """Put the model in eval mode without gradients; restore the model, the task and the generators on exit."""
    with (
        restore_attributes([parts.task, *parts.bare.modules()]),
        eval_mode(parts.bare, parts.world.device),
        parts.parallel.gather_parameters(parts.model),
        torch.no_grad(),
        noise.without_samples(),
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
    if len(several) < _FEWEST_DRAWS:
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


def split_in_halves(whole: MicroBatch) -> tuple[BatchPart, BatchPart] | None:
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
def restore_attributes(objects: Sequence[object]) -> Iterator[None]:
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


def _fault(verdict: _Verdict, loss: Callable[..., Any], parts: Parts) -> tuple[str, str, str]:
    """Return the fault, with its location and the fix."""
    assert verdict.values is not None
    kind, count = verdict.kind, verdict.values.whole[1]
    figures = f"the loss of a batch is {verdict.values}"
    if kind == "count":
        what = f"loss returns a sum whose count is {count:g} for a batch and for each of its halves: {figures}"
        return what, locate_definition(loss, parts.source), _COUNT
    if kind == "mean":
        where, fix = find_mean_call(loss, parts.source)
        what = f"loss returns a mean with a count of {count:g}, but must return the sum over the items: {figures}"
        return what, where, fix
    name = type(parts.task).__name__
    what = f"loss must be the sum over the items of a batch, but it is not: {figures}"
    fix = f"return a sum; if the samples of a batch belong together, as in a contrastive loss, write in class {name}:"
    return what, locate_definition(loss, parts.source), f"{fix}\nloss_is_additive = False"


def _fault_of_metric(name: str, verdict: _Verdict, parts: Parts) -> tuple[str, str, str]:
    assert verdict.values is not None
    evaluate, count = parts.task.evaluate, verdict.values.whole[1]
    figures = f"{name} of a batch is {verdict.values}"
    if verdict.kind == "count":
        what = f"evaluate returns a sum whose count is {count:g} for a batch and for each of its halves: {figures}"
        return what, locate_definition(evaluate, parts.source), _COUNT
    where, fix = find_mean_call(evaluate, parts.source, name)
    what = f"evaluate returns a mean with a count of {count:g}, but must return the sum over the items: {figures}"
    return what, where, fix


_NOT_FINITE = "it is not finite for the first batch"
_UNCUT = "the batch cannot be cut into two halves"
_NEITHER = "the value of a batch is not the sum over its halves, so it depends on the size of the batches"
_PLAIN = (bool, int, float, str, type(None))
_COUNT = "return the number of items as the count, such as len(y); len(batch) is the number of tensors in a batch"
