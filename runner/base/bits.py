"""Whether tensors hold the same bits: NaN equals itself, and 0.0 is not -0.0."""

from __future__ import annotations

import torch
from torch import Tensor


def is_dense(tensor: Tensor) -> bool:
    """Tell whether its bits are in memory: no sparse or quantized tensor, and none without content."""
    return tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_meta


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a dense tensor in row-major order, (nbytes,); not a copy where it lies so already."""
    resolved = tensor.detach().resolve_conj().resolve_neg()  # bytes of a lazily conjugated view are not its numbers
    return resolved.contiguous().view(-1).view(torch.uint8)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Tell whether two dense tensors, on any devices, hold the same bits; waits for the devices."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    if one.device != other.device:
        one, other = one.cpu(), other.cpu()
    return torch.equal(as_bytes(one), as_bytes(other))
