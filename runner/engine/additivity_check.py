"""Check once, before the first update, that loss and metrics are summed over the batch and not averaged.

With a mean instead of the sum, gradients and the logged loss are too small by the number of items, but nothing fails.
The loss of a batch must equal the sum of the losses of its halves, in eval mode, in which samples do not depend on each
other. The calls leave the model, the generators and the order of the data unchanged.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode

from runner.axes.dataloader import Loader
from runner.axes.prefetch import Prefetch
from runner.base import noise
from runner.base.batch import BatchSamples, MicroBatch, copy_batch
from runner.base.errors import TaskFault
from runner.base.global_rng import seed_everything
from runner.base.module_buffers import restore_buffers
from runner.base.order import MicroBatchKey
from runner.base.sample_rng import global_generators
from runner.base.text import error_line
from runner.engine.assemble import Parts
from runner.engine.batch_halves import BatchPart, list_tensors, split_in_halves
from runner.engine.contract_checks import Number, validate_loss, validate_metrics
from runner.engine.error_diagnosis import locate_definition
from runner.engine.evaluate import eval_mode
from runner.engine.mean_rewrite import find_mean_call
from runner.engine.metric_states import MetricStates

TOLERANCE = 0.05  # relative to the loss: bfloat16 and size-dependent kernels round differently; a mean is off by a half
SPREAD = 0.05  # relative spread of a loss that draws random numbers; above it, averages over several draws decide
NEAR_MEAN = 0.2
_SumsByName = Mapping[str, tuple[Number, Number]]
_Autocast = Callable[[], AbstractContextManager[Any]]
_DRAW_COUNTS = 4, 16, 32, 64  # number of draws to average, increased until the result is clear
_MIN_DRAWS = 16  # minimum number of draws for a decision that depends on their spread
_MAX_STEP_S = 30.0  # if the draws up to one of these counts take longer, no more are run


class _Values(NamedTuple):
    """Loss and item counts of a batch and of its two halves."""

    batch: tuple[float, float]
    halves: tuple[tuple[float, float], tuple[float, float]]

    @property
    def scale(self) -> float:
        return max(abs(self.batch[0]), sum(abs(loss) for loss, _ in self.halves))

    @property
    def is_sum(self) -> bool:
        """True if the values are consistent with a sum; counts that do not add up may count another kind of item."""
        numbers = [*self.batch, *self.halves[0], *self.halves[1]]
        if not all(map(math.isfinite, numbers)) or not self.scale:
            return True
        if not math.isclose(self.batch[1], sum(count for _, count in self.halves), rel_tol=1e-6):
            return not self.has_constant_count
        return self._is_additive

    @property
    def has_constant_count(self) -> bool:
        """True if the loss is a sum but a batch and its halves have the same count, as with len((x, y)).

        Both halves must contribute: a count that is at least 1 is correct if one half has no items.
        """
        is_constant = self.batch[1] == self.halves[0][1] == self.halves[1][1] != 0
        return is_constant and self._is_additive and all(abs(loss) > NEAR_MEAN * self.scale for loss, _ in self.halves)

    @property
    def inconclusive_reason(self) -> str:
        """Return why the values are inconclusive, or "" if they are conclusive."""
        numbers = [*self.batch, *self.halves[0], *self.halves[1]]
        if not all(map(math.isfinite, numbers)):
            return _NOT_FINITE
        if self.is_per_batch:
            return _PER_BATCH
        return "" if self.scale else "it is 0 for the first batch"

    @property
    def is_per_batch(self) -> bool:
        """True for a value between those of the halves, with their count: as a mean with a count of 1.

        With a count of 1, also for three equal values, as of a model whose last layer is initialized with zeros.
        """
        low, high = sorted(loss for loss, _ in self.halves)
        margin = 1e-3 * (high - low)
        has_same_count = self.batch[1] == self.halves[0][1] == self.halves[1][1] != 0
        is_between = low + margin < self.batch[0] < high - margin
        is_equal = self.batch[1] == 1 and all(math.isclose(self.batch[0], loss, rel_tol=1e-3) for loss in (low, high))
        return has_same_count and (is_between or is_equal) and not self._is_additive

    @property
    def is_constant(self) -> bool:
        """True if the batch and its halves have the same value and count, as a metric that is a constant."""
        return self.batch == self.halves[0] == self.halves[1]

    @property
    def distance_from_sum(self) -> float:
        """Return the difference between the loss of the batch and the sum of the losses of its halves."""
        return self.batch[0] - sum(loss for loss, _ in self.halves)

    @property
    def distance_from_mean(self) -> float:
        """Return the difference between the loss of the batch and the mean of the losses of its halves."""
        return self.batch[0] - self._mean

    @property
    def _mean(self) -> float:
        return sum(loss * count for loss, count in self.halves) / max(self.batch[1], 1e-30)

    @property
    def _is_additive(self) -> bool:
        return abs(self.distance_from_sum) <= TOLERANCE * self.scale

    def __str__(self) -> str:
        (first_loss, _), (second_loss, _) = self.halves
        return f"{self.batch[0]:.4g}, that of its halves {first_loss:.4g} and {second_loss:.4g}"

    def is_mean(self, tolerance: float) -> bool:
        return abs(self.distance_from_mean) <= tolerance * abs(self._mean)


def check_loss_is_sum(
    parts: Parts, loss: Callable[[nn.Module, Any], Any], first: MicroBatch, read: BatchReader | None = None
) -> str:
    """Raise TaskFault on every rank if the loss of a batch is not the sum of the losses of its halves.

    Return "" if the check was conclusive, else the reason. Call it on every rank: the model may run collectives.
    Exceptions raised by the loss are ignored here and reported by the first update.

    read  reads samples as a batch: the halves of a batch that cannot be sliced, or a second sample for a batch of one
    """
    fault, reason = None, ""
    with _preserve_state(parts):
        split = _read_halves(first, read, parts)
        verdicts = _BatchComparison(parts, lambda batch: {"loss": _compute_loss(parts, loss, batch)}, split).compare()
        if first.counts:
            verdict = verdicts["loss"]
            fault = _loss_fault(verdict, loss, parts) if verdict.is_fault else None
            reason = verdict.reason
    gathered = parts.world.gather([fault, reason, first.counts])
    faults = [fault for fault, _, _ in gathered]
    # If the ranks do not split a batch, rank 0 has read its samples.
    _raise_fault(faults[0] if not parts.parallel.splits_batch else next(filter(None, faults), None))
    reasons = [reason for _, reason, counts in gathered if counts]
    return reasons[0] if reasons and all(reasons) else ""


def check_metrics_are_sums(parts: Parts, loader: Loader, indices: Sequence[int]) -> dict[str, list[str]]:
    """Raise TaskFault on every rank if a metric of `evaluate` is a mean instead of a sum over the batch.

    Return reason -> metrics that could not be checked. Every rank compares the same held-out samples.

    loader   reads held-out samples
    indices  of the samples of the first batch
    """
    task, read = parts.task, BatchReader(loader, parts.prefetch)
    like = BatchSamples(parts.plan.settings.seed, 0, indices, range(len(indices)))
    fault: tuple[str, str, str] | None = None
    reasons: dict[str, list[str]] = {}
    states = MetricStates(task, "val", parts.world, parts.source, finds_attributes=True)
    states.begin()
    declared = states.states  # metrics that are not sums
    missing: list[str] = []
    wrong: list[TaskFault] = []
    returned: list[Mapping[str, Any]] = []  # of the batch and of one of its halves
    with _preserve_state(parts):
        try:
            split = _read_halves(read(indices, like), read, parts)
        except Exception as error:  # reported by the first evaluation
            split = _SplitBatch(None, None, reason=f"the samples of a batch cannot be read: {error_line(error)}")

        def compute_metrics(batch: Any) -> Mapping[str, tuple[Number, Number]]:
            result = task.evaluate(parts.model, batch)
            if declared and isinstance(result, Mapping):
                missing.extend(name for name in declared if name not in result)
                if len(returned) < 2:
                    returned.append(result)
                result = {name: value for name, value in result.items() if name not in declared}
            return validate_metrics(result, task.evaluate, parts.source)

        # Few draws only: an evaluation may be slow, such as one that decodes or samples.
        comparison = _BatchComparison(parts, compute_metrics, split, noise.EVALUATION, _DRAW_COUNTS[:1])
        for name, verdict in comparison.compare().items():
            if verdict.kind in ("mean", "count"):
                fault = fault or _metric_fault(name, verdict, parts)
            elif verdict.kind == "neither" and task.loss_is_additive:
                reasons.setdefault(_NOT_ADDITIVE, []).append(name)
            elif verdict.reason and not (verdict.values and verdict.values.is_constant):
                reasons.setdefault(verdict.reason, []).append(name)
        if returned:
            wrong.extend(states.find_faults(returned[0], returned[-1]))
    wrong.extend(states.restart())  # a task may keep its metrics
    if wrong:
        fault = wrong[0].problems[0].what, wrong[0].problems[0].where, wrong[0].problems[0].fix
    if missing:
        fault = (
            f"metrics declares {missing[0]}, but evaluate does not return it",
            locate_definition(task.evaluate, parts.source),
            f'return {{"{missing[0]}": (scores, labels)}} with the rest',
        )
    _raise_fault(parts.world.broadcast(fault))
    return dict(parts.world.broadcast(reasons))


def _raise_fault(fault: Sequence[str] | None) -> None:
    if fault is not None:
        what, where, fix = fault
        raise TaskFault(what, where=where, fix=fix)


def _compute_loss(parts: Parts, loss: Callable[[nn.Module, Any], Any], batch: Any) -> tuple[Number, Number]:
    return validate_loss(loss(parts.model, batch), loss, parts.source)


class _SplitBatch(NamedTuple):
    """A batch and its halves.

    are_slices  the halves are slices of the batch; otherwise they were collated again, perhaps with other draws
    reason      why there are no halves
    """

    batch: BatchPart | None
    halves: tuple[BatchPart, BatchPart] | None
    are_slices: bool = True
    reason: str = ""


def _read_halves(first: MicroBatch, read: BatchReader | None, parts: Parts) -> _SplitBatch:
    if not first.counts:
        return _SplitBatch(None, None)
    if _mixes_samples(parts.bare):
        return _SplitBatch(None, None, reason="a batch norm without running statistics mixes the samples of a batch")
    if first.samples is None:
        return _SplitBatch(None, None, reason="it is not known which samples are in a batch")
    indices = list(first.samples.indices)
    try:
        if len(indices) == 1 and read is not None:
            indices.append(read.another_index(indices[0]))
            first = read(indices, first.samples)
        halves = split_in_halves(first)
        if halves is not None or read is None or len(indices) < 2:
            return _SplitBatch(BatchPart(first.batch, first.samples), halves, reason="" if halves else _NOT_SPLITTABLE)
        middle, samples = len(indices) // 2, first.samples
        assert samples is not None
        one, other = (read(half, samples) for half in (indices[:middle], indices[middle:]))
        halves = BatchPart(one.batch, one.samples), BatchPart(other.batch, other.samples)
        return _SplitBatch(BatchPart(first.batch, first.samples), halves, are_slices=False)
    except Exception as error:
        return _SplitBatch(None, None, reason=f"two halves of a batch cannot be read: {error_line(error)}")


class BatchReader:
    """Read samples as a batch on the device, as training does."""

    def __init__(self, loader: Loader, prefetch: Prefetch) -> None:
        self._loader, self._prefetch = loader, prefetch

    def __call__(self, indices: Sequence[int], like: BatchSamples) -> MicroBatch:
        """Return a batch of these samples in the epoch of `like`. Raises IndexError if a sample is unreadable."""
        key = MicroBatchKey(like.epoch, list(indices), last=False, first=min(like.places, default=0), seed=like.seed)
        # Do not use the training loader: its workers are prefetching.
        loader = self._loader.new_like(self._loader.fetcher)
        try:
            (batch,) = self._prefetch(iter(loader.batches([key])))
        finally:
            loader.close()
        if not batch.counts or batch.bad:
            raise IndexError(f"samples that cannot be read are among {key.indices}")
        return batch

    def another_index(self, index: int) -> int:
        """Return the index of another sample."""
        if len(self._loader.fetcher) < 2:
            raise IndexError("the data set has one sample")
        return (index + 1) % len(self._loader.fetcher)


class _Verdict(NamedTuple):
    """Result of the comparison for the loss or one metric.

    kind    "sum", "mean", "count" (a sum with a constant count), "neither", or "" if random draws prevent a decision
    values  averages over the draws; None if there are none
    reason  why the comparison was inconclusive, or ""
    """

    kind: str
    values: _Values | None = None
    reason: str = ""

    @property
    def is_fault(self) -> bool:
        return self.kind in ("mean", "count", "neither") and not self.reason


class _BatchComparison:
    """Call a function on a batch and its halves from the same model and random state.

    compute  batch -> name -> (sum, count)
    epoch    epoch of the draws of `per_sample_noise`; None: that of the batch
    """

    def __init__(
        self, parts: Parts, compute: Callable[[Any], _SumsByName], split: _SplitBatch, epoch: int | None = None,
        draw_counts: Sequence[int] = _DRAW_COUNTS,
    ) -> None:  # fmt: skip
        self.parts, self.compute, self.split, self.epoch = parts, compute, split, epoch
        self.draw_counts = draw_counts
        self.reason, self.is_random = split.reason, False

    def compare(self) -> dict[str, _Verdict]:
        """Return the verdict on each name; on "loss" alone if there are no values."""
        forward = self.parts.precision.forward
        result = self._evaluate(forward)
        if self._agree(_is_suspicious(result)) and self.parts.precision.dtype is not torch.float32:
            forward = nullcontext  # recompute in float32: the difference may be rounding of large sums
            result = self._evaluate(forward) or result
        if result is None:
            return {"loss": _Verdict("", reason=self.reason)}
        if not self._agree(self.is_random or _is_suspicious(result)):
            return {name: _Verdict("sum", values, values.inconclusive_reason) for name, values in result.items()}
        draws = [result]
        kinds: dict[str, str] = {}
        for number in self.draw_counts:
            start = time.perf_counter()
            while len(draws) < number:
                next_values = self._evaluate(forward, seed=len(draws))
                if next_values is None:
                    return {"loss": _Verdict("", reason=self.reason)}
                draws.append(next_values)
            kinds = {name: _classify(_select_name(draws, name)) for name in result}
            takes_long = time.perf_counter() - start > _MAX_STEP_S
            if self._agree(all(kinds.values()) or takes_long):
                break
        return {name: self._verdict(kind, _select_name(draws, name)) for name, kind in kinds.items()}

    def _verdict(self, kind: str, draws: Sequence[_Values]) -> _Verdict:
        reason = ""
        if kind == "sum":
            reason = next((draw.inconclusive_reason for draw in draws if draw.inconclusive_reason), "")
        elif not kind:
            reason = f"its random draws differ too much ({len(draws)} draws)"
        elif kind == "neither" and not self.split.are_slices:
            reason = "the halves of a batch, collated again, have other values"
        return _Verdict(kind, _average(draws), reason)

    def _evaluate(self, precision: _Autocast, seed: int = 0) -> dict[str, _Values] | None:
        """Return the values of the batch and its halves, or None if the task raises: some losses fail in eval mode."""
        batch, halves = self.split.batch, self.split.halves
        if batch is None or halves is None:
            return None
        try:
            batch_sums, one, other = (self._evaluate_part(part, precision, seed) for part in (batch, *halves))
        except _ChangesWeights:
            self.reason = "it changes weights of the model"
        except Exception as error:  # reported by the first update
            self.reason = f"it raises in eval mode: {error_line(error)}"
        else:
            return {
                name: _Values(value, (one[name], other[name]))
                for name, value in batch_sums.items()
                if name in one and name in other
            }
        return None

    def _evaluate_part(self, part: BatchPart, precision: _Autocast, seed: int) -> dict[str, tuple[float, float]]:
        bare, samples = self.parts.bare, part.samples
        noise.start_pass(samples if samples is None or self.epoch is None else samples._replace(epoch=self.epoch))
        seed_everything(seed)
        generators = global_generators()
        before = [generator.get_state() for generator in generators]
        with precision(), restore_buffers(bare.modules()), _ForbidWeightChanges(bare):
            sums = self.compute(copy_batch(part.batch))
        self.is_random = self.is_random or [generator.get_state() for generator in generators] != before
        return {name: (float(total), float(count)) for name, (total, count) in sums.items()}

    def _agree(self, flag: bool) -> bool:
        """Return the flag of rank 0 if all ranks must run the same forward passes."""
        return flag if self.parts.parallel.splits_batch else bool(self.parts.world.broadcast(flag))


def _is_suspicious(values_by_name: Mapping[str, _Values] | None) -> bool:
    return values_by_name is not None and not all(values.is_sum for values in values_by_name.values())


def _select_name(draws: Sequence[Mapping[str, _Values]], name: str) -> list[_Values]:
    return [draw[name] for draw in draws if name in draw]


@contextmanager
def _preserve_state(parts: Parts) -> Iterator[None]:
    """Put the model in eval mode without gradients; restore the model, the task and the generators on exit."""
    with (
        restore_attributes([parts.task, *parts.bare.modules()]),
        eval_mode(parts.bare, parts.world.device),
        parts.parallel.gather_parameters(parts.model),
        torch.no_grad(),
        noise.without_samples(),
        # no compilation for eval mode and half batches
        torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext(),
    ):
        yield


def _average(draws: Sequence[_Values]) -> _Values:
    """Return the averages over draws."""

    def mean(pairs: Iterable[tuple[float, float]]) -> tuple[float, float]:
        losses, counts = zip(*pairs, strict=True)
        return statistics.fmean(losses), statistics.fmean(counts)

    first_half, second_half = (mean(draw.halves[half] for draw in draws) for half in (0, 1))
    return _Values(mean(draw.batch for draw in draws), (first_half, second_half))


def _classify(draws: Sequence[_Values]) -> str:
    """Return "sum", "mean", "count" or "neither", or "" if random draws prevent a decision.

    All generators use the same seed for a batch and its halves, so draws shared by all samples cancel. Draws
    per sample do not: their averages must be closer to one hypothesis than to the other by six standard
    errors. By Student's t distribution, 16 draws err in 2 of 100,000 cases.
    """
    mean_values = _average(draws)
    if any(draw.inconclusive_reason == _NOT_FINITE for draw in draws):
        return "sum"  # inconclusive; the first update reports it
    if all(draw.is_sum for draw in draws):
        return "sum"
    losses = [draw.batch[0] for draw in draws]
    spread = max(losses) - min(losses)
    if all(draw.is_mean(TOLERANCE) for draw in draws) or (
        spread <= SPREAD * mean_values.scale and mean_values.is_mean(NEAR_MEAN)
    ):
        return "count" if mean_values.has_constant_count else "mean"
    if spread <= 1e-3 * mean_values.scale:
        return "count" if mean_values.has_constant_count else "neither"
    if len(draws) < _MIN_DRAWS:
        return ""
    from_sum, from_mean = [draw.distance_from_sum for draw in draws], [draw.distance_from_mean for draw in draws]
    # A constant count: a mean of micro-batches, or a wrong count.
    if mean_values.batch[1] == mean_values.halves[0][1] == mean_values.halves[1][1] != 0:
        return "sum" if _is_significant(from_sum) else "count" if mean_values.has_constant_count else ""
    if _is_significant(from_sum) and mean_values.is_mean(NEAR_MEAN):
        return "mean"
    is_near_sum = abs(statistics.fmean(from_sum)) <= NEAR_MEAN * mean_values.scale
    return "sum" if is_near_sum and _is_significant(from_mean) else ""


def _is_significant(differences: Sequence[float]) -> bool:
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    return abs(statistics.fmean(differences)) > 6 * error


class _ChangesWeights(Exception):
    """The loss changes weights, such as those of a teacher, so it must not be called unnecessarily."""


def _mixes_samples(model: nn.Module) -> bool:
    """Return True if samples depend on each other in eval mode too (batch norm without running statistics)."""
    return any(isinstance(module, _BatchNorm) and module.running_mean is None for module in model.modules())


@contextmanager
def restore_attributes(objects: Sequence[object]) -> Iterator[None]:
    """Restore numbers, flags and text in the attributes of objects, because a loss may count its calls."""
    saved = [(vars(obj), dict(vars(obj))) for obj in objects]
    try:
        yield
    finally:
        for attributes, before in saved:
            for name in [name for name, value in attributes.items() if isinstance(value, _PLAIN_TYPES)]:
                if name not in before:  # attribute created by the first call
                    del attributes[name]
            attributes.update({name: value for name, value in before.items() if isinstance(value, _PLAIN_TYPES)})


class _ForbidWeightChanges(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raise before an operation changes a model parameter."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages = {_storage_id(weight) for weight in model.parameters()}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Compiled code runs eagerly inside; torch's guard around each operation would import the compiler."""
        return False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function._schema.is_mutable:
            named = {argument.name: value for argument, value in zip(function._schema.arguments, args, strict=False)}
            for argument in function._schema.arguments:
                if argument.alias_info is not None and argument.alias_info.is_write:
                    written = list_tensors({**named, **kwargs}.get(argument.name))
                    if any(_storage_id(tensor) in self.storages for tensor in written):
                        raise _ChangesWeights
        return function(*args, **kwargs)


