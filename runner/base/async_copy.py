"""Asynchronous copies of numbers from a device to the host; only reading them synchronizes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PendingCopy:
    """A pending copy to the host.

    on_host  destination tensor
    arrived  event recorded after the copy; None if no device copy was needed
    """

    on_host: Tensor
    arrived: torch.Event | None = None

    def is_complete(self) -> bool:
        """Return whether `read` would return without blocking."""
        return self.arrived is None or bool(self.arrived.query())

    def read(self) -> Tensor:
        """Return the numbers; blocks until the copy has finished."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.on_host


def start_copy(numbers: Tensor) -> PendingCopy:
    """Start a non-blocking copy of the numbers to the host and return it; later in-place changes do not affect it."""
    if numbers.device.type == "cpu":
        return PendingCopy(numbers.clone())
    on_host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=numbers.device.type == "cuda")
    on_host.copy_(numbers, non_blocking=True)
    arrived = torch.Event(numbers.device)
    arrived.record()
    return PendingCopy(on_host, arrived)
