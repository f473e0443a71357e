"""Interface of the parallelism strategies; the base class implements a single process.

In an update, `accumulate` computes this rank's gradients of the summed losses of its micro-batches; `reduce` sums
gradients over all ranks and returns the total number of items, by which the loop divides once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from runner.base.batch import MicroBatch
from runner.base.errors import TaskFault
from runner.base.stopwatch import Stopwatch, new_stopwatch
from runner.base.task import State, Sum
from runner.distributed.world import World
from runner.tensors.module_buffers import is_overlapping, overwrite
from runner.tensors.stored_tensor import Saved, read_in_groups

if TYPE_CHECKING:  # DTensors are slow to import
    from runner.distributed.shard_init import DeferredModel

Copy = Callable[[Tensor], Tensor]
ModelInit = Literal["auto", "full", "meta"]


def copy_to_host(tensor: Tensor) -> Tensor:
    """Return a copy in new host memory."""
    return tensor.detach().to("cpu", copy=True)


def dense_gradient(weight: nn.Parameter, name: str = "") -> Tensor:
    """Return the gradient of a parameter. Raises TaskFault if it is sparse: norms and sums need dense ones."""
    assert weight.grad is not None
    if weight.grad.layout is not torch.strided:
        raise TaskFault(
            "a gradient is sparse, but must be dense",
            where=f"parameter {name}" if name else f"a parameter of shape {tuple(weight.shape)}",
            fix="construct the nn.Embedding with sparse=False",
        )
    return weight.grad


class Discarded(Exception):
    """Raised on every rank if one ran out of memory: no rank applies the update."""


def _reraise(error: Exception) -> None:
    raise error


class ForwardPasses(NamedTuple):
    """The functions that turn a micro-batch into gradients.

    model     the model for forward passes
    loss      (model, batch) -> (loss summed over items, number of items)
    forward   () -> context of a forward pass, which sets the autocast dtype
    backward  (loss sum) -> None: accumulates its gradients, scaled into range
    scale     (loss sum) -> the scaled loss, for strategies that call backward themselves
    failed    records an error and frees its memory; raises it if the update cannot be discarded
    """

    model: nn.Module
    loss: Callable[[nn.Module, Any], Sum]
    forward: Callable[[], AbstractContextManager[Any]]
    backward: Callable[[Tensor], None]
    scale: Callable[[Tensor], Tensor] = lambda loss: loss
    failed: Callable[[Exception], None] = _reraise


class Sums(NamedTuple):
    """Loss and items of an update's micro-batches, of one rank or summed over ranks; tensors stay on the device."""

    loss_sum: Tensor
    items: Tensor | int | float
    bad: tuple[tuple[int, str], ...] = ()
    failed: bool = False  # passes of this rank failed: its sums do not count


