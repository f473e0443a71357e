"""Interface of the parallelism strategies; the base class implements a single process.

In an update, `accumulate` computes this rank's gradients of the summed losses of its micro-batches; `reduce` sums
gradients over all ranks and returns the true count, by which the loop divides once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from runner.base.batch import MicroBatch
from runner.base.errors import TaskFault
from runner.base.stopwatch import Stopwatch, stopwatch
from runner.base.task import State, Sum
from runner.base.world import World

Copy = Callable[[Tensor], Tensor]


def on_the_host(tensor: Tensor) -> Tensor:
    """Return a copy in fresh host memory."""
    return tensor.detach().to("cpu", copy=True)


def dense_gradient(weight: nn.Parameter, name: str = "") -> Tensor:
    """Return the gradient of a parameter. Raises TaskFault for a sparse one: norms and sums over ranks are of dense."""
    assert weight.grad is not None
    if weight.grad.layout is not torch.strided:
        raise TaskFault(
            "a gradient is sparse, but must be dense",
            where=f"parameter {name}" if name else f"a parameter of shape {tuple(weight.shape)}",
            fix="use sparse=False where the nn.Embedding is made",
        )
    return weight.grad


class Discarded(Exception):
    """Memory ran out in the passes of some rank: every rank raises this, and none of them applies the update."""


def _raised(error: Exception) -> None:
    raise error


class Passes(NamedTuple):
    """What turns a micro-batch into gradients.

    model     what forward passes go through
    loss      (model, batch) -> (loss summed over items, number of items)
    forward   () -> context of a forward pass: the number format
    backward  (loss sum) -> None: adds its gradients, scaled into range
    scale     (loss sum) -> what `backward` starts from, for strategies that go backward themselves
    failed    takes note of what a pass raised, and frees what it held; raises it where the update cannot be discarded
    """

    model: nn.Module
    loss: Callable[[nn.Module, Any], Sum]
    forward: Callable[[], AbstractContextManager[Any]]
    backward: Callable[[Tensor], None]
    scale: Callable[[Tensor], Tensor] = lambda loss: loss
    failed: Callable[[Exception], None] = _raised


class Sums(NamedTuple):
    """Loss and items of the micro-batches of an update, of one rank or of all; tensors stay on the device."""

    loss_sum: Tensor
    items: Tensor | int | float
    bad: tuple[tuple[int, str], ...] = ()
    failed: bool = False  # this rank's passes: there is nothing to be added


class Parallel:
    """Verbs of a strategy; this base class is that of a single process.

    in_step       every rank must make the same number of passes in each update, for there are collectives inside them
    splits_batch  each rank gets its share of an update; False: every rank reads all of it
    places_model  `wrap` moves to the device what this rank keeps; the whole model may be too large for it

    An update whose passes failed on some rank is discarded by all of them, unless they are in step: who fails inside a
    collective leaves the others waiting in it, and the ranks must be started again.
    """

    in_step = False
    splits_batch = True
    places_model = False

    def __init__(self, world: World) -> None:
        self.world = world
        self.watch: Stopwatch = stopwatch(world.device)

    # ------------------------------------------------------------ the model

    def expect(self, example: Callable[[], Sequence[Tensor]], samples: int, num_microbatches: int) -> None:
        """Be told, before `wrap`, what passes will be like.

        example           returns the arguments of one call of the model; raises NotImplementedError where none is known
        samples           of a micro-batch
        num_microbatches  of an update, on one rank
        """

    def wrap(
        self, model: nn.Module, layers: Callable[[], Sequence[nn.Module]], blocks: Sequence[nn.Module]
    ) -> nn.Module:
        """Return the model through which forward passes go; it starts from the same weights on every rank.

        layers  returns modules whose composition is the model, in order; raises where the task does not tell
        blocks  the repeated blocks of the model
        """
        return model

    def described(self) -> list[str]:
        """Return lines for the start report on what is where, once the model is wrapped."""
        return []

    def owned(self, named: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
        """Return those of the parameters that this rank updates."""
        return dict(named)

    # ------------------------------------------------------------ an update

    def begin(self, parameters: Sequence[nn.Parameter]) -> None:
        """A phase that trains these parameters begins."""

    def end(self) -> None:
        """The phase is over."""

    def accumulate(self, passes: Passes, batches: Iterator[MicroBatch]) -> Sums:
        """Add the gradients of all micro-batches of an update of this rank; return their sums."""
        loss_sum = self.world.zeros()  # wider than the loss, which may be of bfloat16
        items: Tensor | int | float = 0
        bad: tuple[tuple[int, str], ...] = ()
        last = False
        watch = self.watch
        while not last:
            batch, last, skipped, _, _ = next(batches)
            watch.lap("data")
            with passes.forward():
                loss, count = passes.loss(passes.model, batch)
            watch.lap("forward")
            passes.backward(loss)
            watch.lap("backward")
            loss_sum += loss.detach()
            items = items + count
            bad += skipped
        return Sums(loss_sum, items, bad)

    def reduce(self, sums: Sums) -> Sums:
        """Make the gradients those of all ranks; return the sums over all ranks.

        Raises Discarded, on every rank alike, where the passes of some rank failed.
        """
        return sums

    def gradients(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """Return the gradients that are there, as the plain tensors that this rank holds of them."""
        return [parameter.grad for parameter in parameters if parameter.grad is not None]

    def norm(self, local: Tensor) -> Tensor:
        """Return the norm of all gradients from that of the ones that `gradients` returned."""
        return local

    def overflow(self, found: Tensor) -> Tensor:
        """Return whether a gradient of any rank overflowed, from whether one of this rank did; 0 or 1."""
        return found

    def idle(self) -> Mapping[str, float]:
        """Return how idle devices were in the last update, by the name of a metric; all ranks must ask."""
        return {}

    # ------------------------------------------------------------ between updates

    def update_of_buffers(self) -> AbstractContextManager[None]:
        """Return a context around an update without gradients, after which ranks have the same buffers again.

        `reduce` does the same at the end of an update with gradients.
        """
        return nullcontext()

    def check_buffers(self) -> None:
        """Raise TaskFault, on every rank, where ranks have different buffers; updates leave them equal."""

    def whole(self, tensors: Mapping[str, Tensor], copy: Copy = on_the_host) -> dict[str, Tensor]:
        """Return copies of the whole tensors in host memory, on rank 0; the others help and return nothing.

        copy  makes a copy on the host
        """
        return {name: copy(tensor) for name, tensor in tensors.items()}

    def load(self, model: nn.Module, saved: Mapping[str, Tensor]) -> None:
        """Put whole tensors into the model; names, shapes and dtypes were checked."""
        model.load_state_dict(saved, strict=True)

    def merged(self, merge: Callable[[State, State], State], state: State) -> State:
        """Return the statistics of the data of all ranks; `merge` makes one state of two."""
        return state

    def editable(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which every rank may write into parameters and buffers, all of them the same."""
        return nullcontext()

    # ------------------------------------------------------------ evaluation

    def gathered(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which any method of the model can be called, without gradients, out of step."""
        return nullcontext()

    def dealt(self, keys: Sequence[Any]) -> list[Any]:
        """Return the batches of an evaluation that this rank makes."""
        return list(keys)
