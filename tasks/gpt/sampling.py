"""New tokens after a prompt, drawn from the model one at a time with a cache of keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from runner.base.errors import ConfigError, Problem
from runner.base.values import Range

from .model import Cache, Shape


@dataclass(frozen=True)
class Sampling:
    """What to sample, and how. Raises ConfigError with all that is wrong.

    prompt          text to continue; empty: the beginning of a document
    samples         number of continuations
    batch_size      samples made at once; each is the same whatever it is
    max_new_tokens  tokens made for each sample, fewer where the model ends the document
    temperature     divides the logits: below 1 likely tokens become likelier, 0 always takes the likeliest
    top_k           only the k likeliest tokens can be drawn; None: all
    """

    prompt: str = ""
    samples: int = 4
    batch_size: int = 16
    max_new_tokens: int = 256
    temperature: float = 0.8
    top_k: int | None = None

    def __post_init__(self) -> None:
        given = {name: getattr(self, name) for name in _ALLOWED}
        problems = [
            Problem(f"must be {_ALLOWED[name].words}, but is {value}", f"inference.{name}")
            for name, value in given.items()
            if not (value is None and name == "top_k") and not _ALLOWED[name].holds(value)
        ]
        if problems:
            raise ConfigError(problems)

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Sampling:
        """Take from `options` what is known here; the rest is for others."""
        return cls(**{field.name: options[field.name] for field in fields(cls) if field.name in options})


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

    num_tokens  tokens that exist; the model's vocabulary may be larger
    Never waits for the device. A context that is full starts anew from its later half, since learned positions
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


_ALLOWED = {
    "samples": Range("a whole number of at least 1", low=1),
    "batch_size": Range("a whole number of at least 1", low=1),
    "max_new_tokens": Range("a whole number of at least 1", low=1),
    "temperature": Range("a number of at least 0", low=0),
    "top_k": Range("a whole number of at least 1, or null", low=1),
}
