"""Bitwise comparison of tensors: NaN equals itself, and 0.0 differs from -0.0."""

from __future__ import annotations

import torch
from torch import Tensor


def is_dense(tensor: Tensor) -> bool:
    """Return whether the tensor's data is in dense memory: not sparse, quantized or meta."""
    return tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_meta


def view_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a dense tensor in row-major order, (nbytes,); a view if it is already contiguous."""
    resolved = tensor.detach().resolve_conj().resolve_neg()  # a lazily conjugated view has other bytes in memory
    # Not view(-1), which keeps the stride of a tensor with one element, such as a row of a column: view(dtype) needs a
    # stride of 1.
    return resolved.contiguous().as_strided((resolved.numel(),), (1,)).view(torch.uint8)


def bitwise_equal(one: Tensor, other: Tensor) -> bool:
    """Return whether two dense tensors, on any devices, are bitwise equal; synchronizes with their devices."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    if one.device != other.device:
        one, other = one.cpu(), other.cpu()
    return torch.equal(view_bytes(one), view_bytes(other))
