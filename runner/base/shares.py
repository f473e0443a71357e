"""Divide the samples of an update among ranks: the share of a rank is the number of samples that it processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import groupby

from runner.base.errors import Problem
from runner.base.text import format_table

Shares = tuple[int, ...]

GIB = 2**30
LINE_WIDTH = 120


def split_proportionally(total: int, weights: Sequence[float]) -> Shares:
    """Return integers that sum to `total`, proportional to `weights` by the largest remainder method (Hamilton).

    A rank with a positive weight gets at least 1 sample if there are enough; a rank with weight 0 gets none. Ties favor
    the lower rank. Uses exact fractions, so the result is the same on every machine.
    """
    assert min(weights) >= 0 < max(weights), weights
    ranks = [rank for rank, weight in enumerate(weights) if weight > 0]
    minimum = 1 if total >= len(ranks) else 0
    quotas = _quotas(total, {rank: Fraction(weights[rank]) for rank in ranks}, minimum)
    shares = {rank: int(quota) for rank, quota in quotas.items()}
    by_remainder = sorted(ranks, key=lambda rank: (shares[rank] - quotas[rank], rank))
    for rank in by_remainder[: total - sum(shares.values())]:
        shares[rank] += 1
    return tuple(shares.get(rank, 0) for rank in range(len(weights)))


def distribute_samples(num_samples: int, shares: Sequence[int]) -> Shares:
    """Return the number of samples that each rank gets from an update of `num_samples` samples.

    This is the share of the rank, except in the last update of an epoch if it is smaller. Its samples are divided in
    proportion to the shares: all are distributed, no rank gets more than its share, and a rank may get 0.
    """
    return tuple(shares) if num_samples == sum(shares) else split_proportionally(num_samples, shares)


def rank_slices(num_samples: int, shares: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return the (start, stop) of each rank in an update of `num_samples` samples: contiguous, in rank order."""
    parts = distribute_samples(num_samples, shares)
    starts = [sum(parts[:rank]) for rank in range(len(parts))]
    return tuple((start, start + part) for start, part in zip(starts, parts, strict=True))


def equal_shares(world_size: int, total: int) -> Shares | Problem:
    """Return shares that differ by at most 1, or a Problem if there are more ranks than samples."""
    return fixed_shares((1,) * world_size, world_size, total)


def fixed_shares(shares: Sequence[int], world_size: int, total: int) -> Shares | Problem:
    """Return the user's shares, treated as proportions if they do not sum to `total`, or a Problem."""
    where = f"parallelism.shares={format_shares(shares)}"
    if world_size > total:
        what = f"must be at least the number of ranks ({world_size}), but is {total}"
        return Problem(
            what, f"global_batch_size={total}", f"use parallelism.world_size={total}, or global_batch_size={world_size}"
        )
    if len(shares) != world_size:
        what = f"must have one number per rank ({world_size}), but has {len(shares)}"
        return Problem(what, where, f"give {world_size} numbers, or use parallelism.world_size={max(1, len(shares))}")
    if min(shares) < 1:
        rank = next(rank for rank, share in enumerate(shares) if share < 1)
        what = f"must be at least 1 for each rank, but is {shares[rank]} for rank {rank}"
        return Problem(what, where, f"leave rank {rank} out with parallelism.world_size={max(1, world_size - 1)}")
    return tuple(shares) if sum(shares) == total else split_proportionally(total, shares)


@dataclass(frozen=True)
class RankShare:
    """One rank's part of an update.

    share             number of samples
    percent           percentage of the samples of an update
    micro_batch_size  size of the largest micro-batch; 0 if the rank has no samples
    passes            sizes of the micro-batches, in order
    """

    rank: int
    device: str
    memory_bytes: int | None
    share: int
    percent: float
    micro_batch_size: int

    @property
    def passes(self) -> Shares:
        if not self.share:
            return ()
        whole, rest = divmod(self.share, self.micro_batch_size)
        return (self.micro_batch_size,) * whole + ((rest,) if rest else ())

    @property
    def product(self) -> str:
        """Number and sizes of the micro-batches as text: `1 x 19`, `2 x 8 + 3`."""
        if not self.share:
            return "none"
        whole, rest = divmod(self.share, self.micro_batch_size)
        return f"{whole} x {self.micro_batch_size}" + (f" + {rest}" if rest else "")


