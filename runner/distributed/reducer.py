"""All-reduce gradients in buckets during the last backward pass of an update.

Which parameters share a bucket depends only on their registration order, so the sums are bit-identical in every run
with the same ranks, including a resumed one. The order in which buckets are exchanged follows the order in which their
gradients arrived in the previous update. Every rank computes it from the same all-reduced numbers, so all ranks agree
on it.

DistributedDataParallel is not used: it averages per rank, needs equal numbers of backward passes, and regroups buckets
at run time, which changes the order of additions and therefore the bits of a resumed run (docs/decisions/0011).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from runner.base.errors import TaskFault
from runner.distributed.parallel import dense_gradient
from runner.distributed.world import World

SMALL_BYTES = 64 << 10  # up to this size, gradients are sent with the other sums: a second message takes longer
BUCKET_BYTES = 25 << 20  # as in DistributedDataParallel: large enough for bandwidth, small enough to overlap
FIRST_BUCKET_BYTES = 1 << 20
# Replaces a tensor with its sum over the ranks. Returns an object with wait(), or None if the sum is complete.
SumGradients = Callable[[Tensor], Any]
MAX_ERROR = 0.25  # of a custom sum, relative to its largest element; 0.5 if it is a mean over 2 ranks


class _Bucket:
    """Gradients that are all-reduced in one flat tensor.

    views       slice of the flat tensor for each parameter
    awaited     parameter -> how often its gradient is expected in the last backward pass: usually once, several times
                if the parameter is shared by reentrant checkpoints, never if it is unused
    arrived     parameter -> number of times its gradient arrived in this pass
    missing     number of expected gradients that have not arrived
    position    number of gradients of the model that had arrived when the last one of this bucket did
    is_late     a gradient arrived after the bucket was launched, so the bucket must be exchanged again
    was_late    the bucket was late in an earlier update, so it awaits the largest number of gradients that ever arrived
    is_unused   no rank had a gradient for it in the previous update, so it is all-reduced only if a rank has one now
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        first = parameters[0]
        self.flat = torch.zeros(sum(weight.numel() for weight in parameters), dtype=first.dtype, device=first.device)
        self.views: list[Tensor] = []
        start = 0
        for weight in parameters:
            # with the parameter's layout: optimizer kernels require gradients of the same layout
            dense = torch.empty_like(weight, memory_format=torch.preserve_format, device="meta")
            self.views.append(
                self.flat[start : start + weight.numel()].as_strided(weight.shape, tuple(dense.stride()), start)
            )
            start += weight.numel()
        self.awaited = Counter(map(id, parameters))
        self.was_late = self.is_unused = False
        self.work: Any = None
        self.restart()

    def restart(self) -> None:
        """Start an update: no gradient has arrived yet."""
        self.arrived: Counter[int] = Counter()
        self.missing = self.awaited.total()
        self.position, self.is_late = 0, False

    def arrive(self, weight: Tensor, position: int) -> None:
        """Record the arrival of a gradient."""
        key = id(weight)
        self.missing -= self.arrived[key] < self.awaited[key]
        self.arrived[key] += 1
        self.position = position
        self.is_late |= self.work is not None

    def fill(self) -> None:
        """Copy the gradients into the flat tensor, with zeros for missing ones."""
        present = [index for index, weight in enumerate(self.parameters) if weight.grad is not None]
        if len(present) < len(self.parameters):  # missing ones would keep the sums of the last update
            self.flat.zero_()
        if present:
            torch._foreach_copy_(
                [self.views[index] for index in present], [dense_gradient(self.parameters[index]) for index in present]
            )

    def launch(self, sum_gradients: SumGradients) -> None:
        """Copy the gradients and start the all-reduce."""
        self.fill()
        self.work = sum_gradients(self.flat)

    def wait(self) -> None:
        """Wait for the all-reduce, if one was started."""
        if self.work is not None:
            self.work.wait()
            self.work = None

    def finish(self) -> None:
        """Set the gradients to the sums, and start the next update."""
        for weight, view in zip(self.parameters, self.views, strict=True):
            # Without a copy: the loop sets gradients to None before the next backward pass.
            weight.grad = view
        self.restart()


