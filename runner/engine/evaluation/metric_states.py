"""Metrics that are not sums: computed once per evaluation, from states that are merged over batches and ranks."""

from __future__ import annotations

import copy
import itertools
import math
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from runner.base.batch import MicroBatch
from runner.base.errors import TaskFault
from runner.base.oom_errors import find_oom_cause
from runner.base.task import Gather, Task
from runner.base.text import error_line
from runner.distributed.agreement import gather_tensors
from runner.distributed.world import World
from runner.engine.contract.contract_checks import MAX_NUMBERS, describe_value, validate_loss, validate_numbers
from runner.engine.contract.error_diagnosis import is_library_file, locate_definition
from runner.engine.evaluation.undeclared_states import AttributeWatch, are_equal_numbers
from runner.engine.update.coupled import Embedding, check_rows, is_coupled, validate_embedding


class MetricStates:
    """The metrics of one evaluation that `Task.metrics` declares, and the loss of a task with `embed` and `couple`.

    samples_per_loss  number of samples over which a coupled loss is computed; 0: all
    forward           returns the context of a forward pass, such as autocast, in which a coupled loss is computed
    """

    def __init__(
        self,
        task: Task,
        split: str,
        world: World,
        source: Path,
        samples_per_loss: int = 0,
        forward: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.task, self.split, self.world, self.source = task, split, world, source
        self.samples_per_loss, self.forward = samples_per_loss, forward
        self.is_coupled = type(task).evaluate is Task.evaluate and is_coupled(task, task.phase)
        self.states: dict[str, _State] = {}
        self.nonfinite: set[str] = set()  # metrics of the last results whose sum is not finite

    def begin(self) -> None:
        """Start from empty states."""
        declared: Any = self.task.metrics(self.split)
        if not isinstance(declared, Mapping):
            raise TaskFault(
                f"metrics() must return a mapping of names to metrics, but returned {describe_value(declared)}",
                where=locate_definition(self.task.metrics, self.source),
                fix='return {"auroc": runner.Gather(auroc)}',
            )
        self.states = {name: self._make_state(name, metric) for name, metric in declared.items()}
        if self.is_coupled:
            self.states["loss"] = _CoupledState(self.task, self.source, self.samples_per_loss, self.forward)

    def evaluate_batch(self, model: nn.Module, micro: MicroBatch) -> Mapping[str, Any]:
        """Evaluate a batch; return the sums, and add the other metrics to their states."""
        if self.is_coupled:
            embedding = validate_embedding(self.task.embed(model, micro.batch), self.task.embed, self.source)
            check_rows(embedding, micro.samples, self.task.embed, self.source)
            returned: Any = {"loss": embedding.structure}
        else:
            returned = self.task.evaluate(model, micro.batch)
        if not self.states or not isinstance(returned, Mapping):
            return returned  # type: ignore[no-any-return]
        missing = [name for name in self.states if name not in returned]
        if missing:
            raise TaskFault(
                f"metrics() declares {', '.join(missing)}, but evaluate() returns only {', '.join(map(str, returned))}",
                where=locate_definition(self.task.evaluate, self.source),
                fix=f'also return "{missing[0]}": (scores, labels), the arguments of the update method of the metric',
            )
        for name, state in self.states.items() if micro.is_counted else ():
            assert micro.samples is not None, "an evaluation reads known samples"
            state.add(returned[name], min(micro.samples.places))
        return {name: value for name, value in returned.items() if name not in self.states}

    def find_faults(self, whole: Mapping[str, Any], half: Mapping[str, Any]) -> Iterator[TaskFault]:
        """Yield an error for each metric that does not accept what `evaluate` returned, or cannot be merged.

        whole, half  results of `evaluate` for a batch, and for half of it
        """
        for name in self.states.keys() & whole.keys():
            state = self.states[name]
            try:
                state.add(whole[name], 0)
                if isinstance(state, _TorchMetricState):
                    state.check_attributes([half.get(name), whole[name]])
            except TaskFault as fault:
                yield fault

    def results(self) -> dict[str, float]:
        """Return name -> value over all ranks, or NaN if there are no samples. A collective."""
        with torch.no_grad():
            results: dict[str, float] = {}
            for state in self.states.values():
                values = state.result(self.world)
                if duplicates := sorted(values.keys() & results.keys()):
                    what = f"two metrics have the name {duplicates[0]}"
                    raise TaskFault(
                        what, where=locate_definition(self.task.metrics, self.source), fix="rename one of them"
                    )
                results |= values
        coupled = self.states.get("loss") if self.is_coupled else None
        self.nonfinite = {"loss"} if isinstance(coupled, _CoupledState) and coupled.is_nonfinite else set()
        return {name: float(value) for name, value in self.world.broadcast(results).items()}

    def _make_state(self, name: str, metric: Any) -> _State:
        if isinstance(metric, Gather):
            return _GatherState(name, metric.compute, self.task.evaluate, self.source)
        if isinstance(metric, nn.Module) and all(hasattr(metric, verb) for verb in ("update", "compute", "reset")):
            return _TorchMetricState(name, metric, self.source, self.world)
        raise TaskFault(
            f"metrics() must return torchmetrics.Metric or runner.Gather, but {name} is {describe_value(metric)}",
            where=locate_definition(self.task.metrics, self.source),
            fix=(
                f'create an object: {{"{name}": {metric.__name__}(...)}}'
                if isinstance(metric, type)
                else f'return {{"{name}": runner.Gather(lambda scores, labels: ...)}}'
            ),
        )


class _Rows:
    """Outputs of all batches, with one row per sample, and the position of the first sample of each batch."""

    def __init__(self, source: Path) -> None:
        self.source = source
        self.blocks: list[tuple[int, Embedding]] = []

    def add(self, answer: Any, first: int, method: Callable[..., Any], name: str = "embed()") -> None:
        rows = validate_embedding(answer, method, self.source, name=name)
        self.blocks.append((first, rows._replace(tensors=tuple(tensor.detach().clone() for tensor in rows.tensors))))

    def gather(self, world: World) -> list[tuple[int, Embedding]]:
        """Return (position of the first sample, rows) of the batches of all ranks, in the order of the samples."""
        columns = list(zip(*(block.tensors for _, block in self.blocks), strict=True))
        kind = self.blocks[0][1].kind if self.blocks else None
        sizes = [[first, [len(tensor) for tensor in block.tensors]] for first, block in self.blocks]
        gathered = world.gather([kind, sizes])
        blocks: list[tuple[int, Embedding]] = []
        for (kind, sizes), rows in zip(gathered, gather_tensors(list(map(torch.cat, columns)), world), strict=True):
            parts = [iter(torch.split(column, [counts[k] for _, counts in sizes])) for k, column in enumerate(rows)]
            blocks += [
                (first, Embedding(tuple(map(next, parts)), kind if isinstance(kind, str) else tuple(kind)))
                for first, _ in sizes
            ]
        return sorted(blocks, key=lambda block: block[0])


def _concatenate(blocks: Iterable[tuple[int, Embedding]]) -> Embedding:
    embeddings = [block for _, block in blocks]
    columns = zip(*(embedding.tensors for embedding in embeddings), strict=True)
    return Embedding(tuple(torch.cat(column) for column in columns), embeddings[0].kind)


class _GatherState:
    """Rows of all samples, from which a function computes the metric."""

    def __init__(self, name: str, compute: Callable[..., Any], evaluate: Callable[..., Any], source: Path) -> None:
        self.name, self.compute, self.evaluate, self.source = name, compute, evaluate, source
        self.rows = _Rows(source)

    def add(self, contribution: Any, first: int) -> None:
        self.rows.add(contribution, first, self.evaluate, f"{self.name!r} of evaluate()")

    def result(self, world: World) -> Mapping[str, float]:
        blocks = self.rows.gather(world)
        if not blocks:
            return {self.name: math.nan}
        return _name_values(
            self.name, _call_compute(self.compute, _concatenate(blocks).structure), self.compute, self.source
        )


class _CoupledState:
    """The loss of a task with `embed` and `couple`, over groups of `size` samples; 0: one group."""

    def __init__(self, task: Task, source: Path, size: int, forward: Callable[[], AbstractContextManager[Any]]) -> None:
        self.task, self.source, self.size, self.forward = task, source, size, forward
        self.rows = _Rows(source)
        self.is_nonfinite = False

    def add(self, contribution: Any, first: int) -> None:
        self.rows.add(contribution, first, self.task.embed)

    def result(self, world: World) -> Mapping[str, float]:
        groups: dict[int, list[tuple[int, Embedding]]] = {}
        for first, block in self.rows.gather(world):
            groups.setdefault(first // self.size if self.size else 0, []).append((first, block))
        total = items = 0.0
        for blocks in groups.values():
            with self.forward():
                answer = self.task.couple(_concatenate(blocks).structure)
            loss, count = validate_loss(answer, self.task.couple, self.source, sync=True, name="couple")
            total, items = total + float(loss), items + float(count)
        self.is_nonfinite = items > 0 and not math.isfinite(total)
        return {"loss": total / items if items else math.nan}


class _TorchMetricState:
    """A torchmetrics metric or collection: each rank updates its own copy, and `result` merges their states."""

    def __init__(self, name: str, metric: Any, source: Path, world: World) -> None:
        self.name, self.source, self.world = name, source, world
        # A copy, because the task may reuse the metric, and `reset` does not clear all attributes.
        self.metric = metric = _copy_metric(metric).to(world.device)
        metric.reset()
        # Wrappers and collections keep their states in submodules.
        self.parts = [module for module in metric.modules() if hasattr(module, "_reductions")]
        for part in self.parts:  # else `compute` would synchronize, and wait for ranks without samples
            part.distributed_available_fn = lambda: False
        self.is_updated = False
        self.watch = AttributeWatch(metric, self._compute) if world.world_size > 1 else None
        self._last: Any = None  # what `evaluate` returned for the last batch

    def add(self, contribution: Any, first: int) -> None:
        self._update(self.metric, contribution)
        if self.world.world_size > 1:
            self._last = contribution
            if not self.is_updated:
                self._check_states()
        self.is_updated = True

    def _update(self, metric: Any, contribution: Any) -> None:
        kwargs = contribution if isinstance(contribution, Mapping) else {}
        args = () if kwargs else contribution if isinstance(contribution, (tuple, list)) else (contribution,)
        try:
            metric.update(*args, **kwargs)
        except Exception as error:
            if find_oom_cause(error) is not None:
                raise
            raise TaskFault(
                f"metric {self.name} does not accept what evaluate() returned, {describe_value(contribution)}:"
                f" {error_line(error)}",
                where=str(self.source),
                fix=f'return {{"{self.name}": (predictions, targets)}}, the arguments of its update method',
            ) from error

    def result(self, world: World) -> Mapping[str, float]:
        if not any(world.gather(self.is_updated)):
            return {self.name: math.nan}
        unequal: list[str] = []
        if world.world_size > 1:
            changed = world.gather(self.watch.changed() if self.watch is not None and self.is_updated else None)
            updated = [attributes for attributes in changed if attributes is not None]
            names = dict.fromkeys(name for attributes in updated for name in attributes)
            unequal = [name for name in names if len({attributes.get(name) for attributes in updated}) > 1]
            undeclared = world.gather(self._find_undeclared(unequal, self._last))
            self._refuse_attributes(sorted({name for names in undeclared for name in names}))
            self._merge(world)
        numbers = self._compute(self.metric)
        if unequal:
            results = [each for each in world.gather(numbers if self.is_updated else None) if each is not None]
            if not all(are_equal_numbers(results[0], each) for each in results):
                self._refuse_attributes(unequal)
        return numbers

    def _compute(self, metric: Any) -> dict[str, float]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torchmetrics warns if a merged metric was never updated
            result = metric.compute()
        numbers = dict(itertools.islice(_flatten(self.name, result), MAX_NUMBERS + 1))
        if len(numbers) > MAX_NUMBERS:
            raise TaskFault(
                f"metric {self.name} computes more than {MAX_NUMBERS:,} numbers",
                where=str(self.source),
                fix="reduce them in a subclass of the metric, or log an image of them in a hook",
            )
        return validate_numbers(numbers, metric.compute, self.source)

    def _merge(self, world: World) -> None:
        """Merge the states of all ranks with samples, as torchmetrics does when it synchronizes.

        `merge_state` of torchmetrics supports few metrics, and its synchronization blocks if lists differ in length.
        """
        if isinstance(self.metric, nn.ModuleDict):
            list(self.metric.items())  # copies the states that the members of a collection share
        places = [(part, name, state) for part in self.parts for name, state in part.metric_state.items()]
        tensors: list[Tensor] = []
        for *_, state in places:
            tensors += state if isinstance(state, list) else [state]
        gathered = world.gather(
            [self.is_updated, [len(state) if isinstance(state, list) else -1 for *_, state in places]]
        )
        rank_states = [
            [next(parts) if length < 0 else [next(parts) for _ in range(length)] for length in lengths]
            for (is_updated, lengths), parts in zip(gathered, map(iter, gather_tensors(tensors, world)), strict=True)
            if is_updated
        ]
        for (part, name, _), states in zip(places, zip(*rank_states, strict=True), strict=True):
            setattr(part, name, _reduce_states(states, part._reductions[name]))  # private: torchmetrics 1.5 to 1.9

    def _check_states(self) -> None:
        for part in self.parts:
            for name, state in part.metric_state.items():
                if not all(isinstance(item, Tensor) for item in (state if isinstance(state, list) else [state])):
                    raise TaskFault(
                        f"the states of metric {self.name} cannot be merged over ranks: {name} contains objects"
                        " that are not tensors",
                        where=str(self.source),
                        fix=_MERGEABLE,
                    )
        unreduced = [
            name
            for part in self.parts
            for name, state in part.metric_state.items()
            if isinstance(state, Tensor) and part._reductions[name] is None
        ]
        if unreduced and self._changes_names_when_merged():
            raise TaskFault(
                f"the states of metric {self.name} cannot be merged over ranks: it would compute one value per rank,"
                f" because {', '.join(unreduced)} has no dist_reduce_fx",
                where=str(self.source),
                fix=f'self.add_state("{unreduced[0]}", ..., dist_reduce_fx="sum"), or use runner.Gather',
            )

    def _changes_names_when_merged(self) -> bool:
        """Return whether the metric names its numbers differently if the states of two ranks are merged.

        Merges this rank's states with themselves, so that ranks need not communicate.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                alone, merged = copy.deepcopy(self.metric), copy.deepcopy(self.metric)
                if isinstance(merged, nn.ModuleDict):
                    list(merged.items())  # as in _merge
                for part in merged.modules():
                    for name, state in part.metric_state.items() if hasattr(part, "_reductions") else ():
                        setattr(part, name, _reduce_states([state, state], part._reductions[name]))
                results = [each.compute() for each in (alone, merged)]
            except Exception:  # some metrics cannot be copied, or computed from few samples
                return False
        names = [dict(itertools.islice(_flatten(self.name, each), MAX_NUMBERS)).keys() for each in results]
        return names[0] != names[1]

    def _find_undeclared(self, unequal: Collection[str], contribution: Any) -> list[str]:
        """Return attributes on which the result of this rank depends and that are not merged.

        unequal       attributes that differ between ranks
        contribution  value with which copies of the metric are updated once more
        """
        if self.watch is None or not self.is_updated:
            return []
        return self.watch.find_undeclared(unequal, lambda metric: self._update(metric, contribution))

    def check_attributes(self, contributions: Iterable[Any]) -> None:
        """Raise TaskFault if the result depends on an undeclared attribute, tested with the first accepted value."""
        names: list[str] = []
        for contribution in contributions:
            with suppress(TaskFault):
                names = self._find_undeclared((), contribution)
                break
        self._refuse_attributes(names)

    def _refuse_attributes(self, names: Sequence[str]) -> None:
        if names:
            raise TaskFault(
                f"metric {self.name} cannot be merged over ranks: update() changes the attribute {names[0]}, which is"
                " not one of its states",
                where=str(self.source),
                fix=f"{self._suggest_declaration(names[0])}{_MERGEABLE}",
            )

    def _suggest_declaration(self, attribute: str) -> str:
        """Return the advice to declare an attribute as a state, or "" if a library defines its class."""
        path, _, name = attribute.rpartition(".")
        owner = type(self.metric.get_submodule(path))
        file = getattr(sys.modules.get(owner.__module__), "__file__", None) or ""
        declaration = f'declare it with add_state("{name}", ..., dist_reduce_fx="sum"), or '
        return "" if is_library_file(file, self.source) else declaration


def _copy_metric(metric: Any) -> Any:
    """Return a copy that shares parameters, such as those of a network, and attributes that cannot be copied."""

    def shared() -> dict[int, Any]:
        return {id(weight): weight for weight in metric.parameters()}

    with suppress(Exception):
        return copy.deepcopy(metric, shared())
    result = copy.copy(metric)  # an attribute cannot be copied, such as a lock or an open file
    for name, value in list(vars(result).items()):
        if name == "_modules":
            vars(result)[name] = {child: part if part is None else _copy_metric(part) for child, part in value.items()}
        else:
            with suppress(Exception):
                vars(result)[name] = copy.deepcopy(value, shared())
    return result


# The state of a metric on this rank: `add` receives what `evaluate` returned for a batch, and the position of its first
# sample; `result` returns name -> value over all ranks, or NaN if there are no samples, and is a collective.
_State = _GatherState | _CoupledState | _TorchMetricState
_MERGEABLE = "use runner.Gather, or parallelism=single"


def _reduce_states(states: Sequence[Any], reduction: Callable[[Tensor], Any] | None) -> Any:
    """Merge the states of several ranks; lists are concatenated."""
    if isinstance(states[0], list):
        return [element for state in states for element in state]
    if len(states) == 1:
        return states[0]
    stacked = torch.stack(list(states))
    return stacked if reduction is None else reduction(stacked)


def _call_compute(compute: Callable[..., Any], rows: Any) -> Any:
    if isinstance(rows, Mapping):
        return compute(**rows)
    return compute(*rows) if isinstance(rows, tuple) else compute(rows)


def _flatten(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the numbers of mappings, vectors and matrices with their names: `name.key`, `name.0`, `name.0.1`."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flatten(f"{name}.{key}", item)
    elif isinstance(value, Tensor) and value.dim():
        for index in itertools.product(*map(range, value.shape)):
            yield ".".join(map(str, (name, *index))), value[index]
    else:
        yield name, value


def _name_values(name: str, value: Any, method: Callable[..., Any], source: Path) -> dict[str, float]:
    """Return name -> number, with one entry per key if the value is a mapping."""
    named = {f"{name}.{key}": item for key, item in value.items()} if isinstance(value, Mapping) else {name: value}
    fix = 'return one number, or a mapping of names to numbers, such as {"cat": ap[0], "dog": ap[1]}'
    return validate_numbers(named, method, source, fix=fix)


def split_positions(num_samples: int, batch: int, group: int) -> Sequence[range]:
    """Divide positions into batches, none of which crosses a multiple of `group`; 0: one group."""
    group = group or max(1, num_samples)
    return [
        range(first, min(first + batch, start + group, num_samples))
        for start in range(0, num_samples, group)
        for first in range(start, min(start + group, num_samples), batch)
    ]
