"""Which blocks of a model are computed again so that a run fits: as few operations as can be."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from runner.plan.memory_trace import Layer

Blocks = tuple[int, ...]


def computed_again(blocks: Sequence[Layer], takes: Callable[[Blocks], int], limit: int) -> Blocks:
    """Return the numbers of the blocks to compute again so that the run takes at most `limit`; all if it never does.

    Those that free most bytes for an operation come first, and of equal ones the earliest: the backward pass comes to
    it last, when the others have given back what they kept, and what it computes again has the room.

    blocks  in the order of the forward pass, with all that they keep
    takes   bytes at the peak, when these are computed again; asked about log2(number of blocks) times
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
    """Return the operations for each byte that is freed."""
    return block.flops / max(1, block.activations)
