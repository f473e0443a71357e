"""Measure forward and backward time per module from markers at module boundaries, without synchronizing.

A module has the time in which it and no module inside it was at work. In a backward pass a node of the graph belongs
to the module that was at work when the node was made, which its sequence number tells; the graph is not changed.
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
    """Whose time it is: a module by its path, "" for the model, or something beside the model, in round brackets."""

    path: str
    way: str = FORWARD


OUTSIDE, DATA, OPTIMIZER = TimeOwner("(loss and the rest)"), TimeOwner("(data)"), TimeOwner("(optimizer)")
_OURS = TimeOwner("(profiler)")  # looking through the graph, and what is set aside: shown nowhere
COMMUNICATION = TimeOwner(
    "(communication)", BACKWARD
)  # with other ranks, between the nodes of a backward pass and after
BESIDE = (DATA.path, COMMUNICATION.path, OPTIMIZER.path, OUTSIDE.path)


@dataclass(frozen=True)
class TimeSpread:
    """Seconds of an update, over several of them; `std` is that of a sample, 0 for a single update."""

    mean: float
    std: float
    min: float
    median: float
    max: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> TimeSpread:
        """Return what the numbers, at least one, are on the whole."""
        std = statistics.stdev(seconds) if len(seconds) > 1 else 0.0
        return cls(statistics.fmean(seconds), std, min(seconds), statistics.median(seconds), max(seconds))


@dataclass(frozen=True)
class ModuleTime:
    """A module, or what is beside the model, and the seconds it takes of an update.

    path      as in the names of its parameters; "" for the model itself
    kind      its class, with a word where its inside is one graph; "" beside the model
    calls     forward passes of an update, on average
    own       without the modules inside it, both ways
    forward, backward, total  with them
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
    """The marks of an update, in order: what went before each of them was its owner's."""

    marks: list[tuple[TimeOwner, Any]] = field(default_factory=list)
    calls: dict[str, int] = field(default_factory=dict)