def rank_shares(
    shares: Sequence[int],
    devices: Sequence[str],
    memory_bytes: Sequence[int | None],
    micro_batch_sizes: Sequence[int | None],
) -> tuple[RankShare, ...]:
    """Return one row per rank. A rank whose micro-batch size is missing or exceeds its share has one micro-batch."""
    total = sum(shares)
    return tuple(
        RankShare(rank, device, memory, share, 100 * share / total, min(micro or share, share))
        for rank, (share, device, memory, micro) in enumerate(
            zip(shares, devices, memory_bytes, micro_batch_sizes, strict=True)
        )
    )


def format_equation(rows: Sequence[RankShare]) -> str:
    """Format the shares as a sum: `32 samples per update = 19 (rank 0: 2 x 8 + 3) + 13 (rank 1: 1 x 8 + 5)`.

    Adjacent ranks with equal shares and micro-batches become one term: `4 x 16 (ranks 0-3: 2 x 8)`. If the line would
    still exceed 120 columns, it contains only what `format_sum` returns for the shares.
    """
    lead = f"{sum(row.share for row in rows)} samples per update = "
    runs = [list(run) for _, run in groupby(rows, key=lambda row: (row.share, row.micro_batch_size))]
    line = lead + " + ".join(_format_term(run) for run in runs)
    return line if len(line) <= LINE_WIDTH else lead + format_sum([row.share for row in rows])


def format_sum(shares: Sequence[int]) -> str:
    """Return `19 + 13`. If there are too many ranks for that, return `64 ranks, 3 to 9 each`."""
    text = " + ".join(str(share) for share in shares)
    return text if len(text) <= LINE_WIDTH // 2 else f"{len(shares)} ranks, {min(shares)} to {max(shares)} each"


def format_lines(rows: Sequence[RankShare]) -> list[str]:
    """Format the rows as a table of plain text: a header, then one line per rank."""
    heading = ("rank", "share", "micro-batches", "memory", "device")
    return format_table([heading, *(_format_cells(row) for row in rows)], ">><><")


def format_shares(shares: Sequence[int]) -> str:
    """Format shares as on the command line: `[19,13]`."""
    return "[" + ",".join(str(share) for share in shares) + "]"


def _quotas(total: int, weights: dict[int, Fraction], minimum: int) -> dict[int, Fraction]:
    """Return fractions that sum to `total`: each is its weight times a common factor, but at least `minimum`."""
    quotas: dict[int, Fraction] = {}
    free = dict(weights)
    while True:
        factor = (total - sum(quotas.values(), Fraction(0))) / sum(free.values(), Fraction(0))
        below = [rank for rank, weight in free.items() if factor * weight < minimum]
        if not below:
            return quotas | {rank: factor * weight for rank, weight in free.items()}
        for rank in below:
            quotas[rank] = Fraction(minimum)
            del free[rank]


def _format_term(run: Sequence[RankShare]) -> str:
    first, last = run[0], run[-1]
    if len(run) == 1:
        return f"{first.share} (rank {first.rank}: {first.product})"
    return f"{len(run)} x {first.share} (ranks {first.rank}-{last.rank}: {first.product})"


def _format_cells(row: RankShare) -> tuple[str, ...]:
    memory = "unknown" if row.memory_bytes is None else f"{row.memory_bytes / GIB:.1f} GiB"
    return str(row.rank), f"{row.share} ({row.percent:.0f}%)", row.product, memory, row.device
