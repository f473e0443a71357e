"""A sketch of the weights: two processes compare it instead of exchanging all weights."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from runner.base.accelerator import widest_dtype

NUM_SUMS = 1024


def sketch(weights: Iterable[Tensor]) -> Tensor:
    """Return a count sketch of the weights, of shape (NUM_SUMS,): each weight is added to one sum, with a sign.

    Sum and sign depend on the position of the weight. The sketch is linear: the difference of two sketches is the
    sketch of the difference. It preserves lengths and angles to about 1 / sqrt(NUM_SUMS), and is the same on every
    device, except for rounding. It does not synchronize with the device and does not use random state.
    Source: Charikar, Chen and Farach-Colton, Finding frequent items in data streams, ICALP 2002.
    """
    sums: Tensor | None = None
    with torch.no_grad():
        for number, weight in enumerate(weights):
            flat = weight.detach().reshape(-1)
            for begin in range(0, flat.numel(), CHUNK):
                part = flat[begin : begin + CHUNK]
                signed = part.to(widest_dtype(part.device)) * _signs(part, begin, number)
                rows = torch.nn.functional.pad(signed, (0, -len(signed) % NUM_SUMS)).view(-1, NUM_SUMS)
                partial = rows.sum(0).roll(number * 131)  # tensors of the same shape start at different sums
                sums = partial if sums is None else sums + partial.to(sums.device)
    return torch.zeros(NUM_SUMS) if sums is None else sums


def _signs(part: Tensor, begin: int, number: int) -> Tensor:
    """Return a pseudorandom -1 or 1 for each value by its position, so that equal values do not cancel systematically.

    Follows mix64 of Steele, Lea and Flood, Fast splittable pseudorandom number generators, OOPSLA 2014, but with
    arithmetic shifts, because torch has no logical shift of signed integers.
    """
    mixed = torch.arange(begin, begin + part.numel(), device=part.device, dtype=torch.int64) + (number << 40)
    for shift, factor in _MIX:
        mixed = (mixed ^ (mixed >> shift)) * factor
    return (mixed >> 32 & 1) * 2 - 1


_MIX = ((33, -0x00AE502812AA7333), (33, -0x3B314601E57A13AD))  # as signed 64-bit integers
CHUNK = 1 << 20  # values per step, a multiple of NUM_SUMS; bounds the memory for the signs to 8 MiB
