"""Greedy and beam search decoding with a key-value cache."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .model import Cache, Rows, Shape
from .vocabulary import BEGIN, END, PAD


def translate(model: nn.Module, shape: Shape, source: Rows, *, beam: int = 1) -> Tensor:
    """Return the target tokens (B, T) of one source per row: up to and including the end, followed by padding.

    beam  candidates kept at each step; 1 is greedy. The best is the one with the highest mean log probability
    Stops at the maximum target length. Does not wait for the device.
    """
    source = Rows(*(field.repeat_interleave(beam, dim=0) for field in source))
    num_rows, device = len(source.tokens), source.tokens.device
    made = torch.full((num_rows, shape.target_length), PAD, device=device)
    token = torch.full((num_rows, 1), BEGIN, device=device)
    ended = torch.zeros(num_rows, dtype=torch.bool, device=device)
    scores = torch.zeros(num_rows // beam, beam, device=device)
    scores[:, 1:] = float("-inf")  # all candidates are initially equal, so only one continues
    first = torch.arange(0, num_rows, beam, device=device)[:, None]
    cache = Cache(shape)
    for position in range(shape.target_length):
        here = Rows(token, torch.ones_like(token), torch.full_like(token, position))
        logits = model(source, here, cache)[:, -1].float()
        logits[:, [PAD, BEGIN]] = float("-inf")
        log_probs = logits.log_softmax(dim=-1).masked_fill(ended[:, None], float("-inf"))
        log_probs[:, PAD] = torch.where(ended, 0.0, float("-inf"))  # padding of finished candidates has probability 1
        num_tokens = log_probs.shape[-1]
        scores, best = (scores.view(-1, 1) + log_probs).view(-1, beam * num_tokens).topk(beam)
        token = (best % num_tokens).view(-1, 1)
        if beam > 1:
            kept = (first + best // num_tokens).view(-1)
            cache.select(kept)
            made, ended = made[kept], ended[kept]
        made[:, position] = token[:, 0]
        ended |= token[:, 0] == END
    lengths = (made != PAD).sum(dim=-1).view(-1, beam)
    return made[(first + (scores / lengths).argmax(dim=-1, keepdim=True))[:, 0]]
