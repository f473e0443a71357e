"""How a global batch is divided: global = micro-batch x accumulation x ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from runner.base.errors import Problem


@dataclass(frozen=True)
class Batch:
    """The identity global = micro x accumulation x ranks."""

    global_batch_size: int
    micro_batch_size: int
    accumulation_steps: int
    world_size: int

    def __str__(self) -> str:
        ranks = f"{self.world_size} rank" + ("s" if self.world_size > 1 else "")
        return (
            f"{self.global_batch_size} samples per update = micro-batch {self.micro_batch_size}"
            f" x {self.accumulation_steps} accumulation x {ranks}"
        )


def divide(total: int, micro: int | Literal["auto"], world_size: int) -> Batch | Problem:
    """Return the division of `total` samples, or what is wrong with the nearest sizes that divide."""
    if micro == "auto":
        if total % world_size:
            return _does_not_divide(total, world_size, f"world_size ({world_size})")
        micro = total // world_size
    product = micro * world_size
    if product > total:
        return _too_large(total, micro, world_size)
    if total % product:
        return _does_not_divide(total, product, f"micro_batch_size x world_size ({micro} x {world_size} = {product})")
    return Batch(total, micro, total // product, world_size)


def _too_large(total: int, micro: int, world_size: int) -> Problem:
    share, rest = divmod(total, world_size)
    limit = (
        f"global_batch_size ({total})"
        if world_size == 1
        else f"global_batch_size / world_size ({total} / {world_size})"
    )
    fixes = [] if rest or not share else [f"micro_batch_size={share}"]
    return Problem(
        f"must be at most {limit}, but is {micro}",
        f"micro_batch_size={micro}",
        "say " + ", or ".join([*fixes, f"global_batch_size={micro * world_size}"]),
    )


def _does_not_divide(total: int, divisor: int, words: str) -> Problem:
    below, above = total // divisor * divisor, -(-total // divisor) * divisor
    near = ", ".join(str(size) for size in (below, above) if size > 0)
    return Problem(f"must be a multiple of {words}, but is {total}", f"global_batch_size={total}", f"nearest: {near}")
