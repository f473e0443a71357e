"""Measure forward and backward time per module from events at module boundaries, without synchronizing.

A module's self time is the time in which it runs and none of its submodules does. In a backward pass, a node of the
graph belongs to the module that was running when the node was created. The sequence number of the node shows which
module that was, so the graph does not have to be changed.
"""

from __future__ import annotations

import statistics
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

FORWARD, BACKWARD = "forward", "backward"


class TimeOwner(NamedTuple):
    """Owner of a time span: the path of a module, "" for the model, or a part outside of the model in parentheses."""

    path: str
    direction: str = FORWARD


OUTSIDE, DATA, OPTIMIZER = TimeOwner("(loss and the rest)"), TimeOwner("(data)"), TimeOwner("(optimizer)")
_PROFILER = TimeOwner("(profiler)")  # walking the graph, and excluded spans; not reported
COMMUNICATION = TimeOwner("(communication)", BACKWARD)  # with other ranks, between and after backward nodes
NON_MODULES = (DATA.path, COMMUNICATION.path, OPTIMIZER.path, OUTSIDE.path)


@dataclass(frozen=True)
class TimeSpread:
    """Statistics of the seconds per update; `std` is the sample standard deviation, 0 for a single update."""

    mean: float
    std: float
    min: float
    median: float
    max: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> TimeSpread:
        """Return the statistics of at least one number."""
        std = statistics.stdev(seconds) if len(seconds) > 1 else 0.0
        return cls(statistics.fmean(seconds), std, min(seconds), statistics.median(seconds), max(seconds))


@dataclass(frozen=True)
class ModuleTime:
    """Seconds per update of a module, or of a part outside of the model.

    path      as in the names of its parameters; "" for the model itself
    kind      its class, with a note if it is compiled to one graph; "" outside of the model
    calls     average number of forward passes per update
    own       time in forward and backward, without submodules
    forward, backward, total  times including submodules
    """

    path: str
    kind: str
    calls: float
    own: TimeSpread
    forward: TimeSpread
    backward: TimeSpread
    total: TimeSpread


@dataclass
class _Update:
    """The events of an update in order, each with the owner of the time before it."""

    events: list[tuple[TimeOwner, Any]] = field(default_factory=list)
    calls: dict[str, int] = field(default_factory=dict)


