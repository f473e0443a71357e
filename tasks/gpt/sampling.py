"""New tokens after a prompt, drawn from the model one at a time with a cache of keys and values."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .model import Cache, Shape


def continuations(
    model: nn.Module,
    shape: Shape,
    prompt: Tensor,
    draws: Tensor,
    *,
    num_tokens: int,
    temperature: float,
    top_k: int | None,
) -> Tensor:
    """Return new tokens (B, N) after the prompt (T,), one for each of `draws` (B, N), which are uniform in [0, 1).

    num_tokens   tokens that exist; the model's vocabulary may be larger
    temperature  divides the logits; 0 always takes the likeliest token
    top_k        only the k likeliest tokens can be drawn; None: all
    Never waits for the device. A full context restarts from its later half, since learned positions
    cannot slide.
    """
    (batch, count), given = draws.shape, len(prompt)
    tokens = torch.empty(batch, given + count, dtype=torch.long, device=draws.device)
    tokens[:, :given] = prompt
    cache = Cache(shape)
    for end in range(given, given + count):
        start = end - 1
        if cache.length in (0, shape.block_size):
            cache = Cache(shape)
            start = 0 if end <= shape.block_size else end - (shape.block_size + 1) // 2
        logits = model(tokens[:, start:end], cache=cache)[:, -1, :num_tokens].float()
        tokens[:, end] = _choose(logits, draws[:, end - given], temperature, top_k)
    return tokens[:, given:]


def _choose(logits: Tensor, draw: Tensor, temperature: float, top_k: int | None) -> Tensor:
    """Return the token (B,) at which the cumulative probability passes `draw` (B,)."""
    if temperature == 0:
        return logits.argmax(dim=-1)
    logits = logits / temperature
    if top_k is not None:
        least = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    cumulative = logits.softmax(dim=-1).cumsum(dim=-1)
    # In float32 the sum is not quite 1, and a draw of almost 1 would fall behind the last token.
    threshold = draw[:, None] * (1 - 1e-6) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, threshold, right=True)[:, 0]