class ModuleTimes:
    """Marks the borders of modules from `start` to `stop`; `update` ends an update, `table` says what they took.

    depth  modules nested deeper than this count toward their parent
    ranks  with several, the time between the nodes of a backward pass is communication, in a separate row
    """

    def __init__(self, model: nn.Module, device: torch.device, *, depth: int, ranks: int = 1) -> None:
        self.model, self.depth, self.is_alone = model, depth, ranks == 1
        self._mark: Callable[[], Any] = partial(_mark, device) if device.type == "cuda" else time.perf_counter
        self._on_device = device.type == "cuda"
        self._hooks = ExitStack()
        self._updates: list[_Update] = []
        self._current = _Update()
        self._now = OUTSIDE
        self._inside: list[TimeOwner] = []  # modules that are at work, the innermost last
        self._borders: list[tuple[int, TimeOwner]] = []  # from which node of the graph on, and whose they are
        self.kinds: dict[str, str] = {}

    def start(self) -> None:
        """The next update begins, and is measured."""
        for path, module, is_graph in _parts(self.model, self.depth):
            self.kinds[path] = type(module).__name__ + (", one graph" if is_graph else "")
            if is_graph:
                self._hooks.callback(called_through(module, partial(self._through, path)))
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
        self._begin()

    def stop(self) -> None:
        """The model is as it was; the update that was not ended does not count."""
        self._hooks.close()

    def update(self) -> None:
        """An update is over."""
        self._lap(OUTSIDE)
        self._updates.append(self._current)
        self._begin()

    def fetch(self, batches: Iterator[Any]) -> Any:
        """Return the next batch; the time until it is there is that of the data."""
        self._lap(DATA)
        batch = next(batches)
        self._lap(OUTSIDE)
        return batch

    @contextmanager
    def aside(self) -> Iterator[None]:
        """The time until the end belongs to no module."""
        following = self._now
        self._lap(_OURS)
        yield
        self._lap(following)

    def table(self) -> list[ModuleTime]:
        """Return a row per module, a module before those inside it, then what is beside the model.

        The marks of a device must have been passed: synchronize first.
        """
        own = [self._own_seconds(update) for update in self._updates]
        if not own:
            return []
        paths = [*self.kinds, *(path for path in BESIDE if not self.is_alone or path != COMMUNICATION.path)]
        calls = {path: sum(update.calls.get(path, 0) for update in self._updates) / len(own) for path in paths}

        def spread(path: str, *ways: str, inner: bool) -> TimeSpread:
            within = [one for one in self.kinds if is_inside(one, path)] if inner else []
            owners = [TimeOwner(one, way) for one in (path, *within) for way in ways]
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

    def update_seconds(self) -> list[float]:
        """Return what each update took, all in all."""
        return [sum(self._own_seconds(update).values()) for update in self._updates]

    # ------------------------------------------------------------ borders

    def _begin(self) -> None:
        self._current = _Update()
        self._now, self._inside = OUTSIDE, []
        self._current.marks.append((_OURS, self._mark()))

    def _lap(self, following: TimeOwner) -> None:
        """What went before belongs to who was at work, what comes now to `following`."""
        self._current.marks.append((self._now, self._mark()))
        self._now = following

    def _optimizer(self, following: TimeOwner, *_: Any) -> None:
        self._lap(following)

    def _enter(self, path: str, *_: Any) -> None:
        # Computed again in the backward pass, or for an evaluation: the first is the time of who goes back.
        if not _is_backward() and self.model.training:
            if not self._inside:
                self._borders = []
            self._current.calls[path] = self._current.calls.get(path, 0) + 1
            self._inside.append(TimeOwner(path))
            self._begin_part(TimeOwner(path))

    def _leave(self, path: str, module: nn.Module, given: Any, output: Any) -> None:
        if _is_backward() or not self._inside or self._inside[-1].path != path:
            return
        self._inside.pop()
        if self._inside:
            self._begin_part(self._inside[-1])
            return
        self._lap(_OURS)
        self._watch(output)
        self._lap(OUTSIDE)

    def _through(self, path: str, call: Callable[..., Any], *given: Any, **named: Any) -> Any:
        self._enter(path)
        output = None
        try:
            output = call(*given, **named)
        finally:
            self._leave(path, self.model, given, output)
        return output

    def _begin_part(self, owner: TimeOwner) -> None:
        self._borders.append((torch._C._autograd._get_sequence_nr(), owner))
        self._lap(owner)

    def _watch(self, output: Any) -> None:
        """Each node of the graph of the call that has just ended says whose it is before it goes to work."""
        starts = [start for start, _ in self._borders]
        waiting = [tensor.grad_fn for tensor in tensors_in(output) if tensor.grad_fn is not None]
        seen = set(waiting)
        while waiting:
            node = waiting.pop()
            place = bisect_right(starts, node._sequence_nr()) - 1
            if place < 0 or node.name() == _LEAF:  # made before the call, or for all calls
                continue
            owner = self._borders[place][1]._replace(way=BACKWARD)
            node.register_prehook(partial(self._go_back, owner))
            if not self.is_alone:
                node.register_hook(self._communicate)
            following = {other for other, _ in node.next_functions if other is not None} - seen
            seen |= following
            waiting += following

    def _go_back(self, owner: TimeOwner, *_: Any) -> None:
        if self._now.way != BACKWARD:
            following = partial(self._lap, OUTSIDE) if self.is_alone else self._end_of_communication
            torch.autograd.Variable._execution_engine.queue_callback(following)
        if self._now != owner:
            self._lap(owner)

    def _communicate(self, *_: Any) -> None:
        self._lap(COMMUNICATION)

    def _end_of_communication(self) -> None:
        """What waits for the other ranks at the end of the pass came to the queue meanwhile: go behind it."""
        torch.autograd.Variable._execution_engine.queue_callback(partial(self._lap, OUTSIDE))

    # ------------------------------------------------------------ what the marks say

    def _own_seconds(self, update: _Update) -> dict[TimeOwner, float]:
        found: dict[TimeOwner, float] = {}
        for (_, before), (owner, after) in pairwise(update.marks):
            seconds = before.elapsed_time(after) / 1e3 if self._on_device else after - before
            if owner != _OURS:
                found[owner] = found.get(owner, 0.0) + seconds
        return found


def is_inside(path: str, outer: str) -> bool:
    """Return whether another module contains the module of this path."""
    return path != outer and (outer == "" or path.startswith(f"{outer}."))


def _parts(model: nn.Module, depth: int) -> Iterator[tuple[str, nn.Module, bool]]:
    """Yield path, module and whether it is compiled, down to `depth`; modules inside a graph cannot be separated."""
    graphs: list[str] = []
    for path, module in model.named_modules():
        if (path and path.count(".") >= depth) or any(is_inside(path, graph) for graph in graphs):
            continue
        is_graph = module._compiled_call_impl is not None
        graphs += [path] if is_graph else []
        yield path, module, is_graph


def called_through(module: nn.Module, around: Callable[..., Any]) -> Callable[[], None]:
    """Let calls of a compiled module go through `around`, whose first argument is the graph; return what undoes it."""
    graph = module._compiled_call_impl
    module._compiled_call_impl = partial(around, graph)

    def undo() -> None:
        module._compiled_call_impl = graph

    return undo


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of a batch or an output, also those that an object of a class of the task's own holds."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf
        elif hasattr(leaf, "__dict__") and not isinstance(leaf, nn.Module):
            yield from (inner for inner in tree_leaves(list(vars(leaf).values())) if isinstance(inner, Tensor))


def _is_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _mark(device: torch.device) -> torch.Event:
    event = torch.Event(device, enable_timing=True)
    event.record()
    return event


_LEAF = "torch::autograd::AccumulateGrad"
