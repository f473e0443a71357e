"""Data parallelism: each rank has a full copy of the model and processes part of the samples of each update.

Gradients are all-reduced in buckets (reducer.py). DistributedDataParallel is not used, because it averages gradients
over ranks and expects the same number of backward passes on each rank. Here, a rank may have more micro-batches than
another, or none in the last update of an epoch, and the summed gradients are divided by the number of items of all
ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from runner.base.batch import MicroBatch
from runner.base.order import MicroBatchKey
from runner.base.task import State
from runner.distributed.agreement import broadcast_model, merge_states
from runner.distributed.buffer_sync import BufferSync
from runner.distributed.dummy_pass import run_dummy_pass
from runner.distributed.parallel import Copy, Discarded, ForwardPasses, Parallel, Sums, copy_to_host
from runner.distributed.reducer import BUCKET_BYTES, CustomSum, Reducer
from runner.distributed.world import World


class Replicated(Parallel):
    """Data parallelism with a copy of the model on each rank."""

    def __init__(self, world: World, *, bucket_bytes: int = BUCKET_BYTES, is_lockstep: bool = False) -> None:
        super().__init__(world)
        self.is_lockstep = is_lockstep  # synchronized batch norms run collectives in each forward and backward pass
        self.bucket_bytes = bucket_bytes
        self.make_sum: Callable[[], CustomSum] | None = None  # instead of an all-reduce
        self._reducer: Reducer | None = None
        self._group_reducers: list[Reducer] = []
        self._buffers: BufferSync
        self._attached: Tensor | None = None
        self._attached_sums: Tensor | None = None

    def wrap(
        self, model: nn.Module, layers: Callable[[], Sequence[nn.Module]], blocks: Sequence[nn.Module]
    ) -> nn.Module:
        broadcast_model(model, self.world)
        self._buffers = BufferSync(model, self.world)
        return model

    def begin(self, parameters: Sequence[nn.Parameter]) -> None:
        self._reducer = self._make_reducer(parameters)
        self._buffers.begin_phase()

    def _make_reducer(self, parameters: Sequence[nn.Parameter]) -> Reducer:
        return Reducer(parameters, self.world, self.bucket_bytes, self.make_sum() if self.make_sum else None)

    def end(self) -> None:
        if self._reducer is not None:
            self._reducer.close()
            self._reducer = None

    def set_groups(self, groups: Sequence[Sequence[nn.Parameter]]) -> None:
        for reducer in self._group_reducers:
            reducer.close()
        self._group_reducers = [self._make_reducer(group) for group in groups]
        self._selected: set[int] = set()

    def select_group(self, group: int) -> None:
        if self._reducer is not None and self._reducer not in self._group_reducers:
            self._reducer.close()
        self._reducer = self._group_reducers[group]
        if group not in self._selected:  # its forward passes may change other buffers than those of earlier groups
            self._selected.add(group)
            self._buffers.begin_phase()

    def accumulate(self, passes: ForwardPasses, batches: Iterator[MicroBatch]) -> Sums:
        try:
            return self._accumulate_local(passes, batches)
        except Discarded:  # all ranks have already agreed to discard the update
            raise
        except Exception as error:
            if self.is_lockstep:
                raise
            passes.failed(error)
        return Sums(self.world.zeros(), self.world.zeros(), failed=True)

    def _accumulate_local(self, passes: ForwardPasses, batches: Iterator[MicroBatch]) -> Sums:
        assert self._reducer is not None, "begin comes first"
        self._buffers.begin_update()
        stopwatch, device = self.stopwatch, self.world.device
        loss_sum, items = self.world.zeros(), self.world.zeros()
        bad: tuple[tuple[int, str], ...] = ()
        last = False
        while not last:
            batch, last, skipped, is_counted, *_ = next(batches)
            stopwatch.lap("data")
            bad += skipped
            if is_counted:
                with passes.forward():
                    loss, count = passes.loss(passes.model, batch)
                stopwatch.lap("forward")
                # Overlap the all-reduce with the backward pass, unless the backward pass contains collectives itself.
                # A rank that runs a dummy pass issues only those of the pass, so the order of collectives would differ.
                self._reducer.is_last = last and not self.is_lockstep
                passes.backward(loss)
                stopwatch.lap("backward")
                loss_sum += loss.detach()
                items += count.to(device) if isinstance(count, Tensor) else count
            elif self.is_lockstep:
                run_dummy_pass(passes, batch, self._reducer.parameters)
                stopwatch.lap("wait")
            else:
                with passes.forward():  # saves the state to restore if another rank overflows
                    pass
        return Sums(loss_sum, items, bad)

    def reduce(self, sums: Sums) -> Sums:
        assert self._reducer is not None, "begin comes first"
        assert isinstance(sums.items, Tensor)
        numbers = torch.stack([sums.loss_sum, sums.items])
        flags = self._buffers.flags()
        along = [] if self._attached is None else [self._attached]
        total, num_failed, rest = self._reducer.finish(numbers, torch.cat([flags, *along]), failed=sums.failed)
        changed, self._attached_sums = rest[: len(flags)], rest[len(flags) :] if along else None
        if not num_failed:
            self._buffers.apply(changed)
        self.stopwatch.lap("wait")
        if num_failed:
            raise Discarded
        loss_sum, items = total
        return Sums(loss_sum, items, sums.bad)

    def attach_numbers(self, numbers: Tensor | None) -> bool:
        self._attached, self._attached_sums = numbers, None
        return self._reducer is not None

    def attached_sums(self) -> Tensor | None:
        return self._attached_sums

    def buffer_update(self) -> AbstractContextManager[None]:
        return self._buffers.update()

    def check_buffers(self) -> None:
        self._buffers.check()

    def gather_full(self, tensors: Mapping[str, Tensor], copy: Copy = copy_to_host) -> dict[str, Tensor]:
        return super().gather_full(tensors, copy) if self.world.is_first else {}

    def merge_state(self, merge: Callable[[State, State], State], state: State) -> State:
        return merge_states(merge, state, self.world)

    def evaluation_batches(self, keys: Sequence[MicroBatchKey]) -> list[MicroBatchKey]:
        return list(keys[self.world.rank :: self.world.world_size])
