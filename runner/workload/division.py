"""Divide a global batch into shares of the ranks, and shares into micro-batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from runner.base.errors import Problem
from runner.base.shares import format_equation, rank_shares


@dataclass(frozen=True)
class Batch:
    """Division of a global batch: it is the sum of the shares, and each share is the sum of its micro-batches.

    micro_batch_size  maximum number of samples in a forward pass of a rank
    shares            number of samples per update for each rank, or for each copy of the model on several ranks
    in_one_pass       each rank runs its whole share as one micro-batch, even if shares change during the run
    stages            number of ranks that hold one copy of the model, the stages of a pipeline
    """

    global_batch_size: int
    micro_batch_size: int
    shares: tuple[int, ...]
    in_one_pass: bool = False
    stages: int = 1

    @property
    def num_shares(self) -> int:
        """Return the number of shares, one for each copy of the model."""
        return len(self.shares)

    def share_of(self, rank: int) -> int:
        """Return the number of samples per update that pass through a rank."""
        return self.shares[rank // self.stages]

    @property
    def max_micro_batch_size(self) -> int:
        """Return the size of the largest micro-batch that is possible with any shares."""
        return self.global_batch_size if self.in_one_pass else self.micro_batch_size

    @property
    def accumulation_steps(self) -> int:
        """Return the largest number of micro-batches of any rank."""
        return -(-max(self.shares, default=0) // max(1, self.micro_batch_size))

    def __str__(self) -> str:
        if self.stages > 1:
            num_full, rest = divmod(max(self.shares), self.micro_batch_size)
            parts = [f"{num_full} micro-batches of {self.micro_batch_size}"] + ([f"one of {rest}"] if rest else [])
            text = f"{' and '.join(parts)}, through {self.stages} stages"
            if len(set(self.shares)) > 1:
                text = f"{' + '.join(map(str, self.shares))} samples of {self.num_shares} pipelines, at most {text}"
            elif self.num_shares > 1:
                text += f", in each of {self.num_shares} pipelines"
            return f"{self.global_batch_size} samples per update = {text}"
        product = self.micro_batch_size * self.accumulation_steps * self.num_shares
        if product == self.global_batch_size:
            ranks = f"{self.num_shares} rank" + ("s" if self.num_shares > 1 else "")
            return (
                f"{self.global_batch_size} samples per update = micro-batch {self.micro_batch_size}"
                f" x {self.accumulation_steps} accumulation x {ranks}"
            )
        no_names = [""] * self.num_shares
        return format_equation(
            rank_shares(self.shares, no_names, [None] * self.num_shares, [self.micro_batch_size] * self.num_shares)
        )


def divide(
    total: int, micro: int | Literal["auto"], shares: tuple[int, ...], *, ragged: bool = False
) -> Batch | Problem:
    """Return the division of `total` samples, or a Problem with the nearest valid sizes.

    ragged  allow a smaller last micro-batch of a share: same results, possibly slower kernels
    """
    if micro == "auto":
        return Batch(total, max(shares), shares, in_one_pass=True)
    if micro > max(shares):
        of_ranks = f"the largest share of an update ({max(shares)} of {total})"
        limit = f"global_batch_size ({total})" if len(shares) == 1 else of_ranks
        return Problem(
            f"must be at most {limit}, but is {micro}",
            f"micro_batch_size={micro}",
            f"use micro_batch_size={max(shares)}, or global_batch_size={micro * len(shares)}",
        )
    if not ragged and total % micro:
        # Suggest another micro-batch size first: another global batch size would change the results.
        smaller = max(size for size in range(1, micro) if total % size == 0)
        larger = next((size for size in range(micro, max(shares) + 1) if total % size == 0), smaller)
        sizes = " or ".join(f"micro_batch_size={size}" for size in dict.fromkeys((smaller, larger)))
        multiples = " or ".join(f"global_batch_size={near * micro}" for near in (total // micro, -(-total // micro)))
        return Problem(
            f"must divide global_batch_size ({total}), but is {micro}",
            f"micro_batch_size={micro}",
            f"use {sizes}, or change the update: {multiples}",
        )
    return Batch(total, micro, shares)