class Reducer:
    """All-reduce gradients in buckets, in the order in which the buckets were complete in the previous update.

    is_last  True in the last backward pass of the update: a bucket is launched as soon as its gradients have arrived

    The first update uses the registration order, from the last parameter to the first. If a gradient arrives after its
    bucket was launched, all ranks exchange that bucket again at the end, so the sum is still correct.

    On the CPU, the gradients of a small model are added in float64, in the message with the other numbers.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        world: World,
        bucket_bytes: int,
        custom_sum: CustomSum | None = None,
    ) -> None:
        self.parameters = list(parameters)
        self.world = world
        self._custom_sum = custom_sum
        self.buckets = [_Bucket(group) for group in _group_parameters(self.parameters, bucket_bytes)]
        self.is_last = False
        self._has_one_message = custom_sum is None and _fits_one_message(self.buckets)
        self._order = [] if self._has_one_message else list(self.buckets)  # the same on all ranks
        self._next = 0  # next bucket of the order
        self._num_arrived = 0
        self._hooks = [
            weight.register_post_accumulate_grad_hook(self._arrival_hook(bucket))  # type: ignore[no-untyped-call]
            for bucket in self.buckets
            for weight in bucket.parameters
        ]

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        for hook in self._hooks:
            hook.remove()

    def finish(self, sums: Tensor, flags: Tensor, *, failed: bool = False) -> tuple[Tensor, int, Tensor]:
        """Finish the all-reduce of all gradients; set gradients that no rank has to None.

        flags  any numbers, on the host

        Returns `sums` added over the ranks, the number of ranks that `failed` (then no gradients are valid), and
        `flags` added over the ranks.
        """
        absent = [float(weight.grad is None) for weight in self.parameters]
        late = [float(bucket.is_late) for bucket in self.buckets]
        host_numbers = torch.tensor([*absent, *late, *self._positions(), float(failed)], dtype=torch.float64)
        mine = torch.cat([host_numbers, flags])
        total, reduced = self._add_together(sums, mine) if self._has_one_message else self._add(sums, mine)
        sizes = [len(absent), len(late), len(late), 1, len(flags)]
        num_absent, num_late, positions, num_failed, rest = torch.split(reduced, sizes)
        is_absent = (num_absent == self.world.world_size).tolist()
        # Before the buckets are finished: a late one is filled again from this rank's gradients, not from the sums.
        if not num_failed and not self._has_one_message:
            self._adapt(is_absent, num_late.tolist(), positions.tolist())
        for bucket in self.buckets:
            bucket.finish()
        if self._custom_sum:
            self._custom_sum.raise_if_wrong()
        for weight, is_none in zip(self.parameters, is_absent, strict=True):
            if is_none:
                weight.grad = None
        self._next, self._num_arrived, self.is_last = 0, 0, False
        return total, int(num_failed), rest

    def _add(self, sums: Tensor, mine: Tensor) -> tuple[Tensor, Tensor]:
        """Finish the all-reduce of the buckets; return `sums` and `mine`, on the host, added over the ranks."""
        # Before the numbers, because other ranks may have launched these buckets in the backward pass.
        while self._next < len(self._order):
            self._launch()
        on_host = sums.device.type == "cpu"
        numbers = torch.cat([sums, mine.to(sums.dtype)]) if on_host else sums
        work = self.world.sum_async(numbers)
        other = None if on_host else self.world.sum_async(mine)
        for bucket in self.buckets:
            bucket.wait()
        work.wait()
        if other is not None:
            other.wait()  # gloo, on the host: no device synchronization
        return numbers[: len(sums)], numbers[len(sums) :] if on_host else mine

    def _add_together(self, sums: Tensor, mine: Tensor) -> tuple[Tensor, Tensor]:
        """All-reduce the gradients in one message with the numbers; return `sums` and `mine`, added over the ranks."""
        (bucket,) = self.buckets
        bucket.fill()
        message = torch.cat([bucket.flat.to(sums.dtype), sums, mine.to(sums.dtype)])
        self.world.sum_async(message).wait()
        gradients, total, reduced = torch.split(message, [len(bucket.flat), len(sums), len(mine)])
        bucket.flat.copy_(gradients)
        return total, reduced

    def _arrival_hook(self, bucket: _Bucket) -> Callable[[Tensor], None]:
        def arrival(weight: Tensor) -> None:
            if self.is_last:
                self._num_arrived += 1
                bucket.arrive(weight, self._num_arrived)
                # Only in order, because the ranks must call the all-reduces in the same order.
                while self._next < len(self._order) and not self._order[self._next].missing:
                    self._launch()

        return arrival

    def _launch(self) -> None:
        self._order[self._next].launch(self._custom_sum or self.world.sum_async)
        self._next += 1

    def _positions(self) -> list[float]:
        """Return how many gradients had arrived when each bucket was complete on this rank; zeros if none arrived."""
        never = self._num_arrived + 1 if self._num_arrived else 0
        return [float(never if bucket.missing else bucket.position) for bucket in self.buckets]

    def _adapt(self, is_absent: Sequence[bool], num_late: Sequence[float], positions: Sequence[float]) -> None:
        """Exchange late buckets again, and predict the arrivals in the next update from those in the current one.

        All arguments are all-reduced. Only `awaited` is predicted from this rank's own gradients, because ranks may use
        different parameters.
        """
        absent_ids = {id(weight) for weight, absent in zip(self.parameters, is_absent, strict=True) if absent}
        for bucket, late in zip(self.buckets, num_late, strict=True):
            is_unused = all(id(weight) in absent_ids for weight in bucket.parameters)
            if late or (bucket.is_unused and not is_unused):
                bucket.launch(self._custom_sum or self.world.sum_async)
                bucket.wait()
            bucket.was_late |= late > 0
            bucket.is_unused = is_unused
            if self._num_arrived:
                # `|` of counters is the maximum of each count.
                bucket.awaited = bucket.awaited | bucket.arrived if bucket.was_late else bucket.arrived
        place = dict(zip(map(id, self.buckets), positions, strict=True))
        used = [bucket for bucket in self.buckets if not bucket.is_unused]
        # A bucket that was late may await a gradient that does not arrive in every update. It is put last, so that it
        # does not block others.
        self._order = sorted(used, key=lambda bucket: (bucket.was_late, place[id(bucket)]))


class CustomSum:
    """A function of a task file or a package that replaces gradients with their sum over the ranks.

    For each bucket, the results of all ranks are compared with each other and with an all-reduce, in each update until
    one has a sum that is finite and not zero. Copies of the model that receive different gradients would diverge. All
    ranks find the same errors.

    option  its name
    where   where it is defined
    """

    def __init__(self, function: SumGradients, world: World, option: str, where: str) -> None:
        self._function, self._world, self._option, self._where = function, world, option, where
        self._checked: set[int] = set()  # addresses of the buckets, which exist as long as the reducer
        self._error = self._difference = 0.0

    def __call__(self, flat: Tensor) -> Any:
        if flat.data_ptr() in self._checked:
            return self._call(flat)
        exact = flat.clone()
        self._world.sum_async(exact).wait()
        self._call(flat).wait()
        first = flat.clone()
        self._world.broadcast_tensor(first)
        differs = (first.view(torch.uint8) != flat.view(torch.uint8)).any()
        largest = exact.abs().max()
        distance = (flat - exact).abs().max() / largest.clamp(min=torch.finfo(flat.dtype).tiny)
        overflows, vanishes = ~largest.isfinite(), largest == 0
        found = torch.stack([distance, *(flag.to(flat.dtype) for flag in (differs, overflows, vanishes))]).float()
        error, difference, overflowed, vanished = self._world.max(found.nan_to_num(nan=1.0, posinf=1.0)).tolist()
        if not overflowed:  # a sum overflows if the loss is not finite, or in the first updates of a loss scale
            self._error, self._difference = max(self._error, error), max(self._difference, difference)
        if not overflowed and not vanished:
            self._checked.add(flat.data_ptr())
        return _DONE

    def _call(self, flat: Tensor) -> Any:
        work = self._function(flat)
        if work is not None and not hasattr(work, "wait"):
            raise TaskFault(
                f"parallelism={self._option} must return None or an object with wait(), but returned"
                f" {type(work).__name__}",
                where=self._where,
                fix="replace the gradients in place, as gradients.copy_(result) does, and return None",
            )
        return _DONE if work is None else work

    def raise_if_wrong(self) -> None:
        """Raise TaskFault if a result was not the sum, or if the results of the ranks differed."""
        what = ""
        if self._error > MAX_ERROR:
            what = f"must replace the gradients with their sum over the ranks; the error is {100 * self._error:.0f} %"
        elif self._difference:
            what = "returns different gradients on different ranks"
        if what:
            fix = "end with the same collective on all ranks, such as torch.distributed.all_reduce(gradients)"
            raise TaskFault(f"parallelism={self._option} {what}", where=self._where, fix=fix)


class _Done:
    def wait(self) -> None:
        """Do nothing, because the sum is complete."""


_DONE = _Done()


def _fits_one_message(buckets: Sequence[_Bucket]) -> bool:
    """Return whether the gradients are one small bucket of real numbers in host memory."""
    if len(buckets) != 1:
        return False
    flat = buckets[0].flat
    return flat.device.type == "cpu" and flat.is_floating_point() and flat.nbytes <= SMALL_BYTES


def bucket_sizes(parameters: Sequence[nn.Parameter], bucket_bytes: int = BUCKET_BYTES) -> tuple[int, ...]:
    """Return the bytes of each bucket, in the order of the first update."""
    groups = _group_parameters(parameters, bucket_bytes)
    return tuple(sum(weight.numel() * weight.element_size() for weight in group) for group in groups)


def _group_parameters(parameters: Sequence[nn.Parameter], bucket_bytes: int) -> Iterator[list[nn.Parameter]]:
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