class Parallel:
    """Interface of a strategy; this base class implements a single process.

    is_lockstep       every rank must run the same number of micro-batches per update, because they contain collectives
    splits_batch      each rank gets its own share of an update; False: the ranks that together hold one copy of
                      the model read the same samples
    batch_rank        number of the share that this rank reads
    counts_samples    this rank counts what it reads; False: another rank counts the same samples
    supports_groups   `set_groups` is implemented
    num_parts         number of ranks that write a checkpoint, each its shards (`checkpoint_tensors`); 1: rank 0 writes
                      everything
    gathers_model     evaluations gather the parameters that are sharded over ranks
    places_model      `wrap` moves this rank's part to the device; the whole model may not fit
    init              full: each rank builds the whole model; meta: without its large tensors, which `wrap` initializes
                      from `deferred`; auto: meta, or full if the task does not allow it

    If micro-batches fail on some rank, all ranks discard the update, unless they run in lockstep: a failure inside a
    collective leaves the other ranks blocked in it, and the ranks must be restarted.
    """

    is_lockstep = False
    splits_batch = True
    gathers_model = False
    places_model = False
    num_parts = 1
    supports_groups = True
    init: ModelInit = "full"
    deferred: DeferredModel | None = None

    def __init__(self, world: World) -> None:
        self.world = world
        self.batch_rank, self.counts_samples = world.rank, True
        self.stopwatch: Stopwatch = new_stopwatch(world.device)

    @property
    def copy_ranks(self) -> World:
        """The ranks that together hold one copy of the model; used only if `splits_batch` is False."""
        return self.world

    # ------------------------------------------------------------ the model

    def expect_inputs(self, example: Callable[[], Sequence[Any]], samples: int, num_microbatches: int) -> None:
        """Set the expected inputs; called before `wrap`.

        example           returns the arguments of one call of the model; raises NotImplementedError if unknown
        samples           number of samples per micro-batch
        num_microbatches  number of micro-batches per update, on one rank
        """

    def wrap(
        self, model: nn.Module, layers: Callable[[], Sequence[nn.Module]], blocks: Sequence[nn.Module]
    ) -> nn.Module:
        """Return the model to call in forward passes; it starts from the same weights on every rank.

        layers  returns modules whose composition is the model, in order; raises if the task does not define them
        blocks  the repeated blocks of the model
        """
        return model

    def describe_placement(self) -> list[str]:
        """Return lines about the placement for the start report, once the model is wrapped."""
        return []

    def owned_parameters(self, named: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
        """Return the parameters that this rank updates."""
        return dict(named)

    # ------------------------------------------------------------ an update

    def begin(self, parameters: Sequence[nn.Parameter]) -> None:
        """Start a phase that trains these parameters."""

    def end(self) -> None:
        """End the phase."""

    def accumulate(self, passes: ForwardPasses, batches: Iterator[MicroBatch]) -> Sums:
        """Accumulate the gradients of all micro-batches of this rank's update.

        Return the sums of their losses and item counts.
        """
        loss_sum: Tensor | None = None
        items: Tensor | int | float = 0
        bad: tuple[tuple[int, str], ...] = ()
        last = False
        stopwatch, widest = self.stopwatch, self.world.widest
        while not last:
            batch, last, skipped, is_counted, *_ = next(batches)
            stopwatch.lap("data")
            bad += skipped
            if not is_counted:  # none of its samples could be read
                continue
            with passes.forward():
                loss, count = passes.loss(passes.model, batch)
            stopwatch.lap("forward")
            passes.backward(loss)
            stopwatch.lap("backward")
            if loss_sum is None:  # a copy, because the next forward pass may overwrite the loss
                loss_sum = loss.detach().to(widest, copy=True)
            else:
                loss_sum += loss.detach()
            items = items + count
        return Sums(self.world.zeros() if loss_sum is None else loss_sum, items, bad)

    def reduce(self, sums: Sums) -> Sums:
        """All-reduce the gradients; return the sums over all ranks.

        Raises Discarded, on every rank, if micro-batches of some rank failed.
        """
        return sums

    def gradients(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """Return the existing gradients as the plain tensors that this rank holds."""
        return [parameter.grad for parameter in parameters if parameter.grad is not None]

    def global_norm(self, local: Tensor) -> Tensor:
        """Return the norm of all gradients, given the norm of those that `gradients` returned."""
        return local

    def any_overflow(self, overflow: Tensor) -> Tensor:
        """Return whether a gradient overflowed on any rank, given this rank's flag; both are 0 or 1."""
        return overflow

    def attach_numbers(self, numbers: Tensor | None) -> bool:
        """All-reduce `numbers` with the gradients of each following update, until other numbers or None replace them.

        `numbers` is a tensor on the host, with the same length on each rank. Returns False if this strategy does not
        support it.
        """
        return False

    def attached_sums(self) -> Tensor | None:
        """Return the sums of the numbers attached to the last update; None if there were none."""
        return None

    def idle_fractions(self) -> Mapping[str, float]:
        """Return the idle fractions of devices in the last update, by metric name; collective."""
        return {}

    def set_groups(self, groups: Sequence[Sequence[nn.Parameter]]) -> None:
        """Divide the parameters of the phase into groups that are updated separately; empty: a single group again."""

    def select_group(self, group: int) -> None:
        """Select the group of the next update; every rank calls it."""

    # ------------------------------------------------------------ between updates

    def buffer_update(self) -> AbstractContextManager[None]:
        """Return a context for an update without gradients, after which buffers are synchronized.

        `reduce` does the same at the end of an update with gradients.
        """
        return nullcontext()

    def check_buffers(self) -> None:
        """Raise TaskFault, on every rank, if buffers differ between ranks; updates keep them equal."""

    def gather_full(self, tensors: Mapping[str, Tensor], copy: Copy = copy_to_host) -> dict[str, Tensor]:
        """Return copies of the full tensors in host memory, on rank 0; other ranks participate and return nothing.

        copy  copies a tensor to the host
        """
        return {name: copy(tensor) for name, tensor in tensors.items()}

    def checkpoint_tensors(self, tensors: Mapping[str, Tensor], copy: Copy = copy_to_host) -> dict[str, Tensor]:
        """Return copies of the tensors that this rank writes to a checkpoint: `gather_full`, or its part of each."""
        return self.gather_full(tensors, copy)

    def checkpoint_bytes(self, tensors: Iterable[Tensor]) -> int:
        """Return the size of what `checkpoint_tensors` returns."""
        return sum(tensor.nbytes for tensor in tensors)

    def load(self, model: nn.Module, saved: Saved) -> None:
        """Load some or all full tensors into the model; names and shapes are already checked. Dtypes are converted."""
        overlapping = {name: tensor for name, tensor in model.state_dict().items() if is_overlapping(tensor)}
        for tensors in read_in_groups(saved, _MAX_READ_BYTES):
            for name in tensors.keys() & overlapping.keys():
                overwrite(overlapping[name], tensors.pop(name))
            model.load_state_dict(tensors, strict=False)

    def merge_state(self, merge: Callable[[State, State], State], state: State) -> State:
        """Merge the statistics that the ranks have computed from their data; `merge` combines two states."""
        return state

    def edit_parameters(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which the ranks may change parameters and buffers, all in the same way."""
        return nullcontext()

    # ------------------------------------------------------------ evaluation

    def gather_parameters(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which each rank can call the model independently, without gradients.

        Any method can be called, but only `forward` if the strategy keeps parts of the model on other ranks.
        """
        return nullcontext()

    def evaluation_batches(self, keys: Sequence[Any]) -> list[Any]:
        """Return the batches of an evaluation that this rank computes."""
        return list(keys)


_MAX_READ_BYTES = 64 << 20  # maximum size of the checkpoint tensors read at once; those of one module may exceed it
