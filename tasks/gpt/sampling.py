"""Autoregressive sampling after a prompt, with a key-value cache."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .model import Cache, Shape


def generate(
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

    num_tokens   number of tokens of the tokenizer; the model's vocabulary may be larger
    temperature  divides the logits; 0: greedy
    top_k        sample from the k most likely tokens; None: from all
    Does not synchronize with the device. When the context is full, the cache is rebuilt from the second half of it,
    because learned position embeddings do not allow a sliding window.
    """
    (batch, count), prompt_length = draws.shape, len(prompt)
    tokens = torch.empty(batch, prompt_length + count, dtype=torch.long, device=draws.device)
    tokens[:, :prompt_length] = prompt
    cache = Cache(shape)
    for end in range(prompt_length, prompt_length + count):
        start = end - 1
        if cache.length in (0, shape.block_size):
            cache = Cache(shape)
            start = 0 if end <= shape.block_size else end - (shape.block_size + 1) // 2
        logits = model(tokens[:, start:end], cache=cache)[:, -1, :num_tokens].float()
        tokens[:, end] = _sample(logits, draws[:, end - prompt_length], temperature, top_k)
    return tokens[:, prompt_length:]


def _sample(logits: Tensor, draw: Tensor, temperature: float, top_k: int | None) -> Tensor:
    """Return the token (B,) at which the cumulative probability passes `draw` (B,)."""
    if temperature == 0:
        return logits.argmax(dim=-1)
    logits = logits / temperature
    if top_k is not None:
        threshold_logit = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < threshold_logit, float("-inf"))
    cumulative = logits.softmax(dim=-1).cumsum(dim=-1)
    # In float32 the sum may be below 1, and a draw close to 1 would be beyond the last token.
    threshold = draw[:, None] * (1 - 1e-6) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, threshold, right=True)[:, 0]
