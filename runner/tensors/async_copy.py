"""Asynchronous copies of tensors from a device to the host; only reading a copy synchronizes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PendingCopy:
    """A copy to the host that may still be in progress.

    host_tensor  destination tensor
    done_event   event recorded after the copy; None if the source was already on the host
    """

    host_tensor: Tensor
    done_event: torch.Event | None = None

    def is_complete(self) -> bool:
        """Return whether `read` would return without blocking."""
        return self.done_event is None or bool(self.done_event.query())

    def read(self) -> Tensor:
        """Block until the copy has finished, and return the tensor on the host."""
        if self.done_event is not None:
            self.done_event.synchronize()
        return self.host_tensor


def start_copy(tensor: Tensor) -> PendingCopy:
    """Start a non-blocking copy of a tensor to the host; later in-place changes to it do not affect the copy."""
    if tensor.device.type == "cpu":
        return PendingCopy(tensor.clone())
    host_tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
    host_tensor.copy_(tensor, non_blocking=True)
    done_event = torch.Event(tensor.device)
    done_event.record()
    return PendingCopy(host_tensor, done_event)
