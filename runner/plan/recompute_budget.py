"""Choose which blocks of a model to recompute so that a run fits in memory at the lowest compute cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from runner.plan.memory_trace import Layer

Blocks = tuple[int, ...]


def choose_recomputed_blocks(blocks: Sequence[Layer], peak_bytes: Callable[[Blocks], int], limit: int) -> Blocks:
    """Return the indices of the blocks to recompute so that the run needs at most `limit` bytes.

    Blocks that free the most bytes per recomputed operation come first. Ties go to the earlier block, because the
    backward pass reaches it later, when the activations of later blocks have been freed. Returns all blocks if even
    recomputing all of them exceeds the limit.

    blocks      blocks in the order of the forward pass
    peak_bytes  block indices -> peak bytes if these are recomputed; called about log2(number of blocks) times
    """
    order = sorted(range(len(blocks)), key=lambda number: (_cost(blocks[number]), number))
    low, high = 0, len(order)
    while low < high:
        middle = (low + high) // 2
        if peak_bytes(_take_first(order, middle)) <= limit:
            high = middle
        else:
            low = middle + 1
    return _take_first(order, high)


def _take_first(order: Sequence[int], count: int) -> Blocks:
    return tuple(sorted(order[:count]))


def _cost(block: Layer) -> float:
    """Return the recomputed operations per freed byte."""
    return block.flops / max(1, block.activations)
