"""How ranks share the work. One process is a world of size 1 and uses the same verbs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor, nn

from runner.base.task import State
from runner.base.world import World


class Parallel:
    """Verbs of a strategy; this base class is the strategy of a single process."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._nothing = nullcontext()

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the model through which forward passes go."""
        return model

    def sync_gradients(self, *, when: bool) -> AbstractContextManager[None]:
        """Return the context of a forward and backward pass; gradients are summed over ranks only `when`."""
        return self._nothing

    def total(self, items: Tensor | int) -> Tensor | int:
        """Return the items of the update over all ranks."""
        return items

    def merged(self, merge: Callable[[State, State], State], state: State) -> State:
        """Return the statistics of the data of all ranks; `merge` makes one state of two."""
        return state


def single(world: World) -> Parallel:
    """Train in this process on one device."""
    return Parallel(world)


PARALLELISMS: Mapping[str, Callable[..., Parallel]] = {"single": single}
