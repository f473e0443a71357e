"""The order in which a phase reads the training samples, and what the sampler needs to know of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import numpy as np
from torch import Tensor

from runner.axes.dataloader import Fetcher
from runner.axes.sampler import SAMPLERS, TrainingSamples, shuffle
from runner.base.errors import ConfigError, DataError, Problem, TaskFault
from runner.base.order import KEYED, Order, Sampler
from runner.base.stream_order import StreamSampler
from runner.base.task import Task
from runner.base.text import error_line
from runner.config.option_table import make
from runner.durable.checkpoint import Loaded
from runner.engine.assemble import Parts
from runner.engine.error_diagnosis import locate_definition
from runner.engine.stream_reader import StreamFetcher, StreamSamples
from runner.engine.task_loading import task_errors
from runner.plan.run_plan import PhasePlan, Plan


def order_of(parts: Parts, phase: PhasePlan, fetcher: Fetcher, start: Loaded | None = None) -> Order:
    """Return the order of the training samples in a phase. A fit reads each sample once, whatever the sampler.

    start  checkpoint from which the phase resumes: its order is kept

    Raises DataError if they are too few for an update, TaskFault if the task does not describe them as the sampler
    needs.
    """
    plan, batch = parts.plan, phase.batch
    is_dealt = parts.parallel.splits_batch and parts.world.world_size > 1
    is_trained = phase.kind == "train"
    choice = plan.choices["sampler"]
    facts = TrainingSamples(
        num_samples=len(fetcher),
        global_batch_size=batch.global_batch_size,
        drop_last=is_trained and bool(plan.choices["dataloader"].options["drop_last"]),
        weights=lambda: _of_task(parts, fetcher, parts.task.sample_weights).astype(np.float64),
        lengths=lambda: _lengths(parts, fetcher),
        sizes=lambda: _sizes(parts, fetcher),
        is_array=start is not None and (start.state.get("data") or {}).get("train", {}).get("sampler") != KEYED,
    )
    if isinstance(fetcher, StreamFetcher):
        fetcher.is_in_step = parts.parallel.in_step
        sampler = _of_stream(fetcher.dataset, plan, phase, drop_last=facts.drop_last)
    else:
        sampler = make(SAMPLERS, choice.function, facts, **choice.options) if is_trained else shuffle(facts)
    if not isinstance(sampler, Sampler):
        raise TaskFault(
            f"sampler={choice.name} must return a sampler, but returned {type(sampler).__name__}",
            fix="return samples.in_order(function of seed and epoch)",
        )
    order = Order(
        num_samples=sampler.num_samples,
        global_batch_size=batch.global_batch_size,
        micro_batch_size=batch.max_micro_batch_size,
        seed=plan.settings.seed,
        drop_last=facts.drop_last,
        shares=batch.shares if is_dealt else (),
        rank=parts.world.rank if is_dealt else 0,
        in_step=parts.parallel.in_step,
        sampler=sampler,
    )
    if order.updates_per_epoch == 0:
        raise DataError(
            f"{order.num_samples} training samples make no whole update of {batch.global_batch_size}",
            where="dataloader.drop_last=true",
            fix="use dataloader.drop_last=false, or a smaller global_batch_size",
        )
    return order


def _of_stream(samples: StreamSamples, plan: Plan, phase: PhasePlan, *, drop_last: bool) -> Sampler:
    """Return the order of a stream. Raises ConfigError with all settings that it excludes."""
    data, num_shards = plan.settings.data, samples.source.num_shards
    together = data.shards_per_update or num_shards
    problems = []
    if plan.choices["sampler"].name != "shuffle":
        what = "a stream is read in its own order"
        problems.append(Problem(what, f"sampler={plan.choices['sampler'].name}", "use sampler=shuffle, or a data set"))
    if num_shards % together:
        what = f"must divide the number of shards, {num_shards}"
        problems.append(Problem(what, f"data.shards_per_update={together}", _divisors(num_shards)))
    if plan.choices["parallelism"].options.get("shares") == "speed":
        what = "shares that change would make ranks read the stream from its beginning"
        problems.append(Problem(what, "parallelism.shares=speed", "use parallelism.shares=memory, or numbers"))
    if samples.lengths is None and (phase.updates is None or phase.kind == "fit"):
        what = f"an epoch of phase {phase.name} needs the length of the stream, which has none"
        where = "" if phase.kind == "fit" else f"epochs={phase.epochs:g}"
        fix = "use updates=N, data.train_samples=N, or return from stream what has len(): samples of the shard"
        problems.append(Problem(what, where, fix))
    if problems:
        raise ConfigError(problems)
    if samples.lengths is not None and not sum(samples.lengths):
        raise DataError("the stream has a length of 0", where="stream", fix="check the files that it reads")
    return StreamSampler(samples.lengths, num_shards, together, phase.batch.global_batch_size, drop_last=drop_last)


def reading_of(order: Order, samples: StreamSamples, plan: Plan) -> list[str]:
    """Return lines that tell how the stream is divided, and how many processes read the same shards."""
    num_shards, workers = samples.source.num_shards, max(1, plan.num_workers)
    ranks = [dataclasses.replace(order, rank=rank) for rank in range(max(1, len(order.shares)))]
    copies = plan.world_size // len(ranks)  # stages of a pipeline read the same
    readers: set[tuple[int, int, int]] = set()
    for number, rank in enumerate(ranks):
        micros = chain.from_iterable(
            rank.micro_batches(update) for update in range(min(_LOOKED_AT, order.updates_per_epoch))
        )
        for count, micro in enumerate(micros):
            readers |= {(number, count % workers, code % num_shards) for code in micro.indices}
    times = copies * len(readers) / max(1, len({shard for _, _, shard in readers}))
    length = "unknown length" if samples.lengths is None else f"{sum(samples.lengths):,} samples"
    lines = [f"stream of {length} in {num_shards} {'shard' if num_shards == 1 else 'shards'}"]
    if times > 1:
        lines[0] += f"; each is read by {times:.2g} processes, which skip what others use"
        lines.append("docs/streams.md explains how data.shards and data.shards_per_update divide the reading")
    return lines


def _divisors(number: int) -> str:
    found = [each for each in range(1, number + 1) if number % each == 0]
    return f"use {', '.join(map(str, found[:-1]))} or {found[-1]}"


def _lengths(parts: Parts, fetcher: Fetcher) -> Any:
    found = _of_task(parts, fetcher, parts.task.sample_lengths)
    if not np.issubdtype(found.dtype, np.integer):
        raise _fault(parts, parts.task.sample_lengths, f"must return whole numbers, but returned {found.dtype}")
    return found.astype(np.int64)


def _of_task(parts: Parts, fetcher: Fetcher, method: Callable[[Any], Any]) -> Any:
    """Return the numbers that a method of the task returns for the samples that are used, (num_samples,)."""
    if getattr(method, "__func__", None) in (Task.sample_weights, Task.sample_lengths):
        raise _fault(parts, method, "is not defined")
    with task_errors(parts.source, method.__name__):
        returned = method(fetcher.dataset)
    try:
        found = np.asarray(returned.detach().cpu() if isinstance(returned, Tensor) else returned)
    except (TypeError, ValueError, RuntimeError) as error:
        raise _fault(parts, method, f"must return numbers, but {error_line(error)}") from error
    if found.shape != (len(fetcher.dataset),) or not np.issubdtype(found.dtype, np.number):
        what = f"must return one number for each of the {len(fetcher.dataset):,} samples, but returned"
        raise _fault(parts, method, f"{what} an array of {found.dtype} with shape {found.shape}")
    return found[: len(fetcher)]


def _sizes(parts: Parts, fetcher: Fetcher) -> Sequence[int]:
    ends = getattr(fetcher.dataset, "cumulative_sizes", None)
    if ends is None:
        raise TaskFault(
            f"sampler=mixture needs several data sets, but dataset returned a {type(fetcher.dataset).__name__}",
            where=locate_definition(parts.task.dataset, parts.source),
            fix="return torch.utils.data.ConcatDataset([one, other])",
        )
    if len(fetcher) < ends[-1]:
        raise DataError(
            "data.train_samples takes the first samples, which would leave out data sets of the mixture",
            where=f"data.train_samples={len(fetcher)}",
            fix="use sampler.num_samples for a shorter epoch, or shorten the data sets in the task",
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


_LOOKED_AT = 64  # updates
