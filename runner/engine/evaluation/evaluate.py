"""Evaluate metrics on held-out samples: sum over all batches, divide once at the end."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from runner.base import noise
from runner.base.errors import TaskFault
from runner.base.order import Indices, MicroBatchKey, rank_seed
from runner.base.task import Task
from runner.distributed.world import World
from runner.engine.contract.contract_checks import (
    Number,
    check_count,
    is_vector,
    name_elements,
    not_a_sum_fault,
    validate_metrics,
    validate_numbers,
)
from runner.engine.contract.error_diagnosis import locate_definition
from runner.engine.evaluation.metric_states import MetricStates, split_positions
from runner.engine.parts.assemble import Parts
from runner.engine.update.oom_retry import release
from runner.loading.loaders import Loader
from runner.tensors.global_rng import random_state, restore_random_state, seed_everything
from runner.tensors.module_buffers import restore_buffers


class EvaluationResult(NamedTuple):
    """Result of an evaluation.

    metrics  name -> value, NaN for a metric without items
    empty    names of the metrics without items
    """

    metrics: dict[str, float]
    empty: tuple[str, ...] = ()

    def measured(self) -> dict[str, float]:
        """Return the metrics that have items."""
        return {name: value for name, value in self.metrics.items() if name not in self.empty}


@dataclass
class BatchSizes:
    """Maximum batch sizes of an evaluation.

    requested  size of the batches that are distributed to the ranks
    coupled    number of samples whose coupled loss is computed together; 0: all samples
    on_error   returns a smaller size for a retry, or raises the error if none can help; None: never retry
    current    size on this rank, smaller than `requested` after an out-of-memory error
    by_rank    (size before the last evaluation, size after it) of each rank
    """

    requested: int
    coupled: int
    on_error: Callable[[Exception, int], int] | None = None
    current: int = 0
    by_rank: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.current = self.current or self.requested


def evaluate(
    parts: Parts,
    loader: Loader,
    samples: Indices,
    sizes: BatchSizes,
    *,
    on_batch: Callable[[], object] = lambda: None,
    should_stop: Callable[[], bool] = lambda: False,
    on_last_batch: Callable[[], object] = lambda: None,
    split: str = "val",
) -> EvaluationResult | None:
    """Return the metrics over `samples`, counting each sample once; None if `should_stop` returned True on any rank.

    loader         reads the samples; it is closed after the last batch, and before a retry
    on_batch       called before each batch
    should_stop    called before each batch; ignored in lockstep
    on_last_batch  called after the last batch, before `summarize`
    split          name of the split, which `Task.metrics` receives

    After an out-of-memory error, this rank evaluates all of its samples again in smaller batches, without a collective.

    The generators are seeded with the seed of the run, so that metrics based on sampling are comparable. Afterwards the
    modes of all modules and the states of the generators are restored.
    """
    task, source, parallel, seed = parts.task, parts.source, parts.parallel, parts.plan.settings.seed
    world, size_before = parallel.world, sizes.current
    # In lockstep, all ranks run the same number of batches.
    batch_size = sizes.current if parallel.is_lockstep else sizes.requested
    states = MetricStates(task, split, world, source, sizes.coupled, parts.precision.forward)
    keys = [
        MicroBatchKey(0, samples[part.start : part.stop], last=part.stop == len(samples), first=part.start, seed=seed)
        for part in split_positions(len(samples), batch_size, sizes.coupled if states.is_coupled else 0)
    ]
    local_batches = parallel.evaluation_batches(keys)

    def run_batches() -> tuple[bool, dict[str, list[tuple[Number, Number]]]]:
        pairs: dict[str, list[tuple[Number, Number]]] = {}
        sizes_by_name: dict[str, set[tuple[int, int]]] = {}  # (number of elements, number of samples) of each batch
        states.begin()
        with (
            evaluation_mode(parts, rank_seed(seed, world.rank)),
            parallel.gather_parameters(parts.model),
            closing(loader),
        ):
            for micro in parts.prefetch(iter(loader.batches(split_batches(local_batches, sizes.current)))):
                on_batch()
                if should_stop() and not parallel.is_lockstep:  # in lockstep, the other ranks would block
                    return True, pairs
                noise.start_pass(micro.samples and micro.samples._replace(epoch=noise.EVALUATION))
                with parts.precision.forward():
                    metrics = validate_metrics(states.evaluate_batch(parts.model, micro), task.evaluate, source)
                for name, pair in metrics.items() if micro.is_counted else ():
                    if micro.samples is not None:
                        num_elements = pair[0].numel() if is_vector(pair[0]) else 1
                        sizes_by_name.setdefault(name, set()).add((num_elements, len(micro.samples.indices)))
                        _refuse_samples(name, pair, sizes_by_name[name], task, source)
                    pairs.setdefault(name, []).append((_copy_number(pair[0]), _copy_number(pair[1])))
        return False, pairs

    while True:
        try:
            is_stopped, pairs = run_batches()
            break
        except Exception as error:
            if parallel.is_lockstep or sizes.on_error is None:
                raise
            sizes.current = sizes.on_error(error, sizes.current)
        release(world.device)  # outside `except`, whose exception keeps the tensors of the batch alive
    on_last_batch()
    sums_by_name: dict[str, list[float]] = {}
    for name, batch_pairs in pairs.items():
        sums_by_name |= _sum_pairs(name, batch_pairs, world)
    gathered = world.gather([is_stopped, sums_by_name, [size_before, sizes.current]])
    sizes.by_rank = [(old, new) for _, _, (old, new) in gathered]
    if any(is_stopped for is_stopped, _, _ in gathered):
        return None
    with evaluation_mode(parts, seed):  # the same random numbers on all ranks
        results = states.results()
    # Not evaluation_mode, because `summarize` may compute gradients and set buffers, such as a threshold.
    with _modes_and_generators(parts.model, world.device):
        seed_everything(seed)
        return _summarize([sums for _, sums, _ in gathered], results, states.nonfinite, parts)


@contextmanager
def evaluation_mode(parts: Parts, seed: int) -> Iterator[None]:
    """Put the model in eval mode without gradients, and seed generators; restore modes, buffers and generators on exit.

    Also used after the last batch, because `couple` and metrics may draw random numbers and call modules.
    """
    with eval_mode(parts.model, parts.parallel.world.device), torch.no_grad(), noise.without_samples():
        seed_everything(seed)
        yield


def _summarize(
    sums_by_rank: Sequence[Mapping[str, list[float]]],
    state_metrics: Mapping[str, float],
    nonfinite_states: Collection[str],
    parts: Parts,
) -> EvaluationResult:
    """Return the metrics of all ranks: sums divided once by their counts, then metrics that are not sums.

    sums_by_rank      metric -> sum, count and smallest count
    state_metrics     metrics that are not sums
    nonfinite_states  names of `state_metrics` that are not finite although they have items
    """
    task, source = parts.task, parts.source
    metrics_by_name: dict[str, float] = {}
    is_default = type(task).evaluate is Task.evaluate
    title, method = ("loss", task.loss) if is_default else ("evaluate", task.evaluate)
    non_finite: set[str] = set()  # metrics whose sum is not finite: their NaN is a result, not a lack of items
    for name in dict.fromkeys(name for sums in sums_by_rank for name in sums):
        rows = [sums[name] for sums in sums_by_rank if name in sums]
        for _, _, min_count in rows:
            check_count(min_count, f"{title}() (metric {name})", method, source)
        total, count = (sum(column) for column in list(zip(*rows, strict=True))[:2])
        if not math.isfinite(total):
            non_finite.add(name)
        metrics_by_name[name] = total / count if count else math.nan
    if duplicates := [name for name in state_metrics if name in metrics_by_name]:
        what = f"metrics() and evaluate() both have the name {duplicates[0]}"
        raise TaskFault(what, where=locate_definition(task.metrics, source), fix="rename one of them")
    metrics_by_name |= state_metrics
    non_finite.update(nonfinite_states)
    metrics = validate_numbers(task.summarize(metrics_by_name), task.summarize, source)
    uncounted = {name for name, value in metrics_by_name.items() if math.isnan(value) and name not in non_finite}
    empty = [name for name, value in metrics.items() if math.isnan(value) and (not non_finite or name in uncounted)]
    return EvaluationResult(metrics, tuple(empty))


def _copy_number(number: Number) -> Number:
    """Copy a number, because the next batch may overwrite its memory, as CUDA graphs do."""
    return number.clone() if isinstance(number, Tensor) else number


def _refuse_samples(name: str, pair: Any, sizes: Collection[tuple[int, int]], task: Task, source: Path) -> None:
    """Raise TaskFault if a metric has one element per sample in batches of several sizes: it was not summed."""
    if len(sizes) > 1 and all(elements == samples for elements, samples in sizes):
        detail = ", with as many elements as a batch has samples: sum over them"
        raise not_a_sum_fault(name, pair, task.evaluate, source, detail=detail)


def _sum_pairs(name: str, pairs: Sequence[tuple[Number, Number]], world: World) -> dict[str, list[float]]:
    """Return the sum and count over batches, and the smallest count, of each element of a metric.

    Sums of batches without items are ignored.
    """
    totals, counts = (_to_floats(column, world) for column in zip(*pairs, strict=True))
    names = {pair[0].shape: name_elements(name, pair[0].shape) for pair in pairs if is_vector(pair[0])}
    columns: dict[str, list[tuple[float, float]]] = {}
    for (total, _), *rows in zip(pairs, totals, counts, strict=True):
        elements = names[total.shape] if is_vector(total) else [name]
        for element, number, count in zip(elements, *rows, strict=True):
            columns.setdefault(element, []).append((number, count))
    return {
        element: [
            sum(number for number, count in column if count),
            sum(count for _, count in column),
            min(count for _, count in column),
        ]
        for element, column in columns.items()
    }


def _to_floats(numbers: Sequence[Number], world: World) -> list[list[float]]:
    """Copy the elements of each number, vector or matrix to the host in one transfer."""
    device_numbers = [
        number.to(world.device, world.widest).reshape(-1) for number in numbers if isinstance(number, Tensor)
    ]
    values = iter(torch.cat(device_numbers).tolist() if device_numbers else ())
    return [
        [*itertools.islice(values, number.numel())] if isinstance(number, Tensor) else [float(number)]
        for number in numbers
    ]


def split_batches(keys: Sequence[MicroBatchKey], size: int) -> Iterator[MicroBatchKey]:
    """Yield the batches; split those of more than `size` samples."""
    for key in keys:
        for first in range(0, len(key.indices), size):
            yield key._replace(
                indices=key.indices[first : first + size],
                last=key.last and first + size >= len(key.indices),
                first=key.first + first,
            )


@contextmanager
def eval_mode(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Put the model in eval mode; restore modes, buffers and global generators on exit."""
    with _modes_and_generators(model, device), restore_buffers(model.modules()):
        yield


@contextmanager
def _modes_and_generators(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Put the model in eval mode; restore modes and global generators on exit."""
    modes = [(module, module.training) for module in model.modules()]
    tensors, rest = random_state(device)
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:  # not model.train(): some modules may be kept in eval mode during training
            module.training = mode
        restore_random_state(tensors, rest, device)