class ModuleTimes:
    """Records events at module boundaries from `start` to `stop`; `update` ends an update, `table` returns the times.

    depth  modules nested deeper than this count toward their parent
    ranks  with several, the time between the nodes of a backward pass is communication, in a separate row
    clock  returns seconds; default: events of the device on a GPU, else time.perf_counter
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        *,
        depth: int,
        ranks: int = 1,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.model, self.depth, self.has_one_rank = model, depth, ranks == 1
        self._on_device = device.type == "cuda" and clock is None
        self._record_event: Callable[[], Any] = (
            partial(_record_event, device) if self._on_device else clock or time.perf_counter
        )
        self._hooks = ExitStack()
        self._updates: list[_Update] = []
        self._current = _Update()
        self._owner = OUTSIDE
        self._open_modules: list[TimeOwner] = []  # running modules, innermost last
        self._boundaries: list[tuple[int, TimeOwner]] = []  # sequence number of the first node, and its owner
        self.kinds: dict[str, str] = {}

    def start(self) -> None:
        """Register the hooks; the next update is measured."""
        for path, module, is_graph in _timed_modules(self.model, self.depth):
            self.kinds[path] = type(module).__name__ + (", one graph" if is_graph else "")
            if is_graph:
                self._hooks.callback(wrap_compiled_call(module, partial(self._call_graph, path)))
                continue
            enter = module.register_forward_pre_hook(partial(self._enter, path), prepend=True)
            leave = module.register_forward_hook(partial(self._leave, path), always_call=True)
            self._hooks.callback(enter.remove)
            self._hooks.callback(leave.remove)
        for register, owner in (
            (register_optimizer_step_pre_hook, OPTIMIZER),
            (register_optimizer_step_post_hook, OUTSIDE),
        ):
            self._hooks.callback(register(partial(self._optimizer, owner)).remove)
        self._begin_update()

    def stop(self) -> None:
        """Remove the hooks; an incomplete update does not count."""
        self._hooks.close()

    def update(self) -> None:
        """End an update."""
        self._lap(OUTSIDE)
        self._updates.append(self._current)
        self._begin_update()

    def fetch(self, batches: Iterator[Any]) -> Any:
        """Return the next batch; waiting for it counts as data time."""
        self._lap(DATA)
        batch = next(batches)
        self._lap(OUTSIDE)
        return batch

    @contextmanager
    def exclude(self) -> Iterator[None]:
        """Exclude the time inside the context."""
        owner = self._owner
        self._lap(_PROFILER)
        yield
        self._lap(owner)

    def table(self) -> list[ModuleTime]:
        """Return a row per module, parents first, then the parts outside of the model.

        On a device, the events must have completed: synchronize first.
        """
        own = [self._own_seconds(update) for update in self._updates]
        if not own:
            return []
        paths = [*self.kinds, *(path for path in NON_MODULES if not self.has_one_rank or path != COMMUNICATION.path)]
        calls = {path: sum(update.calls.get(path, 0) for update in self._updates) / len(own) for path in paths}

        def spread(path: str, *directions: str, inner: bool) -> TimeSpread:
            submodules = [module for module in self.kinds if is_inside(module, path)] if inner else []
            owners = [TimeOwner(module, direction) for module in (path, *submodules) for direction in directions]
            return TimeSpread.of([sum(update.get(owner, 0.0) for owner in owners) for update in own])

        return [
            ModuleTime(
                path, self.kinds.get(path, ""), calls[path],
                own=spread(path, FORWARD, BACKWARD, inner=False),
                forward=spread(path, FORWARD, inner=True), backward=spread(path, BACKWARD, inner=True),
                total=spread(path, FORWARD, BACKWARD, inner=True),
            )
            for path in paths
        ]  # fmt: skip

    def _begin_update(self) -> None:
        self._current = _Update()
        self._owner, self._open_modules = OUTSIDE, []
        self._current.events.append((_PROFILER, self._record_event()))

    def _lap(self, owner: TimeOwner) -> None:
        """End the span of the current owner; the time from now on belongs to `owner`."""
        self._current.events.append((self._owner, self._record_event()))
        self._owner = owner

    def _optimizer(self, owner: TimeOwner, *_: Any) -> None:
        self._lap(owner)

    def _enter(self, path: str, *_: Any) -> None:
        # Recomputation in a backward pass belongs to the backward node; evaluations are excluded.
        if not _is_backward() and self.model.training:
            if not self._open_modules:
                self._boundaries = []
            self._current.calls[path] = self._current.calls.get(path, 0) + 1
            self._open_modules.append(TimeOwner(path))
            self._begin_module(TimeOwner(path))

    def _leave(self, path: str, module: nn.Module, args: Any, output: Any) -> None:
        if _is_backward() or not self._open_modules or self._open_modules[-1].path != path:
            return
        self._open_modules.pop()
        if self._open_modules:
            self._begin_module(self._open_modules[-1])
            return
        self._lap(_PROFILER)
        self._hook_graph(output)
        self._lap(OUTSIDE)

    def _call_graph(self, path: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._enter(path)
        output = None
        try:
            output = call(*args, **kwargs)
        finally:
            self._leave(path, self.model, args, output)
        return output

    def _begin_module(self, owner: TimeOwner) -> None:
        self._boundaries.append((torch._C._autograd._get_sequence_nr(), owner))
        self._lap(owner)

    def _hook_graph(self, output: Any) -> None:
        """Register hooks on the backward nodes of the call that has just ended, each with its owner."""
        starts = [start for start, _ in self._boundaries]
        queue = [tensor.grad_fn for tensor in iterate_tensors(output) if tensor.grad_fn is not None]
        seen = set(queue)
        while queue:
            node = queue.pop()
            index = bisect_right(starts, node._sequence_nr()) - 1
            if index < 0 or node.name() == _ACCUMULATE_GRAD:  # created before the call, or shared by all calls
                continue
            owner = self._boundaries[index][1]._replace(direction=BACKWARD)
            node.register_prehook(partial(self._begin_node, owner))
            if not self.has_one_rank:
                node.register_hook(lambda *_: self._lap(COMMUNICATION))
            inputs = {other for other, _ in node.next_functions if other is not None} - seen
            seen |= inputs
            queue += inputs

    def _begin_node(self, owner: TimeOwner, *_: Any) -> None:
        if self._owner.direction != BACKWARD:  # the first node of the pass
            at_end = partial(self._lap, OUTSIDE) if self.has_one_rank else self._queue_end_of_pass
            torch.autograd.Variable._execution_engine.queue_callback(at_end)
        if self._owner != owner:
            self._lap(owner)

    def _queue_end_of_pass(self) -> None:
        """Queue the end of the pass after the callbacks, queued by the pass itself, that wait for other ranks."""
        torch.autograd.Variable._execution_engine.queue_callback(partial(self._lap, OUTSIDE))

    def _own_seconds(self, update: _Update) -> dict[TimeOwner, float]:
        seconds_by_owner: dict[TimeOwner, float] = {}
        for (_, before), (owner, after) in pairwise(update.events):
            seconds = before.elapsed_time(after) / 1e3 if self._on_device else after - before
            if owner != _PROFILER:
                seconds_by_owner[owner] = seconds_by_owner.get(owner, 0.0) + seconds
        return seconds_by_owner


def is_inside(path: str, outer: str) -> bool:
    """Return whether the module at `outer` contains the module at `path`."""
    return path != outer and (outer == "" or path.startswith(f"{outer}."))


def _timed_modules(model: nn.Module, depth: int) -> Iterator[tuple[str, nn.Module, bool]]:
    """Yield path, module and whether it is compiled, down to `depth`; modules inside a graph cannot be separated."""
    graphs: list[str] = []
    for path, module in model.named_modules():
        if (path and path.count(".") >= depth) or any(is_inside(path, graph) for graph in graphs):
            continue
        is_graph = module._compiled_call_impl is not None
        graphs += [path] if is_graph else []
        yield path, module, is_graph


def wrap_compiled_call(module: nn.Module, wrapper: Callable[..., Any]) -> Callable[[], None]:
    """Call `wrapper` instead of a compiled module, with the graph as first argument; return a function to undo this.

    Forward hooks of a compiled module run inside its graph, so they cannot time it.
    """
    graph = module._compiled_call_impl  # private in torch 2.13
    module._compiled_call_impl = partial(wrapper, graph)

    def undo() -> None:
        module._compiled_call_impl = graph

    return undo


def iterate_tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of a batch or an output, including those in attributes of the task's own classes."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf
        elif hasattr(leaf, "__dict__") and not isinstance(leaf, nn.Module):
            yield from (inner for inner in tree_leaves(list(vars(leaf).values())) if isinstance(inner, Tensor))


def _is_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _record_event(device: torch.device) -> torch.Event:
    event = torch.Event(device, enable_timing=True)
    event.record()
    return event


_ACCUMULATE_GRAD = "torch::autograd::AccumulateGrad"
