"""Choose the blocks of a model to recompute so that a run fits, with the fewest operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from runner.plan.memory_trace import Layer

Blocks = tuple[int, ...]


def computed_again(blocks: Sequence[Layer], takes: Callable[[Blocks], int], limit: int) -> Blocks:
    """Return the indices of the blocks to recompute so that the run needs at most `limit` bytes; all if not enough.

    Blocks that free most bytes per operation come first; of equal ones the earliest, because the backward pass
    reaches them last, when the others have freed their activations.

    blocks  in the order of the forward pass, with their activations
    takes   block indices -> peak bytes if these are recomputed; called about log2(number of blocks) times
    """
    order = sorted(range(len(blocks)), key=lambda number: (_cost(blocks[number]), number))
    few, many = 0, len(order)
    while few < many:
        middle = (few + many) // 2
        if takes(_first(order, middle)) <= limit:
            many = middle
        else:
            few = middle + 1
    return _first(order, many)


def _first(order: Sequence[int], count: int) -> Blocks:
    return tuple(sorted(order[:count]))


def _cost(block: Layer) -> float:
    """Return the operations per freed byte."""
    return block.flops / max(1, block.activations)
