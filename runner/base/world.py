"""The processes that train together: one process is a world of size 1, not a special case."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class World:
    """Rank, size and device of this process, and the few collectives the engine needs.

    watched_from  folder where our own launcher sees how its ranks stand; None: somebody else has started them

    A collective must be called by all ranks, in the same order. In a world of size 1 it returns what it was given.
    """

    device: torch.device
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    num_local_ranks: int = 1
    watched_from: Path | None = None

    @property
    def is_watched(self) -> bool:
        """True where ranks that leave are started again, fewer of them, by whoever started these."""
        return self.watched_from is not None

    @property
    def is_imagined(self) -> bool:
        """True where the other ranks are not there; see runner.distributed.join."""
        return False

    @property
    def is_first(self) -> bool:
        """True on the rank that writes and speaks."""
        return self.rank == 0

    @property
    def widest(self) -> torch.dtype:
        """float64, or float32 where the device has no float64: what sums and counts are added in."""
        return torch.float32 if self.device.type == "mps" else torch.float64

    def zeros(self, *shape: int) -> Tensor:
        """Return zeros on this world's device, in its widest format."""
        return torch.zeros(shape, dtype=self.widest, device=self.device)

    def synchronize(self) -> None:
        """Wait until the device has done all that was asked of it."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def sum(self, tensor: Tensor) -> Tensor:
        """Add the tensors of all ranks, in place; return it."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def sum_later(self, tensor: Tensor) -> Any:
        """Begin to add the tensors of all ranks, in place; `wait()` of what is returned ends when that is done."""
        assert self.world_size > 1, "a rank alone has nobody to wait for"
        return dist.all_reduce(tensor, async_op=True)

    def largest(self, tensor: Tensor) -> Tensor:
        """Take the elementwise maximum over all ranks, in place; return it."""
        if self.world_size > 1:
            dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return tensor

    def gather(self, value: Any) -> list[Any]:
        """Return the JSON-able value of every rank, in their order, on every rank."""
        if self.world_size == 1:
            return [value]
        mine = _encoded(value)
        sizes = torch.zeros(self.world_size, dtype=torch.int64)
        sizes[self.rank] = len(mine)
        dist.all_reduce(sizes)
        padded = torch.zeros(int(sizes.max()), dtype=torch.uint8)
        padded[: len(mine)] = mine
        rows = [torch.empty_like(padded) for _ in range(self.world_size)]
        dist.all_gather(rows, padded)
        return [_decoded(row[:size]) for row, size in zip(rows, sizes.tolist(), strict=True)]

    def from_first(self, value: Any) -> Any:
        """Return the JSON-able value of rank 0; what the others give does not matter."""
        if self.world_size == 1:
            return value
        mine = _encoded(value if self.is_first else None)
        size = torch.tensor([len(mine)])
        dist.broadcast(size, 0)
        content = mine if self.is_first else torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(content, 0)
        return _decoded(content)

    def any(self, flag: bool) -> bool:
        """Tell whether the flag of some rank is set."""
        if self.world_size == 1:
            return flag
        return bool(self.largest(torch.tensor([int(flag)])).item())


def _encoded(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _decoded(content: Tensor) -> Any:
    return json.loads(content.numpy().tobytes())
