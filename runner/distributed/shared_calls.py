"""Let ranks call a sharded model different numbers of times, as in an evaluation.

Each call gathers the parts of the model one after another. These gathers are collectives, so a rank that has finished
takes part in them until all ranks have finished. A collective of the task itself, such as that of a metric, must
therefore follow the same number of calls on every rank: otherwise it would be paired with a gather.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from runner.base.errors import TaskFault
from runner.distributed.world import World


def parts_of(root: nn.Module) -> list[FSDPModule]:
    """Return the modules whose parameters are gathered together, `root` first."""
    return [module for module in root.modules() if isinstance(module, FSDPModule)]


class SharedCalls:
    """Coordinates the calls of a sharded model across ranks.

    Its hooks are registered once, before the model is compiled or called.

    free      frees the gathered parameters of the model
    reshards  a part is freed after its forward pass, and gathered again if it is called again
    order     parts of the model in the order in which the last call of this rank gathered them
    """

    def __init__(self, world: World, model: nn.Module, free: Callable[[nn.Module], None], *, reshards: bool) -> None:
        self.world, self.model, self.free, self.reshards = world, model, free, reshards
        self.order = parts_of(model)
        self._gathered: list[Any] = []  # parts that the current call has gathered
        self._depth = 0  # the model may call itself
        self._is_watched = False
        # These hooks run before torch's own, which gather the parameters. They are never removed, because compiled code
        # ignores hooks that are added or removed later.
        model.register_forward_pre_hook(self._begin, prepend=True)
        model.register_forward_hook(self._end, always_call=True)
        inner: list[Any] = self.order[1:]
        for part in inner:
            part.register_forward_pre_hook(self._enter, prepend=True)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Announce each call inside the context to the other ranks, and complete the gathers of calls that fail.

        On exit without an error, this rank takes part in the calls of the other ranks until all have finished. Raises
        TaskFault on all ranks if some run a collective of torch.distributed while others call the model, or have
        finished. Collectives that were imported by name, and those of other groups, are not detected.
        """
        plain = {name: getattr(dist, name) for name in COLLECTIVES}
        self._is_watched = True
        try:
            for name, function in plain.items():
                setattr(dist, name, self._announced(function))
            yield
        finally:
            for name, function in plain.items():
                setattr(dist, name, function)
            self._is_watched, self._depth = False, 0
        while self._agree(_FINISHED) == _CALLS:
            self._gather(self.order)

    def _agree(self, mine: int) -> int:
        """Return what the ranks do next: all run a collective, some call the model, or all have finished.

        mine  what this rank does next
        Raises TaskFault, on every rank, if some but not all ranks run a collective.
        """
        # The maximum of the negated number is minus the minimum, so a single message gives both.
        lowest, highest = self.world.max(torch.tensor([-mine, mine])).tolist()
        if highest == _RUNS_COLLECTIVE != -lowest:
            raise TaskFault(
                "a rank calls a collective of torch.distributed while another rank "
                + ("calls the model" if -lowest == _CALLS else "has finished its batches"),
                where="parallelism.evaluation=sharded",
                fix="return sums from evaluate, or use Task.metrics, instead of a collective (such as torchmetrics'"
                " dist_sync_on_step); or use parallelism.evaluation=whole",
            )
        return int(highest)

    def _announced(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a collective: unless it is called inside the model, it first checks that all ranks call a collective."""
        place = list(inspect.signature(function).parameters).index("group")

        @functools.wraps(function)
        def announced(*args: Any, **kwargs: Any) -> Any:
            group = kwargs.get("group", args[place] if place < len(args) else None)
            if self._is_watched and not self._depth and group in (None, dist.group.WORLD):
                with self._unwatched():
                    self._agree(_RUNS_COLLECTIVE)
                    return function(*args, **kwargs)  # unwatched, because it may call other collectives
            return function(*args, **kwargs)

        return announced

    @contextmanager
    def _unwatched(self) -> Iterator[None]:
        self._is_watched = False
        try:
            yield
        finally:
            self._is_watched = True

    def outside_error(self) -> TaskFault:
        """Return the error for using a part of the model whose parameters are not gathered."""
        return TaskFault(
            "a part of the model is used outside of model(...), where its parameters are not gathered",
            where="parallelism.evaluation=sharded",
            fix="call model(...) in evaluate and in phases of kind fit, or use parallelism.evaluation=whole",
        )

    def _gather(self, parts: list[FSDPModule]) -> None:
        for part in parts:
            part.unshard()
            if self.reshards:
                part.reshard()
        self.free(self.model)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _begin(self, *_: Any) -> None:
        if not self._is_watched:
            return
        self._depth += 1
        if self._depth == 1:
            with self._unwatched():
                self._agree(_CALLS)
            self._gathered = [self.model]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _enter(self, part: nn.Module, *_: Any) -> None:
        if not self._is_watched:
            return
        if not self._depth:
            raise self.outside_error()
        self._gathered.append(part)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _end(self, *_: Any) -> None:
        self._depth -= self._is_watched
        if self._depth or not self._is_watched:
            return
        if sys.exc_info()[0] is None:
            self.order = self._gathered
            self.free(self.model)
            return
        # The caller may catch the error, and other ranks are still inside the call: take part in its other gathers.
        with self._unwatched():
            self._gather(self.order[len(self._gathered) :])
        root: Any = self.model
        root._get_fsdp_state()._state_ctx.iter_forward_root = None  # torch resets it only after complete calls


_FINISHED, _CALLS, _RUNS_COLLECTIVE = range(3)
# Collectives of torch.distributed on all ranks. Point-to-point messages and collectives of other groups are not listed:
# not all ranks call them, so they cannot be matched with a gather.
COLLECTIVES = (
    "all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object", "all_reduce",
    "all_reduce_coalesced", "all_to_all", "all_to_all_single", "barrier", "broadcast", "broadcast_object_list",
    "gather", "gather_object", "monitored_barrier", "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter",
    "scatter_object_list", *(name for name in ("all_gather_single", "reduce_scatter_single") if hasattr(dist, name)),
)  # fmt: skip
