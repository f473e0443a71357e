"""Encode what a hook logs (numbers, images as PNG, histograms) as JSON values."""

from __future__ import annotations

import base64
import struct
import zlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

_COLORS = {1: 0, 3: 2}  # channels -> color type of PNG


def parse_number(name: str, value: Tensor | float) -> float:
    """Convert a value to a number. Raises TypeError if it is not one, ValueError for the names update and phase."""
    if name in ("update", "phase"):
        raise ValueError(f"{name} is a column of every row: choose another name")
    try:
        return float(value)
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
    if stack.ndim != 4 or stack.shape[1] not in _COLORS or not stack[0].numel() or images.ndim < 2:
        raise ValueError(f"images must be (B, C, H, W) with C of 1 or 3, (C, H, W) or (H, W), not {(*images.shape,)}")
    if stack.dtype != torch.uint8:
        stack = stack.float().clamp(0, 1).mul(255).round().to(torch.uint8)
    return [_encode_image(image) for image in stack.permute(0, 2, 3, 1).cpu()]


def histogram(values: Tensor, bins: int) -> tuple[list[float], list[int]]:
    """Return the edges of equally wide bins between the smallest and the largest finite value, and the counts."""
    finite = values.detach().double().flatten().cpu()
    counts, edges = np.histogram(finite[finite.isfinite()].numpy(), bins)
    return edges.tolist(), counts.tolist()


def _encode_image(pixels: Tensor) -> bytes:
    """Encode bytes (H, W, C) as PNG. Source: W3C, Portable Network Graphics, third edition, sections 5 and 11."""
    height, width, channels = pixels.shape
    header = struct.pack(">IIBBBBB", width, height, 8, _COLORS[channels], 0, 0, 0)
    lines = torch.cat([torch.zeros(height, 1, dtype=torch.uint8), pixels.reshape(height, -1)], dim=1)
    data = zlib.compress(lines.numpy().tobytes())
    chunks = ((b"IHDR", header), (b"IDAT", data), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
        for kind, content in chunks
    )
