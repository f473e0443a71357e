"""Divide a global batch into shares of the ranks, and shares into micro-batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from runner.base.errors import Problem
from runner.base.shares import format_identity, rank_shares


@dataclass(frozen=True)
class Batch:
    """Division of a global batch: it is the sum of the shares, and each share is the sum of its micro-batches.

    micro_batch_size  maximum number of samples in a forward pass of a rank
    shares            samples per update for each rank
    in_one_pass       each rank runs its whole share as one micro-batch, also if shares change during the run
    stages            pipeline stages (ranks) per micro-batch; 1: each rank has separate micro-batches
    """

    global_batch_size: int
    micro_batch_size: int
    shares: tuple[int, ...]
    in_one_pass: bool = False
    stages: int = 1

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return len(self.shares)

    @property
    def max_micro_batch_size(self) -> int:
        """Return the largest micro-batch that any shares can lead to."""
        return self.global_batch_size if self.in_one_pass else self.micro_batch_size

    @property
    def accumulation_steps(self) -> int:
        """Return the largest number of micro-batches of any rank."""
        return -(-max(self.shares, default=0) // max(1, self.micro_batch_size))

    def __str__(self) -> str:
        if self.stages > 1:
            parts = [f"{self.accumulation_steps} micro-batches of {self.micro_batch_size}"]
            num_full, rest = divmod(self.global_batch_size, self.micro_batch_size)
            parts = [f"{num_full} micro-batches of {self.micro_batch_size}", f"one of {rest}"] if rest else parts
            return f"{self.global_batch_size} samples per update = {' and '.join(parts)}, through {self.stages} stages"
        product = self.micro_batch_size * self.accumulation_steps * self.world_size
        if product == self.global_batch_size:
            ranks = f"{self.world_size} rank" + ("s" if self.world_size > 1 else "")
            return (
                f"{self.global_batch_size} samples per update = micro-batch {self.micro_batch_size}"
                f" x {self.accumulation_steps} accumulation x {ranks}"
            )
        no_names = [""] * self.world_size
        return format_identity(
            rank_shares(self.shares, no_names, [None] * self.world_size, [self.micro_batch_size] * self.world_size)
        )


def divide(
    total: int, micro: int | Literal["auto"], shares: tuple[int, ...], *, ragged: bool = False
) -> Batch | Problem:
    """Return the division of `total` samples, or a Problem that lists the nearest valid sizes.

    ragged  allow a smaller last micro-batch of a share: same results, possibly slower kernels
    """
    if micro == "auto":
        return Batch(total, max(shares), shares, in_one_pass=True)
    if micro > max(shares):
        return _too_large(total, micro, shares)
    if not ragged and total % micro:
        return _does_not_divide(total, micro)
    return Batch(total, micro, shares)


def _too_large(total: int, micro: int, shares: tuple[int, ...]) -> Problem:
    of_ranks = f"the largest share of a rank ({max(shares)} of {total})"
    limit = f"global_batch_size ({total})" if len(shares) == 1 else of_ranks
    return Problem(
        f"must be at most {limit}, but is {micro}",
        f"micro_batch_size={micro}",
        f"use micro_batch_size={max(shares)}, or global_batch_size={micro * len(shares)}",
    )


def _does_not_divide(total: int, micro: int) -> Problem:
    below, above = total // micro * micro, -(-total // micro) * micro
    near = ", ".join(str(size) for size in (below, above) if size > 0)
    what = f"must be a multiple of micro_batch_size ({micro}), but is {total}"
    return Problem(what, f"global_batch_size={total}", f"nearest: {near}")
