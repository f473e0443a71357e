"""Data parallelism: every rank has the whole model and a share of each update; gradients are all-reduced.

DistributedDataParallel is not used because shares are unequal: a rank may have more micro-batches than another, or
none in the last update of an epoch, and the sum is divided by the true count of all ranks.
Collectives depend on the parameters only: the same buckets in the same order, whatever the work of a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from runner.base.batch import MicroBatch
from runner.base.errors import TaskFault
from runner.base.order import Micro
from runner.base.task import State
from runner.base.world import World
from runner.distributed.agreement import broadcast_model, merge_states
from runner.distributed.buffer_sync import BufferSync
from runner.distributed.dummy_pass import run_dummy_pass
from runner.distributed.parallel import Copy, Discarded, ForwardPasses, Parallel, Sums, dense_gradient, on_the_host

BUCKET_BYTES = 25 << 20  # as in DistributedDataParallel: large enough for bandwidth, small enough to overlap
FIRST_BUCKET_BYTES = 1 << 20


class Replicated(Parallel):
    """Data parallelism with a copy of the model on each rank."""

    def __init__(self, world: World, *, bucket_bytes: int = BUCKET_BYTES, in_step: bool = False) -> None:
        super().__init__(world)
        self.in_step = in_step  # norms have collectives in each pass
        self.bucket_bytes = bucket_bytes
        self._reducer: Reducer | None = None
        self._of_groups: list[Reducer] = []
        self._buffers: BufferSync

    def wrap(
        self, model: nn.Module, layers: Callable[[], Sequence[nn.Module]], blocks: Sequence[nn.Module]
    ) -> nn.Module:
        broadcast_model(model)
        self._buffers = BufferSync(model, self.world)
        return model

    def begin(self, parameters: Sequence[nn.Parameter]) -> None:
        self._reducer = Reducer(parameters, self.world, self.bucket_bytes)
        self._buffers.begin_phase()

    def end(self) -> None:
        if self._reducer is not None:
            self._reducer.close()
            self._reducer = None

    def divide(self, groups: Sequence[Sequence[nn.Parameter]]) -> None:
        for reducer in self._of_groups:
            reducer.close()
        self._of_groups = [Reducer(group, self.world, self.bucket_bytes) for group in groups]
        self._selected: set[int] = set()

    def select(self, group: int) -> None:
        if self._reducer is not None and self._reducer not in self._of_groups:
            self._reducer.close()
        self._reducer = self._of_groups[group]
        if group not in self._selected:  # its forward passes may change other buffers
            self._selected.add(group)
            self._buffers.begin_phase()

    def accumulate(self, passes: ForwardPasses, batches: Iterator[MicroBatch]) -> Sums:
        try:
            return self._accumulate_local(passes, batches)
        except Discarded:  # agreed on by all ranks already
            raise
        except Exception as error:
            if self.in_step:
                raise
            passes.failed(error)
        return Sums(self.world.zeros(), self.world.zeros(), failed=True)

    def _accumulate_local(self, passes: ForwardPasses, batches: Iterator[MicroBatch]) -> Sums:
        assert self._reducer is not None, "begin comes first"
        self._buffers.begin_update()
        watch, device = self.watch, self.world.device
        loss_sum, items = self.world.zeros(), self.world.zeros()
        bad: tuple[tuple[int, str], ...] = ()
        last = False
        while not last:
            batch, last, skipped, counts, *_ = next(batches)
            watch.lap("data")
            bad += skipped
            if counts:
                with passes.forward():
                    loss, count = passes.loss(passes.model, batch)
                watch.lap("forward")
                # Overlap the all-reduce with the backward pass, unless passes contain collectives, too:
                # in dummy passes, the order would differ between ranks.
                self._reducer.is_last = last and not self.in_step
                passes.backward(loss)
                watch.lap("backward")
                loss_sum += loss.detach()
                items += count.to(device) if isinstance(count, Tensor) else count
            elif self.in_step:
                run_dummy_pass(passes, batch, self._reducer.parameters)
                watch.lap("wait")
            else:
                with passes.forward():  # keeps what must be undone after an overflow on another rank
                    pass
        return Sums(loss_sum, items, bad)

    def reduce(self, sums: Sums) -> Sums:
        assert self._reducer is not None, "begin comes first"
        assert isinstance(sums.items, Tensor)
        numbers = torch.stack([sums.loss_sum, sums.items])
        total, num_failed, changed = self._reducer.finish(numbers, self._buffers.flags(), failed=sums.failed)
        if not num_failed:
            self._buffers.apply(changed)
        self.watch.lap("wait")
        if num_failed:
            raise Discarded
        loss_sum, items = total
        return Sums(loss_sum, items, sums.bad)

    def update_of_buffers(self) -> AbstractContextManager[None]:
        return self._buffers.update()

    def check_buffers(self) -> None:
        self._buffers.check()

    def whole(self, tensors: Mapping[str, Tensor], copy: Copy = on_the_host) -> dict[str, Tensor]:
        return super().whole(tensors, copy) if self.world.is_first else {}

    def merged(self, merge: Callable[[State, State], State], state: State) -> State:
        return merge_states(merge, state, self.world)

    def evaluation_batches(self, keys: Sequence[Micro]) -> list[Micro]:
        return list(keys[self.world.rank :: self.world.world_size])


class _Bucket:
    """Gradients that are all-reduced in one flat tensor; `views` are the slices of the parameters."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        first = parameters[0]
        self.flat = torch.zeros(sum(weight.numel() for weight in parameters), dtype=first.dtype, device=first.device)
        self.views: list[Tensor] = []
        start = 0
        for weight in parameters:
            # with the parameter's layout: optimizer kernels require gradients of the same layout
            self.views.append(
                self.flat[start : start + weight.numel()].as_strided(weight.shape, _strides(weight), start)
            )
            start += weight.numel()
        self.ready: set[int] = set()
        self.work: Any = None

    def launch(self) -> None:
        """Copy the gradients, zeros for missing ones, and start the all-reduce."""
        present = [index for index, weight in enumerate(self.parameters) if weight.grad is not None]
        if len(present) < len(self.parameters):
            self.flat.zero_()
        if present:
            torch._foreach_copy_(
                [self.views[index] for index in present], [dense_gradient(self.parameters[index]) for index in present]
            )
        self.work = dist.all_reduce(self.flat, async_op=True)

    def finish(self) -> None:
        """Wait for the all-reduce and set the gradients to the sums."""
        self.work.wait()
        self.work = None
        self.ready.clear()
        for weight, view in zip(self.parameters, self.views, strict=True):
            weight.grad = view