def _storage_id(tensor: Tensor) -> int:
    local: Tensor = getattr(tensor, "_local_tensor", tensor)
    return int(local.untyped_storage()._cdata)


# ---------------------------------------------------------------- error reports


def _loss_fault(verdict: _Verdict, loss: Callable[..., Any], parts: Parts) -> tuple[str, str, str]:
    """Return the fault, with its location and the fix."""
    assert verdict.values is not None
    kind, count = verdict.kind, verdict.values.batch[1]
    figures = f"the loss of a batch is {verdict.values}"
    if kind == "count":
        what = f"loss returns a sum whose count is {count:g} for a batch and for each of its halves: {figures}"
        return what, locate_definition(loss, parts.source), _COUNT_FIX
    if kind == "mean":
        where, fix = find_mean_call(loss, parts.source)
        what = f"loss returns a mean with a count of {count:g}, but must return the sum over the items: {figures}"
        return what, where, fix
    name = type(parts.task).__name__
    what = f"loss must be the sum over the items of a batch, but it is not: {figures}"
    fix = f"return a sum; if the samples of a batch belong together, as in a contrastive loss, write in class {name}:"
    return what, locate_definition(loss, parts.source), f"{fix}\nloss_is_additive = False"


def _metric_fault(name: str, verdict: _Verdict, parts: Parts) -> tuple[str, str, str]:
    assert verdict.values is not None
    evaluate, count = parts.task.evaluate, verdict.values.batch[1]
    figures = f"{name} of a batch is {verdict.values}"
    if verdict.kind == "count":
        what = f"evaluate returns a sum whose count is {count:g} for a batch and for each of its halves: {figures}"
        return what, locate_definition(evaluate, parts.source), _COUNT_FIX
    where, fix = find_mean_call(evaluate, parts.source, name)
    what = f"evaluate returns a mean with a count of {count:g}, but must return the sum over the items: {figures}"
    return what, where, fix


_NOT_FINITE = "it is not finite for the first batch"
_PER_BATCH = "its count is the same for a batch and for its halves, so its value depends on the size of the batches"
_NOT_SPLITTABLE = "the batch cannot be cut into two halves"
_NOT_ADDITIVE = "the value of a batch is not the sum over its halves, so it depends on the size of the batches"
_PLAIN_TYPES = (bool, int, float, str, type(None))
_COUNT_FIX = "return the number of items as the count, such as len(y); len(batch) is the number of tensors in a batch"
