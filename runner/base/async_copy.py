"""Asynchronous copies of tensors from a device to the host; only reading a copy synchronizes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PendingCopy:
    """A copy to the host that may still be in progress.

    on_host  destination tensor
    arrived  event recorded after the copy; None if the source was already on the host
    """

    on_host: Tensor
    arrived: torch.Event | None = None

    def is_complete(self) -> bool:
        """Return whether `read` would return without blocking."""
        return self.arrived is None or bool(self.arrived.query())

    def read(self) -> Tensor:
        """Block until the copy has finished, and return the tensor on the host."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.on_host


def start_copy(numbers: Tensor) -> PendingCopy:
    """Start a non-blocking copy of a tensor to the host; later in-place changes to it do not affect the copy."""
    if numbers.device.type == "cpu":
        return PendingCopy(numbers.clone())
    on_host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=numbers.device.type == "cuda")
    on_host.copy_(numbers, non_blocking=True)
    arrived = torch.Event(numbers.device)
    arrived.record()
    return PendingCopy(on_host, arrived)