class Reducer:
    """All-reduce gradients in buckets, from the last layer to the first.

    is_last  the last backward pass of the update: buckets are launched as soon as they are full
    """

    def __init__(self, parameters: Sequence[nn.Parameter], world: World, bucket_bytes: int) -> None:
        self.parameters = list(parameters)
        self.world = world
        self.buckets = [_Bucket(group) for group in _grouped(self.parameters, bucket_bytes)]
        self.is_last = False
        self._next = 0  # next bucket to launch; the order is the same on all ranks
        self._hooks = [
            weight.register_post_accumulate_grad_hook(self._ready_in(bucket))  # type: ignore[no-untyped-call]
            for bucket in self.buckets
            for weight in bucket.parameters
        ]

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def finish(self, sums: Tensor, flags: Tensor, *, failed: bool = False) -> tuple[Tensor, int, Tensor]:
        """Finish the all-reduce of all gradients; None if no rank had one.

        flags  arbitrary, on the host

        Returns `sums` added over the ranks, the number of ranks that `failed` (then no gradients are valid), and
        `flags` added over the ranks.
        """
        absent = torch.tensor([float(weight.grad is None) for weight in self.parameters])
        absent = torch.cat([absent, torch.tensor([float(failed)]), flags])
        while self._next < len(self.buckets):  # first, as on ranks whose buckets were launched earlier
            self._launch()
        on_host = sums.device.type == "cpu"
        numbers = torch.cat([sums, absent.to(sums.dtype)]) if on_host else sums
        work = dist.all_reduce(numbers, async_op=True)
        other = None if on_host else dist.all_reduce(absent, async_op=True)
        for bucket in self.buckets:
            bucket.finish()
        work.wait()
        if other is not None:
            other.wait()  # gloo, on the host: no device synchronization
        reduced = numbers[len(sums) :] if on_host else absent
        num_absent, rest = torch.split(reduced, [len(self.parameters), 1 + len(flags)])
        for index in (num_absent == self.world.world_size).nonzero().flatten().tolist():
            self.parameters[index].grad = None
        self._next, self.is_last = 0, False
        return numbers[: len(sums)], int(rest[0]), rest[1:]

    def _ready_in(self, bucket: _Bucket) -> Callable[[Tensor], None]:
        def ready(weight: Tensor) -> None:
            if self.is_last:
                if bucket.work is not None:
                    raise _too_late(weight)
                bucket.ready.add(id(weight))
                while self._next < len(self.buckets) and self._is_full(self.buckets[self._next]):
                    self._launch()

        return ready

    @staticmethod
    def _is_full(bucket: _Bucket) -> bool:
        return len(bucket.ready) >= len(bucket.parameters)

    def _launch(self) -> None:
        self.buckets[self._next].launch()
        self._next += 1


def _too_late(weight: Tensor) -> TaskFault:
    return TaskFault(
        "a gradient was accumulated in several parts, but the first part had already been all-reduced",
        where=f"a parameter of shape {tuple(weight.shape)}",
        fix="pass use_reentrant=False to torch.utils.checkpoint, and do not call backward inside loss",
    )


def _grouped(parameters: Sequence[nn.Parameter], bucket_bytes: int) -> Iterator[list[nn.Parameter]]:
    """Yield the parameters from last to first, in groups of one dtype and about `bucket_bytes`."""
    limit = min(FIRST_BUCKET_BYTES, bucket_bytes)
    group: list[nn.Parameter] = []
    size = 0
    for weight in reversed(parameters):
        if group and (size >= limit or weight.dtype != group[0].dtype or weight.device != group[0].device):
            yield group
            group, size, limit = [], 0, bucket_bytes
        group.append(weight)
        size += weight.numel() * weight.element_size()
    if group:
        yield group


def _strides(weight: Tensor) -> tuple[int, ...]:
    """Return the strides of a dense tensor; row-major strides for others."""
    dense = torch.empty_like(weight, memory_format=torch.preserve_format, device="meta")
    return tuple(dense.stride())
