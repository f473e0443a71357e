"""Check once, before the first update, that loss and metrics are summed over the batch and not averaged.

With a mean instead of the sum, gradients and the logged loss are too small by a factor of the number of items, but
nothing fails. The loss of a batch must equal the sum of the losses of its halves. They are computed in eval mode, in
which samples do not depend on each other, with the same random numbers for all samples. The calls leave the model,
the generators and the order of the data unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from runner.axes.prefetch import Prefetch
from runner.base import noise
from runner.base.batch import BatchSamples, MicroBatch, copy_batch
from runner.base.errors import TaskFault
from runner.base.order import MicroBatchKey
from runner.base.text import error_line
from runner.distributed.matched_calls import UnmatchedCalls, matched_calls
from runner.engine.checks.batch_halves import BatchPart, split_in_halves
from runner.engine.checks.controlled_pass import ChangesWeights, ControlledPass, Draws
from runner.engine.checks.task_calls import repeatable_pass, without_effects
from runner.engine.contract.contract_checks import EVALUATE_VALUE, ElementCheck, Number, validate_loss, validate_metrics
from runner.engine.contract.error_diagnosis import locate_definition
from runner.engine.contract.task_loading import task_errors
from runner.engine.evaluation.evaluate import eval_mode
from runner.engine.evaluation.metric_states import MetricStates
from runner.engine.parts.assemble import Parts
from runner.engine.update.coupled import Embedding, validate_embedding
from runner.loading.loaders import Loader

# Accepted deviation, relative to the loss: kernels round differently for each batch size. A mean deviates by half.
TOLERANCE = 0.05
# For float32 weights. A larger deviation is not rounding, but a term that is not a sum, such as an L2 penalty.
ROUNDING = 1e-3
NEAR_MEAN = 0.2
_SumsByName = Mapping[str, tuple[Number, Number]]
_Autocast = Callable[[], AbstractContextManager[Any]]
# Maximum growth of a mean when the number of compared samples doubles; a cross-entropy grows by log(8) / log(4) = 1.5.
_MEAN_GROWTH = 1.6
_MIN_COUPLED_SAMPLES = 8
_MAX_COUPLED_SAMPLES = 32  # before they are repeated four times; many losses need memory quadratic in their number
_NUM_ATTEMPTS = 4  # with different random numbers, until the loss is finite and not 0


class _Values(NamedTuple):
    """Loss and item counts of a batch and of its two halves."""

    batch: tuple[float, float]
    halves: tuple[tuple[float, float], tuple[float, float]]

    @property
    def scale(self) -> float:
        return max(abs(self.batch[0]), sum(abs(loss) for loss, _ in self.halves))

    @property
    def is_degenerate(self) -> bool:
        """True if the values are 0 or not finite."""
        return not self.scale or not math.isfinite(sum((*self.batch, *self.halves[0], *self.halves[1])))

    @property
    def is_sum(self) -> bool:
        """True if the values are consistent with a sum.

        Counts that do not add up are accepted unless they are constant, because they may count another kind of item.
        """
        if self.is_degenerate:
            return True
        if not math.isclose(self.batch[1], sum(count for _, count in self.halves), rel_tol=1e-6):
            return not self.has_constant_count
        return self._is_additive

    @property
    def has_constant_count(self) -> bool:
        """True if the loss is a sum but a batch and its halves have the same count, as with len((x, y)).

        Both halves must contribute to the loss, because max(count, 1) is a correct count if one half has no items.
        """
        is_constant = self.batch[1] == self.halves[0][1] == self.halves[1][1] != 0
        return is_constant and self._is_additive and all(abs(loss) > NEAR_MEAN * self.scale for loss, _ in self.halves)

    @property
    def inconclusive_reason(self) -> str:
        """Return why the values are inconclusive, or "" if they are conclusive."""
        if not math.isfinite(sum((*self.batch, *self.halves[0], *self.halves[1]))):
            return "it is not finite for the first batch"
        if self.is_per_batch:
            return _PER_BATCH
        return "" if self.scale else "it is 0 for the first batch"

    @property
    def is_per_batch(self) -> bool:
        """True if the value is between those of the halves and the counts are equal, as for a mean with a count of 1.

        If the count is 1, three equal values also qualify, because the last layer may be initialized with zeros.
        """
        low, high = sorted(loss for loss, _ in self.halves)
        margin = 1e-3 * (high - low)
        has_same_count = self.batch[1] == self.halves[0][1] == self.halves[1][1] != 0
        is_between = low + margin < self.batch[0] < high - margin
        is_equal = self.batch[1] == 1 and all(math.isclose(self.batch[0], loss, rel_tol=1e-3) for loss in (low, high))
        return has_same_count and (is_between or is_equal) and not self._is_additive

    @property
    def is_constant(self) -> bool:
        """True if the batch and its halves have the same value and count, as for a constant metric."""
        return self.batch == self.halves[0] == self.halves[1]

    def is_close(self, other: _Values | None) -> bool:
        """Return whether the other values are equal to these, up to rounding."""
        if other is None:
            return False
        pairs = zip((self.batch, *self.halves), (other.batch, *other.halves), strict=True)
        return all(abs(mine - theirs) <= 0.1 * ROUNDING * self.scale for (mine, _), (theirs, _) in pairs)

    @property
    def is_mean(self) -> bool:
        """True if the loss of the batch is close to the mean of the losses of its halves."""
        return abs(self.batch[0] - self._mean_of_halves) <= NEAR_MEAN * abs(self._mean_of_halves)

    @property
    def grows_as_mean(self) -> bool:
        """True if the count grows with the batch, but the loss is not much more than the mean of the halves."""
        has_growing_count = self.batch[1] > 0.75 * sum(count for _, count in self.halves) > 0
        if self.is_degenerate or not has_growing_count or not self._mean_of_halves or not self.batch[0]:
            return False
        return 1 / _MEAN_GROWTH < self.batch[0] / self._mean_of_halves < _MEAN_GROWTH

    @property
    def _mean_of_halves(self) -> float:
        total = sum(count for _, count in self.halves)
        return sum(loss * count for loss, count in self.halves) / max(total, 1e-30)

    @property
    def _is_additive(self) -> bool:
        return self.deviation <= TOLERANCE

    @property
    def deviation(self) -> float:
        """Distance of the value of the batch from the sum of the halves, relative to the larger of them."""
        return abs(self.batch[0] - sum(loss for loss, _ in self.halves)) / (self.scale or 1.0)

    @property
    def deviates(self) -> bool:
        """True if the value is almost a sum, but differs by more than rounding in float32."""
        return not self.is_degenerate and self.is_sum and ROUNDING < self.deviation <= TOLERANCE

    def __str__(self) -> str:
        (first_loss, _), (second_loss, _) = self.halves
        return f"{self.batch[0]:.4g}, but those of its halves are {first_loss:.4g} and {second_loss:.4g}"


class LossCheck(NamedTuple):
    """Result of the check of a loss.

    reason   why the check was inconclusive, or ""
    warning  message with the deviation from a sum if it exceeds rounding, or ""
    """

    reason: str = ""
    warning: str = ""


def check_loss_is_sum(
    parts: Parts, loss: Callable[[nn.Module, Any], Any], first: MicroBatch, read: BatchReader | None = None
) -> LossCheck:
    """Raise TaskFault on every rank if the loss of a batch is not the sum of the losses of its halves.

    Call it on every rank: the model may run collectives.

    An exception of the loss is ignored here, because the first update reports it. It is raised only if it occurs on
    some, but not all, of the ranks that together hold one copy of the model, because the others would wait for them.

    read  reads samples as a batch: the halves of a batch that cannot be sliced, or a second sample for a batch of one
    """
    fault, reason, warning = None, "", ""
    with preserve_state(parts):
        split = _read_halves(first, read, parts)
        elements = ElementCheck(loss, parts.source, _THIRD_VALUE)
        verdicts = _BatchComparison(parts, lambda batch: _compute_sums(parts, loss, batch, elements), split).compare()
        if first.is_counted:
            verdict = verdicts.pop("loss")
            fault = _sum_fault("loss() returns", "the loss", verdict, loss, parts) if verdict.is_fault else None
            reason = verdict.reason
            warning = _deviation_warning(verdict.values) if verdict.deviates and verdict.values else ""
            for name, verdict in verdicts.items():  # metrics in the third value of the loss
                # A sum with a constant count is a useful metric, such as items per micro-batch.
                if verdict.is_fault and verdict.kind == "mean":
                    fault = fault or _sum_fault(f"{_THIRD_VALUE} has", name, verdict, loss, parts)
            fault = _describe(elements.fault) if elements.fault else fault
    gathered = parts.world.gather([fault, reason, warning, first.is_counted])
    faults = [fault for fault, *_ in gathered]
    # Without `splits_batch`, as in a pipeline, the verdict of rank 0 on its samples decides.
    _raise_fault(faults[0] if not parts.parallel.splits_batch else next(filter(None, faults), None))
    reasons = [reason for _, reason, _, counts in gathered if counts] or ["no sample of the first batch can be read"]
    warnings = filter(None, (warning for _, _, warning, _ in gathered))
    return LossCheck(reasons[0] if all(reasons) else "", next(warnings, ""))


def check_coupled_loss(parts: Parts, first: MicroBatch, read: BatchReader) -> None:
    """Raise TaskFault on every rank if `couple` returns a mean with the number of samples as count.

    If a loss compares samples with each other, the loss of a batch is not the sum of the losses of its halves. A sum
    still roughly doubles from a half to the batch, and from rows repeated twice to rows repeated four times, whereas
    the mean of a cross-entropy grows by log(2). The loss is rejected only if both increases are small, because the
    terms of some sums become smaller in larger batches. Single rows are not compared with rows repeated twice, because
    the first repetition gives each row a partner of its class. Nor is a loss rejected if its count does not grow with
    the batch, as a number of classes does not.
    """
    task = parts.task

    def couple(embedding: Embedding) -> tuple[Number, Number]:
        return validate_loss(task.couple(embedding.structure), task.couple, parts.source, name="couple")

    def compute(batch: Any) -> _SumsByName:
        embedding = validate_embedding(task.embed(parts.model, batch), task.embed, parts.source)
        copies = {"once": 1, "twice": 2, "four times": 4}
        return {
            name: couple(embedding._replace(tensors=tuple(torch.cat([rows] * n) for rows in embedding.tensors)))
            for name, n in copies.items()
        }

    fault = None
    with preserve_state(parts):
        split = _read_halves(first, read, parts, at_least=_MIN_COUPLED_SAMPLES, at_most=_MAX_COUPLED_SAMPLES)
        values = _BatchComparison(parts, compute, split).evaluate(parts.precision.forward, 0, Draws()) or {}
        if "once" in values:
            once, (twice, count), (more, more_count) = values["once"], values["twice"].batch, values["four times"].batch
            is_constant = twice != 0 and 1 / _MEAN_GROWTH < more / twice < _MEAN_GROWTH
            if once.grows_as_mean and is_constant and more_count > 1.5 * count:
                what = (
                    f"couple() returns a mean with a count of {once.batch[1]:g}, but must return the sum over the"
                    f" items: the loss of a batch is {once}; it is {twice:.4g} if the rows are repeated twice, and"
                    f" {more:.4g} if they are repeated four times"
                )
                fix = (
                    'return the sum, as with reduction="sum", or the mean with a count of 1; if it already is a sum,'
                    f" write in class {type(task).__name__}:\nloss_is_additive = False"
                )
                fault = what, locate_definition(task.couple, parts.source), fix
    _raise_fault(next(filter(None, parts.world.gather(fault)), None))


def check_metrics_are_sums(parts: Parts, loader: Loader, indices: Sequence[int]) -> dict[str, list[str]]:
    """Raise TaskFault on every rank if a metric of `evaluate` is a mean instead of a sum over the batch.

    Return the metrics that could not be checked, as reason -> names. Every rank compares the same held-out samples.

    loader   reads held-out samples
    indices  indices of the samples of the first batch
    """
    task, read = parts.task, BatchReader(loader, parts.prefetch)
    like = BatchSamples(parts.plan.settings.seed, 0, indices, range(len(indices)))
    fault: tuple[str, str, str] | None = None
    reasons: dict[str, list[str]] = {}
    states = MetricStates(task, "val", parts.world, parts.source)
    states.begin()
    declared = states.states  # metrics that are not sums
    missing: list[str] = []
    returned: list[Mapping[str, Any]] = []  # results for the batch and one of its halves
    invalid: list[TaskFault] = []
    elements = ElementCheck(task.evaluate, parts.source, EVALUATE_VALUE)
    with preserve_state(parts):
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
            try:
                return elements.expand(validate_metrics(result, task.evaluate, parts.source))
            except TaskFault as error:
                invalid.append(error)
                raise

        comparison = _BatchComparison(parts, compute_metrics, split, noise.EVALUATION)
        for name, verdict in comparison.compare().items():
            if verdict.is_fault and verdict.kind != "neither":
                fault = fault or _sum_fault("evaluate() returns", name, verdict, task.evaluate, parts)
            elif (verdict.is_fault or verdict.deviates) and task.loss_is_additive:
                reasons.setdefault(_NOT_ADDITIVE, []).append(name)
            elif verdict.reason and not (verdict.values and verdict.values.is_constant):
                reasons.setdefault(verdict.reason, []).append(name)
        for wrong in (*invalid, *(states.find_faults(returned[0], returned[-1]) if returned else ())):
            fault = _describe(wrong)
    if missing:
        fault = (
            f"metrics() declares {missing[0]}, but evaluate() does not return it",
            locate_definition(task.evaluate, parts.source),
            f'also return "{missing[0]}": (scores, labels)',
        )
    _raise_fault(parts.world.broadcast(fault))
    return dict(parts.world.broadcast(reasons))


def _describe(error: TaskFault) -> tuple[str, str, str]:
    return error.problems[0].what, error.problems[0].where, error.problems[0].fix


def _raise_fault(fault: Sequence[str] | None) -> None:
    if fault is not None:
        what, where, fix = fault
        raise TaskFault(what, where=where, fix=fix)


def _compute_sums(
    parts: Parts, loss: Callable[[nn.Module, Any], Any], batch: Any, elements: ElementCheck
) -> _SumsByName:
    """Return the sums and counts of the loss and of the metrics in its third value, by name."""
    result = loss(parts.model, batch)
    total = validate_loss(result, loss, parts.source)
    further = validate_metrics(result[2], loss, parts.source, value=_THIRD_VALUE) if len(result) > 2 else {}
    return {**elements.expand(further), "loss": total}


class _SplitBatch(NamedTuple):
    """A batch and its halves.

    are_slices  the halves are slices of the batch; False: they were collated again, perhaps with other random numbers
    reason      why there are no halves, or ""
    """

    batch: BatchPart | None
    halves: tuple[BatchPart, BatchPart] | None
    are_slices: bool = True
    reason: str = ""


def _read_halves(
    first: MicroBatch, read: BatchReader | None, parts: Parts, *, at_least: int = 2, at_most: int | None = None
) -> _SplitBatch:
    """Return the first micro-batch with its halves; read it again if it has too few or too many samples."""
    if not first.is_counted:
        return _SplitBatch(None, None)
    norms = [module for module in parts.bare.modules() if isinstance(module, _BatchNorm)]
    if any(norm.running_mean is None for norm in norms):
        return _SplitBatch(None, None, reason="a batch norm without running statistics mixes the samples of a batch")
    if first.samples is None:
        return _SplitBatch(None, None, reason="it is not known which samples are in a batch")
    indices = list(first.samples.indices)
    try:
        if read is not None and not at_least <= len(indices) <= (at_most or len(indices)):
            while len(indices) < at_least:
                indices.append(read.another_index(indices[-1]))
            indices = indices[:at_most]
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
        if not batch.is_counted or batch.bad:
            raise IndexError(f"samples that cannot be read are among {key.indices}")
        return batch

    def another_index(self, index: int) -> int:
        """Return the index of another sample."""
        if len(self._loader.fetcher) < 2:
            raise IndexError("the dataset has one sample")
        return (index + 1) % len(self._loader.fetcher)


class _Verdict(NamedTuple):
    """Result of the comparison for the loss or one metric.

    kind    "sum", "mean", "count" (a sum with a constant count) or "neither"; "" without values
    reason  why the comparison was inconclusive, or ""
    """

    kind: str
    values: _Values | None = None
    reason: str = ""

    @property
    def is_fault(self) -> bool:
        return self.kind in ("mean", "count", "neither") and not self.reason

    @property
    def deviates(self) -> bool:
        """True if the value is almost a sum."""
        return self.values is not None and self.values.deviates and not self.reason


class _BatchComparison:
    """Call a function on a batch and its halves, with the same model state and random numbers for all of them.

    compute  returns {name: (sum, count)} for a batch
    epoch    epoch that seeds `per_sample_noise`; None: the epoch of the batch
    """

    def __init__(
        self, parts: Parts, compute: Callable[[Any], _SumsByName], split: _SplitBatch, epoch: int | None = None
    ) -> None:
        self.parts, self.compute, self.split, self.epoch = parts, compute, split, epoch
        self.reason = split.reason
        # With weights in half precision, rounding can be larger than a small term that is not a sum.
        self._is_exact = all(weight.dtype not in _HALF for weight in parts.bare.parameters())

    def compare(self) -> dict[str, _Verdict]:
        """Return name -> verdict; without values, only a verdict on "loss"."""
        for seed in range(_NUM_ATTEMPTS):
            draws = Draws()
            verdicts = self._compare_once(seed, draws)
            found = [verdict.values for verdict in verdicts.values() if verdict.values is not None]
            if not self._agree(bool(draws.first_draws) and any(values.is_degenerate for values in found)):
                break
        return verdicts

    def _compare_once(self, seed: int, draws: Draws) -> dict[str, _Verdict]:
        forward = self.parts.precision.forward
        values = self.evaluate(forward, seed, draws)
        if self._agree(self._is_suspicious(values)) and self.parts.precision.dtype is not torch.float32:
            forward = nullcontext  # recompute in float32: the difference may be rounding of large sums
            values = self.evaluate(forward, seed, draws) or values
        reason, again = "", values or {}
        if self._agree(self._is_suspicious(values)):
            again = self.evaluate(forward, seed + _NUM_ATTEMPTS, draws) or {}
            if draws.selects_samples:
                reason = "it selects samples of the batch at random"
        if values is None:
            return {"loss": _Verdict("", reason=self.reason)}
        differs = "it draws random numbers that the check cannot make equal for all samples, such as those of NumPy"
        return {
            name: self._classify(value, reason or ("" if value.is_close(again.get(name)) else differs))
            for name, value in values.items()
        }

    def _classify(self, values: _Values, reason: str) -> _Verdict:
        if values.deviates and not self.split.are_slices:
            return _Verdict("sum", values, _COLLATED_AGAIN)
        if values.is_sum:
            inexact = _HALF_WEIGHTS if values.deviates and not self._is_exact else ""
            return _Verdict("sum", values, values.inconclusive_reason or inexact or (reason if values.deviates else ""))
        if values.has_constant_count:
            return _Verdict("count", values, reason)
        if values.is_mean:
            return _Verdict("mean", values, reason)
        if not self.split.are_slices:
            reason = _COLLATED_AGAIN
        return _Verdict("neither", values, reason)

    def evaluate(self, precision: _Autocast, seed: int, draws: Draws) -> dict[str, _Values] | None:
        """Return the values of the batch and its halves, or None if the task raises: some losses fail in eval mode."""
        batch, halves = self.split.batch, self.split.halves
        is_split = batch is not None and halves is not None
        if not self.parts.parallel.splits_batch:  # reading may have failed on one rank only
            is_split = all(self.parts.parallel.copy_ranks.gather(is_split))
        if not is_split:
            return None
        assert batch is not None
        assert halves is not None
        try:
            batch_sums, one, other = (self._evaluate_part(part, precision, seed, draws) for part in (batch, *halves))
        except UnmatchedCalls as unmatched:  # the ranks cannot continue together
            with task_errors(self.parts.source, "the check before the first update"):
                raise unmatched.__cause__ or unmatched from None
        except ChangesWeights:
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

    def _evaluate_part(
        self, part: BatchPart, precision: _Autocast, seed: int, draws: Draws
    ) -> dict[str, tuple[float, float]]:
        parts, samples = self.parts, part.samples
        if samples is not None and self.epoch is not None:
            samples = samples._replace(epoch=self.epoch)
        calls = nullcontext() if parts.parallel.splits_batch else matched_calls(parts.model, parts.parallel.copy_ranks)
        with repeatable_pass(parts, samples, seed), precision(), calls, ControlledPass(parts.bare, draws):
            sums = self.compute(copy_batch(part.batch))
        return {name: (float(total), float(count)) for name, (total, count) in sums.items()}

    def _is_suspicious(self, values_by_name: Mapping[str, _Values] | None) -> bool:
        return values_by_name is not None and not all(
            values.is_sum and not (self._is_exact and values.deviates) for values in values_by_name.values()
        )

    def _agree(self, flag: bool) -> bool:
        """Return the flag, or that of rank 0 if all ranks must run the same forward passes."""
        return flag if self.parts.parallel.splits_batch else bool(self.parts.world.broadcast(flag))


@contextmanager
def preserve_state(parts: Parts) -> Iterator[None]:
    """Put the model in eval mode without gradients; restore the model, the task and the generators on exit."""
    with (
        eval_mode(parts.bare, parts.world.device),
        parts.parallel.gather_parameters(parts.model),
        without_effects(parts),
    ):
        yield


# ---------------------------------------------------------------- error reports


def _sum_fault(
    title: str, name: str, verdict: _Verdict, method: Callable[..., Any], parts: Parts
) -> tuple[str, str, str]:
    """Return what is wrong with a loss or a metric, where, and the fix.

    title  "loss() returns", for example
    """
    assert verdict.values is not None
    count, where = verdict.values.batch[1], locate_definition(method, parts.source)
    figures = f"{name} of a batch is {verdict.values}"
    if verdict.kind == "count":
        what = f"{title} the same count, {count:g}, for a batch and for each of its halves: {figures}"
        return what, where, _COUNT_FIX
    if verdict.kind == "mean":
        what = f"{title} a mean with a count of {count:g}, but must return the sum over the items: {figures}"
        return what, where, _MEAN_FIX
    what = f"loss() must return the sum over the items of a batch, but does not: {figures}"
    task = type(parts.task).__name__
    fix = f"return a sum; if the samples of a batch belong together, as in a contrastive loss, write in class {task}:"
    return what, where, f"{fix}\nloss_is_additive = False"


def _deviation_warning(values: _Values) -> str:
    return (
        f"loss() differs from a sum over the items by {values.deviation:.1%}, so updates depend on the sizes of"
        f" micro-batches and on the number of ranks: the loss of a batch is {values}. Multiply a term that is added"
        " once per batch, such as a regularizer, by the number of items"
    )


_PER_BATCH = "its count is the same for a batch and for its halves, so its value depends on the size of the batches"
_HALF = (torch.bfloat16, torch.float16)
_COLLATED_AGAIN = "samples change when they are collated again as halves of a batch"
_HALF_WEIGHTS = "it differs slightly from a sum, which may be the rounding of weights in half precision"
_NOT_SPLITTABLE = "the batch cannot be cut into two halves"
_NOT_ADDITIVE = "the value of a batch is not the sum over its halves, so it depends on the size of the batches"
_THIRD_VALUE = "the third value of loss()"
_MEAN_FIX = (
    'use reduction="sum", as in F.cross_entropy(logits, y, reduction="sum") or nn.MSELoss(reduction="sum"), '
    "and x.sum() instead of x.mean()"
)
_COUNT_FIX = "return the number of items as the count, such as len(y); len(batch) is the number of tensors in a batch"
