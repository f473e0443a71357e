"""Calls of a sharded model by ranks that call it different numbers of times, as in an evaluation.

Each call gathers the parts of the model one after another. These gathers are collectives, so a rank that has finished
takes part in them until all ranks have finished.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from runner.base.errors import TaskFault
from runner.base.world import World


def parts_of(root: nn.Module) -> list[FSDPModule]:
    """Return the modules whose parameters are gathered together, `root` first."""
    return [module for module in root.modules() if isinstance(module, FSDPModule)]


class SharedCalls:
    """The calls of the evaluations of a model, whose hooks are registered once, before the model is compiled or called.

    free      frees the gathered parameters of the model
    reshards  a part is freed after its forward pass, and gathered again if it is called again
    order     parts of the model in the order in which a call gathers them: that of the last call of this rank
    """

    def __init__(self, world: World, model: nn.Module, free: Callable[[nn.Module], None], *, reshards: bool) -> None:
        self.world, self.model, self.free, self.reshards = world, model, free, reshards
        self.order = parts_of(model)
        self._gathered: list[Any] = []  # parts that the current call has gathered
        self._depth = 0  # the model may call itself
        self._is_watched = False
        # Before the hooks of torch, which gather. Compiled code ignores hooks that are added or removed later.
        model.register_forward_pre_hook(self._begin, prepend=True)
        model.register_forward_hook(self._end, always_call=True)
        inner: list[Any] = self.order[1:]
        for part in inner:
            part.register_forward_pre_hook(self._enter, prepend=True)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Tell the other ranks of each call inside, and complete the gathers of calls that fail."""
        self._is_watched = True
        try:
            yield
        finally:
            self._is_watched, self._depth = False, 0

    def join(self) -> None:
        """Take part in the gathers of a call by other ranks."""
        self._gather(self.order)

    def outside_error(self) -> TaskFault:
        """Return the error for a use of a part of the model that is not gathered."""
        return TaskFault(
            "a part of the model is used outside of model(...), where its parameters are not gathered",
            where="parallelism.evaluation=sharded",
            fix="call model(...) in evaluate and in a fit, or use parallelism.evaluation=whole",
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
            self.world.any(True)
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
        # The caller may catch the error, while other ranks are inside the call.
        self._gather(self.order[len(self._gathered) :])
        root: Any = self.model
        root._get_fsdp_state()._state_ctx.iter_forward_root = None  # torch resets it after complete calls only
