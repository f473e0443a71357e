"""The model as a sequence of layers, for a pipeline.

The layers pass the state of both sides, the segments and positions of their tokens and, with dropout, the keys of its
random numbers. All are floating-point tensors, because integers below 2**24 are exact in float32.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runner.base.noise import SampleNoise
from runner.base.task import FunctionLayer

from .model import (
    ALL_VISIBLE,
    Cache,
    PairNoise,
    Rows,
    Transformer,
    embed,
    make_attention_mask,
    source_draws,
    target_draws,
)

Values = tuple[Tensor, ...]


def split_layers(model: Transformer) -> list[nn.Module]:
    """Return modules whose composition is the model; they share its parameters."""
    rates, packed = model.rates, model.packed

    def begin(source: Rows, target: Rows, cache: Cache | None = None, noise: PairNoise | None = None) -> Values:
        if cache is not None:
            target = cache.append(target)
        x = embed(model.embedding, model.source_positions, source, rates.residual, source_draws(rates, noise, source))
        draws = target_draws(rates, noise, source, target)
        y = embed(model.embedding, model.target_positions, target, rates.residual, draws)
        passed = () if noise is None else (_pack_keys(noise.pairs.keys), noise.places.float())
        return x, y, _pack_rows(source), _pack_rows(target), *passed

    def encode(number: int, values: Values) -> Values:
        x, y, *rest = values
        source, _, noise = _unpack(rest)
        draws = source_draws(rates, noise, source).of_layer(number)
        return model.encoder[number](x, make_attention_mask(source, source, packed=packed), draws), y, *rest

    def end_source(values: Values) -> Values:
        x, *rest = values
        return model.encoder_norm(x), *rest

    def decode(number: int, values: Values) -> Values:
        memory, y, *rest = values
        source, target, noise = _unpack(rest)
        own = make_attention_mask(target, target, packed=True) if packed else ALL_VISIBLE
        draws = target_draws(rates, noise, source, target).of_layer(number)
        y = model.decoder[number](y, memory, own, make_attention_mask(target, source, packed=packed), None, draws)
        return memory, y, *rest

    def end(values: Values) -> Tensor:
        return F.linear(model.decoder_norm(values[1]), model.embedding.weight)

    return [
        FunctionLayer(begin, model.embedding, model.source_positions, model.target_positions),
        *(FunctionLayer(partial(encode, number), layer) for number, layer in enumerate(model.encoder)),
        FunctionLayer(end_source, model.encoder_norm),
        *(FunctionLayer(partial(decode, number), layer) for number, layer in enumerate(model.decoder)),
        FunctionLayer(end, model.decoder_norm, model.embedding),
    ]


def _pack_rows(rows: Rows) -> Tensor:
    """Return segments and positions (R, L, 2)."""
    return torch.stack([rows.segments, rows.positions], dim=-1).float()


def _unpack(rest: list[Tensor]) -> tuple[Rows, Rows, PairNoise | None]:
    """Return source, target and random numbers. Tokens are missing, because only the embeddings need them."""
    source, target = (Rows(rows[..., 0], *rows.long().unbind(dim=-1)) for rows in rest[:2])
    if len(rest) == 2:
        return source, target, None
    keys, places = rest[2:]
    return source, target, PairNoise(SampleNoise(_unpack_keys(keys)), places.long())


def _pack_keys(keys: Tensor) -> Tensor:
    """Return 64-bit numbers (N,) as four of 16 bits (N, 4)."""
    return torch.stack([(keys >> shift) & 0xFFFF for shift in _SHIFTS], dim=-1).float()


def _unpack_keys(parts: Tensor) -> Tensor:
    keys = torch.zeros_like(parts[:, 0], dtype=torch.int64)
    for part, shift in zip(parts.long().unbind(dim=-1), _SHIFTS, strict=True):
        keys = keys | (part << shift)
    return keys


_SHIFTS = (0, 16, 32, 48)
