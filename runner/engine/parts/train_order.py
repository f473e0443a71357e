"""Create the order in which a phase reads training samples, from the sampler and the weights or lengths of samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from runner.axes.sampler import SAMPLERS, TrainingSamples, shuffle
from runner.base.errors import ConfigError, DataError, Problem, TaskFault
from runner.base.order import KEYED, Order, Sampler
from runner.base.task import Task
from runner.base.text import error_line
from runner.config.chosen_option import make_chosen
from runner.durable.checkpoint import LoadedCheckpoint
from runner.engine.contract.error_diagnosis import locate_definition
from runner.engine.contract.task_loading import task_errors
from runner.engine.parts.assemble import Parts
from runner.engine.sources.stream_reader import StreamFetcher, StreamSamples
from runner.loading.fetcher import Fetcher
from runner.loading.stream_order import StreamSampler
from runner.plan.run_plan import PhasePlan, Plan


def make_order(parts: Parts, phase: PhasePlan, fetcher: Fetcher, start: LoadedCheckpoint | None = None) -> Order:
    """Return the order of the training samples in a phase.

    A phase of kind fit ignores the sampler: it reads each sample once, shuffled.

    start  checkpoint from which the phase resumes, so that its order is kept

    Raises DataError if there are too few samples for an update, TaskFault if the task lacks the weights or lengths that
    the sampler needs.
    """
    plan, batch = parts.plan, phase.batch
    is_batch_split = parts.world.world_size > 1 and len(batch.shares) > 1
    is_trained = phase.kind == "train"
    choice = plan.choices["sampler"]
    samples_info = TrainingSamples(
        num_samples=len(fetcher),
        global_batch_size=batch.global_batch_size,
        drop_last=is_trained and bool(plan.choices["dataloader"].options["drop_last"]),
        weights=lambda: _read_from_task(parts, fetcher, parts.task.sample_weights).astype(np.float64),
        lengths=lambda: _sample_lengths(parts, fetcher),
        sizes=lambda: _dataset_sizes(parts, fetcher),
        uses_array_order=start is not None and (start.state.get("data") or {}).get("train", {}).get("sampler") != KEYED,
    )
    if isinstance(fetcher, StreamFetcher):
        fetcher.is_lockstep = parts.parallel.is_lockstep
        sampler = _make_stream_sampler(fetcher.dataset, plan, phase, drop_last=samples_info.drop_last)
    else:
        sampler = make_chosen(SAMPLERS, choice, samples_info) if is_trained else shuffle(samples_info)
    if not isinstance(sampler, Sampler):
        raise TaskFault(
            f"sampler={choice.name} must return a sampler, but returned {type(sampler).__name__}",
            fix="return samples.in_order(f) with f(seed, epoch) -> indices",
        )
    order = Order(
        num_samples=sampler.num_samples,
        global_batch_size=batch.global_batch_size,
        micro_batch_size=batch.max_micro_batch_size,
        seed=plan.settings.seed,
        drop_last=samples_info.drop_last,
        shares=batch.shares if is_batch_split else (),
        rank=parts.parallel.batch_rank if is_batch_split else 0,
        is_lockstep=parts.parallel.is_lockstep,
        sampler=sampler,
    )
    if order.updates_per_epoch == 0:
        raise DataError(
            f"{order.num_samples} training samples are too few for an update of {batch.global_batch_size}",
            where="dataloader.drop_last=true",
            fix="use dataloader.drop_last=false, or a smaller global_batch_size",
        )
    return order


def _make_stream_sampler(samples: StreamSamples, plan: Plan, phase: PhasePlan, *, drop_last: bool) -> Sampler:
    """Return the sampler of a stream. Raises ConfigError with all settings that a stream does not support."""
    data, num_shards = plan.settings.data, samples.source.num_shards
    shards_per_update = data.shards_per_update or num_shards
    problems = []
    if not plan.choices["sampler"].uses("shuffle"):
        what = "is not supported for a stream, which has its own order"
        problems.append(
            Problem(what, f"sampler={plan.choices['sampler'].name}", "use the default sampler=shuffle, or a dataset")
        )
    if num_shards % shards_per_update:
        what = f"must divide the number of shards, {num_shards}"
        problems.append(Problem(what, f"data.shards_per_update={shards_per_update}", _list_divisors(num_shards)))
    if plan.choices["parallelism"].options.get("shares") == "speed":
        what = "is not supported for a stream: after a change of shares, ranks would read it again from its beginning"
        problems.append(Problem(what, "parallelism.shares=speed", "use parallelism.shares=memory, or numbers"))
    if samples.lengths is None and (phase.updates is None or phase.kind == "fit"):
        what = f"an epoch of phase {phase.name} needs the length of the stream, but it has none"
        where = "" if phase.kind == "fit" else f"epochs={phase.epochs:g}"
        fix = (
            "use updates=N or data.train_samples=N, or return an object from stream() whose len() is the length of the"
            " shard"
        )
        problems.append(Problem(what, where, fix))
    if problems:
        raise ConfigError(problems)
    if samples.lengths is not None and not sum(samples.lengths):
        raise DataError("the stream has a length of 0", where="stream", fix="check the files that it reads")
    return StreamSampler(
        samples.lengths, num_shards, shards_per_update, phase.batch.global_batch_size, drop_last=drop_last
    )


def describe_stream(samples: StreamSamples, plan: Plan) -> str:
    """Return a line about the shards of a stream and the processes that read them."""
    num_shards, num_readers = samples.source.num_shards, plan.world_size * max(1, plan.num_workers)
    length = "unknown length" if samples.lengths is None else f"{sum(samples.lengths):,} samples"
    line = f"stream of {length} in {num_shards} {'shard' if num_shards == 1 else 'shards'}"
    if num_readers <= num_shards:
        return line
    return f"{line}; {num_readers} processes read them, and each skips the samples of the others: see docs/streams.md"


def _list_divisors(number: int) -> str:
    divisors = [divisor for divisor in range(1, number + 1) if number % divisor == 0]
    return f"use {', '.join(map(str, divisors[:-1]))} or {divisors[-1]}"


def _sample_lengths(parts: Parts, fetcher: Fetcher) -> Any:
    values = _read_from_task(parts, fetcher, parts.task.sample_lengths)
    if not np.issubdtype(values.dtype, np.integer):
        raise _fault(parts, parts.task.sample_lengths, f"must return integers, but returned {values.dtype}")
    return values.astype(np.int64)


def _read_from_task(parts: Parts, fetcher: Fetcher, method: Callable[[Any], Any]) -> Any:
    """Return the numbers that a method of the task returns for the samples in use, with shape (num_samples,)."""
    if getattr(method, "__func__", None) in (Task.sample_weights, Task.sample_lengths):
        raise _fault(parts, method, "is not defined")
    with task_errors(parts.source, f"{method.__name__}()"):
        returned = method(fetcher.dataset)
    try:
        values = np.asarray(returned.detach().cpu() if isinstance(returned, Tensor) else returned)
    except (TypeError, ValueError, RuntimeError) as error:
        raise _fault(parts, method, f"must return numbers, but {error_line(error)}") from error
    if values.shape != (len(fetcher.dataset),) or not np.issubdtype(values.dtype, np.number):
        what = f"must return one number for each of the {len(fetcher.dataset):,} samples, but returned"
        raise _fault(parts, method, f"{what} an array of {values.dtype} with shape {values.shape}")
    return values[: len(fetcher)]


def _dataset_sizes(parts: Parts, fetcher: Fetcher) -> Sequence[int]:
    ends = getattr(fetcher.dataset, "cumulative_sizes", None)
    if ends is None:
        raise TaskFault(
            f"sampler=mixture needs several datasets, but dataset returned a {type(fetcher.dataset).__name__}",
            where=locate_definition(parts.task.dataset, parts.source),
            fix="return torch.utils.data.ConcatDataset([one, other])",
        )
    if len(fetcher) < ends[-1]:
        raise DataError(
            "data.train_samples selects the first samples, so datasets of the mixture would be missing",
            where=f"data.train_samples={len(fetcher)}",
            fix="use sampler.num_samples for a shorter epoch, or shorten the datasets in the task",
        )
    return [int(end - start) for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def _fault(parts: Parts, method: Callable[[Any], Any], what: str) -> TaskFault:
    name = method.__name__
    examples = {"sample_weights": "[1.0 / count[y] for y in dataset.labels]", "sample_lengths": "dataset.lengths"}
    return TaskFault(
        f"sampler={parts.plan.choices['sampler'].name}: {name}(dataset) {what}",
        where=locate_definition(method, parts.source),
        fix=f"def {name}(self, dataset): return {examples[name]}",
    )
