"""Numbers on their way from a device to the host: nobody waits for them before they are read."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Arriving:
    """Numbers that are being copied.

    on_host  where they arrive
    arrived  is over when they have; None: nothing had to be copied from a device
    """

    on_host: Tensor
    arrived: torch.Event | None = None

    def is_here(self) -> bool:
        """Tell whether reading would not wait."""
        return self.arrived is None or bool(self.arrived.query())

    def read(self) -> Tensor:
        """Return the numbers; waits until they are here."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.on_host


def sent(numbers: Tensor) -> Arriving:
    """Return a copy of the numbers that is on its way to the host; later changes do not reach it."""
    if numbers.device.type == "cpu":
        return Arriving(numbers.clone())
    on_host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=numbers.device.type == "cuda")
    on_host.copy_(numbers, non_blocking=True)
    arrived = torch.Event(numbers.device)
    arrived.record()
    return Arriving(on_host, arrived)
