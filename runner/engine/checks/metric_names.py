"""Find the names of the metrics before the first update, to warn about settings that name an unknown metric."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import NamedTuple

from runner.base import noise
from runner.base.batch import BatchSamples
from runner.base.task import Task
from runner.distributed.matched_calls import matched_calls
from runner.engine.checks.additivity_check import BatchReader, preserve_state
from runner.engine.contract.contract_checks import expand_metrics, validate_metrics
from runner.engine.evaluation.metric_states import MetricStates
from runner.engine.parts.assemble import Parts
from runner.loading.loaders import Loader


class MetricNames(NamedTuple):
    """Names of metrics.

    known     names returned for a batch, or declared by `Task.metrics`
    prefixes  prefixes of the names of declared metrics that may have several values
    """

    known: Sequence[str]
    prefixes: Sequence[str] = ()

    def may_have(self, name: str) -> bool:
        """Return whether an evaluation may return a metric of this name."""
        return name in self.known or name.startswith(tuple(self.prefixes))


def find_metric_names(parts: Parts, loader: Loader, indices: Sequence[int]) -> MetricNames | None:
    """Evaluate a batch of held-out samples; return the names of the metrics, or None if they are not known yet.

    Errors are ignored, because the first evaluation reports them. Every rank must call this function, with the same
    samples.
    """
    names: MetricNames | None = None
    parallel = parts.parallel
    # As in an update, the ranks call the model together unless they divide the batch.
    calls = nullcontext() if parallel.splits_batch else matched_calls(parts.model, parallel.copy_ranks)
    with preserve_state(parts), suppress(Exception), calls:
        names = _evaluate_batch(parts, loader, indices)
    found = parts.world.broadcast(None if names is None else [*map(list, names)])
    return None if found is None else MetricNames(*([f"val/{name}" for name in column] for column in found))


def _evaluate_batch(parts: Parts, loader: Loader, indices: Sequence[int]) -> MetricNames | None:
    task, seed = parts.task, parts.plan.settings.seed
    micro = BatchReader(loader, parts.prefetch)(indices, BatchSamples(seed, 0, indices, range(len(indices))))
    states = MetricStates(task, "val", parts.world, parts.source, forward=parts.precision.forward)
    states.begin()
    noise.start_pass(micro.samples and micro.samples._replace(epoch=noise.EVALUATION))
    with parts.precision.forward():
        sums = expand_metrics(validate_metrics(states.evaluate_batch(parts.model, micro), task.evaluate, parts.source))
    if type(task).summarize is Task.summarize:
        return MetricNames([*sums, *states.states], [f"{name}." for name in states.states])
    if states.states:  # `summarize` needs their values, which depend on all samples
        return None
    values: Mapping[str, float] = {name: float(total) / (float(count) or 1.0) for name, (total, count) in sums.items()}
    return MetricNames([*task.summarize(values)])
