"""Divide the snapshot of one process into the snapshots of ranks that save a checkpoint together."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from runner.durable.checkpoint import Snapshot
from runner.durable.checkpoint_parts import CheckpointPart

RANKS = 3


def parts_of(given: Snapshot, num_ranks: int = RANKS, token: str = "abcd") -> list[Snapshot]:
    """Return the part of each rank, which has some rows of each tensor, possibly none. Scalars belong to rank 0."""
    facts = {**given.facts, "world_size": num_ranks}
    return [
        replace(
            given,
            tensors={stem: _of_rank(tensors, rank, num_ranks) for stem, tensors in given.tensors.items()},
            facts=facts,
            part=CheckpointPart(rank, num_ranks, token),
        )
        for rank in range(num_ranks)
    ]


def _of_rank(tensors: dict[str, Tensor], rank: int, num_ranks: int) -> dict[str, Tensor]:
    result = {}
    for name, tensor in tensors.items():
        if tensor.dim():
            chunks = tensor.chunk(num_ranks)
            result[name] = chunks[rank].clone() if rank < len(chunks) else tensor[:0].clone()
        elif rank == 0:
            result[name] = tensor
    return result
