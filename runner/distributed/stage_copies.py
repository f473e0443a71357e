"""Keep the copies of a pipeline stage equal: all-reduce their gradients and synchronize their buffers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor, nn

from runner.distributed.buffer_sync import BufferSync
from runner.distributed.reducer import BUCKET_BYTES, Reducer
from runner.distributed.world import World


class StageCopies:
    """The copies of this rank's stage, one in each pipeline; with a single pipeline, all methods do nothing.

    world   ranks of this stage
    others  modules of the model whose buffers this stage does not change
    """

    def __init__(self, world: World, model: nn.Module, others: Collection[nn.Module]) -> None:
        self.world = world
        self._buffers = BufferSync(model, world, others=others) if world.world_size > 1 else None
        self._reducer: Reducer | None = None

    def begin(self, parameters: Sequence[nn.Parameter]) -> None:
        """Start a phase that trains these parameters of the stage."""
        if self._buffers is not None:
            self._buffers.begin_phase()
            self._reducer = Reducer(parameters, self.world, BUCKET_BYTES)

    def end(self) -> None:
        """End the phase."""
        if self._reducer is not None:
            self._reducer.close()
            self._reducer = None

    def begin_update(self) -> None:
        """Start the forward passes of an update."""
        if self._buffers is not None:
            self._buffers.begin_update()

    def begin_last_pass(self) -> None:
        """Exchange each gradient as soon as the backward pass that now starts has computed it."""
        if self._reducer is not None:
            self._reducer.is_last = True

    def reduce(self, numbers: Tensor) -> Tensor:
        """All-reduce the gradients, synchronize changed buffers, and return the sum of `numbers` over the copies."""
        if self._reducer is None or self._buffers is None:
            return numbers
        total, _, changed = self._reducer.finish(numbers, self._buffers.flags())
        self._buffers.apply(changed)
        return total

    def buffer_update(self) -> AbstractContextManager[None]:
        """Return a context for an update without gradients, after which buffers are synchronized."""
        return nullcontext() if self._buffers is None else self._buffers.update()

    def check_buffers(self) -> None:
        """Raise TaskFault, on every copy, if a buffer differs between the copies."""
        if self._buffers is not None:
            self._buffers.check()
