"""Encode what a hook logs (numbers, images as PNG, histograms) as JSON values."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import torch
from torch import Tensor


def parse_number(name: str, value: Tensor | float) -> float:
    """Convert a value to a number. Raises TypeError if it is not one, ValueError for the names update and phase."""
    if name in ("update", "phase"):
        raise ValueError(f"{name} is a column of every row: choose another name")
    try:
        return float(value.detach() if isinstance(value, Tensor) else value)  # torch warns if it requires gradients
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{name} must be a number or a tensor with one element, not {type(value).__name__}") from error


def encode_images(images: Tensor) -> dict[str, Any]:
    """Return images as a JSON value for a row of a tracker."""
    return {"kind": "images", "png": [base64.b64encode(image).decode() for image in encode_png(images)]}


def encode_histogram(values: Tensor, bins: int) -> dict[str, Any]:
    """Return a histogram as a JSON value for a row of a tracker."""
    edges, counts = histogram(values, bins)
    return {"kind": "histogram", "edges": edges, "counts": counts}


def encode_png(images: Tensor) -> list[bytes]:
    """Encode (B, C, H, W), (C, H, W) or (H, W) as PNG with 8 bits; floats are clamped to [0, 1].

    Raises ValueError for other shapes.
    """
    stack = images.detach()
    while stack.ndim < 4:
        stack = stack[None]
    if stack.ndim != 4 or stack.shape[1] not in (1, 3) or not stack.numel() or images.ndim < 2:
        raise ValueError(f"images must be (B, C, H, W) with C of 1 or 3, (C, H, W) or (H, W), not {(*images.shape,)}")
    if stack.dtype != torch.uint8:
        stack = stack.float().clamp(0, 1).mul(255).round().to(torch.uint8)
    from PIL import Image  # slow to import

    encoded = []
    for pixels in stack.permute(0, 2, 3, 1).cpu().numpy():  # (H, W, C), or (H, W) for gray
        buffer = io.BytesIO()
        Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels).save(buffer, "PNG")
        encoded.append(buffer.getvalue())
    return encoded


def histogram(values: Tensor, bins: int) -> tuple[list[float], list[int]]:
    """Return the edges of equally wide bins between the smallest and the largest finite value, and the counts."""
    finite = values.detach().double().flatten().cpu()
    counts, edges = np.histogram(finite[finite.isfinite()].numpy(), bins)
    return edges.tolist(), counts.tolist()
