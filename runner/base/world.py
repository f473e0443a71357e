"""The processes that train together: one process is a world of size 1, not a special case."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class World:
    """Rank, size and device of this process, and the few collectives the engine needs."""

    device: torch.device
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    num_local_ranks: int = 1

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
        return torch.zeros(*shape, dtype=self.widest, device=self.device)

    def synchronize(self) -> None:
        """Wait until the device has done all that was asked of it."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
